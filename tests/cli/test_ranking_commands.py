"""The commands on a table of impressions, as somebody types them."""

from __future__ import annotations

import csv
import io
import random
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

import jagged
from jagged import cli
from jagged.config import RankingConfig, load_config


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["jagged", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return int(end.value.code or 0)


@pytest.fixture(scope="module")
def ratings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A messy table: ratings from 1 to 5, dates, missing values, a list of genres, semicolons."""
    rng = random.Random(0)
    path = tmp_path_factory.mktemp("table") / "ratings.csv"
    lines = ["user;movie;rating;when;age;genres"]
    for row in range(600):
        user, movie = rng.randrange(30), rng.randrange(40)
        rating = "" if rng.random() < 0.05 else min(5, max(1, 3 + 2 * (movie % 3 == 0) - rng.randrange(3)))
        age = "" if user % 7 == 0 else 20 + user
        genres = "|".join(sorted({f"g{movie % 3}", f"g{movie % 5}"}))
        lines.append(f"u{user};m{movie};{rating};2024-0{1 + row // 300}-{1 + row // 30 % 28:02};{age};{genres}")
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def trained(ratings: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs") / "movies"
    patch = pytest.MonkeyPatch()
    arguments = [
        *("train", "--data", ratings, "--label", "rating>=4", "--candidate", "movie", "--output", directory),
        *("--data.candidate-columns", "genres", "--training.max-epochs", 2, "--training.batch-size", 64, "--device", "cpu"),
        *("--model.embedding-dim", 8, "--model.layer-sizes", 16, "--model.layer-sizes", 8, "--training.no-tensorboard"),
        *("--training.learning-rate", 0.02),
    ]
    assert run(patch, *arguments) == 0
    patch.undo()
    return directory


def test_a_table_trains_by_a_few_words(trained: Path, ratings: Path) -> None:
    config = load_config(trained / "config.json")
    assert isinstance(config, RankingConfig)
    assert config.data.label == ("rating>=4",)
    assert config.data.path == str(ratings)
    assert config.model.layer_sizes == (16, 8)
    assert config.split.type == "time"
    ranker = jagged.Ranker.from_pretrained(trained)
    schema = ranker._run.schema
    assert {one.name: one.kind.value for one in schema.columns} == {
        "user": "user", "movie": "candidate", "rating": "label", "when": "time", "age": "number", "genres": "ids"
    }  # fmt: skip
    assert ranker.evaluate(part="train", progress=False).metrics.rating["auc"] > 0.7


def test_rows_of_a_file_are_scored(
    trained: Path, ratings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "predict", trained, ratings) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    source = [line.split(";") for line in ratings.read_text().splitlines()[1:]]
    assert [(row["user"], row["movie"]) for row in rows] == [(of[0], of[1]) for of in source]
    assert all(0 < float(row["predicted_rating"]) < 1 for row in rows)
    assert run(monkeypatch, "predict", trained, ratings, "--output", tmp_path / "scores.parquet") == 0
    written = pa.parquet.read_table(tmp_path / "scores.parquet")
    assert written["predicted_rating"].to_pylist() == pytest.approx([float(row["predicted_rating"]) for row in rows], abs=1e-6)
    assert run(monkeypatch, "predict", trained, ratings, "--output", tmp_path / "scores.xlsx") == 2
    told = f"jagged: output: got '{tmp_path / 'scores.xlsx'}', expected a file name ending in .csv, .parquet, .jsonl\n"
    assert capsys.readouterr().err == told.replace("output:", "--output:")


def test_candidates_of_requests_are_ranked(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "requests.csv").write_text("user,when,age\nu1,2024-03-01,21\nnew,2024-03-01,\n")
    (tmp_path / "movies.csv").write_text("movie\nm3\nm4\nm5\nunheard of\n")
    arguments = ["recommend", trained, tmp_path / "requests.csv", "--candidates", tmp_path / "movies.csv", "--k", 3]
    assert run(monkeypatch, *arguments) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [(row["request"], row["user"], row["rank"]) for row in rows] == [
        (str(number), user, str(rank)) for number, user in enumerate(("u1", "new")) for rank in (1, 2, 3)
    ]
    assert {row["movie"] for row in rows} <= {"m3", "m4", "m5", "unheard of"}
    assert run(monkeypatch, *arguments, "--keep-viewed") == 2
    assert capsys.readouterr().err == (
        f"jagged: --filter-viewed: got False, expected none: it is for runs on events, and {trained} is none\n"
    )


def test_evaluate_and_report_speak_of_tasks_and_slices(
    trained: Path, ratings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "evaluate", trained, "--slice", "user") == 0
    text = capsys.readouterr().out
    assert text.startswith("test part (by time): ")
    assert "\nrating  auc " in text
    assert "rating[user=u1" in text
    assert run(monkeypatch, "evaluate", trained, "--data", ratings) == 0
    assert capsys.readouterr().out.startswith("all rows: 600 rows, 600 requests\n")
    assert run(monkeypatch, "evaluate", trained, "--slice", "age") == 2
    assert capsys.readouterr().err == ("jagged: slices: got 'age', expected columns with one id a row: ['user', 'movie']\n")
    assert run(monkeypatch, "report", trained, "--output", tmp_path / "page.html") == 0
    page = (tmp_path / "page.html").read_text()
    assert f"ranking trained on {ratings}: 600 rows" in page


def test_labels_beyond_0_and_1_are_refused_with_the_cure(
    ratings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train", "--data", ratings, "--label", "rating", "--candidate", "movie", "--output", tmp_path / "run"]
    assert run(monkeypatch, *arguments, "--device", "cpu") == 2
    assert capsys.readouterr().err == (
        "jagged: --model: tasks: got the label 'rating' with values from 1 to 5, expected 0 to 1; say from where on it is 1 "
        'when the table is read, --data.label "rating>=5", or name other tasks\n'
    )
    assert run(monkeypatch, "train", "--data", ratings, "--label", "rating", "--data.max-seq-len", 3) == 2
    assert capsys.readouterr().err == (
        "jagged: --data.max-seq-len: belongs to --model.name sasrec, hstu or bert4rec, not to ranking, dlrm, dcnv2, wukong, "
        "mmoe, dlrm-hstu or din\n"
    )


def test_a_run_goes_on(trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    before = (trained / "model.safetensors").read_bytes()
    assert run(monkeypatch, "train", "--resume", trained) == 0
    assert (trained / "model.safetensors").read_bytes() == before
    assert "next     jagged evaluate" in capsys.readouterr().out


def test_a_run_begins_with_another_one(
    trained: Path, ratings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Later rows, with a film and a user that were not there.
    lines = ratings.read_text().replace(";m3;", ";m300;").replace("u7;", "u700;").replace("2024-", "2025-")
    (tmp_path / "later.csv").write_text(lines)
    arguments = ["train", "--from", trained, "--data", tmp_path / "later.csv", "--output", tmp_path / "later"]
    options = ["--training.max-epochs", 1, "--training.batch-size", 64, "--training.no-tensorboard", "--device", "cpu"]
    assert run(monkeypatch, *arguments, *options) == 0
    out = capsys.readouterr().out
    assert f"began    with {trained}; new ids: 1 of user, 1 of movie\n" in out
    config = load_config(tmp_path / "later" / "config.json")
    assert isinstance(config, RankingConfig)
    assert config.from_run == str(trained)
    assert config.data.label == ("rating>=4",)
    assert config.model.layer_sizes == (16, 8)
    other = ["train", "--from", trained, "--data", tmp_path / "later.csv", "--output", tmp_path / "other"]
    assert run(monkeypatch, *other, "--model.embedding-dim", 4, "--user", "movie") == 2
    assert capsys.readouterr().err.splitlines() == [
        f"jagged: --model.embedding-dim: got 4, expected 8, as {trained} has it; leave it out",
        f"jagged: --data.user: got movie, expected none, as {trained} has it; leave it out",
    ]
    assert run(monkeypatch, *other[:-1], trained) == 2
    assert capsys.readouterr().err == (
        f"jagged: --from: got {trained}, expected another directory than output; name another output\n"
    )
    assert run(monkeypatch, "train", "--resume", tmp_path / "later") == 0


def test_rows_that_were_left_out_are_counted(
    trained: Path, ratings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(*more: object) -> dict[str, float]:
        assert run(monkeypatch, "evaluate", trained, "--data", ratings, *more) == 0
        figures = capsys.readouterr().out.splitlines()[-1].removeprefix("rating  ").split(", ")
        return {name: float(value) for name, value in (figure.split() for figure in figures) if value != "-"}

    of_all, of_some = told(), told("--negative-rate", 0.5)
    assert of_some["calibration"] > of_all["calibration"]
    assert of_some["auc"] == of_all["auc"]
    assert run(monkeypatch, "evaluate", trained, "--negative-rate", 0.5) == 2
    assert capsys.readouterr().err == (
        "jagged: --negative-rate: got 0.5 without data, expected none; the run knows that of its own rows\n"
    )
    arguments = ["train", "--data", ratings, "--label", "rating>=4", "--data.negative-rate", 0.5, "--model.loss", "listwise"]
    assert run(monkeypatch, *arguments, "--output", tmp_path / "run") == 2
    assert capsys.readouterr().err == (
        "jagged: --data.negative-rate: got 0.5, expected none beside --model.loss listwise, whose scores are no probabilities\n"
    )
