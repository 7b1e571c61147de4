"""What PyTorch's allocator of GPU memory is told, which has to be before torch is imported."""

from __future__ import annotations

import os
import sys

# By any of these a user may say otherwise. All versions read the last one.
NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def use_expandable_segments() -> None:
    """Have GPU memory of this process and of those that it starts lie in segments that grow; nothing where users say otherwise.

    Batches have a new size each. Segments of a fixed size are then full of gaps, also those of a CUDA graph, and PyTorch gives
    them back and asks for others in the middle of a step.

    Source:
        PyTorch, CUDA semantics, "Optimizing memory usage with `PYTORCH_CUDA_ALLOC_CONF`", `expandable_segments`.
    """
    if sys.platform == "linux" and not any(name in os.environ for name in NAMES):
        os.environ[NAMES[-1]] = "expandable_segments:True"
