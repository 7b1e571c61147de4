"""Runs with side features of items and events: what they gain, what a run's directory has of them, and what is refused."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

import jagged
import jagged.models
from jagged.artifacts import CheckpointError, read_tensors, save_tensors, write_manifest
from jagged.config import SECTIONS, ConfigError, ModelOptions, TrainConfig, option
from jagged.data import DataError, SequenceDataset, read_events
from jagged.models import SASRec, register
from jagged.models.pretrained import from_pretrained
from jagged.runs import Run
from jagged.runs.recommending import Recommender
from jagged.runs.training import train
from jagged.training import TrainingError, TrainingInterrupted
from tests.training.support import at_step, cut_off, kill_self, outcome, tiny_config

GENRES, ITEMS, USERS = 10, 200, 240


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Events whose genres follow one another, of items that are drawn within a genre, and a table of the items."""
    root, rng = tmp_path_factory.mktemp("shop"), np.random.default_rng(0)
    events = ["user_id,item_id,timestamp"]
    for user in range(USERS):
        genre = int(rng.integers(GENRES))
        for time in range(int(rng.integers(5, 12))):
            genre = (genre + 1) % GENRES
            events.append(f"u{user},i{genre + GENRES * int(rng.integers(ITEMS // GENRES))},{1_600_000_000 + 60 * time}")
    (root / "events.csv").write_text("\n".join(events))
    items = [f"i{item},{item % GENRES}|{(item % GENRES) // 2 + 100},{item % 3 + 0.5}" for item in range(ITEMS)]
    (root / "items.csv").write_text("\n".join(["item_id,genres,price", *items]))
    return root


@pytest.fixture(scope="module")
def events(shop: Path) -> SequenceDataset:
    return read_events(shop / "events.csv", progress=False)


def config(shop: Path, output: Path, **options: Any) -> TrainConfig:
    fast = {"embedding_dim": 16, "learning_rate": 5e-3, "batch_size": 32, "dropout": 0.0, "max_epochs": 6}
    return tiny_config(output, **{**fast, "items": str(shop / "items.csv"), **options})


@pytest.fixture(scope="module")
def trained(shop: Path, events: SequenceDataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(config(shop, tmp_path_factory.mktemp("run")), events, progress=False).directory


def test_features_tell_what_rare_items_do_not(shop: Path, events: SequenceDataset, trained: Path, tmp_path: Path) -> None:
    """Each item is in few events, its genre in many."""
    without = train(config(shop, tmp_path, items=None), events, progress=False)
    reached = [from_pretrained(run).metrics["test"]["all_items"]["ndcg@10"] for run in (trained, without.directory)]
    # Of 20 items of the next genre ten at most can be among the first ten.
    assert reached[0] > 2 * reached[1]
    assert reached[0] > 0.1


def test_a_run_stands_alone(shop: Path, trained: Path, tmp_path: Path) -> None:
    opened = from_pretrained(trained)
    features: Any = opened.model.item_features
    assert features.config["ids"]["genres"] == [15, 11, 20]
    assert json.loads((trained / "split.json").read_text())["notes"]["item_features"] == ["genres (15 values)", "price"]
    stored = opened.metrics["test"]["all_items"]["ndcg@10"]
    assert jagged.evaluate(trained, device="cpu", progress=False).metrics["all_items"]["ndcg@10"] == stored
    # The same histories of ids, at any time: what items have is the model's.
    found = Recommender.from_pretrained(trained).recommend({"new": ["i3", "i14", "i25"]}, k=20)
    genres = [int(item[1:]) % GENRES for item in found["item_id"].to_pylist()]
    assert sum(genre == 6 for genre in genres) > 10


def test_a_run_goes_on_without_the_table(
    shop: Path, events: SequenceDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = tmp_path / "items.csv"
    moved.write_bytes((shop / "items.csv").read_bytes())
    train(config(tmp_path, tmp_path / "whole", max_epochs=2), events, progress=False)
    with monkeypatch.context() as patch:
        at_step(patch, 7, kill_self(signal.SIGTERM))
        with pytest.raises(TrainingInterrupted):
            train(config(tmp_path, tmp_path / "stopped", max_epochs=2), events, progress=False)
    moved.unlink()
    train(resume=tmp_path / "stopped", progress=False)
    assert outcome(tmp_path / "stopped") == outcome(tmp_path / "whole")
    tensors = next((tmp_path / "stopped" / "item_table").glob("*.safetensors"))
    tensors.write_bytes(tensors.read_bytes()[:-1] + b"?")
    with pytest.raises(DataError, match=f"^{re.escape(str(tensors))}"):
        train(resume=tmp_path / "stopped", progress=False)


def test_a_run_that_ends_before_its_first_checkpoint_reads_the_table_anew(
    shop: Path, events: SequenceDataset, tmp_path: Path
) -> None:
    cut_off(2, lambda: train(config(shop, tmp_path / "run", checkpoint_seconds=1e6), events, progress=False))
    other = tmp_path / "other.csv"
    other.write_text("\n".join(line.rsplit(",", 1)[0] for line in (shop / "items.csv").read_text().splitlines()))
    train(config(shop, tmp_path / "run", items=str(other), max_epochs=1), events, resume=True, progress=False)
    features: Any = from_pretrained(tmp_path / "run").model.item_features
    assert features.config["numbers"] == []


def test_two_processes_learn_the_same(shop: Path, tmp_path: Path) -> None:
    """A run in two processes, from the command line, whose table of items every process reads."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "jagged", "train"]
    options = {
        "data.path": shop / "events.csv", "data.items": shop / "items.csv", "output": tmp_path / "two", "device": "cpu",
        "model.embedding_dim": 16, "model.num_layers": 1, "model.dropout": 0.0, "training.batch_size": 16,
        "training.max_epochs": 2, "training.tensorboard": "false",
    }  # fmt: skip
    done = subprocess.run(
        [*command, *(f"--{name}={value}" for name, value in options.items())], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "side features of items: genres (15 values), price" in done.stdout
    weights = from_pretrained(tmp_path / "two").model.item_features.state_dict()
    assert all(bool(weights[name].any()) for name in ("embeddings.0.weight", "projection.weight", "set_of_item_0"))


def test_damaged_sets_are_refused(trained: Path, tmp_path: Path) -> None:
    """Whoever writes a manifest that fits has no kernel read from elsewhere."""
    copied = tmp_path / "run"
    copied.mkdir()
    for file in trained.iterdir():
        if file.is_file() and file.name != "manifest.json":
            (copied / file.name).write_bytes(file.read_bytes())
    tensors = read_tensors(copied / "model.safetensors")
    tensors["item_features.values_0"][0] = 15
    save_tensors(copied / "model.safetensors", tensors)
    write_manifest(copied, [file.name for file in copied.iterdir()])
    with pytest.raises(CheckpointError) as error:
        from_pretrained(copied)
    assert str(error.value) == (
        f"{copied}/model.safetensors: found values_0 out of range, expected those of a table of items; copy the directory again"
    )


class PlainOptions(ModelOptions):
    name: Literal["plain"] = option("plain", "the model to train")


class Plain(SASRec):
    def __init__(self, num_items: int, max_seq_len: int, device: torch.device | str | None = None) -> None:
        super().__init__(num_items, max_seq_len=max_seq_len, embedding_dim=8, device=device)


def test_what_is_refused(shop: Path, events: SequenceDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Known here alone.
    monkeypatch.setitem(SECTIONS, "model", [*SECTIONS["model"]])
    monkeypatch.setattr(jagged.models, "_MODELS", dict(jagged.models._MODELS))
    register("plain", Plain, PlainOptions)
    with pytest.raises(TrainingError) as error:
        train(tiny_config(tmp_path, model={"name": "plain"}, items=str(shop / "items.csv")), events, progress=False)
    assert str(error.value) == "data.items: plain takes no side features of items; leave it out, or take model=sasrec"
    with pytest.raises(ConfigError) as error_of_config:
        TrainConfig(data={"item_columns": ["genres"]})
    message = "data.item_columns: got 'genres' and no items, expected the table that has them"
    assert str(error_of_config.value) == message
    with pytest.raises(DataError, match="the feature 'colour', expected one of"):
        train(config(shop, tmp_path / "b", item_columns=["colour"]), events, progress=False)


@pytest.fixture(scope="module")
def actions(shop: Path) -> Path:
    """Events of which the genre of the next depends on what was done: after a purchase it is another one."""
    rng = np.random.default_rng(1)
    lines = ["user_id,item_id,timestamp,action"]
    for user in range(USERS):
        genre = int(rng.integers(GENRES))
        for time in range(int(rng.integers(5, 12))):
            action = ("buy", "view", "")[int(rng.integers(3))]
            # Ten items a genre, so that all of one can be among the best ten.
            lines.append(f"u{user},i{genre + GENRES * int(rng.integers(10))},{1_600_000_000 + 60 * time},{action}")
            genre = (genre + 5) % GENRES if action == "buy" else genre
    (shop / "actions.csv").write_text("\n".join(lines))
    return shop / "actions.csv"


def with_actions(shop: Path, actions: Path, output: Path, **options: Any) -> TrainConfig:
    more = {"path": str(actions), "event_columns": ["action"], "max_epochs": 50, "patience": 50, **options}
    return config(shop, output, **more)


@pytest.mark.parametrize("name", ["sasrec", "hstu"])
def test_what_was_done_tells_what_comes(shop: Path, actions: Path, tmp_path: Path, name: str) -> None:
    """From the table to figures and recommendations; a run without the column is far behind."""
    model = {"name": name, "embedding_dim": 16, "num_layers": 1, "dropout": 0.0}
    runs = [
        train(with_actions(shop, actions, tmp_path / str(place), event_columns=columns, model=model), progress=False).directory
        for place, columns in enumerate((["action"], []))
    ]
    opened = [from_pretrained(run) for run in runs]
    reached = [of.metrics["test"]["all_items"]["ndcg@10"] for of in opened]
    assert reached[0] > 1.1 * reached[1], reached
    assert opened[0].model.config["event_features"] == {"action": 4}
    assert set(opened[0].event_values["action"].ids.to_pylist()) == {"buy", "view"}
    for data in (None, actions):
        found = jagged.evaluate(runs[0], data, device="cpu", progress=False).metrics["all_items"]["ndcg@10"]
        assert found == pytest.approx(reached[0], abs=1e-9)
    # One history, with a purchase at its end and without, and an action that training has not seen.
    best = {}
    for action in ("buy", "view", "gift"):
        (tmp_path / "new.csv").write_text(f"user_id,item_id,timestamp,action\nnew,i3,1,view\nnew,i13,2,{action}\n")
        items = Recommender.from_pretrained(runs[0]).recommend(tmp_path / "new.csv", k=10)["item_id"].to_pylist()
        best[action] = sum(int(item[1:]) % GENRES == 8 for item in items)
    assert best["buy"] > best["view"]
    opened_run = Run.open(runs[0], device="cpu")
    values = opened_run.event_values["action"].ids.to_pylist()
    table = read_events(tmp_path / "new.csv", event_columns="action", progress=False)
    assert table.feature_values("action").ids.to_pylist() == ["view", "gift"]
    # Missing, view, and what training has not seen.
    assert opened_run.feature_rows(table)["action"].tolist() == [0, 2 + values.index("view"), 1]
    Recommender.from_pretrained(runs[0]).save_pretrained(tmp_path / "served")
    again = Recommender.from_pretrained(tmp_path / "served").recommend(tmp_path / "new.csv", k=10)["item_id"].to_pylist()
    assert again == items


def test_events_without_the_column_are_refused(shop: Path, actions: Path, events: SequenceDataset, tmp_path: Path) -> None:
    run = train(with_actions(shop, actions, tmp_path / "run", max_epochs=1), progress=False).directory
    with pytest.raises(ConfigError) as error:
        Recommender.from_pretrained(run).recommend({"new": ["i3"]})
    assert str(error.value) == (
        "users: histories without action, but the model takes them; pass events with them: a table, a dataset, or ids of users "
        "that the model was trained on"
    )
    with pytest.raises(ConfigError) as error:
        jagged.evaluate(run, events, device="cpu", progress=False)
    assert str(error.value) == (
        f"{run}: the model takes the side feature 'action' of events, and these have none; read a table with this column"
    )
    with pytest.raises(DataError, match="expected a column 'action'"):
        jagged.evaluate(run, shop / "events.csv", device="cpu", progress=False)
    other = tmp_path / "other.csv"
    other.write_text(actions.read_text().replace("buy", "kauf").replace("view", "blick"))
    with pytest.raises(ConfigError) as error:
        jagged.evaluate(run, other, device="cpu", progress=False)
    assert str(error.value).startswith(f"{run}: the model knows none of the values [")
    assert str(error.value).endswith("; give them in the form of its training")
    (run / "values-0.arrow").unlink()
    with pytest.raises(CheckpointError, match=re.escape("values-0.arrow")):
        from_pretrained(run)
    model = {"name": "bert4rec", "embedding_dim": 8, "num_layers": 1}
    with pytest.raises(TrainingError) as error_of_model:
        train(with_actions(shop, actions, tmp_path / "other", model=model), progress=False)
    assert str(error_of_model.value) == (
        "data.event_columns: bert4rec takes no side features of events; leave it out, or take model=sasrec"
    )


def test_a_run_with_events_goes_on(shop: Path, actions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(with_actions(shop, actions, tmp_path / "whole", max_epochs=2), progress=False)
    with monkeypatch.context() as patch:
        at_step(patch, 7, kill_self(signal.SIGTERM))
        with pytest.raises(TrainingInterrupted):
            train(with_actions(shop, actions, tmp_path / "stopped", max_epochs=2), progress=False)
    train(resume=tmp_path / "stopped", progress=False)
    assert outcome(tmp_path / "stopped") == outcome(tmp_path / "whole")
    with pytest.raises(DataError, match="found another dataset"):
        train(with_actions(shop, actions, tmp_path / "stopped", max_epochs=3, event_columns=[]), resume=True, progress=False)
