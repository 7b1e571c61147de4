"""Train a ranking model on a table: from a configuration to a directory that stands alone."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from jagged import artifacts
from jagged.artifacts import CheckpointError
from jagged.config import ConfigError, RankingConfig
from jagged.config.section import Problem
from jagged.data import DataError, Dataset, Kind, Split, synthetic_impressions
from jagged.data.table_loader import RequestLoader
from jagged.metrics import RunMetrics
from jagged.models import REQUEST_MODELS
from jagged.models.pretrained import CONFIG, save_task
from jagged.runs.ranking.going_on import START, Beginning
from jagged.runs.ranking.run import DATASET, hardware, split_column, split_dataset
from jagged.runs.starting import data_folder, nothing_left_of_a_false_start
from jagged.training.callbacks import Callback
from jagged.training.checkpoint import list_checkpoints
from jagged.training.errors import TrainingError
from jagged.training.forecast import forecast_requests
from jagged.training.loop import CHECKPOINTS
from jagged.training.processes import Processes, process_group, resolve_device
from jagged.training.table_updates import cache_errors, keep_on_host
from jagged.training.trainer import Trainer, TrainResult, locked, resolved
from jagged.versions import installed

# What the columns of the built-in sample are.
_SAMPLE: dict[str, Any] = {
    "label": ["click", "buy"], "candidate": "item_id", "user": "user_id", "time": "timestamp", "request": "request_id",
    "event_labels": ("click",),
}  # fmt: skip


def train_ranking(
    config: RankingConfig,
    table: Any = None,
    *,
    callbacks: Sequence[Callback] = (),
    resume: bool = False,
    dry_run: bool = False,
    progress: bool = True,
) -> TrainResult:
    """`jagged.train` of a `RankingConfig`; its arguments and errors are those.

    Args:
        table: a `Dataset`, a path, or a table in memory, which is read as `config.data` says; by default `config.data.path`.
    """
    config = resolved(config)
    directory = Path(config.output)
    beginning = Beginning.of(config, resume=resume)
    config = config if beginning is None else beginning.config
    with process_group(resolve_device(config.device)) as processes, ExitStack() as closing:
        if not dry_run:
            closing.enter_context(locked(directory, processes, resume))
            closing.enter_context(nothing_left_of_a_false_start(directory, processes, DATASET, START))
        shown = progress and processes.is_first
        dataset = _kept(config, beginning, table, directory, processes, closing, dry_run=dry_run, progress=shown)
        split = split_dataset(config, dataset, None if beginning is None else beginning.encoders, progress=shown)
        torch.manual_seed(config.seed)
        try:
            arguments = {**config.model.arguments(config.data.max_history), "negative_rate": config.data.negative_rate}
            model = REQUEST_MODELS[config.model.name].of(split, **arguments)
        except ValueError as error:
            raise TrainingError(f"model: {error}") from None
        if beginning is not None:
            beginning.load_into(model)
            # What was read of the other run need not stay in memory.
            beginning = replace(beginning, run=None)
        keep_on_host(model, config.trainer, processes.world_size)
        model = model.to(processes.device)
        loaders = _loaders(config, split, processes)
        with cache_errors():
            expected = forecast_requests(config, split.train, loaders[0], model, processes)
        if shown:
            print(expected, flush=True)
        if dry_run:
            return TrainResult(directory, RunMetrics(), [], float("nan"), 0, 0, 0.0, forecast=expected)
        if processes.is_first and not list_checkpoints(directory / CHECKPOINTS):
            if beginning is not None:
                beginning.keep(directory)
            # From here on the run needs nothing else to go on; one that goes on already has its own.
            with artifacts.writing(directory / CONFIG, "make room, or choose another output", CheckpointError):
                config.save(directory / CONFIG)
        trainer = Trainer(model, config.trainer, callbacks=callbacks)
        result = trainer.run(
            processes,
            config.trainer,
            loaders,
            resume,
            progress,
            fingerprint=dataset.fingerprint,
            write=partial(_write, config, split, processes.device),
            options=config.model_dump(),
        )
        return replace(result, forecast=expected)


def _kept(
    config: RankingConfig,
    beginning: Beginning | None,
    table: Any,
    directory: Path,
    processes: Processes,
    closing: ExitStack,
    *,
    dry_run: bool,
    progress: bool,
) -> Dataset:
    """The run's table: read by the first process into the run's directory, and opened there by all.

    A run that goes on has it there already; where it may be another table, that is read, too, and compared.
    """
    place = data_folder(directory / DATASET, processes, closing, dry_run=dry_run)
    processes.in_first(lambda: _read(config, beginning, table, place, progress))
    dataset = Dataset.load(place)
    if beginning is not None:
        beginning.check(dataset)
    return dataset


def _read(config: RankingConfig, beginning: Beginning | None, table: Any, place: Path, progress: bool) -> None:
    is_there, kept = place.is_dir(), place.parent / CONFIG
    if table is None and is_there and kept.exists() and _data_of(RankingConfig.load(kept)) == _data_of(config):
        return
    if isinstance(table, Dataset):
        with artifacts.writing(place, "make room, or choose another output", CheckpointError):
            table.save(place)
        return
    reading = config.data.reading() if beginning is None else beginning.reading()
    options: dict[str, Any] = {**reading, "split": split_column(config), "progress": progress}
    if table is None and (table := config.data.path) is None:
        if beginning is not None:
            text = f"got none, expected a table of new rows beside from_run ({beginning.where}); name it"
            raise ConfigError.of([Problem("data.path", text)])
        table = synthetic_impressions(config.seed)[0]
        options = {**options, **_SAMPLE}
    try:
        again = Dataset.from_table(table, directory=None if is_there else place, **options)
    except DataError as error:
        raise (error if beginning is None else beginning.explained(error)) from None
    if is_there and again.fingerprint != Dataset.load(place).fingerprint:
        raise TrainingError(f"data: {place} holds another table than the one that is given; choose another output, or delete it")


def _data_of(config: RankingConfig) -> tuple[Any, ...]:
    """What a run's table depends on: with the column of parts, of the built-in sample the seed, and whose schema it has."""
    return config.data, split_column(config), config.seed if config.data.path is None else None, config.from_run


def _loaders(config: RankingConfig, split: Split, processes: Processes) -> tuple[RequestLoader, RequestLoader, RequestLoader]:
    common: dict[str, Any] = {
        "seed": config.seed,
        "max_history": config.data.max_history,
        "num_workers": config.training.num_workers,
        "pin_memory": processes.device.type == "cuda",
        "rank": processes.rank,
        "world_size": processes.world_size,
        **config.data.drawing(),
    }
    if config.data.negatives is None and not split.train.label_names:
        raise TrainingError(
            "data.label: the table has no label; name one, or let items be drawn beside each row's own one by data.negatives"
        )
    tokens = config.training.max_tokens
    of = config.training
    size: dict[str, Any] = {"max_tokens": tokens} if tokens else {"batch_size": of.batch_size, "balance": of.balance}
    try:
        train_loader = split.train.loader(shuffle=True, unseen=config.data.unseen_share, **size, **common)
        held_out = {"batch_size": config.evaluation.eval_batch_size, **common}
        return train_loader, split.valid.loader(**held_out), split.test.loader(**held_out)
    except ValueError as error:
        raise TrainingError(str(error)) from None


def _write(
    config: RankingConfig,
    split: Split,
    device: torch.device,
    task: nn.Module,
    metrics: RunMetrics,
    history: list[dict[str, Any]],
) -> None:
    dataset, log = split.train.dataset, split.train.dataset.events
    save_task(
        task,
        config.output,
        config=config,
        split=description(split) | {"seed": config.seed, "versions": installed(), "hardware": hardware(device)},
        metrics=metrics.to_json(),
        history=history,
        encoders=split.encoders,
        schema=dataset.schema,
        event_schema=None if log is None or log.is_own else log.table.schema,
    )


def description(split: Split) -> dict[str, Any]:
    """What a model has to keep of a split: rule, counts and cut times, and how rows were read."""
    dataset, log = split.train.dataset, split.train.dataset.events
    times = dataset.one(Kind.TIME)
    return {
        "name": split.by,
        "counts": split.counts,
        "reading": dataset.counts,
        "rows": {name: len(getattr(split, name).rows) for name in ("train", "valid", "test")},
        "requests": {name: len(getattr(split, name)) for name in ("train", "valid", "test")},
        "times": None if times is None or not len(times) else [int(np.min(times)), int(np.max(times))],
        "time_kind": dataset.time_kind,
        "fingerprint": dataset.fingerprint,
        "history": dataset.history,
        "event_labels": list(dataset.event_labels),
        "event_lists": [] if log is None else [one.name for one in log.lists],
        "event_weights": None if log is None else log.weights,
        "minimum_counts": split.minimum_counts,
    }
