"""A model as a directory that stands alone: written atomically, verified before it is opened, never a pickle."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from jagged.config import ConfigError, TrainConfig
from jagged.data import DataError, Vocabulary
from jagged.models import build
from jagged.training import manifest
from jagged.training.errors import CheckpointError

if TYPE_CHECKING:
    from jagged.metrics import TrainCounts
    from jagged.models import SASRec

WEIGHTS = "model.safetensors"
MODEL = "model.json"
ITEMS = "items.arrow"
CONFIG = "config.json"
SPLIT = "split.json"
METRICS = "metrics.json"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class Pretrained:
    """A model that was read from a directory, and what lay beside it.

    Attributes:
        directory: where it was read.
        model: in eval mode.
        items: the ids behind the model's dense item numbers.
        config: of the run that trained it; None where it was saved without.
        split: name and notes of the split it was trained under; empty where it was saved without.
        metrics: validation and test figures by protocol; empty where it was saved without.
    """

    directory: Path
    model: SASRec
    items: Vocabulary
    config: TrainConfig | None
    split: dict[str, Any]
    metrics: dict[str, Any]


def save_pretrained(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    items: Vocabulary,
    name: str = "sasrec",
    config: TrainConfig | None = None,
    split: Mapping[str, Any] | None = None,
    metrics: Mapping[str, Any] | None = None,
    train_counts: TrainCounts | None = None,
) -> None:
    """Write a model into a directory that `from_pretrained` opens, on any machine.

    All files are written aside and flushed before the first one takes its place, the manifest last: what a crash leaves is the
    old directory, the new one, or one that `from_pretrained` refuses. Other files in the directory are left alone.

    Args:
        model: with a `config` of its arguments, for example `SASRec`.
        directory: made where it does not exist.
        items: the ids behind the model's dense item numbers.
        name: the model's name in `jagged.models.build`.
        config, split, metrics, train_counts: what is kept beside it, where given.

    Raises:
        ValueError: the vocabulary does not fit the model's item table.
        CheckpointError: the directory could not be written.
    """
    directory = Path(directory)
    if len(items) != len(model.item_weight):  # type: ignore[arg-type]
        raise ValueError(f"items: got {len(items)} ids, expected {len(model.item_weight)}, one for each row of the item table")  # type: ignore[arg-type]
    described = {"format_version": FORMAT_VERSION, "model": name, "arguments": model.config}
    documents = {MODEL: described, CONFIG: config and config.model_dump(), SPLIT: split, METRICS: metrics}
    with manifest.writing(directory, "make room or choose another directory; an unfinished one is refused by from_pretrained"):
        directory.mkdir(parents=True, exist_ok=True)
        aside = directory / ".unfinished"
        shutil.rmtree(aside, ignore_errors=True)
        try:
            aside.mkdir()
            _write_weights(model, aside / WEIGHTS)
            items.save(aside / ITEMS)
            if train_counts is not None:
                train_counts.save(aside)
            for file, content in documents.items():
                if content is not None:
                    (aside / file).write_bytes(manifest.dump_json(dict(content)))
            manifest.write_manifest(aside, [path.name for path in aside.iterdir()])
            manifest.replace_files(aside, directory)
        finally:
            shutil.rmtree(aside, ignore_errors=True)


def from_pretrained(directory: str | os.PathLike[str], *, device: torch.device | str = "cpu") -> Pretrained:
    """Open a directory that `train` or `save_pretrained` wrote, after verifying every listed file. Needs no GPU.

    Args:
        directory: the directory.
        device: where the model goes.

    Raises:
        CheckpointError: a file is missing, damaged or not what it should be; the message names it.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such directory; expected one that `jagged train` or save_pretrained wrote")
    listed = set(manifest.verify(directory, exact=False))
    for file in (WEIGHTS, MODEL, ITEMS):
        if file not in listed:
            raise CheckpointError(f"{directory / file}: missing: the directory holds no model")
    documents = {file: manifest.read_json(directory / file) for file in (SPLIT, METRICS) if file in listed}
    try:
        config = TrainConfig.load(directory / CONFIG) if CONFIG in listed else None
        items = Vocabulary.load(directory / ITEMS)
    except (ConfigError, DataError) as error:
        raise CheckpointError(str(error)) from None
    model = _read_model(directory).to(device).eval()
    if len(items) != len(model.item_weight):
        raise CheckpointError(
            f"{directory / ITEMS}: {len(items)} ids, expected {len(model.item_weight)}, one for each item of the model"
        )
    return Pretrained(directory, model, items, config, documents.get(SPLIT, {}), documents.get(METRICS, {}))


def _write_weights(model: nn.Module, path: Path) -> None:
    try:
        save_file({name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}, path)
    except SafetensorError as error:
        # Its message holds the operating system's, of a full disk for example.
        raise OSError(str(error)) from error


def _read_model(directory: Path) -> SASRec:
    described = manifest.read_json(directory / MODEL)
    if described.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{directory / MODEL}: format version {described.get('format_version')!r}, expected {FORMAT_VERSION}"
        )
    name, arguments = described.get("model"), described.get("arguments")
    if not isinstance(name, str) or not isinstance(arguments, dict) or "device" in arguments:
        raise CheckpointError(f"{directory / MODEL}: expected the model's name and arguments")
    try:
        weights = load_file(directory / WEIGHTS)
        # Shapes are compared before the arguments have cost any memory.
        _check_shapes(build(name, device="meta", **arguments).state_dict(), weights, directory / WEIGHTS)
        with torch.random.fork_rng(devices=[]):
            model = build(name, **arguments)
        model.load_state_dict(weights)
    except CheckpointError:
        raise
    except Exception as error:
        # The bytes are those that the manifest promised; what still fails was made by other hands.
        raise CheckpointError(
            f"{directory / MODEL}: no model of this library: {type(error).__name__}: {str(error)[:200]}"
        ) from error
    return model


def _check_shapes(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], path: Path) -> None:
    for name in sorted(expected.keys() | found.keys()):
        shapes = [tuple(tensors[name].shape) if name in tensors else "none" for tensors in (found, expected)]
        if shapes[0] != shapes[1]:
            raise CheckpointError(f"{path}: {name}: found {shapes[0]}, expected {shapes[1]} by {MODEL}")
