from __future__ import annotations

import hashlib
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jagged.data import DataError
from jagged.data.encoding import Encoder, Encoders, Statistics, hashes
from jagged.data.schema import Column, Kind
from jagged.data.vocabulary import Vocabulary
from tests.conftest import EXAMPLES
from tests.data import brute_force as slow

HASHED = Column("c", Kind.ID, table="t", encoding="hash", size=10)
RANGE = Column("c", Kind.ID, table="t", encoding="range", size=5)


def fitted(column: Column, ids: list[Any], counts: list[int], **options: Any) -> Encoder:
    return Encoder.fit(column, Vocabulary(ids), np.array(counts), **options)


def test_a_vocabulary_has_what_training_has_often_enough() -> None:
    encoder = fitted(Column("c", Kind.ID), ["a", "b", "c", "d"], [2, 1, 0, 3], minimum=2)
    assert encoder.code_map(Vocabulary(["a", "b", "c", "d"])).tolist() == [0, 2, 1, 1, 3]
    assert encoder.code_map(Vocabulary(["a", "b", "c", "d"])).dtype == np.int32
    assert encoder.encode(["d", None, "new", "a"]).tolist() == [3, 0, 1, 2]
    assert encoder.size == 4
    assert encoder.counts.tolist() == [0, 1, 2, 3]
    assert encoder.distinct == 3
    assert str(encoder) == "c: vocabulary, 4 numbers, 3 ids in training"


def test_an_encoder_that_goes_on_keeps_its_numbers() -> None:
    encoder = fitted(Column("c", Kind.ID), ["a", "b", "c"], [2, 0, 3])
    grown = encoder.grown(Vocabulary(["d", "a", "e", "f", "c"]), np.array([2, 5, 1, 3, 0]), minimum=2)
    # What it had goes first, however seldom it comes now; new ones come behind, if often enough.
    assert grown.encode(["a", "c", "d", "f", "e", "b", None]).tolist() == [2, 3, 4, 5, 1, 1, 0]
    assert (grown.size, grown.distinct) == (6, 4)
    assert grown.counts.tolist() == [0, 1, 7, 3, 2, 3]
    assert encoder.counts.tolist() == [0, 0, 2, 3]
    # A hash and a range have the rows that they had, and the seed.
    for column, ids in ((HASHED, ["a", "7"]), (RANGE, [4, 9])):
        before = fitted(column, ids, [1, 2], seed=3)
        after = before.grown(Vocabulary(ids[::-1]), np.array([1, 0]))
        assert (after.size, after.seed, after.distinct) == (before.size, 3, 1)
        assert after.encode(ids).tolist() == before.encode(ids).tolist()
        assert after.counts.sum() == 4


@pytest.mark.parametrize(
    ("old", "new", "kept"),
    [
        ([7, 8], ["8", "x"], ["7", "8", "x"]),
        (["7", "x"], [7, 9], ["7", "x", "9"]),
        ([7], [8], [7, 8]),
        ([], [8], [8]),
        ([7], [], [7]),
        ([], ["x"], ["x"]),
    ],
)
def test_ids_that_go_on_are_texts_where_some_are(old: list[Any], new: list[Any], kept: list[Any]) -> None:
    encoder = fitted(Column("c", Kind.ID), old, [1] * len(old))
    grown = encoder.grown(Vocabulary(new), np.ones(len(new), np.int64))
    assert grown.ids is not None
    assert grown.ids.ids.to_pylist() == kept
    assert grown.encode(old).tolist() == encoder.encode(old).tolist()


def test_a_hash_is_fixed() -> None:
    person = hashlib.blake2b(b"t", digest_size=16).digest()
    key = (3).to_bytes(8, "little")
    want = [
        int.from_bytes(hashlib.blake2b(text, digest_size=8, key=key, person=person).digest(), "little") for text in (b"a", b"7")
    ]
    assert hashes(pa.array(["a", "7"]), 3, "t").tolist() == want
    assert hashes(pa.array([7]), 3, "t").tolist() == want[1:]
    assert hashes(pa.array(["a"]), 4, "t").tolist() != want[:1]
    assert hashes(pa.array(["a"]), 3, "u").tolist() != want[:1]
    # As it was when models were first saved with it.
    assert hashes(pa.array(["a", "7"]), 0, "item").tolist() == [440082678552523054, 1676512749242967922]
    encoder = fitted(HASHED, ["a", "7", "x"], [1, 0, 4], seed=3)
    assert encoder.size == 12
    assert encoder.encode(["a", None, "7"]).tolist() == [2 + want[0] % 10, 0, 2 + want[1] % 10]
    assert encoder.encode([7]).tolist() == [2 + want[1] % 10]
    assert encoder.counts.sum() == 5


def test_expected_collisions_are_those_that_are_drawn() -> None:
    rows, count, draws = 50, 40, 300
    ids = [str(i) for i in range(count)]
    found = [count - len(np.unique(hashes(pa.array(ids), seed, "t") % np.uint64(rows))) for seed in range(draws)]
    column = Column("c", Kind.ID, table="t", encoding="hash", size=rows)
    encoder = fitted(column, ids, [1] * count)
    assert encoder.expected_collisions == pytest.approx(count - rows * (1 - (1 - 1 / rows) ** count))
    # Five standard errors of the mean.
    assert abs(np.mean(found) - encoder.expected_collisions) < 5 * np.std(found) / draws**0.5
    assert str(encoder) == (
        f"t: hash, 52 numbers, 40 ids in training, {encoder.expected_collisions:.1f} of them expected to share a number with one "
        "before (seed 0)"
    )
    assert fitted(Column("c", Kind.ID, encoding="hash", size=1), ids, [1] * count).expected_collisions == count - 1


def test_a_range_keeps_its_ids() -> None:
    encoder = fitted(RANGE, [4, 0], [1, 2])
    assert encoder.size == 7
    assert encoder.counts.tolist() == [0, 0, 2, 0, 0, 0, 1]
    assert encoder.encode([0, 4, 5, -1, None]).tolist() == [2, 6, 1, 1, 0]
    assert encoder.encode(["0", "04", "x", "4", None]).tolist() == [2, 1, 1, 6, 0]
    assert encoder.encode([None, None]).tolist() == [0, 0]
    with pytest.raises(DataError) as caught:
        encoder.encode([0, None, 5], strict=True)
    assert str(caught.value) == "table 't': found the id 5, expected 0 to 4"


@settings(max_examples=EXAMPLES // 2)
@given(
    values=st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6, width=32)), max_size=40),
    buckets=st.integers(1, 8),
)
def test_statistics_are_those_of_the_definition(values: list[float | None], buckets: int) -> None:
    array = np.array([np.nan if value is None else value for value in values], dtype=np.float32)
    before = array.copy()
    found = Statistics.fit(array, buckets)
    count, missing, mean, deviation, borders = slow.statistics(values, buckets)
    assert (found.count, found.missing, list(found.borders)) == (count, missing, borders)
    largest = max((abs(value) for value in values if value is not None), default=0.0)
    assert found.mean == pytest.approx(mean, rel=1e-12, abs=1e-12 * largest)
    assert found.deviation == pytest.approx(deviation, rel=1e-9, abs=1e-9 * largest)
    assert np.array_equal(array, before, equal_nan=True)


def encoders() -> Encoders:
    tables = {
        "v": fitted(Column("v", Kind.ID), ["a", "b"], [1, 2]),
        "t": fitted(HASHED, [5, 6], [1, 1], seed=2**64 - 1),
        "r": fitted(RANGE, [1], [1]),
    }
    return Encoders(tables, {"n": Statistics.fit(np.array([1, 2, 4], np.float32), 3)})


def test_encoders_are_saved_and_read(tmp_path: Path) -> None:
    before = encoders()
    before.save(tmp_path / "e")
    for after in (Encoders.load(tmp_path / "e"), pickle.loads(pickle.dumps(before))):
        assert list(after) == ["v", "t", "r"]
        assert len(after) == 3
        assert after.statistics == before.statistics
        assert str(after) == str(before)
        for name, ids in (("v", ["b", "c", None]), ("t", [5, 9, None]), ("r", [4, 9, None])):
            assert after[name].encode(ids).tolist() == before[name].encode(ids).tolist()
            assert after[name].counts.tolist() == before[name].counts.tolist()


def test_damaged_encoders_are_named(tmp_path: Path) -> None:
    encoders().save(tmp_path / "e")
    for path in sorted((tmp_path / "e").iterdir()):
        raw = path.read_bytes()
        path.write_bytes(raw[:-2] + bytes([raw[-2] ^ 1]) + raw[-1:])
        with pytest.raises(DataError, match=str(path)):
            Encoders.load(tmp_path / "e")
        path.unlink()
        with pytest.raises(DataError, match=str(path)):
            Encoders.load(tmp_path / "e")
        path.write_bytes(raw)
    from jagged.artifacts import verify, write_manifest

    manifest = verify(tmp_path / "e")
    tables, statistics = manifest.content["tables"], manifest.content["statistics"]
    name, number = next(iter(tables)), next(iter(statistics))
    wrong = [{"encoding": "words"}, {"seed": -1}, {"size": "3"}, {"size": True}, {"distinct": 0.5}, {"table": None}]
    changes = [{"tables": {**tables, name: {**tables[name], **one}}} for one in wrong]
    wrong = [{"mean": "0"}, {"mean": []}, {"deviation": 1e300}, {"borders": ["a"]}, {"count": -1}, {"missing": None}]
    changes += [{"statistics": {**statistics, number: {**statistics[number], **one}}} for one in wrong]
    for change in ({"layout": 2}, {"tables": 3}, {"statistics": {"n": {}}}, *changes):
        write_manifest(tmp_path / "e", manifest.files, {**manifest.content, **change})
        with pytest.raises(DataError, match="expected encoders of version 1; save them again"):
            Encoders.load(tmp_path / "e")
