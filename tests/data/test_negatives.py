"""Negatives against their definition, their distribution, and what they may not depend on."""

from __future__ import annotations

import dataclasses
import itertools
import math
import pickle
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from jagged.data import DataError, Dataset
from jagged.data import negatives as module
from jagged.data.moving import Carried, is_sampled
from jagged.data.negatives import Drawing
from jagged.data.schema import Column, Kind, Schema
from jagged.data.table_batches import Batch, Part
from jagged.data.table_splits import Split
from jagged.training.shares import digest
from tests.conftest import EXAMPLES
from tests.data import brute_force as slow

EVENTS = Schema((Column("user", Kind.USER), Column("item", Kind.CANDIDATE), Column("time", Kind.TIME)))
EVENT = st.fixed_dictionaries(
    {
        "user": st.one_of(st.none(), st.sampled_from([7, -3, 2**62])),
        "item": st.one_of(st.none(), st.sampled_from("abcdefgh")),
        "time": st.integers(-3, 6),
    }
)


def table(rows: Sequence[slow.Row]) -> pa.Table:
    types = {"user": pa.int64(), "item": pa.string(), "time": pa.int64()}
    return pa.table({name: pa.array([row[name] for row in rows], kind) for name, kind in types.items()})


def events(rows: Sequence[slow.Row], **options: Any) -> Dataset:
    return Dataset.from_table(table(rows), EVENTS, progress=False, **options)


def drawn(part: Part, batch: Batch) -> dict[int, list[Any]]:
    """By a row's number in the source its candidates, its own item first; and what every batch has to keep to."""
    # Codes, not what the encoders know of.
    codes = batch.candidate_ids("item")
    offsets = batch.candidate_offsets.tolist()
    assert len(codes) == offsets[-1] == len(batch.labels) == len(batch.label_mask) == len(batch.rows)
    found = {}
    requests = batch.request_index.tolist()
    for row, begin, end in zip(requests, offsets, offsets[1:], strict=False):
        found[int(part.dataset.source[row])] = codes[begin:end].tolist()
        assert batch.labels[begin:end, 0].tolist() == [1.0] + [0.0] * (end - begin - 1)
        assert batch.candidate_requests[begin:end].tolist() == [requests.index(row)] * (end - begin)
        assert batch.rows[begin:end].tolist() == [row] * (end - begin)
    return found


def by_code(part: Part) -> Part:
    """The same part with numbers that tell all items apart: the code + 2."""
    codes = np.append(0, np.arange(len(part.dataset.ids("item"))) + 2).astype(np.int32)
    return dataclasses.replace(part, maps={**part.maps, "item": codes})


def names(part: Part, found: dict[int, list[Any]]) -> dict[int, list[Any]]:
    ids = part.dataset.ids("item").ids
    return {row: [None if one == 0 else ids[one - 2].as_py() for one in items] for row, items in found.items()}


def check(rows: Sequence[slow.Row], split: Split, part: Part, kept: list[int], **options: Any) -> int:
    """Every set that is drawn is of the items of the definition, without repeats, and as large as it can be."""
    train = sorted(split.train.dataset.source[split.train.rows].tolist())
    part = by_code(part)
    found = names(part, drawn(part, part.gather(range(len(part)), **options)))
    assert sorted(found) == sorted(part.dataset.source[part.rows].tolist())
    for row, (own, *negatives) in found.items():
        allowed = slow.may_be_drawn(rows, kept, train, row)
        assert own == rows[row]["item"]
        assert set(negatives) <= set(allowed)
        assert len(negatives) == len(set(negatives)) == min(options["negatives"], len(allowed))
    return len(found)


@settings(max_examples=EXAMPLES)
@given(
    rows=st.lists(EVENT, min_size=1, max_size=25),
    parts=st.lists(st.sampled_from(["train", "train", "valid", "test"]), min_size=25, max_size=25),
    way=st.sampled_from(["time", "leave-one-out", "column", "user"]),
    count=st.integers(1, 9),
    by=st.sampled_from(["uniform", "popularity"]),
    seed=st.integers(0, 2**64 - 1),
    epoch=st.integers(0, 5),
)
def test_every_set_is_one_of_the_definition(
    rows: list[slow.Row], parts: list[str], way: str, count: int, by: str, seed: int, epoch: int
) -> None:
    given_ = table(rows)
    if way == "column":
        given_ = given_.append_column("part", pa.array(parts[: len(rows)]))
        rows = [{**row, "part": part} for row, part in zip(rows, parts, strict=False)]
    dataset = Dataset.from_table(given_, EVENTS, split="part" if way == "column" else None, progress=False)
    kept = slow.without_duplicates(rows)
    try:
        split = dataset.split(way, **({} if way in ("column", "leave-one-out") else {"valid": 0.2, "test": 0.2}))
    except DataError:
        return
    checked = sum(
        check(rows, split, part, kept, negatives=count, by=by, seed=seed, epoch=epoch)
        for part in (split.train, split.valid, split.test)
    )
    assert checked == len(kept)


def many(users: int, items: int, count: int, seed: int = 0, power: float = 3.0) -> list[slow.Row]:
    rng = np.random.default_rng(seed)
    return [
        {"user": int(user), "item": f"i{int(items * place**power)}", "time": int(time)}
        for user, place, time in zip(
            rng.integers(users, size=count), rng.random(count), rng.integers(count // 4, size=count), strict=True
        )
    ]


@pytest.mark.parametrize("by", ["uniform", "popularity"])
@pytest.mark.parametrize("count", [1, 2, 7, 150])
@pytest.mark.parametrize("pairs", [1 << 21, 500])
def test_users_who_have_had_nearly_everything(by: str, count: int, pairs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 200 items two users have most: first attempts fail, the next ones too, and all items are gone through."""
    monkeypatch.setattr(module, "_PAIRS", pairs)
    monkeypatch.setattr(module, "_SMALL", 1)
    rows = many(2, 200, 1_500, power=1.5) + [{"user": 9, "item": f"i{i}", "time": 1_000} for i in range(0, 200, 60)]
    dataset = events(rows)
    split = dataset.split(by="time", valid=0.1, test=0.1)
    kept = slow.without_duplicates(rows)
    some = [0, 1, 5, *range(300, len(split.train), 40)]
    for part in (dataclasses.replace(split.train, rows=split.train.rows[some]), split.test):
        check(rows, split, part, kept, negatives=count, by=by)


def test_future_and_simultaneous_items_and_those_of_the_user_are_never_drawn() -> None:
    """Whatever the draws: 3,000 epochs of a row that may have two items of six."""
    rows = [
        {"user": 1, "item": item, "time": time}
        for item, time in (("old", 1), ("older", 0), ("simultaneous", 5), ("future", 6), ("mine", 2))
    ]
    rows += [
        {"user": 2, "item": "mine", "time": 3},
        {"user": 2, "item": "own", "time": 5},
        {"user": 2, "item": "later", "time": 9},
    ]
    rows += [{"user": 3, "item": "test", "time": 4}]
    dataset = Dataset.from_table(
        table(rows).append_column("part", pa.array(["train"] * 8 + ["test"])), EVENTS, split="part", progress=False
    )
    split = dataset.split("column")
    part = by_code(split.train)
    place = int(np.flatnonzero(dataset.source[split.train.rows] == 6)[0])
    for by in ("uniform", "popularity"):
        seen: Counter[Any] = Counter()
        for epoch in range(3_000):
            found = names(part, drawn(part, part.gather([place], negatives=1, by=by, epoch=epoch)))
            seen.update(found[6][1:])
        assert set(seen) == {"old", "older"}
        assert min(seen.values()) > 1_300
        all_of_them = names(part, drawn(part, part.gather([place], negatives=5, by=by)))[6]
        assert sorted(all_of_them) == ["old", "older", "own"]


# How often.


def critical(freedom: int, z: float = 3.09) -> float:
    """Of chi square, what one in a thousand exceeds (Wilson & Hilferty, 1931)."""
    return freedom * (1 - 2 / (9 * freedom) + z * math.sqrt(2 / (9 * freedom))) ** 3


def crowd(repeats: int) -> tuple[Split, dict[int, int]]:
    """A user who has had 12 of 40 items, of which item i was had i % 7 + 1 times, asks `repeats` times at one moment."""
    rows = [{"user": 100 + i, "item": f"i{item}", "time": 1} for item in range(40) for i in range(item % 7 + 1)]
    rows += [{"user": 1, "item": f"i{item}", "time": 2} for item in range(0, 36, 3)]
    rows += [{"user": 1, "item": "i0", "time": 3}] * repeats
    split = events(rows, duplicates="keep").split(by="time", valid=0.0, test=repeats / len(rows))
    assert len(split.test) == repeats
    allowed = slow.may_be_drawn(rows, range(len(rows)), range(len(rows) - repeats), len(rows) - 1)
    return split, {int(item[1:]): weight for item, weight in allowed.items()}


@pytest.mark.parametrize("by", ["uniform", "popularity"])
@pytest.mark.parametrize("way", ["as it is", "attempts alone", "one by one after the first", "one by one"])
def test_draws_have_the_stated_distribution(by: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first negative, and the second given the first, whichever way they are found."""
    repeats, count = 40_000, 3
    if way == "attempts alone":
        monkeypatch.setattr(module, "_SMALL", 0)
    elif way == "one by one after the first":
        # One attempt in place of all.
        monkeypatch.setattr(module, "_ROUNDS", ())
        monkeypatch.setattr(module.TrainingEvents, "_try", first_attempt)
    elif way == "one by one":
        monkeypatch.setattr(module.TrainingEvents, "_try", lambda *_: None)
    split, weights = crowd(repeats)
    part = by_code(split.test)
    if by == "uniform":
        weights = dict.fromkeys(weights, 1)
    batch = part.gather(range(repeats), negatives=count, by=by, seed=11)
    ids = part.dataset.ids("item").ids.to_pylist()
    items = np.array([int(ids[code - 2][1:]) for code in batch.candidate_ids("item").tolist()]).reshape(repeats, count + 1)
    total = sum(weights.values())
    first = {item: weight / total for item, weight in weights.items()}
    second = {
        item: sum(first[other] * weights[item] / (total - weights[other]) for other in weights if other != item)
        for item in weights
    }
    assert sum(second.values()) == pytest.approx(1)
    for column, expected in ((1, first), (2, second)):
        seen = Counter(items[:, column].tolist())
        assert set(seen) == set(expected)
        square = sum((seen[item] - repeats * share) ** 2 / (repeats * share) for item, share in expected.items())
        assert square < critical(len(expected) - 1)
    pairs = Counter(zip(items[:, 1].tolist(), items[:, 2].tolist(), strict=True))
    joint = {
        (one, other): first[one] * weights[other] / (total - weights[one]) for one, other in itertools.permutations(weights, 2)
    }
    square = sum((pairs[pair] - repeats * share) ** 2 / (repeats * share) for pair, share in joint.items())
    assert square < critical(len(joint) - 1)


_TRY = module.TrainingEvents._try


def first_attempt(self: Any, found: Any, rows: Any, asked: Any, pool: Any, size: Any, attempts: int, width: int) -> None:
    _TRY(self, found, rows, asked, pool, size, attempts, 1)


def test_draws_of_rows_epochs_and_seeds_are_independent() -> None:
    """Of 28 items, whatever differs by one, each pair of first negatives is as likely as any other."""
    repeats = 20_000
    split, weights = crowd(repeats)
    part = by_code(split.test)

    def firsts(seed: int) -> Any:
        batch = part.gather(range(repeats), negatives=1, seed=seed)
        return batch.candidate_ids("item")[1::2].numpy()

    one, two = firsts(0), firsts(1)
    for a, b in ((one, two), (one[:-1], one[1:])):
        pairs = Counter(zip(a.tolist(), b.tolist(), strict=True))
        expected = len(a) / len(weights) ** 2
        square = sum((pairs[pair] - expected) ** 2 / expected for pair in itertools.product(set(one.tolist()), repeat=2))
        assert square < critical(len(weights) ** 2 - 1)
    # A training row that may have the same items, epoch after epoch.
    train = split.train
    row = train.rows[[int(np.argmax(train.dataset.column("time")[train.rows]))]]
    assert train.training is not None
    drawn = [int(train.training.draw(row, Drawing(1), epoch)[1][0]) for epoch in range(4_000)]
    for values in (drawn, list(itertools.pairwise(drawn))):
        counts = Counter(values)
        size = len(weights) if values is drawn else len(weights) ** 2
        expected = len(values) / size
        square = sum((count - expected) ** 2 / expected for count in counts.values()) + (size - len(counts)) * expected
        assert square < critical(size - 1)


# What they do not depend on.


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Split:
    directory = tmp_path_factory.mktemp("events") / "dataset"
    dataset = events(many(30, 60, 1_200), history="events", directory=directory)
    found: Split = dataset.split(by="time", valid=0.2, test=0.2)
    return found


def told(loader: Any) -> dict[int, list[int]]:
    """By row, whatever the order, the numbers of its candidates."""
    found = {}
    for batch in loader:
        offsets = batch.candidate_offsets.tolist()
        values = batch.candidate_ids("item").tolist()
        found |= {row: values[a:b] for row, a, b in zip(batch.request_index.tolist(), offsets, offsets[1:], strict=False)}
    return found


@pytest.mark.parametrize("by", ["uniform", "popularity"])
@pytest.mark.parametrize("name", ["train", "valid"])
def test_draws_depend_on_seed_row_and_the_epoch_of_training_alone(split: Split, by: str, name: str) -> None:
    part = getattr(split, name)
    wanted = {"negatives": 3, "by": by, "seed": 5}
    want = [told([part.gather(range(len(part)), **wanted, epoch=epoch)]) for epoch in range(3)]
    assert (want[0] == want[1], want[1] == want[2]) == ((False, False) if name == "train" else (True, True))
    assert told([part.gather(range(len(part)), **{**wanted, "seed": 6})]) != want[0]
    for options in (
        {"batch_size": 7},
        {"batch_size": 64, "shuffle": True},
        {"max_tokens": 200, "shuffle": True},
        {"batch_size": 50, "num_workers": 2},
    ):
        loader = part.loader(**wanted, **options)
        assert told(loader) == want[0]
        for epoch in (2, 1):
            loader.set_position(epoch, 0)
            assert told(loader) == want[epoch]
        loader.close()
    shares: dict[int, list[int]] = {}
    for rank in range(2):
        shares |= told(part.loader(**wanted, batch_size=20, shuffle=True, rank=rank, world_size=2))
    assert shares == want[0]


def test_a_worker_that_is_started_anew_draws_the_same(split: Split) -> None:
    loader = split.train.loader(negatives=3, by="popularity", batch_size=300, num_workers=1, multiprocessing_context="spawn")
    assert told(loader) == told([split.train.gather(range(len(split.train)), negatives=3, by="popularity")])


def test_a_loader_gives_the_rows_that_one_without_negatives_gives(split: Split) -> None:
    def rows(**options: Any) -> list[list[int]]:
        loader = split.train.loader(batch_size=64, shuffle=True, seed=3, **options)
        assert len(loader) == -(-len(split.train) // 64)
        return [batch.request_index.tolist() for batch in loader]

    assert rows(negatives=2) == rows()


def test_another_part_of_the_training_rows_has_their_draws(split: Split) -> None:
    some = dataclasses.replace(split.train, rows=split.train.rows[10:40])
    want = told([split.train.gather(range(10, 40), negatives=2, epoch=4)])
    assert told([some.gather(range(30), negatives=2, epoch=4)]) == want


# What a batch has.

SHOP = pa.table(
    {
        "user": ["ann", "bob", "bob", "cid", "ann", "cid", "bob", "dan"],
        "item": ["tea", "cup", "tea", "pot", "cup", "cup", "pot", "new"],
        "time": [1, 1, 2, 2, 3, 4, 5, 6],
        "kind": ["drink", "home", "hot drink", "kitchen", "house", "home", "kitchen", "kitchen"],
        "tags": [["a"], [], ["a", "b"], None, ["c"], ["c", "d"], ["e"], ["f"]],
        "price": [1.0, 2.0, 3.0, 4.0, None, 6.0, 7.0, 8.0],
        "sizes": [[1.0], [], [1.0, 2.0], None, [5.0], [6.0], [7.0, 7.5], [8.0]],
        "shop": ["x", "y", "y", "x", "x", "y", "x", "y"],
        "hour": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0],
        "weight": [1.0, 1.0, 1.0, 1.0, 2.0, 0.5, 1.0, 1.0],
    }
)
SIDES = {"candidate_columns": ["kind", "tags", "price", "sizes"], "request_columns": ["shop", "hour"]}
SHOP_SCHEMA = Schema(
    (
        *EVENTS.columns,
        Column("kind", Kind.ID),
        Column("tags", Kind.IDS),
        Column("price", Kind.NUMBER),
        Column("sizes", Kind.NUMBERS),
        Column("shop", Kind.ID),
        Column("hour", Kind.NUMBER),
        Column("weight", Kind.WEIGHT),
    )
)


def shop(**sides: Any) -> Split:
    dataset = Dataset.from_table(SHOP, SHOP_SCHEMA, history="events", progress=False, **(sides or SIDES))
    found: Split = dataset.split(by="time", valid=0.0, test=0.25)
    return found


def test_a_drawn_item_brings_its_own_columns_as_of_the_time() -> None:
    split = shop()
    test = split.test.gather([0, 1], negatives=4)
    # Rows are in the order of users: bob's pot at 5, dan's new at 6. Bob has had cup, tea and pot; dan nothing.
    assert len(test) == 2
    assert test.candidate_offsets.tolist() == [0, 1, 5]
    assert test.candidates is not None
    # Histories have items and kinds, so that candidates' are read beside them.
    assert test.candidates.keys() == ["tags"]
    assert test.features.keys() == ["user", "item", "kind", "shop", "history.item", "history.kind", "history.shop"]
    assert test.features.stride() == 2
    assert test.features["kind"].lengths().tolist() == test.features["item"].lengths().tolist() == [1, 4]
    ids = {name: ["missing", "unseen", *encoder.ids.ids.to_pylist()] for name, encoder in split.encoders.items() if encoder.ids}
    values = {"item": test.candidate_ids("item"), "kind": test.candidate_ids("kind"), "tags": test.candidates["tags"].values()}
    of = {name: [ids[name][one] for one in found.tolist()] for name, found in values.items()}
    assert of["item"][:2] == ["pot", "unseen"]
    assert sorted(of["item"][2:]) == ["cup", "pot", "tea"]
    # A cup is "home" since 4, tea a "hot drink" since 2; and bob's pot has training's latest words of it, not its own.
    assert of["kind"][0] == "kitchen"
    assert dict(zip(of["item"][2:], of["kind"][2:], strict=True)) == {"cup": "home", "tea": "hot drink", "pot": "kitchen"}
    lengths = dict(zip(of["item"][2:], test.candidates["tags"].lengths().tolist()[2:], strict=True))
    assert lengths == {"cup": 2, "tea": 2, "pot": 1}
    assert test.candidates["tags"].lengths().tolist()[:2] == [1, 1]
    assert of["tags"][:2] == ["missing", "unseen"]
    assert test.candidate_numbers[:2, 0].tolist() == [4.0, 8.0]
    prices = dict(zip(of["item"][2:], test.candidate_numbers[2:, 0].tolist(), strict=True))
    assert prices == {"cup": 6.0, "tea": 3.0, "pot": 4.0}
    assert not test.candidate_numbers_missing.any()
    assert test.candidate_number_lists is not None
    assert test.candidate_number_lists["sizes"].lengths().tolist()[:2] == [1, 1]
    assert test.candidate_number_lists.stride() == 5
    assert test.request_number_lists is None
    assert test.request_numbers.tolist() == [[7.0], [8.0]]
    assert test.request_numbers_missing.shape == (2, 1)
    assert test.weights.tolist() == [1.0] * 5
    assert test.request_times is not None
    assert test.request_times.tolist() == [5, 6]
    assert test.features["history.item"].lengths().tolist() == [2, 0]
    # Rows of ann at 1 and 3, as training saw them: at 1 there is nothing before; a cup at 3 is that of time 1.
    train = split.train.gather([0, 1], negatives=4)
    kinds = [ids["kind"][one] for one in train.candidate_ids("kind").tolist()]
    assert (train.candidate_offsets.tolist(), kinds) == ([0, 1, 3], ["drink", "home", "kitchen"])


def test_columns_of_the_request_stand_once() -> None:
    split = shop(request_columns=["kind", "tags", "price", "sizes", "shop", "hour"])
    batch, plain = split.test.gather([0, 1], negatives=4), split.test.gather([0, 1])
    assert batch.candidates is plain.candidates is None
    assert batch.features["item"].lengths().tolist() == [1, 4]
    assert batch.candidate_numbers.shape == (5, 0)
    assert batch.request_number_lists is not None
    assert plain.request_number_lists is not None
    for one, other in ((batch.features, plain.features), (batch.request_number_lists, plain.request_number_lists)):
        assert one.keys() == other.keys()
        for key in set(one.keys()) - {"item"}:
            assert torch.equal(one[key].values(), other[key].values())
            assert torch.equal(one[key].lengths(), other[key].lengths())
    assert torch.equal(batch.request_numbers, plain.request_numbers)
    assert (batch.sampled, plain.sampled) == (True, False)
    assert plain.candidate_offsets.tolist() == [0, 1, 2]
    assert plain.candidate_requests.tolist() == [0, 1]


def test_an_event_without_an_item_is_masked_and_without_a_user_has_no_past() -> None:
    rows = [
        {"user": u, "item": i, "time": t} for u, i, t in ((1, "a", 1), (1, "b", 2), (1, None, 3), (None, "a", 3), (1, "c", 4))
    ]
    split = events(rows).split(by="time", valid=0.0, test=0.2)
    part = by_code(split.train)
    batch = part.gather(range(len(part)), negatives=3)
    assert names(part, drawn(part, batch)) == {0: ["a"], 1: ["b"], 2: [None], 3: ["a", "b"]}
    labels, mask = batch.label()
    assert (labels.tolist(), mask.tolist()) == ([1.0, 0.0, 1.0, 1.0, 1.0], [True, True, True, True, False])
    none = part.gather([], negatives=3)
    assert (len(none), none.labels.shape, none.candidate_requests.tolist()) == (0, (0, 1), [])


def test_training_without_any_item() -> None:
    rows = [{"user": user, "item": None, "time": time} for user, time in ((1, 1), (None, 2))]
    rows.append({"user": 1, "item": "a", "time": 3})
    split = events(rows).split(by="time", valid=0.0, test=0.3)
    for by in ("uniform", "popularity"):
        for part in (split.train, split.test):
            batch = part.gather(range(len(part)), negatives=2, by=by)
            assert batch.candidate_requests.tolist() == list(range(len(part)))


def test_a_batch_is_moved_pickled_and_told_apart() -> None:
    split = shop()
    batch = split.test.gather([0, 1], negatives=2)
    sent = pickle.loads(pickle.dumps(split.test))
    assert sent.training is not split.test.training
    assert digest(sent.gather([0, 1], negatives=2)) == digest(batch) != ""
    assert digest(split.test.gather([0, 1], negatives=2, seed=1)) != digest(batch)
    meta = batch.to(torch.device("meta"))
    assert meta.sampled
    for moved in (meta.candidate_offsets, meta.candidate_numbers):
        assert isinstance(moved, Tensor)
        assert moved.is_meta
    assert is_sampled(batch)
    assert is_sampled({"one": [(batch, 3)]})
    assert is_sampled(Carried(batch).to(torch.device("cpu")).batch)
    plain = split.test.gather([0])
    assert not any(map(is_sampled, (plain, {"one": plain}, torch.zeros(3), [1, None])))


# What is refused.

LABELLED = Schema((*EVENTS.columns, Column("click", Kind.LABEL)))


@pytest.mark.parametrize(
    ("schema", "options", "message"),
    [
        (
            LABELLED, {},
            "negatives: found a table with the label 'click', expected a table of events without labels; "
            "train on its labels, or read it with that column unused",
        ),
        (
            Schema(EVENTS.columns[1:]), {},
            "negatives: found no column of kind user, expected one; name it in the schema",
        ),
        (
            Schema((EVENTS.columns[0], EVENTS.columns[2])), {},
            "negatives: found no column of kind candidate, expected one; name it in the schema",
        ),
        (
            Schema((*EVENTS.columns, Column("shop", Kind.ID, of="request"), Column("price", Kind.NUMBER))), {},
            "negatives: found the column 'price' of kind number, expected to be told whose it is: a drawn item must not have "
            "another item's value; name it in candidate_columns or in request_columns when the table is read, or read it unused",
        ),
    ],
)  # fmt: skip
def test_tables_without_what_negatives_need_are_refused(schema: Schema, options: dict[str, Any], message: str) -> None:
    rows = pa.table(
        {"user": [1, 2], "item": ["a", "b"], "time": [1, 2], "click": [1, 0], "shop": ["x", "y"], "price": [1.0, 2.0]}
    )
    split = Dataset.from_table(rows, schema, progress=False).split(by="time", valid=0.0, test=0.5)
    for take in (lambda **words: split.train.loader(batch_size=1, **words), lambda **words: split.train.gather([0], **words)):
        with pytest.raises(DataError) as caught:
            take(negatives=2, **options)
        assert str(caught.value) == message


def test_rows_beside_an_event_table_are_refused() -> None:
    rows = [{"user": 7, "item": item, "time": time} for time, item in enumerate("abcabc")]
    split = Dataset.from_table(table(rows), EVENTS, events=table(rows), event_schema=EVENTS, progress=False).split()
    with pytest.raises(DataError) as caught:
        split.train.loader(batch_size=1, negatives=1)
    assert str(caught.value) == (
        "negatives: found rows with an event table beside them, expected events alone: what users had there would be drawn "
        "for them; read the events as the table, without `events`"
    )


@pytest.mark.parametrize("by", ["uniform", "popularity"])
def test_rows_without_a_training_part_are_refused(by: str) -> None:
    split = shop()
    part = Part(split.train.dataset, encoders=split.encoders)
    with pytest.raises(DataError) as caught:
        part.loader(batch_size=1, negatives=2, by=by)
    assert str(caught.value) == (
        f"negatives: found rows without a training part to draw from (by='{by}'), expected a part of Dataset.split; "
        "split the table, and take the split's train, valid or test"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"negatives": 0}, "negatives: got 0, expected a number from 1 on; leave it out for none"),
        ({"negatives": -1}, "negatives: got -1, expected a number from 1 on; leave it out for none"),
        ({"negatives": 1.5}, "negatives: got 1.5, expected a number from 1 on; leave it out for none"),
        ({"negatives": True}, "negatives: got True, expected a number from 1 on; leave it out for none"),
        ({"negatives": 1, "by": "size"}, "by: got 'size', expected 'uniform' or 'popularity'"),
        ({"negatives": 1, "seed": -1}, "seed: got -1, expected 0 to 2**64 - 1"),
        ({"negatives": 1, "epoch": -1}, "epoch: got -1, expected 0 or more"),
        ({"by": "popularity"}, "by: got 'popularity' without negatives, expected negatives=n beside it"),
        ({"seed": 3}, "seed: got 3 without negatives, expected negatives=n beside it"),
    ],
)  # fmt: skip
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole message is compared
        shop().train.gather([0], **options)
    assert str(caught.value) == message


def test_a_label_that_is_not_there_is_named() -> None:
    with pytest.raises(DataError) as caught:
        shop().train.gather([0, 1]).label()
    assert str(caught.value) == (
        "batch: found a table without labels, and no negatives, expected the label 0; "
        'name one when the table is read (label="click"), or give the loader negatives=n'
    )
    with pytest.raises(DataError) as caught:
        shop().train.gather([0, 1], negatives=1).label(1)
    assert str(caught.value) == "batch: found 1 label columns, expected the label 1; count labels from 0"
