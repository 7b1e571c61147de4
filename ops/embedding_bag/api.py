"""Public embedding bags: rows of many tables pooled over the lookups of many features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from jagged.ops._shared.validation import FLOATS, check_offsets, check_tensor, validation_is_on
from jagged.ops.embedding_bag.checks import (
    check_batch_sizes,
    check_ids,
    check_optimizer,
    check_per_sample_weights,
    check_quantised,
    check_schedules,
    check_tables,
    check_weights,
)
from jagged.ops.embedding_bag.layout import BagLayout
from jagged.ops.embedding_bag.optimizers import BagOptimizer
from jagged.ops.embedding_bag.plans import PROGRAMS, BagSchedules
from jagged.ops.embedding_bag.sequences import one_by_one
from jagged.ops.embedding_bag.spec import (
    EMBEDDING_BAGS,
    SEPARATE_EMBEDDING_BAGS,
    Inputs,
    Options,
    SeparateInputs,
    SeparateOptions,
    States,
)

IDS = (torch.int64, torch.int32)


def embedding_bags(
    weights: Tensor | tuple[Tensor, ...] | list[Tensor],
    layout: BagLayout,
    indices: Tensor,
    offsets: Tensor,
    *,
    scales: Tensor | None = None,
    per_sample_weights: Tensor | None = None,
    batch_sizes: Sequence[int] | None = None,
    sequence_totals: Sequence[int] | None = None,
    optimizer: BagOptimizer | None = None,
    output_dtype: torch.dtype = torch.float32,
    schedules: BagSchedules | None = None,
    backend: str | None = None,
) -> Tensor:
    """Sum or average, for every feature and bag, the rows that its ids name in the feature's table, or list them. Deterministic.

    One launch for tables of all widths and numbers of rows, which lie in one storage, or anywhere. Lookups stand feature after
    feature, and within a feature bag after bag, as in a KeyedJaggedTensor. An empty bag is 0.

    Args:
        weights: `[layout.num_elements]`, float32, bfloat16, float16 or float64 (computed by PyTorch on every device): the tables,
            of which `layout.views(weights)` are the matrices. Or uint8, quantised by `quantize_rows`, for inference. Or a list of
            the tables, `[rows, width]` each, which are read where they lie. On a GPU each new list of places is copied there
            once, and tables of which one begins at no multiple of 16 elements from the others, as a view may, are copied in
            every call, as on AMD's GPUs all are.
        layout: the tables, the features that read them, which bags are means, and which features are sequences.
        indices: `[S]`, int32 or int64: rows, `0 <= id < rows` of the feature's table. On a GPU others count as rows of zeros
            without a gradient; `JAGGED_VALIDATE=1` refuses them.
        offsets: `[sum of batch_sizes + 1]`, int32 or int64, from 0 to S: where each bag begins, feature after feature.
        scales: `[layout.first_rows[-1], 2]` float32, for uint8 weights and those alone: of each row of all tables what its
            integers are multiplied by and what is added.
        per_sample_weights: `[S]`, any float of those above: what each row is multiplied by, but of means; differentiable unless
            weights are uint8.
        batch_sizes: number of bags of each feature; None: the same for all. On a GPU each new list is copied there once.
        sequence_totals: number of ids of each sequence, in the features' order; None: read from offsets, which waits for a GPU
            but where the one feature is a sequence. On a GPU each new list is copied there once.
        optimizer: update the rows that were read in the backward pass, in place, and make no gradient of `weights`, which must
            require one all the same. Without effect where no gradients are recorded. For weights in one storage.
        output_dtype: float32, or the dtype of weights; of uint8 weights bfloat16 or float16, too.
        schedules: of a plan for this layout, `BagPlan.schedules(layout, device)`; None: by the lengths of the batch. Triton's
            kernels alone follow them. The order in which rows are added up, and so a sum's last bits, may differ.
        backend: `"torch"` or `"triton"`; None takes Triton for CUDA tensors and PyTorch for the rest.

    Returns:
        `[B, layout.width]`, the features' pooled rows side by side; with `batch_sizes` flat, `[sum of B_f * width_f]`, feature
        after feature. Where there are sequences flat: this, then of each sequence its rows, `[N_f * width_f]`. Sums are
        accumulated in float32.

    Raises:
        ValueError: shapes, sizes or devices that do not fit, schedules of another layout among them; weights of lookups in a
            layout with means; totals of sequences that are not theirs; an optimizer for weights that require no gradient, where
            gradients are recorded, or for separate tables; uint8 weights with an optimizer, or with what wants a gradient; on a
            CPU, elsewhere with `JAGGED_VALIDATE=1`, wrong offsets and ids out of range, named by their places.
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
    operator, inputs, options = prepared(
        weights, layout, indices, offsets, scales, per_sample_weights, batch_sizes, sequence_totals, optimizer, output_dtype,
        schedules, backend,
    )  # fmt: skip
    output: Tensor = operator(inputs, options, backend).output
    return output.flatten() if layout.has_sequences else output


def prepared(
    weights: Tensor | Sequence[Tensor],
    layout: BagLayout,
    indices: Tensor,
    offsets: Tensor,
    scales: Tensor | None,
    per_sample_weights: Tensor | None,
    batch_sizes: Sequence[int] | None,
    sequence_totals: Sequence[int] | None,
    optimizer: BagOptimizer | None,
    output_dtype: torch.dtype,
    schedules: BagSchedules | None,
    backend: str | None,
) -> tuple[Any, Any, Any]:
    """Check the arguments of `embedding_bags` and return its operator and what it takes."""
    tables = None
    if isinstance(weights, (tuple, list)):
        tables = tuple(weights)
        check_tables(tables, layout)
        # Of all that is asked of it below each of them would say the same.
        weights = tables[0]
    weights = cast(Tensor, weights)
    check_tensor("weights", weights, "[E]" if tables is None else "[rows, width]", (*FLOATS, torch.uint8))
    check_tensor("indices", indices, "[S]", IDS)
    check_offsets(offsets, indices, total=indices.shape[0])
    if tables is None:
        check_weights(weights, layout)
    elif optimizer is not None:
        raise ValueError("optimizer: expected None for separate tables, which are not updated in place; give one storage of all")
    if weights.device != indices.device:
        raise ValueError(f"indices: expected the device of weights, {weights.device}, got {indices.device}; move them")
    if weights.dtype == torch.uint8 or scales is not None:
        check_quantised(weights, scales, layout, per_sample_weights, optimizer, output_dtype)
    elif output_dtype not in {torch.float32, weights.dtype}:
        raise TypeError(f"output_dtype: expected torch.float32 or the dtype of weights, {weights.dtype}, got {output_dtype}")
    num_bags, num_features = offsets.shape[0] - 1, layout.num_features
    check_batch_sizes(batch_sizes, num_bags, num_features)
    is_recorded, is_compiling = torch.is_grad_enabled(), torch.compiler.is_compiling()
    version = None
    if per_sample_weights is not None:
        check_per_sample_weights(per_sample_weights, indices, layout)
        per_sample_weights = per_sample_weights.contiguous()
        if is_recorded and per_sample_weights.requires_grad:
            # A compiled graph knows no such number.
            version = 0 if is_compiling else weights._version
    states: States = (None, None, None, None, None, None)
    rule: tuple[Any, ...] = ()
    if optimizer is not None:
        check_optimizer(optimizer, weights, layout)
        if is_recorded:
            before = optimizer.step.clone() if is_compiling and version is not None else None
            states = optimizer.first, optimizer.second, optimizer.last, optimizer.step, optimizer.learning_rate, before
            rule = optimizer.rule
    codes, programs, counted_rows = None, PROGRAMS, None
    if schedules is not None:
        check_schedules(schedules, layout, weights)
        codes, programs, counted_rows = schedules
        codes = None if codes is None else codes.contiguous()
    # On a CPU the PyTorch implementation names a wrong id where it meets one.
    if (backend == "triton" or not offsets.is_cpu) and validation_is_on(offsets):
        check_ids(layout, indices, offsets, batch_sizes)
    size, batches, host_batches = num_bags // max(1, num_features), None, None
    if layout.has_sequences:
        sizes, offsets = one_by_one(layout, indices, offsets, batch_sizes, sequence_totals)
        if len(sizes) > 1:
            num_samples = size if batch_sizes is None else None
            host_batches, batches, size = layout.batches(sizes, weights.device, num_samples)
        else:
            size = sizes[0]
    elif sequence_totals is not None:
        raise ValueError("sequence_totals: expected None for a layout without sequences; name them with BagLayout(sequences=...)")
    elif batch_sizes is not None:
        host_batches, batches, size = layout.batches(tuple(batch_sizes), weights.device)
    width = layout.feature_widths[0] if layout.has_sequences and batches is None else layout.width
    name = str(output_dtype).removeprefix("torch.")
    on_device = layout.tensor(weights.device)
    if tables is not None:
        separate = SeparateInputs(
            tables, scales, indices.contiguous(), offsets.contiguous(), per_sample_weights, on_device, batches, codes,
            layout.fields, host_batches,
        )  # fmt: skip
        of_separate = SeparateOptions(size, width, name, programs, counted_rows, version is not None)
        return SEPARATE_EMBEDDING_BAGS, separate, of_separate
    options = Options(size, width, name, programs, counted_rows, version, *rule)
    inputs = Inputs(
        weights, scales, indices.contiguous(), offsets.contiguous(), per_sample_weights, on_device, batches,
        codes, *states, layout.fields, host_batches,
    )  # fmt: skip
    return EMBEDDING_BAGS, inputs, options
