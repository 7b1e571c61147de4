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


def compile_softmax(kernel: Any, dtype: str, offsets: str, tile: Any, constants: dict[str, Any], arch: int | str) -> Resources:
    """Compile for contiguous values, whose stride of 1 a launch turns into a constant."""
    types = {**dict.fromkeys(VALUES, f"*{dtype}"), **dict.fromkeys(OFFSETS, f"*{offsets}"), **dict.fromkeys(PARTS, "*fp32")}
    types |= {**dict.fromkeys(SIZES, "i32"), "pair_offsets": "*i64"}
    sizes = {"BLOCK_V": tile.vectors, "BLOCK_L": tile.elements, "LONG_V": tile.long_vectors, "LONG_L": tile.long_elements}
    constants = {"stride": 1, "feature_stride": 1, **sizes, **constants}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature = {name: types[name] for name in kernel.arg_names if name not in constants}
    return compile_kernel(kernel, signature, constants, arch=arch, num_warps=tile.num_warps)


def check(kernel: Any, used: Resources) -> None:
    assert used.spills == 0, f"{kernel.__name__}: {used}"
    assert used.shared_bytes <= AMD_SHARED_BYTES, f"{kernel.__name__}: {used}"


@pytest.mark.parametrize("arch", [*TARGETS, AMD])
@pytest.mark.parametrize(("dtype", "offsets"), [("bf16", "i32"), ("fp32", "i64")])
@pytest.mark.parametrize(("features", "mean", "is_split"), [(1, 50, False), (4, 50, False), (4, 5000, True), (64, 50, True)])
def test_jagged_softmax(arch: int | str, dtype: str, offsets: str, features: int, mean: int, is_split: bool) -> None:
    from jagged.ops.softmax import kernels

    tile = kernels.softmax_tile(mean * 1000, 1000, features)
    constants: dict[str, Any] = {"IS_SPLIT": is_split}
    chosen = [kernels.jagged_softmax_forward_kernel, kernels.jagged_softmax_backward_kernel]
    if is_split:
        chosen += [kernels.jagged_softmax_statistics_kernel, kernels.jagged_softmax_products_kernel]
    for kernel in chosen:
        missing = {} if is_split or kernel not in chosen[:2] else dict.fromkeys(PARTS)
        check(kernel, compile_softmax(kernel, dtype, offsets, tile, constants | missing, arch))


@pytest.mark.parametrize("arch", [*TARGETS, AMD])
@pytest.mark.parametrize(("dtype", "offsets"), [("bf16", "i32"), ("fp32", "i64"), ("fp32", "i32")])
@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize(("mean", "is_given"), [(10, True), (50, False), (1000, True)])
def test_jagged2_softmax(arch: int | str, dtype: str, offsets: str, by_columns: bool, mean: int, is_given: bool) -> None:
    from jagged.ops.softmax import kernels

    tile = kernels.softmax2_tile(mean * mean * 1000, 1000, by_columns)
    constants: dict[str, Any] = {"BY_COLUMNS": by_columns, "QUANTUM": kernels.PROGRAM_PAIRS}
    if not is_given:
        constants["pair_offsets"] = None
    for kernel in (kernels.jagged2_softmax_forward_kernel, kernels.jagged2_softmax_backward_kernel):
        check(kernel, compile_softmax(kernel, dtype, offsets, tile, constants, arch))
