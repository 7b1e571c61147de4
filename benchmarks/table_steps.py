"""A training step of SASRec over a large item table, by the optimizer of that table.

    python -m benchmarks.table_steps
    python -m benchmarks.table_steps --only "1,023 a row"

The trainer's engine, with graphs of forward and backward and mixed precision, on batches of equally long histories of random
items: lookups, two blocks, a loss over drawn items or over all, clipping by the global norm, and the update of everything.
`adamw` is the dense optimizer, whose table has a gradient of its own size; the others change the rows that a step names. A loss
over all items names every row: by its whole gradient, or by slices of it. The norm makes each slice, and the update again those
beyond seven eighths of the bytes that are given for the gradient.

Times are of steps one after the other, batches copied from the host with them; medians over rounds of ten. Memory is the most
that is allocated in a step, weights and states with it, and all that the graphs keep. `launched` is the same kernel by kernel.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from benchmarks.common import environment, other_parts, peak_bytes, save
from jagged.config import TrainerConfig
from jagged.data import SequenceBatch
from jagged.data.batches import keyed
from jagged.models import NextItemTask, SASRec
from jagged.modules import CutCrossEntropyHead, SampledCrossEntropyHead, UniformSampler
from jagged.training.engine import Engine
from jagged.training.processes import Processes, process_group

ITEMS, WIDTH = 1_660_000, 256
OPTIMIZERS = ("rowwise-adagrad", "rowwise-adamw", "sparse-adamw", "adamw")
ROUNDS, STEPS, WARM = 5, 10, 5


class Case(NamedTuple):
    """Users of a batch, items of each, and negatives of a row or of the batch; None for a loss over all items.

    A loss over all items hands over its gradient whole, or in slices of so many bytes.
    """

    users: int
    length: int
    negatives: int | None
    rows_per_draw: int | None = 1
    table_gradient_bytes: int | None = None


CASES = {
    "256 x 172, 1,023 a row": Case(256, 172, 1023),
    "256 x 172, 8,192 of the batch": Case(256, 172, 8192, None),
    "256 x 172, all items": Case(256, 172, None),
    "256 x 172, all items, 256 MiB": Case(256, 172, None, table_gradient_bytes=256 * 2**20),
    "256 x 172, all items, 1,536 MiB": Case(256, 172, None, table_gradient_bytes=1536 * 2**20),
    "16 x 128, 1,023 a row": Case(16, 128, 1023),
}


def batches(case: Case, count: int) -> list[SequenceBatch]:
    """Histories of random items, in page-locked memory."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.full((case.users,), case.length).pin_memory()
    offsets = (torch.arange(case.users + 1) * case.length).pin_memory()
    found = []
    for _ in range(count):
        items = torch.randint(ITEMS, (case.users, case.length + 1), generator=generator)
        features = keyed(items[:, :-1].flatten().pin_memory(), lengths, offsets)
        found.append(SequenceBatch(features, items[:, 1:].flatten().pin_memory(), lengths, num_items=ITEMS))
    return found


def engine_of(case: Case, optimizer: str, processes: Processes, graphs: bool | None = None) -> Engine:
    """A new model under the trainer's engine; with graphs where nothing is said."""
    torch.manual_seed(0)
    model = SASRec(ITEMS, embedding_dim=WIDTH, num_heads=2, num_layers=2, max_seq_len=case.length, dropout=0.1, device="cuda")
    head: Any = CutCrossEntropyHead()
    if case.negatives is not None:
        sampler = UniformSampler(ITEMS, case.negatives, rows_per_draw=case.rows_per_draw, device="cuda")
        head = SampledCrossEntropyHead(sampler)
    return Engine(NextItemTask(model, head=head), config_of(case, optimizer, graphs), "bf16-mixed", processes)


def config_of(case: Case, optimizer: str, graphs: bool | None = None) -> TrainerConfig:
    """Options of the engine; an option that has no effect beside the optimizer cannot be given, not even as None."""
    sliced = {} if case.table_gradient_bytes is None else {"table_gradient_bytes": case.table_gradient_bytes}
    return TrainerConfig(table_optimizer=optimizer, device="cuda", cuda_graphs=graphs, **sliced)


def fitting(case: Case, optimizers: Iterable[str]) -> list[str]:
    """The optimizers that can take a case: a dense one needs the whole gradient."""
    return [of for of in optimizers if of != "adamw" or case.table_gradient_bytes is None]


def measure(case: Case, optimizer: str, processes: Processes, graphs: bool | None = None) -> dict[str, Any]:
    """Milliseconds of a step, and bytes."""
    engine, of = engine_of(case, optimizer, processes, graphs), batches(case, STEPS)

    def steps(count: int) -> list[torch.Tensor]:
        return [trained.loss for trained in engine.steps(iter((of * count)[:count]))]

    first = float(steps(WARM)[0])
    # Of an engine before; some of its cycles are found by a second search alone.
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    times, losses = [], []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        losses += steps(STEPS)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) / STEPS * 1e3)
    return {
        "ms": statistics.median(times),
        "fastest_ms": min(times),
        "slowest_ms": max(times),
        "peak_bytes": peak_bytes(),
        "first_loss": first,
        "last_loss": float(losses[-1]),
    }


def attempted(case: Case, optimizer: str, processes: Processes, graphs: bool | None = None) -> dict[str, Any]:
    """What was measured, or why nothing was."""
    try:
        return measure(case, optimizer, processes, graphs)
    except torch.OutOfMemoryError as error:
        return {"failed": str(error).splitlines()[0]}
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def main() -> None:
    """Measure all cases, or some, and save what came out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[""], help="parts of cases' names")
    parser.add_argument("--optimizers", nargs="+", default=list(OPTIMIZERS), choices=OPTIMIZERS)
    options = parser.parse_args()
    facts = environment()
    results: dict[str, Any] = {"environment": facts, "steps": other_parts("table_steps", facts).get("steps", {})}
    with process_group(torch.device("cuda")) as processes:
        for name, case in CASES.items():
            if not any(part in name for part in options.only):
                continue
            row = results["steps"].setdefault(name, {**case._asdict(), "items": ITEMS, "width": WIDTH})
            for optimizer in fitting(case, options.optimizers):
                row[optimizer] = attempted(case, optimizer, processes)
                row[optimizer]["launched"] = attempted(case, optimizer, processes, False)
                print(name, optimizer, row[optimizer], flush=True)
                save("table_steps", results)


if __name__ == "__main__":
    main()
