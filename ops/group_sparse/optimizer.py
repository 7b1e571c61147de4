"""The update of a group-sparse layer inside its loss's backward pass."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from jagged.ops._shared.validation import check_number


class Rule(NamedTuple):
    """The numbers of an update."""

    momentum: float
    weight_decay: float
    stochastic_rounding: bool


class GroupSparseOptimizer:
    """Update a layer's weights and biases in the backward pass of its loss, by SGD, and make no gradient of them.

    Passed to `group_sparse_bce` or `group_sparse_cross_entropy`, whose backward pass then changes `weight`, `bias` and the states
    in place. With g the gradient, in float32 (float64 for float64): `v = momentum * v + g + weight_decay * w`, and
    `w -= learning_rate * v`, as `torch.optim.SGD` has it; biases have no decay. Where the loss, or the gradient that comes to it,
    is infinite or NaN, nothing is changed. What acts on gradients after the backward pass does not see these: neither clipping
    nor the unscaling of a `torch.amp.GradScaler`, whose scaled loss would scale the update.

    Args:
        weight: `[L, F]`, of the layer.
        bias: `[L]`, or None for a layer without.
        learning_rate: at least 0; `learning_rate` is a tensor on the device, which a schedule may fill with another number.
        momentum: in [0, 1); 0 keeps no states.
        weight_decay: at least 0.
        stochastic_rounding: round new weights and biases in bfloat16 up or down at random, in proportion to what is cut off, so
            that small updates are not lost; repeatable.
        state_dtype: of the states, a floating dtype; None: that of `weight`.

    Attributes:
        peak_learning_rate: the one it was made with, which schedules multiply.
        learning_rate: `[]` float32.
        step: `[]` int64, the number of backward passes.
        weight_momentum, bias_momentum: v, of the shapes of weight and bias; empty without momentum, or without a bias.

    Raises:
        ValueError: a number out of its range; a weight or bias of which two elements lie at one place.
        TypeError: a `state_dtype` that is no floating one.

    Example:
        >>> import torch
        >>> from jagged.ops import GroupSparseOptimizer
        >>> GroupSparseOptimizer(torch.zeros(8, 4), learning_rate=0.1, momentum=0.9).weight_momentum.shape
        torch.Size([8, 4])
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        learning_rate: float,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        stochastic_rounding: bool = False,
        state_dtype: torch.dtype | None = None,
    ) -> None:
        check_number("learning_rate", learning_rate, learning_rate >= 0, "a number of at least 0")
        check_number("momentum", momentum, 0 <= momentum < 1, "a number in [0, 1)")
        check_number("weight_decay", weight_decay, weight_decay >= 0, "a number of at least 0")
        for name, tensor in (("weight", weight), ("bias", bias)):
            if tensor is not None and _overlaps(tensor):
                raise ValueError(
                    f"{name}: expected a place in memory for each element, which an update changes, got strides "
                    f"{list(tensor.stride())} of shape {list(tensor.shape)}; clone it"
                )
        dtype = weight.dtype if state_dtype is None else state_dtype
        if not dtype.is_floating_point:
            raise TypeError(f"state_dtype: expected a floating dtype, got {dtype}")
        # Whole numbers would compile graphs of their own.
        self.rule = Rule(float(momentum), float(weight_decay), bool(stochastic_rounding))
        self.peak_learning_rate = float(learning_rate)
        self.learning_rate = torch.tensor(float(learning_rate), dtype=torch.float32, device=weight.device)
        self.step = torch.zeros((), dtype=torch.int64, device=weight.device)
        rows, slots = weight.shape if momentum else (0, 0)
        self.weight_momentum = weight.new_zeros(rows, slots, dtype=dtype)
        self.bias_momentum = weight.new_zeros(0 if bias is None else rows, dtype=dtype)

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that go on from step to step, for a checkpoint."""
        names = ("learning_rate", "step", "weight_momentum", "bias_momentum")
        return {name: getattr(self, name) for name in names}

    def to(self, device: torch.device) -> GroupSparseOptimizer:
        """Move all tensors to a device, and return this optimizer."""
        for name, tensor in self.state().items():
            setattr(self, name, tensor.to(device))
        return self


def _overlaps(tensor: Tensor) -> bool:
    """Tell whether elements may lie at one place: where a step is no longer than all that smaller steps reach."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += stride * (size - 1)
    return False
