"""Attention within each sample of a jagged batch."""

from jagged.ops.attention.api import jagged_attention, jagged_hstu_attention

__all__ = ["jagged_attention", "jagged_hstu_attention"]
