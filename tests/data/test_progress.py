from __future__ import annotations

import io
import re
import sys
import time
from typing import Any

import pyarrow as pa
import pytest

from jagged.data import inspect_table, progress
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
EVENTS = pa.table({"user_id": [1], "item_id": [7], "timestamp": [0], "event_type": ["click"]})


def last(terminal: Terminal, doing: str) -> tuple[str, str]:
    """Steps done and steps in all, in the last picture of a bar."""
    found = re.findall(rf"{doing}: [^\r]*? (\d+)/(\d+) ", terminal.getvalue())
    return found[-1]


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
    Dataset.from_table(ROWS, progress=False)
    inspect_table(ROWS, progress=False)
    assert terminal.getvalue() == ""
    plain = io.StringIO()
    monkeypatch.setattr(sys, "stderr", plain)
    Dataset.from_table(ROWS)
    inspect_table(ROWS)
    assert plain.getvalue() == ""
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "DELAY", 600.0)
    Dataset.from_table(ROWS)
    assert terminal.getvalue() == ""
