"""Softmax over samples' rows, and over the rows or columns of samples' blocks."""

from jagged.ops.softmax.api import jagged2_softmax, jagged_softmax

__all__ = ["jagged2_softmax", "jagged_softmax"]
