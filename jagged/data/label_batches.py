"""Batches of rows with sparse features and sets of labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from jagged.data.xmc import MultiLabelRows

#: The key of a batch's features.
FEATURES = "features"


@dataclass(frozen=True)
class LabelBatch:
    """N rows.

    Attributes:
        features: KeyedJaggedTensor of the key "features", the ids of each row's features with their values as weights.
        labels: the ids of each row's labels.
        filtered: the ids of labels that are left out of each row's ranking; None without.
    """

    features: KeyedJaggedTensor
    labels: JaggedTensor
    filtered: JaggedTensor | None = None

    def __len__(self) -> int:
        """How many rows."""
        return int(self.labels.offsets().shape[0]) - 1

    @staticmethod
    def of(rows: MultiLabelRows) -> LabelBatch:
        """All of some rows."""
        values = torch.from_numpy(rows.feature_ids.astype(np.int64))
        features = KeyedJaggedTensor(
            [FEATURES],
            values,
            torch.from_numpy(rows.feature_values.copy()),
            lengths=torch.from_numpy(np.diff(rows.feature_offsets)),
        )
        filtered = None if rows.filtered is None else _jagged(rows.filtered, rows.filtered_offsets)
        return LabelBatch(features, _jagged(rows.labels, rows.label_offsets), filtered)


def _jagged(labels: npt.NDArray[np.int32], offsets: npt.NDArray[np.int64] | None) -> JaggedTensor:
    assert offsets is not None
    return JaggedTensor(values=torch.from_numpy(labels.astype(np.int64)), offsets=torch.from_numpy(offsets.copy()))


class _Rows(Dataset[LabelBatch]):
    def __init__(self, rows: MultiLabelRows) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitems__(self, rows: Sequence[int]) -> LabelBatch:
        # Of a whole batch at once, which is many times faster.
        return LabelBatch.of(self._rows.take(np.asarray(rows)))


def _as_it_is(batch: Any) -> Any:
    return batch


def label_loader(
    rows: MultiLabelRows, batch_size: int, *, shuffle: bool = False, num_workers: int = 0, drop_last: bool = False
) -> DataLoader[LabelBatch]:
    """Return a loader of `LabelBatch`, as `jagged.training.Trainer` takes it.

    Args:
        rows: of a file (`read_xmc`) or made up (`synthetic_labels`).
        batch_size: rows of a batch, at least 1.
        shuffle: in another order in each epoch.
        num_workers: processes that make batches.
        drop_last: leave out the rows of an incomplete last batch.

    Example:
        >>> from jagged.data import label_loader, synthetic_labels
        >>> rows, _, _ = synthetic_labels(num_rows=10, num_test_rows=1, num_labels=20, num_features=100, num_groups=5)
        >>> [batch.labels.offsets().shape[0] - 1 for batch in label_loader(rows, 4)]
        [4, 4, 2]
    """
    return DataLoader(
        _Rows(rows),
        batch_size=batch_size,
        shuffle=shuffle,
        num_workers=num_workers,
        collate_fn=_as_it_is,
        drop_last=drop_last,
    )
