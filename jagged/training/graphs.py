"""Forward and backward of a training step as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from jagged.artifacts.errors import shown
from jagged.config import TrainerConfig
from jagged.models import DIN, REQUEST_MODELS, NextItemTask, RequestModel
from jagged.models.features import HistoryEncoder
from jagged.modules import HeldUpdates
from jagged.modules.recompute import draws
from jagged.modules.trained_tables import TrainedTables
from jagged.training.errors import TrainingError
from jagged.training.optimizer import table_names
from jagged.training.processes import Processes
from jagged.training.table_updates import updates_rows

# Bytes that each graph may keep of a norm of tables' gradients; without them the norm is launched by itself.
_MOST_KEPT = 64 * 2**20


def graphs_serve(config: TrainerConfig, task: nn.Module, processes: Processes) -> bool:
    """Whether a run's steps are replayed as graphs: where they can be, unless that is turned off.

    Raises:
        TrainingError: graphs are asked for where none can be.
    """
    if config.cuda_graphs is False:
        return False
    hindrance = _hindrance(config, task, processes)
    if hindrance is not None and config.cuda_graphs is True:
        found, expected = hindrance
        raise TrainingError(f"cuda_graphs: got true with {found}, expected {expected}; leave it out, or give none")
    return hindrance is None


def _hindrance(config: TrainerConfig, task: nn.Module, processes: Processes) -> tuple[str, str] | None:
    """What keeps a run's steps from being graphs, and what it would have to be.

    Several processes exchange sizes through the host, which no graph can; a graph has one gradient, which is a whole step's. Of
    requests' models tables have to be updated row by row, and from the device: gradients of whole ones would stay between steps.
    """
    if processes.device.type != "cuda":
        return f"device {processes.device.type}", "cuda"
    if processes.world_size > 1:
        return f"{processes.world_size} processes", "one"
    if config.accumulate > 1:
        return f"accumulate {config.accumulate}", "1"
    if isinstance(task, NextItemTask):
        return None
    # Classes of others may wait for the device.
    if not isinstance(task, RequestModel) or type(task) not in REQUEST_MODELS.values() or isinstance(task, DIN):
        return f"a {type(task).__name__}", "a NextItemTask, or a RequestModel of jagged.models but DIN"
    if config.table_cache_bytes is not None:
        return f"table_cache_bytes {config.table_cache_bytes}", "tables on the GPU"
    if frozen := [name for name in table_names(task) if not task.get_parameter(name).requires_grad]:
        return f"the frozen table {min(frozen)}", "tables that all learn"
    if table_names(task) and not updates_rows(task, config, 1):
        return f"table_optimizer {config.table_optimizer}", "one that updates row by row"
    if any(part.recompute and draws(part, ever=True) for part in task.modules() if isinstance(part, HistoryEncoder)):
        # What is computed again draws by the random state that it had, at which a capture may not look.
        return "recompute and dropout", "no dropout of histories, or no recompute"
    # Not all sizes of a step are known of its batch.
    if "pairwise" in task.losses.values():
        return "the loss pairwise", "binary, focal or listwise"
    if task.inputs.candidate_lists:
        return f"candidates' lists that share a table, as {shown(min(task.inputs.candidate_lists))}", "none"
    return None


class Filled(Protocol):
    """A batch's tensors at a graph's size, in memory that stays."""

    def holds(self, size: Any) -> bool:
        """Whether batches of a size are replayed here."""

    def take(self, batch: Any) -> None:
        """Copy a batch here and fill up, without a look at its values."""

    def batch(self) -> Any:
        """The tensors as a batch; a new one each time."""


class BatchSizes(Protocol):
    """What a kind of batches is filled up to."""

    def of(self, batch: Any) -> Any | None:
        """The size of a batch, or None for one that is to run without a graph."""

    def room(self, batch: Any, size: Any, device: torch.device, others: list[Any]) -> Filled | None:
        """Memory for a batch and others like it, beside the sizes that there are; None where there are enough."""


@dataclass
class _Graph:
    graph: torch.cuda.CUDAGraph
    inputs: Filled
    loss: Tensor
    # What the loss is a mean over, where the host does not know.
    rows: Tensor | None
    # The tensors of tables' gradients that a replay writes.
    held: list[Any]


class GraphedSteps:
    """Runs forward and backward of training batches as CUDA graphs, which are captured when a size first comes.

    The step of a small model is some hundreds of launches that cost the host several times what they cost the GPU; a replay is
    one. All graphs share their memory, and one gradient for each parameter.

    Args:
        forward: of a batch the loss (0-dim), and what it is a mean over where the host does not know; nothing in it waits for the
            device.
        sizes: of the batches.
        module: its parameters have gradients, but for tables that are updated row by row.
        device: a CUDA device.
        held: holds the gradients of these rows.
        clips: whether their norm is asked for in each step. Graphs make it, too, where they need little memory for it.
    """

    def __init__(
        self,
        forward: Callable[[Any], tuple[Tensor, Tensor | None]],
        sizes: BatchSizes,
        module: nn.Module,
        device: torch.device,
        held: HeldUpdates | None = None,
        *,
        clips: bool = False,
    ) -> None:
        self._forward, self._sizes, self._device, self._held, self._clips = forward, sizes, device, held, clips
        collections = (part for part in module.modules() if isinstance(part, TrainedTables) and part.optimizers)
        without = {id(parameter) for part in collections for parameter in part.parameters()}
        self._parameters = [of for of in module.parameters() if of.requires_grad and id(of) not in without]
        self._gradients: list[Tensor] = []
        self._graphs: list[_Graph] = []
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def __call__(self, batch: Any) -> tuple[Tensor, Tensor | None] | None:
        """Return the loss without a gradient function, and what it is a mean over; every parameter's gradient is its `grad`.

        None where the batch is to run without a graph.
        """
        size = self._sizes.of(batch)
        if size is None:
            return None
        captured = next((of for of in self._graphs if of.inputs.holds(size)), None)
        if captured is None:
            inputs = self._sizes.room(batch, size, self._device, [of.inputs for of in self._graphs])
            if inputs is None:
                return None
            inputs.take(batch)
            captured = self._capture(inputs)
            # Of requests the latest size has most often room for the next batch, too.
            self._graphs.insert(0, captured)
        else:
            captured.inputs.take(batch)
        captured.graph.replay()
        self._set_gradients()
        if self._held is not None:
            self._held.give(captured.held)
        # The graph's own outputs are written over by the next replay.
        return captured.loss.clone(), None if captured.rows is None else captured.rows.clone()

    def _set_gradients(self) -> None:
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient

    def _capture(self, inputs: Filled) -> _Graph:
        self._gradients = self._gradients or [torch.zeros_like(parameter) for parameter in self._parameters]
        self._set_gradients()
        random_state = torch.cuda.get_rng_state(self._device)
        # Once outside of a graph, for kernels and libraries that set themselves up at their first call.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._run(inputs.batch())
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        torch.cuda.set_rng_state(random_state, self._device)
        if self._held is not None:
            self._held.drop()
        graph = torch.cuda.CUDAGraph()
        # The loader's thread may page-lock memory meanwhile.
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                loss, rows = self._run(inputs.batch())
        except RuntimeError as error:
            error.add_note("A step that is captured as a CUDA graph may not wait; cuda_graphs = false launches kernel by kernel.")
            raise
        return _Graph(graph, inputs, loss, rows, [] if self._held is None else self._held.take())

    def _run(self, batch: Any) -> tuple[Tensor, Tensor | None]:
        torch._foreach_zero_(self._gradients)
        loss, rows = self._forward(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        if self._held is not None and self._clips and (kept := self._held.norm_bytes) is not None and kept <= _MOST_KEPT:
            self._held.norm()
        return loss.detach(), rows
