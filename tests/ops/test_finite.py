"""Whether a tensor is finite, by one reading."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jagged.ops._shared.finite import all_finite
from tests.places import PLACE, Place

pytestmark = pytest.mark.skipif(PLACE.name == "interpret", reason="it is PyTorch's own")
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@given(
    dtype=st.sampled_from(FLOATS),
    rows=st.integers(0, 5),
    width=st.integers(0, 40),
    bad=st.none() | st.tuples(st.sampled_from(["nan", "inf", "-inf"]), st.integers(0, 10_000)),
    largest=st.booleans(),
)
def test_is_what_isfinite_says(
    place: Place, dtype: torch.dtype, rows: int, width: int, bad: tuple[str, int] | None, largest: bool
) -> None:
    """Also where numbers are as large as the dtype has them, and where there are none."""
    x = torch.full((rows, width), torch.finfo(dtype).max if largest else 0.0, dtype=dtype, device=place.device)
    if bad is not None and x.numel():
        x.view(-1)[bad[1] % x.numel()] = float(bad[0])
    found = all_finite(x)
    assert (found.dtype, found.shape) == (torch.bool, ())
    assert torch.equal(found, torch.isfinite(x).all())
    assert torch.equal(all_finite(x.T), found)


@pytest.mark.gpu
def test_takes_no_memory() -> None:
    x = torch.zeros(2**20, 64, device="cuda")
    assert bool(all_finite(x))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    assert bool(all_finite(x))
    assert torch.cuda.max_memory_allocated() - before < 2**20
