"""Products of jagged tensors with dense and with jagged ones."""

from jagged.ops.bmm.api import (
    array_jagged_bmm_jagged_out,
    jagged_dense_bmm,
    jagged_jagged_bmm,
    jagged_jagged_bmm_jagged_out,
)

__all__ = ["array_jagged_bmm_jagged_out", "jagged_dense_bmm", "jagged_jagged_bmm", "jagged_jagged_bmm_jagged_out"]
