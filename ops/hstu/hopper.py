"""HSTU's projection on Hopper: one warp loads, two groups of four warps take turns at products and at what follows them.

A program, of which each multiprocessor runs one, owns a slice of 128 columns, whose weights stay in shared memory for its whole
life, and walks over blocks of 128 rows. Its loading warp sends rows by TMA through a ring of places in shared memory
(`_shared.ring`), 64 columns at a time and block by block; each visit is read by one group. The groups take blocks in turn, so
that one multiplies while the other adds the bias, computes SiLU, and writes its results by way of a buffer of its own.

A block of rows thus crosses the L2 once for 128 columns and weights once for a program, two thirds of what tiles of 128 x 256
read.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from jagged.ops._shared.launch import Launcher
from jagged.ops._shared.matrices import gpu
from jagged.ops._shared.ring import await_tile, leave_tile, make_ring, rows_descriptor, send_tile
from jagged.ops._shared.sizes import cdiv

# Rows of a block, columns of a slice, and columns of a step.
BLOCK_M = gl.constexpr(128)
BLOCK_N = gl.constexpr(128)
BLOCK_K = gl.constexpr(64)
# Columns of the widest rows, whose weights fit beside the ring; places of the ring.
WIDEST, PLACES = 512, 4
# Columns of a piece that is written at once, and which thread stores what of it.
PIECE = gl.constexpr(64)
STORED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
# Of how many multiprocessors one may be idle, because slices do not divide them.
MOST_IDLE = 8


@gluon.jit
def load_rows(x, weight, ring, weights, num_rows, SLICES: gl.constexpr, STEPS: gl.constexpr):
    """The loading warp: a slice's weights, then each block of rows, some columns after the other."""
    program = gl.program_id(0)
    mbarrier.expect(weights.full.index(0), STEPS * weight.block_type.nbytes)
    for i in gl.static_range(STEPS):
        source = [program % SLICES * BLOCK_N, i * BLOCK_K]
        tma.async_copy_global_to_shared(weight, source, weights.full.index(0), weights.tiles.index(i))
    row_blocks = (num_rows + BLOCK_M - 1) // BLOCK_M
    visit = row_blocks * 0
    for block in range(program // SLICES, row_blocks, gl.num_programs(0) // SLICES):
        for step in range(STEPS):
            send_tile(x, block * BLOCK_M, step * BLOCK_K, ring, visit)
            visit += 1


@gluon.jit
def multiply(ring, weights, turns, visit, zero, WHICH: gl.constexpr, STEPS: gl.constexpr):
    """Return the products of a block of rows and the slice's weights."""
    # Parity tells a completion from the one before it alone, so a group must not wait for its tiles until the other's are there.
    mbarrier.wait(turns.index(WHICH), (visit // (2 * STEPS) & 1) ^ (1 - WHICH))
    rows = await_tile(ring, visit)
    products = warpgroup_mma(rows, weights.tiles.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
    products = warpgroup_mma_wait(1, deps=(products,))
    for step in range(1, STEPS):
        rows = await_tile(ring, visit + step)
        products = warpgroup_mma(rows, weights.tiles.index(step).permute((1, 0)), products, is_async=True)
        products = warpgroup_mma_wait(1, deps=(products,))
        leave_tile(ring, visit + step - 1)
    mbarrier.arrive(turns.index(1 - WHICH), count=1)
    products = warpgroup_mma_wait(0, deps=(products,))
    leave_tile(ring, visit + STEPS - 1)
    return products


@gluon.jit
def send_piece(piece, target, row, column, buffer):
    """Send a piece away by TMA from a buffer, which may still be on its way when the next is to be written."""
    tma.store_wait(0)
    buffer.store(piece.to(target.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(target, [row, column], buffer)


@gluon.jit
def store_part(piece, output, row, column, num_rows, buffer, OUT: gl.constexpr):
    """Write a piece of gates, values, queries or keys by way of a buffer, whose rows are stored 16 bytes a thread."""
    tma.store_wait(0)
    buffer.store(piece.to(output.dtype.element_ty))
    stored = buffer.load(STORED)
    rows = row + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, STORED))[:, None]
    columns = column + gl.arange(0, PIECE, layout=gl.SliceLayout(0, STORED))[None, :]
    gl.store(output + rows.to(gl.int64) * OUT + columns, stored, mask=rows < num_rows)


@gluon.jit
def silu(x):
    """x / (1 + exp(-x)), by NVIDIA's tanh: one instruction."""
    half = x * 0.5
    tanh = gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [half], gl.float32, is_pure=True, pack=1)
    return half * tanh + half


@gluon.jit
def project_group(
    bias, outputs, before, num_rows, ring, weights, turns, buffers, WHICH: gl.constexpr, OUT: gl.constexpr, SLICES: gl.constexpr,
    STEPS: gl.constexpr,
):  # fmt: skip
    """One group of warps: every second block of rows."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    zero = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout)
    row_blocks = (num_rows + BLOCK_M - 1) // BLOCK_M
    column = gl.program_id(0) % SLICES * BLOCK_N
    part = column // OUT
    u, v, q, k = outputs
    output = gl.where(part == 0, u, gl.where(part == 1, v, gl.where(part == 2, q, k)))
    first = column - part * OUT
    bias += column
    buffer = buffers.index(WHICH)
    walkers = gl.num_programs(0) // SLICES
    visit = row_blocks * 0 + WHICH * STEPS
    mbarrier.wait(weights.full.index(0), 0)
    for block in range(gl.program_id(0) // SLICES + WHICH * walkers, row_blocks, 2 * walkers):
        products = multiply(ring, weights, turns, visit, zero, WHICH, STEPS)
        visit += 2 * STEPS
        pieces = products.reshape([BLOCK_M, 2, PIECE]).permute((0, 2, 1)).split()
        for half in gl.static_range(2):
            # Kept over the products, the bias would take registers that these need.
            columns = half * PIECE + gl.arange(0, PIECE, layout=gl.SliceLayout(0, pieces[0].type.layout))
            piece = pieces[half] + gl.load(bias + columns).to(gl.float32)[None, :]
            if before is not None:
                send_piece(piece, before, block * BLOCK_M, column + half * PIECE, buffer)
            store_part(silu(piece), output, block * BLOCK_M, first + half * PIECE, num_rows, buffer, OUT)
    # What is under way reads shared memory, which must not end before.
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_rows"])
def hstu_projection_hopper_kernel(
    x, weight, bias, u, v, q, k, before, num_rows, OUT: gl.constexpr, STEPS: gl.constexpr, PLACES: gl.constexpr
):
    """[u, v, q, k] = silu(x @ weight^T + bias), `[N, OUT]` each; `before` is what SiLU is applied to, `[N, 4 * OUT]`, or None.

    A multiple of `4 * OUT / 128` programs. Rows past the end are zeros, and are not written.
    """
    SLICES: gl.constexpr = 4 * OUT // BLOCK_N
    ring = make_ring(x, PLACES, 1)
    weights = make_ring(weight, 1, 1, TILES=STEPS)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(turns.index(i), count=1)
    buffers = gl.allocate_shared_memory(x.dtype, [2, BLOCK_M, PIECE], x.layout)
    fence_async_shared()
    outputs = u, v, q, k
    gl.warp_specialize(
        [
            (project_group, (bias, outputs, before, num_rows, ring, weights, turns, buffers, 0, OUT, SLICES, STEPS)),
            (project_group, (bias, outputs, before, num_rows, ring, weights, turns, buffers, 1, OUT, SLICES, STEPS)),
            (load_rows, (x, weight, ring, weights, num_rows, SLICES, STEPS)),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip


_launch_projection = Launcher(hstu_projection_hopper_kernel)


def supports(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel serves rows and weights of 16 bits: it is Hopper's, and for widths whose slices leave few idle."""
    (total, width), columns = x.shape, weight.shape[0]
    if not total or not 0 < width <= WIDEST or width % BLOCK_K.value or columns % (4 * BLOCK_N.value) or not columns:
        return False
    if _capability(x.device) != (9, 0) or not (_is_aligned(x) and _is_aligned(weight)):
        return False
    slices, multiprocessors = columns // BLOCK_N.value, gpu(x.device).multiprocessors
    return slices <= multiprocessors and multiprocessors % slices <= multiprocessors // MOST_IDLE


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of an NVIDIA GPU; 0.0 of anything else."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" and torch.version.hip is None else (0, 0)


def _is_aligned(matrix: Tensor) -> bool:
    """Whether rows begin at 16 bytes and columns are adjacent, as the tensor memory accelerator needs it."""
    return matrix.stride(1) == 1 and matrix.stride(0) * matrix.itemsize % 16 == 0 and matrix.data_ptr() % 16 == 0


def project(x: Tensor, weight: Tensor, bias: Tensor, u: Tensor, v: Tensor, q: Tensor, k: Tensor, before: Tensor | None) -> None:
    """Launch `hstu_projection_hopper_kernel` for what `supports` it; outputs are contiguous, `[N, OUT]` or `[N, H, d]`."""
    (total, width), columns = x.shape, weight.shape[0]
    slices = columns // BLOCK_N.value
    walkers = min(gpu(x.device).multiprocessors // slices, cdiv(total, BLOCK_M.value))
    _launch_projection(
        (walkers * slices,),
        rows_descriptor(x, BLOCK_M.value, BLOCK_K.value), rows_descriptor(weight, BLOCK_N.value, BLOCK_K.value), bias, u, v, q, k,
        None if before is None else rows_descriptor(before, BLOCK_M.value, PIECE.value), total, OUT=columns // 4,
        STEPS=width // BLOCK_K.value, PLACES=PLACES, num_warps=4,
    )  # fmt: skip
