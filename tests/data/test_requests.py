"""Requests with candidates: how rows are grouped, whose columns are, and where they stand in a batch, by definition over rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from jagged.data import DataError
from jagged.data.records import Dataset
from jagged.data.schema import Column, Kind, Schema
from jagged.data.table_batches import Part
from tests.conftest import EXAMPLES
from tests.data import brute_force as slow
from tests.data.points import SCHEMA, arrow, tables

FEATURES = ("place", "kind", "items", "price", "sizes")


def grouped(rows: Iterable[int], table: list[slow.Row]) -> list[list[int]]:
    """Rows of a request and user together, in the order of their first rows."""
    found: dict[Any, list[int]] = {}
    for row in rows:
        request = table[row]["request"]
        found.setdefault(("alone", row) if request is None else (request, table[row]["user"]), []).append(row)
    return list(found.values())


def listed(value: Any) -> list[Any]:
    return [None] if value is None else value


def told(features: KeyedJaggedTensor | None, key: str) -> list[list[float]]:
    assert features is not None
    one = features[key]
    return [values.tolist() for values in one.values().split(one.lengths().tolist())]


@settings(max_examples=EXAMPLES // 4)
@given(table=tables(least=4), history=st.booleans(), by=st.sampled_from(["user", "time"]))
def test_batches_are_of_requests(table: list[slow.Row], history: bool, by: str) -> None:
    dataset = Dataset.from_table(arrow(table), SCHEMA, duplicates="keep", history="events" if history else None, progress=False)
    try:
        split = dataset.split(by=by, valid=0.0, test=0.3, minimum_counts=1)
    except DataError:
        assume(False)
    everything = grouped(dataset.source.tolist(), table)
    of_candidate = {name for name in FEATURES if any(len({repr(table[row][name]) for row in group}) > 1 for group in everything)}
    assert {one.name for one in dataset.schema.columns if one.of == "candidate"} == of_candidate
    request_ids = {"user", "place", "kind", "items"} - of_candidate
    read = {SCHEMA[name].table_name for name in request_ids} | ({"item", "place", "kind"} if history else set())
    ids = ("item", "place", "kind", "items")
    shared = [name for name in ids if name in of_candidate | {"item"} and SCHEMA[name].table_name in read]
    for part in (split.train, split.test):
        groups = grouped(dataset.source[part.rows].tolist(), table)
        chosen = np.random.default_rng(0).permutation(len(groups))
        batch = part.gather(chosen)
        groups = [groups[place] for place in chosen]
        first, own = [group[0] for group in groups], [row for group in groups for row in group]
        assert (len(part), len(batch)) == (len(groups), len(groups))
        assert dataset.source[batch.request_index.numpy()].tolist() == first
        assert dataset.source[batch.rows.numpy()].tolist() == own
        assert batch.candidate_offsets.diff().tolist() == [len(group) for group in groups]
        assert batch.candidate_requests.tolist() == [place for place, group in enumerate(groups) for _ in group]
        # Each candidate with each id of its request.
        places = batch.candidate_requests
        assert batch.pairs == {key: int(of.lengths()[places].sum()) for key, of in batch.features.to_dict().items()}
        assert batch.candidate_pairs == int(batch.candidate_offsets.diff()[places].sum())
        assert batch.labels[:, 0].tolist() == [float(table[row]["click"] or 0) for row in own]
        assert batch.request_times is not None
        assert batch.request_times.tolist() == [table[row]["time"] for row in first]

        def number(name: str, value: Any, part: Part = part) -> int:
            return int(part.maps[SCHEMA[name].table_name][1 + int(number_of(dataset, name, value))])

        keys = [name for name in ("user", "item", "place", "kind", "items") if name in (*request_ids, *shared)]
        assert batch.features.keys() == keys + (["history.item", "history.place", "history.kind"] if history else [])
        for name in keys:
            if name == "items" and name in shared:
                # The lists of all candidates as one, which offsets cut again.
                lists_ = [[[number(name, one) for one in listed(table[row][name])] for row in group] for group in groups]
                assert told(batch.features, name) == [[one for list_ in of_group for one in list_] for of_group in lists_]
                assert batch.candidate_list_offsets is not None
                counts = batch.candidate_list_offsets[:, 0].diff().tolist()
                assert counts == [len(list_) for of_group in lists_ for list_ in of_group]
            elif name in shared:
                assert told(batch.features, name) == [[number(name, table[row][name]) for row in group] for group in groups]
            else:
                wanted = [
                    [number(name, one) for one in (listed(table[row][name]) if name == "items" else [table[row][name]])]
                    for row in first
                ]
                assert told(batch.features, name) == wanted
        assert (batch.candidate_list_offsets is not None) == ("items" in shared)
        others = [name for name in ids if name in of_candidate | {"item"} and name not in shared]
        assert (batch.candidates is None) == (not others)
        if batch.candidates is not None:
            assert batch.candidates.keys() == others
        for name in others:
            values = [listed(table[row][name]) if name == "items" else [table[row][name]] for row in own]
            assert told(batch.candidates, name) == [[number(name, one) for one in value] for value in values]
        assert batch.candidate_ids("item").tolist() == [number("item", table[row]["item"]) for row in own]
        mean = np.float32(part.encoders.statistics["price"].mean)
        sides = {False: (batch.request_numbers, first), True: (batch.candidate_numbers, own)}
        numbers, of = sides["price" in of_candidate]
        assert numbers.tolist() == [
            [float(mean if table[row]["price"] is None else np.float32(table[row]["price"]))] for row in of
        ]
        assert sides["price" not in of_candidate][0].shape == (len(sides["price" not in of_candidate][1]), 0)
        lists = {False: batch.request_number_lists, True: batch.candidate_number_lists}
        assert lists["sizes" not in of_candidate] is None
        of = own if "sizes" in of_candidate else first
        assert [len(one) for one in told(lists["sizes" in of_candidate], "sizes")] == [
            len(listed(table[row]["sizes"])) for row in of
        ]


def number_of(dataset: Dataset, name: str, value: Any) -> int:
    return -1 if value is None else int(dataset.ids(SCHEMA[name].table_name).encode([value])[0])


ROWS = pa.table(
    {
        "request": [1, 1, 2, 2, None],
        "user": ["a", "a", "b", "b", "b"],
        "item": ["x", "y", "x", "z", "y"],
        "time": [1, 1, 2, 2, 3],
        "device": ["d", "d", "e", "e", "d"],
        "price": [1.0, 2.0, 1.0, 3.0, 2.0],
        "click": [1, 0, 0, 1, 1],
    }
)
COLUMNS = Schema(
    (
        Column("request", Kind.REQUEST),
        Column("user", Kind.USER),
        Column("item", Kind.CANDIDATE),
        Column("time", Kind.TIME),
        Column("device", Kind.ID),
        Column("price", Kind.NUMBER),
        Column("click", Kind.LABEL),
    )
)


def test_columns_are_named() -> None:
    found = Dataset.from_table(ROWS, COLUMNS, candidate_columns="device", progress=False).schema
    assert {one.name: one.of for one in found.columns if one.of} == {"device": "candidate", "price": "candidate"}
    assert Schema.from_toml(found.to_toml()) == found


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            {"request_columns": ["device", "price"]},
            "Table, column 'price': found several values in each of 2 requests, expected one in each, as of request_columns; "
            "leave it out there",
        ),
        (
            {"candidate_columns": "age"},
            "candidate_columns='age': found the columns ['request', 'user', 'item', 'time', 'device', 'price', 'click'], "
            "expected a column 'age'",
        ),
        (
            {"request_columns": "click"},
            "request_columns='click': found a column of kind label, expected a feature, of ids or numbers",
        ),
        (
            {"candidate_columns": "price", "request_columns": ["device", "price"]},
            "request_columns='price': found the column in candidate_columns too, expected it in one of them",
        ),
    ],
)
def test_columns_that_do_not_fit_are_refused(words: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as caught:
        Dataset.from_table(ROWS, COLUMNS, progress=False, **words)
    assert str(caught.value) == message


def test_a_request_without_a_number_is_one_row_and_a_loader_counts_requests() -> None:
    dataset = Dataset.from_table(ROWS, COLUMNS, history="events", progress=False)
    part = dataset.split(by="user", valid=0.0, test=0.0).train
    assert (len(part), repr(part)) == (3, "Part(3 requests, 5 of 5 rows)")
    batches = list(part.loader(batch_size=2))
    assert [batch.candidate_offsets.tolist() for batch in batches] == [[0, 2, 4], [0, 1]]
    assert len(part.loader(batch_size=2)) == 2
    with pytest.raises(KeyError):
        batches[0].candidate_ids("click")
    assert isinstance(batches[0], Pipelineable)
    assert torch.equal(batches[0].user_index, torch.tensor([0, 1]))
