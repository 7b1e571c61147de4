"""Collections with 8 bits a number against the float collection of the numbers that they stand for."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.ao.quantization import PlaceholderObserver, quantize_dynamic
from torchrec.fx import Tracer
from torchrec.inference.modules import quantize_inference_model
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, QuantConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from jagged.modules import QuantizedEmbeddingBagCollection, ScheduledEmbeddingBagCollection
from tests.modules.lookups import MEAN, Lookups, collections, lookups, some_tables, table
from tests.modules.test_embedding_bags import SOME_PLAN
from tests.places import PLACE, Place
from tests.reference.embedding_bag import dequantised

pytestmark = [
    pytest.mark.skipif(PLACE.name == "interpret", reason="modules run on the place's own backend"),
    # PyTorch's own quantisation says that it is going to move.
    pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning"),
]


def numbers_of(module: QuantizedEmbeddingBagCollection) -> dict[str, Tensor]:
    """Return the tables' numbers, by the names that they have in the float collection."""
    layout, names = module._parts[0].layout, [config.name for config in module.embedding_bag_configs()]
    tables = dequantised(layout.views(module.weights), list(module.scales.split(layout.rows)))
    return {f"embedding_bags.{name}.weight": of for name, of in zip(names, tables, strict=True)}


def floats_of(module: QuantizedEmbeddingBagCollection, configs: list[EmbeddingBagConfig]) -> ScheduledEmbeddingBagCollection:
    """Return the collection in float32 that has just those numbers."""
    configs = copy.deepcopy(configs)
    for config in configs:
        config.data_type = DataType.FP32
    made = ScheduledEmbeddingBagCollection(configs, module.is_weighted(), PLACE.device)
    made.load_state_dict(numbers_of(module))
    return made


def check_same(module: QuantizedEmbeddingBagCollection, configs: list[EmbeddingBagConfig], features: KeyedJaggedTensor) -> None:
    with torch.no_grad():
        got, wanted = module(features), floats_of(module, configs)(features)
    assert (got.keys(), got.length_per_key()) == (wanted.keys(), wanted.length_per_key())
    torch.testing.assert_close(got.values(), wanted.values(), rtol=1.3e-6, atol=1e-5)


def quantised(**options: Any) -> tuple[QuantizedEmbeddingBagCollection, ScheduledEmbeddingBagCollection]:
    configs = some_tables()
    configs[2].data_type = DataType.BF16
    torch.manual_seed(0)
    floats = ScheduledEmbeddingBagCollection(configs, device=PLACE.device, **options)
    return QuantizedEmbeddingBagCollection.from_float(floats), floats


@given(collections(), lookups, st.one_of(st.none(), st.lists(st.integers(1, 4), min_size=5, max_size=5).map(tuple)))
def test_as_the_float_collection(
    place: Place, drawn: tuple[list[EmbeddingBagConfig], bool], batch: Lookups, sizes: tuple[int, ...] | None
) -> None:
    configs, weighted = drawn
    for of in (ScheduledEmbeddingBagCollection, EmbeddingBagCollection):
        floats = of(configs, weighted, device=torch.device(place.device))
        module = QuantizedEmbeddingBagCollection.from_float(floats)
        check_same(module, configs, batch.features(weighted, sizes))


def test_numbers_are_off_by_half_a_scale(place: Place) -> None:
    module, floats = quantised()
    layout = module._parts[0].layout
    before = floats.state_dict()
    for (name, numbers), scales in zip(numbers_of(module).items(), module.scales.split(layout.rows), strict=True):
        assert bool(((numbers - before[name].float()).abs() <= scales[:, :1] / 2 + 1e-6).all())
    assert not list(module.parameters())
    assert not module.training
    assert all(config.data_type == DataType.INT8 for config in module.embedding_bag_configs())
    assert [config.data_type for config in floats.embedding_bag_configs()][2] == DataType.BF16
    # A quarter, and 8 bytes a row; tables begin at multiples of 16.
    rows, elements = (sum(sizes) for sizes in zip(*((7, 21), (5, 40), (11, 11), (6, 30)), strict=True))
    assert sum(buffer.nbytes for buffer in module.buffers()) <= elements + 15 * 3 + 8 * rows


@pytest.mark.parametrize("output_dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_output_dtypes(place: Place, output_dtype: torch.dtype) -> None:
    module, _ = quantised(output_dtype=output_dtype)
    values = module(Lookups().features()).values()
    wide, _ = quantised()
    assert torch.equal(values, wide(Lookups().features()).values().to(output_dtype))
    assert ("output_dtype" in repr(module)) == (output_dtype != torch.float32)
    assert "features=5, width=20, is_weighted=False, tables=4" in repr(module)


def _loaded(module: QuantizedEmbeddingBagCollection) -> QuantizedEmbeddingBagCollection:
    other = QuantizedEmbeddingBagCollection(some_tables(), device=PLACE.device)
    assert not other(Lookups().features()).values().any()
    assert list(module.state_dict()) == ["weights", "scales"]
    other.load_state_dict(module.state_dict())
    return other


def _assigned(module: QuantizedEmbeddingBagCollection) -> QuantizedEmbeddingBagCollection:
    other = QuantizedEmbeddingBagCollection(some_tables(), device="meta")
    assert other.device.type == "meta"
    other.load_state_dict(module.state_dict(), assign=True)
    return other


def _emptied(module: QuantizedEmbeddingBagCollection) -> QuantizedEmbeddingBagCollection:
    floats = ScheduledEmbeddingBagCollection(some_tables(), device="meta")
    other = QuantizedEmbeddingBagCollection.from_float(floats).to_empty(device=PLACE.device)
    other.load_state_dict(module.state_dict())
    return other


def _saved(module: QuantizedEmbeddingBagCollection) -> QuantizedEmbeddingBagCollection:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: dict[str, Callable[[QuantizedEmbeddingBagCollection], QuantizedEmbeddingBagCollection]] = {
    "state dict": _loaded,
    "loaded by assignment": _assigned,
    "through the meta device": _emptied,
    "torch.save": _saved,
    "deepcopy": copy.deepcopy,
    "half": lambda module: nn.Sequential(module).half()[0],
    "double and to where it is": lambda module: module.double().to(module.device),
}


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_copy_and_move(place: Place, way: str) -> None:
    module, _ = quantised()
    expected = module(Lookups().features()).values()
    other = WAYS[way](module)
    assert (other.weights.dtype, other.scales.dtype) == (torch.uint8, torch.float32)
    assert torch.equal(other(Lookups().features()).values(), expected)


class Model(nn.Module):
    def __init__(self, of: type[nn.Module], configs: list[EmbeddingBagConfig], weighted: bool = False) -> None:
        super().__init__()
        self.bags = of(configs, weighted, torch.device(PLACE.device))
        self.over = nn.Linear(20, 1, device=PLACE.device)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.over(self.bags(features).values())


@pytest.mark.parametrize("of", [ScheduledEmbeddingBagCollection, EmbeddingBagCollection])
@pytest.mark.parametrize("inplace", [False, True])
def test_quantize_dynamic(place: Place, of: type[nn.Module], inplace: bool) -> None:
    model = Model(of, some_tables())
    directly = QuantizedEmbeddingBagCollection.from_float(model.bags)
    qconfig = QuantConfig(
        activation=PlaceholderObserver.with_args(dtype=torch.float), weight=PlaceholderObserver.with_args(dtype=torch.int8)
    )
    made = quantize_dynamic(model, qconfig_spec={of: qconfig}, mapping={of: QuantizedEmbeddingBagCollection}, inplace=inplace)
    assert type(made.bags) is QuantizedEmbeddingBagCollection
    assert type(model.bags) is (QuantizedEmbeddingBagCollection if inplace else of)
    assert torch.equal(made.bags.weights, directly.weights)
    assert torch.equal(made.bags.scales, directly.scales)
    with torch.no_grad():
        assert made(Lookups().features()).shape == (3, 1)


def test_torchrecs_quantize_inference_model(place: Place) -> None:
    model = Model(ScheduledEmbeddingBagCollection, some_tables()).eval()
    features = Lookups().features()
    before = model.bags(features).values()
    mapping = {torch.typename(ScheduledEmbeddingBagCollection): QuantizedEmbeddingBagCollection}
    made = quantize_inference_model(model, quantization_mapping=mapping, output_dtype=torch.bfloat16)
    after = made.bags(features).values()
    assert after.dtype == torch.bfloat16
    torch.testing.assert_close(after.float(), before, rtol=0.01, atol=0.02)


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
    module = ScheduledEmbeddingBagCollection(some_tables(), device=place.device)
    module.qconfig = QuantConfig(
        PlaceholderObserver.with_args(dtype=torch.float), PlaceholderObserver.with_args(dtype=of_all), of_tables
    )
    with pytest.raises(ValueError, match=message):
        QuantizedEmbeddingBagCollection.from_float(module)


def test_an_activation_of_integers_is_pooled_in_float32(place: Place) -> None:
    module = ScheduledEmbeddingBagCollection(some_tables(), device=place.device)
    module.qconfig = torch.ao.quantization.default_dynamic_qconfig
    made = QuantizedEmbeddingBagCollection.from_float(module)
    assert made(Lookups().features()).values().dtype == torch.float32


def test_a_plan_goes_on(place: Place) -> None:
    module, floats = quantised(plan=SOME_PLAN)
    for planned in (module, QuantizedEmbeddingBagCollection(some_tables(), device=place.device, plan=SOME_PLAN)):
        planned.load_state_dict(module.state_dict())
        expected = quantised()[0](Lookups().features()).values()
        torch.testing.assert_close(planned(Lookups().features()).values(), expected)
        (schedules,) = next(iter(planned._schedules.values()))
        assert schedules is not None
        assert schedules.codes.tolist() == [2 << 2 | 3, -1, -1, -1, 1 << 2]
        assert "plan=2 of 5 features" in repr(planned)
    assert floats._plan is not None


def test_is_a_leaf_of_a_trace(place: Place) -> None:
    model = Model(QuantizedEmbeddingBagCollection, some_tables())
    traced = torch.fx.GraphModule(model, Tracer().trace(model))
    features = Lookups().features()
    assert torch.equal(traced(features), model(features))
    assert torch.equal(torch.fx.symbolic_trace(model)(features), model(features))


def test_what_is_refused(place: Place) -> None:
    with pytest.raises(ValueError, match="tables: expected at least one"):
        QuantizedEmbeddingBagCollection([])
    with pytest.raises(ValueError, match="is_weighted: only sums are weighted"):
        QuantizedEmbeddingBagCollection([table("x", 5, 3, "a", pooling=MEAN)], True)
    with pytest.raises(TypeError, match="output_dtype: expected one of"):
        QuantizedEmbeddingBagCollection(some_tables(), output_dtype=torch.int8)
    weighted = QuantizedEmbeddingBagCollection([table("x", 5, 3, "a")], True, place.device)
    features = Lookups(("a",)).features(weights=True)
    with pytest.raises(ValueError, match="per_sample_weights: has no gradient where weights are uint8"):
        weighted(features)
    with torch.no_grad():
        weighted(features)
