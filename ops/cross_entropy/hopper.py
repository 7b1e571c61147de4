"""Linear cross-entropy's logits on Hopper: one warp loads, groups of four warps multiply and take exponentials.

A program, of which each multiprocessor runs one, takes blocks of rows, 64 to each group, and walks a part of the items with each.
Its loading warp sends tiles of weights by TMA through a ring of places in shared memory, which all groups read, so that an item
crosses the L2 once for all of a program's rows.

Hidden states of at most 256 columns stay on chip for a walk. `walk_group` has two accumulators: while the exponentials of one
tile are taken, the product of the next runs. Wider ones come in steps of 64 columns with the weights'. `step_group` has one
accumulator, twice as wide, and one group's exponentials run beside the products of another.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from jagged.ops._shared.matrices import gpu
from jagged.ops._shared.ring import Ring, await_tile, leave_tile, make_ring, rows_descriptor, send_tile
from jagged.ops.cross_entropy.logits import LOG2_E

# Rows of a group.
GROUP_N = gl.constexpr(64)


@gluon.jit
def unit_of(unit, row_blocks, num_parts, ROWS_FIRST: gl.constexpr):
    """Return the block of rows and the part of the items that a unit of work is."""
    if ROWS_FIRST:
        return unit % row_blocks, unit // row_blocks
    else:
        return unit // num_parts, unit % num_parts


@gluon.jit
def exp2(x):
    """2 to the power of x; results below the smallest normal number are 0."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, is_pure=True, pack=1)


@gluon.jit
def add_logits(products, maximum, total, rate):
    """Take products into the rows' maximum and sum of exponentials relative to it, in powers of two."""
    highest = gl.maximum(maximum, gl.max(products, 1) * rate)
    # A row of -inf alone has no maximum to subtract.
    shift = gl.where(highest == float("-inf"), 0.0, highest)
    return highest, total * exp2(maximum - shift) + gl.sum(exp2(products * rate - shift[:, None]), 1)


@gluon.jit
def without_missing(products, first, last):
    """Return products of the items from `first` on with -inf from `last` on."""
    layout: gl.constexpr = products.type.layout
    item = first + gl.arange(0, products.type.shape[1], layout=gl.SliceLayout(0, layout))
    return gl.where((item < last)[None, :], products, float("-inf"))


@gluon.jit
def load_walks(
    what, sizes, ROWS_FIRST: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """Of each unit send hidden states, then its tiles of weights, two and two."""
    hidden, weight, _, _, hiddens, weights = what
    _, row_blocks, num_parts, num_items, items_per_part, _ = sizes
    BLOCK_V: gl.constexpr = weight.block_type.shape[0]
    visit = num_items * 0
    count = num_items * 0
    for unit in range(gl.program_id(0), row_blocks * num_parts, gl.num_programs(0)):
        block, part = unit_of(unit, row_blocks, num_parts, ROWS_FIRST)
        for group in gl.static_range(GROUPS):
            row = (block * GROUPS + group) * GROUP_N
            send_tile(hidden, row, 0, hiddens, count * GROUPS + group)
        first = part * items_per_part
        for item in range(first, gl.minimum(first + items_per_part, num_items), 2 * BLOCK_V):
            send_tile(weight, item, 0, weights, visit)
            send_tile(weight, item + BLOCK_V, 0, weights, visit + 1)
            visit += 2
        count += 1


@gluon.jit
def walk_group(
    what, sizes, WHICH: gl.constexpr, ROWS_FIRST: gl.constexpr, GROUPS: gl.constexpr, IN_REGISTERS: gl.constexpr,
):  # fmt: skip
    """One group of warps: maximum of the logits and sum of exponentials of rows `64 * WHICH ..` of each unit."""
    hidden, weight, part_maximum, part_sum, hiddens, weights = what
    num_rows, row_blocks, num_parts, num_items, items_per_part, rate = sizes
    BLOCK_V: gl.constexpr = weight.block_type.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_V, 16])
    zero = gl.zeros([GROUP_N, BLOCK_V], gl.float32, layout)
    visit = num_items * 0
    count = num_items * 0
    for unit in range(gl.program_id(0), row_blocks * num_parts, gl.num_programs(0)):
        block, part = unit_of(unit, row_blocks, num_parts, ROWS_FIRST)
        first = part * items_per_part
        last = gl.minimum(first + items_per_part, num_items)
        maximum = gl.full([GROUP_N], float("-inf"), gl.float32, gl.SliceLayout(1, layout))
        total = gl.zeros([GROUP_N], gl.float32, gl.SliceLayout(1, layout))
        h = await_tile(hiddens, count * GROUPS + WHICH)
        if IN_REGISTERS:
            h = h.load(gl.DotOperandLayout(0, layout, 2))
            leave_tile(hiddens, count * GROUPS + WHICH)
        even = warpgroup_mma(h, await_tile(weights, visit).permute((1, 0)), zero, use_acc=False, is_async=True)
        even = warpgroup_mma_wait(0, deps=(even,))
        leave_tile(weights, visit)
        tile = await_tile(weights, visit + 1)
        for _ in range(first + 2 * BLOCK_V, last, 2 * BLOCK_V):
            odd = warpgroup_mma(h, tile.permute((1, 0)), zero, use_acc=False, is_async=True)
            maximum, total = add_logits(even, maximum, total, rate)
            # The assembler moves a wait for products up to the last branch: this one has to stand below the exponentials.
            tile = await_tile(weights, visit + 2)
            odd = warpgroup_mma_wait(0, deps=(odd,))
            leave_tile(weights, visit + 1)
            even = warpgroup_mma(h, tile.permute((1, 0)), zero, use_acc=False, is_async=True)
            maximum, total = add_logits(odd, maximum, total, rate)
            tile = await_tile(weights, visit + 3)
            even = warpgroup_mma_wait(0, deps=(even,))
            leave_tile(weights, visit + 2)
            visit += 2
        odd = warpgroup_mma(h, tile.permute((1, 0)), zero, use_acc=False, is_async=True)
        odd = warpgroup_mma_wait(0, deps=(odd,))
        leave_tile(weights, visit + 1)
        if not IN_REGISTERS:
            leave_tile(hiddens, count * GROUPS + WHICH)
        visit += 2
        count += 1
        start = first + (gl.maximum(last - first, 1) - 1) // (2 * BLOCK_V) * (2 * BLOCK_V)
        maximum, total = add_logits(without_missing(even, start, last), maximum, total, rate)
        maximum, total = add_logits(without_missing(odd, start + BLOCK_V, last), maximum, total, rate)
        row = (block * GROUPS + WHICH) * GROUP_N + gl.arange(0, GROUP_N, layout=gl.SliceLayout(1, layout))
        place = part.to(gl.int64) * num_rows + row
        gl.store(part_maximum + place, maximum, mask=row < num_rows)
        gl.store(part_sum + place, total, mask=row < num_rows)


@gluon.jit(do_not_specialize=["num_rows", "row_blocks", "num_parts", "num_items", "items_per_part"])
def linear_cross_entropy_forward_hopper_kernel(
    hidden, weight, part_maximum, part_sum, num_rows, row_blocks, num_parts, num_items, items_per_part, rate,
    GROUPS: gl.constexpr, PLACES: gl.constexpr, ROWS_FIRST: gl.constexpr, IN_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Maximum of the logits and sum of exponentials relative to it of each row, over each part of the items."""
    hiddens = make_ring(hidden, GROUPS, 1)
    weights = make_ring(weight, PLACES, GROUPS)
    fence_async_shared()
    sizes = (num_rows, row_blocks, num_parts, num_items, items_per_part, rate)
    what = (hidden, weight, part_maximum, part_sum, hiddens, weights)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (walk_group, (what, sizes, 0, ROWS_FIRST, GROUPS, IN_REGISTERS)),
                (walk_group, (what, sizes, 1, ROWS_FIRST, GROUPS, IN_REGISTERS)),
                (load_walks, (what, sizes, ROWS_FIRST, GROUPS)),
            ],
            [4, 1], [240, 24],
        )  # fmt: skip
    elif GROUPS == 3:
        gl.warp_specialize(
            [
                (walk_group, (what, sizes, 0, ROWS_FIRST, GROUPS, IN_REGISTERS)),
                (walk_group, (what, sizes, 1, ROWS_FIRST, GROUPS, IN_REGISTERS)),
                (walk_group, (what, sizes, 2, ROWS_FIRST, GROUPS, IN_REGISTERS)),
                (load_walks, (what, sizes, ROWS_FIRST, GROUPS)),
            ],
            [4, 4, 1], [160, 160, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (walk_group, (what, sizes, 0, ROWS_FIRST, GROUPS, IN_REGISTERS)),
                (walk_group, (what, sizes, 1, ROWS_FIRST, GROUPS, IN_REGISTERS)),
                (walk_group, (what, sizes, 2, ROWS_FIRST, GROUPS, IN_REGISTERS)),
                (walk_group, (what, sizes, 3, ROWS_FIRST, GROUPS, IN_REGISTERS)),
                (load_walks, (what, sizes, ROWS_FIRST, GROUPS)),
            ],
            [4, 4, 4, 1], [112, 112, 112, 24],
        )  # fmt: skip


# ---- wide


@gluon.jit
def make_ring_of_steps(source, PLACES: gl.constexpr, READERS: gl.constexpr, TILES: gl.constexpr):
    full = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(PLACES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=READERS)
    return Ring(gl.allocate_shared_memory(source.dtype, [TILES] + source.block_type.shape, source.layout), full, empty)


@gluon.jit
def send_step(hidden, weight, row, item, column, hiddens, weights, visit, GROUPS: gl.constexpr):
    """Copy a step's hidden states and weights into the ring's next place as soon as all groups have left it."""
    PLACES: gl.constexpr = weights.full.shape[0]
    place = visit % PLACES
    full = weights.full.index(place)
    mbarrier.wait(weights.empty.index(place), (visit // PLACES & 1) ^ 1)
    mbarrier.expect(full, weight.block_type.nbytes + GROUPS * hidden.block_type.nbytes)
    for group in gl.static_range(GROUPS):
        tma.async_copy_global_to_shared(
            hidden, [row + group * GROUP_N, column], full, hiddens.tiles.index(place * GROUPS + group)
        )  # fmt: skip
    tma.async_copy_global_to_shared(weight, [item, column], full, weights.tiles.index(place))


@gluon.jit
def load_steps(
    what, sizes, STEPS: gl.constexpr, ROWS_FIRST: gl.constexpr, GROUPS: gl.constexpr, IS_RESIDENT: gl.constexpr,
):  # fmt: skip
    """Of each tile of each unit send hidden states and weights, some columns after the other."""
    hidden, weight, hiddens, weights, _, _ = what
    _, row_blocks, num_parts, first_item, last_item, items_per_part, _, _ = sizes
    BLOCK_V: gl.constexpr = weight.block_type.shape[0]
    STEP: gl.constexpr = weight.block_type.shape[1]
    visit = last_item * 0
    count = last_item * 0
    for unit in range(gl.program_id(0), row_blocks * num_parts, gl.num_programs(0)):
        block, part = unit_of(unit, row_blocks, num_parts, ROWS_FIRST)
        first = first_item + part * items_per_part
        if IS_RESIDENT:
            for group in gl.static_range(GROUPS):
                mbarrier.wait(hiddens.empty.index(group), (count & 1) ^ 1)
                mbarrier.expect(hiddens.full.index(group), STEPS * hidden.block_type.nbytes)
                for place in gl.static_range(STEPS):
                    tma.async_copy_global_to_shared(
                        hidden, [(block * GROUPS + group) * GROUP_N, place * STEP], hiddens.full.index(group),
                        hiddens.tiles.index(group * STEPS + place),
                    )  # fmt: skip
        count += 1
        for item in range(first, gl.minimum(first + items_per_part, last_item), BLOCK_V):
            for step in range(STEPS):
                if IS_RESIDENT:
                    send_tile(weight, item, step * STEP, weights, visit)
                else:
                    send_step(hidden, weight, block * GROUPS * GROUP_N, item, step * STEP, hiddens, weights, visit, GROUPS)
                visit += 1


@gluon.jit
def hidden_of(
    hiddens, weights, visit, step, WHICH: gl.constexpr, STEPS: gl.constexpr, GROUPS: gl.constexpr, IS_RESIDENT: gl.constexpr
):
    """Return the columns of a group's hidden states that a step multiplies."""
    if IS_RESIDENT:
        return hiddens.tiles.index(WHICH * STEPS + step)
    else:
        return hiddens.tiles.index(visit % weights.full.shape[0] * GROUPS + WHICH)


@gluon.jit
def step_group(
    what, sizes, WHICH: gl.constexpr, STEPS: gl.constexpr, ROWS_FIRST: gl.constexpr, GROUPS: gl.constexpr,
    IS_BACKWARD: gl.constexpr, IS_RESIDENT: gl.constexpr,
):  # fmt: skip
    """One group of warps: rows `64 * WHICH ..` of each unit, their maximum and sum or the gradients of their logits."""
    hidden, weight, hiddens, weights, results, rows = what
    num_rows, row_blocks, num_parts, first_item, last_item, items_per_part, gradients_stride, rate = sizes
    BLOCK_V: gl.constexpr = weight.block_type.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_V, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    zero = gl.zeros([GROUP_N, BLOCK_V], gl.float32, layout)
    visit = last_item * 0
    count = last_item * 0
    for unit in range(gl.program_id(0), row_blocks * num_parts, gl.num_programs(0)):
        block, part = unit_of(unit, row_blocks, num_parts, ROWS_FIRST)
        row = (block * GROUPS + WHICH) * GROUP_N + gl.arange(0, GROUP_N, layout=row_layout)
        exists = row < num_rows
        first = first_item + part * items_per_part
        last = gl.minimum(first + items_per_part, last_item)
        maximum = gl.full([GROUP_N], float("-inf"), gl.float32, row_layout)
        total = gl.zeros([GROUP_N], gl.float32, row_layout)
        if IS_BACKWARD:
            target, row_shift, grad_softmax, grad_target = rows
            gradients, _ = results
            own = gl.load(target + row, mask=exists, other=-1)
            shift = gl.load(row_shift + row, mask=exists, other=float("inf"))
            of_softmax = gl.load(grad_softmax + row, mask=exists, other=0.0)
            of_target = gl.load(grad_target + row, mask=exists, other=0.0)
        if IS_RESIDENT:
            await_tile(hiddens, count * GROUPS + WHICH)
        for item in range(first, last, BLOCK_V):
            w = await_tile(weights, visit)
            h = hidden_of(hiddens, weights, visit, 0, WHICH, STEPS, GROUPS, IS_RESIDENT)
            s = warpgroup_mma(h, w.permute((1, 0)), zero, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(1, deps=(s,))
            for step in range(1, STEPS):
                w = await_tile(weights, visit + 1)
                h = hidden_of(hiddens, weights, visit + 1, step, WHICH, STEPS, GROUPS, IS_RESIDENT)
                s = warpgroup_mma(h, w.permute((1, 0)), s, is_async=True)
                s = warpgroup_mma_wait(1, deps=(s,))
                leave_tile(weights, visit)
                visit += 1
            s = warpgroup_mma_wait(0, deps=(s,))
            leave_tile(weights, visit)
            visit += 1
            if IS_BACKWARD:
                scores = exp2(s * rate - shift[:, None]) * of_softmax[:, None]
                # Before the rounding, where the sum is small for a target that is well predicted.
                column = gl.arange(0, BLOCK_V, layout=gl.SliceLayout(0, layout))[None, :]
                scores = gl.where((own - item)[:, None] == column, scores + of_target[:, None], scores)
                place = gradients + row.to(gl.int64) * gradients_stride + gl.multiple_of(item - first_item, 16)
                gl.store(place[:, None] + column, scores.to(gradients.dtype.element_ty), mask=exists[:, None])
            else:
                if item + BLOCK_V > last:
                    s = without_missing(s, item, last)
                maximum, total = add_logits(s, maximum, total, rate)
        if IS_RESIDENT:
            leave_tile(hiddens, count * GROUPS + WHICH)
        count += 1
        if not IS_BACKWARD:
            part_maximum, part_sum = results
            place = part.to(gl.int64) * num_rows + row
            gl.store(part_maximum + place, maximum, mask=exists)
            gl.store(part_sum + place, total, mask=exists)


@gluon.jit(
    do_not_specialize=["num_rows", "row_blocks", "num_parts", "first_item", "last_item", "items_per_part"]
)
def linear_cross_entropy_steps_hopper_kernel(
    hidden, weight, part_maximum, part_sum, target, row_shift, grad_softmax, grad_target, gradients, num_rows,
    row_blocks, num_parts, first_item, last_item, items_per_part, gradients_stride, rate, STEPS: gl.constexpr,
    GROUPS: gl.constexpr, PLACES: gl.constexpr, ROWS_FIRST: gl.constexpr, IS_RESIDENT: gl.constexpr,
):  # fmt: skip
    """The same of wide hidden states; or the gradients of the logits of some items, where there is room for them."""
    weights = make_ring(weight, PLACES, GROUPS)
    hiddens = make_ring_of_steps(hidden, GROUPS, 1, GROUPS * (STEPS if IS_RESIDENT else PLACES))
    fence_async_shared()
    IS_BACKWARD: gl.constexpr = gradients is not None
    sizes = (num_rows, row_blocks, num_parts, first_item, last_item, items_per_part, gradients_stride, rate)
    if IS_BACKWARD:
        what = (hidden, weight, hiddens, weights, (gradients, gradients), (target, row_shift, grad_softmax, grad_target))
    else:
        what = (hidden, weight, hiddens, weights, (part_maximum, part_sum), (part_sum, part_sum, part_sum, part_sum))
    if GROUPS == 2:
        gl.warp_specialize(
            [(step_group, (what, sizes, 0, STEPS, ROWS_FIRST, GROUPS, IS_BACKWARD, IS_RESIDENT)), (step_group, (what, sizes, 1, STEPS, ROWS_FIRST, GROUPS, IS_BACKWARD, IS_RESIDENT)), (load_steps, (what, sizes, STEPS, ROWS_FIRST, GROUPS, IS_RESIDENT))],
            [4, 1], [240, 24],
        )  # fmt: skip
    elif GROUPS == 3:
        gl.warp_specialize(
            [
                (step_group, (what, sizes, 0, STEPS, ROWS_FIRST, GROUPS, IS_BACKWARD, IS_RESIDENT)),
                (step_group, (what, sizes, 1, STEPS, ROWS_FIRST, GROUPS, IS_BACKWARD, IS_RESIDENT)),
                (step_group, (what, sizes, 2, STEPS, ROWS_FIRST, GROUPS, IS_BACKWARD, IS_RESIDENT)),
                (load_steps, (what, sizes, STEPS, ROWS_FIRST, GROUPS, IS_RESIDENT)),
            ],
            [4, 4, 1], [160, 160, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (step_group, (what, sizes, 0, STEPS, ROWS_FIRST, GROUPS, IS_BACKWARD, IS_RESIDENT)),
                (step_group, (what, sizes, 1, STEPS, ROWS_FIRST, GROUPS, IS_BACKWARD, IS_RESIDENT)),
                (step_group, (what, sizes, 2, STEPS, ROWS_FIRST, GROUPS, IS_BACKWARD, IS_RESIDENT)),
                (step_group, (what, sizes, 3, STEPS, ROWS_FIRST, GROUPS, IS_BACKWARD, IS_RESIDENT)),
                (load_steps, (what, sizes, STEPS, ROWS_FIRST, GROUPS, IS_RESIDENT)),
            ],
            [4, 4, 4, 1], [112, 112, 112, 24],
        )  # fmt: skip


class Walk(NamedTuple):
    """Groups of warps, items of a tile, columns of a step (all where hidden states stay on chip), and places of the ring."""

    groups: int
    items: int
    step: int
    places: int
    resident: bool = True
    registers: bool = True
    rows_first: bool = True


def launch_forward(hidden, weight, part_maximum, part_sum, num_parts, items_per_part, temperature, walk):
    num_rows, num_items = hidden.shape[0], weight.shape[0]
    width = hidden.shape[1]
    row_blocks = triton.cdiv(num_rows, 64 * walk.groups)
    grid = (min(row_blocks * num_parts, gpu(hidden.device).multiprocessors),)
    rate = 1 / temperature * LOG2_E.value
    if walk.step == 0:
        columns = max(64, triton.next_power_of_2(width))
        linear_cross_entropy_forward_hopper_kernel[grid](
            rows_descriptor(hidden, 64, columns), rows_descriptor(weight, walk.items, columns), part_maximum, part_sum, num_rows,
            row_blocks, num_parts, num_items, items_per_part, rate, GROUPS=walk.groups, PLACES=walk.places,
            ROWS_FIRST=walk.rows_first, IN_REGISTERS=walk.registers, num_warps=4,
        )  # fmt: skip
    else:
        linear_cross_entropy_steps_hopper_kernel[grid](
            rows_descriptor(hidden, 64, walk.step), rows_descriptor(weight, walk.items, walk.step), part_maximum, part_sum,
            None, None, None, None, None, num_rows, row_blocks, num_parts, 0, num_items, items_per_part, 0, rate,
            STEPS=triton.cdiv(width, walk.step), GROUPS=walk.groups, PLACES=walk.places, ROWS_FIRST=walk.rows_first,
            IS_RESIDENT=walk.resident, num_warps=4,
        )  # fmt: skip


def launch_gradients(rows, weight, first, last, temperature, gradients, walk):
    hidden = rows.hidden
    num_rows, width = hidden.shape
    row_blocks = triton.cdiv(num_rows, 64 * walk.groups)
    num_parts = triton.cdiv(last - first, walk.items)
    grid = (min(row_blocks * num_parts, gpu(hidden.device).multiprocessors),)
    linear_cross_entropy_steps_hopper_kernel[grid](
        rows_descriptor(hidden, 64, walk.step), rows_descriptor(weight, walk.items, walk.step), None, None,
        rows.target, rows.shift, rows.grad_softmax, rows.grad_target, gradients, num_rows, row_blocks, num_parts, first, last,
        walk.items, gradients.stride(0), 1 / temperature * LOG2_E.value, STEPS=triton.cdiv(width, walk.step), GROUPS=walk.groups,
        PLACES=walk.places, ROWS_FIRST=walk.rows_first, IS_RESIDENT=False, num_warps=4,
    )  # fmt: skip


def parts_of(num_items, block, row_blocks, multiprocessors, most=32):
    steps = triton.cdiv(num_items, block)
    best = None
    for wanted in range(1, min(steps, most) + 1):
        per = triton.cdiv(steps, wanted)
        parts = triton.cdiv(steps, per)
        cost = triton.cdiv(row_blocks * parts, multiprocessors) * (per + 2)
        if best is None or cost < best[0]:
            best = (cost, parts, per * block)
    return best[1:]
