"""A model as a directory that stands alone: written atomically, verified before it is opened, never a pickle."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from jagged import artifacts
from jagged.artifacts import FLOATS, CheckpointError, Described, Expected, errors_as, message, shown
from jagged.config import ConfigError, RankingConfig, RunOptions, TrainConfig
from jagged.data import DataError, Encoders, Schema, Vocabulary
from jagged.data.dataset import values_file
from jagged.data.label_names import LABEL_NAMES, write_label_names
from jagged.data.vocabulary import FIRST
from jagged.evaluation import item_table
from jagged.metrics import TrainCounts
from jagged.models import ItemFeatures, ItemSequenceModel, build, build_empty, name_of
from jagged.modules import GroupSparseHead

WEIGHTS = "model.safetensors"
MODEL = "model.json"
ITEMS = "items.arrow"
CONFIG = "config.json"
SPLIT = "split.json"
METRICS = "metrics.json"
HISTORY = "history.jsonl"
SCHEMA = "schema.toml"
EVENT_SCHEMA = "event_schema.toml"
ENCODERS = "encoders.json"
_ENCODER_FILES = "encoders-"
FORMAT_VERSION = 1

# Arguments that leave no trace in the weights, a number of heads or a window, may be larger than a tiny model's tensors.
_ANY_MODEL_MAY = 1 << 20
_DTYPES = {torch.float32: FLOATS, torch.float64: FLOATS, torch.float16: FLOATS, torch.bfloat16: FLOATS, torch.bool: ("BOOL",)}


@dataclass(frozen=True)
class Pretrained:
    """A model that was read from a directory, and what lay beside it.

    Attributes:
        directory: where it was read.
        model: in eval mode.
        items: the ids behind the model's dense item numbers.
        event_values: by name of a side feature of events that the model takes the values behind its rows, from row 2 on.
        config: of the run that trained it; None where it was saved without.
        split: name and notes of the split it was trained under; empty where it was saved without.
        metrics: validation and test figures by protocol; empty where it was saved without.
        history: a row for each epoch of the run; empty where it was saved without.
    """

    directory: Path
    model: ItemSequenceModel
    items: Vocabulary
    event_values: dict[str, Vocabulary]
    config: TrainConfig | None
    split: dict[str, Any]
    metrics: dict[str, Any]
    history: list[dict[str, Any]]


@dataclass(frozen=True)
class PretrainedTask:
    """A task on a table that was read from a directory, and what is needed to give it other rows.

    Attributes:
        directory: where it was read.
        task: in eval mode.
        encoders: from ids to its numbers, and the statistics of numbers.
        schema: of the rows it was trained on.
        event_schema: of an event table beside them; None without.
        config: of the run that trained it.
        split: rule, counts, cut times, fingerprint, versions and hardware.
        metrics: validation and test figures by group.
        history: a row for each validation of the run.
    """

    directory: Path
    task: Any
    encoders: Encoders
    schema: Schema
    event_schema: Schema | None
    config: RankingConfig
    split: dict[str, Any]
    metrics: dict[str, Any]
    history: list[dict[str, Any]]


def save_pretrained(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    items: Vocabulary,
    event_values: Mapping[str, Vocabulary] | None = None,
    name: str | None = None,
    config: TrainConfig | None = None,
    split: Mapping[str, Any] | None = None,
    metrics: Mapping[str, Any] | None = None,
    train_counts: TrainCounts | None = None,
    history: Sequence[Mapping[str, Any]] | None = None,
) -> None:
    """Write a model into a directory that `from_pretrained` opens, on any machine.

    All files are written aside and flushed before the first one takes its place, the manifest last: what a crash leaves is the
    old directory, the new one, or one that `from_pretrained` refuses. Other files in the directory are left alone.

    Args:
        model: with a `config` of its arguments, for example `SASRec`.
        directory: made where it does not exist.
        items: the ids behind the model's dense item numbers.
        event_values: by name of a side feature of events that the model takes the values behind its rows, from row 2 on.
        name: the model's name in `jagged.models.build`; None: the one that its class is registered by.
        config, split, metrics, train_counts, history: what is kept beside it, where given.

    Raises:
        ValueError: a vocabulary does not fit the model's tables, or the model's class has no name and none is given.
        CheckpointError: the directory could not be written.
    """
    if len(items) != (num_items := len(item_table(model))):
        raise ValueError(f"items: got {len(items)} ids, expected {num_items}, one for each row of the item table")
    if (name := name or name_of(model)) is None:
        raise ValueError(
            f"model: got a {type(model).__name__}, expected one whose class has a name; give it one by jagged.models.register, "
            "or say name="
        )

    expected = {feature: count - FIRST for feature, count in getattr(model, "event_features", {}).items()}
    values = dict(event_values or {})
    if (found := {feature: len(of) for feature, of in values.items()}) != expected:
        raise ValueError(f"event_values: got so many values: {found}, expected those of the model's event_features: {expected}")

    def more(aside: Path) -> None:
        items.save(aside / ITEMS)
        for place, feature in enumerate(expected):
            values[feature].save(aside / values_file(place))
        if train_counts is not None:
            train_counts.save(aside)

    documents = {CONFIG: config and config.model_dump(), SPLIT: split, METRICS: metrics}
    _save(model, Path(directory), name, model.config, documents, history, more)  # type: ignore[arg-type]


def save_task(
    task: nn.Module,
    directory: str | os.PathLike[str],
    *,
    config: RunOptions | None = None,
    split: Mapping[str, Any] | None = None,
    metrics: Mapping[str, Any] | None = None,
    history: Sequence[Mapping[str, Any]] | None = None,
    encoders: Encoders | None = None,
    schema: Schema | None = None,
    event_schema: Schema | None = None,
    label_names: pa.LargeStringArray | None = None,
) -> None:
    """Write a task's kept weights into a directory that `load_task` opens, as `save_pretrained` does.

    The class stands there by its registered name (`jagged.models.register`), where it has one, with its `config` as arguments.

    Args:
        task: a `RankingTask`.
        directory: made where it does not exist.
        config, split, metrics, history: what is kept beside it, where given.
        encoders, schema, event_schema: of the table it was trained on, where given; `open_task` needs the first two, a name
            and a config.
        label_names: large_string `[L]`, of the labels that it scores, where given.

    Raises:
        CheckpointError: the directory could not be written.
    """
    kept = task.kept

    def more(aside: Path) -> None:
        for file, one in ((SCHEMA, schema), (EVENT_SCHEMA, event_schema)):
            if one is not None:
                (aside / file).write_text(one.to_toml(), encoding="utf-8")
        if encoders is not None:
            (aside / ENCODERS).write_bytes(artifacts.dump_json(encoders.write(aside, _ENCODER_FILES)))
        if label_names is not None:
            write_label_names(label_names, aside / LABEL_NAMES)

    documents = {CONFIG: config and config.model_dump(), SPLIT: split, METRICS: metrics}
    name = name_of(kept)  # type: ignore[arg-type]
    # What is built by no name needs no arguments; its `config` may be anything.
    arguments = getattr(kept, "config", {}) if name else {}
    _save(kept, Path(directory), name, arguments, documents, history, more)  # type: ignore[arg-type]


def open_task(directory: str | os.PathLike[str], *, device: torch.device | str = "cpu") -> PretrainedTask:
    """Open what `train` left of a run on a table, after verifying every listed file. Needs no GPU.

    Args:
        directory: the directory.
        device: where the task goes.

    Raises:
        CheckpointError: a file is missing, damaged or not what it should be; the message names it.
    """
    with errors_as(CheckpointError, ConfigError, DataError):
        directory, listed = _verified(directory, (WEIGHTS, MODEL), "model")
        if ENCODERS not in listed and ITEMS in listed:
            raise CheckpointError(f"{directory}: holds a model of sequences; open it by Recommender.from_pretrained")
        for file in (ENCODERS, SCHEMA, CONFIG, SPLIT):
            if file not in listed:
                raise CheckpointError(f"{directory / file}: missing: the directory holds no model that was trained on a table")
        documents = {file: artifacts.read_json(directory / file) for file in (SPLIT, METRICS) if file in listed}
        history = artifacts.read_json_lines(directory / HISTORY) if HISTORY in listed else []
        config = RankingConfig.load(directory / CONFIG)
        content = artifacts.read_json(directory / ENCODERS)
        encoders = Encoders.read(directory, content, directory / ENCODERS, _ENCODER_FILES)
        event_schema = Schema.load(directory / EVENT_SCHEMA) if EVENT_SCHEMA in listed else None
        schema = Schema.load(directory / SCHEMA)
        task = _read_model(directory).to(device).eval()
    return PretrainedTask(
        directory, task, encoders, schema, event_schema, config, documents[SPLIT], documents.get(METRICS, {}), history
    )


def load_task(directory: str | os.PathLike[str], task: Any = None, *, device: torch.device | str = "cpu") -> Any:
    """Read what `save_task` wrote, after verifying every listed file.

    Args:
        directory: the directory.
        task: whose kept weights are replaced; None to build what was saved by its registered name.
        device: where it goes.

    Returns:
        The task, in eval mode.

    Raises:
        CheckpointError: a file is missing, damaged, or does not fit the task; the message names it.
    """
    with errors_as(CheckpointError):
        directory, _ = _verified(directory, (WEIGHTS, MODEL), "task")
        if task is None:
            return _read_model(directory).to(device).eval()
        expected = {name: _expected(value) for name, value in task.kept.state_dict().items()}
        weights = artifacts.read_tensors(directory / WEIGHTS, expected, f"by {type(task.kept).__name__}")
    task.kept.load_state_dict(weights)
    _check_numbers(task.kept, directory / WEIGHTS)
    return task.to(device).eval()


def apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with memory of their own each: weights that are one under two names are written twice."""
    seen: set[int] = set()
    own = {}
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        own[name] = tensor.clone() if place and place in seen else tensor
        seen.add(place)
    return own


def _save(
    model: nn.Module,
    directory: Path,
    name: str | None,
    arguments: Mapping[str, Any],
    documents: Mapping[str, Mapping[str, Any] | None],
    history: Sequence[Mapping[str, Any]] | None,
    more: Callable[[Path], None] = lambda aside: None,
) -> None:
    described = {"format_version": FORMAT_VERSION, "model": name, "arguments": arguments}
    cure = "make room or choose another directory; an unfinished one is refused by from_pretrained"
    with artifacts.writing(directory, cure, CheckpointError), artifacts.replacing_files(directory) as aside:
        artifacts.save_tensors(aside / WEIGHTS, apart(model.state_dict()))
        more(aside)
        for file, content in {MODEL: described, **documents}.items():
            if content is not None:
                (aside / file).write_bytes(artifacts.dump_json(dict(content)))
        if history:
            (aside / HISTORY).write_bytes(artifacts.dump_json_lines(history))
        artifacts.write_manifest(aside, os.listdir(aside))


def from_pretrained(directory: str | os.PathLike[str], *, device: torch.device | str = "cpu") -> Pretrained:
    """Open a directory that `train` or `save_pretrained` wrote, after verifying every listed file. Needs no GPU.

    Args:
        directory: the directory.
        device: where the model goes.

    Raises:
        CheckpointError: a file is missing, damaged or not what it should be; the message names it.
    """
    with errors_as(CheckpointError, ConfigError, DataError):
        directory, listed = _verified(directory, (WEIGHTS, MODEL), "model")
        if ITEMS not in listed and ENCODERS in listed:
            raise CheckpointError(f"{directory}: holds a model of a table's requests; open it by Ranker.from_pretrained")
        if ITEMS not in listed:
            raise CheckpointError(f"{directory / ITEMS}: missing: the directory holds no model")
        documents = {file: artifacts.read_json(directory / file) for file in (SPLIT, METRICS) if file in listed}
        history = artifacts.read_json_lines(directory / HISTORY) if HISTORY in listed else []
        config = TrainConfig.load(directory / CONFIG) if CONFIG in listed else None
        items = Vocabulary.load(directory / ITEMS)
        model = _read_model(directory).to(device).eval()
        event_values = {}
        for place, (name, count) in enumerate(getattr(model, "event_features", {}).items()):
            if (file := values_file(place)) not in listed:
                raise CheckpointError(f"{directory / file}: missing: the values of {name!r}, a side feature of events")
            event_values[name] = Vocabulary.load(directory / file)
            if len(event_values[name]) + FIRST != count:
                found = f"{len(event_values[name])} values of {name!r}"
                raise CheckpointError(message(directory / file, found, f"{count - FIRST}, as the model has"))
    if len(items) != (num_items := len(item_table(model))):
        raise CheckpointError(f"{directory / ITEMS}: {len(items)} ids, expected {num_items}, one for each item of the model")
    return Pretrained(
        directory, model, items, event_values, config, documents.get(SPLIT, {}), documents.get(METRICS, {}), history
    )


def _verified(directory: str | os.PathLike[str], needed: Sequence[str], what: str) -> tuple[Path, Collection[str]]:
    """The directory, which is there and not of a run that was stopped, and the files it lists; all needed ones are among them."""
    directory = Path(directory)
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such directory; expected one that `jagged train` or save_pretrained wrote")
    if not (directory / artifacts.MANIFEST).exists() and (directory / "checkpoints").is_dir():
        raise CheckpointError(
            f"{directory}: a run that has not ended; go on with it by `jagged train --resume`, or by resume=True of `fit`"
        )
    listed = artifacts.verify(directory, exact=False).files
    for file in needed:
        if file not in listed:
            raise CheckpointError(f"{directory / file}: missing: the directory holds no {what}")
    return directory, listed


def _read_model(directory: Path) -> ItemSequenceModel:
    where = directory / MODEL
    described = artifacts.read_json(where)
    if described.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(message(where, f"format version {shown(described.get('format_version'))}", str(FORMAT_VERSION)))
    name, arguments = described.get("model"), described.get("arguments")
    if not isinstance(name, str) or not isinstance(arguments, dict) or "device" in arguments:
        raise CheckpointError(f"{where}: expected a registered model's name and arguments; give load_task the task")
    header = artifacts.read_header(directory / WEIGHTS)
    _check_arguments(arguments, header, where)
    try:
        # Shapes are compared before the arguments have cost any memory.
        with _no_more_tensors_than(header, where):
            empty = build_empty(name, **arguments).state_dict()
        expected = {tensor: _expected(value) for tensor, value in empty.items()}
        weights = artifacts.read_tensors(directory / WEIGHTS, expected, f"by {MODEL}")
        with torch.random.fork_rng(devices=[]):
            model = build(name, **arguments)
        model.load_state_dict(weights)
    except artifacts.ArtifactError:
        raise
    except Exception as error:
        # The bytes are those that the manifest promised; what still fails was made by other hands.
        raise CheckpointError(f"{where}: no model of this library: {artifacts.reason(error)}") from error
    _check_numbers(model, directory / WEIGHTS)
    return model


def _check_numbers(model: nn.Module, where: Path) -> None:
    """Refuse places and inputs of labels, and values of items, that there are none of: kernels would read from other memory."""
    for features in (module for module in model.modules() if isinstance(module, ItemFeatures)):
        if (name := features.damage()) is not None:
            raise CheckpointError(message(where, f"{name} out of range", "those of a table of items", "copy the directory again"))
    for head in (module for module in model.modules() if isinstance(module, GroupSparseHead)):
        offsets, labels = head.group_offsets, torch.arange(head.num_labels, device=head.labels.device, dtype=head.labels.dtype)
        is_permutation = torch.equal(head.labels.sort().values, labels)
        fits = {
            "labels": is_permutation and torch.equal(head.places[head.labels], labels),
            "group_offsets": bool(offsets[0] == 0)
            and bool(offsets[-1] == len(head.weight))
            and bool((offsets.diff() >= 0).all()),
            "supports": bool(
                ((head.supports >= 0) & (head.supports <= head.tail_dim - (head.fan_in if head.adjacent else 1))).all()
            ),
        }
        for name, is_right in fits.items():
            if not is_right:
                cure = "copy the directory again"
                raise CheckpointError(message(where, f"{name} out of range", "those of a trained head", cure))


def _check_arguments(arguments: Any, header: Mapping[str, Described], where: Path) -> None:
    """Refuse a number that no model with these weights has: building with it may never end."""
    most = max(sum(tensor.numel for tensor in header.values()), _ANY_MODEL_MAY)
    waiting = [(name, value) for name, value in arguments.items()]
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, (dict, list)):
            waiting += [(name, part) for part in (value.values() if isinstance(value, dict) else value)]
        elif isinstance(value, (int, float)) and not abs(value) <= most:
            cure = f"the elements of {WEIGHTS}; copy the directory again"
            raise CheckpointError(message(f"{where}: {name}", shown(value), f"at most {most}", cure))


@contextmanager
def _no_more_tensors_than(header: Mapping[str, Described], where: Path) -> Iterator[None]:
    """Stop a model's building, in this thread, where it makes far more parameters than there are weights for."""
    # Parts may be built and replaced, or share a weight.
    most, made, thread = 4 * len(header) + 64, 0, threading.get_ident()

    def count(*_: object) -> None:
        nonlocal made
        made += threading.get_ident() == thread
        if made > most:
            cure = "copy the directory again"
            raise CheckpointError(message(where, f"a model of more than {most} tensors", f"the {len(header)} of {WEIGHTS}", cure))

    hook = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


def _expected(tensor: Tensor) -> Expected:
    return Expected(_DTYPES.get(tensor.dtype, ("I64", "I32", "I16", "I8", "U8")), tuple(tensor.shape))
