"""Rows of embedding tables in the host's memory that are cached on a device: which are there, and how they come and go."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jagged.modules.bag_collection import on_device
from jagged.ops import BagLayout, BagOptimizer, SeatedRows, claim_rows, exchange_rows, seat_rows, values_are_trusted

# Bytes on the device for each row of the tables: its slot, and how often it was looked up.
BYTES_OF_ROW = 4 + 4
# Bytes for each slot beside its row and states: its row, the last lookup that read it, whether it was changed, its place in the
# order in which slots are given away.
BYTES_OF_SLOT = 4 + 4 + 1 + 8
# Counts are halved when so many lookups for each row of the tables have been counted since they last were.
COUNTED_BEFORE_HALVING = 32
# Lookups whose most misses say how many slots are kept for misses of one, and how many times as many are.
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
        # How many exchanges had been asked for when it was released; None: not yet; -1: its rows are not there.
        self.released_at: int | None = None
        # Each lookup's slot, until it is used, and when its rows are there, on a GPU.
        self.slots: Tensor | None = None
        self.staged: torch.cuda.Event | None = None


class _Staging:
    """A lookup of which the device knows alone how many rows it misses, and whether all of them got slots."""

    def __init__(self, lease: Lease, rows: Tensor, missed: Tensor, totals: Tensor, *, changes: bool) -> None:
        # Nobody else may want its rows any longer.
        self.lease = weakref.ref(lease)
        self.rows, self.missed, self.totals, self.changes = rows, missed, totals, changes
        # When that is decided, on a GPU, and which exchange it is.
        self.decided: torch.cuda.Event | None = None
        self.exchange = 0
        # Once the host knows: how many lookups hit, rows of each pool that were missed, and the pools where they got no slots.
        self.hits = 0
        self.needed: list[int] = []
        self.short: list[int] | None = None


class _Features(NamedTuple):
    """The slots with a layout's features, and what each reads, as `claim_rows` takes it."""

    slots: BagLayout
    of_features: Tensor


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
    batch can come while the device still works on the one before. How many they are stays on the device, which gives no slots
    where they are too few; the host reads it when the lookup is used, and then makes room.

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
            # Rows wait for what is decided, and so may the host.
            self._map_stream, self._row_stream = torch.cuda.Stream(self.device, priority=-1), torch.cuda.Stream(self.device)
        # By its number, when a lookup has read its rows, until the slots are waited for; and when the last update was made.
        self._read_at: dict[int, torch.cuda.Event] = {}
        self._updated_at: torch.cuda.Event | None = None
        self._leases: weakref.WeakSet[Lease] = weakref.WeakSet()
        self._reached: list[Lease] = []
        self._number = 0
        self._since_move = 0
        # How many exchanges were asked for, and the last of them that is known to have moved rows.
        self._exchanges, self._last_exchange = 0, 0
        # Whether lookups are made ahead, of what the host has not been told yet, and where it will be.
        self._is_ahead = False
        self._staging: _Staging | None = None
        self._arrived = torch.empty(2 + 2 * len(self.pools), dtype=torch.int32, pin_memory=self.device.type == "cuda")
        self.is_changed = False
        self.reset_statistics()
        # Behind the last one there is one for what is none, of which nothing is asked.
        self._no_slot, self._no_row = self.slots.first_rows[-1], self.rows
        self._slot_of_row = torch.empty(self._no_row + 1, dtype=torch.int32, device=self.device)
        self._row_of_slot = torch.empty(self._no_slot, dtype=torch.int32, device=self.device)
        self._used = torch.empty(self._no_slot + 1, dtype=torch.int32, device=self.device)
        self._is_dirty = torch.empty(self._no_slot + 1, dtype=torch.bool, device=self.device)
        self._maps = [
            (self._slot_of_row, self._row_of_slot[of.of_slots], self._used[of.of_slots], self._is_dirty[of.of_slots])
            for of in self.pools
        ]
        self._rings: list[Tensor] = []
        self._cursors: list[int] = []
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
    def _moving(self, *read: Tensor) -> Iterator[torch.cuda.Event | None]:
        """Work on the stream of rows that come and go, after what was decided; it reads some tensors of the other stream."""
        if self._map_stream is None or self._row_stream is None:
            yield None
            return
        decided = self._map_stream.record_event()
        self._row_stream.wait_event(decided)
        for tensor in read:
            tensor.record_stream(self._row_stream)
        with torch.cuda.stream(self._row_stream):
            yield decided

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
        self._know()
        self._staging = None
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
        self,
        layout: BagLayout,
        ids: Tensor,
        offsets: Tensor,
        batch_sizes: Sequence[int] | None,
        *,
        changes: bool,
        is_ahead: bool = False,
    ) -> Lease:
        """Bring the rows of a batch's lookups to the device.

        Waits once for the number of rows that are missed, which the device finds as soon as the current stream has the ids,
        whatever rows are on their way. A lookup ahead waits for nothing but such a number of one before that was not used.

        Args:
            layout, ids, offsets, batch_sizes: as `embedding_bags` takes them.
            changes: whether an update may change the rows.
            is_ahead: leave it to `confirm` to find out whether all rows have room.

        Returns:
            A lease, for `use`: as long as anybody has it, and it is not released, the rows stay.

        Raises:
            ValueError: there are fewer slots than rows that are needed at once; on a CPU ids out of range.
        """
        self._settle()
        self._is_ahead |= is_ahead
        self._number += 1
        lease = Lease(self._number)
        if not ids.shape[0]:
            lease.slots = ids.to(torch.int32)
            return lease
        with self._deciding():
            self._stage(lease, layout, ids, offsets, batch_sizes, changes=changes)
        self._leases.add(lease)
        if self._map_stream is not None:
            for tensor in (ids, offsets):
                tensor.record_stream(self._map_stream)
        if not is_ahead and (refused := self._settle()) is not None:
            raise ValueError(refused)
        return lease

    def confirm(self, lease: Lease) -> bool:
        """Make room where a lookup ahead found too little, and tell whether its rows are on the device or on their way."""
        if self._staging is not None and self._staging.lease() is lease:
            self._settle()
        return lease.released_at is None

    def use(self, lease: Lease) -> Tensor:
        """Let the current stream wait until the rows of a lookup are there.

        Returns:
            Each lookup's slot, `[S]` int32; -1 for an unknown id.
        """
        slots, lease.slots = lease.slots, None
        assert slots is not None
        if lease.staged is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(lease.staged)
            slots.record_stream(stream)
        return slots

    def used(self, lease: Lease) -> None:
        """Say that the current stream has been told all that reads the rows of a lookup, but for its backward pass."""
        if self._row_stream is not None:
            self._read_at[lease.number] = torch.cuda.current_stream(self.device).record_event()

    def is_move_due(self) -> bool:
        """Whether the next lookup, if no rows must stay for others, chooses the most frequent rows anew."""
        return self._since_move >= self.interval

    def _stage(
        self,
        lease: Lease,
        layout: BagLayout,
        ids: Tensor,
        offsets: Tensor,
        batch_sizes: Sequence[int] | None,
        *,
        changes: bool,
    ) -> None:
        ends, of_features = self._ends(layout, ids, offsets, batch_sizes), self._features(layout).of_features
        if ids.is_cpu and not values_are_trusted():
            _refuse_unknown(layout, ids, ends)
        if self.is_move_due() and self._oldest() == self._number:
            self._move()
        self._since_move += 1
        self._counted += ids.shape[0]
        self.is_changed |= changes
        maps = self._slot_of_row, self.counts, self._used, self._is_dirty
        found = claim_rows(ids, ends, of_features, *maps, number=self._number, changes=changes, num_pools=len(self.pools))
        staging = _Staging(lease, *found, changes=changes)
        self._bring(staging, lease, range(len(self.pools)))
        self._staging = staging

    def _bring(self, staging: _Staging, lease: Lease, pools: Sequence[int]) -> None:
        """Give slots to the rows of some pools that a lookup misses, and let them come."""
        self._exchanges += 1
        staging.exchange = self._exchanges
        oldest, own = self._oldest(), {"number": lease.number, "changes": staging.changes}
        seats = [
            self._seat(pool, self._rings[pool], staging.missed, staging.totals, pool, self._cursors[pool], oldest, **own)
            for pool in pools
        ]
        lease.slots = self._slot_of_row.index_select(0, staging.rows)
        self._arrived.copy_(staging.totals, non_blocking=True)
        self._wait_for_users()
        staging.decided = self._exchange(dict(zip(pools, seats, strict=True)), staging.totals)
        if self._row_stream is not None:
            # Also rows that came for others.
            lease.staged = self._row_stream.record_event()

    def _know(self) -> None:
        """Wait until the host has been told what the last lookup missed, and take account of it."""
        staging = self._staging
        if staging is None or staging.short is not None:
            return
        if staging.decided is not None:
            staging.decided.synchronize()
        numbers: list[int] = self._arrived.tolist()
        count = len(self.pools)
        staging.hits, staging.needed, seated = numbers[1], numbers[2 : 2 + count], numbers[2 + count :]
        staging.short = [pool for pool in range(count) if seated[pool] != staging.needed[pool]]
        self._account(staging, [pool for pool in range(count) if pool not in staging.short])

    def _account(self, staging: _Staging, pools: Sequence[int]) -> None:
        """Take account of pools whose missed rows have got slots; of the lookup itself when there are no others."""
        for number in pools:
            pool, count = self.pools[number], staging.needed[number]
            pool.last_misses.append(count)
            if count:
                self._cursors[number] = (self._cursors[number] + count) % self._rings[number].shape[0]
                self._read[number] += count
                self._last_exchange = staging.exchange
        if not staging.short:
            self._lookups += staging.rows.shape[0]
            self._hits += staging.hits

    def _settle(self) -> str | None:
        """Make room for the rows of the last lookup that got no slots, if anybody still wants them; say why there is none."""
        self._know()
        staging, self._staging = self._staging, None
        if staging is None or not staging.short or (lease := staging.lease()) is None:
            return None
        with nullcontext() if self._map_stream is None else torch.cuda.stream(self._map_stream):
            for number in staging.short:
                if (refused := self._make_room(number, staging.needed[number])) is not None:
                    lease.released_at, lease.slots = -1, None
                    return refused
            short, staging.short = staging.short, []
            self._bring(staging, lease, short)
        self._account(staging, short)
        return None

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

    def _make_room(self, number: int, needed: int) -> str | None:
        """Let a pool have as many slots to give away as are needed, or return why it has not."""
        pool = self.pools[number]
        free_slots = int((self._used[pool.of_slots][self._rings[number]] < self._oldest()).sum())
        if needed <= free_slots:
            return None
        # More than are needed, so that the next lookups, which may miss a few rows more, need not wait for room.
        found = self._widen(number, math.ceil(ROOM * needed) - free_slots)
        if needed <= free_slots + found:
            return None
        return (
            f"cache_bytes: expected room for {needed:,} more rows of width {pool.width}, which a batch misses, got "
            f"{free_slots + found:,} of {pool.slots:,} slots: others have rows that the batch needs, too, or lookups "
            "whose backward has not run; give more bytes, or smaller batches"
        )

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
        return slots.shape[0]

    def _seat(
        self, place: int, ring: Tensor, coming: Tensor, totals: Tensor, pool: int, cursor: int, oldest: int, **own: Any
    ) -> SeatedRows:
        """Give slots of the pool at a place to rows that come: of those of `pool` in the totals."""
        of = self.pools[place]
        return seat_rows(
            ring, coming, totals, self._tables[place], *self._maps[place], self._written[place],
            pool=pool, cursor=cursor, oldest=oldest, **own, width=of.width, line=of.line,
        )  # fmt: skip

    def _exchange(self, seats: dict[int, SeatedRows], totals: Tensor) -> torch.cuda.Event | None:
        """Write the changed rows of slots that were given away back, and read others into them; return when it may begin."""
        # All that a pool's exchange reads is one piece of memory, but for how many rows there are.
        with self._moving(totals, *(seated.slots for seated in seats.values())) as decided:
            for number, seated in seats.items():
                for cached, host, is_by_element in self._copied[number]:
                    if is_by_element:
                        leaving, coming = seated.leaving_lines, seated.coming_lines
                    else:
                        leaving, coming = seated.leaving_rows, seated.coming_rows
                    exchange_rows(cached, host, seated.slots, leaving, coming, num_rows=seated.num_rows)
        return decided

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
        self._settle()
        with self._between_steps():
            self._move()

    def _move(self) -> None:
        self._wait_for_users()
        for number, pool in enumerate(self.pools):
            # Where lookups are ahead, the rows of two have to have room.
            room = ROOM * (1 + self._is_ahead) * max(pool.last_misses, default=0)
            room = min(pool.slots, max(1, math.ceil(room)))
            slots = self._slot_of_row[pool.of_rows]
            stay = most_frequent(self.counts[pool.of_rows], slots >= 0, pool.slots - room)
            coming = (stay & (slots < 0)).nonzero()[:, 0] + pool.first
            rows = self._row_of_slot[pool.of_slots].long()
            others = (~((rows >= 0) & stay[(rows - pool.first).clamp_(min=0)])).nonzero()[:, 0]
            # Those first that were not read for longest.
            others = others[self._used[pool.of_slots][others].argsort(stable=True)]
            given, self._rings[number] = others.split([coming.shape[0], others.shape[0] - coming.shape[0]])
            self._cursors[number] = 0
            if count := coming.shape[0]:
                self._exchanges += 1
                self._last_exchange = self._exchanges
                self._read[number] += count
                totals = torch.full((4,), count, dtype=torch.int32, device=self.device)
                # All of them are free.
                oldest = self._number + 1
                seated = self._seat(number, given, coming.int(), totals, 0, 0, oldest, number=self._number, changes=False)
                self._exchange({number: seated}, totals)
        if self._counted >= COUNTED_BEFORE_HALVING * self.rows:
            self.counts.bitwise_right_shift_(1)
            self._counted = 0
        self._since_move = 0
        self._moves += 1

    def write_back(self) -> None:
        """Write all rows that may have been changed back, and wait until the host has them and nothing reads it any more."""
        if self.is_changed:
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
        if lease.released_at is not None:
            self._know()
        if lease.released_at is not None and lease.released_at < self._last_exchange:
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
        self._know()
        if self._map_stream is not None:
            self._map_stream.synchronize()
        costs = dict(zip(self.layout.widths, bytes_by_row(self.layout, self.weights.element_size(), self.optimizer), strict=True))
        written = [int(of) for of in self._written]
        read_bytes, written_bytes = (
            sum(count * costs[pool.width] for count, pool in zip(counts, self.pools, strict=True))
            for counts in (self._read, written)
        )
        counted = self._lookups, self._hits, sum(self._read), sum(written), read_bytes, written_bytes, self._moves
        return CacheStatistics(*counted)

    def reset_statistics(self) -> None:
        """Begin to count anew."""
        self._know()
        self._lookups, self._hits, self._moves = 0, 0, 0
        self._read = [0] * len(self.pools)
        with self._between_steps():
            self._written = [torch.zeros((), dtype=torch.int64, device=self.device) for _ in self.pools]

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
