"""How Triton's backward pass of embedding bags brings the lookups of a row together, chosen by a test."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from jagged.ops.embedding_bag.layout import MOST_COUNTED
from tests.places import PLACE

# What there is to choose; PyTorch's has one way.
GATHERINGS = ["torch"] if PLACE.name == "cpu" else ["sorted", "counted"]


@contextlib.contextmanager
def gathering(way: str, long: int | None = None) -> Iterator[None]:
    """Sort the lookups of all tables, by digits or, `"merged"`, in short chunks, or count them.

    Interpreted, rows of more than `long` lookups are cut where they are counted.
    """
    with pytest.MonkeyPatch.context() as patch:
        if PLACE.name != "cpu":
            from jagged.ops.embedding_bag.triton import counting, merging, rows, sums

            patch.setattr(sums, "most_counted", lambda *_: MOST_COUNTED if way == "counted" else 0)
            if way == "sorted":
                patch.setattr(merging, "MOST_OF_ALL", 0)
            elif way == "merged":
                patch.setattr(merging, "CHUNK", 16)
                patch.setattr(merging, "RANKED", 8)
            if long is not None and PLACE.name == "interpret":
                import triton.language as tl

                for module in (counting, rows):
                    patch.setattr(module, "LONG", tl.constexpr(long))
        yield
