"""The commands on a trained run: the same figures and tables as their functions give."""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path

import pytest

from jagged import cli
from jagged.config import TrainConfig
from jagged.metrics import IN_WORDS, Best, Figures, RunMetrics
from jagged.runs.summary import summary_lines
from jagged.training import CheckpointError


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["jagged", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return int(end.value.code or 0)


def test_too_few_events_to_train_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Of three events two are held out, and one has nothing to predict."""
    (tmp_path / "events.txt").write_text("a x y z\n")
    arguments = ["--data", str(tmp_path / "events.txt"), "--output", str(tmp_path / "run"), "--device", "cpu"]
    assert run(monkeypatch, "train", *arguments) == 2
    assert capsys.readouterr() == (
        "",
        "jagged: no user has events for training under the leave-one-out split of SequenceDataset(1 users, 3 items, 3 events); "
        "give users with at least 4 events, 2 of them to train on\n",
    )
    (tmp_path / "events.txt").write_text("a x y z x\n")
    assert run(monkeypatch, "train", *arguments, "--dry-run") == 0


@pytest.fixture
def histories(tmp_path: Path) -> Path:
    path = tmp_path / "histories.csv"
    rows = ["new,atlas-01,1", "new,atlas-02,2", "other,bakery-01,5", "nobody,not-in-the-catalogue,1"]
    path.write_text("who,item_id,timestamp\n" + "\n".join(rows) + "\n")
    return path


@pytest.mark.parametrize(
    ("options", "protocols"),
    [
        ([], ["all_items", "unseen_items"]),
        (["--keep-viewed"], ["all_items"]),
        (["--filter-viewed", "--part", "valid"], ["unseen_items"]),
    ],
)
def test_evaluate_prints_figures_with_their_protocol(
    options: list[str],
    protocols: list[str],
    run_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from jagged import evaluate

    assert run(monkeypatch, "evaluate", str(run_directory), *options) == 0
    text = capsys.readouterr().out
    part = "valid" if "valid" in options else "test"
    assert f"{part} part (leave-one-out): 200 users, all 96 items ranked" in text
    figures = evaluate(run_directory, part=part).metrics
    assert [protocol for protocol in figures if IN_WORDS[protocol] in text] == protocols
    for protocol in protocols:
        assert f"{figures[protocol]['ndcg@10']:.4f}" in text


def test_evaluate_takes_any_cut_offs(
    run_directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from jagged import evaluate

    assert run(monkeypatch, "evaluate", str(run_directory), "--k", "10", "--k", "1", "--k", "10") == 0
    _, _, *rows = capsys.readouterr().out.splitlines()
    figures = evaluate(run_directory, ks=(1, 10)).metrics
    names = [f"{name}@{k}" for name in ("ndcg", "recall", "mrr", "coverage", "surprisal") for k in (1, 10)]
    assert rows == [f"{name:<13}{figures.all_items[name]:>24.4f}{figures.unseen_items[name]:>24.4f}" for name in names]
    assert run(monkeypatch, "evaluate", str(run_directory), "--k", "0") == 2


def test_evaluate_refuses_an_unknown_part(
    run_directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "evaluate", str(run_directory), "--part", "train") == 2
    assert (
        capsys.readouterr().err
        == 'jagged: Invalid value "train" for --part. Choose from: "valid", "test". See jagged evaluate --help.\n'
    )


def test_recommend_writes_a_table_in_the_users_own_ids(
    run_directory: Path,
    histories: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    options = ["--k", "3", "--user-column", "who"]
    output = tmp_path / "out.csv"
    assert run(monkeypatch, "recommend", str(run_directory), str(histories), "--output", str(output), *options) == 0
    assert capfdbinary.readouterr().out == b""
    rows = list(csv.DictReader(io.StringIO(output.read_text())))
    assert list(rows[0]) == ["user_id", "item_id", "score", "rank"]
    assert [(row["user_id"], row["rank"]) for row in rows] == [
        (user, rank) for user in ("new", "other", "nobody") for rank in "123"
    ]
    assert not {"atlas-01", "atlas-02"} & {row["item_id"] for row in rows if row["user_id"] == "new"}

    assert run(monkeypatch, "recommend", str(run_directory), str(histories), *options) == 0
    printed = list(csv.DictReader(io.StringIO(capfdbinary.readouterr().out.decode())))
    assert printed == rows


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--output", "out.xyz"], "out.xyz"),
        (["--user-column", "absent"], "absent"),
        (["--k", "97", "--user-column", "who"], "97"),
    ],
)
def test_recommend_refuses_in_one_line(
    options: list[str],
    expected: str,
    run_directory: Path,
    histories: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, "recommend", str(run_directory), str(histories), *options) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert expected in line
    assert [path.name for path in tmp_path.iterdir()] == ["histories.csv"]


def test_report_prints_where_the_page_is(
    run_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    assert run(monkeypatch, "report", str(run_directory), "--output", str(page)) == 0
    assert capsys.readouterr().out == f"{page}\n"
    assert page.read_text().startswith("<!doctype html>")


def test_a_summary_says_what_was_monitored_and_quotes_what_a_shell_would_split(tmp_path: Path) -> None:
    directory = tmp_path / "my run"
    directory.mkdir()
    best = Best(12, 360, 0.25, "unseen_items")
    test = {"all_items": {"mrr@7": 0.125, "ndcg@10": 1.0}, "unseen_items": {"mrr@7": 0.5, "ndcg@10": 1.0}}
    split = {"name": "global-time", "users": 12_345, "items": 1_000, "events": 1_234_567, "test": 2_001}
    (directory / "metrics.json").write_text(json.dumps(RunMetrics("mrr@7", best, Figures({}), Figures(test)).to_json()))
    (directory / "split.json").write_text(json.dumps(split))
    TrainConfig(output="elsewhere", training={"monitor": "mrr@7"}).save(directory / "config.json")
    assert summary_lines(directory) == [
        "read     12,345 users, 1,000 items, 1,234,567 events from the built-in sample",
        "reached  test mrr@7 0.1250 with seen items left in, 0.5000 with seen items taken out; "
        "global-time, 2,001 users, all items ranked for each",
        f"kept     {directory}: weights of epoch 12, validation mrr@7 0.2500 with seen items taken out",
        f"next     jagged evaluate '{directory}'",
        f"         jagged recommend '{directory}' histories.csv",
    ]
    notes = {
        "duplicate_users": 3,
        "empty_users": 1_000,
        "dropped_duplicates": 2,
        "skipped_rows": 1,
        "skipped_rows_first": ["a.csv:7: found 2 fields in '1,2', expected 3 as in the header"],
        "columns_not_used": ["a", "b", "c", "d", "e"],
        "files_left_out": ["_SUCCESS: hidden"],
    }
    (directory / "split.json").write_text(json.dumps({**split, "notes": notes}))
    assert summary_lines(directory)[1:5] == [
        "         left out 1,000 users without events, 2 duplicates of events, 1 malformed rows",
        "         malformed: a.csv:7: found 2 fields in '1,2', expected 3 as in the header",
        "         columns not used: a, b, c and 2 more",
        "         files not read: _SUCCESS: hidden",
    ]
    counts = {"unknown_items": 1_033, "unknown_targets": 2, "unknown_history_events": 7}
    (directory / "split.json").write_text(json.dumps({**split, "unknown": {"valid": {}, "test": counts}}))
    assert summary_lines(directory)[1:-4] == [
        "         1,033 items have no training event and no place in the model; 2 test targets are misses for that",
    ]
    (directory / "metrics.json").unlink()
    with pytest.raises(CheckpointError) as error:
        summary_lines(directory)
    assert str(error.value) == f"{directory}/metrics.json: cannot be read: No such file or directory"


def test_train_forecasts_trains_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    events = tmp_path / "events.txt"
    events.write_text("".join(f"{user} {' '.join(str((user + i) % 30) for i in range(6))}\n" for user in range(60)))
    options = ["--data", str(events), "--output", str(tmp_path / "run"), "--device", "cpu", "--training.no-tensorboard"]
    options += ["--model.embedding-dim", "8", "--model.num-layers", "1"]
    assert run(monkeypatch, "train", *options, "--training.max-epochs", "1", "--dry-run") == 0
    assert "forecast" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()

    assert run(monkeypatch, "train", *options, "--training.max-epochs", "1") == 0
    assert (tmp_path / "run" / "model.safetensors").exists()
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    left_in, taken_out = (metrics["test"][name]["ndcg@10"] for name in ("all_items", "unseen_items"))
    assert capsys.readouterr().out.splitlines()[-5:] == [
        f"read     60 users, 30 items, 360 events from {events}",
        f"reached  test ndcg@10 {left_in:.4f} with seen items left in, {taken_out:.4f} with seen items taken out; "
        "leave-one-out, 60 users, all items ranked for each",
        f"kept     {tmp_path}/run: weights of epoch 1, validation ndcg@10 {metrics['best']['value']:.4f} with seen items left in",
        f"next     jagged evaluate {tmp_path}/run",
        f"         jagged recommend {tmp_path}/run histories.csv",
    ]

    assert run(monkeypatch, "train", *options, "--training.max-epochs", "1") == 2
    assert "not empty" in capsys.readouterr().err
    # The events are in the run.
    events.unlink()
    assert run(monkeypatch, "train", "--resume", str(tmp_path / "run"), "--training.max-epochs", "2") == 0
    assert len((tmp_path / "run" / "history.jsonl").read_text().splitlines()) == 2
