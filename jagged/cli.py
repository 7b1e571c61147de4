"""The `jagged` command: each subcommand a thin layer over one documented Python function.

No torch import before a command runs, so that help and refusals are immediate.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from typer.core import TyperCommand

from jagged import __version__, versions
from jagged.config import TrainConfig, choices, parse_assignments, parse_text, sections

app = typer.Typer(
    name="jagged",
    help="Train, evaluate and use sequence rankers on jagged tensors.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

# What a user can mend: one line on stderr. They are looked up among the modules loaded by then, for the modules import torch.
_KNOWN_ERRORS = (
    ("jagged.config", "ConfigError"),
    ("jagged.data", "DataError"),
    ("jagged.training", "CheckpointError"),
    ("jagged.training", "TrainingError"),
    ("jagged.evaluation", "EvaluationError"),
    ("jagged.tuning", "TuningError"),
)

_Format = Annotated[str, typer.Option(metavar="|".join(choices("format")), help="format of the events; auto by file name")]
_Device = Annotated[str, typer.Option(metavar="|".join(choices("device")), help="auto: the GPU where there is one")]
_Column = Annotated[Optional[str], typer.Option(help="name of the column, by default the run's", show_default=False)]  # noqa: UP045
_Directory = Annotated[Path, typer.Argument(help="a run's directory, as `jagged train` leaves it", show_default=False)]


def main() -> None:
    """Run the command line.

    Exit code 0 for success, 1 for a check that failed, 2 for an error of the user's to mend; a run that a signal stopped ends
    with the signal's code.
    """
    try:
        app(prog_name="jagged")
    except Exception as error:
        message = _explain(error)
        if message is None:
            raise
        print("\n".join(f"jagged: {line}" for line in message.splitlines()), file=sys.stderr)
        raise SystemExit(getattr(error, "exit_code", 2)) from None


def _explain(error: Exception) -> str | None:
    """What to tell the user of `error`; None for a bug, which keeps its traceback."""
    known = tuple(getattr(sys.modules[module], name) for module, name in _KNOWN_ERRORS if module in sys.modules)
    if isinstance(error, known):
        return str(error)
    problem = versions.missing_module(error)
    return None if problem is None else str(problem)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="print the version and leave", show_default=False)] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit


def _with_config_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add one option to `command` for each field of `TrainConfig`; it gets those that were given, as text, as `flags`."""
    own = [parameter for parameter in inspect.signature(command, eval_str=True).parameters.values() if parameter.name != "flags"]
    generated = []
    for section, names in sections().items():
        for name in names:
            field = TrainConfig.model_fields[name]
            default, flag = field.default, f"--{name.replace('_', '-')}"
            kind: type = bool if field.annotation is bool else str
            if kind is bool:
                extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
                on, off = flag, extra.get("off", f"--no-{flag[2:]}")
                default, flag = (on if field.default else off), f"{on}/{off}"
            option = typer.Option(
                flag,
                help=f"{field.description} [default: {'none' if default is None else default}]",
                metavar="|".join(choices(name)) or _metavar(name),
                show_default=False,
                rich_help_panel=section,
            )
            annotation = Annotated[Optional[kind], option]  # type: ignore[valid-type]  # noqa: UP045
            generated.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation))

    def wrapper(**arguments: Any) -> None:
        flags = {name: value for name in TrainConfig.model_fields if (value := arguments.pop(name)) is not None}
        command(flags=flags, **arguments)

    parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own] + generated
    wrapper.__name__, wrapper.__doc__ = command.__name__, command.__doc__
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return wrapper


class _SectionedCommand(TyperCommand):
    """A command whose help groups its options under headings."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write one block of options for each heading."""
        blocks: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is not None:
                blocks.setdefault(getattr(parameter, "rich_help_panel", None) or "Run", []).append(record)
        for heading, records in blocks.items():
            with formatter.section(f"{heading} options"):
                formatter.write_dl(records, col_max=34)


def _metavar(name: str) -> str:
    annotation = str(TrainConfig.model_fields[name].annotation)
    return "INTEGER" if "int" in annotation else "NUMBER" if "float" in annotation else "TEXT"


@app.command(cls=_SectionedCommand)
@_with_config_options
def train(
    flags: Mapping[str, Any],
    config: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="TOML file of options, or an earlier run's config.json", show_default=False),
    ] = None,
    assignments: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="one option by name, may be repeated; wins over --config, and a flag wins over it",
            show_default=False,
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on from the last checkpoint in the output directory")] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="read the data, print the forecast of memory and steps, and stop"),
    ] = False,
) -> None:
    """Train a sequence ranker on an events file.

    \b
    Examples:
        jagged train --data events.csv --output runs/shop --embedding-dim 128
        jagged train --config run.toml --set learning_rate=5e-4 --dry-run

    It leaves one directory that stands alone.
    The data: text lines `user item item ...`, or a csv or parquet table with the columns user_id, item_id, timestamp.
    Options win over one another in this order: defaults, --config, --set, flags. `none` unsets an option that may be unset.
    """
    overrides = parse_assignments(assignments or [])
    overrides.update({name: parse_text(name, value) if isinstance(value, str) else value for name, value in flags.items()})
    resolved = TrainConfig.load(config, overrides)
    _prepare()
    from jagged.runs import summary
    from jagged.runs.training import train as run

    run(resolved, resume=resume, dry_run=dry_run)
    # Of the processes that torchrun started the first one speaks.
    if not dry_run and os.environ.get("RANK", "0") == "0":
        print("\n".join(summary.summary_lines(resolved.output)))


@app.command()
def evaluate(
    directory: _Directory,
    data: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="events file to evaluate on, by default the run's own data", show_default=False),
    ] = None,
    part: Annotated[str, typer.Option(metavar="valid|test", help="the held-out part")] = "test",
    k: Annotated[
        Optional[list[int]],  # noqa: UP045
        typer.Option(help="cut-off of the metrics, may be repeated; by default 5, 10 and 20", min=1, show_default=False),
    ] = None,
    filter_viewed: Annotated[
        Optional[bool],  # noqa: UP045
        typer.Option(
            "--filter-viewed/--keep-viewed",
            help="take items of the history out of the ranking, or leave them in",
            show_default="both",
        ),
    ] = None,
    format: _Format = "auto",
    user_column: _Column = None,
    item_column: _Column = None,
    timestamp_column: _Column = None,
    device: _Device = "auto",
) -> None:
    """Rank the whole catalogue for held-out events; print metrics.

    \b
    Examples:
        jagged evaluate runs/shop
        jagged evaluate runs/shop --part valid --filter-viewed --k 1 --k 10

    The protocol is printed beside the figures; without a choice, seen items are left in and then taken out.
    """
    _prepare()
    from jagged.metrics import DEFAULT_KS
    from jagged.runs.evaluating import evaluate as run

    columns: Any = {"user_column": user_column, "item_column": item_column, "timestamp_column": timestamp_column}
    chosen: Any = {"part": part, "filter_viewed": filter_viewed, "ks": sorted(set(k or DEFAULT_KS))}
    print(run(directory, data, **chosen, format=format, device=device, **columns))


@app.command()
def recommend(
    directory: _Directory,
    histories: Annotated[
        Path, typer.Argument(help="events file of the users to recommend for; they may be new", show_default=False)
    ],
    output: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="table to write: .csv, .parquet or .jsonl; by default csv on standard output", show_default=False),
    ] = None,
    k: Annotated[int, typer.Option(help="items for each user", min=1)] = 10,
    filter_viewed: Annotated[
        bool, typer.Option("--filter-viewed/--keep-viewed", help="take items of the history out of the ranking, or leave them in")
    ] = True,
    format: _Format = "auto",
    user_column: _Column = None,
    item_column: _Column = None,
    timestamp_column: _Column = None,
    device: _Device = "auto",
) -> None:
    """Recommend items for users' histories.

    \b
    Example:
        jagged recommend runs/shop histories.csv --output recommendations.csv --k 10

    The result is a table user_id, item_id, score, rank, in your own ids.
    """
    _prepare()
    from jagged.runs.recommending import recommend as run

    columns: Any = {"user_column": user_column, "item_column": item_column, "timestamp_column": timestamp_column}
    table = run(directory, histories, output, k=k, filter_viewed=filter_viewed, format=format, device=device, **columns)
    if output is None:
        from pyarrow import csv

        csv.write_csv(table, sys.stdout.buffer)


@app.command()
def report(
    directory: _Directory,
    output: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="page to write, by default report.html in the directory", show_default=False),
    ] = None,
) -> None:
    """Write one self-contained HTML page about a run.

    \b
    Example:
        jagged report runs/shop --output shop.html

    On the page: training curves, lengths, ranks, metrics with the protocol they were measured by, and checks for leaks.
    """
    _prepare()
    from jagged.runs.reporting import report as run

    print(run(directory, output))


@app.command()
def tune(
    batches: Annotated[
        Path, typer.Option(help="file that jagged.data.record_batches wrote: tables, and batches of lookups", show_default=False)
    ],
    out: Annotated[Path, typer.Option(help="plan to write, JSON; a plan that is there is replaced", show_default=False)],
    programs: Annotated[
        Optional[list[int]],  # noqa: UP045
        typer.Option(
            help="programs for each multiprocessor that are tried, may be repeated; by default 8, 12, 16, 20, 24, 28, 32",
            min=1,
            max=64,
            show_default=False,
        ),
    ] = None,
    backward: Annotated[
        bool, typer.Option("--backward/--no-backward", help="time backward passes, too; not needed where tables are only read")
    ] = True,
) -> None:
    """Measure a plan of schedules for embedding bags.

    \b
    Example:
        jagged tune --batches batches.pt --out plan.json

    Needs the GPU that the plan is for. ScheduledEmbeddingBagCollection(..., plan="plan.json") follows it.
    """
    _prepare()
    from jagged.tuning import tune_recorded as run

    print(run(batches, out, programs=programs or None, backward=backward))


@app.command()
def doctor() -> None:
    """Print versions and GPU, and run a tiny piece of every part.

    \b
    Example:
        jagged doctor

    Exit code 0 when all is well, 1 otherwise. A version that does not fit comes with the command that mends it.
    """
    from jagged.diagnosis import doctor as run

    result = run()
    print(result)
    if not result.ok:
        raise typer.Exit(1)


@app.command()
def demo(
    output: Annotated[Path, typer.Option(help="directory to write the run into")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(help="seed of the sample and of the training", min=0)] = 0,
) -> None:
    """Train on a built-in sample with a known optimum.

    \b
    Example:
        jagged demo --output runs/demo

    A few minutes on two CPU cores. Exit code 1 where the model does not clearly beat popularity or stays far from the optimum.
    """
    _prepare()
    from jagged.demo import demo as run

    result = run(output, seed=seed)
    if not result.ok:
        raise typer.Exit(1)


def _prepare() -> None:
    for problem in versions.problems():
        print(f"jagged: {problem}", file=sys.stderr)
    # Said once is enough: the packages would say it again when they are imported.
    warnings.simplefilter("ignore", versions.VersionWarning)
    # TorchRec asks torch a question whose answer torch comments on: nothing that a user can act on.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    # FBGEMM-GPU 1.7 does not know itself and says so at each of its modules; which versions fit was said above.
    logging.getLogger().addFilter(lambda record: "_fbgemm_torch_compat_table has no entry" not in record.getMessage())
