"""Numbers in a multiprocessor's shared memory at places that are computed when a kernel runs, on NVIDIA's GPUs.

Triton reads and writes shared memory at no index, so these are a few lines of assembly. Addresses are bytes in 32-bit numbers.
Whoever reads what other lanes have written waits for them first: `sync_warp`, or `tl.debug_barrier` for those of other warps.
"""

from __future__ import annotations

import triton
import triton.language as tl

# What a program may have without asking the driver, together with what Triton takes.
MOST_BYTES = tl.constexpr(48 * 1024)


@triton.constexpr_function
def _reserve(size):
    return "{ .shared .align 16 .b8 jagged_numbers[" + str(size) + "]; mov.u32 $0, jagged_numbers; }"


@triton.jit
def reserve(SIZE: tl.constexpr):
    """Return the address of `SIZE` bytes that the program has to itself; what they hold is not known. Once in a kernel."""
    tl.static_assert(SIZE <= MOST_BYTES, "a program may have 48 KiB of shared memory")
    return tl.inline_asm_elementwise(_reserve(SIZE), "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def load16(address):
    """Return numbers of 16 bits without sign."""
    load: tl.constexpr = "{ .reg .b16 h; ld.shared.b16 h, [$1]; cvt.u32.u16 $0, h; }"
    return tl.inline_asm_elementwise(load, "=r,r", [address], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def load32(address):
    """Return numbers of 32 bits."""
    return tl.inline_asm_elementwise("ld.shared.b32 $0, [$1];", "=r,r", [address], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def store16(address, value, mask):
    """Store the lower 16 bits of numbers of 32."""
    store: tl.constexpr = (
        "{ .reg .pred p; .reg .b16 h; setp.ne.u32 p, $3, 0; cvt.u16.u32 h, $2; @p st.shared.b16 [$1], h; mov.u32 $0, 0; }"
    )
    arguments = [address, value, mask.to(tl.int32)]
    tl.inline_asm_elementwise(store, "=r,r,r,r", arguments, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def store32(address, value, mask):
    """Store numbers of 32 bits."""
    store: tl.constexpr = "{ .reg .pred p; setp.ne.u32 p, $3, 0; @p st.shared.b32 [$1], $2; mov.u32 $0, 0; }"
    arguments = [address, value, mask.to(tl.int32)]
    tl.inline_asm_elementwise(store, "=r,r,r,r", arguments, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def add32(address, value, mask):
    """Add to numbers of 32 bits, whichever lanes add to the same one."""
    add: tl.constexpr = "{ .reg .pred p; setp.ne.u32 p, $3, 0; @p red.shared.add.u32 [$1], $2; mov.u32 $0, 0; }"
    arguments = [address, value, mask.to(tl.int32)]
    tl.inline_asm_elementwise(add, "=r,r,r,r", arguments, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def clear(address, mask):
    """Set 16 bytes each to 0."""
    store: tl.constexpr = (
        "{ .reg .pred p; .reg .b32 z; setp.ne.u32 p, $2, 0; mov.u32 z, 0; "
        "@p st.shared.v4.b32 [$1], {z, z, z, z}; mov.u32 $0, 0; }"
    )
    tl.inline_asm_elementwise(store, "=r,r,r", [address, mask.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def sync_warp():
    """Let the lanes of a warp see what the others have written."""
    sync: tl.constexpr = "bar.warp.sync 0xffffffff; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(sync, "=r", [], dtype=tl.int32, is_pure=False, pack=1)
