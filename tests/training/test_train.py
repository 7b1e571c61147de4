"""Whole runs: what they leave, that they repeat, that they stop and go on as if nothing had been."""

from __future__ import annotations

import gc
import json
import multiprocessing
import resource
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from jagged.data import SequenceDataset, split_leave_one_out
from jagged.metrics import RunMetrics
from jagged.models.pretrained import from_pretrained
from jagged.runs.evaluating import evaluate
from jagged.runs.recommending import Recommender
from jagged.runs.reporting import gather
from jagged.runs.summary import summary_lines
from jagged.runs.training import train
from jagged.training import CheckpointError, TrainingError, TrainingInterrupted, loop
from jagged.training import checkpoint as checkpoints
from jagged.training.loop import Loop
from tests.training.support import STEPS_PER_EPOCH, at_step, kill_self, outcome, run, tiny_config, tiny_dataset
from tests.training.table_runs import shop_file, train_table


@pytest.fixture(scope="module")
def dataset() -> SequenceDataset:
    return tiny_dataset()


@pytest.fixture(scope="module")
def undisturbed(dataset: SequenceDataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("undisturbed") / "run"
    run(directory, dataset)
    return directory


def names(directory: Path) -> list[str]:
    return [path.name for path in checkpoints.list_checkpoints(directory / "checkpoints")]


def test_leaves_a_directory_that_stands_alone(dataset: SequenceDataset, tmp_path: Path) -> None:
    result = run(tmp_path / "run", dataset, tensorboard=True)
    assert result.directory == tmp_path / "run"
    assert (result.epochs, result.steps) == (3, 3 * STEPS_PER_EPOCH)
    listed = set(json.loads((result.directory / "manifest.json").read_text())["files"])
    assert listed == {
        "model.safetensors", "model.json", "config.json", "items.arrow", "split.json", "metrics.json", "train_counts.safetensors",
        "history.jsonl",
    }  # fmt: skip
    assert list((result.directory / "tensorboard").iterdir())
    metrics = json.loads((result.directory / "metrics.json").read_text())
    assert metrics == result.metrics.to_json()
    assert set(metrics["test"]) == {"all_items", "unseen_items"}
    assert set(metrics["valid"]) == {"all_items"}
    best = max(result.history, key=lambda row: row["monitored"])
    assert metrics["best"]["value"] == best["monitored"] == result.best_metric
    assert result.metrics.valid.all_items["mrr@5"] == best["valid"]["all_items"]["mrr@5"]
    assert metrics["best"] == {"epoch": best["epoch"], "step": best["step"], "value": best["monitored"], "group": "all_items"}
    assert [json.loads(line) for line in (result.directory / "history.jsonl").read_text().splitlines()] == result.history
    config = json.loads((result.directory / "config.json").read_text())
    assert (config["precision"], config["device"], config["model"]["embedding_dim"]) == ("32-true", "cpu", 8)
    assert SequenceDataset.load(result.directory / "dataset").fingerprint == dataset.fingerprint
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".pt", ".metadata", ".tmp")]


def test_a_model_has_the_items_of_training_alone(
    dataset: SequenceDataset, undisturbed: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names, offsets = dataset.items.ids.to_pylist(), dataset.offsets.tolist()
    users = [[names[item] for item in dataset.item_ids[first:last].tolist()] for first, last in pairwise(offsets)]
    trained = {item for user in users for item in user[:-2]}
    catalogue = [name for name in names if name in trained]
    opened = from_pretrained(undisturbed)
    assert opened.items.ids.to_pylist() == catalogue
    assert len(opened.model.item_weight) == len(catalogue) < len(names)

    def unknown(position: int) -> dict[str, int]:
        return {
            "unknown_items": len(names) - len(catalogue),
            "unknown_targets": sum(user[position] not in trained for user in users),
            "unknown_history_events": sum(item not in trained for user in users for item in user[:position]),
        }

    assert opened.split["unknown"] == {"valid": unknown(-2), "test": unknown(-1)}
    assert (opened.split["items"], opened.split["notes"]["items_unseen_in_training"]) == (90, len(names) - len(catalogue))
    # What was trained is what is evaluated, and recommended from, afterwards.
    evaluation = evaluate(undisturbed)
    assert evaluation.notes.items() >= unknown(-1).items()
    assert evaluation.metrics == RunMetrics.from_json(opened.metrics).test
    table = Recommender.from_pretrained(undisturbed).recommend(dataset, k=3)
    assert set(table["item_id"].to_pylist()) <= trained
    left_out = sum(item not in trained for user in users for item in user)
    assert f"{left_out} events of items that the model does not know were left out of the histories" in caplog.messages
    assert f"{len(names) - len(catalogue)} items have no training event" in summary_lines(undisturbed)[1]


def test_a_checkpoint_of_a_model_with_more_items_is_refused(
    dataset: SequenceDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jagged.runs import training

    honest = training.split_events
    with monkeypatch.context() as patch:
        # As versions before this one did.
        patch.setattr(training, "split_events", lambda *arguments: honest(*arguments).numbered(None))
        run(tmp_path, dataset, max_epochs=1)
    # Such a run can be used, and says of its vocabulary what is wrong with it.
    assert "unknown_items" not in evaluate(tmp_path).notes
    assert gather(tmp_path, progress=False).leaks["unsupported_items"] == 5
    with pytest.raises(CheckpointError) as error:
        run(tmp_path, dataset, max_epochs=1, resume=True)
    assert str(error.value) == (
        "the checkpoint does not fit the model: model.item_embeddings.embeddings.item_id.weight: 90 rows, expected 85; "
        "train anew into another output"
    )


def test_the_best_weights_are_kept(dataset: SequenceDataset, tmp_path: Path) -> None:
    # The second epoch's rate is absurd, so the first epoch's weights are the best.
    result = run(tmp_path, dataset, max_epochs=6, patience=2, learning_rate=0.02, monitor="mrr@7")
    best = result.metrics.best.epoch
    values = [row["valid"]["all_items"]["mrr@7"] for row in result.history]
    assert best == values.index(max(values)) + 1
    assert len(values) == min(6, best + 2)
    tensors, _ = checkpoints.load_checkpoint(checkpoints.list_checkpoints(tmp_path / "checkpoints")[-1])
    for name, value in from_pretrained(tmp_path).model.state_dict().items():
        assert torch.equal(value, tensors[f"best.model.{name}"])
    same = all(
        torch.equal(value, tensors[f"task.{name.removeprefix('best.')}"]) for name, value in tensors.items() if "best." in name
    )
    assert same == (best == len(values))
    assert len(names(tmp_path)) == 2


def test_a_run_leaves_nothing_in_memory(dataset: SequenceDataset, tmp_path: Path) -> None:
    """A second model in one notebook needs no more than the first."""

    def alive() -> int:
        gc.collect()
        # By type: asking some of torch's deprecated objects for their class is a warning.
        return sum(issubclass(type(thing), torch.Tensor) and thing.is_floating_point() for thing in gc.get_objects())

    run(tmp_path / "first", dataset)
    before = alive()
    run(tmp_path / "second", dataset)
    assert alive() <= before


@pytest.mark.parametrize(("seconds", "written"), [(0.0, [1, 2, 3]), (1e6, [3])])
def test_short_epochs_share_a_checkpoint(
    dataset: SequenceDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, written: list[int]
) -> None:
    saved = []
    original = loop.save_checkpoint
    monkeypatch.setattr(loop, "save_checkpoint", lambda root, name, *rest: (saved.append(name), original(root, name, *rest)))
    run(tmp_path, dataset, checkpoint_seconds=seconds)
    assert saved == [f"step-{epoch * STEPS_PER_EPOCH:08d}" for epoch in written]


def test_the_best_weights_survive_an_interruption(
    dataset: SequenceDataset, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without checkpoints after epochs the best weights so far travel in the one that the signal writes."""
    with monkeypatch.context() as patch:
        at_step(patch, 13, kill_self(signal.SIGTERM))
        with pytest.raises(TrainingInterrupted):
            run(tmp_path, dataset, checkpoint_seconds=1e6)
    assert names(tmp_path) == ["step-00000013"]
    run(tmp_path, dataset, resume=True, checkpoint_seconds=1e6)
    assert outcome(tmp_path) == outcome(undisturbed)


def test_a_seed_gives_the_same_weights_and_another_seed_others(
    dataset: SequenceDataset, undisturbed: Path, tmp_path: Path
) -> None:
    run(tmp_path / "again", dataset, checkpoint_every=2, num_workers=2, tensorboard=True)
    assert multiprocessing.active_children() == []
    assert outcome(tmp_path / "again") == outcome(undisturbed)
    run(tmp_path / "other", dataset, seed=1)
    assert outcome(tmp_path / "other")["weights"] != outcome(undisturbed)["weights"]


@pytest.mark.parametrize(
    ("step", "number", "workers"), [(1, signal.SIGTERM, 2), (5, signal.SIGTERM, 0), (8, signal.SIGINT, 0), (13, signal.SIGINT, 2)]
)
def test_a_signal_stops_after_the_step_and_resuming_changes_nothing(
    dataset: SequenceDataset,
    undisturbed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: int,
    number: int,
    workers: int,
) -> None:
    with monkeypatch.context() as patch:
        at_step(patch, step, kill_self(number))
        with pytest.raises(TrainingInterrupted, match=f"after step {step}; a checkpoint is in") as caught:
            run(tmp_path, dataset, num_workers=workers)
    assert caught.value.exit_code == 128 + number
    assert names(tmp_path)[-1] == f"step-{step:08d}"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert multiprocessing.active_children() == []
    result = run(tmp_path, dataset, resume=True, num_workers=2 - workers)
    assert result.steps == 3 * STEPS_PER_EPOCH
    assert outcome(tmp_path) == outcome(undisturbed)


def test_a_signal_in_validation_or_in_the_test(
    dataset: SequenceDataset, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(method: str) -> None:
        original = getattr(Loop, method)

        def wrapper(self: Loop, *arguments: Any) -> Any:
            kill_self(signal.SIGTERM)(None)
            return original(self, *arguments)

        monkeypatch.setattr(Loop, method, wrapper)

    for method in ("_validate", "test"):
        with monkeypatch.context():
            interrupt(method)
            with pytest.raises(TrainingInterrupted, match="resume"):
                run(tmp_path, dataset, resume=True)
            monkeypatch.undo()
    run(tmp_path, dataset, resume=True)
    assert outcome(tmp_path) == outcome(undisturbed)


def test_a_finished_run_can_be_finished_again_and_trained_longer(
    dataset: SequenceDataset, undisturbed: Path, tmp_path: Path
) -> None:
    run(tmp_path, dataset, max_epochs=2)
    first = outcome(tmp_path)
    # As if it had been killed between its last checkpoint and the log.
    history = (tmp_path / "history.jsonl").read_text()
    (tmp_path / "history.jsonl").write_text(history[: history.index("\n") + 1])
    run(tmp_path, dataset, max_epochs=2, resume=True)
    assert outcome(tmp_path) == first
    run(tmp_path, dataset, max_epochs=3, resume=True)
    assert outcome(tmp_path) == outcome(undisturbed)
    assert from_pretrained(tmp_path).config.training.max_epochs == 3  # type: ignore[union-attr]


def test_refuses_what_would_not_be_the_same_run(dataset: SequenceDataset, tmp_path: Path) -> None:
    run(tmp_path, dataset, max_epochs=1)
    with pytest.raises(TrainingError, match="not empty; resume to go on"):
        run(tmp_path, dataset)
    with pytest.raises(
        TrainingError, match=r"other options: model\.embedding_dim=16 \(was 8\), model\.dropout=0\.1 \(was 0\.2\)"
    ):
        run(tmp_path, dataset, resume=True, embedding_dim=16, dropout=0.1)
    (tmp_path / "dataset").rename(tmp_path / "kept")
    with pytest.raises(TrainingError, match="was trained on other data"):
        run(tmp_path, tiny_dataset(1), resume=True)
    (tmp_path / "file").touch()
    with pytest.raises(TrainingError, match="is a file, expected a directory"):
        run(tmp_path / "file", dataset)


@pytest.mark.parametrize("is_of_table", [False, True])
def test_one_run_at_a_time(dataset: SequenceDataset, tmp_path: Path, is_of_table: bool) -> None:
    import fcntl
    import os

    def start() -> None:
        if is_of_table:
            train_table(tmp_path / "run", shop_file(tmp_path / "shop.csv"), training={"max_epochs": 1})
        else:
            run(tmp_path / "run", dataset, max_epochs=1)

    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").touch()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        with open(tmp_path / "run" / ".lock", "r+") as file:
            fcntl.lockf(file, fcntl.LOCK_EX)
            os.write(write, b"x")
            signal.pause()
    try:
        os.read(read, 1)
        with pytest.raises(TrainingError) as error:
            start()
        assert str(error.value) == (
            f"output: another process is training in {tmp_path}/run; wait for it or choose another output"
        )
        assert os.listdir(tmp_path / "run") == [".lock"]
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(read)
        os.close(write)
    start()


def test_a_loss_that_is_nan_ends_the_run_and_spoils_no_checkpoint(
    dataset: SequenceDataset, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(engine: Any) -> None:
        with torch.no_grad():
            engine.task.model.norm.weight[0] = float("nan")

    with monkeypatch.context() as patch:
        at_step(patch, 7, spoil)
        with pytest.raises(
            TrainingError, match=r"the loss is NaN or infinite at step 8, epoch 2; the last checkpoint, .*step-00000005, is whole"
        ):
            run(tmp_path, dataset)
    assert names(tmp_path) == ["step-00000005"]
    run(tmp_path, dataset, resume=True)
    assert outcome(tmp_path) == outcome(undisturbed)


def test_weights_that_are_nan_are_not_checkpointed(
    dataset: SequenceDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(engine: Any) -> None:
        with torch.no_grad():
            engine.task.model.norm.weight[0] = float("inf")

    at_step(monkeypatch, 2, spoil)
    with pytest.raises(TrainingError, match="a weight is NaN or infinite at step 2, epoch 1; there is no checkpoint yet"):
        run(tmp_path, dataset, checkpoint_every=2)
    assert names(tmp_path) == []


def test_a_diverging_run_is_named(dataset: SequenceDataset, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"lower learning_rate \(now 1e\+30\)"):
        run(tmp_path, dataset, learning_rate=1e30, max_epochs=20)


@pytest.mark.parametrize("limit", [0, 2_000, 20_000])
def test_a_full_disk_is_named_and_the_last_checkpoint_whole(
    dataset: SequenceDataset, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(_: Any) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))

    try:
        with monkeypatch.context() as patch:
            at_step(patch, 8, fill)
            with pytest.raises(
                CheckpointError, match=r"step-00000010: could not be written: File too large; .* make room and resume"
            ):
                run(tmp_path, dataset)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000005"]
    checkpoints.verify_checkpoint(tmp_path / "checkpoints" / "step-00000005")
    run(tmp_path, dataset, resume=True)
    assert outcome(tmp_path) == outcome(undisturbed)


def test_a_damaged_newest_checkpoint_is_not_passed_over(dataset: SequenceDataset, undisturbed: Path, tmp_path: Path) -> None:
    run(tmp_path, dataset)
    newest = checkpoints.list_checkpoints(tmp_path / "checkpoints")[-1]
    file = next(newest.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=rf"{file.name}: damaged: .*; delete {newest} to go on from step-00000010"):
        run(tmp_path, dataset, resume=True)
    for entry in newest.iterdir():
        entry.unlink()
    newest.rmdir()
    run(tmp_path, dataset, resume=True)
    assert outcome(tmp_path) == outcome(undisturbed)


def test_a_dry_run_writes_nothing(dataset: SequenceDataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = train(tiny_config(tmp_path / "run"), dataset, dry_run=True)
    printed = capsys.readouterr().out
    for expected in ("forecast", f"{STEPS_PER_EPOCH} steps an epoch", "at most 15 steps"):
        assert expected in printed
    assert (result.steps, result.metrics, result.history) == (0, RunMetrics(), [])
    assert list(tmp_path.iterdir()) == []


def test_says_what_it_does(dataset: SequenceDataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tiny_config(tmp_path, max_epochs=1), dataset)
    captured = capsys.readouterr()
    for expected in ("peak about", "epoch 1: loss ", "validation ndcg@10", "(seen items left in)"):
        assert expected in captured.out
    for expected in ("loss", "samples/s", "tokens/s", "GiB"):
        assert expected in captured.err


def test_token_budget_warm_up_and_filtering(dataset: SequenceDataset, tmp_path: Path) -> None:
    result = run(
        tmp_path,
        dataset,
        max_tokens=40,
        warmup_steps=100,
        filter_viewed=True,
        split="global-time",
        gradient_clip_norm=None,
        max_epochs=1,
    )
    assert result.steps > STEPS_PER_EPOCH
    assert result.history[0]["learning_rate"] == pytest.approx(1e-3 * (result.steps + 1) / 100)
    assert result.history[0]["gradient_norm"] is None
    assert set(result.metrics.valid) == {"unseen_items"}


def test_too_little_data_is_refused(tmp_path: Path) -> None:
    from jagged.data import read_events

    (tmp_path / "events.txt").write_text("1 10 11\n2 10 12\n")
    with pytest.raises(TrainingError, match="no user has events for validation under the leave-one-out split"):
        run(tmp_path / "run", read_events(tmp_path / "events.txt", progress=False))


def test_a_model_that_no_memory_holds_is_named(dataset: SequenceDataset, tmp_path: Path) -> None:
    size, num_items = 2**40, split_leave_one_out(dataset).train.num_items
    with pytest.raises(TrainingError) as caught:
        run(tmp_path, dataset, embedding_dim=size)
    assert str(caught.value) == (
        f"model: does not fit into memory with num_items={num_items}, embedding_dim={size}, num_heads=2, num_layers=1, "
        "dropout=0.2, positions=end, max_seq_len=12; make it smaller"
    )


def test_reads_the_data_it_is_told(tmp_path: Path) -> None:
    lines = [f"{user} " + " ".join(str(10 + (user * 7 + k * 3) % 23) for k in range(6)) for user in range(30)]
    (tmp_path / "events.txt").write_text("\n".join(lines) + "\n")
    config = tiny_config(tmp_path / "run", data=str(tmp_path / "events.txt"), max_epochs=1)
    assert train(config, progress=False).steps == 4
    opened = from_pretrained(tmp_path / "run")
    assert opened.items.ids.to_pylist() == sorted(range(10, 33)) or set(opened.items.ids.to_pylist()) == set(range(10, 33))


class Frame:
    """A frame of a library that is not known here: it has the Arrow stream, and nothing else."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self.table.__arrow_c_stream__(requested_schema)


def test_an_epoch_from_a_frame_and_from_a_parquet_folder_with_more_columns(tmp_path: Path) -> None:
    events = [(user, 10 + (user * 7 + k * 3) % 23, k) for user in range(30) for k in range(6)]
    users, items, times = zip(*events, strict=True)
    table = pa.table({"user_id": users, "price": [0.5] * 180, "item_id": items, "category": ["a"] * 180, "timestamp": times})
    for number in range(3):
        folder = tmp_path / "events" / f"day={number}"
        folder.mkdir(parents=True)
        pq.write_table(table.slice(60 * number, 60), folder / "part-0.parquet")
    (tmp_path / "events" / "README.md").touch()
    before = table.to_pydict()
    # A seed of its own for each place would hide a difference of the data.
    config = {name: tiny_config(tmp_path / name, max_epochs=1) for name in ("frame", "folder", "recommender")}
    assert train(config["frame"], Frame(table), progress=False).steps == 4
    assert train(config["folder"], tmp_path / "events", progress=False).steps == 4
    assert Recommender(config["recommender"]).fit(Frame(table)).recommend(Frame(table), k=2).num_rows == 60
    assert table.to_pydict() == before
    assert outcome(tmp_path / "frame") == outcome(tmp_path / "folder") == outcome(tmp_path / "recommender")
    notes = SequenceDataset.load(tmp_path / "folder" / "dataset").notes
    assert notes["columns_not_used"] == ["price", "category", "day"]
    assert summary_lines(tmp_path / "folder")[1:3] == [
        "         columns not used: price, category, day",
        "         files not read: README.md: no suffix of a table (.md)",
    ]
    figures = evaluate(tmp_path / "frame", Frame(table), progress=False)
    assert figures.same_data
    assert figures.metrics == evaluate(tmp_path / "frame", progress=False).metrics


def test_the_options_of_reading_reach_the_reader(tmp_path: Path) -> None:
    rows = [f"{user},{10 + (user * 7 + k * 3) % 23},{k}" for user in range(30) for k in range(6)]
    path = tmp_path / "events.csv"
    path.write_text("\n".join(["user_id,item_id,timestamp", *rows, rows[0], "99,10,1", "1,10,soon", ""]))
    options = {"data": str(path), "min_events": 2, "on_error": "skip", "duplicates": "drop", "max_epochs": 1}
    train(tiny_config(tmp_path / "run", **options), progress=False)
    assert SequenceDataset.load(tmp_path / "run" / "dataset").notes == {
        "duplicate_users": 0,
        "empty_users": 0,
        "skipped_rows": 1,
        "skipped_rows_first": [f"{path}:184: found the time 'soon', expected a whole number or an ISO 8601 time"],
        "dropped_duplicates": 1,
        "events_below_min_events": 1,
        "users_below_min_events": 1,
    }
