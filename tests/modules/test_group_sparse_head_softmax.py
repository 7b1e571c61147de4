"""The head of many labels with a softmax over all of them: against a dense layer with all zeros, and how its inputs change."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor

from jagged.modules import GroupSparseHead
from jagged.ops import trust_values
from tests.modules.test_group_sparse_head import ROWS, dense_logits, head_of, positives_for, targets_for
from tests.oracle import check_three_way
from tests.places import PLACE, Place
from tests.reference import group_sparse as reference
from tests.strategies import Jagged, jagged_batches, jagged_of, random_tensor, seeds

pytestmark = [
    pytest.mark.skipif(PLACE.name == "interpret", reason="modules run on the place's own backend"),
    # Marks what runs on a GPU, too.
    pytest.mark.usefixtures("place"),
]


def softmax_head(**options: Any) -> GroupSparseHead:
    return head_of(23, options.pop("seed", 0), loss="softmax", **options)


def dense_loss(head: GroupSparseHead, features: Tensor, targets: Tensor, row_mask: Tensor | None = None) -> Tensor:
    return reference.group_sparse_cross_entropy(dense_logits(head, features), targets, row_mask)[0]


@settings(max_examples=25)
@given(jagged_batches(longest=6), seeds(), st.sampled_from([0, 3, 0.25, 1.0]), st.booleans(), st.booleans())
def test_loss_is_that_of_a_dense_layer(
    place: Place, batch: Jagged, seed: int, head_labels: int | float, projected: bool, masked: bool
) -> None:
    head = softmax_head(seed=seed, head=head_labels, **({"head_dim": 7, "tail_dim": 9} if projected else {}))
    # Of 23 labels, that rows have some of several times.
    positives = positives_for(batch, 23 if seed % 2 else 4, seed)
    mask = torch.rand(batch.batch_size, generator=torch.Generator().manual_seed(seed)) < 0.7
    row_mask = mask.to(place.device) if masked else None
    features = random_tensor((batch.batch_size, 12), torch.float32, seed)
    names = [name for name, parameter in head.named_parameters() if parameter.numel()]
    targets = targets_for(head, positives)

    def call(function: Any, *given: Tensor) -> Tensor:
        module = copy.deepcopy(head).to(given[0].dtype)
        # The parameters are inputs, too.
        for name, value in zip(names, given[1:], strict=True):
            owner = module.get_submodule(name.rpartition(".")[0])
            del owner._parameters[name.rpartition(".")[2]]
            setattr(owner, name.rpartition(".")[2], value)
        return function(module, given[0])

    check_three_way(
        lambda *given: call(lambda module, x: module(x, positives, row_mask), *given),
        lambda *given: call(lambda module, x: dense_loss(module, x, targets, row_mask), *given),
        [features, *[dict(head.named_parameters())[name].detach() for name in names]],
    )


@settings(max_examples=25)
@given(st.integers(0, 6), seeds(), st.sampled_from([0, 3, 0.25, 1.0]), st.booleans(), st.sampled_from([torch.int32, torch.int64]))
def test_one_target_a_row(
    place: Place, rows: int, seed: int, head_labels: int | float, projected: bool, dtype: torch.dtype
) -> None:
    """The loss is PyTorch's of all logits, and the scores are its targets'; rows without a target have none."""
    head = softmax_head(seed=seed, head=head_labels, **({"head_dim": 7, "tail_dim": 9} if projected else {}))
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(23, (rows,), generator=generator).masked_fill(torch.rand(rows, generator=generator) < 0.3, -100)
    targets = targets.to(place.device, dtype)
    counted = targets >= 0

    def padded(module: GroupSparseHead, x: Tensor) -> Tensor:
        logits = dense_logits(module, x)
        of_targets = logits.gather(1, targets.clamp(min=0).long()[:, None])[:, 0].masked_fill(~counted, 0)
        losses = (logits.logsumexp(1) - of_targets).masked_fill(~counted, 0)
        return torch.cat([(losses.sum() / counted.sum().clamp(min=1))[None], of_targets.detach()])

    def ours(module: GroupSparseHead, x: Tensor) -> Tensor:
        loss, logits = module.target_loss(x, targets)
        assert not logits.requires_grad
        return torch.cat([loss[None], logits])

    check_three_way(
        lambda x: ours(copy.deepcopy(head).to(x.dtype), x),
        lambda x: padded(copy.deepcopy(head).to(x.dtype), x),
        [random_tensor((rows, 12), torch.float32, seed)],
    )


def test_targets_that_are_no_labels(place: Place) -> None:
    head, features = softmax_head(head=3), random_tensor((2, 12), torch.float32, 1)
    for wrong in (-1, 23):
        targets = torch.tensor([4, wrong], device=place.device)
        if place.name == "cpu":
            with pytest.raises(ValueError, match="targets"):
                head.target_loss(features, targets)
        with trust_values():
            assert head.target_loss(features, targets).loss.isnan()
    with trust_values():
        assert not head.target_loss(features, torch.tensor([4, -100], device=place.device)).loss.isnan()
    with pytest.raises(
        ValueError, match=r"^loss: got a head of 'bce', expected one of 'softmax', which has one choice among all"
    ):
        head_of(23).target_loss(features, torch.tensor([4, 5], device=place.device))


@pytest.mark.parametrize("head_labels", [0, 6, 1.0])
@pytest.mark.parametrize("widths", [{}, {"head_dim": 7, "tail_dim": 9}])
def test_the_dense_layer_that_scores_as_a_head(
    place: Place, monkeypatch: pytest.MonkeyPatch, head_labels: int | float, widths: dict[str, int]
) -> None:
    head, features = softmax_head(head=head_labels, **widths), random_tensor((8, 12), torch.float32, 1)
    expected = dense_logits(head, features).detach()
    for piece in (2**24, 20):
        monkeypatch.setattr("jagged.modules.group_sparse._PIECE_ELEMENTS", piece)
        weight, bias = head.dense()
        assert (weight.shape, bias.shape, weight.requires_grad, bias.requires_grad) == ((23, 12), (23,), False, False)
        torch.testing.assert_close(features @ weight.T + bias, expected)


def test_biases_start_at_the_share_of_all_positives() -> None:
    """Features that say nothing leave the frequencies of labels."""
    counts = torch.tensor([0, 50, 100, 3, 70])
    for head_labels in (0, 2, 5):
        head = GroupSparseHead(6, counts, ROWS, fan_in=2, group_size=2, head=head_labels, loss="softmax")
        bias = torch.cat([head.head_bias, head.bias]).detach()[head.places]
        torch.testing.assert_close(bias.exp(), (counts + 0.5) / (counts + 0.5).sum())
        loss = head(torch.zeros(1, 6), JaggedTensor(values=torch.tensor([3]), offsets=torch.tensor([0, 1])))
        torch.testing.assert_close(loss.detach(), -bias[3])
        with torch.no_grad():
            head.bias.zero_()
        head.reset_parameters()
        assert torch.equal(torch.cat([head.head_bias, head.bias]).detach()[head.places], bias)


@pytest.mark.parametrize("head_labels", [0, 6, 1.0])
def test_best_labels_are_those_of_a_dense_layer(place: Place, head_labels: int | float) -> None:
    head, features = softmax_head(head=head_labels), random_tensor((8, 12), torch.float32, 1)
    scores, labels = head.topk(features, 23)
    best = dense_logits(head, features).detach().sort(1, descending=True)
    torch.testing.assert_close(scores, best.values)
    assert torch.equal(labels, best.indices)


@pytest.mark.parametrize("head_labels", [0, 6, 1.0])
def test_scores_become_probabilities(place: Place, head_labels: int | float) -> None:
    """Of all labels they are one; of the best so many as there are are theirs."""
    head, features = softmax_head(head=head_labels), random_tensor((8, 12), torch.float32, 1)
    scores, labels = head.topk(features, head.num_labels)
    found = head.probabilities(features, scores)
    torch.testing.assert_close(found, dense_logits(head, features).detach().softmax(1).gather(1, labels))
    few = head.probabilities(features, scores[:, :2])
    torch.testing.assert_close(few, found[:, :2])
    nothing = head.probabilities(features[:0], scores[:0])
    assert nothing.shape == (0, head.num_labels)
    # Places that no label has.
    assert head.probabilities(features[:1], torch.full((1, 1), -torch.inf, device=place.device)).tolist() == [[0.0]]


def test_logits_far_from_zero(place: Place) -> None:
    """One label has all the probability, in the dense layer or in a group: a loss of nothing or of a thousand, and no NaN."""
    head, features = softmax_head(head=3), random_tensor((1, 12), torch.float32, 1)
    for best in (int(head.labels[1]), int(head.labels[20])):
        with torch.no_grad():
            head.reset_parameters()
            place_ = int(head.places[best])
            (head.head_bias if place_ < 3 else head.bias)[place_ if place_ < 3 else place_ - 3] = 1000.0
        for label in (best, int(head.labels[0]), int(head.labels[22])):
            positives = JaggedTensor(
                values=torch.tensor([label], device=place.device), offsets=torch.tensor([0, 1], device=place.device)
            )
            loss = head(features, positives)
            expected = dense_loss(head, features, targets_for(head, positives))
            # Two roundings of a logit of a thousand.
            torch.testing.assert_close(loss, expected, rtol=1e-6, atol=2 * 1000 * torch.finfo(torch.float32).eps)
            gradients = torch.autograd.grad(loss, list(head.parameters()))
            for ours, wanted in zip(gradients, torch.autograd.grad(expected, list(head.parameters())), strict=True):
                torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=2e-4)


def test_rows_that_do_not_count(place: Place) -> None:
    """Masked rows, whatever their features are, and rows without positives: the loss and its gradients are the others'."""
    features = random_tensor((4, 12), torch.float32, 1)
    positives = positives_for(jagged_of((2, 1, 0, 4)), 23, 1)
    row_mask = torch.tensor([True, False, True, True], device=place.device)
    kept = JaggedTensor(
        values=torch.cat([positives.values()[:2], positives.values()[3:]]), offsets=torch.tensor([0, 2, 6], device=place.device)
    )
    for head_labels in (0, 3, 1.0):
        head = softmax_head(head=head_labels)
        parameters = [parameter for parameter in head.parameters() if parameter.numel()]
        results = []
        for call in (
            (features.masked_fill(~row_mask[:, None], torch.nan), positives, row_mask),
            (features[[0, 3]], kept),
        ):
            loss = head(*call)
            results.append([loss, *torch.autograd.grad(loss, parameters)])
        for ours, expected in zip(*results, strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
        nothing = head(features, positives, torch.zeros_like(row_mask))
        assert float(nothing.detach()) == 0
        assert not any(bool(grad.any()) for grad in torch.autograd.grad(nothing, parameters))


@pytest.mark.parametrize("wrong", [-1, -100, 23])
def test_an_unchecked_label_that_is_none_is_not_taken_for_another(place: Place, wrong: int) -> None:
    head, features = softmax_head(head=3), random_tensor((2, 12), torch.float32, 1)
    offsets = torch.tensor([0, 1, 2], device=place.device)
    with trust_values():
        for values, expected in (([4, wrong], True), ([4, 22], False)):
            positives = JaggedTensor(values=torch.tensor(values, device=place.device), offsets=offsets)
            assert bool(head(features, positives).isnan()) == expected


@pytest.mark.parametrize("head_labels", [0, 3, 1.0])
def test_autocast_compile_and_checkpoint(place: Place, head_labels: int | float) -> None:
    head = softmax_head(head=head_labels, head_dim=7 if head_labels else None)
    parameters = [parameter for parameter in head.parameters() if parameter.numel()]
    positives = positives_for(jagged_of((2, 1, 0, 4)), 23, 1)

    def run(function: Any, positives: JaggedTensor = positives, autocast: bool = False) -> list[Tensor]:
        leaf = random_tensor((positives.offsets().shape[0] - 1, 12), torch.float32, 1).requires_grad_()
        with torch.autocast(place.device.type, torch.bfloat16, enabled=autocast):
            loss = function(leaf, positives)
        gradients = torch.autograd.grad(loss, [leaf, *parameters])
        assert all(gradient.dtype == torch.float32 for gradient in (loss, *gradients))
        return [loss.detach(), *gradients]

    expected = run(head)
    again = run(lambda x, y: torch.utils.checkpoint.checkpoint(lambda x: head(x, y), x, use_reentrant=False))
    assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))
    compiled = torch.compile(head, fullgraph=True, backend="aot_eager")
    other = positives_for(jagged_of((1, 5, 2)), 23, 2)
    for some in (positives, other):
        for ours, eager in zip(run(compiled, some), run(head, some), strict=True):
            torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-6)
    for ours, exact in zip(run(head, autocast=True), expected, strict=True):
        torch.testing.assert_close(ours, exact, rtol=0.05, atol=0.05)


def test_saved_pickled_loaded_and_made_on_the_meta_device(place: Place) -> None:
    head = softmax_head(head=3)
    head.rewire(0.4, step=3)
    features, positives = random_tensor((2, 12), torch.float32, 1), positives_for(jagged_of((2, 1)), 23, 1)
    loaded = softmax_head(head=3)
    loaded.load_state_dict(head.state_dict())
    meta = softmax_head(head=3, device="meta", seed=1).to_empty(device=place.device)
    meta.load_state_dict(head.state_dict())
    for copied in (loaded, meta, pickle.loads(pickle.dumps(head)), copy.deepcopy(head)):
        assert copied.loss == "softmax"
        assert torch.equal(copied(features, positives), head(features, positives))
    assert "loss='softmax'" in repr(head) or "loss=softmax" in repr(head)


def test_inputs_by_gradient_are_those_of_a_dense_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of rows without positives, which have no gradient, and of a label that a row has twice."""
    head = softmax_head(head=3, tail_dim=9)
    other = copy.deepcopy(head)
    features, positives = random_tensor((6, 12), torch.float32, 1), positives_for(jagged_of((2, 0, 9, 1, 1, 2)), 23, 1)
    hidden = head.tail_projection(features).detach()
    sizes = head.group_offsets.diff().tolist()
    group = torch.repeat_interleave(torch.tensor(sizes)).to(PLACE.device)
    dense = torch.zeros(20, 9, device=PLACE.device).scatter(1, head.supports.long()[group], head.weight.detach()).requires_grad_()
    of_head = features @ head.head_weight.detach().T + head.head_bias.detach()
    logits = torch.cat([of_head, hidden @ dense.T + head.bias.detach()], 1)
    reference.group_sparse_cross_entropy(logits, targets_for(head, positives)[:, head.labels])[0].backward()
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
    everything = softmax_head(head=1.0)
    assert everything.rewire(0.5, step=3, by="gradient", batch=(features, positives)) == 0


def test_it_learns_which_inputs_labels_have() -> None:
    """Each label is there where one feature is large. At first a group has a quarter of what its labels need."""
    labels, rows = 24, 512
    target = torch.randint(0, labels, (rows,), generator=torch.Generator().manual_seed(0))
    noise = torch.randn(rows, labels, generator=torch.Generator().manual_seed(1))
    features = torch.nn.functional.one_hot(target, labels).float() * 3 + 0.1 * noise
    positives = JaggedTensor(values=target, offsets=torch.arange(rows + 1))
    torch.manual_seed(0)
    counts = torch.full((labels,), rows // labels)
    head = GroupSparseHead(24, counts, rows, fan_in=6, group_size=4, head=4, loss="softmax")
    optimizer = torch.optim.Adam(head.parameters(), 0.05)
    for step in range(200):
        if step % 20 == 10 and step < 150:
            head.rewire(0.25, step=step, protected=20, by="gradient", batch=(features, positives), optimizer=optimizer)
        optimizer.zero_grad()
        head(features, positives).backward()
        optimizer.step()
    assert float((head.topk(features, 1)[1][:, 0] == target).float().mean()) > 0.95


def test_messages_name_argument_and_cure() -> None:
    right: dict[str, Any] = {"input_dim": 4, "label_counts": torch.tensor([3, 2, 1]), "num_rows": 5, "fan_in": 2}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"loss": "hinge"}, "loss: got 'hinge', expected 'bce' or 'softmax'"),
        (
            {"loss": "softmax", "label_smoothing": 0.1},
            "label_smoothing: expected 0 for loss='softmax', which has none, got 0.1",
        ),
    ]
    for wrong, message in cases:
        with pytest.raises(ValueError) as raised:  # noqa: PT011
            GroupSparseHead(**{**right, **wrong})
        assert str(raised.value) == message
