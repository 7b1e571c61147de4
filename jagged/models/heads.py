"""The head that a configuration asks for."""

from __future__ import annotations

from torch import Tensor

from jagged.config import CrossEntropyHead, SampledHead, ScalableHead, TrainConfig
from jagged.modules import (
    CutCrossEntropyHead,
    InBatchSampler,
    MixedSampler,
    PopularitySampler,
    SampledCrossEntropyHead,
    Sampler,
    ScalableCrossEntropyHead,
    UniformSampler,
)

Head = CutCrossEntropyHead | SampledCrossEntropyHead | ScalableCrossEntropyHead


def build_head(config: TrainConfig, item_counts: Tensor) -> Head:
    """Build a head.

    Args:
        config: its `head`, and `seed` for what draws.
        item_counts: `[num_items]`, how often each item occurs in the training data.
    """
    head = config.head
    if isinstance(head, CrossEntropyHead):
        return CutCrossEntropyHead(label_smoothing=head.label_smoothing)
    if isinstance(head, ScalableHead):
        return ScalableCrossEntropyHead(head.num_buckets, head.rows_per_bucket, head.items_per_bucket)
    return SampledCrossEntropyHead(
        _sampler(head, item_counts, config.seed), loss=head.loss, correction=head.correction, gbce_t=head.gbce_t
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
