"""Experts, gates and towers one by one, in plain torch: each takes the parameters of ours by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

Parameters = Mapping[str, Tensor]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda x: x.clamp(min=0),
    "silu": lambda x: x * torch.sigmoid(x),
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / 2**0.5)),
}


def row_by_matrix(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`[N, D]` and `[H, D]` -> `[N, H]`."""
    return (x[:, None, :] * weight[None]).sum(2) + bias


def grouped_linear(x: Tensor, of: Parameters, prefix: str = "") -> list[Tensor]:
    """A group's `[N, out]` after the other."""
    weights, biases = of[f"{prefix}weight"], of[f"{prefix}bias"]
    rows = [x] * len(weights) if x.dim() == 2 else list(x.unbind(1))
    return [row_by_matrix(own, weight, bias) for own, weight, bias in zip(rows, weights, biases, strict=True)]


def grouped_mlp(x: Tensor, of: Parameters, prefix: str = "", activation: str = "relu", last: bool = False) -> list[Tensor]:
    count = len({name for name in of if name.startswith(f"{prefix}layers.") and name.endswith(".weight")})
    for place in range(count):
        outs = grouped_linear(x, of, f"{prefix}layers.{place}.")
        if place < count - 1 or last:
            outs = [ACTIVATIONS[activation](out) for out in outs]
        x = torch.stack(outs, 1)
    return list(x.unbind(1))


def mix(logits: Tensor, experts: Sequence[Tensor]) -> Tensor:
    """`[N, E]` and E times `[N, H]` -> `[N, H]`."""
    powers = (logits - logits.amax(1, keepdim=True)).exp()
    weights = powers / powers.sum(1, keepdim=True)
    return torch.stack([weights[:, place, None] * expert for place, expert in enumerate(experts)]).sum(0)


def mmoe(x: Tensor, gate: Tensor, of: Parameters, activation: str = "relu") -> Tensor:
    experts = grouped_mlp(x, of, "experts.", activation, last=True)
    return torch.stack([mix(logits, experts) for logits in grouped_linear(gate, of, "gates.")], 1)


def ple(x: Tensor, of: Parameters, num_layers: int, tasks: int, specific: int, shared: int) -> Tensor:
    own, common = [x] * tasks, x
    for layer in range(num_layers):
        prefix = f"layers.{layer}."

        def expert(rows: Tensor, kind: str, weight: Tensor, bias: Tensor, place: int, prefix: str = prefix) -> Tensor:
            out = ACTIVATIONS["relu"](row_by_matrix(rows, weight, bias))
            name = f"{prefix}{kind}.layers.{{}}.{{}}"
            later = 0
            while name.format(later, "weight") in of:
                weights, biases = of[name.format(later, "weight")], of[name.format(later, "bias")]
                out = ACTIVATIONS["relu"](row_by_matrix(out, weights[place], biases[place]))
                later += 1
            return out

        specials = []
        for task in range(tasks):
            weights = of[f"{prefix}specific_inputs.weight"][task].chunk(specific)
            biases = of[f"{prefix}specific_inputs.bias"][task].chunk(specific)
            for place, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
                specials.append(expert(own[task], "specific", weight, bias, task * specific + place))
        commons = [
            expert(common, "shared", weight, bias, place)
            for place, (weight, bias) in enumerate(
                zip(of[f"{prefix}shared_inputs.weight"], of[f"{prefix}shared_inputs.bias"], strict=True)
            )
        ]
        assert len(commons) == shared
        gates = [
            row_by_matrix(own[task], of[f"{prefix}gates.weight"][task], of[f"{prefix}gates.bias"][task]) for task in range(tasks)
        ]
        if layer < num_layers - 1:
            gate = row_by_matrix(common, of[f"{prefix}shared_gate.weight"][0], of[f"{prefix}shared_gate.bias"][0])
            common = mix(gate, [*specials, *commons])
        own = [mix(gates[task], [*specials[task * specific : (task + 1) * specific], *commons]) for task in range(tasks)]
    return torch.stack(own, 1)


def gate_unit(x: Tensor, of: Parameters, prefix: str = "") -> Tensor:
    hidden = row_by_matrix(x, of[f"{prefix}layers.0.weight"], of[f"{prefix}layers.0.bias"]).clamp(min=0)
    out = row_by_matrix(hidden, of[f"{prefix}layers.2.weight"], of[f"{prefix}layers.2.bias"])
    return 2 / (1 + torch.exp(-out))


def epnet(x: Tensor, prior: Tensor, of: Parameters) -> Tensor:
    return gate_unit(torch.cat([prior, x.detach()], 1), of, "gate.") * x


def ppnet(x: Tensor, prior: Tensor, of: Parameters, tasks: int, activation: str = "relu") -> Tensor:
    read, outs = torch.cat([prior, x.detach()], 1), []
    count = len({name for name in of if name.startswith("gates.") and name.endswith("layers.0.weight")})
    for task in range(tasks):
        hidden = x
        for layer in range(count):
            gate = gate_unit(read, of, f"gates.{layer}.").chunk(tasks, 1)[task]
            weight, bias = of[f"towers.layers.{layer}.weight"][task], of[f"towers.layers.{layer}.bias"][task]
            hidden = row_by_matrix(gate * hidden, weight, bias)
            hidden = ACTIVATIONS[activation](hidden) if layer < count - 1 else hidden
        outs.append(hidden)
    return torch.stack(outs, 1)
