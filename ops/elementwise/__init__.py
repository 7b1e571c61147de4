"""Sums, products and differences of jagged tensors, and linear layers with a context of each sample."""

from jagged.ops.elementwise.op import (
    ACTIVATIONS,
    Activation,
    jagged_dense_add,
    jagged_dense_mul,
    jagged_linear,
    jagged_mlp,
    jagged_pairwise_difference,
)

__all__ = [
    "ACTIVATIONS",
    "Activation",
    "jagged_dense_add",
    "jagged_dense_mul",
    "jagged_linear",
    "jagged_mlp",
    "jagged_pairwise_difference",
]
