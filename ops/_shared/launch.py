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
    _kind = {name}.__class__
    if _kind is _Tensor or _kind is _Parameter:
        _key_{name} = {name}.dtype
        {pointer} = {name}.data_ptr()
        _align_{name} = {pointer} & 15 == 0
    elif _kind is int:
        _key_{name} = {integer}
        {pointer}, _align_{name} = {name}, int
    elif {name} is None:
        {pointer} = _key_{name} = _align_{name} = None
    elif _kind is float:
        {pointer}, _key_{name}, _align_{name} = {name}, float, None
    else:
        return _kernel[_grid]({call})
"""
_WIDE = "(-2147483648 <= {name} < 2147483648)"
_SPECIALISED = "({name} == 1, {name} % 16 == 0, -2147483648 <= {name} < 2147483648)"


def _make_run(kernel: Any, compiled: dict[tuple[Any, ...], Any]) -> Any:
    """Return a function of the kernel's own signature, which finds the compiled kernel and launches it."""
    parameters = kernel.params
    defaults = {f"_default_{p.name}": p.default for p in parameters if p.default is not inspect.Parameter.empty}
    heads = [p.name if f"_default_{p.name}" not in defaults else f"{p.name}=_default_{p.name}" for p in parameters]
    call = ", ".join([f"{p.name}={p.name}" for p in parameters] + ["**_options"])
    walk, key, launched = [], [], []
    for p in parameters:
        if p.is_constexpr:
            # True and 1 are equal and compile to other code.
            key += [p.name, f"{p.name}.__class__"]
            launched.append(p.name)
            continue
        integer = (_WIDE if p.do_not_specialize else _SPECIALISED).format(name=p.name)
        walk.append(_WALK.format(name=p.name, pointer=f"_at_{p.name}", integer=integer, call=call))
        key += [f"_key_{p.name}", f"_align_{p.name}"]
        launched.append(f"_at_{p.name}")
    # No name but the parameters' own begins without an underscore: a kernel may have a parameter `key`.
    source = f"""\
def run(_grid, {", ".join(heads)}, **_options):
{"".join(walk)}\
    _device = _current_device()
    _key = (_device, {", ".join(key)}, *_options.items())
    _found = _compiled.get(_key)
    if _found is None:
        _compiled[_key] = _kernel[_grid]({call})
        return
    _run, _function, _metadata = _found.run, _found.function, _found.packed_metadata
    _y = _grid[1] if len(_grid) > 1 else 1
    _z = _grid[2] if len(_grid) > 2 else 1
    _run(_grid[0], _y, _z, _current_stream(_device), _function, _metadata, None, None, None, {", ".join(launched)})
"""
    names: dict[str, Any] = {
        "_Tensor": Tensor,
        "_Parameter": torch.nn.Parameter,
        "_kernel": kernel,
        "_compiled": compiled,
        "_current_device": torch.cuda.current_device,
        "_current_stream": getattr(torch._C, "_cuda_getCurrentRawStream", None),
        **defaults,
    }
    exec(compile(source, f"<launch of {kernel.__name__}>", "exec"), names)
    return names["run"]
