"""Side features of events: as a table has them, in the order of the events, and as rows of a model in batches."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jagged.data import BatchLoader, DataError, Dataset, SequenceDataset, read_events, split_leave_one_out
from jagged.data.vocabulary import FIRST, MISSING, UNSEEN

TABLE = """user_id,item_id,timestamp,action,shop,sure
b,x,5,buy,7,True
a,x,3,view,7,false
a,y,1,,8,true
a,x,3,buy,9,TRUE
a,z,2, view ,,false
b,y,6,rare,7,true
b,z,7,view,7,true
"""


def read(source: Any, columns: tuple[str, ...] = ("action", "shop"), **options: Any) -> SequenceDataset:
    return read_events(source, event_columns=columns, progress=False, **options)


def told(dataset: SequenceDataset, name: str) -> list[Any]:
    """The value of each event."""
    values = [None, *dataset.feature_values(name).ids.to_pylist()]
    return [values[number] for number in dataset.features[name].tolist()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "events.csv").write_text(TABLE)
    return tmp_path / "events.csv"


def test_values_go_with_their_events(path: Path) -> None:
    """Sorted by time within a user; of duplicates the first stays, with what it has."""
    dataset = read(path)
    assert dataset.users.ids.to_pylist() == ["b", "a"]
    assert [dataset.items.ids[item].as_py() for item in dataset.item_ids.tolist()] == ["x", "y", "z", "y", "z", "x"]
    assert told(dataset, "action") == ["buy", "rare", "view", None, "view", "view"]
    assert told(dataset, "shop") == [7, 7, 7, 8, None, 7]
    assert dataset.notes["dropped_duplicates"] == 1
    kept = read(path, duplicates="keep")
    assert told(kept, "action") == ["buy", "rare", "view", None, "view", "view", "buy"]


def test_an_empty_text_is_a_missing_value(path: Path) -> None:
    """In any table; one name may stand alone."""
    source = pa.table({"user_id": ["a", "a"], "item_id": ["x", "y"], "timestamp": [1, 2], "action": ["", "view"]})
    assert told(read_events(source, event_columns="action", progress=False), "action") == [None, "view"]
    # Blanks around a value were trimmed; of rows that are read again around a bad one they count once.
    assert read(path, ("action",)).notes["trimmed_ids"] == 1
    path.write_text(TABLE + "".join(f"c,x,{time}, view ,7,true\n" for time in range(300)) + f"c,x,400,view,{'7' * 2_000},true\n")
    assert read(path, on_error="skip").notes["trimmed_ids"] == 301


def test_any_table_says_the_same(path: Path, tmp_path: Path) -> None:
    rows = [[field.strip() or None for field in line.split(",")] for line in TABLE.splitlines()]
    named = dict(zip(rows[0], zip(*rows[1:], strict=True), strict=True))
    whole = {name: pa.array([None if of is None else int(of) for of in named[name]]) for name in ("timestamp", "shop")}
    table = pa.table({name: whole.get(name, pa.array(of)) for name, of in named.items()})
    table = table.set_column(5, "sure", pa.array([word.lower() == "true" for word in named["sure"]]))
    pq.write_table(table, tmp_path / "events.parquet")
    by_code = table.set_column(3, "action", table["action"].dictionary_encode())
    expected = read(path, ("action", "shop", "sure"))
    for source in (table, by_code, tmp_path / "events.parquet", Dataset.from_table(table, progress=False)):
        # What is true or false is a number or a label of a typed table.
        columns = ("action",) if isinstance(source, Dataset) else ("action", "shop", "sure")
        found = source.sequences(event_columns=columns) if isinstance(source, Dataset) else read(source, columns)
        for name in columns:
            assert told(found, name) == told(expected, name)


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(
            st.sampled_from("ab"),
            st.integers(0, 4),
            st.integers(0, 9),
            st.none() | st.sampled_from("uvw"),
            st.none() | st.integers(-2, 2),
        ),
        min_size=1,
        max_size=20,
    ),
    st.integers(1, 2),
)
def test_agrees_with_a_loop(rows: list[tuple[str, int, int, str | None, int | None]], least: int) -> None:
    first: dict[tuple[str, int, int], tuple[Any, ...]] = {}
    for row in rows:
        first.setdefault(row[:3], row)
    left = list(first.values())
    while any(sum(other[at] == row[at] for other in left) < least for row in left for at in (0, 1)):
        left = [row for row in left if all(sum(other[at] == row[at] for other in left) >= least for at in (0, 1))]
    names = ["user_id", "item_id", "timestamp", "word", "number"]
    kinds = [pa.string(), pa.int64(), pa.int64(), pa.string(), pa.int64()]
    columns = [pa.array(list(column), kind) for column, kind in zip(zip(*rows, strict=True), kinds, strict=True)]
    source = pa.table(dict(zip(names, columns, strict=True)))
    if not left:
        with pytest.raises(DataError):
            read(source, ("word", "number"), min_events=least)
        return
    dataset = read(source, ("word", "number"), min_events=least)
    users = list(dict.fromkeys(row[0] for row in left))
    ordered = [row for user in users for row in sorted((row for row in left if row[0] == user), key=lambda row: row[2])]
    assert [told(dataset, name) for name in ("word", "number")] == [[row[at] for row in ordered] for at in (3, 4)]


def test_is_saved_and_read_again(path: Path, tmp_path: Path) -> None:
    dataset = read(path)
    dataset.save(tmp_path / "kept")
    again = SequenceDataset.load(tmp_path / "kept")
    assert again.fingerprint == dataset.fingerprint
    for name in ("action", "shop"):
        assert told(again, name) == told(dataset, name)
    # Another table is another dataset, by values and by names.
    other = tmp_path / "other.csv"
    other.write_text(TABLE.replace("rare", "view"))
    prints = [read(path, columns).fingerprint for columns in ((), ("action",), ("shop",), ("action", "shop"), ("shop", "action"))]
    assert len({*prints, read(other).fingerprint}) == 6
    cache = tmp_path / "cache"
    for columns in (("action",), ("shop",), ("action",)):
        assert list(read(path, columns, cache_directory=cache).features) == list(columns)
    (tmp_path / "kept" / "values-1.arrow").unlink()
    with pytest.raises(DataError, match=re.escape("values-1.arrow")):
        SequenceDataset.load(tmp_path / "kept")


def test_batches_have_the_models_rows(tmp_path: Path) -> None:
    """What training has not seen is unseen in a history; batches go to workers and back."""
    lines = ["user_id,item_id,timestamp,action"]
    actions = {"a": ["p", "", "q", "r", "p"], "b": ["q", "q", "", "p"], "c": ["", "p", "s", "s"]}
    # What is only ever training's last event is read by no step.
    actions = {user: [*of[:-2], "last", *of[-2:]] for user, of in actions.items()}
    for user, of in actions.items():
        lines += [f"{user},i{place % 2},{place},{action}" for place, action in enumerate(of)]
    (tmp_path / "events.csv").write_text("\n".join(lines))
    dataset = read(tmp_path / "events.csv", ("action",))
    split = split_leave_one_out(dataset)
    # r and s stand behind training's events.
    assert split.feature_values["action"].ids.to_pylist() == ["p", "q"]
    rows = {"": MISSING, "p": FIRST, "q": FIRST + 1, "r": UNSEEN, "s": UNSEEN, "last": UNSEEN}
    common: dict[str, Any] = {"batch_size": 3, "max_seq_len": 3, "shuffle": False, "seed": 0, "with_features": ["action"]}
    for part, cut in ((split.train, 3), (split.valid, 2), (split.test, 1)):
        for workers in (0, 1):
            loader = BatchLoader(part, **common, with_times=True, num_workers=workers)
            (batch,) = loader
            assert list(batch.features.keys()) == ["item_id", "timestamp", "action"]
            expected = [[rows[action] for action in of[:-cut][-3:]] for of in actions.values()]
            feature = batch.features["action"]
            assert [part.tolist() for part in feature.values().split(feature.lengths().tolist())] == expected
            assert feature.lengths().tolist() == batch.features["item_id"].lengths().tolist()
            loader.close()
    with pytest.raises(ValueError, match=r"^with_features: got 'shop', expected one of \['action'\], those of the events"):
        BatchLoader(split.train, **{**common, "with_features": ["shop"]})


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            ("colour",),
            "events.csv:1: found the columns ['user_id', 'item_id', 'timestamp', 'action', 'shop', 'sure'], expected a column "
            "'colour', a side feature of events",
        ),
        (
            ("action", "action"),
            "events.csv: found the column names ['user_id', 'item_id', 'timestamp', 'action', 'action'], expected different, "
            "non-empty names",
        ),
    ],
)
def test_what_is_refused(path: Path, columns: tuple[str, ...], message: str) -> None:
    with pytest.raises(DataError) as error:
        read(path, columns)
    assert str(error.value) == f"{path.parent}/{message}"


def test_tables_of_other_forms_are_refused(tmp_path: Path) -> None:
    (tmp_path / "events.txt").write_text("a x y z\n")
    with pytest.raises(DataError) as error:
        read(tmp_path / "events.txt", ("action",))
    assert str(error.value) == (
        f"{tmp_path}/events.txt: found lines of text, expected the columns ['action']; give a table with a header"
    )
    nested = pa.table({"user_id": ["a"], "item_id": [["x", "y"]], "timestamp": [[1, 2]], "action": [["u", "v"]]})
    with pytest.raises(DataError, match="expected an event a row, as side features of events have it; unnest the lists"):
        read(nested, ("action",))
    floats = pa.table({"user_id": ["a"], "item_id": ["x"], "timestamp": [1], "price": [3.5]})
    with pytest.raises(DataError, match="the column 'price' of type double, expected ids that are integers or strings"):
        read(floats, ("price",))
    taken = pa.table({"user_id": ["a"], "movie": ["x"], "time": [1], "item_id": ["u"]})
    with pytest.raises(DataError) as error:
        read(taken, ("item_id",), item_column="movie", timestamp_column="time")
    message = "Table: found the event column 'item_id', expected another name, which batches have for something else; rename it"
    assert str(error.value) == message
