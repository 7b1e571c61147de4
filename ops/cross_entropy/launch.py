"""How the kernels' launches are cut: parts of a walk, tiles, and matrices in the shape that the kernels load fast."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from jagged.ops.cross_entropy.tiles import Tile, tile_of


class Rows(NamedTuple):
    """What backward's kernels are given of rows, by `prepare_rows`; nothing of it depends on another load.

    `hidden` `[N, D]` has zeros in ignored rows; `target` is int32, -1 where there is no such item; `shift` is that of
    `exponentials`, infinite in ignored rows; gradients are by logits before the temperature, and divided by `inverse_scale`
    where there is one.
    """

    hidden: Tensor
    target: Tensor
    shift: Tensor
    grad_softmax: Tensor
    grad_target: Tensor
    grad_smoothed: Tensor | None
    inverse_scale: Tensor | None


class Items(NamedTuple):
    """What backward is given of items: `weight` `[V, D]` as `aligned` makes it, vectors `[V]`, and how logits are shaped."""

    weight: Tensor
    bias: Tensor | None
    scale: Tensor | None
    smoothing: Tensor | None
    temperature: float
    softcap: float | None


class Filter(NamedTuple):
    """Which tiles are left out: `thresholds` `[2]` float32 of hidden's and of weight's gradient, `order` `[V]` int32 of items."""

    thresholds: Tensor
    order: Tensor


def split(length: int, block: int, blocks: int, programs: int, device: torch.device) -> tuple[int, int]:
    """Return how many parts of a walk over `length` give each multiprocessor `programs`, and the length of a part.

    `blocks` programs make the walk together, in steps of `block`.
    """
    steps = max(1, triton.cdiv(length, block))
    wanted = triton.cdiv(programs * device_of(device)[0], max(1, blocks))
    steps_per_part = triton.cdiv(steps, min(steps, wanted))
    return triton.cdiv(steps, steps_per_part), steps_per_part * block


@functools.cache
def device_of(device: torch.device) -> tuple[int, int]:
    """Return the number of multiprocessors and the major compute capability."""
    if device.type != "cuda":
        # The interpreter has neither; two multiprocessors make it split what a GPU splits.
        return 2, 9
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.major


def tile_for(kernel: str, hidden: Tensor) -> Tile:
    """Return the tile of a kernel for hidden states."""
    return tile_of(kernel, hidden.shape[1], hidden.dtype, device_of(hidden.device)[1])


def aligned(matrix: Tensor) -> Tensor:
    """Return the matrix with adjacent columns, rows starting every multiple of 16 elements, zeros up to such a width.

    Loads are wide then; with odd rows each element is fetched by itself, from addresses that no longer fit into the registers.
    """
    width = max(16, triton.cdiv(matrix.shape[1], 16) * 16)
    if width != matrix.shape[1]:
        return torch.nn.functional.pad(matrix, (0, width - matrix.shape[1]))
    return matrix if matrix.stride(1) == 1 and matrix.stride(0) % 16 == 0 else matrix.contiguous()


def constants(tile: Tile, hidden: Tensor) -> dict[str, Any]:
    """Return the compile-time arguments that every kernel has."""
    return {
        "BLOCK_N": tile.rows,
        "BLOCK_V": tile.items,
        "BLOCK_K": tile.step,
        "WIDTH": hidden.shape[1],
        "PRECISION": "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32",
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
