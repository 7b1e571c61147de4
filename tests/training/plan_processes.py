"""Tables that gloo processes share by a plan against one process. A program of its own: `test_table_plan.py` starts it.

It imports everything once and forks the processes. Usage: `python -m tests.training.plan_processes DIRECTORY`; prints JSON.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from jagged.config import TrainerConfig
from jagged.data import Dataset
from jagged.data.table_batches import Batch
from jagged.models import RankingModel, TaskOutput
from jagged.models.pretrained import load_task
from jagged.models.serving import export_scores, scoring_tensors
from jagged.modules.trained_tables import TrainedTables
from jagged.runs.ranking import RankingRun
from jagged.runs.ranking.predicting import Ranker
from jagged.training import Callback, Progress, Trainer, TrainingError
from jagged.training.processes import Processes
from tests.training.support import outcome
from tests.training.table_processes import ROWS, moving
from tests.training.table_runs import shop_file, train_table
from tests.training.test_tables import Clicks, impressions_table
from tests.training.two_processes import Watched, alone, distance, parallel, with_other_processes

TASKS: dict[str, Any] = {"ranking": RankingModel.of, "clicks": Clicks}
RATES = {"sparse-adamw": 0.02, "rowwise-adamw": 0.02, "lamb": 0.02, "adagrad": 0.1, "rowwise-adagrad": 0.1, "sgd": 1.0}
# The plan, the optimizer, other options, and processes.
CASES: dict[str, tuple[str, str, str, dict[str, Any], int]] = {
    "planned": ("ranking", "planned", "rowwise-adagrad", {}, 2),
    "rows": ("ranking", "row-wise", "sparse-adamw", {"table_max_norm": 0.5, "table_weight_decay": 0.1}, 2),
    "tables": ("ranking", "table-wise", "rowwise-adamw", {"table_decay_missed_steps": True, "gradient_clip_norm": None}, 2),
    "accumulated": ("ranking", "row-wise", "sgd", {"accumulate": 3, "gradient_clip_norm": 0.1}, 2),
    "small states": ("ranking", "row-wise", "lamb", {"table_states": "bfloat16", "table_beta2": 0.9}, 2),
    "more processes than tables": ("ranking", "table-wise", "sparse-adamw", {"accumulate": 2}, 4),
    "task of one's own": ("clicks", "row-wise", "adagrad", {"gradient_clip_norm": 0.05}, 2),
}
# Under autocast, whose rounding of gradients depends on how samples are split over processes, at small rates, so that runs stay
# near one another: one process, and the same two with whole tables and with a plan.
_MIXED: dict[str, Any] = {"precision": "bf16-mixed", "learning_rate": 0.002, "table_learning_rate": 0.01}
MIXED: dict[str, tuple[str, str, str, dict[str, Any], int]] = {
    "mixed, one process": ("ranking", "replicated", "rowwise-adagrad", _MIXED, 1),
    "mixed, replicated": ("ranking", "replicated", "rowwise-adagrad", _MIXED, 2),
    "mixed, row-wise": ("ranking", "row-wise", "rowwise-adagrad", _MIXED, 2),
    "mixed, table-wise": ("ranking", "table-wise", "rowwise-adagrad", _MIXED, 2),
}
# By the norm that gradients are clipped to: what a run does of whose gradients some are not finite.
OVERFLOWS: dict[str, float | None] = {"clipped": 1.0, "not clipped": None}
OVERFLOW = 3

# The processes of each part of a run, after which step it ends, and its plan; a second epoch's last steps are 20 to 38.
PARTS: list[tuple[int, int | None, str]] = [
    (1, 25, "replicated"),
    (2, 28, "row-wise"),
    (4, 31, "table-wise"),
    (1, 33, "replicated"),
    (2, 35, "planned"),
    (2, None, "table-wise"),
]
RESUMED: dict[str, dict[str, Any]] = {
    "scalar states": {"table_optimizer": "sparse-adamw", "table_decay_missed_steps": True},
    "states of rows": {"table_optimizer": "rowwise-adagrad"},
}


class ReadsItself(Clicks):
    """Reads a table beside its collection."""

    def forward(self, batch: Batch) -> TaskOutput:
        loss, scores = super().forward(batch)
        return TaskOutput(loss + self.features.embedding_bags["user_id"].weight.square().mean(), scores)


class Overflows(Callback):
    """Lets the gradients of one table overflow in a step, in the last process alone, and keeps which steps moved own rows."""

    def __init__(self, task: Clicks, is_here: bool) -> None:
        self.moved: list[bool] = []
        self.counts: list[list[int]] = []
        self._before: dict[str, Tensor] = {}
        self._is_here = is_here
        task.mlp[0].register_full_backward_hook(self._overflow)

    def _overflow(self, _: nn.Module, grads: Any, __: Any) -> tuple[Tensor] | None:
        if not self._is_here or len(self.moved) != OVERFLOW - 1:
            return None
        # Of the columns of the first table.
        return (torch.cat([torch.full_like(grads[0][:, :8], torch.inf), grads[0][:, 8:]], 1),)

    def on_step(self, progress: Progress) -> None:
        updates = progress._optimizer._updates
        now = {name: of.clone() for name, of in updates.weights().items() if of.numel()}
        self.moved.append(any(not torch.equal(of, self._before.get(name, of)) for name, of in now.items()))
        self.counts.append([int(of.step) for of in updates.optimizers])
        self._before = now


class Held(Callback):
    """Keeps how many rows of each table a process has while it trains, and the norms of gradients."""

    rows: dict[str, int]

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_step(self, progress: Progress) -> None:
        self.norms += [float(norm) for norm in progress._optimizer.norms[-1:]]
        updates = progress._optimizer._updates
        self.rows = {name: len(of) for name, of in updates.weights().items()} if hasattr(updates, "weights") else {}


def train(root: Path, case: str, processes: Processes) -> dict[str, Any]:
    """An epoch in the order of the rows; the processes have the parts of each of its batches."""
    kind, plan, optimizer, more, _ = {**CASES, **MIXED}[case]
    count = processes.world_size
    split = Dataset.load(root / "table").split(by="time", valid=0.2, test=0.2)
    torch.manual_seed(0)
    task = TASKS[kind](split)
    share = {"max_history": 10, "rank": processes.rank, "world_size": count}
    parts = [getattr(split, part).loader(batch_size=ROWS // count, **share) for part in ("train", "valid", "test")]
    rates = {"learning_rate": 0.02, "table_learning_rate": RATES[optimizer]}
    config = TrainerConfig(
        output=str(root / f"{case} by {count}"),
        table_plan=plan if count > 1 else "replicated",
        table_optimizer=optimizer,
        **{**rates, "max_epochs": 1, "schedule": "linear", "monitor": "auc", "device": "cpu", **more},
    )
    held, pipelined = Held(), set()
    detach = TrainPipelineSparseDist.detach

    def note(pipeline: Any) -> None:
        pipelined.update(module.forward.name for module in pipeline._pipelined_modules)
        detach(pipeline)

    TrainPipelineSparseDist.detach = note
    found = Trainer(task, config, callbacks=[held]).fit(*parts, progress=False)
    # The task has whole tables again, and learns as any other.
    types = sorted({type(part).__name__ for part in task.modules() if isinstance(part, TrainedTables)})
    whole = {name: value.clone() for name, value in task.state_dict().items()}
    if processes.is_first:
        torch.save(whole, root / f"{case}.{count}")
        torch.manual_seed(1)
        kept = load_task(root / f"{case} by {count}", None if kind == "ranking" else TASKS[kind](split)).state_dict()
        assert all(torch.equal(value, whole[name]) for name, value in kept.items())
    losses = [row["loss"] for row in found.history]
    told = {"metrics": found.metrics.to_json(), "losses": losses, "norms": held.norms, "pipelined": sorted(pipelined)}
    return {**told, "rows": held.rows, "types": types}


def overflowed(root: Path, case: str, processes: Processes) -> dict[str, Any]:
    split = Dataset.load(root / "table").split(by="time", valid=0.2, test=0.2)
    torch.manual_seed(0)
    task = Clicks(split)
    share = {"rank": processes.rank, "world_size": processes.world_size}
    train, valid = (getattr(split, part).loader(batch_size=ROWS // processes.world_size, **share) for part in ("train", "valid"))
    options = {"table_plan": "table-wise", "table_optimizer": "sgd", "gradient_clip_norm": OVERFLOWS[case], "device": "cpu"}
    config = TrainerConfig(output=str(root / f"overflow {case}"), max_epochs=1, monitor="auc", **options)
    watched, said = Overflows(task, processes.rank == processes.world_size - 1), None
    try:
        Trainer(task, config, callbacks=[watched]).fit(train, valid, progress=False)
    except TrainingError as error:
        said = str(error)
    return {"moved": watched.moved, "counts": watched.counts, "error": said}


def in_parts(root: Path, directory: Path, processes: Processes, watched: Callback, options: dict[str, Any]) -> None:
    """Two epochs whose steps have 64 requests in all."""
    count = processes.world_size
    split = Dataset.load(root / "table").split(by="time", valid=0.2, test=0.2)
    torch.manual_seed(0)
    share = {"max_history": 10, "rank": processes.rank, "world_size": count}
    train = split.train.loader(batch_size=ROWS // count, shuffle=True, **share)
    valid = split.valid.loader(batch_size=100, **share)
    schedule = {"schedule": "cosine", "warmup_steps": 5, "table_learning_rate": 0.02}
    config = TrainerConfig(output=str(directory), max_epochs=2, monitor="auc", device="cpu", **schedule, **options)
    Trainer(RankingModel.of(split), config, callbacks=[watched]).fit(train, valid, resume=True, progress=False)


def resumed(root: Path, name: str, parts: Sequence[tuple[int, int | None, str]], options: dict[str, Any]) -> dict[str, Any]:
    """A run in parts of other processes and plans: what each process was trained on, and what the run leaves."""
    # By the step that ends a part.
    plans = {last: plan for _, last, plan in parts}

    def part(directory: Path, processes: Processes, watched: Watched) -> None:
        in_parts(root, directory, processes, watched, {**options, "table_plan": plans[watched.last]})

    kept = with_other_processes(root, name, [of[:2] for of in parts], RankingModel, lambda batch: batch.rows, part)
    return {"kept": kept, **outcome(root / name)}


def job(root: Path, processes: Processes) -> None:
    """`jagged train` of a table, and what is done with its directory afterwards."""
    count = processes.world_size
    plan = {"table_plan": "row-wise"} if count > 1 else {}
    training = {"table_optimizer": "sparse-adamw", "table_learning_rate": 0.05, "batch_size": 8 // count, **plan}
    options: dict[str, Any] = {"model": {"dropout": 0.0}, "data": {"unseen_share": 0.0}, "training": training}
    directory = root / f"job by {count}"
    expected = train_table(directory, root / "shop.csv", **options).forecast
    told = {name: getattr(expected, name) for name in ("parameters", "elsewhere", "optimizer", "checkpoint")}
    if processes.is_first:
        ranker = Ranker.from_pretrained(directory, device="cpu")
        scores = ranker.predict(root / "shop.csv", progress=False)
        told["scores"] = scores["predicted_click"].to_pylist()
        told["evaluated"] = dict(ranker.evaluate(progress=False).metrics["click"])
        batch = RankingRun.open(directory, device="cpu").part("test").gather(range(5))
        exported = export_scores(ranker._run.model, batch).module()(**scoring_tensors(ranker._run.model, batch))
        told["exported"] = exported["click"].sigmoid().tolist()
        told["direct"] = ranker._run.model.predict(batch)["click"].tolist()
        told["losses"] = [row["loss"] for row in outcome(directory)["history"]]
    (root / f"job.{count}.{processes.rank}").write_text(json.dumps(told))


def refused(root: Path, processes: Processes) -> None:
    """What a process says of a task that reads a table beside its collection."""
    split = Dataset.load(root / "table").split(by="time", valid=0.2, test=0.2)
    loader = split.train.loader(batch_size=ROWS, rank=processes.rank, world_size=processes.world_size)
    config = TrainerConfig(output=str(root / "refused"), device="cpu", table_plan="row-wise", table_optimizer="sgd")
    try:
        Trainer(ReadsItself(split), config).fit(loader, loader, progress=False)
    except TrainingError as error:
        (root / f"refused.{processes.rank}").write_text(str(error))


def told_by_all(root: Path, case: str, count: int, work: Callable[[Path, str, Processes], Any]) -> list[Any]:
    """What each of several processes finds."""

    def told(processes: Processes) -> None:
        (root / f"{case}.{count}.{processes.rank}").write_text(json.dumps(work(root, case, processes)))

    if count == 1:
        alone(told)
    else:
        parallel(root, case, told, count)
    return [json.loads((root / f"{case}.{count}.{rank}").read_text()) for rank in range(count)]


def main() -> None:
    root = Path(sys.argv[1])
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    # DuckDB has threads, which a process that forks must not have.
    (root / "files").mkdir()
    alone(lambda _: impressions_table(root / "files").save(root / "table"))
    result: dict[str, Any] = {}
    shop_file(root / "shop.csv")
    alone(lambda processes: job(root, processes))
    parallel(root, "job", lambda processes: job(root, processes))
    with safe_open(root / "job by 1" / "model.safetensors", "pt") as file:
        tables = [name for name in file.keys() if "embedding_bags." in name or "embeddings." in name]  # noqa: SIM118
        result["job tables"] = sum(file.get_tensor(name).nbytes for name in tables)
    result["job"] = [json.loads((root / f"job.{place}").read_text()) for place in ("1.0", "2.0", "2.1")]
    parallel(root, "refused", lambda processes: refused(root, processes))
    result["refused"] = [(root / f"refused.{rank}").read_text() for rank in range(2)]
    for case in RESUMED:
        whole = resumed(root, f"{case} whole", [(1, None, "replicated")], RESUMED[case])
        result[case] = {"whole": whole, "parts": resumed(root, f"{case} parts", PARTS, RESUMED[case])}
    stops: list[list[tuple[int, int | None, str]]] = [[(2, None, "planned")], [(2, 25, "planned"), (2, None, "planned")]]
    result["stopped"] = [resumed(root, f"stopped {len(of)}", of, {"table_optimizer": "rowwise-adamw"}) for of in stops]
    for case in OVERFLOWS:
        result[f"overflow, {case}"] = told_by_all(root, case, 2, overflowed)
    runs = {case: told_by_all(root, case, MIXED[case][-1], train)[0] for case in MIXED}
    whole = {case: moving(torch.load(root / f"{case}.{MIXED[case][-1]}", weights_only=True)) for case in MIXED}
    apart = {case: distance(of, whole["mixed, replicated"]) for case, of in whole.items()}
    result["mixed"] = {case: {**runs[case], "apart": apart[case]} for case in MIXED}
    for case in CASES:
        count = CASES[case][-1]
        runs = [*told_by_all(root, case, 1, train), *told_by_all(root, case, count, train)]
        one, several = (moving(torch.load(root / f"{case}.{of}", weights_only=True)) for of in (1, count))
        result[case] = {"distance": distance(one, several), "runs": runs, "sizes": {n: len(v) for n, v in one.items() if v.dim()}}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
