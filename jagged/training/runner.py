"""`train`: from a configuration to a directory that stands alone."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
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
from jagged.metrics import TrainCounts
from jagged.models import TrainTask, build, build_head
from jagged.models.pretrained import save_pretrained
from jagged.training.checkpoint import latest_checkpoint, load_checkpoint
from jagged.training.display import Display
from jagged.training.engine import Engine
from jagged.training.errors import TrainingError
from jagged.training.forecast import Forecast, forecast
from jagged.training.loop import BEST, CHECKPOINTS, Loop
from jagged.training.processes import Processes, process_group, resolve_device
from jagged.training.state import TrainState
from jagged.training.stop import stop_wish

DATASET = "dataset"


@dataclass(frozen=True)
class TrainResult:
    """What a run leaves.

    Attributes:
        directory: the run's directory; `jagged.models.pretrained.from_pretrained` opens it.
        metrics: what `metrics.json` holds: `"valid"` and `"test"`, each with its figures by protocol. Empty after a dry run.
        history: a row for each epoch: `epoch, step, loss, learning_rate, gradient_norm, seconds, tokens_per_second`, and the
            validation figures by name.
        best_metric: the monitored validation metric of the weights that were kept; NaN after a dry run.
        epochs, steps: trained in all, earlier attempts included.
        seconds: of training and validation, earlier attempts included.
        forecast: what was forecast.
    """

    directory: Path
    metrics: dict[str, Any]
    history: list[dict[str, Any]]
    best_metric: float
    epochs: int
    steps: int
    seconds: float
    forecast: Forecast = field(repr=False)


def train(
    config: TrainConfig,
    dataset: SequenceDataset | None = None,
    *,
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
        resume: go on from the newest checkpoint in `config.output`; without one, start.
        dry_run: stop after the forecast of memory and steps, with nothing written.
        progress: show the forecast, a progress bar and messages.

    Raises:
        DataError: the data cannot be used.
        TrainingError: the run cannot start or go on: an output that holds another run, a loss that is NaN, options that do not
            fit the checkpoint. `TrainingInterrupted` after a signal.
        CheckpointError: a checkpoint is damaged or cannot be written.
    """
    device = resolve_device(config.device)
    precision = config.precision
    if precision == "auto":
        precision = "bf16-mixed" if device.type == "cuda" else "32-true"
    config = config.model_copy(update={"precision": precision, "device": device.type})
    directory = Path(config.output)
    with process_group(device) as processes, ExitStack() as held:
        if not dry_run:
            _claim(directory, resume, processes, held)
        dataset = dataset if dataset is not None else _read(config, progress and processes.is_first)
        split = _split(config, dataset)
        torch.manual_seed(config.seed)
        model = build(config.model, **_model_arguments(config, dataset.num_items)).to(device)
        if config.head != "cross-entropy" and processes.world_size > 1:
            raise TrainingError(f"head: {config.head} trains in one process; start one, or take head=cross-entropy")
        train_counts = TrainCounts.from_part(split.train)
        task = TrainTask(model, head=build_head(config, train_counts.users_per_item).to(device))
        loaders = _loaders(config, split, processes)
        expected = forecast(config, split, loaders[0], task, precision, processes)
        if progress and processes.is_first:
            print(expected, flush=True)
        if dry_run:
            return TrainResult(directory, {}, [], float("nan"), 0, 0, 0.0, expected)
        with stop_wish() as wish, ExitStack() as closing:
            for loader in loaders:
                closing.callback(loader.close)
            if processes.is_first:
                artifacts.sweep(directory)
                with artifacts.writing(directory / DATASET, "make room, or choose another output", CheckpointError):
                    dataset.save(directory / DATASET)
            engine = Engine(model, task, config, precision, processes)
            # Dropout differs between processes; what they share was drawn before.
            torch.manual_seed(config.seed + processes.rank)
            state = TrainState(config.model_dump(), dataset.fingerprint, processes.world_size, dataset.num_items)
            state, best = _resume(engine, directory, state) if resume else (state, {})
            curves = directory / "tensorboard" if config.tensorboard and processes.is_first else None
            with Display(device, curves, state.step, progress and processes.is_first) as display:
                if state.step:
                    display.say(f"resumed after step {state.step:,} from {directory / CHECKPOINTS}")
                loop = Loop(config, split, engine, loaders, state, wish, display, train_counts, best)
                loop.fit()
                metrics = loop.test()
            with engine.whole_model() as whole:
                if processes.is_first:
                    _write(directory, config, dataset, split, whole, loop, metrics)
            return TrainResult(
                directory,
                metrics,
                state.history,
                metrics["best"]["value"],
                len(state.history),
                state.step,
                state.seconds,
                expected,
            )


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
        valid = BatchLoader(split.valid, with_viewed=config.filter_viewed, **common)
        return train_loader, valid, BatchLoader(split.test, with_viewed=True, **common)
    except ValueError as error:
        raise TrainingError(str(error)) from None


def _claim(directory: Path, resume: bool, processes: Processes, held: ExitStack) -> None:
    """Hold the output for this run, or refuse it; the first process holds it for all."""
    # Before anything is put there, and again where nobody else can put anything there.
    _check_output(directory, resume)
    if processes.is_first:
        busy = TrainingError(f"output: another process is training in {directory}; wait for it or choose another output")
        with artifacts.writing(directory, "choose another output", CheckpointError):
            held.enter_context(artifacts.lock(directory, busy))
        _check_output(directory, resume)


def _check_output(directory: Path, resume: bool) -> None:
    if directory.exists() and not directory.is_dir():
        raise TrainingError(f"output: {directory} is a file, expected a directory")
    if not resume and directory.exists() and any(entry.name != artifacts.LOCK for entry in directory.iterdir()):
        raise TrainingError(
            f"output: {directory} is not empty; resume to go on with the run in it, choose another output, or delete it"
        )


def _resume(engine: Engine, directory: Path, fresh: TrainState) -> tuple[TrainState, dict[str, torch.Tensor]]:
    path = latest_checkpoint(directory / CHECKPOINTS)
    if path is None:
        return fresh, {}
    tensors, content = load_checkpoint(path)
    state = TrainState.from_json(content, path)
    state.check_resumable(fresh, path)
    state.config = fresh.config
    engine.load_state_tensors(tensors, state.step)
    best = engine.own_rows({name: value for name, value in tensors.items() if name.startswith(BEST)})
    return state, {name.removeprefix(BEST): value.to(engine.processes.device) for name, value in best.items()}


def _write(
    directory: Path,
    config: TrainConfig,
    dataset: SequenceDataset,
    split: SequenceSplit,
    model: nn.Module,
    loop: Loop,
    metrics: dict[str, Any],
) -> None:
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
        model,
        directory,
        items=dataset.items,
        name=config.model,
        config=config,
        split=description,
        metrics=metrics,
        train_counts=loop.train_counts,
        history=loop.state.history,
    )
