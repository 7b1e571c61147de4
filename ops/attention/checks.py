"""Checks of attention's arguments."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from jagged.ops._shared.offsets import scan_pairs
from jagged.ops._shared.validation import (
    FLOATS,
    check_device,
    check_factors,
    check_offsets,
    check_same,
    check_tensor,
    holds,
    validation_is_on,
)

Window = int | tuple[int | None, int | None]

MAX_HEAD_DIM = 256
# Rows inside a sample are counted in int32 by the kernels, tiles that reach past the end included.
MAX_ROWS = 2**30


def check_rows(q: Tensor, k: Tensor, v: Tensor, k_offsets: Tensor | None) -> None:
    """Check queries, keys and values against one another."""
    check_tensor("q", q, "[Sq, H, D]", FLOATS)
    check_tensor("k", k, "[Sk, Hkv, D]", FLOATS)
    check_tensor("v", v, "[Sk, Hkv, Dv]", FLOATS)
    check_factors("k", k, "q", q)
    check_factors("v", v, "q", q)
    (total, heads, width), (key_total, key_heads, key_width) = q.shape, k.shape
    if not 1 <= width <= MAX_HEAD_DIM:
        raise ValueError(f"q: expected a head width D of 1 to {MAX_HEAD_DIM}, got {width}; use more and narrower heads")
    if key_width != width:
        raise ValueError(f"k: expected the head width of q, {width}, got {key_width}; project both to one width")
    if not 1 <= key_heads <= heads or heads % key_heads:
        raise ValueError(
            f"k: expected a number of heads Hkv that divides the {heads} of q, got {key_heads}; "
            "each key head serves as many query heads"
        )
    if v.shape[:2] != k.shape[:2]:
        raise ValueError(
            f"v: expected [{key_total}, {key_heads}, Dv], the rows and heads of k, got {list(v.shape)}; give every key its value"
        )
    if not 1 <= v.shape[2] <= MAX_HEAD_DIM:
        raise ValueError(f"v: expected a head width Dv of 1 to {MAX_HEAD_DIM}, got {v.shape[2]}; use more and narrower heads")
    if k_offsets is None and not holds(key_total == total):
        raise ValueError(f"k: expected the {total} rows of q, got {key_total}; for keys of other lengths give their k_offsets")
    for name, rows in (("q", total), ("k", key_total)):
        if not holds(rows <= MAX_ROWS):
            raise ValueError(f"{name}: expected at most {MAX_ROWS} rows, got {rows}; split the batch")


def check_both_offsets(q: Tensor, k: Tensor, name: str, offsets: Tensor, k_offsets: Tensor | None) -> None:
    """Check the queries' offsets, called `name`, and the keys' where they have their own."""
    check_offsets(offsets, q, name, total=q.shape[0])
    if k_offsets is None:
        return
    check_offsets(k_offsets, q, "k_offsets", total=k.shape[0])
    check_same("k_offsets", k_offsets, name, offsets)
    if not holds(k_offsets.shape[0] == offsets.shape[0]):
        raise ValueError(f"k_offsets: expected {list(offsets.shape)} as {name}, got {list(k_offsets.shape)}")


def check_mask(
    offsets: Tensor,
    causal: bool,
    window: Window | None,
    num_targets: int | Tensor | None,
    num_contextual: int,
    global_prefix: int,
    windowed_context: bool,
) -> tuple[Tensor | None, dict[str, Any]]:
    """Check the masks' options; return the targets of each sample, `[B]`, and what `Options` have of the others."""
    batch_size = offsets.shape[0] - 1
    behind, ahead = _reach(window)
    # A causal query sees no key behind it, and no window at all hides none.
    ahead = behind if causal else ahead
    has_window = min(behind, ahead) < MAX_ROWS
    if num_contextual < 0:
        raise ValueError(f"num_contextual: expected 0 or more, got {num_contextual}")
    if global_prefix < 0:
        raise ValueError(f"global_prefix: expected 0 or more, got {global_prefix}")
    if global_prefix and not (causal and has_window):
        raise ValueError(
            f"global_prefix: expected 0 without causal=True and a window, got {global_prefix}; only these hide keys of a prefix"
        )
    if windowed_context and not (num_contextual and has_window):
        raise ValueError("windowed_context: expected False without num_contextual and a window, got True; it has no effect there")
    if windowed_context and 0 < global_prefix < num_contextual:
        raise ValueError(
            f"global_prefix: expected 0, or the {num_contextual} contextual positions and more, with windowed_context=True, "
            f"got {global_prefix}"
        )
    prefix = global_prefix if windowed_context else max(num_contextual, global_prefix)
    options = {
        "causal": causal,
        "window": behind if has_window else 0,
        "reach": ahead if has_window else 0,
        "num_contextual": min(num_contextual, MAX_ROWS),
        "prefix": min(prefix, MAX_ROWS),
    }
    if isinstance(num_targets, Tensor):
        check_tensor("num_targets", num_targets, "[B]", (torch.int32, torch.int64))
        if not holds(num_targets.shape[0] == batch_size):
            raise ValueError(f"num_targets: expected [{batch_size}], one for each sample, got {list(num_targets.shape)}")
        return num_targets, options
    if num_targets is None:
        return None, options
    if num_targets < 0:
        raise ValueError(f"num_targets: expected 0 or more, got {num_targets}; use None for no targets")
    return offsets.new_full((batch_size,), min(num_targets, MAX_ROWS)), options


def _reach(window: Window | None) -> tuple[int, int]:
    """Return how many positions before a query a window holds, and how many behind it, its own among both."""
    if window is None:
        return MAX_ROWS, MAX_ROWS
    if isinstance(window, tuple):
        if len(window) != 2:
            raise ValueError(f"window: expected a number or a pair (left, right), got {window}")
        if any(side is not None and side < 0 for side in window):
            raise ValueError(f"window: expected sides of 0 or more, which is the row itself, got {window}; use None for no bound")
        left, right = (MAX_ROWS if side is None else min(side + 1, MAX_ROWS) for side in window)
        return left, right
    if not isinstance(window, (int, torch.SymInt)):
        raise TypeError(f"window: expected a number, a pair (left, right) or None, got {type(window).__name__}")
    if window < 1:
        raise ValueError(f"window: expected 1 or more, which is a row itself, got {window}; use None for no window")
    return min(window, MAX_ROWS), min(window, MAX_ROWS)


def check_biases(
    q: Tensor,
    k: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor | None,
    relative_bias: Tensor | None,
    time_bias: Tensor | None,
    times: dict[str, Tensor | None],
    bias: Tensor | None,
    backend: str,
) -> Tensor | None:
    """Check biases, and the times of queries and keys by their names; return where a jagged bias's samples begin."""
    if relative_bias is time_bias is bias is None and not any(each is not None for each in times.values()):
        return None
    heads = q.shape[1]
    shapes = {"relative_bias": (relative_bias, "[H, 2M + 1]"), "time_bias": (time_bias, "[H, T]")}
    for name, (table, shape) in shapes.items():
        if table is None:
            continue
        check_tensor(name, table, shape)
        _check_bias_dtype(name, table, q)
        if table.shape[0] != heads:
            raise ValueError(f"{name}: expected {shape} with the {heads} heads of q, got {list(table.shape)}")
    if relative_bias is not None and relative_bias.shape[1] % 2 == 0:
        raise ValueError(
            f"relative_bias: expected an odd number of columns, 2M + 1 for the distances -M to M, got {relative_bias.shape[1]}"
        )
    if time_bias is not None and not time_bias.shape[1]:
        raise ValueError("time_bias: expected [H, T] with one bucket or more, got 0 columns")
    for place, ((name, each), x) in enumerate(zip(times.items(), (q, k), strict=False)):
        if each is None:
            # Where keys are the queries' rows they have their times.
            if time_bias is not None and (place == 0 or k_offsets is not None):
                raise ValueError(f"{name}: expected [{x.shape[0]}] beside time_bias, got None; give the time of every row")
            continue
        if time_bias is None:
            raise ValueError(f"{name}: got times, but no time_bias that reads them; give both or neither")
        check_tensor(name, each, "[S]", (torch.int32, torch.int64))
        if not holds(each.shape[0] == x.shape[0]):
            raise ValueError(f"{name}: expected [{x.shape[0]}], one for each row, got {list(each.shape)}")
        check_device(name, each, "q", q)
    if bias is None:
        return None
    if not isinstance(bias, Tensor) or bias.dim() not in (2, 4):
        got = list(bias.shape) if isinstance(bias, Tensor) else type(bias).__name__
        raise ValueError(f"bias: expected a dense [B, H, Lq, Lk] or a jagged [H, P], got {got}")
    _check_bias_dtype("bias", bias, q)
    if bias.dim() == 4:
        if not holds(bias.shape[0] == q_offsets.shape[0] - 1) or bias.shape[1] != heads:
            raise ValueError(
                f"bias: expected [{q_offsets.shape[0] - 1}, {heads}, Lq, Lk], the samples and the heads of q, "
                f"got {list(bias.shape)}; expand what all share"
            )
        return None
    if bias.shape[0] != heads:
        raise ValueError(f"bias: expected [{heads}, P], the heads of q, got {list(bias.shape)}")
    starts: Tensor = scan_pairs(q_offsets, q_offsets if k_offsets is None else k_offsets, backend)
    # More of them, as for a CUDA graph whose lengths change, are never read.
    if validation_is_on(starts) and int(starts[-1]) > bias.shape[1]:
        raise ValueError(f"bias: expected {int(starts[-1])} columns, one for each pair of a query and a key, got {bias.shape[1]}")
    return starts


def _check_bias_dtype(name: str, bias: Tensor, q: Tensor) -> None:
    if bias.dtype not in FLOATS or (bias.dtype == torch.float64 and q.dtype != torch.float64):
        raise TypeError(
            f"{name}: expected dtype float32, bfloat16 or float16, or float64 beside float64 q, got "
            f"{str(bias.dtype).removeprefix('torch.')}; convert it with .to(...)"
        )


def positive_scale(q: Tensor, scale: float | None) -> tuple[Tensor, float]:
    """Return queries and a factor above 0 that together scale the scores.

    The kernels find the largest product before they scale it, and hide those of keys out of sight by minus infinity.
    """
    factor = 1 / math.sqrt(q.shape[2]) if scale is None else float(scale)
    # Dynamo, which may hold the factor as a symbol, does not trace math.isfinite.
    if not -math.inf < factor < math.inf:
        raise ValueError(f"scale: expected a finite number, got {scale}; leave it out for 1 / sqrt(D)")
    if factor > 0:
        return q, factor
    return (-q, -factor) if factor else (q * 0.0, 1.0)
