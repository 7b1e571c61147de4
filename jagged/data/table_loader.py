"""The loader of a part's requests: batches built in workers, by number or by budget, at any place of an epoch."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from jagged.data.gather import only_with_parent
from jagged.data.negatives import Drawing
from jagged.data.packed import Packed
from jagged.data.plan import Balance, Plan, PlannedLoader
from jagged.data.slots import Slots, forget
from jagged.data.table_batches import Batch, Part
from jagged.data.unseen import Unseen

IntArray = npt.NDArray[np.int64]

# Batches that each worker makes ahead, as DataLoader's default has it.
_PREFETCH = 2
_numbers = itertools.count()


class RequestLoader(PlannedLoader):
    """Batches of a part, as `Part.loader` documents them. Iterating yields the rest of the current epoch and moves no position.

    The order and the draws are a function of seed and epoch, the same for any `num_workers`; rank r's batches are a function of
    these and of `world_size`. Every request comes exactly once an epoch, on one rank, and every rank has the same number of
    batches. With workers, a new iteration ends the one before it. `Trainer` says the position; a loop of yours calls
    `set_position(epoch, 0)`.
    """

    def __init__(
        self,
        part: Part,
        drawing: Drawing | None,
        *,
        batch_size: int | None,
        max_tokens: int | None,
        max_history: int | None,
        shuffle: bool,
        seed: int,
        unseen: float,
        num_workers: int,
        pin_memory: bool,
        rank: int,
        world_size: int,
        balance: Balance,
        multiprocessing_context: str | None,
    ) -> None:
        if num_workers < 0:
            raise ValueError(f"num_workers: got {num_workers}, expected 0 or more")
        if type(seed) is not int or not 0 <= seed < 2**64:
            raise ValueError(f"seed: got {seed!r}, expected 0 to 2**64 - 1")
        if not 0 <= unseen <= 1:
            raise ValueError(f"unseen: got {unseen!r}, expected a share from 0 to 1")
        events, candidates = part.sizes(max_history, drawing)
        sizes = events + candidates
        self._plan = Plan(sizes, batch_size, max_tokens, seed if shuffle else None, rank, world_size, balance)
        if max_tokens is not None and max_tokens < (largest := int(sizes.max())):
            raise ValueError(
                f"max_tokens: got {max_tokens}, expected at least {largest}, the events and candidates of the largest request; "
                "max_history makes it smaller"
            )
        self._part, self._drawing = part, drawing
        self._is_locked = pin_memory and torch.cuda.is_available()
        slots = Slots(next(_numbers), num_workers, _PREFETCH, is_locked=self._is_locked) if num_workers else None
        if slots is not None:
            weakref.finalize(self, forget, slots.loader)
        self._loader: DataLoader[Packed] = DataLoader(
            _Requests(part, drawing, max_history, Unseen(unseen, seed, 0) if unseen else None, slots),
            batch_size=None,
            sampler=_WithEpoch(self._plan, (-candidates, -events) if shuffle else None),  # type: ignore[arg-type]
            num_workers=num_workers,
            prefetch_factor=_PREFETCH if num_workers else None,
            persistent_workers=num_workers > 0,
            multiprocessing_context=multiprocessing_context if num_workers else None,
            worker_init_fn=only_with_parent if num_workers else None,
            # DataLoader draws a seed for its workers; from a generator of its own it leaves the global state alone.
            generator=torch.Generator().manual_seed(0),
        )

    def __iter__(self) -> Iterator[Batch]:
        return map(self._batch, self._loader)

    def _batch(self, packed: Packed) -> Batch:
        # What came in no slot is not page-locked yet.
        packed = packed.pin_memory() if self._is_locked and packed.slot is None else packed
        return self._part.batch(packed, self._drawing)


class _Requests(Dataset[Any]):
    """Gathers a batch. It comes with its epoch, on which draws depend: workers that live on do not hear of the next one."""

    def __init__(
        self, part: Part, drawing: Drawing | None, max_history: int | None, unseen: Unseen | None, slots: Slots | None
    ) -> None:
        self.part, self.drawing, self.max_history, self.unseen, self.slots = part, drawing, max_history, unseen, slots

    def __getitem__(self, chosen: tuple[int, IntArray]) -> Packed:
        epoch, places = chosen
        allocate = None if self.slots is None else self.slots.allocate
        unseen = None if self.unseen is None else self.unseen._replace(epoch=epoch)
        return self.part.collect(
            places, max_history=self.max_history, drawing=self.drawing, epoch=epoch, unseen=unseen, allocate=allocate
        )


class _WithEpoch(Sampler[tuple[int, IntArray]]):
    """Batches' places, each with its epoch; with `keys`, each request's, those of a batch in their order, the last key first.

    Longest first, attention on a CPU copies no rows, and a GPU's last samples are short.
    """

    def __init__(self, plan: Plan, keys: tuple[IntArray, ...] | None) -> None:
        self.plan, self.keys = plan, keys

    def __len__(self) -> int:
        return len(self.plan)

    def __iter__(self) -> Iterator[tuple[int, IntArray]]:
        epoch = self.plan.epoch
        return ((epoch, self._ordered(places)) for places in self.plan)

    def _ordered(self, places: IntArray) -> IntArray:
        return places if self.keys is None else places[np.lexsort([key[places] for key in self.keys])]
