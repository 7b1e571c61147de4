"""What collections of embeddings have in common: tables in storages, the optimizers that update them, and how both move."""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.fx._symbolic_trace import is_fx_symbolic_tracing
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, data_type_to_dtype
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from jagged.modules.backward_updates import checked_options, load_state
from jagged.modules.bag_collection import KeyOrder, Lookups, Part, lookups_of
from jagged.modules.cached_tables import CachedTableStorage, CacheOptions, cached_storage, check_room, checked_cache
from jagged.modules.row_cache import CacheForecast, CacheStatistics
from jagged.modules.table_storage import Table, TableStorage
from jagged.ops import BagLayout, BagOptimizer, BagOptimizerKind

OPTIMIZER_OPTIONS = (
    "learning_rate", "eps", "betas", "weight_decay", "stochastic_rounding", "decoupled_weight_decay", "max_norm", "state_dtype",
    "decay_missed_steps",
)  # fmt: skip


class TablesPart(NamedTuple):
    """The tables of one dtype, and the features of a collection that read them, in the order of its tables.

    `names` are those of all tables of the storage, `layout` is of these and of the collection's features.
    """

    names: list[str]
    tables: TableStorage
    layout: BagLayout
    features: list[str]
    order: KeyOrder


class _Next(NamedTuple):
    """A batch that is looked up next: its lookups by the parts' layouts, until they are taken, and when a GPU has made them."""

    features: KeyedJaggedTensor
    versions: tuple[int, int]
    lookups: dict[BagLayout, Lookups]
    made: torch.cuda.Event | None


def _versions_of(features: KeyedJaggedTensor) -> tuple[int, int]:
    return features.values()._version, features.offsets()._version


class TrainedTables(nn.Module):
    """Parts of a collection whose parameters are views of storages, which an optimizer may update in the backward pass."""

    _parts: list[TablesPart]
    _optimizer: functools.partial[BagOptimizer] | None
    _cache: CacheOptions | None = None
    # What `prefetch` was given.
    _next: _Next | None = None

    @property
    def _modules_of_tables(self) -> MutableMapping[str, Table]:
        """By a table's name what has its `weight`."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        """Where the tables are."""
        return self._parts[0].tables.device

    @property
    def is_cached(self) -> bool:
        """Whether tables are in the host's memory, with rows cached on the device."""
        return self._cache is not None

    @property
    def optimizers(self) -> list[BagOptimizer]:
        """The fused optimizers, one for each data type in the order in which it first occurs; none on the meta device.

        A schedule fills their `learning_rate`, a tensor.
        """
        return [part.tables.optimizer for part in self._parts if part.tables.optimizer is not None]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def scored(self, name: str) -> Tensor:
        """Return a table `[num_embeddings, embedding_dim]` for a head that scores against it.

        Without an optimizer it is the parameter. With one the gradient that it gets in the backward pass, dense or sparse, is
        added to those of lookups, and the rows are updated once. A dense gradient is one of all rows: a head of sampled items
        takes `sparse=True`, so that only those are touched.

        Raises:
            KeyError: there is no such table.
            RuntimeError: tables with an optimizer in one of several processes, which has to be sharded; in a trace by `torch.fx`,
                which would keep this tensor and not the call.

        Example:
            >>> import torch
            >>> from torchrec.modules.embedding_configs import EmbeddingConfig
            >>> from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
            >>> from jagged.modules import ScheduledEmbeddingCollection
            >>> config = EmbeddingConfig(name="item", embedding_dim=4, num_embeddings=10, feature_names=["history"])
            >>> tables = ScheduledEmbeddingCollection([config], optimizer="sgd", optimizer_options={"learning_rate": 0.1})
            >>> history = KeyedJaggedTensor(keys=["history"], values=torch.tensor([3, 5]), lengths=torch.tensor([2]))
            >>> rows = tables(history)["history"].values()
            >>> (rows @ tables.scored("item").T).logsumexp(1).sum().backward()  # one update of each row
            >>> tables.optimizers[0].step
            tensor(1)
        """
        if self._optimizer is not None and is_fx_symbolic_tracing():
            raise RuntimeError(
                "scored: a trace by torch.fx would keep the table as it is now; call it in a module that is a leaf of the trace"
            )
        for part in self._parts:
            if name in part.names:
                return part.tables.scored(part.names.index(name))
        names = [of for part in self._parts for of in part.names if of]
        raise KeyError(f"name: expected one of {', '.join(names)}, got {name!r}")

    def update_in_backward(self, optimizer: BagOptimizerKind, optimizer_options: dict[str, Any]) -> None:
        """Let an optimizer update the tables in the backward pass from now on, as one that the collection was made with.

        Args:
            optimizer, optimizer_options: as of the collection. States begin anew; collections that share tables share them, too.

        Raises:
            ValueError: options that are unknown or missing, or out of their ranges; a cache without room for its states.
        """
        made = optimizer_maker(optimizer, optimizer_options)
        assert made is not None
        for part in self._parts:
            part.tables.update_by(made)
        self._optimizer = made

    def stop_updating(self) -> None:
        """Let parameters get gradients again, as in a collection that was made without an optimizer; its states go.

        Those of which rows are cached are only read then.
        """
        self._optimizer = None
        for part in self._parts:
            part.tables.hold(False)
            part.tables.update_by(None)

    def cache_rows(self, cache_bytes: int, cache_interval: int = 100) -> None:
        """Keep the tables, and their optimizer's states, in the host's memory from now on, as a collection with `cache_bytes`.

        Rows are cached where the tables were, and go along where the collection is moved. Parameters that were on another device
        are others then. Of a collection that has a cache the budget changes.

        Args:
            cache_bytes, cache_interval: as of the collection.

        Raises:
            ValueError: numbers below 1, a budget without room, or tables that several collections share or whose updates
                `HeldUpdates` holds back.

        Example:
            >>> from torchrec.modules.embedding_configs import EmbeddingConfig
            >>> from jagged.modules import ScheduledEmbeddingCollection
            >>> config = EmbeddingConfig(name="item", embedding_dim=4, num_embeddings=1000, feature_names=["history"])
            >>> tables = ScheduledEmbeddingCollection([config])
            >>> tables.cache_rows(10_000)
            >>> tables.cache_forecast().slots
            60
        """
        cache = checked_cache(cache_bytes, cache_interval, self.device)
        assert cache is not None
        if cache == self._cache:
            return
        if any(part.tables.is_shared for part in self._parts):
            raise ValueError("cache_bytes: expected tables of one collection, got some that several share; leave it out")
        if not self.is_cached and any(part.tables.holds for part in self._parts):
            raise ValueError("cache_bytes: expected no HeldUpdates of the tables, got one; call its release() first")
        # As `share_of` has it: without the gaps between tables.
        layouts = [(part.tables.layout, part.tables.dtype.itemsize) for part in self._parts]
        sizes = [sum(map(operator.mul, layout.rows, layout.widths)) * itemsize for layout, itemsize in layouts]
        budgets = [cache._replace(num_bytes=int(cache.num_bytes * (size / sum(sizes)))) for size in sizes]
        for part, budget in zip(self._parts, budgets, strict=True):
            # What has no room is told before anything has changed.
            check_room(part.tables, self._optimizer, budget.num_bytes)
        for number, (part, budget) in enumerate(zip(self._parts, budgets, strict=True)):
            self._parts[number] = part._replace(tables=cached_storage(part.tables, self._optimizer, budget))
        self._cache = cache

    def write_back(self) -> None:
        """Write what updates have changed in cached rows back to the parameters and the optimizers' states, on the host.

        Nothing without `cache_bytes`. State dicts, copies and pickles do it themselves; call it before parameters, or tensors of
        `optimizers`, are read or changed by other ways. Waits for the device.
        """
        for storage in self._cached:
            storage.write_back()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def prefetch(self, features: KeyedJaggedTensor) -> None:
        """Bring the rows of the next batch to the device while it works on the one before; forward then takes them.

        Nothing without `cache_bytes`. Call it after the forward of the batch before, under gradients as forward will be, and on a
        CUDA stream that has nothing to do but what the batch's tensors need: rows come on a stream of their own, which waits
        for the current one. Forward takes the rows for this KeyedJaggedTensor, the object, and finds its own for any other;
        until then they stay on the device, or until the next `prefetch`. Results are the same without it. Where rows have no
        room beside those that the batch before needs, and in the lookups that choose the most frequent rows anew, forward brings
        them. Of a batch that forward refuses, forward says why.

        Raises:
            RuntimeError: as forward.

        Example:
            >>> import torch
            >>> from torchrec.modules.embedding_configs import EmbeddingConfig
            >>> from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
            >>> from jagged.modules import ScheduledEmbeddingCollection
            >>> config = EmbeddingConfig(name="item", embedding_dim=4, num_embeddings=1000, feature_names=["history"])
            >>> options = {"optimizer": "sgd", "optimizer_options": {"learning_rate": 0.1}}
            >>> tables = ScheduledEmbeddingCollection([config], cache_bytes=10_000, **options)
            >>> ids = torch.tensor([[1, 2], [2, 3]])
            >>> batches = [KeyedJaggedTensor(keys=["history"], values=of, lengths=torch.tensor([2])) for of in ids]
            >>> rows = tables(batches[0])["history"].values()
            >>> tables.prefetch(batches[1])
            >>> rows.sum().backward()
            >>> tables(batches[1])["history"].values().shape
            torch.Size([2, 4])
        """
        self._next = None
        # Of a TensorDict forward makes a batch of its own, and of what inference makes nobody knows whether it changes.
        if not self._cached or not isinstance(features, KeyedJaggedTensor) or torch.is_inference_mode_enabled():
            return
        if features.values().is_inference() or features.offsets().is_inference():
            return
        found: dict[BagLayout, Lookups] = {}
        try:
            for part in self._parts:
                # Weights of ids may have gradients, and are found in forward.
                lookups = lookups_of(features, part.order, None)
                part.tables.prefetch(part.layout, lookups.ids, lookups.offsets, lookups.batch_sizes)
                found[part.layout] = lookups
        except ValueError:
            # No room beside rows that others need, or a batch that forward refuses in words of its features.
            pass
        device = features.values().device
        made = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
        self._next = _Next(features, _versions_of(features), found, made)

    def _lookups_by(
        self, find: Callable[[], Lookups], part: Part, features: KeyedJaggedTensor, *, is_weighted: bool = False
    ) -> Lookups:
        """What a part looks up of a batch: what is found now, or, for the batch of `prefetch`, the ids and offsets of then."""
        ahead = self._next
        if ahead is None or ahead.features is not features:
            return find()
        known = ahead.lookups.pop(part.layout, None)
        if not ahead.lookups:
            self._next = None
        if ahead.made is not None:
            stream = torch.cuda.current_stream(features.values().device)
            stream.wait_event(ahead.made)
            # Some were made on the stream of `prefetch`, which may use their memory again.
            for tensor in (features.offsets(), features.lengths(), *(() if known is None else known[:2])):
                tensor.record_stream(stream)
        # What was written into the batch since then are other ids.
        if known is None or ahead.versions != _versions_of(features):
            return find()
        return known._replace(weights=find().weights) if is_weighted else known

    def cache_forecast(self) -> CacheForecast:
        """Return how many bytes tables, optimizer states and the cache take on the device and on the host.

        Nothing need be there yet: a collection on the meta device tells it before anything is allocated.

        Raises:
            ValueError: the collection has no `cache_bytes`.

        Example:
            >>> from torchrec.modules.embedding_configs import EmbeddingConfig
            >>> from jagged.modules import ScheduledEmbeddingCollection
            >>> config = EmbeddingConfig(name="item", embedding_dim=128, num_embeddings=10_000_000, feature_names=["history"])
            >>> options = {"optimizer": "rowwise_adagrad", "optimizer_options": {"learning_rate": 0.1}}
            >>> tables = ScheduledEmbeddingCollection([config], "meta", cache_bytes=2**30, **options)
            >>> forecast = tables.cache_forecast()
            >>> forecast.device_bytes <= 2**30, forecast.host_bytes, forecast.slots
            (True, 5160000000, 1864431)
        """
        self._refuse_uncached("cache_forecast")
        return CacheForecast(*map(sum, zip(*(storage.forecast() for storage in self._cached), strict=True)))

    def cache_statistics(self, *, reset: bool = False) -> CacheStatistics:
        """Return how many lookups found their rows on the device, and what moved between it and the host. Waits for the device.

        Args:
            reset: begin anew afterwards.

        Raises:
            ValueError: the collection has no `cache_bytes`.
            RuntimeError: it is on the meta device.
        """
        self._refuse_uncached("cache_statistics")
        found = [storage.cache.statistics() for storage in self._cached]
        if reset:
            for storage in self._cached:
                storage.cache.reset_statistics()
        return CacheStatistics(*map(sum, zip(*found, strict=True)))

    @property
    def _cached(self) -> list[CachedTableStorage]:
        return [part.tables for part in self._parts if isinstance(part.tables, CachedTableStorage)]

    def _refuse_uncached(self, name: str) -> None:
        if not self.is_cached:
            raise ValueError(f"{name}: expected a collection with cache_bytes, got one whose tables are on the device as a whole")

    def _storage_of(self, layout: BagLayout, bags: Sequence[Table], share: float) -> TableStorage:
        """The storage of some tables, which have a share of the budget."""
        if self._cache is None:
            return TableStorage(layout, bags, self._optimizer)
        return CachedTableStorage(
            layout, bags, self._optimizer, self._cache._replace(num_bytes=int(self._cache.num_bytes * share))
        )

    def _home(self, device: torch.device | str | None) -> torch.device | str | None:
        """Where parameters are, of tables on a device."""
        if self._cache is None:
            return device
        return torch.device("meta" if self._cache.device.type == "meta" else "cpu")

    def optimizer_states(self) -> dict[str, dict[str, Tensor]]:
        """For each table, by name, views of its optimizer's states; nothing without one.

        `first` and `second`, `[num_embeddings, embedding_dim]` or `[num_embeddings]`, as `BagOptimizer` has them, and `step`,
        `[]`, which is that of all tables of a data type.
        """
        of_parts = ((part.names, part.tables.states_by_table()) for part in self._parts)
        return {name: state for names, states in of_parts for name, state in zip(names, states, strict=True) if name}

    def optimizer_state_dict(self) -> dict[str, Tensor]:
        """The fused optimizers' tensors, for a checkpoint beside the state dict, which has the tables alone."""
        self.write_back()
        states = (optimizer.state().items() for optimizer in self.optimizers)
        return {f"{number}.{name}": state for number, of in enumerate(states) for name, state in of}

    def load_optimizer_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Copy what `optimizer_state_dict` gave into the optimizers.

        Raises:
            ValueError: other names or shapes than this module's, as of a checkpoint without `decay_missed_steps` where the
                optimizer has it.
        """
        load_state(self.optimizer_state_dict(), state_dict, "tables")

    def _draw(self, configs: Sequence[BaseEmbeddingConfig]) -> None:
        """Draw new tables by their `init_fn`; nothing on the meta device."""
        is_elsewhere = False
        self.write_back()
        with torch.no_grad():
            for table in configs:
                weight = self._modules_of_tables[table.name].weight
                if not weight.is_meta and table.init_fn is not None:
                    before = weight.untyped_storage()._cdata
                    table.init_fn(weight)
                    is_elsewhere |= weight.untyped_storage()._cdata != before
        if is_elsewhere:
            # One gave the parameter another tensor for its data.
            self._gather()

    def _gather(self) -> None:
        for part in self._parts:
            part.tables.gather()

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        # All that there is to move are the children's parameters.
        if recurse:
            for part in self._parts:
                part.tables.apply(fn)
        return self

    def __getstate__(self) -> dict[str, Any]:
        self.write_back()
        state: dict[str, Any] = super().__getstate__()  # type: ignore[assignment]
        return {**state, "_next": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # A parameter by itself would be copied out of the storage, and then once more into the copy's.
        for part in self._parts:
            for parameter, copied in part.tables.copies() if id(part.tables) not in memo else ():
                memo.setdefault(id(parameter), copied)
        other: Self = type(self).__new__(type(self))
        memo[id(self)] = other
        other.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return other

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._gather()


def optimizer_maker(kind: BagOptimizerKind | None, options: dict[str, Any] | None) -> functools.partial[BagOptimizer] | None:
    """Return what makes the optimizer of a storage's layout on a device; None without a kind.

    Raises:
        ValueError: options that are unknown or missing, or out of their ranges.
    """
    checked = checked_options(kind, options, OPTIMIZER_OPTIONS)
    if kind is None or checked is None:
        return None
    maker = functools.partial(_bag_optimizer, kind, checked)
    # So that what is wrong shows now, on the meta device too.
    maker(BagLayout((1,), (1,)), torch.device("cpu"))
    return maker


def _bag_optimizer(kind: BagOptimizerKind, options: dict[str, Any], layout: BagLayout, device: torch.device) -> BagOptimizer:
    return BagOptimizer(kind, layout, device=device, **options)


def share_of(tables: Sequence[BaseEmbeddingConfig], all_tables: Sequence[BaseEmbeddingConfig]) -> float:
    """Return the share of a budget of tables that are some of all: by their bytes."""
    some, every = (
        sum(of.num_embeddings * of.embedding_dim * data_type_to_dtype(of.data_type).itemsize for of in tables_of)
        for tables_of in (tables, all_tables)
    )
    return some / every


def write_back(module: TrainedTables, *_: Any) -> None:
    """Write cached rows back; before parameters are read or loaded."""
    module.write_back()


def gather(module: TrainedTables, _: Any) -> None:
    """Make parameters views of their storages again; after loading, which may have assigned others."""
    module._gather()
