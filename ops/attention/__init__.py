"""Attention within each sample of a jagged batch."""

from jagged.ops.attention.hstu import jagged_hstu_attention
from jagged.ops.attention.op import jagged_attention

__all__ = ["jagged_attention", "jagged_hstu_attention"]
