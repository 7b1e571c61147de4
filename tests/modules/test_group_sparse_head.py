"""The head of many labels: its loss and its best labels against a dense layer with all zeros, and how it changes its inputs."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor

from jagged.modules import GroupSparseHead, LabelGroups, group_at_random, group_by_embedding, group_by_frequency
from jagged.modules.group_sparse import _smallest
from jagged.ops import trust_values
from tests.memory import PeakMemory
from tests.oracle import check_three_way
from tests.places import PLACE, Place
from tests.processes import told_by
from tests.reference import group_sparse as reference
from tests.strategies import Jagged, jagged_batches, jagged_of, random_tensor, seeds

pytestmark = [
    pytest.mark.skipif(PLACE.name == "interpret", reason="modules run on the place's own backend"),
    # Marks what runs on a GPU, too.
    pytest.mark.usefixtures("place"),
]

ROWS = 100


def head_of(num_labels: int, seed: int = 0, **options: Any) -> GroupSparseHead:
    counts = torch.randint(0, ROWS + 1, (num_labels,), generator=torch.Generator().manual_seed(seed))
    settings_ = {"fan_in": 4, "group_size": 5, "seed": seed, "device": PLACE.device, **options}
    torch.manual_seed(seed)
    return GroupSparseHead(12, counts, ROWS, **settings_)


def positives_for(batch: Jagged, num_labels: int, seed: int) -> JaggedTensor:
    values = torch.randint(0, num_labels, (batch.total,), generator=torch.Generator().manual_seed(seed)).to(PLACE.device)
    return JaggedTensor(values=values, offsets=batch.offsets)


def dense_logits(head: GroupSparseHead, features: Tensor) -> Tensor:
    """All logits by the users' ids, of a layer whose missing weights are zeros."""
    hidden = head.tail_projection(features)
    sizes = head.group_offsets.diff().tolist()
    tail = reference.group_sparse_linear(hidden, head.weight, head.supports, sizes, head.bias)
    logits = torch.cat([head.head_projection(features) @ head.head_weight.T + head.head_bias, tail], 1)
    return logits[:, head.places]


def targets_for(head: GroupSparseHead, positives: JaggedTensor) -> Tensor:
    rows = torch.repeat_interleave(positives.offsets().diff())
    targets = torch.zeros(positives.offsets().shape[0] - 1, head.num_labels, device=PLACE.device)
    return targets.index_put_((rows, positives.values()), targets.new_ones(()))


@settings(max_examples=25)
@given(
    jagged_batches(longest=6),
    seeds(),
    st.sampled_from([0, 3, 0.25, 1.0]),
    st.sampled_from([0.0, 0.3]),
    st.booleans(),
    st.booleans(),
)
def test_loss_is_that_of_a_dense_layer(
    place: Place, batch: Jagged, seed: int, head_labels: int | float, smoothing: float, projected: bool, masked: bool
) -> None:
    widths = {"head_dim": 7, "tail_dim": 9} if projected else {}
    head = head_of(23, seed, head=head_labels, label_smoothing=smoothing, **widths)
    positives = positives_for(batch, 23, seed)
    mask = torch.rand(batch.batch_size, generator=torch.Generator().manual_seed(seed)) < 0.7
    row_mask = mask.to(place.device) if masked else None
    features = random_tensor((batch.batch_size, 12), torch.float32, seed)
    names = [name for name, parameter in head.named_parameters() if parameter.numel()]

    def call(function: Any, *given: Tensor) -> Tensor:
        module = copy.deepcopy(head).to(given[0].dtype)
        # The parameters are inputs, too.
        for name, value in zip(names, given[1:], strict=True):
            owner = module.get_submodule(name.rpartition(".")[0])
            del owner._parameters[name.rpartition(".")[2]]
            setattr(owner, name.rpartition(".")[2], value)
        return function(module, given[0])

    def expected(module: GroupSparseHead, given: Tensor) -> Tensor:
        targets = targets_for(head, positives)
        return reference.group_sparse_bce(dense_logits(module, given), targets, None, row_mask, smoothing)

    check_three_way(
        lambda *given: call(lambda module, x: module(x, positives, row_mask), *given),
        lambda *given: call(expected, *given),
        [features, *[dict(head.named_parameters())[name].detach() for name in names]],
    )


@pytest.mark.parametrize("head_labels", [0, 6])
@pytest.mark.parametrize("k", [1, 5, 30])
def test_best_labels_are_those_of_a_dense_layer(place: Place, head_labels: int, k: int) -> None:
    head = head_of(23, head=head_labels, tail_dim=9)
    features = random_tensor((8, 12), torch.float32, 1)
    scores, labels = head.topk(features, k)
    logits = dense_logits(head, features).detach()
    there = min(k, 23)
    torch.testing.assert_close(scores[:, :there], logits.topk(there, 1).values)
    torch.testing.assert_close(scores[:, :there], logits.gather(1, labels[:, :there]))
    assert all(sorted(row) == sorted(set(row)) for row in labels[:, :there].tolist())
    assert bool((labels[:, there:] == -1).all())
    assert bool((scores[:, there:] == -torch.inf).all())
    assert not scores.requires_grad


def test_biases_start_at_log_odds_and_frequent_labels_are_dense() -> None:
    counts = torch.tensor([0, 50, 100, 3, 70])
    head = GroupSparseHead(6, counts, ROWS, fan_in=2, group_size=2, head=2)
    assert head.labels[:2].tolist() == [2, 4]
    assert sorted(head.labels.tolist()) == [0, 1, 2, 3, 4]
    bias = torch.cat([head.head_bias, head.bias]).detach()[head.places]
    expected = torch.tensor([(count + 0.5) / (ROWS - count + 0.5) for count in counts.tolist()]).log()
    torch.testing.assert_close(bias, expected)
    # Drawn again they are the same.
    before = {name: value.clone() for name, value in head.state_dict().items()}
    with torch.no_grad():
        head.bias.zero_()
    torch.manual_seed(0)
    head.reset_parameters()
    assert torch.equal(head.bias, before["bias"])
    assert torch.equal(head.supports, before["supports"])


def test_supports_are_distinct_and_every_slot_exists() -> None:
    head = head_of(23)
    assert head.supports.shape == (5, 4)
    assert head.group_offsets.tolist() == [0, 5, 10, 15, 20, 23]
    assert all(len(set(row)) == 4 for row in head.supports.tolist())
    assert int(head.supports.min()) >= 0
    assert int(head.supports.max()) < 12


def means_of(head: GroupSparseHead) -> Tensor:
    sizes = head.group_offsets.diff().tolist()
    return torch.stack([part.abs().mean(0) for part in head.weight.detach().split(sizes)])


@pytest.mark.parametrize("in_each_group", [False, True])
@pytest.mark.parametrize("new_weights", ["zero", "uniform"])
def test_the_smallest_slots_get_new_inputs(in_each_group: bool, new_weights: Any) -> None:
    head = head_of(23)
    means, supports, weight = means_of(head), head.supports.clone(), head.weight.detach().clone()
    optimizer = torch.optim.Adam(head.parameters())
    head(random_tensor((3, 12), torch.float32, 1), positives_for(jagged_of((1, 2, 0)), 23, 1)).backward()
    optimizer.step()
    with torch.no_grad():
        head.weight.copy_(weight)
    done = head.rewire(0.3, step=7, in_each_group=in_each_group, new_weights=new_weights, optimizer=optimizer)
    changed = head.supports != supports
    if in_each_group:
        assert changed.sum(1).tolist() == [1] * 5
        expected = torch.zeros_like(changed).scatter_(1, means.argmin(1, keepdim=True), True)
    else:
        assert done == 6 == round(0.3 * 20)
        expected = means <= means.flatten().sort().values[5]
    assert torch.equal(changed, expected)
    assert done == int(changed.sum())
    for old, new, moved in zip(supports.tolist(), head.supports.tolist(), changed.tolist(), strict=True):
        assert len(set(new)) == 4
        assert not {column for column, is_new in zip(new, moved, strict=True) if is_new} & set(old)
    of_labels = changed.repeat_interleave(head.group_offsets.diff(), 0)
    assert torch.equal(head.weight[~of_labels], weight[~of_labels])
    fresh = head.weight.detach()[of_labels]
    assert bool((fresh == 0).all()) if new_weights == "zero" else bool((fresh.abs() <= 0.5).all() and fresh.unique().numel() > 5)
    for name in ("exp_avg", "exp_avg_sq"):
        state = optimizer.state[head.weight][name]
        assert bool((state[of_labels] == 0).all())
        assert bool((state[~of_labels] != 0).any())
    assert bool((head.born[changed] == 7).all())


def test_young_slots_are_protected() -> None:
    head = head_of(23)
    assert head.rewire(0.5, step=10, protected=5) == 10
    young = head.born == 10
    supports = head.supports.clone()
    # Those that are old enough, and no more.
    assert head.rewire(0.8, step=14, protected=5) == 10
    assert torch.equal(head.supports[young], supports[young])
    assert head.rewire(1.0, step=15, protected=5) == 10
    assert head.rewire(1.0, step=19, protected=5) == 10
    assert head.rewire(0.0, step=30) == 0


@settings(max_examples=60)
@given(
    st.integers(0, 3).flatmap(
        lambda rows: st.lists(
            st.lists(st.sampled_from([0.0, 1e-45, 0.5, 1.0, 1.0000001, 3e38, torch.inf]), min_size=5, max_size=5),
            min_size=rows,
            max_size=rows,
        )
    ),
    st.integers(0, 5),
    st.sampled_from([1, 4, 2**24]),
)
def test_the_smallest_scores_are_those_of_a_stable_sort(rows: list[list[float]], count: int, piece: int) -> None:
    scores = torch.tensor(rows, device=PLACE.device).view(-1, 5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jagged.modules.group_sparse._COUNTED_ELEMENTS", piece)
        found = _smallest(scores, count)
    first = scores.sort(dim=1, stable=True).indices[:, :count]
    assert torch.equal(found, torch.zeros_like(scores, dtype=torch.bool).scatter_(1, first, True) & (scores < torch.inf))


def test_a_weight_that_is_no_number_keeps_its_slot() -> None:
    head = head_of(23)
    with torch.no_grad():
        head.weight[:5, 1] = torch.nan
        head.weight[5:10, 2] = -torch.nan
    slots, supports = head.supports.numel(), head.supports.clone()
    assert head.rewire(1.0, step=3) == slots - 2
    assert head.supports[0, 1] == supports[0, 1]
    assert head.supports[1, 2] == supports[1, 2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("autocast", [False, True])
def test_births_of_other_dtypes(dtype: torch.dtype, autocast: bool) -> None:
    """Slots are chosen by means in float32, whatever weights are and wherever it is called."""
    head = head_of(23).to(dtype)
    assert head.weight.dtype == dtype
    assert head.born.dtype == torch.int32
    means = torch.stack([part.mean(0) for part in head.weight.detach().abs().float().split(head.group_offsets.diff().tolist())])
    expected = torch.zeros(means.numel(), dtype=torch.bool, device=PLACE.device)
    expected[means.flatten().sort(stable=True).indices[:7]] = True
    with torch.autocast(torch.device(PLACE.device).type, torch.bfloat16, enabled=autocast):
        assert head.rewire(7 / means.numel(), step=3) == 7
    assert torch.equal(head.born == 3, expected.view_as(means))


@pytest.mark.parametrize("in_each_group", [False, True])
def test_births_take_little_memory_beside_the_layer(monkeypatch: pytest.MonkeyPatch, in_each_group: bool) -> None:
    """A float32 and two bytes a slot, and what a piece needs, of which a layer has many."""
    piece = 2**12
    for name in ("_PIECE_ELEMENTS", "_COUNTED_ELEMENTS"):
        monkeypatch.setattr(f"jagged.modules.group_sparse.{name}", piece)
    head = GroupSparseHead(64, torch.ones(2**15, dtype=torch.int64), ROWS, fan_in=32, group_size=4, device=PLACE.device)
    slots = head.supports.numel()
    with PeakMemory([head.weight, head.supports, head.born]) as memory:
        assert head.rewire(0.25, step=10, protected=2, in_each_group=in_each_group) == slots // 4 == 2**16
    assert 5 * slots < memory.peak <= 6 * slots + 40 * piece


def test_where_inputs_run_out_fewer_are_given() -> None:
    """Five inputs, of which a group has four: one is left that it neither has nor loses."""
    head = GroupSparseHead(5, torch.ones(10, dtype=torch.int64), ROWS, fan_in=4, group_size=5)
    supports, weight = head.supports.clone(), head.weight.detach().clone()
    assert head.rewire(1.0, step=1) == 2
    changed = head.supports != supports
    assert changed.sum(1).tolist() == [1, 1]
    assert all(len(set(row)) == 4 for row in head.supports.tolist())
    kept = ~changed.repeat_interleave(head.group_offsets.diff(), 0)
    assert torch.equal(head.weight[kept], weight[kept])
    full = GroupSparseHead(4, torch.ones(10, dtype=torch.int64), ROWS, fan_in=4, group_size=5)
    assert full.rewire(1.0, step=1) == 0


def test_inputs_by_gradient_are_those_of_a_dense_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    head = head_of(23, head=3, tail_dim=9, label_smoothing=0.1)
    other = copy.deepcopy(head)
    features, positives = random_tensor((6, 12), torch.float32, 1), positives_for(jagged_of((2, 0, 3, 1, 1, 2)), 23, 1)
    hidden = head.tail_projection(features).detach()
    sizes = head.group_offsets.diff().tolist()
    group = torch.repeat_interleave(torch.tensor(sizes)).to(PLACE.device)
    dense = torch.zeros(20, 9, device=PLACE.device).scatter(1, head.supports.long()[group], head.weight.detach()).requires_grad_()
    targets = targets_for(head, positives)[:, head.labels[3:]]
    reference.group_sparse_bce(hidden @ dense.T + head.bias.detach(), targets, label_smoothing=0.1).backward()
    assert dense.grad is not None
    best = torch.stack([part.abs().mean(0) for part in dense.grad.split(sizes)])
    best.scatter_(1, head.supports.long(), -1)
    before = head.supports.clone()
    head.rewire(0.25, step=3, in_each_group=True, by="gradient", batch=(features, positives))
    changed = head.supports != before
    assert changed.sum(1).tolist() == [1] * len(sizes)
    assert torch.equal(head.supports[changed].long(), best.argmax(1))
    # A group at a time it is the same.
    monkeypatch.setattr("jagged.modules.group_sparse._PIECE_ELEMENTS", 1)
    other.rewire(0.25, step=3, in_each_group=True, by="gradient", batch=(features, positives))
    assert torch.equal(other.supports, head.supports)


def test_rewiring_repeats_by_its_seed() -> None:
    first, second, third = head_of(23), head_of(23), head_of(23, seed=5)
    for head in (first, second, third):
        head.rewire(0.4, step=3)
    assert torch.equal(first.supports, second.supports)
    assert not torch.equal(first.supports, third.supports)
    again = head_of(23)
    again.rewire(0.4, step=4)
    assert not torch.equal(first.supports, again.supports)


def test_saved_pickled_and_loaded(place: Place) -> None:
    head = head_of(23, head=3)
    head.rewire(0.4, step=3)
    features, positives = random_tensor((2, 12), torch.float32, 1), positives_for(jagged_of((2, 1)), 23, 1)
    other = head_of(23, seed=0, head=3)
    other.load_state_dict(head.state_dict())
    assert other.labels.tolist() == head.labels.tolist()
    for copied in (other, pickle.loads(pickle.dumps(head)), copy.deepcopy(head)):
        assert torch.equal(copied(features, positives), head(features, positives))
        assert torch.equal(copied.born, head.born)
        assert copied.topk(features, 2)[1].dtype == torch.int64


@pytest.mark.parametrize("by_context", [False, True])
def test_a_head_made_on_the_meta_device_becomes_the_same(place: Place, by_context: bool) -> None:
    expected = head_of(23, head=3, head_dim=7, tail_dim=9)
    counts = torch.randint(0, ROWS + 1, (23,), generator=torch.Generator().manual_seed(0))
    options: dict[str, Any] = {"fan_in": 4, "group_size": 5, "head": 3, "head_dim": 7, "tail_dim": 9}
    if by_context:
        with torch.device("meta"):
            head = GroupSparseHead(12, counts, ROWS, **options)
    else:
        head = GroupSparseHead(12, counts, ROWS, device="meta", **options)
    assert all(tensor.is_meta for tensor in (*head.parameters(), *head.buffers()))
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        GroupSparseHead(12, counts.to("meta"), ROWS, **options)
    assert str(raised.value) == (
        "label_counts: got a tensor on the meta device, expected one with numbers; make it on another device"
    )
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        GroupSparseHead(12, torch.zeros(1, dtype=torch.int64).expand(2**31), ROWS, fan_in=4)
    assert str(raised.value) == "label_counts: expected at most 2,147,483,647 labels, whose ids are int32, got 2,147,483,648"
    head.reset_parameters()
    head = pickle.loads(pickle.dumps(head)).to_empty(device=place.device)
    for tensor in (*head.parameters(), *head.buffers()):
        tensor.data.fill_(-7)
    torch.manual_seed(0)
    head.reset_parameters()
    drawn = ("weight", "head_weight", "projection")
    for name, value in expected.state_dict().items():
        found = head.state_dict()[name]
        assert torch.equal(found, value) or (any(word in name for word in drawn) and found.shape == value.shape), name
    # A state is enough, too.
    other = GroupSparseHead(12, counts, ROWS, seed=1, device="meta", **options).to_empty(device=place.device)
    other.load_state_dict(expected.state_dict())
    assert torch.equal(copy.deepcopy(other).labels, expected.labels)
    features, positives = random_tensor((4, 12), torch.float32, 1), positives_for(jagged_of((2, 1, 0, 4)), 23, 1)
    assert torch.equal(other(features, positives), expected(features, positives))
    assert torch.equal(other.topk(features, 5)[1], expected.topk(features, 5)[1])
    assert bool(head(features, positives).isfinite())
    # Drawn again, it keeps the groups that were loaded.
    other.reset_parameters()
    assert torch.equal(other.labels, expected.labels)
    assert torch.equal(other.bias, expected.bias)


@pytest.mark.parametrize("head_dim", [None, 3], ids=["dense", "bottleneck"])
def test_all_labels_in_the_dense_layer(place: Place, head_dim: int | None) -> None:
    """No group: a dense layer, or a bottleneck before it, is trained, scored, saved and rewired as any other head."""
    head = head_of(23, head=1.0, head_dim=head_dim)
    assert (head.num_head_labels, head.num_groups, head.weight.shape) == (23, 0, (0, 4))
    features, positives = random_tensor((4, 12), torch.float32, 1), positives_for(jagged_of((2, 1, 0, 4)), 23, 1)
    logits = dense_logits(head, features)
    losses = torch.nn.functional.binary_cross_entropy_with_logits(logits, targets_for(head, positives), reduction="none")
    compiled = torch.compile(head, fullgraph=True, backend="aot_eager")
    for loss in (head(features, positives), compiled(features, positives)):
        torch.testing.assert_close(loss, losses.sum(1).mean())
    before = copy.deepcopy(head.state_dict())
    assert head.rewire(0.5, step=3, by="gradient", batch=(features, positives)) == 0
    assert head.rewire(0.5, step=3, in_each_group=True) == 0
    other = head_of(23, seed=1, head=1.0, head_dim=head_dim)
    other.load_state_dict(before)
    scores, labels = other.topk(features, 23)
    best = logits.sort(1, descending=True)
    torch.testing.assert_close(scores, best.values)
    assert torch.equal(labels, best.indices)


def test_autocast_compile_and_checkpoint(place: Place) -> None:
    head = head_of(23, head=3, head_dim=7)
    positives = positives_for(jagged_of((2, 1, 0, 4)), 23, 1)

    def run(function: Any, **options: Any) -> list[Tensor]:
        leaf = random_tensor((4, 12), torch.float32, 1).requires_grad_()
        with torch.autocast(place.device.type, torch.bfloat16, enabled=options.get("autocast", False)):
            loss = function(leaf, positives)
        gradients = torch.autograd.grad(loss, [leaf, *head.parameters()])
        assert all(g.dtype == torch.float32 for g in gradients)
        return [loss.detach(), *gradients]

    expected = run(head)
    # Of a JaggedTensor among the arguments `checkpoint` of torch 2.11 makes one without lengths, which TorchRec refuses.
    again = run(lambda x, y: torch.utils.checkpoint.checkpoint(lambda x: head(x, y), x, use_reentrant=False))
    assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))
    for a, b in zip(run(torch.compile(head, fullgraph=True)), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    for a, b in zip(run(head, autocast=True), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.05)
    features = random_tensor((4, 12), torch.float32, 1)
    with torch.autocast(place.device.type, torch.bfloat16):
        scores, labels = head.topk(features, 3)
    torch.testing.assert_close(scores, dense_logits(head, features).detach().gather(1, labels), rtol=0.05, atol=0.05)


def test_a_symbolic_trace_records_one_call() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(12, 12))
    model.head = head_of(23)

    class Whole(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = torch.nn.Linear(12, 12, device=PLACE.device), head_of(23)

        def forward(self, features: Tensor, positives: JaggedTensor) -> Tensor:
            return self.head(self.body(features), positives)

    whole = Whole()
    traced = torch.fx.symbolic_trace(whole)
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["body", "head"]
    given_ = random_tensor((2, 12), torch.float32, 1), positives_for(jagged_of((2, 1)), 23, 1)
    assert torch.equal(traced(*given_), whole(*given_))


def test_it_learns_which_inputs_labels_have() -> None:
    """Each label is there where one feature is large. At first a group has a quarter of what its labels need."""
    labels, rows = 24, 512
    target = torch.randint(0, labels, (rows,), generator=torch.Generator().manual_seed(0))
    noise = torch.randn(rows, labels, generator=torch.Generator().manual_seed(1))
    features = torch.nn.functional.one_hot(target, labels).float() * 3 + 0.1 * noise
    positives = JaggedTensor(values=target, offsets=torch.arange(rows + 1))
    found = {}
    for by in (None, "random", "gradient"):
        torch.manual_seed(0)
        head = GroupSparseHead(24, torch.full((labels,), rows // labels), rows, fan_in=6, group_size=4)
        optimizer = torch.optim.Adam(head.parameters(), 0.05)
        for step in range(200):
            if by is not None and step % 20 == 10 and step < 150:
                batch = (features, positives) if by == "gradient" else None
                head.rewire(0.25, step=step, protected=20, by=by, batch=batch, optimizer=optimizer)
            optimizer.zero_grad()
            head(features, positives).backward()
            optimizer.step()
        found[by] = float((head.topk(features, 1)[1][:, 0] == target).float().mean())
    assert found["gradient"] > 0.95
    assert found["random"] > found[None] + 0.1


def test_groups_at_random_by_frequency_and_by_embedding() -> None:
    labels = torch.arange(10) * 3
    for groups in (
        group_at_random(labels, 4, seed=1),
        group_by_frequency(labels, torch.arange(10), 4),
        group_by_embedding(labels, torch.randn(10, 3), 4),
    ):
        assert sorted(groups.labels.tolist()) == labels.tolist()
        assert int(groups.offsets[-1]) == 10
        assert int(groups.offsets.diff().max()) <= 4
    assert group_by_frequency(labels, torch.arange(10), 4).labels.tolist() == labels.flip(0).tolist()
    assert torch.equal(group_at_random(labels, 4, seed=1).labels, group_at_random(labels, 4, seed=1).labels)
    assert not torch.equal(group_at_random(labels, 4, seed=1).labels, group_at_random(labels, 4, seed=2).labels)
    with pytest.raises(ValueError, match=r"^group_size: expected at least 1, got 0$"):
        group_at_random(labels, 0)


def test_like_labels_are_grouped_and_unknown_ones_apart() -> None:
    """Clusters of 12 labels round 40 centres, and 7 labels of which nothing is known."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.nn.functional.normalize(torch.randn(40, 32, generator=generator), dim=1)
    of = torch.arange(480) % 40
    embeddings = torch.cat([centres[of] + 0.05 * torch.randn(480, 32, generator=generator), torch.zeros(7, 32)])
    groups = group_by_embedding(torch.arange(487), embeddings, 4, groups_per_cluster=6, seed=3)
    assert sorted(groups.labels.tolist()) == list(range(487))
    parts = [part.tolist() for part in groups.labels.split(groups.offsets.diff().tolist())]
    assert all(0 < len(part) <= 4 for part in parts)
    assert all((min(part) >= 480) == (max(part) >= 480) for part in parts)
    pure = [len({label % 40 for label in part}) == 1 for part in parts if max(part) < 480]
    assert sum(pure) > 0.9 * len(pure)
    again = group_by_embedding(torch.arange(487), embeddings, 4, groups_per_cluster=6, seed=3)
    assert torch.equal(again.labels, groups.labels)


def test_groups_that_are_given() -> None:
    counts = torch.tensor([9, 1, 2, 0, 3, 1])
    groups = LabelGroups(torch.tensor([5, 1, 3, 2, 4]), torch.tensor([0, 2, 2, 5]))
    head = GroupSparseHead(8, counts, 10, fan_in=4, grouping=groups, head=1)
    assert (head.labels.tolist(), head.group_offsets.tolist()) == ([0, 5, 1, 3, 2, 4], [0, 2, 2, 5])
    with pytest.raises(ValueError, match="grouping: expected each of the 6 labels without a dense layer once, got 5 others"):
        GroupSparseHead(8, counts, 10, fan_in=4, grouping=groups)
    with pytest.raises(ValueError, match="offsets"):
        GroupSparseHead(8, counts, 10, fan_in=4, head=1, grouping=groups._replace(offsets=torch.tensor([0, 3, 2, 5])))


def test_groups_of_adjacent_inputs_stay(place: Place) -> None:
    """Whole blocks of inputs, with a rest that no group reads; drawn again alike, and never replaced."""
    counts = torch.ones(60, dtype=torch.int64)
    head = GroupSparseHead(22, counts, 60, fan_in=4, group_size=2, adjacent=True, device=place.device)
    assert head.supports.shape == (head.num_groups,)
    assert sorted(set(head.supports.tolist())) == [0, 4, 8, 12, 16]
    before = head.supports.clone()
    head.reset_parameters()
    assert torch.equal(head.supports, before)
    meta = GroupSparseHead(22, counts, 60, fan_in=4, group_size=2, adjacent=True, device="meta").to_empty(device=place.device)
    meta.reset_parameters()
    assert torch.equal(meta.supports, before)
    with pytest.raises(
        ValueError, match=r"^adjacent: got True, expected a head whose groups may read any features; make it without$"
    ):
        head.rewire(0.1, step=3)


def test_a_centre_that_no_label_is_nearest_to_stays() -> None:
    """Of two equal centres the second sees nothing; at the origin it would draw the label that is opposite to both."""
    embeddings = torch.tensor([[1.0, 0.0]]).repeat(63, 1)
    embeddings[40] = -embeddings[40]
    groups = group_by_embedding(torch.arange(63), embeddings, group_size=4, groups_per_cluster=7)
    assert groups.offsets.diff().tolist() == [4] * 15 + [3]
    assert groups.labels[-3:].tolist().count(40) == 1


def test_messages_name_argument_and_cure() -> None:
    counts = torch.tensor([3, 2, 1])
    right: dict[str, Any] = {"input_dim": 4, "label_counts": counts, "num_rows": 5, "fan_in": 2}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"fan_in": 5}, "fan_in: expected 1 to 4, the width that groups read, got 5"),
        ({"fan_in": 3, "tail_dim": 2}, "fan_in: expected 1 to 2, the width that groups read, got 3"),
        ({"label_counts": counts.float()}, "label_counts: expected int64 of shape [num_labels], got float32 of shape [3]"),
        ({"label_counts": torch.tensor([3, 6, 1])}, "label_counts[1]: expected 0 to 5, num_rows, got 6"),
        ({"head": 4}, "head: expected 0 to 3 labels, or a share in [0, 1] as a float, got 4"),
        ({"head": 1.5}, "head: expected 0 to 3 labels, or a share in [0, 1] as a float, got 1.5"),
        ({"label_smoothing": 2.0}, "label_smoothing: expected a number in [0, 1], got 2.0"),
        ({"grouping": "near"}, "grouping: got 'near', expected 'random', 'frequency', embeddings of the labels or LabelGroups"),
        ({"grouping": torch.zeros(2, 4)}, "grouping: expected embeddings [3, E], a row for each label, got [2, 4]"),
        ({"group_size": 0}, "group_size: expected at least 1, got 0"),
    ]
    for wrong, message in cases:
        with pytest.raises(ValueError) as raised:  # noqa: PT011
            GroupSparseHead(**{**right, **wrong})
        assert str(raised.value) == message
    head = GroupSparseHead(**right)
    calls: list[tuple[dict[str, Any], str]] = [
        ({"fraction": 1.5}, "fraction: expected a number in [0, 1], got 1.5"),
        ({"by": "chance"}, "by: got 'chance', expected 'random' or 'gradient'"),
        ({"new_weights": "one"}, "new_weights: got 'one', expected 'zero' or 'uniform'"),
        ({"by": "gradient"}, "batch: expected features and positives, which by='gradient' takes gradients of, got None"),
    ]
    for wrong, message in calls:
        with pytest.raises(ValueError) as raised:  # noqa: PT011
            head.rewire(**{"fraction": 0.1, "step": 1, **wrong})
        assert str(raised.value) == message
    bad = JaggedTensor(values=torch.tensor([3]), offsets=torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=r"^positives\[0\]: expected an id from 0 to 2, got 3; map ids to dense ones first$"):
        head(torch.zeros(1, 4), bad)


@pytest.mark.skipif(PLACE.name != "cpu", reason="processes on the CPU, whatever the place")
def test_two_processes_train_as_one_does(tmp_path: Path) -> None:
    """Halves of each batch under DistributedDataParallel; which inputs are new is the same on both."""
    for process in told_by("tests.modules.group_sparse_processes", tmp_path):
        assert process["changed"] >= 6
        # float64: sums in another order, through 30 steps of Adam.
        assert all(difference < 1e-9 for difference in process["differences"].values()), process


def test_biases_follow_the_labels_that_are_loaded() -> None:
    """Another grouping is loaded with its labels; weights that are drawn again have biases in its order."""
    counts = torch.randint(0, ROWS + 1, (23,), generator=torch.Generator().manual_seed(0))
    first, second = (GroupSparseHead(12, counts, ROWS, fan_in=4, group_size=5, head=3, seed=seed) for seed in (0, 1))
    expected = torch.cat([first.head_bias, first.bias])[first.places].detach()
    assert not torch.equal(first.labels, second.labels)
    second.load_state_dict(first.state_dict())
    second.reset_parameters()
    assert torch.equal(torch.cat([second.head_bias, second.bias])[second.places].detach(), expected)


def test_labels_and_places_of_eight_bytes_are_loaded() -> None:
    """As heads were saved that had them in int64; they score as before."""
    head, other = head_of(23, head=3, seed=1), head_of(23, head=3, seed=2)
    state = {name: x.long() if name in ("labels", "places") else x for name, x in head.state_dict().items()}
    other.load_state_dict(state)
    assert other.labels.dtype == other.places.dtype == torch.int32
    features = random_tensor((4, 12), torch.float32, 1)
    for found, expected in zip(other.topk(features, 5), head.topk(features, 5), strict=True):
        assert torch.equal(found, expected)
    assert other.topk(features, 5)[1].dtype == torch.int64


@pytest.mark.parametrize("wrong", [-1, -100, 23])
def test_an_unchecked_label_that_is_none_is_not_taken_for_another(place: Place, wrong: int) -> None:
    """On a GPU, and where values are trusted, nobody looks: a negative id would be a label counted from the end."""
    head, features = head_of(23, head=3), random_tensor((2, 12), torch.float32, 1)
    offsets = torch.tensor([0, 1, 2], device=place.device)
    with trust_values():
        for values, expected in (([4, wrong], True), ([4, 22], False)):
            positives = JaggedTensor(values=torch.tensor(values, device=place.device), offsets=offsets)
            assert bool(head(features, positives).isnan()) == expected
