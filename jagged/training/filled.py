"""Batches at the sizes of CUDA graphs: what is missing to a size is made up by samples that have no loss."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from jagged.data.batches import SequenceBatch, keyed
from jagged.data.dataset import KEY
from jagged.data.table_batches import Batch

# The head's mark of a row that has no loss.
_NO_TARGET = -100
# Rows of a sample that only fills: attention costs their square.
_FILLING_ROWS = 64
# Of batches of requests: the least and the most that a new size has more than the batch that it is made for, and how much of a
# size may be filled up.
_LEAST_MORE, _MOST_MORE, _MOST_FILLED = 1 / 16, 1 / 4, 1 / 4
# How long a sample that fills may be, of the mean length: attention costs the square.
_LONGEST = 3
# And how many sizes there are: others are rare, and run without a graph.
_MOST_SIZES = 8


def capacity(rows: int, samples: int) -> tuple[int, int]:
    """Return the rows and samples of the graph that a batch of sequences is replayed by.

    Rows are filled up by less than a sixteenth (or 64), samples to a power of two: an empty sample costs next to nothing.
    """
    quantum = max(_FILLING_ROWS, (1 << max(rows - 1, 0).bit_length()) // 32)
    filled = max(-(-rows // quantum), 1) * quantum
    return filled, 1 << (samples + quantum // _FILLING_ROWS - 1).bit_length()


@dataclass
class FilledSequences:
    """The tensors of a training batch of sequences at a graph's size, made up by samples of rows without a target.

    Attributes:
        keys: "item_id", and what else batches have of each row.
        values: int64 `[keys * rows]`.
        targets: int64 `[rows]`.
        lengths: int64 `[samples]`.
        offsets: int64 `[samples + 1]`.
        num_items: of the catalogue that all items are known to lie in.
    """

    keys: tuple[str, ...]
    values: Tensor
    targets: Tensor
    lengths: Tensor
    offsets: Tensor
    num_items: int

    @classmethod
    def empty(cls, size: tuple[int, int], num_items: int, device: torch.device, keys: tuple[str, ...] = (KEY,)) -> Self:
        """Memory for so many rows and samples, as `capacity` says for the batches to come."""
        rows, samples = size
        values, targets, lengths, offsets = (
            torch.zeros(count, dtype=torch.int64, device=device) for count in (len(keys) * rows, rows, samples, samples + 1)
        )
        return cls(keys, values, targets, lengths, offsets, num_items)

    def holds(self, size: tuple[int, int]) -> bool:
        """Whether it is this size."""
        return size == (self.targets.shape[0], self.lengths.shape[0])

    def take(self, batch: SequenceBatch) -> None:
        """Copy a batch here and fill up, without a look at its values."""
        rows, samples = batch.targets.shape[0], batch.features.stride()
        offsets = batch.features.offsets()[: samples + 1]
        for values, found in zip(self.values.chunk(len(self.keys)), batch.features.values().chunk(len(self.keys)), strict=True):
            values[:rows].copy_(found)
            # An item that the step reads anyway: an optimizer may move rows that are read, whatever their gradient.
            values[rows:].copy_(found[:1] if rows else values.new_zeros(1))
        self.targets[:rows].copy_(batch.targets)
        self.targets[rows:].fill_(_NO_TARGET)
        self.offsets[: samples + 1].copy_(offsets)
        # Samples of 64 rows as long as rows are missing, then empty ones.
        last = rows + _FILLING_ROWS * (self.offsets.shape[0] - samples - 1)
        filling = self.offsets[samples + 1 :]
        torch.arange(rows + _FILLING_ROWS, last + 1, _FILLING_ROWS, out=filling)
        filling.clamp_(max=self.targets.shape[0])
        torch.sub(self.offsets[1:], self.offsets[:-1], out=self.lengths)

    def batch(self) -> SequenceBatch:
        """These tensors as a batch; a new one each time, since torchrec's keep what they once worked out."""
        lengths, offsets = self.lengths, self.offsets
        if (others := len(self.keys) - 1) > 0:
            behind = [offsets[1:] + key * self.targets.shape[0] for key in range(1, others + 1)]
            lengths, offsets = lengths.repeat(len(self.keys)), torch.cat([offsets, *behind])
        features = keyed(self.values, lengths, offsets, self.keys)
        return SequenceBatch(features, self.targets, self.lengths, num_items=self.num_items)


class SequenceSizes(NamedTuple):
    """The sizes of batches of sequences, whose items lie in a catalogue of `num_items`."""

    num_items: int

    def of(self, batch: SequenceBatch) -> tuple[int, int] | None:
        """What a batch is filled up to; None for one whose items are not known to lie in the catalogue."""
        return capacity(batch.targets.shape[0], batch.features.stride()) if batch.is_checked(self.num_items) else None

    def room(
        self, batch: SequenceBatch, size: tuple[int, int], device: torch.device, others: Sequence[FilledSequences]
    ) -> FilledSequences:
        """Memory for batches of a size, whatever others there are."""
        return FilledSequences.empty(size, self.num_items, device, tuple(batch.features.keys()))


def room_for_more(requests: float) -> float:
    """How much larger a new size is than the batch that it is made for: the sum of n lengths varies by some `1 / sqrt(n)`."""
    return min(_MOST_MORE, max(_LEAST_MORE, 2 / math.sqrt(requests)))


class _Part(NamedTuple):
    """Rows, cut among samples, and whether attention costs the square of a sample's."""

    samples: int
    rows: int
    is_attended: bool = False

    def more(self, share: float, samples: int) -> int:
        """How many rows a size of so many samples has; one a sample stays that."""
        return samples if self.rows == self.samples else self.rows + math.ceil(self.rows * share)

    def fills(self, own: _Part) -> bool:
        """Whether what is missing to this size fits into the samples that are missing, attended ones none too long."""
        if own.rows == 0 or self.rows == own.rows:
            return self.rows == own.rows
        missing, mean = self.samples - own.samples, -(-own.rows // max(own.samples, 1))
        fits = not self.is_attended or self.rows - own.rows <= missing * mean * _LONGEST
        return missing > 0 and self.rows > own.rows and fits


class Sizes(NamedTuple):
    """How large a batch of requests is, of which the host knows it. All batches of a loader have the same tensors and keys.

    Attributes:
        requests: their number.
        candidates: of all requests.
        events: of all histories of events, 0 without these.
        counts: of each KeyedJaggedTensor the ids of each key.
        histories: places among the keys of `features` of lists that attention reads.
    """

    requests: int
    candidates: int
    events: int
    counts: dict[str, list[int]]
    histories: frozenset[int] = frozenset()

    def samples(self, name: str) -> int:
        """Of a KeyedJaggedTensor."""
        if name == "history_lists":
            return self.events
        return self.candidates if "candidate" in name else self.requests

    @property
    def total(self) -> int:
        """All rows and ids."""
        return self.requests + self.candidates + self.events + sum(map(sum, self.counts.values()))

    def parts(self) -> Iterator[_Part]:
        """What is cut among what."""
        yield _Part(self.requests, self.candidates, is_attended=True)
        yield _Part(self.requests, self.events, is_attended=True)
        for name, counts in self.counts.items():
            histories = self.histories if name == "features" else ()
            yield from (_Part(self.samples(name), count, place in histories) for place, count in enumerate(counts))

    def more(self) -> Sizes:
        """A size with room for this batch and others like it."""
        if all(part.rows in (0, part.samples) for part in self.parts()):
            return self
        share = room_for_more(self.requests)
        requests = self.requests + math.ceil(share * self.requests)
        # Keys with an id a candidate, or an event, are as long as these are, in every batch and in every size.
        candidates, events = (_Part(self.requests, of).more(share, requests) for of in (self.candidates, self.events))
        larger = Sizes(requests, candidates, events, {}, self.histories)
        for name, counts in self.counts.items():
            samples, now = self.samples(name), larger.samples(name)
            larger.counts[name] = [_Part(samples, count).more(share, now) for count in counts]
        return larger

    def largest(self, other: Sizes) -> Sizes:
        """The larger of both in everything."""
        counts = {name: [max(pair) for pair in zip(of, other.counts[name], strict=True)] for name, of in self.counts.items()}
        requests, candidates, events = map(max, self[:3], other[:3])
        return Sizes(requests, candidates, events, counts, self.histories)

    def holds(self, own: Sizes) -> bool:
        """Whether a batch of size `own` is filled up to this one, by not too much."""
        pairs = list(zip(self.parts(), own.parts(), strict=True))
        fits = all(one >= other for one, other in zip(self[:3], own[:3], strict=True)) and all(of.fills(by) for of, by in pairs)
        return fits and self.total - own.total <= max(_MOST_FILLED * self.total, _FILLING_ROWS * len(pairs))


class _FilledKeys:
    """A KeyedJaggedTensor at a size: behind the ids of each key stand copies of its first one."""

    def __init__(self, like: KeyedJaggedTensor, samples: int, counts: list[int], device: torch.device) -> None:
        self.keys, self.counts = like.keys(), counts
        self.values = like.values().new_zeros(sum(counts), device=device)
        self.weights = None if like.weights_or_none() is None else like.weights().new_zeros(sum(counts), device=device)
        self.lengths = torch.zeros(len(counts), samples, dtype=torch.int64, device=device)
        sizes = torch.tensor(counts, dtype=torch.int64, device=device)
        # Of each value its key, and its place in that.
        self._sizes, begins = sizes, sizes.cumsum(0) - sizes
        self._key = torch.repeat_interleave(torch.arange(len(counts), device=device), sizes, output_size=sum(counts))
        self._place = torch.arange(sum(counts), device=device) - begins[self._key]

    def take(self, found: KeyedJaggedTensor) -> None:
        """Copy one here and fill up."""
        own = found.stride()
        lengths = found.lengths().view(len(self.keys), own)
        self.lengths[:, :own].copy_(lengths)
        counts = lengths.sum(1)
        self.lengths[:, own:].copy_(_dealt(self._sizes - counts, self.lengths.shape[1] - own))
        if found.values().numel():
            place = torch.where(self._place < counts[self._key], self._place, 0) + (counts.cumsum(0) - counts)[self._key]
            torch.index_select(found.values(), 0, place, out=self.values)
            if self.weights is not None:
                torch.index_select(found.weights(), 0, place, out=self.weights)

    def tensor(self) -> KeyedJaggedTensor:
        """As a new one, since TorchRec's keep what they once worked out."""
        return KeyedJaggedTensor(
            keys=self.keys, values=self.values, weights=self.weights, lengths=self.lengths.flatten(),
            stride=self.lengths.shape[1], length_per_key=list(self.counts),
        )  # fmt: skip


class FilledRequests:
    """The tensors of a training batch of requests at a graph's size, made up by requests and candidates without labels.

    What fills up repeats ids that the batch reads anyway: an optimizer may move rows that are read, whatever their gradient.

    Attributes:
        sizes: what there is room for.
    """

    def __init__(self, like: Batch, sizes: Sizes, device: torch.device) -> None:
        self.sizes = sizes
        self._keyed = {
            name: _FilledKeys(of, sizes.samples(name), sizes.counts[name], device)
            for name, of in _values_of(like, KeyedJaggedTensor).items()
        }
        rows = {"request": sizes.requests, "history": sizes.events}
        self._plain = {
            name: of.new_zeros(rows.get(name.split("_")[0], sizes.candidates), *of.shape[1:], device=device)
            for name, of in _values_of(like, Tensor).items()
        }
        self._plain["user_index"] = like.user_index.new_zeros(sizes.requests, device=device)
        self._plain["candidate_offsets"] = like.candidate_offsets.new_zeros(sizes.requests + 1, device=device)
        self._sampled = like.sampled

    def holds(self, size: Sizes) -> bool:
        """Whether a batch of a size is filled up to this one."""
        return self.sizes.holds(size)

    def take(self, batch: Batch) -> None:
        """Copy a batch here and fill up, without a look at its values."""
        for name, keys in self._keyed.items():
            keys.take(getattr(batch, name))
        for name, filled in self._plain.items():
            found = getattr(batch, name)
            filled[: len(found)].copy_(found)
            if name in ("label_mask", "weights"):
                filled[len(found) :].zero_()
            elif name != "candidate_offsets" and len(found) < len(filled):
                filled[len(found) :].copy_(found[:1])
        offsets, requests, candidates = self._plain["candidate_offsets"], len(batch), batch.rows.numel()
        missing = torch.full((1,), self.sizes.candidates - candidates, device=offsets.device)
        counts = _dealt(missing, self.sizes.requests - requests)[0]
        torch.cumsum(counts, 0, out=offsets[requests + 1 :])
        offsets[requests + 1 :].add_(candidates)

    def batch(self) -> Batch:
        """These tensors as a batch; a new one each time."""
        keyed_tensors = {name: keys.tensor() for name, keys in self._keyed.items()}
        named: dict[str, Any] = {one.name: None for one in fields(Batch)}
        return Batch(**{**named, **self._plain, **keyed_tensors, "sampled": self._sampled})


class RequestSizes(NamedTuple):
    """The sizes of batches of requests, of which attention reads the keys `histories`."""

    histories: frozenset[str] = frozenset()

    def of(self, batch: Batch) -> Sizes | None:
        """How large a loader's batch is; None where the host knows too little, as of candidates' lists among other ids."""
        if batch.pairs is None or batch.candidate_list_offsets is not None:
            return None
        counts = {name: of.length_per_key() for name, of in _values_of(batch, KeyedJaggedTensor).items()}
        events = 0 if batch.history_times is None else batch.history_times.numel()
        histories = frozenset(place for place, key in enumerate(batch.features.keys()) if key in self.histories)
        return Sizes(len(batch), batch.rows.numel(), events, counts, histories)

    def room(self, batch: Batch, size: Sizes, device: torch.device, others: Sequence[FilledRequests]) -> FilledRequests | None:
        """Memory for batches of this size and those of others, where that is not too much; None where there are many."""
        if len(others) >= _MOST_SIZES:
            return None
        sizes = size.more()
        for other in others:
            # Sizes that take turns become one.
            if (larger := sizes.largest(other.sizes)).holds(size):
                sizes = larger
        return FilledRequests(batch, sizes, device)


def _values_of(batch: Batch, kind: type) -> dict[str, Any]:
    """The fields that are of a type."""
    found = {one.name: getattr(batch, one.name) for one in fields(batch)}
    return {name: value for name, value in found.items() if isinstance(value, kind)}


def _dealt(missing: Tensor, samples: int) -> Tensor:
    """Lengths `[K, samples]` that are as even as can be, of K sums."""
    each = missing[:, None] // max(samples, 1)
    return each + (torch.arange(samples, device=missing.device) < missing[:, None] - each * samples)
