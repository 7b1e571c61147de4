"""Copies between the host and a device."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(numbers: Tensor, device: torch.device) -> Tensor:
    """Copy numbers from pageable memory to a device, and do not wait for what is under way there.

    CUDA has read pageable memory when it returns; but a graph that captures the copy would read it again at each replay, when
    it may be gone. There the copy waits, which a capture refuses.
    """
    if torch.compiler.is_compiling() or device.type != "cuda":
        return numbers.to(device)
    return numbers.to(device, non_blocking=not torch.cuda.is_current_stream_capturing())
