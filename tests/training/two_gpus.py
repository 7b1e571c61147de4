"""Two GPUs over NCCL; `test_two_gpus.py` starts it: `torchrun --nproc-per-node 2 -m tests.training.two_gpus DIRECTORY WHAT`.

`WHAT` is `trains`, or `waits`: a run in whose first step one process enters a collective that the other never does.
"""

from __future__ import annotations

import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from jagged.data import BatchLoader, split_leave_one_out, synthetic_sessions
from jagged.training import Callback, Progress
from jagged.training.checkpoint import save_checkpoint
from jagged.training.engine import Engine
from jagged.training.processes import Processes, process_group, resolve_device
from tests.training.clicks import train
from tests.training.support import run, tiny_dataset
from tests.training.two_processes import CASES, LENGTH, Case, rows_held, started, take_steps

# A communicator is made in the first step, and a context, which nothing tells from standing still.
HANG_SECONDS = 20.0
RUN = {"device": "cuda", "embedding_dim": 16, "dropout": 0.0}


def gradient(engine: Engine) -> dict[str, torch.Tensor]:
    """What is linear in the (clipped) gradient of the first step: AdamW's first moment after it; in the first process whole."""
    state = engine.state_tensors()
    return {name: value.cpu().double() for name, value in state.items() if name.startswith("optimizer.exp_avg.")}


def what_waits(processes: Processes) -> str:
    """What in a step waits for the GPU; nothing where all is well."""
    dataset = synthetic_sessions(0, num_users=400)[0]
    part = split_leave_one_out(dataset).train
    options = {"seed": 0, "pin_memory": True, "rank": processes.rank, "world_size": processes.world_size}
    loader = BatchLoader(part, batch_size=16, max_seq_len=LENGTH, shuffle=True, **options)
    engine = started(Case(dataset.num_items), processes, torch.float32)
    # Kernels are compiled and loaded, and communicators made, in the first epoch.
    for _ in engine.steps(iter(loader)):
        pass
    loader.set_position(1, 0)
    batches = list(loader)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in engine.steps(iter(batches)):
            pass
    except RuntimeError:
        return traceback.format_exc()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return ""


class Waits(Callback):
    """Waits in the second process for the first, in the first step."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def on_step(self, progress: Progress) -> None:
        if progress.state.step > 1:
            return
        group = dist.new_group([0, 1])
        if dist.get_rank() == 1:
            (self.directory / "waits.at").write_text(str(time.time()))
            dist.all_reduce(x := torch.ones(1, device="cuda"), group=group)
            x.item()


def main() -> None:
    root = Path(sys.argv[1])
    if sys.argv[2] == "waits":
        train(root / "waits", Waits(root), device="cuda", hang_seconds=HANG_SECONDS)
        return
    with process_group(resolve_device("cuda")) as processes:
        for name in ("plain", "smoothed"):
            case = CASES[name]
            engine = started(case, processes, torch.float32)
            take_steps(engine, case, 0, 1)
            first = gradient(engine)
            assert set(rows_held(engine).values()) == {16 - processes.rank}
            take_steps(engine, case, 1, empty_last=True)
            assert engine.is_finite()
            tensors = engine.state_tensors()
            if processes.is_first:
                torch.save(first, root / name)
                save_checkpoint(root / "checkpoints", name, tensors, {})
        waits = what_waits(processes)
        if processes.is_first:
            (root / "waits").write_text(waits)
        run(root / "full", tiny_dataset(), batch_size=4, precision="32-true", **RUN)
        run(root / "mixed", tiny_dataset(), batch_size=4, **RUN)


if __name__ == "__main__":
    main()
