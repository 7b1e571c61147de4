"""Linear cross-entropy on Hopper, in Gluon: kernels whose warps specialise, for what `supports` names nothing against."""

from __future__ import annotations

import functools

import torch

from jagged.ops.cross_entropy.spec import Inputs, Options

# What the kernels have been taught. Any other input or option is refused as soon as it is given.
INPUTS = frozenset(("hidden", "weight", "target"))
OPTIONS = frozenset(("temperature", "ignore_index", "hidden_eps", "weight_eps", "strategy", "memory_budget"))
# Of rows and of items: 32 bits count them, with the rest of the last tile.
MOST = 2**31 - 256
# Columns of hidden states that a program keeps on chip, beside a gradient or a walk's tiles. Forward and chunks take any number.
WIDEST = 256


def supports(x: Inputs, o: Options) -> str | None:
    """Return why the kernels do not serve matrices as `aligned` leaves them, None where they do, and faster at every width."""
    for name, given in zip(Inputs._fields, x, strict=True):
        if given is not None and name not in INPUTS:
            return f"{name} is given"
    for name, option, default in zip(Options._fields, o, _DEFAULTS, strict=True):
        if option != default and name not in OPTIONS:
            return f"{name} is {option}"
    if x.hidden.dtype != x.weight.dtype or x.hidden.dtype not in (torch.bfloat16, torch.float16):
        return "rows are not of 16 bits, in one dtype"
    if not is_hopper(x.hidden.device):
        return "the GPU is of another generation, or this Triton has no Gluon"
    for matrix in (x.hidden, x.weight):
        (rows, width), stride = matrix.shape, matrix.stride(0)
        if not 0 < rows < MOST:
            return "there are no rows, or too many"
        # One row alone is contiguous to PyTorch, however far the next one would be.
        if stride < width or stride * matrix.element_size() % 16 or matrix.data_ptr() % 16:
            return "rows overlap, or do not begin at 16 bytes"
    return None


_DEFAULTS = Options()


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Whether the device has compute capability 9.0, and this Triton the experimental parts that the kernels are written in."""
    if device.type != "cuda" or torch.version.hip is not None or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    try:
        import jagged.ops.cross_entropy.hopper.backward
        import jagged.ops.cross_entropy.hopper.logits  # noqa: F401
    except ImportError:
        return False
    return True
