"""What every op family has to stand beside being right: autocast, checkpointing, transforms, another default dtype, copies."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from jagged import ops
from jagged.ops._shared.operator import Operator
from tests.ops import families
from tests.ops.families import FAMILIES, Step
from tests.places import PLACE, Place
from tests.strategies import jagged_of, random_tensor

LENGTHS = (3, 0, 20, 1)
DIFFERENTIABLE = [name for name in FAMILIES if name not in ("catalogue_topk", "quantised_bags", "host_rows", "pages")]
# The inputs of each operator that autocast casts, as the functions' docstrings say it.
CAST = {
    "attention": ("q", "k", "v"),
    "group_sparse_bce": ("features", "weight", "bias"),
    "group_sparse_cross_entropy": ("features", "weight", "bias"),
    "group_sparse_linear": ("features", "weight", "bias"),
    "grouped_linear": ("x", "weight", "bias"),
    "hstu_output": ("attended", "gate", "weight"),
    "hstu_projection": ("x", "weight"),
    "jagged_dense_bmm": ("values", "dense", "bias"),
    "jagged_jagged_bmm": ("a", "b"),
    "linear": ("x", "weight"),
    "linear_bce": ("features", "weight", "bias"),
    "linear_cross_entropy": ("hidden", "weight"),
    "mix_groups": ("groups", "weights"),
    "pair_scores": ("a", "b"),
    "pair_sums": ("scores", "values"),
    "sampled_linear_cross_entropy": ("hidden", "weight"),
}
KEEP_FLOAT32 = ("cross_entropy", "group_sparse", "group_sparse_softmax", "linear_bce", "sampled_cross_entropy")
ONCE = pytest.mark.skipif(PLACE.name == "interpret", reason="what is shown here lies before the kernels")


def step_of(family: str, dtype: torch.dtype = torch.float32) -> Step:
    return FAMILIES[family](jagged_of(LENGTHS), dtype, 20)


def total(outputs: Sequence[Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.stack([output.to(dtype).square().sum() for output in outputs if output.is_floating_point()]).sum()


def gradients(step: Step, forward: Callable[..., Sequence[Tensor]] | None = None) -> tuple[Tensor, ...]:
    return torch.autograd.grad(total((forward or step.forward)(*step.leaves)), step.leaves)


def cast_by_hand(place: Place, step: Step, *, exact: bool = False) -> Sequence[Tensor]:
    """Compute with casts written out, and autocast for PyTorch's own operators alone; `exact` has the cast numbers in float64."""
    call = Operator.__call__

    def cast(self: Operator[Any, Any, Any], x: Any, o: Any, backend: str | None = None) -> Any:
        def changed(name: str, given: Any) -> Any:
            if not isinstance(given, Tensor) or not given.is_floating_point():
                return given
            low = given.bfloat16() if name in CAST.get(self.name, ()) else given
            # Gradients pass as they are, where those of a cast are rounded.
            return given.double() + (low.double() - given.double()).detach() if exact else low

        if exact and "with_direction" in o._fields:
            # What kernels of shared draws leave to their backward, PyTorch's forward makes.
            o = o._replace(with_direction=True)
        x = x._replace(**{name: changed(name, given) for name, given in x._asdict().items()})
        with torch.autocast(place.device.type, enabled=False):
            return call(self, x, o, None if exact else backend)

    with pytest.MonkeyPatch.context() as patch, torch.autocast(place.device.type, dtype=torch.bfloat16):
        patch.setattr(Operator, "__call__", cast)
        if exact:
            # Of backward passes too, which are calls of their own.
            patch.setattr(families, "PLACE", dataclasses.replace(place, backend=None))
        return step.forward(*step.leaves)


@ONCE
@pytest.mark.parametrize("family", FAMILIES)
def test_autocast(place: Place, family: str) -> None:
    """Bit for bit what the documented casts give, but that gradients of float32 weights keep what a cast's would round away."""
    step = step_of(family)
    with torch.autocast(place.device.type, dtype=torch.bfloat16):
        outputs = step.forward(*step.leaves)
    expected = cast_by_hand(place, step)
    for ours, theirs in zip(outputs, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    if not step.is_differentiable:
        return
    found = [torch.autograd.grad(total(of), step.leaves) for of in (outputs, expected)]
    if family not in KEEP_FLOAT32:
        for ours, theirs in zip(*found, strict=True):
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours, theirs)
        return
    exact = torch.autograd.grad(total(cast_by_hand(place, step, exact=True), torch.float64), step.leaves)
    for ours, theirs, true in zip(*found, exact, strict=True):
        assert ours.dtype == torch.float32
        # The roundings inside of kernels are the same in both.
        assert (ours - true).norm() < (theirs - true).norm()


@ONCE
@pytest.mark.parametrize("family", FAMILIES)
def test_autocast_compiled(place: Place, family: str) -> None:
    """A compiled call and its gradients are those of an eager one, bit for bit, whatever is cast."""
    step = step_of(family)
    torch.compiler.reset()
    # `aot_eager` changes a copy of what an operator changes in place, and that of a pinned table is not pinned.
    compiler = "inductor" if family == "host_rows" else "aot_eager"
    compiled = torch.compile(lambda *leaves: list(step.forward(*leaves)), backend=compiler, fullgraph=True)
    # With its cache an eager call casts a leaf of several layers once, and adds up its gradients in 16 bits.
    with torch.autocast(place.device.type, dtype=torch.bfloat16, cache_enabled=False):
        got, expected = compiled(*step.leaves), step.forward(*step.leaves)
    if step.is_differentiable:
        got, expected = ([*of, *torch.autograd.grad(total(of), step.leaves)] for of in (got, expected))
    for ours, eager in zip(got, expected, strict=True):
        assert ours.dtype == eager.dtype
        torch.testing.assert_close(ours, eager, rtol=0, atol=0, equal_nan=True)


@ONCE
@pytest.mark.parametrize("family", DIFFERENTIABLE)
def test_activation_checkpointing(place: Place, family: str) -> None:
    step = step_of(family, torch.bfloat16)
    again = gradients(step, lambda *leaves: checkpoint(step.forward, *leaves, use_reentrant=False))
    for got, expected in zip(again, gradients(step), strict=True):
        assert torch.equal(got, expected)


@ONCE
@pytest.mark.parametrize("family", DIFFERENTIABLE)
def test_backward_on_the_thread_of_the_call(place: Place, family: str) -> None:
    """There it is inside of what the caller has switched on, autocast too, which gradients are not to see."""
    step = step_of(family)

    def loss() -> Tensor:
        outputs = step.forward(*step.leaves)
        # The products of linear layers are PyTorch's own, which autocast casts wherever their backward runs.
        return total([*outputs[:3], *outputs[6:]] if family == "elementwise" else outputs)

    expected, again = torch.autograd.grad(loss(), step.leaves, allow_unused=True), loss()
    with torch.autograd.set_multithreading_enabled(False), torch.autocast(place.device.type, dtype=torch.bfloat16):
        found = torch.autograd.grad(again, step.leaves, allow_unused=True)
    assert [grad is None for grad in found] == [family == "elementwise" and number == 3 for number in range(len(found))]
    for ours, plain in zip(found, expected, strict=True):
        assert ours is None or torch.equal(ours, plain)


@pytest.mark.parametrize("family", FAMILIES)
def test_another_default_dtype_changes_nothing(place: Place, family: str) -> None:
    step = step_of(family)
    expected = step.run()
    torch.set_default_dtype(torch.float64)
    try:
        got = step.run()
    finally:
        torch.set_default_dtype(torch.float32)
    for ours, before in zip(got, expected, strict=True):
        assert ours.dtype == before.dtype
        assert torch.equal(ours, before)


# A table of a joint update, which sampled cross-entropy's part in factors is for, is in no transform; the rest has its own test.
@ONCE
@pytest.mark.parametrize("family", [name for name in DIFFERENTIABLE if name != "sampled_cross_entropy"])
def test_functional_gradients(place: Place, family: str) -> None:
    """`torch.func.grad` finds what autograd finds."""
    step = step_of(family)
    places = tuple(range(len(step.leaves)))
    found = torch.func.grad(lambda *leaves: total(step.forward(*leaves)), places)(*(leaf.detach() for leaf in step.leaves))
    for got, expected in zip(found, gradients(step), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@ONCE
def test_one_tensor_twice_in_one_graph(place: Place) -> None:
    """Queries that are keys, offsets that are both sides', and rows times themselves, compiled whole."""
    x = random_tensor((6, 8), torch.float32, 0).requires_grad_()
    heads = random_tensor((6, 2, 4), torch.float32, 1).requires_grad_()
    offsets, rows = torch.tensor([0, 2, 6], device=place.device), torch.arange(7, device=place.device)
    target = rows[:6]
    calls: list[Callable[[Tensor, Tensor], Tensor]] = [
        lambda x, h: ops.jagged_attention(h, h, h, offsets),
        lambda x, h: ops.jagged_attention(h, h, h, offsets, offsets),
        lambda x, h: ops.jagged_hstu_attention(h, h, h, offsets),
        lambda x, h: ops.jagged_jagged_bmm(x, x, offsets),
        lambda x, h: ops.jagged_dense_bmm(x, offsets, x[:2, :, None] * x[2:4, None]),
        lambda x, h: ops.jagged_jagged_bmm_jagged_out(x, x, offsets, offsets, total=20),
        lambda x, h: ops.jagged_dense_add(x, rows, x),
        lambda x, h: ops.jagged_dense_mul(x, rows, x),
        lambda x, h: ops.jagged_concat([x, x], [offsets, offsets])[0],
        lambda x, h: ops.jagged2_softmax(x.flatten()[:20], offsets, offsets),
        lambda x, h: ops.linear_cross_entropy(x, x, target),
        lambda x, h: ops.sampled_linear_cross_entropy(x, x, target, target),
        lambda x, h: ops.catalogue_topk(x, x, 2)[0],
        lambda x, h: ops.jagged_linear(x, offsets, x[:, :8], context=x[:2, :6], activation="silu"),
    ]
    for number, call in enumerate(calls):
        torch.compiler.reset()
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        got, expected = compiled(x, heads), call(x, heads)
        assert torch.equal(got, expected), number
        if expected.requires_grad:
            for ours, eager in zip(
                torch.autograd.grad(got.square().sum(), (x, heads), allow_unused=True),
                torch.autograd.grad(expected.square().sum(), (x, heads), allow_unused=True),
                strict=True,
            ):
                assert (ours is None) == (eager is None), number
                if ours is not None:
                    torch.testing.assert_close(ours, eager, rtol=1e-6, atol=1e-6)


def test_what_is_kept_between_calls_is_pickled_by_its_numbers(place: Place) -> None:
    """A layout is the one object that a caller keeps: a copy reads the same tables, wherever tensors beside it were mapped."""
    layout = ops.BagLayout((5, 3), (4, 8), (0, 1, 0))
    weights = random_tensor((layout.num_elements,), torch.float32, 0)
    indices, offsets = torch.tensor([4, 2, 0], device=place.device), torch.arange(4, device=place.device)
    expected = ops.embedding_bags(weights, layout, indices, offsets, backend=place.backend)
    copy = pickle.loads(pickle.dumps(layout))
    assert copy == layout
    assert torch.equal(ops.embedding_bags(weights, copy, indices, offsets, backend=place.backend), expected)
