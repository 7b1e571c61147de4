"""The head that a configuration asks for."""

from __future__ import annotations

from torch import Tensor

from jagged.config import TrainConfig
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
        config: `head` and the options of each.
        item_counts: `[num_items]`, how often each item occurs in the training data.
    """
    if config.head == "cross-entropy":
        return CutCrossEntropyHead(label_smoothing=config.label_smoothing)
    if config.head == "scalable":
        return ScalableCrossEntropyHead(config.num_buckets, config.rows_per_bucket, config.items_per_bucket)
    return SampledCrossEntropyHead(
        _sampler(config, item_counts), loss=config.sampled_loss, correction=config.correction, gbce_t=config.gbce_t
    )


def _sampler(config: TrainConfig, item_counts: Tensor) -> Sampler:
    rows_per_draw, count, seed = 1 if config.negatives_per == "row" else None, config.num_negatives, config.seed
    if config.sampler == "uniform":
        return UniformSampler(len(item_counts), count, rows_per_draw=rows_per_draw, seed=seed)
    if config.sampler == "popularity":
        return PopularitySampler(item_counts, count, rows_per_draw=rows_per_draw, seed=seed)
    in_batch = InBatchSampler(item_counts)
    if config.sampler == "in-batch":
        return in_batch
    return MixedSampler(in_batch, UniformSampler(len(item_counts), count, rows_per_draw=None, seed=seed))
