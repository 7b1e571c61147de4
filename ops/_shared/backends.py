"""Which implementation serves a call."""

from __future__ import annotations

import os

import torch
from torch import Tensor

# Triton reads the variable when it is imported, so a later change would have no effect there either.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def resolve_backend(backend: str | None, tensor: Tensor, *, float64_on_triton: bool = False) -> str:
    """Choose `"torch"` or `"triton"`; a forced choice is taken or refused, never replaced.

    None takes Triton for CUDA tensors and PyTorch for the rest (float64 too, where the kernels accumulate in float32).
    """
    float64 = tensor.dtype == torch.float64 and not float64_on_triton
    if backend is None:
        return "triton" if tensor.is_cuda and not float64 else "torch"
    if backend == "torch":
        return backend
    if backend != "triton":
        raise ValueError(f"backend: got {backend!r}, expected 'torch', 'triton' or None to choose by device")
    if float64:
        raise TypeError(
            "backend='triton': the kernels accumulate in float32, got float64 tensors; use backend='torch' for float64"
        )
    if not tensor.is_cuda and not INTERPRETED:
        raise ValueError(f"backend='triton': needs CUDA tensors, got {tensor.device}; move them to a GPU or use backend='torch'")
    return backend
