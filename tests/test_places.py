"""Tests that put tensors where they run are among those that run on a GPU, which a fixture tells."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
FILES = sorted(file for file in TESTS.rglob("test_*.py") if file != Path(__file__))
# A mark that asks for the place, or that says which other one the test is of.
ON_A_GPU = "'place'", "mark.gpu"
ON_A_CPU = "ON_CPU", "PLACE.name != 'cpu'", "PLACE.backend != 'torch'"


def left_out(source: str) -> list[str]:
    """Return the tests that use `PLACE.device`, by themselves or by functions of their file, and are marked for no place."""
    body = ast.parse(source).body
    functions = [node for node in body if isinstance(node, ast.FunctionDef)]
    names = {node.name: {one.id for one in ast.walk(node) if isinstance(one, ast.Name)} for node in functions}
    using = {node.name for node in functions if "PLACE.device" in ast.unparse(node)}
    while more := {name for name, used in names.items() if used & using} - using:
        using |= more
    marks = [
        ast.unparse(node.value) for node in body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    ]
    return [
        node.name
        for node in functions
        if node.name.startswith("test") and node.name in using
        if "place" not in [one.arg for one in node.args.args]
        if not any(mark in text for text in [*marks, *map(ast.unparse, node.decorator_list)] for mark in (*ON_A_GPU, *ON_A_CPU))
    ]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(TESTS)))
def test_what_uses_the_device_runs_on_it(file: Path) -> None:
    assert left_out(file.read_text()) == []


def test_what_is_found() -> None:
    """By the test itself, by what it calls, and not where a mark names a place."""
    source = """
def made(): return zeros(PLACE.device)
def other(): return made()
def test_left_out(): other()
def test_asks(place): other()
@pytest.mark.usefixtures("place")
def test_is_marked(): made()
@pytest.mark.gpu
def test_on_a_gpu(): PLACE.device
@ON_CPU
def test_on_a_cpu(): made()
@pytest.mark.skipif(PLACE.name != "cpu", reason="")
def test_on_a_cpu_alone(): made()
def test_of_none(): pass
"""
    assert left_out(source) == ["test_left_out"]
    assert left_out(source + "pytestmark = [pytest.mark.usefixtures('place')]") == []
