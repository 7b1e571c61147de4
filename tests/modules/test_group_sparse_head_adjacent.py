"""A head whose groups read adjacent inputs is the one that names all of them, wherever heads go."""

from __future__ import annotations

import copy
import io
import pickle
import re

import pytest
import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from jagged.modules import GroupSparseHead
from tests.modules.test_group_sparse_head import head_of, positives_for
from tests.places import PLACE, Place
from tests.strategies import jagged_of, random_tensor

pytestmark = [
    pytest.mark.skipif(PLACE.name == "interpret", reason="modules run on the place's own backend"),
    # Marks what runs on a GPU, too.
    pytest.mark.usefixtures("place"),
]

OF_BOTH = pytest.mark.parametrize("loss", ["bce", "softmax"])


def heads_of(loss: str) -> tuple[GroupSparseHead, GroupSparseHead]:
    """The head, and one with the same groups, weights and inputs that could have any others."""
    head, plain = (head_of(23, head=3, loss=loss, adjacent=adjacent) for adjacent in (True, False))
    with torch.no_grad():
        head.weight.copy_(random_tensor(head.weight.shape, torch.float32, 3))
    inputs = head.supports[:, None] + torch.arange(4, dtype=torch.int32, device=PLACE.device)
    plain.load_state_dict({**head.state_dict(), "supports": inputs, "born": plain.born})
    return head, plain


def batch_of() -> tuple[Tensor, JaggedTensor]:
    return random_tensor((4, 12), torch.float32, 5), positives_for(jagged_of((2, 1, 0, 4)), 23, 0)


@OF_BOTH
def test_losses_gradients_and_scores_are_equal(place: Place, loss: str) -> None:
    head, plain = heads_of(loss)
    features, positives = batch_of()
    found = []
    for one in (head, plain):
        leaf = features.clone().requires_grad_()
        value = one(leaf, positives)
        value.backward()
        grads = {name: parameter.grad for name, parameter in one.named_parameters()}
        found.append((value.detach(), leaf.grad, grads, one.topk(features, 5), one.dense()))
    torch.testing.assert_close(*found, rtol=0, atol=0)
    assert found[0][1] is not None
    assert found[0][1].any()


@OF_BOTH
@pytest.mark.parametrize("way", ["compiled", "exported", "pickled", "saved", "copied", "autocast"])
def test_it_goes_where_heads_go(place: Place, loss: str, way: str) -> None:
    head, plain = heads_of(loss)
    features, positives = batch_of()
    expected = plain(features, positives)
    if way == "compiled":
        ours = torch.compile(lambda x: head(x, positives), backend="aot_eager", fullgraph=True)(features)
    elif way == "exported":
        ours = torch.export.export(Loss(head, positives), (features,)).module()(features)
    elif way == "autocast":
        with torch.autocast(place.device.type, dtype=torch.bfloat16):
            ours, expected = head(features, positives), plain(features, positives)
    else:
        ours = moved(head, way)(features, positives)
    torch.testing.assert_close(ours, expected)


class Loss(nn.Module):
    """The loss as a function of features alone."""

    def __init__(self, head: GroupSparseHead, positives: JaggedTensor) -> None:
        super().__init__()
        self.head, self.positives = head, positives

    def forward(self, features: Tensor) -> Tensor:
        return self.head(features, self.positives)  # type: ignore[no-any-return]


def moved(head: GroupSparseHead, way: str) -> GroupSparseHead:
    if way == "pickled":
        return pickle.loads(pickle.dumps(head))  # type: ignore[no-any-return]
    if way == "copied":
        return copy.deepcopy(head)
    file = io.BytesIO()
    torch.save(head, file)
    file.seek(0)
    return torch.load(file, weights_only=False)  # type: ignore[no-any-return]


def test_a_state_that_names_all_inputs_is_refused(place: Place) -> None:
    """As heads of adjacent inputs had it once: nothing of it is loaded by halves."""
    head, plain = heads_of("bce")
    before = copy.deepcopy(head.supports)
    number = head.num_groups
    message = f"size mismatch for supports: copying a param with shape torch.Size([{number}, 4]) from checkpoint, the shape in"
    with pytest.raises(RuntimeError, match=re.escape(message)):
        head.load_state_dict(plain.state_dict())
    assert torch.equal(head.supports, before)
