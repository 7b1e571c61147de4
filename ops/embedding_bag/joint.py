"""Lookups of several calls, and scores against the tables that they read, whose rows one update changes together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from jagged.ops._shared.backends import resolve_backend
from jagged.ops._shared.copies import DeviceCopy
from jagged.ops._shared.finite import all_finite
from jagged.ops._shared.room import joined
from jagged.ops.embedding_bag.api import prepared
from jagged.ops.embedding_bag.fields import BATCH, OfBatch
from jagged.ops.embedding_bag.layout import BagLayout, as_real_tensors
from jagged.ops.embedding_bag.optimizers import SQUARES, BagOptimizer, Rule
from jagged.ops.embedding_bag.plans import BagSchedules
from jagged.ops.embedding_bag.slices import Entries, Slices, Source, slices_of
from jagged.ops.embedding_bag.spec import (
    CHANGED,
    EMBEDDING_BAGS,
    UPDATE,
    Inputs,
    Options,
    Order,
    UpdateInputs,
    UpdateOptions,
    WeightsInputs,
    gradient_of_samples,
    room_for_order,
    update_rows,
)


class _Call(NamedTuple):
    """What a lookup, or a table, hands over in the backward pass: the gradient of its output beside its ids; who is to update.

    `order` is that of its lookups, where it is known.
    """

    layout: BagLayout
    lookups: WeightsInputs
    counted_rows: int | None
    backend: str | None
    order: Order | None = None


class _Taken(NamedTuple):
    """What was held; the sum of the rows' squares, where what wrote the gradients writes it, too."""

    calls: list[Any]
    squares: Tensor | None


class JointUpdate:
    """One update of tables for all that a call of backward reaches: lookups, of whatever calls and layouts, and scores.

    `embedding_bags(..., optimizer=...)` changes rows as soon as backward comes to it, so that a row of two calls is changed
    twice, and the second call's gradient of ids' weights finds other tables. Here lookups hand their gradients over, and the rows
    are changed when all have done so: once each, by the sum of all their gradients. So do heads that score against a table, which
    `table` gives them.

    Every lookup depends on one node of the graph, which autograd reaches when it has come through all lookups of this call of
    backward. What it does not reach changes nothing.

    With `holds` calls of backward keep their gradients, beside the ids, until `step` makes one update of all that they kept. So
    micro-batches are accumulated, and gradients are clipped by a norm that is known after all of them.

    Args:
        weights: `[layout.num_elements]`, the tables.
        optimizer: of a layout with the same tables.
        check: called before each update, may raise.
        done: called when the rows that lookups name are no longer needed by their gradients: after an update, and when held
            gradients are dropped.

    Attributes:
        holds: whether backward leaves the update to `step`; False at first.

    Raises:
        RuntimeError: in backward, where the tables have changed since a lookup whose ids' weights want a gradient; inside
            reentrant checkpointing, whose calls of backward are several for one.

    Example:
        >>> import torch
        >>> from jagged.ops import BagLayout, BagOptimizer, JointUpdate
        >>> pooled = BagLayout(rows=(10,), widths=(4,))
        >>> listed = BagLayout(rows=(10,), widths=(4,), sequences=(True,))
        >>> weights = torch.zeros(pooled.num_elements)
        >>> tables = JointUpdate(weights, BagOptimizer("sgd", pooled, learning_rate=1.0))
        >>> sums = tables.embedding_bags(pooled, torch.tensor([3, 7]), torch.tensor([0, 2]))
        >>> rows = tables.embedding_bags(listed, torch.tensor([3]), torch.tensor([0, 1]))
        >>> (sums.sum() + rows.sum()).backward()
        >>> pooled.views(weights)[0][:, 0]
        tensor([ 0.,  0.,  0., -2.,  0.,  0.,  0., -1.,  0.,  0.])
    """

    def __init__(
        self,
        weights: Tensor,
        optimizer: BagOptimizer,
        check: Callable[[], None] | None = None,
        done: Callable[[], None] | None = None,
    ) -> None:
        self.weights, self.optimizer, self._check, self._done = weights.detach(), optimizer, check, done
        self._token: Tensor | None = None
        self._stream = 0
        self._calls: list[_Call | Slices] = []
        self._backward = -1
        self.holds = False
        self._held: list[_Call | Slices] = []
        # What was found out about what is held.
        self._squares: Tensor | None = None
        self._squares_are_captured = False
        self._finite: Tensor | None = None
        # Slices that the norm has made and that there is memory for, by table and first row.
        self._kept: dict[tuple[int, int], Tensor] = {}
        self._is_captured = False

    def embedding_bags(
        self,
        layout: BagLayout,
        indices: Tensor,
        offsets: Tensor,
        *,
        per_sample_weights: Tensor | None = None,
        batch_sizes: Sequence[int] | None = None,
        sequence_totals: Sequence[int] | None = None,
        output_dtype: torch.dtype = torch.float32,
        schedules: BagSchedules | None = None,
        backend: str | None = None,
    ) -> Tensor:
        """Return what `jagged.ops.embedding_bags` returns; its arguments are described there.

        Raises:
            ValueError, TypeError: as there.
        """
        # Whoever has them may not want a gradient of theirs.
        weights = self.weights.detach().requires_grad_()
        _, inputs, options = prepared(
            weights, layout, indices, offsets, None, per_sample_weights, batch_sizes, sequence_totals, self.optimizer,
            output_dtype, schedules, backend,
        )  # fmt: skip
        if not torch.is_grad_enabled():
            output = EMBEDDING_BAGS(inputs, options, backend).output
        else:
            output = _Lookup.apply(self._node(), inputs.per_sample_weights, self, layout, inputs, options, backend)
        return output.flatten() if layout.has_sequences else output

    def table(self, number: int = 0, *, backend: str | None = None) -> Tensor:
        """Return a table, `[rows, width]`, for whatever scores against it, and whose gradient is handed over as a lookup's.

        A dense gradient is one of all rows. A sparse one, `[rows, width]` in COO, is one of the rows that its indices name, also
        where they name a row several times, or with zeros. It has the dtype of the table, as gradients have in PyTorch, and is
        added to those of lookups before anything is rounded to it.

        Args:
            number: which of the layout's tables.
            backend: `"torch"`, `"triton"`, or None to choose by device.

        Raises:
            IndexError: there is no such table.

        Example:
            >>> import torch
            >>> from jagged.ops import BagLayout, BagOptimizer, JointUpdate
            >>> tables = JointUpdate(torch.zeros(6), BagOptimizer("sgd", BagLayout((3,), (2,)), learning_rate=1.0))
            >>> (torch.tensor([[1.0, 2.0]]) @ tables.table().T).sum().backward()
            >>> tables.table().detach()
            tensor([[-1., -2.],
                    [-1., -2.],
                    [-1., -2.]])
        """
        if not 0 <= number < len(self.optimizer.layout.rows):
            raise IndexError(f"number: expected one of {len(self.optimizer.layout.rows)} tables, got {number}")
        if not torch.is_grad_enabled():
            return self.optimizer.layout.views(self.weights)[number]
        return _Table.apply(self._node(), self, number, backend)

    def norm(self) -> Tensor:
        """Return the L2 norm of the gradients that are held, each row's summed: `[]` float32, and 0 where there are none.

        As long as the update itself, as it adds each row's gradients up.
        """
        if not self._held:
            return torch.zeros((), device=self.weights.device)
        # For the next call, too, and for `step`.
        self._held = _joined_lookups(self._held)
        if self._squares is None:
            self._squares, self._finite = self._row_squares().sum(dtype=torch.float64), None
            self._squares_are_captured = _is_capturing(self.weights)
        return self._squares.sqrt().float()

    def _row_squares(self) -> Tensor:
        """Of each row of all tables the squared norm of its gradient; what is held, and no slices, knows its order then."""
        squares = torch.zeros(self.optimizer.layout.first_rows[-1], dtype=torch.float32, device=self.weights.device)
        states = self.weights, squares, squares[:0], None, self.optimizer.step, self.optimizer.learning_rate
        rule = Rule(SQUARES, 0.0, 0.0, 0.0, 0.0, False, True, None)
        for call in self._parts(self._held, self._kept, keeps=True):
            order = None
            if call is self._held[0] and resolve_backend(call.backend, call.lookups.grad) == "triton":
                # Of the lookups that `step` updates by.
                order = room_for_order(call.layout, call.lookups)
                self._held = [call._replace(order=order)]
            inputs = UpdateInputs._make((*states, *(order or (None, None, None)), *call.lookups))
            UPDATE(inputs, UpdateOptions._make((*rule, call.counted_rows, False)), call.backend)
            # The next slice is made when nothing holds this one.
            del call, inputs
        return squares

    @property
    def norm_bytes(self) -> int | None:
        """Bytes that `norm` takes beside the gradients that are held, which a graph that it is captured in keeps; some more
        where rows or numbers of a gradient are too many for 32 bits. None where a table's gradient is in slices.
        """
        if any(isinstance(of, Slices) for of in self._held):
            return None
        lookups = [of.lookups for of in self._held if isinstance(of, _Call)]
        if not lookups:
            return 0
        count, bags = sum(x.indices.shape[0] for x in lookups), sum(x.offsets.shape[0] for x in lookups)
        # Of a lookup a row, a source and a factor in order; where several calls are joined also its id and its factor. A square
        # of each row.
        of_lookup, of_bag = (24, 8) if len(lookups) > 1 else (12, 0)
        return of_lookup * count + of_bag * bags + 4 * self.optimizer.layout.first_rows[-1]

    def is_finite(self) -> Tensor:
        """Return whether all that is held is finite, and the norm that was asked for: `[]` bool on the device."""
        if self._finite is None and self._squares is not None:
            # Everything that a row moves by is in them.
            self._finite = torch.isfinite(self._squares)
        if self._finite is None:
            lookups = [call.lookups for call in self._held if isinstance(call, _Call)]
            found = [all_finite(x) for of in lookups for x in (of.grad, of.per_sample_weights) if x is not None]
            found += [of.source.is_finite() for of in self._held if isinstance(of, Slices)]
            self._finite = torch.stack(found).all() if found else torch.ones((), dtype=torch.bool, device=self.weights.device)
        return self._finite

    def step(self, scale: Tensor | None = None) -> Tensor:
        """Update each row that the held gradients name, once, by their sum; nothing where none are held.

        Args:
            scale: `[]`, what they are multiplied by.

        Returns:
            Tensor: `[]` bool on the device, whether the update was made: where a gradient, the scale or the norm that was asked
            for is not finite, weights, states and the number of steps stay as they are. Nothing waits for the device.

        Raises:
            RuntimeError: the gradients are of a CUDA graph that was captured without this step.
        """
        if not self._held:
            return torch.ones((), dtype=torch.bool, device=self.weights.device)
        if self._is_captured and not _is_capturing(self.weights):
            self.drop()
            raise RuntimeError(
                "step: a CUDA graph keeps its gradients from call to call, but no replay hands them over; capture the step, too, "
                "or take() them after the capture and give() them after each replay"
            )
        is_step, calls, kept = self.is_finite(), self._held, self._kept
        if scale is not None:
            is_step = is_step & torch.isfinite(scale)
        self.drop()
        if is_step.is_cuda or is_step:
            self._update(calls, is_step, scale, kept)
        return is_step

    def take(self) -> Any:
        """Take what is held, to give it back later.

        Of a captured CUDA graph these are the tensors that its replays write: given back after each replay, `step` updates by it.
        Where `norm` was captured, too, its replays make it.
        """
        calls, squares = self._held, self._squares if self._squares_are_captured else None
        if squares is None:
            # Replays write other ids, whose order is another one.
            calls = [of._replace(order=None) if isinstance(of, _Call) else of for of in calls]
        self._held = []
        self._forget()
        return _Taken(calls, squares)

    def give(self, taken: Any) -> None:
        """Hold what was taken, beside what is held."""
        calls, squares = taken
        is_all = not self._held
        self._forget()
        # A replay has read the tables as they are now, whatever they were when it was captured.
        version = self.weights._version
        self._held = self._held + [
            of._replace(version=version, source=of.source.anew()) if isinstance(of, Slices) else of for of in calls
        ]
        self._squares, self._is_captured = squares if is_all else None, False

    def drop(self) -> None:
        """Forget the gradients that are held."""
        self._held = []
        self._forget()
        if self._done is not None:
            self._done()

    def _node(self) -> Tensor:
        """What each lookup depends on; autograd runs a node on the stream that it was made on."""
        stream = torch.cuda.current_stream(self.weights.device).cuda_stream if self.weights.is_cuda else 0
        if self._token is None or self._stream != stream:
            with as_real_tensors(), torch.inference_mode(False), torch.enable_grad():
                self._token = _Update.apply(torch.zeros((), device=self.weights.device, requires_grad=True), self)
            self._stream = stream
        assert self._token is not None
        return self._token

    def _hand_over(self, call: _Call | Slices) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._backward:
            # What another call of backward left was given up by an error, or nobody wanted it.
            self._backward, self._calls = task, []
            # Of a norm whose step has not come: backward needs the memory.
            self._kept = {}
            for of in self._held:
                if isinstance(of, Slices):
                    of.source.forget()
        self._calls.append(call)

    def _take(self) -> None:
        calls, self._calls = self._calls, []
        if not calls or self._backward != torch._C._current_graph_task_id():
            return
        if self.holds:
            self._held = self._held + calls
            self._forget()
            self._is_captured = _is_capturing(self.weights)
            return
        self._update(calls)

    def _forget(self) -> None:
        """Forget what was found out about what is held."""
        self._squares, self._squares_are_captured, self._finite, self._kept = None, False, None, {}

    def _update(
        self,
        calls: list[_Call | Slices],
        is_step: Tensor | None = None,
        scale: Tensor | None = None,
        kept: dict[tuple[int, int], Tensor] | None = None,
    ) -> None:
        if self._check is not None:
            self._check()
        of, steps = self.optimizer, 1 if is_step is None else is_step
        for call in self._parts(calls, kept or {}):
            x, order = _scaled(call, is_step, scale)
            states = self.weights, of.first, of.second, of.last, of.step, of.learning_rate
            inputs = UpdateInputs._make((*states, *(order or (None, None, None)), *x))
            update_rows(inputs, of.rule, call.counted_rows, call.backend, steps, is_sorted=order is not None)
            # Of one step. The next slice is made when nothing holds this one.
            steps = 0
            del call, x, order, inputs
        if self._done is not None:
            self._done()

    def _parts(self, calls: list[_Call | Slices], kept: dict[tuple[int, int], Tensor], *, keeps: bool = False) -> Iterator[_Call]:
        """Yield what calls hand over, each row in one part alone; a slice of a table is made when it is asked for."""
        calls = _joined_lookups(calls)
        lookups, slices = [of for of in calls if isinstance(of, _Call)], [of for of in calls if isinstance(of, Slices)]
        if not slices:
            yield from lookups
            return
        # Before anything is updated.
        if any(of.version != self.weights._version for of in slices):
            raise RuntimeError(
                "table: a gradient that its update makes needs it as the loss read it, but it has changed since; update it once "
                "for all losses"
            )
        for of in slices:
            of.source.unchanged.check()
        entries = None
        for call in lookups:
            layout = _all_features((call.layout,))
            entries = Entries(layout, _joined([call], layout))
            if (others := entries.of_others([of.number for of in slices])) is not None:
                # An order is that of all lookups.
                yield call._replace(layout=entries.layout, lookups=others, order=None)
        behind = 0 if entries is None else entries.gradient_size
        for part in slices_of(slices, self.optimizer.layout.rows, kept, keeps=keeps, behind=behind):
            ids, rows = torch.arange(part.first, part.last, device=part.gradient.device), part.gradient
            if part.named is not None and ids.is_cuda:
                ids = torch.where(part.named, ids, -1)
            elif part.named is not None:
                # There ids that no table has are errors.
                ids, rows = ids[part.named], rows[part.named]
            ends = torch.arange(len(ids) + 1, device=ids.device)
            call = _call_of_bags(self, part.number, slices[0].backend, rows, ids, ends, None)
            if entries is not None:
                call = _as_one([call, _Call(entries.layout, entries.of_slice(part), None, call.backend)])
            del part, rows
            yield call
            del call

    def __getstate__(self) -> dict[str, Any]:
        return {
            **self.__dict__,
            "_token": None,
            "_calls": [],
            "_backward": -1,
            "_held": [],
            "_squares": None,
            "_finite": None,
            "_kept": {},
        }


class _Update(torch.autograd.Function):
    """The node behind all lookups."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, of: JointUpdate) -> Tensor:
        ctx.of = of
        ctx.set_materialize_grads(False)
        return leaf.clone()

    @staticmethod
    def backward(ctx: Any, _: Tensor | None) -> tuple[None, None]:
        ctx.of._take()
        return None, None


class _Lookup(torch.autograd.Function):
    """A lookup, whose backward pass hands its gradient over."""

    @staticmethod
    def forward(
        ctx: Any, _: Tensor, samples: Tensor | None, of: JointUpdate, layout: BagLayout, inputs: Inputs, options: Options,
        backend: str | None,
    ) -> Tensor:  # fmt: skip
        ctx.of, ctx.layout, ctx.backend, ctx.counted_rows = of, layout, backend, options.counted_rows
        ctx.task = torch._C._current_graph_task_id()
        ctx.version = of.weights._version
        ctx.save_for_backward(inputs.indices, inputs.offsets, samples)
        ctx.batches = inputs.batches, inputs.host_batches
        return EMBEDDING_BAGS(inputs._replace(weights=of.weights.detach()), options, backend).output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        of, (indices, offsets, samples) = ctx.of, ctx.saved_tensors
        _refuse_reentrant(ctx.task)
        layout, (batches, host_batches) = ctx.layout, ctx.batches
        grad = grad.contiguous()
        of_layout = layout.tensor(grad.device), batches, layout.fields, host_batches
        lookups, of_samples = WeightsInputs(grad, indices, offsets, samples, *of_layout), None
        if ctx.needs_input_grad[1]:
            if of.weights._version != ctx.version:
                raise RuntimeError(CHANGED)
            of_samples = gradient_of_samples(of.weights, grad, lookups, samples.dtype, ctx.backend)
        of._hand_over(_Call(layout, lookups, ctx.counted_rows, ctx.backend))
        return None, of_samples, None, None, None, None, None


class _Table(torch.autograd.Function):
    """A table, whose backward pass hands its gradient over: one lookup of each row that has one."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, of: JointUpdate, number: int, backend: str | None) -> Tensor:
        ctx.of, ctx.number, ctx.backend = of, number, backend
        ctx.set_materialize_grads(False)
        ctx.task = task = torch._C._current_graph_task_id()
        # For losses that have the table's gradient in factors, or slice by slice (`sampled_cross_entropy/apart.py`,
        # `cross_entropy/slices.py`).
        ctx.take_pairs = functools.partial(_take_pairs, of, number, backend, task)
        ctx.take_slices = functools.partial(_take_slices, of, number, backend, task, of.weights._version)
        # Not a view, of which autograd would want to know what becomes of the other tables.
        return of.optimizer.layout.views(of.weights)[number].detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, ...]:
        of = ctx.of
        _refuse_reentrant(ctx.task)
        if grad is None:
            return None, None, None, None
        if grad.is_sparse:
            ids, rows = grad._indices()[0], grad._values()
        else:
            ids, rows = torch.arange(grad.shape[0], device=grad.device), grad
        ends = torch.arange(ids.shape[0] + 1, device=ids.device)
        of._hand_over(_call_of_bags(of, ctx.number, ctx.backend, rows, ids, ends, None))
        return None, None, None, None


def _take_pairs(of: JointUpdate, number: int, backend: str | None, task: int, rows: Tensor, ids: Tensor, factors: Tensor) -> None:
    """Take a gradient in factors: row n of `rows` `[N, D]`, times its factors, for its ids, both `[N, P]`; -1 is none."""
    _refuse_reentrant(task)
    if ids.is_cuda:
        ends = torch.arange(0, ids.numel() + 1, ids.shape[1], device=ids.device)
    else:
        # There ids that no table has are errors.
        counts = ids >= 0
        ends = torch.cat([torch.zeros(1, dtype=torch.int64), counts.sum(1).cumsum(0)])
        ids, factors = ids[counts], factors[counts]
    of._hand_over(_call_of_bags(of, number, backend, rows, ids.flatten(), ends, factors.flatten()))


def _take_slices(of: JointUpdate, number: int, backend: str | None, task: int, version: int, source: Source) -> None:
    """Take a gradient that is made slice by slice, by the table as it has been since `version`."""
    _refuse_reentrant(task)
    of._hand_over(Slices(number, version, backend, source))


def _call_of_bags(
    of: JointUpdate, number: int, backend: str | None, rows: Tensor, ids: Tensor, offsets: Tensor, factors: Tensor | None
) -> _Call:
    """Return gradients of one table as a lookup's, whose bags have the gradients `rows`."""
    layout = _alone(of.optimizer.layout, number)
    of_layout = layout.tensor(rows.device), None, layout.fields, None
    return _Call(layout, WeightsInputs(rows.contiguous(), ids, offsets, factors, *of_layout), None, backend)


def _scaled(call: _Call, is_step: Tensor | None, scale: Tensor | None) -> tuple[WeightsInputs, Order | None]:
    """Return lookups, and their order, whose gradients are multiplied by `scale`; of no step they read and change nothing."""
    x, order = call.lookups, call.order
    if is_step is not None and is_step.is_cuda:
        # Ids that no table has; sorted they are behind all rows.
        x = x._replace(indices=torch.where(is_step, x.indices, -1))
        if order is not None:
            order = order._replace(keys=torch.where(is_step, order.keys, torch.iinfo(order.keys.dtype).max))
    if scale is None:
        return x, order
    if call.layout.has_means:
        # Whose lookups have no factors of their own.
        return x._replace(grad=x.grad * scale), order
    # Of each lookup: the gradients may be as many as the table has numbers, and stay as they are.
    x = x._replace(per_sample_weights=_times(x.per_sample_weights, scale, x.indices))
    return x, None if order is None else order._replace(factors=_times(order.factors, scale, x.indices))


def _times(factors: Tensor | None, scale: Tensor, like: Tensor) -> Tensor:
    return scale.float().expand(like.shape).contiguous() if factors is None else factors * scale


def _refuse_reentrant(task: int) -> None:
    """Refuse a node that was made inside another call of backward: it is computed again, and differentiated by one of its own."""
    if task != -1 and task != torch._C._current_graph_task_id():
        raise RuntimeError(
            "embedding_bags: an optimizer in the backward pass cannot be told when reentrant checkpointing is done; use "
            "checkpoint(..., use_reentrant=False)"
        )


def _is_capturing(like: Tensor) -> bool:
    return like.is_cuda and torch.cuda.is_current_stream_capturing()


def _joined_lookups(calls: list[_Call | Slices]) -> list[_Call | Slices]:
    """Return all lookups as one, first, where there are any, and the slices as they are."""
    lookups: list[_Call | Slices] = [_as_one(found)] if (found := [of for of in calls if isinstance(of, _Call)]) else []
    return lookups + [of for of in calls if isinstance(of, Slices)]


def _as_one(calls: list[_Call]) -> _Call:
    """Return what several calls hand over as what one does."""
    first = calls[0]
    if len(calls) == 1:
        return first
    layout = _all_features(tuple(call.layout for call in calls))
    counted_rows = next((call.counted_rows for call in calls if call.counted_rows is not None), None)
    backend = next((call.backend for call in calls if call.backend is not None), None)
    return _Call(layout, _joined(calls, layout), counted_rows, backend)


def _joined(calls: list[_Call], layout: BagLayout) -> WeightsInputs:
    """Return the gradients and the lookups of all calls as those of one, whose features are theirs one after the other."""
    given = [call.lookups for call in calls]
    grad, begins = joined([x.grad for x in given])
    rows: list[tuple[int, ...]] = []
    offsets, first_bag, first_id = [], 0, 0
    for call, x, begin in zip(calls, given, begins, strict=True):
        for of in _bags_of(call):
            rows.append(tuple(of._replace(first_bag=of.first_bag + first_bag, output_begin=of.output_begin + begin)))
        offsets.append((x.offsets if call is calls[-1] else x.offsets[:-1]) + first_id)
        first_bag += x.offsets.shape[0] - 1
        first_id += x.indices.shape[0]
    samples = None
    if any(x.per_sample_weights is not None for x in given):
        ones = (x.grad.new_ones(x.indices.shape, dtype=torch.float32) for x in given)
        samples = torch.cat(
            [one if x.per_sample_weights is None else x.per_sample_weights for x, one in zip(given, ones, strict=True)]
        )
    indices = torch.cat([x.indices for x in given])
    host_batches, batches = _on_both(tuple(rows), grad.device)
    with as_real_tensors():
        of_layout = layout.tensor(grad.device), batches.read(), layout.fields, host_batches
    return WeightsInputs(grad, indices, torch.cat(offsets), samples, *of_layout)


def _bags_of(call: _Call) -> list[OfBatch]:
    """Return where each feature's bags are in the call's gradient."""
    layout, x = call.layout, call.lookups
    if x.host_batches is not None:
        return [OfBatch._make(row) for row in x.host_batches.tolist()]
    count, stride = x.grad.shape
    columns = (0,) if layout.has_sequences else layout.columns[:-1]
    return [OfBatch(feature * count, count, column, stride) for feature, column in enumerate(columns)]


@functools.lru_cache(maxsize=64)
def _all_features(layouts: tuple[BagLayout, ...]) -> BagLayout:
    """Return the tables of layouts that differ in their features, with all of these."""
    first = layouts[0]
    tables = [table for layout in layouts for table in layout.tables or ()]
    means = [is_mean for layout in layouts for is_mean in layout.means or ()]
    return BagLayout(first.rows, first.widths, tuple(tables), tuple(means))


@functools.lru_cache(maxsize=64)
def _alone(layout: BagLayout, number: int) -> BagLayout:
    """Return the tables of a layout with one feature, which reads one of them."""
    return BagLayout(layout.rows, layout.widths, (number,))


@functools.lru_cache(maxsize=256)
def _on_both(rows: tuple[tuple[int, ...], ...], device: torch.device) -> tuple[Tensor, DeviceCopy]:
    with as_real_tensors():
        host = torch.tensor(rows, dtype=torch.int64, device="cpu").reshape(-1, len(BATCH))
        return host, DeviceCopy(host, device)
