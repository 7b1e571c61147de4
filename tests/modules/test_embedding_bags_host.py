"""What a call costs the host does not grow with the tables, and exchanged parameters are noticed all the same."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from jagged.modules import ScheduledEmbeddingBagCollection, table_storage
from jagged.ops.embedding_bag import torch_impl
from tests.places import PLACE, Place

pytestmark = pytest.mark.skipif(PLACE.name == "interpret", reason="modules run on the place's own backend")


def module_of(count: int, optimizer: Any = None) -> ScheduledEmbeddingBagCollection:
    configs = [
        EmbeddingBagConfig(name=f"t{i}", num_embeddings=5, embedding_dim=4, feature_names=[f"f{i}"], init_fn=nn.init.zeros_)
        for i in range(count)
    ]
    options = None if optimizer is None else {"learning_rate": 0.0}
    return ScheduledEmbeddingBagCollection(configs, device=PLACE.device, optimizer=optimizer, optimizer_options=options)


def batch_of(keys: list[str]) -> KeyedJaggedTensor:
    features = KeyedJaggedTensor(
        keys=keys,
        values=torch.zeros(len(keys), dtype=torch.int64, device=PLACE.device),
        lengths=torch.ones(len(keys), dtype=torch.int64, device=PLACE.device),
    )
    features.offsets()
    return features


def calls(run: Callable[[], Any]) -> int:
    """How many functions the host calls, but for PyTorch's loop over features, which is the work itself there."""
    work, inside, found = torch_impl.forward.__code__, False, 0

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal inside, found
        if frame.f_code is work and event in ("call", "return"):
            inside = event == "call"
        found += not inside and event in ("call", "c_call")

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.parametrize("optimizer", [None, "sgd"])
@pytest.mark.parametrize("learns", [True, False])
def test_calls_do_not_grow_with_the_tables(
    place: Place, monkeypatch: pytest.MonkeyPatch, optimizer: str | None, learns: bool
) -> None:
    # So that looking at a parameter is a call that is counted, also from a loop in C.
    monkeypatch.setattr(table_storage, "_weight_of", lambda slots: slots["weight"])
    monkeypatch.setattr(table_storage, "_requires_grad", lambda parameter: parameter.requires_grad)
    found = {}
    for count in (2, 60):
        module, features = module_of(count, optimizer), batch_of([f"f{i}" for i in range(count)])
        with torch.set_grad_enabled(learns):
            for _ in range(3):
                module(features)
            found[count] = calls(lambda module=module, features=features: module(features))
            slots = module.embedding_bags["t1"]._parameters
            # Written to, all are looked at in the next call, and in none after it.
            slots["weight"] = slots["weight"]
            assert calls(lambda module=module, features=features: module(features)) >= found[count] + count
            assert calls(lambda module=module, features=features: module(features)) == found[count]
    assert found[2] == found[60]


def _assigned(module: nn.Module, bag: nn.Module, parameter: nn.Parameter) -> None:
    bag.weight = parameter


def _put(module: nn.Module, bag: nn.Module, parameter: nn.Parameter) -> None:
    bag._parameters["weight"] = parameter


def _updated(module: nn.Module, bag: nn.Module, parameter: nn.Parameter) -> None:
    bag._parameters.update(weight=parameter)


def _joined(module: nn.Module, bag: nn.Module, parameter: nn.Parameter) -> None:
    bag._parameters |= {"weight": parameter}


def _deleted(module: nn.Module, bag: nn.Module, parameter: nn.Parameter) -> None:
    del bag.weight
    assert bag._parameters.setdefault("weight", parameter) is parameter


def _popped(module: nn.Module, bag: nn.Module, parameter: nn.Parameter) -> None:
    bag._parameters.pop("weight")
    bag.weight = parameter


def _cleared(module: nn.Module, bag: nn.Module, parameter: nn.Parameter) -> None:
    bag._parameters.clear()
    bag.register_parameter("weight", parameter)


def _compiled(module: nn.Module, bag: nn.Module, parameter: nn.Parameter) -> None:
    def exchange(x: Tensor) -> Tensor:
        bag.weight = parameter
        return x + 1

    torch.compiler.reset()
    torch.compile(exchange, backend="eager", fullgraph=True)(torch.zeros(1))


def _loaded(module: nn.Module, bag: nn.Module, parameter: nn.Parameter) -> None:
    bag.load_state_dict({"weight": parameter}, assign=True)


EXCHANGES = [_assigned, _put, _updated, _joined, _deleted, _popped, _cleared, _compiled, _loaded]


@pytest.mark.parametrize("exchange", EXCHANGES, ids=lambda way: way.__name__)
def test_exchanged_parameters_are_noticed(place: Place, exchange: Callable[..., None]) -> None:
    module, features = module_of(3), batch_of(["f0", "f1", "f2"])
    bag, wanted = module.embedding_bags["t1"], torch.tensor([[0.0] * 4 + [1.0] * 4 + [0.0] * 4], device=place.device)
    old, new = bag.weight, nn.Parameter(torch.ones(5, 4, device=place.device))
    assert not module(features).values().any()
    exchange(module, bag, new)
    assert torch.equal(module(features).values(), wanted)
    module(features).values().sum().backward()
    assert old.grad is None
    assert new.grad is not None or exchange is _loaded
    bag.weight = old
    assert not module(features).values().any()
    exchange(module, bag, new)
    module.to(place.device)
    assert len({parameter.untyped_storage().data_ptr() for parameter in module.parameters()}) == 1
    assert torch.equal(module(features).values(), wanted)
    # The storage is another one, and what tells of changes too.
    bag.weight = old
    assert not module(features).values().any()


def test_a_popped_parameter_is_noticed_before_another_comes(place: Place) -> None:
    module, features = module_of(2), batch_of(["f0", "f1"])
    slots = module.embedding_bags["t1"]._parameters
    assert slots.popitem()[0] == "weight"
    with pytest.raises(AttributeError, match="weight"):
        module(features)


def test_copies_have_ordinary_dictionaries(place: Place) -> None:
    module = module_of(2)
    bag = module.embedding_bags["t1"]
    for copied in (copy.deepcopy(bag), pickle.loads(pickle.dumps(bag))):
        assert type(copied._parameters) is dict
        assert torch.equal(copied.weight, bag.weight)
    for whole in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        whole.embedding_bags["t1"].weight = nn.Parameter(torch.ones(5, 4, device=place.device))
        assert whole(batch_of(["f0", "f1"])).values().any()
        assert not module(batch_of(["f0", "f1"])).values().any()


def test_any_table_that_learns_is_found(place: Place) -> None:
    module, features = module_of(3), batch_of(["f0", "f1", "f2"])
    parameters = list(module.parameters())
    for learning in ([0, 1, 2], [2], [1], [], [0]):
        for place_of, parameter in enumerate(parameters):
            parameter.requires_grad_(place_of in learning)
        assert module(features).values().requires_grad == bool(learning)


def test_keys_may_change_from_batch_to_batch(place: Place) -> None:
    module, features = module_of(3), ["f0", "f1", "f2"]
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            parameter.fill_(number)
    wanted = [0.0] * 4 + [1.0] * 4 + [2.0] * 4
    changing = list(features)
    for keys in (
        features,
        ["f2", "f0", "f1"],
        ["f2", "f0", "f1"],
        ["".join(key) for key in features],
        ["f1", "f0", "x", "f2"],
    ):
        changing[:] = keys
        for given in (list(keys), changing):
            assert module(batch_of(given)).values().tolist() == [wanted]
    for keys in (["f0", "f1"], []):
        with pytest.raises(ValueError, match="features: expected a key for every feature of the tables, got none for"):
            module(batch_of(keys))
    assert module(batch_of(features)).values().tolist() == [wanted]
