"""Linear cross-entropy's logits on Hopper: one warp loads, groups of four warps multiply and take exponentials.

A program, of which each multiprocessor runs one, takes units of work: a block of rows, 64 to each group, and a part of the items.
Its loading warp sends tiles of weights by TMA through a ring of places in shared memory (`ring.py`), which all groups read, so
that an item crosses the L2 once for all rows of a program.

* *Up to 256 columns* (`walk_group`) a group keeps its hidden states in registers for a whole part, as an operand of the products,
  which halves what these read from shared memory. It has two accumulators: while it takes the exponentials of one tile, the
  product of the next runs. What it does with a tile is forward's maximum and sum, or a filter's mark.
* *Wider ones* (`step_group`) come in steps of 64 columns together with the weights'. Tiles are 64 x 256 for each group, whose
  accumulator is half of its registers, and one group's exponentials run beside the products of the other. What it does with a
  tile is either forward's maximum and sum or backward's gradients of the logits, which go to a buffer.

Rows and columns past the end are zeros by TMA. Ignored rows are multiplied too; nothing of theirs is read afterwards.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
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

from jagged.ops._shared.launch import Launcher
from jagged.ops._shared.matrices import balanced_parts, gpu
from jagged.ops._shared.ring import await_tile, leave_tile, make_ring, rows_descriptor, send_tile
from jagged.ops._shared.sizes import cdiv, next_power_of_2
from jagged.ops.cross_entropy.hopper import WIDEST
from jagged.ops.cross_entropy.triton.arguments import Rows
from jagged.ops.cross_entropy.triton.logits import LOG2_E

# Rows of a group of warps.
GROUP_N = gl.constexpr(64)
# Of a wide tile: groups, items, columns of a step, and places of the ring.
WIDE_GROUPS, WIDE_ITEMS, WIDE_STEP, WIDE_PLACES = 2, 256, 64, 4


class Walk(NamedTuple):
    """Groups of warps, items of a tile, and places of the ring."""

    groups: int
    items: int
    places: int


# Columns of the tiles: the fastest that were measured, without a spill.
WALKS = {64: Walk(4, 64, 8), 128: Walk(2, 128, 4), 256: Walk(2, 128, 2)}
# What a unit costs beside its tiles, in tiles; and parts at most, each of which writes two numbers a row.
TILES_OF_A_START, MOST_PARTS = 2, 32


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
def take_tile(products, maximum, total, rate, mark):
    """Take products into the rows' maximum and sum; or mark a tile, of rows whose shift is in place of the maximum."""
    if mark is None:
        maximum, total = add_logits(products, maximum, total, rate)
    else:
        largest = gl.max(products * rate - maximum[:, None], 1)
        # Of NaN, which a row that has one is full of, the maximum over rows would lose sight.
        largest = gl.max(gl.where(largest == largest, largest, float("inf")), 0)
        gl.store(mark, gl.exp2(largest))
    return maximum, total


@gluon.jit
def without_missing(products, first, last):
    """Return products of the items from `first` on with -inf from `last` on."""
    item = first + gl.arange(0, products.type.shape[1], layout=gl.SliceLayout(0, products.type.layout))
    return gl.where((item < last)[None, :], products, float("-inf"))


@gluon.jit
def store_part(part_maximum, part_sum, part, row, num_rows, maximum, total):
    """Write what a unit has found of its rows."""
    place = part.to(gl.int64) * num_rows + row
    gl.store(part_maximum + place, maximum, mask=row < num_rows)
    gl.store(part_sum + place, total, mask=row < num_rows)


@gluon.jit
def end_of_part(first, items_per_part, end):
    """Return where a part that begins before `end` ends; the last one's length may lead past 2^31."""
    return first + gl.minimum(items_per_part, end - first)


@gluon.jit
def load_walks(what, sizes, GROUPS: gl.constexpr):
    """The loading warp: of each unit hidden states, then its tiles of weights, two and two."""
    hidden, weight, hiddens, weights = what
    _, row_blocks, num_parts, num_items, items_per_part, _ = sizes
    BLOCK_V: gl.constexpr = weight.block_type.shape[0]
    visit = num_items * 0
    count = num_items * 0
    for unit in range(gl.program_id(0), row_blocks * num_parts, gl.num_programs(0)):
        for group in gl.static_range(GROUPS):
            row = (unit % row_blocks * GROUPS + group) * GROUP_N
            send_tile(hidden, row, 0, hiddens, count * GROUPS + group)
        first = unit // row_blocks * items_per_part
        for item in range(first, end_of_part(first, items_per_part, num_items), 2 * BLOCK_V):
            send_tile(weight, item, 0, weights, visit)
            send_tile(weight, item + BLOCK_V, 0, weights, visit + 1)
            visit += 2
        count += 1


@gluon.jit
def walk_group(what, sizes, outputs, filtering, WHICH: gl.constexpr, GROUPS: gl.constexpr):
    """One group of warps: of rows `64 * WHICH ..` of each unit the logits' maximum and sum of exponentials, or marks of tiles."""
    _hidden, weight, hiddens, weights = what
    num_rows, row_blocks, num_parts, num_items, items_per_part, rate = sizes
    part_maximum, part_sum, marks = outputs
    BLOCK_V: gl.constexpr = weight.block_type.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_V, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    zero = gl.zeros([GROUP_N, BLOCK_V], gl.float32, layout)
    row_shift, grad_softmax, marks_stride = filtering
    visit = num_items * 0
    count = num_items * 0
    # Units that run together are of one part: all read the same weights.
    for unit in range(gl.program_id(0), row_blocks * num_parts, gl.num_programs(0)):
        part = unit // row_blocks
        first = part * items_per_part
        last = end_of_part(first, items_per_part, num_items)
        block = unit % row_blocks * GROUPS + WHICH
        row = block * GROUP_N + gl.arange(0, GROUP_N, layout=row_layout)
        total = gl.zeros([GROUP_N], gl.float32, row_layout)
        if marks is None:
            maximum = gl.full([GROUP_N], float("-inf"), gl.float32, row_layout)
            mark, next_mark = None, None
        else:
            maximum = gl.load(row_shift + row, mask=row < num_rows, other=float("inf"))
            maximum -= gl.log2(gl.abs(gl.load(grad_softmax + row, mask=row < num_rows, other=0.0)))
            mark = marks + block.to(gl.int64) * marks_stride + first // BLOCK_V
            next_mark = mark + 1
        h = await_tile(hiddens, count * GROUPS + WHICH).load(gl.DotOperandLayout(0, layout, 2))
        even = warpgroup_mma(h, await_tile(weights, visit).permute((1, 0)), zero, use_acc=False, is_async=True)
        even = warpgroup_mma_wait(0, deps=(even,))
        # Not before the first product: barriers do not wait for loads under way, and TMA could overtake them.
        leave_tile(hiddens, count * GROUPS + WHICH)
        leave_tile(weights, visit)
        weight_tile = await_tile(weights, visit + 1)
        for _ in range(first + 2 * BLOCK_V, last, 2 * BLOCK_V):
            odd = warpgroup_mma(h, weight_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
            maximum, total = take_tile(even, maximum, total, rate, mark)
            # The assembler moves a wait for products up to the last branch: this one has to stand below the exponentials.
            weight_tile = await_tile(weights, visit + 2)
            odd = warpgroup_mma_wait(0, deps=(odd,))
            leave_tile(weights, visit + 1)
            even = warpgroup_mma(h, weight_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
            maximum, total = take_tile(odd, maximum, total, rate, next_mark)
            weight_tile = await_tile(weights, visit + 3)
            even = warpgroup_mma_wait(0, deps=(even,))
            leave_tile(weights, visit + 2)
            visit += 2
            if marks is not None:
                mark += 2  # type: ignore[operator]
                next_mark += 2  # type: ignore[operator]
        odd = warpgroup_mma(h, weight_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
        odd = warpgroup_mma_wait(0, deps=(odd,))
        leave_tile(weights, visit + 1)
        visit += 2
        count += 1
        start = first + (gl.maximum(last - first, 1) - 1) // (2 * BLOCK_V) * (2 * BLOCK_V)
        maximum, total = take_tile(without_missing(even, start, last), maximum, total, rate, mark)
        maximum, total = take_tile(without_missing(odd, start + BLOCK_V, last), maximum, total, rate, next_mark)
        if marks is None:
            store_part(part_maximum, part_sum, part, row, num_rows, maximum, total)


@gluon.jit(do_not_specialize=["num_rows", "row_blocks", "num_parts", "num_items", "items_per_part", "marks_stride"])
def linear_cross_entropy_walk_hopper_kernel(
    hidden, weight, part_maximum, part_sum, row_shift, grad_softmax, marks, pays, num_rows, row_blocks, num_parts, num_items,
    items_per_part, marks_stride, rate, GROUPS: gl.constexpr, PLACES: gl.constexpr,
):  # fmt: skip
    """Of each row, over each part of the items, the logits' maximum and sum of exponentials relative to it; or marks of tiles.

    No marks where a filter does not pay.
    """
    if pays is not None:
        row_blocks *= gl.load(pays)
    hiddens = make_ring(hidden, GROUPS, 1)
    weights = make_ring(weight, PLACES, GROUPS)
    fence_async_shared()
    what = (hidden, weight, hiddens, weights)
    sizes = (num_rows, row_blocks, num_parts, num_items, items_per_part, rate)
    outputs = (part_maximum, part_sum, marks)
    filtering = (row_shift, grad_softmax, marks_stride)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (walk_group, (what, sizes, outputs, filtering, 0, GROUPS)),
                (walk_group, (what, sizes, outputs, filtering, 1, GROUPS)),
                (load_walks, (what, sizes, GROUPS)),
            ],
            [4, 1], [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (walk_group, (what, sizes, outputs, filtering, 0, GROUPS)),
                (walk_group, (what, sizes, outputs, filtering, 1, GROUPS)),
                (walk_group, (what, sizes, outputs, filtering, 2, GROUPS)),
                (walk_group, (what, sizes, outputs, filtering, 3, GROUPS)),
                (load_walks, (what, sizes, GROUPS)),
            ],
            [4, 4, 4, 1], [112, 112, 112, 24],
        )  # fmt: skip


@gluon.jit
def send_step(hidden, weight, row, item, column, hiddens, weights, visit, GROUPS: gl.constexpr):
    """Copy some columns of hidden states and weights into the ring's next place as soon as all groups have left it."""
    PLACES: gl.constexpr = weights.full.shape[0]
    place = visit % PLACES
    full = weights.full.index(place)
    mbarrier.wait(weights.empty.index(place), (visit // PLACES & 1) ^ 1)
    mbarrier.expect(full, weight.block_type.nbytes + GROUPS * hidden.block_type.nbytes)
    for group in gl.static_range(GROUPS):
        source = [row + group * GROUP_N, column]
        tma.async_copy_global_to_shared(hidden, source, full, hiddens.index(place * GROUPS + group))
    tma.async_copy_global_to_shared(weight, [item, column], full, weights.tiles.index(place))


@gluon.jit
def load_steps(what, sizes, STEPS: gl.constexpr, GROUPS: gl.constexpr):
    """The loading warp: of each tile of each unit hidden states and weights, some columns after the other."""
    hidden, weight, hiddens, weights = what
    _, row_blocks, num_parts, first_item, last_item, items_per_part, _, _ = sizes
    BLOCK_V: gl.constexpr = weight.block_type.shape[0]
    STEP: gl.constexpr = weight.block_type.shape[1]
    visit = last_item * 0
    for unit in range(gl.program_id(0), row_blocks * num_parts, gl.num_programs(0)):
        row = unit // num_parts * (GROUPS * GROUP_N)
        first = first_item + unit % num_parts * items_per_part
        for item in range(first, end_of_part(first, items_per_part, last_item), BLOCK_V):
            for step in range(STEPS):
                send_step(hidden, weight, row, item, step * STEP, hiddens, weights, visit, GROUPS)
                visit += 1


@gluon.jit
def multiply(hiddens, weights, visit, zero, WHICH: gl.constexpr, STEPS: gl.constexpr, GROUPS: gl.constexpr):
    """Return the products of a group's rows and a tile of items, added up over the steps, and the next visit."""
    PLACES: gl.constexpr = weights.full.shape[0]
    tile = await_tile(weights, visit)
    h = hiddens.index(visit % PLACES * GROUPS + WHICH)
    products = warpgroup_mma(h, tile.permute((1, 0)), zero, use_acc=False, is_async=True)
    products = warpgroup_mma_wait(1, deps=(products,))
    for _ in range(1, STEPS):
        tile = await_tile(weights, visit + 1)
        h = hiddens.index((visit + 1) % PLACES * GROUPS + WHICH)
        products = warpgroup_mma(h, tile.permute((1, 0)), products, is_async=True)
        products = warpgroup_mma_wait(1, deps=(products,))
        leave_tile(weights, visit)
        visit += 1
    products = warpgroup_mma_wait(0, deps=(products,))
    leave_tile(weights, visit)
    return products, visit + 1


@gluon.jit
def step_group(
    what, sizes, outputs, rows, WHICH: gl.constexpr, STEPS: gl.constexpr, GROUPS: gl.constexpr, IS_BACKWARD: gl.constexpr
):
    """One group of warps: of rows `64 * WHICH ..` of each unit maximum and sum, or the gradients of their logits."""
    _, weight, hiddens, weights = what
    num_rows, row_blocks, num_parts, first_item, last_item, items_per_part, gradients_stride, rate = sizes
    BLOCK_V: gl.constexpr = weight.block_type.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_V, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    zero = gl.zeros([GROUP_N, BLOCK_V], gl.float32, layout)
    visit = last_item * 0
    # Units that run together are of neighbouring rows and parts: of chunks all weights stay in the L2.
    for unit in range(gl.program_id(0), row_blocks * num_parts, gl.num_programs(0)):
        part = unit % num_parts
        row = (unit // num_parts * GROUPS + WHICH) * GROUP_N + gl.arange(0, GROUP_N, layout=row_layout)
        exists = row < num_rows
        first = first_item + part * items_per_part
        last = end_of_part(first, items_per_part, last_item)
        if IS_BACKWARD:
            target, row_shift, grad_softmax, grad_target = rows
            own = gl.load(target + row, mask=exists, other=-1)
            shift = gl.load(row_shift + row, mask=exists, other=float("inf"))
            of_softmax = gl.load(grad_softmax + row, mask=exists, other=0.0)
            of_target = gl.load(grad_target + row, mask=exists, other=0.0)
        maximum = gl.full([GROUP_N], float("-inf"), gl.float32, row_layout)
        total = gl.zeros([GROUP_N], gl.float32, row_layout)
        for item in range(first, last, BLOCK_V):
            products, visit = multiply(hiddens, weights, visit, zero, WHICH, STEPS, GROUPS)
            if IS_BACKWARD:
                column = gl.arange(0, BLOCK_V, layout=gl.SliceLayout(0, layout))[None, :]
                scores = exp2(products * rate - shift[:, None]) * of_softmax[:, None]
                # Before the rounding, where the sum is small for a target that is well predicted.
                scores = gl.where((own - item)[:, None] == column, scores + of_target[:, None], scores)
                # The buffer has room for whole tiles, so that columns need no mask.
                place = outputs[0] + row.to(gl.int64) * gradients_stride + gl.multiple_of(item - first_item, 16)
                gl.store(place[:, None] + column, scores.to(outputs[0].dtype.element_ty), mask=exists[:, None])
            else:
                if item + BLOCK_V > last:
                    products = without_missing(products, item, last)
                maximum, total = add_logits(products, maximum, total, rate)
        if not IS_BACKWARD:
            store_part(outputs[0], outputs[1], part, row, num_rows, maximum, total)


@gluon.jit(do_not_specialize=["num_rows", "row_blocks", "num_parts", "first_item", "last_item", "items_per_part"])
def linear_cross_entropy_steps_hopper_kernel(
    hidden, weight, part_maximum, part_sum, target, row_shift, grad_softmax, grad_target, gradients, num_rows, row_blocks,
    num_parts, first_item, last_item, items_per_part, gradients_stride, rate, STEPS: gl.constexpr, PLACES: gl.constexpr,
):  # fmt: skip
    """The same of wide hidden states; or gradients of the logits of items `first_item .. last_item`, if there is a buffer."""
    GROUPS: gl.constexpr = 2
    IS_BACKWARD: gl.constexpr = gradients is not None
    weights = make_ring(weight, PLACES, GROUPS)
    of_steps: gl.constexpr = [PLACES * GROUPS] + hidden.block_type.shape  # noqa: RUF005
    hiddens = gl.allocate_shared_memory(hidden.dtype, of_steps, hidden.layout)
    fence_async_shared()
    what = (hidden, weight, hiddens, weights)
    sizes = (num_rows, row_blocks, num_parts, first_item, last_item, items_per_part, gradients_stride, rate)
    if IS_BACKWARD:
        outputs, rows = (gradients,), (target, row_shift, grad_softmax, grad_target)
    else:
        outputs, rows = (part_maximum, part_sum), ()  # type: ignore[assignment]
    gl.warp_specialize(
        [
            (step_group, (what, sizes, outputs, rows, 0, STEPS, GROUPS, IS_BACKWARD)),
            (step_group, (what, sizes, outputs, rows, 1, STEPS, GROUPS, IS_BACKWARD)),
            (load_steps, (what, sizes, STEPS, GROUPS)),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip


_launch_walk = Launcher(linear_cross_entropy_walk_hopper_kernel)
_launch_steps = Launcher(linear_cross_entropy_steps_hopper_kernel)


def walk_of(width: int, *, marks: bool = False) -> Walk:
    """Return how hidden states of at most `WIDEST` columns are walked, by forward or for marks."""
    columns = min(columns for columns in WALKS if width <= columns)
    # Marks of four groups spill.
    return WALKS[max(128, columns) if marks else columns]


def _parts_of(num_rows: int, num_items: int, groups: int, block: int, device: torch.device) -> tuple[int, int, int, int]:
    """Return blocks of rows, parts of the items and their length, and how many programs take them."""
    row_blocks, multiprocessors = cdiv(num_rows, GROUP_N.value * groups), gpu(device).multiprocessors
    most = max(MOST_PARTS, cdiv(multiprocessors, row_blocks))
    num_parts, tiles = balanced_parts(cdiv(num_items, block), row_blocks, multiprocessors, TILES_OF_A_START, most)
    return row_blocks, num_parts, tiles * block, min(row_blocks * num_parts, multiprocessors)


def logits_in_parts(hidden: Tensor, weight: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the maximum of the logits, in powers of two, and the sum of exponentials relative to it: `[parts, N]` float32."""
    (num_rows, width), num_items = hidden.shape, weight.shape[0]
    walk, rate = walk_of(width) if width <= WIDEST else None, LOG2_E.value / temperature
    groups, block = (WIDE_GROUPS, WIDE_ITEMS) if walk is None else (walk.groups, 2 * walk.items)
    row_blocks, num_parts, items_per_part, programs = _parts_of(num_rows, num_items, groups, block, hidden.device)
    # Each by itself begins at 16 bytes, whatever the number of rows.
    part_maximum = hidden.new_empty(num_parts, num_rows, dtype=torch.float32)
    part_sum = torch.empty_like(part_maximum)
    if walk is None:
        _launch_steps(
            (programs,),
            rows_descriptor(hidden, GROUP_N.value, WIDE_STEP), rows_descriptor(weight, WIDE_ITEMS, WIDE_STEP), part_maximum,
            part_sum, None, None, None, None, None, num_rows, row_blocks, num_parts, 0, num_items, items_per_part, 0, rate,
            STEPS=cdiv(width, WIDE_STEP), PLACES=WIDE_PLACES, num_warps=4,
        )  # fmt: skip
    else:
        columns = max(64, next_power_of_2(width))
        _launch_walk(
            (programs,),
            rows_descriptor(hidden, GROUP_N.value, columns), rows_descriptor(weight, walk.items, columns), part_maximum,
            part_sum, None, None, None, None, num_rows, row_blocks, num_parts, num_items, items_per_part, 0, rate,
            GROUPS=walk.groups, PLACES=walk.places, num_warps=4,
        )  # fmt: skip
    return part_maximum, part_sum


def mark_tiles(rows: Rows, weight: Tensor, temperature: float, marks: Tensor, pays: Tensor | None) -> None:
    """Write the largest gradient of a logit of each tile of 64 rows and a walk's items of `weight`, infinite for NaN.

    Softmax alone counts, not the targets. `marks` begins at the first item and has a row for each tile of rows, whole
    programs' of them, and room for whole pairs of tiles. Where `pays` holds 0, nothing is written.
    """
    (num_rows, width), walk = rows.hidden.shape, walk_of(rows.hidden.shape[1], marks=True)
    row_blocks, num_parts, items_per_part, programs = _parts_of(
        num_rows, weight.shape[0], walk.groups, 2 * walk.items, weight.device
    )
    columns = max(64, next_power_of_2(width))
    hidden, items = rows_descriptor(rows.hidden, GROUP_N.value, columns), rows_descriptor(weight, walk.items, columns)
    _launch_walk(
        (programs,),
        hidden, items, None, None, rows.shift, rows.grad_softmax, marks, pays, num_rows, row_blocks, num_parts, weight.shape[0],
        items_per_part, marks.stride(0), LOG2_E.value / temperature, GROUPS=walk.groups, PLACES=walk.places, num_warps=4,
    )  # fmt: skip


def logit_gradients(rows: Rows, weight: Tensor, first: int, last: int, temperature: float, gradients: Tensor) -> None:
    """Write the gradients of the logits of items `first .. last` into `gradients` `[N, C]`, C a multiple of `WIDE_ITEMS`."""
    num_rows, width = rows.hidden.shape
    row_blocks, num_parts = cdiv(num_rows, GROUP_N.value * WIDE_GROUPS), cdiv(last - first, WIDE_ITEMS)
    grid = (min(row_blocks * num_parts, gpu(weight.device).multiprocessors),)
    _launch_steps(
        grid,
        rows_descriptor(rows.hidden, GROUP_N.value, WIDE_STEP), rows_descriptor(weight, WIDE_ITEMS, WIDE_STEP), None, None,
        rows.target, rows.shift, rows.grad_softmax, rows.grad_target, gradients, num_rows, row_blocks, num_parts, first, last,
        WIDE_ITEMS, gradients.stride(0), LOG2_E.value / temperature, STEPS=cdiv(width, WIDE_STEP), PLACES=WIDE_PLACES,
        num_warps=4,
    )  # fmt: skip
