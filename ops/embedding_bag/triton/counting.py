"""Lookups of each row brought together by counting: for tables of up to 65,536 rows, whose rows most batches read often.

Lookups of a feature are cut into chunks. A few warps count how many lookups of a chunk each row has, walk through the chunk in
order, and give each lookup its place among the chunk's, ordered by their rows. Sums over the chunks say where each row's lookups
of each chunk go among the table's, and a last pass puts what backward reads of them there: the element of the incoming gradient
that its bag begins at, and what it is multiplied by. So a row's lookups stand together in their order, whatever order programs
ran in, and where each row begins is known without a search.
"""

from __future__ import annotations

import triton
import triton.language as tl

from jagged.ops._shared.device import find_segment
from jagged.ops.embedding_bag.triton.columns import (
    BATCH_FIELDS,
    FIELDS,
    FIRST_BAG,
    FIRST_READER,
    FIRST_ROW,
    IN_ORDER,
    IS_MEAN,
    NUM_BAGS,
    OUTPUT_BEGIN,
    OUTPUT_COLUMN,
    OUTPUT_STRIDE,
    ROWS,
)
from jagged.ops.embedding_bag.triton.schedules import span_of
from jagged.ops.embedding_bag.triton.shared_memory import add32, clear, load16, load32, reserve, store16, store32, sync_warp

# Exponent of the lookups of a chunk. Many short chunks are counted at a time; of long ones neighbours in the order of rows go to
# places near one another, and they need few counts: tables of more than 16,384 rows have longer ones.
CHUNK_BITS = tl.constexpr(13)
# Counts of 16 bits in shared memory, and warps of a program: each has counts of its own, if there is room. There is room for four
# times 4,096 rows, and once for 16,384 (`shared_stride`).
MOST_SHARED, ORDER_WARPS = 17_408, 4
# Lookups whose rows a warp counts at once.
COUNTED_TOGETHER = tl.constexpr(128)
# Lookups of a row above which several programs sum it, each as many as that.
LONG = tl.constexpr(256)
# Of a slice of such a row: the row, its table, and the row's first slice.
LONG_ROW, LONG_TABLE, FIRST_SLOT, LONG_FIELDS = map(tl.constexpr, range(4))
# Features that the kernel of the chunks takes at once, and rows that those of the orders and of the bounds do.
BLOCK_FEATURES, ORDERED_ROWS, BLOCK_ROWS = 2048, 1024, 512
# Lookups that a program of the last pass takes, of one chunk, whose length they divide: all of it, but of long ones. And how many
# at once.
BLOCK_PLACES, PLACES_TOGETHER = tl.constexpr(1 << CHUNK_BITS.value), tl.constexpr(1024)
# Programs of a table in the pass before, chunks that one has under way, and warps of the programs of both passes.
BOUNDS_PROGRAMS, CHUNKS_TOGETHER, BOUNDS_WARPS, PLACES_WARPS = 4, tl.constexpr(4), 4, 16


@triton.jit
def chunk_bits(rows):
    """Return the exponent of a chunk's length."""
    return (rows > 16384).to(tl.int32) + (rows > 32768).to(tl.int32) + CHUNK_BITS


@triton.jit
def counts_of(rows):
    """Return the length of a chunk's array of counts, or of begins of rows and one end: a multiple of 4."""
    return (rows + 4) // 4 * 4


@triton.jit
def shared_stride(rows, WARPS: tl.constexpr):
    """Return the length of an array of counts in shared memory: an odd number of pairs for each thread, and more than rows."""
    pairs = rows // (64 * WARPS)
    return (pairs + 1 + pairs % 2) * (64 * WARPS)


@triton.jit
def lookups_of(offsets, batches, feature, exists, num_bags, num_lookups):
    """Return where the lookups of features begin and end, within those that there are."""
    first = feature * num_bags
    last = first + num_bags
    if batches is not None:
        first = tl.load(batches + feature * BATCH_FIELDS + FIRST_BAG, mask=exists, other=0)
        last = first + tl.load(batches + feature * BATCH_FIELDS + NUM_BAGS, mask=exists, other=0)
    begin = tl.minimum(tl.maximum(tl.load(offsets + first, mask=exists, other=0).to(tl.int64), 0), num_lookups)
    end = tl.minimum(tl.load(offsets + last, mask=exists, other=0).to(tl.int64), num_lookups)
    return begin, tl.maximum(begin, end)


@triton.jit(do_not_specialize=["num_lookups", "num_features", "num_bags", "num_programs", "most_counted"])
def embedding_bags_chunks_kernel(
    offsets, layout, batches, chunk_begins, block_begins, place_begins, count_begins, counters, num_lookups, num_features,
    num_bags, num_programs, most_counted, BLOCK: tl.constexpr,
):  # fmt: skip
    """Where the chunks, blocks, sorted lookups and counts of every feature begin, features in the order of their tables.

    The first three, `[features + 1]`, are in that order, `count_begins` in the layout's. A block is work of the last pass.
    Features of tables of more than `most_counted` rows have no chunks, and counts begin at -1. The first counter gets the number
    of programs, which begin with a unit each, the second 0.
    """
    tl.store(counters, num_programs)
    tl.store(counters + 1, 0)
    chunks_before, counts_before = tl.zeros((), tl.int64), tl.zeros((), tl.int64)
    blocks_before, places_before = tl.zeros((), tl.int64), tl.zeros((), tl.int64)
    seen_before = tl.zeros((), tl.int64)
    for start in range(0, num_features, BLOCK):
        at = start + tl.arange(0, BLOCK)
        exists = at < num_features
        feature = tl.load(layout + at.to(tl.int64) * FIELDS + IN_ORDER, mask=exists, other=0)
        rows = tl.load(layout + feature * FIELDS + ROWS, mask=exists, other=0)
        begin, end = lookups_of(offsets, batches, feature, exists, num_bags, num_lookups)
        # Features that lie over one another, which wrong offsets make, would be more than there is room for. Behind the first
        # of those none is counted, so that of each table the first ones are.
        is_counted = exists & (rows <= most_counted) & (seen_before + tl.cumsum(end - begin, 0) <= num_lookups)
        lookups = tl.where(is_counted, end - begin, 0)
        own_bits = chunk_bits(rows)
        chunks = (lookups + (1 << own_bits) - 1) >> own_bits
        blocks = (lookups + BLOCK_PLACES - 1) // BLOCK_PLACES
        counts = chunks * counts_of(rows)
        tl.store(chunk_begins + at, chunks_before + tl.cumsum(chunks, 0) - chunks, mask=exists)
        tl.store(block_begins + at, blocks_before + tl.cumsum(blocks, 0) - blocks, mask=exists)
        of_feature = tl.where(is_counted, counts_before + tl.cumsum(counts, 0) - counts, -1)
        tl.store(count_begins + feature, of_feature, mask=exists)
        tl.store(place_begins + at, places_before + tl.cumsum(lookups, 0) - lookups, mask=exists)
        chunks_before += tl.sum(chunks, 0)
        blocks_before += tl.sum(blocks, 0)
        counts_before += tl.sum(counts, 0)
        places_before += tl.sum(lookups, 0)
        seen_before += tl.sum(end - begin, 0)
    tl.store(chunk_begins + num_features, chunks_before)
    tl.store(block_begins + num_features, blocks_before)
    tl.store(place_begins + num_features, places_before)


@triton.jit
def lanes_equal(x, may_equal, MATCH: tl.constexpr):
    """Return for each lane the mask of those of its warp that have the same number; without `MATCH`, NVIDIA's, of 32 lanes.

    A warp none of whose lanes may have what another has is not asked: `match` takes as long as all else of a step together.
    """
    if MATCH:
        match: tl.constexpr = (
            "{ .reg .pred p; .reg .b32 l; mov.u32 l, %laneid; mov.b32 $0, 1; shl.b32 $0, $0, l; setp.ne.u32 p, $2, 0; "
            "vote.sync.any.pred p, p, -1; @!p bra DISTINCT; match.any.sync.b32 $0, $1, -1; DISTINCT: }"
        )
        arguments = [x, may_equal.to(tl.int32)]
        mask = tl.inline_asm_elementwise(match, "=&r,r,r", arguments, dtype=tl.uint32, is_pure=False, pack=1)
    else:
        mask = tl.sum((x[:, None] == x[None, :]).to(tl.uint32) << tl.arange(0, 32)[None, :], 1)
    return mask


@triton.jit
def count_of(mask, MATCH: tl.constexpr):
    """Return the number of bits that are set."""
    if MATCH:
        count = tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [mask], dtype=tl.int32, is_pure=True, pack=1)
    else:
        count = tl.sum(((mask[:, None] >> tl.arange(0, 32)[None, :]) & 1).to(tl.int32), 1)
    return count


@triton.jit
def count_at(own, row, SHARED: tl.constexpr):
    """Return what counts of rows say, in shared memory or at `own` in global memory."""
    return load16(own + row * 2) if SHARED else tl.load(own + row, cache_modifier=".cg").to(tl.int32)


@triton.jit
def add_one(own, row, mask, SHARED: tl.constexpr):
    """Add 1 to the counts of rows, whichever lanes have the same one."""
    if SHARED:
        # Two counts in a number of 32 bits: a chunk has fewer lookups than 16 bits hold.
        add32(own + (row >> 1) * 4, 1 << ((row & 1) * 16), mask)
    else:
        tl.atomic_add(own + row, tl.full(row.shape, 1, own.dtype.element_ty), mask=mask, sem="relaxed")


@triton.jit
def wait(SHARED: tl.constexpr):
    """Let lanes see what others of their warp have written in shared memory, or what all have in global memory."""
    if SHARED:
        sync_warp()
    else:
        tl.debug_barrier()


@triton.jit
def count_chunk(
    indices, own, length, rows, num_counts, of_part, stride, WARPS: tl.constexpr, BLOCK: tl.constexpr, SHARED: tl.constexpr
):  # fmt: skip
    """Count how many lookups of each part of a chunk each row has."""
    for start in range(0, num_counts, BLOCK):
        if SHARED:
            # Eight counts at a time.
            first = start + tl.arange(0, BLOCK // 8) * 8
            clear(own + first * 2, first < num_counts)
        else:
            row = start + tl.arange(0, BLOCK)
            tl.store(own + row, tl.zeros((BLOCK,), own.dtype.element_ty), mask=row < num_counts)
    tl.debug_barrier()
    number = tl.arange(0, WARPS * COUNTED_TOGETHER)
    warp, in_part = number // 32 % WARPS, number // (32 * WARPS) * 32 + number % 32
    indices += warp * of_part + in_part
    left = tl.minimum(length - warp * of_part, of_part) - in_part
    ids = tl.load(indices, mask=left > 0, other=-1)
    for start in range(0, of_part, COUNTED_TOGETHER):
        is_known = (ids >= 0) & (ids < rows)
        row = tl.where(is_known, ids, 0).to(tl.int32)
        following = start + COUNTED_TOGETHER
        ids = tl.load(indices + following, mask=left > following, other=-1)
        add_one(own, row + warp * stride, is_known, SHARED)
    tl.debug_barrier()


@triton.jit
def begin_rows(starts, own, rows, BLOCK: tl.constexpr):
    """Make of counts in global memory the places that the lookups of each row begin at; `starts` get the same."""
    before = tl.zeros((), tl.int32)
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        # Written by atomics: not what the L1 has.
        count = tl.load(own + row, mask=row < rows, other=0, cache_modifier=".cg").to(tl.int32)
        begin = before + tl.cumsum(count, 0) - count
        tl.store(starts + row, begin.to(tl.int16), mask=row < rows)
        tl.store(own + row, begin.to(own.dtype.element_ty), mask=row < rows)
        before += tl.sum(count, 0)
    tl.store(starts + rows, before.to(tl.int16))
    tl.debug_barrier()


@triton.jit
def begin_shared_rows(starts, own, rows, parts, stride, WARPS: tl.constexpr):
    """Make of counts in shared memory the places that the lookups of each row and part begin at; `starts` get the first part's.

    Two numbers of 16 bits at a time. A thread has neighbouring rows, an odd number of pairs, so that threads of a warp read from
    different banks. Behind the last row stands how many lookups there are.
    """
    thread = tl.arange(0, 32 * WARPS)
    pairs = stride // (64 * WARPS)
    of_thread = own + thread * pairs * 4
    both = tl.zeros((32 * WARPS,), tl.int32)
    for pair in range(0, pairs):
        for part in range(0, parts):
            both += load32(of_thread + part * stride * 2 + pair * 4)
    of_rows = (both & 0xFFFF) + (both >> 16)
    before = tl.cumsum(of_rows, 0) - of_rows
    for pair in range(0, pairs):
        both = tl.zeros((32 * WARPS,), tl.int32)
        for part in range(0, parts):
            both += load32(of_thread + part * stride * 2 + pair * 4)
        even = before + (both & 0xFFFF)
        begin, before = before | even << 16, even + (both >> 16)
        for part in range(0, parts):
            address = of_thread + part * stride * 2 + pair * 4
            count = load32(address)
            store32(address, begin, thread >= 0)
            begin += count
    tl.debug_barrier()
    starts = starts.to(tl.pointer_type(tl.int32))
    for start in range(0, rows // 2 + 1, 32 * WARPS):
        tl.store(starts + start + thread, load32(own + (start + thread) * 4), mask=start + thread <= rows // 2)
    # The first part's are changed from here on.
    tl.debug_barrier()


@triton.jit
def order_chunk(
    indices, positions, starts, own, length, rows, WARPS: tl.constexpr, BLOCK: tl.constexpr, ROOM: tl.constexpr,
    MATCH: tl.constexpr,
):  # fmt: skip
    """Give each lookup of a chunk its place among the chunk's in the order of their rows, and `starts` where each row begins.

    The chunk is cut into parts, one for each warp, which has counts of its own if there is room for them.
    """
    SHARED: tl.constexpr = ROOM > 0
    parts, stride, num_counts = 1, 0, rows
    if SHARED:
        stride = shared_stride(rows, WARPS)
        parts = tl.minimum(ROOM // stride, WARPS)
        num_counts = parts * stride
    of_part = (length + 32 * parts - 1) // (32 * parts) * 32
    count_chunk(indices, own, length, rows, num_counts, of_part, stride, WARPS, BLOCK, SHARED)
    if SHARED:
        begin_shared_rows(starts, own, rows, parts, stride, WARPS)
    else:
        begin_rows(starts, own, rows, BLOCK)
    number = tl.arange(0, 32 * WARPS)
    warp, lane = number // 32, number % 32
    if SHARED:
        own += tl.minimum(warp, parts - 1) * stride * 2
    indices += warp * of_part + lane
    positions += warp * of_part + lane
    left = tl.minimum(length - warp * of_part, of_part) - lane
    ids = tl.load(indices, mask=left > 0, other=-1)
    next_ids = tl.load(indices + 32, mask=left > 32, other=-1)
    before = (tl.full((32 * WARPS,), 1, tl.uint32) << lane) - 1
    for start in range(0, of_part, 32):
        is_known = (ids >= 0) & (ids < rows)
        row = tl.where(is_known, ids, -1).to(tl.int32)
        of_row = tl.maximum(row, 0)
        old = count_at(own, of_row, SHARED)
        ids, next_ids = next_ids, tl.load(indices + start + 64, mask=left > start + 64, other=-1)
        # All lanes have read before one adds, and they read what others have added.
        wait(SHARED)
        add_one(own, of_row, is_known, SHARED)
        wait(SHARED)
        new = count_at(own, of_row, SHARED)
        equal = lanes_equal(row, is_known & (new - old > 1), MATCH)
        place = new - count_of(equal, MATCH) + count_of(equal & before, MATCH)
        tl.store(positions + start, place.to(tl.int16), mask=is_known)


@triton.jit(do_not_specialize=["num_lookups", "num_features", "num_bags"])
def embedding_bags_orders_kernel(
    indices, offsets, layout, batches, chunk_begins, count_begins, starts, places, positions, num_lookups, num_features,
    num_bags, BLOCK: tl.constexpr, ROOM: tl.constexpr, WARPS: tl.constexpr, MATCH: tl.constexpr,
):  # fmt: skip
    """Order the lookups of each chunk by their rows: `positions` say where each goes, `starts` where rows begin.

    Up to `ROOM` counts are in shared memory; those of larger tables in the chunk's part of `places`, which is written later.
    """
    chunk = tl.program_id(0)
    if chunk < tl.load(chunk_begins + num_features):
        at = find_segment(chunk_begins, chunk, num_features)
        number = chunk - tl.load(chunk_begins + at)
        feature = tl.load(layout + at * FIELDS + IN_ORDER)
        rows = tl.load(layout + feature * FIELDS + ROWS).to(tl.int32)
        begin, end = lookups_of(offsets, batches, feature, True, num_bags, num_lookups)
        begin += number << chunk_bits(rows)
        length = tl.minimum(end - begin, 1 << chunk_bits(rows)).to(tl.int32)
        own = tl.load(count_begins + feature) // 4 * 4 + number * counts_of(rows)
        indices += begin
        positions += begin
        if shared_stride(rows, WARPS) <= ROOM:
            if ROOM:
                order_chunk(indices, positions, starts + own, reserve(2 * ROOM), length, rows, WARPS, BLOCK, ROOM, MATCH)
        else:
            order_chunk(indices, positions, starts + own, places + own, length, rows, WARPS, BLOCK, 0, MATCH)


@triton.jit
def ends_of(start, mask):
    """Return where rows begin and end in their chunks, which may have as many lookups as 16 bits hold."""
    begin, end = tl.load(start, mask=mask, other=0), tl.load(start + 1, mask=mask, other=0)
    return begin.to(tl.int32) & 0xFFFF, end.to(tl.int32) & 0xFFFF


@triton.jit(do_not_specialize=["most_counted"])
def embedding_bags_bounds_kernel(
    tables, layout, chunk_begins, count_begins, place_begins, starts, places, bounds, long_rows, arrivals, counters,
    most_counted, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum the begins of a table's rows over its chunks: `bounds` get where the lookups of a row begin and end.

    `places` get what is to be added to the place of a lookup in its chunk. Rows of more than `LONG` lookups get a slot of
    `long_rows` `[slots, LONG_FIELDS]` for each `LONG` of them, and 0 arrivals in the first one.
    """
    table = tl.program_id(0).to(tl.int64)
    fields = tables + table * FIELDS
    rows = tl.load(fields + ROWS)
    first_feature, last_feature = tl.load(fields + FIRST_READER), tl.load(fields + FIELDS + FIRST_READER)
    # For tables that nothing reads `bounds` may have no room.
    if (rows <= most_counted) & (first_feature < last_feature):
        num_chunks = (tl.load(chunk_begins + last_feature) - tl.load(chunk_begins + first_feature)).to(tl.int32)
        before = tl.load(place_begins + first_feature)
        feature = tl.load(layout + first_feature * FIELDS + IN_ORDER)
        own = tl.maximum(tl.load(count_begins + feature), 0) // 4 * 4
        starts, places = starts + own, places + own
        bounds += tl.load(fields + FIRST_ROW) + table
        tl.store(bounds, before, mask=tl.program_id(1) == 0)
        stride = counts_of(rows)
        for start in range(tl.program_id(1) * BLOCK, rows.to(tl.int32), tl.num_programs(1) * BLOCK):
            row = start + tl.arange(0, BLOCK)
            exists = row < rows
            begin = tl.zeros((BLOCK,), bounds.dtype.element_ty) + before.to(bounds.dtype.element_ty)
            end = begin
            for chunk in range(0, num_chunks, CHUNKS_TOGETHER):
                for i in tl.static_range(CHUNKS_TOGETHER):
                    first, after = ends_of(starts + (chunk + i) * stride + row, exists & (chunk + i < num_chunks))
                    begin += first
                    end += after
            tl.store(bounds + row + 1, end, mask=exists)
            place = begin
            for chunk in range(0, num_chunks):
                first, after = ends_of(starts + chunk * stride + row, exists)
                tl.store(places + chunk * stride + row, (place - first).to(places.dtype.element_ty), mask=exists)
                place += after - first
            slices = tl.where(exists & (end - begin > LONG), (end - begin + LONG - 1) // LONG, 0).to(tl.int32)
            most = tl.max(slices, 0)
            if most > 0:
                slot = tl.atomic_add(counters + 1 + tl.zeros_like(row), slices.to(tl.int64), mask=slices > 0, sem="relaxed")
                tl.store(arrivals + slot, tl.zeros_like(row), mask=slices > 0)
                for i in range(0, most):
                    of_slot = long_rows + (slot + i) * LONG_FIELDS
                    tl.store(of_slot + LONG_ROW, row.to(tl.int64), mask=i < slices)
                    tl.store(of_slot + LONG_TABLE, tl.zeros_like(slot) + table, mask=i < slices)
                    tl.store(of_slot + FIRST_SLOT, slot, mask=i < slices)


@triton.jit
def bags_at(offsets, place, num_bags):
    """Return the bags, of `num_bags`, that places are in: the last that begin at them or before.

    Not `find_segments`: halves of powers of two take a third of its instructions, and half of this pass is the search.
    """
    bag = tl.zeros(place.shape, tl.uint32)
    half = tl.zeros((), tl.uint32) + 1
    while half < num_bags:
        half *= 2
    while half > 1:
        half //= 2
        exists = bag + half < num_bags
        bag = tl.where(exists & (tl.load(offsets + (bag + half), mask=exists, other=0) <= place), bag + half, bag)
    return bag


@triton.jit
def is_below(number, limit):
    """Return which numbers lie from 0 to below a limit, as all do but where wrong offsets make chunks overlap."""
    unsigned: tl.constexpr = tl.uint32 if number.dtype == tl.int32 else tl.uint64
    return number.to(unsigned, bitcast=True) < limit


@triton.jit(do_not_specialize=["num_lookups", "num_features", "num_bags", "output_stride"])
def embedding_bags_sources_kernel(
    indices, offsets, scales, layout, batches, block_begins, count_begins, starts, places, positions, sources, factors,
    num_lookups, num_features, num_bags, output_stride, SHARED: tl.constexpr,
):  # fmt: skip
    """Put source and factor of every lookup of a block where its row's lookups stand.

    Of a chunk that is one block they are put into the order of its rows first, in shared memory (`SHARED`): one behind the other
    they then go to places near one another, several in a sector of memory, and the places of their rows are read in order.
    """
    wide: tl.constexpr = sources.dtype.element_ty
    block = tl.program_id(0)
    # Read ahead by who comes to the last lookups, and not used.
    tl.store(sources + num_lookups + tl.arange(0, 2), tl.zeros((2,), sources.dtype.element_ty), mask=block == 0)
    if block < tl.load(block_begins + num_features):
        at = find_segment(block_begins, block, num_features)
        feature = tl.load(layout + at * FIELDS + IN_ORDER)
        fields = layout + feature * FIELDS
        rows = tl.load(fields + ROWS).to(tl.int32)
        begin, end = lookups_of(offsets, batches, feature, True, num_bags, num_lookups)
        first_bag, first_source, stride = feature * num_bags, tl.load(fields + OUTPUT_COLUMN), output_stride.to(tl.int64)
        if batches is not None:
            of_batch = batches + feature * BATCH_FIELDS
            first_bag, first_source = tl.load(of_batch + FIRST_BAG), tl.load(of_batch + OUTPUT_BEGIN)
            num_bags, stride = tl.load(of_batch + NUM_BAGS).to(tl.int32), tl.load(of_batch + OUTPUT_STRIDE)
        offsets += first_bag
        in_feature = (block - tl.load(block_begins + at)) * BLOCK_PLACES
        begin += in_feature
        length = tl.minimum(end - begin, BLOCK_PLACES).to(tl.int32)
        own_bits = chunk_bits(rows)
        own = tl.load(count_begins + feature) + (in_feature >> own_bits) * counts_of(rows)
        places += own
        # Each lookup searches among the bags between the first lookup's and the last's.
        low = find_segment(offsets, begin, num_bags)
        width = find_segment(offsets, begin + length - 1, num_bags) + 1 - low
        is_direct = True
        if SHARED:
            is_direct = (1 << own_bits) != BLOCK_PLACES
            source_at = reserve(6 * BLOCK_PLACES)
            row_at = source_at + 4 * BLOCK_PLACES
        # Ids and positions of the next lookups are under way while these ones' bags are searched.
        following = tl.arange(0, PLACES_TOGETHER)
        next_id = tl.load(indices + begin + following, mask=following < length, other=-1)
        next_position = tl.load(positions + begin + following, mask=following < length, other=0)
        for _ in range(0, length, PLACES_TOGETHER):
            lookup, row, position = following, next_id, next_position.to(tl.int32)
            following += PLACES_TOGETHER
            next_id = tl.load(indices + begin + following, mask=following < length, other=-1)
            next_position = tl.load(positions + begin + following, mask=following < length, other=0)
            is_known = (row >= 0) & (row < rows)
            row = tl.where(is_known, row, 0).to(tl.int32)
            bag = low + bags_at(offsets + low, begin.to(offsets.dtype.element_ty) + lookup, width).to(tl.int32)
            # Numbers of 32 bits where that is what is stored, whatever is lost above them on the way.
            source = first_source.to(wide) + bag.to(wide) * stride.to(wide)
            if is_direct:
                target = tl.load(places + row, mask=is_known, other=0) + position
                is_known &= is_below(target, num_lookups)
                tl.store(sources + target, source, mask=is_known)
                if factors is not None:
                    begin_of_bag, end_of_bag = span_of(offsets, bag, lookup < length, num_lookups)
                    of_mean = 1 / tl.maximum(end_of_bag - begin_of_bag, 1).to(tl.float32)
                    factor = tl.where(tl.load(fields + IS_MEAN) != 0, of_mean, 1.0)
                    if scales is not None:
                        factor *= tl.load(scales + begin + lookup, mask=is_known, other=0.0).to(tl.float32)
                    tl.store(factors + target, factor, mask=is_known)
            if SHARED:  # noqa: SIM102
                if not is_direct:
                    is_known &= is_below(position, BLOCK_PLACES)
                    store32(source_at + position * 4, source, is_known)
                    store16(row_at + position * 2, row, is_known)
        if SHARED:  # noqa: SIM102
            if not is_direct:
                tl.debug_barrier()
                num_known = tl.load(starts + own + rows).to(tl.int32)
                for start in range(0, num_known, 2 * PLACES_TOGETHER):
                    position = start + tl.arange(0, 2 * PLACES_TOGETHER)
                    row, source = load16(row_at + position * 2), load32(source_at + position * 4)
                    is_known = (position < num_known) & (row < rows)
                    target = tl.load(places + row, mask=is_known, other=0) + position
                    tl.store(sources + target, source, mask=is_known & is_below(target, num_lookups))
