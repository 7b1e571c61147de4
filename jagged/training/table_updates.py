"""Tables of the product's own models, which their optimizer updates row by row, without a gradient of the whole table."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from jagged.config import TrainerConfig
from jagged.config.options import LoopOptions
from jagged.models import BERT4Rec, ItemSequenceModel, NextItemTask, RequestModel
from jagged.modules import CutCrossEntropyHead, HeldUpdates, SampledCrossEntropyHead, replace_embeddings
from jagged.modules.row_cache import BYTES_OF_ROW
from jagged.modules.trained_tables import TrainedTables
from jagged.ops import BagOptimizer, BagOptimizerKind
from jagged.ops.embedding_bag.optimizers import STATES
from jagged.ops.sampled_cross_entropy.triton.configurations import SHARED_ROWS
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
        "table_cache_bytes": config.table_cache_bytes is not None,
    }
    return next((name for name, is_given in given.items() if is_given), None)


def updates_rows(task: nn.Module, config: LoopOptions, world_size: int) -> bool:
    """Whether a task's tables are updated row by row, if all of them learn.

    A head over all items has a gradient of the whole table, which a dense optimizer takes as it is, in less time
    (`benchmarks/table_steps.py`).
    """
    if config.table_optimizer not in KINDS or world_size > 1:
        return False
    # Of BERT4Rec's table a part is scored against.
    if isinstance(task, NextItemTask) and isinstance(task.model, ItemSequenceModel) and not isinstance(task.model, BERT4Rec):
        return of_rows_alone(config) is not None or task.head is None or isinstance(task.head, SampledCrossEntropyHead)
    return isinstance(task, RequestModel)


def keep_on_host(task: nn.Module, config: LoopOptions, world_size: int) -> None:
    """Let tables of which `table_cache_bytes` caches rows stay in the host's memory when the task is moved; else nothing.

    A GPU need not have room for them. Whoever updates them makes the cache anew, with what their optimizer keeps.

    Raises:
        TrainingError: the option, where a task or a number of processes has no such tables, or a budget without room.
    """
    if config.table_cache_bytes is None:
        return
    if world_size > 1:
        _refuse_cache(config, f"{world_size} processes", "one", "share tables by table_plan, or leave it out")
    if not isinstance(task, RequestModel):
        expected = "a RequestModel, whose tables are read by lookups alone"
        _refuse_cache(config, f"a {type(task).__name__}", expected, "leave it out")
    names = table_names(task)
    if not names:
        _refuse_cache(config, "a model without tables of ids", "some", "leave it out")
    if frozen := sorted(name for name in names if not task.get_parameter(name).requires_grad):
        _refuse_cache(config, f"the frozen table {frozen[0]}", "tables that all learn", "leave it out")
    replace_embeddings(task)
    _cache_rows(task, config)


def _refuse_cache(config: LoopOptions, found: str, expected: str, cure: str) -> NoReturn:
    raise TrainingError(f"table_cache_bytes: got {config.table_cache_bytes} with {found}, expected {expected}; {cure}")


def _collections(task: nn.Module) -> dict[str, TrainedTables]:
    return {path: part for path, part in task.named_modules() if isinstance(part, TrainedTables)}


def cache_budgets(task: nn.Module, config: LoopOptions) -> dict[str, int]:
    """By the paths of a task's collections the bytes of the device that their rows have; none of those that are there as a whole.

    The smallest ones stay whole that together take at most half of `table_cache_bytes`, or all if it has room for all: as many
    lookups find their rows there for fewer bytes, and without a wait in each step. The others share what is left by the bytes of
    tables and states, beside those that say where each row is.
    """
    if config.table_cache_bytes is None:
        return {}
    collections, left = _collections(task), config.table_cache_bytes
    sizes = {
        path: sum(table.nbytes + state_bytes(config, table) for table in part.parameters()) for path, part in collections.items()
    }
    most = left if sum(sizes.values()) <= left else left // 2
    # What has left the device before does not come back.
    for path, size in sorted((of for of in sizes.items() if not collections[of[0]].is_cached), key=lambda of: of[1]):
        if size > most:
            break
        del sizes[path]
        left, most = left - size, most - size
    fixed = {path: BYTES_OF_ROW * sum(map(len, collections[path].parameters())) for path in sizes}
    left = max(0, left - sum(fixed.values()))
    return {path: max(1, fixed[path] + left * size // sum(sizes.values())) for path, size in sizes.items()}


def _cache_rows(task: nn.Module, config: LoopOptions) -> None:
    collections = _collections(task)
    for path, budget in cache_budgets(task, config).items():
        with _of_collection(path, config):
            collections[path].cache_rows(budget)


@contextmanager
def _of_collection(path: str, config: LoopOptions) -> Iterator[None]:
    """Tell of a budget without room by the trainer's option."""
    try:
        yield
    except ValueError as error:
        told = str(error).removeprefix("cache_bytes: ")
        if config.table_cache_bytes is None or told == str(error):
            raise
        raise TrainingError(
            f"table_cache_bytes: got {config.table_cache_bytes:,} for all tables, {path}: {told}; give more"
        ) from None


@contextmanager
def cache_errors() -> Iterator[None]:
    """Tell of a batch without room by the trainer's option."""
    try:
        yield
    except ValueError as error:
        if not str(error).startswith("cache_bytes: "):
            raise
        raise TrainingError(f"table_{error}") from None


class RowUpdates:
    """A task's tables that are updated row by row.

    Attributes:
        held: what holds their updates back until the trainer's step.
    """

    def __init__(self, task: nn.Module, config: TrainerConfig) -> None:
        replace_embeddings(task)
        self._optimizer = config.table_optimizer
        self._collections = _collections(task)
        _cache_rows(task, config)
        for path, part in self._collections.items():
            # What a loop before has left is nobody's.
            part.zero_grad()
            with _of_collection(path, config):
                part.update_in_backward(KINDS[config.table_optimizer], row_options(config))
        # Made once: they are asked for in every step.
        self._tables = {
            f"{path}.{name}".removeprefix("."): parameter
            for path, part in self._collections.items()
            for name, parameter in part.named_parameters()
        }
        self.held = HeldUpdates(task)
        head = getattr(task, "head", None)
        options: dict[str, Any] = {}
        if isinstance(head, SampledCrossEntropyHead):
            # A gradient of the rows that are scored, and of no others.
            options = {"sparse": True, "memory_budget": config.table_gradient_bytes or head.memory_budget}
        elif isinstance(head, CutCrossEntropyHead):
            # Slices cost a second time where there is a norm to clip by, so that they are asked for.
            largest = max(parameter.nbytes for parameter in self._tables.values())
            options = {"memory_budget": config.table_gradient_bytes or max(head.memory_budget, largest)}
        self._head, self._of_head = head, {name: getattr(head, name) for name in options}
        for name, value in options.items():
            setattr(head, name, value)

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

    def write_back(self) -> None:
        """Let parameters on the host have what was changed in rows that are cached."""
        for part in self._collections.values():
            part.write_back()

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
        """Give the tables back, to be trained by anybody: their parameters get gradients again.

        Those of which rows are cached stay on the host, as they may have no room elsewhere, and are only read.
        """
        for part in self._collections.values():
            part.stop_updating()
        for name, value in self._of_head.items():
            setattr(self._head, name, value)


def update_tables_in_backward(task: nn.Module, config: TrainerConfig, world_size: int) -> RowUpdates | None:
    """Let the tables of a task be updated row by row, where its model is known to read its tables by lookups and heads alone.

    The task's collections are exchanged, with their parameters. AdamW moves every row in every step, and stays as it is; so do
    tables that several processes split or of which a head names most rows, frozen ones, and those of other models, whose forward
    may use a table in any way. For adagrad, row-wise adagrad and SGD both ways come to the same weights, so that only what has no
    dense counterpart is refused there.

    Returns:
        RowUpdates: of the collections; None where all tables have dense gradients, or there are none.

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
                f"{option}: {getattr(config, option)} updates rows of SASRec's, HSTU's and RequestModel's tables in one process, "
                f"got {found}; {shared}{_cure(option)}"
            )
        return None
    if not (names := table_names(task)):
        if option is not None:
            raise TrainingError(
                f"{option}: {getattr(config, option)} updates rows of tables, got a {type(task).__name__} without tables of ids; "
                f"{_cure(option)}"
            )
        return None
    if not all(task.get_parameter(name).requires_grad for name in names):
        if option is not None:
            raise TrainingError(
                f"{option}: {getattr(config, option)} updates tables that all learn, got some that are frozen; {_cure(option)}"
            )
        return None
    head = getattr(task, "head", None)
    if config.table_gradient_bytes is not None and not (isinstance(head, CutCrossEntropyHead) or draws_for_each_row(head)):
        found = type(task if head is None else head).__name__
        shares = " whose rows share negatives" if isinstance(head, SampledCrossEntropyHead) else ""
        raise TrainingError(
            f"table_gradient_bytes: {config.table_gradient_bytes} belongs to a head over all items, or with negatives of each "
            f"row, got {found}{shares}, of which no table has a whole gradient; leave it out"
        )
    return RowUpdates(task, config)


def draws_for_each_row(head: nn.Module | None) -> bool:
    """Whether a head's negatives are each row's own, so that a step may name most rows of its table."""
    if not isinstance(head, SampledCrossEntropyHead):
        return False
    per: int | None = getattr(head.sampler, "rows_per_draw", None)
    # Fewer gather as if each row drew for itself.
    return per is not None and per < SHARED_ROWS


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
