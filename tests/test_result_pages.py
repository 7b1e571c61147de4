"""What is made from the committed results of benchmarks is what these say: pages of figures in numbers, and the drawn masks."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import figures, tables


def test_the_pages_say_what_the_results_say(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`python -m benchmarks.tables` was run after results came."""
    pages = {path.name: path.read_text() for path in tables.FOLDER.glob("*.md")}
    monkeypatch.setattr(tables, "FOLDER", tmp_path)
    tables.main()
    assert {path.name: path.read_text() for path in tmp_path.glob("*.md")} == pages


def test_the_picture_of_masks_is_up_to_date() -> None:
    assert figures.PICTURE.read_text() == figures.attention_masks()
