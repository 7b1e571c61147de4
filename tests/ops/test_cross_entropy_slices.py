"""The gradient of a table in slices: what a joint update makes of them is what the whole gradient says."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from jagged.ops import BagLayout, BagOptimizer, JointUpdate, linear_cross_entropy
from jagged.ops.cross_entropy.slices import WeightSlices
from jagged.ops.embedding_bag.slices import Slices, slices_of
from tests.graphs import captured
from tests.memory import PeakMemory
from tests.places import PLACE, Place
from tests.strategies import random_tensor

ITEMS, WIDTH, ROWS = 40, 12, 13
# Of 24 rows: twelve a slice, the last of four. Under a norm three, of which seven slices wait for the step, the last of one.
SLICE = 24 * WIDTH * 4
#: A pooled feature that is a mean and a sequence of the table that is scored; a pooled feature of another.
LAYOUT = BagLayout((9, ITEMS), (5, WIDTH), (1, 0, 1), (True, False, False), (False, False, True))
BAGS = 3
OPTIONS: list[dict[str, Any]] = [
    {},
    {"softcap": 3.0, "temperature": 0.7},
    {"normalize": True},
    {"label_smoothing": 0.2, "z_loss": 0.1},
    {"class_weight": True, "label_smoothing": 0.1, "sample_weight": True, "reduction": "sum"},
    {"bias": True, "ignore_index": -1},
    {"strategy": "chunked"},
]


def targets_of(rows: int, items: int, ignore_index: int = -100) -> Tensor:
    target = torch.arange(rows, device=PLACE.device) * 7 % items
    target[2::5] = ignore_index
    return target


def arguments_of(options: dict[str, Any]) -> dict[str, Any]:
    vectors = {"class_weight": ITEMS, "bias": ITEMS, "sample_weight": ROWS}
    made = {name: random_tensor((size,), torch.float32, size).abs() for name, size in vectors.items()}
    return {name: made[name] if value is True and name in made else value for name, value in options.items()}


def alone(weight: Tensor, kind: Any = "sgd", **options: Any) -> JointUpdate:
    layout = BagLayout((weight.shape[0],), (weight.shape[1],))
    optimizer = BagOptimizer(kind, layout, learning_rate=1.0, device=weight.device, **options)
    return JointUpdate(weight.detach().clone().flatten(), optimizer)


def taught(tables: JointUpdate, loss: Tensor, *, waits: bool) -> None:
    """Backward and the update: at once, or behind a norm, for which slices wait."""
    tables.holds = waits
    loss.backward()
    if waits:
        tables.norm()
        assert tables._kept
        assert tables.step()


def rows_of(tables: JointUpdate, number: int = 0) -> Tensor:
    return tables.optimizer.layout.views(tables.weights)[number]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda of: "-".join(of) or "plain")
def test_rows_move_by_the_whole_gradient(place: Place, options: dict[str, Any]) -> None:
    hidden, weight = (random_tensor((rows, WIDTH), torch.float32, rows).requires_grad_() for rows in (ROWS, ITEMS))
    target, given_too = targets_of(ROWS, ITEMS, options.get("ignore_index", -100)), arguments_of(options)

    def call(hidden: Tensor, table: Tensor) -> Tensor:
        loss, lse, logit = linear_cross_entropy(
            hidden, table, target, return_lse=True, return_target_logit=True, memory_budget=SLICE, backend=place.backend,
            **given_too,
        )  # fmt: skip
        # Log-sum-exps and logits have gradients of their own.
        return loss + lse.square().sum() / 50 + logit.sum() / 20

    of_hidden, of_weight = torch.autograd.grad(call(hidden, weight), [hidden, weight])
    tables = alone(weight)
    call(hidden, tables.table(backend=place.backend)).backward()
    torch.testing.assert_close(hidden.grad, of_hidden, rtol=1e-5, atol=1e-6)
    moved = weight.detach() - rows_of(tables)
    torch.testing.assert_close(moved, of_weight, rtol=1e-4, atol=2e-6)
    assert moved.abs().amax(1).min() > 1e-5


@given(st.integers(0, 5), st.integers(1, 12), st.integers(1, 9), st.integers(1, 200))
def test_any_sizes(place: Place, rows: int, items: int, width: int, budget: int) -> None:
    hidden, weight = random_tensor((rows, width), torch.float32, 0), random_tensor((items, width), torch.float32, 1)
    weight.requires_grad_()
    target = targets_of(rows, items)
    (expected,) = torch.autograd.grad(linear_cross_entropy(hidden, weight, target, backend=place.backend), weight)
    tables = alone(weight)
    linear_cross_entropy(
        hidden, tables.table(backend=place.backend), target, memory_budget=budget, backend=place.backend
    ).backward()
    torch.testing.assert_close(weight.detach() - rows_of(tables), expected, rtol=1e-4, atol=2e-6)


class Largest(TorchDispatchMode):
    """The most numbers of a floating-point tensor that an operator puts out."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # Not of views, and of what the interpreter sets to a storage, which take no memory.
        if not func.is_view and func is not torch.ops.aten.set_.source_Storage_storage_offset:
            found = [of.numel() for of in tree_leaves(result) if isinstance(of, Tensor) and of.is_floating_point()]
            self.largest = max([self.largest, *found])
        return result


@pytest.mark.parametrize("holds", [False, True])
def test_no_gradient_of_the_table_is_made(place: Place, holds: bool) -> None:
    items = 1_000
    tables = alone(random_tensor((items, WIDTH), torch.float32, 0), "rowwise_adagrad")
    tables.holds = holds

    def largest(budget: int) -> int:
        hidden = random_tensor((5, WIDTH), torch.float32, 1).requires_grad_()
        with Largest() as seen:
            linear_cross_entropy(
                hidden, tables.table(backend=place.backend), targets_of(5, items), memory_budget=budget, strategy="fused",
                backend=place.backend,
            ).backward()  # fmt: skip
            if holds:
                tables.step(1 / tables.norm())
        return seen.largest

    # What a row has one number of may be as long as the table.
    assert largest(50 * WIDTH * 4) <= 5 * items
    assert largest(items * WIDTH * 4) >= items * WIDTH


@pytest.mark.skipif(PLACE.name == "gpu", reason="there kernels have room of their own")
@pytest.mark.parametrize("holds", [False, True])
def test_slices_take_their_budget(place: Place, holds: bool) -> None:
    items, width = 2_000, 64
    tables = alone(random_tensor((items, width), torch.float32, 0), "rowwise_adagrad")
    tables.holds = holds
    hidden, budget = random_tensor((5, width), torch.float32, 1).requires_grad_(), items * width * 4 // 10
    with PeakMemory([tables.weights, tables.optimizer.first, hidden]) as memory:
        linear_cross_entropy(
            hidden, tables.table(backend=place.backend), targets_of(5, items), memory_budget=budget, backend=place.backend
        ).backward()
        if holds:
            tables.step(1 / tables.norm())
    # With what is beside it: a few numbers of each row.
    assert memory.peak < 1.9 * budget


def test_slices_wait_for_the_step_as_far_as_the_budget_goes(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm makes every slice, and its step those again that there was no memory for."""
    made: list[int] = []
    make = WeightSlices.__call__
    monkeypatch.setattr(WeightSlices, "__call__", lambda of, first, *to: made.append(first) or make(of, first, *to))
    hidden, weight = (random_tensor((rows, WIDTH), torch.float32, rows) for rows in (ROWS, ITEMS))
    tables, whole = alone(weight), alone(weight)
    for of, budget in ((tables, SLICE), (whole, 1 << 20)):
        of.holds = True
        for has_norm in (True, False):
            linear_cross_entropy(
                hidden.requires_grad_(), of.table(backend=place.backend), targets_of(ROWS, ITEMS), memory_budget=budget,
                backend=place.backend,
            ).backward()  # fmt: skip
            of.step(2 / of.norm() if has_norm else None)
    assert made == [*range(0, ITEMS, 3), *range(21, ITEMS, 3), *range(0, ITEMS, 12)]
    torch.testing.assert_close(tables.weights, whole.weights, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize(("first", "second"), [(640, 640), (1280, 640), (640, 5120), (640, 1280), (64, 5120), (1, 1)])
def test_several_tables_share_the_smallest_room(first: int, second: int) -> None:
    """What waits, and the slice in work, of tables with different budgets and widths."""

    class OfOnes:
        def __init__(self, width: int, room: int) -> None:
            self.width, self.row_bytes, self.room = width, 4 * width, room

        def __call__(self, first: int, last: int, behind: int) -> Tensor:
            return torch.ones(last - first, self.width)

        def anew(self) -> OfOnes:
            return self

        def check(self) -> None:
            pass

        def named(self, first: int, last: int) -> None:
            return None

        def forget(self) -> None:
            pass

        def is_finite(self) -> Tensor:
            return torch.ones((), dtype=torch.bool)

    given_ = [Slices(number, 0, None, OfOnes(width, room)) for number, (width, room) in enumerate([(2, first), (4, second)])]
    kept: dict[tuple[int, int], Tensor] = {}
    # A row at least is made, whatever the room.
    room = max(min(first, second), 16)
    for part in slices_of(given_, (100, 100), kept, keeps=True):
        waits = {id(of): of.nbytes for of in kept.values()}
        assert sum(waits.values()) + (0 if id(part.gradient) in waits else part.gradient.nbytes) <= room
    assert bool(kept) == (room > 16)
    rows = [0, 0]
    for part in slices_of(given_, (100, 100), kept):
        assert part.first == rows[part.number]
        rows[part.number] = part.last
    assert rows == [100, 100]
    assert not kept


def test_what_comes_behind_a_norm_counts(place: Place) -> None:
    """Slices that wait, and the order of lookups, are of what was held when the norm was asked for."""
    # The table that is scored first, for an order of its rows to be before the others'.
    layout = BagLayout((ITEMS, 9), (WIDTH, 5), (1, 0))
    hidden, ids = random_tensor((ROWS, WIDTH), torch.float32, 1), torch.arange(8, device=PLACE.device)
    made = []
    for budget, has_norm in ((SLICE, True), (1 << 20, False)):
        tables = JointUpdate(
            random_tensor((layout.num_elements,), torch.float32, 0),
            BagOptimizer("sgd", layout, learning_rate=0.1, device=PLACE.device),
        )
        tables.holds = True
        for heads in (0, 1, 1, 2):
            read = tables.embedding_bags(layout, ids, ids[:5] * 2, backend=place.backend)
            loss = read.square().sum() if heads < 2 else read.new_zeros(())
            for head in range(heads):
                loss = loss + linear_cross_entropy(
                    hidden * (head + 1), tables.table(0, backend=place.backend), targets_of(ROWS, ITEMS), memory_budget=budget,
                    backend=place.backend,
                )  # fmt: skip
            loss.backward()
            if has_norm:
                tables.norm()
        tables.step(torch.tensor(0.5, device=PLACE.device))
        made.append(tables.weights)
    torch.testing.assert_close(*made, rtol=1e-4, atol=1e-5)


def trained(kind: Any, budget: int, *, holds: bool, heads: int = 1, backend: str | None = None) -> JointUpdate:
    """Tables after two updates by lookups of two batches and heads over the second table."""
    optimizer = BagOptimizer(kind, LAYOUT, learning_rate=0.1, device=PLACE.device)
    tables = JointUpdate(random_tensor((LAYOUT.num_elements,), torch.float32, 0), optimizer)
    tables.holds = holds
    for step in range(2):
        losses = []
        for batch in range(2):
            generator = torch.Generator().manual_seed(2 * step + batch)
            lengths = torch.randint(4, (3, BAGS), generator=generator)
            ids = [
                torch.randint(rows, (int(of.sum()),), generator=generator) for rows, of in zip((30, 9, 30), lengths, strict=True)
            ]
            offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.flatten().cumsum(0)])
            read = tables.embedding_bags(LAYOUT, torch.cat(ids).to(PLACE.device), offsets.to(PLACE.device), backend=backend)
            hidden = random_tensor((ROWS, WIDTH), torch.float32, batch) + read[:WIDTH]
            for head in range(heads):
                losses.append(
                    linear_cross_entropy(
                        hidden * (head + 1), tables.table(1, backend=backend), targets_of(ROWS, ITEMS), memory_budget=budget,
                        backend=backend,
                    )
                )  # fmt: skip
            losses.append(read.square().sum() / 9)
            if holds:
                torch.stack(losses).sum().backward()
                losses = []
        if holds:
            assert tables.step(1 / tables.norm())
        else:
            torch.stack(losses).sum().backward()
    return tables


@pytest.mark.parametrize(("holds", "heads"), [(False, 1), (True, 1), (False, 2), (True, 2)])
@pytest.mark.parametrize("kind", ["sgd", "rowwise_adagrad", "adam"])
def test_lookups_of_the_rows_are_in_the_same_update(place: Place, kind: str, holds: bool, heads: int) -> None:
    whole, sliced = (trained(kind, budget, holds=holds, heads=heads, backend=place.backend) for budget in (1 << 20, SLICE))
    torch.testing.assert_close(sliced.weights, whole.weights, rtol=1e-4, atol=1e-5)
    assert sliced.optimizer.step == whole.optimizer.step == 2
    for ours, theirs in zip(*([of.optimizer.first, of.optimizer.second] for of in (sliced, whole)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("eps", [0.0, 1e-3])
def test_filtered(place: Place, monkeypatch: pytest.MonkeyPatch, eps: float) -> None:
    """A slice leaves out what is smaller than that, and nothing else."""
    from jagged.ops.cross_entropy.triton import filter

    # Of any size, and whether it pays or not.
    monkeypatch.setattr(filter, "LEAST_WORK", 0)
    monkeypatch.setattr(filter, "MARGIN", math.inf)
    hidden, weight = (0.3 * random_tensor((rows, WIDTH), torch.float32, rows) for rows in (ROWS, ITEMS))
    # Of the last slice every item has a probability of 3e-5 to 1e-3.
    unlikely = 24
    hidden[:, 0] = 1.0
    weight[:unlikely, 0], weight[unlikely:, 0] = 0.0, -5.0
    targets = targets_of(ROWS, unlikely)
    tables = alone(weight)
    linear_cross_entropy(
        hidden, tables.table(backend=place.backend), targets, filter_eps=eps, memory_budget=SLICE, backend=place.backend
    ).backward()
    rows = hidden[targets >= 0].double()
    named = torch.nn.functional.one_hot(targets[targets >= 0], ITEMS).double()
    likely, updated = (rows @ weight.double().T).softmax(1), rows_of(tables).double()
    assert likely[:, unlikely:].min() > 3e-5
    assert likely[:, unlikely:].max() < 1e-3
    filters = bool(eps) and place.backend == "triton"
    left_out = torch.arange(ITEMS, device=place.device) >= (unlikely if filters else ITEMS)
    expected = ((likely - named).T @ rows / len(rows)).masked_fill(left_out[:, None], 0.0)
    torch.testing.assert_close(weight.double() - updated, expected, rtol=1e-5, atol=1e-6)
    if filters:
        assert torch.equal(updated[unlikely:], weight[unlikely:].double())


# Of Dynamo's, where a tensor that comes in has a history.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_it_keeps_the_whole_gradient(place: Place) -> None:
    hidden, weight = (random_tensor((rows, WIDTH), torch.float32, rows) for rows in (ROWS, ITEMS))

    def call(hidden: Tensor, table: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, table, targets_of(ROWS, ITEMS), memory_budget=SLICE, backend=place.backend)

    eager, compiled = alone(weight), alone(weight)
    call(hidden.clone().requires_grad_(), eager.table(backend=place.backend)).backward()
    torch.compiler.reset()
    by_compiler = torch.compile(call, fullgraph=True, backend="aot_eager")
    by_compiler(hidden.clone().requires_grad_(), compiled.table(backend=place.backend)).backward()
    torch.testing.assert_close(compiled.weights, eager.weights, rtol=1e-5, atol=1e-6)
    assert not torch.equal(compiled.weights, weight.flatten())


def test_a_copy_holds_nothing(place: Place) -> None:
    """What is held goes with the process, as of lookups; the copy updates by what comes after it."""
    tables = alone(random_tensor((ITEMS, WIDTH), torch.float32, 0))
    tables.holds = True
    hidden = random_tensor((ROWS, WIDTH), torch.float32, 1).requires_grad_()

    def backward(of: JointUpdate) -> None:
        linear_cross_entropy(
            hidden, of.table(backend=place.backend), targets_of(ROWS, ITEMS), memory_budget=SLICE, backend=place.backend
        ).backward()

    backward(tables)
    tables.norm()
    assert tables._kept
    copied = pickle.loads(pickle.dumps(tables))
    assert not copied._kept
    assert float(copied.norm()) == 0
    backward(copied)
    for of in (tables, copied):
        # The same slices.
        of.norm()
        assert of.step()
    assert torch.equal(copied.weights, tables.weights)


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(place: Place, dtype: torch.dtype, waits: bool) -> None:
    """Products are of 16 bits, and the gradient of weights of 32 bits is not."""
    hidden, weight = (random_tensor((rows, WIDTH), torch.float32, rows).requires_grad_() for rows in (ROWS, ITEMS))

    def call(table: Tensor, budget: int) -> Tensor:
        with torch.autocast(place.device.type, dtype=dtype):
            return linear_cross_entropy(hidden, table, targets_of(ROWS, ITEMS), memory_budget=budget, backend=place.backend)

    (expected,) = torch.autograd.grad(call(weight, SLICE), weight)
    tables = alone(weight)
    taught(tables, call(tables.table(backend=place.backend), SLICE), waits=waits)
    torch.testing.assert_close(weight.detach() - rows_of(tables), expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_table_of_sixteen_bits(place: Place, dtype: torch.dtype, waits: bool) -> None:
    """Its rows are rounded once, where a whole gradient is rounded before."""
    hidden, weight = (random_tensor((rows, WIDTH), dtype, rows) for rows in (ROWS, ITEMS))
    tables = alone(weight)
    loss = linear_cross_entropy(
        hidden.requires_grad_(), tables.table(backend=place.backend), targets_of(ROWS, ITEMS), memory_budget=SLICE // 2,
        backend=place.backend,
    )  # fmt: skip
    taught(tables, loss, waits=waits)
    exact = weight.double().requires_grad_()
    (expected,) = torch.autograd.grad(linear_cross_entropy(hidden.detach().double(), exact, targets_of(ROWS, ITEMS)), exact)
    steps = torch.finfo(dtype).eps
    torch.testing.assert_close(rows_of(tables).double(), exact.detach() - expected, rtol=steps, atol=4 * steps)


@pytest.mark.parametrize(("use_reentrant", "waits"), [(False, False), (False, True), (True, False)])
def test_under_checkpointing(place: Place, use_reentrant: bool, waits: bool) -> None:
    weight = random_tensor((ITEMS, WIDTH), torch.float32, 0)
    plain, again = alone(weight), alone(weight)

    def call(tables: JointUpdate) -> Callable[[Tensor], Tensor]:
        return lambda hidden: linear_cross_entropy(
            hidden, tables.table(backend=place.backend), targets_of(ROWS, ITEMS), memory_budget=SLICE, backend=place.backend
        )

    hidden = random_tensor((ROWS, WIDTH), torch.float32, 1).requires_grad_()
    taught(plain, call(plain)(hidden), waits=waits)
    loss = checkpoint(call(again), hidden, use_reentrant=use_reentrant)
    if use_reentrant:
        with pytest.raises(RuntimeError, match="reentrant checkpointing"):
            loss.backward()
        return
    taught(again, loss, waits=waits)
    assert torch.equal(again.weights, plain.weights)


def test_a_bias_that_learns_keeps_the_whole_gradient(place: Place) -> None:
    hidden, weight = (random_tensor((rows, WIDTH), torch.float32, rows).requires_grad_() for rows in (ROWS, ITEMS))
    bias = random_tensor((ITEMS,), torch.float32, 3).requires_grad_()

    def call(table: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, table, targets_of(ROWS, ITEMS), bias=bias, memory_budget=SLICE, backend=place.backend)

    of_weight, of_bias = torch.autograd.grad(call(weight), [weight, bias])
    tables = alone(weight)
    call(tables.table(backend=place.backend)).backward()
    torch.testing.assert_close(bias.grad, of_bias, rtol=0, atol=0)
    torch.testing.assert_close(weight.detach() - rows_of(tables), of_weight, rtol=1e-5, atol=1e-6)


def test_a_table_that_has_changed_is_refused(place: Place) -> None:
    tables = alone(random_tensor((ITEMS, WIDTH), torch.float32, 0))
    tables.holds = True
    hidden = random_tensor((ROWS, WIDTH), torch.float32, 1).requires_grad_()
    linear_cross_entropy(
        hidden, tables.table(backend=place.backend), targets_of(ROWS, ITEMS), memory_budget=SLICE, backend=place.backend
    ).backward()
    tables.weights.add_(1)
    before = tables.weights.clone()
    with pytest.raises(RuntimeError) as error:
        tables.step()
    assert str(error.value) == (
        "table: a gradient that its update makes needs it as the loss read it, but it has changed since; update it once for all "
        "losses"
    )
    assert torch.equal(tables.weights, before)
    assert tables.optimizer.step == 0


def check_tables_as_hidden_states(place: Place, loss: Callable[[Tensor, Tensor, bool], Tensor], *, waits: bool) -> None:
    """The update, which reads hidden states, writes to another table first, or to other rows of the same one.

    The loss is of them, of a table, and whether its gradient is the update's.
    """
    layout = BagLayout((ITEMS, ROWS), (16, 16))
    weights = random_tensor((layout.num_elements,), torch.float32, 0)
    tables = JointUpdate(weights.clone(), BagOptimizer("sgd", layout, learning_rate=1.0, device=place.device))
    dense = [of.clone().requires_grad_() for of in layout.views(weights)]
    losses = []
    for of, is_of_update in ((dense, False), ([tables.table(number, backend=place.backend) for number in range(2)], True)):
        losses.append(sum(loss(hidden, of[0], is_of_update) for hidden in (of[1], of[0][:ROWS])))
    gradients = torch.autograd.grad(losses[0], dense)
    tables.holds = waits
    losses[1].backward()
    if waits:
        tables.norm()
        assert tables._kept
        assert tables.step()
    for before, after, gradient in zip(layout.views(weights), layout.views(tables.weights), gradients, strict=True):
        torch.testing.assert_close(before - after, gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("waits", [False, True])
def test_hidden_states_that_are_a_table(place: Place, waits: bool) -> None:
    def loss(hidden: Tensor, table: Tensor, _: bool) -> Tensor:
        return linear_cross_entropy(
            hidden, table, targets_of(ROWS, ITEMS), memory_budget=24 * 16 * 4, reduction="sum", backend=place.backend
        )

    check_tables_as_hidden_states(place, loss, waits=waits)


def test_targets_that_have_changed_are_refused(place: Place) -> None:
    """Before anything is updated: another table, whose loss is as it was."""
    layout = BagLayout((ITEMS, ITEMS), (WIDTH, WIDTH))
    hidden, weights = (random_tensor((rows, WIDTH), torch.float32, rows) for rows in (ROWS, 2 * ITEMS))
    tables = JointUpdate(weights.flatten().clone(), BagOptimizer("sgd", layout, learning_rate=1.0, device=place.device))
    targets = [targets_of(ROWS, ITEMS) for _ in range(2)]
    tables.holds = True
    losses = [
        linear_cross_entropy(
            hidden, tables.table(number, backend=place.backend), target, memory_budget=SLICE, backend=place.backend
        )
        for number, target in enumerate(targets)
    ]
    torch.stack(losses).sum().backward()
    targets[0].zero_()
    with pytest.raises(RuntimeError, match=r"^target: a table's gradient that its update makes needs it as the loss read it"):
        tables.step()
    assert torch.equal(tables.weights, weights.flatten())
    assert tables.optimizer.step == 0


def test_what_is_given_back_is_of_the_table_as_it_is(place: Place) -> None:
    """Replays of a graph write the tensors that its capture handed over, and updates have been between them."""
    tables, other = (alone(random_tensor((ITEMS, WIDTH), torch.float32, 0)) for _ in range(2))
    hidden = random_tensor((ROWS, WIDTH), torch.float32, 1).requires_grad_()
    for of in (tables, other):
        of.holds = True
        linear_cross_entropy(
            hidden, of.table(backend=place.backend), targets_of(ROWS, ITEMS), memory_budget=SLICE, backend=place.backend
        ).backward()
    taken = tables.take()
    # Of the same value.
    tables.weights.add_(0)
    tables.give(taken)
    for of in (tables, other):
        assert of.step()
    assert torch.equal(tables.weights, other.weights)


@pytest.mark.filterwarnings("ignore:invalid value encountered in:RuntimeWarning")
@pytest.mark.parametrize("what", ["hidden", "gradient", "scale"])
def test_what_is_not_finite_changes_nothing(place: Place, what: str) -> None:
    tables = alone(random_tensor((ITEMS, WIDTH), torch.float32, 0), "adam")
    tables.holds = True
    before = tables.weights.clone()
    target = targets_of(ROWS, ITEMS)
    for is_wrong in (True, False):
        hidden = random_tensor((ROWS, WIDTH), torch.float32, 1)
        # In a row that is ignored it is no fault.
        hidden[(0 if is_wrong and what == "hidden" else 2), 3] = torch.inf
        loss = linear_cross_entropy(
            hidden.requires_grad_(), tables.table(backend=place.backend), target, memory_budget=SLICE, backend=place.backend
        )
        (loss * (torch.nan if is_wrong and what == "gradient" else 1.0)).backward()
        scale = torch.tensor(torch.inf if is_wrong and what == "scale" else 1.0, device=place.device)
        assert bool(tables.step(scale)) == (not is_wrong)
        assert torch.equal(tables.weights, before) == is_wrong
        assert tables.optimizer.step == int(not is_wrong)


@pytest.mark.skipif(PLACE.name != "gpu", reason="needs an NVIDIA GPU")
@pytest.mark.gpu
@pytest.mark.parametrize("holds", [False, True])
def test_in_a_captured_graph(place: Place, holds: bool) -> None:
    weight, given = random_tensor((ITEMS, WIDTH), torch.float32, 0), random_tensor((ROWS, WIDTH), torch.float32, 1)
    made = [alone(weight, "rowwise_adagrad") for _ in range(2)]

    def step(tables: JointUpdate) -> Tensor:
        tables.holds = holds
        loss = linear_cross_entropy(
            given.detach().requires_grad_(), tables.table(backend=place.backend), targets, memory_budget=SLICE,
            backend=place.backend,
        )  # fmt: skip
        loss.backward()
        if holds:
            tables.step(1 / tables.norm())
        return loss.detach()

    targets = targets_of(ROWS, ITEMS)
    graph, _ = captured(lambda: [step(made[0])])
    made[0].weights.copy_(weight.flatten())
    made[0].optimizer.first.zero_()
    for number in range(3):
        targets.copy_((targets_of(ROWS, ITEMS) + number).clamp(min=0) % ITEMS)
        graph.replay()
        step(made[1])
    torch.testing.assert_close(made[0].weights, made[1].weights, rtol=1e-5, atol=1e-6)
