"""Gradients of plain linear cross-entropy on Hopper: one warp loads, groups of four warps multiply.

One kernel computes either gradient. A program, of which each multiprocessor runs one, owns 64 rows of one side for each group,
`X`, and walks tiles of the other side, `Y`, which one warp brings by TMA once for both of their products: `S = X Y^T`, and
`O += G Y` with the gradients `G` of the logits, which go from registers into that product. Rows' numbers (`Rows`) stand in
registers where rows are owned; where items are, the loading warp brings them with each tile.

A tile is marked if it has a target of the rows, or items past the last: in others nothing is compared.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton import language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from jagged.ops._shared.matrices import gpu
from jagged.ops._shared.ring import await_left, await_tile, begin_tile, leave_tile, make_ring, rows_descriptor, send_tile
from jagged.ops._shared.sizes import cdiv
from jagged.ops.cross_entropy.launch import Items, Rows
from jagged.ops.cross_entropy.logits import LOG2_E

# Rows of a group.
GROUP_M = gl.constexpr(64)
WIDEST = 256
# Walks for each multiprocessor are at most as many where a walk is split.
WAVES = 8


class Plan(NamedTuple):
    """Groups of a program, rows of a tile that it walks, places for those, and whether a group's two products overlap."""

    groups: int
    block: int
    places: int
    overlaps: int


# Whether items are owned, and the columns of a tile.
PLANS: dict[tuple[bool, int], Plan] = {
    (False, 64): Plan(2, 128, 4, 1),
    (False, 128): Plan(2, 128, 3, 1),
    (False, 256): Plan(2, 64, 4, 1),
    (True, 64): Plan(2, 128, 4, 1),
    (True, 128): Plan(2, 128, 3, 1),
    (True, 256): Plan(2, 64, 4, 1),
}


@gluon.jit
def walk_of(work, num_own, num_other, tiles_per_part, GROUPS: gl.constexpr, BLOCK: gl.constexpr):
    """Return a program's first own row, the part of the walk, and its first tile and the one after its last."""
    blocks = (num_own + GROUPS * GROUP_M - 1) // (GROUPS * GROUP_M)
    part = work // blocks
    first = part * tiles_per_part
    return work % blocks * (GROUPS * GROUP_M), part, first, gl.minimum(first + tiles_per_part, (num_other + BLOCK - 1) // BLOCK)


@gluon.jit
def load_warp(arguments, OWNS_ITEMS: gl.constexpr, GROUPS: gl.constexpr, BLOCK: gl.constexpr):
    """Of each walk send the groups' rows, and then tiles of the other side with their marks and numbers."""
    (
        own, other, target, shift, grad_softmax, grad_target, num_own, num_other, tiles_per_part, num_walks, owned, tiles,
        numbers, marks,
    ) = arguments  # fmt: skip
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    # Rows of a program, at least: a power of two.
    ROOM: gl.constexpr = 128 if GROUPS == 2 else 256
    visit = num_own * 0
    turn = num_own * 0
    for walk in range(gl.program_id(0), num_walks, gl.num_programs(0)):
        first_own, _, first, last = walk_of(walk, num_own, num_other, tiles_per_part, GROUPS, BLOCK)
        for i in gl.static_range(GROUPS):
            send_tile(own, first_own + i * GROUP_M, 0, owned, turn * GROUPS + i)
        turn += 1
        if not OWNS_ITEMS:
            places = gl.arange(0, ROOM, layout=layout)
            is_own = (places < GROUPS * GROUP_M) & (first_own + places < num_own)
            targets = gl.load(target + first_own + places, mask=is_own, other=-1)
        for tile in range(first, last):
            start = tile * BLOCK
            if OWNS_ITEMS:
                rows = start + gl.arange(0, BLOCK, layout=layout)
                targets = gl.load(target + rows, mask=rows < num_other, other=-1)
                tile_shift = gl.load(shift + rows, mask=rows < num_other, other=float("inf"))
                softmax = gl.load(grad_softmax + rows, mask=rows < num_other, other=0.0)
                of_target = gl.load(grad_target + rows, mask=rows < num_other, other=0.0)
                is_met = (targets >= first_own) & (targets < first_own + GROUPS * GROUP_M)
                mark = gl.max(is_met.to(gl.int32), 0) * (first_own + 1)
            else:
                is_met = (targets >= start) & (targets < start + BLOCK)
                mark = gl.maximum(gl.max(is_met.to(gl.int32), 0), (start + BLOCK > num_other).to(gl.int32)) * (first_own + 1)
            await_left(tiles, visit)
            place = visit % tiles.full.shape[0]
            marks.index(place).store(gl.full([1], 0, gl.int32, layout) + mark)
            if OWNS_ITEMS:
                numbers.index(place * 4).store(tile_shift)
                numbers.index(place * 4 + 1).store(softmax)
                numbers.index(place * 4 + 2).store(of_target)
                numbers.index(place * 4 + 3).store(targets.to(gl.float32, bitcast=True))
            # One lane announces what all have written.
            tl.debug_barrier()
            begin_tile(other, start, 0, tiles, visit)
            visit += 1


@gluon.jit
def add_targets(
    gradients, target, grad_target, first_own, first_other, num_own, num_other, numbers, place, OWNS_ITEMS: gl.constexpr,
    BLOCK: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """Add the targets' part to a tile's gradients of logits, and clear those of items past the last."""
    layout: gl.constexpr = gradients.type.layout
    own = first_own + gl.arange(0, GROUP_M, layout=gl.SliceLayout(1, layout))
    other = first_other + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, layout))
    if OWNS_ITEMS:
        of_target = numbers.index(place * 4 + 2).slice(PART * BLOCK, BLOCK).load(gl.SliceLayout(0, layout))
        targets = numbers.index(place * 4 + 3).slice(PART * BLOCK, BLOCK).load(gl.SliceLayout(0, layout)).to(gl.int32, bitcast=True)
        return gl.where(targets[None, :] == own[:, None], gradients + of_target[None, :], gradients)
    else:
        targets = gl.load(target + own, mask=own < num_own, other=-1)
        of_target = gl.load(grad_target + own, mask=own < num_own, other=0.0)
        gradients = gl.where(targets[:, None] == other[None, :], gradients + of_target[:, None], gradients)
        # Past the last item the exponential of 0 may overflow, where all true logits are far below.
        return gl.where((other < num_other)[None, :], gradients, 0.0)


@gluon.jit
def gradients_of_logits(
    s, row_shift, row_softmax, factor, target, grad_target, first_other, num_own, num_other, numbers, marks, place,
    WHICH: gl.constexpr, OWNS_ITEMS: gl.constexpr, BLOCK: gl.constexpr,
    PART: gl.constexpr = 0,
):  # fmt: skip
    """Gradients of the loss by a tile of products: softmax * grad_softmax + [item is target] * grad_target."""
    layout: gl.constexpr = s.type.layout
    if OWNS_ITEMS:
        column: gl.constexpr = gl.SliceLayout(0, layout)
        gradients = gl.exp2(s * factor - numbers.index(place * 4).slice(PART * BLOCK, BLOCK).load(column)[None, :])
        gradients = gradients * numbers.index(place * 4 + 1).slice(PART * BLOCK, BLOCK).load(column)[None, :]
    else:
        gradients = gl.exp2(s * factor - row_shift[:, None]) * row_softmax[:, None]
    mark = gl.sum(marks.index(place).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
    if mark != 0:
        gradients = add_targets(
            gradients, target, grad_target, mark - 1 + WHICH * GROUP_M, first_other, num_own, num_other, numbers, place,
            OWNS_ITEMS, BLOCK, PART,
        )  # fmt: skip
    return gradients


@gluon.jit
def sum_group(
    arguments, WHICH: gl.constexpr, OWNS_ITEMS: gl.constexpr, GROUPS: gl.constexpr, BLOCK: gl.constexpr, BLOCK_D: gl.constexpr,
    WIDTH: gl.constexpr, OVERLAPS: gl.constexpr,
):  # fmt: skip
    """One group of warps: the gradients of rows `64 * WHICH ..` of each walk's own."""
    (
        target, shift, grad_softmax, grad_target, inverse_scale, output, num_own, num_other, tiles_per_part, num_walks, factor,
        owned, tiles, numbers, marks,
    ) = arguments  # fmt: skip
    dtype: gl.constexpr = tiles.tiles.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    h_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK // 2, 16])
    g_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    zero = gl.zeros([GROUP_M, BLOCK], gl.float32, s_layout)
    places = tiles.full.shape[0]
    visit = num_own * 0
    turn = num_own * 0
    for walk in range(gl.program_id(0), num_walks, gl.num_programs(0)):
        first_own, part, first, last = walk_of(walk, num_own, num_other, tiles_per_part, GROUPS, BLOCK)
        first_own += WHICH * GROUP_M
        own = first_own + gl.arange(0, GROUP_M, layout=gl.SliceLayout(1, h_layout if OVERLAPS == 2 else s_layout))
        if OWNS_ITEMS:
            row_shift = 0.0
            row_softmax = 0.0
        else:
            row_shift = gl.load(shift + own, mask=own < num_own, other=float("inf"))
            row_softmax = gl.load(grad_softmax + own, mask=own < num_own, other=0.0)
        o = gl.zeros([GROUP_M, BLOCK_D], gl.float32, o_layout)
        x = await_tile(owned, turn * GROUPS + WHICH)
        if OVERLAPS == 2:
            HALF: gl.constexpr = BLOCK // 2
            y = await_tile(tiles, visit)
            s = warpgroup_mma(x, y.permute((1, 0)), zero, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=(s,))
            for tile in range(first, last - 1):
                s0, s1 = s.reshape([GROUP_M, 2, HALF]).permute((0, 2, 1)).split()
                g = gradients_of_logits(
                    gl.convert_layout(s0, h_layout), row_shift, row_softmax, factor, target, grad_target, tile * BLOCK, num_own,
                    num_other, numbers, marks, visit % places, WHICH, OWNS_ITEMS, HALF, 0,
                )  # fmt: skip
                y = tiles.tiles.index(visit % places)
                g = gl.convert_layout(g.to(dtype), g_layout)
                o = warpgroup_mma(g, y.slice(0, HALF, dim=0), o, is_async=True)
                g = gradients_of_logits(
                    gl.convert_layout(s1, h_layout), row_shift, row_softmax, factor, target, grad_target, tile * BLOCK + HALF,
                    num_own, num_other, numbers, marks, visit % places, WHICH, OWNS_ITEMS, HALF, 1,
                )  # fmt: skip
                g = g.to(dtype)
                following = await_tile(tiles, visit + 1)
                o = warpgroup_mma_wait(0, deps=(o,))
                g = gl.convert_layout(g, g_layout)
                o = warpgroup_mma(g, y.slice(HALF, HALF, dim=0), o, is_async=True)
                s = warpgroup_mma(x, following.permute((1, 0)), zero, use_acc=False, is_async=True)
                o, s = warpgroup_mma_wait(0, deps=(o, s))
                leave_tile(tiles, visit)
                visit += 1
            s0, s1 = s.reshape([GROUP_M, 2, HALF]).permute((0, 2, 1)).split()
            y = tiles.tiles.index(visit % places)
            g = gradients_of_logits(
                gl.convert_layout(s0, h_layout), row_shift, row_softmax, factor, target, grad_target, (last - 1) * BLOCK, num_own,
                num_other, numbers, marks, visit % places, WHICH, OWNS_ITEMS, HALF, 0,
            )  # fmt: skip
            g = gl.convert_layout(g.to(dtype), g_layout)
            o = warpgroup_mma(g, y.slice(0, HALF, dim=0), o, is_async=True)
            o = warpgroup_mma_wait(0, deps=(o,))
            g = gradients_of_logits(
                gl.convert_layout(s1, h_layout), row_shift, row_softmax, factor, target, grad_target, (last - 1) * BLOCK + HALF,
                num_own, num_other, numbers, marks, visit % places, WHICH, OWNS_ITEMS, HALF, 1,
            )  # fmt: skip
            g = gl.convert_layout(g.to(dtype), g_layout)
            o = warpgroup_mma(g, y.slice(HALF, HALF, dim=0), o, is_async=True)
            o = warpgroup_mma_wait(0, deps=(o,))
            leave_tile(tiles, visit)
            visit += 1
        elif OVERLAPS == 1:
            y = await_tile(tiles, visit)
            s = warpgroup_mma(x, y.permute((1, 0)), zero, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=(s,))
            g = gradients_of_logits(
                s, row_shift, row_softmax, factor, target, grad_target, first * BLOCK, num_own, num_other, numbers,
                marks, visit % places, WHICH, OWNS_ITEMS, BLOCK,
            )  # fmt: skip
            g = gl.convert_layout(g.to(dtype), g_layout)
            for tile in range(first + 1, last):
                following = await_tile(tiles, visit + 1)
                s = warpgroup_mma(x, following.permute((1, 0)), zero, use_acc=False, is_async=True)
                o = warpgroup_mma(g, tiles.tiles.index(visit % places), o, is_async=True)
                s = warpgroup_mma_wait(1, deps=(s,))
                next_g = gradients_of_logits(
                    s, row_shift, row_softmax, factor, target, grad_target, tile * BLOCK, num_own, num_other, numbers,
                    marks, (visit + 1) % places, WHICH, OWNS_ITEMS, BLOCK,
                )  # fmt: skip
                next_g = next_g.to(dtype)
                # The assembler moves a wait for products up to the last branch: this one has to stand below the gradients.
                await_tile(tiles, visit + 1)
                o = warpgroup_mma_wait(0, deps=(o,))
                leave_tile(tiles, visit)
                g = gl.convert_layout(next_g, g_layout)
                visit += 1
            o = warpgroup_mma(g, tiles.tiles.index(visit % places), o, is_async=True)
            o = warpgroup_mma_wait(0, deps=(o,))
            leave_tile(tiles, visit)
            visit += 1
        else:
            for tile in range(first, last):
                y = await_tile(tiles, visit)
                s = warpgroup_mma(x, y.permute((1, 0)), zero, use_acc=False, is_async=True)
                s = warpgroup_mma_wait(0, deps=(s,))
                g = gradients_of_logits(
                    s, row_shift, row_softmax, factor, target, grad_target, tile * BLOCK, num_own, num_other, numbers,
                    marks, visit % places, WHICH, OWNS_ITEMS, BLOCK,
                )  # fmt: skip
                o = warpgroup_mma(gl.convert_layout(g.to(dtype), g_layout), y, o, is_async=True)
                o = warpgroup_mma_wait(0, deps=(o,))
                leave_tile(tiles, visit)
                visit += 1
        leave_tile(owned, turn * GROUPS + WHICH)
        turn += 1
        if inverse_scale is not None:
            o = o * gl.load(inverse_scale)
        rows = first_own + gl.arange(0, GROUP_M, layout=gl.SliceLayout(1, o_layout))
        columns = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, o_layout))
        address = output + (part.to(gl.int64) * num_own + rows)[:, None] * WIDTH + columns[None, :]
        gl.store(address, o.to(output.dtype.element_ty), mask=(rows < num_own)[:, None] & (columns < WIDTH)[None, :])


@gluon.jit(do_not_specialize=["num_own", "num_other", "tiles_per_part", "num_walks"])
def linear_cross_entropy_backward_hopper_kernel(
    own, other, target, shift, grad_softmax, grad_target, inverse_scale, output, num_own, num_other, tiles_per_part, num_walks,
    inverse_temperature, OWNS_ITEMS: gl.constexpr, GROUPS: gl.constexpr, BLOCK: gl.constexpr, BLOCK_D: gl.constexpr,
    WIDTH: gl.constexpr, PLACES: gl.constexpr, OVERLAPS: gl.constexpr,
):  # fmt: skip
    """Gradients of all own rows by each part of the walk over the others, `[parts, own, WIDTH]`."""
    # A group's rows are a place of their own: visit `turn * GROUPS + WHICH`.
    owned = make_ring(own, GROUPS, 1)
    tiles = make_ring(other, PLACES, GROUPS)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    marks = gl.allocate_shared_memory(gl.int32, [PLACES, 1], flat)
    # Of each place the shifts of its rows, and the gradients by their softmax.
    numbers = gl.allocate_shared_memory(gl.float32, [4 * PLACES, BLOCK if OWNS_ITEMS else 1], flat)
    fence_async_shared()
    factor = inverse_temperature * LOG2_E
    loads = (
        own, other, target, shift, grad_softmax, grad_target, num_own, num_other, tiles_per_part, num_walks, owned, tiles,
        numbers, marks,
    )  # fmt: skip
    sums = (
        target, shift, grad_softmax, grad_target, inverse_scale, output, num_own, num_other, tiles_per_part, num_walks, factor,
        owned, tiles, numbers, marks,
    )  # fmt: skip
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (sum_group, (sums, 0, OWNS_ITEMS, GROUPS, BLOCK, BLOCK_D, WIDTH, OVERLAPS)),
                (sum_group, (sums, 1, OWNS_ITEMS, GROUPS, BLOCK, BLOCK_D, WIDTH, OVERLAPS)),
                (load_warp, (loads, OWNS_ITEMS, GROUPS, BLOCK)),
            ],
            [4, 1], [240, 24] if BLOCK_D == 256 else [216, 72],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (sum_group, (sums, 0, OWNS_ITEMS, GROUPS, BLOCK, BLOCK_D, WIDTH, OVERLAPS)),
                (sum_group, (sums, 1, OWNS_ITEMS, GROUPS, BLOCK, BLOCK_D, WIDTH, OVERLAPS)),
                (sum_group, (sums, 2, OWNS_ITEMS, GROUPS, BLOCK, BLOCK_D, WIDTH, OVERLAPS)),
                (load_warp, (loads, OWNS_ITEMS, GROUPS, BLOCK)),
            ],
            [4, 4, 1], [152, 152, 56],
        )  # fmt: skip


def gradient(rows: Rows, items: Items, dtype: torch.dtype, *, owns_items: bool) -> Tensor:
    """Return the gradient of weight or of hidden, in a dtype; there are rows and items."""
    own, other = (items.weight, rows.hidden) if owns_items else (rows.hidden, items.weight)
    num_own, width = own.shape
    columns = 64 if width <= 64 else 128 if width <= 128 else WIDEST
    plan = PLANS[owns_items, columns]
    blocks, steps = cdiv(num_own, plan.groups * GROUP_M.value), cdiv(len(other), plan.block)
    programs = gpu(own.device).multiprocessors
    num_parts, steps_per_part = parts_of(blocks, steps, programs)
    parts = own.new_empty(num_parts, num_own, width, dtype=dtype if num_parts == 1 else torch.float32)
    num_walks = blocks * num_parts
    linear_cross_entropy_backward_hopper_kernel[(min(num_walks, programs),)](
        rows_descriptor(own, GROUP_M.value, columns), rows_descriptor(other, plan.block, columns), rows.target, rows.shift,
        rows.grad_softmax, rows.grad_target, rows.inverse_scale, parts, num_own, len(other), steps_per_part, num_walks,
        1 / items.temperature, OWNS_ITEMS=owns_items, GROUPS=plan.groups, BLOCK=plan.block, BLOCK_D=columns, WIDTH=width,
        PLACES=plan.places, OVERLAPS=plan.overlaps, num_warps=4,
    )  # fmt: skip
    return parts[0] if num_parts == 1 else parts.sum(0).to(dtype)


def parts_of(blocks: int, steps: int, programs: int) -> tuple[int, int]:
    """Return of how many parts a walk is, so that the last of the programs' turns is full, and the steps of each."""
    best = min(range(1, max(1, WAVES * programs // blocks) + 1), key=lambda parts: cdiv(blocks * parts, programs) / parts)
    steps_per_part = cdiv(steps, min(steps, best))
    return cdiv(steps, steps_per_part), steps_per_part
