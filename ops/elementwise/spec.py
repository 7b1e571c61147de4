"""The operators of sums, products, differences and activations.

All but the activation are linear in each operand, and the gradient of each is made of the others: all orders are right.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jagged.ops._shared.operator import Differentiable, operator


class Operands(NamedTuple):
    """Rows `[S, F]`, None for the dense operand alone; what they meet, `[B, F]` or `[B, L, F]`; offsets `[B + 1]`."""

    values: Differentiable | None
    dense: Differentiable
    offsets: Tensor


class Factors(NamedTuple):
    """Rows `[S, F]`, and factors of the same shape, None for ones."""

    values: Differentiable
    factor: Differentiable | None
    offsets: Tensor


class Hidden(NamedTuple):
    """Rows `[S, F]`, and the context `[B, F]` that is added to those of a sample."""

    values: Differentiable
    context: Differentiable
    offsets: Tensor


class Crossed(NamedTuple):
    """Rows `[S, F]`; what multiplies them, of the sample `[B, C]` and of the row itself `[S, F - C]`; what is added, `[S, F]`."""

    values: Differentiable
    context: Differentiable
    own: Differentiable
    offsets: Tensor
    residual: Differentiable | None


class Lookups(NamedTuple):
    """Rows `[N, D]`, None for zeros; a table `[R, D]`; and which of its rows is added to each, `[N]`."""

    values: Differentiable | None
    table: Differentiable
    places: Tensor


class Terms(NamedTuple):
    """Rows `[N, D]`, and the row of a table that each belongs to, `[N]`."""

    terms: Differentiable
    places: Tensor


class Scores(NamedTuple):
    """Scores `[S]`."""

    values: Differentiable
    offsets: Tensor


class Differences(NamedTuple):
    """A number for each pair, `[P]`."""

    pairs: Differentiable
    offsets: Tensor


class Combination(NamedTuple):
    """Rows in all, and what is done, `"add"` or `"mul"`."""

    total: int
    operation: str


class Collection(NamedTuple):
    """L of `[B, L, F]`; None for the sums of samples."""

    length: int | None


class Activating(NamedTuple):
    """`"relu"`, `"silu"` or `"gelu"`."""

    activation: str


class Crossing(NamedTuple):
    """Whether without a residual that is added which multiplies, or nothing."""

    adds_factor: bool


class Nothing(NamedTuple):
    """No options."""


class Table(NamedTuple):
    """Rows of a table, and its dtype."""

    num_rows: int
    dtype: torch.dtype


class Total(NamedTuple):
    """Pairs in all, or rows."""

    total: int


class Combined(NamedTuple):
    """`[S, F]`."""

    output: Tensor


class Collected(NamedTuple):
    """`[B, F]` or `[B, L, F]`."""

    collected: Tensor


class Sums(NamedTuple):
    """`[R, D]`."""

    sums: Tensor


class Result(NamedTuple):
    """`[total]`."""

    result: Tensor


def sum_dtype(x: Lookups) -> torch.dtype:
    """Return the dtype that PyTorch gives the sum of rows and rows of the table."""
    return x.table.dtype if x.values is None else torch.promote_types(x.values.dtype, x.table.dtype)


def _of_combine(
    grads: Combined, x: Operands, out: Any, o: Combination, wanted: Mapping[str, torch.dtype], backend: str
) -> dict[str, Tensor]:
    grad, found = grads.output, {}
    is_sum = o.operation == "add"
    if "values" in wanted:
        found["values"] = grad if is_sum else COMBINE(Operands(grad, x.dense, x.offsets), o, backend).output
    if "dense" in wanted:
        shape = x.dense.shape
        factors = Factors(grad, None if is_sum else x.values, x.offsets)
        found["dense"] = COLLECT(factors, Collection(shape[1] if len(shape) == 3 else None), backend).collected
    return found


def _of_collect(
    grads: Collected, x: Factors, out: Any, o: Collection, wanted: Mapping[str, torch.dtype], backend: str
) -> dict[str, Tensor]:
    total = x.values.shape[0]
    if x.factor is None:
        return {"values": COMBINE(Operands(None, grads.collected, x.offsets), Combination(total, "add"), backend).output}
    others = {"values": x.factor, "factor": x.values}
    return {
        name: COMBINE(Operands(others[name], grads.collected, x.offsets), Combination(total, "mul"), backend).output
        for name in wanted
    }


def _of_cross(
    grads: Combined, x: Crossed, out: Any, o: Crossing, wanted: Mapping[str, torch.dtype], backend: str
) -> dict[str, Tensor]:
    grad, width, found = grads.output, x.context.shape[1], {}
    if "values" in wanted:
        found["values"] = CROSS(Crossed(grad, x.context, x.own, x.offsets, None), Crossing(False), backend).output
    if "residual" in wanted:
        found["residual"] = grad
    if "own" in wanted:
        of_own = grad[:, width:]
        found["own"] = of_own * x.values[:, width:] + of_own if o.adds_factor else of_own * x.values[:, width:]
    if "context" in wanted:
        of_context, sums = grad[:, :width], Collection(None)
        found["context"] = COLLECT(Factors(of_context, x.values[:, :width], x.offsets), sums, backend).collected
        if o.adds_factor:
            found["context"] = found["context"] + COLLECT(Factors(of_context, None, x.offsets), sums, backend).collected
    return found


def _of_add_rows(
    grads: Combined, x: Lookups, out: Any, o: Nothing, wanted: Mapping[str, torch.dtype], backend: str
) -> dict[str, Tensor]:
    found = {"values": grads.output}
    if "table" in wanted:
        found["table"] = INDEX_SUMS(Terms(grads.output, x.places), Table(x.table.shape[0], wanted["table"]), backend).sums
    return found


def _of_index_sums(
    grads: Sums, x: Terms, out: Any, o: Table, wanted: Mapping[str, torch.dtype], backend: str
) -> dict[str, Tensor]:
    return {"terms": ADD_ROWS(Lookups(None, grads.sums, x.places), Nothing(), backend).output}


def _of_difference(
    grads: Result, x: Scores, out: Any, o: Total, wanted: Mapping[str, torch.dtype], backend: str
) -> dict[str, Tensor]:
    inputs = Differences(grads.result, x.offsets)
    return {"values": PAIRWISE_DIFFERENCE_BACKWARD(inputs, Total(x.values.shape[0]), backend).result}


def _of_difference_backward(
    grads: Result, x: Differences, out: Any, o: Total, wanted: Mapping[str, torch.dtype], backend: str
) -> dict[str, Tensor]:
    return {"pairs": PAIRWISE_DIFFERENCE(Scores(grads.result, x.offsets), Total(x.pairs.shape[0]), backend).result}


def _activation_gradients(
    grads: Combined, x: Hidden, out: Combined, o: Activating, wanted: Mapping[str, torch.dtype]
) -> dict[str, Tensor]:
    shapes = {"values": grads.output.shape, "context": x.context.shape}
    return {name: grads.output.new_empty(shapes[name]) for name in wanted}


_TORCH, _TRITON = "jagged.ops.elementwise.torch_impl", "jagged.ops.elementwise.kernels"

COMBINE = operator(
    "jagged_dense_combine",
    Operands,
    Combination,
    Combined,
    shapes=lambda x, o: Combined(x.dense.new_empty(o.total, x.dense.shape[-1])),
    torch=f"{_TORCH}:combine",
    triton=f"{_TRITON}:combine",
    gradient=_of_combine,
    saved=lambda o: ("offsets",) if o.operation == "add" else Operands._fields,
    promotes=("values", "dense"),
)
COLLECT = operator(
    "jagged_dense_collect",
    Factors,
    Collection,
    Collected,
    shapes=lambda x, o: Collected(
        x.values.new_empty(x.offsets.shape[0] - 1, *(() if o.length is None else (o.length,)), x.values.shape[1])
    ),
    torch=f"{_TORCH}:collect",
    triton=f"{_TRITON}:collect",
    gradient=_of_collect,
    saved=Factors._fields,
)
CROSS = operator(
    "jagged_cross",
    Crossed,
    Crossing,
    Combined,
    shapes=lambda x, o: Combined(x.values.new_empty(x.values.shape)),
    torch=f"{_TORCH}:cross",
    triton="jagged.ops.elementwise.cross_kernels:cross",
    gradient=_of_cross,
    saved=("values", "context", "own", "offsets"),
    promotes=("values", "context", "own", "residual"),
)
ADD_ROWS = operator(
    "add_rows",
    Lookups,
    Nothing,
    Combined,
    shapes=lambda x, o: Combined(x.table.new_empty(x.places.shape[0], x.table.shape[1], dtype=sum_dtype(x))),
    torch=f"{_TORCH}:add_rows",
    triton="jagged.ops.elementwise.row_kernels:add_rows",
    gradient=_of_add_rows,
    saved=("places",),
)
INDEX_SUMS = operator(
    "index_sums",
    Terms,
    Table,
    Sums,
    shapes=lambda x, o: Sums(x.terms.new_empty(o.num_rows, x.terms.shape[1], dtype=o.dtype)),
    torch=f"{_TORCH}:index_sums",
    triton="jagged.ops.elementwise.row_kernels:index_sums",
    gradient=_of_index_sums,
    saved=("places",),
)
# Where relu's output is positive its slope is one, so that the rows need not be kept.
ACTIVATE = operator(
    "jagged_activate",
    Hidden,
    Activating,
    Combined,
    shapes=lambda x, o: Combined(x.values.new_empty(x.values.shape)),
    torch=f"{_TORCH}:activate,activate_backward",
    triton=f"{_TRITON}:activate,activate_backward",
    saved=lambda o: ("context", "offsets", "output" if o.activation == "relu" else "values"),
    title="jagged_linear with context and activation",
    gradient_shapes=_activation_gradients,
)
PAIRWISE_DIFFERENCE = operator(
    "jagged_pairwise_difference",
    Scores,
    Total,
    Result,
    shapes=lambda x, o: Result(x.values.new_empty(o.total)),
    torch=f"{_TORCH}:pairwise_difference",
    triton=f"{_TRITON}:pairwise_difference",
    gradient=_of_difference,
    saved=("offsets",),
)
PAIRWISE_DIFFERENCE_BACKWARD = operator(
    "jagged_pairwise_difference_backward",
    Differences,
    Total,
    Result,
    shapes=lambda x, o: Result(x.pairs.new_empty(o.total)),
    torch=f"{_TORCH}:pairwise_difference_backward",
    triton=f"{_TRITON}:pairwise_difference_backward",
    gradient=_of_difference_backward,
    saved=("offsets",),
)
