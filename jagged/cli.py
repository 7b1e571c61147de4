"""The `jagged` command: each subcommand a thin layer over one documented Python function.

No torch import before a command runs, so that help and refusals are immediate.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, CycloptsError, Group, Parameter
from cyclopts.validators import Number

from jagged import __version__, versions
from jagged.allocator import use_expandable_segments
from jagged.config import (
    ConfigError,
    choices,
    effect,
    first_tags,
    kinds,
    leaves,
    load_config,
    merge,
    parse_assignments,
    parse_text,
    section_names,
    section_variants,
    short_names,
    spelt,
    takes_several,
    told_by,
)

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from jagged.config.section import Section

app = App(
    name="jagged",
    help="Train, evaluate and use ranking models on jagged tensors.",
    version=__version__,
    help_format="plaintext",
    # A list has no flag that empties it, and what may be left out is not shown to be None.
    default_parameter=Parameter(negative_iterable=(), show_default=lambda value: None if value in (None, ()) else value),
    result_action="return_value",
)

# What a user can mend: one line on stderr. They are looked up among the modules loaded by then, for the modules import torch.
_KNOWN_ERRORS = (
    ("jagged.config", "ConfigError"),
    ("jagged.data", "DataError"),
    # A CheckpointError is one, also of commands that load no trainer.
    ("jagged.artifacts", "ArtifactError"),
    ("jagged.training", "TrainingError"),
    ("jagged.evaluation", "EvaluationError"),
    ("jagged.tuning", "TuningError"),
)
_METAVARS = {int: "INTEGER", float: "NUMBER"}
# The options of `train` that are shown first, and those that are spelt otherwise than by their names.
_MOST_USED = ("data.path", "data.label", "data.candidate", "output", "training.max_epochs", "device", "seed")
_TAGS = ("split.type", "model.name", "head.type")
_NEGATIVES = {"evaluation.filter_viewed": "--evaluation.keep-viewed"}
# The word itself is none that Python takes for a name.
_SPELT = {"from_run": "from"}

_Format = Annotated[Literal["auto", "text", "csv", "parquet"], Parameter(help="format of the events; auto by file name")]
_Device = Annotated[Literal["auto", "cpu", "cuda"], Parameter(help="auto: the GPU where there is one")]
_Column = Annotated[str | None, Parameter(help="name of the column, by default the run's")]
_Directory = Annotated[Path, Parameter(help="a run's directory, as `jagged train` leaves it")]
_Output = Annotated[Path | None, Parameter(help="table to write: .csv, .parquet or .jsonl; by default csv on standard output")]
_Package = Annotated[Path | None, Parameter(help="package of this run, by `jagged export`, that scores in the model's place")]
_Columns = Annotated[tuple[str, ...], Parameter(metavar="COLUMN")]
_Chosen = Annotated[str | None, Parameter(metavar="COLUMN")]
_Programs = Annotated[int, Parameter(validator=Number(gte=1, lte=64))]
_Count = Annotated[int, Parameter(validator=Number(gte=1))]

# The functions by the words that call them.
_COMMANDS: dict[str, Callable[..., Any]] = {}


def _command(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function a command; the help begins with the first line of its docstring and ends with the others, as they stand."""
    first, _, others = str(inspect.getdoc(function)).partition("\n\n")
    name, given = app.name_transform(function.__name__), [*inspect.signature(function).parameters.values()]
    # Among hundreds of options this takes a tenth of a second to find.
    is_plain = bool(given) and all(of.kind is of.KEYWORD_ONLY and of.default is not of.empty for of in given)
    usage = f"Usage: jagged {name} [OPTIONS]" if is_plain else None
    app.command(function, help=first, help_epilogue=others, usage=usage)
    _COMMANDS[name] = function
    return function


def main() -> None:
    """Run the command line.

    Exit code 0 for success, 1 for a check that failed, 2 for an error of the user's to mend; a run that a signal stopped ends
    with the signal's code.
    """
    words = sys.argv[1:]
    use_expandable_segments()
    try:
        code = app(words, exit_on_error=False, print_error=False) or 0
    except CycloptsError as error:
        command = f"jagged {words[0]}" if words and words[0] in _COMMANDS else "jagged"
        print(f"jagged: {' '.join(str(error).split())} See {command} --help.", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        # Before a command runs; while one does, cyclopts ends so, too.
        code = 128 + signal.SIGINT
    except Exception as error:
        message = _explain(error)
        if message is None:
            raise
        flags = _flags(words[0])
        # A problem that names a file or an assignment speaks of keys, as they stand there.
        keys = {str(problem) for problem in getattr(error, "problems", ()) if problem.name and problem.name not in flags}
        for line in message.splitlines():
            print(f"jagged: {line if line in keys else _with_flags(line, flags)}", file=sys.stderr)
        code = getattr(error, "exit_code", 2)
    raise SystemExit(code)


def _explain(error: Exception) -> str | None:
    """What to tell the user of `error`; None for a bug, which keeps its traceback."""
    known = tuple(getattr(sys.modules[module], name) for module, name in _KNOWN_ERRORS if module in sys.modules)
    if isinstance(error, known):
        return str(error)
    problem = versions.missing_module(error)
    return None if problem is None else str(problem)


def _flag(name: str) -> str:
    return f"--{_SPELT.get(name, name).replace('_', '-')}"


def _flags(command: str) -> dict[str, str]:
    """The flags of a command by the names that Python's messages have for them."""
    if command == "train":
        last = {name.rpartition(".")[2]: _flag(name) for name in leaves()}
        return last | {name: _flag(name) for name in leaves()} | {name: _flag(name) for name in (*section_names(), "resume")}
    parameters = inspect.signature(_COMMANDS[command]).parameters.values()
    return {parameter.name: _flag(parameter.name) for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}


def _with_flags(line: str, flags: Mapping[str, str]) -> str:
    """A message with flags in place of the names of Python's arguments.

    A plain word is a name only where the line begins with it or a value is behind it: `device: ...`, `precision=32-true`.
    """

    def spell(match: re.Match[str]) -> str:
        name, equals = match[1], match[2]
        told = equals or "_" in name or "." in name or (not match.start() and line.startswith(": ", match.end()))
        return flags[name] + (" " if equals else "") if name in flags and told else match[0]

    return re.sub(r"(?<![\w./'\"-])([a-z_]+(?:\.[a-z_]+)?)(?![\w/'\"-])(=?)", spell, line)


def _with_config_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add one flag to `command` for each option of `TrainConfig`; it gets those that were given, as text, as `flags`."""
    own = [parameter for parameter in inspect.signature(command, eval_str=True).parameters.values() if parameter.name != "flags"]
    # The most used ones stand first.
    options = leaves()
    names = {name.replace(".", "__"): name for name in dict.fromkeys([*_MOST_USED, *options])}
    generated = [
        inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_annotation(name, options[name]))
        for key, name in names.items()
    ]

    def value(name: str, given: Any) -> Any:
        if isinstance(given, tuple):
            # A list in TOML's way stands for its values.
            several = [parse_text(name, one) for one in given]
            return [one for each in several for one in (each if isinstance(each, list) else [each])]
        return parse_text(name, given) if isinstance(given, str) else given

    def wrapper(**arguments: Any) -> None:
        given = {name: arguments.pop(key) for key, name in names.items() if arguments.get(key) is not None}
        rest = {key: arguments[key] for key in arguments if key not in names}
        command({name: value(name, of) for name, of in given.items()}, **rest)

    parameters = [*generated, *(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own)]
    wrapper.__name__, wrapper.__doc__ = command.__name__, command.__doc__
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return wrapper


_GROUPS = {
    name: Group(title, sort_key=number)
    for number, (name, title) in enumerate(
        [("most", "Most used"), ("", "Run"), *((name, name.capitalize()) for name in section_names())]
    )
}


def _annotation(name: str, variants: list[tuple[type[Section], FieldInfo]]) -> Any:
    """The flag of a dotted name, and what `leaves` says of it."""
    section = name.rpartition(".")[0]
    fields = [field for _, field in variants]
    on_off, several = kinds(fields[0]) == {bool}, any(map(takes_several, fields))
    values = list(dict.fromkeys(value for field in fields for value in choices(field)))
    kind: Any = bool if on_off else tuple[str, ...] if several else str
    return Annotated[
        kind | None,
        Parameter(
            name=[_flag(name), *map(_flag, short_names(name))],
            negative=_NEGATIVES.get(name, f"--{section}.no-{_flag(name.rpartition('.')[2])[2:]}") if on_off else (),
            help="; ".join(_told(name, variants)),
            metavar="|".join(values) or next((said for of, said in _METAVARS.items() if of in kinds(fields[0])), "TEXT"),
            group=_GROUPS["most" if name in _MOST_USED else section],
            show_default=False,
        ),
    ]


def _told(name: str, variants: list[tuple[type[Section], FieldInfo]]) -> Iterator[str]:
    """What help says of an option, with its default; another sentence where jobs differ in it."""
    section = name.rpartition(".")[0]
    # What it belongs to, unless it is in every variant of its section.
    everywhere = not section or name in _TAGS or len(variants) == len(section_variants(section))
    if name in _TAGS:
        # Each job begins with a variant of its own.
        shown = "; ".join(
            dict.fromkeys(f"{told_by(job)}: {of}" if many else of for many, (job, of) in enumerate(first_tags(section)))
        )
        yield f"{'; '.join(dict.fromkeys(str(field.description) for _, field in variants))} [default: {shown}]"
        return
    told: dict[tuple[str, str], dict[str, list[str]]] = {}
    for variant, field in variants:
        default = spelt(field.default)
        defaults = told.setdefault((effect(field), str(field.description)), {})
        defaults.setdefault({"true": "on", "false": "off"}.get(default, default), []).append(
            told_by(variant) if section or len(variants) > 1 else ""
        )
    for (has_effect, description), defaults in told.items():
        belongs = dict.fromkeys(one for of in defaults.values() for one in of)
        before = "; ".join(filter(None, ["" if everywhere and len(told) == 1 else " or ".join(belongs), has_effect]))
        first, *others = defaults
        shown = "; ".join([first, *(f"{' or '.join(defaults[other])}: {other}" for other in others)])
        yield f"{f'{before}: ' if before else ''}{description} [default: {shown}]"


@_command
@_with_config_options
def train(
    flags: Mapping[str, Any],
    *,
    resume: Annotated[
        Path | None,
        Parameter(metavar="RUN", help="go on with the run in this directory; it needs no other option", group=_GROUPS["most"]),
    ] = None,
    config: Annotated[
        Path | None,
        Parameter(metavar="FILE", help="TOML file of options, or an earlier run's config.json", group=_GROUPS["most"]),
    ] = None,
    assignments: Annotated[
        tuple[str, ...],
        Parameter(
            name="--set",
            metavar="KEY=VALUE",
            help="one option by name, may be repeated; wins over --config, and a flag wins over it",
            group=_GROUPS[""],
        ),
    ] = (),
    dry_run: Annotated[
        bool,
        Parameter(
            help="read the data, print the forecast of memory and steps, and stop",
            negative=(),
            show_default=False,
            group=_GROUPS[""],
        ),
    ] = False,
) -> None:
    """Train a sequence ranker on an events file, a ranking model on a table, or a model of rows with sets of labels.

    Examples:
        jagged train --data events.csv --output runs/shop --model.embedding-dim 128
        jagged train --data impressions.parquet --label click --candidate item_id --output runs/clicks
        jagged train --config run.toml --set training.learning_rate=5e-4 --dry-run
        jagged train --model multilabel --data train.txt --data.test test.txt --output runs/labels
        jagged train --resume runs/shop
        jagged train --from runs/clicks --data new.parquet --output runs/clicks-2

    It leaves one directory that stands alone.
    Events: text lines `user item item ...`, or a csv or parquet table with the columns user_id, item_id, timestamp.
    A table of which --label, --candidate or another option says what columns are, or --model ranking, trains a ranking model.
    Rows with sets of labels, in text files of the extreme classification repository, are trained on by --model multilabel.
    Options win over one another in this order: defaults, --config, --set, flags. `none` unsets an option that may be unset.
    """
    if resume is not None:
        config, flags = _resumed(resume, config, flags)
    resolved = load_config(config, merge(parse_assignments(assignments), flags))
    _prepare()
    from jagged.runs import summary
    from jagged.runs.training import train as run

    run(resolved, resume=resume or False, dry_run=dry_run)
    # Of the processes that torchrun started the first one speaks.
    if not dry_run and os.environ.get("RANK", "0") == "0":
        with _printing():
            print("\n".join(summary.summary_lines(resolved.output)))


def _resumed(run: Path, config: Path | None, flags: Mapping[str, Any]) -> tuple[Path | None, dict[str, Any]]:
    """The configuration and the flags of a run that goes on: its own, and what was given beside it.

    The same command may start it: with `--output` where nothing is there yet.
    """
    output = Path(flags.get("output", run))
    if output != run:
        raise ConfigError(f"output: got {output}, expected {run}, the run that goes on; leave it out")
    kept = run / "config.json"
    if kept.exists():
        return kept, {**flags, "output": str(run)}
    if "output" not in flags:
        raise ConfigError(f"resume: {run} holds no run; to start one there name it as --output, too")
    return config, dict(flags)


@_command
def evaluate(
    directory: _Directory,
    /,
    *,
    data: Annotated[
        Path | None, Parameter(help="events, rows or sets of labels to evaluate on, by default the run's own data")
    ] = None,
    part: Annotated[Literal["valid", "test"], Parameter(help="the held-out part")] = "test",
    slice: Annotated[
        _Columns, Parameter(help="of a run on a table: column of ids whose values have figures of their own, may be repeated")
    ] = (),
    events: Annotated[
        Path | None,
        Parameter(help="of a run on a table: events that histories of --data are gathered from, by default the run's"),
    ] = None,
    negative_rate: Annotated[
        float | None,
        Parameter(help="of a run on a table: at which rate rows of --data with the label 0 were kept, by default all were"),
    ] = None,
    k: Annotated[
        tuple[_Count, ...],
        Parameter(help="cut-off of the metrics, may be repeated; by default 5, 10 and 20, of sets of labels the run's"),
    ] = (),
    filter_viewed: Annotated[
        bool | None,
        Parameter(
            negative="--keep-viewed", help="take items of the history out of the ranking, or leave them in; by default both"
        ),
    ] = None,
    format: _Format = "auto",
    user_column: _Column = None,
    item_column: _Column = None,
    timestamp_column: _Column = None,
    device: _Device = "auto",
) -> None:
    """Evaluate a run on held-out events or rows; print metrics.

    Examples:
        jagged evaluate runs/shop
        jagged evaluate runs/shop --part valid --filter-viewed --k 1 --k 10
        jagged evaluate runs/clicks --slice device

    Of a run on events the whole catalogue is ranked. The protocol is printed beside the figures; without a choice, seen items are
    left in and then taken out. Of a run on a table each task has its figures; of other --data all rows are evaluated. So they are
    of a run on sets of labels, of which all labels are ranked.
    """
    _prepare()
    from jagged.runs.evaluating import evaluate as run

    columns: Any = {"user_column": user_column, "item_column": item_column, "timestamp_column": timestamp_column}
    chosen: Any = {"part": part, "filter_viewed": filter_viewed, "ks": sorted(set(k)) or None}
    chosen |= {"slices": slice, "events": events, "negative_rate": negative_rate}
    result = run(directory, data, **chosen, format=format, device=device, **columns)
    with _printing():
        print(result)


@_command
def recommend(
    directory: _Directory,
    histories: Annotated[
        Path, Parameter(help="events file of the users to recommend for; they may be new. Of a run on a table: requests")
    ],
    /,
    *,
    output: _Output = None,
    k: Annotated[_Count, Parameter(help="items for each user or request")] = 10,
    candidates: Annotated[
        Path | None, Parameter(help="csv or parquet file with a column of the items that may be recommended, by default all")
    ] = None,
    events: Annotated[
        Path | None, Parameter(help="of a run on a table: events that histories are gathered from, by default the run's")
    ] = None,
    filter_viewed: Annotated[
        bool, Parameter(negative="--keep-viewed", help="take items of the history out of the ranking, or leave them in")
    ] = True,
    format: _Format = "auto",
    user_column: _Column = None,
    item_column: _Column = None,
    timestamp_column: _Column = None,
    package: _Package = None,
    device: _Device = "auto",
) -> None:
    """Recommend items for users' histories, or rank the candidates of requests.

    Examples:
        jagged recommend runs/shop histories.csv --output recommendations.csv --k 10
        jagged recommend runs/clicks requests.parquet --candidates items.csv --output ranked.parquet

    The result is a table user_id, item_id, score, rank, in your own ids; of a run on a table request, user, candidate,
    predicted_<task>, rank.
    """
    _check_output(output)
    _prepare()
    from jagged.runs.recommending import recommend as run

    columns: Any = {"user_column": user_column, "item_column": item_column, "timestamp_column": timestamp_column}
    columns |= {"candidates": candidates, "events": events, "package": package}
    table = run(directory, histories, output, k=k, filter_viewed=filter_viewed, format=format, device=device, **columns)
    _print_table(table, output)


@_command
def predict(
    directory: _Directory,
    table: Annotated[
        Path, Parameter(help="rows to score: csv or parquet, a file or a folder; of a run on sets of labels a text file of them")
    ],
    /,
    *,
    output: _Output = None,
    events: Annotated[
        Path | None, Parameter(help="events that histories are gathered from: csv or parquet; by default the run's own")
    ] = None,
    k: Annotated[_Count | None, Parameter(help="of a run on sets of labels: labels of each row, by default 10")] = None,
    format: Annotated[Literal["auto", "csv", "parquet"], Parameter(help="format of the rows; auto by file name")] = "auto",
    package: _Package = None,
    device: _Device = "auto",
) -> None:
    """Score the rows of a table by a run on a table, or rank the labels of rows by a run on sets of labels.

    Examples:
        jagged predict runs/clicks rows.parquet --output scores.parquet
        jagged predict runs/labels test.txt --k 5 --output labels.parquet

    Of a run on a table the result has a row for each row: user, candidate and time, and predicted_<task>, in your own ids. Labels
    are not needed. Of a run on sets of labels it has k for each row: row, rank, label, name where labels have
    names, probability.
    """
    _check_output(output)
    _prepare()
    from jagged.runs.predicting import predict as run

    options: Any = {"events": events, "k": k, "format": format, "package": package, "device": device}
    _print_table(run(directory, table, output, **options), output)


def _check_output(output: Path | None) -> None:
    if output is None and sys.stdout is None:
        raise ConfigError("output: got none, and standard output is closed; name a table to write")


def _print_table(table: Any, output: Path | None) -> None:
    """Print a table as csv where no file was named."""
    if output is None:
        from pyarrow import csv

        with _printing():
            csv.write_csv(table, sys.stdout.buffer)


@_command
def report(
    directory: _Directory,
    /,
    *,
    output: Annotated[Path | None, Parameter(help="page to write, by default report.html in the directory")] = None,
) -> None:
    """Write one self-contained HTML page about a run.

    Example:
        jagged report runs/shop --output shop.html

    On the page: training curves, lengths, ranks, metrics with the protocol they were measured by, and checks for leaks.
    """
    _prepare()
    from jagged.runs.reporting import report as run

    page = run(directory, output)
    with _printing():
        print(page)


@_command
def export(
    directory: _Directory,
    output: Annotated[Path, Parameter(help="new directory to write")],
    /,
    *,
    k: Annotated[int | None, Parameter(help="of a run on events: items for each user, 10 by default")] = None,
    device: Annotated[str, Parameter(help="where the package scores: cpu, cuda, or auto for the GPU where there is one")] = "cpu",
) -> None:
    """Make of a run a package that scores requests, or finds users' best items, on a CPU or a GPU without jagged.

    Examples:
        jagged export runs/clicks clicks-scores
        python clicks-scores/score.py

    In the directory are the compiled package, a manifest of its inputs, encoders of ids, an example and a program that scores it.
    It needs a C++ compiler here, and torch of the same version where it is used.
    """
    _prepare()
    from jagged.runs.exporting import export as run

    package = run(directory, output, k=k, device=device)
    with _printing():
        print(package)


@_command
def inspect_(
    file: Annotated[Path, Parameter(name="FILE", help="csv or parquet file, or a folder of files")],
    /,
    *,
    label: Annotated[_Columns, Parameter(help="column that is a label, may be repeated")] = (),
    candidate: Annotated[_Chosen, Parameter(help="column of the item that a row is about")] = None,
    history: Annotated[_Columns, Parameter(help="list column of ids of candidates, may be repeated")] = (),
    user: Annotated[_Chosen, Parameter(help="column of the user")] = None,
    time: Annotated[_Chosen, Parameter(help="column of the time")] = None,
    request: Annotated[_Chosen, Parameter(help="column of the request that rows share")] = None,
    weight: Annotated[_Chosen, Parameter(help="column of the row's weight")] = None,
    event: Annotated[_Chosen, Parameter(help="column of the event's type")] = None,
    ids: Annotated[_Columns, Parameter(help="column of ids, may be repeated")] = (),
    numbers: Annotated[_Columns, Parameter(help="column of numbers, may be repeated")] = (),
    unused: Annotated[_Columns, Parameter(help="column that is not used, may be repeated")] = (),
    candidate_columns: Annotated[
        _Columns, Parameter(help="feature of which each candidate of a request has its own value, may be repeated")
    ] = (),
    request_columns: Annotated[
        _Columns, Parameter(help="feature of which all candidates of a request have the same value, may be repeated")
    ] = (),
    schema: Annotated[
        Path | None, Parameter(metavar="TOML", help="file that says what the columns are; by default it is inferred")
    ] = None,
    save_schema: Annotated[
        Path | None,
        Parameter(metavar="TOML", help="file to write the schema into, to edit it; a schema that is there is replaced"),
    ] = None,
    format: Annotated[Literal["auto", "csv", "parquet"], Parameter(help="format of the files; auto by file name")] = "auto",
    delimiter: Annotated[str | None, Parameter(help="what separates the fields of csv; by default found out")] = None,
) -> None:
    """Show what is in a table: its columns, odd values, what may leak.

    Examples:
        jagged inspect impressions.csv
        jagged inspect clicks.parquet --label click --save-schema clicks.toml

    The words win over the file of --schema, and that over what is inferred from names, types and values.
    """
    from jagged.data.inspection import inspect_table as run

    words: Any = {
        "label": list(label) or None, "candidate": candidate, "history": list(history) or None, "user": user, "time": time,
        "request": request, "weight": weight, "event": event, "ids": list(ids) or None, "numbers": list(numbers) or None,
        "unused": list(unused) or None, "candidate_columns": list(candidate_columns) or None,
        "request_columns": list(request_columns) or None,
    }  # fmt: skip
    # A shell gives a tab as it is written in other places.
    inspection = run(file, schema, format=format, delimiter="\t" if delimiter == r"\t" else delimiter, **words)
    if save_schema is not None:
        inspection.schema.save(save_schema)
    with _printing():
        print(inspection)


@_command
def tune_bags(
    *,
    batches: Annotated[Path, Parameter(help="file that jagged.data.record_batches wrote: tables, and batches of lookups")],
    out: Annotated[Path, Parameter(help="plan to write, JSON; a plan that is there is replaced")],
    programs: Annotated[
        tuple[_Programs, ...],
        Parameter(help="programs for each multiprocessor that are tried, may be repeated; by default 8, 12, 16, 20, 24, 28, 32"),
    ] = (),
    backward: Annotated[bool, Parameter(help="time backward passes, too; not needed where tables are only read")] = True,
) -> None:
    """Measure a plan of schedules for embedding bags.

    Example:
        jagged tune-bags --batches batches.safetensors --out plan.json

    Needs the GPU that the plan is for. ScheduledEmbeddingBagCollection(..., plan="plan.json") follows it.
    """
    _prepare()
    from jagged.tuning import tune_recorded as run

    plan = run(batches, out, programs=list(programs) or None, backward=backward)
    with _printing():
        print(plan)


@_command
def doctor() -> int:
    """Print versions and GPU, and run a tiny piece of every part.

    Example:
        jagged doctor

    Exit code 0 when all is well, 1 otherwise. A version that does not fit comes with the command that mends it.
    """
    from jagged.diagnosis import doctor as run

    result = run()
    with _printing():
        print(result)
    return 0 if result.ok else 1


@_command
def demo(
    *,
    output: Annotated[Path, Parameter(help="directory to write the run into")] = Path("runs/demo"),
    seed: Annotated[int, Parameter(help="seed of the sample and of the training", validator=Number(gte=0))] = 0,
) -> int:
    """Train on two built-in samples with a known optimum.

    Example:
        jagged demo --output runs/demo

    A few minutes on two CPU cores. Exit code 1 where a model stays far from the optimum, or does not clearly beat popularity.
    """
    _prepare()
    from jagged.demo import demo as run

    return 0 if run(output, seed=seed).ok else 1


@contextmanager
def _printing() -> Iterator[None]:
    """Print a result: who has stopped reading, as `head` does, wants no more; another failure is one line."""
    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        # What is left in the buffer would fail again at the end of the process.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise SystemExit(128 + signal.SIGPIPE) from None
        raise ConfigError(f"standard output: could not be written: {error.strerror or error}; write it elsewhere") from None


def _prepare() -> None:
    for problem in versions.problems():
        print(f"jagged: {problem}", file=sys.stderr)
    # Said once is enough: the packages would say it again when they are imported.
    warnings.simplefilter("ignore", versions.VersionWarning)
    # TorchRec asks torch a question whose answer torch comments on: nothing that a user can act on.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    # FBGEMM-GPU 1.7 does not know itself and says so at each of its modules; which versions fit was said above.
    logging.getLogger().addFilter(lambda record: "_fbgemm_torch_compat_table has no entry" not in record.getMessage())
    _import_engine()


def _import_engine() -> None:
    """Import torch and what stands on it. An interrupt meanwhile ends the process at once: their code loses it, or breaks."""
    is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_ours:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        importlib.import_module("jagged.runs.run")
        importlib.import_module("jagged.training")
    finally:
        if is_ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
