"""Attention of long samples on Hopper: one warp loads, groups of four warps multiply and weigh, each 64 rows of one tile.

A persistent program takes tiles of `64 * GROUPS` rows from a counter until none is left. Its loading warp streams the keys and
values that the tile sees through two rings of `STAGES >= 2` places in shared memory, by TMA; the groups share them, so that a row
crosses the L2 once for all of them. That a place is filled is announced by a barrier `full` (one arrival, and the bytes), that it
is left by a barrier `empty` (an arrival of each group). Visit n of a ring uses place `n % STAGES` for the `n // STAGES`-th time.
Either barrier completes once for each use, and a wait for completion k (from 0) names its parity, `k & 1`; a wait for completion
-1 of a new barrier returns at once, so that a place that was never used is free.

Rows reach shared memory by descriptors of the whole tensor that cut off at a sample's end; see `ragged_descriptor`.
"""

from __future__ import annotations

from typing import Any

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

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
# Rows of a sample end where this coordinate does; more than any tensor has.
ROWS = gl.constexpr(2**30)
# What the loading warp tells the groups of a tile: first row and length of its queries and keys, its first query, its head.
FIELDS = gl.constexpr(6)


def ragged_descriptor(rows: Tensor, block: int) -> TensorDescriptor:
    """Describe `[S, H, D]` so that a load of `block` rows of one head ends at a sample's last row, with zeros after it.

    TMA cuts off at the tensor's shape alone. Here row i of a sample of length L has coordinate `ROWS - L + i` of a dimension of
    ROWS, so that the cut falls right after row L - 1. The other two dimensions lead back: one by the sample's end, the other by
    ROWS, as a stride of `2^34 - row` elements does whose product with `ROWS = 2^30` wraps around to `-ROWS * row`.
    """
    row_stride, head_stride, _ = rows.stride()
    columns = (rows.shape[1] - 1) * head_stride + rows.shape[2]
    box = [1, 1, block, rows.shape[2]]
    dtype = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[rows.dtype]
    layout = gl.NVMMASharedLayout.get_default_for(box, dtype)
    limit = 2**31 - 2**16
    return TensorDescriptor(
        rows, [limit, limit, ROWS.value, columns], [2**34 - row_stride, row_stride, row_stride, 1], box, layout
    )


@gluon.jit
def copy_rows(source, end, length, first, column, barrier, place):
    """Begin to copy rows `first ..` of the sample that ends before row `end` of its tensor."""
    tma.async_copy_global_to_shared(source, [ROWS, end, ROWS - length + first, column], barrier, place)


@gluon.jit
def make_ring(source, GROUPS: gl.constexpr, STAGES: gl.constexpr, BLOCK: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Return places for tiles of a descriptor, and for each place the barriers `full` and `empty`."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=GROUPS)
    return gl.allocate_shared_memory(source.dtype, [STAGES, 1, 1, BLOCK, HEAD_DIM], source.layout), full, empty


@gluon.jit
def load_rows(source, end, length, first, column, visit, ring, STAGES: gl.constexpr, BYTES: gl.constexpr):
    """Copy rows into a ring's next place as soon as every group has left it."""
    tiles, full, empty = ring
    slot = visit % STAGES
    mbarrier.wait(empty.index(slot), (visit // STAGES & 1) ^ 1)
    mbarrier.expect(full.index(slot), BYTES)
    copy_rows(source, end, length, first, column, full.index(slot), tiles.index(slot))


@gluon.jit
def await_rows(ring, visit, STAGES: gl.constexpr, BLOCK: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Wait for what a visit brings, and return it."""
    tiles, full, _ = ring
    slot = visit % STAGES
    mbarrier.wait(full.index(slot), visit // STAGES & 1)
    return tiles.index(slot).reshape([BLOCK, HEAD_DIM])


@gluon.jit
def leave_rows(ring, visit, STAGES: gl.constexpr):
    """Give back what a visit has brought."""
    _, _, empty = ring
    mbarrier.arrive(empty.index(visit % STAGES), count=1)


@gluon.jit
def find_sample(offsets, index, num_samples, BLOCK: gl.constexpr):
    """Return the sample that owns tile `index` of the list of `find_tile`, by 32 places at once."""
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    low = index * 0
    width = low + num_samples
    while width > 1:
        step = (width + 31) // 32
        place = gl.arange(0, 32, layout=lanes) * step
        first = gl.load(offsets + low + place, mask=place < width, other=0) // BLOCK + low + place
        passed = gl.sum(((place < width) & (first <= index)).to(gl.int32), 0)
        passed_by = (gl.maximum(passed, 1) - 1) * step
        low += passed_by
        width = gl.minimum(step, width - passed_by)
    return low


@gluon.jit
def load_sample(offsets, sample, total):
    """Return first and last row, held inside `[0, total]` whatever the offsets say."""
    start = gl.minimum(gl.maximum(gl.load(offsets + sample), 0), total).to(gl.int32)
    end = gl.minimum(gl.maximum(gl.load(offsets + sample + 1), start), total).to(gl.int32)
    return start, end


@gluon.jit
def key_tiles(first_query, query_length, key_length, IS_CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """Return how many key tiles a tile of queries visits, at least one, and how many of them are seen whole."""
    last = key_length
    whole = key_length
    if IS_CAUSAL:
        shift = key_length - query_length
        last = gl.minimum(gl.minimum(first_query + BLOCK_M, query_length) + shift, key_length)
        whole = gl.maximum(gl.minimum(first_query + shift + 1, key_length), 0)
    return gl.maximum((last + BLOCK_N - 1) // BLOCK_N, 1), whole // BLOCK_N


@gluon.jit
def load_forward(
    arguments,
    IS_CAUSAL: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
    GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The loading warp: for each tile its queries and place, and its keys and values from the last tile to the first."""
    (
        query, key, value, offsets, key_offsets, counter, num_samples, num_heads, total, key_total,
        q_head_stride, k_head_stride, v_head_stride, places, q_full, q_empty, q_tile, k_ring, v_ring,
    ) = arguments  # fmt: skip
    BLOCK_M: gl.constexpr = 64 * GROUPS
    BYTES: gl.constexpr = BLOCK_N * HEAD_DIM * 2
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    num_tiles = total // BLOCK_M + num_samples
    index = gl.atomic_add(counter, 1, sem="relaxed")
    visit = index * 0
    turn = index * 0
    while index < num_tiles * num_heads:
        head = index // num_tiles
        sample = find_sample(offsets, index % num_tiles, num_samples, BLOCK_M)
        start, end = load_sample(offsets, sample, total)
        key_start, key_end = load_sample(key_offsets, sample, key_total)
        length = end - start
        key_length = key_end - key_start
        first_query = (index % num_tiles - start // BLOCK_M - sample) * BLOCK_M
        if (first_query >= 0) & (first_query < length):
            tiles, _ = key_tiles(first_query, length, key_length, IS_CAUSAL, BLOCK_M, BLOCK_N)
            first = (tiles - 1) * BLOCK_N
            k_column = head // GROUP * k_head_stride
            v_column = head // GROUP * v_head_stride
            load_rows(key, key_end, key_length, first, k_column, visit, k_ring, STAGES, BYTES)
            mbarrier.wait(q_empty, (turn & 1) ^ 1)
            for i in gl.static_range(FIELDS):
                field = (start, length, key_start, key_length, first_query, head)[i]
                places.index(i).store(gl.full([1], 0, gl.int32, one) + field)
            mbarrier.expect(q_full, BLOCK_M * HEAD_DIM * 2)
            for i in gl.static_range(GROUPS):
                copy_rows(query, end, length, first_query + i * 64, head * q_head_stride, q_full, q_tile.index(i))
            # Groups need a tile's keys before the values of the tile before.
            for _ in range(1, tiles):
                load_rows(key, key_end, key_length, first - BLOCK_N, k_column, visit + 1, k_ring, STAGES, BYTES)
                load_rows(value, key_end, key_length, first, v_column, visit, v_ring, STAGES, BYTES)
                first -= BLOCK_N
                visit += 1
            load_rows(value, key_end, key_length, 0, v_column, visit, v_ring, STAGES, BYTES)
            visit += 1
            turn += 1
        index = gl.atomic_add(counter, 1, sem="relaxed")
    mbarrier.wait(q_empty, (turn & 1) ^ 1)
    places.index(1).store(gl.full([1], 0, gl.int32, one))
    mbarrier.arrive(q_full, count=1)


@gluon.jit
def field_of(places, INDEX: gl.constexpr):
    """Read a number that the loading warp has written."""
    return gl.sum(places.index(INDEX).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def masked(s, first_row, first_key, key_length, IS_CAUSAL: gl.constexpr, BLOCK_N: gl.constexpr, layout: gl.constexpr):
    """Hide the keys that a row does not see."""
    keys = (first_key + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout)))[None, :]
    if IS_CAUSAL:
        positions = (first_row + gl.arange(0, 64, layout=gl.SliceLayout(1, layout)))[:, None]
        return gl.where((keys <= positions) & (keys < key_length), s, float("-inf"))
    else:
        return gl.where(keys < key_length, s, float("-inf"))


@gluon.jit
def weigh_forward(
    arguments,
    WHICH: gl.constexpr, IS_CAUSAL: gl.constexpr, HEAD_DIM: gl.constexpr,
    GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, TAKE_TURNS: gl.constexpr,
):  # fmt: skip
    """One group of warps: rows `64 * WHICH ..` of each tile.

    Of key tile j the scores are begun, `S_j = Q K_j^T`, then what the weights of the last one give, `O += P_{j-1} V_{j-1}`; the
    softmax of S_j runs while the second product does. If groups take turns (two of them), one begins its two products only when
    the other has begun its own, so that one's softmax falls to the other's products.
    """
    output, lse, total, factor, output_row_stride, places, q_full, q_empty, q_tile, k_ring, v_ring, turns = arguments
    BLOCK_M: gl.constexpr = 64 * GROUPS
    dtype: gl.constexpr = output.dtype.element_ty
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    s_row: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_row: gl.constexpr = gl.SliceLayout(1, o_layout)
    zero = gl.zeros([64, BLOCK_N], gl.float32, s_layout)
    q = q_tile.index(WHICH).reshape([64, HEAD_DIM])
    visit = total * 0
    turn = total * 0
    passed = total * 0
    mbarrier.wait(q_full, 0)
    length = field_of(places, 1)
    while length > 0:
        start = field_of(places, 0)
        key_length = field_of(places, 3)
        first_query = field_of(places, 4)
        head = field_of(places, 5)
        tiles, whole = key_tiles(first_query, length, key_length, IS_CAUSAL, BLOCK_M, BLOCK_N)
        first_row = first_query + 64 * WHICH
        position = first_row + key_length - length

        k = await_rows(k_ring, visit, STAGES, BLOCK_N, HEAD_DIM)
        s = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        leave_rows(k_ring, visit, STAGES)
        if tiles > whole:
            s = masked(s, position, (tiles - 1) * BLOCK_N, key_length, IS_CAUSAL, BLOCK_N, s_layout)
        largest = gl.maximum(gl.max(s, 1) * factor, -1e30)
        p = gl.exp2(s * factor - largest[:, None])
        weight = gl.sum(p, 1)
        p16 = gl.convert_layout(p.to(dtype), p_layout)
        o = gl.zeros([64, HEAD_DIM], gl.float32, o_layout)
        v = await_rows(v_ring, visit, STAGES, BLOCK_N, HEAD_DIM)
        for j in range(1, tiles):
            k = await_rows(k_ring, visit + 1, STAGES, BLOCK_N, HEAD_DIM)
            if TAKE_TURNS:
                # The first group's first turn is free.
                mbarrier.wait(turns.index(WHICH), (passed & 1) ^ (1 - WHICH))
            s_next = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
            v = v_ring[0].index(visit % STAGES).reshape([BLOCK_N, HEAD_DIM])
            o_next = warpgroup_mma(p16, v, o, is_async=True)
            if TAKE_TURNS:
                mbarrier.arrive(turns.index(1 - WHICH), count=1)
                passed += 1
            s = warpgroup_mma_wait(1, deps=(s_next,))
            leave_rows(k_ring, visit + 1, STAGES)
            if tiles - 1 - j >= whole:
                s = masked(s, position, (tiles - 1 - j) * BLOCK_N, key_length, IS_CAUSAL, BLOCK_N, s_layout)
            now = gl.maximum(largest, gl.max(s, 1) * factor)
            correction = gl.exp2(largest - now)
            p = gl.exp2(s * factor - now[:, None])
            weight = weight * correction + gl.sum(p, 1)
            largest = now
            # The assembler moves a wait for products up to the last branch: this one has to stand below the softmax.
            await_rows(v_ring, visit + 1, STAGES, BLOCK_N, HEAD_DIM)
            o = warpgroup_mma_wait(0, deps=(o_next,))
            leave_rows(v_ring, visit, STAGES)
            o = o * gl.convert_layout(correction, o_row)[:, None]
            p16 = gl.convert_layout(p.to(dtype), p_layout)
            visit += 1
        mbarrier.arrive(q_empty, count=1)
        v = v_ring[0].index(visit % STAGES).reshape([BLOCK_N, HEAD_DIM])
        o_next = warpgroup_mma(p16, v, o, is_async=True)
        o = warpgroup_mma_wait(0, deps=(o_next,))
        leave_rows(v_ring, visit, STAGES)
        visit += 1

        # A query that sees no key has an output of zeros and a log-sum-exp of -inf.
        divisor = gl.where(weight == 0.0, 1.0, weight)
        o = o * gl.convert_layout(1.0 / divisor, o_row)[:, None]
        rows = first_row + gl.arange(0, 64, layout=o_row)
        columns = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, o_layout))
        places_of_rows = (start + rows).to(gl.int64)[:, None] * output_row_stride + columns[None, :]
        gl.store(output + head * HEAD_DIM + places_of_rows, o.to(dtype), mask=(rows < length)[:, None])
        rows = first_row + gl.arange(0, 64, layout=s_row)
        natural = gl.where(weight == 0.0, float("-inf"), largest * LN_2 + gl.log(divisor))
        gl.store(lse + head.to(gl.int64) * total + start + rows, natural, mask=rows < length)
        turn += 1
        mbarrier.wait(q_full, turn & 1)
        length = field_of(places, 1)


@gluon.jit(do_not_specialize=["num_samples", "total", "key_total", "num_heads"])
def attention_forward_hopper_kernel(
    query, key, value, offsets, key_offsets, output, lse, counter, num_samples, total, key_total, num_heads, scale,
    q_head_stride, k_head_stride, v_head_stride, output_row_stride,
    IS_CAUSAL: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
    GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, TAKE_TURNS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp, `O = softmax(scale * Q K^T) V`, of all tiles of queries."""
    dtype: gl.constexpr = query.dtype
    places = gl.allocate_shared_memory(gl.int32, [FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_tile = gl.allocate_shared_memory(dtype, [GROUPS, 1, 1, 64, HEAD_DIM], query.layout)
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [1], bars)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], bars)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], bars)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=GROUPS)
    for i in gl.static_range(2):
        mbarrier.init(turns.index(i), count=1)
    k_ring = make_ring(key, GROUPS, STAGES, BLOCK_N, HEAD_DIM)
    v_ring = make_ring(value, GROUPS, STAGES, BLOCK_N, HEAD_DIM)
    fence_async_shared()
    factor = scale * LOG2_E
    loads = (
        query, key, value, offsets, key_offsets, counter, num_samples, num_heads, total, key_total,
        q_head_stride, k_head_stride, v_head_stride, places, q_full, q_empty, q_tile, k_ring, v_ring,
    )  # fmt: skip
    sums = output, lse, total, factor, output_row_stride, places, q_full, q_empty, q_tile, k_ring, v_ring, turns
    # Constants have to stand in the call: a name would make tensors of them.
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (weigh_forward, (sums, 0, IS_CAUSAL, HEAD_DIM, GROUPS, BLOCK_N, STAGES, TAKE_TURNS)),
                (weigh_forward, (sums, 1, IS_CAUSAL, HEAD_DIM, GROUPS, BLOCK_N, STAGES, TAKE_TURNS)),
                (load_forward, (loads, IS_CAUSAL, GROUP, HEAD_DIM, GROUPS, BLOCK_N, STAGES)),
            ],
            [4, 1], [REGISTERS, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (weigh_forward, (sums, 0, IS_CAUSAL, HEAD_DIM, GROUPS, BLOCK_N, STAGES, TAKE_TURNS)),
                (weigh_forward, (sums, 1, IS_CAUSAL, HEAD_DIM, GROUPS, BLOCK_N, STAGES, TAKE_TURNS)),
                (weigh_forward, (sums, 2, IS_CAUSAL, HEAD_DIM, GROUPS, BLOCK_N, STAGES, TAKE_TURNS)),
                (load_forward, (loads, IS_CAUSAL, GROUP, HEAD_DIM, GROUPS, BLOCK_N, STAGES)),
            ],
            [4, 4, 1], [REGISTERS, REGISTERS, 24],
        )  # fmt: skip


def attention_forward_hopper(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor | None, causal: bool, scale: float,
    groups: int = 2, block: int = 128, stages: int = 3, take_turns: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Launch; every row of every head has to begin at 16 bytes."""
    total, heads, width = q.shape
    num_samples = q_offsets.shape[0] - 1
    output = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(heads, total, device=q.device)
    options: dict[str, Any] = {"GROUPS": groups, "BLOCK_N": block, "STAGES": stages, "TAKE_TURNS": take_turns}
    tiles = (total // (64 * groups) + num_samples) * heads
    programs = min(tiles, torch.cuda.get_device_properties(q.device).multi_processor_count)
    attention_forward_hopper_kernel[(programs,)](
        ragged_descriptor(q, 64), ragged_descriptor(k, block), ragged_descriptor(v, block),
        q_offsets, q_offsets if k_offsets is None else k_offsets, output, lse,
        torch.zeros(1, dtype=torch.int32, device=q.device), num_samples, total, k.shape[0], heads, scale,
        q.stride(1), k.stride(1), v.stride(1), output.stride(0),
        IS_CAUSAL=causal, GROUP=heads // k.shape[1], HEAD_DIM=width, REGISTERS=240 if groups == 2 else 160,
        num_warps=4, **options,
    )  # fmt: skip
    return output, lse
