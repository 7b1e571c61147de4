from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from jagged.data import DataError
from jagged.data.encoding import Encoders
from jagged.data.records import Dataset
from jagged.data.schema import Column, Kind, Schema
from jagged.data.table_batches import Part
from jagged.models import RankingInputs
from jagged.training.shares import digest
from tests.data.points import EXAMPLE, made
from tests.models.shops import SHARED, shop

ROOT = Path(__file__).parents[2]


def test_a_batch_has_everything_and_nothing_is_padded() -> None:
    dataset = made(EXAMPLE, history="events", event_labels=("click",))
    # The last row is the test: the item "c" and the user 8 are not seen in training.
    split = dataset.split("time", valid=0.0, test=0.25)
    train, test = split.train.gather([2, 0, 1]), split.test.gather([0])
    assert len(train) == 3
    assert train.features.keys() == [
        "user", "item", "place", "kind", "items", "history.item", "history.place", "history.kind",
    ]  # fmt: skip
    features = train.features.to_dict()
    assert {name: features[name].lengths().tolist() for name in features} == {
        "user": [1, 1, 1], "item": [1, 1, 1], "place": [1, 1, 1], "kind": [1, 1, 1], "items": [1, 3, 0],
        "history.item": [2, 0, 1], "history.place": [2, 0, 1], "history.kind": [2, 0, 1],
    }  # fmt: skip
    # Of one candidate each.
    assert train.pairs == {name: int(features[name].lengths().sum()) for name in features}
    assert train.to(torch.device("cpu")).pairs == train.pairs
    assert train.candidate_pairs == int(train.candidate_offsets.diff().square().sum())
    changed = dataclasses.replace(train, weights=2 * train.weights)
    assert changed.pairs is None
    assert changed.candidate_pairs is None
    # Item ids a, z, b are 2, 3, 4; a missing list is one missing id, an empty one has none.
    assert features["items"].values().tolist() == [0, 2, 0, 3]
    assert features["place"].values().tolist() == [3, 2, 0]
    assert features["kind"].values().tolist() == [3, 2, 2]
    assert train.candidate_ids("item").tolist() == [2, 2, 4]
    assert train.request_numbers.tolist() == [[3.0], [1.0], [2.0]]
    assert train.request_numbers_missing.tolist() == [[False], [False], [True]]
    assert train.request_number_lists is not None
    assert train.request_number_lists["sizes"].lengths().tolist() == [1, 0, 2]
    assert train.request_number_lists["sizes"].values().tolist() == [2.0, 2.0, 2.0]
    assert train.request_number_lists["sizes"].weights().tolist() == [0.0, 1.0, 0.0]
    assert train.labels.tolist() == [[0.0], [1.0], [0.0]]
    assert train.label_mask.tolist() == [[False], [True], [True]]
    assert train.weights.tolist() == [1.0, 1.0, 1.0]
    assert train.request_times is not None
    assert train.request_times.tolist() == [3, 1, 2]
    assert features["history.item"].values().tolist() == [2, 4, 2]
    assert features["history.place"].values().tolist() == [2, 0, 2]
    assert train.history_times.tolist() == [1, 2, 1]
    assert train.history_numbers.tolist() == [[1.0], [2.0], [1.0]]
    assert train.history_numbers_missing.tolist() == [[False], [True], [False]]
    assert train.history_labels.tolist() == [[1.0], [0.0], [1.0]]
    assert test.features["user"].values().tolist() == [1]
    assert test.candidate_ids("item").tolist() == [1]
    assert test.features["history.item"].lengths().tolist() == [0]
    latest = split.train.gather([0, 1, 2], max_history=1)
    assert latest.features["history.item"].lengths().tolist() == [0, 1, 1]
    assert latest.features["history.item"].values().tolist() == [2, 4]
    kinds = {
        value.dtype for value in (train.features.values(), train.request_times, train.rows, train.request_index, train.user_index)
    }
    assert kinds == {torch.int64}
    empty = split.train.gather([])
    assert len(empty) == 0
    assert len(train.to(torch.device("cpu"))) == 3
    with pytest.raises(ValueError, match=r"^max_history: got -1, expected 0 or more$"):
        split.train.gather([0], max_history=-1)


def test_labels_of_events_are_not_shown_unless_named() -> None:
    split = made(EXAMPLE, history="events").split(valid=0.0, test=0.25)
    batch = split.train.gather([0, 1, 2])
    assert batch.history_labels.shape == (3, 0)
    assert "history.click" not in batch.features.keys()  # noqa: SIM118 - a KeyedJaggedTensor is no mapping
    with pytest.raises(DataError) as caught:
        made(EXAMPLE, history="events", event_labels=("item",))
    assert str(caught.value) == "Table: event_labels: found 'item', expected labels: ['click']"


def test_weights_of_rows_and_of_ids() -> None:
    table = pa.table({"a": [1, 2], "l": [[1, 2], None], "w": [[0.5, 2.0], None], "s": [0.25, 3.0]})
    columns = (Column("a", Kind.ID), Column("l", Kind.IDS, weights="w"), Column("w", Kind.NUMBERS), Column("s", Kind.WEIGHT))
    split = split_of_all(Dataset.from_table(table, Schema(columns), progress=False))
    batch = split.gather([1, 0])
    assert batch.weights.tolist() == [3.0, 0.25]
    assert batch.weighted_features is not None
    assert batch.weighted_features.keys() == ["l"]
    assert batch.weighted_features["l"].weights().tolist() == [1.0, 0.5, 2.0]
    # Weights of a KeyedJaggedTensor are of all of its keys.
    assert batch.features.keys() == ["a"]
    assert batch.features.weights_or_none() is None
    assert (batch.request_number_lists, batch.candidates, batch.request_times, batch.history_times) == (None, None, None, None)
    assert batch.user_index.tolist() == [-1, -1]


def split_of_all(dataset: Dataset) -> Part:
    from jagged.data.encoding import Encoder

    counts = {name: np.ones(len(dataset.ids(name)), np.int64) for name in dataset.schema.tables}
    tables = {name: Encoder.fit(columns[0], dataset.ids(name), counts[name]) for name, columns in dataset.schema.tables.items()}
    return Part(dataset, None, Encoders(tables, {}))  # type: ignore[arg-type]


def test_another_table_is_read_with_the_encoders_of_training(tmp_path: Path) -> None:
    split = made(EXAMPLE).split(valid=0.0, test=0.25)
    split.encoders.save(tmp_path / "e")
    other = made([{**EXAMPLE[0], "item": "b", "user": 99, "price": None}])
    part = Part(other, encoders=Encoders.load(tmp_path / "e"))
    batch = part.gather([0])
    assert batch.candidate_ids("item").tolist() == [4]
    assert batch.features["user"].values().tolist() == [1]
    assert batch.request_numbers.tolist() == [[2.0]]
    with pytest.raises(DataError) as caught:
        Part(other, encoders=Encoders({}, {}))
    assert str(caught.value) == (
        "encoders: found the tables [] and numbers [], expected 'user', which the dataset has; "
        "take the encoders of a split of such a table"
    )
    with pytest.raises(ValueError, match=r"^rows: got shape \(1,\), expected one dimension and numbers from 0 to 0$"):
        Part(other, np.array([1]), split.encoders)


def test_a_part_is_sent_and_workers_need_no_torchrec(tmp_path: Path) -> None:
    part = made(EXAMPLE, history="events", directory=tmp_path / "d").split(valid=0.0, test=0.25).train
    sent = pickle.loads(pickle.dumps(part))
    assert all(torch.equal(one, part.collect([2, 0]).tensors()[name]) for name, one in sent.collect([2, 0]).tensors().items())
    (tmp_path / "part").write_bytes(pickle.dumps(part))
    code = (
        "import pickle, sys\n"
        f"part = pickle.load(open({str(tmp_path / 'part')!r}, 'rb'))\n"
        "part.collect([0, 1])\n"
        "print(sorted({'torchrec', 'fbgemm_gpu', 'triton'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(("names", "changed"), [((), False), (("liked", "genres"), False), (("liked",), True)])
def test_all_of_a_batch_is_recorded_on_a_stream(monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], changed: bool) -> None:
    """Lengths of keys with one id each, too, which are in no memory of the others."""
    split = shop("user", "item", "time", "type", *names, "click")
    batch = split.train.gather(range(6)).to(torch.device("cpu"))
    if changed:
        batch.weights = batch.weights * 2
    kept = [value for value in vars(batch).values() if isinstance(value, torch.Tensor)]
    for value in vars(batch).values():
        if isinstance(value, KeyedJaggedTensor):
            kept += [of for of in (value.values(), value.lengths(), value.offsets(), value.weights_or_none()) if of is not None]
    recorded: set[int] = set()
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda of, _: recorded.add(of.untyped_storage().data_ptr()))
    batch.record_stream(None)  # type: ignore[arg-type]
    assert {of.untyped_storage().data_ptr() for of in kept} <= recorded


@pytest.mark.gpu
def test_a_batch_that_is_let_go_is_not_written_over_while_it_is_read() -> None:
    batch = shop("user", "item", "time", "type", "click").train.gather(range(6)).pin_memory()
    device, copying = torch.device("cuda"), torch.cuda.Stream()
    with torch.cuda.stream(copying):
        moved = batch.to(device, non_blocking=True)
    torch.cuda.current_stream().wait_stream(copying)
    moved.record_stream(torch.cuda.current_stream())
    # What reads it begins when the host has let it go.
    torch.cuda._sleep(100_000_000)
    found = moved.features.lengths().clone()
    del moved
    with torch.cuda.stream(copying):
        taken = [torch.full_like(found, 7) for _ in range(256)]
    assert torch.equal(found.cpu(), batch.features.lengths())
    assert len(taken) == 256


def test_a_part_goes_to_a_worker_and_to_other_devices_and_tells_its_batches_apart() -> None:
    split = made(EXAMPLE, history="events").split(by="time", valid=0.2, test=0.2)
    part = pickle.loads(pickle.dumps(split.train))
    for row in range(len(part)):
        here, there = split.train.gather([row]), part.gather([row])
        assert digest(here) == digest(there) != ""
        assert all(digest(part.gather([other])) != digest(here) for other in range(len(part)) if other != row)
    meta = part.gather([0]).to(torch.device("meta"))
    assert meta.features.values().is_meta
    assert meta.labels.is_meta


def test_lists_of_candidates_whose_table_is_read_by_others_stand_beside_them() -> None:
    """Those of a request are one list of ids, which offsets cut again; so with drawn requests, workers and other devices."""
    split = shop("request", "user", "item", "time", "click", "liked", "tags", "similar", "styles", "genres", history="events")
    part, columns = split.train, {name: one.table_name for name, one in SHARED.items()}
    table = pa.table(split.train.dataset)
    whole = part.gather(range(len(part)))
    assert whole.features.keys()[:7] == ["user", "item", "liked", "tags", "similar", "styles", "history.item"]
    assert whole.candidates is not None
    assert whole.candidates.keys() == ["genres"]
    (loaded,) = part.loader(batch_size=len(part), num_workers=1, progress=False)
    places = torch.tensor([7, 2, 2, 30])
    for batch in (whole, part.gather(places), loaded.to(torch.device("cpu")), pickle.loads(pickle.dumps(part.gather(places)))):
        assert batch.candidate_list_offsets.shape == (len(batch.rows) + 1, 2)
        for place, (name, of) in enumerate(columns.items()):
            feature, ends = batch.features[name], batch.candidate_list_offsets[:, place]
            stored = [table[name][row].as_py() for row in batch.rows.tolist()]
            # A missing list is one missing id.
            expected = [
                part.encoders[of].encode([None] if ids is None else ids or pa.array([], "string")).tolist() for ids in stored
            ]
            assert [ids.tolist() for ids in feature.values().split(ends.diff().tolist())] == expected
            assert feature.offsets().tolist() == ends[batch.candidate_offsets].tolist()
    assert part.gather([]).candidate_list_offsets.tolist() == [[0, 0]]
    without = shop("request", "user", "item", "time", "click", "genres").train.gather([0, 1])
    assert without.candidate_list_offsets is None
    # A table of lists alone makes no history of the request's lists.
    assert RankingInputs.of(part).list_histories == {"liked": "item"}


def test_drawn_candidates_have_their_lists_wherever_these_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same of each candidate, by words, in a table that the request reads, too, as in one of their own."""

    def lists_of(*, shared: bool) -> tuple[list[list[str]], list[int]]:
        if not shared:
            monkeypatch.setitem(SHARED, "styles", dataclasses.replace(SHARED["styles"], table=None))
        part = shop("user", "item", "time", "tags", "styles", history="events").train
        (batch,) = part.loader(batch_size=len(part), negatives=3, seed=1, progress=False)
        assert (batch.candidate_list_offsets is not None) == shared
        if shared:
            values, counts = batch.features["styles"].values(), batch.candidate_list_offsets[:, 0].diff()
        else:
            values, counts = batch.candidates["styles"].values(), batch.candidates["styles"].lengths()
        words = part.encoders["tags" if shared else "styles"].ids.ids.to_pylist()
        told = [[words[number - 2] for number in ids.tolist()] for ids in values.split(counts.tolist())]
        return told, batch.candidate_ids("item").tolist()

    together, alone = lists_of(shared=True), lists_of(shared=False)
    assert len(together[0]) > 100
    assert any(together[0])
    assert together == alone
