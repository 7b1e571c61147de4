"""Tables that the trainer updates row by row, beside the dense optimizers whose weights they come to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from jagged.config import ConfigError, TrainerConfig
from jagged.data import BatchLoader, split_leave_one_out
from jagged.metrics import TrainCounts
from jagged.models import NextItemTask, RankingModel, SASRec, Task, TaskOutput, TaskScores
from jagged.models.pretrained import load_task, save_task
from jagged.modules import (
    CutCrossEntropyHead,
    GroupSparseHead,
    InBatchSampler,
    SampledCrossEntropyHead,
    ScalableCrossEntropyHead,
    ScheduledEmbeddingBagCollection,
    ScheduledEmbeddingCollection,
    UniformSampler,
)
from jagged.modules.trained_tables import TrainedTables
from jagged.ops.cross_entropy.slices import WeightSlices
from jagged.ops.sampled_cross_entropy.apart import ItemSlices
from jagged.training import Trainer, TrainingError
from jagged.training.engine import Engine
from jagged.training.processes import Processes, process_group
from jagged.training.table_updates import update_tables_in_backward
from tests.models.shops import shop
from tests.training.support import tiny_dataset

KINDS = ["adagrad", "rowwise-adagrad", "sgd"]
TABLE = "model.item_embeddings.embeddings.item_id.weight"
HEADS: dict[str, Any] = {
    "all": CutCrossEntropyHead,
    "drawn": lambda: SampledCrossEntropyHead(UniformSampler(96, 4, rows_per_draw=None, seed=1)),
    "drawn for each row": lambda: SampledCrossEntropyHead(UniformSampler(96, 4, seed=1)),
    "in-batch": lambda: SampledCrossEntropyHead(InBatchSampler(), correction="none"),
    "scalable": lambda: ScalableCrossEntropyHead(4, 8, 16),
}


@pytest.fixture
def processes() -> Iterator[Processes]:
    with process_group(torch.device("cpu")) as found:
        yield found


def task_of(head: str = "drawn", **options: Any) -> NextItemTask:
    torch.manual_seed(0)
    # Wide enough that no table is copied by kernels.
    model = SASRec(96, embedding_dim=16, num_layers=1, max_seq_len=12, dropout=0.0, **options)
    return NextItemTask(model, head=HEADS[head]())


def is_by_rows(engine: Engine) -> bool:
    return isinstance(engine.task.model.item_embeddings, ScheduledEmbeddingCollection)


def loader() -> BatchLoader:
    return BatchLoader(split_leave_one_out(tiny_dataset()).train, batch_size=8, max_seq_len=12, shuffle=True, seed=0)


def config(kind: str, **options: Any) -> TrainerConfig:
    return TrainerConfig(table_optimizer=kind, table_learning_rate=0.25, learning_rate=0.01, warmup_steps=3, **options)


def engines(monkeypatch: pytest.MonkeyPatch, processes: Processes, head: str, of: TrainerConfig) -> tuple[Engine, Engine]:
    """One that updates rows, and one whose tables have dense gradients."""
    by_rows = Engine(task_of(head), of, "32-true", processes)
    with monkeypatch.context() as patch:
        patch.setattr("jagged.training.engine.update_tables_in_backward", lambda *_: None)
        dense = Engine(task_of(head), of, "32-true", processes)
    assert is_by_rows(by_rows)
    assert not is_by_rows(dense)
    return by_rows, dense


def trained(engine: Engine, steps: int | None = None) -> list[float]:
    torch.manual_seed(3)
    return [float(of.loss) for of in engine.steps(iter(loader()), steps)]


def check_equal(first: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert first.keys() == other.keys()
    for name, value in first.items():
        # Keys' biases have a gradient of 0, but for rounding, of which AdamW makes steps of full length.
        if not name.startswith("random.") and not name.endswith("qkv_projection.bias"):
            torch.testing.assert_close(value.float(), other[name].float(), rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("options", [{"gradient_clip_norm": 0.05}, {"gradient_clip_norm": None}, {"accumulate": 3}])
@pytest.mark.parametrize("head", ["drawn", "drawn for each row", "in-batch"])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_and_states_are_those_of_dense_gradients(
    processes: Processes, monkeypatch: pytest.MonkeyPatch, kind: str, head: str, options: dict[str, Any]
) -> None:
    by_rows, dense = engines(monkeypatch, processes, head, config(kind, **options))
    before = by_rows.task.get_parameter(TABLE).detach().clone()
    assert trained(by_rows) == pytest.approx(trained(dense), rel=1e-4)
    assert by_rows.task.get_parameter(TABLE).grad is None
    assert not torch.equal(by_rows.task.get_parameter(TABLE), before)
    check_equal(by_rows.state_tensors(), dense.state_tensors())
    norms = [torch.stack(of.optimizer.norms or [torch.zeros(())]) for of in (by_rows, dense)]
    torch.testing.assert_close(*norms, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_go_both_ways(processes: Processes, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """One of either goes on as the other, which several processes need."""
    by_rows, dense = engines(monkeypatch, processes, "drawn", config(kind))
    # Before the first step dense ones have no state, and after it they have one.
    for steps in (0, 4):
        states = dense.state_tensors()
        by_rows.load_state_tensors({name: of.clone() for name, of in states.items()}, steps)
        check_equal(by_rows.state_tensors() if steps else {**states}, states)
        for of in (by_rows, dense):
            trained(of)
        check_equal(by_rows.state_tensors(), dense.state_tensors())
    states = {name: of.clone() for name, of in by_rows.state_tensors().items()}
    dense.load_state_tensors(states, 8)
    for of in (by_rows, dense):
        trained(of)
    check_equal(by_rows.state_tensors(), dense.state_tensors())


@pytest.mark.parametrize("head", ["all", "scalable"])
def test_a_head_that_names_all_items(processes: Processes, monkeypatch: pytest.MonkeyPatch, head: str) -> None:
    """A dense optimizer takes its gradient as it is; AdamW of the rows that a head over all items names is AdamW."""
    for kind in KINDS:
        assert not is_by_rows(Engine(task_of(head), config(kind), "32-true", processes))
    if head == "all":
        by_rows, dense = (Engine(task_of(head), config(kind), "32-true", processes) for kind in ("sparse-adamw", "adamw"))
        assert (is_by_rows(by_rows), is_by_rows(dense)) == (True, False)
        assert trained(by_rows) == pytest.approx(trained(dense), rel=1e-4)
        check_equal(by_rows.state_tensors(), dense.state_tensors())


@pytest.mark.parametrize("options", [{"gradient_clip_norm": 0.05}, {"gradient_clip_norm": None}, {"accumulate": 3}])
@pytest.mark.parametrize("kind", [*KINDS, "sparse-adamw"])
def test_a_whole_gradient_in_slices(processes: Processes, kind: str, options: dict[str, Any]) -> None:
    """The same weights, states and norms; no gradient of the table, and the head is given back as it was."""
    whole = Engine(task_of("all"), config(kind, **options), "32-true", processes)
    # Forty rows at a time; under a norm ten, of which seventy wait for the update.
    sliced = Engine(task_of("all"), config(kind, table_gradient_bytes=5120, **options), "32-true", processes)
    assert (is_by_rows(whole), is_by_rows(sliced)) == (kind == "sparse-adamw", True)
    seen: list[tuple[int, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        call = WeightSlices.__call__
        patch.setattr(WeightSlices, "__call__", lambda self, *of: seen.append(of) or call(self, *of))
        losses = trained(sliced)
        # A norm makes those twice that do not wait.
        accumulate = options.get("accumulate", 1)
        batches = len(loader()) // accumulate * accumulate
        slices = 3 if options.get("gradient_clip_norm", 1.0) is None else 13
        assert len(seen) == slices * batches
        assert losses == pytest.approx(trained(whole), rel=1e-4)
        assert len(seen) == slices * batches
    check_equal(sliced.state_tensors(), whole.state_tensors())
    norms = [torch.stack(of.optimizer.norms or [torch.zeros(())]) for of in (sliced, whole)]
    torch.testing.assert_close(*norms, rtol=1e-3, atol=1e-6)
    assert isinstance(sliced.task.head, CutCrossEntropyHead)
    assert sliced.task.head.memory_budget == 5120
    sliced.close()
    assert sliced.task.head.memory_budget == CutCrossEntropyHead().memory_budget


@pytest.mark.parametrize("options", [{"gradient_clip_norm": 0.05}, {"gradient_clip_norm": None}, {"accumulate": 3}])
@pytest.mark.parametrize("kind", KINDS)
def test_negatives_of_each_row_in_slices(
    processes: Processes, monkeypatch: pytest.MonkeyPatch, kind: str, options: dict[str, Any]
) -> None:
    """The same weights, states and norms, whether all of the gradient waits for the update or there is room for a part."""
    whole = Engine(task_of("drawn for each row"), config(kind, **options), "32-true", processes)
    expected = trained(whole)
    monkeypatch.setattr("jagged.ops.sampled_cross_entropy.api.AT_ONCE", -1)
    monkeypatch.setattr("jagged.ops.sampled_cross_entropy.api.MOST_GATHERED", -1)
    seen: list[int] = []
    call = ItemSlices.__call__
    monkeypatch.setattr(ItemSlices, "__call__", lambda self, *of: seen.append(of[0]) or call(self, *of))
    accumulate = options.get("accumulate", 1)
    batches = len(loader()) // accumulate * accumulate
    # Of 97 rows twenty at a time; under a norm five, of which thirty-five wait for the update.
    for size, slices in ((None, 1), (40 * 16 * 4, 5 if options.get("gradient_clip_norm", 1.0) is None else 20 + 13)):
        engine = Engine(task_of("drawn for each row"), config(kind, table_gradient_bytes=size, **options), "32-true", processes)
        seen.clear()
        assert trained(engine) == pytest.approx(expected, rel=1e-4)
        assert len(seen) == slices * batches
        check_equal(engine.state_tensors(), whole.state_tensors())
        norms = [torch.stack(of.optimizer.norms or [torch.zeros(())]) for of in (engine, whole)]
        torch.testing.assert_close(*norms, rtol=1e-3, atol=1e-6)
        assert isinstance(engine.task.head, SampledCrossEntropyHead)
        assert (engine.task.head.sparse, engine.task.head.memory_budget) == (True, size)
        engine.close()
        assert (engine.task.head.sparse, engine.task.head.memory_budget) == (False, None)


def test_an_output_layer_leaves_the_table_to_lookups(processes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    def task() -> NextItemTask:
        torch.manual_seed(0)
        output = GroupSparseHead(16, torch.ones(96, dtype=torch.int64), 40, fan_in=4, group_size=8, loss="softmax")
        return NextItemTask(SASRec(96, embedding_dim=16, num_layers=1, max_seq_len=12, dropout=0.0, output=output))

    by_rows = Engine(task(), config("adagrad"), "32-true", processes)
    monkeypatch.setattr("jagged.training.engine.update_tables_in_backward", lambda *_: None)
    dense = Engine(task(), config("adagrad"), "32-true", processes)
    assert (is_by_rows(by_rows), is_by_rows(dense)) == (True, False)
    assert trained(by_rows) == pytest.approx(trained(dense), rel=1e-4)
    check_equal(by_rows.state_tensors(), dense.state_tensors())


class Rows:
    """A table's rows by the formulas of the option's names, one after the other, in float32."""

    def __init__(self, table: Tensor, of: TrainerConfig) -> None:
        self.table, self.of, self.steps = table, of, 0
        self.dtype = getattr(torch, of.table_states)
        self.first, self.second = torch.zeros_like(table), torch.zeros_like(table)
        self.last = torch.zeros(len(table), dtype=torch.int64)

    def step(self, named: Tensor, gradient: Tensor) -> None:
        of, rate = self.of, 0.25
        self.steps += 1
        is_adagrad, is_of_rows = "adagrad" in of.table_optimizer, of.table_optimizer.startswith("rowwise")
        decay = of.table_weight_decay if of.table_weight_decay is not None else 0.0 if is_adagrad else of.weight_decay
        w, m, v, g = (tensor[named] for tensor in (self.table, self.first, self.second, gradient))
        square = g.square().mean(1, keepdim=True).expand_as(g) if is_of_rows else g.square()
        if is_adagrad:
            m = m + square
            w = w - rate * g / (m.sqrt() + 1e-10) - rate * decay * w
        else:
            if of.table_decay_missed_steps:
                missed = (self.steps - 1 - self.last[named])[:, None]
                m, v, w = m * 0.9**missed, v * of.table_beta2**missed, w * (1 - rate * decay) ** missed
            m, v = 0.9 * m + 0.1 * g, of.table_beta2 * v + (1 - of.table_beta2) * square
            change = m / (1 - 0.9**self.steps) / ((v / (1 - of.table_beta2**self.steps)).sqrt() + 1e-8) + decay * w
            if "lamb" in of.table_optimizer:
                change = change * w.norm(dim=1, keepdim=True) / change.norm(dim=1, keepdim=True)
            w = w - rate * change
        if of.table_max_norm is not None:
            w = w * (of.table_max_norm / w.norm(dim=1, keepdim=True)).clamp(max=1.0)
        self.table[named], self.first[named], self.second[named] = w, m.to(self.dtype).float(), v.to(self.dtype).float()
        self.last[named] = self.steps


@pytest.mark.parametrize("head", ["drawn", "drawn for each row", "all"])
@pytest.mark.parametrize(
    "options",
    [
        {"table_optimizer": "sparse-adamw"},
        {"table_optimizer": "sparse-adamw", "table_weight_decay": 0.5},
        {"table_optimizer": "sparse-adamw", "table_weight_decay": 0.5, "table_decay_missed_steps": True},
        {"table_optimizer": "sparse-adamw", "table_beta2": 0.9, "table_states": "bfloat16", "table_max_norm": 0.4},
        {"table_optimizer": "rowwise-adamw", "table_weight_decay": 0.0, "table_decay_missed_steps": True},
        {"table_optimizer": "lamb"},
        {"table_optimizer": "rowwise-lamb", "table_weight_decay": 0.5, "table_beta2": 0.99},
        {"table_optimizer": "adagrad", "table_weight_decay": 0.5},
        {"table_optimizer": "rowwise-adagrad", "table_states": "bfloat16"},
        {"table_optimizer": "rowwise-adagrad", "table_max_norm": 0.4},
    ],
    ids=lambda options: ", ".join(str(value) for value in options.values()),
)
def test_rows_move_by_the_formula(processes: Processes, options: dict[str, Any], head: str) -> None:
    """Those that a batch reads or scores, and no others."""
    of = TrainerConfig(table_learning_rate=0.25, gradient_clip_norm=None, weight_decay=0.2, **options)
    engine, twin = Engine(task_of(head), of, "32-true", processes), task_of(head)
    assert is_by_rows(engine)
    table = twin.get_parameter(TABLE)
    rows = Rows(table.data, of)
    decayed = [p for name, p in twin.named_parameters() if name != TABLE and p.dim() > 1]
    others = [p for p in twin.parameters() if p.dim() == 1]
    rest = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.2}, {"params": others, "weight_decay": 0.0}], lr=1e-3)
    if head != "all":
        # The head's gradient names the rows that are scored.
        twin.head.sparse = True  # type: ignore[union-attr]
    torch.manual_seed(3)
    losses = []
    for batch in loader():
        twin.zero_grad()
        scored = table.detach().clone().requires_grad_()
        hidden = twin.model(batch.features)
        loss = twin.head(hidden, scored, batch.targets).loss  # type: ignore[misc]
        loss.backward()
        losses.append(float(loss.detach()))
        assert table.grad is not None
        assert scored.grad is not None
        named = torch.zeros(len(table), dtype=torch.bool)
        named[batch.features.values()] = True
        named[scored.grad._indices()[0] if scored.grad.is_sparse else slice(None)] = True
        rows.step(named, table.grad + (scored.grad.to_dense() if scored.grad.is_sparse else scored.grad))
        rest.step()
    # A state that is rounded otherwise moves a weight by as much.
    close = {"rtol": 1e-2, "atol": 1e-2} if of.table_states == "bfloat16" else {"rtol": 1e-3, "atol": 1e-4}
    assert trained(engine) == pytest.approx(losses, rel=10 * close["atol"] if of.table_states == "bfloat16" else 1e-4)
    torch.testing.assert_close(engine.task.get_parameter(TABLE), table, **close)
    states = engine.state_tensors()
    assert float(states[f"optimizer.step.{TABLE}"]) == len(losses)
    assert {
        states[f"optimizer.{key}.{TABLE}"].dtype
        for key in ("sum", "exp_avg", "exp_avg_sq")
        if f"optimizer.{key}.{TABLE}" in states
    } == {rows.dtype}
    assert (f"optimizer.last_step.{TABLE}" in states) == of.table_decay_missed_steps


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("sparse-adamw", {"table_decay_missed_steps": True}),
        ("rowwise-adamw", {"table_states": "bfloat16", "table_beta2": 0.9}),
        ("rowwise-lamb", {"table_max_norm": 0.5}),
        ("rowwise-adagrad", {"table_states": "bfloat16", "table_weight_decay": 0.1}),
    ],
)
def test_what_goes_on_is_what_went_through(processes: Processes, kind: str, options: dict[str, Any]) -> None:
    engine, other = (Engine(task_of("drawn"), config(kind, **options), "32-true", processes) for _ in range(2))
    trained(engine)
    states = {name: of.clone() for name, of in engine.state_tensors().items()}
    other.load_state_tensors(states, len(loader()))
    trained(engine)
    trained(other)
    for name, value in engine.state_tensors().items():
        assert torch.equal(value, other.state_tensors()[name]), name


@pytest.mark.parametrize("options", [{"gradient_clip_norm": 0.05}, {"accumulate": 2}])
@pytest.mark.parametrize("kind", KINDS)
def test_ranking_models(
    processes: Processes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, options: dict[str, Any]
) -> None:
    """Tables that are pooled, those of histories and candidates, and sequences; what is saved opens as ever."""
    split = shop(beside=True)

    def made() -> Engine:
        torch.manual_seed(0)
        model = RankingModel.of(split, table_dims={"item": 6, "tags": 4, "topics": 2}, conditional={"buy": "click"})
        return Engine(model, config(kind, **options), "32-true", processes)

    by_rows = made()
    monkeypatch.setattr("jagged.training.engine.update_tables_in_backward", lambda *_: None)
    dense = made()
    tables = [part for part in by_rows.task.modules() if isinstance(part, TrainedTables)]
    assert all(part.optimizers for part in tables)
    assert {type(part) for part in tables} == {ScheduledEmbeddingBagCollection, ScheduledEmbeddingCollection}
    before = [parameter.detach().clone() for part in tables for parameter in part.parameters()]
    for _ in range(2):
        found = []
        for of in (by_rows, dense):
            loader = split.train.loader(batch_size=16, shuffle=False, max_history=10)
            found.append([float(each.loss) for each in of.steps(iter(loader), len(loader))])
        assert found[0] == pytest.approx(found[1], rel=1e-4)
    check_equal(by_rows.state_tensors(), dense.state_tensors())
    after = [parameter.detach() for part in tables for parameter in part.parameters()]
    assert not any(torch.equal(*both) for both in zip(before, after, strict=True))
    save_task(by_rows.task, tmp_path / "saved")
    batch = split.test.gather(range(5))
    found_, expected = (of.eval().predict(batch)["buy"] for of in (load_task(tmp_path / "saved"), by_rows.task))
    assert torch.equal(found_, expected)


def test_options_reach_every_table_of_a_ranking_model(processes: Processes) -> None:
    """Pooled ones and sequences, with few rows and many; a run goes on with them bit for bit."""
    split = shop(beside=True)
    options: dict[str, Any] = {"table_states": "bfloat16", "table_beta2": 0.9, "table_max_norm": 0.5}
    of = config("rowwise-adamw", table_decay_missed_steps=True, table_weight_decay=0.1, **options)

    def made() -> Engine:
        torch.manual_seed(0)
        model = RankingModel.of(split, table_dims={"item": 6, "tags": 4, "topics": 2}, conditional={"buy": "click"})
        return Engine(model, of, "32-true", processes)

    def epoch(engine: Engine) -> None:
        loader = split.train.loader(batch_size=16, shuffle=False, max_history=10)
        assert all(bool(each.loss.isfinite()) for each in engine.steps(iter(loader), len(loader)))

    engine, other = made(), made()
    epoch(engine)
    optimizers = [of for part in engine.task.modules() if isinstance(part, TrainedTables) for of in part.optimizers]
    assert len(optimizers) > 1
    for made_of in optimizers:
        rule = made_of.rule
        assert (rule.kind, rule.beta2, rule.weight_decay, rule.max_norm) == ("rowwise_adam", 0.9, 0.1, 0.5)
        assert made_of.first.dtype == made_of.second.dtype == torch.bfloat16
        assert made_of.last is not None
        assert int(made_of.last.max()) == int(made_of.step) > 0
    other.load_state_tensors({name: of.clone() for name, of in engine.state_tensors().items()}, engine.optimizer.steps)
    epoch(engine)
    epoch(other)
    states = other.state_tensors()
    for name, value in engine.state_tensors().items():
        assert torch.equal(value, states[name]), name


class Foreign(Task):
    """A model that reads its table in a way of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.model = SASRec(96, embedding_dim=16, num_layers=1, max_seq_len=12, dropout=0.0)

    def forward(self, batch: Any) -> TaskOutput:
        hidden = self.model(batch.features).values()
        logits = hidden @ self.model.item_table.T
        loss = nn.functional.cross_entropy(logits, batch.targets)
        return TaskOutput(loss, {"next": TaskScores(logits[:, 0].detach(), batch.targets.float())})


def test_tables_of_other_models_have_dense_gradients(processes: Processes) -> None:
    engine = Engine(Foreign(), config("adagrad"), "32-true", processes)
    assert not isinstance(engine.task.model.item_embeddings, ScheduledEmbeddingCollection)
    trained(engine)
    assert engine.task.model.item_table.grad is not None
    with pytest.raises(TrainingError) as caught:
        Engine(Foreign(), config("sparse-adamw"), "32-true", processes)
    assert str(caught.value) == (
        "table_optimizer: sparse-adamw updates rows of SASRec's, HSTU's and RequestModel's tables in one process, got a Foreign; "
        "take adagrad, rowwise-adagrad, sgd or adamw"
    )


@pytest.mark.parametrize("optimizer", ["adagrad", "rowwise-adagrad", "sgd"])
def test_a_model_without_tables_trains_whatever_tables_would_have(processes: Processes, optimizer: str) -> None:
    split = shop("time", "age", "sizes", "click")
    losses = []
    for name in (optimizer, "adamw"):
        torch.manual_seed(0)
        engine = Engine(RankingModel.of(split), config(name), "32-true", processes)
        batches = split.train.loader(batch_size=16, shuffle=False, progress=False)
        losses.append([float(one.loss) for one in engine.steps(iter(batches))])
    assert losses[0] == losses[1]
    assert losses[0][0] != losses[0][-1]


def test_options_of_rows_are_refused_without_tables(processes: Processes) -> None:
    with pytest.raises(TrainingError) as caught:
        Engine(RankingModel.of(shop("time", "age", "sizes", "click")), config("sparse-adamw"), "32-true", processes)
    assert str(caught.value) == (
        "table_optimizer: sparse-adamw updates rows of tables, got a RankingModel without tables of ids; "
        "take adagrad, rowwise-adagrad, sgd or adamw"
    )


def test_a_gradient_by_another_way_is_refused(processes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing would apply it."""
    monkeypatch.setattr(SASRec, "item_weight", SASRec.item_table)
    engine = Engine(task_of(), config("adagrad"), "32-true", processes)
    with pytest.raises(TrainingError) as caught:
        trained(engine)
    assert str(caught.value) == (
        f"task: {TABLE} got a gradient beside those of lookups and heads, expected none where table_optimizer is adagrad; "
        "read it through its collection's scored(), or take adamw"
    )


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"table_optimizer": "lamb"}, "table_optimizer: lamb"),
        ({"table_optimizer": "adagrad", "table_weight_decay": 0.1}, "table_weight_decay: 0.1"),
        ({"table_optimizer": "sgd", "table_max_norm": 2.0}, "table_max_norm: 2.0"),
        ({"table_optimizer": "rowwise-adagrad", "table_states": "bfloat16"}, "table_states: bfloat16"),
        ({"table_optimizer": "adagrad", "table_gradient_bytes": 640}, "table_gradient_bytes: 640"),
    ],
)
def test_what_only_rows_have_is_refused_elsewhere(processes: Processes, options: dict[str, Any], found: str) -> None:
    cure = "take adagrad, rowwise-adagrad, sgd or adamw" if found.startswith("table_optimizer") else "leave it out"
    frozen = task_of()
    frozen.get_parameter(TABLE).requires_grad_(False)
    for task, number, expected in (
        (Foreign(), 1, "rows of SASRec's, HSTU's and RequestModel's tables in one process, got a Foreign"),
        (task_of(), 2, "rows of SASRec's, HSTU's and RequestModel's tables in one process, got 2 processes"),
        (frozen, 1, "tables that all learn, got some that are frozen"),
    ):
        with pytest.raises(TrainingError) as caught:
            update_tables_in_backward(task, TrainerConfig(**options), number)
        assert str(caught.value) == f"{found} updates {expected}; {cure}"
    # A decay of 0 is none.
    assert update_tables_in_backward(Foreign(), TrainerConfig(table_optimizer="adagrad", table_weight_decay=0.0), 1) is None


@pytest.mark.parametrize("kind", ["adagrad", "sparse-adamw", "rowwise-lamb"])
def test_a_task_that_was_trained_is_anybodys(tmp_path: Path, kind: str) -> None:
    """A loop of the user's own trains its table by gradients; another run begins as the first."""
    split = split_leave_one_out(tiny_dataset())
    model = SASRec(split.train.num_items, embedding_dim=16, num_layers=1, max_seq_len=12)
    head = SampledCrossEntropyHead(UniformSampler(split.train.num_items, 4, rows_per_draw=None))
    task = NextItemTask(model, head=head, train_counts=TrainCounts.from_part(split.train))
    valid = BatchLoader(split.valid, batch_size=8, max_seq_len=12, shuffle=False, seed=0)
    for run in ("first", "second"):
        options: dict[str, Any] = {"output": str(tmp_path / run), "max_epochs": 1, "device": "cpu", "monitor": "ndcg@10"}
        Trainer(task, config(kind, **options)).fit(loader(), valid, progress=False)
        assert not head.sparse
        table = task.get_parameter(TABLE)
        before = table.detach().clone()
        task.zero_grad()
        task(next(iter(loader()))).loss.backward()
        assert torch.equal(table, before)
        assert table.grad is not None
        torch.optim.SGD(task.parameters(), lr=0.1).step()
        assert not torch.equal(table, before)


@pytest.mark.parametrize("kind", KINDS)
def test_mixed_precision(processes: Processes, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """A dense gradient is that of float32 master weights, too; a step's sums differ by the rounding of hidden states alone."""
    of = config(kind, gradient_clip_norm=0.5)
    by_rows = Engine(task_of(), of, "bf16-mixed", processes)
    monkeypatch.setattr("jagged.training.engine.update_tables_in_backward", lambda *_: None)
    dense, exact = (Engine(task_of(), of, precision, processes) for precision in ("bf16-mixed", "32-true"))
    for engine in (by_rows, dense, exact):
        trained(engine, 2)
    found, expected, reference = (engine.task.get_parameter(TABLE).detach() for engine in (by_rows, dense, exact))
    assert found.dtype == torch.float32
    # The budget is the error of the dense way itself.
    assert float((found - reference).norm()) <= 1.5 * float((expected - reference).norm())


def test_frozen_tables(processes: Processes) -> None:
    task = task_of()
    task.get_parameter(TABLE).requires_grad_(False)
    before = task.get_parameter(TABLE).clone()
    trained(Engine(task, config("adagrad"), "32-true", processes))
    assert torch.equal(task.get_parameter(TABLE), before)
    with pytest.raises(TrainingError) as caught:
        Engine(task, config("rowwise-adamw"), "32-true", processes)
    assert str(caught.value) == (
        "table_optimizer: rowwise-adamw updates tables that all learn, got some that are frozen; "
        "take adagrad, rowwise-adagrad, sgd or adamw"
    )


def test_losses_that_are_not_finite_leave_tables_alone(processes: Processes) -> None:
    engine = Engine(task_of("drawn"), config("adagrad"), "32-true", processes)
    trained(engine)
    before = {name: of.clone() for name, of in engine.state_tensors().items() if name.endswith(TABLE)}
    assert len(before) == 3
    with torch.no_grad():
        engine.task.model.norm.bias.fill_(torch.inf)
    assert not torch.tensor(trained(engine)).isfinite().any()
    for name, value in engine.state_tensors().items():
        if name in before:
            assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("head", ["drawn", "scalable", None])
def test_slices_of_what_is_never_whole_are_refused(head: str | None) -> None:
    task = RankingModel.of(shop(), table_dims={"item": 6}) if head is None else task_of(head)
    of = type(task if head is None else task.head).__name__ + (" whose rows share negatives" if head == "drawn" else "")
    with pytest.raises(TrainingError) as caught:
        update_tables_in_backward(task, TrainerConfig(table_optimizer="adagrad", table_gradient_bytes=640), 1)
    assert str(caught.value) == (
        f"table_gradient_bytes: 640 belongs to a head over all items, or with negatives of each row, got {of}, of which no table "
        "has a whole gradient; leave it out"
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"table_optimizer": "sgd", "table_weight_decay": 0.1},
            "table_weight_decay: belongs to table_optimizer adamw, sparse-adamw, rowwise-adamw, lamb, rowwise-lamb, adagrad or "
            "rowwise-adagrad, got sgd",
        ),
        ({"table_max_norm": 1.0}, "table_max_norm: belongs to table_optimizer sparse-adamw, rowwise-adamw, lamb, rowwise-lamb, "
         "adagrad, rowwise-adagrad or sgd, got adamw"),
        ({"table_optimizer": "lamb", "table_decay_missed_steps": True},
         "table_decay_missed_steps: belongs to table_optimizer sparse-adamw or rowwise-adamw, got lamb"),
        ({"table_optimizer": "adagrad", "table_beta2": 0.9},
         "table_beta2: belongs to table_optimizer sparse-adamw, rowwise-adamw, lamb or rowwise-lamb, got adagrad"),
        ({"table_optimizer": "lamb", "table_states": "bfloat16"},
         "table_beta2: got 0.999, expected at most 0.99 with table_states bfloat16, in which a mean that moves more slowly never "
         "falls"),
    ],
)  # fmt: skip
def test_options_that_have_no_effect_are_refused(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainerConfig(**options)
    assert str(caught.value) == expected
