"""What the loader of a table's requests costs beside a training step on a GPU.

    python -m benchmarks.ranking_loader                # 100 features; about three minutes
    python -m benchmarks.ranking_loader --workers 0 4 8 --batch 2048

A made-up table: requests of one candidate to 16, 60 columns of ids and 30 numbers, of the request or of the candidate, 8
lists of tags, and a history of up to 50 events. `RankingModel` trains on it with AdamW in mixed precision, once on batches
that stand on the GPU already, and once on what the loader gives, pinned and copied while the step before runs. The loader's
share is what the second takes longer, in percent of the first: the median of several rounds, which come in turns.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from benchmarks.common import environment, save, spread
from jagged.data import Column, Dataset, Kind, Schema
from jagged.data.table_splits import Split
from jagged.models import RankingModel

IDS, NUMBERS, LISTS = 60, 30, 8
MAX_HISTORY = 50


def made(requests: int, seed: int = 0) -> Split:
    """A table of so many requests, split by time."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 17, size=requests)
    rows, owner = int(counts.sum()), np.repeat(np.arange(requests), counts)
    users = rng.zipf(1.3, size=requests) % 20_000
    columns: dict[str, Any] = {
        "request": owner,
        "user": users[owner],
        "item": rng.zipf(1.2, size=rows) % 50_000,
        "time": 1_700_000_000 + 60 * owner,
        "click": rng.integers(2, size=rows),
    }
    schema = [
        Column("request", Kind.REQUEST),
        Column("user", Kind.USER),
        Column("item", Kind.CANDIDATE),
        Column("time", Kind.TIME),
        Column("click", Kind.LABEL),
    ]
    for number in range(IDS):
        of, size = ("request", "candidate")[number % 2], int(10 ** rng.uniform(1, 5))
        values = rng.integers(size, size=requests)[owner] if of == "request" else rng.integers(size, size=rows)
        columns[f"id{number}"] = values
        schema.append(Column(f"id{number}", Kind.ID, of=of))
    for number in range(NUMBERS):
        of = ("request", "candidate")[number % 2]
        columns[f"number{number}"] = rng.normal(size=requests)[owner] if of == "request" else rng.normal(size=rows)
        schema.append(Column(f"number{number}", Kind.NUMBER, of=of))
    for number in range(LISTS):
        lengths = rng.integers(0, 9, size=requests)
        ends = np.append(0, np.cumsum(lengths))
        lists = pa.LargeListArray.from_arrays(pa.array(ends), pa.array(rng.integers(5_000, size=int(ends[-1]))))
        columns[f"tags{number}"] = lists.take(pa.array(owner))
        schema.append(Column(f"tags{number}", Kind.IDS, of="request"))
    table = pa.table(columns)
    # Events show their item alone: the other columns of ids would make a hundred keys of the history, too.
    events = table.select(["user", "item", "time"])
    dataset = Dataset.from_table(table, Schema(tuple(schema)), events=events, duplicates="keep", progress=False)
    split: Split = dataset.split(by="time", valid=0.05, test=0.05, progress=False)
    return split


def ahead(batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
    """The batches on the device, each copied on a stream of its own while the step before runs."""
    stream = torch.cuda.Stream()

    def copied(batch: Any) -> Any:
        with torch.cuda.stream(stream):
            return batch.to(device, non_blocking=True)

    source = iter(batches)
    waiting = next(source, None)
    waiting = None if waiting is None else copied(waiting)
    while waiting is not None:
        torch.cuda.current_stream().wait_stream(stream)
        batch = waiting
        batch.record_stream(torch.cuda.current_stream())
        following = next(source, None)
        waiting = None if following is None else copied(following)
        yield batch


class Trainee:
    """A model with its optimizer."""

    def __init__(self, split: Split, device: torch.device, embedding_dim: int) -> None:
        torch.manual_seed(0)
        self.model = RankingModel.of(split, embedding_dim=embedding_dim, layer_sizes=(512, 256, 128)).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)

    def seconds(self, batches: Iterable[Any]) -> tuple[float, int]:
        """How long training on the batches takes, and how many there are."""
        torch.cuda.synchronize()
        began, steps = time.perf_counter(), 0
        for batch in batches:
            self.optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                loss, _ = self.model(batch)
            loss.backward()
            self.optimizer.step()
            steps += 1
        torch.cuda.synchronize()
        return time.perf_counter() - began, steps


def measure(split: Split, batch: int, workers: int, steps: int, rounds: int, embedding_dim: int) -> dict[str, Any]:
    """Milliseconds a step on batches that are there, and on the loader's; the loader's share in percent."""
    device = torch.device("cuda")
    trainee = Trainee(split, device, embedding_dim)
    loader = split.train.loader(
        batch_size=batch, shuffle=True, max_history=MAX_HISTORY, num_workers=workers, pin_memory=True, progress=False
    )
    found: dict[str, list[float]] = {"there": [], "loaded": [], "share": [], "waited": []}
    candidates = 0
    for epoch in range(rounds + 1):
        loader.set_position(epoch, 0)
        # An epoch's batches, and with them all sizes, are the same both times; the first ones come when the workers are awake.
        kept = [one.to(device) for one in itertools.islice(loader, 3 + steps)][3:]
        candidates = sum(one.rows.numel() for one in kept)
        # Kernels are compiled, and memory is found, for sizes that come for the first time.
        trainee.seconds(kept)
        there, count = trainee.seconds(kept)
        del kept
        loader.set_position(epoch, 0)
        source = iter(ahead(loader, device))
        for _ in range(3):
            next(source)
        waited = 0.0

        def awaited(source: Iterator[Any] = source, count: int = count) -> Iterator[Any]:
            nonlocal waited
            for _ in range(count):
                began = time.perf_counter()
                one = next(source)
                waited += time.perf_counter() - began
                yield one

        loaded, count = trainee.seconds(awaited())
        # The first round fills the caches of memory.
        if epoch:
            found["there"].append(1e3 * there / count)
            found["loaded"].append(1e3 * loaded / count)
            found["share"].append(100 * (loaded / there - 1))
            found["waited"].append(1e3 * waited / count)
    loader.close()
    return {
        "batch": batch,
        "workers": workers,
        "candidates": candidates // steps,
        "step_ms": spread(found["there"]),
        "loaded_step_ms": spread(found["loaded"]),
        "waited_ms": spread(found["waited"]),
        "share_percent": spread(found["share"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=120_000, help="of the table")
    parser.add_argument("--batch", type=int, nargs="+", default=[1024, 4096, 8192], help="requests of a step")
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 8], help="processes that build batches")
    parser.add_argument("--steps", type=int, default=20, help="of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--embedding-dim", type=int, default=32)
    arguments = parser.parse_args()
    split = made(arguments.requests)
    cases = {}
    for batch in arguments.batch:
        for workers in arguments.workers:
            steps = min(arguments.steps, len(split.train) // batch - 4)
            case = measure(split, batch, workers, steps, arguments.rounds, arguments.embedding_dim)
            cases[f"{batch:,} requests, {workers} workers"] = case
            told = ", ".join(f"{name} {statistics.median(of.values()):.2f}" for name, of in case.items() if isinstance(of, dict))
            print(f"{batch:,} requests, {case['candidates']:,} candidates, {workers} workers: {told}", flush=True)
    facts = environment()
    print(save("ranking_loader", {"environment": facts, "features": IDS + NUMBERS + LISTS + 2, "loader": cases}))


if __name__ == "__main__":
    main()
