"""HSTU's products in one kernel each, with what stands before and behind them, and the passes over rows that are left."""

from __future__ import annotations

import triton
import triton.language as tl

from jagged.ops._shared.device import INTERPRETED, dot
from jagged.ops.hstu.configurations import BAND as _BAND

BAND = tl.constexpr(_BAND)


@triton.jit
def place_of(tile, row_blocks, column_blocks):
    """Return the block of rows and of columns of a tile, in bands of `BAND` blocks of rows."""
    tiles_of_band = tl.minimum(row_blocks, BAND) * column_blocks
    band, within = tile // tiles_of_band, tile % tiles_of_band
    height = tl.minimum(row_blocks - band * BAND, BAND)
    return band * BAND + within % height, within // height


@triton.jit
def halves_of(tile):
    """Return a tile's left and right half, which are stored one after the other from half the shared memory."""
    return tl.split(tl.permute(tl.reshape(tile, [tile.shape[0], 2, tile.shape[1] // 2]), [0, 2, 1]))


@triton.jit
def sigmoid(x, ACCURATE: tl.constexpr):
    """1 / (1 + exp(-x)); of 16 bits by NVIDIA's tanh, of at most 2^-11 relative error, one instruction where both are many."""
    if ACCURATE or INTERPRETED:
        # A difference too far below 0 would be an infinite exponential, of which the interpreter warns.
        return tl.where(x < -88.0, 0.0, 1.0 / (1.0 + tl.exp(-tl.maximum(x, -88.0))))
    else:
        half = x * 0.5
        tanh = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [half], tl.float32, is_pure=True, pack=1)
        return 0.5 + 0.5 * tanh


@triton.jit(do_not_specialize=["num_rows"])
def hstu_projection_kernel(
    x, weight, bias, u, v, q, k, before, num_rows, OUT: tl.constexpr, IN: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """[u, v, q, k] = silu(x @ weight^T + bias), `[N, OUT]` each; `before` is what SiLU is applied to, `[N, 4 * OUT]`, or None.

    Descriptors have x as `[N, IN]` and weight as `[4 * OUT, IN]`; rows past the end are zeros, and are not written. While a tile
    is written, the products of the next begin.
    """
    COLUMN_BLOCKS: tl.constexpr = 4 * OUT // BLOCK_N
    row_blocks = tl.cdiv(num_rows, BLOCK_M)
    tiles = row_blocks * COLUMN_BLOCKS
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True, num_stages=NUM_STAGES):
        row_block, column_block = place_of(tile, row_blocks, COLUMN_BLOCKS)
        row, column = row_block * BLOCK_M, column_block * BLOCK_N
        result = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for inner in range(0, IN, BLOCK_K):
            result = dot(x.load([row, inner]), tl.trans(weight.load([column, inner])), result, "ieee")
        result += tl.load(bias + column + tl.arange(0, BLOCK_N)).to(tl.float32)[None, :]
        part = column // OUT
        output = tl.where(part == 0, u, tl.where(part == 1, v, tl.where(part == 2, q, k)))
        rows = (row + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
        output += rows * OUT + (column - part * OUT + tl.arange(0, BLOCK_N // 2))[None, :]
        for half in tl.static_range(2):
            kept = halves_of(result)[half]
            if before is not None:
                before.store([row, column + half * (BLOCK_N // 2)], kept.to(before.dtype))
            activated = (kept * sigmoid(kept, False)).to(output.dtype.element_ty)
            tl.store(output + half * (BLOCK_N // 2), activated, mask=rows < num_rows)


@triton.jit(do_not_specialize=["num_rows", "rows_of_part"])
def hstu_projection_gradient_kernel(
    grad_u, grad_v, grad_q, grad_k, before, grad, parts, num_rows, rows_of_part, OUT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """grad = [grad_u, grad_v, grad_q, grad_k] * silu'(before), `[N, 4 * OUT]`; parts[p] = its sums over a part of the rows.

    With s = 1 / (1 + exp(-x)) the slope of SiLU is s * (1 + x * (1 - s)).
    """
    ACCURATE: tl.constexpr = before.dtype.element_ty == tl.float32
    first = tl.program_id(0).to(tl.int64) * rows_of_part
    end = tl.minimum(first + rows_of_part, num_rows)
    part = tl.program_id(1) // tl.cdiv(OUT, BLOCK_N)
    given = tl.where(part == 0, grad_u, tl.where(part == 1, grad_v, tl.where(part == 2, grad_q, grad_k)))
    column = tl.program_id(1) % tl.cdiv(OUT, BLOCK_N) * BLOCK_N + tl.arange(0, BLOCK_N)
    column_exists = column < OUT
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(first, end, BLOCK_M):
        row = (start + tl.arange(0, BLOCK_M))[:, None]
        exists = (row < end) & column_exists[None, :]
        place = row * (4 * OUT) + part * OUT + column[None, :]
        x = tl.load(before + place, mask=exists, other=0.0).to(tl.float32)
        slope = tl.load(given + row * OUT + column[None, :], mask=exists, other=0.0).to(tl.float32)
        s = sigmoid(x, ACCURATE)
        slope *= s * (1.0 + x * (1.0 - s))
        tl.store(grad + place, slope.to(grad.dtype.element_ty), mask=exists)
        sums += slope
    tl.store(parts + tl.program_id(0) * (4 * OUT) + part * OUT + column, tl.sum(sums, 0), mask=column_exists)


@triton.jit
def hashed(number):
    """A permutation of the 32-bit numbers whose every bit depends on every bit (Wellons, "lowbias32"), as `_shared.hashing`."""
    number ^= number >> 16
    number *= 0x7FEB352D
    number ^= number >> 15
    number *= 0x846CA68B
    return number ^ (number >> 16)


@triton.jit
def dropped(numbers, row, column, seed, threshold, kept_scale):
    """Return numbers with dropout: each place is kept or not by a hash of itself and the seed."""
    if seed is None:
        return numbers
    else:
        both = tl.load(seed)
        low, high = both.to(tl.uint32), (both >> 32).to(tl.uint32)
        mixed = hashed(row.to(tl.uint32) ^ low) ^ hashed(column.to(tl.uint32) + high)[None, :]
        return tl.where(hashed(mixed) >= threshold.to(tl.uint32), numbers * kept_scale, 0.0)


@triton.jit
def store_dropped(place, numbers, row, column, seed, threshold, kept_scale, exists):
    """Store numbers with dropout."""
    tl.store(place, dropped(numbers.to(tl.float32), row, column, seed, threshold, kept_scale).to(numbers.dtype), mask=exists)


@triton.jit
def load_dropped(place, row, column, seed, threshold, kept_scale, exists):
    """Load the gradient of numbers with dropout, and return that of the numbers."""
    return dropped(tl.load(place, mask=exists, other=0.0).to(tl.float32), row, column, seed, threshold, kept_scale)


@triton.jit
def normalised(rows, exists, eps, WIDTH: tl.constexpr, CENTRED: tl.constexpr):
    """Return rows / sqrt(mean of their squares + eps), before that less their mean if `CENTRED`, and 1 / that root."""
    if CENTRED:
        rows = tl.where(exists, rows - (tl.sum(rows, 1) / WIDTH)[:, None], 0.0)
    inverse = 1.0 / tl.sqrt_rn(tl.sum(rows * rows, 1) / WIDTH + eps)
    return rows * inverse[:, None], inverse


@triton.jit(do_not_specialize=["num_rows"])
def hstu_gate_kernel(
    attended, gate, weight, bias, seed, output, num_rows, attended_stride, gate_stride, eps, threshold, kept_scale,
    WIDTH: tl.constexpr, NUM_GROUPS: tl.constexpr, CENTRED: tl.constexpr, CONCAT: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """output[n] = dropout(norm(attended[n]) * gate[n]), of a group of `WIDTH` columns; behind gate and attended if `CONCAT`."""
    COLUMNS: tl.constexpr = NUM_GROUPS * WIDTH
    OUT: tl.constexpr = 3 * COLUMNS if CONCAT else COLUMNS
    row = (tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
    within = tl.arange(0, BLOCK_D)
    column = tl.program_id(1) * WIDTH + within
    exists = (row < num_rows) & (within < WIDTH)[None, :]
    a = tl.load(attended + row * attended_stride + column[None, :], mask=exists, other=0.0)
    u = tl.load(gate + row * gate_stride + column[None, :], mask=exists, other=0.0)
    normal, _ = normalised(a.to(tl.float32), exists, eps, WIDTH, CENTRED)
    factor = tl.load(weight + column, mask=within < WIDTH, other=0.0).to(tl.float32)
    result = normal * factor[None, :]
    if bias is not None:
        result += tl.load(bias + column, mask=within < WIDTH, other=0.0).to(tl.float32)[None, :]
    # Rounded before dropout, as where that is a layer of its own.
    result = (result * u.to(tl.float32)).to(output.dtype.element_ty)
    place = output + row * OUT + column[None, :]
    if CONCAT:
        store_dropped(place, u, row, column, seed, threshold, kept_scale, exists)
        store_dropped(place + COLUMNS, a, row, column + COLUMNS, seed, threshold, kept_scale, exists)
    store_dropped(place + (OUT - COLUMNS), result, row, column + (OUT - COLUMNS), seed, threshold, kept_scale, exists)


@triton.jit(do_not_specialize=["num_rows", "rows_of_part"])
def hstu_gate_gradients_kernel(
    grad, attended, gate, weight, bias, seed, of_attended, of_gate, gated, parts, num_rows, rows_of_part, attended_stride,
    gate_stride, eps, threshold, kept_scale, WIDTH: tl.constexpr, NUM_GROUPS: tl.constexpr, CENTRED: tl.constexpr,
    CONCAT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Gradients of `hstu_gate_kernel`'s inputs from that of its output, which is made again in `gated`.

    With z the normalised group, r its inverse root, and s = grad * gate * weight: of_attended = (s - mean(s) - z mean(s z)) r,
    less mean(s) only if `CENTRED`. parts[p] has the sums of grad * gate * z and of grad * gate over a part of the rows.
    """
    COLUMNS: tl.constexpr = NUM_GROUPS * WIDTH
    OUT: tl.constexpr = 3 * COLUMNS if CONCAT else COLUMNS
    first = tl.program_id(0).to(tl.int64) * rows_of_part
    end = tl.minimum(first + rows_of_part, num_rows)
    within = tl.arange(0, BLOCK_D)
    column = tl.program_id(1) * WIDTH + within
    factor = tl.load(weight + column, mask=within < WIDTH, other=0.0).to(tl.float32)[None, :]
    term = factor * 0.0
    if bias is not None:
        term = tl.load(bias + column, mask=within < WIDTH, other=0.0).to(tl.float32)[None, :]
    of_weight = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    of_bias = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    # While a step is computed, the next one's rows are on their way.
    for start in tl.range(first, end, BLOCK_N, num_stages=2):
        row = (start + tl.arange(0, BLOCK_N))[:, None]
        exists = (row < end) & (within < WIDTH)[None, :]
        place = row * OUT + column[None, :]
        own = row * COLUMNS + column[None, :]
        a = tl.load(attended + row * attended_stride + column[None, :], mask=exists, other=0.0)
        u = tl.load(gate + row * gate_stride + column[None, :], mask=exists, other=0.0)
        normal, inverse = normalised(a.to(tl.float32), exists, eps, WIDTH, CENTRED)
        last = column + (OUT - COLUMNS)
        slope = load_dropped(grad + place + (OUT - COLUMNS), row, last, seed, threshold, kept_scale, exists)
        scaled_normal = normal * factor + term
        through = slope * u.to(tl.float32)
        of_weight += through * normal
        of_bias += through
        scaled = through * factor
        result = scaled - normal * (tl.sum(scaled * normal, 1) / WIDTH)[:, None]
        if CENTRED:
            result -= (tl.sum(scaled, 1) / WIDTH)[:, None]
        result *= inverse[:, None]
        to_gate = slope * scaled_normal
        if CONCAT:
            second = column + COLUMNS
            to_gate += load_dropped(grad + place, row, column, seed, threshold, kept_scale, exists)
            result += load_dropped(grad + place + COLUMNS, row, second, seed, threshold, kept_scale, exists)
            store_dropped(gated + place, u, row, column, seed, threshold, kept_scale, exists)
            store_dropped(gated + place + COLUMNS, a, row, second, seed, threshold, kept_scale, exists)
        made = (scaled_normal * u.to(tl.float32)).to(gated.dtype.element_ty)
        store_dropped(gated + place + (OUT - COLUMNS), made, row, last, seed, threshold, kept_scale, exists)
        tl.store(of_attended + own, result.to(of_attended.dtype.element_ty), mask=exists)
        tl.store(of_gate + own, to_gate.to(of_gate.dtype.element_ty), mask=exists)
    parts += tl.program_id(0).to(tl.int64) * (2 * COLUMNS) + column
    tl.store(parts, tl.sum(of_weight, 0), mask=within < WIDTH)
    tl.store(parts + COLUMNS, tl.sum(of_bias, 0), mask=within < WIDTH)


@triton.jit(do_not_specialize=["num_rows"])
def hstu_output_kernel(
    x, weight, bias, residual, output, num_rows, residual_stride, OUT: tl.constexpr, IN: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """output = residual + x @ weight^T + bias, `[N, OUT]`; descriptors have x as `[N, IN]` and weight as `[OUT, IN]`."""
    COLUMN_BLOCKS: tl.constexpr = OUT // BLOCK_N
    row_blocks = tl.cdiv(num_rows, BLOCK_M)
    tiles = row_blocks * COLUMN_BLOCKS
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True, num_stages=NUM_STAGES):
        row_block, column_block = place_of(tile, row_blocks, COLUMN_BLOCKS)
        row, column = row_block * BLOCK_M, column_block * BLOCK_N
        result = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for inner in range(0, IN, BLOCK_K):
            result = dot(x.load([row, inner]), tl.trans(weight.load([column, inner])), result, "ieee")
        rows = (row + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
        columns = (column + tl.arange(0, BLOCK_N // 2))[None, :]
        for half in tl.static_range(2):
            at = columns + half * (BLOCK_N // 2)
            kept = tl.load(residual + rows * residual_stride + at, mask=rows < num_rows, other=0.0).to(tl.float32)
            kept += tl.load(bias + at).to(tl.float32) + halves_of(result)[half]
            tl.store(output + rows * OUT + at, kept.to(output.dtype.element_ty), mask=rows < num_rows)
