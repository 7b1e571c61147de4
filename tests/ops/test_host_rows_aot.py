"""The exchange compiles for the GPUs we name, without spills, and moves 16 bytes at a time where rows allow it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from jagged.ops._shared.sizes import next_power_of_2
from tests.aot import AMD, AMD_SHARED_BYTES, TARGETS, compile_kernel
from tests.places import PLACE

pytestmark = pytest.mark.skipif(PLACE.name == "interpret", reason="interpreted kernels are not compiled")

SIZES = {"fp32": 4, "bf16": 2, "i64": 8}


def compiled(dtype: str, width: int, arch: int | str) -> Any:
    from jagged.ops.host_rows.kernels import MOST_COLUMNS, MOST_ROWS, TILE_BYTES, exchange_rows_kernel

    columns = min(next_power_of_2(width), MOST_COLUMNS)
    rows = max(1, min(TILE_BYTES // SIZES[dtype] // columns, MOST_ROWS))
    types = {"cached": f"*{dtype}", "table": f"*{dtype}", "slots": "*i32", "leaving": "*i32", "coming": "*i32"}
    types |= {"num_rows": "*i32"} | dict.fromkeys(("num_exchanges", "num_slots", "num_lines"), "i32")
    constants = {"WIDTH": width, "LINE": math.gcd(width, 16), "ROWS": rows, "COLUMNS": columns}
    return compile_kernel(exchange_rows_kernel, types, constants, arch=arch, num_warps=1)


@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize(("dtype", "width"), [("fp32", 1), ("fp32", 20), ("fp32", 128), ("bf16", 64), ("fp32", 1030), ("i64", 1)])
def test_nothing_is_spilled(dtype: str, width: int, arch: int) -> None:
    used = compiled(dtype, width, arch)
    assert used.spills == 0
    if width % 4 == 0 and arch == 90:
        accesses = ("v4.b32", "v2.b32") if dtype == "bf16" else ("v4.b32",)
        assert any(access in used.assembly for access in accesses)


def compiled_claims(dtype: str, arch: int | str) -> Any:
    from jagged.ops.host_rows.kernels import LOOKUPS, claim_rows_kernel

    types = {"indices": f"*{dtype}", "ends": f"*{dtype}", "of_features": "*i64", "is_dirty": "*i1"}
    types |= dict.fromkeys(("slot_of_row", "counts", "used", "rows", "found"), "*i32")
    types |= dict.fromkeys(("num_lookups", "num_features", "no_row", "num_pools", "number"), "i32")
    constants = {"CHANGES": True, "STEPS": 5, "BLOCK": 8192, "LOOKUPS": LOOKUPS}
    return compile_kernel(claim_rows_kernel, types, constants, arch=arch)


def compiled_lists(arch: int | str) -> Any:
    from jagged.ops.host_rows.kernels import ROWS, TOGETHER, list_rows_kernel

    types = {"found": "*i32", "missed": "*i32", "no_row": "i32", "num_totals": "i32"}
    return compile_kernel(list_rows_kernel, types, {"BLOCK": 8192, "ROWS": ROWS, "TOGETHER": TOGETHER}, arch=arch)


def compiled_counts(arch: int | str) -> Any:
    from jagged.ops.host_rows.kernels import SLOTS, count_slots_kernel

    types = {"ring": "*i64", "used": "*i32", "free": "*i32", "num_ring": "i32", "cursor": "i32", "oldest": "i32"}
    return compile_kernel(count_slots_kernel, types, {"SLOTS": SLOTS}, arch=arch)


def compiled_seats(arch: int | str) -> Any:
    from jagged.ops.host_rows.kernels import SLOTS, TOGETHER, seat_rows_kernel

    constants = {"CHANGES": True, "LINES": 8, "LINE": 16, "STEPS": 3, "SLOTS": SLOTS, "TOGETHER": TOGETHER}
    pointers = dict.fromkeys(("ring", "tables", "seated", "written"), "*i64") | {"is_dirty": "*i1"}
    pointers |= dict.fromkeys(("coming", "totals", "slot_of_row", "row_of_slot", "used", "free"), "*i32")
    types = {name: pointers.get(name, "i32") for name in seat_rows_kernel.arg_names if name not in constants}
    return compile_kernel(seat_rows_kernel, types, constants, arch=arch)


@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("dtype", ["i32", "i64"])
def test_claims_spill_nothing(dtype: str, arch: int) -> None:
    assert compiled_claims(dtype, arch).spills == 0


@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("compiled_by", [compiled_lists, compiled_counts, compiled_seats])
def test_seats_spill_nothing(compiled_by: Any, arch: int) -> None:
    assert compiled_by(arch).spills == 0


@pytest.mark.parametrize("compiled_by", [compiled_lists, compiled_counts, compiled_seats])
def test_seats_on_amd(compiled_by: Any) -> None:
    assert compiled_by(AMD).shared_bytes <= AMD_SHARED_BYTES


def test_claims_on_amd() -> None:
    assert compiled_claims("i64", AMD).shared_bytes <= AMD_SHARED_BYTES


def test_amd() -> None:
    assert compiled("fp32", 128, AMD).shared_bytes == 0
