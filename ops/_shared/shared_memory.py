"""Sums in shared memory, at places that a kernel computes: Triton has no scattered addition there.

They are the last bytes of a launch that has more shared memory than Triton counts, by as many as the kernel's constant
`SHARED_BYTES` says (`launch`), so a kernel need not know what Triton has itself. Loads and stores are PTX; where kernels are
interpreted, which no PTX is, the sums lie in a buffer, at the same places.

The samples of a column lie side by side, in quads: `SAMPLES` / 4 of them, quad u of samples 2u, 2u + 1, `SAMPLES` / 2 + 2u and
the one after that. A thread has these four of a product `[columns, samples]` by the matrix instructions, two by two, and its
neighbours the next three quads, so that one instruction takes four numbers of each thread and 64 bytes of each column. Of odd
columns the halves of 128 bytes change places: two columns in a row then have other banks as often as not.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged.ops._shared.backends import INTERPRETED as _INTERPRETED
from jagged.ops._shared.device import INTERPRETED


def shared_sums(like: Tensor, programs: int, num_columns: int, samples: int) -> dict[str, Any]:
    """Return the arguments `buffer` and `SHARED_BYTES` of a launch whose programs have sums of so many columns and samples."""
    buffer = like.new_empty(programs, num_columns * samples, dtype=torch.float32) if _INTERPRETED else None
    return {"buffer": buffer, "SHARED_BYTES": 4 * num_columns * samples}


@triton.jit
def sums_of_program(buffer, SHARED_BYTES: tl.constexpr):
    """Return where the program's sums begin: an address in shared memory, or in `buffer` where kernels are interpreted."""
    if INTERPRETED:
        sums = buffer + tl.program_id(0).to(tl.int64) * (SHARED_BYTES // 4)
    else:
        sums = tl.inline_asm_elementwise(
            "{ .reg .u32 begin, size; mov.u32 begin, global_smem; mov.u32 size, %dynamic_smem_size; add.u32 begin, begin, size;"
            " sub.u32 $0, begin, $1; }", "=r,r", [tl.full([], SHARED_BYTES, tl.int32)], tl.int32, True, 1,
        )  # fmt: skip
    return sums


@triton.jit
def begin_of(column, SAMPLES: tl.constexpr):
    """Return at which byte of the sums a column (int32) begins; what is added to it is added by `^`."""
    tl.static_assert(SAMPLES >= 16)
    begin = column * (4 * SAMPLES)
    if SAMPLES >= 32:
        begin += (column & 1) * 64
    return begin


@triton.jit
def places_of(sums, column, SAMPLES: tl.constexpr):
    """Return where the quads of some columns (int32) lie, `[COLUMN, SAMPLES / 4]`."""
    place = begin_of(column, SAMPLES)[:, None] ^ (tl.arange(0, SAMPLES // 4) * 16)[None, :]
    return sums + (place // 4 if INTERPRETED else place)


@triton.jit
def load_number(sums, place):
    """Return the numbers at some bytes of the sums."""
    if INTERPRETED:
        number = tl.load(sums + place // 4)
    else:
        number = tl.inline_asm_elementwise("ld.shared.f32 $0, [$1];", "=f,r", [sums + place], tl.float32, False, 1)
    return number


@triton.jit
def load_quads(places, beside, exists):
    """Return the first numbers of some quads, their second, third and fourth ones: of those that exist (`[COLUMN, 1]`), zeros of
    others, or of all where that is None.

    `beside` (float32) is not read. It ties the threads that load to those that have it: Triton would load twice otherwise, once
    for threads that need nothing.
    """
    if INTERPRETED:
        a, b, c, d = tl.load(places), tl.load(places + 1), tl.load(places + 2), tl.load(places + 3)
    elif exists is None:
        a, b, c, d = tl.inline_asm_elementwise(
            "ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];", "=f,=f,=f,=f,r,f", [places, beside],
            (tl.float32, tl.float32, tl.float32, tl.float32), False, 1,
        )  # fmt: skip
    else:
        a, b, c, d = tl.inline_asm_elementwise(
            "{ .reg .pred exists; setp.ne.u32 exists, $6, 0; mov.f32 $0, 0f00000000; mov.f32 $1, $0; mov.f32 $2, $0; "
            "mov.f32 $3, $0; @exists ld.shared.v4.f32 {$0, $1, $2, $3}, [$4]; }",
            "=f,=f,=f,=f,r,f,r", [places, beside, exists.to(tl.int32)],
            (tl.float32, tl.float32, tl.float32, tl.float32), False, 1,
        )  # fmt: skip
    return a, b, c, d


@triton.jit
def store_quads(places, a, b, c, d, exists):
    """Store quads, those that exist (`[COLUMN, 1]`), or all where that is None."""
    if INTERPRETED:
        tl.store(places, a, mask=exists)
        tl.store(places + 1, b, mask=exists)
        tl.store(places + 2, c, mask=exists)
        tl.store(places + 3, d, mask=exists)
    elif exists is None:
        tl.inline_asm_elementwise(
            "st.shared.v4.f32 [$1], {$2, $3, $4, $5}; mov.u32 $0, 0;", "=r,r,f,f,f,f", [places, a, b, c, d], tl.int32, False, 1
        )
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred exists; setp.ne.u32 exists, $6, 0; @exists st.shared.v4.f32 [$1], {$2, $3, $4, $5}; mov.u32 $0, 0; }",
            "=r,r,f,f,f,f,r", [places, a, b, c, d, exists.to(tl.int32)], tl.int32, False, 1,
        )  # fmt: skip


@triton.jit
def quads_of(product):
    """Return the four numbers of each quad of `[COLUMN, SAMPLE]`, as `load_quads` does."""
    parts = tl.reshape(product, [product.shape[0], 2, product.shape[1] // 4, 2])
    even, odd = tl.split(tl.permute(parts, (0, 2, 1, 3)))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def add_to_columns(sums, column, product, exists):
    """Add `[COLUMN, SAMPLE]` to the sums of some columns (int32), of which no two that exist (None: all do) are the same.

    Until a column's sums are added to again, all threads have to wait for each other once. No thread may hold a number that
    another has, too: it could add to the other's sum.
    """
    places = places_of(sums, column, product.shape[1])
    exists = None if exists is None else exists[:, None]
    a, b, c, d = quads_of(product)
    # Slots that do not exist name column 0, whose sum another thread may be at.
    old_a, old_b, old_c, old_d = load_quads(places, a, exists)
    store_quads(places, old_a + a, old_b + b, old_c + c, old_d + d, exists)


@triton.jit
def set_to_zero(sums, num_columns, SAMPLES: tl.constexpr, BLOCK: tl.constexpr = 32):
    """Begin with sums of nothing; the threads wait for each other."""
    zero = tl.zeros([BLOCK, SAMPLES // 4], tl.float32)
    for first in range(0, num_columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        places = places_of(sums, tl.minimum(column, num_columns - 1), SAMPLES)
        store_quads(places, zero, zero, zero, zero, (column < num_columns)[:, None])
    tl.debug_barrier()


@triton.jit
def write_sums(sums, output, stride, num_columns, first_sample, end_sample, SAMPLES: tl.constexpr, BLOCK: tl.constexpr = 32):
    """Write the sums of samples before `end_sample` to rows of columns, of which sample 0's place is `output`.

    By single numbers, in the order in which they are written: threads with quads would write four bytes here and there.
    """
    tl.debug_barrier()
    index = tl.arange(0, SAMPLES)
    in_half, sample = index % (SAMPLES // 2), first_sample + index
    in_column = in_half // 2 * 16 + index // (SAMPLES // 2) * 8 + in_half % 2 * 4
    for first in range(0, num_columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        begin = begin_of(tl.minimum(column, num_columns - 1), SAMPLES)
        number = load_number(sums, begin[:, None] ^ in_column[None, :])
        exists = (column < num_columns)[:, None] & (sample < end_sample)[None, :]
        tl.store(output + column.to(tl.int64)[:, None] * stride + sample[None, :], number, mask=exists)
