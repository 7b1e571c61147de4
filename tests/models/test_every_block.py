"""What every block of a ranking model has to stand: traces, compilation, export, 16 bits, copies, empty batches."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchrec.fx import Tracer

from jagged.models import PLE, EPNet, GateUnit, GroupedLinear, GroupedMLP, MMoE, PPNet, experts
from jagged.modules import JaggedModule
from tests.places import PLACE

pytestmark = [
    pytest.mark.skipif(PLACE.name == "interpret", reason="models run on the place's own backend"),
    # Marks what runs on a GPU, too.
    pytest.mark.usefixtures("place"),
]

WIDTH = 8


@dataclass(frozen=True)
class Case:
    """How a block is built, and the shapes of a row of its inputs."""

    build: Callable[[], nn.Module]
    shapes: tuple[tuple[int, ...], ...] = ((WIDTH,),)


CASES = {
    "grouped linear": Case(lambda: GroupedLinear(WIDTH, 5, 3)),
    "grouped linear of rows of their own": Case(lambda: GroupedLinear(WIDTH, 5, 3, bias=False), ((3, WIDTH),)),
    "grouped mlp": Case(lambda: GroupedMLP(WIDTH, [6, 5], 3, dropout=0.3)),
    "grouped mlp of rows of their own": Case(lambda: GroupedMLP(WIDTH, [6, 5], 3), ((3, WIDTH),)),
    "mmoe": Case(lambda: MMoE(WIDTH, [6, 5], 3, 2, dropout=0.3)),
    "mmoe with a gate": Case(lambda: MMoE(WIDTH, [6], 3, 2, gate_features=4), ((WIDTH,), (4,))),
    "ple": Case(lambda: PLE(WIDTH, [6, 5], 2, num_specific=2, num_shared=3, dropout=0.3)),
    "gate": Case(lambda: GateUnit(WIDTH, 5)),
    "epnet": Case(lambda: EPNet(WIDTH, 4), ((WIDTH,), (4,))),
    "ppnet": Case(lambda: PPNet(WIDTH, [6, 1], 3, 4, dropout=0.3), ((WIDTH,), (4,))),
}

every_block = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


class Model(nn.Module):
    """A block in a list, as stacked ones are."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.parts = nn.ModuleList([case.build()])

    def forward(self, first: Tensor, *others: Tensor) -> Tensor:
        for part in self.parts:
            found: Tensor = part(first, *others)
        return found


class OfOne(Model):
    """Of a trace, which takes no number of arguments."""

    def forward(self, first: Tensor) -> Tensor:
        return super().forward(first)


class OfTwo(Model):
    """The same of two inputs."""

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return super().forward(first, second)


def model_of(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return (OfOne if len(case.shapes) == 1 else OfTwo)(case).to(PLACE.device)


def inputs(case: Case, count: int = 7, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(count, *shape, generator=generator).to(PLACE.device, dtype).requires_grad_() for shape in case.shapes]


def computed(model: Callable[..., Tensor], given: list[Tensor], leaves: list[Tensor]) -> list[Tensor]:
    """The result, and the gradients of all leaves."""
    torch.manual_seed(1)
    found = model(*given)
    grads = torch.autograd.grad(found.float().square().sum(), leaves, allow_unused=True)
    return [found.detach(), *(torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, grads, strict=True))]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert all(one.dtype == other.dtype and torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_no_block_is_left_out() -> None:
    built = {type(module) for case in CASES.values() for module in case.build().modules()}
    every = {value for of in (experts,) for value in vars(of).values() if isinstance(value, type)}
    assert {value for value in every if issubclass(value, JaggedModule)} - {JaggedModule} <= built


@every_block
@pytest.mark.parametrize("trace", [torch.fx.symbolic_trace, lambda model: torch.fx.GraphModule(model, Tracer().trace(model))])
def test_is_a_leaf_of_every_trace(case: Case, trace: Callable[[nn.Module], torch.fx.GraphModule]) -> None:
    model = model_of(case).eval()
    traced = trace(model)
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["parts.0"]
    assert torch.equal(traced(*inputs(case)), model(*inputs(case)))


@every_block
def test_compiles_as_one_graph_for_any_number_of_rows(case: Case) -> None:
    model = model_of(case).eval()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for count in (7, 5, 12):
        given = inputs(case, count)
        leaves = [*model.parameters(), *given]
        for one, other in zip(computed(compiled, given, leaves), computed(model, given, leaves), strict=True):
            torch.testing.assert_close(one, other)


@every_block
def test_is_exported_for_any_number_of_rows(case: Case) -> None:
    model = model_of(case).eval()
    rows = torch.export.Dim("rows", min=0)
    given = tuple(x.detach() for x in inputs(case))
    exported = torch.export.export(model, given, dynamic_shapes=[{0: rows} for _ in given]).module()
    for count in (7, 1, 3, 0):
        again = [x.detach() for x in inputs(case, count)]
        torch.testing.assert_close(exported(*again), model(*again))


@every_block
@pytest.mark.parametrize("count", [0, 7])
def test_autocast_keeps_the_dtypes_of_gradients(case: Case, count: int) -> None:
    """Float32 weights learn in float32, and what comes out is near what float32 gives."""
    model, given = model_of(case).eval(), inputs(case, count)
    leaves = [*model.parameters(), *given]
    with torch.autocast(PLACE.device.type, torch.bfloat16):
        found = model(*given)
    assert found.shape[0] == count
    torch.testing.assert_close(found.float(), model(*given), rtol=0.1, atol=0.1)
    assert {x.dtype for x in torch.autograd.grad(found.float().sum(), leaves, allow_unused=True) if x is not None} == {
        torch.float32
    }


@every_block
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_keeps_the_dtype_of_its_weights(case: Case, dtype: torch.dtype) -> None:
    assert model_of(case).to(dtype)(*inputs(case, dtype=dtype)).dtype == dtype


@every_block
def test_rows_do_not_know_each_other(case: Case) -> None:
    model = model_of(case).eval().double()
    given = [x.detach() for x in inputs(case, dtype=torch.float64)]
    found = model(*given)
    torch.testing.assert_close(torch.cat([model(*(x[:3] for x in given)), model(*(x[3:] for x in given))]), found)
    assert found.unbind(0)[0].isfinite().all()


@every_block
def test_copies_and_files_compute_the_same(case: Case) -> None:
    model, given = model_of(case), inputs(case)
    expected = computed(model, given, [*model.parameters(), *given])
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for again in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert_same(computed(again, given, [*again.parameters(), *given]), expected)


@every_block
def test_a_module_on_the_meta_device_is_drawn_anew(case: Case) -> None:
    with torch.device("meta"):
        model = case.build()
    assert all(parameter.is_meta for parameter in model.parameters())
    made: Any = model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.fill_(torch.nan)
    torch.manual_seed(0)
    made.reset_parameters()
    torch.manual_seed(0)
    fresh: Any = case.build()
    fresh.reset_parameters()
    assert all(parameter.isfinite().all() for parameter in made.parameters())
    made.load_state_dict(fresh.state_dict())


@every_block
def test_checkpointing_computes_the_same_again(case: Case) -> None:
    model, given = model_of(case), inputs(case)
    leaves = [*model.parameters(), *given]
    again = computed(lambda *rows: checkpoint(model, *rows, use_reentrant=False), given, leaves)
    assert_same(again, computed(model, given, leaves))


# Differences of numbers do not stop where a gradient is stopped.
@pytest.mark.parametrize("name", [name for name in CASES if name not in ("epnet", "ppnet")])
def test_gradients_of_gradients(name: str) -> None:
    case = CASES[name]
    model, given = model_of(case).eval().double(), inputs(case, 3, torch.float64)
    # An activation without corners, for differences of numbers.
    for module in model.modules():
        if hasattr(module, "activation"):
            module.activation = "gelu"
        for name, child in module.named_children():
            if isinstance(child, nn.ReLU):
                setattr(module, name, nn.GELU())
    assert torch.autograd.gradgradcheck(model, given)
