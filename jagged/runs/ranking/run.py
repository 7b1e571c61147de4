"""Open what training on a table left in a directory: model, schema, encoders, configuration and data."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from jagged.config import ByColumn, ConfigError, RankingConfig
from jagged.data import DataError, Dataset, Encoders, Kind, Part, Schema, Split
from jagged.data.errors import refuse, shown
from jagged.data.negatives import TrainingEvents
from jagged.data.records import PARTS
from jagged.data.rows import event_columns, events
from jagged.data.table_batches import Batch
from jagged.data.table_splits import rows_of_parts
from jagged.evaluation import bar
from jagged.models import scoring_tensors
from jagged.models.pretrained import PretrainedTask, open_task
from jagged.runs.packages import Package, most_samples
from jagged.runs.ranking.checks import check_data, check_opened, fitting
from jagged.runs.run import find_device
from jagged.training.table_updates import keep_on_host

DATASET = "dataset"
FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True)
class RankingRun:
    """A trained ranking model with everything that is needed to use it.

    Attributes:
        opened: what lies in the directory; its task is on `device`.
        package: that scores in the model's place; None for the model.
    """

    opened: PretrainedTask
    package: Package | None = None

    @classmethod
    def open(
        cls, directory: str | os.PathLike[str], *, device: str = "auto", package: str | os.PathLike[str] | None = None
    ) -> RankingRun:
        """Open a directory that `train` wrote, after verifying its files.

        On a GPU tables of which the run had rows cached stay in the host's memory, and are read by the same budget.

        Args:
            directory: the run's.
            device: "auto" (the GPU where there is one), "cpu" or "cuda".
            package: one that `jagged export` made of this run, which scores in the model's place, on the CPU.

        Raises:
            ConfigError: an unknown device, or one that is not there, or a package that is not this run's.
            CheckpointError: the directory holds no such model, or a file of it is damaged.
            ArtifactError: a file of the package is damaged.
        """
        where = find_device(device, package)
        opened = open_task(directory)
        check_opened(opened)
        if where.type == "cuda":
            keep_on_host(opened.task, opened.config.training, 1)
        opened.task.to(where)
        return cls(opened, None if package is None else Package(package, directory, "scores"))

    @property
    def directory(self) -> Path:
        """Where it was opened."""
        return self.opened.directory

    @property
    def model(self) -> Any:
        """In eval mode."""
        return self.opened.task

    @property
    def schema(self) -> Schema:
        """Of the rows it was trained on."""
        return self.opened.schema

    @property
    def encoders(self) -> Encoders:
        """From ids to the model's numbers."""
        return self.opened.encoders

    @property
    def config(self) -> RankingConfig:
        """The resolved configuration of its training."""
        return self.opened.config

    @property
    def has_histories(self) -> bool:
        """Whether its histories are gathered from events."""
        return self.opened.split["history"] is not None

    @cached_property
    def dataset(self) -> Dataset:
        """The rows that it was trained, validated and tested on.

        Raises:
            ConfigError: the directory has none.
            DataError: they are damaged.
        """
        kept = self.directory / DATASET
        if not kept.is_dir():
            raise ConfigError(f"{self.directory}: holds no table (dataset/); name the table to use")
        found = Dataset.load(kept)
        check_data(self.opened, found)
        return found

    def part(self, name: str) -> Part:
        """Rows that were held out, or trained on, by the run's own split."""
        rows = rows_of_parts(self.dataset, **_splitting(self.config))[0]
        chosen = rows[PARTS.index(name)]
        # What the model knows, whatever a new fit would give.
        return fitting(self.opened, self.dataset, rows=chosen, training=TrainingEvents(self.dataset, rows[0]))

    def whole(self, dataset: Dataset) -> Part:
        """All rows of a dataset that was `read`."""
        return fitting(self.opened, dataset)

    def read(self, table: Any, events_table: Any = None, *, labels: bool, format: str = "auto", progress: bool = True) -> Dataset:
        """Read rows as the run's were, each of them, with the events that are known of their users.

        Args:
            table: as `Dataset.from_table` takes it; with the columns of `schema`, but without labels where none are asked for.
            events_table: that histories are gathered from; None for the run's own.
            labels: whether the rows' labels are needed.
            format: of files.
            progress: show bars after two seconds.

        Raises:
            DataError: the table cannot be used.
            ConfigError: events are needed, and the directory has none.
        """
        left_out = () if labels else (Kind.LABEL, Kind.WEIGHT)
        schema = Schema(tuple(one for one in self.schema.columns if one.kind not in left_out))
        beside: dict[str, Any] = {}
        if self.has_histories:
            if events_table is None and not (self.directory / DATASET).is_dir():
                raise ConfigError(
                    f"events: the model reads histories, and {self.directory} holds no rows to gather them from; give a table "
                    "of them"
                )
            found = events(self.dataset) if events_table is None else (events_table, self.event_schema)
            assert found is not None
            told = self.opened.split
            names = ("event_labels", "event_lists", "event_weights")
            beside = {"events": found[0], "event_schema": found[1], **{name: told[name] for name in names}}
            beside["history_delay"] = self.opened.split["history"]["delay"]
        elif events_table is not None:
            raise ConfigError(f"{self.directory}: the model reads no histories of events; leave events out")
        optional = [one.name for one in schema.of_kind(Kind.REQUEST, Kind.WEIGHT)]
        dataset = Dataset.from_table(
            table, schema, optional=optional, duplicates="keep", format=format, progress=progress, **beside
        )
        if dataset.time_kind != (kind := self.opened.split["time_kind"]):
            raise refuse(
                "table",
                f"times of kind {shown(dataset.time_kind)}",
                f"{shown(kind)}, as the model was trained on",
                "convert them",
            )
        return dataset

    @property
    def event_schema(self) -> Schema:
        """Of a table of events as a user has it: of another kind than the rows, or of earlier rows what they show."""
        told = self.opened.split
        columns = event_columns(
            self.opened.event_schema or self.schema, told["event_labels"], told["event_lists"], told["event_weights"]
        )
        return Schema(tuple(columns))

    def scores(self, part: Part, *, batch_size: int | None = None, progress: bool = True) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Batches of a part in its order, each with the model's predictions by task, `[S]`."""
        size, longest = batch_size or self.config.evaluation.eval_batch_size, self.config.data.max_history
        size = size if self.package is None else most_samples(size, longest)
        for batch in bar(part.loader(batch_size=size, max_history=longest), progress):
            yield batch, self._predicted(batch)

    def _predicted(self, batch: Batch) -> dict[str, Tensor]:
        if self.package is None or not len(batch):
            found: dict[str, Tensor] = self.model.predict(batch)
            return found
        return self.model.predictions(self.package(scoring_tensors(self.model, batch)))  # type: ignore[no-any-return]

    def predict(self, dataset: Dataset, *, batch_size: int | None = None, progress: bool = True) -> dict[str, FloatArray]:
        """By task the predictions of a dataset's rows in the order of its source, float32 `[n]`."""
        part = self.whole(dataset)
        found = {name: np.full(len(dataset), np.nan, np.float32) for name in self.model.tasks}
        for batch, predictions in self.scores(part, batch_size=batch_size, progress=progress):
            places = dataset.source[batch.rows.cpu().numpy()]
            for name, values in predictions.items():
                found[name][places] = values.float().cpu().numpy()
        return found


def split_dataset(config: RankingConfig, dataset: Dataset, known: Encoders | None = None, *, progress: bool = True) -> Split:
    """Split a table's rows as a configuration says.

    Args:
        config: how.
        dataset: the table.
        known: the encoders of another run that this one began with.
        progress: show a bar after two seconds.

    Raises:
        DataError: the table lacks what the split goes by, or a part has no row.
    """
    options = _splitting(config)
    found: Split = dataset.split(
        options["by"],
        valid=options["valid"],
        test=options["test"],
        seed=config.seed,
        minimum_counts=config.data.min_count,
        known=known,
        progress=progress,
    )
    for name, part in (("validation", found.valid), ("test", found.test)):
        if not len(part.rows):
            raise DataError(f"split by {options['by']}: no row for {name}; give more rows, or split otherwise")
    return found


def split_column(config: RankingConfig) -> str | None:
    """The column that says the parts, where one does."""
    return config.split.column if isinstance(config.split, ByColumn) else None


def _splitting(config: RankingConfig) -> dict[str, Any]:
    return {"by": config.split.type, "valid": 0.1, "test": 0.1, "seed": config.seed, **config.split.splitting()}


def hardware(device: torch.device) -> dict[str, str]:
    """What a run computes on, in words."""
    found = {"machine": platform.machine(), "cores": str(os.cpu_count()), "threads": str(torch.get_num_threads())}
    return {**found, "gpu": torch.cuda.get_device_name(device)} if device.type == "cuda" else found
