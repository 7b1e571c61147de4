"""The head that a configuration asks for."""

from __future__ import annotations

from torch import Tensor

from jagged.config import CrossEntropyHead, GroupSparseItems, HSTUOptions, SampledHead, SASRecOptions, ScalableHead, TrainConfig
from jagged.modules import (
    CutCrossEntropyHead,
    GroupSparseHead,
    InBatchSampler,
    MixedSampler,
    PopularitySampler,
    SampledCrossEntropyHead,
    Sampler,
    ScalableCrossEntropyHead,
    UniformSampler,
)

Head = CutCrossEntropyHead | SampledCrossEntropyHead | ScalableCrossEntropyHead


def build_head(config: TrainConfig, item_counts: Tensor) -> Head | None:
    """Build a head; None where the model's output layer has its part (`build_output`).

    Args:
        config: its `head`, and `seed` for what draws.
        item_counts: `[num_items]`, how often each item occurs in the training data.
    """
    head = config.head
    if isinstance(head, CrossEntropyHead):
        return CutCrossEntropyHead(label_smoothing=head.label_smoothing)
    if isinstance(head, GroupSparseItems):
        return None
    if isinstance(head, ScalableHead):
        return ScalableCrossEntropyHead(head.num_buckets, head.rows_per_bucket, head.items_per_bucket)
    return SampledCrossEntropyHead(
        _sampler(head, item_counts, config.seed), loss=head.loss, correction=head.correction, gbce_t=head.gbce_t
    )


def build_output(config: TrainConfig, item_counts: Tensor, num_users: int) -> GroupSparseHead | None:
    """Build the output layer that a configuration's model has; None for the item table.

    Args:
        config: its `head`, `model.embedding_dim`, and `seed` of groups and inputs.
        item_counts: `[num_items]`, int64, how many training users have each item.
        num_users: in training.
    """
    head = config.head
    if not isinstance(head, GroupSparseItems):
        return None
    assert isinstance(config.model, SASRecOptions | HSTUOptions)
    return GroupSparseHead(
        config.model.embedding_dim,
        item_counts,
        num_users,
        fan_in=head.fan_in,
        group_size=head.group_size,
        grouping=head.grouping,
        head=float(head.dense_share),
        loss="softmax",
        seed=config.seed,
    )


def _sampler(head: SampledHead, item_counts: Tensor, seed: int) -> Sampler:
    rows_per_draw, count = 1 if head.negatives_per == "row" else None, head.num_negatives
    if head.sampler == "uniform":
        return UniformSampler(len(item_counts), count, rows_per_draw=rows_per_draw, seed=seed)
    if head.sampler == "popularity":
        return PopularitySampler(item_counts, count, rows_per_draw=rows_per_draw, seed=seed)
    in_batch = InBatchSampler(item_counts)
    if head.sampler == "in-batch":
        return in_batch
    return MixedSampler(in_batch, UniformSampler(len(item_counts), count, rows_per_draw=None, seed=seed))
