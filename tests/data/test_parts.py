from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jagged.data import DataError
from jagged.data.encoding import Encoders
from jagged.data.parts import Part, Split, split_rows
from jagged.data.records import Dataset
from jagged.data.schema import Column, Kind, Schema
from jagged.training.shares import digest
from tests.conftest import EXAMPLES
from tests.data import brute_force as slow
from tests.data.points import SCHEMA, arrow, tables

ROOT = Path(__file__).parents[2]
TABLES = {"user": ["user"], "item": ["item", "items"], "place": ["place"], "kind": ["kind"]}


def made(rows: Sequence[slow.Row], schema: Schema = SCHEMA, **options: Any) -> Dataset:
    return Dataset.from_table(arrow(list(rows)), schema, progress=False, **options)


def sources(part: Part) -> list[int]:
    """A part's rows by their numbers in the source."""
    return sorted(part.dataset.source[part.rows].tolist())


def check(split: Split, rows: Sequence[slow.Row], kept: list[int], has_history: bool, delay: int, minimum: int) -> None:
    """Every vocabulary and statistic is what the slow definition says of the training rows."""
    train = sources(split.train)
    seen = slow.seen(rows, kept, train, delay, "out", has_history=has_history)
    for table, columns in TABLES.items():
        ids = slow.codes(rows, kept, columns)
        counts = slow.id_counts(rows, train, seen, columns)
        want = slow.numbers(counts, ids, minimum)
        encoder = split.encoders[table]
        assert split.train.maps[table].tolist() == [0, *want.values()]
        assert encoder.distinct == sum(count > 0 for count in counts.values())
        unseen = sum(counts[one] for one in ids if want[one] == 1)
        assert encoder.counts.tolist() == [0, unseen, *(counts[one] for one in ids if want[one] > 1)]
    values = {"price": [rows[i]["price"] for i in seen]}
    values["sizes"] = [one for i in train for one in ([None] if rows[i]["sizes"] is None else rows[i]["sizes"])]
    for name, numbers in values.items():
        found, (count, missing, mean, deviation, borders) = split.statistics[name], slow.statistics(numbers, split.buckets)
        assert (found.count, found.missing, list(found.borders)) == (count, missing, borders)
        assert found.mean == pytest.approx(mean, rel=1e-12)
        assert found.deviation == pytest.approx(deviation, rel=1e-9)
    leaks = split.leaks()
    assert leaks.counts["histories_too_late"] == leaks.counts["unsupported_ids"] == leaks.counts["unsupported_statistics"] == 0


@settings(max_examples=EXAMPLES // 2)
@given(
    rows=tables(),
    delay=st.integers(0, 3),
    minimum=st.integers(1, 2),
    history=st.booleans(),
    shares=st.sampled_from([(0.1, 0.1), (0.3, 0.2), (0.0, 0.3)]),
)
def test_a_split_by_time_is_that_of_the_definition(
    rows: list[slow.Row], delay: int, minimum: int, history: bool, shares: tuple[float, float]
) -> None:
    dataset = made(rows, history="events" if history else None, history_delay=delay if history else 0)
    kept = slow.without_duplicates(rows)
    want = slow.by_time(rows, kept, *shares)
    options: dict[str, Any] = {"valid": shares[0], "test": shares[1], "minimum_counts": minimum, "buckets": 3}
    if any(share and not part for share, part in zip((1, *shares), want, strict=True)):
        with pytest.raises(DataError, match="expected one at least; change the shares, or split otherwise"):
            dataset.split(**options)
        return
    split = dataset.split(**options)
    assert (sources(split.train), sources(split.valid), sources(split.test)) == want
    assert [split.counts[name] for name in ("train", "valid", "test")] == [len(part) for part in want]
    check(split, rows, kept, history, delay, minimum)
    leaks = split.leaks()
    assert leaks.counts["requests_across_parts"] == 0
    if all(rows[i]["request"] is None for i in kept):
        assert not leaks


@settings(max_examples=EXAMPLES // 4)
@given(rows=tables(), history=st.booleans())
def test_leaving_one_out_is_that_of_the_definition(rows: list[slow.Row], history: bool) -> None:
    dataset = made(rows, history="events" if history else None)
    kept = slow.without_duplicates(rows)
    # Of a request's rows those of one user alone are held out with it.
    want = slow.leave_one_out(rows, kept)
    if not want[0]:
        with pytest.raises(DataError, match="no train row"):
            dataset.split("leave-one-out")
        return
    split = dataset.split("leave-one-out", buckets=3)
    assert (sources(split.train), sources(split.valid), sources(split.test)) == want
    check(split, rows, kept, history, 0, 1)


@settings(max_examples=EXAMPLES // 4)
@given(rows=tables(), parts=st.lists(st.sampled_from(["train", "valid", "test"]), min_size=15, max_size=15))
def test_parts_by_a_column_and_what_training_sees_of_other_parts(rows: list[slow.Row], parts: list[str]) -> None:
    rows = [{**row, "part": part} for row, part in zip(rows, parts, strict=False)]
    table = arrow(rows).append_column("part", pa.array([row["part"] for row in rows], pa.string()))
    dataset = Dataset.from_table(table, SCHEMA, split="part", history="events", progress=False)
    kept = slow.without_duplicates(rows)
    want = tuple([i for i in kept if rows[i]["part"] == part] for part in ("train", "valid", "test"))
    if not want[0]:
        with pytest.raises(DataError, match="no train row"):
            dataset.split("column")
        return
    split = dataset.split("column", buckets=1)
    assert (sources(split.train), sources(split.valid), sources(split.test)) == want
    check(split, rows, kept, True, 0, 1)
    number = {"train": 0, "valid": 1, "test": 2}

    def is_known(i: int) -> bool:
        return rows[i]["user"] is not None and rows[i]["item"] is not None

    keys = {i: tuple(rows[i][name] for name in ("user", "item", "time")) for i in kept if is_known(i)}
    across = [i for i in keys if any(keys[j] == keys[i] and number[rows[j]["part"]] < number[rows[i]["part"]] for j in keys)]
    leaks = split.leaks()
    assert leaks.counts["rows_across_parts"] == len(across)
    requests = {rows[i]["request"] for i in kept} - {None}
    straddling = [one for one in requests if len({rows[i]["part"] for i in kept if rows[i]["request"] == one}) > 1]
    assert leaks.counts["requests_across_parts"] == len(straddling)
    if across:
        assert set(leaks.examples["rows_across_parts"]) <= {f"row {i} of the source, from 0" for i in across}


def table_of(count: int) -> list[slow.Row]:
    generator = np.random.default_rng(0)
    return [
        {
            "user": int(generator.integers(8)), "item": f"i{generator.integers(6)}", "time": i, "request": None,
            "place": int(generator.integers(3)), "kind": "view", "items": [f"i{generator.integers(9)}"], "price": float(i),
            "sizes": [float(i)], "click": i % 2,
        }
        for i in range(count)
    ]  # fmt: skip


def test_a_split_by_user_keeps_users_whole() -> None:
    dataset = made(table_of(100), history="events")
    split = dataset.split("user", valid=0.25, test=0.25, seed=3)
    users = [set(dataset.column("user")[part.rows].tolist()) for part in (split.train, split.valid, split.test)]
    assert [len(one) for one in users] == [4, 2, 2]
    assert len(set.union(*users)) == 8
    check(split, table_of(100), list(range(100)), True, 0, 1)
    again, other = dataset.split("user", valid=0.25, test=0.25, seed=3), dataset.split("user", valid=0.25, test=0.25, seed=4)
    assert again.test.rows.tolist() == split.test.rows.tolist() != other.test.rows.tolist()
    assert not split.leaks()


NAMES = ("user", "item", "time", "request", "place", "kind", "items", "price", "sizes", "click")
EXAMPLE = [
    dict(zip(NAMES, row, strict=True))
    for row in (
        (7, "a", 1, "r", 1, "v", ["a", None, "z"], 1.0, [], 1),
        (7, "b", 2, "s", None, "v", [], None, [2.0, None], 0),
        (7, "a", 3, "t", 2, "w", None, 3.0, None, None),
        (8, "c", 9, "u", 1, "w", ["c"], 9.0, [4.0], 1),
    )
]


def test_a_batch_has_everything_and_nothing_is_padded() -> None:
    dataset = made(EXAMPLE, history="events", event_labels=("click",))
    # The last row is the test: the item "c" and the user 8 are not seen in training.
    split = dataset.split("time", valid=0.0, test=0.25)
    train, test = split.train.gather([2, 0, 1]), split.test.gather([0])
    assert len(train) == 3
    assert train.features.keys() == ["user", "place", "kind", "items"]
    features = train.features.to_dict()
    assert {name: features[name].lengths().tolist() for name in features} == {
        "user": [1, 1, 1], "place": [1, 1, 1], "kind": [1, 1, 1], "items": [1, 3, 0],
    }  # fmt: skip
    # Item ids a, z, b are 2, 3, 4; a missing list is one missing id, an empty one has none.
    assert features["items"].values().tolist() == [0, 2, 0, 3]
    assert features["place"].values().tolist() == [3, 2, 0]
    assert features["kind"].values().tolist() == [3, 2, 2]
    assert train.candidates is not None
    assert train.candidates.values().tolist() == [2, 2, 4]
    assert train.numbers.tolist() == [[3.0], [1.0], [2.0]]
    assert train.numbers_missing.tolist() == [[False], [False], [True]]
    assert train.number_lists is not None
    assert train.number_lists["sizes"].lengths().tolist() == [1, 0, 2]
    assert train.number_lists["sizes"].values().tolist() == [2.0, 2.0, 2.0]
    assert train.number_lists["sizes"].weights().tolist() == [0.0, 1.0, 0.0]
    assert train.labels.tolist() == [[0.0], [1.0], [0.0]]
    assert train.label_mask.tolist() == [[False], [True], [True]]
    assert train.weights.tolist() == [1.0, 1.0, 1.0]
    assert train.times is not None
    assert train.times.tolist() == [3, 1, 2]
    assert train.history is not None
    assert train.history.keys() == ["item", "place", "kind"]
    assert train.history["item"].lengths().tolist() == [2, 0, 1]
    assert train.history["item"].values().tolist() == [2, 4, 2]
    assert train.history["place"].values().tolist() == [2, 0, 2]
    assert train.history_times is not None
    assert train.history_times.tolist() == [1, 2, 1]
    assert train.history_numbers is not None
    assert train.history_numbers.tolist() == [[1.0], [2.0], [1.0]]
    assert train.history_numbers_missing is not None
    assert train.history_numbers_missing.tolist() == [[False], [True], [False]]
    assert train.history_labels is not None
    assert train.history_labels.tolist() == [[1.0], [0.0], [1.0]]
    assert test.features["user"].values().tolist() == [1]
    assert test.candidates is not None
    assert test.candidates.values().tolist() == [1]
    assert test.history is not None
    assert test.history["item"].lengths().tolist() == [0]
    latest = split.train.gather([0, 1, 2], max_history=1)
    assert latest.history is not None
    assert latest.history["item"].lengths().tolist() == [0, 1, 1]
    assert latest.history["item"].values().tolist() == [2, 4]
    kinds = {value.dtype for value in (train.features.values(), train.history.values(), train.times, train.rows)}
    assert kinds == {torch.int64}
    empty = split.train.gather([])
    assert len(empty) == 0
    assert len(train.to(torch.device("cpu"))) == 3
    with pytest.raises(ValueError, match=r"^max_history: got -1, expected 0 or more$"):
        split.train.gather([0], max_history=-1)


def test_labels_of_events_are_not_shown_unless_named() -> None:
    split = made(EXAMPLE, history="events").split(valid=0.0, test=0.25)
    batch = split.train.gather([0, 1, 2])
    assert batch.history_labels is not None
    assert batch.history_labels.shape == (3, 0)
    assert batch.history is not None
    assert "click" not in batch.history.keys()  # noqa: SIM118 - a KeyedJaggedTensor is no mapping
    with pytest.raises(DataError) as caught:
        made(EXAMPLE, history="events", event_labels=("item",))
    assert str(caught.value) == "Table: event_labels: found 'item', expected labels: ['click']"


def test_weights_of_rows_and_of_ids() -> None:
    table = pa.table({"a": [1, 2], "l": [[1, 2], None], "w": [[0.5, 2.0], None], "s": [0.25, 3.0]})
    columns = (Column("a", Kind.ID), Column("l", Kind.IDS, weights="w"), Column("w", Kind.NUMBERS), Column("s", Kind.WEIGHT))
    split = split_of_all(Dataset.from_table(table, Schema(columns), progress=False))
    batch = split.gather([1, 0])
    assert batch.weights.tolist() == [3.0, 0.25]
    assert batch.features["l"].weights().tolist() == [1.0, 0.5, 2.0]
    assert batch.features["a"].weights().tolist() == [1.0, 1.0]
    assert (batch.number_lists, batch.candidates, batch.times, batch.history) == (None, None, None, None)


def split_of_all(dataset: Dataset) -> Part:
    from jagged.data.encoding import Encoder

    counts = {name: np.ones(len(dataset.ids(name)), np.int64) for name in dataset.schema.tables}
    tables = {name: Encoder.fit(columns[0], dataset.ids(name), counts[name]) for name, columns in dataset.schema.tables.items()}
    return Part(dataset, None, Encoders(tables, {}))  # type: ignore[arg-type]


def test_another_table_is_read_with_the_encoders_of_training(tmp_path: Path) -> None:
    split = made(EXAMPLE).split(valid=0.0, test=0.25)
    split.encoders.save(tmp_path / "e")
    other = made([{**EXAMPLE[0], "item": "b", "user": 99, "price": None}])
    part = Part(other, encoders=Encoders.load(tmp_path / "e"))
    batch = part.gather([0])
    assert batch.candidates is not None
    assert batch.candidates.values().tolist() == [4]
    assert batch.features["user"].values().tolist() == [1]
    assert batch.numbers.tolist() == [[2.0]]
    with pytest.raises(DataError) as caught:
        Part(other, encoders=Encoders({}, {}))
    assert str(caught.value) == (
        "encoders: found the tables [] and numbers [], expected 'user', which the dataset has; "
        "take the encoders of a split of such a table"
    )
    with pytest.raises(ValueError, match=r"^rows: got shape \(1,\), expected one dimension and numbers from 0 to 0$"):
        Part(other, np.array([1]), split.encoders)


def test_a_part_is_sent_and_workers_need_no_torchrec(tmp_path: Path) -> None:
    part = made(EXAMPLE, history="events", directory=tmp_path / "d").split(valid=0.0, test=0.25).train
    sent = pickle.loads(pickle.dumps(part))
    assert all(torch.equal(one, part.collect([2, 0])[name]) for name, one in sent.collect([2, 0]).items())
    (tmp_path / "part").write_bytes(pickle.dumps(part))
    code = (
        "import pickle, sys\n"
        f"part = pickle.load(open({str(tmp_path / 'part')!r}, 'rb'))\n"
        "part.collect([0, 1])\n"
        "print(sorted({'torchrec', 'fbgemm_gpu', 'triton'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


def test_planted_leaks_are_found_and_named() -> None:
    dataset = made(table_of(60), history="events")
    split = dataset.split()
    assert str(split).startswith("split by time\ntrain ")
    # A training row that is in the test too, encoders that saw the test, and statistics of all rows.
    train = dataclasses.replace(split.train, rows=np.sort(np.append(split.train.rows[1:], split.test.rows[0])))
    seen_less = dataclasses.replace(split, train=dataclasses.replace(split.train, rows=split.train.rows[:1]))
    leaks = seen_less.leaks()
    assert leaks
    assert leaks.counts["unsupported_ids"] > 0
    assert leaks.counts["unsupported_statistics"] == 2
    assert leaks.examples["unsupported_statistics"] == ["price", "sizes"]
    assert dataclasses.replace(split, train=train).leaks().counts["unsupported_statistics"] == 2
    assert "unsupported_statistics          2  (price; sizes)" in str(leaks)


def test_views_that_reach_too_far_are_found() -> None:
    for options in ({}, {"history_delay": 2}, {"ties": "before"}):
        dataset = made(table_of(60), history="events", **options)
        split = dataset.split()
        stop = dataset.stop.copy()
        longest = int(np.argmax(stop - dataset.start))
        for change in (longest + 1, longest + 2):
            stop[longest] = min(change, len(stop))
            dataset._columns["stop"] = (stop,)
            leaks = split.leaks()
            assert leaks.counts["histories_too_late"] == 1
            assert leaks.examples["histories_too_late"] == [f"row {dataset.source[longest]} of the source, from 0"]


ONLY = Schema((Column("place", Kind.ID),))


@pytest.mark.parametrize(
    ("by", "schema", "message"),
    [
        ("time", ONLY, "split by time: found no column of kind time, expected one; name it in the schema, or split otherwise"),
        ("user", ONLY, "split by user: found no column of kind user, expected one; name it in the schema, or split otherwise"),
        (
            "column", ONLY,
            "split by column: found a dataset without parts, expected from_table(split=...) with the column that says them",
        ),
        (
            "time", SCHEMA,
            "split by time: found no train row of 2 ({'train': 0, 'valid': 0, 'test': 2, 'valid_time': 1, 'test_time': 1}), "
            "expected one at least; change the shares, or split otherwise",
        ),
    ],
)  # fmt: skip
def test_a_split_that_cannot_be_is_named(by: str, schema: Schema, message: str) -> None:
    dataset = made([{**EXAMPLE[0], "item": "x"}, EXAMPLE[0]], schema)
    with pytest.raises(DataError) as caught:
        split_rows(dataset, by)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"by": "item"}, "by: got 'item', expected one of 'time', 'user', 'column', 'leave-one-out'"),
        ({"valid": 0.5, "test": 0.5}, "valid, test: got 0.5, 0.5, expected 0 or more with a sum below 1"),
        ({"valid": -0.5}, "valid, test: got -0.5, 0.1, expected 0 or more with a sum below 1"),
        ({"seed": -1}, "seed: got -1, expected 0 to 2**64 - 1"),
        ({"buckets": 0}, "buckets: got 0, expected 1 or more"),
        (
            {"minimum_counts": {"places": 2}},
            "minimum_counts: got {'places': 2}, expected counts from 1 on, "
            "by table of ['user', 'item', 'place', 'kind'] where by table",
        ),
    ],
)  # fmt: skip
def test_options_out_of_range_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole message is compared
        split_rows(made(EXAMPLE), **options)
    assert str(caught.value) == message


def test_hashes_and_ranges_of_a_split() -> None:
    columns = [
        dataclasses.replace(column, encoding="hash", size=50) if column.table_name == "item" else column
        for column in SCHEMA.columns
    ]
    columns[4] = Column("place", Kind.ID, encoding="range", size=3)
    split = made(EXAMPLE, Schema(tuple(columns))).split(valid=0.0, test=0.25, seed=5)
    batch = split.train.gather([0, 1, 2])
    assert batch.features["place"].values().tolist() == [3, 0, 4]
    item = split.encoders["item"]
    assert item.seed == 5
    assert batch.candidates is not None
    assert batch.candidates.values().tolist() == item.encode(["a", "b", "a"]).tolist()
    assert split.encoders.sizes == {"user": 3, "item": 52, "place": 5, "kind": 4}
    assert not split.leaks()


def test_a_part_goes_to_a_worker_and_to_other_devices_and_tells_its_batches_apart() -> None:
    split = made(EXAMPLE, history="events").split(by="time", valid=0.2, test=0.2)
    part = pickle.loads(pickle.dumps(split.train))
    for row in range(len(part)):
        here, there = split.train.gather([row]), part.gather([row])
        assert digest(here) == digest(there) != ""
        assert all(digest(part.gather([other])) != digest(here) for other in range(len(part)) if other != row)
    meta = part.gather([0]).to(torch.device("meta"))
    assert meta.features.values().is_meta
    assert meta.labels.is_meta
