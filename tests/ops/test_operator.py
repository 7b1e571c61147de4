"""What a declaration promises: of small operators that use all it can say, and of every operator of the package."""

from __future__ import annotations

import importlib
import inspect
import re
import typing
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import jagged.ops  # noqa: F401  (declares the operators)
from jagged.ops._shared.operator import OPERATORS, Differentiable, OnHost, operator
from tests.ops import operator_examples as examples
from tests.ops.operator_examples import (
    CUT,
    JOIN,
    LOOKUP,
    SCALE,
    SEGMENT_SUM,
    UPDATE,
    Factor,
    FactorOptions,
    Inputs,
    Lookup,
    NoOptions,
    Options,
    Parts,
    Sizes,
    Update,
    Whole,
)

OFFSETS = torch.tensor([0, 2, 2, 5])
PACKAGE = sorted(name for name in OPERATORS if not name.startswith("example_"))


def _values(seed: int = 0, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*(shape or (5, 3)), generator=generator, dtype=dtype).requires_grad_()


def _segment_sum(values: Tensor, weights: Tensor | None = None, **options: Any) -> Tensor:
    return SEGMENT_SUM(Inputs(values, OFFSETS, weights), Options(**options)).sums


@pytest.mark.parametrize("way", ["eager", "dispatched"])
def test_gradients_are_right_both_ways(way: str) -> None:
    values, weights = _values(), _values(1, 5)

    def check() -> None:
        assert torch.autograd.gradcheck(lambda v, w: _segment_sum(v, w, scale=2.0, mean=True), (values, weights))
        assert torch.autograd.gradcheck(lambda v: _segment_sum(v, weights.detach()), (values,))
        assert torch.autograd.gradcheck(lambda w: _segment_sum(values.detach(), w), (weights,))
        parts = _values(2, 2, 3), _values(3, 4, 3), _values(4, 3)
        assert torch.autograd.gradcheck(
            lambda f: JOIN(Parts((parts[0].detach(), parts[1].detach()), f), NoOptions()).joined, parts[2]
        )
        assert torch.autograd.gradcheck(lambda b: JOIN(Parts((parts[0].detach(), b), parts[2]), NoOptions()).joined, parts[1])
        assert torch.autograd.gradcheck(lambda a, b, f: JOIN(Parts((a, b), f), NoOptions()).joined, parts)
        assert torch.autograd.gradgradcheck(lambda a, b, f: JOIN(Parts((a, b), f), NoOptions()).joined, parts)
        for pieces in (slice(None), slice(1)):
            cut = lambda v, f, pieces=pieces: CUT(Whole(v, f), Sizes((1, 3), 0.5)).pieces[pieces]  # noqa: E731
            assert torch.autograd.gradcheck(cut, parts[1:])
            assert torch.autograd.gradgradcheck(cut, parts[1:])

    if way == "eager":
        check()
    else:
        # A mode makes the call go through the dispatcher.
        with torch.utils._python_dispatch._disable_current_modes(), torch.autograd.profiler.profile():
            check()


def test_an_eager_call_leaves_the_dispatcher_out_and_a_mode_sees_the_operator() -> None:
    seen: list[str] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    values = _values()
    with Watch():
        _segment_sum(values).sum().backward()
    assert [name for name in seen if "example" in name] == [
        "jagged.example_segment_sum.default",
        "jagged.example_segment_sum_backward.default",
    ]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        _segment_sum(values)
    assert "jagged::example_segment_sum" in {event.name for event in profile.events()}


def test_opcheck() -> None:
    values, weights = _values().detach(), _values(1, 5).detach()
    for arguments in (
        (values, OFFSETS, None, None, 2.0, True, [1], None, "torch"),
        (values, OFFSETS, weights, values[0], 1.0, False, [], 3, "torch"),
    ):
        torch.library.opcheck(SEGMENT_SUM.dispatched, arguments)
    torch.library.opcheck(JOIN.dispatched, ([values, values], values[0], "torch"))
    torch.library.opcheck(CUT.dispatched, (values, values[0], [2, 3], 0.5, "torch"))
    torch.library.opcheck(UPDATE.dispatched, (values.clone(), torch.tensor([1, 1]), values[:2], 1.0, False, [], None, "torch"))
    torch.library.opcheck(LOOKUP.dispatched, (values, torch.tensor([1, 1]), "torch"))


def test_compiled_and_exported() -> None:
    values, weights = _values(), _values(1, 5)

    def twice(v: Tensor, w: Tensor) -> Tensor:
        # One tensor twice among the arguments, a call without a gradient, and one that follows another.
        same = SEGMENT_SUM(Inputs(w[:, None], OFFSETS, w), Options()).sums
        with torch.no_grad():
            plain = _segment_sum(v)
        first, rest = CUT(Whole(v, v[0]), Sizes((1, 4))).pieces
        return same + plain + _segment_sum(v, w, mean=True) + JOIN(Parts((v, rest), v[0]), NoOptions()).joined.sum() + first

    compiled = torch.compile(twice, fullgraph=True, backend="aot_eager")
    got, expected = compiled(values, weights), twice(values, weights)
    torch.testing.assert_close(got, expected)
    for ours, theirs in zip(*(torch.autograd.grad(x.sum(), (values, weights)) for x in (got, expected)), strict=True):
        torch.testing.assert_close(ours, theirs)

    class Net(torch.nn.Module):
        def forward(self, values: Tensor, offsets: Tensor) -> Tensor:
            return SEGMENT_SUM(Inputs(values, offsets, None), Options(mean=True)).sums

    dynamic = torch.export.Dim.DYNAMIC
    for strict in (False, True):
        program = torch.export.export(Net(), (values, OFFSETS), dynamic_shapes=({0: dynamic}, {0: dynamic}), strict=strict)
        result = program.module()(torch.ones(4, 3, dtype=torch.float64), torch.tensor([0, 1, 4]))
        torch.testing.assert_close(result, torch.ones(2, 3, dtype=torch.float64))


def test_functional_transforms() -> None:
    values = _values().detach()
    got = torch.func.grad(lambda v: _segment_sum(v, mean=True).square().sum())(values)
    leaf = values.clone().requires_grad_()
    torch.testing.assert_close(got, torch.autograd.grad(_segment_sum(leaf, mean=True).square().sum(), leaf)[0])
    second = torch.func.grad(lambda v: torch.func.grad(lambda w: JOIN(Parts((w, w), w[0]), NoOptions()).joined.sum())(v).sum())
    assert second(values).shape == values.shape


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_vmap_runs_the_operator_for_one_after_the_other() -> None:
    several, constant = _values(0, 2, 5, 3).detach(), _values(1).detach()

    def gradient(values: Tensor) -> Tensor:
        return torch.func.grad(lambda v: _segment_sum(v, mean=True).square().sum())(values)

    def joined(values: Tensor) -> Tensor:
        return JOIN(Parts((values, constant, values), values[0]), NoOptions()).joined

    for function in (_segment_sum, gradient, joined, torch.func.grad(lambda values: joined(values).square().sum())):
        torch.testing.assert_close(torch.vmap(function)(several), torch.stack([function(values) for values in several]))
    # What requires a gradient gets it through the transform.
    leaves = [several.clone().requires_grad_() for _ in range(2)]
    results = torch.vmap(_segment_sum)(leaves[0]), torch.stack([_segment_sum(values) for values in leaves[1]])
    grads = [torch.autograd.grad(out.square().sum(), leaf)[0] for out, leaf in zip(results, leaves, strict=True)]
    torch.testing.assert_close(*grads)


def test_a_forward_derivative_is_refused_by_name() -> None:
    """It would be silently zero, where kernels compute."""
    values, tangent = _values().detach(), torch.ones(5, 3, dtype=torch.float64)
    expected = "example_mean has no forward-mode derivative; take one by backward, as torch.func.vjp does"
    with pytest.raises(RuntimeError, match=f"^{re.escape(expected)}$"):
        torch.func.jvp(lambda v: _segment_sum(v, mean=True), (values,), (tangent,))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(values, tangent)
        for given in (dual, dual.clone().requires_grad_()):
            with pytest.raises(RuntimeError, match=f"^{re.escape(expected)}$"):
                _segment_sum(given, mean=True)
        assert torch.equal(_segment_sum(values), _segment_sum(values.clone()))


def test_autocast_casts_inside_and_gradients_come_back_in_the_inputs_dtypes() -> None:
    values = _values(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = SEGMENT_SUM(Inputs(values, OFFSETS, None), Options())
    exact = SEGMENT_SUM(Inputs(values.detach().bfloat16(), OFFSETS, None), Options())
    # The counts, a product inside of the implementation, are in the dtype that the inputs are cast to, and no other.
    assert (got.sums.dtype, got.counts.dtype) == (torch.bfloat16, torch.bfloat16)
    assert torch.equal(got.sums, exact.sums)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got.sums.sum().backward()
    assert values.grad is not None
    assert values.grad.dtype == torch.float32
    # Which inputs are cast may follow the options.
    with torch.autocast("cpu", dtype=torch.bfloat16):
        uncast = SEGMENT_SUM(Inputs(values, OFFSETS, None), Options(limit=1)).sums
        compiled = torch.compile(lambda v: SEGMENT_SUM(Inputs(v, OFFSETS, None), Options(limit=1)).sums, backend="eager")(values)
    assert (uncast.dtype, compiled.dtype) == (torch.float32, torch.float32)
    # An operator that is not cast keeps float32 for all that it does.
    parts = _values(2, 2, 3, dtype=torch.float32), _values(3, 4, 3, dtype=torch.float32), _values(4, 3, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        joined = JOIN(Parts(parts[:2], parts[2]), NoOptions()).joined
        grads = torch.autograd.grad(joined.sum(), parts)
    assert joined.dtype == torch.float32
    assert [grad.dtype for grad in grads] == [torch.float32] * 3


def test_numbers_stay_whole() -> None:
    odd, ones = 2**62 + 1, torch.ones(2, dtype=torch.int64)
    x, o = Whole(torch.zeros(3, 2, dtype=torch.int64), ones), Sizes((1, 2), odd)
    for pieces in (CUT(x, o).pieces, CUT.dispatched(*x, *o, "torch")):
        assert [piece.tolist() for piece in pieces] == [[[odd] * 2], [[odd] * 2] * 2]


@pytest.mark.parametrize("wide", [torch.float32, torch.float16, torch.float64])
def test_autocast_promotes_and_a_second_derivative_sees_it(wide: torch.dtype) -> None:
    values, factor = _values(2, 4, 3, dtype=torch.bfloat16), _values(3, 3, dtype=wide)

    def second(run: Any) -> list[Tensor]:
        output = run(values, factor)
        grads = torch.autograd.grad(output.square().sum(), (values, factor), create_graph=True)
        assert [grad.dtype for grad in grads] == [torch.bfloat16, wide]
        return [output, *grads, *torch.autograd.grad(sum(grad.double().square().sum() for grad in grads), (values, factor))]

    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = second(lambda v, f: CUT(Whole(v, f), Sizes((4,))).pieces[0])
        assert got[0].dtype == torch.promote_types(torch.bfloat16, wide)
    torch.testing.assert_close(got, second(lambda v, f: v * f))


def test_a_backward_operator_gives_the_dtypes_that_it_promises() -> None:
    """A backward that leaves a gradient in the dtype of its products: generated code reads memory as what was promised."""
    values, offsets, weights = torch.ones(3, 2), torch.tensor([0, 1, 3]), torch.ones(3)
    grad, counts = torch.ones(2, 2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16)
    backward = SEGMENT_SUM.rules.dispatched_backward
    assert backward is not None
    given = grad, None, values.bfloat16(), offsets, weights.bfloat16(), None, None, counts, 1.0, False, (), None
    real = backward(*given, torch.float32, torch.float32, "torch")
    with FakeTensorMode() as mode:
        promised = backward(
            *(mode.from_tensor(one) if isinstance(one, torch.Tensor) else one for one in given),
            torch.float32, torch.float32, "torch",
        )  # fmt: skip
    assert [one.dtype for one in real] == [one.dtype for one in promised] == [torch.float32] * 2


def test_a_second_derivative_is_refused_by_name() -> None:
    values = _values()
    (grad,) = torch.autograd.grad(_segment_sum(values, mean=True).square().sum(), values, create_graph=True)
    expected = "example_mean has no second derivative; for one, use torch's own operations on padded tensors"
    with pytest.raises(RuntimeError, match=f"^{re.escape(expected)}$"):
        grad.sum().backward()
    # Autocast's copies, which the gradient reads, have no graph of their own.
    weights = _values(1, 5, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = _segment_sum(_values(dtype=torch.float32), weights, mean=True).sum()
    (grad,) = torch.autograd.grad(loss, weights, create_graph=True)
    with pytest.raises(RuntimeError, match=f"^{re.escape(expected)}$"):
        (grad.sum() + loss).backward()


def test_checkpointing_and_what_is_kept() -> None:
    values = _values()
    (expected,) = torch.autograd.grad(_segment_sum(values).square().sum(), values)
    (got,) = torch.autograd.grad(checkpoint(_segment_sum, values, use_reentrant=False).square().sum(), values)
    assert torch.equal(got, expected)
    # A change in place of what the gradient reads is seen.
    weights = _values(1, 5).detach()
    output = _segment_sum(values, weights)
    weights.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_a_gradient_that_is_no_tensor_of_the_inputs_shape() -> None:
    table = _values()
    LOOKUP(Lookup(table, torch.tensor([4, 1, 4])), NoOptions()).rows.sum().backward()
    assert table.grad is not None
    assert table.grad.is_sparse
    assert torch.equal(table.grad.to_dense()[:, 0], torch.tensor([0.0, 1, 0, 0, 2], dtype=torch.float64))


def test_an_operator_that_mutates() -> None:
    table = torch.zeros(3, 2)
    assert UPDATE(Update(table, torch.tensor([1, 1]), torch.ones(2, 2)), Options(scale=0.5)) == ()
    assert torch.equal(table[:, 0], torch.tensor([0.0, 1, 0]))


def test_an_input_without_a_gradient_makes_no_graph() -> None:
    constant = _values(1, 3)
    output = SEGMENT_SUM(Inputs(_values().detach(), OFFSETS, None, constant), Options()).sums
    assert not output.requires_grad
    values = _values()
    SEGMENT_SUM(Inputs(values, OFFSETS, None, constant), Options()).sums.sum().backward()
    assert constant.grad is None


def test_devices_are_compared_by_name() -> None:
    expected = "weights: expected the device of values, cpu, got meta; move it with .to(...)"
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        SEGMENT_SUM(Inputs(_values(), OFFSETS, torch.ones(5, device="meta")), Options())


def test_a_tensor_may_stay_on_the_host() -> None:
    values, factor = torch.empty(5, 3, device="meta", requires_grad=True), torch.tensor(2.0)
    output = SCALE(Factor(values, factor), FactorOptions()).scaled
    assert (output.shape, output.device.type) == ((5, 3), "meta")

    class Before(typing.NamedTuple):
        factor: OnHost
        values: Tensor

    expected = "example_wrong: expected inputs that stay on the host behind all others"
    with pytest.raises(TypeError, match=f"^{expected}$"):
        operator("example_wrong", Before, NoOptions, examples.Scaled, shapes=lambda x, o: o, torch="m:f", triton="m:f")


@pytest.mark.parametrize("is_checked", [True, False])
def test_options_say_what_may_have_changed(is_checked: bool) -> None:
    values, factor = _values(), torch.tensor(2.0, dtype=torch.float64)
    output = SCALE(Factor(values, factor), FactorOptions(is_checked)).scaled
    factor.add_(1)
    if is_checked:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()
    else:
        assert torch.equal(torch.autograd.grad(output.sum(), values)[0], torch.full_like(values, 3.0))


def test_meta_tensors_give_shapes() -> None:
    values = torch.empty(5, 3, device="meta", requires_grad=True)
    output = SEGMENT_SUM(Inputs(values, OFFSETS.to("meta"), None), Options()).sums
    assert (output.shape, output.device.type) == ((3, 3), "meta")
    assert torch.autograd.grad(output.sum(), values)[0].shape == (5, 3)


@pytest.mark.parametrize("change", ["type", "names", "option", "half", "pieces"])
def test_a_declaration_that_cannot_be_is_refused(change: str) -> None:
    class Wrong(typing.NamedTuple):
        values: Differentiable
        other: dict  # type: ignore[type-arg]

    class Same(typing.NamedTuple):
        values: Tensor

    class Joined(typing.NamedTuple):
        joined: bool

    cases: dict[str, tuple[Any, Any, Any, str, str]] = {
        "type": (Wrong, NoOptions, examples.Joined, "m:f", "m:f"),
        "names": (Same, NoOptions, Same, "m:f", "m:f"),
        "option": (Parts, Joined, examples.Joined, "m:f", "m:f"),
        "half": (Parts, NoOptions, examples.Joined, "m:f,b", "m:f"),
        "pieces": (Parts, NoOptions, examples.Pieces, "m:f", "m:f"),
    }
    inputs, options, outputs, of_torch, of_triton = cases[change]
    with pytest.raises(TypeError):
        operator("example_wrong", inputs, options, outputs, shapes=lambda x, o: o, torch=of_torch, triton=of_triton)


@pytest.mark.parametrize("name", PACKAGE)
def test_implementations_have_the_signatures_of_their_declarations(name: str) -> None:
    made = OPERATORS[name]
    rules = made.rules
    for path in made.implementations:
        module, _, functions = path.partition(":")
        forward, _, backward = functions.partition(",")
        loaded = importlib.import_module(module)
        found = inspect.signature(getattr(loaded, forward))
        assert list(found.parameters) == ["x", "o"], path
        hints = typing.get_type_hints(getattr(loaded, forward))
        assert hints == {"x": rules.inputs, "o": rules.options, "return": rules.outputs}, path
        if backward:
            assert list(inspect.signature(getattr(loaded, backward)).parameters) == ["grads", "x", "out", "o", "wanted"], path
            hints = typing.get_type_hints(getattr(loaded, backward))
            assert {key: hints[key] for key in ("grads", "x", "out", "o")} == {
                "grads": rules.outputs,
                "x": rules.inputs,
                "out": rules.outputs,
                "o": rules.options,
            }, path
