"""Launches of compiled Triton kernels without Triton's own walk over their arguments, which costs more than many kernels take.

Triton asks of every argument of every launch what it is specialised for, in Python, and again when it packs them: 20 to 60 us
for kernels of 20 to 60 arguments. Here each kernel has a function of its own, made from its signature, that builds one key of all
that Triton specialises: dtypes, whether a pointer or an integer is a multiple of 16, integers that are 1 or need 64 bits, what is
None, a descriptor's block and layout, constants, options such as `num_warps`, and the device. Under a known key the compiled
kernel is launched at once; of a descriptor Triton itself makes what the kernel reads. A new key, an argument of another kind (a
tuple), a profiler's hooks, the interpreter and autotuning go Triton's way.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction

from jagged.ops._shared.sizes import cdiv

#: What `Launcher` and `bound` have given, in their order: functions whose attributes are `kernel` and `compiled`, by key.
LAUNCHERS: list[Any] = []
_IS_3_6 = triton.__version__.startswith("3.6.")


def Launcher(kernel: Any) -> Callable[..., None]:  # noqa: N802
    """Return what launches one kernel: `(grid, *arguments, **constants_and_options)`, as `kernel[grid](...)` does.

    It launches on the current device and stream; an empty grid launches nothing. It is a plain function, because calls of objects
    first collect their arguments.

    Args:
        kernel: what `triton.jit` gives. `debug` and other settings of Triton are read when a kernel is first launched.
    """
    return _made(kernel, {})


def bound(launch: Any, **constants: Any) -> Callable[..., None]:
    """Return `launch` with constants and options: `(grid, *arguments)`, of which the key holds the arguments alone.

    What it gives is to be kept: it is a function of its own, which compiles anew.
    """
    return _made(launch.kernel, constants)


def _made(kernel: Any, constants: dict[str, Any]) -> Callable[..., None]:
    # Interpreted and autotuned kernels are objects of other types.
    launch: Any = (_make_run if isinstance(kernel, JITFunction) else _plain)(kernel, constants)
    LAUNCHERS.append(launch)
    return launch  # type: ignore[no-any-return]


def _plain(kernel: Any, constants: dict[str, Any]) -> Callable[..., None]:
    def launch(grid: tuple[int, ...], *arguments: Any, **named: Any) -> None:
        if 0 not in grid:
            kernel[grid](*arguments, **named, **constants)

    launch.kernel, launch.compiled = kernel, {}  # type: ignore[attr-defined]
    return launch


# What is known of a tensor, an integer, a float and a descriptor, for the key and for the launch; others go Triton's way.
_WALK = """\
    _kind = {name}.__class__
    if _kind is _Tensor or _kind is _Parameter:
        _at_{name} = {name}.data_ptr()
        _key_{name} = ({name}.dtype,) if _at_{name} & 15 else {name}.dtype
    elif _kind is int:
        _at_{name}, _key_{name} = {name}, {integer}
    elif {name} is None:
        _at_{name} = _key_{name} = None
    elif _kind is float:
        _at_{name}, _key_{name} = {name}, float
"""
# Gluon's descriptors have a layout, Triton's none.
_WALK_OF_DESCRIPTORS = """\
    elif _kind is _Descriptor:
        _at_{name}, _key_{name} = {name}, ({name}.base.dtype, {layout}*{name}.block_shape)
"""
_OTHERS = """\
    else:
        return _kernel[_grid]({call})
"""
_IN_32_BITS, _IN_64_BITS = "-2147483648 <= {name} < 2147483648", "{name} < 9223372036854775808"
_WIDTH = f"32 if {_IN_32_BITS} else 64 if {_IN_64_BITS} else 0"
_SPECIALISED = f"(1 if {{name}} == 1 else 0 if {{name}} & 15 else 16) if {_IN_32_BITS} else ({{name}} & 15 == 0, {_IN_64_BITS})"


def _launch_of(kernel: Any) -> tuple[Any, Any, Any, tuple[Any, Any] | None]:
    """Return what launches a compiled kernel, its function and metadata, and flags where that is C's launcher itself.

    Around it is Python that asks for scratch memory, which costs a microsecond and which few kernels have. Of Triton 3.6 alone is
    it known what C is given.
    """
    run = kernel.run
    if _IS_3_6 and type(run).__name__ == "CudaLauncher" and not run.global_scratch_size and not run.profile_scratch_size:
        return run.launch, kernel.function, kernel.packed_metadata, (run.launch_cooperative_grid, run.launch_pdl)
    return run, kernel.function, kernel.packed_metadata, None


class _Enlarging:
    """Launches a kernel with as many bytes of shared memory more than Triton counts as its constant `SHARED_BYTES` says.

    What is launched is asked of the compiled kernel, and its limit set when it is first loaded, so it is told before.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def launch(**arguments: Any) -> Any:
            compiled = self.kernel.warmup(grid=grid, **arguments)
            if compiled is not None and arguments["SHARED_BYTES"] and not hasattr(compiled, "is_enlarged"):
                metadata = compiled.metadata
                shared = cdiv(metadata.shared, 16) * 16 + arguments["SHARED_BYTES"]
                compiled.metadata = metadata._replace(shared=shared)
                compiled.packed_metadata = make_backend(metadata.target).pack_metadata(compiled.metadata)
                compiled.is_enlarged = True
            return self.kernel[grid](**arguments)

        return launch


def _make_run(kernel: Any, constants: dict[str, Any]) -> Any:
    """Return a function of the kernel's own signature less `constants`, which finds the compiled kernel and launches it."""
    compiled: dict[tuple[Any, ...], Any] = {}
    parameters = kernel.params
    values = {f"_default_{p.name}": p.default for p in parameters if p.default is not inspect.Parameter.empty}
    values |= {f"_bound_{name}": value for name, value in constants.items()}
    heads = [
        p.name if f"_default_{p.name}" not in values else f"{p.name}=_default_{p.name}"
        for p in parameters
        if p.name not in constants
    ]
    of_options = [f"{name}=_bound_{name}" for name in constants if name not in {p.name for p in parameters}]
    handed = [f"{p.name}=_bound_{p.name}" if p.name in constants else f"{p.name}={p.name}" for p in parameters]
    call = ", ".join([*handed, *of_options, "**_options"])
    is_gluon = hasattr(kernel, "is_gluon") and kernel.is_gluon()
    if is_gluon:
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
    else:
        from triton.tools.tensor_descriptor import TensorDescriptor
    walk, key, launched = [], [], []
    for p in parameters:
        if p.name in constants:
            launched.append(f"_bound_{p.name}")
            continue
        if p.is_constexpr:
            # True and 1 are equal and compile to other code.
            key += [p.name, f"{p.name}.__class__"]
            launched.append(p.name)
            continue
        integer = (_WIDTH if p.do_not_specialize else _SPECIALISED).format(name=p.name)
        layout = f"{p.name}.layout, " if is_gluon else ""
        walk.append((_WALK + _WALK_OF_DESCRIPTORS + _OTHERS).format(name=p.name, integer=integer, layout=layout, call=call))
        key.append(f"_key_{p.name}")
        launched.append(f"_at_{p.name}")
    given = ", ".join(launched)
    # No name but the parameters' own begins without an underscore: a kernel may have a parameter `key`.
    source = f"""\
def run(_grid, {", ".join(heads)}, **_options):
    if 0 in _grid:
        return
    if _knobs.launch_enter_hook.calls or _knobs.launch_exit_hook.calls:
        return _kernel[_grid]({call})
{"".join(walk)}\
    _device = _current_device()
    _key = (_device, {", ".join(key)}, *_options, *_options.values())
    _found = _compiled.get(_key)
    if _found is None:
        _found = _kernel[_grid]({call})
        if _found is not None:
            _compiled[_key] = _launch_of(_found)
        return
    _run, _function, _metadata, _flags = _found
    _y = _grid[1] if len(_grid) > 1 else 1
    _z = _grid[2] if len(_grid) > 2 else 1
    if _flags is None:
        _run(_grid[0], _y, _z, _current_stream(_device), _function, _metadata, None, None, None, {given})
    else:
        _cooperative, _dependent = _flags
        _run(_grid[0], _y, _z, _current_stream(_device), _function, _cooperative, _dependent, None, None, _metadata, None, None,
            None, {given})
"""
    names: dict[str, Any] = {
        "_Tensor": Tensor,
        "_Parameter": torch.nn.Parameter,
        "_kernel": _Enlarging(kernel) if any(p.name == "SHARED_BYTES" for p in parameters) else kernel,
        "_compiled": compiled,
        "_launch_of": _launch_of,
        "_knobs": knobs.runtime,
        # Without the question whether CUDA is initialised, as it is where there are tensors to launch with.
        "_current_device": getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device),
        "_current_stream": getattr(torch._C, "_cuda_getCurrentRawStream", None),
        "_Descriptor": TensorDescriptor,
        **values,
    }
    exec(compile(source, f"<launch of {kernel.__name__}>", "exec"), names)
    launch = names["run"]
    launch.kernel, launch.compiled = kernel, compiled
    return launch
