"""Score rows and rank candidates: `Ranker` for notebooks and services, and the function behind `jagged predict`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from jagged.config import ConfigError, RankingConfig, merge
from jagged.data import Dataset, Kind
from jagged.data.errors import refuse, shown
from jagged.data.rows import reader
from jagged.data.sources import is_table
from jagged.data.tabular import is_list
from jagged.models.pretrained import save_task
from jagged.runs.ranking.evaluating import RankingEvaluation, evaluate_run
from jagged.runs.ranking.run import DATASET, RankingRun
from jagged.runs.tables import table_of

IntArray = npt.NDArray[np.int64]

#: Before the names of tasks in tables of predictions.
PREDICTED = "predicted_"
# Rows that a request and its candidates become, at most.
_MOST_ROWS = 50_000_000


class Ranker:
    """A ranking model of a table's requests with the plain interface: fit, predict, recommend, evaluate, open.

    Args:
        config: the configuration of `fit`; the defaults without one.
        **overrides: options of `RankingConfig` that win over `config`, for example `data={"label": "click"}`.

    Raises:
        ConfigError: an unknown field or a value that does not fit.
    """

    def __init__(self, config: RankingConfig | None = None, **overrides: Any) -> None:
        begins = overrides.get("from_run", None if config is None else config.from_run) is not None
        # What is not given is then the other run's.
        given = {} if config is None else config.model_dump(exclude_unset=begins)
        self.config = RankingConfig(**merge(given if begins else {"model": "ranking", **given}, overrides))
        self._run: RankingRun | None = None

    @classmethod
    def from_pretrained(
        cls, directory: str | os.PathLike[str], *, device: str = "auto", package: str | os.PathLike[str] | None = None
    ) -> Ranker:
        """Open a directory that `jagged train` or `fit` wrote; no GPU is needed.

        Args:
            directory: the run's.
            device: "auto" (the GPU where there is one), "cpu" or "cuda".
            package: one that `jagged export` made of this run: `predict` and `recommend` score by it, on the CPU, in smaller
                batches where histories are long; `evaluate` scores by the model.

        Raises:
            CheckpointError: the directory holds no ranking model, or a file of it is damaged.
            ConfigError: an unknown device, or one that is not there, or a package that is not this run's.
            ArtifactError: a file of the package is damaged.
        """
        run = RankingRun.open(directory, device=device, package=package)
        self = cls(run.config)
        self._run = run
        return self

    def fit(self, table: Any = None) -> Ranker:
        """Train on a table and keep the best model; the run's directory is `config.output`.

        Args:
            table: a `Dataset`, a path, or a table in memory, of pandas, polars, DuckDB or Arrow, which is not changed; by default
                `config.data.path`, and without that the built-in sample.

        Raises:
            ConfigError, DataError, TrainingError: as `jagged.train`.
        """
        from jagged.runs.training import train

        result = train(self.config, table)
        self._run = RankingRun.open(result.directory, device=self.config.device)
        return self

    def predict(self, table: Any, *, events: Any = None, format: str = "auto", progress: bool = True) -> pa.Table:
        """Score rows: what each task predicts of each row of a table, in the table's order.

        The table has the columns of training but for labels and weights, which are not looked at. Ids that training has not seen
        are known as such. Where the model reads histories of events, a row knows those of its user at earlier times, by the same
        rules as in training; rows of the table are no events of one another.

        Args:
            table: rows, as a path, or a table in memory.
            events: that histories are gathered from, as a path or a table; None: the rows (or events) that the run trained,
                validated and tested on.
            format: of files: "auto" (by name), "csv" or "parquet".
            progress: show bars after two seconds.

        Returns:
            User, candidate and time of each row, where the table has them, and float32 `predicted_<task>`: the probability of a
            label; with drawn negatives, `predicted_next`, a score from 0 to 1; with the losses `listwise` and `pairwise` a score
            of any size, by which rows of one request compare.

        Raises:
            ConfigError: no model yet, or events that the model does not read.
            DataError: a column is missing or has values of another kind.
        """
        run = self._opened()
        dataset = run.read(table, events, labels=False, format=format, progress=progress)
        predictions = run.predict(dataset, progress=progress)
        told = [one.name for one in dataset.schema.of_kind(Kind.USER, Kind.CANDIDATE, Kind.TIME)]
        order = np.empty(len(dataset), np.int64)
        order[dataset.source] = np.arange(len(dataset))
        rows = reader(dataset, told).read_all().take(pa.array(order)) if told else None
        columns = {name: rows[name] for name in told} if rows is not None else {}
        return pa.table({**columns, **{f"{PREDICTED}{name}": pa.array(values) for name, values in predictions.items()}})

    def recommend(
        self,
        requests: Any,
        candidates: Any = None,
        k: int = 10,
        *,
        by: str | None = None,
        items: Any = None,
        events: Any = None,
        progress: bool = True,
    ) -> pa.Table:
        """Rank the candidates of requests by what a task predicts.

        Args:
            requests: a row for each request, as a table in memory or a csv or parquet file: user, time, and what else is the
                request's.
                A list column with the candidates' name holds the candidates of each.
            candidates: ids for all requests, where they have none of their own; None for all that the model knows.
            k: candidates for each request at most.
            by: the task; None for the first.
            items: a table with the candidates' other columns, by id; None for what the run's data has of each one last.
            events: as of `predict`.
            progress: show bars after two seconds.

        Returns:
            `request` (int64, the row of `requests`), the user where there is one, the candidate, `predicted_<task>` of each task,
            and `rank` (int64, from 1). Equal predictions rank in the order of the candidates. Candidates that training has not
            seen are ranked by what is known of them.

        Raises:
            ConfigError: no model yet, an unknown task, `k` below 1, or candidates' columns that nothing tells.
            DataError: the tables cannot be used.
        """
        run = self._opened()
        task = by or run.model.tasks[0]
        if task not in run.model.tasks:
            raise ConfigError(f"by: got {task!r}, expected one of {', '.join(run.model.tasks)}")
        if k < 1:
            raise ConfigError(f"k: got {k}, expected 1 or more")
        item = run.schema.one(Kind.CANDIDATE)
        if item is None:
            raise ConfigError(f"{run.directory}: the model's table has no column of candidates; use predict")
        table = table_of(requests, "requests")
        lists, numbers = _candidates(run, table, candidates, item.name)
        own = [one.name for one in run.schema.columns if one.is_candidates and one.kind not in (Kind.LABEL, Kind.WEIGHT)]
        rows = table.drop_columns([name for name in own if name in table.column_names]).take(pa.array(numbers))
        rows = rows.append_column(item.name, lists)
        if others := [name for name in own if name != item.name]:
            rows = _with_columns(rows, _items(run, items, item.name, others), item.name, others)
        request = run.schema.one(Kind.REQUEST)
        if request is not None:
            rows = rows.drop_columns([name for name in (request.name,) if name in rows.column_names])
            rows = rows.append_column(request.name, pa.array(numbers))
        scored = self.predict(rows, events=events, progress=progress)
        of = scored[f"{PREDICTED}{task}"].to_numpy()
        order = np.lexsort((np.arange(len(of)), -of, numbers))
        starts = np.flatnonzero(np.append(True, np.diff(numbers[order]) != 0)) if len(order) else np.zeros(0, np.int64)
        rank = np.arange(len(order)) - np.repeat(starts, np.diff(np.append(starts, len(order)))) + 1
        order, rank = order[rank <= k], rank[rank <= k]
        user = run.schema.one(Kind.USER)
        told = [one.name for one in (user, item) if one is not None and one.name in scored.column_names]
        names = [*told, *(name for name in scored.column_names if name.startswith(PREDICTED))]
        found = scored.select(names).take(pa.array(order))
        found = found.add_column(0, "request", pa.array(numbers[order]))
        return found.append_column("rank", pa.array(rank))

    def evaluate(self, data: Any = None, *, part: Any = "test", **options: Any) -> RankingEvaluation:
        """As `jagged.evaluate` on the directory that was fitted or opened."""
        return evaluate_run(self._opened(), data, part=part, **options)

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Write what predicting needs into a directory that stands alone: model, schema, encoders, split, figures; no rows.

        A model that reads histories of events then needs `events`, and `recommend` needs `items`.

        Raises:
            ConfigError: no model yet.
            CheckpointError: the directory cannot be written.
        """
        opened = self._opened().opened
        save_task(
            opened.task,
            directory,
            config=opened.config,
            split=opened.split,
            metrics=opened.metrics or None,
            history=opened.history,
            encoders=opened.encoders,
            schema=opened.schema,
            event_schema=opened.event_schema,
        )

    def _opened(self) -> RankingRun:
        if self._run is None:
            raise ConfigError("Ranker: no model yet; call fit(table), or open one with Ranker.from_pretrained(directory)")
        return self._run


def _candidates(run: RankingRun, table: pa.Table, candidates: Any, name: str) -> tuple[pa.Array, IntArray]:
    """The candidates of all requests in a row, and the request of each, int64."""
    if name in table.column_names:
        column = table[name].combine_chunks()
        if candidates is not None:
            raise ConfigError(f"candidates: given beside the column {name!r} of the requests; leave one of the two out")
        if not is_list(column.type):
            raise refuse("requests", f"{shown(name)} of type {column.type}", "lists of candidates", "or leave the column out")
        counts = np.asarray(pc.fill_null(pc.list_value_length(column), 0), dtype=np.int64)
        return column.flatten(), np.repeat(np.arange(len(table)), counts)
    if candidates is None:
        table_name = run.schema[name].table_name
        known = run.encoders[table_name].ids
        if known is None:
            raise ConfigError(f"candidates: expected ids, as the model's {name!r} are {run.schema[name].encoding} numbers")
        ids = known.ids
    elif isinstance(candidates, (str, os.PathLike)) or is_table(candidates):
        given = table_of(candidates, "candidates")
        if name not in given.column_names:
            raise refuse("candidates", f"the columns {shown(given.column_names, 200)}", f"a column {shown(name)}")
        ids = given[name].combine_chunks()
    else:
        ids = candidates if isinstance(candidates, pa.Array) else pa.array(list(candidates))
    if len(ids) * len(table) > _MOST_ROWS:
        raise ConfigError(
            f"candidates: got {len(ids):,} for each of {len(table):,} requests, expected at most {_MOST_ROWS:,} together; "
            "give fewer requests at a time"
        )
    numbers = np.repeat(np.arange(len(table)), len(ids))
    return ids.take(pa.array(np.tile(np.arange(len(ids)), len(table)))), numbers


def _items(run: RankingRun, items: Any, name: str, others: Sequence[str]) -> pa.Table:
    """A row for each known candidate with its other columns."""
    if items is not None:
        found = table_of(items, "items")
        if missing := [one for one in (name, *others) if one not in found.column_names]:
            raise refuse("items", f"the columns {shown(found.column_names, 200)}", f"{shown(missing[0])} too")
        return found
    if not (run.directory / DATASET).is_dir():
        raise ConfigError(f"items: expected a table with {name} and {', '.join(others)}, as {run.directory} holds no data")
    dataset: Dataset = run.dataset
    codes = dataset.column(name)
    times = dataset.one(Kind.TIME)
    order = np.arange(len(codes)) if times is None else np.argsort(times, kind="stable")
    # Of several rows the last one that is written stays: the latest.
    last = np.full(int(codes.max(initial=-1)) + 2, -1, dtype=np.int64)
    last[codes[order] + 1] = order
    rows = np.sort(last[1:][last[1:] >= 0])
    return reader(dataset, [name, *others]).read_all().take(pa.array(rows))


def _with_columns(rows: pa.Table, items: pa.Table, name: str, others: Sequence[str]) -> pa.Table:
    """The rows with the columns of their items; of an unknown one these are missing."""
    ids = items[name].combine_chunks()
    places = pc.index_in(rows[name].cast(ids.type).combine_chunks(), ids)
    for other in others:
        rows = rows.append_column(other, items[other].combine_chunks().take(places))
    return rows
