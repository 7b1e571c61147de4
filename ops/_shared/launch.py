"""Launches of compiled Triton kernels without Triton's own walk over their arguments, which costs more than many kernels take.

Triton asks of every argument of every launch what it is specialised for, in Python, and again when it packs them: 20 to 60 us
for kernels of 20 to 60 arguments. Here each kernel has a function of its own, made from its signature, that builds one key of all
that Triton specialises: dtypes, whether a pointer or an integer is a multiple of 16, integers that are 1 or need 64 bits, what is
None, constants, options such as `num_warps`, and the device. Under a known key the compiled kernel is launched at once. A new
key, an argument of another kind (a descriptor, a tuple), a profiler's hooks, the interpreter and autotuning go Triton's way.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.runtime.jit import JITFunction


class Launcher:
    """Launches one kernel: `LAUNCHER(grid, *arguments, **constants_and_options)`, as `kernel[grid](...)` does.

    Args:
        kernel: what `triton.jit` gives. `debug` and other settings of Triton are read when a kernel is first launched.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.compiled: dict[tuple[Any, ...], Any] = {}
        # Interpreted and autotuned kernels are objects of other types.
        self._run = _make_run(kernel, self.compiled) if isinstance(kernel, JITFunction) else None

    def __call__(self, grid: tuple[int, ...], *arguments: Any, **named: Any) -> None:
        """Launch on the current device and stream; an empty grid launches nothing."""
        if 0 in grid:
            return
        if self._run is None or knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls:
            self.kernel[grid](*arguments, **named)
        else:
            self._run(grid, *arguments, **named)


# What is known of a tensor, an integer and a float, for the key and for the launch; others go Triton's way.
_WALK = """\
    kind = {name}.__class__
    if kind is Tensor or kind is Parameter:
        key_{name} = {name}.dtype
        {pointer} = {name}.data_ptr()
        align_{name} = {pointer} & 15 == 0
    elif kind is int:
        key_{name} = {integer}
        {pointer}, align_{name} = {name}, int
    elif {name} is None:
        {pointer} = key_{name} = align_{name} = None
    elif kind is float:
        {pointer}, key_{name}, align_{name} = {name}, float, None
    else:
        return kernel[grid]({call})
"""
_WIDE = "(-2147483648 <= {name} < 2147483648)"
_SPECIALISED = "({name} == 1, {name} % 16 == 0, -2147483648 <= {name} < 2147483648)"


def _make_run(kernel: Any, compiled: dict[tuple[Any, ...], Any]) -> Any:
    """Return a function of the kernel's own signature, which finds the compiled kernel and launches it."""
    parameters = kernel.params
    defaults = {f"default_{p.name}": p.default for p in parameters if p.default is not inspect.Parameter.empty}
    heads = [p.name if f"default_{p.name}" not in defaults else f"{p.name}=default_{p.name}" for p in parameters]
    call = ", ".join([f"{p.name}={p.name}" for p in parameters] + ["**options"])
    walk, key, launched = [], [], []
    for p in parameters:
        if p.is_constexpr:
            # True and 1 are equal and compile to other code.
            key += [p.name, f"{p.name}.__class__"]
            launched.append(p.name)
            continue
        integer = (_WIDE if p.do_not_specialize else _SPECIALISED).format(name=p.name)
        walk.append(_WALK.format(name=p.name, pointer=f"at_{p.name}", integer=integer, call=call))
        key += [f"key_{p.name}", f"align_{p.name}"]
        launched.append(f"at_{p.name}")
    source = f"""\
def run(grid, {", ".join(heads)}, **options):
{"".join(walk)}\
    device = current_device()
    key = (device, {", ".join(key)}, *options.items())
    found = compiled.get(key)
    if found is None:
        compiled[key] = kernel[grid]({call})
        return
    run_compiled, function, metadata = found.run, found.function, found.packed_metadata
    y = grid[1] if len(grid) > 1 else 1
    z = grid[2] if len(grid) > 2 else 1
    run_compiled(grid[0], y, z, current_stream(device), function, metadata, None, None, None, {", ".join(launched)})
"""
    names: dict[str, Any] = {
        "Tensor": Tensor,
        "Parameter": torch.nn.Parameter,
        "kernel": kernel,
        "compiled": compiled,
        "current_device": torch.cuda.current_device,
        "current_stream": getattr(torch._C, "_cuda_getCurrentRawStream", None),
        **defaults,
    }
    exec(compile(source, f"<launch of {kernel.__name__}>", "exec"), names)
    return names["run"]
