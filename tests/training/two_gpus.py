"""Two GPUs over NCCL; `test_two_gpus.py` starts it: `torchrun --nproc-per-node 2 -m tests.training.two_gpus DIRECTORY`."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

import torch

from jagged.data import BatchLoader, split_leave_one_out, synthetic_sessions
from jagged.training.checkpoint import save_checkpoint
from jagged.training.engine import Engine
from jagged.training.processes import Processes, process_group, resolve_device
from tests.training.support import run, tiny_dataset
from tests.training.two_processes import CASES, LENGTH, Case, rows_held, started, take_steps

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


def main() -> None:
    root = Path(sys.argv[1])
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
