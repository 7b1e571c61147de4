"""Open what training on rows with sets of labels left in a directory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch.utils.data import DataLoader

from jagged.artifacts import ArtifactError, CheckpointError, errors_as, message, read_json, shown
from jagged.config import ConfigError, MultiLabelConfig
from jagged.data import DataError, LabelBatch, MultiLabelRows, label_loader
from jagged.data.label_names import LABEL_NAMES, read_label_names
from jagged.evaluation import bar
from jagged.models import MultiLabelModel
from jagged.models.pretrained import CONFIG, MODEL, SPLIT, WEIGHTS, load_task
from jagged.runs.labels.rows import LabelRows, LabelSplit, fitted, read_rows
from jagged.runs.labels.training import DATASET
from jagged.runs.run import find_device


@dataclass(frozen=True)
class LabelRun:
    """A trained model of rows with sets of labels, with everything that is needed to use it.

    Attributes:
        directory: where it was opened.
        model: in eval mode, on its device.
        config: the resolved configuration of its training.
        split: what training said of its rows: counts, seed, fingerprint, versions and hardware.

    Example:
        >>> import jagged
        >>> from jagged.config import MultiLabelConfig
        >>> from jagged.runs.labels import LabelRun
        >>> config = MultiLabelConfig(output="runs/labels", model={"embedding_dim": 64}, training={"max_epochs": 1})
        >>> run = LabelRun.open(jagged.train(config, progress=False).directory)
        >>> run.predict(run.parts.test, k=3, progress=False).column_names
        ['row', 'rank', 'label', 'probability']
    """

    directory: Path
    model: MultiLabelModel
    config: MultiLabelConfig
    split: dict[str, Any]

    @classmethod
    def open(cls, directory: str | os.PathLike[str], *, device: str = "auto") -> LabelRun:
        """Open a directory that `train` wrote, after verifying its files.

        Raises:
            ConfigError: an unknown device, or one that is not there.
            CheckpointError: the directory holds no such model, or a file of it is damaged.
        """
        model, path = load_task(directory, device=find_device(device)), Path(directory)
        if not isinstance(model, MultiLabelModel):
            raise CheckpointError(message(path / MODEL, f"a {type(model).__name__}", "a model of sets of labels"))
        _check_counts(model, path / WEIGHTS)
        with errors_as(CheckpointError, ConfigError):
            config, split = MultiLabelConfig.load(path / CONFIG), read_json(path / SPLIT)
        for name, kind in (("name", str), ("fingerprint", str), ("rows", dict)):
            if not isinstance(split.get(name), kind):
                found = f"{name} {shown(split.get(name))}"
                raise CheckpointError(message(path / SPLIT, found, "what training writes", "copy the directory again"))
        return cls(path, model, config, split)

    @cached_property
    def parts(self) -> LabelSplit:
        """The rows that it was trained, validated and tested on.

        Raises:
            ConfigError: the directory has none.
            DataError: they are damaged.
        """
        kept = self.directory / DATASET
        if not kept.is_dir():
            raise ConfigError(f"{self.directory}: holds no rows ({DATASET}/); name the rows to use")
        rows = LabelRows.load(kept)
        if rows.fingerprint != self.split["fingerprint"]:
            cure = "copy the directory again"
            raise DataError(message(kept, "other rows", f"those that {SPLIT} tells of", cure))
        return rows.split(self.config)

    @cached_property
    def label_names(self) -> pa.LargeStringArray | None:
        """The names of labels, large_string `[L]`, in the order of their ids; None where training had none.

        Raises:
            DataError: they are not there, or not as many as there are labels.
        """
        if self.config.data.label_names is None and not (self.directory / LABEL_NAMES).exists():
            return None
        return read_label_names(self.directory / LABEL_NAMES, self.model.head.num_labels)

    def read(self, rows: Any, *, has_labels: bool = True, progress: bool = True) -> MultiLabelRows:
        """Rows of a file or a table in memory, read as those of training, or as they are, with the model's features and labels.

        Without `has_labels` a table needs no column of labels.

        Raises:
            DataError: malformed rows, or rows of other numbers of features or labels.
        """
        # Where labels were text no file had their names.
        names = self.label_names if self.config.data.label_names is None else None
        found, counted = read_rows(rows, self.config.data, names=names, has_labels=has_labels, progress=progress)
        what = os.fspath(rows) if isinstance(rows, (str, os.PathLike)) else "rows"
        sizes = {"num_features": self.model.config["num_features"], "num_labels": self.model.head.num_labels}
        return fitted(found, counted, what=what, **sizes)

    def loader(self, rows: MultiLabelRows, batch_size: int | None = None) -> DataLoader[LabelBatch]:
        """Batches of rows, of `eval_batch_size` where no other size is given."""
        return label_loader(rows, batch_size or self.config.evaluation.eval_batch_size)

    def predict(self, rows: Any, *, k: int = 10, progress: bool = True) -> pa.Table:
        """Return the k best labels of each row, the best first.

        Args:
            rows: as of `read`; what labels they have is not looked at, and a table needs none.
            k: labels of each row, at least 1; fewer where the model has fewer.
            progress: show a bar after two seconds.

        Returns:
            int64 `row` and `rank`, from 0 and 1 on, int64 `label`, where labels have names large_string `name`, and float32
            `probability`.

        Raises:
            DataError: as of `read` and `label_names`.
            ValueError: a k below 1.
        """
        if k < 1:
            raise ValueError(f"k: got {k}, expected at least 1")
        names, found = self.label_names, self.read(rows, has_labels=False, progress=progress)
        labels, probabilities = [torch.zeros(0, k, dtype=torch.int64)], [torch.zeros(0, k)]
        for batch in bar(self.loader(found), progress):
            best = self.model.predict(batch, k=k)
            labels.append(best["labels"].cpu())
            probabilities.append(best["probabilities"].cpu())
        of, likely = torch.cat(labels), torch.cat(probabilities)
        there = of >= 0
        row, rank = there.nonzero(as_tuple=True)
        columns = {"row": row, "rank": rank + 1, "label": of[there], "probability": likely[there]}
        table = pa.table({name: pa.array(column.numpy()) for name, column in columns.items()})
        return table if names is None else table.add_column(3, "name", names.take(table["label"].combine_chunks()))


def _check_counts(model: MultiLabelModel, where: Path) -> None:
    """Refuse numbers of rows of labels that there cannot be."""
    if not bool(((model.label_counts >= 0) & (model.label_counts <= model.num_rows)).all()):
        raise CheckpointError(message(where, "label_counts out of range", "those of a trained head", "copy the directory again"))


def is_label_run(directory: str | os.PathLike[str]) -> bool:
    """Whether a directory holds a model of rows with sets of labels."""
    try:
        return bool(read_json(Path(directory) / MODEL).get("model") == "multilabel")
    except ArtifactError:
        return False
