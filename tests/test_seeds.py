"""Half of the examples are the same in every run, half are drawn anew, and a given seed repeats them."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import seeds
from tests.conftest import pytest_pyfunc_call, pytest_report_header

DRAWN: list[int] = []


@given(st.integers(0, 2**62))
@settings(max_examples=21)
def test_draws(number: int) -> None:
    DRAWN.append(number)


def drawn_by_hypothesis() -> list[int]:
    DRAWN.clear()
    seeds.run_in_halves(test_draws, test_draws)
    return list(DRAWN)


def drawn_by_generators() -> list[int]:
    return [generator.randrange(2**62) for generator in seeds.generators(21)]


@pytest.mark.parametrize("draw", [drawn_by_hypothesis, drawn_by_generators])
def test_half_is_drawn_anew_and_a_seed_repeats_it(draw: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    for seed in (5, 6, 5):
        monkeypatch.setattr(seeds, "SEED", seed)
        runs.append(draw())
    one, other, again = runs
    assert again == one
    assert len(one) == len(other) == 21
    assert other[:11] == one[:11]
    # Hypothesis tries the simplest first.
    assert not set(other[12:]) & set(one[12:])


def test_every_test_is_run_in_halves() -> None:
    """By pytest, without being told."""
    item: Any = SimpleNamespace(obj=test_draws, funcargs={}, _fixtureinfo=SimpleNamespace(argnames=()))
    DRAWN.clear()
    assert pytest_pyfunc_call(item) is True
    drawn = list(DRAWN)
    assert drawn == drawn_by_hypothesis()
    item.obj = drawn_by_hypothesis
    assert pytest_pyfunc_call(item) is None


@pytest.mark.parametrize("count", [1, 2, 7])
def test_generators_are_as_many_as_asked_for(count: int) -> None:
    assert len({generator.randrange(2**62) for generator in seeds.generators(count)}) == count


def test_the_seed_is_said() -> None:
    assert pytest_report_header() == f"JAGGED_TEST_SEED={os.environ['JAGGED_TEST_SEED']} repeats what this run draws"
