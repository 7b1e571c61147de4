"""Blocks that cross features: three ways against twins, by hand, against TorchRec's; compiled, exported, and what they refuse."""

from __future__ import annotations

import copy
import math
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.export import Dim
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torchrec.modules.crossnet import CrossNet as TorchRecsCrossNet
from torchrec.modules.crossnet import LowRankCrossNet, LowRankMixtureCrossNet
from torchrec.sparse.jagged_tensor import JaggedTensor

from jagged.models import (
    CrossNet,
    DotInteraction,
    FactorizationMachine,
    FeatureTokens,
    MaskBlock,
    MaskNet,
    Wukong,
    WukongLayer,
)
from jagged.ops import trust_values
from tests.oracle import check_three_way
from tests.places import PLACE, Place
from tests.reference import interactions as twins
from tests.reference.conversion import to_dense, to_jagged
from tests.strategies import Jagged, jagged_batches, jagged_of, random_tensor, seeds

pytestmark = pytest.mark.skipif(PLACE.name == "interpret", reason="modules run on the place's own backend")


@dataclass(frozen=True)
class Case:
    """How a block is built, the shape of a row, of what becomes of it, and the twin that reads the block's weights."""

    build: Callable[..., nn.Module]
    row: tuple[int, ...]
    out: tuple[int, ...]
    twin: Callable[[Tensor, twins.Weights], Tensor]


WUKONG: dict[str, Any] = {"num_fm_tokens": 2, "num_linear_tokens": 3, "rank": 2, "hidden_sizes": [7]}
WIDTHS = (3, 3, 1, 2, 3, 1, 1)
CASES = {
    "cross net": Case(lambda **to: CrossNet(6, 2, **to), (6,), (6,), lambda x, of: twins.cross_net(x, of, 2)),
    "cross net of low rank": Case(lambda **to: CrossNet(6, 2, rank=3, **to), (6,), (6,), lambda x, of: twins.cross_net(x, of, 2)),
    "experts": Case(
        lambda **to: CrossNet(6, 2, rank=2, num_experts=3, activation="silu", **to),
        (6,),
        (6,),
        lambda x, of: twins.cross_experts(x, of, 2, "silu"),
    ),
    "one expert": Case(
        lambda **to: CrossNet(6, 1, rank=2, num_experts=1, **to), (6,), (6,), lambda x, of: twins.cross_experts(x, of, 1, "relu")
    ),
    "dots": Case(lambda **_: DotInteraction(), (4, 3), (6,), lambda x, of: twins.dots(x)),
    "factorization machine": Case(
        lambda **_: FactorizationMachine(), (7, 3), (1,), lambda x, of: twins.factorization_machine(x, False)
    ),
    "factorization machine, kept apart": Case(
        lambda **_: FactorizationMachine(keep_dim=True), (4, 3), (3,), lambda x, of: twins.factorization_machine(x, True)
    ),
    "tokens": Case(
        lambda **to: FeatureTokens(WIDTHS, 4, **to),
        (sum(WIDTHS),),
        (len(WIDTHS), 4),
        lambda x, of: twins.feature_tokens(x, of, WIDTHS),
    ),
    "tokens of one width": Case(
        lambda **to: FeatureTokens([2] * 3, 4, **to), (6,), (3, 4), lambda x, of: twins.feature_tokens(x, of, [2] * 3)
    ),
    "wukong": Case(lambda **to: Wukong(4, 3, 2, **WUKONG, **to), (4, 3), (5, 3), lambda x, of: twins.wukong(x, of, 2, 1)),
    "wukong layer": Case(
        lambda **to: WukongLayer(5, 3, **WUKONG, **to),
        (5, 3),
        (5, 3),
        lambda x, of: twins.wukong(x, {f"layers.0.{name}": weight for name, weight in of.items()}, 1, 1),
    ),
    "mask block": Case(lambda **to: MaskBlock(6, 5, mask_features=4, **to), (6,), (5,), lambda x, of: twins.mask_block(x, x, of)),
    "masks one after the other": Case(
        lambda **to: MaskNet(6, 5, 2, **to), (6,), (5,), lambda x, of: twins.serial_masks(x, of, 2)
    ),
    "masks side by side": Case(
        lambda **to: MaskNet(6, 5, 3, parallel=True, mask_features=4, **to),
        (6,),
        (15,),
        lambda x, of: twins.parallel_masks(x, of, 3),
    ),
}
every_block = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
# Whose rows may be a JaggedTensor's, and have one dimension for that.
but_dots = pytest.mark.parametrize(
    "case", [case for name, case in CASES.items() if name != "dots"], ids=[name for name in CASES if name != "dots"]
)


def drawn(module: nn.Module, seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Weights of ordinary size, norms' and biases' too, which new ones would not show."""
    found = {}
    for number, (name, weight) in enumerate(module.named_parameters()):
        scale = 1 if weight.dim() < 2 or 1 in weight.shape else weight.shape[-1] ** -0.5
        found[name] = random_tensor(tuple(weight.shape), dtype, seed + number) * scale
    return found


def check(
    module: nn.Module, twin: Callable[[Tensor, twins.Weights], Tensor], row: tuple[int, ...], rows: int, seed: int, dtype: Any
) -> None:
    """Three ways, with the weights among the inputs."""
    weights = drawn(module, seed + 1, dtype)
    x = random_tensor((rows, *row), dtype, seed)
    check_three_way(
        lambda x, *of: functional_call(module, dict(zip(weights, of, strict=True)), (x,)),
        lambda x, *of: twin(x, dict(zip(weights, of, strict=True))),
        [x, *weights.values()],
    )


def block_of(case: Case, place: Place, dtype: torch.dtype = torch.float32) -> nn.Module:
    module = case.build().to(place.device, dtype)
    module.load_state_dict(drawn(module, 3, dtype))
    return module


def gradients(module: nn.Module, x: Tensor, *, is_dynamic: bool = False) -> list[Tensor]:
    """The result, and the gradients of rows and weights; compiled for any number of rows where that is dynamic."""
    x = x.detach().requires_grad_()
    if is_dynamic:
        torch._dynamo.mark_dynamic(x, 0)
    found = module(x)
    weights = torch.linspace(1, 2, found.shape[-1], device=x.device)
    return [found, *torch.autograd.grad((found * weights).sum(), [x, *module.parameters()])]


@every_block
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_block_is_its_twin(place: Place, case: Case, dtype: torch.dtype, rows: int) -> None:
    module = case.build().to(place.device)
    check(module, case.twin, case.row, rows, rows, dtype)
    assert module(torch.zeros(rows, *case.row, device=place.device)).shape == (rows, *case.out)


@settings(max_examples=20)
@given(
    st.integers(0, 4), st.integers(1, 5), st.integers(1, 3), st.integers(1, 4), st.sampled_from(["relu", "silu"]),
    st.integers(1, 3), seeds(),
)  # fmt: skip
def test_experts_are_gated_crosses(
    place: Place, rows: int, width: int, rank: int, count: int, activation: Any, layers: int, seed: int
) -> None:
    module = CrossNet(width, layers, rank=rank, num_experts=count, activation=activation).to(place.device)
    check(module, lambda x, of: twins.cross_experts(x, of, layers, activation), (width,), rows, seed, torch.float32)


@settings(max_examples=30)
@given(
    st.integers(0, 4), st.integers(1, 9), st.integers(1, 4), st.booleans(), st.sampled_from([torch.float32, torch.bfloat16]),
    seeds(),
)  # fmt: skip
def test_factorization_machine_is_the_sum_of_pairs(
    place: Place, rows: int, n: int, width: int, keep_dim: bool, dtype: torch.dtype, seed: int
) -> None:
    x = random_tensor((rows, n, width), dtype, seed)
    check_three_way(FactorizationMachine(keep_dim=keep_dim), lambda x: twins.factorization_machine(x, keep_dim), [x])


@settings(max_examples=20)
@given(st.integers(0, 4), st.lists(st.integers(1, 3), min_size=1, max_size=7), st.integers(1, 4), seeds())
def test_tokens_are_projected_features(place: Place, rows: int, widths: list[int], dim: int, seed: int) -> None:
    module = FeatureTokens(widths, dim).to(place.device)
    check(module, lambda x, of: twins.feature_tokens(x, of, widths), (sum(widths),), rows, seed, torch.float32)


@settings(max_examples=20)
@given(
    st.integers(0, 4), st.integers(2, 5), st.integers(2, 4), st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)),
    st.lists(st.integers(1, 5), max_size=2), st.integers(1, 2), seeds(),
)  # fmt: skip
def test_wukong_is_that_of_all_pairs(
    place: Place, rows: int, n: int, dim: int, sizes: tuple[int, int, int], hidden: list[int], layers: int, seed: int
) -> None:
    fm, linear, rank = sizes
    module = Wukong(n, dim, layers, num_fm_tokens=fm, num_linear_tokens=linear, rank=rank, hidden_sizes=hidden).to(place.device)
    check(module, lambda x, of: twins.wukong(x, of, layers, len(hidden)), (n, dim), rows, seed, torch.float32)


@settings(max_examples=20)
@given(
    st.integers(0, 4), st.integers(2, 5), st.integers(2, 5), st.integers(1, 4), st.integers(1, 3), st.booleans(), seeds()
)  # fmt: skip
def test_masks_are_those_of_each_row(
    place: Place, rows: int, width: int, out: int, hidden: int, count: int, parallel: bool, seed: int
) -> None:
    module = MaskNet(width, out, count, parallel=parallel, mask_features=hidden).to(place.device)
    twin = twins.parallel_masks if parallel else twins.serial_masks
    check(module, lambda x, of: twin(x, of, count), (width,), rows, seed, torch.float32)


@pytest.mark.parametrize("rank", [None, 3])
def test_cross_net_is_torchrecs(place: Place, rank: int | None) -> None:
    torch.manual_seed(0)
    ours = CrossNet(7, 2, rank=rank).double().to(place.device)
    theirs = (TorchRecsCrossNet(7, 2) if rank is None else LowRankCrossNet(7, 2, rank)).double().to(place.device)
    with torch.no_grad():
        for place_, layer in enumerate(ours.layers):
            last = layer if rank is None else layer[1]
            theirs.bias[place_].copy_(last.bias[:, None] if theirs.bias[place_].dim() == 2 else last.bias)
            if rank is None:
                theirs.kernels[place_].copy_(layer.weight)
            else:
                theirs.V_kernels[place_].copy_(layer[0].weight)
                theirs.W_kernels[place_].copy_(layer[1].weight)
    x = torch.randn(5, 7, dtype=torch.float64, device=place.device)
    torch.testing.assert_close(ours(x), theirs(x))
    assert ours(x[:, None])[:, 0].equal(ours(x))
    assert ours(x[:0]).shape == (0, 7)


def test_cross_net_by_hand(place: Place) -> None:
    net = CrossNet(2, 2).to(place.device)
    with torch.no_grad():
        for layer in net.layers:
            layer.weight.copy_(torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
            layer.bias.fill_(1.0)
    # (2, 3) -> (2 * 4 + 2, 3 * 3 + 3) = (10, 12) -> (2 * 13 + 10, 3 * 11 + 12)
    assert net(torch.tensor([[2.0, 3.0]], device=place.device)).tolist() == [[36.0, 45.0]]


@settings(max_examples=30)
@given(jagged_batches(longest=30), seeds(), st.integers(1, 4), st.integers(0, 3))
def test_dots_are_those_of_padded_rows(place: Place, batch: Jagged, seed: int, n: int, m: int) -> None:
    """With the sample's vectors beside each row's: the upper triangle, without what these give with one another."""
    width, longest = 5, max([1, *batch.lengths])

    def ours(rows: Tensor, context: Tensor) -> Tensor:
        x = JaggedTensor(values=rows, offsets=batch.offsets)
        return DotInteraction()(x, context if m else None).values()

    def padded(rows: Tensor, context: Tensor) -> Tensor:
        dense = to_dense(rows.flatten(1), batch.lengths, longest, 0.0).unflatten(2, (n, width))
        both = torch.cat([dense, context[:, None].expand(-1, longest, -1, -1)], 2)
        every = both @ both.transpose(2, 3)
        own = [every[:, :, i, j] for i in range(n) for j in range(i + 1, n)]
        theirs = [every[:, :, i, n + j] for i in range(n) for j in range(m)]
        stacked = torch.stack([*own, *theirs], 2) if own or theirs else every.new_zeros(*every.shape[:2], 0)
        return to_jagged(stacked, batch.lengths)

    inputs = [
        random_tensor((batch.total, n, width), torch.float32, seed),
        random_tensor((batch.batch_size, m, width), torch.float32, seed + 1),
    ]
    check_three_way(ours, padded, inputs, requires_grad=[n + m > 1, m > 0])


def test_dots_of_a_tensor(place: Place) -> None:
    x = torch.randn(3, 4, 6, device=place.device)
    found = DotInteraction()(x)
    expected = [(x[:, i] * x[:, j]).sum(1) for i in range(4) for j in range(i + 1, 4)]
    torch.testing.assert_close(found, torch.stack(expected, 1))
    assert DotInteraction()(x[:, :1]).shape == (3, 0)
    jagged = JaggedTensor(values=x, offsets=jagged_of((2, 0, 1)).offsets)
    assert DotInteraction()(jagged).values().equal(found)


@pytest.mark.parametrize("experts", [1, 3])
def test_experts_are_torchrecs(place: Place, experts: int) -> None:
    """Whose gates are those of every layer."""
    torch.manual_seed(0)
    ours = CrossNet(7, 2, rank=2, num_experts=experts).double().to(place.device)
    theirs = LowRankMixtureCrossNet(7, 2, experts, 2).double().to(place.device)
    with torch.no_grad():
        for number, layer in enumerate(ours.layers):
            layer.bias.normal_()
            theirs.bias[number].copy_(layer.bias[:, None])
            theirs.V_kernels[number].copy_(layer.down.weight.unflatten(0, (experts, 2)))
            theirs.C_kernels[number].copy_(layer.inner.weight)
            theirs.U_kernels[number].copy_(layer.up.weight)
            if experts > 1:
                layer.gate.weight.copy_(ours.layers[0].gate.weight)
                for gate, weight in zip(theirs.gates, layer.gate.weight, strict=True):
                    gate.weight.copy_(weight[None])
    x = torch.randn(5, 7, dtype=torch.float64, device=place.device)
    torch.testing.assert_close(ours(x), theirs(x).view(5, 7))


def fill(module: nn.Module, **weights: Any) -> None:
    """Set weights by their names, with `__` for a dot."""
    state = {name.replace("__", "."): torch.tensor(weight) for name, weight in weights.items()}
    module.load_state_dict(state, strict=False)
    assert set(state) <= set(module.state_dict())


def test_experts_with_gelu(place: Place) -> None:
    """In float64, since PyTorch's gelu of one number in float32 is another approximation than that of several."""
    module = CrossNet(5, 2, rank=3, num_experts=2, activation="gelu").to(place.device)
    of = drawn(module, 0, torch.float64)
    x = random_tensor((4, 5), torch.float64, 9)
    found = functional_call(module, of, (x,))
    torch.testing.assert_close(found, twins.cross_experts(x, of, 2, "gelu"))
    assert not torch.allclose(found, twins.cross_experts(x, of, 2, "silu"))


def test_experts_by_hand(place: Place) -> None:
    net = CrossNet(2, 1, rank=1, num_experts=2)
    fill(
        net,
        layers__0__down__weight=[[1.0, 0.0], [0.0, 1.0]],
        layers__0__inner__weight=[[[1.0]], [[-1.0]]],
        layers__0__up__weight=[[[1.0], [2.0]], [[5.0], [5.0]]],
        layers__0__bias=[1.0, 0.0],
        layers__0__gate__weight=[[0.0, 0.0], [0.0, 0.0]],
    )
    net, x = net.to(place.device), torch.tensor([[2.0, 3.0]], device=place.device)
    # The experts' numbers are 2 and relu(-3): half of 2 (1, 2), and (2, 3) * ((1, 2) + (1, 0)) + (2, 3).
    assert net(x).tolist() == [[6.0, 9.0]]
    # Gates of 1 and 3 parts: a quarter of 2 (1, 2).
    fill(net, layers__0__gate__weight=[[0.0, 0.0], [math.log(3) / 2, 0.0]])
    torch.testing.assert_close(net(x), torch.tensor([[5.0, 6.0]], device=place.device))


def test_factorization_machine_by_hand(place: Place) -> None:
    x = torch.tensor([[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]], device=place.device)
    # 1 * 3 + 1 * 5 + 3 * 5 and 2 * 4 + 2 * 6 + 4 * 6
    assert FactorizationMachine(keep_dim=True)(x).tolist() == [[23.0, 44.0]]
    assert FactorizationMachine()(x).tolist() == [[67.0]]
    assert FactorizationMachine()(x[:, :1]).tolist() == [[0.0]]


def test_factorization_machine_keeps_small_products(place: Place) -> None:
    """Of squares near 2^24 the difference of 2 would be lost in float32."""
    x = torch.tensor([[[4097.0], [2.0**-12], [0.0]]], device=place.device)
    assert FactorizationMachine()(x).item() == 4097 * 2.0**-12


def test_tokens_by_hand(place: Place) -> None:
    tokens = FeatureTokens([1, 2, 1], 2)
    fill(
        tokens,
        projections__1__weight=[[[10.0], [20.0]], [[30.0], [40.0]]],
        projections__1__bias=[[1.0, 1.0], [0.0, 0.0]],
        projections__2__weight=[[[1.0, 0.0], [0.0, 1.0]]],
        projections__2__bias=[[5.0, 5.0]],
    )
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0]], device=place.device)
    assert tokens.to(place.device)(x).tolist() == [[[11.0, 21.0], [7.0, 8.0], [120.0, 160.0]]]


def test_wukong_by_hand(place: Place) -> None:
    """Without norms, whose numbers are those of the twin."""
    x = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]], device=place.device)
    layer = WukongLayer(2, 2, num_fm_tokens=1, num_linear_tokens=1, rank=1)
    # Y^T X = (-2, -2) and X X^T Y = (-6, -14), which the layer behind it makes (-6, -19).
    common = {"pairs__weight": [[1.0, -1.0]], "mlp__1__weight": [[1.0, 0.0], [1.0, 1.0]], "mlp__1__bias": [0.0, 1.0]}
    fill(layer, **common, linear__weight=[[2.0, 1.0]])
    layer.norm, layer.mlp[0] = nn.Identity(), nn.Identity()
    assert layer.to(place.device)(x).tolist() == [[[-5.0, -17.0], [8.0, 12.0]]]
    layer = WukongLayer(2, 2, num_fm_tokens=1, num_linear_tokens=2, rank=1)
    fill(layer, **common, linear__weight=[[2.0, 1.0], [0.0, 0.0]], residual__weight=[[1.0, 1.0], [0.0, 1.0], [1.0, 0.0]])
    layer.norm, layer.mlp[0] = nn.Identity(), nn.Identity()
    assert layer.to(place.device)(x).tolist() == [[[-2.0, -13.0], [8.0, 12.0], [1.0, 2.0]]]


def test_mask_block_by_hand(place: Place) -> None:
    """The row (1, 3) is (-1, 1) normalised, and its mask (2, 3)."""
    weights = {
        "mask__0__weight": [[1.0, 0.0]],
        "mask__0__bias": [0.0],
        "mask__2__weight": [[2.0], [2.0]],
        "mask__2__bias": [0.0, 1.0],
        "hidden__weight": [[1.0, 0.0], [0.0, 1.0]],
        "hidden_norm__weight": [5.0, 7.0],
        "hidden_norm__bias": [10.0, -1.0],
    }
    block = MaskBlock(2, 2, mask_features=1)
    fill(block, **weights)
    row = torch.tensor([[1.0, 3.0]], device=place.device)
    block = block.to(place.device)
    # (-2, 3), which is (-1, 1) normalised.
    torch.testing.assert_close(block(row), torch.tensor([[5.0, 6.0]], device=place.device), rtol=0, atol=1e-4)
    # A guide of -1 has no mask but its bias: (0, 1), of which the norm is (-1, 1), too.
    block.hidden_norm = nn.Identity()
    torch.testing.assert_close(block(row, -row), torch.tensor([[0.0, 1.0]], device=place.device), rtol=0, atol=1e-4)
    # Of hidden rows as they are: (2 * 1, 3 * 3).
    later = MaskBlock(2, 2, mask_features=1, normalize=False)
    fill(later, **weights)
    later.hidden_norm = nn.Identity()
    assert later.to(place.device)(row).tolist() == [[2.0, 9.0]]


def test_guide_of_another_width(place: Place) -> None:
    block = MaskBlock(3, 2, guide_features=4).to(place.device)
    of = drawn(block, 0, torch.float32)
    block.load_state_dict(of)
    x, guide = torch.randn(5, 3, device=place.device), torch.randn(5, 4, device=place.device)
    torch.testing.assert_close(block(x, guide), twins.mask_block(x, guide, of))
    assert block.mask[0].out_features == 8


class Calls(TorchDispatchMode):
    """Counts the operators that are called, views too."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("build", "row"),
    [
        (lambda n: CrossNet(6, rank=2, num_experts=n), lambda n: (6,)),
        (lambda n: FeatureTokens([3] * n, 4), lambda n: (3 * n,)),
        (lambda n: FeatureTokens([3] * n + [2] * n, 4), lambda n: (5 * n,)),
        (lambda n: MaskNet(6, 4, n, parallel=True), lambda n: (6,)),
        (lambda n: Wukong(n, 4, num_fm_tokens=n, num_linear_tokens=n, rank=n), lambda n: (n, 4)),
    ],
    ids=["experts", "features of one width", "features of two widths", "masks", "tokens"],
)
def test_number_of_operators_is_that_of_few(place: Place, build: Any, row: Any) -> None:
    """Experts, features and blocks are batched, not looped over."""
    counts = []
    for n in (2, 9):
        module, x = build(n).to(place.device), torch.zeros(3, *row(n), device=place.device)
        with Calls() as calls:
            module(x)
        counts.append(calls.count)
    assert counts[0] == counts[1]


@but_dots
def test_other_leading_dimensions(place: Place, case: Case) -> None:
    module, x = block_of(case, place), torch.randn(2, 3, *case.row, device=place.device)
    expected = module(x.flatten(0, 1))
    torch.testing.assert_close(module(x), expected.unflatten(0, (2, 3)))
    torch.testing.assert_close(module(x[0, 0]), expected[0])
    assert module(x[:, :0]).shape == (2, 0, *case.out)


@every_block
def test_compiles_once_for_all_batches(place: Place, case: Case) -> None:
    """Forward and backward in one graph, whose number of rows is none that it knows."""
    module = block_of(case, place)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x = torch.randn(5, *case.row, device=place.device)
    for rows in (5, 2, 3, 1, 0):
        # Of one row and of none PyTorch may compile anew.
        with torch.compiler.set_stance("fail_on_recompile" if rows in (2, 3) else "default"):
            given = x[:rows].clone()
            for found, expected in zip(gradients(compiled, given, is_dynamic=rows > 1), gradients(module, given), strict=True):
                torch.testing.assert_close(found, expected)


@every_block
@pytest.mark.parametrize("strict", [False, True])
def test_exports_for_any_batch(place: Place, case: Case, strict: bool) -> None:
    module = block_of(case, place)
    x = torch.randn(5, *case.row, device=place.device)
    program = torch.export.export(module, (x,), dynamic_shapes=({0: Dim("rows")},), strict=strict).module()
    for rows in (5, 3, 2, 1, 0):
        torch.testing.assert_close(program(x[:rows]), module(x[:rows]))


@every_block
def test_shapes_alone_tell_the_shapes(place: Place, case: Case) -> None:
    """On the meta device a block that asked for a value would fail."""
    module = case.build(device="meta")
    assert all(weight.is_meta for weight in module.parameters())
    assert module(torch.empty(5, *case.row, device="meta")).shape == (5, *case.out)
    module = module.to_empty(device=place.device)
    with torch.no_grad():
        for weight in module.parameters():
            weight.fill_(torch.nan)
    torch.manual_seed(0)
    module.reset_parameters()
    fresh = case.build()
    torch.manual_seed(0)
    fresh.reset_parameters()
    for (name, weight), other in zip(module.named_parameters(), fresh.to(place.device).parameters(), strict=True):
        assert weight.isfinite().all(), name
        if place.device.type == "cpu":
            assert weight.equal(other), name
    assert not dict(module.named_buffers())


@every_block
def test_new_weights_are_those_of_reset(place: Place, case: Case) -> None:
    """Their scale and their constants: of a block as it is built, and after a reset."""
    torch.manual_seed(0)
    built = case.build().state_dict()
    module = case.build()
    for weight in module.parameters():
        weight.data.fill_(torch.nan)
    module.reset_parameters()
    for name, weight in module.state_dict().items():
        assert (weight == 0).all() == (built[name] == 0).all(), name
        assert (weight == 1).all() == (built[name] == 1).all(), name
        assert weight.abs().max() <= 1, name
        assert name.endswith(("norm.weight", "mlp.0.weight")) == bool((weight == 1).all()), name


@every_block
def test_autocast(place: Place, case: Case) -> None:
    """Near what float32 gives, with gradients in float32; of a batch without rows, too."""
    module, x = block_of(case, place), torch.randn(8, *case.row, device=place.device)
    with torch.autocast(place.device.type, torch.bfloat16):
        found = gradients(module, x)
        empty = gradients(module, x[:0])
    # Gradients of norms of a few numbers have no digits in common, where these are nearly alike: the twins bound them.
    expected = gradients(module, x)[0]
    assert (found[0] - expected).norm() <= 0.1 * expected.norm() + 1e-3
    assert all(one.isfinite().all() for one in found)
    assert {one.dtype for one in (*found[1:], *empty[1:])} == {torch.float32}
    assert all(not one.count_nonzero() for one in empty[2:])


@every_block
def test_copies_compute_the_same(place: Place, case: Case) -> None:
    module, x = block_of(case, place), torch.randn(5, *case.row, device=place.device)
    expected = gradients(module, x)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), block_of(case, place)):
        assert all(torch.equal(*pair) for pair in zip(gradients(twin, x), expected, strict=True))


@but_dots
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_vmap_over_rows(place: Place, case: Case) -> None:
    module, x = block_of(case, place, torch.float64), torch.randn(5, *case.row, dtype=torch.float64, device=place.device)
    torch.testing.assert_close(torch.func.vmap(module)(x), module(x))


@every_block
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_gradients_of_each_row(place: Place, case: Case) -> None:
    """By `torch.func`: those of weights add up to the batch's."""
    module, x = block_of(case, place, torch.float64), torch.randn(5, *case.row, dtype=torch.float64, device=place.device)
    weights = dict(module.named_parameters())

    def loss(of: dict[str, Tensor], row: Tensor) -> Tensor:
        return functional_call(module, of, (row[None],)).square().sum()

    of_rows = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)), in_dims=(None, 0))(weights, x)
    found = module(x := x.requires_grad_()).square().sum()
    for weight, rows in zip((*weights.values(), x), (*of_rows[0].values(), of_rows[1]), strict=True):
        expected = torch.autograd.grad(found, weight, retain_graph=True)[0]
        torch.testing.assert_close(rows if weight is x else rows.sum(0), expected)


@every_block
def test_second_derivatives(place: Place, case: Case) -> None:
    module = block_of(case, place, torch.float64)
    x = torch.randn(3, *case.row, dtype=torch.float64, device=place.device, requires_grad=True)
    names = list(dict(module.named_parameters()))
    assert torch.autograd.gradgradcheck(
        lambda x, *of: functional_call(module, dict(zip(names, of, strict=True)), (x,)), (x, *module.parameters())
    )


@every_block
def test_repeats_are_the_same(place: Place, case: Case) -> None:
    module, x = block_of(case, place), torch.randn(64, *case.row, device=place.device)
    expected = gradients(module, x)
    for _ in range(20):
        assert all(torch.equal(*pair) for pair in zip(gradients(module, x), expected, strict=True))


@every_block
def test_is_a_leaf_of_traces(case: Case) -> None:
    traced = torch.fx.symbolic_trace(nn.Sequential(case.build()))
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["0"]


def test_states_of_cross_nets() -> None:
    assert list(CrossNet(4, 1).state_dict()) == ["layers.0.weight", "layers.0.bias"]
    assert list(CrossNet(4, 1, rank=2).state_dict()) == ["layers.0.0.weight", "layers.0.1.weight", "layers.0.1.bias"]
    shapes = {name: tuple(weight.shape) for name, weight in CrossNet(4, 1, rank=2, num_experts=3).state_dict().items()}
    assert shapes == {
        "layers.0.bias": (4,),
        "layers.0.down.weight": (6, 4),
        "layers.0.inner.weight": (3, 2, 2),
        "layers.0.up.weight": (3, 4, 2),
        "layers.0.gate.weight": (3, 4),
    }


def test_repr() -> None:
    assert repr(CrossNet(4, 1)).startswith("CrossNet(\n  in_features=4, rank=None, num_experts=None\n")
    assert repr(FactorizationMachine()) == "FactorizationMachine(keep_dim=False)"
    assert repr(FeatureTokens([2, 1], 3)).startswith("FeatureTokens(\n  widths=(2, 1), token_dim=3\n")
    assert repr(WukongLayer(4, 3, **WUKONG)).startswith(
        "WukongLayer(\n  num_tokens=4, token_dim=3, num_fm_tokens=2, num_linear_tokens=3, rank=2\n"
    )
    assert repr(MaskBlock(4, 3)).startswith("MaskBlock(\n  in_features=4, out_features=3, guide_features=4\n")
    assert repr(MaskNet(4, 3)).startswith("MaskNet(\n  in_features=4, out_features=3, num_blocks=3, parallel=False\n")


def test_messages() -> None:
    def said(call: Any) -> str:
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole line is compared
            call()
        return str(caught.value)

    jagged = JaggedTensor(values=torch.zeros(3, 2, 4), offsets=torch.tensor([0, 1, 3]))
    rows = JaggedTensor(values=torch.zeros(3, 4), offsets=torch.tensor([0, 1, 3]))
    dots = DotInteraction()
    assert said(lambda: CrossNet(4, 0)) == "num_layers: expected 1 or more, got 0; without layers nothing is crossed"
    assert said(lambda: CrossNet(4, rank=0)) == "rank: expected 1 or more, got 0; use None for whole matrices"
    assert said(lambda: CrossNet(4, rank=1, num_experts=0)) == "num_experts: expected 1 or more, got 0; use None for no mixture"
    assert said(lambda: CrossNet(4, num_experts=2)) == "rank: expected a number, got None; 2 experts are of low rank"
    assert said(lambda: CrossNet(4, activation="tanh")) == (
        "activation: expected one of 'relu', 'silu', 'gelu', got 'tanh'; experts are not linear"
    )
    width = "expected values [*, D] with D = 4, got [2, 3]; the block's width is set where it is built"
    for block in (CrossNet(4), FeatureTokens([1, 3], 2), MaskBlock(4, 2), MaskNet(4, 2), MaskNet(4, 2, parallel=True)):
        assert said(lambda block=block: block(torch.zeros(2, 3))) == f"x: {width}"
        assert said(lambda block=block: block(torch.zeros(()))) == f"x: {width.replace('[2, 3]', '[]')}"
    assert said(lambda: MaskBlock(4, 2)(torch.zeros(2, 4), torch.zeros(2, 3))) == f"guide: {width}"
    assert said(lambda: MaskBlock(3, 2, guide_features=4)(torch.zeros(2, 3))) == f"guide: {width}"
    assert said(lambda: dots(rows)) == "x: expected values [sum L, n, d], got [3, 4]; a row has n vectors of one width"
    assert said(lambda: dots(torch.zeros(2, 1, 4), torch.zeros(2, 1, 4))) == (
        "context: expected None, got [2, 1, 4]; rows of a JaggedTensor have samples"
    )
    assert said(lambda: dots(jagged, torch.zeros(2, 1, 3))) == (
        "context: expected vectors [B, m, d] with d = 4, as wide as those of x, got [2, 1, 3]"
    )
    assert said(lambda: dots(jagged, torch.zeros(1, 1, 4))) == (
        "context: expected 2 samples, as many as x has, got 1; each sample has its own vectors"
    )
    for x in (torch.zeros(3), torch.zeros(2, 0, 4)):
        assert said(lambda x=x: FactorizationMachine()(x)) == (
            f"x: expected tokens [*, n, d] with n of 1 or more, got {list(x.shape)}; a row has n vectors"
        )
    for widths in ([], [2, 0]):
        assert said(lambda widths=widths: FeatureTokens(widths, 2)) == (
            f"widths: expected at least one, each 1 or more, got {widths}; leave out features of no width"
        )
    without = "expected 1 or more, got 0; without it nothing of a row is left"
    assert said(lambda: FeatureTokens([2], 0)) == f"token_dim: {without}"
    sizes = {"num_tokens": 4, "token_dim": 3, **WUKONG}
    for name in sizes:
        value: Any = [5, 0] if name == "hidden_sizes" else 0
        assert said(lambda given={**sizes, name: value}: WukongLayer(**given)) == f"{name}: {without}"
    assert said(lambda: Wukong(4, 3, 0, **WUKONG)) == f"num_layers: {without}"
    for x in (torch.zeros(2, 3, 3), torch.zeros(2, 4, 2), torch.zeros(4)):
        assert said(lambda x=x: Wukong(4, 3, **WUKONG)(x)) == (
            f"x: expected tokens [*, n, d] with n = 4 and d = 3, got {list(x.shape)}; FeatureTokens makes them of features of "
            "other widths"
        )
    for name in ("in_features", "out_features", "guide_features", "mask_features"):
        given = {"in_features": 4, "out_features": 2, "guide_features": 4, "mask_features": 8, name: 0}
        assert said(lambda given=given: MaskBlock(**given)) == f"{name}: {without}"
    for name in ("in_features", "out_features", "num_blocks", "mask_features"):
        given = {"in_features": 4, "out_features": 2, "num_blocks": 2, "mask_features": 8, name: 0}
        assert said(lambda given=given: MaskNet(**given)) == f"{name}: {without}"


@pytest.mark.parametrize(
    "options",
    [{}, {"rank": 3}, {"rank": 3, "num_experts": 2}, {"rank": 2, "num_experts": 1, "activation": "silu"}],
    ids=["whole", "low rank", "experts", "one expert"],
)
@pytest.mark.parametrize("lengths", [(3, 0, 2), (1,), (0, 0), (70, 1)], ids=str)
def test_crosses_of_samples_are_those_of_their_rows(place: Place, options: dict[str, Any], lengths: tuple[int, ...]) -> None:
    """Their values and all gradients, with nothing of a sample copied to its rows."""
    torch.manual_seed(0)
    net = CrossNet(9, 3, **options).double().to(place.device)
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    context, own = (
        torch.randn(shape, dtype=torch.float64, device=place.device, requires_grad=True)
        for shape in ((len(lengths), 4), (sum(lengths), 5))
    )
    offsets = torch.tensor([0, *lengths], device=place.device).cumsum(0)
    sample = torch.repeat_interleave(torch.tensor(lengths, device=place.device))
    found, expected = net(JaggedTensor(own, offsets=offsets), context), net(torch.cat([context[sample], own], 1))
    torch.testing.assert_close(found, expected)
    leaves = [context, own, *net.parameters()]
    for ours, theirs in zip(*(torch.autograd.grad(of.square().sum(), leaves) for of in (found, expected)), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_crosses_of_samples_keep_nothing_of_a_sample_for_its_rows(place: Place) -> None:
    """What backward keeps grows by the layers' own rows, and not by a copy of the wide context."""
    net, rows = CrossNet(520, 1).to(place.device), 400
    context, own = torch.randn(2, 512, device=place.device, requires_grad=True), torch.randn(rows, 8, device=place.device)
    offsets = torch.tensor([0, rows, rows], device=place.device)
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        net(JaggedTensor(own, offsets=offsets), context)
    # The layer's rows before they are multiplied, weights, and what is small.
    assert sum(kept.values()) < rows * 520 * 4 + 520 * 520 * 4 + 2 * 520 * 4 + 2 * rows * 8 * 4 + 10_000


@pytest.mark.parametrize("sizes", [(3, 2), (4, 3)], ids=["fewer tokens", "as many tokens"])
@pytest.mark.parametrize("lengths", [(3, 0, 2), (1,), (0, 0), (70, 1)], ids=str)
def test_tokens_of_samples_are_those_of_their_rows(place: Place, sizes: tuple[int, int], lengths: tuple[int, ...]) -> None:
    """Their values and all gradients, with nothing of a sample copied to its rows."""
    torch.manual_seed(0)
    net = Wukong(7, 4, 2, num_fm_tokens=sizes[0], num_linear_tokens=sizes[1], rank=2, hidden_sizes=(5,)).double()
    net = net.to(place.device)
    context, own = (
        torch.randn(shape, dtype=torch.float64, device=place.device, requires_grad=True)
        for shape in ((len(lengths), 4, 4), (sum(lengths), 3, 4))
    )
    offsets = torch.tensor([0, *lengths], device=place.device).cumsum(0)
    sample = torch.repeat_interleave(torch.tensor(lengths, device=place.device))
    found, expected = net(JaggedTensor(own, offsets=offsets), context), net(torch.cat([context[sample], own], 1))
    torch.testing.assert_close(found, expected)
    leaves = [context, own, *net.parameters()]
    for ours, theirs in zip(*(torch.autograd.grad(of.pow(3).sum(), leaves) for of in (found, expected)), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_contexts_of_crosses_that_do_not_fit(place: Place) -> None:
    net, rows = CrossNet(5, 1).to(place.device), torch.zeros(3, 4, device=place.device)
    jagged = JaggedTensor(rows, offsets=torch.tensor([0, 1, 3], device=place.device))
    calls: list[tuple[Any, Any, str]] = [
        (jagged, None, "context: expected [B, C] beside a JaggedTensor"),
        (rows, rows, "context: expected None without a JaggedTensor"),
        (jagged, rows[:2], "x: expected 5 features with the context's, got 4 and 4 of it"),
    ]
    for x, context, message in calls:
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            net(x, context)


class OfSamples(nn.Module):
    """A block of rows that begin with their sample's features."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, own: Tensor, offsets: Tensor, context: Tensor) -> Tensor:
        found: Tensor = self.block(JaggedTensor(own, offsets=offsets), context)
        return found


BLOCKS: dict[str, Any] = {
    "crosses": (lambda: CrossNet(9, 2), (4,), (5,)),
    "crosses of experts": (lambda: CrossNet(9, 2, rank=3, num_experts=2), (4,), (5,)),
    "tokens": (lambda: Wukong(7, 4, 2, num_fm_tokens=3, num_linear_tokens=2, rank=2, hidden_sizes=(5,)), (4, 4), (3, 4)),
}


@pytest.mark.parametrize("name", list(BLOCKS))
def test_blocks_of_samples_with_what_users_do(place: Place, name: str) -> None:
    """Compiled, exported, checkpointed, pickled, and under autocast."""
    build, of_context, of_own = BLOCKS[name]
    torch.manual_seed(0)
    net = OfSamples(build()).to(place.device)

    def given(*lengths: int) -> tuple[Tensor, Tensor, Tensor]:
        shapes = (sum(lengths), *of_own), (len(lengths), *of_context)
        own, context = (torch.randn(shape, device=place.device) for shape in shapes)
        return own, torch.tensor([0, *lengths], device=place.device).cumsum(0), context

    batches = [given(3, 0, 2), given(1, 8, 2, 2), given(4, 4, 1)]
    torch.compiler.reset()
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager", dynamic=True)
    dynamic = torch.export.Dim.DYNAMIC
    with trust_values(), torch.fx.experimental._config.patch(backed_size_oblivious=True):
        program = torch.export.export(net, batches[0], dynamic_shapes=({0: dynamic},) * 3, strict=False).module()
    again = pickle.loads(pickle.dumps(net))
    for own, offsets, context in batches:
        leaves = [own.requires_grad_(), context.requires_grad_(), *net.parameters()]
        expected = net(own, offsets, context)
        gradients = torch.autograd.grad(expected.square().sum(), leaves)
        with trust_values():
            results = [compiled(own, offsets, context), checkpoint(net, own, offsets, context, use_reentrant=False)]
        for found in results:
            torch.testing.assert_close(found, expected)
            for ours, theirs in zip(torch.autograd.grad(found.square().sum(), leaves), gradients, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(again(own, offsets, context), expected, rtol=0, atol=0)
        with trust_values():
            torch.testing.assert_close(program(own, offsets, context), expected)
        sample = torch.repeat_interleave(offsets.diff())
        with torch.autocast(place.device.type, torch.bfloat16):
            low, of_rows = net(own, offsets, context), net.block(torch.cat([context[sample], own], 1))
        assert low.dtype == of_rows.dtype
        # As far from float32 as the block on whole rows.
        error, allowed = ((of.float() - expected).abs().max() for of in (low, of_rows))
        assert error <= 3 * allowed
