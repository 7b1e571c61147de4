"""Launches of known kernels; Triton itself, which has a GPU, is stood in for."""

from __future__ import annotations

import inspect
import types
from typing import Any

import pytest
import torch

from jagged.ops._shared import launch
from jagged.ops._shared.backends import INTERPRETED

# Each of them, and each name that the launch makes of the others, might be a name of the launch's own.
NAMES = ("key", "key_offsets", "offsets", "kind", "found", "device", "grid", "options", "kernel", "at_offsets", "align_key")


class Kernel:
    """Records what it compiles, and what is launched again."""

    __name__ = "kernel"

    def __init__(self, names: tuple[str, ...]) -> None:
        fields = {"is_constexpr": False, "do_not_specialize": False, "default": inspect.Parameter.empty}
        self.params = [types.SimpleNamespace(name=name, **fields) for name in names]
        self.calls: list[dict[str, Any]] = []
        self.launched: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def compiled(**arguments: Any) -> object:
            self.calls.append(arguments)
            return types.SimpleNamespace(
                run=lambda *launched: self.launched.append(launched), function=None, packed_metadata=None
            )

        return compiled


def test_parameters_of_any_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    kernel = Kernel(NAMES)
    run = launch._make_run(kernel, {})
    arguments = [torch.zeros(4), None, 5, 2.5, *(torch.zeros(number + 1) for number in range(len(NAMES) - 4))]
    for _ in range(3):
        run((2, 3), *arguments, num_warps=4)
    (compiled,) = kernel.calls
    assert compiled.pop("num_warps") == 4
    assert list(compiled) == list(NAMES)
    assert all(given is argument for given, argument in zip(compiled.values(), arguments, strict=True))
    pointers = [argument.data_ptr() if isinstance(argument, torch.Tensor) else argument for argument in arguments]
    assert kernel.launched == [(2, 3, 1, 7, None, None, None, None, None, *pointers)] * 2


if not INTERPRETED:
    import triton
    import triton.language as tl
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from jagged.ops._shared.ring import LAYOUT, descriptor, rows_descriptor

    @gluon.jit(do_not_specialize=["total"])
    def described_kernel(rows, output, total, stride, factor, BLOCK: gl.constexpr, HAS_BIAS: gl.constexpr = True):
        pass

    @triton.jit
    def kernel_with_sums(numbers, SHARED_BYTES: tl.constexpr):
        tl.store(numbers, tl.sum(tl.load(numbers + tl.arange(0, 1024)), 0))


class Triton:
    """Triton's own way from a launch to what C is given, with all but the compiler and C itself."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from triton.backends.compiler import GPUTarget
        from triton.runtime import driver
        from triton.runtime.jit import JITFunction

        self.device = 0
        self.bound = 0
        self.given: list[tuple[Any, ...]] = []

        def fill(pointer: int, *others: Any) -> tuple[Any, ...]:
            assert pointer % 16 == 0
            return pointer, *(list(other) if isinstance(other, (list, tuple)) else other for other in others)

        stand_in = types.SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
            get_current_device=lambda: self.device,
            get_current_stream=lambda device: 7,
            utils=types.SimpleNamespace(fill_tma_descriptor=fill, fill_tma_descriptor_tiled=fill),
        )

        def compiled(kernel: Any, key: Any, signature: Any, device: int, *_: Any) -> Any:
            made = types.SimpleNamespace(
                run=self.launcher(signature),
                function=f"of device {device}",
                packed_metadata=(4, 1),
                launch_metadata=lambda *_: None,
            )
            kernel.device_caches[device][0][key] = made
            return made

        run = JITFunction.run

        def bound(kernel: Any, *arguments: Any, **named: Any) -> Any:
            self.bound += 1
            return run(kernel, *arguments, **named)

        monkeypatch.setattr(driver, "_active", stand_in)
        monkeypatch.setattr(JITFunction, "_do_compile", compiled)
        monkeypatch.setattr(JITFunction, "run", bound)
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: self.device, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)

    def launcher(self, signature: dict[str, Any]) -> Any:
        from triton.backends.nvidia.driver import CudaLauncher, wrap_handle_tensordesc

        def launch(*given: Any) -> None:
            # 3.7 hands C one sequence of arguments, 3.6 each by itself.
            flat = [*given[:-1], *given[-1]] if isinstance(given[-1], (list, tuple)) else list(given)
            self.given.append(tuple(x.data_ptr() if isinstance(x, torch.Tensor) else getattr(x, "calls", x) for x in flat))

        described = {"swizzle": 3, "elem_size": 2, "elem_type": 8, "block_size": [64, 64], "fp4_padded": False}
        made = CudaLauncher.__new__(CudaLauncher)
        made.launch = wrap_handle_tensordesc(launch, signature, [described])
        made.num_ctas, made.arg_annotations, made.kernel_signature = 1, None, None
        made.global_scratch_size = made.global_scratch_align = made.profile_scratch_size = made.profile_scratch_align = 0
        made.launch_cooperative_grid = made.launch_pdl = False
        return made


@pytest.mark.skipif(INTERPRETED, reason="the interpreter has no descriptors")
def test_descriptors_are_launched_as_triton_launches_them(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = Triton(monkeypatch)
    launch_described = launch.Launcher(described_kernel)
    matrix, output = torch.zeros(100, 80, dtype=torch.bfloat16), torch.zeros(9, dtype=torch.float32)
    rows = rows_descriptor(matrix, 64, 64)
    assert rows == TensorDescriptor(matrix, matrix.shape, matrix.stride(), [64, 64], LAYOUT)
    other_layout = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)
    usual = rows, output, 100, 80, 0.5
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        (usual, {}),
        ((rows_descriptor(matrix, 128, 64), *usual[1:]), {}),
        ((rows_descriptor(matrix.half(), 64, 64), *usual[1:]), {}),
        ((descriptor(matrix, matrix.shape, matrix.stride(), [64, 64], other_layout), *usual[1:]), {}),
        ((rows, output[1:], *usual[2:]), {}),
        ((*usual[:3], 81, 0.5), {}),
        ((*usual[:3], 1, 0.5), {}),
        ((*usual[:3], 2**40, 0.5), {}),
        ((*usual[:3], 2**63, 0.5), {}),
        ((*usual[:2], 2**40, 80, 0.5), {}),
        ((*usual[:2], 2**63, 80, 0.5), {}),
        ((*usual[:4], None), {}),
        (usual, {"HAS_BIAS": 1}),
        (usual, {"num_warps": 8}),
    ]
    for device in (0, 1):
        triton.device = device
        for arguments, named in calls:
            named = {"BLOCK": 64, "num_warps": 4, **named}
            before = triton.bound
            # What is new is Triton's, then twice it is not; other rows of the same kind are known.
            launch_described((3, 2), *arguments, **named)
            assert triton.bound == before + 1, arguments
            launch_described((3, 2), *arguments, **named)
            described_kernel[(3, 2)](*arguments, **named)
            assert triton.bound == before + 2, arguments
            first, ours, its = triton.given[-3:]
            hooks = [place for place, given in enumerate(its) if given == []]
            # Triton hands hooks on that are empty, and looks at them in C.
            assert [None if place in hooks else given for place, given in enumerate(its)] == list(ours)
            assert first == its
    before = triton.bound
    launch_described((5,), rows_descriptor(matrix[8:, 16:], 64, 64), *usual[1:2], 92, 160, 2.5, BLOCK=64, num_warps=4)
    launch_described((0,), *usual, BLOCK=64, num_warps=4)
    assert triton.bound == before
    # With constants of its own a launch is found by the arguments alone.
    with_constants = launch.bound(launch_described, BLOCK=64, HAS_BIAS=False, num_warps=4)
    for _ in range(2):
        with_constants((3,), *usual)
        with_constants((3,), *usual[:3], 81, 0.5)
    assert triton.bound == before + 2
    described_kernel[(3,)](*usual, BLOCK=64, HAS_BIAS=False, num_warps=4)
    first, ours, its = triton.given[-5], triton.given[-3], triton.given[-1]
    assert first == its
    assert ours[13:] == its[13:]
    # A descriptor of another type is Triton's to refuse or to take.
    with pytest.raises(Exception, match="failed to specialize"):
        launch_described((1,), object(), *usual[1:], BLOCK=64, num_warps=4)


@pytest.mark.skipif(INTERPRETED, reason="interpreted kernels have no shared memory")
def test_launches_with_more_shared_memory_than_triton_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the driver and C are given, at the first launch and later ones; all before them is Triton's own, with its compiler."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia import driver as of_nvidia
    from triton.runtime import driver
    from triton.runtime.errors import OutOfResources

    loaded: list[int] = []
    launched: list[int] = []

    def load_binary(name: str, binary: bytes, shared: int, device: int) -> tuple[Any, ...]:
        loaded.append(shared)
        return object(), shared, 32, 0, 1024

    def launch_in_c(*given: Any) -> None:
        # Warps, clusters, shared memory; and the function, for which its limit stands here.
        (metadata,) = [x for x in given if isinstance(x, tuple) and len(x) == 3 and all(isinstance(y, int) for y in x)]
        assert metadata[2] == given[4]
        launched.append(metadata[2])

    stand_in = types.SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 7,
        launcher_cls=of_nvidia.CudaLauncher,
        utils=types.SimpleNamespace(
            load_binary=load_binary, launch=launch_in_c, get_device_properties=lambda device: {"max_shared_mem": 227 * 1024}
        ),
    )
    monkeypatch.setattr(driver, "_active", stand_in)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    # What asks for the driver's library: C that 3.6 compiles against it, and 3.7's objects in it.
    made = types.SimpleNamespace(launch=launch_in_c)
    for name, given in (
        ("compile_module_from_src", made), ("library_dirs", []), ("annotate_arguments", None), ("make_kernel_signature", b""),
    ):  # fmt: skip
        monkeypatch.setattr(of_nvidia, name, lambda *_, given=given, **named: given, raising=False)
    launch_with_sums, again = launch.Launcher(kernel_with_sums), launch.Launcher(kernel_with_sums)
    numbers = torch.zeros(1024)
    of_triton = kernel_with_sums.warmup(torch.float32, SHARED_BYTES=0, grid=(1,)).metadata.shared
    assert 0 < of_triton < 1024
    whole = -(-of_triton // 16) * 16
    for number in range(3):
        launch_with_sums((2,), numbers, SHARED_BYTES=196608)
        # Of another launcher, too, the kernel is the one that Triton has compiled before.
        again((3,), numbers, SHARED_BYTES=196608)
        assert launched == [whole + 196608] * (2 * number + 2)
        assert loaded == [whole + 196608]
    for _ in range(2):
        launch_with_sums((2,), numbers, SHARED_BYTES=98304)
        assert launched[-1] == whole + 98304
        launch_with_sums((2,), numbers, SHARED_BYTES=0)
        assert launched[-1] == of_triton
        launch_with_sums((2,), numbers, SHARED_BYTES=196608)
        assert launched[-1] == whole + 196608
    assert loaded == [whole + 196608, whole + 98304, of_triton]
    with pytest.raises(OutOfResources, match="shared memory"):
        launch_with_sums((2,), numbers, SHARED_BYTES=227 * 1024)
    for known in (launch_with_sums, again):
        known.compiled.clear()  # type: ignore[attr-defined]
    kernel_with_sums.device_caches.clear()
