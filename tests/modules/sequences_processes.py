"""Sharded rows, not pooled, in two processes against the unsharded ones. `test_embedding_sequences_sharding.py` starts it.

Usage: `python -m tests.modules.sequences_processes DIRECTORY BACKEND`; prints JSON: for each process, by name of a case, the
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
import torch.distributed.checkpoint
from torch import Tensor, nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import DataType, EmbeddingConfig
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from jagged.modules import ScheduledEmbeddingCollection, ScheduledEmbeddingCollectionSharder
from tests.modules.sharding_processes import (
    CALLS,
    EMPTY,
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

Rows = dict[str, JaggedTensor]

BY_ELEMENT, BY_ROW = (None, "sgd", "adagrad", "adam"), ("rowwise_adagrad", "rowwise_adam", "adam of whole rows")
ONE = {
    "table-wise": [table_wise(rank=0), table_wise(rank=1), table_wise(rank=0), table_wise(rank=1), table_wise(rank=0)],
    "column-wise": [column_wise(ranks=[0, 1]), *[column_wise(ranks=[1, 0])] * 3, column_wise(ranks=[0, 1])],
    "row-wise": [row_wise()] * 5,
    "data-parallel": [data_parallel()] * 5,
}
MIXED = [row_wise(), column_wise(ranks=[1, 0]), table_wise(rank=0), row_wise(), table_wise(rank=1)]
MIXED_DENSE = [row_wise(), column_wise(ranks=[1, 0]), data_parallel(), data_parallel(), table_wise(rank=1)]
ON_ONE = [table_wise(rank=1)] * 5
# Processes.
ALL = (0, 1)


def tables(data_type: DataType = DataType.FP32, width: int = 8) -> list[EmbeddingConfig]:
    """A table of two features, features of two tables, a table of one row."""
    made = [
        ("x", 7, ["a", "b"], DataType.FP32),
        ("y", 5, ["c"], data_type),
        ("z", 11, ["a"], DataType.FP32),
        ("w", 6, ["d"], DataType.FP32),
        ("v", 1, ["b"], data_type),
    ]
    return [EmbeddingConfig(name=n, num_embeddings=r, embedding_dim=width, feature_names=f, data_type=t) for n, r, f, t in made]


def sharded(module: ScheduledEmbeddingCollection, plan: list[Any]) -> DistributedModelParallel:
    sharder = ScheduledEmbeddingCollectionSharder()
    generators = {table.name: of for table, of in zip(module.embedding_configs(), plan, strict=True)}
    made = construct_module_sharding_plan(module, generators, sharder, PROCESSES, PROCESSES, here().type)
    return DistributedModelParallel(
        nn.ModuleDict({"rows": module}), device=here(), plan=ShardingPlan({"rows": made}), sharders=[sharder]
    )


def own_rows(wanted: Rows, batches: list[KeyedJaggedTensor], rank: int) -> Rows:
    """Of the rows of all processes together those of one, whose batches are all but the last one."""
    found = {}
    for name, of in wanted.items():
        place = KEYS.index(name.split("@")[0])
        lengths = of.lengths().split([features.stride_per_key()[place] for features in batches[:-1]])
        counts = [int(own.sum()) for own in lengths]
        weights = of.weights_or_none()
        found[name] = JaggedTensor(
            of.values().split(counts)[rank],
            lengths=lengths[rank],
            weights=None if weights is None else weights.split(counts)[rank],
        )
    return found


def rows_apart(got: Rows, wanted: Rows) -> float:
    """Names, their order and lengths must be the same."""
    assert list(got) == list(wanted)
    for name, of in wanted.items():
        assert torch.equal(got[name].lengths(), of.lengths())
        assert torch.equal(got[name].offsets(), of.offsets())
        ids, expected = got[name].weights_or_none(), of.weights_or_none()
        assert (ids is None) == (expected is None)
        assert ids is None or torch.equal(ids, expected)
    return max(apart(got[name].values(), of.values()) for name, of in wanted.items())


def squares(rows: Rows) -> Tensor:
    """A loss in which the features, and the columns of each, count differently."""
    columns = torch.linspace(0.5, 1.5, 8, device=here())
    loss = torch.zeros((), device=here())
    for place, of in enumerate(rows.values(), 1):
        loss = loss + place * (of.values().float() * columns[: of.values().shape[1]]).square().sum()
    # So that steps of dense gradients do not grow without end.
    return loss / 16


def training(
    plan: list[Any],
    optimizer: str | None,
    weighted: bool = False,
    two_types: bool = False,
    indices: bool = False,
    varied: Sequence[tuple[int, ...]] = ((),),
) -> dict[str, float]:
    """Steps of the sharded module beside those of the unsharded one, which gets the processes' batches as one.

    `varied` has for steps, which take turns, the processes in whose batches keys have batch sizes of their own.
    """
    configs = functools.partial(tables, DataType.FP16 if two_types else DataType.FP32)
    rule = {"learning_rate": RATE, **({} if optimizer in (None, "sgd") else {"eps": 1e-3})}
    options: dict[str, Any] = {"optimizer": optimizer, "optimizer_options": None if optimizer is None else rule}
    if optimizer == "adam of whole rows":
        options = {"optimizer": "adam", "optimizer_options": {**rule, **WHOLE_ROWS}}
    torch.manual_seed(0)
    whole = ScheduledEmbeddingCollection(configs(), here(), indices, **options)
    # What is sharded has been trained before.
    squares(whole(batch((3, 3), 99, weighted)[-1])).backward()
    whole.zero_grad()
    dmp = sharded(copy.deepcopy(whole), plan)
    ours, rank = dmp.module["rows"], dist.get_rank()
    # What the backward pass does not update.
    left = dict(in_backward_optimizer_filter(dmp.named_parameters()))
    assert (optimizer is None) == bool(left)
    to_step = [torch.optim.SGD(whole.parameters(), lr=RATE)]
    if left:
        to_step.append(KeyedOptimizerWrapper(left, functools.partial(torch.optim.SGD, lr=RATE)))
    worst = {"tables at first": tables_apart(ours, whole), "states at first": states_apart(dmp, whole)}
    worst |= {"rows": 0.0, "gradients": 0.0}
    for step, sizes in enumerate(SIZES):
        batches = batch(sizes, step, weighted, 0 if step == EMPTY else 4, varied[step % len(varied)])
        CALLS.clear()
        got, wanted = ours(batches[rank]), whole(batches[-1])
        got = dict(got.items())
        launches = len(CALLS)
        worst["rows"] = max(worst["rows"], rows_apart(got, own_rows(wanted, batches, rank)))
        for one in to_step:
            one.zero_grad()
        squares(got).backward()
        (squares(wanted) / PROCESSES).backward()
        if optimizer is None:
            worst["gradients"] = max(worst["gradients"], gradients_apart(ours, whole))
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
        (ours.module_sharding_plan[table.name].sharding_type, table.data_type)
        for table in configs()
        if shards(ours.state_dict()[f"embeddings.{table.name}.weight"])
    }
    worst |= {"launches": abs(launches - len(kinds)), "tables": tables_apart(ours, whole)}
    return worst | {"states": states_apart(dmp, whole)}


def several_shards_in_one() -> dict[str, float]:
    """Column shards of tables in one process, of each one parameter there."""
    config = functools.partial(EmbeddingConfig, num_embeddings=16, embedding_dim=8)
    options = {"optimizer": "adagrad", "optimizer_options": {"learning_rate": RATE, "eps": 1e-3}}
    torch.manual_seed(0)
    whole = ScheduledEmbeddingCollection(
        [config(name="x", feature_names=["a", "b"]), config(name="y", feature_names=["a"])], here(), **options
    )
    dmp = sharded(copy.deepcopy(whole), [column_wise(ranks=[1, 0, 1, 0]), column_wise(ranks=[0, 0, 1, 0])])
    ours, rank, worst = dmp.module["rows"], dist.get_rank(), {"rows": 0.0}
    for seed in range(3):
        batches = batch((2, 3), seed, False)
        got, wanted = ours(batches[rank]), whole(batches[-1])
        got = dict(got.items())
        worst["rows"] = max(worst["rows"], rows_apart(got, own_rows(wanted, batches, rank)))
        squares(got).backward()
        (squares(wanted) / PROCESSES).backward()
    again = sharded(ScheduledEmbeddingCollection(whole.embedding_configs(), here(), **options), [column_wise(ranks=[0, 1])] * 2)
    again.load_state_dict({f"rows.{name}": tensor for name, tensor in gathered(ours).items()})
    found = rows_apart(dict(again.module["rows"](batches[rank]).items()), own_rows(whole(batches[-1]), batches, rank))
    return worst | {"tables": tables_apart(again.module["rows"], whole), "again": found}


def column_rows() -> dict[str, float]:
    """Column shards whose states are a number a row: as if each were a table of its own."""
    rule = {"optimizer": "rowwise_adagrad", "optimizer_options": {"learning_rate": RATE, "eps": 1e-3}}
    config = functools.partial(EmbeddingConfig, num_embeddings=7, feature_names=["a"])
    torch.manual_seed(0)
    halves = ScheduledEmbeddingCollection([config(name=name, embedding_dim=4) for name in ("left", "right")], here(), **rule)
    whole = ScheduledEmbeddingCollection([config(name="x", embedding_dim=8)], here(), **rule)
    whole.load_state_dict({"embeddings.x.weight": torch.cat([half.detach() for half in halves.parameters()], 1)})
    dmp, rank = sharded(whole, [column_wise(ranks=[0, 1])]), dist.get_rank()
    for seed in range(3):
        batches = batch((2, 3), seed, False)
        dmp.module["rows"](batches[rank])["a"].values().square().sum().backward()
        found = halves(batches[-1])
        (sum(of.values().square().sum() for of in found.values()) / PROCESSES).backward()
    own = ("left", "right")[rank]
    return {"table": apart(dmp.module["rows"].embeddings["x"].weight, halves.embeddings[own].weight)}


def state_dicts() -> dict[str, float]:
    """Of the unsharded module into the sharded one and back, and between sharded ones."""
    found: dict[str, float] = {}
    for plan, options in ((MIXED, SGD), (MIXED_DENSE, {})):
        # Once more, for shards draw other numbers in each process.
        torch.manual_seed(0)
        whole, other, third = (ScheduledEmbeddingCollection(tables(), here(), **options) for _ in range(3))
        first, second = sharded(copy.deepcopy(other), plan), sharded(copy.deepcopy(other), plan)
        found["differs at first"] = float(tables_apart(first.module["rows"], whole) > 0)
        first.load_state_dict({f"rows.{name}": tensor for name, tensor in whole.state_dict().items()})
        loaded = [tables_apart(first.module["rows"], whole)]
        second.load_state_dict(first.state_dict())
        loaded.append(tables_apart(second.module["rows"], whole))
        third.load_state_dict(gathered(first.module["rows"]))
        loaded.append(max(apart(a, b) for a, b in zip(third.parameters(), whole.parameters(), strict=True)))
        found[f"loaded, {options.get('optimizer')}"] = max(loaded)
    return found


def checkpoint(optimizer: str, directory: Path) -> dict[str, float]:
    """Written by one plan, read by others, which go on with the same training."""
    options = {"optimizer": optimizer, "optimizer_options": {"learning_rate": RATE, "eps": 1e-3}}
    torch.manual_seed(0)
    whole = ScheduledEmbeddingCollection(tables(), here(), **options)
    first = sharded(copy.deepcopy(whole), MIXED)
    rank, batches, worst = dist.get_rank(), batch((2, 3), 0, False), 0.0

    def saved(dmp: DistributedModelParallel) -> dict[str, Any]:
        return {"model": dmp.state_dict(), "optimizer": dmp.fused_optimizer.state_dict()}

    squares(dict(first.module["rows"](batches[rank]).items())).backward()
    (squares(whole(batches[-1])) / PROCESSES).backward()
    torch.distributed.checkpoint.save(saved(first), checkpoint_id=directory / f"rows {optimizer}")
    plans = [plan for name, plan in ONE.items() if name != "data-parallel"]
    others = [sharded(ScheduledEmbeddingCollection(tables(), here(), **options), plan) for plan in plans]
    (squares(whole(batches[-1])) / PROCESSES).backward()
    for dmp in others:
        state = saved(dmp)
        torch.distributed.checkpoint.load(state, checkpoint_id=directory / f"rows {optimizer}")
        dmp.load_state_dict(state["model"])
        dmp.fused_optimizer.load_state_dict(state["optimizer"])
        squares(dict(dmp.module["rows"](batches[rank]).items())).backward()
        worst = max(worst, tables_apart(dmp.module["rows"], whole), states_apart(dmp, whole))
    return {"tables and states": worst}


class Model(nn.Module):
    """As a train pipeline wants it."""

    def __init__(self, rows: ScheduledEmbeddingCollection) -> None:
        super().__init__()
        self.rows = rows
        self.over = nn.Linear(8, 1)

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        rows = self.rows(features)
        scores = self.over(torch.cat([rows["c"].values(), rows["a@z"].values()]))
        return scores.square().mean(), scores.detach()


def pipelined(varied: tuple[int, ...] = ()) -> dict[str, float]:
    sharder = ScheduledEmbeddingCollectionSharder()
    return piped_apart(
        lambda: Model(ScheduledEmbeddingCollection(tables(), here(), **SGD)), "rows", tables(), MIXED, sharder, varied
    )


def planned() -> dict[str, float]:
    torch.manual_seed(0)
    whole = ScheduledEmbeddingCollection(tables(), here())
    found, batches = planned_output(whole, ScheduledEmbeddingCollectionSharder(), 0), batch((2, 3), 0, False)
    return {"rows": rows_apart(dict(found.items()), own_rows(whole(batches[-1]), batches, dist.get_rank()))}


def from_meta() -> dict[str, float]:
    """Tables that are made where they are; all copies are the same."""
    torch.manual_seed(dist.get_rank())
    configs = tables()
    for table in configs:
        # Of two dimensions, which a table that is not here does not have.
        table.init_fn = nn.init.xavier_uniform_ if table.name in ("z", "v") else functools.partial(nn.init.constant_, val=0.5)
    plan = [row_wise(), column_wise(ranks=[0, 1]), data_parallel(), table_wise(rank=0), table_wise(rank=1)]
    rows = sharded(ScheduledEmbeddingCollection(configs, device="meta"), plan).module["rows"]
    weights = {name: parameter.detach() for name, parameter in rows.named_parameters()}
    copies = [torch.empty_like(weights["embeddings.z.weight"]) for _ in range(PROCESSES)]
    dist.all_gather(copies, weights["embeddings.z.weight"].contiguous())
    constants = [weights[f"embeddings.{name}.weight"] for name in ("x", "y", "w")]
    return {
        "copies": apart(copies[0], copies[1]),
        "drawn": float(not 0 < float(copies[0].abs().max()) < 2),
        "constant": max((float((constant - 0.5).abs().max()) for constant in constants if constant.numel()), default=0.0),
    }


def copies_of_several() -> dict[str, float]:
    """Data-parallel tables that differ between processes are the first one's everywhere."""
    torch.manual_seed(dist.get_rank())
    rows = sharded(ScheduledEmbeddingCollection(tables(), here()), ONE["data-parallel"]).module["rows"]
    torch.manual_seed(0)
    return {"tables": tables_apart(rows, ScheduledEmbeddingCollection(tables(), here()))}


def output() -> dict[str, float]:
    """Another dtype, and no gradients where none are wanted."""
    torch.manual_seed(0)
    whole = ScheduledEmbeddingCollection(tables(), here(), output_dtype=torch.bfloat16, **SGD)
    rows = sharded(copy.deepcopy(whole), MIXED).module["rows"]
    batches = batch((2, 3), 0, False)
    with torch.no_grad():
        got = dict(rows(batches[dist.get_rank()]).items())
    wanted = own_rows(whole(batches[-1]), batches, dist.get_rank())
    return {"rows": rows_apart(got, wanted), "requires grad": float(any(of.values().requires_grad for of in got.values()))}


def one_size() -> dict[str, float]:
    """Batches whose kind and sizes do not go together; inverse indices change no rows, as in the unsharded module."""
    torch.manual_seed(0)
    whole = ScheduledEmbeddingCollection(tables(), here())
    rows = sharded(copy.deepcopy(whole), MIXED).module["rows"]
    plain, own = (batch((2, 2), 1, False, varied=varied)[dist.get_rank()] for varied in ((), ALL))

    def made(features: KeyedJaggedTensor, **options: Any) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(list(KEYS), features.values(), lengths=features.lengths(), **options)

    inverse = torch.tensor([[1, 0, 1], [0, 0, 1], [0, 1, 0], [1, 1, 1], [0, 0, 0]], device=here())
    batches = {
        "a size for each feature": made(plain, stride_per_key_per_rank=[[2]] * 5),
        "inverse indices alone": made(plain, inverse_indices=(list(KEYS), inverse)),
        "sizes without inverse indices": made(own, stride_per_key_per_rank=[[size] for size in own.stride_per_key()]),
        "sizes in parts": made(own, stride_per_key_per_rank=[[size // 2, size - size // 2] for size in own.stride_per_key()]),
    }
    return {name: rows_apart(dict(rows(of_name).items()), whole(of_name)) for name, of_name in batches.items()}


def errors() -> dict[str, str]:
    """What is refused, in every process alike, before anything is sent."""
    made = functools.partial(ScheduledEmbeddingCollection, device=here())
    rows = sharded(made(tables()), MIXED).module["rows"]
    features = batch((2,), 0, False)[-1]
    values, lengths = features.values(), features.lengths()
    wrong = KeyedJaggedTensor(list(KEYS), values, lengths=lengths, stride_per_key_per_rank=[[2]] * 4 + [[3]])
    found = {
        "missing": refused(lambda: rows(KeyedJaggedTensor(["a", "b"], values[:0], lengths=lengths[:4] * 0))),
        "wrong sizes": refused(lambda: rows(wrong)),
        "copies": refused(lambda: sharded(made(tables(), **SGD), MIXED_DENSE)),
        "widths": refused(lambda: sharded(made(tables()), [column_wise(ranks=[0]), *MIXED[1:]])),
        "uneven": refused(lambda: sharded(made(tables()), [column_wise(size_per_rank=[3, 5]), *[row_wise()] * 4])),
        "unaligned": refused(lambda: sharded(made(tables()), [column_wise(ranks=[0, 0]), *MIXED[1:]])),
    }
    rows(features)
    found["other order"] = refused(lambda: rows(KeyedJaggedTensor(list(KEYS[::-1]), values[:0], lengths=lengths * 0)))
    return found


def unsharded() -> str:
    """What a module with an optimizer says that nobody has sharded."""
    module = ScheduledEmbeddingCollection(tables(), here(), **SGD)
    told = refused(lambda: module(batch((2,), 0, False)[-1]))
    # And so of a table that is scored against.
    assert refused(lambda: module.scored(tables()[0].name)) == told
    return told


def cases(directory: Path) -> dict[str, Callable[[], Any]]:
    made: dict[str, Callable[[], Any]] = {}
    # On a GPU kernels are compiled for the tables of every plan's shards.
    is_few = here().type == "cuda"
    for name, plan in {**ONE, "mixed": MIXED, "all in one": ON_ONE}.items():
        by_row = () if name in ("column-wise", "mixed") else BY_ROW
        kinds = (None, "adagrad") if is_few else (*BY_ELEMENT, *by_row)
        for optimizer in (None,) if name == "data-parallel" else kinds:
            made[f"{name}, {optimizer}"] = functools.partial(training, plan, optimizer)
            made[f"{name}, sizes of features, {optimizer}"] = functools.partial(training, plan, optimizer, varied=[ALL])
        rule = None if name == "data-parallel" else "sgd"
        if name == "mixed" or not is_few:
            made[f"{name}, weighted"] = functools.partial(training, plan, rule, weighted=True, indices=True)
            made[f"{name}, two types"] = functools.partial(training, plan, rule, two_types=True)
            made[f"{name}, sizes of features, weighted"] = functools.partial(
                training, plan, rule, weighted=True, indices=True, varied=[ALL]
            )
    made["mixed copies, None"] = functools.partial(training, MIXED_DENSE, None)
    for optimizer in (None, "adagrad"):
        # Both kinds of batches, in turn, in each process.
        made[f"sizes of features, sometimes, {optimizer}"] = functools.partial(
            training, MIXED, optimizer, varied=[(1,), (0,), (), ALL]
        )
    made["sizes of features, pipelined"] = functools.partial(pipelined, ALL)
    for optimizer in ("adagrad", "adam"):
        made[f"checkpoint, {optimizer}"] = functools.partial(checkpoint, optimizer, directory)
    others = (
        several_shards_in_one,
        column_rows,
        copies_of_several,
        pipelined,
        planned,
        state_dicts,
        from_meta,
        output,
        errors,
        one_size,
    )
    return {**made, **{of.__name__: of for of in others}}


if __name__ == "__main__":
    main(cases, unsharded)
