"""The public operator of rows in pages."""

from __future__ import annotations

import torch
from torch import Tensor

from jagged.ops._shared.validation import (
    check_device,
    check_number,
    check_offsets,
    check_same,
    check_tensor,
    holds,
    validation_is_on,
)
from jagged.ops.conversion.spec import EXTEND_PAGES, Pages, Paging


def extend_pages(
    pool: Tensor,
    pages: Tensor,
    first: Tensor,
    second: Tensor | None,
    offsets: Tensor,
    kept_offsets: Tensor,
    joined_offsets: Tensor,
    *,
    page_rows: int,
    total: int,
    backend: str | None = None,
) -> Tensor:
    """Put each sample's new rows behind its earlier ones, which lie in pages, and keep the first of the new ones in pages, too.

    One kernel copies whole rows; nothing waits for the device. So a sequence can grow from call to call without a copy of what
    stays behind: keys and values of a history, with `first` for keys and `second` for values.

    Args:
        pool: `[R, *F]`, or with `second` `[R, 2, *F]`, any dtype, contiguous: page p are its rows from `p * page_rows`
            on. Changed in place.
        pages: `[B, P]`, int32 or int64: each sample's pages in the order of its rows; no two samples share one. Past those that
            it needs, anything.
        first: `[S, *F]`, new rows of the dtype of `pool`, or the first half of each.
        second: `[S, *F]`, the other half; None without.
        offsets: `[B + 1]`, int32 or int64, of new rows.
        kept_offsets: `[B + 1]`, int32 or int64: how many of each sample's new rows are written into its pages, the first ones.
        joined_offsets: `[B + 1]`, int32 or int64, of all rows; as many of each sample's are read from its pages as it has more of
            them than new ones.
        page_rows: rows of a page, best a multiple of 8: a program copies rows of one page.
        total: all rows, the last of `joined_offsets`.
        backend: `"torch"`, `"triton"`, or None to choose by device.

    Returns:
        `[total, *F]`, or `[total, 2, *F]`: all rows, sample by sample.

    Raises:
        ValueError: shapes, devices or offsets that do not fit, a pool with gaps; rows that need a gradient: there is none.
        TypeError: rows of another dtype than the pool's; pages or offsets that are not int32 or int64.

    Example:
        >>> import torch
        >>> from jagged.ops import extend_pages
        >>> pool, pages = torch.tensor([7, 8, 0, 0, 5, 0]), torch.tensor([[0, 1], [2, 0]])
        >>> offsets, kept, joined = torch.tensor([0, 2, 4]), torch.tensor([0, 1, 2]), torch.tensor([0, 4, 7])
        >>> extend_pages(pool, pages, torch.tensor([1, 2, 3, 4]), None, offsets, kept, joined, page_rows=2, total=7)
        tensor([7, 8, 1, 2, 5, 3, 4])
        >>> pool
        tensor([7, 8, 1, 0, 5, 3])
    """
    check_tensor("pool", pool, "[R, *F]")
    if not pool.is_contiguous():
        raise ValueError(f"pool: expected adjacent rows, got stride {list(pool.stride())}; pass a contiguous tensor")
    check_number("page_rows", page_rows, page_rows >= 1, "1 or more")
    check_tensor("pages", pages, "[B, P]", (torch.int32, torch.int64))
    check_device("pages", pages, "pool", pool)
    if second is None:
        features = pool.shape[1:]
    else:
        if pool.dim() < 2 or pool.shape[1] != 2:
            raise ValueError(f"pool: expected [R, 2, *F], as rows have a second half, got {list(pool.shape)}")
        features = pool.shape[2:]
    for name, rows in (("first", first), ("second", second)):
        if rows is None:
            continue
        check_tensor(name, rows, "[S, *F]")
        check_same(name, rows, "pool", pool)
        if not holds(rows.shape == (first.shape[0], *features)):
            raise ValueError(f"{name}: expected {[first.shape[0], *features]}, rows as those of pool, got {list(rows.shape)}")
        if rows.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name}: expected rows that need no gradient, got some that do; call it under torch.no_grad()")
    totals = first.shape[0], None, total
    named = (("offsets", offsets), ("kept_offsets", kept_offsets), ("joined_offsets", joined_offsets))
    for (name, of), rows_of in zip(named, totals, strict=True):
        check_offsets(of, pool, name, rows_of)
        if not holds(of.shape[0] == pages.shape[0] + 1):
            raise ValueError(
                f"{name}: expected [{pages.shape[0] + 1}], as pages are of {pages.shape[0]} samples, got {list(of.shape)}"
            )
    if validation_is_on(offsets):
        _check_values(kept_offsets, offsets, joined_offsets, pages, page_rows, pool.shape[0] // page_rows)
    joined = EXTEND_PAGES(
        Pages(pool, pages, first, second, offsets, kept_offsets, joined_offsets), Paging(page_rows, total), backend
    ).rows
    # Kernels count no change of their own.
    torch.autograd.graph.increment_version(pool)
    return joined


def _check_values(
    kept_offsets: Tensor, offsets: Tensor, joined_offsets: Tensor, pages: Tensor, page_rows: int, num_pages: int
) -> None:
    """Check that of each sample no more is kept than is new, no more is new than it has, and that it has pages for the rest."""
    kept, new, joined = kept_offsets.diff(), offsets.diff(), joined_offsets.diff()
    for name, fewer, more, of in (("kept_offsets", kept, new, "offsets"), ("offsets", new, joined, "joined_offsets")):
        if bool((fewer > more).any()):
            sample = int((fewer > more).int().argmax())
            raise ValueError(
                f"{name}: expected at most the {int(more[sample])} rows of {of} of sample {sample}, got {int(fewer[sample])}"
            )
    in_pages, room = joined - new + kept, pages.shape[1] * page_rows
    if bool((in_pages > room).any()):
        sample = int((in_pages > room).int().argmax())
        raise ValueError(
            f"pages: expected room for {int(in_pages[sample])} rows of sample {sample}, got {room}; give it more pages"
        )
    needed = torch.arange(0, room, page_rows, device=pages.device) < in_pages[:, None]
    wrong = pages[needed & ((pages < 0) | (pages >= num_pages))]
    if wrong.numel():
        raise ValueError(f"pages: expected numbers from 0 to {num_pages - 1}, of pages of pool, got {int(wrong[0])}")
