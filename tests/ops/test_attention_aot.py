"""Every attention kernel at its shipped tiles compiles for the GPUs we name: no spill, and shared memory that each has."""

from __future__ import annotations

from typing import Any

import pytest

from jagged.ops.attention.configurations import TABLE
from tests.aot import AMD, AMD_SHARED_BYTES, TARGETS, Resources, compile_kernel
from tests.places import PLACE

pytestmark = pytest.mark.skipif(PLACE.name == "interpret", reason="interpreted kernels are not compiled")

KERNELS = ("forward", "backward_dq", "backward_dkv")
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
TOO_LARGE_FOR_AMD = {((2, 128, False), "forward"), ((2, 128, False), "backward_dq")}


def compile_row(
    name: str,
    arch: int | str,
    row: tuple[int, int, bool],
    *,
    dtype: str = "",
    precision: str = "ieee",
    causal: bool = True,
    head_dim: int | None = None,
) -> Resources:
    from jagged.ops.attention import kernels

    kernel = getattr(kernels, f"attention_{name}_kernel")
    size, width, _ = row
    tiles = TABLE[row][KERNELS.index(name)]
    block_m, block_n = (tiles.visit, tiles.own) if name == "backward_dkv" else (tiles.own, tiles.visit)
    constants = {
        "IS_CAUSAL": causal,
        "HEAD_DIM": head_dim or width,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_D": width,
        "INPUT_PRECISION": precision,
    }
    types = {"offsets": "*i64", "lse": "*fp32", "delta": "*fp32", "scale": "fp32", "num_samples": "i32", "total": "i32"}
    strides = [argument for argument in kernel.arg_names if argument.endswith("stride")]
    types |= dict.fromkeys(strides, "i32")
    values = f"*{dtype or {2: 'bf16', 4: 'fp32'}[size]}"
    signature = {argument: types.get(argument, values) for argument in kernel.arg_names if argument not in constants}
    return compile_kernel(
        kernel,
        signature,
        constants,
        arch=arch,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        # Rows of an odd width need not begin at 16 bytes; `configuration` gives them the tiles for short samples.
        divisible=strides if head_dim is None else (),
    )


def check(name: str, arch: int, row: tuple[int, int, bool], **options: Any) -> None:
    used = compile_row(name, arch, row, **options)
    where = f"{name} {row} for sm_{arch}, {options}: {used}"
    assert used.spills == 0, where
    assert used.shared_bytes <= SHARED_BYTES[arch], where


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("arch", TARGETS)
def test_common_tiles(name: str, arch: int) -> None:
    check(name, arch, (2, 128, False))


@pytest.mark.parametrize("name", KERNELS)
def test_other_dtypes_and_widths(name: str) -> None:
    check(name, 90, (2, 64, True))
    check(name, 90, (2, 64, False), dtype="fp16", causal=False)
    check(name, 90, (2, 128, True), head_dim=100)
    check(name, 90, (4, 32, False))
    check(name, 90, (4, 64, True), precision="tf32", causal=False)


@pytest.mark.long
@pytest.mark.parametrize("row", TABLE)
def test_every_row_of_the_table(row: tuple[int, int, bool]) -> None:
    for name in KERNELS:
        for precision in ("ieee", "tf32") if row[0] == 4 else ("ieee",):
            for arch in TARGETS:
                check(name, arch, row, precision=precision)
            check(name, 90, row, precision=precision, causal=False)
            if row[2]:
                check(name, 90, row, precision=precision, head_dim=row[1] - 1)


@pytest.mark.parametrize(
    "row", [row if row in ((2, 64, False), (4, 64, True)) else pytest.param(row, marks=pytest.mark.long) for row in TABLE]
)
def test_amd(row: tuple[int, int, bool]) -> None:
    """Every kernel compiles; the named tiles would be refused at their launch."""
    for name in KERNELS:
        used = compile_row(name, AMD, row)
        assert (used.shared_bytes > AMD_SHARED_BYTES) == ((row, name) in TOO_LARGE_FOR_AMD), f"{name} {row}: {used}"
