"""The kernels of group-sparse linear layers compile at their tiles for the GPUs we name, without a spill."""

from __future__ import annotations

import re

import pytest

from jagged.ops.group_sparse import configurations
from tests.aot import AMD, AMD_SHARED_BYTES, TARGETS, Resources, compile_kernel
from tests.places import PLACE

pytestmark = pytest.mark.skipif(PLACE.name == "interpret", reason="interpreted kernels are not compiled")

# Of the eighth generation the smaller GPUs, 8.6 and 8.9.
SHARED_BYTES = {80: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, AMD: AMD_SHARED_BYTES}
SIZES = (
    "num_groups", "num_labels", "batch_size", "num_parts", "num_positives", "logit_stride", "filled_size", "num_features",
    "feature_stride", "grad_column_stride", "weight_stride", "sums_stride",
)  # fmt: skip
# What launches find to be multiples of 16: always, and where sizes are such.
ALWAYS = ("filled_size", "feature_stride", "sums_stride")
# Labels of a group and slots: many of both, one step of the matrix instructions, odd ones; in `make test-long` other tiles' too.
SHAPES = [(64, 64), (16, 4), (40, 129)]
SHAPES += [pytest.param(*pair, marks=pytest.mark.long) for pair in ((1, 1), (32, 16), (128, 512), (16, 512), (128, 17), (32, 32))]


def check(used: Resources, arch: int | str, where: str) -> None:
    # Offsets and strides that a loop keeps; no tile. In the losses' kernels the assembler puts aside more, for one program more.
    assert used.spills <= (168 if where.startswith(("bce", "softmax")) else 48), f"{where}: {used}"
    assert used.shared_bytes <= SHARED_BYTES[arch], f"{where}: {used}"


# By kernel what chooses its tiles, and what a call may leave out.
KERNELS: dict[str, tuple[str, tuple[str, ...]]] = {
    "forward": ("forward", ("bias",)),
    "weight_gradient": ("weight", ("grad_bias",)),
    "feature_gradient": ("feature", ()),
    "bce_forward": ("bce_forward", ("bias", "label_weight")),
    "bce_backward": ("bce_backward", ("bias", "label_weight", "grad_bias")),
    "softmax_forward": ("softmax_forward", ("bias",)),
    "softmax_backward": ("softmax_backward", ("bias", "grad_bias")),
}


@pytest.mark.parametrize("arch", [*TARGETS, AMD])
@pytest.mark.parametrize(("dtype", "itemsize"), [("bf16", 2), ("fp32", 4)])
@pytest.mark.parametrize(("labels", "width"), SHAPES)
@pytest.mark.parametrize("name", KERNELS)
def test_kernels(arch: int | str, dtype: str, itemsize: int, labels: int, width: int, name: str) -> None:
    choose = getattr(configurations, f"{KERNELS[name][0]}_configuration")
    # Few groups and a larger batch, many and a small one.
    for num_groups, batch_size in ((1000, 100), (2**20, 64)):
        chosen = choose(labels * num_groups, num_groups, batch_size, width, itemsize)
        for is_whole in (True, False):
            used = compile_one(name, arch, dtype, width, batch_size, chosen, is_whole)
            check(used, arch, f"{name}, {labels} labels x {width} {dtype}, {batch_size} samples, {is_whole=}, for {arch}")


def compile_one(
    name: str, arch: int | str, dtype: str, width: int, batch_size: int, chosen: configurations.Configuration, is_whole: bool
) -> Resources:
    """Compile with all that a call may have, or without it, and then with narrow integers and gradients in float32."""
    from jagged.ops.group_sparse import bce_kernels, kernels, softmax_kernels

    modules = {"bce": bce_kernels, "softmax": softmax_kernels}
    kernel = getattr(modules.get(name.partition("_")[0], kernels), f"group_sparse_{name}_kernel")
    floats = ("features", "weight", "bias", "logits", "grad", "grad_weight", "grad_bias")
    types = {**dict.fromkeys(floats, f"*{dtype}"), **dict.fromkeys(SIZES, "i32"), "smoothing": "fp32"}
    types |= dict.fromkeys(
        ("sums", "scales", "row_weight", "label_weight", "found", "lse", "grad_lse", "grad_target", "inverse_scale"), "*fp32"
    )
    types |= {"supports": "*i32", **dict.fromkeys(("group_offsets", "positives", "rows", "positive_offsets"), "*i64")}
    constants = {
        "WIDTH": width, "BLOCK_L": chosen.block_l, "BLOCK_F": chosen.block_f, "BLOCK_B": chosen.block_b, "PRECISION": "ieee",
        "NUM_STAGES": chosen.num_stages, "weight_column_stride": 1, "grad_stride": 1, "GROUPS": chosen.groups,
        "BLOCKS": int(batch_size <= chosen.block_b),
    }  # fmt: skip
    if name == "bce_backward":
        tiles = configurations.bce_tiles(batch_size, width, chosen)
        constants |= {"TILES": tiles, "BLOCKS": int(batch_size <= chosen.block_b * tiles)}
    fixed = {key: value for key, value in constants.items() if key in kernel.arg_names}
    if not is_whole:
        fixed |= dict.fromkeys(KERNELS[name][1], None)
        types |= {"grad_weight": "*fp32", "supports": "*i16", "group_offsets": "*i32"}
    signature = {key: types[key] for key in kernel.arg_names if key not in fixed}
    of_batch = ("batch_size", "grad_column_stride", "logit_stride") if batch_size % 16 == 0 else ()
    aligned = (*ALWAYS, *of_batch, "num_features", *(() if width % 16 else ("weight_stride",)))
    divisible = [key for key in aligned if key in signature]
    return compile_kernel(kernel, signature, fixed, arch=arch, num_warps=chosen.num_warps, divisible=divisible)


@pytest.mark.parametrize(("labels", "width"), [(32, 32), (16, 64), (64, 64)])
def test_threads_wait_between_the_sums_of_two_tiles(labels: int, width: int) -> None:
    """What makes the gradient of features the same bits each time: no two tiles' sums lie between two barriers."""
    for num_groups, batch_size in ((2**20, 64), (2**20, 128), (1000, 300)):
        chosen = configurations.bce_backward_configuration(labels * num_groups, num_groups, batch_size, width, 2)
        used = compile_one("bce_backward", 90, "bf16", width, batch_size, chosen, True)
        of_a_tile = chosen.block_f * chosen.block_b // (4 * 32 * chosen.num_warps)
        between = [piece.count("atom.global.gpu.relaxed.add.v4.f32") for piece in used.assembly.split("bar.sync")]
        assert max(between) == of_a_tile
        assert sum(between) >= 2 * of_a_tile
        # A loop that comes back to its sums passes a barrier.
        assert between[0] == 0


@pytest.mark.parametrize("name", ["bce_backward", "softmax_forward", "softmax_backward"])
def test_sums_over_threads_are_of_no_product(name: str) -> None:
    """What each thread adds to another's is no product that could be contracted, so that all have the same bits of the sum."""
    for labels, width, dtype, itemsize in ((32, 32, "bf16", 2), (16, 64, "bf16", 2), (40, 129, "bf16", 2), (64, 64, "fp32", 4)):
        chosen = getattr(configurations, f"{name}_configuration")(labels * 1000, 1000, 100, width, itemsize)
        found = sources_of_exchanges(compile_one(name, 90, dtype, width, 100, chosen, True).assembly)
        assert found
        assert not any(word.startswith(("mul.f32", "fma", "mul.rn.f32")) for word in found), found


def sources_of_exchanges(ptx: str) -> set[str]:
    """Return the instructions whose results threads hand each other, those in front of additions of these."""
    made: dict[str, tuple[str, list[str]]] = {}
    found, at = set(), re.compile(r"(?:@!?%p\d+ )?([\w.:]+)\s+(%\w+)(?:\|%\w+)?, *(.*);")

    def trace(register: str) -> None:
        operation, given = made.get(register, ("", []))
        if operation.startswith(("add.f32", "add.rn.f32", "mov.b32")):
            for other in given:
                trace(other)
        else:
            found.add(operation)

    for operation, register, given in (match.groups() for match in map(at.match, map(str.strip, ptx.splitlines())) if match):
        sources = [name.strip() for name in given.split(",")]
        if operation.startswith("shfl"):
            trace(sources[0])
        made[register] = operation, sources
    return found
