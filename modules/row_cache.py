"""Rows of embedding tables in the host's memory that are cached on a device: which are there, and how they come and go."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from jagged.modules.bag_collection import on_device
from jagged.ops import BagLayout, BagOptimizer, claim_rows, exchange_rows, seat_rows, values_are_trusted

# Bytes on the device for each row of the tables: its slot, and how often it was looked up.
BYTES_OF_ROW = 4 + 4
# Bytes for each slot beside its row and states: its row, the last lookup that read it, whether it was changed, its place in the
# order in which slots are given away.
BYTES_OF_SLOT = 4 + 4 + 1 + 8
# Counts are halved when so many lookups for each row of the tables have been counted since they last were.
COUNTED_BEFORE_HALVING = 32
# Lookups whose most misses say how many slots are kept for misses, and how many times as many are.
WATCHED_LOOKUPS, ROOM = 16, 1.25


class CacheForecast(NamedTuple):
    """What tables with a cache take, in bytes, and how much of them is cached.

    Attributes:
        device_bytes: on the device: cached rows with their optimizer states, and what says where rows are and how often they were
            looked up. What a batch itself needs comes on top, and so do the moves, with 13 bytes for each row while they last.
        host_bytes: in the host's memory, pinned where the device is a GPU: all rows and states.
        slots: rows that can be on the device at once.
        rows: of all tables.
    """

    device_bytes: int
    host_bytes: int
    slots: int
    rows: int


class CacheStatistics(NamedTuple):
    """What has happened since tables were given a cache, or since `reset`.

    Attributes:
        lookups: ids that were looked up.
        hits: those whose rows were on the device before.
        rows_read, rows_written: that came from the host's memory, and that were written back to it.
        bytes_read, bytes_written: of these rows and their optimizer states.
        moves: how often the most frequent rows were made the ones that stay.
    """

    lookups: int
    hits: int
    rows_read: int
    rows_written: int
    bytes_read: int
    bytes_written: int
    moves: int

    @property
    def hit_share(self) -> float:
        """Share of the ids whose rows were on the device; 1 before there are any."""
        return self.hits / self.lookups if self.lookups else 1.0


class Lease:
    """A lookup whose rows must stay until its gradients have been applied, or nobody can ask for them any more."""

    def __init__(self, number: int) -> None:
        self.number = number
        # How often rows had moved when it was released; None: not yet.
        self.released_at: int | None = None
        # When its rows are there, on a GPU.
        self.staged: torch.cuda.Event | None = None


class _Features(NamedTuple):
    """The slots with a layout's features, and what each reads, as `claim_rows` takes it."""

    slots: BagLayout
    of_features: Tensor


class _Free(NamedTuple):
    """Slots in the order in which they are given away, whose rows need not stay, and how many of these there are up to each."""

    ring: Tensor
    is_free: Tensor
    order: Tensor


class _Pool:
    """Tables of one width, whose rows share slots: numbered one table after the other, from `first` on."""

    def __init__(self, layout: BagLayout, width: int, first: int, first_slot: int, slots: int) -> None:
        self.tables = [table for table, own in enumerate(layout.widths) if own == width]
        self.width, self.first, self.first_slot, self.slots = width, first, first_slot, slots
        self.rows = sum(layout.rows[table] for table in self.tables)
        # Rows begin at multiples of it in every table.
        self.line = math.gcd(width, BagLayout.alignment)
        self.last_misses: deque[int] = deque(maxlen=WATCHED_LOOKUPS)

    @property
    def of_rows(self) -> slice:
        return slice(self.first, self.first + self.rows)

    @property
    def of_slots(self) -> slice:
        return slice(self.first_slot, self.first_slot + self.slots)


def bytes_by_row(layout: BagLayout, itemsize: int, optimizer: BagOptimizer) -> list[int]:
    """For each table the bytes of a row and its optimizer states."""
    sizes = {name: getattr(optimizer, name).element_size() for name in optimizer.states_of}
    of_rows = sum(sizes[name] for name, of in optimizer.states_of.items() if of == "row")
    of_elements = itemsize + sum(sizes[name] for name, of in optimizer.states_of.items() if of == "element")
    return [width * of_elements + of_rows for width in layout.widths]


def slots_of(layout: BagLayout, itemsize: int, optimizer: BagOptimizer, cache_bytes: int) -> BagLayout:
    """Return the slots that a budget has room for: a table for each width, with the same share of the rows of that width.

    Raises:
        ValueError: it has room for none.
    """
    of_rows = bytes_by_row(layout, itemsize, optimizer)
    rows, costs = dict.fromkeys(layout.widths, 0), {}
    for count, width, cost in zip(layout.rows, layout.widths, of_rows, strict=True):
        rows[width] += count
        costs[width] = cost + BYTES_OF_SLOT
    fixed = BYTES_OF_ROW * layout.first_rows[-1]
    # Of each width one row, and the gaps between tables.
    least = fixed + sum(costs.values()) + len(rows) * BagLayout.alignment * max(of_rows)
    if cache_bytes < least:
        raise ValueError(
            f"cache_bytes: expected at least {least:,}, of which {fixed:,} say where {layout.first_rows[-1]:,} rows are, "
            f"got {cache_bytes:,}"
        )
    share = (cache_bytes - fixed) / sum(costs[width] * count for width, count in rows.items())
    return BagLayout(tuple(max(1, min(count, int(share * count))) for count in rows.values()), tuple(rows))


def forecast_of(layout: BagLayout, itemsize: int, optimizer: BagOptimizer, slots: BagLayout) -> CacheForecast:
    """Return what tables take whose slots are those of a layout."""
    of_rows = bytes_by_row(layout, itemsize, optimizer)
    of_widths = dict(zip(layout.widths, of_rows, strict=True))
    cached = sum(count * (of_widths[width] + BYTES_OF_SLOT) for count, width in zip(slots.rows, slots.widths, strict=True))
    return CacheForecast(
        cached + BYTES_OF_ROW * layout.first_rows[-1],
        sum(count * size for count, size in zip(layout.rows, of_rows, strict=True)),
        sum(slots.rows),
        layout.first_rows[-1],
    )


class RowCache:
    """Slots on a device for some rows of tables in the host's memory, and of their optimizer states.

    Most slots have the most frequent rows, which stay from one move to the next. The others are the ring: a row that a lookup
    misses takes the slot of the ring that was given away longest ago. A row is written back when its slot is given away, in the
    pass that reads the next one, and only where it may have been changed.

    On a GPU there are two streams beside those of steps. On one it is decided which rows a batch misses and which slots they get;
    on the other rows come and go, after what used their slots before, and after nothing else that steps do. So the rows of a
    batch can come while the device still works on the one before, and the host knows what a batch misses while rows are on
    their way.

    Args:
        layout: the tables.
        storage: `[layout.num_elements]` on the host, pinned where the device is a GPU.
        states: an optimizer of all rows, whose states are on the host, alike.
        cached: an optimizer of the slots, on the device; its layout says how many there are of each width.
        interval: lookups after which the most frequent rows are chosen anew.
    """

    def __init__(self, layout: BagLayout, storage: Tensor, states: BagOptimizer, cached: BagOptimizer, interval: int) -> None:
        self.layout, self.storage, self.states, self.optimizer, self.interval = layout, storage, states, cached, interval
        self.slots = cached.layout
        self.device = cached.step.device
        self.weights = torch.zeros(self.slots.num_elements, dtype=storage.dtype, device=self.device)
        self.pools: list[_Pool] = []
        first_row = 0
        for width, first_slot, slots in zip(self.slots.widths, self.slots.first_rows[:-1], self.slots.rows, strict=True):
            self.pools.append(_Pool(layout, width, first_row, first_slot, slots))
            first_row += self.pools[-1].rows
        # Tables in the order in which their rows are numbered.
        order = [table for pool in self.pools for table in pool.tables]
        firsts = [0, *accumulate(layout.rows[table] for table in order)]
        self.first_of_table = dict(zip(order, firsts[:-1], strict=True))
        self.rows = firsts[-1]
        self._tables = [self._tables_of(pool) for pool in self.pools]
        self._of_layouts: dict[BagLayout, _Features] = {}
        self._copied = self._pairs()
        self.counts = torch.zeros(self.rows, dtype=torch.int32, device=self.device)
        self._counted = 0
        self._map_stream: torch.cuda.Stream | None = None
        self._row_stream: torch.cuda.Stream | None = None
        if self.device.type == "cuda":
            # The host waits for what is decided.
            self._map_stream, self._row_stream = torch.cuda.Stream(self.device, priority=-1), torch.cuda.Stream(self.device)
        # By its number, when a lookup has read its rows, until the slots are waited for; and when the last update was made.
        self._read_at: dict[int, torch.cuda.Event] = {}
        self._updated_at: torch.cuda.Event | None = None
        self._leases: weakref.WeakSet[Lease] = weakref.WeakSet()
        self._reached: list[Lease] = []
        self._number = 0
        self._since_move = 0
        self._exchanges = 0
        self.is_changed = False
        self.reset_statistics()
        # Behind the last one there is one for what is none, of which nothing is asked.
        self._no_slot, self._no_row = self.slots.first_rows[-1], self.rows
        self._slot_of_row = torch.empty(self._no_row + 1, dtype=torch.int32, device=self.device)
        self._row_of_slot = torch.empty(self._no_slot, dtype=torch.int32, device=self.device)
        self._used = torch.empty(self._no_slot + 1, dtype=torch.int32, device=self.device)
        self._is_dirty = torch.empty(self._no_slot + 1, dtype=torch.bool, device=self.device)
        self._rings: list[Tensor] = []
        self._cursors: list[int] = []
        self._free: list[_Free] = []
        self.forget()
        if self._map_stream is not None and self._row_stream is not None:
            # Whoever lets them go, they may still be read, and rows on their way.
            for tensor in (self.counts, self._slot_of_row, self._row_of_slot, self._used, self._is_dirty, *self._tables):
                tensor.record_stream(self._map_stream)
            for tensor in (self.weights, *(getattr(self.optimizer, name) for name in self.optimizer.states_of)):
                tensor.record_stream(self._row_stream)

    def _pairs(self) -> list[list[tuple[Tensor, Tensor, bool]]]:
        """For each pool what is copied: slots `[S, W]`, the host's lines, and whether rows are found by element, or by number."""
        found = []
        for number, pool in enumerate(self.pools):
            views = []
            for name, of in (("", "element"), *self.optimizer.states_of.items()):
                cached = self.weights if not name else getattr(self.optimizer, name)
                host = self.storage if not name else getattr(self.states, name)
                if of == "element":
                    lines = host[: host.shape[0] // pool.line * pool.line].view(-1, pool.line)
                    views.append((self.slots.views(cached)[number], lines, True))
                else:
                    views.append((cached[pool.of_slots, None], host[:, None], False))
            found.append(views)
        return found

    def _tables_of(self, pool: _Pool) -> Tensor:
        """A pool's tables as `seat_rows` takes them."""
        of = [(self.first_of_table[table], self.layout.starts[table], self.layout.first_rows[table]) for table in pool.tables]
        return torch.tensor(of, dtype=torch.int64, device=self.device).T.contiguous()

    @contextmanager
    def _deciding(self) -> Iterator[None]:
        """Work on the stream that says which rows are where, after what the current stream has to do."""
        if self._map_stream is None:
            yield
            return
        self._map_stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._map_stream):
            yield

    @contextmanager
    def _moving(self, *read: Tensor) -> Iterator[None]:
        """Work on the stream of rows that come and go, after what was decided; it reads some tensors of the other stream."""
        if self._map_stream is None or self._row_stream is None:
            yield
            return
        self._row_stream.wait_stream(self._map_stream)
        for tensor in read:
            tensor.record_stream(self._row_stream)
        with torch.cuda.stream(self._row_stream):
            yield

    @contextmanager
    def _between_steps(self) -> Iterator[None]:
        """Decide after all rows have come and gone, and let the current stream wait for it."""
        if self._map_stream is not None and self._row_stream is not None:
            self._map_stream.wait_stream(self._row_stream)
        with self._deciding():
            yield
        with self._moving():
            pass
        if self._row_stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._row_stream)

    def forget(self) -> None:
        """Let every slot be empty, without writing anything back; counts stay."""
        with self._between_steps():
            self._forget()

    def _forget(self) -> None:
        self._slot_of_row.fill_(-1)
        self._row_of_slot.fill_(-1)
        self._used.fill_(0)
        self._is_dirty.fill_(False)
        self._rings = [torch.arange(pool.slots, device=self.device) for pool in self.pools]
        self._cursors = [0] * len(self.pools)
        self._since_move = 0
        for lease in self._leases:
            # Their rows are gone.
            lease.released_at = -1
        self._reached = []
        self._read_at = {}
        self.is_changed = False

    def slots_of(self, layout: BagLayout) -> BagLayout:
        """Return a layout of the slots with the features of a layout of the tables."""
        return self._features(layout).slots

    def _features(self, layout: BagLayout) -> _Features:
        if layout not in self._of_layouts:
            assert layout.tables is not None
            pool_of = {table: number for number, pool in enumerate(self.pools) for table in pool.tables}
            places = tuple(pool_of[table] for table in layout.tables)
            slots = BagLayout(self.slots.rows, self.slots.widths, places, layout.means, layout.sequences)
            of_features = [
                (self.first_of_table[table], layout.rows[table], self.pools[place].first_slot, place)
                for table, place in zip(layout.tables, places, strict=True)
            ]
            tensor = torch.tensor(of_features, dtype=torch.int64, device=self.device).view(-1, 4)
            self._of_layouts[layout] = _Features(slots, tensor)
        return self._of_layouts[layout]

    def staged(
        self, layout: BagLayout, ids: Tensor, offsets: Tensor, batch_sizes: Sequence[int] | None, *, changes: bool
    ) -> tuple[Tensor, Lease]:
        """Bring the rows of a batch's lookups to the device and return each lookup's slot, `[S]` int32; -1 for an unknown id.

        Waits once for the number of rows that are missed, which the device finds as soon as the current stream has the ids,
        whatever rows are on their way.

        Args:
            layout, ids, offsets, batch_sizes: as `embedding_bags` takes them.
            changes: whether an update may change the rows.

        Returns:
            The slots, for `use`, and a lease: as long as anybody has it, and it is not released, the rows stay.

        Raises:
            ValueError: there are fewer slots than rows that are needed at once; on a CPU ids out of range.
        """
        self._number += 1
        lease = Lease(self._number)
        with self._deciding():
            slots = self._staged(layout, ids, offsets, batch_sizes, changes=changes) if ids.shape[0] else ids.to(torch.int32)
        if self._map_stream is not None and self._row_stream is not None:
            for tensor in (ids, offsets):
                tensor.record_stream(self._map_stream)
            # Also of rows that came for others, and of the slots themselves.
            self._row_stream.wait_stream(self._map_stream)
            lease.staged = self._row_stream.record_event()
        self._leases.add(lease)
        return slots, lease

    def use(self, slots: Tensor, lease: Lease) -> None:
        """Let the current stream wait until the rows of a lookup are there."""
        if lease.staged is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(lease.staged)
            slots.record_stream(stream)

    def used(self, lease: Lease) -> None:
        """Say that the current stream has been told all that reads the rows of a lookup, but for its backward pass."""
        if self._row_stream is not None:
            self._read_at[lease.number] = torch.cuda.current_stream(self.device).record_event()

    def is_move_due(self) -> bool:
        """Whether the next lookup, if no rows must stay for others, chooses the most frequent rows anew."""
        return self._since_move >= self.interval

    def _staged(
        self, layout: BagLayout, ids: Tensor, offsets: Tensor, batch_sizes: Sequence[int] | None, *, changes: bool
    ) -> Tensor:
        if ids.is_cpu and not values_are_trusted():
            _refuse_unknown(layout, ids, self._ends(layout, ids, offsets, batch_sizes))
        if self.is_move_due() and self._oldest() == self._number:
            self._move()
        self._since_move += 1
        ends, of_features = self._ends(layout, ids, offsets, batch_sizes), self._features(layout).of_features
        maps = self._slot_of_row, self.counts, self._used, self._is_dirty
        rows, missed, totals = claim_rows(
            ids, ends, of_features, *maps, number=self._number, changes=changes, num_pools=len(self.pools)
        )
        missed, counts = self._missed(missed, totals)
        self._wait_for_users()
        for pool, of_pool, count in zip(self.pools, missed.split(counts), counts, strict=True):
            pool.last_misses.append(count)
            if count:
                number = self.pools.index(pool)
                self._swap(pool, self._free[number], of_pool, changes=changes)
                self._cursors[number] = (self._cursors[number] + count) % self._rings[number].shape[0]
        self._free = []
        self._counted += ids.shape[0]
        self._lookups += ids.shape[0]
        self._hits += totals[1]
        self.is_changed |= changes
        return self._slot_of_row.index_select(0, rows)

    def _ends(self, layout: BagLayout, ids: Tensor, offsets: Tensor, batch_sizes: Sequence[int] | None) -> Tensor:
        """Where each feature's ids end, `[F]`."""
        count = layout.num_features
        if count == 1:
            return offsets[-1:]
        if batch_sizes is not None:
            return offsets[on_device(tuple(accumulate(batch_sizes)), self.device)]
        size = (offsets.shape[0] - 1) // count
        return offsets[size::size]

    def _oldest(self) -> int:
        """The number of the oldest lookup whose rows must stay; of this one where there is none."""
        held = (lease.number for lease in (*self._leases, *self._reached) if lease.released_at is None)
        return min(held, default=self._number)

    def _missed(self, listed: Tensor, totals: Tensor) -> tuple[Tensor, list[int]]:
        """The rows that are missed, in order, and how many of each pool; each pool has as many slots to give away."""
        # Launched before the device is waited for, so that it has less to wait for afterwards.
        self._free = [self._free_of(pool) for pool in self.pools]
        numbers: list[int] = torch.cat([totals, *(free.order[-1:] for free in self._free)]).tolist()
        counts, of_rings = numbers[2 : 2 + len(self.pools)], numbers[2 + len(self.pools) :]
        # Whatever the order in which they were listed, slots are given in that of the rows.
        missed = listed[: numbers[0]].sort().values.long()
        for number, (needed, free_slots) in enumerate(zip(counts, of_rings, strict=True)):
            if needed > free_slots and (found := self._widen(number, needed - free_slots)) < needed - free_slots:
                pool = self.pools[number]
                self._slot_of_row[missed] = -1
                raise ValueError(
                    f"cache_bytes: expected room for {needed:,} more rows of width {pool.width}, which a batch misses, got "
                    f"{free_slots + found:,} of {pool.slots:,} slots: others have rows that the batch needs, too, or lookups "
                    "whose backward has not run; give more bytes, or smaller batches"
                )
        return missed, counts

    def _widen(self, number: int, needed: int) -> int:
        """Put slots of the least frequent rows into a ring, as many as are needed or can be, and return how many."""
        pool, ring = self.pools[number], self._rings[number]
        stays = torch.ones(pool.slots, dtype=torch.bool, device=self.device)
        stays[ring] = False
        slots = (stays & (self._used[pool.of_slots] < self._oldest())).nonzero()[:, 0]
        rows = self._row_of_slot[pool.of_slots][slots].long()
        slots = slots[self.counts[rows].argsort(stable=True)][:needed]
        # The cursor comes to them next.
        cursor = self._cursors[number]
        self._rings[number] = torch.cat([ring[:cursor], slots, ring[cursor:]])
        self._free[number] = self._free_of(pool)
        return slots.shape[0]

    def _free_of(self, pool: _Pool) -> _Free:
        """A pool's ring from the cursor on."""
        number = self.pools.index(pool)
        ring = self._rings[number].roll(-self._cursors[number])
        is_free = self._used[pool.of_slots][ring] < self._oldest()
        return _Free(ring, is_free, is_free.cumsum(0, dtype=torch.int32))

    def _swap(self, pool: _Pool, free: _Free, coming: Tensor, *, changes: bool) -> None:
        """Write the changed rows of the first free slots back, and read others into them, which may be changed."""
        number, of_slots = self.pools.index(pool), pool.of_slots
        maps = self._slot_of_row, self._row_of_slot[of_slots], self._used[of_slots], self._is_dirty[of_slots]
        seated = seat_rows(
            *free, coming, self._tables[number], *maps, self._written[number],
            number=self._number, changes=changes, width=pool.width, line=pool.line,
        )  # fmt: skip
        with self._moving(*seated):
            for cached, host, is_by_element in self._copied[number]:
                if is_by_element:
                    exchange_rows(cached, host, seated.slots, seated.leaving_lines, seated.coming_lines)
                else:
                    exchange_rows(cached, host, seated.slots, seated.leaving_rows, seated.coming_rows)
        self._exchanges += 1
        self._read[number] += coming.shape[0]

    def _wait_for_users(self) -> None:
        """Let rows leave when the lookups that need not keep them have read them, and updates are made."""
        if self._row_stream is None:
            return
        oldest = self._oldest()
        for number in [number for number in self._read_at if number < oldest]:
            self._row_stream.wait_event(self._read_at.pop(number))
        if self._updated_at is not None:
            self._row_stream.wait_event(self._updated_at)

    def move(self) -> None:
        """Make the most frequent rows the ones that stay, all slots but those of the ring; between steps."""
        with self._between_steps():
            self._move()

    def _move(self) -> None:
        self._wait_for_users()
        for number, pool in enumerate(self.pools):
            room = min(pool.slots, max(1, math.ceil(ROOM * max(pool.last_misses, default=0))))
            slots = self._slot_of_row[pool.of_rows]
            stay = most_frequent(self.counts[pool.of_rows], slots >= 0, pool.slots - room)
            coming = (stay & (slots < 0)).nonzero()[:, 0] + pool.first
            rows = self._row_of_slot[pool.of_slots].long()
            others = (~((rows >= 0) & stay[(rows - pool.first).clamp_(min=0)])).nonzero()[:, 0]
            # Those first that were not read for longest.
            others = others[self._used[pool.of_slots][others].argsort(stable=True)]
            given, self._rings[number] = others.split([coming.shape[0], others.shape[0] - coming.shape[0]])
            self._cursors[number] = 0
            if coming.shape[0]:
                order = torch.arange(1, coming.shape[0] + 1, dtype=torch.int32, device=self.device)
                self._swap(pool, _Free(given, order > 0, order), coming, changes=False)
        if self._counted >= COUNTED_BEFORE_HALVING * self.rows:
            self.counts.bitwise_right_shift_(1)
            self._counted = 0
        self._since_move = 0
        self._moves += 1

    def write_back(self) -> None:
        """Write all rows that may have been changed back, and wait until the host has them."""
        if not self.is_changed:
            return
        with self._between_steps():
            self._write_back()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _write_back(self) -> None:
        self._wait_for_users()
        for number, pool in enumerate(self.pools):
            slots = self._is_dirty[pool.of_slots].nonzero()[:, 0]
            rows = self._row_of_slot[pool.of_slots][slots].long()
            firsts, starts, first_rows = self._tables[number]
            of_rows = torch.searchsorted(firsts, rows, right=True) - 1
            within, stays = rows - firsts[of_rows], torch.full_like(rows, -1)
            lines = starts[of_rows] // pool.line + within * (pool.width // pool.line)
            numbers = first_rows[of_rows] + within
            with self._moving(slots, lines, numbers, stays):
                for cached, host, is_by_element in self._copied[number]:
                    exchange_rows(cached, host, slots, lines if is_by_element else numbers, stays)
            self._written[number] += slots.shape[0]
        is_held = any(lease.released_at is None for lease in (*self._leases, *self._reached))
        # What an update is yet to change is to be written again.
        self._is_dirty &= self._used >= self._oldest() if is_held else False
        self.is_changed = is_held

    def reach(self, lease: Lease) -> None:
        """Keep the rows of a lookup that backward has come to until `release`.

        Raises:
            RuntimeError: rows have moved since they were released.
        """
        if lease.released_at not in (None, self._exchanges):
            raise RuntimeError(
                "embedding tables: rows of this lookup may have left the device since an update for it was made, or since tables "
                "were loaded; call backward of a lookup once, before the next batch is looked up"
            )
        lease.released_at = None
        self._reached.append(lease)

    def release(self) -> None:
        """Let the rows go that backward has come to: their gradients have been applied, or dropped."""
        for lease in self._reached:
            lease.released_at = self._exchanges
        self._reached = []
        if self._row_stream is not None:
            self._updated_at = torch.cuda.current_stream(self.device).record_event()

    def statistics(self) -> CacheStatistics:
        """What happened since `reset_statistics`; waits for the device."""
        if self._map_stream is not None:
            self._map_stream.synchronize()
        costs = dict(zip(self.layout.widths, bytes_by_row(self.layout, self.weights.element_size(), self.optimizer), strict=True))
        written = [int(of) for of in self._written]
        read_bytes, written_bytes = (
            sum(count * costs[pool.width] for count, pool in zip(counts, self.pools, strict=True))
            for counts in (self._read, written)
        )
        counted = self._lookups, int(self._hits), sum(self._read), sum(written), read_bytes, written_bytes, self._moves
        return CacheStatistics(*counted)

    def reset_statistics(self) -> None:
        """Begin to count anew."""
        self._lookups, self._moves = 0, 0
        self._read = [0] * len(self.pools)
        with self._between_steps():
            self._hits = torch.zeros((), dtype=torch.int64, device=self.device)
            self._written = [torch.zeros_like(self._hits) for _ in self.pools]

    def forecast(self) -> CacheForecast:
        """What the tables take."""
        return forecast_of(self.layout, self.weights.element_size(), self.optimizer, self.slots)


def _refuse_unknown(layout: BagLayout, ids: Tensor, ends: Tensor) -> None:
    """Refuse an id that its table does not have.

    Raises:
        ValueError: for the first one.
    """
    assert layout.tables is not None
    begin = 0
    for feature, (table, end) in enumerate(zip(layout.tables, ends.tolist(), strict=True)):
        wrong = ((ids[begin:end] < 0) | (ids[begin:end] >= layout.rows[table])).nonzero()
        if wrong.numel():
            place = begin + int(wrong[0])
            expected = f"expected ids from 0 to {layout.rows[table] - 1} for feature {feature}"
            raise ValueError(f"indices: {expected}, got {int(ids[place])} at place {place}")
        begin = end


def most_frequent(counts: Tensor, is_cached: Tensor, most: int) -> Tensor:
    """Tell which rows were counted most often, up to `most`, of those that were counted; of equal ones those on the device.

    By bisection, which needs little memory and waits for nothing.
    """
    keys = counts.clamp(max=2**30 - 1) * 2 + is_cached
    low, high = keys.new_zeros((), dtype=torch.int64), keys.max().long() + 1
    for _ in range(32):
        middle = (low + high + 1) // 2
        are_enough = (keys >= middle).sum() >= most
        low, high = torch.where(are_enough, middle, low), torch.where(are_enough, high, middle - 1)
    are_above, are_equal = keys > low, keys == low
    are_equal &= are_equal.cumsum(0, dtype=torch.int32) <= most - are_above.sum()
    return (are_above | are_equal) & (counts > 0)
