"""Every kernel of catalogue top-k compiles with its tiles for the GPUs we name, next to no spills, within their shared memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from jagged.ops.catalogue_topk.configurations import CONFIGURATIONS, TILE_ITEMS, configuration
from tests.aot import AMD, AMD_SHARED_BYTES, TARGETS, Resources, compile_kernel
from tests.places import PLACE

pytestmark = pytest.mark.skipif(PLACE.name == "interpret", reason="interpreted kernels are not compiled")

# Of the eighth generation the smaller GPUs, 8.6 and 8.9.
SHARED_BYTES = {80: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
KERNELS = ("maximum", "items")
ROWS = [(kernel, size, width) for kernel in KERNELS for size, table in CONFIGURATIONS.items() for width in table]
TYPES = {"hit_offsets": "*i64", "hit_tiles": "*i32", "hit_bits": "*i64", "tile_offsets": "*i64", "pairs": "*i64", "keys": "*i64"}
TYPES |= dict.fromkeys(("num_rows", "num_items", "num_tiles", "num_pairs", "tiles_per_part", "tiles_per_row"), "i32")
# Matrices reach the kernels with strides that are multiples of 16.
ALIGNED = ("hidden_stride", "weight_stride")
TYPES |= dict.fromkeys(ALIGNED, "i32")


def compile_tile(
    kernel_name: str, dtype: str, width: int, arch: int | str, *, weight: str = "", everything: bool = True, tf32: bool = False
) -> Resources:
    """Compile one row of the table, `everything` with a bias and items to exclude."""
    from jagged.ops.catalogue_topk import kernels

    tile = configuration(width, torch.float32 if dtype == "fp32" else torch.bfloat16)
    kernel = getattr(kernels, f"catalogue_topk_{kernel_name}_kernel")
    constants: dict[str, Any] = {
        "HAS_BIAS": everything, "HAS_HITS": everything, "BLOCK_N": tile.rows, "BLOCK_V": TILE_ITEMS, "BLOCK_K": tile.step,
        "WIDTH": width, "PRECISION": "tf32" if tf32 else "ieee",
    }  # fmt: skip
    if not everything:
        constants |= dict.fromkeys(("bias", "hit_offsets", "hit_tiles", "hit_bits"))
    types = {**TYPES, "hidden": f"*{dtype}", "weight": f"*{weight or dtype}", "bias": "*fp32"}
    signature = {name: types[name] for name in kernel.arg_names if name not in constants}
    return compile_kernel(
        kernel, signature, constants, arch=arch, num_warps=tile.num_warps, num_stages=tile.num_stages, divisible=ALIGNED
    )


def check(kernel_name: str, dtype: str, width: int, arch: int, **options: Any) -> None:
    used = compile_tile(kernel_name, dtype, width, arch, **options)
    where = f"{kernel_name} {dtype} {width} for sm_{arch}, {options}: {used}"
    # With every option a few registers may be saved around a loop: at most 24 bytes stored and loaded.
    assert used.spills <= (24 if options["everything"] else 0), where
    assert used.shared_bytes <= SHARED_BYTES[arch], where


@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize(("kernel", "size", "width"), [row for row in ROWS if row[1] == 2])
@pytest.mark.parametrize("everything", [False, True])
def test_half_tiles(kernel: str, size: int, width: int, everything: bool, arch: int) -> None:
    check(kernel, "bf16", width, arch, everything=everything)


@pytest.mark.parametrize("arch", [90, *(pytest.param(arch, marks=pytest.mark.long) for arch in TARGETS if arch != 90)])
@pytest.mark.parametrize(("kernel", "size", "width"), [row for row in ROWS if row[1] == 4])
@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize(("weight", "tf32"), [("", False), ("", True), ("bf16", False)])
def test_float32_tiles(kernel: str, size: int, width: int, everything: bool, arch: int, weight: str, tf32: bool) -> None:
    check(kernel, "fp32", width, arch, everything=everything, weight=weight, tf32=tf32)


@pytest.mark.parametrize(
    ("kernel", "size", "width"), [row if row[2] == 64 else pytest.param(*row, marks=pytest.mark.long) for row in ROWS]
)
def test_amd(kernel: str, size: int, width: int) -> None:
    used = compile_tile(kernel, "bf16" if size == 2 else "fp32", width, AMD)
    assert used.shared_bytes <= AMD_SHARED_BYTES, f"{kernel} {size} {width}: {used}"


def test_every_width_has_a_tile() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for width in (0, 1, 64, 65, 256, 257, 2304):
            assert configuration(width, dtype).step >= 16
