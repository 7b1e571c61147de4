"""Public sums, products and differences."""

from __future__ import annotations

import torch
from torch import Tensor

from jagged.ops._shared.backends import resolve_backend
from jagged.ops._shared.offsets import scan_pairs
from jagged.ops._shared.validation import (
    FLOATS,
    check_device,
    check_offsets,
    check_same,
    check_tensor,
    holds,
    resolve_total,
    validate_ids,
    validation_is_on,
)
from jagged.ops.elementwise.spec import (
    ADD_ROWS,
    COMBINE,
    PAIRWISE_DIFFERENCE,
    Combination,
    Lookups,
    Nothing,
    Operands,
    Scores,
    Total,
)

_NUMBERS = (*FLOATS, torch.int32, torch.int64)


def jagged_dense_add(values: Tensor, offsets: Tensor, dense: Tensor, *, backend: str | None = None) -> Tensor:
    """Add a dense operand to a jagged tensor: one row a sample, or row p to row p.

    Args:
        values: `[S, F]`, float32, bfloat16, float16, float64 (computed by PyTorch on every device), int32 or int64.
        offsets: `[B + 1]`, int32 or int64, from 0 to S.
        dense: `[B, F]`, added to every row of its sample, or `[B, L, F]`, whose row `dense[b, p]` is added to row p of sample b.
            A sample's rows past L meet nothing and keep their values; a sample's dense rows past its length are not read.
            `[B, 1, F]` is one of these, of one row. Of the dtype and device of `values`; under `torch.autocast` of any
            floating-point dtype where `values` have one.
        backend: `"torch"`, `"triton"`, or None to choose by device.

    Returns:
        `[S, F]` in the dtype of `values`; of two dtypes in the one that PyTorch's own sum gives, float32 for bfloat16 or float16
        and float32. Gradients of any order, each in the dtype of its operand; none of integers, whose sums are exact and
        wrap around as PyTorch's do.

    Raises:
        ValueError: wrong shapes or devices.
        TypeError: dtypes other than those above, or that differ.

    Source:
        `jagged_dense_elementwise_add` of FBGEMM, with a jagged result.

    Example:
        >>> import torch
        >>> from jagged.ops import jagged_dense_add
        >>> values, offsets = torch.tensor([[1.], [2.], [3.]]), torch.tensor([0, 2, 3])
        >>> jagged_dense_add(values, offsets, torch.tensor([[10.], [20.]])).flatten()
        tensor([11., 12., 23.])
        >>> jagged_dense_add(values, offsets, torch.tensor([[[10.]], [[20.]]])).flatten()
        tensor([11.,  2., 23.])
    """
    _check_dense(values, offsets, dense)
    return COMBINE(Operands(values, dense, offsets), Combination(values.shape[0], "add"), backend).output


def jagged_dense_mul(values: Tensor, offsets: Tensor, dense: Tensor, *, backend: str | None = None) -> Tensor:
    """Multiply a jagged tensor by a dense operand: one row a sample, or row p by row p.

    Args:
        values: `[S, F]`, float32, bfloat16, float16, float64 (computed by PyTorch on every device), int32 or int64.
        offsets: `[B + 1]`, int32 or int64, from 0 to S.
        dense: `[B, F]`, for every row of its sample, or `[B, L, F]`, whose row `dense[b, p]` multiplies row p of sample b. A
            dense row that is missing counts as zero, as in `jagged_dense_add`: a sample's rows past L become 0. `[B, 1, F]` is
            one of these, of one row. Of the dtype and device of `values`; under `torch.autocast` of any floating-point dtype
            where `values` have one.
        backend: `"torch"`, `"triton"`, or None to choose by device.

    Returns:
        `[S, F]` in the dtype of `values`; of two dtypes in the one that PyTorch's own product gives, float32 for bfloat16 or
        float16 and float32. Gradients of any order, each in the dtype of its operand; none of integers, whose products are exact
        and wrap around as PyTorch's do.

    Raises:
        ValueError: wrong shapes or devices.
        TypeError: dtypes other than those above, or that differ.

    Source:
        `jagged_dense_elementwise_mul` of FBGEMM, which treats missing rows alike.

    Example:
        >>> import torch
        >>> from jagged.ops import jagged_dense_mul
        >>> values, offsets = torch.tensor([[1.], [2.], [3.]]), torch.tensor([0, 2, 3])
        >>> jagged_dense_mul(values, offsets, torch.tensor([[10.], [20.]])).flatten()
        tensor([10., 20., 60.])
        >>> jagged_dense_mul(values, offsets, torch.tensor([[[10.]], [[20.]]])).flatten()
        tensor([10.,  0., 60.])
    """
    _check_dense(values, offsets, dense)
    return COMBINE(Operands(values, dense, offsets), Combination(values.shape[0], "mul"), backend).output


def add_rows(values: Tensor, table: Tensor, index: Tensor, *, backend: str | None = None) -> Tensor:
    """Add to each row a row of a table: `values[n] + table[index[n]]`, as learned positions and times are added.

    It is `values + torch.nn.functional.embedding(index, table)`, and on a GPU one pass, which makes no copy of the table's rows
    and takes two dtypes as they are. float64, and rows on a CPU, are PyTorch's.

    Args:
        values: `[N, D]`, float32, bfloat16, float16 or float64.
        table: `[R, D]`, of any of these dtypes.
        index: `[N]`, int32 or int64, from 0 to R - 1: the row of the table for each of `values`. Unchecked wrong ones, as on a
            GPU, Triton counts as rows of zeros without a gradient; PyTorch fails at them.
        backend: `"torch"`, `"triton"`, or None to choose by device.

    Returns:
        `[N, D]` in the dtype that PyTorch's sum has: of bfloat16 and float32 that is float32. Autocast changes nothing.
        Gradients of any order, each in the dtype of its operand; a row of the table gets the sum over the rows that it was added
        to. By an operator's backend sums are computed in float32 at least, and the kernels' are the same in every run. On a CPU
        and in float64 they are those of `torch.nn.functional.embedding`.

    Raises:
        ValueError: wrong shapes or devices, an index of no row.
        TypeError: dtypes other than those above; float64 where Triton is asked for.

    Example:
        >>> import torch
        >>> from jagged.ops import add_rows
        >>> add_rows(torch.ones(3, 2), torch.tensor([[10.0, 20.0], [30.0, 40.0]]), torch.tensor([1, 0, 1]))
        tensor([[31., 41.],
                [11., 21.],
                [31., 41.]])
    """
    check_tensor("values", values, "[N, D]", FLOATS)
    check_tensor("table", table, "[R, D]", FLOATS)
    check_device("table", table, "values", values)
    if not holds(table.shape[1] == values.shape[1]):
        raise ValueError(f"table: expected shape [R, {values.shape[1]}], as wide as values, got {list(table.shape)}")
    check_tensor("index", index, "[N]", (torch.int32, torch.int64))
    check_device("index", index, "values", values)
    if not holds(index.shape[0] == values.shape[0]):
        raise ValueError(f"index: expected shape [{values.shape[0]}], one for each row of values, got {list(index.shape)}")
    if validation_is_on(index):
        validate_ids(index, table.shape[0], name="index")
    chosen = resolve_backend(backend, table if table.dtype == torch.float64 else values)
    if backend is None and chosen == "torch":
        # What every program knows, with derivatives of every kind.
        return values + torch.nn.functional.embedding(index, table)
    return ADD_ROWS(Lookups(values, table, index), Nothing(), chosen).output


def jagged_pairwise_difference(
    values: Tensor, offsets: Tensor, total: int | None = None, *, backend: str | None = None
) -> Tensor:
    """Differences of all pairs of rows within each sample, as pairwise ranking losses take them.

    Args:
        values: `[S]`, float32, bfloat16, float16, float64 (computed by PyTorch on every device), int32 or int64: a score a row.
        offsets: `[B + 1]`, int32 or int64, from 0 to S.
        total: number of pairs, `sum L_i^2`, the last of `pair_offsets(offsets)`; None reads it from there, which synchronises
            once with the device.
        backend: `"torch"`, `"triton"`, or None to choose by device.

    Returns:
        `[total]` in the dtype of `values`: sample b has a block `L_b x L_b` from `pair_offsets(offsets)[b]` on, row by row, whose
        entry (i, j) is `values_i - values_j`. Gradients of any order; none of integers, whose differences are exact.

    Raises:
        ValueError: wrong shapes or devices; no `total` in a compiled or captured call.
        TypeError: dtypes other than those above.

    Example:
        >>> import torch
        >>> from jagged.ops import jagged_pairwise_difference
        >>> jagged_pairwise_difference(torch.tensor([1., 4., 9.]), torch.tensor([0, 2, 3]))
        tensor([ 0., -3.,  3.,  0.,  0.])
    """
    check_tensor("values", values, "[S]", _NUMBERS)
    check_rows(values, offsets)
    if total is None:
        total = resolve_total(total, scan_pairs(offsets, offsets, backend))
    return PAIRWISE_DIFFERENCE(Scores(values, offsets), Total(total), backend).result


def _check_dense(values: Tensor, offsets: Tensor, dense: Tensor) -> None:
    check_tensor("values", values, "[S, F]", _NUMBERS)
    check_rows(values, offsets)
    if not isinstance(dense, Tensor) or dense.dim() != 3:
        check_tensor("dense", dense, "[B, F]")
    check_operand("dense", dense, values)
    batch_size, num_features = offsets.shape[0] - 1, values.shape[1]
    if not (holds(dense.shape[0] == batch_size) and holds(dense.shape[-1] == num_features)):
        raise ValueError(
            f"dense: expected [{batch_size}, {num_features}] or [{batch_size}, L, {num_features}], with the samples of the "
            f"offsets and the features of values, got {list(dense.shape)}"
        )


def check_rows(values: Tensor, offsets: Tensor) -> None:
    """Check offsets of rows, none of which may be without a sample."""
    check_offsets(offsets, values, total=values.shape[0])
    if not holds((offsets.shape[0] > 1) | (values.shape[0] == 0)):
        raise ValueError(f"offsets: expected shape [B + 1] with samples for the {values.shape[0]} rows of values, got [1]")


def check_operand(name: str, operand: Tensor, values: Tensor) -> None:
    """Check dtype and device of what values meet; under autocast two floating-point dtypes may differ."""
    is_promoted = operand.dtype != values.dtype and values.dtype in FLOATS and operand.dtype in FLOATS
    if is_promoted and values.device.type in ("cpu", "cuda") and torch.is_autocast_enabled(values.device.type):
        check_device(name, operand, "values", values)
    else:
        check_same(name, operand, "values", values)
