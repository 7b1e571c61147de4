"""TorchRec's train pipelines, and what they may look up ahead of which update."""

from __future__ import annotations

import functools
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.dist_data import PooledEmbeddingsAwaitable, SequenceEmbeddingsAwaitable
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineFusedSparseDist, TrainPipelineSemiSync
from torchrec.distributed.types import NoWait, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from jagged.modules import (
    HeldUpdates,
    ScheduledEmbeddingBagCollection,
    ScheduledEmbeddingBagCollectionSharder,
    ScheduledEmbeddingCollection,
    ScheduledEmbeddingCollectionSharder,
)
from jagged.modules.table_sharding import keep_for_readers
from jagged.training.processes import process_group
from tests.places import PLACE

pytestmark = [
    pytest.mark.skipif(PLACE.name == "interpret", reason="what a pipeline does is the same in every place"),
    # Marks what runs on a GPU, too.
    pytest.mark.usefixtures("place"),
]

HOST = torch.device("cpu")
SGD: dict[str, Any] = {"optimizer": "sgd", "optimizer_options": {"learning_rate": 0.5}}
NAMED: dict[str, Any] = {"name": "item", "embedding_dim": 8, "num_embeddings": 20, "feature_names": ["item_id"]}
LATE_CYCLES = 10_000_000
EXPECTED = "train pipeline: expected one that looks up after the update before, got "
SEMI_SYNCHRONOUS = f"{EXPECTED}the semi-synchronous one, whose rows are a step old; use TrainPipelineSparseDist"
FUSED = (
    f"{EXPECTED}the fused one, which looks up beside the optimizer's step, and tables that this step updates; use "
    "TrainPipelineSparseDist, or give the collection an optimizer, whose updates are not held"
)


@pytest.fixture(autouse=True)
def streams_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of the pipelines ask a CPU for streams and events, and its tensors to know them."""
    if PLACE.device.type == "cpu":
        stream = SimpleNamespace(wait_stream=lambda _: None, wait_event=lambda _: None)
        for module in (torch.cpu, torch.cuda):
            monkeypatch.setattr(module, "current_stream", lambda *_: stream)
        monkeypatch.setattr(torch.cpu, "Event", lambda: SimpleNamespace(record=lambda: None, wait=lambda *_: None))
        monkeypatch.setattr(Tensor, "record_stream", lambda *_: None)


class Model(nn.Module):
    """A table and a layer."""

    def __init__(self, kind: str, options: dict[str, Any]) -> None:
        super().__init__()
        self.kind = kind
        if kind == "bags":
            self.tables: nn.Module = ScheduledEmbeddingBagCollection(
                [EmbeddingBagConfig(**NAMED)], device=PLACE.device, **options
            )
        else:
            self.tables = ScheduledEmbeddingCollection([EmbeddingConfig(**NAMED)], PLACE.device, **options)
        self.layer = nn.Linear(8, 1, device=PLACE.device)

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        found = self.tables(features)["item_id"]
        if PLACE.device.type == "cuda":
            # What reads rows begins when the host is batches ahead.
            torch.cuda._sleep(LATE_CYCLES)
        scores = self.layer(found if self.kind == "bags" else found.values())
        return scores.square().mean(), scores.detach()


def batches(device: torch.device) -> list[KeyedJaggedTensor]:
    """Every batch names rows of the one before. A pipeline copies those of the host, on a stream of its own."""
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(20, (30,), generator=generator) for _ in range(5)]
    return [KeyedJaggedTensor(["item_id"], of, lengths=torch.full((10,), 3)).to(device) for of in ids]


def sharded(kind: str, options: dict[str, Any], by: Any = table_wise) -> DistributedModelParallel:
    torch.manual_seed(0)
    model: Any = Model(kind, options)
    sharder: Any = ScheduledEmbeddingBagCollectionSharder() if kind == "bags" else ScheduledEmbeddingCollectionSharder()
    places = {"item": table_wise(rank=0) if by is table_wise else by()}
    plan = construct_module_sharding_plan(model.tables, places, sharder, 1, 1, PLACE.device.type)
    plans = ShardingPlan({"tables": plan})
    return DistributedModelParallel(model, device=PLACE.device, plan=plans, sharders=[sharder], init_parameters=False)


def rest_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(dict(in_backward_optimizer_filter(model.named_parameters())).values(), lr=0.5)


def plain(kind: str, options: dict[str, Any]) -> list[Tensor]:
    """Scores of steps one after the other."""
    model = sharded(kind, options)
    optimizer, found = rest_of(model), []
    for features in batches(PLACE.device):
        optimizer.zero_grad()
        loss, scores = model(features)
        loss.backward()
        optimizer.step()
        found.append(scores)
    return found


@pytest.mark.parametrize("kind", ["bags", "sequences"])
@pytest.mark.parametrize("pipeline", [TrainPipelineSparseDist, TrainPipelineFusedSparseDist])
def test_pipelines_that_look_up_after_the_update_train_as_plain_steps(kind: str, pipeline: Any) -> None:
    with process_group(PLACE.device):
        expected, model = plain(kind, SGD), sharded(kind, SGD)
        made, feed = pipeline(model, rest_of(model), PLACE.device), iter(batches(HOST))
        found = [made.progress(feed) for _ in range(5)]
        assert [module.forward.name for module in made._pipelined_modules] == ["tables"]
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    # Steps change what later ones find.
    assert all(not torch.equal(*pair) for pair in itertools.pairwise(found))


@pytest.mark.parametrize("kind", ["bags", "sequences"])
@pytest.mark.parametrize(
    ("pipeline", "options", "holds", "message"),
    [
        (functools.partial(TrainPipelineSemiSync, start_batch=0), SGD, False, SEMI_SYNCHRONOUS),
        (functools.partial(TrainPipelineSemiSync, start_batch=0), {}, False, SEMI_SYNCHRONOUS),
        (TrainPipelineFusedSparseDist, {}, False, FUSED),
        (TrainPipelineFusedSparseDist, SGD, True, FUSED),
    ],
    ids=["semi-synchronous", "semi-synchronous dense", "fused dense", "fused held"],
)
def test_pipelines_that_look_up_ahead_of_the_update_are_refused(
    kind: str, pipeline: Any, options: dict[str, Any], holds: bool, message: str
) -> None:
    with process_group(PLACE.device):
        model = sharded(kind, options)
        if holds:
            HeldUpdates(model)
        made, feed = pipeline(model=model, optimizer=rest_of(model), device=PLACE.device), iter(batches(HOST))
        with pytest.raises(RuntimeError) as error:
            made.progress(feed)
    assert str(error.value) == message


@pytest.mark.parametrize("by", [table_wise, row_wise], ids=["table-wise", "row-wise"])
@pytest.mark.parametrize("kind", ["bags", "sequences"])
def test_evaluation_looks_up_in_any_pipeline(kind: str, by: Any) -> None:
    """Nothing is updated that a lookup could be ahead of; no batch gets memory that the one before is still read from."""
    with process_group(PLACE.device):
        model = sharded(kind, {}, by).eval()
        with torch.no_grad():
            expected = [model(features)[1] for features in batches(PLACE.device)]
            made, feed = TrainPipelineFusedSparseDist(model, rest_of(model), PLACE.device), iter(batches(HOST))
            found = [made.progress(feed) for _ in range(5)]
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_rows_are_kept_before_anything_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is looked up, before TorchRec puts it in order, and what other processes have sent, before it is put together."""
    kept: list[tuple[Tensor | None, Tensor]] = []
    monkeypatch.setattr("jagged.modules.table_sharding._kept", lambda received, rows: (kept.append((received, rows)), rows)[1])
    rows, sent = torch.arange(6.0).view(3, 2), torch.ones(4)
    exchange: Any = NoWait(rows)
    exchange.tensor = sent
    in_order = SequenceEmbeddingsAwaitable(NoWait(rows), torch.tensor([2, 0, 1]), 2)
    keep_for_readers([in_order])
    assert torch.equal(in_order.wait(), rows[[2, 0, 1]])
    assert [(received, found is rows) for received, found in kept] == [(None, True)]
    keep_for_readers(parts := [PooledEmbeddingsAwaitable(exchange)])
    parts[0].wait()
    assert kept[1][0] is sent
    assert kept[1][1] is rows
