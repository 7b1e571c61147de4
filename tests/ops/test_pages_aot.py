"""The copy of rows in pages compiles for the GPUs we name, without spills, and moves 16 bytes at a time where rows allow it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.aot import AMD, AMD_SHARED_BYTES, TARGETS, compile_kernel
from tests.places import PLACE

pytestmark = pytest.mark.skipif(PLACE.name == "interpret", reason="interpreted kernels are not compiled")

SIZES = {"fp32": 4, "bf16": 2, "i64": 8}


def compiled(dtype: str, width: int, page_rows: int, arch: int | str, *, has_second: bool = True) -> Any:
    from jagged.ops.conversion.copies import NUM_WARPS, block_sizes, extend_pages_kernel

    block_rows, block_columns = block_sizes(page_rows, width * (1 + has_second), SIZES[dtype])
    constants = {"WIDTH": width, "PAGE_ROWS": page_rows, "BLOCK_ROWS": block_rows, "BLOCK_COLUMNS": block_columns}
    pointers = dict.fromkeys(("pool", "first", "second", "joined"), f"*{dtype}")
    pointers |= dict.fromkeys(("pages", "offsets", "kept_offsets", "joined_offsets"), "*i64")
    if not has_second:
        constants["second"] = pointers.pop("second") and None
    types = {name: pointers.get(name, "i32") for name in extend_pages_kernel.arg_names if name not in constants}
    strides = ("first_stride", "second_stride") if width % 16 == 0 else ()
    return compile_kernel(extend_pages_kernel, types, constants, arch=arch, num_warps=NUM_WARPS, divisible=strides)


@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("page_rows", [3, 64])
@pytest.mark.parametrize(("dtype", "width"), [("fp32", 1), ("fp32", 20), ("fp32", 128), ("bf16", 512), ("bf16", 1030)])
def test_nothing_is_spilled(dtype: str, width: int, page_rows: int, arch: int) -> None:
    used = compiled(dtype, width, page_rows, arch)
    assert used.spills == 0
    # Of a page of three rows a tile is one, whose numbers are too few for that.
    if width % 16 == 0 and page_rows == 64 and arch == 90:
        assert "ld.global.v4.b32" in used.assembly
        assert "st.global.v4.b32" in used.assembly


@pytest.mark.parametrize("arch", [*TARGETS, AMD])
def test_times(arch: int | str) -> None:
    used = compiled("i64", 1, 64, arch, has_second=False)
    assert used.spills == 0
    assert used.shared_bytes <= AMD_SHARED_BYTES


def test_amd() -> None:
    assert compiled("bf16", 512, 64, AMD).shared_bytes <= AMD_SHARED_BYTES
