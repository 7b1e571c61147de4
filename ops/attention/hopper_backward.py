"""Gradients of attention of long samples on Hopper: one warp loads, groups of four warps multiply, each 64 rows of one tile.

The protocol is that of `hopper`: a persistent program takes tiles of `64 * GROUPS` rows from a counter, its loading warp streams
what a tile is multiplied with through rings in shared memory. A tile has two kinds of rows of its own, and meets two kinds of
others: queries and the gradients of their outputs meet keys and values for the gradients of queries, keys and values meet queries
and the gradients of outputs for the gradients of keys and values.

Of tile j a group begins the scores and the gradients of the weights, `S_j` and `dP_j`, right after what it adds to its sums for
tile j - 1; the latter are waited for first, so that a place is left, and registers are free, while `S_j` is computed.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton import language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from jagged.ops.attention.hopper import (
    LOG2_E,
    await_rows,
    copy_rows,
    field_of,
    find_sample,
    key_tiles,
    leave_rows,
    load_rows,
    load_sample,
    make_ring,
    ragged_descriptor,
)

# What the loading warp tells of a tile: first row and length of its own rows, length of the others, its first own row, its head.
FIELDS = gl.constexpr(5)


@gluon.jit
def query_tiles(first_key, query_length, key_length, IS_CAUSAL: gl.constexpr, BLOCK: gl.constexpr):
    """Return the first query that a tile of keys visits, and how many tiles from there, at least one."""
    first = 0
    if IS_CAUSAL:
        first = gl.maximum(first_key + query_length - key_length, 0) // BLOCK * BLOCK
    return first, gl.maximum((query_length - first + BLOCK - 1) // BLOCK, 1)


@gluon.jit
def load_statistics(statistics, first, length, visit, ring, STAGES: gl.constexpr, BLOCK: gl.constexpr):
    """Bring what is subtracted in each row into its ring's next place. Rows past the end weigh nothing."""
    log_sums, deltas, empty = ring
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    rows = first + gl.arange(0, BLOCK, layout=lanes)
    log_sum = gl.load(statistics + rows * 2, mask=rows < length, other=float("inf"))
    delta = gl.load(statistics + rows * 2 + 1, mask=rows < length, other=0.0)
    mbarrier.wait(empty.index(visit % STAGES), (visit // STAGES & 1) ^ 1)
    log_sums.index(visit % STAGES).store(log_sum)
    deltas.index(visit % STAGES).store(delta)
    # One lane announces what all have written.
    tl.debug_barrier()


@gluon.jit
def load_backward(
    arguments,
    OWNS_KEYS: gl.constexpr, IS_CAUSAL: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
    GROUPS: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, SECOND_STAGES: gl.constexpr,
):  # fmt: skip
    """The loading warp: for each tile its place and its own rows, and the others': keys from the last to the first, queries
    (of each head that shares the keys) from the first to the last, these with their statistics."""
    (
        first_own, second_own, first_other, second_other, offsets, other_offsets, statistics, counter, num_samples, num_heads,
        total, other_total, first_own_stride, second_own_stride, first_stride, second_stride,
        places, own_full, own_empty, first_tile, second_tile, first_ring, second_ring, rows_ring,
    ) = arguments  # fmt: skip
    OWN: gl.constexpr = 64 * GROUPS
    BYTES: gl.constexpr = BLOCK * HEAD_DIM * 2
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    num_tiles = total // OWN + num_samples
    index = gl.atomic_add(counter, 1, sem="relaxed")
    visit = index * 0
    turn = index * 0
    while index < num_tiles * num_heads:
        head = index // num_tiles
        sample = find_sample(offsets, index % num_tiles, num_samples, OWN)
        start, end = load_sample(offsets, sample, total)
        other_start, other_end = load_sample(other_offsets, sample, other_total)
        length = end - start
        other_length = other_end - other_start
        own = (index % num_tiles - start // OWN - sample) * OWN
        if (own >= 0) & (own < length):
            mbarrier.wait(own_empty, (turn & 1) ^ 1)
            for i in gl.static_range(FIELDS):
                field = (start, length, other_length, own, head)[i]
                places.index(i).store(gl.full([1], 0, gl.int32, one) + field)
            mbarrier.expect(own_full, 2 * OWN * HEAD_DIM * 2)
            for i in gl.static_range(GROUPS):
                copy_rows(first_own, end, length, own + i * 64, head * first_own_stride, own_full, first_tile.index(i))
                copy_rows(second_own, end, length, own + i * 64, head * second_own_stride, own_full, second_tile.index(i))
            if OWNS_KEYS:
                first, tiles = query_tiles(own, other_length, length, IS_CAUSAL, BLOCK)
                steps = tiles * GROUP
            else:
                tiles, _ = key_tiles(own, length, other_length, IS_CAUSAL, OWN, BLOCK)
                steps = tiles
            for j in range(steps):
                if OWNS_KEYS:
                    other_head = head * GROUP + j // tiles
                    row = first + j % tiles * BLOCK
                    source = statistics + (other_total.to(gl.int64) * other_head + other_start) * 2
                    load_statistics(source, row, other_length, visit, rows_ring, STAGES, BLOCK)
                else:
                    other_head = head // GROUP
                    row = (tiles - 1 - j) * BLOCK
                column = other_head * first_stride
                load_rows(first_other, other_end, other_length, row, column, visit, first_ring, STAGES, BYTES)
                column = other_head * second_stride
                load_rows(second_other, other_end, other_length, row, column, visit, second_ring, SECOND_STAGES, BYTES)
                visit += 1
            turn += 1
        index = gl.atomic_add(counter, 1, sem="relaxed")
    mbarrier.wait(own_empty, (turn & 1) ^ 1)
    places.index(1).store(gl.full([1], 0, gl.int32, one))
    mbarrier.arrive(own_full, count=1)


@gluon.jit
def begin(own, others, BLOCK: gl.constexpr, layout: gl.constexpr):
    """Begin the product of 64 own rows with others."""
    zero = gl.zeros([64, BLOCK], gl.float32, layout)
    return warpgroup_mma(own, others.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def seen_by_keys(p, first_key, first_position, BLOCK: gl.constexpr, layout: gl.constexpr):
    """Take their weight for keys from queries that stand before them."""
    if first_position < first_key + 63:
        keys = (first_key + gl.arange(0, 64, layout=gl.SliceLayout(1, layout)))[:, None]
        positions = (first_position + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, layout)))[None, :]
        p = gl.where(keys <= positions, p, 0.0)
    return p


@gluon.jit
def sum_dkv(
    arguments,
    WHICH: gl.constexpr, IS_CAUSAL: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr,
    TAKE_TURNS: gl.constexpr,
):  # fmt: skip
    """One group of warps: rows `64 * WHICH ..` of each tile of keys. Scores are held transposed."""
    (
        grad_key, grad_value, scale, row_stride, places, own_full, own_empty, k_tile, v_tile, q_ring, o_ring, rows_ring, turns
    ) = arguments  # fmt: skip
    log_sums, deltas, rows_empty = rows_ring
    BLOCK: gl.constexpr = 64
    dtype: gl.constexpr = grad_key.dtype.element_ty
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    s_column: gl.constexpr = gl.SliceLayout(0, s_layout)
    factor = scale * LOG2_E
    k = k_tile.index(WHICH).reshape([64, HEAD_DIM])
    v = v_tile.index(WHICH).reshape([64, HEAD_DIM])
    mbarrier.wait(own_full, 0)
    length = field_of(places, 1)
    visit = length * 0
    turn = length * 0
    passed = length * 0
    while length > 0:
        key_start = field_of(places, 0)
        query_length = field_of(places, 2)
        first_key = field_of(places, 3) + 64 * WHICH
        head = field_of(places, 4)
        shift = length - query_length
        first, tiles = query_tiles(first_key - 64 * WHICH, query_length, length, IS_CAUSAL, BLOCK)

        q = await_rows(q_ring, visit, STAGES, BLOCK, HEAD_DIM)
        o = await_rows(o_ring, visit, STAGES, BLOCK, HEAD_DIM)
        s = begin(k, q, BLOCK, s_layout)
        dp = begin(v, o, BLOCK, s_layout)
        s = warpgroup_mma_wait(1, deps=(s,))
        log_sum = log_sums.index(visit % STAGES).load(s_column)
        p = gl.exp2(s * factor - log_sum[None, :])
        if IS_CAUSAL:
            p = seen_by_keys(p, first_key, first + shift, BLOCK, s_layout)
        dp = warpgroup_mma_wait(0, deps=(dp,))
        ds = p * (dp - deltas.index(visit % STAGES).load(s_column)[None, :])
        mbarrier.arrive(rows_empty.index(visit % STAGES), count=1)
        p16 = gl.convert_layout(p.to(dtype), p_layout)
        ds16 = gl.convert_layout(ds.to(dtype), p_layout)
        dk = gl.zeros([64, HEAD_DIM], gl.float32, o_layout)
        dv = gl.zeros([64, HEAD_DIM], gl.float32, o_layout)
        for j in range(1, tiles * GROUP):
            q = await_rows(q_ring, visit + 1, STAGES, BLOCK, HEAD_DIM)
            o = await_rows(o_ring, visit + 1, STAGES, BLOCK, HEAD_DIM)
            if TAKE_TURNS:
                # The first group's first turn is free.
                mbarrier.wait(turns.index(WHICH), (passed & 1) ^ (1 - WHICH))
            dv_next = warpgroup_mma(p16, o_ring[0].index(visit % STAGES).reshape([BLOCK, HEAD_DIM]), dv, is_async=True)
            dk_next = warpgroup_mma(ds16, q_ring[0].index(visit % STAGES).reshape([BLOCK, HEAD_DIM]), dk, is_async=True)
            s = begin(k, q, BLOCK, s_layout)
            dv, dk = warpgroup_mma_wait(1, deps=(dv_next, dk_next))
            dp = begin(v, o, BLOCK, s_layout)
            if TAKE_TURNS:
                mbarrier.arrive(turns.index(1 - WHICH), count=1)
                passed += 1
            leave_rows(o_ring, visit, STAGES)
            leave_rows(q_ring, visit, STAGES)
            visit += 1
            s = warpgroup_mma_wait(1, deps=(s,))
            log_sum = log_sums.index(visit % STAGES).load(s_column)
            p = gl.exp2(s * factor - log_sum[None, :])
            if IS_CAUSAL:
                tile = j
                if GROUP > 1:
                    tile = j % tiles
                p = seen_by_keys(p, first_key, first + tile * BLOCK + shift, BLOCK, s_layout)
            # The assembler moves a wait for products up to the last branch: this one has to stand below the weights.
            await_rows(o_ring, visit, STAGES, BLOCK, HEAD_DIM)
            dp = warpgroup_mma_wait(0, deps=(dp,))
            ds = p * (dp - deltas.index(visit % STAGES).load(s_column)[None, :])
            mbarrier.arrive(rows_empty.index(visit % STAGES), count=1)
            p16 = gl.convert_layout(p.to(dtype), p_layout)
            ds16 = gl.convert_layout(ds.to(dtype), p_layout)
        mbarrier.arrive(own_empty, count=1)
        dv_next = warpgroup_mma(p16, o_ring[0].index(visit % STAGES).reshape([BLOCK, HEAD_DIM]), dv, is_async=True)
        dk_next = warpgroup_mma(ds16, q_ring[0].index(visit % STAGES).reshape([BLOCK, HEAD_DIM]), dk, is_async=True)
        dv, dk = warpgroup_mma_wait(0, deps=(dv_next, dk_next))
        leave_rows(o_ring, visit, STAGES)
        leave_rows(q_ring, visit, STAGES)
        visit += 1

        rows = first_key + gl.arange(0, 64, layout=gl.SliceLayout(1, o_layout))
        columns = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, o_layout))
        places_of_rows = (key_start + rows).to(gl.int64)[:, None] * row_stride + head * HEAD_DIM + columns[None, :]
        gl.store(grad_value + places_of_rows, dv.to(dtype), mask=(rows < length)[:, None])
        gl.store(grad_key + places_of_rows, (dk * scale).to(dtype), mask=(rows < length)[:, None])
        turn += 1
        mbarrier.wait(own_full, turn & 1)
        length = field_of(places, 1)


@gluon.jit
def seen_by_queries(ds, position, key_length, first_key, IS_CAUSAL: gl.constexpr, BLOCK: gl.constexpr, layout: gl.constexpr):
    """Clear the gradients of scores of keys past the end, or after a query's position."""
    keys = (first_key + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, layout)))[None, :]
    if IS_CAUSAL:
        last = gl.minimum(position + gl.arange(0, 64, layout=gl.SliceLayout(1, layout)), key_length - 1)[:, None]
        return gl.where(keys <= last, ds, 0.0)
    else:
        return gl.where(keys < key_length, ds, 0.0)


@gluon.jit
def sum_dq(
    arguments,
    WHICH: gl.constexpr, IS_CAUSAL: gl.constexpr, HEAD_DIM: gl.constexpr, GROUPS: gl.constexpr,
    BLOCK: gl.constexpr, STAGES: gl.constexpr, SECOND_STAGES: gl.constexpr, TAKE_TURNS: gl.constexpr,
):  # fmt: skip
    """One group of warps: rows `64 * WHICH ..` of each tile of queries, and their statistics."""
    (
        output, lse, grad_lse, statistics, grad_query, total, scale, row_stride, places, own_full, own_empty,
        q_tile, o_tile, k_ring, v_ring, turns,
    ) = arguments  # fmt: skip
    dtype: gl.constexpr = grad_query.dtype.element_ty
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    s_row: gl.constexpr = gl.SliceLayout(1, s_layout)
    flat_row: gl.constexpr = gl.SliceLayout(1, flat)
    factor = scale * LOG2_E
    q = q_tile.index(WHICH).reshape([64, HEAD_DIM])
    o = o_tile.index(WHICH).reshape([64, HEAD_DIM])
    mbarrier.wait(own_full, 0)
    length = field_of(places, 1)
    visit = length * 0
    turn = length * 0
    passed = length * 0
    while length > 0:
        start = field_of(places, 0)
        key_length = field_of(places, 2)
        first_query = field_of(places, 3)
        head = field_of(places, 4)
        tiles, whole = key_tiles(first_query, length, key_length, IS_CAUSAL, 64 * GROUPS, BLOCK)
        first_row = first_query + 64 * WHICH
        position = first_row + key_length - length

        k = await_rows(k_ring, visit, STAGES, BLOCK, HEAD_DIM)
        v = await_rows(v_ring, visit, SECOND_STAGES, BLOCK, HEAD_DIM)
        rows = first_row + gl.arange(0, 64, layout=flat_row)
        columns = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, flat))
        places_of_rows = (start + rows).to(gl.int64)[:, None] * row_stride + head * HEAD_DIM + columns[None, :]
        result = gl.load(output + places_of_rows, mask=(rows < length)[:, None], other=0.0).to(gl.float32)
        place = head.to(gl.int64) * total + start + rows
        log_sum = gl.load(lse + place, mask=rows < length, other=float("inf"))
        log_sum = gl.where(log_sum == float("-inf"), float("inf"), log_sum) * LOG2_E
        delta = gl.sum(result * o.load(flat).to(gl.float32), 1)
        if grad_lse is not None:
            delta -= gl.load(grad_lse + place, mask=rows < length, other=0.0)
        gl.store(statistics + place * 2, log_sum, mask=rows < length)
        gl.store(statistics + place * 2 + 1, delta, mask=rows < length)
        log_sum = gl.convert_layout(log_sum, s_row)[:, None]
        delta = gl.convert_layout(delta, s_row)[:, None]

        s = begin(q, k, BLOCK, s_layout)
        dp = begin(o, v, BLOCK, s_layout)
        s = warpgroup_mma_wait(1, deps=(s,))
        p = gl.exp2(s * factor - log_sum)
        dp = warpgroup_mma_wait(0, deps=(dp,))
        leave_rows(v_ring, visit, SECOND_STAGES)
        ds = p * (dp - delta)
        if tiles > whole:
            ds = seen_by_queries(ds, position, key_length, (tiles - 1) * BLOCK, IS_CAUSAL, BLOCK, s_layout)
        ds16 = gl.convert_layout(ds.to(dtype), p_layout)
        dq = gl.zeros([64, HEAD_DIM], gl.float32, o_layout)
        for j in range(1, tiles):
            k = await_rows(k_ring, visit + 1, STAGES, BLOCK, HEAD_DIM)
            v = await_rows(v_ring, visit + 1, SECOND_STAGES, BLOCK, HEAD_DIM)
            if TAKE_TURNS:
                mbarrier.wait(turns.index(WHICH), (passed & 1) ^ (1 - WHICH))
            dq_next = warpgroup_mma(ds16, k_ring[0].index(visit % STAGES).reshape([BLOCK, HEAD_DIM]), dq, is_async=True)
            s = begin(q, k, BLOCK, s_layout)
            dq = warpgroup_mma_wait(1, deps=(dq_next,))
            dp = begin(o, v, BLOCK, s_layout)
            if TAKE_TURNS:
                mbarrier.arrive(turns.index(1 - WHICH), count=1)
                passed += 1
            leave_rows(k_ring, visit, STAGES)
            visit += 1
            s = warpgroup_mma_wait(1, deps=(s,))
            p = gl.exp2(s * factor - log_sum)
            # As above: the wait has to stand below the weights.
            await_rows(v_ring, visit, SECOND_STAGES, BLOCK, HEAD_DIM)
            dp = warpgroup_mma_wait(0, deps=(dp,))
            leave_rows(v_ring, visit, SECOND_STAGES)
            ds = p * (dp - delta)
            if tiles - 1 - j >= whole:
                ds = seen_by_queries(ds, position, key_length, (tiles - 1 - j) * BLOCK, IS_CAUSAL, BLOCK, s_layout)
            ds16 = gl.convert_layout(ds.to(dtype), p_layout)
        mbarrier.arrive(own_empty, count=1)
        dq_next = warpgroup_mma(ds16, k_ring[0].index(visit % STAGES).reshape([BLOCK, HEAD_DIM]), dq, is_async=True)
        dq = warpgroup_mma_wait(0, deps=(dq_next,))
        leave_rows(k_ring, visit, STAGES)
        visit += 1

        rows = first_row + gl.arange(0, 64, layout=gl.SliceLayout(1, o_layout))
        columns = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, o_layout))
        places_of_rows = (start + rows).to(gl.int64)[:, None] * row_stride + head * HEAD_DIM + columns[None, :]
        gl.store(grad_query + places_of_rows, (dq * scale).to(dtype), mask=(rows < length)[:, None])
        turn += 1
        mbarrier.wait(own_full, turn & 1)
        length = field_of(places, 1)


@gluon.jit
def make_own(source, GROUPS: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Return room for the own rows of a tile."""
    return gl.allocate_shared_memory(source.dtype, [GROUPS, 1, 1, 64, HEAD_DIM], source.layout)


@gluon.jit
def make_places(GROUPS: gl.constexpr):
    """Return room for what the loading warp tells of a tile, its barriers `full` and `empty`, and those of the groups' turns."""
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    places = gl.allocate_shared_memory(gl.int32, [FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [1], bars)
    empty = gl.allocate_shared_memory(gl.int64, [1], bars)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], bars)
    mbarrier.init(full, count=1)
    mbarrier.init(empty, count=GROUPS)
    for i in gl.static_range(2):
        mbarrier.init(turns.index(i), count=1)
    return places, full, empty, turns


@gluon.jit(do_not_specialize=["num_samples", "total", "key_total", "num_heads"])
def attention_backward_dkv_hopper_kernel(
    grad, query, key, value, statistics, offsets, key_offsets, grad_key, grad_value, counter,
    num_samples, total, key_total, num_heads, scale, grad_stride, q_stride, k_stride, v_stride, row_stride,
    IS_CAUSAL: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr, TAKE_TURNS: gl.constexpr,
):  # fmt: skip
    """Gradients of all tiles of keys and values: `dV = P^T dO`, `dK = scale * dS^T Q` with `dS = P * (dO V^T - delta)`.

    `statistics` hold what is subtracted in each row: the log-sum-exp, times log2(e), from scores, and delta.
    """
    places, own_full, own_empty, turns = make_places(2)
    k_tile = make_own(key, 2, HEAD_DIM)
    v_tile = make_own(value, 2, HEAD_DIM)
    q_ring = make_ring(query, 2, STAGES, 64, HEAD_DIM)
    o_ring = make_ring(grad, 2, STAGES, 64, HEAD_DIM)
    numbers: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    rows_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(rows_empty.index(i), count=2)
    rows_ring = (
        gl.allocate_shared_memory(gl.float32, [STAGES, 64], numbers),
        gl.allocate_shared_memory(gl.float32, [STAGES, 64], numbers),
        rows_empty,
    )
    fence_async_shared()
    loads = (
        key, value, query, grad, key_offsets, offsets, statistics, counter, num_samples, num_heads, key_total, total,
        k_stride, v_stride, q_stride, grad_stride, places, own_full, own_empty, k_tile, v_tile, q_ring, o_ring, rows_ring,
    )  # fmt: skip
    sums = (
        grad_key, grad_value, scale, row_stride, places, own_full, own_empty, k_tile, v_tile, q_ring, o_ring, rows_ring, turns
    )  # fmt: skip
    gl.warp_specialize(
        [
            (sum_dkv, (sums, 0, IS_CAUSAL, GROUP, HEAD_DIM, STAGES, TAKE_TURNS)),
            (sum_dkv, (sums, 1, IS_CAUSAL, GROUP, HEAD_DIM, STAGES, TAKE_TURNS)),
            (load_backward, (loads, True, IS_CAUSAL, GROUP, HEAD_DIM, 2, 64, STAGES, STAGES)),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip


@gluon.jit(do_not_specialize=["num_samples", "total", "key_total", "num_heads"])
def attention_backward_dq_hopper_kernel(
    grad, grad_lse, query, key, value, output, lse, offsets, key_offsets, grad_query, statistics, counter,
    num_samples, total, key_total, num_heads, scale, grad_stride, q_stride, k_stride, v_stride, row_stride,
    IS_CAUSAL: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, GROUPS: gl.constexpr,
    BLOCK: gl.constexpr, STAGES: gl.constexpr, SECOND_STAGES: gl.constexpr, TAKE_TURNS: gl.constexpr,
):  # fmt: skip
    """Gradients of all tiles of queries, `dQ = scale * dS K` with `dS = P * (dO V^T - delta)`, and `statistics` of their rows.

    Delta is a row's dot product of output and its gradient, less the gradient of its log-sum-exp.
    """
    places, own_full, own_empty, turns = make_places(GROUPS)
    q_tile = make_own(query, GROUPS, HEAD_DIM)
    o_tile = make_own(grad, GROUPS, HEAD_DIM)
    k_ring = make_ring(key, GROUPS, STAGES, BLOCK, HEAD_DIM)
    v_ring = make_ring(value, GROUPS, SECOND_STAGES, BLOCK, HEAD_DIM)
    fence_async_shared()
    loads = (
        query, grad, key, value, offsets, key_offsets, statistics, counter, num_samples, num_heads, total, key_total,
        q_stride, grad_stride, k_stride, v_stride, places, own_full, own_empty, q_tile, o_tile, k_ring, v_ring, statistics,
    )  # fmt: skip
    sums = (
        output, lse, grad_lse, statistics, grad_query, total, scale, row_stride, places, own_full, own_empty,
        q_tile, o_tile, k_ring, v_ring, turns,
    )  # fmt: skip
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (sum_dq, (sums, 0, IS_CAUSAL, HEAD_DIM, GROUPS, BLOCK, STAGES, SECOND_STAGES, TAKE_TURNS)),
                (sum_dq, (sums, 1, IS_CAUSAL, HEAD_DIM, GROUPS, BLOCK, STAGES, SECOND_STAGES, TAKE_TURNS)),
                (load_backward, (loads, False, IS_CAUSAL, GROUP, HEAD_DIM, GROUPS, BLOCK, STAGES, SECOND_STAGES)),
            ],
            [4, 1], [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (sum_dq, (sums, 0, IS_CAUSAL, HEAD_DIM, GROUPS, BLOCK, STAGES, SECOND_STAGES, TAKE_TURNS)),
                (sum_dq, (sums, 1, IS_CAUSAL, HEAD_DIM, GROUPS, BLOCK, STAGES, SECOND_STAGES, TAKE_TURNS)),
                (sum_dq, (sums, 2, IS_CAUSAL, HEAD_DIM, GROUPS, BLOCK, STAGES, SECOND_STAGES, TAKE_TURNS)),
                (load_backward, (loads, False, IS_CAUSAL, GROUP, HEAD_DIM, GROUPS, BLOCK, STAGES, SECOND_STAGES)),
            ],
            [4, 4, 1], [160, 160, 24],
        )  # fmt: skip


def backward_dq(
    grad: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, output: Tensor, lse: Tensor,
    q_offsets: Tensor, k_offsets: Tensor | None, causal: bool, scale: float,
    groups: int = 2, block: int = 128, stages: int = 3, second_stages: int = 2, take_turns: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Launch; every row of every head has to begin at 16 bytes. Return the gradient of queries, and statistics `[H, Sq, 2]`."""
    heads, num_samples = q.shape[1], q_offsets.shape[0] - 1
    grad_q = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    statistics = torch.empty(*lse.shape, 2, device=q.device)
    attention_backward_dq_hopper_kernel[_programs(q, num_samples, groups)](
        ragged_descriptor(grad, 64), grad_lse, ragged_descriptor(q, 64), ragged_descriptor(k, block), ragged_descriptor(v, block),
        output, lse, q_offsets, q_offsets if k_offsets is None else k_offsets, grad_q, statistics,
        torch.zeros(1, dtype=torch.int32, device=q.device), num_samples, q.shape[0], k.shape[0], heads, scale,
        grad.stride(1), q.stride(1), k.stride(1), v.stride(1), grad_q.stride(0),
        IS_CAUSAL=causal, GROUP=heads // k.shape[1], HEAD_DIM=q.shape[2], GROUPS=groups, BLOCK=block, STAGES=stages,
        SECOND_STAGES=second_stages, TAKE_TURNS=take_turns, num_warps=4,
    )  # fmt: skip
    return grad_q, statistics


def backward_dkv(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, statistics: Tensor,
    q_offsets: Tensor, k_offsets: Tensor | None, causal: bool, scale: float, stages: int = 4, take_turns: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Launch; every row of every head has to begin at 16 bytes. Return the gradients of keys and values."""
    key_heads, num_samples = k.shape[1], q_offsets.shape[0] - 1
    grad_k, grad_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
    attention_backward_dkv_hopper_kernel[_programs(k, num_samples, 2)](
        *(ragged_descriptor(x, 64) for x in (grad, q, k, v)), statistics,
        q_offsets, q_offsets if k_offsets is None else k_offsets, grad_k, grad_v,
        torch.zeros(1, dtype=torch.int32, device=q.device), num_samples, q.shape[0], k.shape[0], key_heads, scale,
        grad.stride(1), q.stride(1), k.stride(1), v.stride(1), grad_k.stride(0),
        IS_CAUSAL=causal, GROUP=q.shape[1] // key_heads, HEAD_DIM=q.shape[2], STAGES=stages, TAKE_TURNS=take_turns, num_warps=4,
    )  # fmt: skip
    return grad_k, grad_v


def _programs(rows: Tensor, num_samples: int, groups: int) -> tuple[int]:
    """As many programs as run at once, or fewer where there are fewer tiles."""
    tiles = (rows.shape[0] // (64 * groups) + num_samples) * rows.shape[1]
    return (min(tiles, torch.cuda.get_device_properties(rows.device).multi_processor_count),)
