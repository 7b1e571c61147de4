"""Cross-entropy over a catalogue, from hidden states and item weights, without the logits matrix."""

from jagged.ops.cross_entropy.op import linear_cross_entropy

__all__ = ["linear_cross_entropy"]
