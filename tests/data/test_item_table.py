"""Side features of items: what of a table is read, as a loop over its rows would find it, and what is refused."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jagged.data import DataError, ItemTable, Vocabulary, read_item_table

ITEMS = Vocabulary(["d", "a", "b", "x", "c"])
TABLE = """item,title,genres,year,price,brand,vector,same
a,The One,Action|Comedy,1999,3.5,acme,"[1.0, 0.5]",7
b,The Two,Comedy|Action|Action,2001,4.5,acme,"[2.0, 0.5]",7
c,The Three,,1999,,zed,,7
d,The Four,Drama,1987,1000,,"[0.0, 2.0]",7
other,Nine,Drama,1987,10,zed,"[0.0, 9.0]",8
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "items.csv").write_text(TABLE)
    return tmp_path / "items.csv"


def read(source: Any, items: Vocabulary = ITEMS, **options: Any) -> ItemTable:
    return read_item_table(source, items, progress=False, **{"item_column": "item", **options})


def sets_of(table: ItemTable, name: str) -> list[list[int]]:
    """The values of each item, and of what is none."""
    of = table.ids[name]
    return [of.values[of.offsets[at] : of.offsets[at + 1]].tolist() for at in of.set_of_item.tolist()]


def test_what_a_table_says_of_the_catalogue(path: Path) -> None:
    table = read(path)
    assert list(table.ids) == ["genres", "brand"]
    # Drama and zed stand at one item of the catalogue alone, titles at each once.
    assert sets_of(table, "genres") == [[], [0, 1], [0, 1], [], [], []]
    assert sets_of(table, "brand") == [[], [0], [0], [], [], []]
    assert [len(of.offsets) - 1 for of in table.ids.values()] == [2, 2]
    assert table.number_names == ("year", "price", "vector.0", "vector.1")
    for name, values in (("year", [1987, 1999, 2001, None, 1999]), ("vector.0", [0, 1, 2, None, None])):
        own = np.array([value for value in values if value is not None], np.float64)
        expected = [0.0 if value is None else (value - own.mean()) / own.std() for value in values]
        found = table.numbers[:, table.number_names.index(name)]
        torch.testing.assert_close(found, torch.tensor([*expected, 0.0], dtype=torch.float32))
    assert (table.num_items, table.without_row) == (5, 1)
    assert table.notes == {
        "item_features": ["genres (2 values)", "brand (1 values)", "year", "price", "vector.0", "vector.1"],
        "items_without_row": 1,
        "item_columns_not_used": ["title: no value that two items have", "same: one number for all items"],
    }


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 9),
            st.none() | st.lists(st.none() | st.sampled_from("uvwxyz"), max_size=5),
            st.none() | st.integers(-3, 3),
        ),
        min_size=2,
        max_size=12,
        unique_by=lambda row: row[0],
    )
)
def test_agrees_with_a_loop_over_rows(rows: list[tuple[int, list[str | None] | None, int | None]]) -> None:
    items = Vocabulary([3, 1, 4, 15, 9, 2, 6])
    known = {item: (tags, number) for item, tags, number in rows if items.encode([item])[0] >= 0}
    names = [{tag for tag in tags or [] if tag is not None} for tags, _ in known.values()]
    shared = {tag for tag in "uvwxyz" if sum(tag in of for of in names) > 1}
    present = [number for _, number in known.values() if number is not None]
    source = pa.table({
        "item": pa.array([item for item, _, _ in rows], pa.int64()),
        "tags": pa.array([tags for _, tags, _ in rows], pa.list_(pa.string())),
        "number": pa.array([number for _, _, number in rows], pa.float64()),
    })  # fmt: skip
    if not shared and len(set(present)) < 2:
        with pytest.raises(DataError):
            read(source, items)
        return
    table = read(source, items)
    assert ("tags" in table.ids) == bool(shared)
    if shared:
        found = sets_of(table, "tags")
        assert found[-1] == []
        # Numbers of values are free, which items share them is not.
        of_item = {item: {tag for tag in tags or [] if tag in shared} for item, (tags, _) in known.items()}
        named: dict[int, set[str]] = {}
        for item, values in zip(items.ids.to_pylist(), found, strict=False):
            assert len(values) == len(set(values)) == len(of_item.get(item, set()))
            for value in values:
                named.setdefault(value, set(of_item[item])).intersection_update(of_item[item])
        for value, tags in named.items():
            holders = {item for item, values in zip(items.ids.to_pylist(), found, strict=False) if value in values}
            assert any(holders == {item for item in of_item if tag in of_item[item]} for tag in tags)
    assert table.number_names == (("number",) if len(set(present)) > 1 else ())
    if len(set(present)) > 1:
        mean = sum(present) / len(present)
        deviation = math.sqrt(sum((one - mean) ** 2 for one in present) / len(present))
        numbers = [known.get(item, (None, None))[1] for item in items.ids.to_pylist()]
        expected = [0.0 if one is None else (one - mean) / deviation for one in numbers]
        torch.testing.assert_close(table.numbers[:, 0], torch.tensor([*expected, 0.0], dtype=torch.float32))
    assert table.without_row == len(items) - len(known)


def test_is_read_again_as_it_was_saved(path: Path, tmp_path: Path) -> None:
    table = read(path)
    table.save(tmp_path / "kept")
    again = ItemTable.load(tmp_path / "kept")
    assert again.notes == table.notes
    assert torch.equal(again.numbers, table.numbers)
    for name, of in table.ids.items():
        assert again.ids[name].num_values == of.num_values
        for part in ("set_of_item", "offsets", "values"):
            assert torch.equal(getattr(again.ids[name], part), getattr(of, part))
    (tensors,) = (tmp_path / "kept").glob("*.safetensors")
    tensors.write_bytes(tensors.read_bytes()[:-1] + b"?")
    with pytest.raises(DataError, match=re.escape(str(tensors))):
        ItemTable.load(tmp_path / "kept")


def test_columns_are_chosen(path: Path) -> None:
    """Others are not looked at, whatever stands in them."""
    table = read(path, columns=["price", "brand"])
    assert (list(table.ids), table.number_names, table.left_out) == (["brand"], ("price",), ())
    path.write_text(TABLE.replace("1999", "soon", 1).replace(",7\n", ",x\n", 1))
    assert read(path, columns=["price", "brand"]).notes == table.notes


def test_no_column_goes_by_its_name(tmp_path: Path) -> None:
    """What is a user, an event, a label or a weight of other tables is a feature here; of others the notes say why not."""
    names = ["user_id", "session_id", "event_type", "action", "weight", "label", "click", "rating", "is_new", "product"]
    lines = [",".join(["item", *names, "released"])]
    for place, item in enumerate("abcd"):
        lines.append(",".join([item, *(f"{place % 2 + 1}" for _ in names), f"20{10 + place}-01-02"]))
    (tmp_path / "items.csv").write_text("\n".join(lines))
    table = read(tmp_path / "items.csv")
    told = {*table.ids, *table.number_names, *(reason.split(":")[0] for reason in table.left_out)}
    assert told == {*names, "released"}
    assert table.left_out == ("released: times are no features",)
    with pytest.raises(DataError) as error:
        read(tmp_path / "items.csv", columns=["released"])
    message = f"{tmp_path}/items.csv: found the feature 'released', times are no features, expected one of ["
    assert str(error.value).startswith(message)


def test_rows_that_are_equal_are_one_and_lists_may_all_be_missing(tmp_path: Path) -> None:
    source = pa.table({
        "item": ["a", "b", "a"],
        "brand": ["u", "u", "u"],
        "vector": pa.nulls(3, pa.list_(pa.float32())),
    })  # fmt: skip
    table = read(source)
    assert sets_of(table, "brand") == [[], [0], [0], [], [], []]
    assert table.left_out == ("vector: one number for all items",)
    # A reader gives its rows once.
    assert read(source.to_reader()).notes == table.notes
    twice = pa.table({"item": ["a", "b"], "v": [[1.0, 2.0], [2.0, 3.0]], "v.0": [5.0, 6.0]})
    with pytest.raises(DataError) as error:
        read(twice)
    assert str(error.value) == (
        "items: found two numbers called 'v.0', of a list and of a column, expected names that differ; rename one"
    )


@pytest.mark.parametrize(
    ("table", "options", "message"),
    [
        ("item,brand\na,u\nb,u\na,v\n", {}, "2 rows of the item 'a', expected one for each item; keep one of them"),
        (
            "item,brand\np,u\nq,u\n",
            {},
            "no item of the 5 of the events, expected their ids in the column 'item'; name the column of the items' ids with "
            "item_column=...",
        ),
        (
            "item,brand\na,u\nb,v\n",
            {},
            "no column that says something (brand: no value that two items have), expected ids that items share, or numbers that "
            "differ",
        ),
        (
            "sku,brand\na,u\nb,u\n",
            {},
            "the columns ['sku', 'brand'], expected a column 'item' with the items' ids; name yours with item_column=...",
        ),
        ("item,brand\na,u\nb,u\n", {"columns": ["brands"]}, "the feature 'brands', expected one of ['brand']"),
        (
            'item,vector\na,"[1.0, 2.0]"\nb,"[1.0, 2.0, 3.0]"\n',
            {},
            "lists of 2 to 3 numbers in the column 'vector', expected as many for each item; leave the column out",
        ),
        (
            "brand,size\nu,3.5\nu,4.5\n",
            {"item_column": None},
            "the columns ['brand', 'size'], expected one with the items' ids; name yours with item_column=...",
        ),
    ],
)
def test_what_is_refused(tmp_path: Path, table: str, options: dict[str, Any], message: str) -> None:
    (tmp_path / "items.csv").write_text(table)
    with pytest.raises(DataError) as error:
        read(tmp_path / "items.csv", **options)
    assert str(error.value) == f"{tmp_path}/items.csv: found {message}"
