"""Between torchrec's JaggedTensor and the tensors that ops take."""

from __future__ import annotations

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor


def with_values(like: JaggedTensor, values: Tensor) -> JaggedTensor:
    """Return a JaggedTensor of new values over the samples of another; lengths and offsets are shared.

    Args:
        like: gives lengths and offsets.
        values: `[sum L, *F]`.
    """
    return JaggedTensor(values=values, lengths=like.lengths_or_none(), offsets=like.offsets_or_none())


def check_width(name: str, values: Tensor, width: int, shape: str = "[sum L, D]") -> None:
    """Check that rows have the rank of `shape` and, as its last dimension D, the width that a module was built for."""
    if values.dim() != shape.count(",") + 1 or values.shape[-1] != width:
        raise ValueError(
            f"{name}: expected values {shape} with D = {width}, got {list(values.shape)}; the module's width is set where it is "
            "built"
        )


def check_samples(name: str, rows: int, like: str, samples: int, cure: str, what: str = "samples") -> None:
    """Check that there is one for each sample, or row; in a compiled model the graph checks it when it runs."""
    if torch.compiler.is_compiling():
        torch._check(rows == samples)
    elif rows != samples:
        raise ValueError(f"{name}: expected {samples} {what}, as many as {like} has, got {rows}; {cure}")


def may_be_empty(rows: Tensor) -> bool:
    """Tell whether there are no rows, or none are possible by what a compiler knows."""
    if not torch.compiler.is_compiling():
        return rows.shape[0] == 0
    # What is traced with some rows is run without any, too, and nothing that is asked of a size here is asked again then.
    if torch.compiler.is_exporting():
        return True
    # Imported where it is needed, because sympy comes with it.
    from torch.fx.experimental.symbolic_shapes import guard_or_true

    return guard_or_true(rows.shape[0] == 0)
