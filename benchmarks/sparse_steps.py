"""Steps of an output layer, and of an encoder in front of it: what a step takes in time and memory, and the layer's share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from jagged.modules import GroupSparseHead
from jagged.ops import GroupSparseOptimizer, group_sparse_bce, linear_bce, trust_values

LEARNING_RATE = 1e-3
# Positives of a row, words of a text, and the encoder's layers and heads: DistilBERT's.
POSITIVES, WORDS, LAYERS, HEADS = 5, 32, 6, 12
# Of a head as it is trained: the share of labels with a dense layer, and of slots that are born in a step.
DENSE_SHARE, BORN = 0.02, 0.1


class Step(NamedTuple):
    """Labels, samples, features, labels of a group and columns that it reads."""

    labels: int
    batch: int
    features: int
    group: int
    width: int

    def __str__(self) -> str:
        return f"{self.labels / 1e6:g} M, {self.batch}, {self.features}, {self.group}, {self.width}"


STEPS = (Step(8_620_000, 64, 768, 32, 32), Step(2_810_000, 64, 768, 32, 32), Step(8_620_000, 128, 384, 16, 64))


def positives_of(batch: int, labels: int, device: str) -> tuple[Tensor, Tensor]:
    """Labels of rows, and their offsets."""
    generator = torch.Generator(device).manual_seed(1)
    drawn = torch.randint(labels, (POSITIVES * batch,), generator=generator, device=device)
    return drawn, torch.arange(0, POSITIVES * batch + 1, POSITIVES, device=device)


def steps_of(step: Step, layer: Any, device: str = "cuda") -> dict[str, Callable[[], Callable[[], Any]]]:
    """What each way of a step prepares, which returns the step: loss, all gradients, and an update by SGD.

    `layer` is a `benchmarks.sparse_output.Layer`, which ours updates in the backward pass. `unfused` and `linear_bce` are of a
    dense layer of all features, the first as PyTorch has it: logits, their loss against a matrix of zeros and ones, gradients.
    `encoder` is a step of a transformer whose first word is what the layer reads.
    """
    positives, offsets = positives_of(step.batch, layer.weight.shape[0], device)
    of: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}

    def trained(leaves: list[Tensor], loss_of: Callable[..., Tensor]) -> Callable[[], Any]:
        def run() -> Any:
            given = [leaf.detach().requires_grad_() for leaf in leaves]
            gradients = torch.autograd.grad(loss_of(*given), given)
            # The first are features, whose gradient goes on to the encoder.
            torch._foreach_add_(leaves[1:], list(gradients[1:]), alpha=-LEARNING_RATE)
            return gradients[0]

        return run

    def ours() -> Callable[[], Any]:
        weight = nn.Parameter(layer.weight.clone())
        bias = nn.Parameter(torch.full_like(weight[:, 0], -14.0))
        optimizer = GroupSparseOptimizer(weight, bias, learning_rate=LEARNING_RATE)

        def run() -> Any:
            features = layer.features.detach().requires_grad_()
            loss = group_sparse_bce(features, weight, *layer[2:4], positives, offsets, bias, optimizer=optimizer)
            return torch.autograd.grad(loss, features)

        return run

    def dense() -> list[Tensor]:
        labels = layer.weight.shape[0]
        weight = torch.randn(labels, step.features, **of).mul_(step.features**-0.5)
        return [layer.features, weight, torch.full((labels,), -14.0, **of)]

    def fused() -> Callable[[], Any]:
        return trained(dense(), lambda features, weight, bias: linear_bce(features, weight, positives, offsets, bias))

    def unfused() -> Callable[[], Any]:
        leaves = dense()
        targets = torch.zeros(step.batch, leaves[1].shape[0], **of)
        rows = torch.repeat_interleave(torch.arange(step.batch, device=device), POSITIVES)
        targets[rows, positives] = 1

        def loss_of(features: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            logits = F.linear(features, weight, bias)
            return F.binary_cross_entropy_with_logits(logits, targets, reduction="sum") / step.batch

        return trained(leaves, loss_of)

    def encoder() -> Callable[[], Any]:
        block = nn.TransformerEncoderLayer(step.features, HEADS, 4 * step.features, batch_first=True, dropout=0.0, **of)
        model = nn.TransformerEncoder(block, LAYERS, enable_nested_tensor=False)
        words, upstream = torch.randn(step.batch, WORDS, step.features, **of), torch.randn_like(layer.features)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=device == "cuda")

        def run() -> None:
            optimizer.zero_grad(set_to_none=False)
            (model(words)[:, 0] * upstream).sum().backward()
            optimizer.step()

        return run

    return {"jagged": ours, "encoder": encoder, "linear_bce": fused, "unfused": unfused}


def head_bytes(step: Step, device: str = "cuda") -> dict[str, int]:
    """Most memory that a step of a whole head takes, its parameters and momentum included, without and with births of slots."""
    num_head_labels = round(DENSE_SHARE * step.labels)
    before = torch.cuda.memory_allocated()
    head = GroupSparseHead.shaped(
        step.features,
        step.labels,
        10 * step.labels,
        num_head_labels=num_head_labels,
        num_groups=(step.labels - num_head_labels) // step.group,
        fan_in=step.width,
        optimizer="sgd",
        optimizer_options={"learning_rate": LEARNING_RATE, "momentum": 0.9},
        device=device,
        dtype=torch.bfloat16,
    )
    # The groups' weights change in the backward pass.
    optimizer = torch.optim.SGD([head.head_weight, head.head_bias], lr=LEARNING_RATE, momentum=0.9)
    features = torch.randn(step.batch, step.features, device=device, dtype=torch.bfloat16, requires_grad=True)
    drawn, offsets = positives_of(step.batch, step.labels, device)
    positives = JaggedTensor(values=drawn, offsets=offsets)
    found = {}
    for name in ("step", "births"):
        torch.cuda.reset_peak_memory_stats()
        for _ in range(2):
            optimizer.zero_grad()
            with trust_values():
                head(features, positives).backward()
            optimizer.step()
        if name == "births":
            head.rewire(BORN, step=1, optimizer=optimizer)
        found[name] = torch.cuda.max_memory_allocated() - before
    return found
