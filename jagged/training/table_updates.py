"""Tables of the product's own models, which their optimizer updates row by row, without a gradient of the whole table."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from jagged.config import TrainerConfig
from jagged.config.options import LoopOptions
from jagged.models import NextItemTask, RankingModel, SASRec
from jagged.modules import CutCrossEntropyHead, HeldUpdates, SampledCrossEntropyHead, replace_embeddings
from jagged.modules.trained_tables import TrainedTables
from jagged.ops import BagOptimizer, BagOptimizerKind
from jagged.ops.embedding_bag.optimizers import STATES
from jagged.training.errors import TrainingError
from jagged.training.optimizer import table_names

# As PyTorch's and TorchRec's have it.
_ADAGRAD_EPS = 1e-10
# For each `table_optimizer` its kind, and what the checkpoint calls its states.
KINDS: dict[str, BagOptimizerKind] = {
    "adagrad": "adagrad",
    "rowwise-adagrad": "rowwise_adagrad",
    "sgd": "sgd",
    "sparse-adamw": "adam",
    "rowwise-adamw": "rowwise_adam",
    "lamb": "lamb",
    "rowwise-lamb": "rowwise_lamb",
}
#: Kinds that have no dense counterpart: rows that a batch does not name keep their moments and are not decayed.
BY_ROWS_ALONE = ("sparse-adamw", "rowwise-adamw", "lamb", "rowwise-lamb")


def state_bytes(config: LoopOptions, table: Tensor) -> int:
    """What the optimizer of tables, another one than AdamW, keeps for one."""
    lengths = {"": 0, "element": table.numel(), "row": len(table)}
    size = 2 if config.table_states == "bfloat16" else 4
    return (
        sum(size * lengths[of] for of in STATES[KINDS[config.table_optimizer]]) + 8 * len(table) * config.table_decay_missed_steps
    )


def of_rows_alone(config: LoopOptions) -> str | None:
    """The first option, if there is one, that only tables have which are updated row by row."""
    if config.table_optimizer in BY_ROWS_ALONE:
        return "table_optimizer"
    if config.table_optimizer != "adamw" and config.table_weight_decay:
        return "table_weight_decay"
    given = {
        "table_max_norm": config.table_max_norm is not None,
        "table_states": config.table_states != "float32",
        "table_gradient_bytes": config.table_gradient_bytes is not None,
    }
    return next((name for name, is_given in given.items() if is_given), None)


def updates_rows(task: nn.Module, config: LoopOptions, world_size: int) -> bool:
    """Whether a task's tables are updated row by row, if all of them learn.

    A head over all items has a gradient of the whole table, which a dense optimizer takes as it is, in less time
    (`benchmarks/table_steps.py`).
    """
    if config.table_optimizer not in KINDS or world_size > 1:
        return False
    if isinstance(task, NextItemTask) and isinstance(task.model, SASRec):
        return of_rows_alone(config) is not None or task.head is None or isinstance(task.head, SampledCrossEntropyHead)
    return isinstance(task, RankingModel)


class RowUpdates:
    """A task's tables that are updated row by row.

    Attributes:
        held: what holds their updates back until the trainer's step.
    """

    def __init__(self, task: nn.Module, config: TrainerConfig) -> None:
        replace_embeddings(task)
        self._optimizer = config.table_optimizer
        kind, options = KINDS[config.table_optimizer], row_options(config)
        self._collections = {path: part for path, part in task.named_modules() if isinstance(part, TrainedTables)}
        for part in self._collections.values():
            # What a loop before has left is nobody's.
            part.zero_grad()
            part.update_in_backward(kind, options)
        # Made once: they are asked for in every step.
        self._tables = {
            f"{path}.{name}".removeprefix("."): parameter
            for path, part in self._collections.items()
            for name, parameter in part.named_parameters()
        }
        self.held = HeldUpdates(task)
        head = getattr(task, "head", None)
        self._head = head if isinstance(head, SampledCrossEntropyHead) and not head.sparse else None
        if self._head is not None:
            # A gradient of the rows that are scored, and of no others.
            self._head.sparse = True
        self._whole = head if isinstance(head, CutCrossEntropyHead) else None
        if self._whole is not None:
            self._budget = self._whole.memory_budget
            # Slices cost a second time where there is a norm to clip by, so that they are asked for.
            largest = max(parameter.nbytes for parameter in self._tables.values())
            self._whole.memory_budget = config.table_gradient_bytes or max(self._budget, largest)

    @property
    def names(self) -> set[str]:
        """Of the parameters that are updated here."""
        return set(self._tables)

    @property
    def optimizers(self) -> list[BagOptimizer]:
        """Those of all collections."""
        return [optimizer for part in self._collections.values() for optimizer in part.optimizers]

    def check(self) -> None:
        """Refuse a gradient that came to a table another way than by lookups and heads, and that nothing would apply.

        Raises:
            TrainingError: with the table.
        """
        for name, parameter in self._tables.items():
            if parameter.grad is not None:
                raise TrainingError(
                    f"task: {name} got a gradient beside those of lookups and heads, expected none where table_optimizer is "
                    f"{self._optimizer}; read it through its collection's scored(), or take adamw"
                )

    def states(self) -> dict[str, dict[str, Tensor]]:
        """By the names of tables' parameters views of their states."""
        found = {}
        for path, part in self._collections.items():
            parameters = {id(parameter): name for name, parameter in part.named_parameters()}
            for table, states in part.optimizer_states().items():
                found[f"{path}.{parameters[id(part._modules_of_tables[table].weight)]}".removeprefix(".")] = states
        return found

    def norm(self) -> Tensor:
        """The L2 norm of the gradients that are held: `[]` float32."""
        return self.held.norm()

    def step(self, scale: Tensor | None) -> None:
        """Update the rows by what is held."""
        self.held.step(scale)

    def drop(self) -> None:
        """Forget what is held."""
        self.held.drop()

    def end(self) -> None:
        """Give the tables back, to be trained by anybody: their parameters get gradients again."""
        for part in self._collections.values():
            part.stop_updating()
        if self._head is not None:
            self._head.sparse = False
        if self._whole is not None:
            self._whole.memory_budget = self._budget


def update_tables_in_backward(task: nn.Module, config: TrainerConfig, world_size: int) -> RowUpdates | None:
    """Let the tables of a task be updated row by row, where its model is known to read its tables by lookups and heads alone.

    The task's collections are exchanged, with their parameters. AdamW moves every row in every step, and stays as it is; so do
    tables that several processes split or of which a head names most rows, frozen ones, and those of other models, whose forward
    may use a table in any way. For adagrad, row-wise adagrad and SGD both ways come to the same weights, so that only what has no
    dense counterpart is refused there.

    Returns:
        RowUpdates: of the collections; None where all tables have dense gradients.

    Raises:
        TrainingError: an option of rows alone, and a task or a number of processes that has none.
    """
    kind, option = KINDS.get(config.table_optimizer), of_rows_alone(config)
    if kind is None:
        return None
    if not updates_rows(task, config, world_size):
        if option is not None:
            found = f"{world_size} processes" if updates_rows(task, config, 1) else f"a {type(task).__name__}"
            # Each process then has rows of its own.
            shared = "share tables by table_plan, or " if world_size > 1 and not isinstance(task, NextItemTask) else ""
            raise TrainingError(
                f"{option}: {getattr(config, option)} updates rows of SASRec's and RankingModel's tables in one process, "
                f"got {found}; {shared}{_cure(option)}"
            )
        return None
    if not all(task.get_parameter(name).requires_grad for name in table_names(task)):
        if option is not None:
            raise TrainingError(
                f"{option}: {getattr(config, option)} updates tables that all learn, got some that are frozen; {_cure(option)}"
            )
        return None
    if config.table_gradient_bytes is not None and not isinstance(head := getattr(task, "head", None), CutCrossEntropyHead):
        raise TrainingError(
            f"table_gradient_bytes: {config.table_gradient_bytes} belongs to a head over all items, got "
            f"{type(task if head is None else head).__name__}, of which no table has a whole gradient; leave it out"
        )
    return RowUpdates(task, config)


def _cure(option: str) -> str:
    return "take adagrad, rowwise-adagrad, sgd or adamw" if option == "table_optimizer" else "leave it out"


def row_options(config: TrainerConfig) -> dict[str, Any]:
    """The options of the optimizer of tables that are updated row by row."""
    options: dict[str, Any] = {
        "learning_rate": config.table_learning_rate or config.learning_rate,
        "max_norm": config.table_max_norm,
        "state_dtype": getattr(torch, config.table_states),
    }
    if config.table_optimizer in BY_ROWS_ALONE:
        decay = config.weight_decay if config.table_weight_decay is None else config.table_weight_decay
        missed = {"decay_missed_steps": True} if config.table_decay_missed_steps else {}
        return {**options, "weight_decay": decay, "betas": (0.9, config.table_beta2), **missed}
    decays = {"weight_decay": config.table_weight_decay, "decoupled_weight_decay": True} if config.table_weight_decay else {}
    return {**options, "eps": _ADAGRAD_EPS, **decays}
