"""What runs under compute-sanitizer: every op family, or those that are named, then bugs that the tool must report.

    python -m tests.ops.sanitized TOOL [FAMILY ...]

The bugs come last in the same process, so a run that reports them, and nothing before, was watched all the time. None of them
harms: accesses out of bounds stay inside what the driver maps, and all threads arrive at some barrier.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch.utils._python_dispatch import TorchDispatchMode

from jagged.ops._shared import linear
from jagged.ops.cross_entropy.triton import chunked
from tests.ops.families import long_step, small_steps, update_steps

FINISHED = "every family ran"
THREADS = 64


class CopiedProducts(TorchDispatchMode):
    """Copies what matmul returns: initcheck held rows in the middle of a bfloat16 product for never written."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.clone() if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default) else result


def written_again(product: Callable[..., None]) -> Callable[..., None]:
    """Return the same product into a tensor, written once more by a copy; inside an operator no mode sees it."""

    def add_product(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, *, beta: int) -> None:
        product(left, right, out, beta=beta)
        out.copy_(out.clone())

    return add_product


def copied(layer: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same layer, of rows or of groups, its product written once more by a copy.

    Initcheck reported reads of what cuBLAS had written, in batched products 64 bytes of a row each, and of what the kernel of
    groups stores by descriptors, 256 pieces of 16 bytes in different rows at each launch: tests compare all of these numbers.
    """

    def again(x: Any, options: Any) -> Any:
        out = layer(x, options)
        return out._replace(output=out.output.clone())

    return again


# The package's name is its function's, too.
groups = importlib.import_module("jagged.ops.grouped_linear.launch")
PRODUCT, LAYER, LAYER_OF_GROUPS = chunked._add_product, linear.layer, groups.grouped_linear


@triton.jit
def planted_read_kernel(source, target, BLOCK: tl.constexpr):
    """Reads one element past the end."""
    thread = tl.arange(0, BLOCK)
    tl.store(target + thread, tl.load(source + thread + 1))


@triton.jit
def planted_write_kernel(target, BLOCK: tl.constexpr):
    """Writes one element past the end."""
    thread = tl.arange(0, BLOCK)
    tl.store(target + thread + 1, thread)


@triton.jit
def planted_race_kernel(target, BLOCK: tl.constexpr):
    """Each thread writes a word of shared memory and reads one of the other warp, without a barrier between."""
    thread = tl.arange(0, BLOCK)
    read = tl.inline_asm_elementwise(
        """
        {
            .shared .align 4 .b32 words[64];
            .reg .b32 base, mine, theirs;
            mov.u32 base, words;
            shl.b32 mine, $1, 2;
            sub.u32 theirs, 252, mine;
            add.u32 mine, base, mine;
            add.u32 theirs, base, theirs;
            st.shared.b32 [mine], $1;
            ld.shared.b32 $0, [theirs];
        }
        """,
        "=r,r",
        [thread],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    tl.store(target + thread, read)


@triton.jit
def planted_barrier_kernel(target, BLOCK: tl.constexpr):
    """The two warps wait at different barriers."""
    thread = tl.arange(0, BLOCK)
    same = tl.inline_asm_elementwise(
        """
        {
            .reg .pred first_warp;
            .reg .b32 thread;
            mov.u32 thread, %tid.x;
            setp.lt.u32 first_warp, thread, 32;
            @first_warp bar.sync 0;
            @!first_warp bar.sync 0;
            mov.b32 $0, $1;
        }
        """,
        "=r,r",
        [thread],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    tl.store(target + thread, same)


@triton.jit
def planted_uninitialised_kernel(source, target, BLOCK: tl.constexpr):
    """Reads what nobody has written."""
    thread = tl.arange(0, BLOCK)
    tl.store(target + thread, tl.load(source + thread))


def _memory() -> torch.Tensor:
    return torch.empty(THREADS, dtype=torch.int32, device="cuda")


def _run(kernel: Callable[..., object], *arguments: torch.Tensor) -> None:
    kernel[(1,)](*arguments, BLOCK=THREADS, num_warps=THREADS // 32)  # type: ignore[index]


PLANTED: dict[str, dict[str, Callable[[], None]]] = {
    "memcheck": {
        "planted_read_kernel": lambda: _run(planted_read_kernel, _memory().zero_(), _memory()),
        "planted_write_kernel": lambda: _run(planted_write_kernel, _memory()),
    },
    "racecheck": {"planted_race_kernel": lambda: _run(planted_race_kernel, _memory())},
    "synccheck": {"planted_barrier_kernel": lambda: _run(planted_barrier_kernel, _memory())},
    "initcheck": {"planted_uninitialised_kernel": lambda: _run(planted_uninitialised_kernel, _memory(), _memory())},
}


def main(tool: str, *families: str) -> None:
    chunked._add_product = written_again(PRODUCT)
    linear.layer = copied(LAYER)
    groups.grouped_linear = copied(LAYER_OF_GROUPS)  # type: ignore[attr-defined]
    updates = [] if families and "group_sparse" not in families else update_steps()
    # Racecheck takes rows that TMA writes, and barriers in shared memory announce, for races.
    long = [long_step()] if tool == "memcheck" else []
    for step in itertools.chain(small_steps(*families), updates, long):
        with CopiedProducts():
            step.run()
        # An error is reported at the family that made it, and one step's memory is freed before the next one's.
        torch.cuda.synchronize()
    print(FINISHED, flush=True)
    for plant in PLANTED[tool].values():
        plant()
        torch.cuda.synchronize()


if __name__ == "__main__":
    main(*sys.argv[1:])
