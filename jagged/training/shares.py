"""Processes that were given the same rows, and so count each of them twice, are refused by name."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jagged.training.errors import TrainingError
from jagged.training.processes import Processes

# One batch may be equal by chance, where it has a row or two; so many are not. A digest takes a millisecond for a megabyte.
_COMPARED = 8


class Shares:
    """Whether each process has rows of its own of a part: its first batches are compared, once.

    Processes are refused where all of these are equal, in the same order, as a loader without a sampler gives them. Equality
    says nothing where batches hold zeros alone, as those without rows do, or the same again and again; and what
    holds objects of unknown make is not compared. The same rows in another order are not seen.

    Args:
        processes: the run's; with one alone nothing is done.
        name: of the part, for messages.
    """

    def __init__(self, processes: Processes, name: str) -> None:
        self._processes, self._name = processes, name
        self._digests: list[str] = []
        self._steps, self._open = 0, processes.world_size > 1

    def seen(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches; a digest of each of the first is kept."""
        for batch in batches:
            if self._open and len(self._digests) < _COMPARED:
                self._digests.append(digest(batch))
            yield batch

    def step(self, batches: int) -> None:
        """After a batch of training, in every process alike: compare when enough have come, or all `batches` of an epoch.

        Raises:
            TrainingError: as `compare`.
        """
        self._steps += 1
        if self._open and self._steps >= min(_COMPARED, batches):
            self.compare()

    def compare(self) -> None:
        """Compare what has come; every process must call. Later calls do nothing.

        Raises:
            TrainingError: processes have the same batches.
        """
        if not self._open:
            return
        self._open = False
        ranks: dict[tuple[str, ...], list[int]] = {}
        for rank, digests in enumerate(self._processes.all(self._digests[:_COMPARED])):
            ranks.setdefault(tuple(digests), []).append(rank)
        for digests, same in ranks.items():
            if len(same) > 1 and _tell(digests):
                told = f"{', '.join(str(rank) for rank in same[:-1])} and {same[-1]}"
                what = f"the same first {len(digests)} batches" if len(digests) > 1 else "the same batch"
                raise TrainingError(
                    f"{self._name}: got {what} in the processes {told}, expected each one's own share of the rows; give the "
                    "DataLoader a DistributedSampler, or each process the rows of its rank"
                )


def _tell(digests: tuple[str, ...]) -> bool:
    """Whether equality of these says anything: some content, and not the same again and again."""
    content = [one for one in digests if one]
    return bool(content) and (len(content) == 1 or len(set(content)) > 1)


def digest(batch: Any) -> str:
    """Of a batch's structure, tensors and arrays; empty where all elements are zero, or where a part cannot be read."""
    found = hashlib.blake2b(digest_size=16)
    try:
        content = _feed(found, batch, ())
    except _Unreadable:
        return ""
    return found.hexdigest() if content else ""


class _Unreadable(Exception):  # noqa: N818 - a message to `digest`, no error
    pass


def _feed(found: Any, thing: Any, inside: tuple[int, ...]) -> bool:
    """Add a part of a batch, and say whether it has an element other than zero."""
    if isinstance(thing, Tensor):
        if thing.layout is not torch.strided or thing.is_nested or thing.device.type == "meta" or thing.is_quantized:
            raise _Unreadable
        found.update(f"{thing.dtype} {tuple(thing.shape)}".encode())
        # One element has any stride and is still contiguous; only a copy of it can be read as bytes.
        flat = thing.detach().resolve_conj().resolve_neg().cpu().reshape(-1).clone(memory_format=torch.contiguous_format)
        return _feed_bytes(found, flat.view(torch.uint8).numpy())
    if isinstance(thing, np.ndarray):
        if thing.dtype.hasobject:
            raise _Unreadable
        found.update(f"{thing.dtype} {thing.shape}".encode())
        return _feed_bytes(found, np.frombuffer(thing.tobytes(), dtype=np.uint8))
    if thing is None or isinstance(thing, (bool, int, float, str, bytes, torch.device, torch.dtype)):
        found.update(repr(thing).encode())
        return False
    if id(thing) in inside:
        raise _Unreadable
    found.update(type(thing).__name__.encode())
    # All parts are fed.
    told = [_feed(found, part, (*inside, id(thing))) for part in _parts(thing)]
    return any(told)


def _feed_bytes(found: Any, content: np.ndarray[Any, Any]) -> bool:
    found.update(content)
    return bool(content.any())


def _parts(thing: Any) -> list[Any]:
    """What a batch is made of: as `jagged.data.moving` goes through it, and the attributes of what moves itself."""
    if isinstance(thing, Mapping):
        return [part for item in thing.items() for part in item]
    if isinstance(thing, (list, tuple)):
        return list(thing)
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        return [getattr(thing, field.name) for field in dataclasses.fields(thing)]
    if hasattr(thing, "to") and hasattr(thing, "__dict__"):
        return [part for item in sorted(vars(thing).items()) for part in item]
    raise _Unreadable
