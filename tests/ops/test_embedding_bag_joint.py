"""One update for all lookups that a call of backward reaches."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.checkpoint import checkpoint

from jagged.ops import BagLayout, BagOptimizer, JointUpdate, embedding_bags, sampled_linear_cross_entropy
from tests.gathering import GATHERINGS, gathering
from tests.graphs import captured
from tests.places import PLACE, Place
from tests.strategies import random_tensor

ROWS, WIDTHS = (9, 40), (4, 5)
#: Two pooled features, one of them a mean; two sequences of one table; a sequence beside a pooled feature of the other table.
POOLED = BagLayout(ROWS, WIDTHS, (0, 1), (False, True))
LISTED = BagLayout(ROWS, WIDTHS, (0, 0), sequences=(True, True))
MIXED = BagLayout(ROWS, WIDTHS, (1, 0), sequences=(False, True))
LAYOUTS = (POOLED, LISTED, MIXED)
BAGS = 3


def lookups_of(layout: BagLayout, seed: int, dtype: torch.dtype = torch.int64) -> tuple[Tensor, Tensor]:
    """Ids and offsets of three samples; rows come again and again, the last third of each table is never read."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, (layout.num_features, BAGS), generator=generator)
    ids = [
        torch.randint(2 * layout.rows[table] // 3, (int(of.sum()),), generator=generator)
        for table, of in zip(layout.tables or (), lengths, strict=True)
    ]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.flatten().cumsum(0)])
    return torch.cat(ids).to(dtype).to(PLACE.device), offsets.to(dtype).to(PLACE.device)


def made(kind: Any = "sgd", weights: Tensor | None = None, **options: Any) -> JointUpdate:
    weights = random_tensor((POOLED.num_elements,), torch.float32, 0) if weights is None else weights.clone()
    return JointUpdate(weights, BagOptimizer(kind, POOLED, learning_rate=0.125, device=PLACE.device), **options)


def samples_of(ids: Tensor, place: int) -> Tensor | None:
    """Weights of the lookups of one of the calls: of sums, and not of all."""
    return random_tensor((ids.shape[0],), torch.float32, 7).abs() + 0.5 if place == 2 else None


def losses(found: Sequence[Tensor]) -> Tensor:
    return torch.stack([(of * of.detach().sign() + of.square() / 2).sum() for of in found]).sum()


def look_up(tables: JointUpdate, seed: int, layouts: Sequence[BagLayout] = LAYOUTS) -> list[Tensor]:
    outputs = []
    for place, layout in enumerate(layouts):
        ids, offsets = lookups_of(layout, seed + place, (torch.int64, torch.int32)[place % 2])
        samples = samples_of(ids, place) if layout is MIXED else None
        outputs.append(tables.embedding_bags(layout, ids, offsets, per_sample_weights=samples, backend=PLACE.backend))
    return outputs


def by_hand(kind: str, weights: Tensor, steps: int) -> Tensor:
    """The tables after steps of which each has one dense gradient, by torch's own optimizers on the rows that were read."""
    table = weights.double().clone()
    states = [torch.zeros_like(table), torch.zeros_like(table)]
    for step in range(steps):
        leaf, read = table.clone().requires_grad_(), torch.zeros_like(table)
        outputs = []
        for place, layout in enumerate(LAYOUTS):
            ids, offsets = lookups_of(layout, 10 * step + place)
            samples = samples_of(ids, place)
            samples = None if samples is None else samples.double()
            outputs.append(embedding_bags(leaf, layout, ids, offsets, per_sample_weights=samples, output_dtype=torch.float64))
            of_features = offsets[::BAGS].tolist()
            for number, of in enumerate(layout.tables or ()):
                layout.views(read)[of][ids[of_features[number] : of_features[number + 1]].long()] = 1
        (grad,) = torch.autograd.grad(losses(outputs), leaf)
        for of, is_read, g, first, second in zip(*map(POOLED.views, (table, read, grad, *states)), strict=True):
            touched = is_read.bool()
            by_row = kind.startswith("rowwise")
            square = g.square().mean(1, keepdim=True).expand_as(g) if by_row else g.square()
            if kind == "sgd":
                change = g
            elif kind.endswith("adagrad"):
                first += torch.where(touched, square, 0)
                change = g / (first.sqrt() + 1e-8)
            else:
                first.copy_(torch.where(touched, 0.9 * first + 0.1 * g, first))
                second.copy_(torch.where(touched, 0.999 * second + 0.001 * square, second))
                change = first / (1 - 0.9 ** (step + 1)) / ((second / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8)
            of -= torch.where(touched, 0.125 * change, 0)
    return table


@pytest.mark.parametrize("gathered", GATHERINGS)
@pytest.mark.parametrize("kind", ["sgd", "adagrad", "rowwise_adagrad", "adam", "rowwise_adam"])
def test_a_row_is_updated_once_by_the_sum_over_all_calls(place: Place, kind: str, gathered: str) -> None:
    tables = made(kind)
    before = tables.weights.clone()
    with gathering(gathered):
        for step in range(2):
            losses(look_up(tables, 10 * step)).backward()
    assert int(tables.optimizer.step) == 2
    expected = by_hand(kind, before, 2)
    assert not torch.equal(tables.weights, before)
    torch.testing.assert_close(tables.weights.double(), expected, rtol=2e-5, atol=2e-5)


def test_one_call_is_what_the_operator_does(place: Place) -> None:
    """To the bit."""
    tables, ids_and_offsets = made("adam"), lookups_of(POOLED, 3)
    table = tables.weights.clone().requires_grad_()
    optimizer = made("adam").optimizer
    for output in (
        tables.embedding_bags(POOLED, *ids_and_offsets, backend=place.backend),
        embedding_bags(table, POOLED, *ids_and_offsets, optimizer=optimizer, backend=place.backend),
    ):
        output.square().sum().backward()
    assert torch.equal(tables.weights, table)
    for name, state in optimizer.state().items():
        assert torch.equal(state, tables.optimizer.state()[name])


def test_what_backward_does_not_reach_changes_nothing(place: Place) -> None:
    tables = made("adagrad")
    before = tables.weights.clone()
    pooled, listed, _ = look_up(tables, 0)
    with torch.no_grad():
        look_up(tables, 5)
    torch.autograd.grad(pooled.sum() * torch.ones((), device=PLACE.device).requires_grad_(), pooled)
    assert int(tables.optimizer.step) == 0
    assert torch.equal(tables.weights, before)
    listed.sum().backward()
    only = made("adagrad")
    ids, offsets = lookups_of(LISTED, 1, torch.int32)
    only.embedding_bags(LISTED, ids, offsets, backend=place.backend).sum().backward()
    assert torch.equal(tables.weights, only.weights)
    assert int(tables.optimizer.step) == 1


class FailsError(Exception): ...


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Tensor:
        raise FailsError


def test_what_an_error_leaves_is_given_up(place: Place) -> None:
    """A backward pass that fails half way changes nothing, and the next one takes nothing of what was handed over before."""
    tables, again = made(), made()
    for of in (tables, again):
        look_up(of, 0)[0].sum().backward()
    before = tables.weights.clone()
    # Made before the lookups and after the node behind them, so that autograd comes to it between both.
    fails = _Fails.apply(torch.ones((), device=PLACE.device, requires_grad=True))
    with pytest.raises(FailsError):
        (losses(look_up(tables, 10)) + fails).backward()
    assert torch.equal(tables.weights, before)
    assert int(tables.optimizer.step) == 1
    for of in (tables, again):
        look_up(of, 20)[0].sum().backward()
    assert torch.equal(tables.weights, again.weights)


def test_ids_weights_of_several_calls_have_gradients(place: Place) -> None:
    """All are taken from the tables that forward read, where updates one after the other find other tables."""
    tables = made()
    before, calls = tables.weights.clone(), []
    for seed in (1, 2):
        ids, offsets = lookups_of(LISTED, seed)
        leaf = random_tensor((ids.shape[0],), torch.float32, seed).requires_grad_()
        calls.append((leaf, ids, offsets))
    outputs = [
        tables.embedding_bags(LISTED, ids, offsets, per_sample_weights=leaf, backend=place.backend)
        for leaf, ids, offsets in calls
    ]
    losses(outputs).backward()
    copies = [leaf.detach().clone().requires_grad_() for leaf, _, _ in calls]
    apart = [
        embedding_bags(before, LISTED, ids, offsets, per_sample_weights=copied, backend=place.backend)
        for copied, (_, ids, offsets) in zip(copies, calls, strict=True)
    ]
    losses(apart).backward()
    for copied, (leaf, _, _) in zip(copies, calls, strict=True):
        assert copied.grad is not None
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad, copied.grad)


def test_tables_that_changed_since_forward_are_refused(place: Place) -> None:
    tables, (ids, offsets) = made(), lookups_of(LISTED, 1)
    leaf = torch.ones(ids.shape[0], device=PLACE.device, requires_grad=True)
    late = tables.embedding_bags(LISTED, ids, offsets, per_sample_weights=leaf, backend=place.backend)
    look_up(tables, 0)[0].sum().backward()
    with pytest.raises(RuntimeError) as caught:
        late.sum().backward()
    assert str(caught.value) == (
        "per_sample_weights: their gradient needs the tables as forward read them, but an update has changed them since; look "
        "all ids up in one call of embedding_bags, or call backward of one lookup before the next is made"
    )


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(place: Place, use_reentrant: bool) -> None:
    """Computed again, a lookup is in two graphs, and one of them is differentiated; reentrant ones cannot be told apart."""
    tables, plain = made("adagrad"), made("adagrad")
    scale = torch.tensor(2.0, device=PLACE.device, requires_grad=True)

    def loss(of: JointUpdate, scale: Tensor) -> Tensor:
        return losses(look_up(of, 0)) * scale

    total = checkpoint(loss, tables, scale, use_reentrant=use_reentrant) + look_up(tables, 3)[0].sum()
    if use_reentrant:
        with pytest.raises(RuntimeError) as caught:
            total.backward()
        assert str(caught.value) == (
            "embedding_bags: an optimizer in the backward pass cannot be told when reentrant checkpointing is done; use "
            "checkpoint(..., use_reentrant=False)"
        )
        return
    total.backward()
    (loss(plain, scale) + look_up(plain, 3)[0].sum()).backward()
    torch.testing.assert_close(tables.weights, plain.weights)
    assert int(tables.optimizer.step) == 1


def test_a_graph_may_be_differentiated_twice(place: Place) -> None:
    tables = made()
    before, total = tables.weights.clone(), losses(look_up(tables, 0))
    total.backward(retain_graph=True)
    once = tables.weights - before
    total.backward()
    torch.testing.assert_close(tables.weights, before + 2 * once)
    assert int(tables.optimizer.step) == 2


def test_a_check_that_refuses_leaves_all_as_it_was(place: Place) -> None:
    def refuse() -> None:
        raise ValueError("frozen")

    tables = made("adam", check=refuse)
    before = tables.weights.clone()
    with pytest.raises(ValueError, match="frozen"):
        losses(look_up(tables, 0)).backward()
    assert torch.equal(tables.weights, before)
    assert int(tables.optimizer.step) == 0


def test_pickled(place: Place) -> None:
    tables = made("adam")
    losses(look_up(tables, 0)).backward()
    copied = pickle.loads(pickle.dumps(tables))
    for of in (tables, copied):
        losses(look_up(of, 1)).backward()
    assert torch.equal(tables.weights, copied.weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tables_of_sixteen_bits(place: Place, dtype: torch.dtype) -> None:
    """The sum over calls is rounded once: by SGD at a rate of a power of two, as that of all ids in one call."""
    weights = random_tensor((POOLED.num_elements,), dtype, 0)
    tables = made("sgd", weights)
    ids, offsets = lookups_of(LISTED, 1)
    both = BagLayout(ROWS, WIDTHS, (0, 0, 0, 0), sequences=(True,) * 4)
    for _ in range(2):
        found = [tables.embedding_bags(LISTED, ids, offsets, backend=place.backend) for _ in range(2)]
        losses(found).backward()
    table, optimizer = weights.clone().requires_grad_(), BagOptimizer("sgd", both, learning_rate=0.125, device=PLACE.device)
    joined = torch.cat([offsets[:-1], offsets + ids.shape[0]])
    for _ in range(2):
        out = embedding_bags(table, both, torch.cat([ids, ids]), joined, optimizer=optimizer, backend=place.backend)
        losses(out.chunk(2)).backward()
    assert torch.equal(tables.weights, table.detach())


@pytest.mark.gpu
def test_in_a_captured_graph(place: Place) -> None:
    """With totals that the host knows nothing waits for the device."""
    eager, graphed = made("rowwise_adagrad"), made("rowwise_adagrad")
    calls = []
    for layout in LAYOUTS:
        ids, offsets = lookups_of(layout, 1)
        ends = offsets[::BAGS].tolist()
        totals = [ends[place + 1] - ends[place] for place, of in enumerate(layout.sequences or ()) if of]
        calls.append((layout, ids, offsets, {"sequence_totals": totals} if totals else {}))

    def step(of: JointUpdate) -> Tensor:
        total = losses([of.embedding_bags(*call[:3], backend=place.backend, **call[3]) for call in calls])
        total.backward()
        return total.detach()

    graph, _ = captured(lambda: step(graphed))
    graph.replay()
    for _ in range(4):
        step(eager)
    torch.testing.assert_close(graphed.weights, eager.weights)
    assert int(graphed.optimizer.step) == int(eager.optimizer.step) == 4


def test_a_call_of_a_fake_mode_leaves_nothing_behind(place: Place) -> None:
    """The node behind all lookups is made once, and is of no mode."""
    traced, plain = made("adagrad"), made("adagrad")
    ids, offsets = lookups_of(POOLED, 1)
    with FakeTensorMode(allow_non_fake_inputs=True):
        found = traced.embedding_bags(POOLED, ids, offsets, backend=place.backend)
        assert isinstance(found, FakeTensor)
    assert type(traced._node()) is Tensor
    for of in (traced, plain):
        losses(look_up(of, 0)).backward()
    assert torch.equal(traced.weights, plain.weights)
    assert type(traced.weights) is Tensor


TARGETS = torch.tensor([0, 3, -100, 5, 3, 1]).to(PLACE.device)
NEGATIVES = torch.tensor([[1, 4, 4], [2, 0, 5]] * 3).to(PLACE.device)


@functools.cache
def hidden_of(width: int, seed: int) -> Tensor:
    """Hidden states, made once: a graph that is captured copies nothing from the host."""
    return random_tensor((6, width), torch.float32, seed)


def scores_of(table: Tensor, seed: int, *, sparse: bool, rows: slice | None = None) -> Tensor:
    """A loss against sampled rows of a table, whose last ones are nobody's."""
    hidden, targets, negatives = hidden_of(table.shape[1], seed), TARGETS, NEGATIVES
    part = slice(None) if rows is None else rows
    return sampled_linear_cross_entropy(
        hidden[part].to(table.dtype), table, targets[part], negatives[part], sparse=sparse, backend=PLACE.backend, reduction="sum"
    )


@pytest.mark.parametrize("gathered", GATHERINGS)
@pytest.mark.parametrize("score", ["dense", "sparse"])
@pytest.mark.parametrize("kind", ["sgd", "rowwise_adagrad", "adam"])
def test_rows_that_are_read_and_scored_are_updated_once(place: Place, kind: str, score: str, gathered: str) -> None:
    """A sparse gradient is one of the rows it names; a dense one of all, so that Adam moves each by its momentum."""
    tables, table = made(kind), POOLED.views(random_tensor((POOLED.num_elements,), torch.float32, 0))[0].double().clone()
    other = POOLED.views(tables.weights)[1].clone()
    m, v = torch.zeros_like(table), torch.zeros_like(table)
    with gathering(gathered):
        for step in range(2):
            ids, offsets = lookups_of(LISTED, step)
            leaf = table.float().requires_grad_()
            read = tables.embedding_bags(LISTED, ids, offsets, backend=place.backend)
            scored = tables.table(0, backend=place.backend)
            assert (scored.shape, scored.requires_grad) == (ROWS[:1] + WIDTHS[:1], True)
            (losses([read]) + scores_of(scored, step, sparse=score == "sparse")).backward()
            (losses([leaf[ids.long()].flatten()]) + scores_of(leaf, step, sparse=False)).backward()
            assert leaf.grad is not None
            grad, touched = leaf.grad.double(), torch.zeros(ROWS[0], 1, dtype=torch.bool, device=PLACE.device)
            touched[ids.long()] = True
            touched[:6] = True
            touched |= score == "dense"
            if kind == "sgd":
                change = grad
            elif kind == "rowwise_adagrad":
                v += torch.where(touched, grad.square().mean(1, keepdim=True), 0)
                change = torch.where(touched, grad / (v.sqrt() + 1e-8), 0)
            else:
                m = torch.where(touched, 0.9 * m + 0.1 * grad, m)
                v = torch.where(touched, 0.999 * v + 0.001 * grad.square(), v)
                change = m / (1 - 0.9 ** (step + 1)) / ((v / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8)
            table -= torch.where(touched, 0.125 * change, 0)
    assert int(tables.optimizer.step) == 2
    found = POOLED.views(tables.weights)
    torch.testing.assert_close(found[0].double(), table, rtol=2e-4, atol=2e-5)
    assert torch.equal(found[1], other)


WITH_ROOM = BagLayout((9, 40), (16, 4), (0,))


def loss_with_room(of: JointUpdate, seed: int) -> Tensor:
    """Of five rows that are read, and of scores whose gradient is larger and has room for six rows."""
    ids = (torch.tensor([4, 0, 0, 8, 4], device=PLACE.device) + seed) % 9
    read = of.embedding_bags(WITH_ROOM, ids, torch.arange(6, device=PLACE.device), backend=PLACE.backend)
    return losses([read]) + scores_of(of.table(0, backend=PLACE.backend), seed, sparse=True)


def gradients_with_room(of: JointUpdate, way: str) -> None:
    """Hand gradients over in a way that users have."""
    for seed in range(2 if way == "two batches" else 1):
        if way == "checkpoint":
            scale = torch.tensor(2.0, device=PLACE.device, requires_grad=True)
            checkpoint(lambda scale, seed=seed: loss_with_room(of, seed) * scale, scale, use_reentrant=False).backward()
            continue
        with torch.autocast(PLACE.device.type, torch.bfloat16, enabled=way == "autocast"):
            loss = loss_with_room(of, seed)
        loss.backward(retain_graph=way == "backward twice")
        if way == "backward twice":
            loss.backward()
    if way == "given again":
        of.norm()
        calls = of.take()
        of.give(calls)


@pytest.mark.skipif(PLACE.name == "cpu", reason="there gradients have no room behind them")
@pytest.mark.parametrize("way", ["once", "autocast", "checkpoint", "given again", "two batches", "backward twice"])
def test_a_large_gradient_of_scores_is_not_copied(place: Place, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of lookups are copied behind it, unless there is no room, as for a second one; which of the two no number tells."""
    from jagged.ops._shared import room
    from jagged.ops.sampled_cross_entropy import api

    # As if they were many beside the table's rows: not in factors.
    monkeypatch.setattr(api, "MOST_GATHERED", 0)
    weights = []
    for has_room in (True, False):
        if not has_room:
            monkeypatch.setattr(room, "_room_of", lambda gradient: -1)
        storage = random_tensor((WITH_ROOM.num_elements,), torch.float32, 0)
        optimizer = BagOptimizer("rowwise_adagrad", WITH_ROOM, learning_rate=0.125, device=PLACE.device)
        tables = JointUpdate(storage, optimizer)
        tables.holds = True
        gradients_with_room(tables, way)
        of_scores = max((call.lookups.grad for call in tables._held), key=torch.numel)
        tables.norm()
        is_within = tables._held[0].lookups.grad.data_ptr() == of_scores.data_ptr()
        assert is_within == (way == "given again" or (has_room and way not in ("two batches", "backward twice")))
        tables.step()
        weights.append(storage)
    assert torch.equal(*weights)


@pytest.mark.skipif(PLACE.name == "cpu", reason="there gradients have no room behind them")
def test_a_sparse_gradient_with_room_is_a_parameters(place: Place) -> None:
    """Who has no update of tables: what lies behind it is in no copy's numbers, and no optimizer's."""
    gradients = []
    for sparse in (True, False):
        table = random_tensor((9, 16), torch.float32, 0).requires_grad_()
        for seed in range(2):
            scores_of(table, seed, sparse=sparse).backward()
        assert table.grad is not None
        if sparse:
            copies = [
                copy.deepcopy(table.grad),
                pickle.loads(pickle.dumps(table.grad)),
                table.grad.clone(),
                table.grad.coalesce(),
            ]
            assert all(torch.equal(of.to_dense(), table.grad.to_dense()) for of in copies)
            torch.optim.SparseAdam([table], lr=0.1).step()
            assert table.isfinite().all()
        gradients.append(table.grad.to_dense())
    torch.testing.assert_close(*gradients)


def test_a_table_is_scored_by_plain_pytorch(place: Place) -> None:
    """By any operation, several times, and beside a gradient that is sparse; without gradients it is the table itself."""
    tables = made()
    before = POOLED.views(tables.weights)[1].clone()
    scored, leaf = tables.table(1, backend=place.backend), before.clone().requires_grad_()
    for table in (scored, leaf):
        ids = torch.tensor([3, 3, 39], device=PLACE.device)
        rows = torch.nn.functional.embedding(ids, table, sparse=True)
        (table.square().sum() + (rows * torch.arange(3, device=PLACE.device)[:, None]).sum()).backward()
    assert leaf.grad is not None
    torch.testing.assert_close(POOLED.views(tables.weights)[1], before - 0.125 * leaf.grad)
    with torch.no_grad():
        found = tables.table(1)
    assert found.data_ptr() == POOLED.views(tables.weights)[1].data_ptr()
    assert not found.requires_grad


def test_a_table_of_sixteen_bits(place: Place) -> None:
    """Its gradient has its dtype; added to a lookup's it is rounded no more before the update."""
    tables = made("sgd", random_tensor((POOLED.num_elements,), torch.float16, 0))
    before = POOLED.views(tables.weights)[0].clone()
    ids, offsets = torch.tensor([1, 1], device=PLACE.device), torch.tensor([0, 2, 2], device=PLACE.device)
    read = tables.embedding_bags(LISTED, ids, offsets, backend=place.backend)
    (read.sum() * (1 + 2**-12) + tables.table(0, backend=place.backend)[1].sum()).backward()
    expected = (before[1].float() - 0.125 * (3 + 2**-11)).half()
    torch.testing.assert_close(POOLED.views(tables.weights)[0][1], expected, rtol=0, atol=0)


def test_there_is_no_such_table(place: Place) -> None:
    with pytest.raises(IndexError) as caught:
        made().table(2)
    assert str(caught.value) == "number: expected one of 2 tables, got 2"


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_scores_under_checkpointing(place: Place, use_reentrant: bool) -> None:
    tables, plain = made(), made()
    scale = torch.tensor(2.0, device=PLACE.device, requires_grad=True)

    def loss(of: JointUpdate, scale: Tensor) -> Tensor:
        return scores_of(of.table(0, backend=place.backend), 0, sparse=True) * scale

    total = checkpoint(loss, tables, scale, use_reentrant=use_reentrant)
    if use_reentrant:
        with pytest.raises(RuntimeError, match="an optimizer in the backward pass cannot be told when reentrant"):
            total.backward()
        return
    total.backward()
    loss(plain, scale).backward()
    assert torch.equal(tables.weights, plain.weights)


def held_loss(of: JointUpdate, rows: slice, seed: int) -> Tensor:
    """A micro-batch: some of the samples of a sum over lookups and scores."""
    ids, offsets = lookups_of(LISTED, seed)
    read = of.embedding_bags(LISTED, ids, offsets, backend=PLACE.backend)
    return read.square().sum() + scores_of(of.table(0, backend=PLACE.backend), seed, sparse=True, rows=rows)


@pytest.mark.parametrize("gathered", GATHERINGS)
@pytest.mark.parametrize("kind", ["sgd", "adagrad", "rowwise_adam"])
def test_held_gradients_are_accumulated(place: Place, kind: str, gathered: str) -> None:
    """Two calls of backward and one update are one call; the norm is that of a dense gradient, a scale multiplies it."""
    held, once = made(kind), made(kind)
    held.holds = True
    for step in range(2):
        before, parts = held.weights.clone(), [(slice(0, 2), 2 * step), (slice(2, 6), 2 * step + 1)]
        with gathering(gathered):
            for rows, seed in parts:
                held_loss(held, rows, seed).backward()
            assert torch.equal(held.weights, before)
            assert int(held.optimizer.step) == step
            norm = held.norm()
            assert bool(held.step(torch.tensor(0.5, device=PLACE.device)))
            (0.5 * (held_loss(once, *parts[0]) + held_loss(once, *parts[1]))).backward()
        leaf = POOLED.views(before)[0].clone().requires_grad_()
        for rows, seed in parts:
            ids, _ = lookups_of(LISTED, seed)
            (leaf[ids.long()].square().sum() + scores_of(leaf, seed, sparse=False, rows=rows)).backward()
        assert leaf.grad is not None
        torch.testing.assert_close(norm, leaf.grad.norm(), rtol=1e-5, atol=0)
        torch.testing.assert_close(held.weights, once.weights, rtol=1e-5, atol=1e-6)
        assert int(held.optimizer.step) == step + 1
    assert not torch.equal(held.weights, made(kind).weights)


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize(
    ("what", "asks"),
    [
        ("gradient", False),
        ("weight", False),
        ("scale", False),
        ("gradient", True),
        ("weight", True),
        ("scale", True),
        ("norm", True),
    ],
)
def test_what_is_not_finite_changes_nothing(place: Place, what: str, asks: bool) -> None:
    """A gradient, one by way of an id's weight, the scale, whether their norm is asked for or not; or that norm, where finite
    gradients of a row have no finite sum."""
    tables = made("adam")
    tables.holds = True
    held_loss(tables, slice(0, 6), 0).backward()
    assert bool(tables.step())
    before = {"weights": tables.weights.clone(), **{name: x.clone() for name, x in tables.optimizer.state().items()}}
    ids, offsets = torch.tensor([2, 2], device=PLACE.device), torch.tensor([0, 2, 2], device=PLACE.device)
    samples = torch.tensor([1.0, torch.inf if what == "weight" else 1.0], device=PLACE.device)
    read = tables.embedding_bags(LISTED, ids, offsets, per_sample_weights=samples, backend=place.backend)
    factor = {"gradient": torch.nan, "norm": 3e38}.get(what, 1.0)
    read.nan_to_num(0, 0, 0).backward(torch.full_like(read, factor))
    if asks:
        assert bool(tables.norm().isfinite()) == (what == "scale")
    scale = torch.tensor(torch.inf if what == "scale" else 1.0, device=PLACE.device)
    assert not bool(tables.step(scale))
    for name, x in {"weights": tables.weights, **tables.optimizer.state()}.items():
        assert torch.equal(x, before[name]), name
    # And nothing of it is left.
    assert float(tables.norm()) == 0
    assert bool(tables.step())
    held_loss(tables, slice(0, 6), 1).backward()
    assert bool(tables.step())
    assert int(tables.optimizer.step) == 2


def test_gradients_that_are_dropped_and_taken(place: Place) -> None:
    tables = made()
    tables.holds = True
    before = tables.weights.clone()
    held_loss(tables, slice(0, 6), 0).backward()
    tables.drop()
    assert bool(tables.step())
    held_loss(tables, slice(0, 6), 0).backward()
    taken = tables.take()
    assert bool(tables.step())
    assert torch.equal(tables.weights, before)
    assert int(tables.optimizer.step) == 0
    for _ in range(2):
        tables.give(taken)
        assert bool(tables.step())
    once = made()
    (held_loss(once, slice(0, 6), 0) * 2).backward()
    torch.testing.assert_close(tables.weights, once.weights)
    assert int(tables.optimizer.step) == 2


def test_a_norm_that_is_given_is_that_of_all_or_not_taken(place: Place) -> None:
    """That of a captured graph, which here is a number that nothing held has."""
    tables, other = made(), made()
    for of in (tables, other):
        of.holds = True
        held_loss(of, slice(0, 6), 0).backward()
    tables.norm()
    taken = tables.take()
    assert taken.squares is None
    taken = taken._replace(squares=torch.tensor(25.0, dtype=torch.float64, device=PLACE.device))
    tables.give(taken)
    assert float(tables.norm()) == 5
    tables.drop()
    for of in (tables, other):
        held_loss(of, slice(0, 6), 1).backward()
    tables.give(taken)
    torch.testing.assert_close(tables.norm(), other.norm())
    for of in (tables, other):
        assert bool(of.step())
    torch.testing.assert_close(tables.weights, other.weights)


def test_bytes_of_a_norm(place: Place) -> None:
    tables = made()
    rows = 4 * tables.optimizer.layout.first_rows[-1]
    tables.holds = True
    assert tables.norm_bytes == 0
    ids, offsets = lookups_of(POOLED, 1)
    for calls, expected in ((1, 12 * len(ids) + rows), (2, 24 * 2 * len(ids) + 8 * 2 * len(offsets) + rows)):
        tables.embedding_bags(POOLED, ids, offsets, backend=place.backend).sum().backward()
        assert tables.norm_bytes == expected, calls


@pytest.mark.gpu
def test_a_captured_graph_holds_its_step(place: Place) -> None:
    """Where it does not, replays would hand nothing over."""
    eager, graphed = made("rowwise_adagrad"), made("rowwise_adagrad")
    (ids, offsets), scale = lookups_of(LISTED, 1), torch.tensor(0.5, device=PLACE.device)
    ends = offsets[::BAGS].tolist()
    totals = [end - begin for begin, end in pairwise(ends)]

    def step(of: JointUpdate, until: str = "step") -> Tensor:
        of.holds = True
        of.drop()
        read = of.embedding_bags(LISTED, ids, offsets, sequence_totals=totals, backend=place.backend)
        total = read.square().sum() + scores_of(of.table(0, backend=place.backend), 0, sparse=True)
        total.backward()
        if until != "backward":
            of.norm()
        if until == "step":
            of.step(scale)
        return total.detach()

    graph, _ = captured(lambda: step(graphed))
    graph.replay()
    for _ in range(4):
        step(eager)
    torch.testing.assert_close(graphed.weights, eager.weights)
    assert int(graphed.optimizer.step) == int(eager.optimizer.step) == 4
    without = made()
    captured(lambda: step(without, "backward"))
    with pytest.raises(RuntimeError) as caught:
        without.step()
    assert str(caught.value) == (
        "step: a CUDA graph keeps its gradients from call to call, but no replay hands them over; capture the step, too, or "
        "take() them after the capture and give() them after each replay"
    )
    first_ids = ids.clone()
    for until in ("backward", "norm"):
        given_, expected = made("rowwise_adagrad"), made("rowwise_adagrad")
        ids.copy_(first_ids)
        graph, _ = captured(lambda of=given_, until=until: step(of, until))  # type: ignore[misc]
        taken = given_.take()
        # Of a norm that is captured replays make the order of the lookups, too.
        assert [of.order is None for of in taken.calls] == ([True, True] if until == "backward" else [False])
        for _ in range(3):
            graph.replay()
            given_.give(taken)
            found = given_.norm()
            given_.step(scale)
            step(expected, "backward")
            assert float(found) == float(expected.norm())
            expected.step(scale)
            ids.zero_()
        torch.testing.assert_close(given_.weights, expected.weights)


@pytest.mark.skipif(PLACE.name == "cpu", reason="there lookups are not sorted")
@pytest.mark.parametrize("kind", ["sgd", "rowwise_adagrad"])
def test_a_norm_and_its_step_sort_once(place: Place, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    from jagged.ops.embedding_bag.triton.sums import _Sums

    sorts: list[int] = []
    find = _Sums._sorted
    monkeypatch.setattr(_Sums, "_sorted", lambda self, most: sorts.append(most) or find(self, most))
    asked, other = made(kind), made(kind)
    for of in (asked, other):
        of.holds = True
    scale = torch.tensor(0.5, device=PLACE.device)

    def hold(seed: int) -> None:
        for of in (asked, other):
            losses(look_up(of, seed)).backward()

    hold(0)
    asked.norm()
    assert bool(asked.step(scale))
    assert len(sorts) == 1
    assert bool(other.step(scale))
    # Of what came after the norm there is no order, and none of what replays write again.
    hold(3)
    asked.norm()
    hold(6)
    asked.give(asked.take())
    assert all(call.order is None for call in asked._held)
    for of in (asked, other):
        assert bool(of.step(scale))
    assert len(sorts) == 5
    hold(9)
    asked.norm()
    before = asked.weights.clone()
    for of in (asked, other):
        assert not bool(of.step(scale * torch.nan))
    assert torch.equal(asked.weights, before)
    assert torch.equal(asked.weights, other.weights)
