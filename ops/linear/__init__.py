"""The linear layer of many rows: PyTorch's product, and the gradient of the bias in one pass over them."""

from jagged.ops.linear.api import linear

__all__ = ["linear"]
