"""What the launches of all kernels are given: the arguments they have in common, tiles as constants, walks cut into parts."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from jagged.ops._shared.launch import Launcher
from jagged.ops._shared.matrices import aligned, balanced_parts, float32_products, gpu
from jagged.ops._shared.sizes import cdiv
from jagged.ops.sampled_cross_entropy.draws import Source, feistel_bits, log_uniform_scale
from jagged.ops.sampled_cross_entropy.triton.configurations import SHARED_ROWS, BlockTile

# Sizes and numbers that vary from call to call, of all kernels.
VARYING = [
    "num_rows", "num_items", "num_negatives", "num_excluded", "num_parts", "rows_per_draw", "rows_per_unit", "places_per_part",
    "parameter", "ignore_index", "first_unit", "first_row", "num_entries", "num_pairs",
    "division", "shift_of_division",
]  # fmt: skip
# Rounds of programs that a walk is cut into at most.
ROUNDS = 4


def call_of(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    source: Source,
    excluded: Tensor | None,
    exclude_offsets: Tensor | None,
    scale: float,
    ignore_index: int,
    is_corrected: bool,
    mask_hits: bool,
    loss: str,
) -> dict[str, Any]:
    """Return the arguments that all kernels have in common, by name."""
    hidden, weight = aligned(hidden), aligned(weight)
    num_items, count = weight.shape[0], source.num_negatives
    # What the logarithms of all negatives' expected counts have in common.
    offset = math.log(count)
    if source.kind == "log_uniform":
        offset -= math.log(math.log1p(num_items))
    elif source.log_q is None:
        offset -= math.log(num_items)
    tensors = {
        "target": target, "ids": source.ids, "log_q": source.log_q, "probability": source.probability, "seed": source.seed,
        "excluded": excluded, "exclude_offsets": exclude_offsets,
    }  # fmt: skip
    return {
        **{name: None if tensor is None else tensor.contiguous() for name, tensor in tensors.items()},
        "hidden": hidden, "weight": weight, "num_rows": hidden.shape[0], "num_items": num_items, "num_negatives": count,
        "num_excluded": 0 if excluded is None else excluded.shape[0], "hidden_stride": hidden.stride(0),
        "weight_stride": weight.stride(0), "rows_per_draw": source.rows_per_draw, "offset": offset,
        "parameter": parameter_of(source.kind, num_items),
        "scale": scale, "filter_eps": None, "ignore_index": ignore_index, "KIND": source.kind, "LOSS": loss,
        "IS_CORRECTED": is_corrected, "MASK_HITS": mask_hits, "WIDTH": hidden.shape[1],
    }  # fmt: skip


def parameter_of(kind: str, num_items: int) -> int:
    """Return the number of the catalogue that a kind of draws needs in kernels."""
    parameters = {"log_uniform": log_uniform_scale, "permuted": feistel_bits}
    return parameters[kind](num_items) if kind in parameters else 0


# By the kernel's id: its own hash is one of its source. A launcher keeps its kernel.
_launchers: dict[int, tuple[Launcher, tuple[str, ...]]] = {}


def launch(kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any], **constants: Any) -> None:
    """Launch a kernel with those of the arguments that it has; constants come before arguments of the same name."""
    found = _launchers.get(id(kernel))
    if found is None:
        found = _launchers[id(kernel)] = Launcher(kernel), tuple(kernel.arg_names)
    launcher, names = found
    launcher(grid, **{name: arguments[name] for name in names if name not in constants}, **constants)


def shares_gathers(rows_per_draw: int) -> bool:
    """Tell whether so many rows share a draw that their logits are products of matrices."""
    return rows_per_draw >= SHARED_ROWS


def parts_of(length: int, block: int, blocks: int, overhead: int, num_warps: int, device: torch.device) -> tuple[int, int]:
    """Return into how many parts `blocks` programs' walks over `length` in steps of `block` are cut, and the length of a part.

    `overhead` is what a part costs beside its steps, in steps.
    """
    # As registers and shared memory have it with the tiles of the largest widths.
    at_once = gpu(device).multiprocessors * max(1, 8 // num_warps)
    most = cdiv(ROUNDS * at_once, max(1, blocks))
    num_parts, steps = balanced_parts(cdiv(length, block), blocks, at_once, overhead, most)
    return num_parts, steps * block


def block_constants(tile: BlockTile) -> dict[str, Any]:
    """Return a tile as the kernels for shared draws take it."""
    return {
        "BLOCK_N": tile.rows, "BLOCK_J": tile.negatives, "BLOCK_D": tile.columns, "BLOCK_K": tile.step,
        "PRECISION": float32_products(),
        "num_warps": tile.num_warps, "num_stages": tile.num_stages,
    }  # fmt: skip
