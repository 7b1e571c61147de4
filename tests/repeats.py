"""Calls that give the same bits each time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def check_repeats(run: Callable[[], Sequence[Tensor]], times: int = 20) -> None:
    """Check that outputs and gradients are those of the first call, bit for bit, so many times."""
    first = run()
    for _ in range(times):
        assert all(torch.equal(*pair) for pair in zip(first, run(), strict=True))
