from __future__ import annotations

import io
import re
import sys
import time
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from jagged.data import DataError, inspect_table, progress
from jagged.data.progress import steps
from jagged.data.records import Dataset


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    # Called in a test: pytest puts its own in this place before each one.
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr(progress, "DELAY", 1e-9)
    return shown


ROWS = pa.table({"user_id": [1, 1, 2], "item_id": [5, 6, 5], "timestamp": [1, 2, 3], "part": ["train", "valid", "test"]})
EVENTS = pa.table({"user_id": [1], "item_id": [7], "timestamp": [0], "event_type": ["click"], "cost": [0.5]})


def last(terminal: Terminal, doing: str) -> tuple[str, str]:
    """Steps done and steps in all, in the last picture of a bar."""
    found = re.findall(rf"{doing}: [^\r]*? (\d+)/(\d+) ", terminal.getvalue())
    return found[-1]


def told(terminal: Terminal, doing: str) -> list[str]:
    """The names of a bar's steps, in the order of their pictures."""
    return list(dict.fromkeys(re.findall(rf"{doing}: ([^\r]*?):  ", terminal.getvalue())))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"history": "events", "split": "part"},
        {"events": EVENTS, "event_types": "click", "duplicates": "keep"},
        {"events": EVENTS, "min_events": {"user": 1}},
    ],
)
def test_building_shows_every_step_and_ends_with_the_last(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    terminal = on_terminal(monkeypatch)
    Dataset.from_table(ROWS, **options)
    done, total = last(terminal, "Building")
    assert done == total
    assert "Building: column timestamp" in terminal.getvalue()
    # Nothing is left on the line.
    assert terminal.getvalue().endswith("\r")
    assert terminal.getvalue().split("\r")[-2].strip() == ""


@pytest.mark.parametrize("by", ["time", "user", "column", "leave-one-out"])
@pytest.mark.parametrize(("options", "names"), [({"history": "events"}, []), ({"events": EVENTS}, ["cost"])])
def test_splitting_and_checking_show_every_step_and_end_with_the_last(
    monkeypatch: pytest.MonkeyPatch, by: str, options: dict[str, Any], names: list[str]
) -> None:
    tall = pa.concat_tables([ROWS] * 4).append_column("price", pa.array(np.arange(12.0)))
    tall = tall.set_column(0, "user_id", pa.array(np.arange(12) // 4)).set_column(2, "timestamp", pa.array(np.arange(12)))
    dataset = Dataset.from_table(tall, split="part", progress=False, **options)
    terminal = on_terminal(monkeypatch)
    split = dataset.split(by, valid=0.3, test=0.3)
    done, total = last(terminal, "Splitting")
    assert done == total
    # In the order of what is done, each once.
    tables = ["user_id", "item_id", *(["event_type"] if names else [])]
    statistics = [f"statistics of {name}" for name in ("price", *names)]
    of_tables = [f"ids of {name}" for name in tables]
    assert told(terminal, "Splitting") == [
        f"by {by}", "what training sees", *of_tables, *statistics, "numbers of the ids",
    ]  # fmt: skip
    split.leaks()
    done, total = last(terminal, "Checking")
    assert done == total
    assert told(terminal, "Checking") == [
        "rows in two parts", "requests in two parts", "histories that reach too far", "what training sees", *of_tables,
        *statistics,
    ]  # fmt: skip
    assert terminal.getvalue().split("\r")[-2].strip() == ""


@pytest.mark.parametrize("by", ["uniform", "popularity"])
def test_making_ready_to_draw_negatives_shows_its_steps(monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    tall = pa.concat_tables([ROWS.select(["user_id", "item_id", "timestamp"])] * 4)
    tall = tall.set_column(2, "timestamp", pa.array(np.arange(12)))
    split = Dataset.from_table(tall, progress=False).split(valid=0.0, test=0.3, progress=False)
    terminal = on_terminal(monkeypatch)
    split.train.loader(batch_size=2, negatives=1, by=by, progress=False)
    assert terminal.getvalue() == ""
    split.test.loader(batch_size=2, negatives=1, by=by)
    done, total = last(terminal, "Preparing negatives")
    assert done == total
    assert told(terminal, "Preparing negatives") == [
        "events by time", "when items came", "what users have had", "which pairs there are",
        *(["events by item"] if by == "popularity" else []),
    ]  # fmt: skip
    assert terminal.getvalue().split("\r")[-2].strip() == ""


def test_a_split_that_cannot_be_leaves_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = Dataset.from_table(ROWS, progress=False)
    terminal = on_terminal(monkeypatch)
    with pytest.raises(DataError, match="change the shares, or split otherwise"):
        dataset.split("user", valid=0.0, test=0.1)
    assert told(terminal, "Splitting") == ["by user"]
    assert terminal.getvalue().split("\r")[-2].strip() == ""


def test_inspecting_shows_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    inspect_table(ROWS)
    assert last(terminal, "Inspecting") == ("7", "7")
    assert "Inspecting: column item_id" in terminal.getvalue()


def test_one_long_step_is_shown_while_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    monkeypatch.setattr(progress, "DELAY", 0.2)
    monkeypatch.setattr(progress, "INTERVAL", 0.01)
    with steps("Doing", 2, True) as step:
        step("the first")
        assert terminal.getvalue() == ""
        deadline = time.monotonic() + 20
        while "Doing: the first" not in terminal.getvalue():
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_what_is_quick_or_unasked_or_no_terminal_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    dataset = Dataset.from_table(ROWS, split="part", progress=False)
    dataset.split("column", progress=False).leaks(progress=False)
    inspect_table(ROWS, progress=False)
    assert terminal.getvalue() == ""
    plain = io.StringIO()
    monkeypatch.setattr(sys, "stderr", plain)
    Dataset.from_table(ROWS)
    dataset.split("column").leaks()
    inspect_table(ROWS)
    assert plain.getvalue() == ""
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "DELAY", 600.0)
    Dataset.from_table(ROWS)
    dataset.split("column").leaks()
    assert terminal.getvalue() == ""
