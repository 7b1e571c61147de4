"""Sums, products and differences of jagged tensors, and linear layers with a context of each sample."""

from jagged.ops.elementwise.api import add_rows, jagged_dense_add, jagged_dense_mul, jagged_pairwise_difference
from jagged.ops.elementwise.linear import ACTIVATIONS, Activation, jagged_cross, jagged_linear, jagged_mlp

__all__ = [
    "ACTIVATIONS",
    "Activation",
    "add_rows",
    "jagged_cross",
    "jagged_dense_add",
    "jagged_dense_mul",
    "jagged_linear",
    "jagged_mlp",
    "jagged_pairwise_difference",
]
