"""Metrics of models that rank the labels of samples which have several each: extreme classification.

Every figure is a function of integers: how often a label of its own stood at each place of a sample, and weights of labels as
whole multiples of a fixed unit. Integers are added exactly, so the result depends neither on how samples were batched nor on how
they were spread over processes.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jagged.artifacts.errors import shown
from jagged.data.errors import at, refuse
from jagged.ops import sample_of_row

__all__ = ["DEFAULT_KS", "LabelFilter", "LabelMetrics", "propensities"]

#: Cut-offs where none are asked for.
DEFAULT_KS = (1, 3, 5, 10)

# Shares and weights are multiples of a unit of 2^-52 of what they are at most. A sum keeps them as two words, so that 2^37 of
# them fit into each.
_BITS, _LOW_BITS = 52, 26

_PAIR = re.compile(rb"\s*([0-9]{1,18})\s+([0-9]{1,18})\s*")


def propensities(label_counts: Tensor, num_rows: int, a: float = 0.55, b: float = 1.5) -> Tensor:
    """Inverse propensities: how much a found label weighs that training has seldom.

    A label that n of the N samples have weighs `1 + (ln N - 1) (b + 1)^a (n + b)^-a`.

    Args:
        label_counts: `[L]` of an integer dtype, training samples that have each label, n.
        num_rows: training samples, N.
        a, b: 0.5 and 0.4 for data of Wikipedia, 0.6 and 2.6 of Amazon, 0.55 and 1.5 of others.

    Returns:
        `[L]` float64, all above 1.

    Raises:
        ValueError: counts of another shape or dtype or out of 0 to N, fewer than three samples (rare labels would weigh less than
            frequent ones), or an a or b that is not above 0.

    Source:
        Jain, Prabhu & Varma, "Extreme Multi-label Loss Functions for Recommendation, Tagging, Ranking & Other Missing Label
        Applications", KDD 2016, section 4.
    """
    if label_counts.dim() != 1 or label_counts.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"label_counts: got shape {tuple(label_counts.shape)} of {label_counts.dtype}, "
            "expected [L] of torch.int64 or torch.int32"
        )
    if num_rows < 3:
        raise ValueError(f"num_rows: got {num_rows}, expected 3 or more training samples")
    if not (0 < a < math.inf and 0 < b < math.inf):
        raise ValueError(f"a, b: got {a} and {b}, expected numbers above 0, for example 0.55 and 1.5")
    if len(label_counts) and (int(label_counts.min()) < 0 or int(label_counts.max()) > num_rows):
        raise ValueError(
            f"label_counts: got {int(label_counts.min())} to {int(label_counts.max())}, expected 0 to num_rows, {num_rows}"
        )
    return 1 + (math.log(num_rows) - 1) * (b + 1) ** a * (label_counts.double() + b) ** -a


@dataclass(frozen=True)
class LabelFilter:
    """Pairs of a sample and a label that are left out of the ranking, as a document's own title among the titles it may point to.

    Positives are left as they are. What is filtered and a positive cannot be found; to leave it out of both is up to the caller.

    Args:
        labels: int64 `[F]`, the filtered labels of the first sample, then of the second, and so on.
        offsets: int64 or int32 `[B + 1]`, where each sample's begin.

    Raises:
        ValueError: tensors of other shapes or dtypes or of two devices; on a CPU also offsets that do not go from 0 up to F.
    """

    labels: Tensor
    offsets: Tensor

    def __post_init__(self) -> None:
        _check_jagged("labels", self.labels, "offsets", self.offsets)

    @classmethod
    def read(cls, path: str | os.PathLike[str], num_samples: int, num_labels: int) -> LabelFilter:
        """Read a file of pairs, as `filter_labels_test.txt` of the LF data sets is.

        A line has two whole numbers, the sample and the label, both from 0. Lines may come in any order; a pair that is there
        twice counts once.

        Args:
            path: of the file.
            num_samples: samples of the part that is filtered, B.
            num_labels: labels in all, L.

        Raises:
            DataError: a line that is no such pair; the message has its number.
            OSError: the file cannot be read.
        """
        found: list[int] = []
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                pair = _PAIR.fullmatch(line)
                if pair is None:
                    text = line.rstrip(b"\r\n").decode(errors="replace")
                    raise refuse(at(path, number), shown(text), "two whole numbers, a sample and a label, for example '12 345'")
                sample, label = int(pair[1]), int(pair[2])
                if sample >= num_samples or label >= num_labels:
                    what, value, limit = ("label", label, num_labels) if sample < num_samples else ("sample", sample, num_samples)
                    raise refuse(
                        at(path, number),
                        f"{what} {value}",
                        f"a {what} from 0 to {limit - 1}" if limit else f"no line, for there is no {what}",
                        "is the file of this part of these data?",
                    )
                found.append(sample * num_labels + label)
        pairs = torch.unique(torch.tensor(found, dtype=torch.int64))
        counts = torch.bincount(pairs // max(num_labels, 1), minlength=num_samples)
        return cls(pairs % max(num_labels, 1), torch.cat([counts.new_zeros(1), torch.cumsum(counts, 0)]))

    def part(self, first: int, last: int) -> LabelFilter:
        """The filter of the samples from `first` up to, without, `last`; cut before it is moved to a GPU, it waits for none."""
        num_samples = len(self.offsets) - 1
        if not 0 <= first <= last <= num_samples:
            raise ValueError(f"first, last: got {first} and {last}, expected 0 <= first <= last <= {num_samples}")
        offsets = self.offsets[first : last + 1]
        return LabelFilter(self.labels[int(offsets[0]) : int(offsets[-1])], offsets - offsets[0])

    def to(self, device: torch.device | str) -> LabelFilter:
        """The same on a device."""
        return LabelFilter(self.labels.to(device), self.offsets.to(device))

    def top(self, candidates: Tensor, k: int) -> Tensor:
        """The best k candidates of each sample that are not filtered.

        Args:
            candidates: int64 `[B, C]`, labels, best first, -1 where there are fewer. With C of k and the most filtered labels of
                any sample nothing is missed.
            k: how many to give.

        Returns:
            int64 `[B, k]`, in the same order, -1 where there are fewer.

        Raises:
            ValueError: candidates of another shape, dtype or device, or a k below 1.
        """
        num_samples = len(self.offsets) - 1
        _check_ranking("candidates", candidates, num_samples, "[B, C]")
        _check_device("candidates", candidates, "the filter", self.labels.device)
        if k < 1:
            raise ValueError(f"k: got {k}, expected 1 or more")
        if candidates.numel() == 0:
            return candidates.new_full((num_samples, k), -1)
        # Labels beyond all candidates would be taken for those of the next sample.
        base = candidates.max() + 1
        sample = sample_of_row(self.offsets.long(), len(self.labels))
        keys = torch.where((self.labels >= 0) & (self.labels < base), sample * base + self.labels, -1)
        is_left = (candidates >= 0) & ~_is_among(candidates, keys.sort().values, base)
        order = torch.argsort((~is_left).to(torch.uint8), dim=1, stable=True)[:, :k]
        best = torch.where(is_left, candidates, -1).gather(1, order)
        return torch.nn.functional.pad(best, (0, k - best.shape[1]), value=-1)


class LabelMetrics:
    """P, PSP, nDCG, PSnDCG and Recall at several cut-offs, for samples that have any number of positive labels.

    With P the number of a sample's positives, `hit(r)` 1 where the label at place r (0 is best) is one of them, else 0, `w(r)`
    this label's weight, `d(r) = 1 / log2(r + 2)` and `D(n) = d(0) + ... + d(n - 1)`, sums over r < k and means over samples:

    * `p@k`: mean of `sum hit(r) / k`. A sample with fewer than k positives does not reach 1.
    * `psp@k`: mean of `sum w(r) hit(r) / k`, divided by the same mean of the best order, which has each sample's positives with
      the largest weights first. It is a ratio of means, not a mean of ratios.
    * `ndcg@k`: mean of `sum d(r) hit(r) / D(min(k, P))`.
    * `psndcg@k`: mean of `sum w(r) d(r) hit(r) / D(min(k, P))`, divided by the same mean of the best order. Both are divided by
      the sum of discounts, and only their means by one another.
    * `recall@k`: mean of `sum hit(r) / P`.

    Means are over the samples that have a positive. `samples` is how many these are, `samples_without_positives` how many others
    were left out. `psp@k` and `psndcg@k` are there where weights are given. A figure that no sample defines is NaN.

    The same samples give the same bits, whatever the batches and the processes. For it a sample's shares of recall are rounded,
    by at most 2^-53, and weights by at most 2^-53 of the power of two above the largest.

    Args:
        num_labels: labels in all, L.
        weights: `[L]`, above 0, of the labels, for example `propensities`; None for no figures with weights.
        ks: the cut-offs, any; one beyond L counts all labels, and `p@k` is divided by k all the same.
        device: where the sums live, and where tensors of `update` must be; on a GPU it runs without a synchronisation.

    Raises:
        ValueError: no labels, a cut-off below 1 or given twice, none given, or weights of another shape or not above 0.

    Source:
        The figures are those of `xclib.evaluation.xc_metrics` (pyxclib), after Jain et al., KDD 2016. It has the same means over
        all samples, those without positives as 0: `p@k`, `ndcg@k` and `recall@k` are then smaller by the share of these.
    """

    def __init__(
        self,
        num_labels: int,
        weights: Tensor | None = None,
        ks: Sequence[int] = DEFAULT_KS,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        if num_labels < 1:
            raise ValueError(f"num_labels: got {num_labels}, expected 1 or more")
        if not ks or min(ks) < 1 or len(set(ks)) != len(ks):
            raise ValueError(f"ks: got {tuple(ks)}, expected distinct cut-offs of at least 1, for example (1, 3, 5, 10)")
        self.num_labels, self.ks = num_labels, tuple(sorted(ks))
        #: How many of each sample's best labels count.
        self.depth = min(self.ks[-1], num_labels)
        self._units = None if weights is None else _units(weights, num_labels, device)
        # All sums in one tensor. Samples by their positives, at most `depth`; by these and the place the hits, and in two words
        # the weights of hits and of the best order; for each cut-off the shares of positives that were found.
        cells = (self.depth + 1) * self.depth
        sizes = [self.depth + 1, cells, 2 * cells, 2 * cells, 2 * len(self.ks)]
        self._sums = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        samples, hits, hit_weights, best_weights, recalls = self._sums.split(sizes)
        self._samples, self._hits = samples, hits
        self._hit_weights, self._best_weights = hit_weights.view(2, cells), best_weights.view(2, cells)
        self._recalls = recalls.view(2, len(self.ks))

    def update(self, top_labels: Tensor, positives: Tensor, positive_offsets: Tensor) -> None:
        """Add samples.

        Args:
            top_labels: int64 `[B, depth]` or wider, each sample's best labels in order; -1 where there are fewer.
            positives: int64 `[sum of P]`, the labels of the first sample in any order, then those of the second, and so on.
            positive_offsets: int64 or int32 `[B + 1]`, where each sample's begin.

        Raises:
            ValueError: tensors of other shapes, dtypes or devices. On a CPU also offsets that do not go from 0 up to the number
                of positives, labels out of range, and a label that a sample's ranking or positives name twice. On a GPU values
                are not looked at, so that nothing waits for it: they must be right.
        """
        _check_jagged("positives", positives, "positive_offsets", positive_offsets)
        _check_ranking("top_labels", top_labels, len(positive_offsets) - 1, f"[B, {self.depth}] (the largest cut-off) or wider")
        if top_labels.shape[1] < self.depth:
            raise ValueError(
                f"top_labels: got shape {tuple(top_labels.shape)}, expected [B, {self.depth}] (the largest cut-off) or wider; "
                "put -1 where there are fewer labels"
            )
        for name, tensor in (("top_labels", top_labels), ("positives", positives)):
            _check_device(name, tensor, "the metrics", self._sums.device)
        top, offsets, depth = top_labels[:, : self.depth], positive_offsets.long(), self.depth
        sample = sample_of_row(offsets, len(positives))
        keys = (sample * self.num_labels + positives).sort().values
        if self._sums.is_cpu:
            self._check_values(top, positives, keys)
        if not len(top):
            return

        lengths = offsets.diff()
        kind = lengths.clamp(max=depth)
        hit = _is_among(top, keys, self.num_labels)
        self._samples.scatter_add_(0, kind, torch.ones_like(kind))
        cell = (kind[:, None] * depth + torch.arange(depth, device=top.device)).flatten()
        self._hits.scatter_add_(0, cell, hit.flatten().long())

        found = torch.cumsum(hit, 1)
        found = torch.stack([found[:, min(k, depth) - 1] for k in self.ks], 1)
        share = found.double() / lengths.clamp(min=1)[:, None]
        for word, recall in zip(_words((share * 2.0**_BITS).round().long()), self._recalls, strict=True):
            recall += word.sum(0)

        if self._units is None:
            return
        weight = torch.where(hit, self._units[torch.where(hit, top, 0)], 0).flatten()
        _add(self._hit_weights, cell, weight)
        units = self._units[positives]
        order = torch.argsort(units, descending=True, stable=True)
        order = order[torch.argsort(sample[order], stable=True)]
        place = torch.arange(len(positives), device=top.device) - offsets[sample]
        best = torch.where(place < depth, units[order], 0)
        _add(self._best_weights, kind[sample] * depth + place.clamp(max=depth - 1), best)

    def merge(self, other: LabelMetrics) -> None:
        """Add the samples of another object with the same labels, weights and cut-offs."""
        if (other.num_labels, other.ks) != (self.num_labels, self.ks):
            raise ValueError(
                f"other: got {other.num_labels} labels and cut-offs {other.ks}, expected {self.num_labels} and {self.ks}"
            )
        if (other._units is None) != (self._units is None) or (
            other._units is not None and self._units is not None and not torch.equal(other._units.cpu(), self._units.cpu())
        ):
            raise ValueError("other: got other weights of the labels, expected the same")
        self._sums += other._sums.to(self._sums.device)

    def all_reduce(self, group: Any = None) -> None:
        """Add up the samples of all processes of a `torch.distributed` group; afterwards every one holds the sum."""
        torch.distributed.all_reduce(self._sums, group=group)

    @property
    def num_samples(self) -> int:
        """Samples with a positive seen so far."""
        return int(self._samples[1:].sum())

    @property
    def num_without_positives(self) -> int:
        """Samples without a positive seen so far, which no figure counts."""
        return int(self._samples[0])

    def compute(self) -> dict[str, float]:
        """All figures, `{"p@1": ..., ...}`, in float64."""
        samples = self.num_samples
        shape = (self.depth + 1, self.depth)
        hits = self._hits.cpu().double().view(shape)
        hit_weights, best_weights = (_joined(words).view(shape) for words in (self._hit_weights, self._best_weights))
        discount = 1 / torch.log2(torch.arange(self.ks[-1], dtype=torch.float64) + 2)
        total = torch.cumsum(discount, 0)
        # Nothing stands in the line of samples without positives.
        kinds = torch.arange(self.depth + 1).clamp(min=1)
        gains = {k: discount[: self.depth] / total[kinds.clamp(max=k) - 1][:, None] for k in self.ks}

        def summed(of: Tensor, k: int) -> float:
            return float(of[:, :k].sum())

        result = {f"p@{k}": _ratio(summed(hits, k), k * samples) for k in self.ks}
        if self._units is not None:
            result |= {f"psp@{k}": _ratio(summed(hit_weights, k), summed(best_weights, k)) for k in self.ks}
        result |= {f"ndcg@{k}": _ratio(summed(hits * gains[k], k), samples) for k in self.ks}
        if self._units is not None:
            result |= {
                f"psndcg@{k}": _ratio(summed(hit_weights * gains[k], k), summed(best_weights * gains[k], k)) for k in self.ks
            }
        shares = (_joined(self._recalls) / 2.0**_BITS).tolist()
        result |= {f"recall@{k}": _ratio(share, samples) for k, share in zip(self.ks, shares, strict=True)}
        return result | {"samples": float(samples), "samples_without_positives": float(self.num_without_positives)}

    def _check_values(self, top: Tensor, positives: Tensor, keys: Tensor) -> None:
        """Refuse labels out of range or named twice; `keys` are the sorted pairs of a sample and a positive."""
        for name, of, least, expected in (("top_labels", top, -1, ", or -1 for none"), ("positives", positives, 0, "")):
            if of.numel() and not (least <= int(of.min()) and int(of.max()) < self.num_labels):
                raise ValueError(
                    f"{name}: got labels {int(of.min())} to {int(of.max())}, expected 0 to {self.num_labels - 1}{expected}"
                )
        ranked = top.sort(1).values
        again = ((ranked[:, 1:] == ranked[:, :-1]) & (ranked[:, 1:] >= 0)).nonzero()
        if len(again):
            sample, place = again[0].tolist()
            label = int(ranked[sample, place + 1])
            raise ValueError(f"top_labels: got label {label} twice in sample {sample}, expected each label once")
        again = (keys[1:] == keys[:-1]).nonzero()
        if len(again):
            sample, label = divmod(int(keys[int(again[0]) + 1]), self.num_labels)
            raise ValueError(f"positives: got label {label} twice in sample {sample}, expected each label once")


def _check_ranking(name: str, labels: Tensor, num_samples: int, expected: str) -> None:
    if labels.dim() != 2 or len(labels) != num_samples or labels.dtype != torch.int64:
        raise ValueError(
            f"{name}: got shape {tuple(labels.shape)} of {labels.dtype}, expected {expected} of torch.int64 with "
            f"B = {num_samples}, as the offsets say"
        )


def _check_jagged(name: str, labels: Tensor, of_offsets: str, offsets: Tensor) -> None:
    if labels.dim() != 1 or labels.dtype != torch.int64:
        raise ValueError(f"{name}: got shape {tuple(labels.shape)} of {labels.dtype}, expected one dimension of torch.int64")
    if offsets.dim() != 1 or len(offsets) < 1 or offsets.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"{of_offsets}: got shape {tuple(offsets.shape)} of {offsets.dtype}, expected [B + 1] of torch.int64 or torch.int32"
        )
    _check_device(of_offsets, offsets, name, labels.device)
    if not labels.is_cpu:
        return
    if int(offsets[0]) != 0 or int(offsets[-1]) != len(labels) or bool((offsets.diff() < 0).any()):
        raise ValueError(
            f"{of_offsets}: got {shown(offsets.tolist())}, expected numbers from 0 up to {len(labels)}, the length of {name}, "
            "none smaller than the one before"
        )


def _check_device(name: str, tensor: Tensor, other: str, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(f"{name}: got a tensor on {tensor.device}, expected {device}, the device of {other}")


def _units(weights: Tensor, num_labels: int, device: torch.device | str | None) -> Tensor:
    """`[L]` int64: weights as multiples of 2^-52 of the power of two above the largest."""
    if weights.shape != (num_labels,) or not weights.is_floating_point():
        raise ValueError(
            f"weights: got shape {tuple(weights.shape)} of {weights.dtype}, expected ({num_labels},) of a floating-point dtype"
        )
    weights = weights.detach().double()
    if not bool(((weights > 0) & (weights < math.inf)).all()):
        bad = int((~((weights > 0) & (weights < math.inf))).nonzero()[0])
        raise ValueError(f"weights: got {float(weights[bad])} for label {bad}, expected finite numbers above 0")
    # Powers of two beyond these are none of float64.
    exponent = max(math.frexp(float(weights.max()))[1], -1000)
    return (weights * 2.0**-exponent * 2.0**_BITS).round().long().to(device)


def _is_among(labels: Tensor, keys: Tensor, base: Tensor | int) -> Tensor:
    """Whether labels `[B, C]` are among the sorted `keys`, `sample * base + label`."""
    if not len(keys):
        return torch.zeros_like(labels, dtype=torch.bool)
    asked = torch.arange(len(labels), device=labels.device)[:, None] * base + labels
    place = torch.searchsorted(keys, asked).clamp(max=len(keys) - 1)
    return (labels >= 0) & (keys[place] == asked)


def _words(units: Tensor) -> tuple[Tensor, Tensor]:
    return units >> _LOW_BITS, units & ((1 << _LOW_BITS) - 1)


def _add(sums: Tensor, cells: Tensor, units: Tensor) -> None:
    for word, of in zip(_words(units), sums, strict=True):
        of.scatter_add_(0, cells, word)


def _joined(words: Tensor) -> Tensor:
    high, low = words.cpu().double()
    return high * 2.0**_LOW_BITS + low


def _ratio(value: float, total: float) -> float:
    return value / total if total else math.nan
