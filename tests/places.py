"""The three places an op test runs in: PyTorch on the CPU, the Triton kernels interpreted, the Triton kernels on a GPU.

`TRITON_INTERPRET=1` makes a process interpret; otherwise a GPU is taken where there is one and asked for.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest
import torch


@dataclass(frozen=True)
class Place:
    name: str
    device: torch.device
    backend: str
    dtypes: tuple[torch.dtype, ...]


def _here() -> Place:
    low = (torch.float32, torch.bfloat16, torch.float16)
    if os.environ.get("TRITON_INTERPRET") == "1":
        return Place("interpret", torch.device("cpu"), "triton", low)
    if torch.cuda.is_available():
        return Place("gpu", torch.device("cuda"), "triton", low)
    return Place("cpu", torch.device("cpu"), "torch", (*low, torch.float64))


PLACE = _here()

# The interpreter runs programs one after the other, always in the same order.
ONE_ORDER = pytest.mark.skipif(PLACE.name == "interpret", reason="repeats are the same under the interpreter whatever kernels do")
