"""What a loop trains on, whatever loader gives it: batches by epoch and place, with random numbers of their own."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torchrec.streamable import Pipelineable

from jagged.data.moving import Carried
from jagged.training.errors import TrainingError


@runtime_checkable
class Positioned(Protocol):
    """A loader that knows epochs and places, as `jagged.data.BatchLoader` does."""

    def set_position(self, epoch: int, batch: int) -> None:
        """Let the next iteration start at a batch of an epoch; both count from 0."""

    def num_batches(self, epoch: int) -> int:
        """Batches of an epoch, the same in every process."""

    def __iter__(self) -> Iterator[Any]: ...


@runtime_checkable
class Dealt(Protocol):
    """A loader with places whose epochs go on with another number of processes, as those of `jagged.data` do.

    The samples of its first batches, of all processes together, are the first ones of the epoch's order, whatever their number.
    """

    def set_position(self, epoch: int, batch: int, seen: int = 0) -> None:
        """Let the next iteration start at a batch of an epoch without its first `seen` samples."""

    def num_batches(self, epoch: int, seen: int = 0) -> int:
        """Batches of an epoch without its first `seen` samples, the same in every process."""

    def samples_before(self, epoch: int, batch: int, seen: int = 0) -> int:
        """How many samples of an epoch come before a batch in all processes together, the first `seen` included."""

    def __iter__(self) -> Iterator[Any]: ...


def positioned(loader: Any, name: str, seed: int) -> Positioned:
    """A loader as it is where it knows places, else `Repeated`.

    Raises:
        TypeError: what cannot be iterated again and again, or has no length.
    """
    if isinstance(loader, Positioned):
        return loader
    # An iterator is used up by one epoch.
    if not hasattr(loader, "__iter__") or not _has_length(loader) or isinstance(loader, Iterator):
        raise TypeError(
            f"{name}: got a {type(loader).__name__}, expected batches that can be iterated again and have a length: "
            "a DataLoader or a list of batches"
        )
    return Repeated(loader, name, seed)


def _has_length(loader: Any) -> bool:
    try:
        len(loader)
    except TypeError:
        # A DataLoader of an iterable data set, too.
        return False
    return True


class Repeated:
    """An iterable of a known length, a `DataLoader` for example, as a loader with places.

    An epoch is drawn from random states of torch, numpy and Python that are a function of `(seed, epoch)` and are exchanged for
    the caller's at each batch. So an epoch comes again as it was, whatever the training draws; a place in it is reached by
    passing over the batches before. A sampler's `set_epoch` is called, where it has one, and generators of a `DataLoader` or of
    its samplers are seeded alike.

    Args:
        batches: iterated once an epoch.
        name: of the part, for messages.
        seed: of the random states.

    Attributes:
        passed: called at each batch that is passed over.
    """

    passed: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, batches: Any, name: str, seed: int) -> None:
        self._batches, self._name, self._seed = batches, name, seed
        self._epoch = self._first = 0
        self._iterator: Any = None

    def set_position(self, epoch: int, batch: int) -> None:
        """Let the next iteration start at a batch of an epoch."""
        self._epoch, self._first = epoch, batch

    def num_batches(self, epoch: int) -> int:
        """The iterable's length."""
        return len(self._batches)

    def close(self) -> None:
        """End a `DataLoader`'s workers now: left to the garbage collector, they may outlive what they talk to."""
        iterator, self._iterator = self._iterator, None
        if hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()
            if getattr(self._batches, "_iterator", None) is iterator:
                # With persistent workers the loader keeps it, and would go on with what is gone.
                self._batches._iterator = None

    def __iter__(self) -> Iterator[Any]:
        return self._from(self._epoch, self._first)

    def _from(self, epoch: int, first: int) -> Iterator[Any]:
        number = int(np.random.SeedSequence([self._seed, epoch]).generate_state(1)[0])
        state = _seeded(number)
        for part in _with_samplers(self._batches):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
            if isinstance(getattr(part, "generator", None), torch.Generator):
                part.generator.manual_seed(number)
        with _exchanged(state):
            iterator = self._iterator = iter(self._batches)
        given = 0
        while True:
            with _exchanged(state):
                try:
                    batch = next(iterator)
                except StopIteration:
                    break
            given += 1
            if given > first:
                yield batch
            else:
                self.passed()
        if given != len(self._batches):
            raise TrainingError(
                f"{self._name}: got {given:,} batches in epoch {epoch + 1}, expected the loader's length, {len(self._batches):,}"
            )


def _with_samplers(loader: Any) -> Iterator[Any]:
    yield loader
    for name in ("batch_sampler", "sampler"):
        if (part := getattr(loader, name, None)) is not None:
            yield from _with_samplers(part)


def carried(batches: Iterable[Any]) -> Iterator[Any]:
    """Batches as TorchRec's pipelines take them."""
    return (batch if isinstance(batch, (torch.Tensor, Pipelineable)) else Carried(batch) for batch in batches)


def _states() -> list[Any]:
    return [torch.get_rng_state(), random.getstate(), np.random.get_state()]


def _set(states: list[Any]) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])


def _seeded(seed: int) -> list[Any]:
    generator = np.random.RandomState(seed)
    return [torch.Generator().manual_seed(seed).get_state(), random.Random(seed).getstate(), generator.get_state()]


@contextmanager
def _exchanged(states: list[Any]) -> Iterator[None]:
    """Random numbers from `states`, which move on; the caller's stay where they were."""
    before = _states()
    _set(states)
    try:
        yield
    finally:
        states[:] = _states()
        _set(before)
