"""Which samples make which batch of an epoch, on which rank: by seed and epoch alone, so that a place in it is a few numbers.

After a batch of every rank the samples that came are the first ones of the epoch's order, whatever the number of ranks. So the
rest can be dealt to other ranks, which have to know no more than how many came.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Sampler

IntArray = npt.NDArray[np.int64]
Balance = Literal["lengths", "squares"]


class Plan(Sampler[IntArray]):
    """Which samples make which batch. Iterating yields the sample numbers of the batches left, from the position at that time.

    Args:
        rows: int64 `[n]`, how much of a budget each sample takes.
        batch_size: samples of a batch and rank. This or `max_tokens`.
        max_tokens: most of the budget for a batch and rank.
        seed: of the order, a new one each epoch; None for that of the samples.
        rank, world_size: this process's share.
        balance: the work of a sample, by which a step's samples are dealt to the ranks where a batch has so many samples and an
            order is drawn: its rows, or their square, as attention takes them.
        drawn: makes of an epoch what each sample takes in it, at most `rows`, a function of the epoch alone; None for `rows`.

    Attributes:
        epoch, batch: the position, both from 0.
        seen: how many of the epoch's first samples are left out, because others had them; batches count from behind them.

    Raises:
        ValueError: an option out of range.
    """

    def __init__(
        self,
        rows: IntArray,
        batch_size: int | None,
        max_tokens: int | None,
        seed: int | None,
        rank: int,
        world_size: int,
        balance: Balance = "lengths",
        drawn: Callable[[int], IntArray] | None = None,
    ) -> None:
        if balance not in get_args(Balance):
            raise ValueError(f"balance: got {balance!r}, expected 'lengths' or 'squares'")
        if (batch_size is None) == (max_tokens is None):
            raise ValueError(f"batch_size, max_tokens: got {batch_size}, {max_tokens}, expected exactly one of them")
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size: got {batch_size}, expected 1 or more")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank, world_size: got {rank}, {world_size}, expected 0 <= rank < world_size")
        if len(rows) < world_size:
            raise ValueError(f"part: got {len(rows)} samples, expected at least one for each of {world_size} ranks")
        self.rows = rows
        self.batch_size = batch_size
        self.max_tokens = max_tokens
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.balance = balance
        self.epoch = 0
        self.batch = 0
        self.seen = 0
        self._drawn = drawn
        self._rows: tuple[int, IntArray] | None = None
        self._planned: tuple[tuple[int, int], IntArray, IntArray] | None = None

    def num_batches(self, epoch: int, seen: int = 0) -> int:
        """Batches of an epoch without its first `seen` samples, on each rank."""
        return (len(self.of(epoch, seen)[1]) - 1) // self.world_size

    def __iter__(self) -> Iterator[IntArray]:
        order, bounds = self.of(self.epoch, self.seen)
        first = self.batch * self.world_size + self.rank
        return (order[bounds[k] : bounds[k + 1]] for k in range(first, len(bounds) - 1, self.world_size))

    def __len__(self) -> int:
        return self.num_batches(self.epoch, self.seen) - self.batch

    def rows_of(self, epoch: int) -> IntArray:
        """What each sample takes in an epoch, int64 `[n]`."""
        if self._drawn is None:
            return self.rows
        if self._rows is None or self._rows[0] != epoch:
            self._rows = epoch, self._drawn(epoch)
        return self._rows[1]

    def of(self, epoch: int, seen: int = 0) -> tuple[IntArray, IntArray]:
        """The order of the samples behind the first `seen`, and where each batch begins in it.

        Batch b of rank r is at place `b * world_size + r`.
        """
        if self._planned is None or self._planned[0] != (epoch, seen):
            order, rows = self._order(epoch)[seen:], self.rows_of(epoch)
            # Limits may be larger than any number of samples, and than what an array holds.
            bounds = (
                self._by_size(len(order), min(self.batch_size, len(self.rows)))
                if self.batch_size
                else self._by_tokens(rows[order], min(self.max_tokens or 0, int(rows.sum())))
            )
            if self.batch_size and self.world_size > 1 and self.seed is not None:
                order, bounds = self._balanced(order, bounds, rows)
            self._planned = (epoch, seen), order, bounds
        return self._planned[1], self._planned[2]

    def _order(self, epoch: int) -> IntArray:
        if self.seed is None:
            return np.arange(len(self.rows))
        # SeedSequence mixes the two numbers by a fixed algorithm, so neighbouring seeds and epochs share nothing.
        state = int(np.random.SeedSequence([self.seed, epoch]).generate_state(1, np.uint64)[0])
        permutation: IntArray = torch.randperm(len(self.rows), generator=torch.Generator().manual_seed(state)).numpy()
        return permutation

    def _by_size(self, samples: int, batch_size: int) -> IntArray:
        step = batch_size * self.world_size
        full, rest = divmod(samples, step)
        tail_steps = int(rest > 0)
        if 0 < rest < self.world_size and full:
            # Too few left for all ranks: share the last full step's samples with them.
            full, tail_steps = full - 1, 2
        head = np.arange(full * self.world_size, dtype=np.int64) * batch_size
        tail = np.linspace(full * step, samples, tail_steps * self.world_size + 1, dtype=np.int64)
        return np.concatenate((head, tail))

    def _balanced(self, order: IntArray, bounds: IntArray, rows: IntArray) -> tuple[IntArray, IntArray]:
        """Deal the samples of each step anew: from the most work to the least, each to the rank that has least so far.

        A step has the samples that it had, and a rank keeps their order. Of steps of one size all are dealt at once.
        """
        order, bounds = order.copy(), bounds.copy()
        ranks, begins = self.world_size, bounds[:: self.world_size]
        sizes = np.diff(begins)
        # A sample without rows is work, too, so that every rank has one.
        work = rows[order].astype(np.float64) + 1
        if self.balance == "squares":
            work *= work
        for size in np.unique(sizes):
            steps = np.flatnonzero(sizes == size)
            places = begins[steps][:, None] + np.arange(size)
            by_work = np.argsort(-work[places], axis=1, kind="stable")
            # A row for each place in that order, which is one after the other in memory.
            sorted_work = np.ascontiguousarray(np.take_along_axis(work[places], by_work, 1).T)
            loads, sorted_ranks = np.zeros((ranks, len(steps))), np.empty(sorted_work.shape, np.int16)
            columns = np.arange(len(steps))
            for of, least in zip(sorted_work, sorted_ranks, strict=True):
                least[:] = loads.argmin(0)
                loads[least, columns] += of
            dealt = np.empty(places.shape, np.int16)
            np.put_along_axis(dealt, by_work, sorted_ranks.T, 1)
            order[places] = np.take_along_axis(order[places], np.argsort(dealt, axis=1, kind="stable"), 1)
            counts = np.bincount((columns[:, None] * ranks + dealt).ravel(), minlength=len(steps) * ranks)
            ends = begins[steps][:, None] + counts.reshape(-1, ranks).cumsum(1)
            bounds[steps[:, None] * ranks + np.arange(1, ranks + 1)] = ends
        return order, bounds

    def _by_tokens(self, rows: IntArray, max_tokens: int) -> IntArray:
        filled = np.cumsum(rows)
        bounds = [0]
        while bounds[-1] < len(rows):
            before = filled[bounds[-1] - 1] if bounds[-1] else 0
            bounds.append(int(np.searchsorted(filled, before + max_tokens, side="right")))
        # Equal counts on every rank: halve the largest batches until they can be dealt out.
        while (len(bounds) - 1) % self.world_size:
            sizes = np.diff(bounds)
            k = int(sizes.argmax())
            bounds.insert(k + 1, bounds[k] + int(sizes[k]) // 2)
        return np.array(bounds, dtype=np.int64)


class PlannedLoader:
    """What loaders over a plan have in common: places in epochs, and workers that end."""

    _plan: Plan
    _loader: DataLoader[Any]

    @property
    def position(self) -> tuple[int, int, int]:
        """`(epoch, batch, seen)` at which the next iteration starts, as `set_position` takes them."""
        return self._plan.epoch, self._plan.batch, self._plan.seen

    def set_position(self, epoch: int, batch: int, seen: int = 0) -> None:
        """Let the next iteration start at a batch of an epoch; both count from 0. `batch` may be the epoch's end.

        Args:
            epoch, batch: the place.
            seen: how many of the epoch's samples another number of ranks had, as `samples_before` tells. The rest is dealt out
                anew, and batches count from its beginning.

        Raises:
            ValueError: no such position.
        """
        if not 0 <= seen <= len(self._plan.rows):
            raise ValueError(f"position: got {seen} samples before it, expected 0 to {len(self._plan.rows)}")
        if epoch < 0 or not 0 <= batch <= self.num_batches(epoch, seen):
            raise ValueError(
                f"position: got epoch {epoch}, batch {batch}, expected a batch from 0 to {self.num_batches(max(epoch, 0), seen)}"
            )
        self._plan.epoch, self._plan.batch, self._plan.seen = epoch, batch, seen

    def num_batches(self, epoch: int, seen: int = 0) -> int:
        """Batches of an epoch without its first `seen` samples, the same on every rank."""
        return self._plan.num_batches(epoch, seen)

    def samples_before(self, epoch: int, batch: int, seen: int = 0) -> int:
        """How many samples of an epoch come before a position, on all ranks together, the first `seen` included."""
        return seen + int(self._plan.of(epoch, seen)[1][batch * self._plan.world_size])

    def __len__(self) -> int:
        """Batches of the current epoch, from behind the samples that others had."""
        return self.num_batches(self._plan.epoch, self._plan.seen)

    def close(self) -> None:
        """End the workers now; the next iteration starts new ones.

        Left to the garbage collector, their queues may go before they are told to end, and each then costs seconds of waiting.
        """
        iterator, self._loader._iterator = self._loader._iterator, None
        if iterator is not None and self._loader.num_workers:
            iterator._shutdown_workers()  # type: ignore[attr-defined]
