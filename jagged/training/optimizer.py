"""AdamW with warm-up and gradient clipping, as one object whose `step` TorchRec's pipeline owns."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Optimizer:
    """Fused AdamW; linear warm-up, then a constant rate; the global gradient norm clipped before each step.

    Weight decay is decoupled and leaves out norms and biases (parameters of one dimension). The rate is a function of the number
    of steps alone: `learning_rate * min(1, (steps + 1) / warmup_steps)`.

    Args:
        parameters: by name; on several processes those not in `split` are replicated, with averaged gradients.
        learning_rate: peak rate.
        weight_decay: decoupled, a fraction of the weight for each unit of the rate.
        warmup_steps: steps until the peak.
        clip_norm: largest global L2 norm of the gradient; None for no clipping.
        split: names of parameters of which each process holds rows of its own. They count once each in the norm.

    Attributes:
        steps: steps taken.
        norms: gradient norms before clipping, 0-dim tensors on the device, one a step; whoever reads them clears them.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        learning_rate: float,
        weight_decay: float,
        warmup_steps: int = 0,
        clip_norm: float | None = None,
        split: Collection[str] = (),
    ) -> None:
        self.steps = 0
        self.norms: list[Tensor] = []
        self._named = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        self._parameters = list(self._named.values())
        self._split = [parameter for name, parameter in self._named.items() if name in split]
        self._replicated = [parameter for name, parameter in self._named.items() if name not in split]
        self._learning_rate, self._warmup_steps, self._clip_norm = learning_rate, warmup_steps, clip_norm
        groups = [
            {"params": [p for p in self._parameters if p.dim() > 1], "weight_decay": weight_decay},
            {"params": [p for p in self._parameters if p.dim() <= 1], "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW([group for group in groups if group["params"]], lr=learning_rate, fused=True)
        self._set_rate()

    @property
    def learning_rate(self) -> float:
        """The rate of the next step."""
        return float(self._adamw.param_groups[0]["lr"])

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for parameter in self._parameters:
            parameter.grad = None

    def step(self) -> None:
        """Clip, update, and set the next step's rate. Nothing waits for a GPU."""
        if self._clip_norm is not None:
            norm = _norm(self._replicated)
            if self._split:
                squares = _norm(self._split).double().square()
                dist.all_reduce(squares)
                norm = (norm.double().square() + squares).sqrt().to(norm.dtype)
            nn.utils.clip_grads_with_norm_(self._parameters, self._clip_norm, norm, foreach=True)
            self.norms.append(norm)
        self._adamw.step()
        self.steps += 1
        if self.steps <= self._warmup_steps:
            self._set_rate()

    def _set_rate(self) -> None:
        rate = self._learning_rate * min(1.0, (self.steps + 1) / max(1, self._warmup_steps))
        for group in self._adamw.param_groups:
            group["lr"] = rate

    def state_tensors(self) -> dict[str, Tensor]:
        """The state, `optimizer.<what>.<parameter>`; empty before the first step."""
        state = self._adamw.state
        return {
            f"optimizer.{key}.{name}": value.detach()
            for name, parameter in self._named.items()
            for key, value in state.get(parameter, {}).items()
        }

    def load_state_tensors(self, tensors: Mapping[str, Tensor], steps: int) -> None:
        """Take over a state that `state_tensors` gave after `steps` steps.

        Raises:
            KeyError: a tensor is missing.
            ValueError: a tensor's shape does not fit.
        """
        for name, parameter in self._named.items() if steps else ():
            state = {}
            for key in ("step", "exp_avg", "exp_avg_sq"):
                value = tensors[f"optimizer.{key}.{name}"]
                if key != "step" and value.shape != parameter.shape:
                    raise ValueError(f"optimizer.{key}.{name}: shape {tuple(value.shape)}, expected {tuple(parameter.shape)}")
                state[key] = value.to(parameter.device, copy=True)
            self._adamw.state[parameter] = state
        self.steps = steps
        self._set_rate()


def _norm(parameters: list[nn.Parameter]) -> Tensor:
    return nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None], foreach=True)
