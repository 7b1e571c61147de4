"""Bags of one storage against TorchRec's EmbeddingBagCollection, and what keeps storage and parameters together."""

from __future__ import annotations

import copy
import io
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from jagged.modules import ScheduledEmbeddingBagCollection, replace_embeddings
from jagged.modules.table_storage import TableStorage
from jagged.ops import BagPlan, BagSchedule
from tests.modules.lookups import FEATURES, MEAN, SUM, Lookups, Pair, check_both, some_tables, table
from tests.places import PLACE, Place

pytestmark = pytest.mark.skipif(PLACE.name == "interpret", reason="modules run on the place's own backend")


pair = Pair(EmbeddingBagCollection, ScheduledEmbeddingBagCollection).make


def storages(module: ScheduledEmbeddingBagCollection) -> set[int]:
    return {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}


def test_poolings_that_take_turns_keep_their_features(place: Place) -> None:
    configs = [table(f"t{i}", 5, 2, f"f{i}", pooling=(SUM, MEAN)[i % 2], init_fn=_filled(i + 1.0)) for i in range(5)]
    ours = ScheduledEmbeddingBagCollection(configs, device=place.device)
    features = Lookups(tuple(f"f{i}" for i in range(5)), batch_size=1, longest=0).features()
    twice = KeyedJaggedTensor(
        keys=features.keys(), values=torch.zeros(10, dtype=torch.int64, device=place.device), lengths=features.lengths() + 2
    )
    pooled = ours(twice)
    assert [pooled[f"f{i}"][0, 0].item() for i in range(5)] == [2, 2, 6, 4, 10]


def _filled(value: float) -> Callable[[Tensor], Tensor]:
    return lambda weight: weight.fill_(value)


@pytest.mark.parametrize("output_dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_bfloat16_and_other_outputs(place: Place, output_dtype: torch.dtype) -> None:
    configs = [
        table("x", 7, 3, "a", data_type=DataType.BF16),
        table("y", 5, 4, "b", "c"),
        table("z", 5, 2, "d", data_type=DataType.BF16),
    ]
    ours = ScheduledEmbeddingBagCollection(configs, device=place.device, output_dtype=output_dtype)
    assert [parameter.dtype for parameter in ours.parameters()] == [torch.bfloat16, torch.float32, torch.bfloat16]
    assert len(storages(ours)) == 2
    exact = EmbeddingBagCollection(copy.deepcopy(configs), device=place.device).double()
    exact.load_state_dict(ours.state_dict())
    features = Lookups().features()
    got, wanted = ours(features), exact(features)
    assert got.keys() == wanted.keys()
    torch.testing.assert_close(got.values(), wanted.values().to(output_dtype), check_dtype=True, **_float32_at_best(output_dtype))
    got.values().sum().backward()
    wanted.values().sum().backward()
    for mine, theirs in zip(ours.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad.to(mine.dtype))


def _float32_at_best(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 1.3e-6, "atol": 1e-5} if dtype == torch.float64 else {}


def test_gradients_are_the_derivatives(place: Place) -> None:
    ours = ScheduledEmbeddingBagCollection(
        [table("x", 4, 3, "a", "b"), table("y", 5, 2, "a")], True, place.device, output_dtype=torch.float64
    ).double()
    features = Lookups(("a", "b"), batch_size=2, rows=4).features(weights=True)
    names = [name for name, _ in ours.named_parameters()]

    def run(weights: Tensor, *tables: Tensor) -> Tensor:
        batch = KeyedJaggedTensor(keys=features.keys(), values=features.values(), lengths=features.lengths(), weights=weights)
        return torch.func.functional_call(ours, dict(zip(names, tables, strict=True)), (batch,)).values()

    inputs = [features.weights().detach().double(), *(parameter.detach().clone() for parameter in ours.parameters())]
    torch.autograd.gradcheck(run, [tensor.requires_grad_() for tensor in inputs])


def test_matching_and_permuted_keys_do_not_read_lengths(place: Place) -> None:
    ours = ScheduledEmbeddingBagCollection([table("x", 5, 3, "a"), table("y", 5, 2, "b")], device=place.device)
    for keys, reads in ((("a", "b"), False), (("b", "a"), False), (("a", "b", "c"), True)):
        features = Lookups(keys).features()
        ours(features)
        assert (features.length_per_key_or_none() is not None) == reads


def _saved(module: ScheduledEmbeddingBagCollection) -> ScheduledEmbeddingBagCollection:
    file = io.BytesIO()
    torch.save(module, file)
    # Every table once: they lie in one storage, which is written once.
    assert file.tell() < 60_000
    file.seek(0)
    return torch.load(file, weights_only=False)


def _assigned(module: ScheduledEmbeddingBagCollection) -> ScheduledEmbeddingBagCollection:
    other = ScheduledEmbeddingBagCollection(module.embedding_bag_configs(), device="meta")
    other.load_state_dict({name: tensor.clone() for name, tensor in module.state_dict().items()}, assign=True)
    return other


def _emptied(module: ScheduledEmbeddingBagCollection) -> ScheduledEmbeddingBagCollection:
    other = ScheduledEmbeddingBagCollection(module.embedding_bag_configs(), device="meta")
    assert all(parameter.is_meta for parameter in other.parameters())
    other.reset_parameters()
    other = other.to_empty(device=PLACE.device)
    assert other.device.type == PLACE.device.type
    other.load_state_dict(module.state_dict())
    return other


def _set_data(module: ScheduledEmbeddingBagCollection) -> ScheduledEmbeddingBagCollection:
    for parameter in module.parameters():
        parameter.data = parameter.data.clone()
    module.load_state_dict(module.state_dict())
    return module


def _replaced_parameter(module: ScheduledEmbeddingBagCollection) -> ScheduledEmbeddingBagCollection:
    bag = module.embedding_bags["y"]
    bag.weight = nn.Parameter(bag.weight.detach().clone())
    return module.to(module.device)


def _used(module: ScheduledEmbeddingBagCollection) -> ScheduledEmbeddingBagCollection:
    """With what a step leaves behind."""
    module(Lookups().features()).values().sum().backward()
    module.zero_grad()
    return module


WAYS: dict[str, Callable[[ScheduledEmbeddingBagCollection], ScheduledEmbeddingBagCollection]] = {
    "double and back": lambda module: module.double().float(),
    "to where it is": lambda module: module.to(module.device),
    "through the meta device": _emptied,
    "loaded by assignment": _assigned,
    "deepcopy": copy.deepcopy,
    "torch.save": _saved,
    "shared memory": lambda module: module.share_memory(),
    "data set": _set_data,
    "parameter exchanged": _replaced_parameter,
    "inside a model": lambda module: nn.Sequential(module).double().float()[0],
    "train, eval, freeze": lambda module: module.eval().requires_grad_(False).requires_grad_().train(),
}


@pytest.mark.parametrize("way", WAYS)
def test_parameters_stay_views_of_one_storage(place: Place, way: str) -> None:
    ours, twin = pair(some_tables())
    moved = WAYS[way](_used(ours))
    assert len(storages(moved)) == 1
    assert list(moved.state_dict()) == list(twin.state_dict())
    check_both(moved, twin, Lookups().features(), 0)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.fill_(2.0)
    assert set(moved(Lookups(longest=0).features()).values().unique().tolist()) <= {0.0}
    one = KeyedJaggedTensor(
        keys=list(FEATURES),
        values=torch.zeros(4, dtype=torch.int64, device=place.device),
        lengths=torch.ones(4, dtype=torch.int64, device=place.device),
    )
    assert moved(one).values().unique().tolist() == [2.0]


def test_half_precision_and_copies_on_their_own(place: Place) -> None:
    ours, twin = pair(some_tables())
    parameters = list(ours.parameters())
    ours(Lookups().features()).values().sum().backward()
    half = ours.half()
    assert all(mine is before for mine, before in zip(half.parameters(), parameters, strict=True))
    assert {parameter.grad.dtype for parameter in parameters} == {torch.float16}
    torch.testing.assert_close(half(Lookups().features()).values(), twin(Lookups().features()).values(), rtol=1e-3, atol=1e-3)
    copied = copy.deepcopy(half)
    assert storages(copied).isdisjoint(storages(half))
    with torch.no_grad():
        copied.embedding_bags["x"].weight.zero_()
    assert half.embedding_bags["x"].weight.any()


@pytest.mark.parametrize("way", [copy.deepcopy, _saved])
def test_copies_are_copied_once(
    place: Place, monkeypatch: pytest.MonkeyPatch, way: Callable[[ScheduledEmbeddingBagCollection], nn.Module]
) -> None:
    ours = ScheduledEmbeddingBagCollection(some_tables(), device=place.device)
    search, found = TableStorage._storage_of, []

    def recorded(self: TableStorage, parameters: list[nn.Parameter]) -> Tensor | None:
        found.append(search(self, parameters))
        return found[-1]

    monkeypatch.setattr(TableStorage, "_storage_of", recorded)
    way(ours)
    assert len(found) == 1
    assert found[0] is not None


def test_copies_of_a_model_keep_what_it_shares(place: Place) -> None:
    ours = ScheduledEmbeddingBagCollection(some_tables(), device=place.device)
    model = nn.ModuleDict({"bags": ours, "head": nn.Linear(3, 7, device=place.device)})
    model["head"].weight = ours.embedding_bags["x"].weight
    copied = copy.deepcopy(model)
    assert copied["head"].weight is copied["bags"].embedding_bags["x"].weight
    assert len(storages(copied["bags"])) == 1


def test_two_forwards_and_two_backwards(place: Place) -> None:
    ours, twin = pair(some_tables())
    batches = [Lookups(seed=seed).features() for seed in (1, 2)]
    for module in (ours, twin):
        sum(module(batch).values().square().sum() for batch in batches).backward()
        module(batches[0]).values().sum().backward()
    for mine, theirs in zip(ours.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    ours.zero_grad()
    found = torch.autograd.grad(ours(batches[0]).values().sum(), list(ours.parameters()))
    wanted = torch.autograd.grad(twin(batches[0]).values().sum(), list(twin.parameters()))
    torch.testing.assert_close(found, wanted)
    assert all(parameter.grad is None for parameter in ours.parameters())


def test_gradients_are_not_copied(place: Place) -> None:
    ours = ScheduledEmbeddingBagCollection(some_tables(), device=place.device)
    for _ in range(2):
        ours.zero_grad()
        ours(Lookups().features()).values().sum().backward()
        assert len({parameter.grad.untyped_storage().data_ptr() for parameter in ours.parameters()}) == 1


@pytest.mark.parametrize("moved", [False, True])
def test_tables_that_change_before_backward_are_refused(place: Place, moved: bool) -> None:
    ours = ScheduledEmbeddingBagCollection([table("x", 5, 3, "a"), table("y", 5, 3, "b")], True, place.device)
    ours = ours.double().float() if moved else ours
    for frozen in (False, True):
        ours.requires_grad_(not frozen)
        pooled = ours(Lookups(("a", "b")).features(weights=True)).values()
        with torch.no_grad():
            ours.embedding_bags["y"].weight.add_(1)
        with pytest.raises(RuntimeError, match="changed in place; step the optimizer after backward"):
            pooled.sum().backward()
    ours(Lookups(("a", "b")).features(weights=True)).values().sum().backward()


def test_frozen_tables(place: Place) -> None:
    ours = ScheduledEmbeddingBagCollection(some_tables(), device=place.device)
    first, *others = ours.parameters()
    first.requires_grad_(False)
    for frozen in (True, False):
        first.requires_grad_(not frozen)
        ours.zero_grad()
        ours(Lookups().features()).values().sum().backward()
        assert (first.grad is None) == frozen
        assert all(parameter.grad is not None for parameter in others)
    assert not ours.requires_grad_(False)(Lookups().features()).values().requires_grad
    with torch.no_grad():
        assert not ours.requires_grad_()(Lookups().features()).values().requires_grad


def test_exchanged_parameters(place: Place) -> None:
    ours, twin = pair(some_tables())
    features = Lookups().features()
    wanted = twin(features).values()
    given = {name: parameter.detach().clone().requires_grad_() for name, parameter in ours.named_parameters()}
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.zero_()
    called = torch.func.functional_call(ours, given, (features,)).values()
    torch.testing.assert_close(called, wanted)
    called.sum().backward()
    assert given["embedding_bags.x.weight"].grad.any()
    assert not ours(features).values().any()
    ours.embedding_bags["x"].weight = nn.Parameter(given["embedding_bags.x.weight"].detach())
    torch.testing.assert_close(ours(features)["b"], twin(features)["b"])
    ours.embedding_bags["y"].weight = nn.Parameter(given["embedding_bags.y.weight"].detach().half())
    with pytest.raises(ValueError, match="expected one dtype and device for tables that were made of one data type, got"):
        ours(features)
    assert {parameter.dtype for parameter in ours.float().parameters()} == {torch.float32}
    assert len(storages(ours)) == 1
    gathered = ours(features).values()
    nn.utils.parametrize.register_parametrization(ours.embedding_bags["z"], "weight", nn.Identity())
    torch.testing.assert_close(ours(features).values(), gathered)


# Dynamo's own, about any tensor with a gradient function that goes from one graph to the next.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_compiled_models_call_it_between_graphs(place: Place) -> None:
    ours, twin = pair(some_tables())
    over = nn.Linear(20, 2, device=place.device)

    def run(features: KeyedJaggedTensor) -> Tensor:
        return over(ours(features).values()).sigmoid()

    torch.compiler.reset()
    compiled = torch.compile(run, backend="eager")
    for seed in range(3):
        features = Lookups(seed=seed, batch_size=3 + seed).features()
        ours.zero_grad()
        twin.zero_grad()
        got, wanted = compiled(features), over(twin(features).values()).sigmoid()
        torch.testing.assert_close(got, wanted)
        got.sum().backward()
        wanted.sum().backward()
        for mine, theirs in zip(ours.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, 0.1),
    "adam": lambda parameters: torch.optim.AdamW(parameters, 0.1),
}


def check_parameters(ours: nn.Module, twin: nn.Module) -> None:
    for (name, mine), theirs in zip(ours.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_with_torch_optimizers(place: Place, name: str) -> None:
    ours, twin = pair(some_tables())
    for module in (ours, twin):
        optimizer = OPTIMIZERS[name](module.parameters())
        for seed in range(4):
            optimizer.zero_grad()
            module(Lookups(seed=seed).features()).values().square().sum().backward()
            optimizer.step()
    check_parameters(ours, twin)


@pytest.mark.parametrize("name", ["sgd", "adagrad"])
def test_fused_optimizers_are_those_of_torch(place: Place, name: str) -> None:
    ours, twin = pair(some_tables(), optimizer=name, optimizer_options={"learning_rate": 0.1})
    before = copy.deepcopy(ours)
    made = {"sgd": torch.optim.SGD, "adagrad": lambda of, lr: torch.optim.Adagrad(of, lr, eps=1e-8)}[name](twin.parameters(), 0.1)
    read: dict[str, set[int]] = {table.name: set() for table in some_tables()}
    for seed in range(3):
        features = Lookups(seed=seed, rows=4).features()
        made.zero_grad()
        for module in (ours, twin):
            module(features).values().square().sum().backward()
        made.step()
        for of in some_tables():
            read[of.name] |= {row for key in of.feature_names for row in features[key].values().tolist()}
    check_parameters(ours, twin)
    assert all(parameter.grad is None for parameter in ours.parameters())
    for of in some_tables():
        changed = (ours.embedding_bags[of.name].weight != before.embedding_bags[of.name].weight).any(1)
        assert set(changed.nonzero().flatten().tolist()) == read[of.name]
        assert len(read[of.name]) < of.num_embeddings


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        *((kind, {}) for kind in ("sgd", "adagrad", "rowwise_adagrad", "adam", "rowwise_adam", "rowwise_lamb")),
        ("adagrad", {"decoupled_weight_decay": True, "state_dtype": torch.bfloat16}),
        ("rowwise_adam", {"decay_missed_steps": True, "max_norm": 0.5, "state_dtype": torch.bfloat16}),
    ],
)
def test_fused_optimizers_go_on_from_a_checkpoint(place: Place, kind: Any, more: dict[str, Any]) -> None:
    configs = [*some_tables(), table("v", 5, 4, "b", data_type=DataType.BF16)]
    options = {"learning_rate": 0.1, "eps": 1e-6, "betas": (0.8, 0.9), "weight_decay": 0.01, "stochastic_rounding": True, **more}
    made = {"optimizer": kind, "optimizer_options": options}
    torch.manual_seed(0)
    ours = ScheduledEmbeddingBagCollection(configs, device=place.device, **made)
    ours(Lookups(seed=1).features()).values().square().sum().backward()
    for optimizer in ours.optimizers:
        optimizer.learning_rate.fill_(0.05)
    meta = ScheduledEmbeddingBagCollection(configs, device="meta", **made)
    assert meta.optimizers == []
    resumed = meta.to_empty(device=place.device)
    resumed.load_state_dict(ours.state_dict())
    resumed.load_optimizer_state_dict(ours.optimizer_state_dict())
    others = [resumed, copy.deepcopy(ours), _saved(ours), copy.deepcopy(ours).to(place.device)]
    for module in (ours, *others):
        module(Lookups(seed=2).features()).values().square().sum().backward()
        assert [int(optimizer.step) for optimizer in module.optimizers] == [2, 2]
    for module in others:
        for mine, theirs in zip(module.parameters(), ours.parameters(), strict=True):
            assert torch.equal(mine, theirs)
        for name, state in module.optimizer_state_dict().items():
            expected = ours.optimizer_state_dict()[name]
            assert state.dtype == expected.dtype
            assert torch.equal(state, expected)
    fewer = ours.optimizer_state_dict()
    del fewer["0.step"]
    with pytest.raises(ValueError, match=r"state_dict: expected shape \[\] for '0.step', got None"):
        ours.load_optimizer_state_dict(fewer)


def test_a_checkpoint_without_last_steps_is_refused(place: Place) -> None:
    """One of before the option, or without it, where the optimizer has it; and the other way round."""
    made = [
        ScheduledEmbeddingBagCollection(
            [table("x", 5, 3, "a")], device=place.device, optimizer="adam", optimizer_options={"learning_rate": 0.1, **more}
        )
        for more in ({}, {"decay_missed_steps": True})
    ]
    for (ours, other), (expected, got) in ((made[::-1], ("[5]", "None")), (made, ("None", "[5]"))):
        before = [state.clone() for state in ours.optimizer_state_dict().values()]
        message = f"state_dict: expected shape {expected} for '0.last', got {got}; tables and optimizer must be the same"
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            ours.load_optimizer_state_dict(other.optimizer_state_dict())
        assert all(map(torch.equal, before, ours.optimizer_state_dict().values()))


def test_fused_optimizers_leave_alone_what_does_not_learn(place: Place) -> None:
    ours = ScheduledEmbeddingBagCollection(
        some_tables(), device=place.device, optimizer="sgd", optimizer_options={"learning_rate": 1.0}
    )
    features, before = Lookups().features(), copy.deepcopy(ours)
    with torch.no_grad():
        ours(features)
    ours.requires_grad_(False)
    assert not ours(features).values().requires_grad
    ours.embedding_bags["x"].weight.requires_grad_()
    with pytest.raises(ValueError, match="optimizer: updates all 4 tables of one dtype, but 3 of them do not require a gradient"):
        ours(features).values().sum().backward()
    for mine, old in zip(ours.parameters(), before.parameters(), strict=True):
        assert torch.equal(mine, old)
    ours.requires_grad_()
    given = {"embedding_bags.x.weight": torch.zeros(7, 3, device=place.device)}
    with pytest.raises(ValueError, match="a fused optimizer updates the parameters in place, but some were exchanged"):
        torch.func.functional_call(ours, given, (features,))
    ours(features).values().sum().backward()
    assert not torch.equal(ours.embedding_bags["x"].weight, before.embedding_bags["x"].weight)


def test_data_parallel_sees_the_gradients(place: Place) -> None:
    """DistributedDataParallel waits for a hook of every parameter."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ours, twin = pair(some_tables())
        model = nn.parallel.DistributedDataParallel(ours)
        for seed in range(2):
            ours.zero_grad()
            twin.zero_grad()
            for module in (model, twin):
                module(Lookups(seed=seed).features()).values().sum().backward()
            for mine, theirs in zip(ours.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, theirs.grad)
    finally:
        dist.destroy_process_group()


class Ranker(nn.Module):
    """A model with the same bags twice, others inside, and a subclass that is left alone."""

    def __init__(self) -> None:
        super().__init__()
        device = torch.device(PLACE.device)
        self.bags = EmbeddingBagCollection(some_tables(), device=device)
        self.inner = nn.ModuleDict({"again": self.bags, "other": EmbeddingBagCollection([table("q", 5, 2, "c")], device=device)})
        self.over = nn.Linear(22, 1, device=device)
        self.special = Special([table("q", 5, 2, "c")], device=device)
        self.nothing = None
        self.register_module("none", None)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        pooled = [self.bags(features), self.inner["other"](features), self.special(features)]
        again = self.inner["again"](features)
        return self.over(torch.cat([*(of.values() for of in pooled)], 1)).sum() + again.values().sum()


class Special(EmbeddingBagCollection):
    """One that does something of its own."""


def test_replace_embeddings(place: Place) -> None:
    torch.manual_seed(0)
    twin = Ranker().eval()
    twin.over = nn.Linear(24, 1, device=place.device)
    model = copy.deepcopy(twin)
    model.bags.embedding_bags["y"].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = list(model.named_parameters())
    assert replace_embeddings(model) is model
    assert type(model.bags) is type(model.inner["other"]) is ScheduledEmbeddingBagCollection
    assert model.inner["again"] is model.bags
    assert type(model.special) is Special
    assert [(name, id(parameter)) for name, parameter in model.named_parameters()] == [(name, id(of)) for name, of in before]
    assert not model.bags.training
    assert not model.bags.embedding_bags["y"].weight.requires_grad
    assert len(storages(model.bags)) == 1
    twin.bags.embedding_bags["y"].weight.requires_grad_(False)
    twins = torch.optim.SGD(twin.parameters(), 0.1)
    for seed in range(2):
        features = Lookups(seed=seed).features()
        torch.testing.assert_close(model(features), twin(features))
        for of, its in ((model, optimizer), (twin, twins)):
            its.zero_grad()
            of(features).backward()
            its.step()
    check_parameters(model, twin)
    assert replace_embeddings(model).bags is model.bags


def test_replace_a_collection_itself(place: Place) -> None:
    configs = [
        table("x", 7, 3, "a"),
        table("y", 5, 2, "b", data_type=DataType.BF16),
        table("z", 5, 2, "c", data_type=DataType.FP16),
    ]
    twin = EmbeddingBagCollection(configs, device=torch.device(place.device))
    ours = replace_embeddings(
        copy.deepcopy(twin), optimizer="sgd", optimizer_options={"learning_rate": 0.1}, output_dtype=torch.float64
    )
    # TorchRec's keeps bfloat16 tables as float16, and so does what takes its place.
    assert [of.dtype for of in ours.parameters()] == [torch.float32, torch.float16, torch.float16]
    for mine, theirs in zip(ours.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert ours(Lookups().features()).values().dtype == torch.float64
    assert len(ours.optimizers) == 3
    meta = replace_embeddings(EmbeddingBagCollection(configs, device=torch.device("meta")))
    assert all(parameter.is_meta for parameter in meta.parameters())
    with pytest.raises(TypeError, match="optimiser: not an option; expected one of optimizer, optimizer_options, output_dtype"):
        replace_embeddings(nn.Linear(1, 1), optimiser="sgd")


def plan_of(**features: BagSchedule) -> BagPlan:
    gpu = torch.cuda.get_device_name() if PLACE.name == "gpu" else "none"
    return BagPlan(gpu, {name.replace("_at_", "@"): of for name, of in features.items()}, programs=12)


SOME_PLAN = plan_of(a_at_x=BagSchedule(7, 3, "many", 2), d=BagSchedule(6, 5, "one", 1), other=BagSchedule(1, 1, "one", 1))


def test_a_plan_is_followed(place: Place, tmp_path: Path) -> None:
    SOME_PLAN.save(tmp_path / "plan.json")
    configs = some_tables()
    configs[3].data_type = DataType.BF16
    twin = ScheduledEmbeddingBagCollection(configs, device=place.device)
    ours = ScheduledEmbeddingBagCollection(configs, device=place.device, plan=tmp_path / "plan.json")
    ours.load_state_dict(twin.state_dict())
    features = Lookups().features()
    assert ours.feature_names() == [["a@x", "b", "c", "a@z"], ["d"]]
    for module in (ours, copy.deepcopy(ours), _saved(ours)):
        assert module._schedules == {} or module is ours
        torch.testing.assert_close(module(features).values(), twin(features).values())
        first, second = module._schedules[next(iter(module._schedules))]
        assert first is not None
        assert second is not None
        assert (first.codes.tolist(), second.codes.tolist()) == ([2 << 2 | 3, -1, -1, -1], [1 << 2])
        assert first.programs == second.programs == 12
        assert "plan=2 of 5 features" in repr(module)
    ours.follow(None)
    torch.testing.assert_close(ours(features).values(), twin(features).values())
    assert "plan" not in repr(ours)
    ours.follow(str(tmp_path / "plan.json"))
    assert ours._plan == SOME_PLAN
    with pytest.raises(FileNotFoundError):
        ours.follow(tmp_path / "none.json")
    assert ours._plan == SOME_PLAN


@pytest.mark.parametrize("features", [{}, {"other": BagSchedule(1, 1, "one", 1)}])
def test_a_plan_without_features_is_none(place: Place, monkeypatch: pytest.MonkeyPatch, features: dict[str, BagSchedule]) -> None:
    handed: list[Any] = []
    own = TableStorage.lookup

    def noted(*arguments: Any, **options: Any) -> Tensor:
        handed.append(options["schedules"])
        return own(*arguments, **options)

    monkeypatch.setattr(TableStorage, "lookup", noted)
    twin = ScheduledEmbeddingBagCollection(some_tables(), device=place.device)
    # Of a GPU that there is none of.
    ours = ScheduledEmbeddingBagCollection(some_tables(), device=place.device, plan=BagPlan("another", features, programs=8))
    assert repr(ours) == repr(twin)
    ours(Lookups().features())
    ours.follow(plan_of(c=BagSchedule(5, 8, "few", 1)))
    ours(Lookups().features())
    ours.follow(BagPlan("another", features, programs=8))
    ours(Lookups().features())
    twin(Lookups().features())
    assert [of is None for of in handed] == [True, False, True, True]
    assert ours._schedules == twin._schedules == {}
    # What it counts is not of the forward pass.
    ours.follow(replace(plan_of(**features), counted_rows=6))
    ours(Lookups().features())
    assert handed[-1] == (None, 32, 6)


def test_what_a_plan_counts_is_handed_on(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    from jagged.ops.embedding_bag import spec

    handed: list[int | None] = []
    for name in ("UPDATE", "WEIGHTS_BACKWARD"):
        own = getattr(spec, name)

        def noted(x: Any, o: Any, backend: str, own: Callable[..., Any] = own) -> Any:
            handed.append(o.counted_rows)
            return own(x, o, backend)

        monkeypatch.setattr(spec, name, noted)
    ours = ScheduledEmbeddingBagCollection(some_tables(), device=place.device)
    twin = ScheduledEmbeddingBagCollection(
        some_tables(), device=place.device, optimizer="sgd", optimizer_options={"learning_rate": 1.0}
    )
    for plan, expected in ((None, None), (SOME_PLAN, None), (replace(SOME_PLAN, counted_rows=6), 6)):
        for module in (ours, twin):
            module.follow(plan)
            module(Lookups().features()).values().sum().backward()
        assert handed == [expected] * 2
        handed.clear()


def test_plans_that_do_not_fit(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(d=BagSchedule(6, 8, "one", 1), c=BagSchedule(5, 8, "few", 1))
    message = "plan: expected the tables' shapes, got 'd' of 6 rows and width 8 for a table of 6 rows and width 5"
    for make in (
        lambda **options: ScheduledEmbeddingBagCollection(some_tables(), device=place.device, **options),
        lambda **options: replace_embeddings(EmbeddingBagCollection(some_tables(), device=place.device), **options),
    ):
        with pytest.raises(ValueError, match=message):
            make(plan=plan)
        with pytest.warns(UserWarning, match=message) as warned:
            ours = make(plan=plan, plan_mismatch="warn")
        assert len(warned) == 1
        assert "plan=1 of 5 features" in repr(ours)
    with pytest.raises(ValueError, match="mismatch: expected 'refuse' or 'warn', got 'ignore'"):
        ScheduledEmbeddingBagCollection(some_tables(), plan_mismatch="ignore")  # type: ignore[arg-type]
    # Another GPU shows when there is one.
    fits = plan_of(c=BagSchedule(5, 8, "few", 1))
    refusing = ScheduledEmbeddingBagCollection(some_tables(), device="meta", plan=fits)
    warning = ScheduledEmbeddingBagCollection(some_tables(), device="meta", plan=fits, plan_mismatch="warn")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "another")
    with pytest.raises(ValueError, match="plan: expected one for another, got one for"):
        refusing._schedules_on(torch.device("cuda", 0))
    with pytest.warns(UserWarning, match="plan: expected one for another") as warned:
        assert warning._schedules_on(torch.device("cuda", 0)) == [None]
    assert len(warned) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert warning._schedules_on(torch.device("cuda", 0)) == [None]


def test_what_it_shows(place: Place) -> None:
    configs = [table("x", 7, 3), table("y", 5, 2, "b", "b")]
    ours = ScheduledEmbeddingBagCollection(configs, True, place.device)
    assert "(\n  features=3, width=7, is_weighted=True\n" in repr(ours)
    fused = ScheduledEmbeddingBagCollection(
        configs, device="meta", optimizer="adam", optimizer_options={"learning_rate": 1}, output_dtype=torch.bfloat16
    )
    assert "is_weighted=False, optimizer='adam', output_dtype=torch.bfloat16" in repr(fused)
    assert "EmbeddingBag(7, 3, mode='sum'" in repr(fused)


@pytest.mark.parametrize(
    ("tables", "options", "message"),
    [
        ([], {}, "tables: expected at least one, got none"),
        ([table("x", 5, 3), table("x", 5, 3)], {}, "tables: expected names of their own, got 'x' twice"),
        ([table("x", 5, 3, data_type=DataType.INT8)], {}, "expected a data type of FP32, FP16, BF16, got INT8 for 'x'"),
        ([table("x", 5, 3, pooling=PoolingType.NONE)], {}, "tables: expected SUM or MEAN pooling, got NONE for 'x'"),
        (
            [table("x", 5, 3, pooling=MEAN)],
            {"is_weighted": True},
            "is_weighted: only sums are weighted, but 'x' has MEAN pooling",
        ),
        ([table("x", 5, 0)], {}, "widths: expected at least 1, got 0"),
        ([table("x", 5, 3)], {"optimizer_options": {}}, "optimizer_options: expected None without an optimizer"),
        ([table("x", 5, 3)], {"optimizer": "sgd"}, "optimizer_options: expected a learning_rate, got none"),
        (
            [table("x", 5, 3)],
            {"optimizer": "sgd", "optimizer_options": {"lr": 1}},
            "optimizer_options: got 'lr', expected some of",
        ),
        (
            [table("x", 5, 3)],
            {"optimizer": "lars", "optimizer_options": {"learning_rate": 1}},
            "kind: got 'lars', expected one of",
        ),
        (
            [table("x", 5, 3)],
            {"optimizer": "sgd", "optimizer_options": {"learning_rate": 1, "max_norm": -1.0}},
            "^max_norm: expected a number above 0, or None, got -1.0$",
        ),
    ],
)
def test_options_that_are_refused(tables: list[EmbeddingBagConfig], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ScheduledEmbeddingBagCollection(tables, device="meta", **options)


def test_output_dtypes_that_are_refused() -> None:
    with pytest.raises(TypeError, match=r"output_dtype: expected one of torch.float32, .*, got torch.int64"):
        ScheduledEmbeddingBagCollection([table("x", 5, 3)], output_dtype=torch.int64)


@pytest.mark.gpu
def test_no_synchronisation_and_capture(place: Place) -> None:
    """A training step waits for nothing and replays as a CUDA graph, whose backward runs on the stream of the capture."""
    ours, twin = pair([table("x", 7, 3, "a", "b"), table("y", 5, 8, "c", pooling=MEAN), table("w", 6, 5, "d")])
    features = Lookups().features()
    features.offsets()
    for _ in range(2):
        ours.zero_grad()
        ours(features).values().square().sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    ours(features).values().square().sum().backward()
    torch.cuda.set_sync_debug_mode("default")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        ours.zero_grad()
        ours(features).values().square().sum().backward()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    ours.zero_grad()
    with torch.cuda.graph(graph):
        ours(features).values().square().sum().backward()
    twin(features).values().square().sum().backward()
    for _ in range(2):
        graph.replay()
    for mine, theirs in zip(ours.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_the_storage_is_what_the_layout_says(place: Place) -> None:
    ours = ScheduledEmbeddingBagCollection(some_tables(), device=place.device)
    tables: TableStorage = ours._parts[0].tables
    with torch.no_grad():
        weights = tables.weights()
        for view, parameter in zip(tables.layout.views(weights), ours.parameters(), strict=True):
            assert view.data_ptr() == parameter.data_ptr()
    assert (tables.dtype, tables.device.type) == (torch.float32, place.device.type)
