"""Train a model of rows with sets of labels: from a configuration to a directory that stands alone."""

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
from jagged.config import (
    BlockSparseHeadOptions,
    BottleneckHeadOptions,
    DenseHeadOptions,
    FixedFanInHeadOptions,
    GroupSparseHeadOptions,
    LabelHead,
    MultiLabelConfig,
)
from jagged.data import MultiLabelRows, label_loader
from jagged.label_metrics import DEFAULT_KS
from jagged.metrics import RunMetrics
from jagged.models import MultiLabelModel
from jagged.models.pretrained import CONFIG, save_task
from jagged.modules import LabelGroups
from jagged.runs.labels.rows import LabelRows, LabelSplit
from jagged.runs.ranking.run import hardware
from jagged.runs.starting import data_folder, nothing_left_of_a_false_start, rewiring
from jagged.training.callbacks import Callback
from jagged.training.checkpoint import list_checkpoints
from jagged.training.errors import TrainingError
from jagged.training.forecast import forecast_rows
from jagged.training.loop import CHECKPOINTS
from jagged.training.processes import Processes, process_group, resolve_device
from jagged.training.table_updates import keep_on_host
from jagged.training.trainer import Trainer, TrainResult, locked, resolved
from jagged.versions import installed

DATASET, GROUPS = "dataset", "groups"
_FILE = "groups.safetensors"


def train_labels(
    config: MultiLabelConfig,
    rows: Any = None,
    *,
    callbacks: Sequence[Callback] = (),
    resume: bool = False,
    dry_run: bool = False,
    progress: bool = True,
) -> TrainResult:
    """`jagged.train` of a `MultiLabelConfig`; its arguments and errors are those.

    Args:
        rows: `MultiLabelRows`, a file or a table in memory with columns of id lists, or a pair of these, training and test; by
            default the files of `config.data` are read.
    """
    config = resolved(config)
    directory = Path(config.output)
    with process_group(resolve_device(config.device)) as processes, ExitStack() as closing:
        if getattr(config.head, "optimizer", "adamw") == "sgd" and processes.world_size > 1:
            raise TrainingError("head: optimizer=sgd trains in one process; start one, or take optimizer=adamw")
        if not dry_run:
            closing.enter_context(locked(directory, processes, resume))
            closing.enter_context(nothing_left_of_a_false_start(directory, processes, DATASET, GROUPS))
        shown = progress and processes.is_first
        kept = _kept(config, rows, directory, processes, closing, dry_run=dry_run, progress=shown)
        split = kept.split(config)
        torch.manual_seed(config.seed)
        model = _model(config, split.train, None if dry_run else directory / GROUPS, processes, shown)
        keep_on_host(model, config.trainer, processes.world_size)
        parts = LabelSplit(*(_share(part, processes, is_whole=not number) for number, part in enumerate(split)))
        loader = partial(label_loader, num_workers=config.training.num_workers)
        batch_size, eval_batch_size = config.training.batch_size, config.evaluation.eval_batch_size
        train, valid, test = (
            loader(part, eval_batch_size if number else batch_size, shuffle=not number) for number, part in enumerate(parts)
        )
        expected = forecast_rows(config, parts.train, len(train), model, processes)
        if shown:
            print(expected, flush=True)
        if dry_run:
            return TrainResult(directory, RunMetrics(), [], float("nan"), 0, 0, 0.0, forecast=expected)
        if processes.is_first and not list_checkpoints(directory / CHECKPOINTS):
            # From here on the run needs nothing else to go on; one that goes on already has its own.
            with artifacts.writing(directory / CONFIG, "make room, or choose another output", CheckpointError):
                config.save(directory / CONFIG)
        trainer = Trainer(
            model, config.trainer, callbacks=[*rewiring(config.head, model.head, config.training, len(train)), *callbacks]
        )
        result = trainer.run(
            processes,
            config.trainer,
            (train, valid, test),
            resume,
            progress,
            fingerprint=kept.fingerprint,
            write=partial(_write, config, kept, split, processes.device),
            options=config.model_dump(),
        )
        return replace(result, forecast=expected)


def _kept(
    config: MultiLabelConfig,
    rows: Any,
    directory: Path,
    processes: Processes,
    closing: ExitStack,
    *,
    dry_run: bool,
    progress: bool,
) -> LabelRows:
    """The run's rows: read by the first process into the run's directory, and opened there by all."""
    place = data_folder(directory / DATASET, processes, closing, dry_run=dry_run)
    processes.in_first(lambda: _read(config, rows, place, progress))
    return LabelRows.load(place)


def _read(config: MultiLabelConfig, given: Any, place: Path, progress: bool) -> None:
    is_there, kept = place.is_dir(), place.parent / CONFIG
    if given is None and is_there and kept.exists():
        before = MultiLabelConfig.load(kept)
        if (before.data, before.seed) == (config.data, config.seed):
            return
    found = LabelRows.read(config, progress=progress) if given is None else _given(given, config, progress)
    # Whoever has too few rows hears of it before anything is written.
    found.split(config)
    if not is_there:
        with artifacts.writing(place, "make room, or choose another output", CheckpointError):
            found.save(place)
    elif found.fingerprint != (there := LabelRows.load(place)).fingerprint:
        has_these_rows = replace(found, names=None).fingerprint == replace(there, names=None).fingerprint
        what = "names of labels" if has_these_rows else "rows"
        raise TrainingError(f"data: {place} holds other {what} than those that are given; choose another output, or delete it")


def _given(rows: Any, config: MultiLabelConfig, progress: bool) -> LabelRows:
    parts = rows if isinstance(rows, (tuple, list)) else (rows, None)
    if len(parts) != 2:
        raise TrainingError(f"dataset: got {len(parts)} parts, expected rows, or a pair of them, training and test")
    return LabelRows.of(parts[0], parts[1], config.data, progress=progress)


def _share(rows: MultiLabelRows, processes: Processes, *, is_whole: bool) -> MultiLabelRows:
    """The rows of this process: every n-th one; of training as many in each."""
    if processes.world_size == 1:
        return rows
    count = len(rows) // processes.world_size * processes.world_size if is_whole else len(rows)
    return rows.take(np.arange(processes.rank, count, processes.world_size))


def _model(
    config: MultiLabelConfig, rows: MultiLabelRows, place: Path | None, processes: Processes, progress: bool
) -> MultiLabelModel:
    """The model, whose groups of labels the first process makes and keeps in `place`: made again they may be others."""
    if place is None:
        return _built(config, rows, processes, progress)
    made = processes.in_first(partial(_with_kept_groups, config, rows, place, processes, progress))
    return _built(config, rows, processes, progress, _kept_groups(config, place)) if made is None else made


def _with_kept_groups(
    config: MultiLabelConfig, rows: MultiLabelRows, place: Path, processes: Processes, progress: bool
) -> MultiLabelModel | None:
    """A new model, whose groups are kept; None where there are kept ones."""
    if _kept_groups(config, place) is not None:
        return None
    model = _built(config, rows, processes, progress)
    _keep_groups(config, model, place)
    return model


def _built(
    config: MultiLabelConfig,
    rows: MultiLabelRows,
    processes: Processes,
    progress: bool,
    groups: LabelGroups | None = None,
) -> MultiLabelModel:
    monitor = config.training.monitor
    ks = sorted({*DEFAULT_KS, *([int(monitor.partition("@")[2])] if "@" in monitor else [])})
    try:
        return MultiLabelModel.of(
            rows,
            **config.model.model_dump(exclude={"name"}),
            **(_of_head(config.head) | ({} if groups is None else {"grouping": groups})),
            **config.evaluation.model_dump(exclude={"eval_batch_size"}),
            ks=ks,
            seed=config.seed,
            device=processes.device,
            progress=progress,
        )
    except ValueError as error:
        raise TrainingError(f"model: {error}") from None


def _made_of(config: MultiLabelConfig) -> dict[str, Any]:
    """What groups of labels depend on, beside the rows."""
    return {"head": config.head.model_dump(), "split": config.split.model_dump(), "seed": config.seed}


def _keep_groups(config: MultiLabelConfig, model: MultiLabelModel, place: Path) -> None:
    head = model.head
    tensors = {"labels": head.labels[head.num_head_labels :].long(), "offsets": head.group_offsets}
    with artifacts.writing(place, "make room, or choose another output", CheckpointError):
        if place.is_dir():
            # Of a start with other options, before the first checkpoint.
            artifacts.remove(place)
        with artifacts.new_directory(place) as aside:
            artifacts.save_tensors(aside / _FILE, tensors)
            artifacts.write_manifest(aside, [_FILE], _made_of(config))


def _kept_groups(config: MultiLabelConfig, place: Path) -> LabelGroups | None:
    """The groups that lie in a directory; None where there are none, or others."""
    if not place.is_dir():
        return None
    with artifacts.errors_as(CheckpointError):
        content = artifacts.verify(place).content
        tensors = artifacts.read_tensors(place / _FILE)
    if {name: content.get(name) for name in ("head", "split", "seed")} != _made_of(config):
        return None
    return LabelGroups(tensors["labels"], tensors["offsets"])


def _of_head(head: LabelHead) -> dict[str, Any]:
    """The arguments of `MultiLabelModel.of` that a head is."""
    options: dict[str, Any] = {"loss": head.loss, "label_smoothing": head.label_smoothing}
    if isinstance(head, DenseHeadOptions):
        return {**options, "dense_share": 1.0, "fan_in": 1}
    if isinstance(head, BottleneckHeadOptions):
        return {**options, "dense_share": 1.0, "fan_in": 1, "bottleneck_dim": head.bottleneck_dim}
    assert isinstance(head, (GroupSparseHeadOptions, FixedFanInHeadOptions, BlockSparseHeadOptions))
    options |= {"fan_in": head.fan_in, "dense_share": head.dense_share}
    if head.optimizer == "sgd":
        of_sgd = {"learning_rate": head.sgd_learning_rate, "momentum": head.sgd_momentum}
        options |= {"optimizer": "sgd", "optimizer_options": of_sgd}
    if isinstance(head, FixedFanInHeadOptions):
        return {**options, "group_size": 1, "grouping": "random"}
    is_adjacent = isinstance(head, BlockSparseHeadOptions)
    return {**options, "group_size": head.group_size, "grouping": head.grouping, "adjacent": is_adjacent}


def _write(
    config: MultiLabelConfig,
    rows: LabelRows,
    split: LabelSplit,
    device: torch.device,
    task: nn.Module,
    metrics: RunMetrics,
    history: list[dict[str, Any]],
) -> None:
    description = {
        "name": f"rows drawn by seed {config.seed}" if rows.test is None else f"a test of its own, seed {config.seed}",
        "rows": {name: len(part) for name, part in zip(split._fields, split, strict=True)},
        "num_features": rows.rows.num_features,
        "num_labels": rows.rows.num_labels,
        "labels": {name: len(part.labels) for name, part in zip(split._fields, split, strict=True)},
        "notes": _notes(rows),
        "fingerprint": rows.fingerprint,
        "seed": config.seed,
        "versions": installed(),
        "hardware": hardware(device),
    }
    save_task(
        task,
        config.output,
        config=config,
        split=description,
        metrics=metrics.to_json(),
        history=history,
        label_names=rows.names,
    )


def _notes(rows: LabelRows) -> dict[str, Any]:
    """What reading left out, of training and test together."""
    parts = [part.notes for part in (rows.rows, rows.test) if part is not None]
    found: dict[str, Any] = {}
    for notes in parts:
        for name, value in notes.items():
            found[name] = found[name] + value if name in found else value
    return found
