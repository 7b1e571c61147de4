"""Blocks that cross the features of a row, in plain torch: a row, an expert, a pair of tokens at a time.

Each takes rows and, by the names that the module gives them, its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

# PyTorch's: its error functions are approximate, and not what is compared.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "silu": F.silu, "gelu": F.gelu}

Weights = Mapping[str, Tensor]


def each_row(rows: Tensor, function: Callable[[Tensor], Tensor], *shape: int) -> Tensor:
    return torch.stack([function(row) for row in rows]) if len(rows) else rows.new_zeros(0, *shape)


def normalised(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """PyTorch's: of few numbers the gradient is a difference whose error another order of sums would change."""
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def cross_net(rows: Tensor, of: Weights, num_layers: int) -> Tensor:
    """Of whole matrices, and of two factors."""

    def cross(first: Tensor) -> Tensor:
        x = first
        for layer in range(num_layers):
            if f"layers.{layer}.weight" in of:
                made = of[f"layers.{layer}.weight"] @ x + of[f"layers.{layer}.bias"]
            else:
                made = of[f"layers.{layer}.1.weight"] @ (of[f"layers.{layer}.0.weight"] @ x) + of[f"layers.{layer}.1.bias"]
            x = first * made + x
        return x

    return each_row(rows, cross, rows.shape[1])


def cross_experts(rows: Tensor, of: Weights, num_layers: int, activation: str) -> Tensor:
    """Equations 3 and 4 of DCN V2 as they stand: every expert is multiplied by x_0 and by its gate."""
    act = ACTIVATIONS[activation]

    def cross(first: Tensor) -> Tensor:
        x = first
        for layer in range(num_layers):
            down, inner, up, bias = (
                of[f"layers.{layer}.{name}"] for name in ("down.weight", "inner.weight", "up.weight", "bias")
            )
            count, rank = inner.shape[:2]
            gates = [x.new_ones(())]
            if count > 1:
                scores = torch.exp(of[f"layers.{layer}.gate.weight"] @ x)
                gates = [score / scores.sum() for score in scores]
            total = x
            for expert in range(count):
                low = act(down[expert * rank : (expert + 1) * rank] @ x)
                low = act(inner[expert] @ low)
                total = total + gates[expert] * (first * (up[expert] @ low + bias))
            x = total
        return x

    return each_row(rows, cross, rows.shape[1])


def factorization_machine(tokens: Tensor, keep_dim: bool) -> Tensor:
    """Every pair."""
    n, width = tokens.shape[1:]
    total = tokens.new_zeros(tokens.shape[0], width) + 0 * tokens.sum(1)
    for i in range(n):
        for j in range(i):
            total = total + tokens[:, i] * tokens[:, j]
    return total if keep_dim else total.sum(1)[:, None]


def dots(tokens: Tensor) -> Tensor:
    """Every pair, the first of them first."""
    n = tokens.shape[1]
    return torch.stack([(tokens[:, i] * tokens[:, j]).sum(1) for i in range(n) for j in range(i + 1, n)], 1)


def feature_tokens(rows: Tensor, of: Weights, widths: Sequence[int]) -> Tensor:
    """Each feature by itself: the weights of those of one width are counted in their order."""
    tokens, start = [], 0
    for place, width in enumerate(widths):
        number = list(widths[:place]).count(width)
        weight, bias = of[f"projections.{width}.weight"][number], of[f"projections.{width}.bias"][number]
        tokens.append(rows[:, start : start + width] @ weight.T + bias)
        start += width
    return torch.stack(tokens, 1)


def wukong(tokens: Tensor, of: Weights, num_layers: int, num_hidden: int) -> Tensor:
    """The products of all pairs of tokens are made, `[N, n, n]`, and then combined."""
    for layer in range(num_layers):
        at = f"layers.{layer}."
        width = tokens.shape[2]
        of_all = torch.einsum("aid,ajd->aij", tokens, tokens)
        crossed = torch.einsum("aij,kj->aik", of_all, of[f"{at}pairs.weight"])
        hidden = normalised(
            crossed.reshape(len(tokens), crossed.shape[1] * crossed.shape[2]), of[f"{at}mlp.0.weight"], of[f"{at}mlp.0.bias"]
        )
        for number in range(num_hidden + 1):
            hidden = hidden @ of[f"{at}mlp.{2 * number + 1}.weight"].T + of[f"{at}mlp.{2 * number + 1}.bias"]
            if number < num_hidden:
                hidden = ACTIVATIONS["relu"](hidden)
        fm = hidden.reshape(len(tokens), hidden.shape[1] // width, width)
        linear = torch.einsum("ij,ajd->aid", of[f"{at}linear.weight"], tokens)
        residual = tokens
        if f"{at}residual.weight" in of:
            residual = torch.einsum("ij,ajd->aid", of[f"{at}residual.weight"], tokens)
        tokens = normalised(torch.cat([fm, linear], 1) + residual, of[f"{at}norm.weight"], of[f"{at}norm.bias"])
    return tokens


def mask_block(rows: Tensor, guides: Tensor, of: Weights, at: str = "") -> Tensor:
    """Of a row with its guide, a row at a time."""

    def transform(both: tuple[Tensor, Tensor]) -> Tensor:
        x, guide = both
        hidden = ACTIVATIONS["relu"](of[f"{at}mask.0.weight"] @ guide + of[f"{at}mask.0.bias"])
        mask = of[f"{at}mask.2.weight"] @ hidden + of[f"{at}mask.2.bias"]
        if f"{at}norm.weight" in of:
            x = normalised(x, of[f"{at}norm.weight"], of[f"{at}norm.bias"])
        out = of[f"{at}hidden.weight"] @ (mask * x)
        return ACTIVATIONS["relu"](normalised(out, of[f"{at}hidden_norm.weight"], of[f"{at}hidden_norm.bias"]))

    if not len(rows):
        return rows.new_zeros(0, of[f"{at}hidden.weight"].shape[0])
    return torch.stack([transform(both) for both in zip(rows, guides, strict=True)])


def serial_masks(rows: Tensor, of: Weights, num_blocks: int) -> Tensor:
    hidden = rows
    for block in range(num_blocks):
        hidden = mask_block(hidden, rows, of, f"blocks.{block}.")
    return hidden


def parallel_masks(rows: Tensor, of: Weights, num_blocks: int) -> Tensor:
    """One block after the other, each with its own part of the weights, side by side at the end."""
    found = []
    for block in range(num_blocks):
        size = of["blocks.mask.weight"].shape[0] // num_blocks
        part = slice(block * size, (block + 1) * size)
        own = {
            "norm.weight": of["blocks.norm.weight"],
            "norm.bias": of["blocks.norm.bias"],
            "mask.0.weight": of["blocks.mask.weight"][part],
            "mask.0.bias": of["blocks.mask.bias"][part],
            "mask.2.weight": of["blocks.mask_out.weight"][block],
            "mask.2.bias": of["blocks.mask_out.bias"][block],
            "hidden.weight": of["blocks.hidden.weight"][block],
            "hidden_norm.weight": of["blocks.hidden_norm.weight"][block],
            "hidden_norm.bias": of["blocks.hidden_norm.bias"][block],
        }
        found.append(mask_block(rows, rows, own))
    return torch.cat(found, 1)
