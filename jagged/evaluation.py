"""Evaluate a model over its whole catalogue, and the function behind `jagged evaluate`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from jagged.metrics import RankingMetrics, TrainCounts
from jagged.scoring import DEFAULT_MAX_BYTES, rank_catalogue

#: The two protocols by the names they are printed with.
PROTOCOLS = {False: "seen items left in", True: "seen items taken out"}


class EvaluationError(ValueError):
    """A model or data that cannot be evaluated; the message says what, where, and what to do."""


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
    ks: Sequence[int] = (5, 10, 20),
    device: torch.device | str | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
    progress: bool = True,
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
    )
    return results[PROTOCOLS[filter_viewed]]


def evaluate_protocols(
    model: Any,
    loader: Iterable[Any],
    *,
    train_counts: TrainCounts,
    filter_viewed: Sequence[bool] = (False, True),
    ks: Sequence[int] = (5, 10, 20),
    device: torch.device | str | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
    progress: bool = True,
) -> dict[str, dict[str, float]]:
    """Rank the whole catalogue for every user of `loader`, under several protocols from one computation of the scores.

    An item's rank is the number of items with a higher score plus the number with an equal score and a smaller id. A user
    without events has a hidden state of zeros, so all scores are equal and items rank by id. Where seen items are taken out, a
    user's target stays, also if it is among them. The model runs in fp32, in eval mode; its modules' modes are restored.

    Where the loader is split over processes (`loader.world_size > 1`), each evaluates its own users and all return the figures
    of all users; every process must call.

    Args:
        model: a `SequenceRanker`, for example `SASRec`.
        loader: yields `SequenceBatch`es of an evaluation part, one target a user; with `viewed` for taking seen items out.
        train_counts: training users of each item, for Coverage and Surprisal: `TrainCounts.from_part(split.train)`.
        filter_viewed: the protocols: False leaves seen items in, True takes them out.
        ks: cut-offs.
        device: where batches go; by default the item table's device.
        max_bytes: bound on the memory that grows with users times items.
        progress: show a progress bar after two seconds.

    Returns:
        For each protocol its name in `PROTOCOLS` and its figures.

    Raises:
        EvaluationError: the model gives NaN or infinite hidden states or has such item weights.
        ValueError: no user has a target, or the loader has no viewed items where they are to be taken out.
    """
    weight = model.item_weight.detach()
    device = torch.device(device) if device is not None else weight.device
    metrics = [RankingMetrics(len(weight), train_counts, ks, device=device) for _ in filter_viewed]
    extreme = torch.zeros((), dtype=torch.float64, device=device)
    world_size = getattr(loader, "world_size", 1)
    with torch.inference_mode(), _eval_mode(model), torch.autocast(device.type, enabled=False):
        extreme += _extreme(weight)
        for batch in _progress(loader, progress):
            batch = batch.to(device, non_blocking=True)
            hidden = model.final_hidden(batch.features).float()
            extreme += _extreme(hidden)
            viewed = None
            if batch.viewed is not None and True in filter_viewed:
                viewed = (batch.viewed.values(), batch.viewed.offsets())
            ranked = rank_catalogue(
                hidden,
                weight,
                max(ks),
                targets=batch.targets,
                viewed=viewed,
                filter_viewed=filter_viewed,
                max_bytes=max_bytes,
            )
            for metric, result in zip(metrics, ranked, strict=True):
                assert result.ranks is not None
                metric.update(result.ranks, result.items)
    if world_size > 1:
        torch.distributed.all_reduce(extreme)
        for metric in metrics:
            metric.all_reduce()
    if not torch.isfinite(extreme):
        raise EvaluationError(
            "the model's scores are NaN or infinite: its weights or hidden states are not finite; "
            "train again with a smaller learning_rate or precision=32-true"
        )
    return {PROTOCOLS[out]: metric.compute() for out, metric in zip(filter_viewed, metrics, strict=True)}


def popularity_metrics(
    split: Any,
    *,
    part: str = "test",
    filter_viewed: Sequence[bool] = (False, True),
    ks: Sequence[int] = (5, 10, 20),
    batch_size: int = 1024,
    max_bytes: int = DEFAULT_MAX_BYTES,
    progress: bool = True,
) -> dict[str, dict[str, float]]:
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
    )


def _extreme(values: Tensor) -> Tensor:
    """0 if all values are finite, else NaN or infinite; found without a copy of the values and without waiting for a GPU."""
    if not values.numel():
        return torch.zeros((), dtype=torch.float64, device=values.device)
    low, high = torch.aminmax(values)
    return (low.double() - low.double()) + (high.double() - high.double())


@contextmanager
def _eval_mode(model: Any) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _progress(loader: Iterable[Any], show: bool) -> Iterable[Any]:
    if not show or getattr(loader, "rank", 0) != 0:
        return loader
    from tqdm import tqdm

    total = loader.num_batches(0) if hasattr(loader, "num_batches") else None
    return tqdm(loader, total=total, desc="evaluate", unit="batch", delay=2, leave=False)  # type: ignore[no-any-return]
