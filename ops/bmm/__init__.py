"""Products of jagged tensors with dense and with jagged ones."""

from jagged.ops.bmm.op import jagged_dense_bmm, jagged_jagged_bmm

__all__ = ["jagged_dense_bmm", "jagged_jagged_bmm"]
