"""Batches as KeyedJaggedTensors, and the loader that builds them in worker processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from jagged.data.dataset import KEY, TIME_KEY
from jagged.data.gather import BatchSource, only_with_parent
from jagged.data.plan import Balance, Plan, PlannedLoader
from jagged.data.splits import SequencePart
from jagged.modules import StochasticLength
from jagged.ops import sample_of_row, trust_values

NO_TIMES = "with_times: got a dataset without times, expected one with them; read a table with a time column"

IntArray = npt.NDArray[np.int64]
# Draws of lengths of the same seed and epoch are others than those of the order.
_LENGTHS = 1


@dataclass
class SequenceBatch(Pipelineable):  # type: ignore[misc]
    """Some users' histories and what comes next; nothing is padded.

    Attributes:
        features: key "item_id": int64 dense item ids, oldest first, `B` samples with `sum L` rows. Of a loader `with_times` also
            key "timestamp": int64, the time of each row, seconds of calendar times, numbers as they are; and a key for each side
            feature of events `with_features`: int64, the model's row of each row's value.
        targets: int64; training: `[sum L]`, the next item of every row; evaluation: `[B]`, the item held out, -1 where the model
            has no row for it.
        users: int64 `[B]`, dense user ids.
        viewed: evaluation with `with_viewed`: key "item_id", all items of the users' histories however long; else None.
        num_items: the catalogue that all ids were compared with on the host, as a loader does; None where they were not. A model
            of as many items needs no check of its own, which on a GPU would wait for the device.
        kept: training with `stochastic_length`: int64 `[B]`, how many rows of each history are to be trained on, which
            `NextItemTask` draws; None for all.
        num_kept: the sum of `kept`, which the host knows; None without.
    """

    features: KeyedJaggedTensor
    targets: Tensor
    users: Tensor
    viewed: KeyedJaggedTensor | None = None
    num_items: int | None = None
    kept: Tensor | None = None
    num_kept: int | None = None

    def __len__(self) -> int:
        """Users."""
        return self.features.stride()

    def is_checked(self, num_items: int) -> bool:
        """Whether all ids are known to lie in a catalogue of `num_items`."""
        return self.num_items is not None and self.num_items <= num_items

    def trusted(self, num_items: int) -> AbstractContextManager[None]:
        """`jagged.ops.trust_values` where all ids are known to lie in a catalogue of `num_items`, else no change."""
        return trust_values() if self.is_checked(num_items) else nullcontext()

    def only(self, rows: Tensor, offsets: Tensor) -> SequenceBatch:
        """The training batch of some rows of each history, each of them a sequence of its own.

        What follows a row is the next one that is kept; what followed the whole history follows its last one.

        Args:
            rows: int64 `[n]`, their places among all, in order.
            offsets: `[B + 1]`, of them.
        """
        count, whole = rows.shape[0], self.features.offsets()[: len(self) + 1]
        places, samples = torch.arange(count, device=rows.device), sample_of_row(offsets, count)
        is_last = places == offsets[1:][samples] - 1
        # The target that stands before the next row is that row's item.
        following = torch.where(is_last, whole[1:][samples], rows.roll(-1)) - 1
        keys = tuple(self.features.keys())
        values = self.features.values().view(len(keys), -1).index_select(1, rows)
        lengths = offsets.diff().to(torch.int64).repeat(len(keys))
        features = keyed(values.flatten(), lengths, torch.nn.functional.pad(lengths.cumsum(0), (1, 0)), keys)
        return replace(self, features=features, targets=self.targets[following], kept=None, num_kept=None)

    def to(self, device: torch.device, non_blocking: bool = False) -> SequenceBatch:
        """The batch on another device."""
        return SequenceBatch(
            self.features.to(device, non_blocking=non_blocking),
            self.targets.to(device, non_blocking=non_blocking),
            self.users.to(device, non_blocking=non_blocking),
            None if self.viewed is None else self.viewed.to(device, non_blocking=non_blocking),
            self.num_items,
            None if self.kept is None else self.kept.to(device, non_blocking=non_blocking),
            self.num_kept,
        )

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory until work queued on `stream` is done."""
        # TorchRec's tensors say that they want CUDA's.
        self.features.record_stream(cast(torch.cuda.Stream, stream))
        self.targets.record_stream(stream)
        self.users.record_stream(stream)
        if self.viewed is not None:
            self.viewed.record_stream(cast(torch.cuda.Stream, stream))
        if self.kept is not None:
            self.kept.record_stream(stream)

    def pin_memory(self) -> SequenceBatch:
        """The batch in page-locked memory."""
        return SequenceBatch(
            self.features.pin_memory(),
            self.targets.pin_memory(),
            self.users.pin_memory(),
            None if self.viewed is None else self.viewed.pin_memory(),
            self.num_items,
            None if self.kept is None else self.kept.pin_memory(),
            self.num_kept,
        )


class BatchLoader(PlannedLoader):
    """Batches of a part. Iterating yields the rest of the current epoch and moves no position: that is the training loop's.

    The order is a function of `(seed, epoch)` alone, the same for any `num_workers`; rank r's batches are a function of that
    and of `world_size`. Every sample comes exactly once an epoch, on one rank, and every rank has the same number of batches
    (so one may be empty where fewer samples than ranks are left). With workers, a new iteration ends the one before it.

    Args:
        part: the samples. Without targets they are for training: inputs `x_0 .. x_{n-1}`, targets `x_1 .. x_n`.
        batch_size: samples a batch and rank; the last batches of an epoch may be smaller. Give this or `max_tokens`. With
            `shuffle` and several ranks it is their mean: a step's samples go to the ranks by their work.
        max_tokens: most rows (`sum L`) a batch and rank; samples are packed in order up to it. At least `max_seq_len`.
        max_seq_len: most rows a sample; the oldest events of a longer history are left out.
        shuffle: a new order each epoch; otherwise the order of the part.
        seed: of the order.
        num_workers: processes that build batches; 0 builds them in this one. The events are mapped by each of them, not copied.
        pin_memory: hand batches out in page-locked memory (where there is a CUDA device).
        rank, world_size: this process's share.
        balance: what the work of a sample is: its rows, `"lengths"`, or their square, `"squares"`, as attention over long
            histories takes them.
        with_viewed: evaluation: also hand out the whole history of each user.
        with_times: also hand out the time of each row.
        with_features: names of side features of events to hand out, too.
        stochastic_length: training: alpha, from above 0 to 2, of `jagged.modules.StochasticLength`. Which samples are shortened
            is drawn for each epoch, by `seed`; plans, budgets and `balance` go by what is left, and batches say it (`kept`).
            None for whole histories.
        multiprocessing_context: how workers start ("fork", "spawn", "forkserver"); None for Python's default.

    Raises:
        ValueError: an option out of range, an empty part, fewer samples than ranks, or times or features of a dataset that has
            none.
    """

    def __init__(
        self,
        part: SequencePart,
        *,
        batch_size: int | None = None,
        max_tokens: int | None = None,
        max_seq_len: int,
        shuffle: bool,
        seed: int,
        num_workers: int = 0,
        pin_memory: bool = False,
        rank: int = 0,
        world_size: int = 1,
        balance: Balance = "lengths",
        with_viewed: bool = False,
        with_times: bool = False,
        with_features: Sequence[str] = (),
        stochastic_length: float | None = None,
        multiprocessing_context: str | None = None,
    ) -> None:
        if max_seq_len < 1:
            raise ValueError(f"max_seq_len: got {max_seq_len}, expected 1 or more")
        if seed < 0 or num_workers < 0:
            raise ValueError(f"seed, num_workers: got {seed}, {num_workers}, expected 0 or more")
        if with_viewed and part.target is None:
            raise ValueError("with_viewed: got a training part, expected one with targets")
        if stochastic_length is not None and part.target is not None:
            raise ValueError(
                f"stochastic_length: got {stochastic_length} with a part that has targets, expected None; histories are "
                "shortened in training alone"
            )
        if with_times and part.dataset.timestamps is None:
            raise ValueError(NO_TIMES)
        if len(set(with_features)) < len(with_features):
            raise ValueError(f"with_features: got {list(with_features)}, expected each once")
        if lacking := [name for name in with_features if name not in part.features]:
            raise ValueError(
                f"with_features: got {lacking[0]!r}, expected one of {list(part.features)}, those of the events read"
            )
        rows = (part.lengths - int(part.target is None)).clamp(0, max_seq_len).numpy()
        drawn = None if stochastic_length is None else _Lengths(rows, max_seq_len, stochastic_length, seed)
        self._plan = Plan(rows, batch_size, max_tokens, seed if shuffle else None, rank, world_size, balance, drawn)
        if max_tokens is not None and max_tokens < max_seq_len:
            raise ValueError(
                f"max_tokens: got {max_tokens}, expected at least max_seq_len ({max_seq_len}), or a long sample fits no batch"
            )
        self._keys = (KEY, *((TIME_KEY,) if with_times else ()), *with_features)
        self._with_viewed, self._with_kept = with_viewed, drawn is not None
        source = BatchSource(part, max_seq_len, with_viewed, with_times, tuple(with_features))
        self._num_items = source.num_items
        self._loader: DataLoader[Tensor] = DataLoader(
            source,
            batch_size=None,
            sampler=self._plan if drawn is None else _WithKept(self._plan),  # type: ignore[arg-type]
            num_workers=num_workers,
            pin_memory=pin_memory and torch.cuda.is_available(),
            persistent_workers=num_workers > 0,
            multiprocessing_context=multiprocessing_context if num_workers else None,
            worker_init_fn=only_with_parent if num_workers else None,
            # DataLoader draws a seed for its workers; from a generator of its own it leaves the global state alone.
            generator=torch.Generator().manual_seed(seed),
        )

    def rows(self, epoch: int) -> Tensor:
        """How many rows of each sample come in an epoch, int64: those of its history, or what is left of them."""
        return torch.from_numpy(self._plan.rows_of(epoch))

    def __iter__(self) -> Iterator[SequenceBatch]:
        unpack = partial(
            _unpack, keys=self._keys, num_items=self._num_items, with_viewed=self._with_viewed, with_kept=self._with_kept
        )
        return map(unpack, iter(self._loader))


class _Lengths:
    """How many rows of each sample are kept in an epoch: a function of seed and epoch, whoever gets the sample."""

    def __init__(self, rows: IntArray, longest: int, alpha: float, seed: int) -> None:
        self.rows, self.seed = torch.from_numpy(rows), seed
        self.shortening = StochasticLength(longest, alpha)

    def __call__(self, epoch: int) -> IntArray:
        state = int(np.random.SeedSequence([self.seed, epoch, _LENGTHS]).generate_state(1, np.uint64)[0])
        lengths: IntArray = self.shortening.draw(self.rows, torch.Generator().manual_seed(state)).numpy()
        return lengths


class _WithKept(Sampler[tuple[IntArray, IntArray]]):
    """Batches' samples, each with how many of its rows are kept: workers that live on do not hear of the next epoch."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __len__(self) -> int:
        return len(self.plan)

    def __iter__(self) -> Iterator[tuple[IntArray, IntArray]]:
        kept = self.plan.rows_of(self.plan.epoch)
        return ((samples, kept[samples]) for samples in self.plan)


def _unpack(packed: Tensor, keys: tuple[str, ...], num_items: int, with_viewed: bool, with_kept: bool = False) -> SequenceBatch:
    count = (8 if with_viewed else 5) + with_kept
    pieces = packed[count:].split(packed[:count].tolist())
    users, targets, values, lengths, offsets = pieces[:5]
    batch = SequenceBatch(
        keyed(values, lengths, offsets, keys), targets, users, keyed(*pieces[5:8]) if with_viewed else None, num_items
    )
    total = int(pieces[-1].sum()) if with_kept else len(targets)
    return batch if total == len(targets) else replace(batch, kept=pieces[-1], num_kept=total)


def features_of(values: Tensor, lengths: Tensor, others: Mapping[str, Tensor] | None = None) -> KeyedJaggedTensor:
    """Return histories as a batch's `features`: `values` `[sum L]`, `lengths` `[B]`, and by key what else rows have `[sum L]`."""
    named = {KEY: values, **(others or {})}
    lengths = lengths.repeat(len(named))
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return keyed(torch.cat(list(named.values())), lengths, offsets, tuple(named))


def keyed(values: Tensor, lengths: Tensor, offsets: Tensor, keys: tuple[str, ...] = (KEY,)) -> KeyedJaggedTensor:
    """Return the rows of features that all have the same lengths as a KeyedJaggedTensor.

    Its sizes are those of the tensors, which the host knows: given, no later call has to read them back from a device.
    """
    rows = values.numel() // len(keys)
    return KeyedJaggedTensor(
        keys=list(keys),
        values=values,
        lengths=lengths,
        offsets=offsets,
        stride=lengths.numel() // len(keys),
        length_per_key=[rows] * len(keys),
        offset_per_key=[rows * key for key in range(len(keys) + 1)],
    )
