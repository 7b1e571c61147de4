"""Modules that draw at random, and draw the same again where a step is computed again."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from jagged.modules.jagged_module import JaggedModule


class SeededModule(JaggedModule):
    """Base of the modules that draw by a seed: in training one from torch's random state, in evaluation their own.

    So `torch.manual_seed` repeats the draws of training, and activation checkpointing, which restores torch's random state, draws
    again what the first forward drew. No forward changes the module.

    Args:
        seed: of every draw in evaluation.
        device: where the seed lives and draws are made.

    Attributes:
        group: of processes that draw alike, by the first one's seed; each of them must call. None: alone.
    """

    seed: Tensor
    group: dist.ProcessGroup | None = None

    def __init__(self, seed: int, device: torch.device | str | None) -> None:
        super().__init__()
        self._first_seed = seed
        self.register_buffer("seed", torch.tensor([seed], device=device))

    def reset_parameters(self) -> None:
        """Take the first seed again."""
        self.seed.fill_(self._first_seed)

    def next_seed(self) -> Tensor:
        """Return the seed `[1]`, int64, of one draw."""
        if not self.training:
            return self.seed
        seed = torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=self.seed.device)
        if self.group is not None:
            dist.broadcast(seed, group=self.group, group_src=0)
        return seed
