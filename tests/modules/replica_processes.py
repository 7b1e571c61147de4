"""Collections in four processes, two replicas of two shards each, by `DMPCollection`. `test_sharding_replicas.py` starts it.

Usage: `python -m tests.modules.replica_processes DIRECTORY BACKEND`; prints JSON: for each process, by name of a case, the
largest differences in units of the last place, or what was found.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.remote_device import _remote_device
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.model_parallel import DMPCollection
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.types import DMPCollectionConfig, ShardingPlan, ShardingStrategy
from torchrec.modules.embedding_configs import DataType
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from jagged.modules import (
    ScheduledEmbeddingBagCollection,
    ScheduledEmbeddingBagCollectionSharder,
    ScheduledEmbeddingCollection,
    ScheduledEmbeddingCollectionSharder,
)
from jagged.modules.embedding_bags_shards import optimizers_of
from tests.modules import bags_processes, sequences_processes
from tests.modules.sequences_processes import own_rows, rows_apart, squares
from tests.modules.sharding_processes import (
    PROCESSES,
    RATE,
    SGD,
    WHOLE_ROWS,
    apart,
    batch,
    here,
    main,
    refused,
    states_apart,
    tables_apart,
)

Collection = ScheduledEmbeddingBagCollection | ScheduledEmbeddingCollection

SHARDS = REPLICAS = 2
# The collection, its sharder, and its tables.
KINDS: dict[str, tuple[Any, Any, Any]] = {
    "bags": (ScheduledEmbeddingBagCollection, ScheduledEmbeddingBagCollectionSharder, bags_processes.tables),
    "rows": (ScheduledEmbeddingCollection, ScheduledEmbeddingCollectionSharder, sequences_processes.tables),
}
MIXED = [row_wise(), column_wise(ranks=[1, 0]), table_wise(rank=0), row_wise(), table_wise(rank=1)]
# Of each replica the samples of its processes, step after step.
SIZES = [[(3, 4), (1, 2)], [(0, 5), (2, 1)], [(4, 0), (0, 3)], [(2, 2), (0, 0)], [(1, 3), (2, 0)]]


class _Anywhere(DistributedModelParallel):  # type: ignore[misc]
    def __init__(self, module: nn.Module, env: Any, device: torch.device, *rest: Any) -> None:
        super().__init__(module, env, here(), *rest)


class Replicas(DMPCollection, _Anywhere):  # type: ignore[misc]
    """TorchRec's, on a CPU too, which it does not take, with gloo, which has no averages."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        if here().type == "cpu":
            options["custom_all_reduce"] = self.averaged
        super().__init__(
            module,
            torch.device("cuda"),
            world_size=PROCESSES,
            sharding_group_size=SHARDS,
            global_pg=dist.group.WORLD,
            **options,
        )

    def _create_process_groups(self, *arguments: Any, **options: Any) -> Any:
        self._device = here()
        return super()._create_process_groups(*arguments, **options)

    def _remap_sharding_plan(self, plan: ShardingPlan, *arguments: Any, **options: Any) -> None:
        super()._remap_sharding_plan(plan, *arguments, **options)
        for sharding in [of for tables in plan.plan.values() for of in tables.values() if here().type == "cpu"]:
            for shard in getattr(sharding.sharding_spec, "shards", ()):
                # It names one of several CPUs, which no tensor is on.
                shard.placement = _remote_device(f"rank:{shard.placement.rank()}/cpu")

    def averaged(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            dist.all_reduce(tensor, group=self._default_ctx.replica_pg)
            tensor.div_(REPLICAS)


def replicas(module: Collection, plan: Sequence[Any], is_context: bool = False, **options: Any) -> Replicas:
    sharder = next(sharder for kind, sharder, _ in KINDS.values() if isinstance(module, kind))()
    generators = dict(zip(module._modules_of_tables, plan, strict=True))
    made = ShardingPlan({"tables": construct_module_sharding_plan(module, generators, sharder, SHARDS, SHARDS, here().type)})
    options |= {"plan": ShardingPlan({}) if is_context else made, "sharders": [sharder]}
    if is_context:
        options["submodule_configs"] = [DMPCollectionConfig(type(module), made, SHARDS)]
    return Replicas(nn.ModuleDict({"tables": module}), **options)


def rule_of(optimizer: str | None) -> dict[str, Any]:
    rule = {"learning_rate": RATE, **({} if optimizer in (None, "sgd") else {"eps": 1e-3})}
    return {"optimizer": optimizer, "optimizer_options": None if optimizer is None else rule}


def loss_of(found: Any) -> Tensor:
    return squares(found) if isinstance(found, dict) else found.values().square().sum() / 16


def average(wholes: Sequence[Collection], with_states: bool) -> None:
    """By hand."""
    of_all = [[*whole.parameters()] for whole in wholes]
    for of, whole in zip(of_all, wholes, strict=True):
        optimizers = optimizers_of(whole) if with_states else None
        for states in optimizers.states.values() if optimizers is not None else ():
            of += [states[name] for name in ("first", "second") if name in states]
    with torch.no_grad():
        for same in zip(*of_all, strict=True):
            mean = torch.stack([*same]).mean(0)
            for one in same:
                one.copy_(mean)


def output_apart(found: Any, wanted: Any, batches: list[KeyedJaggedTensor], shard: int) -> float:
    if isinstance(wanted, dict):
        return rows_apart(found, own_rows(wanted, batches, shard))
    return apart(found.values(), wanted.values().split([features.stride() for features in batches[:-1]])[shard])


def training(
    kind: str,
    plan: Sequence[Any],
    optimizer: str | None,
    with_states: bool = True,
    two_types: bool = False,
    inter_host: bool = False,
    is_context: bool = False,
) -> dict[str, float]:
    """Steps, with averages after every other one, beside a whole collection for each replica."""
    made, _, tables = KINDS[kind]
    new = functools.partial(made, device=here(), **rule_of(optimizer))
    configs = functools.partial(tables, data_type=DataType.FP16 if two_types else DataType.FP32)
    torch.manual_seed(0)
    wholes = [new(configs()) for _ in range(REPLICAS)]
    rank = dist.get_rank()
    replica, shard = divmod(rank, SHARDS) if inter_host else divmod(rank, REPLICAS)[::-1]
    # Each replica brings tables of its own; those of the first are taken.
    dmp = replicas(copy.deepcopy(wholes[replica]), plan, is_context, use_inter_host_allreduce=inter_host)
    wholes[1].load_state_dict(wholes[0].state_dict())
    ours, own = dmp.module["tables"], wholes[replica]
    left = dict(in_backward_optimizer_filter(dmp.named_parameters()))
    assert (optimizer is None) == bool(left)
    to_step = [torch.optim.SGD(of, lr=RATE) for of in (left.values(), *(whole.parameters() for whole in wholes)) if left]
    worst = {"tables at first": tables_apart(ours, own), "output": 0.0, "tables": 0.0, "states": 0.0}
    for step, sizes in enumerate(SIZES):
        batches = [batch(of, REPLICAS * step + place, False) for place, of in enumerate(sizes)]
        for one in to_step:
            one.zero_grad()
        found = ours(batches[replica][shard])
        found = dict(found.items()) if kind == "rows" else found
        wanted = [whole(of[-1]) for whole, of in zip(wholes, batches, strict=True)]
        worst["output"] = max(worst["output"], output_apart(found, wanted[replica], batches[replica], shard))
        loss_of(found).backward()
        for of in wanted:
            (loss_of(of) / SHARDS).backward()
        for one in to_step:
            one.step()
        if step % 2:
            # They have parted.
            assert tables_apart(*wholes) > 1_000
            dmp.sync(with_states)
            average(wholes, with_states)
        worst["tables"] = max(worst["tables"], tables_apart(ours, own))
        worst["states"] = max(worst["states"], states_apart(dmp, own))
    return worst


def copies(kind: str, optimizer: str | None) -> dict[str, float]:
    """Data-parallel tables, which replicas have in common: of the batches of all processes as one, with nothing to average."""
    made, _, tables = KINDS[kind]
    torch.manual_seed(0)
    whole = made(tables(), device=here(), **rule_of(optimizer))
    dmp = replicas(copy.deepcopy(whole), [data_parallel()] * 5)
    ours, worst, rank = dmp.module["tables"], {"output": 0.0, "tables": 0.0}, dist.get_rank()
    left = dict(in_backward_optimizer_filter(dmp.named_parameters()))
    to_step = [torch.optim.SGD(of, lr=RATE) for of in (left.values(), whole.parameters()) if left]
    for step, sizes in enumerate([(3, 4, 1, 2), (0, 5, 2, 1), (2, 2, 2, 2)]):
        batches = batch(sizes, step, False)
        for one in to_step:
            one.zero_grad()
        found, wanted = ours(batches[rank]), whole(batches[-1])
        found = dict(found.items()) if kind == "rows" else found
        worst["output"] = max(worst["output"], output_apart(found, wanted, batches, rank))
        loss_of(found).backward()
        (loss_of(wanted) / PROCESSES).backward()
        for one in to_step:
            one.step()
        dmp.sync()
        worst["tables"] = max(worst["tables"], tables_apart(ours, whole))
    return worst


def state_dicts(kind: str) -> dict[str, float]:
    """Of the whole collection into replicas, and between those, with states."""
    made, _, tables = KINDS[kind]
    torch.manual_seed(0)
    whole, other = (made(tables(), device=here(), **rule_of("adagrad")) for _ in range(2))
    first, second = replicas(copy.deepcopy(other), MIXED), replicas(copy.deepcopy(other), MIXED)
    for seed in range(2):
        loss_of(whole(batch((2, 1), seed, False)[-1])).backward()
    third = replicas(copy.deepcopy(whole), MIXED)
    first.load_state_dict({f"tables.{name}": tensor for name, tensor in whole.state_dict().items()})
    second.load_state_dict(first.state_dict())
    second.fused_optimizer.load_state_dict(third.fused_optimizer.state_dict())
    return {
        "whole": tables_apart(first.module["tables"], whole),
        "replicas": tables_apart(second.module["tables"], whole),
        "states": states_apart(second, whole),
    }


def from_meta(kind: str) -> dict[str, float]:
    """Tables that each process makes, of which replicas have the same."""
    made, _, tables = KINDS[kind]
    torch.manual_seed(dist.get_rank())
    configs = tables()
    for table in configs:
        table.init_fn = nn.init.normal_
    dmp = replicas(made(configs, device="meta", **SGD), MIXED)
    worst, least = 0.0, float("inf")
    for shard in dmp.module["tables"].shards():
        of_replicas = [torch.empty_like(shard.weight) for _ in range(REPLICAS)]
        dist.all_gather(of_replicas, shard.weight.contiguous(), group=dmp._default_ctx.replica_pg)
        worst, least = max(worst, apart(*of_replicas)), min(least, float(shard.weight.abs().max()))
    return {"replicas": worst, "not drawn": float(least == 0)}


def errors() -> dict[str, str]:
    found, rule = {}, {"learning_rate": RATE}

    def refusal(kind: str, options: dict[str, Any], **of_replicas: Any) -> str:
        made, _, tables = KINDS[kind]
        module = made(tables(), device=here(), optimizer="adam", optimizer_options=options)
        return refused(lambda: replicas(module, MIXED, **of_replicas))

    for kind in KINDS:
        found[f"{kind}, strategy"] = refusal(kind, rule, sharding_strategy=ShardingStrategy.FULLY_SHARDED)
        found[f"{kind}, missed"] = refusal(kind, {**rule, **WHOLE_ROWS})
    bags = ScheduledEmbeddingBagCollection(bags_processes.tables(), device=here())
    found["hosts"] = refused(lambda: replicas(bags, [table_row_wise(0)] * 5))
    return found


def cases(_: Path) -> dict[str, Callable[[], dict[str, Any]]]:
    row_by_row = [row_wise()] * 5
    made: dict[str, Callable[[], dict[str, Any]]] = {"errors": errors}
    for kind in KINDS:
        for optimizer in (None, "sgd", "adagrad", "adam"):
            made[f"{kind}, {optimizer}"] = functools.partial(training, kind, MIXED, optimizer)
        made[f"{kind}, rowwise_adagrad"] = functools.partial(training, kind, row_by_row, "rowwise_adagrad")
        made[f"{kind}, a context of its own"] = functools.partial(training, kind, MIXED, "adagrad", is_context=True)
        made[f"{kind}, copies, None"] = functools.partial(copies, kind, None)
        made[f"{kind}, state_dicts"] = functools.partial(state_dicts, kind)
        made[f"{kind}, from_meta"] = functools.partial(from_meta, kind)
    made["bags, states not averaged"] = functools.partial(training, "bags", MIXED, "adagrad", with_states=False)
    made["bags, adjacent shards"] = functools.partial(training, "bags", MIXED, "adagrad", inter_host=True)
    made["bags, two types"] = functools.partial(training, "bags", MIXED, "adagrad", two_types=True)
    made["bags, copies, adagrad"] = functools.partial(copies, "bags", "adagrad")
    return made


def unsharded() -> str:
    """What a module with an optimizer says that `DMPCollection` has not sharded."""
    module = ScheduledEmbeddingBagCollection(bags_processes.tables(), device=here(), **SGD)
    dmp = Replicas(nn.ModuleDict({"tables": module}), plan=ShardingPlan({}))
    return refused(lambda: dmp.module["tables"](batch((2,), 0, False)[-1]))


if __name__ == "__main__":
    main(cases, unsharded)
