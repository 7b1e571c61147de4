"""Runs on a table of which negatives were left out: predictions and figures are those of the table with all rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import jagged
from jagged.config import ConfigError, RankingConfig
from jagged.runs.ranking import RankingRun
from jagged.runs.ranking.evaluating import RankingEvaluation
from jagged.runs.ranking.reporting import gather_ranking
from jagged.training import TrainingError
from tests.places import PLACE

pytestmark = pytest.mark.skipif(PLACE.name != "cpu", reason="what is learnt is the same in every place")

RATE = 0.2
COLUMNS: dict[str, Any] = {"label": ["click", "buy"], "candidate": "item", "user": "user", "history": "none"}


@pytest.fixture(scope="module")
def impressions() -> pa.Table:
    """Planted impressions, of which 6 % are clicked and 2 % bought, with the part that each row is in."""
    rng, count = np.random.default_rng(0), 40_000
    user, item, price = rng.integers(40, size=count), rng.integers(30, size=count), rng.normal(size=count)
    likes, sells = rng.normal(size=40), rng.normal(size=30)
    click = rng.random(count) < 1 / (1 + np.exp(3.2 - likes[user] - 0.5 * sells[item]))
    buy = click & (rng.random(count) < 1 / (1 + np.exp(1 + price - sells[item])))
    columns = {"user": [f"u{i}" for i in user], "item": [f"i{i}" for i in item], "price": price}
    parts = rng.choice(["train", "valid", "test"], count, p=[0.6, 0.1, 0.3])
    return pa.table({**columns, "click": click.astype(int), "buy": buy.astype(int), "split": parts})


@pytest.fixture(scope="module")
def kept(impressions: pa.Table) -> pa.Table:
    """Those whose negatives were kept at the rate."""
    chance = np.random.default_rng(0).random(len(impressions))
    return impressions.filter(pa.array((chance < RATE) | (impressions["click"].to_numpy() == 1)))


def config(output: Path, **data: Any) -> RankingConfig:
    return RankingConfig(
        output=str(output),
        device="cpu",
        data={**COLUMNS, **data},
        split="column",
        model={"name": "dlrm", "embedding_dim": 8, "top_sizes": [16], "bottom_sizes": [8], "conditional": ["buy=click"]},
        training={
            "max_epochs": 6, "batch_size": 64, "learning_rate": 0.01, "tensorboard": False, "schedule": "linear",
        },
    )  # fmt: skip


@pytest.fixture(scope="module")
def runs(kept: pa.Table, tmp_path_factory: pytest.TempPathFactory) -> dict[str, RankingRun]:
    """Of the rows that were kept, with the rate and without."""
    directory = tmp_path_factory.mktemp("kept")
    found = {}
    for name, data in (("with", {"negative_rate": RATE}), ("without", {})):
        jagged.train(config(directory / name, **data), kept, progress=False)
        found[name] = RankingRun.open(directory / name)
    return found


def evaluated(run: RankingRun, table: pa.Table, **options: Any) -> RankingEvaluation:
    found = jagged.evaluate(run.directory, table, progress=False, **options)
    assert isinstance(found, RankingEvaluation)
    return found


def test_predictions_are_the_rates_of_the_whole_table(runs: dict[str, RankingRun], impressions: pa.Table) -> None:
    found = {name: evaluated(run, impressions).metrics for name, run in runs.items()}
    for task in ("click", "buy"):
        assert found["with"][task]["calibration"] == pytest.approx(1, abs=0.12), task
        assert found["without"][task]["calibration"] > 3, task
        assert found["with"][task]["ne"] < 1 < found["without"][task]["ne"], task
    p, q = (jagged.predict(run.directory, impressions, progress=False)["predicted_click"].to_numpy() for run in runs.values())
    assert p.mean() == pytest.approx(pc.mean(impressions["click"]).as_py(), rel=0.12)
    # What was left out moves log-odds by what the rate says.
    moved = np.log(q / (1 - q)) - np.log(p / (1 - p))
    assert moved.mean() == pytest.approx(-np.log(RATE), abs=0.15)
    assert moved.std() < 0.4


def test_figures_of_the_rows_that_were_kept_are_those_of_the_whole_table(
    runs: dict[str, RankingRun], impressions: pa.Table, kept: pa.Table
) -> None:
    run = runs["with"]
    test, thinned = (table.filter(pc.equal(table["split"], "test")) for table in (impressions, kept))
    whole, own = evaluated(run, test).metrics, jagged.evaluate(run.directory, progress=False).metrics
    for task in ("click", "buy"):
        for name in ("logloss", "ne", "calibration"):
            assert own[task][name] == pytest.approx(whole[task][name], rel=0.08), (task, name)
        assert own[task]["auc"] == pytest.approx(whole[task]["auc"], abs=0.02)
        assert own[task]["ne_of_training"] == pytest.approx(whole[task]["ne_of_training"], rel=0.08)
        # Of negatives that count once they would be far off.
        assert evaluated(run, thinned).metrics[task]["logloss"] > 1.5 * whole[task]["logloss"]
    again = evaluated(run, thinned, negative_rate=RATE).metrics
    assert all(again[group].to_json() == pytest.approx(own[group].to_json()) for group in ("all", "click", "buy"))
    train = impressions.filter(pc.equal(impressions["split"], "train"))
    means = run.model.config["label_means"]
    assert means["click"] == pytest.approx(pc.mean(train["click"]).as_py(), rel=0.03)
    assert means["buy"] == pytest.approx(pc.mean(train["buy"]).as_py(), rel=0.03)
    # So are those that training told, and the page's.
    assert run.opened.metrics["test"]["click"] == own.click.to_json()
    facts = gather_ranking(run.directory, progress=False)
    assert facts.metrics.click["ne"] == own.click["ne"]
    assert sum(one.weight for one in facts.calibration["click"]) == pytest.approx(len(test), rel=0.05)


def test_a_run_goes_on_with_a_table_of_another_rate(runs: dict[str, RankingRun], impressions: pa.Table, tmp_path: Path) -> None:
    """The rate is the table's: logits are those of all rows in both."""
    test = impressions.filter(pc.equal(impressions["split"], "test"))
    options = {"from_run": str(runs["with"].directory), "device": "cpu", "split": "column"}
    training = {"max_epochs": 1, "batch_size": 64, "learning_rate": 1e-4, "tensorboard": False}
    jagged.train(RankingConfig(**options, training=training, output=str(tmp_path / "run")), impressions, progress=False)
    run = RankingRun.open(tmp_path / "run")
    assert run.config.data.negative_rate is None
    assert run.model.negative_rate == 1
    assert evaluated(run, test).metrics.click["calibration"] == pytest.approx(1, abs=0.12)


def refused(error: type[Exception], **options: Any) -> list[str]:
    with pytest.raises(error) as found:
        RankingConfig(**options)
    return str(found.value).splitlines()


def test_options_without_probabilities_are_refused(runs: dict[str, RankingRun], kept: pa.Table, tmp_path: Path) -> None:
    rate = {"label": "click", "negative_rate": RATE}
    assert refused(ConfigError, data=rate, model={"name": "ranking", "loss": "pairwise"}) == [
        "data.negative_rate: got 0.2, expected none beside model.loss pairwise, whose scores are no probabilities"
    ]
    assert refused(ConfigError, data=rate, model={"name": "ranking", "implied": True}) == [
        "data.negative_rate: got 0.2, expected none beside model.implied, which makes positives of rows with the label 0"
    ]
    assert refused(ConfigError, data={"negatives": 3, "negative_rate": RATE}) == [
        "data.negative_rate: got 0.2, expected none beside data.negatives: it is for tables with labels"
    ]
    assert refused(ConfigError, data={**rate, "negative_rate": 0.0}) == [
        "data.negative_rate: got 0.0, expected a number, above 0 and at most 1, or none"
    ]
    assert RankingConfig(data={"negatives": 3, "negative_rate": 1.0}).data.negative_rate == 1
    values = config(tmp_path / "run", negative_rate=RATE).model_dump()
    with pytest.raises(TrainingError) as error:
        jagged.train(RankingConfig(**{**values, "model": {**values["model"], "conditional": []}}), kept, progress=False)
    assert str(error.value) == (
        "model: negative_rate: got 0.2 with the tasks click, buy, expected one that all others are conditional on, whose label "
        "says which rows were left out; name one task, or say by conditional what depends on it"
    )
    outside = "negative_rate: got 2.0, expected a number above 0 and at most 1; None where all rows were kept"
    for given, told in (
        ({}, "negative_rate: got 0.2 without data, expected none; the run knows that of its own rows"),
        ({"data": kept, "negative_rate": 2.0}, outside),
    ):
        with pytest.raises(ConfigError) as error:
            jagged.evaluate(runs["with"].directory, **{"negative_rate": RATE, "progress": False, **given})
        assert str(error.value) == told
