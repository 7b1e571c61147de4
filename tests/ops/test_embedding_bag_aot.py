"""Every kernel of embedding bags compiles for the GPUs we name, and keeps its work in registers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.aot import AMD, TARGETS, compile_kernel
from tests.places import PLACE

pytestmark = pytest.mark.skipif(PLACE.name == "interpret", reason="interpreted kernels are not compiled")

LONGS = ("layout", "batches", "ends", "counter", "tables", "step", "indices", "offsets", "widths")
LONGS += ("slices", "first_bags", "begins", "block_ends", "row_scales")
FLOATS = (
    "sums_of_slices",
    "scales",
    "parts_of_runs",
    "factors",
    "first",
    "second",
    "rate",
    "corrections",
    "output",
    "grad",
    "result",
)
INTS = ("arrivals", "order", "schedules", "runs", "feature_of_bag", "keys", "sources", "plan")
NUMBERS = ("eps", "beta1", "beta2", "weight_decay", "rest1", "rest2")
# Of all widths, and of those alone whose rows begin at multiples of 16 bytes.
WIDTHS = {"any": {*range(1, 131)}, "aligned": {4, 8, 16, 32, 64, 128}}

# The most bytes that a kernel with every branch spills on any GPU, in all: some registers that a branch's function saves for its
# caller, once a unit.
ALLOWED_SPILLS = {"forward": 364, "rows": 64}


def compile_one(kernel: Any, constants: dict[str, Any], arch: int | str, *, dtype: str = "fp32", num_warps: int = 1) -> Any:
    types = dict.fromkeys(kernel.arg_names, "i32") | dict.fromkeys(LONGS, "*i64") | dict.fromkeys(FLOATS, "*fp32")
    types |= dict.fromkeys(INTS, "*i32") | dict.fromkeys(NUMBERS, "fp32") | {"weights": f"*{dtype}"}
    signature = {name: types[name] for name in kernel.arg_names if name not in constants}
    return compile_kernel(kernel, signature, constants, arch=arch, num_warps=num_warps)


def used(widths: str) -> int:
    from jagged.ops.embedding_bag.schedules import _schedules_of

    return _schedules_of(WIDTHS[widths])


@pytest.mark.parametrize("arch", [90, *(pytest.param(arch, marks=pytest.mark.long) for arch in (*TARGETS, AMD) if arch != 90)])
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize(("dtype", "is_weighted"), [("fp32", False), ("bf16", True), ("u8", False), ("u8", True)])
def test_forward(dtype: str, is_weighted: bool, widths: str, arch: int | str) -> None:
    from jagged.ops.embedding_bag import forward

    constants = {"FIELDS": 7, "USED": used(widths), "batches": None}
    if not is_weighted:
        constants["scales"] = None
    if dtype != "u8":
        constants["row_scales"] = None
    resources = compile_one(forward.embedding_bags_forward_kernel, constants, arch, dtype=dtype)
    assert resources.spills <= ALLOWED_SPILLS["forward"], resources
    # Layouts of both kinds of widths have twice the branches: the assembler gives functions that are called more then.
    assert arch == AMD or resources.registers <= {"aligned": 128, "any": 168}[widths], resources


@pytest.mark.parametrize("arch", [90, *(pytest.param(arch, marks=pytest.mark.long) for arch in TARGETS if arch != 90)])
@pytest.mark.parametrize("kind", ["none", "sgd", *(pytest.param(kind, marks=pytest.mark.long) for kind in (
    "adagrad", "rowwise_adagrad", "adam", "rowwise_adam"
))])  # fmt: skip
def test_sums_of_rows(kind: str, arch: int) -> None:
    from jagged.ops.embedding_bag import backward

    constants: dict[str, Any] = {
        "FIELDS": 7,
        "SPLIT": backward.SPLIT,
        "USED": backward.used_widths(
            torch.tensor([[0, 0, width] for width in WIDTHS["aligned"]]), is_by_row=kind.startswith("rowwise")
        ),
        "KIND": kind,
        "IS_STOCHASTIC": False,
    }
    if kind == "none":
        constants |= dict.fromkeys(("factors", "first", "second", "step", "corrections", "rate"))
    join = {name: value for name, value in constants.items() if name != "factors"}
    rows = constants | {"STREAM": backward.STREAM, "ALIGNED": True}
    for kernel, of in ((backward.embedding_bags_rows_kernel, rows), (backward.embedding_bags_join_kernel, join)):
        resources = compile_one(kernel, of, arch)
        assert resources.spills <= ALLOWED_SPILLS["rows"], resources
        assert resources.registers <= 96, resources


@pytest.mark.parametrize("arch", [*TARGETS, AMD])
@pytest.mark.parametrize("name", ["map", "planned", "rows_map", "lookups", "samples"])
def test_small_kernels(name: str, arch: int | str) -> None:
    from jagged.ops.embedding_bag import backward, schedules

    module, constants, num_warps = {
        "map": (schedules, {"BLOCK": schedules.BLOCK_GROUPS, "plan": None}, 16),
        "planned": (schedules, {"BLOCK": schedules.BLOCK_GROUPS, "first_bags": None}, 16),
        "rows_map": (
            backward,
            {
                "FIELDS": 7, "STREAM": backward.STREAM, "SPLIT": backward.SPLIT, "WHOLE_ROWS": False,
                "BLOCK": backward.BLOCK_TABLES,
            },
            16,
        ),
        "lookups": (backward, {"FIELDS": 7, "BAGS": backward.BLOCK_BAGS, "LOOKUPS": backward.BLOCK_LOOKUPS}, 4),
        "samples": (
            backward,
            {
                "FIELDS": 7, "BAGS": backward.SAMPLE_BAGS, "LOOKUPS": backward.SAMPLE_LOOKUPS,
                "COLUMNS": backward.SAMPLE_COLUMNS,
            },
            2,
        ),
    }[name]  # fmt: skip
    kernel = getattr(module, f"embedding_bags_{'map' if name == 'planned' else name}_kernel")
    assert compile_one(kernel, constants, arch, num_warps=num_warps).spills == 0
