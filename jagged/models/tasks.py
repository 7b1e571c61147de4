"""Losses of tasks: over rows (`BinaryLoss`, `FocalLoss`), and over requests' candidates (`ListwiseLoss`, `PairwiseLoss`)."""

from __future__ import annotations

import math
from typing import ClassVar, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from jagged.ops import jagged_jagged_bmm, jagged_pairwise_difference, sample_of_row

LossName = Literal["binary", "focal", "listwise", "pairwise"]
#: What `RankingModel(loss=...)` takes.
LOSSES: tuple[LossName, ...] = ("binary", "focal", "listwise", "pairwise")
#: Those over requests, whose logits are scores that only order candidates.
REQUEST_LOSSES: tuple[LossName, ...] = ("listwise", "pairwise")


def product_logits(first: Tensor, second: Tensor) -> Tensor:
    """Return the logits of the product of two probabilities, given as logits, exact however large these are.

    `log pq` is a sum, and `1 - pq` is `(1 - p) + p (1 - q)`, so that nothing is subtracted from 1.

    Args:
        first, second: of one shape and dtype, float32 or float64.

    Example:
        >>> import torch
        >>> from jagged.models import product_logits
        >>> product_logits(torch.tensor([0.0, 80.0]), torch.tensor([0.0, 200.0]))
        tensor([-1.0986, 80.0000])
    """
    log_p, log_q = nn.functional.logsigmoid(first), nn.functional.logsigmoid(second)
    neither = torch.logaddexp(nn.functional.logsigmoid(-first), log_p + nn.functional.logsigmoid(-second))
    return log_p + log_q - neither


class TaskLoss(nn.Module):
    """What the losses of this module have in common: how they are called, and what they return.

    A loss is a weighted sum of terms, of rows or of requests, and what their mean divides by. Both are sums over the batch, so
    that batches add up exactly: over processes, and where gradients are accumulated.

    Rows that do not count change nothing: those whose mask is False and those of weight 0, as in `PointwiseMetrics`. Logits,
    label and weight of a row whose mask is False may be anything, NaN too, and its gradient is exactly 0. Only logits have
    gradients. 16-bit logits are computed in float32, under autocast, too.

    Attributes:
        over_requests: whether the terms are of requests, so that `offsets` are needed and logits are scores, not log-odds.

    Shape:
        logits: `[S]`, float64, float32, bfloat16 or float16.
        labels: `[S]`, any dtype of numbers.
        offsets: `[R + 1]`, int32 or int64, from 0 to S, the candidates of each request; None where the loss is over rows.
        mask: bool `[S]`, the rows that have a label; None for all.
        weights: `[S]`, not negative, how much each row counts; None for 1.
        Out: `(total, count)`, both 0-dim, float32, float64 for float64. `total / count` is the mean; without a row that counts
        both are 0.

    Raises:
        TypeError: logits that are no floats, a mask that is not bool, offsets of another dtype.
        ValueError: shapes that do not fit, or no offsets where they are needed.
    """

    over_requests: ClassVar[bool] = False


class _Rows(NamedTuple):
    """What counts of a batch, `[S]`: logits, labels and weights, 0 in rows that do not count, and which rows do."""

    logits: Tensor
    labels: Tensor
    weights: Tensor
    counted: Tensor


def _rows(logits: Tensor, labels: Tensor, mask: Tensor | None, weights: Tensor | None) -> _Rows:
    if logits.dim() != 1:
        raise ValueError(f"logits: expected shape [S], got {list(logits.shape)}; give the logits of one task at a time")
    if not logits.is_floating_point():
        raise TypeError(f"logits: expected a floating-point dtype, got {logits.dtype}; give scores before any rounding")
    for name, of in (("labels", labels), ("mask", mask), ("weights", weights)):
        if of is not None and of.shape != logits.shape:
            raise ValueError(f"{name}: expected shape {list(logits.shape)} as logits, got {list(of.shape)}; give one a row")
    if mask is not None and mask.dtype != torch.bool:
        raise TypeError(f"mask: expected torch.bool, got {mask.dtype}; give mask.bool()")
    dtype = torch.promote_types(logits.dtype, torch.float32)
    weights = torch.ones_like(logits, dtype=dtype) if weights is None else weights.detach().to(dtype)
    # A weight of NaN is not 0: where the row has a label, the loss shows it.
    counted = weights != 0 if mask is None else (weights != 0) & mask
    # Hidden before anything is computed of them: what an operation gives back for NaN would be NaN times 0.
    logits, labels = logits.to(dtype).where(counted, 0), labels.detach().to(dtype).where(counted, 0)
    return _Rows(logits, labels, weights.where(counted, 0), counted)


class BinaryLoss(TaskLoss):
    """Binary cross entropy: `-y log p - (1 - y) log(1 - p)` with p the logit's sigmoid, from logits.

    The mean is over rows by their weights. Labels are from 0 to 1.

    Shape:
        As of `TaskLoss`; offsets are not read.

    Example:
        >>> import torch
        >>> from jagged.models import BinaryLoss
        >>> total, count = BinaryLoss()(torch.tensor([0.0, 2.0, -1.0]), torch.tensor([1, 1, 0]))
        >>> total / count
        tensor(0.3778)
    """

    def forward(
        self,
        logits: Tensor,
        labels: Tensor,
        offsets: Tensor | None = None,
        mask: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the sum of the rows' losses by their weights, and the sum of these."""
        rows = _rows(logits, labels, mask, weights)
        # PyTorch's own subtracts for a label of 0 two numbers that are nearly one, and loses digits of them.
        logsigmoid = nn.functional.logsigmoid
        each = (rows.labels - 1) * logsigmoid(-rows.logits) - rows.labels * logsigmoid(rows.logits)
        return (each * rows.weights).sum(), rows.weights.sum()


class FocalLoss(TaskLoss):
    """Binary cross entropy in which a row that is predicted well counts less: for many easy negatives.

    `-a y (1 - p)^gamma log p - (1 - a) (1 - y) p^gamma log(1 - p)`, with p the logit's sigmoid and a `alpha`; without alpha both
    factors a and `1 - a` are 1. Powers are computed from logarithms, so that logits may be of any finite size.

    The mean is over rows by their weights, not over positives alone as in the paper, as batches without a positive have no such
    mean. Labels are from 0 to 1; one between is the mixture of both terms. With a gamma above 0 the sigmoid of what is learnt is
    no longer the rate of positives: calibration shows by how much.

    Args:
        gamma: 0 for binary cross entropy; the larger, the less do easy rows count.
        alpha: what positives count, from 0 to 1, where negatives count `1 - alpha`; None counts both by 1.

    Raises:
        ValueError: a gamma below 0 or alpha outside of 0 to 1.

    Shape:
        As of `TaskLoss`; offsets are not read.

    Source:
        Lin et al., Focal Loss for Dense Object Detection, ICCV 2017, equations 4 and 5.

    Example:
        >>> import torch
        >>> from jagged.models import FocalLoss
        >>> total, count = FocalLoss(gamma=2.0)(torch.tensor([0.0, 2.0, -1.0]), torch.tensor([1, 1, 0]))
        >>> total / count
        tensor(0.0659)
    """

    def __init__(self, gamma: float = 2.0, alpha: float | None = None) -> None:
        super().__init__()
        if not 0 <= gamma < math.inf:
            raise ValueError(f"gamma: expected a finite number of at least 0, got {gamma}; 0 is binary cross entropy")
        if alpha is not None and not 0 <= alpha <= 1:
            raise ValueError(f"alpha: expected a number from 0 to 1, got {alpha}; None counts positives and negatives alike")
        self.gamma, self.alpha = gamma, alpha

    def extra_repr(self) -> str:
        """The arguments."""
        return f"gamma={self.gamma}, alpha={self.alpha}"

    def forward(
        self,
        logits: Tensor,
        labels: Tensor,
        offsets: Tensor | None = None,
        mask: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the sum of the rows' losses by their weights, and the sum of these."""
        rows = _rows(logits, labels, mask, weights)
        log_p, log_not_p = nn.functional.logsigmoid(rows.logits), nn.functional.logsigmoid(-rows.logits)
        of_positives, of_negatives = (1.0, 1.0) if self.alpha is None else (self.alpha, 1 - self.alpha)
        positive = of_positives * (self.gamma * log_not_p).exp() * log_p
        negative = of_negatives * (self.gamma * log_p).exp() * log_not_p
        each = -(rows.labels * positive + (1 - rows.labels) * negative)
        return (each * rows.weights).sum(), rows.weights.sum()


class ListwiseLoss(TaskLoss):
    """Softmax cross entropy over the candidates of each request: which of them is the one.

    `-sum_i (y_i / sum_j y_j) log softmax(s / temperature)_i` for each request with a label that is not 0. Requests without one,
    and those of which no row counts, count nothing. Labels are any numbers that are not negative, as grades of relevance.

    The mean is over the requests that count, each by the mean weight of its rows that count, as requests weigh in `ndcg@k` of
    `PointwiseMetrics`: a long request counts as much as a short one. Weights within a request change nothing else.

    The largest score is subtracted before anything is exponentiated, so that scores may be of any finite size, and sums are of
    float64: what is left of a request that is predicted well is a small difference. It costs O(S) time and memory, without
    padding and without waiting for the device.

    Args:
        temperature: what scores are divided by; the smaller, the more does the best candidate count.

    Raises:
        ValueError: a temperature that is not above 0.

    Shape:
        As of `TaskLoss`; offsets are needed.

    Source:
        ListNet's top-one loss with labels in proportion: Cao et al., Learning to Rank: From Pairwise Approach to Listwise
        Approach, ICML 2007; a bound of NDCG with such labels: Bruch et al., An Analysis of the Softmax Cost Function for Learning
        to Rank, ICTIR 2019, equation 3.

    Example:
        >>> import torch
        >>> from jagged.models import ListwiseLoss
        >>> scores, labels, offsets = torch.tensor([1.0, 0.0, 3.0, 2.0]), torch.tensor([1, 0, 0, 0]), torch.tensor([0, 2, 4])
        >>> total, count = ListwiseLoss()(scores, labels, offsets)
        >>> total, count
        (tensor(0.3133), tensor(1.))
    """

    over_requests: ClassVar[bool] = True

    def __init__(self, temperature: float = 1.0) -> None:
        super().__init__()
        if not 0 < temperature < math.inf:
            raise ValueError(f"temperature: expected a finite number above 0, got {temperature}; 1 leaves scores as they are")
        self.temperature = temperature

    def extra_repr(self) -> str:
        """The argument."""
        return f"temperature={self.temperature}"

    def forward(
        self,
        logits: Tensor,
        labels: Tensor,
        offsets: Tensor | None = None,
        mask: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the sum of the requests' losses by their weights, and the sum of these."""
        rows, offsets = _rows(logits, labels, mask, weights), _given(offsets)
        dtype = rows.logits.dtype
        rows = _Rows(rows.logits.double(), rows.labels.double(), rows.weights.double(), rows.counted)
        # Under autocast the sums would be of 16 bits.
        with torch.autocast(logits.device.type, enabled=False):
            gains, weight = _of_requests(rows, offsets)
            is_counted = gains > 0
            requests = sample_of_row(offsets, logits.shape[0])
            shares = rows.labels / gains.where(is_counted, 1)[requests]
            scores = rows.logits.detach().masked_fill(~rows.counted, -math.inf)
            largest = torch.segment_reduce(scores, "max", offsets=offsets, axis=0, unsafe=True)
            # A gather of what has no gradient: that of one that had would be added up by atomics.
            below = ((rows.logits - largest[requests]) / self.temperature).where(rows.counted, 0)
            sums = _sums(torch.stack([below.exp().where(rows.counted, 0), shares * below], 1), offsets)
            # Hidden before the logarithm, whose gradient at 0 is none.
            each = sums[:, 0].where(is_counted, 1).log() - sums[:, 1].where(is_counted, 0)
            weight = weight.where(is_counted, 0)
            return (each * weight).sum().to(dtype), weight.sum().to(dtype)


class PairwiseLoss(TaskLoss):
    """RankNet's logistic loss over the pairs of each request's candidates whose labels differ: which of two is the better.

    The mean of `log(1 + exp(-(s_i - s_j)))` over a request's pairs with `y_i > y_j`; then the mean over the requests that have
    such a pair, each by the mean weight of its rows that count. Only the order of labels matters: they may be any numbers.

    Nothing is padded. All `m^2` ordered pairs of a request's m candidates are made, so that no position has to be looked for:
    `sum m^2` pairs in time and memory. In float32 the backward pass keeps 20 bytes a pair, and 28 are there at the peak: 100
    requests of 100 candidates are a million pairs and 28 MB.

    Shape:
        As of `TaskLoss`; offsets are needed.

    Source:
        Burges et al., Learning to Rank using Gradient Descent, ICML 2005, equation 3 with a target probability of 1.

    Example:
        >>> import torch
        >>> from jagged.models import PairwiseLoss
        >>> scores, labels, offsets = torch.tensor([1.0, 0.0, 3.0, 2.0]), torch.tensor([1, 0, 0, 0]), torch.tensor([0, 2, 4])
        >>> total, count = PairwiseLoss()(scores, labels, offsets, num_pairs=8)
        >>> total, count
        (tensor(0.3133), tensor(1.))
    """

    over_requests: ClassVar[bool] = True

    def forward(
        self,
        logits: Tensor,
        labels: Tensor,
        offsets: Tensor | None = None,
        mask: Tensor | None = None,
        weights: Tensor | None = None,
        *,
        num_pairs: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the sum of the requests' losses by their weights, and the sum of these.

        Args:
            logits, labels, offsets, mask, weights: as of `TaskLoss`.
            num_pairs: `sum m^2` over the requests, the last of `jagged.ops.pair_offsets(offsets)`; None reads it from there,
                which waits for the device once, and cannot be compiled.

        Raises:
            ValueError: as of `TaskLoss`; no `num_pairs` in a compiled call.
        """
        rows, offsets = _rows(logits, labels, mask, weights), _given(offsets)
        if num_pairs is None and torch.compiler.is_compiling():
            raise ValueError(
                "num_pairs: expected the number of pairs in a compiled call, got None; "
                "give the last of jagged.ops.pair_offsets(offsets), as reading it waits for the device"
            )
        with torch.autocast(logits.device.type, enabled=False):
            # Where each row's pairs begin: as many as its request has candidates.
            pairs = offsets.diff().to(torch.int64)[sample_of_row(offsets, logits.shape[0])].cumsum(0)
            starts = torch.cat([pairs.new_zeros(1), pairs])
            total = int(starts[-1]) if num_pairs is None else num_pairs
            # A difference with NaN is NaN, which is not above 0: a row that does not count is in no pair.
            labels = rows.labels.masked_fill(~rows.counted, math.nan)
            is_better = jagged_pairwise_difference(labels, offsets, total) > 0
            differences = jagged_pairwise_difference(rows.logits, offsets, total)
            # `softplus` is linear from 20 on, which float64 sees.
            each = -nn.functional.logsigmoid(differences)
            # Row by row first: sums of m pairs and then of m rows are nearer than one of all.
            of_rows = _sums(torch.stack([each, torch.ones_like(each)], 1), starts, is_better.to(each.dtype))
            sums, numbers = _sums(of_rows.double(), offsets).unbind(1)
            numbers, (_, weight) = numbers.detach(), _of_requests(rows, offsets)
            weight = weight.double().where(numbers > 0, 0)
            dtype = rows.logits.dtype
            return (sums / numbers.clamp(min=1) * weight).sum().to(dtype), weight.sum().to(dtype)


def _given(offsets: Tensor | None) -> Tensor:
    if offsets is None:
        raise ValueError("offsets: expected [R + 1], the candidates of each request, got None; give batch.candidate_offsets")
    return offsets


def _sums(values: Tensor, offsets: Tensor, factors: Tensor | None = None) -> Tensor:
    """The sum of each sample's rows `[S, C]`, times factors `[S]` where there are some: `[R, C]`, added in a fixed order."""
    factors = values.new_ones(values.shape[0]) if factors is None else factors
    return jagged_jagged_bmm(factors[:, None], values, offsets)[:, 0]


def _of_requests(rows: _Rows, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of labels of each request, `[R]`, and the mean weight of its rows that count, 0 where none does."""
    counts = rows.counted.to(rows.weights.dtype)
    gains, number, weight = _sums(torch.stack([rows.labels, counts, rows.weights], 1), offsets).unbind(1)
    return gains, weight / number.clamp(min=1)


def loss_of(name: LossName, *, focal_gamma: float = 2.0, focal_alpha: float | None = None) -> TaskLoss:
    """The loss of a name of `LOSSES`."""
    if name == "focal":
        return FocalLoss(focal_gamma, focal_alpha)
    return cast("dict[str, type[TaskLoss]]", {"binary": BinaryLoss, "listwise": ListwiseLoss, "pairwise": PairwiseLoss})[name]()
