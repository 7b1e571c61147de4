"""`train`: from a configuration to a directory that stands alone."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from jagged import artifacts
from jagged.artifacts import CheckpointError
from jagged.artifacts.errors import one_line
from jagged.config import ConfigError, MultiLabelConfig, RankingConfig, TrainConfig, load_config
from jagged.data import (
    BatchLoader,
    Dataset,
    ItemTable,
    SequenceDataset,
    SequenceSplit,
    Vocabulary,
    read_events,
    read_item_table,
    synthetic_sessions,
)
from jagged.data.dataset import Notes
from jagged.data.errors import refuse
from jagged.data.vocabulary import FIRST
from jagged.evaluation import event_features, takes_times
from jagged.metrics import RunMetrics, TrainCounts, cut_offs
from jagged.models import ItemFeatures, ItemSequenceModel, NextItemTask, build, build_head, build_output, takes
from jagged.models.pretrained import CONFIG, save_pretrained
from jagged.runs.run import split_events
from jagged.runs.starting import rewiring
from jagged.training.callbacks import Callback
from jagged.training.checkpoint import list_checkpoints
from jagged.training.errors import TrainingError
from jagged.training.forecast import forecast
from jagged.training.loop import CHECKPOINTS
from jagged.training.processes import Processes, process_group, resolve_device
from jagged.training.table_updates import keep_on_host
from jagged.training.trainer import Trainer, TrainResult, locked, resolved

DATASET = "dataset"
ITEM_TABLE = "item_table"


def train(
    config: TrainConfig | RankingConfig | MultiLabelConfig | None = None,
    dataset: Any = None,
    *,
    callbacks: Sequence[Callback] = (),
    resume: bool | str | os.PathLike[str] = False,
    dry_run: bool = False,
    progress: bool = True,
) -> TrainResult:
    """Train a model, keep its best weights, test them, and leave one directory that stands alone.

    A `TrainConfig` trains on users' events, a `RankingConfig` on a table's requests with candidates, a `MultiLabelConfig` on rows
    with sets of labels.

    In one process or under torchrun, on the CPU or on GPUs. On the CPU the same seed gives the same weights bit for bit, also
    when the run was killed and resumed, in the middle of an epoch too, and with any number of loader workers.

    SIGTERM and SIGINT end the run after the present step, with a checkpoint.

    Args:
        config: what to train, on what, how, and where to; the defaults without one, or those of the run that goes on.
        dataset: the events, as a `SequenceDataset` (of a `RankingConfig` the rows, as a `Dataset`), a path, or a table in memory
            (a frame of pandas or polars, an Arrow table), which is read as `config.data` says and not changed. Of a
            `MultiLabelConfig` it may be `MultiLabelRows`, too, or a pair of these, training and test. By default
            `config.data.path` is read, or the built-in sample where that is None.
        callbacks: called while the run goes.
        resume: the directory of a run, which needs no other argument: its configuration and its events are there. Or true: go on
            from the newest checkpoint in `config.output`; without one, start.
        dry_run: stop after the forecast of memory and steps, with nothing written.
        progress: show the forecast, a progress bar and messages.

    Raises:
        ConfigError: `resume` is a directory without a run, or another one than `config.output`.
        DataError: the data cannot be used.
        TrainingError: the run cannot start or go on: an output that holds another run, a loss that is NaN, options that do not
            fit the checkpoint. `TrainingInterrupted` after a signal.
        CheckpointError: a checkpoint is damaged or cannot be written.
    """
    if not isinstance(resume, bool):
        config, dataset = _going_on(Path(resume), config, dataset)
        resume = True
    config = config or TrainConfig()
    if isinstance(config, RankingConfig):
        from jagged.runs.ranking.training import train_ranking

        return train_ranking(config, dataset, callbacks=callbacks, resume=resume, dry_run=dry_run, progress=progress)
    if isinstance(config, MultiLabelConfig):
        from jagged.runs.labels.training import train_labels

        return train_labels(config, dataset, callbacks=callbacks, resume=resume, dry_run=dry_run, progress=progress)
    config = resolved(config)
    directory = Path(config.output)
    with process_group(resolve_device(config.device)) as processes, ExitStack() as closing:
        if not dry_run:
            closing.enter_context(locked(directory, processes, resume))
        if not isinstance(dataset, SequenceDataset):
            dataset = _read(config, dataset, progress and processes.is_first)
        split = _split(config, dataset)
        if config.head.type == "scalable" and processes.world_size > 1:
            raise TrainingError("head: scalable trains in one process; start one, or take head=cross-entropy or head=sampled")
        if config.model.name == "bert4rec" and processes.world_size > 1:
            raise TrainingError("model: bert4rec trains in one process; start one, or take model=sasrec or model=hstu")
        item_table = _item_table(config, split.items, directory, progress and processes.is_first)
        torch.manual_seed(config.seed)
        train_counts = TrainCounts.from_part(split.train)
        model = _model(config, train_counts, split, item_table, processes.device)
        head = build_head(config, train_counts.users_per_item)
        task = NextItemTask(
            model,
            head=None if head is None else head.to(processes.device),
            train_counts=train_counts,
            filter_viewed=config.evaluation.filter_viewed,
            ks=cut_offs(config.training.monitor),
        )
        keep_on_host(task, config.trainer, processes.world_size)
        loaders = _loaders(config, split, processes, model)
        expected = forecast(config, split, loaders[0], task, config.precision, processes)
        if progress and processes.is_first:
            print(expected, flush=True)
        if dry_run:
            return TrainResult(directory, RunMetrics(), [], float("nan"), 0, 0, 0.0, forecast=expected)
        if processes.is_first:
            with artifacts.writing(directory / DATASET, "make room, or choose another output", CheckpointError):
                dataset.save(directory / DATASET)
                # From here on the run needs nothing else to go on; one that goes on already has its own.
                if not list_checkpoints(directory / CHECKPOINTS):
                    if item_table is not None:
                        if (directory / ITEM_TABLE).exists():
                            artifacts.remove(directory / ITEM_TABLE)
                        item_table.save(directory / ITEM_TABLE)
                    config.save(directory / CONFIG)
        drawn = len(split.valid) if config.evaluation.validate_users is None else config.evaluation.validate_users
        note = f" of {drawn:,} of {len(split.valid):,} users" if drawn < len(split.valid) else ""
        of_head = rewiring(config.head, getattr(model, "output", None), config.training, len(loaders[0]))
        trainer = Trainer(task, config.trainer, callbacks=[*of_head, *callbacks])
        result = trainer.run(
            processes,
            config.trainer,
            loaders,
            resume,
            progress,
            fingerprint=dataset.fingerprint,
            write=partial(_write, directory, config, split, train_counts, item_table),
            valid_note=note,
            options=config.model_dump(),
        )
        return replace(result, forecast=expected)


def _going_on(
    run: Path, config: TrainConfig | RankingConfig | MultiLabelConfig | None, dataset: Any
) -> tuple[TrainConfig | RankingConfig | MultiLabelConfig | None, Any]:
    """The configuration and the events of a run that goes on: its own, where no others are given."""
    if config is not None and Path(config.output) != run:
        raise ConfigError(f"resume: got {run}, expected config.output ({config.output})")
    if not (run / CONFIG).exists():
        if config is None:
            raise ConfigError(f"resume: {run} holds no run; to start one there give its configuration, too")
        return config, dataset
    kept = load_config(run / CONFIG, {"output": run})
    config = config or kept
    # Other runs look for their own.
    if isinstance(kept, TrainConfig) and dataset is None and config.data == kept.data and (run / DATASET).is_dir():
        dataset = SequenceDataset.load(run / DATASET)
    return config, dataset


def _read(config: TrainConfig, source: Any, progress: bool) -> SequenceDataset:
    source = config.data.path if source is None else source
    if source is None:
        return synthetic_sessions(config.seed)[0]
    if isinstance(source, Dataset):
        return source.sequences(event_columns=config.data.event_columns, progress=progress)
    return read_events(source, progress=progress, **config.data.reading())


def _split(config: TrainConfig, dataset: SequenceDataset) -> SequenceSplit:
    split = split_events(config, dataset)
    for name, part in (("training", split.train), ("validation", split.valid), ("test", split.test)):
        if not len(part):
            raise TrainingError(
                f"no user has events for {name} under the {split.name} split of {dataset!r}; "
                "give users with at least 4 events, 2 of them to train on"
            )
    return split


def _item_table(config: TrainConfig, items: Vocabulary, directory: Path, progress: bool) -> ItemTable | None:
    """The items' side features, of a run that goes on those that it began with."""
    if config.data.items is None:
        return None
    _check_takes(config, "item_features", "data.items", "items")
    if list_checkpoints(directory / CHECKPOINTS) and (directory / ITEM_TABLE).exists():
        found = ItemTable.load(directory / ITEM_TABLE)
        if found.num_items != len(items):
            raise refuse(directory / ITEM_TABLE, f"a table of {found.num_items:,} items", f"{len(items):,}", "start anew")
        return found
    return read_item_table(
        config.data.items,
        items,
        item_column=config.data.items_column or config.data.item_column,
        columns=config.data.item_columns,
        on_error=config.data.on_error,
        progress=progress,
    )


def _check_takes(config: TrainConfig, argument: str, option: str, of: str) -> None:
    """Refuse side features that the model does not take."""
    if not takes(config.model.name, argument):
        cure = "leave it out, or take model=sasrec"
        raise TrainingError(f"{option}: {config.model.name} takes no side features of {of}; {cure}")


def _model(
    config: TrainConfig, counts: TrainCounts, split: SequenceSplit, item_table: ItemTable | None, device: torch.device
) -> ItemSequenceModel:
    num_items = len(counts.users_per_item)
    arguments = {"num_items": num_items, **config.model.model_dump(exclude={"name"}), "max_seq_len": config.data.max_seq_len}
    try:
        output = build_output(config, counts.users_per_item, counts.num_users)
        parts: dict[str, Any] = {} if output is None else {"output": output}
        if item_table is not None:
            parts["item_features"] = ItemFeatures.of(item_table, arguments["embedding_dim"])
        if split.train.features:
            _check_takes(config, "event_features", "data.event_columns", "events")
            parts["event_features"] = {name: FIRST + len(values) for name, values in split.feature_values.items()}
        model: ItemSequenceModel = build(config.model.name, **arguments, **parts).to(device)
    except (RuntimeError, MemoryError) as error:
        # torch says that memory is out by a RuntimeError of many lines; what was asked for is what the user can change.
        if not isinstance(error, (torch.OutOfMemoryError, MemoryError)) and "memory" not in str(error):
            raise
        asked = ", ".join(f"{name}={value}" for name, value in arguments.items() if value is not None)
        raise TrainingError(f"model: does not fit into memory with {asked}; make it smaller") from None
    return model


def _loaders(
    config: TrainConfig, split: SequenceSplit, processes: Processes, model: ItemSequenceModel
) -> tuple[BatchLoader, BatchLoader, BatchLoader]:
    if takes_times(model) and split.train.dataset.timestamps is None:
        raise TrainingError(
            "model.num_time_buckets: the events have no times; read a table with a time column, or train without time buckets"
        )
    common: dict[str, Any] = {
        "max_seq_len": config.data.max_seq_len,
        "seed": config.seed,
        "num_workers": config.training.num_workers,
        "pin_memory": processes.device.type == "cuda",
        "rank": processes.rank,
        "world_size": processes.world_size,
        "with_times": takes_times(model),
        "with_features": event_features(model),
    }
    try:
        tokens = config.training.max_tokens
        of = config.training
        size: dict[str, Any] = {"max_tokens": tokens} if tokens else {"batch_size": of.batch_size, "balance": of.balance}
        train_loader = BatchLoader(split.train, shuffle=True, stochastic_length=of.stochastic_length, **size, **common)
        common.update(batch_size=config.evaluation.eval_batch_size, shuffle=False)
        users = config.evaluation.validate_users
        chosen = split.valid if users is None else split.valid.sample(users, config.seed)
        valid = BatchLoader(chosen, with_viewed=config.evaluation.filter_viewed, **common)
        return train_loader, valid, BatchLoader(split.test, with_viewed=True, **common)
    except ValueError as error:
        raise TrainingError(str(error)) from None


def _notes_of_features(split: SequenceSplit, item_table: ItemTable | None) -> Notes:
    """What side features of events and of items the model has."""
    named = [one_line(f"{name} ({len(values):,} values)") for name, values in split.feature_values.items()]
    of_events: Notes = {"event_features": named} if named else {}
    return of_events | ({} if item_table is None else item_table.notes)


def _write(
    directory: Path,
    config: TrainConfig,
    split: SequenceSplit,
    train_counts: TrainCounts,
    item_table: ItemTable | None,
    task: nn.Module,
    metrics: RunMetrics,
    history: list[dict[str, Any]],
) -> None:
    dataset = split.train.dataset
    description = {
        "name": split.name,
        "users": dataset.num_users,
        "items": dataset.num_items,
        "events": dataset.num_events,
        "train": len(split.train),
        "valid": len(split.valid),
        "test": len(split.test),
        "fingerprint": dataset.fingerprint,
        "time_unit": dataset.time_unit,
        "notes": {**dataset.notes, **split.notes, **_notes_of_features(split, item_table)},
        "unknown": {"valid": split.valid.unknown(), "test": split.test.unknown()},
    }
    save_pretrained(
        task.model,  # type: ignore[arg-type]
        directory,
        items=split.items,
        event_values=split.feature_values,
        name=config.model.name,
        config=config,
        split=description,
        metrics=metrics.to_json(),
        train_counts=train_counts,
        history=history,
    )
