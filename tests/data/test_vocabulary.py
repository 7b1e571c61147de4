from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jagged.data import DataError, Vocabulary
from jagged.data.vocabulary import digest, infer_integers

INTEGERS = st.lists(st.integers(-(2**63), 2**63 - 1), unique=True)
STRINGS = st.lists(st.text(st.characters(codec="utf-8"), max_size=6), unique=True)


@given(st.one_of(INTEGERS, STRINGS))
def test_there_and_back(ids: list[object]) -> None:
    vocabulary = Vocabulary(pa.array(ids, pa.large_string() if ids and isinstance(ids[0], str) else pa.int64()))
    assert len(vocabulary) == len(ids)
    dense = vocabulary.encode(list(reversed(ids)))
    assert dense.dtype == np.int64
    assert dense.tolist() == list(reversed(range(len(ids))))
    assert vocabulary.decode(dense).to_pylist() == list(reversed(ids))


@given(st.one_of(INTEGERS, STRINGS))
def test_saved_and_loaded(tmp_path: Path, ids: list[object]) -> None:
    vocabulary = Vocabulary(pa.array(ids, pa.large_string() if ids and isinstance(ids[0], str) else pa.int64()))
    vocabulary.save(tmp_path / "v.arrow")
    again = Vocabulary.load(tmp_path / "v.arrow")
    assert again == vocabulary
    assert again.ids.type == vocabulary.ids.type
    assert [path.name for path in tmp_path.iterdir()] == ["v.arrow"]


def test_unknown_ids_are_minus_one() -> None:
    assert Vocabulary(["a", "b"]).encode(["b", "c", None, "a"]).tolist() == [1, -1, -1, 0]
    assert Vocabulary([5, 7]).encode(np.array([7, 6, 5])).tolist() == [1, -1, 0]
    assert Vocabulary(["a"]).encode([]).tolist() == []
    assert Vocabulary(pa.array([], pa.int64())).encode([1]).tolist() == [-1]


def test_spellings_of_integers() -> None:
    numbers = Vocabulary([5, -7, 2**63 - 1])
    assert numbers.encode(["5", "-7", "05", "+5", "x", str(2**63 - 1), str(2**63), "9" * 19]).tolist() == [
        0,
        1,
        -1,
        -1,
        -1,
        2,
        -1,
        -1,
    ]
    assert Vocabulary(["5", "x"]).encode([5, 6]).tolist() == [0, -1]
    assert numbers.encode(pa.array([5, 2**63 + 5], pa.uint64())).tolist() == [0, -1]
    assert Vocabulary(["5"]).encode(pa.array([5], pa.uint64())).tolist() == [0]


def test_arrow_inputs() -> None:
    vocabulary = Vocabulary(["a", "b"])
    assert vocabulary.encode(pa.chunked_array([["a"], ["b", "z"]])).tolist() == [0, 1, -1]
    assert vocabulary.encode(pa.array(["b", "a"]).dictionary_encode()).tolist() == [1, 0]
    assert vocabulary.decode(torch.tensor([[1], [0]])).to_pylist() == ["b", "a"]


@pytest.mark.parametrize("ids", [[1, 1], [1, None], [1.5], pa.array([2**63], pa.uint64()), [[1]]])
def test_ids_that_are_none(ids: object) -> None:
    with pytest.raises(DataError, match="vocabulary: found"):
        Vocabulary(ids)


@pytest.mark.parametrize("values", [[1.5], [b"a"], [1, "a"], [2**70]])
def test_values_that_are_no_ids(values: list[object]) -> None:
    with pytest.raises(DataError, match="vocabulary: found"):
        Vocabulary(["a"]).encode(values)


@pytest.mark.parametrize("dense", [[2], [-1], [0, 5]])
def test_decoding_out_of_range(dense: list[int]) -> None:
    with pytest.raises(IndexError, match="expected 0 to 1"):
        Vocabulary(["a", "b"]).decode(dense)


@pytest.mark.parametrize("ids", [list(range(10)), [f"item {i}" for i in range(10)]])
def test_damage_is_found_or_harmless(tmp_path: Path, ids: list[object]) -> None:
    """Every bit of the file is flipped once, those of names and of buffers' lengths among them."""
    path = tmp_path / "v.arrow"
    vocabulary = Vocabulary(ids)
    vocabulary.save(path)
    whole = path.read_bytes()
    found = 0
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            loaded = Vocabulary.load(path)
        except DataError as error:
            found += str(path) in str(error)
        else:
            # Bits that carry nothing, such as padding.
            assert loaded == vocabulary
    assert found > 4 * len(whole)
    for cut in (0, 7, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(DataError, match=r"v\.arrow"):
            Vocabulary.load(path)


def test_integers_are_inferred_from_all_or_none() -> None:
    for texts, kind in ((["1", "-2"], pa.int64()), (["1", "-0"], pa.large_string()), (["1", "1e3"], pa.large_string())):
        assert infer_integers(pa.array(texts, pa.large_string())).type == kind
    assert infer_integers(pa.array(["9" * 19], pa.large_string())).type == pa.large_string()


def test_the_digest_ignores_the_layout() -> None:
    for ids in (pa.array(["a", "bc", "", "d"], pa.large_string()), pa.array([1, 2, 3, 4])):
        assert digest(ids.slice(1, 2)) == digest(pa.array(ids.slice(1, 2).to_pylist(), ids.type))
        assert digest(ids) != digest(ids.slice(0, 3))
    assert digest(pa.array(["ab", "c"], pa.large_string())) != digest(pa.array(["a", "bc"], pa.large_string()))
