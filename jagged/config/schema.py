"""`TrainConfig`, `RankingConfig`, `MultiLabelConfig`: the sections of a job together, and the names of all their options."""

from __future__ import annotations

import contextlib
import difflib
import json
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pydantic import SerializeAsAny
from pydantic.fields import FieldInfo

from jagged.artifacts import dump_json, errors_as, read_bytes, write_file
from jagged.artifacts.errors import one_line
from jagged.config.labels import (
    BlockSparseHeadOptions,
    BottleneckHeadOptions,
    DenseHeadOptions,
    FixedFanInHeadOptions,
    GroupSparseHeadOptions,
    HeldOutRows,
    LabelDataOptions,
    LabelHead,
    MultiLabelEvaluationOptions,
    MultiLabelOptions,
    MultiLabelTrainingOptions,
)
from jagged.config.options import (
    BERT4RecOptions,
    CrossEntropyHead,
    DataOptions,
    EvaluationOptions,
    GlobalTime,
    GroupSparseItems,
    HSTUOptions,
    LeaveOneOut,
    LoopOptions,
    ModelOptions,
    RunOptions,
    SampledHead,
    SASRecOptions,
    ScalableHead,
    TrainerConfig,
    TrainingOptions,
)
from jagged.config.ranking import (
    ByColumn,
    ByOrder,
    ByTime,
    ByUser,
    DCNv2Options,
    DINOptions,
    DLRMHSTUOptions,
    DLRMOptions,
    LastOfUser,
    MixtureOptions,
    RankingEvaluationOptions,
    RankingOptions,
    RankingTrainingOptions,
    RequestModelOptions,
    TableOptions,
    WukongOptions,
)
from jagged.config.section import (
    ConfigError,
    Problem,
    Section,
    certain,
    inert,
    kinds,
    option,
    or_list,
    short,
    spelt,
    takes_several,
    unknown,
)

# What each section of a run on events may be. Of several variants the first is the default, and an option of theirs, the tag,
# tells which one it is. Models that are registered join their section.
SECTIONS: dict[str, list[type[Section]]] = {
    "data": [DataOptions],
    "split": [LeaveOneOut, GlobalTime],
    "model": [SASRecOptions, HSTUOptions, BERT4RecOptions],
    "head": [CrossEntropyHead, SampledHead, ScalableHead, GroupSparseItems],
    "training": [TrainingOptions],
    "evaluation": [EvaluationOptions],
}
# The same of a run on a table's requests.
RANKING_SECTIONS: dict[str, list[type[Section]]] = {
    "data": [TableOptions],
    "split": [ByTime, ByOrder, ByUser, ByColumn, LastOfUser],
    "model": [RankingOptions, DLRMOptions, DCNv2Options, WukongOptions, MixtureOptions, DLRMHSTUOptions, DINOptions],
    "training": [RankingTrainingOptions],
    "evaluation": [RankingEvaluationOptions],
}
# The same of a run on rows with sets of labels.
MULTI_LABEL_SECTIONS: dict[str, list[type[Section]]] = {
    "data": [LabelDataOptions],
    "split": [HeldOutRows],
    "model": [MultiLabelOptions],
    "head": [
        GroupSparseHeadOptions,
        DenseHeadOptions,
        BottleneckHeadOptions,
        FixedFanInHeadOptions,
        BlockSparseHeadOptions,
    ],
    "training": [MultiLabelTrainingOptions],
    "evaluation": [MultiLabelEvaluationOptions],
}
# Where a section is given by one word it is this option.
_MAIN = {"data": "path", "split": "type", "model": "name", "head": "type"}
# What is so much used that its flag has a short name.
_SHORT = {word: f"data.{word}" for word in ("label", "candidate", "user", "time", "request", "history", "events")}
# A configuration has some sixty short lines; what a run writes down, as JSON, may have thousands of columns. Anything much longer
# is none, and is refused unread: reading TOML takes as long as the square of a name's parts.
_MAX_FILE_BYTES = {"JSON": 128 * 1024, "TOML": 16 * 1024}

# The share of rows that are the test where neither a file nor a share is given.
_TEST_FRACTION = 0.1

Self = TypeVar("Self", bound="JobConfig")


class JobConfig(RunOptions):
    """A configuration in sections: what the configurations of all jobs have in common."""

    sections: ClassVar[Mapping[str, list[type[Section]]]]

    def __init__(self, **values: Any) -> None:
        job, problems = type(self), []
        values = nested(values)
        of = _job_of_model(values)
        if of is not None and of is not job:
            found = values["model"]["name"]
            text = (
                f"got {short(found)}, expected {or_list(_tags(job, 'model'))}; {of.__name__} has it, and load_config takes either"
            )
            raise ConfigError.of([Problem("model.name", text)])
        for name in [name for name in values if name not in job.model_fields]:
            problems.append(Problem(name, _unknown(job, "", name)))
            del values[name]
        for section in job.sections:
            values[section] = _build(job, section, values.get(section, {}), problems)
        # What is wrong with a section is told above; the rest is checked beside its default.
        sound: dict[str, Any] = {
            name: values.get(name) or job.sections[name][0]() if name in job.sections else values[name] for name in values
        }
        try:
            super().__init__(**sound)
        except ConfigError as error:
            # A default in the place of a wrong section contradicts nothing.
            problems = [*(problem for problem in error.problems if not problems or "." not in problem.name), *problems]
        if problems:
            raise ConfigError.of(problems)

    @property
    def trainer(self) -> TrainerConfig:
        """The part of it that `jagged.training.Trainer` takes."""
        run = {name: getattr(self, name) for name in RunOptions.model_fields}
        training = getattr(self, "training")  # noqa: B009 - each job has one of its own type
        loop = {name: getattr(training, name) for name in LoopOptions.model_fields}
        # What has no effect beside the others cannot be given.
        return TrainerConfig(**run, **{name: value for name, value in loop.items() if not inert(LoopOptions, name, loop)})

    @classmethod
    def load(cls: type[Self], path: str | Path | None = None, overrides: Mapping[str, Any] | None = None) -> Self:
        """Resolve a configuration from a file and overrides, which win.

        Where an override takes another variant of a section, the file's options of the former one are left out.

        Args:
            path: a TOML file, or the `config.json` of an earlier run.
            overrides: values by name, nested (`{"model": {"dropout": 0.1}}`) or dotted (`{"model.dropout": 0.1}`).

        Raises:
            ConfigError: one line per wrong option: its name, what was found, what is expected.
        """
        above = nested(overrides or {})
        try:
            return cls(**merge({} if path is None else _read_file(Path(path)), above))
        except ConfigError as error:
            if path is None or not error.problems:
                raise
            own = flat(above)
            raise ConfigError.of(
                problem if problem.name in own else Problem(str(path), one_line(str(problem))) for problem in error.problems
            ) from None

    def save(self, path: str | Path) -> None:
        """Write the resolved configuration as JSON; `load` reads it."""
        write_file(Path(path), dump_json(self.model_dump()))


class TrainConfig(JobConfig):
    """What `jagged train` trains on users' events, and how.

    A section is given by its class, by a dictionary, or, where one word says it, by a word: `data="events.csv"`,
    `head={"type": "sampled", "num_negatives": 64}`.

    Raises:
        ConfigError: one line per wrong option: its name, what was found, what is expected.

    Example:
        >>> TrainConfig(model={"embedding_dim": 64}, head="sampled").head.num_negatives
        256
    """

    sections = SECTIONS

    output: str = option("runs/sasrec", "directory to write the run into")
    data: DataOptions
    split: LeaveOneOut | GlobalTime
    model: SerializeAsAny[ModelOptions]
    head: CrossEntropyHead | SampledHead | ScalableHead | GroupSparseItems
    training: TrainingOptions
    evaluation: EvaluationOptions

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)

    def contradictions(self) -> Iterable[Problem]:
        """A batch holds at least one history, and groups of items read no more inputs than there are."""
        tokens, length = self.training.max_tokens, self.data.max_seq_len
        if tokens is not None and tokens < length:
            yield Problem("training.max_tokens", f"got {tokens}, expected at least data.max_seq_len ({length})")
        if not isinstance(self.head, GroupSparseItems):
            return
        if not isinstance(self.model, (SASRecOptions, HSTUOptions)):
            text = f"got group-sparse, expected another head for {self.model.name}, or model.name sasrec or hstu"
            yield Problem("head.type", text)
        elif self.head.fan_in > self.model.embedding_dim:
            text = f"got {self.head.fan_in}, expected at most model.embedding_dim ({self.model.embedding_dim})"
            yield Problem("head.fan_in", text)


class RankingConfig(JobConfig):
    """What `jagged train` trains on a table's requests with candidates, and how.

    Sections are given as those of `TrainConfig`.

    Raises:
        ConfigError: one line per wrong option: its name, what was found, what is expected.

    Example:
        >>> RankingConfig(data={"path": "clicks.parquet", "label": "click"}, split="user").data.label
        ('click',)
    """

    sections = RANKING_SECTIONS

    output: str = option("runs/ranking", "directory to write the run into")
    from_run: str | None = option(
        None, "directory of a finished run on a table, with whose weights, vocabularies and statistics this one begins"
    )
    data: TableOptions
    split: ByTime | ByOrder | ByUser | ByColumn | LastOfUser
    model: SerializeAsAny[RequestModelOptions]
    training: RankingTrainingOptions
    evaluation: RankingEvaluationOptions

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)

    def contradictions(self) -> Iterable[Problem]:
        """A batch holds at least one history and its candidate, and a run does not begin with itself."""
        if self.from_run is not None and Path(self.from_run).resolve() == Path(self.output).resolve():
            text = f"got {self.from_run}, expected another directory than output; name another output"
            yield Problem("from_run", text)
        others = {
            f"model.loss {self.model.loss}, whose scores are no probabilities": self.model.loss in ("listwise", "pairwise"),
            "model.implied, which makes positives of rows with the label 0": self.model.implied,
        }
        for other in [other for other, is_there in others.items() if is_there and self.data.is_thinned]:
            yield Problem("data.negative_rate", f"got {self.data.negative_rate}, expected none beside {other}")
        tokens, length = self.training.max_tokens, self.data.max_history
        if tokens is not None and tokens <= length:
            yield Problem("training.max_tokens", f"got {tokens}, expected more than data.max_history ({length})")


class MultiLabelConfig(JobConfig):
    """What `jagged train` trains on rows with sets of labels, and how.

    Sections are given as those of `TrainConfig`.

    Raises:
        ConfigError: one line per wrong option: its name, what was found, what is expected.

    Example:
        >>> MultiLabelConfig(data={"path": "train.txt", "test": "test.txt"}, head="dense").head.type
        'dense'
    """

    sections = MULTI_LABEL_SECTIONS

    output: str = option("runs/labels", "directory to write the run into")
    data: LabelDataOptions
    split: HeldOutRows
    model: MultiLabelOptions
    head: SerializeAsAny[LabelHead]
    training: MultiLabelTrainingOptions
    evaluation: MultiLabelEvaluationOptions

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)

    def contradictions(self) -> Iterable[Problem]:
        """Something is left to train on, groups read no more inputs than there are, and a step of SGD in backward is a batch."""
        if self.data.test is not None and self.split.test_fraction is not None:
            text = f"got {self.split.test_fraction}, expected none beside data.test, which has the rows of the test"
            yield Problem("split.test_fraction", text)
        test = self.test_fraction
        if self.split.valid_fraction + test >= 1:
            text = f"got {self.split.valid_fraction}, expected with test_fraction ({test}) less than 1, or nothing is left"
            yield Problem("split.valid_fraction", f"{text} to train on")
        fan_in, width = getattr(self.head, "fan_in", 1), self.model.embedding_dim
        if fan_in > width:
            yield Problem("head.fan_in", f"got {fan_in}, expected at most model.embedding_dim ({width})")
        if getattr(self.head, "optimizer", "adamw") == "sgd" and self.training.accumulate > 1:
            text = (
                f"got sgd, expected adamw beside training.accumulate ({self.training.accumulate}), as SGD learns from each batch"
            )
            yield Problem("head.optimizer", text)

    @property
    def test_fraction(self) -> float:
        """The fraction of the rows that is the test; 0 where a file has them."""
        return (
            0.0
            if self.data.test is not None
            else _TEST_FRACTION
            if self.split.test_fraction is None
            else self.split.test_fraction
        )


#: The jobs; the first one is meant where nothing says which.
JOBS: tuple[type[JobConfig], ...] = (TrainConfig, RankingConfig, MultiLabelConfig)


def load_config(
    path: str | Path | None = None, overrides: Mapping[str, Any] | None = None
) -> TrainConfig | RankingConfig | MultiLabelConfig:
    """Resolve a configuration of any job, as its `load` does: the one that has the model, or an option that is given.

    Raises:
        ConfigError: one line per wrong option: its name, what was found, what is expected.
    """
    found = {} if path is None else _read_file(Path(path))
    return job_of(merge(found, overrides or {})).load(path, overrides)  # type: ignore[return-value]


def job_of(values: Mapping[str, Any]) -> type[JobConfig]:
    """The job whose model the values name; else the one that knows options which the first does not; else the first."""
    inside = flat(nested(values))
    if "model.name" in inside:
        return _job_of_model(values) or JOBS[0]
    first = job_leaves(JOBS[0])
    return next((job for job in JOBS[1:] if any(one in job_leaves(job) and one not in first for one in inside)), JOBS[0])


def _job_of_model(values: Mapping[str, Any]) -> type[JobConfig] | None:
    """The job that has the model that values name; None where none is named, or nobody has it."""
    name = flat(nested(values)).get("model.name")
    return next((job for job in JOBS if isinstance(name, str) and name in _tags(job, "model")), None)


def _read_file(path: Path) -> dict[str, Any]:
    """The values of a TOML or JSON file; a ConfigError where it cannot be read, or holds something else."""
    kind, parse = ("JSON", json.loads) if path.suffix == ".json" else ("TOML", tomllib.loads)
    with errors_as(ConfigError):
        content = read_bytes(path, _MAX_FILE_BYTES[kind])
    try:
        values = parse(content.decode("utf-8"))
    except RecursionError:
        raise ConfigError(f"{path}: found values nested too deeply, expected lines of the form key = value") from None
    except ValueError as error:
        raise ConfigError(f"{path}: cannot be read as {kind}: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: found {short(values)}, expected an object of options")
    return values


def register_model(name: str, options: type[ModelOptions]) -> None:
    """Let `model.name` be `name`, with the options of a class.

    Raises:
        ValueError: a class whose `name` is another, or a name that is taken.
    """
    if not issubclass(options, ModelOptions) or options.model_fields["name"].default != name:
        raise ValueError(f"options: got {options.__name__}, expected a ModelOptions with name: Literal[{name!r}] = {name!r}")
    taken = {tag: variant for job in JOBS for tag, variant in _tags(job, "model").items()}
    if taken.setdefault(name, options) is not options:
        raise ValueError(f"name: got {name!r}, which has the options {taken[name].__name__} already; take another name")
    if options not in SECTIONS["model"]:
        SECTIONS["model"].append(options)


def leaves() -> dict[str, list[tuple[type[Section], FieldInfo]]]:
    """All options of all jobs by their dotted names, in order, each with the variants that have it."""
    found: dict[str, list[tuple[type[Section], FieldInfo]]] = {}
    for job in JOBS:
        for name, variants in job_leaves(job).items():
            found.setdefault(name, []).extend(variants)
    return found


def job_leaves(job: type[JobConfig]) -> dict[str, list[tuple[type[Section], FieldInfo]]]:
    """Those of one job."""
    found: dict[str, list[tuple[type[Section], FieldInfo]]] = {}
    for name, field in job.model_fields.items():
        if name not in job.sections:
            found[name] = [(job, field)]
    for section, variants in job.sections.items():
        for variant in variants:
            for name, field in variant.model_fields.items():
                found.setdefault(f"{section}.{name}", []).append((variant, field))
    return found


def section_variants(section: str) -> list[type[Section]]:
    """What a section of either job may be."""
    return [variant for job in JOBS for variant in job.sections.get(section, ())]


def section_names() -> list[str]:
    """The sections of all jobs, in order."""
    return list(dict.fromkeys(name for job in JOBS for name in job.sections))


def first_tags(section: str) -> list[tuple[type[JobConfig], str]]:
    """What the tag of a section is where nothing else is said, by job; of models that of the first job alone."""
    found = [(job, job.sections[section][0]) for job in JOBS if section in job.sections]
    return [(job, str(of.model_fields[_MAIN[section]].default)) for job, of in found[: 1 if section == "model" else None]]


def told_by(variant: type[Section]) -> str:
    """The value of the tag that says that a section is this variant; the job's model where the section has no tag."""
    for job in JOBS:
        if variant is job:
            return str(job.sections["model"][0].model_fields["name"].default)
        for section, variants in job.sections.items():
            if variant in variants:
                tagged = section if section in _TAGGED else "model"
                of = variant if section in _TAGGED else job.sections["model"][0]
                return str(of.model_fields[_MAIN[tagged]].default)
    raise KeyError(variant)


def main_option(name: str) -> str:
    """The option that a name stands for: `data.path` for `data`, `data.label` for `label`, itself for all others."""
    return f"{name}.{_MAIN[name]}" if name in _MAIN else _SHORT.get(name, name)


def short_names(name: str) -> list[str]:
    """The names that stand for an option beside its own."""
    return [short for short in (*_MAIN, *_SHORT) if main_option(short) == name]


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by dotted names, sections and single words as dictionaries of dictionaries."""
    result: dict[str, Any] = {}
    for name, value in values.items():
        section, dot, rest = str(name).partition(".")
        if isinstance(value, Section):
            value = value.model_dump()
        if dot:
            value = {rest: value}
        elif section in _MAIN and not isinstance(value, Mapping):
            value = {_MAIN[section]: value}
        former = result.get(section)
        result[section] = {**former, **value} if isinstance(former, Mapping) and isinstance(value, Mapping) else value
    return result


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by dotted names."""
    result: dict[str, Any] = {}
    for name, value in values.items():
        inner = value.items() if isinstance(value, Mapping) else None
        result.update({f"{name}.{key}": each for key, each in inner} if inner is not None else {name: value})
    return result


def merge(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Values of two sources, nested, of which the later one wins.

    Options of the earlier one that have no effect any more beside those of the later one, because a tag is another, are left out.
    """
    earlier, later = nested(earlier), nested(later)
    result = dict(earlier)
    for name, value in later.items():
        former = earlier.get(name)
        if isinstance(former, Mapping) and isinstance(value, Mapping):
            result[name] = {**former, **value}
        else:
            result[name] = value
    before, job = job_of(earlier), job_of(result)
    for name, value in list(result.items()):
        former, own = earlier.get(name), later.get(name, {})
        if isinstance(former, Mapping) and isinstance(value, Mapping) and isinstance(own, Mapping):
            kept = {key for key in value if key in own or not _fits(before, name, key, former) or _fits(job, name, key, value)}
            result[name] = {key: each for key, each in value.items() if key in kept}
            if not result[name] and name not in job.sections:
                del result[name]
    return result


def _fits(job: type[JobConfig], section: str, name: str, values: Mapping[str, Any]) -> bool:
    variant = _variant(job, section, values) if section in job.sections else None
    return variant is not None and name in variant.model_fields and not inert(variant, name, values)


# Sections whose first option tells which variant they are.
_TAGGED = ("split", "model", "head")


def _tags(job: type[JobConfig], section: str) -> dict[Any, type[Section]]:
    """The variants of a section by the value of the tag; those of a section without a tag by None."""
    tag = _MAIN[section] if section in _TAGGED else None
    return {variant.model_fields[tag].default if tag else None: variant for variant in job.sections[section]}


def _variant(job: type[JobConfig], section: str, values: Mapping[str, Any]) -> type[Section] | None:
    tags = _tags(job, section)
    if None in tags:
        return tags[None]
    tag = values.get(_MAIN[section], next(iter(tags)))
    return tags.get(tag) if isinstance(tag, str) else None


def _build(job: type[JobConfig], section: str, values: Any, problems: list[Problem]) -> Section | None:
    if not isinstance(values, Mapping):
        problems.append(Problem(section, f"got {short(values)}, expected a table of options"))
        return None
    variant = _variant(job, section, values)
    if variant is None:
        tag, tags = _MAIN[section], _tags(job, section)
        every = {name: of for one in JOBS for name, of in _tags(one, section).items()} if section == "model" else tags
        # Who asked for the class of another job hears of this one's models alone.
        tags = tags if values[tag] in list(every) else every
        known = or_list(sorted(tags) if section == "model" else tags)
        problems.append(
            Problem(f"{section}.{tag}", f"got {short(values[tag])}, expected {known}{_who_has(job, section, values[tag])}")
        )
        return None
    sound, own = {}, []
    for name, value in values.items():
        if name not in variant.model_fields:
            own.append(Problem(f"{section}.{name}", _unknown(job, section, str(name), variant)))
        elif without_effect := inert(variant, name, values, f"{section}."):
            own.append(Problem(f"{section}.{name}", without_effect))
        else:
            sound[name] = value
    built = None
    try:
        built = variant(**sound)
    except ConfigError as error:
        own = certain(variant, own, [name for name, _ in error.problems], f"{section}.")
        own += [Problem(f"{section}.{name}" if name else section, text) for name, text in error.problems]
    problems += own
    return built


def _who_has(job: type[JobConfig], section: str, tag: Any) -> str:
    """What to say of a variant that a section of this job has not, where another job's has it."""
    for other in JOBS:
        if section != "model" and other is not job and section in other.sections and tag in list(_tags(other, section)):
            return f"; it belongs to model.name {or_list(_tags(other, 'model'))}"
    return ""


def _unknown(job: type[JobConfig], section: str, name: str, variant: type[Section] | None = None) -> str:
    """What to say of an option that a section has not: which variant or job has it, or what was probably meant."""
    if variant is not None:
        tag = _MAIN.get(section)
        others = [value for value, other in _tags(job, section).items() if name in other.model_fields]
        if others:
            return f"belongs to {section}.{tag} {or_list(others)}, got {spelt(variant.model_fields[str(tag)].default)}"
    dotted = f"{section}.{name}" if section else name
    for other in JOBS:
        if other is not job and (dotted in job_leaves(other) or (not section and name in other.sections)):
            models = _tags(other, "model")
            return f"belongs to model.name {or_list(models)}, not to {or_list(_tags(job, 'model'))}"
    known = list(job_leaves(job))
    plain = name.replace("-", "_").lower()
    whole = f"{section}.{plain}" if section else plain
    # The option itself may lie in another section; else the name that looks most alike, with its section or without.
    for dotted in known:
        if dotted.rpartition(".")[2] == plain:
            return f"unknown option; did you mean {dotted}?"
    own = [dotted for dotted in known if dotted.startswith(f"{section}.")] if section else known
    if close := difflib.get_close_matches(whole, own, n=1):
        return f"unknown option; did you mean {close[0]}?"
    last = {dotted.rpartition(".")[2]: dotted for dotted in reversed(known)}
    if close := difflib.get_close_matches(plain.rpartition(".")[2], last, n=1):
        return f"unknown option; did you mean {last[close[0]]}?"
    return unknown(name, own if section else job.model_fields)


def parse_assignments(assignments: Iterable[str]) -> dict[str, Any]:
    """`key=value` texts, as `--set` takes them, to values by dotted name; a later one wins.

    Raises:
        ConfigError: an entry without `=`, or an unknown key.
    """
    values: dict[str, Any] = {}
    known = leaves()
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        name = main_option(name.strip())
        if not equals:
            text = "found no '=', expected key=value, for example --set model.embedding_dim=128"
            raise ConfigError.of([Problem(f"--set {assignment}", text)])
        if name not in known:
            section, _, last = name.rpartition(".")
            inside = section if section in section_names() else ""
            raise ConfigError.of([Problem(f"--set {assignment}", _unknown(job_of(values), inside, last))])
        values[name] = parse_text(name, text.strip())
    return values


def parse_text(name: str, text: str) -> Any:
    """The text of a flag or of `--set` as a value for the option of a dotted name; `none` stays a word.

    A TOML literal (`0.2`, `true`, `"quoted"`) means what it says in TOML, any other text is a string. An option that takes
    strings gets the text as it stands, quotes aside, so that an events file may be called `2024`.
    """
    fields = [field for _, field in leaves()[name]]
    takes = {kind for field in fields for kind in kinds(field)}
    try:
        parsed = tomllib.loads(f"value = {text}")
        value = parsed["value"] if len(parsed) == 1 else text
    except (ValueError, RecursionError):
        value = text
    if isinstance(value, list) and any(map(takes_several, fields)):
        return value
    if str in takes:
        return value if isinstance(value, str) else text
    if isinstance(value, str):
        # Numbers that Python's users write and TOML refuses: `.5`, `1.`, `007`.
        for kind in takes & {int, float}:
            with contextlib.suppress(ValueError):
                return kind(value)
    return value
