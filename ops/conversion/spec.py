"""The operators of conversions. Each is linear and its gradient is another one, so gradients of any order are right.

`extend_pages` alone has none: it changes what it reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jagged.ops._shared.operator import Differentiable, operator


class Rows(NamedTuple):
    """Rows `[S, *F]`, and where samples begin: `[B + 1]`, or by part `[K, B + 1]`."""

    values: Differentiable
    offsets: Tensor


class Dense(NamedTuple):
    """`[B, L, *F]`, and the offsets `[B + 1]` of the rows to take."""

    dense: Differentiable
    offsets: Tensor


class Parts(NamedTuple):
    """The rows `[S_k, *F]` of each part, and the offsets `[K, B + 1]` of all."""

    values: tuple[Differentiable, ...]
    offsets: Tensor


class Pair(NamedTuple):
    """Two parts, each rows `[S_k, *F]` and their offsets `[B + 1]`, or `[B, n_k, *F]` and None."""

    first: Differentiable
    second: Differentiable
    first_offsets: Tensor | None
    second_offsets: Tensor | None


class Both(NamedTuple):
    """The rows `[S_1 + S_2, *F]` of two parts, and the offsets of each, None where it is dense."""

    values: Differentiable
    first_offsets: Tensor | None
    second_offsets: Tensor | None


class Selection(NamedTuple):
    """Rows, their offsets, the samples `[M]` that are selected, and where each of these begins among the selected ones.

    Rows are those of all samples, or for the gradient those of the selected ones.
    """

    values: Differentiable
    offsets: Tensor
    indices: Tensor
    new_offsets: Tensor


class Pages(NamedTuple):
    """Rows in pages, and new ones behind them.

    `pool` `[R, *F]`, or `[R, 2, *F]` where a row has a second half; `pages` `[B, P]`: each sample's, by their numbers; `first`
    and `second` `[S, *F]`: both halves of new rows; `[B + 1]` each: offsets of new rows, of those that are kept, and of all.
    """

    pool: Tensor
    pages: Tensor
    first: Tensor
    second: Tensor | None
    offsets: Tensor
    kept_offsets: Tensor
    joined_offsets: Tensor


class Plain(NamedTuple):
    """None."""


class Padding(NamedTuple):
    """Rows of a sample, and what stands where it has fewer; a whole number for integers."""

    length: int
    padding_value: int | float = 0.0


class Total(NamedTuple):
    """How many rows come out."""

    total: int


class Totals(NamedTuple):
    """How many rows each part has."""

    totals: tuple[int, ...]


class Part(NamedTuple):
    """Which part, and how many rows come out."""

    part: int
    total: int


class Paging(NamedTuple):
    """Rows of a page, and how many rows come out."""

    page_rows: int
    total: int


class Padded(NamedTuple):
    """`[B, length, *F]`."""

    padded: Tensor


class Taken(NamedTuple):
    """`[total, *F]`."""

    rows: Tensor


class Joined(NamedTuple):
    """The rows `[S_1 + S_2, *F]` of two parts, and their offsets `[B + 1]`."""

    rows: Tensor
    offsets: Tensor


class Pieces(NamedTuple):
    """The rows `[S_k, *F]` of each part."""

    pieces: tuple[Tensor, ...]


def _of_to_dense(
    grads: Padded, x: Rows, out: Any, o: Padding, wanted: Mapping[str, torch.dtype], backend: str
) -> dict[str, Tensor]:
    return {"values": TO_JAGGED(Dense(grads.padded, x.offsets), Total(x.values.shape[0]), backend).rows}


def _of_to_jagged(
    grads: Taken, x: Dense, out: Any, o: Total, wanted: Mapping[str, torch.dtype], backend: str
) -> dict[str, Tensor]:
    return {"dense": TO_DENSE(Rows(grads.rows, x.offsets), Padding(x.dense.shape[1]), backend).padded}


def _of_concat(grads: Taken, x: Parts, out: Any, o: Plain, wanted: Mapping[str, torch.dtype], backend: str) -> dict[str, Any]:
    totals = tuple([part.shape[0] for part in x.values])
    return {"values": SPLIT(Rows(grads.rows, x.offsets), Totals(totals), backend).pieces}


def _of_split(
    grads: Pieces, x: Rows, out: Pieces, o: Totals, wanted: Mapping[str, torch.dtype], backend: str
) -> dict[str, Tensor]:
    return {"values": CONCAT(Parts(_filled(grads, out), x.offsets), Plain(), backend).rows}


def _of_concat_two(
    grads: Joined, x: Pair, out: Any, o: Plain, wanted: Mapping[str, torch.dtype], backend: str
) -> dict[str, Tensor]:
    totals = _rows_of(x.first, x.first_offsets), _rows_of(x.second, x.second_offsets)
    first, second = SPLIT_TWO(Both(grads.rows, x.first_offsets, x.second_offsets), Totals(totals), backend).pieces
    return {"first": first.reshape(x.first.shape), "second": second.reshape(x.second.shape)}


def _of_split_two(
    grads: Pieces, x: Both, out: Pieces, o: Totals, wanted: Mapping[str, torch.dtype], backend: str
) -> dict[str, Tensor]:
    batch_size = _jagged_of(x).shape[0] - 1
    first, second = [
        # A part without offsets is dense.
        piece if offsets is not None else piece.reshape(batch_size, total // max(batch_size, 1), *piece.shape[1:])
        for piece, offsets, total in zip(_filled(grads, out), x[1:], o.totals, strict=True)
    ]
    return {"values": CONCAT_TWO(Pair(first, second, *x[1:]), Plain(), backend).rows}


def _of_take_part(grads: Taken, x: Rows, out: Any, o: Part, wanted: Mapping[str, torch.dtype], backend: str) -> dict[str, Tensor]:
    return {"values": PUT_PART(Rows(grads.rows, x.offsets), Part(o.part, x.values.shape[0]), backend).rows}


def _of_put_part(grads: Taken, x: Rows, out: Any, o: Part, wanted: Mapping[str, torch.dtype], backend: str) -> dict[str, Tensor]:
    return {"values": TAKE_PART(Rows(grads.rows, x.offsets), Part(o.part, x.values.shape[0]), backend).rows}


def _of_index_select(
    grads: Taken, x: Selection, out: Any, o: Total, wanted: Mapping[str, torch.dtype], backend: str
) -> dict[str, Tensor]:
    return {"values": INDEX_SELECT_BACKWARD(x._replace(values=grads.rows), Total(x.values.shape[0]), backend).rows}


def _of_index_select_backward(
    grads: Taken, x: Selection, out: Any, o: Total, wanted: Mapping[str, torch.dtype], backend: str
) -> dict[str, Tensor]:
    return {"values": INDEX_SELECT(x._replace(values=grads.rows), Total(x.values.shape[0]), backend).rows}


def _filled(grads: Pieces, out: Pieces) -> tuple[Tensor, ...]:
    """Return the gradient of each piece, zero where there is none."""
    return tuple(
        [
            torch.zeros(piece.shape, dtype=piece.dtype, device=piece.device) if grad is None else grad
            for grad, piece in zip(grads.pieces, out.pieces, strict=True)
        ]
    )


def _rows_of(part: Any, offsets: Tensor | None) -> int:
    return part.shape[0] if offsets is not None else part.shape[0] * part.shape[1]  # type: ignore[no-any-return]


def _jagged_of(x: Pair | Both) -> Tensor:
    """Return the offsets of a part that has some: not both are dense."""
    return x.second_offsets if x.first_offsets is None else x.first_offsets  # type: ignore[return-value]


def _joined(x: Pair, o: Plain) -> Joined:
    rows = _rows_of(x.first, x.first_offsets) + _rows_of(x.second, x.second_offsets)
    features = x.first.shape[2 if x.first_offsets is None else 1 :]
    return Joined(x.first.new_empty(rows, *features), torch.empty_like(_jagged_of(x)))


def _pieces(x: Rows | Both, o: Totals) -> Pieces:
    return Pieces(tuple([x.values.new_empty(total, *x.values.shape[1:]) for total in o.totals]))


def _rows(x: Any, o: Any) -> Taken:
    return Taken(x.values.new_empty(o.total, *x.values.shape[1:]))


_TORCH, _TRITON = "jagged.ops.conversion.torch_impl", "jagged.ops.conversion.kernels"

TO_DENSE = operator(
    "to_dense",
    Rows,
    Padding,
    Padded,
    shapes=lambda x, o: Padded(x.values.new_empty(x.offsets.shape[0] - 1, o.length, *x.values.shape[1:])),
    torch=f"{_TORCH}:to_dense",
    triton=f"{_TRITON}:to_dense",
    gradient=_of_to_dense,
    saved=("offsets",),
    float64_on_triton=True,
)
TO_JAGGED = operator(
    "to_jagged",
    Dense,
    Total,
    Taken,
    shapes=lambda x, o: Taken(x.dense.new_empty(o.total, *x.dense.shape[2:])),
    torch=f"{_TORCH}:to_jagged",
    triton=f"{_TRITON}:to_jagged",
    gradient=_of_to_jagged,
    saved=("offsets",),
    float64_on_triton=True,
)
CONCAT = operator(
    "concat",
    Parts,
    Plain,
    Taken,
    shapes=lambda x, o: Taken(x.values[0].new_empty(sum(part.shape[0] for part in x.values), *x.values[0].shape[1:])),
    torch=f"{_TORCH}:concat",
    triton=f"{_TRITON}:concat",
    gradient=_of_concat,
    saved=("offsets",),
    float64_on_triton=True,
)
SPLIT = operator(
    "split",
    Rows,
    Totals,
    Pieces,
    shapes=_pieces,
    torch=f"{_TORCH}:split",
    triton=f"{_TRITON}:split",
    gradient=_of_split,
    saved=("offsets",),
    float64_on_triton=True,
)
CONCAT_TWO = operator(
    "concat_two",
    Pair,
    Plain,
    Joined,
    shapes=_joined,
    torch=f"{_TORCH}:concat_two",
    triton=f"{_TRITON}:concat_two",
    gradient=_of_concat_two,
    saved=("first_offsets", "second_offsets"),
    float64_on_triton=True,
)
SPLIT_TWO = operator(
    "split_two",
    Both,
    Totals,
    Pieces,
    shapes=_pieces,
    torch=f"{_TORCH}:split_two",
    triton=f"{_TRITON}:split_two",
    gradient=_of_split_two,
    saved=("first_offsets", "second_offsets"),
    float64_on_triton=True,
)
TAKE_PART = operator(
    "take_part",
    Rows,
    Part,
    Taken,
    shapes=_rows,
    torch=f"{_TORCH}:take_part",
    triton=f"{_TRITON}:take_part",
    gradient=_of_take_part,
    saved=("offsets",),
    float64_on_triton=True,
)
PUT_PART = operator(
    "put_part",
    Rows,
    Part,
    Taken,
    shapes=_rows,
    torch=f"{_TORCH}:put_part",
    triton=f"{_TRITON}:put_part",
    gradient=_of_put_part,
    saved=("offsets",),
    float64_on_triton=True,
)
INDEX_SELECT = operator(
    "jagged_index_select",
    Selection,
    Total,
    Taken,
    shapes=_rows,
    torch=f"{_TORCH}:index_select",
    triton=f"{_TRITON}:index_select",
    gradient=_of_index_select,
    saved=("offsets", "indices", "new_offsets"),
    float64_on_triton=True,
)
INDEX_SELECT_BACKWARD = operator(
    "jagged_index_select_backward",
    Selection,
    Total,
    Taken,
    shapes=_rows,
    torch=f"{_TORCH}:index_select_backward",
    triton=f"{_TRITON}:index_select_backward",
    gradient=_of_index_select_backward,
    saved=("offsets", "indices", "new_offsets"),
    float64_on_triton=True,
)
EXTEND_PAGES = operator(
    "extend_pages",
    Pages,
    Paging,
    Taken,
    shapes=lambda x, o: Taken(x.pool.new_empty(o.total, *x.pool.shape[1:])),
    torch=f"{_TORCH}:extend_pages",
    triton="jagged.ops.conversion.copies:extend_pages",
    mutates=("pool",),
    float64_on_triton=True,
)
