"""Tables that are read and scored against, and updated once: in the backward pass, or by a step that is held back."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.fx import Tracer
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from jagged.modules import (
    CutCrossEntropyHead,
    HeldUpdates,
    SampledCrossEntropyHead,
    ScheduledEmbeddingBagCollection,
    ScheduledEmbeddingBagCollectionSharder,
    ScheduledEmbeddingCollection,
    ScheduledEmbeddingCollectionSharder,
    UniformSampler,
    share_tables,
)
from jagged.training.processes import process_group
from tests.places import PLACE, Place

ITEMS, WIDTH = 11, 8
RATE, EPS = 0.125, 1e-12


def config(**more: Any) -> EmbeddingConfig:
    return EmbeddingConfig(name="item", embedding_dim=WIDTH, num_embeddings=ITEMS, feature_names=["history"], **more)


def options(kind: str | None) -> dict[str, Any]:
    return {} if kind is None else {"optimizer": kind, "optimizer_options": {"learning_rate": RATE, "eps": EPS}}


class Recommender(nn.Module):
    """Histories through a linear layer, against the next item among all, or among drawn ones."""

    def __init__(self, kind: str | None, head: nn.Module, **more: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.items = ScheduledEmbeddingCollection([config(**more)], PLACE.device, **options(kind))
        self.over = nn.Linear(WIDTH, WIDTH, device=PLACE.device)
        self.head = head

    def forward(self, histories: KeyedJaggedTensor, targets: Tensor) -> Tensor:
        rows = self.items(histories)["history"]
        hidden = JaggedTensor(self.over(rows.values()), offsets=rows.offsets())
        loss: Tensor = self.head(hidden, self.items.scored("item"), targets).loss
        return loss


def batch(seed: int) -> tuple[KeyedJaggedTensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([2, 0, 3])
    ids, targets = (torch.randint(ITEMS - 2, (5,), generator=generator) for _ in range(2))
    targets[0] = -100
    return KeyedJaggedTensor(["history"], ids, lengths=lengths).to(PLACE.device), targets.to(PLACE.device)


def all_items() -> nn.Module:
    return CutCrossEntropyHead()


def drawn_items() -> nn.Module:
    return SampledCrossEntropyHead(UniformSampler(ITEMS, 3, seed=3, device=PLACE.device), sparse=True).eval()


def dense_optimizer(kind: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=RATE)
    if kind == "adagrad":
        return torch.optim.Adagrad(parameters, lr=RATE, eps=EPS)
    return torch.optim.AdamW(parameters, lr=RATE, eps=EPS, weight_decay=0.0)


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "adam"])
def test_a_head_over_all_items_trains_as_the_dense_optimizer(place: Place, kind: str) -> None:
    """All rows are scored, so that Adam is dense Adam."""
    fused, dense = Recommender(kind, all_items()), Recommender(None, all_items())
    assert dense.items.scored("item") is dense.items.embeddings["item"].weight
    updates = dense_optimizer(kind, [dense.items.embeddings["item"].weight])
    for seed in range(3):
        for model in (fused, dense):
            model.zero_grad()
            model(*batch(seed)).backward()
        updates.step()
        assert fused.items.embeddings["item"].weight.grad is None
        torch.testing.assert_close(fused.over.weight.grad, dense.over.weight.grad, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(
            fused.items.embeddings["item"].weight, dense.items.embeddings["item"].weight, rtol=1e-4, atol=1e-5
        )
    assert int(fused.items.optimizers[0].step) == 3


def test_a_head_over_drawn_items_touches_these(place: Place) -> None:
    """Rows that are read, drawn or targets change by momentum, too; no other does."""
    fused, dense = Recommender("adam", drawn_items()), Recommender(None, drawn_items())
    weight, before = fused.items.embeddings["item"].weight, fused.items.embeddings["item"].weight.detach().clone()
    own = dense.items.embeddings["item"].weight
    updates = torch.optim.SparseAdam([own], lr=RATE, eps=EPS)
    for seed in range(3):
        fused(*batch(seed)).backward()
        own.grad = None
        dense(*batch(seed)).backward()
        assert own.grad is not None
        touched = {*batch(seed)[0].values().tolist(), *batch(seed)[1].tolist()} - {-100}
        grad = own.grad.to_dense()
        named = torch.tensor(sorted({*grad.any(1).nonzero()[:, 0].tolist(), *touched}), device=PLACE.device)
        own.grad = torch.sparse_coo_tensor(named[None], grad[named], grad.shape)
        updates.step()
        torch.testing.assert_close(weight, own, rtol=1e-4, atol=1e-5)
    assert not torch.equal(weight, before)


@pytest.mark.parametrize("head", [all_items, drawn_items])
def test_clipped_by_a_norm_over_several_batches(place: Place, head: Any) -> None:
    """As gradients of PyTorch that are accumulated and clipped with those of the rest of the model."""
    fused, dense = Recommender("adagrad", head()), Recommender(None, head())
    held = HeldUpdates(fused)
    weights = [model.items.embeddings["item"].weight for model in (fused, dense)]
    updates = torch.optim.Adagrad(dense.parameters(), lr=RATE, eps=EPS)
    rest = torch.optim.Adagrad(fused.over.parameters(), lr=RATE, eps=EPS)
    for step in range(2):
        before = weights[0].detach().clone()
        for model in (fused, dense):
            model.zero_grad()
            for part in range(2):
                model(*batch(2 * step + part)).backward()
        assert torch.equal(weights[0], before)
        of_rest = nn.utils.get_total_norm([p.grad for p in fused.over.parameters() if p.grad is not None])
        norm = torch.linalg.vector_norm(torch.stack([of_rest, held.norm()]))
        scale = (0.25 / norm).clamp(max=1.0)
        expected = nn.utils.clip_grad_norm_(dense.parameters(), 0.25)
        torch.testing.assert_close(norm, expected, rtol=1e-4, atol=0)
        assert float(scale) < 1
        for parameter in fused.over.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(scale)
        assert bool(held.step(scale))
        rest.step()
        updates.step()
        torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-5)
    assert int(fused.items.optimizers[0].step) == 2
    held.release()
    before = weights[0].detach().clone()
    fused(*batch(9)).backward()
    assert not torch.equal(weights[0], before)


class Halves(nn.Module):
    """Tables of two data types, which two storages hold."""

    def __init__(self) -> None:
        super().__init__()
        tables = [
            EmbeddingConfig(name=name, embedding_dim=WIDTH, num_embeddings=ITEMS, feature_names=[name], data_type=data_type)
            for name, data_type in (("a", DataType.FP32), ("b", DataType.FP16))
        ]
        self.rows = ScheduledEmbeddingCollection(tables, PLACE.device, **options("rowwise_adagrad"))

    def forward(self, scale: float) -> Tensor:
        ids = KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2, 2, 3]), lengths=torch.tensor([2, 2])).to(PLACE.device)
        found = self.rows(ids)
        return found["a"].values().sum() + scale * found["b"].values().sum()


def test_what_is_not_finite_in_one_storage_changes_none(place: Place) -> None:
    model = Halves()
    held = HeldUpdates(model)
    before = copy.deepcopy(model.state_dict())
    assert bool(held.is_finite())
    model(torch.inf).backward()
    assert not bool(held.is_finite())
    assert not bool(held.step())
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name])
    assert [int(of.step) for of in model.rows.optimizers] == [0, 0]
    model(1.0).backward()
    held.drop()
    assert float(held.norm()) == 0
    model(2.0).backward()
    torch.testing.assert_close(float(held.norm()), (WIDTH * (1 + 1 + 4 + 4)) ** 0.5)
    assert bool(held.step())
    assert [int(of.step) for of in model.rows.optimizers] == [1, 1]


def test_gradients_are_asked_once_whether_they_are_finite(place: Place) -> None:
    """Who asks before the step, as processes that share tables do, reads them no second time; what comes after counts."""
    model = Recommender("sgd", all_items())
    held = HeldUpdates(model)
    asked: list[torch.Size] = []

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            # By its largest number (`ops/_shared/finite.py`).
            if func is torch.ops.aten.linalg_vector_norm.default and args[0].dim():
                asked.append(args[0].shape)
            return func(*args, **(kwargs or {}))

    model(*batch(0)).backward()
    with Counting():
        assert bool(held.is_finite())
        once = len(asked)
        assert bool(held.step())
    assert once > 0
    assert len(asked) == once
    # Not what was found of the last batch's.
    model(*batch(1)).backward()
    assert bool(held.is_finite())
    (model(*batch(2)) * torch.inf).backward()
    before = model.items.embeddings["item"].weight.detach().clone()
    assert not bool(held.is_finite())
    assert not bool(held.step())
    assert torch.equal(model.items.embeddings["item"].weight, before)


def test_a_copy_updates_by_itself(place: Place) -> None:
    """Nobody steps it; a copy of both holds its own model's updates."""
    model = Recommender("sgd", all_items())
    held = HeldUpdates(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        before = other.items.embeddings["item"].weight.detach().clone()
        other(*batch(0)).backward()
        assert not torch.equal(other.items.embeddings["item"].weight, before)
    before = model.items.embeddings["item"].weight.detach().clone()
    for both in (copy.deepcopy((model, held)), pickle.loads(pickle.dumps((model, held)))):
        both[0](*batch(0)).backward()
        assert torch.equal(both[0].items.embeddings["item"].weight, before)
        assert bool(both[1].step())
        assert not torch.equal(both[0].items.embeddings["item"].weight, before)
    assert torch.equal(model.items.embeddings["item"].weight, before)


def test_moved_and_loaded_tables_are_still_held(place: Place) -> None:
    model = Recommender("sgd", all_items())
    held = HeldUpdates(model)
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    model.double().float()
    before = model.items.embeddings["item"].weight.detach().clone()
    model(*batch(0)).backward()
    assert torch.equal(model.items.embeddings["item"].weight, before)
    assert bool(held.step())
    assert not torch.equal(model.items.embeddings["item"].weight, before)


def test_a_pooled_collection_shares_what_is_scored(place: Place) -> None:
    """One update for bags, rows and scores, by the sum of their gradients."""
    of_bags = EmbeddingBagConfig(name="item", embedding_dim=WIDTH, num_embeddings=ITEMS, feature_names=["liked"])
    bags = ScheduledEmbeddingBagCollection([of_bags], device=PLACE.device, **options("sgd"))
    rows = ScheduledEmbeddingCollection([config()], PLACE.device, **options("sgd"))
    share_tables(bags, rows)
    before = rows.embeddings["item"].weight.detach().clone()
    liked = KeyedJaggedTensor(["liked"], torch.tensor([4, 4]), lengths=torch.tensor([2])).to(PLACE.device)
    history = KeyedJaggedTensor(["history"], torch.tensor([4]), lengths=torch.tensor([1])).to(PLACE.device)
    total = bags(liked).values().sum() + rows(history)["history"].values().sum()
    (total + rows.scored("item")[4].sum() + bags.scored("item")[5].sum()).backward()
    expected = before.clone()
    expected[4] -= RATE * 4
    expected[5] -= RATE
    torch.testing.assert_close(rows.embeddings["item"].weight.detach(), expected)
    assert int(rows.optimizers[0].step) == 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("is_on", [False, True])
def test_autocast_checkpointing_and_compile(place: Place, is_on: bool) -> None:
    """The table's gradient is float32 under autocast, too."""
    found = []
    for way in ("plain", "checkpoint", "compile"):
        model = Recommender("adagrad", all_items())
        call: Any = torch.compile(model, backend="aot_eager") if way == "compile" else model
        with torch.autocast(torch.device(PLACE.device).type, torch.bfloat16, enabled=is_on):
            loss = checkpoint(model, *batch(0), use_reentrant=False) if way == "checkpoint" else call(*batch(0))
        loss.backward()
        assert int(model.items.optimizers[0].step) == 1
        found.append(model.items.embeddings["item"].weight.detach())
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
    torch.testing.assert_close(found[2], found[0], rtol=1e-2 if is_on else 1e-5, atol=1e-2 if is_on else 1e-6)


def test_what_is_refused(place: Place) -> None:
    with pytest.raises(ValueError, match=r"^model: ") as caught:
        HeldUpdates(nn.ModuleList([Recommender(None, all_items()), EmbeddingCollection([config()])]))
    assert str(caught.value) == "model: expected tables with an optimizer, got none; give a collection one by optimizer"
    with pytest.raises(KeyError) as missing:
        Halves().rows.scored("c")
    assert missing.value.args == ("name: expected one of a, b, got 'c'",)
    model = Recommender("sgd", all_items())
    model.items.embeddings["item"].weight.requires_grad_(False)
    # Nothing learns, so that there is nothing to hand over.
    assert model.items.scored("item") is model.items.embeddings["item"].weight
    with torch.no_grad():
        assert not Recommender("sgd", all_items()).items.scored("item").grad_fn


def test_a_trace_that_would_keep_the_table_is_refused(place: Place) -> None:
    """A traced model would score against the tensor of the moment. Without an optimizer it is a parameter, as any other."""
    for kind in ("sgd", None):
        model = Recommender(kind, all_items())
        tracer = Tracer(leaf_modules=["ScheduledEmbeddingCollection"])
        if kind is None:
            traced = torch.fx.GraphModule(model, tracer.trace(model))
            assert torch.equal(traced(*batch(0)), model(*batch(0)))
            continue
        with pytest.raises(RuntimeError) as caught:
            tracer.trace(model)
        assert str(caught.value) == (
            "scored: a trace by torch.fx would keep the table as it is now; call it in a module that is a leaf of the trace"
        )


class Scorer(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.items = ScheduledEmbeddingCollection([config()], PLACE.device, **options(kind))

    def forward(self, histories: KeyedJaggedTensor) -> Tensor:
        return self.items(histories)["history"].values() @ self.items.scored("item").T


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("with_gradients", [False, True])
def test_exported_scores_read_the_table_in_place(place: Place, with_gradients: bool) -> None:
    """The program has the table once, as what its state dict says."""
    model, (histories, _) = Scorer("adagrad").eval(), batch(0)
    with torch.set_grad_enabled(with_gradients):
        program = torch.export.export(model, (histories,), strict=False)
    assert list(program.state_dict) == ["items.embeddings.item.weight"]
    module, weight = program.module(), model.items.embeddings["item"].weight
    torch.testing.assert_close(module(histories), model(histories), rtol=0, atol=0)
    with torch.no_grad():
        weight.add_(1)
        other = copy.deepcopy(model.state_dict())
        module.load_state_dict(other)
    torch.testing.assert_close(module(histories), model(histories), rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_given_back_tables_have_gradients(place: Place, kind: str) -> None:
    """Held or not, and with nothing left of the optimizer; a new one begins anew."""
    model = Recommender(kind, all_items())
    HeldUpdates(model)
    weight, before = model.items.embeddings["item"].weight, model.items.embeddings["item"].weight.detach().clone()
    model(*batch(0)).backward()
    model.items.stop_updating()
    assert model.items.optimizers == []
    assert model.items.scored("item") is weight
    model(*batch(0)).backward()
    assert torch.equal(weight, before)
    plain = Recommender(None, all_items())
    plain(*batch(0)).backward()
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, plain.items.embeddings["item"].weight.grad)
    weight.grad = None
    model.items.update_in_backward("sgd", {"learning_rate": RATE})
    model(*batch(0)).backward()
    assert weight.grad is None
    assert not torch.equal(weight, before)


@pytest.mark.parametrize("is_pooled", [True, False], ids=["bags", "rows"])
@pytest.mark.parametrize("kind", ["sgd", "rowwise_adam"])
def test_shards_are_held_as_whole_tables_are(kind: str, is_pooled: bool) -> None:
    """In a group of one process: several are in tests/training/test_table_plan.py."""
    with process_group(torch.device("cpu")):
        made: Any = ScheduledEmbeddingBagCollection if is_pooled else ScheduledEmbeddingCollection
        sharder: Any = (ScheduledEmbeddingBagCollectionSharder if is_pooled else ScheduledEmbeddingCollectionSharder)()
        configs: Any = EmbeddingBagConfig if is_pooled else EmbeddingConfig
        sizes = (("item", 7), ("user", 5))
        tables = [configs(name=of, embedding_dim=4, num_embeddings=rows, feature_names=[of]) for of, rows in sizes]
        whole = nn.ModuleDict({"tables": made(tables, **options(kind))})
        types = {"item": row_wise(), "user": table_wise(rank=0)}
        plan = construct_module_sharding_plan(whole["tables"], types, sharder, local_size=1, world_size=1, device_type="cpu")
        sharded = DistributedModelParallel(copy.deepcopy(whole), plan=ShardingPlan({"tables": plan}), sharders=[sharder])
        found = []
        for model in (whole["tables"], sharded.module["tables"]):
            held = HeldUpdates(model)
            for ids in ([0, 6, 6, 1, 4], [2, 6, 3, 0, 0]):
                features = KeyedJaggedTensor(["item", "user"], torch.tensor(ids), lengths=torch.tensor([1, 2, 2, 0]))
                output = model(features)
                parts = [output.values()] if is_pooled else [output[name].values() for name in ("item", "user")]
                sum(part.square().sum() for part in parts).backward()
            norm = held.norm()
            assert held.step(scale=0.5 / norm)
            if model is whole["tables"]:
                states = model.optimizer_states()
                weights = {name: model._modules_of_tables[name].weight for name in states}
            else:
                states = {of.table: of.states for of in model.shards()}
                weights = {of.table: of.weight for of in model.shards()}
            found.append((norm, states, weights))
        (norm, states, weights), (of_shards, states_of_shards, weights_of_shards) = found
        torch.testing.assert_close(of_shards, norm)
        for name, weight in weights.items():
            torch.testing.assert_close(weights_of_shards[name], weight.detach())
            for key, state in states[name].items():
                torch.testing.assert_close(states_of_shards[name][key], state, msg=f"{name} {key}")
            assert states[name]["step"] == 1
