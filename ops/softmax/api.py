"""Public softmaxes."""

from __future__ import annotations

import torch
from torch import Tensor

from jagged.ops._shared.offsets import pair_offsets as offsets_of_pairs
from jagged.ops._shared.validation import FLOATS, check_offsets, check_same, check_tensor, validation_is_on
from jagged.ops.softmax.spec import PAIR_SOFTMAX, SOFTMAX, Inputs, Options, PairInputs, PairOptions


def jagged_softmax(values: Tensor, offsets: Tensor, *, backend: str | None = None) -> Tensor:
    """Softmax over each sample's rows: every column of a sample sums to 1.

    Computed in float32 (float64 for float64) whatever the dtype of the values; scores of any finite size are right. A column of
    -inf alone gives NaN, as `torch.softmax` does, and leaves the others as they are. Empty samples have nothing to normalise.
    Deterministic; gradients of any order.

    Args:
        values: `[S, T]`, float32, bfloat16, float16, or float64 (computed by PyTorch on every device); any strides.
        offsets: `[B + 1]`, int32 or int64, from 0 to S.
        backend: `"torch"`, `"triton"`, or None to choose by device.

    Returns:
        `[S, T]` in the dtype of `values`.

    Raises:
        ValueError: wrong shapes or devices; with `JAGGED_VALIDATE=1` also offsets with wrong values.
        TypeError: dtypes other than those above.

    Source:
        Xu et al., "Jagged Flash Attention Optimization", 2024, table 1.

    Example:
        >>> import torch
        >>> from jagged.ops import jagged_softmax
        >>> jagged_softmax(torch.tensor([[0.0], [0.0], [5.0]]), torch.tensor([0, 2, 3]))
        tensor([[0.5000],
                [0.5000],
                [1.0000]])
    """
    check_tensor("values", values, "[S, T]", FLOATS)
    check_offsets(offsets, values, total=values.shape[0])
    return SOFTMAX(Inputs(values, offsets), Options(), backend).weights


def jagged2_softmax(
    scores: Tensor,
    a_offsets: Tensor,
    b_offsets: Tensor | None = None,
    dim: int = -1,
    *,
    pair_offsets: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Softmax over the rows or the columns of each sample's block of scores.

    Sample b has a block `La_b x Lb_b`, stored row by row from `pair_offsets(a_offsets, b_offsets)[b]` on, as
    `jagged_jagged_bmm_jagged_out` gives it. Computed in float32 (float64 for float64) whatever the dtype of the scores; scores of
    any finite size are right. A row (column) of -inf alone gives NaN, as `torch.softmax` does, and leaves the others as they are.
    Deterministic; gradients of any order.

    Args:
        scores: `[P]`, with `P = sum La_i * Lb_i`; float32, bfloat16, float16, or float64 (computed by PyTorch on every device);
            any stride.
        a_offsets: `[B + 1]`, int32 or int64: the blocks' rows, fewer than 2^31 in each.
        b_offsets: `[B + 1]`, of the same dtype: their columns, fewer than 2^31 in each; None for square blocks of `a_offsets`.
        dim: -1 makes every row of a block sum to 1, -2 every column.
        pair_offsets: `[B + 1]`, int32 or int64: what `pair_offsets(a_offsets, b_offsets)` gives, from callers who have it.
            Without it, it is computed on the way; above 2,048 samples by one small launch.
        backend: `"torch"`, `"triton"`, or None to choose by device.

    Returns:
        `[P]` in the dtype of `scores`.

    Raises:
        ValueError: wrong shapes or devices, another dim; with `JAGGED_VALIDATE=1` also offsets with wrong values.
        TypeError: dtypes other than those above, or offsets of different dtypes.

    Source:
        Xu et al., "Jagged Flash Attention Optimization", 2024, table 1.

    Example:
        >>> import torch
        >>> from jagged.ops import jagged2_softmax
        >>> jagged2_softmax(torch.tensor([1.0, 1.0, 3.0, 3.0, 9.0]), torch.tensor([0, 2, 3]))
        tensor([0.5000, 0.5000, 0.5000, 0.5000, 1.0000])
    """
    check_tensor("scores", scores, "[P]", FLOATS)
    check_offsets(a_offsets, scores, "a_offsets")
    if b_offsets is a_offsets:
        b_offsets = None
    if b_offsets is not None:
        check_offsets(b_offsets, scores, "b_offsets")
        check_same("b_offsets", b_offsets, "a_offsets", a_offsets)
    for name, offsets in (("b_offsets", b_offsets), ("pair_offsets", pair_offsets)):
        if offsets is not None and offsets.shape != a_offsets.shape:
            raise ValueError(f"{name}: expected {list(a_offsets.shape)} as a_offsets, got {list(offsets.shape)}")
    if pair_offsets is not None:
        check_offsets(pair_offsets, scores, "pair_offsets", total=scores.shape[0])
    if dim not in (-1, -2):
        raise ValueError(f"dim: expected -1 for the blocks' rows or -2 for their columns, got {dim}")
    if validation_is_on(a_offsets):
        _validate_pairs(offsets_of_pairs(a_offsets, b_offsets), pair_offsets, scores.shape[0])
    inputs = PairInputs(scores, a_offsets, b_offsets, pair_offsets)
    return PAIR_SOFTMAX(inputs, PairOptions(by_columns=dim == -2), backend).weights


def _validate_pairs(expected: Tensor, given: Tensor | None, total: int) -> None:
    """Check that blocks fill the scores and that pair offsets, if they are given, belong to them."""
    if int(expected[-1]) != total:
        raise ValueError(
            f"scores: expected {int(expected[-1])}, the pairs that a_offsets and b_offsets describe, got {total}; "
            "blocks lie one behind the other, row by row"
        )
    if given is not None and (places := torch.nonzero(given != expected)).numel():
        place = int(places[0])
        raise ValueError(
            f"pair_offsets[{place}]: expected {int(expected[place])}, got {int(given[place])}; "
            "compute it by pair_offsets(a_offsets, b_offsets)"
        )
