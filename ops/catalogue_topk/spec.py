"""The operator of top-k over a catalogue."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from jagged.ops._shared.operator import operator


class Inputs(NamedTuple):
    """Hidden states `[N, D]`, weights `[V, D]`, a bias `[V]`; ids `[M]` that rows must not get, and where each row's begin."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    exclude_ids: Tensor | None
    exclude_offsets: Tensor | None


class Options(NamedTuple):
    """How many items, and a bound on the memory that grows with rows times items."""

    k: int
    max_bytes: int


class Best(NamedTuple):
    """Scores and ids `[N, k]` of the best items; -inf and -1 where fewer are left."""

    scores: Tensor
    ids: Tensor


def _shapes(x: Inputs, o: Options) -> Best:
    shape, dtype = (x.hidden.shape[0], o.k), torch.float64 if x.hidden.dtype == torch.float64 else torch.float32
    return Best(x.hidden.new_empty(shape, dtype=dtype), x.hidden.new_empty(shape, dtype=torch.int64))


CATALOGUE_TOPK = operator(
    "catalogue_topk",
    Inputs,
    Options,
    Best,
    shapes=_shapes,
    torch="jagged.ops.catalogue_topk.torch_impl:catalogue_topk",
    triton="jagged.ops.catalogue_topk.kernels:catalogue_topk",
)
