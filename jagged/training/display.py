"""What a run shows while it goes: a progress bar, TensorBoard curves, and its memory."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import torch
from tqdm import tqdm


def memory_in_use(device: torch.device) -> int:
    """Bytes: on a GPU what torch has allocated there, on the CPU the process's resident memory. No synchronisation."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return int(psutil.Process().memory_info().rss)


class Display(AbstractContextManager["Display"]):
    """A progress bar for one epoch and curves for the run.

    Args:
        device: whose memory is shown.
        curves: directory for TensorBoard's files; None for none. Without tensorboard installed there are none either.
        first_step: steps already done; later points of an earlier attempt are hidden.
        shown: False for no bar and no messages.
    """

    def __init__(self, device: torch.device, curves: Path | None, first_step: int, shown: bool) -> None:
        self._device = device
        self.shown = shown
        self._bar: Any = None
        self._writer: Any = None
        if curves is not None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                self.say("no TensorBoard curves: tensorboard is not installed (pip install tensorboard)")
            else:
                self._writer = SummaryWriter(str(curves), purge_step=first_step or None)

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.end_epoch()
        if self._writer is not None:
            self._writer.close()

    def say(self, message: str) -> None:
        """Print a line without disturbing the bar."""
        if self.shown:
            tqdm.write(message)

    def begin_epoch(self, name: str, batches: int, done: int) -> None:
        """Start a bar of `batches` steps of which `done` are done."""
        self.end_epoch()
        if self.shown:
            self._bar = tqdm(total=batches, initial=done, desc=name, unit="step", dynamic_ncols=True, mininterval=0.2)

    def advance(self, batches: int, loss: float, samples_per_second: float, tokens_per_second: float) -> None:
        """Move the bar by some steps with their mean loss."""
        if self._bar is not None:
            memory = memory_in_use(self._device) / 2**30
            text = f"loss {loss:.4f}, {samples_per_second:,.0f} samples/s, {tokens_per_second:,.0f} tokens/s, {memory:.2f} GiB"
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(batches)

    def end_epoch(self) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def curves(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point to each named curve."""
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)
