"""The gradient of a table in factors: what a joint update of drawn items makes of it is what the dense gradient says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from jagged.ops import BagLayout, BagOptimizer, Draw, JointUpdate, sampled_linear_cross_entropy
from jagged.ops.sampled_cross_entropy import apart
from tests.ops.test_sampled_cross_entropy import inputs_of, jagged, lists_of, negatives_of, targets_of
from tests.places import PLACE, Place

ITEMS, WIDTH = 40, 12
CASES: list[tuple[str, dict[str, Any]]] = [
    ("uniform", {}),
    ("given", {"correction": "both", "scale": 2.5}),
    ("log_uniform", {"correction": "negatives", "renormalise": True}),
    ("popularity", {"correction": "both", "positive": "outside"}),
    ("permuted", {"loss": "refined", "correction": "negatives", "mask_hits": False}),
    ("uniform", {"loss": "bce", "scale": 1.5}),
    ("given", {"loss": "gbce", "gbce_t": 0.5}),
    ("uniform", {"filter_eps": 0.05}),
    ("log_uniform", {"loss": "refined", "correction": "negatives", "filter_eps": 0.02, "reduction": "sum"}),
]


def tables_of(weight: Tensor, kind: str = "sgd", **options: Any) -> JointUpdate:
    layout = BagLayout((weight.shape[0],), (weight.shape[1],))
    optimizer = BagOptimizer(kind, layout, learning_rate=1.0, device=weight.device, **options)  # type: ignore[arg-type]
    return JointUpdate(weight.detach().clone().flatten(), optimizer)


def rows_of(tables: JointUpdate) -> Tensor:
    return tables.optimizer.layout.views(tables.weights)[0]


def both(place: Place, inputs: list[Tensor], call: Any) -> tuple[Tensor, Tensor, JointUpdate]:
    """Return gradients of hidden states and of the table, dense, and a table after one step of SGD by a rate of 1."""
    hidden, weight = (x.detach().clone().requires_grad_() for x in inputs)
    of_hidden, of_weight = torch.autograd.grad(call(hidden, weight, False), [hidden, weight])
    tables = tables_of(inputs[1])
    call(hidden, tables.table(backend=place.backend), True).backward()
    torch.testing.assert_close(hidden.grad, of_hidden, rtol=0, atol=0)
    return of_hidden, of_weight, tables


def loss_of_case(place: Place, kind: str, options: dict[str, Any], rows_per_draw: int, **more: Any) -> tuple[list[Tensor], Any]:
    """Return hidden states and a table, and of these two, and whether gradients are sparse, a loss with lists and weights."""
    inputs = inputs_of(13, ITEMS, WIDTH, torch.float32, 3)
    target = targets_of(13, ITEMS, 5, ignored=0.2)
    negatives = negatives_of(kind, target, 7, ITEMS, 7, rows_per_draw)
    weights = torch.rand(13, generator=torch.Generator().manual_seed(1)).to(place.device)
    known = {"both": ("negative_log_q", "target_log_q"), "negatives": ("negative_log_q",)}.get(
        options.get("correction", "none"), ()
    )
    arguments = {name: value for name, value in negatives.arguments.items() if name in known}
    lse_too = options.get("loss", "softmax") in ("softmax", "refined")

    def call(hidden: Tensor, table: Tensor, sparse: bool) -> Tensor:
        found = sampled_linear_cross_entropy(
            hidden, table, target, negatives.given, exclude=jagged(lists_of(13, ITEMS, 9)), sample_weight=weights,
            sparse=sparse, return_lse=lse_too, backend=place.backend, **arguments, **options, **more,
        )  # fmt: skip
        # The log-sum-exp has a gradient of its own.
        return found[0] + (found[1] * weights).sum() if lse_too else found

    return inputs, call


@pytest.mark.parametrize("rows_per_draw", [1, 3])
@pytest.mark.parametrize(("kind", "options"), CASES, ids=lambda x: "-".join(map(str, x.values())) if isinstance(x, dict) else x)
def test_rows_move_by_the_dense_gradient(
    place: Place, unchecked: None, kind: str, options: dict[str, Any], rows_per_draw: int
) -> None:
    inputs, call = loss_of_case(place, kind, options, rows_per_draw)
    _, dense, tables = both(place, inputs, call)
    moved = inputs[1] - rows_of(tables)
    torch.testing.assert_close(moved, dense, rtol=1e-4, atol=2e-6)
    assert moved.abs().max() > 0.01


@given(rows=st.integers(0, 9), count=st.integers(1, 20), width=st.sampled_from([1, 5, 16, 300]), seed=st.integers(0, 99))
def test_any_number_of_rows(place: Place, unchecked: None, rows: int, count: int, width: int, seed: int) -> None:
    inputs = inputs_of(rows, ITEMS, width, torch.float32, seed)
    target, draw = (
        targets_of(rows, ITEMS, seed, ignored=0.3),
        Draw("uniform", count, torch.tensor([seed], device=PLACE.device), 1),
    )

    def call(hidden: Tensor, table: Tensor, sparse: bool) -> Tensor:
        return sampled_linear_cross_entropy(hidden, table, target, draw, sparse=sparse, backend=place.backend)

    _, dense, tables = both(place, inputs, call)
    torch.testing.assert_close(inputs[1] - rows_of(tables), dense, rtol=1e-4, atol=2e-6)


def test_what_no_row_names_is_left_alone(place: Place, unchecked: None) -> None:
    """Adam moves a row that is named, also by a gradient of 0; targets among the negatives and listed items are not named."""
    ids = torch.tensor([[3, 4, -1], [5, 6, 7], [8, 9, 9]], device=place.device)
    target = torch.tensor([4, -100, 2], device=place.device)
    hidden, weight = inputs_of(3, ITEMS, WIDTH, torch.float32, 3)
    lists = jagged([[3], [], [8]])
    tables = tables_of(weight, "adam", betas=(0.5, 0.9))
    loss = sampled_linear_cross_entropy(
        hidden, tables.table(backend=place.backend), target, ids, exclude=lists, sparse=True, backend=place.backend
    )
    loss.backward()
    named = (rows_of(tables) != weight).any(1).nonzero().flatten().tolist()
    # Row 0 has no negative that is left, so that its loss, and its target's gradient, are 0.
    assert named == [2, 9]
    counted = (tables.optimizer.first.view(ITEMS, WIDTH) != 0).any(1).nonzero().flatten().tolist()
    assert counted == [2, 9]


def test_no_gradient_of_rows_is_made(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The update gets as many numbers as there are pairs and hidden states have; with shared draws, rows."""
    hidden, weight = inputs_of(16, ITEMS, WIDTH, torch.float32, 3)
    target = targets_of(16, ITEMS, 5)
    for rows_per_draw, expected in ((1, (16, WIDTH)), (16, (5 + 16, WIDTH))):
        tables, handed = tables_of(weight), []
        hand_over = tables._hand_over
        monkeypatch.setattr(tables, "_hand_over", lambda call, go=hand_over, to=handed: (to.append(call), go(call)))
        draw = Draw("uniform", 5, torch.tensor([3], device=place.device), rows_per_draw)
        table = tables.table(backend=place.backend)
        sampled_linear_cross_entropy(hidden, table, target, draw, sparse=True, backend=place.backend).backward()
        (call,) = handed
        assert tuple(call.lookups.grad.shape) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(place: Place, unchecked: None, dtype: torch.dtype) -> None:
    """Under autocast hidden states are rounded, and sums are not."""
    hidden, weight = inputs_of(12, ITEMS, 16, torch.float32, 3)
    target, draw = targets_of(12, ITEMS, 5), Draw("uniform", 9, torch.tensor([3], device=place.device), 1)
    tables = tables_of(weight)
    with torch.autocast(place.device.type, dtype=dtype):
        loss = sampled_linear_cross_entropy(
            hidden, tables.table(backend=place.backend), target, draw, sparse=True, backend=place.backend
        )
    loss.backward()
    exact = [hidden.to(dtype).double(), weight.to(dtype).double().requires_grad_()]
    sampled_linear_cross_entropy(*exact, target, draw, backend="torch").backward()
    assert exact[1].grad is not None
    error = ((weight - rows_of(tables)) - exact[1].grad).norm() / exact[1].grad.norm()
    assert error < torch.finfo(dtype).eps, f"error {error:.2e}"


def test_lookups_and_pairs_are_one_update(place: Place, unchecked: None) -> None:
    """Row-wise Adagrad's state after one update is the mean of the squares of the sum of all gradients."""
    hidden, weight = inputs_of(6, ITEMS, WIDTH, torch.float32, 3)
    ids = torch.tensor([1, 2, 3, 1, 5, 2], device=place.device)
    target, draw = targets_of(6, ITEMS, 5), Draw("uniform", 4, torch.tensor([3], device=place.device), 1)

    def loss_of(rows: Tensor, table: Tensor, sparse: bool) -> Tensor:
        return sampled_linear_cross_entropy(rows * hidden, table, target, draw, sparse=sparse, backend=place.backend)

    dense = weight.clone().requires_grad_()
    loss_of(dense[ids], dense, False).backward()
    assert dense.grad is not None
    tables = tables_of(weight, "rowwise_adagrad", eps=1e-8)
    listed = BagLayout((ITEMS,), (WIDTH,), sequences=(True,))
    ends = torch.tensor([0, 6], device=place.device)
    for calls in (1, 2):
        rows = tables.embedding_bags(listed, ids, ends, backend=place.backend).view(-1, WIDTH)
        loss_of(rows, tables.table(backend=place.backend), True).backward()
        if calls == 1:
            expected = dense.grad.square().mean(1)
            torch.testing.assert_close(tables.optimizer.first, expected, rtol=1e-4, atol=1e-9)
            moved = weight - dense.grad / (expected.sqrt() + 1e-8)[:, None]
            torch.testing.assert_close(rows_of(tables), moved, rtol=1e-3, atol=1e-4)


def test_a_table_of_no_joint_update_has_a_sparse_gradient(place: Place) -> None:
    """So has a product of one."""
    weight = inputs_of(4, ITEMS, WIDTH, torch.float32, 3)[1]
    leaf = weight.clone().requires_grad_()
    assert apart._taker(leaf, "take_pairs") is None
    assert apart._taker(leaf * 2, "take_pairs") is None
    tables = tables_of(weight)
    assert apart._taker(tables.table(), "take_pairs") is not None
    with torch.no_grad():
        assert apart._taker(tables.table(), "take_pairs") is None


def test_two_heads_over_one_table(place: Place, unchecked: None) -> None:
    """One hands factors over, one a dense gradient, a third rows of a shared draw: one update by the sum of all."""
    hidden, weight = inputs_of(6, ITEMS, WIDTH, torch.float32, 3)
    target = targets_of(6, ITEMS, 5)
    own, shared = (Draw("uniform", 4, torch.tensor([seed], device=place.device), per) for seed, per in ((3, 1), (4, None)))

    def loss_of(table: Tensor, sparse: bool) -> Tensor:
        first = sampled_linear_cross_entropy(hidden, table, target, own, sparse=sparse, backend=place.backend)
        second = sampled_linear_cross_entropy(hidden, table, target, shared, backend=place.backend)
        return first + second + (hidden @ table.T).logsumexp(1).mean()

    dense = weight.clone().requires_grad_()
    loss_of(dense, False).backward()
    assert dense.grad is not None
    tables = tables_of(weight, "rowwise_adagrad", eps=1e-8)
    loss_of(tables.table(backend=place.backend), True).backward()
    torch.testing.assert_close(tables.optimizer.first, dense.grad.square().mean(1), rtol=1e-4, atol=1e-9)
    assert int(tables.optimizer.step) == 1


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_under_checkpointing(place: Place, unchecked: None, use_reentrant: bool) -> None:
    """The loss that is computed again hands over once; the reentrant kind, whose calls of backward are several, is refused."""
    hidden, weight = inputs_of(6, ITEMS, WIDTH, torch.float32, 3)
    target, draw = targets_of(6, ITEMS, 5), Draw("uniform", 4, torch.tensor([3], device=place.device), 1)
    moved = []
    for is_again in (False, True):
        tables, rows = tables_of(weight), hidden.clone().requires_grad_()

        def loss_of(rows: Tensor, tables: JointUpdate = tables) -> Tensor:
            table = tables.table(backend=place.backend)
            return sampled_linear_cross_entropy(rows, table, target, draw, sparse=True, backend=place.backend)

        if is_again and use_reentrant:
            with pytest.raises(RuntimeError, match="cannot be told when reentrant checkpointing is done"):
                checkpoint(loss_of, rows, use_reentrant=True).backward()
            assert torch.equal(rows_of(tables), weight)
            return
        (checkpoint(loss_of, rows, use_reentrant=False) if is_again else loss_of(rows)).backward()
        moved.append(rows_of(tables))
    assert torch.equal(*moved)
