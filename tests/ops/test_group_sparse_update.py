"""Updates of group-sparse layers inside the backward pass of their loss, against a gradient and an optimizer of PyTorch."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from jagged.ops import GroupSparseOptimizer, group_sparse_bce, group_sparse_cross_entropy
from jagged.ops._shared.matrices import gpu
from jagged.ops.group_sparse import configurations, update
from tests.ops.test_embedding_bag import Recorder
from tests.ops.test_group_sparse import Layer, layer_of
from tests.ops.test_group_sparse_bce import positives_of, targets_of
from tests.oracle import check_three_way
from tests.places import PLACE, Place
from tests.reference import group_sparse as reference
from tests.strategies import Jagged, float_dtypes, jagged_batches, jagged_of, random_tensor, seeds

RULES: tuple[dict[str, Any], ...] = (
    {"learning_rate": 0.5},
    {"learning_rate": 2.0, "momentum": 0.9},
    {"learning_rate": 1.0, "momentum": 0.5, "weight_decay": 0.25},
    {"learning_rate": 0.5, "weight_decay": 1.0},
)
ONE_GRAPH = pytest.mark.skipif(
    torch.__version__ < "2.12", reason="PyTorch 2.11 compiles no backward pass that changes a parameter"
)


LOSSES: dict[str, Callable[..., Tensor]] = {"bce": group_sparse_bce, "softmax": group_sparse_cross_entropy}
OF_BOTH = pytest.mark.parametrize("loss", LOSSES)


class Run:
    """A layer with an optimizer of its own, and batches for it."""

    def __init__(self, layer: Layer, loss: str = "bce", *, learns: tuple[bool, bool] = (True, True), **rule: Any) -> None:
        self.layer, self.loss_of = layer, LOSSES[loss]
        self.weight, self.bias = (
            x.detach().clone().requires_grad_(of) for x, of in zip((layer.weight, layer.bias), learns, strict=True)
        )
        self.optimizer = GroupSparseOptimizer(self.weight, self.bias, **rule)

    def loss(self, features: Tensor, seed: int = 0, **options: Any) -> Tensor:
        given = positives_of(features.shape[0], self.weight.shape[0], seed)
        layer = self.layer
        return self.loss_of(
            features, self.weight, layer.supports, layer.offsets, *given, self.bias, optimizer=self.optimizer,
            backend=PLACE.backend, **options,
        )  # fmt: skip

    def tensors(self) -> list[Tensor]:
        return [x.detach().clone() for x in (self.weight, self.bias, *self.optimizer.state().values())]


# Of a logit below -88 the kernel means the exponential to be infinite, which the interpreter warns of.
@pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")
@OF_BOTH
@given(
    jagged_batches(), st.sampled_from([1, 7, 20]), st.sampled_from([1, 5, 70]), float_dtypes(), seeds(),
    st.sampled_from(range(len(RULES))), st.sampled_from(["features", "weight", "bias", "weight_momentum", "bias_momentum"]),
)  # fmt: skip
def test_an_update_is_one_of_sgd(
    place: Place,
    loss: str,
    groups: Jagged,
    batch_size: int,
    width: int,
    dtype: torch.dtype,
    seed: int,
    rule: int,
    of: Literal["features", "weight", "bias", "weight_momentum", "bias_momentum"],
) -> None:
    """Of two steps; the gradient of features is that of the second."""
    groups = jagged_of((*groups.lengths, 9), groups.offsets.dtype)
    layer = layer_of(groups, batch_size, width, width + 3, dtype, seed)
    given = positives_of(batch_size, groups.total, seed)
    targets, options = targets_of(*given, groups.total), RULES[rule]
    smoothing: dict[str, Any] = {"label_smoothing": 0.1} if loss == "bce" else {}
    if of.endswith("momentum") and not options.get("momentum"):
        return

    def ours(features: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        weight, bias, features = (x.detach().clone().requires_grad_() for x in (weight, bias, features))
        optimizer = GroupSparseOptimizer(weight, bias, **options)
        for _ in range(2):
            features.grad = None
            LOSSES[loss](
                features, weight, layer.supports, layer.offsets, *given, bias, optimizer=optimizer, backend=place.backend,
                **smoothing,
            ).backward()  # fmt: skip
            assert weight.grad is None
            assert bias.grad is None
        assert features.grad is not None
        return {
            "features": features.grad, "weight": weight, "bias": bias, "weight_momentum": optimizer.weight_momentum,
            "bias_momentum": optimizer.bias_momentum,
        }[of].detach()  # fmt: skip

    def expected(features: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        weight, bias, features = (x.detach().clone().requires_grad_() for x in (weight, bias, features))
        rest = {"lr": options["learning_rate"], "momentum": options.get("momentum", 0.0)}
        decayed = {"params": [weight], "weight_decay": options.get("weight_decay", 0.0)}
        optimizer = torch.optim.SGD([decayed, {"params": [bias]}], **rest)
        for _ in range(2):
            features.grad = None
            optimizer.zero_grad()
            logits = reference.group_sparse_linear(features, weight, layer.supports, layer.sizes, bias)
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
            (
                reference.group_sparse_bce(wide, targets, **smoothing)
                if loss == "bce"
                else reference.group_sparse_cross_entropy(wide, targets)[0]
            ).backward()
            optimizer.step()
        assert features.grad is not None
        found = {"features": features.grad, "weight": weight.detach(), "bias": bias.detach()}
        if of in found:
            return found[of]
        state: Tensor = optimizer.state[weight if of == "weight_momentum" else bias]["momentum_buffer"]
        return state

    check_three_way(ours, expected, [layer.features, layer.weight, layer.bias], requires_grad=[False] * 3)


@OF_BOTH
@pytest.mark.parametrize("dtype", PLACE.dtypes, ids=str)
def test_the_gradient_is_that_without_an_optimizer(place: Place, dtype: torch.dtype, loss: str) -> None:
    """Of features, to the bit; and a step without momentum is the gradient of weights times the rate, as far as it is rounded."""
    layer = layer_of(jagged_of((3, 0, 1, 70, 17)), 20, 5, 7, dtype)
    given = positives_of(20, layer.weight.shape[0], 0)
    leaves = [x.clone().requires_grad_() for x in (layer.features, layer.weight, layer.bias)]
    plain = LOSSES[loss](*leaves[:2], layer.supports, layer.offsets, *given, leaves[2], backend=place.backend)
    of_features, of_weight, of_bias = torch.autograd.grad(plain, leaves)
    run = Run(layer, loss, learning_rate=1.0)
    features = layer.features.clone().requires_grad_()
    ours = run.loss(features)
    assert torch.equal(ours.detach(), plain.detach())
    ours.backward()
    assert features.grad is not None
    assert torch.equal(features.grad, of_features)
    for new, old, grad in ((run.weight, layer.weight, of_weight), (run.bias, layer.bias, of_bias)):
        # The gradient that is seen is rounded once more, and so is the new number.
        wanted = old.double() - grad.double()
        slack = torch.finfo(dtype).eps * (grad.double().abs() + wanted.abs())
        assert ((new.detach().double() - wanted).abs() <= slack).all()
    assert int(run.optimizer.step) == 1


@OF_BOTH
def test_what_does_not_learn_stays(place: Place, loss: str) -> None:
    """A bias that requires no gradient, and all without a graph. Who asks for a gradient of features updates weights, too."""
    layer = layer_of(jagged_of((3, 5)), 6, 4, 9)
    run = Run(layer, loss, learns=(True, False), learning_rate=0.5, momentum=0.9)
    features = layer.features.clone().requires_grad_()
    (grad,) = torch.autograd.grad(run.loss(features), features)
    assert grad.any()
    assert torch.equal(run.bias, layer.bias)
    assert not torch.equal(run.weight, layer.weight)
    before = run.tensors()
    recorded = run.loss(features)
    with torch.no_grad():
        assert torch.equal(run.loss(features), recorded)
    for now, then in zip(run.tensors(), before, strict=True):
        assert torch.equal(now, then)


@OF_BOTH
# The interpreter's numpy warns of a maximum of nothing but NaN.
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_nothing_changes_by_what_is_no_number(place: Place, where: str, loss: str) -> None:
    """Neither weights nor states, whatever the batch; the next one is learnt from."""
    layer = layer_of(jagged_of((3, 5, 20)), 6, 4, 9)
    run = Run(layer, loss, learning_rate=0.5, momentum=0.9, weight_decay=0.1)
    run.loss(layer.features).backward()
    before = run.tensors()
    features = layer.features.clone()
    if where == "loss":
        features[2, int(layer.supports[1, 0])] = torch.nan
    # The interpreter's numpy warns of 0 times infinity.
    bad = torch.nan if place.name == "interpret" else torch.inf
    run.loss(features).backward(torch.tensor(bad if where == "gradient" else 1.0, device=place.device))
    # All but the number of backward passes.
    for now, then, name in zip(run.tensors(), before, ("weight", "bias", *run.optimizer.state()), strict=True):
        assert torch.equal(now, then) == (name != "step")
    run.loss(layer.features).backward()
    assert not torch.equal(run.weight, before[0])


def test_the_rate_is_read_from_the_device(place: Place) -> None:
    layer = layer_of(jagged_of((3, 5)), 6, 4, 9)
    run = Run(layer, learning_rate=0.5)
    run.optimizer.learning_rate.fill_(0)
    run.loss(layer.features).backward()
    assert torch.equal(run.weight, layer.weight)


def test_stochastic_rounding(place: Place) -> None:
    """Steps of less than half of bfloat16's last place are kept on average, and repeated runs round alike."""
    num_labels = 256
    groups = jagged_of((num_labels,))
    weight = torch.ones(num_labels, 1, dtype=torch.bfloat16, device=place.device)
    layer = Layer(
        weight[:1], weight, torch.zeros(1, 1, dtype=torch.int32, device=place.device), groups.offsets, weight[:, 0], (num_labels,)
    )
    ends = []
    for is_stochastic in (True, True, False):
        run = Run(layer, learning_rate=2e-3, stochastic_rounding=is_stochastic)
        for _ in range(5):
            offsets = torch.tensor([0, 0], device=place.device)
            given = (layer.features, run.weight, layer.supports, layer.offsets, offsets[:0], offsets, run.bias)
            group_sparse_bce(*given, optimizer=run.optimizer, backend=place.backend).backward()
        ends.append((run.weight.detach().float(), run.bias.detach().float()))
    assert torch.equal(ends[0][0], ends[1][0])
    assert torch.equal(ends[0][1], ends[1][1])
    # The gradient is sigmoid(2) and hardly changes.
    for values in ends[0]:
        assert abs(float(1 - values.double().mean()) / (5 * 2e-3 * 0.8808) - 1) < 0.1
    # Of weights and of biases each has draws of its own.
    assert not torch.equal(ends[0][0][:, 0], ends[0][1])
    # The interpreter cuts off where a GPU rounds to the nearest number.
    for values in ends[2] if place.name != "interpret" else ():
        assert (values == 1).all()


# The dtype, whether biases learn, and an optimizer's options.
ROUNDED = torch.bfloat16, True, {"stochastic_rounding": True}
WITH_ALL = torch.bfloat16, True, {**ROUNDED[2], "momentum": 0.9, "weight_decay": 0.1, "state_dtype": torch.float32}
WITHOUT_BIAS = torch.float16, False, {"momentum": 0.5}
IN_FLOAT32 = torch.float32, True, {"weight_decay": 0.1}


@OF_BOTH
@pytest.mark.skipif(PLACE.name == "cpu", reason="where updates are made is the kernels' choice")
@pytest.mark.parametrize("batch_size", [20, 70, 130])
@pytest.mark.parametrize(
    ("rule", "width"), [(ROUNDED, 16), (WITH_ALL, 16), (WITHOUT_BIAS, 16), (IN_FLOAT32, 16), (WITH_ALL, 96), (ROUNDED, 128)]
)
def test_updates_in_the_kernel(
    place: Place,
    batch_size: int,
    rule: tuple[torch.dtype, bool, dict[str, Any]],
    width: int,
    loss: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are those that PyTorch's operations make of its gradients, to the bit where nothing contracts a product with a sum.

    Weights have gaps, and groups more labels than a tile, or none; a program has all samples, or walks them.
    """
    from jagged.ops.group_sparse import gradient_kernels

    dtype, changes_bias, options = rule
    layer = layer_of(jagged_of((3, 0, 1, 40, 17), torch.int32), batch_size, width, 150, dtype)
    given = positives_of(batch_size, 61, 0)
    found = []
    for in_kernel in (True, False):
        if not in_kernel:
            monkeypatch.setattr(gradient_kernels, "kernel_can_update", lambda x, o: False)
        weight = random_tensor((61, width), dtype, 1, strided=True).requires_grad_()
        assert not weight.is_contiguous()
        bias = layer.bias.clone().requires_grad_(changes_bias)
        optimizer = GroupSparseOptimizer(weight, bias, learning_rate=0.5, **options)
        # What lies between the weights stays.
        row = 2 * width + 1
        storage, gaps = weight.detach().as_strided((61, row), (row, 1), 0), torch.ones(row, dtype=torch.bool, device=place.device)
        gaps[1::2] = False
        before = storage[:, gaps].clone()
        for _ in range(2):
            features = layer.features.clone().requires_grad_()
            LOSSES[loss](
                features, weight, layer.supports, layer.offsets, *given, bias, optimizer=optimizer, backend=place.backend
            ).backward()
            assert features.grad is not None
        assert torch.equal(storage[:, gaps], before)
        assert torch.equal(bias, layer.bias) != changes_bias
        found.append([features.grad, weight, bias, *optimizer.state().values()])
    for number, (ours, expected) in enumerate(zip(*found, strict=True)):
        # The interpreter cuts float32 off to make bfloat16 of it, but nothing that is rounded at random.
        if place.name == "interpret" and number:
            assert torch.equal(ours, expected)
        else:
            largest = max(expected.detach().abs().flatten().tolist(), default=0.0)
            torch.testing.assert_close(ours, expected, rtol=4 * torch.finfo(dtype).eps, atol=1e-3 * largest)


@OF_BOTH
def test_programs_of_some_samples_each(place: Place, loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of features, which is made apart there, is of weights as they were."""
    layer = layer_of(jagged_of((3, 0, 1, 40, 17)), 130, 16, 50)
    found = []
    for most in (configurations.MOST_SUM_BYTES, 0):
        monkeypatch.setattr(configurations, "MOST_SUM_BYTES", most)
        run, features = Run(layer, loss, learning_rate=2.0, momentum=0.9), layer.features.clone().requires_grad_()
        run.loss(features).backward()
        found.append([features.grad, *run.tensors()])
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected)


@pytest.mark.skipif(PLACE.name == "cpu", reason="where updates are made is the kernels' choice")
@pytest.mark.parametrize("why", ["more slots than a tile", "a bias with gaps"])
def test_what_the_kernel_leaves_to_pytorch(place: Place, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from jagged.ops.group_sparse import gradient_kernels

    calls = []

    def recorded(*arguments: Any) -> Any:
        calls.append(1)
        return update.update_by(*arguments)

    monkeypatch.setattr(gradient_kernels, "update_by", recorded)
    width = 100 if why == "more slots than a tile" else 5
    layer = layer_of(jagged_of((3, 0, 20)), 6, width, 120)
    weight, bias = layer.weight.clone().requires_grad_(), layer.bias.clone()
    if why == "a bias with gaps":
        bias = torch.stack([bias, bias], 1)[:, 0]
    given = positives_of(6, 23, 0)
    optimizer = GroupSparseOptimizer(weight, bias.requires_grad_(), learning_rate=1.0)
    group_sparse_bce(
        layer.features, weight, layer.supports, layer.offsets, *given, bias, optimizer=optimizer, backend=place.backend
    ).backward()
    assert calls
    leaves = [x.clone().requires_grad_() for x in (layer.weight, layer.bias)]
    plain = group_sparse_bce(
        layer.features, leaves[0], layer.supports, layer.offsets, *given, leaves[1], backend=place.backend
    )  # fmt: skip
    for new, leaf, grad in zip((weight, bias), leaves, torch.autograd.grad(plain, leaves), strict=True):
        torch.testing.assert_close(new.detach(), leaf.detach() - grad)


def test_weights_that_lie_on_one_another_are_refused() -> None:
    """Each of their labels would change the others'."""
    numbers = torch.zeros(12)
    for weight, bias, message in (
        (numbers[:4].expand(3, 4), None, "weight: {} strides [0, 1] of shape [3, 4]; clone it"),
        (numbers.as_strided((3, 4), (2, 1)), None, "weight: {} strides [2, 1] of shape [3, 4]; clone it"),
        (numbers.as_strided((3, 4), (1, 2)), None, "weight: {} strides [1, 2] of shape [3, 4]; clone it"),
        (numbers.view(3, 4), numbers[:1].expand(3), "bias: {} strides [0] of shape [3]; clone it"),
    ):
        expected = message.format("expected a place in memory for each element, which an update changes, got")
        with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
            GroupSparseOptimizer(weight, bias, learning_rate=1.0)
    for weight in (numbers.view(3, 4), numbers.view(4, 3).t(), numbers.view(3, 4)[:, :3], numbers.as_strided((1, 4), (0, 1))):
        GroupSparseOptimizer(weight, learning_rate=1.0)
    GroupSparseOptimizer(numbers[:0].view(0, 4), numbers[:0], learning_rate=1.0)


def test_an_expanded_weight_beside_an_optimizer_of_another_is_refused(place: Place) -> None:
    """All its labels lie at one place, which each would change; the optimizer has not seen it."""
    layer = layer_of(jagged_of((3, 2)), 6, 5, 7)
    weight, bias = layer.weight[:1].clone().expand(5, 5).requires_grad_(), layer.bias.clone().requires_grad_()
    optimizer = GroupSparseOptimizer(layer.weight.clone(), bias, learning_rate=1.0)
    loss = group_sparse_bce(
        layer.features, weight, layer.supports, layer.offsets, *positives_of(6, 5, 0), bias, optimizer=optimizer,
        backend=place.backend,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor refers to a single memory location"):
        loss.backward()


def test_pieces_do_not_change_the_result(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layer_of(jagged_of((3, 0, 1, 9, 9)), 16, 5, 7, torch.bfloat16)
    results = []
    for elements in (update.PIECE_ELEMENTS, 11):
        monkeypatch.setattr(update, "PIECE_ELEMENTS", elements)
        run = Run(layer, learning_rate=0.5, momentum=0.9, weight_decay=0.1, stochastic_rounding=True)
        for seed in range(3):
            run.loss(layer.features, seed).backward()
        results.append(run.tensors())
    for left, right in zip(*results, strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("sizes", [(), (0,), (1,), (0, 1, 40, 0)])
@pytest.mark.parametrize("batch_size", [0, 3])
def test_few_labels_and_none(place: Place, sizes: tuple[int, ...], batch_size: int) -> None:
    """Of an empty batch weights decay, as their gradient is zero."""
    layer = layer_of(jagged_of(sizes, torch.int32), batch_size, 4, 6)
    given = positives_of(batch_size, sum(sizes), 1, most=3 if sum(sizes) else 0)
    weight, bias = (x.clone().requires_grad_() for x in (layer.weight, layer.bias))
    optimizer = GroupSparseOptimizer(weight, bias, learning_rate=0.5, momentum=0.5, weight_decay=0.5)
    group_sparse_bce(
        layer.features, weight, layer.supports, layer.offsets, *given, bias, optimizer=optimizer, backend=place.backend
    ).backward()
    assert weight.isfinite().all()
    if not batch_size:
        assert torch.equal(weight, 0.75 * layer.weight)
        assert torch.equal(bias, layer.bias)


def test_under_autocast_all_is_in_the_dtype_of_weights(place: Place) -> None:
    layer = layer_of(jagged_of((3, 5)), 6, 4, 9)
    plain, cast = Run(layer, learning_rate=0.5), Run(layer, learning_rate=0.5)
    plain.loss(layer.features.bfloat16().float()).backward()
    with torch.autocast(place.device.type, dtype=torch.bfloat16):
        loss = cast.loss(layer.features.bfloat16())
    loss.backward()
    assert torch.equal(plain.weight, cast.weight)
    assert torch.equal(plain.bias, cast.bias)


@OF_BOTH
def test_under_checkpointing(place: Place, loss: str) -> None:
    """Forward runs twice there, and the update once."""
    layer = layer_of(jagged_of((3, 5)), 6, 4, 9)
    plain, again = (Run(layer, loss, learning_rate=0.5, momentum=0.9) for _ in range(2))
    for _ in range(2):
        leaves = [layer.features.clone().requires_grad_() for _ in range(2)]
        plain.loss(leaves[0]).backward()
        checkpoint(again.loss, leaves[1], use_reentrant=False).backward()  # type: ignore[union-attr]
        assert leaves[0].grad is not None
        assert torch.equal(leaves[0].grad, leaves[1].grad)  # type: ignore[arg-type]
    for left, right in zip(plain.tensors(), again.tensors(), strict=True):
        assert torch.equal(left, right)


def test_an_optimizer_is_copied_and_pickled(place: Place) -> None:
    layer = layer_of(jagged_of((3, 5)), 6, 4, 9)
    run = Run(layer, learning_rate=0.5, momentum=0.9)
    run.loss(layer.features).backward()
    for other in (copy.deepcopy(run.optimizer), pickle.loads(pickle.dumps(run.optimizer))):
        assert other.rule == run.optimizer.rule
        for name, state in run.optimizer.state().items():
            assert torch.equal(other.state()[name], state)
            assert other.state()[name] is not state


@ONE_GRAPH
@pytest.mark.skipif(PLACE.name == "interpret", reason="the compiler cannot run the interpreter")
@OF_BOTH
def test_in_one_graph(place: Place, loss: str) -> None:
    layer = layer_of(jagged_of((3, 0, 1, 9)), 6, 4, 9)
    plain, other = (Run(layer, loss, learning_rate=0.5, momentum=0.9, weight_decay=0.1) for _ in range(2))
    given = positives_of(6, 13, 0)

    def of(run: Run, features: Tensor) -> Tensor:
        return LOSSES[loss](
            features, run.weight, layer.supports, layer.offsets, *given, run.bias, optimizer=run.optimizer, backend=place.backend
        )

    torch._dynamo.reset()
    compiled = torch.compile(lambda features: of(other, features), fullgraph=True, backend="aot_eager")
    for _ in range(3):
        leaves = [layer.features.clone().requires_grad_() for _ in range(2)]
        of(plain, leaves[0]).backward()
        compiled(leaves[1]).backward()
        assert leaves[0].grad is not None
        assert torch.equal(leaves[0].grad, leaves[1].grad)  # type: ignore[arg-type]
    for left, right in zip(plain.tensors(), other.tensors(), strict=True):
        assert torch.equal(left, right)


CHANGED = (
    "weight: it has changed since the loss was computed, whose gradient needs it as it was; call backward of one loss before the "
    "next is computed, or put all rows into one call of "
)


@OF_BOTH
@pytest.mark.parametrize("how", ["two losses", "twice", "by hand"])
def test_weights_that_have_changed_since_are_refused(place: Place, how: str, loss: str) -> None:
    layer = layer_of(jagged_of((3, 5)), 6, 4, 9)
    run = Run(layer, loss, learning_rate=0.5)
    first, second = run.loss(layer.features), run.loss(layer.features)
    if how == "by hand":
        with torch.no_grad():
            run.weight += 1
    elif how == "twice":
        first.backward(retain_graph=True)
        second = first
    else:
        first.backward()
    before = run.tensors()
    with pytest.raises(RuntimeError, match=f"^{re.escape(CHANGED)}{LOSSES[loss].__name__}$"):
        second.backward()
    for now, then in zip(run.tensors(), before, strict=True):
        assert torch.equal(now, then)


@ONE_GRAPH
@pytest.mark.skipif(PLACE.name != "cpu", reason="on a GPU the assertion ends the process's use of it")
def test_weights_that_have_changed_since_are_refused_in_one_graph(place: Place) -> None:
    layer = layer_of(jagged_of((3, 5)), 6, 4, 9)
    run, given = Run(layer, learning_rate=0.5), positives_of(6, 8, 0)

    def losses(features: Tensor) -> Tensor:
        of = [
            group_sparse_bce(
                features, run.weight, layer.supports, layer.offsets, *given, run.bias, optimizer=run.optimizer
            )
            for _ in range(2)
        ]  # fmt: skip
        return of[0] + of[1]

    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match=f"^{re.escape(CHANGED)}group_sparse_bce"):
        torch.compile(losses, fullgraph=True, backend="aot_eager")(layer.features).backward()


@OF_BOTH
def test_opcheck(place: Place, loss: str) -> None:
    """With momentum and a bias, and without either."""
    calls: list[tuple[Any, tuple[Any, ...]]] = []
    layer = layer_of(jagged_of((3, 5)), 6, 4, 9)
    given = positives_of(6, 8, 0)
    with Recorder(calls, LOSSES[loss].__name__):
        Run(layer, loss, learning_rate=0.5, momentum=0.9).loss(layer.features.clone().requires_grad_()).backward()
        weight = layer.weight.clone().requires_grad_()
        optimizer = GroupSparseOptimizer(weight, learning_rate=0.5)
        layered = (layer.features, weight, layer.supports, layer.offsets)
        LOSSES[loss](*layered, *given, optimizer=optimizer, backend=place.backend).backward()
    names = [f"jagged::{LOSSES[loss].__name__}_{name}" for name in ("updating", "update")]
    assert [operator._schema.name for operator, _ in calls] == names * 2
    for operator, arguments in calls:
        plain = tuple(x.detach().clone() if isinstance(x, Tensor) else x for x in arguments)
        torch.library.opcheck(operator, plain)


@pytest.mark.parametrize(
    ("error", "message", "given"),
    [
        (ValueError, "learning_rate: expected a number of at least 0, got -1", {"learning_rate": -1}),
        (ValueError, "momentum: expected a number in [0, 1), got 1", {"momentum": 1}),
        (ValueError, "weight_decay: expected a number of at least 0, got nan", {"weight_decay": float("nan")}),
        (TypeError, "state_dtype: expected a floating dtype, got torch.int8", {"state_dtype": torch.int8}),
    ],
)
def test_wrong_numbers(error: type[Exception], message: str, given: dict[str, Any]) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        GroupSparseOptimizer(torch.zeros(3, 2), **{"learning_rate": 0.1, **given})


def test_an_optimizer_of_another_layer(place: Place) -> None:
    layer = layer_of(jagged_of((3, 5)), 6, 4, 9)
    others: list[tuple[str, Tensor, Tensor | None]] = [
        ("[7, 4] and [7]", layer.weight[:7], layer.bias[:7]),
        ("[8, 3] and [8]", layer.weight[:, :3], layer.bias),
        ("[8, 4] and [0]", layer.weight, None),
    ]
    for shapes, weight, bias in others:
        run = Run(layer, learning_rate=0.5)
        run.optimizer = GroupSparseOptimizer(weight, bias, learning_rate=0.1, momentum=0.9)
        message = (
            "optimizer: expected momentum of shapes [8, 4] and [8], those of weight and bias, "
            f"got {shapes}; make it for these weights"
        )
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            run.loss(layer.features)
    run = Run(layer, learning_rate=0.5)
    run.optimizer = GroupSparseOptimizer(layer.weight.to("meta"), learning_rate=0.1)
    message = (
        f"optimizer: expected its states on the device of weight, {layer.weight.device}, got meta; make it for these weights"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        run.loss(layer.features)
    run = Run(layer, learns=(False, True), learning_rate=0.5)
    message = (
        "optimizer: weight does not require a gradient, so nothing would be updated; call weight.requires_grad_(), or leave the "
        "optimizer out"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        run.loss(layer.features)


@pytest.mark.gpu
@OF_BOTH
def test_a_graph_updates_at_every_replay(place: Place, loss: str) -> None:
    layer = layer_of(jagged_of((3, 0, 1, 70, 17)), 20, 5, 7, torch.bfloat16)
    runs = [Run(layer, loss, learning_rate=0.5, momentum=0.9, stochastic_rounding=True) for _ in range(2)]
    given, features = positives_of(20, layer.weight.shape[0], 0), layer.features

    def step(run: Run) -> None:
        LOSSES[loss](
            features, run.weight, layer.supports, layer.offsets, *given, run.bias, optimizer=run.optimizer, backend=place.backend
        ).backward()

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        step(runs[0])
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        step(runs[0])
    for _ in range(3):
        graph.replay()
    for _ in range(4):
        step(runs[1])
    for left, right in zip(*(run.tensors() for run in runs), strict=True):
        assert torch.equal(left, right)


@pytest.mark.gpu
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_an_update_takes_no_memory_of_the_layer(place: Place, momentum: float) -> None:
    """200,000 labels of 32 slots: 12.8 MB of weights, whose gradients in float32 would take twice that."""
    labels, width, num_features, batch_size = 200_000, 32, 64, 64
    offsets = torch.arange(0, labels + 1, 32, device=place.device)
    num_groups = labels // 32
    supports = torch.arange(width, dtype=torch.int32, device=place.device).expand(num_groups, width).contiguous()
    features = random_tensor((batch_size, num_features), torch.bfloat16, 1).requires_grad_()
    weight = random_tensor((labels, width), torch.bfloat16, 2).requires_grad_()
    bias = random_tensor((labels,), torch.bfloat16, 3).requires_grad_()
    given = positives_of(batch_size, labels, 4)
    optimizer = GroupSparseOptimizer(weight, bias, learning_rate=0.1, momentum=momentum, stochastic_rounding=True)
    sums = 4 * min(configurations.PROGRAMS * gpu(place.device).multiprocessors, num_groups) * num_features * batch_size
    before = weight.detach().clone()
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    group_sparse_bce(features, weight, supports, offsets, *given, bias, optimizer=optimizer, backend=place.backend).backward()
    assert torch.cuda.max_memory_allocated() - base < sums + weight.nbytes // 8
    assert not torch.equal(weight, before)


def test_parts_of_a_softmax_update_by_what_comes_to_them(place: Place) -> None:
    """One softmax over a layer that updates itself and another's logits; a part that nothing comes to adds nothing."""
    layer = layer_of(jagged_of((3, 0, 5, 20)), 6, 4, 9)
    head, given = random_tensor((6, 7), torch.float32, 5), positives_of(6, 28, 1)
    plain, updated = layer.weight.clone().requires_grad_(), layer.weight.clone().requires_grad_()
    bias = layer.bias.clone()
    optimizer = GroupSparseOptimizer(updated, bias, learning_rate=1.0)
    for uses_target in (True, False):
        with torch.no_grad():
            plain.copy_(updated)
        for weight, of in ((plain, None), (updated, optimizer)):
            _, lse, target = group_sparse_cross_entropy(
                layer.features, weight, layer.supports, layer.offsets, *given, bias, optimizer=of, return_parts=True,
                backend=place.backend,
            )  # fmt: skip
            weight.grad = None
            (torch.logaddexp(lse, head.logsumexp(1)).sum() - (0.3 * target.sum() if uses_target else 0)).backward()
        assert plain.grad is not None
        assert updated.grad is None
        torch.testing.assert_close(updated.detach(), plain.detach() - plain.grad)
