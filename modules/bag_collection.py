"""What collections of embedding bags have in common: the ids of a KeyedJaggedTensor in, a KeyedTensor out, and plans."""

from __future__ import annotations

import functools
import os
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, groupby, pairwise
from typing import Any, NamedTuple, NoReturn, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, EmbeddingBagConfig
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollectionInterface,
    get_embedding_names_by_table,
    process_pooled_embeddings,
    reorder_inverse_indices,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from jagged.ops import BagLayout, BagPlan, BagSchedules, PlanMismatch, sample_of_row, validate_offsets, values_are_trusted

# Keys that a message names.
_SHOWN = 3

_Forward = TypeVar("_Forward", bound=Callable[..., Any])


class Lookups(NamedTuple):
    """Ids of features, feature after feature, as the operator takes them."""

    ids: Tensor
    offsets: Tensor
    weights: Tensor | None
    batch_sizes: list[int] | None


class KeyOrder:
    """Where features stand among a batch's keys; kept, for keys are those of the batch before nearly always."""

    def __init__(self, features: list[str]) -> None:
        self._features = features
        # Of keys that stand twice in a batch the last one counts, so that a feature of two tables is read by both from there.
        self._repeats = len(set(features)) < len(features)
        # One attribute, so that another thread with other keys does no harm.
        self._last: tuple[list[str], list[int] | None] = list(features), self._found(features) if self._repeats else None

    def places(self, keys: list[str]) -> list[int] | None:
        """Return the place of each feature among the keys; None where the keys are the features."""
        known, places = self._last
        is_known = keys == known
        if not is_known:
            places = None if keys == self._features and not self._repeats else self._found(keys)
        # Strings are compared faster with themselves, so the batch's own are kept.
        if not is_known or (keys and keys[0] is not known[0]):
            self._last = list(keys), places
        return places

    def _found(self, keys: list[str]) -> list[int]:
        places = {key: place for place, key in enumerate(keys)}
        if missing := list(dict.fromkeys(name for name in self._features if name not in places)):
            raise ValueError(f"features: expected a key for every feature of the tables, got none for {', '.join(missing)}")
        return [places[name] for name in self._features]


class Part(Protocol):
    """Tables that are looked up in one launch, and the features that read them, in the order of the tables."""

    @property
    def layout(self) -> BagLayout:
        """Where the tables lie."""

    @property
    def features(self) -> list[str]:
        """Keys of a batch."""

    @property
    def order(self) -> KeyOrder:
        """Where they stand among a batch's keys."""


def between_graphs(forward: _Forward) -> _Forward:
    """Let a collection's forward run between compiled graphs."""
    disabled = torch.compiler.disable(
        forward, reason="a collection runs between compiled graphs; compile without fullgraph, export with strict=False"
    )
    return cast(_Forward, disabled)


def name_features(tables: Sequence[BaseEmbeddingConfig]) -> None:
    """Let tables without features read those of their names; as TorchRec does, in the configurations themselves."""
    for table in tables:
        table.feature_names = table.feature_names or [table.name]


class BagCollection(EmbeddingBagCollectionInterface):  # type: ignore[misc]
    """Tables in parts, each of which one launch looks up; a subclass has the tables, and says how a part is pooled."""

    _parts: Sequence[Part]
    # For each feature of the output its part, and its place there.
    _places: list[tuple[int, int]]
    # For a device the schedules of each part.
    _schedules: dict[torch.device, list[BagSchedules | None]]

    def _describe(self, tables: list[EmbeddingBagConfig], is_weighted: bool, output_dtype: torch.dtype) -> None:
        name_features(tables)
        self._embedding_bag_configs = tables
        self._is_weighted = is_weighted
        self._output_dtype = output_dtype
        self._embedding_names = [name for names in get_embedding_names_by_table(tables) for name in names]
        self._widths = [table.embedding_dim for table in tables for _ in table.feature_names]

    def _plan_with(self, plan: BagPlan | str | os.PathLike[str] | None, mismatch: PlanMismatch) -> None:
        self._plan: BagPlan | None = None
        self._mismatch = mismatch
        self._schedules = {}
        self.follow(plan)

    def _pooled(self, number: int, features: KeyedJaggedTensor) -> Tensor:
        """The output of one part: `[B, W]`, or flat where features have batches of their own."""
        raise NotImplementedError

    @between_graphs
    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Return the pooled embeddings of every feature."""
        if isinstance(features, Proxy):
            return as_leaf(self, features)
        features = maybe_td_to_kjt(features, None)
        try:
            pooled = [self._pooled(number, features) for number in range(len(self._parts))]
        except ValueError:
            # The operator knows no keys.
            if features.values().is_cpu:
                refuse_malformed(features)
                refuse_unknown_ids(features, self._embedding_bag_configs)
            raise
        is_ragged, inverse = features.variable_stride_per_key(), features.inverse_indices_or_none()
        if is_ragged or inverse is not None:
            values = self._expanded(pooled, features, is_ragged)
        else:
            values = pooled[0] if len(pooled) == 1 else self._interleaved(pooled)
        return KeyedTensor(keys=self._embedding_names, length_per_key=self._widths, values=values)

    def __prepare_scriptable__(self) -> BagCollection:
        """Refuse `torch.jit.script`, of the collection or of a model that holds it."""
        refuse_scripting(self)

    # By an attribute `_lookups` TorchRec's DMPCollection knows collections that are sharded.
    def _lookups_of(self, part: Part, features: KeyedJaggedTensor) -> Lookups:
        weights = None
        if self._is_weighted and (weights := features.weights_or_none()) is None:
            raise ValueError("features: expected weights, as is_weighted says, got none; give KeyedJaggedTensor weights")
        return lookups_of(features, part.order, weights)

    def _interleaved(self, pooled: list[Tensor]) -> Tensor:
        """The parts' columns in the order of the tables."""
        slices = []
        for part, of_part in groupby(self._places, key=lambda place: place[0]):
            ordered, columns = list(of_part), self._parts[part].layout.columns
            slices.append(pooled[part][:, columns[ordered[0][1]] : columns[ordered[-1][1] + 1]])
        return torch.cat(slices, 1)

    def _expanded(self, pooled: list[Tensor], features: KeyedJaggedTensor, is_ragged: bool) -> Tensor:
        """The rows of features with batches of their own, spread over the samples by the inverse indices."""
        names = [name for table in self._embedding_bag_configs for name in table.feature_names]
        sizes = dict(zip(features.keys(), features.stride_per_key(), strict=True))
        rows: list[tuple[Tensor, ...]] = []
        for values, part in zip(pooled, self._parts, strict=True):
            widths = part.layout.feature_widths
            if is_ragged:
                shapes = [(sizes[name], width) for name, width in zip(part.features, widths, strict=True)]
                flat = values.split([count * width for count, width in shapes])
                rows.append(tuple(of.view(shape) for of, shape in zip(flat, shapes, strict=True)))
            else:
                rows.append(values.split(widths, 1))
        ordered = [rows[part][place] for part, place in self._places]
        inverse = features.inverse_indices_or_none()
        refuse_wrong_inverse(features, names, is_needed=inverse is None or not inverse[1].numel())
        return process_pooled_embeddings(ordered, reorder_inverse_indices(inverse, names))

    def follow(self, plan: BagPlan | str | os.PathLike[str] | None) -> None:
        """Take a plan, or its file, in place of the one before; None for none. A CUDA graph keeps what it was captured with.

        A plan without any of the features is none, but for its `counted_rows`.

        Raises:
            OSError, ValueError: a plan that cannot be read or does not fit the tables, as `plan_mismatch` says.
        """
        plan = plan if plan is None or isinstance(plan, BagPlan) else BagPlan.load(plan)
        shapes = {
            name: (part.layout.rows[table], part.layout.widths[table])
            for part, names in zip(self._parts, self.feature_names(), strict=True)
            for name, table in zip(names, part.layout.tables or (), strict=True)
        }
        # With an empty one `plan_mismatch` is still checked.
        plan = plan or BagPlan("", {})
        if not any(name in plan.features for name in shapes):
            plan = replace(plan, features={})
        self._plan = plan.fitting(shapes, mismatch=self._mismatch)
        self._schedules.clear()

    def feature_names(self) -> list[list[str]]:
        """For each data type the names of its features in the output, which are their names in a plan."""
        names: list[list[str]] = [[] for _ in self._parts]
        for name, (part, _) in zip(self._embedding_names, self._places, strict=True):
            names[part].append(name)
        return names

    def _schedules_on(self, device: torch.device) -> list[BagSchedules | None]:
        if device not in self._schedules:
            assert self._plan is not None
            gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
            plan = self._plan.fitting({}, gpu, self._mismatch)
            self._schedules[device] = [
                None if plan is None else plan.schedules(part.layout, device, names=names)
                for part, names in zip(self._parts, self.feature_names(), strict=True)
            ]
        return self._schedules[device]

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The tables."""
        return self._embedding_bag_configs

    def is_weighted(self) -> bool:
        """Tell whether ids have weights."""
        return self._is_weighted

    def __getstate__(self) -> dict[str, Any]:
        # Another machine may have another GPU.
        return {**self.__dict__, "_schedules": {}}

    def _shown(self, *options: str) -> str:
        """What a collection shows of itself; `options` are its own."""
        shown = [f"features={len(self._widths)}", f"width={sum(self._widths)}", f"is_weighted={self._is_weighted}", *options]
        shown += [f"output_dtype={self._output_dtype}"] if self._output_dtype != torch.float32 else []
        if self._plan is not None:
            planned = sum(name in self._plan.features for name in self._embedding_names)
            shown.append(f"plan={planned} of {len(self._widths)} features")
        return ", ".join(shown)


def as_leaf(module: nn.Module, features: Proxy) -> Any:
    """What a tracer records that does not take the module for a leaf by itself."""
    path = features.tracer.path_of_module(module)  # type: ignore[attr-defined]
    if not path:
        raise TypeError("features: got a proxy; the module is a leaf, so trace a model that holds it")
    return features.tracer.create_proxy("call_module", path, (features,), {})


def refuse_scripting(module: nn.Module) -> NoReturn:
    """Refuse `torch.jit.script` of a collection."""
    raise TypeError(
        f"torch.jit.script: got a {type(module).__name__}, whose lookups are an operator written in Python, which TorchScript "
        "cannot compile; export the model with torch.export.export"
    )


def lookups_of(features: KeyedJaggedTensor, order: KeyOrder, weights: Tensor | None) -> Lookups:
    """Return the lookups of a batch's features in an order; as they are where the batch has no others and the same order."""
    sizes = features.stride_per_key() if features.variable_stride_per_key() else None
    lookups = Lookups(features.values(), features.offsets(), weights, sizes)
    places = order.places(features.keys())
    if places is None:
        return lookups
    if lookups.ids.is_cpu and not values_are_trusted():
        # Of what is selected the operator sees no more.
        validate_offsets(lookups.offsets, lookups.ids.shape[0])
    return _selected(lookups, places, features)


def _selected(lookups: Lookups, order: list[int], features: KeyedJaggedTensor) -> Lookups:
    """The lookups of some keys, in another order or several times, with weights that keep their gradient.

    `KeyedJaggedTensor.permute` gives weights no right gradient where keys repeat or have batches of their own, and always has to
    know the lengths per key.
    """
    refuse_uneven(features)
    ids, offsets, weights, sizes = lookups
    num_keys, chosen = len(features.keys()), tuple(order)
    if sizes is None:
        batch_size = (offsets.shape[0] - 1) // max(1, num_keys)
        first = on_device(chosen, offsets.device)[:, None] * batch_size
        bags = (first + torch.arange(batch_size, device=offsets.device)).reshape(-1)
    else:
        bags = _ragged_bags(chosen, tuple(sizes), offsets.device)
        sizes = [sizes[key] for key in order]
    is_permutation = len(order) == num_keys == len(set(order))
    lengths = None if is_permutation else lengths_per_key(features)
    total = ids.shape[0] if lengths is None else max(0, sum(lengths[key] for key in order))
    return bags_of(Lookups(ids, offsets, weights, sizes), bags, total)


def bags_of(lookups: Lookups, bags: Tensor, total: int) -> Lookups:
    """Return the lookups of some bags, in their order, which are `total` ids."""
    ids, offsets, weights, sizes = lookups
    new_offsets = torch.cat([offsets.new_zeros(1), offsets.diff()[bags].cumsum(0, dtype=offsets.dtype)])
    # Whatever wrong offsets say, nothing is read or written outside.
    shift = (offsets[:-1][bags] - new_offsets[:-1])[sample_of_row(new_offsets, total)]
    places = (shift + torch.arange(total, device=offsets.device)).clamp_(0, max(0, ids.shape[0] - 1))
    return Lookups(ids[places], new_offsets, None if weights is None else weights[places], sizes)


def lengths_per_key(features: KeyedJaggedTensor) -> list[int]:
    """Return how many ids each key has, read from the device where the batch does not know it.

    Raises:
        ValueError: a wrong number of lengths.
    """
    refuse_uneven(features)
    # Of no samples a KeyedJaggedTensor that has offsets alone cannot tell.
    return [0] * len(features.keys()) if features.offsets().shape[0] == 1 else features.length_per_key()


def refuse_uneven(features: KeyedJaggedTensor) -> None:
    """Refuse lengths, or weights of ids, of another number than the batch has of them."""
    if torch.compiler.is_compiling():
        return
    num_keys, num_bags = len(features.keys()), features.offsets().shape[0] - 1
    sizes = features.stride_per_key() if features.variable_stride_per_key() else None
    if num_bags % max(1, num_keys) if sizes is None else num_bags != sum(sizes):
        expected = f"a multiple of the {num_keys} keys" if sizes is None else f"{sum(sizes)}, the sum of the keys' batch sizes"
        raise ValueError(f"features: expected {expected} as the number of lengths, got {num_bags}")
    weights, num_ids = features.weights_or_none(), features.values().shape[0]
    if weights is not None and weights.shape[0] != num_ids:
        raise ValueError(f"features: expected a weight for each of {num_ids} ids, got {weights.shape[0]}")


def refuse_malformed(features: KeyedJaggedTensor) -> None:
    """Refuse lengths, or offsets, that no batch has, and name the key. Reads them from the device.

    Raises:
        ValueError: for the first one.
    """
    refuse_uneven(features)
    keys, ends, num_ids = features.keys(), features.offsets().tolist(), features.values().shape[0]
    if ends[0] != 0:
        raise ValueError(f"features: expected offsets from 0 on, got {ends[0]} for key {keys[0]!r}") from None
    bag = 0
    for key, size in zip(keys, features.stride_per_key(), strict=True):
        for sample in range(size):
            if (length := ends[bag + 1] - ends[bag]) < 0:
                raise ValueError(
                    f"features: expected lengths of at least 0, got {length} for key {key!r} in sample {sample}"
                ) from None
            bag += 1
    if ends[-1] != num_ids:
        more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
        raise ValueError(
            f"features: expected lengths with the sum {num_ids}, the number of ids, got {ends[-1]} for keys "
            f"{', '.join(map(repr, keys[:_SHOWN]))}{more}"
        ) from None


def refuse_unknown_ids(features: KeyedJaggedTensor, tables: Sequence[BaseEmbeddingConfig]) -> None:
    """Refuse an id that is no row of a table that reads it, and name key and table. Reads ids and lengths from the device.

    Raises:
        ValueError: for the first one, table by table.
    """
    ends, firsts = features.offsets().tolist(), [0, *accumulate(features.stride_per_key())]
    # Of keys that stand twice the last one is read.
    bags_of = {key: ends[first : last + 1] for key, (first, last) in zip(features.keys(), pairwise(firsts), strict=True)}
    for table in tables:
        for name in table.feature_names:
            if (bags := bags_of.get(name)) is None:
                continue
            ids = features.values()[bags[0] : bags[-1]]
            wrong = ((ids < 0) | (ids >= table.num_embeddings)).nonzero()
            if wrong.numel():
                place = int(wrong[0])
                raise ValueError(
                    f"features: expected ids from 0 to {table.num_embeddings - 1}, the rows of table {table.name!r}, got "
                    f"{int(ids[place])} for key {name!r} in sample {bisect_right(bags, bags[0] + place) - 1}"
                ) from None


def refuse_wrong_inverse(features: KeyedJaggedTensor, names: Sequence[str], *, is_needed: bool) -> None:
    """Refuse a batch of several sizes where inverse indices are needed, and wrong ones; on a CPU also those of rows that are not.

    Raises:
        ValueError: for the first one.
    """
    of_keys = dict(zip(features.keys(), features.stride_per_key(), strict=True))
    sizes = {name: of_keys[name] for name in names}
    if is_needed and len(set(sizes.values())) > 1:
        raise ValueError(
            "features: expected inverse_indices where keys have batches of several sizes, got none; without them their rows "
            "do not stand side by side"
        )
    if features.inverse_indices_or_none() is None:
        return
    keys, inverse = features.inverse_indices()
    places = {key: place for place, key in enumerate(keys)}
    if missing := [name for name in sizes if name not in places]:
        raise ValueError(f"features: expected inverse_indices for every feature of the tables, got none for {', '.join(missing)}")
    if not inverse.is_cpu or values_are_trusted():
        return
    rows, names = inverse[[places[name] for name in sizes]], list(sizes)
    wrong = ((rows < 0) | (rows >= torch.tensor(list(sizes.values()))[:, None])).nonzero().tolist()
    if wrong:
        number, sample = wrong[0]
        raise ValueError(
            f"features: expected inverse_indices from 0 on and below {sizes[names[number]]}, the batch size of key "
            f"{names[number]!r}, got {int(rows[number, sample])} in sample {sample}"
        )


def _kept(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Keep what was made, but for what a tracer or another mode makes: its fake tensors are no numbers for later calls."""
    keeping = functools.lru_cache(maxsize=64)(make)

    @functools.wraps(make)
    def made(*arguments: Any) -> Tensor:
        is_watched = torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None
        return (make if is_watched else keeping)(*arguments)

    return made


@_kept
def on_device(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Return numbers as an int64 tensor, copied to the device once."""
    return torch.tensor(numbers, dtype=torch.int64).to(device)


@_kept
def _ragged_bags(order: tuple[int, ...], sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """For keys in an order the bags of each, one key after the other."""
    bags = torch.arange(sum(sizes), device=device).split(list(sizes))
    return torch.cat([bags[key] for key in order])
