"""In which order a GPU's streams come to the slots of cached rows: streams that only keep account, on a CPU.

Every operation has a clock: how much of each stream it comes after, by the events and streams that were waited for. Two of which
one changes a slot that the other reads or changes must be in order.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from jagged.modules import row_cache
from jagged.modules.row_cache import Lease, RowCache
from tests.modules.test_cached_tables import loss_of, pair, same_tables, sequences, step, zipf
from tests.places import PLACE, Place
from tests.strategies import seeds

pytestmark = pytest.mark.skipif(PLACE.name != "cpu", reason="streams are made up")


class Clock(Counter[str]):
    def merge(self, other: Counter[str]) -> None:
        for name, count in other.items():
            self[name] = max(self[name], count)


class Event(Clock):
    """What comes before it; the host may wait for it."""

    def __init__(self, streams: Streams, clock: Clock) -> None:
        super().__init__(clock)
        self.streams = streams

    def synchronize(self) -> None:
        self.streams.waits += 1
        self.streams.ahead += self["rows"] < self.streams.asked
        self.streams.host.merge(self)


class Told:
    """What the host is told, which it may read once it has waited for the copy."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams

    def copy_(self, numbers: Tensor, non_blocking: bool) -> None:
        assert non_blocking
        self.stream, self.clock, self.numbers = self.streams.current.name, self.streams.current.begin(), numbers.tolist()

    def tolist(self) -> list[int]:
        if self.streams.host[self.stream] < self.clock[self.stream]:
            self.streams.early.append(("copy", "read", set()))
        return self.numbers


class Stream:
    """Tells which operations come before those that it is given next."""

    def __init__(self, name: str, streams: Streams) -> None:
        self.name, self.clock, self.streams = name, Clock(), streams

    def wait_event(self, event: Clock) -> None:
        self.clock.merge(event)

    def wait_stream(self, other: Stream) -> None:
        self.clock.merge(other.clock)

    def record_event(self) -> Event:
        return Event(self.streams, self.clock)

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def begin(self) -> Clock:
        """The clock of a next operation."""
        self.clock.merge(self.streams.host)
        self.clock[self.name] += 1
        return Clock(self.clock)


class Streams:
    """What is done on a current stream, and which operations on slots are in no order."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.host = Clock()
        self.main, self.copies, self.maps, self.rows = (Stream(name, self) for name in ("main", "copies", "maps", "rows"))
        self.current = self.main
        self.done: list[tuple[str, str, Clock, set[int], bool]] = []
        # How many exchanges do not come after all that the stream of steps was given, how often the host waited, and how often
        # it knew what a batch misses before all rows of earlier ones had come, of which this was the last.
        self.beside, self.waits, self.ahead, self.asked = 0, 0, 0, 0
        # How often it had to make room.
        self.short = 0
        self.slots: weakref.WeakKeyDictionary[Lease, Tensor] = weakref.WeakKeyDictionary()
        # When slots were given away, and exchanges that may come before.
        self.seats: list[tuple[str, Clock, Tensor]] = []
        self.early: list[tuple[str, str, set[int]]] = []
        patch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        patch.setattr(torch.cuda, "stream", self.on)
        patch.setattr(Tensor, "record_stream", lambda tensor, stream: None)
        use, release, make_room = RowCache.use, RowCache.release, RowCache._make_room
        seat, exchange = row_cache.seat_rows, row_cache.exchange_rows

        def read(cache: RowCache, lease: Lease) -> Tensor:
            slots = self.slots[lease] = use(cache, lease)
            self.note("lookup", slots, changes=False)
            return slots

        def update(cache: RowCache) -> None:
            for lease in cache._reached:
                self.note("update", self.slots[lease], changes=True)
            release(cache)

        def made_room(cache: RowCache, *given: Any) -> str | None:
            self.short += 1
            return make_room(cache, *given)

        def seated(*given: Any, **named: Any) -> Any:
            found = seat(*given, **named)
            self.asked = self.rows.clock["rows"]
            self.seats.append((self.current.name, self.current.begin(), found.slots))
            return found

        def exchanged(cached: Tensor, host: Tensor, slots: Tensor, *given: Any, num_rows: Tensor | None = None) -> None:
            exchange(cached, host, slots, *given, num_rows=num_rows)
            self.note("exchange", slots[: None if num_rows is None else int(num_rows)], changes=True)
            self.early += [
                ("seat", "exchange", set(slots.tolist()))
                for stream, clock, of in self.seats
                if of is slots and self.current.clock[stream] < clock[stream]
            ]
            self.beside += self.rows.clock["main"] < self.main.clock["main"]

        patch.setattr(RowCache, "use", read)
        patch.setattr(RowCache, "release", update)
        patch.setattr(RowCache, "_make_room", made_room)
        patch.setattr(row_cache, "seat_rows", seated)
        patch.setattr(row_cache, "exchange_rows", exchanged)

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def note(self, what: str, slots: Tensor, *, changes: bool) -> None:
        self.done.append((what, self.current.name, self.current.begin(), set(slots.tolist()) - {-1}, changes))

    def prefetch(self, cached: Any, features: KeyedJaggedTensor) -> None:
        """For which the host waits for nothing, but to know of a lookup before that was not used."""
        (storage,) = cached._cached
        staging, waits = storage.cache._staging, self.waits
        is_known = staging is None or staging.short is not None
        with self.on(self.copies):
            cached.prefetch(features)
        assert self.waits == waits or not is_known

    def races(self) -> list[tuple[str, str, set[int]]]:
        """Pairs of operations, the one that was asked for first and the other, and the slots."""
        found = [*self.early]
        for place, (late, _, clock, slots, changes) in enumerate(self.done):
            for early, stream, earlier, others, changed in self.done[:place]:
                # The host asks for an operation after those that it must come after.
                if (changes or changed) and slots & others and clock[stream] < earlier[stream]:
                    found.append((early, late, slots & others))
        return found


def tables_and_streams(patch: pytest.MonkeyPatch, share: float = 0.5, interval: int = 4) -> tuple[Any, Any, Streams]:
    # Updates hold methods of the cache.
    streams = Streams(patch)
    # One storage of one width, so that a slot's number says which it is.
    whole, cached = pair(lambda: sequences()[:1], "adagrad", share, interval)
    (storage,) = cached._cached
    storage.cache._map_stream, storage.cache._row_stream = streams.maps, streams.rows
    storage.cache._arrived = Told(streams)
    return whole, cached, streams


def some(seed: int) -> KeyedJaggedTensor:
    return zipf(seed, rows=120)


WHAT = ["train", "train ahead", "evaluate", "prefetch", "write", "forget a graph"]


@given(st.integers(1, 9), st.floats(0.5, 1.2), st.lists(st.tuples(seeds(), st.sampled_from(WHAT)), min_size=1, max_size=12))
def test_slots_are_read_and_changed_in_order(place: Place, interval: int, share: float, steps: list[tuple[int, str]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        whole, cached, streams = tables_and_streams(patch, share, interval)
        waiting: KeyedJaggedTensor | None = None
        for seed, what in steps:
            features = some(seed)
            if what == "prefetch":
                streams.prefetch(cached, waiting := features)
            elif what == "write":
                cached.write_back()
            elif what == "evaluate":
                with torch.no_grad():
                    cached(features)
            elif what == "forget a graph":
                cached(features)
            else:
                features = waiting if waiting is not None else features
                output, waiting = cached(features), None
                if what == "train ahead":
                    streams.prefetch(cached, waiting := some(seed + 1))
                loss_of(output).backward()
                step(whole, features)
        assert not streams.races()
        same_tables(cached, whole)


def train_ahead(patch: pytest.MonkeyPatch, share: float = 0.25, interval: int = 100) -> Streams:
    # Few slots, of which none are kept for frequent rows before the first move, so that they are soon given away again.
    _, cached, streams = tables_and_streams(patch, share, interval)
    batches = [zipf(seed, samples=2, rows=120) for seed in range(40)]
    for features, following in itertools.pairwise(batches):
        output = cached(features)
        streams.prefetch(cached, following)
        loss_of(output).backward()
    return streams


def test_a_row_that_leaves_too_early_is_seen(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RowCache, "_wait_for_users", lambda cache: None)
    assert {(early, late) for early, late, _ in train_ahead(monkeypatch).races()} >= {("update", "exchange")}


def test_a_row_that_comes_too_late_is_seen(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RowCache, "use", lambda cache, lease: lease.slots)
    assert ("exchange", "lookup") in {(early, late) for early, late, _ in train_ahead(monkeypatch).races()}


def test_an_exchange_before_its_slots_are_known_is_seen(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RowCache, "_moving", lambda cache, *read: torch.cuda.stream(cache._row_stream))
    assert ("seat", "exchange") in {(early, late) for early, late, _ in train_ahead(monkeypatch).races()}


def test_a_number_that_is_read_too_early_is_seen(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Event, "synchronize", lambda event: None)
    assert ("copy", "read") in {(early, late) for early, late, _ in train_ahead(monkeypatch).races()}


def test_rows_come_beside_a_step(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exchange waits for no update of the batch before, whose rows stay, and the host for no rows that are on their way."""
    streams = train_ahead(monkeypatch)
    assert not streams.races()
    assert [what for what, *_ in streams.done].count("update") == 39
    assert streams.beside > 20
    assert streams.ahead > 20
    assert streams.short == 0


def train_short_of_room(patch: pytest.MonkeyPatch) -> Streams:
    """Most slots are kept for frequent rows, as if no move knew that two batches need room at once."""
    patch.setattr(RowCache, "_is_ahead", property(lambda cache: False, lambda cache, value: None), raising=False)
    return train_ahead(patch, 0.2, 3)


def test_room_is_made_when_a_batch_is_looked_up(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """For rows that got no slots ahead."""
    streams = train_short_of_room(monkeypatch)
    assert not streams.races()
    assert streams.short > 1


def test_room_that_is_made_too_early_is_seen(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    waited = RowCache._wait_for_users

    def made_room(cache: RowCache, *given: Any) -> str | None:
        monkeypatch.setattr(RowCache, "_wait_for_users", lambda cache: None)
        return make_room(cache, *given)

    def staged(cache: RowCache, *given: Any, **named: Any) -> Lease:
        monkeypatch.setattr(RowCache, "_wait_for_users", waited)
        return stage(cache, *given, **named)

    make_room, stage = RowCache._make_room, RowCache.staged
    monkeypatch.setattr(RowCache, "_make_room", made_room)
    monkeypatch.setattr(RowCache, "staged", staged)
    races = train_short_of_room(monkeypatch).races()
    assert ("update", "exchange") in {(early, late) for early, late, _ in races}
