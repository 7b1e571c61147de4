"""Every conversion kernel compiles for the GPUs we name, without a spill."""

from __future__ import annotations

import pytest

from tests.aot import AMD, AMD_SHARED_BYTES, TARGETS, compile_kernel
from tests.places import PLACE

pytestmark = pytest.mark.skipif(PLACE.name == "interpret", reason="interpreted kernels are not compiled")

INTEGERS = {
    "num_rows": "i32", "length": "i32", "total": "i32", "batch_size": "i32", "num_features": "i32", "num_parts": "i32",
    "part": "i32", "part_rows": "i32", "whole_rows": "i32", "values_stride": "i32", "sample_stride": "i32", "row_stride": "i32",
    "source_stride": "i32", "source_rows": "i32", "target_rows": "i32", "num_samples": "i32", "first_rows": "i32",
    "second_rows": "i32", "first_stride": "i32", "second_stride": "i32", "whole_stride": "i32",
}  # fmt: skip


@pytest.mark.parametrize("arch", [*TARGETS, AMD])
@pytest.mark.parametrize(
    ("dtype", "offsets", "padding"),
    [("bf16", "i32", "fp32"), ("fp32", "i64", "fp32"), ("fp64", "i64", "i64"), ("i64", "i64", "i32")],
)
@pytest.mark.parametrize("features", [1, 50, 64, 1024])
def test_kernels_compile_without_spills(arch: int | str, dtype: str, offsets: str, padding: str, features: int) -> None:
    from jagged.ops.conversion import kernels

    block_rows, block_features = kernels.block_sizes(10_000, features)
    pointers = dict.fromkeys(("values", "dense", "source", "target", "first", "second", "whole"), f"*{dtype}")
    types = {**INTEGERS, **pointers, "padding_value": padding, "samples": "*i64", "copies": "*i64"}
    names = ("offsets", "source_offsets", "target_offsets", "first_offsets", "second_offsets", "whole_offsets")
    types |= dict.fromkeys(names, f"*{offsets}")
    divisible = () if features % 16 else ("num_features", *(name for name in INTEGERS if name.endswith("stride")))
    blocks = {"BLOCK_ROWS": block_rows, "BLOCK_FEATURES": block_features}
    to_jagged_warps = kernels.to_jagged_warps(features, {"bf16": 2, "fp32": 4}.get(dtype, 8))
    for kernel, num_warps, options in (
        (kernels.to_dense_kernel, kernels.NUM_WARPS, {}),
        (kernels.to_jagged_kernel, to_jagged_warps, {}),
        (kernels.copy_part_kernel, kernels.NUM_WARPS, {"INTO_WHOLE": True}),
        (kernels.copy_part_kernel, kernels.NUM_WARPS, {"INTO_WHOLE": False}),
        (kernels.copy_two_kernel, kernels.NUM_WARPS, {"INTO_WHOLE": True}),
        (kernels.copy_two_kernel, kernels.NUM_WARPS, {"INTO_WHOLE": True, "first_offsets": None}),
        (kernels.copy_two_kernel, kernels.NUM_WARPS, {"INTO_WHOLE": False, "second_offsets": None, "whole_offsets": None}),
        (kernels.select_samples_kernel, kernels.NUM_WARPS, {"IS_SUM": False, "copies": None}),
        (kernels.select_samples_kernel, kernels.NUM_WARPS, {"IS_SUM": True}),
    ):
        if dtype == "i64" and options.get("IS_SUM"):
            # Integers have no gradients.
            continue
        signature = {name: types[name] for name in kernel.arg_names if name in types and name not in options}
        used = compile_kernel(kernel, signature, blocks | options, arch=arch, num_warps=num_warps, divisible=divisible)
        assert used.spills == 0, f"{kernel.__name__} {options}: {used}"
        assert used.shared_bytes <= AMD_SHARED_BYTES
