"""Public functions where `torch.fx` traces a model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function


def recorded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function such that a call with proxies is recorded as one `call_function`, and any other call goes on."""

    @functools.wraps(function)
    def public(*args: Any, **kwargs: Any) -> Any:
        if (args and isinstance(args[0], Tensor)) or torch.compiler.is_compiling():
            return function(*args, **kwargs)
        relevant = tuple(_leaves((*args, *kwargs.values())))
        if has_torch_function(relevant):
            return handle_torch_function(public, relevant, *args, **kwargs)
        return function(*args, **kwargs)

    # Where a recorded graph finds it when it is loaded.
    public.__module__ = "jagged.ops"
    return public


def _leaves(arguments: Iterable[Any]) -> list[Any]:
    found = []
    for argument in arguments:
        if isinstance(argument, (tuple, list)):
            found += _leaves(argument)
        else:
            found.append(argument)
    return found
