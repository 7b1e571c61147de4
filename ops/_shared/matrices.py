"""What launchers of several families do to matrices, and ask of their device."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from jagged.ops._shared.sizes import cdiv


@functools.cache
def device_properties(device: torch.device) -> tuple[int, int]:
    """Return the number of multiprocessors and the major compute capability."""
    if device.type != "cuda":
        # The interpreter has neither; two multiprocessors make it split what a GPU splits.
        return 2, 9
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.major


def inverse_scale_of(grad_loss: Tensor, grad_lse: Tensor | None, valid: Tensor) -> Tensor:
    """Return what float16 gradients of logits are divided by to use that dtype's range: they underflow for any large batch."""
    bound = grad_loss.abs() if grad_lse is None else grad_loss.abs() + grad_lse.abs()
    return torch.where(valid, bound, 0).amax().clamp_(min=1e-30) / 2**14


def aligned(matrix: Tensor) -> Tensor:
    """Return the matrix with adjacent columns, rows starting every multiple of 16 elements, zeros up to such a width.

    Loads are wide then; with odd rows each element is fetched by itself, from addresses that no longer fit into the registers.
    """
    width = max(16, cdiv(matrix.shape[1], 16) * 16)
    if width != matrix.shape[1]:
        return torch.nn.functional.pad(matrix, (0, width - matrix.shape[1]))
    return matrix if matrix.stride(1) == 1 and matrix.stride(0) % 16 == 0 else matrix.contiguous()
