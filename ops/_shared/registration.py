"""How an operator comes to be: its schema, its two implementations and its fake, in one call."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Triton reads the variable when it is imported, so a later change would have no effect there either.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def define_operator(
    name: str, schema: str, *, torch_impl: Callable[..., Any], triton_impl: str, fake: Callable[..., Any]
) -> Callable[..., Any]:
    """Define `jagged::<name>` and return it.

    Args:
        name: operator name without namespace.
        schema: arguments and returns; one is a tensor, and the last must be `str backend`, which the implementations do not see.
        torch_impl: the PyTorch implementation.
        triton_impl: `"package.module:function"`, imported when it is first run, so that machines without Triton never meet it. It
            runs on the device of the first tensor, which need not be the current one.
        fake: shapes and dtypes of the outputs; takes all arguments, `backend` included.
    """
    module_name, function_name = triton_impl.split(":")

    @functools.cache
    def triton_implementation() -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(importlib.import_module(module_name), function_name)
        return function

    def implementation(*arguments: Any) -> Any:
        *inputs, backend = arguments
        if backend != "triton":
            return torch_impl(*inputs)
        tensor = next(x for x in inputs if isinstance(x, Tensor))
        # The guard costs more than the question.
        if not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
            return triton_implementation()(*inputs)
        with torch.cuda.device_of(tensor):
            return triton_implementation()(*inputs)

    qualified = f"jagged::{name}"
    torch.library.define(qualified, schema)
    torch.library.impl(qualified, ("cpu", "cuda"), implementation)
    torch.library.register_fake(qualified, fake)
    operator: Callable[..., Any] = getattr(torch.ops.jagged, name).default
    return operator


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
