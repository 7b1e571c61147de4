"""Two gloo processes against one, and against the padded twin. A program of its own: `test_processes.py` starts it.

It imports everything once and forks the processes. Usage: `python -m tests.training.two_processes DIRECTORY`; prints JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from jagged.config import TrainConfig
from jagged.data import BatchLoader, SequenceBatch, split_leave_one_out
from jagged.models import TrainTask, build
from jagged.training.engine import Engine
from jagged.training.processes import Processes, process_group
from tests.reference.sasrec import PaddedSASRec, left_padded, twin_names
from tests.training.support import outcome, run, tiny_config, tiny_dataset

ITEMS, LENGTH, STEPS = 30, 12, 4
SIZES: dict[str, Any] = {"embedding_dim": 8, "num_heads": 2, "num_layers": 2, "max_seq_len": LENGTH, "dropout": 0.0}
CONFIG = TrainConfig(learning_rate=0.01, warmup_steps=3, gradient_clip_norm=0.05, weight_decay=0.1)


def share(rank: int, world_size: int, empty_last: bool = False) -> Iterator[SequenceBatch]:
    """This process's part of each step's users, of very different lengths; the last step may leave the last one nothing."""
    generator = torch.Generator().manual_seed(0)
    for step in range(STEPS):
        lengths = [1, LENGTH, 2, 3, LENGTH, 1]
        values = torch.randint(ITEMS, (sum(lengths),), generator=generator)
        targets = torch.randint(ITEMS, (sum(lengths),), generator=generator)
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


def engine_weights(processes: Processes, empty_last: bool) -> dict[str, torch.Tensor]:
    """Weights after the steps, in float64 so that the order of sums does not matter."""
    torch.manual_seed(0)
    model = build("sasrec", num_items=ITEMS, **SIZES).double()
    engine = Engine(model, TrainTask(model), CONFIG, "32-true", processes)
    for _ in engine.steps(share(processes.rank, processes.world_size, empty_last)):
        pass
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def twin_weights() -> dict[str, torch.Tensor]:
    """The same by the padded twin and plain torch."""
    torch.manual_seed(0)
    start = build("sasrec", num_items=ITEMS, **SIZES).double()
    twin = PaddedSASRec(ITEMS, **{**SIZES, "embedding_dim": 8}).double()
    names = twin_names(SIZES["num_layers"])
    with torch.no_grad():
        for name, twin_name in names.items():
            twin.get_parameter(twin_name).copy_(start.get_parameter(name))
    decayed = [p for p in twin.parameters() if p.dim() > 1]
    others = [p for p in twin.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
    for batch in share(0, 1):
        lengths = batch.features.lengths().tolist()
        items, filled = left_padded(batch.features.values(), lengths, LENGTH)
        wanted, _ = left_padded(batch.targets, lengths, LENGTH)
        optimizer.zero_grad()
        twin.loss(items, filled, wanted).backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.05)
        optimizer.step()
        schedule.step()
    return {name: twin.get_parameter(twin_name).detach() for name, twin_name in names.items()}


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def parallel(root: Path, name: str, work: Callable[[Processes], Any]) -> None:
    """Do a piece of work in two processes of one group, which the caller makes, as torchrun's users may."""
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                dist.init_process_group("gloo", store=dist.FileStore(str(root / f"{name}.store"), 2), rank=rank, world_size=2)
                with process_group(torch.device("cpu")) as processes:
                    work(processes)
                assert dist.is_initialized()
                dist.destroy_process_group()
                code = 0
            finally:
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    for child in children:
        assert os.waitpid(child, 0)[1] == 0, f"{name}: a process failed"


def alone(work: Callable[[Processes], Any]) -> None:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with process_group(torch.device("cpu")) as processes:
                work(processes)
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


def main() -> None:
    root = Path(sys.argv[1])
    torch.set_num_threads(1)

    def keep(name: str, empty_last: bool = False) -> Callable[[Processes], None]:
        def work(processes: Processes) -> None:
            torch.save(engine_weights(processes, empty_last), root / f"{name}.{processes.rank}")

        return work

    alone(keep("one"))
    alone(lambda _: torch.save(twin_weights(), root / "twin.0"))
    parallel(root, "two", keep("two"))
    parallel(root, "empty", keep("empty", empty_last=True))
    load = lambda name: torch.load(root / name, weights_only=True)  # noqa: E731
    result: dict[str, Any] = {
        name: distance(load("one.0"), load(name)) for name in ("twin.0", "two.0", "two.1", "empty.0", "empty.1")
    }

    # A whole run: the directory is written once, metrics are of all users, and an interrupted run goes on.
    dataset = tiny_dataset()
    options = {"dropout": 0.0, "batch_size": 4}

    def whole(directory: Path, **more: Any) -> Callable[[Processes], None]:
        return lambda _: run(directory, dataset, resume=True, **options, **more) and None

    parallel(root, "whole", whole(root / "whole"))
    parallel(root, "half", whole(root / "half", max_epochs=1))
    parallel(root, "half again", whole(root / "half"))
    alone(lambda _: run(root / "single", dataset, dropout=0.0, batch_size=8) and None)
    whole_run, single = outcome(root / "whole"), outcome(root / "single")
    result["resumed"] = whole_run == outcome(root / "half")
    result["losses"] = [[row["loss"] for row in one["history"]] for one in (whole_run, single)]
    result["steps"] = [one["history"][-1]["step"] for one in (whole_run, single)]
    loaders = [
        BatchLoader(split_leave_one_out(dataset).train, batch_size=4, max_seq_len=12, shuffle=True, seed=0, rank=r, world_size=2)
        for r in range(2)
    ]
    result["expected_steps"] = loaders[0].num_batches(0) * tiny_config("x").max_epochs
    print(json.dumps(result))


if __name__ == "__main__":
    main()
