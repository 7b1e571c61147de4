"""Products over the pairs of rows of each sample, their gradients and their operators. Gradients of any order are right."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jagged.ops._shared.autograd import apply_in_backward
from jagged.ops._shared.offsets import scan_pairs
from jagged.ops._shared.registration import define_operator, resolve_backend
from jagged.ops._shared.validation import FLOATS, check_offsets, check_same, check_tensor, holds, resolve_total, validation_is_on
from jagged.ops.bmm import pair_torch_impl

_pair_scores = define_operator(
    "pair_scores",
    "(Tensor a, Tensor b, Tensor a_offsets, Tensor b_offsets, SymInt num_pairs, str backend) -> Tensor",
    torch_impl=pair_torch_impl.pair_scores,
    triton_impl="jagged.ops.bmm.pair_kernels:pair_scores",
    fake=lambda a, b, a_offsets, b_offsets, num_pairs, backend: a.new_empty(num_pairs),
)
_pair_sums = define_operator(
    "pair_sums",
    "(Tensor scores, Tensor values, Tensor a_offsets, Tensor b_offsets, SymInt output_total, bool transposed, str backend) "
    "-> Tensor",
    torch_impl=pair_torch_impl.pair_sums,
    triton_impl="jagged.ops.bmm.pair_kernels:pair_sums",
    fake=lambda scores, values, a_offsets, b_offsets, output_total, transposed, backend: values.new_empty(
        output_total, values.shape[1]
    ),
)


class PairScoresFunction(torch.autograd.Function):
    """`scores = a b^T` of each sample; with their gradient G, that of a is `G b` and that of b is `G^T a`."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, a_offsets: Tensor, b_offsets: Tensor, num_pairs: int, backend: str) -> Tensor:
        ctx.save_for_backward(a, b, a_offsets, b_offsets)
        ctx.backend = backend
        return _pair_scores(a, b, a_offsets, b_offsets, num_pairs, backend)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b, *offsets = ctx.saved_tensors
        grad_a = grad_b = None
        if ctx.needs_input_grad[0]:
            grad_a = apply_in_backward(PairSumsFunction, grad, b, *offsets, a.shape[0], False, ctx.backend)
        if ctx.needs_input_grad[1]:
            grad_b = apply_in_backward(PairSumsFunction, grad, a, *offsets, b.shape[0], True, ctx.backend)
        return grad_a, grad_b, None, None, None, None


class PairSumsFunction(torch.autograd.Function):
    """`output = scores values` of each sample, or `scores^T values`; gradients are scores of pairs, and sums the other way."""

    @staticmethod
    def forward(
        ctx: Any,
        scores: Tensor,
        values: Tensor,
        a_offsets: Tensor,
        b_offsets: Tensor,
        output_total: int,
        transposed: bool,
        backend: str,
    ) -> Tensor:
        ctx.save_for_backward(scores, values, a_offsets, b_offsets)
        ctx.transposed, ctx.backend = transposed, backend
        return _pair_sums(scores, values, a_offsets, b_offsets, output_total, transposed, backend)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        scores, values, *offsets = ctx.saved_tensors
        grad_scores = grad_values = None
        if ctx.needs_input_grad[0]:
            a, b = (values, grad) if ctx.transposed else (grad, values)
            grad_scores = apply_in_backward(PairScoresFunction, a, b, *offsets, scores.shape[0], ctx.backend)
        if ctx.needs_input_grad[1]:
            grad_values = apply_in_backward(
                PairSumsFunction, scores, grad, *offsets, values.shape[0], not ctx.transposed, ctx.backend
            )
        return grad_scores, grad_values, None, None, None, None, None


def jagged_jagged_bmm_jagged_out(
    a: Tensor,
    b: Tensor,
    a_offsets: Tensor,
    b_offsets: Tensor | None = None,
    total: int | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    """Multiply each sample's rows of `a` with its rows of `b`: the scores of all pairs inside a sample, and of no others.

    Sample i has a block of `La_i x Lb_i` scores, stored row by row from `pair_offsets(a_offsets, b_offsets)[i]` on. Products are
    accumulated in float32 (float64 for float64). Under `torch.autocast` inputs are cast to its dtype. Gradients of any order.

    Args:
        a: `[Sa, D]`, float32, bfloat16, float16 or float64 (computed by PyTorch on every device).
        b: `[Sb, D]`, of the dtype and device of `a`.
        a_offsets: `[B + 1]`, int32 or int64, from 0 to Sa.
        b_offsets: `[B + 1]`, of the dtype of `a_offsets`, from 0 to Sb; None for those of `a`.
        total: number of pairs, `sum La_i * Lb_i`; None reads it from the offsets, which synchronises once with the device. Where
            it is more, as for a CUDA graph whose lengths change, the scores past the last block are left unwritten.
        backend: `"torch"`, `"triton"`, or None to choose by device. The PyTorch implementation reads the lengths on the host.

    Returns:
        `[total]`, in the dtype of the inputs.

    Raises:
        ValueError: shapes or devices that do not fit; no `total` in a compiled or captured call; with `JAGGED_VALIDATE=1` also
            offsets or a total with wrong values.
        TypeError: dtypes that are not supported, or that differ.

    Source:
        Jagged Flash Attention (Xu et al., RecSys 2024), table 1.

    Example:
        >>> import torch
        >>> from jagged.ops import jagged_jagged_bmm_jagged_out
        >>> a, b = torch.tensor([[1.], [2.], [3.]]), torch.tensor([[1.], [10.], [100.]])
        >>> jagged_jagged_bmm_jagged_out(a, b, torch.tensor([0, 2, 3]), torch.tensor([0, 1, 3]))
        tensor([  1.,   2.,  30., 300.])
    """
    check_tensor("a", a, "[Sa, D]", FLOATS)
    check_tensor("b", b, "[Sb, D]", FLOATS)
    a, b = _autocast(a, b)
    check_same("b", b, "a", a)
    if not holds(a.shape[1] == b.shape[1]):
        raise ValueError(f"b: expected shape [Sb, {a.shape[1]}], as wide as a {list(a.shape)}, got {list(b.shape)}")
    b_offsets = _check_pair_offsets(a_offsets, b_offsets, b, a.shape[0])
    if b_offsets is a_offsets and not holds(a.shape[0] == b.shape[0]):
        raise ValueError(f"b: expected {a.shape[0]} rows as a has, got {b.shape[0]}; give b_offsets where lengths differ")
    backend = resolve_backend(backend, a)
    if total is None or validation_is_on(a_offsets):
        pair_offsets = scan_pairs(a_offsets, b_offsets, backend)
        if validation_is_on(a_offsets):
            _validate_pairs("total", total, pair_offsets)
        total = resolve_total(total, pair_offsets)
    return PairScoresFunction.apply(a, b, a_offsets, b_offsets, total, backend)


def array_jagged_bmm_jagged_out(
    scores: Tensor,
    b: Tensor,
    a_offsets: Tensor,
    b_offsets: Tensor | None = None,
    a_total: int | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    """Add up each sample's rows of `b`, weighted by its block of scores: `[La_i, Lb_i] x [Lb_i, D] -> [La_i, D]`.

    The blocks lie as `jagged_jagged_bmm_jagged_out` stores them. Sums are accumulated in float32 (float64 for float64); one
    without terms is 0. Under `torch.autocast` both inputs are cast to its dtype. Gradients of any order.

    Args:
        scores: `[sum La_i * Lb_i]`, float32, bfloat16, float16 or float64 (computed by PyTorch on every device). More of them, as
            for a CUDA graph whose lengths change, are never read, and their gradients are left unwritten.
        b: `[Sb, D]`, of the dtype and device of `scores`.
        a_offsets: `[B + 1]`, int32 or int64, from 0 to Sa: the blocks' rows.
        b_offsets: `[B + 1]`, of the dtype of `a_offsets`, from 0 to Sb: their columns; None for square blocks.
        a_total: Sa, the last of `a_offsets`. Without `b_offsets` it is Sb; otherwise None reads it from the offsets, which
            synchronises once with the device.
        backend: `"torch"`, `"triton"`, or None to choose by device. The PyTorch implementation reads the lengths on the host.

    Returns:
        `[Sa, D]`, in the dtype of the inputs.

    Raises:
        ValueError: shapes or devices that do not fit; `b_offsets` without `a_total` in a compiled or captured call; with
            `JAGGED_VALIDATE=1` also offsets with wrong values, or scores of another number than they say.
        TypeError: dtypes that are not supported, or that differ.

    Source:
        Jagged Flash Attention (Xu et al., RecSys 2024), table 1.

    Example:
        >>> import torch
        >>> from jagged.ops import array_jagged_bmm_jagged_out
        >>> scores, b = torch.tensor([1., 2., 30., 300.]), torch.tensor([[1.], [10.], [100.]])
        >>> array_jagged_bmm_jagged_out(scores, b, torch.tensor([0, 2, 3]), torch.tensor([0, 1, 3]), a_total=3)
        tensor([[1.0000e+00],
                [2.0000e+00],
                [3.0300e+04]])
    """
    check_tensor("scores", scores, "[N]", FLOATS)
    check_tensor("b", b, "[Sb, D]", FLOATS)
    scores, b = _autocast(scores, b)
    check_same("b", b, "scores", scores)
    if b_offsets is None:
        if a_total is not None and not holds(a_total == b.shape[0]):
            raise ValueError(f"a_total: expected {b.shape[0]}, the rows of b, got {a_total}; give b_offsets where lengths differ")
        a_total = b.shape[0]
    b_offsets = _check_pair_offsets(a_offsets, b_offsets, b, a_total)
    backend = resolve_backend(backend, b)
    if validation_is_on(a_offsets):
        _validate_pairs("scores", scores.shape[0], scan_pairs(a_offsets, b_offsets, backend))
    a_total = resolve_total(a_total, a_offsets, "a_total")
    return PairSumsFunction.apply(scores, b, a_offsets, b_offsets, a_total, False, backend)


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    device = tensors[0].device.type
    # Autocast knows no meta device, and leaves float64 as it is in PyTorch's own products too.
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def _check_pair_offsets(a_offsets: Tensor, b_offsets: Tensor | None, b: Tensor, a_total: int | None) -> Tensor:
    check_offsets(a_offsets, b, "a_offsets", total=a_total)
    if b_offsets is None:
        return a_offsets
    check_offsets(b_offsets, b, "b_offsets", total=b.shape[0])
    check_same("b_offsets", b_offsets, "a_offsets", a_offsets)
    if not holds(b_offsets.shape[0] == a_offsets.shape[0]):
        raise ValueError(f"b_offsets: expected {list(a_offsets.shape)} as a_offsets, got {list(b_offsets.shape)}")
    return b_offsets


def _validate_pairs(name: str, given: int | None, pair_offsets: Tensor) -> None:
    pairs = int(pair_offsets[-1])
    if given is not None and given < pairs:
        raise ValueError(f"{name}: expected {pairs}, the number of pairs that the offsets say, got {given}")
