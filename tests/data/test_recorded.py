"""Recorded batches: what is written is what is read, and what cannot be looked up is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from jagged.data import DataError, read_batches, record_batches

TABLES = [
    EmbeddingBagConfig(name="x", num_embeddings=9, embedding_dim=4, feature_names=["a", "b"]),
    EmbeddingBagConfig(
        name="c", num_embeddings=5, embedding_dim=3, feature_names=[], pooling=PoolingType.MEAN, data_type=DataType.BF16
    ),
]


def batch(*, weighted: bool = False, sizes: tuple[int, ...] | None = None) -> KeyedJaggedTensor:
    lengths = torch.tensor([2, 0, 1, 0, 1, 1])
    options: dict[str, Any] = {} if sizes is None else {"stride_per_key_per_rank": torch.tensor(sizes)[:, None]}
    # A part of more.
    values = torch.arange(100, dtype=torch.int32)[3:8]
    weights = torch.rand(5, requires_grad=True) if weighted else None
    return KeyedJaggedTensor(["a", "c", "b"], values, weights=weights, lengths=lengths, **options)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("sizes", [None, (1, 3, 2)])
def test_round_trip(tmp_path: Path, weighted: bool, sizes: tuple[int, ...] | None) -> None:
    path, given = tmp_path / "batches.pt", [batch(weighted=weighted, sizes=sizes)] * 2
    record_batches(path, TABLES, iter(given))
    assert [file.name for file in tmp_path.iterdir()] == ["batches.pt"]
    tables, batches = recorded = read_batches(str(path))
    assert recorded.is_weighted == weighted
    assert [(of.name, of.num_embeddings, of.embedding_dim, of.feature_names) for of in tables] == [
        ("x", 9, 4, ["a", "b"]),
        ("c", 5, 3, ["c"]),
    ]
    assert [(of.pooling, of.data_type) for of in tables] == [(of.pooling, of.data_type) for of in TABLES]
    assert len(batches) == 2
    for got, expected in zip(batches, given, strict=True):
        assert got.keys() == expected.keys()
        assert got.stride_per_key() == expected.stride_per_key() == [2, 2, 2] if sizes is None else list(sizes)
        assert torch.equal(got.values(), expected.values())
        assert torch.equal(got.offsets(), expected.offsets())
        assert not weighted or torch.equal(got.weights(), expected.weights())
    assert path.stat().st_size < 10_000


Change = Callable[[dict[str, Any]], Any]


def _of_batch(**changes: Any) -> Change:
    return lambda content: content["batches"][1].update(changes)


def _of_table(**changes: Any) -> Change:
    return lambda content: content["tables"][1].update(changes)


CHANGES: list[tuple[Change, str]] = [
    (lambda content: content.update(format="another"), "found something else, expected batches that jagged.data.record_batches"),
    (lambda content: content.update(version=7), "found version 7, expected version 1; record the batches again"),
    (lambda content: content.update(tables=[]), "found no tables, expected at least one"),
    (lambda content: content.update(batches={}), "found no batches, expected at least one"),
    (lambda content: content["tables"].append(3), "found table 2 with no fields"),
    (_of_table(rows=0), "found table 1 with rows 0"),
    (_of_table(width=True), "found table 1 with width True"),
    (_of_table(name=None), "found table 1 with name None"),
    (_of_table(pooling="MAX"), "found table 1 with pooling 'MAX'"),
    (_of_table(data_type="FP31"), "found table 1 with data_type 'FP31'"),
    (_of_table(features=["a", 3]), r"found table 1 with features \['a', 3\]"),
    (_of_table(features=["z"]), "found batch 0 with no key 'z'"),
    (lambda content: content["batches"].append([]), "found batch 2 with no keys"),
    (_of_batch(values=torch.zeros(5)), "found batch 1 with values that are no ids"),
    (_of_batch(sizes=[2, 2]), "found batch 1 with sizes that are not those of its keys"),
    (_of_batch(sizes=[7, 0, -1]), "found batch 1 with sizes that are not those of its keys"),
    (_of_batch(sizes=[2, 2, 3]), "found batch 1 with lengths that are not those of its samples"),
    (_of_batch(lengths=torch.tensor([3, -1, 1, 0, 1, 1])), "found batch 1 with lengths that are not those of its 5 ids"),
    (_of_batch(lengths=torch.tensor([3, 0, 1, 0, 1, 1])), "found batch 1 with lengths that are not those of its 5 ids"),
    (_of_batch(weights=None), "found batch 1 with no weights, but the first"),
    (_of_batch(weights=torch.ones(4)), "found batch 1 with weights that are not those of its ids"),
    (lambda content: content["batches"][0].update(weights=None), "found batch 1 with weights, but not the first"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_files_that_are_refused(tmp_path: Path, change: Change, message: str) -> None:
    path = tmp_path / "batches.pt"
    record_batches(path, TABLES, [batch(weighted=True)] * 2)
    content = torch.load(path, weights_only=True)
    change(content)
    torch.save(content, path)
    with pytest.raises(DataError, match=message) as refused:
        read_batches(path)
    assert str(refused.value).startswith(f"{path}: ")


def test_files_of_another_kind(tmp_path: Path) -> None:
    path = tmp_path / "batches.pt"
    for content in (b"", b"user_id,item_id\n1,2\n", b"PK\x03\x04" + b"\0" * 100):
        path.write_bytes(content)
        with pytest.raises(DataError, match="found something else, expected batches that"):
            read_batches(path)
    torch.save([1, 2], path)
    with pytest.raises(DataError, match="found something else"):
        read_batches(path)
    # No code is run.
    torch.save({"format": Path}, path)
    with pytest.raises(DataError, match="found something else"):
        read_batches(path)
    with pytest.raises(DataError, match="found a file that cannot be read"):
        read_batches(tmp_path / "none.pt")
    with pytest.raises(DataError, match="found a file that cannot be read"):
        read_batches(tmp_path)


def test_what_cannot_be_recorded(tmp_path: Path) -> None:
    path = tmp_path / "batches.pt"
    with pytest.raises(DataError, match="found no batches"):
        record_batches(path, TABLES, [])
    with pytest.raises(DataError, match="found batch 0 with no key 'new'"):
        record_batches(path, [EmbeddingBagConfig(name="new", num_embeddings=9, embedding_dim=4)], [batch()])
    with pytest.raises(FileNotFoundError):
        record_batches(tmp_path / "none" / "batches.pt", TABLES, [batch()])
    assert list(tmp_path.iterdir()) == []
