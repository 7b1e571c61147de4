"""Groups of labels that lie side by side in an output layer: alike, as frequent, or at random."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

# Labels that are looked at together where clusters are fitted, times how many are looked at in all; and similarities of a piece.
_BATCH, _BATCHES = 8192, 50
_PIECE_ELEMENTS = 2**24


class LabelGroups(NamedTuple):
    """Labels `[n]` (int64), those of group g being `labels[offsets[g] : offsets[g + 1]]`; offsets `[K + 1]` (int64)."""

    labels: Tensor
    offsets: Tensor


def group_at_random(labels: Tensor, group_size: int, seed: int = 0) -> LabelGroups:
    """Put labels into groups at random.

    Args:
        labels: `[n]`, int64, no label twice.
        group_size: labels of a group, at least 1; the last group may have fewer.
        seed: of the draw, which is the same on every device.

    Example:
        >>> import torch
        >>> from jagged.modules import group_at_random
        >>> group_at_random(torch.arange(5), group_size=2).offsets
        tensor([0, 2, 4, 5])
    """
    order = torch.randperm(labels.shape[0], generator=torch.Generator().manual_seed(seed)).to(labels.device)
    return _in_order(labels[order], group_size)


def group_by_frequency(labels: Tensor, counts: Tensor, group_size: int) -> LabelGroups:
    """Put labels that are about as frequent into one group, the most frequent ones first.

    Args:
        labels: `[n]`, int64, no label twice.
        counts: `[n]`, how often each comes.
        group_size: labels of a group, at least 1; the last group may have fewer.

    Example:
        >>> import torch
        >>> from jagged.modules import group_by_frequency
        >>> group_by_frequency(torch.tensor([0, 1, 2, 3]), torch.tensor([5, 90, 7, 80]), group_size=2).labels
        tensor([1, 3, 2, 0])
    """
    return _in_order(labels[counts.argsort(descending=True, stable=True)], group_size)


def group_by_embedding(
    labels: Tensor, embeddings: Tensor, group_size: int, *, groups_per_cluster: int = 16, seed: int = 0
) -> LabelGroups:
    """Put labels with like embeddings into one group.

    Embeddings are normalised, and clustered by spherical k-means on mini-batches, some groups a cluster. In a cluster, the first
    label that is left and those nearest to it are a group, until none is left; so a cluster's last group may have fewer labels.
    Labels whose embedding is zero, as of those that no sample has, are grouped among themselves at random.

    Args:
        labels: `[n]`, int64, no label twice.
        embeddings: `[n, E]`, floating point, such as the mean of the features of each label's samples; work is done on its
            device.
        group_size: labels of a group, at least 1.
        groups_per_cluster: how many groups' labels a cluster has on average.
        seed: of the first centres and the batches. Sums on a GPU come in any order, so groups may differ between calls there.

    Source:
        Label grouping as in HASTE. K-means on mini-batches: Sculley, Web-Scale K-Means Clustering, WWW 2010; spherical: Dhillon
        and Modha, Concept Decompositions for Large Sparse Text Data, 2001.

    Example:
        >>> import torch
        >>> from jagged.modules import group_by_embedding
        >>> embeddings = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.9, 0.1], [0.1, 0.9]])
        >>> group_by_embedding(torch.arange(4), embeddings, group_size=2).labels
        tensor([0, 2, 1, 3])
    """
    generator = torch.Generator().manual_seed(seed)
    has_one = embeddings.abs().amax(1) > 0 if embeddings.shape[1] else torch.zeros_like(labels, dtype=torch.bool)
    known, vectors = labels[has_one.to(labels.device)], normalize(embeddings[has_one].float(), dim=1)
    cluster = _clusters(vectors, max(1, known.shape[0] // (groups_per_cluster * group_size)), generator)
    order = cluster.argsort(stable=True)
    sizes = torch.bincount(cluster, minlength=1).tolist()
    placed, lengths = [known[:0]], [0]
    for some in order.split(sizes) if known.shape[0] else ():
        while some.shape[0]:
            similarity = vectors[some] @ vectors[some[0]]
            # The first one is the nearest to itself, whatever rounding says.
            similarity[0] = torch.inf
            nearest = similarity.topk(min(group_size, some.shape[0])).indices
            placed.append(known[some[nearest].to(known.device)])
            lengths.append(nearest.shape[0])
            left = torch.ones_like(some, dtype=torch.bool)
            left[nearest] = False
            some = some[left]
    rest = group_at_random(labels[~has_one.to(labels.device)], group_size, seed)
    ends = torch.tensor(lengths, device=labels.device).cumsum(0)
    return LabelGroups(torch.cat([*placed, rest.labels]), torch.cat([ends, rest.offsets[1:] + ends[-1]]))


def _in_order(labels: Tensor, group_size: int) -> LabelGroups:
    if group_size < 1:
        raise ValueError(f"group_size: expected at least 1, got {group_size}")
    firsts = torch.arange(0, labels.shape[0], group_size, device=labels.device)
    return LabelGroups(labels, torch.cat([firsts, firsts.new_tensor([labels.shape[0]])]))


def _clusters(vectors: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return the cluster `[n]` of each vector by spherical k-means on mini-batches; vectors and centres have length 1."""
    total = vectors.shape[0]
    if count == 1:
        return torch.zeros(total, dtype=torch.int64, device=vectors.device)

    def drawn(size: int) -> Tensor:
        return torch.randperm(total, generator=generator)[:size].to(vectors.device)

    centres = vectors[drawn(count)]
    seen = vectors.new_zeros(count)
    for _ in range(min(_BATCHES, max(10, 10 * total // _BATCH))):
        batch = vectors[drawn(max(_BATCH, 2 * count))]
        nearest = _nearest(batch, centres)
        sizes = torch.bincount(nearest, minlength=count).to(vectors.dtype)
        sums = torch.zeros_like(centres).index_add_(0, nearest, batch)
        # The mean of all that a centre has seen; one that has seen nothing for long moves at once.
        seen = 0.9 * seen + sizes
        centres = normalize(torch.where((sizes > 0)[:, None], centres * (seen - sizes)[:, None] + sums, centres), dim=1)
    return _nearest(vectors, centres)


def _nearest(vectors: Tensor, centres: Tensor) -> Tensor:
    """Return the centre `[n]` with the largest product, some vectors at a time."""
    rows = max(1, _PIECE_ELEMENTS // centres.shape[0])
    return torch.cat([(some @ centres.t()).argmax(1) for some in vectors.split(rows)])
