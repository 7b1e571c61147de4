"""Gradients of attention of long samples on Hopper, in warps that specialise as those of `forward`.

A tile has 128 rows of two kinds of its own, which stay in shared memory, and meets two kinds of others, 64 rows at a time, which
are streamed through two rings: queries and the gradients of their outputs meet keys and values, for the gradients of queries; the
latter meet the former, for the gradients of keys and values.

Of rows j a group begins the scores and the gradients of the weights, `S_j` and `dP_j`, right after what it adds to its sums for
rows j - 1; the latter are waited for first, so that a place is left, and registers are free, while `S_j` is computed.
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

from jagged.ops._shared.launch import Launcher
from jagged.ops._shared.ring import await_left, await_tile, leave_tile, make_ring
from jagged.ops.attention.hopper.forward import (
    BLOCK_M,
    FIELDS,
    GROUP_M,
    WIDTH,
    addresses_of,
    copy_rows,
    end_groups,
    field_of,
    find_tile,
    programs_for,
    ragged_descriptor,
    ring_tile,
    send_rows,
    visited_rows,
    write_fields,
)
from jagged.ops.attention.hopper.visits import announce, number_of_visits, row_of_visit, visited
from jagged.ops.attention.spec import Inputs, Options, Outputs
from jagged.ops.attention.triton.biases import HIDDEN
from jagged.ops.attention.triton.launch import sight_of
from jagged.ops.attention.triton.masks import Sight, key_ranges, query_ranges, visible
from jagged.ops.attention.triton.samples import sample_of
from jagged.ops.attention.triton.scores import LOG2_E, pointwise_factor, silu

# Rows that a tile meets at a time, and places of both rings, as many as fit: of keys and values; of queries, with statistics.
BLOCK_N = gl.constexpr(64)
KEY_STAGES = gl.constexpr(5)
QUERY_STAGES = gl.constexpr(4)


@gluon.jit
def send_statistics(statistics, first, length, ring, numbers, visit):
    """Bring what is subtracted in each row to the ring's next place, before the row itself. Rows past the end weigh nothing."""
    rows = first + gl.arange(0, BLOCK_N, layout=gl.BlockedLayout([1], [32], [1], [0]))
    log_sum = gl.load(statistics + rows * 2, mask=rows < length, other=float("inf"))
    delta = gl.load(statistics + rows * 2 + 1, mask=rows < length, other=0.0)
    await_left(ring, visit)
    numbers.index(visit % QUERY_STAGES).store(log_sum)
    numbers.index(visit % QUERY_STAGES + QUERY_STAGES).store(delta)
    # One lane announces what all have written.
    tl.debug_barrier()


@gluon.jit
def load_warp(rows, lists, counts, sight, room, OWNS_KEYS: gl.constexpr, IS_CAUSAL: gl.constexpr, GROUP: gl.constexpr):
    """Of each tile send fields and own rows, then the others: keys and values; or queries, of each head that shares the keys, and
    gradients of outputs, with statistics if any. At last a tile of a sample that has no rows."""
    first_own, second_own, first_other, second_other, statistics = rows
    offsets, other_offsets, counter = lists
    num_samples, total, other_total, num_heads = counts
    fields, words, own, firsts, seconds, numbers = room
    num_tiles = total // BLOCK_M + num_samples
    index = gl.atomic_add(counter, 1, sem="relaxed")
    tile = index * 0
    visit = index * 0
    while index < num_tiles * num_heads:
        sample, head, start, length, other_start, other_length, first_row = find_tile(
            index, num_tiles, offsets, other_offsets, num_samples, total, other_total
        )
        other_end = other_start + other_length
        if first_row < length:
            if OWNS_KEYS:
                known = sample_of(sample, head, other_start, other_length, start, length, sight.num_targets)
                ranges = query_ranges(first_row, known, sight, IS_CAUSAL, BLOCK_M, BLOCK_N)
                other_head = head * GROUP
            else:
                known = sample_of(sample, head, start, length, other_start, other_length, sight.num_targets)
                ranges = key_ranges(first_row, known, sight, IS_CAUSAL, BLOCK_M, BLOCK_N)
                other_head = head // GROUP
            visits = number_of_visits(ranges, BLOCK_N)
            heads = GROUP if OWNS_KEYS else 1
            await_left(own, tile)
            write_fields(fields, start, length, other_length, first_row, head, known.history, visits * heads)
            mbarrier.expect(own.full.index(0), 4 * first_own.block_type.nbytes)
            for i in gl.static_range(2):
                row = first_row + i * GROUP_M
                copy_rows(first_own, start + length, length, row, head, own.full.index(0), own.tiles.index(i))
                copy_rows(second_own, start + length, length, row, head, own.full.index(0), own.tiles.index(2 + i))
            for i in range(visits * heads):
                j = i
                if heads > 1:
                    j = i % visits
                row = row_of_visit(j, ranges, not OWNS_KEYS, BLOCK_N)
                if statistics is not None:
                    source = statistics + (other_total.to(gl.int64) * other_head + other_start) * 2
                    send_statistics(source, row, other_length, firsts, numbers, visit)
                announce(words, firsts, visit, row, j, ranges)
                send_rows(first_other, other_end, other_length, row, other_head, firsts, visit)
                send_rows(second_other, other_end, other_length, row, other_head, seconds, visit)
                visit += 1
                if heads > 1:
                    other_head += (j == visits - 1).to(gl.int32)
            tile += 1
        index = gl.atomic_add(counter, 1, sem="relaxed")
    end_groups(fields, own, tile)


@gluon.jit
def pass_hidden(words, firsts, seconds, visit, visits, own_position, shift, sight, OWNS_KEYS: gl.constexpr):
    """Pass over the first visit where causal queries lie before all of its keys; return the next visit, and how many are left.

    `own_position` is the key position of the group's first row, and `shift` what is to be added to that of others. Where 128 rows
    meet 64 on the diagonal, one of their two groups sees nothing.
    """
    await_tile(firsts, visit)
    row, _ = visited(words, firsts, visit)
    first_query, first_key = (row + shift, own_position) if OWNS_KEYS else (own_position, row)
    is_hidden = (visits > 1) & (first_query + (GROUP_M - 1) < first_key)
    if sight.num_contextual is not None:
        is_hidden = is_hidden & (first_query >= sight.num_contextual)
    if is_hidden:
        await_tile(seconds, visit)
        leave_tile(firsts, visit)
        leave_tile(seconds, visit)
    passed = is_hidden.to(gl.int32)
    return visit + passed, visits - passed


@gluon.jit
def begin(own, others, layout: gl.constexpr):
    """Begin the product of a group's rows with others."""
    zero = gl.zeros([GROUP_M, BLOCK_N], gl.float32, layout)
    return warpgroup_mma(own, others.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def weights_of_keys(s, numbers, place, factor, first_key, first_position, may_hide, history, sight, IS_CAUSAL: gl.constexpr):
    """Weights of transposed scores, and what each changes by with its score; none for keys from queries that do not see them."""
    layout: gl.constexpr = s.type.layout
    keys = (first_key + gl.arange(0, GROUP_M, layout=gl.SliceLayout(1, layout)))[:, None]
    positions = (first_position + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout)))[None, :]
    if numbers is None:
        s = s * factor
        if may_hide:
            s = gl.where(visible(positions, keys, history, sight, IS_CAUSAL), s, HIDDEN)
        p, slope = silu(s, False)
    else:
        log_sum = numbers.index(place).load(gl.SliceLayout(0, layout))
        p = gl.exp2(s * factor - log_sum[None, :])
        if may_hide:
            p = gl.where(visible(positions, keys, history, sight, IS_CAUSAL), p, 0.0)
        slope = p
    return p, slope


@gluon.jit
def less_delta(dp, numbers, place):
    """Return gradients of weights less those that their sum takes back; pointwise weights have no sum."""
    if numbers is not None:
        dp = dp - numbers.index(place + QUERY_STAGES).load(gl.SliceLayout(0, dp.type.layout))[None, :]
    return dp


@gluon.jit
def sum_dkv(arguments, room, WHICH: gl.constexpr, IS_CAUSAL: gl.constexpr, HEAD_DIM: gl.constexpr):
    """One group of warps: rows `64 * WHICH ..` of each tile of keys, until one has none. Scores are held transposed."""
    grad_key, grad_value, num_heads, scale, normalizer, sight = arguments
    fields, words, own, queries, grads, numbers = room
    dtype: gl.constexpr = grad_key.dtype.element_ty
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    factor = scale * (0.5 if numbers is None else LOG2_E)
    k = ring_tile(own, WHICH)
    v = ring_tile(own, 2 + WHICH)
    mbarrier.wait(own.full.index(0), 0)
    length = field_of(fields, 1)
    visit = length * 0
    tile = length * 0
    while length > 0:
        shift = length - field_of(fields, 2)
        first_key = field_of(fields, 3) + GROUP_M * WHICH
        history = length if sight.num_targets is None else field_of(fields, 5)
        visits = field_of(fields, 6)
        if IS_CAUSAL and WHICH == 1:
            visit, visits = pass_hidden(words, queries, grads, visit, visits, first_key, shift, sight, True)

        await_tile(queries, visit)
        await_tile(grads, visit)
        row, may_hide = visited(words, queries, visit)
        s = begin(k, visited_rows(queries, visit), s_layout)
        dp = begin(v, visited_rows(grads, visit), s_layout)
        s = warpgroup_mma_wait(1, deps=(s,))
        place = visit % QUERY_STAGES
        p, slope = weights_of_keys(s, numbers, place, factor, first_key, row + shift, may_hide, history, sight, IS_CAUSAL)
        dp = warpgroup_mma_wait(0, deps=(dp,))
        ds = slope * less_delta(dp, numbers, place)
        p = gl.convert_layout(p.to(dtype), p_layout)
        ds = gl.convert_layout(ds.to(dtype), p_layout)
        dk = gl.zeros([GROUP_M, WIDTH], gl.float32, o_layout)
        dv = gl.zeros([GROUP_M, WIDTH], gl.float32, o_layout)
        for _ in range(1, visits):
            await_tile(queries, visit + 1)
            await_tile(grads, visit + 1)
            row, may_hide = visited(words, queries, visit + 1)
            dv = warpgroup_mma(p, visited_rows(grads, visit), dv, is_async=True)
            dk = warpgroup_mma(ds, visited_rows(queries, visit), dk, is_async=True)
            s = begin(k, visited_rows(queries, visit + 1), s_layout)
            dv, dk = warpgroup_mma_wait(1, deps=(dv, dk))
            dp = begin(v, visited_rows(grads, visit + 1), s_layout)
            leave_tile(grads, visit)
            leave_tile(queries, visit)
            visit += 1
            s = warpgroup_mma_wait(1, deps=(s,))
            place = visit % QUERY_STAGES
            p, slope = weights_of_keys(s, numbers, place, factor, first_key, row + shift, may_hide, history, sight, IS_CAUSAL)
            # The assembler moves a wait for products up to the last branch: this one has to stand below the weights.
            await_tile(grads, visit)
            dp = warpgroup_mma_wait(0, deps=(dp,))
            ds = slope * less_delta(dp, numbers, place)
            p = gl.convert_layout(p.to(dtype), p_layout)
            ds = gl.convert_layout(ds.to(dtype), p_layout)
        # Read as late as that, since the loop has no registers for them.
        start = field_of(fields, 0)
        length = field_of(fields, 1)
        head = field_of(fields, 4)
        mbarrier.arrive(own.empty.index(0), count=1)
        dv = warpgroup_mma(p, visited_rows(grads, visit), dv, is_async=True)
        dk = warpgroup_mma(ds, visited_rows(queries, visit), dk, is_async=True)
        dv, dk = warpgroup_mma_wait(0, deps=(dv, dk))
        leave_tile(grads, visit)
        leave_tile(queries, visit)
        visit += 1

        places, is_there = addresses_of(o_layout, start, first_key, length, num_heads, head, HEAD_DIM)
        gain = scale
        if numbers is None:
            share = pointwise_factor(normalizer, length)
            dv = dv * share
            gain = scale * share
        gl.store(grad_value + places, dv.to(dtype), mask=is_there)
        gl.store(grad_key + places, (dk * gain).to(dtype), mask=is_there)
        tile += 1
        mbarrier.wait(own.full.index(0), tile & 1)
        length = field_of(fields, 1)


@gluon.jit
def row_statistics(output, lse, grad_lse, statistics, grad, total, start, first, length, num_heads, head, HEAD_DIM: gl.constexpr):
    """Compute and store what is subtracted in each row: from scores the log-sum-exp, infinite where no key is seen, and delta."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    places, is_there = addresses_of(layout, start, first, length, num_heads, head, HEAD_DIM)
    delta = gl.sum(gl.load(output + places, mask=is_there, other=0.0).to(gl.float32) * grad.load(layout).to(gl.float32), 1)
    rows = first + gl.arange(0, GROUP_M, layout=gl.SliceLayout(1, layout))
    place = head.to(gl.int64) * total + start + rows
    log_sum = gl.load(lse + place, mask=rows < length, other=float("inf"))
    log_sum = gl.where(log_sum == float("-inf"), float("inf"), log_sum) * LOG2_E
    if grad_lse is not None:
        delta -= gl.load(grad_lse + place, mask=rows < length, other=0.0)
    gl.store(statistics + place * 2, log_sum, mask=rows < length)
    gl.store(statistics + place * 2 + 1, delta, mask=rows < length)
    return log_sum, delta


@gluon.jit
def seen_by_queries(ds, position, first_key, history, sight, IS_CAUSAL: gl.constexpr):
    """Clear the gradients of scores of keys that a query does not see."""
    layout: gl.constexpr = ds.type.layout
    keys = (first_key + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout)))[None, :]
    positions = (position + gl.arange(0, GROUP_M, layout=gl.SliceLayout(1, layout)))[:, None]
    return gl.where(visible(positions, keys, history, sight, IS_CAUSAL), ds, 0.0)


@gluon.jit
def slopes_of_queries(s, log_sum, factor):
    """What each weight changes by with its score: of a softmax the weight itself, of SiLU, which has no sum, its slope."""
    if log_sum is None:
        _, slope = silu(s * factor, False)
        return slope
    else:
        return gl.exp2(s * factor - log_sum)


@gluon.jit
def sum_dq(arguments, room, WHICH: gl.constexpr, IS_CAUSAL: gl.constexpr, HEAD_DIM: gl.constexpr):
    """One group of warps: rows `64 * WHICH ..` of each tile of queries, and their statistics if any, until one has none."""
    output, lse, grad_lse, statistics, grad_query, total, num_heads, scale, normalizer, sight = arguments
    fields, words, own, keys, values, _numbers = room
    IS_POINTWISE: gl.constexpr = lse is None
    dtype: gl.constexpr = grad_query.dtype.element_ty
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    s_row: gl.constexpr = gl.SliceLayout(1, s_layout)
    factor = scale * (0.5 if IS_POINTWISE else LOG2_E)
    q = ring_tile(own, WHICH)
    o = ring_tile(own, 2 + WHICH)
    mbarrier.wait(own.full.index(0), 0)
    length = field_of(fields, 1)
    visit = length * 0
    tile = length * 0
    while length > 0:
        start = field_of(fields, 0)
        key_length = field_of(fields, 2)
        first_query = field_of(fields, 3)
        head = field_of(fields, 4)
        history = key_length if sight.num_targets is None else field_of(fields, 5)
        visits = field_of(fields, 6)
        first_query += GROUP_M * WHICH
        position = first_query + key_length - length
        log_sum, delta = None, 0.0
        if not IS_POINTWISE:
            log_sum, delta = row_statistics(
                output, lse, grad_lse, statistics, o, total, start, first_query, length, num_heads, head, HEAD_DIM
            )
            log_sum = gl.convert_layout(log_sum, s_row)[:, None]
            delta = gl.convert_layout(delta, s_row)[:, None]
        if IS_CAUSAL and WHICH == 0:
            visit, visits = pass_hidden(words, keys, values, visit, visits, position, 0, sight, False)

        await_tile(keys, visit)
        await_tile(values, visit)
        first_key, may_hide = visited(words, keys, visit)
        s = begin(q, visited_rows(keys, visit), s_layout)
        dp = begin(o, visited_rows(values, visit), s_layout)
        s = warpgroup_mma_wait(1, deps=(s,))
        slope = slopes_of_queries(s, log_sum, factor)
        dp = warpgroup_mma_wait(0, deps=(dp,))
        leave_tile(values, visit)
        ds = slope * (dp - delta)
        if may_hide:
            ds = seen_by_queries(ds, position, first_key, history, sight, IS_CAUSAL)
        ds = gl.convert_layout(ds.to(dtype), p_layout)
        dq = gl.zeros([GROUP_M, WIDTH], gl.float32, o_layout)
        for _ in range(1, visits):
            await_tile(keys, visit + 1)
            await_tile(values, visit + 1)
            first_key, may_hide = visited(words, keys, visit + 1)
            dq = warpgroup_mma(ds, visited_rows(keys, visit), dq, is_async=True)
            s = begin(q, visited_rows(keys, visit + 1), s_layout)
            dq = warpgroup_mma_wait(1, deps=(dq,))
            dp = begin(o, visited_rows(values, visit + 1), s_layout)
            leave_tile(keys, visit)
            visit += 1
            s = warpgroup_mma_wait(1, deps=(s,))
            slope = slopes_of_queries(s, log_sum, factor)
            # As above: the wait has to stand below the weights.
            await_tile(values, visit)
            dp = warpgroup_mma_wait(0, deps=(dp,))
            leave_tile(values, visit)
            ds = slope * (dp - delta)
            if may_hide:
                ds = seen_by_queries(ds, position, first_key, history, sight, IS_CAUSAL)
            ds = gl.convert_layout(ds.to(dtype), p_layout)
        mbarrier.arrive(own.empty.index(0), count=1)
        dq = warpgroup_mma(ds, visited_rows(keys, visit), dq, is_async=True)
        dq = warpgroup_mma_wait(0, deps=(dq,))
        leave_tile(keys, visit)
        visit += 1

        places, is_there = addresses_of(o_layout, start, first_query, length, num_heads, head, HEAD_DIM)
        gain = scale * pointwise_factor(normalizer, key_length) if IS_POINTWISE else scale
        gl.store(grad_query + places, (dq * gain).to(dtype), mask=is_there)
        tile += 1
        mbarrier.wait(own.full.index(0), tile & 1)
        length = field_of(fields, 1)


@gluon.jit(do_not_specialize=["num_samples", "total", "key_total", "num_heads"])
def attention_backward_dq_hopper_kernel(
    grad, grad_lse, query, key, value, output, lse, offsets, key_offsets, num_targets, grad_query, statistics, counter,
    num_samples, total, key_total, num_heads, scale, normalizer, window, reach, num_contextual, prefix,
    IS_CAUSAL: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """Gradients of all tiles of queries, `dQ = scale * dS K` with `dS = P * (dO V^T - delta)`, and `statistics` of their rows.

    Delta is a row's dot product of output and its gradient, less the gradient of its log-sum-exp. Pointwise, where there is no
    `lse`, `dS = SiLU'(scale * Q K^T) * (dO V^T) / normalizer`, and there are no statistics.
    """
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    fields = gl.allocate_shared_memory(gl.int32, [FIELDS, 1], flat)
    words = gl.allocate_shared_memory(gl.int32, [KEY_STAGES, 1], flat)
    own = make_ring(query, 1, 2, TILES=4)
    keys = make_ring(key, KEY_STAGES, 2)
    values = make_ring(value, KEY_STAGES, 2)
    fence_async_shared()
    rows = query, grad, key, value, None
    lists = offsets, key_offsets, counter
    counts = num_samples, total, key_total, num_heads
    sight = Sight(window, reach, num_contextual, prefix, num_targets)
    room = fields, words, own, keys, values, None
    sums = output, lse, grad_lse, statistics, grad_query, total, num_heads, scale, normalizer, sight
    gl.warp_specialize(
        [
            (sum_dq, (sums, room, 0, IS_CAUSAL, HEAD_DIM)),
            (sum_dq, (sums, room, 1, IS_CAUSAL, HEAD_DIM)),
            (load_warp, (rows, lists, counts, sight, room, False, IS_CAUSAL, GROUP)),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip


@gluon.jit(do_not_specialize=["num_samples", "total", "key_total", "num_heads"])
def attention_backward_dkv_hopper_kernel(
    grad, query, key, value, statistics, offsets, key_offsets, num_targets, grad_key, grad_value, counter,
    num_samples, total, key_total, num_heads, scale, normalizer, window, reach, num_contextual, prefix,
    IS_CAUSAL: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """Gradients of all tiles of keys and values: `dV = P^T dO`, `dK = scale * dS^T Q` with `dS = P * (dO V^T - delta)`.

    `statistics` hold what is subtracted in each row: the log-sum-exp, times log2(e), from scores, and delta. Without them weights
    are pointwise, `P = SiLU(scale * Q K^T) / normalizer` and `dS = SiLU'(scale * Q K^T) * (dO V^T) / normalizer`.
    """
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    fields = gl.allocate_shared_memory(gl.int32, [FIELDS, 1], flat)
    words = gl.allocate_shared_memory(gl.int32, [QUERY_STAGES, 1], flat)
    own = make_ring(key, 1, 2, TILES=4)
    queries = make_ring(query, QUERY_STAGES, 2)
    grads = make_ring(grad, QUERY_STAGES, 2)
    room = fields, words, own, queries, grads, None
    if statistics is not None:
        # Of each place of `queries` what is subtracted from scores, and then of each what is from gradients of weights.
        room = fields, words, own, queries, grads, gl.allocate_shared_memory(gl.float32, [2 * QUERY_STAGES, BLOCK_N], flat)
    fence_async_shared()
    rows = key, value, query, grad, statistics
    lists = key_offsets, offsets, counter
    counts = num_samples, key_total, total, num_heads
    sight = Sight(window, reach, num_contextual, prefix, num_targets)
    sums = grad_key, grad_value, num_heads, scale, normalizer, sight
    gl.warp_specialize(
        [
            (sum_dkv, (sums, room, 0, IS_CAUSAL, HEAD_DIM)),
            (sum_dkv, (sums, room, 1, IS_CAUSAL, HEAD_DIM)),
            (load_warp, (rows, lists, counts, sight, room, True, IS_CAUSAL, GROUP)),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip


_launch_dq = Launcher(attention_backward_dq_hopper_kernel)
_launch_dkv = Launcher(attention_backward_dkv_hopper_kernel)


def backward(grads: Outputs, x: Inputs, out: Outputs, o: Options) -> dict[str, Tensor]:
    """Launch both kernels for what `supports` has nothing against. Those of pointwise weights need nothing of `out`."""
    total, heads, head_dim = x.q.shape
    num_samples = x.q_offsets.shape[0] - 1
    grad_q, grad_k, grad_v = (rows.new_empty(*rows.shape) for rows in x[:3])
    output, lse, grad_lse = (None, None, None) if o.pointwise else (out.output, out.lse, grads.lse)
    statistics = None if lse is None else lse.new_empty(*lse.shape, 2)
    counters = torch.zeros(2, dtype=torch.int32, device=x.q.device)
    offsets = x.q_offsets, x.q_offsets if x.k_offsets is None else x.k_offsets
    constants = {"IS_CAUSAL": o.causal, "GROUP": heads // x.k.shape[1], "HEAD_DIM": head_dim, "num_warps": 4}
    # Tiles of queries and the rows that are streamed are cut alike.
    rows = [ragged_descriptor(each, GROUP_M.value) for each in x[:3]]
    upstream = ragged_descriptor(grads.output, GROUP_M.value)
    _launch_dq(
        programs_for(x.q, num_samples),
        upstream, grad_lse, *rows, output, lse, *offsets, x.num_targets, grad_q, statistics, counters[0], num_samples, total,
        x.k.shape[0], heads, o.scale, o.normalizer, *sight_of(o).values(), **constants,
    )  # fmt: skip
    _launch_dkv(
        programs_for(x.k, num_samples),
        upstream, *rows, statistics, *offsets, x.num_targets, grad_k, grad_v, counters[1], num_samples, total, x.k.shape[0],
        x.k.shape[1], o.scale, o.normalizer, *sight_of(o).values(), **constants,
    )  # fmt: skip
    return {"q": grad_q, "k": grad_k, "v": grad_v}
