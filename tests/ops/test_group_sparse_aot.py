"""The kernels of group-sparse linear layers compile at their tiles for the GPUs we name, without a spill."""

from __future__ import annotations

import re
from typing import Any

import pytest

from jagged.ops._shared.sizes import cdiv
from jagged.ops.group_sparse import configurations
from tests.aot import AMD, AMD_SHARED_BYTES, TARGETS, Resources, compile_kernel
from tests.places import PLACE

pytestmark = pytest.mark.skipif(PLACE.name == "interpret", reason="interpreted kernels are not compiled")

# Of the eighth generation the smaller GPUs, 8.6 and 8.9.
SHARED_BYTES = {80: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, AMD: AMD_SHARED_BYTES}
CAPABILITIES: dict[int | str, int] = {80: 8, 90: 9, 100: 10, AMD: 9}
SIZES = (
    "num_groups", "num_labels", "batch_size", "num_parts", "row_programs", "num_positives", "logit_stride", "filled_size",
    "num_features",
    "feature_stride", "grad_column_stride", "weight_stride", "sums_stride",
)  # fmt: skip
# What launches find to be multiples of 16: always, and where sizes are such.
ALWAYS = ("filled_size", "feature_stride", "sums_stride")
# Labels of a group and slots: many of both, one step of the matrix instructions, odd ones; in `make test-long` other tiles' too.
SHAPES = [(64, 64), (16, 4), (40, 129)]
SHAPES += [pytest.param(*pair, marks=pytest.mark.long) for pair in ((1, 1), (32, 16), (128, 512), (16, 512), (128, 17), (32, 32))]


# Shared memory of a program and of a multiprocessor of the GPUs whose programs have sums there, an H100's and an A100's.
SHARED = {90: (227 * 1024, 228 * 1024), 80: (163 * 1024, 164 * 1024)}
IN_SHARED_MEMORY = "feature_gradient_in_shared_memory"
BACKWARD = "bce_backward", "softmax_backward"


def check(used: Resources, arch: int | str, where: str) -> None:
    # Offsets and strides that a loop keeps; no tile. Elsewhere the assembler puts aside more, for one program more.
    has_more = where.startswith(("bce", "softmax", "adjacent", "weight"))
    assert used.spills <= ((256 if arch == 80 else 168) if has_more else 48), f"{where}: {used}"
    assert used.shared_bytes <= SHARED_BYTES[arch], f"{where}: {used}"


# By kernel what chooses its tiles, and what a call may leave out.
KERNELS: dict[str, tuple[str, tuple[str, ...]]] = {
    "forward": ("forward", ("bias",)),
    "weight_gradient": ("weight", ("grad_bias",)),
    "feature_gradient": ("feature", ()),
    "adjacent_feature_gradient": ("adjacent_feature", ()),
    "bce_forward": ("bce_forward", ("bias", "label_weight")),
    "bce_backward": ("loss_backward", ("bias", "label_weight", "grad_bias")),
    "softmax_forward": ("softmax_forward", ("bias",)),
    "softmax_backward": ("softmax_backward", ("bias", "grad_bias")),
}


@pytest.mark.parametrize("arch", [*TARGETS, AMD])
@pytest.mark.parametrize(("dtype", "itemsize"), [("bf16", 2), ("fp32", 4)])
@pytest.mark.parametrize(("labels", "width"), SHAPES)
@pytest.mark.parametrize("name", KERNELS)
def test_kernels(arch: int | str, dtype: str, itemsize: int, labels: int, width: int, name: str) -> None:
    # Few groups and a larger batch, many and a small one.
    for num_groups, batch_size in ((1000, 100), (2**20, 64)):
        sizes = labels * num_groups, num_groups, batch_size, width, itemsize
        chosen = configuration(KERNELS[name][0], arch, *sizes)
        for is_whole in (True, False):
            used = compile_one(name, arch, dtype, width, batch_size, chosen, is_whole)
            check(used, arch, f"{name}, {labels} labels x {width} {dtype}, {batch_size} samples, {is_whole=}, for {arch}")
        if name in BACKWARD and batch_size > 64:
            # One of the gradients alone is less of the same kernel.
            for alone in ({"of_features": False}, {"of_weight": False}):
                used = compile_one(name, arch, dtype, width, batch_size, chosen, True, **alone)
                check(used, arch, f"{name}, {alone}, {labels} labels x {width} {dtype}, for {arch}")


def configuration(kind: str, arch: int | str, *sizes: int) -> configurations.Configuration:
    """Return what is launched on a GPU of compute capability `arch` / 10, or of AMD, whose driver calls it 9."""
    further = (CAPABILITIES[arch],) if kind.endswith("_backward") else ()
    chosen: configurations.Configuration = getattr(configurations, f"{kind}_configuration")(*sizes, *further)
    return chosen


def compile_one(
    name: str, arch: int | str, dtype: str, width: int, batch_size: int, chosen: configurations.Configuration, is_whole: bool,
    *, of_features: bool = True, of_weight: bool = True, update: bool | None = None,
) -> Resources:  # fmt: skip
    """Compile with all that a call may have, or without it, and then with narrow integers and gradients in float32.

    `update` in place of gradients of weights and biases, with momentum (True) or without.
    """
    from jagged.ops.group_sparse import bce_kernels, gradient_kernels, kernels, softmax_kernels

    modules = {"bce": bce_kernels, "softmax": softmax_kernels}
    kernel = getattr(modules.get(name.partition("_")[0], kernels), f"group_sparse_{name}_kernel", None)
    if name in BACKWARD:
        kernel = gradient_kernels.group_sparse_loss_backward_kernel
    assert kernel is not None
    floats = (
        "features", "weight", "bias", "logits", "grad", "grad_weight", "grad_bias", "updated_bias", "weight_momentum",
        "bias_momentum",
    )  # fmt: skip
    types = {**dict.fromkeys(floats, f"*{dtype}"), **dict.fromkeys(SIZES, "i32"), "smoothing": "fp32"}
    types |= dict.fromkeys(
        ("sums", "scales", "row_weight", "label_weight", "found", "lse", "grad_lse", "grad_target", "inverse_scale"), "*fp32"
    )
    types |= {"supports": "*i32", "first_columns": "*i32", "run_ends": "*i64", "segments": "*i64"}
    types |= dict.fromkeys(("group_offsets", "positives", "rows", "positive_offsets"), "*i64")
    constants: dict[str, Any] = {
        "WIDTH": width, "BLOCK_L": chosen.block_l, "BLOCK_F": chosen.block_f, "BLOCK_B": chosen.block_b, "PRECISION": "ieee",
        "NUM_STAGES": chosen.num_stages, "weight_column_stride": 1, "grad_stride": 1, "GROUPS": chosen.groups,
        "BLOCKS": int(batch_size <= chosen.block_b), "buffer": None,
        "SHARED_BYTES": 4 * 128 * chosen.block_b * (name == IN_SHARED_MEMORY),
    }  # fmt: skip
    if name == "weight_gradient":
        num_tiles = configurations.weight_tiles(batch_size, chosen)
        constants |= {"TILES": num_tiles, "BLOCKS": int(batch_size <= chosen.block_b * num_tiles)}
    if name in BACKWARD:
        num_tiles = configurations.loss_tiles(batch_size, width, chosen)
        constants |= {"TILES": num_tiles, "BLOCKS": int(batch_size <= chosen.block_b * num_tiles)}
        constants |= {"OF_WEIGHT": of_weight, "OF_FEATURES": of_features}
        others = ("lse", "grad_lse", "grad_target") if name == "bce_backward" else ("row_weight", "label_weight")
        constants |= dict.fromkeys(others)
        constants |= ({} if of_features else {"sums": None}) | ({} if of_weight else {"grad_weight": None, "grad_bias": None})
        constants |= {} if update is None else {"grad_weight": None, "grad_bias": None}
        # Given all at once, but for what is of momentum.
        of_update = (
            "updated_bias",
            "weight_momentum",
            "bias_momentum",
            "learning_rate",
            "step",
            "counts",
            "momentum",
            "weight_decay",
        )
        left_out = of_update if update is None else of_update[1:3] + of_update[6:7]
        constants |= {} if update else dict.fromkeys(left_out)
        types |= {"learning_rate": "*fp32", "step": "*i64", "counts": "*i32", "momentum": "fp32", "weight_decay": "fp32"}
    fixed = {key: value for key, value in constants.items() if key in kernel.arg_names}
    if not is_whole:
        fixed |= dict.fromkeys(KERNELS.get(name, ("", ()))[1], None)
        types |= {"grad_weight": "*fp32", "supports": "*i32" if constants["SHARED_BYTES"] else "*i16", "group_offsets": "*i32"}
    signature = {key: types[key] for key in kernel.arg_names if key not in fixed}
    of_batch = ("batch_size", "grad_column_stride", "logit_stride") if batch_size % 16 == 0 else ()
    aligned = (*ALWAYS, *of_batch, "num_features", *(() if width % 16 else ("weight_stride",)))
    divisible = [key for key in aligned if key in signature]
    return compile_kernel(kernel, signature, fixed, arch=arch, num_warps=chosen.num_warps, divisible=divisible)


@pytest.mark.parametrize(("labels", "width", "batch_size"), [(32, 32, 64), (16, 64, 128), (64, 64, 64)])
@pytest.mark.parametrize("arch", TARGETS)
def test_groups_of_adjacent_columns_are_loaded_ahead(arch: int, labels: int, width: int, batch_size: int) -> None:
    chosen = configuration("adjacent_feature", arch, labels * 2**18, 2**18, batch_size, width, 2)
    used = compile_one("adjacent_feature_gradient", arch, "bf16", width, batch_size, chosen, True)
    check(used, arch, f"adjacent_feature_gradient: {used}, {chosen}")
    assert re.search(r"cp\.async\.wait_group\s+[1-9]", used.assembly), used


# The sizes that are timed, two blocks of slots, odd ones, few samples, all labels of a tile.
@pytest.mark.parametrize(
    ("labels", "width", "num_features", "batch_size"),
    [(32, 32, 768, 64), (16, 64, 384, 128), (40, 129, 700, 100), (16, 4, 3000, 5), (64, 64, 300, 64), (1, 20, 1000, 33)],
)
@pytest.mark.parametrize("arch", SHARED)
def test_sums_in_shared_memory(arch: int, labels: int, width: int, num_features: int, batch_size: int) -> None:
    """What makes them right wherever Triton puts numbers; and that it loads ahead, in the memory that is left to it."""
    sizes = labels * 1000, 1000, batch_size, width, 2
    chosen, programs = configurations.shared_feature_configuration(*sizes, num_features, SHARED[arch])
    assert programs or 4 * 16 * num_features > SHARED[arch][0] - 32768
    for is_whole in (True, False) if programs else ():
        used = compile_one(IN_SHARED_MEMORY, arch, "bf16", width, batch_size, chosen, is_whole)
        where = f"{used}, {chosen}"
        check(used, arch, f"{IN_SHARED_MEMORY}: {where}")
        assert used.shared_bytes <= configurations.bytes_ahead(chosen, chosen.num_stages // 2), where
        size = cdiv(used.shared_bytes, 16) * 16 + 4 * num_features * chosen.block_b
        assert size <= SHARED[arch][0], where
        assert programs * (size + 1024) <= SHARED[arch][1], where
        check_sums(used, chosen)
        assert width % 16 or re.search(r"cp\.async\.wait_group\s+[1-9]", used.assembly), where


def check_sums(used: Resources, chosen: configurations.Configuration) -> None:
    """Find in PTX where quads are added to sums: their loads `L` and stores `S`, whose instructions nobody else uses."""
    blocks = flow_of(used.assembly, {"ld.shared.v4.f32": "L", "st.shared.v4.f32": "S", "bar.sync": "B"})
    of_thread = chosen.block_f * chosen.block_b // 4 / (32 * chosen.num_warps)
    additions = [found for events, _ in blocks.values() for found in re.findall("L+S+", events)]
    assert len(additions) >= 2
    for found in additions:
        # No number is in two threads, which would both add to its sum. All of a tile's are loaded before the first is stored.
        assert found.count("L") == found.count("S") == of_thread, found
    # Whichever way a program goes, all threads wait for each other between stores and the next loads.
    is_stored = dict.fromkeys(blocks, False)
    pending = list(blocks)
    while pending:
        events, following = blocks[name := pending.pop()]
        state = is_stored[name]
        for event in events:
            assert not (event == "L" and state), used.assembly
            state = event == "S" or (state and event != "B")
        for other in following:
            if state and not is_stored[other]:
                is_stored[other] = True
                pending.append(other)


def flow_of(ptx: str, events: dict[str, str]) -> dict[str, tuple[str, list[str]]]:
    """Return the pieces of a kernel by label: letters of the instructions they have, in order, and which pieces may follow."""
    blocks: dict[str, tuple[str, list[str]]] = {"entry": ("", [])}
    name, found, following = "entry", "", list[str]()
    for number, line in enumerate(ptx.splitlines()):
        label, branch = re.match(r"(\$L__BB\w+):", line), re.match(r"\s*(@!?%p\d+ )?bra(?:\.uni)?\s+(\$L\w+);", line)
        if label or branch:
            after = label[1] if label else f"line {number}"
            is_certain = branch is not None and branch[1] is None
            blocks[name] = found, [*following, *([branch[2]] if branch else []), *([] if is_certain else [after])]
            name, found, following = after, "", []
        found += "".join(letter for text, letter in events.items() if text in line)
    blocks[name] = found, following
    return blocks


@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize(("labels", "width", "batch_size"), [(32, 96, 64), (32, 256, 64), (16, 128, 128)])
@pytest.mark.parametrize("name", BACKWARD)
def test_losses_of_many_slots(arch: int, labels: int, width: int, batch_size: int, name: str) -> None:
    chosen = configuration(KERNELS[name][0], arch, labels * 2**14, 2**14, batch_size, width, 2)
    assert chosen.block_f == 128
    used = compile_one(name, arch, "bf16", width, batch_size, chosen, True)
    check(used, arch, f"{name}, {labels} labels x {width}, {batch_size} samples, for {arch}: {used}, {chosen}")


@pytest.mark.parametrize(("labels", "width", "batch_size"), [(32, 32, 64), (16, 64, 128), (32, 96, 64)])
@pytest.mark.parametrize("momentum", [True, False])
@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("name", BACKWARD)
def test_updates(name: str, arch: int, momentum: bool, labels: int, width: int, batch_size: int) -> None:
    """Both sizes that are timed and a wider one, in bfloat16, rounded at random: a block that has all samples is loaded ahead."""
    chosen = configuration(KERNELS[name][0], arch, labels * 2**18, 2**18, batch_size, width, 2)
    used = compile_one(name, arch, "bf16", width, batch_size, chosen, True, update=momentum)
    check(used, arch, f"{name}: {used}, {chosen}")
    is_one_block = batch_size <= chosen.block_b * configurations.loss_tiles(batch_size, width, chosen)
    assert is_one_block or (name, arch, width) == ("softmax_backward", 80, 64)
    assert bool(re.search(r"cp\.async\.wait_group\s+[1-9]", used.assembly)) == is_one_block, used


@pytest.mark.parametrize("name", BACKWARD)
@pytest.mark.parametrize(("labels", "width"), [(32, 32), (16, 64), (64, 64), (32, 128), (32, 256)])
def test_threads_wait_between_the_sums_of_two_tiles(name: str, labels: int, width: int) -> None:
    """What makes the gradient of features the same bits each time: no two tiles' sums lie between two barriers."""
    for num_groups, batch_size in ((2**20, 64), (2**20, 128), (1000, 300)):
        chosen = configuration(KERNELS[name][0], 90, labels * num_groups, num_groups, batch_size, width, 2)
        used = compile_one(name, 90, "bf16", width, batch_size, chosen, True)
        of_a_tile = chosen.block_f * chosen.block_b // (4 * 32 * chosen.num_warps)
        between = [piece.count("atom.global.gpu.relaxed.add.v4.f32") for piece in used.assembly.split("bar.sync")]
        assert max(between) == of_a_tile
        assert sum(between) >= 2 * of_a_tile
        # A loop that comes back to its sums passes a barrier.
        assert between[0] == 0


@pytest.mark.parametrize("name", ["softmax_forward", *BACKWARD])
def test_sums_over_threads_are_of_no_product(name: str) -> None:
    """What each thread adds to another's is no product that could be contracted, so that all have the same bits of the sum."""
    of_bf16 = ((32, 32, "bf16", 2), (16, 64, "bf16", 2), (40, 129, "bf16", 2), (32, 96, "bf16", 2))
    for labels, width, dtype, itemsize in (*of_bf16, (64, 64, "fp32", 4)):
        chosen = configuration(KERNELS[name][0], 90, labels * 1000, 1000, 100, width, itemsize)
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
