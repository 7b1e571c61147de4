"""Small operators that use all that a declaration can say, and their implementations; for test_operator.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jagged.ops._shared.operator import Absent, Differentiable, OnHost, operator

HERE = "tests.ops.operator_examples"


class Inputs(NamedTuple):
    values: Differentiable
    offsets: Tensor
    weights: Differentiable | None
    constant: Tensor | None = None


class Options(NamedTuple):
    scale: float = 1.0
    mean: bool = False
    sizes: tuple[int, ...] = ()
    limit: int | None = None


class Outputs(NamedTuple):
    sums: Tensor
    counts: Tensor


def _rows(x: Inputs) -> Tensor:
    return torch.repeat_interleave(x.offsets.diff(), output_size=x.values.shape[0])


def _factor(o: Options, counts: Tensor) -> Tensor:
    return o.scale / counts.clamp(min=1) if o.mean else torch.full_like(counts, o.scale)


def forward(x: Inputs, o: Options) -> Outputs:
    # A product that autocast would make in another dtype.
    counts = (x.values.new_ones(1, x.values.shape[0]) @ torch.nn.functional.one_hot(_rows(x), len(x.offsets) - 1).to(x.values))[0]
    rows = x.values if x.weights is None else x.values * x.weights[:, None]
    sums = x.values.new_zeros(x.offsets.shape[0] - 1, x.values.shape[1]).index_add_(0, _rows(x), rows)
    if x.constant is not None:
        sums = sums + x.constant
    return Outputs(sums * _factor(o, counts)[:, None], counts)


def backward(grads: Any, x: Inputs, out: Outputs, o: Options, wanted: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
    assert grads.sums is not None
    spread = (grads.sums * _factor(o, out.counts)[:, None])[_rows(x)]
    found = {}
    if "values" in wanted:
        found["values"] = spread if x.weights is None else spread * x.weights[:, None]
    if "weights" in wanted:
        found["weights"] = (spread * x.values).sum(1)
    return found


SEGMENT_SUM = operator(
    "example_segment_sum",
    Inputs,
    Options,
    Outputs,
    shapes=lambda x, o: Outputs(
        x.values.new_empty(x.offsets.shape[0] - 1, x.values.shape[1]), x.values.new_empty(x.offsets.shape[0] - 1)
    ),
    torch=f"{HERE}:forward,backward",
    triton=f"{HERE}:forward,backward",
    autocast=lambda o: ("weights",) if o.limit else ("values", "weights"),
    title=lambda o: "example_mean" if o.mean else "example_sum",
)


class Parts(NamedTuple):
    parts: tuple[Differentiable, ...]
    factor: Differentiable


class NoOptions(NamedTuple):
    pass


class Joined(NamedTuple):
    joined: Tensor


def join(x: Parts, o: NoOptions) -> Joined:
    return Joined(torch.cat(x.parts) * x.factor)


def _of_join(grads: Joined, x: Parts, out: Any, o: NoOptions, wanted: Mapping[str, torch.dtype], backend: str) -> dict[str, Any]:
    assert isinstance(out.joined, Absent)
    assert out.joined.shape == grads.joined.shape
    found: dict[str, Any] = {}
    if "parts" in wanted:
        found["parts"] = (grads.joined * x.factor).split([part.shape[0] for part in x.parts])
    if "factor" in wanted:
        found["factor"] = (grads.joined * torch.cat(x.parts)).sum(0)
    return found


JOIN = operator(
    "example_join",
    Parts,
    NoOptions,
    Joined,
    shapes=lambda x, o: Joined(x.factor.new_empty(sum(part.shape[0] for part in x.parts), *x.factor.shape)),
    torch=f"{HERE}:join",
    triton=f"{HERE}:join",
    gradient=_of_join,
    saved=("parts", "factor"),
)


class Whole(NamedTuple):
    values: Differentiable
    factor: Differentiable


class Sizes(NamedTuple):
    sizes: tuple[int, ...]
    shift: int | float = 0


class Pieces(NamedTuple):
    pieces: tuple[Tensor, ...]


def cut(x: Whole, o: Sizes) -> Pieces:
    return Pieces(tuple(piece.add(o.shift).mul_(x.factor) for piece in x.values.split(o.sizes)))


def _of_cut(grads: Pieces, x: Whole, out: Pieces, o: Sizes, wanted: Mapping[str, torch.dtype], backend: str) -> dict[str, Any]:
    pieces = zip(grads.pieces, out.pieces, strict=True)
    grad = torch.cat([x.values.new_zeros(like.shape) if grad is None else grad for grad, like in pieces])
    return {"values": grad * x.factor, "factor": (grad * (x.values + o.shift)).sum(0)}


CUT = operator(
    "example_cut",
    Whole,
    Sizes,
    Pieces,
    shapes=lambda x, o: Pieces(tuple(x.values.new_empty(size, *x.values.shape[1:]) for size in o.sizes)),
    torch=f"{HERE}:cut",
    triton=f"{HERE}:cut",
    gradient=_of_cut,
    saved=("values", "factor"),
    promotes=("values", "factor"),
)


class Update(NamedTuple):
    table: Tensor
    rows: Tensor
    values: Tensor


class Nothing(NamedTuple):
    pass


def update(x: Update, o: Options) -> Nothing:
    x.table.index_add_(0, x.rows, x.values, alpha=o.scale)
    return Nothing()


UPDATE = operator(
    "example_update",
    Update,
    Options,
    Nothing,
    shapes=lambda x, o: Nothing(),
    torch=f"{HERE}:update",
    triton=f"{HERE}:update",
    mutates=("table",),
)


class Scaled(NamedTuple):
    scaled: Tensor


class Factor(NamedTuple):
    """Values that are multiplied by a number on the host."""

    values: Differentiable
    factor: OnHost


class FactorOptions(NamedTuple):
    is_checked: bool = True


def scale(x: Factor, o: FactorOptions) -> Scaled:
    return Scaled(x.values * x.factor)


SCALE = operator(
    "example_scale",
    Factor,
    FactorOptions,
    Scaled,
    shapes=lambda x, o: Scaled(x.values.new_empty(x.values.shape)),
    torch=f"{HERE}:scale",
    triton=f"{HERE}:scale",
    gradient=lambda grads, x, out, o, wanted, backend: {"values": grads.scaled * x.factor},
    saved=("factor",),
    unchecked=lambda o: () if o.is_checked else ("factor",),
)


class Gathered(NamedTuple):
    rows: Tensor


class Lookup(NamedTuple):
    table: Differentiable
    ids: Tensor


def gather(x: Lookup, o: NoOptions) -> Gathered:
    return Gathered(x.table[x.ids])


def gather_backward(
    grads: Gathered, x: Lookup, out: Gathered, o: NoOptions, wanted: Mapping[str, torch.dtype]
) -> dict[str, Tensor]:
    return {"table": grads.rows.clone(), "places": x.ids.clone()}


def _sparse(found: Mapping[str, Any], x: Lookup, o: NoOptions, wanted: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
    shape = x.table.shape
    return {"table": torch.sparse_coo_tensor(found["places"][None], found["table"], shape, check_invariants=False)}


LOOKUP = operator(
    "example_lookup",
    Lookup,
    NoOptions,
    Gathered,
    shapes=lambda x, o: Gathered(x.table.new_empty(x.ids.shape[0], x.table.shape[1])),
    torch=f"{HERE}:gather,gather_backward",
    triton=f"{HERE}:gather,gather_backward",
    saved=("table", "ids"),
    extra=("places",),
    gradient_shapes=lambda grads, x, out, o, wanted: {
        "table": grads.rows.new_empty(grads.rows.shape),
        "places": x.ids.new_empty(x.ids.shape),
    },
    finish=_sparse,
)
