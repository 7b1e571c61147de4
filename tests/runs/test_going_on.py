"""A run that begins with what a finished one has learnt: new rows, grown vocabularies, the same weights and statistics."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch

import jagged
from jagged.config import ConfigError, RankingConfig, TrainConfig
from jagged.data import DataError, Dataset, Part, Schema
from jagged.data.encoding import Encoders
from jagged.data.schema import Column, Kind
from jagged.data.vocabulary import UNSEEN
from jagged.models import RequestModel
from jagged.modules.trained_tables import TrainedTables
from jagged.runs.ranking import RankingRun
from jagged.runs.ranking.going_on import START
from jagged.runs.ranking.reporting import gather_ranking
from jagged.runs.summary import summary_lines
from jagged.training import Callback, Progress, TrainingError, TrainingInterrupted
from tests.models import shops
from tests.runs.test_ranking_runs import SMALL, config, table
from tests.training.support import at_step, kill_self, outcome, tiny_config, tiny_dataset

#: Ids of the first table, and what they are called in the later one.
RENAMED = {"i1": "j1", "i2": "j2", "u0": "v0", "t2": "t9", "n1": "m1", "w3": "x3", "g2": "h2"}


def newer(seed: int = 1, requests: int = 50) -> pa.Table:
    """Later rows, of which some users, items and words are new."""

    def renamed(value: Any) -> Any:
        return [renamed(one) for one in value] if isinstance(value, list) else RENAMED.get(value, value)

    found = table(seed, requests).to_pydict()
    found = {name: [renamed(of) if not isinstance(of, float) else of for of in values] for name, values in found.items()}
    found["time"] = [time + 10_000_000 for time in found["time"]]
    found["age"] = [None if age is None else 10 * age for age in found["age"]]
    schema = table().schema
    return pa.table({name: pa.array(values, schema.field(name).type) for name, values in found.items()})


class Begun(Callback):
    """Keeps the weights that a run begins with."""

    model: RequestModel

    def on_start(self, progress: Progress) -> None:
        self.weights = {name: of.detach().clone() for name, of in progress.task.state_dict().items()}
        tables = (module for module in progress.task.modules() if isinstance(module, TrainedTables))
        self.is_cached = any(module.is_cached for module in tables)


def begun(
    run: RankingRun, output: Path, rows: Any = None, *, cached: bool = False, **options: Any
) -> tuple[RankingRun, dict[str, torch.Tensor]]:
    """A run from another one, and the weights before its first step; `cached` where tables are then."""
    values = {**{name: of for name, of in SMALL.items() if name != "model"}, "from_run": str(run.directory), **options}
    watched = Begun()
    jagged.train(
        RankingConfig(**values, output=str(output)), newer() if rows is None else rows, callbacks=[watched], progress=False
    )
    assert watched.is_cached == cached
    return RankingRun.open(output), watched.weights


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> RankingRun:
    """A run on a table of all kinds of columns, of which one is hashed."""
    directory = tmp_path_factory.mktemp("shop")
    chosen = config(directory)
    columns = {**shops.COLUMNS, "tags": Column("tags", Kind.IDS, encoding="hash", size=200, of="request")}
    Schema(tuple(columns.values())).save(directory / "schema.toml")
    chosen = RankingConfig(**{**chosen.model_dump(), "model": {**SMALL["model"], "conditional": ["buy=click"]}, "seed": 5})
    jagged.train(chosen, table(), progress=False)
    return RankingRun.open(directory / "run")


@pytest.fixture(scope="module")
def second(first: RankingRun, tmp_path_factory: pytest.TempPathFactory) -> tuple[RankingRun, dict[str, torch.Tensor]]:
    return begun(first, tmp_path_factory.mktemp("later") / "run")


def check_begun(before: RankingRun, after: RankingRun, weights: dict[str, torch.Tensor]) -> int:
    """Compare what a run began with with the run before; returns how many rows are new."""
    rows = 0
    for name, old in before.model.state_dict().items():
        new = weights[name]
        assert torch.equal(new[: len(old)] if old.dim() else new, old), name
        if new.shape != old.shape:
            assert torch.equal(new[len(old) :], old[UNSEEN].expand(len(new) - len(old), -1)), name
            rows += len(new) - len(old)
    for name, encoder in before.encoders.items():
        grown = after.encoders[name]
        assert grown.seed == encoder.seed
        if encoder.ids is not None:
            assert grown.ids.ids[: len(encoder.ids)].equals(encoder.ids.ids)
        assert (grown.counts[: encoder.size] >= encoder.counts).all()
    assert after.encoders.statistics == before.encoders.statistics
    return rows


def test_old_ids_keep_their_rows_and_new_ones_begin_as_nobody(
    first: RankingRun, second: tuple[RankingRun, dict[str, torch.Tensor]]
) -> None:
    run, weights = second
    new = {name: run.encoders[name].size - of.size for name, of in first.encoders.items()}
    assert check_begun(first, run, weights) == sum(new.values())
    assert set(run.encoders["item"].ids.ids[-2:].to_pylist()) == {"j1", "j2"}
    assert new["item"] == 2
    assert new["tags"] == 0
    assert run.model.config["sizes"]["item"] == first.model.config["sizes"]["item"] + 2
    # It has learnt since, and its means of labels are its own training's.
    assert any(not torch.equal(value, weights[name]) for name, value in run.model.state_dict().items())
    assert run.model.config["label_means"] != first.model.config["label_means"]
    # Options that were not given are the other run's, also in what is written down.
    assert run.config.model == first.config.model
    assert run.config.data.event_labels == ("click",)
    assert run.config.from_run == str(first.directory)
    assert run.config.seed == 0


def test_rows_without_new_ids_are_predicted_at_the_start_as_before(
    first: RankingRun, second: tuple[RankingRun, dict[str, torch.Tensor]]
) -> None:
    run, weights = second
    model = type(run.model)(**run.model.config)
    model.load_state_dict(weights)
    for part in ("train", "test"):
        parts = [Part(first.dataset, encoders=of.encoders, rows=first.part(part).rows) for of in (first, run)]
        batches = [of.gather(range(len(of))) for of in parts]
        expected, found = first.model.predict(batches[0]), model.predict(batches[1])
        assert all(torch.equal(found[task], of) for task, of in expected.items())
    # Whose ids are new is, at the start, as one whom the other run has not seen.
    unseen = Part(run.dataset, encoders=first.encoders, rows=run.part("train").rows).gather(range(8))
    known = run.part("train").gather(range(8))
    assert not torch.equal(unseen.features["item"].values(), known.features["item"].values())
    expected, found = first.model.predict(unseen), model.predict(known)
    assert all(torch.equal(found[task], of) for task, of in expected.items())


def test_a_chain_of_runs_keeps_all_that_was_known(
    first: RankingRun, second: tuple[RankingRun, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    run, _ = second
    rows = newer(2)
    items = ["k9" if item == "j1" else item for item in rows["item"].to_pylist()]
    rows = rows.set_column(rows.column_names.index("item"), "item", pa.array(items))
    third, weights = begun(run, tmp_path / "third", rows, data={"min_count": 2}, model={"dropout": 0.1, "loss": "focal"})
    check_begun(run, third, weights)
    ids = third.encoders["item"].ids.ids.to_pylist()
    assert ids[: len(run.encoders["item"].ids)] == run.encoders["item"].ids.ids.to_pylist()
    assert ids[-1] == "k9"
    # What may be another option is.
    assert third.model.config["loss"] == {"click": "focal", "buy": "focal"}
    assert third.config.model.dropout == 0.1
    assert third.config.model.layer_sizes == first.config.model.layer_sizes
    # Its page makes its split again, without the others.
    facts = gather_ranking(third.directory, progress=False)
    assert {name: facts.leaks.counts[name] for name in ("unsupported_ids", "unsupported_statistics")} == {
        "unsupported_ids": 0, "unsupported_statistics": 0
    }  # fmt: skip
    counts = third.opened.split["counts"]
    assert counts["ids of item that are new"] == third.encoders["item"].size - run.encoders["item"].size
    began = next(line for line in summary_lines(third.directory) if line.startswith("began"))
    assert began.startswith(f"began    with {run.directory}; new ids: ")
    assert "1 of item" in began
    assert third.predict(third.read(rows.drop_columns(["click", "buy", "weight"]), labels=False, progress=False)).keys() == {
        "click", "buy"
    }  # fmt: skip


def test_a_run_that_was_stopped_goes_on_without_the_other(
    first: RankingRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(first.directory, copy)
    pa.parquet.write_table(newer(), tmp_path / "rows.parquet")
    values = {**{name: of for name, of in SMALL.items() if name != "model"}, "from_run": str(copy)}
    chosen = RankingConfig(**values, output=str(tmp_path / "run"), data={"path": str(tmp_path / "rows.parquet")})
    whole = RankingConfig(**{**chosen.model_dump(exclude_unset=True), "output": str(tmp_path / "whole")})
    jagged.train(whole, progress=False)
    with monkeypatch.context() as patch:
        at_step(patch, 3, kill_self(signal.SIGTERM))
        with pytest.raises(TrainingInterrupted):
            jagged.train(chosen, progress=False)
    # A checkpoint has all that is needed.
    shutil.rmtree(copy)
    jagged.train(resume=tmp_path / "run", progress=False)
    told = [outcome(tmp_path / name) for name in ("run", "whole")]
    assert told[0] == told[1]
    # As does the same configuration with what it says of the model.
    assert jagged.train(chosen, resume=True, progress=False).steps > 3
    with pytest.raises(ConfigError) as error:
        jagged.train(RankingConfig(**{**values, "output": str(tmp_path / "run"), "model": {"embedding_dim": 8}}), resume=True)
    assert str(error.value) == f"model.embedding_dim: got 8, expected 4, as {tmp_path / 'run'} has it; leave it out"


def test_a_run_begins_with_a_directory_without_rows_and_a_dataset(first: RankingRun, tmp_path: Path) -> None:
    """What `save_pretrained` wrote is enough."""
    jagged.Ranker.from_pretrained(first.directory).save_pretrained(tmp_path / "alone")
    rows = Dataset.from_table(newer(), first.schema, history="events", event_labels="click", duplicates="keep", progress=False)
    ranker = jagged.Ranker(from_run=tmp_path / "alone", output=tmp_path / "run", device="cpu", training={"max_epochs": 1})
    ranker.fit(rows)
    run = RankingRun.open(tmp_path / "run")
    assert run.config.model == first.config.model
    assert run.encoders["item"].size == first.encoders["item"].size + 2
    assert Encoders.load(tmp_path / "run" / START).sizes == first.encoders.sizes


def refused(error: type[Exception], rows: Any = None, **options: Any) -> list[str]:
    with pytest.raises(error) as found:
        jagged.train(RankingConfig(**options), rows, progress=False)
    return str(found.value).splitlines()


def test_what_is_no_finished_run_on_a_table_is_refused(first: RankingRun, tmp_path: Path) -> None:
    output = {"output": str(tmp_path / "new"), "device": "cpu"}
    where = tmp_path / "nothing"
    assert refused(ConfigError, newer(), from_run=str(where), **output) == [
        f"from_run: got {where}, expected the directory of a finished run on a table, and there is none; name another one"
    ]
    where.mkdir()
    assert refused(ConfigError, newer(), from_run=str(where), **output) == [
        f"from_run: got {where}, which holds no run, expected one on a table's requests; name another one, or train without it"
    ]
    first.config.save(where / "config.json")
    assert refused(ConfigError, newer(), from_run=str(where), **output) == [
        f"from_run: got {where}, a run that has not ended, expected a finished one; go on with that one by `jagged train "
        f"--resume {where}` first"
    ]
    jagged.train(tiny_config(tmp_path / "events", max_epochs=1), tiny_dataset(), progress=False)
    assert refused(ConfigError, newer(), from_run=str(tmp_path / "events"), **output) == [
        f"from_run: got {tmp_path / 'events'}, a run of sasrec, expected one on a table's requests; name another one, or train "
        "without it"
    ]
    same = str(first.directory)
    assert refused(ConfigError, newer(), from_run=same, output=same) == [
        f"from_run: got {same}, expected another directory than output; name another output"
    ]
    assert not (tmp_path / "new").exists()
    with pytest.raises(ConfigError) as error:
        TrainConfig(from_run=same)
    assert str(error.value) == (
        "from_run: belongs to model.name ranking, dlrm, dcnv2, wukong, mmoe, dlrm-hstu or din, not to sasrec, hstu or bert4rec"
    )


def test_options_that_contradict_the_run_are_refused(first: RankingRun, tmp_path: Path) -> None:
    common = {"from_run": str(first.directory), "output": str(tmp_path / "new"), "device": "cpu"}
    model = {"embedding_dim": 8, "layer_sizes": [16], "conditional": [], "dropout": 0.1, "num_heads": 2}
    data = {"label": "click", "schema_file": "other.toml", "max_history": 20, "min_count": 2, "event_labels": ["click"]}
    ends = f"as {first.directory} has it; leave it out"
    assert refused(ConfigError, newer(), model=model, data=data, **common) == [
        f"model.embedding_dim: got 8, expected 4, {ends}",
        f"model.conditional: got none, expected buy=click, {ends}",
        f"model.layer_sizes: got 16, expected 8, {ends}",
        f"data.schema_file: got other.toml, expected none, as the schema in {first.directory} says what the columns are; leave "
        "it out",
        f"data.label: got click, expected none, {ends}",
        f"data.max_history: got 20, expected 50, {ends}",
    ]
    assert refused(ConfigError, newer(), model="dlrm", **common) == [f"model.name: got dlrm, expected ranking, {ends}"]
    assert refused(ConfigError, **common) == [
        f"data.path: got none, expected a table of new rows beside from_run ({first.directory}); name it"
    ]
    assert not (tmp_path / "new" / "config.json").exists()


def test_a_table_of_other_columns_is_refused(first: RankingRun, tmp_path: Path) -> None:
    def told(rows: Any) -> list[str]:
        common = {"from_run": str(first.directory), "device": "cpu"}
        return refused(DataError, rows, output=str(tmp_path / f"new {len(list(tmp_path.iterdir()))}"), **common)

    rows = newer()
    assert told(rows.drop_columns(["age"])) == [
        f"{first.directory / 'schema.toml'}: found the column 'age', expected those of Table: "
        f"{rows.drop_columns(['age']).column_names}; give a table with the columns that the run was trained on"
    ]
    cure = f"as {first.directory} has it; give a table with the columns that the run was trained on"
    options = {"history": "events", "event_labels": "click", "progress": False}
    columns = [one for one in first.schema.columns if one.name != "price"]
    assert told(Dataset.from_table(rows, Schema(tuple(columns)), **options)) == [
        f"table: 'price': found no column, expected one, as number with of 'candidate', {cure}"
    ]
    columns = [one if one.name != "tags" else Column("tags", Kind.IDS, of="request") for one in first.schema.columns]
    assert told(Dataset.from_table(rows, Schema(tuple(columns)), **options)) == [
        "table: 'tags': found the column as ids with of 'request', expected one, as ids with encoding 'hash', size 200, of "
        f"'request', {cure}"
    ]
    plain = Dataset.from_table(rows, first.schema, duplicates="keep", progress=False)
    assert told(plain)[0].startswith(f"{first.directory / 'model.json'}: found a model that reads candidate_ids ")
    dates = pa.array(np.array(rows["time"].to_numpy(), "datetime64[s]"))
    assert told(rows.set_column(rows.column_names.index("time"), "time", dates)) == [
        f"table: found times of kind 'naive', expected 'number', as {first.directory} was trained on; convert them"
    ]


def test_histories_of_another_table_need_one_again(tmp_path: Path) -> None:
    pa.parquet.write_table(shops.events(), tmp_path / "events.parquet")
    shops.OF_EVENTS.save(tmp_path / "events.toml")
    beside = {"events": str(tmp_path / "events.parquet"), "event_schema_file": str(tmp_path / "events.toml")}
    jagged.train(config(tmp_path, **beside, event_labels=["stars"], event_lists=["topics"]), table(), progress=False)
    run = RankingRun.open(tmp_path / "run")
    common = {"from_run": str(run.directory), "output": str(tmp_path / "new"), "device": "cpu"}
    assert refused(ConfigError, newer(), **common) == [
        f"data.events: got none, expected a table of events, as {run.directory} gathered histories from one; name it"
    ]
    later, weights = begun(run, tmp_path / "later", data={"events": str(tmp_path / "events.parquet")})
    check_begun(run, later, weights)
    assert later.opened.event_schema == run.opened.event_schema
    assert later.opened.split["event_lists"] == ["topics"]


def test_resuming_a_run_of_another_beginning_is_refused(first: RankingRun, tmp_path: Path) -> None:
    other, _ = begun(first, tmp_path / "run", training={**SMALL["training"], "max_epochs": 1})
    shutil.copytree(first.directory, tmp_path / "copy")
    values = {**{name: of for name, of in SMALL.items() if name != "model"}, "from_run": str(tmp_path / "copy")}
    chosen = RankingConfig(**{**values, "training": {**SMALL["training"], "max_epochs": 1}}, output=str(other.directory))
    with pytest.raises(TrainingError) as error:
        jagged.train(chosen, newer(), resume=True, progress=False)
    (checkpoint,) = sorted((other.directory / "checkpoints").glob("step-*"))[-1:]
    assert str(error.value) == (
        f"{checkpoint}: cannot go on with other options: from_run={tmp_path / 'copy'} (was {first.directory}); give those it "
        "had, or choose another output"
    )


def test_a_run_without_a_checkpoint_yet_begins_again(first: RankingRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Any) -> None:
        raise KeyError("power cut")

    pa.parquet.write_table(newer(), tmp_path / "rows.parquet")
    data = {"path": str(tmp_path / "rows.parquet")}
    with monkeypatch.context() as patch:
        at_step(patch, 2, fail)
        with pytest.raises(KeyError, match="power cut"):
            begun(first, tmp_path / "run", str(tmp_path / "rows.parquet"), data=data)
    watched = Begun()
    jagged.train(resume=tmp_path / "run", callbacks=[watched], progress=False)
    check_begun(first, RankingRun.open(tmp_path / "run"), watched.weights)
    begun(first, tmp_path / "whole", data=data)
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


def test_cached_tables_begin_as_whole_ones(first: RankingRun, tmp_path: Path) -> None:
    """They leave the device before the first step; what they hold is the other run's by then."""
    runs = []
    for name, more in (("whole", {}), ("cached", {"table_cache_bytes": 4_000})):
        training = {**SMALL["training"], "table_optimizer": "rowwise-adagrad", "max_epochs": 1, **more}
        run, weights = begun(first, tmp_path / name, cached=name == "cached", training=training)
        check_begun(first, run, weights)
        runs.append(run.model.state_dict())
    assert all(torch.equal(of, runs[1][name]) for name, of in runs[0].items())


def test_items_that_are_drawn_go_on_by_the_models_name(tmp_path: Path) -> None:
    """Of a table without labels; nothing but the other run is named."""

    def rows(seed: int, items: int) -> pa.Table:
        rng = np.random.default_rng(seed)
        users, shown = rng.integers(12, size=200), rng.integers(items, size=200)
        return pa.table({"user": users, "item": [f"i{i}" for i in shown], "time": np.arange(200) + 1000 * seed})

    common = {name: SMALL[name] for name in ("device", "precision", "training", "evaluation")}
    data = {"user": "user", "candidate": "item", "time": "time", "negatives": 3}
    model = {"name": "dlrm", "embedding_dim": 4, "bottom_sizes": [4], "top_sizes": [4]}
    jagged.train(RankingConfig(**common, data=data, model=model, output=str(tmp_path / "first")), rows(0, 15), progress=False)
    first = RankingRun.open(tmp_path / "first")
    run, weights = begun(first, tmp_path / "second", rows(1, 20))
    assert check_begun(first, run, weights) == 5
    assert run.config.model.name == "dlrm"
    assert run.config.data.negatives == 3
    with pytest.raises(ConfigError) as error:
        begun(first, tmp_path / "third", rows(1, 20), model={"name": "dlrm", "top_sizes": [4, 2]})
    assert str(error.value) == f"model.top_sizes: got 4, 2, expected 4, as {first.directory} has it; leave it out"
