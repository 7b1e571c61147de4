"""Every kernel of layers and mixtures of groups, at its shipped tiles, compiles for the GPUs we name without a spill."""

from __future__ import annotations

import pytest

from jagged.ops.grouped_linear.configurations import (
    LEAST_CAPABILITY,
    MIX_STAGES,
    MIX_WARPS,
    MOST_MIXTURES,
    RELU_COLUMNS,
    RELU_ELEMENTS,
    RELU_WARPS,
    WIDEST_MIXTURE,
    linear_configuration,
    mix_tile,
)
from tests.aot import TARGETS, Resources, compile_kernel
from tests.places import PLACE

pytestmark = pytest.mark.skipif(PLACE.name == "interpret", reason="interpreted kernels are not compiled")

SHARED_BYTES = 227 * 1024


def compile_linear(arch: int, dtype: str, width: int, out: int, relu: bool) -> Resources:
    from jagged.ops.grouped_linear.kernels import grouped_linear_kernel

    chosen = linear_configuration(width, out)
    assert chosen is not None
    blocks = {
        "x": (chosen.rows, chosen.inner),
        "weight": (chosen.columns, chosen.inner),
        "output": (chosen.rows, chosen.columns // 2),
    }
    signature = {name: f"tensordesc<{dtype}[{rows}, {columns}]>" for name, (rows, columns) in blocks.items()}
    signature |= {"bias": f"*{dtype}", "row_blocks": "i32", "num_groups": "i32"}
    constants = {
        "OUT": out, "IN": width, "RELU": relu, "BLOCK_M": chosen.rows, "BLOCK_N": chosen.columns, "BLOCK_K": chosen.inner,
        "NUM_STAGES": chosen.num_stages,
    }  # fmt: skip
    return compile_kernel(grouped_linear_kernel, signature, constants, arch=arch, num_warps=chosen.num_warps)


@pytest.mark.parametrize(("width", "out"), [(16, 16), (48, 32), (256, 128), (256, 256), (1024, 512), (64, 192)])
@pytest.mark.parametrize("arch", [arch for arch in TARGETS if arch >= 10 * LEAST_CAPABILITY])
def test_grouped_linear(arch: int, width: int, out: int) -> None:
    found = compile_linear(arch, "bf16", width, out, relu=True)
    assert found.spills == 0
    assert not found.is_serialised
    # Two programs at a time on a multiprocessor.
    assert 2 * found.shared_bytes <= SHARED_BYTES


def test_products_are_the_matrix_instructions_of_hopper() -> None:
    found = compile_linear(90, "fp16", 256, 256, relu=False)
    assert "wgmma.mma_async" in found.assembly
    assert "cp.async.bulk.tensor" in found.assembly


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("arch", TARGETS)
def test_the_gradient_behind_a_relu(arch: int, dtype: str) -> None:
    """Rows whose features lie side by side are moved 16 bytes at a time."""
    from jagged.ops.grouped_linear.kernels import grouped_relu_gradient_kernel as kernel

    constants = {"BLOCK_M": RELU_ELEMENTS // RELU_COLUMNS, "BLOCK_N": RELU_COLUMNS, "feature_stride": 1, "kept_feature_stride": 1}
    types = dict.fromkeys(("grad", "kept", "before"), f"*{dtype}") | {"parts": "*fp32"}
    signature = {name: types.get(name, "i32") for name in kernel.arg_names if name not in constants}
    wide = ["num_features", "row_stride", "kept_row_stride"]
    found = compile_kernel(kernel, signature, constants, arch=arch, num_warps=RELU_WARPS, divisible=wide)
    assert found.spills == 0
    assert found.assembly.count("st.global.v4.b32") >= 1
    assert found.assembly.count("ld.global.v4.b32") + found.assembly.count("cp.async.cg.shared.global") >= 2


@pytest.mark.parametrize("width", [16, 128, 200, WIDEST_MIXTURE])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("arch", TARGETS)
def test_mixtures(arch: int, dtype: str, width: int) -> None:
    from jagged.ops.grouped_linear import mix_kernels

    tile = mix_tile(width)
    assert tile is not None
    constants = {
        "GROUPS": 32, "MIXTURES": MOST_MIXTURES, "WIDTH": width, "BLOCK_N": tile[0], "BLOCK_D": tile[1], "NUM_STAGES": MIX_STAGES
    }  # fmt: skip
    floats = ("grad", "groups", "weights", "output", "grad_groups", "grad_weights")
    for kernel in (mix_kernels.mix_groups_kernel, mix_kernels.mix_groups_gradients_kernel):
        signature = {name: f"*{dtype}" if name in floats else "i32" for name in kernel.arg_names if name not in constants}
        strides = [name for name in signature if name.endswith("stride")]
        found = compile_kernel(kernel, signature, constants, arch=arch, num_warps=MIX_WARPS, divisible=strides)
        assert found.spills == 0
