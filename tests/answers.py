"""A process of `benchmarks.trees.Version` for its tests: answers with its word and the request, or fails."""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.trees import serve


def answer(request: Any) -> list[Any]:
    # No reply, but for people.
    print("asked")
    return [sys.argv[2], request]


if __name__ == "__main__":
    if sys.argv[2] == "fail":
        sys.exit(3)
    serve(answer)
