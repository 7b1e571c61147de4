"""Collections that read the same tables, pooled or row by row: one parameter, one storage, one update."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise
from typing import Any

from jagged.modules.embedding_bags import ScheduledEmbeddingBagCollection
from jagged.modules.embedding_sequences import ScheduledEmbeddingCollection
from jagged.modules.table_storage import Table, TableStorage
from jagged.modules.trained_tables import TrainedTables
from jagged.ops import BagLayout


def share_tables(*collections: ScheduledEmbeddingBagCollection | ScheduledEmbeddingCollection) -> None:
    """Let collections have the tables together that go by one name in several of them: each becomes one parameter.

    All tables of the collections, of each data type, come to lie in one storage; the first collection's values and optimizer
    states stay. With an optimizer in the backward pass a row that several collections read is updated once, by the sum of its
    gradients.

    Args:
        collections: `ScheduledEmbeddingBagCollection`, `ScheduledEmbeddingCollection`, changed in place; all with the same
            optimizer and options, or without any.

    Raises:
        ValueError: tables of one name that differ in rows, width or data type, other optimizers, collections with `cache_bytes`.

    Example:
        >>> from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
        >>> from jagged.modules import ScheduledEmbeddingBagCollection, ScheduledEmbeddingCollection, share_tables
        >>> table = {"name": "item", "embedding_dim": 8, "num_embeddings": 100}
        >>> bags = ScheduledEmbeddingBagCollection([EmbeddingBagConfig(**table, feature_names=["clicked"])])
        >>> rows = ScheduledEmbeddingCollection([EmbeddingConfig(**table, feature_names=["history"])])
        >>> share_tables(bags, rows)
        >>> bags.embedding_bags["item"].weight is rows.embeddings["item"].weight
        True
    """
    for first, other in pairwise(collections):
        for name, module in other._modules_of_tables.items():
            if name not in first._modules_of_tables:
                continue
            expected, got = (_described(of.weight) for of in (first._modules_of_tables[name], module))
            if expected != got:
                raise ValueError(f"collections: expected tables of one name to be alike, got {expected} and {got} for {name!r}")
    put_together(collections, lambda _, name: name)


def put_together(collections: Sequence[TrainedTables], key_of: Callable[[TrainedTables, str], Hashable]) -> None:
    """Put the tables of collections into one storage for each data type, those of one key as one.

    Raises:
        ValueError: other optimizers, or rows that are cached.
    """
    if any(of._cache is not None for of in collections):
        raise ValueError(
            "collections: expected tables that are on the device as a whole, got some with cache_bytes; let one collection read "
            "them all, or leave cache_bytes out"
        )
    optimizers = [None if of._optimizer is None else of._optimizer.args for of in collections]
    if optimizers.count(optimizers[0]) != len(optimizers):
        raise ValueError("collections: expected one optimizer for tables that are shared, got several; make all with the same")
    modules: dict[Hashable, Table] = {}
    for collection in collections:
        for name in collection._modules_of_tables:
            module = modules.setdefault(key_of(collection, name), collection._modules_of_tables[name])
            collection._modules_of_tables[name] = module
    by_dtype: dict[Any, list[Table]] = {}
    for module in modules.values():
        by_dtype.setdefault(module.weight.dtype, []).append(module)
    storages = {dtype: _storage_of(of, collections[0]) for dtype, of in by_dtype.items()}
    for storage in storages.values():
        storage.is_shared = True
    for collection in collections:
        for number, part in enumerate(collection._parts):
            own = [collection._modules_of_tables[name] for name in part.names]
            together = by_dtype[own[0].weight.dtype]
            places = [together.index(module) for module in own]
            storage = storages[own[0].weight.dtype]
            names = [""] * len(together)
            for name, place in zip(part.names, places, strict=True):
                names[place] = name
            tables = tuple(places[table] for table in part.layout.tables or ())
            layout = BagLayout(storage.layout.rows, storage.layout.widths, tables, part.layout.means, part.layout.sequences)
            collection._parts[number] = part._replace(names=names, tables=storage, layout=layout)


def _storage_of(modules: list[Table], first: TrainedTables) -> TableStorage:
    rows, widths = (tuple(module.weight.shape[dim] for module in modules) for dim in (0, 1))
    return TableStorage(BagLayout(rows, widths), modules, first._optimizer)


def _described(weight: Any) -> str:
    return f"{list(weight.shape)} of {weight.dtype}"
