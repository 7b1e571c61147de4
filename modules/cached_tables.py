"""Embedding tables in the host's memory, of which a device has the rows that a batch needs and the most frequent ones."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from jagged.modules.row_cache import CacheForecast, Lease, RowCache, forecast_of, slots_of
from jagged.modules.table_storage import Table, TableStorage, refuse_copies
from jagged.ops import BagLayout, BagOptimizer, JointUpdate, embedding_bags, validate_offsets, values_are_trusted

Maker = Callable[[BagLayout, torch.device], BagOptimizer]
# Of cudaHostRegister: for every context, and mapped into the device's addresses.
_PORTABLE_AND_MAPPED = 1 | 2


class CacheOptions(NamedTuple):
    """A budget on the device in bytes, after how many lookups the most frequent rows are chosen anew, and the device."""

    num_bytes: int
    interval: int
    device: torch.device


def checked_cache(cache_bytes: int | None, cache_interval: int, device: torch.device | str | None) -> CacheOptions | None:
    """Return what a collection's cache is made by; None without one.

    Raises:
        ValueError: numbers below 1.
    """
    for name, number in (("cache_bytes", cache_bytes), ("cache_interval", cache_interval)):
        if number is not None and number < 1:
            raise ValueError(f"{name}: expected a number of at least 1, got {number}")
    # With its number, by which ids are compared.
    return None if cache_bytes is None else CacheOptions(cache_bytes, cache_interval, torch.empty(0, device=device).device)


def check_room(tables: TableStorage, optimizer: Maker | None, num_bytes: int) -> None:
    """Refuse a budget that has no room for rows of some tables, and what an optimizer keeps for them.

    Raises:
        ValueError: with what is needed.
    """
    probe = (optimizer or _without_states)(tables.layout, torch.device("meta"))
    slots_of(tables.layout, tables.dtype.itemsize, probe, num_bytes)


def cached_storage(tables: TableStorage, optimizer: Maker | None, cache: CacheOptions) -> CachedTableStorage:
    """A storage of the same tables and states with a cache by some options; the storage itself where it has one already."""
    if isinstance(tables, CachedTableStorage):
        tables.cache_by(cache)
        return tables
    before = tables.optimizer
    made = CachedTableStorage(tables.layout, tables.bags, optimizer, cache)
    if before is not None and made.optimizer is not None:
        for name, state in before.state().items():
            getattr(made.optimizer, name).copy_(state)
    return made


def _without_states(layout: BagLayout, device: torch.device) -> BagOptimizer:
    """What tables that are only read keep for a row: nothing."""
    return BagOptimizer("sgd", layout, learning_rate=0.0, device=device)


class _Ahead(NamedTuple):
    """A batch whose rows were asked for ahead of its lookup."""

    ids: Tensor
    offsets: Tensor
    versions: tuple[int, int]
    batch_sizes: Sequence[int] | None
    changes: bool
    lease: Lease


class CachedTableStorage(TableStorage):
    """Tables whose parameters are on the host, and whose rows are looked up and updated in slots on a device.

    Before each lookup its rows are brought into slots, and its ids become numbers of slots: what reads and updates rows are the
    operators of any other storage. So weights and states become those of tables that are on the device as a whole, once they are
    written back.

    Args:
        layout, bags, optimizer: as of `TableStorage`; the tables are on the host, and without an optimizer only read.
        cache: the budget of this storage, and the device.

    Raises:
        ValueError: the budget has room for no rows.
    """

    def __init__(
        self,
        layout: BagLayout,
        bags: Sequence[Table],
        optimizer: Maker | None,
        cache: CacheOptions,
    ) -> None:
        self.options = cache
        # In an optimizer's place where there is none.
        self._reader: BagOptimizer | None = None
        self._cache_device = cache.device
        self._cache: RowCache | None = None
        self._versions: list[int] = []
        self._pinned: dict[int, Any] = {}
        # For a collection's layout the batch that it looks up next.
        self._ahead: dict[BagLayout, _Ahead] = {}
        super().__init__(layout, bags, optimizer)

    @property
    def device(self) -> torch.device:
        """Where rows are looked up."""
        return self._cache_device

    @property
    def cache(self) -> RowCache:
        """The slots.

        Raises:
            RuntimeError: on the meta device there are none.
        """
        if self._cache is None:
            raise RuntimeError("embedding tables: expected tables that have memory, got some on the meta device; call to_empty")
        return self._cache

    def lookup(self, layout: BagLayout, ids: Tensor, offsets: Tensor, **options: Any) -> Tensor:
        """As `TableStorage.lookup`; waits for the device once, unless `prefetch` was given the same tensors.

        Raises:
            RuntimeError: in a CUDA graph's capture, or an export; parameters that were changed while changed rows are cached;
                tables that learn without an optimizer.
            ValueError: too few slots, parameters that were exchanged.
        """
        if self._cache is None:
            return super().lookup(layout, ids, offsets, **options)
        self._refuse_what_is_not_seen(ids, offsets)
        cache, updates = self._cache, self._updates
        learns = self._updates_rows()
        if learns:
            refuse_copies()
        lease = self._staged(layout, ids, offsets, options.get("batch_sizes"), changes=learns)
        slots = cache.use(lease)
        of_slots = cache.slots_of(layout)
        if learns:
            assert updates is not None
            found = updates.embedding_bags(of_slots, slots, offsets, **options)
        else:
            found = embedding_bags(cache.weights, of_slots, slots, offsets, **options)
        cache.used(lease)
        if found.grad_fn is not None:
            _hold_until_backward(found, cache, lease)
        return found

    def prefetch(self, layout: BagLayout, ids: Tensor, offsets: Tensor, batch_sizes: Sequence[int] | None) -> None:
        """Bring the rows of the next lookup by this layout to the device; what others look up before changes nothing.

        Waits for nothing, unless a batch before was not looked up. Where rows have no room, or the most frequent ones are to be
        chosen anew, the lookup does it.

        Raises:
            RuntimeError, ValueError: as `lookup`, but not for want of room.
        """
        if self._cache is None:
            return
        # Its rows need not stay any longer.
        self._ahead.pop(layout, None)
        self._refuse_what_is_not_seen(ids, offsets)
        if self._cache.is_move_due():
            return
        changes = self._updates_rows()
        lease = self._staged(layout, ids, offsets, batch_sizes, changes=changes, is_ahead=True)
        self._ahead[layout] = _Ahead(ids, offsets, (ids._version, offsets._version), batch_sizes, changes, lease)

    def _updates_rows(self) -> bool:
        """Whether backward of a lookup updates its rows."""
        learns = self.learns()
        if learns and self._updates is None:
            raise RuntimeError(
                "cache_bytes: expected an optimizer that updates rows in the backward pass, got a lookup with gradients and "
                "none: those of whole tables would need as much memory as they do; name one by optimizer, freeze the tables, or "
                "look up under torch.no_grad()"
            )
        return learns

    def _staged(
        self,
        layout: BagLayout,
        ids: Tensor,
        offsets: Tensor,
        batch_sizes: Sequence[int] | None,
        *,
        changes: bool,
        is_ahead: bool = False,
    ) -> Lease:
        """The lease of a batch: the one that `prefetch` has taken, if its rows have room, or a new one."""
        ahead = self._ahead.get(layout)
        try:
            with torch.no_grad():
                if ahead is not None and ahead.ids is ids and ahead.offsets is offsets and ahead.batch_sizes == batch_sizes:
                    del self._ahead[layout]
                    # Ids that were written into the same tensors since then have other rows, and so have tables that were loaded.
                    is_same = ahead.versions == (ids._version, offsets._version)
                    if is_same and ahead.changes >= changes and self.cache.confirm(ahead.lease):
                        return ahead.lease
                if ids.is_cpu and not values_are_trusted():
                    validate_offsets(offsets, ids.shape[0])
                return self.cache.staged(layout, ids, offsets, batch_sizes, changes=changes, is_ahead=is_ahead)
        finally:
            # Rows of a lookup before may have moved, also where those of this one have no room.
            self._versions = self._found_versions()

    def _refuse_what_is_not_seen(self, ids: Tensor, offsets: Tensor) -> None:
        if torch.compiler.is_exporting() or isinstance(ids, FakeTensor):
            # A ValueError would be taken for a malformed batch, whose values nobody can read here.
            raise RuntimeError(
                "cache_bytes: expected tables that are on the device as a whole in an export, got rows that come and go; load "
                "the state dict into a collection without cache_bytes"
            )
        if not self._is_unchanged():
            raise ValueError(
                "cache_bytes: expected the parameters that the rows were read from, but some were exchanged; copy values into "
                "them, or use load_state_dict"
            )
        if ids.device != self._cache_device:
            raise ValueError(f"indices: expected the device of cached rows, {self._cache_device}, got {ids.device}; move them")
        if offsets.device != ids.device:
            raise ValueError(f"offsets: expected the device of indices, {ids.device}, got {offsets.device}; move them")
        if ids.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "cache_bytes: expected no capture of a CUDA graph, in which a batch cannot tell how many rows it misses; "
                "run the lookup outside of it"
            )
        if self._found_versions() != self._versions:
            if self.cache.is_changed:
                raise RuntimeError(
                    "cache_bytes: tables or optimizer states were changed on the host while rows on "
                    f"{self._cache_device} had changes that were not written back; call write_back() before you change them"
                )
            self.cache.forget()

    def _found_versions(self) -> list[int]:
        states = [] if self.optimizer is None else [getattr(self.optimizer, name) for name in self.optimizer.states_of]
        return [tensor._version for tensor in (*self._parameters, *states)]

    def scored(self, number: int) -> Tensor:
        """Refuse a head that scores against a table.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"scored: expected a table that is on the device as a whole, got one of {self.layout.rows[number]:,} rows that are "
            "cached by cache_bytes; leave cache_bytes out for tables that a head scores against"
        )

    def write_back(self) -> None:
        """Write all rows that may have been changed back to the host."""
        # What is yet to be looked up keeps none of them.
        self._ahead = {}
        if self._cache is not None:
            self._cache.write_back()
            self._versions = self._found_versions()

    def forecast(self) -> CacheForecast:
        """What the tables take on the device and on the host."""
        itemsize = self.dtype.itemsize
        probe = (self._make_optimizer or _without_states)(self.layout, torch.device("meta"))
        return forecast_of(self.layout, itemsize, probe, slots_of(self.layout, itemsize, probe, self.options.num_bytes))

    def whole(self) -> Tensor:
        """The tables in one tensor, on the host."""
        self.write_back()
        return super().whole()

    def copies(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """As of `TableStorage`, with the rows as they are now."""
        self.write_back()
        return super().copies()

    def states_by_table(self) -> list[dict[str, Tensor]]:
        """As of `TableStorage`, with the rows as they are now."""
        self.write_back()
        return super().states_by_table()

    def update_by(self, optimizer: Maker | None) -> None:
        """Update by a new optimizer; without one tables are only read.

        Raises:
            ValueError: the budget has no room for what the optimizer keeps.
        """
        check_room(self, optimizer, self.options.num_bytes)
        self.write_back()
        self._cache = None
        super().update_by(optimizer)

    def cache_by(self, cache: CacheOptions) -> None:
        """Cache rows by another budget, with the states as they are."""
        self.write_back()
        self.options = cache
        self._cache = None
        self.gather()

    def gather(self) -> None:
        """As of `TableStorage`; what is not on the host comes there, and rows are read anew."""
        for bag in self._bags:
            if not (bag.weight.is_cpu or bag.weight.is_meta):
                bag.weight = nn.Parameter(bag.weight.detach().cpu(), bag.weight.requires_grad)
        super().gather()

    def apply(self, change: Callable[[Tensor], Tensor]) -> None:
        """Move or convert the tables: rows are cached on another device, in another dtype; parameters stay on the host."""
        if not self._is_unchanged():
            self.gather()
        assert self._storage is not None
        self.write_back()
        with torch.no_grad():
            probe = change(torch.empty(0, dtype=self._storage.dtype, device=self._cache_device))
        home = torch.device("meta" if probe.is_meta else "cpu")
        if probe.device == self._cache_device and (probe.dtype, home) == (self._storage.dtype, self._storage.device):
            return
        self._cache_device = probe.device
        storage = self._storage
        if storage.is_meta and not probe.is_meta:
            storage = torch.empty(storage.shape, dtype=probe.dtype, device=home)
        self._placed(storage.to(home, probe.dtype))

    def _take(self, storage: Tensor) -> None:
        own = None if self.optimizer is None else (self.optimizer.learning_rate, self.optimizer.step)
        self._ahead = {}
        super()._take(storage)
        if storage.is_meta:
            self._cache = None
            return
        if self.optimizer is None:
            if self._reader is None or self._reader.step.device != self._cache_device:
                self._reader = _without_states(self.layout, self._cache_device)
            of_rows = self._reader
        else:
            of_rows, self._reader = self.optimizer, None
        states = [getattr(of_rows, name) for name in of_rows.states_of]
        if self._cache_device.type == "cuda":
            self._pin(storage, *states)
        if self._is_of_cache(storage, of_rows):
            assert self._cache is not None
            self._cache.forget()
        else:
            slots = slots_of(self.layout, storage.element_size(), of_rows, self.options.num_bytes)
            cached = (self._make_optimizer or _without_states)(slots, self._cache_device)
            self._cache = RowCache(self.layout, storage, of_rows, cached, self.options.interval)
        self._versions = self._found_versions()
        if self.optimizer is None:
            return
        cache = self._cache
        # A schedule fills the tensor that the update reads.
        rate, step = (self.optimizer.learning_rate, self.optimizer.step) if own is None else own
        self.optimizer.learning_rate, self.optimizer.step = (of.to(self._cache_device) for of in (rate, step))
        cache.optimizer.learning_rate, cache.optimizer.step = self.optimizer.learning_rate, self.optimizer.step
        self._updates = JointUpdate(cache.weights, cache.optimizer, self.check_all_learn, cache.release)
        self._updates.holds = self._holds

    def _is_of_cache(self, storage: Tensor, of_rows: BagOptimizer) -> bool:
        """Tell whether the cache that there is reads these tensors."""
        cache = self._cache
        if cache is None or cache.device != self._cache_device or cache.states is not of_rows:
            return False
        return (cache.storage.data_ptr(), cache.storage.dtype) == (storage.data_ptr(), storage.dtype)

    def _pin(self, *tensors: Tensor) -> None:
        """Let a GPU read memory where it lies, and no other that it was let read before."""
        wanted = {tensor.data_ptr(): tensor for tensor in tensors if tensor.numel()}
        for pointer in [pointer for pointer in self._pinned if pointer not in wanted]:
            self._pinned.pop(pointer)()
        for pointer, tensor in wanted.items():
            if pointer in self._pinned or tensor.is_pinned():
                continue
            # PyTorch's own pinned memory would be rounded up to a power of two.
            torch.cuda.init()
            runtime: Any = torch.cuda.cudart()
            error = runtime.cudaHostRegister(pointer, tensor.nbytes, _PORTABLE_AND_MAPPED)
            if int(error) != 0:
                raise RuntimeError(
                    f"cache_bytes: {tensor.nbytes:,} bytes of the host's memory cannot be pinned, CUDA error {int(error)}; free "
                    "memory, or raise the limit of locked memory (ulimit -l)"
                )
            # The tensor is kept, so that its memory goes after that.
            self._pinned[pointer] = release = weakref.finalize(self, _unpin, tensor)
            release.atexit = False

    def __getstate__(self) -> dict[str, Any]:
        """Without the cache, which begins empty in a copy."""
        self.write_back()
        return super().__getstate__() | {"_cache": None, "_versions": [], "_pinned": {}, "_ahead": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if (of_rows := self.optimizer or self._reader) is not None:
            # Where `torch.load` was told to put what was on the device.
            self._cache_device = of_rows.learning_rate.device


def _unpin(tensor: Tensor) -> None:
    runtime: Any = torch.cuda.cudart()
    runtime.cudaHostUnregister(tensor.data_ptr())


def _hold_until_backward(found: Tensor, cache: RowCache, lease: Lease) -> None:
    """Keep the rows of a lookup as long as its graph lives, or until an update has been made by it."""

    def reach(_: Any) -> None:
        cache.reach(lease)

    assert found.grad_fn is not None
    found.grad_fn.register_prehook(reach)
