"""What tests draw: one half is the same in every run, the other is drawn anew. `JAGGED_TEST_SEED=n` repeats a run's draws."""

from __future__ import annotations

import os
import random
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis

# Into the environment for the processes of pytest-xdist.
SEED = int(os.environ.setdefault("JAGGED_TEST_SEED", str(secrets.randbelow(2**32))))


def generators(count: int) -> Iterator[random.Random]:
    """Yield generators of random numbers: half of them with seeds of their own, half with this run's."""
    for number in range(count):
        yield random.Random(number if number < count - count // 2 else f"{SEED} {number}")


def run_in_halves(test: Any, run: Callable[[], object]) -> None:
    """Run hypothesis' test with half of its examples as they always are, and with as many of this run's seed."""
    settings = test._hypothesis_internal_use_settings
    try:
        for count, seed in ((settings.max_examples - settings.max_examples // 2, None), (settings.max_examples // 2, SEED)):
            if count:
                test._hypothesis_internal_use_settings = hypothesis.settings(settings, max_examples=count)
                test._hypothesis_internal_use_seed = seed
                run()
    finally:
        test._hypothesis_internal_use_settings, test._hypothesis_internal_use_seed = settings, None
