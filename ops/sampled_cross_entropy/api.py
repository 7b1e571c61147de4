"""Linear cross-entropy over sampled negatives, computed from hidden states and item weights."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from jagged.ops._shared.autograd import first_order
from jagged.ops._shared.registration import define_operator, resolve_backend
from jagged.ops._shared.sizes import cdiv
from jagged.ops._shared.validation import (
    FLOATS,
    check_offsets,
    check_tensor,
    compute_dtype_of,
    validate_ids,
    validation_is_on,
)
from jagged.ops.sampled_cross_entropy import torch_impl
from jagged.ops.sampled_cross_entropy.draws import Draw, Source, item_log_probability, source_of
from jagged.ops.sampled_cross_entropy.triton.configurations import SHARED_ROWS

Loss = Literal["softmax", "refined", "bce", "gbce"]
Correction = Literal["none", "negatives", "both"]
Positive = Literal["inside", "outside"]
Reduction = Literal["mean", "sum", "none"]

IDS = (torch.int64, torch.int32)


class Settings(NamedTuple):
    """The options of one call, as the operators take them."""

    loss: str
    is_corrected: bool
    is_inside: bool
    mask_hits: bool
    renormalise: bool
    scale: float
    positive_weight: float
    ignore_index: int
    filter_eps: float | None


def _forward_fake(hidden: Tensor, weight: Tensor, target: Tensor, *others: Any) -> tuple[Tensor, ...]:
    *_, with_direction, _ = others
    dtype = torch_impl.loss_dtype(hidden.dtype)
    rows = [hidden.new_empty(target.shape, dtype=dtype) for _ in range(5)]
    return *rows, hidden.new_empty(hidden.shape if with_direction else 0, dtype=dtype)


def _backward_fake(
    grad_loss: Tensor, grad_lse: Tensor | None, hidden: Tensor, weight: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *_, hidden_grad_dtype, weight_grad_dtype, num_touched, _ = others
    grad_hidden = hidden.new_empty(hidden.shape if hidden_grad_dtype else 0, dtype=hidden_grad_dtype)
    num_grads = weight.shape[0] if num_touched is None else num_touched
    grad_weight = hidden.new_empty((num_grads, weight.shape[1]) if weight_grad_dtype else 0, dtype=weight_grad_dtype)
    return grad_hidden, grad_weight, hidden.new_empty(num_touched if weight_grad_dtype and num_touched else 0, dtype=torch.int64)


_SOURCE = "Tensor? ids, Tensor? log_q, Tensor? probability, Tensor? seed"
_DRAWS = "str kind, SymInt count, SymInt rows_per_draw, str loss, bool is_corrected, bool is_inside, bool mask_hits"

_forward = define_operator(
    "sampled_linear_cross_entropy",
    f"(Tensor hidden, Tensor weight, Tensor target, {_SOURCE}, Tensor? target_correction, Tensor? excluded, "
    f"Tensor? exclude_offsets, {_DRAWS}, bool renormalise, float scale, float positive_weight, int ignore_index, "
    "bool with_direction, str backend) "
    "-> (Tensor loss, Tensor lse, Tensor statistic, Tensor share, Tensor pull, Tensor direction)",
    torch_impl=torch_impl.sampled_linear_cross_entropy_forward,
    triton_impl="jagged.ops.sampled_cross_entropy.triton.forward:sampled_linear_cross_entropy_forward",
    fake=_forward_fake,
)

_backward = define_operator(
    "sampled_linear_cross_entropy_backward",
    f"(Tensor grad_loss, Tensor? grad_lse, Tensor hidden, Tensor weight, Tensor target, {_SOURCE}, Tensor? excluded, "
    "Tensor? exclude_offsets, Tensor statistic, Tensor share, Tensor pull, Tensor direction, Tensor? sample_weight, "
    f"{_DRAWS}, float scale, int ignore_index, float? filter_eps, ScalarType? hidden_grad_dtype, "
    "ScalarType? weight_grad_dtype, SymInt? num_touched, str backend) -> (Tensor, Tensor, Tensor)",
    torch_impl=torch_impl.sampled_linear_cross_entropy_backward,
    triton_impl="jagged.ops.sampled_cross_entropy.triton.backward:sampled_linear_cross_entropy_backward",
    fake=_backward_fake,
)


class SampledLinearCrossEntropyFunction(torch.autograd.Function):
    """Casts, the operator, weights of rows and the reduction, and their gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        ids: Tensor | None,
        log_q: Tensor | None,
        probability: Tensor | None,
        seed: Tensor | None,
        target_correction: Tensor | None,
        excluded: Tensor | None,
        exclude_offsets: Tensor | None,
        sample_weight: Tensor | None,
        draws: tuple[str, int, int],
        settings: Settings,
        reduction: Reduction,
        return_lse: bool,
        sparse: bool,
        compute_dtype: torch.dtype,
        backend: str,
    ) -> Tensor | tuple[Tensor, Tensor]:
        ctx.grad_dtypes = hidden.dtype, weight.dtype
        ctx.draws, ctx.settings, ctx.backend = draws, settings, backend
        num_draws = cdiv(hidden.shape[0], draws[2])
        # No more items than negatives and targets.
        ctx.num_touched = min(weight.shape[0], num_draws * draws[1] + hidden.shape[0]) if sparse else None
        hidden = hidden.to(compute_dtype)
        if not sparse:
            # A copy of the whole table; without it kernels convert the rows that they gather.
            weight = weight.to(compute_dtype)
        source = ids, log_q, probability, seed
        # With a filter the direction depends on the finished statistic; backward computes it then. So it does where rows share a
        # draw, for which the kernels' way through the finished statistic is the shorter one. A compiled graph, which serves
        # every number of rows, keeps the direction.
        shares = backend == "triton" and not torch.compiler.is_compiling() and draws[2] >= SHARED_ROWS
        with_direction = ctx.needs_input_grad[0] and settings.filter_eps is None and not shares
        loss, lse, *saved = _forward(
            hidden, weight, target, *source, target_correction, excluded, exclude_offsets, *draws, *settings[:-1],
            with_direction, backend,
        )  # fmt: skip
        normaliser = None
        if sample_weight is not None:
            sample_weight = torch.where(target != settings.ignore_index, sample_weight, 0).to(loss.dtype)
            loss = loss * sample_weight
        if reduction != "none":
            loss = loss.sum()
        if reduction == "mean":
            weights = target != settings.ignore_index if sample_weight is None else sample_weight
            normaliser = weights.sum(dtype=loss.dtype)
            # No counted row gives 0 / 1: a step on an empty batch is no step, rather than a NaN in every weight.
            normaliser = normaliser.clamp_(min=1) if sample_weight is None else normaliser.masked_fill_(normaliser == 0, 1)
            loss = loss / normaliser
        ctx.save_for_backward(hidden, weight, target, *source, excluded, exclude_offsets, *saved, sample_weight, normaliser)
        return (loss, lse) if return_lse else loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, grad_lse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        *tensors, sample_weight, normaliser = ctx.saved_tensors
        target, statistic = tensors[2], tensors[9]
        settings: Settings = ctx.settings
        if normaliser is not None:
            grad_loss = grad_loss / normaliser
        grad_loss = grad_loss.expand(target.shape).to(statistic.dtype)
        if sample_weight is not None:
            grad_loss = grad_loss * sample_weight
        wanted = [dtype if need else None for dtype, need in zip(ctx.grad_dtypes, ctx.needs_input_grad, strict=False)]
        is_inside = settings.is_inside and settings.loss == "softmax"
        grads = _backward(
            grad_loss, grad_lse, *tensors, sample_weight, *ctx.draws, settings.loss, settings.is_corrected, is_inside,
            settings.mask_hits, settings.scale, settings.ignore_index, settings.filter_eps, *wanted, ctx.num_touched,
            ctx.backend,
        )  # fmt: skip
        grad_hidden, grad_weight = first_order("sampled_linear_cross_entropy", grads[:2])
        if wanted[1] and ctx.num_touched is not None:
            # Not coalesced: places that no item needs repeat one, with zeros.
            grad_weight = torch.sparse_coo_tensor(grads[2][None], grad_weight, tensors[1].shape, check_invariants=False)
        return grad_hidden if wanted[0] else None, grad_weight if wanted[1] else None, *(None,) * 16


@overload
def sampled_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    negatives: Tensor | Draw,
    *,
    negative_log_q: Tensor | None = ...,
    target_log_q: Tensor | None = ...,
    exclude: tuple[Tensor, Tensor] | None = ...,
    loss: Loss = ...,
    correction: Correction = ...,
    positive: Positive = ...,
    mask_hits: bool = ...,
    renormalise: bool = ...,
    gbce_t: float = ...,
    scale: float = ...,
    ignore_index: int = ...,
    sample_weight: Tensor | None = ...,
    reduction: Reduction = ...,
    filter_eps: float | None = ...,
    sparse: bool = ...,
    return_lse: Literal[False] = ...,
    backend: str | None = ...,
) -> Tensor: ...


@overload
def sampled_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    negatives: Tensor | Draw,
    *,
    negative_log_q: Tensor | None = ...,
    target_log_q: Tensor | None = ...,
    exclude: tuple[Tensor, Tensor] | None = ...,
    loss: Loss = ...,
    correction: Correction = ...,
    positive: Positive = ...,
    mask_hits: bool = ...,
    renormalise: bool = ...,
    gbce_t: float = ...,
    scale: float = ...,
    ignore_index: int = ...,
    sample_weight: Tensor | None = ...,
    reduction: Reduction = ...,
    filter_eps: float | None = ...,
    sparse: bool = ...,
    return_lse: Literal[True],
    backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...


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
            gathered. `weight` has to be a parameter itself, not a part of one. D should be a multiple of 16: other tables are
            copied. `torch.compile` breaks its graph there.
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
    _check_tensors(hidden, weight, target)
    _check_options(loss, correction, positive, renormalise, reduction, filter_eps, return_lse)
    compute_dtype = compute_dtype_of(hidden, weight)
    (num_rows, _), num_items = hidden.shape, weight.shape[0]
    if isinstance(negatives, Draw):
        for name, given in (("negative_log_q", negative_log_q), ("target_log_q", target_log_q)):
            if given is not None:
                raise ValueError(f"{name}: a Draw knows its probabilities, got a tensor beside it; leave it out")
        source = source_of(negatives, num_rows, num_items, hidden.device)
    else:
        source = _given_source(negatives, negative_log_q, num_rows, hidden)
    for name, tensor in (("target_log_q", target_log_q), ("sample_weight", sample_weight)):
        if tensor is not None:
            _check_rows(name, tensor, num_rows, hidden)
    if negative_log_q is not None and correction == "none":
        raise ValueError("negative_log_q: is not used with correction='none'; leave it out, or correct with it")
    if target_log_q is not None and correction != "both":
        raise ValueError(f"target_log_q: is used with correction='both' alone, got correction={correction!r}; leave it out")
    excluded, exclude_offsets = _check_exclude(exclude, num_rows, hidden)
    if validation_is_on(target):
        validate_ids(target, num_items, name="target", ignore_index=ignore_index)
        if isinstance(negatives, Tensor):
            validate_ids(negatives, num_items, name="negatives", ignore_index=-1)
        if excluded is not None:
            validate_ids(excluded, num_items, name="exclude[0]")
    target_correction = None
    if correction == "both":
        target_correction = _target_correction(source, target, target_log_q, num_items, torch_impl.loss_dtype(compute_dtype))
    settings = Settings(
        "bce" if loss == "gbce" else loss,
        correction != "none",
        positive == "inside" and loss == "softmax",
        mask_hits,
        renormalise,
        float(scale),
        _gbce_beta(source.num_negatives, num_items, gbce_t) if loss == "gbce" else 1.0,
        ignore_index,
        filter_eps,
    )
    return SampledLinearCrossEntropyFunction.apply(  # type: ignore[no-any-return,no-untyped-call]
        hidden, weight, target, *source[:4], target_correction, excluded, exclude_offsets, sample_weight, source[4:], settings,
        reduction, return_lse, sparse, compute_dtype, resolve_backend(backend, hidden),
    )  # fmt: skip


def _gbce_beta(count: int, num_items: int, t: float) -> float:
    if not 0 <= t <= 1:
        raise ValueError(f"gbce_t: expected a number from 0 to 1, got {t}")
    if num_items < 2:
        raise ValueError("weight: gbce expects at least two items, got one")
    alpha = count / (num_items - 1)
    return alpha * (t * (1 - 1 / alpha) + 1 / alpha)


def _target_correction(source: Source, target: Tensor, target_log_q: Tensor | None, num_items: int, dtype: torch.dtype) -> Tensor:
    if source.kind == "given" and target_log_q is not None:
        return target_log_q.to(dtype) + _log_count(source, target, dtype)
    if source.kind == "given":
        return (_log_count(source, target, dtype) - math.log(num_items)).expand(target.shape).contiguous()
    inside = target.to(torch.int64).clamp(0, num_items - 1)
    return item_log_probability(source, inside, num_items, dtype) + math.log(source.num_negatives)


def _log_count(source: Source, target: Tensor, dtype: torch.dtype) -> Tensor:
    """Return log(ns): by PyTorch, since of given negatives ns may be a variable of a compiled model."""
    return target.new_full((1,), source.num_negatives, dtype=dtype).log_()


def _given_source(negatives: Tensor, log_q: Tensor | None, num_rows: int, hidden: Tensor) -> Source:
    if not isinstance(negatives, Tensor):
        raise TypeError(f"negatives: expected a Draw or a tensor of ids, got {type(negatives).__name__}")
    if negatives.dim() not in (1, 2):
        raise ValueError(f"negatives: expected shape [N, ns], [G, ns] or [ns], got {list(negatives.shape)}")
    check_tensor("negatives", negatives, "[*]", IDS)
    if negatives.shape[-1] == 0:
        raise ValueError(f"negatives: expected at least one negative, got shape {list(negatives.shape)}")
    _check_device("negatives", negatives, hidden)
    if log_q is not None:
        check_tensor("negative_log_q", log_q, "[*]", (torch.float32, torch.float64))
        if log_q.shape != negatives.shape:
            raise ValueError(f"negative_log_q: expected the shape of negatives, {list(negatives.shape)}, got {list(log_q.shape)}")
        _check_device("negative_log_q", log_q, hidden)
        _check_constant("negative_log_q", log_q)
    if negatives.dim() == 1:
        negatives, log_q = negatives[None], None if log_q is None else log_q[None]
        return Source(negatives, log_q, None, None, "given", negatives.shape[1], max(1, num_rows))
    groups = negatives.shape[0]
    if num_rows and not 0 < groups <= num_rows:
        raise ValueError(f"negatives: expected from 1 to {num_rows} blocks of rows, got shape {list(negatives.shape)}")
    rows_per_draw = cdiv(num_rows, groups) if num_rows else 1
    return Source(negatives, log_q, None, None, "given", negatives.shape[1], rows_per_draw)


def _check_tensors(hidden: Tensor, weight: Tensor, target: Tensor) -> None:
    check_tensor("hidden", hidden, "[N, D]", FLOATS)
    check_tensor("weight", weight, "[V, D]", FLOATS)
    check_tensor("target", target, "[N]", IDS)
    if weight.shape[1] != hidden.shape[1]:
        raise ValueError(
            f"weight: expected shape [V, {hidden.shape[1]}], as wide as hidden {list(hidden.shape)}, got {list(weight.shape)}"
        )
    if weight.shape[0] == 0:
        raise ValueError("weight: expected at least one item, got shape " + str(list(weight.shape)))
    if weight.shape[0] >= 2**31:
        raise ValueError(f"weight: expected fewer than 2^31 items, got {weight.shape[0]}; split the catalogue")
    if target.shape[0] != hidden.shape[0]:
        raise ValueError(
            f"target: expected shape [{hidden.shape[0]}], one item per row of hidden {list(hidden.shape)}, "
            f"got {list(target.shape)}"
        )
    _check_device("weight", weight, hidden)
    _check_device("target", target, hidden)


def _check_options(
    loss: str, correction: str, positive: str, renormalise: bool, reduction: str, filter_eps: float | None, return_lse: bool
) -> None:
    choices = {
        "loss": (loss, ("softmax", "refined", "bce", "gbce")),
        "correction": (correction, ("none", "negatives", "both")),
        "positive": (positive, ("inside", "outside")),
        "reduction": (reduction, ("mean", "sum", "none")),
    }
    for name, (got, expected) in choices.items():
        if got not in expected:
            raise ValueError(f"{name}: got {got!r}, expected {', '.join(map(repr, expected[:-1]))} or {expected[-1]!r}")
    if filter_eps is not None and not filter_eps >= 0:
        raise ValueError(f"filter_eps: expected a number of at least 0, or None to keep all negatives, got {filter_eps}")
    if loss == "refined" and correction != "negatives":
        raise ValueError(
            f"correction: loss='refined' corrects the negatives alone, got {correction!r}; pass correction='negatives'"
        )
    if loss in ("bce", "gbce"):
        used = {
            "correction": correction != "none",
            "positive": positive != "inside",
            "renormalise": renormalise,
            "filter_eps": filter_eps is not None,
            "return_lse": return_lse,
        }
        for name, is_used in used.items():
            if is_used:
                raise ValueError(f"{name}: loss={loss!r} has no softmax that it could apply to; leave it out")


def _check_exclude(
    exclude: tuple[Tensor, Tensor] | None, num_rows: int, hidden: Tensor
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    if exclude is None:
        return None, None
    if not isinstance(exclude, tuple) or len(exclude) != 2:
        raise TypeError(f"exclude: expected a pair (ids [M], offsets [N + 1]), got {type(exclude).__name__}")
    excluded, offsets = exclude
    check_tensor("exclude[0]", excluded, "[M]", IDS)
    _check_device("exclude[0]", excluded, hidden)
    check_offsets(offsets, hidden, "exclude[1]", excluded.shape[0])
    if offsets.shape[0] != num_rows + 1:
        raise ValueError(
            f"exclude[1]: expected shape [{num_rows + 1}], offsets of a list for each row of hidden, got {list(offsets.shape)}"
        )
    return excluded, offsets


def _check_rows(name: str, tensor: Tensor, num_rows: int, hidden: Tensor) -> None:
    check_tensor(name, tensor, "[N]", FLOATS)
    if tensor.shape[0] != num_rows:
        raise ValueError(f"{name}: expected shape [{num_rows}], one number per row of hidden, got {list(tensor.shape)}")
    _check_device(name, tensor, hidden)
    _check_constant(name, tensor)


def _check_device(name: str, tensor: Tensor, hidden: Tensor) -> None:
    if tensor.device != hidden.device:
        raise ValueError(f"{name}: expected the device of hidden, {hidden.device}, got {tensor.device}; move one of them")


def _check_constant(name: str, tensor: Tensor) -> None:
    if tensor.requires_grad:
        raise ValueError(f"{name}: has no gradient here, got a tensor that requires one; pass it with .detach()")
