"""Copies of small host tensors on a device."""

from __future__ import annotations

import torch
from torch import Tensor

# What captured CUDA graphs read at each replay, whoever else has let go of it. Nobody tells when a graph goes, so it stays: some
# numbers of each feature for each size of batches that was captured.
_OF_GRAPHS: dict[int, Tensor] = {}


def to_device(numbers: Tensor, device: torch.device) -> Tensor:
    """Copy numbers from pageable memory to a device, and do not wait for what is under way there.

    CUDA has read pageable memory when it returns; but a graph that captures the copy would read it again at each replay, when
    it may be gone. There the copy waits, which a capture refuses.
    """
    if torch.compiler.is_compiling() or device.type != "cuda":
        return numbers.to(device)
    return numbers.to(device, non_blocking=not torch.cuda.is_current_stream_capturing())


class DeviceCopy:
    """A copy that is kept, and read on any stream and by CUDA graphs, whoever lets go of it meanwhile.

    Args:
        numbers: on the host, in pageable memory.
        device: where the copy is.
    """

    __slots__ = ("_copied", "_stream", "_tensor")

    def __init__(self, numbers: Tensor, device: torch.device) -> None:
        self._tensor = to_device(numbers, device)
        self._stream, self._copied = 0, None
        if self._tensor.is_cuda and not torch.compiler.is_compiling():
            stream = torch.cuda.current_stream(device)
            self._stream, self._copied = stream.cuda_stream, stream.record_event()

    def read(self) -> Tensor:
        """Return the copy, for what is launched on the current stream."""
        if self._copied is None:
            return self._tensor
        if torch.cuda.is_current_stream_capturing():
            # A capture begins when the device has ended everything, and may wait for nothing older.
            _OF_GRAPHS.setdefault(id(self._tensor), self._tensor)
            return self._tensor
        stream = torch.cuda.current_stream(self._tensor.device)
        if stream.cuda_stream != self._stream:
            stream.wait_event(self._copied)
            self._tensor.record_stream(stream)
        return self._tensor
