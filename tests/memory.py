"""Whether memory stays flat while steps repeat."""

from __future__ import annotations

import ctypes
import gc
import os
import time
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.places import Place

# What a process of our own size gains and loses by itself: arenas of malloc, caches that fill late.
NOISE_BYTES = 2 * 2**20
# Tenths of a second.
PATIENCE = 20


class PeakMemory(TorchDispatchMode):
    """Follows the storages that operators put out, but for those of tensors that were there: the most bytes alive at once."""

    def __init__(self, there: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.there = {tensor.untyped_storage().data_ptr() for tensor in there}
        self.alive: list[weakref.ref[torch.Tensor]] = []
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.alive += [weakref.ref(leaf) for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.alive = [reference for reference in self.alive if reference() is not None]
        storages = [tensor.untyped_storage() for reference in self.alive if (tensor := reference()) is not None]
        sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
        self.peak = max(self.peak, sum(size for place, size in sizes.items() if place not in self.there))
        return result


def peak_resident_bytes() -> int:
    """Bytes: the most memory that this process's program has held in RAM.

    Not `ru_maxrss` of getrusage: that outlives `exec`, so a process that was started by a larger one reports the larger one's.
    """
    status = Path("/proc/self/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))


class Flat:
    """Runs steps whose shapes come back every `cycle` steps, and reads memory ten times, the first time after two tenths of them.

    On a GPU, allocated bytes must not grow at all: one block kept in all the steps (512 bytes) is seen. Reserved bytes come back
    to no more than the first half of the readings had at most: where small tensors lie depends on when the backward's own thread
    let go, so a segment comes and goes. On the CPU the memory that the process holds in RAM may grow by 2 MiB in all: 1.3 KiB a
    step over 2,000 steps are seen, 13 KiB over 200.
    """

    def __init__(self, place: Place) -> None:
        self.on_gpu = place.device.type == "cuda"
        self.allowed = 0 if self.on_gpu else NOISE_BYTES

    def check(self, run: Callable[[int], object], *, steps: int, cycle: int) -> None:
        """Run the steps; `run` gets each one's number. `steps` is a multiple of ten cycles."""
        assert steps % (10 * cycle) == 0
        # What other tests have left is not walked at every reading, which took most of the time.
        gc.collect()
        gc.freeze()
        first, reserved = None, []
        for number in range(1, steps + 1):
            run(number)
            if number % (steps // 10) or number < steps // 5:
                continue
            now = self._held()
            first = now if first is None else first
            # The backward's own thread lets go of its tensors a moment after the caller has its gradients. A leak stays.
            for _ in range(PATIENCE):
                if now - first <= self.allowed:
                    break
                time.sleep(0.1)
                now = self._held()
            grown = f"grew by {now - first:,} bytes up to step {number} of {steps}"
            assert now - first <= self.allowed, f"allocated or resident memory {grown}"
            if self.on_gpu:
                reserved.append(torch.cuda.memory_reserved())
        before, after = reserved[: len(reserved) // 2], reserved[len(reserved) // 2 :]
        assert min(after, default=0) <= max(before, default=0), f"reserved memory grew: {reserved} bytes"

    def _held(self) -> int:
        gc.collect()
        if self.on_gpu:
            torch.cuda.synchronize()
            # Segments that one step took because the backward's thread let go a moment later than in the others.
            torch.cuda.empty_cache()
            return torch.cuda.memory_allocated()
        # What is free goes back to the operating system, where the C library can.
        if hasattr(trim := ctypes.CDLL(None), "malloc_trim"):
            trim.malloc_trim(0)
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
