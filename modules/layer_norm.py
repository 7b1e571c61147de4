"""Layer normalisation of many narrow rows."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from jagged.modules.jagged_module import JaggedModule
from jagged.ops import layer_norm


class LayerNorm(JaggedModule, nn.LayerNorm):
    """`torch.nn.LayerNorm` of rows, by a kernel in which a program takes several of them.

    PyTorch's has a block of threads for each row, which the many narrow rows of a jagged batch leave idle. Parameters and results
    are PyTorch's, but that rows in half precision may have weights in float32.

    Args:
        width: D, of a row.
        eps: added to the variance, above 0.
        autocast_output: under autocast the output has autocast's dtype, rounded once, as a product behind it would round it.
            Without it autocast gives float32, as PyTorch's, which is what residuals need.
        device: where parameters live; `"meta"` allocates nothing.

    Shape:
        `[..., D]` floats in and out.

    Raises:
        ValueError: rows of another width, an `eps` that is not above 0.

    Example:
        >>> import torch
        >>> from jagged.modules import LayerNorm
        >>> norm = LayerNorm(8, autocast_output=True)
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     norm(torch.randn(5, 8)).dtype
        torch.bfloat16
    """

    shown = ("normalized_shape", "eps", "autocast_output")

    def __init__(
        self, width: int, eps: float = 1e-5, *, autocast_output: bool = False, device: torch.device | str | None = None
    ) -> None:
        super().__init__(width, eps, device=device)
        self.autocast_output = autocast_output

    def reset_parameters(self) -> None:
        """Set scales to 1 and shifts to 0."""
        nn.LayerNorm.reset_parameters(self)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise each row."""
        dtype, kind = x.dtype, x.device.type
        # Autocast knows no meta device.
        if kind in ("cpu", "cuda") and dtype != torch.float64 and torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind) if self.autocast_output else torch.float32
        return layer_norm(x, self.weight, self.bias, self.eps, dtype=dtype)
