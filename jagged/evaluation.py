"""Evaluate a model over its whole catalogue, and the function behind `jagged evaluate`."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor, nn

from jagged.config import ConfigError
from jagged.metrics import ALL_ITEMS, DEFAULT_KS, IN_WORDS, UNSEEN_ITEMS, Figures, RankingMetrics, TrainCounts
from jagged.runs import Run
from jagged.scoring import DEFAULT_MAX_BYTES, Ranked, rank_catalogue

if TYPE_CHECKING:
    from jagged.data import SequenceBatch, SequenceDataset

#: The name of the protocol that leaves seen items in, or takes them out.
PROTOCOLS = {False: ALL_ITEMS, True: UNSEEN_ITEMS}

#: What a model that cannot rank is refused with.
NOT_FINITE = (
    "the model's scores are NaN or infinite: its weights or hidden states are not finite; "
    "train again with a smaller learning_rate or precision=32-true"
)


class EvaluationError(ValueError):
    """A model or data that cannot be evaluated; the message says what, where, and what to do."""


@dataclass(frozen=True)
class Evaluation:
    """Figures and what they are figures of.

    Attributes:
        metrics: by protocol and metric: `metrics.all_items["ndcg@10"]` where the whole catalogue is ranked,
            `metrics.unseen_items["ndcg@10"]` where the items of a user's history are taken out.
        part: "valid" or "test".
        split: how the part was held out.
        num_users: users evaluated.
        num_items: size of the catalogue; all of it is ranked for each user.
        same_data: whether the events are, by fingerprint, those the model was trained on; None where the run does not know.
        notes: counts: of the split, and `unknown_items`, `unknown_targets` (counted as misses) and `unknown_history_events`
            (left out) where the data has items that the model does not know.
    """

    metrics: Figures
    part: str
    split: str
    num_users: int
    num_items: int
    same_data: bool | None
    notes: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{self.part} part ({self.split}): {self.num_users:,} users, all {self.num_items:,} items ranked for each"]
        if not self.same_data:
            known = "not known to be" if self.same_data is None else "not"
            lines.append(f"note: these events are {known} those the model was trained on")
        if self.notes.get("unknown_items"):
            lines.append(
                f"note: {self.notes['unknown_items']:,} items are unknown to the model: "
                f"{self.notes['unknown_targets']:,} targets count as misses, "
                f"{self.notes['unknown_history_events']:,} events are left out of histories"
            )
        lines.append("".join([f"{'metric':<13}", *(f"{IN_WORDS[protocol]:>24}" for protocol in self.metrics)]))
        for name in next(iter(self.metrics.values())):
            lines.append("".join([f"{name:<13}", *(f"{figures[name]:>24.4f}" for figures in self.metrics.values())]))
        return "\n".join(lines)


class SequenceRanker(Protocol):
    """What evaluation asks of a model: a hidden state for each user and an item table, scored by inner product."""

    @property
    def item_weight(self) -> Tensor:
        """`[V, D]` item table."""

    def final_hidden(self, features: Any) -> Tensor:
        """`[B, D]` hidden state after each user's last event; zeros without events."""


class Popularity(nn.Module):
    """Ranks every user's items by how many training users had them.

    Args:
        train_counts: training users of each item.
    """

    item_weight: Tensor

    def __init__(self, train_counts: TrainCounts, *, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.register_buffer("item_weight", train_counts.users_per_item.to(device, torch.float32)[:, None])

    def final_hidden(self, features: Any) -> Tensor:
        """Ones, `[B, 1]`."""
        return self.item_weight.new_ones(features.stride(), 1)


def evaluate_model(
    model: Any,
    loader: Iterable[Any],
    *,
    train_counts: TrainCounts,
    filter_viewed: bool = False,
    ks: Sequence[int] = DEFAULT_KS,
    device: torch.device | str | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
    progress: bool = True,
    all_processes: bool = True,
) -> dict[str, float]:
    """Rank the whole catalogue for every user of `loader`, under one protocol.

    Arguments, conventions and errors are those of `evaluate_protocols`.

    Returns:
        `{"ndcg@5": ..., ...}`, the figures of `jagged.metrics.RankingMetrics`.
    """
    results = evaluate_protocols(
        model,
        loader,
        train_counts=train_counts,
        filter_viewed=(filter_viewed,),
        ks=ks,
        device=device,
        max_bytes=max_bytes,
        progress=progress,
        all_processes=all_processes,
    )
    return dict(results[PROTOCOLS[filter_viewed]])


def evaluate_protocols(
    model: Any,
    loader: Iterable[Any],
    *,
    train_counts: TrainCounts,
    filter_viewed: Sequence[bool] = (False, True),
    ks: Sequence[int] = DEFAULT_KS,
    device: torch.device | str | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
    progress: bool = True,
    all_processes: bool = True,
) -> Figures:
    """Rank the whole catalogue for every user of `loader`, under several protocols from one run of the model.

    An item's rank is the number of items with a higher score plus the number with an equal score and a smaller id. A user
    without events has a hidden state of zeros, so all scores are equal and items rank by id. Where seen items are taken out, a
    user's target stays, also if it is among them. The model runs in fp32, in eval mode; its modules' modes are restored.

    In a `torch.distributed` group each process evaluates the users of its own loader and all return the figures of all users, so
    every process must call.

    Args:
        model: a `SequenceRanker`, for example `SASRec`.
        loader: yields `SequenceBatch`es of an evaluation part, one target a user; with `viewed` for taking seen items out.
        train_counts: training users of each item, for Coverage and Surprisal: `TrainCounts.from_part(split.train)`.
        filter_viewed: the protocols: False leaves seen items in, True takes them out.
        ks: cut-offs.
        device: where batches go; by default the item table's device.
        max_bytes: bound on the memory that grows with users times items.
        progress: show a progress bar after two seconds.
        all_processes: add up over the processes of a group; False for a call that only some of them make.

    Returns:
        The figures by protocol: `all_items`, `unseen_items`.

    Raises:
        EvaluationError: the model gives NaN or infinite hidden states or has such item weights.
        ValueError: no user has a target, or the loader has no viewed items where they are to be taken out.
    """
    device = torch.device(device) if device is not None else model.item_weight.device
    metrics = [RankingMetrics(len(model.item_weight), train_counts, ks, device=device) for _ in filter_viewed]
    strange = torch.zeros((), dtype=torch.int64, device=device)
    ranked = rank_batches(
        model, loader, metrics[0].depth, filter_viewed=filter_viewed, device=device, max_bytes=max_bytes, progress=progress
    )
    with closing(ranked):
        for results in ranked:
            for metric, result in zip(metrics, results, strict=True):
                assert result.ranks is not None
                metric.update(result.ranks, result.items)
                strange += result.strange
    if all_processes and _processes() > 1:
        torch.distributed.all_reduce(strange)
        for metric in metrics:
            metric.all_reduce()
    if strange:
        raise EvaluationError(NOT_FINITE)
    return Figures({PROTOCOLS[out]: metric.compute() for out, metric in zip(filter_viewed, metrics, strict=True)})


def is_finite(item_weight: Tensor) -> bool:
    """Whether an item table holds neither NaN nor infinity; items whose scores are NaN rank last and would not be seen."""
    # The extremes of a tensor with a NaN are NaN, and finding them takes no copy of the table.
    return not item_weight.numel() or all(bool(torch.isfinite(extreme)) for extreme in torch.aminmax(item_weight))


def rank_batches(
    model: Any,
    loader: Iterable[Any],
    k: int,
    *,
    filter_viewed: Sequence[bool] = (False, True),
    device: torch.device | str | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
    progress: bool = True,
) -> Generator[list[Ranked], None, None]:
    """What `evaluate_protocols` counts: for each batch, under each protocol, the targets' ranks and the `k` best items.

    Arguments as there. No batch waits for a GPU, so hidden states that are not finite raise nothing here: see `Ranked.strange`.

    Raises:
        EvaluationError: the item table holds NaN or infinite weights.
    """
    weight = model.item_weight.detach()
    device = torch.device(device) if device is not None else weight.device
    if not is_finite(weight):
        raise EvaluationError(NOT_FINITE)
    with _eval_mode(model):
        for batch in _progress(loader, progress):
            # Entered for each batch, because these modes belong to the thread and the caller runs between two batches.
            with torch.inference_mode(), torch.autocast(device.type, enabled=False):
                batch = batch.to(device, non_blocking=True)
                viewed = None
                if batch.viewed is not None and True in filter_viewed:
                    viewed = (batch.viewed.values(), batch.viewed.offsets())
                with batch.trusted(len(weight)):
                    hidden = model.final_hidden(batch.features)
                ranked = rank_catalogue(
                    hidden,
                    weight,
                    k,
                    targets=batch.targets,
                    viewed=viewed,
                    filter_viewed=filter_viewed,
                    max_bytes=max_bytes,
                )
            yield ranked


def popularity_metrics(
    split: Any,
    *,
    part: str = "test",
    filter_viewed: Sequence[bool] = (False, True),
    ks: Sequence[int] = DEFAULT_KS,
    batch_size: int = 1024,
    max_bytes: int = DEFAULT_MAX_BYTES,
    progress: bool = True,
) -> Figures:
    """The figures of ranking by training popularity, under the same protocols: what a model has to beat.

    Args:
        split: a `SequenceSplit`; popularity is counted on its training part.
        part: "valid" or "test".
        filter_viewed, ks, max_bytes, progress: as in `evaluate_protocols`, whose result this has.
        batch_size: users at a time.
    """
    from jagged.data import BatchLoader

    train_counts = TrainCounts.from_part(split.train)
    loader = BatchLoader(
        getattr(split, part), batch_size=batch_size, max_seq_len=1, shuffle=False, seed=0, with_viewed=True in filter_viewed
    )
    return evaluate_protocols(
        Popularity(train_counts),
        loader,
        train_counts=train_counts,
        filter_viewed=filter_viewed,
        ks=ks,
        max_bytes=max_bytes,
        progress=progress,
        all_processes=False,
    )


def evaluate(
    directory: str | os.PathLike[str],
    data: str | os.PathLike[str] | SequenceDataset | None = None,
    *,
    part: Literal["valid", "test"] = "test",
    filter_viewed: bool | None = None,
    ks: Sequence[int] = DEFAULT_KS,
    format: str = "auto",
    user_column: str | None = None,
    item_column: str | None = None,
    timestamp_column: str | None = None,
    device: str = "auto",
    batch_size: int | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
    progress: bool = True,
) -> Evaluation:
    """Evaluate what training left in a directory; the function behind `jagged evaluate`.

    Items of other data that the model does not know are left out of histories; as targets they count as misses, since no
    ranking of the model's catalogue can hold them.

    Args:
        directory: a run's directory.
        data: events to evaluate on, split as the run's configuration says; by default those the run was trained on.
        part: the held-out part.
        filter_viewed: whether to take the items of a user's history out of the ranking; None for both, one after the other.
        ks: cut-offs.
        format: of `data`: "auto" (by name), "text", "csv" or "parquet".
        user_column, item_column, timestamp_column: names of columns of `data`, by default those of the run's configuration.
        device: "auto" (the GPU where there is one), "cpu" or "cuda".
        batch_size: users at a time; by default the run's `eval_batch_size`.
        max_bytes: bound on the memory that grows with users times items.
        progress: show progress bars after two seconds.

    Raises:
        ConfigError: an unknown part or device.
        EvaluationError: the directory has no data and none is given, nothing is held out, or the model's scores are not finite.
        CheckpointError: the directory is no run, or a file of it is damaged.
        DataError: the data cannot be used.
    """
    from jagged.data import BatchLoader

    if part not in ("valid", "test"):
        raise ConfigError(f"part: got {part!r}, expected 'valid' or 'test'")
    run = Run.open(directory, device=device)
    columns = {"user_column": user_column, "item_column": item_column, "timestamp_column": timestamp_column}
    dataset = run.read(data, format=format, columns=columns, progress=progress)
    split = run.split(dataset)
    held_out = split.test if part == "test" else split.valid
    if not len(held_out):
        raise EvaluationError(
            f"{dataset.directory}: no user has a held-out event in the {part} part; users need at least 3 events"
        )
    protocols = (False, True) if filter_viewed is None else (filter_viewed,)
    loader = BatchLoader(
        held_out,
        batch_size=batch_size or run.config.eval_batch_size,
        max_seq_len=run.config.max_seq_len,
        shuffle=False,
        seed=0,
        with_viewed=True in protocols,
    )
    dense = run.dense_items(dataset)
    mapped = loader if dense is None else _Mapped(loader, dense)
    metrics = evaluate_protocols(
        run.model,
        mapped,
        train_counts=run.train_counts(),
        filter_viewed=protocols,
        ks=ks,
        max_bytes=max_bytes,
        progress=progress,
        all_processes=False,
    )
    notes = dict(split.notes)
    if isinstance(mapped, _Mapped):
        notes |= mapped.notes
    same_data = None if run.fingerprint is None else run.fingerprint == dataset.fingerprint
    return Evaluation(metrics, part, split.name, len(held_out), len(run.items), same_data, notes)


def known_items(values: Tensor, lengths: Tensor, dense: Tensor) -> tuple[Tensor, Tensor]:
    """Renumber samples' items: id `i` becomes `dense[i]` and is left out where that is negative.

    Args:
        values: `[S]` int64 ids of all samples in a row.
        lengths: `[B]` int64, summing to S.
        dense: int64 new numbers.

    Returns:
        The new values and lengths.
    """
    numbers = dense[values]
    known = numbers >= 0
    rows = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    return numbers[known], torch.bincount(rows[known], minlength=len(lengths))


class _Mapped:
    """A loader's batches in the dense ids of a model, without the items that it does not know."""

    def __init__(self, loader: Any, dense: Tensor) -> None:
        self.loader, self.dense = loader, dense
        self.num_items = int(dense.max()) + 1 if len(dense) else 0
        self.notes = {"unknown_items": int((dense < 0).sum()), "unknown_targets": 0, "unknown_history_events": 0}

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[SequenceBatch]:
        from jagged.data import SequenceBatch

        for batch in self.loader:
            features = self._map(batch.features)
            targets = self.dense[batch.targets]
            self.notes["unknown_history_events"] += len(batch.features.values()) - len(features.values())
            self.notes["unknown_targets"] += int((targets < 0).sum())
            viewed = None if batch.viewed is None else self._map(batch.viewed)
            yield SequenceBatch(features, targets, batch.users, viewed, self.num_items)

    def _map(self, features: Any) -> Any:
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        values, lengths = known_items(features.values(), features.lengths(), self.dense)
        return KeyedJaggedTensor(keys=features.keys(), values=values, lengths=lengths)


@contextmanager
def _eval_mode(model: Any) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _progress(loader: Any, show: bool) -> Iterable[Any]:
    if not show or (_processes() > 1 and torch.distributed.get_rank() != 0):
        return loader
    from tqdm import tqdm

    total = len(loader) if hasattr(loader, "__len__") else None
    return tqdm(loader, total=total, desc="evaluate", unit="batch", delay=2, leave=False)  # type: ignore[no-any-return]


def _processes() -> int:
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
