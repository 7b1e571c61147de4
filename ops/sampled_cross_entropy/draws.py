"""Where negatives come from: ids that are given, or draws by numbers that depend on a seed and a place alone.

Every number is made by integer arithmetic, so that kernels and PyTorch draw the same ids on every device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from jagged.ops._shared.sizes import cdiv
from jagged.ops._shared.validation import check_tensor

MASK = 0xFFFFFFFF
# Philox 4x32's multipliers and the steps of its key.
PHILOX_A, PHILOX_B, PHILOX_KEY_A, PHILOX_KEY_B = 0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85
PHILOX_ROUNDS = 10
# Third word of the counter: numbers of draws, and keys of permutations.
DRAWS, KEYS = 0, 1
# Rounds of the permutation, at least as many bits of each half, and the multipliers of its hash.
FEISTEL_ROUNDS, FEISTEL_BITS = 6, 3
HASH_A, HASH_B = 0x21F0AAAD, 0xD35A2D97
# Bits behind the point of log2(V + 1), which is below 32.
LOG_BITS = 26
# 2^f - 1 as a polynomial of f, in units of 2^-32, cut off from below: the sum stays below 1.
EXP2 = tuple(int(math.log(2) ** power / math.factorial(power) * 2**32) for power in range(1, 12))
# Kinds as kernels and operators know them.
KINDS = ("given", "uniform", "permuted", "log_uniform", "popularity")


@dataclass(frozen=True, eq=False)
class Draw:
    """How negatives are drawn; `sampled_linear_cross_entropy` draws them where it needs them and keeps none.

    The ids depend on the seed, the row's draw and the place in it alone: forward, backward and every device draw the same.

    Args:
        kind: `"uniform"`; `"log_uniform"`, where item k has the probability `log((k + 2) / (k + 1)) / log(V + 1)`, for items
            ordered from the most to the least frequent; `"popularity"`, from the tables below.
        count: negatives of a row, ns.
        seed: `[1]`, int64, on the device of the hidden states. Change it in place before each step, graph replays included.
        rows_per_draw: rows that share their negatives: 1 draws for each row, R for each block of R consecutive rows, None
            once for the batch.
        replacement: False draws no item twice; for `"uniform"` alone, and at most V items.
        alias_probability: `[V]`, float32, for `"popularity"`: item k of a fair choice is kept with this probability.
        alias: `[V]`, int32, for `"popularity"`: what is taken instead of item k.
        log_q: `[V]`, float32, for `"popularity"`: logarithms of the items' probabilities.

    Source:
        Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011 (Philox); Walker, 1977 (alias tables); Black and
        Rogaway, Ciphers with Arbitrary Finite Domains, 2002 (a Feistel network walked until it is inside); the hash is
        Wellons, Prospecting for Hash Functions, 2018.

    Example:
        >>> import torch
        >>> from jagged.ops import Draw, drawn_negatives
        >>> draw = Draw("uniform", count=4, seed=torch.tensor([7]))
        >>> drawn_negatives(draw, num_rows=3, num_items=1000).shape
        torch.Size([3, 4])
    """

    kind: Literal["uniform", "log_uniform", "popularity"]
    count: int
    seed: Tensor
    rows_per_draw: int | None = 1
    replacement: bool = True
    alias_probability: Tensor | None = None
    alias: Tensor | None = None
    log_q: Tensor | None = None

    def log_probability(self, items: Tensor, num_items: int, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the logarithms of the probabilities of items, which lie in `[0, num_items)`, in one draw."""
        return item_log_probability(source_of(self, 1, num_items, items.device), items, num_items, dtype)


class Source(NamedTuple):
    """Negatives as operators take them.

    `ids` are the negatives themselves, `[draws, num_negatives]`, or the alias table; `log_q` belongs to `ids`, place by place or
    item by item. Row n belongs to draw `n // rows_per_draw`.
    """

    ids: Tensor | None
    log_q: Tensor | None
    probability: Tensor | None
    seed: Tensor | None
    kind: str
    num_negatives: int
    rows_per_draw: int


def source_of(draw: Draw, num_rows: int, num_items: int, device: torch.device) -> Source:
    """Check a draw and return it as operators take it."""
    if draw.kind not in ("uniform", "log_uniform", "popularity"):
        raise ValueError(f"Draw.kind: got {draw.kind!r}, expected 'uniform', 'log_uniform' or 'popularity'")
    if draw.count < 1:
        raise ValueError(f"Draw.count: expected at least one negative, got {draw.count}")
    if draw.rows_per_draw is not None and draw.rows_per_draw < 1:
        raise ValueError(f"Draw.rows_per_draw: expected at least 1, or None for one draw for the batch, got {draw.rows_per_draw}")
    if not draw.replacement:
        if draw.kind != "uniform":
            raise ValueError(
                f"Draw.replacement: only 'uniform' draws without replacement, got kind {draw.kind!r}; take replacement=True"
            )
        if draw.count > num_items:
            raise ValueError(
                f"Draw.count: expected at most {num_items}, the number of items, without replacement, got {draw.count}; "
                "draw fewer, or with replacement=True"
            )
    if num_items >= 2**31:
        raise ValueError(f"num_items: draws reach fewer than 2^31 items, got {num_items}")
    check_tensor("Draw.seed", draw.seed, "[1]", (torch.int64,))
    tables = {"alias_probability": torch.float32, "alias": torch.int32, "log_q": torch.float32}
    for name, dtype in tables.items():
        table = getattr(draw, name)
        if (table is not None) != (draw.kind == "popularity"):
            wanted = "a tensor [V]" if table is None else "None"
            raise ValueError(f"Draw.{name}: expected {wanted} for kind {draw.kind!r}, got {'None' if table is None else 'one'}")
        if table is not None:
            check_tensor(f"Draw.{name}", table, "[V]", (dtype,))
            if table.shape[0] != num_items:
                raise ValueError(f"Draw.{name}: expected shape [{num_items}], one number an item, got {list(table.shape)}")
    for name in ("seed", *tables):
        tensor = getattr(draw, name)
        if tensor is not None and tensor.device != device:
            raise ValueError(f"Draw.{name}: expected the device of hidden, {device}, got {tensor.device}; move it with .to(...)")
    kind = draw.kind if draw.replacement else "permuted"
    # Draws begin at the same rows whatever comes after the last row.
    rows_per_draw = min(draw.rows_per_draw or num_rows, max(1, num_rows)) or 1
    return Source(draw.alias, draw.log_q, draw.alias_probability, draw.seed, kind, draw.count, rows_per_draw)


def drawn_negatives(draw: Draw, num_rows: int, num_items: int) -> Tensor:
    """Return the ids that a draw gives: what `sampled_linear_cross_entropy` uses without ever writing it down.

    Plain PyTorch on every device. Without replacement it synchronises on a GPU.

    Args:
        draw: how negatives are drawn.
        num_rows: of the hidden states, N.
        num_items: to draw from, V.

    Returns:
        `[ceil(N / rows_per_draw), count]`, int64, on the device of the seed; `[1, count]` for one draw for the batch.

    Raises:
        ValueError, TypeError: a draw that is not possible.

    Example:
        >>> import torch
        >>> from jagged.ops import Draw, drawn_negatives
        >>> draw = Draw("uniform", count=5, seed=torch.tensor([3]), rows_per_draw=None, replacement=False)
        >>> drawn_negatives(draw, num_rows=100, num_items=5).sort().values
        tensor([[0, 1, 2, 3, 4]])
    """
    source = source_of(draw, num_rows, num_items, draw.seed.device)
    num_draws = 1 if draw.rows_per_draw is None else cdiv(num_rows, source.rows_per_draw)
    groups = torch.arange(num_draws, device=draw.seed.device)
    places = torch.arange(draw.count, device=draw.seed.device)
    return draw_ids(source, groups, places, num_items)


def draw_ids(source: Source, groups: Tensor, places: Tensor, num_items: int) -> Tensor:
    """Return the ids at some places of some draws, `[groups, places]`, int64."""
    if source.kind == "given":
        assert source.ids is not None
        return source.ids[groups[:, None], places].to(torch.int64)
    assert source.seed is not None
    if source.kind == "permuted":
        return _permuted(source.seed, groups[:, None], places, num_items)
    first, second, _, _ = philox(source.seed, places, groups[:, None], DRAWS)
    if source.kind == "log_uniform":
        return _log_uniform(first, num_items)
    ids = (first * num_items) >> 32
    if source.kind == "uniform":
        return ids
    assert source.probability is not None
    assert source.ids is not None
    # 24 bits are exact in float32.
    coin = (second >> 8).to(torch.float32) * 2.0**-24
    return torch.where(coin < source.probability[ids], ids, source.ids[ids].to(torch.int64))


def log_probability(source: Source, ids: Tensor, groups: Tensor, places: Tensor, num_items: int, dtype: torch.dtype) -> Tensor:
    """Return the logarithms of the probabilities that ids `[groups, places]` have in one draw."""
    if source.kind == "given":
        if source.log_q is None:
            return ids.new_full((), -math.log(num_items), dtype=dtype)
        return source.log_q[groups[:, None], places].to(dtype)
    return item_log_probability(source, ids, num_items, dtype)


def item_log_probability(source: Source, ids: Tensor, num_items: int, dtype: torch.dtype) -> Tensor:
    """Return the logarithms of items' probabilities in one draw; ids lie inside."""
    if source.kind == "popularity":
        assert source.log_q is not None
        return source.log_q[ids].to(dtype)
    if source.kind == "log_uniform":
        return torch.log1p((ids + 1).to(dtype).reciprocal_()).log_().sub_(math.log(math.log1p(num_items)))
    return torch.full(ids.shape, -math.log(num_items), dtype=dtype, device=ids.device)


def target_correction_of(
    source: Source, target: Tensor, target_log_q: Tensor | None, num_items: int, dtype: torch.dtype
) -> Tensor:
    """Return the logarithms of how often targets, any numbers, are expected in a draw; `target_log_q` belongs to given ids."""
    if source.kind != "given":
        inside = target.to(torch.int64).clamp(0, num_items - 1)
        return item_log_probability(source, inside, num_items, dtype) + math.log(source.num_negatives)
    # By PyTorch: of given negatives the number may be a variable of a compiled model.
    log_count = target.new_full((1,), source.num_negatives, dtype=dtype).log_()
    if target_log_q is not None:
        return target_log_q.to(dtype) + log_count
    return (log_count - math.log(num_items)).expand(target.shape).contiguous()


def log_uniform_scale(num_items: int) -> int:
    """Return log2(V + 1) as a whole number of units of 2^-26."""
    return round(math.log2(num_items + 1) * 2**LOG_BITS)


def feistel_bits(num_items: int) -> int:
    """Return the bits of half an id, so that two halves reach every item, and at most 64 or four times as many numbers."""
    return max(FEISTEL_BITS, cdiv((num_items - 1).bit_length(), 2))


def philox(seed: Tensor, place: Tensor, group: Tensor, purpose: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four random numbers of 32 bits for each counter (place, group, purpose, 0), as int64."""
    place, group = torch.broadcast_tensors(place & MASK, group & MASK)
    c0, c1 = place, group
    c2, c3 = torch.full_like(c0, purpose), torch.zeros_like(c0)
    k0, k1 = seed & MASK, (seed >> 32) & MASK
    for _ in range(PHILOX_ROUNDS):
        # Products wrap around at 2^64, which leaves their bits as they are.
        a, b = c0 * PHILOX_A, c2 * PHILOX_B
        c0, c2 = ((b >> 32) & MASK) ^ c1 ^ k0, ((a >> 32) & MASK) ^ c3 ^ k1
        c1, c3 = b & MASK, a & MASK
        k0, k1 = (k0 + PHILOX_KEY_A) & MASK, (k1 + PHILOX_KEY_B) & MASK
    return c0, c1, c2, c3


def _log_uniform(number: Tensor, num_items: int) -> Tensor:
    """Return floor(2^(u log2(V + 1))) - 1 for u = number / 2^32."""
    exponent = number * log_uniform_scale(num_items)
    whole, fraction = exponent >> (LOG_BITS + 32), (exponent >> LOG_BITS) & MASK
    power = torch.full_like(fraction, EXP2[-1])
    for coefficient in reversed(EXP2[:-1]):
        power = coefficient + ((power * fraction) >> 32 & MASK)
    power = (power * fraction) >> 32 & MASK
    return (((power + 2**32) >> (32 - whole)) - 1).clamp_(max=num_items - 1)


def _permuted(seed: Tensor, group: Tensor, place: Tensor, num_items: int) -> Tensor:
    keys = philox(seed, torch.zeros_like(group), group, KEYS)
    bits = feistel_bits(num_items)
    ids = _feistel(place.expand(group.shape[0], -1), keys, bits)
    # A place that is inside comes back inside, at the latest as itself.
    while bool((outside := ids >= num_items).any()):
        ids = torch.where(outside, _feistel(ids, keys, bits), ids)
    return ids


def _feistel(number: Tensor, keys: tuple[Tensor, ...], bits: int) -> Tensor:
    low = 2**bits - 1
    left, right = number >> bits, number & low
    for step in range(FEISTEL_ROUNDS):
        mixed = right ^ ((keys[step % 4] + step * PHILOX_KEY_A) & MASK)
        mixed = ((mixed ^ (mixed >> 16)) * HASH_A) & MASK
        mixed = ((mixed ^ (mixed >> 15)) * HASH_B) & MASK
        left, right = right, left ^ ((mixed ^ (mixed >> 15)) & low)
    return (left << bits) | right
