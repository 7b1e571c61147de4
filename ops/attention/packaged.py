"""Attention in a package for a GPU: the forward kernel, whose code the compiler of the package takes over.

Rows stay jagged, so that memory is linear in them, and nothing waits for a size that only the GPU knows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jagged.ops._shared.matrices import products_of
from jagged.ops._shared.packaged import launched
from jagged.ops._shared.sizes import cdiv
from jagged.ops.attention import decomposed
from jagged.ops.attention.kernels import packaged_biases_kernel, packaged_forward_kernel
from jagged.ops.attention.spec import Inputs, Options, Outputs
from jagged.ops.attention.triton.biases import FLOAT_BUCKETS, PADDING, SPAN
from jagged.ops.attention.triton.configurations import configuration, padded_width
from jagged.ops.attention.triton.launch import kind_of, sight_of, sizes_of_biases

_BIASES = ("relative_bias", "time_bias", "q_times", "k_times", "bias")
# Numbers of rows and of samples by which tiles are chosen: a program is compiled once for all batches, and those for long samples
# serve short ones well.
_ROWS, _SAMPLES = 1000, 1


def forward(x: Inputs, o: Options) -> Outputs:
    """Return output and log-sum-exp, by `attention_forward_kernel`; of float64, which the kernel does not read, by PyTorch.

    Tiles are those of pointers: a package has no descriptors.
    """
    if x.q.dtype == torch.float64 or x.dropout_seed is not None:
        return decomposed.forward(x, o)
    copied: dict[str, Any] = {name: _copied(getattr(x, name)) for name in ("q", "k", "v", *_BIASES)}
    x = x._replace(**copied)
    total, heads, width = x.q.shape
    key_total, key_heads, value_width = x.v.shape
    num_samples = x.q_offsets.shape[0] - 1
    output = x.q.new_empty(total, heads, value_width)
    lse = x.q.new_empty((0,) if o.pointwise else (heads, total), dtype=torch.float32)
    chosen = configuration(width, x.q.dtype, _ROWS, _SAMPLES, allows_tma=False, kind=kind_of(x, o), value_dim=value_width)
    tiles = chosen.forward
    written = launched(
        packaged_forward_kernel, (total // tiles.own + num_samples, heads),
        {"output": output} if o.pointwise else {"output": output, "lse": lse}, **({"lse": None} if o.pointwise else {}),
        query=x.q, key=x.k, value=x.v, offsets=x.q_offsets, key_offsets=x.k_offsets, num_targets=x.num_targets,
        num_samples=num_samples, total=total, key_total=key_total, scale=o.scale,
        **sight_of(o), cap_factor=o.scale / o.softcap if o.softcap else None,
        query_row_stride=heads * width, query_head_stride=width, key_row_stride=key_heads * width, key_head_stride=width,
        value_row_stride=key_heads * value_width, value_head_stride=value_width, output_row_stride=heads * value_width,
        **_prepared(x, o.scale), **sizes_of_biases(x), normalizer=o.normalizer,
        IS_CAUSAL=o.causal, GROUP=heads // key_heads, APART=chosen.apart, HEAD_DIM=width, VALUE_DIM=value_width,
        BLOCK_M=tiles.own, BLOCK_N=tiles.visit, BLOCK_D=padded_width(width), BLOCK_DV=padded_width(value_width),
        INPUT_PRECISION=products_of(x.q.dtype), num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return Outputs(written["output"], written.get("lse", lse))


def _copied(x: Tensor | None) -> Tensor | None:
    """Return a copy, whose strides are known: which ones a view has is the compiler's to choose."""
    return None if x is None else x.clone(memory_format=torch.contiguous_format)


def _prepared(x: Inputs, scale: float) -> dict[str, Tensor | None]:
    """Return what `prepare_biases_kernel` makes of tables and times, by the names of the forward kernel's arguments."""
    found: dict[str, Tensor | None] = dict.fromkeys(("relative_bias", "time_bias", "q_times", "k_times"))
    relative, time, q_times, k_times = x.relative_bias, x.time_bias, x.q_times, x.k_times
    table = time if relative is None else relative
    if table is None:
        return found
    heads, num_samples = table.shape[0], x.q_offsets.shape[0] - 1
    widths, tiles, key_total, query_total = [0], 0, 0, 0
    made: dict[str, Tensor] = {}
    if relative is not None:
        widths.append(relative.shape[1] + 2 * PADDING.value)
        made["wide_relative"] = table.new_empty(heads, 2, widths[-1], dtype=torch.float32)
    if time is not None and q_times is not None:
        widths.append(FLOAT_BUCKETS.value)
        made["wide_time"] = table.new_empty(heads, widths[-1], dtype=torch.float32)
        k_times, q_times = (q_times, None) if k_times is None else (k_times, q_times)
        key_total = k_times.shape[0]
        tiles = key_total // SPAN.value + num_samples
        made["key_split"] = k_times.new_empty(key_total + tiles)
        if q_times is not None:
            query_total = q_times.shape[0]
            of_queries = query_total // SPAN.value + num_samples
            made["query_split"] = q_times.new_empty(query_total + of_queries)
            tiles = tiles + of_queries
    absent: dict[str, Any] = {
        name: None for name in ("wide_relative", "wide_time", "key_split", "query_split") if name not in made
    }
    blocks = cdiv(max(widths), 256)
    written = launched(
        packaged_biases_kernel, (blocks * heads + tiles,), made, **absent, relative=relative, of_time=time,
        max_distance=0 if relative is None else relative.shape[1] // 2, num_buckets=0 if time is None else time.shape[1],
        inverse_scale=1 / scale, blocks=blocks, num_heads=heads, key_times=k_times,
        key_offsets=x.q_offsets if x.k_offsets is None else x.k_offsets, key_total=key_total, query_times=q_times,
        query_offsets=x.q_offsets, query_total=query_total, num_samples=num_samples, BLOCK=256, num_warps=1,
    )  # fmt: skip
    found |= {"relative_bias": written.get("wide_relative"), "time_bias": written.get("wide_time")}
    return found | {"k_times": (keys := written.get("key_split")), "q_times": written.get("query_split", keys)}
