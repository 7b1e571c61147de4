"""Checkpoints: what a run needs to go on, whole on disk or not there.

A checkpoint is a directory `step-00000123` of safetensors files, `state.json` (everything that is no tensor) and
`manifest.json`. It is written under another name, flushed, listed and renamed into place. No pickle is written or read.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from jagged import artifacts
from jagged.artifacts import CheckpointError, errors_as

STATE = "state.json"

#: A file larger than this holds a single tensor. What lies on a GPU comes to the host a file at a time.
FILE_BYTES = 2**30

_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")


def next_name(root: Path, step: int) -> str:
    """The name of the next checkpoint at `step`: `step-00000123`, or `step-00000123.1` where that is taken.

    None is ever replaced: between taking the old one away and renaming the new one there would be a moment with neither.
    """
    taken = [number for at, number in _numbered(root) if at == step]
    name = f"step-{step:08d}"
    return f"{name}.{1 + max(taken)}" if taken else name


def save_checkpoint(root: Path, name: str, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> Path:
    """Write a checkpoint; it appears under its name whole, on disk, or not at all.

    Args:
        root: directory of the run's checkpoints.
        name: from `next_name`.
        tensors: what goes into safetensors files.
        state: what goes into `state.json`.

    Raises:
        CheckpointError: it could not be written, a full disk for example; nothing of the attempt is left and older checkpoints
            are untouched.
    """
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    cure = f"{size / 2**20:.0f} MiB are needed; earlier checkpoints are untouched: make room and resume"
    with artifacts.writing(root / name, cure, CheckpointError), artifacts.new_directory(root / name) as aside:
        for number, names in enumerate(_files(tensors), 1):
            artifacts.save_tensors(aside / f"tensors-{number:05d}.safetensors", {name: tensors[name] for name in names})
        (aside / STATE).write_bytes(artifacts.dump_json(dict(state)))
        artifacts.write_manifest(aside, os.listdir(aside))
    return root / name


def list_checkpoints(root: Path) -> list[Path]:
    """The run's checkpoints, oldest first, unverified."""
    return [path for _, path in sorted(_numbered(root).items())]


def load_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Verify a checkpoint and read it: its tensors, on the CPU, and its state.

    Raises:
        CheckpointError: the checkpoint is damaged; the message names the file.
    """
    state = verify_checkpoint(path)
    tensors: dict[str, Tensor] = {}
    with errors_as(CheckpointError):
        for file in sorted(path.glob("*.safetensors")):
            tensors.update(artifacts.read_tensors(file))
    return tensors, state


def verify_checkpoint(path: Path) -> dict[str, Any]:
    """Check every byte of a checkpoint and return its state.

    Raises:
        CheckpointError: it is damaged; the message names the file.
    """
    with errors_as(CheckpointError):
        names = artifacts.verify(path).files
        for name in names:
            if name != STATE and not name.endswith(".safetensors"):
                raise CheckpointError(f"{path / name}: no file of a checkpoint")
        if STATE not in names:
            raise CheckpointError(f"{path / STATE}: missing: no checkpoint of this library")
        return artifacts.read_json(path / STATE)


def latest_checkpoint(root: Path) -> Path | None:
    """The newest checkpoint, or None without any.

    A damaged one is an error and not passed over: going on from an older one loses work, which is the user's to decide.

    Raises:
        CheckpointError: the newest checkpoint is damaged; the message names the file and how to go on from the one before.
    """
    checkpoints = list_checkpoints(root)
    if not checkpoints:
        return None
    newest = checkpoints[-1]
    try:
        verify_checkpoint(newest)
    except CheckpointError as error:
        older = f"go on from {checkpoints[-2].name}" if len(checkpoints) > 1 else "start again"
        raise CheckpointError(f"{error}; delete {newest} to {older}") from None
    return newest


def prune(root: Path, keep: int) -> None:
    """Remove all but the last `keep` checkpoints; a half removed one is never taken for a checkpoint."""
    for path in list_checkpoints(root)[:-keep]:
        with contextlib.suppress(OSError):
            artifacts.remove(path)


def _files(tensors: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """The names of the tensors in each file: as many as fit into `FILE_BYTES`."""
    names: list[str] = []
    filled = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if names and filled + size > FILE_BYTES:
            yield names
            names, filled = [], 0
        names.append(name)
        filled += size
    if names:
        yield names


def _numbered(root: Path) -> dict[tuple[int, int], Path]:
    """The checkpoints by their step, and by which of that step they are, from 0."""
    entries = [entry for entry in root.iterdir() if entry.is_dir()] if root.is_dir() else []
    return {(int(match[1]), int(match[2] or 0)): entry for entry in entries if (match := _NAME.fullmatch(entry.name))}
