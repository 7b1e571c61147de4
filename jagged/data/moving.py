"""Batches of any make on another device: tensors and TorchRec's types inside of dicts, sequences and dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torchrec.streamable import Pipelineable


def each(batch: Any, change: Callable[[Any], Any]) -> Any:
    """The same structure with `change` done to each part that can be moved; what is no tensor stays as it is."""
    if isinstance(batch, Tensor) or hasattr(batch, "to"):
        return change(batch)
    if isinstance(batch, Mapping):
        return {key: each(value, change) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(each(value, change) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(each(value, change) for value in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        changed = {field.name: each(getattr(batch, field.name), change) for field in dataclasses.fields(batch) if field.init}
        return dataclasses.replace(batch, **changed)
    return batch


def moved(batch: Any, device: torch.device, non_blocking: bool = False) -> Any:
    """A batch on a device."""
    return each(batch, lambda part: part.to(device, non_blocking=non_blocking))


def is_sampled(batch: Any) -> bool:
    """Whether a batch, or a part of it, has drawn negatives: an attribute `sampled` that is true, as `Part.loader` gives it."""
    found = [getattr(batch, "sampled", False) is True]

    def look(part: Any) -> Any:
        found.append(getattr(part, "sampled", False) is True)
        return part

    each(batch, look)
    return any(found)


def _record(part: Any, stream: torch.Stream, seen: set[int]) -> None:
    """Of whatever has been moved, also inside of what moves by a `to` of its own and records nothing."""
    if id(part) in seen:
        return
    seen.add(id(part))
    if hasattr(part, "record_stream"):
        part.record_stream(stream)
        return
    inside: Any = ()
    if isinstance(part, Mapping):
        inside = part.values()
    elif isinstance(part, (list, tuple)):
        inside = part
    elif dataclasses.is_dataclass(part) and not isinstance(part, type):
        inside = [getattr(part, field.name, None) for field in dataclasses.fields(part)]
    elif hasattr(part, "to"):
        inside = getattr(part, "__dict__", {}).values()
    for value in [*inside]:
        _record(value, stream, seen)


class Carried(Pipelineable):  # type: ignore[misc]
    """A batch of any make as TorchRec's pipelines carry it.

    Attributes:
        batch: what the loader gave.
    """

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def to(self, device: torch.device, non_blocking: bool = False) -> Carried:
        """The batch on another device."""
        return Carried(moved(self.batch, device, non_blocking))

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory until work queued on `stream` is done."""
        _record(self.batch, stream, set())

    def pin_memory(self) -> Carried:
        """The batch in page-locked memory."""
        return Carried(each(self.batch, lambda part: part.pin_memory() if hasattr(part, "pin_memory") else part))
