"""Ids that training has once, now and then given as ids that nobody has seen, so that the row of such is trained."""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jagged.data.encoding import Encoder
from jagged.data.negatives import GAMMA, mixed, uniform
from jagged.data.vocabulary import FIRST, UNSEEN

IntArray = npt.NDArray[np.int64]
AnyArray = npt.NDArray[Any]

#: Ids that training has at most as often as this are rare.
RARE = 1


class Unseen(NamedTuple):
    """How rare ids become unseen ones: by a hash of seed, epoch, column and place, whoever gathers them in which batch.

    Attributes:
        share: of the places where a rare id stands, 0 to 1.
        seed, epoch: of the draws.
    """

    share: float
    seed: int
    epoch: int

    def replaced(self, numbers: AnyArray, encoder: Encoder, column: str, places: IntArray) -> AnyArray:
        """The numbers of a column's ids, some rare ones unseen.

        Args:
            numbers: `[n]`, of the encoder.
            encoder: of the column's table.
            column: its name.
            places: int64 `[n]`, where in the dataset each one stands.
        """
        rare = (encoder.counts[numbers] <= RARE) & (numbers >= FIRST)
        if not rare.any():
            return numbers
        start = np.array([self.seed], np.uint64) ^ np.uint64(zlib.crc32(column.encode()))
        key = mixed(mixed(start + GAMMA) + np.array([self.epoch + 1], np.uint64) * GAMMA)
        return np.where(rare & (uniform(key, places.astype(np.uint64)) < self.share), UNSEEN, numbers).astype(numbers.dtype)
