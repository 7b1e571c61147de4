"""The operators of products: of rows with their sample's matrix, of rows with rows, and over the pairs of rows of each sample.

The gradients of each are made of these, so all orders are right.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from jagged.ops._shared.operator import Differentiable, Operator, operator

Wanted = Mapping[str, torch.dtype]


class DenseInputs(NamedTuple):
    """Rows `[S, D]`, offsets `[B + 1]`, a matrix for each sample `[B, D, T]`, and what is added to its rows `[B, T]`."""

    values: Differentiable
    offsets: Tensor
    dense: Differentiable
    bias: Differentiable | None = None


class Rows(NamedTuple):
    """`[S, T]`."""

    rows: Tensor


class JaggedInputs(NamedTuple):
    """Rows `[S, D]` and `[S, T]`, and their offsets `[B + 1]`."""

    a: Differentiable
    b: Differentiable
    offsets: Tensor


class Sums(NamedTuple):
    """Of each sample's outer products, `[B, D, T]`."""

    sums: Tensor


class Options(NamedTuple):
    """None."""


class PairInputs(NamedTuple):
    """Rows `[Sa, D]` and `[Sb, D]`, and the offsets `[B + 1]` of each; the same tensor for square blocks."""

    a: Differentiable
    b: Differentiable
    a_offsets: Tensor
    b_offsets: Tensor


class PairOptions(NamedTuple):
    """How many pairs there are."""

    num_pairs: int


class Scores(NamedTuple):
    """Of each sample's pairs, block by block, `[num_pairs]`."""

    scores: Tensor


class WeightedInputs(NamedTuple):
    """Scores `[P]`, the rows `[S, D]` that they weight, and the offsets `[B + 1]` of the blocks' rows and columns."""

    scores: Differentiable
    values: Differentiable
    a_offsets: Tensor
    b_offsets: Tensor


class WeightedOptions(NamedTuple):
    """How many rows come out, and whether they are the columns of the blocks."""

    output_total: int
    transposed: bool


class WeightedSums(NamedTuple):
    """`[output_total, D]`."""

    sums: Tensor


def _of_dense_bmm(grads: Rows, x: DenseInputs, out: Rows, o: Options, wanted: Wanted, backend: str) -> dict[str, Tensor]:
    found = {}
    if "values" in wanted:
        found["values"] = DENSE_BMM(DenseInputs(grads.rows, x.offsets, x.dense.transpose(1, 2)), o, backend).rows
    if "dense" in wanted:
        found["dense"] = JAGGED_BMM(JaggedInputs(x.values, grads.rows, x.offsets), o, backend).sums
    if "bias" in wanted:
        # A product reads each gradient once, and these ones from one number.
        ones = grads.rows.new_ones(1, 1).expand(grads.rows.shape[0], 1)
        found["bias"] = JAGGED_BMM(JaggedInputs(ones, grads.rows, x.offsets), o, backend).sums.squeeze(1)
    return found


def _of_jagged_bmm(grads: Sums, x: JaggedInputs, out: Sums, o: Options, wanted: Wanted, backend: str) -> dict[str, Tensor]:
    found = {}
    if "a" in wanted:
        found["a"] = DENSE_BMM(DenseInputs(x.b, x.offsets, grads.sums.transpose(1, 2)), o, backend).rows
    if "b" in wanted:
        found["b"] = DENSE_BMM(DenseInputs(x.a, x.offsets, grads.sums), o, backend).rows
    return found


def _of_pair_scores(grads: Scores, x: PairInputs, out: Scores, o: PairOptions, wanted: Wanted, backend: str) -> dict[str, Tensor]:
    found = {}
    for name, values, transposed in (("a", x.b, False), ("b", x.a, True)):
        if name in wanted:
            inputs = WeightedInputs(grads.scores, values, x.a_offsets, x.b_offsets)
            options = WeightedOptions(getattr(x, name).shape[0], transposed)
            found[name] = PAIR_SUMS(inputs, options, backend).sums
    return found


def _of_pair_sums(
    grads: WeightedSums, x: WeightedInputs, out: WeightedSums, o: WeightedOptions, wanted: Wanted, backend: str
) -> dict[str, Tensor]:
    found = {}
    if "scores" in wanted:
        a, b = (x.values, grads.sums) if o.transposed else (grads.sums, x.values)
        found["scores"] = PAIR_SCORES(PairInputs(a, b, x.a_offsets, x.b_offsets), PairOptions(x.scores.shape[0]), backend).scores
    if "values" in wanted:
        options = WeightedOptions(x.values.shape[0], not o.transposed)
        found["values"] = PAIR_SUMS(x._replace(values=grads.sums), options, backend).sums
    return found


DENSE_BMM: Operator[DenseInputs, Options, Rows] = operator(
    "jagged_dense_bmm",
    DenseInputs,
    Options,
    Rows,
    shapes=lambda x, o: Rows(x.values.new_empty(x.values.shape[0], x.dense.shape[2])),
    torch="jagged.ops.bmm.torch_impl:jagged_dense_bmm",
    triton="jagged.ops.bmm.kernels:jagged_dense_bmm",
    gradient=_of_dense_bmm,
    saved=("values", "offsets", "dense"),
    autocast=("values", "dense", "bias"),
)
JAGGED_BMM: Operator[JaggedInputs, Options, Sums] = operator(
    "jagged_jagged_bmm",
    JaggedInputs,
    Options,
    Sums,
    shapes=lambda x, o: Sums(x.a.new_empty(x.offsets.shape[0] - 1, x.a.shape[1], x.b.shape[1])),
    torch="jagged.ops.bmm.torch_impl:jagged_jagged_bmm",
    triton="jagged.ops.bmm.kernels:jagged_jagged_bmm",
    gradient=_of_jagged_bmm,
    saved=JaggedInputs._fields,
    autocast=("a", "b"),
)
PAIR_SCORES: Operator[PairInputs, PairOptions, Scores] = operator(
    "pair_scores",
    PairInputs,
    PairOptions,
    Scores,
    shapes=lambda x, o: Scores(x.a.new_empty(o.num_pairs)),
    torch="jagged.ops.bmm.torch_impl:pair_scores",
    triton="jagged.ops.bmm.pair_kernels:pair_scores",
    gradient=_of_pair_scores,
    saved=PairInputs._fields,
    autocast=("a", "b"),
    title="jagged_jagged_bmm_jagged_out",
)
PAIR_SUMS: Operator[WeightedInputs, WeightedOptions, WeightedSums] = operator(
    "pair_sums",
    WeightedInputs,
    WeightedOptions,
    WeightedSums,
    shapes=lambda x, o: WeightedSums(x.values.new_empty(o.output_total, x.values.shape[1])),
    torch="jagged.ops.bmm.torch_impl:pair_sums",
    triton="jagged.ops.bmm.pair_kernels:pair_sums",
    gradient=_of_pair_sums,
    saved=WeightedInputs._fields,
    autocast=("scores", "values"),
    title="array_jagged_bmm_jagged_out",
)
