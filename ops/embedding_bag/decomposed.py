"""Bags of separate tables in PyTorch's own operators, for programs that are exported.

Which feature reads which table is a tensor to the operator, and has to be numbers here: `put_numbers` puts an operator with these
in its place, which is then taken apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from jagged.ops.embedding_bag.fields import FEATURE, OfFeature
from jagged.ops.embedding_bag.spec import SEPARATE_EMBEDDING_BAGS, SeparateInputs, SeparateOptions

#: The operator with numbers.
NAME = "jagged::pooled_tables"
#: That which it stands for.
OPERATOR = SEPARATE_EMBEDDING_BAGS.dispatched
# Of a layout flattened, how many numbers a feature has.
_NUMBERS = len(FEATURE)

torch.library.define(
    NAME,
    "(Tensor[] tables, Tensor indices, Tensor offsets, Tensor? per_sample_weights, int[] layout, SymInt size, SymInt width, "
    "str output_dtype) -> Tensor",
)


def _fake(tables: Sequence[Tensor], indices: Tensor, *others: Any) -> Tensor:
    *_, size, width, output_dtype = others
    return indices.new_empty(size, width, dtype=getattr(torch, output_dtype))


torch.library.register_fake(NAME, _fake)


def put_numbers(node: Node, constants: Mapping[Node, Tensor]) -> None:
    """Let a call of the operator have its layout as numbers.

    Args:
        node: the call.
        constants: of the program's constant inputs.

    Raises:
        ValueError: tables of 8 bits, or features with batches of their own.
    """
    count = len(SeparateInputs._fields)
    given: tuple[Any, ...] = node.args
    x, o = SeparateInputs(*given[:count]), SeparateOptions(*given[count:-1])
    if x.scales is not None:
        raise ValueError("embedding_bags: tables of 8 bits cannot be exported without jagged; export the model they were made of")
    if x.batches is not None:
        raise ValueError("embedding_bags: features with batches of their own cannot be exported without jagged; give them one")
    layout = constants[given[SeparateInputs._fields.index("host_layout")]].flatten().tolist()
    node.target = torch.ops.jagged.pooled_tables.default
    node.args = (x.tables, x.indices, x.offsets, x.per_sample_weights, layout, o.size, o.width, o.output_dtype)


def pooled_tables(
    tables: Sequence[Tensor],
    indices: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None,
    layout: Sequence[int],
    size: int,
    width: int,
    output_dtype: str,
) -> Tensor:
    """Pool the bags of each feature, and put them side by side."""
    features = [OfFeature(*layout[begin : begin + _NUMBERS]) for begin in range(0, len(layout), _NUMBERS)]
    num_bags = (offsets.shape[0] - 1) // len(features)
    firsts = torch.arange(len(features) + 1, device=offsets.device) * num_bags
    counts = offsets.index_select(0, firsts).diff().tolist()
    for count in counts:
        torch._check(count >= 0)
    ids = indices.split(counts)
    samples = [None] * len(features) if per_sample_weights is None else per_sample_weights.split(counts)
    pooled = []
    for number, (feature, of_feature, weights) in enumerate(zip(features, ids, samples, strict=True)):
        ends = offsets.narrow(0, number * num_bags, num_bags + 1)
        pooled.append(_pooled(tables[feature.table], of_feature, ends - ends[:1], weights, is_mean=bool(feature.is_mean)))
    return torch.cat(pooled, 1).to(getattr(torch, output_dtype))


def _pooled(table: Tensor, ids: Tensor, ends: Tensor, weights: Tensor | None, *, is_mean: bool) -> Tensor:
    wide = torch.promote_types(table.dtype, torch.float32)
    if table.dtype != wide:
        # PyTorch rounds what it pools to the dtype of the table.
        table, ids = table.index_select(0, ids).to(wide), torch.arange(ids.shape[0], device=ids.device, dtype=ids.dtype)
    weights = None if weights is None else weights.to(wide)
    return torch.embedding_bag(table, ids, ends.to(ids.dtype), False, int(is_mean), False, weights, True, None)[0]
