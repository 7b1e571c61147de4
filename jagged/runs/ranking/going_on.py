"""Begin a run with what a finished one has learnt: its options, schema, vocabularies, statistics and weights."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from jagged import artifacts
from jagged.artifacts import CheckpointError, message, shown
from jagged.config import ConfigError, RankingConfig, load_config, merge, spelt
from jagged.config.ranking import WORDS
from jagged.config.section import Problem
from jagged.data import DataError, Dataset, Encoders, Schema
from jagged.data.errors import refuse
from jagged.data.rows import event_columns
from jagged.data.vocabulary import UNSEEN
from jagged.models import RankingInputs, RequestModel
from jagged.models.pretrained import CONFIG, MODEL, SCHEMA
from jagged.runs.ranking.evaluating import is_ranking_run
from jagged.runs.ranking.run import DATASET, RankingRun
from jagged.training.checkpoint import list_checkpoints
from jagged.training.loop import CHECKPOINTS
from jagged.training.optimizer import table_names

#: Where a run keeps the encoders that it began with, so that its split can be made again without the other run.
START = "start"

# Options of a model that change no weights.
_MAY_DIFFER = ("dropout", "loss", "focal_gamma", "focal_alpha", "implied")
# What columns are, and what histories show; and of what the schemas of the run say it.
_COLUMNS = (*WORDS, "history", "event_labels", "event_lists", "history_delay", "max_history")
_SCHEMAS = ("schema_file", "event_schema_file")
# Of the new table alone.
_OF_TABLE = ("path", "format", "delimiter", "events", "negative_rate")


@dataclass(frozen=True)
class Beginning:
    """What a run begins with.

    Attributes:
        config: the run's options, with those that it has of the other run.
        encoders: of the other run.
        run: the other run, with its weights; None where the run goes on from a checkpoint, which has newer ones.
    """

    config: RankingConfig
    encoders: Encoders
    run: RankingRun | None

    @classmethod
    def of(cls, config: RankingConfig, *, resume: bool) -> Beginning | None:
        """Of a configuration; None where it begins with nothing.

        Args:
            config: with `from_run`.
            resume: whether a run in `config.output` goes on: where that has a checkpoint, the other run is not read.

        Raises:
            ConfigError: no finished run on a table, or options that contradict it.
            CheckpointError: a file of it is damaged.
        """
        if config.from_run is None:
            return None
        output = Path(config.output)
        if resume and list_checkpoints(output / CHECKPOINTS):
            return cls(_with_options(config, RankingConfig.load(output / CONFIG), output), Encoders.load(output / START), None)
        run = _opened(Path(config.from_run))
        return cls(_with_options(config, run.config, run.directory), run.encoders, run)

    @cached_property
    def _schemas(self) -> tuple[Schema, Schema | None, bool]:
        """Of rows and, where histories are gathered, of a table of events; and whether the run had such a table."""
        if self.run is not None:
            schema = self.run.event_schema if self.run.has_histories else None
            return self.run.schema, schema, self.run.opened.event_schema is not None
        # The run's own rows were read by them.
        dataset = Dataset.load(Path(self.config.output) / DATASET)
        if (log := dataset.events) is None:
            return dataset.schema, None, False
        columns = event_columns(log.table.schema, log.labels, [one.name for one in log.lists], log.weights)
        return dataset.schema, Schema(tuple(columns)), not log.is_own

    @property
    def where(self) -> str:
        """The other run's directory."""
        return str(self.config.from_run)

    def reading(self) -> dict[str, Any]:
        """The options of `Dataset.from_table`: the other run's schema says what columns are.

        Raises:
            ConfigError: no table of events where the other run had one, or one where it has no histories.
        """
        events, (schema, event_schema, is_needed) = self.config.data.events, self._schemas
        if events is None and is_needed:
            text = f"got none, expected a table of events, as {self.where} gathered histories from one; name it"
            raise ConfigError.of([Problem("data.events", text)])
        if events is not None and event_schema is None:
            text = f"got {events}, expected none, as {self.where} gathered no histories; leave it out"
            raise ConfigError.of([Problem("data.events", text)])
        options = {name: value for name, value in self.config.data.reading().items() if name not in WORDS}
        return {**options, "schema": schema, "event_schema": None if events is None else event_schema}

    def explained(self, error: DataError) -> DataError:
        """The error, with the file whose schema a table does not fit."""
        place = "schema: "
        if not str(error).startswith(place):
            return error
        told = str(error).removeprefix(place)
        return DataError(f"{Path(self.where) / SCHEMA}: {told}; give a table with the columns that the run was trained on")

    def check(self, dataset: Dataset) -> None:
        """Refuse a table whose columns are not those of the other run.

        Raises:
            DataError: with the first column that differs.
        """
        if self.run is None:
            return
        cure = "give a table with the columns that the run was trained on"
        found, known, kind = dataset.schema, self.run.schema, self.run.opened.split["time_kind"]
        for name in dict.fromkeys([*known.names, *found.names]):
            # Whether a list was text, its values do not show any more.
            theirs, ours = (replace(of[name], separator=None) if name in of.names else None for of in (known, found))
            if ours != theirs:
                told = "no column" if ours is None else f"the column as {ours.kind.value}" + _more(ours)
                expected = "none" if theirs is None else f"one, as {theirs.kind.value}" + _more(theirs)
                raise refuse(f"table: {shown(name)}", told, f"{expected}, as {self.where} has it", cure)
        if dataset.time_kind != kind:
            told = f"times of kind {shown(dataset.time_kind)}"
            raise refuse("table", told, f"{shown(kind)}, as {self.where} was trained on", "convert them")

    def keep(self, directory: Path) -> None:
        """Write into a new run what it needs of the other one when it is opened or goes on."""
        place = directory / START
        with artifacts.writing(place, "make room, or choose another output", CheckpointError):
            if place.is_dir():
                artifacts.remove(place)
            self.encoders.save(place)

    def load_into(self, model: RequestModel) -> None:
        """Give a new model the other run's weights; in each process alike, before tables are shared out.

        Rows of ids that are new begin as the row of an id that was never seen: what was learnt to be said of such.

        Args:
            model: on the CPU, of a split that goes on from `encoders`.

        Raises:
            DataError: a model that reads other columns.
            CheckpointError: weights of other shapes.
        """
        if self.run is None:
            return
        _check_inputs(self.run, model.inputs)
        where, old, tables = self.run.directory / MODEL, self.run.model.state_dict(), table_names(model)
        with torch.no_grad():
            for name, value in model.state_dict().items():
                before = old.pop(name, None)
                fits = before is not None and (
                    before.shape == value.shape
                    or (name in tables and before.shape[1:] == value.shape[1:] and len(before) <= len(value))
                )
                if before is None or not fits:
                    found = f"{name} of shape {shown(None if before is None else list(before.shape))}"
                    raise CheckpointError(message(where, found, f"{list(value.shape)}", "take the run's own options"))
                if before.shape == value.shape:
                    value.copy_(before)
                else:
                    value[: len(before)] = before
                    value[len(before) :] = before[UNSEEN]
        if old:
            raise CheckpointError(message(where, f"the weights {shown(sorted(old))}", "none of these", "take its own options"))


def known_encoders(run: RankingRun) -> Encoders | None:
    """The encoders that a run began with; None where it began with none.

    Raises:
        DataError: they are damaged.
    """
    return None if run.config.from_run is None else Encoders.load(run.directory / START)


def _opened(path: Path) -> RankingRun:
    """A finished run on a table, on the CPU."""

    def wrong(found: str, cure: str) -> ConfigError:
        return ConfigError.of([Problem("from_run", f"got {path}, {found}; {cure}")])

    if not path.is_dir():
        raise wrong("expected the directory of a finished run on a table, and there is none", "name another one")
    if not (path / artifacts.MANIFEST).exists() and (path / CONFIG).exists():
        cure = f"go on with that one by `jagged train --resume {path}` first"
        raise wrong("a run that has not ended, expected a finished one", cure)
    if not is_ranking_run(path):
        kind = f"a run of {load_config(path / CONFIG).model.name}" if (path / CONFIG).exists() else "which holds no run"  # type: ignore[attr-defined]
        raise wrong(f"{kind}, expected one on a table's requests", "name another one, or train without it")
    return RankingRun.open(path, device="cpu")


def _with_options(config: RankingConfig, kept: RankingConfig, where: Path) -> RankingConfig:
    """The configuration with the options of a run that it goes on from, where it gives none.

    Raises:
        ConfigError: a line for each option that contradicts that run.
    """
    problems = []

    def refuse_other(section: str, name: str, own: Any, other: Any) -> None:
        problems.append(
            Problem(f"{section}.{name}", f"got {spelt(own)}, expected {spelt(other)}, as {where} has it; leave it out")
        )

    model, theirs = config.model, kept.model
    given: dict[str, Any] = model.model_dump(exclude_unset=True)
    if given.get("name", theirs.name) != theirs.name:
        refuse_other("model", "name", model.name, theirs.name)
    else:
        for name in given:
            other = getattr(theirs, name, None)
            if name not in _MAY_DIFFER and getattr(model, name) != other:
                refuse_other("model", name, getattr(model, name), other)
    data = config.data.model_dump(exclude_unset=True)
    for name in data:
        own, other = getattr(config.data, name), getattr(kept.data, name)
        if name in _SCHEMAS and own is not None:
            text = f"got {own}, expected none, as the schema in {where} says what the columns are; leave it out"
            problems.append(Problem(f"data.{name}", text))
        elif name in _COLUMNS and own != other:
            refuse_other("data", name, own, other)
    if problems:
        raise ConfigError.of(problems)
    inherited = {
        "model": theirs.model_dump(),
        "data": {name: of for name, of in kept.data.model_dump().items() if name not in (*_OF_TABLE, *_SCHEMAS)},
    }
    of_both = merge(inherited, {"model": {"name": theirs.name, **given}, "data": data})
    return RankingConfig(**{**config.model_dump(), **of_both})


def _check_inputs(run: RankingRun, inputs: RankingInputs) -> None:
    for one in fields(RankingInputs):
        if (has := getattr(inputs, one.name)) != (wants := getattr(run.model.inputs, one.name)):
            raise refuse(
                run.directory / MODEL,
                f"a model that reads {one.name} {shown(wants)}",
                f"{shown(has)}, as rows and events have them",
                "give tables with the columns of training",
            )


def _more(column: Any) -> str:
    """What else there is to say of a column than its kind."""
    told = [f"{name} {shown(value)}" for name in ("table", "encoding", "size", "weights", "of", "positive_from")
            if (value := getattr(column, name)) not in (None, "vocabulary")]  # fmt: skip
    return f" with {', '.join(told)}" if told else ""
