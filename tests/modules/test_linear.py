"""Linear layers of the modules: PyTorch's, by our operator where nothing else was put in their place."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torchrec.sparse.jagged_tensor import JaggedTensor

from jagged.modules import JaggedCrossAttention, JaggedTransformerBlock, TargetAttention
from jagged.modules.linear import Layers, apply_layer
from tests.places import PLACE, Place
from tests.strategies import random_tensor

pytestmark = pytest.mark.skipif(PLACE.name == "interpret", reason="modules run on the place's own backend")


class Theirs(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return -super().forward(x)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The weights by which the operator was called."""
    weights: list[Tensor] = []
    # On a CPU, too.
    monkeypatch.setattr("jagged.modules.linear._is_run_on_gpu", lambda x: True)
    module: Any = __import__("jagged.modules.linear", fromlist=["linear"])
    operator = module.linear
    monkeypatch.setattr(module, "linear", lambda x, weight, bias: weights.append(weight) or operator(x, weight, bias))
    return weights


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7, 12), (0, 12), (3, 4, 12), (12,)])
def test_it_is_pytorchs(place: Place, served: list[Tensor], shape: tuple[int, ...], bias: bool) -> None:
    x, layer = random_tensor(shape, torch.float32, 5).requires_grad_(), nn.Linear(12, 5, bias, device=PLACE.device)
    results = []
    for output in (apply_layer(layer, x), layer(x)):
        results.append((output, *torch.autograd.grad(output.square().sum(), [x, *layer.parameters()])))
    torch.testing.assert_close(*results, atol=1e-4, rtol=1e-5)
    assert served == [layer.weight]


def test_what_is_no_plain_layer_is_called(place: Place, served: list[Tensor]) -> None:
    """Other classes, parametrised layers, and those that somebody watches."""
    x, called = random_tensor((3, 12), torch.float32, 5), []

    def note(module: nn.Module, *_: Any) -> None:
        called.append(module)

    plain = nn.Linear(12, 5, device=PLACE.device)
    normal = parametrizations.weight_norm(nn.Linear(12, 5, device=PLACE.device))
    for layer in (Theirs(12, 5, device=PLACE.device), normal, nn.GELU(), nn.Dropout(0.0)):
        assert torch.equal(apply_layer(layer, x), layer(x))
    for register in (plain.register_forward_hook, plain.register_forward_pre_hook):
        hook = register(note)
        apply_layer(plain, x)
        hook.remove()
    with nn.modules.module.register_module_forward_hook(note):
        apply_layer(plain, x)
    assert called == [plain] * 3
    assert served == []
    back = plain.register_full_backward_hook(lambda module, *_: called.append(module))
    apply_layer(plain, x.clone().requires_grad_()).sum().backward()
    back.remove()
    assert called == [plain] * 4
    apply_layer(plain, x)
    assert len(served) == 1


def test_a_changed_forward_is_called(place: Place, served: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one layer, as of adapters that put themselves around it, or of all; and a layer that is compiled by itself."""
    x, layer = random_tensor((3, 12), torch.float32, 5), nn.Linear(12, 5, device=PLACE.device)
    expected, forward = layer(x), layer.forward
    more = nn.Parameter(torch.ones(5, device=PLACE.device))
    layer.forward = lambda rows: forward(rows) + more  # type: ignore[method-assign]
    found = apply_layer(layer, x)
    assert torch.equal(found, expected + 1)
    (grad,) = torch.autograd.grad(found.sum(), more)
    assert torch.equal(grad, torch.full_like(more, 3.0))
    del layer.forward
    theirs = nn.Linear.forward
    with monkeypatch.context() as patch:
        patch.setattr(nn.Linear, "forward", lambda self, rows: -theirs(self, rows))
        assert torch.equal(apply_layer(layer, x), -expected)
    assert served == []
    assert torch.equal(apply_layer(layer, x), expected)
    assert len(served) == 1
    layer.compile(backend="eager")
    apply_layer(layer, x)
    assert len(served) == 1


def test_programs_have_the_layers() -> None:
    """Traces, and what is exported: who quantises a program finds layers there by their class or name."""
    layers, x = Layers(nn.Linear(12, 5), nn.GELU(), nn.Linear(5, 3)), torch.ones(4, 12)
    traced = torch.fx.symbolic_trace(layers)
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["0", "1", "2"]
    for strict in (True, False):
        program = torch.export.export(layers, (x,), strict=strict)
        nodes = [node for node in program.graph.nodes if str(node.target) == "aten.linear.default"]
        found = [list(node.meta["nn_module_stack"].values())[-1] for node in nodes]
        assert found == [(name, "torch.nn.modules.linear.Linear") for name in ("0", "2")]


def test_layers_are_one_after_the_other(place: Place, served: list[Tensor]) -> None:
    layers = Layers(nn.Linear(12, 5), nn.GELU(), nn.Linear(5, 3)).to(PLACE.device)
    x = random_tensor((4, 12), torch.float32, 1)
    assert torch.equal(layers(x), nn.Sequential(*layers)(x))
    assert served == [layers[0].weight, layers[2].weight]
    assert layers.state_dict().keys() == nn.Sequential(*layers).state_dict().keys()


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "transformer": lambda: JaggedTransformerBlock(8, 2),
    "cross-attention": lambda: JaggedCrossAttention(8, 2),
    "target attention": lambda: TargetAttention(8, (6, 4)),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_apply_their_layers_so(place: Place, served: list[Tensor], name: str) -> None:
    """All but the first of target attention, whose weight is cut."""
    block, rows = BLOCKS[name]().to(PLACE.device), random_tensor((9, 8), torch.float32, 1)
    x = JaggedTensor(rows, offsets=torch.tensor([0, 4, 4, 9], device=PLACE.device))
    block(*{"cross-attention": (x, x), "target attention": (x, rows[:3])}.get(name, (x,)))
    layers = [of.weight for of in block.modules() if isinstance(of, nn.Linear)]
    assert all(type(of) is nn.Linear for of in block.modules() if isinstance(of, nn.Linear))
    expected = layers[1:] if name == "target attention" else layers
    assert sorted(map(id, served)) == sorted(map(id, expected))


@pytest.mark.skipif(PLACE.name != "cpu", reason="PyTorch quantises on a CPU")
def test_quantisation_finds_them() -> None:
    torch.manual_seed(0)
    block = JaggedTransformerBlock(8, 2)
    x = JaggedTensor(random_tensor((9, 8), torch.float32, 1), offsets=torch.tensor([0, 4, 4, 9]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        small = torch.ao.quantization.quantize_dynamic(block, {nn.Linear}, dtype=torch.qint8)
        found, expected = small(x).values(), block(x).values()
    exchanged = [of for of in small.modules() if isinstance(of, torch.ao.nn.quantized.dynamic.Linear)]
    assert len(exchanged) == 4
    assert 0 < (found - expected).abs().max() < 0.1


def test_on_a_cpu_layers_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jagged.modules.linear.linear", lambda *_: pytest.fail("not on a CPU"))
    layer, x = nn.Linear(12, 5), torch.ones(4, 12)
    assert torch.equal(apply_layer(layer, x), layer(x))


@pytest.mark.gpu
def test_many_rows_are_our_operators(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    x, layer = random_tensor((9, 12), torch.float32, 5).requires_grad_(), nn.Linear(12, 5, device=PLACE.device)
    assert "linear" not in apply_layer(layer, x).grad_fn.name()  # type: ignore[union-attr]
    monkeypatch.setattr("jagged.ops._shared.linear.LEAST_ROWS", 9)
    assert "linear" in apply_layer(layer, x).grad_fn.name()  # type: ignore[union-attr]
