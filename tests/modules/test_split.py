"""The head and the lookup over a table split over processes, against the unsplit ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection

from jagged.modules import SplitEmbeddingCollection
from tests.modules.split_processes import PROCESSES
from tests.places import PLACE
from tests.processes import told_by

HEADS = [
    f"head of {items} items, smoothing {smoothing}, ignoring {ignored}"
    for items in (17, 7, 4, 1)
    for smoothing in (0.0, 0.2)
    for ignored in (-100, 0)
]
LOOKUPS = [f"lookup of {items} items" for items in (17, 7, 4, 1)]

SAMPLED = [
    f"{sampler} and {loss} of {items} items, ignoring {ignored}"
    for items, ignored in ((40, -100), (4, 0))
    for sampler in (
        "uniform", "uniform, blocks of rows", "uniform, without replacement", "log-uniform, one draw", "popularity", "in-batch",
        "mixed",
    )
    for loss in ("softmax", "refined", "bce", "gbce")
    if loss != "gbce" or sampler not in ("in-batch", "mixed")
]  # fmt: skip

TRAINING = ["in training, None", "in training, torch.bfloat16"]

pytestmark = pytest.mark.skipif(PLACE.name != "cpu", reason="processes on the CPU, whatever the place")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """By process."""
    result: list[dict[str, Any]] = told_by("tests.modules.split_processes", tmp_path_factory.mktemp("split"))
    assert all(process.keys() == {*HEADS, *SAMPLED, *LOOKUPS, "target nowhere", "drawn alike", *TRAINING} for process in result)
    return result


@pytest.mark.parametrize("case", HEADS)
def test_split_head_is_the_unsplit_one(found: list[dict[str, Any]], case: str) -> None:
    for process in found:
        # float64: sums of 15 rows and 17 items in another order. A NaN fails too.
        assert all(difference < 1e-13 for difference in process[case].values()), process[case]


@pytest.mark.parametrize("case", SAMPLED)
def test_a_split_sampled_head_is_the_unsplit_one(found: list[dict[str, Any]], case: str) -> None:
    for process in found:
        # float64, but for the logarithms of probabilities, float32 where ids are given.
        assert all(difference < 1e-5 for difference in process[case].values()), process[case]


def test_a_split_sampled_head_under_autocast_and_a_checkpoint(found: list[dict[str, Any]]) -> None:
    for process in found:
        # float32: sums of 15 rows in another order.
        assert all(process[case][name] < 2e-6 for case in TRAINING for name in ("hidden", "weight")), process
        # Autocast is one.
        plain, rounded = (process[case]["norm"] for case in TRAINING)
        assert plain != rounded
        assert plain == pytest.approx(rounded, rel=0.05)


def test_processes_draw_alike(found: list[dict[str, Any]]) -> None:
    assert [process["drawn alike"] for process in found] == [{"seeds": 1, "alone": PROCESSES, "steps": 0.0}] * PROCESSES


@pytest.mark.parametrize("case", LOOKUPS)
def test_split_lookup_is_the_unsplit_one(found: list[dict[str, Any]], case: str) -> None:
    for process in found:
        assert process[case] == {"rows": 0.0, "gradient": 0.0}


def test_a_target_outside_the_catalogue_makes_its_process_s_loss_nan(found: list[dict[str, Any]]) -> None:
    assert [process["target nowhere"] for process in found] == [{"loss": 0.0, "logits": 0.0}] * PROCESSES


def test_only_one_table_is_split() -> None:
    tables = [EmbeddingConfig(name=name, embedding_dim=4, num_embeddings=3, feature_names=[name]) for name in ("a", "b")]
    whole = EmbeddingCollection(tables=tables, device=torch.device("meta"))
    with pytest.raises(ValueError, match="expected a collection of one table, got 2"):
        SplitEmbeddingCollection(whole, None, None)  # type: ignore[arg-type]
