"""Public selections: rows of each sample, whole samples, and each sample's distinct ids."""

from __future__ import annotations

import torch
from torch import Tensor

from jagged.ops._shared.offsets import sample_of_row
from jagged.ops._shared.validation import (
    check_device,
    check_number,
    check_offsets,
    check_tensor,
    holds,
    resolve_total,
    validate_ids,
    validation_is_on,
)
from jagged.ops.conversion.spec import INDEX_SELECT, TAKE_PART, Part, Rows, Selection, Total

_INTEGERS = torch.int32, torch.int64


def jagged_truncate(
    values: Tensor, offsets: Tensor, length: int, keep: str = "first", total: int | None = None, *, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """Keep at most `length` rows of each sample, its first or its last ones.

    Args:
        values: `[S, *F]`, any floating-point or integer dtype.
        offsets: `[B + 1]`, int32 or int64.
        length: most rows to keep.
        keep: `"first"` or `"last"`.
        total: rows kept in all, `sum min(L_i, length)`; None reads it from the new offsets, which synchronises once.
        backend: `"torch"`, `"triton"`, or None to choose by device.

    Returns:
        the kept rows `[total, *F]` and their offsets `[B + 1]`.

    Raises:
        ValueError: wrong shapes or devices, a negative length, another `keep`; no `total` in a compiled or captured call.

    Example:
        >>> import torch
        >>> from jagged.ops import jagged_truncate
        >>> jagged_truncate(torch.tensor([1, 2, 3, 4]), torch.tensor([0, 3, 4]), length=2, keep="last")
        (tensor([2, 3, 4]), tensor([0, 2, 3]))
    """
    check_tensor("values", values, "[S, *F]")
    check_offsets(offsets, values, total=values.shape[0])
    if keep not in ("first", "last"):
        raise ValueError(f"keep: expected 'first' or 'last', got {keep!r}")
    check_number("length", length, length >= 0, "at least 0")
    lengths = offsets.diff(prepend=offsets[:1]).clamp_(min=0, max=_bounded(length, offsets))
    new_offsets = lengths.cumsum(0, dtype=offsets.dtype)
    total = _rows_kept(total, new_offsets, values, "the number of rows that are kept")
    # What is kept and what is dropped are two parts of each sample.
    parts = [offsets - new_offsets, new_offsets] if keep == "last" else [new_offsets, offsets - new_offsets]
    kept = TAKE_PART(Rows(values, torch.stack(parts)), Part(int(keep == "last"), total), backend).rows
    return kept, new_offsets


def jagged_slice(
    values: Tensor,
    offsets: Tensor,
    start: Tensor | int,
    length: int,
    total: int | None = None,
    *,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Keep the rows of each sample from a place on, at most `length` of them.

    Args:
        values: `[S, *F]`, any floating-point or integer dtype.
        offsets: `[B + 1]`, int32 or int64.
        start: `[B]`, int32 or int64, or one integer for all: the place in the sample of the first row to keep, at least 0. A
            sample that ends before it keeps no row.
        length: most rows to keep.
        total: rows kept in all, `sum min(max(L_i - start_i, 0), length)`; None reads it from the new offsets, which synchronises
            once.
        backend: `"torch"`, `"triton"`, or None to choose by device.

    Returns:
        the kept rows `[total, *F]` and their offsets `[B + 1]`. Gradients of any order; those of dropped rows are zero.

    Raises:
        ValueError: wrong shapes or devices, a negative length or start; no `total` in a compiled or captured call.
        TypeError: offsets or starts that are not int32 or int64.

    Source:
        `jagged_slice` of FBGEMM.

    Example:
        >>> import torch
        >>> from jagged.ops import jagged_slice
        >>> jagged_slice(torch.tensor([1, 2, 3, 4, 5]), torch.tensor([0, 3, 5]), torch.tensor([1, 0]), length=1)
        (tensor([2, 4]), tensor([0, 1, 2]))
    """
    check_tensor("values", values, "[S, *F]")
    check_offsets(offsets, values, total=values.shape[0])
    check_number("length", length, length >= 0, "at least 0")
    lengths = offsets.diff().clamp_(min=0)
    if isinstance(start, int):
        check_number("start", start, start >= 0, "at least 0")
        before = lengths.clamp(max=_bounded(start, offsets))
    else:
        check_tensor("start", start, "[B]", _INTEGERS)
        check_device("start", start, "values", values)
        if not holds(start.shape[0] == lengths.shape[0]):
            raise ValueError(f"start: expected [{lengths.shape[0]}], a place for each sample, got {list(start.shape)}")
        if validation_is_on(start) and start.numel() and (least := int(start.min())) < 0:
            raise ValueError(f"start: expected places from 0 on, got {least}")
        before = torch.minimum(start.clamp(min=0), lengths).to(offsets.dtype)
    # What is dropped before, what is kept and what is dropped behind are three parts of each sample.
    lengths = torch.stack([before, (lengths - before).clamp_(max=_bounded(length, offsets))])
    first, new_offsets = torch.nn.functional.pad(lengths.cumsum(1, dtype=offsets.dtype), (1, 0))
    total = _rows_kept(total, new_offsets, values, "the number of rows that are kept")
    parts = torch.stack([first, new_offsets, offsets - first - new_offsets])
    return TAKE_PART(Rows(values, parts), Part(1, total), backend).rows, new_offsets


def jagged_index_select(
    values: Tensor, offsets: Tensor, indices: Tensor, total: int | None = None, *, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """Take whole samples by their numbers, in the order of these. One may come several times.

    Args:
        values: `[S, *F]`, any floating-point or integer dtype.
        offsets: `[B + 1]`, int32 or int64.
        indices: `[M]`, int32 or int64, from 0 to B - 1: the samples to take. Unchecked wrong ones, as on a GPU, take another
            sample.
        total: rows of all samples taken, each as often as it is; None reads it from the new offsets, which synchronises once.
        backend: `"torch"`, `"triton"`, or None to choose by device.

    Returns:
        the rows `[total, *F]` of the samples taken, and their offsets `[M + 1]` in the dtype of `offsets`. Gradients of any
        order; that of a sample taken several times is the sum, added up in float32 (float64 for float64) in a fixed order.

    Raises:
        ValueError: wrong shapes or devices, indices of no sample; no `total` in a compiled or captured call.
        TypeError: offsets or indices that are not int32 or int64.

    Source:
        `jagged_index_select` of FBGEMM.

    Example:
        >>> import torch
        >>> from jagged.ops import jagged_index_select
        >>> jagged_index_select(torch.tensor([1, 2, 3]), torch.tensor([0, 2, 3]), torch.tensor([1, 0, 1]))
        (tensor([3, 1, 2, 3]), tensor([0, 1, 3, 4]))
    """
    check_tensor("values", values, "[S, *F]")
    check_offsets(offsets, values, total=values.shape[0])
    check_tensor("indices", indices, "[M]", _INTEGERS)
    check_device("indices", indices, "values", values)
    batch_size = offsets.shape[0] - 1
    if not holds((batch_size > 0) | (indices.shape[0] == 0)):
        raise ValueError(f"indices: expected none where there are no samples, got {indices.shape[0]}")
    if validation_is_on(indices):
        validate_ids(indices, batch_size, name="indices")
    indices = indices.clamp(0, batch_size - 1)
    lengths = offsets.diff().clamp_(min=0).index_select(0, indices)
    if validation_is_on(indices) and offsets.dtype == torch.int32 and (rows := int(lengths.sum(dtype=torch.int64))) >= 2**31:
        raise ValueError(f"offsets: expected int64 for the {rows} rows that are taken, got int32; convert them with .long()")
    new_offsets = torch.nn.functional.pad(lengths.cumsum(0, dtype=offsets.dtype), (1, 0))
    total = _rows_kept(total, new_offsets, None, "the number of rows that are taken")
    return INDEX_SELECT(Selection(values, offsets, indices, new_offsets), Total(total), backend).rows, new_offsets


def jagged_unique(values: Tensor, offsets: Tensor, total: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Find each sample's distinct ids, and where each row's id is among them. Plain PyTorch on every device: two sorts.

    Args:
        values: `[S]`, int32 or int64.
        offsets: `[B + 1]`, int32 or int64.
        total: distinct ids of all samples together; None reads it from the new offsets, which synchronises once.

    Returns:
        the distinct ids `[total]` of each sample, ascending; their offsets `[B + 1]` in the dtype of `offsets`; and the inverse
        `[S]`, int64, by which `unique[inverse]` is `values`.

    Raises:
        ValueError: wrong shapes or devices; no `total` in a compiled or captured call.
        TypeError: values or offsets that are not int32 or int64.

    Example:
        >>> import torch
        >>> from jagged.ops import jagged_unique
        >>> jagged_unique(torch.tensor([7, 5, 7, 7]), torch.tensor([0, 3, 4]))
        (tensor([5, 7, 7]), tensor([0, 2, 3]), tensor([1, 0, 1, 2]))
    """
    check_tensor("values", values, "[S]", _INTEGERS)
    check_offsets(offsets, values, total=values.shape[0])
    num_rows = values.shape[0]
    samples = sample_of_row(offsets, num_rows)
    by_value = values.argsort(stable=True)
    order = by_value.index_select(0, samples.index_select(0, by_value).argsort(stable=True))
    ids, samples = values.index_select(0, order), samples.index_select(0, order)
    # The first row is always new, others by the row before. A slice would ask a tracer for its length.
    place = torch.arange(num_rows, device=ids.device)
    before = (place - 1).clamp(min=0)
    is_new = (place == 0) | (ids != ids.index_select(0, before)) | (samples != samples.index_select(0, before))
    ranks = is_new.cumsum(0)
    counts = torch.nn.functional.pad(ranks, (1, 0))
    new_offsets = counts.index_select(0, offsets.to(torch.int64).clamp(0, num_rows)).to(offsets.dtype)
    total = _rows_kept(total, new_offsets, values, "the number of distinct ids")
    ranks -= 1
    unique = torch.zeros_like(ids).scatter_(0, ranks, ids)[:total].clone()
    return unique, new_offsets, torch.zeros_like(ranks).scatter_(0, order, ranks)


def _bounded(number: int, offsets: Tensor) -> int:
    """Return a number of rows that the dtype of the offsets holds; no sample has more."""
    return min(number, torch.iinfo(offsets.dtype).max)


def _rows_kept(total: int | None, new_offsets: Tensor, values: Tensor | None, what: str) -> int:
    """Return how many rows come out, at most as many as of `values`, from the caller or from the new offsets."""
    if total is not None and validation_is_on(new_offsets) and total != new_offsets[-1]:
        raise ValueError(f"total: expected {int(new_offsets[-1])}, {what}, got {total}")
    total = resolve_total(total, new_offsets)
    if values is not None and not holds(total <= values.shape[0]):
        raise ValueError(f"total: expected at most {values.shape[0]}, the rows of values, got {total}")
    return total
