"""Public linear layers over groups of labels that read a few columns of their own."""

from __future__ import annotations

import torch
from torch import Tensor

from jagged.ops._shared.validation import (
    FLOATS,
    check_device,
    check_factors,
    check_offsets,
    check_tensor,
    holds,
    validation_is_on,
)
from jagged.ops.group_sparse.spec import GROUP_SPARSE, Inputs, Options


def group_sparse_linear(
    features: Tensor,
    weight: Tensor,
    supports: Tensor,
    group_offsets: Tensor,
    bias: Tensor | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    """Compute logits of labels that each read F of H features, the labels of a group the same ones.

    `out[b, l] = sum_f features[b, supports[g, f]] * weight[l, f] + bias[l]`, g the group of label l. Labels of a group lie side
    by side. Under `torch.autocast` features, weight and bias are cast to its dtype, which is then the result's; their gradients
    come back in their own dtypes. Gradients of first order.

    Args:
        features: `[B, H]`, float32, bfloat16, float16 or float64 (computed by PyTorch on every device).
        weight: `[L, F]`, of the dtype and device of `features`; F from 1 to H.
        supports: `[K, F]`, int32 or int16: the columns of features that a group reads, from 0 to H - 1 and none of them twice. On
            a CPU those in rising order are checked fastest.
        group_offsets: `[K + 1]`, int32 or int64, from 0 to L: labels `group_offsets[g]` to `group_offsets[g + 1] - 1` are those
            of group g, which may have none.
        bias: `[L]`, of the dtype and device of `features`: added to the sums before they are rounded. None adds nothing.
        backend: `"torch"`, `"triton"`, or None to choose by device. The PyTorch implementation reads the offsets on the host.

    Returns:
        `[B, L]` in the dtype of `features`; sums are accumulated in float32 (float64 for float64).

    Raises:
        ValueError: shapes that do not fit, tensors on different devices, an unknown backend; on a CPU, unless values are trusted,
            and with `JAGGED_VALIDATE=1` everywhere, also wrong values of offsets or supports.
        TypeError: dtypes other than those above, or different ones outside of autocast.

    Source:
        HASTE: output layers of many labels whose groups share a sparse input of fixed size (group-shared fixed fan-in).

    Example:
        >>> import torch
        >>> from jagged.ops import group_sparse_linear
        >>> features, weight = torch.tensor([[1., 2., 3., 4.]]), torch.tensor([[1., 1.], [1., -1.], [10., 0.]])
        >>> supports = torch.tensor([[0, 3], [1, 2]], dtype=torch.int32)
        >>> group_sparse_linear(features, weight, supports, torch.tensor([0, 2, 3]))
        tensor([[ 5., -3., 20.]])
    """
    check_tensor("features", features, "[B, H]", FLOATS)
    check_tensor("weight", weight, "[L, F]", FLOATS)
    check_tensor("supports", supports, "[K, F]", (torch.int32, torch.int16))
    check_factors("weight", weight, "features", features)
    check_device("supports", supports, "features", features)
    if not (holds(weight.shape[1] >= 1) and holds(weight.shape[1] <= features.shape[1])):
        raise ValueError(
            f"weight: expected shape [L, F], F from 1 to {features.shape[1]}, the columns of features, got {list(weight.shape)}"
        )
    if not holds(supports.shape[1] == weight.shape[1]):
        raise ValueError(
            f"supports: expected shape [K, {weight.shape[1]}], a column of features for each column of weight "
            f"{list(weight.shape)}, got {list(supports.shape)}"
        )
    check_offsets(group_offsets, features, "group_offsets", total=weight.shape[0])
    if not holds(group_offsets.shape[0] == supports.shape[0] + 1):
        raise ValueError(
            f"group_offsets: expected shape [{supports.shape[0] + 1}], one more than the groups of supports "
            f"{list(supports.shape)}, got {list(group_offsets.shape)}"
        )
    if bias is not None:
        check_tensor("bias", bias, "[L]", FLOATS)
        check_factors("bias", bias, "features", features)
        if not holds(bias.shape[0] == weight.shape[0]):
            raise ValueError(
                f"bias: expected shape [{weight.shape[0]}], a number for each row of weight {list(weight.shape)}, "
                f"got {list(bias.shape)}"
            )
    if validation_is_on(supports):
        _validate_supports(supports, features.shape[1])
    return GROUP_SPARSE(Inputs(features, weight, supports, group_offsets, bias), Options(), backend).logits


def _validate_supports(supports: Tensor, num_features: int) -> None:
    """Check that groups read columns that there are, and none of them twice."""
    values = supports.detach().cpu()
    if not values.numel():
        return
    lowest, highest = torch.stack(torch.aminmax(values)).tolist()
    if lowest < 0 or highest >= num_features:
        group, slot = torch.nonzero((values < 0) | (values >= num_features))[0].tolist()
        raise ValueError(
            f"supports[{group}, {slot}]: expected a column of features, from 0 to {num_features - 1}, "
            f"got {int(values[group, slot])}; columns are counted from 0"
        )
    if bool((values[:, 1:] > values[:, :-1]).all()):
        return
    columns = values.sort(1).values
    twice = torch.nonzero(columns[:, 1:] == columns[:, :-1])
    if twice.numel():
        group, slot = twice[0].tolist()
        raise ValueError(
            f"supports[{group}]: expected columns that differ, got {int(columns[group, slot])} twice; "
            "put another in its place, with weights of 0 if none is to count"
        )
