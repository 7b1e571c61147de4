"""Every kernel over pairs at its shipped tiles compiles for the GPUs we name: no spill, and shared memory that each has."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.aot import AMD, AMD_SHARED_BYTES, TARGETS, Resources, compile_kernel
from tests.places import PLACE

pytestmark = pytest.mark.skipif(PLACE.name == "interpret", reason="interpreted kernels are not compiled")

# What compute capabilities 8.6 and 8.9 have; the least of all from 8.0 on.
SHARED_BYTES = 99 * 1024
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
COUNTS = ("num_samples", "a_total", "b_total", "output_total", "total", "num_pairs")
SHORT, MEDIUM, LONG = 10, 60, 3_000


def compile_pair_kernel(
    name: str,
    arch: int | str,
    dtype: str,
    tile: tuple[int, ...],
    *,
    width: int,
    precision: str,
    transposed: bool,
    offsets: str,
    is_scanned: bool,
) -> Resources:
    import triton.language as tl

    from jagged.ops.bmm import pair_kernels

    kernel = getattr(pair_kernels, name)
    names = (
        ("BLOCK_M", "BLOCK_N", "BLOCK_K")
        if name == "pair_scores_kernel"
        else ("BLOCK_M", "BLOCK_K", "BLOCK_D", "TERMS", "COLUMNS")
    )
    constants: dict[str, Any] = {
        **dict(zip(names, tile, strict=False)),
        "WIDTH": width,
        "PRECISION": precision,
        "INDEX": tl.int32,
        "TRANSPOSED": transposed,
        "IS_SQUARE": not transposed,
        # A launch finds out that scores lie side by side.
        "scores_stride": 1,
    }
    if not is_scanned:
        constants["pair_offsets"] = None
    constants = {argument: value for argument, value in constants.items() if argument in kernel.arg_names}
    strides = [argument for argument in kernel.arg_names if argument.endswith("stride") and argument not in constants]
    types = dict.fromkeys(COUNTS, "i32") | dict.fromkeys(strides, "i32")
    types |= dict.fromkeys([argument for argument in kernel.arg_names if argument.endswith("offsets")], f"*{offsets}")
    types["pair_offsets"] = "*i64"
    return compile_kernel(
        kernel,
        {argument: types.get(argument, f"*{dtype}") for argument in kernel.arg_names if argument not in constants},
        constants,
        arch=arch,
        num_warps=tile[-2],
        num_stages=tile[-1],
        divisible=strides if width % 16 == 0 else (),
    )


def check(
    arch: int | str,
    dtype: str,
    a_mean: float,
    b_mean: float,
    *,
    width: int = 1024,
    precision: str | None = None,
    offsets: str = "i64",
    is_scanned: bool = False,
) -> None:
    from jagged.ops.bmm import pair_kernels

    wide = width % 16 == 0
    precision = precision or ("tf32x3" if dtype == "fp32" and arch != AMD else "ieee")
    scores = pair_kernels.scores_configuration(DTYPES[dtype], wide, a_mean, b_mean)
    sums = pair_kernels.sums_configuration(DTYPES[dtype], wide, a_mean, b_mean)
    for name, tile, transposed in (
        ("pair_scores_kernel", scores, False),
        ("pair_sums_kernel", sums, False),
        ("pair_sums_kernel", sums, True),
    ):
        used = compile_pair_kernel(
            name,
            arch,
            dtype,
            tile,
            width=width,
            precision=precision,
            transposed=transposed,
            offsets=offsets,
            is_scanned=is_scanned,
        )
        where = f"{name} {tile} transposed={transposed} {dtype} {precision} D={width} for {arch}: {used}"
        print(where)
        assert used.spills == 0, where
        assert used.shared_bytes <= (AMD_SHARED_BYTES if arch == AMD else SHARED_BYTES), where


@pytest.mark.parametrize("arch", TARGETS)
def test_common_tiles(arch: int) -> None:
    check(arch, "bf16", MEDIUM, MEDIUM)
    check(arch, "fp32", MEDIUM, MEDIUM)


def test_other_tiles() -> None:
    check(90, "fp16", SHORT, MEDIUM, offsets="i32")
    check(90, "bf16", MEDIUM, SHORT, width=100)
    check(90, "bf16", LONG, LONG, width=64, is_scanned=True)
    check(90, "fp32", MEDIUM, MEDIUM, precision="tf32")


@pytest.mark.long
@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize(("dtype", "precision"), [("bf16", None), ("fp16", None), ("fp32", None), ("fp32", "tf32")])
def test_every_tile(arch: int, dtype: str, precision: str | None) -> None:
    for a_mean in (SHORT, MEDIUM, LONG):
        for b_mean in (SHORT, MEDIUM, LONG):
            for width in (1, 64, 130, 1024):
                check(arch, dtype, a_mean, b_mean, width=width, precision=precision)


@pytest.mark.parametrize("arch", [*TARGETS, AMD])
def test_pair_offsets(arch: int | str) -> None:
    from jagged.ops._shared import kernels

    for offsets in ("i32", "i64"):
        signature = {"a_offsets": f"*{offsets}", "b_offsets": f"*{offsets}", "pair_offsets": "*i64", "num_samples": "i32"}
        used = compile_kernel(kernels.pair_offsets_kernel, signature, {"BLOCK": kernels.OFFSETS_BLOCK}, arch=arch)
        assert used.spills == 0, used


def test_amd() -> None:
    check(AMD, "bf16", SHORT, SHORT)
