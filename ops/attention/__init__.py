"""Attention within each sample of a jagged batch."""

from jagged.ops.attention.op import jagged_attention

__all__ = ["jagged_attention"]
