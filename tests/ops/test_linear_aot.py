"""The kernel of sums of columns, at its shipped tiles, compiles for the GPUs we name without a spill."""

from __future__ import annotations

import pytest

from tests.aot import TARGETS, compile_kernel
from tests.places import PLACE

pytestmark = pytest.mark.skipif(PLACE.name == "interpret", reason="interpreted kernels are not compiled")


@pytest.mark.parametrize("width", [1, 8, 64, 200])
@pytest.mark.parametrize("is_turned", [False, True])
@pytest.mark.parametrize(("dtype", "out"), [("bf16", "fp32"), ("fp16", "fp16"), ("fp32", "fp32"), ("fp32", "bf16")])
@pytest.mark.parametrize("arch", TARGETS)
def test_column_sums(arch: int, dtype: str, out: str, is_turned: bool, width: int) -> None:
    """Rows are read 16 bytes at a time, and transposed ones, whose rows are adjacent."""
    from jagged.ops._shared.column_sums import COLUMNS, COLUMNS_OF_PARTS, NUM_WARPS, column_sums_kernel, tile

    for most in (COLUMNS, COLUMNS_OF_PARTS):
        height, columns = tile(width, most)
        adjacent, wide = ("row_stride", "column_stride") if is_turned or width == 1 else ("column_stride", "row_stride")
        constants = {"BLOCK_N": height, "BLOCK_F": columns, adjacent: 1}
        types = {"rows": f"*{dtype}", "sums": f"*{out}"}
        signature = {name: types.get(name, "i32") for name in column_sums_kernel.arg_names if name not in constants}
        divisible = [wide, *(["num_columns"] if width % 16 == 0 else [])]
        found = compile_kernel(column_sums_kernel, signature, constants, arch=arch, num_warps=NUM_WARPS, divisible=divisible)
        assert found.spills == 0
        if width % 16 == 0 and not is_turned:
            assert found.assembly.count("ld.global.v4.b32") + found.assembly.count("cp.async.cg.shared.global") >= 1
