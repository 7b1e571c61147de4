"""Logits of a SASRec that was really trained, on a catalogue larger than the public sets': hidden states, item weights, targets.

Histories are drawn: items belong to groups, a step stays in its group four times in five, and both groups and the items of a
group are log-uniform by rank. So there is something to learn of both kinds, popularity and what goes together.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from jagged.modules import JaggedTransformerBlock, PositionalEncoding
from jagged.ops import linear_cross_entropy

# Items of a group, length of a history, steps of training with their warm-up.
GROUP, LENGTH, STEPS, WARM_UP = 200, 50, 1_500, 100


class Trained(NamedTuple):
    """`hidden` `[N, D]`, `weight` `[V, D]`, `target` `[N]` of histories that training has not seen, and their mean loss."""

    hidden: Tensor
    weight: Tensor
    target: Tensor
    loss: float


class SASRec(nn.Module):
    def __init__(self, items: int, width: int) -> None:
        super().__init__()
        self.items = nn.Embedding(items, width)
        nn.init.normal_(self.items.weight, std=0.02)
        self.blocks = nn.Sequential(PositionalEncoding(LENGTH, width), *(JaggedTransformerBlock(width, 2) for _ in range(2)))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        offsets = torch.arange(len(ids) + 1, device=ids.device) * ids.shape[1]
        x = JaggedTensor(self.items(ids.flatten()) * self.items.embedding_dim**0.5, offsets=offsets)
        return self.norm(self.blocks(x).values())


def histories(count: int, items: int, generator: torch.Generator) -> Tensor:
    """`[count, LENGTH + 1]` ids."""
    device, groups = generator.device, items // GROUP

    def ranks(number: int, size: tuple[int, ...]) -> Tensor:
        drawn = torch.rand(size, generator=generator, device=device)
        return (torch.exp(drawn * math.log(number)) - 1).long().clamp(0, number - 1)

    group = ranks(groups, (count, LENGTH + 1))
    stays = torch.rand(count, LENGTH + 1, generator=generator, device=device) < 0.8
    stays[:, 0] = False
    # The group of the last step that changed it.
    begun = torch.where(stays, 0, torch.arange(LENGTH + 1, device=device)).cummax(1).values
    return group.gather(1, begun) + groups * ranks(GROUP, (count, LENGTH + 1))


def trained_sasrec(rows: int, items: int, width: int, dtype: torch.dtype, device: torch.device) -> Trained:
    """Train, and return what the head is given of as many rows of other histories."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(1)
        model = SASRec(items, width).to(device)
    generator = torch.Generator(device).manual_seed(2)
    samples = -(-rows // LENGTH)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, betas=(0.9, 0.98), fused=device.type == "cuda")
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP))
    for _ in range(STEPS):
        ids = histories(samples, items, generator)
        with torch.autocast(device.type, dtype):
            loss = linear_cross_entropy(model(ids[:, :-1]), model.items.weight, ids[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad(), torch.autocast(device.type, dtype):
        ids = histories(samples, items, generator)
        hidden, target, weight = model(ids[:, :-1])[:rows], ids[:, 1:].flatten()[:rows], model.items.weight
        return Trained(hidden.to(dtype), weight.to(dtype), target, float(linear_cross_entropy(hidden, weight, target)))
