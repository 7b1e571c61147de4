"""Plans: what is in the file, how it meets a layout, and that kernels that follow one give the same sums."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from jagged.ops import BagLayout, BagOptimizer, BagPlan, BagSchedule, BagSchedules, embedding_bags
from jagged.ops.embedding_bag.layout import MOST_COUNTED
from jagged.ops.embedding_bag.optimizers import Kind
from jagged.ops.embedding_bag.plans import BY_MAP, KINDS, MOST_STEPS, PROGRAMS, code_of
from jagged.ops.embedding_bag.triton.schedules import turns_of
from tests.graphs import captured
from tests.ops.test_embedding_bag import ON_CPU, ON_GPU, ON_TRITON, Batch, Recorder, batch_of, weights_of, written_out
from tests.oracle import check_three_way
from tests.places import PLACE, Place
from tests.strategies import random_tensor

LAYOUT = BagLayout((50, 7, 300, 1), (16, 5, 64, 1), (0, 1, 2, 1, 3, 2), (False, True, False, False, True, True))
# Of every length: one, mostly none, some, one bag longer than all the rest, none, and some again.
BAGS = 5 if PLACE.name == "interpret" else 70
LONG = 40 if PLACE.name == "interpret" else 700
LENGTHS = [
    [1] * BAGS,
    [int(bag % 4 == 0) for bag in range(BAGS)],
    [3 * bag % 13 for bag in range(BAGS)],
    [0] * (BAGS - 1) + [LONG],
    [0] * BAGS,
    [5 * bag % 17 for bag in range(BAGS)],
]

SMALL = BagLayout((9, 5, 3), (4, 3, 6), (0, 1, 0, 2), (False, True, False, False))


def schedules_of(*codes: int, programs: int = PROGRAMS) -> BagSchedules:
    return BagSchedules(torch.tensor(codes, dtype=torch.int32, device=PLACE.device), programs)


def check(place: Place, schedules: BagSchedules, dtype: torch.dtype, has_sizes: bool) -> None:
    batch = batch_of(LAYOUT, LENGTHS, has_sizes=has_sizes)

    def ours(weights: Tensor) -> Tensor:
        return embedding_bags(weights, *batch.arguments, schedules=schedules, backend=place.backend, **batch.options)

    check_three_way(ours, lambda weights: written_out(batch, weights), [weights_of(LAYOUT, dtype)], requires_grad=[False])


# Units of fewer bags than there are, of about as many, and of more.
@pytest.mark.parametrize("steps", [1, MOST_STEPS])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_for_bags_of_every_length(place: Place, kind: str, steps: int) -> None:
    check(place, schedules_of(*[code_of(kind, steps)] * 6), torch.float32, False)


@given(
    st.lists(st.one_of(st.just(BY_MAP), st.builds(code_of, st.sampled_from(KINDS), st.integers(1, MOST_STEPS))),
             min_size=6, max_size=6),
    st.sampled_from([1, 3, 64]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.booleans(),
)  # fmt: skip
def test_schedules_side_by_side(place: Place, codes: list[int], programs: int, dtype: torch.dtype, has_sizes: bool) -> None:
    check(place, schedules_of(*codes, programs=programs), dtype, has_sizes)


def test_any_number_is_a_schedule(place: Place) -> None:
    """What no plan says leads nowhere else either."""
    check(place, schedules_of(0, 2**31 - 1, -(2**31), 3, 1000, -2), torch.float32, False)


# All features at once, and two turns of four and two.
@ON_TRITON
@pytest.mark.parametrize("block", [8, 4])
def test_the_map_takes_what_a_plan_says(place: Place, block: int) -> None:
    from jagged.ops.embedding_bag.triton.schedules import (
        SCHEDULE_BITS,
        SCHEDULE_MASK,
        embedding_bags_map_kernel,
        groups_by,
        known_of,
        lanes_by,
    )

    batch = batch_of(LAYOUT, LENGTHS)
    fields = LAYOUT.tensor(place.device)
    num_parts = known_of(LAYOUT.fields).num_parts

    def mapped(plan: Tensor | None) -> tuple[list[int], list[int]]:
        ends = torch.empty(6, dtype=torch.int64, device=place.device)
        order, found = torch.empty(2, 6, dtype=torch.int32, device=place.device)
        counter = torch.ones(1, dtype=torch.int64, device=place.device)
        slices = torch.empty(6, 3, dtype=torch.int64, device=place.device)
        embedding_bags_map_kernel[(1,)](
            fields, None, batch.offsets, order, ends, found, slices, counter, counter, len(fields) - num_parts - 6, 6,
            BAGS, 7, 20, 0, 0, BLOCK=block, plan=plan,
        )  # fmt: skip
        assert counter.tolist() == [7]
        # Features of one schedule follow one another.
        assert sorted(order.tolist()) == list(range(6))
        for some in (found[order] & SCHEDULE_MASK.value).split(block):
            in_order = [(schedule // 8, schedule % 2, schedule // 2 % 4) for schedule in some.tolist()]
            assert in_order == sorted(in_order, reverse=True)
        units = torch.empty_like(ends)
        units[order.long()] = ends.diff(prepend=ends.new_zeros(1))
        return found.tolist(), units.tolist()

    chosen, units = mapped(None)
    assert [KINDS[code % 256 // 2 % 4] for code in chosen][:3] == ["one", "one", "few"]
    codes = [code_of("many", 3), BY_MAP, code_of("one", 1), code_of("few", 64), code_of("some", 2), BY_MAP]
    planned, of_plan = mapped(schedules_of(*codes).codes)
    for feature, code in enumerate(codes):
        if code == BY_MAP:
            assert (planned[feature], of_plan[feature]) == (chosen[feature], units[feature])
            continue
        schedule = planned[feature] & SCHEDULE_MASK.value
        at_once = groups_by(schedule) // lanes_by(schedule)
        assert schedule // 2 % 4 == code % 4
        assert planned[feature] >> SCHEDULE_BITS.value == at_once * (code // 4)
        # Of all widths here one part.
        assert of_plan[feature] == -(-BAGS // (at_once * (code // 4)))


@triton.jit
def turns_kernel(result, NUM_SCHEDULES: tl.constexpr):
    for i in tl.static_range(NUM_SCHEDULES):
        schedule = tl.full((1,), i, tl.int32)
        at_once, turn = turns_of(schedule // 8, schedule // 2 % 4, schedule % 2)
        tl.store(result + i * 2 + tl.arange(0, 1), at_once)
        tl.store(result + i * 2 + 1 + tl.arange(0, 1), turn)


@ON_TRITON
def test_the_map_knows_what_schedules_take_at_once(place: Place) -> None:
    from jagged.ops.embedding_bag.triton.schedules import NUM_SCHEDULES, groups_by, lanes_by, turn_by

    found = torch.empty(NUM_SCHEDULES.value, 2, dtype=torch.int32, device=place.device)
    turns_kernel[(1,)](found, NUM_SCHEDULES)
    assert found.tolist() == [[groups_by(i) // lanes_by(i), turn_by(i)] for i in range(NUM_SCHEDULES.value)]


@ON_TRITON
def test_small_batches_do_without_the_map_where_a_plan_says_nothing_of_forward(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jagged.ops.embedding_bag.triton import launch

    asked: list[int] = []

    def noted(num_bags: int, num_lookups: int, num_samples: int) -> bool:
        asked.append(num_bags)
        return False

    monkeypatch.setattr(launch, "is_small", noted)
    batch = batch_of(SMALL, [[2, 0], [1, 1], [0, 2], [3, 1]])
    for schedules in (schedules_of(*[BY_MAP] * 4), BagSchedules(None, counted_rows=5), None):
        embedding_bags(weights_of(SMALL, torch.float32), *batch.arguments, schedules=schedules, backend=place.backend)
    assert asked == [8, 8]


def test_gradients_do_not_depend_on_a_plan(place: Place) -> None:
    batch = batch_of(LAYOUT, LENGTHS)
    grads = []
    for schedules in (None, schedules_of(*[code_of("many", 2)] * 6)):
        weights = weights_of(LAYOUT, torch.float32).requires_grad_()
        output = embedding_bags(weights, *batch.arguments, schedules=schedules, backend=place.backend)
        grads += torch.autograd.grad(output, weights, torch.ones_like(output))
    assert torch.equal(*grads)


def changed(place: Place, batch: Batch, kind: Kind | None, schedules: BagSchedules | None) -> Tensor:
    """What a backward pass makes: weights that were updated, or without an optimizer their gradient."""
    weights = weights_of(batch.layout, torch.float32).requires_grad_()
    optimizer = None if kind is None else BagOptimizer(kind, batch.layout, learning_rate=0.1, device=place.device)
    output = embedding_bags(weights, *batch.arguments, optimizer=optimizer, schedules=schedules, backend=place.backend)
    output.backward(random_tensor(output.shape, torch.float32, 3))
    return weights.detach() if weights.grad is None else weights.grad


# What is counted where nothing says it, nothing, some tables, and all.
@pytest.mark.parametrize("counted_rows", [None, 0, 5, MOST_COUNTED])
@pytest.mark.parametrize("kind", [None, "adam"])
def test_gradients_and_updates_are_equal_whatever_is_counted(
    place: Place, kind: Kind | None, counted_rows: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, batch = SMALL, batch_of(SMALL, [[3, 0, 2], [1, 4, 0], [0, 2, 5], [6, 1, 1]])
    ways = _ways_taken(monkeypatch) if place.backend == "triton" else []
    taken = {None: {"sort"}, 0: {"sort"}, 5: {"count", "sort"}, MOST_COUNTED: {"count"}}[counted_rows]
    schedules = BagSchedules(None, PROGRAMS, counted_rows)

    def ours(weights: Tensor) -> Tensor:
        return embedding_bags(weights, *batch.arguments, schedules=schedules, backend=place.backend)

    if kind is None:
        check_three_way(ours, lambda weights: written_out(batch, weights), [weights_of(layout, torch.float32)])
    found = changed(place, batch, kind, schedules)
    assert set(ways) == (taken if place.backend == "triton" else set())
    torch.testing.assert_close(found, changed(place, batch, kind, None))


# Of one lane, of the most rows side by side, of lanes with columns that are not there, of several units, of all lanes and more.
# Widths that are no multiples of 4 have fewer columns a lane; of a table that no feature reads a width changes nothing.
@pytest.mark.parametrize("kind", [None, "rowwise_adagrad"])
@pytest.mark.parametrize("widths", [(4, 8, 12), (16, 100, 128), (256, 260), (3, 5, 130), (8, 16, 5)])
def test_counted_rows_of_every_width(place: Place, widths: tuple[int, ...], kind: Kind | None) -> None:
    read = (0, 1) if widths[-1] == 5 else tuple(range(len(widths)))
    layout = BagLayout((150, 37, 3)[: len(widths)], widths, read)
    batch = batch_of(layout, [[3, 0, 2, 9, 30], [1, 4, 0, 0, 7], [0, 2, 5, 1, 1]][: len(read)])
    counted, sorted_ = (changed(place, batch, kind, BagSchedules(None, PROGRAMS, rows)) for rows in (MOST_COUNTED, 0))
    torch.testing.assert_close(counted, sorted_)


# Nothing counted, the first table alone, and all.
@pytest.mark.parametrize("counted_rows", [0, 30, MOST_COUNTED])
def test_tables_that_no_feature_reads_get_no_gradient(place: Place, unchecked: None, counted_rows: int) -> None:
    """Neither of ids that their tables do not have, which stand behind all tables' rows, nor of lookups that are not sorted."""
    layout = BagLayout((20, 50, 6), (4, 8, 4), (0, 1))
    ids, ends = [1, 2, 3, 4, 49, 7], [0, 2, 3, 4, 6]
    if place.backend == "triton":
        ids, ends = [1, 2, 99, 3, 4, 49, -1, 7, 7], [0, 2, 4, 5, 9]
    weights = weights_of(layout, torch.float32).requires_grad_()
    indices, offsets = (torch.tensor(of, device=place.device) for of in (ids, ends))
    schedules = BagSchedules(None, PROGRAMS, counted_rows)
    embedding_bags(weights, layout, indices, offsets, schedules=schedules, backend=place.backend).sum().backward()
    assert weights.grad is not None
    first, second, unread = layout.views(weights.grad)
    assert first.sum(1).cpu().tolist() == [4.0 * (row in (1, 2, 3)) for row in range(20)]
    expected = {4: 1, 49: 1, 7: ids.count(7)}
    assert second.sum(1).cpu().tolist() == [8.0 * expected.get(row, 0) for row in range(50)]
    assert not unread.any()


def _ways_taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How rows are brought together from now on, pass after pass."""
    from jagged.ops.embedding_bag.triton.sums import _Sums

    taken: list[str] = []
    for name in ("count", "sort"):
        own = getattr(_Sums, f"_{name}")

        def noted(sums: _Sums, *arguments: Any, name: str = name, own: Callable[..., None] = own) -> None:
            taken.append(name)
            own(sums, *arguments)

        monkeypatch.setattr(_Sums, f"_{name}", noted)
    return taken


@pytest.mark.parametrize("counted_rows", [None, 5])
def test_opcheck(place: Place, counted_rows: int | None) -> None:
    batch = batch_of(SMALL, [[2, 0], [1, 1], [0, 2], [3, 1]])
    schedules = BagSchedules(schedules_of(*[6] * 4).codes, PROGRAMS, counted_rows)
    calls: list[tuple[Any, tuple[Any, ...]]] = []
    with Recorder(calls):
        for optimizer in (None, BagOptimizer("sgd", SMALL, learning_rate=0.1, device=place.device)):
            weights = weights_of(SMALL, torch.float32).requires_grad_()
            embedding_bags(
                weights, *batch.arguments, optimizer=optimizer, schedules=schedules, backend=place.backend
            ).sum().backward()
    backward = [(operator, arguments) for operator, arguments in calls if operator._schema.name != "jagged::embedding_bags"]
    names = [[argument.name for argument in operator._schema.arguments] for operator, _ in backward]
    found = [arguments[of.index("counted_rows")] for of, (_, arguments) in zip(names, backward, strict=True)]
    assert found == [counted_rows] * 2
    for operator, arguments in calls:
        plain = tuple(x.detach().clone() if isinstance(x, Tensor) else x for x in arguments)
        torch.library.opcheck(operator, plain)


@pytest.mark.skipif(PLACE.name == "interpret", reason="interpreted kernels are not compiled")
def test_one_graph(place: Place) -> None:
    backend = "inductor" if place.name == "gpu" else "aot_eager"
    schedules = BagSchedules(schedules_of(*[6] * 6).codes, PROGRAMS, 20)

    def function(weights: Tensor, ids: Tensor, offsets: Tensor, schedules: BagSchedules | None) -> Tensor:
        return embedding_bags(weights, LAYOUT, ids, offsets, schedules=schedules, backend=place.backend).square()

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=backend)
    for seed in (1, 2):
        batch = batch_of(LAYOUT, LENGTHS, seed)
        weights = weights_of(LAYOUT, torch.float32).requires_grad_()
        got, expected = (each(weights, batch.indices, batch.offsets, schedules) for each in (compiled, function))
        torch.testing.assert_close(got, expected)
        torch.testing.assert_close(*(torch.autograd.grad(of, weights, torch.ones_like(of))[0] for of in (got, expected)))


@ON_GPU
def test_no_synchronisation_and_a_plan_that_changes_between_replays(place: Place) -> None:
    batch, weights, schedules = batch_of(LAYOUT, LENGTHS), weights_of(LAYOUT, torch.float32), schedules_of(*[6] * 6)

    def step() -> Tensor:
        return embedding_bags(weights, *batch.arguments, schedules=schedules)

    expected = step()
    graph, results = captured(step)
    for code in (6, code_of("many", 64), BY_MAP, code_of("one", 1)):
        schedules.codes.fill_(code)
        results.fill_(torch.nan)
        graph.replay()
        # Another schedule sums in another order.
        torch.testing.assert_close(results, expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(results, step())


WRONG_SCHEDULES: list[tuple[Any, type[Exception], str]] = [
    (BagSchedules(torch.zeros(6)), TypeError, "schedules: expected dtype int32"),
    (BagSchedules(torch.zeros(5, dtype=torch.int32)), ValueError, "schedules: expected 6 on cpu, got 5"),
    (BagSchedules(torch.zeros(6, 1, dtype=torch.int32)), ValueError, "schedules: expected shape"),
    (BagSchedules(torch.zeros(6, dtype=torch.int32, device="meta")), ValueError, "schedules: expected 6 on cpu, got 6 on meta"),
    (BagSchedules(torch.zeros(6, dtype=torch.int32), 65), ValueError, "schedules: expected 1 to 64 programs, got 65"),
    (
        BagSchedules(torch.zeros(6, dtype=torch.int32), counted_rows=65_537),
        ValueError,
        "schedules: expected counted_rows from 0 to 65,536, got 65537",
    ),
]


@ON_CPU
@pytest.mark.parametrize(("schedules", "error", "message"), WRONG_SCHEDULES)
def test_schedules_that_are_refused(place: Place, schedules: BagSchedules, error: type[Exception], message: str) -> None:
    batch = batch_of(LAYOUT, LENGTHS)
    with pytest.raises(error, match=message):
        embedding_bags(weights_of(LAYOUT, torch.float32), *batch.arguments, schedules=schedules)


PLAN = BagPlan("NVIDIA H200", {"a": BagSchedule(10, 4, "some", 8), 'b "b"\n': BagSchedule(5, 3, "one", 64)}, programs=24)


def test_round_trip(tmp_path: Path) -> None:
    for plan in (PLAN, BagPlan("none", {})):
        plan.save(tmp_path / "plan.json")
        assert BagPlan.load(str(tmp_path / "plan.json")) == plan
    assert BagPlan("none", {}).programs == PROGRAMS
    PLAN.save(tmp_path / "plan.json")
    lines = (tmp_path / "plan.json").read_text().splitlines()
    assert '  "gpu": "NVIDIA H200",' in lines
    assert '    "a": {"rows": 10, "width": 4, "kind": "some", "steps": 8},' in lines


@pytest.mark.parametrize("counted_rows", [None, 0, 4096, MOST_COUNTED])
def test_what_is_counted_goes_into_the_file_and_to_the_operator(tmp_path: Path, counted_rows: int | None) -> None:
    plan, path = replace(PLAN, counted_rows=counted_rows), tmp_path / "plan.json"
    plan.save(path)
    assert BagPlan.load(path) == plan
    found = json.loads(path.read_text())
    # A plan without it is as plans were before.
    assert found.get("counted_rows", "none") == ("none" if counted_rows is None else counted_rows)
    path.write_text(json.dumps({**found, "counted_rows": counted_rows}))
    assert BagPlan.load(path) == plan
    with pytest.warns(UserWarning, match="expected the tables' shapes"):
        left = plan.fitting({"a": (11, 4)}, mismatch="warn")
    assert left is not None
    assert (set(left.features), left.programs, left.counted_rows) == ({'b "b"\n'}, 24, counted_rows)
    schedules = plan.schedules(BagLayout((10,), (4,)), "cpu", names=("a",))
    assert schedules is not None
    assert (schedules.programs, schedules.counted_rows) == (24, counted_rows)
    # One that says nothing of forward takes no way from it, whatever its number of programs.
    for programs in (PROGRAMS, 24):
        alone = BagPlan("any", {}, programs, counted_rows)
        assert alone.fitting({"a": (10, 4)}) is (None if counted_rows is None else alone)
        schedules = alone.schedules(BagLayout((10,), (4,)), "cpu")
        assert schedules == (None if counted_rows is None else BagSchedules(None, PROGRAMS, counted_rows))
    # A plan of other features alone is one of a part of the tables, whose launches have its number of programs.
    others = PLAN.schedules(BagLayout((10,), (4,)), "cpu")
    assert others is not None
    assert others.codes is not None
    assert (others.codes.tolist(), others.programs) == ([BY_MAP], 24)


def _without(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda plan: plan.pop(name)


CHANGES: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda plan: plan.update(format="another"), "expected a plan, which `jagged tune-bags` writes"),
    (lambda plan: plan.update(version=2), "expected a plan of version 1, got 2; tune again"),
    (_without("version"), "expected a plan of version 1, got None"),
    (_without("gpu"), "expected 'gpu' in a plan"),
    (lambda plan: plan.update(gpu=3), "gpu: expected a name, got 3"),
    (lambda plan: plan.update(programs=0), "programs: expected a number from 1 to 64, got 0"),
    (lambda plan: plan.update(programs=True), "programs: expected a number from 1 to 64, got True"),
    (lambda plan: plan.update(counted_rows=-1), "counted_rows: expected a number from 0 to 65,536 or none, got -1"),
    (lambda plan: plan.update(counted_rows=65_537), "counted_rows: expected a number from 0 to 65,536 or none, got 65537"),
    (lambda plan: plan.update(counted_rows=True), "counted_rows: expected a number from 0 to 65,536 or none, got True"),
    (lambda plan: plan.update(counted_rows="all"), "counted_rows: expected a number from 0 to 65,536 or none, got 'all'"),
    (lambda plan: plan.update(features=[]), "features: expected schedules by name, got list"),
    (lambda plan: plan["features"].update(a=3), "features: expected rows, width, kind, steps for 'a', got int"),
    (
        lambda plan: plan["features"]["a"].pop("steps"),
        "features: expected rows, width, kind, steps for 'a', got rows, width, kind",
    ),
    (lambda plan: plan["features"]["a"].update(kind="all"), "expected a kind of one, few, some, many for 'a', got 'all'"),
    (lambda plan: plan["features"]["a"].update(kind=[]), "expected a kind of one, few, some, many for 'a'"),
    (lambda plan: plan["features"]["a"].update(steps=65), "steps of 'a': expected a number from 1 to 64, got 65"),
    (lambda plan: plan["features"]["a"].update(rows=0), "rows of 'a': expected a number from 1, got 0"),
    (lambda plan: plan["features"]["a"].update(width=1.5), "width of 'a': expected a number from 1, got 1.5"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_plans_that_are_refused(tmp_path: Path, change: Callable[[dict[str, Any]], Any], message: str) -> None:
    path = tmp_path / "plan.json"
    PLAN.save(path)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message) as refused:
        BagPlan.load(path)
    assert str(refused.value).startswith(f"{path}: ")


@pytest.mark.parametrize("text", ["", "[1]", "rows: 3", "[" * 100_000, "\0", "3"])
def test_files_that_are_no_plans(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="expected a plan"):
        BagPlan.load(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="expected a plan"):
        BagPlan.load(path)
    with pytest.raises(FileNotFoundError):
        BagPlan.load(tmp_path / "none.json")


def test_pipes_devices_and_large_files_are_refused_unread(tmp_path: Path) -> None:
    pipe, large = tmp_path / "pipe", tmp_path / "large"
    os.mkfifo(pipe)
    with large.open("wb") as file:
        file.truncate(2**26 + 1)
    for path, found in ((Path("/dev/null"), "a pipe or a device"), (pipe, "a pipe or a device"), (large, "67108865 bytes")):
        with pytest.raises(ValueError) as refused:  # noqa: PT011 the message is compared
            BagPlan.load(path)
        assert str(refused.value) == f"{path}: expected a plan, a file of at most 67108864 bytes, got {found}"
    with pytest.raises(IsADirectoryError):
        BagPlan.load(tmp_path)


def test_a_plan_is_replaced_whole_and_on_disk_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, replaces, synced = tmp_path / "plan.json", Path.replace, []

    def replaced(aside: Path, target: Path) -> Path:
        # Another process writes at the same time.
        monkeypatch.setattr(Path, "replace", replaces)
        BagPlan("another", {}).save(path)
        return aside.replace(target)

    monkeypatch.setattr(Path, "replace", replaced)
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    PLAN.save(path)
    assert BagPlan.load(path) == PLAN
    # The file's of each, then the directory.
    assert [Path(of).parent == tmp_path for of in synced] == [True, True, False, False]
    assert synced[2:] == [str(tmp_path)] * 2

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device"):
        BagPlan("none", {}).save(path)
    assert BagPlan.load(path) == PLAN
    assert list(tmp_path.iterdir()) == [path]


def test_features_are_found_by_name() -> None:
    layout = BagLayout((10, 5), (4, 3), (0, 1, 0))
    plan = BagPlan(
        "any", {"a": BagSchedule(10, 4, "some", 8), "2": BagSchedule(10, 4, "one", 1), "z": BagSchedule(1, 1, "one", 1)}
    )
    found = plan.schedules(layout, "cpu", names=("a", "b", "c"))
    assert found is not None
    assert (found.codes.tolist(), found.codes.dtype, found.programs) == ([code_of("some", 8), -1, -1], torch.int32, PROGRAMS)
    by_place = plan.schedules(layout, torch.device("cpu"))
    assert by_place is not None
    assert by_place.codes.tolist() == [-1, -1, code_of("one", 1)]
    with pytest.raises(ValueError, match="names: expected one for each of the 3 features, got 1"):
        plan.schedules(layout, "cpu", names=("a",))


def test_other_shapes() -> None:
    shapes = {"a": (10, 4), "b": (5, 3), "new": (2, 2)}
    plan = BagPlan(
        "any", {"a": BagSchedule(10, 8, "some", 8), "b": BagSchedule(5, 3, "few", 2), "gone": BagSchedule(1, 1, "one", 1)}
    )
    message = "plan: expected the tables' shapes, got 'a' of 10 rows and width 8 for a table of 10 rows and width 4"
    with pytest.raises(ValueError, match=message):
        plan.fitting(shapes)
    with pytest.warns(UserWarning, match=message) as warned:
        left = plan.fitting(shapes, mismatch="warn")
    assert len(warned) == 1
    assert left is not None
    assert set(left.features) == {"b", "gone"}
    assert left.fitting(shapes) is left
    # Without what does not fit nothing is left.
    with pytest.warns(UserWarning, match=message):
        assert BagPlan("any", {"a": plan.features["a"]}, 24).fitting(shapes, mismatch="warn") is None
    with pytest.raises(ValueError, match="mismatch: expected 'refuse' or 'warn', got 'ignore'"):
        plan.fitting(shapes, mismatch="ignore")  # type: ignore[arg-type]
    many = BagPlan("any", {str(i): BagSchedule(1, 1, "one", 1) for i in range(9)})
    with pytest.raises(ValueError, match="'2' of 1 rows and width 1 for a table of 2 rows and width 1 and 6 more; tune again"):
        many.fitting({str(i): (2, 1) for i in range(9)})


def test_another_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="plan: expected one for NVIDIA A100, got one for NVIDIA H200; tune again"):
        PLAN.fitting({}, "NVIDIA A100")
    with pytest.warns(UserWarning, match="expected one for NVIDIA A100") as warned:
        assert PLAN.fitting({}, "NVIDIA A100", "warn") is None
    assert len(warned) == 1
    assert PLAN.fitting({}, "NVIDIA H200") is PLAN
    # A plan without features is none, on every GPU; what it counts was measured on its own.
    assert BagPlan("NVIDIA H200", {}, 24).fitting({}, "NVIDIA A100") is None
    with pytest.raises(ValueError, match="plan: expected one for NVIDIA A100, got one for NVIDIA H200; tune again"):
        BagPlan("NVIDIA H200", {}, counted_rows=6).fitting({}, "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    with pytest.warns(UserWarning, match="expected one for GPU 3"):
        assert PLAN.schedules(BagLayout((10,), (4,)), "cuda:3", names=("a",), mismatch="warn") is None


@pytest.mark.skipif(PLACE.name == "cpu", reason="says something of the Triton kernels alone")
def test_layouts_go_when_nothing_holds_them(place: Place) -> None:
    import gc
    import weakref

    from jagged.ops.embedding_bag.triton.schedules import known_of

    layouts = [BagLayout((size,), (4,)) for size in range(1, 6)]
    assert [known_of(layout.fields).num_rows for layout in layouts] == [1, 2, 3, 4, 5]
    assert known_of(layouts[0].fields) is known_of(layouts[0].fields)
    held = [weakref.ref(layout.fields) for layout in layouts]
    del layouts
    gc.collect()
    assert [tensor() for tensor in held] == [None] * 5
