"""Linear cross-entropy over sampled negatives, computed from hidden states and item weights."""

from __future__ import annotations

from typing import Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from jagged.ops._shared.backends import resolve_backend
from jagged.ops._shared.losses import Reduction, reduced
from jagged.ops._shared.sizes import cdiv
from jagged.ops._shared.validation import autocast_dtype, validate_ids, validation_is_on
from jagged.ops.sampled_cross_entropy.apart import taker_in_factors, taker_in_slices, with_weights_apart
from jagged.ops.sampled_cross_entropy.checks import check_exclude, check_options, check_tensors, gbce_weight, source_of_negatives
from jagged.ops.sampled_cross_entropy.draws import Draw, Source, target_correction_of
from jagged.ops.sampled_cross_entropy.spec import (
    SAMPLED_LINEAR_CROSS_ENTROPY,
    Correction,
    Inputs,
    Loss,
    Options,
    Positive,
    loss_dtype,
)
from jagged.ops.sampled_cross_entropy.triton.configurations import SHARED_ROWS

# Rows that are gathered for each of the table's, up to which a sparse gradient is made as if the table were large: with rows
# that are converted as they are gathered, and, where an update takes it, in factors.
MOST_GATHERED = 3
# Bytes of a gradient of all rows up to which an update that would take it in slices gets it at once: each slice is some launches.
AT_ONCE = 64 * 2**20


class _Options(TypedDict, total=False):
    """Options of `sampled_linear_cross_entropy`, but for the one that its result's type depends on."""

    negative_log_q: Tensor | None
    target_log_q: Tensor | None
    exclude: tuple[Tensor, Tensor] | None
    loss: Loss
    correction: Correction
    positive: Positive
    mask_hits: bool
    renormalise: bool
    gbce_t: float
    scale: float
    ignore_index: int
    sample_weight: Tensor | None
    reduction: Reduction
    filter_eps: float | None
    sparse: bool
    memory_budget: int | None
    backend: str | None


@overload
def sampled_linear_cross_entropy(
    hidden: Tensor, weight: Tensor, target: Tensor, negatives: Tensor | Draw, *, return_lse: Literal[True],
    **options: Unpack[_Options],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def sampled_linear_cross_entropy(
    hidden: Tensor, weight: Tensor, target: Tensor, negatives: Tensor | Draw, *, return_lse: Literal[False] = ...,
    **options: Unpack[_Options],
) -> Tensor: ...  # fmt: skip


def sampled_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    negatives: Tensor | Draw,
    *,
    negative_log_q: Tensor | None = None,
    target_log_q: Tensor | None = None,
    exclude: tuple[Tensor, Tensor] | None = None,
    loss: Loss = "softmax",
    correction: Correction = "none",
    positive: Positive = "inside",
    mask_hits: bool = True,
    renormalise: bool = False,
    gbce_t: float = 0.75,
    scale: float = 1.0,
    ignore_index: int = -100,
    sample_weight: Tensor | None = None,
    reduction: Reduction = "mean",
    filter_eps: float | None = None,
    sparse: bool = False,
    memory_budget: int | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Loss of target items against sampled negatives; neither logits nor a row's gathered items nor its ids are kept in memory.

    Of a row with the logits `x_t = scale * hidden . weight_t` of its target and `x_j` of its ns negatives, drawn with the
    probabilities `q_j`, the loss is, over the negatives that are not masked,

    - `"softmax"`: `log(exp x_t + sum_j exp x_j) - x_t`; with `positive="outside"` without `exp x_t`;
    - `"refined"`: `(1 - p) * (log(sum_j exp x_j) - x_t)` with `p = exp x_t / (exp x_t + sum_j exp x_j)`, through which no
      gradient flows; the positive is not corrected and outside the denominator, whatever `positive` says;
    - `"bce"`: `softplus(-x_t) + sum_j softplus(x_j)`, a sum over the negatives that is not divided by their number;
    - `"gbce"`: `beta * softplus(-x_t) + sum_j softplus(x_j)` with `beta = alpha (t (1 - 1 / alpha) + 1 / alpha)` and
      `alpha = ns / (V - 1)`.

    A row that has no negative left has the loss of its positive alone: 0 for softmax and refined, the first term for the others.

    Args:
        hidden: `[N, D]`, float32, bfloat16, float16 or float64 (computed by PyTorch on every device).
        weight: `[V, D]`, the dtype of hidden. Under `torch.autocast` both are cast to its dtype, and gradients of float32
            master weights are accumulated and returned in float32.
        target: `[N]`, int32 or int64: item of each row, 0 <= item < V, or `ignore_index`. A row with any other value has
            the loss NaN and no gradient; where values are checked it is refused.
        negatives: a `Draw`, or ids, int32 or int64: `[N, ns]` for each row, `[G, ns]` for each of G blocks of `ceil(N / G)`
            consecutive rows, `[ns]` for the batch. An id that is no item is masked; where values are checked all
            but -1 are refused. An item that stands there twice counts twice.
        negative_log_q: in the shape of the ids, float32: logarithms of the probabilities that one draw gives them, for a
            correction. None means uniform, `-log V`. A `Draw` knows its own.
        target_log_q: `[N]`, float32: the same of the targets, for `correction="both"`; None as for the negatives.
        exclude: ids `[M]` and offsets `[N + 1]`: a list for each row of items that are no negatives of it, such as further
            positives or its history. Each negative is compared with the row's whole list.
        loss: see above.
        correction: `"negatives"` subtracts `log(ns * q_j)`, the logarithm of how often a negative is expected, from its
            logit, `"both"` from the target's too. For refined only `"negatives"`, for bce and gbce only `"none"`.
        positive: whether softmax's denominator counts the positive: `"inside"` or `"outside"`.
        mask_hits: negatives that are the row's target do not count. Those in `exclude` never do.
        renormalise: the negatives that are left count for all: `log(ns / left)` is added to their logits. For softmax and
            refined.
        gbce_t: gbce's t, from 0 (beta = 1: bce) to 1 (beta = alpha: scores as over all items).
        scale: inverse temperature, by which all logits are multiplied.
        ignore_index: rows with this target have the loss 0, the log-sum-exp 0 and no gradient, whatever hidden holds
            there, are left out of the mean and gather nothing.
        sample_weight: `[N]`, a factor of each row's loss; the mean divides by the sum of those of rows that count.
        reduction: `"mean"`, 0 with zero gradients where no row counts; `"sum"` or `"none"`.
        filter_eps: leave negatives out of both gradients where the derivative of the row's loss by their logit (the softmax
            probability, for refined times `1 - p`), times the row's weight, is below this. A row's gradient then errs by at
            most `scale * ns * filter_eps * max |weight_j|` times the factor between the row's weighted loss and what is
            differentiated. The gradient of the log-sum-exp leaves out the same. None keeps all. For softmax and refined.
        sparse: weight's gradient is a sparse COO tensor of the drawn items and targets, as `torch.nn.Embedding(sparse=True)`
            gives: memory and time of a step do not grow with V. It has as many rows as there are negatives and targets, V at
            most; those not needed repeat an item (item 0 where no row counts), with zeros, and `coalesce`, which optimizers
            for sparse gradients call, takes them away. Weights of another dtype than hidden are converted as they are
            gathered, or at once where a step gathers three times as many as there are. `weight` has to be a parameter itself,
            not a part of one. D should be a multiple of 16: other tables are copied. `torch.compile` breaks its graph there.
            Of a table that `JointUpdate.table` gives, where fewer than 16 rows share a draw and gather at most three times as
            many items as there are, no gradient of rows is made: the update gets items, factors and hidden states, and sums
            them up. Where they gather more, and the gradient of all rows is larger than 64 MiB, or than `memory_budget`, the
            update makes it, and backward does not.
        memory_budget: bytes that such a gradient may take. One that is larger is made slice by slice, each by half of these
            bytes; under a norm that the update waits for by an eighth, of which those that have room are kept and the others
            are made twice. None for the whole gradient. Without `sparse` and a `JointUpdate` it changes nothing.
        return_lse: also return the logarithm of each row's denominator; it is differentiable. For softmax and refined.
        backend: `"torch"`, `"triton"`, or None to choose by device.

    Returns:
        The loss, a scalar or `[N]` for `"none"`, in float32 (float64 for float64); with `return_lse` a pair of it and the
        log-sum-exp `[N]` in the same dtype, 0 in ignored rows.

    Raises:
        ValueError: shapes that do not fit, tensors on different devices, options that do not go together or are unknown,
            weights or probabilities that require a gradient; on a CPU, elsewhere with `JAGGED_VALIDATE=1`, also ids out of
            range, named by their place.
        TypeError: dtypes other than those above.

    Source:
        Jean et al., On Using Very Large Target Vocabulary for Neural Machine Translation, ACL 2015 (correction); Yi et al.,
        Sampling-Bias-Corrected Neural Modeling for Large Corpus Item Recommendations, RecSys 2019; Baranov et al., Correcting
        the LogQ Correction, RecSys 2025 (refined); Kang and McAuley, Self-Attentive Sequential Recommendation, ICDM 2018
        (bce); Petrov and Macdonald, gSASRec, RecSys 2023 (gbce).

    Example:
        >>> import torch
        >>> from jagged.ops import Draw, sampled_linear_cross_entropy
        >>> hidden = torch.randn(5, 16, requires_grad=True)
        >>> item_weight = torch.randn(1000, 16, requires_grad=True)
        >>> target = torch.tensor([3, 999, -100, 0, 41])
        >>> draw = Draw("log_uniform", count=20, seed=torch.tensor([1]))
        >>> loss = sampled_linear_cross_entropy(hidden, item_weight, target, draw, correction="negatives")
        >>> loss.backward()
        >>> hidden.grad[2].count_nonzero()
        tensor(0)
    """
    check_tensors(hidden, weight, target)
    check_options(loss, correction, positive, renormalise, reduction, filter_eps, return_lse)
    if memory_budget is not None and (not isinstance(memory_budget, int) or memory_budget < 0):
        raise ValueError(f"memory_budget: expected a number of bytes, or None for as many as it takes, got {memory_budget}")
    num_items = weight.shape[0]
    source = source_of_negatives(hidden, weight, negatives, correction, negative_log_q, target_log_q, sample_weight)
    excluded, exclude_offsets = check_exclude(exclude, hidden)
    if validation_is_on(target):
        validate_ids(target, num_items, name="target", ignore_index=ignore_index)
        if isinstance(negatives, Tensor):
            validate_ids(negatives, num_items, name="negatives", ignore_index=-1)
        if excluded is not None:
            validate_ids(excluded, num_items, name="exclude[0]")
    positive_weight = gbce_weight(source.num_negatives, num_items, gbce_t) if loss == "gbce" else 1.0
    chosen, dtype = resolve_backend(backend, hidden), loss_dtype(hidden.dtype)
    target_correction = None
    if correction == "both":
        target_correction = target_correction_of(source, target, target_log_q, num_items, dtype)
    # With a filter the direction depends on the finished statistic; backward computes it then. So it does where rows share a
    # draw, for which the kernels' way through the finished statistic is the shorter one. A compiled graph, which serves every
    # number of rows, keeps the direction.
    is_compiled = torch.compiler.is_compiling()
    shares = chosen == "triton" and not is_compiled and source.rows_per_draw >= SHARED_ROWS
    gathers_little = sparse and _num_gathered(hidden.shape[0], source) <= MOST_GATHERED * num_items
    options = Options(
        *source[4:],
        loss="bce" if loss == "gbce" else loss,
        is_corrected=correction != "none",
        is_inside=positive == "inside" and loss == "softmax",
        mask_hits=mask_hits,
        renormalise=renormalise,
        scale=float(scale),
        positive_weight=positive_weight,
        ignore_index=ignore_index,
        filter_eps=filter_eps,
        is_sparse=sparse,
        # A cast copies the whole table; else the rows that are gathered are converted.
        casts_weight=not gathers_little,
        with_direction=hidden.requires_grad and torch.is_grad_enabled() and filter_eps is None and not shares,
    )
    take = None
    if sparse and not is_compiled and source.rows_per_draw < SHARED_ROWS:
        if gathers_little:
            take = taker_in_factors(weight, options, backend)
        elif weight.numel() * dtype.itemsize > (AT_ONCE if memory_budget is None else min(AT_ONCE, memory_budget)):
            take = taker_in_slices(weight, options, memory_budget, backend)
    if take is not None and (cast := autocast_dtype(hidden.device.type)) is not None and hidden.dtype != torch.float64:
        # What the weights' gradient is made of, too.
        hidden = hidden.to(cast)
    x = Inputs(
        hidden, weight, target, *source[:4], target_correction, excluded, exclude_offsets,
        None if filter_eps is None or sample_weight is None else sample_weight.to(dtype).masked_fill(target == ignore_index, 0),
    )  # fmt: skip
    if take is None:
        losses, lse, *_ = SAMPLED_LINEAR_CROSS_ENTROPY(x, options, backend)
    else:
        losses, lse = with_weights_apart(x, options, backend, take)
    result = reduced(losses, target, ignore_index, reduction, sample_weight=sample_weight, backend=backend)
    return (result, lse) if return_lse else result


def _num_gathered(num_rows: int, source: Source) -> int:
    """Return how many rows of the table a call gathers, those that share a draw being one."""
    return num_rows + cdiv(num_rows, source.rows_per_draw if source.rows_per_draw >= SHARED_ROWS else 1) * source.num_negatives
