"""Every kernel of sampled cross-entropy compiles with its tiles for the GPUs we name, without a spill."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from jagged.ops.sampled_cross_entropy.draws import KINDS
from jagged.ops.sampled_cross_entropy.triton.configurations import (
    BLOCK_TILES,
    SHARED_ROWS,
    block_configuration,
    item_configuration,
    row_configuration,
)
from tests.aot import AMD, AMD_SHARED_BYTES, TARGETS, Resources, compile_kernel
from tests.places import PLACE

pytestmark = pytest.mark.skipif(PLACE.name == "interpret", reason="interpreted kernels are not compiled")

# Of the eighth generation the smaller GPUs, 8.6 and 8.9.
SHARED_BYTES = {80: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
WIDTHS = (16, 64, 128, 256, 512)
BLOCKS = {"forward_blocks": "forward", "directions": "directions", "sums": "sums"}
KERNELS = (
    "forward_rows", "draw", *BLOCKS, "results", "prepare", "backward_rows", "pairs", "keys", "offsets", "items", "items_of_sums",
    "join",
)  # fmt: skip
POINTERS = {
    **dict.fromkeys(("target", "seed", "excluded", "exclude_offsets", "entries", "touched"), "*i64"),
    **dict.fromkeys(("factors",), "*fp32"),
    **dict.fromkeys(("ids", "keys", "entry_offsets", "items", "row_target", "part_kept"), "*i32"),
    **dict.fromkeys(("log_q", "probability", "target_correction", "sample_weight", "inverse_scale", "sums"), "*fp32"),
    **dict.fromkeys(("corrections", "part_maximum", "part_sum", "shift", "part", "directions"), "*fp32"),
    **dict.fromkeys(("loss", "lse", "statistic", "share", "pull", "direction", "first_sums", "other_sums"), "*fp32"),
    **dict.fromkeys(("grad_loss", "grad_lse", "grad_logit", "grad_statistic"), "*fp32"),
}
NUMBERS = dict.fromkeys(("offset", "scale", "positive_weight", "filter_eps"), "fp32")
# Matrices reach the kernels with strides that are multiples of 16.
ALIGNED = ("hidden_stride", "weight_stride", "table_stride", "direction_stride")


def tile_constants(
    kernel: str, width: int, dtype: torch.dtype, arch: int | str, rows_per_draw: int, *, is_plain: bool
) -> dict[str, Any]:
    from jagged.ops.sampled_cross_entropy.triton import call, entries, launch, shared_draws

    # PyTorch says of gfx942 that its capability is 9.4.
    capability = 9 if isinstance(arch, str) else arch // 10
    if kernel in BLOCKS:
        return call.block_constants(
            block_configuration(BLOCKS[kernel], width, dtype, capability, rows_per_draw, is_plain=is_plain)
        )
    row, item = row_configuration(width, dtype, capability), item_configuration(width)
    constants = {
        "forward_rows": {"BLOCK_J": row.negatives, "BLOCK_D": row.columns, "num_warps": row.num_warps},
        "pairs": {"BLOCK_J": row.negatives, "BLOCK_D": row.columns, "num_warps": row.num_warps, "PART": launch.PAIRS_PART},
        "draw": {"BLOCK": shared_draws.DRAW_BLOCK, "BLOCK_D": shared_draws.ROW_WIDTH},
        "results": {"BLOCK_N": shared_draws.RESULT_BLOCK, "BLOCK_D": shared_draws.ROW_WIDTH},
        "prepare": {"BLOCK_N": shared_draws.ROW_BLOCK, "BLOCK_D": shared_draws.ROW_WIDTH},
        "backward_rows": {"BLOCK_N": launch.ROW_BLOCK, "BLOCK_D": launch.ROW_WIDTH},
        "offsets": {"BLOCK": entries.OFFSETS_BLOCK},
        "keys": {"BLOCK": entries.KEY_BLOCK, "UNITS_ARE_ROWS": True},
        "items": {"BLOCK_E": item.negatives, "BLOCK_D": item.columns, "num_warps": item.num_warps, "CHUNK": entries.CHUNK,
                  "BY_ENTRY": kernel == "items_of_sums"},
        "join": {"BLOCK_C": entries.JOIN_BLOCK, "BLOCK_D": item.columns, "CHUNK": entries.CHUNK},
    }  # fmt: skip
    return constants[kernel.removesuffix("_of_sums")]


def compile_one(
    kernel_name: str,
    dtype: str,
    width: int,
    arch: int | str,
    *,
    kind: str = "uniform",
    loss: str = "softmax",
    everything: bool = False,
    is_gathered: bool = True,
    rows_per_draw: int = 512,
) -> Resources:
    """Compile a kernel with its tile; `everything` with lists, weights, a filter where one is, and all gradients."""
    from jagged.ops.sampled_cross_entropy.triton import backward, blocks, forward

    name = f"sampled_{kernel_name.removesuffix('_of_sums')}_kernel"
    kernel = next(getattr(module, name) for module in (forward, blocks, backward) if hasattr(module, name))
    constants = tile_constants(kernel_name, width, DTYPES[dtype], arch, rows_per_draw, is_plain=loss != "bce" and not everything)
    launch = {option: constants.pop(option) for option in ("num_warps", "num_stages") if option in constants}
    constants |= {"KIND": kind, "LOSS": loss, "IS_CORRECTED": loss == "softmax", "IS_INSIDE": True, "MASK_HITS": True}
    constants |= {"RENORMALISE": everything, "ADDS": everything, "WIDTH": width, "IS_GATHERED": is_gathered}
    constants["IN_POWERS"] = dtype != "fp32" and loss != "bce"
    used = {"given": ("ids", "log_q"), "popularity": ("seed", "probability", "ids", "log_q")}.get(kind, ("seed",))
    absent = {"ids", "log_q", "seed", "probability"} - set(used)
    if kernel_name == "items":
        absent |= {"sums"}
    if not is_gathered:
        absent |= {"gathered"}
    if loss != "softmax":
        absent |= {"corrections"}
    if not everything:
        absent |= {"part", "part_kept"} if loss != "bce" else {"part"}
        absent |= {
            "touched",
            "target_correction",
            "excluded",
            "exclude_offsets",
            "sample_weight",
            "filter_eps",
            "grad_lse",
            "inverse_scale",
        }
    elif kernel_name.startswith("forward"):
        # A filtered direction comes without a loss.
        absent |= {"filter_eps"}
    constants = {name: value for name, value in (constants | dict.fromkeys(absent)).items() if name in kernel.arg_names}
    matrices = dict.fromkeys(("hidden", "weight", "grad_hidden", "grad_weight", "clean", "table", "gathered"), f"*{dtype}")
    types = {**dict.fromkeys(kernel.arg_names, "i32"), **POINTERS, **NUMBERS, **matrices}
    signature = {name: types[name] for name in kernel.arg_names if name not in constants}
    return compile_kernel(kernel, signature, constants, arch=arch, divisible=ALIGNED, **launch)


def check(kernel: str, dtype: str, width: int, arch: int, **options: Any) -> None:
    used = compile_one(kernel, dtype, width, arch, **options)
    where = f"{kernel} {dtype} {width} for sm_{arch}, {options}: {used}"
    assert used.spills == 0, where
    assert used.shared_bytes <= SHARED_BYTES[arch], where


@pytest.mark.parametrize("arch", [90, *(pytest.param(arch, marks=pytest.mark.long) for arch in TARGETS if arch != 90)])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if kernel != "keys"])
def test_tiles(kernel: str, width: int, dtype: str, arch: int) -> None:
    check(kernel, dtype, width, arch)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kernel", ["forward_rows", "draw", "keys", "items", "pairs"])
def test_kinds_of_negatives(kernel: str, kind: str) -> None:
    check(kernel, "bf16", 256, 90, kind=kind)


@pytest.mark.parametrize("width", [64, 256])
@pytest.mark.parametrize("kernel", ["draw", "forward_blocks", "directions"])
def test_rows_that_are_not_copied(kernel: str, width: int) -> None:
    check(kernel, "bf16", width, 90, is_gathered=False)


@pytest.mark.parametrize("kernel", BLOCKS)
def test_draws_of_few_rows(kernel: str) -> None:
    for dtype in ("bf16", "fp16"):
        check(kernel, dtype, 256, 90, rows_per_draw=128)


@pytest.mark.parametrize("kernel", BLOCKS)
def test_products_do_not_wait_for_one_another(kernel: str) -> None:
    for dtype in ("bf16", "fp16"):
        assert not compile_one(kernel, dtype, 256, 90).is_serialised


@pytest.mark.parametrize("loss", ["bce", "refined"])
@pytest.mark.parametrize("kernel", ["forward_rows", *BLOCKS, "results", "items"])
def test_losses(kernel: str, loss: str) -> None:
    check(kernel, "bf16", 64, 90, loss=loss)


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_option(kernel: str, dtype: str) -> None:
    used = compile_one(kernel, dtype, 128, 90, kind="popularity", everything=True)
    # With every option a few registers may be saved around the loop.
    assert used.spills <= 64, f"{kernel}: {used}"
    assert used.shared_bytes <= SHARED_BYTES[90], f"{kernel}: {used}"


@pytest.mark.parametrize("kernel", KERNELS)
def test_amd(kernel: str) -> None:
    used = compile_one(kernel, "bf16", 64, AMD)
    assert used.shared_bytes <= AMD_SHARED_BYTES, f"{kernel}: {used}"


def test_every_width_has_a_tile() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for width in (0, 1, 64, 65, 256, 257, 2304):
            for rows in (SHARED_ROWS, 100, 1000):
                for kernel in BLOCKS.values():
                    for capability in (8, 9, 10, 12):
                        tile = block_configuration(kernel, width, dtype, capability, rows)
                        assert tile.rows >= SHARED_ROWS
                        if width <= tile.step:
                            assert tile.step == tile.columns, "items that stay on chip are read as one tile"
            for row in (row_configuration(width, dtype, 9), item_configuration(width)):
                assert row.columns >= min(width, 256), "widths up to 256 are read once"
    assert set(BLOCK_TILES) == {(kernel, size) for kernel in BLOCKS.values() for size in (2, 4)}
