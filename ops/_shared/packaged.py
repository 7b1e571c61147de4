"""Kernels in an exported program, whose code the compiler of a package takes over: a launch is a node of the program's graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import triton
from torch import Tensor, fx
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_functional


def launched(
    kernel: Any, grid: tuple[Any, ...], outputs: Mapping[str, Tensor], *, num_warps: int, num_stages: int = 3, **arguments: Any
) -> dict[str, Tensor]:
    """Trace the launch of a kernel, and return what it writes, by the names of its arguments.

    `torch.library.wrap_triton` traces a launch that changes tensors in place, which what takes operators apart removes, as
    nothing reads it. Here new tensors come out.

    Args:
        kernel: of Triton.
        grid: of three numbers or fewer, made of sizes.
        outputs: tensors that it writes and does not read.
        num_warps, num_stages: as of a launch.
        arguments: all others, by name.
    """
    configured = triton.autotune([triton.Config({}, num_warps=num_warps, num_stages=num_stages)], key=[])(kernel)
    given = {**arguments, **outputs}
    # What a graph cannot hold is kept beside it: None.
    is_held = {name: isinstance(value, fx.node.base_types) for name, value in given.items()}
    return triton_kernel_wrapper_functional(  # type: ignore[no-any-return]
        kernel_idx=kernel_side_table.add_kernel(configured),
        constant_args_idx=kernel_side_table.add_constant_args({name: of for name, of in given.items() if not is_held[name]}),
        grid=[(*grid, *(1,) * (3 - len(grid)))],
        tma_descriptor_metadata={},
        kwargs={name: of for name, of in given.items() if is_held[name]},
        tensors_to_clone=[*outputs],
    )


@contextmanager
def whole_sources() -> Iterator[None]:
    """Let Inductor write the named tuples of kernels into their sources.

    It copies functions, numbers and what is Triton's, and leaves out classes, without which a kernel that puts its values into
    named tuples does not compile.
    """
    from torch._inductor.codegen import wrapper

    copied = wrapper.user_defined_triton_kernel_transitive_closure_source_code

    def with_tuples(kernel: Any, *others: Any, **named: Any) -> str:
        classes = _named_tuples(kernel, set())
        lines = [f"{name} = namedtuple({of.__name__!r}, {of._fields!r})" for name, of in classes.items()]
        return "\n".join([copied(kernel, *others, **named), *(["from collections import namedtuple", *lines] if lines else [])])

    wrapper.user_defined_triton_kernel_transitive_closure_source_code = with_tuples
    try:
        yield
    finally:
        wrapper.user_defined_triton_kernel_transitive_closure_source_code = copied


def _named_tuples(function: Any, seen: set[str]) -> dict[str, Any]:
    """Return the named tuples that a kernel, and what it calls, knows by their names."""
    found: dict[str, Any] = {}
    for name in function.fn.__code__.co_names:
        value = function.fn.__globals__.get(name)
        if isinstance(value, triton.JITFunction) and name not in seen:
            seen.add(name)
            found |= _named_tuples(value, seen)
        elif isinstance(value, type) and issubclass(value, tuple) and hasattr(value, "_fields"):
            found[name] = value
    return found
