"""Layer normalisation of many narrow rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from jagged.modules.jagged_module import JaggedModule
from jagged.ops import layer_norm, layer_norm_and_residual


class LayerNorm(JaggedModule, nn.LayerNorm):
    """`torch.nn.LayerNorm` of rows, on a GPU by a kernel in which a program takes several of them (`jagged.ops.layer_norm`).

    PyTorch's has a block of threads for each row, which the many narrow rows of a jagged batch leave idle. Parameters and results
    are PyTorch's, but that rows in half precision may have weights in float32.

    Args:
        width: D, of a row, at least 1.
        eps: added to the variance, above 0.
        autocast_output: under autocast the output has autocast's dtype, for a product that reads it, or a gate before one.
            Without it autocast gives float32, as PyTorch's on a GPU, which is what residuals need.
        device: where parameters live; `"meta"` allocates nothing.

    Shape:
        `[..., D]` floats in and out.

    Raises:
        ValueError: a width below 1, an `eps` that is not above 0, rows of another width.
        TypeError: no tensor, or one of integers.

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
        if isinstance(width, bool) or not isinstance(width, (int, np.integer)) or width < 1:
            raise ValueError(f"width: expected the columns of a row, at least 1, got {width!r}")
        if not eps > 0:
            raise ValueError(f"eps: expected above 0, got {eps}")
        super().__init__(int(width), eps, device=device)
        self.autocast_output = autocast_output

    def reset_parameters(self) -> None:
        """Set scales to 1 and shifts to 0."""
        nn.LayerNorm.reset_parameters(self)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise each row."""
        normal: Tensor = self._call(layer_norm, x)
        return normal

    def with_residual(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Normalise each row, and return the rows, too, for what is added to them (`jagged.ops.layer_norm_and_residual`)."""
        found: tuple[Tensor, Tensor] = self._call(layer_norm_and_residual, x)
        return found

    def _call(self, function: Callable[..., Any], x: Tensor) -> Any:
        if not isinstance(x, Tensor):
            raise TypeError(f"x: expected a tensor [..., {self.normalized_shape[0]}], got {type(x).__name__}; give its values()")
        dtype, kind, exact = x.dtype, x.device.type, torch.promote_types(x.dtype, self.weight.dtype)
        # Autocast knows no meta device.
        if kind in ("cpu", "cuda") and exact != torch.float64 and torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind) if self.autocast_output else torch.float32
            exact = torch.float32
        weight: Tensor = self.weight
        bias: Tensor = self.bias
        if weight.dtype != x.dtype:
            weight, bias = weight.to(exact), bias.to(exact)
        return function(x, weight, bias, self.eps, dtype=dtype)
