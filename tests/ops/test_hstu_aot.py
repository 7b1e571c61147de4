"""Every kernel of an HSTU block's products, at its shipped tiles, compiles for the GPUs we name without a spill."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from jagged.ops.hstu.configurations import (
    GATE_ELEMENTS,
    GATE_WARPS,
    LEAST_CAPABILITY,
    SILU_COLUMNS,
    SILU_ELEMENTS,
    SILU_WARPS,
    gate_gradients_tile,
    product_configuration,
)
from jagged.ops.hstu.spec import WIDEST, Inputs, Options
from tests.aot import TARGETS, Resources, compile_kernel
from tests.places import PLACE

pytestmark = pytest.mark.skipif(PLACE.name == "interpret", reason="interpreted kernels are not compiled")

SHARED_BYTES = 227 * 1024
# 16 bits each.
ROWS: tuple[str, ...] = (
    "u",
    "v",
    "q",
    "k",
    "residual",
    "output",
    "grad_u",
    "grad_v",
    "grad_q",
    "grad_k",
    "before",
    "grad",
    "attended",
    "gate",
)
ROWS += ("of_attended", "of_gate", "gated")
TYPES = dict.fromkeys(ROWS, "*{dtype}") | {
    "parts": "*fp32",
    "seed": "*i64",
    "threshold": "i64",
    "eps": "fp32",
    "kept_scale": "fp32",
}


def compile_for(kernel: Any, arch: int, dtype: str, constants: dict[str, Any], num_warps: int, **types: str) -> Resources:
    types = {name: of.format(dtype=dtype) for name, of in (TYPES | types).items()}
    signature = {name: types.get(name, "i32") for name in kernel.arg_names if name not in constants}
    strides = [name for name in signature if name.endswith("stride")]
    return compile_kernel(kernel, signature, constants, arch=arch, num_warps=num_warps, divisible=strides)


def compile_product(name: str, arch: int, dtype: str, width: int, out: int, keeps: bool) -> Resources:
    from jagged.ops.hstu import kernels

    chosen = product_configuration(width, out)
    assert chosen is not None
    constants: dict[str, Any] = {
        "OUT": out, "IN": width, "BLOCK_M": chosen.rows, "BLOCK_N": chosen.columns, "BLOCK_K": chosen.inner,
        "NUM_STAGES": chosen.num_stages,
    }  # fmt: skip
    types = {"x": f"tensordesc<{dtype}[{chosen.rows}, {chosen.inner}]>", "bias": "*fp32"}
    types["weight"] = f"tensordesc<{dtype}[{chosen.columns}, {chosen.inner}]>"
    if name == "projection":
        types["before"] = f"tensordesc<{dtype}[{chosen.rows}, {chosen.columns // 2}]>"
        constants |= {} if keeps else {"before": None}
    return compile_for(getattr(kernels, f"hstu_{name}_kernel"), arch, dtype, constants, chosen.num_warps, **types)


@pytest.mark.parametrize(("width", "out"), [(16, 16), (48, 32), (512, 128), (512, 512), (1536, 512)])
@pytest.mark.parametrize(("name", "keeps"), [("projection", True), ("projection", False), ("output", False)])
@pytest.mark.parametrize("arch", [arch for arch in TARGETS if arch >= 10 * LEAST_CAPABILITY])
def test_products(arch: int, name: str, keeps: bool, width: int, out: int) -> None:
    found = compile_product(name, arch, "bf16", width, out, keeps)
    assert found.spills == 0, found
    assert not found.is_serialised
    assert found.shared_bytes <= SHARED_BYTES, found


def test_products_are_the_matrix_instructions_of_hopper() -> None:
    found = compile_product("output", 90, "fp16", 512, 512, keeps=False)
    assert "wgmma.mma_async" in found.assembly
    assert "cp.async.bulk.tensor" in found.assembly


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("arch", TARGETS)
def test_the_gradient_behind_silu(arch: int, dtype: str) -> None:
    from jagged.ops.hstu.kernels import hstu_projection_gradient_kernel as kernel

    constants = {"OUT": 512, "BLOCK_M": SILU_ELEMENTS // SILU_COLUMNS, "BLOCK_N": SILU_COLUMNS}
    assert compile_for(kernel, arch, dtype, constants, SILU_WARPS).spills == 0


@pytest.mark.parametrize(("width", "groups"), [(16, 8), (64, 4), (512, 1), (WIDEST, 1)])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("arch", TARGETS)
def test_gates(arch: int, dtype: str, width: int, groups: int) -> None:
    """With all that asks for registers: a mean, `concat` and dropout."""
    from jagged.ops.hstu import kernels

    constants = {"WIDTH": width, "NUM_GROUPS": groups, "CENTRED": True, "CONCAT": True, "BLOCK_D": width}
    rows, num_warps = gate_gradients_tile(width, 4 if dtype == "fp32" else 2)
    forward = {**constants, "BLOCK_N": max(1, GATE_ELEMENTS // width)}
    vectors = {"weight": "*fp32", "bias": "*fp32"}
    assert compile_for(kernels.hstu_gate_kernel, arch, dtype, forward, GATE_WARPS, **vectors).spills == 0
    backward = {**constants, "BLOCK_N": rows}
    found = compile_for(kernels.hstu_gate_gradients_kernel, arch, dtype, backward, num_warps, **vectors)
    assert found.spills == 0, found


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize(("dtype", "width", "out"), [("bf16", 512, 512), ("fp16", 320, 384), ("bf16", 64, 128)])
def test_warps_that_specialise(dtype: str, width: int, out: int, keeps: bool) -> None:
    """On Hopper alone. The assembler lets products overlap only where nothing reads their sums before they are waited for."""
    from jagged.ops._shared.ring import LAYOUT
    from jagged.ops.hstu import hopper

    rows, columns, inner, piece = (of.value for of in (hopper.BLOCK_M, hopper.BLOCK_N, hopper.BLOCK_K, hopper.PIECE))
    types = {
        "x": f"tensordesc<{dtype}[{rows}, {inner}],{LAYOUT!r}>",
        "weight": f"tensordesc<{dtype}[{columns}, {inner}],{LAYOUT!r}>",
    }
    types |= {"before": f"tensordesc<{dtype}[{rows}, {piece}],{LAYOUT!r}>", "bias": "*fp32"}
    constants: dict[str, Any] = {"OUT": out, "STEPS": width // inner, "PLACES": hopper.PLACES}
    constants |= {} if keeps else {"before": None}
    found = compile_for(hopper.hstu_projection_hopper_kernel, 90, dtype, constants, 4, **types)
    assert found.spills == 0, found
    assert not found.is_serialised
    assert found.shared_bytes <= SHARED_BYTES, found
    # Sixteen bytes of a part a thread.
    assert "st.global.v4.b32" in found.assembly


X = torch.zeros(5, 512, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("serves", "x", "columns", "capability", "multiprocessors"),
    [
        (True, X, 2048, (9, 0), 132),
        (True, X.half()[:, :64], 512, (9, 0), 132),
        (True, X, 2048, (9, 0), 17),
        (False, X, 2048, (10, 0), 132),
        (False, X, 2048, (8, 0), 132),
        (False, X[:0], 2048, (9, 0), 132),
        # Neither whole steps nor weights that fit; slices of two parts; rows that TMA cannot read.
        (False, X[:, :96], 2048, (9, 0), 132),
        (False, torch.cat([X, X[:, :64]], 1), 2048, (9, 0), 132),
        (False, X, 256, (9, 0), 132),
        (False, X[:, 4:68], 2048, (9, 0), 132),
        (False, X.t().contiguous().t(), 2048, (9, 0), 132),
        # Of 132 multiprocessors 26 would be idle, and 17 slices have no 16.
        (False, X, 53 * 512, (9, 0), 132),
        (False, X, 2048, (9, 0), 15),
        (False, X, 2048, (9, 0), 31),
    ],
)
def test_which_kernel_is_launched(
    monkeypatch: pytest.MonkeyPatch, serves: bool, x: Tensor, columns: int, capability: tuple[int, int], multiprocessors: int
) -> None:
    """All but the launch is done on the CPU."""
    from jagged.ops._shared.matrices import Gpu
    from jagged.ops.hstu import hopper, launch

    launched: list[str] = []
    found = Gpu(multiprocessors, 9, (SHARED_BYTES, SHARED_BYTES))
    for module in (hopper, launch):
        monkeypatch.setattr(module, "gpu", lambda device: found)
    monkeypatch.setattr(hopper, "_capability", lambda device: capability)
    monkeypatch.setattr(hopper, "_launch_projection", lambda *given, **named: launched.append("hopper"))
    monkeypatch.setattr(launch, "_launch_projection", lambda *given, **named: launched.append("other"))
    weight = x.new_zeros(columns, x.shape[1])
    assert hopper.supports(x, weight) == serves
    for recompute in (False, True):
        outputs = launch.projection(Inputs(x, weight, x.new_zeros(columns)), Options(1, recompute))
        assert outputs.u.shape == (x.shape[0], 1, columns // 4)
    if x.shape[0]:
        assert launched == ["hopper" if serves else "other"] * 2


def test_without_gluon_the_other_kernel_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from jagged.ops.hstu import launch

    monkeypatch.setitem(sys.modules, "jagged.ops.hstu.hopper", None)
    launch._hopper.cache_clear()
    assert launch._hopper() is None
    launch._hopper.cache_clear()
