"""Activation checkpointing of parts of a model: what they keep for backward is their input alone, and they are computed again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def draws(*modules: nn.Module, ever: bool = False) -> bool:
    """Return whether dropout of modules draws at random: as their parts are, in training or not, or `ever`.

    Looked at are PyTorch's modules of dropout, and `attention_dropout` of those here; not what else draws in a user's own.
    """
    return any((ever or part.training) and _rate(part) > 0 for module in modules for part in module.modules())


def _rate(part: nn.Module) -> float:
    rate = part.p if isinstance(part, nn.modules.dropout._DropoutNd) else getattr(part, "attention_dropout", 0.0)
    return float(rate)


def computed_again(modules: Sequence[nn.Module], function: Callable[..., Any], *inputs: Tensor | None) -> Any:
    """Return what a function makes of its inputs by some modules: only the inputs stay for backward, which calls it again.

    Its draws are repeated. A CUDA graph, at whose capture nobody may look at the random state, is refused where it draws. Nothing
    is kept or computed again without gradients, nor where a program is compiled, whose compiler chooses by itself.

    Raises:
        RuntimeError: dropout in a CUDA graph.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return function(*inputs)
    is_captured = any(of is not None and of.is_cuda for of in inputs) and torch.cuda.is_current_stream_capturing()
    if is_captured and draws(*modules):
        raise RuntimeError(
            "recompute: got dropout in a CUDA graph, whose capture cannot repeat what was drawn, expected none; set dropout to "
            "0, or recompute to False"
        )
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=not is_captured)
