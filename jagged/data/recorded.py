"""Batches of features written down beside the tables that they are looked up in, for `jagged tune`.

A file is plain tensors, numbers and words, as `torch.save` writes them; it is read with `weights_only=True`, so that it can bring
no code.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from jagged.artifacts import replacing
from jagged.data.errors import refuse, shown

FORMAT, VERSION = "jagged recorded batches", 1
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
        >>> record_batches("batches.pt", [table], [batch])
        >>> read_batches("batches.pt").batches[0].values()
        tensor([ 5, 99])
    """
    content: dict[str, Any] = {
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
        "batches": [
            {
                "keys": list(batch.keys()),
                "values": _plain(batch.values()),
                "lengths": _plain(batch.lengths()),
                "weights": None if batch.weights_or_none() is None else _plain(batch.weights()),
                "sizes": list(batch.stride_per_key()),
            }
            for batch in batches
        ],
    }
    _checked(content, path)
    with replacing(Path(path)) as aside, open(aside, "wb") as file:
        torch.save(content, file)


def read_batches(path: str | os.PathLike[str]) -> RecordedBatches:
    """Read what `record_batches` wrote.

    Raises:
        DataError: a file that is not there, of another kind or version, or whose batches and tables do not fit.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise refuse(path, f"a file that cannot be read ({error.strerror or error})", EXPECTED) from None
    except Exception:
        # What is no archive of tensors fails in as many ways as there are bytes.
        raise refuse(path, "something else", EXPECTED) from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise refuse(path, "something else", EXPECTED)
    if content.get("version") != VERSION:
        raise refuse(path, f"version {shown(content.get('version'))}", f"version {VERSION}", "record the batches again")
    _checked(content, path)
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
    return RecordedBatches(tables, [_batch(of) for of in content["batches"]])


def _plain(tensor: Tensor) -> Tensor:
    # A view would bring all of what it is a view of.
    return tensor.detach().cpu().clone()


def _batch(of: dict[str, Any]) -> KeyedJaggedTensor:
    sizes: dict[str, Any] = {}
    if len(set(of["sizes"])) > 1:
        sizes["stride_per_key_per_rank"] = torch.tensor(of["sizes"])[:, None]
    return KeyedJaggedTensor(of["keys"], of["values"], weights=of["weights"], lengths=of["lengths"], **sizes)


def _checked(content: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Refuse tables and batches that cannot be looked up."""
    tables, batches = content.get("tables"), content.get("batches")
    for name, of in (("tables", tables), ("batches", batches)):
        if not isinstance(of, list) or not of:
            raise refuse(path, f"no {name}", f"at least one of {name}")
    assert isinstance(tables, list)
    assert isinstance(batches, list)
    for number, table in enumerate(tables):
        if problem := _problem_of_table(table):
            raise refuse(path, f"table {number} with {problem}", "name, rows, width, pooling, data_type and features")
    features = [name for table in tables for name in table["features"]]
    weighted = isinstance(batches[0], dict) and batches[0].get("weights") is not None
    for number, batch in enumerate(batches):
        if problem := _problem_of_batch(batch, features, weighted):
            raise refuse(
                path, f"batch {number} with {problem}", "keys, ids, lengths and weights that fit one another and the tables"
            )


def _problem_of_table(table: Any) -> str | None:
    if not isinstance(table, dict):
        return "no fields"
    for name in ("rows", "width"):
        if type(table.get(name)) is not int or table[name] < 1:
            return f"{name} {shown(table.get(name))}"
    if not isinstance(table.get("name"), str):
        return f"name {shown(table.get('name'))}"
    for name, kind in (("pooling", PoolingType), ("data_type", DataType)):
        if table.get(name) not in kind.__members__:
            return f"{name} {shown(table.get(name))}"
    return None if _are_words(table.get("features")) else f"features {shown(table.get('features'))}"


def _problem_of_batch(batch: Any, features: list[str], weighted: bool) -> str | None:
    if not isinstance(batch, dict) or not _are_words(batch.get("keys")):
        return "no keys"
    values, lengths, weights, sizes = (batch.get(name) for name in ("values", "lengths", "weights", "sizes"))
    if not isinstance(values, Tensor) or values.dtype not in IDS or values.ndim != 1:
        return "values that are no ids"
    if (
        not isinstance(sizes, list)
        or len(sizes) != len(batch["keys"])
        or any(type(size) is not int or size < 0 for size in sizes)
    ):
        return "sizes that are not those of its keys"
    if not isinstance(lengths, Tensor) or lengths.dtype not in IDS or list(lengths.shape) != [sum(sizes)]:
        return "lengths that are not those of its samples"
    if bool((lengths < 0).any()) or int(lengths.sum()) != len(values):
        return f"lengths that are not those of its {len(values)} ids"
    if (weights is not None) != weighted:
        return "weights, but not the first" if weights is not None else "no weights, but the first"
    if weights is not None and (not isinstance(weights, Tensor) or weights.shape != values.shape):
        return "weights that are not those of its ids"
    missing = [name for name in features if name not in batch["keys"]]
    return f"no key {shown(missing[0])}" if missing else None


def _are_words(names: Any) -> bool:
    return isinstance(names, list) and bool(names) and all(isinstance(name, str) for name in names)
