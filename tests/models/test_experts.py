"""Experts, gates and towers against loops over them, by hand, and what they refuse."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call

from jagged.models import PLE, EPNet, GateUnit, GroupedLinear, GroupedMLP, MMoE, PPNet
from tests.oracle import check_three_way
from tests.places import PLACE, Place
from tests.reference import experts as reference
from tests.strategies import random_tensor, seeds

pytestmark = pytest.mark.skipif(PLACE.name == "interpret", reason="models run on the place's own backend")

DTYPES = [torch.float32, torch.bfloat16, torch.float64]
SIZES = st.integers(1, 4)


def check(module: nn.Module, twin: Callable[..., Tensor], inputs: Sequence[Tensor], place: Place, dtype: torch.dtype) -> None:
    """Compare output and gradients of inputs and parameters, all of which have gradients."""
    module = module.to(place.device, dtype)
    names, count = [name for name, _ in module.named_parameters()], len(inputs)

    def ours(*given: Tensor) -> Tensor:
        return functional_call(module, dict(zip(names, given[count:], strict=True)), given[:count])

    def theirs(*given: Tensor) -> Tensor:
        return twin(*given[:count], dict(zip(names, given[count:], strict=True)))

    check_three_way(ours, theirs, [*(x.to(place.device, dtype) for x in inputs), *(p.detach() for p in module.parameters())])


def rows(*shape: int, seed: int = 0) -> Tensor:
    return random_tensor(shape, torch.float64, seed)


def seeded(build: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    return build()


@settings(max_examples=15)
@given(st.integers(0, 9), SIZES, SIZES, SIZES, st.booleans(), seeds())
@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped_linear(
    place: Place, dtype: torch.dtype, count: int, wide: int, narrow: int, groups: int, is_shared: bool, seed: int
) -> None:
    x = rows(count, wide, seed=seed) if is_shared else rows(count, groups, wide, seed=seed)

    def twin(x: Tensor, of: reference.Parameters) -> Tensor:
        return torch.stack(reference.grouped_linear(x, of), 1)

    check(seeded(lambda: GroupedLinear(wide, narrow, groups)), twin, [x], place, dtype)


def test_grouped_linear_by_hand(place: Place) -> None:
    layers = GroupedLinear(2, 1, 2).to(place.device)
    with torch.no_grad():
        layers.weight.copy_(torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]]))
        layers.bias.copy_(torch.tensor([[10.0], [20.0]]))
    assert layers(torch.tensor([[1.0, 1.0]], device=place.device)).tolist() == [[[13.0], [27.0]]]
    assert layers(torch.tensor([[[1.0, 0.0], [0.0, 1.0]]], device=place.device)).tolist() == [[[11.0], [24.0]]]
    without = GroupedLinear(2, 1, 2, bias=False).to(place.device)
    without.load_state_dict({"weight": layers.weight})
    assert without(torch.tensor([[1.0, 1.0]], device=place.device)).tolist() == [[[3.0], [7.0]]]
    assert without(torch.tensor([[[1.0, 0.0], [0.0, 1.0]]], device=place.device)).tolist() == [[[1.0], [4.0]]]


def test_weights_are_drawn_as_those_of_linear_layers() -> None:
    layers = seeded(lambda: GroupedLinear(64, 50, 30))
    for parameter in layers.parameters():
        assert parameter.abs().max() <= 1 / 8
        assert float(parameter.detach().std()) == pytest.approx(1 / 8 / 3**0.5, rel=0.05)
    assert not torch.equal(layers.weight[0], layers.weight[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["relu", "silu", "gelu"])
@pytest.mark.parametrize(("is_shared", "last"), [(True, False), (False, True)])
def test_grouped_mlp(place: Place, dtype: torch.dtype, activation: str, is_shared: bool, last: bool) -> None:
    x = rows(7, 4) if is_shared else rows(7, 3, 4)
    module = seeded(lambda: GroupedMLP(4, [6, 5, 2], 3, activation=activation, last_activation=last))

    def twin(x: Tensor, of: reference.Parameters) -> Tensor:
        return torch.stack(reference.grouped_mlp(x, of, activation=activation, last=last), 1)

    check(module, twin, [x], place, dtype)


@settings(max_examples=10)
@given(st.integers(0, 9), SIZES, st.integers(1, 3), st.lists(SIZES, min_size=1, max_size=3), st.booleans(), seeds())
@pytest.mark.parametrize("dtype", DTYPES)
def test_mmoe(
    place: Place, dtype: torch.dtype, count: int, experts: int, tasks: int, sizes: list[int], has_gate: bool, seed: int
) -> None:
    x, gate = rows(count, 4, seed=seed), rows(count, 3, seed=seed + 1)
    module = seeded(lambda: MMoE(4, sizes, experts, tasks, gate_features=3 if has_gate else None))

    def twin(x: Tensor, *others: Any) -> Tensor:
        return reference.mmoe(x, others[0] if has_gate else x, others[-1])

    check(module, twin, [x, gate] if has_gate else [x], place, dtype)


def test_mmoe_by_hand(place: Place) -> None:
    mixture = MMoE(1, [1], num_experts=2, num_tasks=2).to(place.device)
    with torch.no_grad():
        mixture.experts.layers[0].weight.copy_(torch.tensor([[[1.0]], [[10.0]]]))
        mixture.experts.layers[0].bias.zero_()
        # Task 0 takes the first expert alone, task 1 both alike.
        mixture.gates.weight.zero_()
        mixture.gates.bias.copy_(torch.tensor([[100.0, -100.0], [0.0, 0.0]]))
    assert mixture(torch.tensor([[2.0], [-1.0]], device=place.device)).tolist() == [[[2.0], [11.0]], [[0.0], [0.0]]]


@settings(max_examples=10)
@given(st.integers(0, 9), st.integers(1, 3), st.integers(1, 3), SIZES, SIZES, st.lists(SIZES, min_size=1, max_size=3), seeds())
@pytest.mark.parametrize("dtype", DTYPES)
def test_ple(
    place: Place,
    dtype: torch.dtype,
    count: int,
    layers: int,
    tasks: int,
    specific: int,
    shared: int,
    sizes: list[int],
    seed: int,
) -> None:
    options = {"num_layers": layers, "num_tasks": tasks, "num_specific": specific, "num_shared": shared}
    module = seeded(lambda: PLE(4, sizes, **options))
    check(module, lambda x, of: reference.ple(x, of, layers, tasks, specific, shared), [rows(count, 4, seed=seed)], place, dtype)


def test_an_expert_of_a_task_is_for_no_other() -> None:
    """Of the first task's own experts nothing reaches the second in one layer; in two by the shared rows alone."""
    for layers, reaches in ((1, False), (2, True)):
        model = seeded(lambda layers=layers: PLE(4, [5], 2, num_layers=layers, num_specific=2, num_shared=1))
        model(rows(6, 4).float())[:, 1].sum().backward()
        gradient = model.layers[0].specific_inputs.weight.grad
        assert bool(gradient[0].any()) is reaches
        assert gradient[1].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 7])
@pytest.mark.parametrize("hidden", [None, 2])
def test_gates(place: Place, dtype: torch.dtype, count: int, hidden: int | None) -> None:
    x, prior = rows(count, 4), rows(count, 3, seed=1)
    check(seeded(lambda: GateUnit(4, 5, hidden)), reference.gate_unit, [x], place, dtype)
    check(seeded(lambda: EPNet(4, 3, hidden_features=hidden)), reference.epnet, [x, prior], place, dtype)
    module = seeded(lambda: PPNet(4, [6, 2], 3, 3, hidden_features=hidden, activation="silu"))
    check(module, lambda x, prior, of: reference.ppnet(x, prior, of, 3, "silu"), [x, prior], place, dtype)


def test_gates_begin_at_one_and_read_without_gradients(place: Place) -> None:
    gate = GateUnit(4, 5).to(place.device)
    with torch.no_grad():
        gate.layers[2].weight.zero_()
        gate.layers[2].bias.zero_()
    x = torch.randn(3, 4, device=place.device)
    assert gate(x).eq(1).all()
    # By a gate that is closed nothing comes back, however the gate would change.
    net = EPNet(2, 1).to(place.device)
    with torch.no_grad():
        net.gate.layers[2].bias.fill_(-1e4)
    x = torch.randn(3, 2, device=place.device, requires_grad=True)
    net(x, torch.randn(3, 1, device=place.device)).sum().backward()
    assert x.grad is not None
    assert x.grad.eq(0).all()


@pytest.mark.parametrize(
    "module",
    [
        lambda: GroupedMLP(4, [64, 64], 3, dropout=0.5),
        lambda: MMoE(4, [64, 64], 3, 2, dropout=0.5),
        lambda: PLE(4, [64, 64], 2, dropout=0.5),
        lambda: PPNet(4, [64, 64], 2, 4, dropout=0.5),
    ],
)
def test_dropout_is_of_training_alone(place: Place, module: Callable[[], nn.Module]) -> None:
    made, x = seeded(module).to(place.device), torch.randn(5, 4, device=place.device)
    inputs = (x, x) if isinstance(made, PPNet) else (x,)
    assert not torch.equal(made(*inputs), made(*inputs))
    made.eval()
    assert torch.equal(made(*inputs), made(*inputs))


ROWS = "expected shape [N, 2] or [N, 3, 2], as weight [3, 2, 2] has it"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: GroupedLinear(0, 2, 3), "in_features: expected 1 or more, got 0"),
        (lambda: GroupedLinear(2, 0, 3), "out_features: expected 1 or more, got 0"),
        (lambda: GroupedLinear(2, 2, 0), "num_groups: expected 1 or more, got 0"),
        (
            lambda: GroupedLinear(2, 2, 3)(rows(5, 3).float()),
            f"x: {ROWS}, got [5, 3]",
        ),
        (lambda: GroupedLinear(2, 2, 3)(rows(5, 2, 2).float()), f"x: {ROWS}, got [5, 2, 2]"),
        (lambda: GroupedLinear(2, 2, 3)(rows(2).float()), "x: expected shape [N, G, in], got [2]"),
        (lambda: GroupedMLP(2, [], 3), "layer_sizes: expected the width of at least one layer, got none"),
        (lambda: GroupedMLP(2, [2], 3, activation="tanh"), "activation: got 'tanh', expected one of 'relu', 'silu', 'gelu'"),
        (lambda: MMoE(2, [2], 2, 2)(rows(1, 2), rows(1, 2)), "gate: expected None, as there are no gate_features, got [1, 2]"),
        (lambda: MMoE(2, [2], 2, 2, gate_features=3)(rows(1, 2)), "gate: expected rows [N, 3], got None"),
        (lambda: PLE(2, [2], 2, num_layers=0), "num_layers: expected 1 or more, got 0"),
        (lambda: PLE(2, [2], 0), "num_tasks: expected 1 or more, got 0"),
        (lambda: PLE(2, [2], 2, num_specific=0), "num_specific: expected 1 or more, got 0"),
        (lambda: PLE(2, [2], 2, num_shared=0), "num_shared: expected 1 or more, got 0"),
        (lambda: PLE(2, [], 2), "expert_sizes: expected the width of at least one layer, got none"),
        (lambda: PPNet(2, [], 2, 2), "layer_sizes: expected the width of at least one layer, got none"),
    ],
)
def test_what_is_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        call()
