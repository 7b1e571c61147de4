"""Lookups of each row brought together by counting: for tables of up to 65,536 rows, whose rows most batches read often.

Lookups of a feature are cut into chunks. One warp counts how many lookups of a chunk each row has, walks through the chunk in
order, and gives each lookup its place among the chunk's, ordered by their rows. Sums over the chunks, then over the rows, say
where each row's lookups of each chunk go among the table's, and a last pass puts what backward reads of them there: the element of
the incoming gradient that its bag begins at, and what it is multiplied by. So a row's lookups stand together in their order,
whatever order programs ran in, and where each row begins is known without a search.
"""

from __future__ import annotations

import triton
import triton.language as tl

from jagged.ops._shared.device import find_segment, find_segments
from jagged.ops.embedding_bag.schedules import span_of
from jagged.ops.embedding_bag.shared_memory import add32, clear, load16, load32, reserve, store16, store32

# Exponent of the lookups of a chunk. Many short chunks are counted at a time; of long ones neighbours in the order of rows go to
# places near one another, and they need few counts: tables of more than 16,384 rows have longer ones.
CHUNK_BITS = 13
# Rows of tables at most whose chunks are counted in shared memory, in 16 bits each. The more, the fewer chunks at a time.
MOST_SHARED = 16_384
# Lookups whose rows a warp counts at once.
COUNTED_TOGETHER = tl.constexpr(128)
# Lookups of a row above which several programs sum it, each as many as that.
LONG = tl.constexpr(256)
# Features that the kernel of the chunks takes at once, rows that the one of the orders does, rows and chunks that the one of the
# bounds does.
BLOCK_FEATURES, ORDERED_ROWS, BLOCK_ROWS, BLOCK_CHUNKS = 1024, 256, 1024, 2
# Lookups that a program of the last pass takes, of one chunk: all of it, but of long ones. And how many at once.
BLOCK_PLACES, PLACES_TOGETHER = tl.constexpr(1 << CHUNK_BITS), tl.constexpr(2048)
# Warps of the programs of the last two passes.
BOUNDS_WARPS, PLACES_WARPS = 8, 16


@triton.jit
def chunk_bits(rows, bits):
    """Return the exponent of a chunk's length: `bits`, and more for tables of very many rows."""
    return (rows > 16384).to(tl.int32) + (rows > 32768).to(tl.int32) + bits


@triton.jit
def counts_of(rows):
    """Return the length of a chunk's array of counts, or of begins of rows and one end: a multiple of 4."""
    return (rows + 4) // 4 * 4


@triton.jit
def lookups_of(offsets, batches, feature, exists, num_bags, num_lookups):
    """Return where the lookups of features begin and end, within those that there are."""
    first = feature * num_bags
    last = first + num_bags
    if batches is not None:
        first = tl.load(batches + feature * 3, mask=exists, other=0)
        last = first + tl.load(batches + feature * 3 + 1, mask=exists, other=0)
    begin = tl.minimum(tl.maximum(tl.load(offsets + first, mask=exists, other=0).to(tl.int64), 0), num_lookups)
    end = tl.minimum(tl.load(offsets + last, mask=exists, other=0).to(tl.int64), num_lookups)
    return begin, tl.maximum(begin, end)


@triton.jit(do_not_specialize=["num_lookups", "num_features", "num_bags", "num_programs", "most_counted", "bits"])
def embedding_bags_chunks_kernel(
    offsets, layout, batches, chunk_begins, block_begins, place_begins, count_begins, counters, num_lookups, num_features,
    num_bags, num_programs, most_counted, bits, FIELDS: tl.constexpr, BLOCK: tl.constexpr,
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
        feature = tl.load(layout + at.to(tl.int64) * FIELDS + 7, mask=exists, other=0)
        rows = tl.load(layout + feature * FIELDS + 1, mask=exists, other=0)
        begin, end = lookups_of(offsets, batches, feature, exists, num_bags, num_lookups)
        # Features that lie over one another, which wrong offsets make, would be more than there is room for. Behind the first
        # of those none is counted, so that of each table the first ones are.
        is_counted = exists & (rows <= most_counted) & (seen_before + tl.cumsum(end - begin, 0) <= num_lookups)
        lookups = tl.where(is_counted, end - begin, 0)
        own_bits = chunk_bits(rows, bits)
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


def _equals(bits: int) -> str:
    """Assembly that compares the lowest bits of two numbers of each lane of a warp, by a vote for each bit of each.

    Gives masks of lanes: whose first number equals the first, whose second the first, whose first the second, whose second the
    second.
    """
    # Of a lane with the bit those that have it are left, of others those that do not.
    steps = "".join(
        f"bfe.s32 s, $4, {bit}, 1; bfe.s32 t, $5, {bit}, 1; "
        "setp.ne.s32 p, s, 0; vote.sync.ballot.b32 v, p, -1; setp.ne.s32 p, t, 0; vote.sync.ballot.b32 w, p, -1; "
        "lop3.b32 a, a, v, s, 0x90; lop3.b32 b, b, w, s, 0x90; lop3.b32 c, c, v, t, 0x90; lop3.b32 d, d, w, t, 0x90; "
        for bit in range(bits)
    )
    begin = "{ .reg .pred p; .reg .b32 a, b, c, d, s, t, v, w; mov.b32 a, -1; mov.b32 b, -1; mov.b32 c, -1; mov.b32 d, -1; "
    return begin + steps + "mov.b32 $0, a; mov.b32 $1, b; mov.b32 $2, c; mov.b32 $3, d; }"


EQUALS_10, EQUALS_12, EQUALS_16 = (tl.constexpr(_equals(bits)) for bits in (10, 12, 16))


@triton.jit
def lanes_with(flag, VOTE: tl.constexpr):
    """Return for each of 32 lanes the mask of those with a flag."""
    if VOTE:
        vote: tl.constexpr = "{ .reg .pred p; setp.ne.u32 p, $1, 0; vote.sync.ballot.b32 $0, p, -1; }"
        return tl.inline_asm_elementwise(vote, "=r,r", [flag.to(tl.int32)], dtype=tl.uint32, is_pure=False, pack=1)
    return tl.zeros((32,), tl.uint32) + tl.sum(flag.to(tl.uint32) << tl.arange(0, 32), 0)


@triton.jit
def lanes_equal(x, y):
    """Return for each of 32 numbers the mask of the lanes whose `y` equals it."""
    return tl.sum((x[:, None] == y[None, :]).to(tl.uint32) << tl.arange(0, 32)[None, :], 1)


@triton.jit
def count_of(mask, VOTE: tl.constexpr):
    """Return the number of bits that are set."""
    if VOTE:
        return tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [mask], dtype=tl.int32, is_pure=True, pack=1)
    return tl.sum(((mask[:, None] >> tl.arange(0, 32)[None, :]) & 1).to(tl.int32), 1)


@triton.jit
def ranks_of_equals(first, second, has_first, has_second, rows, VOTE: tl.constexpr):
    """Return for each of 64 rows, two of each lane, how many equal ones come before it, and whether it is the last of them.

    All of `first` come before `second`. `VOTE` takes votes of a warp of NVIDIA's in place of thousands of comparisons.
    """
    if VOTE:
        of: tl.constexpr = (tl.uint32, tl.uint32, tl.uint32, tl.uint32)
        kinds: tl.constexpr = "=&r,=&r,=&r,=&r,r,r"
        if rows <= 1024:
            aa, ab, ba, bb = tl.inline_asm_elementwise(EQUALS_10, kinds, [first, second], dtype=of, is_pure=False, pack=1)
        elif rows <= 4096:
            aa, ab, ba, bb = tl.inline_asm_elementwise(EQUALS_12, kinds, [first, second], dtype=of, is_pure=False, pack=1)
        else:
            aa, ab, ba, bb = tl.inline_asm_elementwise(EQUALS_16, kinds, [first, second], dtype=of, is_pure=False, pack=1)
    else:
        aa, ab, ba, bb = (
            lanes_equal(first, first),
            lanes_equal(first, second),
            lanes_equal(second, first),
            lanes_equal(second, second),
        )
    with_first, with_second = lanes_with(has_first, VOTE), lanes_with(has_second, VOTE)
    lane = tl.arange(0, 32)
    before = (tl.full((32,), 1, tl.uint32) << lane) - 1
    aa, ab, ba, bb = aa & with_first, ab & with_second, ba & with_first, bb & with_second
    rank = count_of(aa & before, VOTE)
    second_rank = count_of(ba, VOTE) + count_of(bb & before, VOTE)
    return rank, second_rank, ((aa >> lane) == 1) & (ab == 0), (bb >> lane) == 1


@triton.jit
def count_at(own, row, SHARED: tl.constexpr):
    """Return what a chunk's count of rows says, in shared memory or at `own` in global memory."""
    return load16(own + row * 2) if SHARED else tl.load(own + row, cache_modifier=".cg").to(tl.int32)


@triton.jit
def set_count(own, row, count, mask, SHARED: tl.constexpr):
    """Change counts."""
    if SHARED:
        store16(own + row * 2, count, mask)
    else:
        tl.store(own + row, count.to(own.dtype.element_ty), mask=mask)


@triton.jit
def count_chunk(indices, own, length, rows, BLOCK: tl.constexpr, SHARED: tl.constexpr):
    """Count how many lookups of a chunk each row has."""
    for start in range(0, rows, BLOCK):
        if SHARED:
            # Eight counts at a time.
            first = start + tl.arange(0, BLOCK // 8) * 8
            clear(own + first * 2, first < rows)
        else:
            row = start + tl.arange(0, BLOCK)
            tl.store(own + row, tl.zeros((BLOCK,), own.dtype.element_ty), mask=row < rows)
    tl.debug_barrier()
    for start in range(0, length, COUNTED_TOGETHER):
        lookup = start + tl.arange(0, COUNTED_TOGETHER)
        row = tl.load(indices + lookup, mask=lookup < length, other=-1)
        is_known = (row >= 0) & (row < rows)
        row = tl.where(is_known, row, 0).to(tl.int32)
        if SHARED:
            # Two counts in a number of 32 bits: a chunk has fewer lookups than 16 bits hold.
            add32(own + (row >> 1) * 4, 1 << ((row & 1) * 16), is_known)
        else:
            tl.atomic_add(own + row, tl.full((COUNTED_TOGETHER,), 1, own.dtype.element_ty), mask=is_known, sem="relaxed")
    tl.debug_barrier()


@triton.jit
def order_chunk(
    indices, positions, starts, own, length, rows, BLOCK: tl.constexpr, SHARED: tl.constexpr, VOTE: tl.constexpr
):  # fmt: skip
    """Give each lookup of a chunk its place among the chunk's in the order of their rows, and `starts` where each row begins."""
    count_chunk(indices, own, length, rows, BLOCK, SHARED)
    before = tl.zeros((), tl.int32)
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        count = tl.where(row < rows, count_at(own, tl.minimum(row, rows - 1), SHARED), 0)
        begin = before + tl.cumsum(count, 0) - count
        tl.store(starts + row, begin.to(tl.int16), mask=row < rows)
        set_count(own, row, begin, row < rows, SHARED)
        before += tl.sum(count, 0)
    tl.store(starts + rows, before.to(tl.int16))
    tl.debug_barrier()
    lane = tl.arange(0, 32)
    ids = tl.load(indices + lane, mask=lane < length, other=-1)
    second_ids = tl.load(indices + 32 + lane, mask=lane < length - 32, other=-1)
    for start in range(0, length, 64):
        left = length - start
        is_known, second_is_known = (ids >= 0) & (ids < rows), (second_ids >= 0) & (second_ids < rows)
        row, second_row = tl.where(is_known, ids, 0).to(tl.int32), tl.where(second_is_known, second_ids, 0).to(tl.int32)
        place, second_place = count_at(own, row, SHARED), count_at(own, second_row, SHARED)
        ids = tl.load(indices + start + 64 + lane, mask=lane < left - 64, other=-1)
        second_ids = tl.load(indices + start + 96 + lane, mask=lane < left - 96, other=-1)
        rank, second_rank, is_last, second_is_last = ranks_of_equals(row, second_row, is_known, second_is_known, rows, VOTE)
        place += rank
        second_place += second_rank
        tl.store(positions + start + lane, place.to(tl.int16), mask=is_known)
        tl.store(positions + start + 32 + lane, second_place.to(tl.int16), mask=second_is_known)
        # All lanes have read before one writes, and they read what others have written.
        tl.debug_barrier()
        set_count(own, row, place + 1, is_last, SHARED)
        set_count(own, second_row, second_place + 1, second_is_last, SHARED)
        tl.debug_barrier()


@triton.jit(do_not_specialize=["num_lookups", "num_features", "num_bags", "bits"])
def embedding_bags_orders_kernel(
    indices, offsets, layout, batches, chunk_begins, count_begins, starts, places, positions, num_lookups, num_features,
    num_bags, bits, FIELDS: tl.constexpr, BLOCK: tl.constexpr, ROOM: tl.constexpr, VOTE: tl.constexpr,
):  # fmt: skip
    """Order the lookups of each chunk by their rows: `positions` say where each goes, `starts` where rows begin.

    Tables of up to `ROOM` rows are counted in shared memory, others in the chunk's part of `places`, which is written later.
    """
    chunk = tl.program_id(0)
    if chunk < tl.load(chunk_begins + num_features):
        at = find_segment(chunk_begins, chunk, num_features)
        number = chunk - tl.load(chunk_begins + at)
        feature = tl.load(layout + at * FIELDS + 7)
        rows = tl.load(layout + feature * FIELDS + 1).to(tl.int32)
        begin, end = lookups_of(offsets, batches, feature, True, num_bags, num_lookups)
        begin += number << chunk_bits(rows, bits)
        length = tl.minimum(end - begin, 1 << chunk_bits(rows, bits)).to(tl.int32)
        own = tl.load(count_begins + feature) // 4 * 4 + number * counts_of(rows)
        indices += begin
        positions += begin
        if rows <= ROOM:
            if ROOM:
                order_chunk(indices, positions, starts + own, reserve(2 * ROOM), length, rows, BLOCK, True, VOTE)
        else:
            order_chunk(indices, positions, starts + own, places + own, length, rows, BLOCK, False, VOTE)


@triton.jit
def ends_of(start, mask):
    """Return where rows begin and end in their chunks, which may have as many lookups as 16 bits hold."""
    begin, end = tl.load(start, mask=mask, other=0), tl.load(start + 1, mask=mask, other=0)
    return begin.to(tl.int32) & 0xFFFF, end.to(tl.int32) & 0xFFFF


@triton.jit(do_not_specialize=["most_counted"])
def embedding_bags_bounds_kernel(
    tables, layout, chunk_begins, count_begins, place_begins, starts, places, bounds, long_rows, counters, most_counted,
    FIELDS: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Sum the counts of a table over chunks and rows: `bounds` get where the lookups of a row begin and end.

    `places` get what is to be added to the place of a lookup in its chunk.
    Rows of more than `LONG` lookups get a slot of `long_rows` `[slots, 3]` for each `LONG` of them: row, table, and first slot.
    """
    table = tl.program_id(0).to(tl.int64)
    fields = tables + table * FIELDS
    rows = tl.load(fields + 1)
    begin, end = tl.load(fields + 7), tl.load(fields + FIELDS + 7)
    # For tables that nothing reads `bounds` may have no room.
    if (rows <= most_counted) & (begin < end):
        num_chunks = (tl.load(chunk_begins + end) - tl.load(chunk_begins + begin)).to(tl.int32)
        before = tl.load(place_begins + begin)
        feature = tl.load(layout + begin * FIELDS + 7)
        own = tl.maximum(tl.load(count_begins + feature), 0) // 4 * 4
        starts, places = starts + own, places + own
        bounds += tl.load(fields + 5) + table
        tl.store(bounds, before)
        stride = counts_of(rows)
        for start in range(0, rows.to(tl.int32), BLOCK):
            row = start + tl.arange(0, BLOCK)
            exists = row < rows
            total = tl.zeros((BLOCK,), tl.int32)
            for chunk in range(0, num_chunks, CHUNKS):
                of_chunks = chunk + tl.arange(0, CHUNKS)
                mask = (of_chunks < num_chunks)[:, None] & exists[None, :]
                begin_of_row, end_of_row = ends_of(starts + of_chunks[:, None] * stride + row[None, :], mask)
                total += tl.sum(end_of_row - begin_of_row, 0)
            place = before + tl.cumsum(total, 0)
            tl.store(bounds + row + 1, place, mask=exists)
            before += tl.sum(total, 0)
            place -= total
            for chunk in range(0, num_chunks, CHUNKS):
                of_chunks = chunk + tl.arange(0, CHUNKS)
                mask = (of_chunks < num_chunks)[:, None] & exists[None, :]
                at = of_chunks[:, None] * stride + row[None, :]
                begin_of_row, end_of_row = ends_of(starts + at, mask)
                of_chunk = end_of_row - begin_of_row
                first = place[None, :] + tl.cumsum(of_chunk, 0) - of_chunk
                tl.store(places + at, (first - begin_of_row).to(places.dtype.element_ty), mask=mask)
                place += tl.sum(of_chunk, 0)
            slices = tl.where(total > LONG, (total + LONG - 1) // LONG, 0)
            most = tl.max(slices, 0)
            if most > 0:
                slot = tl.atomic_add(counters + 1 + tl.zeros_like(row), slices.to(tl.int64), mask=slices > 0, sem="relaxed")
                for i in range(0, most):
                    of_slot = long_rows + (slot + i) * 3
                    tl.store(of_slot, row.to(tl.int64), mask=i < slices)
                    tl.store(of_slot + 1, tl.zeros_like(slot) + table, mask=i < slices)
                    tl.store(of_slot + 2, slot, mask=i < slices)


@triton.jit(do_not_specialize=["num_lookups", "num_features", "num_bags", "output_stride", "bits"])
def embedding_bags_sources_kernel(
    indices, offsets, scales, layout, batches, block_begins, count_begins, starts, places, positions, sources, factors,
    num_lookups, num_features, num_bags, output_stride, bits, FIELDS: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Put source and factor of every lookup of a block where its row's lookups stand.

    Of a chunk that is one block they are put into the order of its rows first, in shared memory (`SHARED`): one behind the other
    they then go to places near one another, several in a sector of memory, and the places of their rows are read in order.
    """
    block = tl.program_id(0)
    # Read ahead by who comes to the last lookups, and not used.
    tl.store(sources + num_lookups + tl.arange(0, 2), tl.zeros((2,), sources.dtype.element_ty), mask=block == 0)
    if block < tl.load(block_begins + num_features):
        at = find_segment(block_begins, block, num_features)
        feature = tl.load(layout + at * FIELDS + 7)
        fields = layout + feature * FIELDS
        rows = tl.load(fields + 1).to(tl.int32)
        begin, end = lookups_of(offsets, batches, feature, True, num_bags, num_lookups)
        first_bag, first_source, stride = feature * num_bags, tl.load(fields + 3), output_stride.to(tl.int64)
        if batches is not None:
            first_bag, first_source = tl.load(batches + feature * 3), tl.load(batches + feature * 3 + 2)
            num_bags, stride = tl.load(batches + feature * 3 + 1).to(tl.int32), tl.load(fields + 2)
        offsets += first_bag
        in_feature = (block - tl.load(block_begins + at)) * BLOCK_PLACES
        begin += in_feature
        length = tl.minimum(end - begin, BLOCK_PLACES).to(tl.int32)
        own_bits = chunk_bits(rows, bits)
        own = tl.load(count_begins + feature) + (in_feature >> own_bits) * counts_of(rows)
        places += own
        # Each lookup searches among the bags between the first lookup's and the last's.
        low = find_segment(offsets, begin, num_bags)
        width = find_segment(offsets, begin + length - 1, num_bags) + 1 - low
        is_ordered = (1 << own_bits) == BLOCK_PLACES
        if SHARED:
            source_at = reserve(6 * BLOCK_PLACES)
            row_at = source_at + 4 * BLOCK_PLACES
        for start in range(0, length, PLACES_TOGETHER):
            lookup = start + tl.arange(0, PLACES_TOGETHER)
            row = tl.load(indices + begin + lookup, mask=lookup < length, other=-1)
            is_known = (row >= 0) & (row < rows)
            row = tl.where(is_known, row, 0).to(tl.int32)
            position = tl.load(positions + begin + lookup, mask=is_known, other=0).to(tl.int32)
            bag = low + find_segments(offsets + low, begin.to(offsets.dtype.element_ty) + lookup, width)
            source = first_source + bag * stride
            is_direct = is_known
            if SHARED:
                if is_ordered:
                    store32(source_at + position * 4, source.to(tl.int32), is_known)
                    store16(row_at + position * 2, row, is_known)
                is_direct = is_known & (not is_ordered)
            target = tl.load(places + row, mask=is_direct, other=0).to(tl.int64) + position
            tl.store(sources + target, source.to(sources.dtype.element_ty), mask=is_direct)
            if factors is not None:
                begin_of_bag, end_of_bag = span_of(offsets, bag, lookup < length, num_lookups)
                factor = tl.where(tl.load(fields + 4) != 0, 1 / tl.maximum(end_of_bag - begin_of_bag, 1).to(tl.float32), 1.0)
                if scales is not None:
                    factor *= tl.load(scales + begin + lookup, mask=is_known, other=0.0).to(tl.float32)
                tl.store(factors + target, factor, mask=is_known)
        if SHARED:  # noqa: SIM102
            if is_ordered:
                tl.debug_barrier()
                num_known = tl.load(starts + own + rows).to(tl.int32)
                for start in range(0, num_known, PLACES_TOGETHER):
                    position = start + tl.arange(0, PLACES_TOGETHER)
                    row, source = load16(row_at + position * 2), load32(source_at + position * 4)
                    target = tl.load(places + row, mask=position < num_known, other=0).to(tl.int64) + position
                    tl.store(sources + target, source, mask=position < num_known)
