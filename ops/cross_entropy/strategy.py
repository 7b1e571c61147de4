"""Which way backward takes: by bytes, and by what was measured faster."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch

from jagged.ops.cross_entropy.hopper import is_hopper
from jagged.ops.cross_entropy.spec import MEMORY_BUDGET

StrategyName = Literal["auto", "fused", "chunked"]
STRATEGIES = get_args(StrategyName)
# Width of the hidden states from which chunks were measured faster, by bytes of an element.
CHUNKED_FROM = {2: 257, 4: 257}
# What is more is hardly faster.
BUFFER_BYTES = 128 * 2**20
# Chunks of fewer items have too little to multiply; the BLAS likes multiples.
FEWEST_ITEMS, MULTIPLE = 256, 128
# Items of a tile of the kernel that writes gradients of logits without the logits.
DIRECT_MULTIPLE = 256


def chunk_items_of(
    num_rows: int,
    num_items: int,
    width: int,
    dtype: torch.dtype,
    *,
    strategy: str,
    memory_budget: int,
    is_direct: bool = False,
) -> int:
    """Return how many items a chunk of the backward pass has, 0 for the fused kernels.

    If `is_direct` gradients of logits come without the logits, which leaves room for more items.
    """
    if strategy == "fused" or (strategy == "auto" and width < CHUNKED_FROM[dtype.itemsize]):
        return 0
    left = memory_budget - _bytes_of_rows(num_rows, width, dtype)
    multiple = DIRECT_MULTIPLE if is_direct else MULTIPLE
    bytes_of_item = _bytes_of_item(num_rows, width, dtype, is_direct=is_direct)
    chunk = min(BUFFER_BYTES, left) // max(1, bytes_of_item) // multiple * multiple
    if strategy == "chunked":
        chunk = max(chunk, multiple)
    return min(chunk, num_items) if chunk >= min(FEWEST_ITEMS, num_items) or strategy == "chunked" else 0


class Strategy(NamedTuple):
    """What backward does: `name`, items of a chunk (0 without), and bytes that the chunks take beside the gradients."""

    name: Literal["fused", "chunked"]
    chunk_items: int
    chunk_bytes: int


def linear_cross_entropy_strategy(
    num_rows: int,
    num_items: int,
    width: int,
    dtype: torch.dtype,
    *,
    memory_budget: int = MEMORY_BUDGET,
    device: torch.device | str | None = None,
    is_plain: bool = True,
) -> Strategy:
    """Return what `linear_cross_entropy` with `strategy="auto"` does on a GPU, from sizes alone.

    Args:
        num_rows: N.
        num_items: V.
        width: D.
        dtype: of the products: that of hidden and weight, or autocast's.
        memory_budget: bytes.
        device: of the hidden states. None leaves out kernels that only some GPUs have: those for compute capability 9.0 keep no
            logits of plain 16-bit losses, so that more items fit into a chunk.
        is_plain: whether the loss has no bias, softcap, normalisation and label smoothing.

    Example:
        >>> import torch
        >>> from jagged.ops import linear_cross_entropy_strategy
        >>> linear_cross_entropy_strategy(8192, 100_000, 64, torch.bfloat16).name
        'fused'
    """
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"dtype: expected float32, bfloat16 or float16, which the kernels take, got {dtype}")
    is_direct = is_plain and dtype.itemsize == 2 and device is not None and is_hopper(torch.device(device))
    chunk_items = chunk_items_of(
        num_rows,
        num_items,
        width,
        dtype,
        strategy="auto",
        memory_budget=memory_budget,
        is_direct=is_direct,
    )
    if not chunk_items:
        return Strategy("fused", 0, 0)
    bytes_of_item = _bytes_of_item(num_rows, width, dtype, is_direct=is_direct)
    return Strategy("chunked", chunk_items, _bytes_of_rows(num_rows, width, dtype) + chunk_items * bytes_of_item)


def _bytes_of_rows(num_rows: int, width: int, dtype: torch.dtype) -> int:
    """Hidden's gradient in float32, and hidden states without what ignored rows hold."""
    return num_rows * width * (4 + dtype.itemsize)


def _bytes_of_item(num_rows: int, width: int, dtype: torch.dtype, *, is_direct: bool = False) -> int:
    """A column of the products and of the gradients that are made of them, and a row of weight's gradient in float32."""
    products = 0 if is_direct or dtype.itemsize == 4 else 4
    return num_rows * (products + dtype.itemsize) + width * 4
