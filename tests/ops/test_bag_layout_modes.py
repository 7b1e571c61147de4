"""What a layout of bags keeps when a compiler or a tracer is the first to ask for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from jagged.ops import BagLayout, embedding_bags
from tests.places import PLACE, Place


def counted(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def run(weights: Tensor) -> Tensor:
        with FlopCounterMode(display=False):
            return function(weights)

    return run


def inferred(function: Callable[[Tensor], Tensor], weights: Tensor) -> Tensor:
    with torch.inference_mode():
        return function(weights)


WAYS: dict[str, Callable[..., Any]] = {
    "compiled": lambda function, weights: torch.compile(function, backend="aot_eager", fullgraph=True)(weights),
    "traced": lambda function, weights: make_fx(function)(weights)(weights),
    "vmap": lambda function, weights: torch.vmap(function)(weights[None])[0],
    "counted": lambda function, weights: counted(function)(weights),
    "inferred": inferred,
}


@pytest.mark.skipif(PLACE.name == "interpret", reason="what is shown here lies before the kernels")
# PyTorch's, of an operator that it calls for each of a batch.
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_eager_calls_afterwards_are_as_without(place: Place, way: Callable[..., Any]) -> None:
    layout, fresh = (BagLayout((5, 3), (4, 4), means=(False, True)) for _ in range(2))
    weights = torch.randn(layout.num_elements, generator=torch.Generator().manual_seed(0)).to(place.device)
    indices, offsets = (torch.tensor(x, device=place.device) for x in ([4, 0, 1, 2, 2], [0, 2, 3, 3, 5]))

    def run(weights: Tensor) -> Tensor:
        return embedding_bags(weights, layout, indices, offsets)

    expected = embedding_bags(weights, fresh, indices, offsets)
    assert torch.equal(way(run, weights), expected)
    found = run(weights)
    assert type(found) is Tensor
    assert torch.equal(found, expected)
    # And they train: what the layout keeps may be saved for a backward pass.
    gradients = []
    for of in (layout, fresh):
        leaf = weights.clone().requires_grad_()
        embedding_bags(leaf, of, indices, offsets).square().sum().backward()
        gradients.append(leaf.grad)
    assert gradients[0] is not None
    assert gradients[1] is not None
    assert torch.equal(*gradients)
