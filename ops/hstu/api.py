"""The public functions of an HSTU block around its attention."""

from __future__ import annotations

import torch
from torch import Tensor

from jagged.ops._shared.eager import is_eager
from jagged.ops._shared.validation import FLOATS, check_device, check_factors, check_number, check_tensor, holds
from jagged.ops.hstu import torch_impl
from jagged.ops.hstu.spec import OUTPUT, PROJECTION, Inputs, Options, OutputInputs, OutputOptions


def hstu_projection(
    x: Tensor, weight: Tensor, bias: Tensor, num_heads: int, *, recompute: bool = False, backend: str | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gates, values, queries and keys of an HSTU block: `silu(x @ weight.T + bias)`, in four parts.

    On a GPU, in 16 bits, product, bias and SiLU are one kernel, which writes each part by itself, and the way back through SiLU
    is one pass, which adds up the gradient of the bias. float32, float64, rows on a CPU, and programs that are traced,
    transformed, compiled or exported have PyTorch's product and SiLU.

    Args:
        x: rows `[N, D]`, float32, bfloat16, float16 or float64; normalised, as a rule.
        weight: `[4 * H * d, D]`, whose rows are those of gates, values, queries and keys, in this order, head by head.
        bias: `[4 * H * d]`. All of one dtype; under `torch.autocast` of any, and product and results in autocast's.
        num_heads: H.
        recompute: compute the product again in backward, in place of keeping `[N, 4 * H * d]` for it.
        backend: `"torch"`, `"triton"`, or None to choose as above.

    Returns:
        u, v, q, k, `[N, H, d]` each. Gradients of x, weight and bias; an operator's backend has no second ones.

    Raises:
        ValueError: shapes or devices that do not fit, a number of heads that does not divide the weight's rows by four times
            itself, a backend that cannot serve these.
        TypeError: dtypes other than those above, or that differ.

    Source:
        Zhai et al., Actions Speak Louder than Words, ICML 2024, equation 1; its published implementation has this order of parts.

    Example:
        >>> import torch
        >>> from jagged.ops import hstu_projection
        >>> u, v, q, k = hstu_projection(torch.randn(5, 8), torch.randn(24, 8), torch.zeros(24), num_heads=2)
        >>> q.shape
        torch.Size([5, 2, 3])
    """
    check_tensor("x", x, "[N, D]", FLOATS)
    check_tensor("weight", weight, "[4 * H * d, D]", FLOATS)
    _check_width("weight", weight, 1, x.shape[1], f"as x {list(x.shape)} has columns")
    check_factors("weight", weight, "x", x)
    check_number("num_heads", num_heads, num_heads >= 1, "1 or more")
    if weight.shape[0] % (4 * num_heads) or not weight.shape[0]:
        raise ValueError(
            f"weight: expected rows in a multiple of 4 * num_heads = {4 * num_heads}, got {list(weight.shape)}; they are gates, "
            "values, queries and keys of each head"
        )
    check_tensor("bias", bias, "[4 * H * d]", FLOATS)
    _check_width("bias", bias, 0, weight.shape[0], f"as weight {list(weight.shape)} has rows")
    check_factors("bias", bias, "x", x)
    if backend is None and not _is_fused(x):
        projected = torch.nn.functional.silu(torch.nn.functional.linear(x, weight, bias))
        u, v, q, k = projected.unflatten(1, (4, num_heads, -1)).unbind(1)
        return u, v, q, k
    # Where nobody will ask for gradients nothing is kept for them.
    is_kept = not recompute and torch.is_grad_enabled() and any(of.requires_grad for of in (x, weight, bias))
    found = PROJECTION(Inputs(x, weight, bias), Options(num_heads, not is_kept), backend)
    return found.u, found.v, found.q, found.k


def hstu_output(
    attended: Tensor,
    gate: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    *,
    eps: float = 1e-6,
    num_groups: int = 1,
    centred: bool = True,
    concat: bool = False,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """The output of an HSTU block: `residual + dropout(norm(attended) * gate) @ weight.T + bias`.

    On a GPU norm, gate and dropout are one pass over the rows, and in 16 bits the product, its bias and the sum are one kernel.
    What the product reads is not kept for backward, where one pass makes it again beside the gradients of gate and norm. Rows on
    a CPU, and programs that are traced, transformed, compiled or exported, have PyTorch's operations.

    Args:
        attended: `[N, H, d]` or `[N, W]`, float32, bfloat16, float16 or float64.
        gate: of the same shape.
        residual: rows `[N, D]` that are added, of any of these dtypes.
        norm_weight: `[W]`, of the dtype of `attended` or float32.
        norm_bias: `[W]`, of the dtype of `norm_weight`, or None.
        weight: `[D, W]`, with `concat` `[D, 3 * W]`.
        bias: `[D]`. attended, gate, weight and bias have one dtype; under `torch.autocast` any, and the product autocast's.
        eps: added to the mean of squares, above 0.
        num_groups: groups of W / num_groups columns that are normalised by themselves, as `torch.nn.GroupNorm` does; 1 for all.
        centred: take the mean off first, as layer norm and group norm do; False is RMSNorm.
        concat: the product reads `[gate, attended, norm(attended) * gate]`.
        dropout_p: probability with which a number that the product reads is set to 0; others grow by `1 / (1 - dropout_p)`.
        dropout_seed: int64, one element: the same seed drops the same, on every backend. None draws one from torch's generator.
        backend: `"torch"`, `"triton"`, or None to choose as above.

    Returns:
        `[N, D]` in the dtype that PyTorch's sum of residual and product has. Gradients of all tensors; an operator's backend has
        no second ones.

    Raises:
        ValueError: shapes or devices that do not fit, numbers out of range, a backend that cannot serve these.
        TypeError: dtypes other than those above, or that differ.

    Source:
        Zhai et al., Actions Speak Louder than Words, ICML 2024, equation 3; `concat` and group norm: its code.
        RMSNorm: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.

    Example:
        >>> import torch
        >>> from jagged.ops import hstu_output
        >>> attended, gate, x = torch.randn(5, 2, 3), torch.randn(5, 2, 3), torch.randn(5, 8)
        >>> hstu_output(attended, gate, x, torch.ones(6), torch.zeros(6), torch.randn(8, 6), torch.zeros(8)).shape
        torch.Size([5, 8])
    """
    if isinstance(attended, Tensor) and isinstance(gate, Tensor) and attended.dim() == gate.dim() == 3:
        attended, gate = attended.flatten(1), gate.flatten(1)
    check_tensor("attended", attended, "[N, W]", FLOATS)
    check_tensor("gate", gate, "[N, W]", FLOATS)
    check_tensor("residual", residual, "[N, D]", FLOATS)
    check_tensor("weight", weight, "[D, 3 * W]" if concat else "[D, W]", FLOATS)
    check_tensor("bias", bias, "[D]", FLOATS)
    total, width = attended.shape
    if not (holds(gate.shape[0] == total) and holds(gate.shape[1] == width)):
        raise ValueError(f"gate: expected the shape of attended, {list(attended.shape)}, got {list(gate.shape)}")
    if not holds(residual.shape[0] == total):
        raise ValueError(f"residual: expected {total} rows, as attended {list(attended.shape)} has, got {list(residual.shape)}")
    columns = 3 * width if concat else width
    if not (holds(weight.shape[0] == residual.shape[1]) and holds(weight.shape[1] == columns)):
        raise ValueError(
            f"weight: expected shape [{residual.shape[1]}, {columns}], from attended {list(attended.shape)}"
            f"{' three times' if concat else ''} to residual {list(residual.shape)}, got {list(weight.shape)}"
        )
    _check_width("bias", bias, 0, residual.shape[1], f"as residual {list(residual.shape)} has columns")
    for name, tensor in {"gate": gate, "weight": weight, "bias": bias}.items():
        check_factors(name, tensor, "attended", attended)
    check_device("residual", residual, "attended", attended)
    for name, of in {"norm_weight": norm_weight, **({} if norm_bias is None else {"norm_bias": norm_bias})}.items():
        check_tensor(name, of, "[W]", FLOATS)
        _check_width(name, of, 0, width, f"as attended {list(attended.shape)} has columns")
        check_device(name, of, "attended", attended)
        if of.dtype not in (attended.dtype, torch.float32) or (of.dtype != attended.dtype and attended.dtype == torch.float64):
            raise TypeError(f"{name}: got {of.dtype}, expected {attended.dtype}, as attended has it, or torch.float32")
    if norm_bias is not None and norm_bias.dtype != norm_weight.dtype:
        raise TypeError(f"norm_bias: got {norm_bias.dtype}, expected {norm_weight.dtype}, as norm_weight has it")
    check_number("eps", eps, eps > 0, "above 0")
    check_number("num_groups", num_groups, num_groups >= 1 and width % num_groups == 0, f"a divisor of the {width} columns")
    check_number("dropout_p", dropout_p, 0 <= dropout_p < 1, "at least 0 and below 1")
    if not dropout_p:
        dropout_seed = None
    elif dropout_seed is None:
        dropout_seed = torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=attended.device)
    else:
        check_tensor("dropout_seed", dropout_seed, "[*]", (torch.int64,))
        if dropout_seed.numel() != 1:
            raise ValueError(f"dropout_seed: expected one number, got shape {list(dropout_seed.shape)}")
        check_device("dropout_seed", dropout_seed, "attended", attended)
    o = OutputOptions(eps, num_groups, centred, concat, dropout_p)
    if backend is None and not _is_fused(attended):
        rows = torch_impl.gated(attended, gate, norm_weight, norm_bias, dropout_seed, o)
        return residual + torch.nn.functional.linear(rows, weight, bias)
    return OUTPUT(OutputInputs(attended, gate, residual, norm_weight, norm_bias, weight, bias, dropout_seed), o, backend).output


def _check_width(name: str, tensor: Tensor, dim: int, width: int, why: str) -> None:
    if not holds(tensor.shape[dim] == width):
        expected = [*tensor.shape[:dim], width, *tensor.shape[dim + 1 :]]
        raise ValueError(f"{name}: expected shape {expected}, {why}, got {list(tensor.shape)}")


def _is_fused(x: Tensor) -> bool:
    """Whether the kernels serve an eager call on a GPU; a compiler fuses by itself, and modes and tracers know PyTorch's."""
    return x.is_cuda and x.dtype != torch.float64 and is_eager()
