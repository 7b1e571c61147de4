"""Whether a call is computed as it is made, by whoever makes it."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad


def is_eager() -> bool:
    """Whether nobody compiles, traces or transforms what is called: those who do know PyTorch's operations."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or torch._C._get_tracing_state() is not None:
        return False
    return forward_ad._current_level < 0 and torch._C._functorch.peek_interpreter_stack() is None
