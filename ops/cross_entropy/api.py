"""Linear cross-entropy: the loss of a softmax over all items, computed from hidden states and item weights."""

from __future__ import annotations

from typing import Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from jagged.ops._shared.losses import Reduction, reduced
from jagged.ops._shared.validation import (
    FLOATS,
    check_choice,
    check_device,
    check_number,
    check_tensor,
    check_vector,
    compute_dtype_of,
    validate_ids,
    validation_is_on,
)
from jagged.ops.cross_entropy.norms import NORM_AT_LEAST, inverse_norms
from jagged.ops.cross_entropy.slices import slices_taker, with_slices
from jagged.ops.cross_entropy.spec import LINEAR_CROSS_ENTROPY, MEMORY_BUDGET, Inputs, Options
from jagged.ops.cross_entropy.strategy import STRATEGIES, StrategyName


class _Options(TypedDict, total=False):
    """Options of `linear_cross_entropy`, but for those that its result's type depends on."""

    bias: Tensor | None
    ignore_index: int
    softcap: float | None
    temperature: float
    normalize: bool
    label_smoothing: float
    z_loss: float
    class_weight: Tensor | None
    sample_weight: Tensor | None
    reduction: Reduction
    filter_eps: float | tuple[float | None, float | None] | None
    strategy: StrategyName
    memory_budget: int
    backend: str | None


@overload
def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, target: Tensor, *, return_lse: Literal[False] = ...,
    return_target_logit: Literal[False] = ..., **options: Unpack[_Options],
) -> Tensor: ...  # fmt: skip


@overload
def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, target: Tensor, *, return_lse: Literal[True], return_target_logit: Literal[False] = ...,
    **options: Unpack[_Options],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, target: Tensor, *, return_lse: Literal[False] = ..., return_target_logit: Literal[True],
    **options: Unpack[_Options],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, target: Tensor, *, return_lse: Literal[True], return_target_logit: Literal[True],
    **options: Unpack[_Options],
) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip


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
    return_target_logit: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy of `hidden @ weight.T` against the target items, without the logits matrix in memory.

    With `logits = softcap * tanh((hidden @ weight.T + bias) / softcap) / temperature` the loss of a row is that of
    `torch.nn.functional.cross_entropy(logits, target, class_weight, label_smoothing=label_smoothing)`, plus
    `z_loss * logsumexp(logits) ** 2`, times its `sample_weight`; backward computes the logits again, tile by tile. Deterministic.

    Args:
        hidden: `[N, D]`, float32, bfloat16, float16 or float64 (computed by PyTorch on every device).
        weight: `[V, D]`, the dtype of hidden. Under `torch.autocast` both are cast to its dtype, and gradients of float32
            master weights are accumulated and returned in float32.
        target: `[N]`, int32 or int64: item of each row, 0 <= item < V, or `ignore_index`. Any other value is refused
            on a CPU, elsewhere with `JAGGED_VALIDATE=1`; otherwise its row has the loss NaN.
        bias: `[V]`, any of the dtypes above: added to the products.
        ignore_index: rows with this target have the loss 0, the log-sum-exp 0 and no gradient, whatever hidden holds
            there, and are left out of the mean.
        softcap: bound of the logits before the temperature, > 0; None for none.
        temperature: what logits are divided by, > 0.
        normalize: multiply the directions of hidden and weight, rows divided by their L2 norms (at least 1e-12).
        label_smoothing: share of the target's probability that is spread evenly over all items, in [0, 1].
        z_loss: factor of the squared log-sum-exp, >= 0. What it adds to a row's loss is not multiplied by `class_weight`, and
            in the mean is divided, as the rest of the loss, by the sum of the rows' weights; Liger's is by the number of rows.
        class_weight: `[V]` without a gradient: weight of each item's loss, in the mean's divisor too.
        sample_weight: `[N]`: factor of each row's loss, in the mean's divisor too; differentiable.
        reduction: `"mean"` over the rows that are not ignored (0 with zero gradients where there is none, unlike PyTorch's
            NaN), `"sum"` or `"none"`. With weights the mean is the weighted sum by the sum of the rows' weights.
        filter_eps: leave out of the gradients, on Triton, tiles of rows by items where every logit's gradient is below this
            share of the largest row's, weights of rows included; a pair for the gradients of hidden and of weight (with
            bias), None for exact ones. Each left out is an error of at most `filter_eps` times that row's gradient a logit.
            Gradients stay exact where leaving out saves nothing: in chunks, where N * V * D is below 2^39, and where the
            device finds in a sample that too many tiles count. Rare items learn from nothing but small gradients: use it to
            fine-tune, not to train from scratch.
        strategy: `"fused"` backward kernels keep nothing but gradients, `"chunked"` ones a buffer for a chunk of items;
            `"auto"` picks the faster that fits `memory_budget`; `linear_cross_entropy_strategy` says which.
        memory_budget: bytes that chunks may take beside the gradients; with less `"auto"` takes fused kernels. Where weight is a
            table of `JointUpdate`, and larger, no gradient of it is stored: its update computes slices that take so many bytes.
            Where it has to know a norm first, seven eighths of them wait, and what is beyond is computed twice. A bias with a
            gradient keeps the table's whole.
        return_lse: also return the log-sum-exp of each row's logits; it is differentiable.
        return_target_logit: also return the logit of each row's target, 0 in ignored rows; it is differentiable.
        backend: `"torch"`, `"triton"`, or None to choose by device.

    Returns:
        The loss, a scalar or `[N]` for `"none"`, in float32 (float64 for float64); with `return_lse` or `return_target_logit` a
        tuple of it and of these, `[N]` in the same dtype and in this order.

    Raises:
        ValueError: shapes that do not fit, tensors on different devices, numbers out of their range, an unknown reduction,
            strategy or backend, chunks with a filter; on a CPU, elsewhere with `JAGGED_VALIDATE=1`, also a target out of range,
            named by its place.
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
    check_choice("reduction", reduction, ("mean", "sum", "none"))
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
    check_vector("bias", bias, "[V]", weight.shape[0], "item of weight", weight)
    check_vector("class_weight", class_weight, "[V]", weight.shape[0], "item of weight", weight)
    check_vector("sample_weight", sample_weight, "[N]", hidden.shape[0], "row of hidden", hidden)
    for name, tensor in (("weight", weight), ("target", target), ("bias", bias), ("class_weight", class_weight),
                         ("sample_weight", sample_weight)):  # fmt: skip
        if tensor is not None:
            check_device(name, tensor, "hidden", hidden)
    check_number("temperature", temperature, temperature > 0, "a number above 0")
    check_number("softcap", softcap, softcap is None or softcap > 0, "a number above 0, or None")
    check_number("label_smoothing", label_smoothing, 0 <= label_smoothing <= 1, "a number in [0, 1]")
    check_number("z_loss", z_loss, z_loss >= 0, "a number of at least 0")
    pair = filter_eps if isinstance(filter_eps, tuple) else (filter_eps, filter_eps)
    if len(pair) != 2 or not all(eps is None or (isinstance(eps, (int, float)) and eps >= 0) for eps in pair):
        raise ValueError(f"filter_eps: expected a number of at least 0, None, or a tuple of two of those, got {filter_eps!r}")
    if class_weight is not None and class_weight.requires_grad:
        raise ValueError("class_weight: has no gradient, got one that requires it; pass class_weight.detach()")
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy: got {strategy!r}, expected one of {', '.join(map(repr, STRATEGIES))}")
    if strategy == "chunked" and pair != (None, None):
        raise ValueError("strategy: 'chunked' has no filter; use 'fused' or 'auto' with filter_eps")
    if memory_budget < 0:
        raise ValueError(f"memory_budget: expected a number of bytes, got {memory_budget}")
    compute_dtype = compute_dtype_of(hidden, weight)
    if validation_is_on(target):
        validate_ids(target, weight.shape[0], name="target", ignore_index=ignore_index)
    item_scale = None
    if normalize:
        # What ignored rows hold would come back through the norms as NaN.
        hidden = torch.where((target != ignore_index)[:, None], hidden, 0)
        hidden = torch.nn.functional.normalize(hidden.to(compute_dtype), dim=1, eps=NORM_AT_LEAST)
        item_scale = inverse_norms(weight.detach().to(compute_dtype))
    of_target, smoothing = _weights_of_classes(class_weight, target, ignore_index, label_smoothing, weight, compute_dtype)
    # Without a default: Dynamo makes a symbol of one, for the first call alone.
    options = Options(
        float(temperature), None if softcap is None else float(softcap), ignore_index, *pair, strategy, memory_budget
    )
    x = Inputs(hidden, weight, target, bias, item_scale, smoothing)
    if (take := slices_taker(x, options)) is None:
        lse, logit, smoothed = LINEAR_CROSS_ENTROPY(x, options, backend)
    else:
        lse, logit, smoothed = with_slices(x, options, backend, take)
    losses: Tensor = lse
    less: Tensor | None = logit
    if of_target is not None:
        losses, less = (lse - logit) * of_target, None
    if smoothing is not None:
        # In ignored rows each of the three is 0.
        losses = (1 - label_smoothing) * (losses if less is None else losses - less) + smoothing.sum() * lse - smoothed
        less = None
    if z_loss:
        losses = losses + z_loss * lse.square()
    loss = reduced(
        losses, target, ignore_index, reduction, less=less, of_target=of_target, sample_weight=sample_weight, backend=backend
    )
    if return_lse:
        return (loss, lse, logit) if return_target_logit else (loss, lse)
    return (loss, logit) if return_target_logit else loss


def _weights_of_classes(
    class_weight: Tensor | None, target: Tensor, ignore_index: int, label_smoothing: float, weight: Tensor, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """Return the weight of each row's target, 0 in ignored rows, and the share of each item in label smoothing."""
    of_target = smoothing = None
    if class_weight is not None or label_smoothing:
        dtype, num_items = torch.promote_types(dtype, torch.float32), weight.shape[0]
        share = label_smoothing / num_items
        if class_weight is not None:
            class_weight = class_weight.detach().to(dtype)
            of_target = class_weight[target.clamp(0, num_items - 1)].masked_fill(target == ignore_index, 0)
            smoothing = class_weight * share if label_smoothing else None
        else:
            smoothing = torch.full((num_items,), share, dtype=dtype, device=weight.device)
    return of_target, smoothing
