"""The configuration of a training run: one validated object from flags, TOML and `--set`.

Everything a run needs to be repeated is here; it is saved, resolved, as `config.json` in the run's directory. No torch import,
so that the command line can show help and refuse a bad option at once.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import NoneType
from typing import Any, Literal, Self, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from jagged.artifacts import dump_json, write_file

# A configuration has some forty short lines; anything much longer is no configuration, and is refused unread.
_MAX_FILE_BYTES = 16 * 1024
# Metrics of which less is better, by the name before any cut-off.
_LESS_IS_BETTER = frozenset(("loss", "logloss", "ne", "mse", "rmse", "mae"))


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names the field, what was found and what is expected."""


class TrainerConfig(BaseModel):
    """How `jagged.training.Trainer` trains, whatever the model and the data.

    Types are strict: `1` is no boolean and `"64"` no number, in Python as in a file. Where a field may be None, a file (TOML
    knows no null) says `"none"`.

    Raises:
        ConfigError: one line per wrong field: its name, what was found, what is expected.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True, allow_inf_nan=False)

    output: str = Field("runs/model", description="directory to write the run into")
    learning_rate: float = Field(1e-3, gt=0, description="peak learning rate of AdamW")
    weight_decay: float = Field(0.01, ge=0, description="decoupled weight decay of AdamW")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="learning rate after the warm-up: as it is, or down to 0 at the last of max_epochs"
    )
    warmup_steps: int = Field(0, ge=0, description="steps of linear learning-rate warm-up")
    table_optimizer: Literal["adamw", "adagrad", "rowwise-adagrad", "sgd"] = Field(
        "adamw", description="optimizer of embedding tables; all else has AdamW"
    )
    table_learning_rate: float | None = Field(None, gt=0, description="peak rate of embedding tables; none for learning_rate")
    gradient_clip_norm: float | None = Field(1.0, gt=0, description="largest global gradient norm; none for no clipping")
    accumulate: int = Field(1, ge=1, description="batches whose gradients make one step")
    max_epochs: int = Field(60, ge=1, description="most passes over the training data")
    validate_every: str = Field(
        "1 epoch", pattern=r"^[1-9][0-9]{0,8} (epoch|step)s?$", description="epochs or steps between validations, as `2 epochs`"
    )
    patience: int = Field(6, ge=1, description="validations without a better metric before training stops")
    monitor: str = Field("loss", min_length=1, description="validation metric that selects the checkpoint")
    monitor_goal: Literal["auto", "max", "min"] = Field(
        "auto", description="whether more or less is better; auto: less for losses and errors, else more"
    )
    precision: Literal["32-true", "bf16-mixed", "auto"] = Field("auto", description="auto: bf16-mixed on a GPU, else 32-true")
    seed: int = Field(0, ge=0, lt=2**63, description="seed of everything random")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: the GPU where there is one")
    cuda_graphs: bool = Field(True, description="on one GPU, replay steps as CUDA graphs, with less than 1/16 of rows filled up")
    checkpoint_every: int | None = Field(None, ge=1, description="steps between checkpoints, beside those after validations")
    checkpoint_seconds: float = Field(30.0, ge=0, description="a validation sooner than this after a checkpoint writes none")
    hang_seconds: float = Field(45.0, gt=0, description="several processes: how long one may stand still before the run ends")
    tensorboard: bool = Field(True, description="write TensorBoard curves where tensorboard is installed")

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError("\n".join(_explain(error, type(self)))) from None

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        plain = {name: os.fspath(value) if isinstance(value, os.PathLike) else value for name, value in values.items()}
        for name, value in plain.items():
            if value == "none" and name in cls.model_fields and NoneType in _kinds(name, cls):
                plain[name] = None
        return plain

    @property
    def validation_steps(self) -> int | None:
        """Steps between validations; None where they come after epochs."""
        number, unit = self.validate_every.split()
        return int(number) if unit.startswith("step") else None

    @property
    def validation_epochs(self) -> int:
        """Epochs between validations."""
        number, unit = self.validate_every.split()
        return int(number) if unit.startswith("epoch") else 1

    @property
    def less_is_better(self) -> bool:
        """Whether a smaller monitored value is the better one."""
        if self.monitor_goal != "auto":
            return self.monitor_goal == "min"
        return self.monitor.rpartition("/")[2].partition("@")[0] in _LESS_IS_BETTER


class TrainConfig(TrainerConfig):
    """What `jagged train` trains, on what, and how.

    Sources, later ones winning: the defaults below, a file (`--config`), `--set key=value`, flags. The rest as `TrainerConfig`.
    """

    # Data.
    data: str | None = Field(None, description="events file or folder: text, csv or parquet; none for the built-in sample")
    output: str = Field("runs/sasrec", description="directory to write the run into")
    format: Literal["auto", "text", "csv", "parquet"] = Field("auto", description="format of the data; auto by file name")
    user_column: str = Field("user_id", description="column of user ids")
    item_column: str = Field("item_id", description="column of item ids")
    timestamp_column: str = Field("timestamp", description="column of times: numbers or timestamps")
    split: Literal["leave-one-out", "global-time"] = Field("leave-one-out", description="how validation and test are held out")
    valid_fraction: float = Field(0.1, gt=0, lt=1, description="global-time: the fraction of events used for validation")
    test_fraction: float = Field(0.1, gt=0, lt=1, description="global-time: the last fraction of events, used for the test")
    max_seq_len: int = Field(50, ge=1, le=65_536, description="longest history the model sees; older events are left out")

    # Model.
    model: Literal["sasrec"] = Field("sasrec", description="the model to train")
    embedding_dim: int = Field(256, ge=1, description="width of item embeddings and hidden states")
    num_heads: int = Field(2, ge=1, description="attention heads; must divide embedding_dim")
    num_layers: int = Field(2, ge=1, description="transformer blocks")
    dropout: float = Field(0.5, ge=0, lt=1, description="dropout probability")
    head: Literal["cross-entropy", "sampled", "scalable"] = Field(
        "cross-entropy", description="loss over all items, sampled ones, or buckets of high scores"
    )
    label_smoothing: float = Field(
        0.2, ge=0, lt=1, description="cross-entropy: share of the target's probability spread over all items"
    )
    sampler: Literal["uniform", "popularity", "in-batch", "mixed"] = Field(
        "uniform", description="sampled: where negatives come from; mixed is in-batch and uniform"
    )
    num_negatives: int = Field(256, ge=1, description="sampled: negatives drawn; in-batch draws none")
    negatives_per: Literal["row", "batch"] = Field("row", description="sampled: who has a draw of its own; mixed has one a batch")
    sampled_loss: Literal["softmax", "refined", "bce", "gbce"] = Field("softmax", description="sampled: the loss")
    correction: Literal["auto", "none", "negatives", "both"] = Field(
        "auto", description="sampled: whose logits are corrected by how probable they were drawn; auto: as the sampler needs it"
    )
    gbce_t: float = Field(0.75, ge=0, le=1, description="sampled, gbce: 0 for bce, 1 for scores as over all items")
    num_buckets: int = Field(128, ge=1, description="scalable: number of buckets")
    rows_per_bucket: int = Field(128, ge=1, description="scalable: events in a bucket")
    items_per_bucket: int = Field(256, ge=1, description="scalable: items in a bucket")

    # Training, beside the fields of TrainerConfig.
    batch_size: int = Field(256, ge=1, description="users per step and process")
    max_tokens: int | None = Field(None, ge=1, description="events per step and process, instead of batch_size")
    num_workers: int = Field(0, ge=0, description="loader processes")

    # Evaluation.
    monitor: str = Field(
        "ndcg@10",
        description="validation metric that selects the checkpoint: ndcg, recall, mrr, coverage or surprisal, @ and any cut-off",
    )
    validate_users: int | None = Field(None, ge=1, description="most users of a validation, drawn by seed; none for all of them")
    filter_viewed: bool = Field(
        False, description="take items of a user's history out of the ranking", json_schema_extra={"off": "--keep-viewed"}
    )
    eval_batch_size: int = Field(1024, ge=1, description="users per evaluation step")

    @field_validator("monitor")
    @classmethod
    def _is_metric(cls, monitor: str) -> str:
        if not re.fullmatch(r"(ndcg|recall|mrr|coverage|surprisal)@[1-9][0-9]{0,8}", monitor):
            raise ValueError("expected ndcg, recall, mrr, coverage or surprisal with a cut-off, for example ndcg@10")
        return monitor

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.embedding_dim % self.num_heads:
            raise ValueError(f"embedding_dim ({self.embedding_dim}) must be a multiple of num_heads ({self.num_heads})")
        if self.valid_fraction + self.test_fraction >= 1:
            raise ValueError("valid_fraction + test_fraction must stay below 1, or nothing is left to train on")
        if self.max_tokens is not None and self.max_tokens < self.max_seq_len:
            raise ValueError(f"max_tokens ({self.max_tokens}) must be at least max_seq_len ({self.max_seq_len})")
        if self.sampled_loss == "refined" and self.correction not in ("auto", "negatives"):
            raise ValueError(
                f"sampled_loss refined corrects the negatives alone: correction ({self.correction}) must be negatives"
            )
        if self.sampled_loss in ("bce", "gbce") and self.correction not in ("auto", "none"):
            raise ValueError(f"sampled_loss {self.sampled_loss} has no correction: correction ({self.correction}) must be none")
        if self.sampled_loss == "gbce" and self.sampler in ("in-batch", "mixed"):
            raise ValueError(f"sampled_loss gbce needs a fixed number of negatives: sampler ({self.sampler}) must draw them all")
        if self.sampled_loss in ("bce", "gbce") and self.sampler != "uniform" and self.correction == "auto":
            raise ValueError(
                f"sampled_loss {self.sampled_loss} has no correction, without which popular items rank last where sampler "
                f"({self.sampler}) draws them more often: sampler must be uniform; correction none has it so"
            )
        return self

    @classmethod
    def load(cls, path: str | Path | None = None, overrides: Mapping[str, Any] | None = None) -> TrainConfig:
        """Resolve a configuration from a file and overrides, which win.

        Args:
            path: a TOML file, or the `config.json` of an earlier run.
            overrides: values by field name.

        Raises:
            ConfigError: one line per wrong field: its name, what was found, what is expected.
        """
        values = {} if path is None else _read_file(Path(path))
        values.update(overrides or {})
        try:
            return cls(**{str(name): value for name, value in values.items()})
        except ConfigError as error:
            prefix = "" if path is None else f"{path}: "
            raise ConfigError("\n".join(prefix + line for line in str(error).splitlines())) from None

    def save(self, path: str | Path) -> None:
        """Write the resolved configuration as JSON; `load` reads it."""
        write_file(Path(path), dump_json(self.model_dump()))


def sections() -> dict[str, list[str]]:
    """The fields' names under the headings that help and report show them by."""
    headings = {"data": "Data", "model": "Model", "batch_size": "Training", "monitor": "Evaluation"}
    result: dict[str, list[str]] = {heading: [] for heading in headings.values()}
    current: list[str] = []
    for name in _fields(TrainConfig):
        inherited = name not in TrainConfig.__annotations__
        current = result[headings.get(name, "Training")] if name in headings or inherited else current
        current.append(name)
    return result


def _fields(config: type[TrainerConfig]) -> list[str]:
    """The fields' names, a configuration's own ones first."""
    own = [name for name in config.__annotations__ if name in config.model_fields]
    return own + [name for name in config.model_fields if name not in own]


def choices(name: str) -> tuple[str, ...]:
    """The values that the field `name` can take, where they are a fixed few; else nothing."""
    annotation = TrainConfig.model_fields[name].annotation
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def parse_assignments(assignments: Iterable[str]) -> dict[str, Any]:
    """`key=value` texts, as `--set` takes them, to values by field name; a later one wins.

    Raises:
        ConfigError: an entry without `=`, or an unknown key.
    """
    values = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        name = name.strip()
        if not equals:
            raise ConfigError(f"--set {assignment}: found no '=', expected key=value, for example --set embedding_dim=128")
        if name not in TrainConfig.model_fields:
            raise ConfigError(f"--set {assignment}: {_unknown(name)}")
        values[name] = parse_text(name, text.strip())
    return values


def parse_text(name: str, text: str) -> Any:
    """The text of a flag or of `--set` as a value for the field `name`.

    A TOML literal (`0.2`, `true`, `"quoted"`) means what it says in TOML, any other text is a string. A field that takes strings
    gets the text as it stands, quotes aside, so that an events file may be called `2024`. `none` is None.
    """
    try:
        parsed = tomllib.loads(f"value = {text}")
        value = parsed["value"] if len(parsed) == 1 else text
    except (ValueError, RecursionError):
        value = text
    if str in _kinds(name):
        return value if isinstance(value, str) else text
    if isinstance(value, str):
        # Numbers that Python's users write and TOML refuses: `.5`, `1.`, `007`.
        for kind in _kinds(name) & {int, float}:
            with contextlib.suppress(ValueError):
                return kind(value)
    return value


def _kinds(name: str, config: type[TrainerConfig] = TrainConfig) -> set[type]:
    """The Python types that the field `name` takes."""
    annotation = config.model_fields[name].annotation
    if isinstance(annotation, type):
        return {annotation}
    return {part if isinstance(part, type) else type(part) for part in get_args(annotation)}


def _read_file(path: Path) -> dict[str, Any]:
    kind, parse = ("JSON", json.loads) if path.suffix == ".json" else ("TOML", tomllib.loads)
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    if len(content) > _MAX_FILE_BYTES:
        raise ConfigError(f"{path}: found more than {_MAX_FILE_BYTES} bytes, expected a short configuration in {kind}")
    try:
        values = parse(content.decode("utf-8"))
    except RecursionError:
        raise ConfigError(f"{path}: found values nested too deeply, expected lines of the form key = value") from None
    except ValueError as error:
        raise ConfigError(f"{path}: cannot be read as {kind}: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: found {_short(values)}, expected an object of options")
    return values


def _explain(error: ValidationError, config: type[TrainerConfig]) -> list[str]:
    lines = []
    for problem in error.errors(include_url=False):
        name, message = ".".join(str(part) for part in problem["loc"]), problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            lines.append(_unknown(name, config))
        elif name:
            lines.append(f"{name}: {message}; got {_short(problem['input'])}")
        else:
            lines.append(message)
    return lines


def _unknown(name: str, config: type[TrainerConfig] = TrainConfig) -> str:
    known = _fields(config)
    close = difflib.get_close_matches(name.replace("-", "_").lower(), known, n=1)
    return f"{_short(name)}: unknown option; " + (f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}")


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except RecursionError:
        text = f"a deeply nested {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."
