"""Evaluate a model over its whole catalogue: figures of any model over any loader."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from tqdm import tqdm

from jagged.metrics import ALL_ITEMS, DEFAULT_KS, UNSEEN_ITEMS, Figures, RankingMetrics, TrainCounts
from jagged.scoring import DEFAULT_MAX_BYTES, Ranked, rank_catalogue

#: The name of the protocol that leaves seen items in, or takes them out.
PROTOCOLS = {False: ALL_ITEMS, True: UNSEEN_ITEMS}

#: What a model that cannot rank is refused with.
NOT_FINITE = (
    "the model's scores are NaN or infinite: its weights or hidden states are not finite; "
    "train again with a smaller learning_rate or precision=32-true"
)


class EvaluationError(ValueError):
    """A model or data that cannot be evaluated; the message says what, where, and what to do."""


class SequenceRanker(Protocol):
    """What evaluation asks of a model: a hidden state for each user and an item table, scored by inner product."""

    @property
    def item_weight(self) -> Tensor:
        """`[V, D]` item table."""

    def final_hidden(self, features: Any) -> Tensor:
        """`[B, D]` hidden state after each user's last event; zeros without events."""


def item_table(model: Any) -> Tensor:
    """A table of a model's items that is there already; the `item_weight` of an output layer is made by each call."""
    table: Tensor = model.item_table if hasattr(model, "item_table") else model.item_weight
    return table


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """A module in eval mode; every submodule's own mode is restored."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


def several() -> bool:
    """Whether there is a `torch.distributed` group of several processes."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def bar(batches: Any, shown: bool) -> Iterable[Any]:
    """The batches, under a progress bar of the first process after two seconds."""
    if not shown or (several() and torch.distributed.get_rank()):
        return batches  # type: ignore[no-any-return]
    return tqdm(batches, desc="evaluate", unit="batch", delay=2, leave=False)  # type: ignore[no-any-return]


def takes_times(model: Any) -> bool:
    """Whether a model of histories takes the times of their rows, under the key "timestamp"."""
    return bool(getattr(model, "takes_times", False))


def event_features(model: Any) -> tuple[str, ...]:
    """The side features of events that a model of histories takes, under keys of their names."""
    return tuple(getattr(model, "event_features", ()))


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
    device = torch.device(device) if device is not None else item_table(model).device
    metrics = [RankingMetrics(len(item_table(model)), train_counts, ks, device=device) for _ in filter_viewed]
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
    if all_processes and several():
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
    with evaluating(model):
        for batch in bar(loader, progress):
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
