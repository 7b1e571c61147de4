"""Public binary cross-entropy of all labels of a dense layer."""

from __future__ import annotations

from torch import Tensor

from jagged.ops._shared.label_loss import LossOptions, check_label_loss, label_sets
from jagged.ops._shared.validation import FLOATS, check_factors, check_tensor, check_vector, holds
from jagged.ops.linear_bce.spec import LINEAR_BCE, Inputs


def linear_bce(
    features: Tensor,
    weight: Tensor,
    positives: Tensor,
    offsets: Tensor,
    bias: Tensor | None = None,
    *,
    label_weight: Tensor | None = None,
    row_mask: Tensor | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    backend: str | None = None,
) -> Tensor:
    """Compute the binary cross-entropy of all labels, summed over labels and averaged over rows, a chunk of logits at a time.

    With `z = features @ weight.T + bias`, and y = 1 for a row's positives and 0 for its other labels, the loss is the mean over
    rows b of `sum_l label_weight[l] (log(1 + exp(z[b, l])) - y[b, l] z[b, l])`. Backward computes the logits again. Under
    `torch.autocast` features, weight and bias are cast to its dtype; their gradients come back in their own dtypes. Gradients of
    first order.

    Args:
        features: `[B, H]`, float32, bfloat16, float16 or float64.
        weight: `[L, H]`, of the dtype and device of `features`.
        positives: `[P]`, int32 or int64: the labels of row 0, then those of row 1, in any order, from 0 to L - 1. A label that a
            row has twice counts once.
        offsets: `[B + 1]`, int32 or int64, from 0 to P: row b has `positives[offsets[b] : offsets[b + 1]]`, also none.
        bias: `[L]`, of the dtype and device of `features`.
        label_weight: `[L]`, floating point, without a gradient: what a label's part of the loss is multiplied with. None is 1.
        row_mask: `[B]`, bool: rows that count; the mean is over these, and 0 where there is none. None counts all.
        label_smoothing: share s of the targets in [0, 1], which become `(1 - s) y + s / 2`.
        ignore_index: a negative number that among positives is no label.
        backend: `"torch"`, `"triton"`, or None to choose by device; the same code either way, whose products are the library's
            of the device.

    Returns:
        A number, float32 (float64 for float64).

    Raises:
        ValueError: shapes that do not fit, tensors on different devices, `label_smoothing` outside of [0, 1], an unknown backend;
            on a CPU, unless values are trusted, and with `JAGGED_VALIDATE=1` everywhere, also wrong offsets and positives.
        TypeError: dtypes other than those above, or different ones outside of autocast.

    Source:
        The loss of extreme classification by one classifier a label; that its logits need not be stored is the observation of
        Wijmans et al., Cut Your Losses in Large-Vocabulary Language Models, 2024, for the softmax.

    Example:
        >>> import torch
        >>> from jagged.ops import linear_bce
        >>> features, weight = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 1.0], [-2.0, 0.0], [0.0, 4.0]])
        >>> linear_bce(features, weight, torch.tensor([2, 0]), torch.tensor([0, 2]))
        tensor(0.1759)
    """
    check_tensor("features", features, "[B, H]", FLOATS)
    check_tensor("weight", weight, "[L, H]", FLOATS)
    check_factors("weight", weight, "features", features)
    if not holds(weight.shape[1] == features.shape[1]):
        raise ValueError(
            f"weight: expected shape [L, {features.shape[1]}], as wide as features {list(features.shape)}, "
            f"got {list(weight.shape)}"
        )
    if bias is not None:
        check_vector("bias", bias, "[L]", weight.shape[0], "row of weight", weight)
        check_factors("bias", bias, "features", features)
    check_label_loss(features, weight, positives, offsets, label_weight, row_mask, label_smoothing, ignore_index)
    sets = label_sets(features, positives, offsets, row_mask)
    return LINEAR_BCE(Inputs(features, weight, *sets, bias, label_weight), LossOptions(label_smoothing), backend).loss
