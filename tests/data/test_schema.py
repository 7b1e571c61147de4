"""Schemas: every refusal, TOML there and back, and what a user's words change."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jagged.data import Column, DataError, Dataset, Kind, Schema
from jagged.data.schema import SINGLE, WITH_IDS

SHOP = Schema(
    (
        Column("user", Kind.USER),
        Column("item", Kind.CANDIDATE, encoding="hash", size=1000),
        Column("ad", Kind.ID),
        Column("seen", Kind.IDS, separator="|"),
        Column("amounts", Kind.NUMBERS),
        Column("price", Kind.NUMBER),
        Column("click", Kind.LABEL),
        Column("buy", Kind.NUMBER),
        Column("when", Kind.TIME),
        Column("created", Kind.UNUSED),
    )
)


def kinds(schema: Schema) -> dict[str, str]:
    return {column.name: column.kind.value for column in schema.columns}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"name": ""}, "schema: found a column named '', expected a name"),
        ({"name": 3}, "schema: found a column named 3, expected a name"),
        (
            {"kind": "colour"},
            "schema, column 'a': found kind 'colour', expected id, ids, number, numbers, label, weight, time, user, request, "
            "candidate, event, unused",
        ),
        ({"encoding": "one-hot"}, "schema, column 'a': found encoding 'one-hot', expected vocabulary, hash or range"),
        (
            {"encoding": "hash"},
            "schema, column 'a': found encoding 'hash' and size None, expected a size with hash and range alone",
        ),
        ({"size": 3}, "schema, column 'a': found encoding 'vocabulary' and size 3, expected a size with hash and range alone"),
        ({"encoding": "range", "size": 0}, "schema, column 'a': found size 0, expected 1 to 2147483647"),
        ({"encoding": "hash", "size": True}, "schema, column 'a': found size True, expected 1 to 2147483647"),
        ({"encoding": "hash", "size": 2**31}, "schema, column 'a': found size 2147483648, expected 1 to 2147483647"),
        (
            {"kind": "number", "table": "b"},
            "schema, column 'a': found table or encoding for a column of kind number, expected a column of ids",
        ),
        (
            {"kind": "time", "encoding": "hash", "size": 9},
            "schema, column 'a': found table or encoding for a column of kind time, expected a column of ids",
        ),
        ({"weights": "w"}, "schema, column 'a': found weights for a column of kind id, expected kind ids"),
        ({"separator": "|"}, "schema, column 'a': found a separator for a column of kind id, expected kind ids or numbers"),
        ({"kind": "ids", "separator": ""}, "schema, column 'a': found separator '', expected a text"),
        ({"kind": "ids", "separator": 5}, "schema, column 'a': found separator 5, expected a text"),
        ({"table": 5}, "schema, column 'a': found table 5, expected a text"),
        ({"kind": "ids", "weights": ["w"]}, "schema, column 'a': found weights ['w'], expected a text"),
    ],
)
def test_a_column_that_cannot_be_is_refused(arguments: dict[str, Any], expected: str) -> None:
    with pytest.raises(DataError) as error:
        Column(**{"name": "a", "kind": "id", **arguments})
    assert str(error.value) == expected


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ([Column("a", Kind.ID), Column("a", Kind.NUMBER)], "schema: found the column 'a' 2 times, expected it once"),
        *(
            (
                [Column("a", kind), Column("b", kind)],
                f"schema: found 2 columns of kind {kind.value} (a, b), expected one at most",
            )
            for kind in SINGLE
        ),
        ([Column("a", Kind.IDS, weights="w")], "schema, column 'a': found weights 'w', expected a column of kind numbers"),
        (
            [Column("a", Kind.IDS, weights="w"), Column("w", Kind.NUMBER)],
            "schema, column 'a': found weights 'w', expected a column of kind numbers",
        ),
        (
            [Column("a", Kind.ID, table="t"), Column("b", Kind.ID, table="t", encoding="hash", size=3)],
            """schema, table 't': found the encodings ["('hash', 3)", "('vocabulary', None)"], expected one""",
        ),
    ],
)
def test_columns_that_cannot_be_together_are_refused(columns: list[Column], expected: str) -> None:
    with pytest.raises(DataError) as error:
        Schema(tuple(columns))
    assert str(error.value) == expected


def test_columns_are_found_by_name_kind_and_table() -> None:
    assert SHOP["price"] == Column("price", Kind.NUMBER)
    with pytest.raises(KeyError, match="nothing"):
        SHOP["nothing"]
    assert [column.name for column in SHOP.of_kind(Kind.NUMBER, Kind.LABEL)] == ["price", "click", "buy"]
    assert SHOP.one(Kind.REQUEST) is None
    assert SHOP.one(Kind.TIME) == Column("when", Kind.TIME)
    shared = SHOP.with_words(history="seen")
    assert {name: [column.name for column in columns] for name, columns in shared.tables.items()} == {
        "user": ["user"],
        "item": ["item", "seen"],
        "ad": ["ad"],
    }


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        ({}, {}),
        ({"label": "buy"}, {"buy": "label", "click": "unused"}),
        ({"label": ["click", "buy"]}, {"buy": "label"}),
        ({"label": []}, {"click": "unused"}),
        ({"candidate": "ad"}, {"ad": "candidate", "item": "unused"}),
        ({"user": "ad", "candidate": "item"}, {"ad": "user", "user": "unused"}),
        ({"time": "created"}, {"created": "time", "when": "unused"}),
        ({"request": "ad", "weight": "price", "event": "buy"}, {"ad": "request", "price": "weight", "buy": "event"}),
        ({"ids": ["price", "amounts"]}, {"price": "id", "amounts": "ids"}),
        ({"numbers": ("ad", "seen")}, {"ad": "number", "seen": "numbers"}),
        ({"unused": "user"}, {"user": "unused"}),
        ({"history": "amounts"}, {"amounts": "ids"}),
    ],
)
def test_words_change_kinds(words: dict[str, Any], changed: dict[str, str]) -> None:
    assert kinds(SHOP.with_words(**words)) == kinds(SHOP) | changed


def test_a_history_has_the_candidates_numbers() -> None:
    expected = Column("seen", Kind.IDS, table="item", encoding="hash", size=1000, separator="|")
    assert SHOP.with_words(history="seen")["seen"] == expected
    assert SHOP.with_words(history=["seen"], candidate="ad")["seen"] == Column("seen", Kind.IDS, table="ad", separator="|")
    assert SHOP.with_words(history="seen", candidate="price")["seen"].table == "price"
    alone = Schema((Column("seen", Kind.IDS),))
    assert alone.with_words(history="seen") == alone


def test_a_column_keeps_what_its_new_kind_can_have() -> None:
    hashed = Column("ad", Kind.ID, table="things", encoding="hash", size=8)
    schema = Schema((hashed, Column("w", Kind.NUMBERS), Column("l", Kind.IDS, weights="w", separator=" ")))
    assert schema.with_words(candidate="ad")["ad"] == Column("ad", Kind.CANDIDATE, table="things", encoding="hash", size=8)
    assert schema.with_words(numbers="ad")["ad"] == Column("ad", Kind.NUMBER)
    assert schema.with_words(numbers="l")["l"] == Column("l", Kind.NUMBERS, separator=" ")
    assert schema.with_words(unused="l")["l"] == Column("l", Kind.UNUSED)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({"label": "like"}, "label='like': found the columns ['user', 'item'], expected a column 'like'"),
        ({"history": ["user", "x"]}, "history='x': found the columns ['user', 'item'], expected a column 'x'"),
        (
            {"user": "item", "candidate": "item"},
            "user='item': found the column named as candidate too, expected one kind for a column",
        ),
        (
            {"unused": "item", "label": "item"},
            "unused='item': found the column named as label too, expected one kind for a column",
        ),
    ],
)
def test_words_that_do_not_fit_are_refused(words: dict[str, Any], expected: str) -> None:
    with pytest.raises(DataError) as error:
        Schema((Column("user", Kind.USER), Column("item", Kind.CANDIDATE))).with_words(**words)
    assert str(error.value) == expected


names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)


@st.composite
def schemas(draw: st.DrawFn) -> Schema:
    columns, taken = [], set()
    for name in draw(st.lists(names, unique=True, max_size=6)):
        kind = draw(st.sampled_from([kind for kind in Kind if kind not in taken]))
        taken |= {kind} & set(SINGLE)
        more: dict[str, Any] = {}
        if kind in WITH_IDS and draw(st.booleans()):
            # A table of its own: columns of one table must be encoded alike.
            more = {"table": draw(st.sampled_from([None, f"{name} table"])), "encoding": draw(st.sampled_from(["hash", "range"]))}
            more["size"] = draw(st.integers(1, 2**31 - 1))
        if kind in (Kind.IDS, Kind.NUMBERS):
            more["separator"] = draw(st.none() | names)
        if kind is Kind.LABEL:
            more["positive_from"] = draw(st.none() | st.floats(allow_nan=False, allow_infinity=False) | st.integers(-9, 9))
        columns.append(Column(name, kind, **more))
    numbers = [column.name for column in columns if column.kind is Kind.NUMBERS]
    if numbers and draw(st.booleans()):
        columns = [Column(c.name, Kind.IDS, weights=numbers[0]) if c.kind is Kind.IDS else c for c in columns]
    return Schema(tuple(columns))


@given(schemas())
def test_toml_there_and_back(schema: Schema) -> None:
    assert Schema.from_toml(schema.to_toml()) == schema
    assert Schema.from_dict(schema.to_dict()) == schema


def test_toml_is_one_line_a_column() -> None:
    assert SHOP.with_words(history="seen").to_toml() == (
        "[columns]\n"
        '"user" = { kind = "user" }\n'
        '"item" = { kind = "candidate", encoding = "hash", size = 1000 }\n'
        '"ad" = { kind = "id" }\n'
        '"seen" = { kind = "ids", table = "item", encoding = "hash", size = 1000, separator = "|" }\n'
        '"amounts" = { kind = "numbers" }\n'
        '"price" = { kind = "number" }\n'
        '"click" = { kind = "label" }\n'
        '"buy" = { kind = "number" }\n'
        '"when" = { kind = "time" }\n'
        '"created" = { kind = "unused" }\n'
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a = ", "no TOML (Invalid value (at end of document)), expected a table [columns]"),
        ("", "the keys [], expected one table, [columns]"),
        ("columns = 3", "the keys ['columns'], expected one table, [columns]"),
        (
            f"a = {'9' * 5_000}",
            "no TOML (Exceeds the limit (4300 digits) for integer string conversion: value has 5000 digits; use "
            "sys.set_int_max_str_digits() to increase the limit), expected a table [columns]",
        ),
        (f"a = {'[' * 100_000}", "no TOML (maximum recursion depth exceeded), expected a table [columns]"),
        (f"{'.'.join('a' * 100_000)} = 1", "a line with 99999 dots, expected a table [columns], at most 1000 dots a line"),
        ("[columns]\n[more]", "the keys ['columns', 'more'], expected one table, [columns]"),
    ],
    ids=range(7),
)
def test_a_text_that_is_no_schema_is_refused(text: str, expected: str) -> None:
    with pytest.raises(DataError) as error:
        Schema.from_toml(text, "s.toml")
    assert str(error.value) == f"s.toml: found {expected}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a = 3", "3"),
        ("a = { table = 'b' }", "{'table': 'b'}"),
        ("a = { kind = 'id', colour = 1, flavour = 2 }", "the keys ['colour', 'flavour']"),
    ],
)
def test_an_entry_that_is_no_column_is_refused(text: str, expected: str) -> None:
    with pytest.raises(DataError) as error:
        Schema.from_toml(f"[columns]\n{text}", "s.toml")
    rest = "a kind and of encoding, of, positive_from, separator, size, table, weights what is needed"
    assert str(error.value) == f"s.toml: schema, column 'a': found {expected}, expected {rest}"


def test_a_schema_is_saved_and_loaded(tmp_path: Path) -> None:
    path = tmp_path / "schema.toml"
    SHOP.save(path)
    assert Schema.load(path) == SHOP
    SHOP.with_words(label="buy").save(str(path))
    assert kinds(Schema.load(str(path)))["buy"] == "label"


def test_what_is_no_schema_is_neither_loaded_nor_replaced(tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_bytes(b"seed = 1 # \xff")
    expected = f"{other}: found bytes that are not UTF-8, expected TOML with a table [columns]"
    with pytest.raises(DataError, match=f"^{re.escape(expected)}$"):
        Schema.load(other)
    expected = f"{other}: found a file that holds no schema, expected a schema or no file; name another file"
    with pytest.raises(DataError, match=f"^{re.escape(expected)}$"):
        SHOP.save(other)
    assert other.read_bytes() == b"seed = 1 # \xff"
    missing = tmp_path / "missing" / "s.toml"
    with pytest.raises(DataError, match=f"^{re.escape(f'{missing}: cannot be read: No such file or directory')}$"):
        Schema.load(missing)
    expected = f"{missing}: could not be written: No such file or directory; name another file"
    with pytest.raises(DataError, match=f"^{re.escape(expected)}$"):
        SHOP.save(missing)


def test_a_label_is_1_from_a_value_on(tmp_path: Path) -> None:
    """Ratings as a table has them; the threshold itself counts, and what is missing stays missing."""
    ratings = [1, 3.9, 4.1, None, 5, 4.0]
    table = pa.table({"user": list("aabbcc"), "item": list("xyzxyz"), "rating": pa.array(ratings, pa.float64())})
    dataset = Dataset.from_table(table, label="rating>=4.1", user="user", candidate="item", progress=False)
    by_row = dict(zip(dataset.source.tolist(), dataset.column("rating").tolist(), strict=True))
    assert [None if math.isnan(by_row[row]) else by_row[row] for row in range(6)] == [0, 0, 1, None, 1, 0]
    assert dataset.schema["rating"] == Column("rating", Kind.LABEL, positive_from=4.1)
    dataset.schema.save(tmp_path / "schema.toml")
    assert '"rating" = { kind = "label", positive_from = 4.1 }' in (tmp_path / "schema.toml").read_text()
    assert Schema.load(tmp_path / "schema.toml") == dataset.schema
    # A column of such a name is meant as it stands.
    plain = Schema((Column("a>=2", Kind.NUMBER),)).with_words(label="a>=2")
    assert plain["a>=2"] == Column("a>=2", Kind.LABEL)
    text = pa.table({"rating": ["3", "true", " 4.1 ", "n/a"], "user": list("abcd")})
    column = Dataset.from_table(text, label="rating>=1", user="user", progress=False).column("rating")
    assert np.array_equal(column, [1, 1, 1, np.nan], equal_nan=True)
    for word, told in (("rating>=high", "'high'"), ("rating>=nan", "'nan'"), ("rating>=", "''")):
        with pytest.raises(DataError) as error:
            dataset.schema.with_words(label=word)
        assert str(error.value) == (f"label={word!r}: found {told}, expected a finite number behind >=, as in 'rating>=4'")
    with pytest.raises(DataError) as error:
        Column("price", Kind.NUMBER, positive_from=3)
    assert str(error.value) == "schema, column 'price': found positive_from for a column of kind number, expected kind label"


def test_labels_that_are_0_and_1_already_have_no_threshold() -> None:
    """A dataset gives its rows back with the labels as they are stored; read by its own schema all of them would be 0."""
    table = pa.table({"user": list("aabb"), "item": list("xyxy"), "time": range(4), "rating": [1, 5, 4, None]})
    words = {"user": "user", "candidate": "item", "time": "time"}
    dataset = Dataset.from_table(table, label="rating>=4", progress=False, **words)
    told = "other values, as it is 1 from 4 on; give the values that it was made from, or leave the threshold out"
    for options in ({}, {"events": pa.table(dataset), "event_schema": dataset.schema, "event_labels": "rating"}):
        source = table if options else pa.table(dataset)
        with pytest.raises(DataError) as error:
            Dataset.from_table(source, dataset.schema, progress=False, **options)
        assert str(error.value).endswith(f": label 'rating': found 0 and 1 alone, expected {told}")
    # From 1 on it is what it was; and one that is missing in all rows says nothing.
    again = Dataset.from_table(pa.table(dataset), label="rating>=1", progress=False, **words)
    assert np.array_equal(again.column("rating"), dataset.column("rating"), equal_nan=True)
    empty = table.set_column(3, "rating", pa.array([None] * 4, pa.float64()))
    assert np.isnan(Dataset.from_table(empty, label="rating>=4", progress=False, **words).column("rating")).all()
