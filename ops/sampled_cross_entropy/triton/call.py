"""What the launches of all kernels are given: one call's tensors and numbers, tiles as constants, walks cut into parts."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from jagged.ops._shared.matrices import aligned, balanced_parts, float32_products, gpu
from jagged.ops._shared.sizes import cdiv
from jagged.ops.sampled_cross_entropy.draws import feistel_bits, log_uniform_scale
from jagged.ops.sampled_cross_entropy.spec import Inputs, Options
from jagged.ops.sampled_cross_entropy.triton.configurations import SHARED_ROWS, BlockConfiguration

# Rounds of programs that a walk is cut into at most.
ROUNDS = 4
_PARAMETERS = {"log_uniform": log_uniform_scale, "permuted": feistel_bits}


class Call(NamedTuple):
    """A call as kernels read it: elements side by side, matrices `width` wide, and the numbers that all kernels have in common.

    `parameter` is the number of the catalogue that a kind of draws needs; `offset` what the logarithms of all negatives' expected
    counts have in common.
    """

    x: Inputs
    o: Options
    num_rows: int
    num_items: int
    num_excluded: int
    width: int
    hidden_stride: int
    weight_stride: int
    parameter: int
    offset: float
    #: Whether so many rows share a draw that their logits are products of matrices.
    shares: bool


def call_of(x: Inputs, o: Options, *, aligns_weight: bool = True) -> Call:
    """Return a call as kernels read it; its weights may be left to whoever reads a part of them."""
    hidden, weight = aligned(x.hidden), aligned(x.weight) if aligns_weight else x.weight
    num_rows, width = hidden.shape
    num_items = weight.shape[0]
    offset = math.log(o.num_negatives)
    if o.kind == "log_uniform":
        offset -= math.log(math.log1p(num_items))
    elif x.log_q is None:
        offset -= math.log(num_items)
    return Call(
        Inputs(hidden, weight, *[None if tensor is None else tensor.contiguous() for tensor in x[2:]]),  # type: ignore[arg-type]
        o,
        num_rows,
        num_items,
        0 if x.excluded is None else x.excluded.shape[0],
        width,
        hidden.stride(0),
        weight.stride(0),
        _PARAMETERS[o.kind](num_items) if o.kind in _PARAMETERS else 0,
        offset,
        o.rows_per_draw >= SHARED_ROWS,
    )


def parts_of(length: int, block: int, blocks: int, overhead: int, num_warps: int, device: torch.device) -> tuple[int, int]:
    """Return into how many parts `blocks` programs' walks over `length` in steps of `block` are cut, and the length of a part.

    `overhead` is what a part costs beside its steps, in steps.
    """
    # As registers and shared memory have it with the tiles of the largest widths.
    at_once = gpu(device).multiprocessors * max(1, 8 // num_warps)
    most = cdiv(ROUNDS * at_once, max(1, blocks))
    num_parts, steps = balanced_parts(cdiv(length, block), blocks, at_once, overhead, most)
    return num_parts, steps * block


def block_constants(tile: BlockConfiguration) -> dict[str, Any]:
    """Return a tile as the kernels for shared draws take it."""
    return {
        "BLOCK_N": tile.rows, "BLOCK_J": tile.negatives, "BLOCK_D": tile.columns, "BLOCK_K": tile.step,
        "PRECISION": float32_products(),
        "num_warps": tile.num_warps, "num_stages": tile.num_stages,
    }  # fmt: skip
