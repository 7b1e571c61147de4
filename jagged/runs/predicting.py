"""Score rows by what training left in a directory: the function behind `jagged predict`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa

from jagged.config import ConfigError
from jagged.runs.evaluating import refuse_options
from jagged.runs.labels.run import LabelRun, is_label_run
from jagged.runs.ranking.predicting import Ranker
from jagged.runs.tables import writer


def predict(
    directory: str | os.PathLike[str],
    table: Any,
    output: str | os.PathLike[str] | None = None,
    *,
    events: Any = None,
    k: int | None = None,
    format: str = "auto",
    device: str = "auto",
    package: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> pa.Table:
    """Score the rows of a table, or rank the labels of rows with sets of labels.

    Args:
        directory: a run's directory, of a run on a table or on sets of labels.
        table: of a run on a table, with events, format and progress, as of `Ranker.predict`; of one on sets of labels as of
            `jagged.runs.labels.LabelRun.predict`.
        output: a table to write, `.csv`, `.parquet` or `.jsonl` by its name; it appears whole or not at all.
        events, format: of a run on a table.
        k: of a run on sets of labels: labels of each row; None for 10.
        device: "auto" (the GPU where there is one), "cpu" or "cuda".
        package: of a run on a table: as of `Ranker.from_pretrained`.
        progress: show bars after two seconds.

    Returns:
        The table, as of those.

    Raises:
        ConfigError: an option that cannot be used, or an output that cannot be written.
        CheckpointError: the directory holds no such model, or a file of it is damaged.
        DataError: the rows cannot be used.
    """
    write = None if output is None else writer(Path(output))
    if is_label_run(directory):
        given = {"events": events, "format": None if format == "auto" else format, "package": package}
        refuse_options(directory, given, "a table")
        if k is not None and k < 1:
            raise ConfigError(f"k: got {k}, expected at least 1")
        found = LabelRun.open(directory, device=device).predict(table, k=10 if k is None else k, progress=progress)
    else:
        refuse_options(directory, {"k": k}, "sets of labels")
        ranker = Ranker.from_pretrained(directory, device=device, package=package)
        found = ranker.predict(table, events=events, format=format, progress=progress)
    if write is not None:
        write(found)
    return found
