"""The commands on rows with sets of labels, as somebody types them."""

from __future__ import annotations

import csv
import io
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from jagged import cli
from jagged.config import FixedFanInHeadOptions, MultiLabelConfig, load_config
from jagged.data import synthetic_labels, write_xmc

ROWS, TEST, _ = synthetic_labels(num_rows=300, num_test_rows=60, num_labels=80, num_features=200, num_groups=8)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["jagged", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return int(end.value.code or 0)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    write_xmc(ROWS, folder / "train.txt")
    write_xmc(TEST, folder / "test.txt")
    (folder / "Y.txt").write_text("".join(f"the label {label}\n" for label in range(80)))
    return folder


@pytest.fixture(scope="module")
def trained(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs") / "labels"
    patch = pytest.MonkeyPatch()
    arguments = [
        *("train", "--model", "multilabel", "--data", files / "train.txt", "--data.test", files / "test.txt"),
        *("--output", directory, "--head", "fixed-fan-in", "--head.fan-in", 6, "--model.embedding-dim", 16, "--device", "cpu"),
        *("--training.max-epochs", 2, "--training.batch-size", 32, "--training.no-tensorboard", "--head.rewire-every", 3),
    ]
    assert run(patch, *arguments) == 0
    patch.undo()
    return directory


def test_words_become_a_configuration(trained: Path) -> None:
    config = load_config(trained / "config.json")
    assert isinstance(config, MultiLabelConfig)
    assert isinstance(config.head, FixedFanInHeadOptions)
    assert (config.head.fan_in, config.head.rewire_every, config.model.embedding_dim) == (6, 3, 16)


def test_figures_and_labels_are_printed(
    trained: Path, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "evaluate", trained, "--k", 1, "--k", 4) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("all 80 labels ranked for each")
    assert lines[1].split() == ["@1", "@4"]
    # Those of other runs, where they are asked for.
    assert run(monkeypatch, "evaluate", trained, "--k", 5, "--k", 10, "--k", 20) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["@5", "@10", "@20"]
    assert run(monkeypatch, "evaluate", trained) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["@1", "@3", "@5", "@10"]
    assert run(monkeypatch, "predict", trained, files / "test.txt", "--k", 2) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [(row["row"], row["rank"]) for row in rows] == [(str(row), str(rank)) for row in range(60) for rank in (1, 2)]
    assert run(monkeypatch, "predict", trained, files / "test.txt", "--output", tmp_path / "labels.parquet") == 0
    table = pq.read_table(tmp_path / "labels.parquet")
    assert table.num_rows == 600
    assert table["label"].to_pylist()[:2] == [int(row["label"]) for row in rows[:2]]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("train", "--model", "multilabel", "--data", "none.txt", "--output", "OUTPUT"),
            "jagged: none.txt: found no file of that name, expected a file of rows with features and labels; name a file with a "
            "first line of three numbers, as train.txt",
        ),
        (
            ("train", "--model", "multilabel", "--head.fan-in", "300", "--output", "OUTPUT"),
            "jagged: --head.fan-in: got 300, expected at most --model.embedding-dim (256)",
        ),
        (
            ("train", "--model", "multilabel", "--data.label-names", "Y.txt", "--output", "OUTPUT"),
            "jagged: --data.label-names: got Y.txt, expected none without --data.path, whose labels it names",
        ),
        (
            ("train", "--head", "block-sparse", "--output", "OUTPUT"),
            "jagged: --head.type: got 'block-sparse', expected cross-entropy, sampled, scalable or group-sparse; it belongs to "
            "--model.name multilabel",
        ),
        (
            ("predict", "RUN", "x.txt", "--events", "e.csv"),
            "jagged: --events: got e.csv, expected none: it is for runs on a table, and RUN is none",
        ),
        (
            ("evaluate", "RUN", "--slice", "device"),
            "jagged: slices: got ('device',), expected none: it is for runs on a table, and RUN is none",
        ),
        (
            ("recommend", "RUN", "x.txt"),
            "jagged: RUN: a run on sets of labels, not of items; `jagged predict` ranks the labels of rows",
        ),
    ],
)
def test_what_is_refused(
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    message: str,
) -> None:
    places = {"RUN": str(trained), "OUTPUT": str(tmp_path / "run")}
    assert run(monkeypatch, *(places.get(word, word) for word in words)) == 2
    told = capsys.readouterr().err.splitlines()
    assert told[-1].replace(str(trained), "RUN") == message


def test_labels_are_printed_by_name(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        *("train", "--model", "multilabel", "--data", files / "train.txt", "--data.label-names", files / "Y.txt"),
        *("--output", tmp_path / "run", "--head", "dense", "--model.embedding-dim", 8, "--device", "cpu"),
        *("--training.max-epochs", 1, "--training.no-tensorboard"),
    ]
    assert run(monkeypatch, *words) == 0
    capsys.readouterr()
    assert run(monkeypatch, "predict", tmp_path / "run", files / "test.txt", "--k", 2) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert len(rows) == 120
    assert all(row["name"] == f"the label {row['label']}" for row in rows)


def test_a_run_that_was_not_there_begins_and_goes_on(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        *("train", "--model", "multilabel", "--data", files / "train.txt", "--device", "cpu", "--model.embedding-dim", 8),
        *("--head", "dense", "--training.max-epochs", 1, "--training.no-tensorboard"),
    ]
    assert run(monkeypatch, *words, "--resume", tmp_path / "run", "--output", tmp_path / "run") == 0
    assert run(monkeypatch, "train", "--resume", tmp_path / "run") == 0
    assert "train.txt" in capsys.readouterr().out
