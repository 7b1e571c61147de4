"""Heads: from hidden states to a loss."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from jagged.modules.jagged_module import JaggedModule
from jagged.modules.sampling import NO_ITEM, Negatives, Sampler
from jagged.modules.seeded import SeededModule
from jagged.modules.split import RowSplit
from jagged.modules.targets import next_item_targets
from jagged.ops import (
    MEMORY_BUDGET,
    Correction,
    Draw,
    Loss,
    Positive,
    StrategyName,
    drawn_negatives,
    linear_cross_entropy,
    sampled_linear_cross_entropy,
)


class HeadOutput(NamedTuple):
    """What a head returns: `loss`, a scalar, and `logits` `[N]`, the score of each row's target (no gradient)."""

    loss: Tensor
    logits: Tensor


class SplitHead(JaggedModule):
    """Base of the heads that score items of which each process holds some."""

    @property
    def split(self) -> RowSplit | None:
        """Which rows of the item table this process holds; None for all."""
        return self._split

    @split.setter
    def split(self, split: RowSplit | None) -> None:
        if split is not None and (unknown := self._beyond_a_split()):
            raise ValueError(
                f"{unknown[0]}: a head whose items are split over processes does not know it; leave it out, or keep all items"
            )
        self._split = split
        for part in self.modules():
            if isinstance(part, SeededModule):
                # Items are drawn for the rows of all.
                part.group = None if split is None else split.group

    def _beyond_a_split(self) -> list[str]:
        """Options that are given and that a split head does not know."""
        raise NotImplementedError


class CutCrossEntropyHead(SplitHead):
    """Cross-entropy of every row over all items, without the logits in memory. Has no parameters: the item table is passed.

    Args:
        ignore_index: rows with this target have no loss.
        label_smoothing: share of the target's probability that is spread evenly over all items, in [0, 1).
        softcap, temperature, normalize, z_loss, filter_eps, strategy, memory_budget: as for
            `jagged.ops.linear_cross_entropy`.
        class_weight: `[num_items]`, weight of each item's loss, in the mean's divisor too; part of the state.
        split: where given, `weight` is this process's block of the item table's rows. Each process scores the hidden states of
            all against its block, and gets the log-sum-exps over the others' blocks for its own rows. Every process of the
            group must call, and call backward, with however few rows; gradients are those of the sum of their losses. Of the
            other options such a head knows `ignore_index` and `label_smoothing` alone.

    Raises:
        ValueError: `label_smoothing` outside [0, 1), or an option that a split head does not know.

    Shape:
        hidden: JaggedTensor with values `[sum L, D]`; weight: `[num_items, D]`; bias: `[num_items]`; targets: `[sum L]`, int32 or
        int64, or a JaggedTensor of the rows' own items, whose targets are then the items of the next rows.

    Example:
        >>> import torch
        >>> from torchrec.sparse.jagged_tensor import JaggedTensor
        >>> from jagged.modules import CutCrossEntropyHead
        >>> items = JaggedTensor(values=torch.tensor([5, 6, 7, 8]), offsets=torch.tensor([0, 3, 4]))
        >>> hidden = JaggedTensor(values=torch.zeros(4, 16), offsets=items.offsets())
        >>> CutCrossEntropyHead()(hidden, torch.zeros(100, 16), items).loss.exp()
        tensor(100.0000)
    """

    class_weight: Tensor | None

    def __init__(
        self,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        softcap: float | None = None,
        temperature: float = 1.0,
        normalize: bool = False,
        z_loss: float = 0.0,
        class_weight: Tensor | None = None,
        filter_eps: float | tuple[float | None, float | None] | None = None,
        strategy: StrategyName = "auto",
        memory_budget: int = MEMORY_BUDGET,
        split: RowSplit | None = None,
    ) -> None:
        super().__init__()
        if not 0 <= label_smoothing < 1:
            raise ValueError(f"label_smoothing: expected a number in [0, 1), got {label_smoothing}")
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.softcap, self.temperature, self.normalize = softcap, temperature, normalize
        self.z_loss, self.filter_eps = z_loss, filter_eps
        self.strategy: StrategyName = strategy
        self.memory_budget = memory_budget
        self.register_buffer("class_weight", class_weight)
        self.split = split

    def forward(
        self, hidden: JaggedTensor, weight: Tensor, targets: Tensor | JaggedTensor, *, bias: Tensor | None = None
    ) -> HeadOutput:
        """Return the mean loss over the rows that count (0 where none does) and the targets' scores."""
        values, targets = hidden.values(), targets_of(targets, self.ignore_index)
        if self._split is not None:
            if bias is not None:
                raise ValueError("bias: a head whose items are split over processes knows none; leave it out")
            return self._forward_split(self._split, values, weight, targets)
        loss, logits = linear_cross_entropy(
            values,
            weight,
            targets,
            bias=bias,
            ignore_index=self.ignore_index,
            softcap=self.softcap,
            temperature=self.temperature,
            normalize=self.normalize,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            class_weight=self.class_weight,
            filter_eps=self.filter_eps,
            strategy=self.strategy,
            memory_budget=self.memory_budget,
            return_target_logit=True,
        )
        return HeadOutput(loss, logits.detach())

    def _forward_split(self, split: RowSplit, values: Tensor, weight: Tensor, targets: Tensor) -> HeadOutput:
        counted = targets != self.ignore_index
        lse, logits, mean_logits = self._score_together(split, values, weight, targets)
        losses = torch.where(counted, lse - logits, 0.0)
        if mean_logits is not None:
            losses = losses + self.label_smoothing * torch.where(counted, logits - mean_logits, 0.0)
        return HeadOutput(losses.sum() / counted.sum().clamp(min=1), logits.detach())

    def _score_together(
        self, split: RowSplit, hidden: Tensor, weight: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return log-sum-exp, target's logit and, for smoothing, mean logit `[N]` of each row, from all blocks."""
        counts = split.counts(len(targets))
        every, wanted = split.gather(hidden, counts), split.gather(targets, counts)
        counted, local = wanted != self.ignore_index, wanted - split.block().start
        if len(weight):
            # -1 and not ignore_index, which may be the number of a row of this block.
            within = torch.where(counted, local.clamp(0, len(weight) - 1), -1)
            _, lse, logit = linear_cross_entropy(
                every, weight, within, ignore_index=-1, reduction="none", return_lse=True, return_target_logit=True
            )
            parts = [lse, torch.where(counted & (local == within), logit, 0.0)]
        else:
            # No logits: a log-sum-exp of -inf and a sum of 0, with the (empty, zero) gradients that the other processes' have.
            logits = every @ weight.T
            parts = [logits.logsumexp(1), logits.sum(1)]
        if self.label_smoothing:
            parts.append((every * weight.sum(0)).sum(1) / split.num_rows)
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        lse, logits, *means = split.scatter(torch.stack([part.to(dtype) for part in parts], 1), counts).unbind(2)
        nowhere = (targets != self.ignore_index) & ((targets < 0) | (targets >= split.num_rows))
        return lse.logsumexp(0), logits.sum(0).masked_fill(nowhere, torch.nan), means[0].sum(0) if means else None

    def _options(self) -> dict[str, tuple[object, object]]:
        """The options beside those that are always shown, each with its default."""
        return {
            "softcap": (self.softcap, None),
            "temperature": (self.temperature, 1.0),
            "normalize": (self.normalize, False),
            "z_loss": (self.z_loss, 0.0),
            "class_weight": (None if self.class_weight is None else list(self.class_weight.shape), None),
            "filter_eps": (self.filter_eps, None),
            "strategy": (self.strategy, "auto"),
            "memory_budget": (self.memory_budget, MEMORY_BUDGET),
        }

    def _beyond_a_split(self) -> list[str]:
        return [name for name, (value, default) in self._options().items() if value != default]

    def extra_repr(self) -> str:
        """Show the options."""
        shown: dict[str, object] = {"ignore_index": self.ignore_index, "label_smoothing": self.label_smoothing}
        shown |= {name: value for name, (value, default) in self._options().items() if value != default}
        parts = [f"{name}={value}" for name, value in shown.items()]
        return ", ".join(parts if self._split is None else [*parts, repr(self._split)])


class SampledCrossEntropyHead(SplitHead):
    """Loss of every row's target against sampled items. Has no parameters: the item table is passed.

    Args:
        sampler: of `jagged.modules`: `UniformSampler`, `LogUniformSampler`, `PopularitySampler`, `InBatchSampler` or
            `MixedSampler`.
        loss: `"softmax"`, `"refined"`, `"bce"` or `"gbce"`. The operator's sums of bce and gbce are divided by the number of
            predictions of a row, its target and its negatives, so that losses do not grow with the number of negatives.
        correction: whose logits are corrected by how probable they were drawn: `"none"`, `"negatives"` or `"both"`. `"auto"` is
            `"negatives"`, where the sampler draws every item as often and the loss is not refined `"none"`. Without a correction
            scores come out relative to how often items are drawn, so that popular items rank last.
        positive, mask_hits, renormalise, gbce_t, filter_eps, sparse, memory_budget: as for
            `jagged.ops.sampled_linear_cross_entropy`.
        temperature: what logits are divided by, > 0.
        ignore_index: rows with this target have no loss, and are nobody's negatives.
        split: where given, `weight` is this process's block of the item table's rows. The rows of all processes have the
            negatives that they would have as one batch, in the order of the ranks, and each process fetches those items, once
            each, that its own rows need. Loss and scores are of its rows, the gradient of the block is that of the sum of all
            processes' losses. Every process must call, and call backward, with however few rows.

    Raises:
        ValueError: options that do not go together: see the operator. Where the batch decides how many negatives there are,
            gbce and `renormalise`, which need their number, are refused, and so is a correction by a sampler that knows no
            probabilities. `correction="auto"` refuses what needs a correction and cannot have one: bce and gbce, unless every
            item is drawn as often, and a sampler that knows no probabilities. A split head knows no `sparse`, no
            `memory_budget` and no `exclude`.

    Shape:
        hidden: JaggedTensor with values `[sum L, D]`; weight: `[num_items, D]`; targets: `[sum L]`, int32 or int64, or a
        JaggedTensor of the rows' own items, whose targets are then the items of the next rows; exclude: ids `[M]` and offsets
        `[sum L + 1]` of items that are no negatives of a row.

    Example:
        >>> import torch
        >>> from torchrec.sparse.jagged_tensor import JaggedTensor
        >>> from jagged.modules import SampledCrossEntropyHead, UniformSampler
        >>> items = JaggedTensor(values=torch.tensor([5, 6, 7, 8]), offsets=torch.tensor([0, 3, 4]))
        >>> hidden = JaggedTensor(values=torch.zeros(4, 16), offsets=items.offsets())
        >>> head = SampledCrossEntropyHead(UniformSampler(100, 10), mask_hits=False)
        >>> head(hidden, torch.zeros(100, 16), items).loss.exp()
        tensor(11.0000)
    """

    shown = (
        "loss", "correction", "positive", "mask_hits", "renormalise", "gbce_t", "temperature", "filter_eps", "sparse",
        "memory_budget", "ignore_index",
    )  # fmt: skip
    # Of heads that were pickled before there was one.
    memory_budget: int | None = None

    def __init__(
        self,
        sampler: Sampler,
        *,
        loss: Loss = "softmax",
        correction: Correction | Literal["auto"] = "auto",
        positive: Positive = "inside",
        mask_hits: bool = True,
        renormalise: bool = False,
        gbce_t: float = 0.75,
        temperature: float = 1.0,
        filter_eps: float | None = None,
        sparse: bool = False,
        memory_budget: int | None = None,
        ignore_index: int = -100,
        split: RowSplit | None = None,
    ) -> None:
        super().__init__()
        if correction == "auto":
            correction = _needed_correction(loss, sampler)
        check_sampled_options(loss, correction, sampler.count is not None, sampler.knows_probabilities, renormalise)
        if not temperature > 0:
            raise ValueError(f"temperature: expected a number above 0, got {temperature}")
        if not 0 <= gbce_t <= 1:
            raise ValueError(f"gbce_t: expected a number from 0 to 1, got {gbce_t}")
        self.sampler = sampler
        self.loss: Loss = loss
        self.correction: Correction = correction
        self.positive: Positive = positive
        self.mask_hits, self.renormalise, self.gbce_t = mask_hits, renormalise, gbce_t
        self.temperature, self.filter_eps, self.sparse, self.ignore_index = temperature, filter_eps, sparse, ignore_index
        self.memory_budget = memory_budget
        self.split = split

    def _beyond_a_split(self) -> list[str]:
        given = {"sparse": self.sparse, "memory_budget": self.memory_budget is not None}
        return [name for name, is_given in given.items() if is_given]

    def forward(
        self,
        hidden: JaggedTensor,
        weight: Tensor,
        targets: Tensor | JaggedTensor,
        *,
        exclude: tuple[Tensor, Tensor] | None = None,
    ) -> HeadOutput:
        """Return the mean loss over the rows that count (0 where none does) and the targets' scores."""
        values, targets = hidden.values(), targets_of(targets, self.ignore_index)
        num_items = len(weight) if self._split is None else self._split.num_rows
        if self.sampler.num_items is not None and self.sampler.num_items != num_items:
            raise ValueError(f"weight: expected {self.sampler.num_items} items, as the sampler has, got {num_items}")
        if self._split is not None:
            if exclude is not None:
                raise ValueError("exclude: a head whose items are split over processes knows none; leave it out")
            return self._forward_split(self._split, values, weight, targets)
        negatives = self.sampler(targets, ignore_index=self.ignore_index)
        number = _number_of(negatives.negatives)
        loss = self._loss(
            values,
            weight,
            targets,
            negatives,
            number,
            self.loss,
            exclude=exclude,
            sparse=self.sparse,
            memory_budget=self.memory_budget,
        )
        return HeadOutput(loss, target_logits(values, weight, targets, self.ignore_index) / self.temperature)

    def _loss(
        self,
        values: Tensor,
        weight: Tensor,
        targets: Tensor,
        negatives: Negatives,
        number: int | Tensor,
        loss: Loss,
        ignore_index: int | None = None,
        **options: Any,
    ) -> Tensor:
        found: Tensor = sampled_linear_cross_entropy(
            values,
            weight,
            targets,
            negatives.negatives,
            negative_log_q=None if self.correction == "none" else negatives.negative_log_q,
            target_log_q=negatives.target_log_q if self.correction == "both" else None,
            loss=loss,
            correction=self.correction,
            positive=self.positive,
            mask_hits=self.mask_hits,
            renormalise=self.renormalise,
            gbce_t=self.gbce_t,
            scale=1 / self.temperature,
            ignore_index=self.ignore_index if ignore_index is None else ignore_index,
            filter_eps=self.filter_eps,
            **options,
        )
        return found / (1 + number) if loss in ("bce", "gbce") else found

    def _forward_split(self, split: RowSplit, values: Tensor, weight: Tensor, targets: Tensor) -> HeadOutput:
        counts = split.counts(len(targets))
        everyones = split.gather(targets, counts)
        own = slice(sum(counts[: split.rank]), sum(counts[: split.rank + 1]))
        drawn = self.sampler(everyones, ignore_index=self.ignore_index)
        negatives, number = _of_rows(drawn, everyones, own, split.num_rows), _number_of(drawn.negatives)
        ids = negatives.negatives
        assert isinstance(ids, Tensor)
        counted = targets != self.ignore_index
        nowhere = counted & ((targets < 0) | (targets >= split.num_rows))
        is_target = counted & ~nowhere
        # One more, so that there is one.
        wanted = torch.cat([targets.masked_fill(~is_target, 0), ids.clamp(min=0).flatten(), ids.new_zeros(1)]).to(torch.int64)
        items, places = wanted.unique(return_inverse=True)
        rows = split.look_up(weight, items)
        # By their places among the items that were fetched. Of no table is -1 a row.
        targets = places[: len(targets)].masked_fill(~is_target, NO_ITEM)
        there = places[len(targets) : -1].view_as(ids).masked_fill(ids < 0, NO_ITEM)
        negatives = negatives._replace(negatives=there)
        as_bce: Loss = "bce" if self.loss == "gbce" else self.loss
        loss = self._loss(values, rows, targets, negatives, number, as_bce, ignore_index=NO_ITEM)
        if self.loss == "gbce":
            # The operator would count the items that were fetched for the catalogue.
            more = self.gbce_t * (ids.shape[-1] / max(split.num_rows - 1, 1) - 1)
            dtype = torch.promote_types(values.dtype, torch.float32)
            scores = (values.to(dtype) * rows[targets.clamp(min=0)]).sum(1) / self.temperature
            positives = nn.functional.softplus(-scores).masked_fill(~is_target, 0).sum() / is_target.sum().clamp(min=1)
            loss = loss + more * positives / (1 + number)
        logits = target_logits(values, rows, targets, NO_ITEM) / self.temperature
        return HeadOutput(loss.masked_fill(nowhere.any(), torch.nan), logits.masked_fill(nowhere, torch.nan))


def _of_rows(negatives: Negatives, targets: Tensor, rows: slice, num_items: int) -> Negatives:
    """Return ids, with their probabilities, of some rows of those that negatives are for."""
    draw, target_log_q = negatives.negatives, negatives.target_log_q
    if isinstance(draw, Tensor):
        return negatives._replace(target_log_q=None if target_log_q is None else target_log_q[rows])
    ids = drawn_negatives(draw, len(targets), num_items)
    if draw.rows_per_draw is None:
        ids = ids[0]
    else:
        ids = ids[torch.arange(rows.start, rows.stop, device=ids.device) // draw.rows_per_draw]
    own = targets[rows].clamp(0, num_items - 1)
    return Negatives(ids, draw.log_probability(ids, num_items), draw.log_probability(own, num_items))


def _number_of(negatives: Draw | Tensor) -> int | Tensor:
    """Return how many negatives a row is given; those of the batch are as many as its targets."""
    return negatives.count if isinstance(negatives, Draw) else (negatives >= 0).sum()


def _needed_correction(loss: Loss, sampler: Sampler) -> Correction:
    """Return the correction with which items rank by how probable they are as the next one."""
    if sampler.is_uniform and loss != "refined":
        return "none"
    if loss in ("bce", "gbce"):
        raise ValueError(
            f"loss: got {loss!r}, which has no correction, with {type(sampler).__name__}, which draws popular items more often: "
            "popular items would rank last; take UniformSampler or loss='softmax', or say correction='none' to have it so"
        )
    if not sampler.knows_probabilities:
        raise ValueError(
            f"sampler: got {type(sampler).__name__} without counts, expected one whose draws can be corrected: popular items "
            "would rank last; build it with counts, or say correction='none' to have it so"
        )
    return "negatives"


def check_sampled_options(
    loss: str, correction: str, count_is_known: bool, probabilities_are_known: bool, renormalise: bool
) -> None:
    """Check what a sampler allows; the operator checks its options among themselves."""
    if correction != "none" and not probabilities_are_known:
        raise ValueError(
            f"correction: got {correction!r}, but the sampler knows no probabilities; build it with counts, or take 'none'"
        )
    for name, is_wanted in (("loss='gbce'", loss == "gbce"), ("renormalise", renormalise)):
        if is_wanted and not count_is_known:
            raise ValueError(f"{name}: needs a fixed number of negatives, but the sampler's depends on the batch; take another")


def targets_of(targets: Tensor | JaggedTensor, ignore_index: int) -> Tensor:
    """Return a head's targets `[sum L]`: those given, or of a JaggedTensor of items those of the next rows."""
    return next_item_targets(targets, ignore_index=ignore_index) if isinstance(targets, JaggedTensor) else targets


@torch.no_grad()
def target_logits(hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    """Return each row's product with its target `[N]`, at least in float32: 0 in ignored rows, NaN for what is no item."""
    inside = targets.clamp(0, len(weight) - 1)
    rows, dtype = weight[inside], torch.promote_types(hidden.dtype, torch.float32)
    logits = (hidden.to(dtype) * rows).sum(1)
    return logits.masked_fill(inside != targets, torch.nan).masked_fill(targets == ignore_index, 0)
