"""Rows in pages, and new ones behind them, against a loop over samples. They move bits, so results are equal, not close."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.library import opcheck

from jagged.ops import extend_pages
from jagged.ops._shared.operator import OPERATORS
from tests.places import PLACE, Place
from tests.strategies import random_tensor, seeds

# Known, kept and other new rows.
Sample = tuple[int, int, int]
DTYPES = (*PLACE.dtypes, torch.float64, torch.int64)


def numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    return (100 * random_tensor(shape, torch.float32, seed)).cpu().to(dtype)


def offsets_of(lengths: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


def case(
    samples: list[Sample],
    page_rows: int,
    features: tuple[int, ...],
    has_second: bool,
    dtype: torch.dtype,
    seed: int,
) -> dict[str, Any]:
    """Arguments for samples of so many known, kept and other new rows; pages lie in any order, with some that nobody has."""
    generator = torch.Generator().manual_seed(seed)
    needs = [-(-(known + kept) // page_rows) for known, kept, _ in samples]
    order = torch.randperm(sum(needs) + 2, generator=generator).tolist()
    # Past those that a sample needs stands what is no page.
    pages = torch.full((len(samples), max(needs, default=0) + 1), -5)
    for sample, need in enumerate(needs):
        pages[sample, :need] = torch.tensor([order.pop() for _ in range(need)])
    halves = (2,) if has_second else ()
    new = sum(kept + other for _, kept, other in samples)
    return {
        "pool": numbers(((sum(needs) + 2) * page_rows, *halves, *features), dtype, seed),
        "pages": pages,
        "first": numbers((new, *features), dtype, seed + 1),
        "second": numbers((new, *features), dtype, seed + 2) if has_second else None,
        "offsets": offsets_of([kept + other for _, kept, other in samples]),
        "kept_offsets": offsets_of([kept for _, kept, _ in samples]),
        "joined_offsets": offsets_of([sum(rows) for rows in samples]),
        "page_rows": page_rows,
        "total": sum(sum(rows) for rows in samples),
    }


def by_a_loop(samples: list[Sample], arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """All rows, and the pool as it is behind the call."""
    pool, page_rows, joined, at = arguments["pool"].clone(), arguments["page_rows"], [], 0
    for sample, (known, kept, other) in enumerate(samples):
        for position in range(known + kept + other):
            place = -1
            if position < known + kept:
                place = int(arguments["pages"][sample, position // page_rows]) * page_rows + position % page_rows
            if position < known:
                joined.append(pool[place].clone())
                continue
            halves = [half for half in (arguments["first"], arguments["second"]) if half is not None]
            row = torch.stack([half[at] for half in halves]) if len(halves) > 1 else halves[0][at]
            joined.append(row)
            at += 1
            if position < known + kept:
                pool[place] = row
    return torch.stack(joined) if joined else pool[:0], pool


def on_device(arguments: dict[str, Any], numbers_dtype: torch.dtype = torch.int64) -> dict[str, Any]:
    moved = {key: of.to(PLACE.device) if isinstance(of, Tensor) else of for key, of in arguments.items()}
    return moved | {key: of.to(numbers_dtype) for key, of in moved.items() if key == "pages" or key.endswith("offsets")}


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9), st.integers(0, 5)), max_size=5), st.sampled_from([1, 3, 4, 8, 24]),
    st.sampled_from([(), (1,), (3, 4), (2, 32), (1030,)]), st.booleans(), st.sampled_from(DTYPES), seeds(),
    st.sampled_from([torch.int32, torch.int64]),
)  # fmt: skip
def test_it_is_what_a_loop_gives(
    place: Place, samples: list[Sample], page_rows: int, features: tuple[int, ...], has_second: bool,
    dtype: torch.dtype, seed: int, numbers_dtype: torch.dtype,
) -> None:  # fmt: skip
    arguments = case(samples, page_rows, features, has_second, dtype, seed)
    expected, expected_pool = by_a_loop(samples, arguments)
    ours = on_device(arguments, numbers_dtype)
    version = ours["pool"]._version
    joined = extend_pages(**ours, backend=place.backend)
    torch.testing.assert_close(joined.cpu(), expected, rtol=0, atol=0)
    torch.testing.assert_close(ours["pool"].cpu(), expected_pool, rtol=0, atol=0)
    assert ours["pool"]._version > version


@pytest.mark.parametrize("page_rows", [8, 64])
def test_halves_are_views_of_one_projection(place: Place, page_rows: int) -> None:
    """Rows with others between them, of several tiles a page and of several blocks of columns."""
    samples = [(130, 70, 5), (0, 3, 2), (64, 0, 1)]
    arguments = case(samples, page_rows, (4, 160), True, torch.bfloat16, 0)
    expected, expected_pool = by_a_loop(samples, arguments)
    ours = on_device(arguments)
    projected = torch.stack((ours["first"], ours["second"], ours["first"]), 1)
    _, ours["second"], ours["first"] = projected.unbind(1)
    joined = extend_pages(**ours, backend=place.backend)
    torch.testing.assert_close(joined.cpu(), expected, rtol=0, atol=0)
    torch.testing.assert_close(ours["pool"].cpu(), expected_pool, rtol=0, atol=0)
    # Numbers of a row that do not lie side by side.
    ours = on_device(arguments)
    ours["first"], ours["second"] = (ours[half].transpose(0, 2).contiguous().transpose(0, 2) for half in ("first", "second"))
    joined = extend_pages(**ours, backend=place.backend)
    torch.testing.assert_close(joined.cpu(), expected, rtol=0, atol=0)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.skipif(PLACE.name == "cpu", reason="PyTorch refuses what it does not find")
def test_wrong_numbers_lead_nowhere(place: Place) -> None:
    """What is read or written then is any row, of the tensors that were given; what stands around them stays."""
    samples = [(5, 2, 1), (3, 1, 0)]
    arguments = on_device(case(samples, 4, (3,), False, torch.float32, 0))
    around = torch.full((3 * len(arguments["pool"]), 3), 7.0, device=place.device)
    around[len(around) // 3 : -len(around) // 3] = arguments["pool"]
    arguments["pool"] = around[len(around) // 3 : -len(around) // 3]
    for name, wrong in (
        ("pages", torch.full_like(arguments["pages"], 10**6)),
        ("pages", torch.full_like(arguments["pages"], -3)),
        ("joined_offsets", torch.tensor([0, 100, 12], device=place.device)),
        ("joined_offsets", torch.tensor([5, -3, 12], device=place.device)),
        ("offsets", torch.tensor([0, -50, 4], device=place.device)),
        ("offsets", torch.tensor([0, 50, 4], device=place.device)),
        ("kept_offsets", torch.tensor([0, 50, 3], device=place.device)),
    ):
        extend_pages(**arguments | {name: wrong}, backend=place.backend)
        assert (around[: len(around) // 3] == 7).all()
        assert (around[-len(around) // 3 :] == 7).all()


@pytest.mark.skipif(PLACE.name == "interpret", reason="what is shown here lies before the kernels")
def test_opcheck(place: Place) -> None:
    for has_second in (False, True):
        arguments = on_device(case([(5, 2, 1), (0, 0, 0), (3, 0, 2)], 2, (3, 2), has_second, torch.float32, 0))
        opcheck(OPERATORS["extend_pages"].dispatched, (*arguments.values(), place.backend))


@pytest.mark.skipif(PLACE.name == "interpret", reason="what is shown here lies before the kernels")
def test_compiled(place: Place) -> None:
    """For other lengths without compiling again."""
    torch.compiler.reset()
    compiled = torch.compile(extend_pages, backend="aot_eager", fullgraph=True, dynamic=True)
    # Sizes that are equal in the first call a compiler takes for one: there are none.
    for samples in ([(13, 2, 1), (3, 1, 4)], [(19, 3, 3), (2, 2, 2)], [(4, 1, 2), (4, 2, 6)]):
        arguments = case(samples, 4, (7,), True, torch.float32, 0)
        expected, expected_pool = by_a_loop(samples, arguments)
        ours = on_device(arguments)
        with torch.compiler.set_stance("default" if samples[0][0] == 13 else "fail_on_recompile"):
            joined = compiled(**ours, backend=place.backend)
        torch.testing.assert_close(joined.cpu(), expected, rtol=0, atol=0)
        torch.testing.assert_close(ours["pool"].cpu(), expected_pool, rtol=0, atol=0)


def small() -> dict[str, Any]:
    return case([(2, 1, 1), (1, 0, 1)], 2, (3,), False, torch.float32, 0)


REFUSED: dict[str, dict[str, Any]] = {
    "pool: expected adjacent rows, got stride [1, 10]; pass a contiguous tensor": {"pool": torch.zeros(3, 10).T},
    "pool: expected [R, 2, *F], as rows have a second half, got [10, 3]": {"second": torch.zeros(3, 3)},
    "page_rows: expected 1 or more, got 0": {"page_rows": 0},
    "pages: expected shape [B, P], got [2]": {"pages": torch.zeros(2, dtype=torch.int64)},
    "pages: expected dtype int32, int64, got float32; convert it with .to(...)": {"pages": torch.zeros(2, 1)},
    "pages: expected the device of pool, cpu, got meta; move one of them": {
        "pages": torch.zeros(2, 1, dtype=torch.int64, device="meta")
    },
    "first: expected the dtype of pool, float32, got float16; convert one of them": {"first": torch.zeros(3, 3).half()},
    "first: expected [3, 3], rows as those of pool, got [3, 4]": {"first": torch.zeros(3, 4)},
    "first: expected rows that need no gradient, got some that do; call it under torch.no_grad()": {
        "first": torch.zeros(3, 3, requires_grad=True)
    },
    "kept_offsets: expected [3], as pages are of 2 samples, got [2]": {"kept_offsets": torch.tensor([0, 1])},
    "offsets[2]: expected 3, the number of rows, got 2; the last offset is the total length": {
        "offsets": torch.tensor([0, 2, 2])
    },
    "joined_offsets[2]: expected 7, the number of rows, got 6; the last offset is the total length": {"total": 7},
    "kept_offsets: expected at most the 1 rows of offsets of sample 1, got 2": {"kept_offsets": torch.tensor([0, 1, 3])},
    "offsets: expected at most the 1 rows of joined_offsets of sample 0, got 2": {"joined_offsets": torch.tensor([0, 1, 6])},
    "pages: expected numbers from 0 to 4, of pages of pool, got 5": {"pages": torch.tensor([[0, 1, 9], [5, 9, 9]])},
    "pages: expected numbers from 0 to 4, of pages of pool, got -1": {"pages": torch.tensor([[0, -1, 9], [3, 9, 9]])},
    "pages: expected room for 3 rows of sample 0, got 2; give it more pages": {"pages": torch.zeros(2, 1, dtype=torch.int64)},
}


@pytest.mark.parametrize("says", REFUSED)
def test_what_is_refused(says: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^{re.escape(says)}$"):
        extend_pages(**small() | REFUSED[says])


def test_under_no_grad_rows_may_have_one() -> None:
    arguments = small()
    expected, _ = by_a_loop([(2, 1, 1), (1, 0, 1)], arguments)
    with torch.no_grad():
        joined = extend_pages(**arguments | {"first": arguments["first"].requires_grad_()})
    assert torch.equal(joined, expected)
