"""Layer normalisation of rows, also narrow ones, whose output has the dtype of what reads it."""

from jagged.ops.layer_norm.api import layer_norm, layer_norm_and_residual

__all__ = ["layer_norm", "layer_norm_and_residual"]
