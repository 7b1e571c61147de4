"""A dataset's rows as Arrow, against the table that they come from; and the events that SASRec trains on."""

from __future__ import annotations

from datetime import UTC, datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings

import jagged
from jagged.data import DataError, read_events, rows
from jagged.data.records import Dataset
from jagged.data.schema import Kind
from tests.conftest import EXAMPLES
from tests.data import brute_force as slow
from tests.data.points import SCHEMA, arrow, tables
from tests.training.support import tiny_config

FLOATS = (Kind.NUMBER, Kind.LABEL, Kind.NUMBERS)


def single(value: Any) -> Any:
    """A number as it is stored."""
    if isinstance(value, list):
        return [single(one) for one in value]
    return None if value is None or value != value else float(np.float32(value))


@settings(max_examples=EXAMPLES // 4)
@given(table=tables())
def test_rows_are_those_of_the_table(table: list[slow.Row]) -> None:
    dataset = Dataset.from_table(arrow(table), SCHEMA, duplicates="keep", progress=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "_ROWS", 3)
        found = pa.table(dataset)
    assert found.column_names == list(SCHEMA.names)
    for column in SCHEMA.columns:
        values = [table[i][column.name] for i in dataset.source]
        if column.kind in FLOATS:
            values = [single(value) for value in values]
        if column.kind is not Kind.REQUEST:
            assert found[column.name].to_pylist() == [None if value == [None] else value for value in values]
    requests = list(zip(found["request"].to_pylist(), (table[i]["request"] for i in dataset.source), strict=True))
    assert len(set(requests)) == len({number for number, _ in requests}) == len({name for _, name in requests})
    again = Dataset.from_table(found, SCHEMA, duplicates="keep", progress=False)
    assert pa.table(again).drop_columns("request") == found.drop_columns("request")


@pytest.mark.parametrize("zone", [None, UTC])
def test_times_are_times(zone: timezone | None) -> None:
    moments = [datetime(2024, 1, day, 12, tzinfo=zone) for day in (3, 1)]
    frame = pa.table({"user_id": ["a", "a"], "item_id": [1, 2], "timestamp": moments})
    found = pa.table(Dataset.from_table(frame, progress=False))
    assert found["timestamp"].to_pylist() == moments[::-1]
    assert found["item_id"].to_pylist() == [2, 1]


def shop(*, missing: int = 0) -> pa.Table:
    rng = np.random.default_rng(0)
    items = [None if i < missing else f"i{item}" for i, item in enumerate(rng.integers(20, size=600))]
    return pa.table(
        {
            "visitor": rng.integers(30, size=600),
            "item_id": items,
            "timestamp": 1_700_000_000 + rng.permutation(600),
            "tags": [["a", "b"][: i % 3] for i in range(600)],
            "click": rng.integers(2, size=600),
        }
    )


def test_events_of_a_table_with_labels_are_its_positive_rows() -> None:
    frame = shop()
    dataset = Dataset.from_table(frame, user="visitor", label="click", progress=False)
    for label, chosen in (("click", frame.filter(pc.equal(frame["click"], 1))), ("", frame)):
        found = dataset.sequences(label)
        expected = read_events(chosen, user_column="visitor", progress=False)
        assert found.num_users == expected.num_users
        for user in expected.users.ids:
            times = []
            for one in (found, expected):
                place = int(one.users.encode([user.as_py()])[0])
                of_user = slice(int(one.offsets[place]), int(one.offsets[place + 1]))
                times.append((one.items.ids.take(pa.array(one.item_ids[of_user].numpy())), one.timestamps[of_user].tolist()))
            assert times[0] == times[1]


def test_sasrec_trains_on_a_dataset(tmp_path: Path) -> None:
    dataset = Dataset.from_table(shop().drop_columns("click"), user="visitor", progress=False)
    config = tiny_config(tmp_path / "run", max_epochs=1)
    assert "ndcg@10" in jagged.train(config, dataset, progress=False).metrics.test.all_items
    assert jagged.evaluate(tmp_path / "run", dataset, device="cpu", progress=False).metrics["all_items"]["ndcg@10"] > 0


@pytest.mark.parametrize(
    ("frame", "label", "message"),
    [
        (
            shop(),
            None,
            "label: found none, expected one of ['click', '']; label=\"click\" takes the rows in which it is above 0, "
            'label="" takes all',
        ),
        (shop().drop_columns("click"), "click", "label: found 'click', expected one of ['']; leave label out"),
        (
            shop(missing=3),
            "",
            "dataset: found 3 of 600 rows without visitor or item_id, expected both in each; "
            'on_error="skip" leaves them out, where they are few',
        ),
        (
            shop().drop_columns("timestamp"),
            "",
            "dataset: found columns of the kinds ['user', 'candidate', 'ids', 'label'], "
            "expected a user, a candidate and a time among them",
        ),
    ],
    ids=["none named", "no labels", "missing ids", "no times"],
)
def test_what_makes_no_events_is_refused(frame: pa.Table, label: str | None, message: str) -> None:
    words = {"label": "click"} if "click" in frame.column_names else {}
    dataset = Dataset.from_table(frame, user="visitor", **words, progress=False)
    with pytest.raises(DataError) as caught:
        dataset.sequences(label)
    assert str(caught.value) == message


def test_few_rows_without_ids_are_left_out() -> None:
    found = Dataset.from_table(shop(missing=3), user="visitor", label="click", progress=False).sequences("", on_error="skip")
    assert found.num_events == 597
    assert found.notes["skipped_rows"] == 3
