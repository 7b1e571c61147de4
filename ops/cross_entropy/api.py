"""Linear cross-entropy: the loss of a softmax over all items, computed from hidden states and item weights."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from jagged.ops._shared.autograd import first_order
from jagged.ops._shared.registration import define_operator, resolve_backend
from jagged.ops._shared.validation import FLOATS, check_tensor, compute_dtype_of, validate_ids, validation_is_on
from jagged.ops.cross_entropy import torch_impl
from jagged.ops.cross_entropy.strategy import MEMORY_BUDGET, STRATEGIES, StrategyName

Reduction = Literal["mean", "sum", "none"]


def _accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _forward_fake(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    item_scale: Tensor | None,
    smoothing: Tensor | None,
    temperature: float,
    softcap: float | None,
    ignore_index: int,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    lse = hidden.new_empty(target.shape, dtype=_accumulator_dtype(hidden.dtype))
    return lse, torch.empty_like(lse), lse.new_empty(0 if smoothing is None else target.shape)


def _backward_fake(
    grad_lse: Tensor,
    grad_target: Tensor,
    grad_smoothed: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    item_scale: Tensor | None,
    smoothing: Tensor | None,
    temperature: float,
    softcap: float | None,
    ignore_index: int,
    hidden_dtype: torch.dtype | None,
    weight_dtype: torch.dtype | None,
    has_grad_bias: bool,
    hidden_eps: float | None,
    weight_eps: float | None,
    strategy: str,
    memory_budget: int,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_hidden = hidden.new_empty(hidden.shape if hidden_dtype else 0, dtype=hidden_dtype)
    grad_weight = hidden.new_empty(weight.shape if weight_dtype else 0, dtype=weight_dtype)
    return grad_hidden, grad_weight, lse.new_empty(weight.shape[0] if has_grad_bias else 0)


_forward = define_operator(
    "linear_cross_entropy",
    "(Tensor hidden, Tensor weight, Tensor target, Tensor? bias, Tensor? item_scale, Tensor? smoothing, float temperature, "
    "float? softcap, int ignore_index, str backend) -> (Tensor lse, Tensor target_logit, Tensor smoothed)",
    torch_impl=torch_impl.linear_cross_entropy_forward,
    triton_impl="jagged.ops.cross_entropy.triton.launch:linear_cross_entropy_forward",
    fake=_forward_fake,
)

_backward = define_operator(
    "linear_cross_entropy_backward",
    "(Tensor grad_lse, Tensor grad_target, Tensor? grad_smoothed, Tensor hidden, Tensor weight, Tensor target, Tensor lse, "
    "Tensor? bias, Tensor? item_scale, Tensor? smoothing, float temperature, float? softcap, int ignore_index, "
    "ScalarType? hidden_dtype, ScalarType? weight_dtype, bool has_grad_bias, float? hidden_eps, float? weight_eps, "
    "str strategy, SymInt memory_budget, str backend) -> (Tensor, Tensor, Tensor)",
    torch_impl=torch_impl.linear_cross_entropy_backward,
    triton_impl="jagged.ops.cross_entropy.triton.launch:linear_cross_entropy_backward",
    fake=_backward_fake,
)


class LinearCrossEntropyFunction(torch.autograd.Function):
    """Log-sum-exp, the target's logit and the smoothed sum of each row, with casts and the scale of the items."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        smoothing: Tensor | None,
        temperature: float,
        softcap: float | None,
        ignore_index: int,
        normalize: bool,
        filter_eps: tuple[float | None, float | None],
        strategy: str,
        memory_budget: int,
        compute_dtype: torch.dtype,
        backend: str,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.shape = temperature, softcap, ignore_index
        ctx.way = *filter_eps, strategy, memory_budget, backend
        ctx.grad_dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        hidden, weight = hidden.to(compute_dtype), weight.to(compute_dtype)
        item_scale = None
        if normalize:
            norms = torch.linalg.vector_norm(weight, dim=1, dtype=_accumulator_dtype(weight.dtype))
            item_scale = norms.clamp_(min=NORM_AT_LEAST).reciprocal_()
        outputs: tuple[Tensor, Tensor, Tensor] = _forward(
            hidden, weight, target, bias, item_scale, smoothing, *ctx.shape, backend
        )
        ctx.save_for_backward(hidden, weight, target, outputs[0], bias, item_scale, smoothing)
        return outputs

    @staticmethod
    def backward(
        ctx: Any, grad_lse: Tensor | None, grad_target: Tensor | None, grad_smoothed: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, target, lse, bias, item_scale, smoothing = ctx.saved_tensors
        wanted = [dtype if need else None for dtype, need in zip(ctx.grad_dtypes, ctx.needs_input_grad, strict=False)]
        grad_hidden, grad_weight, grad_bias = _backward(
            torch.zeros_like(lse) if grad_lse is None else grad_lse,
            torch.zeros_like(lse) if grad_target is None else grad_target,
            None if smoothing is None else torch.zeros_like(lse) if grad_smoothed is None else grad_smoothed,
            hidden, weight, target, lse, bias, item_scale, smoothing, *ctx.shape,
            wanted[0], wanted[1], wanted[2] is not None, *ctx.way,
        )  # fmt: skip
        if item_scale is not None and wanted[1]:
            grad_weight = _less_radial(grad_weight, weight, item_scale)
        grads = first_order("linear_cross_entropy", (grad_hidden, grad_weight, grad_bias.to(wanted[2] or grad_bias.dtype)))
        return *(grad if dtype else None for grad, dtype in zip(grads, wanted, strict=True)), *(None,) * 11


NORM_AT_LEAST = 1e-12
# Elements at a time of what needs a copy in the accumulator's dtype.
ELEMENTS = 2**23


def _less_radial(grad: Tensor, weight: Tensor, item_scale: Tensor) -> Tensor:
    """Return a gradient by rows without its part along the rows, which a change of their lengths alone would be."""
    rows = max(1, ELEMENTS // max(1, weight.shape[1]))
    for of_grad, of_weight, scale in zip(grad.split(rows), weight.split(rows), item_scale.split(rows), strict=True):
        direction = of_weight.to(scale.dtype) * scale[:, None]
        # A row shorter than the least norm is divided by a constant.
        along = torch.where(scale < 1 / NORM_AT_LEAST, (of_grad * direction).sum(1), 0)[:, None]
        of_grad.sub_(torch.where(along == 0, 0, along * direction))
    return grad


def _reduced(
    losses: Tensor, target: Tensor, ignore_index: int, reduction: str, of_target: Tensor | None, sample_weight: Tensor | None
) -> Tensor:
    """Return the losses, weighted, or their sum or mean."""
    if sample_weight is not None:
        sample_weight = sample_weight.to(losses.dtype).masked_fill(target == ignore_index, 0)
        losses = losses * sample_weight
    if reduction == "none":
        return losses
    total = losses.sum()
    if reduction == "sum":
        return total
    counted = target != ignore_index
    if of_target is None and sample_weight is None:
        # No valid row gives 0 / 1: a step on an empty batch is no step, rather than a NaN in every weight.
        return total / counted.sum().clamp_(min=1)
    norm = counted.to(losses.dtype)
    for factor in (of_target, sample_weight):
        norm = norm if factor is None else norm * factor
    norm = norm.sum()
    return total / torch.where(norm == 0, 1, norm)


@overload
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = ...,
    ignore_index: int = ...,
    softcap: float | None = ...,
    temperature: float = ...,
    normalize: bool = ...,
    label_smoothing: float = ...,
    z_loss: float = ...,
    class_weight: Tensor | None = ...,
    sample_weight: Tensor | None = ...,
    reduction: Reduction = ...,
    filter_eps: float | tuple[float | None, float | None] | None = ...,
    strategy: StrategyName = ...,
    memory_budget: int = ...,
    return_lse: Literal[False] = ...,
    backend: str | None = ...,
) -> Tensor: ...


@overload
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = ...,
    ignore_index: int = ...,
    softcap: float | None = ...,
    temperature: float = ...,
    normalize: bool = ...,
    label_smoothing: float = ...,
    z_loss: float = ...,
    class_weight: Tensor | None = ...,
    sample_weight: Tensor | None = ...,
    reduction: Reduction = ...,
    filter_eps: float | tuple[float | None, float | None] | None = ...,
    strategy: StrategyName = ...,
    memory_budget: int = ...,
    return_lse: Literal[True],
    backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    temperature: float = 1.0,
    normalize: bool = False,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    class_weight: Tensor | None = None,
    sample_weight: Tensor | None = None,
    reduction: Reduction = "mean",
    filter_eps: float | tuple[float | None, float | None] | None = None,
    strategy: StrategyName = "auto",
    memory_budget: int = MEMORY_BUDGET,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Cross-entropy of `hidden @ weight.T` against the target items, without the logits matrix in memory.

    With `logits = softcap * tanh((hidden @ weight.T + bias) / softcap) / temperature` the loss of a row is that of
    `torch.nn.functional.cross_entropy(logits, target, class_weight, label_smoothing=label_smoothing)`, plus
    `z_loss * logsumexp(logits) ** 2`, times its `sample_weight`; backward computes the logits again, tile by tile. Deterministic.

    Args:
        hidden: `[N, D]`, float32, bfloat16, float16 or float64 (computed by PyTorch on every device).
        weight: `[V, D]`, the dtype of hidden. Under `torch.autocast` both are cast to its dtype, and gradients of float32
            master weights are accumulated and returned in float32.
        target: `[N]`, int32 or int64: item of each row, 0 <= item < V, or `ignore_index`. A row with any other value has
            the loss NaN; `JAGGED_VALIDATE=1` refuses it.
        bias: `[V]`, any of the dtypes above: added to the products.
        ignore_index: rows with this target have the loss 0, the log-sum-exp 0 and no gradient, whatever hidden holds
            there, and are left out of the mean.
        softcap: bound of the logits before the temperature, > 0; None for none.
        temperature: what logits are divided by, > 0.
        normalize: multiply the directions of hidden and weight, rows divided by their L2 norms (at least 1e-12).
        label_smoothing: share of the target's probability that is spread evenly over all items, in [0, 1].
        z_loss: factor of the squared log-sum-exp, >= 0.
        class_weight: `[V]` without a gradient: weight of each item's loss, in the mean's divisor too.
        sample_weight: `[N]`: factor of each row's loss, in the mean's divisor too; differentiable.
        reduction: `"mean"` over the rows that are not ignored (0 with zero gradients where there is none, unlike PyTorch's
            NaN), `"sum"` or `"none"`. With weights the mean is the weighted sum by the sum of the rows' weights.
        filter_eps: leave out of the gradients, on Triton, tiles of rows by items where every logit's gradient is below this
            share of the largest row's, weights of rows included; a pair for the gradients of hidden and of weight (with
            bias), None for exact ones. Each left out is an error of at most `filter_eps` times that row's gradient a logit.
            Items come in the order of the mean row's logits, which makes whole tiles small. Rare items learn from nothing
            but such gradients: use it to fine-tune, not to train from scratch.
        strategy: `"fused"` backward kernels keep nothing but gradients, `"chunked"` ones a buffer for a chunk of items;
            `"auto"` picks the faster that fits `memory_budget`; `linear_cross_entropy_strategy` says which.
        memory_budget: bytes that chunks may take beside the gradients; with less `"auto"` takes fused kernels.
        return_lse: also return the log-sum-exp of each row's logits; it is differentiable.
        backend: `"torch"`, `"triton"`, or None to choose by device.

    Returns:
        The loss, a scalar or `[N]` for `"none"`, in float32 (float64 for float64); with `return_lse` a pair of it and the
        log-sum-exp `[N]` in the same dtype.

    Raises:
        ValueError: shapes that do not fit, tensors on different devices, numbers out of their range, an unknown reduction,
            strategy or backend, chunks with a filter; with `JAGGED_VALIDATE=1` also a target out of range, named by its place.
        TypeError: dtypes other than those above.

    Source:
        Wijmans et al., Cut Your Losses in Large-Vocabulary Language Models, ICLR 2025: the loss by recomputed tiles, the filter
        and the order of items. de Brebisson and Vincent, 2016 (z-loss). Gemma 2, 2024 (softcap).

    Example:
        >>> import torch
        >>> from jagged.ops import linear_cross_entropy
        >>> hidden = torch.randn(5, 16, requires_grad=True)
        >>> item_weight = torch.randn(1000, 16, requires_grad=True)
        >>> loss = linear_cross_entropy(hidden, item_weight, torch.tensor([3, 999, -100, 0, 41]), label_smoothing=0.1)
        >>> loss.backward()
        >>> hidden.grad[2].count_nonzero()
        tensor(0)
    """
    check_tensor("hidden", hidden, "[N, D]", FLOATS)
    check_tensor("weight", weight, "[V, D]", FLOATS)
    check_tensor("target", target, "[N]", (torch.int64, torch.int32))
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction: got {reduction!r}, expected 'mean', 'sum' or 'none'")
    if weight.shape[1] != hidden.shape[1]:
        raise ValueError(
            f"weight: expected shape [V, {hidden.shape[1]}], as wide as hidden {list(hidden.shape)}, got {list(weight.shape)}"
        )
    if not 0 < weight.shape[0] < 2**31:
        raise ValueError(f"weight: expected from 1 to 2^31 - 1 items, got shape {list(weight.shape)}")
    if target.shape[0] != hidden.shape[0]:
        raise ValueError(
            f"target: expected shape [{hidden.shape[0]}], one item per row of hidden {list(hidden.shape)}, "
            f"got {list(target.shape)}"
        )
    _check_vector("bias", bias, "[V]", weight.shape[0], "item of weight", weight)
    _check_vector("class_weight", class_weight, "[V]", weight.shape[0], "item of weight", weight)
    _check_vector("sample_weight", sample_weight, "[N]", hidden.shape[0], "row of hidden", hidden)
    for name, tensor in (("weight", weight), ("target", target), ("bias", bias), ("class_weight", class_weight),
                         ("sample_weight", sample_weight)):  # fmt: skip
        if tensor is not None and tensor.device != hidden.device:
            raise ValueError(f"{name}: expected the device of hidden, {hidden.device}, got {tensor.device}; move one of them")
    _check_number("temperature", temperature, temperature > 0, "a number above 0")
    _check_number("softcap", softcap, softcap is None or softcap > 0, "a number above 0, or None")
    _check_number("label_smoothing", label_smoothing, 0 <= label_smoothing <= 1, "a number in [0, 1]")
    _check_number("z_loss", z_loss, z_loss >= 0, "a number of at least 0")
    pair = filter_eps if isinstance(filter_eps, tuple) else (filter_eps, filter_eps)
    if len(pair) != 2 or not all(eps is None or (isinstance(eps, (int, float)) and eps >= 0) for eps in pair):
        raise ValueError(f"filter_eps: expected a number of at least 0, None, or a tuple of two of those, got {filter_eps!r}")
    hidden_eps, weight_eps = pair
    if class_weight is not None and class_weight.requires_grad:
        raise ValueError("class_weight: has no gradient, got one that requires it; pass class_weight.detach()")
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy: got {strategy!r}, expected one of {', '.join(map(repr, STRATEGIES))}")
    if strategy == "chunked" and (hidden_eps is not None or weight_eps is not None):
        raise ValueError("strategy: 'chunked' has no filter; use 'fused' or 'auto' with filter_eps")
    if memory_budget < 0:
        raise ValueError(f"memory_budget: expected a number of bytes, got {memory_budget}")
    compute_dtype = compute_dtype_of(hidden, weight)
    if validation_is_on(target):
        validate_ids(target, weight.shape[0], name="target", ignore_index=ignore_index)
    if normalize:
        # What ignored rows hold would come back through the norms as NaN.
        hidden = torch.where((target != ignore_index)[:, None], hidden, 0)
        hidden = torch.nn.functional.normalize(hidden.to(compute_dtype), dim=1, eps=NORM_AT_LEAST)
    of_target, smoothing = _weights_of_classes(class_weight, target, ignore_index, label_smoothing, weight, compute_dtype)
    lse, logit, smoothed = LinearCrossEntropyFunction.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, target, smoothing, temperature, softcap, ignore_index, normalize, (hidden_eps, weight_eps),
        strategy, memory_budget, compute_dtype, resolve_backend(backend, hidden),
    )  # fmt: skip
    losses = lse - logit
    if of_target is not None:
        losses = losses * of_target
    if smoothing is not None:
        # In ignored rows each of the three is 0.
        losses = (1 - label_smoothing) * losses + smoothing.sum() * lse - smoothed
    if z_loss:
        losses = losses + z_loss * lse.square()
    loss = _reduced(losses, target, ignore_index, reduction, of_target, sample_weight)
    return (loss, lse) if return_lse else loss


def _weights_of_classes(
    class_weight: Tensor | None, target: Tensor, ignore_index: int, label_smoothing: float, weight: Tensor, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """Return the weight of each row's target, 0 in ignored rows, and the share of each item in label smoothing."""
    num_items, dtype = weight.shape[0], _accumulator_dtype(dtype)
    of_target = smoothing = None
    if class_weight is not None:
        class_weight = class_weight.detach().to(dtype)
        of_target = class_weight[target.clamp(0, num_items - 1)].masked_fill(target == ignore_index, 0)
    if label_smoothing:
        every = torch.ones(num_items, dtype=dtype, device=weight.device) if class_weight is None else class_weight
        smoothing = every * (label_smoothing / num_items)
    return of_target, smoothing


def _check_vector(name: str, vector: Tensor | None, shape: str, length: int, of: str, like: Tensor) -> None:
    if vector is None:
        return
    check_tensor(name, vector, shape, FLOATS)
    if vector.shape[0] != length:
        raise ValueError(f"{name}: expected shape [{length}], one number per {of} {list(like.shape)}, got {list(vector.shape)}")


def _check_number(name: str, number: float | None, is_right: bool, expected: str) -> None:
    if not is_right:
        raise ValueError(f"{name}: expected {expected}, got {number}")
