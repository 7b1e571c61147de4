"""Every elementwise kernel at its shipped tiles compiles for the GPUs we name: no spill, and accesses of 16 bytes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.aot import AMD, AMD_SHARED_BYTES, TARGETS, Resources, compile_kernel
from tests.places import PLACE

pytestmark = pytest.mark.skipif(PLACE.name == "interpret", reason="interpreted kernels are not compiled")

# Kernel, its options, and the tensors that its launch leaves None.
VARIANTS: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("combine", {"OPERATION": "add", "PER_ROW": False}, ()),
    ("combine", {"OPERATION": "add", "PER_ROW": True}, ()),
    ("combine", {"OPERATION": "mul", "PER_ROW": False}, ()),
    ("combine", {"OPERATION": "mul", "PER_ROW": True}, ()),
    ("combine", {"OPERATION": "repeat", "PER_ROW": False}, ("values",)),
    ("combine", {"OPERATION": "relu", "PER_ROW": False}, ()),
    ("combine", {"OPERATION": "silu", "PER_ROW": False}, ()),
    ("combine", {"OPERATION": "gelu", "PER_ROW": False}, ()),
    ("cross", {"ADDS_FACTOR": False}, ()),
    ("cross", {"ADDS_FACTOR": True}, ("residual",)),
    ("add_rows", {}, ()),
    ("add_rows", {}, ("values",)),
    ("to_rows", {"HAS_FACTOR": False}, ("factor",)),
    ("to_rows", {"HAS_FACTOR": True}, ()),
    ("sum_rows", {"OPERATION": "copy"}, ("factor", "context", "order", "terms")),
    ("sum_rows", {"OPERATION": "copy"}, ("factor", "context", "terms")),
    ("sum_rows", {"OPERATION": "mul"}, ("context", "order", "terms")),
    ("sum_rows", {"OPERATION": "relu"}, ("order",)),
    ("sum_rows", {"OPERATION": "silu"}, ("order",)),
    ("sum_rows", {"OPERATION": "gelu"}, ("order",)),
    ("sum_parts", {}, ()),
    ("pairwise_difference", {}, ()),
    ("pairwise_difference", {}, ("starts",)),
    ("pairwise_difference_backward", {}, ()),
    ("pairwise_difference_backward", {}, ("starts",)),
]
FLOATS = ("values", "factor", "context", "own", "residual", "table", "dense", "output", "terms", "sums", "grad", "grad_values")


def kernel_of(name: str) -> Any:
    from jagged.ops.elementwise import cross_kernels, kernels, row_kernels

    return getattr({"cross": cross_kernels, "add_rows": row_kernels}.get(name, kernels), f"{name}_kernel")


def compile_variant(
    variant: tuple[str, dict[str, Any], tuple[str, ...]], arch: int | str, dtype: str, features: int, **others: str
) -> Resources:
    import triton.language as tl

    from jagged.ops.elementwise import kernels

    name, options, absent = variant
    kernel = kernel_of(name)
    arguments = kernel.arg_names
    constants = {**options, **dict.fromkeys(absent)}
    if name.startswith("pairwise"):
        num_warps = kernels.PAIR_WARPS
        constants |= {"BLOCK_ROWS": kernels.PAIR_ROWS, "BLOCK_COLUMNS": kernels.PAIR_COLUMNS, "stride": 1, "INDEX": tl.int32}
    else:
        rows, columns, num_warps = kernels.block_sizes(name, features)
        constants |= {"BLOCK_PARTS" if name == "sum_parts" else "BLOCK_ROWS": rows, "BLOCK_FEATURES": columns}
        # Features lie side by side.
        constants |= {argument: 1 for argument in arguments if argument.endswith("feature_stride")}
        if name.startswith("sum"):
            constants["CHUNK"] = kernels.CHUNK
        if name == "sum_rows":
            constants["NUM_STAGES"] = kernels.CONFIGURATIONS[name].num_stages
    types = dict.fromkeys(FLOATS, f"*{dtype}") | {"starts": "*i64", "parts": "*fp32"} | others
    types["order"] = "*i64"
    types["offsets"] = types["places"] = "*i64" if dtype == "bf16" else "*i32"
    signature = {argument: types.get(argument, "i32") for argument in arguments if argument not in constants}
    wide = [x for x in signature if x in ("num_features", "num_context") or x.endswith(("row_stride", "sample_stride"))]
    return compile_kernel(kernel, signature, constants, arch=arch, num_warps=num_warps, divisible=[] if features % 16 else wide)


def name_of(variant: tuple[str, dict[str, Any], tuple[str, ...]]) -> str:
    return " ".join([variant[0], *map(str, variant[1].values()), *(f"no-{name}" for name in variant[2])])


def check(
    variant: tuple[str, dict[str, Any], tuple[str, ...]], arch: int | str, dtype: str, features: int, **others: str
) -> Resources:
    used = compile_variant(variant, arch, dtype, features, **others)
    assert used.spills == 0, used
    assert used.shared_bytes <= AMD_SHARED_BYTES, used
    return used


@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_wide_rows(variant: tuple[str, dict[str, Any], tuple[str, ...]], dtype: str) -> None:
    """All of a tile moves in accesses of 16 bytes; blocks of pairs begin anywhere and cannot."""
    from jagged.ops.elementwise import kernels

    used = check(variant, 90, dtype, 1024)
    name, options, absent = variant
    if name in kernels.CONFIGURATIONS:
        rows, columns, num_warps = kernels.block_sizes(name, 1024)
        size = 4 if dtype == "fp32" or name == "sum_parts" else 2
        accesses = rows * columns * size // (16 * 32 * num_warps)
        arguments = kernel_of(name).arg_names
        tiles = (
            {"parts"} if name == "sum_parts" else {"values", "factor", "own", "residual", "table"} & set(arguments) - set(absent)
        )
        read = accesses * (len(tiles) + options.get("PER_ROW", False))
        written = accesses * (
            name in ("combine", "cross", "add_rows", "to_rows") or (name == "sum_rows" and "terms" not in absent)
        )
        # Loads under way before they are needed go to shared memory.
        loads = used.assembly.count("ld.global.v4.b32") + used.assembly.count("cp.async.cg.shared.global")
        assert loads >= read > 0 or options.get("OPERATION") == "repeat"
        assert used.assembly.count("st.global.v4.b32") >= written


@pytest.mark.parametrize("features", [1, 50])
@pytest.mark.parametrize("variant", VARIANTS[:-4], ids=name_of)
def test_other_widths(variant: tuple[str, dict[str, Any], tuple[str, ...]], features: int) -> None:
    check(variant, 90, "fp32" if features == 50 else "bf16", features)


@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
@pytest.mark.parametrize("arch", [*(arch for arch in TARGETS if arch != 90), AMD])
def test_other_gpus(variant: tuple[str, dict[str, Any], tuple[str, ...]], arch: int | str) -> None:
    check(variant, arch, "fp32" if arch == 80 else "bf16", 1024)


@pytest.mark.parametrize("variant", [*VARIANTS[:4], *VARIANTS[-4:-2]], ids=name_of)
@pytest.mark.parametrize("dtype", ["i32", "i64"])
@pytest.mark.parametrize("arch", [*TARGETS, AMD])
def test_integers(variant: tuple[str, dict[str, Any], tuple[str, ...]], dtype: str, arch: int | str) -> None:
    check(variant, arch, dtype, 1024)


@pytest.mark.parametrize("width", [50, 64])
@pytest.mark.parametrize(("values", "table"), [("bf16", "fp32"), ("fp32", "bf16")])
@pytest.mark.parametrize("arch", [*TARGETS, AMD])
def test_rows_of_two_dtypes(arch: int | str, values: str, table: str, width: int) -> None:
    """As positions have them under autocast."""
    used = check(("add_rows", {}, ()), arch, "fp32", width, values=f"*{values}", table=f"*{table}")
    if width == 64 and arch != AMD:
        assert "ld.global.v4.b32" in used.assembly
        assert "st.global.v4.b32" in used.assembly
