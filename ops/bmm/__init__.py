"""Products of jagged tensors with dense and with jagged ones."""

from jagged.ops.bmm.op import jagged_dense_bmm, jagged_jagged_bmm
from jagged.ops.bmm.pair_op import array_jagged_bmm_jagged_out, jagged_jagged_bmm_jagged_out

__all__ = ["array_jagged_bmm_jagged_out", "jagged_dense_bmm", "jagged_jagged_bmm", "jagged_jagged_bmm_jagged_out"]
