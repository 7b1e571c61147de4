"""Every kernel of embedding bags compiles for the GPUs we name, and keeps its work in registers."""

from __future__ import annotations

import re
from typing import Any

import pytest

from jagged.ops.embedding_bag.optimizers import KINDS, MOMENTS
from jagged.ops.embedding_bag.triton.shared_memory import MOST_BYTES
from tests.aot import AMD, TARGETS, compile_kernel
from tests.places import PLACE

pytestmark = pytest.mark.skipif(PLACE.name == "interpret", reason="interpreted kernels are not compiled")

LONGS = ("layout", "batches", "ends", "counter", "tables", "step", "indices", "offsets", "widths")
LONGS += ("slices", "first_bags", "begins", "block_ends", "chunk_begins", "count_begins", "place_begins", "block_begins")
LONGS += ("counters", "long_rows", "row_scales", "last_step", "pairs")
FLOATS = (
    "sums_of_slices",
    "scales",
    "parts_of_runs",
    "factors",
    "sorted_factors",
    "rate",
    "corrections",
    "output",
    "grad",
    "result",
)
INTS = (
    "arrivals",
    "order",
    "schedules",
    "runs",
    "feature_of_bag",
    "keys",
    "sources",
    "plan",
    "places",
    "bounds",
    "sorted_keys",
    "sorted_sources",
)
SHORTS = ("starts", "positions")
NUMBERS = ("eps", "beta1", "beta2", "weight_decay", "rest1", "rest2", "max_norm")
# Of all widths, and of those alone whose rows begin at multiples of 16 bytes.
WIDTHS = {"any": {*range(1, 131)}, "aligned": {4, 8, 16, 32, 64, 128}}

# The most bytes that a kernel spills on any GPU, in all, or for each of its branches; of plain rows more: with 72 registers in
# place of 80 more warps run, which took 4 to 7 % less under Zipf's ids (docs/internals/embedding_bag.md).
ALLOWED_SPILLS = {"branch": 64, "plain": 88, "rows": 64, "large_map": 224}


def compile_one(
    kernel: Any,
    constants: dict[str, Any],
    arch: int | str,
    *,
    dtype: str = "fp32",
    states: str = "fp32",
    num_warps: int = 1,
    max_registers: int | None = None,
) -> Any:
    types = dict.fromkeys(kernel.arg_names, "i32") | dict.fromkeys(LONGS, "*i64") | dict.fromkeys(FLOATS, "*fp32")
    types |= dict.fromkeys(INTS, "*i32") | dict.fromkeys(SHORTS, "*i16") | dict.fromkeys(NUMBERS, "fp32")
    types |= {"weights": f"*{dtype}", "first": f"*{states}", "second": f"*{states}"}
    signature = {name: types[name] for name in kernel.arg_names if name not in constants}
    return compile_kernel(kernel, signature, constants, arch=arch, num_warps=num_warps, max_registers=max_registers)


def used(widths: str) -> int:
    from jagged.ops.embedding_bag.triton.schedules import schedules_of

    return schedules_of(WIDTHS[widths])


@pytest.mark.parametrize("arch", [90, *(pytest.param(arch, marks=pytest.mark.long) for arch in (*TARGETS, AMD) if arch != 90)])
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize(("dtype", "is_weighted"), [("fp32", False), ("bf16", True), ("u8", False), ("u8", True)])
def test_forward(dtype: str, is_weighted: bool, widths: str, arch: int | str) -> None:
    from jagged.ops.embedding_bag.triton import forward, launch

    is_aligned, is_plain = widths == "aligned", dtype != "u8" and not is_weighted
    constants = {"USED": used(widths), "batches": None, "ALIGNED": is_aligned, "MEANS": True}
    if not is_weighted:
        constants["scales"] = None
    if dtype != "u8":
        constants["row_scales"] = None
    is_capped = is_aligned and is_plain
    capped, allowed = (launch.PLAIN_REGISTERS, "plain") if is_capped else (launch.REGISTERS, "branch")
    resources = compile_one(forward.embedding_bags_forward_kernel, constants, arch, dtype=dtype, max_registers=capped)
    # Some registers that a branch's function saves for its caller, once a unit.
    assert resources.spills <= ALLOWED_SPILLS[allowed] * used(widths).bit_count(), resources
    assert arch == AMD or resources.registers <= capped, resources


@pytest.mark.parametrize("arch", [*TARGETS, AMD])
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize(("dtype", "is_weighted"), [("fp32", False), ("bf16", True)])
def test_forward_of_small_batches(dtype: str, is_weighted: bool, widths: str, arch: int | str) -> None:
    from jagged.ops.embedding_bag.triton import forward
    from jagged.ops.embedding_bag.triton.schedules import SMALL_COLUMNS, SMALL_KINDS, schedules_of

    constants = {
        "row_scales": None,
        "USED": schedules_of(WIDTHS[widths], SMALL_KINDS, SMALL_COLUMNS.value),
        "ALIGNED": widths == "aligned",
        "MEANS": True,
    }
    if not is_weighted:
        constants["scales"] = None
    resources = compile_one(forward.embedding_bags_small_kernel, constants, arch, dtype=dtype)
    assert arch == AMD or resources.spills == 0, resources
    assert arch == AMD or resources.registers <= 128, resources


@pytest.mark.parametrize("arch", [90, *(pytest.param(arch, marks=pytest.mark.long) for arch in TARGETS if arch != 90)])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("none", ()),
        ("sgd", ()),
        ("rowwise_norm", ()),
        *(pytest.param(kind, (), marks=pytest.mark.long) for kind in KINDS if kind != "sgd"),
        *(pytest.param(kind, ("max_norm",), marks=pytest.mark.long) for kind in KINDS),
        pytest.param("adagrad", ("decoupled",), marks=pytest.mark.long),
        pytest.param("rowwise_adagrad", ("decoupled", "states"), marks=pytest.mark.long),
        ("adam", ("last_step", "max_norm", "states")),
        pytest.param("rowwise_adam", ("last_step", "max_norm", "states"), marks=pytest.mark.long),
    ],
)
def test_sums_of_rows(kind: str, options: tuple[str, ...], arch: int) -> None:
    """With options of an update, or bfloat16 states (`states`), and without."""
    from jagged.ops.embedding_bag.triton import rows, sorting, sums, updates

    are_whole = updates.takes_whole_rows(kind, "max_norm" in options, "last_step" in options)
    constants: dict[str, Any] = {
        "USED": sums.used_widths(tuple(WIDTHS["aligned"]), are_whole=are_whole),
        "KIND": kind,
        "IS_STOCHASTIC": False,
        "IS_DECOUPLED": kind in ("none", *MOMENTS) or "decoupled" in options,
        "WHOLE_ROWS": are_whole,
    }
    constants |= dict.fromkeys(name for name in ("last_step", "max_norm") if name not in options)
    if kind == "none":
        constants |= dict.fromkeys(("factors", "first", "second", "step", "corrections", "rate"))
    aligned, most = {"ALIGNED": True, "USED": 1}, {"MOST": sorting.MOST_LOOKUPS.value}
    join = {name: value for name, value in constants.items() if name != "factors"} | {"BLOCKS": sorting.JOINED_BLOCKS}
    for kernel, of in (
        (sorting.embedding_bags_rows_kernel, constants | aligned | most),
        (sorting.embedding_bags_rows_kernel, constants | aligned | most | {"ALIGNED": False}),
        (sorting.embedding_bags_join_kernel, join),
        (rows.embedding_bags_counted_rows_kernel, constants | aligned),
        (rows.embedding_bags_counted_rows_kernel, constants | aligned | {"ALIGNED": False}),
        (rows.embedding_bags_long_rows_kernel, constants | {"ALIGNED": True}),
    ):
        num_warps = sorting.JOINING_WARPS if kernel is sorting.embedding_bags_join_kernel else 1
        states = "bf16" if "states" in options else "fp32"
        resources = compile_one(kernel, of, arch, states=states, num_warps=num_warps)
        assert resources.spills <= ALLOWED_SPILLS["rows"], resources
        # What a row has missed is three numbers more of it. Of programs that join parts there are few.
        most = 168 if kernel is sorting.embedding_bags_join_kernel else 144 if "last_step" in options else 128
        assert resources.registers <= most, resources


@pytest.mark.parametrize("arch", [*TARGETS, AMD])
@pytest.mark.parametrize(
    "name",
    [
        "map", "planned", "large_map", "large_planned", "lookups", "singles", "chunk_sort", "merge", "groups", "chunks", "orders",
        "bounds", "sources", "factors", "samples",
    ],
)  # fmt: skip
def test_small_kernels(name: str, arch: int | str) -> None:
    from jagged.ops.embedding_bag.triton import counting, launch, merging, samples, schedules, sorting

    module, constants, num_warps = {
        "map": (schedules, {"BLOCK": 1024, "plan": None}, 16),
        "planned": (schedules, {"BLOCK": 1024, "first_bags": None}, 16),
        "large_map": (schedules, {"BLOCK": schedules.BLOCK_GROUPS, "plan": None}, 16),
        "large_planned": (schedules, {"BLOCK": schedules.BLOCK_GROUPS, "first_bags": None}, 16),
        "lookups": (sorting, {"BAGS": sorting.BLOCK_BAGS, "LOOKUPS": sorting.BLOCK_LOOKUPS, "SINGLES": False}, 4),
        "singles": (sorting, {"BAGS": sorting.BLOCK_BAGS, "LOOKUPS": sorting.BLOCK_LOOKUPS, "SINGLES": True}, 4),
        "chunk_sort": (merging, {"CHUNK": merging.CHUNK}, merging.WARPS),
        "merge": (merging, {"CHUNK": merging.CHUNK, "RANKED": merging.RANKED}, merging.WARPS),
        "groups": (
            sorting,
            {"BLOCKS": sorting.GROUPED_BLOCKS, "COLUMNS": sorting.GROUPED_COLUMNS},
            sorting.GROUPING_WARPS,
        ),
        "chunks": (counting, {"BLOCK": counting.BLOCK_FEATURES}, 16),
        "orders": (
            counting,
            {
                "BLOCK": counting.ORDERED_ROWS,
                "MATCH": arch != AMD,
                "ROOM": 0 if arch == AMD else counting.MOST_SHARED,
                "WARPS": 1 if arch == AMD else counting.ORDER_WARPS,
            },
            1 if arch == AMD else counting.ORDER_WARPS,
        ),
        "bounds": (counting, {"BLOCK": counting.BLOCK_ROWS}, counting.BOUNDS_WARPS),
        "sources": (counting, {"SHARED": arch != AMD, "factors": None}, counting.PLACES_WARPS),
        # With factors each source goes straight to its place.
        "factors": (counting, {"SHARED": False}, counting.PLACES_WARPS),
        "samples": (
            samples,
            {"BAGS": launch.SAMPLE_BAGS, "LOOKUPS": launch.SAMPLE_LOOKUPS, "COLUMNS": launch.SAMPLE_COLUMNS},
            2,
        ),
    }[name]
    of_kernel = "map" if module is schedules else {"factors": "sources", "singles": "lookups"}.get(name, name)
    kernel = getattr(module, f"embedding_bags_{of_kernel}_kernel")
    # A map of up to 2,048 features at once stores a few numbers of each thread, which costs less than to loop twice.
    resources = compile_one(kernel, constants, arch, num_warps=num_warps)
    allowed = ALLOWED_SPILLS["large_map"] if "large" in name else 0
    assert (arch == AMD and "large" in name) or resources.spills <= allowed, resources
    # Together with what Triton takes, what `reserve` does is within what a launch has without asking.
    reserved = sum(int(size) for size in re.findall(r"jagged_numbers\[(\d+)\]", resources.assembly))
    assert (reserved > 0) == (arch != AMD and name in ("orders", "sources")), reserved
    assert not reserved or reserved + resources.shared_bytes <= MOST_BYTES.value, (reserved, resources)
