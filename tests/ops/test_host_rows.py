"""Exchanges of cached rows against a loop over them. They move bits, so results are equal, not close."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from jagged.ops import claim_rows, exchange_rows, seat_rows
from tests.places import PLACE, Place
from tests.strategies import random_tensor, seeds

DTYPES = (*PLACE.dtypes, torch.float64, torch.int64)


def on_host(table: Tensor) -> Tensor:
    return table.pin_memory() if PLACE.device.type == "cuda" else table


def numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    return (100 * random_tensor(shape, torch.float32, seed)).cpu().to(dtype)


@given(
    st.sampled_from(DTYPES), st.integers(1, 12), st.integers(2, 20), st.sampled_from([1, 3, 4, 20, 64, 128, 1030]), seeds(),
    st.sampled_from([torch.int32, torch.int64]),
)  # fmt: skip
def test_rows_go_both_ways(
    place: Place, dtype: torch.dtype, slots: int, rows: int, width: int, seed: int, numbers_dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(seed)
    cached, table = numbers((slots, width), dtype, seed), numbers((rows, width), dtype, seed + 1)
    count = int(torch.randint(min(slots, rows // 2) + 1, (), generator=generator))
    chosen = torch.randperm(slots, generator=generator)[:count]
    leaving, coming = torch.randperm(rows, generator=generator)[: 2 * count].split([count, count])
    leaving, coming = (torch.where(torch.rand(count, generator=generator) < 0.3, -1, of) for of in (leaving, coming))
    expected, expected_table = cached.clone(), table.clone()
    for slot, old, new in zip(chosen.tolist(), leaving.tolist(), coming.tolist(), strict=True):
        if old >= 0:
            expected_table[old] = cached[slot]
        if new >= 0:
            expected[slot] = table[new]
    ours, table = cached.clone().to(place.device), on_host(table)
    given_numbers = (of.to(place.device, numbers_dtype) for of in (chosen, leaving, coming))
    exchange_rows(ours, table, *given_numbers, backend=place.backend)
    torch.testing.assert_close(ours.cpu(), expected, rtol=0, atol=0)
    torch.testing.assert_close(table, expected_table, rtol=0, atol=0)


def test_more_rows_than_a_program_takes(place: Place) -> None:
    # And, with as many programs as there are at most, more than one tile of each.
    count = 100_000 if place.name == "gpu" else 700
    cached, table = numbers((count, 1), torch.float32, 0), numbers((2 * count, 1), torch.float32, 1)
    ours, host, slots = cached.clone().to(place.device), on_host(table.clone()), torch.arange(count, device=place.device)
    exchange_rows(ours, host, slots, slots + count, slots, backend=place.backend)
    torch.testing.assert_close(ours.cpu(), table[:count], rtol=0, atol=0)
    torch.testing.assert_close(host[count:], cached, rtol=0, atol=0)


def test_rows_may_begin_at_any_line(place: Place) -> None:
    cached, table = numbers((2, 6), torch.float32, 0), numbers((7, 2), torch.float32, 1)
    ours, host = cached.clone().to(place.device), on_host(table.clone())
    slots, leaving, coming = (torch.tensor(of, device=place.device) for of in ([0, 1], [1, -1], [-1, 4]))
    exchange_rows(ours, host, slots, leaving, coming, backend=place.backend)
    torch.testing.assert_close(ours.cpu(), torch.stack([cached[0], table[4:].flatten()]), rtol=0, atol=0)
    torch.testing.assert_close(host, torch.cat([table[:1], cached[0].view(3, 2), table[4:]]), rtol=0, atol=0)


def test_what_was_read_before_is_seen_to_have_changed(place: Place) -> None:
    cached, table = torch.zeros(2, 4, device=place.device), on_host(torch.zeros(3, 4))
    versions = cached._version, table._version
    slots = torch.arange(1, device=place.device)
    exchange_rows(cached, table, slots, slots, slots + 1, backend=place.backend)
    assert cached._version > versions[0]
    assert table._version > versions[1]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"cached": torch.zeros(4, dtype=torch.float32)}, "cached: expected shape [rows, W], got [4]"),
        ({"table": torch.zeros(3, 4).half()}, "table: expected the dtype of cached, torch.float32, got torch.float16"),
        ({"table": torch.zeros(3, 5)}, "table: expected lines of a width that divides that of cached, 4, got 5 columns"),
        (
            {"table": torch.zeros(4, 3).T},
            "table: expected adjacent rows, got stride [1, 3]; pass a contiguous tensor",
        ),
        ({"coming": torch.zeros(2, dtype=torch.int64)}, "coming: expected one for each of the 1 slots, got 2"),
        ({"num_rows": torch.zeros(2, dtype=torch.int32)}, "num_rows: expected shape [1], got [2]"),
        ({"table": torch.zeros(3, 4, device="meta")}, "table: expected rows in the host's memory, got meta"),
    ],
)
def test_what_is_refused(changed: dict[str, Tensor], message: str) -> None:
    one = torch.zeros(1, dtype=torch.int64)
    given_tensors: dict[str, Any] = {"cached": torch.zeros(2, 4), "table": torch.zeros(3, 4)}
    given_tensors |= {"slots": one, "leaving": one, "coming": one + 1}
    with pytest.raises((ValueError, TypeError), match=f"^{re.escape(message)}$"):
        exchange_rows(**given_tensors | changed)


@given(
    st.integers(0, 40), st.integers(1, 5), st.integers(1, 3), seeds(), st.sampled_from([torch.int32, torch.int64]), st.booleans()
)
def test_rows_are_found_counted_and_claimed(
    place: Place, lookups: int, features: int, pools: int, seed: int, dtype: torch.dtype, changes: bool
) -> None:
    """Against a loop, with ids that no table has."""
    generator = torch.Generator().manual_seed(seed)
    # A table of 7 rows and 4 slots for each pool.
    of_pools = torch.randint(pools, (features,), generator=generator).tolist()
    of_features = torch.tensor([[7 * pool, 7, 4 * pool, pool] for pool in of_pools])
    slot_of_row = torch.full((7 * pools + 1,), -1, dtype=torch.int32)
    for pool in range(pools):
        slot_of_row[7 * pool + torch.randperm(7, generator=generator)[:3]] = torch.randperm(4, generator=generator)[:3].int()
    ids = torch.randint(-1, 8, (lookups,), generator=generator)
    ends = torch.randint(lookups + 1, (features,), generator=generator).sort().values
    ends[-1] = lookups
    rows, counts = [], [0] * 7 * pools
    used, missed, hits, by_pool = {}, set(), 0, [0] * pools
    for number, id in enumerate(ids.tolist()):
        feature = int((ends <= number).sum())
        first, count, first_slot, pool = of_features[feature].tolist()
        rows.append(first + id if 0 <= id < count else 7 * pools)
        if rows[-1] == 7 * pools:
            continue
        counts[rows[-1]] += 1
        if (slot := int(slot_of_row[rows[-1]])) >= 0:
            used[first_slot + slot], hits = True, hits + 1
        elif rows[-1] not in missed:
            missed.add(rows[-1])
            by_pool[pool] += 1
    maps = [slot_of_row, torch.zeros(7 * pools).int(), torch.zeros(4 * pools + 1).int(), torch.zeros(4 * pools + 1).bool()]
    maps = [of.to(place.device) for of in maps]
    given_ids = ids.to(place.device, dtype), ends.to(place.device, dtype), of_features.to(place.device)
    found, listed, totals = claim_rows(*given_ids, *maps, number=9, changes=changes, num_pools=pools, backend=place.backend)
    assert found.tolist() == rows
    assert totals.tolist() == [len(missed), hits, *by_pool, *[0] * pools]
    assert listed[: len(missed)].tolist() == sorted(missed)
    assert maps[0].tolist() == slot_of_row.tolist()
    assert maps[1].tolist() == counts
    assert maps[2].tolist() == [9 * used.get(slot, False) for slot in range(4 * pools + 1)]
    assert maps[3].tolist() == [changes and used.get(slot, False) for slot in range(4 * pools + 1)]


@pytest.mark.parametrize("which", ["all", "none", "some", "one"])
def test_missed_rows_are_in_order(place: Place, which: str) -> None:
    """Of several blocks, of which some have none; the last row's bit is the last one of its word or not."""
    rows = 3 * 8192 + 32 if which == "all" else 3 * 8192 + 5
    generator = torch.Generator().manual_seed(0)
    drawn = torch.cat(
        [torch.randperm(8192, generator=generator)[:700], 2 * 8192 + torch.randperm(8197, generator=generator)[:900]]
    )
    ids = {"all": torch.arange(rows).flip(0), "none": drawn, "some": drawn, "one": torch.full((600,), rows - 1)}[which]
    # A frequent row among the others.
    ids[5::3] = ids[4]
    slot_of_row = torch.full((rows + 1,), 0 if which == "none" else -1, dtype=torch.int32)
    maps = [slot_of_row, torch.zeros(rows).int(), torch.zeros(2).int(), torch.zeros(2).bool()]
    maps = [of.to(place.device) for of in maps]
    given_ids = (of.to(place.device) for of in (ids, torch.tensor([len(ids)]), torch.tensor([[0, rows, 0, 0]])))
    rows_of_ids, listed, totals = claim_rows(*given_ids, *maps, number=1, changes=False, backend=place.backend)
    assert rows_of_ids.tolist() == ids.tolist()
    assert maps[1].tolist() == ids.bincount(minlength=rows).tolist()
    expected = [] if which == "none" else ids.unique().tolist()
    assert totals.tolist() == [len(expected), len(ids) if which == "none" else 0, len(expected), 0]
    assert listed[: len(expected)].tolist() == expected


def seated_by_loop(
    ring: list[int], cursor: int, used: list[int], coming: list[int], maps: dict[str, list[Any]], changes: bool
) -> tuple[list[int], list[int]]:
    """The first free slots, if there are enough, and the rows that leave them, -1 for none; `maps` are changed."""
    slots = [slot for slot in ring[cursor:] + ring[:cursor] if used[slot] < 4]
    slots, leaving = slots[: len(coming)] if len(slots) >= len(coming) else [], []
    for slot, new in zip(slots, coming, strict=False):
        old = maps["row_of_slot"][slot]
        leaving.append(old if old >= 0 and maps["is_dirty"][slot] else -1)
        if old >= 0:
            maps["slot_of_row"][old] = -1
        maps["slot_of_row"][new], maps["row_of_slot"][slot] = slot, new
        maps["is_dirty"][slot], used[slot] = changes, 5
    return slots, leaving


@given(st.integers(1, 12), st.integers(0, 12), st.integers(0, 3), seeds(), st.booleans())
def test_rows_get_the_first_free_slots(place: Place, slots: int, wanted: int, of_others: int, seed: int, changes: bool) -> None:
    """Against a loop. Two tables of rows of 6 in lines of 2: the first begins at element 16, the other at 64. Of three pools the
    second one's."""
    generator = torch.Generator().manual_seed(seed)
    tables, rows = torch.tensor([[0, 8], [16, 64], [20, 3]]), 17
    row_of_slot = torch.where(torch.rand(slots, generator=generator) < 0.3, -1, torch.randperm(rows, generator=generator)[:slots])
    slot_of_row = torch.full((rows + 1,), -1)
    for slot, row in enumerate(row_of_slot.tolist()):
        slot_of_row[row if row >= 0 else rows] = slot if row >= 0 else -1
    is_dirty = torch.rand(slots, generator=generator) < 0.6
    used = torch.randint(2, 6, (slots,), generator=generator)
    ring = torch.randperm(slots, generator=generator)[: int(torch.randint(1, slots + 1, (), generator=generator))]
    cursor = int(torch.randint(len(ring), (), generator=generator))
    coming = [row for row in range(rows) if slot_of_row[row] < 0][:wanted]
    found = {"slot_of_row": slot_of_row, "row_of_slot": row_of_slot, "is_dirty": is_dirty, "used": used}
    expected = {name: of.tolist() for name, of in found.items()}
    of_slots, leaving = seated_by_loop(ring.tolist(), cursor, expected["used"], coming, expected, changes)

    def begins(row: int) -> tuple[int, int]:
        table = int(row >= 8)
        first, start, first_row = tables[:, table].tolist()
        return ((start + 6 * (row - first)) // 2, first_row + row - first) if row >= 0 else (-1, -1)

    maps = [of.to(place.device, torch.bool if name == "is_dirty" else torch.int32) for name, of in found.items()]
    slot_map, row_map, dirty_map, used_map = (of.clone() for of in maps)
    counts = [of_others, len(coming), 1]
    listed = torch.tensor([*[3] * of_others, *coming, 4], dtype=torch.int32)
    totals = torch.tensor([sum(counts), 7, *counts, 0, 0, 0], dtype=torch.int32, device=place.device)
    written = torch.tensor(2, device=place.device)
    seated = seat_rows(
        ring.to(place.device), listed.to(place.device), totals, tables.to(place.device), slot_map, row_map, used_map, dirty_map,
        written, pool=1, cursor=cursor, oldest=4, number=5, changes=changes, width=6, line=2, backend=place.backend,
    )  # fmt: skip
    count = int(seated.num_rows)
    assert totals.tolist() == [sum(counts), 7, *counts, 0, len(of_slots), 0]
    assert count == len(of_slots)
    assert seated.slots[:count].tolist() == of_slots
    left = zip(seated.leaving_lines[:count].tolist(), seated.leaving_rows[:count].tolist(), strict=True)
    came = zip(seated.coming_lines[:count].tolist(), seated.coming_rows[:count].tolist(), strict=True)
    assert list(left) == list(map(begins, leaving))
    assert list(came) == list(map(begins, coming[:count]))
    assert [slot_map.tolist(), row_map.tolist(), dirty_map.tolist(), used_map.tolist()] == list(expected.values())
    assert written == 2 + sum(row >= 0 for row in leaving)


@pytest.mark.parametrize("needed", [0, 1, 1_000, 1_200, 1_201])
def test_seats_of_many_programs(place: Place, needed: int) -> None:
    """As many as there are, and one more than that, for which nothing changes; of rows that leave none is written back."""
    slots = 2_400
    used, ring = torch.arange(slots, device=place.device).int() % 2, torch.arange(slots, device=place.device)
    coming = torch.arange(slots, 2 * slots, device=place.device).int()
    slot_of_row = torch.cat([ring, torch.full((slots + 1,), -1, device=place.device)]).int()
    maps = slot_of_row, ring.int(), used, torch.zeros(slots, device=place.device).bool()
    before, written = [of.clone() for of in maps], torch.tensor(0, device=place.device)
    totals = torch.tensor([needed, 0, needed, 0], dtype=torch.int32, device=place.device)
    tables = torch.zeros(3, 1, dtype=torch.int64, device=place.device)
    options: dict[str, Any] = {"pool": 0, "cursor": 601, "oldest": 1, "number": 9, "changes": True, "width": 1, "line": 1}
    seated = seat_rows(ring, coming, totals, tables, *maps, written, **options, backend=place.backend)
    count = needed if needed <= 1_200 else 0
    # Every second slot is free.
    expected = (602 + 2 * torch.arange(count)) % slots
    assert seated.num_rows.tolist() == [count]
    assert seated.slots[:count].tolist() == expected.tolist()
    assert seated.coming_rows[:count].tolist() == coming[:count].tolist()
    assert slot_of_row[coming[:count].long()].tolist() == expected.tolist()
    assert (slot_of_row[ring] < 0).sum() == (used == 9).sum() == maps[3].sum() == count
    assert written == 0
    if not count:
        assert all(torch.equal(of, old) for of, old in zip(maps, before, strict=True))


def test_as_many_rows_go_as_a_count_says(place: Place) -> None:
    """What stands behind them is not looked at."""
    for count in range(4):
        cached, table = numbers((4, 2), torch.float32, 0), numbers((8, 2), torch.float32, 1)
        ours, host = cached.clone().to(place.device), on_host(table.clone())
        slots = torch.tensor([2, 0, 3, 10**9], device=place.device)
        number = torch.tensor([0, count], dtype=torch.int32, device=place.device)[1:]
        exchange_rows(ours, host, slots, slots + 4, slots, num_rows=number, backend=place.backend)
        expected, expected_table = cached.clone(), table.clone()
        for slot in [2, 0, 3][:count]:
            expected[slot], expected_table[slot + 4] = table[slot], cached[slot]
        torch.testing.assert_close(ours.cpu(), expected, rtol=0, atol=0)
        torch.testing.assert_close(host, expected_table, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"of_features": torch.zeros(2, 4).long()}, "of_features: expected 4 numbers for each of the 1 features, got [2, 4]"),
        ({"counts": torch.zeros(3)}, "counts: expected dtype int32, got float32; convert it with .to(...)"),
        (
            {"counts": torch.zeros(4).int()},
            "counts: expected one for each row of slot_of_row but the last, and used and is_dirty of one length, got 4 of 4, and "
            "2 and 2",
        ),
    ],
)
def test_claims_that_are_refused(changed: dict[str, Tensor], message: str) -> None:
    one = torch.ones(1, dtype=torch.int64)
    given_tensors = {"indices": one, "ends": one, "of_features": torch.tensor([[0, 3, 0, 0]])}
    given_tensors |= {"slot_of_row": torch.zeros(4).int(), "counts": torch.zeros(3).int()}
    given_tensors |= {"used": torch.zeros(2).int(), "is_dirty": torch.zeros(2).bool()}
    with pytest.raises((ValueError, TypeError), match=f"^{re.escape(message)}$"):
        claim_rows(**given_tensors | changed, number=1, changes=True)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"line": 3}, "line: expected a number that divides the width, 4, got 3"),
        ({"tables": torch.zeros(2, 1).long()}, "tables: expected shape [3, T], contiguous, got [2, 1]"),
        ({"pool": 1}, "totals: expected two numbers, and two for each pool, up to 1, got 4"),
        ({"cursor": 1}, "cursor: expected a place in a ring of 1 slots, got 1"),
    ],
)
def test_seats_that_are_refused(changed: dict[str, Any], message: str) -> None:
    one = torch.zeros(1, dtype=torch.int64)
    given_tensors = {"ring": one, "coming": one.int(), "totals": torch.zeros(4).int(), "tables": torch.zeros(3, 1).long()}
    given_tensors |= {"slot_of_row": one.int(), "row_of_slot": one.int(), "used": one.int(), "is_dirty": one.bool()}
    options = {"written": one[0], "pool": 0, "cursor": 0, "oldest": 1, "number": 1, "changes": True, "width": 4, "line": 4}
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        seat_rows(**given_tensors | options | changed)


@pytest.mark.gpu
def test_pageable_memory_is_refused_beside_a_gpu() -> None:
    one = torch.zeros(1, dtype=torch.int64, device="cuda")
    message = "table: expected pinned memory, which a GPU reads, got pageable; pass table.pin_memory()"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        exchange_rows(torch.zeros(2, 4, device="cuda"), torch.zeros(3, 4), one, one, one + 1)
