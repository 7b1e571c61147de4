"""Rows, not pooled, that DistributedModelParallel has sharded over two processes, on the CPU and on GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn
from torchrec.distributed.types import ParameterSharding, ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingConfig

from jagged.modules import ScheduledEmbeddingCollection, ScheduledEmbeddingCollectionSharder, share_tables
from tests.modules.sharding_processes import check, num_gpus, run
from tests.places import PLACE

pytestmark = [
    pytest.mark.skipif(PLACE.name == "interpret", reason="processes of their own, whatever the place"),
    # On GPUs hundreds of kernels are compiled first.
    pytest.mark.timeout(1_800),
]


BY_ELEMENT, BY_ROW = ("sgd", "adagrad", "adam"), ("rowwise_adagrad", "rowwise_adam", "adam of whole rows")
CASES = [
    f"{plan}, {sizes}{of}"
    for plan in ("table-wise", "column-wise", "row-wise", "data-parallel", "mixed", "all in one")
    for sizes in ("", "sizes of features, ")
    for of in (
        *("None", "weighted"),
        *(() if sizes else ("two types",)),
        *(() if plan == "data-parallel" else BY_ELEMENT),
        *(() if plan in ("column-wise", "data-parallel", "mixed") else BY_ROW),
    )
]
CASES += [
    "mixed copies, None",
    "sizes of features, sometimes, None",
    "sizes of features, sometimes, adagrad",
    "sizes of features, pipelined",
    "one_size",
    "checkpoint, adagrad",
    "checkpoint, adam",
    "several_shards_in_one",
    "column_rows",
    "copies_of_several",
    "pipelined",
    "planned",
]


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(tmp_path_factory, "tests.modules.sequences_processes", "gloo")


@pytest.fixture(scope="module")
def on_gpus(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    if num_gpus() < 2:
        pytest.skip("needs two GPUs")
    return run(tmp_path_factory, "tests.modules.sequences_processes", "nccl")


@pytest.fixture(params=["on_cpu", pytest.param("on_gpus", marks=pytest.mark.gpu)])
def found(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    result: list[dict[str, Any]] = request.getfixturevalue(request.param)
    return result


@pytest.mark.parametrize("case", CASES)
def test_training_is_that_of_the_unsharded_module(found: list[dict[str, Any]], case: str) -> None:
    check(found, case)


def test_every_case_is_looked_at(on_cpu: list[dict[str, Any]]) -> None:
    others = {"state_dicts", "from_meta", "output", "errors", "unsharded"}
    assert all(process.keys() == {*CASES, *others} for process in on_cpu)


def test_copies_that_would_part_are_refused(found: list[dict[str, Any]]) -> None:
    """Each process would update its own tables by its own batch."""
    assert [of["unsharded"] for of in found] == [
        "optimizer: would update the tables of this process alone, of 2 processes in the group, so that their copies part; shard "
        "the model by DistributedModelParallel with ScheduledEmbeddingBagCollectionSharder and "
        "ScheduledEmbeddingCollectionSharder, or leave the optimizer out"
    ] * 2


def test_state_dicts_go_both_ways(found: list[dict[str, Any]]) -> None:
    for process in found:
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
        ("missing", "features: expected a key for every feature of the tables, got none for c, d"),
        (
            "other order",
            "features: expected the keys of the first batch in their order, ['d', 'b', 'a', 'unread', 'c'], got "
            "['c', 'unread', 'a', 'b', 'd']",
        ),
        ("wrong sizes", "features: expected 11, the sum of the keys' batch sizes as the number of lengths, got 10"),
        (
            "copies",
            "params: expected no data-parallel tables with an optimizer, got 'z': each process would update its own, so that "
            "their copies part; shard it table-wise, column-wise or row-wise, or leave the optimizer out",
        ),
        (
            "widths",
            "params: expected column shards of one width in all tables of a collection, got 4 of 'y', 8 of 'x'; split all alike, "
            "or shard the others table-wise or row-wise",
        ),
        (
            "uneven",
            "params: expected column shards of one width in all tables of a collection, got 3 of 'x', 5 of 'x'; split all alike, "
            "or shard the others table-wise or row-wise",
        ),
        (
            "unaligned",
            "params: expected several column shards in one process to have the same width, a multiple of 16, got [4, 4] of 'x' "
            "in process 0; give each process one",
        ),
    ],
)
def test_wrong_input_is_refused_in_every_process(found: list[dict[str, Any]], case: str, message: str) -> None:
    assert [process["errors"][case] for process in found] == [message] * 2


def collection(**options: Any) -> ScheduledEmbeddingCollection:
    table = EmbeddingConfig(name="item", num_embeddings=10, embedding_dim=4, feature_names=["clicked"])
    return ScheduledEmbeddingCollection([table], device="meta", **options)


def frozen() -> ScheduledEmbeddingCollection:
    return collection().requires_grad_(False)


def shared() -> ScheduledEmbeddingCollection:
    module = collection()
    share_tables(module, collection())
    return module


@pytest.mark.parametrize(
    ("module", "sharding_type", "kernel", "message"),
    [
        (collection, "table_row_wise", "fused", "expected a sharding type of table_wise, column_wise, row_wise, data_parallel"),
        (collection, "table_wise", "fused_uvm", "the compute kernel fused or dense for 'item', got table_wise and fused_uvm"),
        (frozen, "table_wise", "fused", "expected tables that require a gradient, got 'embeddings.item.weight' frozen"),
        (shared, "table_wise", "fused", "expected tables of one collection, got some that several share, of which each would"),
    ],
)
def test_what_cannot_be_sharded_is_refused(
    module: Callable[[], ScheduledEmbeddingCollection], sharding_type: str, kernel: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ScheduledEmbeddingCollectionSharder().shard(
            module(), {"item": ParameterSharding(sharding_type, kernel, ranks=[0])}, ShardingEnv(world_size=2, rank=0)
        )


def test_the_sharder_says_what_it_shards() -> None:
    sharder = ScheduledEmbeddingCollectionSharder()
    assert sharder.module_type is ScheduledEmbeddingCollection
    assert list(sharder.shardable_parameters(collection())) == ["item"]
    for device in ("cpu", "cuda"):
        assert sharder.sharding_types(device) == ["table_wise", "column_wise", "row_wise", "data_parallel"]
        assert sharder.compute_kernels("row_wise", device) == ["fused"]
        assert sharder.compute_kernels("data_parallel", device) == ["dense"]
    with pytest.raises(NotImplementedError, match="save a checkpoint and shard anew"):
        sharder.reshard(nn.Module(), {}, None)
