"""Where a run stands, apart from tensors: what `state.json` of a checkpoint holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from jagged.config import DataOptions, flat, spelt
from jagged.training.errors import CheckpointError, TrainingError

FORMAT_VERSION = 3

# What may differ between a checkpoint and the run that goes on from it: none of it changes what the next step computes, but for
# roundings and, of requests by graphs, the numbers that dropout draws.
# `data` and how it is read may, because the fingerprint of what was read is compared.
_READING = [f"data.{name}" for name in ("path", *DataOptions().reading())]
_HANDLING = (
    "patience", "num_workers", "checkpoint_every", "checkpoint_seconds", "cuda_graphs", "release_memory", "hang_seconds",
    "tensorboard", "table_plan", "table_cache_bytes",
)  # fmt: skip
_MAY_CHANGE = frozenset(("output", "device", "evaluation.eval_batch_size", "model.recompute", *_HANDLING, *_READING))
# What may differ beside them where the number of processes does: with it the joint batch stays as large as it was.
_SHARING = frozenset(("batch_size", "max_tokens", "accumulate"))


@dataclass
class TrainState:
    """Where a run stands.

    Attributes:
        config: the resolved configuration.
        fingerprint: of the data; empty where there is none.
        world_size: processes.
        total_steps: at whose end linear and cosine schedules are at 0.
        ahead: how many steps the schedule is further than `step`, because processes that were fewer or more made other steps.
        step: updates of the weights; epoch, batch: where in the training data, both from 0.
        seen: samples of the epoch that another number of processes had; `batch` counts from behind them.
        samples: of the epoch, that were trained on until the checkpoint; None in the middle of one whose loader does not tell.
        epoch_told: whether callbacks know that the epoch's last step is done; to_validate: whether a validation comes next.
        loss_sum, tokens: sum of the losses of all rows since the last validation, of this process, and the number of rows.
        sums: both of every process, as they were at the checkpoint.
        gradient_norm: of the last step looked at, before clipping; None without clipping.
        seconds: of training until the last validation; epoch_seconds: since then.
        best: the best monitored value so far, and by which validation (from 1).
        worse: validations since then.
        validated_step: step of the last validation.
        stopped: why a callback ended the training; empty where none did.
        history: a row for each validation.
        callbacks: the callbacks' states, each behind the name of its class.
    """

    config: dict[str, Any]
    fingerprint: str
    world_size: int
    total_steps: int = 0
    ahead: int = 0
    step: int = 0
    epoch: int = 0
    batch: int = 0
    seen: int = 0
    samples: int | None = 0
    epoch_told: bool = False
    to_validate: bool = False
    loss_sum: float = 0.0
    tokens: float = 0
    sums: list[list[float]] = field(default_factory=list)
    gradient_norm: float | None = None
    seconds: float = 0.0
    epoch_seconds: float = 0.0
    best: float | None = None
    best_validation: int = 0
    worse: int = 0
    validated_step: int = 0
    stopped: str = ""
    history: list[dict[str, Any]] = field(default_factory=list)
    callbacks: list[Any] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """The content of `state.json`."""
        return {"format_version": FORMAT_VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, content: Mapping[str, Any], path: Path) -> TrainState:
        """Take over what `to_json` gave.

        Raises:
            CheckpointError: another version, or a field that is missing or of another type.
        """
        if content.get("format_version") != FORMAT_VERSION:
            raise CheckpointError(
                f"{path}: format version {content.get('format_version')!r}, this version of jagged reads {FORMAT_VERSION}"
            )
        hints = get_type_hints(cls)
        for entry in fields(cls):
            try:
                TypeAdapter(hints[entry.name]).validate_python(content[entry.name], strict=True)
            except (KeyError, ValidationError):
                found = repr(content.get(entry.name))
                raise CheckpointError(f"{path}: field {entry.name}: found {found}, expected {entry.type}") from None
        return cls(**{entry.name: content[entry.name] for entry in fields(cls)})

    def check_resumable(self, wanted: TrainState, path: Path) -> None:
        """Refuse to go on from this state where `wanted`, the state of a run that starts now, would compute something else.

        Raises:
            TrainingError: other data, or options that differ; the message names them.
        """
        if self.fingerprint != wanted.fingerprint:
            raise TrainingError(
                f"{path}: was trained on other data (fingerprint {self.fingerprint[:12]}..., now {wanted.fingerprint[:12]}...); "
                "give the data it was trained on, or another output to start again"
            )
        allowed = _MAY_CHANGE | _SHARING if self.world_size != wanted.world_size else _MAY_CHANGE
        was, now = flat(self.config), flat(wanted.config)
        differ = [
            name
            for name in {**now, **was}
            if not self._may_change(name.removeprefix("training."), was, allowed) and was.get(name) != now.get(name)
        ]
        # Options that only one of them has go with a tag that differs, which says it.
        told = [name for name in differ if name in was and name in now] or differ
        changed = [f"{name}={spelt(now.get(name))} (was {spelt(was.get(name))})" for name in told]
        if changed:
            raise TrainingError(
                f"{path}: cannot go on with other options: {', '.join(changed)}; give those it had, or choose another output"
            )

    def _may_change(self, name: str, was: Mapping[str, Any], allowed: frozenset[str]) -> bool:
        if name == "max_epochs":
            # Other schedules end with the last epoch.
            return "constant" in (was.get("schedule"), was.get("training.schedule"))
        # Nothing was selected by it yet.
        return name in allowed or (name in ("monitor", "monitor_goal") and not self.history)
