"""Cross-entropy over sampled items, from hidden states and item weights, without gathered rows or indices in memory."""

from jagged.ops.sampled_cross_entropy.api import sampled_linear_cross_entropy
from jagged.ops.sampled_cross_entropy.draws import Draw, drawn_negatives
from jagged.ops.sampled_cross_entropy.spec import Correction, Loss, Positive

__all__ = ["Correction", "Draw", "Loss", "Positive", "drawn_negatives", "sampled_linear_cross_entropy"]
