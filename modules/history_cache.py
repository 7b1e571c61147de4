"""Keys and values of users' earlier events, kept on the device, so that blocks compute new events and candidates alone."""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise, zip_longest
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torchrec.sparse.jagged_tensor import JaggedTensor

from jagged.modules.jagged_tensor import check_samples, with_values
from jagged.modules.positions import PositionalEncoding, positions_with_targets
from jagged.ops import extend_pages, jagged_concat, jagged_split, sample_of_row, validate_offsets

_BYTES_OF_TIME = 8
IntArray = npt.NDArray[np.int64]


class CachedKeys(NamedTuple):
    """Of one layer and a batch: the pages in which keys and values of earlier rows are, and those of the new events belong.

    Attributes:
        pool: `[pages * page_rows, 2, Hkv, D]`, keys and values of all users.
        pages: `[B, P]`, each user's.
        own_offsets: `[B + 1]`, of the batch's own rows.
        kept_offsets: `[B + 1]`, of those of them that are kept, each sample's first ones.
        offsets: `[B + 1]`, each sample's keys.
        page_rows: rows of a page.
        total: Sk, how many keys there are.
        positions: `[S]`, of the batch's rows among all of their sample's; all candidates stand right behind the history. None
            where no block takes them.
        times: `[Sk]`, of the keys; None without.
    """

    pool: Tensor
    pages: Tensor
    own_offsets: Tensor
    kept_offsets: Tensor
    offsets: Tensor
    page_rows: int
    total: int
    positions: Tensor | None
    times: Tensor | None

    def extended(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return keys and values of all rows of the batch's samples, each `[Sk, Hkv, D]`, and keep the new ones.

        With them come the rows' offsets `[B + 1]`, and their times `[Sk]` where the block takes times.

        Args:
            k, v: of the batch's own rows, each `[S, Hkv, D]`.

        Raises:
            TypeError: they have another dtype than what is kept.
        """
        if k.dtype != self.pool.dtype:
            raise TypeError(
                f"dtype: the cache keeps {self.pool.dtype}, got keys of {k.dtype}; make the cache with dtype={k.dtype}"
            )
        found = self._joined(self.pool, k, v)
        return found[:, 0], found[:, 1], self.offsets, self.times

    def with_times(self, kept: Tensor, times: Tensor) -> CachedKeys:
        """Return them with the times of all keys, and keep the new ones.

        Args:
            kept: `[pages * page_rows]`, of all users.
            times: `[S]`, of the batch's own rows.
        """
        return self._replace(times=self._joined(kept, times))

    def _joined(self, pool: Tensor, first: Tensor, second: Tensor | None = None) -> Tensor:
        offsets = self.own_offsets, self.kept_offsets, self.offsets
        return extend_pages(pool, self.pages, first, second, *offsets, page_rows=self.page_rows, total=self.total)


class CachedShape(NamedTuple):
    """Of a block: heads, width, dtype and device of the keys that `HistoryCache` keeps, and what of rows else it takes."""

    heads: int
    width: int
    dtype: torch.dtype
    device: torch.device
    takes_times: bool
    takes_positions: bool = False


@dataclass
class _History:
    """What is known of a user: the events whose rows are cached, and the pages that they are in."""

    events: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    context: Hashable = None
    pages: list[int] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class CachedBatch:
    """Users' histories, and how much of them is cached; made by `HistoryCache.match`.

    Attributes:
        users: as given.
        known: how many of each user's events are cached, int64 `[B]`, on the CPU.
        offsets: `[B + 1]`, of the events that are not, on the CPU.
        rows: their places among the values of all given events, int64 `[n]`, on the CPU.
    """

    users: list[Hashable]
    known: Tensor
    offsets: Tensor
    rows: Tensor
    cache: HistoryCache
    contexts: list[Hashable]
    events: list[npt.NDArray[np.int64]]
    cached: list[npt.NDArray[np.int64] | None]
    writes: int


class HistoryCache:
    """Keys and values of users' events, layer by layer, so that scoring computes new events and candidates alone.

    `match` compares users' histories with what is cached, event by event, and says which events are new. `encode` runs the
    blocks over the new events and the candidates behind them: they attend to the cached events as well, and what comes out is
    what the blocks make of them behind the whole history. New events are cached then. So a history may have grown, or have lost
    its last events: what its beginning has in common with the cached one is used. One that lost its first events has nothing in
    common, for every event saw those before it.

    Rows lie in pages on the device, which are allocated at once. Where they run out, the pages of the users are given away who
    were encoded longest ago. Everything is given up where a weight of the model was written since, or an option of a block.

    It is for scoring: gradients are not recorded, and blocks in training are refused. Threads wait for one another. A copy, by
    `copy.deepcopy` or pickle, is empty.

    Args:
        blocks: `HSTUBlock`, `JaggedTransformerBlock` or `JaggedSelfAttention`, run one after the other; best the model's own
            `nn.ModuleList`. What an event becomes may not depend on later ones: refused are blocks that are not causal or have
            contextual rows, and HSTU without a `normalizer`. What stands before them may not depend on later events either:
            `PositionalEncoding` does where it counts from the end, which moves with each event, and does not with
            `from_end=False`; `rotary`, `max_distance` and `num_time_buckets` go by what is between two rows.
        model: the module that makes events' rows and has the blocks; all its weights are watched. One with a `PositionalEncoding`
            from the end is refused: give an `nn.ModuleList` of the blocks and of the parts that make rows without it. None where
            rows are made of no weights: then those of the blocks are. A write is seen where PyTorch counts it, and after a step
            of an optimizer of PyTorch. Not seen are writes through `.data`, steps that are replayed by CUDA graphs, updates in
            backward passes without a step beside them, and hooks and adapters: call `clear` after them.
        max_bytes: for keys, values and times on the device.
        page_rows: events of a page, best a multiple of 8. A user has whole pages, so half of one is lost on average.
        dtype: of keys and values; None for that of the blocks' weights. Under autocast it is autocast's.

    Attributes:
        bytes: that are allocated, at most `max_bytes`.
        num_pages: of all users.

    Raises:
        ValueError: no block, one that cannot be cached, on the device "meta" or another one than the first; less than a page's
            bytes; weights of inference mode; a model with a `PositionalEncoding` that counts from the end.
        TypeError: blocks that are none, bytes or rows that are no integers, a dtype that is not a floating one.

    Example:
        >>> import torch
        >>> from torchrec.sparse.jagged_tensor import JaggedTensor
        >>> from jagged.modules import HistoryCache, HSTUBlock
        >>> items = torch.nn.Embedding(100, 32)
        >>> blocks = torch.nn.ModuleList(HSTUBlock(32, 4, max_distance=50, normalizer=50) for _ in range(2)).eval()
        >>> cache = HistoryCache(blocks, model=torch.nn.ModuleList([items, blocks]), max_bytes=2**20)
        >>> history = JaggedTensor(torch.tensor([5, 8, 1, 9, 9]), offsets=torch.tensor([0, 3, 5]))
        >>> candidates = items(torch.randint(100, (2, 10)))
        >>> batch = cache.match(["ann", "bob"], history)
        >>> events, ranked = cache.encode(batch, items(history.values()[batch.rows]), candidates)
        >>> events.shape, ranked.shape
        (torch.Size([5, 32]), torch.Size([2, 10, 32]))

        One event later only that is computed, and the candidates:

        >>> history = JaggedTensor(torch.tensor([5, 8, 1, 7, 9, 9]), offsets=torch.tensor([0, 4, 6]))
        >>> batch = cache.match(["ann", "bob"], history)
        >>> batch.known, batch.rows
        (tensor([3, 2]), tensor([3]))
    """

    def __init__(
        self,
        blocks: Iterable[nn.Module],
        *,
        model: nn.Module | None,
        max_bytes: int,
        page_rows: int = 64,
        dtype: torch.dtype | None = None,
    ) -> None:
        if isinstance(blocks, nn.Module) and not isinstance(blocks, (nn.ModuleList, nn.Sequential)):
            raise TypeError(f"blocks: expected several, got a {type(blocks).__name__}; put it in a list")
        self._given = blocks if isinstance(blocks, (nn.ModuleList, nn.Sequential)) else list(blocks)
        self.blocks = list(self._given)
        if not self.blocks:
            raise ValueError("blocks: expected one or more, got none")
        for name, number in (("max_bytes", max_bytes), ("page_rows", page_rows)):
            if not isinstance(number, int):
                raise TypeError(f"{name}: expected an integer, got {number!r}")
        if page_rows < 1:
            raise ValueError(f"page_rows: expected 1 or more, got {page_rows}")
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"dtype: expected a floating torch.dtype or None, got {dtype!r}")
        self.model, self.max_bytes, self.page_rows, self.dtype = model, max_bytes, page_rows, dtype
        self._shapes = [_cached_shape(block, place) for place, block in enumerate(self.blocks)]
        self._device = self._shapes[0].device
        if self._device.type == "meta" or any(shape.device != self._device for shape in self._shapes):
            found = sorted({str(shape.device) for shape in self._shapes})
            raise ValueError(f"blocks: expected one device that has memory, got {', '.join(found)}; move the model first")
        dtypes = [shape.dtype if dtype is None else dtype for shape in self._shapes]
        widths = [2 * shape.heads * shape.width * of.itemsize for shape, of in zip(self._shapes, dtypes, strict=True)]
        page_bytes = page_rows * (sum(widths) + _BYTES_OF_TIME)
        self.num_pages = max_bytes // page_bytes
        if self.num_pages < 1:
            raise ValueError(f"max_bytes: expected {page_bytes:,} or more, a page of {page_rows} rows, got {max_bytes:,}")
        self.bytes = self.num_pages * page_bytes
        self._watched = self.blocks if model is None else [model, *self.blocks]
        _check_positions(self._watched)
        _count_steps()
        self._seen, self._writes = self._looked(), 0
        rows = self.num_pages * page_rows
        # Tensors of inference mode could not be written outside of it.
        with torch.inference_mode(False):
            self._pools = [
                torch.empty(rows, 2, shape.heads, shape.width, dtype=of, device=self._device)
                for shape, of in zip(self._shapes, dtypes, strict=True)
            ]
            self._times = torch.empty(rows, dtype=torch.int64, device=self._device)
        self._histories: OrderedDict[Hashable, _History] = OrderedDict()
        self._free = list(range(self.num_pages))
        self._lock = threading.RLock()

    def __reduce__(self) -> Any:
        """Make a copy an empty cache of the copied blocks."""
        options = {"max_bytes": self.max_bytes, "page_rows": self.page_rows, "dtype": self.dtype}
        return _made_again, (self._given, self.model, options)

    def __len__(self) -> int:
        """Return how many users have events in the cache."""
        return sum(len(history.events) > 0 for history in self._histories.values())

    def __contains__(self, user: object) -> bool:
        """Tell whether events of a user are cached."""
        history = self._histories.get(user)
        return history is not None and len(history.events) > 0

    def clear(self) -> None:
        """Give up all users' pages."""
        with self._lock:
            self.discard(list(self._histories))

    def discard(self, users: Iterable[Hashable]) -> None:
        """Give up the pages of some users; those who have none are passed over."""
        with self._lock:
            for user in users:
                history = self._histories.pop(user, None)
                if history is not None:
                    self._free += history.pages

    def match(
        self,
        users: Sequence[Hashable] | Tensor,
        events: JaggedTensor,
        contexts: Sequence[Hashable] | None = None,
        *,
        least_new: int = 0,
    ) -> CachedBatch:
        """Find which events of users' whole histories are cached, as long as they are the same from the first one on.

        Args:
            users: one for each sample, each once; a tensor's numbers are those of its list.
            events: JaggedTensor of integers `[sum L]`, or `[sum L, F]` where an event is told by several: all that makes its row,
                such as item, action and time. Compared on the CPU; from another device they are copied, which waits for it.
            contexts: what else events' rows are made of, for each sample, such as a tuple of the user's features; a user whose
                context is another one now has nothing cached. None for nothing.
            least_new: so many of each history's last events count as new, where their own hidden states are wanted.

        Raises:
            ValueError: as many users or contexts as there are samples are expected, each user once; events that are no integers,
                have weights, or offsets that do not fit; a block that was replaced.
            TypeError: users or contexts that cannot be hashed, or that are tensors or arrays.
        """
        users = users.tolist() if isinstance(users, (Tensor, np.ndarray)) else list(users)
        values, offsets = events.values().detach().cpu(), events.offsets().detach().cpu()
        check_samples("users", len(users), "events", offsets.shape[0] - 1, "give one for each")
        _check_keys("users", users)
        if len(set(users)) < len(users):
            twice = next(user for user in users if users.count(user) > 1)
            raise ValueError(f"users: expected each once, got {twice!r} twice; join the candidates of one user's requests")
        contexts = [None] * len(users) if contexts is None else list(contexts)
        check_samples("contexts", len(contexts), "users", len(users), "give one for each user", "contexts")
        _check_keys("contexts", contexts)
        if values.is_floating_point() or values.is_complex() or values.dim() not in (1, 2) or 0 in values.shape[1:]:
            raise ValueError(f"events: expected integers [sum L] or [sum L, F], got {values.dtype} {list(values.shape)}")
        if events.weights_or_none() is not None:
            raise ValueError("events: expected no weights, which are not compared, got some; give them as a column of integers")
        validate_offsets(offsets, values.shape[0], name="events")
        if least_new < 0:
            raise ValueError(f"least_new: expected 0 or more, got {least_new}")
        found, bounds = values.numpy().astype(np.int64, copy=False), offsets.numpy().astype(np.int64, copy=False)
        # Copies: the caller may write into what he gave.
        all_events = [found[first:last].copy() for first, last in pairwise(bounds.tolist())]
        cached, known = [], np.zeros(len(users), dtype=np.int64)
        with self._lock:
            self._look()
            for place, (user, context, of_user) in enumerate(zip(users, contexts, all_events, strict=True)):
                history = self._histories.get(user)
                cached.append(None if history is None else history.events)
                if history is not None and history.context == context:
                    known[place] = min(_in_common(history.events, of_user), max(len(of_user) - least_new, 0))
            writes = self._writes
        new = np.diff(bounds) - known
        new_offsets = np.concatenate(([0], new.cumsum()))
        rows = np.arange(new_offsets[-1]) + np.repeat(bounds[:-1] + known - new_offsets[:-1], new)
        known_events, offsets, places = (torch.from_numpy(numbers) for numbers in (known, new_offsets, rows))
        return CachedBatch(users, known_events, offsets, places, self, contexts, all_events, cached, writes)

    @torch.no_grad()
    def encode(
        self,
        batch: CachedBatch,
        events: Tensor,
        candidates: JaggedTensor | Tensor | None = None,
        *,
        times: Tensor | None = None,
        candidate_times: Tensor | None = None,
    ) -> tuple[Tensor, JaggedTensor | Tensor | None]:
        """Run the blocks over new events and candidates, and cache the events.

        Args:
            batch: of `match`.
            events: rows `[n, D]` of the events that are not cached, those of `batch.rows`, on the blocks' device.
            candidates: JaggedTensor with values `[S, D]` over the samples, or `[B, m, D]`: each sees its user's history and
                itself. None for none.
            times: int32 or int64 `[n]`, of the events, where blocks have time buckets; else None. All requests go by one clock:
                what is cached keeps its time.
            candidate_times: `[S]`, or `[B, m]`, likewise.

        Returns:
            what the new events become, `[n, D]`, and what the candidates become, in the form of `candidates`.

        Raises:
            ValueError: a batch that no longer fits, as weights or the users' cached events have changed since `match`; rows,
                candidates or times of another number; more events than all pages hold; a block in training.
            TypeError: keys of another dtype than `dtype`.
        """
        with self._lock:
            return self._encode(batch, events, candidates, times, candidate_times)

    def _encode(
        self,
        batch: CachedBatch,
        events: Tensor,
        candidates: JaggedTensor | Tensor | None,
        times: Tensor | None,
        candidate_times: Tensor | None,
    ) -> tuple[Tensor, JaggedTensor | Tensor | None]:
        training = [place for place, block in enumerate(self.blocks) if any(part.training for part in block.modules())]
        if training:
            raise ValueError(f"blocks: expected them in evaluation, got block {training[0]} in training; call model.eval()")
        self._check_current(batch)
        num_new = int(batch.offsets[-1])
        check_samples("events", events.shape[0], "batch", num_new, "give the rows of batch.rows", "rows")
        if events.device != self._device:
            raise ValueError(f"events: expected rows on {self._device}, where the cache is, got {events.device}")
        wants_times = any(shape.takes_times for shape in self._shapes)
        own = _Own.of(events, candidates, times, candidate_times, len(batch.users), wants_times)
        known_offsets = nn.functional.pad(batch.known.cumsum(0), (1, 0))
        known_offsets, new_offsets = _on_device((known_offsets, batch.offsets), self._device)
        values, offsets, targets, when = own.joined(new_offsets)
        # All that can be refused has been: from here on others may lose their pages.
        (pages,) = _on_device((self._seat(batch),), self._device)
        total = int(batch.known.sum()) + values.shape[0]
        k_offsets = offsets + known_offsets
        layout = CachedKeys(self._pools[0], pages, offsets, new_offsets, k_offsets, self.page_rows, total, None, None)
        if any(shape.takes_positions for shape in self._shapes):
            behind = known_offsets.diff().index_select(0, sample_of_row(offsets, values.shape[0]))
            layout = layout._replace(positions=behind + positions_with_targets(offsets, values.shape[0], targets))
        if when is not None:
            layout = layout.with_times(self._times, when)
        x = JaggedTensor(values=values, offsets=offsets)
        for block, shape, pool in zip(self.blocks, self._shapes, self._pools, strict=True):
            of_block = layout._replace(pool=pool, times=layout.times if shape.takes_times else None)
            x = block(x, targets, when if shape.takes_times else None, of_block)
        # Only now it is true that they are there.
        for user, all_events in zip(batch.users, batch.events, strict=True):
            self._histories[user].events = all_events
            self._histories.move_to_end(user)
        self.discard([user for user, all_events in zip(batch.users, batch.events, strict=True) if not len(all_events)])
        return own.split(x.values(), new_offsets)

    def _looked(self) -> tuple[Any, ...]:
        """What cached rows are made by: steps of optimizers, options of blocks, and weights."""
        options = [
            (id(part), *(getattr(part, name) for name in getattr(part, "shown", ())))
            for block in self.blocks
            for part in block.modules()
        ]
        return _STEPS[0], options, _weights_of(self._watched)

    def _look(self) -> None:
        """Give everything up if a weight is another tensor than it was, or was written since, or an option is another one."""
        replaced = [place for place, (one, other) in enumerate(zip_longest(self._given, self.blocks)) if one is not other]
        if replaced:
            raise ValueError(f"blocks: block {replaced[0]} is another one than when the cache was made; make a new cache")
        now = self._looked()
        if now != self._seen:
            self.clear()
            self._shapes = [_cached_shape(block, place) for place, block in enumerate(self.blocks)]
            self._seen = now
            self._writes += 1

    def _check_current(self, batch: CachedBatch) -> None:
        if batch.cache is not self:
            raise ValueError("batch: expected one that this cache has matched, got another cache's")
        self._look()
        if batch.writes != self._writes:
            raise ValueError("batch: weights were written since it was matched; match its users again")
        for place, (user, known) in enumerate(zip(batch.users, batch.known.tolist(), strict=True)):
            history = self._histories.get(user)
            # Arrays of events are never written, only replaced, and a context with them.
            if not known or (history is not None and history.events is batch.cached[place]):
                continue
            if (
                history is None
                or history.context != batch.contexts[place]
                or _in_common(history.events, batch.events[place]) < known
            ):
                raise ValueError(f"batch: cached events of user {user!r} changed since it was matched; match its users again")

    def _seat(self, batch: CachedBatch) -> Tensor:
        """Give each user of a batch the pages that its history takes, and return them, `[B, most]`."""
        needs = [-(-len(of_user) // self.page_rows) for of_user in batch.events]
        if sum(needs) > self.num_pages:
            raise ValueError(
                f"batch: expected histories of at most {self.num_pages} pages of {self.page_rows} rows, got {sum(needs)}; encode "
                "fewer users or shorter histories, or give the cache more bytes"
            )
        histories = []
        for place, (user, need, known) in enumerate(zip(batch.users, needs, batch.known.tolist(), strict=True)):
            history = self._histories.setdefault(user, _History())
            # If something fails before all is computed, this much is there.
            history.events, history.context = batch.events[place][:known], batch.contexts[place]
            self._free += history.pages[need:]
            del history.pages[need:]
            histories.append(history)
        missing = sum(needs) - sum(len(history.pages) for history in histories)
        here = set(batch.users)
        for user in [] if missing <= len(self._free) else [user for user in self._histories if user not in here]:
            if missing <= len(self._free):
                break
            self.discard([user])
        # A page at least, where there are no events to be found.
        table = np.zeros((len(needs), max(needs, default=0) or 1), dtype=np.int64)
        for place, (history, need) in enumerate(zip(histories, needs, strict=True)):
            while len(history.pages) < need:
                history.pages.append(self._free.pop())
            table[place, :need] = history.pages
        return torch.from_numpy(table)


class _Own(NamedTuple):
    """A batch's own rows: new events `[n, D]` and candidates, and the times of both."""

    events: Tensor
    candidates: JaggedTensor | Tensor | None
    times: Tensor | None
    candidate_times: Tensor | None

    @classmethod
    def of(
        cls,
        events: Tensor,
        candidates: JaggedTensor | Tensor | None,
        times: Tensor | None,
        candidate_times: Tensor | None,
        num_samples: int,
        wants_times: bool,
    ) -> _Own:
        """Return them, checked."""
        if candidates is not None:
            found = candidates.shape[0] if isinstance(candidates, Tensor) else candidates.offsets().shape[0] - 1
            check_samples("candidates", found, "batch", num_samples, "some may have none")
        for name, given, shape, has_rows in (
            ("times", times, events.shape[:1], True),
            ("candidate_times", candidate_times, _shape_of(candidates), candidates is not None),
        ):
            if not (wants_times and has_rows):
                if given is not None:
                    reason = "there are no candidates" if wants_times else "no block has time buckets"
                    raise ValueError(f"{name}: expected None, as {reason}, got {list(given.shape)}")
            elif given is None:
                raise ValueError(f"{name}: expected {list(shape)}, int32 or int64, for blocks with time buckets, got None")
            elif given.dtype not in (torch.int32, torch.int64) or given.shape != shape:
                raise ValueError(f"{name}: expected {list(shape)}, int32 or int64, got {given.dtype} {list(given.shape)}")
        return cls(events, candidates, times, candidate_times)

    def joined(self, new_offsets: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Return rows, offsets, how many rows of each sample are candidates, and times."""
        when = None if self.times is None else self.times.to(torch.int64)
        if self.candidates is None:
            return self.events, new_offsets, None, when
        if isinstance(self.candidates, Tensor):
            rows, of_candidates = self.candidates, None
        else:
            rows, of_candidates = self.candidates.values(), self.candidates.offsets().to(torch.int64)
        sides = [new_offsets, of_candidates]
        values, offsets = jagged_concat([self.events, rows], sides)
        targets = new_offsets.new_full((rows.shape[0],), rows.shape[1]) if of_candidates is None else of_candidates.diff()
        if when is not None:
            assert self.candidate_times is not None
            when, _ = jagged_concat([when, self.candidate_times.to(torch.int64)], sides)
        return values, offsets, targets, when

    def split(self, rows: Tensor, new_offsets: Tensor) -> tuple[Tensor, JaggedTensor | Tensor | None]:
        """Return what has become of the events, and of the candidates in the form in which they were given."""
        if self.candidates is None:
            return rows, None
        if isinstance(self.candidates, Tensor):
            events, ranked = jagged_split(rows, [new_offsets, self.candidates.shape[1]], [self.events.shape[0]])
            return events, ranked
        totals = [self.events.shape[0], self.candidates.values().shape[0]]
        events, ranked = jagged_split(rows, [new_offsets, self.candidates.offsets().to(torch.int64)], totals)
        return events, with_values(self.candidates, ranked)


def _shape_of(candidates: JaggedTensor | Tensor | None) -> torch.Size:
    """The shape of a number for each candidate."""
    if candidates is None:
        return torch.Size([0])
    return candidates.shape[:-1] if isinstance(candidates, Tensor) else candidates.values().shape[:1]


def _made_again(blocks: Iterable[nn.Module], model: nn.Module | None, options: dict[str, Any]) -> HistoryCache:
    return HistoryCache(blocks, model=model, **options)


def _check_keys(name: str, keys: Sequence[Any]) -> None:
    """Check that what users or contexts are told by is compared by value, and stays as it is."""

    def is_array(key: object) -> bool:
        return isinstance(key, (Tensor, np.ndarray)) or (isinstance(key, tuple) and any(is_array(part) for part in key))

    for key in keys:
        if is_array(key):
            raise TypeError(f"{name}: expected numbers, strings or tuples of them, got a tensor or array; take tuple(x.tolist())")
        try:
            hash(key)
        except TypeError:
            raise TypeError(f"{name}: expected what can be hashed, got a {type(key).__name__}; take a tuple") from None


def _check_positions(modules: Sequence[nn.Module]) -> None:
    """Refuse positions from the end, with which an event changes all rows before it."""
    for module in modules:
        for name, part in module.named_modules():
            if isinstance(part, PositionalEncoding) and part.from_end:
                raise ValueError(
                    f"model: expected rows that do not depend on later ones, got a PositionalEncoding{name and f', {name!r}'}, "
                    "which counts from the end; make it with from_end=False, as models do by positions='start', or pass an "
                    "nn.ModuleList of the blocks, and of what makes rows without it"
                )


def _cached_shape(block: nn.Module, place: int) -> CachedShape:
    found: Any = getattr(block, "cached_shape", None)
    if found is None or "cached" not in inspect.signature(block.forward).parameters:
        raise ValueError(
            "blocks: expected HSTUBlock, JaggedTransformerBlock or JaggedSelfAttention, got a "
            f"{type(block).__name__} as block {place}, whose forward takes no cached keys"
        )
    try:
        return cast(CachedShape, found())
    except ValueError as error:
        raise ValueError(f"blocks: block {place} cannot be cached: {error}") from None


# Steps of all optimizers of PyTorch in this process, as fused ones write weights without being counted.
_STEPS = [0]


@functools.cache
def _count_steps() -> None:
    """Count steps of optimizers from now on."""

    def count(*_: object) -> None:
        _STEPS[0] += 1

    register_optimizer_step_post_hook(count)


class _Weight:
    """A weight, which is not kept alive, where it is, and how often it was written."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.written = weakref.ref(tensor), (tensor.data_ptr(), tensor._version)

    def __eq__(self, other: object) -> bool:
        """Compare tensors by identity; one that is gone is no other's equal."""
        assert isinstance(other, _Weight)
        return self.tensor() is other.tensor() is not None and self.written == other.written

    __hash__ = None  # type: ignore[assignment]


def _weights_of(modules: Sequence[nn.Module]) -> list[_Weight]:
    tensors = [tensor for module in modules for tensor in chain(module.parameters(), module.buffers())]
    if any(tensor.is_inference() for tensor in tensors):
        raise ValueError(
            "model: got weights of inference mode, whose writes PyTorch does not count; make the model outside of inference_mode"
        )
    return [_Weight(tensor) for tensor in tensors]


def _in_common(one: IntArray, other: IntArray) -> int:
    """How many events two histories have in common from the first on."""
    if one.shape[1:] != other.shape[1:]:
        return 0
    shorter = min(len(one), len(other))
    differ = one[:shorter] != other[:shorter]
    differ = differ.any(1) if differ.ndim == 2 else differ
    # Of no events there is no first one that differs.
    place = int(differ.argmax()) if shorter else 0
    return place if shorter and differ[place] else shorter


def _on_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy int64 tensors to a device at once."""
    together = torch.cat([tensor.flatten() for tensor in tensors])
    if device.type == "cuda":
        together = together.pin_memory()
    parts = together.to(device, non_blocking=True).split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
