"""Public conversions between jagged and dense, and of several jagged tensors into one and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from jagged.ops._shared.offsets import stacked_offsets
from jagged.ops._shared.validation import (
    check_offsets,
    check_same,
    check_tensor,
    holds,
    resolve_total,
    validate_offsets,
    validation_is_on,
)
from jagged.ops.conversion.spec import (
    CONCAT,
    CONCAT_TWO,
    SPLIT,
    SPLIT_TWO,
    TO_DENSE,
    TO_JAGGED,
    Both,
    Dense,
    Padding,
    Pair,
    Parts,
    Plain,
    Rows,
    Total,
    Totals,
)


def jagged_to_dense(
    values: Tensor, offsets: Tensor, length: int, padding_value: float = 0.0, *, backend: str | None = None
) -> Tensor:
    """Pad samples to a dense tensor, keeping the first `length` rows of each.

    Args:
        values: `[S, *F]`, any floating-point or integer dtype; gradients flow for floating-point ones.
        offsets: `[B + 1]`, int32 or int64, from 0 to S.
        length: rows per sample in the output; longer samples lose the rest.
        padding_value: fills the places of shorter samples; for integers a whole number that their dtype holds.
        backend: `"torch"`, `"triton"`, or None to choose by device.

    Returns:
        `[B, length, *F]` in the dtype of `values`.

    Raises:
        ValueError: wrong shapes or devices, a negative length, or a padding value that the dtype of `values` does not hold.
        TypeError: offsets that are not int32 or int64.

    Example:
        >>> import torch
        >>> from jagged.ops import jagged_to_dense
        >>> jagged_to_dense(torch.tensor([1., 2., 3.]), torch.tensor([0, 2, 3]), length=2)
        tensor([[1., 2.],
                [3., 0.]])
    """
    check_tensor("values", values, "[S, *F]")
    check_offsets(offsets, values, total=values.shape[0])
    if length < 0:
        raise ValueError(f"length: expected at least 0, got {length}")
    options = Padding(length, _padding_of(values.dtype, padding_value))
    return TO_DENSE(Rows(values, offsets), options, backend).padded


def dense_to_jagged(dense: Tensor, offsets: Tensor, total: int | None = None, *, backend: str | None = None) -> Tensor:
    """Take the rows that samples have out of a dense tensor.

    Args:
        dense: `[B, L, *F]`, any floating-point or integer dtype.
        offsets: `[B + 1]`, int32 or int64.
        total: S, the last offset; None reads it from the offsets, which synchronises once with the device.
        backend: `"torch"`, `"triton"`, or None to choose by device.

    Returns:
        `[S, *F]`; rows of a sample past L are zero.

    Raises:
        ValueError: wrong shapes or devices; no `total` in a compiled or captured call.
        TypeError: offsets that are not int32 or int64.

    Example:
        >>> import torch
        >>> from jagged.ops import dense_to_jagged
        >>> dense_to_jagged(torch.tensor([[1., 2.], [3., 0.]]), torch.tensor([0, 2, 3]))
        tensor([1., 2., 3.])
    """
    check_tensor("dense", dense, "[B, L, *F]")
    check_offsets(offsets, dense, total=total)
    _check_batch("dense", dense, offsets)
    return TO_JAGGED(Dense(dense, offsets), Total(resolve_total(total, offsets)), backend).rows


def jagged_concat(
    values: Sequence[Tensor], offsets: Sequence[Tensor | None], *, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """Concatenate jagged tensors sample by sample: the rows of part 0, then of part 1, and so on.

    Args:
        values: for each part `[S_k, *F]`, or `[B, n_k, *F]` where its offsets are None; one dtype, one device, one F. Any number
            of parts is dense, but not all.
        offsets: for each part `[B + 1]`, int32 or int64 (one dtype), or None for a dense part.
        backend: `"torch"`, `"triton"`, or None to choose by device.

    Returns:
        values `[sum S_k, *F]` and their offsets `[B + 1]`.

    Raises:
        ValueError: no parts, parts of different batch sizes, features or devices, or only dense parts.
        TypeError: parts of different dtypes.

    Example:
        >>> import torch
        >>> from jagged.ops import jagged_concat
        >>> history, target = torch.tensor([1, 2, 3]), torch.tensor([[8], [9]])
        >>> jagged_concat([history, target], [torch.tensor([0, 2, 3]), None])
        (tensor([1, 2, 8, 3, 9]), tensor([0, 3, 5]))
    """
    if len(values) != len(offsets) or not values:
        raise ValueError(f"values: expected one or more parts, one for each of the offsets; got {len(values)} and {len(offsets)}")
    batch_offsets = _first_jagged(offsets)
    for k, (part, part_offsets) in enumerate(zip(values, offsets, strict=True)):
        name = f"values[{k}]"
        check_same(name, part, "values[0]", values[0])
        if part_offsets is None:
            check_tensor(name, part, "[B, n, *F]")
            _check_batch(name, part, batch_offsets)
        else:
            check_tensor(name, part, "[S, *F]")
            check_offsets(part_offsets, part, f"offsets[{k}]", total=part.shape[0])
            _check_alike(f"offsets[{k}]", part_offsets, batch_offsets)
        features = part.shape[1 if part_offsets is not None else 2 :]
        if k == 0:
            first_features = features
        elif features != first_features:
            raise ValueError(f"{name}: expected features {list(first_features)} as in values[0], got {list(features)}")
    if len(values) == 2:
        joined = CONCAT_TWO(Pair(values[0], values[1], offsets[0], offsets[1]), Plain(), backend)
        return joined.rows, joined.offsets
    rows = [part.flatten(0, 1) if of is None else part for part, of in zip(values, offsets, strict=True)]
    lengths = [part.shape[1] if of is None else of for part, of in zip(values, offsets, strict=True)]
    stacked = stacked_offsets(lengths, batch_offsets)
    return CONCAT(Parts(tuple(rows), stacked), Plain(), backend).rows, stacked.sum(0, dtype=stacked.dtype)


def jagged_split(
    values: Tensor, offsets: Sequence[Tensor | int], totals: Sequence[int] | None = None, *, backend: str | None = None
) -> tuple[Tensor, ...]:
    """Split a jagged tensor sample by sample: the way back of `jagged_concat`.

    Args:
        values: `[sum S_k, *F]`.
        offsets: for each part its offsets `[B + 1]`, or an integer n for a dense part of n rows a sample.
        totals: S_k of each jagged part, in order; None reads all but one from the offsets, which synchronises.
        backend: `"torch"`, `"triton"`, or None to choose by device.

    Returns:
        for each part `[S_k, *F]`, or `[B, n, *F]` where an integer was given.

    Raises:
        ValueError: no jagged part, offsets of different batch sizes, totals that do not add up to the rows.

    Example:
        >>> import torch
        >>> from jagged.ops import jagged_split
        >>> jagged_split(torch.tensor([1, 2, 8, 3, 9]), [torch.tensor([0, 2, 3]), 1])
        (tensor([1, 2, 3]), tensor([[8],
                [9]]))
    """
    check_tensor("values", values, "[S, *F]")
    batch_offsets = _first_jagged([None if isinstance(part, int) else part for part in offsets])
    batch_size = batch_offsets.shape[0] - 1
    jagged_parts = [k for k, part in enumerate(offsets) if isinstance(part, Tensor)]
    if totals is not None and len(totals) != len(jagged_parts):
        raise ValueError(f"totals: expected one for each of the {len(jagged_parts)} jagged parts, got {len(totals)}")
    sizes = []
    for k, part in enumerate(offsets):
        if isinstance(part, int):
            sizes.append(batch_size * part)
        else:
            total = None if totals is None else totals[jagged_parts.index(k)]
            check_offsets(part, values, f"offsets[{k}]", total=total)
            _check_alike(f"offsets[{k}]", part, batch_offsets)
            sizes.append(-1 if total is None else total)
    if totals is None:
        *others, last = jagged_parts
        for k in others:
            sizes[k] = resolve_total(None, offsets[k], "totals")  # type: ignore[arg-type]
        sizes[last] = values.shape[0] - sum(size for k, size in enumerate(sizes) if k != last)
    if not (holds(sum(sizes) == values.shape[0]) and all(holds(size >= 0) for size in sizes)):
        raise ValueError(f"values: expected as many rows as the parts have together, {sizes}; got {values.shape[0]}")
    if totals is None and validation_is_on(batch_offsets):
        # The size of the last part follows from the others; of these it was read from their offsets.
        validate_offsets(offsets[last], sizes[last], name=f"offsets[{last}]")  # type: ignore[arg-type]
    if len(offsets) == 2:
        parts = [None if isinstance(part, int) else part for part in offsets]
        outputs = SPLIT_TWO(Both(values, *parts), Totals(tuple(sizes)), backend).pieces
    else:
        outputs = SPLIT(Rows(values, stacked_offsets(offsets, batch_offsets)), Totals(tuple(sizes)), backend).pieces
    return tuple(
        rows.reshape(batch_size, part, *rows.shape[1:]) if isinstance(part, int) else rows
        for rows, part in zip(outputs, offsets, strict=True)
    )


def _padding_of(dtype: torch.dtype, value: float) -> float:
    """Return a padding value as a number of the kind of the dtype: an integer goes through no float on its way."""
    if dtype.is_floating_point:
        return float(value)
    least, most = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    if value != int(value) or not least <= value <= most:
        raise ValueError(f"padding_value: expected a whole number from {least} to {most} for values of {dtype}, got {value}")
    return int(value)


def _first_jagged(offsets: Sequence[Tensor | None]) -> Tensor:
    for part in offsets:
        if part is not None:
            return part
    raise ValueError("offsets: expected at least one jagged part; dense parts alone are torch.cat's work")


def _check_alike(name: str, offsets: Tensor, others: Tensor) -> None:
    if not holds(offsets.shape[0] == others.shape[0]) or offsets.dtype != others.dtype:
        raise ValueError(
            f"{name}: expected [{others.shape[0]}] of {others.dtype} as the other parts, "
            f"got {list(offsets.shape)} of {offsets.dtype}"
        )


def _check_batch(name: str, dense: Tensor, offsets: Tensor) -> None:
    if not holds(dense.shape[0] == offsets.shape[0] - 1):
        raise ValueError(f"{name}: expected {offsets.shape[0] - 1} samples as the offsets have, got {dense.shape[0]}")
