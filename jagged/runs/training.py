"""`train`: from a configuration to a directory that stands alone."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from jagged import artifacts
from jagged.artifacts import CheckpointError
from jagged.config import TrainConfig
from jagged.data import (
    BatchLoader,
    SequenceDataset,
    SequenceSplit,
    read_events,
    split_global_time,
    split_leave_one_out,
    synthetic_sessions,
)
from jagged.metrics import RunMetrics, TrainCounts, cut_offs
from jagged.models import NextItemTask, SASRec, build, build_head
from jagged.models.pretrained import save_pretrained
from jagged.training.callbacks import Callback
from jagged.training.errors import TrainingError
from jagged.training.forecast import forecast
from jagged.training.processes import Processes, process_group, resolve_device
from jagged.training.trainer import Trainer, TrainResult, locked, resolved

DATASET = "dataset"


def train(
    config: TrainConfig,
    dataset: SequenceDataset | None = None,
    *,
    callbacks: Sequence[Callback] = (),
    resume: bool = False,
    dry_run: bool = False,
    progress: bool = True,
) -> TrainResult:
    """Train a model, keep its best weights, test them, and leave one directory that stands alone.

    In one process or under torchrun, on the CPU or on GPUs. On the CPU the same seed gives the same weights bit for bit, also
    when the run was killed and resumed, in the middle of an epoch too, and with any number of loader workers.

    SIGTERM and SIGINT end the run after the present step, with a checkpoint.

    Args:
        config: what to train, on what, how, and where to.
        dataset: the events; by default `config.data` is read, or the built-in sample where that is None.
        callbacks: called while the run goes.
        resume: go on from the newest checkpoint in `config.output`; without one, start.
        dry_run: stop after the forecast of memory and steps, with nothing written.
        progress: show the forecast, a progress bar and messages.

    Raises:
        DataError: the data cannot be used.
        TrainingError: the run cannot start or go on: an output that holds another run, a loss that is NaN, options that do not
            fit the checkpoint. `TrainingInterrupted` after a signal.
        CheckpointError: a checkpoint is damaged or cannot be written.
    """
    config = resolved(config)
    directory = Path(config.output)
    with process_group(resolve_device(config.device)) as processes, ExitStack() as closing:
        if not dry_run:
            closing.enter_context(locked(directory, processes, resume))
        dataset = dataset if dataset is not None else _read(config, progress and processes.is_first)
        split = _split(config, dataset)
        if config.head != "cross-entropy" and processes.world_size > 1:
            raise TrainingError(f"head: {config.head} trains in one process; start one, or take head=cross-entropy")
        torch.manual_seed(config.seed)
        model = _model(config, dataset.num_items, processes.device)
        train_counts = TrainCounts.from_part(split.train)
        task = NextItemTask(
            model,
            head=build_head(config, train_counts.users_per_item).to(processes.device),
            train_counts=train_counts,
            filter_viewed=config.filter_viewed,
            ks=cut_offs(config.monitor),
        )
        loaders = _loaders(config, split, processes)
        expected = forecast(config, split, loaders[0], task, config.precision, processes)
        if progress and processes.is_first:
            print(expected, flush=True)
        if dry_run:
            return TrainResult(directory, RunMetrics(), [], float("nan"), 0, 0, 0.0, forecast=expected)
        if processes.is_first:
            with artifacts.writing(directory / DATASET, "make room, or choose another output", CheckpointError):
                dataset.save(directory / DATASET)

        def write(whole: nn.Module, metrics: RunMetrics, history: list[dict[str, Any]]) -> None:
            _write(directory, config, split, whole, train_counts, metrics, history)

        drawn = len(split.valid) if config.validate_users is None else config.validate_users
        note = f" of {drawn:,} of {len(split.valid):,} users" if drawn < len(split.valid) else ""
        trainer = Trainer(task, config, callbacks=callbacks)
        result = trainer.run(
            processes, config, loaders, resume, progress, fingerprint=dataset.fingerprint, write=write, valid_note=note
        )
        return replace(result, forecast=expected)


def _read(config: TrainConfig, progress: bool) -> SequenceDataset:
    if config.data is None:
        return synthetic_sessions(config.seed)[0]
    return read_events(
        config.data,
        format=config.format,
        user_column=config.user_column,
        item_column=config.item_column,
        timestamp_column=config.timestamp_column,
        progress=progress,
    )


def _split(config: TrainConfig, dataset: SequenceDataset) -> SequenceSplit:
    if config.split == "global-time":
        split = split_global_time(dataset, config.valid_fraction, config.test_fraction)
    else:
        split = split_leave_one_out(dataset)
    for name, part in (("training", split.train), ("validation", split.valid), ("test", split.test)):
        if not len(part):
            raise TrainingError(
                f"no user has events for {name} under the {split.name} split of {dataset!r}; "
                "a user needs at least 3 events: give more data"
            )
    return split


def _model(config: TrainConfig, num_items: int, device: torch.device) -> SASRec:
    arguments = _model_arguments(config, num_items)
    try:
        model: SASRec = build(config.model, **arguments).to(device)
    except (RuntimeError, MemoryError) as error:
        # torch says that memory is out by a RuntimeError of many lines; what was asked for is what the user can change.
        if not isinstance(error, (torch.OutOfMemoryError, MemoryError)) and "memory" not in str(error):
            raise
        asked = ", ".join(f"{name}={value}" for name, value in arguments.items())
        raise TrainingError(f"model: does not fit into memory with {asked}; make it smaller") from None
    return model


def _model_arguments(config: TrainConfig, num_items: int) -> dict[str, Any]:
    names = ("embedding_dim", "num_heads", "num_layers", "max_seq_len", "dropout")
    return {"num_items": num_items, **{name: getattr(config, name) for name in names}}


def _loaders(config: TrainConfig, split: SequenceSplit, processes: Processes) -> tuple[BatchLoader, BatchLoader, BatchLoader]:
    common: dict[str, Any] = {
        "max_seq_len": config.max_seq_len,
        "seed": config.seed,
        "num_workers": config.num_workers,
        "pin_memory": processes.device.type == "cuda",
        "rank": processes.rank,
        "world_size": processes.world_size,
    }
    try:
        size: dict[str, Any] = {"max_tokens": config.max_tokens} if config.max_tokens else {"batch_size": config.batch_size}
        train_loader = BatchLoader(split.train, shuffle=True, **size, **common)
        common.update(batch_size=config.eval_batch_size, shuffle=False)
        chosen = split.valid if config.validate_users is None else split.valid.sample(config.validate_users, config.seed)
        valid = BatchLoader(chosen, with_viewed=config.filter_viewed, **common)
        return train_loader, valid, BatchLoader(split.test, with_viewed=True, **common)
    except ValueError as error:
        raise TrainingError(str(error)) from None


def _write(
    directory: Path,
    config: TrainConfig,
    split: SequenceSplit,
    task: nn.Module,
    train_counts: TrainCounts,
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
        "notes": {**dataset.notes, **split.notes},
    }
    save_pretrained(
        task.model,  # type: ignore[arg-type]
        directory,
        items=dataset.items,
        name=config.model,
        config=config,
        split=description,
        metrics=metrics.to_json(),
        train_counts=train_counts,
        history=history,
    )
