"""Launches of known kernels; Triton itself, which has a GPU, is stood in for."""

from __future__ import annotations

import inspect
import types
from typing import Any

import pytest
import torch

from jagged.ops._shared import launch

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
