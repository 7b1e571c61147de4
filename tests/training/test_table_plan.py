"""Tables of which each of several processes has rows: weights, figures and checkpoints are those of one process."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

from jagged.config import TrainerConfig
from jagged.models import NextItemTask, RankingInputs, RankingModel, SASRec, Task
from jagged.training import Trainer, TrainingError
from jagged.training.processes import process_group
from jagged.training.table_plan import MEASURED, check_plan, plan_tables
from jagged.training.table_updates import update_tables_in_backward
from tests.processes import told_by
from tests.test_docs import ROOT
from tests.training.plan_processes import CASES, OVERFLOW, OVERFLOWS, RESUMED
from tests.training.two_processes import steps_of

NOT_FINITE = (
    "the gradient is NaN or infinite at step 3, epoch 1; there is no checkpoint yet. Start again with a lower learning_rate (now "
    "0.001), gradient_clip_norm or precision=32-true"
)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = told_by("tests.training.plan_processes", tmp_path_factory.mktemp("plans"))
    return found


@pytest.mark.parametrize("case", CASES)
def test_a_run_ends_as_one_of_one_process(result: dict[str, Any], case: str) -> None:
    kind, plan, _, options, count = CASES[case]
    found, (one, *several) = result[case], result[case]["runs"]
    # float32, in which sums come in another order; a step is 0.02 and more.
    assert found["distance"] < 1e-4
    assert len(several) == count
    for run in several:
        assert run["losses"] == pytest.approx(one["losses"], rel=1e-5)
        assert run["norms"] == pytest.approx(one["norms"], rel=1e-3)
        assert bool(run["norms"]) == (options.get("gradient_clip_norm", 1.0) is not None)
        for part in ("valid", "test"):
            assert run["metrics"][part]["click"] == pytest.approx(one["metrics"][part]["click"], rel=1e-3)
        # The pipeline sends the ids of all collections ahead, and the task has whole tables when it has been trained.
        assert run["pipelined"] == (["task.bags.features", "task.sequences.0"] if kind == "ranking" else [])
        sequences = ["ScheduledEmbeddingCollection"] if kind == "ranking" else []
        assert run["types"] == ["ScheduledEmbeddingBagCollection", *sequences]
    # Each row is in one process.
    assert one["rows"] == {}
    held = {name: [run["rows"][name] for run in several] for name in several[0]["rows"]}
    assert {name: sum(counts) for name, counts in held.items()} == {name: found["sizes"][name] for name in held}
    assert len(held) == 3
    for name, counts in held.items():
        if plan == "table-wise":
            assert sorted(counts) == [*[0] * (count - 1), found["sizes"][name]]
        if plan == "row-wise":
            assert counts == [-(-found["sizes"][name] // 2), found["sizes"][name] // 2]


@pytest.mark.parametrize("plan", ["row-wise", "table-wise"])
def test_a_run_in_bfloat16_ends_as_one_with_whole_tables(result: dict[str, Any], plan: str) -> None:
    """Gradients of the same samples are rounded alike; one process sums them before they are rounded."""
    runs = result["mixed"]
    run, whole, one = (runs[f"mixed, {of}"] for of in (plan, "replicated", "one process"))
    # 0.015 without autocast.
    assert run["apart"] < 2e-3
    assert run["losses"] == pytest.approx(whole["losses"], rel=1e-3)
    assert run["norms"] == pytest.approx(whole["norms"], rel=1e-2)
    # 2.5e-3 without autocast.
    assert run["norms"][0] == pytest.approx(one["norms"][0], rel=2e-4)
    assert run["losses"] == pytest.approx(one["losses"], rel=1e-2)
    assert one["apart"] < 3e-2
    for part in ("valid", "test"):
        assert run["metrics"][part]["click"] == pytest.approx(whole["metrics"][part]["click"], rel=1e-2)


@pytest.mark.parametrize("case", OVERFLOWS)
def test_a_step_whose_gradients_are_not_finite_moves_no_table_in_any_process(result: dict[str, Any], case: str) -> None:
    """Those of one table alone overflow, in one process alone; the others' tables could be updated, whose steps would differ."""
    processes = result[f"overflow, {case}"]
    steps = len(processes[0]["moved"])
    if case == "clipped":
        # Weights that all processes have are not finite after it, and the run ends at its next look.
        assert steps >= OVERFLOW
        assert [process["error"] for process in processes] == [NOT_FINITE] * 2
        steps = OVERFLOW
    else:
        assert [process["error"] for process in processes] == [None] * 2
    for process in processes:
        # Before the first step there is nothing to look at.
        moved = [step for step in range(2, steps + 1) if process["moved"][step - 1]]
        assert moved == [step for step in range(2, steps + 1) if step != OVERFLOW]
        assert process["counts"][OVERFLOW - 1] == process["counts"][OVERFLOW - 2]
    assert len({count for process in processes for count in process["counts"][-1]}) == 1


@pytest.mark.parametrize("case", RESUMED)
def test_a_run_goes_on_with_any_number_of_processes_and_any_plan(result: dict[str, Any], case: str) -> None:
    whole, parts = result[case]["whole"], result[case]["parts"]
    assert [len(part) for part in parts["kept"]] == [1, 2, 4, 1, 2, 2]
    # Weights, states and numbers of steps are the checkpoint's, bit for bit.
    assert [part[0]["loaded"] for part in parts["kept"]] == [[], *[[True]] * 5]
    steps = steps_of(parts["kept"])
    assert steps == steps_of(whole["kept"])
    for epoch in range(2):
        samples = [one for of, ids in steps if of == epoch for one in ids]
        assert len(samples) == len(set(samples)) == 1_200
    for one, other in zip(whole["history"], parts["history"], strict=True):
        assert [other[name] for name in ("epoch", "step", "learning_rate")] == [
            one[name] for name in ("epoch", "step", "learning_rate")
        ]
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-6)
        assert other["monitored"] == pytest.approx(one["monitored"], rel=1e-4)


def test_a_run_that_was_stopped_ends_bit_for_bit(result: dict[str, Any]) -> None:
    """The pipeline has read two batches ahead when it stops."""
    whole, stopped = result["stopped"]
    assert [len(part) for part in stopped["kept"]] == [2, 2]
    assert steps_of(stopped["kept"]) == steps_of(whole["kept"])
    for name in ("weights", "metrics", "history"):
        assert stopped[name] == whole[name], name


def test_a_job_leaves_what_one_process_leaves(result: dict[str, Any]) -> None:
    one, first, _ = result["job"]
    for name in ("losses", "scores", "exported", "direct"):
        assert first[name] == pytest.approx(one[name], rel=1e-5), name
    assert first["exported"] == pytest.approx(first["direct"], rel=1e-5)
    assert first["evaluated"] == pytest.approx(one["evaluated"], rel=1e-5)


def test_the_forecast_counts_a_shard(result: dict[str, Any]) -> None:
    one, *several = result["job"]
    assert one["elsewhere"] == one["checkpoint"] == 0
    for of in several:
        assert of["parameters"] + of["elsewhere"] == one["parameters"]
        assert of["optimizer"] == 2 * of["parameters"]
    # Tables, in fp32 with a width of 4, have each row once in all processes.
    assert sum(of["elsewhere"] for of in several) == result["job tables"]
    # Weights, the best of them, and two moments.
    assert [of["checkpoint"] for of in several] == [4 * result["job tables"], 0]


def test_a_table_that_is_read_beside_its_collection_is_refused(result: dict[str, Any]) -> None:
    assert result["refused"] == [
        "table_plan: a table was read beside its collection, expected lookups alone, as each process has rows of it; "
        "take replicated"
    ] * 2  # fmt: skip


class Tables(Task):
    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


def bags(*names: str) -> EmbeddingBagCollection:
    tables = [EmbeddingBagConfig(name=name, embedding_dim=4, num_embeddings=5, feature_names=[name]) for name in names]
    return EmbeddingBagCollection(tables=tables)


def tied() -> Task:
    task = Tables(bags=bags("user"), over=nn.Linear(4, 5, bias=False))
    task.over.weight = task.bags.embedding_bags["user"].weight
    return task


def frozen() -> Task:
    task = Tables(bags=bags("user", "item"))
    task.bags.embedding_bags["item"].requires_grad_(False)
    return task


REFUSED: dict[str, tuple[Any, str, int, str]] = {
    "one process": (
        lambda: RankingModel(RankingInputs(features={"user": "user"}, candidates={"item": "item"}), {"user": 9, "item": 5}),
        "adagrad",
        1,
        "one process, expected several; start them by torchrun, or take replicated",
    ),
    "adamw": (
        lambda: Tables(bags=bags("user")),
        "adamw",
        2,
        "table_optimizer adamw, expected one of adagrad, rowwise-adagrad, sgd, sparse-adamw, rowwise-adamw, lamb, rowwise-lamb; "
        "adamw moves all rows in each step",
    ),
    "a split table": (
        lambda: NextItemTask(SASRec(9, embedding_dim=4, num_layers=1, max_seq_len=4)),
        "adagrad",
        2,
        "a NextItemTask, expected a task with collections of tables; its item table is split without it: leave it out",
    ),
    "no tables": (
        lambda: Tables(linear=nn.Linear(2, 1)),
        "sgd",
        2,
        "a Tables, expected a task with collections of tables; leave it out",
    ),
    "a table of its own": (
        lambda: Tables(bags=bags("user"), item=nn.Embedding(5, 4)),
        "sgd",
        2,
        "the table item.weight, expected tables of TorchRec's collections or ours; put it into one, or leave it out",
    ),
    "a frozen table": (
        frozen,
        "sgd",
        2,
        "the frozen table bags.embedding_bags.item.weight, expected tables that all learn; leave it out",
    ),
    "a tied table": (
        tied,
        "sgd",
        2,
        "a table of several places: over.weight, expected tables of one collection each; leave it out",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_plan_serves_is_refused(case: str) -> None:
    task, optimizer, world_size, said = REFUSED[case]
    config = TrainerConfig(table_plan="planned", table_optimizer=optimizer)
    with pytest.raises(TrainingError) as caught:
        check_plan(task(), config, world_size)
    assert str(caught.value) == f"table_plan: got planned with {said}"
    assert not check_plan(task(), TrainerConfig(table_optimizer=optimizer), world_size)


def test_a_plan_refuses_slices_of_what_is_never_whole() -> None:
    config = TrainerConfig(table_plan="row-wise", table_optimizer="sgd", table_gradient_bytes=640)
    with pytest.raises(TrainingError) as caught:
        check_plan(Tables(bags=bags("user")), config, 2)
    assert str(caught.value) == (
        "table_plan: got row-wise with table_gradient_bytes 640, expected none; no table whose rows are shared out has a whole "
        "gradient: leave it out"
    )


def test_a_trainer_in_one_process_refuses_a_plan(tmp_path: Path) -> None:
    config = TrainerConfig(output=str(tmp_path / "run"), table_plan="row-wise", table_optimizer="sgd", device="cpu")
    with pytest.raises(TrainingError) as caught:
        Trainer(Tables(bags=bags("user")), config).fit([torch.zeros(1)], [torch.zeros(1)], progress=False)
    assert str(caught.value) == (
        "table_plan: got row-wise with one process, expected several; start them by torchrun, or take replicated"
    )


def test_tables_that_have_no_room_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=1_000))
    config = TrainerConfig(table_plan="table-wise", table_optimizer="sgd")
    with process_group(torch.device("cpu")) as processes, pytest.raises(TrainingError) as caught:
        plan_tables(Tables(bags=bags("user", "item")), config, processes)
    assert str(caught.value) == (
        "table_plan: got table-wise for 1 processes, of which TorchRec's planner says: Unable to find a plan for this model "
        "because of insufficient storage; start more, or take row-wise"
    )


def test_an_optimizer_of_rows_names_the_plan_that_would_have_it() -> None:
    inputs = RankingInputs(features={"user": "user"}, candidates={"item": "item"})
    with pytest.raises(TrainingError) as caught:
        update_tables_in_backward(
            RankingModel(inputs, {"user": 9, "item": 5}), TrainerConfig(table_optimizer="lamb"), world_size=2
        )
    assert str(caught.value) == (
        "table_optimizer: lamb updates rows of SASRec's, HSTU's and RequestModel's tables in one process, got 2 processes; "
        "share tables by table_plan, or take adagrad, rowwise-adagrad, sgd or adamw"
    )


@pytest.mark.parametrize("name", ["h200", "h100-80gb-hbm3"])
def test_bandwidths_of_the_planner_are_those_that_were_measured(name: str) -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / name / "embedding_bags.json").read_text())
    row = found["mlperf"]["rows"]["8,192 samples"]
    ours = row["jagged"]
    multiple = ours["backward"]["median"] / ours["forward"]["median"]
    assert row["optimizer"] == "sgd"
    assert MEASURED[found["environment"]["device"]] == (round(ours["forward"]["gathered_gb_per_s"]), round(multiple, 2))
