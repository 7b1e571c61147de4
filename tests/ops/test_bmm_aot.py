"""The kernels of the products with one jagged operand compile at their tiles for the GPUs we name, without a spill."""

from __future__ import annotations

import pytest

from jagged.ops.bmm import configurations
from tests.aot import AMD, AMD_SHARED_BYTES, TARGETS, Resources, compile_kernel
from tests.places import PLACE

pytestmark = pytest.mark.skipif(PLACE.name == "interpret", reason="interpreted kernels are not compiled")

# Of the eighth generation the smaller GPUs, 8.6 and 8.9.
SHARED_BYTES = {80: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, AMD: AMD_SHARED_BYTES}
SIZES = ("num_later", "batch_size", "total", "chunk")
STRIDES = ("values_stride", "a_stride", "b_stride", "dense_batch_stride", "dense_stride", "dense_column_stride")
# The paper's sizes, either way round; odd ones, whose elements are loaded one by one; in `make test-long` other tiles' too.
WIDTHS = [(1024, 4), (4, 1024), (129, 65)]
WIDTHS += [pytest.param(*pair, marks=pytest.mark.long) for pair in ((1024, 8), (1, 1), (64, 64), (512, 128), (50, 3), (3, 50))]


def check(used: Resources, arch: int | str, where: str) -> None:
    assert used.spills == 0, f"{where}: {used}"
    assert used.shared_bytes <= SHARED_BYTES[arch], f"{where}: {used}"


@pytest.mark.parametrize("arch", [*TARGETS, AMD])
@pytest.mark.parametrize(("dtype", "itemsize"), [("bf16", 2), ("fp32", 4)])
@pytest.mark.parametrize(("d", "t"), WIDTHS)
def test_jagged_dense_bmm(arch: int | str, dtype: str, itemsize: int, d: int, t: int) -> None:
    from jagged.ops.bmm import kernels

    tile = configurations.dense_configuration(d, t, itemsize)
    types = {"offsets": "*i64", **dict.fromkeys(("values", "dense", "bias", "output"), f"*{dtype}")}
    types |= dict.fromkeys((*SIZES, *STRIDES), "i32")
    constants = {
        "D": d, "T": t, "BLOCK_M": tile.rows, "BLOCK_D": tile.block_d, "BLOCK_T": tile.block_t, "VECTOR": 16 // itemsize,
        "USE_DOT": tile.use_dot, "PRECISION": "ieee", "NUM_STAGES": tile.num_stages, "values_column_stride": 1,
    }  # fmt: skip
    kernel = kernels.jagged_dense_bmm_kernel
    # As the forward finds its matrices, with a bias and without one, and as gradients do.
    for more in ({"dense_column_stride": 1}, {"dense_column_stride": 1, "bias": None}, {"dense_stride": 1, "bias": None}):
        fixed = {**constants, **more}
        signature = {name: types[name] for name in kernel.arg_names if name not in fixed}
        divisible = [] if d % 16 and t % 16 else [name for name in STRIDES if name in signature]
        used = compile_kernel(kernel, signature, fixed, arch=arch, num_warps=tile.num_warps, divisible=divisible)
        check(used, arch, f"{d} x {t} {dtype}, {more}, for {arch}")


@pytest.mark.parametrize("arch", [*TARGETS, AMD])
@pytest.mark.parametrize(("dtype", "itemsize"), [("bf16", 2), ("fp32", 4)])
@pytest.mark.parametrize(("d", "t"), [pair for pair in WIDTHS if pair != (4, 1024)])
def test_jagged_jagged_bmm(arch: int | str, dtype: str, itemsize: int, d: int, t: int) -> None:
    from jagged.ops.bmm import kernels

    # The launcher makes the narrower side the second one.
    d, t = max(d, t), min(d, t)
    tile = configurations.jagged_configuration(d, t, itemsize)
    types = {"offsets": "*i64", **dict.fromkeys(("a", "b", "output"), f"*{dtype}"), "partial": "*fp32"}
    types |= dict.fromkeys((*SIZES, *STRIDES), "i32")
    constants = {
        "D": d, "T": t, "BLOCK_M": tile.rows, "BLOCK_D": tile.block_d, "BLOCK_T": tile.block_t, "USE_DOT": tile.use_dot,
        "PRECISION": "ieee", "NUM_STAGES": tile.num_stages, "a_column_stride": 1, "b_column_stride": 1,
    }  # fmt: skip
    kernel = kernels.jagged_jagged_bmm_kernel
    for d_stride, t_stride in ((t, 1), (1, d)):
        fixed = {**constants, "D_STRIDE": d_stride, "T_STRIDE": t_stride}
        signature = {name: types[name] for name in kernel.arg_names if name not in fixed}
        divisible = [] if d % 16 else ["a_stride"]
        used = compile_kernel(kernel, signature, fixed, arch=arch, num_warps=tile.num_warps, divisible=divisible)
        check(used, arch, f"{d} x {t} {dtype}, output strides {d_stride}, {t_stride}, for {arch}")


@pytest.mark.parametrize("arch", [*TARGETS, AMD])
def test_reduce(arch: int | str) -> None:
    from jagged.ops.bmm import kernels

    kernel = kernels.jagged_jagged_bmm_reduce_kernel
    types = {"partial": "*fp32", "offsets": "*i32", "output": "*bf16", **dict.fromkeys(SIZES, "i32")}
    constants = {"SIZE": 4096, "BLOCK": kernels.REDUCE_ELEMENTS}
    signature = {name: types[name] for name in kernel.arg_names if name not in constants}
    check(compile_kernel(kernel, signature, constants, arch=arch), arch, "reduce")
