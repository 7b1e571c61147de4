"""Where a program works: its sample, its head, and the rows that it loads and stores."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from jagged.ops._shared.device import find_tile, load_segment


class Sample(NamedTuple):
    """Of a program: its sample, its query head, and where the sample's rows begin and how many there are.

    Query i stands at key position `i + shift`: the last query at the last key. Positions from `history` on are targets.
    """

    index: Any
    head: Any
    start: Any
    key_start: Any
    query_length: Any
    key_length: Any
    shift: Any
    history: Any


class Rows(NamedTuple):
    """A sample's rows of one head: a pointer to the first, or a descriptor for the tensor memory accelerator."""

    source: Any
    stride: Any


@triton.jit
def find_rows(offsets, num_samples, total, BLOCK: tl.constexpr, APART: tl.constexpr):
    """Return a program's sample, the first row and the length of it, and where in it the program's tile begins."""
    index, start, length, first = find_tile(offsets, tl.program_id(0), num_samples, total, BLOCK, APART)
    return index, start, length.to(tl.int32), first.to(tl.int32)


@triton.jit
def find_others(offsets, index, total, start, length):
    """Return the first row and the length of a sample's other rows; without offsets of their own they are its rows."""
    if offsets is not None:
        start, end = load_segment(offsets, index, total)
        length = (end - start).to(tl.int32)
    return start, length


@triton.jit
def sample_of(index, head, start, query_length, key_start, key_length, num_targets):
    """Return what is known of a sample, for a query head."""
    history = key_length
    if num_targets is not None:
        targets = tl.load(num_targets + index).to(tl.int64)
        history -= tl.minimum(tl.maximum(targets, 0), key_length).to(tl.int32)
    return Sample(index, head, start, key_start, query_length, key_length, key_length - query_length, history)


@triton.jit
def of_head(sample, head):
    """Return the same sample for another query head."""
    return Sample(
        sample.index, head, sample.start, sample.key_start, sample.query_length, sample.key_length, sample.shift, sample.history
    )  # fmt: skip


@triton.jit
def rows_source(
    tensor, length, row_stride, USE_TMA: tl.constexpr, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Return what `load_rows` loads a sample's rows from."""
    if USE_TMA:
        shape = [tl.maximum(length, 1), HEAD_DIM]
        return tl.make_tensor_descriptor(tensor, shape, [row_stride.to(tl.int64), 1], [BLOCK, BLOCK_D])
    else:
        return tensor


@triton.jit
def load_rows(
    rows, first, length, IS_WHOLE: tl.constexpr, USE_TMA: tl.constexpr,
    BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Load rows `first ..` of a sample, `[BLOCK, BLOCK_D]`.

    Rows that it does not have are zeros by TMA. By pointers its last row stands in for them, unless the tile `IS_WHOLE`.
    """
    if USE_TMA:
        return rows.source.load([first, 0])
    else:
        return load_by_pointers(rows, first, length, IS_WHOLE, BLOCK, HEAD_DIM, BLOCK_D)


@triton.jit
def load_by_pointers(
    rows, first, length, IS_WHOLE: tl.constexpr, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Load rows `first ..` of a sample, `[BLOCK, BLOCK_D]`; unless the tile is whole, the last row stands in for missing ones."""
    index = tl.arange(0, BLOCK)
    columns = tl.arange(0, BLOCK_D)
    source = rows.source
    if IS_WHOLE:
        source += tl.cast(first, tl.int64) * rows.stride
    else:
        index = tl.minimum(first + index, length - 1)
    addresses = source + (index.to(tl.int64)[:, None] * rows.stride + columns[None, :])
    return tl.load(addresses) if HEAD_DIM == BLOCK_D else tl.load(addresses, mask=columns[None, :] < HEAD_DIM, other=0.0)


@triton.jit
def stride_of_values(row_stride, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr):
    """Return the row stride of a contiguous result as wide as values, beside that of one with as many heads of HEAD_DIM."""
    if VALUE_DIM == HEAD_DIM:
        return row_stride
    else:
        return tl.num_programs(1) * VALUE_DIM


@triton.jit
def store_rows(rows, tile, first, length, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store the rows of `[BLOCK, BLOCK_D]` that the sample has, from row `first` of it on."""
    index = first + tl.arange(0, BLOCK)
    columns = tl.arange(0, BLOCK_D)
    addresses = rows.source + index.to(tl.int64)[:, None] * rows.stride + columns[None, :]
    mask = (index < length)[:, None]
    if HEAD_DIM != BLOCK_D:
        mask = mask & (columns[None, :] < HEAD_DIM)
    tl.store(addresses, tile.to(rows.source.dtype.element_ty), mask=mask)
