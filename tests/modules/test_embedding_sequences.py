"""Rows of tables without pooling: our collection beside TorchRec's, and tables that it shares with one of bags."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from jagged.modules import (
    ScheduledEmbeddingBagCollection,
    ScheduledEmbeddingCollection,
    replace_embeddings,
    share_tables,
)
from tests.places import PLACE, Place
from tests.strategies import seeds

pytestmark = pytest.mark.skipif(PLACE.name == "interpret", reason="modules run on the place's own backend")

KEYS = ["a", "b", "c", "d"]
WIDTH = 4


def table(name: str, rows: int, *features: str, **options: Any) -> EmbeddingConfig:
    return EmbeddingConfig(name=name, num_embeddings=rows, embedding_dim=WIDTH, feature_names=list(features), **options)


def some_tables() -> list[EmbeddingConfig]:
    """A table of two features, a feature of two tables, two data types that take turns."""
    return [table("x", 7, "a", "b"), table("y", 5, "c", data_type=DataType.FP16), table("z", 7, "a")]


def features_of(
    seed: int, samples: int = 3, keys: list[str] | None = None, longest: int = 4, **options: Any
) -> KeyedJaggedTensor:
    """Ids below 5, int32 by every second seed."""
    keys = KEYS if keys is None else keys
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(longest + 1, (len(keys) * samples,), generator=generator)
    dtype = (torch.int64, torch.int32)[seed % 2]
    ids = torch.randint(5, (int(lengths.sum()),), generator=generator).to(dtype)
    return KeyedJaggedTensor(keys=keys, values=ids, lengths=lengths.to(torch.int32), **options).to(PLACE.device)


def pair(configs: list[EmbeddingConfig], **options: Any) -> tuple[ScheduledEmbeddingCollection, EmbeddingCollection]:
    """Ours and TorchRec's with the same weights."""
    torch.manual_seed(0)
    twin = EmbeddingCollection(copy.deepcopy(configs), torch.device(PLACE.device), options.get("need_indices", False))
    ours = ScheduledEmbeddingCollection(configs, PLACE.device, **options)
    ours.load_state_dict(twin.state_dict())
    return ours, twin


def same(found: dict[str, JaggedTensor], expected: dict[str, JaggedTensor]) -> None:
    assert list(found) == list(expected)
    for name, of in found.items():
        assert torch.equal(of.values(), expected[name].values())
        assert torch.equal(of.lengths(), expected[name].lengths())
        assert torch.equal(of.offsets(), expected[name].offsets())
        weights, other = of.weights_or_none(), expected[name].weights_or_none()
        assert (weights is None) == (other is None)
        assert weights is None or torch.equal(weights, other)


@given(seeds(), st.integers(0, 5), st.permutations(KEYS), st.integers(0, 6), st.booleans())
def test_rows_and_gradients_are_torchrecs(
    place: Place, seed: int, samples: int, keys: list[str], longest: int, need_indices: bool
) -> None:
    ours, twin = pair(some_tables(), need_indices=need_indices)
    features = features_of(seed, samples, keys, longest)
    if not samples:
        # TorchRec's takes no batch without samples.
        found = ours(features)
        assert list(found) == ["a@x", "b", "c", "a@z"]
        assert [tuple(of.values().shape) for of in found.values()] == [(0, WIDTH)] * 4
        return
    found, expected = ours(features), twin(features)
    same(found, expected)
    for of in (found, expected):
        torch.stack([(rows.values() * rows.values().detach().cos()).sum() for rows in of.values()]).sum().backward()
    # Rows that many lookups read are sums, which PyTorch rounds to 16 bits after each: so those are compared with float64's.
    exact = {name: torch.zeros_like(of, dtype=torch.float64) for name, of in ours.named_parameters()}
    for name, rows in found.items():
        key, of = name[0], {"a@x": "x", "b": "x", "c": "y", "a@z": "z"}[name]
        exact[f"embeddings.{of}.weight"].index_add_(0, features[key].values().long(), rows.values().detach().cos().double())
    for (name, mine), theirs in zip(ours.named_parameters(), twin.parameters(), strict=True):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad, exact[name].to(mine.dtype))
        if mine.dtype == torch.float32:
            torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize("samples", [0, 1, 3])
def test_a_single_key_does_not_wait_for_the_device(place: Place, samples: int) -> None:
    ours, twin = pair([table("x", 7, "a")])
    features = features_of(1, samples, ["a"])
    assert features.length_per_key_or_none() is None
    if PLACE.name == "gpu":
        ours(features)
        torch.cuda.set_sync_debug_mode("error")
    try:
        found = ours(features)
    finally:
        if PLACE.name == "gpu":
            torch.cuda.set_sync_debug_mode("default")
    assert features.length_per_key_or_none() is None
    if samples:
        same(found, twin(features))


@pytest.mark.parametrize("optimizer", [None, "sgd"])
def test_the_gradient_of_a_single_key_is_not_copied(place: Place, optimizer: Any) -> None:
    options = {"optimizer": optimizer, "optimizer_options": {"learning_rate": 0.1}} if optimizer else {}
    ours = ScheduledEmbeddingCollection([table("x", 7, "a")], PLACE.device, **options)
    rows, came = ours(features_of(1, 3, ["a"]))["a"].values(), []
    node = rows.grad_fn
    assert node is not None
    # The lookup itself; what lies before it are views.
    while node.next_functions[0][0] is not None and "View" in node.name():
        node = node.next_functions[0][0]
    node.register_prehook(lambda grads: came.append(grads[0].data_ptr()))
    grad = torch.randn_like(rows)
    rows.backward(grad)
    assert came == [grad.data_ptr()]


def test_lengths_of_a_single_key_are_made_when_they_are_asked_for(place: Place) -> None:
    ours, twin = pair([table("x", 7, "a")])
    values, offsets = torch.tensor([1, 6, 2], device=place.device), torch.tensor([0, 2, 2, 3], device=place.device)
    of_offsets, of_lengths = ({"offsets": offsets}, {"lengths": offsets.diff()})
    for of_batch, is_known in ((of_offsets, False), (of_lengths, True)):
        found, expected = (of(KeyedJaggedTensor(["a"], values, **of_batch))["a"] for of in (ours, twin))
        assert (found.lengths_or_none() is not None) is is_known
        assert torch.equal(found.lengths(), expected.lengths())
        assert torch.equal(found.offsets(), expected.offsets())
        for ours_padded, padded in zip(found.to_dense(), expected.to_dense(), strict=True):
            assert torch.equal(ours_padded, padded)


@pytest.mark.filterwarnings("ignore")
def test_a_single_key_without_lengths_is_compiled_exported_copied_and_pooled(place: Place) -> None:
    """What is made of its rows behind the lookup: padded, packed with others, moved, pickled, in bfloat16, in checkpoints."""
    torch._dynamo.reset()
    ours, _ = pair([table("x", 7, "a")])
    values, offsets = torch.tensor([1, 6, 2], device=place.device), torch.tensor([0, 2, 2, 3], device=place.device)

    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = ours

        def forward(self, features: KeyedJaggedTensor) -> Tensor:
            found = self.rows(features)["a"]
            return torch.segment_reduce(found.values(), "sum", lengths=found.lengths(), axis=0)

    def batch() -> KeyedJaggedTensor:
        return KeyedJaggedTensor(["a"], values, offsets=offsets)

    model = Summed()
    expected = torch.stack([ours.embeddings["x"].weight[ids].sum(0) for ids in values.split([2, 0, 1])])
    torch.testing.assert_close(model(batch()), expected)
    torch.testing.assert_close(torch.compile(model, backend="aot_eager")(batch()), expected)
    torch.testing.assert_close(torch.export.export(model.eval(), (batch(),), strict=False).module()(batch()), expected)
    torch.testing.assert_close(torch.fx.symbolic_trace(copy.deepcopy(model))(batch()), expected)
    torch.testing.assert_close(checkpoint(model, batch(), use_reentrant=False), expected)
    with torch.autocast(place.device.type, torch.bfloat16):
        torch.testing.assert_close(model(batch()), expected)
    found = ours(batch())
    again = pickle.loads(pickle.dumps(JaggedTensor(found["a"].values().detach(), offsets=found["a"].offsets())))
    assert torch.equal(again.lengths(), offsets.diff())
    assert found["a"].to(torch.device("meta")).values().is_meta
    packed = KeyedJaggedTensor.from_jt_dict({"a": JaggedTensor(values, offsets=found["a"].offsets())})
    assert packed.lengths().tolist() == [2, 0, 1]


def test_keys_of_known_lengths_do_not_wait_for_the_device(place: Place) -> None:
    """Nor where there are other lengths in each step."""
    ours, twin = pair([table("x", 7, "a", "b"), table("y", 5, "c")])
    batches = [features_of(seed, 3, ["c", "a", "b"]) for seed in range(6)]
    totals = [tuple(features.length_per_key()) for features in batches]
    assert len(set(totals)) == len(batches)
    for features in batches[:2]:
        sum(of.values().square().sum() for of in ours(features).values()).backward()
    if PLACE.name == "gpu":
        torch.cuda.set_sync_debug_mode("error")
    try:
        found = [ours(features) for features in batches[2:]]
        for of_keys in found:
            sum(of.values().square().sum() for of in of_keys.values()).backward()
    finally:
        if PLACE.name == "gpu":
            torch.cuda.set_sync_debug_mode("default")
    for of_keys, features in zip(found, batches[2:], strict=True):
        same(of_keys, twin(features))


def test_one_batch_size_for_each_key(place: Place) -> None:
    ours, twin = pair([table("x", 7, "a", "b"), table("y", 5, "c")])
    features = KeyedJaggedTensor(
        keys=["c", "a", "b"],
        values=torch.tensor([1, 4, 0, 3, 3, 6]),
        lengths=torch.tensor([2, 1, 0, 1, 2]),
        stride_per_key_per_rank=[[1], [3], [1]],
    ).to(PLACE.device)
    same(ours(features), twin(features))


def trained(collection: nn.Module, features: KeyedJaggedTensor, optimizer: torch.optim.Optimizer | None) -> None:
    loss = torch.stack([(of.values() ** 3).sum() for of in collection(features).values()]).sum()
    if optimizer is not None:
        optimizer.zero_grad()
    loss.backward()
    if optimizer is not None:
        optimizer.step()


def test_with_an_optimizer_rows_are_updated_once_and_have_no_gradients(place: Place) -> None:
    """Where every row has been read, which Adagrad's state tells from rows that have not."""
    configs = [table("x", 5, "a", "b"), table("z", 5, "a")]
    ours, twin = pair(configs, optimizer="adagrad", optimizer_options={"learning_rate": 0.5, "eps": 1e-8})
    theirs = torch.optim.Adagrad(twin.parameters(), lr=0.5, eps=1e-8)
    for seed in range(3):
        features = features_of(seed, longest=9)
        trained(ours, features, None)
        trained(twin, features, theirs)
    assert all(parameter.grad is None for parameter in ours.parameters())
    assert [int(of.step) for of in ours.optimizers] == [3]
    for mine, other in zip(ours.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, other)


class Model(nn.Module):
    """A table that is pooled and read row by row, in TorchRec's collections one parameter; another one of bags alone."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        device = torch.device(PLACE.device)
        shared = {"name": "item", "num_embeddings": 5, "embedding_dim": WIDTH}
        self.bags = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(name="shop", num_embeddings=5, embedding_dim=3, feature_names=["d"], pooling=PoolingType.MEAN),
                EmbeddingBagConfig(**shared, feature_names=["a", "b"]),
            ],
            device=device,
        )
        self.rows = EmbeddingCollection([EmbeddingConfig(**shared, feature_names=["c", "a"])], device)
        self.rows.embeddings["item"].weight = self.bags.embedding_bags["item"].weight
        if options:
            replace_embeddings(self, **options.get("given", {}))

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        rows = self.rows(features)
        return (self.bags(features).values() ** 3).sum() + sum((of.values() ** 2).sum() for of in rows.values())


def models(**given: Any) -> tuple[Model, Model]:
    torch.manual_seed(0)
    twin = Model()
    ours = copy.deepcopy(twin)
    replace_embeddings(ours, **given)
    return ours, twin


def test_tables_that_are_tied_stay_so(place: Place) -> None:
    ours, twin = models()
    assert type(ours.bags) is ScheduledEmbeddingBagCollection
    assert type(ours.rows) is ScheduledEmbeddingCollection
    assert ours.bags.embedding_bags["item"].weight is ours.rows.embeddings["item"].weight
    assert list(dict(ours.named_parameters())) == list(dict(twin.named_parameters()))
    assert list(ours.state_dict()) == list(twin.state_dict())
    assert ours.bags._parts[0].tables is ours.rows._parts[0].tables
    features = features_of(3)
    for of in (ours, twin):
        of(features).backward()
    torch.testing.assert_close(ours(features), twin(features))
    for mine, theirs in zip(ours.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def moved(of: Model) -> Model:
    return of.double().float()


def saved(of: Model) -> Model:
    file = io.BytesIO()
    torch.save(of, file)
    file.seek(0)
    loaded: Model = torch.load(file, weights_only=False)
    return loaded


def pickled(of: Model) -> Model:
    copied: Model = pickle.loads(pickle.dumps(of))
    return copied


@pytest.mark.parametrize("change", [copy.deepcopy, moved, saved, pickled], ids=lambda of: of.__name__)
def test_a_row_that_both_read_is_updated_once(place: Place, change: Any) -> None:
    """By the sum of its gradients, as torch's Adagrad does with a dense one; also in a copy, after a step before it."""
    given = {"optimizer": "adagrad", "optimizer_options": {"learning_rate": 0.5, "eps": 1e-8}}
    ours, twin = models(**given)
    theirs = torch.optim.Adagrad(twin.parameters(), lr=0.5, eps=1e-8)

    def step(of: Model, optimizer: torch.optim.Optimizer | None, seed: int) -> None:
        if optimizer is not None:
            optimizer.zero_grad()
        of(features_of(seed, longest=9)).backward()
        if optimizer is not None:
            optimizer.step()

    for of, optimizer in ((ours, None), (twin, theirs)):
        step(of, optimizer, 0)
    ours = change(ours)
    assert ours.bags.embedding_bags["item"].weight is ours.rows.embeddings["item"].weight
    assert ours.bags._parts[0].tables is ours.rows._parts[0].tables
    for seed in (1, 2):
        for of, optimizer in ((ours, None), (twin, theirs)):
            step(of, optimizer, seed)
    assert int(ours.bags.optimizers[0].step) == 3
    for mine, other in zip(ours.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, other)


def test_share_tables_by_name(place: Place) -> None:
    item = {"name": "item", "num_embeddings": 5, "embedding_dim": WIDTH}
    bags = ScheduledEmbeddingBagCollection(
        [EmbeddingBagConfig(**item, feature_names=["a"]), EmbeddingBagConfig(**item | {"name": "own"}, feature_names=["b"])],
        device=PLACE.device,
    )
    rows = ScheduledEmbeddingCollection([table("other", 7, "c"), EmbeddingConfig(**item, feature_names=["d"])], PLACE.device)
    features = features_of(4)
    before = {"pooled": bags(features).values().clone(), "other": rows(features)["c"].values().clone()}
    share_tables(bags, rows)
    assert bags.embedding_bags["item"].weight is rows.embeddings["item"].weight
    assert torch.equal(bags(features).values(), before["pooled"])
    found = rows(features)
    assert torch.equal(found["c"].values(), before["other"])
    assert torch.equal(found["d"].values(), bags.embedding_bags["item"].weight[features["d"].values().long()])
    assert list(rows.state_dict()) == ["embeddings.other.weight", "embeddings.item.weight"]


def test_what_cannot_be_shared_is_refused(place: Place) -> None:
    def collection(rows: int = 5, **options: Any) -> ScheduledEmbeddingCollection:
        return ScheduledEmbeddingCollection([table("item", rows, "a")], PLACE.device, **options)

    with pytest.raises(ValueError, match="collections: expected") as caught:
        share_tables(collection(), collection(6))
    assert str(caught.value) == (
        "collections: expected tables of one name to be alike, got [5, 4] of torch.float32 and [6, 4] of torch.float32 for 'item'"
    )
    with pytest.raises(ValueError, match="collections: expected") as caught:
        share_tables(collection(), collection(optimizer="sgd", optimizer_options={"learning_rate": 1.0}))
    assert (
        str(caught.value) == "collections: expected one optimizer for tables that are shared, got several; make all with the same"
    )


def test_an_optimizer_in_one_of_several_processes_is_refused(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would train tables of its own. Looking up without gradients, and tables with dense gradients, are not refused."""
    options = {"optimizer": "sgd", "optimizer_options": {"learning_rate": 1.0}}
    fused, dense = ScheduledEmbeddingCollection([table("x", 5, "a")], PLACE.device, **options), pair([table("x", 5, "a")])[0]
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    features = features_of(0)
    dense(features)
    with torch.no_grad():
        fused(features)
    with pytest.raises(RuntimeError) as caught:
        fused(features)
    assert str(caught.value) == (
        "optimizer: would update the tables of this process alone, of 2 processes in the group, so that their copies part; shard "
        "the model by DistributedModelParallel with ScheduledEmbeddingBagCollectionSharder and "
        "ScheduledEmbeddingCollectionSharder, or leave the optimizer out"
    )
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    fused(features)


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
            [table("x", 5, "a", data_type=DataType.INT8)],
            {},
            ValueError,
            "tables: expected a data type of FP32, FP16, BF16, got INT8 for 'x'",
        ),
        (
            [table("x", 5, "a")],
            {"output_dtype": torch.int32},
            TypeError,
            "output_dtype: expected one of torch.float32, torch.bfloat16, torch.float16, torch.float64, got torch.int32",
        ),
    ],
)
def test_wrong_arguments(tables: list[EmbeddingConfig], options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        ScheduledEmbeddingCollection(tables, **options)
    assert str(caught.value) == message


@pytest.mark.parametrize("output_dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_another_output_dtype(place: Place, output_dtype: torch.dtype) -> None:
    ours, twin = pair([table("x", 7, "a", "b")], output_dtype=output_dtype)
    found, expected = ours(features_of(2)), twin(features_of(2))
    for name, of in found.items():
        assert of.values().dtype == output_dtype
        torch.testing.assert_close(of.values(), expected[name].values().to(output_dtype), rtol=0, atol=0)


class Listed(nn.Module):
    """A linear layer over the rows of each feature."""

    def __init__(self, keys: str, **options: Any) -> None:
        super().__init__()
        self.rows = ScheduledEmbeddingCollection([table("x", 7, *keys)], PLACE.device, **options)
        self.over = nn.Linear(WIDTH, 2, device=PLACE.device)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        found = self.rows(features)
        return torch.cat([self.over(of.values()) for of in found.values()])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("keys", ["a", "ab"])
def test_exported(place: Place, keys: str) -> None:
    torch.manual_seed(0)
    model = Listed(keys).eval()
    sizes: list[Any] = [{0: torch.export.Dim.DYNAMIC}, None, {0: torch.export.Dim.DYNAMIC}, None, None, None]
    given = features_of(2, 3, list(keys))
    exported = torch.export.export(model, (given,), dynamic_shapes=(sizes,), strict=False).module()
    for seed, samples in ((2, 3), (4, 5)):
        features = features_of(seed, samples, list(keys))
        torch.testing.assert_close(exported(features), model(features), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore")
def test_compiled_with_breaks(place: Place) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = Listed("ab")
    compiled = torch.compile(model, backend="aot_eager")
    for seed in (2, 4):
        features = features_of(seed, seed, ["a", "b"])
        torch.testing.assert_close(compiled(features), model(features))


@pytest.mark.parametrize("is_on", [False, True])
def test_updates_under_autocast_and_checkpointing(place: Place, is_on: bool) -> None:
    """The linear layer's products are of 16 bits; rows, their sum over both lookups and the update are not. Computed once."""
    options = {"optimizer": "adagrad", "optimizer_options": {"learning_rate": 0.5}}
    tables = []
    for is_recomputed in (False, True):
        torch.manual_seed(0)
        model, features = Listed("ab", **options), features_of(2, 4, ["a", "b"])
        with torch.autocast(torch.device(PLACE.device).type, torch.bfloat16, enabled=is_on):
            of = [checkpoint(model, features, use_reentrant=False) if is_recomputed else model(features) for _ in range(2)]
        assert of[0].dtype == (torch.bfloat16 if is_on else torch.float32)
        (of[0].float().square().sum() + of[1].float().sum()).backward()
        assert int(model.rows.optimizers[0].step) == 1
        tables.append(model.rows.embeddings["x"].weight.detach().clone())
    assert torch.equal(*tables)
