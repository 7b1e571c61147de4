"""Every cross-entropy kernel compiles with its tiles for the GPUs we name, without a spill, within their shared memory."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from jagged.ops._shared.sizes import next_power_of_2
from jagged.ops.cross_entropy.triton.configurations import CONFIGURATIONS, EXCEPTIONS, SCALED, configuration
from tests.aot import AMD, AMD_SHARED_BYTES, TARGETS, Resources, compile_kernel
from tests.places import PLACE

pytestmark = pytest.mark.skipif(PLACE.name == "interpret", reason="interpreted kernels are not compiled")

# Of the eighth generation the smaller GPUs, 8.6 and 8.9.
SHARED_BYTES = {80: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
ROWS = [(kernel, size, width) for (kernel, size), table in CONFIGURATIONS.items() for width in table]
POINTERS = {"target": "*i32"}
FLOATS = ("part_maximum", "part_sum", "part_smoothed", "lse", "target_logit", "smoothed", "inverse_scale")
FLOATS += ("row_shift", "shift", "grad_softmax", "grad_target", "grad_lse", "clean", "vectors", "marks")
OPTIONS = ("bias", "item_scale", "smoothing", "grad_smoothed", "grad_bias", "part_smoothed", "smoothed")
FILTER = ("order", "tiles", "counts", "pays")
POINTERS |= dict.fromkeys((*FLOATS, "threshold", *OPTIONS), "*fp32") | dict.fromkeys((*FILTER, "unless"), "*i32")
SIZES = ("num_rows", "num_items", "num_parts", "items_per_part", "steps_per_part", "first_item", "last_item", "ignore_index")
SIZES += ("products_stride", "gradients_stride", "list_stride")
# The most bytes that a kernel spills on any GPU, plain and with every option at once (which need registers). Tiles are the
# fastest that were measured on compute capability 9.0, plain; they are named as they are, so that they do not grow unseen.
ALLOWED_SPILLS = {
    ("forward", 2, 256): (0, 104),
    ("forward", 2, 512): (0, 260),
    ("backward_hidden", 2, 256): (8, 72),
    ("marks", 2, 64): (0, 8),
    ("marks", 2, 512): (0, 8),
    ("backward_weight", 2, 256): (0, 196),
}
TOO_LARGE_FOR_AMD = {("forward", 2, 128), ("forward", 2, 256), ("forward", 2, 512), ("backward_hidden", 2, 256)}
# Matrices reach the kernels with strides that are multiples of 16.
ALIGNED = ("hidden_stride", "weight_stride")


def compile_tile(
    kernel_name: str, dtype: str, width: int, arch: int | str, *, precision: str = "ieee", options: str = ""
) -> Resources:
    """Compile one row of the table, plain or with `options` "shaped" (float16's scale too) or "filtered"."""
    from jagged.ops.cross_entropy.triton import backward, filter, forward

    # PyTorch says of gfx942 that its capability is 9.4.
    capability = 9 if isinstance(arch, str) else arch // 10
    dtypes = torch.float32 if dtype == "fp32" else torch.bfloat16
    row = "backward_hidden" if kernel_name == "marks" else kernel_name
    tile = configuration(row, width, dtypes, capability, is_scaled=options == "shaped")
    module = {"forward": forward, "marks": filter}.get(kernel_name, backward)
    kernel = getattr(module, f"linear_cross_entropy_{kernel_name}_kernel")
    constants: dict[str, Any] = {
        "BLOCK_N": tile.rows, "BLOCK_V": tile.items, "BLOCK_D": tile.columns, "BLOCK_K": tile.step,
        "WIDTH": width, "PRECISION": precision, "OWN_BLOCKS": 2, "PER_TILE": 2,
    }  # fmt: skip
    if options != "shaped":
        constants |= dict.fromkeys((*OPTIONS, "inverse_scale", "softcap"), None)
    if options != "filtered" and kernel_name != "marks":
        constants |= dict.fromkeys(FILTER, None)
    types = {
        **POINTERS,
        "target": "*i64" if kernel_name == "forward" else "*i32",
        **dict.fromkeys(("hidden", "weight", "grad_hidden", "grad_weight", "gradients"), f"*{dtype}"),
    }
    types |= dict.fromkeys((*SIZES, *ALIGNED), "i32") | dict.fromkeys(("inverse_temperature", "softcap"), "fp32")
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature = {name: types[name] for name in kernel.arg_names if name not in constants}
    return compile_kernel(
        kernel, signature, constants, arch=arch, num_warps=tile.num_warps, num_stages=tile.num_stages, divisible=ALIGNED
    )


def check(kernel_name: str, dtype: str, width: int, arch: int, **options: Any) -> None:
    used = compile_tile(kernel_name, dtype, width, arch, **options)
    where = f"{kernel_name} {dtype} {width} for sm_{arch}, {options}: {used}"
    plain, with_options = ALLOWED_SPILLS.get((kernel_name, 4 if dtype == "fp32" else 2, width), (0, 0))
    assert used.spills <= (with_options if options.get("options") else plain), where
    assert used.shared_bytes <= SHARED_BYTES[arch], where


@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize(("kernel", "size", "width"), [row for row in ROWS if row[1] == 2])
def test_half_tiles(kernel: str, size: int, width: int, arch: int) -> None:
    check(kernel, "bf16", width, arch)


@pytest.mark.parametrize("arch", [90, *(pytest.param(arch, marks=pytest.mark.long) for arch in TARGETS if arch != 90)])
@pytest.mark.parametrize(("kernel", "size", "width"), [row for row in ROWS if row[1] == 4])
def test_float32_tiles(kernel: str, size: int, width: int, arch: int) -> None:
    check(kernel, "fp32", width, arch)


@pytest.mark.long
@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize(("kernel", "size", "width"), ROWS)
def test_every_option(kernel: str, size: int, width: int, arch: int) -> None:
    dtype = "fp16" if size == 2 else "fp32"
    for options in ("shaped", "filtered") if kernel.startswith("backward") else ("shaped",):
        check(kernel, dtype, width, arch, precision="tf32", options=options)
    if kernel == "backward_hidden":
        for options in ("", "shaped"):
            check("marks", dtype, width, arch, precision="tf32", options=options)


@pytest.mark.parametrize(
    ("kernel", "size", "width"), [row if row[2] == 64 else pytest.param(*row, marks=pytest.mark.long) for row in ROWS]
)
def test_amd(kernel: str, size: int, width: int) -> None:
    """Every kernel compiles; the named tiles would be refused at their launch."""
    used = compile_tile(kernel, "bf16" if size == 2 else "fp32", width, AMD)
    too_large = (kernel, size, width) in TOO_LARGE_FOR_AMD
    assert (used.shared_bytes > AMD_SHARED_BYTES) == too_large, f"{kernel} {size} {width}: {used}"


@pytest.mark.parametrize("arch", [*TARGETS, AMD])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("name", ["join", "rows", "logit_gradients", "kept_tiles"])
def test_kernels_of_one_tile(name: str, dtype: str, arch: int | str) -> None:
    from jagged.ops.cross_entropy.triton import chunked, filter, forward, rows

    module, constants = {
        "join": (forward, {"BLOCK_N": forward.JOIN_ROWS, "BLOCK_D": forward.JOIN_WIDTH, "WIDTH": 64}),
        "rows": (rows, {"BLOCK_N": rows.BLOCK_ROWS, "BLOCK_D": rows.BLOCK_WIDTH, "WIDTH": 320}),
        "logit_gradients": (
            chunked, {"BLOCK_N": chunked.BLOCK_ROWS, "BLOCK_V": chunked.BLOCK_ITEMS, "ACCURATE": dtype == "fp32"},
        ),
        "kept_tiles": (filter, {"OWN": 4, "BLOCK": filter.BLOCK_MARKS}),
    }[name]  # fmt: skip
    kernel = getattr(module, f"linear_cross_entropy_{name}_kernel")
    types = {**POINTERS, **dict.fromkeys(("hidden", "weight", "clean", "gradients"), f"*{dtype}"), "products": "*fp32"}
    types |= {"target": "*i32" if name == "logit_gradients" else "*i64", "items": "*i32"}
    types |= dict.fromkeys((*SIZES, *ALIGNED), "i32") | dict.fromkeys(("inverse_temperature", "softcap"), "fp32")
    types |= dict.fromkeys(("num_own", "num_other", "own_stride", "other_stride"), "i32")
    types |= dict.fromkeys(("lse_stride", "target_stride", "smoothed_stride"), "i32")
    signature = {argument: types[argument] for argument in kernel.arg_names if argument not in constants}
    used = compile_kernel(kernel, signature, constants, arch=arch, divisible=ALIGNED)
    assert used.spills == 0, str(used)


@pytest.mark.parametrize("arch", [*TARGETS, AMD])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("width", [16, 256, 600])
def test_mean_logits(width: int, dtype: str, arch: int | str) -> None:
    from jagged.ops.cross_entropy.triton import filter

    kernel = filter.linear_cross_entropy_mean_logits_kernel
    signature = dict.fromkeys(("mean", "bias", "item_scale", "logits"), "*fp32") | {"weight": f"*{dtype}"}
    signature |= dict.fromkeys(("num_items", "weight_stride"), "i32")
    block = min(filter.BLOCK_COLUMNS, next_power_of_2(width))
    constants = {"WIDTH": width, "BLOCK_V": filter.BLOCK_ITEMS, "BLOCK_D": block}
    signature = {name: signature[name] for name in kernel.arg_names if name not in constants}
    used = compile_kernel(kernel, signature, constants, arch=arch, divisible=("weight_stride",))
    assert used.spills == 0, used


@pytest.mark.parametrize("width", [16, 64, 130, 256])
def test_copies(width: int) -> None:
    from jagged.ops.cross_entropy.hopper import copies

    kernel = copies.linear_cross_entropy_copy_kernel
    signature = {"weight": "*bf16", "order": "*i32", "pays": "*i32", "copy": "*bf16", "num_items": "i32", "weight_stride": "i32"}
    constants = {"BLOCK_V": copies.BLOCK_ITEMS, "BLOCK_D": next_power_of_2(width), "WIDTH": width}
    used = compile_kernel(kernel, signature, constants, arch=90, divisible=("weight_stride",))
    assert used.spills == 0, used


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(
    ("width", "way"), [*itertools.product((64, 128, 256), ("forward", "marks")), (0, "forward"), (0, "gradients")]
)
def test_warps_that_specialise(width: int, way: str, dtype: str) -> None:
    """On Hopper alone. The assembler lets products overlap only where nothing reads their sums before they are waited for."""
    from jagged.ops._shared.ring import LAYOUT
    from jagged.ops.cross_entropy.hopper import logits

    constants: dict[str, Any]
    if width:
        walk, kernel = logits.walk_of(width, marks=way == "marks"), logits.linear_cross_entropy_walk_hopper_kernel
        items, columns, constants = walk.items, width, {"GROUPS": walk.groups, "PLACES": walk.places}
        of_marks = ("row_shift", "grad_softmax", "marks", "pays")
        constants |= dict.fromkeys(of_marks if way == "forward" else ("part_maximum", "part_sum"))
    else:
        kernel = logits.linear_cross_entropy_steps_hopper_kernel
        items, columns = logits.WIDE_ITEMS, logits.WIDE_STEP
        constants = {"STEPS": 36, "PLACES": logits.WIDE_PLACES}
        of_gradients = ("target", "row_shift", "grad_softmax", "grad_target", "gradients")
        constants |= dict.fromkeys(of_gradients if way == "forward" else ("part_maximum", "part_sum"))
    signature = dict.fromkeys(kernel.arg_names, "i32") | POINTERS | {"rate": "fp32", "gradients": f"*{dtype}"}
    signature |= {
        name: f"tensordesc<{dtype}{[rows, columns]},{LAYOUT!r}>"
        for name, rows in (("hidden", logits.GROUP_N.value), ("weight", items))
    }
    signature = {name: signature[name] for name in kernel.arg_names if name not in constants}
    used = compile_kernel(kernel, signature, constants, arch=90, divisible=("gradients_stride",))
    assert used.spills == 0, used
    assert not used.is_serialised
    assert used.shared_bytes <= SHARED_BYTES[90], used


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp16", marks=pytest.mark.long)])
@pytest.mark.parametrize("columns", [64, 128, 256])
@pytest.mark.parametrize("owns_items", [False, True])
@pytest.mark.parametrize("is_filtered", [False, True])
def test_gradients_on_hopper(is_filtered: bool, owns_items: bool, columns: int, dtype: str) -> None:
    """On Hopper alone. The assembler lets products overlap only where nothing reads their sums before they are waited for."""
    from jagged.ops._shared.ring import LAYOUT
    from jagged.ops.cross_entropy.hopper import backward

    kernel, plan = backward.linear_cross_entropy_backward_hopper_kernel, backward.PLANS[columns]
    constants: dict[str, Any] = {"OWNS_ITEMS": owns_items, "BLOCK_D": columns, "WIDTH": columns}
    constants |= {"GROUPS": plan.groups, "PLACES": plan.places}
    if dtype == "bf16":
        constants["inverse_scale"] = None
    if not is_filtered:
        constants["unless"] = None
    types = {**POINTERS, "output": f"*{dtype}" if owns_items else "*fp32", "inverse_temperature": "fp32"}
    matrix = f"tensordesc<{dtype}{[backward.BLOCK.value, columns]},{LAYOUT!r}>"
    types |= dict.fromkeys(("own", "other"), matrix)
    signature = {name: types.get(name, "i32") for name in kernel.arg_names if name not in constants}
    used = compile_kernel(kernel, signature, constants, arch=90)
    assert used.spills == 0, used
    assert not used.is_serialised
    assert used.shared_bytes <= SHARED_BYTES[90], used


def test_every_width_has_a_tile() -> None:
    for capability in (8, 9, 10, 12):
        for kernel, size in CONFIGURATIONS:
            for width, is_scaled in itertools.product((0, 1, 64, 65, 128, 256, 257, 2304), (False, True)):
                dtype = torch.bfloat16 if size == 2 else torch.float32
                tile = configuration(kernel, width, dtype, capability, is_scaled=is_scaled)
                if width <= tile.step and kernel.startswith("backward"):
                    assert tile.step == tile.columns, "a side that stays on chip is read as one tile"
                if kernel == "backward_weight":
                    kept = configuration("backward_hidden", width, dtype, capability, is_scaled=is_scaled)
                    assert kept.rows % tile.rows == 0, "a step over rows lies within a tile that is kept or left out"
                    assert max(kept.items, tile.items) % min(kept.items, tile.items) == 0, (
                        "blocks of items share a list, or tiles"
                    )
    for exceptions in (SCALED, *EXCEPTIONS.values()):
        assert set(exceptions) <= set(ROWS)
