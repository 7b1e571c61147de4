"""Gradients of plain linear cross-entropy on Hopper: one warp loads, groups of four warps multiply.

One kernel computes the gradient of either side. A program, of which each multiprocessor runs one, takes walks in turn. In each it
owns 64 rows `X` of its side for every group, and meets the other side by tiles `Y` of 64 rows, which one warp brings by TMA once
for both of their products: `S = X Y^T`, and `O += G Y` with the gradients `G` of the logits, which go from registers into that
product. A group begins `S_j` together with `O += G_(j-1) Y_(j-1)`, and makes G_j of S_j while the second still runs.

What belongs to a row of hidden states stands in registers where those are owned; where items are, the loading warp brings it with
each tile. The factor of a row's softmax is a part of the shift of its exponentials, so that a gradient is one fma and one `ex2`.
Everything else is done in tiles that the loading warp marks alone: those with a target of the rows, with items past the last, or
with rows whose factor is negative.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton import language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from jagged.ops._shared.launch import Launcher
from jagged.ops._shared.matrices import balanced_parts, gpu
from jagged.ops._shared.ring import await_left, await_tile, begin_tile, leave_tile, make_ring, rows_descriptor, send_tile
from jagged.ops._shared.sizes import cdiv
from jagged.ops.cross_entropy.triton.arguments import Items, Rows
from jagged.ops.cross_entropy.triton.logits import LOG2_E

# Rows of a group, and of a tile that it meets.
BLOCK = gl.constexpr(64)
# Of a tile's rows, where they are hidden states: shift, factor of softmax, gradient by the target's logit, and target.
NUMBERS = gl.constexpr(4)
# Walks for each multiprocessor are at most as many where the other side is split.
TURNS = 8
# Tiles of a walk at most, of 4 additions each: the tensor cores cut off what does not fit into a float32 sum, and of 100,000
# additions 0.2% was lost.
LONGEST = 1024


BY_ROW = ("hidden", "target", "shift", "grad_softmax", "grad_target")


class Plan(NamedTuple):
    """Groups of a program, and places for tiles."""

    groups: int
    places: int


# By the columns of a tile. Of 256, the sums of a group take half of its registers.
PLANS = {64: Plan(3, 6), 128: Plan(3, 4), 256: Plan(2, 4)}


@gluon.jit
def span_of(walk, num_own, num_other, tiles_per_part, GROUPS: gl.constexpr):
    """Return a walk's first own row, its part of the other side, and there the first tile and the one after the last."""
    blocks = (num_own + GROUPS * BLOCK - 1) // (GROUPS * BLOCK)
    part = walk // blocks
    first = part * tiles_per_part
    return walk % blocks * (GROUPS * BLOCK), part, first, gl.minimum(first + tiles_per_part, (num_other + BLOCK - 1) // BLOCK)


@gluon.jit
def load_warp(arguments, OWNS_ITEMS: gl.constexpr, GROUPS: gl.constexpr):
    """Of each walk send the groups' own rows, and then tiles of the other side with their marks and numbers.

    A mark is the walk's first own row and 1, or 0: a group that computes it from what it holds keeps that in registers for a tile
    that is rare.
    """
    (
        own, other, target, shift, grad_softmax, grad_target, num_own, num_other, tiles_per_part, num_walks, owned, tiles,
        numbers, marks,
    ) = arguments  # fmt: skip
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    # A power of two.
    ROOM: gl.constexpr = 2 * BLOCK if GROUPS == 2 else 4 * BLOCK
    visit = num_own * 0
    turn = num_own * 0
    for walk in range(gl.program_id(0), num_walks, gl.num_programs(0)):
        first_own, _, first, last = span_of(walk, num_own, num_other, tiles_per_part, GROUPS)
        for i in gl.static_range(GROUPS):
            send_tile(own, first_own + i * BLOCK, 0, owned, turn * GROUPS + i)
        turn += 1
        if not OWNS_ITEMS:
            offset = gl.arange(0, ROOM, layout=layout)
            is_own = (offset < GROUPS * BLOCK) & (first_own + offset < num_own)
            targets = gl.load(target + first_own + offset, mask=is_own, other=-1)
            is_negative = gl.load(grad_softmax + first_own + offset, mask=is_own, other=0.0) < 0
            has_negative = gl.max(is_negative.to(gl.int32), 0)
        for tile in range(first, last):
            start = tile * BLOCK
            if OWNS_ITEMS:
                rows = start + gl.arange(0, BLOCK, layout=layout)
                targets = gl.load(target + rows, mask=rows < num_other, other=-1)
                exponent = gl.load(shift + rows, mask=rows < num_other, other=float("inf"))
                of_softmax = gl.load(grad_softmax + rows, mask=rows < num_other, other=0.0)
                of_target = gl.load(grad_target + rows, mask=rows < num_other, other=0.0)
                is_met = (targets >= first_own) & (targets < first_own + GROUPS * BLOCK)
                mark = gl.max((is_met | (of_softmax < 0)).to(gl.int32), 0)
            else:
                is_met = (targets >= start) & (targets < start + BLOCK)
                mark = gl.max(is_met.to(gl.int32), 0) | (start + BLOCK > num_other).to(gl.int32) | has_negative
            await_left(tiles, visit)
            place = visit % tiles.full.shape[0]
            marks.index(place).store(gl.full([1], 0, gl.int32, layout) + mark * (first_own + 1))
            if OWNS_ITEMS:
                numbers.index(place * NUMBERS).store(folded(exponent, of_softmax))
                numbers.index(place * NUMBERS + 1).store(of_softmax)
                numbers.index(place * NUMBERS + 2).store(of_target)
                numbers.index(place * NUMBERS + 3).store(targets.to(gl.float32, bitcast=True))
            # One lane announces what all have written.
            tl.debug_barrier()
            begin_tile(other, start, 0, tiles, visit)
            visit += 1


@gluon.jit
def folded(shift, of_softmax):
    """Return by how much exponents are shifted for softmax times a factor; its sign is left. Of 0 the exponentials are 0."""
    return shift - gl.log2(gl.abs(of_softmax))


@gluon.jit
def complete(
    gradients, target, grad_softmax, grad_target, first_own, first_other, num_own, num_other, numbers, place,
    OWNS_ITEMS: gl.constexpr,
):  # fmt: skip
    """Give a tile's shares of softmax their signs, add the targets' part, and clear those of items past the last."""
    layout: gl.constexpr = gradients.type.layout
    column: gl.constexpr = gl.SliceLayout(0, layout)
    own = first_own + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, layout))
    other = first_other + gl.arange(0, BLOCK, layout=column)
    if OWNS_ITEMS:
        of_softmax = numbers.index(place * NUMBERS + 1).load(column)[None, :]
        of_target = numbers.index(place * NUMBERS + 2).load(column)[None, :]
        is_target = numbers.index(place * NUMBERS + 3).load(column).to(gl.int32, bitcast=True)[None, :] == own[:, None]
    else:
        is_own = own < num_own
        of_softmax = gl.load(grad_softmax + own, mask=is_own, other=0.0)[:, None]
        of_target = gl.load(grad_target + own, mask=is_own, other=0.0)[:, None]
        is_target = gl.load(target + own, mask=is_own, other=-1)[:, None] == other[None, :]
    gradients = gl.where(of_softmax < 0, -gradients, gradients)
    # Before the rounding to the weights' dtype, where the sum is small for a target that is well predicted.
    gradients = gl.where(is_target, gradients + of_target, gradients)
    if not OWNS_ITEMS:
        # Past the last item the exponential of 0 may overflow, where all true logits are far below.
        gradients = gl.where((other < num_other)[None, :], gradients, 0.0)
    return gradients


@gluon.jit
def gradients_of(s, row_shift, tile, visit, arguments, WHICH: gl.constexpr, OWNS_ITEMS: gl.constexpr):
    """Gradients of the loss by a tile of products: softmax * grad_softmax + [item is target] * grad_target, in 16 bits."""
    target, _, grad_softmax, grad_target, _, _, num_own, num_other, _, _, factor, _, tiles, numbers, marks = arguments
    place = visit % tiles.full.shape[0]
    if OWNS_ITEMS:
        gradients = gl.exp2(s * factor - numbers.index(place * NUMBERS).load(gl.SliceLayout(0, s.type.layout))[None, :])
    else:
        gradients = gl.exp2(s * factor - row_shift[:, None])
    mark = gl.sum(marks.index(place).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
    if mark != 0:
        gradients = complete(
            gradients, target, grad_softmax, grad_target, mark - 1 + WHICH * BLOCK, tile * BLOCK, num_own, num_other, numbers,
            place, OWNS_ITEMS,
        )  # fmt: skip
    return gradients.to(tiles.tiles.dtype)


@gluon.jit
def sum_group(
    arguments, WHICH: gl.constexpr, OWNS_ITEMS: gl.constexpr, GROUPS: gl.constexpr, BLOCK_D: gl.constexpr, WIDTH: gl.constexpr
):
    """One group of warps: the gradients of rows `64 * WHICH ..` of each walk's own."""
    (
        _, shift, grad_softmax, _, inverse_scale, output, num_own, num_other, tiles_per_part, num_walks, _, owned, tiles, _, _,
    ) = arguments  # fmt: skip
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    g_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    zero = gl.zeros([BLOCK, BLOCK], gl.float32, s_layout)
    places = tiles.full.shape[0]
    visit = num_own * 0
    turn = num_own * 0
    for walk in range(gl.program_id(0), num_walks, gl.num_programs(0)):
        first_own, part, first, last = span_of(walk, num_own, num_other, tiles_per_part, GROUPS)
        first_own += WHICH * BLOCK
        row_shift = 0.0
        if not OWNS_ITEMS:
            own = first_own + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, s_layout))
            of_softmax = gl.load(grad_softmax + own, mask=own < num_own, other=0.0)
            row_shift = folded(gl.load(shift + own, mask=own < num_own, other=float("inf")), of_softmax)
        o = gl.zeros([BLOCK, BLOCK_D], gl.float32, o_layout)
        x = await_tile(owned, turn * GROUPS + WHICH)
        y = await_tile(tiles, visit)
        s = warpgroup_mma(x, y.permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        g = gl.convert_layout(gradients_of(s, row_shift, first, visit, arguments, WHICH, OWNS_ITEMS), g_layout)
        for tile in range(first + 1, last):
            following = await_tile(tiles, visit + 1)
            s = warpgroup_mma(x, following.permute((1, 0)), zero, use_acc=False, is_async=True)
            o = warpgroup_mma(g, tiles.tiles.index(visit % places), o, is_async=True)
            s = warpgroup_mma_wait(1, deps=(s,))
            next_g = gradients_of(s, row_shift, tile, visit + 1, arguments, WHICH, OWNS_ITEMS)
            # The assembler moves a wait for products up to the last branch: this one has to stand below the gradients.
            await_tile(tiles, visit + 1)
            o = warpgroup_mma_wait(0, deps=(o,))
            leave_tile(tiles, visit)
            g = gl.convert_layout(next_g, g_layout)
            visit += 1
        leave_tile(owned, turn * GROUPS + WHICH)
        turn += 1
        o = warpgroup_mma(g, tiles.tiles.index(visit % places), o, is_async=True)
        o = warpgroup_mma_wait(0, deps=(o,))
        leave_tile(tiles, visit)
        visit += 1
        if inverse_scale is not None:
            o = o * gl.load(inverse_scale)
        rows = first_own + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, o_layout))
        columns = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, o_layout))
        address = output + (part.to(gl.int64) * num_own + rows)[:, None] * WIDTH + columns[None, :]
        gl.store(address, o.to(output.dtype.element_ty), mask=(rows < num_own)[:, None] & (columns < WIDTH)[None, :])


@gluon.jit(do_not_specialize=["num_own", "num_other", "tiles_per_part", "num_walks"])
def linear_cross_entropy_backward_hopper_kernel(
    own, other, target, shift, grad_softmax, grad_target, inverse_scale, unless, output, num_own, num_other, tiles_per_part,
    num_walks, inverse_temperature, OWNS_ITEMS: gl.constexpr, GROUPS: gl.constexpr, PLACES: gl.constexpr, BLOCK_D: gl.constexpr,
    WIDTH: gl.constexpr,
):  # fmt: skip
    """Gradients of all own rows from each part of the other side, `[parts, own, WIDTH]`; none where a filter writes them."""
    if unless is not None:
        num_walks *= 1 - gl.load(unless)
    # Each group has a place for its own rows, visit `turn * GROUPS + WHICH`.
    owned = make_ring(own, GROUPS, 1)
    tiles = make_ring(other, PLACES, GROUPS)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    marks = gl.allocate_shared_memory(gl.int32, [PLACES, 1], flat)
    numbers = gl.allocate_shared_memory(gl.float32, [NUMBERS * PLACES, BLOCK if OWNS_ITEMS else 1], flat)
    fence_async_shared()
    loads = (
        own, other, target, shift, grad_softmax, grad_target, num_own, num_other, tiles_per_part, num_walks, owned, tiles,
        numbers, marks,
    )  # fmt: skip
    sums = (
        target, shift, grad_softmax, grad_target, inverse_scale, output, num_own, num_other, tiles_per_part, num_walks,
        inverse_temperature * LOG2_E, owned, tiles, numbers, marks,
    )  # fmt: skip
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (sum_group, (sums, 0, OWNS_ITEMS, GROUPS, BLOCK_D, WIDTH)),
                (sum_group, (sums, 1, OWNS_ITEMS, GROUPS, BLOCK_D, WIDTH)),
                (load_warp, (loads, OWNS_ITEMS, GROUPS)),
            ],
            [4, 1], [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (sum_group, (sums, 0, OWNS_ITEMS, GROUPS, BLOCK_D, WIDTH)),
                (sum_group, (sums, 1, OWNS_ITEMS, GROUPS, BLOCK_D, WIDTH)),
                (sum_group, (sums, 2, OWNS_ITEMS, GROUPS, BLOCK_D, WIDTH)),
                (load_warp, (loads, OWNS_ITEMS, GROUPS)),
            ],
            [4, 4, 1], [160, 160, 32],
        )  # fmt: skip


_launch_backward = Launcher(linear_cross_entropy_backward_hopper_kernel)


def gradient(rows: Rows, items: Items, dtype: torch.dtype, *, owns_items: bool, unless: Tensor | None = None) -> Tensor:
    """Return the gradient of weight or of hidden in a dtype, of at least one row and matrices of at most 256 columns.

    `unless` is a number on the device: where it is 1 nothing is computed, and what is returned holds anything.
    """
    own, other = (items.weight, rows.hidden) if owns_items else (rows.hidden, items.weight)
    plan, programs = PLANS[_columns(own)], gpu(own.device).multiprocessors
    least = cdiv(cdiv(other.shape[0], BLOCK.value), LONGEST)
    # Parts of walks for as many turns: all own rows where one part will do.
    at_once = own.shape[0] if least == 1 else max(1, TURNS * programs // least) * plan.groups * BLOCK.value
    grad = own.new_empty(own.shape, dtype=dtype)
    for first in range(0, own.shape[0], at_once):
        last = min(first + at_once, own.shape[0])
        if first == 0 and (owns_items or last == own.shape[0]):
            some = rows
        elif owns_items:
            some = rows._replace(target=torch.where(rows.target < first, -1, rows.target - first))
        else:
            some = rows._replace(**{name: getattr(rows, name)[first:last] for name in BY_ROW})
        of_some = grad[first:last]
        _gradient_of_some(some, own[first:last], other, items.temperature, least, of_some, unless, owns_items=owns_items)
    return grad


def _columns(own: Tensor) -> int:
    return min(columns for columns in PLANS if own.shape[1] <= columns)


def _gradient_of_some(
    rows: Rows,
    own: Tensor,
    other: Tensor,
    temperature: float,
    least: int,
    grad: Tensor,
    unless: Tensor | None,
    *,
    owns_items: bool,
) -> None:
    """Write the gradient of some own rows, which targets count from if they are items."""
    (num_own, width), columns = own.shape, _columns(own)
    plan, programs = PLANS[columns], gpu(own.device).multiprocessors
    blocks = cdiv(num_own, plan.groups * BLOCK.value)
    tiles = cdiv(other.shape[0], BLOCK.value)
    num_parts, tiles_per_part = balanced_parts(tiles, blocks, programs, 0, TURNS * programs // blocks, least)
    parts = grad[None] if num_parts == 1 else own.new_empty(num_parts, num_own, width, dtype=torch.float32)
    _launch_backward(
        (min(blocks * num_parts, programs),),
        rows_descriptor(own, BLOCK.value, columns), rows_descriptor(other, BLOCK.value, columns), rows.target, rows.shift,
        rows.grad_softmax, rows.grad_target, rows.inverse_scale, unless, parts, num_own, other.shape[0], tiles_per_part,
        blocks * num_parts, 1 / temperature, OWNS_ITEMS=owns_items, GROUPS=plan.groups, PLACES=plan.places, BLOCK_D=columns,
        WIDTH=width, num_warps=4,
    )  # fmt: skip
    if num_parts > 1:
        grad.copy_(parts.sum(0))
