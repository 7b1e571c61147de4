"""From a table to a trained ranking model and back: train, predict, recommend, evaluate, report, with every kind of column."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
import torch

import jagged
from jagged.config import ConfigError, RankingConfig, TrainConfig
from jagged.data import DataError, Dataset, Kind, Schema
from jagged.metrics import is_slice_group
from jagged.models.pretrained import load_task
from jagged.runs.ranking import RankingRun
from jagged.runs.ranking.reporting import gather_ranking, render_ranking
from jagged.runs.summary import summary_lines
from jagged.training import CheckpointError, TrainingError
from tests.models import shops

TASKS = ("click", "buy")
#: What a test of a small model needs.
SMALL: dict[str, Any] = {
    "device": "cpu",
    "precision": "32-true",
    "model": {"embedding_dim": 4, "num_heads": 2, "layer_sizes": [8], "cross_layers": 1},
    "training": {"max_epochs": 2, "batch_size": 16, "learning_rate": 0.01, "tensorboard": False},
    "evaluation": {"eval_batch_size": 16},
}


def table(seed: int = 0, requests: int = 60) -> pa.Table:
    """Requests with every kind of column."""
    types = {"age": pa.float64(), "price": pa.float64(), "moods": pa.list_(pa.float64()), "sizes": pa.list_(pa.float64())}
    return pa.table({name: pa.array(values, types.get(name)) for name, values in shops.rows(seed, requests).items()})


def config(directory: Path, **data: Any) -> RankingConfig:
    Schema(tuple(shops.COLUMNS.values())).save(directory / "schema.toml")
    data = {"schema_file": str(directory / "schema.toml"), "duplicates": "keep", "event_labels": ["click"], **data}
    return RankingConfig(**{**SMALL, "output": str(directory / "run"), "data": data})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RankingRun:
    """A run on a table with every kind of column, whose histories are a user's earlier rows."""
    directory = tmp_path_factory.mktemp("shop")
    jagged.train(config(directory), table(), progress=False)
    return RankingRun.open(directory / "run")


@pytest.fixture
def ranker(run: RankingRun) -> jagged.Ranker:
    return jagged.Ranker.from_pretrained(run.directory)


def part_rows(run: RankingRun, name: str) -> tuple[pa.Table, dict[str, np.ndarray]]:
    """The source's rows of a part, in another order than the dataset's, and what the model says of them by its own batches."""
    part = run.part(name)
    places, found = [], {task: [] for task in TASKS}
    for batch, predictions in run.scores(part, progress=False):
        places.append(part.dataset.source[batch.rows.numpy()])
        for task in TASKS:
            found[task].append(predictions[task].numpy())
    order = np.concatenate(places)
    shuffled = np.random.default_rng(0).permutation(len(order))
    expected = {task: np.concatenate(of)[shuffled] for task, of in found.items()}
    return table().take(pa.array(order[shuffled])), expected


def test_rows_are_predicted_as_in_the_run(run: RankingRun, ranker: jagged.Ranker) -> None:
    rows, expected = part_rows(run, "test")
    without = rows.drop_columns(["click", "buy", "weight"])
    for given in (rows, without):
        found = ranker.predict(given, progress=False)
        assert found.column_names == ["user", "item", "time", "predicted_click", "predicted_buy"]
        assert found["user"].to_pylist() == rows["user"].to_pylist()
        assert found["item"].to_pylist() == rows["item"].to_pylist()
        for task in TASKS:
            np.testing.assert_allclose(found[f"predicted_{task}"].to_numpy(), expected[task], atol=1e-6)
    # Users have histories there, and these change what is said.
    assert sum(len(batch.history_times) for batch, _ in run.scores(run.part("test"), progress=False))
    empty = ranker.predict(without, events=_events(run).slice(0, 0), progress=False)
    assert np.abs(empty["predicted_click"].to_numpy() - expected["click"]).max() > 1e-4


def _events(run: RankingRun) -> pa.Table:
    return pa.table(run.dataset)


def test_what_is_saved_says_where_the_model_is_from(run: RankingRun) -> None:
    split = json.loads((run.directory / "split.json").read_text())
    assert split["name"] == "time"
    assert split["rows"] == {name: len(run.part(name).rows) for name in ("train", "valid", "test")}
    assert split["fingerprint"] == run.dataset.fingerprint
    assert set(split["counts"]) >= {"train", "valid", "test", "valid_time", "test_time"}
    assert split["seed"] == 0
    assert split["versions"]["torch"] == torch.__version__
    assert split["hardware"]["cores"]
    # Vocabularies are training's: those of a new fit are the same.
    fresh = run.dataset.split("time", valid=0.1, test=0.1)
    assert {name: of.ids for name, of in run.encoders.items()} == {name: of.ids for name, of in fresh.encoders.items()}
    assert run.encoders.statistics == fresh.encoders.statistics
    assert Schema.load(run.directory / "schema.toml") == run.dataset.schema
    opened = load_task(run.directory)
    assert {name for name, _ in opened.named_parameters()} == {name for name, _ in run.model.named_parameters()}


def test_the_summary_says_what_was_read_reached_and_kept(run: RankingRun) -> None:
    lines = summary_lines(run.directory)
    figures = json.loads((run.directory / "metrics.json").read_text())["test"]["click"]
    rows = run.opened.split["rows"]
    assert lines[0] == f"read     {len(run.dataset):,} rows from the built-in sample"
    assert lines[1] == (
        f"split    by time: {rows['train']:,} for training, {rows['valid']:,} for validation, {rows['test']:,} for the test"
    )
    assert lines[2].startswith(f"reached  test, click: auc {figures['auc']:.4f}, gauc ")
    assert lines[-3:] == [
        f"next     jagged evaluate {run.directory}",
        f"         jagged predict {run.directory} rows.csv --output scores.parquet",
        f"         jagged report {run.directory}",
    ]


def test_ids_that_nobody_has_seen_do_not_stop_a_prediction(run: RankingRun, ranker: jagged.Ranker) -> None:
    rows, expected = part_rows(run, "test")
    strange = rows.set_column(rows.column_names.index("item"), "item", pa.array([f"new{i}" for i in range(len(rows))]))
    strange = strange.set_column(rows.column_names.index("user"), "user", pa.array([None, *["nobody"] * (len(rows) - 1)]))
    found = ranker.predict(strange, progress=False)
    assert found["item"].to_pylist() == [f"new{i}" for i in range(len(rows))]
    assert np.isfinite(found["predicted_click"].to_numpy()).all()
    assert np.abs(found["predicted_click"].to_numpy() - expected["click"]).max() > 1e-4


def test_a_missing_column_is_named(run: RankingRun, ranker: jagged.Ranker) -> None:
    rows = table().drop_columns(["age"])
    with pytest.raises(DataError) as error:
        ranker.predict(rows, progress=False)
    names = rows.column_names
    assert str(error.value).startswith("schema: found the column 'age', expected those of ")
    assert repr(names[0]) in str(error.value)
    with pytest.raises(DataError) as error:
        ranker.predict(table().set_column(3, "time", pa.array([f"2024-01-{1 + i % 28:02}" for i in range(len(table()))])))
    assert "time" in str(error.value)


def test_candidates_are_ranked_by_what_is_predicted_of_them(run: RankingRun, ranker: jagged.Ranker) -> None:
    rows, _ = part_rows(run, "test")
    own = [name for name, column in shops.COLUMNS.items() if column.is_candidates]
    first = rows.take(pa.array([rows["request"].to_pylist().index(one) for one in dict.fromkeys(rows["request"].to_pylist())]))
    requests = first.drop_columns(own)
    lists = [["i0", "i5", "unheard of"], [], None, *[["i3", "i4"]] * (len(first) - 3)]
    source = table()
    names = source["item"].to_pylist()
    items = source.take(pa.array([names.index(item) for item in dict.fromkeys(names) if item is not None])).select(own)
    found = ranker.recommend(requests.append_column("item", pa.array(lists)), k=2, items=items, progress=False)
    assert found.column_names == ["request", "user", "item", "predicted_click", "predicted_buy", "rank"]
    given = [list(of or ()) for of in lists]
    for number, of in enumerate(given):
        here = found.filter(pa.compute.equal(found["request"], number))
        assert here["rank"].to_pylist() == list(range(1, min(2, len(of)) + 1))
        assert set(here["item"].to_pylist()) <= set(of)
        assert here["predicted_click"].to_pylist() == sorted(here["predicted_click"].to_pylist(), reverse=True)
    # One by one they are predicted alike.
    expanded = requests.take(pa.array([number for number, of in enumerate(given) for _ in of]))
    expanded = expanded.append_column("item", pa.array([item for of in given for item in of]))
    known = items["item"].to_pylist()
    places = [known.index(item) if item in known else None for of in given for item in of]
    for name in own:
        if name != "item" and name not in ("click", "buy", "weight"):
            expanded = expanded.append_column(name, items[name].combine_chunks().take(pa.array(places, pa.int64())))
    single = ranker.predict(expanded, progress=False)
    alone = {(row["user"], row["item"], row["predicted_click"]) for row in single.to_pylist()}
    for row in found.to_pylist():
        assert any(
            user == row["user"] and item == row["item"] and abs(score - row["predicted_click"]) < 1e-6
            for user, item, score in alone
        )
    # All that the model knows, with what the run's data has of each.
    everything = ranker.recommend(requests.slice(0, 1), k=100, by="buy", progress=False)
    known = run.encoders["item"].ids.ids.to_pylist()
    assert sorted(everything["item"].to_pylist()) == sorted(known)
    with pytest.raises(ConfigError, match=r"^by: got 'like', expected one of click, buy$"):
        ranker.recommend(requests, by="like")
    with pytest.raises(ConfigError, match=r"^k: got 0, expected 1 or more$"):
        ranker.recommend(requests, k=0)


def test_evaluating_again_gives_the_figures_of_the_run(run: RankingRun, ranker: jagged.Ranker, tmp_path: Path) -> None:
    kept = json.loads((run.directory / "metrics.json").read_text())
    for part in ("valid", "test"):
        found = jagged.evaluate(run.directory, part=part, progress=False)
        assert found.metrics.to_json() == kept[part]
    rows, _ = part_rows(run, "test")
    pa.parquet.write_table(rows, tmp_path / "rows.parquet")
    of_file = ranker.evaluate(tmp_path / "rows.parquet", progress=False)
    assert of_file.part == "all"
    assert of_file.metrics.click["auc"] == pytest.approx(kept["test"]["click"]["auc"], abs=1e-6)
    assert of_file.metrics.buy["logloss"] == pytest.approx(kept["test"]["buy"]["logloss"], abs=1e-6)
    lines = str(of_file).splitlines()
    assert lines[0] == f"all rows: {len(rows)} rows, {of_file.num_requests} requests"


def test_slices_have_the_users_ids(run: RankingRun, ranker: jagged.Ranker) -> None:
    found = ranker.evaluate(part="train", slices=["type", "shop.id"], progress=False)
    groups = [name for name in found.metrics if is_slice_group(name)]
    source, rows = table(), run.part("train")
    places = run.dataset.source[rows.rows]
    for name in groups:
        task, column, value = re.fullmatch(r"(\w+)\[([\w.]+)=(.*)\]", name).groups()
        values, labels = ([source[of].to_pylist()[place] for place in places] for of in (column, task))
        wanted = None if value == "missing" else value
        # Of a conditional pair nothing is asked here: each label's own rows.
        count = sum(one == wanted and label is not None for one, label in zip(values, labels, strict=True))
        assert found.metrics[name]["rows"] == count, name
    assert {"click[type=t0]", "click[type=missing]", "buy[shop.id=s3]"} <= set(groups)
    assert f"{'click[type=t0]':<{max(map(len, groups))}}" in str(found)
    for wrong in ("tags", "nothing"):
        with pytest.raises(ConfigError) as error:
            ranker.evaluate(slices=[wrong])
        assert str(error.value) == (
            f"slices: got {wrong!r}, expected columns with one id a row: ['user', 'item', 'type', 'shop.id']"
        )


def test_options_of_the_other_kind_of_run_are_refused(run: RankingRun) -> None:
    with pytest.raises(ConfigError) as error:
        jagged.evaluate(run.directory, filter_viewed=True)
    assert str(error.value) == f"filter_viewed: got True, expected none: it is for runs on events, and {run.directory} is none"
    with pytest.raises(CheckpointError) as refused:
        jagged.Recommender.from_pretrained(run.directory)
    assert str(refused.value) == f"{run.directory}: holds a model of a table's requests; open it by Ranker.from_pretrained"


def test_the_page_tells_what_was_measured_and_what_leaks(run: RankingRun, tmp_path: Path) -> None:
    facts = gather_ranking(run.directory, progress=False)
    page = render_ranking(facts)
    assert "Nothing leaks" in page
    assert facts.leaks.counts["histories_too_late"] == 0
    coverage = {one.column.name: one for one in facts.coverage}
    ages = table()["age"].to_pylist()
    train = run.dataset.source[run.part("train").rows]
    assert coverage["age"].missing[0] == pytest.approx(np.mean([ages[row] is None for row in train]))
    assert coverage["item"].rows == run.encoders["item"].size
    figures = facts.metrics.click
    assert f"<b>{figures['auc']:.4f}</b> auc of click" in page
    assert "click[type=t1]" in page
    assert page.count("<svg") == 6
    assert jagged.report(run.directory, tmp_path / "page.html", progress=False).read_text() == page
    leaks = dataclasses.replace(facts.leaks, counts={**facts.leaks.counts, "rows_across_parts": 2})
    assert "2 validation and test rows whose user, candidate and time an earlier part has, too." in render_ranking(
        dataclasses.replace(facts, leaks=leaks)
    )


def test_a_leak_of_the_table_is_found_by_its_page(tmp_path: Path) -> None:
    rows = table()
    half = rows.slice(0, len(rows) // 2)
    parts = ["train"] * len(half) + ["valid", "test"] * (len(half) // 2) + ["test"] * (len(half) % 2)
    leaking = pa.concat_tables([half, half]).append_column("part", pa.array(parts))
    chosen = config(tmp_path)
    chosen = RankingConfig(**{**chosen.model_dump(), "split": {"type": "column", "column": "part"}})
    jagged.train(chosen, leaking, progress=False)
    facts = gather_ranking(tmp_path / "run", progress=False)
    assert facts.leaks.counts["rows_across_parts"] >= len(half) // 2
    assert "Something leaks, and the metrics above are not to be trusted" in render_ranking(facts)


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    chosen = config(tmp_path)
    result = jagged.train(chosen, table(), dry_run=True, progress=False)
    assert not (tmp_path / "run").exists()
    text = str(result.forecast)
    assert re.search(r"\d+ steps an epoch of about 1\d requests and \d+ events and candidates, at most \d+ steps", text)


def test_a_run_that_ends_goes_on_and_another_table_is_refused(tmp_path: Path) -> None:
    chosen = config(tmp_path)
    pa.parquet.write_table(table(), tmp_path / "rows.parquet")
    chosen = RankingConfig(
        **{**chosen.model_dump(), "data": {**chosen.data.model_dump(), "path": str(tmp_path / "rows.parquet")}}
    )
    jagged.train(chosen, progress=False)
    longer = RankingConfig(**{**chosen.model_dump(), "training": {**chosen.training.model_dump(), "max_epochs": 3}})
    # The source is not needed any more.
    (tmp_path / "rows.parquet").unlink()
    assert jagged.train(longer, resume=tmp_path / "run", progress=False).epochs == 3
    whole = RankingConfig(**{**longer.model_dump(), "output": str(tmp_path / "whole")})
    assert jagged.train(whole, table(), progress=False).epochs == 3
    weights = [RankingRun.open(tmp_path / name).model.state_dict() for name in ("run", "whole")]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    with pytest.raises(TrainingError) as error:
        jagged.train(longer, table(seed=1), resume=True, progress=False)
    assert str(error.value) == (
        f"data: {tmp_path / 'run' / 'dataset'} holds another table than the one that is given; choose another output, or delete "
        "it"
    )


def test_events_without_labels_are_ranked_against_drawn_items(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = pa.table(
        {
            "user": [f"u{i}" for i in rng.integers(12, size=300)],
            "item": [f"i{i}" for i in rng.integers(15, size=300)],
            "time": np.arange(300),
        }
    )
    chosen = RankingConfig(
        **{
            **SMALL,
            "output": str(tmp_path / "run"),
            "data": {"user": "user", "candidate": "item", "time": "time", "negatives": 3},
        }
    )
    result = jagged.train(chosen, rows, progress=False)
    assert set(result.metrics.test) == {"sampled", "sampled_next"}
    ranker = jagged.Ranker.from_pretrained(tmp_path / "run")
    assert ranker.evaluate(progress=False).metrics.to_json() == result.metrics.test.to_json()
    found = ranker.recommend(pa.table({"user": ["u1", "new"], "time": [1000, 1000]}), k=3, progress=False)
    assert found["request"].to_pylist() == [0, 0, 0, 1, 1, 1]
    facts = gather_ranking(tmp_path / "run", progress=False)
    assert not facts.calibration
    assert facts.metrics.to_json() == result.metrics.test.to_json()
    page = render_ranking(facts)
    assert "Calibration of" not in page
    assert "next, against drawn negatives" in page
    without = RankingConfig(**{**chosen.model_dump(), "output": str(tmp_path / "other"), "data": {"user": "user"}})
    with pytest.raises(TrainingError) as error:
        jagged.train(without, rows, progress=False)
    assert str(error.value) == (
        "data.label: the table has no label; name one, or let items be drawn beside each row's own one by data.negatives"
    )


def test_events_of_another_table_come_along(tmp_path: Path) -> None:
    Schema(tuple(shops.OF_EVENTS.columns)).save(tmp_path / "events.toml")
    pa.parquet.write_table(shops.events(), tmp_path / "events.parquet")
    chosen = config(
        tmp_path,
        events=str(tmp_path / "events.parquet"),
        event_schema_file=str(tmp_path / "events.toml"),
        event_labels=["stars"],
        event_lists=["topics"],
    )
    jagged.train(chosen, table(), progress=False)
    run = RankingRun.open(tmp_path / "run")
    part = run.part("test")
    expected = {}
    for batch, predictions in run.scores(part, progress=False):
        expected.update(zip(part.dataset.source[batch.rows.numpy()].tolist(), predictions["click"].tolist(), strict=True))
    rows = table().take(pa.array(sorted(expected)))
    for events in (None, tmp_path / "events.parquet", shops.events()):
        found = jagged.predict(tmp_path / "run", rows, events=events, progress=False)
        assert found["predicted_click"].to_pylist() == pytest.approx([expected[place] for place in sorted(expected)], abs=1e-6)


def test_the_ranker_fits_a_frame_and_leaves_it_alone(tmp_path: Path) -> None:
    rows = table()
    before = rows.to_pydict()
    chosen = config(tmp_path)
    ranker = jagged.Ranker(chosen, output=str(tmp_path / "fitted"))
    with pytest.raises(ConfigError, match=r"^Ranker: no model yet; call fit\(table\), or open one with Ranker.from_pretrained"):
        ranker.predict(rows)
    ranker.fit(rows)
    assert rows.to_pydict() == before
    again = jagged.Ranker.from_pretrained(tmp_path / "fitted")
    assert again.config.model == ranker.config.model
    expected = ranker.predict(rows, progress=False)
    assert again.predict(rows, progress=False) == expected
    # What is saved without rows needs the events, as a table of them has them.
    ranker.save_pretrained(tmp_path / "copy")
    alone = jagged.Ranker.from_pretrained(tmp_path / "copy")
    shown = rows.drop_columns(["request", "weight", "liked", "tags", "moods", "buy"])
    assert alone.predict(rows, events=shown, progress=False) == expected
    with pytest.raises(ConfigError) as error:
        alone.predict(rows, progress=False)
    assert str(error.value) == (
        f"events: the model reads histories, and {tmp_path / 'copy'} holds no rows to gather them from; give a table of them"
    )
    with pytest.raises(ConfigError) as error:
        alone.evaluate(progress=False)
    assert str(error.value) == f"{tmp_path / 'copy'}: holds no table (dataset/); name the table to use"


def test_a_false_start_leaves_room_for_the_next(tmp_path: Path) -> None:
    """A table of context alone, without user, item and time: what is wrong is told, mended, and trains."""
    rng = np.random.default_rng(0)
    values = {f"number{i}": pa.array([None if one < 0.2 else one for one in rng.random(400)]) for i in range(3)}
    ids = {f"id{i}": [f"{one:06x}" for one in rng.integers(9**i + 2, size=400)] for i in range(4)}
    rows = pa.table({"label": rng.integers(2, size=400), **values, **ids})
    options = {**SMALL, "output": str(tmp_path / "run"), "data": {"label": "label"}}
    with pytest.raises(DataError) as error:
        jagged.train(RankingConfig(**options), rows, progress=False)
    assert str(error.value) == (
        "split by time: found no column of kind time, expected one; name it in the schema, or split by order or column"
    )
    with pytest.raises(TrainingError, match=r"^model: tasks: got 'click', expected some of label$"):
        jagged.train(RankingConfig(**{**options, "split": "order", "model.tasks": ["click"]}), rows, progress=False)
    jagged.train(RankingConfig(**{**options, "split": "order"}), rows, progress=False)
    run = RankingRun.open(tmp_path / "run")
    assert run.dataset.source[run.part("test").rows].tolist() == list(range(360, 400))
    assert run.dataset.source[run.part("train").rows].tolist() == list(range(320))
    assert run.opened.split["counts"] | {"valid_row": 320, "test_row": 360} == run.opened.split["counts"]
    found = jagged.predict(tmp_path / "run", rows.drop_columns(["label"]), progress=False)
    assert found.column_names == ["predicted_label"]
    assert len(found) == 400


def test_a_configuration_of_the_other_job_is_refused() -> None:
    with pytest.raises(ConfigError) as error:
        TrainConfig(model="ranking")
    assert str(error.value) == (
        "model.name: got 'ranking', expected sasrec, hstu or bert4rec; RankingConfig has it, and load_config takes either"
    )
    with pytest.raises(ConfigError) as error:
        RankingConfig(head="sampled", data={"label": "click", "max_seq_len": 3})
    assert str(error.value).splitlines() == [
        f"{name}: belongs to model.name sasrec, hstu or bert4rec, not to ranking, dlrm, dcnv2, wukong, mmoe, dlrm-hstu or din"
        for name in ("head", "data.max_seq_len")
    ]


def test_a_dataset_trains_as_its_table_does(run: RankingRun, tmp_path: Path) -> None:
    dataset = Dataset.load(run.directory / "dataset")
    assert [column.kind for column in dataset.schema.columns][:3] == [Kind.REQUEST, Kind.USER, Kind.CANDIDATE]
    chosen = config(tmp_path)
    jagged.train(chosen, dataset, progress=False)
    again = RankingRun.open(tmp_path / "run")
    assert all(torch.equal(value, again.model.state_dict()[name]) for name, value in run.model.state_dict().items())


def test_what_the_table_was_read_from_does_not_matter(tmp_path: Path) -> None:
    """Trained on text with lists and ratings: the same rows in memory are the same, and events show labels as they are."""
    rng = np.random.default_rng(0)
    items = rng.integers(9, size=200)
    rows = pa.table(
        {
            "user": [f"u{i}" for i in rng.integers(10, size=200)],
            "item": [f"i{i}" for i in items],
            "rating": [int(1 + 4 * (i % 2)) for i in items],
            "time": np.arange(200),
            "tags": [[f"t{i % 3}", f"t{i % 4}"] for i in items],
        }
    )
    text = rows.set_column(4, "tags", pa.array(["|".join(one) for one in rows["tags"].to_pylist()]))
    pa.csv.write_csv(text, tmp_path / "rows.csv")
    data = {"path": str(tmp_path / "rows.csv"), "label": "rating>=4", "candidate": "item", "event_labels": "rating"}
    chosen = RankingConfig(**{**SMALL, "output": str(tmp_path / "run"), "data": {**data, "candidate_columns": "tags"}})
    jagged.train(chosen, progress=False)
    run = RankingRun.open(tmp_path / "run")
    assert run.schema["tags"].separator == "|"
    part, expected, shown = run.part("test"), {}, []
    for batch, predictions in run.scores(part, progress=False):
        expected.update(zip(part.dataset.source[batch.rows.numpy()].tolist(), predictions["rating"].tolist(), strict=True))
        shown.append(batch.history_labels)
    assert 0 < torch.cat(shown).mean() < 1
    ranker = jagged.Ranker.from_pretrained(tmp_path / "run")
    for of in (rows, text):
        found = ranker.predict(of.take(pa.array(sorted(expected))), progress=False)["predicted_rating"].to_pylist()
        assert found == pytest.approx([expected[place] for place in sorted(expected)], abs=1e-6)
