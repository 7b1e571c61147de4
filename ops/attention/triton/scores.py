"""Scores of a tile of queries and keys, and the weights that they become: by softmax or SiLU, and by dropout."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from jagged.ops._shared.device import INTERPRETED, dot, exp_of_difference
from jagged.ops.attention.triton.biases import HAS_PTX, HIDDEN, biases_of, common_bias, less_common
from jagged.ops.attention.triton.masks import masked

# For exponentials to base 2, and back.
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


class Dropout(NamedTuple):
    """A weight is left where its number reaches `threshold`, and then multiplied by `kept_scale`; none without a `seed`."""

    seed: Any
    threshold: Any
    kept_scale: Any


class Rules(NamedTuple):
    """What makes weights of products: `Sight`, `Biases` and their `BiasNumbers`, `Dropout`.

    Scores with a cap are `cap * tanh(products * cap_factor)`, before biases, with a `cap_factor` of scale / cap.
    """

    sight: Any
    biases: Any
    numbers: Any
    dropout: Any
    cap_factor: Any


@triton.jit
def in_score_units(number, ACCURATE: tl.constexpr):
    """Scores of 16-bit inputs are held times log2(e), so that exp2 needs no product; float32 keeps natural units."""
    return number if ACCURATE else number * LOG2_E


@triton.jit
def score_factor(scale, IS_POINTWISE: tl.constexpr, ACCURATE: tl.constexpr):
    """Return what products are multiplied by to be scores in their units, which before SiLU are halves."""
    return scale * 0.5 if IS_POINTWISE else in_score_units(scale, ACCURATE)


@triton.jit
def tile_products(
    left, right, rows, keys, first_query, first_key, factor, sample, rules,
    IS_EDGE: tl.constexpr, IS_CAUSAL: tl.constexpr, IS_POINTWISE: tl.constexpr, INPUT_PRECISION: tl.constexpr,
):  # fmt: skip
    """Return `left @ right^T` of queries and keys, whichever is which, and biases over the scale but for the `tile_bias`.

    Before SiLU these are whole scores in their units. The second result is for `less_capped`.
    """
    bias = biases_of(rows, keys, first_query, first_key, sample, rules, not IS_EDGE)
    if rules.cap_factor is None:
        products = dot(left, tl.trans(right), bias, INPUT_PRECISION)
        capped = products
    else:
        capped = tanh(dot(left, tl.trans(right), None, INPUT_PRECISION) * rules.cap_factor)
        products = capped / rules.cap_factor
        if bias is not None:
            products += bias
    if IS_POINTWISE:
        products = less_common(products * factor, tile_bias(rows, keys, first_query, first_key, sample, rules), -factor)
        if bias is not None:
            # A bias that is minus infinity, or becomes it where it is divided by the scale.
            products = tl.maximum(products, HIDDEN)
    if IS_EDGE:
        products = masked(products, rows, keys, sample, rules.sight, IS_CAUSAL, HIDDEN if IS_POINTWISE else float("-inf"))
    return products, capped


@triton.jit
def tanh(x):
    """Hyperbolic tangent, by an exponential that cannot overflow; near 0, where that would cancel, by its series."""
    size = tl.exp2(tl.abs(x) * (-2.0 * LOG2_E))
    far = (1.0 - size) / (1.0 + size)
    square = x * x
    near = x * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    return tl.where(square < 0.01, near, tl.where(x < 0.0, -far, far))


@triton.jit
def less_capped(grad_scores, capped, rules):
    """Return gradients of products from those of scores: a cap lets through less the nearer it is."""
    if rules.cap_factor is not None:
        grad_scores *= 1.0 - capped * capped
    return grad_scores


@triton.jit
def tile_bias(rows, keys, first_query, first_key, sample, rules):
    """Return the `common_bias` of a tile."""
    return common_bias(
        first_query, first_key, sample, rules, rows.shape[0] * rows.shape[1], keys.shape[0] * keys.shape[1]
    )  # fmt: skip


@triton.jit
def softmax_weights(products, largest, factor, ACCURATE: tl.constexpr):
    """e to the power of `products * factor - largest`, scores in their units."""
    difference = products * factor - largest
    return exp_of_difference(difference, True) if ACCURATE else tl.exp2(difference)


@triton.jit
def weights_and_slopes(products, row_lse, common, factor, ACCURATE: tl.constexpr):
    """Weights of a tile of scores, and what a weight changes by with its own score: of a softmax the weight itself.

    A softmax's scores are still without what all have in `common`.
    """
    if row_lse is None:
        weights, slopes = silu(products, ACCURATE)
    else:
        weights = softmax_weights(products, less_common(row_lse, common, factor), factor, ACCURATE)
        slopes = weights
    return weights, slopes


@triton.jit
def score_gradients(slopes, grad_weights, row_delta, keep, dropout):
    """Gradients of scores from those of weights; `keep` tells which weights dropout left."""
    if row_delta is None:
        return grad_weights * slopes
    else:
        if keep is not None:
            grad_weights = tl.where(keep, grad_weights * dropout.kept_scale, 0.0)
        return slopes * (grad_weights - row_delta)


@triton.jit
def pointwise_factor(normalizer, key_length):
    """What weights are multiplied by: the reciprocal of `normalizer`, or of the number of keys where that is 0."""
    return 1.0 / tl.where(normalizer > 0.0, normalizer, tl.maximum(key_length, 1).to(tl.float32))


@triton.jit
def hashed(number):
    """A permutation of the 32-bit numbers whose every bit depends on every bit (Wellons, "lowbias32")."""
    number ^= number >> 16
    number *= 0x7FEB352D
    number ^= number >> 15
    number *= 0x846CA68B
    return number ^ (number >> 16)


@triton.jit
def kept(rows, keys, sample, dropout):
    """Tell which weights dropout leaves; a pair's number depends on nothing but the seed, its query, its head and its key."""
    seed = tl.load(dropout.seed)
    low, high = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    of_row = hashed(hashed((sample.start + rows).to(tl.uint32) ^ low) + sample.head.to(tl.uint32) * 0x9E3779B9)
    of_key = hashed(keys.to(tl.uint32) + high)
    return hashed(of_row ^ of_key) >= dropout.threshold.to(tl.uint32)


@triton.jit
def silu(halves, ACCURATE: tl.constexpr):
    """Return SiLU and its slope at scores given as halves, `h = s / 2`; both exactly 0 where a key is hidden.

    With t = tanh(h) they are h (1 + t) and (1 + t) (1 + h (1 - t)) / 2. 16-bit weights take t from NVIDIA's `tanh.approx`, of at
    most 2^-11 relative error: one instruction where an exponential and a reciprocal are many.
    """
    if ACCURATE or INTERPRETED or not HAS_PTX:
        # 1 + t, without the error of a difference far below 0, nor an infinite exponential, of which the interpreter warns.
        share = tl.where(halves < -44.0, 0.0, 2.0 / (1.0 + exp_of_difference(tl.minimum(-2.0 * halves, 88.0), ACCURATE)))
        return halves * share, share * (0.5 + halves * (1.0 - 0.5 * share))
    else:
        tanh = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [halves], tl.float32, is_pure=True, pack=1)
        rest = 0.5 + 0.5 * (halves - halves * tanh)
        return halves * tanh + halves, rest * tanh + rest
