"""The benchmark of models of next items: trainings are the product's, trials do not see the test, and nothing gets lost."""

from __future__ import annotations

import copy
import json
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest

from benchmarks import next_item_models as benchmark
from benchmarks.next_item_models import MODELS, SEEDS, SETTINGS, TRIALS, TUNED_ON, Rows, Training, label
from jagged.config import merge
from jagged.data import read_events, split_leave_one_out
from jagged.runs.training import train

TINY = merge(SETTINGS, {"model.embedding_dim": 8, "training.batch_size": 8, "training.max_epochs": 2})


def events(path: Path, last: int = 0) -> str:
    """A file of twelve items, all of them in the first line; the last event of each user is moved on by `last` items."""
    lines = [[*range(12), 0, 1]] + [[(user + step) % 12 for step in range(5 + user % 3)] for user in range(30)]
    for line in lines:
        line[-1] = (line[-1] + last) % 12
    path.write_text("".join(" ".join(f"{word}" for word in [f"u{user}", *line]) + "\n" for user, line in enumerate(lines)))
    return str(path)


def training(data: str, part: str, model: str = "sasrec") -> Training:
    return Training(model, TRIALS[0], 5, part, data, TINY)


@pytest.mark.parametrize("model", MODELS)
def test_a_training_is_the_products_own(model: str, tmp_path: Path) -> None:
    data = events(tmp_path / "events.txt")
    of = training(data, "test", model)
    dataset = read_events(data, progress=False)
    assert dataset.timestamps is None
    result, parameters = benchmark.fit(of, split_leave_one_out(dataset))
    expected = train(of.config(str(tmp_path / "run")), dataset, progress=False)
    assert result.metrics == expected.metrics
    assert set(result.metrics.test) == {"all_items", "unseen_items"}
    assert (result.epochs, result.steps) == (expected.epochs, expected.steps) == (2, 8)
    assert parameters > 12 * 8
    found = benchmark.trained(of)
    assert found["valid"] == expected.metrics.valid.to_json()
    assert found["test"] == expected.metrics.test.to_json()
    assert set(benchmark.FIGURES.values()) <= set(found["test"]["unseen_items"])
    assert (found["parameters"], found["epochs"], found["seed"]) == (parameters, 2, 5)
    assert found["seconds"] > 0
    assert TRIALS[0].items() <= found.items()


@pytest.mark.parametrize("model", MODELS)
def test_options_of_a_trial_are_those_of_its_training(model: str) -> None:
    for options in TRIALS:
        config = Training(model, options, 7, "valid", "", merge(SETTINGS, {})).config()
        assert (config.model.name, config.seed, config.device) == (model, 7, "cpu")
        assert config.training.learning_rate == options["training.learning_rate"]
        assert getattr(config.model, "dropout") == options["model.dropout"]  # noqa: B009
        flat = {f"{section}.{name}": value for section, of in config if hasattr(of, "model_dump") for name, value in of}
        assert SETTINGS.items() <= flat.items()
    assert len({label(options) for options in TRIALS}) == len(TRIALS)
    assert TUNED_ON not in SEEDS


def test_trials_do_not_see_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = [events(tmp_path / "one.txt"), events(tmp_path / "other.txt", last=5)]
    splits = [split_leave_one_out(read_events(path, progress=False)) for path in data]
    one, other = ({part: getattr(split, part) for part in ("train", "valid", "test")} for split in splits)
    for part, differ in (("valid", False), ("test", True)):
        targets = [of[part].items(of[part].target).tolist() for of in (one, other)]
        assert (targets[0] != targets[1]) is differ
    assert one["train"].item_counts().tolist() == other["train"].item_counts().tolist()
    trials = [benchmark.trained(training(path, "valid")) for path in data]
    tests = [benchmark.trained(training(path, "test")) for path in data]
    for found in (*trials, *tests):
        del found["seconds"]
    assert trials[0] == trials[1]
    assert "test" not in trials[0]
    assert tests[0]["valid"] == tests[1]["valid"] == trials[0]["valid"]
    assert tests[0]["test"] != tests[1]["test"]
    # Nor can they: there may be none.
    without = benchmark.replace(splits[0], test=None)
    monkeypatch.setattr(benchmark, "split_leave_one_out", lambda dataset: without)
    again = benchmark.trained(training(data[0], "valid"))
    assert again["valid"] == trials[0]["valid"]
    with pytest.raises(AttributeError):
        benchmark.trained(training(data[0], "test"))


def test_a_training_has_a_process_of_its_own(tmp_path: Path) -> None:
    of = training(events(tmp_path / "events.txt"), "valid", "hstu")
    ((_, future),) = benchmark.finished([of], 1, float("inf"))
    found, expected = future.result(), benchmark.trained(of)
    assert found.pop("processes") == 1
    assert {**found, "seconds": 0} == {**expected, "seconds": 0}
    assert len({os.getpid(), *(benchmark.in_own_process(os.getpid) for _ in range(2))}) == 3
    with pytest.raises(BrokenProcessPool):
        benchmark.in_own_process(os._exit, 3)


def made_up(of: Training) -> dict[str, Any]:
    """The second trial of SASRec has the best validation, the last one of the others; the test would say otherwise."""
    best = TRIALS[1] if of.model == "sasrec" else TRIALS[-1]
    valid = 0.5 if of.options == best else 0.25 + of.options["training.learning_rate"]
    figures = dict.fromkeys(benchmark.FIGURES.values(), (of.seed + 1) / 10)
    test = {"test": {"all_items": figures, "unseen_items": {**figures, "recall@10": 0.75}}} if of.part == "test" else {}
    epochs = 200 if of.model == "bert4rec" and of.part == "test" else 30
    valid_figures = {"all_items": {"ndcg@10": valid}}
    return {"valid": valid_figures, **test, "best_epoch": 20, "epochs": epochs, "seconds": 1.5 + of.seed, "parameters": 1234}


class Bench:
    """`main` with trainings that are made up, and what it saves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, data: str) -> None:
        self.patch, self.data = monkeypatch, data
        self.begun: list[Training] = []
        self.saved: list[dict[str, Any]] = []
        self.at_once, self.most, self._lock = 0, {"valid": 0, "test": 0}, threading.Lock()
        self.work: Callable[[Training], dict[str, Any]] = made_up
        monkeypatch.setattr(benchmark, "environment", lambda device=None: {"device": device or "made up"})
        monkeypatch.setattr(benchmark, "save", lambda name, result: self.saved.append(copy.deepcopy(result)))
        monkeypatch.setattr(benchmark, "other_parts", lambda name, facts: json.loads(json.dumps(self.former())))
        monkeypatch.setattr(benchmark, "in_own_process", self._trained)

    def former(self) -> dict[str, Any]:
        return self.saved[-1] if self.saved else {}

    def _trained(self, function: Any, of: Training) -> dict[str, Any]:
        assert function is benchmark.trained
        with self._lock:
            self.begun.append(of)
            self.at_once += 1
            self.most[of.part] = max(self.most[of.part], self.at_once)
        time.sleep(0.02)
        with self._lock:
            self.at_once -= 1
        return self.work(of)

    def run(self, *words: str) -> Rows:
        self.begun.clear()
        self.patch.setattr("sys.argv", ["next_item_models", "--data", self.data, *words])
        benchmark.main()
        return self.saved[-1]["models"] if self.saved else {}


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch, events(tmp_path / "events.txt"))


def test_each_model_has_the_same_trials_and_is_tested_with_the_best(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    rows = bench.run("--device", "cuda", "--processes", "4", "--alone")
    assert bench.most["valid"] == 4
    assert bench.most["test"] == 1
    trials, tests = bench.begun[: 3 * len(TRIALS)], bench.begun[3 * len(TRIALS) :]
    assert {(of.part, of.seed) for of in trials} == {("valid", TUNED_ON)}
    assert sorted(map(str, trials)) == sorted(
        str(Training(name, trial, TUNED_ON, "valid", "", {})) for name in MODELS for trial in TRIALS
    )
    assert {of.model: of.options for of in tests} == {"sasrec": TRIALS[1], "hstu": TRIALS[-1], "bert4rec": TRIALS[-1]}
    assert [(of.model, of.seed, of.part) for of in tests] == [(name, seed, "test") for name in reversed(MODELS) for seed in SEEDS]
    for of in rows.values():
        # Those that end later do not come later in the file.
        assert (list(of["trials"]), list(of["seeds"])) == ([label(trial) for trial in TRIALS], ["0", "1", "2"])
    assert len(bench.saved) == 27
    assert {of.settings["training"]["max_epochs"] for of in bench.begun} == {200}
    printed = capsys.readouterr().out
    left_in, taken_out = printed.index("Test, seen items left in:"), printed.index("Test, seen items taken out:")
    line = "| `hstu` | 0.2000 (0.1000 to 0.3000) | 0.2000 (0.1000 to 0.3000) | 0.2000 (0.1000 to 0.3000) |"
    assert left_in < printed.index(line) < taken_out
    assert "| `hstu` | 0.7500 | 0.2000 (0.1000 to 0.3000) |" in printed[taken_out:]
    assert f"| `sasrec` | {label(TRIALS[1])} | 0.5000 | 20 | 30 | 2.5 (1.5 to 3.5) | 1 | 1,234 |" in printed
    assert "| `hstu` | 0.2505 | 0.2505 | 0.2510 | 0.2510 | 0.2520 | 0.5000 |" in printed
    assert "`bert4rec`: 3 of 9 trainings had all 200 epochs and might have got better yet" in printed
    assert "`hstu`: " not in printed


def test_what_is_measured_is_kept(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.run("--device", "cuda", "--seconds", "-1") == {}
    assert bench.begun == []
    rows = bench.run("--device", "cuda", "--only", "hstu")
    assert list(rows) == ["hstu"]
    assert bench.run("--device", "cuda", "--only", "sasrec", "hstu")["hstu"] == rows["hstu"]
    assert {of.model for of in bench.begun} == {"sasrec"}
    # Some trials of another are missing: nothing is chosen before they are there.
    bench.saved[-1]["models"]["bert4rec"] = {"trials": {label(TRIALS[2]): rows["hstu"]["trials"][label(TRIALS[2])]}, "seeds": {}}
    begun = len(bench.saved)
    bench.run("--device", "cuda")
    assert [of.options for of in bench.begun] == [*TRIALS[:2], *TRIALS[3:], *[TRIALS[-1]] * 3]
    assert len(bench.saved) == begun + len(bench.begun)
    # A try, and other events.
    saved = len(bench.saved)
    for words in (
        ["--device", "cpu"],
        ["--device", "cuda", "--epochs", "1"],
        ["--device", "cuda", "--set", "training.patience=2"],
    ):
        bench.run(*words, "--only", "sasrec")
        assert (len(bench.begun), len(bench.saved)) == (len(TRIALS) + len(SEEDS), saved), words
    assert {of.settings["training"]["patience"] for of in bench.begun} == {2}
    events(Path(bench.data), last=3)
    assert list(bench.run("--device", "cuda", "--only", "sasrec")) == ["sasrec"]
    assert len(bench.begun) == len(TRIALS) + len(SEEDS)
    capsys.readouterr()
    with pytest.raises(SystemExit):
        bench.run("--set", "model.dropout=0.1")
    assert "--set: got model.dropout, expected some of data.max_seq_len" in capsys.readouterr().err


def test_a_training_that_fails_is_named_and_the_others_are_kept(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    def work(of: Training) -> dict[str, Any]:
        if (of.model == "hstu" and of.options == TRIALS[3]) or (of.model == "sasrec" and of.seed == 1):
            raise RuntimeError(f"no memory for {of.model}")
        return made_up(of)

    bench.work = work
    with pytest.raises(SystemExit) as raised:
        bench.run("--device", "cuda", "--processes", "3")
    message = str(raised.value.code)
    assert f"hstu, {label(TRIALS[3])}, seed 3: RuntimeError: no memory for hstu" in message
    assert f"sasrec, {label(TRIALS[1])}, seed 1: RuntimeError: no memory for sasrec" in message
    rows = bench.saved[-1]["models"]
    counts = {name: (len(of["trials"]), len(of["seeds"])) for name, of in rows.items()}
    assert counts == {"bert4rec": (6, 3), "hstu": (5, 0), "sasrec": (6, 2)}
    # Models that are not done have no row of the test.
    printed = capsys.readouterr().out
    table = printed[printed.index("Test, seen items left in:") : printed.index("Test, seen items taken out:")]
    assert "`bert4rec`" in table
    assert "`hstu`" not in table
    assert "`sasrec`" not in table
    bench.work = made_up
    bench.run("--device", "cuda")
    assert [(of.model, of.seed) for of in bench.begun] == [("hstu", 3), *[("hstu", seed) for seed in SEEDS], ("sasrec", 1)]
