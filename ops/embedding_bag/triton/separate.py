"""Tables that lie anywhere, read in place by the kernels of one storage: by starts that are counted from the lowest address."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TypeAlias

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from jagged.ops.embedding_bag.fields import FEATURE
from jagged.ops.embedding_bag.layout import ALIGNMENT
from jagged.ops.embedding_bag.spec import Inputs, Options, Outputs, SeparateInputs, SeparateOptions, joined
from jagged.ops.embedding_bag.triton import launch

# Layouts that are kept for each: tables stay where they are for as long as a model is served.
MOST_KEPT = 8

_Kept: TypeAlias = dict[tuple[torch.device, tuple[int, ...]], Tensor]
#: By a layout on the host, by device and starts, the layout for kernels.
_kept: MutableMapping[Tensor, _Kept] = WeakTensorKeyDictionary()


def forward(x: SeparateInputs, o: SeparateOptions) -> Outputs:
    """Launch the kernels of one storage."""
    tables = [table.contiguous() for table in x.tables]
    starts = starts_in_place(tables)
    if starts is None:
        weights, layout = joined(tables), x.layout
    else:
        weights, layout = tables[starts.index(0)], _moved(x, starts)
    return launch.forward(
        Inputs(
            weights, x.scales, x.indices, x.offsets, x.per_sample_weights, layout, x.batches, x.plan, *(None,) * 6, x.host_layout,
            x.host_batches,
        ),
        Options(o.size, o.width, o.output_dtype, o.programs, o.counted_rows),
    )  # fmt: skip


def starts_in_place(tables: list[Tensor]) -> tuple[int, ...] | None:
    """Return where each table begins, in elements from the lowest address; None where kernels cannot read them there.

    Kernels take starts for multiples of `ALIGNMENT`. Tables that PyTorch allocates begin at such ones; views need not. AMD's
    compiler may count addresses from a tensor's begin in 32 bits, where that tensor by itself is small.
    """
    if torch.version.hip is not None:
        return None
    places = [table.data_ptr() for table in tables]
    lowest, size = min(places), tables[0].element_size()
    if any((place - lowest) % (ALIGNMENT * size) for place in places):
        return None
    return tuple([(place - lowest) // size for place in places])


def _moved(x: SeparateInputs, starts: tuple[int, ...]) -> Tensor:
    """Return the layout for kernels with other starts; made once, as long as tables stay where they are."""
    kept = _kept.setdefault(x.host_layout, {})
    key = x.layout.device, starts
    found = kept.get(key)
    if found is None:
        of_features = torch.tensor(starts, dtype=torch.int64)[x.host_layout[:, FEATURE.table]]
        found = x.layout.clone()
        found[: len(of_features), FEATURE.start] = of_features.to(found.device)
        while len(kept) >= MOST_KEPT:
            del kept[next(iter(kept))]
        kept[key] = found
    return found
