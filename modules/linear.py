"""The linear layer of many rows."""

from __future__ import annotations

from torch import Tensor, nn

from jagged.modules.jagged_module import JaggedModule
from jagged.ops import linear


class Linear(JaggedModule, nn.Linear):
    """`torch.nn.Linear`, whose gradient of the bias is on a GPU one pass over the rows (`jagged.ops.linear`).

    Parameters, their names and how they begin, and results are PyTorch's. On a CPU it is PyTorch's own.

    Args:
        in_features: width of rows in.
        out_features: width of rows out.
        bias: whether there is one.
        device: where parameters live; `"meta"` allocates nothing.
        dtype: of the parameters.

    Shape:
        `[..., in_features]` floats in, `[..., out_features]` out.

    Raises:
        ValueError: rows of another width.
        TypeError: no tensor, or one of integers or of another dtype than the parameters.

    Example:
        >>> import torch
        >>> from jagged.modules import Linear
        >>> Linear(8, 4)(torch.randn(5, 8)).shape
        torch.Size([5, 4])
    """

    def reset_parameters(self) -> None:
        """Draw new weights, as PyTorch does."""
        nn.Linear.reset_parameters(self)

    def extra_repr(self) -> str:
        """Show widths, and whether there is a bias."""
        return nn.Linear.extra_repr(self)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each row."""
        return linear(x, self.weight, self.bias)
