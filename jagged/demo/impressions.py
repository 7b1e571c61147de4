"""Impressions of a shop: the ranking model on a sample whose probabilities of clicks and purchases are known."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from jagged.artifacts import writing
from jagged.config import ConfigError, RankingConfig
from jagged.data import synthetic_impressions
from jagged.data.impressions import TASKS
from jagged.demo.written import Written
from jagged.runs.ranking.predicting import PREDICTED, Ranker
from jagged.runs.ranking.reporting import gather_ranking, write_ranking_pictures
from jagged.runs.ranking.run import RankingRun
from jagged.runs.reporting import write_page
from jagged.runs.training import train

#: How far below the attainable AUC a good model may be. Over seeds it is at most half of that (benchmarks.planted_impressions).
SHORTFALL = 0.01

_SIZES: dict[str, int] = {}
_OPTIONS: dict[str, Any] = {
    "precision": "32-true",
    "data": {"label": ["click", "buy"], "request": "request_id", "candidate": "item_id", "user": "user_id", "max_history": 20},
    "model": {
        "embedding_dim": 48, "cross": "dot", "num_layers": 0, "num_time_buckets": None, "layer_sizes": [32, 16],
        "conditional": ["buy=click"],
    },
    "training": {
        "batch_size": 64, "max_epochs": 3, "learning_rate": 4e-3, "table_learning_rate": 2e-3, "warmup_steps": 100,
        "schedule": "linear", "weight_decay": 0.3, "table_weight_decay": 30.0,
    },
}  # fmt: skip
# Of a click, what an event shows.
_SHOWN = ["user_id", "item_id", "timestamp", "category"]


@dataclass(frozen=True)
class ImpressionResult(Written):
    """What was reached on the test part, by task: "auc", "gauc" (of users) and "logloss".

    Attributes:
        attainable, reached: the best there is in expectation, and the model's.
    """

    attainable: dict[str, dict[str, float]]
    reached: dict[str, dict[str, float]]

    @property
    def ok(self) -> bool:
        """Whether each task's AUC comes near the attainable."""
        return all(self.reached[task]["auc"] >= self.attainable[task]["auc"] - SHORTFALL for task in self.attainable)

    def __str__(self) -> str:
        lines = [f"{'on the test part (split by time)':<34}{'auc':>9}{'gauc':>9}{'logloss':>9}"]
        for task, best in self.attainable.items():
            for name, figures in (("best attainable", best), ("reached", self.reached[task])):
                told = "".join(f"{figures[key]:>9.4f}" for key in ("auc", "gauc", "logloss"))
                lines.append(f"  {f'{task}, {name}':<32}{told}")
        verdict = "near the attainable" if self.ok else "NOT GOOD ENOUGH"
        return "\n".join([*lines, f"  {verdict}; trained in {self.training_seconds:.0f} s"])


def show(directory: Path, seed: int) -> ImpressionResult:
    """Generate the sample, write it as csv files, train on these, evaluate, rank candidates, and print how it went.

    Raises:
        ConfigError: the directory cannot be made or written.
    """
    table, truth = synthetic_impressions(seed, **_SIZES)
    with writing(directory, "choose another output", ConfigError):
        directory.mkdir(parents=True, exist_ok=True)
        csv.write_csv(table, directory / "impressions.csv")
        csv.write_csv(table.filter(pc.equal(table["click"], 1)).select(_SHOWN), directory / "clicks.csv")
    print(
        f"Sample: {len(table):,} impressions of {len(pc.unique(table['item_id']))} items to "
        f"{len(pc.unique(table['user_id']))} users, in {directory / 'impressions.csv'}, and what they clicked, in clicks.csv.\n"
        "Who has clicked a category clicks it again, and price, page and age group matter. So each probability is known, and "
        "with these the best figures.\n",
        flush=True,
    )
    data = {**_OPTIONS["data"], "path": str(directory / "impressions.csv"), "events": str(directory / "clicks.csv")}
    run = train(RankingConfig(**{**_OPTIONS, "data": data, "output": str(directory / "run"), "seed": seed}))
    opened = RankingRun.open(run.directory)
    facts = gather_ranking(run.directory)
    rows, probabilities = _predicted(opened)
    result = ImpressionResult(
        attainable={task: truth.figures(task, rows) for task in TASKS},
        reached={task: truth.figures(task, rows, probabilities=probabilities[task]) for task in TASKS},
        training_seconds=run.seconds,
        directory=run.directory,
        pictures=(write_page(facts, run.directory / "report.html"), *write_ranking_pictures(facts, run.directory)),
    )
    print(f"\n{result}\n\n{_describe(table, opened)}\n", flush=True)
    return result


def _predicted(run: RankingRun) -> tuple[Any, dict[str, Any]]:
    """Rows of the table in the test part, and by task what is predicted of them."""
    part = run.part("test")
    rows: list[Any] = []
    found: dict[str, list[Any]] = {task: [] for task in TASKS}
    for batch, predictions in run.scores(part, progress=False):
        rows.append(part.dataset.source[batch.rows.cpu().numpy()])
        for task in TASKS:
            found[task].append(predictions[task].double().cpu().numpy())
    return np.concatenate(rows), {task: np.concatenate(of) for task, of in found.items()}


def _describe(table: pa.Table, run: RankingRun) -> str:
    """What three users of the test part would be shown, the best of all items."""
    part = run.part("test")
    of_rows = table.take(pa.array(np.sort(part.dataset.source[part.rows])))
    users = of_rows["user_id"].to_pylist()
    places = [users.index(user) for user in list(dict.fromkeys(users))[:3]]
    own = [one.name for one in run.schema.columns if one.is_candidates]
    requests = of_rows.take(pa.array(places)).drop_columns(own)
    ranked = Ranker.from_pretrained(run.directory).recommend(requests, k=3, progress=False).to_pylist()
    names = dict(zip(table["item_id"].to_pylist(), table["category"].to_pylist(), strict=True))
    lines = ["What three users would be shown"]
    for number, request in enumerate(requests.to_pylist()):
        best = [row for row in ranked if row["request"] == number]
        shown = [f"{names[row['item_id']]} {row['item_id']} ({row[f'{PREDICTED}click']:.0%} click)" for row in best]
        lines.append(f"  user {request['user_id']} on the {request['page']} page, {request['device']}: {', '.join(shown)}")
    return "\n".join(lines)
