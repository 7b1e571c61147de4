"""Launches as a GPU has them, without one: Triton binds and specialises each one's arguments and compiles its kernel.

The interpreter takes a launch's arguments as they are, and kernels that are compiled ahead of time have signatures that tests
write. Here the launches themselves are compiled, for compute capability 9.0 as far as Triton's own representation.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

from jagged.ops import trust_values
from jagged.ops._shared import backends
from jagged.ops._shared.launch import LAUNCHERS
from tests.ops import families
from tests.places import PLACE, Place
from tests.strategies import jagged_of

pytestmark = pytest.mark.skipif(PLACE.name != "cpu", reason="kernels are interpreted or run here")
# Products of the library of the device, and nothing of ours.
WITHOUT_KERNELS = ("linear_bce",)


class Driver:
    """What Triton asks of a GPU's driver before it launches."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Metadata(NamedTuple):
    """What launches read of a compiled kernel's."""

    target: Any
    num_warps: int
    num_ctas: int
    shared: int


class Launches:
    """Kernels by their names: the numbers of arguments of launches that Triton bound, and of those that were made again."""

    def __init__(self) -> None:
        self.bound: dict[str, set[int]] = {}
        self.again: dict[str, set[int]] = {}


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    """Put a driver in place of a GPU's, and let kernels be compiled but not run."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    # Before anything is patched: modules of kernels remember whether they are interpreted, and other tests compile them.
    families.kernels(for_hopper=True)
    found = Launches()
    run = JITFunction.run

    def compiled(self: Any, key: Any, signature: Any, device: int, constants: Any, options: Any, attributes: Any, _: bool) -> Any:
        caches, _, target, backend, _ = self.device_caches[device]
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        source = self.ASTSource(self, signature, constants, attributes)
        source.make_ir(target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context)
        caches[key] = key
        return key

    def bound(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        run(self, *args, grid=grid, warmup=True, **named)
        name, parameters = self.__name__, len(self.params)
        found.bound.setdefault(name, set()).add(parameters)

        def again(*launched: Any) -> None:
            # Behind grid, stream, function, metadata and hooks come the kernel's own.
            found.again.setdefault(name, set()).add(len(launched) - 9)

        metadata = Metadata(GPUTarget("cuda", 90, 32), 4, 1, 0)
        return types.SimpleNamespace(run=again, function=None, packed_metadata=None, metadata=metadata)

    monkeypatch.setattr(JITFunction, "_do_compile", compiled)
    monkeypatch.setattr(JITFunction, "run", bound)
    monkeypatch.setattr(backends, "INTERPRETED", True)
    monkeypatch.setattr(families, "PLACE", Place("cpu", torch.device("cpu"), "triton", PLACE.dtypes))
    # Of launchers that are made in a test, and of those that there are.
    for name, given in (("_cuda_getDevice", lambda: 0), ("_cuda_getCurrentRawStream", lambda device: 0)):
        monkeypatch.setattr(torch._C, name, given, raising=False)
    for launch in LAUNCHERS:
        monkeypatch.setitem(launch.__globals__, "_current_device", lambda: 0)
        monkeypatch.setitem(launch.__globals__, "_current_stream", lambda device: 0)
    before = driver._active
    driver.set_active(Driver())
    yield found
    driver._active = before
    # No other test is to find what stands for compiled kernels here.
    for launch in LAUNCHERS:
        launch.compiled.clear()
        launch.kernel.device_caches.clear()


@pytest.mark.parametrize("family", [name for name in families.FAMILIES if name not in WITHOUT_KERNELS])
def test_launches_are_compiled(launches: Launches, family: str) -> None:
    """What is launched a second time has the arguments of the first, however they were given."""
    # What is written down on the device is not there to be read.
    with trust_values():
        for dtype, width, batch in (
            (torch.float32, 20, jagged_of((3, 0, 40, 1), torch.int32)),
            (torch.bfloat16, 64, jagged_of((70, 0, 40), torch.int64)),
        ):
            step = families.FAMILIES[family](batch, dtype, width)
            for _ in range(2):
                step.run()
    assert launches.bound
    for name, numbers in launches.again.items():
        assert numbers <= launches.bound[name], name
    # Each of a family's kernels was launched again without Triton's walk, but where it is given what that alone knows.
    assert set(launches.again) == set(launches.bound)


def test_a_wrong_launch_is_found(launches: Launches) -> None:
    from jagged.ops._shared.kernels import _launch_pair_offsets

    with pytest.raises(Exception, match="missing 4 required positional arguments"):
        _launch_pair_offsets((1,), torch.zeros(2, dtype=torch.int64))
