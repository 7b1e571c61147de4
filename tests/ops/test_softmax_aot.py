"""Every softmax kernel compiles at the tiles it is launched with, for the GPUs we name, without a spill."""

from __future__ import annotations

from typing import Any

import pytest

from tests.aot import AMD, AMD_SHARED_BYTES, TARGETS, Resources, compile_kernel
from tests.places import PLACE

pytestmark = pytest.mark.skipif(PLACE.name == "interpret", reason="interpreted kernels are not compiled")

SIZES = ("num_samples", "total", "chunk", "num_slots", "num_features", "row_stride", "num_pairs")
PARTS = ("part_largest", "part_weight", "part_total")
VALUES = ("values", "scores", "grad", "weights", "output")
OFFSETS = ("offsets", "a_offsets", "b_offsets")


def compile_softmax(
    kernel: Any, dtype: str, offsets: str, constants: dict[str, Any], arch: int | str, **options: int | None
) -> Resources:
    """Compile for contiguous values, whose stride of 1 a launch turns into a constant."""
    types = {**dict.fromkeys(VALUES, f"*{dtype}"), **dict.fromkeys(OFFSETS, f"*{offsets}"), **dict.fromkeys(PARTS, "*fp32")}
    types |= {**dict.fromkeys(SIZES, "i32"), "pair_offsets": "*i64"}
    constants = {"stride": 1, "feature_stride": 1, **constants}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature = {name: types[name] for name in kernel.arg_names if name not in constants}
    return compile_kernel(kernel, signature, constants, arch=arch, **options)


def check(kernel: Any, used: Resources) -> None:
    assert used.spills == 0, f"{kernel.__name__}: {used}"
    assert used.shared_bytes <= AMD_SHARED_BYTES, f"{kernel.__name__}: {used}"


@pytest.mark.parametrize("arch", [*TARGETS, AMD])
@pytest.mark.parametrize(("dtype", "offsets"), [("bf16", "i32"), ("fp32", "i64")])
@pytest.mark.parametrize(("features", "mean", "is_split"), [(1, 50, False), (4, 50, False), (4, 5000, True), (64, 50, True)])
def test_jagged_softmax(arch: int | str, dtype: str, offsets: str, features: int, mean: int, is_split: bool) -> None:
    from jagged.ops.softmax import kernels

    tile = kernels.softmax_configuration(mean * 1000, 1000, features)
    sizes = {"BLOCK_V": tile.vectors, "BLOCK_L": tile.elements, "LONG_L": tile.long_elements}
    constants: dict[str, Any] = {"IS_SPLIT": is_split, **sizes}
    chosen = [kernels.jagged_softmax_forward_kernel, kernels.jagged_softmax_backward_kernel]
    if is_split:
        chosen += [kernels.jagged_softmax_statistics_kernel, kernels.jagged_softmax_products_kernel]
    for kernel in chosen:
        missing = {} if is_split or kernel not in chosen[:2] else dict.fromkeys(PARTS)
        check(kernel, compile_softmax(kernel, dtype, offsets, constants | missing, arch, num_warps=tile.num_warps))


@pytest.mark.parametrize("arch", [*TARGETS, AMD])
@pytest.mark.parametrize(("dtype", "offsets"), [("bf16", "i64"), ("fp32", "i64"), ("fp16", "i32")])
@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize(("none", "is_wide"), [("b_offsets", False), ("pair_offsets", False), ("", True)])
def test_jagged2_softmax(arch: int | str, dtype: str, offsets: str, by_columns: bool, none: str, is_wide: bool) -> None:
    import triton.language as tl

    from jagged.ops.softmax import pair_kernels

    tile = pair_kernels.COLUMNS if by_columns else pair_kernels.ROWS
    constants: dict[str, Any] = {
        "BY_COLUMNS": by_columns, "INDEX": tl.int64 if is_wide else tl.int32, "VECTORS": tile.vectors, "STEPS": tile.steps,
        "LANES": tile.lanes,
    }  # fmt: skip
    if none:
        constants[none] = None
    for kernel in (pair_kernels.jagged2_softmax_forward_kernel, pair_kernels.jagged2_softmax_backward_kernel):
        options = {"num_warps": tile.num_warps, "max_registers": tile.max_registers}
        check(kernel, compile_softmax(kernel, dtype, offsets, constants, arch, **options))
