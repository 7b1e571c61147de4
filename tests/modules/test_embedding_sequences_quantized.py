"""Rows of tables in 8 bits, not pooled, against the numbers that they stand for, the float collection's and TorchRec's."""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor, nn
from torch.ao.quantization import PlaceholderObserver, quantize_dynamic
from torchrec.fx import Tracer
from torchrec.inference.modules import quantize_inference_model
from torchrec.modules.embedding_configs import DataType, EmbeddingConfig, QuantConfig
from torchrec.modules.embedding_modules import EmbeddingCollection, EmbeddingCollectionInterface
from torchrec.quant.embedding_modules import EmbeddingCollection as QuantisedByTorchRec
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from jagged.modules import QuantizedEmbeddingCollection, ScheduledEmbeddingCollection
from tests.modules.test_collections_contract import MALFORMED, UNKNOWN, batch_of, on_device
from tests.modules.test_embedding_sequences import KEYS, WIDTH, features_of, same, some_tables, table
from tests.places import PLACE, Place
from tests.reference.embedding_bag import dequantised
from tests.strategies import seeds

pytestmark = [
    pytest.mark.skipif(PLACE.name == "interpret", reason="modules run on the place's own backend"),
    # PyTorch's own quantisation says that it is going to move.
    pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning"),
]

NAMES = ["a@x", "b", "c", "a@z"]
BYTES = QuantConfig(
    activation=PlaceholderObserver.with_args(dtype=torch.float), weight=PlaceholderObserver.with_args(dtype=torch.int8)
)


def floats_of(
    configs: list[EmbeddingConfig], of: type[nn.Module] = ScheduledEmbeddingCollection, **options: Any
) -> EmbeddingCollectionInterface:
    torch.manual_seed(0)
    return of(configs, torch.device(PLACE.device), **options)


def quantised(**options: Any) -> QuantizedEmbeddingCollection:
    return QuantizedEmbeddingCollection.from_float(floats_of(some_tables(), **options))


def numbers_of(module: QuantizedEmbeddingCollection) -> dict[str, Tensor]:
    """Return the tables' numbers, by the tables' names."""
    layout, names = module._parts[0].layout, [config.name for config in module.embedding_configs()]
    return dict(zip(names, dequantised(layout.views(module.weights), list(module.scales.split(layout.rows))), strict=True))


def check(module: QuantizedEmbeddingCollection, features: KeyedJaggedTensor) -> None:
    """The rows of every feature are those of its table's numbers; of keys that stand twice the last one is read."""
    found, numbers = module(features), numbers_of(module)
    ends = dict(zip(features.keys(), torch.tensor(features.length_per_key()).cumsum(0).tolist(), strict=True))
    counts = dict(zip(features.keys(), features.length_per_key(), strict=True))
    lengths = dict(zip(features.keys(), features.lengths().split(features.stride_per_key()), strict=True))
    expected = {}
    for config, names in zip(module.embedding_configs(), module.embedding_names_by_table(), strict=True):
        for key, name in zip(config.feature_names, names, strict=True):
            ids = features.values()[ends[key] - counts[key] : ends[key]]
            weights = ids if module.need_indices() else None
            expected[name] = JaggedTensor(numbers[config.name][ids.long()], lengths=lengths[key], weights=weights)
    assert list(found) == list(expected)
    for name, of in found.items():
        assert of.values().dtype == torch.float32
        # One rounding of the product apart.
        torch.testing.assert_close(of.values(), expected[name].values(), rtol=1.3e-6, atol=1e-7)
        assert torch.equal(of.lengths(), expected[name].lengths())
        assert torch.equal(of.offsets().long(), expected[name].offsets().long())
        assert (of.weights_or_none() is None) == (not module.need_indices())
        assert of.weights_or_none() is None or torch.equal(of.weights(), expected[name].weights())


@given(
    seeds(),
    st.integers(1, 5),
    st.permutations([*KEYS, "unread"]),
    st.sampled_from([0, 1, 6, 30]),
    st.booleans(),
    st.sampled_from([ScheduledEmbeddingCollection, EmbeddingCollection]),
)
def test_rows_are_those_of_the_numbers(
    place: Place, seed: int, samples: int, keys: list[str], longest: int, need_indices: bool, of: type[nn.Module]
) -> None:
    """Of several tables and data types, a feature of two tables, empty samples and samples without any id."""
    module = QuantizedEmbeddingCollection.from_float(floats_of(some_tables(), of, need_indices=need_indices))
    assert module.need_indices() is need_indices
    check(module, features_of(seed, samples, keys, longest))


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("form", ["lengths", "offsets"])
def test_batches_without_samples(place: Place, form: str, ids_dtype: torch.dtype) -> None:
    """As the float collection; TorchRec's takes none."""
    parts = {"lengths": {"lengths": on_device([], ids_dtype)}, "offsets": {"offsets": on_device([0], ids_dtype)}}[form]
    floats = floats_of(some_tables(), need_indices=True)
    module = QuantizedEmbeddingCollection.from_float(floats)
    for keys in ("abcd", "cab"):
        features = batch_of(keys, values=on_device([], ids_dtype), **parts)
        found = module(features)
        assert list(found) == NAMES
        assert [tuple(of.values().shape) for of in found.values()] == [(0, WIDTH)] * 4
        same(found, floats(features))


@pytest.mark.parametrize("samples", [0, 1, 3])
def test_a_single_key_does_not_wait_for_the_device(place: Place, samples: int) -> None:
    module = QuantizedEmbeddingCollection.from_float(floats_of([table("x", 7, "a")]))
    features = features_of(1, samples, ["a"])
    if PLACE.name == "gpu":
        module(features)
        torch.cuda.set_sync_debug_mode("error")
    try:
        found = module(features)
    finally:
        if PLACE.name == "gpu":
            torch.cuda.set_sync_debug_mode("default")
    assert features.length_per_key_or_none() is None
    expected = numbers_of(module)["x"][features.values().long()]
    torch.testing.assert_close(found["a"].values(), expected, rtol=1.3e-6, atol=1e-7)


def test_one_batch_size_for_each_key(place: Place) -> None:
    module = QuantizedEmbeddingCollection.from_float(floats_of([table("x", 7, "a", "b"), table("y", 5, "c")], need_indices=True))
    sizes = torch.tensor([[1], [3], [1]])
    check(module, batch_of("cab", values=[1, 4, 0, 3, 3, 6], lengths=[2, 1, 0, 1, 2], stride_per_key_per_rank=sizes))


def test_of_keys_that_stand_twice_the_last_is_read(place: Place) -> None:
    module = QuantizedEmbeddingCollection.from_float(floats_of([table("x", 7, "a", "b"), table("y", 5, "a")]))
    features = batch_of("aba", values=[0, 1, 2, 3], lengths=[1, 0, 1, 1, 0, 1])
    check(module, features)
    assert module(features)["a@x"].lengths().tolist() == [0, 1]


def test_takes_a_tensor_dict(place: Place) -> None:
    module, features = quantised(), features_of(2)
    parts = {name: JaggedTensor(values=of.values(), lengths=of.lengths()) for name, of in features.to_dict().items()}
    same(module(TensorDict(parts)), module(features))


def test_names(place: Place) -> None:
    """A table without features reads that of its name, and a feature of several tables is named `feature@table`."""
    tables = [table("x", 7), table("y", 5, "b", "c"), table("z", 5, "c", "x")]
    module = QuantizedEmbeddingCollection(tables, place.device)
    assert module.embedding_names_by_table() == [["x@x"], ["b", "c@y"], ["c@z", "x@z"]]
    # The caller's configurations are those of float tables.
    assert (tables[0].feature_names, tables[0].data_type) == ([], DataType.FP32)
    assert all(config.data_type == DataType.INT8 for config in module.embedding_configs())
    assert module.embedding_dim() == WIDTH
    assert repr(module) == "QuantizedEmbeddingCollection(features=5, width=4, need_indices=False, tables=3)"


@pytest.mark.parametrize("of", [ScheduledEmbeddingCollection, EmbeddingCollection])
def test_numbers_are_off_by_half_a_scale(place: Place, of: type[nn.Module]) -> None:
    floats = floats_of(some_tables(), of)
    module = QuantizedEmbeddingCollection.from_float(floats)
    before = floats.state_dict()
    scales = module.scales.split(module._parts[0].layout.rows)
    for (name, numbers), of_rows in zip(numbers_of(module).items(), scales, strict=True):
        weights = before[f"embeddings.{name}.weight"].float()
        assert bool(((numbers - weights).abs() <= of_rows[:, :1] / 2 + 1e-6).all())
    assert not list(module.parameters())
    assert not module.training
    assert [config.data_type for config in floats.embedding_configs()] == [DataType.FP32, DataType.FP16, DataType.FP32]
    # A byte a number and 8 bytes a row; tables begin at multiples of 16.
    rows = 7 + 5 + 7
    assert sum(buffer.nbytes for buffer in module.buffers()) <= rows * WIDTH + 15 * 2 + 8 * rows


@pytest.mark.parametrize("need_indices", [False, True])
def test_beside_torchrecs_quantised_collection(place: Place, need_indices: bool) -> None:
    """It takes its place: the same keys, lengths and ids, and rows that are as far from the float ones."""
    if PLACE.name != "cpu":
        pytest.skip("FBGEMM's kernel for the CPU")
    floats = floats_of(some_tables(), EmbeddingCollection, need_indices=need_indices)
    floats.qconfig = BYTES
    ours, theirs = (of.from_float(floats) for of in (QuantizedEmbeddingCollection, QuantisedByTorchRec))
    features = features_of(2)
    found, expected, exact = ours(features), theirs(features), floats(features)
    # Theirs come data type after data type.
    assert set(found) == set(expected)
    assert list(found) == list(exact)
    for name, rows in found.items():
        wanted = expected[name]
        assert rows.values().dtype == wanted.values().dtype
        torch.testing.assert_close(rows.values(), wanted.values(), rtol=0, atol=0.01)
        assert torch.equal(rows.lengths(), wanted.lengths())
        assert torch.equal(rows.offsets(), wanted.offsets())
        assert (rows.weights_or_none() is None) == (wanted.weights_or_none() is None) == (not need_indices)
        assert not need_indices or torch.equal(rows.weights().long(), wanted.weights().long())
    for name in EmbeddingCollectionInterface.__abstractmethods__ - {"forward", "embedding_configs"}:
        assert getattr(ours, name)() == getattr(theirs, name)()


@pytest.mark.parametrize("output_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_output_dtypes(place: Place, output_dtype: torch.dtype) -> None:
    module, wide = quantised(output_dtype=output_dtype), quantised()
    found, expected = module(features_of(2)), wide(features_of(2))
    for name, of in found.items():
        assert torch.equal(of.values(), expected[name].values().to(output_dtype))
        assert of.values().dtype == output_dtype
    assert ("output_dtype" in repr(module)) == (output_dtype != torch.float32)


def _loaded(module: QuantizedEmbeddingCollection) -> QuantizedEmbeddingCollection:
    other = QuantizedEmbeddingCollection(some_tables(), PLACE.device)
    assert not any(of.values().any() for of in other(features_of(2)).values())
    assert list(module.state_dict()) == ["weights", "scales"]
    other.load_state_dict(module.state_dict())
    return other


def _assigned(module: QuantizedEmbeddingCollection) -> QuantizedEmbeddingCollection:
    other = QuantizedEmbeddingCollection(some_tables(), "meta")
    assert other.device.type == "meta"
    other.load_state_dict(module.state_dict(), assign=True)
    return other


def _emptied(module: QuantizedEmbeddingCollection) -> QuantizedEmbeddingCollection:
    floats = ScheduledEmbeddingCollection(some_tables(), "meta")
    other = QuantizedEmbeddingCollection.from_float(floats).to_empty(device=PLACE.device)
    other.load_state_dict(module.state_dict())
    return other


def _saved(module: QuantizedEmbeddingCollection) -> QuantizedEmbeddingCollection:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: dict[str, Callable[[QuantizedEmbeddingCollection], QuantizedEmbeddingCollection]] = {
    "state dict": _loaded,
    "loaded by assignment": _assigned,
    "through the meta device": _emptied,
    "torch.save": _saved,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "deepcopy": copy.deepcopy,
    "half": lambda module: nn.Sequential(module).half()[0],
    "double and to where it is": lambda module: module.double().to(module.device),
    "to the CPU and back": lambda module: module.cpu().to(PLACE.device),
}


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_copy_and_move(place: Place, way: str) -> None:
    module = quantised()
    expected = module(features_of(2))
    other = WAYS[way](module)
    assert (other.weights.dtype, other.scales.dtype) == (torch.uint8, torch.float32)
    assert other.device.type == PLACE.device.type
    same(other(features_of(2)), expected)


def test_rows_on_the_meta_device(place: Place) -> None:
    module = QuantizedEmbeddingCollection(some_tables(), "meta")
    features = features_of(2)
    features.sync()
    found = module(features.to(torch.device("meta")))
    counts = dict(zip(features.keys(), features.length_per_key(), strict=True))
    assert {name: tuple(of.values().shape) for name, of in found.items()} == {name: (counts[name[0]], WIDTH) for name in NAMES}


class Model(nn.Module):
    def __init__(self, rows: nn.Module) -> None:
        super().__init__()
        self.rows = rows
        self.over = nn.Linear(WIDTH, 1, device=PLACE.device)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        found = self.rows(features)
        return torch.cat([self.over(found[name].values()) for name in NAMES])


@pytest.mark.parametrize("of", [ScheduledEmbeddingCollection, EmbeddingCollection])
@pytest.mark.parametrize("inplace", [False, True])
def test_quantize_dynamic(place: Place, of: type[nn.Module], inplace: bool) -> None:
    model = Model(floats_of(some_tables(), of))
    directly = QuantizedEmbeddingCollection.from_float(model.rows)
    made = quantize_dynamic(model, qconfig_spec={of: BYTES}, mapping={of: QuantizedEmbeddingCollection}, inplace=inplace)
    assert type(made.rows) is QuantizedEmbeddingCollection
    assert type(model.rows) is (QuantizedEmbeddingCollection if inplace else of)
    assert torch.equal(made.rows.weights, directly.weights)
    assert torch.equal(made.rows.scales, directly.scales)
    with torch.no_grad():
        assert made(features_of(2)).shape[1] == 1


@pytest.mark.parametrize("of", [ScheduledEmbeddingCollection, EmbeddingCollection])
def test_torchrecs_quantize_inference_model(place: Place, of: type[nn.Module]) -> None:
    model = Model(floats_of(some_tables(), of, need_indices=True)).eval()
    before = model.rows(features_of(2))
    made = quantize_inference_model(
        model, quantization_mapping={torch.typename(of): QuantizedEmbeddingCollection}, output_dtype=torch.bfloat16
    )
    assert type(made.rows) is QuantizedEmbeddingCollection
    after = made.rows(features_of(2))
    assert list(after) == list(before)
    for name, of_name in after.items():
        assert of_name.values().dtype == torch.bfloat16
        assert torch.equal(of_name.weights(), before[name].weights())
        torch.testing.assert_close(of_name.values().float(), before[name].values(), rtol=0.01, atol=0.02)


@pytest.mark.parametrize(
    ("of_all", "of_tables", "message"),
    [
        (torch.int8, {"y": torch.float16}, "qconfig: expected weights of torch.int8, got torch.float16 for y"),
        (torch.quint4x2, None, "qconfig: expected weights of torch.int8, got torch.quint4x2 for all tables"),
    ],
)
def test_other_qconfigs_are_refused(
    place: Place, of_all: torch.dtype, of_tables: dict[str, torch.dtype] | None, message: str
) -> None:
    module = floats_of(some_tables())
    module.qconfig = QuantConfig(
        PlaceholderObserver.with_args(dtype=torch.float), PlaceholderObserver.with_args(dtype=of_all), of_tables
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        QuantizedEmbeddingCollection.from_float(module)


def test_an_activation_of_integers_gives_float32(place: Place) -> None:
    module = floats_of(some_tables(), output_dtype=torch.bfloat16)
    module.qconfig = torch.ao.quantization.default_dynamic_qconfig
    found = QuantizedEmbeddingCollection.from_float(module)(features_of(2))
    assert {of.values().dtype for of in found.values()} == {torch.float32}


def test_is_a_leaf_of_a_trace(place: Place) -> None:
    model = Model(quantised())
    features = features_of(2)
    for traced in (torch.fx.GraphModule(model, Tracer().trace(model)), torch.fx.symbolic_trace(model)):
        assert "rows" in [node.target for node in traced.graph.nodes if node.op == "call_module"]
        assert torch.equal(traced(features), model(features))
    with pytest.raises(TypeError) as caught:
        torch.fx.symbolic_trace(model.rows)
    assert str(caught.value) == "features: got a proxy; the module is a leaf, so trace a model that holds it"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("keys", ["a", "cab"])
def test_exported(place: Place, keys: str) -> None:
    """Without a copy of the tables: nothing takes them but the lookup."""
    tables = [table("x", 7, "a")] if keys == "a" else some_tables()
    model = Sums(QuantizedEmbeddingCollection.from_float(floats_of(tables)))
    sizes: list[Any] = [{0: torch.export.Dim.DYNAMIC}, None, {0: torch.export.Dim.DYNAMIC}, None, None, None]
    program = torch.export.export(model, (features_of(2, 3, list(keys)),), dynamic_shapes=(sizes,), strict=False)
    held = [spec.arg.name for spec in program.graph_signature.input_specs if spec.target in ("rows.weights", "rows.scales")]
    assert len(held) == 2
    for node in program.graph.nodes:
        if node.name in held:
            assert {str(user.target) for user in node.users} == {"jagged.embedding_bags.default"}
    for seed, samples in ((2, 3), (4, 5)):
        features = features_of(seed, samples, list(keys))
        for ours, eager in zip(program.module()(features), model(features), strict=True):
            assert torch.equal(ours, eager)


class Sums(nn.Module):
    """The rows of each feature as they are."""

    def __init__(self, rows: nn.Module) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, features: KeyedJaggedTensor) -> list[Tensor]:
        return [of.values() for of in self.rows(features).values()]


@pytest.mark.parametrize("is_quantised", [False, True])
@pytest.mark.parametrize("held", [False, True])
def test_torchscript_is_refused(place: Place, is_quantised: bool, held: bool) -> None:
    rows = quantised() if is_quantised else floats_of(some_tables())
    with pytest.raises(TypeError) as caught:
        torch.jit.script(Model(rows) if held else rows)
    assert str(caught.value) == (
        f"torch.jit.script: got a {type(rows).__name__}, whose lookups are an operator written in Python, which TorchScript "
        "cannot compile; export the model with torch.export.export"
    )


def test_keys_that_are_missing(place: Place) -> None:
    message = "features: expected a key for every feature of the tables, got none for a, b"
    with pytest.raises(ValueError, match=f"^{message}$"):
        quantised()(features_of(2, 3, ["c", "d"]))


@pytest.mark.skipif(PLACE.name != "cpu", reason="on a GPU lengths and ids are read by kernels alone")
@pytest.mark.parametrize(("wrong", "message"), MALFORMED)
@pytest.mark.parametrize("keys_read", ["ab", "ba", "aa"])
def test_malformed_batches(place: Place, wrong: dict[str, list[int]], message: str, keys_read: str) -> None:
    module = QuantizedEmbeddingCollection([table("x", 9, keys_read[0]), table("y", 9, keys_read[1])], place.device)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        module(batch_of("ab", values=[0, 1, 2, 3], **wrong))


@pytest.mark.skipif(PLACE.name != "cpu", reason="on a GPU ids are read by kernels alone")
@pytest.mark.parametrize(("ids", "message"), UNKNOWN)
@pytest.mark.parametrize("keys", ["ab", "ba"])
def test_unknown_ids(place: Place, ids: list[int], message: str, keys: str) -> None:
    module = QuantizedEmbeddingCollection([table("x", 7, "a"), table("y", 5, "b")], place.device)
    parts = {"a": (ids[:2], [1, 0, 1]), "b": (ids[2:], [0, 2, 0])}
    values, lengths = ([number for key in keys for number in parts[key][part]] for part in (0, 1))
    with pytest.raises(ValueError, match=f"^features: expected ids from {message}$"):
        module(batch_of(keys, values=values, lengths=lengths))


@pytest.mark.parametrize(
    ("tables", "options", "error", "message"),
    [
        ([], {}, ValueError, "tables: expected at least one, got none"),
        ([table("x", 5, "a")] * 2, {}, ValueError, "tables: expected names of their own, got 'x' twice"),
        (
            [table("x", 5, "a"), EmbeddingConfig(name="y", num_embeddings=5, embedding_dim=3, feature_names=["b"])],
            {},
            ValueError,
            "tables: expected one embedding_dim, 4 of 'x', got 3 for 'y'; make a collection for each width",
        ),
        (
            [table("x", 5, "a")],
            {"output_dtype": torch.int8},
            TypeError,
            "output_dtype: expected one of torch.float32, torch.bfloat16, torch.float16, torch.float64, got torch.int8",
        ),
    ],
)
def test_wrong_arguments(tables: list[EmbeddingConfig], options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        QuantizedEmbeddingCollection(tables, **options)
    assert str(caught.value) == message


@pytest.mark.parametrize("data_type", [DataType.INT8, DataType.INT4, DataType.FP16])
def test_the_data_type_counts_for_nothing(data_type: DataType) -> None:
    module = QuantizedEmbeddingCollection([table("x", 5, "a", data_type=data_type)])
    assert module.embedding_configs()[0].data_type == DataType.INT8


def test_called_where_gradients_are_recorded(place: Place) -> None:
    """Nothing learns, so nothing is refused."""
    assert not any(of.values().requires_grad for of in quantised()(features_of(2)).values())
