"""The linear layer of the modules, in place of PyTorch's."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from jagged.modules import HSTUBlock, JaggedCrossAttention, JaggedTransformerBlock, Linear, TargetAttention
from tests.places import PLACE, Place
from tests.strategies import random_tensor

pytestmark = pytest.mark.skipif(PLACE.name == "interpret", reason="modules run on the place's own backend")


def pair(bias: bool = True) -> tuple[Linear, nn.Linear]:
    """Ours, and PyTorch's with its parameters."""
    ours, theirs = Linear(12, 5, bias, device=PLACE.device), nn.Linear(12, 5, bias, device=PLACE.device)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7, 12), (0, 12), (3, 4, 12), (12,)])
def test_it_is_pytorchs(place: Place, shape: tuple[int, ...], bias: bool) -> None:
    x = random_tensor(shape, torch.float32, 5).requires_grad_()
    results = []
    for of in pair(bias):
        assert isinstance(of, nn.Linear)
        output = of(x)
        results.append((output, *torch.autograd.grad(output.square().sum(), [x, *of.parameters()])))
    torch.testing.assert_close(*results, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("rows_dtype", [torch.float32, torch.bfloat16])
def test_under_autocast(place: Place, rows_dtype: torch.dtype) -> None:
    x, results = random_tensor((9, 12), torch.float32, 5).to(rows_dtype).requires_grad_(), []
    for of in pair():
        with torch.autocast(PLACE.device.type, torch.bfloat16):
            output = of(x)
        results.append((output, *torch.autograd.grad(output.float().square().sum(), [x, *of.parameters()])))
    torch.testing.assert_close(*results, atol=2e-2, rtol=1e-2)


def test_it_is_shown_kept_and_drawn_as_pytorchs(place: Place) -> None:
    assert repr(Linear(12, 5, False, device="meta")) == "Linear(in_features=12, out_features=5, bias=False)"
    ours = Linear(12, 5, device="meta", dtype=torch.bfloat16)
    assert ours(torch.ones(2, 12, device="meta", dtype=torch.bfloat16)).shape == (2, 5)
    ours = Linear(12, 5, device="meta").to_empty(device=PLACE.device)
    drawn = []
    for of in (ours, nn.Linear(12, 5, device=PLACE.device)):
        torch.manual_seed(3)
        of.reset_parameters()
        drawn.append(of.state_dict())
    assert drawn[0].keys() == drawn[1].keys()
    assert all(torch.equal(*of) for of in zip(drawn[0].values(), drawn[1].values(), strict=True))
    x = random_tensor((3, 12), torch.float32, 1)
    for again in (pickle.loads(pickle.dumps(ours)), copy.deepcopy(ours)):
        assert torch.equal(again(x), ours(x))


def test_a_trace_records_it_as_one_call(place: Place) -> None:
    model = nn.Sequential(Linear(12, 5, device=PLACE.device), nn.GELU())
    traced = torch.fx.symbolic_trace(model)
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["0", "1"]
    x = random_tensor((3, 12), torch.float32, 1)
    assert torch.equal(traced(x), model(x))


REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (
        lambda: Linear(4, 3, device=PLACE.device)(torch.arange(8, device=PLACE.device).view(2, 4)),
        TypeError,
        "x: expected dtype float32, bfloat16, float16, float64, got int64; convert it with .to(...)",
    ),
    (
        lambda: Linear(4, 3, device=PLACE.device)(torch.ones(2, 5, device=PLACE.device)),
        ValueError,
        "weight: expected shape [out, 5], as x [2, 5] has columns, got [3, 4]",
    ),
    (
        lambda: Linear(4, 3)(JaggedTensor(torch.ones(2, 4), lengths=torch.tensor([2]))),
        TypeError,
        "x: expected a tensor [*, in], got a JaggedTensor; pass its .values()",
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), REFUSED, ids=[of[2] for of in REFUSED])
def test_what_is_refused(call: Callable[[], Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as refused:
        call()
    assert str(refused.value) == message


@pytest.mark.parametrize(
    "block",
    [
        lambda: JaggedTransformerBlock(8, 2),
        lambda: HSTUBlock(8, 2),
        lambda: JaggedCrossAttention(8, 2),
        lambda: TargetAttention(8, (6, 4)),
    ],
    ids=["transformer", "hstu", "cross-attention", "target attention"],
)
def test_blocks_of_rows_are_made_of_it(block: Callable[[], nn.Module]) -> None:
    layers = [of for of in block().modules() if isinstance(of, nn.Linear)]
    assert layers
    assert all(isinstance(of, Linear) for of in layers)
