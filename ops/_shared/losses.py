"""From the losses of rows to what a loss function returns: weighted, and reduced to their sum or mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from jagged.ops._shared.operator import Differentiable, operator

Reduction = Literal["mean", "sum", "none"]


class Rows(NamedTuple):
    """Losses of rows `[N]`, 0 in ignored ones, what is subtracted from them, and the targets that say which are ignored."""

    losses: Differentiable
    less: Differentiable | None
    target: Tensor


class Options(NamedTuple):
    """The target of ignored rows."""

    ignore_index: int


class Mean(NamedTuple):
    """The mean over the rows that are not ignored, and their number, 1 at least: the mean of no row is 0. Both are scalars."""

    mean: Tensor
    num_rows: Tensor


def mean_loss(x: Rows, o: Options) -> Mean:
    """Compute the mean by PyTorch."""
    losses, less, target = x
    num_rows = (target != o.ignore_index).sum(dtype=losses.dtype).clamp_(min=1)
    return Mean((losses if less is None else losses - less).sum() / num_rows, num_rows)


def _of_mean(grads: Mean, x: Any, out: Mean, o: Options, wanted: Mapping[str, torch.dtype], backend: str) -> dict[str, Tensor]:
    if grads.mean is None:
        return {}
    grad = grads.mean / out.num_rows
    found = {"losses": grad.expand(x.losses.shape)}
    if "less" in wanted:
        found["less"] = grad.neg().expand(x.losses.shape)
    return found


# One kernel where PyTorch needs six.
MEAN_LOSS = operator(
    "mean_loss",
    Rows,
    Options,
    Mean,
    shapes=lambda x, o: Mean(x.losses.new_empty(()), x.losses.new_empty(())),
    torch="jagged.ops._shared.losses:mean_loss",
    triton="jagged.ops._shared.kernels:mean_loss",
    gradient=_of_mean,
    saved=("num_rows",),
)


def side_by_side(grad: Tensor) -> Tensor:
    """Return a gradient `[N]` as kernels read it, with its stride: a mean's is one number of the stride 0, others are copied.

    A kernel's product of a row and a stride has 32 bits, which a column of a wide matrix would not fit.
    """
    return grad if grad.stride(0) == 0 else grad.contiguous()


def reduced(
    losses: Tensor,
    target: Tensor,
    ignore_index: int,
    reduction: Reduction,
    *,
    less: Tensor | None = None,
    of_target: Tensor | None = None,
    sample_weight: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Return the sum or the mean of rows' losses times their weights, or these themselves.

    Args:
        losses: `[N]`, 0 in ignored rows.
        target: `[N]`.
        ignore_index: the target of ignored rows.
        reduction: `"mean"` divides by the sum of the rows' weights, where that is 0 by 1: a step on an empty batch is no step,
            rather than a NaN in every weight.
        less: `[N]`, what is subtracted from the losses.
        of_target: `[N]`, weights that the losses are multiplied with already, 0 in ignored rows.
        sample_weight: `[N]`, weights that they are not.
        backend: of the loss function.
    """
    if reduction == "mean" and of_target is None and sample_weight is None:
        return MEAN_LOSS(Rows(losses, less, target), Options(ignore_index), backend).mean
    losses = losses if less is None else losses - less
    if sample_weight is not None:
        sample_weight = sample_weight.to(losses.dtype).masked_fill(target == ignore_index, 0)
        losses = losses * sample_weight
    if reduction != "mean":
        return losses if reduction == "none" else losses.sum()
    weights = [weight for weight in (of_target, sample_weight) if weight is not None]
    norm = (weights[0] if len(weights) == 1 else weights[0] * weights[1]).sum()
    return losses.sum() / torch.where(norm == 0, 1, norm)
