"""Steps as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

Results = TypeVar("Results")


def captured(step: Callable[[], Results]) -> tuple[torch.cuda.CUDAGraph, Results]:
    """Return a CUDA graph of a step that waits for nothing, and the tensors that its replays write.

    The step runs three times before: to compile kernels, where waiting for the GPU is an error, and on another stream.
    """
    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results
