"""Triton's interpreter without work that it repeats: a third of the time of interpreted kernels; and one that watches them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from torch import Tensor
from triton.runtime import interpreter


def patch_once_a_launch() -> None:
    """Let the interpreter put its own functions in place of the language's once in a launch for each module.

    It does so anew whenever a kernel calls a function, `tl.sum` among them, by looking through all of the language, though they
    stay until the launch has ended.
    """
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    done: set[int] = set()

    def patch_if_new(fn: Any) -> Any:
        module = id(fn.__globals__)
        if module in done:
            return None
        done.add(module)
        return patch(fn)

    def launch_anew(self: Any, *args: Any, **kwargs: Any) -> None:
        done.clear()
        launch(self, *args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_if_new, launch_anew


@contextlib.contextmanager
def accesses_checked() -> Iterator[None]:
    """Make an access outside of all tensors that a launch was given an error, by elements, not by what the allocator gave."""
    ranges: list[tuple[int, int]] = []
    host_arguments = interpreter.GridExecutor._init_args_hst

    def noted(self: Any, *given: Any) -> Any:
        arguments, options = host_arguments(self, *given)
        tensors = [x for x in (*arguments, *options.values()) if isinstance(x, Tensor) and x.numel()]
        sizes = [sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)) + 1 for x in tensors]
        ranges[:] = [(x.data_ptr(), x.data_ptr() + size * x.itemsize) for x, size in zip(tensors, sizes, strict=True)]
        return arguments, options

    def checked(access: Any, pointer: int, mask: int) -> Any:
        def check(self: Any, *given: Any) -> Any:
            addresses = given[pointer].data
            addresses = addresses[np.broadcast_to(given[mask].data, addresses.shape) != 0]
            outside = np.ones(addresses.shape, bool)
            for begin, end in ranges:
                outside &= (addresses < begin) | (addresses >= end)
            if outside.any():
                raise AssertionError(f"{access.__name__}: {int(outside.sum())} addresses outside of the launch's tensors")
            return access(self, *given)

        return check

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "_init_args_hst", noted)
        builder = interpreter.InterpreterBuilder
        for name, pointer, mask in (("masked_load", 0, 1), ("masked_store", 0, 2), ("atomic_rmw", 1, 3)):
            patch.setattr(builder, f"create_{name}", checked(getattr(builder, f"create_{name}"), pointer, mask))
        yield
