"""Which kernels run a call of attention, with which tiles; inputs and options of `spec` become arguments of kernels here."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton
from torch import Tensor

from jagged.ops._shared.launch import Launcher, bound
from jagged.ops._shared.matrices import products_of
from jagged.ops._shared.sizes import cdiv, next_power_of_2
from jagged.ops.attention import hopper
from jagged.ops.attention.hopper import capability, is_aligned
from jagged.ops.attention.spec import Inputs, Options, Outputs
from jagged.ops.attention.triton.backward_dkv import attention_backward_dkv_kernel
from jagged.ops.attention.triton.backward_dq import attention_backward_dq_kernel
from jagged.ops.attention.triton.bias_gradients import BINS, MOST_COPIES, sum_bins_kernel
from jagged.ops.attention.triton.biases import FLOAT_BUCKETS, MOST_BUCKETS, PADDING, SPAN, prepare_biases_kernel
from jagged.ops.attention.triton.configurations import Configuration, Kind, Tiles, configuration, padded_width
from jagged.ops.attention.triton.forward import attention_forward_kernel

_launch_forward = Launcher(attention_forward_kernel)
_launch_dq = Launcher(attention_backward_dq_kernel)
_launch_dkv = Launcher(attention_backward_dkv_kernel)
_launch_prepare_biases = Launcher(prepare_biases_kernel)
_launch_sum_bins = Launcher(sum_bins_kernel)


def forward(x: Inputs, o: Options) -> Outputs:
    """Launch the kernels for Hopper, or `attention_forward_kernel`."""
    x = _readable(x)
    if hopper.supports(x, o) is None:
        from jagged.ops.attention.hopper.forward import forward as hopper_forward

        return hopper_forward(x, o)
    total, heads, _ = x.q.shape
    output = x.q.new_empty(total, heads, x.v.shape[2])
    lse = x.q.new_empty(*((0,) if o.pointwise else (heads, total)), dtype=torch.float32)
    chosen = _configuration(x, o, x.k, x.v)
    tiles = chosen.forward
    _prepared(_launch_forward, x, o, chosen.apart, tiles, BLOCK_M=tiles.own, BLOCK_N=tiles.visit)(
        _grid(x.q, x.q_offsets, tiles),
        x.q, x.k, x.v, x.q_offsets, x.k_offsets, x.num_targets, output, None if o.pointwise else lse, *_scalars(x, o),
        *_strides(x.q, x.k, x.v), output.stride(0), **_extras(x, o),
    )  # fmt: skip
    return Outputs(output, lse)


def backward(grads: Outputs, x: Inputs, out: Outputs, o: Options, wanted: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
    """Launch the kernels for Hopper, or `attention_backward_dq_kernel`, then `attention_backward_dkv_kernel`.

    Gradients are contiguous. Those of q, k and v all come, in their own dtypes.
    """
    x = _readable(x)
    # A log-sum-exp may be all that has a gradient.
    grad = x.q.new_zeros(*x.q.shape[:2], x.v.shape[2]) if grads.output is None else _with_adjacent_columns(grads.output)
    grad_lse = None if grads.lse is None else grads.lse.contiguous()
    if hopper.supports(x, o, grad) is None:
        from jagged.ops.attention.hopper.backward import backward as hopper_backward

        return hopper_backward(Outputs(grad, grad_lse), x, out, o)  # type: ignore[arg-type]
    found = {"q": x.q.new_empty(*x.q.shape), "k": x.k.new_empty(*x.k.shape), "v": x.v.new_empty(*x.v.shape)}
    row_lse = None if o.pointwise else out.lse
    statistics = None if o.pointwise else out.lse.new_empty(*out.lse.shape, 2, dtype=torch.float32)
    # A loop over heads moves a pointer, which it could not do with a descriptor.
    chosen = _configuration(x, o, grad, x.q, x.k, x.v, allows_tma=x.q.shape[1] == x.k.shape[1])
    scalars = *_scalars(x, o), *_strides(grad, x.q, x.k, x.v)
    extras = _extras(x, o)
    sums = {
        name: torch.zeros((_copies(table), BINS.value, *table.shape), dtype=torch.int64, device=table.device)
        for name, table in (("relative_bias", x.relative_bias), ("time_bias", x.time_bias))
        if table is not None and name in wanted
    }
    if x.bias is not None and "bias" in wanted:
        found["bias"] = torch.zeros(x.bias.shape, dtype=wanted["bias"], device=x.bias.device)
    copies = {name: len(table) for name, table in sums.items()}
    num_buckets = sums["time_bias"].shape[3] if "time_bias" in sums else 1
    block_t = next_power_of_2(min(num_buckets, MOST_BUCKETS))
    _prepared(_launch_dq, x, o, chosen.apart, chosen.dq, BLOCK_M=chosen.dq.own, BLOCK_N=chosen.dq.visit, BLOCK_T=block_t)(
        _grid(x.q, x.q_offsets, chosen.dq),
        grad, grad_lse, x.q, x.k, x.v, out.output, row_lse, x.q_offsets, x.k_offsets, x.num_targets, found["q"], statistics,
        *scalars, found["q"].stride(0), **extras,
        grad_relative_bias=sums.get("relative_bias"), relative_copies=copies.get("relative_bias", 0),
        grad_time_bias=sums.get("time_bias"), time_copies=copies.get("time_bias", 0), grad_bias=found.get("bias"),
    )  # fmt: skip
    _prepared(_launch_dkv, x, o, chosen.apart, chosen.dkv, BLOCK_M=chosen.dkv.visit, BLOCK_N=chosen.dkv.own)(
        _grid(x.k, x.q_offsets, chosen.dkv),
        grad, x.q, x.k, x.v, statistics, x.q_offsets, x.k_offsets, x.num_targets, found["k"], found["v"], *scalars,
        found["k"].stride(0), **extras,
    )  # fmt: skip
    return found | {name: _rounded(bins, wanted[name]) for name, bins in sums.items()}


def _readable(x: Inputs) -> Inputs:
    """Return inputs as the kernels read them: rows and heads of any stride, columns and all other elements side by side."""
    q, k, v, *others = x
    bias = x.bias
    made = [each if each is None or each is bias else each.contiguous() for each in others]
    return Inputs(*map(_with_adjacent_columns, (q, k, v)), *made)  # type: ignore[arg-type]


def _with_adjacent_columns(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 else x.contiguous()


def _copies(table: Tensor) -> int:
    """Return how many copies of a table's sums programs take in turn; large tables have few additions to one entry."""
    copies = max(1, min(MOST_COPIES, 2**16 // max(1, table.numel())))
    return 1 << (copies.bit_length() - 1)


def _rounded(bins: Tensor, dtype: torch.dtype) -> Tensor:
    """Launch `sum_bins_kernel`: the gradient of a table."""
    gradient = torch.empty(bins.shape[2:], dtype=dtype, device=bins.device)
    entries = gradient.numel()
    _launch_sum_bins((cdiv(entries, 16),), bins, gradient, entries, COPIES=bins.shape[0], BLOCK=16)
    return gradient


def _prepare_biases(x: Inputs, scale: float) -> dict[str, Tensor | None]:
    """Launch `prepare_biases_kernel`: what the other kernels read of tables and times, by the names of their arguments."""
    prepared: dict[str, Tensor | None] = dict.fromkeys(("relative_bias", "time_bias", "q_times", "k_times"))
    relative, time, q_times, k_times = x.relative_bias, x.time_bias, x.q_times, x.k_times
    table = time if relative is None else relative
    if table is None:
        return prepared
    heads, num_samples = table.shape[0], x.q_offsets.shape[0] - 1
    widths, tiles, key_total = [0], 0, 0
    if relative is not None:
        widths.append(relative.shape[1] + 2 * PADDING.value)
        prepared["relative_bias"] = torch.empty(heads, 2, widths[-1], dtype=torch.float32, device=table.device)
    if time is not None and q_times is not None:
        widths.append(FLOAT_BUCKETS.value)
        prepared["time_bias"] = torch.empty(heads, widths[-1], dtype=torch.float32, device=table.device)
        k_times = q_times if k_times is None else k_times
        q_times = None if k_times is q_times else q_times
        key_total = k_times.shape[0]
        k_split = k_times.new_empty(key_total + key_total // SPAN.value + num_samples)
        q_split = k_split if q_times is None else q_times.new_empty(len(q_times) + len(q_times) // SPAN.value + num_samples)
        prepared |= {"q_times": q_split, "k_times": k_split}
        tiles = key_total // SPAN.value + num_samples + (0 if q_times is None else len(q_times) // SPAN.value + num_samples)
    blocks = cdiv(max(widths), 256)
    _launch_prepare_biases(
        (blocks * heads + tiles,), relative, time, prepared["relative_bias"], prepared["time_bias"],
        0 if relative is None else relative.shape[1] // 2, 0 if time is None else time.shape[1], 1 / scale, blocks, heads,
        k_times, x.q_offsets if x.k_offsets is None else x.k_offsets, prepared["k_times"], key_total, q_times, x.q_offsets,
        prepared["q_times"], 0 if q_times is None else q_times.shape[0], num_samples, BLOCK=256, num_warps=1,
    )  # fmt: skip
    return prepared


def _extras(x: Inputs, o: Options) -> dict[str, Any]:
    """Arguments of all three kernels."""
    of_dropout = {
        "dropout_seed": x.dropout_seed,
        "dropout_threshold": min(round(o.dropout_p * 2**32), 2**32 - 1) if o.dropout_p else 0,
        "kept_scale": 1 / (1 - o.dropout_p),
        "normalizer": o.normalizer,
    }
    if x.relative_bias is x.time_bias is x.bias is None:
        return _NO_BIASES | of_dropout
    return {**_prepare_biases(x, o.scale), **sizes_of_biases(x), **of_dropout}


def sizes_of_biases(x: Inputs) -> dict[str, Any]:
    """Return the arguments that tell of biases but for their tables and times; a jagged one is one row of `P` pairs a head."""
    dense = None if x.bias is None else x.bias if x.bias.dim() == 4 else x.bias[None, :, None]
    strides = (0, 0, 0, 0) if dense is None else dense.stride()
    return {
        "max_distance": 0 if x.relative_bias is None else x.relative_bias.shape[1] // 2,
        "num_buckets": 0 if x.time_bias is None else x.time_bias.shape[1],
        "bias": x.bias,
        "bias_offsets": x.bias_offsets,
        "bias_rows": 0 if dense is None else dense.shape[2],
        "bias_keys": 0 if dense is None else dense.shape[3],
        **dict(zip(_STRIDES_OF_BIAS, strides, strict=True)),
    }


_STRIDES_OF_BIAS = tuple(f"bias_{name}_stride" for name in ("batch", "head", "row", "key"))
_NO_BIASES: dict[str, Any] = {
    **dict.fromkeys(("relative_bias", "time_bias", "q_times", "k_times", "bias", "bias_offsets")),
    **dict.fromkeys(("max_distance", "num_buckets", "bias_rows", "bias_keys", *_STRIDES_OF_BIAS), 0),
}


def _scalars(x: Inputs, o: Options) -> tuple[int | float | None, ...]:
    cap_factor = o.scale / o.softcap if o.softcap else None
    return x.q_offsets.shape[0] - 1, x.q.shape[0], x.k.shape[0], o.scale, *sight_of(o).values(), cap_factor


def sight_of(o: Options) -> dict[str, int | None]:
    """Return what kernels are told of masks, by the names of their arguments and in their order: None for what is not there."""
    return {
        "window": o.window or None,
        "reach": None if o.reach == o.window else o.reach,
        "num_contextual": o.num_contextual or None,
        "prefix": (o.window and o.prefix) or None,
    }


def _configuration(x: Inputs, o: Options, *rows: Tensor, allows_tma: bool = True) -> Configuration:
    """Return tiles; those that read `rows` by descriptors only where these can be read so, which costs to ask."""
    total, _, head_dim = x.q.shape
    call = head_dim, x.q.dtype, total, x.q_offsets.shape[0] - 1
    others: dict[str, Any] = {"kind": kind_of(x, o), "value_dim": x.v.shape[2]}
    chosen = configuration(*call, allows_tma=allows_tma, **others)
    return chosen if not chosen.dq.tma or _allow_tma(*rows) else configuration(*call, allows_tma=False, **others)


def kind_of(x: Inputs, o: Options) -> Kind:
    """Return which row of the table of tiles a call has."""
    if x.relative_bias is x.time_bias is x.bias is None:
        return "pointwise" if o.pointwise else "plain"
    match x.relative_bias is not None, x.time_bias is not None, x.bias is not None:
        case True, False, False:
            return "distances"
        case False, True, False:
            return "times"
    return "biased"


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:2]]


def _grid(rows: Tensor, offsets: Tensor, tiles: Tiles) -> tuple[int, int]:
    """Programs enough for every tile of `find_tile`'s list, and for each head; none where there is nothing to do."""
    batch_size = offsets.shape[0] - 1
    return (rows.shape[0] // tiles.own + batch_size if batch_size and rows.numel() else 0, rows.shape[1])


def _prepared(
    launch: Callable[..., None], x: Inputs, o: Options, apart: bool, tiles: Tiles, **blocks: int
) -> Callable[..., None]:
    """Return the launch with its constants."""
    if tiles.tma:
        # Descriptors lie in memory that Triton asks for at each launch, from an allocator that belongs to the thread.
        triton.set_allocator(_allocate)
    (_, heads, width), dtype = x.q.shape, x.q.dtype
    limited = tiles.max_registers is not None and capability(x.q.device) == (9, 0)
    return _with_constants(
        launch, tiles, limited, IS_CAUSAL=o.causal, APART=apart, GROUP=heads // x.k.shape[1], HEAD_DIM=width,
        VALUE_DIM=x.v.shape[2], INPUT_PRECISION=products_of(dtype), **blocks,
    )  # fmt: skip


@functools.cache
def _with_constants(launch: Callable[..., None], tiles: Tiles, limited: bool, **constants: Any) -> Callable[..., None]:
    options = {
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
        **({"maxnreg": tiles.max_registers} if limited else {}),
    }
    blocks = {"BLOCK_D": padded_width(constants["HEAD_DIM"]), "BLOCK_DV": padded_width(constants["VALUE_DIM"])}
    return bound(launch, USE_TMA=tiles.tma, **blocks, **constants, **options)


def _allow_tma(*rows: Tensor) -> bool:
    return capability(rows[0].device) >= (9, 0) and all(is_aligned(x) for x in rows)


def _allocate(size: int, alignment: int, stream: int | None) -> Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")
