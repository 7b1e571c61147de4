"""Attention of long samples on Hopper, in Gluon: kernels whose warps specialise, for what `supports` names nothing against."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from jagged.ops.attention.spec import Inputs, Options

# Mean number of queries of a sample above which these kernels take the place of the tiles for long samples: from the shortest
# that was measured on, the forward pass is 1.1 to 1.5 times as fast, at widths 96 to 128, with and without `causal`.
SPECIALISED = 96
# What the kernels have been taught. Any other input or option is refused as soon as it is given.
INPUTS = frozenset(("q", "k", "v", "q_offsets", "k_offsets", "num_targets"))
OPTIONS = frozenset(("causal", "window", "reach", "num_contextual", "prefix", "scale", "pointwise", "normalizer"))


def supports(x: Inputs, o: Options, grad: Tensor | None = None) -> str | None:
    """Return why the kernels do not serve a call, None where they do; with the output's `grad` they are those of its backward."""
    for place in _OTHER_INPUTS:
        if x[place] is not None:
            return f"{Inputs._fields[place]} is given"
    for place in _OTHER_OPTIONS:
        if o[place] != _DEFAULTS[place]:
            return f"{Options._fields[place]} is {o[place]}"
    total, _, width = x.q.shape
    if x.v.shape[2] != width:
        return "values are of another width than keys"
    if x.q.dtype.itemsize != 2 or not 64 < width <= 128:
        return "rows are not of 65 to 128 columns of 16 bits, and narrower heads have too little to multiply"
    if not 0 < SPECIALISED * (x.q_offsets.shape[0] - 1) < total:
        return "samples are short"
    if not x.k.numel():
        return "there are no keys"
    if capability(x.q.device) != (9, 0):
        return "the GPU is of another generation, which has other matrix instructions"
    if not all(is_aligned(rows) for rows in (x.q, x.k, x.v, *(() if grad is None else (grad,)))):
        return "rows do not begin at 16 bytes"
    return None if _has_gluon() else "this Triton has no Gluon"


_DEFAULTS = Options()
_OTHER_INPUTS = [place for place, name in enumerate(Inputs._fields) if name not in INPUTS]
_OTHER_OPTIONS = [place for place, name in enumerate(Options._fields) if name not in OPTIONS]


def is_aligned(rows: Tensor) -> bool:
    """Whether every row of every head begins at 16 bytes, as the tensor memory accelerator needs it."""
    row, head, _ = rows.stride()
    size = rows.dtype.itemsize
    return rows.data_ptr() % 16 == row * size % 16 == head * size % 16 == 0


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of an NVIDIA GPU; 0.0 of anything else."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" and torch.version.hip is None else (0, 0)


@functools.cache
def _has_gluon() -> bool:
    """Whether this Triton has the experimental language that the kernels are written in."""
    try:
        import jagged.ops.attention.hopper.backward  # noqa: F401
    except ImportError:
        return False
    return True
