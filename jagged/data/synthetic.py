"""Sessions with planted structure, whose best attainable NDCG@10 is known because the generating distribution is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from jagged.artifacts import writing
from jagged.data.build import BuildOptions, build
from jagged.data.dataset import SequenceDataset, own_temporary, temporary_directory
from jagged.data.errors import DataError
from jagged.data.sources import new_table
from jagged.data.splits import SequencePart, split_leave_one_out
from jagged.data.tabular import Block

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_SERIES = (
    "atlas",
    "bakery",
    "comet",
    "desert",
    "ember",
    "forest",
    "garden",
    "harbor",
    "island",
    "jungle",
    "kettle",
    "lantern",
    "meadow",
    "nectar",
    "orchard",
    "pepper",
    "quartz",
    "river",
    "saffron",
    "thunder",
    "umber",
    "valley",
    "willow",
    "zephyr",
)
# How far ahead in its series the next volume lies: 1, 2 or 3, and with what probability.
_STEPS = np.array([0.65, 0.25, 0.10])
# Continue the last event's series, or that of the event before it, or jump to a popular volume.
_CONTINUE, _RETURN, _JUMP = 0.50, 0.25, 0.25


@dataclass(frozen=True)
class Attainable:
    """What a ranker can reach on the leave-one-out test of one sample: the whole catalogue ranked, seen items left in.

    Attributes:
        ndcg10: NDCG@10 of ranking by the true distribution of the next item given the whole history; none is better in
            expectation.
        popularity_ndcg10: NDCG@10 of ranking by how often an item occurs in training.
    """

    ndcg10: float
    popularity_ndcg10: float


class SessionModel:
    """The generating distribution: readers of several series who go on with one of the two they read last.

    Volumes of one series form a ring. The next event is, with probability 0.50, one of the next three volumes of the last
    event's series (0.65, 0.25, 0.10); with 0.25 one of the next three of the event before it; with 0.25 any volume, by Zipf's
    law. So the next item depends on the last two events and on nothing else, and its distribution is a sum of three known ones.

    Args:
        num_items: size of the catalogue.
        rng: draws which volumes are popular.
    """

    def __init__(self, num_items: int, rng: np.random.Generator) -> None:
        self.num_items = num_items
        self.volumes = -(-num_items // len(_SERIES))
        weight = 1.0 / (np.arange(num_items) + 4.0)
        self.popularity: FloatArray = np.empty(num_items)
        # Sorted uniform numbers, not a library shuffle: the same sample under every numpy version.
        self.popularity[np.argsort(rng.random(num_items), kind="stable")] = weight / weight.sum()

    def name(self, item: int) -> str:
        """A readable id, such as `harbor-07`."""
        return f"{_SERIES[item // self.volumes]}-{item % self.volumes + 1:02d}"

    def ahead(self, item: IntArray, steps: IntArray) -> IntArray:
        """The volume `steps` further in the ring of an item's series."""
        first = item // self.volumes * self.volumes
        size = np.minimum(self.volumes, self.num_items - first)
        return first + (item - first + steps) % size

    def next_probabilities(self, last: IntArray, before: IntArray) -> FloatArray:
        """Probability of every item to come next, `[n, num_items]`, given the last item and the one before it (both `[n]`)."""
        result = np.tile(_JUMP * self.popularity, (len(last), 1))
        rows = np.arange(len(last))
        for share, source in ((_CONTINUE, last), (_RETURN, before)):
            for step, probability in enumerate(_STEPS, start=1):
                np.add.at(result, (rows, self.ahead(source, np.full(len(last), step))), share * probability)
        return result

    def draw(self, last: IntArray, before: IntArray, rng: np.random.Generator) -> IntArray:
        """One next item for each history."""
        kind, step, jump = rng.random((3, len(last)))
        steps = 1 + np.searchsorted(np.cumsum(_STEPS)[:-1], step, side="right")
        jumped = np.searchsorted(np.cumsum(self.popularity)[:-1], jump, side="right")
        source = np.where(kind < _CONTINUE, last, before)
        return np.where(kind < _CONTINUE + _RETURN, self.ahead(source, steps), jumped).astype(np.int64)


def synthetic_sessions(
    seed: int = 0, *, num_users: int = 3000, num_items: int = 600, mean_length: int = 16, max_length: int = 50
) -> tuple[SequenceDataset, Attainable]:
    """Generate the sample of `make demo`: users with string ids and times, and what a ranker can reach on it.

    See `SessionModel` for the structure. Lengths are geometric with a minimum of 5.

    Args:
        seed: the sample is a function of it and of the sizes.
        num_users, num_items: at least 1 user; at least 96 items, four volumes in each of 24 series.
        mean_length, max_length: of a user's events; `5 < mean_length <= max_length`.

    Raises:
        ValueError: sizes out of range.
        DataError: the temporary directory that holds it cannot be made or written.
    """
    if num_users < 1 or num_items < 4 * len(_SERIES) or not 5 < mean_length <= max_length:
        raise ValueError(
            f"sizes: got num_users={num_users}, num_items={num_items}, mean_length={mean_length}, max_length={max_length}, "
            f"expected at least 1 user, at least {4 * len(_SERIES)} items and 5 < mean_length <= max_length"
        )
    rng = np.random.Generator(np.random.PCG64(seed))
    model = SessionModel(num_items, rng)
    tail = np.floor(np.log1p(-rng.random(num_users)) / np.log1p(-1.0 / (mean_length - 4.0)))
    lengths = np.minimum(5 + tail, max_length).astype(np.int64)
    drawn = np.empty((num_users, int(lengths.max())), dtype=np.int64)
    drawn[:, :2] = np.floor(rng.random((num_users, 2)) * num_items)
    for t in range(2, drawn.shape[1]):
        drawn[:, t] = model.draw(drawn[:, t - 1], drawn[:, t - 2], rng)
    # Minutes since 1970: a user starts within a year and comes back within three days.
    gaps = 1 + np.floor(rng.random(drawn.shape) * 4320).astype(np.int64)
    gaps[:, 0] = 28_000_000 + np.floor(rng.random(num_users) * 525_600).astype(np.int64)
    kept = np.arange(drawn.shape[1]) < lengths[:, None]
    dataset = _to_dataset(model, lengths, drawn[kept], gaps.cumsum(axis=1)[kept])
    return dataset, attainable(model, dataset)


def attainable(model: SessionModel, dataset: SequenceDataset) -> Attainable:
    """Rank the leave-one-out test targets of a sample by its own model's distribution, and by popularity."""
    split = split_leave_one_out(dataset)
    number = {model.name(item): item for item in range(model.num_items)}
    of_dense = np.array([number[name] for name in dataset.items.ids.to_pylist()])
    counts = np.zeros(model.num_items)
    counts[of_dense] = split.train.item_counts().numpy()
    return Attainable(
        ndcg10=_optimal_ndcg(model, split.test, of_dense), popularity_ndcg10=_popularity_ndcg(split.test, counts, of_dense)
    )


def _optimal_ndcg(model: SessionModel, part: SequencePart, of_dense: IntArray) -> float:
    assert part.target is not None
    items = of_dense[part.dataset.item_ids.numpy()]
    target, end = part.target.numpy(), part.end.numpy()
    gains = []
    for rows in np.array_split(np.arange(len(part)), -(-len(part) // 512)):
        scores = model.next_probabilities(items[end[rows] - 1], items[end[rows] - 2])
        gains.append(_gain(scores, items[target[rows]]))
    return float(np.concatenate(gains).mean())


def _popularity_ndcg(part: SequencePart, counts: FloatArray, of_dense: IntArray) -> float:
    assert part.target is not None
    target = of_dense[part.dataset.item_ids[part.target].numpy()]
    return float(_gain(np.broadcast_to(counts, (1, len(counts))), target).mean())


def _gain(scores: FloatArray, target: IntArray) -> FloatArray:
    """NDCG@10 of one target a row, `[n]`; equal scores rank in catalogue order."""
    own = np.take_along_axis(np.broadcast_to(scores, (len(target), scores.shape[1])), target[:, None], axis=1)
    ahead = (scores > own) | ((scores == own) & (np.arange(scores.shape[1]) < target[:, None]))
    rank = ahead.sum(axis=1)
    gain: FloatArray = np.where(rank < 10, 1.0 / np.log2(rank + 2.0), 0.0)
    return gain


def _to_dataset(model: SessionModel, lengths: IntArray, items: IntArray, times: IntArray) -> SequenceDataset:
    cure = "set TMPDIR to a directory on a disk with room"
    width = len(str(len(lengths)))
    names = pa.array([model.name(item) for item in range(model.num_items)], pa.large_string())
    users = pa.array([f"user_{number:0{width}d}" for number in range(1, len(lengths) + 1)], pa.large_string())
    bounds = pa.array(np.concatenate(([0], np.cumsum(lengths))))
    lists = [pa.LargeListArray.from_arrays(bounds, values) for values in (names.take(pa.array(items)), pa.array(times))]
    rows = pa.record_batch([users, *lists], names=["user", "item", "time"])
    block = Block(rows, np.arange(len(lengths)), "synthetic sessions", "row ")
    with (
        temporary_directory(cure) as directory,
        new_table("synthetic sessions", rows.schema, directory=directory.parent, cure=cure) as table,
        writing(directory.parent, cure, DataError),
    ):
        table.fill([block])
        return own_temporary(build(table, directory, BuildOptions("number"), lambda count: None))
