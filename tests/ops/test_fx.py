"""Public functions in models that `torch.fx` traces: each call is one node."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch
import torchrec.fx
from torch import Tensor, nn

from jagged import ops

# What takes no tensors, what checks or changes them, and what makes an ordinary tensor of a container or of random numbers.
NOT_RECORDED = {
    "claim_rows",
    "decomposed",
    "drawn_negatives",
    "exchange_rows",
    "extend_pages",
    "from_nested",
    "linear_cross_entropy_strategy",
    "seat_rows",
    "trust_values",
    "validate_ids",
    "validate_offsets",
    "values_are_trusted",
}
RECORDED = [name for name in ops.__all__ if isinstance(getattr(ops, name), FunctionType) and name not in NOT_RECORDED]


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("name", RECORDED)
def test_a_call_is_one_node(name: str, by_name: bool) -> None:
    function = getattr(ops, name)
    parameters = inspect.signature(function).parameters.values()
    needed = [of.name for of in parameters if of.default is of.empty and of.kind is not of.VAR_KEYWORD]
    positional = [of.name for of in parameters if of.name in needed and of.kind is not of.KEYWORD_ONLY and not by_name]
    graph = torch.fx.Graph()
    tracer = torch.fx.Tracer()
    tracer.graph = graph
    proxies = {of: torch.fx.Proxy(graph.placeholder(of), tracer) for of in needed}
    function(*(proxies[of] for of in positional), **{of: proxies[of] for of in needed if of not in positional})
    assert [node.target for node in graph.nodes if node.op != "placeholder"] == [function]


class Model(nn.Module):
    """Calls functions by place and by name, with lists, results in several parts and numbers."""

    def forward(self, values: Tensor, offsets: Tensor, dense: Tensor) -> Tensor:
        joined, joined_offsets = ops.jagged_concat([ops.jagged_softmax(values, offsets), dense], [offsets, None])
        return ops.jagged_to_dense(values=joined, offsets=joined_offsets, length=3, padding_value=2.0)


@pytest.mark.parametrize(
    "trace", [torch.fx.symbolic_trace, lambda model: torch.fx.GraphModule(model, torchrec.fx.Tracer().trace(model))]
)
def test_a_traced_model_computes_the_same(trace: Callable[[nn.Module], torch.fx.GraphModule]) -> None:
    arguments: tuple[Any, ...] = torch.randn(5, 3), torch.tensor([0, 2, 2, 5]), torch.randn(3, 1, 3)
    traced = trace(Model())
    called = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    assert [of for of in called if of.__module__ == "jagged.ops"] == [ops.jagged_softmax, ops.jagged_concat, ops.jagged_to_dense]
    assert torch.equal(traced(*arguments), Model()(*arguments))


def test_signatures_and_words_stay() -> None:
    for name in RECORDED:
        function = getattr(ops, name)
        assert (function.__name__, function.__module__) == (name, "jagged.ops")
        assert function.__doc__ == inspect.unwrap(function).__doc__
        assert pickle.loads(pickle.dumps(function)) is function
