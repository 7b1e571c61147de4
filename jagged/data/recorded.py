"""Batches of features written down beside the tables that they are looked up in, for `jagged tune-bags`.

A file is one of safetensors. It holds the batches' tensors, and as the bytes of a JSON text the tables and each batch's keys, so
that it can bring no code, and a small one no large tensors.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from jagged.artifacts import ArtifactError, dump_json, parse_json, read_tensors, save_tensors
from jagged.data.errors import DataError, refuse, shown

FORMAT, VERSION = "jagged recorded batches", 2
DESCRIPTION, TENSORS = "description", ("values", "lengths", "weights")
EXPECTED = "batches that jagged.data.record_batches wrote"
IDS = (torch.int32, torch.int64)


class RecordedBatches(NamedTuple):
    """What a file of recorded batches has.

    Args:
        tables: as they are in the model, without weights.
        batches: on the CPU.
    """

    tables: list[EmbeddingBagConfig]
    batches: list[KeyedJaggedTensor]

    @property
    def is_weighted(self) -> bool:
        """Whether ids have weights."""
        return self.batches[0].weights_or_none() is not None


def record_batches(
    path: str | os.PathLike[str], tables: Sequence[EmbeddingBagConfig], batches: Iterable[KeyedJaggedTensor]
) -> None:
    """Write down batches of a loader and the tables that read them; a few batches of the size that is used are enough.

    Args:
        path: of the file, which appears whole or not at all.
        tables: `embedding_bag_configs()` of an `EmbeddingBagCollection` or a `ScheduledEmbeddingBagCollection`.
        batches: on any device; with weights all of them or none. Inverse indices are left out.

    Raises:
        DataError: no tables or batches, or a batch without one of the tables' features.
        OSError: a file that cannot be written.

    Example:
        >>> import torch
        >>> from torchrec.modules.embedding_configs import EmbeddingBagConfig
        >>> from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
        >>> from jagged.data import read_batches, record_batches
        >>> table = EmbeddingBagConfig(name="item", embedding_dim=8, num_embeddings=100, feature_names=["clicked"])
        >>> batch = KeyedJaggedTensor(keys=["clicked"], values=torch.tensor([5, 99]), lengths=torch.tensor([2, 0]))
        >>> record_batches("batches.safetensors", [table], [batch])
        >>> read_batches("batches.safetensors").batches[0].values()
        tensor([ 5, 99])
    """
    tensors: dict[str, Tensor] = {}
    described = []
    for number, batch in enumerate(batches):
        described.append({"keys": list(batch.keys()), "sizes": list(batch.stride_per_key())})
        for name, tensor in zip(TENSORS, (batch.values(), batch.lengths(), batch.weights_or_none()), strict=True):
            if tensor is not None:
                # Tensors of a file share no memory, as parts of one or a batch that comes twice do.
                tensors[f"{number}.{name}"] = tensor.detach().cpu().clone()
    content = {
        "format": FORMAT,
        "version": VERSION,
        "tables": [
            {
                "name": table.name,
                "rows": table.num_embeddings,
                "width": table.embedding_dim,
                "pooling": table.pooling.name,
                "data_type": table.data_type.name,
                "features": list(table.feature_names or [table.name]),
            }
            for table in tables
        ],
        "batches": described,
    }
    _check(content, tensors, path)
    text = torch.frombuffer(bytearray(dump_json(content)), dtype=torch.uint8)
    save_tensors(Path(path), {DESCRIPTION: text, **tensors})


def read_batches(path: str | os.PathLike[str]) -> RecordedBatches:
    """Read what `record_batches` wrote.

    Raises:
        DataError: a file that is not there, of another kind or version, or whose batches and tables do not fit.
    """
    try:
        tensors = read_tensors(Path(path))
        text = tensors.pop(DESCRIPTION, None)
        content = {} if text is None or text.dtype != torch.uint8 else parse_json(text.numpy().tobytes(), Path(path))
    except ArtifactError as error:
        if Path(path).is_file() and zipfile.is_zipfile(path):
            # Version 1 was a file of torch.save.
            raise refuse(path, "a zip file, as version 1 was", f"version {VERSION}", "record the batches again") from None
        raise DataError(f"{error}; expected {EXPECTED}") from None
    if content.get("format") != FORMAT:
        raise refuse(path, "something else", EXPECTED)
    if content.get("version") != VERSION:
        raise refuse(path, f"version {shown(content.get('version'))}", f"version {VERSION}", "record the batches again")
    _check(content, tensors, path)
    tables = [
        EmbeddingBagConfig(
            name=table["name"],
            num_embeddings=table["rows"],
            embedding_dim=table["width"],
            feature_names=table["features"],
            pooling=PoolingType[table["pooling"]],
            data_type=DataType[table["data_type"]],
        )
        for table in content["tables"]
    ]
    return RecordedBatches(tables, [_batch(of, _tensors_of(number, tensors)) for number, of in enumerate(content["batches"])])


def _tensors_of(number: int, tensors: dict[str, Tensor]) -> tuple[Tensor | None, ...]:
    return tuple(tensors.get(f"{number}.{name}") for name in TENSORS)


def _batch(of: dict[str, Any], tensors: tuple[Tensor | None, ...]) -> KeyedJaggedTensor:
    values, lengths, weights = tensors
    sizes: dict[str, Any] = {} if len(set(of["sizes"])) == 1 else {"stride_per_key_per_rank": torch.tensor(of["sizes"])[:, None]}
    assert values is not None
    return KeyedJaggedTensor(of["keys"], values, weights=weights, lengths=lengths, **sizes)


def _check(content: dict[str, Any], tensors: dict[str, Tensor], path: str | os.PathLike[str]) -> None:
    """Refuse tables and batches that cannot be looked up."""
    for name in ("tables", "batches"):
        if not isinstance(content.get(name), list) or not content[name]:
            raise refuse(path, f"no {name}", f"at least one of {name}")
    tables, batches = content["tables"], content["batches"]
    for number, table in enumerate(tables):
        if problem := _problem_of_table(table):
            raise refuse(path, f"table {number} with {problem}", "name, rows, width, pooling, data_type and features")
    features = [name for table in tables for name in table["features"]]
    for number, batch in enumerate(batches):
        if problem := _problem_of_batch(batch, _tensors_of(number, tensors), features, "0.weights" in tensors):
            raise refuse(
                path, f"batch {number} with {problem}", "keys, ids, lengths and weights that fit one another and the tables"
            )


def _problem_of_table(table: Any) -> str | None:
    if not isinstance(table, dict):
        return "no fields"
    for name in ("rows", "width"):
        if type(table.get(name)) is not int or not 1 <= table[name] < 2**63:
            return f"{name} {shown(table.get(name))}"
    if not isinstance(table.get("name"), str):
        return f"name {shown(table.get('name'))}"
    for name, kind in (("pooling", PoolingType), ("data_type", DataType)):
        if table.get(name) not in list(kind.__members__):
            return f"{name} {shown(table.get(name))}"
    return None if _are_words(table.get("features")) else f"features {shown(table.get('features'))}"


def _problem_of_batch(batch: Any, tensors: tuple[Tensor | None, ...], features: list[str], weighted: bool) -> str | None:
    if not isinstance(batch, dict) or not _are_words(batch.get("keys")):
        return "no keys"
    (values, lengths, weights), sizes = tensors, batch.get("sizes")
    if values is None or values.dtype not in IDS or values.ndim != 1:
        return "values that are no ids"
    if (
        not isinstance(sizes, list)
        or len(sizes) != len(batch["keys"])
        or any(type(size) is not int or size < 0 for size in sizes)
    ):
        return "sizes that are not those of its keys"
    if lengths is None or lengths.dtype not in IDS or list(lengths.shape) != [sum(sizes)]:
        return "lengths that are not those of its samples"
    # A sum of longer ones could pass the largest number and come out right.
    if bool(((lengths < 0) | (lengths > len(values))).any()) or int(lengths.sum()) != len(values):
        return f"lengths that are not those of its {len(values)} ids"
    if (weights is not None) != weighted:
        return "weights, but not the first" if weights is not None else "no weights, but the first"
    if weights is not None and (not weights.is_floating_point() or weights.shape != values.shape):
        return "weights that are not those of its ids"
    missing = [name for name in features if name not in batch["keys"]]
    return f"no key {shown(missing[0])}" if missing else None


def _are_words(names: Any) -> bool:
    return isinstance(names, list) and bool(names) and all(isinstance(name, str) for name in names)
