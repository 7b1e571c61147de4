"""The gradient of a table in slices, of rows that draw for themselves: a joint update moves as the whole gradient says."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from jagged.ops import BagLayout, BagOptimizer, Draw, JointUpdate, sampled_linear_cross_entropy
from jagged.ops._shared.backends import INTERPRETED
from jagged.ops.embedding_bag.slices import Slices
from jagged.ops.sampled_cross_entropy import api
from jagged.ops.sampled_cross_entropy.apart import ItemSlices
from jagged.ops.sampled_cross_entropy.triton import entries
from tests.graphs import captured
from tests.ops.test_cross_entropy_slices import Largest, check_tables_as_hidden_states
from tests.ops.test_sampled_cross_entropy import inputs_of, negatives_of, targets_of
from tests.ops.test_sampled_pairs import CASES, loss_of_case, rows_of, tables_of
from tests.places import PLACE, Place
from tests.strategies import random_tensor

ITEMS, WIDTH, ROWS = 40, 12, 13
#: Of 24 rows: twelve a slice; under a norm three, of which seven slices wait for the step.
BUDGET = 24 * WIDTH * 4


@pytest.fixture(autouse=True)
def large_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any table is one of which a gradient is not handed over at once, and any number of negatives many."""
    monkeypatch.setattr(api, "AT_ONCE", -1)
    monkeypatch.setattr(api, "MOST_GATHERED", -1)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The slices that are made, by their rows."""
    found: list[tuple[int, int]] = []
    make = ItemSlices.__call__

    def counted(of: ItemSlices, first: int, last: int, behind: int) -> Tensor:
        found.append((first, last))
        return make(of, first, last, behind)

    monkeypatch.setattr(ItemSlices, "__call__", counted)
    return found


def draw_of(count: int = 9, seed: int = 3) -> Draw:
    return Draw("uniform", count, torch.tensor([seed], device=PLACE.device), 1)


def taught(tables: JointUpdate, loss: Tensor, *, waits: bool) -> None:
    """Backward and the update: at once, or behind a norm."""
    tables.holds = waits
    loss.backward()
    if waits:
        tables.norm()
        assert tables.step()


@pytest.mark.parametrize(("rows_per_draw", "waits"), [(1, True), (3, False)])
@pytest.mark.parametrize(("kind", "options"), CASES, ids=lambda x: "-".join(map(str, x.values())) if isinstance(x, dict) else x)
def test_rows_move_by_the_dense_gradient(
    place: Place, unchecked: None, kind: str, options: dict[str, Any], rows_per_draw: int, waits: bool, made: list[Any]
) -> None:
    inputs, call = loss_of_case(place, kind, options, rows_per_draw, memory_budget=BUDGET)
    hidden, weight = (x.detach().clone().requires_grad_() for x in inputs)
    of_hidden, dense = torch.autograd.grad(call(hidden, weight, False), [hidden, weight])
    tables = tables_of(inputs[1])
    taught(tables, call(hidden, tables.table(backend=place.backend), True), waits=waits)
    torch.testing.assert_close(hidden.grad, of_hidden, rtol=0, atol=0)
    moved = inputs[1] - rows_of(tables)
    torch.testing.assert_close(moved, dense, rtol=1e-4, atol=2e-6)
    assert moved.abs().max() > 0.01
    assert len(made) > 3


@given(
    st.integers(0, 9), st.integers(1, 20), st.integers(1, 12), st.sampled_from([1, 5, 16, 300]), st.integers(0, 99),
    st.sampled_from([0, 100, 2_000, None]),
)  # fmt: skip
def test_any_sizes(
    place: Place, unchecked: None, rows: int, count: int, items: int, width: int, seed: int, budget: int | None
) -> None:
    hidden, weight = inputs_of(rows, items, width, torch.float32, seed)
    target = targets_of(rows, items, seed, ignored=0.3)
    weight.requires_grad_()
    losses = []
    tables = tables_of(weight)
    for table, sparse in ((weight, False), (tables.table(backend=place.backend), True)):
        losses.append(
            sampled_linear_cross_entropy(
                hidden, table, target, draw_of(count, seed), sparse=sparse, memory_budget=budget, backend=place.backend
            )
        )
    (dense,) = torch.autograd.grad(losses[0], weight)
    losses[1].backward()
    torch.testing.assert_close(weight.detach() - rows_of(tables), dense, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("ranges", ["one", "several"])
@pytest.mark.parametrize("kind", ["given", "log_uniform"])
def test_items_that_most_rows_draw(
    place: Place, unchecked: None, monkeypatch: pytest.MonkeyPatch, ranges: str, kind: str
) -> None:
    """Their entries are added up in chunks, which begin before and in the middle of a slice; each draw has a correction."""
    rows, count, items = 20, 10, 12
    monkeypatch.setattr(entries, "CHUNK", 16)
    if ranges == "several":
        # Ranges of rows are sorted one after the other, each with chunks of its own.
        monkeypatch.setattr(entries, "_units_at_once", lambda *_: 8)
    hidden, weight = inputs_of(rows, items, WIDTH, torch.float32, 3)
    target = targets_of(rows, items, 5, ignored=0.2)
    weight.requires_grad_()
    tables, negatives = tables_of(weight), negatives_of(kind, target, count, items, 7, 1)
    arguments = {"mask_hits": False, "backend": place.backend, "correction": "negatives"}
    if kind == "given":
        arguments["negative_log_q"] = negatives.arguments["negative_log_q"]
    (dense,) = torch.autograd.grad(sampled_linear_cross_entropy(hidden, weight, target, negatives.given, **arguments), weight)
    table = tables.table(backend=place.backend)
    sampled_linear_cross_entropy(
        hidden, table, target, negatives.given, sparse=True, memory_budget=8 * WIDTH * 4, **arguments
    ).backward()
    torch.testing.assert_close(weight.detach() - rows_of(tables), dense, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize(("budget", "waits"), [(BUDGET, True), (BUDGET, False), (None, True)])
@pytest.mark.parametrize(
    ("kind", "options"),
    [("adam", {"weight_decay": 0.1, "betas": (0.5, 0.9)}), ("sgd", {"max_norm": 0.5}), ("lamb", {"weight_decay": 0.1})],
)
def test_rows_that_nobody_names_stay(
    place: Place, unchecked: None, monkeypatch: pytest.MonkeyPatch, kind: str, options: dict[str, Any], budget: int | None,
    waits: bool,
) -> None:  # fmt: skip
    """As where the gradient of the drawn rows is made at once: decay, moments and longest rows are of rows that are named."""
    hidden, weight = inputs_of(5, ITEMS, WIDTH, torch.float32, 3)
    made = []
    for gathered in (-1, 10_000):
        monkeypatch.setattr(api, "MOST_GATHERED", gathered)
        tables = tables_of(weight, kind, **options)
        for step in range(2):
            ids = torch.arange(12 * step, 12 * step + 15, device=place.device).view(5, 3)
            target = torch.tensor([1, 2, -100, 30, 31], device=place.device) + step
            loss = sampled_linear_cross_entropy(
                hidden, tables.table(backend=place.backend), target, ids, sparse=True, memory_budget=budget, backend=place.backend
            )
            taught(tables, loss, waits=waits)
        made.append(tables)
    torch.testing.assert_close(made[0].weights, made[1].weights, rtol=1e-4, atol=1e-6)
    moved = [(rows_of(of) != weight).any(1) for of in made]
    assert torch.equal(*moved)
    assert not moved[0].all()


@pytest.mark.parametrize("waits", [False, True])
def test_hidden_states_that_are_a_table(place: Place, unchecked: None, waits: bool) -> None:
    def loss(hidden: Tensor, table: Tensor, is_of_update: bool) -> Tensor:
        return sampled_linear_cross_entropy(
            hidden, table, targets_of(ROWS, ITEMS, 5), draw_of(), sparse=is_of_update, memory_budget=24 * 16 * 4, reduction="sum",
            backend=place.backend,
        )  # fmt: skip

    check_tables_as_hidden_states(place, loss, waits=waits)


@pytest.mark.parametrize(("budget", "again"), [(None, 0), (ITEMS * WIDTH * 4, 0), (BUDGET, 19)])
def test_slices_wait_for_the_step(place: Place, made: list[Any], budget: int | None, again: int) -> None:
    """Where all have room none is made again; else those are that had none."""
    hidden, weight = inputs_of(ROWS, ITEMS, WIDTH, torch.float32, 3)
    tables, dense = tables_of(weight), weight.clone().requires_grad_()
    target = targets_of(ROWS, ITEMS, 5)
    sampled_linear_cross_entropy(hidden, dense, target, draw_of(), backend=place.backend).backward()
    assert dense.grad is not None
    tables.holds = True
    sampled_linear_cross_entropy(
        hidden, tables.table(backend=place.backend), target, draw_of(), sparse=True, memory_budget=budget, backend=place.backend
    ).backward()
    assert made == []
    (held,) = tables._held
    # Nothing of forward stays for it but these.
    assert not any(of.requires_grad for of in held.source._x if isinstance(of, Tensor))  # type: ignore[union-attr]
    torch.testing.assert_close(tables.norm(), dense.grad.norm(), rtol=1e-4, atol=0)
    once = len(made)
    assert (once == 1) == (again == 0)
    assert sorted(row for first, last in made for row in range(first, last)) == list(range(ITEMS))
    tables.step(torch.tensor(0.5, device=place.device))
    assert sum(last - first for first, last in made[once:]) == again
    torch.testing.assert_close(weight - rows_of(tables), dense.grad / 2, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("waits", [False, True])
def test_no_gradient_of_the_table_is_made(place: Place, waits: bool) -> None:
    # A width that kernels take as it is.
    items, width = 1_000, 16
    hidden, weight = inputs_of(4, items, width, torch.float32, 3)
    tables = tables_of(weight, "rowwise_adagrad")
    with Largest() as seen:
        taught(
            tables,
            sampled_linear_cross_entropy(
                hidden, tables.table(backend=place.backend), targets_of(4, items, 5), draw_of(), sparse=True,
                memory_budget=items * width, backend=place.backend,
            ),
            waits=waits,
        )  # fmt: skip
    # A slice of half a quarter, or of an eighth of it, beside the lookups of its rows; a float64 sum in PyTorch.
    assert seen.largest <= items * width // 8
    assert (rows_of(tables) != weight).any()


def test_small_tables_and_few_negatives(place: Place, made: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A small table's gradient is handed over at once; few rows of a table are in factors."""
    hidden, weight = inputs_of(4, ITEMS, WIDTH, torch.float32, 3)
    target = targets_of(4, ITEMS, 5)
    nbytes = ITEMS * WIDTH * 4
    for at_once, budget, gathered, is_in_slices in (
        (nbytes, None, -1, False), (nbytes - 1, None, -1, True), (nbytes, nbytes, -1, False), (nbytes, nbytes - 1, -1, True),
        (-1, None, 3, False),
    ):  # fmt: skip
        monkeypatch.setattr(api, "AT_ONCE", at_once)
        monkeypatch.setattr(api, "MOST_GATHERED", gathered)
        tables = tables_of(weight)
        tables.holds = True
        table = tables.table(backend=place.backend)
        sampled_linear_cross_entropy(
            hidden, table, target, draw_of(), sparse=True, memory_budget=budget, backend=place.backend
        ).backward()
        assert [isinstance(of, Slices) for of in tables._held] == [is_in_slices]


def trained(kind: Any, place: Place, *, apart: bool, holds: bool) -> JointUpdate:
    """Tables after two updates, by lookups of two features, a head, and another one of rows that share a draw."""
    layout = BagLayout((9, ITEMS), (5, WIDTH), (1, 0, 1), (True, False, False), (False, False, True))
    optimizer = BagOptimizer(kind, layout, learning_rate=0.1, device=place.device)
    tables = JointUpdate(random_tensor((layout.num_elements,), torch.float32, 0), optimizer)
    tables.holds = holds
    for step in range(2):
        ids = torch.arange(18, device=place.device) * (step + 3) % 9
        offsets = torch.tensor([0, 2, 4, 6, 9, 9, 12, 12, 15, 18], device=place.device)
        read = tables.embedding_bags(layout, ids, offsets, backend=place.backend)
        hidden = random_tensor((ROWS, WIDTH), torch.float32, step) + read[:WIDTH]
        loss = read.square().sum() / 9
        for negatives in (draw_of(9, step), Draw("uniform", 4, torch.tensor([5], device=place.device), None)):
            loss = loss + sampled_linear_cross_entropy(
                hidden, tables.table(1, backend=place.backend), targets_of(ROWS, ITEMS, step), negatives, sparse=apart,
                memory_budget=BUDGET, backend=place.backend,
            )  # fmt: skip
        loss.backward()
        if holds:
            assert tables.step(1 / tables.norm())
    return tables


@pytest.mark.parametrize("holds", [False, True])
@pytest.mark.parametrize("kind", ["sgd", "rowwise_adagrad", "adam"])
def test_lookups_of_the_rows_are_in_the_same_update(
    place: Place, unchecked: None, made: list[Any], kind: str, holds: bool
) -> None:
    tables, whole = (trained(kind, place, apart=apart, holds=holds) for apart in (True, False))
    assert made
    torch.testing.assert_close(tables.weights, whole.weights, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(tables.optimizer.first, whole.optimizer.first, rtol=1e-4, atol=1e-6)
    assert int(tables.optimizer.step) == int(whole.optimizer.step) == 2


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(place: Place, unchecked: None, dtype: torch.dtype, waits: bool) -> None:
    """Hidden states and the table are rounded as for the losses, and sums are not."""
    if INTERPRETED and dtype == torch.bfloat16 and place.backend == "triton":
        pytest.skip("the interpreter cuts what it rounds to bfloat16")
    # Logits of several units, which are other ones where weights are not rounded.
    hidden, weight = (5 * of for of in inputs_of(ROWS, ITEMS, 16, torch.float32, 3))
    target = targets_of(ROWS, ITEMS, 5)
    tables = tables_of(weight)
    with torch.autocast(place.device.type, dtype=dtype):
        loss = sampled_linear_cross_entropy(
            hidden, tables.table(backend=place.backend), target, draw_of(), sparse=True, memory_budget=BUDGET,
            backend=place.backend,
        )  # fmt: skip
    taught(tables, loss, waits=waits)
    exact = [hidden.to(dtype).double(), weight.to(dtype).double().requires_grad_()]
    sampled_linear_cross_entropy(*exact, target, draw_of(), backend="torch").backward()
    assert exact[1].grad is not None
    error = ((weight - rows_of(tables)) - exact[1].grad).norm() / exact[1].grad.norm()
    # Without rounded weights it is 1e-4 (float16) and 1e-3.
    assert error < 3e-5, f"error {error:.2e}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_table_of_sixteen_bits(place: Place, unchecked: None, dtype: torch.dtype) -> None:
    """Gradients of its rows are sums in float32, and its weights are rounded once."""
    hidden, weight = inputs_of(ROWS, ITEMS, 16, dtype, 3)
    target = targets_of(ROWS, ITEMS, 5)
    tables = tables_of(weight)
    sampled_linear_cross_entropy(
        hidden, tables.table(backend=place.backend), target, draw_of(), sparse=True, memory_budget=BUDGET, backend=place.backend
    ).backward()
    exact = [hidden.double(), weight.double().requires_grad_()]
    sampled_linear_cross_entropy(*exact, target, draw_of(), backend="torch").backward()
    assert exact[1].grad is not None
    error = (rows_of(tables).double() - (exact[1].detach() - exact[1].grad)).abs()
    assert (error <= torch.finfo(dtype).eps * (exact[1].abs() + exact[1].grad.abs())).all()


@pytest.mark.parametrize(("use_reentrant", "waits"), [(False, False), (False, True), (True, False)])
def test_under_checkpointing(place: Place, unchecked: None, use_reentrant: bool, waits: bool) -> None:
    hidden, weight = inputs_of(6, ITEMS, WIDTH, torch.float32, 3)
    target, moved = targets_of(6, ITEMS, 5), []
    for is_again in (False, True):
        tables, rows = tables_of(weight), hidden.clone().requires_grad_()

        def loss_of(rows: Tensor, tables: JointUpdate = tables) -> Tensor:
            table = tables.table(backend=place.backend)
            return sampled_linear_cross_entropy(
                rows, table, target, draw_of(), sparse=True, memory_budget=BUDGET, backend=place.backend
            )

        if is_again and use_reentrant:
            with pytest.raises(RuntimeError, match="cannot be told when reentrant checkpointing is done"):
                checkpoint(loss_of, rows, use_reentrant=True).backward()
            assert torch.equal(rows_of(tables), weight)
            return
        taught(tables, checkpoint(loss_of, rows, use_reentrant=False) if is_again else loss_of(rows), waits=waits)
        moved.append(rows_of(tables))
    assert torch.equal(*moved)


@pytest.mark.parametrize("what", ["hidden", "statistic", "gradient", "scale"])
def test_what_is_not_finite_changes_nothing(place: Place, unchecked: None, what: str) -> None:
    hidden, weight = inputs_of(6, ITEMS, WIDTH, torch.float32, 3)
    target = targets_of(6, ITEMS, 5, ignored=0.3)
    # What stands in a row that does not count is nobody's, nor in one whose target is no item.
    hidden[target == -100] = torch.nan
    is_one, no_item = (target != -100).nonzero()[:2, 0]
    target[no_item], hidden[no_item] = ITEMS + 3, torch.nan
    weights = (target < ITEMS).float()
    for is_bad in (False, True):
        given_, table_of = hidden.clone(), weight.clone()
        if is_bad and what == "hidden":
            given_[is_one, 2] = torch.nan
        if is_bad and what == "statistic":
            table_of[:] = torch.nan
        tables = tables_of(table_of)
        tables.holds = True
        loss = sampled_linear_cross_entropy(
            given_.requires_grad_(), tables.table(backend=place.backend), target, draw_of(), sparse=True, memory_budget=BUDGET,
            reduction="none", backend=place.backend,
        )  # fmt: skip
        (torch.where(weights > 0, loss, 0).sum() * (torch.nan if is_bad and what == "gradient" else 1)).backward()
        assert bool(tables.is_finite()) == (not is_bad or what == "scale")
        scale = torch.tensor(torch.nan if is_bad and what == "scale" else 1.0, device=place.device)
        assert bool(tables.step(scale)) == (not is_bad)
        if is_bad:
            torch.testing.assert_close(rows_of(tables), table_of, rtol=0, atol=0, equal_nan=True)
            assert int(tables.optimizer.step) == 0


def test_a_table_that_has_changed_is_refused(place: Place, unchecked: None) -> None:
    hidden, weight = inputs_of(6, ITEMS, WIDTH, torch.float32, 3)
    tables = tables_of(weight)
    tables.holds = True
    sampled_linear_cross_entropy(
        hidden, tables.table(backend=place.backend), targets_of(6, ITEMS, 5), draw_of(), sparse=True, memory_budget=BUDGET,
        backend=place.backend,
    ).backward()  # fmt: skip
    tables.weights.add_(1)
    with pytest.raises(RuntimeError, match="a gradient that its update makes needs it as the loss read it, but it has changed"):
        tables.step()


def test_a_seed_may_change_before_the_update(place: Place, unchecked: None) -> None:
    """As it does from batch to batch where several are one update."""
    hidden, weight = inputs_of(6, ITEMS, WIDTH, torch.float32, 3)
    target, seed = targets_of(6, ITEMS, 5), torch.tensor([3], device=place.device)
    tables, dense = tables_of(weight), weight.clone().requires_grad_()
    tables.holds = True
    for _ in range(2):
        for table, sparse in ((tables.table(backend=place.backend), True), (dense, False)):
            sampled_linear_cross_entropy(
                hidden, table, target, Draw("uniform", 9, seed, 1), sparse=sparse, memory_budget=BUDGET, backend=place.backend
            ).backward()
        seed.add_(1)
    tables.step()
    assert dense.grad is not None
    torch.testing.assert_close(weight - rows_of(tables), dense.grad, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("what", ["target", "hidden", "ids"])
def test_what_has_been_written_to_is_refused(place: Place, unchecked: None, what: str) -> None:
    hidden, weight = inputs_of(6, ITEMS, WIDTH, torch.float32, 3)
    ids = torch.arange(18, device=place.device).view(6, 3)
    target = targets_of(6, ITEMS, 5)
    tables = tables_of(weight)
    tables.holds = True
    sampled_linear_cross_entropy(
        hidden, tables.table(backend=place.backend), target, ids, sparse=True, memory_budget=BUDGET, backend=place.backend
    ).backward()
    {"target": target, "hidden": hidden, "ids": ids}[what].zero_()
    with pytest.raises(RuntimeError) as caught:
        tables.norm()
    assert str(caught.value) == (
        f"{what}: a table's gradient that its update makes needs it as the loss read it, but it has been written to in place "
        "since backward; update the table before, or give the loss a tensor of its own"
    )
    assert torch.equal(rows_of(tables), weight)


def test_what_is_given_back_is_sorted_anew(place: Place, unchecked: None) -> None:
    """A replay writes other rows, targets and numbers to the tensors that were taken."""
    hidden, weight = inputs_of(ROWS, ITEMS, WIDTH, torch.float32, 3)
    target, seed = targets_of(ROWS, ITEMS, 5), torch.tensor([3], device=place.device)
    tables = tables_of(weight)

    def loss_of(of: JointUpdate) -> Tensor:
        return sampled_linear_cross_entropy(
            hidden, of.table(backend=place.backend), target, Draw("uniform", 9, seed, 1), sparse=True, memory_budget=BUDGET,
            backend=place.backend,
        )  # fmt: skip

    tables.holds = True
    loss_of(tables).backward()
    taken = tables.take()
    (held,) = taken.calls
    gradients = []
    for number in (0, 1):
        # Draws and targets of another batch, in the same memory; what was found of rows is as it was.
        held.source._x.seed.add_(number)
        target.copy_((target + number) % ITEMS)
        before = rows_of(tables).clone()
        expected = ItemSlices(held.source._x, held.source._o, None, place.backend)(0, ITEMS, 0)
        gradients.append(expected)
        tables.give(taken)
        tables.norm()
        tables.step()
        torch.testing.assert_close(before - rows_of(tables), expected, rtol=1e-4, atol=1e-6)
    assert (gradients[0] - gradients[1]).abs().max() > 0.01


@pytest.mark.skipif(PLACE.name != "gpu", reason="needs an NVIDIA GPU")
@pytest.mark.gpu
@pytest.mark.parametrize("waits", [False, True])
def test_in_a_captured_graph(place: Place, unchecked: None, waits: bool) -> None:
    hidden, weight = inputs_of(ROWS, ITEMS, 16, torch.float32, 3)
    target, seed = targets_of(ROWS, ITEMS, 5), torch.tensor([3], device=place.device)
    both = [tables_of(weight, "rowwise_adagrad") for _ in range(2)]

    def step(tables: JointUpdate) -> Tensor:
        tables.holds = waits
        loss: Tensor = sampled_linear_cross_entropy(
            hidden.detach().requires_grad_(), tables.table(backend=place.backend), target, Draw("uniform", 9, seed, 1),
            sparse=True, memory_budget=BUDGET, backend=place.backend,
        )  # fmt: skip
        loss.backward()
        if waits:
            tables.step(1 / tables.norm())
        return loss.detach()

    graph, _ = captured(lambda: [step(both[0])])
    both[0].weights.copy_(weight.flatten())
    both[0].optimizer.first.zero_()
    for number in range(3):
        target.copy_((targets_of(ROWS, ITEMS, 5) + number) % ITEMS)
        seed.fill_(number)
        graph.replay()
        step(both[1])
    torch.testing.assert_close(both[0].weights, both[1].weights, rtol=1e-5, atol=1e-6)


def test_a_budget_is_a_number_of_bytes(place: Place) -> None:
    hidden, weight = inputs_of(2, ITEMS, WIDTH, torch.float32, 3)
    call: Callable[..., Any] = sampled_linear_cross_entropy
    for budget in (-1, 2.5e6):
        told = f"memory_budget: expected a number of bytes, or None for as many as it takes, got {budget}"
        with pytest.raises(ValueError, match=f"^{re.escape(told)}$"):
            call(hidden, weight, targets_of(2, ITEMS, 5), draw_of(), memory_budget=budget)


def test_several_tables_without_a_budget(place: Place, unchecked: None, made: list[Any]) -> None:
    """There is room for the gradients of all, each made once."""
    layout = BagLayout((ITEMS, 30), (WIDTH, 8))
    weights = random_tensor((layout.num_elements,), torch.float32, 0)
    tables = JointUpdate(weights.clone(), BagOptimizer("sgd", layout, learning_rate=1.0, device=place.device))
    dense = [of.clone().requires_grad_() for of in layout.views(weights)]
    tables.holds = True
    for sparse in (False, True):
        losses = []
        for number, (rows, width) in enumerate(zip(layout.rows, layout.widths, strict=True)):
            hidden = random_tensor((ROWS, width), torch.float32, number)
            table = tables.table(number, backend=place.backend) if sparse else dense[number]
            losses.append(
                sampled_linear_cross_entropy(
                    hidden, table, targets_of(ROWS, rows, 5), draw_of(), sparse=sparse, backend=place.backend
                )
            )
        torch.stack(losses).sum().backward()
    tables.step(1 / tables.norm())
    assert sorted(made) == [(0, 30), (0, ITEMS)]
    gradients = [of.grad for of in dense if of.grad is not None]
    norm = torch.cat([of.flatten() for of in gradients]).norm()
    for moved, before, gradient in zip(layout.views(tables.weights), layout.views(weights), gradients, strict=True):
        torch.testing.assert_close(before - moved, gradient / norm, rtol=1e-4, atol=2e-6)


def test_rows_that_were_read_join_a_whole_gradient(place: Place, unchecked: None) -> None:
    """Behind it, where kernels leave room for them."""
    hidden, weight = inputs_of(6, ITEMS, 16, torch.float32, 3)
    tables = tables_of(weight)
    tables.holds = True
    listed, ids = BagLayout((ITEMS,), (16,), sequences=(True,)), torch.tensor([1, 2, 3, 1], device=place.device)
    rows = tables.embedding_bags(listed, ids, torch.tensor([0, 4], device=place.device), backend=place.backend).view(-1, 16)
    loss = sampled_linear_cross_entropy(
        hidden, tables.table(backend=place.backend), targets_of(6, ITEMS, 5), draw_of(), sparse=True, backend=place.backend
    )
    (loss + rows.sum()).backward()
    (source,) = (of.source for of in tables._held if isinstance(of, Slices))
    alone = source(0, ITEMS, 0)
    tables.norm()
    (kept,) = tables._kept.values()
    begin = kept.data_ptr()
    tables.step()
    expected = alone.index_add(0, ids, torch.ones(4, 16, device=place.device))
    torch.testing.assert_close(weight - rows_of(tables), expected, rtol=1e-4, atol=2e-6)
    behind = kept.untyped_storage().nbytes() - kept.nbytes
    assert begin == kept.data_ptr()
    assert behind == (0 if place.backend == "torch" else 4 * 16 * 4)
