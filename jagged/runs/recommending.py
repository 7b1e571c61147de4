"""Recommend items: `Recommender` for notebooks and services, and the function behind `jagged recommend`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor

from jagged.config import ConfigError, TrainConfig, merge
from jagged.data import DataError, SequenceDataset
from jagged.data.batches import features_of
from jagged.data.dataset import TIME_KEY
from jagged.data.files import EVENT_FORMATS
from jagged.data.gather import known_items, seconds
from jagged.data.sources import find_source, is_table
from jagged.data.splits import ranges
from jagged.evaluation import NOT_FINITE, EvaluationError, Popularity, event_features, is_finite, item_table, takes_times
from jagged.metrics import TrainCounts
from jagged.models import best_items_tensors
from jagged.models.pretrained import from_pretrained, save_pretrained
from jagged.runs.evaluating import Evaluation, evaluate, refuse_options
from jagged.runs.labels.run import is_label_run
from jagged.runs.packages import most_samples
from jagged.runs.ranking.evaluating import is_ranking_run
from jagged.runs.ranking.predicting import Ranker
from jagged.runs.run import Run
from jagged.runs.tables import table_of, writer
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
    def from_pretrained(
        cls, directory: str | os.PathLike[str], *, device: str = "auto", package: str | os.PathLike[str] | None = None
    ) -> Recommender:
        """Open a directory that `jagged train`, `fit` or `save_pretrained` wrote; no GPU is needed.

        Args:
            directory: the run's.
            device: "auto" (the GPU where there is one), "cpu" or "cuda".
            package: one that `jagged export` made of this run: it finds the items that `recommend` gives, on the CPU, the best
                `k` of its own. What else is asked is the model's.

        Raises:
            CheckpointError: the directory holds no model, or a file of it is damaged.
            ConfigError: an unknown device, or one that is not there, or a package that is not this run's.
            ArtifactError: a file of the package is damaged.
        """
        run = Run.open(directory, device=device, package=package)
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

    def recommend(self, users: Any, k: int = 10, filter_viewed: bool = True, *, candidates: Any = None) -> pa.Table:
        """The best `k` items for each user, in the users' and items' own ids.

        The table has the columns `user_id`, `item_id`, `score` (float32, higher is better, comparable within a user) and `rank`
        (int64, from 1), users in the order given. An item comes at most once for a user; equal scores rank in the order of the
        catalogue. With `filter_viewed` a user who has had nearly everything gets fewer than `k` rows.

        Items of histories that the model does not know are left out and their number is logged. Users of whom then nothing is
        left, and ids of users that the data does not have, get the items that most training users had, with that number as score;
        where the model was saved without training counts, the first items of the catalogue with score 0.

        Args:
            users: a mapping of user ids to items, oldest first, also for users the model has never seen; events as a path, a
                table in memory or a `SequenceDataset`; or ids of users in the data that the model was trained on, whose whole
                history is then used.
            k: items for each user, at most the size of the catalogue.
            filter_viewed: leave out items of the user's history.
            candidates: items that may be recommended, for all users alike, or for each of them by a mapping of the same ids as
                `users`; None for the whole catalogue. Those that the model does not know are left out and their number is
                logged; who has fewer than `k` gets fewer rows.

        Raises:
            ConfigError: no model yet, `k` out of range, a user without candidates in the mapping, or ids without the data they
                belong to.
            DataError: events that cannot be read, ids that are neither integers nor strings.
            EvaluationError: the model's scores are NaN or infinite.
        """
        return _recommend(self._opened(), users, k, filter_viewed, candidates)

    def similar(self, items: Iterable[Any], k: int = 10) -> pa.Table:
        """The `k` items whose vectors point most in the direction of each item's, without itself.

        Args:
            items: ids; those that the model does not know are left out and their number is logged.
            k: at most the size of the catalogue less one.

        Returns:
            The columns `item_id`, `similar_item_id`, `score` (float32, the cosine) and `rank` (int64, from 1).

        Raises:
            ConfigError: no model yet, or `k` out of range.
            DataError: ids that are neither integers nor strings.
            EvaluationError: the model's item table is NaN or infinite.
        """
        run = self._opened()
        if not 1 <= k < len(run.items):
            raise ConfigError(f"k: got {k}, expected 1 to {len(run.items) - 1:,}, the other items of the catalogue")
        # With an output layer of few weights an item the table says more of it than these do.
        table = item_table(run.model).detach()
        if not is_finite(table):
            raise EvaluationError(f"{run.directory}: {NOT_FINITE}")
        given = torch.from_numpy(run.items.encode(_ids(items, "items")))
        known = given[given >= 0]
        if len(known) < len(given):
            logger.warning("%d items that the model does not know were left out", len(given) - len(known))
        weight = torch.nn.functional.normalize(table.float(), dim=1)
        own = known.to(weight.device), torch.arange(len(known) + 1, device=weight.device)
        ranked = rank_catalogue(weight[known.to(weight.device)], weight, k, viewed=own, filter_viewed=(True,))[0]
        found, scores = ranked.items.cpu(), ranked.scores.cpu()
        return pa.table(
            {
                "item_id": run.items.decode(known.repeat_interleave(k).numpy()),
                "similar_item_id": run.items.decode(found.flatten().numpy()),
                "score": scores.flatten().numpy(),
                "rank": torch.arange(1, k + 1).repeat(len(known)).numpy(),
            }
        )

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
            event_values=opened.event_values,
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
    package: str | os.PathLike[str] | None = None,
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
        max_bytes: bound on the memory that grows with users times items; a package has bounds of its own.
        candidates: as of `Recommender.recommend` or `Ranker.recommend`; also as a csv or parquet file with a column of them.
        events: of a run on a table: as of `Ranker.recommend`.
        package: as of `Recommender.from_pretrained` or `Ranker.from_pretrained`.
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
    if is_label_run(directory):
        raise ConfigError(f"{directory}: a run on sets of labels, not of items; `jagged predict` ranks the labels of rows")
    if is_ranking_run(directory):
        refuse_options(directory, {"filter_viewed": None if filter_viewed else False, **chosen}, "events")
        ranker = Ranker.from_pretrained(directory, device=device, package=package)
        table = ranker.recommend(histories, candidates, k, events=events, progress=progress)
        if write is not None:
            write(table)
        return table
    refuse_options(directory, {"events": events}, "a table")
    run = Run.open(directory, device=device, package=package)
    if isinstance(candidates, (str, os.PathLike)) or is_table(candidates):
        given, name = table_of(candidates, "candidates"), run.columns(chosen)["item_column"]
        if name not in given.column_names:
            raise DataError(f"candidates: found the columns {', '.join(given.column_names)}, expected {name!r} among them")
        candidates = given[name].combine_chunks()
    if isinstance(histories, (str, os.PathLike)) or is_table(histories):
        histories = _read(run, histories, format, chosen, progress)
    table = _recommend(run, histories, k, filter_viewed, candidates, max_bytes=max_bytes, progress=progress)
    if write is not None:
        write(table)
    return table


@dataclass(frozen=True)
class _Histories:
    """Users and their events: user i has `item_ids[start[i]:end[i]]`, and item j is row `dense[j]` of the model or -1.

    `others` gives by key what else the model takes of events: times and side features.
    """

    users: pa.Array
    item_ids: Tensor
    start: Tensor
    end: Tensor
    dense: Tensor
    others: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)


def _recommend(
    run: Run,
    users: Any,
    k: int,
    filter_viewed: bool,
    candidates: Any = None,
    *,
    max_bytes: int = DEFAULT_MAX_BYTES,
    progress: bool = True,
) -> pa.Table:
    from tqdm import tqdm

    if not 1 <= k <= len(run.items):
        raise ConfigError(f"k: got {k}, expected 1 to {len(run.items):,}, the size of the catalogue")
    size = _BATCH
    if run.package is not None:
        if k > run.package.content["k"]:
            raise ConfigError(
                f"k: got {k}, expected at most {run.package.content['k']}, of which the package was made; make one of more"
            )
        if candidates is not None:
            raise ConfigError("candidates: got some beside a package, which ranks the whole catalogue; leave one of the two out")
        size = most_samples(_BATCH, run.model.config["max_seq_len"], len(run.items))
    histories = _histories(run, users)
    allowed = None if candidates is None else _allowed(run, histories.users, candidates)
    popular, weight = _popularity(run), run.model.item_weight.detach()
    if len(histories.users) and not is_finite(weight):
        raise EvaluationError(f"{run.directory}: {NOT_FINITE}")
    schema = pa.schema(
        [("user_id", histories.users.type), ("item_id", run.items.ids.type), ("score", pa.float32()), ("rank", pa.int64())]
    )
    batches, unknown, cold = [], 0, 0
    starts = range(0, len(histories.users), size)
    for first in tqdm(starts, desc="recommend", unit="batch", delay=2, leave=False, disable=not progress):
        last = min(first + size, len(histories.users))
        start, end = histories.start[first:last], histories.end[first:last]
        events = ranges(start, end - start)
        others = {key: of(events) for key, of in histories.others.items()}
        values = histories.dense[histories.item_ids[events]]
        known, lengths = known_items(values, end - start)
        values, others = values[known], {key: found[known] for key, found in others.items()}
        of = None if allowed is None else allowed.slice(first, last)
        ranked = _rank(run, weight, values, lengths, others, k, filter_viewed, max_bytes, of)
        items, scores = ranked.items.cpu(), ranked.scores.cpu()
        nothing = lengths == 0
        if popular is not None and nothing.any():
            without = None if of is None else of.only(nothing)
            best = _best(torch.ones(int(nothing.sum()), 1), popular, k, None, without, max_bytes)
            items[nothing], scores[nothing] = best.items, best.scores
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


@dataclass(frozen=True)
class _Allowed:
    """Candidates of users, as numbers of the model's items: user i's are `items[offsets[i]:offsets[i + 1]]`, ascending."""

    items: Tensor
    offsets: Tensor

    def slice(self, first: int, last: int) -> _Allowed:
        """Those of some users in a row."""
        offsets = self.offsets[first : last + 1]
        return _Allowed(self.items[int(offsets[0]) : int(offsets[-1])], offsets - offsets[0])

    def only(self, chosen: Tensor) -> _Allowed:
        """Those of the users for which a mask is set."""
        counts = self.offsets.diff()[chosen]
        starts = self.offsets[:-1][chosen]
        return _Allowed(self.items[ranges(starts, counts)], torch.cat([counts.new_zeros(1), counts.cumsum(0)]))


def _allowed(run: Run, users: pa.Array, candidates: Any) -> _Allowed:
    if isinstance(candidates, Mapping):
        names = users.to_pylist()
        if lacking := [name for name in names if name not in candidates]:
            raise ConfigError(f"candidates: got none for the user {lacking[0]!r}, expected a list for each of the users")
        lists = [_ids(candidates[name], f"the candidates of {name!r}") for name in names]
    else:
        lists = [_ids(candidates, "candidates")]
    given = [torch.from_numpy(run.items.encode(of)) for of in lists]
    known = [of[of >= 0].unique() for of in given]
    if unknown := sum(int((of < 0).sum()) for of in given):
        logger.warning("%d candidates that the model does not know were left out", unknown)
    if not isinstance(candidates, Mapping):
        known = known * len(users)
    counts = torch.tensor([0, *map(len, known)], dtype=torch.int64)
    return _Allowed(torch.cat([*known, counts[:0]]), counts.cumsum(0))


def _rank(
    run: Run,
    weight: Tensor,
    values: Tensor,
    lengths: Tensor,
    others: Mapping[str, Tensor],
    k: int,
    filter_viewed: bool,
    max_bytes: int,
    allowed: _Allowed | None,
) -> Ranked:
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    recent = lengths.clamp(max=run.model.config["max_seq_len"])
    window = ranges(offsets[1:] - recent, recent)
    features = features_of(values[window], recent, {key: of[window] for key, of in others.items()}).to(run.device)
    viewed = (values, offsets) if filter_viewed else None
    if run.package is not None:
        without = None if viewed is None else JaggedTensor(values, lengths=lengths)
        found = run.package(best_items_tensors(run.model, features, without))
        ranked = Ranked(found["items"][:, :k], found["scores"][:, :k], None)
    else:
        with torch.no_grad(), torch.autocast(run.device.type, enabled=False):
            hidden = run.model.final_hidden(features)
            ranked = _best(hidden, weight, k, viewed, allowed, max_bytes)
    if ranked.strange:
        raise EvaluationError(f"{run.directory}: {NOT_FINITE}")
    return ranked


def _best(
    hidden: Tensor, weight: Tensor, k: int, viewed: tuple[Tensor, Tensor] | None, allowed: _Allowed | None, max_bytes: int
) -> Ranked:
    """The `k` best items of each user; of those that may be recommended, where some are told. What is lacking is -1."""
    device = weight.device
    if allowed is None:
        seen = None if viewed is None else (viewed[0].to(device), viewed[1].to(device))
        return rank_catalogue(hidden, weight, k, viewed=seen, filter_viewed=(seen is not None,), max_bytes=max_bytes)[0]
    users = len(hidden)
    rows = torch.repeat_interleave(torch.arange(users), allowed.offsets.diff())
    items = allowed.items
    if viewed is not None:
        of_user = torch.repeat_interleave(torch.arange(users), viewed[1].diff())
        fresh = ~torch.isin(rows * len(weight) + items, of_user * len(weight) + viewed[0])
        rows, items = rows[fresh], items[fresh]
    scores = torch.zeros(len(items))
    # Some products at a time: those of all candidates with their users may not fit.
    step = max(1, max_bytes // (8 * max(hidden.shape[1], 1)))
    for first in range(0, len(items), step):
        here = slice(first, first + step)
        scores[here] = (hidden[rows[here].to(device)].float() * weight[items[here].to(device)].float()).sum(1).cpu()
    # By user, then the higher score, then the order of the catalogue.
    order = np.lexsort((items.numpy(), -scores.numpy(), rows.numpy()))
    rows, items, scores = rows[order], items[order], scores[order]
    counts = torch.bincount(rows, minlength=users)
    places = torch.arange(len(rows)) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    kept = places < k
    best, of_best = torch.full((users, k), -1), torch.full((users, k), -torch.inf)
    best[rows[kept], places[kept]], of_best[rows[kept], places[kept]] = items[kept], scores[kept]
    return Ranked(best, of_best, None)


def _popularity(run: Run) -> Tensor | None:
    """How many training users had each item, float32 `[V, 1]`; None where the run has no counts."""
    counts = TrainCounts.load(run.directory)
    return None if counts is None else Popularity(counts).item_weight


def _histories(run: Run, users: Any) -> _Histories:
    if isinstance(users, Mapping):
        if takes_times(run.model):
            raise ConfigError(
                "users: histories without times, but the model takes them; pass events with times: a table, a dataset, or ids of "
                "users that the model was trained on"
            )
        if names := event_features(run.model):
            raise ConfigError(
                f"users: histories without {', '.join(names)}, but the model takes them; pass events with them: a table, a "
                "dataset, or ids of users that the model was trained on"
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
        # Of whom the data has nothing the history is empty.
        start, end = start[chosen], torch.where(chosen < 0, start[chosen], end[chosen])
    same = run.dense_items(dataset)
    dense = torch.arange(dataset.num_items) if same is None else same
    others: dict[str, Callable[[Tensor], Tensor]] = {}
    if takes_times(run.model):
        others[TIME_KEY] = partial(seconds, dataset)
    for name, of_numbers in run.feature_rows(dataset).items():
        others[name] = partial(_rows_of, of_numbers, dataset.features[name])
    return _Histories(ids, dataset.item_ids, start, end, dense, others)


def _rows_of(rows: Tensor, numbers: Tensor, events: Tensor) -> Tensor:
    """The model's rows of events' values."""
    return rows[numbers[events]]


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
