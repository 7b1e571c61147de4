"""SASRec with the times of events: from a table through training to figures and recommendations, and what has no times."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pa_csv
import pytest
import torch
from torchrec import KeyedJaggedTensor
from torchrec.fx import Tracer

import jagged
from jagged.config import ConfigError
from jagged.data import SequenceDataset, read_events
from jagged.models import SASRec
from jagged.models.pretrained import from_pretrained
from jagged.runs import Run
from jagged.runs.recommending import Recommender
from jagged.runs.training import train
from jagged.training import TrainingError
from tests.training.support import run, tiny_config, tiny_dataset

BUCKETS = 48


@pytest.fixture(scope="module")
def dataset() -> SequenceDataset:
    return tiny_dataset()


@pytest.fixture(scope="module")
def trained(dataset: SequenceDataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("times") / "run", dataset, num_time_buckets=BUCKETS).directory


def without_times(dataset: SequenceDataset, root: Path) -> Path:
    lines = [
        " ".join([f"u{user}", *(str(dataset.items.ids[int(item)]) for item in dataset.item_ids[first:last])])
        for user, (first, last) in enumerate(zip(dataset.offsets[:-1], dataset.offsets[1:], strict=True))
    ]
    (root / "events.txt").write_text("\n".join(lines) + "\n")
    return root / "events.txt"


def test_the_biases_of_times_are_trained_and_kept(trained: Path) -> None:
    biases = {name: value for name, value in from_pretrained(trained).model.state_dict().items() if "time_bias" in name}
    assert [tuple(value.shape) for value in biases.values()] == [(2, BUCKETS)]
    fresh = train(tiny_config(trained.parent / "once", num_time_buckets=BUCKETS, max_epochs=1), tiny_dataset(), progress=False)
    (earlier,) = (value for name, value in from_pretrained(fresh.directory).model.state_dict().items() if "time_bias" in name)
    assert not torch.equal(*biases.values(), earlier)


def test_figures_are_those_of_the_run_and_need_the_times(trained: Path, dataset: SequenceDataset) -> None:
    kept = jagged.evaluate(trained, device="cpu", progress=False)
    stored = from_pretrained(trained).metrics["test"]
    assert kept.metrics["all_items"]["ndcg@10"] == stored["all_items"]["ndcg@10"]
    shifted = tiny_dataset()
    shifted.timestamps = shifted.timestamps * 1_000  # type: ignore[operator]
    other = jagged.evaluate(trained, shifted, device="cpu", progress=False)
    assert other.metrics["all_items"] != kept.metrics["all_items"]


def test_users_get_the_same_by_id_and_by_dataset(trained: Path, dataset: SequenceDataset) -> None:
    recommender = Recommender.from_pretrained(trained, device="cpu")
    whole = recommender.recommend(dataset, k=3)
    chosen = [dataset.users.ids[i].as_py() for i in (5, 0)]
    some = recommender.recommend(chosen, k=3)
    for user in chosen:
        expected = [row["item_id"] for row in whole.to_pylist() if row["user_id"] == user]
        assert [row["item_id"] for row in some.to_pylist() if row["user_id"] == user] == expected


def test_recommendations_are_of_the_models_own_hidden_states(trained: Path, dataset: SequenceDataset) -> None:
    from jagged.data.batches import features_of

    opened = Run.open(trained, device="cpu")
    model, rows = opened.model, torch.arange(int(dataset.offsets[3]), int(dataset.offsets[4]))
    items = torch.from_numpy(opened.items.encode(dataset.items.decode(dataset.item_ids[rows])))
    # Items of held-out events alone are none of the model's.
    rows, items = rows[items >= 0][-12:], items[items >= 0][-12:]
    times = dataset.timestamps[rows]  # type: ignore[index]
    hidden = model.final_hidden(features_of(items, torch.tensor([len(items)]), {"timestamp": times}))
    best = int((hidden @ model.item_weight.T).argmax())
    user = dataset.users.ids[3].as_py()
    table = Recommender.from_pretrained(trained, device="cpu").recommend([user], k=1, filter_viewed=False)
    assert table["item_id"].to_pylist() == [opened.items.ids[best].as_py()]


def test_a_table_with_calendar_times_trains_too(dataset: SequenceDataset, tmp_path: Path) -> None:
    owner = torch.repeat_interleave(torch.arange(dataset.num_users), dataset.lengths)
    times = pa.array((dataset.timestamps * 1_000_000).numpy()).cast(pa.timestamp("us"))  # type: ignore[operator]
    table = pa.table({"user_id": owner.numpy(), "item_id": dataset.items.decode(dataset.item_ids), "timestamp": times})
    pa_csv.write_csv(table, tmp_path / "events.csv")
    by_calendar = run(tmp_path / "a", read_events(tmp_path / "events.csv", progress=False), num_time_buckets=BUCKETS)
    numbers = table.set_column(2, "timestamp", pa.array(dataset.timestamps.numpy()))  # type: ignore[union-attr]
    pa_csv.write_csv(numbers, tmp_path / "numbers.csv")
    by_number = run(tmp_path / "b", read_events(tmp_path / "numbers.csv", progress=False), num_time_buckets=BUCKETS)
    first, second = (from_pretrained(one.directory).model.state_dict() for one in (by_calendar, by_number))
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_events_without_times_are_refused(trained: Path, dataset: SequenceDataset, tmp_path: Path) -> None:
    path = without_times(dataset, tmp_path)
    events: Any = read_events(path, progress=False)
    with pytest.raises(TrainingError) as refused:
        run(tmp_path / "run", events, num_time_buckets=BUCKETS)
    assert str(refused.value) == (
        "model.num_time_buckets: the events have no times; read a table with a time column, or train without time buckets"
    )
    message = f"{trained}: the model takes times, and the events have none; read a table with a time column"
    for use in (
        lambda: jagged.evaluate(trained, events, device="cpu", progress=False),
        lambda: jagged.recommend(trained, path, device="cpu", progress=False),
    ):
        with pytest.raises(ConfigError) as error:
            use()
        assert str(error.value) == message
    with pytest.raises(ConfigError) as error:
        Recommender.from_pretrained(trained, device="cpu").recommend({"a": [1, 2]})
    assert str(error.value) == (
        "users: histories without times, but the model takes them; pass events with times: a table, a dataset, or ids of users "
        "that the model was trained on"
    )


def features(lengths: list[int], other: list[int] | None = None) -> KeyedJaggedTensor:
    values = torch.arange(8)
    if other is None:
        return KeyedJaggedTensor(["item_id"], values[:4], lengths=torch.tensor(lengths))
    return KeyedJaggedTensor(["item_id", "timestamp"], values, lengths=torch.tensor([*lengths, *other]))


def test_a_model_refuses_times_that_are_not_its_rows() -> None:
    model = SASRec(50, embedding_dim=8, num_layers=1, num_time_buckets=16)
    assert model(features([3, 0, 1], [3, 0, 1])).values().shape == (4, 8)
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the whole message is compared
        model(features([3, 0, 1], [1, 0, 3]))
    assert str(error.value) == "features['timestamp']: expected a time for each row of 'item_id', got samples of other lengths"
    with pytest.raises(ValueError) as error:  # noqa: PT011
        model(features([3, 0, 1]))
    assert str(error.value) == (
        "features: got the keys ['item_id'], expected 'timestamp', too, the time of each row of 'item_id'; the model was built "
        "with num_time_buckets"
    )


def test_times_go_through_pickle_fx_compile_and_autocast() -> None:
    torch.manual_seed(0)
    model = SASRec(50, embedding_dim=8, num_layers=1, num_time_buckets=16).eval()
    batch = features([3, 0, 1], [3, 0, 1])
    expected = model(batch).values()
    for other in (
        pickle.loads(pickle.dumps(model)),
        torch.fx.GraphModule(model, Tracer().trace(model)),
        torch.compile(model, backend="eager", fullgraph=True),
    ):
        assert torch.equal(other(batch).values(), expected)
    later = KeyedJaggedTensor(batch.keys(), batch.values() * torch.tensor([1, 1, 1, 1, 1, 90, 1, 1]), lengths=batch.lengths())
    traced = torch.fx.GraphModule(model, Tracer().trace(model))
    assert not torch.equal(model(later).values(), expected)
    assert torch.equal(traced(later).values(), model(later).values())
    # bfloat16 keeps 8 bits; the numbers of a normalised row are below 4.
    with torch.autocast("cpu", torch.bfloat16):
        assert (model(batch).values().float() - expected).abs().max() < 4 * 2**-7


def test_times_in_another_unit_than_those_of_training_are_refused(dataset: SequenceDataset, tmp_path: Path) -> None:
    owner = torch.repeat_interleave(torch.arange(dataset.num_users), dataset.lengths)
    seconds = 1_700_000_000 + dataset.timestamps - dataset.timestamps.min()  # type: ignore[union-attr,operator]
    table = pa.table({"user_id": owner.numpy(), "item_id": dataset.items.decode(dataset.item_ids), "timestamp": seconds.numpy()})
    trained = run(tmp_path / "run", read_events(table, progress=False), num_time_buckets=BUCKETS).directory
    kept = jagged.evaluate(trained, device="cpu", progress=False).metrics
    calendar = pa.array((seconds * 1_000_000).numpy()).cast(pa.timestamp("us"))
    assert jagged.evaluate(trained, table.set_column(2, "timestamp", calendar), device="cpu", progress=False).metrics == kept
    other = table.set_column(2, "timestamp", pa.array((seconds * 1_000).numpy()))
    with pytest.raises(ConfigError) as error:
        jagged.recommend(trained, other, device="cpu", progress=False)
    assert str(error.value) == (
        f"{trained}: the events' times are milliseconds, those of the model's training were seconds; give them in these"
    )
