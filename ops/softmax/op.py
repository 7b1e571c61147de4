"""Public softmaxes, their gradients and their operators. Gradients of any order are right."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jagged.ops._shared.autograd import apply_in_backward
from jagged.ops._shared.offsets import pair_offsets as offsets_of_pairs
from jagged.ops._shared.registration import define_operator, resolve_backend
from jagged.ops._shared.validation import FLOATS, check_offsets, check_same, check_tensor, validation_is_on
from jagged.ops.softmax import torch_impl

_forward = define_operator(
    "jagged_softmax_forward",
    "(Tensor values, Tensor offsets, str backend) -> Tensor",
    torch_impl=torch_impl.jagged_softmax_forward,
    triton_impl="jagged.ops.softmax.kernels:jagged_softmax_forward",
    fake=lambda values, offsets, backend: values.new_empty(values.shape),
)
_backward = define_operator(
    "jagged_softmax_backward",
    "(Tensor grad, Tensor weights, Tensor offsets, str backend) -> Tensor",
    torch_impl=torch_impl.jagged_softmax_backward,
    triton_impl="jagged.ops.softmax.kernels:jagged_softmax_backward",
    fake=lambda grad, weights, offsets, backend: weights.new_empty(weights.shape),
)
_forward2 = define_operator(
    "jagged2_softmax_forward",
    "(Tensor scores, Tensor a_offsets, Tensor? b_offsets, Tensor? pair_offsets, bool by_columns, str backend) -> Tensor",
    torch_impl=torch_impl.jagged2_softmax_forward,
    triton_impl="jagged.ops.softmax.pair_kernels:jagged2_softmax_forward",
    fake=lambda scores, a_offsets, b_offsets, pair_offsets, by_columns, backend: scores.new_empty(scores.shape),
)
_backward2 = define_operator(
    "jagged2_softmax_backward",
    "(Tensor grad, Tensor weights, Tensor a_offsets, Tensor? b_offsets, Tensor? pair_offsets, bool by_columns, str backend) "
    "-> Tensor",
    torch_impl=torch_impl.jagged2_softmax_backward,
    triton_impl="jagged.ops.softmax.pair_kernels:jagged2_softmax_backward",
    fake=lambda grad, weights, a_offsets, b_offsets, pair_offsets, by_columns, backend: weights.new_empty(weights.shape),
)


class SoftmaxFunction(torch.autograd.Function):
    """Softmax of values; `layout` is what the operator of either function takes after them, three offsets for blocks.

    Torch's compiler takes a forward with as many parameters as there are arguments after the context for one without a context,
    so the arguments come as one tuple.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        values, *layout = arguments
        weights: Tensor = _forward(values, *layout) if len(layout) == 2 else _forward2(values, *layout)
        offsets, ctx.options = _parts(layout)
        ctx.save_for_backward(weights, *offsets)
        return weights

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weights, *offsets = ctx.saved_tensors
        layout = *offsets, *ctx.options
        return apply_in_backward(SoftmaxBackwardFunction, grad, weights, *layout), *(None for _ in layout)


class SoftmaxBackwardFunction(torch.autograd.Function):
    """The gradient of `SoftmaxFunction`, `weights * (grad - sum(weights * grad))`, itself differentiable.

    It is symmetric in the gradient, so its own gradient there is the same function again.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        grad, weights, *layout = arguments
        offsets, ctx.options = _parts(layout)
        ctx.save_for_backward(grad, weights, *offsets)
        result: Tensor = _backward(grad, weights, *layout) if len(layout) == 2 else _backward2(grad, weights, *layout)
        return result

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        grad, weights, *offsets = ctx.saved_tensors
        layout = *offsets, *ctx.options

        def sums(x: Tensor) -> Tensor:
            # Weights of 1 leave the sum of each vector taken from its elements.
            return x - SoftmaxBackwardFunction.apply(x, torch.ones_like(weights), *layout)

        of_grad = of_weights = None
        if ctx.needs_input_grad[0]:
            of_grad = SoftmaxBackwardFunction.apply(upstream, weights, *layout)
        if ctx.needs_input_grad[1]:
            of_weights = upstream * (grad - sums(weights * grad)) - grad * sums(weights * upstream)
        return of_grad, of_weights, *(None for _ in layout)


def _parts(layout: list[Any]) -> tuple[list[Any], list[Any]]:
    """Split a layout into offsets, which may be None, and options."""
    count = 1 if len(layout) == 2 else 3
    return layout[:count], layout[count:]


def jagged_softmax(values: Tensor, offsets: Tensor, *, backend: str | None = None) -> Tensor:
    """Softmax over each sample's rows: every column of a sample sums to 1.

    Computed in float32 (float64 for float64) whatever the dtype of the values; scores of any finite size are right. A column of
    -inf alone gives NaN, as `torch.softmax` does, and leaves the others as they are. Empty samples have nothing to normalise.
    Deterministic; gradients of any order.

    Args:
        values: `[S, T]`, float32, bfloat16, float16, or float64 (computed by PyTorch on every device); any strides.
        offsets: `[B + 1]`, int32 or int64, from 0 to S.
        backend: `"torch"`, `"triton"`, or None to choose by device.

    Returns:
        `[S, T]` in the dtype of `values`.

    Raises:
        ValueError: wrong shapes or devices; with `JAGGED_VALIDATE=1` also offsets with wrong values.
        TypeError: dtypes other than those above.

    Source:
        Xu et al., "Jagged Flash Attention Optimization", 2024, table 1.

    Example:
        >>> import torch
        >>> from jagged.ops import jagged_softmax
        >>> jagged_softmax(torch.tensor([[0.0], [0.0], [5.0]]), torch.tensor([0, 2, 3]))
        tensor([[0.5000],
                [0.5000],
                [1.0000]])
    """
    check_tensor("values", values, "[S, T]", FLOATS)
    check_offsets(offsets, values, total=values.shape[0])
    return SoftmaxFunction.apply(values, offsets, resolve_backend(backend, values))


def jagged2_softmax(
    scores: Tensor,
    a_offsets: Tensor,
    b_offsets: Tensor | None = None,
    dim: int = -1,
    *,
    pair_offsets: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Softmax over the rows or the columns of each sample's block of scores.

    Sample b has a block `La_b x Lb_b`, stored row by row from `pair_offsets(a_offsets, b_offsets)[b]` on, as
    `jagged_jagged_bmm_jagged_out` gives it. Computed in float32 (float64 for float64) whatever the dtype of the scores; scores of
    any finite size are right. A row (column) of -inf alone gives NaN, as `torch.softmax` does, and leaves the others as they are.
    Deterministic; gradients of any order.

    Args:
        scores: `[P]`, with `P = sum La_i * Lb_i`; float32, bfloat16, float16, or float64 (computed by PyTorch on every device);
            any stride.
        a_offsets: `[B + 1]`, int32 or int64: the blocks' rows, fewer than 2^31 in each.
        b_offsets: `[B + 1]`, of the same dtype: their columns, fewer than 2^31 in each; None for square blocks of `a_offsets`.
        dim: -1 makes every row of a block sum to 1, -2 every column.
        pair_offsets: `[B + 1]`, int32 or int64: what `pair_offsets(a_offsets, b_offsets)` gives, from callers who have it.
            Without it, it is computed on the way; above 2,048 samples by one small launch.
        backend: `"torch"`, `"triton"`, or None to choose by device.

    Returns:
        `[P]` in the dtype of `scores`.

    Raises:
        ValueError: wrong shapes or devices, another dim; with `JAGGED_VALIDATE=1` also offsets with wrong values.
        TypeError: dtypes other than those above, or offsets of different dtypes.

    Source:
        Xu et al., "Jagged Flash Attention Optimization", 2024, table 1.

    Example:
        >>> import torch
        >>> from jagged.ops import jagged2_softmax
        >>> jagged2_softmax(torch.tensor([1.0, 1.0, 3.0, 3.0, 9.0]), torch.tensor([0, 2, 3]))
        tensor([0.5000, 0.5000, 0.5000, 0.5000, 1.0000])
    """
    check_tensor("scores", scores, "[P]", FLOATS)
    check_offsets(a_offsets, scores, "a_offsets")
    if b_offsets is a_offsets:
        # The compiler refuses a function that is given one tensor twice.
        b_offsets = None
    if b_offsets is not None:
        check_offsets(b_offsets, scores, "b_offsets")
        check_same("b_offsets", b_offsets, "a_offsets", a_offsets)
    for name, offsets in (("b_offsets", b_offsets), ("pair_offsets", pair_offsets)):
        if offsets is not None and offsets.shape != a_offsets.shape:
            raise ValueError(f"{name}: expected {list(a_offsets.shape)} as a_offsets, got {list(offsets.shape)}")
    if pair_offsets is not None:
        check_offsets(pair_offsets, scores, "pair_offsets", total=scores.shape[0])
    if dim not in (-1, -2):
        raise ValueError(f"dim: expected -1 for the blocks' rows or -2 for their columns, got {dim}")
    if validation_is_on():
        _validate_pairs(offsets_of_pairs(a_offsets, b_offsets), pair_offsets, scores.shape[0])
    return SoftmaxFunction.apply(scores, a_offsets, b_offsets, pair_offsets, dim == -2, resolve_backend(backend, scores))


def _validate_pairs(expected: Tensor, given: Tensor | None, total: int) -> None:
    """Check that blocks fill the scores and that pair offsets, if they are given, belong to them."""
    if int(expected[-1]) != total:
        raise ValueError(
            f"scores: expected {int(expected[-1])}, the pairs that a_offsets and b_offsets describe, got {total}; "
            "blocks lie one behind the other, row by row"
        )
    if given is not None and (places := torch.nonzero(given != expected)).numel():
        place = int(places[0])
        raise ValueError(
            f"pair_offsets[{place}]: expected {int(expected[place])}, got {int(given[place])}; "
            "compute it by pair_offsets(a_offsets, b_offsets)"
        )
