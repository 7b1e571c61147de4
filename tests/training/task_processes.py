"""Tasks in two gloo processes against one. A program of its own: `test_task_processes.py` starts it.

It imports everything once and forks the processes. Usage: `python -m tests.training.task_processes DIRECTORY`; prints JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DistributedSampler

from jagged.config import TrainerConfig
from jagged.models import NextItemTask, build
from jagged.pointwise import PointwiseMetrics, storage
from jagged.training import Callback, Progress, Trainer, TrainingError, TrainingInterrupted, loop
from jagged.training.engine import Engine
from jagged.training.processes import Processes
from jagged.training.shares import Shares
from tests.training.clicks import Clicks, Rows, Told, config, loader
from tests.training.lines import Line, batch, joined
from tests.training.support import outcome
from tests.training.two_processes import SIZES, alone, distance, parallel, share

# Rows of the two processes in each batch, and batches of a step where three are accumulated: 3, 3 and 1.
SHARES = [(1, 5), (4, 2), (3, 3), (6, 1), (2, 2), (5, 4), (1, 3)]
OPTIONS: dict[str, Any] = {"learning_rate": 0.05, "weight_decay": 0.1, "gradient_clip_norm": 0.5, "device": "cpu"}


def batches(rank: int) -> list[dict[str, Tensor]]:
    """This process's, with weights and masks; in the fifth batch one process has no row that counts."""
    return [
        batch(sizes[rank], 10 * i + rank, weights=True, masks=True, empty=i == 4 and rank == 1) for i, sizes in enumerate(SHARES)
    ]


def line_weights(accumulate: int, processes: Processes | None) -> dict[str, Tensor]:
    """After an epoch: in processes, or by plain torch on the joint batches."""
    task = Line()
    if processes is not None:
        engine = Engine(task, TrainerConfig(accumulate=accumulate, **OPTIONS), "32-true", processes)
        for _ in engine.steps(iter(batches(processes.rank)), len(SHARES)):
            pass
    else:
        groups = [{"params": [task.line.weight], "weight_decay": 0.1}, {"params": [task.line.bias], "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=0.05)
        both = [joined([left, right]) for left, right in zip(batches(0), batches(1), strict=True)]
        for first in range(0, len(both), accumulate):
            optimizer.zero_grad()
            task(joined(both[first : first + accumulate])).loss.backward()
            nn.utils.clip_grad_norm_(task.parameters(), 0.5)
            optimizer.step()
    return {name: value.detach().clone() for name, value in task.named_parameters()}


def next_item_weights(processes: Processes) -> dict[str, Tensor]:
    torch.manual_seed(0)
    task = NextItemTask(build("sasrec", num_items=31, **SIZES).double(), label_smoothing=0.1)
    engine = Engine(task, TrainerConfig(accumulate=3, warmup_steps=3, **OPTIONS), "32-true", processes)
    for _ in engine.steps(share(31, processes.rank, processes.world_size), 4):
        pass
    assert engine.optimizer.steps == 2
    with engine.whole_task() as whole:
        return {name: value.detach().clone() for name, value in whole.named_parameters()}


def scored(part: int, parts: int) -> list[dict[str, Any]]:
    """Batches of a part of the rows, with weights and masks."""
    found = []
    for number, one in enumerate(loader(Rows(40))):
        generator = torch.Generator().manual_seed(number)
        one["weight"], one["mask"] = torch.rand(8, generator=generator) * 3, torch.rand(8, generator=generator) < 0.7
        if number % parts == part:
            found.append(one)
    return found


def figures(given: list[dict[str, Any]], wanted: bool = True) -> dict[str, Any]:
    torch.manual_seed(0)
    return Clicks(both=True).evaluate(given, "valid", progress=False, all_processes=wanted).to_json()


def with_ids(parts: list[int], limit: int, merge: bool = True) -> str:
    """Figures of parts of nine, with users, requests and a slice, to the last bit."""
    metrics = PointwiseMetrics("click", ks=(1, 3), training_mean=0.4, limit=limit)
    for part in parts:
        generator = torch.Generator().manual_seed(part)
        scores = torch.randn(20, generator=generator).round(decimals=1)
        weights = torch.rand(20, generator=generator) * 10.0 ** (part - 4)
        users, requests, device = torch.randint(9, (3, 20), generator=generator)
        labels = torch.rand(20, generator=generator) < 0.3
        metrics.update(scores, labels, None, weights, users=users, requests=requests, slices={"device": device})
    if merge:
        metrics.all_gather()
    return repr([metrics.compute(), metrics.compute_slices(), metrics.calibration_bins(4)])


class Drawn:
    """Says of the batch that it is in that it has drawn negatives."""

    sampled = True

    def to(self, *_: Any, **__: Any) -> Drawn:
        return self


class Ends(Callback):
    """Ends a process's own run, or asks for its end, at a step of one process."""

    def __init__(self, rank: int, step: int, how: str) -> None:
        self.rank, self.step, self.how = rank, step, how

    def on_step(self, progress: Progress) -> None:
        if (torch.distributed.get_rank(), progress.state.step) == (self.rank, self.step):
            if self.how == "signal":
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                progress.stop("enough")


class Idle(Clicks):
    """It has a weight that nothing uses."""

    def __init__(self) -> None:
        super().__init__(dropout=0.3)
        self.idle = nn.Linear(2, 2)


def fit(
    directory: Path, processes: Processes, *callbacks: Callback, resume: bool = False, task: Any = None, max_epochs: int = 3
) -> Any:
    torch.manual_seed(1)
    rank = processes.rank
    parts = loader(Rows(seed=rank), shuffle=True), loader(Rows(30, rank)), loader(Rows(20, rank + 7))
    trainer = Trainer(task or Clicks(dropout=0.3), config(directory, max_epochs=max_epochs), callbacks=callbacks)
    return trainer.fit(*parts, resume=resume, progress=False)


def main() -> None:
    root = Path(sys.argv[1])
    torch.set_num_threads(1)
    result: dict[str, Any] = {"line": {}}
    load = lambda name: torch.load(root / name, weights_only=True)  # noqa: E731

    def told(name: str, what: Any) -> None:
        (root / name).write_text(json.dumps(what))

    def read(name: str) -> Any:
        return json.loads((root / name).read_text())

    for accumulate in (1, 3):
        name = f"line {accumulate}"
        # Default arguments: a loop's functions would all see its last round.
        parallel(
            root, name, lambda p, a=accumulate, n=name: torch.save(line_weights(a, p), root / f"{n}.{p.rank}")
        )  # fmt: skip
        alone(lambda _, a=accumulate, n=name: torch.save(line_weights(a, None), root / n))
        result["line"][accumulate] = [distance(load(name), load(f"{name}.{rank}")) for rank in range(2)]

    parallel(root, "split", lambda p: torch.save(next_item_weights(p), root / f"split.{p.rank}"))
    alone(lambda p: torch.save(next_item_weights(p), root / "split one"))
    result["split"] = [distance(load("split one"), load(f"split.{rank}")) for rank in range(2)]

    def uneven(processes: Processes) -> None:
        given = [*loader()][: 3 - processes.rank]
        try:
            Trainer(Clicks(), config(root / "uneven")).fit(given, given, progress=False)
        except TrainingError as error:
            told(f"uneven.{processes.rank}", str(error))

    parallel(root, "uneven", uneven)
    result["uneven"] = [read(f"uneven.{rank}") for rank in range(2)]

    def sampled(rows: Rows, processes: Processes) -> Any:
        sampler = DistributedSampler(rows, processes.world_size, processes.rank)
        return loader(rows, sampler=sampler)

    def shared(name: str, train: bool, valid: bool, resume: bool = False, compare: bool = True) -> None:
        """A run in which both processes are given all rows of a part, or each its own of the same."""

        def work(processes: Processes) -> None:
            if not compare:
                Shares.compare = lambda self: None  # type: ignore[method-assign]
            rows = Rows(), Rows(30, 1)
            parts = [
                loader(of, shuffle=number == 0) if same else sampled(of, processes)
                for number, (of, same) in enumerate(zip(rows, (train, valid), strict=True))
            ]
            torch.manual_seed(1)
            try:
                trainer = Trainer(Clicks(dropout=0.3), config(root / name))
                told(f"{name}.{processes.rank}", trainer.fit(*parts, resume=resume, progress=False).steps)
            except TrainingError as error:
                told(f"{name}.{processes.rank}", str(error))

        parallel(root, f"{name} {resume}", work)
        result[f"{name} again" if resume else name] = [read(f"{name}.{rank}") for rank in range(2)]

    shared("all train", True, False)
    shared("all valid", False, True)
    shared("all valid", False, False, resume=True)
    shared("sampled", False, False)
    shared("not compared", False, False, compare=False)
    result["sampled as before"] = outcome(root / "sampled") == outcome(root / "not compared")

    def taken(processes: Processes) -> None:
        try:
            fit(root / "sampled", processes)
        except TrainingError as error:
            told(f"taken.{processes.rank}", str(error))

    parallel(root, "taken", taken)
    result["taken"] = [read(f"taken.{rank}") for rank in range(2)]

    def merged(processes: Processes) -> None:
        found = {"all": figures(scored(processes.rank, 2)), "one has none": figures(scored(0, 1) if processes.is_first else [])}
        one_has = [{**one, "drawn": Drawn()} for one in scored(0, 2)] if processes.is_first else scored(1, 2)
        found["one has drawn negatives"] = figures(one_has)
        metrics = PointwiseMetrics()
        metrics.update(torch.tensor([0.0, 1.0, 1.0]) + processes.rank, torch.tensor([0, 1, processes.rank]))
        metrics.all_gather()
        found["metrics"] = metrics.compute()
        # Pieces of 16 rows, from memory and from disk, of uneven shares; then all rows in one process.
        storage.CHUNK = 16
        found["ids"] = [
            with_ids([*range(processes.rank, 9, 2)], limit=1 << 20),
            with_ids([*range(2 + processes.rank)] if processes.is_first else [*range(2, 9)], limit=30),
            with_ids([*range(9)] if processes.is_first else [], limit=100),
        ]
        other = PointwiseMetrics("click")
        other.update(torch.zeros(1), torch.zeros(1), users=None if processes.is_first else torch.tensor([0]))
        bad = PointwiseMetrics("click")
        bad.update(torch.tensor([0.0 if processes.is_first else float("nan")]), torch.zeros(1))
        for wrong in (other, bad):
            try:
                wrong.all_gather()
                wrong.compute()
            except ValueError as error:
                found.setdefault("refused", []).append(str(error))
        told(f"merged.{processes.rank}", found)

    parallel(root, "merged", merged)
    alone(lambda _: told("merged one", figures(scored(0, 1))))
    metrics = PointwiseMetrics()
    metrics.update(torch.tensor([0.0, 1.0, 1.0, 1.0, 2.0, 2.0]), torch.tensor([0, 1, 0, 0, 1, 1]))
    result["merged"] = [read("merged one"), metrics.compute(), *(read(f"merged.{rank}") for rank in range(2))]
    result["ids"] = with_ids([*range(9)], limit=1 << 20, merge=False)

    def whole(name: str, *callbacks: Any, resume: bool = False, slow: bool = False) -> None:
        def work(processes: Processes) -> None:
            if slow:
                loop._AGREE_SECONDS = 0.0
            calls = Told()
            try:
                found = fit(root / name, processes, calls, *callbacks, resume=resume)
                told(f"{name}.{processes.rank}", [found.steps, found.stopped, calls.calls])
            except TrainingInterrupted as error:
                told(f"{name}.{processes.rank}", str(error))

        parallel(root, f"{name} {resume}", work)

    whole("run")
    whole("stopped", Ends(1, 8, "signal"))
    result["interrupted"] = [read(f"stopped.{rank}") for rank in range(2)]
    whole("stopped", resume=True)
    whole("slow", Ends(1, 8, "signal"), slow=True)
    result["slow"] = [read(f"slow.{rank}") for rank in range(2)]
    whole("asked", Ends(1, 8, "stop"))
    result["asked"] = [read(f"asked.{rank}")[:2] for rank in range(2)]
    result["same"] = outcome(root / "run") == outcome(root / "stopped")
    result["calls"] = [read(f"{name}.0")[2] for name in ("run", "stopped")]

    def alone_now(processes: Processes) -> None:
        try:
            fit(root / "slow", processes, Told(), resume=True)
        except TrainingError as error:
            told("slow alone", str(error))
        # It stands between two epochs.
        found = fit(root / "run", processes, Told(), resume=True, max_epochs=4)
        told("run alone", [found.steps, len(found.history)])

    alone(alone_now)
    result["alone"] = [read("slow alone"), read("run alone")]

    parallel(root, "idle", lambda p: told(f"idle.{p.rank}", fit(root / "idle", p, task=Idle()).steps))
    result["idle"] = [read(f"idle.{rank}") for rank in range(2)]
    print(json.dumps(result))


if __name__ == "__main__":
    main()
