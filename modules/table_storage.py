"""Embedding tables of one dtype in one storage, of which the parameters of their modules are views."""

from __future__ import annotations

import operator
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from jagged.ops import BagLayout, BagOptimizer, JointUpdate, embedding_bags

#: What has the `weight` of a table.
Table: TypeAlias = nn.Embedding | nn.EmbeddingBag

_weight_of = operator.itemgetter("weight")
_requires_grad = operator.attrgetter("requires_grad")


class _WholeFunction(torch.autograd.Function):
    """The storage as a function of the parameters that are its views; its gradient is handed on as views of it."""

    @staticmethod
    def forward(ctx: Any, storage: Tensor, layout: BagLayout, *parameters: Tensor) -> Tensor:
        ctx.layout = layout
        ctx.set_materialize_grads(False)
        return storage.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        layout = ctx.layout
        if grad is None:
            return (None,) * (2 + len(layout.rows))
        grad = grad.contiguous()
        of_tables = zip(layout.rows, layout.widths, layout.starts[:-1], strict=True)
        # For a thousand tables half the time of slices.
        return None, None, *(grad.as_strided((rows, width), (width, 1), start) for rows, width, start in of_tables)


def refuse_copies() -> None:
    """Refuse an update that no other process of a group learns of."""
    if dist.is_available() and dist.is_initialized() and (size := dist.get_world_size()) > 1:
        raise RuntimeError(
            f"optimizer: would update the tables of this process alone, of {size} processes in the group, so that their copies "
            "part; shard the model by DistributedModelParallel with ScheduledEmbeddingBagCollectionSharder and "
            "ScheduledEmbeddingCollectionSharder, or leave the optimizer out"
        )


class _Changes:
    """What says whether parameters may have been exchanged: a list that is another one after every change."""

    def __init__(self) -> None:
        # A list, for Dynamo makes no plain object.
        self.latest: list[None] = []


class _Slots(dict[str, Any]):
    """The parameters of one bag's module, its `_parameters`, which say when one may have been exchanged.

    Whatever exchanges a parameter writes into this dictionary: an assignment, loading by assignment, `functional_call`, a
    parametrization, a wrapper that shards. To look at a thousand of them in each call would take longer than a launch. Copies and
    pickles of it are ordinary dictionaries.
    """

    def __init__(self, parameters: dict[str, Any], changes: _Changes) -> None:
        super().__init__(parameters)
        self.changes = changes

    # Written out, and with super(), so that Dynamo traces them.
    def __setitem__(self, name: str, parameter: Any) -> None:
        super().__setitem__(name, parameter)
        self.changes.latest = []

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        self.changes.latest = []

    # All others by way of these two.
    pop, popitem, clear = MutableMapping.pop, MutableMapping.popitem, MutableMapping.clear
    update, setdefault = MutableMapping.update, MutableMapping.setdefault

    def __ior__(self, others: Any) -> _Slots:  # type: ignore[override,misc]
        self.update(others)
        return self

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        return dict, (dict(self),)


def states_of_tables(optimizer: BagOptimizer) -> list[dict[str, Tensor]]:
    """For each table views of an optimizer's tensors, `[rows, width]`, `[rows]` and `[]`, by name."""
    layout = optimizer.layout
    states: list[dict[str, Tensor]] = [{} for _ in layout.rows]
    for name, of in optimizer.states_of.items():
        whole = getattr(optimizer, name)
        for table, state in zip(states, layout.views(whole) if of == "element" else whole.split(layout.rows), strict=True):
            table[name] = state
    return [{**state, "step": optimizer.step, "learning_rate": optimizer.learning_rate} for state in states]


class TableStorage:
    """The weights of embedding tables of one dtype, one after the other in one tensor, however they are read.

    Each table's module keeps its parameter, whose data are a view of that tensor: optimizers, checkpoints and initialisers see
    ordinary parameters, and the operator sees one tensor. Nothing is copied from the one to the other.

    Gradients go to the parameters through one autograd node, which is made once and stays in use: made anew in every forward, a
    node of a thousand inputs costs some 400 microseconds. It saves no tensors, so that it can run backward any number of times.

    A tensor given to a parameter's `.data` shows when `gather` comes next: loading, moving and copying the collection call it.

    Where a parameter has been exchanged (by `torch.export`, by `torch.func.functional_call` or by an assignment), the operator
    sees the parameters one by one, and reads them where they lie, until `gather` has made them views again.

    Args:
        layout: the tables; what features it has is of no matter.
        bags: for each table a module with its `weight`.
        optimizer: makes the fused optimizer, given layout and device; None: parameters get gradients.

    Attributes:
        is_shared: several collections read it.
    """

    _storage: Tensor | None
    _parameters: list[nn.Parameter]
    _slots: list[_Slots]
    _changes: _Changes
    _seen: list[None]
    _learner: nn.Parameter | None
    _whole: Tensor | None
    _updates: JointUpdate | None
    _stream: int

    def __init__(
        self,
        layout: BagLayout,
        bags: Sequence[Table],
        optimizer: Callable[[BagLayout, torch.device], BagOptimizer] | None = None,
    ) -> None:
        self.layout = layout
        self.optimizer: BagOptimizer | None = None
        self.is_shared = False
        self._holds = False
        self._bags = list(bags)
        self._make_optimizer = optimizer
        self.gather()

    def lookup(self, layout: BagLayout, ids: Tensor, offsets: Tensor, **options: Any) -> Tensor:
        """Return what `embedding_bags` reads by a layout of these tables; an optimizer updates each row once in backward.

        Raises:
            RuntimeError: an optimizer would update the tables of this process alone, of a group of several.
        """
        if self._updates is not None and self.learns() and self._is_unchanged():
            refuse_copies()
            return self._updates.embedding_bags(layout, ids, offsets, **options)
        weights, samples = self.weights(), options.get("per_sample_weights")
        found = embedding_bags(weights, layout, ids, offsets, **options)
        if samples is not None and samples.requires_grad and isinstance(weights, Tensor):
            self.watch(weights, found)
        return found

    def prefetch(self, layout: BagLayout, ids: Tensor, offsets: Tensor, batch_sizes: Sequence[int] | None) -> None:
        """Nothing: all rows are on the device."""

    def scored(self, number: int) -> Tensor:
        """Return a table for a head: its parameter, or what hands the head's gradient to the optimizer in the backward pass.

        Raises:
            RuntimeError: as `lookup`.
        """
        if self._updates is not None and self.learns() and self._is_unchanged():
            refuse_copies()
            return self._updates.table(number)
        self.weights()
        return self._bags[number].weight

    def update_by(self, optimizer: Callable[[BagLayout, torch.device], BagOptimizer] | None) -> None:
        """Update in the backward pass from now on, by a new optimizer, or no more."""
        self._make_optimizer, self.optimizer = optimizer, None
        self.gather()

    def states_by_table(self) -> list[dict[str, Tensor]]:
        """For each table what `states_of_tables` says of it; nothing without an optimizer."""
        return [{} for _ in self._bags] if self.optimizer is None else states_of_tables(self.optimizer)

    @property
    def updates(self) -> JointUpdate | None:
        """What updates the tables in the backward pass; None without an optimizer, or on the meta device."""
        return self._updates

    @property
    def bags(self) -> list[Table]:
        """For each table the module with its `weight`."""
        return self._bags

    @property
    def holds(self) -> bool:
        """Whether gradients wait for `updates.step`."""
        return self._holds

    def hold(self, holds: bool) -> None:
        """Let the backward pass keep gradients for `updates.step`, or update by itself again; what is kept is dropped."""
        self._holds = holds
        if self._updates is not None:
            self._updates.drop()
            self._updates.holds = holds

    def weights(self) -> Tensor | tuple[Tensor, ...]:
        """What a forward pass reads: the tensor, tied to parameters' gradients where they need any, or exchanged parameters."""
        if not self._is_unchanged():
            return self._exchanged()
        assert self._storage is not None
        if self.optimizer is not None or not self.learns():
            return self._storage
        # Autograd runs a node on the stream that it was made on, which must be the one that is captured in a CUDA graph.
        stream = torch.cuda.current_stream(self._storage.device).cuda_stream if self._storage.is_cuda else 0
        if self._whole is None or self._stream != stream:
            # Not before the old node has gone, whose edges lead to the parameters' nodes of the other stream.
            self._whole = None
            self._whole, self._stream = self._tied(), stream
        return self._whole

    def whole(self) -> Tensor:
        """The tables in one tensor, without a gradient; a copy where parameters were exchanged."""
        with torch.no_grad():
            weights = self.weights()
            if isinstance(weights, Tensor):
                return weights
            # Nothing is left unwritten between the tables.
            storage = weights[0].new_zeros(self.layout.num_elements)
            for view, weight in zip(self.layout.views(storage), weights, strict=True):
                view.copy_(weight)
            return storage

    def learns(self) -> bool:
        """Tell whether this call is to be differentiated by, or to update, any of the tables."""
        if not torch.is_grad_enabled():
            return False
        # Nothing says when a table is frozen: the one that learned last is asked, and all others only if it does not any more.
        learner = self._learner
        if learner is None or not learner.requires_grad:
            self._learner = learner = next(filter(_requires_grad, self._parameters), None)
        return learner is not None

    def check_all_learn(self) -> None:
        """Refuse an update of all tables where some are frozen; called in the backward pass, before the update."""
        frozen = len(self._parameters) - sum(map(_requires_grad, self._parameters))
        if frozen:
            raise ValueError(
                f"optimizer: updates all {len(self._parameters)} tables of one dtype, but {frozen} of them do not require a "
                "gradient; freeze all or none, or put them into two collections"
            )

    def watch(self, weights: Tensor, pooled: Tensor) -> None:
        """Let the backward pass of `pooled`, which reads `weights` again, refuse tables that have changed since.

        Autograd itself sees no change by way of a parameter that was moved: it then has a count of changes of its own.
        """
        if pooled.grad_fn is None or (weights is not self._whole and weights is not self._storage):
            return
        parameters = self._parameters
        versions = [parameter._version for parameter in parameters]

        def check(_: Any) -> None:
            if [parameter._version for parameter in parameters] != versions:
                raise RuntimeError(
                    "embedding_bags: the gradient of the ids' weights needs the tables of the forward pass, but they were "
                    "changed in place; step the optimizer after backward"
                )

        pooled.grad_fn.register_prehook(check)

    @property
    def device(self) -> torch.device:
        """Where the tables are; of the first where they are on several."""
        return self._bags[0].weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the tables; of the first where they have several."""
        return self._bags[0].weight.dtype

    def gather(self) -> None:
        """Make all parameters views of one tensor, with the values they have; without a copy where they are.

        Parameters of several dtypes or devices are left as they are.
        """
        parameters = self._found()
        self._forget()
        if len({(parameter.dtype, parameter.device) for parameter in parameters}) > 1:
            return
        storage = self._storage_of(parameters)
        if storage is None:
            first = parameters[0]
            storage = torch.empty(self.layout.num_elements, dtype=first.dtype, device=first.device)
            # One by one, so that what a parameter had before can go before the next is copied.
            for parameter, view in zip(parameters, self.layout.views(storage), strict=True):
                view.copy_(parameter.detach())
                parameter.data = view
        self._take(storage)

    def apply(self, change: Callable[[Tensor], Tensor]) -> None:
        """Move or convert the tables, as `nn.Module._apply` does; their parameters remain the same objects where they can."""
        if not self._is_unchanged():
            self.gather()
        if self._storage is None:
            for bag in self._bags:
                bag._apply(change)
            self.gather()
            return
        with torch.no_grad():
            storage = change(self._storage)
        for parameter in self._parameters if storage is self._storage else self._placed(storage):
            if parameter.grad is not None:
                with torch.no_grad():
                    parameter.grad = change(parameter.grad)

    def copies(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Each parameter with a copy, which are views of one tensor again; none where the parameters are not."""
        if not self._is_unchanged():
            return []
        assert self._storage is not None
        views = self.layout.views(self._storage.clone())
        return [(of, nn.Parameter(view, of.requires_grad)) for of, view in zip(self._parameters, views, strict=True)]

    def _placed(self, storage: Tensor) -> list[nn.Parameter]:
        """Let the parameters be views of another tensor."""
        for bag, view in zip(self._bags, self.layout.views(storage), strict=True):
            if torch._has_compatible_shallow_copy_type(bag.weight, view):
                bag.weight.data = view
            else:
                bag.weight = nn.Parameter(view, bag.weight.requires_grad)
        self._forget()
        self._take(storage)
        return self._parameters

    def _take(self, storage: Tensor) -> None:
        self._storage = storage
        self._parameters = self._found()
        self._slots = [_Slots(bag._parameters, self._changes) for bag in self._bags]
        for bag, slots in zip(self._bags, self._slots, strict=True):
            bag._parameters = slots
        if self._make_optimizer is None or storage.is_meta:
            return
        if self.optimizer is None:
            self.optimizer = self._make_optimizer(self.layout, storage.device)
        for name, state in self.optimizer.state().items():
            setattr(self.optimizer, name, state.to(storage.device))
        self._updates = JointUpdate(storage, self.optimizer, self.check_all_learn)
        self._updates.holds = self._holds

    def _found(self) -> list[nn.Parameter]:
        return [cast(nn.Parameter, bag.weight) for bag in self._bags]

    def _forget(self) -> None:
        self._storage = None
        self._parameters = []
        self._slots = []
        self._changes = _Changes()
        self._seen = self._changes.latest
        self._learner = None
        self._whole = None
        self._updates = None
        self._stream = 0

    def _is_unchanged(self) -> bool:
        """Tell whether every bag has the parameter that is a view of the storage."""
        if self._storage is None:
            return False
        # Read before looking, so that what another thread exchanges meanwhile is looked at again.
        latest = self._changes.latest
        if latest is self._seen:
            return True
        try:
            is_unchanged = all(map(operator.is_, map(_weight_of, self._slots), self._parameters))
        except KeyError:
            # A parametrization computes the weight.
            is_unchanged = False
        if is_unchanged:
            self._seen = latest
        return is_unchanged

    def _tied(self) -> Tensor:
        """The storage with an edge to every parameter. One that is frozen for now takes no gradient, and can later."""
        flags = [parameter.requires_grad for parameter in self._parameters]
        with torch.inference_mode(False), torch.enable_grad():
            for parameter in self._parameters:
                parameter.requires_grad_()
            whole: Tensor = _WholeFunction.apply(self._storage, self.layout, *self._parameters)
        for parameter, flag in zip(self._parameters, flags, strict=True):
            parameter.requires_grad_(flag)
        return whole

    def _exchanged(self) -> tuple[Tensor, ...]:
        """Whatever stands in the parameters' places."""
        weights = tuple([bag.weight for bag in self._bags])
        # An exported program updates nothing.
        is_inferred = not torch.is_grad_enabled() or torch.compiler.is_exporting()
        if self.optimizer is not None and not is_inferred and any(weight.requires_grad for weight in weights):
            raise ValueError(
                "embedding_bags: a fused optimizer updates the parameters in place, but some were exchanged; copy values into "
                "them, or use load_state_dict"
            )
        if len(of := {(weight.dtype, weight.device) for weight in weights}) > 1:
            found = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in of))
            raise ValueError(
                f"embedding_bags: expected one dtype and device for tables that were made of one data type, got {found}; "
                "move the whole collection"
            )
        return weights

    def _storage_of(self, parameters: list[nn.Parameter]) -> Tensor | None:
        """The tensor that all parameters are views of, as the layout has them, or None."""
        first = parameters[0].detach()
        untyped, begin = first.untyped_storage(), first.storage_offset()
        for parameter, start in zip(parameters, self.layout.starts[:-1], strict=True):
            is_view = parameter.untyped_storage()._cdata == untyped._cdata and parameter.is_contiguous()
            if not is_view or parameter.storage_offset() != begin + start:
                return None
        return first.as_strided((self.layout.num_elements,), (1,), begin)

    def __getstate__(self) -> dict[str, Any]:
        """Without what `gather` makes; who steps this one does not step a copy, which updates by itself."""
        made = {"_storage", "_parameters", "_slots", "_changes", "_seen", "_learner", "_whole", "_updates", "_stream"}
        return {name: value for name, value in self.__dict__.items() if name not in made} | {"_holds": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # The bags may not be whole yet: who holds them calls `gather`.
        self.__dict__.update(state)
        self._forget()
