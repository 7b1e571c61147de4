"""Experts, gates and towers of multi-task models: many small perceptrons side by side, as batched matrix products."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from jagged.modules import JaggedModule
from jagged.ops import ACTIVATIONS, Activation, grouped_linear, mix_groups


class GroupedLinear(JaggedModule):
    """Linear layers of one shape side by side, each with weights of its own, as one matrix product.

    `out_ng = activation(W_g x_ng + b_g)`, by `grouped_linear`: where all groups read the same row, x_n, their weights are one
    matrix and the product one GEMM; else it is one batched GEMM.

    Args:
        in_features, out_features: widths.
        num_groups: layers G, at least one.
        bias: whether there is a b.
        activation: `"relu"`, which is part of the product's kernel, `"silu"`, `"gelu"`, or None.
        device: where parameters live; `"meta"` allocates nothing.

    Attributes:
        weight: `[G, out_features, in_features]`; drawn as those of `nn.Linear`.
        bias: `[G, out_features]`, or None.

    Shape:
        x: `[N, in_features]`, which all groups read, or `[N, G, in_features]`; out `[N, G, out_features]`.

    Raises:
        ValueError: a number below 1, an unknown activation; rows of another shape.

    Example:
        >>> import torch
        >>> from jagged.models import GroupedLinear
        >>> layers = GroupedLinear(6, 3, num_groups=4)
        >>> layers(torch.randn(5, 6)).shape, layers(torch.randn(5, 4, 6)).shape
        (torch.Size([5, 4, 3]), torch.Size([5, 4, 3]))
    """

    shown = ("in_features", "out_features", "num_groups", "activation")
    bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        num_groups: int,
        *,
        bias: bool = True,
        activation: Activation | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        for name, number in (("in_features", in_features), ("out_features", out_features), ("num_groups", num_groups)):
            _check_least(name, number)
        if activation is not None:
            _check_activation(activation)
        self.activation = activation
        self.in_features, self.out_features, self.num_groups = in_features, out_features, num_groups
        self.weight = nn.Parameter(torch.empty(num_groups, out_features, in_features, device=device))
        self.register_parameter("bias", nn.Parameter(torch.empty(num_groups, out_features, device=device)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new weights."""
        bound = 1 / math.sqrt(self.in_features)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """Apply each group's layer."""
        if self.activation in ("relu", None):
            return grouped_linear(x, self.weight, self.bias, self.activation)
        return ACTIVATIONS[self.activation](grouped_linear(x, self.weight, self.bias))


class GroupedMLP(JaggedModule):
    """Multilayer perceptrons of one shape side by side: the experts of a layer, or the towers of tasks.

    A layer of all of them is one matrix product (`GroupedLinear`), however many there are.

    Args:
        in_features: width of rows in.
        layer_sizes: widths of the layers; the last is the width of rows out.
        num_groups: perceptrons G, at least one.
        activation: `"relu"`, `"silu"` or `"gelu"`, after every layer but the last.
        last_activation: whether it follows the last one, too, as is usual of experts.
        dropout: probability, after every activation.
        device: where parameters live; `"meta"` allocates nothing.

    Shape:
        x: `[N, in_features]`, which all groups read, or `[N, G, in_features]`; out `[N, G, layer_sizes[-1]]`.

    Raises:
        ValueError: no layer, a number below 1, an unknown activation; rows of another shape.

    Example:
        >>> import torch
        >>> from jagged.models import GroupedMLP
        >>> towers = GroupedMLP(16, [8, 1], num_groups=3)
        >>> towers(torch.randn(5, 3, 16)).squeeze(2).shape
        torch.Size([5, 3])
    """

    shown = ("activation", "last_activation")

    def __init__(
        self,
        in_features: int,
        layer_sizes: Sequence[int],
        num_groups: int,
        *,
        activation: Activation = "relu",
        last_activation: bool = False,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if not layer_sizes:
            raise ValueError("layer_sizes: expected the width of at least one layer, got none")
        _check_activation(activation)
        self.activation, self.last_activation = activation, last_activation
        widths = itertools.pairwise([in_features, *layer_sizes])
        num_activated = len(layer_sizes) if last_activation else len(layer_sizes) - 1
        self.layers = nn.ModuleList(
            GroupedLinear(a, b, num_groups, activation=activation if place < num_activated else None, device=device)
            for place, (a, b) in enumerate(widths)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each row by each perceptron."""
        for layer in cast("Iterable[GroupedLinear]", self.layers):
            x = layer(x) if layer.activation is None else self.dropout(layer(x))
        return x


class MMoE(JaggedModule):
    """Multi-gate mixture of experts: each task mixes the same experts by a gate of its own.

    With E experts f_e and T tasks: `out_t = sum_e softmax_e(G_t x)_e f_e(x)`.

    Args:
        in_features: width D of rows in.
        expert_sizes: widths of an expert's layers; the last is the width of rows out.
        num_experts: E.
        num_tasks: T.
        gate_features: width of what gates read, where that is not x.
        activation, dropout: of experts, after each of their layers.
        device: where parameters live; `"meta"` allocates nothing.

    Shape:
        x: `[N, D]`; gate: `[N, gate_features]` or None for x; out `[N, T, expert_sizes[-1]]`.

    Raises:
        ValueError: as `GroupedMLP`; a gate where none is expected, or none where one is.

    Source:
        Ma et al., Modeling Task Relationships in Multi-task Learning with Multi-gate Mixture-of-Experts, KDD 2018, equations 6
        and 7.

    Example:
        >>> import torch
        >>> from jagged.models import MMoE
        >>> MMoE(16, [32, 8], num_experts=4, num_tasks=2)(torch.randn(5, 16)).shape
        torch.Size([5, 2, 8])
    """

    shown = ("num_tasks",)

    def __init__(
        self,
        in_features: int,
        expert_sizes: Sequence[int],
        num_experts: int,
        num_tasks: int,
        *,
        gate_features: int | None = None,
        activation: Activation = "relu",
        dropout: float = 0.0,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.num_tasks, self.gate_features = num_tasks, gate_features
        self.experts = GroupedMLP(
            in_features,
            expert_sizes,
            num_experts,
            activation=activation,
            last_activation=True,
            dropout=dropout,
            device=device,
        )
        self.gates = GroupedLinear(in_features if gate_features is None else gate_features, num_experts, num_tasks, device=device)

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """Mix the experts for each task."""
        if (gate is None) != (self.gate_features is None):
            expected = "None, as there are no gate_features" if self.gate_features is None else f"rows [N, {self.gate_features}]"
            raise ValueError(f"gate: expected {expected}, got {None if gate is None else list(gate.shape)}")
        return mixed(self.gates(x if gate is None else gate), self.experts(x))


class PLE(JaggedModule):
    """Progressive layered extraction: layers of experts, some of each task and some of all, mixed by gates.

    A layer (customized gate control) has `num_specific` experts of each of the T tasks, which read the task's rows, and
    `num_shared` experts that read the shared rows; in the first layer all read x. Gates are linear layers with a softmax: that of
    a task reads the task's rows and mixes its own and the shared experts to the task's next rows, that of the shared rows mixes
    all experts. The last layer has no shared rows.

    Args:
        in_features: width D of rows in.
        expert_sizes: widths of an expert's layers, the same in each layer of experts; the last is the width of rows out.
        num_tasks: T.
        num_layers: layers of experts; one is the model that its authors call CGC.
        num_specific, num_shared: experts of each task, and shared ones.
        activation, dropout: of experts, after each of their layers.
        device: where parameters live; `"meta"` allocates nothing.

    Shape:
        x: `[N, D]`; out `[N, T, expert_sizes[-1]]`.

    Raises:
        ValueError: as `GroupedMLP`; no layer.

    Source:
        Tang et al., Progressive Layered Extraction (PLE): A Novel Multi-Task Learning Model for Personalized Recommendations,
        RecSys 2020, equations 1 to 6.

    Example:
        >>> import torch
        >>> from jagged.models import PLE
        >>> PLE(16, [32, 8], num_tasks=2, num_layers=2, num_specific=3, num_shared=2)(torch.randn(5, 16)).shape
        torch.Size([5, 2, 8])
    """

    def __init__(
        self,
        in_features: int,
        expert_sizes: Sequence[int],
        num_tasks: int,
        *,
        num_layers: int = 2,
        num_specific: int = 1,
        num_shared: int = 1,
        activation: Activation = "relu",
        dropout: float = 0.0,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        _check_least("num_layers", num_layers)
        self.layers = nn.ModuleList(
            _Extraction(
                expert_sizes[-1] if place else in_features,
                expert_sizes,
                num_tasks,
                num_specific,
                num_shared,
                is_last=place == num_layers - 1,
                activation=activation,
                dropout=dropout,
                device=device,
            )
            for place in range(num_layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Extract each task's rows."""
        of_tasks, shared = x, x
        for layer in self.layers:
            of_tasks, shared = layer(of_tasks, shared)
        return of_tasks


class _Extraction(JaggedModule):
    """A layer of `PLE`: rows of tasks and shared ones in, and out again."""

    def __init__(
        self,
        in_features: int,
        expert_sizes: Sequence[int],
        num_tasks: int,
        num_specific: int,
        num_shared: int,
        *,
        is_last: bool,
        activation: Activation,
        dropout: float,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        _check_activation(activation)
        for name, number in (("num_tasks", num_tasks), ("num_specific", num_specific), ("num_shared", num_shared)):
            _check_least(name, number)
        if not expert_sizes:
            raise ValueError("expert_sizes: expected the width of at least one layer, got none")
        self.num_tasks, self.num_specific, self.num_shared = num_tasks, num_specific, num_shared
        # Experts of one task read the same rows, so that their first layers are one matrix.
        first, *others = expert_sizes
        self.specific_inputs = GroupedLinear(in_features, num_specific * first, num_tasks, activation=activation, device=device)
        self.shared_inputs = GroupedLinear(in_features, first, num_shared, activation=activation, device=device)
        self.dropout = nn.Dropout(dropout)

        def later(count: int) -> nn.Module:
            if not others:
                return nn.Identity()
            return GroupedMLP(first, others, count, activation=activation, last_activation=True, dropout=dropout, device=device)

        self.specific, self.shared = later(num_tasks * num_specific), later(num_shared)
        self.gates = GroupedLinear(in_features, num_specific + num_shared, num_tasks, device=device)
        of_all = num_tasks * num_specific + num_shared
        self.shared_gate = None if is_last else GroupedLinear(in_features, of_all, 1, device=device)

    def forward(self, of_tasks: Tensor, shared: Tensor) -> tuple[Tensor, Tensor]:
        tasks, specific = self.num_tasks, self.num_specific
        first = self.specific_inputs(of_tasks).unflatten(2, (specific, -1)).flatten(1, 2)
        own, of_all = self.specific(self.dropout(first)), self.shared(self.dropout(self.shared_inputs(shared)))
        own_weights, shared_weights = _shares(self.gates(of_tasks), own.dtype).split([specific, self.num_shared], 2)
        # The experts of a task are mixed for it alone: a row of each.
        of_own = mix_groups(own.unflatten(1, (tasks, specific)).flatten(0, 1), own_weights.reshape(-1, 1, specific))
        mixed_tasks = of_own.view(-1, tasks, own.shape[2]) + mix_groups(of_all, shared_weights)
        if self.shared_gate is None:
            return mixed_tasks, shared
        own_weights, shared_weights = _shares(self.shared_gate(shared), own.dtype).split([tasks * specific, self.num_shared], 2)
        return mixed_tasks, (mix_groups(own, own_weights) + mix_groups(of_all, shared_weights)).squeeze(1)


class GateUnit(JaggedModule):
    """Gates from 0 to 2, of which 1 changes nothing: `2 sigmoid(W_2 relu(W_1 x + b_1) + b_2)`.

    Args:
        in_features: width of what the gates read.
        out_features: how many gates.
        hidden_features: between; None for as many as gates.
        device: where parameters live; `"meta"` allocates nothing.

    Shape:
        x: `[*, in_features]`; out `[*, out_features]`.

    Source:
        Chang et al., PEPNet: Parameter and Embedding Personalized Network for Infusing with Personalized Prior Information, KDD
        2023, section 3.1 (Gate NU, with its scale of 2).

    Example:
        >>> import torch
        >>> from jagged.models import GateUnit
        >>> GateUnit(4, 6)(torch.randn(5, 4)).shape
        torch.Size([5, 6])
    """

    def __init__(
        self, in_features: int, out_features: int, hidden_features: int | None = None, *, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        hidden = out_features if hidden_features is None else hidden_features
        self.layers = nn.Sequential(
            nn.Linear(in_features, hidden, device=device), nn.ReLU(), nn.Linear(hidden, out_features, device=device)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the gates."""
        return 2 * cast(Tensor, self.layers(x)).sigmoid()


class EPNet(JaggedModule):
    """Gates on the embeddings of a row by what is known of its domain (embedding personalised network).

    `out = GateUnit([p, e]) * e`; the gates' gradient does not reach the embeddings e through what the gates read.

    Args:
        in_features: width D of the embeddings.
        prior_features: width P of what is known of the domain.
        hidden_features: of the gates; None for D.
        device: where parameters live; `"meta"` allocates nothing.

    Shape:
        x: `[N, D]`; prior: `[N, P]`; out `[N, D]`.

    Source:
        Chang et al., PEPNet, KDD 2023, section 3.2.

    Example:
        >>> import torch
        >>> from jagged.models import EPNet
        >>> EPNet(16, 4)(torch.randn(5, 16), torch.randn(5, 4)).shape
        torch.Size([5, 16])
    """

    def __init__(
        self,
        in_features: int,
        prior_features: int,
        *,
        hidden_features: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.gate = GateUnit(prior_features + in_features, in_features, hidden_features, device=device)

    def forward(self, x: Tensor, prior: Tensor) -> Tensor:
        """Scale the embeddings."""
        return cast(Tensor, self.gate(torch.cat([prior, x.detach()], -1))) * x


class PPNet(JaggedModule):
    """Towers of tasks with gates before each of their layers, by what is known of the user and the item.

    Of layer l and task t: `h_t <- activation(W_lt (g_lt * h_t) + b_lt)`, where `g_l = GateUnit_l([p, x])` has the gates of all
    tasks. The gates' gradient does not reach x through what they read. No activation follows the last layer.

    Args:
        in_features: width D of rows in.
        layer_sizes: widths of a tower's layers; the last is the width of rows out.
        num_tasks: T.
        prior_features: width P of what is known.
        hidden_features: of the gates; None for as many as gates.
        activation, dropout: of the towers.
        device: where parameters live; `"meta"` allocates nothing.

    Shape:
        x: `[N, D]`, which all tasks read; prior: `[N, P]`; out `[N, T, layer_sizes[-1]]`.

    Raises:
        ValueError: as `GroupedMLP`.

    Source:
        Chang et al., PEPNet, KDD 2023, section 3.3.

    Example:
        >>> import torch
        >>> from jagged.models import PPNet
        >>> PPNet(16, [8, 1], num_tasks=3, prior_features=4)(torch.randn(5, 16), torch.randn(5, 4)).shape
        torch.Size([5, 3, 1])
    """

    def __init__(
        self,
        in_features: int,
        layer_sizes: Sequence[int],
        num_tasks: int,
        prior_features: int,
        *,
        hidden_features: int | None = None,
        activation: Activation = "relu",
        dropout: float = 0.0,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.towers = GroupedMLP(in_features, layer_sizes, num_tasks, activation=activation, dropout=dropout, device=device)
        self.gates = nn.ModuleList(
            GateUnit(prior_features + in_features, num_tasks * width, hidden_features, device=device)
            for width in [in_features, *layer_sizes[:-1]]
        )

    def forward(self, x: Tensor, prior: Tensor) -> Tensor:
        """Return each task's rows."""
        towers, tasks = self.towers, cast(GroupedLinear, self.towers.layers[0]).num_groups
        read = torch.cat([prior, x.detach()], -1)
        hidden = x[:, None].expand(-1, tasks, -1)
        for place, (gate, layer) in enumerate(zip(self.gates, towers.layers, strict=True)):
            hidden = layer(gate(read).unflatten(1, (tasks, -1)) * hidden)
            if place < len(self.gates) - 1:
                hidden = towers.dropout(hidden)
        return hidden


def mixed(gates: Tensor, experts: Tensor) -> Tensor:
    """Mix experts by gates' softmax.

    Args:
        gates: `[N, T, E]` logits.
        experts: `[N, E, H]`.

    Returns:
        Tensor: `[N, T, H]` in the dtype of the experts.
    """
    return mix_groups(experts, _shares(gates, experts.dtype))


def _shares(gates: Tensor, dtype: torch.dtype) -> Tensor:
    """The softmax over experts of `[N, T, E]`, made in float32 at least."""
    return gates.softmax(2, dtype=torch.promote_types(dtype, torch.float32)).to(dtype)


def _check_activation(name: str) -> None:
    if name not in ACTIVATIONS:
        raise ValueError(f"activation: got {name!r}, expected one of {', '.join(map(repr, ACTIVATIONS))}")


def _check_least(name: str, number: int) -> None:
    if number < 1:
        raise ValueError(f"{name}: expected 1 or more, got {number}")
