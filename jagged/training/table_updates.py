"""Tables of the product's own models, which their optimizer updates row by row, without a gradient of the whole table."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from jagged.config import TrainerConfig
from jagged.config.options import LoopOptions
from jagged.models import NextItemTask, RankingModel, SASRec
from jagged.modules import HeldUpdates, SampledCrossEntropyHead, replace_embeddings
from jagged.modules.trained_tables import TrainedTables
from jagged.ops import BagOptimizerKind
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
}
# Rows that share a draw from which a step's items are few beside those of the table.
FEWEST_ROWS_PER_DRAW = 64
#: Kinds that have no dense counterpart: rows that a batch does not name keep their moments and are not decayed.
BY_ROWS_ALONE = ("sparse-adamw", "rowwise-adamw")


def state_bytes(kind: str, table: Tensor) -> int:
    """What an optimizer of tables keeps for one, by `table_optimizer`."""
    of_elements, of_rows = {
        "sgd": (0, 0), "adagrad": (1, 0), "rowwise-adagrad": (0, 1), "rowwise-adamw": (1, 1),
    }.get(kind, (2, 0))  # fmt: skip
    return 4 * (of_elements * table.numel() + of_rows * len(table))


def updates_rows(task: nn.Module, config: LoopOptions, world_size: int) -> bool:
    """Whether a task's tables are updated row by row, if all of them learn.

    A head over all items has a gradient of the whole table, and one that draws for each row has one of nearly all of its rows: a
    dense optimizer takes that as it is, in less time (`benchmarks/table_steps.py`).
    """
    if config.table_optimizer not in KINDS or world_size > 1:
        return False
    if isinstance(task, NextItemTask) and isinstance(task.model, SASRec):
        return config.table_optimizer in BY_ROWS_ALONE or task.head is None or _names_few_rows(task.head)
    return isinstance(task, RankingModel)


def _names_few_rows(head: nn.Module) -> bool:
    if not isinstance(head, SampledCrossEntropyHead):
        return False
    per_draw = getattr(head.sampler, "rows_per_draw", None)
    return per_draw is None or per_draw >= FEWEST_ROWS_PER_DRAW


class RowUpdates:
    """A task's tables that are updated row by row.

    Attributes:
        collections: by their paths.
        held: what holds their updates back until the trainer's step.
    """

    def __init__(self, task: nn.Module, kind: BagOptimizerKind, options: dict[str, Any]) -> None:
        replace_embeddings(task)
        self.collections = {path: part for path, part in task.named_modules() if isinstance(part, TrainedTables)}
        for part in self.collections.values():
            # What a loop before has left is nobody's.
            part.zero_grad()
            part.update_in_backward(kind, options)
        self.held = HeldUpdates(task)
        head = getattr(task, "head", None)
        self._head = head if isinstance(head, SampledCrossEntropyHead) and not head.sparse else None
        if self._head is not None:
            # A gradient of the rows that are scored, and of no others.
            self._head.sparse = True

    def end(self) -> None:
        """Give the tables back, to be trained by anybody: their parameters get gradients again."""
        for part in self.collections.values():
            part.stop_updating()
        if self._head is not None:
            self._head.sparse = False


def update_tables_in_backward(task: nn.Module, config: TrainerConfig, world_size: int) -> RowUpdates | None:
    """Let the tables of a task be updated row by row, where its model is known to read its tables by lookups and heads alone.

    The task's collections are exchanged, with their parameters. AdamW moves every row in every step, and stays as it is; so do
    tables that several processes split or of which a head names most rows, frozen ones, and those of other models, whose forward
    may use a table in any way. For adagrad, row-wise adagrad and SGD both ways come to the same weights.

    Returns:
        RowUpdates: of the collections; None where all tables have dense gradients.

    Raises:
        TrainingError: an optimizer of rows alone, and a task or a number of processes that has none.
    """
    kind = KINDS.get(config.table_optimizer)
    if kind is None:
        return None
    if not updates_rows(task, config, world_size):
        if config.table_optimizer in BY_ROWS_ALONE:
            found = f"{world_size} processes" if updates_rows(task, config, 1) else f"a {type(task).__name__}"
            raise TrainingError(
                f"table_optimizer: {config.table_optimizer} updates rows of SASRec's and RankingModel's tables in one process, "
                f"got {found}; take adagrad, rowwise-adagrad, sgd or adamw"
            )
        return None
    if not all(task.get_parameter(name).requires_grad for name in table_names(task)):
        if config.table_optimizer in BY_ROWS_ALONE:
            raise TrainingError(
                f"table_optimizer: {config.table_optimizer} updates tables that all learn, got some that are frozen; "
                "take adagrad, rowwise-adagrad, sgd or adamw"
            )
        return None
    return RowUpdates(task, kind, _options(config))


def _options(config: TrainerConfig) -> dict[str, Any]:
    rate = config.table_learning_rate or config.learning_rate
    if config.table_optimizer not in BY_ROWS_ALONE:
        return {"learning_rate": rate, "eps": _ADAGRAD_EPS}
    decay = config.weight_decay if config.table_weight_decay is None else config.table_weight_decay
    return {"learning_rate": rate, "weight_decay": decay}
