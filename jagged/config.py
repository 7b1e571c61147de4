"""The configuration of a training run: one validated object from flags, TOML and `--set`.

Everything a run needs to be repeated is here; it is saved, resolved, as `config.json` in the run's directory. No torch import,
so that the command line can show help and refuse a bad option at once.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names the field, what was found and what is expected."""


class TrainConfig(BaseModel):
    """What `jagged train` trains, on what, and how.

    Sources, later ones winning: the defaults below, a TOML file (`--config`), flags and `--set key=value`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    # Data.
    data: str | None = Field(None, description="events file or folder: text, csv or parquet; None for the built-in sample")
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
    embedding_dim: int = Field(64, ge=1, description="width of item embeddings and hidden states")
    num_heads: int = Field(2, ge=1, description="attention heads; must divide embedding_dim")
    num_layers: int = Field(2, ge=1, description="transformer blocks")
    dropout: float = Field(0.2, ge=0, lt=1, description="dropout probability")

    # Training.
    batch_size: int = Field(256, ge=1, description="users per step and process")
    max_tokens: int | None = Field(None, ge=1, description="events per step and process, instead of batch_size")
    learning_rate: float = Field(1e-3, gt=0, description="peak learning rate of AdamW")
    weight_decay: float = Field(0.01, ge=0, description="decoupled weight decay of AdamW")
    warmup_steps: int = Field(0, ge=0, description="steps of linear learning-rate warm-up")
    gradient_clip_norm: float | None = Field(1.0, gt=0, description="largest global gradient norm; none for no clipping")
    max_epochs: int = Field(60, ge=1, description="most passes over the training data")
    patience: int = Field(10, ge=1, description="validations without a better metric before training stops")
    monitor: str = Field("ndcg@10", description="validation metric that selects the checkpoint")
    precision: Literal["32-true", "bf16-mixed", "auto"] = Field("auto", description="auto: bf16-mixed on a GPU, else 32-true")
    seed: int = Field(0, ge=0, description="seed of everything random")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: the GPU where there is one")
    num_workers: int = Field(0, ge=0, description="loader processes")
    checkpoint_every: int | None = Field(None, ge=1, description="steps between checkpoints; always one after each epoch")
    tensorboard: bool = Field(True, description="write TensorBoard curves where tensorboard is installed")

    # Evaluation.
    filter_viewed: bool = Field(False, description="take items of a user's history out of the ranking")
    eval_batch_size: int = Field(1024, ge=1, description="users per evaluation step")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.embedding_dim % self.num_heads:
            raise ValueError(f"embedding_dim ({self.embedding_dim}) must be a multiple of num_heads ({self.num_heads})")
        if self.valid_fraction + self.test_fraction >= 1:
            raise ValueError("valid_fraction + test_fraction must stay below 1, or nothing is left to train on")
        return self

    @classmethod
    def load(cls, path: str | Path | None = None, overrides: dict[str, Any] | None = None) -> TrainConfig:
        """Resolve a configuration from a TOML file and overrides (flags and `--set`), which win.

        Raises:
            ConfigError: one line per wrong field: its name, what was found, what is expected.
        """
        values: dict[str, Any] = {}
        if path is not None:
            try:
                values.update(tomllib.loads(Path(path).read_text(encoding="utf-8")))
            except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
                raise ConfigError(f"{path}: cannot be read as TOML: {error}") from None
        values.update(overrides or {})
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError(_explain(error)) from None

    def save(self, path: str | Path) -> None:
        """Write the resolved configuration as JSON."""
        Path(path).write_text(json.dumps(self.model_dump(), indent=2) + "\n", encoding="utf-8")


def _explain(error: ValidationError) -> str:
    lines = []
    known = ", ".join(sorted(TrainConfig.model_fields))
    for problem in error.errors():
        name = ".".join(str(part) for part in problem["loc"]) or "configuration"
        if problem["type"] == "extra_forbidden":
            lines.append(f"{name}: unknown option; known are {known}")
        else:
            lines.append(f"{name}: {problem['msg']}; got {problem['input']!r}" if problem["loc"] else f"{problem['msg']}")
    return "\n".join(lines)
