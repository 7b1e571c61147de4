"""A model of one's own on a table: from a csv file through splits and loaders to a trained and resumed run."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from torchrec.sparse.jagged_tensor import JaggedTensor

from jagged.config import TrainerConfig
from jagged.data import DataError, Dataset
from jagged.data.table_batches import Batch
from jagged.data.table_splits import Split
from jagged.metrics import WITHHELD_BECAUSE, RunMetrics
from jagged.models import Task, TaskOutput, TaskScores
from jagged.models.pretrained import load_task
from jagged.modules import JaggedPooling, JaggedSelfAttention
from jagged.training import Callback, Progress, Trainer, TrainingError
from tests.processes import told_by
from tests.test_docs import ROOT
from tests.training.two_processes import steps_of


class Clicks(Task):
    """Clicks from user, candidate, the mean of the history's items, and numbers; rows without a label count nothing."""

    def __init__(self, split: Split) -> None:
        super().__init__()
        rows = split.encoders.sizes
        # A row is a request of one candidate, which so may be pooled.
        items = table("item_id", rows, "item_id", "history.item_id")
        self.features = EmbeddingBagCollection(tables=[table("user_id", rows), table("tags", rows), items])
        self.mlp = nn.Sequential(nn.Linear(4 * 8 + 2, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, batch: Batch) -> TaskOutput:
        numbers = [batch.request_numbers, batch.request_numbers_missing.float()]
        x = torch.cat([self.features(batch.features).values(), *numbers], 1)
        logits, (labels, mask) = self.mlp(x).squeeze(1), batch.label()
        each = nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
        loss = (each * mask).sum() / mask.sum().clamp(min=1)
        return TaskOutput(loss, {"click": TaskScores(logits, labels, mask)})


def table(name: str, rows: dict[str, int], *keys: str) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(name=name, embedding_dim=8, num_embeddings=rows[name], feature_names=list(keys) or [name])


def impressions_table(directory: Path) -> Dataset:
    rng = np.random.default_rng(0)
    path = directory / "impressions.csv"
    lines = ["user_id;item_id;timestamp;tags;price;click"]
    for time in range(2_000):
        user, item = rng.integers(30), rng.integers(20)
        label = "" if rng.random() < 0.1 else int(item % 3 == 0)
        lines.append(f"u{user};i{item};{1_700_000_000 + time};a|t{item % 4};{'NA' if time % 7 == 0 else item / 2};{label}")
    path.write_text("\n".join(lines) + "\n")
    return Dataset.from_table(path, history="events", directory=directory / "impressions", progress=False)


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Split:
    found: Split = impressions_table(tmp_path_factory.mktemp("table")).split(by="time", valid=0.2, test=0.2)
    return found


def loaders(split: Split, num_workers: int = 0) -> tuple[Any, Any, Any]:
    train = split.train.loader(batch_size=64, shuffle=True, max_history=10, num_workers=num_workers)
    return train, split.valid.loader(batch_size=100, max_history=10), split.test.loader(batch_size=100, max_history=10)


def trained(split: Split, output: Path, *callbacks: Callback, resume: bool = False, num_workers: int = 0) -> Any:
    torch.manual_seed(0)
    task = Clicks(split)
    config = TrainerConfig(output=str(output), max_epochs=4, learning_rate=0.02, monitor="click/auc", device="cpu")
    result = Trainer(task, config, callbacks=callbacks).fit(*loaders(split, num_workers), resume=resume, progress=False)
    return task, result


class Stop(Callback):
    def on_step(self, progress: Progress) -> None:
        if progress.state.step == 25:
            raise KeyboardInterrupt


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_of_a_loader_are_those_of_the_part(split: Split, num_workers: int) -> None:
    order = iter(range(len(split.train)))
    for batch in split.train.loader(batch_size=300, num_workers=num_workers, max_history=3):
        expected = split.train.gather([next(order) for _ in range(len(batch))], max_history=3)
        assert (batch.candidates, batch.weighted_features) == (expected.candidates, expected.weighted_features) == (None, None)
        found, wanted = batch.features, expected.features
        assert (found.keys(), found.stride()) == (wanted.keys(), wanted.stride())
        for field in dataclasses.fields(Batch):
            values = [getattr(one, field.name) for one in (batch, expected)]
            if isinstance(values[0], torch.Tensor):
                assert torch.equal(*values)
        assert torch.equal(found.values(), wanted.values())
        assert torch.equal(found.lengths(), wanted.lengths())
    assert next(order, None) is None


def test_a_model_learns_from_a_table_and_goes_on_after_a_stop(split: Split, tmp_path: Path) -> None:
    task, result = trained(split, tmp_path / "run")
    assert result.metrics.test.click["auc"] > 0.95
    with pytest.raises(KeyboardInterrupt):
        trained(split, tmp_path / "other", Stop())
    again, resumed = trained(split, tmp_path / "other", resume=True, num_workers=2)
    assert resumed.metrics.test.click == result.metrics.test.click
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in task.state_dict().items())
    opened = load_task(tmp_path / "run", Clicks(split))
    batch = split.test.gather([0, 1, 2])
    assert torch.equal(opened.predict(batch)["click"], task.eval().predict(batch)["click"])


# Events without labels.


class Next(Task):
    """Which of a request's candidates its user takes next: user and history once a request, a score a candidate."""

    def __init__(self, split: Split) -> None:
        super().__init__()
        rows = split.encoders.sizes
        self.users = EmbeddingBagCollection(tables=[table("user_id", rows)])
        keys = ["item_id", "history.item_id"]
        items = EmbeddingConfig(name="item_id", embedding_dim=8, num_embeddings=rows["item_id"], feature_names=keys)
        self.items = EmbeddingCollection(tables=[items])
        self.pooling = JaggedPooling("sum")

    def forward(self, batch: Batch) -> TaskOutput:
        items = self.items(batch.features)
        request = self.users(batch.features).values() + self.pooling(items["history.item_id"])
        logits = (request[batch.candidate_requests] * items["item_id"].values()).sum(1)
        labels, mask = batch.label()
        each = nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
        return TaskOutput((each * mask).sum() / mask.sum().clamp(min=1), {"next": TaskScores(logits, labels, mask)})


def events_table(directory: Path) -> Dataset:
    """Users keep to items of a third of the catalogue."""
    rng = np.random.default_rng(0)
    path = directory / "events.csv"
    users, items = rng.integers(30, size=2_000), rng.integers(30, size=2_000)
    items += users % 3 - items % 3
    rows = [f"u{u},i{i},{1_700_000_000 + time}" for time, (u, i) in enumerate(zip(users, items, strict=True))]
    path.write_text("\n".join(["user_id,item_id,timestamp", *rows]) + "\n")
    return Dataset.from_table(path, history="events", directory=directory / "events", progress=False)


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> Split:
    found: Split = events_table(tmp_path_factory.mktemp("events")).split(by="time", valid=0.2, test=0.2)
    return found


def next_items(split: Split, output: Path, *callbacks: Callback, resume: bool = False, workers: int = 0, **options: Any) -> Any:
    torch.manual_seed(0)
    task = Next(split)
    parts = [
        getattr(split, name).loader(
            batch_size=64, shuffle=name == "train", max_history=10, negatives=4, by="popularity", seed=3, num_workers=workers
        )
        for name in ("train", "valid", "test")
    ]
    config = TrainerConfig(
        **{"output": str(output), "max_epochs": 3, "learning_rate": 0.05, "monitor": "auc", "device": "cpu", **options}
    )
    shown = options.pop("monitor", None) is None and not callbacks and not resume
    return task, Trainer(task, config, callbacks=callbacks).fit(*parts, resume=resume, progress=shown)


def test_a_model_learns_from_drawn_negatives_and_goes_on_after_a_stop_bit_for_bit(
    events: Split, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stopped in the middle of the second epoch, and gone on with workers."""
    task, result = next_items(events, tmp_path / "run")
    assert set(result.metrics.test) == set(result.metrics.valid) == {"sampled", "sampled_next"}
    assert set(result.metrics.test.sampled) == {"loss"}
    assert set(result.metrics.test.sampled_next) == {"auc", "logloss", "rows"}
    assert result.metrics.test.sampled_next["auc"] > 0.8
    assert result.metrics.best.group == "sampled_next"
    said = capsys.readouterr()
    assert (said.out + said.err).count(WITHHELD_BECAUSE) == 1
    assert "(next, against drawn negatives)" in said.out + said.err
    with pytest.raises(KeyError) as caught:
        result.metrics.test.sampled_next["calibration"]
    assert caught.value.args == (f"metric: got 'calibration', expected auc or logloss or rows; {WITHHELD_BECAUSE}",)
    read = RunMetrics.from_json(result.metrics.to_json())
    with pytest.raises(KeyError, match=WITHHELD_BECAUSE):
        read.test.sampled_next["ne"]
    with pytest.raises(KeyboardInterrupt):
        next_items(events, tmp_path / "other", Stop(), checkpoint_every=7)
    again, resumed = next_items(events, tmp_path / "other", resume=True, workers=2, checkpoint_every=7)
    assert resumed.metrics.test == result.metrics.test
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in task.state_dict().items())


def test_a_task_that_asks_for_labels_that_no_row_has_is_told_how_to_get_some(events: Split, tmp_path: Path) -> None:
    class Indexing(Next):
        def forward(self, batch: Batch) -> TaskOutput:
            logits = self.items(batch.features)["item_id"].values().sum(1)
            loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels[:, 0])
            return TaskOutput(loss, {"next": TaskScores(logits, batch.labels[:, 0])})

    cure = (
        "batch: found a table without labels, and no negatives, expected the label 0; "
        'name one when the table is read (label="click"), or give the loader negatives=n'
    )
    batches = [events.train.loader(batch_size=64), events.valid.loader(batch_size=64)]
    assert next(iter(batches[0])).labels.shape == (64, 0)
    config = TrainerConfig(output=str(tmp_path / "run"), max_epochs=1, monitor="next/auc", device="cpu")
    with pytest.raises(DataError) as refused:
        Trainer(Next(events), config).fit(*batches, progress=False)
    assert str(refused.value) == cure
    task = Indexing(events)
    for run in (
        lambda: Trainer(task, config.model_copy(update={"output": str(tmp_path / "other")})).fit(*batches, progress=False),
        lambda: task.evaluate(batches[1], "valid", progress=False),
        lambda: task.predict(events.valid.gather([0])),
    ):
        with pytest.raises(IndexError) as caught:
            run()
        assert str(caught.value) == "index 0 is out of bounds for dimension 1 with size 0"
        assert caught.value.__notes__ == [cure]

    class OutOfRange(Next):
        def forward(self, batch: Batch) -> TaskOutput:
            return TaskOutput(batch.labels[:, 1], {})

    # Where there is a label it is not for want of one.
    with pytest.raises(IndexError) as caught:
        OutOfRange(events).predict(events.valid.gather([0], negatives=2))
    assert not hasattr(caught.value, "__notes__")


def test_epochs_have_negatives_of_their_own_and_validations_the_same(events: Split, tmp_path: Path) -> None:
    seen: dict[str, list[Any]] = {"train": [], "valid": []}

    class Looking(Next):
        def forward(self, batch: Batch) -> TaskOutput:
            offsets, values = batch.candidate_offsets, batch.candidate_ids("item_id")
            for place, row in enumerate(batch.request_index.tolist()):
                candidates = values[offsets[place] : offsets[place + 1]].tolist()
                seen["train" if self.training else "valid"].append((row, candidates))
            return super().forward(batch)

    parts = (events.train.loader(batch_size=64, shuffle=True, negatives=3), events.valid.loader(batch_size=64, negatives=3))
    config = TrainerConfig(output=str(tmp_path / "run"), max_epochs=2, monitor="auc", device="cpu")
    Trainer(Looking(events), config).fit(*parts, progress=False)
    for name, part in (("train", events.train), ("valid", events.valid)):
        assert len(seen[name]) == 2 * len(part)
        epochs = [dict(seen[name][: len(part)]), dict(seen[name][len(part) :])]
        for epoch, found in enumerate(epochs):
            batch = part.gather(range(len(part)), negatives=3, epoch=epoch)
            wanted = [one.tolist() for one in batch.candidate_ids("item_id").tensor_split(batch.candidate_offsets[1:-1])]
            assert [found[row] for row in batch.request_index.tolist()] == wanted
        assert (epochs[0] == epochs[1]) == (name == "valid")


def test_a_monitor_that_drawn_negatives_have_not_is_refused(events: Split, tmp_path: Path) -> None:
    with pytest.raises(TrainingError) as caught:
        next_items(events, tmp_path / "run", monitor="sampled_next/calibration")
    line = str(caught.value).partition("; the last checkpoint")[0]
    names = "sampled/loss, sampled_next/auc, sampled_next/logloss, sampled_next/rows"
    assert line == f"monitor: got 'sampled_next/calibration', expected one of {names}; {WITHHELD_BECAUSE}"


def test_figures_say_sampled_wherever_a_batch_is(events: Split) -> None:
    """Also where batches are part of something else, or only some of them are drawn; and never without draws."""

    class Inside(Next):
        def forward(self, batch: Any) -> TaskOutput:
            return super().forward(batch["batch"])

    torch.manual_seed(0)
    task = Inside(events)
    found = [{"batch": batch} for batch in events.valid.loader(batch_size=100, negatives=2)]
    figures = task.evaluate(found, "valid", progress=False)
    assert list(figures) == ["sampled", "sampled_next"]
    logits = task.predict(found[0])["next"].logit()
    assert len(logits) == len(found[0]["batch"].labels)
    plain = [{"batch": dataclasses.replace(one["batch"], sampled=False)} for one in found]
    assert list(task.evaluate(plain, "valid", progress=False)) == ["all", "next"]
    assert list(task.evaluate([*plain[:-1], found[-1]], "valid", progress=False)) == ["sampled", "sampled_next"]


@pytest.mark.parametrize("name", ["all", "sampled", "sampled_next"])
def test_a_task_of_a_name_that_means_something_else_is_refused(events: Split, name: str) -> None:
    class Named(Next):
        def forward(self, batch: Batch) -> TaskOutput:
            loss, scores = super().forward(batch)
            return TaskOutput(loss, {name: scores["next"]})

    with pytest.raises(ValueError) as error:  # noqa: PT011 - the whole message is compared
        Named(events).evaluate(events.valid.loader(batch_size=100, negatives=2), "valid", progress=False)
    assert str(error.value) == (
        f"task: got the name '{name}', expected another: 'all' is the group of the loss, 'sampled' and names that begin with "
        "'sampled_' are of figures over drawn negatives"
    )


# TorchRec's collections break the graph, where Dynamo looks at the `grad` of what is no leaf.
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_requests_with_drawn_candidates_are_compiled_and_cast(events: Split) -> None:
    model = Next(events)

    def scores(batch: Batch) -> torch.Tensor:
        return model(batch).scores["next"].logits

    torch.compiler.reset()
    compiled = torch.compile(scores, backend="aot_eager")
    # Of other numbers of rows and candidates, and without any candidate to draw.
    for rows, negatives in ((range(400, 440), 4), (range(500, 507), 2), (range(1), 4)):
        batch = events.train.gather(rows, negatives=negatives, seed=1)
        torch.testing.assert_close(compiled(batch), scores(batch))
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(compiled(batch), scores(batch))


class OfFields(nn.Module):
    """A model of batches, as `torch.export` takes it: of the batch's fields."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, fields: dict[str, Any]) -> torch.Tensor:
        scores: torch.Tensor = self.model(Batch(**fields))
        return scores


class Timed(nn.Module):
    """The next item of a history by attention that sees the times between its events."""

    def __init__(self, split: Split) -> None:
        super().__init__()
        self.items = nn.Embedding(split.encoders.sizes["item_id"], 8)
        self.attention = JaggedSelfAttention(8, num_heads=2, num_time_buckets=32)
        self.pooling = JaggedPooling("mean")

    def forward(self, batch: Batch) -> torch.Tensor:
        history = batch.features["history.item_id"]
        x = JaggedTensor(self.items(history.values()), offsets=history.offsets())
        request = self.pooling(self.attention(x, times=batch.history_times))
        return (request[batch.candidate_requests] * self.items(batch.candidate_ids("item_id"))).sum(1)


def fields_of(batch: Batch) -> dict[str, Any]:
    return {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}


@pytest.mark.parametrize("strict", [True, False])
def test_a_model_of_times_and_candidates_is_exported_for_all_sizes(events: Split, strict: bool) -> None:
    torch.manual_seed(0)
    model = Timed(events).eval()
    given = [
        events.train.gather(range(400, 410), negatives=4),
        events.valid.gather(range(7), negatives=2, max_history=5),
        # Nothing to draw from, and histories that are empty; of two rows, and of one.
        events.train.gather(range(2), negatives=4),
        events.train.gather(range(1), negatives=4),
    ]
    sizes = torch.export.AdditionalInputs()
    for batch in given[:2]:
        sizes.add((fields_of(batch),))
    # Else torch.export takes sizes of 0 and 1 for special.
    with torch.fx.experimental._config.patch(backed_size_oblivious=True):
        exported = torch.export.export(OfFields(model), (fields_of(given[0]),), dynamic_shapes=sizes, strict=strict).module()
    for batch in given:
        expected = model(batch)
        assert len(expected) == len(batch.labels)
        torch.testing.assert_close(exported(fields_of(batch)), expected, rtol=0, atol=0)
    shifted = dataclasses.replace(given[0], history_times=given[0].history_times // 50)
    assert not torch.equal(exported(fields_of(shifted)), model(given[0]))
    torch.testing.assert_close(exported(fields_of(shifted)), model(shifted), rtol=0, atol=0)


UNPICKLED = """
import pickle, sys, torchrec
from torchrec.streamable import Pipelineable
batch = pickle.load(open(sys.argv[1], "rb"))
assert isinstance(batch, Pipelineable)
print(len(batch), batch.features.values().tolist())
"""


def test_a_batch_from_another_process_is_one_for_pipelines(events: Split, tmp_path: Path) -> None:
    batch = events.valid.gather(range(3), negatives=2)
    (tmp_path / "batch").write_bytes(pickle.dumps(batch))
    command = [sys.executable, "-W", "ignore", "-c", UNPICKLED, str(tmp_path / "batch")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, f"3 {batch.features.values().tolist()}\n"), done.stderr[-2_000:]


# Two processes.


@pytest.mark.parametrize("name", ["clicks", "next", "ranking"])
def test_two_processes_train_on_a_table_as_one_does(processes: dict[str, Any], name: str) -> None:
    found = processes[name]
    # A step is 2e-2; the sums are in another order. Errors of deeper models grow more.
    limit = 1e-3 if name == "ranking" else 1e-4
    assert found["distance"] < limit
    one, *two = found["figures"]
    for figures in two:
        assert figures["test"].keys() == one["test"].keys()
        for group, of in one["test"].items():
            assert figures["test"][group] == pytest.approx(of, rel=limit)


def test_a_run_on_a_table_goes_on_with_any_number_of_processes(processes: dict[str, Any]) -> None:
    """With batches as large in each of them, so that the rest of the run has other steps."""
    whole, others = processes["never stopped"], processes["others"]
    assert [len(part) for part in others["kept"]] == [1, 2, 4, 1]
    for epoch in range(2):
        once = sorted(row for of, rows in steps_of(whole["kept"]) if of == epoch for row in rows)
        assert sorted(row for of, rows in steps_of(others["kept"]) if of == epoch for row in rows) == once == sorted(set(once))
    assert [len(rows) for of, rows in steps_of(others["kept"]) if of == 1] == [64] * 6 + [128, 256] + [64] * 6 + [48]
    assert [part[0]["loaded"] for part in others["kept"]] == [[], [True], [True], [True]]
    # The rate has no jump, and ends at 0.
    rates = [part[0]["rates"] for part in others["kept"]]
    for before, after in itertools.pairwise(rates):
        assert after[0] == pytest.approx(before[-1], abs=2e-5)
    assert rates[-1][-1] == 0
    ends = [run["history"][-1] for run in (whole, others)]
    assert ends[1]["loss"] == pytest.approx(ends[0]["loss"], rel=0.02)
    assert ends[1]["valid"]["click"]["logloss"] == pytest.approx(ends[0]["valid"]["click"]["logloss"], rel=0.01)


def test_processes_that_would_have_no_request_are_refused(processes: dict[str, Any]) -> None:
    line = (
        "ROOT/few/checkpoints/step-00000001: epoch 1 has 3 samples left, too few for a batch in each of 4 processes; start fewer"
    )
    assert processes["too few"] == [line] * 4


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = told_by("tests.training.table_processes", tmp_path_factory.mktemp("processes"))
    return found
