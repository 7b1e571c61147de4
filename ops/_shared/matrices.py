"""Launches of kernels that multiply matrices: their layout, how a walk over one is split, and the precision of products."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jagged.ops._shared.sizes import cdiv


class Gpu(NamedTuple):
    """What launches ask of a device."""

    multiprocessors: int
    capability: int
    # Of shared memory: the most that a program can have, and what a multiprocessor has. 0 where it cannot be addressed.
    shared_bytes: tuple[int, int]


@functools.cache
def gpu(device: torch.device) -> Gpu:
    """Return the number of multiprocessors, the major compute capability, and shared memory."""
    if device.type != "cuda":
        # The interpreter has neither; two multiprocessors make it split what a GPU splits.
        return Gpu(2, 9, (227 * 1024, 228 * 1024))
    # PyTorch's own types leave some of them out.
    properties: Any = torch.cuda.get_device_properties(device)
    shared_bytes = 0, 0
    if torch.version.hip is None:
        shared_bytes = properties.shared_memory_per_block_optin, properties.shared_memory_per_multiprocessor
    return Gpu(properties.multi_processor_count, properties.major, shared_bytes)


def split(length: int, block: int, blocks: int, programs: int, device: torch.device) -> tuple[int, int]:
    """Return how many parts of a walk over `length` give each multiprocessor `programs`, and the length of a part.

    `blocks` programs make the walk together, in steps of `block`.
    """
    steps = max(1, cdiv(length, block))
    wanted = cdiv(programs * gpu(device).multiprocessors, max(1, blocks))
    steps_per_part = cdiv(steps, min(steps, wanted))
    return cdiv(steps, steps_per_part), steps_per_part * block


@functools.lru_cache(maxsize=4096)
def balanced_parts(steps: int, blocks: int, at_once: int, overhead: int, most: int, least: int = 1) -> tuple[int, int]:
    """Return in how many parts, from `least` to `most`, walks of `steps` end first, and the steps of a part.

    `blocks` programs make the walk, `at_once` of all their parts run together, and a part costs `overhead` beside its steps, in
    steps. For programs that come in few rounds, of which the last may leave much of the GPU idle.
    """
    steps, blocks = max(1, steps), max(1, blocks)
    lengths = dict.fromkeys(cdiv(steps, parts) for parts in range(least, max(least, min(steps, most)) + 1))

    def end(length: int) -> int:
        return cdiv(blocks * cdiv(steps, length), at_once) * (length + overhead)

    length = min(lengths, key=end)
    return cdiv(steps, length), length


def aligned(matrix: Tensor) -> Tensor:
    """Return the matrix with adjacent columns, rows starting every multiple of 16 elements, zeros up to such a width.

    Loads are wide then; with odd rows each element is fetched by itself, from addresses that no longer fit into the registers.
    """
    width = matrix.shape[1]
    if width % 16 or not width:
        return torch.nn.functional.pad(matrix, (0, max(16, cdiv(width, 16) * 16) - width))
    row_stride, column_stride = matrix.stride()
    return matrix if column_stride == 1 and row_stride % 16 == 0 else matrix.contiguous()


def inverse_scale_of(valid: Tensor, *grads: Tensor | None) -> Tensor:
    """Return what float16 gradients of logits are divided by to use that dtype's range: they underflow for any large batch.

    `grads` are by numbers of rows; those of rows that are not `valid` do not count.
    """
    bound = functools.reduce(torch.add, [grad.abs() for grad in grads if grad is not None])
    return torch.where(valid, bound, 0).amax().clamp_(min=1e-30) / 2**14


def products_of(dtype: torch.dtype) -> str:
    """Return how Triton multiplies matrices of a dtype; only float32 has a choice, and to ask for it costs a microsecond."""
    return float32_products() if dtype == torch.float32 else "ieee"


def float32_products() -> str:
    """Return how Triton multiplies float32 matrices: as PyTorch's own products on a GPU do.

    `torch.set_float32_matmul_precision` sets what is read here, and so does `torch.backends.cuda.matmul.fp32_precision`.
    """
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"  # type: ignore[attr-defined]
