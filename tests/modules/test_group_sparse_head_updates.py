"""Heads of many labels whose groups are updated in the backward pass."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchrec.sparse.jagged_tensor import JaggedTensor

from jagged.modules import GroupSparseHead
from jagged.ops import trust_values
from tests.modules.test_group_sparse_head import head_of, positives_for
from tests.places import PLACE, Place
from tests.strategies import jagged_of, random_tensor

RULE = {"learning_rate": 0.3, "momentum": 0.8, "weight_decay": 0.1}
BATCH = jagged_of((2, 1, 0, 4))


OF_BOTH = pytest.mark.parametrize("loss", ["bce", "softmax"])


def updated_head(**options: Any) -> GroupSparseHead:
    return head_of(23, head=3, tail_dim=9, optimizer="sgd", **{"optimizer_options": dict(RULE), **options})


def batches(count: int) -> list[tuple[Tensor, Any]]:
    return [(random_tensor((4, 12), torch.float32, seed), positives_for(BATCH, 23, seed)) for seed in range(count)]


def tensors_of(head: GroupSparseHead) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in (head.state_dict() | head.optimizer_state_dict()).items()}


def check_equal(left: GroupSparseHead, right: GroupSparseHead) -> None:
    others = tensors_of(right)
    for name, tensor in tensors_of(left).items():
        assert torch.equal(tensor, others[name]), name


@OF_BOTH
def test_it_trains_as_with_an_optimizer_of_pytorch(place: Place, loss: str) -> None:
    """The groups by SGD, all else by Adam."""
    head, plain = updated_head(loss=loss), head_of(23, head=3, tail_dim=9, loss=loss)
    plain.load_state_dict(head.state_dict())
    ours = torch.optim.Adam(head.parameters(), lr=0.1)
    groups = {"weight", "bias"}
    theirs = torch.optim.Adam([p for name, p in plain.named_parameters() if name not in groups], lr=0.1)
    decayed = {"params": [plain.weight], "weight_decay": RULE["weight_decay"]}
    of_groups = torch.optim.SGD([decayed, {"params": [plain.bias]}], lr=RULE["learning_rate"], momentum=RULE["momentum"])
    for features, positives in batches(5):
        head.zero_grad()
        plain.zero_grad()
        ours_of, expected = head(features, positives), plain(features, positives)
        torch.testing.assert_close(ours_of, expected)
        ours_of.backward()
        expected.backward()
        assert head.weight.grad is None
        assert head.bias.grad is None
        ours.step()
        theirs.step()
        of_groups.step()
    for (name, tensor), other in zip(head.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(tensor, other, msg=name)


@OF_BOTH
def test_what_records_no_gradient_changes_nothing(place: Place, loss: str) -> None:
    """Scores, losses without a graph, and a head whose weights are frozen, which is a head like any other."""
    head, (features, positives) = updated_head(loss=loss), batches(1)[0]
    before = copy.deepcopy(head)
    head.probabilities(features, head.topk(features, 3)[0])
    with torch.no_grad():
        head(features, positives)
    head.requires_grad_(False)
    leaf = features.clone().requires_grad_()
    head(leaf, positives).backward()
    assert leaf.grad is not None
    check_equal(head, before)


@OF_BOTH
def test_nothing_is_learnt_from_a_label_that_is_none(place: Place, loss: str) -> None:
    head, (features, _) = updated_head(loss=loss), batches(1)[0]
    before, bad = copy.deepcopy(head), positives_for(BATCH, 23, 0)
    bad.values()[1] = 23
    with trust_values():
        wrong = head(features, bad)
    assert bool(wrong.isnan())
    wrong.backward()
    for name, tensor in tensors_of(before).items():
        assert name == "step" or torch.equal(tensors_of(head)[name], tensor), name


def test_a_target_of_each_row_is_learnt_from(place: Place) -> None:
    """As next-item models have them: rows without one do not count, and a target that is no label changes nothing."""
    head, plain = updated_head(loss="softmax"), head_of(23, head=3, tail_dim=9, loss="softmax")
    plain.load_state_dict(head.state_dict())
    features, targets = batches(1)[0][0], torch.tensor([22, -100, 0, 5], device=place.device)
    head.target_loss(features, targets).loss.backward()
    plain.target_loss(features, targets).loss.backward()
    assert plain.weight.grad is not None
    assert head.weight.grad is None
    gradient = plain.weight.grad + RULE["weight_decay"] * plain.weight
    torch.testing.assert_close(head.weight, plain.weight - RULE["learning_rate"] * gradient)
    before = copy.deepcopy(head)
    with trust_values():
        head.target_loss(features, targets + 9).loss.backward()
    for name, tensor in tensors_of(before).items():
        assert name == "step" or torch.equal(tensors_of(head)[name], tensor), name


def test_new_inputs_have_no_momentum(place: Place) -> None:
    head = updated_head()
    for features, positives in batches(2):
        head(features, positives).backward()
    assert head.optimizer is not None
    before = tensors_of(head)
    assert bool((before["weight_momentum"] != 0).all())
    assert head.rewire(0.3, step=5) > 0
    changed = (head.supports != before["supports"])[head._group_of_label()]
    momentum = head.optimizer.weight_momentum
    assert torch.equal(momentum == 0, changed)
    assert torch.equal(momentum[~changed], before["weight_momentum"][~changed])
    assert torch.equal(head.optimizer.bias_momentum, before["bias_momentum"])


def test_it_goes_on_from_its_state(place: Place) -> None:
    """Saved, loaded, copied, pickled and moved: the next steps are the same."""
    head, given = updated_head(), batches(4)
    for features, positives in given[:2]:
        head(features, positives).backward()
    loaded = updated_head(seed=1)
    loaded.load_state_dict(head.state_dict())
    loaded.load_optimizer_state_dict(head.optimizer_state_dict())
    others = [loaded, copy.deepcopy(head), pickle.loads(pickle.dumps(head)), copy.deepcopy(head).to("cpu").to(place.device)]
    for features, positives in given[2:]:
        for one in (head, *others):
            one(features, positives).backward()
    for other in others:
        check_equal(head, other)


def test_states_that_do_not_fit_are_refused(place: Place) -> None:
    head, other = updated_head(), updated_head(optimizer_options={"learning_rate": 0.1})
    state = head.optimizer_state_dict()
    assert list(other.optimizer_state_dict()["weight_momentum"].shape) == [0, 0]
    message = "state_dict: expected shape [0, 0] for 'weight_momentum', got [20, 4]; head and optimizer must be the same"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        other.load_optimizer_state_dict({**state, "bias_momentum": other.optimizer_state_dict()["bias_momentum"]})
    assert head_of(23).optimizer_state_dict() == {}
    message = "state_dict: expected shape None for 'bias_momentum', got [20]; head and optimizer must be the same"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        head_of(23).load_optimizer_state_dict(state)


def test_it_is_made_on_the_meta_device(place: Place) -> None:
    head = updated_head(device="meta").to_empty(device=place.device)
    head.reset_parameters()
    assert head.optimizer is not None
    assert head.optimizer.step.device == head.weight.device
    assert not head.optimizer.weight_momentum.any()
    features, positives = batches(1)[0]
    before = head.weight.detach().clone()
    head(features, positives).backward()
    assert not torch.equal(head.weight, before)
    head.reset_parameters()
    assert head.optimizer is not None
    assert not head.optimizer.weight_momentum.any()


@OF_BOTH
def test_layers_before_it_under_autocast_and_checkpointing(place: Place, loss: str) -> None:
    layer, (features, positives) = nn.Linear(12, 12, device=place.device), batches(1)[0]
    heads = [updated_head(loss=loss) for _ in range(2)]
    for head, is_again in zip(heads, (False, True), strict=True):
        with torch.autocast(place.device.type, dtype=torch.bfloat16):

            def run(x: Tensor, head: GroupSparseHead = head) -> Tensor:
                return head(layer(x), positives)  # type: ignore[no-any-return]

            value = checkpoint(run, features, use_reentrant=False) if is_again else run(features)
        assert value is not None
        value.backward()
    check_equal(*heads)
    assert not torch.equal(heads[0].weight, updated_head().weight)


@pytest.mark.skipif(torch.__version__ < "2.12", reason="PyTorch 2.11 compiles no backward pass that changes a parameter")
def test_in_one_graph(place: Place) -> None:
    eager, other = updated_head(), updated_head()
    torch._dynamo.reset()

    def loss(features: Tensor, values: Tensor, offsets: Tensor) -> Tensor:
        return other(features, type(given[0][1])(values=values, offsets=offsets))  # type: ignore[no-any-return]

    given = batches(3)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for features, positives in given:
        eager(features, positives).backward()
        compiled(features, positives.values(), positives.offsets()).backward()
        eager.zero_grad()
        other.zero_grad()
    check_equal(eager, other)


class OnTensors(nn.Module):
    """A head that takes positives as tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.head = updated_head()

    def forward(self, features: Tensor, values: Tensor, offsets: Tensor) -> Tensor:
        return self.head(features, JaggedTensor(values=values, offsets=offsets))  # type: ignore[no-any-return]


def test_an_exported_loss_is_the_same_and_changes_nothing(place: Place) -> None:
    model, (features, positives) = OnTensors(), batches(1)[0]
    before, given = copy.deepcopy(model.head), (features, positives.values(), positives.offsets())
    program = torch.export.export(model, given)
    assert torch.equal(program.module()(*given), model(*given))
    check_equal(model.head, before)


@OF_BOTH
def test_several_processes_are_refused(place: Place, loss: str) -> None:
    head, (features, positives) = updated_head(loss=loss), batches(1)[0]
    message = (
        "optimizer: a head's own updates by the gradients of one process, got 2 processes, which would learn apart; "
        "make the head without an optimizer"
    )
    with patch("jagged.modules.group_sparse._num_processes", return_value=2):
        with torch.no_grad():
            head(features, positives)
        with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"):
            head(features, positives)


@pytest.mark.usefixtures("place")
def test_messages_name_option_and_cure() -> None:
    rate = {"learning_rate": 0.1}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"optimizer_options": rate}, "optimizer_options: expected None without an optimizer; name one with optimizer"),
        ({"optimizer": "adam", "optimizer_options": rate}, "optimizer: got 'adam', expected 'sgd' or None"),
        (
            {"optimizer": "sgd", "optimizer_options": {**rate, "betas": 1}},
            "optimizer_options: got 'betas', expected some of learning_rate, momentum, weight_decay, stochastic_rounding, "
            "state_dtype",
        ),
        ({"optimizer": "sgd"}, "optimizer_options: expected a learning_rate, got none"),
        (
            {"optimizer": "sgd", "optimizer_options": {"learning_rate": 0.1, "momentum": 2}},
            "momentum: expected a number in [0, 1), got 2",
        ),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            head_of(23, **options)
    assert repr(updated_head()).splitlines()[1].endswith(", optimizer='sgd'")
    assert updated_head().weight.device.type == PLACE.device.type
