"""The head and the lookup over a table split over processes, against the unsplit ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection

from jagged.modules import SplitEmbeddingCollection
from tests.places import PLACE
from tests.processes import told_by

HEADS = [
    f"head of {items} items, smoothing {smoothing}, ignoring {ignored}"
    for items in (17, 7, 4, 1)
    for smoothing in (0.0, 0.2)
    for ignored in (-100, 0)
]
LOOKUPS = [f"lookup of {items} items" for items in (17, 7, 4, 1)]

pytestmark = pytest.mark.skipif(PLACE.name != "cpu", reason="processes on the CPU, whatever the place")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """By process."""
    result: list[dict[str, Any]] = told_by("tests.modules.split_processes", tmp_path_factory.mktemp("split"))
    assert all(process.keys() == {*HEADS, *LOOKUPS, "target nowhere"} for process in result)
    return result


@pytest.mark.parametrize("case", HEADS)
def test_split_head_is_the_unsplit_one(found: list[dict[str, Any]], case: str) -> None:
    for process in found:
        # float64: sums of 15 rows and 17 items in another order. A NaN fails too.
        assert all(difference < 1e-13 for difference in process[case].values()), process[case]


@pytest.mark.parametrize("case", LOOKUPS)
def test_split_lookup_is_the_unsplit_one(found: list[dict[str, Any]], case: str) -> None:
    for process in found:
        assert process[case] == {"rows": 0.0, "gradient": 0.0}


def test_a_target_outside_the_catalogue_makes_its_process_s_loss_nan(found: list[dict[str, Any]]) -> None:
    assert [process["target nowhere"]["loss"] for process in found] == [0.0, 0.0, 0.0]


def test_only_one_table_is_split() -> None:
    tables = [EmbeddingConfig(name=name, embedding_dim=4, num_embeddings=3, feature_names=[name]) for name in ("a", "b")]
    whole = EmbeddingCollection(tables=tables, device=torch.device("meta"))
    with pytest.raises(ValueError, match="expected a collection of one table, got 2"):
        SplitEmbeddingCollection(whole, None, None)  # type: ignore[arg-type]
