"""TorchRec's engine around a training task: DistributedModelParallel and TrainPipelineBase, mixed precision, exact averages."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper, DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineBase
from torchrec.distributed.types import ShardingPlan

from jagged.config import TrainConfig
from jagged.training.errors import CheckpointError
from jagged.training.optimizer import Optimizer
from jagged.training.processes import Processes

_MODEL = "model."
_RANDOM = "random."


class Engine:
    """A model and its task under TorchRec's engine, with an optimizer, and all of their state as named tensors.

    The item table is looked up and scored against, so its gradient has two sources and it must be an ordinary dense parameter:
    DistributedModelParallel gets no sharder and no plan for it, and replicates it with everything else.

    Args:
        model: the model, on any device but meta.
        task: `(loss, (loss, logits, labels))` from a batch; loss is the mean over the batch's `targets`.
        config: learning rate, weight decay, warm-up, clipping.
        precision: "32-true" or "bf16-mixed"; the weights are fp32 either way.
        processes: the run's processes and this one's device.
    """

    def __init__(self, model: nn.Module, task: nn.Module, config: TrainConfig, precision: str, processes: Processes) -> None:
        self.model = model
        self.processes = processes
        device = processes.device
        self._step = _Step(task, precision, processes).to(device)
        self._parallel = DistributedModelParallel(
            self._step, device=device, sharders=[], plan=ShardingPlan({}), data_parallel_wrapper=_Replicated()
        )
        self.optimizer = Optimizer(
            dict(model.named_parameters()),
            learning_rate=config.learning_rate,
            weight_decay=config.weight_decay,
            warmup_steps=config.warmup_steps,
            clip_norm=config.gradient_clip_norm,
        )

    @property
    def samples(self) -> int:
        """Samples this process has trained on."""
        return self._step.samples

    def steps(self, batches: Iterator[Any]) -> Iterator[tuple[Tensor, int]]:
        """Train on every batch; after each step yield its loss, a 0-dim tensor on the device, and its number of targets.

        TorchRec's pipeline copies the next batch to the device while a step computes. Nothing here waits for a GPU.
        """
        self._parallel.train()
        pipeline = TrainPipelineBase(self._parallel, self.optimizer, self.processes.device)
        while True:
            try:
                loss, _, labels = pipeline.progress(batches)
            except StopIteration:
                return
            yield loss, labels.numel()

    def is_finite(self) -> bool:
        """Whether all weights are finite; waits for the device."""
        norms = torch._foreach_norm([p.detach() for p in self.model.parameters()], float("inf"))
        return bool(torch.isfinite(torch.stack(norms)).all())

    def state_tensors(self) -> dict[str, Tensor]:
        """Weights, buffers, optimizer state and every process's random state, by name; every process must call."""
        tensors = {f"{_MODEL}{name}": value.detach() for name, value in self.model.state_dict().items()}
        tensors.update(self.optimizer.state_tensors())
        for kind, state in _random_state(self.processes.device).items():
            for rank, one in enumerate(self.processes.gather(state)):
                tensors[f"{_RANDOM}{kind}.{rank}"] = one
        return tensors

    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over the weights and buffers alone.

        Raises:
            CheckpointError: names or shapes do not fit the model.
        """
        weights = {name.removeprefix(_MODEL): value for name, value in tensors.items() if name.startswith(_MODEL)}
        try:
            self.model.load_state_dict(weights)
        except RuntimeError as error:
            raise CheckpointError(f"the checkpoint's weights do not fit the model: {' '.join(str(error).split())}") from None

    def load_state_tensors(self, tensors: Mapping[str, Tensor], steps: int) -> None:
        """Take over everything that `state_tensors` gave after `steps` steps.

        The random state of a kind of device that the checkpoint did not have stays as it is.

        Raises:
            CheckpointError: names or shapes do not fit.
        """
        self.load_weights(tensors)
        try:
            self.optimizer.load_state_tensors(tensors, steps)
        except (KeyError, ValueError) as error:
            raise CheckpointError(f"the checkpoint's optimizer state does not fit the model: {error.args[0]}") from None
        suffix = f".{self.processes.rank}"
        found = {
            name.removeprefix(_RANDOM).removesuffix(suffix): value
            for name, value in tensors.items()
            if name.startswith(_RANDOM) and name.endswith(suffix)
        }
        try:
            _set_random_state(self.processes.device, found)
        except (KeyError, RuntimeError, TypeError) as error:
            raise CheckpointError(f"the checkpoint's random state does not fit: {type(error).__name__}: {error}") from None


class _Step(nn.Module):
    """What the pipeline runs: the task under autocast, its loss weighted so that processes average to the joint batch's mean."""

    def __init__(self, task: nn.Module, precision: str, processes: Processes) -> None:
        super().__init__()
        self.task = task
        self.samples = 0
        self._autocast = precision == "bf16-mixed"
        self._processes = processes

    def forward(self, batch: Any) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        samples = batch.features.stride()
        self.samples += samples
        if not samples:
            loss, output = self._nothing(batch.targets)
        elif self._autocast:
            with torch.autocast(self._processes.device.type, torch.bfloat16):
                loss, output = self.task(batch)
        else:
            loss, output = self.task(batch)
        if self._processes.world_size > 1:
            loss = self._share(loss, batch.targets.numel())
        return loss, output

    def _nothing(self, targets: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        # The last batch of one process may be empty. torchrec's EmbeddingCollection does not take it, but every parameter must
        # take part in the reduction.
        loss = torch.stack([parameter.sum() for parameter in self.task.parameters()]).sum() * 0.0
        return loss, (loss.detach(), targets.float(), targets)

    def _share(self, loss: Tensor, count: int) -> Tensor:
        # The gradient is averaged over processes, but each one's loss is a mean over its own number of targets.
        total = torch.full((), float(count), device=loss.device)
        dist.all_reduce(total)
        return loss * (count * self._processes.world_size / total)


class _Replicated(DefaultDataParallelWrapper):  # type: ignore[misc]
    """DistributedDataParallel for several processes; for one, nothing, because its hooks cost time in every step."""

    def wrap(self, dmp: Any, env: Any, device: torch.device) -> None:
        """Wrap the unsharded part of `dmp`."""
        if env.world_size > 1:
            with warnings.catch_warnings():
                # torchrec passes an argument that torch 2.13 renames; a buffer's synchronisation is not wanted under either name.
                warnings.filterwarnings("ignore", message=".*broadcast_buffers.*", category=FutureWarning)
                super().wrap(dmp, env, device)


def _random_state(device: torch.device) -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def _set_random_state(device: torch.device, state: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
