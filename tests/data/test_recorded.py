"""Recorded batches: what is written is what is read, and what cannot be looked up is refused by name."""

from __future__ import annotations

import json
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from jagged.artifacts import read_tensors, save_tensors
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
    path, given = tmp_path / "batches.safetensors", [batch(weighted=weighted, sizes=sizes)] * 2
    record_batches(path, TABLES, iter(given))
    assert [file.name for file in tmp_path.iterdir()] == ["batches.safetensors"]
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


def test_a_full_disk_is_an_error_of_the_operating_system_and_leaves_nothing(tmp_path: Path) -> None:
    many = KeyedJaggedTensor(["a", "b", "c"], torch.zeros(300_000, dtype=torch.int64), lengths=torch.full((3,), 100_000))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, before[1]))
    try:
        with pytest.raises(OSError, match=r"^\[Errno 27\] File too large$"):
            record_batches(tmp_path / "batches.safetensors", TABLES, [many])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert list(tmp_path.iterdir()) == []


# Of the description and the tensors.
Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], Any]


def _of_batch(**changes: Any) -> Change:
    return lambda content, tensors: content["batches"][1].update(changes)


def _of_table(**changes: Any) -> Change:
    return lambda content, tensors: content["tables"][1].update(changes)


def _of_tensors(**changes: torch.Tensor) -> Change:
    return lambda content, tensors: tensors.update({f"1.{name}": tensor for name, tensor in changes.items()})


RECORDED = "batches that jagged.data.record_batches wrote"
FIELDS = "name, rows, width, pooling, data_type and features"
FITTING = "keys, ids, lengths and weights that fit one another and the tables"
LENGTHS = f"batch 1 with lengths that are not those of its 5 ids, expected {FITTING}"
CHANGES: list[tuple[Change, str]] = [
    (lambda content, tensors: content.update(format="another"), f"something else, expected {RECORDED}"),
    (lambda content, tensors: content.update(version=7), "version 7, expected version 2; record the batches again"),
    (lambda content, tensors: content.update(tables=[]), "no tables, expected at least one of tables"),
    (lambda content, tensors: content.update(batches={}), "no batches, expected at least one of batches"),
    (lambda content, tensors: content["tables"].append(3), f"table 2 with no fields, expected {FIELDS}"),
    (_of_table(rows=0), f"table 1 with rows 0, expected {FIELDS}"),
    (_of_table(rows=2**63), f"table 1 with rows 9223372036854775808, expected {FIELDS}"),
    (_of_table(width=True), f"table 1 with width True, expected {FIELDS}"),
    (_of_table(name=None), f"table 1 with name None, expected {FIELDS}"),
    (_of_table(pooling="MAX"), f"table 1 with pooling 'MAX', expected {FIELDS}"),
    (_of_table(pooling=[]), f"table 1 with pooling [], expected {FIELDS}"),
    (_of_table(data_type="FP31"), f"table 1 with data_type 'FP31', expected {FIELDS}"),
    (_of_table(features=["a", 3]), f"table 1 with features ['a', 3], expected {FIELDS}"),
    (_of_table(features=["z"]), f"batch 0 with no key 'z', expected {FITTING}"),
    (lambda content, tensors: content["batches"].append([]), f"batch 2 with no keys, expected {FITTING}"),
    (lambda content, tensors: tensors.pop("1.values"), f"batch 1 with values that are no ids, expected {FITTING}"),
    (_of_tensors(values=torch.zeros(5)), f"batch 1 with values that are no ids, expected {FITTING}"),
    (_of_batch(sizes=[2, 2]), f"batch 1 with sizes that are not those of its keys, expected {FITTING}"),
    (_of_batch(sizes=[7, 0, -1]), f"batch 1 with sizes that are not those of its keys, expected {FITTING}"),
    (_of_batch(sizes=[2, 2, 2**80]), f"batch 1 with lengths that are not those of its samples, expected {FITTING}"),
    (
        lambda content, tensors: tensors.pop("1.lengths"),
        f"batch 1 with lengths that are not those of its samples, expected {FITTING}",
    ),
    (_of_tensors(lengths=torch.tensor([3, -1, 1, 0, 1, 1])), LENGTHS),
    (_of_tensors(lengths=torch.tensor([3, 0, 1, 0, 1, 1])), LENGTHS),
    # Their sum is 2**64 + 5.
    (_of_tensors(lengths=torch.tensor([2**62, 2**62, 2**62, 2**62, 4, 1])), LENGTHS),
    (lambda content, tensors: tensors.pop("1.weights"), f"batch 1 with no weights, but the first, expected {FITTING}"),
    (_of_tensors(weights=torch.ones(4)), f"batch 1 with weights that are not those of its ids, expected {FITTING}"),
    (
        _of_tensors(weights=torch.ones(5, dtype=torch.int32)),
        f"batch 1 with weights that are not those of its ids, expected {FITTING}",
    ),
    (lambda content, tensors: tensors.pop("0.weights"), f"batch 1 with weights, but not the first, expected {FITTING}"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_files_that_are_refused(tmp_path: Path, change: Change, message: str) -> None:
    path = tmp_path / "batches.safetensors"
    record_batches(path, TABLES, [batch(weighted=True)] * 2)
    tensors = read_tensors(path)
    content = json.loads(bytes(tensors["description"].tolist()))
    change(content, tensors)
    tensors["description"] = torch.tensor(list(json.dumps(content).encode()), dtype=torch.uint8)
    save_tensors(path, tensors)
    with pytest.raises(DataError) as refused:
        read_batches(path)
    assert str(refused.value) == f"{path}: found {message}"


def test_files_of_another_kind(tmp_path: Path) -> None:
    path, pipe = tmp_path / "batches.safetensors", tmp_path / "pipe"
    record_batches(path, TABLES, [batch()])
    content = path.read_bytes()
    os.mkfifo(pipe)
    # Who reads it all the same gets something and does not wait.
    held = os.open(pipe, os.O_RDWR)
    os.write(held, b"#" * 20_000)
    again = f"a safetensors file; copy it again; expected {RECORDED}"
    header = int.from_bytes(content[:8], "little")
    for name, written, problem in (
        ("empty", b"", f"found a header of 0 bytes in a file of 0, expected {again}"),
        (
            "table",
            b"user_id,item_id\n",
            f"found a header of {int.from_bytes(b'user_id,', 'little')} bytes in a file of 16, expected {again}",
        ),
        (
            "short",
            content[:-1],
            f"found tensors of {len(content) - 8 - header} bytes in {len(content) - 9 - header}, expected {again}",
        ),
        ("none", None, f"cannot be read: No such file or directory; expected {RECORDED}"),
        (".", None, f"found a directory, expected a regular file; expected {RECORDED}"),
        ("pipe", None, f"found a pipe or a device, expected a regular file; expected {RECORDED}"),
    ):
        if written is not None:
            (tmp_path / name).write_bytes(written)
        with pytest.raises(DataError) as refused:
            read_batches(tmp_path / name)
        assert str(refused.value) == f"{tmp_path / name}: {problem}"
    os.close(held)
    # Other tensors, a description that is no bytes or no text, and what stands for more than the file has.
    no_json = "found no JSON (UnicodeDecodeError: "
    for tensors, problem in (
        ({"a": torch.zeros(3)}, f"found something else, expected {RECORDED}"),
        ({"description": torch.zeros(3)}, f"found something else, expected {RECORDED}"),
        ({"description": torch.full((3,), 255, dtype=torch.uint8)}, no_json),
    ):
        save_tensors(path, tensors)
        with pytest.raises(DataError) as refused:
            read_batches(path)
        assert str(refused.value).startswith(f"{path}: {problem}")
        assert len(str(refused.value).splitlines()) == 1
    torch.save({"format": "jagged recorded batches", "values": torch.zeros(1).expand(2**40)}, path)
    with pytest.raises(DataError) as refused:
        read_batches(path)
    assert str(refused.value) == f"{path}: found a zip file, as version 1 was, expected version 2; record the batches again"


def test_what_cannot_be_recorded(tmp_path: Path) -> None:
    path = tmp_path / "batches.safetensors"
    for tables, batches, problem in (
        (TABLES, [], "no batches, expected at least one of batches"),
        (
            [EmbeddingBagConfig(name="new", num_embeddings=9, embedding_dim=4)],
            [batch()],
            f"batch 0 with no key 'new', expected {FITTING}",
        ),
    ):
        with pytest.raises(DataError) as refused:
            record_batches(path, tables, batches)
        assert str(refused.value) == f"{path}: found {problem}"
    with pytest.raises(FileNotFoundError):
        record_batches(tmp_path / "none" / path.name, TABLES, [batch()])
    assert list(tmp_path.iterdir()) == []
