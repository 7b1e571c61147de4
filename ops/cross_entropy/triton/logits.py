"""What the kernels of linear cross-entropy share: tiles of logits, and their gradients.

A tile is rows by items also where a program owns the items and its product is transposed: numbers of rows then stand along the
axis of which a thread has few places. The other way each thread loads those of sixteen rows, one by one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from jagged.ops._shared.device import exp_of_difference

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def capped(logits, softcap):
    """softcap * tanh(logits / softcap), by an exponential that cannot overflow."""
    size = tl.exp2(tl.abs(logits) * (-2 * LOG2_E / softcap))
    tanh = (1 - size) / (1 + size)
    return tl.where(logits < 0, -softcap * tanh, softcap * tanh)


@triton.jit
def logits_of_products(products, item, item_exists, bias, item_scale, softcap, ITEM_AXIS: tl.constexpr):
    """softcap(product * item_scale + bias), each where it is given. The temperature is left to what follows."""
    if item_scale is not None:
        products *= tl.expand_dims(tl.load(item_scale + item, mask=item_exists, other=0.0), 1 - ITEM_AXIS)
    if bias is not None:
        products += tl.expand_dims(tl.load(bias + item, mask=item_exists, other=0.0).to(tl.float32), 1 - ITEM_AXIS)
    if softcap is not None:
        products = capped(products, softcap)
    return products


@triton.jit
def exponentials(logits, shift, inverse_temperature, ACCURATE: tl.constexpr):
    """e to the power of logits / temperature - shift; `shift` in powers of two unless `ACCURATE`.

    Otherwise the product with log2(e) and the difference become one fma: its product is exact, and the rounding of the shift,
    which is the same for a whole row, cancels against that in the row's log-sum-exp.
    """
    if ACCURATE:
        return exp_of_difference(logits * inverse_temperature - shift, True)
    return tl.exp2(logits * (inverse_temperature * LOG2_E) - shift)


@triton.jit
def load_rows(target, shift, grad_softmax, grad_target, row, num_rows):
    """Target, shift of `exponentials` and gradients of a block of rows, as `prepare_rows` leaves them."""
    exists = row < num_rows
    return (
        tl.load(target + row, mask=exists, other=-1),
        tl.load(shift + row, mask=exists, other=float("inf")),
        tl.load(grad_softmax + row, mask=exists, other=0.0),
        tl.load(grad_target + row, mask=exists, other=0.0),
    )


@triton.jit
def logit_gradients(
    logits, item, item_exists, row, row_exists, row_target, shift, of_softmax, of_target, grad_smoothed, smoothing, softcap,
    inverse_temperature, ACCURATE: tl.constexpr,
):  # fmt: skip
    """Gradient of the loss by each product of a row and an item, before its scale, `[rows, items]`.

    softmax * of_softmax + [item is target] * of_target + smoothing * grad_smoothed, times the slope of softcap.
    """
    gradients = exponentials(logits, shift[:, None], inverse_temperature, ACCURATE)
    gradients *= of_softmax[:, None]
    # Before the rounding to the weights' dtype, where the sum is small for a target that is well predicted.
    is_target = row_target[:, None] == item[None, :]
    gradients = tl.where(is_target, gradients + of_target[:, None], gradients)
    if smoothing is not None:
        share = tl.load(smoothing + item, mask=item_exists, other=0.0)
        of_row = tl.load(grad_smoothed + row, mask=row_exists, other=0.0)
        gradients += share[None, :] * of_row[:, None]
    if softcap is not None:
        gradients *= 1 - (logits / softcap) * (logits / softcap)
    return gradients
