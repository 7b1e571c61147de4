"""Public products: of a jagged tensor with a dense or a second jagged one, and over the pairs of rows of each sample."""

from __future__ import annotations

from torch import Tensor

from jagged.ops._shared.backends import resolve_backend
from jagged.ops._shared.offsets import scan_pairs
from jagged.ops._shared.validation import (
    FLOATS,
    check_factors,
    check_offsets,
    check_same,
    check_tensor,
    holds,
    resolve_total,
    validation_is_on,
)
from jagged.ops.bmm.spec import (
    DENSE_BMM,
    JAGGED_BMM,
    PAIR_SCORES,
    PAIR_SUMS,
    DenseInputs,
    JaggedInputs,
    Options,
    PairInputs,
    PairOptions,
    WeightedInputs,
    WeightedOptions,
)


def jagged_dense_bmm(
    values: Tensor, offsets: Tensor, dense: Tensor, bias: Tensor | None = None, *, backend: str | None = None
) -> Tensor:
    """Multiply each sample's rows by a matrix of its own: `out[s] = values[s] @ dense[b] + bias[b]` for the rows s of sample b.

    Under `torch.autocast` all are cast to its dtype, which is then the result's. Gradients of any order.

    Args:
        values: `[S, D]`, float32, bfloat16, float16 or float64 (computed by PyTorch on every device).
        offsets: `[B + 1]`, int32 or int64, from 0 to S.
        dense: `[B, D, T]`, of the dtype and device of `values`.
        bias: `[B, T]`, of the dtype and device of `values`: added to the sums before they are rounded. None adds nothing.
        backend: `"torch"`, `"triton"`, or None to choose by device.

    Returns:
        `[S, T]` in the dtype of `values`; sums are accumulated in float32 (float64 for float64).

    Raises:
        ValueError: shapes that do not fit, tensors on different devices, an unknown backend.
        TypeError: dtypes other than those above, or different ones outside of autocast.

    Source:
        Xu et al., Enhancing Performance and Scalability of Large-Scale Recommendation Systems with Jagged Flash Attention,
        RecSys 2024, Table 1.

    Example:
        >>> import torch
        >>> from jagged.ops import jagged_dense_bmm
        >>> values, offsets = torch.tensor([[1., 2.], [3., 4.], [5., 6.]]), torch.tensor([0, 2, 3])
        >>> jagged_dense_bmm(values, offsets, torch.tensor([[[1.], [1.]], [[1.], [-1.]]]))
        tensor([[ 3.],
                [ 7.],
                [-1.]])
    """
    check_tensor("values", values, "[S, D]", FLOATS)
    check_tensor("dense", dense, "[B, D, T]", FLOATS)
    check_offsets(offsets, values, total=values.shape[0])
    check_factors("dense", dense, "values", values)
    if not (holds(dense.shape[0] == offsets.shape[0] - 1) and holds(dense.shape[1] == values.shape[1])):
        raise ValueError(
            f"dense: expected shape [{offsets.shape[0] - 1}, {values.shape[1]}, T], a matrix for each sample of the offsets "
            f"with a row for each column of values, got {list(dense.shape)}"
        )
    if bias is not None:
        check_tensor("bias", bias, "[B, T]", FLOATS)
        check_factors("bias", bias, "values", values)
        if not (holds(bias.shape[0] == dense.shape[0]) and holds(bias.shape[1] == dense.shape[2])):
            raise ValueError(
                f"bias: expected shape [{dense.shape[0]}, {dense.shape[2]}], a row for each sample, as wide as dense "
                f"{list(dense.shape)}, got {list(bias.shape)}; expand what all samples share"
            )
    return DENSE_BMM(DenseInputs(values, offsets, dense, bias), Options(), backend).rows


def jagged_jagged_bmm(a: Tensor, b: Tensor, offsets: Tensor, *, backend: str | None = None) -> Tensor:
    """Add up the outer products of each sample's rows: `out[b] = a[rows].T @ b[rows]`.

    Under `torch.autocast` both are cast to its dtype, which is then the result's. Gradients of any order.

    Args:
        a: `[S, D]`, float32, bfloat16, float16 or float64 (computed by PyTorch on every device).
        b: `[S, T]`, of the dtype and device of `a`.
        offsets: `[B + 1]`, int32 or int64, from 0 to S.
        backend: `"torch"`, `"triton"`, or None to choose by device.

    Returns:
        `[B, D, T]` in the dtype of `a`, zeros for an empty sample; sums are accumulated in float32 (float64 for float64), of
        long samples in chunks whose sums are added in a fixed order.

    Raises:
        ValueError: shapes that do not fit, tensors on different devices, an unknown backend.
        TypeError: dtypes other than those above, or different ones outside of autocast.

    Source:
        Xu et al., Enhancing Performance and Scalability of Large-Scale Recommendation Systems with Jagged Flash Attention,
        RecSys 2024, Table 1.

    Example:
        >>> import torch
        >>> from jagged.ops import jagged_jagged_bmm
        >>> a, b = torch.tensor([[1., 2.], [3., 4.], [5., 6.]]), torch.tensor([[1.], [1.], [2.]])
        >>> jagged_jagged_bmm(a, b, torch.tensor([0, 2, 3]))
        tensor([[[ 4.],
                 [ 6.]],
        <BLANKLINE>
                [[10.],
                 [12.]]])
    """
    check_tensor("a", a, "[S, D]", FLOATS)
    check_tensor("b", b, "[S, T]", FLOATS)
    check_offsets(offsets, a, total=a.shape[0])
    check_factors("b", b, "a", a)
    if not holds(b.shape[0] == a.shape[0]):
        raise ValueError(f"b: expected shape [{a.shape[0]}, T], a row for each row of a, got {list(b.shape)}")
    return JAGGED_BMM(JaggedInputs(a, b, offsets), Options(), backend).sums


def jagged_jagged_bmm_jagged_out(
    a: Tensor,
    b: Tensor,
    a_offsets: Tensor,
    b_offsets: Tensor | None = None,
    total: int | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    """Multiply each sample's rows of `a` with its rows of `b`: the scores of all pairs inside a sample, and of no others.

    Sample i has a block of `La_i x Lb_i` scores, stored row by row from `pair_offsets(a_offsets, b_offsets)[i]` on. Products are
    accumulated in float32 (float64 for float64). Under `torch.autocast` inputs are cast to its dtype. Gradients of any order.

    Args:
        a: `[Sa, D]`, float32, bfloat16, float16 or float64 (computed by PyTorch on every device).
        b: `[Sb, D]`, of the dtype and device of `a`.
        a_offsets: `[B + 1]`, int32 or int64, from 0 to Sa.
        b_offsets: `[B + 1]`, of the dtype of `a_offsets`, from 0 to Sb; None for those of `a`.
        total: number of pairs, `sum La_i * Lb_i`; None reads it from the offsets, which synchronises once with the device. Where
            it is more, as for a CUDA graph whose lengths change, the scores past the last block are left unwritten.
        backend: `"torch"`, `"triton"`, or None to choose by device. The PyTorch implementation reads the lengths on the host.

    Returns:
        `[total]`, in the dtype of the inputs.

    Raises:
        ValueError: shapes or devices that do not fit; no `total` in a compiled or captured call; with `JAGGED_VALIDATE=1` also
            offsets or a total with wrong values.
        TypeError: dtypes that are not supported, or that differ outside of autocast.

    Source:
        Jagged Flash Attention (Xu et al., RecSys 2024), table 1.

    Example:
        >>> import torch
        >>> from jagged.ops import jagged_jagged_bmm_jagged_out
        >>> a, b = torch.tensor([[1.], [2.], [3.]]), torch.tensor([[1.], [10.], [100.]])
        >>> jagged_jagged_bmm_jagged_out(a, b, torch.tensor([0, 2, 3]), torch.tensor([0, 1, 3]))
        tensor([  1.,   2.,  30., 300.])
    """
    check_tensor("a", a, "[Sa, D]", FLOATS)
    check_tensor("b", b, "[Sb, D]", FLOATS)
    check_factors("b", b, "a", a)
    if not holds(a.shape[1] == b.shape[1]):
        raise ValueError(f"b: expected shape [Sb, {a.shape[1]}], as wide as a {list(a.shape)}, got {list(b.shape)}")
    b_offsets = _check_pair_offsets(a_offsets, b_offsets, b, a.shape[0])
    if b_offsets is a_offsets and not holds(a.shape[0] == b.shape[0]):
        raise ValueError(f"b: expected {a.shape[0]} rows as a has, got {b.shape[0]}; give b_offsets where lengths differ")
    backend = resolve_backend(backend, a)
    if total is None or validation_is_on(a_offsets):
        pair_offsets = scan_pairs(a_offsets, b_offsets, backend)
        if validation_is_on(a_offsets):
            _validate_pairs("total", total, pair_offsets)
        total = resolve_total(total, pair_offsets)
    return PAIR_SCORES(PairInputs(a, b, a_offsets, b_offsets), PairOptions(total), backend).scores


def array_jagged_bmm_jagged_out(
    scores: Tensor,
    b: Tensor,
    a_offsets: Tensor,
    b_offsets: Tensor | None = None,
    a_total: int | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    """Add up each sample's rows of `b`, weighted by its block of scores: `[La_i, Lb_i] x [Lb_i, D] -> [La_i, D]`.

    The blocks lie as `jagged_jagged_bmm_jagged_out` stores them. Sums are accumulated in float32 (float64 for float64); one
    without terms is 0. Under `torch.autocast` both inputs are cast to its dtype. Gradients of any order.

    Args:
        scores: `[sum La_i * Lb_i]`, float32, bfloat16, float16 or float64 (computed by PyTorch on every device). More of them, as
            for a CUDA graph whose lengths change, are never read, and their gradients are left unwritten.
        b: `[Sb, D]`, of the dtype and device of `scores`.
        a_offsets: `[B + 1]`, int32 or int64, from 0 to Sa: the blocks' rows.
        b_offsets: `[B + 1]`, of the dtype of `a_offsets`, from 0 to Sb: their columns; None for square blocks.
        a_total: Sa, the last of `a_offsets`. Without `b_offsets` it is Sb; otherwise None reads it from the offsets, which
            synchronises once with the device.
        backend: `"torch"`, `"triton"`, or None to choose by device. The PyTorch implementation reads the lengths on the host.

    Returns:
        `[Sa, D]`, in the dtype of the inputs.

    Raises:
        ValueError: shapes or devices that do not fit; `b_offsets` without `a_total` in a compiled or captured call; with
            `JAGGED_VALIDATE=1` also offsets with wrong values, or scores of another number than they say.
        TypeError: dtypes that are not supported, or that differ outside of autocast.

    Source:
        Jagged Flash Attention (Xu et al., RecSys 2024), table 1.

    Example:
        >>> import torch
        >>> from jagged.ops import array_jagged_bmm_jagged_out
        >>> scores, b = torch.tensor([1., 2., 30., 300.]), torch.tensor([[1.], [10.], [100.]])
        >>> array_jagged_bmm_jagged_out(scores, b, torch.tensor([0, 2, 3]), torch.tensor([0, 1, 3]), a_total=3)
        tensor([[1.0000e+00],
                [2.0000e+00],
                [3.0300e+04]])
    """
    check_tensor("scores", scores, "[N]", FLOATS)
    check_tensor("b", b, "[Sb, D]", FLOATS)
    check_factors("b", b, "scores", scores)
    if b_offsets is None:
        if a_total is not None and not holds(a_total == b.shape[0]):
            raise ValueError(f"a_total: expected {b.shape[0]}, the rows of b, got {a_total}; give b_offsets where lengths differ")
        a_total = b.shape[0]
    b_offsets = _check_pair_offsets(a_offsets, b_offsets, b, a_total)
    backend = resolve_backend(backend, b)
    if validation_is_on(a_offsets):
        _validate_pairs("scores", scores.shape[0], scan_pairs(a_offsets, b_offsets, backend))
    a_total = resolve_total(a_total, a_offsets, "a_total")
    return PAIR_SUMS(WeightedInputs(scores, b, a_offsets, b_offsets), WeightedOptions(a_total, False), backend).sums


def _check_pair_offsets(a_offsets: Tensor, b_offsets: Tensor | None, b: Tensor, a_total: int | None) -> Tensor:
    check_offsets(a_offsets, b, "a_offsets", total=a_total)
    if b_offsets is None:
        return a_offsets
    check_offsets(b_offsets, b, "b_offsets", total=b.shape[0])
    check_same("b_offsets", b_offsets, "a_offsets", a_offsets)
    if not holds(b_offsets.shape[0] == a_offsets.shape[0]):
        raise ValueError(f"b_offsets: expected {list(a_offsets.shape)} as a_offsets, got {list(b_offsets.shape)}")
    return b_offsets


def _validate_pairs(name: str, given: int | None, pair_offsets: Tensor) -> None:
    pairs = int(pair_offsets[-1])
    if given is not None and given < pairs:
        raise ValueError(f"{name}: expected {pairs}, the number of pairs that the offsets say, got {given}")
