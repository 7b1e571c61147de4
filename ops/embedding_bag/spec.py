"""The operators of embedding bags: pooled bags, of one storage or of separate tables, gradients, and the update of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from jagged.ops._shared.operator import Differentiable, OnHost, operator
from jagged.ops.embedding_bag.layout import BagLayout, starts_of
from jagged.ops.embedding_bag.optimizers import Rule
from jagged.ops.embedding_bag.plans import PROGRAMS

# A layout and the batches of features come twice: kernels read the one on the device, PyTorch's loops and launches the one on the
# host. Both are as `fields.py` says.


class Inputs(NamedTuple):
    """Tables, with scales where they are quantised; a batch's lookups; what reads what; schedules; an optimizer's tensors.

    `step_before` is a compiled graph's copy of `step` at forward, where the gradient of ids' weights is to read the tables.
    """

    weights: Differentiable
    scales: Tensor | None
    indices: Tensor
    offsets: Tensor
    per_sample_weights: Differentiable | None
    layout: Tensor
    batches: Tensor | None
    plan: Tensor | None
    first: Tensor | None
    second: Tensor | None
    last: Tensor | None
    step: Tensor | None
    learning_rate: Tensor | None
    step_before: Tensor | None
    host_layout: OnHost
    host_batches: OnHost | None


class Options(NamedTuple):
    """The output's rows, or elements where features have batches of their own, and columns; a plan's numbers; an update's rule.

    Without a `kind` there is no update. `version` is how often the tables had changed at forward, where the gradient of ids'
    weights is to read them; None where it is not.
    """

    size: int
    width: int
    # By name: in packages of AOTInductor, PyTorch 2.11 hands operators another dtype than was exported (pytorch/pytorch#169157).
    output_dtype: str
    programs: int = PROGRAMS
    counted_rows: int | None = None
    version: int | None = None
    # Those of `Rule`. Numbers would make Dynamo compile twice.
    kind: str | None = None
    eps: float | None = None
    beta1: float | None = None
    beta2: float | None = None
    weight_decay: float | None = None
    stochastic_rounding: bool | None = None
    is_decoupled: bool | None = None
    max_norm: float | None = None


class SeparateInputs(NamedTuple):
    """Tables that lie anywhere, `[rows, width]` each, and what `Inputs` has beside its own, less an optimizer's tensors."""

    tables: tuple[Differentiable, ...]
    scales: Tensor | None
    indices: Tensor
    offsets: Tensor
    per_sample_weights: Differentiable | None
    layout: Tensor
    batches: Tensor | None
    plan: Tensor | None
    host_layout: OnHost
    host_batches: OnHost | None


class SeparateOptions(NamedTuple):
    """As of `Options`; and whether the gradient of ids' weights is to read the tables."""

    size: int
    width: int
    output_dtype: str
    programs: int = PROGRAMS
    counted_rows: int | None = None
    reads_again: bool = False


def new_output(x: Inputs | SeparateInputs, o: Options | SeparateOptions) -> Tensor:
    """Return a tensor for the pooled rows, not filled."""
    shape = (o.size, o.width) if x.batches is None else (o.size,)
    return x.indices.new_empty(shape, dtype=getattr(torch, o.output_dtype))


class Outputs(NamedTuple):
    """Pooled rows, `[B, width]`, or flat where features have batches of their own."""

    output: Tensor


class WeightsInputs(NamedTuple):
    """The output's gradient, and the lookups."""

    grad: Tensor
    indices: Tensor
    offsets: Tensor
    per_sample_weights: Tensor | None
    layout: Tensor
    batches: Tensor | None
    host_layout: OnHost
    host_batches: OnHost | None


class WeightsOptions(NamedTuple):
    """The storage's length and dtype, and up to how many rows tables are counted."""

    num_elements: int
    dtype: torch.dtype
    counted_rows: int | None


class SamplesInputs(NamedTuple):
    """The output's gradient, and the tables as forward read them."""

    grad: Tensor
    weights: Tensor
    indices: Tensor
    offsets: Tensor
    layout: Tensor
    batches: Tensor | None
    host_layout: OnHost
    host_batches: OnHost | None


class SamplesOptions(NamedTuple):
    """The dtype of the ids' weights."""

    dtype: torch.dtype


class Order(NamedTuple):
    """Room for lookups as kernels sort them, `[S]` each: the rows that they read, where their gradients begin, their factors.

    Rows are int32 or int64, as `keys_dtype` says, sources too, by how many numbers the gradient has. Factors, float32, are there
    where lookups have any: weights, or means.
    """

    keys: Tensor
    sources: Tensor
    factors: Tensor | None


class UpdateInputs(NamedTuple):
    """The tables and an optimizer's states, the output's gradient, and the lookups; `step` counts this update already.

    `keys`, `sources` and `factors` are an `Order`, which is written, or read.
    """

    weights: Tensor
    first: Tensor
    second: Tensor
    last: Tensor | None
    step: Tensor
    learning_rate: Tensor
    keys: Tensor | None
    sources: Tensor | None
    factors: Tensor | None
    grad: Tensor
    indices: Tensor
    offsets: Tensor
    per_sample_weights: Tensor | None
    layout: Tensor
    batches: Tensor | None
    host_layout: OnHost
    host_batches: OnHost | None


class UpdateOptions(NamedTuple):
    """An optimizer's rule, up to how many rows tables are counted, and whether the order of the lookups is known."""

    kind: str
    eps: float
    beta1: float
    beta2: float
    weight_decay: float
    stochastic_rounding: bool
    is_decoupled: bool
    max_norm: float | None
    counted_rows: int | None
    is_sorted: bool


class Gradient(NamedTuple):
    """Of the storage, `[num_elements]`, or of the ids' weights, `[S]`."""

    gradient: Tensor


class Nothing(NamedTuple):
    """An update changes what it was given."""


#: An optimizer's tensors among the inputs: `first`, `second`, `last`, `step`, `learning_rate` and `step_before`.
States: TypeAlias = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
#: What an implementation knows of a batch's lookups.
Lookups: TypeAlias = Inputs | SeparateInputs | WeightsInputs | SamplesInputs | UpdateInputs

_TORCH, _TRITON = "jagged.ops.embedding_bag.torch_impl", "jagged.ops.embedding_bag.triton"

WEIGHTS_BACKWARD = operator(
    "embedding_bags_weights_backward",
    WeightsInputs,
    WeightsOptions,
    Gradient,
    shapes=lambda x, o: Gradient(x.grad.new_empty(o.num_elements, dtype=o.dtype)),
    torch=f"{_TORCH}:weights_backward",
    triton=f"{_TRITON}.sums:weights_backward",
)
SAMPLES_BACKWARD = operator(
    "embedding_bags_samples_backward",
    SamplesInputs,
    SamplesOptions,
    Gradient,
    shapes=lambda x, o: Gradient(x.grad.new_empty(x.indices.shape, dtype=o.dtype)),
    torch=f"{_TORCH}:samples_backward",
    triton=f"{_TRITON}.launch:samples_backward",
)
UPDATE = operator(
    "embedding_bags_update",
    UpdateInputs,
    UpdateOptions,
    Nothing,
    shapes=lambda x, o: Nothing(),
    torch=f"{_TORCH}:update",
    triton=f"{_TRITON}.sums:update",
    mutates=("weights", "first", "second", "last", "keys", "sources", "factors"),
)


def keys_dtype(layout: BagLayout) -> torch.dtype:
    """Return what holds the rows of tables that features read, and one behind them."""
    assert layout.tables is not None
    num_rows = max((layout.first_rows[table] + layout.rows[table] for table in set(layout.tables)), default=0)
    return torch.int32 if num_rows < 2**31 - 1 else torch.int64


def room_for_order(layout: BagLayout, x: WeightsInputs) -> Order:
    """Return what an update writes the order of its lookups to, and a second one of the same lookups reads."""
    count, has_factors = x.indices.shape[0], x.per_sample_weights is not None or layout.has_means
    return Order(
        x.indices.new_empty(count, dtype=keys_dtype(layout)),
        x.indices.new_empty(count, dtype=torch.int32 if x.grad.numel() < 2**31 else torch.int64),
        x.grad.new_empty(count, dtype=torch.float32) if has_factors else None,
    )


CHANGED = (
    "per_sample_weights: their gradient needs the tables as forward read them, but an update has changed them since; "
    "look all ids up in one call of embedding_bags, or call backward of one lookup before the next is made"
)


def gradient_of_samples(weights: Tensor, grad: Tensor, x: Lookups, dtype: torch.dtype, backend: str | None) -> Tensor:
    """Return the gradient of the ids' weights, by the tables that forward read."""
    samples = SamplesInputs(grad, weights, x.indices, x.offsets, x.layout, x.batches, x.host_layout, x.host_batches)
    return SAMPLES_BACKWARD(samples, SamplesOptions(dtype), backend).gradient


def update_rows(
    x: UpdateInputs,
    rule: tuple[Any, ...],
    counted_rows: int | None,
    backend: str | None,
    is_step: Tensor | int = 1,
    is_sorted: bool = False,
) -> None:
    """Change the rows that were read, and their states, as one more step, if it is one: 1, or a bool on the device."""
    x.step.add_(is_step)
    UPDATE(x, UpdateOptions._make((*rule, counted_rows, is_sorted)), backend)
    # Kernels count no change of their own.
    torch.autograd.graph.increment_version(x.weights)


def _gradient(
    grads: Outputs, x: Inputs, out: Outputs, o: Options, wanted: dict[str, torch.dtype], backend: str
) -> dict[str, Tensor]:
    """Return gradients, or update the tables in place of theirs."""
    grad, found = grads.output.contiguous(), {}
    if "per_sample_weights" in wanted:
        if x.step is not None and x.step_before is not None:
            torch._assert_async(torch.eq(x.step, x.step_before), CHANGED)
        elif o.kind is not None and x.weights._version != o.version:
            raise RuntimeError(CHANGED)
        # With the weights that forward read, so before they change.
        found["per_sample_weights"] = gradient_of_samples(x.weights, grad, x, wanted["per_sample_weights"], backend)
    if "weights" not in wanted:
        return found
    lookups = x.indices, x.offsets, x.per_sample_weights, x.layout, x.batches, x.host_layout, x.host_batches
    if o.kind is None:
        options = WeightsOptions(x.weights.shape[0], x.weights.dtype, o.counted_rows)
        found["weights"] = WEIGHTS_BACKWARD(WeightsInputs(grad, *lookups), options, backend).gradient
        return found
    assert x.first is not None
    assert x.second is not None
    assert x.step is not None
    assert x.learning_rate is not None
    updated = UpdateInputs(
        x.weights, x.first, x.second, x.last, x.step, x.learning_rate, None, None, None, grad, *lookups
    )  # fmt: skip
    update_rows(updated, o[-len(Rule._fields) :], o.counted_rows, backend)
    return found


_LOOKUPS = ("indices", "offsets", "per_sample_weights", "step_before")
_OF_LAYOUT = ("layout", "batches", "host_layout", "host_batches")
_OF_OPTIMIZER = ("weights", "first", "second", "last", "step", "learning_rate")

EMBEDDING_BAGS = operator(
    "embedding_bags",
    Inputs,
    Options,
    Outputs,
    shapes=lambda x, o: Outputs(new_output(x, o)),
    torch=f"{_TORCH}:forward",
    triton=f"{_TRITON}.launch:forward",
    gradient=_gradient,
    is_first_order=True,
    saved=lambda o: _LOOKUPS if o.version is None or o.kind is not None else (*_LOOKUPS, "weights"),
    # What nothing changes, and what updates change: that of a batch before must not be taken for a mistake.
    unchecked=lambda o: _OF_LAYOUT if o.kind is None else (*_OF_LAYOUT, *_OF_OPTIMIZER),
)


def joined(tables: Sequence[Tensor]) -> Tensor:
    """Return tables in one storage, where a layout has them: a copy."""
    starts = starts_of(table.numel() for table in tables)
    parts = []
    for table, start, end in zip(tables, starts[:-1], starts[1:], strict=True):
        gap = end - start - table.numel()
        parts += [table.reshape(-1), table.new_zeros(gap)] if gap else [table.reshape(-1)]
    return torch.cat(parts)


def _gradient_of_separate(
    grads: Outputs, x: SeparateInputs, out: Outputs, o: SeparateOptions, wanted: dict[str, torch.dtype], backend: str
) -> dict[str, Any]:
    """Return gradients: those of the tables are views of a storage's."""
    found: dict[str, Any] = {}
    grad = grads.output.contiguous()
    if "per_sample_weights" in wanted:
        found["per_sample_weights"] = gradient_of_samples(joined(x.tables), grad, x, wanted["per_sample_weights"], backend)
    if "tables" in wanted:
        shapes = [tuple(table.shape) for table in x.tables]
        starts = starts_of(rows * width for rows, width in shapes)
        options = WeightsOptions(starts[-1], wanted["tables"], o.counted_rows)
        lookups = x.indices, x.offsets, x.per_sample_weights, x.layout, x.batches, x.host_layout, x.host_batches
        whole = WEIGHTS_BACKWARD(WeightsInputs(grad, *lookups), options, backend).gradient
        of_tables = zip(shapes, starts[:-1], strict=True)
        found["tables"] = tuple([whole.as_strided((rows, width), (width, 1), start) for (rows, width), start in of_tables])
    return found


SEPARATE_EMBEDDING_BAGS = operator(
    "separate_embedding_bags",
    SeparateInputs,
    SeparateOptions,
    Outputs,
    shapes=lambda x, o: Outputs(new_output(x, o)),
    torch=f"{_TORCH}:forward_of_separate",
    triton=f"{_TRITON}.separate:forward",
    gradient=_gradient_of_separate,
    is_first_order=True,
    saved=lambda o: (*_LOOKUPS[:3], "tables") if o.reads_again else _LOOKUPS[:3],
    unchecked=_OF_LAYOUT,
    title="embedding_bags",
)
