"""Whether the files of a run's directory fit one another: each is as it was written, but other hands may have written it."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from jagged.artifacts import CheckpointError, message, shown
from jagged.data import DataError, Dataset, Kind, Part
from jagged.data.errors import refuse
from jagged.models import RankingInputs, RequestModel
from jagged.models.pretrained import ENCODERS, EVENT_SCHEMA, MODEL, SCHEMA, SPLIT, PretrainedTask

_COPY = "copy the directory again"


class _History(BaseModel, strict=True):
    delay: int
    ties: str


class _Split(BaseModel, strict=True):
    """What is read of `split.json`."""

    name: str
    counts: dict[str, int]
    reading: dict[str, int]
    rows: dict[str, int]
    time_kind: Literal["number", "naive", "zoned", "none"]
    fingerprint: str
    history: _History | None
    event_labels: list[str]
    event_lists: list[str]
    event_weights: str | None
    versions: dict[str, str]
    hardware: dict[str, str]


# The kinds of the columns of events that it names.
_OF_EVENTS = {"event_labels": (Kind.LABEL,), "event_lists": (Kind.IDS,), "event_weights": (Kind.NUMBER, Kind.WEIGHT)}


def check_opened(opened: PretrainedTask) -> None:
    """Refuse a model of another kind, encoders of other sizes than its tables, and a split that is none.

    Raises:
        CheckpointError: with the file.
    """
    directory, model, split = opened.directory, opened.task, opened.split
    if not isinstance(model, RequestModel):
        raise CheckpointError(message(directory / MODEL, f"a {type(model).__name__}", "a ranking model", _COPY))
    for table, size in model.config["sizes"].items():
        if opened.encoders.sizes.get(table) != size:
            found = f"{shown(opened.encoders.sizes.get(table))} numbers in the table {shown(table)}"
            raise CheckpointError(message(directory / ENCODERS, found, f"{size}, as {MODEL} has them", _COPY))
    try:
        _Split.model_validate(split)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = ".".join(map(str, problem["loc"]))
        raise CheckpointError(
            message(directory / SPLIT, f"{shown(where)}: {problem['msg']}", "what training writes", _COPY)
        ) from None
    schema, file = (opened.schema, SCHEMA) if opened.event_schema is None else (opened.event_schema, EVENT_SCHEMA)
    for key, kinds in _OF_EVENTS.items():
        names: list[str] = [split[key]] if isinstance(split[key], str) else split[key] or []
        known = [column.name for column in schema.of_kind(*kinds)]
        if len(set(names)) < len(names) or not set(names) <= set(known):
            raise CheckpointError(
                message(directory / SPLIT, f"{key} {shown(names)}", f"some of {shown(known)}, as {file} has them", _COPY)
            )


def check_data(opened: PretrainedTask, dataset: Dataset) -> None:
    """Refuse a directory's data that are not those that its model was trained on.

    Raises:
        DataError: with the directory.
    """
    split = opened.split
    told = split["fingerprint"], split["time_kind"], opened.schema
    if (dataset.fingerprint, dataset.time_kind, dataset.schema) != told:
        raise refuse(dataset.directory, "another table", f"the one that {SPLIT} and {SCHEMA} tell of", _COPY)


def fitting(opened: PretrainedTask, dataset: Dataset, **options: Any) -> Part:
    """A part with a model's encoders, whose batches have what the model reads.

    Raises:
        DataError: with what differs.
    """
    try:
        part = Part(dataset, encoders=opened.encoders, **options)
        found = RankingInputs.of(part, list(opened.task.inputs.list_histories))
    except ValueError as error:
        raise DataError(f"{opened.directory}: {error}") from None
    for one in fields(RankingInputs):
        # Without labels rows are scored.
        if one.name != "labels" and (has := getattr(found, one.name)) != (wants := getattr(opened.task.inputs, one.name)):
            raise refuse(
                opened.directory / MODEL,
                f"a model that reads {one.name} {shown(wants)}",
                f"{shown(has)}, as rows and events have them",
                "give tables with the columns of training, or copy the directory again",
            )
    return part
