"""The configuration of a training run: sections of options from flags, TOML, `--set` and Python, checked as one.

Everything a run needs to be repeated is here; it is saved, resolved, as `config.json` in the run's directory. No torch import,
so that the command line can show help and refuse a bad option at once.
"""

from __future__ import annotations

from jagged.config.options import (
    CrossEntropyHead,
    DataOptions,
    EvaluationOptions,
    GlobalTime,
    LeaveOneOut,
    ModelOptions,
    RunOptions,
    SampledHead,
    SASRecOptions,
    ScalableHead,
    TrainerConfig,
    TrainingOptions,
)
from jagged.config.schema import (
    SECTIONS,
    TrainConfig,
    flat,
    leaves,
    main_option,
    merge,
    nested,
    parse_assignments,
    parse_text,
    register_model,
)
from jagged.config.section import ConfigError, Section, choices, effect, kinds, option, spelt

__all__ = [
    "SECTIONS",
    "ConfigError",
    "CrossEntropyHead",
    "DataOptions",
    "EvaluationOptions",
    "GlobalTime",
    "LeaveOneOut",
    "ModelOptions",
    "RunOptions",
    "SASRecOptions",
    "SampledHead",
    "ScalableHead",
    "Section",
    "TrainConfig",
    "TrainerConfig",
    "TrainingOptions",
    "choices",
    "effect",
    "flat",
    "kinds",
    "leaves",
    "main_option",
    "merge",
    "nested",
    "option",
    "parse_assignments",
    "parse_text",
    "register_model",
    "spelt",
]
