"""Samplers: which items stand for the catalogue in a sampled loss, and how probable each was."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from jagged.modules.jagged_module import JaggedModule
from jagged.modules.jagged_tensor import may_be_empty
from jagged.modules.seeded import SeededModule
from jagged.ops import Draw, drawn_negatives

# What stands in the place of an ignored target among in-batch negatives: no item, which the operator masks.
NO_ITEM = -1


class Negatives(NamedTuple):
    """What a sampler returns, as `sampled_linear_cross_entropy` takes it.

    `negatives` is a `Draw`, which knows its probabilities, or ids `[ns]` that all rows share; with ids come the logarithms of the
    probabilities of one draw, `negative_log_q` `[ns]` and `target_log_q` `[N]`, or None where the sampler knows none.
    """

    negatives: Draw | Tensor
    negative_log_q: Tensor | None = None
    target_log_q: Tensor | None = None


class Sampler(JaggedModule):
    """Base of the samplers: `forward(targets, *, ignore_index=-100)` gives `Negatives` for the rows of a batch.

    Attributes:
        num_items: size of the catalogue; None for any.
        count: negatives of a row; None where the batch's rows decide.
        knows_probabilities: whether losses can be corrected by them.
        is_uniform: whether every item is as probable, so that losses need no correction.
    """

    num_items: int | None
    count: int | None
    knows_probabilities = True
    is_uniform = False

    def forward(self, targets: Tensor, *, ignore_index: int = -100) -> Negatives:
        """Return negatives for rows of these targets `[N]`."""
        raise NotImplementedError


class _DrawingSampler(SeededModule, Sampler):
    """Draws from the catalogue."""

    shown: ClassVar[tuple[str, ...]] = ("num_items", "count", "rows_per_draw")
    kind: Any
    count: int
    num_items: int

    def __init__(
        self,
        num_items: int,
        count: int,
        rows_per_draw: int | None,
        replacement: bool,
        seed: int,
        device: torch.device | str | None,
    ) -> None:
        super().__init__(seed, device)
        if not 0 < num_items < 2**31:
            raise ValueError(f"num_items: expected from 1 to 2^31 - 1 items, got {num_items}")
        if count < 1:
            raise ValueError(f"count: expected at least one negative, got {count}")
        if rows_per_draw is not None and rows_per_draw < 1:
            raise ValueError(f"rows_per_draw: expected at least 1, or None for one draw for the batch, got {rows_per_draw}")
        if not replacement and count > num_items:
            raise ValueError(
                f"count: expected at most {num_items}, the number of items, without replacement, got {count}; "
                "draw fewer, or with replacement=True"
            )
        self.num_items, self.count = num_items, count
        self.rows_per_draw, self.replacement = rows_per_draw, replacement

    def forward(self, targets: Tensor, *, ignore_index: int = -100) -> Negatives:
        """Return a draw; in evaluation every call gives the same."""
        draw = Draw(self.kind, self.count, self.next_seed(), self.rows_per_draw, self.replacement, **self._tables())
        return Negatives(draw)

    def _tables(self) -> dict[str, Tensor]:
        return {}


class UniformSampler(_DrawingSampler):
    """Negatives of which every item is as probable.

    Args:
        num_items: size of the catalogue, V.
        count: negatives of a row.
        rows_per_draw: rows that share their negatives: 1 draws for each row, R for each block of R rows, None once for the batch,
            which costs least.
        replacement: False draws no item twice; `count` is then at most V.
        seed: of every draw in evaluation. In training torch's random state gives the seeds.
        device: where the seed lives.

    Raises:
        ValueError: numbers out of their range.

    Example:
        >>> import torch
        >>> from jagged.modules import UniformSampler
        >>> sampler = UniformSampler(1000, 16, rows_per_draw=None)
        >>> sampler(torch.tensor([3, 5])).negatives.count
        16
    """

    shown = (*_DrawingSampler.shown, "replacement")
    kind = "uniform"
    is_uniform = True

    def __init__(
        self,
        num_items: int,
        count: int,
        *,
        rows_per_draw: int | None = 1,
        replacement: bool = True,
        seed: int = 0,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(num_items, count, rows_per_draw, replacement, seed, device)


class LogUniformSampler(_DrawingSampler):
    """Negatives by Zipf's law: item k has the probability `log((k + 2) / (k + 1)) / log(V + 1)`.

    Items must be numbered from the most to the least frequent.

    Args:
        num_items, count, rows_per_draw, seed, device: as for `UniformSampler`.

    Raises:
        ValueError: numbers out of their range.
    """

    kind = "log_uniform"

    def __init__(
        self,
        num_items: int,
        count: int,
        *,
        rows_per_draw: int | None = 1,
        seed: int = 0,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(num_items, count, rows_per_draw, True, seed, device)


class PopularitySampler(_DrawingSampler):
    """Negatives in proportion to a power of how often items occur.

    An item that never occurs is never drawn. As a target it is corrected like the rarest item that is.

    Args:
        counts: `[V]`, how often each item occurs; numbers of at least 0, not all 0.
        count: negatives of a row.
        power: exponent of the counts: 1 draws by popularity, 0 evenly among the items that occur.
        rows_per_draw, seed: as for `UniformSampler`.
        device: where tables and seed live; by default where `counts` is. On the meta device nothing is computed: call
            `set_counts`, or load a state.

    Attributes:
        alias_probability, alias, log_q: `[V]`, float32, int32, float32; part of the state.

    Raises:
        ValueError: counts that are negative, not finite or all 0, or numbers out of their range.

    Source:
        Walker, 1977 (alias tables); Huebschle-Schneider and Sanders, Parallel Weighted Random Sampling, ESA 2019 (the table by
        prefix sums).

    Example:
        >>> import torch
        >>> from jagged.modules import PopularitySampler
        >>> PopularitySampler(torch.tensor([3, 1, 0]), 8).log_q.exp()
        tensor([0.7500, 0.2500, 0.2500])
    """

    shown = (*_DrawingSampler.shown, "power")
    kind = "popularity"
    alias_probability: Tensor
    alias: Tensor
    log_q: Tensor

    def __init__(
        self,
        counts: Tensor,
        count: int,
        *,
        power: float = 1.0,
        rows_per_draw: int | None = 1,
        seed: int = 0,
        device: torch.device | str | None = None,
    ) -> None:
        _check_counts(counts, power)
        device = counts.device if device is None else torch.device(device)
        super().__init__(len(counts), count, rows_per_draw, True, seed, device)
        self.power = power
        for name, dtype in (("alias_probability", torch.float32), ("alias", torch.int32), ("log_q", torch.float32)):
            self.register_buffer(name, torch.empty(len(counts), dtype=dtype, device=device))
        if not (counts.is_meta or device.type == "meta"):
            self.set_counts(counts)

    @torch.no_grad()
    def set_counts(self, counts: Tensor) -> None:
        """Draw by other counts `[V]` from here on; computed on the host, in float64."""
        _check_counts(counts, self.power)
        if len(counts) != self.num_items:
            raise ValueError(f"counts: expected shape [{self.num_items}], one number per item, got {list(counts.shape)}")
        q = _probabilities(counts, self.power)
        probability, alias = _alias_table(q)
        self.alias_probability.copy_(probability)
        self.alias.copy_(alias)
        self.log_q.copy_(_log_of(q))

    def _tables(self) -> dict[str, Tensor]:
        return {"alias_probability": self.alias_probability, "alias": self.alias, "log_q": self.log_q}


class InBatchSampler(Sampler):
    """The targets of the batch's rows that count are the negatives of all rows.

    An item comes as often as it is a target, so popular ones come often and have to be corrected by their `counts`.

    Args:
        counts: `[V]`, how often each item is a target; None for heads with `correction="none"` alone.
        device: where the table lives; by default where `counts` is.

    Attributes:
        log_q: `[V]`, float32, part of the state; None without counts.

    Raises:
        ValueError: counts that are negative, not finite or all 0.

    Source:
        Yi et al., Sampling-Bias-Corrected Neural Modeling for Large Corpus Item Recommendations, RecSys 2019.
    """

    shown = ("num_items",)
    log_q: Tensor | None

    def __init__(self, counts: Tensor | None = None, *, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.count = None
        self.num_items = None if counts is None else len(counts)
        self.knows_probabilities = counts is not None
        if counts is None:
            self.register_buffer("log_q", None)
            return
        _check_counts(counts, 1.0)
        device = counts.device if device is None else torch.device(device)
        self.register_buffer("log_q", torch.empty(len(counts), dtype=torch.float32, device=device))
        if not (counts.is_meta or device.type == "meta"):
            self.set_counts(counts)

    @torch.no_grad()
    def set_counts(self, counts: Tensor) -> None:
        """Correct by other counts `[V]` from here on."""
        _check_counts(counts, 1.0)
        if self.log_q is None or counts.shape != self.log_q.shape:
            raise ValueError(f"counts: expected as many as the sampler was built with, {self.num_items}, got {len(counts)}")
        self.log_q.copy_(_log_of(_probabilities(counts, 1.0)))

    def forward(self, targets: Tensor, *, ignore_index: int = -100) -> Negatives:
        """Return the targets as negatives, without those that are ignored."""
        counted = targets != ignore_index
        ids = torch.where(counted, targets, NO_ITEM)
        if may_be_empty(ids):
            # The operator wants at least one negative, of an empty batch too.
            ids = torch.cat([ids, ids.new_full((1,), NO_ITEM)])
        if self.log_q is None:
            return Negatives(ids)
        # The correction counts places; an ignored row's place is none.
        share = _log_share(counted.sum(), ids, self.log_q.dtype)
        return Negatives(ids, _at(self.log_q, ids) + share, _at(self.log_q, targets) + share)


class MixedSampler(Sampler):
    """In-batch negatives and, for the items that are seldom or never targets, a draw that all rows share.

    Args:
        in_batch: with counts.
        drawn: a `UniformSampler`, `LogUniformSampler` or `PopularitySampler` of as many items with `rows_per_draw=None`, with
            replacement.

    Raises:
        ValueError: samplers that do not fit together.

    Source:
        Yang et al., Mixed Negative Sampling for Learning Two-tower Neural Networks in Recommendations, WWW 2020.

    Example:
        >>> import torch
        >>> from jagged.modules import InBatchSampler, MixedSampler, UniformSampler
        >>> sampler = MixedSampler(InBatchSampler(torch.ones(1000)), UniformSampler(1000, 16, rows_per_draw=None))
        >>> sampler(torch.tensor([3, 5])).negatives.shape
        torch.Size([18])
    """

    def __init__(self, in_batch: InBatchSampler, drawn: UniformSampler | LogUniformSampler | PopularitySampler) -> None:
        super().__init__()
        if in_batch.log_q is None:
            raise ValueError("in_batch: expected a sampler with counts, got one without; a mixture's probabilities need them")
        if drawn.rows_per_draw is not None or not drawn.replacement:
            raise ValueError(
                f"drawn: expected one draw for the batch, with replacement, got rows_per_draw={drawn.rows_per_draw}, "
                f"replacement={drawn.replacement}; build it with rows_per_draw=None"
            )
        if drawn.num_items != in_batch.num_items:
            raise ValueError(f"drawn: expected {in_batch.num_items} items, as in_batch has, got {drawn.num_items}")
        self.num_items, self.count = drawn.num_items, None
        self.in_batch, self.drawn = in_batch, drawn

    def forward(self, targets: Tensor, *, ignore_index: int = -100) -> Negatives:
        """Return the batch's targets and the drawn items as negatives."""
        draw = self.drawn(targets).negatives
        counted = targets != ignore_index
        ids = torch.where(counted, targets.to(torch.int64), NO_ITEM)
        ids = torch.cat([ids, drawn_negatives(draw, 1, self.drawn.num_items)[0]])
        assert self.in_batch.log_q is not None
        log_q = self.in_batch.log_q
        of_batch = _log_share(counted.sum(), ids, log_q.dtype)
        of_drawn = _log_share(ids.new_full((), draw.count), ids, log_q.dtype)

        def mixture(items: Tensor) -> Tensor:
            inside = items.clamp(0, self.drawn.num_items - 1).to(torch.int64)
            drawn = draw.log_probability(inside, self.drawn.num_items, dtype=log_q.dtype)
            return torch.logaddexp(log_q[inside] + of_batch, drawn + of_drawn)

        return Negatives(ids, mixture(ids), mixture(targets))


def _check_counts(counts: Tensor, power: float) -> None:
    if counts.dim() != 1 or not len(counts):
        raise ValueError(f"counts: expected shape [V], one number per item, got {list(counts.shape)}")
    if not power >= 0:
        raise ValueError(f"power: expected a number of at least 0, got {power}")
    if counts.is_meta:
        return
    if not bool((torch.isfinite(counts) & (counts >= 0)).all()) or not bool((counts > 0).any()):
        raise ValueError("counts: expected numbers of at least 0, one of them above 0, got others; count the training events")


def _probabilities(counts: Tensor, power: float) -> Tensor:
    counts = counts.detach().to("cpu", torch.float64)
    # Divided first: a power of large counts could overflow.
    q = torch.where(counts > 0, (counts / counts.max()) ** power, 0)
    return q / q.sum()


def _log_of(q: Tensor) -> Tensor:
    """Return logarithms in which items that cannot be drawn have the least of those that can."""
    return torch.where(q > 0, q, q[q > 0].min()).log()


def _alias_table(q: Tensor) -> tuple[Tensor, Tensor]:
    """Return, for each item, the probability that it is kept where it is chosen evenly, and what is taken in its place.

    Light items, of less than the mean, are filled up by heavy ones in order. A heavy item's excess ends inside of a light one;
    what is taken from it too much, the next heavy one gives back. Where that is, prefix sums tell.
    """
    scaled = q * len(q)
    heavy = scaled >= 1
    heavy[scaled.argmax()] = True
    light_items, heavy_items = (~heavy).nonzero()[:, 0], heavy.nonzero()[:, 0]
    missing, excess = (1 - scaled[light_items]).cumsum(0), (scaled[heavy_items] - 1).clamp(min=0).cumsum(0)
    # Shifted and not subtracted: who gives and who gives back must follow from the same roundings.
    before = torch.cat([missing.new_zeros(1), missing[:-1]])[: len(missing)]
    giver = torch.searchsorted(excess, before, right=True).clamp(max=len(heavy_items) - 1)
    probability, alias = scaled.clone(), torch.arange(len(q))
    alias[light_items] = heavy_items[giver]
    taker = torch.searchsorted(missing, excess)
    too_much = torch.cat([missing, excess[-1:]])[taker] - excess
    # From one without excess nothing is taken. The last heavy item has nobody to give back, and nothing but roundings to get.
    too_much[excess <= 0] = 0
    too_much[-1] = 0
    probability[heavy_items] = 1 - too_much
    alias[heavy_items[:-1]] = heavy_items[1:]
    return probability.clamp(0, 1), alias


def _log_share(count: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the logarithm of the share that a count, of at least 1, has of all places; on the device, whatever their number."""
    return (count.clamp(min=1).to(dtype) / ids.new_full((), ids.shape[0], dtype=dtype)).log()


def _at(log_q: Tensor, items: Tensor) -> Tensor:
    return log_q[items.clamp(0, len(log_q) - 1)]
