"""Batches filled up to a graph's size on every machine, and training by graphs on a GPU."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jagged.config import TrainerConfig
from jagged.data import BatchLoader, SequenceBatch, split_leave_one_out, synthetic_sessions
from jagged.data.batches import features_of
from jagged.models import DIN, REQUEST_MODELS, NextItemTask, RankingModel, RequestModel, build, build_head
from jagged.ops.sampled_cross_entropy.apart import ItemSlices
from jagged.training.engine import Engine
from jagged.training.errors import TrainingError
from jagged.training.filled import FilledSequences, SequenceSizes, capacity
from jagged.training.graphs import GraphedSteps, graphs_serve
from jagged.training.optimizer import table_names
from jagged.training.processes import process_group
from tests.models.shops import shop
from tests.training.support import flat_config, run, tiny_dataset

NUM_ITEMS = 30


@given(st.integers(0, 2**22), st.integers(0, 2**14))
def test_a_sixteenth_or_64_rows_are_filled_up_at_most(rows: int, samples: int) -> None:
    filled, places = capacity(rows, samples)
    assert rows <= filled <= rows + max(64, rows // 16)
    # Room for what is missing, in samples of 64 rows.
    assert places >= samples + math.ceil((filled - rows) / 64)
    assert places <= 2 * (samples + max(1, filled // 512))


def batch_of(lengths: list[int], seed: int, with_times: bool = False) -> SequenceBatch:
    draw = torch.Generator().manual_seed(seed)
    sizes = torch.tensor(lengths, dtype=torch.int64)
    total = sum(lengths)
    items = torch.randint(NUM_ITEMS, (total,), generator=draw)
    targets = torch.randint(NUM_ITEMS, (total,), generator=draw)
    others = {"timestamp": torch.randint(2**40, (total,), generator=draw)} if with_times else {}
    return SequenceBatch(features_of(items, sizes, others), targets, torch.arange(len(lengths)), num_items=NUM_ITEMS)


@given(
    st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=12), min_size=1, max_size=3),
    st.sampled_from([None, 20]),
    st.integers(0, 99),
)
def test_what_fills_up_changes_neither_loss_nor_gradients(batches: list[list[int]], buckets: int | None, seed: int) -> None:
    torch.manual_seed(seed)
    sizes = {"embedding_dim": 8, "num_layers": 1, "max_seq_len": 12, "num_time_buckets": buckets}
    model = build("sasrec", num_items=NUM_ITEMS, dropout=0.0, **sizes).double()
    task = NextItemTask(model, label_smoothing=0.1)
    rows, samples = capacity(max(sum(lengths) for lengths in batches), max(len(lengths) for lengths in batches))
    # One after the other in the same memory: nothing may be left of the one before.
    keys = ("item_id",) if buckets is None else ("item_id", "timestamp")
    inputs = FilledSequences.empty((rows, 2 * samples), NUM_ITEMS, torch.device("cpu"), keys)
    for lengths in batches:
        if sum(lengths) == 0:
            continue
        batch = batch_of(lengths, seed, buckets is not None)
        inputs.take(batch)
        # All rows are some sample's, and no sample has rows that are not there.
        assert inputs.offsets.tolist() == sorted(inputs.offsets.tolist())
        assert int(inputs.offsets[-1]) == rows == int(inputs.lengths.sum())
        # Nor is an item read that the batch does not read.
        assert set(inputs.values[:rows].tolist()) == set(batch.features["item_id"].values().tolist())
        results = []
        for one in (batch, inputs.batch()):
            task.zero_grad()
            loss, scores = task(one)
            loss.backward()
            logits = scores["next_item"].logits
            results.append((loss, logits[: sum(lengths)], *(parameter.grad.clone() for parameter in task.parameters())))
        torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)


def test_sizes_are_of_items_that_are_known() -> None:
    sizes, cpu = SequenceSizes(NUM_ITEMS), torch.device("cpu")
    batch, longer = batch_of([3, 0, 4], 0), batch_of([60, 30], 0)
    size = sizes.of(batch)
    assert size == (64, 4)
    room = sizes.room(batch, size, cpu, [])
    assert room.holds(size)
    assert not room.holds(sizes.of(longer) or size)
    batch.num_items = None
    assert sizes.of(batch) is None
    longer.num_items = NUM_ITEMS + 1
    assert sizes.of(longer) is None


PROCESSES: Any = SimpleNamespace(device=torch.device("cuda"), world_size=1)


@pytest.mark.parametrize(
    ("clips", "norm_bytes", "makes"),
    [(True, 64 * 2**20, True), (True, 64 * 2**20 + 1, False), (True, None, False), (False, 0, False)],
)
def test_a_graph_makes_a_norm_that_is_asked_for_and_small(clips: bool, norm_bytes: int | None, makes: bool) -> None:
    """None of slices, which it would keep."""
    asked: list[None] = []
    held: Any = SimpleNamespace(norm_bytes=norm_bytes, norm=lambda: asked.append(None))
    weight = torch.ones(3, requires_grad=True)
    weight.grad = torch.ones(3)
    steps = GraphedSteps.__new__(GraphedSteps)
    steps._gradients, steps._held, steps._clips = [weight.grad], held, clips
    steps._forward = lambda batch: (weight.sum() * batch, None)
    loss, _ = steps._run(2.0)
    assert (float(loss), weight.grad.tolist()) == (6.0, [2.0, 2.0, 2.0])
    assert bool(asked) == makes


def test_which_runs_are_replayed() -> None:
    """One process on a GPU with a model of next items; several would have to tell each other sizes, which waits."""

    def serves(device: str = "cuda", world_size: int = 1, task: Any = None, **options: Any) -> bool:
        processes: Any = SimpleNamespace(device=torch.device(device), world_size=world_size)
        return graphs_serve(TrainerConfig(**options), task or NextItemTask(build("sasrec", num_items=5)), processes)

    assert serves()
    assert serves(cuda_graphs=True)
    assert not serves(cuda_graphs=False)
    classes = "a NextItemTask, or a RequestModel of jagged.models but DIN"
    hindered: list[tuple[dict[str, Any], str]] = [
        ({"device": "cpu"}, "device cpu, expected cuda"),
        ({"world_size": 2}, "2 processes, expected one"),
        ({"accumulate": 2}, "accumulate 2, expected 1"),
        ({"task": torch.nn.Linear(2, 2)}, f"a Linear, expected {classes}"),
    ]
    for options, told in hindered:
        assert not serves(**options)
        assert not serves(**options, cuda_graphs=False)
        with pytest.raises(TrainingError) as refused:
            serves(**options, cuda_graphs=True)
        assert str(refused.value) == f"cuda_graphs: got true with {told}; leave it out, or give none"


def test_which_runs_of_requests_are_replayed() -> None:
    """Those whose sizes the host knows, and whose tables have no gradient of all rows."""
    split = shop("user", "item", "time", "genres", "click", history="events")
    by_rows = TrainerConfig(table_optimizer="rowwise-adagrad")

    def serves(kind: type[RequestModel] = RankingModel, config: TrainerConfig = by_rows, **options: Any) -> bool:
        return graphs_serve(config, kind.of(split, embedding_dim=8, **options), PROCESSES)

    assert all(serves(kind) for kind in REQUEST_MODELS.values() if kind is not DIN)
    assert serves(loss="focal")
    assert serves(recompute=True)
    # Of towers, which are not computed again.
    assert serves(recompute=True, dropout=0.1, num_layers=0)
    assert serves(loss="listwise")
    assert serves(config=by_rows.model_copy(update={"cuda_graphs": True}))
    assert not serves(config=by_rows.model_copy(update={"cuda_graphs": False}))
    # Without tables nothing has to be by rows.
    numbers = RankingModel.of(shop("time", "age", "sizes", "click"))
    for optimizer in ("rowwise-adagrad", "adamw"):
        assert graphs_serve(by_rows.model_copy(update={"table_optimizer": optimizer}), numbers, PROCESSES)


@pytest.mark.parametrize("asked", [True, None])
def test_runs_of_requests_that_cannot_be_replayed_are_refused(asked: bool | None) -> None:
    """Where graphs are asked for; else they run without."""
    split = shop("user", "item", "time", "genres", "click", history="events")
    shared = shop("request", "user", "item", "time", "click", "tags", "styles")
    theirs = type("Theirs", (RankingModel,), {})
    frozen = RankingModel.of(split, embedding_dim=8)
    frozen.get_parameter(min(table_names(frozen))).requires_grad_(False)
    classes = "a NextItemTask, or a RequestModel of jagged.models but DIN"
    name = min(table_names(frozen))
    hindered: list[tuple[RequestModel, dict[str, Any], str]] = [
        (DIN.of(split, embedding_dim=8), {}, f"a DIN, expected {classes}"),
        (theirs.of(split, embedding_dim=8), {}, f"a Theirs, expected {classes}"),
        (
            RankingModel.of(split, recompute=True, dropout=0.1),
            {},
            "recompute and dropout, expected no dropout of histories, or no recompute",
        ),
        (RankingModel.of(split, loss="pairwise"), {}, "the loss pairwise, expected binary, focal or listwise"),
        (RankingModel.of(split), {"table_optimizer": "adamw"}, "table_optimizer adamw, expected one that updates row by row"),
        (frozen, {}, f"the frozen table {name}, expected tables that all learn"),
        (RankingModel.of(split), {"table_cache_bytes": 1_000_000}, "table_cache_bytes 1000000, expected tables on the GPU"),
        (RankingModel.of(shared, embedding_dim=8), {}, "candidates' lists that share a table, as 'styles', expected none"),
    ]
    for task, options, told in hindered:
        config = TrainerConfig(**{"table_optimizer": "rowwise-adagrad", "cuda_graphs": asked, **options})
        if asked is None:
            assert not graphs_serve(config, task, PROCESSES)
            continue
        with pytest.raises(TrainingError) as refused:
            graphs_serve(config, task, PROCESSES)
        assert str(refused.value) == f"cuda_graphs: got true with {told}; leave it out, or give none"


def test_a_refusal_leaves_the_task_as_it_was() -> None:
    """Tables that are updated row by row are exchanged for others, but not before."""
    split = shop("user", "item", "time", "genres", "click", history="events")
    task = RankingModel.of(split, embedding_dim=8)
    before = {name: id(of) for name, of in task.named_parameters()}
    options: dict[str, Any] = {"device": "cpu", "table_optimizer": "rowwise-adagrad"}
    with process_group(torch.device("cpu")) as processes:
        with pytest.raises(TrainingError) as refused:
            Engine(task, TrainerConfig(**options, cuda_graphs=True), "32-true", processes)
        assert str(refused.value) == "cuda_graphs: got true with device cpu, expected cuda; leave it out, or give none"
        assert {name: id(of) for name, of in task.named_parameters()} == before
        Engine(task, TrainerConfig(**options), "32-true", processes).close()


def engine_losses(
    cuda_graphs: bool,
    sampler: str | None,
    buckets: int | None,
    name: str = "sasrec",
    training: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[list[float], list[torch.Tensor], Engine]:
    torch.manual_seed(0)
    dataset = synthetic_sessions(0, num_users=300)[0]
    device = torch.device("cuda", torch.cuda.current_device())
    train, timed = split_leave_one_out(dataset).train, buckets is not None
    loader = BatchLoader(train, max_seq_len=50, shuffle=True, seed=0, with_times=timed, **options)
    with process_group(device) as processes:
        times = {} if name == "bert4rec" else {"num_time_buckets": buckets}
        model = build(name, num_items=dataset.num_items, embedding_dim=32, dropout=0.0, **times).to(device)
        chosen = {"label_smoothing": 0.1} if sampler is None else {"head": "sampled", "sampler": sampler}
        config = flat_config(embedding_dim=32, cuda_graphs=cuda_graphs, **chosen, **(training or {}))
        head = build_head(config, torch.ones(dataset.num_items)).to(device)
        engine = Engine(NextItemTask(model, head=head), config.trainer, "32-true", processes)
        # The losses are kept while later steps run, as the loop does.
        losses = [trained.loss for epoch in range(2) for trained in engine.steps(_positioned(loader, epoch))]
        return torch.stack(losses).tolist(), [parameter.detach().cpu() for parameter in model.parameters()], engine


def _positioned(loader: BatchLoader, epoch: int) -> Any:
    loader.set_position(epoch, 0)
    return iter(loader)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{"batch_size": 16}, {"max_tokens": 256}], ids=str)
@pytest.mark.parametrize(
    ("sampler", "buckets"), [(None, None), (None, 40), *((name, None) for name in ("uniform", "popularity", "in-batch", "mixed"))]
)
def test_graphs_train_as_single_launches_do(options: dict[str, int], sampler: str | None, buckets: int | None) -> None:
    losses, weights, engine = engine_losses(True, sampler, buckets, **options)
    expected, expected_weights, other = engine_losses(False, sampler, buckets, **options)
    assert losses == pytest.approx(expected, rel=2e-3)
    for found, wanted in zip(weights, expected_weights, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0.02, atol=2e-3)
    assert other._step._graphs is None
    graphs = engine._step._graphs
    assert isinstance(graphs, GraphedSteps)
    assert 1 < len(graphs._graphs) < len(losses)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "sampler", "buckets"), [("hstu", None, 40), ("hstu", "uniform", None), ("bert4rec", None, None)]
)
def test_graphs_train_other_models_as_single_launches_do(name: str, sampler: str | None, buckets: int | None) -> None:
    losses, _, engine = engine_losses(True, sampler, buckets, name, max_tokens=256)
    expected, _, _ = engine_losses(False, sampler, buckets, name, max_tokens=256)
    if name == "bert4rec":
        # What is hidden is drawn anew in each replay, by other numbers than without graphs.
        assert sum(losses[-5:]) == pytest.approx(sum(expected[-5:]), rel=0.1)
        assert len(set(losses)) == len(losses)
    else:
        assert losses == pytest.approx(expected, rel=2e-3)
    graphs = engine._step._graphs
    assert isinstance(graphs, GraphedSteps)
    assert 1 < len(graphs._graphs) < len(losses)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [None, 20_000])
def test_updates_draw_what_a_replay_drew(monkeypatch: pytest.MonkeyPatch, size: int | None) -> None:
    """Gradients that the update makes, outside of graphs, of what replays write."""
    monkeypatch.setattr("jagged.ops.sampled_cross_entropy.api.AT_ONCE", -1)
    monkeypatch.setattr("jagged.ops.sampled_cross_entropy.api.MOST_GATHERED", -1)
    seen: list[int] = []
    call = ItemSlices.__call__
    monkeypatch.setattr(ItemSlices, "__call__", lambda self, *of: seen.append(of[0]) or call(self, *of))
    training = {"table_optimizer": "rowwise-adagrad", "negatives_per": "row", "table_gradient_bytes": size}
    losses, weights, engine = engine_losses(True, "uniform", None, training=training, max_tokens=256)
    assert (len(seen) > len(losses)) == (size is not None)
    expected, expected_weights, _ = engine_losses(False, "uniform", None, training=training, max_tokens=256)
    assert losses == pytest.approx(expected, rel=2e-3)
    for found, wanted in zip(weights, expected_weights, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0.02, atol=2e-3)
    assert isinstance(engine._step._graphs, GraphedSteps)


@pytest.mark.gpu
def test_a_run_may_go_on_without_graphs(tmp_path: Path) -> None:
    options = {"device": "cuda", "embedding_dim": 16}
    run(tmp_path, tiny_dataset(), max_epochs=1, **options)
    result = run(tmp_path, tiny_dataset(), max_epochs=2, resume=True, cuda_graphs=False, **options)
    assert result.epochs == 2
