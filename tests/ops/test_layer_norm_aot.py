"""Kernels of layer normalisation, at their shipped tiles, compile for the GPUs we name without a spill."""

from __future__ import annotations

from typing import Any

import pytest

from tests.aot import TARGETS, compile_kernel
from tests.places import PLACE

pytestmark = pytest.mark.skipif(PLACE.name == "interpret", reason="interpreted kernels are not compiled")


@pytest.mark.parametrize("width", [16, 64, 200, 1024])
@pytest.mark.parametrize(("dtype", "out"), [("fp32", "bf16"), ("fp32", "fp32"), ("bf16", "bf16")])
@pytest.mark.parametrize("arch", TARGETS)
def test_layer_norm(arch: int, dtype: str, out: str, width: int) -> None:
    """Rows are read 16 bytes at a time."""
    from jagged.ops.layer_norm.kernels import ELEMENTS, NUM_WARPS, layer_norm_kernel, tile

    chosen = tile(width, ELEMENTS)
    assert chosen is not None
    types = {"x": f"*{dtype}", "weight": "*fp32", "bias": "*fp32", "output": f"*{out}", "eps": "fp32"}
    constants = {"WIDTH": width, "BLOCK_N": chosen[0], "BLOCK_D": chosen[1]}
    signature = {name: types.get(name, "i32") for name in layer_norm_kernel.arg_names if name not in constants}
    found = compile_kernel(layer_norm_kernel, signature, constants, arch=arch, num_warps=NUM_WARPS, divisible=["row_stride"])
    assert found.spills == 0
    assert found.assembly.count("ld.global.v4.b32") + found.assembly.count("cp.async.cg.shared.global") >= 1


@pytest.mark.parametrize("width", [16, 64, 200, 1024])
@pytest.mark.parametrize(("dtype", "out"), [("fp32", "bf16"), ("fp32", "fp32"), ("bf16", "bf16")])
@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("has_residual", [False, True])
def test_gradients(arch: int, dtype: str, out: str, width: int, has_residual: bool) -> None:
    from jagged.ops.layer_norm.kernels import ELEMENTS_BACKWARD, NUM_WARPS_BACKWARD, tile
    from jagged.ops.layer_norm.kernels import layer_norm_gradients_kernel as kernel

    chosen = tile(width, ELEMENTS_BACKWARD)
    assert chosen is not None
    types = {"x": f"*{dtype}", "grad": f"*{out}", "weight": "*fp32", "of_x": f"*{dtype}", "parts": "*fp32", "eps": "fp32"}
    constants: dict[str, Any] = {"WIDTH": width, "BLOCK_N": chosen[0], "BLOCK_D": chosen[1]}
    constants |= {} if has_residual else {"residual": None}
    types["residual"] = f"*{dtype}"
    signature = {name: types.get(name, "i32") for name in kernel.arg_names if name not in constants}
    wide = ["row_stride", "grad_row_stride", "residual_row_stride"]
    found = compile_kernel(kernel, signature, constants, arch=arch, num_warps=NUM_WARPS_BACKWARD, divisible=wide)
    assert found.spills == 0
    assert found.assembly.count("st.global.v4.b32") >= 1
