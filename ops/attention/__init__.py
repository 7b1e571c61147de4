"""Attention within each sample of a jagged batch."""

from jagged.ops.attention.api import jagged_attention, jagged_hstu_attention
from jagged.ops.attention.checks import Window

__all__ = ["Window", "jagged_attention", "jagged_hstu_attention"]
