"""Every cross-entropy kernel compiles with its tiles for the GPUs we name, without a spill, within their shared memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from jagged.ops.cross_entropy.tiles import EXCEPTIONS, TILES, tile_of
from tests.aot import AMD, AMD_SHARED_BYTES, TARGETS, Resources, compile_kernel
from tests.places import PLACE

pytestmark = pytest.mark.skipif(PLACE.name == "interpret", reason="interpreted kernels are not compiled")

# Of the eighth generation the smaller GPUs, 8.6 and 8.9.
SHARED_BYTES = {80: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
ROWS = [(kernel, size, width) for (kernel, size), table in TILES.items() for width in table]
POINTERS = {"target": "*i64", **dict.fromkeys(("part_maximum", "part_sum", "lse", "target_logit"), "*fp32")}
POINTERS |= dict.fromkeys(("grad_loss", "grad_lse", "inverse_scale"), "*fp32")
SIZES = ("num_rows", "num_items", "num_parts", "items_per_part", "rows_per_part", "ignore_index")
TOO_LARGE_FOR_AMD = {("forward", 2, 512), ("backward_hidden", 2, 256)}
# Matrices reach the kernels with strides that are multiples of 16.
ALIGNED = ("hidden_stride", "weight_stride")


def compile_tile(
    kernel_name: str, dtype: str, width: int, arch: int | str, *, precision: str = "ieee", everything: bool = False
) -> Resources:
    """Compile one row of the table; `everything` with a gradient of the log-sum-exp, and float16's scale."""
    from jagged.ops.cross_entropy import kernels

    # PyTorch says of gfx942 that its capability is 9.4.
    capability = 9 if isinstance(arch, str) else arch // 10
    tile = tile_of(kernel_name, width, torch.float32 if dtype == "fp32" else torch.bfloat16, capability)
    kernel = getattr(kernels, f"linear_cross_entropy_{kernel_name}_kernel")
    constants: dict[str, Any] = {
        "BLOCK_N": tile.rows, "BLOCK_V": tile.items, "BLOCK_D": tile.columns, "BLOCK_K": tile.step,
        "WIDTH": width, "PRECISION": precision, "HAS_GRAD_LSE": everything, "HAS_SCALE": everything,
    }  # fmt: skip
    if not everything:
        constants |= {"grad_lse": None, "inverse_scale": None}
    types = {**POINTERS, **dict.fromkeys(("hidden", "weight", "grad_hidden", "grad_weight"), f"*{dtype}")}
    types |= dict.fromkeys((*SIZES, *ALIGNED), "i32")
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature = {name: types[name] for name in kernel.arg_names if name not in constants}
    return compile_kernel(
        kernel, signature, constants, arch=arch, num_warps=tile.num_warps, num_stages=tile.num_stages, divisible=ALIGNED
    )


def check(kernel_name: str, dtype: str, width: int, arch: int, **options: Any) -> None:
    used = compile_tile(kernel_name, dtype, width, arch, **options)
    where = f"{kernel_name} {dtype} {width} for sm_{arch}, {options}: {used}"
    # With every option one register may be saved around the loop: 4 bytes stored and loaded, at most twice.
    assert used.spills <= (16 if options.get("everything") else 0), where
    assert used.shared_bytes <= SHARED_BYTES[arch], where


@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize(("kernel", "size", "width"), [row for row in ROWS if row[1] == 2])
def test_half_tiles(kernel: str, size: int, width: int, arch: int) -> None:
    check(kernel, "bf16", width, arch)


@pytest.mark.parametrize("arch", [90, *(pytest.param(arch, marks=pytest.mark.long) for arch in TARGETS if arch != 90)])
@pytest.mark.parametrize(("kernel", "size", "width"), [row for row in ROWS if row[1] == 4])
def test_float32_tiles(kernel: str, size: int, width: int, arch: int) -> None:
    check(kernel, "fp32", width, arch)


@pytest.mark.long
@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize(("kernel", "size", "width"), ROWS)
def test_every_option(kernel: str, size: int, width: int, arch: int) -> None:
    check(kernel, "fp16" if size == 2 else "fp32", width, arch, precision="tf32", everything=True)


@pytest.mark.parametrize(
    ("kernel", "size", "width"), [row if row[2] == 64 else pytest.param(*row, marks=pytest.mark.long) for row in ROWS]
)
def test_amd(kernel: str, size: int, width: int) -> None:
    """Every kernel compiles; the named tiles would be refused at their launch."""
    used = compile_tile(kernel, "bf16" if size == 2 else "fp32", width, AMD)
    too_large = (kernel, size, width) in TOO_LARGE_FOR_AMD
    assert (used.shared_bytes > AMD_SHARED_BYTES) == too_large, f"{kernel} {size} {width}: {used}"


@pytest.mark.parametrize("arch", [*TARGETS, AMD])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_join(dtype: str, arch: int | str) -> None:
    from jagged.ops.cross_entropy import kernels

    types = {**POINTERS, "hidden": f"*{dtype}", "weight": f"*{dtype}", **dict.fromkeys((*SIZES, *ALIGNED), "i32")}
    constants = {"BLOCK_N": kernels.JOIN_ROWS, "BLOCK_D": kernels.JOIN_WIDTH, "WIDTH": 64}
    kernel = kernels.linear_cross_entropy_join_kernel
    signature = {name: types[name] for name in kernel.arg_names if name not in constants}
    used = compile_kernel(kernel, signature, constants, arch=arch, divisible=ALIGNED)
    assert used.spills == 0, str(used)


def test_every_width_has_a_tile() -> None:
    for capability in (8, 9, 10, 12):
        for kernel, size in TILES:
            for width in (0, 1, 64, 65, 256, 257, 2304):
                tile = tile_of(kernel, width, torch.bfloat16 if size == 2 else torch.float32, capability)
                if width <= tile.step and kernel != "forward":
                    assert tile.step == tile.columns, "a side that stays on chip is read as one tile"
    for exceptions in EXCEPTIONS.values():
        assert set(exceptions) <= set(ROWS)
