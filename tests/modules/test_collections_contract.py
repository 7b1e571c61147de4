"""What TorchRec's collections of embeddings promise, and ours in their place: the same tests for every pair of classes."""

from __future__ import annotations

import copy
import inspect
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
from torchrec.fx import Tracer
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from jagged.modules import ScheduledEmbeddingBagCollection, ScheduledEmbeddingCollection
from jagged.ops import trust_values
from tests.modules.lookups import (
    MEAN,
    Lookups,
    Pair,
    check_both,
    check_same,
    collections,
    lookups,
    some_tables,
    table,
    tensors_of,
)
from tests.places import PLACE, Place
from tests.strategies import seeds

PAIRS = [
    Pair(EmbeddingBagCollection, ScheduledEmbeddingBagCollection),
    Pair(EmbeddingCollection, ScheduledEmbeddingCollection),
]

pytestmark = pytest.mark.skipif(PLACE.name == "interpret", reason="modules run on the place's own backend")
every_pair = pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.theirs.__name__)
pooled_pairs = pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair.is_pooled], ids=lambda pair: pair.theirs.__name__)


def on_device(numbers: Any, dtype: torch.dtype | None = None) -> Tensor:
    return torch.tensor(numbers, dtype=dtype).to(PLACE.device)


def batch_of(keys: str, **parts: Any) -> KeyedJaggedTensor:
    """A batch of keys of a letter, from lists."""
    return KeyedJaggedTensor(
        keys=list(keys), **{name: on_device(of) if isinstance(of, list) else of for name, of in parts.items()}
    )


def two_tables(pair: Pair, **options: Any) -> Any:
    return pair.tables(table("x", 7, 4, "a", **options), table("y", 5, 4, "b", **options))


@every_pair
@given(collections(), lookups, seeds())
def test_outputs_and_gradients(pair: Pair, drawn: tuple[list[EmbeddingBagConfig], bool], batch: Lookups, seed: int) -> None:
    """For keys in any order, with one that nothing reads, and ids and weights of all kinds; of sequences also the ids."""
    configs, flag = drawn
    ours, twin = pair.make(pair.tables(*configs), **{pair.flag: flag})
    features = batch.features(pair.is_pooled and flag)
    if batch.batch_size:
        check_both(ours, twin, features, seed)
    else:
        check_empty(ours, features)


def check_empty(ours: nn.Module, features: KeyedJaggedTensor) -> None:
    """Of a batch of no samples TorchRec's cannot make a dictionary."""
    found = ours(features)
    if isinstance(found, KeyedTensor):
        assert found.values().shape == (0, sum(found.length_per_key()))
    else:
        assert [(of.values().shape[0], of.lengths().shape[0], of.offsets().tolist()) for of in found.values()] == [
            (0, 0, [0]) for _ in found
        ]
    sum(of.sum() for of in tensors_of(found)).backward()
    assert not any(parameter.grad.any() for parameter in ours.parameters())


@every_pair
@given(collections(), lookups, st.lists(st.integers(1, 4), min_size=5, max_size=5), seeds())
def test_batches_of_their_own(
    pair: Pair, drawn: tuple[list[EmbeddingBagConfig], bool], batch: Lookups, sizes: list[int], seed: int
) -> None:
    """A batch size for each key, with inverse indices."""
    configs, flag = drawn
    ours, twin = pair.make(pair.tables(*configs), **{pair.flag: flag})
    check_both(ours, twin, batch.features(pair.is_pooled and flag, tuple(sizes)), seed)


@every_pair
def test_batches_without_inverse_indices(place: Place, pair: Pair) -> None:
    ours, twin = pair.make(pair.tables(table("x", 5, 3, "a"), table("y", 5, 2, "b", pooling=MEAN)))
    made = {"values": [0, 1, 2, 3], "lengths": [1, 0, 2, 1]}
    for sizes in ([[2], [2]], [[1, 1], [0, 2]]):
        check_same(*(of(batch_of("ab", **made, stride_per_key_per_rank=torch.tensor(sizes))) for of in (ours, twin)))
    ragged = {**made, "stride_per_key_per_rank": torch.tensor([[1], [3]])}
    if not pair.is_pooled:
        check_same(ours(batch_of("ab", **ragged)), twin(batch_of("ab", **ragged)))
        return
    message = (
        "features: expected inverse_indices where keys have batches of several sizes, got none; without them their rows do not "
        "stand side by side"
    )
    for inverse in (None, (["a", "b"], on_device([[], []], torch.int64))):
        with pytest.raises(ValueError, match=f"^{message}$"):
            ours(batch_of("ab", **ragged, inverse_indices=inverse))


@every_pair
def test_inverse_indices_of_a_plain_batch(place: Place, pair: Pair) -> None:
    ours, twin = pair.make(pair.tables(*some_tables()))
    plain = Lookups().features()
    inverse = (["d", "c", "b", "a"], on_device([[0, 0, 2, 1, 1]] * 4))
    features = KeyedJaggedTensor(keys=plain.keys(), values=plain.values(), lengths=plain.lengths(), inverse_indices=inverse)
    check_both(ours, twin, features, 0)


@every_pair
def test_the_example_of_torchrec(place: Place, pair: Pair) -> None:
    ours, twin = pair.make(pair.tables(table("t1", 10, 3, "f1"), table("t2", 10, 4, "f2")))
    features = KeyedJaggedTensor.from_offsets_sync(
        keys=["f1", "f2"], values=on_device([0, 1, 2, 3, 4, 5, 6, 7]), offsets=on_device([0, 2, 2, 3, 4, 5, 8])
    )
    found = ours(features)
    check_same(found, twin(features=features))
    if pair.is_pooled:
        assert (found.keys(), found.values().shape, found.offset_per_key()) == (["f1", "f2"], (3, 7), [0, 3, 7])
    else:
        assert {name: of.values().shape for name, of in found.items()} == {"f1": (3, 3), "f2": (5, 3)}
        assert found["f2"].lengths().tolist() == [1, 1, 3]


@every_pair
@pytest.mark.parametrize("form", ["lengths", "offsets"])
@pytest.mark.parametrize("counts_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_int32_and_int64_lengths_and_offsets(
    place: Place, pair: Pair, form: str, counts_dtype: torch.dtype, ids_dtype: torch.dtype
) -> None:
    counts = {"lengths": [1, 0, 1, 1, 0, 1], "offsets": [0, 1, 1, 2, 3, 3, 4]}[form]
    made = {"values": on_device([0, 1, 2, 3], ids_dtype), form: on_device(counts, counts_dtype)}
    tables = pair.tables(table("x", 7, 3, "a", "b"), table("y", 5, 2, "c", pooling=MEAN))
    for keys in ("abc", "cab"):
        for flag in (False, True) if not pair.is_pooled else (False,):
            ours, twin = pair.make(tables, **{pair.flag: flag})
            check_same(ours(batch_of(keys, **made)), twin(batch_of(keys, **made)))


@every_pair
def test_batches_without_ids_or_samples(place: Place, pair: Pair) -> None:
    ours, twin = pair.make(pair.tables(*some_tables()))
    nothing = on_device([], torch.int64)
    for form in ({"lengths": [0] * 8}, {"offsets": [0] * 9}):
        check_same(ours(batch_of("abcd", values=nothing, **form)), twin(batch_of("abcd", values=nothing, **form)))
    for tables in (pair.tables(*some_tables()), pair.tables(table("x", 7, 3, "a"), table("y", 5, 2, "b"))):
        ours, _ = pair.make(tables)
        for keys in ("abcd", "dcba", "ab"):
            if set(keys) >= {name for of in tables for name in of.feature_names}:
                for form in ({"lengths": nothing}, {"offsets": [0]}):
                    ours.zero_grad()
                    check_empty(ours, batch_of(keys, values=nothing, **form))


@every_pair
def test_of_keys_that_stand_twice_the_last_is_read(place: Place, pair: Pair) -> None:
    for tables, keys in (
        (pair.tables(table("x", 7, 3, "a", "b"), table("y", 5, 2, "a")), "aba"),
        (pair.tables(table("x", 7, 3, "a", "b")), "aba"),
        (pair.tables(table("x", 7, 3, "a", "b", "a")), "aba"),
    ):
        ours, twin = pair.make(tables)
        check_same(*(of(batch_of(keys, values=[0, 1, 2, 3], lengths=[1, 0, 1, 1, 0, 1])) for of in (ours, twin)))


@every_pair
def test_names(place: Place, pair: Pair) -> None:
    """A feature of several tables is named `feature@table`, and a table without features reads that of its name."""
    tables = pair.tables(table("x", 7, 3), table("y", 5, 3, "b", "c"), table("z", 5, 3, "c", "x"), table("w", 5, 3, "d", "d"))
    ours, twin = pair.make(tables)
    assert tables[0].feature_names == ["x"]
    names = ["x@x", "b", "c@y", "c@z", "x@z", "d@w", "d@w"]
    features = Lookups(("d", "b", "c", "x")).features()
    found = ours(features)
    check_same(found, twin(features))
    assert list(found.keys()) == (names if pair.is_pooled else names[:-1])


@every_pair
def test_takes_a_tensor_dict(place: Place, pair: Pair) -> None:
    ours, twin = pair.make(pair.tables(table("x", 5, 3, "a"), table("y", 5, 2, "b", pooling=MEAN)))
    features = Lookups(("b", "a")).features()
    parts = {name: JaggedTensor(values=of.values(), lengths=of.lengths()) for name, of in features.to_dict().items()}
    check_same(ours(TensorDict(parts)), twin(features))


@pooled_pairs
def test_what_it_gives_is_grouped_anew(place: Place, pair: Pair) -> None:
    groups = [["c", "a@x"], ["b"], ["a@z", "d"]]
    ours, twin = pair.make(some_tables())
    of_ours, of_twin = (KeyedTensor.regroup([of(Lookups().features())], groups) for of in (ours, twin))
    torch.testing.assert_close(of_ours, of_twin)


@every_pair
def test_outputs_are_float32_whatever_the_tables_are(place: Place, pair: Pair) -> None:
    ours, twin = pair.make(pair.tables(*some_tables()))
    features = Lookups().features()
    check_same(copy.deepcopy(ours).double()(features), copy.deepcopy(twin).double()(features))
    for mine, theirs in zip(
        tensors_of(copy.deepcopy(ours).half()(features)), tensors_of(copy.deepcopy(twin).half()(features)), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)
    with torch.autocast(place.device.type, torch.bfloat16):
        check_same(ours(features), twin(features))


@every_pair
def test_where_nothing_learns(place: Place, pair: Pair) -> None:
    ours, twin = pair.make(pair.tables(*some_tables()))
    features = Lookups().features()

    def check(learns: bool) -> None:
        for of in (ours, twin):
            assert {tensor.requires_grad for tensor in tensors_of(of(features))} == {learns}

    check(True)
    with torch.no_grad():
        check(False)
    with torch.inference_mode():
        check(False)
    for of in (ours, twin):
        of.requires_grad_(False)
    check(False)


@every_pair
def test_state_dicts_go_both_ways(place: Place, pair: Pair) -> None:
    ours, twin = pair.make(pair.tables(*some_tables()))
    assert list(ours.state_dict(prefix="model.")) == list(twin.state_dict(prefix="model."))
    assert [name for name, _ in ours.named_parameters()] == [f"{pair.place}.{name}.weight" for name in "xyzw"]
    assert not list(ours.buffers())
    assert [type(of) for of in ours.get_submodule(pair.place).values()] == [
        type(of) for of in twin.get_submodule(pair.place).values()
    ]
    before = [parameter.clone() for parameter in twin.parameters()]
    ours.reset_parameters()
    assert not any(torch.equal(mine, of) for mine, of in zip(ours.parameters(), before, strict=True))
    twin.load_state_dict(ours.state_dict())
    check_both(ours, twin, Lookups().features(), 0)
    # What does not fit, and what is missing.
    wrong = {f"{pair.place}.x.weight": torch.zeros(1, 3), "other": torch.zeros(1)}
    messages = []
    for of in (ours, twin):
        with pytest.raises(RuntimeError) as error:
            of.load_state_dict(wrong)
        messages.append(str(error.value).replace(type(of).__name__, "collection"))
    assert messages[0] == messages[1]
    some = {f"{pair.place}.y.weight": torch.ones_like(next(iter(twin.get_submodule(pair.place)["y"].parameters())))}
    assert ours.load_state_dict(some, strict=False) == twin.load_state_dict(some, strict=False)
    check_same(ours(Lookups().features()), twin(Lookups().features()))


@every_pair
def test_called_with_other_parameters(place: Place, pair: Pair) -> None:
    ours, twin = pair.make(pair.tables(*some_tables()))
    others = {name: torch.full_like(of, 2.0).requires_grad_() for name, of in twin.named_parameters()}
    features = Lookups().features()
    found, wanted = (torch.func.functional_call(of, others, (features,)) for of in (ours, twin))
    check_same(found, wanted)
    grads = [torch.autograd.grad(sum(of.sum() for of in tensors_of(one)), list(others.values())) for one in (found, wanted)]
    torch.testing.assert_close(*grads)


def _tenths(weight: Tensor) -> None:
    nn.init.constant_(weight, 0.1)


def _ones_in_place(weight: Tensor) -> None:
    with torch.no_grad():
        weight.copy_(torch.ones_like(weight))


def _twos_for_data(weight: Tensor) -> None:
    weight.data = torch.full_like(weight, 2.0)


@every_pair
def test_tables_are_initialised_by_their_functions(place: Place, pair: Pair) -> None:
    made = {"x": (_tenths, 0.1), "y": (_ones_in_place, 1.0), "z": (_twos_for_data, 2.0)}
    tables = pair.tables(*(table(name, 5, 3, "a", init_fn=function) for name, (function, _) in made.items()))
    ours = pair.ours(tables, device=place.device)
    for again in (False, True):
        if again:
            with torch.no_grad():
                for parameter in ours.parameters():
                    parameter.zero_()
            ours.reset_parameters()
        assert {name: of.weight.unique().tolist() for name, of in ours.get_submodule(pair.place).items()} == {
            name: [pytest.approx(value)] for name, (_, value) in made.items()
        }
        found = ours(batch_of("a", values=[0, 4], lengths=[1, 1]))
        assert torch.cat([of.reshape(2, -1) for of in tensors_of(found)], 1)[0].tolist() == pytest.approx(
            [value for _, value in made.values() for _ in range(3)]
        )


@every_pair
def test_numbers_are_drawn_as_torchrec_draws_them(place: Place, pair: Pair) -> None:
    """From the square root of one over the rows, or the configuration's bounds; the same ones for a seed."""
    tables = pair.tables(table("x", 400, 3, "a"), table("y", 300, 8, "b", weight_init_min=-5.0, weight_init_max=-4.0))
    ours, twin = pair.make(tables)
    for of in (ours, twin):
        torch.manual_seed(3)
        of.reset_parameters()
    for mine, theirs in zip(ours.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    x, y = ours.parameters()
    assert 0.045 < x.abs().max() <= 0.05
    assert -5.0 <= y.min() < y.max() <= -4.0


@every_pair
def test_meta_device_then_reset(place: Place, pair: Pair) -> None:
    tables = pair.tables(*(table(of.name, of.num_embeddings, 3, *of.feature_names, init_fn=_tenths) for of in some_tables()))
    ours, twin = (of(copy.deepcopy(tables), device=torch.device("meta")) for of in (pair.ours, pair.theirs))
    for of in (ours, twin):
        of.reset_parameters()
        assert of.device == torch.device("meta")
        assert all(parameter.is_meta for parameter in of.parameters())
    features = Lookups().features()
    shapes = [[of.shape for of in tensors_of(module(features.to(torch.device("meta"))))] for module in (ours, twin)]
    assert shapes[0] == shapes[1]
    ours = ours.to_empty(device=place.device)
    assert ours.device.type == place.device.type
    ours.reset_parameters()
    here = pair.theirs(copy.deepcopy(tables), device=torch.device(place.device))
    check_both(ours, here, features, 0)


def _saved(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "torch.save": _saved,
}


@every_pair
@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("flag", [False, True])
def test_copies_are_alike_and_on_their_own(place: Place, pair: Pair, way: str, flag: bool) -> None:
    tables = pair.tables(table("x", 7, 3, "a", "b"), table("z", 11, 1, "a"))
    ours, twin = pair.make(tables, **{pair.flag: flag})
    batch = Lookups(("b", "a"))
    copied = COPIES[way](ours)
    check_both(copied, twin, batch.features(pair.is_pooled and flag), 0)
    assert type(copied) is type(ours)
    assert getattr(copied, pair.flag)() is flag
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert not any(of.any() for of in tensors_of(copied(batch.features(pair.is_pooled and flag))))
    check_both(ours, twin, batch.features(pair.is_pooled and flag), 0)


class Model(nn.Module):
    """Reads one feature of what a collection gives."""

    def __init__(self, tables: nn.Module, is_pooled: bool) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"tables": tables})
        self.is_pooled = is_pooled

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        found = self.inner["tables"](features)
        return (found.values() if self.is_pooled else found["a@z"].values()) * 2


@every_pair
@pytest.mark.parametrize("tracer", [Tracer, torch.fx.Tracer])
def test_traced_models_give_the_same(place: Place, pair: Pair, tracer: type[torch.fx.Tracer]) -> None:
    features = Lookups().features()
    found = []
    for of in pair.make(pair.tables(*some_tables())):
        model = Model(of, pair.is_pooled)
        traced = torch.fx.GraphModule(model, tracer().trace(model))
        found.append(traced(features))
        torch.testing.assert_close(found[-1], model(features))
    torch.testing.assert_close(*found)


@every_pair
def test_tracing_makes_it_a_leaf(place: Place, pair: Pair) -> None:
    ours, _ = pair.make(pair.tables(*some_tables()))
    for tracer in (Tracer(leaf_modules=[type(ours).__name__]), Tracer(), torch.fx.Tracer()):
        graph = tracer.trace(Model(ours, pair.is_pooled))
        assert [node.target for node in graph.nodes if node.op == "call_module"] == ["inner.tables"]
    with pytest.raises(TypeError, match=r"^features: got a proxy; the module is a leaf, so trace a model that holds it$"):
        torch.fx.symbolic_trace(ours)


@every_pair
def test_interface(place: Place, pair: Pair) -> None:
    tables = pair.tables(table("x", 7, 3), table("y", 5, 3, "b", "x"))
    ours, twin = pair.make(tables, **{pair.flag: True})
    interface = pair.theirs.__mro__[1]
    assert interface.__name__ == f"{pair.theirs.__name__}Interface"
    assert isinstance(ours, interface)
    for name in interface.__abstractmethods__ - {"forward"}:
        # The functions of two configurations are alike, but not equal.
        assert repr(getattr(ours, name)()) == repr(getattr(twin, name)()), name
    assert getattr(ours, "embedding_bag_configs" if pair.is_pooled else "embedding_configs")() is tables
    assert getattr(ours, pair.flag)() is True
    assert getattr(pair.ours(tables, device=place.device), pair.flag)() is False
    assert ours.device.type == place.device.type
    # Arguments by position.
    given, wanted = (list(inspect.signature(of).parameters.values()) for of in (pair.ours, pair.theirs))
    positional = [of.name for of in given if of.kind is of.POSITIONAL_OR_KEYWORD]
    assert len(positional) >= 3
    assert positional == [of.name for of in wanted][: len(positional)]
    assert list(inspect.signature(pair.ours.forward).parameters) == list(inspect.signature(pair.theirs.forward).parameters)


@every_pair
def test_tables_that_both_refuse(place: Place, pair: Pair) -> None:
    tables = pair.tables(table("x", 5, 3), table("x", 5, 3))
    with pytest.raises(ValueError, match=r"^tables: expected names of their own, got 'x' twice$"):
        pair.ours(tables, device=place.device)
    with pytest.raises(ValueError, match=r"^Duplicate table name x$"):
        pair.theirs(tables, device=torch.device(place.device))
    if not pair.is_pooled:
        wide = pair.tables(table("x", 5, 3), table("y", 5, 3), table("z", 5, 3))
        wide[1].embedding_dim = 4
        for of in (pair.ours, pair.theirs):
            with pytest.raises(ValueError, match=r"(?=.*\by\b)(?=.*\b4\b)"):
                of(wide, device=torch.device(place.device))


@every_pair
def test_keys_that_are_missing(place: Place, pair: Pair) -> None:
    ours, twin = pair.make(pair.tables(table("x", 5, 3, "a", "e"), table("y", 5, 3, "e", "f")))
    for features, missing in ((Lookups().features(), "e, f"), (Lookups(("f", "a")).features(), "e")):
        message = f"features: expected a key for every feature of the tables, got none for {missing}"
        with pytest.raises(ValueError, match=f"^{message}$"):
            ours(features)
        with pytest.raises(KeyError):
            twin(features)


@pooled_pairs
@pytest.mark.parametrize("keys", ["ab", "ba"])
def test_weights_that_are_missing(place: Place, pair: Pair, keys: str) -> None:
    ours, twin = pair.make(two_tables(pair), is_weighted=True)
    for weights, message in (
        (None, "features: expected weights, as is_weighted says, got none; give KeyedJaggedTensor weights"),
        ([1.0, 1.0, 1.0], "features: expected a weight for each of 4 ids, got 3"),
    ):
        features = batch_of(keys, values=[0, 1, 2, 3], lengths=[2, 2], weights=weights)
        # On a GPU nothing has to be read for it either, but the operator says it where keys are in the tables' order.
        if place.name == "cpu" or weights is None:
            with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
                ours(features)
            with pytest.raises((AssertionError, RuntimeError)):
                twin(features)


@pooled_pairs
def test_weights_that_are_not_read(place: Place, pair: Pair) -> None:
    ours, twin = pair.make(two_tables(pair))
    features = batch_of("ba", values=[0, 1, 2, 3], lengths=[2, 2], weights=[1.0, 2.0, 3.0, 4.0])
    check_same(ours(features), twin(features))


MALFORMED = [
    ({"lengths": [1, 0]}, "features: expected lengths with the sum 4, the number of ids, got 1 for keys 'a', 'b'"),
    ({"lengths": [-2, 6]}, "features: expected lengths of at least 0, got -2 for key 'a' in sample 0"),
    ({"lengths": [5, 5]}, "features: expected lengths with the sum 4, the number of ids, got 10 for keys 'a', 'b'"),
    ({"offsets": [0, 4, 2]}, "features: expected lengths of at least 0, got -2 for key 'b' in sample 0"),
    ({"offsets": [1, 2, 4]}, "features: expected offsets from 0 on, got 1 for key 'a'"),
]


@every_pair
@pytest.mark.parametrize(("wrong", "message"), MALFORMED)
@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize("features_of", [["a", "b"], ["b", "a"], ["a", "a"]])
def test_malformed_batches(
    place: Place, pair: Pair, wrong: dict[str, list[int]], message: str, flag: bool, features_of: list[str]
) -> None:
    """Refused on a CPU, by the key; elsewhere, and where values are trusted, pooling reads nothing outside."""
    tables = pair.tables(table("x", 9, 4, features_of[0]), table("y", 9, 4, features_of[1]))
    ours = pair.ours(tables, device=place.device, **{pair.flag: flag})
    weights = [1.0] * 4 if pair.is_pooled and flag else None
    features = batch_of("ab", values=[0, 1, 2, 3], weights=weights, **wrong)
    if place.name == "cpu":
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            ours(features)
    # What is not pooled is split by the lengths, which fails by itself.
    if pair.is_pooled:
        with trust_values():
            assert ours(features).values().isfinite().all()


UNKNOWN = [
    ([0, 1, 2, 5], "0 to 4, the rows of table 'y', got 5 for key 'b' in sample 1"),
    ([0, 1, -1, 3], "0 to 4, the rows of table 'y', got -1 for key 'b' in sample 1"),
    ([7, 1, 2, 3], "0 to 6, the rows of table 'x', got 7 for key 'a' in sample 0"),
    ([0, -9, 9, 3], "0 to 6, the rows of table 'x', got -9 for key 'a' in sample 2"),
]


@every_pair
@pytest.mark.skipif(PLACE.name != "cpu", reason="on a GPU ids are read by kernels alone")
@pytest.mark.parametrize(("ids", "message"), UNKNOWN)
@pytest.mark.parametrize("order", ["as the tables", "permuted", "with others"])
@pytest.mark.parametrize("flag", [False, True])
def test_unknown_ids(place: Place, pair: Pair, ids: list[int], message: str, order: str, flag: bool) -> None:
    ours, twin = pair.make(two_tables(pair), **{pair.flag: flag})
    parts = {"a": (ids[:2], [1, 0, 1]), "b": (ids[2:], [0, 2, 0]), "c": ([100], [0, 0, 1])}
    keys = {"as the tables": "ab", "permuted": "ba", "with others": "bca"}[order]
    values, lengths = ([number for key in keys for number in parts[key][part]] for part in (0, 1))
    weights = [1.0] * len(values) if pair.is_pooled and flag else None
    features = batch_of(keys, values=values, lengths=lengths, weights=weights)
    with pytest.raises(ValueError, match=f"^features: expected ids from {message}$"):
        ours(features)
    with pytest.raises((RuntimeError, IndexError)):
        twin(features)


@every_pair
@pytest.mark.skipif(PLACE.name != "cpu", reason="where keys are in the tables' order the operator refuses these on a GPU")
@pytest.mark.parametrize("keys", ["abc", "cab", "abcd"])
def test_lengths_of_another_number(place: Place, pair: Pair, keys: str) -> None:
    ours, twin = pair.make(pair.tables(table("x", 7, 4, "a", "b"), table("y", 5, 4, "c")))
    count = len(keys)
    for made, message in (
        (
            {"lengths": [1] * (count + 1)},
            f"features: expected a multiple of the {count} keys as the number of lengths, got {count + 1}",
        ),
        (
            {"lengths": [1] * (count + 1), "stride_per_key_per_rank": torch.tensor([[1]] * count)},
            f"features: expected {count}, the sum of the keys' batch sizes as the number of lengths, got {count + 1}",
        ),
    ):
        with pytest.raises(ValueError, match=f"^{message}$"):
            ours(batch_of(keys, values=[0] * (count + 1), **made))
        with pytest.raises((RuntimeError, AssertionError)):
            twin(batch_of(keys, values=[0] * (count + 1), **made))


@pooled_pairs
def test_inverse_indices_that_are_refused(place: Place, pair: Pair) -> None:
    ours, twin = pair.make(two_tables(pair))
    made = {"values": [0, 1, 2], "lengths": [1, 0, 2], "stride_per_key_per_rank": torch.tensor([[1], [2]])}
    message = "features: expected inverse_indices for every feature of the tables, got none for b"
    features = batch_of("ab", **made, inverse_indices=(["a"], on_device([[0, 0]])))
    with pytest.raises(ValueError, match=f"^{message}$"):
        ours(features)
    with pytest.raises(KeyError):
        twin(features)
    if place.name != "cpu":
        return
    for rows, message in (
        ([[0, 1], [0, 1]], "below 1, the batch size of key 'a', got 1 in sample 1"),
        ([[0, 0], [-1, 1]], "below 2, the batch size of key 'b', got -1 in sample 0"),
    ):
        # In the order of the inverse indices' own keys.
        features = batch_of("ab", **made, inverse_indices=(["b", "a"], on_device(rows[::-1])))
        with pytest.raises(ValueError, match=f"^features: expected inverse_indices from 0 on and {message}$"):
            ours(features)
        with pytest.raises(IndexError):
            twin(features)
