"""Copies of items in an order, so that TMA finds those that follow one another side by side."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from jagged.ops._shared.device import load_tile
from jagged.ops._shared.launch import Launcher
from jagged.ops._shared.sizes import cdiv, next_power_of_2

BLOCK_ITEMS = 32


@triton.jit(do_not_specialize=["num_items"])
def linear_cross_entropy_copy_kernel(
    weight, order, pays, copy, num_items, weight_stride, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr, WIDTH: tl.constexpr
):
    """A block of items; none where a filter does not pay."""
    if pays is not None and tl.load(pays) == 0:
        return
    place = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    exists = place < num_items
    tile = load_tile(weight, tl.load(order + place, mask=exists, other=0), weight_stride, exists, 0, WIDTH, BLOCK_D)
    column = tl.arange(0, BLOCK_D)
    address = copy + place.to(tl.int64)[:, None] * WIDTH + column[None, :]
    tl.store(address, tile, mask=exists[:, None] & (column < WIDTH)[None, :])


_launch_copy = Launcher(linear_cross_entropy_copy_kernel)


def copy_in_order(weight: Tensor, order: Tensor, pays: Tensor | None, copy: Tensor) -> None:
    """Write the items that `order` `[C]` names into `copy` `[C, D]`, contiguous; nothing where `pays` holds 0."""
    num_items, width = copy.shape
    _launch_copy(
        (cdiv(num_items, BLOCK_ITEMS),), weight, order, pays, copy, num_items, weight.stride(0), BLOCK_V=BLOCK_ITEMS,
        BLOCK_D=next_power_of_2(width), WIDTH=width,
    )  # fmt: skip
