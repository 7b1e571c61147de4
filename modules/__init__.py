"""nn.Modules over jagged features: torchrec types in, torchrec types out."""

if __name__ != "jagged.modules":
    raise ImportError(
        f"this package was imported as {__name__!r}; import it as 'jagged.modules' (the folder `modules/` is its home)"
    )

from jagged.modules.attention import JaggedCrossAttention, JaggedSelfAttention
from jagged.modules.embedding_bags import ScheduledEmbeddingBagCollection
from jagged.modules.embedding_bags_quantized import QuantizedEmbeddingBagCollection
from jagged.modules.embedding_bags_sharding import ScheduledEmbeddingBagCollectionSharder
from jagged.modules.embedding_sequences import ScheduledEmbeddingCollection
from jagged.modules.embedding_sequences_quantized import QuantizedEmbeddingCollection
from jagged.modules.embedding_sequences_sharding import ScheduledEmbeddingCollectionSharder
from jagged.modules.group_sparse import GroupSparseHead
from jagged.modules.heads import CutCrossEntropyHead, HeadOutput, SampledCrossEntropyHead
from jagged.modules.held_updates import HeldUpdates
from jagged.modules.history_cache import CachedBatch, HistoryCache
from jagged.modules.hstu import HSTUBlock
from jagged.modules.interaction import JaggedFeatureInteraction
from jagged.modules.jagged_module import JaggedModule
from jagged.modules.jagged_tensor import with_values
from jagged.modules.label_groups import LabelGroups, group_at_random, group_by_embedding, group_by_frequency
from jagged.modules.layer_norm import LayerNorm
from jagged.modules.mlp import JaggedMLP
from jagged.modules.pooling import JaggedPooling
from jagged.modules.positions import PositionalEncoding, TimeEncoding
from jagged.modules.replacing import replace_embeddings
from jagged.modules.row_cache import CacheForecast, CacheStatistics
from jagged.modules.sampling import (
    InBatchSampler,
    LogUniformSampler,
    MixedSampler,
    Negatives,
    PopularitySampler,
    Sampler,
    UniformSampler,
)
from jagged.modules.scalable import ScalableCrossEntropyHead
from jagged.modules.shared_tables import share_tables
from jagged.modules.shortening import KeptRows, StochasticLength, latest_rows
from jagged.modules.split import RowSplit, SplitEmbeddingCollection
from jagged.modules.target_attention import TargetAttention
from jagged.modules.targets import ItemMasking, MaskedItems, next_item_targets
from jagged.modules.transformer import JaggedTransformerBlock

__all__ = [
    "CacheForecast",
    "CacheStatistics",
    "CachedBatch",
    "CutCrossEntropyHead",
    "GroupSparseHead",
    "HSTUBlock",
    "HeadOutput",
    "HeldUpdates",
    "HistoryCache",
    "InBatchSampler",
    "ItemMasking",
    "JaggedCrossAttention",
    "JaggedFeatureInteraction",
    "JaggedMLP",
    "JaggedModule",
    "JaggedPooling",
    "JaggedSelfAttention",
    "JaggedTransformerBlock",
    "KeptRows",
    "LabelGroups",
    "LayerNorm",
    "LogUniformSampler",
    "MaskedItems",
    "MixedSampler",
    "Negatives",
    "PopularitySampler",
    "PositionalEncoding",
    "QuantizedEmbeddingBagCollection",
    "QuantizedEmbeddingCollection",
    "RowSplit",
    "SampledCrossEntropyHead",
    "Sampler",
    "ScalableCrossEntropyHead",
    "ScheduledEmbeddingBagCollection",
    "ScheduledEmbeddingBagCollectionSharder",
    "ScheduledEmbeddingCollection",
    "ScheduledEmbeddingCollectionSharder",
    "SplitEmbeddingCollection",
    "StochasticLength",
    "TargetAttention",
    "TimeEncoding",
    "UniformSampler",
    "group_at_random",
    "group_by_embedding",
    "group_by_frequency",
    "latest_rows",
    "next_item_targets",
    "replace_embeddings",
    "share_tables",
    "with_values",
]
