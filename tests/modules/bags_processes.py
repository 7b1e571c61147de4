"""Sharded bags in two processes, or in four as two hosts, against the unsharded ones.

A program of its own: `test_embedding_bags_sharding.py` starts it.

Usage: `python -m tests.modules.bags_processes DIRECTORY BACKEND`; prints JSON: for each process, by name of a case, the largest
differences in units of the last place, or what was found.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch import Tensor, nn
from torchrec.distributed import DistributedModelParallel, sharding_plan
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    grid_shard,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.types import ParameterSharding, ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from jagged.modules import (
    ScheduledEmbeddingBagCollection,
    ScheduledEmbeddingBagCollectionSharder,
    embedding_bags_sharding,
    embedding_bags_shards,
)
from tests.modules.sharding_processes import (
    CALLS,
    EMPTY,
    FEW_SAMPLES,
    HOST,
    KEYS,
    LATER_RATE,
    PROCESSES,
    RATE,
    SGD,
    SIZES,
    WHOLE_ROWS,
    apart,
    batch,
    gathered,
    gradients_apart,
    here,
    main,
    piped_apart,
    planned_output,
    refused,
    shards,
    states_apart,
    tables_apart,
)

SUM, MEAN = PoolingType.SUM, PoolingType.MEAN
# Rules that are the same for any split of a table's columns, and those that go by whole rows.
BY_ELEMENT, BY_ROW = (None, "sgd", "adagrad", "adam"), ("rowwise_adagrad", "rowwise_adam", "rowwise_lamb", "adam of whole rows")
ONE = {
    "table-wise": [table_wise(rank=0), table_wise(rank=1), table_wise(rank=0), table_wise(rank=1), table_wise(rank=0)],
    "column-wise": [
        column_wise(ranks=[0, 1]),
        column_wise(size_per_rank=[3, 5]),
        column_wise(ranks=[1, 0]),
        column_wise(ranks=[1]),
        column_wise(ranks=[1, 0]),
    ],
    "row-wise": [row_wise()] * 5,
    "data-parallel": [data_parallel()] * 5,
}
# In whose batches keys have batch sizes of their own.
ALL = tuple(range(PROCESSES))
MIXED = [row_wise(), column_wise(ranks=[1, 0]), data_parallel(), row_wise(), table_wise(rank=1)]
ON_ONE = [table_wise(rank=1)] * 5


def host_columns(*ranks: int) -> Callable[..., ParameterSharding]:
    """TorchRec has no function for it."""
    return lambda *given: dataclasses.replace(column_wise(ranks=list(ranks))(*given), sharding_type="table_column_wise")


def grid(*hosts: int) -> Callable[..., ParameterSharding]:
    """TorchRec's function, which else leaves tables whole that are narrower than 256."""

    def of_table(table: Tensor, *given: Any) -> ParameterSharding:
        with mock.patch.object(sharding_plan, "MIN_CW_DIM", table.shape[1] // len(hosts)):
            return grid_shard(list(hosts))(table, *given)

    return of_table


# Of two hosts of two processes.
OF_HOSTS = {
    "table-column-wise": [host_columns(0, 1), host_columns(3, 2), host_columns(2, 3), host_columns(1), host_columns(2, 3)],
    "table-row-wise": [table_row_wise(host) for host in (0, 1, 1, 0, 1)],
    "grid": [grid(1, 0), grid(0, 1), grid(1, 0), grid(1), table_row_wise(0)],
    "mixed": [grid(0, 1), host_columns(3, 2), row_wise(), table_row_wise(1), data_parallel()],
}
IN_ONE_HOST = [table_row_wise(1)] * 5
# Of a single host of two processes.
ONE_HOST = [table_row_wise(0), grid(0), host_columns(1, 0), table_row_wise(0), host_columns(1)]


def tables(pooling: PoolingType = MEAN, data_type: DataType = DataType.FP32, width: int = 16) -> list[EmbeddingBagConfig]:
    """A table of two features, features of two tables, a table of one row, poolings that take turns."""
    made = [
        ("x", 7, 8, ["a", "b"], SUM, DataType.FP32),
        ("y", 5, 8, ["c"], pooling, data_type),
        ("z", 11, width, ["a"], SUM, DataType.FP32),
        ("w", 6, 3, ["d"], pooling, DataType.FP32),
        ("v", 1, 8, ["b"], SUM, data_type),
    ]
    return [
        EmbeddingBagConfig(name=n, num_embeddings=r, embedding_dim=w, feature_names=f, pooling=p, data_type=t)
        for n, r, w, f, p, t in made
    ]


def sharded(module: ScheduledEmbeddingBagCollection, plan: list[Any]) -> DistributedModelParallel:
    sharder = ScheduledEmbeddingBagCollectionSharder()
    generators = {table.name: of for table, of in zip(module.embedding_bag_configs(), plan, strict=True)}
    made = construct_module_sharding_plan(module, generators, sharder, HOST, PROCESSES, here().type)
    return DistributedModelParallel(
        nn.ModuleDict({"bags": module}), device=here(), plan=ShardingPlan({"bags": made}), sharders=[sharder]
    )


def training(
    plan: list[Any],
    optimizer: str | None,
    weighted: bool = False,
    two_types: bool = False,
    width: int = 16,
    batch_sizes: Sequence[tuple[int, ...]] = SIZES,
    varied: Sequence[tuple[int, ...]] = ((),),
) -> dict[str, float]:
    """Steps of the sharded module beside those of the unsharded one, which gets the processes' batches as one.

    `varied` has for steps, which take turns, the processes in whose batches keys have batch sizes of their own.
    """
    configs = functools.partial(tables, SUM if weighted else MEAN, DataType.FP16 if two_types else DataType.FP32, width)
    rule = {"learning_rate": RATE, **({} if optimizer in (None, "sgd") else {"eps": 1e-3})}
    options: dict[str, Any] = {"optimizer": optimizer, "optimizer_options": None if optimizer is None else rule}
    if optimizer == "adam of whole rows":
        options = {"optimizer": "adam", "optimizer_options": {**rule, **WHOLE_ROWS}}
    torch.manual_seed(0)
    whole = ScheduledEmbeddingBagCollection(configs(), weighted, here(), **options)
    # What is sharded has been trained before.
    before = batch((3,) * PROCESSES, 99, weighted)[-1]
    whole(before).values().square().sum().backward()
    whole.zero_grad()
    dmp = sharded(copy.deepcopy(whole), plan)
    bags, rank = dmp.module["bags"], dist.get_rank()
    # What the backward pass does not update.
    left = dict(in_backward_optimizer_filter(dmp.named_parameters()))
    assert (optimizer is None) == bool(left)
    to_step = [torch.optim.SGD(whole.parameters(), lr=RATE)]
    if left:
        to_step.append(KeyedOptimizerWrapper(left, functools.partial(torch.optim.SGD, lr=RATE)))
    worst = {"tables at first": tables_apart(bags, whole), "states at first": states_apart(dmp, whole)}
    worst |= {"pooled": 0.0, "gradients": 0.0, "exchanges of another kind": 0.0}
    for step, sizes in enumerate(batch_sizes):
        batches = batch(sizes, step, weighted, 0 if step == EMPTY else 4, varied[step % len(varied)])
        CALLS.clear()
        got, wanted = bags(batches[rank]), whole(batches[-1])
        launches = len(CALLS)
        # All are of the kind of the first batch.
        worst["exchanges of another kind"] += 1e6 * sum((sizes is not None) != bool(varied[0]) for sizes in CALLS)
        own = wanted.values().split(sizes)[rank]
        assert got.keys() == wanted.keys()
        assert got.length_per_key() == wanted.length_per_key()
        worst["pooled"] = max(worst["pooled"], apart(got.values(), own))
        weights = torch.randn(wanted.values().shape, generator=torch.Generator().manual_seed(step)).to(here())
        for one in to_step:
            one.zero_grad()
        (got.values() * weights.split(sizes)[rank]).sum().backward()
        ((wanted.values() * weights).sum() / PROCESSES).backward()
        if optimizer is None:
            worst["gradients"] = max(worst["gradients"], gradients_apart(bags, whole))
            for one in to_step:
                one.step()
        elif step == 1:
            for group in dmp.fused_optimizer.param_groups:
                group["lr"] = LATER_RATE
            dmp.fused_optimizer.step()
            for one in whole.optimizers:
                one.learning_rate.fill_(LATER_RATE)
    # Each process once for each sharding type and data type that it has tables of.
    kinds = {
        (bags.module_sharding_plan[table.name].sharding_type, table.data_type)
        for table in configs()
        if shards(bags.state_dict()[f"embedding_bags.{table.name}.weight"])
    }
    worst |= {"launches": abs(launches - len(kinds)), "tables": tables_apart(bags, whole), "states": states_apart(dmp, whole)}
    return worst


def several_shards_in_one() -> dict[str, float]:
    """Column shards of a table in one process, which are one parameter there."""
    plan = [table_wise(rank=0), table_wise(rank=0), column_wise(ranks=[1, 0, 1, 0]), table_wise(rank=0), table_wise(rank=0)]
    return training(plan, "adagrad", width=64)


def several_grid_shards_in_one() -> dict[str, float]:
    return training([*IN_ONE_HOST[:2], grid(1, 0, 1, 0), *IN_ONE_HOST[3:]], "adagrad", width=64)


def column_rows(plan: Callable[..., ParameterSharding]) -> dict[str, float]:
    """Column shards whose states are a number a row: as if each were a table of its own."""
    rule = {"optimizer": "rowwise_adagrad", "optimizer_options": {"learning_rate": RATE, "eps": 1e-3}}
    config = functools.partial(EmbeddingBagConfig, num_embeddings=7, feature_names=["a"])
    torch.manual_seed(0)
    halves = ScheduledEmbeddingBagCollection(
        [config(name=name, embedding_dim=4) for name in ("left", "right")], device=here(), **rule
    )
    whole = ScheduledEmbeddingBagCollection([config(name="x", embedding_dim=8)], device=here(), **rule)
    whole.load_state_dict({"embedding_bags.x.weight": torch.cat([half.detach() for half in halves.parameters()], 1)})
    dmp, rank = sharded(whole, [plan]), dist.get_rank()
    bags, half = dmp.module["bags"], rank * 2 // PROCESSES
    own = ("left", "right")[half]
    for seed in range(3):
        batches = batch(FEW_SAMPLES, seed, False)
        bags(batches[rank]).values().square().sum().backward()
        (halves(batches[-1]).values().square().sum() / PROCESSES).backward()
    state = dmp.fused_optimizer.state_dict()["state"]["bags.embedding_bags.x.weight"]["x.momentum1"]
    ((found, place),) = shards(state)
    ((table, (rows, _)),) = shards(bags.state_dict()["embedding_bags.x.weight"])
    assert place == (slice(7 * half + rows.start, 7 * half + rows.stop),)
    return {
        "table": apart(table, halves.embedding_bags[own].weight[rows]),
        "state": apart(found, embedding_bags_shards.optimizers_of(halves).states[own]["first"][rows]),
    }


def selected_by_us(work: Callable[..., dict[str, float]], *given: Any, **options: Any) -> dict[str, float]:
    """Rows of samples by PyTorch, as on a GPU where FBGEMM's kernel does not fit the widths."""
    with mock.patch.object(embedding_bags_sharding, "_fbgemm_selects", return_value=False):
        return work(*given, **options)


def reduce_scattered(plan: list[Any], **options: Any) -> dict[str, float]:
    """Parts of rows as over NCCL; gloo scatters sums where all batches have one size."""
    with mock.patch.object(embedding_bags_sharding, "_has_reduce_scatter", return_value=True):
        return training(plan, "adagrad", **options)


ONE_SIZE = [(2,) * PROCESSES, (3,) * PROCESSES]


def state_dicts(plan: list[Any]) -> dict[str, float]:
    """Of the unsharded module into the sharded one and back, and between sharded ones."""
    torch.manual_seed(0)
    whole, other, third = (ScheduledEmbeddingBagCollection(tables(), device=here(), **SGD) for _ in range(3))
    first, second = sharded(copy.deepcopy(other), plan), sharded(copy.deepcopy(other), plan)
    found = {"differs at first": float(tables_apart(first.module["bags"], whole) > 0)}
    first.load_state_dict({f"bags.{name}": tensor for name, tensor in whole.state_dict().items()})
    found["loaded"] = tables_apart(first.module["bags"], whole)
    second.load_state_dict(first.state_dict())
    found["loaded from sharded"] = tables_apart(second.module["bags"], whole)
    third.load_state_dict(gathered(first.module["bags"]))
    found["gathered"] = max(apart(a, b) for a, b in zip(third.parameters(), whole.parameters(), strict=True))
    return found


def checkpoint(optimizer: str, directory: Path, plan: list[Any], others: Sequence[list[Any]]) -> dict[str, float]:
    """Written by one plan, read by others, which go on with the same training."""
    options = {"optimizer": optimizer, "optimizer_options": {"learning_rate": RATE, "eps": 1e-3}}
    torch.manual_seed(0)
    whole = ScheduledEmbeddingBagCollection(tables(), device=here(), **options)
    first = sharded(copy.deepcopy(whole), plan)
    rank, batches, worst = dist.get_rank(), batch(FEW_SAMPLES, 0, False), 0.0

    def step(dmp: DistributedModelParallel) -> None:
        dmp.module["bags"](batches[rank]).values().square().sum().backward()

    def step_whole() -> None:
        (whole(batches[-1]).values().square().sum() / PROCESSES).backward()

    def saved(dmp: DistributedModelParallel) -> dict[str, Any]:
        return {"model": dmp.state_dict(), "optimizer": dmp.fused_optimizer.state_dict()}

    step(first)
    step_whole()
    torch.distributed.checkpoint.save(saved(first), checkpoint_id=directory / optimizer)
    loaded = [sharded(ScheduledEmbeddingBagCollection(tables(), device=here(), **options), other) for other in others]
    step_whole()
    for dmp in loaded:
        state = saved(dmp)
        torch.distributed.checkpoint.load(state, checkpoint_id=directory / optimizer)
        dmp.load_state_dict(state["model"])
        dmp.fused_optimizer.load_state_dict(state["optimizer"])
        step(dmp)
        worst = max(worst, tables_apart(dmp.module["bags"], whole), states_apart(dmp, whole))
    return {"tables and states": worst}


class Model(nn.Module):
    """As a train pipeline wants it."""

    def __init__(self, bags: ScheduledEmbeddingBagCollection) -> None:
        super().__init__()
        self.bags = bags
        self.over = nn.Linear(51, 1)

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        scores = self.over(self.bags(features).values())
        return scores.square().mean(), scores.detach()


def pipelined(plan: list[Any], varied: tuple[int, ...] = ()) -> dict[str, float]:
    sharder = ScheduledEmbeddingBagCollectionSharder()
    return piped_apart(
        lambda: Model(ScheduledEmbeddingBagCollection(tables(), device=here(), **SGD)), "bags", tables(), plan, sharder, varied
    )


def planned(types: dict[str, str] | None = None) -> dict[str, float]:
    torch.manual_seed(0)
    whole = ScheduledEmbeddingBagCollection(tables(), device=here())
    found, batches = planned_output(whole, ScheduledEmbeddingBagCollectionSharder(), 0, types), batch(FEW_SAMPLES, 0, False)
    return {"pooled": apart(found.values(), whole(batches[-1]).values().split(FEW_SAMPLES)[dist.get_rank()])}


def from_meta() -> dict[str, float]:
    """Tables that are made where they are; all copies are the same."""
    torch.manual_seed(dist.get_rank())
    configs = tables()
    for table in configs:
        # Of two dimensions, which a table that is not here does not have.
        table.init_fn = nn.init.xavier_uniform_ if table.name in ("z", "v") else functools.partial(nn.init.constant_, val=0.5)
    plan = [row_wise(), column_wise(ranks=[0, 1]), data_parallel(), table_wise(rank=0), table_wise(rank=1)]
    bags = sharded(ScheduledEmbeddingBagCollection(configs, device="meta", **SGD), plan).module["bags"]
    weights = {name: parameter.detach() for name, parameter in bags.named_parameters()}
    copies = [torch.empty_like(weights["embedding_bags.z.weight"]) for _ in range(PROCESSES)]
    dist.all_gather(copies, weights["embedding_bags.z.weight"].contiguous())
    constants = [weights[f"embedding_bags.{name}.weight"] for name in ("x", "y", "w")]
    return {
        "copies": apart(copies[0], copies[1]),
        "drawn": float(not 0 < float(copies[0].abs().max()) < 2),
        "constant": max((float((constant - 0.5).abs().max()) for constant in constants if constant.numel()), default=0.0),
    }


def output() -> dict[str, float]:
    """Another dtype, a feature by its name, and no gradients where none are wanted."""
    torch.manual_seed(0)
    whole = ScheduledEmbeddingBagCollection(tables(), device=here(), output_dtype=torch.bfloat16, **SGD)
    bags = sharded(copy.deepcopy(whole), MIXED).module["bags"]
    batches = batch(FEW_SAMPLES, 0, False)
    with torch.no_grad():
        got = bags(batches[dist.get_rank()])
    wanted = whole(batches[-1])
    return {
        # By its name a feature is waited for when a function of PyTorch gets it.
        "feature": apart(torch.clone(got["b@v"]), wanted["b@v"].split(FEW_SAMPLES)[dist.get_rank()]),
        "pooled": apart(got.values(), wanted.values().split(FEW_SAMPLES)[dist.get_rank()]),
        "requires grad": float(got.values().requires_grad),
    }


def one_size() -> dict[str, float]:
    """Batches whose kind and sizes do not go together, after a first one of each kind."""
    torch.manual_seed(0)
    whole = ScheduledEmbeddingBagCollection(tables(), device=here())
    found = {}
    for first in ((), ALL):
        bags, rank = sharded(copy.deepcopy(whole), MIXED).module["bags"], dist.get_rank()
        bags(batch(FEW_SAMPLES, 0, False, varied=first)[rank])
        features = batch((2, 2), 1, False)[rank]
        made = functools.partial(KeyedJaggedTensor, list(KEYS), features.values(), lengths=features.lengths())
        inverse = torch.tensor([[1, 0, 1], [0, 0, 1], [0, 1, 0], [1, 1, 1], [0, 0, 0]], device=here())
        batches = {
            "a size for each feature": made(stride_per_key_per_rank=[[2]] * 5),
            "inverse indices alone": made(inverse_indices=(list(KEYS), inverse)),
        }
        for name, of_name in batches.items():
            found[f"{name}, {len(first)} varied"] = apart(bags(of_name).values(), whole(of_name).values())
    return found


def errors() -> dict[str, str]:
    """What is refused, in every process alike, before anything is sent."""

    made = functools.partial(ScheduledEmbeddingBagCollection, device=here())
    bags, weighted = sharded(made(tables()), MIXED).module["bags"], sharded(made(tables(SUM), True), MIXED).module["bags"]
    features = batch((2,), 0, False)[-1]
    values, lengths = features.values(), features.lengths()
    rows = torch.tensor([[0], [0], [1], [1], [0]], device=here())

    def ragged(sizes: Sequence[Sequence[int]] = ((1,), (3,), (2,), (2,), (2,)), **options: Any) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(
            list(KEYS), values, lengths=lengths, stride_per_key_per_rank=[list(of) for of in sizes], **options
        )

    found = {
        "missing": refused(lambda: bags(KeyedJaggedTensor(["a", "b"], values[:0], lengths=lengths[:4] * 0))),
        "no weights": refused(lambda: weighted(features)),
        "no inverse": refused(lambda: bags(ragged())),
        "other inverse": refused(lambda: bags(ragged(inverse_indices=(["a", "b", "d"], rows[:3])))),
        "uneven": refused(lambda: bags(ragged(sizes=[[2]] * 4 + [[3]], inverse_indices=(list(KEYS), rows)))),
        "widths": refused(lambda: sharded(made(tables()), [column_wise(ranks=[0, 0]), *MIXED[1:]])),
    }
    if here().type == "cpu":
        # A GPU asserts it where rows are read, and takes no work after that.
        found["wrong inverse"] = refused(lambda: bags(ragged(inverse_indices=(list(KEYS), rows + 1))))
    # One process alone; the next batch goes well.
    found["elsewhere"] = refused(lambda: bags(ragged() if dist.get_rank() else features))
    bags(features)
    found["other order"] = refused(lambda: bags(KeyedJaggedTensor(list(KEYS[::-1]), values[:0], lengths=lengths * 0)))
    return found


def errors_of_hosts() -> dict[str, str]:
    """Plans that do not fit the hosts, refused in every process alike."""
    module = ScheduledEmbeddingBagCollection(tables(), device=here())

    def changed(plan: Callable[..., ParameterSharding], **changes: Any) -> Callable[..., ParameterSharding]:
        return lambda *given: dataclasses.replace(plan(*given), **changes)

    def of_larger_hosts(table: Tensor, *given: Any) -> ParameterSharding:
        return table_row_wise(0)(table, PROCESSES, *given[1:])

    plans = {
        "two hosts": changed(table_row_wise(0), ranks=[1, 2]),
        "another order": changed(table_row_wise(0), ranks=[1, 0]),
        "larger hosts": of_larger_hosts,
        "rows in two hosts": changed(grid(0, 1), sharding_type="table_row_wise"),
        "grid in two hosts": changed(grid(0, 1), ranks=[0, 2, 1, 3]),
        "columns in two hosts": host_columns(0, 2),
        "narrow columns": host_columns(0, 0),
        "narrow columns of a grid": grid(0, 0),
    }
    found = {name: refused(lambda plan=plan: sharded(module, [plan, *IN_ONE_HOST[1:]])) for name, plan in plans.items()}
    found["one row"] = refused(lambda: sharded(module, [*IN_ONE_HOST[:4], grid(0)]))
    sharder = ScheduledEmbeddingBagCollectionSharder()
    plan = construct_module_sharding_plan(
        module, dict.fromkeys("xyzwv", table_row_wise(0)), sharder, HOST, PROCESSES, here().type
    )
    found["group"] = refused(lambda: sharder.shard(module, plan, ShardingEnv(world_size=HOST, rank=0)))
    return found


def cases_of_hosts(directory: Path) -> dict[str, Callable[[], dict[str, Any]]]:
    made: dict[str, Callable[[], dict[str, Any]]] = {}
    for name, plan in OF_HOSTS.items():
        made[f"{name}, None"] = functools.partial(training, plan, None)
        made[f"{name}, adagrad, two types"] = functools.partial(training, plan, "adagrad", two_types=True)
        made[f"{name}, sizes of features"] = functools.partial(training, plan, "adam", varied=[ALL])
    for optimizer in ("rowwise_adagrad", "adam of whole rows"):
        made[f"table-row-wise, {optimizer}"] = functools.partial(training, OF_HOSTS["table-row-wise"], optimizer)
    for name in ("table-row-wise", "grid"):
        made[f"{name}, reduce_scattered"] = functools.partial(reduce_scattered, OF_HOSTS[name], batch_sizes=ONE_SIZE)
        made[f"{name}, as over NCCL"] = functools.partial(reduce_scattered, OF_HOSTS[name], varied=[ALL])
    mixed, others = OF_HOSTS["mixed"], [*OF_HOSTS.values()][:3]
    return {
        **made,
        "in one host": functools.partial(training, IN_ONE_HOST, "adagrad"),
        "in one host, sizes of features": functools.partial(training, IN_ONE_HOST, "adagrad", varied=[ALL]),
        "mixed, weighted": functools.partial(training, mixed, "adagrad", weighted=True),
        "sizes of features, later": functools.partial(training, mixed, "adagrad", varied=[(), ALL, (0,)]),
        "sizes of features, of one process first": functools.partial(training, mixed, "adagrad", varied=[(1,), (0,), (), ALL]),
        "several_shards_in_one": several_grid_shards_in_one,
        "column_rows": functools.partial(column_rows, grid(0, 1)),
        "state_dicts": functools.partial(state_dicts, mixed),
        "checkpoint": functools.partial(checkpoint, "adagrad", directory, mixed, others),
        "pipelined": functools.partial(pipelined, mixed),
        "planned": functools.partial(
            planned, dict(zip("xyzwv", ("grid_shard", "table_column_wise", *["table_row_wise"] * 3), strict=True))
        ),
        "errors": errors_of_hosts,
    }


def cases(directory: Path) -> dict[str, Callable[[], dict[str, Any]]]:
    if PROCESSES > HOST:
        return cases_of_hosts(directory)
    made: dict[str, Callable[[], dict[str, Any]]] = {}
    # On a GPU kernels are compiled for the widths of every plan's shards.
    is_few = here().type == "cuda"
    for name, plan in {**ONE, "mixed": MIXED, "all in one": ON_ONE}.items():
        by_row = () if name in ("column-wise", "mixed") else BY_ROW
        for optimizer in (None, "adagrad") if is_few else (*BY_ELEMENT, *by_row):
            made[f"{name}, {optimizer}"] = functools.partial(training, plan, optimizer)
        for optimizer in (None, "adagrad") if is_few else BY_ELEMENT:
            made[f"{name}, sizes of features, {optimizer}"] = functools.partial(training, plan, optimizer, varied=[ALL])
        if name == "mixed" or not is_few:
            made[f"{name}, sizes of features, weighted"] = functools.partial(
                training, plan, "adagrad", weighted=True, varied=[ALL]
            )
            made[f"{name}, sizes of features, two types"] = functools.partial(training, plan, "sgd", two_types=True, varied=[ALL])
            made[f"{name}, weighted"] = functools.partial(training, plan, "adagrad", weighted=True)
            made[f"{name}, two types"] = functools.partial(training, plan, "sgd", two_types=True)
    made["one host, None"] = functools.partial(training, ONE_HOST, None)
    made["one host, sizes of features"] = functools.partial(training, ONE_HOST, "adagrad", varied=[ALL])
    for name, varied in {"of one process first": [(1,), (0,), (), ALL], "later": [(), ALL, (0,)]}.items():
        for optimizer in (None, "adagrad"):
            made[f"sizes of features, {name}, {optimizer}"] = functools.partial(training, MIXED, optimizer, varied=varied)
    by_us: dict[str, dict[str, Any]] = {"None": {"optimizer": None}, "weighted": {"optimizer": "adagrad", "weighted": True}}
    by_us["two types"] = {"optimizer": "sgd", "two_types": True}
    for name, options in by_us.items():
        made[f"sizes of features, selected, {name}"] = functools.partial(selected_by_us, training, MIXED, varied=[ALL], **options)
    made["sizes of features, selected, pipelined"] = functools.partial(selected_by_us, pipelined, MIXED, ALL)
    made["sizes of features, pipelined"] = functools.partial(pipelined, MIXED, ALL)
    for optimizer in ("adagrad", "adam"):
        made[f"checkpoint, {optimizer}"] = functools.partial(checkpoint, optimizer, directory, MIXED, [*ONE.values()])
    made["column_rows"] = functools.partial(column_rows, column_wise(ranks=[0, 1]))
    made["reduce_scattered"] = functools.partial(reduce_scattered, ONE["row-wise"], batch_sizes=ONE_SIZE)
    made["as over NCCL"] = functools.partial(reduce_scattered, ONE["row-wise"], varied=[ALL])
    made["as over NCCL, later"] = functools.partial(reduce_scattered, MIXED, batch_sizes=ONE_SIZE, varied=[(), ALL])
    made["pipelined"] = functools.partial(pipelined, MIXED)
    made["state_dicts"] = functools.partial(state_dicts, MIXED)
    others = (
        several_shards_in_one,
        one_size,
        planned,
        from_meta,
        output,
        errors,
    )
    return {**made, **{of.__name__: of for of in others}}


def unsharded() -> str:
    """What a module with an optimizer says that nobody has sharded."""
    module = ScheduledEmbeddingBagCollection(
        [EmbeddingBagConfig(name="x", embedding_dim=4, num_embeddings=5, feature_names=["a"])], device=here(), **SGD
    )
    features = KeyedJaggedTensor(keys=["a"], values=torch.tensor([1]), lengths=torch.tensor([1])).to(here())
    return refused(lambda: module(features))


if __name__ == "__main__":
    main(cases, unsharded)
