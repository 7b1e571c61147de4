"""Open what training left in a directory: model, vocabulary, configuration and data."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from jagged.config import ConfigError, TrainConfig
from jagged.metrics import TrainCounts

if TYPE_CHECKING:
    from jagged.data import SequenceDataset, SequenceSplit, Vocabulary


@dataclass
class Run:
    """A trained model with everything that is needed to use it.

    Attributes:
        directory: where it was opened.
        config: the resolved configuration of its training.
        model: on its device, in eval mode.
        items: the catalogue's ids; an item's place is its row in the model's item table.
    """

    directory: Path
    config: TrainConfig
    model: Any
    items: Vocabulary

    @classmethod
    def open(cls, directory: str | os.PathLike[str], *, device: str = "auto") -> Run:
        """Open a run's directory.

        Raises:
            ConfigError: an unknown device, or one that is not there.
            CheckpointError: the directory is no run, or a file of it is damaged.
        """
        from jagged.data import Vocabulary
        from jagged.models.pretrained import from_pretrained

        directory = Path(directory)
        model = from_pretrained(directory, device=find_device(device)).eval()
        return cls(directory, TrainConfig.load(directory / "config.json"), model, Vocabulary.load(directory / "items.arrow"))

    def read(self, data: str | os.PathLike[str] | SequenceDataset | None = None, *, progress: bool = True) -> SequenceDataset:
        """Read events as the run's configuration says; without `data` those that it was trained on.

        Raises:
            ConfigError: no data is given and the directory holds none.
            DataError: the data cannot be used.
        """
        from jagged.data import SequenceDataset, read_events

        if isinstance(data, SequenceDataset):
            return data
        if data is None:
            kept = self.directory / "dataset"
            if kept.is_dir():
                return SequenceDataset.load(kept)
            raise ConfigError(f"{self.directory}: holds no events (dataset/); name the events file to use")
        return read_events(data, progress=progress, **self.columns(data))

    def columns(self, data: str | os.PathLike[str]) -> dict[str, Any]:
        """Options for reading a file: the run's names of columns, and its format if this is the file it was trained on."""
        config = self.config
        own = config.data is not None and Path(config.data).resolve() == Path(data).resolve()
        return {
            "format": config.format if own else "auto",
            "user_column": config.user_column,
            "item_column": config.item_column,
            "timestamp_column": config.timestamp_column,
        }

    def split(self, dataset: SequenceDataset) -> SequenceSplit:
        """Split events as the run's were."""
        from jagged.data import split_global_time, split_leave_one_out

        if self.config.split == "leave-one-out":
            return split_leave_one_out(dataset)
        return split_global_time(dataset, self.config.valid_fraction, self.config.test_fraction)

    def train_counts(self) -> TrainCounts:
        """Training users of each item: as stored, or counted again from the kept events."""
        return TrainCounts.load(self.directory) or TrainCounts.from_part(self.split(self.read()).train)

    def dense_items(self, dataset: SequenceDataset) -> Tensor | None:
        """The model's row for each item of a dataset, int64 `[num_items]`, -1 if unknown; None if both have the same items."""
        if dataset.items == self.items:
            return None
        return torch.from_numpy(self.items.encode(dataset.items.ids))

    def is_own(self, dataset: SequenceDataset) -> bool | None:
        """Whether a dataset is, by its fingerprint, the one trained on; None if the run does not know."""
        kept = self.directory / "dataset"
        return dataset.fingerprint == self.read().fingerprint if kept.is_dir() else None


def find_device(name: str) -> torch.device:
    """The device of an option: "auto" is the GPU where there is one.

    Raises:
        ConfigError: not "auto", "cpu" or "cuda", or no GPU where one is asked for.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device: got {name!r}, expected 'auto', 'cpu' or 'cuda'")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: got 'cuda', but torch sees no GPU; run `jagged doctor`, or use device=cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")
