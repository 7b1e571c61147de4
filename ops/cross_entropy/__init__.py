"""Cross-entropy over a catalogue, from hidden states and item weights, without the logits matrix."""

from jagged.ops.cross_entropy.api import linear_cross_entropy
from jagged.ops.cross_entropy.spec import MEMORY_BUDGET
from jagged.ops.cross_entropy.strategy import Strategy, StrategyName, linear_cross_entropy_strategy

__all__ = ["MEMORY_BUDGET", "Strategy", "StrategyName", "linear_cross_entropy", "linear_cross_entropy_strategy"]
