"""What a run will need, before it starts: memory and steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from jagged.config import TrainConfig
from jagged.data import BatchLoader, SequenceSplit
from jagged.training.checkpoint import FILE_BYTES
from jagged.training.display import memory_in_use
from jagged.training.processes import Processes

# A probe of this many samples has every tensor of a step, and costs next to nothing.
_PROBE_SAMPLES = 8


@dataclass(frozen=True)
class Forecast:
    """Memory in bytes and steps of a run; `str()` of it is what is printed.

    Attributes:
        device: "cpu" or "cuda".
        present: in use before training: on the CPU the process with its libraries and data, on a GPU what is allocated.
        parameters: the weights, fp32; they are part of `present`. The best ones so far are held beside them.
        gradients: of all weights, and the second one that the item table has for a moment, from lookup and from scoring.
        optimizer: AdamW's two moments.
        activations: of a step of the most tokens: 1.6 times what it keeps for its backward, measured on a probe of this model;
            the rest is for what the backward itself needs, and for gaps between freed blocks.
        checkpoint: on the CPU, what is held of a checkpoint while it is written.
        evaluation: the bound on scores while evaluating.
        samples, tokens: of a usual step.
        steps_per_epoch, max_steps: of this process; early stopping may end before the latter.
    """

    device: str
    present: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    checkpoint: int
    evaluation: int
    samples: float
    tokens: float
    steps_per_epoch: int
    max_steps: int

    @property
    def peak(self) -> int:
        """The most memory in use at any moment, bytes."""
        return (
            self.present
            + self.parameters
            + self.optimizer
            + max(self.gradients + self.activations, self.parameters + max(self.checkpoint, self.evaluation))
        )

    def __str__(self) -> str:
        where = "GPU memory" if self.device == "cuda" else "CPU memory (resident)"
        return "\n".join(
            (
                f"forecast  {where}: peak about {_size(self.peak)}",
                f"          in use now {_size(self.present)} (with {_size(self.parameters)} of weights), "
                f"best weights {_size(self.parameters)}, "
                f"optimizer {_size(self.optimizer)}, gradients {_size(self.gradients)}, activations {_size(self.activations)}, "
                f"a checkpoint being written {_size(self.checkpoint)}, evaluation up to {_size(self.evaluation)}",
                f"          {self.steps_per_epoch:,} steps an epoch of about {self.samples:,.0f} users and {self.tokens:,.0f} "
                f"events, at most {self.max_steps:,} steps",
            )
        )


def forecast(
    config: TrainConfig, split: SequenceSplit, loader: BatchLoader, task: nn.Module, precision: str, processes: Processes
) -> Forecast:
    """Forecast a run from its data, its model and a forward pass of a few samples.

    Memory for activations grows with the number of tokens alone, because nothing is padded; so a few samples tell it. The global
    random state is left as it was.
    """
    from jagged.scoring import DEFAULT_MAX_BYTES

    device = processes.device
    parameters = [parameter for parameter in task.parameters() if parameter.requires_grad]
    sizes = [parameter.numel() * parameter.element_size() for parameter in parameters]
    rows = (split.train.lengths - 1).clamp(0, config.max_seq_len).double()
    steps = loader.num_batches(0)
    tokens = float(rows.sum()) / (steps * processes.world_size)
    samples = len(rows) / (steps * processes.world_size)
    # Four standard deviations above the mean, and never more than can be.
    most = tokens + 4 * float(rows.std(correction=0)) * math.sqrt(samples)
    most = min(most, config.max_tokens) if config.max_tokens else min(most, float(config.batch_size * config.max_seq_len))
    catalogue = 4.0 * split.train.dataset.num_items * config.eval_batch_size
    return Forecast(
        device=device.type,
        present=memory_in_use(device),
        parameters=sum(sizes),
        gradients=sum(sizes) + max(sizes),
        optimizer=2 * sum(sizes),
        activations=int(1.6 * most * _bytes_per_token(config, split, task, precision, device)),
        checkpoint=2 * min(4 * sum(sizes), max(FILE_BYTES, max(sizes))) if device.type == "cpu" else 0,
        evaluation=int(min(DEFAULT_MAX_BYTES, 4 * catalogue)),
        samples=samples,
        tokens=tokens,
        steps_per_epoch=steps,
        max_steps=steps * config.max_epochs,
    )


def _bytes_per_token(config: TrainConfig, split: SequenceSplit, task: nn.Module, precision: str, device: torch.device) -> float:
    probe = BatchLoader(
        split.train,
        batch_size=min(_PROBE_SAMPLES, len(split.train)),
        max_seq_len=config.max_seq_len,
        shuffle=True,
        seed=config.seed,
    )
    batch = next(iter(probe)).to(device)
    weights = {parameter.untyped_storage().data_ptr() for parameter in task.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        # A low-precision copy of a weight is kept as well; it does not grow with the batch.
        if storage.data_ptr() not in weights and not _is_weight_copy(tensor, task):
            kept[storage.data_ptr()] = storage.nbytes()
        # Not the tensor itself: an output that its own node keeps would hold the node, and neither would ever go.
        return tensor.detach()

    was_training = task.training
    task.train()
    devices = [device] if device.type == "cuda" else []
    with (
        torch.random.fork_rng(devices),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16-mixed"),
    ):
        loss, _ = task(batch)
    task.train(was_training)
    del loss
    return sum(kept.values()) / max(1, batch.targets.numel())


def _is_weight_copy(tensor: Tensor, task: nn.Module) -> bool:
    return tensor.dtype == torch.bfloat16 and any(
        tensor.untyped_storage().nbytes() == 2 * weight.numel() for weight in task.parameters() if weight.dim() > 1
    )


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
