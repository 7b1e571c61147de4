"""Triton's interpreter without work that it repeats, in a fraction of its time; and one that watches what kernels touch."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from torch import Tensor
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_FAST = pytest.MonkeyPatch()


def make_fast(patch: pytest.MonkeyPatch = _FAST) -> None:
    """Leave out what the interpreter does again and again to the same end; what kernels compute stays the same, bit for bit."""
    _find_types_once(patch)
    _patch_the_language_once_a_launch(patch)
    _call_with_less_ado(patch)
    # The interpreter computes each sum and product of integers once more in 64 bits and drops what it finds.
    options = interpreter.interpreter_builder.options
    assert not options.debug
    patch.setattr(interpreter.interpreter_builder, "options", dataclasses.replace(options, sanitize_overflow=False))


@contextlib.contextmanager
def as_triton_has_it() -> Iterator[None]:
    """Run kernels by the interpreter as it is without `make_fast`."""
    _FAST.undo()
    yield
    make_fast()


def _find_types_once(patch: pytest.MonkeyPatch) -> None:
    """Keep what follows from a type alone with the type, and share it between types that are equal."""
    init_tensor, init_block, equal = core.tensor.__init__, core.block_type.__init__, core.dtype.__eq__
    find_dtype, computation_type = interpreter._get_np_dtype, TritonSemantic.computation_type_impl
    blocks: dict[tuple[Any, ...], dict[str, Any]] = {}
    computations: dict[tuple[Any, ...], core.dtype] = {}

    def init(self: core.tensor, handle: Any, type: core.dtype) -> None:
        known = type.__dict__.get("_of_tensors")
        if known is None:
            init_tensor(self, handle, type)
            type._of_tensors = self.shape, self.numel, self.dtype
        else:
            self.handle, self.type = handle, type
            self.shape, self.numel, self.dtype = known

    def numpy_dtype(type: core.dtype) -> np.dtype[Any]:
        known = type.__dict__.get("_of_numpy")
        if known is None:
            known = type._of_numpy = find_dtype(type)
        return known

    def same(self: core.dtype, other: Any) -> bool:
        return self is other or equal(self, other)

    def init_block_once(self: core.block_type, element_ty: core.dtype, shape: Any) -> None:
        sizes = [size.value if isinstance(size, core.constexpr) else size for size in shape]
        key = element_ty.name, getattr(element_ty, "address_space", None), *sizes
        # Other sequences, and sizes of another type that equal an int, are not to be found: they are refused.
        usual = isinstance(shape, (list, core.tuple)) and all(type(size) is int for size in sizes)
        known = blocks.get(key) if usual else None
        if known is None:
            init_block(self, element_ty, shape)
            blocks[key] = self.__dict__
        else:
            self.__dict__ = known

    def computed(self: TritonSemantic, a: core.dtype, *given: Any) -> core.dtype:
        key = a.name, given[0], given[1].name, *given[2:]
        if key not in computations:
            computations[key] = computation_type(self, a, *given)
        return computations[key]

    patch.setattr(core.tensor, "__init__", init)
    patch.setattr(core.dtype, "__eq__", same)
    patch.setattr(core.block_type, "__init__", init_block_once)
    patch.setattr(interpreter, "_get_np_dtype", numpy_dtype)
    patch.setattr(TritonSemantic, "computation_type_impl", computed)


def _call_with_less_ado(patch: pytest.MonkeyPatch) -> None:
    """Look at no keyword of a call, of which one is replaced, and at no sizes of two blocks of the same shape."""
    broadcast = TritonSemantic.broadcast_impl_value

    def patch_attribute(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return member(*args, **kwargs)

        scope.set_attr(owner, name, call)

    def broadcast_unless_equal(self: TritonSemantic, lhs: Any, rhs: Any) -> Any:
        a, b = lhs.type, rhs.type
        if a.is_block() and b.is_block() and a.shape.values == b.shape.values:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    patch.setattr(interpreter, "_patch_attr", patch_attribute)
    patch.setattr(TritonSemantic, "broadcast_impl_value", broadcast_unless_equal)


def _patch_the_language_once_a_launch(patch: pytest.MonkeyPatch) -> None:
    """Let the interpreter put its own functions in place of the language's once in a launch for each module.

    It does so anew whenever a kernel calls a function, `tl.sum` among them, by looking through all of the language, though they
    stay until the launch has ended.
    """
    patch_language, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    done: set[int] = set()

    def patch_if_new(fn: Any) -> Any:
        module = id(fn.__globals__)
        if module in done:
            return None
        done.add(module)
        return patch_language(fn)

    def launch_anew(self: Any, *args: Any, **kwargs: Any) -> None:
        done.clear()
        launch(self, *args, **kwargs)

    patch.setattr(interpreter, "_patch_lang", patch_if_new)
    patch.setattr(interpreter.GridExecutor, "__call__", launch_anew)


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
