"""Runs on rows with sets of labels: from files to ranked labels."""

from __future__ import annotations

import copy
import json
import pickle
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import jagged
from jagged.artifacts import CheckpointError
from jagged.config import ConfigError, MultiLabelConfig, load_config
from jagged.data import DataError, LabelBatch, MultiLabelRows, label_loader, synthetic_labels, write_xmc
from jagged.label_metrics import LabelMetrics, propensities
from jagged.models import MultiLabelModel, multilabel
from jagged.models.pretrained import load_task, save_task
from jagged.modules import GroupSparseHead
from jagged.runs import summary
from jagged.runs.labels import LabelRun
from jagged.runs.labels.evaluating import evaluate_labels
from jagged.runs.labels.reporting import gather_labels
from jagged.runs.labels.rows import LabelRows
from jagged.training import TrainingError, TrainingInterrupted
from tests.places import PLACE
from tests.processes import told_by
from tests.training.support import at_step, kill_self, outcome

pytestmark = pytest.mark.skipif(PLACE.name != "cpu", reason="the trainer on a CPU")

ROWS, TEST, _ = synthetic_labels(num_rows=600, num_test_rows=200, num_labels=200, num_features=600, num_groups=20)


def config_of(output: Path, **sections: Any) -> MultiLabelConfig:
    common: dict[str, Any] = {
        "output": str(output),
        "device": "cpu",
        "model": {"embedding_dim": 32},
        "head": {"fan_in": 8, "group_size": 4, "rewire_every": 7},
        "training": {"max_epochs": 3, "batch_size": 50, "learning_rate": 0.01, "tensorboard": False, "checkpoint_seconds": 0.0},
        "evaluation": {"eval_batch_size": 64},
    }
    for name, section in sections.items():
        common[name] = {**common[name], **section} if isinstance(section, dict) and name in common else section
    return MultiLabelConfig(**common)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("files")
    for name, rows in (("train.txt", ROWS), ("test.txt", TEST)):
        write_xmc(rows, folder / name)
    return folder / "train.txt", folder / "test.txt"


@pytest.fixture(scope="module")
def trained(files: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> LabelRun:
    output = tmp_path_factory.mktemp("runs") / "labels"
    jagged.train(config_of(output, data={"path": str(files[0]), "test": str(files[1])}), progress=False)
    return LabelRun.open(output)


def ranked(table: pa.Table, num_rows: int, k: int) -> torch.Tensor:
    """The labels of a table of predictions, `[num_rows, k]`, -1 where there are fewer."""
    found = torch.full((num_rows, k), -1, dtype=torch.int64)
    row, rank = torch.tensor(table["row"].to_numpy()), torch.tensor(table["rank"].to_numpy())
    found[row, rank - 1] = torch.tensor(table["label"].to_numpy())
    return found


def figures_of(best: torch.Tensor, rows: MultiLabelRows, ks: tuple[int, ...] = (1, 3, 5, 10)) -> dict[str, float]:
    counts = torch.bincount(torch.from_numpy(TRAIN.labels).long(), minlength=TRAIN.num_labels)
    metrics = LabelMetrics(rows.num_labels, propensities(counts, len(TRAIN)), ks)
    labels = LabelBatch.of(rows).labels
    metrics.update(best, labels.values(), labels.offsets())
    return metrics.compute()


# Of 600 rows 60 are the validation, whatever else there is.
TRAIN = LabelRows(ROWS, TEST).split(MultiLabelConfig()).train


def test_from_files_to_ranked_labels(trained: LabelRun, files: tuple[Path, Path]) -> None:
    assert trained.parts.train.labels.tolist() == TRAIN.labels.tolist()
    table = trained.predict(files[1], progress=False)
    assert (table.column_names, table.num_rows) == (["row", "rank", "label", "probability"], 2000)
    expected = figures_of(ranked(table, 200, 10), TEST)
    test = json.loads((trained.directory / "metrics.json").read_text())["test"]["labels"]
    assert test == pytest.approx(expected)
    for of in (evaluate_labels(trained, progress=False), evaluate_labels(trained, files[1], part="valid", progress=False)):
        assert of.metrics["labels"] == pytest.approx(expected)
    assert expected["p@1"] > 0.35
    assert bool((np.diff(table["probability"].to_numpy().reshape(200, 10), axis=1) <= 0).all())
    few = jagged.evaluate(trained.directory, part="valid", ks=(2,), progress=False)
    assert set(few.metrics["labels"]) == {
        *(f"{name}@2" for name in ("p", "psp", "ndcg", "psndcg", "recall")), "samples", "samples_without_positives",
    }  # fmt: skip


def test_what_is_said_of_a_run(trained: LabelRun, files: tuple[Path, Path]) -> None:
    lines = summary.summary_lines(trained.directory)
    count = len(ROWS.labels) + len(TEST.labels)
    assert lines[0] == f"read     800 rows with {count:,} labels of 200 from {files[0]}"
    assert lines[1] == "split    540 for training, 60 for validation, 200 for the test"
    assert re.fullmatch(r"reached  test p@1 0\.\d{4}, p@3 .*, recall@10 0\.\d{4}; all labels ranked for each row", lines[2])
    assert lines[-2] == f"         jagged predict {trained.directory} rows.txt --output labels.parquet"
    assert lines[-1] == f"         jagged report {trained.directory}"
    told = str(evaluate_labels(trained, ks=(1, 5), progress=False)).splitlines()
    without = int((np.diff(TEST.label_offsets) == 0).sum())
    assert told[0] == (
        f"test part (a test of its own, seed 0): {200 - without} rows ({without} more without a label are left out), "
        "all 200 labels ranked for each"
    )
    assert [line.split()[0] for line in told[1:]] == ["@1", "p", "psp", "ndcg", "psndcg", "recall", "loss"]


@pytest.mark.parametrize(
    ("head", "num_groups", "shape"),
    [
        ({"type": "group-sparse", "grouping": "frequency"}, 49, (196, 8)),
        ({"type": "group-sparse", "grouping": "random", "optimizer": "sgd", "sgd_momentum": 0.5}, 49, (196, 8)),
        ({"type": "group-sparse", "grouping": "random", "dense_share": 0.0, "rewire_by": "gradient"}, 50, (200, 8)),
        ({"type": "fixed-fan-in"}, 196, (196, 8)),
        ({"type": "block-sparse", "grouping": "random"}, 49, (196, 8)),
        ({"type": "dense"}, 0, (0, 1)),
        ({"type": "bottleneck", "bottleneck_dim": 4}, 0, (0, 1)),
        ({"type": "group-sparse", "loss": "softmax", "rewire_by": "gradient"}, None, (196, 8)),
        ({"type": "group-sparse", "loss": "softmax", "optimizer": "sgd"}, None, (196, 8)),
        ({"type": "dense", "loss": "softmax"}, 0, (0, 1)),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_heads_by_name(tmp_path: Path, head: dict[str, Any], num_groups: int | None, shape: tuple[int, int]) -> None:
    options = {"group_size": 4} if head["type"] in ("group-sparse", "block-sparse") else {}
    options |= {} if head["type"] in ("dense", "bottleneck") else {"fan_in": 8}
    config = config_of(tmp_path / "run", training={"max_epochs": 1}).model_dump() | {"head": {**head, **options}}
    jagged.train(MultiLabelConfig(**config), (ROWS, TEST), progress=False)
    run = LabelRun.open(tmp_path / "run")
    made = run.model.head
    assert num_groups in (None, made.num_groups)
    assert tuple(made.weight.shape) == shape
    assert made.loss == head.get("loss", "bce")
    # What it was trained by is no part of what is opened.
    assert made.optimizer is None
    wide = {"dense": 32, "bottleneck": 4}.get(head["type"], 32)
    assert made.head_weight.shape[1] == wide
    if head["type"] == "block-sparse":
        assert tuple(made.supports.shape) == (num_groups,)
        assert set((made.supports % 8).tolist()) == {0}
    assert made.head_weight.shape[0] + made.weight.shape[0] == 200
    # As it was opened: the figures that training wrote.
    assert json.loads((tmp_path / "run" / "metrics.json").read_text())["test"]["labels"] == pytest.approx(
        evaluate_labels(run, progress=False).metrics["labels"]
    )


def test_the_page_of_a_run(trained: LabelRun, tmp_path: Path) -> None:
    page = jagged.report(trained.directory, tmp_path / "page.html", progress=False).read_text()
    facts = gather_labels(trained.directory, progress=False)
    figures = evaluate_labels(trained, progress=False).metrics["labels"]
    assert f"<b>{figures['p@1']:.4f}</b> p@1" in page
    assert "Nothing leaks: no row of the test part has the features of one of training." in page
    assert page.count("<svg") == 3
    # Labels by how often training has them, all of them and all positives of the part.
    counts = np.bincount(TRAIN.labels, minlength=200)
    assert sum(one.labels for one in facts.frequencies) == 200
    assert sum(one.positives for one in facts.frequencies) == len(TEST.labels)
    best = ranked(trained.predict(TEST, progress=False), 200, 10).numpy()
    for one in facts.frequencies:
        here = [
            (row, label)
            for row in range(200)
            for label in TEST.labels[TEST.label_offsets[row] : TEST.label_offsets[row + 1]]
            if one.low <= counts[label] <= one.high
        ]
        assert one.positives == len(here)
        if here:
            assert one.found == pytest.approx(np.mean([label in best[row] for row, label in here]))
    assert facts.num_parameters == (4 * 32 + 196 * 8, 200 * 32)


def test_a_row_of_training_in_the_test_is_told(tmp_path: Path) -> None:
    """Also with its features in another order, and not where a value differs."""
    some = ROWS.take(np.arange(3))
    test = replace(some, feature_ids=some.feature_ids.copy(), feature_values=some.feature_values.copy())
    first = slice(0, int(some.feature_offsets[1]))
    for array in (test.feature_ids, test.feature_values):
        array[first] = array[first][::-1]
    test.feature_values[some.feature_offsets[2]] += 1
    jagged.train(
        config_of(tmp_path / "run", split={"valid_fraction": 0.01}, training={"max_epochs": 1}), (ROWS, test), progress=False
    )
    parts = LabelRun.open(tmp_path / "run").parts
    known = {bytes(parts.train.feature_ids[a:b]) for a, b in pairwise(parts.train.feature_offsets)}
    assert all(bytes(some.feature_ids[a:b]) in known for a, b in pairwise(some.feature_offsets))
    assert gather_labels(tmp_path / "run", progress=False).leaks == {"rows_of_training": 2}
    page = jagged.report(tmp_path / "run", progress=False).read_text()
    assert "Something leaks, and the metrics above are not to be trusted: 2 rows with the very features and values" in page


def test_labels_that_are_filtered_are_neither_ranked_nor_looked_for(trained: LabelRun, tmp_path: Path) -> None:
    best = ranked(trained.predict(TEST, progress=False), 200, 10)
    # The best label of some rows and the third, and one that the row has.
    pairs = {(row, int(best[row, place])) for row in range(0, 200, 3) for place in (0, 2)}
    pairs |= {
        (row, int(TEST.labels[TEST.label_offsets[row]]))
        for row in range(1, 200, 3)
        if TEST.label_offsets[row + 1] > TEST.label_offsets[row]
    }
    (tmp_path / "filter.txt").write_text("".join(f"{row} {label}\n" for row, label in sorted(pairs)))
    write_xmc(ROWS, tmp_path / "train.txt")
    write_xmc(TEST, tmp_path / "test.txt")
    data = {"path": str(tmp_path / "train.txt"), "test": str(tmp_path / "test.txt"), "test_filter": str(tmp_path / "filter.txt")}
    kept = LabelRows.read(config_of(tmp_path / "run", data=data), progress=False)
    assert kept.test is not None
    assert kept.test.filtered is not None
    found = ranked(trained.predict(kept.test, progress=False), 200, 10)
    wide = ranked(trained.predict(TEST, k=15, progress=False), 200, 15)
    for row in range(200):
        expected = [label for label in wide[row].tolist() if (row, label) not in pairs][:10]
        assert found[row].tolist() == expected
    labels = [
        [
            label
            for label in TEST.labels[TEST.label_offsets[row] : TEST.label_offsets[row + 1]].tolist()
            if (row, label) not in pairs
        ]
        for row in range(200)
    ]
    without = replace(
        TEST,
        labels=np.array([label for of in labels for label in of], dtype=np.int32),
        label_offsets=np.cumsum([0, *map(len, labels)]).astype(np.int64),
    )
    expected_figures = figures_of(found, without)
    assert evaluate_labels(trained, kept.test, batch_size=7, progress=False).metrics["labels"] == pytest.approx(expected_figures)
    assert expected_figures["p@1"] < figures_of(best, TEST)["p@1"]
    # Rows take their filters along, into a run's directory too.
    kept.save(tmp_path / "kept")
    again = LabelRows.load(tmp_path / "kept")
    assert again.fingerprint == kept.fingerprint != LabelRows(ROWS, TEST).fingerprint
    assert again.test is not None
    assert again.test.filtered is not None
    assert again.test.filtered.tolist() == kept.test.filtered.tolist()


def test_a_run_that_goes_on_ends_as_one_that_was_not_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its directory alone, with inputs that changed before the stop and change after it."""
    jagged.train(config_of(tmp_path / "whole"), (ROWS, TEST), progress=False)
    with monkeypatch.context() as patch:
        at_step(patch, 13, kill_self(15))
        with pytest.raises(TrainingInterrupted):
            jagged.train(config_of(tmp_path / "stopped"), (ROWS, TEST), progress=False)
    jagged.train(resume=tmp_path / "stopped", progress=False)
    assert outcome(tmp_path / "stopped") == outcome(tmp_path / "whole")
    born = LabelRun.open(tmp_path / "whole").model.head.born
    assert sorted(set(born.flatten().tolist())) == [-(2**30), 7, 14]


def test_groups_are_kept_where_they_would_be_made_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, or with other threads: sums in another order make other groups, also another number of them."""
    with monkeypatch.context() as patch:
        at_step(patch, 5, kill_self(15))
        with pytest.raises(TrainingInterrupted):
            jagged.train(config_of(tmp_path / "run"), (ROWS, TEST), progress=False)
    kept = (tmp_path / "run" / "groups" / "groups.safetensors").read_bytes()
    made = multilabel.label_embeddings
    with monkeypatch.context() as patch:
        patch.setattr(multilabel, "label_embeddings", lambda rows, **options: made(rows, **{**options, "seed": 7}).roll(3, 0))
        jagged.train(resume=tmp_path / "run", progress=False)
        # A start with other options, before there is a checkpoint, makes groups of its own.
        again = config_of(tmp_path / "other", head={"group_size": 3})
        shutil.copytree(tmp_path / "run" / "groups", tmp_path / "other" / "groups")
        jagged.train(again, (ROWS, TEST), resume=True, progress=False)
    assert (tmp_path / "run" / "groups" / "groups.safetensors").read_bytes() == kept
    jagged.train(config_of(tmp_path / "whole"), (ROWS, TEST), progress=False)
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")
    assert LabelRun.open(tmp_path / "other").model.head.group_offsets.diff().max() == 3


@pytest.mark.parametrize("loss", ["bce", "softmax"])
def test_mixed_precision_pickles_and_another_seed(tmp_path: Path, loss: str) -> None:
    config = config_of(tmp_path / "run", precision="bf16-mixed", seed=5, head={"loss": loss, "rewire_by": "gradient"})
    result = jagged.train(config, (ROWS, TEST), progress=False)
    often = int(np.bincount(ROWS.labels).argmax())
    by_frequency = (TEST.labels == often).sum() / (np.diff(TEST.label_offsets) > 0).sum()
    assert result.metrics.test["labels"]["p@1"] > by_frequency
    run = LabelRun.open(tmp_path / "run")
    batch = LabelBatch.of(TEST)
    expected = run.model.predict(batch, k=3)
    for again in (pickle.loads(pickle.dumps(run.model)), copy.deepcopy(run.model)):
        found = again.predict(batch, k=3)
        assert torch.equal(found["labels"], expected["labels"])
        assert torch.equal(found["probabilities"], expected["probabilities"])
    # Compiled, its loss is the same.
    torch._dynamo.reset()
    loss_of = torch.compile(lambda features, labels: run.model.head(features, labels), backend="aot_eager", dynamic=True)
    with torch.no_grad():
        for rows in (TEST.take(np.arange(7)), TEST.take(np.arange(11, 30))):
            of = LabelBatch.of(rows)
            hidden = run.model.encoder(of.features)
            torch.testing.assert_close(loss_of(hidden, of.labels), run.model.head(hidden, of.labels))


def test_nothing_is_left_of_a_false_start(tmp_path: Path) -> None:
    """What stops a run before its first step; the same command starts in its place."""

    def refuse(*_: Any, **__: Any) -> None:
        raise TrainingError("stopped")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jagged.runs.labels.training.forecast_rows", refuse)
        with pytest.raises(TrainingError, match=r"^stopped$"):
            jagged.train(config_of(tmp_path / "run"), (ROWS, TEST), progress=False)
    assert not (tmp_path / "run").exists()
    jagged.train(config_of(tmp_path / "run", training={"max_epochs": 1}), (ROWS, TEST), progress=False)
    assert LabelRun.open(tmp_path / "run").parts.train.num_labels == 200


def test_other_rows_do_not_go_on(tmp_path: Path) -> None:
    jagged.train(config_of(tmp_path / "run", training={"max_epochs": 1}), (ROWS, TEST), progress=False)
    with pytest.raises(TrainingError) as found:
        jagged.train(config_of(tmp_path / "run", training={"max_epochs": 1}), TEST, resume=True, progress=False)
    place = tmp_path / "run" / "dataset"
    assert str(found.value) == f"data: {place} holds other rows than those that are given; choose another output, or delete it"


# Two labels have one name, and one is markup.
NAMES = [f"label {label // 2}" if label < 4 else f"<b>{label}</b> & Co." for label in range(200)]


def named(folder: Path, names: list[str] = NAMES) -> dict[str, str]:
    (folder / "Y.txt").write_text("\ufeff" + "\r\n".join(names), encoding="utf-8", newline="")
    return {"label_names": str(folder / "Y.txt")}


@pytest.fixture(scope="module")
def with_names(files: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> LabelRun:
    """Trained with names, whose file is gone."""
    folder = tmp_path_factory.mktemp("names")
    data = {"path": str(files[0]), "test": str(files[1]), **named(folder)}
    jagged.train(config_of(folder / "run", data=data), progress=False)
    (folder / "Y.txt").unlink()
    return LabelRun.open(folder / "run")


def test_labels_have_names(with_names: LabelRun, trained: LabelRun, tmp_path: Path) -> None:
    """And nothing else differs from a run without."""
    assert with_names.label_names is not None
    assert with_names.label_names.to_pylist() == NAMES
    found = with_names.predict(TEST, k=3, progress=False)
    assert found.column_names == ["row", "rank", "label", "name", "probability"]
    assert found["name"].to_pylist() == [NAMES[label] for label in found["label"].to_pylist()]
    assert trained.label_names is None
    assert found.drop_columns("name").equals(trained.predict(TEST, k=3, progress=False))
    assert outcome(with_names.directory) == outcome(trained.directory)
    assert with_names.predict(TEST.take(np.zeros(0, np.int64)), progress=False)["name"].to_pylist() == []
    jagged.predict(with_names.directory, TEST, tmp_path / "labels.parquet", k=3, device="cpu", progress=False)
    assert pq.read_table(tmp_path / "labels.parquet").equals(found)
    # A model is used without the rows that it was trained on.
    shutil.copytree(with_names.directory, tmp_path / "alone", ignore=shutil.ignore_patterns("dataset", "checkpoints"))
    assert LabelRun.open(tmp_path / "alone").predict(TEST, k=3, progress=False).equals(found)


def test_the_page_names_labels(with_names: LabelRun, trained: LabelRun, tmp_path: Path) -> None:
    page = jagged.report(with_names.directory, tmp_path / "page.html", progress=False).read_text()
    counts = np.bincount(TRAIN.labels, minlength=200)
    for one in gather_labels(with_names.directory, progress=False).frequencies:
        labels = np.flatnonzero((counts >= one.low) & (counts <= one.high))
        assert one.examples == tuple(NAMES[label] for label in labels[:3])
        told = ", ".join(one.examples).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        assert f">{told}</td>" in page
    assert "<b>4</b>" not in page
    assert "&lt;b&gt;" in page
    assert "for example</th>" in page
    assert "for example" not in jagged.report(trained.directory, tmp_path / "other.html", progress=False).read_text()


def test_a_run_that_goes_on_has_its_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where their file is gone; it does not go on with others, or with none."""
    config = config_of(tmp_path / "run", data=named(tmp_path))
    with monkeypatch.context() as patch:
        at_step(patch, 13, kill_self(15))
        with pytest.raises(TrainingInterrupted):
            jagged.train(config, (ROWS, TEST), progress=False)
    named(tmp_path, NAMES[::-1])
    place = tmp_path / "run" / "dataset"
    for other in (config, config_of(tmp_path / "run")):
        with pytest.raises(TrainingError) as found:
            jagged.train(other, (ROWS, TEST), resume=True, progress=False)
        told = "names of labels than those that are given; choose another output, or delete it"
        assert str(found.value) == f"data: {place} holds other {told}"
    (tmp_path / "Y.txt").unlink()
    jagged.train(resume=tmp_path / "run", progress=False)
    run = LabelRun.open(tmp_path / "run")
    assert run.label_names is not None
    assert run.label_names.to_pylist() == NAMES
    assert run.parts.train.labels.tolist() == TRAIN.labels.tolist()


def test_names_say_how_many_labels_a_table_has(tmp_path: Path) -> None:
    table = pa.table({"labels": [[row % 7] for row in range(60)], "features": [[row % 5] for row in range(60)]})
    jagged.train(config_of(tmp_path / "run", data=named(tmp_path, NAMES[:9])), (table, table), progress=False)
    found = LabelRun.open(tmp_path / "run").predict(table, k=9, progress=False)
    assert found.num_rows == 60 * 9
    assert found["name"].to_pylist() == [NAMES[label] for label in found["label"].to_pylist()]
    with pytest.raises(DataError) as refused:
        jagged.train(config_of(tmp_path / "few", data=named(tmp_path, NAMES[:6])), table, progress=False)
    told = "found 6 names, expected 7 or more, one for each label; name the file of this data set"
    assert str(refused.value) == f"{tmp_path / 'Y.txt'}: {told}"
    assert not (tmp_path / "few").exists()


def test_names_that_are_damaged_or_lost(with_names: LabelRun, tmp_path: Path) -> None:
    def changed(content: bytes) -> Callable[[Path], Any]:
        return lambda path: path.write_bytes(content)

    whole = (with_names.directory / "label_names.txt").read_bytes()
    damages: list[tuple[Callable[[Path], Any], str]] = [
        (Path.unlink, ": missing or unreadable (No such file or directory), but listed in manifest.json; copy it again"),
        (changed(whole[:-1]), f": damaged: found {len(whole) - 1} bytes, expected {len(whole)}; copy it again"),
        (changed(whole[::-1]), ": damaged: found SHA-256 "),
    ]
    for number, (damage, told) in enumerate(damages):
        run = tmp_path / str(number)
        shutil.copytree(with_names.directory, run)
        damage(run / "label_names.txt")
        with pytest.raises(CheckpointError) as found:
            LabelRun.open(run)
        assert str(found.value).startswith(f"{run / 'label_names.txt'}{told}")
        shutil.copy(with_names.directory / "label_names.txt", run)
        damage(run / "dataset" / "label_names.txt")
        with pytest.raises(DataError) as refused:
            LabelRun.open(run).parts  # noqa: B018
        assert str(refused.value).startswith(f"{run / 'dataset' / 'label_names.txt'}{told}")
    # Files that fit one another, of a run that says that it has names.
    for names, told in (
        (None, "no file of that name, expected a file of names of labels; name a file with a name a line, as Y.txt"),
        (NAMES[:9], "9 names, expected 200, one for each label; name the file of this data set"),
    ):
        run = tmp_path / f"made {names is None}"
        given = None if names is None else pa.array(names, pa.large_string())
        save_task(with_names.model, run, config=with_names.config, split=with_names.split, metrics={}, label_names=given)
        with pytest.raises(DataError) as refused:
            LabelRun.open(run).predict(TEST, progress=False)
        assert str(refused.value) == f"{run / 'label_names.txt'}: found {told}"


def test_without_a_test_some_rows_are_it(tmp_path: Path) -> None:
    config = config_of(tmp_path / "run", split={"valid_fraction": 0.2, "test_fraction": 0.3}, training={"max_epochs": 1})
    jagged.train(config, ROWS, progress=False)
    parts = LabelRun.open(tmp_path / "run").parts
    assert [len(part) for part in parts] == [300, 120, 180]

    def keys(rows: MultiLabelRows) -> list[tuple[float, ...]]:
        return [tuple(rows.feature_values[begin:end].tolist()) for begin, end in pairwise(rows.feature_offsets)]

    assert sorted(keys(parts.train) + keys(parts.valid) + keys(parts.test)) == sorted(keys(ROWS))


@pytest.mark.parametrize("dry_run", [False, True])
def test_graphs_that_cannot_be_are_refused_before_anything_is_written(tmp_path: Path, dry_run: bool) -> None:
    made = config_of(tmp_path / "run", training={"cuda_graphs": True})
    with pytest.raises(TrainingError) as refused:
        jagged.train(made, (ROWS, TEST), dry_run=dry_run, progress=False)
    assert str(refused.value) == "cuda_graphs: got true with device cpu, expected cuda; leave it out, or give none"
    assert not (tmp_path / "run").exists()


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    result = jagged.train(config_of(tmp_path / "run"), (ROWS, TEST), dry_run=True, progress=False)
    assert not (tmp_path / "run").exists()
    assert result.forecast is not None
    lines = str(result.forecast).splitlines()
    assert (
        lines[-1].strip()
        == f"11 steps an epoch of about 50 rows and {len(TRAIN.feature_ids) / 11:,.0f} features, at most 33 steps"
    )


def test_rows_without_labels_and_features(tmp_path: Path) -> None:
    """Half of the rows have none, and a label that no row of training has is scored all the same."""
    keep = np.arange(600) % 2 == 0
    lengths = np.diff(ROWS.label_offsets) * keep
    bare = np.diff(ROWS.feature_offsets) * (np.arange(600) % 3 > 0)
    of_labels = np.repeat(keep, np.diff(ROWS.label_offsets))
    of_features = np.repeat(np.arange(600) % 3 > 0, np.diff(ROWS.feature_offsets))
    rows = replace(
        ROWS,
        labels=ROWS.labels[of_labels],
        label_offsets=np.cumsum([0, *lengths]).astype(np.int64),
        feature_ids=ROWS.feature_ids[of_features],
        feature_values=ROWS.feature_values[of_features],
        feature_offsets=np.cumsum([0, *bare]).astype(np.int64),
        num_labels=230,
    )
    result = jagged.train(config_of(tmp_path / "run", training={"max_epochs": 1}), rows, progress=False)
    assert result.metrics.test["labels"]["samples_without_positives"] > 0
    table = LabelRun.open(tmp_path / "run").predict(rows, k=230, progress=False)
    assert table.num_rows == 600 * 230
    assert np.isfinite(table["probability"].to_numpy()).all()


def test_a_model_is_opened_without_the_rows(trained: LabelRun) -> None:
    model = load_task(trained.directory)
    found = model.predict(LabelBatch.of(TEST), k=4)
    assert torch.equal(found["labels"], ranked(trained.predict(TEST, k=4, progress=False), 200, 4))
    assert next(iter(label_loader(TEST, 3))).filtered is None


def test_parquet_and_tables_in_memory_train_as_text_does(trained: LabelRun, tmp_path: Path) -> None:
    """Their numbers of features and labels are those of both tables together, and of rows to rank at most these."""

    def table(rows: MultiLabelRows) -> pa.Table:
        def lists(values: Any, offsets: Any) -> Any:
            return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values))

        return pa.table(
            {
                "tags": lists(rows.labels, rows.label_offsets),
                "words": lists(rows.feature_ids, rows.feature_offsets),
                "weights": lists(rows.feature_values, rows.feature_offsets),
            }
        )

    names = {"labels_column": "tags", "features_column": "words", "values_column": "weights"}
    for name, rows in (("train", ROWS), ("test", TEST)):
        pq.write_table(table(rows), tmp_path / f"{name}.parquet")
    files = {"path": str(tmp_path / "train.parquet"), "test": str(tmp_path / "test.parquet")}
    jagged.train(config_of(tmp_path / "files", data={**names, **files}), progress=False)
    jagged.train(config_of(tmp_path / "tables", data=names), (table(ROWS), table(TEST)), progress=False)
    # All labels and features of the sample occur, so nothing else differs.
    assert (max(ROWS.labels), max(ROWS.feature_ids)) == (199, 599)
    for output in ("files", "tables"):
        assert outcome(tmp_path / output) == outcome(trained.directory)
    run = LabelRun.open(tmp_path / "files")
    few = table(TEST.take(np.arange(3)))
    assert run.predict(few, k=2, progress=False).equals(trained.predict(TEST.take(np.arange(3)), k=2, progress=False))
    assert run.predict(few.drop_columns("tags"), k=2, progress=False).equals(run.predict(few, k=2, progress=False))
    with pytest.raises(DataError, match="expected a column 'tags'"):
        run.read(few.drop_columns("tags"), progress=False)
    wide = pa.table({**{name: few[name] for name in ("tags", "weights")}, "words": pa.array([[600], [1], [2]])})
    with pytest.raises(DataError, match="rows: found 601 features, expected 600"):
        run.predict(wide.set_column(1, "weights", pa.array([[1.0], [1.0], [1.0]])), progress=False)


def test_a_run_on_embeddings(tmp_path: Path) -> None:
    """It is the run on rows of the same numbers as features; other widths are refused, in a test and in rows to rank."""
    rng = np.random.default_rng(0)

    def table(count: int, width: int = 6) -> pa.Table:
        labels = [rng.choice(9, rng.integers(1, 4), replace=False).tolist() for _ in range(count)]
        return pa.table({"labels": labels, "text": rng.standard_normal((count, width)).astype(np.float32).tolist()})

    train, test = table(120), table(30)
    names = ["labels", "values", "features"]
    sparse = [one.append_column("features", pa.array([list(range(6))] * len(one))) for one in (train, test)]
    data = {"embeddings_column": "text"}
    jagged.train(config_of(tmp_path / "dense", data=data), (train, test), progress=False)
    jagged.train(config_of(tmp_path / "sparse", data={}), tuple(one.rename_columns(names) for one in sparse), progress=False)
    assert outcome(tmp_path / "dense") == outcome(tmp_path / "sparse")
    run = LabelRun.open(tmp_path / "dense")
    assert run.predict(test.drop_columns("labels"), k=2, progress=False).equals(run.predict(test, k=2, progress=False))
    for width in (5, 7):
        message = f"^rows: found {width} features, expected 6, as the rows of training have them; give files of one data set$"
        with pytest.raises(DataError, match=message):
            run.predict(table(3, width), progress=False)
        with pytest.raises(DataError, match=message.replace("rows:", "test:")):
            jagged.train(config_of(tmp_path / "wide", data=data), (train, table(30, width)), progress=False)
    (tmp_path / "rows.txt").write_text("1 2 3\n0 1:1\n")
    message = r"^data\.embeddings_column: got text, expected none: parquet files alone have columns$"
    with pytest.raises(DataError, match=message):
        jagged.train(config_of(tmp_path / "text", data={**data, "path": str(tmp_path / "rows.txt")}), progress=False)


def test_a_run_on_labels_that_are_text(tmp_path: Path) -> None:
    """It is the run on their numbers by first appearance, training before test, with a file of their names."""
    rng = np.random.default_rng(1)
    texts = [f"tag <{number}>" for number in range(12)]

    def rows_of(count: int, labels: int) -> tuple[list[list[str]], Any]:
        found = [[texts[label] for label in rng.choice(labels, rng.integers(1, 4), replace=False)] for _ in range(count)]
        return found, rng.standard_normal((count, 6)).astype(np.float32).tolist()

    train, test = rows_of(120, 9), rows_of(30, 12)
    names = list(dict.fromkeys(text for tags, _ in (train, test) for row in tags for text in row))
    assert sorted(names) == sorted(texts)
    assert names != texts
    tables = [pa.table({"tags": tags, "text": text}) for tags, text in (train, test)]
    ids = [pa.table({"tags": [[names.index(tag) for tag in row] for row in tags], "text": text}) for tags, text in (train, test)]
    data = {"embeddings_column": "text", "labels_column": "tags"}
    for name, table in zip(("train", "test"), tables, strict=True):
        pq.write_table(table, tmp_path / f"{name}.parquet", row_group_size=50)
    files = {"path": str(tmp_path / "train.parquet"), "test": str(tmp_path / "test.parquet")}
    jagged.train(config_of(tmp_path / "files", data={**data, **files}), progress=False)
    jagged.train(config_of(tmp_path / "tables", data=data), tables, progress=False)
    jagged.train(config_of(tmp_path / "ids", data={**data, **named(tmp_path, names)}), ids, progress=False)
    (tmp_path / "Y.txt").unlink()
    for file in ("train.parquet", "test.parquet"):
        (tmp_path / file).unlink()
    of_ids = LabelRun.open(tmp_path / "ids")
    expected = of_ids.predict(ids[1], k=3, progress=False)
    for output in ("files", "tables"):
        assert outcome(tmp_path / output) == outcome(tmp_path / "ids")
        run = LabelRun.open(tmp_path / output)
        assert run.label_names is not None
        assert run.label_names.to_pylist() == names
        assert run.parts.test.num_labels == len(names)
        assert run.predict(tables[1].drop_columns("tags"), k=3, progress=False).equals(expected)
        assert str(evaluate_labels(run, tables[1], progress=False)) == str(evaluate_labels(of_ids, ids[1], progress=False))
        assert (
            gather_labels(run.directory, progress=False).frequencies
            == gather_labels(of_ids.directory, progress=False).frequencies
        )
    # Rows of later have labels by the same names, whatever comes first.
    assert (
        run.read(tables[1].slice(7), progress=False).labels.tolist()
        == of_ids.read(ids[1].slice(7), progress=False).labels.tolist()
    )
    for given, message in (
        (
            pa.table({"tags": [[texts[0]], ["new"]], "text": [[0.0] * 6] * 2}),
            "table:row 2: found the label 'new', expected one of the 12 of names; leave it out",
        ),
        (ids[1], "table: tags: found list<item: int64>, expected lists of text, as names are for; leave names out"),
    ):
        with pytest.raises(DataError) as found:
            run.read(given, progress=False)
        assert str(found.value) == message
    with pytest.raises(DataError) as found:
        of_ids.read(tables[1], progress=False)
    cure = "give names, as label_names_of_table finds them, or number the ids from 0 on"
    assert str(found.value) == f"table: tags: found list<item: string>, expected lists of whole numbers; {cure}"


def test_labels_that_are_text_in_one_part_alone(tmp_path: Path) -> None:
    tables = [pa.table({"labels": labels, "features": [[0]] * 60}) for labels in ([["a", "b"]] * 60, [[0, 1]] * 60)]
    text, numbers = tables
    write_xmc(ROWS, tmp_path / "rows.txt")
    as_training = "expected text, as the rows of training have"
    numbered = "expected lists of whole numbers; give names, as label_names_of_table finds them, or number the ids from 0 on"
    for parts, message in (
        ((text, numbers), "table: labels: found list<item: int64>, expected lists of text, as names are for; leave names out"),
        ((text, TEST), f"test: found labels that are numbers, {as_training}; give a table"),
        ((text, tmp_path / "rows.txt"), f"{tmp_path / 'rows.txt'}: found labels that are numbers, {as_training}; write a table"),
        ((numbers, text), f"table: labels: found list<item: string>, {numbered}"),
        ((ROWS, text), f"table: labels: found list<item: string>, {numbered}"),
    ):
        with pytest.raises(DataError) as found:
            jagged.train(config_of(tmp_path / "run"), parts, progress=False)
        assert str(found.value) == message
    with pytest.raises(ConfigError) as refused:
        jagged.train(config_of(tmp_path / "run", data=named(tmp_path)), text, progress=False)
    told = "expected none: the labels of the rows are text, and so have names"
    assert str(refused.value) == f"data.label_names: got {tmp_path / 'Y.txt'}, {told}"
    assert not (tmp_path / "run").exists()


def test_a_run_on_text_goes_on_with_these_labels_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def table(names: str) -> pa.Table:
        return pa.table(
            {"labels": [[names[row % 5], names[5 + row % 3]] for row in range(90)], "features": [[row % 7] for row in range(90)]}
        )

    config = config_of(tmp_path / "run", training={"max_epochs": 4})
    with monkeypatch.context() as patch:
        at_step(patch, 5, kill_self(15))
        with pytest.raises(TrainingInterrupted):
            jagged.train(config, table("abcdefgh"), progress=False)
    with pytest.raises(TrainingError) as found:
        jagged.train(config, table("abcdefgx"), resume=True, progress=False)
    told = "names of labels than those that are given; choose another output, or delete it"
    assert str(found.value) == f"data: {tmp_path / 'run' / 'dataset'} holds other {told}"
    jagged.train(config, table("abcdefgh"), resume=True, progress=False)
    jagged.train(config_of(tmp_path / "whole", training={"max_epochs": 4}), table("abcdefgh"), progress=False)
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")
    run = LabelRun.open(tmp_path / "run")
    assert run.label_names is not None
    assert run.label_names.to_pylist() == list("afbgchde")


def test_arff_trains(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    lines = [
        "@relation 'made -C 3'",
        *(f"@attribute l{i} {{0,1}}" for i in range(3)),
        *(f"@attribute f{i} numeric" for i in range(5)),
    ]
    lines.append("@data")
    for row in range(60):
        lines.append("{" + f"{row % 3} 1, {3 + row % 5} {rng.random():.3f}" + "}")
    (tmp_path / "made.arff").write_text("\n".join(lines) + "\n")
    head = {"type": "dense"}
    values = config_of(tmp_path / "run", data={"path": str(tmp_path / "made.arff")}).model_dump() | {"head": head}
    result = jagged.train(MultiLabelConfig(**values), progress=False)
    assert result.metrics.test["labels"]["samples"] == 6
    assert LabelRun.open(tmp_path / "run").predict(tmp_path / "made.arff", k=3, progress=False).num_rows == 180


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data.test": "t.txt"}, "data.test: got t.txt, expected none without path, which has the rows to train on"),
        (
            {"data.path": "a.txt", "data.test": "t.txt", "split.test_fraction": 0.2},
            "split.test_fraction: got 0.2, expected none beside data.test, which has the rows of the test",
        ),
        (
            {"data.path": "a.txt", "data.filter": "f.txt", "data.on_error": "skip"},
            "data.on_error: got skip, expected stop beside a filter, whose rows have the numbers of the file's",
        ),
        (
            {"split.valid_fraction": 0.9},
            "split.valid_fraction: got 0.9, expected with test_fraction (0.1) less than 1, or nothing is left to train on",
        ),
        ({"head.fan_in": 300}, "head.fan_in: got 300, expected at most model.embedding_dim (256)"),
        (
            {"head.optimizer": "sgd", "training.accumulate": 2},
            "head.optimizer: got sgd, expected adamw beside training.accumulate (2), as SGD learns from each batch",
        ),
        ({"head.sgd_momentum": 0.5}, "head.sgd_momentum: belongs to head.optimizer sgd, got adamw"),
        (
            {"head.loss": "softmax", "head.label_smoothing": 0.1},
            "head.label_smoothing: belongs to head.loss bce, got softmax",
        ),
        (
            {"head": "sampled"},
            "head.type: got 'sampled', expected group-sparse, dense, bottleneck, fixed-fan-in or block-sparse; it belongs to "
            "model.name sasrec, hstu or bert4rec",
        ),
        (
            {"training.monitor": "auc"},
            "training.monitor: got 'auc', expected p, psp, ndcg, psndcg or recall with a cut-off, for example p@1, or loss",
        ),
        (
            {"head.type": "dense", "head.fan_in": 4},
            "head.fan_in: belongs to head.type group-sparse, fixed-fan-in or block-sparse, got dense",
        ),
    ],
)
def test_options_that_contradict_one_another(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as found:
        load_config(None, {"model": "multilabel", **options})
    assert str(found.value) == message


def test_a_head_of_labels_is_told_where_it_belongs() -> None:
    with pytest.raises(ConfigError) as found:
        load_config(None, {"head": "bottleneck"})
    assert str(found.value) == (
        "head.type: got 'bottleneck', expected cross-entropy, sampled, scalable or group-sparse; it belongs to model.name "
        "multilabel"
    )


def _sizes(root: Path, run: LabelRun) -> Any:
    return run.read(replace(TEST, num_features=601), progress=False)


def _no_rows(root: Path, run: LabelRun) -> Any:
    return jagged.train(config_of(root / "none"), (ROWS, TEST.take(np.zeros(0, np.int64))), progress=False)


def _two_files(root: Path, run: LabelRun) -> Any:
    write_xmc(ROWS, root / "a.txt")
    write_xmc(replace(TEST, num_labels=201), root / "b.txt")
    return jagged.train(config_of(root / "two", data={"path": str(root / "a.txt"), "test": str(root / "b.txt")}), progress=False)


@pytest.mark.parametrize(
    ("ask", "error", "message"),
    [
        (
            _sizes,
            DataError,
            "rows: found 601 features, expected 600, as the rows of training have them; give files of one data set",
        ),
        (_no_rows, DataError, "data: got no rows of the test, expected some for each of training, validation and test"),
        (
            _two_files,
            DataError,
            "ROOT/b.txt: found 201 labels, expected 200, as the rows of training have them; give files of one data set",
        ),
        (
            lambda root, run: jagged.train(config_of(root / "x"), [ROWS, TEST, TEST], progress=False),
            TrainingError,
            "dataset: got 3 parts, expected rows, or a pair of them, training and test",
        ),
        (
            lambda root, run: jagged.recommend(run.directory, root / "x.csv"),
            ConfigError,
            "RUN: a run on sets of labels, not of items; `jagged predict` ranks the labels of rows",
        ),
        (
            lambda root, run: jagged.predict(run.directory, TEST, k=0),
            ConfigError,
            "k: got 0, expected at least 1",
        ),
        (
            lambda root, run: jagged.predict(run.directory, TEST, events="x.csv"),
            ConfigError,
            "events: got x.csv, expected none: it is for runs on a table, and RUN is none",
        ),
        (
            lambda root, run: jagged.evaluate(run.directory, slices=("a",)),
            ConfigError,
            "slices: got ('a',), expected none: it is for runs on a table, and RUN is none",
        ),
        (
            lambda root, run: evaluate_labels(run, part="all"),
            ConfigError,
            "part: got 'all', expected 'train', 'valid' or 'test'",
        ),
    ],
)  # fmt: skip
def test_messages(
    trained: LabelRun, tmp_path: Path, ask: Callable[[Path, LabelRun], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as found:
        ask(tmp_path, trained)
    assert str(found.value).replace(str(tmp_path), "ROOT").replace(str(trained.directory), "RUN") == message


def test_damaged_rows_and_files_of_others(trained: LabelRun, tmp_path: Path) -> None:
    LabelRows(ROWS, TEST).save(tmp_path / "rows")
    path = tmp_path / "rows" / "rows.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"rows\.safetensors"):
        LabelRows.load(tmp_path / "rows")
    with pytest.raises(CheckpointError, match="no such directory"):
        LabelRun.open(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("labels", lambda head, model: head.labels[3].fill_(4)),
        ("labels", lambda head, model: head.places[3].fill_(0)),
        ("group_offsets", lambda head, model: head.group_offsets[2].fill_(10**6)),
        ("supports", lambda head, model: head.supports[0, 0].fill_(32)),
        ("supports", lambda head, model: head.supports[0, 0].fill_(-1)),
        ("label_counts", lambda head, model: model.label_counts[0].fill_(-1)),
    ],
)
def test_weights_of_other_hands(
    trained: LabelRun, tmp_path: Path, name: str, change: Callable[[GroupSparseHead, MultiLabelModel], Any]
) -> None:
    """Files that fit one another, whose numbers are none of a head's: kernels are not to read by them."""
    model = load_task(trained.directory)
    change(model.head, model)
    shutil.copytree(trained.directory, tmp_path / "run")
    save_task(model, tmp_path / "run", config=trained.config, split=trained.split, metrics={})
    with pytest.raises(CheckpointError) as found:
        LabelRun.open(tmp_path / "run")
    where = tmp_path / "run" / "model.safetensors"
    assert str(found.value) == f"{where}: found {name} out of range, expected those of a trained head; copy the directory again"


def test_skipped_rows_are_told_of_both_files(tmp_path: Path) -> None:
    for name, rows in (("train.txt", ROWS), ("test.txt", TEST)):
        write_xmc(rows, tmp_path / name)
        lines = (tmp_path / name).read_text().splitlines()
        lines[5] = "x"
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    data = {"path": str(tmp_path / "train.txt"), "test": str(tmp_path / "test.txt"), "on_error": "skip"}
    jagged.train(config_of(tmp_path / "run", data=data, training={"max_epochs": 1}), progress=False)
    lines = summary.summary_lines(tmp_path / "run")
    assert lines[1] == "         left out 2 malformed rows"
    assert lines[2].startswith(f"         malformed: {tmp_path}/train.txt:6: ")


def test_two_processes_train_as_one_does(tmp_path: Path) -> None:
    told = told_by("tests.runs.label_processes", tmp_path)
    one, two = told["metrics"]
    # What two processes added up is what one finds of their model, each row once.
    assert two["test"]["labels"] == told["again"]
    assert told["names"] == NAMES
    # Labels that are text have one order in both, that of one process.
    assert told["texts"] == told["expected_texts"]
    assert told["fingerprint_of_text"][0] == told["fingerprint_of_text"][1]
    # Rows come in another order, as by another seed.
    for name in ("p@1", "p@5", "ndcg@5"):
        assert two["test"]["labels"][name] == pytest.approx(one["test"]["labels"][name], abs=0.06)
    first, second = told["refused"]
    assert first == second == "ROOT/nothing.txt: " + first.partition(": ")[2]
    assert told["sgd"] == ["head: optimizer=sgd trains in one process; start one, or take optimizer=adamw"] * 2
    assert told["fingerprints"][0] == told["fingerprints"][1]
    # Each process with rows of the table, and with all of them; a step is 1e-3.
    assert told["distance"] < 1e-5
    assert [elsewhere for _, elsewhere in told["forecasts"]] == [told["table"] // 2] * 2
