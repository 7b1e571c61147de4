"""Recommend items: `Recommender` for notebooks and services, and the function behind `jagged recommend`."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from jagged.config import ConfigError, TrainConfig, merge
from jagged.data import DataError, SequenceDataset
from jagged.data.batches import features_of
from jagged.data.files import EVENT_FORMATS
from jagged.data.gather import seconds
from jagged.data.sources import find_source, is_table
from jagged.data.splits import ranges
from jagged.evaluation import NOT_FINITE, EvaluationError, Popularity, is_finite, takes_times
from jagged.metrics import TrainCounts
from jagged.models.pretrained import from_pretrained, save_pretrained
from jagged.runs.evaluating import Evaluation, evaluate, refuse_options
from jagged.runs.output import writer
from jagged.runs.ranking.evaluating import is_ranking_run
from jagged.runs.ranking.predicting import Ranker
from jagged.runs.run import Run, known_items
from jagged.scoring import DEFAULT_MAX_BYTES, Ranked, rank_catalogue

logger = logging.getLogger("jagged")

_BATCH = 1024


class Recommender:
    """A sequence ranker with the plain interface: fit, recommend, evaluate, save, open.

    Args:
        config: the configuration of `fit`; the defaults without one.
        **overrides: options of `TrainConfig` that win over `config`, for example `model={"embedding_dim": 128}`.

    Raises:
        ConfigError: an unknown field or a value that does not fit.
    """

    def __init__(self, config: TrainConfig | None = None, **overrides: Any) -> None:
        self.config = TrainConfig(**merge(config.model_dump() if config is not None else {}, overrides))
        self._run: Run | None = None

    @classmethod
    def from_pretrained(cls, directory: str | os.PathLike[str], *, device: str = "auto") -> Recommender:
        """Open a directory that `jagged train`, `fit` or `save_pretrained` wrote; no GPU is needed.

        Raises:
            CheckpointError: the directory holds no model, or a file of it is damaged.
            ConfigError: an unknown device, or one that is not there.
        """
        run = Run.open(directory, device=device)
        self = cls(run.config)
        self._run = run
        return self

    def fit(self, data: Any = None) -> Recommender:
        """Train on events and keep the best model; the run's directory is `config.output`.

        Args:
            data: a `SequenceDataset`; a path, which wins over `config.data.path`; or a table in memory, of pandas, polars, DuckDB
                or Arrow, which is not changed. Without any, the built-in sample.

        Raises:
            ConfigError, DataError, TrainingError: as `jagged.train`.
        """
        from jagged.runs.training import train

        if isinstance(data, (str, os.PathLike)):
            self.config = TrainConfig(**merge(self.config.model_dump(), {"data": os.fspath(data)}))
            data = None
        result = train(self.config, data)
        self._run = Run.open(result.directory, device=self.config.device)
        return self

    def recommend(self, users: Any, k: int = 10, filter_viewed: bool = True) -> pa.Table:
        """The best `k` items for each user, in the users' and items' own ids.

        The table has the columns `user_id`, `item_id`, `score` (float32, higher is better, comparable within a user) and `rank`
        (int64, from 1), users in the order given. An item comes at most once for a user; equal scores rank in the order of the
        catalogue. With `filter_viewed` a user who has had nearly everything gets fewer than `k` rows.

        Items of histories that the model does not know are left out and their number is logged. Users of whom then nothing is
        left get the items that most training users had, with that number as score; where the model was saved without training
        counts, the first items of the catalogue with score 0.

        Args:
            users: a mapping of user ids to items, oldest first, also for users the model has never seen; events as a path, a
                table in memory or a `SequenceDataset`; or ids of users in the data that the model was trained on, whose whole
                history is then used.
            k: items for each user, at most the size of the catalogue.
            filter_viewed: leave out items of the user's history.

        Raises:
            ConfigError: no model yet, `k` out of range, an unknown user id, or ids without the data they belong to.
            DataError: events that cannot be read, ids that are neither integers nor strings.
            EvaluationError: the model's scores are NaN or infinite.
        """
        return _recommend(self._opened(), users, k, filter_viewed)

    def evaluate(self, data: Any = None, *, part: Any = "test", filter_viewed: bool | None = None, **options: Any) -> Evaluation:
        """As `jagged.evaluate` on the directory that was fitted or opened."""
        run = self._opened()
        options = {"device": run.device.type, **options}
        found = evaluate(run.directory, data, part=part, filter_viewed=filter_viewed, **options)
        assert isinstance(found, Evaluation)
        return found

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Write what recommending needs into a directory that stands alone: model, vocabulary, configuration, counts and figures.

        Raises:
            ConfigError: no model yet.
            CheckpointError: the directory cannot be written.
        """
        run = self._opened()
        opened = from_pretrained(run.directory)
        save_pretrained(
            opened.model,
            Path(directory),
            items=opened.items,
            # A model that a function makes has no name by its class.
            name=opened.config.model.name if opened.config else None,
            config=opened.config,
            split=opened.split or None,
            metrics=opened.metrics or None,
            train_counts=TrainCounts.load(run.directory, len(opened.items)),
            history=opened.history,
        )

    def _opened(self) -> Run:
        if self._run is None:
            raise ConfigError(
                "Recommender: no model yet; call fit(data), or open one with Recommender.from_pretrained(directory)"
            )
        return self._run


def recommend(
    directory: str | os.PathLike[str],
    histories: Any,
    output: str | os.PathLike[str] | None = None,
    *,
    k: int = 10,
    filter_viewed: bool = True,
    format: str = "auto",
    user_column: str | None = None,
    item_column: str | None = None,
    timestamp_column: str | None = None,
    device: str = "auto",
    max_bytes: int = DEFAULT_MAX_BYTES,
    candidates: Any = None,
    events: Any = None,
    progress: bool = True,
) -> pa.Table:
    """Recommend items for users' histories; the function behind `jagged recommend`.

    Of a run on a table's requests, `histories` are requests, and the candidates of each are ranked, as by `Ranker.recommend`;
    `filter_viewed` and names of columns are for runs on events.

    Args:
        directory: a run's directory.
        histories: a file or folder of events, or a table in memory; also anything else that `Recommender.recommend` takes.
        output: a table to write, `.csv`, `.parquet` or `.jsonl` by its name; it appears whole or not at all.
        k: items for each user.
        filter_viewed: leave out items of the user's history.
        format: of `histories`: "auto" (by name), "text", "csv" or "parquet".
        user_column, item_column, timestamp_column: names of columns, by default those of the run's configuration. A table without
            the configuration's time column counts as oldest first, with a note; `timestamp_column=""` says that it does.
        device: "auto" (the GPU where there is one), "cpu" or "cuda".
        max_bytes: bound on the memory that grows with users times items.
        candidates, events: of a run on a table: as of `Ranker.recommend`; candidates also as a file with a column of them.
        progress: show progress bars after two seconds.

    Returns:
        The table, with columns `user_id, item_id, score, rank`; see `Recommender.recommend` and `Ranker.recommend`.

    Raises:
        ConfigError: an option that cannot be used, or an output that cannot be written.
        CheckpointError: the directory holds no model, or a file of it is damaged.
        DataError: the histories cannot be read.
        EvaluationError: the model's scores are NaN or infinite.
    """
    write = None if output is None else writer(Path(output))
    chosen = {"user_column": user_column, "item_column": item_column, "timestamp_column": timestamp_column}
    if is_ranking_run(directory):
        refuse_options(directory, {"filter_viewed": None if filter_viewed else False, **chosen}, "events")
        ranker = Ranker.from_pretrained(directory, device=device)
        table = ranker.recommend(histories, candidates, k, events=events, progress=progress)
        if write is not None:
            write(table)
        return table
    refuse_options(directory, {"candidates": candidates, "events": events}, "a table")
    run = Run.open(directory, device=device)
    if isinstance(histories, (str, os.PathLike)) or is_table(histories):
        histories = _read(run, histories, format, chosen, progress)
    table = _recommend(run, histories, k, filter_viewed, max_bytes=max_bytes, progress=progress)
    if write is not None:
        write(table)
    return table


@dataclass(frozen=True)
class _Histories:
    """Users and their events: user i has `item_ids[start[i]:end[i]]`, and item j is row `dense[j]` of the model or -1.

    `dataset` has the times of the same events, where the model takes them.
    """

    users: pa.Array
    item_ids: Tensor
    start: Tensor
    end: Tensor
    dense: Tensor
    dataset: SequenceDataset | None = None


def _recommend(
    run: Run, users: Any, k: int, filter_viewed: bool, *, max_bytes: int = DEFAULT_MAX_BYTES, progress: bool = True
) -> pa.Table:
    from tqdm import tqdm

    if not 1 <= k <= len(run.items):
        raise ConfigError(f"k: got {k}, expected 1 to {len(run.items):,}, the size of the catalogue")
    histories = _histories(run, users)
    popular = _most_popular(run, k)
    schema = pa.schema(
        [("user_id", histories.users.type), ("item_id", run.items.ids.type), ("score", pa.float32()), ("rank", pa.int64())]
    )
    batches, unknown, cold = [], 0, 0
    starts = range(0, len(histories.users), _BATCH)
    for first in tqdm(starts, desc="recommend", unit="batch", delay=2, leave=False, disable=not progress):
        last = min(first + _BATCH, len(histories.users))
        start, end = histories.start[first:last], histories.end[first:last]
        events = ranges(start, end - start)
        times = None if histories.dataset is None else seconds(histories.dataset, events)
        values, lengths, times = known_items(histories.item_ids[events], end - start, histories.dense, times)
        ranked = _rank(run, values, lengths, times, k, filter_viewed, max_bytes)
        items, scores = ranked.items.cpu(), ranked.scores.cpu()
        nothing = lengths == 0
        if popular is not None:
            items[nothing], scores[nothing] = popular.items, popular.scores
        unknown += len(events) - len(values)
        cold += int(nothing.sum())
        row, position = (items >= 0).nonzero(as_tuple=True)
        columns = [
            histories.users[first:last].take(pa.array(row.numpy())),
            run.items.decode(items[row, position]),
            pa.array(scores[row, position].numpy()),
            pa.array((position + 1).numpy()),
        ]
        batches.append(pa.record_batch(columns, schema=schema))
    if unknown:
        logger.warning("%d events of items that the model does not know were left out of the histories", unknown)
    if cold:
        what = "the most popular items" if popular is not None else "the first items of the catalogue"
        logger.warning("%d users have no event of an item that the model knows; they get %s", cold, what)
    return pa.Table.from_batches(batches, schema)


def _rank(run: Run, values: Tensor, lengths: Tensor, times: Tensor | None, k: int, filter_viewed: bool, max_bytes: int) -> Ranked:
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    recent = lengths.clamp(max=run.model.config["max_seq_len"])
    window = ranges(offsets[1:] - recent, recent)
    features = features_of(values[window], recent, None if times is None else times[window]).to(run.device)
    if not is_finite(run.model.item_weight.detach()):
        raise EvaluationError(f"{run.directory}: {NOT_FINITE}")
    with torch.no_grad(), torch.autocast(run.device.type, enabled=False):
        ranked = rank_catalogue(
            run.model.final_hidden(features),
            run.model.item_weight,
            k,
            viewed=(values.to(run.device), offsets.to(run.device)) if filter_viewed else None,
            filter_viewed=(filter_viewed,),
            max_bytes=max_bytes,
        )[0]
    if ranked.strange:
        raise EvaluationError(f"{run.directory}: {NOT_FINITE}")
    return ranked


def _most_popular(run: Run, k: int) -> Ranked | None:
    """The items that most training users had; None where the run has no counts."""
    counts = TrainCounts.load(run.directory)
    return None if counts is None else rank_catalogue(torch.ones(1, 1), Popularity(counts).item_weight, k)[0]


def _histories(run: Run, users: Any) -> _Histories:
    if isinstance(users, Mapping):
        if takes_times(run.model):
            raise ConfigError(
                "users: histories without times, but the model takes them; pass events with times: a table, a dataset, or ids of "
                "users that the model was trained on"
            )
        rows = [_ids(items, f"the history of {user!r}") for user, items in users.items()]
        ends = torch.tensor([len(row) for row in rows], dtype=torch.int64).cumsum(0)
        encoded = [torch.from_numpy(run.items.encode(row)) for row in rows]
        # The number of an unknown item, -1, finds the last place, which holds -1.
        dense = torch.cat([torch.arange(len(run.items)), torch.tensor([-1])])
        starts = torch.cat([ends.new_zeros(1), ends])[:-1]
        return _Histories(_ids(users, "users"), torch.cat([*encoded, ends.new_zeros(0)]), starts, ends, dense)
    if isinstance(users, (str, os.PathLike)) or is_table(users):
        users = _read(run, users)
    dataset = users if isinstance(users, SequenceDataset) else run.read()
    run.check_times(dataset)
    start, end, ids = dataset.offsets[:-1], dataset.offsets[1:], dataset.users.ids
    if dataset is not users:
        ids = _ids(users, "users")
        chosen = torch.from_numpy(dataset.users.encode(ids))
        if (chosen < 0).any():
            unknown = ids[int((chosen < 0).int().argmax())].as_py()
            raise ConfigError(
                f"users: {unknown!r} is no user of the data that the model was trained on; "
                "pass the history instead, as {user: [item, ...]}"
            )
        start, end = start[chosen], end[chosen]
    same = run.dense_items(dataset)
    dense = torch.arange(dataset.num_items) if same is None else same
    return _Histories(ids, dataset.item_ids, start, end, dense, dataset if takes_times(run.model) else None)


def _ids(values: Iterable[Any], what: str) -> pa.Array:
    """Ids as an Arrow array of integers or strings."""
    try:
        ids = values if isinstance(values, pa.Array) else pa.array(values.tolist() if hasattr(values, "tolist") else list(values))
    except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError, OverflowError):
        raise DataError(f"{what}: found ids of several types, expected all integers or all strings") from None
    if pa.types.is_null(ids.type) and not len(ids):
        return ids.cast(pa.large_string())
    if ids.null_count or not (
        pa.types.is_integer(ids.type) or pa.types.is_string(ids.type) or pa.types.is_large_string(ids.type)
    ):
        raise DataError(
            f"{what}: found {'a null id' if ids.null_count else f'ids of type {ids.type}'}, expected integers or strings"
        )
    return ids


def _read(
    run: Run, source: Any, format: str = "auto", columns: Mapping[str, str | None] | None = None, progress: bool = True
) -> SequenceDataset:
    columns = dict(columns or {})
    expected = run.config.data.timestamp_column
    if columns.get("timestamp_column") is None and expected and not _has_column(source, format, expected):
        name = os.fspath(source) if isinstance(source, (str, os.PathLike)) else type(source).__name__
        logger.warning("%s: no column %r: rows count as oldest first", name, expected)
        columns["timestamp_column"] = ""
    return run.read(source, format=format, columns=columns, progress=progress)


def _has_column(source: Any, format: str, name: str) -> bool:
    """Whether a table has a column; True for what is no table or cannot be read, which the reader will say."""
    seen: list[str] = []

    def look(where: str, names: list[str]) -> list[str]:
        seen.extend(names)
        return names[:1]

    try:
        found = find_source(source, format, formats=EVENT_FORMATS, choose=look)
    except DataError:
        return True
    return found.format == "text" or name in seen
