"""Bags that DistributedModelParallel has sharded over processes, on the CPU and on GPUs, against the unsharded ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn
from torchrec.distributed.types import ParameterSharding, ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from jagged.modules import ScheduledEmbeddingBagCollection, ScheduledEmbeddingBagCollectionSharder
from tests.modules.sharding_processes import check, num_gpus, run
from tests.places import PLACE

pytestmark = [
    pytest.mark.skipif(PLACE.name == "interpret", reason="processes of their own, whatever the place"),
    # On GPUs hundreds of kernels are compiled first.
    pytest.mark.timeout(1_800),
]


PLANS = ("table-wise", "column-wise", "row-wise", "data-parallel", "mixed", "all in one")
BY_ELEMENT = ("None", "sgd", "adagrad", "adam", "weighted", "two types")
BY_ROW = ("rowwise_adagrad", "rowwise_adam", "rowwise_lamb", "adam of whole rows")
CASES = [f"{plan}, {of}" for plan in PLANS for of in (*BY_ELEMENT, *(() if plan in ("column-wise", "mixed") else BY_ROW))]
CASES += [f"{plan}, sizes of features, {of}" for plan in PLANS for of in BY_ELEMENT]
CASES += [f"sizes of features, {when}, {of}" for when in ("of one process first", "later") for of in ("None", "adagrad")]
CASES += [f"sizes of features, selected, {of}" for of in ("None", "weighted", "two types", "pipelined")]
CASES += [
    "one host, None",
    "one host, sizes of features",
    "sizes of features, pipelined",
    "one_size",
    "checkpoint, adagrad",
    "checkpoint, adam",
    "several_shards_in_one",
    "column_rows",
    "reduce_scattered",
    "as over NCCL",
    "as over NCCL, later",
    "pipelined",
    "planned",
]

# Of four processes as two hosts.
PLANS_OF_HOSTS = ("table-column-wise", "table-row-wise", "grid", "mixed")
CASES_OF_HOSTS = [f"{plan}, {of}" for plan in PLANS_OF_HOSTS for of in ("None", "sizes of features", "adagrad, two types")]
CASES_OF_HOSTS += [
    "table-row-wise, rowwise_adagrad",
    "table-row-wise, adam of whole rows",
    "table-row-wise, reduce_scattered",
    "grid, reduce_scattered",
    "table-row-wise, as over NCCL",
    "grid, as over NCCL",
    "in one host",
    "in one host, sizes of features",
    "mixed, weighted",
    "sizes of features, later",
    "sizes of features, of one process first",
    "several_shards_in_one",
    "column_rows",
    "checkpoint",
    "pipelined",
    "planned",
]

ANYWHERE = ("on_cpu", pytest.param("on_gpus", marks=pytest.mark.gpu))
HOSTS_ANYWHERE = ("hosts_on_cpu", pytest.param("hosts_on_gpus", marks=pytest.mark.gpu))


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(tmp_path_factory, "tests.modules.bags_processes", "gloo")


@pytest.fixture(scope="module")
def on_gpus(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    if num_gpus() < 2:
        pytest.skip("needs two GPUs")
    return run(tmp_path_factory, "tests.modules.bags_processes", "nccl")


@pytest.fixture(scope="module")
def hosts_on_cpu(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(tmp_path_factory, "tests.modules.bags_processes", "gloo", 4, 2)


@pytest.fixture(scope="module")
def hosts_on_gpus(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    if num_gpus() < 4:
        pytest.skip("needs four GPUs")
    return run(tmp_path_factory, "tests.modules.bags_processes", "nccl", 4, 2)


@pytest.fixture(params=ANYWHERE)
def found(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    result: list[dict[str, Any]] = request.getfixturevalue(request.param)
    return result


@pytest.fixture(params=HOSTS_ANYWHERE)
def found_in_hosts(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    result: list[dict[str, Any]] = request.getfixturevalue(request.param)
    return result


@pytest.mark.parametrize("case", CASES)
def test_training_is_that_of_the_unsharded_module(found: list[dict[str, Any]], case: str) -> None:
    check(found, case)


@pytest.mark.parametrize("case", CASES_OF_HOSTS)
def test_training_over_hosts_is_that_of_the_unsharded_module(found_in_hosts: list[dict[str, Any]], case: str) -> None:
    check(found_in_hosts, case)


def test_every_case_is_looked_at(on_cpu: list[dict[str, Any]], hosts_on_cpu: list[dict[str, Any]]) -> None:
    others = {"state_dicts", "from_meta", "output", "errors", "unsharded"}
    assert all(process.keys() == {*CASES, *others} for process in on_cpu)
    assert all(process.keys() == {*CASES_OF_HOSTS, "state_dicts", "errors", "unsharded"} for process in hosts_on_cpu)


def test_copies_that_would_part_are_refused(found: list[dict[str, Any]]) -> None:
    """Each process would update its own tables by its own batch."""
    assert [of["unsharded"] for of in found] == [
        "optimizer: would update the tables of this process alone, of 2 processes in the group, so that their copies part; shard "
        "the model by DistributedModelParallel with ScheduledEmbeddingBagCollectionSharder and "
        "ScheduledEmbeddingCollectionSharder, or leave the optimizer out"
    ] * 2


@pytest.mark.parametrize("places", [*ANYWHERE, *HOSTS_ANYWHERE])
def test_state_dicts_go_both_ways(request: pytest.FixtureRequest, places: str) -> None:
    for process in request.getfixturevalue(places):
        state_dicts = dict(process["state_dicts"])
        assert state_dicts.pop("differs at first") == 1
        assert set(state_dicts.values()) == {0.0}


def test_tables_of_a_meta_module_are_made_where_they_are(found: list[dict[str, Any]]) -> None:
    for process in found:
        assert set(process["from_meta"].values()) == {0.0}


def test_output_has_the_dtype_and_the_features_of_the_unsharded_module(found: list[dict[str, Any]]) -> None:
    check(found, "output")
    assert [process["output"]["requires grad"] for process in found] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("missing", "expected a key for every feature of the tables, got none for c, d"),
        ("other order", "expected the keys of the first batch in their order"),
        ("no weights", "expected weights, as is_weighted says, got none"),
        ("no inverse", "features: expected inverse_indices where keys have batches of several sizes, got none"),
        ("other inverse", "features: expected inverse_indices for every feature of the tables, got none for c"),
        ("uneven", "features: expected 11, the sum of the keys' batch sizes as the number of lengths, got 10"),
        ("widths", "expected several column shards in one process to have the same width, a multiple of 16, got [4, 4] of 'x'"),
    ],
)
def test_wrong_input_is_refused_in_every_process(found: list[dict[str, Any]], case: str, message: str) -> None:
    for process in found:
        assert message in process["errors"][case]


FIT = "params: expected {} shards of 'x' in all 2 processes of a host in their order, 4 rows each as far as there are, got {}"


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("two hosts", FIT.format("table_row_wise", "(process, first row, first column, rows, columns) [(1, 0, 0, 4, 8), (2, 4,")),
        ("another order", FIT.format("table_row_wise", "")),
        ("larger hosts", FIT.format("table_row_wise", "")),
        ("rows in two hosts", FIT.format("table_row_wise", "")),
        ("grid in two hosts", FIT.format("grid_shard", "")),
        (
            "columns in two hosts",
            "expected table_column_wise shards of 'x' in one host of 2 processes, got them in processes [0, 2]",
        ),
        ("narrow columns", "to have the same width, a multiple of 16, got [4, 4] of 'x' in process 0; give each process one"),
        ("narrow columns of a grid", "a multiple of 16, got [4, 4] of 'x' in process 1; give each process one"),
        ("one row", "expected grid_shard of tables of 2 rows or more, got 'v' of 1"),
        (
            "group",
            "env: expected a group of all 4 processes, of which TorchRec makes the hosts' groups, got 2, and table_row_wise of",
        ),
    ],
)
def test_plans_that_do_not_fit_the_hosts_are_refused(found_in_hosts: list[dict[str, Any]], case: str, message: str) -> None:
    """TorchRec would look up other rows."""
    for process in found_in_hosts:
        assert message in process["errors"][case]


def test_a_first_batch_that_one_process_refuses_ends_in_all(found: list[dict[str, Any]]) -> None:
    """Or they would wait for it."""
    messages = [process["errors"]["elsewhere"] for process in found]
    assert messages[0] == "features: another process refused its first batch; the error there says why"
    assert messages[1].startswith("features: expected inverse_indices where keys have batches of several sizes, got none")


def test_wrong_inverse_indices_are_refused_on_a_cpu(on_cpu: list[dict[str, Any]]) -> None:
    """On a GPU that would wait for it."""
    message = "features: expected inverse_indices from 0 on and below 2, the batch size of key 'a', got 2 in sample 0"
    assert [process["errors"]["wrong inverse"] for process in on_cpu] == [message] * 2


def collection(**options: Any) -> ScheduledEmbeddingBagCollection:
    table = EmbeddingBagConfig(name="item", num_embeddings=10, embedding_dim=4, feature_names=["clicked"])
    return ScheduledEmbeddingBagCollection([table], device="meta", **options)


def frozen() -> ScheduledEmbeddingBagCollection:
    return collection().requires_grad_(False)


@pytest.mark.parametrize(
    ("module", "sharding_type", "kernel", "message"),
    [
        (
            collection,
            "diagonal",
            "fused",
            "expected a sharding type of table_wise, .*, table_row_wise, grid_shard and the compute",
        ),
        (collection, "table_wise", "fused_uvm", "the compute kernel fused or dense for 'item', got table_wise and fused_uvm"),
        (frozen, "table_wise", "fused", "expected tables that require a gradient, got 'embedding_bags.item.weight' frozen"),
    ],
)
def test_what_cannot_be_sharded_is_refused(
    module: Callable[[], ScheduledEmbeddingBagCollection], sharding_type: str, kernel: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ScheduledEmbeddingBagCollectionSharder().shard(
            module(), {"item": ParameterSharding(sharding_type, kernel, ranks=[0])}, ShardingEnv(world_size=2, rank=0)
        )


def test_the_sharder_says_what_it_shards() -> None:
    sharder = ScheduledEmbeddingBagCollectionSharder()
    assert sharder.module_type is ScheduledEmbeddingBagCollection
    assert list(sharder.shardable_parameters(collection())) == ["item"]
    for device in ("cpu", "cuda"):
        of_hosts = ["table_column_wise", "table_row_wise", "grid_shard"]
        assert sharder.sharding_types(device) == ["table_wise", "column_wise", "row_wise", "data_parallel", *of_hosts]
        assert sharder.compute_kernels("row_wise", device) == ["fused"]
        assert sharder.compute_kernels("data_parallel", device) == ["dense"]
    with pytest.raises(NotImplementedError, match="save a checkpoint and shard anew"):
        sharder.reshard(nn.Module(), {}, None)
