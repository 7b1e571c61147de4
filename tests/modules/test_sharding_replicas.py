"""Collections that TorchRec's `DMPCollection` shards in two replicas, whose weights and states it averages."""

from __future__ import annotations

from typing import Any

import pytest

from tests.modules.sharding_processes import check, num_gpus, run
from tests.places import PLACE

pytestmark = [
    pytest.mark.skipif(PLACE.name == "interpret", reason="processes of their own, whatever the place"),
    # On GPUs kernels are compiled first.
    pytest.mark.timeout(1_800),
]

OF_BOTH = ("None", "sgd", "adagrad", "adam", "rowwise_adagrad", "a context of its own", "copies, None")
CASES = [f"{kind}, {of}" for kind in ("bags", "rows") for of in OF_BOTH]
CASES += [f"bags, {of}" for of in ("states not averaged", "adjacent shards", "two types", "copies, adagrad")]


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(tmp_path_factory, "tests.modules.replica_processes", "gloo", 4, 2)


@pytest.fixture(scope="module")
def on_gpus(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    if num_gpus() < 4:
        pytest.skip("needs four GPUs")
    return run(tmp_path_factory, "tests.modules.replica_processes", "nccl", 4, 2)


@pytest.fixture(params=["on_cpu", pytest.param("on_gpus", marks=pytest.mark.gpu)])
def found(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    result: list[dict[str, Any]] = request.getfixturevalue(request.param)
    return result


@pytest.mark.parametrize("case", CASES)
def test_training_is_that_of_whole_collections_averaged_by_hand(found: list[dict[str, Any]], case: str) -> None:
    check(found, case)


def test_every_case_is_looked_at(on_cpu: list[dict[str, Any]]) -> None:
    others = {f"{kind}, {of}" for kind in ("bags", "rows") for of in ("state_dicts", "from_meta")}
    assert all(process.keys() == {*CASES, *others, "errors", "unsharded"} for process in on_cpu)


@pytest.mark.parametrize("kind", ["bags", "rows"])
def test_state_dicts_go_into_replicas_and_between_them(found: list[dict[str, Any]], kind: str) -> None:
    for process in found:
        assert set(process[f"{kind}, state_dicts"].values()) == {0.0}


@pytest.mark.parametrize("kind", ["bags", "rows"])
def test_tables_of_a_meta_module_are_the_same_in_all_replicas(found: list[dict[str, Any]], kind: str) -> None:
    for process in found:
        assert set(process[f"{kind}, from_meta"].values()) == {0.0}


def test_copies_that_would_part_are_refused(found: list[dict[str, Any]]) -> None:
    """As under `DistributedModelParallel`, where nobody has sharded them."""
    assert [of["unsharded"] for of in found] == [
        "optimizer: would update the tables of this process alone, of 4 processes in the group, so that their copies part; shard "
        "the model by DistributedModelParallel with ScheduledEmbeddingBagCollectionSharder and "
        "ScheduledEmbeddingCollectionSharder, or leave the optimizer out"
    ] * 4


STRATEGY = (
    "env: expected a strategy of DMPCollection by which sync() averages replicas, got FULLY_SHARDED, by which FBGEMM's kernels "
    "alone average themselves; take DEFAULT or PER_MODULE"
)
MISSED = (
    "module: expected an optimizer without decay_missed_steps under DMPCollection, got one with it: sync() averages weights and "
    "states, while rows have missed other steps in each replica; leave it out"
)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("bags, strategy", STRATEGY),
        ("rows, strategy", STRATEGY),
        ("bags, missed", MISSED),
        ("rows, missed", MISSED),
        (
            "hosts",
            "env: expected a group of all 4 processes, of which TorchRec makes the hosts' groups, got 2, and table_row_wise",
        ),
    ],
)
def test_replicas_that_would_part_are_refused(found: list[dict[str, Any]], case: str, message: str) -> None:
    for process in found:
        assert process["errors"][case].startswith(message)
