"""Small tables with everything that can be odd about them, drawn by hypothesis, and what the tests ask of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

from jagged.data.records import Dataset
from jagged.data.schema import Column, Kind, Schema
from tests.data.brute_force import Row

TYPES = {
    "user": pa.int64(),
    "item": pa.string(),
    "time": pa.int64(),
    "request": pa.string(),
    "place": pa.int64(),
    "kind": pa.string(),
    "items": pa.list_(pa.string()),
    "price": pa.float64(),
    "sizes": pa.list_(pa.float64()),
    "click": pa.int64(),
}
SCHEMA = Schema(
    (
        Column("user", Kind.USER),
        Column("item", Kind.CANDIDATE),
        Column("time", Kind.TIME),
        Column("request", Kind.REQUEST),
        Column("place", Kind.ID),
        Column("kind", Kind.EVENT),
        Column("items", Kind.IDS, table="item"),
        Column("price", Kind.NUMBER),
        Column("sizes", Kind.NUMBERS),
        Column("click", Kind.LABEL),
    )
)


def or_none(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(st.none(), values)


VALUES = {
    "user": or_none(st.sampled_from([7, -3, 2**62])),
    "item": or_none(st.sampled_from("abcd")),
    "time": st.integers(-3, 6),
    "request": or_none(st.sampled_from("rst")),
    "place": or_none(st.integers(0, 2)),
    "kind": or_none(st.sampled_from(["view", "buy"])),
    "items": or_none(st.lists(or_none(st.sampled_from("abxy")), max_size=3)),
    "price": or_none(st.sampled_from([0.1, -2.0, 5.5, float("nan"), 1e30])),
    "sizes": or_none(st.lists(or_none(st.sampled_from([0.5, 3.0])), max_size=2)),
    "click": or_none(st.integers(0, 1)),
}


@st.composite
def tables(draw: st.DrawFn, least: int = 0) -> list[Row]:
    """Rows in any order of time, some of them twice, some columns without any value; most of the tables have `least` or more."""
    empty = draw(st.sets(st.sampled_from([name for name in VALUES if name != "time"]), max_size=2))
    one_user = draw(st.booleans())
    values = {name: st.none() if name in empty else of for name, of in VALUES.items()}
    if one_user and "user" not in empty:
        values["user"] = st.just(7)
    rows = draw(st.lists(st.fixed_dictionaries(values), min_size=draw(st.sampled_from([0, least, least])), max_size=12))
    for _ in range(draw(st.integers(0, 3)) if rows else 0):
        rows.insert(draw(st.integers(0, len(rows))), dict(draw(st.sampled_from(rows))))
    # NaN and None are one missing number here and two values of a column; equal rows are told by one of them.
    return [{**row, "price": None if row["price"] != row["price"] else row["price"]} for row in rows]


def arrow(rows: list[Row], types: dict[str, pa.DataType] = TYPES) -> pa.Table:
    return pa.table({name: pa.array([row[name] for row in rows], kind) for name, kind in types.items()})


def made(rows: Sequence[Row], schema: Schema = SCHEMA, **options: Any) -> Dataset:
    return Dataset.from_table(arrow(list(rows)), schema, progress=False, **options)


def table_of(count: int) -> list[Row]:
    generator = np.random.default_rng(0)
    return [
        {
            "user": int(generator.integers(8)), "item": f"i{generator.integers(6)}", "time": i, "request": None,
            "place": int(generator.integers(3)), "kind": "view", "items": [f"i{generator.integers(9)}"], "price": float(i),
            "sizes": [float(i)], "click": i % 2,
        }
        for i in range(count)
    ]  # fmt: skip


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
