"""Open what training left in a directory: model, vocabulary, configuration and data."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jagged.config import ConfigError, LeaveOneOut, TrainConfig
from jagged.data import (
    BatchLoader,
    Dataset,
    SequenceDataset,
    SequencePart,
    SequenceSplit,
    Vocabulary,
    read_events,
    split_global_time,
    split_leave_one_out,
)
from jagged.data.errors import shown
from jagged.data.vocabulary import FIRST, MISSING, UNSEEN
from jagged.evaluation import event_features, item_table, takes_times
from jagged.metrics import TrainCounts
from jagged.models.pretrained import from_pretrained
from jagged.runs.packages import Package

logger = logging.getLogger("jagged")


@dataclass(frozen=True)
class Run:
    """A trained model with everything that is needed to use it.

    Attributes:
        directory: where it was opened.
        model: on its device, in eval mode.
        items: the catalogue's ids; an item's place is its row in the model's item table.
        config: the resolved configuration of its training; the defaults where the model was saved without one.
        fingerprint: of the dataset that it was trained on; None where the model was saved without its split.
        time_unit: of that dataset's times; "" where nothing says it.
        event_values: by name of a side feature of events that the model takes the values behind its rows.
        package: that finds items in the model's place; None for the model.
    """

    directory: Path
    model: Any
    items: Vocabulary
    config: TrainConfig
    fingerprint: str | None
    time_unit: str = ""
    event_values: Mapping[str, Vocabulary] = field(default_factory=dict)
    package: Package | None = None

    @classmethod
    def open(
        cls, directory: str | os.PathLike[str], *, device: str = "auto", package: str | os.PathLike[str] | None = None
    ) -> Run:
        """Open a directory that `train` or `save_pretrained` wrote, after verifying its files.

        Args:
            directory: the run's.
            device: "auto" (the GPU where there is one), "cpu" or "cuda".
            package: one that `jagged export` made of this run, which finds items in the model's place, on the CPU.

        Raises:
            ConfigError: an unknown device, or one that is not there, or a package that is not this run's.
            CheckpointError: the directory holds no model, or a file of it is damaged.
            ArtifactError: a file of the package is damaged.
        """
        opened = from_pretrained(directory, device=find_device(device, package))
        split = opened.split
        return cls(
            opened.directory,
            opened.model,
            opened.items,
            opened.config or TrainConfig.load(),
            split.get("fingerprint"),
            str(split.get("time_unit", "")),
            opened.event_values,
            None if package is None else Package(package, directory, "items"),
        )

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return item_table(self.model).device

    def read(
        self, data: Any = None, *, format: str = "auto", columns: Mapping[str, str | None] | None = None, progress: bool = True
    ) -> SequenceDataset:
        """Read events; without `data` those that the model was trained on.

        Args:
            data: events: a `SequenceDataset`, a path, or a table in memory, as `jagged.data.read_events` takes them.
            format: of a file: "auto" (by name), "text", "csv" or "parquet".
            columns: `user_column`, `item_column`, `timestamp_column` where they are not those of the run's configuration.
            progress: show a progress bar after two seconds.

        Raises:
            ConfigError: no data is given and the directory holds none.
            DataError: the data cannot be used.
        """
        if isinstance(data, SequenceDataset):
            return data
        if isinstance(data, Dataset):
            return data.sequences(event_columns=list(self.event_values), progress=progress)
        if data is not None:
            own = self.config.data
            options: Any = self.columns(columns or {}) | {"duplicates": own.duplicates, "on_error": own.on_error}
            options["event_columns"] = tuple(self.event_values)
            return read_events(data, format=format, progress=progress, **options)
        kept = self.directory / "dataset"
        if not kept.is_dir():
            raise ConfigError(f"{self.directory}: holds no events (dataset/); name the events file to use")
        return SequenceDataset.load(kept)

    def check_times(self, dataset: SequenceDataset) -> None:
        """Check that events have times where the model takes them, in the unit of its training.

        Raises:
            ConfigError: they have none, or in another unit.
        """
        if not takes_times(self.model):
            return
        if dataset.timestamps is None:
            raise ConfigError(
                f"{self.directory}: the model takes times, and the events have none; read a table with a time column"
            )
        if self.time_unit and dataset.time_unit not in ("", self.time_unit):
            raise ConfigError(
                f"{self.directory}: the events' times are {dataset.time_unit}, those of the model's training were "
                f"{self.time_unit}; give them in these"
            )

    def columns(self, chosen: Mapping[str, str | None]) -> dict[str, str]:
        """Names of columns: those chosen, else those of the run's configuration."""
        names = ("user_column", "item_column", "timestamp_column")
        return {name: getattr(self.config.data, name) for name in names} | {
            name: value for name, value in chosen.items() if value is not None
        }

    def loader(self, part: SequencePart, *, with_viewed: bool, batch_size: int | None = None) -> BatchLoader:
        """Batches of a held-out part as the model was validated on, of `eval_batch_size` users where no other size is given."""
        return BatchLoader(
            part,
            batch_size=batch_size or self.config.evaluation.eval_batch_size,
            max_seq_len=self.config.data.max_seq_len,
            shuffle=False,
            seed=0,
            with_viewed=with_viewed,
            with_times=takes_times(self.model),
            with_features=event_features(self.model),
        )

    def split(self, dataset: SequenceDataset) -> SequenceSplit:
        """Split events as the run's were, with the model's rows as the numbers of their items."""
        return split_events(self.config, dataset).numbered(self.dense_items(dataset), self.feature_rows(dataset))

    def feature_rows(self, dataset: SequenceDataset) -> dict[str, Tensor]:
        """By name of a side feature of events that the model takes its row for each number of a dataset.

        Events whose value the model does not know are told of.

        Raises:
            ConfigError: the events lack one, or the model knows none of its values.
        """
        if lacking := [name for name in self.event_values if name not in dataset.features]:
            raise ConfigError(
                f"{self.directory}: the model takes the side feature {lacking[0]!r} of events, and these have none; read a table "
                "with this column"
            )
        found = {}
        for name, values in self.event_values.items():
            theirs = dataset.feature_values(name).ids
            rows = torch.from_numpy(values.encode(theirs))
            if len(theirs) and not bool((rows >= 0).any()):
                known = shown(values.ids.to_pylist())
                raise ConfigError(
                    f"{self.directory}: the model knows none of the values {shown(theirs.to_pylist())} of {name!r}, expected "
                    f"some of {known}; give them in the form of its training"
                )
            if len(theirs):
                unseen = int((torch.cat([rows.new_zeros(1), rows])[dataset.features[name]] < 0).sum())
                if unseen:
                    logger.warning("%d events have a value of %r that the model does not know", unseen, name)
            found[name] = torch.cat([torch.tensor([MISSING]), torch.where(rows < 0, UNSEEN, rows + FIRST)])
        return found

    def train_counts(self) -> TrainCounts:
        """Training users of each item: as stored, or counted again from the kept events.

        Raises:
            CheckpointError: what is stored is damaged.
            ConfigError, DataError: nothing is stored, and there are no events or damaged ones.
        """
        return TrainCounts.load(self.directory, len(self.items)) or TrainCounts.from_part(self.split(self.read()).train)

    def dense_items(self, dataset: SequenceDataset) -> Tensor | None:
        """The model's row for each item of a dataset, int64 `[num_items]`, -1 if unknown; None if both have the same items."""
        if dataset.items == self.items:
            return None
        return torch.from_numpy(self.items.encode(dataset.items.ids))


def split_events(config: TrainConfig, dataset: SequenceDataset) -> SequenceSplit:
    """Split events as a configuration says."""
    chosen = config.split
    if isinstance(chosen, LeaveOneOut):
        return split_leave_one_out(dataset)
    return split_global_time(dataset, chosen.valid_fraction, chosen.test_fraction)


def find_device(name: str, package: str | os.PathLike[str] | None = None) -> torch.device:
    """The device of an option: "auto" is the GPU where there is one, and the CPU beside a package.

    Raises:
        ConfigError: not "auto", "cpu" or "cuda", or no GPU where one is asked for; or "cuda" beside a package.
    """
    if package is not None and name in ("auto", "cuda"):
        if name == "cuda":
            raise ConfigError("device: got 'cuda' beside a package, which scores on the CPU; leave one of the two out")
        name = "cpu"
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device: got {name!r}, expected 'auto', 'cpu' or 'cuda'")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: got 'cuda', but torch sees no GPU; run `jagged doctor`, or use device=cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")
