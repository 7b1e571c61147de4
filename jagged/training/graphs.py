"""Forward and backward of a training step as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from jagged.config import TrainerConfig
from jagged.data.batches import SequenceBatch, keyed
from jagged.data.dataset import KEY
from jagged.models import NextItemTask
from jagged.modules import HeldUpdates
from jagged.modules.trained_tables import TrainedTables
from jagged.training.processes import Processes

# The head's mark of a row that has no loss.
_NO_TARGET = -100
# Rows of a sample that only fills: attention costs their square.
_FILLING_ROWS = 64


def graphs_serve(config: TrainerConfig, task: nn.Module, processes: Processes) -> bool:
    """Whether a run's steps are replayed as graphs.

    Several processes exchange sizes through the host, which no graph can; a graph has one gradient, which is a whole step's.
    """
    alone_on_gpu = processes.world_size == 1 and processes.device.type == "cuda"
    return config.cuda_graphs and config.accumulate == 1 and alone_on_gpu and isinstance(task, NextItemTask)


def capacity(rows: int, samples: int) -> tuple[int, int]:
    """Return the rows and samples of the graph that a batch is replayed by.

    Rows are filled up by less than a sixteenth (or 64), samples to a power of two: an empty sample costs next to nothing.
    """
    quantum = max(_FILLING_ROWS, (1 << max(rows - 1, 0).bit_length()) // 32)
    filled = max(-(-rows // quantum), 1) * quantum
    return filled, 1 << (samples + quantum // _FILLING_ROWS - 1).bit_length()


@dataclass
class Filled:
    """A training batch's tensors at a graph's size: what is missing is made up by samples of rows that have no loss.

    Attributes:
        keys: "item_id", and what else batches have of each row.
        values: int64 `[keys * rows]`.
        targets: int64 `[rows]`.
        lengths: int64 `[samples]`.
        offsets: int64 `[samples + 1]`.
    """

    keys: tuple[str, ...]
    values: Tensor
    targets: Tensor
    lengths: Tensor
    offsets: Tensor

    @classmethod
    def empty(cls, rows: int, samples: int, device: torch.device, keys: tuple[str, ...] = (KEY,)) -> Filled:
        """Memory for `rows` rows in `samples` samples, as `capacity` says for the batches to come."""
        values, targets, lengths, offsets = (
            torch.zeros(count, dtype=torch.int64, device=device) for count in (len(keys) * rows, rows, samples, samples + 1)
        )
        return cls(keys, values, targets, lengths, offsets)

    def take(self, batch: SequenceBatch) -> None:
        """Copy a batch here and fill up, without a look at its values."""
        rows, samples = batch.targets.shape[0], batch.features.stride()
        offsets = batch.features.offsets()[: samples + 1]
        for values, found in zip(self.values.chunk(len(self.keys)), batch.features.values().chunk(len(self.keys)), strict=True):
            values[:rows].copy_(found)
            values[rows:].zero_()
        self.targets[:rows].copy_(batch.targets)
        self.targets[rows:].fill_(_NO_TARGET)
        self.offsets[: samples + 1].copy_(offsets)
        # Samples of 64 rows as long as rows are missing, then empty ones.
        last = rows + _FILLING_ROWS * (self.offsets.shape[0] - samples - 1)
        filling = self.offsets[samples + 1 :]
        torch.arange(rows + _FILLING_ROWS, last + 1, _FILLING_ROWS, out=filling)
        filling.clamp_(max=self.targets.shape[0])
        torch.sub(self.offsets[1:], self.offsets[:-1], out=self.lengths)

    def batch(self, num_items: int | None) -> SequenceBatch:
        """These tensors as a batch; a new one each time, since torchrec's keep what they once worked out."""
        lengths, offsets = self.lengths, self.offsets
        if (others := len(self.keys) - 1) > 0:
            behind = [offsets[1:] + key * self.targets.shape[0] for key in range(1, others + 1)]
            lengths, offsets = lengths.repeat(len(self.keys)), torch.cat([offsets, *behind])
        return SequenceBatch(keyed(self.values, lengths, offsets, self.keys), self.targets, self.lengths, num_items=num_items)


@dataclass
class _Graph:
    graph: torch.cuda.CUDAGraph
    inputs: Filled
    loss: Tensor
    # The tensors of tables' gradients that a replay writes.
    held: list[list[Any]]


class GraphedSteps:
    """Runs forward and backward of training batches as CUDA graphs, which are captured when a size first comes.

    The step of a small model is some two hundred launches that cost the host several times what they cost the GPU; a replay is
    one. All graphs share their memory, and one gradient for each parameter.

    Args:
        forward: the loss (0-dim) of a batch, with nothing that waits for the device.
        module: its parameters have gradients, but for tables that are updated row by row.
        device: a CUDA device.
        held: holds the gradients of these rows.
    """

    def __init__(
        self,
        forward: Callable[[SequenceBatch], Tensor],
        module: nn.Module,
        device: torch.device,
        held: HeldUpdates | None = None,
    ) -> None:
        self._forward, self._device, self._held = forward, device, held
        collections = (part for part in module.modules() if isinstance(part, TrainedTables) and part.optimizers)
        without = {id(parameter) for part in collections for parameter in part.parameters()}
        self._parameters = [of for of in module.parameters() if of.requires_grad and id(of) not in without]
        self._gradients: list[Tensor] = []
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def __call__(self, batch: SequenceBatch) -> Tensor:
        """Return the loss without a gradient function; every parameter's gradient stands in its `grad`."""
        size = capacity(batch.targets.shape[0], batch.features.stride())
        captured = self._graphs.get(size)
        if captured is None:
            inputs = Filled.empty(*size, self._device, tuple(batch.features.keys()))
            inputs.take(batch)
            captured = self._graphs[size] = self._capture(inputs, batch.num_items)
        else:
            captured.inputs.take(batch)
        captured.graph.replay()
        self._set_gradients()
        if self._held is not None:
            self._held.give(captured.held)
        # The graph's own output is written over by the next replay.
        return captured.loss.clone()

    def _set_gradients(self) -> None:
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient

    def _capture(self, inputs: Filled, num_items: int | None) -> _Graph:
        self._gradients = self._gradients or [torch.zeros_like(parameter) for parameter in self._parameters]
        self._set_gradients()
        random_state = torch.cuda.get_rng_state(self._device)
        # Once outside of a graph, for kernels and libraries that set themselves up at their first call.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._run(inputs.batch(num_items))
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        torch.cuda.set_rng_state(random_state, self._device)
        if self._held is not None:
            self._held.drop()
        graph = torch.cuda.CUDAGraph()
        # The loader's thread may page-lock memory meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            loss = self._run(inputs.batch(num_items))
        return _Graph(graph, inputs, loss, [] if self._held is None else self._held.take())

    def _run(self, batch: SequenceBatch) -> Tensor:
        torch._foreach_zero_(self._gradients)
        loss = self._forward(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()
