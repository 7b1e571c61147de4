"""Readers of volumes: SASRec on a sample whose best attainable NDCG@10 is known."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import csv

from jagged.artifacts import writing
from jagged.config import ConfigError, TrainConfig
from jagged.data import SequenceDataset, synthetic_sessions
from jagged.demo.written import Written
from jagged.metrics import ALL_ITEMS
from jagged.runs.recommending import recommend
from jagged.runs.reporting import gather, write_page, write_pictures
from jagged.runs.training import train

METRIC = "ndcg@10"
# What counts as clearly better than popularity, and as near the attainable.
TIMES_POPULARITY, SHARE_OF_ATTAINABLE = 3.0, 0.9

# Enough users that the sample determines a good ranking: with a third of them the model learns their chance events by heart.
_NUM_USERS, _NUM_ITEMS = 9000, 240
_OPTIONS: dict[str, Any] = {
    "precision": "32-true",
    "data.max_seq_len": 50,
    "model": {"embedding_dim": 64, "num_heads": 2, "num_layers": 1, "dropout": 0.1},
    "training": {"batch_size": 128, "learning_rate": 3e-3, "max_epochs": 12},
}


@dataclass(frozen=True)
class SequenceResult(Written):
    """What was reached: NDCG@10 on the test part, seen items left in.

    Attributes:
        attainable, reached, popularity: the best there is in expectation, the model's, and that of ranking by popularity.
    """

    attainable: float
    reached: float
    popularity: float

    @property
    def ok(self) -> bool:
        """Whether the model clearly beats popularity and comes near the attainable."""
        return self.reached >= TIMES_POPULARITY * self.popularity and self.reached >= SHARE_OF_ATTAINABLE * self.attainable

    def __str__(self) -> str:
        share = self.reached / self.attainable
        verdict = "clearly better than popularity and near the attainable" if self.ok else "NOT GOOD ENOUGH"
        return "\n".join(
            [
                f"{METRIC} on the test part (leave-one-out, all items ranked, seen items left in)",
                f"  best attainable  {self.attainable:.4f}",
                f"  reached          {self.reached:.4f}  {share:.0%} of the attainable: {verdict}",
                f"  popularity       {self.popularity:.4f}",
                f"  trained in {self.training_seconds:.0f} s",
            ]
        )


def show(directory: Path, seed: int) -> SequenceResult:
    """Generate the sample, write it as a csv file, train on that, evaluate, recommend, and print how it went.

    Raises:
        ConfigError: the directory cannot be made or written.
    """
    sample, attainable = synthetic_sessions(seed, num_users=_NUM_USERS, num_items=_NUM_ITEMS)
    with writing(directory, "choose another output", ConfigError):
        directory.mkdir(parents=True, exist_ok=True)
        events = _write_events(sample, directory / "events.csv")
    print(
        f"Sample: {sample.num_events:,} events of {sample.num_users:,} readers of {sample.num_items} volumes, in {events}.\n"
        "Readers go on with one of the two series they read last, or jump to a popular volume. So the best ranking is known:\n"
        f"{METRIC} {attainable.ndcg10:.4f} on the held-out last events.\n",
        flush=True,
    )
    run = train(TrainConfig.load(None, {**_OPTIONS, "data": str(events), "output": str(directory / "run"), "seed": seed}))
    facts = gather(run.directory)
    figures = facts.metrics[ALL_ITEMS]
    result = SequenceResult(
        attainable=attainable.ndcg10,
        reached=figures["model"][METRIC],
        popularity=figures["popularity"][METRIC],
        training_seconds=run.seconds,
        directory=run.directory,
        pictures=(write_page(facts, run.directory / "report.html"), *write_pictures(facts, run.directory)),
    )
    histories = _histories(sample)
    print(f"\n{result}\n\n{_describe(histories, recommend(run.directory, histories, k=5, progress=False))}\n", flush=True)
    return result


def _write_events(sample: SequenceDataset, path: Path) -> Path:
    assert sample.timestamps is not None
    users = sample.users.decode(np.repeat(np.arange(sample.num_users), sample.lengths.numpy()))
    items = sample.items.decode(sample.item_ids.numpy())
    times = pa.array(sample.timestamps.numpy())
    csv.write_csv(pa.table({"user_id": users, "item_id": items, "timestamp": times}), path)
    return path


def _histories(sample: SequenceDataset) -> dict[str, list[str]]:
    """Three users of the sample with middling histories, oldest first."""
    chosen = [user for user in range(sample.num_users) if 6 <= int(sample.lengths[user]) <= 10][:3]
    histories = {}
    for user in chosen:
        items = sample.item_ids[int(sample.offsets[user]) : int(sample.offsets[user + 1])]
        histories[sample.users.decode([user])[0].as_py()] = sample.items.decode(items.numpy()).to_pylist()
    return histories


def _describe(histories: dict[str, list[str]], table: pa.Table) -> str:
    lines = ["What three readers could read next"]
    rows = table.to_pylist()
    for user, items in histories.items():
        best = [f"{row['item_id']} ({row['score']:.1f})" for row in rows if row["user_id"] == user]
        lines += [f"  {user} read ... {', '.join(items[-4:])}", f"    next: {', '.join(best)}"]
    return "\n".join(lines)
