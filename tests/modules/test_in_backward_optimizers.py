"""Optimizers of TorchRec's `apply_optimizer_in_backward`, taken over where collections are sharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchrec.optim
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import Awaitable, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from jagged.modules import (
    ScheduledEmbeddingBagCollection,
    ScheduledEmbeddingBagCollectionSharder,
    ScheduledEmbeddingCollection,
    ScheduledEmbeddingCollectionSharder,
    replace_embeddings,
)
from jagged.training.processes import process_group
from tests.places import PLACE

pytestmark = [
    pytest.mark.skipif(PLACE.name == "interpret", reason="on the CPU, whatever the place"),
    # PyTorch's, of what TorchRec calls.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def tables_of(place: str, **options: Any) -> Any:
    """A collection of two tables, of either kind."""
    torch.manual_seed(0)
    of = {"num_embeddings": 10, "embedding_dim": 4}
    if place == "bags":
        bags = [EmbeddingBagConfig(name=name, feature_names=[name], **of) for name in ("item", "shop")]  # type: ignore[arg-type]
        return ScheduledEmbeddingBagCollection(bags, **options)
    rows = [EmbeddingConfig(name=name, feature_names=[name], **of) for name in ("item", "shop")]  # type: ignore[arg-type]
    return ScheduledEmbeddingCollection(rows, **options)


def sharded(module: nn.Module) -> nn.Module:
    """Row-wise, in this process alone."""
    is_of_bags = isinstance(module, ScheduledEmbeddingBagCollection)
    sharder: Any = ScheduledEmbeddingBagCollectionSharder() if is_of_bags else ScheduledEmbeddingCollectionSharder()
    tables = dict.fromkeys(("item", "shop"), row_wise())
    plan = construct_module_sharding_plan(module, tables, sharder, device_type="cpu", local_size=1)
    model = nn.ModuleDict({"tables": module})
    parallel = DistributedModelParallel(
        model, device=torch.device("cpu"), plan=ShardingPlan({"tables": plan}), sharders=[sharder]
    )
    return parallel.module["tables"]  # type: ignore[no-any-return,index]


def two_steps(module: Any) -> dict[str, torch.Tensor]:
    """The tables after two steps, the second one of other rows."""
    for ids in ([1, 2, 2, 7], [2, 3, 9, 9]):
        found = module(KeyedJaggedTensor(keys=["item", "shop"], values=torch.tensor(ids), lengths=torch.tensor([2, 1, 1, 0])))
        found = found.wait() if isinstance(found, Awaitable) else found
        rows = [found.values()] if isinstance(found, KeyedTensor) else [one.values() for one in found.values()]
        sum(row.square().sum() for row in rows).backward()
    state = module.state_dict()
    return {name: of.local_shards()[0].tensor if isinstance(of, ShardedTensor) else of for name, of in state.items()}


@pytest.mark.parametrize("place", ["bags", "rows"])
@pytest.mark.parametrize(
    ("applied", "given", "kind", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.2, "momentum": 0}, "sgd", {"weight_decay": 0.2}),
        (torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-3}, "adagrad", {"eps": 1e-3}),
        (RowWiseAdagrad, {"lr": 0.1, "weight_decay": 0.2}, "rowwise_adagrad", {"eps": 1e-10, "weight_decay": 0.2}),
        (torch.optim.Adam, {"lr": 0.1, "betas": (0.5, 0.9)}, "adam", {"betas": (0.5, 0.9)}),
        (torchrec.optim.SGD, {"lr": 0.1}, "sgd", {}),
        (torchrec.optim.Adagrad, {"learning_rate": 0.1}, "adagrad", {}),
        (
            torchrec.optim.Adam,
            {"lr": 0.1, "beta1": 0.5, "weight_decay": 0.2},
            "adam",
            {"betas": (0.5, 0.999), "weight_decay": 0.2},
        ),
        (torchrec.optim.PartialRowWiseAdam, {"lr": 0.1, "eps": 1e-2}, "rowwise_adam", {"eps": 1e-2}),
        (torchrec.optim.LAMB, {"lr": 0.1}, "lamb", {}),
        (torchrec.optim.PartialRowWiseLAMB, {"lr": 0.1}, "rowwise_lamb", {}),
    ],
)
def test_an_optimizer_that_was_applied_is_that_of_the_shards(
    place: str, applied: Any, given: dict[str, Any], kind: Any, options: dict[str, Any]
) -> None:
    with process_group(torch.device("cpu")):
        module = tables_of(place)
        apply_optimizer_in_backward(applied, module.parameters(), dict(given))
        found = two_steps(sharded(module))
    expected = two_steps(tables_of(place, optimizer=kind, optimizer_options={"learning_rate": 0.1, **options}))
    before = tables_of(place).state_dict()
    assert found.keys() == expected.keys() == before.keys()
    for name, table in expected.items():
        torch.testing.assert_close(found[name], table)
        assert not torch.equal(table, before[name])


KNOWN = (
    "torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam, torchrec.optim.SGD, torchrec.optim.Adagrad, "
    "torchrec.optim.RowWiseAdagrad, torchrec.optim.Adam, torchrec.optim.PartialRowWiseAdam, torchrec.optim.LAMB, "
    "torchrec.optim.PartialRowWiseLAMB"
)


@pytest.mark.parametrize("place", ["bags", "rows"])
@pytest.mark.parametrize(
    ("applied", "message"),
    [
        (
            {"item": (torch.optim.SGD, {"lr": 0.1}), "shop": (torch.optim.SGD, {"lr": 0.2})},
            "expected one optimizer of apply_optimizer_in_backward for all tables of a collection, got others for ITEM and SHOP; "
            "give them the same, or make a collection for each",
        ),
        (
            {"item": (torch.optim.SGD, {"lr": 0.1})},
            "expected one optimizer of apply_optimizer_in_backward for all tables of a collection, got others for ITEM and SHOP; "
            "give them the same, or make a collection for each",
        ),
        (
            {"item": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})},
            "got SGD of apply_optimizer_in_backward for ITEM with momentum=0.9, expected some of lr, weight_decay, which sgd "
            "knows; leave it out",
        ),
        (
            {"item": (torch.optim.Adam, {"lr": 0.1, "weight_decay": 0.1})},
            "got Adam of apply_optimizer_in_backward for ITEM with weight_decay=0.1, expected some of lr, eps, betas, which adam "
            "knows; leave it out",
        ),
        (
            {"item": (torch.optim.AdamW, {"lr": 0.1})},
            f"got AdamW of apply_optimizer_in_backward for ITEM, expected one of {KNOWN}; take one of these",
        ),
        (
            {"item": (torchrec.optim.LarsSGD, {"lr": 0.1})},
            f"got LarsSGD of apply_optimizer_in_backward for ITEM, expected one of {KNOWN}; take one of these",
        ),
    ],
)
def test_an_optimizer_without_a_counterpart_is_refused(place: str, applied: dict[str, Any], message: str) -> None:
    module = tables_of(place)
    names = {of.split(".")[1]: of for of, _ in module.named_parameters()}
    for name, (kind, given) in applied.items():
        apply_optimizer_in_backward(kind, [module.get_parameter(names[name])], dict(given))
    with process_group(torch.device("cpu")), pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole message follows
        sharded(module)
    assert str(caught.value) == f"module: {message}".replace("ITEM", repr(names["item"])).replace("SHOP", repr(names["shop"]))


@pytest.mark.parametrize("place", ["bags", "rows"])
def test_two_optimizers_are_refused(place: str) -> None:
    module = tables_of(place, optimizer="sgd", optimizer_options={"learning_rate": 0.1})
    apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    with process_group(torch.device("cpu")), pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole message follows
        sharded(module)
    assert str(caught.value) == (
        f"module: got an optimizer of apply_optimizer_in_backward beside {type(module).__name__}(optimizer=...), expected one; "
        "leave one of them out"
    )


@pytest.mark.parametrize("place", ["bags", "rows"])
def test_one_that_would_never_run_is_refused_where_tables_are_exchanged(place: str) -> None:
    """Without an optimizer of ours it runs as before."""

    def applied() -> nn.Module:
        of = {"num_embeddings": 10, "embedding_dim": 4, "name": "item", "feature_names": ["item"]}
        made = (
            EmbeddingBagCollection([EmbeddingBagConfig(**of)])
            if place == "bags"
            else EmbeddingCollection([EmbeddingConfig(**of)])
        )  # type: ignore[arg-type]
        apply_optimizer_in_backward(torch.optim.SGD, made.parameters(), {"lr": 0.1})
        return made

    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole message follows
        replace_embeddings(applied(), optimizer="adam", optimizer_options={"learning_rate": 0.1})
    assert str(caught.value) == (
        "module: got sgd of apply_optimizer_in_backward for 'item', which would never run beside optimizer='adam'; "
        "leave one of them out"
    )
    module = replace_embeddings(applied())
    before = next(module.parameters()).detach().clone()
    found = module(KeyedJaggedTensor(keys=["item"], values=torch.tensor([3]), lengths=torch.tensor([1])))
    (found.values() if isinstance(found, KeyedTensor) else found["item"].values()).sum().backward()
    expected = before.clone()
    expected[3] -= 0.1
    torch.testing.assert_close(next(module.parameters()).detach(), expected)
