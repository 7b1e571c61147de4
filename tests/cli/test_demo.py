"""The demo, small: what it prints and writes, that it repeats, and that it judges itself."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

from jagged import cli, demo
from jagged.demo import ImpressionResult, SequenceResult, impressions, sequences

RESULT = SequenceResult(
    attainable=0.6,
    reached=0.57,
    popularity=0.05,
    training_seconds=1.0,
    directory=Path("run"),
    pictures=(),
)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequences, "_NUM_USERS", 150)
    monkeypatch.setattr(sequences, "_NUM_ITEMS", 96)
    monkeypatch.setitem(sequences._OPTIONS["model"], "embedding_dim", 16)
    monkeypatch.setitem(sequences._OPTIONS["training"], "max_epochs", 1)
    monkeypatch.setattr(impressions, "_SIZES", {"num_users": 40, "num_items": 30, "mean_requests": 12})
    monkeypatch.setitem(impressions._OPTIONS["training"], "max_epochs", 1)


@pytest.mark.parametrize(
    ("changes", "ok"),
    [
        ({}, True),
        ({"reached": 0.53}, False),
        ({"reached": 0.5399999}, False),
        ({"popularity": 0.2}, False),
        ({"reached": 0.0}, False),
        ({"reached": float("nan")}, False),
    ],
)
def test_good_is_near_the_attainable_and_far_above_popularity(changes: dict[str, float], ok: bool) -> None:
    result = dataclasses.replace(RESULT, **changes)
    assert result.ok is ok
    assert ("NOT GOOD ENOUGH" in str(result)) is not ok
    assert "0.6000" in str(result)


@pytest.mark.parametrize(("task", "auc", "ok"), [("click", 0.871, True), ("click", 0.869, False), ("buy", float("nan"), False)])
def test_good_impressions_are_near_the_attainable(task: str, auc: float, ok: bool) -> None:
    best = {"auc": 0.88, "gauc": 0.87, "logloss": 0.4}
    figures = {"attainable": {"click": best, "buy": best}, "reached": {"click": best, "buy": best}}
    figures["reached"] = {**figures["reached"], task: {**best, "auc": auc}}
    plain = {key: getattr(RESULT, key) for key in ("training_seconds", "directory", "pictures")}
    result = ImpressionResult(**figures, **plain)
    assert result.ok is ok
    assert ("NOT GOOD ENOUGH" in str(result)) is not ok
    assert f"  {f'{task}, reached':<32}{auc:>9.4f}   0.8700   0.4000" in str(result).splitlines()


@pytest.mark.usefixtures("small")
def test_the_demo_shows_names_and_repeats(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, set_threads, used = torch.get_num_threads(), torch.set_num_threads, []
    monkeypatch.setattr(torch, "set_num_threads", lambda count: (used.append(count), set_threads(count))[1])
    first = demo.demo(tmp_path / "demo")
    # One, and as many afterwards as before.
    assert used == [1, threads]
    text = capsys.readouterr().out
    for name in ("best attainable", "reached", "popularity", "What three readers could read next", "Written"):
        assert name in text
    of_events, of_rows = first.sequences, first.impressions
    figures = [of[task][key] for of in (of_rows.attainable, of_rows.reached) for task in of for key in of[task]]
    for value in (of_events.attainable, of_events.reached, of_events.popularity, *figures):
        assert f"{value:.4f}" in text
    assert text.count("    next: ") == 3
    assert text.split("What three users would be shown")[1].count("% click)") == 9
    for one in (of_events, of_rows):
        for path in (one.checkpoint, one.metrics, *one.pictures):
            assert path.exists()
            assert str(path) in text
        assert one.checkpoint.parent.name == "checkpoints"

    # A second run leaves the first alone, and comes to the same end.
    second = demo.demo(tmp_path / "demo")
    assert second.directory == tmp_path / "demo-2"
    assert (first.sequences.reached, first.impressions.reached) == (second.sequences.reached, second.impressions.reached)
    for name in ("sequences", "impressions"):
        weights = [result.directory / name / "run" / "model.safetensors" for result in (first, second)]
        assert weights[0].read_bytes() == weights[1].read_bytes()
    other = sequences.show(tmp_path / "other", seed=1)
    assert other.reached != first.sequences.reached


@pytest.mark.usefixtures("small")
def test_what_is_not_good_enough_ends_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["jagged", "demo", "--output", str(tmp_path / "demo")])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 1
    assert "NOT GOOD ENOUGH" in capsys.readouterr().out


def test_the_shipped_options_are_a_configuration() -> None:
    from jagged.config import RankingConfig, TrainConfig

    assert TrainConfig.load(None, sequences._OPTIONS).training.max_epochs == sequences._OPTIONS["training"]["max_epochs"]
    assert RankingConfig(**impressions._OPTIONS).model.cross == "dot"


@pytest.mark.usefixtures("small")
def test_a_directory_that_cannot_be_made_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    output = tmp_path / "file" / "demo"
    monkeypatch.setattr(sys, "argv", ["jagged", "demo", "--output", str(output)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    expected = f"jagged: {output / 'sequences'}: could not be written: Not a directory; choose another output\n"
    assert capsys.readouterr() == ("1. What users read next, from their events alone\n\n", expected)
