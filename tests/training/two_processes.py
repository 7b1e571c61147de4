"""Several gloo processes against one, and against the padded twin. A program of its own: `test_processes.py` starts it.

It imports everything once and forks the processes. Usage: `python -m tests.training.two_processes DIRECTORY`; prints JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from jagged.config import TrainerConfig
from jagged.data import BatchLoader, SequenceBatch, split_leave_one_out
from jagged.models import NextItemTask, build
from jagged.modules import GroupSparseHead, InBatchSampler, SampledCrossEntropyHead, UniformSampler
from jagged.runs.training import train
from jagged.training import Callback, Progress, TrainingInterrupted, loop
from jagged.training.checkpoint import load_checkpoint, save_checkpoint
from jagged.training.engine import Engine
from jagged.training.processes import Processes, process_group
from tests.processes import fork
from tests.reference.sasrec import PaddedSASRec, left_padded, twin_names
from tests.training.support import outcome, run, tiny_config, tiny_dataset

LENGTH, STEPS = 12, 4
SIZES: dict[str, Any] = {"embedding_dim": 8, "num_heads": 2, "num_layers": 2, "max_seq_len": LENGTH, "dropout": 0.0}
CONFIG = TrainerConfig(learning_rate=0.01, warmup_steps=3, gradient_clip_norm=0.05, weight_decay=0.1)
ADAM = ("exp_avg", "exp_avg_sq")
TABLE = "model.item_embeddings.embeddings.item_id.weight"


class Case(NamedTuple):
    """Sizes of a comparison: blocks of 16 and 15 items, or of 2, 2 and none."""

    items: int = 31
    smoothing: float = 0.0
    processes: int = 2
    has_output: bool = False
    sampler: str = ""
    model: str = "sasrec"

    def head(self) -> SampledCrossEntropyHead | None:
        """One that needs no logarithms of probabilities, which are float32."""
        if not self.sampler:
            return None
        made = InBatchSampler() if self.sampler == "in-batch" else UniformSampler(self.items, 4)
        return SampledCrossEntropyHead(made, correction="none", loss="softmax" if self.sampler == "in-batch" else "gbce")


OUTPUT = Case(has_output=True)
CASES = {
    "plain": Case(),
    "smoothed": Case(smoothing=0.2),
    "empty block": Case(items=4, smoothing=0.1, processes=3),
    "drawn items": Case(sampler="uniform"),
    "in-batch items": Case(items=4, processes=3, sampler="in-batch"),
    "hstu": Case(model="hstu"),
}


def share(items: int, rank: int, world_size: int, empty_last: bool = False) -> Iterator[SequenceBatch]:
    """This process's part of each step's users, of very different lengths; the last step may leave all but the first nothing."""
    generator = torch.Generator().manual_seed(0)
    for step in range(STEPS):
        lengths = [1, LENGTH, 2, 3, LENGTH, 1]
        values = torch.randint(items, (sum(lengths),), generator=generator)
        targets = torch.randint(items, (sum(lengths),), generator=generator)
        users = len(lengths) // world_size
        first, last = rank * users, (rank + 1) * users
        if empty_last and step == STEPS - 1 and world_size > 1:
            first, last = (0, len(lengths)) if rank == 0 else (0, 0)
        rows = slice(sum(lengths[:first]), sum(lengths[:last]))
        features = KeyedJaggedTensor(
            keys=["item_id"],
            values=values[rows],
            lengths=torch.tensor(lengths[first:last], dtype=torch.int64),
            stride=last - first,
        )
        yield SequenceBatch(features, targets[rows], torch.arange(first, last))


def started(case: Case, processes: Processes, dtype: torch.dtype = torch.float64) -> Engine:
    torch.manual_seed(0)
    output = None
    if case.has_output:
        counts = torch.arange(case.items)
        output = GroupSparseHead(SIZES["embedding_dim"], counts, case.items, fan_in=4, group_size=5, head=3, loss="softmax")
    model = build(case.model, num_items=case.items, output=output, **SIZES).to(processes.device, dtype)
    head = case.head()
    task = NextItemTask(model, label_smoothing=case.smoothing) if head is None else NextItemTask(model, head=head)
    return Engine(task, CONFIG, "32-true", processes)


def take_steps(engine: Engine, case: Case, first: int = 0, last: int = STEPS, empty_last: bool = False) -> None:
    processes = engine.processes
    for _ in engine.steps(islice(share(case.items, processes.rank, processes.world_size, empty_last), first, last)):
        pass


def weights(engine: Engine) -> dict[str, torch.Tensor]:
    """All weights, on the CPU: as checkpoints get them in the first process, as evaluation gets them in all."""
    collected = engine.collect({name: value.detach() for name, value in engine.task.named_parameters()})
    with engine.whole_task() as task:
        whole = {name: value.detach().cpu().clone() for name, value in task.named_parameters()}
    assert all(torch.equal(value.cpu(), whole[name]) for name, value in collected.items())
    assert (TABLE in collected) == engine.processes.is_first
    return whole


def rows_held(engine: Engine) -> dict[str, int]:
    """Rows of the item table of everything that lives as long as the run."""
    state = engine.optimizer.state_tensors()
    held = {"weight": engine.task.get_parameter(TABLE), **{key: state[f"optimizer.{key}.{TABLE}"] for key in ADAM}}
    return {name: len(tensor) for name, tensor in held.items()}


def twin_weights(case: Case) -> dict[str, torch.Tensor]:
    """The same by the padded twin and plain torch."""
    torch.manual_seed(0)
    start = build("sasrec", num_items=case.items, **SIZES).double()
    twin = PaddedSASRec(case.items, **SIZES).double()
    names = twin_names(SIZES["num_layers"])
    with torch.no_grad():
        for name, twin_name in names.items():
            twin.get_parameter(twin_name).copy_(start.get_parameter(name))
    decayed = [p for p in twin.parameters() if p.dim() > 1]
    others = [p for p in twin.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
    for batch in share(case.items, 0, 1):
        lengths = batch.features.lengths().tolist()
        items, filled = left_padded(batch.features.values(), lengths, LENGTH)
        wanted, _ = left_padded(batch.targets, lengths, LENGTH)
        optimizer.zero_grad()
        logits = twin(items, filled)[filled] @ twin.item_weight.T
        torch.nn.functional.cross_entropy(logits, wanted[filled], label_smoothing=case.smoothing).backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.05)
        optimizer.step()
        schedule.step()
    return {f"model.{name}": twin.get_parameter(twin_name).detach() for name, twin_name in names.items()}


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def parallel(root: Path, name: str, work: Callable[[Processes], Any], count: int = 2) -> None:
    """Do a piece of work in several processes of one group, which the caller makes, as torchrun's users may."""
    fork(lambda: _in_group(work), count, root / f"{name}.store")


def alone(work: Callable[[Processes], Any]) -> None:
    fork(lambda: _in_group(work))


def _in_group(work: Callable[[Processes], Any]) -> None:
    with process_group(torch.device("cpu")) as processes:
        work(processes)


class Watched(Callback):
    """Keeps what each step of this process was trained on, and the rate after it; ends the process's run after a step.

    Args:
        kind: of the task, which is changed.
        ids: of a batch's samples.
        last: the step; None: the run comes to its end.
    """

    def __init__(self, kind: type, ids: Callable[[Any], torch.Tensor], last: int | None) -> None:
        self.last = last
        self.ids: list[int] = []
        self.trained_on: list[Any] = []
        self.rates: list[float] = []
        self.loaded: list[bool] = []
        forward, load, watched = kind.forward, Engine.load_state_tensors, self  # type: ignore[attr-defined]

        def forward_and_keep(self: Any, batch: Any) -> Any:
            # The pipeline of sharded tables traces it first.
            if self.training and not isinstance(batch, torch.fx.Proxy):
                watched.ids += ids(batch).tolist()
            return forward(self, batch)

        def load_and_compare(self: Engine, tensors: dict[str, torch.Tensor], steps: int) -> None:
            load(self, tensors, steps)
            now = self.state_tensors()
            if self.processes.is_first:
                kept = {name: value for name, value in tensors.items() if name.startswith(("task.", "optimizer."))}
                assert any("optimizer.exp_avg_sq." in name or "optimizer.sum." in name for name in kept)
                same_names = kept.keys() == {name for name in now if not name.startswith("random.")}
                watched.loaded.append(same_names and all(torch.equal(value, now[name]) for name, value in kept.items()))

        kind.forward = forward_and_keep  # type: ignore[attr-defined]
        Engine.load_state_tensors = load_and_compare  # type: ignore[method-assign, assignment]
        loop._AGREE_SECONDS = 0.0

    def on_start(self, progress: Progress) -> None:
        # The forecast's forward pass is no training.
        self.ids = []
        self.rates.append(progress._optimizer.learning_rate)

    def on_step(self, progress: Progress) -> None:
        self.trained_on.append([progress.state.epoch, self.ids])
        self.ids = []
        self.rates.append(progress._optimizer.learning_rate)
        if progress.state.step == self.last:
            os.kill(os.getpid(), signal.SIGTERM)


def with_other_processes(
    root: Path,
    name: str,
    parts: Sequence[tuple[int, int | None]],
    kind: type,
    ids: Callable[[Any], torch.Tensor],
    trained: Callable[[Path, Processes, Callback], Any],
) -> list[list[dict[str, Any]]]:
    """A run in parts, each of so many processes until after a step; what each process of each part kept."""
    found = []
    for number, (count, last) in enumerate(parts):

        def work(processes: Processes, number: int = number, last: int | None = last) -> None:
            watched = Watched(kind, ids, last)
            try:
                trained(root / name, processes, watched)
                assert last is None
            except TrainingInterrupted:
                assert last is not None
            kept = {"trained on": watched.trained_on, "rates": watched.rates, "loaded": watched.loaded}
            (root / f"{name}.{number}.{processes.rank}.kept").write_text(json.dumps(kept))

        parallel(root, f"{name}.{number}", work, count)
        found.append([json.loads((root / f"{name}.{number}.{rank}.kept").read_text()) for rank in range(count)])
    return found


def steps_of(kept: Sequence[Sequence[dict[str, Any]]]) -> list[tuple[int, list[int]]]:
    """Of a run as `with_other_processes` gives it the epoch of each step, and what all processes were trained on in it."""
    found = []
    for part in kept:
        for step in zip(*(process["trained on"] for process in part), strict=True):
            (epoch,) = {epoch for epoch, _ in step}
            found.append((epoch, sorted(one for _, ids in step for one in ids)))
    return found


def main() -> None:
    root = Path(sys.argv[1])
    torch.set_num_threads(1)
    load = lambda name: torch.load(root / name, weights_only=True)  # noqa: E731
    result: dict[str, Any] = {"distances": {}}

    def keep(name: str, case: Case, empty_last: bool = False) -> Callable[[Processes], None]:
        def work(processes: Processes) -> None:
            engine = started(case, processes)
            take_steps(engine, case, empty_last=empty_last)
            torch.save(weights(engine), root / f"{name}.{processes.rank}")
            (root / f"{name}.{processes.rank}.json").write_text(json.dumps(rows_held(engine)))

        return work

    for name, case in CASES.items():
        alone(keep(f"{name} one", case))
        twin = {} if case.sampler or case.model != "sasrec" else {"twin": f"{name} twin"}
        if twin:
            alone(lambda _, name=name, case=case: torch.save(twin_weights(case), root / f"{name} twin"))  # type: ignore[misc]
        parallel(root, name, keep(f"{name} split", case), case.processes)
        one = load(f"{name} one.0")
        found = {**twin, **{str(rank): f"{name} split.{rank}" for rank in range(case.processes)}}
        result["distances"][name] = {other: distance(one, load(file)) for other, file in found.items()}
    alone(keep("output one", OUTPUT))
    for name, empty_last in (("output split", False), ("output empty", True)):
        parallel(root, name, keep(name, OUTPUT, empty_last))
    found = {f"{name} {rank}": f"{name}.{rank}" for name in ("output split", "output empty") for rank in range(2)}
    result["distances"]["output layer"] = {name: distance(load("output one.0"), load(file)) for name, file in found.items()}
    case = CASES["plain"]
    parallel(root, "empty", keep("empty", case, empty_last=True))
    result["distances"]["empty batch"] = {str(rank): distance(load("plain one.0"), load(f"empty.{rank}")) for rank in range(2)}
    rows = lambda name, rank: json.loads((root / f"{name}.{rank}.json").read_text())  # noqa: E731
    result["rows"] = {
        "one": [rows("plain one", 0)],
        "two": [rows("plain split", rank) for rank in range(2)],
        "three": [rows("empty block split", rank) for rank in range(3)],
    }

    # A checkpoint of two processes goes on in one, and the other way round.
    def half(name: str, read: str | None = None) -> Callable[[Processes], None]:
        def work(processes: Processes) -> None:
            engine = started(case, processes)
            if read:
                engine.load_state_tensors(load_checkpoint(root / "halves" / read)[0], STEPS // 2)
            take_steps(engine, case, *((STEPS // 2, STEPS) if read else (0, STEPS // 2)))
            tensors, whole = engine.state_tensors(), weights(engine)
            if processes.is_first:
                save_checkpoint(root / "halves", name, tensors, {})
                torch.save(whole, root / f"{name} half")

        return work

    alone(half("one"))
    parallel(root, "half two", half("two"))
    alone(half("two one", read="two"))
    parallel(root, "half one two", half("one two", read="one"))
    plain = load("plain one.0")
    result["distances"]["checkpoint"] = {name: distance(plain, load(f"{name} half")) for name in ("two one", "one two")}
    contents = [load_checkpoint(root / "halves" / name)[0] for name in ("two one", "one two")]
    result["shapes agree"] = len({str({k: (v.shape, v.dtype) for k, v in c.items() if "random" not in k}) for c in contents}) == 1

    # A whole run: the directory is written once, metrics are of all users, and an interrupted run goes on.
    dataset = tiny_dataset()
    options = {"dropout": 0.0, "batch_size": 4}

    def whole(directory: Path, **more: Any) -> Callable[[Processes], None]:
        return lambda _: run(directory, dataset, resume=True, **options, **more) and None

    parallel(root, "whole", whole(root / "whole"))
    parallel(root, "half", whole(root / "half", max_epochs=1))
    parallel(root, "half again", whole(root / "half"))
    alone(lambda _: run(root / "single", dataset, dropout=0.0, batch_size=8) and None)
    sampled = {**options, "head": "sampled", "sampler": "mixed", "num_negatives": 8}
    parallel(root, "sampled", lambda _: run(root / "sampled", dataset, **sampled) and None)
    parallel(root, "sampled half", lambda _: run(root / "sampled half", dataset, max_epochs=1, **sampled) and None)
    parallel(root, "sampled again", lambda _: run(root / "sampled half", dataset, resume=True, **sampled) and None)
    alone(lambda _: run(root / "sampled one", dataset, **{**sampled, "batch_size": 8}) and None)
    result["sampled resumed"] = outcome(root / "sampled") == outcome(root / "sampled half")
    result["sampled losses"] = [[row["loss"] for row in outcome(root / name)["history"]] for name in ("sampled", "sampled one")]
    shorter = {"name": "hstu", "stochastic_length": 0.9}
    parallel(root, "shorter", whole(root / "shorter", **shorter))
    parallel(root, "shorter half", whole(root / "shorter half", max_epochs=1, **shorter))
    parallel(root, "shorter again", whole(root / "shorter half", **shorter))
    result["shorter resumed"] = outcome(root / "shorter") == outcome(root / "shorter half")
    # An output layer's inputs change alike in all.
    options |= {"head": "group-sparse", "fan_in": 4, "group_size": 8, "rewire_every": 2, "rewire_until": 1.0}
    parallel(root, "output whole", whole(root / "output"))
    parallel(root, "output half", whole(root / "output half", max_epochs=1))
    parallel(root, "output half again", whole(root / "output half"))
    result["output resumed"] = outcome(root / "output") == outcome(root / "output half")
    whole_run, single = outcome(root / "whole"), outcome(root / "single")
    result["resumed"] = whole_run == outcome(root / "half")
    result["losses"] = [[row["loss"] for row in one["history"]] for one in (whole_run, single)]
    result["steps"] = [one["history"][-1]["step"] for one in (whole_run, single)]
    loaders = [
        BatchLoader(split_leave_one_out(dataset).train, batch_size=4, max_seq_len=12, shuffle=True, seed=0, rank=r, world_size=2)
        for r in range(2)
    ]

    # A step has as many users, in one process of two batches; one part ends with an epoch's last step, before its validation.
    def with_joint_batches(directory: Path, processes: Processes, watched: Callback) -> None:
        sizes = {1: {"batch_size": 4, "accumulate": 2}, 2: {"batch_size": 4}, 4: {"batch_size": 2}}[processes.world_size]
        options = {"dropout": 0.0, "schedule": "cosine", "warmup_steps": 3}
        train(tiny_config(directory, **options, **sizes), dataset, callbacks=[watched], resume=True, progress=False)

    for name, parts in (("never stopped", [(1, None)]), ("others", [(1, 2), (2, 5), (4, 7), (1, None)])):
        kept = with_other_processes(root, name, parts, NextItemTask, lambda batch: batch.users, with_joint_batches)
        result[name] = {"kept": kept, "history": outcome(root / name)["history"]}
    result["expected_steps"] = loaders[0].num_batches(0) * tiny_config("x").training.max_epochs
    print(json.dumps(result))


if __name__ == "__main__":
    main()
