"""Embedding bags: rows of many tables pooled over the lookups of many features."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jagged.ops._shared.autograd import first_order
from jagged.ops._shared.registration import define_operator, resolve_backend
from jagged.ops._shared.validation import FLOATS, check_offsets, check_tensor, validation_is_on
from jagged.ops.embedding_bag import torch_impl
from jagged.ops.embedding_bag.layout import MOST_COUNTED, BagLayout
from jagged.ops.embedding_bag.optimizers import BagOptimizer
from jagged.ops.embedding_bag.plans import MOST_PROGRAMS, PROGRAMS, BagSchedules

IDS = (torch.int64, torch.int32)


def _forward_fake(weights: Tensor, *others: Any) -> Tensor:
    *_, batches, _, _, _, size, width, output_dtype, _ = others
    return weights.new_empty((size, width) if batches is None else size, dtype=output_dtype)


def _weights_backward_fake(grad: Tensor, *others: Any) -> Tensor:
    *_, num_elements, weights_dtype, _, _ = others
    return grad.new_empty(num_elements, dtype=weights_dtype)


def _samples_backward_fake(grad: Tensor, weights: Tensor, indices: Tensor, *others: Any) -> Tensor:
    return grad.new_empty(indices.shape, dtype=others[-2])


def _update_fake(*_: Any) -> None: ...


# The layout comes twice, on the device and on the host, and so do the batches: kernels read the one, PyTorch's loops the other.
_BATCH = "Tensor device_layout, Tensor layout, Tensor? batches, Tensor? host_batches"
_LOOKUPS = f"Tensor indices, Tensor offsets, Tensor? per_sample_weights, {_BATCH}"

_forward = define_operator(
    "embedding_bags",
    f"(Tensor weights, Tensor? scales, {_LOOKUPS}, Tensor? plan, int programs, SymInt size, SymInt width, "
    "ScalarType output_dtype, str backend) -> Tensor",
    torch_impl=torch_impl.embedding_bags_forward,
    triton_impl="jagged.ops.embedding_bag.forward:embedding_bags_forward",
    fake=_forward_fake,
)
_weights_backward = define_operator(
    "embedding_bags_weights_backward",
    f"(Tensor grad, {_LOOKUPS}, SymInt num_elements, ScalarType weights_dtype, int? counted_rows, str backend) -> Tensor",
    torch_impl=torch_impl.embedding_bags_weights_backward,
    triton_impl="jagged.ops.embedding_bag.backward:embedding_bags_weights_backward",
    fake=_weights_backward_fake,
)
_samples_backward = define_operator(
    "embedding_bags_samples_backward",
    f"(Tensor grad, Tensor weights, Tensor indices, Tensor offsets, {_BATCH}, ScalarType dtype, str backend) -> Tensor",
    torch_impl=torch_impl.embedding_bags_samples_backward,
    triton_impl="jagged.ops.embedding_bag.backward:embedding_bags_samples_backward",
    fake=_samples_backward_fake,
)
_update = define_operator(
    "embedding_bags_update",
    f"(Tensor(a!) weights, Tensor(b!) first, Tensor(c!) second, Tensor step, Tensor learning_rate, Tensor grad, {_LOOKUPS}, "
    "str kind, float eps, float beta1, float beta2, float weight_decay, bool stochastic_rounding, int? counted_rows, "
    "str backend) -> ()",
    torch_impl=torch_impl.embedding_bags_update,
    triton_impl="jagged.ops.embedding_bag.backward:embedding_bags_update",
    fake=_update_fake,
)


class EmbeddingBagsFunction(torch.autograd.Function):
    """Pooled bags, and the gradient of the tables or the update of their rows."""

    @staticmethod
    def forward(
        ctx: Any,
        weights: Tensor,
        per_sample_weights: Tensor | None,
        scales: Tensor | None,
        indices: Tensor,
        offsets: Tensor,
        batch: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
        plan: tuple[Tensor | None, int, int | None],
        size: int,
        width: int,
        output_dtype: torch.dtype,
        optimizer: BagOptimizer | None,
        backend: str,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        indices, offsets = indices.contiguous(), offsets.contiguous()
        per_sample_weights = None if per_sample_weights is None else per_sample_weights.contiguous()
        ctx.batch, ctx.optimizer, ctx.backend = batch, optimizer, backend
        ctx.num_elements, ctx.weights_dtype = weights.shape[0], weights.dtype
        *of_forward, ctx.counted_rows = plan
        needs_rows = per_sample_weights is not None and ctx.needs_input_grad[1]
        # An update changes the weights: of a batch before its own it must not be taken for a mistake.
        ctx.weights = weights if optimizer is not None else None
        saved = weights if needs_rows and optimizer is None else None
        ctx.version = weights._version if needs_rows and optimizer is not None else None
        ctx.save_for_backward(saved, per_sample_weights, indices, offsets)
        result: Tensor = _forward(
            weights, scales, indices, offsets, per_sample_weights, *batch, *of_forward, size, width, output_dtype, backend
        )
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        none = (None,) * 10
        if grad is None:
            return None, None, *none
        weights, per_sample_weights, indices, offsets = ctx.saved_tensors
        weights = ctx.weights if weights is None else weights
        grad, grad_weights, grad_samples = grad.contiguous(), None, None
        if ctx.version is not None and weights._version != ctx.version:
            raise RuntimeError(
                "per_sample_weights: their gradient needs the tables as forward read them, but an update has changed them since; "
                "look all ids up in one call of embedding_bags, or call backward of one lookup before the next is made"
            )
        if ctx.needs_input_grad[1]:
            # With the weights that forward read, so before they change.
            grad_samples = _samples_backward(grad, weights, indices, offsets, *ctx.batch, per_sample_weights.dtype, ctx.backend)
        lookups = (indices, offsets, per_sample_weights, *ctx.batch)
        if ctx.optimizer is not None and ctx.needs_input_grad[0]:
            optimizer = ctx.optimizer
            with torch.no_grad():
                optimizer.step.add_(1)
                _update(
                    weights, optimizer.first, optimizer.second, optimizer.step, optimizer.learning_rate, grad, *lookups,
                    *optimizer.rule, ctx.counted_rows, ctx.backend,
                )  # fmt: skip
            # The operator counts no change of its own.
            torch.autograd.graph.increment_version(weights)
        elif ctx.needs_input_grad[0]:
            grad_weights = _weights_backward(grad, *lookups, ctx.num_elements, ctx.weights_dtype, ctx.counted_rows, ctx.backend)
        found = [x for x in (grad_weights, grad_samples) if x is not None]
        handed = iter(first_order("embedding_bags", tuple(found)))
        return *(None if x is None else next(handed) for x in (grad_weights, grad_samples)), *none


def embedding_bags(
    weights: Tensor,
    layout: BagLayout,
    indices: Tensor,
    offsets: Tensor,
    *,
    scales: Tensor | None = None,
    per_sample_weights: Tensor | None = None,
    batch_sizes: Sequence[int] | None = None,
    optimizer: BagOptimizer | None = None,
    output_dtype: torch.dtype = torch.float32,
    schedules: BagSchedules | None = None,
    backend: str | None = None,
) -> Tensor:
    """Sum or average, for every feature and bag, the rows that its ids name in the feature's table. Deterministic.

    One launch for tables of all widths and numbers of rows, which lie in one storage. Lookups stand feature after feature, and
    within a feature bag after bag, as in a KeyedJaggedTensor. An empty bag is 0.

    Args:
        weights: `[layout.num_elements]`, float32, bfloat16, float16 or float64 (computed by PyTorch on every device): the tables,
            of which `layout.views(weights)` are the matrices. Or uint8, quantised by `quantize_rows`, for inference.
        layout: the tables, the features that read them, and which bags are means.
        indices: `[S]`, int32 or int64: rows, `0 <= id < rows` of the feature's table. On a GPU others count as rows of zeros
            without a gradient; `JAGGED_VALIDATE=1` refuses them.
        offsets: `[sum of batch_sizes + 1]`, int32 or int64, from 0 to S: where each bag begins, feature after feature.
        scales: `[layout.first_rows[-1], 2]` float32, for uint8 weights and those alone: of each row of all tables what its
            integers are multiplied by and what is added.
        per_sample_weights: `[S]`, any float of those above: what each row is multiplied by, of sums alone; differentiable unless
            weights are uint8.
        batch_sizes: number of bags of each feature; None: the same for all. On a GPU each new list is copied there once.
        optimizer: update the rows that were read in the backward pass, in place, and make no gradient of `weights`.
        output_dtype: float32, or the dtype of weights; of uint8 weights bfloat16 or float16, too.
        schedules: of a plan for this layout, `BagPlan.schedules(layout, device)`; None: by the lengths of the batch. Triton's
            kernels alone follow them. The order in which rows are added up, and so a sum's last bits, may differ.
        backend: `"torch"` or `"triton"`; None takes Triton for CUDA tensors and PyTorch for the rest.

    Returns:
        `[B, layout.width]`, the features' pooled rows side by side; with `batch_sizes` flat, `[sum of B_f * width_f]`, feature
        after feature. Sums are accumulated in float32.

    Raises:
        ValueError: shapes, sizes or devices that do not fit, schedules of another layout among them; weights of lookups in a
            layout with means; uint8 weights with an optimizer, or with what wants a gradient; with `JAGGED_VALIDATE=1` an id out
            of range, named by its place.
        TypeError: dtypes other than those above.

    Source:
        Pan et al., RecFlex: Enabling Feature Heterogeneity-Aware Optimization for Deep Recommendation Models with Flexible
        Schedules, SC 2024: a schedule for each feature in one kernel.

    Example:
        >>> import torch
        >>> from jagged.ops import BagLayout, embedding_bags
        >>> layout = BagLayout(rows=(10, 5), widths=(4, 3))
        >>> weights = torch.randn(layout.num_elements, requires_grad=True)
        >>> pooled = embedding_bags(weights, layout, torch.tensor([9, 0, 3, 4]), torch.tensor([0, 2, 2, 3, 4]))
        >>> pooled.shape, pooled[1, :4].count_nonzero().item()
        (torch.Size([2, 7]), 0)
    """
    check_tensor("weights", weights, "[E]", (*FLOATS, torch.uint8))
    check_tensor("indices", indices, "[S]", IDS)
    check_offsets(offsets, indices, total=indices.shape[0])
    if weights.shape[0] != layout.num_elements:
        raise ValueError(f"weights: expected the {layout.num_elements} elements of the layout, got shape {list(weights.shape)}")
    if not weights.is_contiguous():
        raise ValueError(f"weights: expected adjacent elements, got stride {weights.stride(0)}; pass weights.contiguous()")
    if weights.device != indices.device:
        raise ValueError(f"indices: expected the device of weights, {weights.device}, got {indices.device}; move them")
    if weights.dtype == torch.uint8 or scales is not None:
        _check_quantised(weights, scales, layout, per_sample_weights, optimizer, output_dtype)
    elif output_dtype not in {torch.float32, weights.dtype}:
        raise TypeError(f"output_dtype: expected torch.float32 or the dtype of weights, {weights.dtype}, got {output_dtype}")
    num_bags, num_features = offsets.shape[0] - 1, layout.num_features
    if batch_sizes is None:
        if num_bags % num_features if num_features else num_bags:
            raise ValueError(
                f"offsets: expected a multiple of the {num_features} features, and one, got {offsets.shape[0]}; "
                "pass batch_sizes where features have batches of their own"
            )
    elif len(batch_sizes) != num_features or sum(batch_sizes) != num_bags or min((0, *batch_sizes)) < 0:
        raise ValueError(
            f"batch_sizes: expected {num_features} sizes with the sum {num_bags}, as offsets have bags, got {list(batch_sizes)}"
        )
    if per_sample_weights is not None:
        check_tensor("per_sample_weights", per_sample_weights, "[S]", FLOATS)
        if per_sample_weights.shape != indices.shape or per_sample_weights.device != indices.device:
            raise ValueError(
                f"per_sample_weights: expected shape {list(indices.shape)} on {indices.device}, one for each of indices, "
                f"got {list(per_sample_weights.shape)} on {per_sample_weights.device}"
            )
        if layout.has_means:
            assert layout.means is not None
            feature = layout.means.index(True)
            raise ValueError(f"per_sample_weights: only sums are weighted, but bags of feature {feature} are means")
    if optimizer is not None and optimizer.layout is not layout and optimizer.layout != layout:
        raise ValueError("optimizer: expected one of the same layout, got one of another")
    if optimizer is not None and optimizer.step.device != weights.device:
        raise ValueError(
            f"optimizer: expected its states on the device of weights, {weights.device}, got {optimizer.step.device}; "
            "make it with device=weights.device"
        )
    if schedules is not None:
        if (codes := schedules.codes) is not None:
            check_tensor("schedules", codes, "[F]", (torch.int32,))
            if codes.shape[0] != num_features or codes.device != weights.device:
                raise ValueError(
                    f"schedules: expected {num_features} on {weights.device}, got {codes.shape[0]} on {codes.device}; "
                    "take those of the plan for this layout and device"
                )
            schedules = schedules._replace(codes=codes.contiguous())
        if not 1 <= schedules.programs <= MOST_PROGRAMS:
            raise ValueError(f"schedules: expected 1 to {MOST_PROGRAMS} programs, got {schedules.programs}")
        if schedules.counted_rows is not None and not 0 <= schedules.counted_rows <= MOST_COUNTED:
            raise ValueError(f"schedules: expected counted_rows from 0 to {MOST_COUNTED:,}, got {schedules.counted_rows}")
    chosen = resolve_backend(backend, weights)
    # On a CPU the PyTorch implementation names a wrong id where it meets one.
    if validation_is_on(offsets) and not (offsets.is_cpu and chosen == "torch"):
        _validate(layout, indices, offsets, batch_sizes)
    host_batches = batches = None
    if batch_sizes is None:
        size = num_bags // max(1, num_features)
    else:
        host_batches, batches, size = _batches(layout, tuple(batch_sizes), weights.device)
    batch = (layout.tensor(weights.device), layout.fields, batches, host_batches)
    plan = (None, PROGRAMS, None) if schedules is None else tuple(schedules)
    result: Tensor = EmbeddingBagsFunction.apply(  # type: ignore[no-untyped-call]
        weights, per_sample_weights, scales, indices, offsets, batch, plan, size, layout.width, output_dtype, optimizer,
        chosen,
    )  # fmt: skip
    return result


class _Batches(NamedTuple):
    """For each feature its first bag, the number of its bags, and where its output begins, `[F, 3]` int64; the output's size."""

    on_host: Tensor
    on_device: Tensor
    size: int


def _check_quantised(
    weights: Tensor,
    scales: Tensor | None,
    layout: BagLayout,
    per_sample_weights: Tensor | None,
    optimizer: BagOptimizer | None,
    output_dtype: torch.dtype,
) -> None:
    """Refuse scales without quantised weights, quantised weights without scales, and what such weights cannot do."""
    if weights.dtype != torch.uint8:
        raise ValueError(f"scales: expected None for weights of {weights.dtype}, got a tensor; only uint8 weights have scales")
    if scales is None:
        raise ValueError("scales: expected those of the uint8 weights, got None; quantize_rows gives both")
    check_tensor("scales", scales, "[R, 2]", (torch.float32,))
    if scales.shape != (layout.first_rows[-1], 2) or scales.device != weights.device or not scales.is_contiguous():
        raise ValueError(
            f"scales: expected shape {[layout.first_rows[-1], 2]}, contiguous, on {weights.device}, as the layout has rows, got "
            f"{list(scales.shape)} of stride {list(scales.stride())} on {scales.device}"
        )
    if output_dtype not in FLOATS[:3]:
        raise TypeError(f"output_dtype: expected torch.float32, bfloat16 or float16 for uint8 weights, got {output_dtype}")
    if optimizer is not None:
        raise ValueError("optimizer: expected None for uint8 weights, which are for inference; train the float weights")
    for name, tensor in (("scales", scales), ("per_sample_weights", per_sample_weights)):
        if tensor is not None and tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name}: has no gradient where weights are uint8; pass {name}.detach(), or call under no_grad")


def _batches(layout: BagLayout, batch_sizes: tuple[int, ...], device: torch.device) -> _Batches:
    # A graph for all sizes looks nothing up by them.
    return (_new_batches if torch.compiler.is_compiling() else _kept_batches)(layout, batch_sizes, device)


def _new_batches(layout: BagLayout, batch_sizes: tuple[int, ...], device: torch.device) -> _Batches:
    rows, first, begin = [], 0, 0
    for count, width in zip(batch_sizes, layout.feature_widths, strict=True):
        rows.append((first, count, begin))
        first += count
        begin += count * width
    on_host = torch.tensor(rows, dtype=torch.int64, device="cpu").reshape(-1, 3)
    return _Batches(on_host, on_host.to(device), begin)


_kept_batches = functools.lru_cache(maxsize=256)(_new_batches)


def _validate(layout: BagLayout, indices: Tensor, offsets: Tensor, batch_sizes: Sequence[int] | None) -> None:
    """Refuse an id that its feature's table does not have."""
    num_features = layout.num_features
    sizes = [(offsets.shape[0] - 1) // max(1, num_features)] * num_features if batch_sizes is None else list(batch_sizes)
    assert layout.tables is not None
    ends, bag = offsets.tolist(), 0
    for feature, (size, table) in enumerate(zip(sizes, layout.tables, strict=True)):
        torch_impl.refuse_wrong_ids(indices[ends[bag] : ends[bag + size]], layout.rows[table], feature, ends[bag])
        bag += size
