"""What the kernels' launches are given."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from jagged.ops._shared.matrices import gpu, products_of
from jagged.ops.cross_entropy.triton.configurations import Configuration, configuration


class Rows(NamedTuple):
    """What backward's kernels are given of rows, by `prepare_rows`; nothing of it depends on another load.

    `hidden` `[N, D]` has zeros in ignored rows; `target` is int32, -1 where there is no such item; `shift` is that of
    `exponentials`, infinite in ignored rows; gradients are by logits before the temperature, and divided by `inverse_scale`
    where there is one.
    """

    hidden: Tensor
    target: Tensor
    shift: Tensor
    grad_softmax: Tensor
    grad_target: Tensor
    grad_smoothed: Tensor | None
    inverse_scale: Tensor | None


class Items(NamedTuple):
    """What backward is given of items: `weight` `[V, D]` as `aligned` makes it, vectors `[V]`, and how logits are shaped."""

    weight: Tensor
    bias: Tensor | None
    scale: Tensor | None
    smoothing: Tensor | None
    temperature: float
    softcap: float | None


class Kept(NamedTuple):
    """Which tiles a filtered gradient is made of, of items in an order.

    Attributes:
        order: `[V]` int32: items by place.
        tiles: `[blocks, most]` int32: for each block of a side, tiles of the other that count, in their order.
        counts: `[blocks]` int32: how many there are.
        own: rows, or places of items, of a block: no fewer than a program owns.
        other: rows, or places, of a tile: no fewer than a program takes in a step.
    """

    order: Tensor
    tiles: Tensor
    counts: Tensor
    own: int
    other: int


class Filter(NamedTuple):
    """A filter of one backward pass, before it is known which tiles count.

    Attributes:
        order: of the items, as `Kept` has it.
        of_hidden: `[]` float32, the gradient of a logit from which a tile counts for hidden's gradient; None for an exact one, or
            one that is not wanted.
        of_weight: the same for weight's.
        pays: `[1]` int32 on the device: 1 where both go along their tiles, 0 where they are exact; None before it is decided,
            when all tiles that count are listed.
    """

    order: Tensor
    of_hidden: Tensor | None
    of_weight: Tensor | None
    pays: Tensor | None


def tile_for(kernel: str, hidden: Tensor, *, is_scaled: bool = False) -> Configuration:
    """Return the tile of a kernel for hidden states, and for weights that are scaled or not."""
    return configuration(kernel, hidden.shape[1], hidden.dtype, gpu(hidden.device).capability, is_scaled=is_scaled)


def constants(tile: Configuration, hidden: Tensor) -> dict[str, Any]:
    """Return the compile-time arguments that every kernel has."""
    return {
        "BLOCK_N": tile.rows,
        "BLOCK_V": tile.items,
        "BLOCK_K": tile.step,
        "WIDTH": hidden.shape[1],
        "PRECISION": products_of(hidden.dtype),
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
