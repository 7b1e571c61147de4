"""Attention of long samples on Hopper: one warp loads, two groups of four warps multiply and weigh.

A program, of which each multiprocessor runs one, takes tiles of 128 queries of one head from a counter until none is left. Its
loading warp sends a tile's queries, 64 to each group, and then its keys and values by TMA, 128 rows at a time, through two rings
of places in shared memory. Both groups read the same place, so that a row crosses the L2 once for 128 queries.
A group begins the product of queries and one tile of keys together with that of weights and the values of the tile before it,
`S_j = Q K_j^T` and `O += P_(j-1) V_(j-1)`, and turns S_j into weights P_j, by a running softmax or by SiLU, while the second
still runs.

The protocol is that of `_shared.ring`. The place for queries has both barriers too, and visits are tiles.
"""

from __future__ import annotations

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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from jagged.ops._shared.launch import Launcher
from jagged.ops._shared.matrices import gpu
from jagged.ops._shared.ring import await_left, await_tile, descriptor, leave_tile, make_ring
from jagged.ops.attention.hopper.visits import announce, number_of_visits, row_of_visit, visited
from jagged.ops.attention.spec import Inputs, Options, Outputs
from jagged.ops.attention.triton.launch import sight_of
from jagged.ops.attention.triton.masks import Sight, key_ranges, visible
from jagged.ops.attention.triton.samples import sample_of
from jagged.ops.attention.triton.scores import LN_2, LOG2_E, pointwise_factor

# Rows of a sample end where this coordinate does; more than any tensor has.
ROWS = gl.constexpr(2**30)
# Queries of a group and of a tile, keys of a tile, columns of both, and places of a ring.
GROUP_M = gl.constexpr(64)
BLOCK_M = gl.constexpr(128)
BLOCK_N = gl.constexpr(128)
WIDTH = gl.constexpr(128)
STAGES = gl.constexpr(3)
# Of a tile: its sample's first row, numbers of its rows and of the others, its own first row in the sample, its head, how many
# keys the history has, and how many visits there are.
FIELDS = gl.constexpr(7)
# Of rows of 128 columns of 16 bits, in shared memory.
LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=5)
LOWEST = gl.constexpr(-3.4028234663852886e38)


def ragged_descriptor(rows: Tensor, block: int) -> TensorDescriptor:
    """Describe `[S, H, D]` so that a load of `block` rows of one head ends at a sample's last row, with zeros after it.

    TMA cuts off at the tensor's shape alone. Here row i of a sample of length L has coordinate `ROWS - L + i` of a dimension of
    ROWS, so that the cut falls right after row L - 1. The first two dimensions lead back: one by the sample's end, the other by
    ROWS, as a stride of `2^34 - row` elements does whose product with `ROWS = 2^30` wraps around to `-ROWS * row`.
    """
    row_stride, head_stride, _ = rows.stride()
    shape = [ROWS.value + 1, ROWS.value + 1, rows.shape[1], ROWS.value, rows.shape[2]]
    strides = [2**34 - row_stride, row_stride, head_stride, row_stride, 1]
    return descriptor(rows, shape, strides, [1, 1, 1, block, WIDTH.value], LAYOUT)


@gluon.jit
def copy_rows(source, end, length, first, head, barrier, place):
    """Begin to copy rows `first ..` of the sample that ends before row `end` of its tensor."""
    tma.async_copy_global_to_shared(source, [ROWS, end, head, ROWS - length + first, 0], barrier, place)


@gluon.jit
def send_rows(source, end, length, first, head, ring, visit):
    """Copy rows into a ring's next place as soon as both groups have left it."""
    place = visit % ring.full.shape[0]
    await_left(ring, visit)
    mbarrier.expect(ring.full.index(place), source.block_type.nbytes)
    copy_rows(source, end, length, first, head, ring.full.index(place), ring.tiles.index(place))


@gluon.jit
def ring_tile(ring, index):
    """Return one of a ring's tiles."""
    return ring.tiles.index(index).reshape([ring.tiles.shape[4], WIDTH])


@gluon.jit
def visited_rows(ring, visit):
    """Return what a visit has brought, `[BLOCK, WIDTH]`."""
    return ring_tile(ring, visit % ring.full.shape[0])


@gluon.jit
def find_sample(offsets, index, num_samples):
    """Return the sample that owns tile `index` of the list of `find_tile`; each step looks at 32 places at once."""
    low = index * 0
    width = low + num_samples
    while width > 1:
        step = (width + 31) // 32
        place = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0])) * step
        first = gl.load(offsets + low + place, mask=place < width, other=0) // BLOCK_M + low + place
        passed = gl.sum(((place < width) & (first <= index)).to(gl.int32), 0)
        passed_by = (gl.maximum(passed, 1) - 1) * step
        low += passed_by
        width = gl.minimum(step, width - passed_by)
    return low


@gluon.jit
def load_sample(offsets, sample, total):
    """Return first row and length, held inside `[0, total]` whatever the offsets say."""
    start = gl.minimum(gl.maximum(gl.load(offsets + sample), 0), total).to(gl.int32)
    end = gl.minimum(gl.maximum(gl.load(offsets + sample + 1), start), total).to(gl.int32)
    return start, end - start


@gluon.jit
def find_tile(index, num_tiles, offsets, other_offsets, num_samples, total, other_total):
    """Return what the loading warp has to know of a tile: its sample and head, of the sample first row, length, the same of the
    others that the tile meets, and the tile's own first row in the sample, which lies past its end where the list has a gap."""
    sample = find_sample(offsets, index % num_tiles, num_samples)
    start, length = load_sample(offsets, sample, total)
    other_start, other_length = load_sample(other_offsets, sample, other_total)
    first = (index % num_tiles - start // BLOCK_M - sample) * BLOCK_M
    return sample, index // num_tiles, start, length, other_start, other_length, gl.where(first < 0, length, first)


@gluon.jit
def write_fields(fields, start, length, other_length, first, head, history, visits):
    """Tell the groups of a tile."""
    for i in gl.static_range(FIELDS):
        field = (start, length, other_length, first, head, history, visits)[i]
        fields.index(i).store(gl.full([1], 0, gl.int32, gl.BlockedLayout([1], [32], [1], [0])) + field)


@gluon.jit
def end_groups(fields, own, tile):
    """Tell of a tile whose sample has no rows: there are no more."""
    await_left(own, tile)
    fields.index(1).store(gl.full([1], 0, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    mbarrier.arrive(own.full.index(0), count=1)


@gluon.jit
def load_warp(rows, lists, counts, sight, room, IS_CAUSAL: gl.constexpr, GROUP: gl.constexpr):
    """Of each tile send fields and queries, then keys and values; at last a tile of a sample that has no queries."""
    query, key, value = rows
    offsets, key_offsets, counter = lists
    num_samples, total, key_total, num_heads = counts
    fields, words, queries, keys, values = room
    num_tiles = total // BLOCK_M + num_samples
    index = gl.atomic_add(counter, 1, sem="relaxed")
    tile = index * 0
    visit = index * 0
    while index < num_tiles * num_heads:
        sample, head, start, length, key_start, key_length, first_query = find_tile(
            index, num_tiles, offsets, key_offsets, num_samples, total, key_total
        )
        key_end = key_start + key_length
        if first_query < length:
            known = sample_of(sample, head, start, length, key_start, key_length, sight.num_targets)
            ranges = key_ranges(first_query, known, sight, IS_CAUSAL, BLOCK_M, BLOCK_N)
            visits = number_of_visits(ranges, BLOCK_N)
            first_key = row_of_visit(0, ranges, True, BLOCK_N)
            announce(words, keys, visit, first_key, 0, ranges)
            send_rows(key, key_end, key_length, first_key, head // GROUP, keys, visit)
            await_left(queries, tile)
            write_fields(fields, start, length, key_length, first_query, head, known.history, visits)
            mbarrier.expect(queries.full.index(0), 2 * query.block_type.nbytes)
            for i in gl.static_range(2):
                row = first_query + i * GROUP_M
                copy_rows(query, start + length, length, row, head, queries.full.index(0), queries.tiles.index(i))
            # Groups need a tile's keys before the values of the tile that they saw before it.
            for j in range(1, visits):
                next_key = row_of_visit(j, ranges, True, BLOCK_N)
                announce(words, keys, visit + 1, next_key, j, ranges)
                send_rows(key, key_end, key_length, next_key, head // GROUP, keys, visit + 1)
                send_rows(value, key_end, key_length, first_key, head // GROUP, values, visit)
                first_key = next_key
                visit += 1
            send_rows(value, key_end, key_length, first_key, head // GROUP, values, visit)
            visit += 1
            tile += 1
        index = gl.atomic_add(counter, 1, sem="relaxed")
    end_groups(fields, queries, tile)


@gluon.jit
def field_of(fields, INDEX: gl.constexpr):
    """Read a number that the loading warp has written."""
    return gl.sum(fields.index(INDEX).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def addresses_of(layout: gl.constexpr, start, first, length, num_heads, head, HEAD_DIM: gl.constexpr):
    """Return where a group's rows and columns stand in `[S, H, D]`, and which of them are there."""
    rows = first + gl.arange(0, GROUP_M, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
    places = ((start + rows).to(gl.int64) * num_heads + head)[:, None] * HEAD_DIM + columns[None, :]
    return places, (rows < length)[:, None] & (columns < HEAD_DIM)[None, :]


@gluon.jit
def weigh(
    s, largest, weight, factor, first_position, first_key, may_hide, history, sight, IS_CAUSAL: gl.constexpr,
    IS_POINTWISE: gl.constexpr,
):  # fmt: skip
    """Take a tile's scores into a running softmax: weights, by what earlier ones shrink, largest score, sum of weights.

    Pointwise weights need none of the last three. `SiLU(2 h) = h tanh(h) + h` is exactly 0 for a hidden key, whose h is 0.
    """
    layout: gl.constexpr = s.type.layout
    if may_hide:
        keys = (first_key + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout)))[None, :]
        positions = (first_position + gl.arange(0, GROUP_M, layout=gl.SliceLayout(1, layout)))[:, None]
        seen = visible(positions, keys, history, sight, IS_CAUSAL)
        s = gl.where(seen, s, 0.0 if IS_POINTWISE else float("-inf"))
    if IS_POINTWISE:
        halves = s * factor
        tanh = gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [halves], gl.float32, is_pure=True, pack=1)
        return halves * tanh + halves, largest, largest, weight
    else:
        now_largest = gl.maximum(largest, gl.max(s, 1) * factor)
        correction = gl.exp2(largest - now_largest)
        p = gl.exp2(s * factor - now_largest[:, None])
        return p, correction, now_largest, weight * correction + gl.sum(p, 1)


@gluon.jit
def weigh_group(arguments, WHICH: gl.constexpr, IS_CAUSAL: gl.constexpr, IS_POINTWISE: gl.constexpr, HEAD_DIM: gl.constexpr):
    """One group of warps: output and log-sum-exp of rows `64 * WHICH ..` of each tile, until one has no queries."""
    output, lse, total, num_heads, factor, normalizer, sight, room = arguments
    fields, words, queries, keys, values = room
    dtype: gl.constexpr = output.dtype.element_ty
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    s_row: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_row: gl.constexpr = gl.SliceLayout(1, o_layout)
    zero = gl.zeros([GROUP_M, BLOCK_N], gl.float32, s_layout)
    q = ring_tile(queries, WHICH)
    tile = total * 0
    visit = total * 0
    mbarrier.wait(queries.full.index(0), 0)
    length = field_of(fields, 1)
    while length > 0:
        start = field_of(fields, 0)
        key_length = field_of(fields, 2)
        first_query = field_of(fields, 3)
        head = field_of(fields, 4)
        history = key_length if sight.num_targets is None else field_of(fields, 5)
        visits = field_of(fields, 6)
        first_query += GROUP_M * WHICH
        position = first_query + key_length - length
        # Finite, so that rows which see none of a tile's keys have weights of 0 there.
        largest = gl.full([GROUP_M], LOWEST, gl.float32, s_row)
        weight = gl.zeros([GROUP_M], gl.float32, s_row)

        await_tile(keys, visit)
        first_key, may_hide = visited(words, keys, visit)
        s = warpgroup_mma(q, visited_rows(keys, visit).permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        leave_tile(keys, visit)
        p, _, largest, weight = weigh(
            s, largest, weight, factor, position, first_key, may_hide, history, sight, IS_CAUSAL, IS_POINTWISE
        )
        p = gl.convert_layout(p.to(dtype), p_layout)
        o = gl.zeros([GROUP_M, WIDTH], gl.float32, o_layout)
        await_tile(values, visit)
        for _ in range(1, visits):
            await_tile(keys, visit + 1)
            first_key, may_hide = visited(words, keys, visit + 1)
            s = warpgroup_mma(q, visited_rows(keys, visit + 1).permute((1, 0)), zero, use_acc=False, is_async=True)
            o = warpgroup_mma(p, visited_rows(values, visit), o, is_async=True)
            s = warpgroup_mma_wait(1, deps=(s,))
            leave_tile(keys, visit + 1)
            p, correction, largest, weight = weigh(
                s, largest, weight, factor, position, first_key, may_hide, history, sight, IS_CAUSAL, IS_POINTWISE
            )
            # The assembler moves a wait for products up to the last branch: this one has to stand below the weights.
            await_tile(values, visit + 1)
            o = warpgroup_mma_wait(0, deps=(o,))
            leave_tile(values, visit)
            if not IS_POINTWISE:
                o = o * gl.convert_layout(correction, o_row)[:, None]
            p = gl.convert_layout(p.to(dtype), p_layout)
            visit += 1
        mbarrier.arrive(queries.empty.index(0), count=1)
        o = warpgroup_mma(p, visited_rows(values, visit), o, is_async=True)
        o = warpgroup_mma_wait(0, deps=(o,))
        leave_tile(values, visit)
        visit += 1

        if IS_POINTWISE:
            o = o * pointwise_factor(normalizer, key_length)
        else:
            # A query that sees no key has an output of zeros and a log-sum-exp of -inf.
            divisor = gl.where(weight == 0.0, 1.0, weight)
            o = o * gl.convert_layout(1.0 / divisor, o_row)[:, None]
        places, is_there = addresses_of(o_layout, start, first_query, length, num_heads, head, HEAD_DIM)
        gl.store(output + places, o.to(dtype), mask=is_there)
        if not IS_POINTWISE:
            rows = first_query + gl.arange(0, GROUP_M, layout=s_row)
            natural = gl.where(weight == 0.0, float("-inf"), largest * LN_2 + gl.log(divisor))
            gl.store(lse + head.to(gl.int64) * total + start + rows, natural, mask=rows < length)
        tile += 1
        mbarrier.wait(queries.full.index(0), tile & 1)
        length = field_of(fields, 1)


@gluon.jit(do_not_specialize=["num_samples", "total", "key_total", "num_heads"])
def attention_forward_hopper_kernel(
    query, key, value, offsets, key_offsets, num_targets, output, lse, counter, num_samples, total, key_total, num_heads, scale,
    normalizer, window, reach, num_contextual, prefix,
    IS_CAUSAL: gl.constexpr, IS_POINTWISE: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp, `O = softmax(scale * Q K^T) V`, of all tiles of queries.

    Or pointwise, `O = SiLU(scale * Q K^T) V / normalizer`, by a sample's number of keys where that is 0, and nothing in `lse`.
    """
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    fields = gl.allocate_shared_memory(gl.int32, [FIELDS, 1], flat)
    words = gl.allocate_shared_memory(gl.int32, [STAGES, 1], flat)
    queries = make_ring(query, 1, 2, TILES=2)
    keys = make_ring(key, STAGES, 2)
    values = make_ring(value, STAGES, 2)
    fence_async_shared()
    rows = query, key, value
    lists = offsets, key_offsets, counter
    counts = num_samples, total, key_total, num_heads
    sight = Sight(window, reach, num_contextual, prefix, num_targets)
    room = fields, words, queries, keys, values
    factor = scale * (0.5 if IS_POINTWISE else LOG2_E)
    sums = output, lse, total, num_heads, factor, normalizer, sight, room
    gl.warp_specialize(
        [
            (weigh_group, (sums, 0, IS_CAUSAL, IS_POINTWISE, HEAD_DIM)),
            (weigh_group, (sums, 1, IS_CAUSAL, IS_POINTWISE, HEAD_DIM)),
            (load_warp, (rows, lists, counts, sight, room, IS_CAUSAL, GROUP)),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip


_launch_forward = Launcher(attention_forward_hopper_kernel)


def forward(x: Inputs, o: Options) -> Outputs:
    """Launch `attention_forward_hopper_kernel` for what `supports` has nothing against."""
    total, heads, head_dim = x.q.shape
    num_samples = x.q_offsets.shape[0] - 1
    output = x.q.new_empty(*x.q.shape)
    lse = x.q.new_empty(*((0,) if o.pointwise else (heads, total)), dtype=torch.float32)
    _launch_forward(
        programs_for(x.q, num_samples),
        ragged_descriptor(x.q, GROUP_M.value), ragged_descriptor(x.k, BLOCK_N.value), ragged_descriptor(x.v, BLOCK_N.value),
        x.q_offsets, x.q_offsets if x.k_offsets is None else x.k_offsets, x.num_targets, output, lse,
        torch.zeros(1, dtype=torch.int32, device=x.q.device), num_samples, total, x.k.shape[0], heads, o.scale, o.normalizer,
        *sight_of(o).values(),
        IS_CAUSAL=o.causal, IS_POINTWISE=o.pointwise, GROUP=heads // x.k.shape[1], HEAD_DIM=head_dim, num_warps=4,
    )  # fmt: skip
    return Outputs(output, lse)


def programs_for(rows: Tensor, num_samples: int) -> tuple[int]:
    """Return as many programs as run at once, or fewer where there are fewer tiles."""
    tiles = (rows.shape[0] // BLOCK_M.value + num_samples) * rows.shape[1]
    return (min(tiles, gpu(rows.device).multiprocessors),)
