"""What columns are taken for, and what their values become in SQL."""

from __future__ import annotations

import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from jagged.data import Column, DataError, Kind, Schema
from jagged.data.inference import infer, plain_name, schema_for
from jagged.data.sources import open_table
from jagged.data.values import missing_sql, time_form_sql, value_sql


def inferred(source: Any, **words: Any) -> dict[str, str]:
    """Kinds by name; of ids of another column's table and of lists in text also these."""
    with open_table(source, progress=False) as table:
        schema = schema_for(table, **words)
    told = {}
    for column in schema.columns:
        more = [f"of {column.table}"] * (column.table is not None) + [repr(column.separator)] * (column.separator is not None)
        told[column.name] = " ".join([column.kind.value, *more])
    return told


def csv(folder: Path, text: str) -> Path:
    path = folder / "table.csv"
    path.write_text(text)
    return path


def of_values(folder: Path, name: str, *values: str) -> str:
    """What one column of a csv file is taken for."""
    return inferred(csv(folder, f"{name}\tother\n" + "".join(f"{value}\tx\n" for value in values)))[name]


def values_of(source: Any, column: Column) -> list[Any]:
    with open_table(source, progress=False) as table:
        return [row[0] for row in table.sql(f"SELECT {value_sql(column, table.types[column.name])} FROM rows ORDER BY rowid")]


class Frame:
    """A data frame of another library, as this one sees it."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self._table.__arrow_c_stream__(requested_schema)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("user_id", "user_id"),
        ("userId", "user_id"),
        ("UserID", "user_id"),
        ("User ID", "user_id"),
        (" user-id ", "user_id"),
        ("USER_ID", "user_id"),
        ("user_id:token", "user_id"),
        ("item_seq:token_seq", "item_seq"),
        ("naïve", "na_ve"),
        ("数量", "数量"),
    ],
)
def test_names_as_the_rules_read_them(name: str, expected: str) -> None:
    assert plain_name(name) == expected


def test_a_csv_table_of_impressions(tmp_path: Path) -> None:
    path = csv(
        tmp_path,
        "userId;movieId;rating;timestamp;genres;history;hist_item_id;price;country;zip;click;vec;title;created_at;request_id;weight\n"
        '1;10;1;1700000000;Drama|Comedy;1 2 3;"[1,2]";1.5;NA;02139;0;"[0.1,2]";Toy Story (1995);2020-01-01;r1;0.5\n'
        '2;11;0;1700000001;Drama;2;"[]";many;DE;10115;1;"[0.2]";It\'s;2020-01-01T00:00:00Z;r2;1\n'
        '3;11;0;1700000001;Drama;;;2;DE;10115;1;"[0.2]";It\'s;2020-01-01T00:00:00Z;r2;1\n',
    )
    assert inferred(path) == {
        "userId": "user",
        "movieId": "candidate",
        "rating": "label",
        "timestamp": "time",
        "genres": "ids '|'",
        "history": "ids of movieId ' '",
        "hist_item_id": "ids of movieId",
        "price": "number",
        "country": "id",
        "zip": "id",
        "click": "label",
        "vec": "numbers",
        "title": "id",
        "created_at": "unused",
        "request_id": "request",
        "weight": "weight",
    }


def test_a_typed_table() -> None:
    day = datetime.datetime(2024, 1, 1)
    table = pa.table(
        {
            "User ID": pa.array([1, 2, None, 4], pa.int64()),
            "item": pa.array(["a", "b", "a", ""]).dictionary_encode(),
            "ts": pa.array([day, day, day, None], pa.timestamp("ns")),
            "clicked": [True, False, None, True],
            "price": [Decimal("1.50")] * 4,
            "history": pa.array([["a"], [], None, ["b", None]]),
            "emb": pa.array([[1.0, 2.0]] * 4, pa.list_(pa.float32(), 2)),
            "s": [{"a": 1}] * 4,
            "m": pa.array([[("a", 1)]] * 4, pa.map_(pa.string(), pa.int64())),
            "b": [b"x"] * 4,
            "nothing": pa.nulls(4),
            "u64": pa.array([2**63 + 1, 2, 3, 4], pa.uint64()),
            "day": pa.array([datetime.date(2024, 1, 1)] * 4),
            "clock": pa.array([datetime.time(1)] * 4),
            "span": pa.array([datetime.timedelta(1)] * 4),
            "nested": [[[1]]] * 4,
            "half": pa.array(np.array([1, 2, 3, 4], np.float16)),
            "is_new": [True, False, True, False],
            "age": [1, 2, 3, 4],
            "device_type": [1, 2, 1, 2],
            "C14": [100, 200, 300, 400],
            "hashed": [2**60, 1, 2, 3],
            "hist_ts": pa.array([[1, 2]] * 4),
            "counts": pa.array([[1, 2]] * 4),
            "session_id": [1, 2, 3, 4],
            "event": ["view"] * 4,
        }
    )
    expected = {
        "User ID": "user",
        "item": "candidate",
        "ts": "time",
        "clicked": "label",
        "price": "number",
        "history": "ids of item",
        "emb": "numbers",
        "s": "unused",
        "m": "unused",
        "b": "unused",
        "nothing": "id",
        "u64": "id",
        "day": "unused",
        "clock": "unused",
        "span": "unused",
        "nested": "unused",
        "half": "number",
        "is_new": "id",
        "age": "number",
        "device_type": "id",
        "C14": "id",
        "hashed": "id",
        "hist_ts": "numbers",
        "counts": "ids",
        "session_id": "request",
        "event": "event",
    }
    assert inferred(table) == expected
    assert inferred(Frame(table)) == expected


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        # Numbers.
        ("price", ["1", "2", "3"], "number"),
        ("price", ["1.5", "-2e3", ".5", "NA", "n/a", "NaN", "null", "None", "-", "\\N", ""], "number"),
        # One word among fractions is odd, one among few whole numbers tells of codes.
        ("price", ["1.5", "2", "many"], "number"),
        ("size", ["1", "2", "many"], "id"),
        ("size", [*"123456789", "many"], "number"),
        ("number", ["007", "8"], "id"),
        ("number", ["12345678901234567", "8"], "id"),
        ("number", ["inf", "0x10", "1_000"], "id"),
        # Times.
        ("timestamp", ["1", "2"], "time"),
        ("Timestamp", ["1700000000.0", "1.7e9"], "time"),
        ("time", ["2024-01-01 10:00", "2024-01-02"], "time"),
        ("time", ["10:00", "11:00"], "id"),
        ("created_at", ["1700000000", "1700000001"], "time"),
        ("watch_time", ["30", "61"], "number"),
        ("played", ["2024-01-01T10:00:00.123Z", "2024-01-01T10:00:00+02:00"], "time"),
        # Labels.
        ("click", ["0", "1"], "label"),
        ("is_click", ["true", "False"], "label"),
        ("is_good", ["0", "1"], "label"),
        ("click", ["0", "7"], "number"),
        ("rating", ["1", "5"], "number"),
        ("label", ["1", "5"], "label"),
        ("label_buy", ["0", "0"], "label"),
        ("user_clicked", ["1.0", "0.0"], "label"),
        # Ids.
        ("cate", ["1", "2"], "id"),
        ("brand_id", ["1", "2"], "id"),
        ("transactionid", ["1", "2"], "id"),
        ("amount_paid", ["1", "2"], "number"),
        ("hist_3", ["1", "2"], "id"),
        ("sparse_3", ["1", "2"], "id"),
        ("I3", ["1", "2"], "number"),
        ("country", ["NA", "DE"], "id"),
        ("title", ["Toy Story (1995)", "Heat (1995)"], "id"),
        ("id", ["1", "2"], "unused"),
        ("id", ["1", "1"], "id"),
        ("weight", ["1", "2"], "weight"),
        ("behavior", ["pv", "buy"], "event"),
        ("session_id", ["1", "2"], "user"),
        ("search_id", ["1", "2"], "request"),
        # Lists.
        ("anything", ["[1, 2]", "[]"], "ids"),
        ("anything", ["['a', 'b']", "[]"], "ids"),
        ("anything", ["[1.5, 2]", "[]"], "numbers"),
        ("embedding", ["[1, 2]", "[3, 4]"], "numbers"),
        ("anything", ["a|b", "c"], "ids '|'"),
        ("review", ["a word | or two", "and more"], "id"),
        ("anything", ["1 2 3", "4 5"], "ids ' '"),
        ("anything", ["1,2,3", "4,5"], "ids ','"),
        ("anything", ["1;2", "4;5"], "ids ';'"),
        ("scores", ["0.5|1", "2|3"], "numbers '|'"),
        ("clicked_items", ["a b", "c"], "ids ' '"),
        ("clicked_items", ["5", "5 7", "8", "9"], "ids ' '"),
        ("genres", ["Science Fiction, Drama", "Drama"], "ids ','"),
        ("genres", ["Science Fiction", "Drama"], "id"),
        ("when", ["2024-01-01 10:00", "2024-01-01 11:00"], "time"),
    ],
)
def test_a_column_of_text(tmp_path: Path, name: str, values: list[str], expected: str) -> None:
    assert of_values(tmp_path, name, *values) == expected


def test_text_in_a_typed_table_stays_text_where_it_is_whole() -> None:
    table = pa.table({"code1": ["1", "2"], "price": ["1.5", "2"], "when": ["2024-01-01", "2024-01-02"], "tags": ["a|b", "c"]})
    assert inferred(table) == {"code1": "id", "price": "number", "when": "time", "tags": "ids '|'"}


def test_of_one_kind_the_first_name_wins() -> None:
    table = pa.table({"uid": [1, 2], "user_id": [1, 2], "ad_id": [1, 2], "item_id": [1, 2], "date": [1, 2], "time": [1, 2]})
    assert inferred(table) == {
        "uid": "id", "user_id": "user", "ad_id": "id", "item_id": "candidate", "date": "unused", "time": "time"
    }  # fmt: skip


def test_a_history_that_the_user_names_is_a_list_whatever_it_looks_like(tmp_path: Path) -> None:
    path = csv(tmp_path, "item_id,last3\n1,5\n2,6\n")
    assert inferred(path) == {"item_id": "candidate", "last3": "number"}
    assert inferred(path, history="last3") == {"item_id": "candidate", "last3": "ids of item_id '|'"}
    path = csv(tmp_path, "item_id,last3\n1,5 7\n2,6 8 9\n")
    assert inferred(path, history=["last3"]) == {"item_id": "candidate", "last3": "ids of item_id ' '"}


def test_decimal_commas_are_no_lists(tmp_path: Path) -> None:
    """Unless the name, some of the values, or the user says so."""
    place = tmp_path / "shop.csv"

    def read(values: list[str], name: str = "price", **words: Any) -> Schema:
        place.write_text("\n".join([f"item_id;{name};click", *(f"i{row};{value};{row % 2}" for row, value in enumerate(values))]))
        with open_table(place, progress=False) as table:
            return schema_for(table, **words)

    with pytest.raises(DataError) as error:
        read(["3,5", "12,25", "", "-1,5"])
    assert str(error.value) == (
        f"{place}: found a decimal comma in the column 'price': '-1,5', expected a decimal point; write it with a point, or say "
        "what price is: ids for a list of two ids, numbers, or unused"
    )
    with pytest.raises(DataError, match="a decimal comma in the column 'score'"):
        read(["3,5"], "score")
    assert read(["3.5", "12.25"])["price"].kind is Kind.NUMBER
    assert read(["3,5", "12,25"], "clicked_items")["clicked_items"].kind is Kind.IDS
    assert read(["3,5", "12,25", "7,8,9"])["price"].kind is Kind.IDS
    for word, kind in (("ids", Kind.IDS), ("numbers", Kind.NUMBERS), ("unused", Kind.UNUSED)):
        assert read(["3,5", "12,25"], **{word: ["price"]})["price"].kind is kind


def test_a_table_without_rows_says_nothing(tmp_path: Path) -> None:
    path = csv(tmp_path, "user_id,item_id\n")
    with open_table(path) as table, pytest.raises(DataError) as error:
        infer(table)
    assert str(error.value) == f"{path}: found a table without rows, expected rows"


def test_a_schema_that_is_given_is_fitted_to_the_table() -> None:
    with open_table(pa.table({"a": [1], "b": ["x"], "c": [[1]]})) as table:
        schema = schema_for(table, Schema((Column("c", Kind.IDS), Column("a", Kind.NUMBER))))
        assert schema == Schema((Column("a", Kind.NUMBER), Column("b", Kind.UNUSED), Column("c", Kind.IDS)))
        with pytest.raises(DataError) as error:
            schema_for(table, Schema((Column("d", Kind.ID),)))
        assert str(error.value) == "schema: found the column 'd', expected those of Table: ['a', 'b', 'c']"


@pytest.mark.parametrize(
    ("column", "kind", "expected"),
    [
        (Column("a", Kind.ID), pa.list_(pa.int64()), "found the type 'list<item: int64>' for kind id, expected single values"),
        (
            Column("a", Kind.NUMBER),
            pa.struct([("b", pa.int64())]),
            "found the type 'struct<b: int64>' for kind number, expected single values",
        ),
        (Column("a", Kind.NUMBER), pa.date32(), "found the type 'date32[day]' for kind number, expected numbers"),
        (
            Column("a", Kind.TIME),
            pa.bool_(),
            "found the type 'bool' for kind time, expected whole numbers or calendar times",
        ),
        (
            Column("a", Kind.IDS),
            pa.int64(),
            "found the type 'int64' for kind ids, expected a list of ids or numbers, or text of such lists",
        ),
        (
            Column("a", Kind.NUMBERS, separator="|"),
            pa.list_(pa.int64()),
            "found the type 'list<item: int64>' for kind numbers, expected text where there is a separator",
        ),
        (
            Column("a", Kind.ID, encoding="range", size=3),
            pa.bool_(),
            "found the type 'bool' for kind id, expected whole numbers for a range",
        ),
    ],
)
def test_types_that_cannot_hold_a_kind_are_refused(column: Column, kind: pa.DataType, expected: str) -> None:
    with pytest.raises(DataError) as error:
        value_sql(column, kind)
    assert str(error.value) == f"column 'a': {expected}; name another kind"


@pytest.mark.parametrize(
    ("column", "texts", "expected"),
    [
        ({"kind": "id"}, ["a", " b ", "NA", "-", "\\N", None, " "], ["a", " b ", "NA", "-", None, None, None]),
        ({"kind": "id", "encoding": "range", "size": 5}, ["4", "5", "-1", "x", "01"], [4, None, None, None, 1]),
        (
            {"kind": "number"},
            ["1", " 2.5 ", "-1e-3", "NA", "inf", "1e999", "x", "True"],
            [1, 2.5, -0.001, None, None, None, None, 1],
        ),
        ({"kind": "label"}, ["0", "1.0", "false", "-", "none"], [0, 1, 0, None, None]),
        (
            {"kind": "time"},
            ["5", "5.0", "5.5", "1.7e9", "2024-01-01", "2024-01-01T01:00:00+01:00", "1970-01-01 00:00:00.000001", "2024-02-30"],
            [5, 5, None, 1_700_000_000, 1_704_067_200_000_000, 1_704_067_200_000_000, 1, None],
        ),
        (
            {"kind": "ids"},
            ["[1, 2]", '["a", "b c", ""]', "['x', null]", "[]", "", "1", "[3 4]", " [5] "],
            [["1", "2"], ["a", "b c", None], ["x", None], [], None, None, ["3", "4"], ["5"]],
        ),
        (
            {"kind": "ids", "separator": "|"},
            ["a|b", "a | b|", "a", None, "||"],
            [["a", "b"], ["a", "b"], ["a"], None, [None, None]],
        ),
        ({"kind": "ids", "separator": " "}, ["a b", " a  b ", "a"], [["a", "b"], ["a", "b"], ["a"]]),
        ({"kind": "ids", "separator": "'"}, ["a'b"], [["a", "b"]]),
        ({"kind": "ids", "separator": "::"}, ["a::b"], [["a", "b"]]),
        ({"kind": "numbers", "separator": ","}, ["1,2.5", "x,3", "NA"], [[1, 2.5], [None, 3], [None]]),
        ({"kind": "numbers"}, ["[1, 2.5]", "[nan, 1]"], [[1, 2.5], [None, 1]]),
        ({"kind": "unused"}, ["a", None], ["a", None]),
    ],
)
def test_values_of_text(column: dict[str, Any], texts: list[str | None], expected: list[Any]) -> None:
    assert values_of(pa.table({"a": texts}), Column("a", **column)) == expected


@pytest.mark.parametrize(
    ("column", "values", "expected"),
    [
        ({"kind": "id"}, pa.array([1, None], pa.int32()), [1, None]),
        ({"kind": "id"}, pa.array([1.0, 1.5, float("nan"), float("inf"), 2.0**60]), [1, None, None, None, None]),
        ({"kind": "id"}, pa.array([2**64 - 1], pa.uint64()), ["18446744073709551615"]),
        ({"kind": "id"}, pa.array([Decimal(7)], pa.decimal128(5, 0)), [7]),
        ({"kind": "id"}, pa.array([Decimal("7.5")], pa.decimal128(5, 1)), ["7.5"]),
        ({"kind": "id"}, pa.array([True, None]), [1, None]),
        ({"kind": "user"}, pa.array([datetime.date(2024, 1, 1)]), ["2024-01-01"]),
        ({"kind": "id", "encoding": "range", "size": 3}, pa.array([0, 2, 3, -1]), [0, 2, None, None]),
        ({"kind": "id", "encoding": "range", "size": 3}, pa.array([0.0, 0.5, 3.0]), [0, None, None]),
        ({"kind": "number"}, pa.array([1, None]), [1.0, None]),
        ({"kind": "number"}, pa.array([1.5, float("nan"), float("-inf")], pa.float32()), [1.5, None, None]),
        ({"kind": "weight"}, pa.array([Decimal("1.25")]), [1.25]),
        ({"kind": "label"}, pa.array([True, False]), [1.0, 0.0]),
        ({"kind": "time"}, pa.array([5, None]), [5, None]),
        ({"kind": "time"}, pa.array([5.0, 5.5]), [5, None]),
        ({"kind": "time"}, pa.array([2**63], pa.uint64()), [None]),
        ({"kind": "time"}, pa.array([1_000_001_500], pa.timestamp("ns")), [1_000_001]),
        ({"kind": "time"}, pa.array([1], pa.timestamp("s", "Europe/Berlin")), [1_000_000]),
        ({"kind": "time"}, pa.array([datetime.date(1970, 1, 2)]), [86_400_000_000]),
        ({"kind": "ids"}, pa.array([[1, None], None, []], pa.list_(pa.int16())), [[1, None], None, []]),
        ({"kind": "ids"}, pa.array([["a", ""]]), [["a", None]]),
        ({"kind": "ids", "encoding": "range", "size": 3}, pa.array([[0, 3]]), [[0, None]]),
        ({"kind": "numbers"}, pa.array([[1.0, float("nan")]]), [[1.0, None]]),
        ({"kind": "numbers"}, pa.array([[1, 2]]), [[1.0, 2.0]]),
    ],
)
def test_values_of_types(column: dict[str, Any], values: pa.Array, expected: list[Any]) -> None:
    found = values_of(pa.table({"a": values}), Column("a", **column))
    assert found == expected
    assert [type(value) for value in found] == [type(value) for value in expected]


@pytest.mark.parametrize("kind", ["number", "label", "weight", "time", "id", "user", "ids"])
def test_words_for_what_is_missing(kind: str) -> None:
    words = ["", " ", "\\N", None, "NA", "n/a", "NaN", "NULL", "None", "-", "x", "0"]
    of_numbers = kind in ("number", "label", "weight", "time")
    with open_table(pa.table({"a": words})) as table:
        rows = table.sql(f"SELECT {missing_sql(Column('a', Kind(kind)), table.types['a'])} FROM rows ORDER BY rowid")
    assert [row[0] for row in rows] == [True] * 4 + [of_numbers] * 6 + [False] * 2


def test_how_times_are_written() -> None:
    texts = ["5", "5.5", "2024-01-01", "2024-01-01 10:00:00", "2024-01-01T10:00Z", "2024-01-01 10:00:00.1+0200", "soon", None]
    with open_table(pa.table({"a": texts, "b": [1] * 8})) as table:
        rows = table.sql(f"SELECT {time_form_sql(Column('a', Kind.TIME), table.types['a'])} FROM rows ORDER BY rowid")
    assert [row[0] for row in rows] == ["number", "number", "naive", "naive", "zoned", "zoned", None, None]
    assert time_form_sql(Column("a", Kind.TIME), pa.int64()) == "'number'"
    assert time_form_sql(Column("a", Kind.TIME), pa.timestamp("s")) == "'naive'"
    assert time_form_sql(Column("a", Kind.TIME), pa.timestamp("s", "UTC")) == "'zoned'"
