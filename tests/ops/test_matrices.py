"""How walks over one side of a product are cut into parts."""

from __future__ import annotations

import pytest

from jagged.ops._shared.matrices import balanced_parts

MULTIPROCESSORS = 132


@pytest.mark.parametrize("blocks", [0, 1, 2, 64, 131, 132, 133, 200, 782, 7813])
@pytest.mark.parametrize("steps", [0, 1, 3, 64, 15_625, 2**30])
@pytest.mark.parametrize("overhead", [0, 4])
def test_parts_make_up_the_walk(steps: int, blocks: int, overhead: int) -> None:
    most = 8 * MULTIPROCESSORS // max(1, blocks)
    parts, length = balanced_parts(steps, blocks, MULTIPROCESSORS, overhead, most)
    assert (parts - 1) * length < max(1, steps) <= parts * length
    assert parts <= max(1, most)
    if steps > 1000 and blocks > 0 and most > 1:
        # Most of the GPU has work in the last round.
        rounds = -(-blocks * parts // MULTIPROCESSORS)
        assert blocks * parts / (rounds * MULTIPROCESSORS) > 0.85


@pytest.mark.parametrize(
    ("steps", "blocks", "at_once", "overhead", "parts"),
    [(400, 128, 264, 4, 2), (128, 200, 132, 4, 3), (391, 64, 132, 2, 2), (15_625, 200, 132, 0, 5)],
)
def test_rounds_are_full(steps: int, blocks: int, at_once: int, overhead: int, parts: int) -> None:
    """Halves of 128 walks fill one round of 264 programs, thirds of 200 five of 132 but for 60, of which fourths need seven."""
    assert balanced_parts(steps, blocks, at_once, overhead, 8 * at_once // blocks)[0] == parts


@pytest.mark.parametrize(
    ("steps", "blocks", "least"), [(15_625, 132, 8), (15_625, 68, 8), (26_000, 5, 13), (3, 400, 3), (1, 1, 1)]
)
def test_parts_are_no_fewer_than_asked(steps: int, blocks: int, least: int) -> None:
    most = 8 * MULTIPROCESSORS // blocks
    parts, length = balanced_parts(steps, blocks, MULTIPROCESSORS, 0, most, least)
    assert (parts - 1) * length < steps <= parts * length
    assert length <= -(-steps // least)
    assert parts <= max(least, most)
