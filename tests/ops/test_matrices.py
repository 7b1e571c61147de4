"""How walks over one side of a product are cut into parts, and the precision of products."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import jagged.ops
from jagged.ops._shared.matrices import balanced_parts, float32_products
from tests.ops.families import FAMILIES
from tests.places import Place
from tests.strategies import jagged_of

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


@pytest.fixture
def _precision_is_restored() -> Iterator[None]:
    before = torch.backends.cuda.matmul.fp32_precision  # type: ignore[attr-defined]
    yield
    torch.backends.cuda.matmul.fp32_precision = before  # type: ignore[attr-defined]


@pytest.mark.usefixtures("_precision_is_restored")
@pytest.mark.parametrize("precision", ["tf32", "ieee"])
@pytest.mark.parametrize(
    "family", ["attention", "bmm", "cross_entropy", "group_sparse", "group_sparse_softmax", "grouped_linear", "pair_bmm"]
)
def test_operators_run_whichever_api_set_the_precision(place: Place, family: str, precision: str) -> None:
    """After PyTorch's new setting its old one, `get_float32_matmul_precision`, raises."""
    torch.backends.cuda.matmul.fp32_precision = precision  # type: ignore[attr-defined]
    assert float32_products() == precision
    for dtype in (torch.float32, torch.bfloat16):
        FAMILIES[family](jagged_of((3, 0, 5)), dtype, 16).run()


def test_the_setting_has_one_reader() -> None:
    (folder,) = jagged.ops.__path__
    words = "float32_matmul_precision", "fp32_precision", "allow_tf32"
    readers = [path.name for path in Path(folder).rglob("*.py") if any(word in path.read_text() for word in words)]
    assert readers == ["matrices.py"]
