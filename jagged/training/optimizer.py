"""One object whose `step` TorchRec's pipeline owns: optimizers of tables and of the rest, schedule, clipping, accumulation."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface, EmbeddingCollectionInterface
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from jagged.config import TrainerConfig
from jagged.modules import GroupSparseHead, RowSplit
from jagged.modules.trained_tables import TrainedTables
from jagged.training.errors import TrainingError

if TYPE_CHECKING:
    from jagged.training.table_plan import ShardedUpdates
    from jagged.training.table_updates import RowUpdates

#: Tables of up to so many rows are learnt from many samples a row, like any other matrix.
SMALL_TABLE = 100
# What each optimizer keeps for a parameter.
_STATES: dict[str, tuple[str, ...]] = {
    "adamw": ("step", "exp_avg", "exp_avg_sq"),
    "sparse-adamw": ("step", "exp_avg", "exp_avg_sq"),
    "rowwise-adamw": ("step", "exp_avg", "exp_avg_sq"),
    "lamb": ("step", "exp_avg", "exp_avg_sq"),
    "rowwise-lamb": ("step", "exp_avg", "exp_avg_sq"),
    "adagrad": ("step", "sum"),
    "rowwise-adagrad": ("step", "sum"),
    "sgd": (),
}
# What a collection that updates its tables in the backward pass calls them.
_OF_COLLECTIONS = {"step": "step", "sum": "first", "exp_avg": "first", "exp_avg_sq": "second", "last_step": "last"}
_TABLES = (EmbeddingBagCollectionInterface, EmbeddingCollectionInterface, nn.Embedding, nn.EmbeddingBag)


def table_names(module: nn.Module) -> set[str]:
    """Names of the parameters that are embedding tables."""
    return {
        f"{path}.{name}".removeprefix(".")
        for path, part in module.named_modules()
        if isinstance(part, _TABLES)
        for name, _ in part.named_parameters()
    }


def updated_heads(module: nn.Module) -> dict[str, GroupSparseHead]:
    """Heads that are updated in the backward pass, by their paths."""
    found = ((path, part) for path, part in module.named_modules() if isinstance(part, GroupSparseHead))
    return {path: part for path, part in found if part.optimizer is not None}


def check_updates(module: nn.Module, accumulate: int, world_size: int, *, caches: bool = False) -> None:
    """Refuse tables that are updated in the backward pass, whose states no checkpoint here would hold.

    Gradients are also accumulated, clipped and averaged over processes after it, so heads that are updated there are refused
    where gradients of several batches or processes make a step.

    Args:
        caches: tables may be in the host's memory.

    Raises:
        TrainingError: the first of them.
    """
    for path in updated_heads(module):
        if accumulate > 1 or world_size > 1:
            several = f"{accumulate} batches" if accumulate > 1 else f"{world_size} processes"
            raise TrainingError(
                f"task: {path} is updated in the backward pass, by the gradient of one batch, but {several} make a step here; "
                "make the head without an optimizer, or train in one process without accumulation"
            )
    collections = [(path, part) for path, part in module.named_modules() if isinstance(part, TrainedTables)]
    fused = [path for path, part in collections if part.optimizers]
    if not caches and (on_host := [path for path, part in collections if part.is_cached]):
        raise TrainingError(
            f"task: {on_host[0]} keeps its tables in the host's memory, expected table_cache_bytes, too; give it, or load the "
            "model anew"
        )
    # TorchRec's `apply_optimizer_in_backward` leaves this on parameters.
    fused += [name for name, parameter in module.named_parameters() if hasattr(parameter, "_in_backward_optimizers")]
    if fused:
        raise TrainingError(
            f"task: {fused[0]} is updated in the backward pass, expected tables without an optimizer of their own; "
            "choose theirs by table_optimizer"
        )


class Optimizer:
    """Fused AdamW, another optimizer for tables where that is asked for, and what belongs to a step.

    Weight decay is AdamW's, decoupled, and leaves out norms and biases (parameters of one dimension). Tables of more than
    100 rows have `table_weight_decay`, where that is given: few samples tell of each of their rows, and without more decay they
    learn these by heart. SGD has no decay of tables, and Adagrad only `table_weight_decay`. A rate is a function of the
    number of steps n alone: the peak times `min(1, (n + 1) / warmup_steps)`, and after the warm-up, with t from 0 to 1 over the
    steps that are left, times `1 - t` (linear) or `(1 + cos(pi t)) / 2` (cosine). The global gradient norm is clipped before each
    step.

    Gradients of several batches make a step where `hold` says so: losses must then be sums over rows, whose number is given, and
    the gradient is that of the mean over all rows of all batches and processes.

    Args:
        parameters: by name; on several processes those not in `split` are replicated, with averaged gradients.
        config: rates, schedule, clipping, optimizers.
        total_steps: at whose end linear and cosine schedules are at 0.
        tables: names of the embedding tables.
        split: by name, the parameters of which each process holds rows of its own, and whose gradients are sums over the
            processes' losses. They count once each in the norm.
        heads: by path, those that are updated in the backward pass: outside of the norm and its clipping, with a peak rate of
            their own on the same schedule.
        rows: the tables that are updated row by row, without gradients of theirs: as the tables by `config`, in the norm and
            clipped by it.
        world_size: processes.

    Attributes:
        steps: steps taken.
        norms: gradient norms before clipping, 0-dim tensors on the device, one a step; whoever reads them clears them.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        config: TrainerConfig,
        *,
        total_steps: int = 0,
        tables: Collection[str] = (),
        split: Mapping[str, RowSplit] | None = None,
        heads: Mapping[str, GroupSparseHead] | None = None,
        rows: RowUpdates | ShardedUpdates | None = None,
        world_size: int = 1,
    ) -> None:
        split = split or {}
        self._heads = dict(heads or {})
        self._updates = rows
        self._table_rate = config.table_learning_rate or config.learning_rate
        updated = {f"{path}.{name}".removeprefix(".") for path in self._heads for name in ("weight", "bias")}
        updated |= set() if rows is None else rows.names
        self.steps = 0
        self.norms: list[Tensor] = []
        self._config, self._total_steps, self._world_size = config, total_steps, world_size
        self._named = {
            name: parameter for name, parameter in parameters.items() if parameter.requires_grad and name not in updated
        }
        self._parameters = list(self._named.values())
        self._split = [parameter for name, parameter in self._named.items() if name in split]
        self._replicated = [parameter for name, parameter in self._named.items() if name not in split]
        self._held, self._fresh = False, True
        self._rows: list[int | Tensor] = []
        own_options = (config.table_learning_rate, config.table_weight_decay)
        apart = config.table_optimizer != "adamw" or any(option is not None for option in own_options)
        own = [parameter for name, parameter in self._named.items() if apart and name in tables]
        rest = [parameter for name, parameter in self._named.items() if not (apart and name in tables)]
        self._kinds = {name: config.table_optimizer if apart and name in tables else "adamw" for name in self._named}
        # Optimizers with the peak rates of their groups.
        self._optimizers: list[tuple[torch.optim.Optimizer, float]] = []
        if rest:
            self._optimizers.append((_adamw(rest, config.learning_rate, config.weight_decay), config.learning_rate))
        if own:
            rate = self._table_rate
            large = [p for name, p in self._named.items() if _rows_of(name, p, split) > SMALL_TABLE]
            made = {
                "adamw": lambda: _adamw(own, rate, config.weight_decay, config.table_weight_decay, large),
                "adagrad": lambda: torch.optim.Adagrad(own, lr=rate),
                "rowwise-adagrad": lambda: RowWiseAdagrad(own, lr=rate),
                "sgd": lambda: torch.optim.SGD(own, lr=rate),
            }[config.table_optimizer]()
            self._optimizers.append((made, rate))
        self._owner = {p: of for of, _ in self._optimizers for group in of.param_groups for p in group["params"]}
        self._set_rates()

    @property
    def learning_rate(self) -> float:
        """The rate of the next step, outside of tables that have another one."""
        return float(self._optimizers[0][0].param_groups[0]["lr"])

    def hold(self, rows: int | Tensor, last: bool) -> None:
        """Tell of the batch that comes that its loss is a sum over `rows`, and whether it is the last one of its step."""
        self._rows.append(rows)
        self._held = not last

    def zero_grad(self) -> None:
        """Drop all gradients, but not those of a step's batches so far."""
        if self._fresh:
            for parameter in self._parameters:
                parameter.grad = None
            if self._updates is not None:
                self._updates.drop()

    def step(self) -> None:
        """Clip, update, and set the next step's rates. Nothing waits for a GPU."""
        self._fresh = not self._held
        if self._held:
            return
        scale = self._average()
        clip_norm = self._config.gradient_clip_norm
        if clip_norm is not None:
            norm = _norm(self._replicated)
            if self._updates is not None:
                of_tables = self._updates.norm() if scale is None else self._updates.norm() * scale
                norm = torch.linalg.vector_norm(torch.stack([norm, of_tables.to(norm.dtype)]))
                # As `clip_grads_with_norm_`; of what is not finite NaN, which changes no table.
                factor = (clip_norm / (norm + 1e-6)).clamp(max=1.0) + 0 * norm
                scale = factor if scale is None else scale * factor
            if self._split:
                squares = _norm(self._split).double().square()
                dist.all_reduce(squares)
                norm = (norm.double().square() + squares).sqrt().to(norm.dtype)
            nn.utils.clip_grads_with_norm_(self._parameters, clip_norm, norm, foreach=True)
            self.norms.append(norm)
        for optimizer, _ in self._optimizers:
            optimizer.step()
        if self._updates is not None:
            self._updates.check()
            self._updates.step(scale)
        self.steps += 1
        self._set_rates()

    def _average(self) -> Tensor | None:
        """Make of the gradients there are those of the mean over the joint rows.

        Returns:
            Tensor: what those of tables that are held have to be multiplied by; None for 1.
        """
        replicated = [parameter.grad for parameter in self._replicated if parameter.grad is not None]
        split = [parameter.grad for parameter in self._split if parameter.grad is not None]
        if not self._rows:
            # The losses were weighted for an average over processes, and split rows have the sum.
            for gradient in split if self._world_size > 1 else ():
                gradient.div_(self._world_size)
            return None
        device = self._parameters[0].device
        total = torch.stack([number_on(device, rows, torch.float64) for rows in self._rows]).sum()
        self._rows.clear()
        if self._world_size > 1:
            dist.all_reduce(total)
        for gradients, sums in ((replicated, 1 / self._world_size), (split, 1.0)):
            if gradients:
                torch._foreach_div_(gradients, (total * sums).clamp(min=1e-30).to(gradients[0].dtype))
        # Those of sharded tables are means over the processes' losses, as the replicated ones are.
        return self._world_size / total.clamp(min=1e-30).float()

    def _set_rates(self) -> None:
        config, steps = self._config, self.steps
        factor = min(1.0, (steps + 1) / max(1, config.warmup_steps))
        if config.schedule != "constant" and steps >= config.warmup_steps:
            left = max(1, self._total_steps - config.warmup_steps)
            passed = min(1.0, (steps - config.warmup_steps) / left)
            factor = 1 - passed if config.schedule == "linear" else (1 + math.cos(math.pi * passed)) / 2
        for optimizer, peak in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = peak * factor
        for of_tables in () if self._updates is None else self._updates.optimizers:
            of_tables.learning_rate.fill_(self._table_rate * factor)
        for head in self._heads.values():
            assert head.optimizer is not None
            head.optimizer.learning_rate.fill_(head.optimizer.peak_learning_rate * factor)

    def state_tensors(self) -> dict[str, Tensor]:
        """The state, `optimizer.<what>.<parameter or head>`; nothing of AdamW's before the first step."""
        of_heads = {
            f"optimizer.{key}.{path}": state
            for path, head in self._heads.items()
            for key, state in head.optimizer_state_dict().items()
        }
        of_tables = {f"optimizer.{key}.{name}": state for (key, name), state in self._states_of_tables().items()}
        return (
            of_heads
            | of_tables
            | {
                f"optimizer.{key}.{name}": torch.as_tensor(self._state(parameter)[key]).detach()
                for name, parameter in self._named.items()
                for key in _STATES[self._kinds[name]]
                if key in self._state(parameter)
            }
        )

    def _states_of_tables(self) -> dict[tuple[str, str], Tensor]:
        """Views of the states of tables that collections update, by what dense optimizers call them and by parameter."""
        found = {}
        missed = ["last_step"] if self._config.table_decay_missed_steps else []
        of_tables = {} if self._updates is None else self._updates.states()
        for name, states in of_tables.items():
            for key in (*_STATES[self._config.table_optimizer], *missed):
                state = states[_OF_COLLECTIONS[key]]
                # A number a row is `[rows, 1]` there.
                found[key, name] = state[:, None] if key == "sum" and state.dim() == 1 else state
        return found

    def owner_of(self, parameter: nn.Parameter) -> torch.optim.Optimizer:
        """Return what updates a parameter."""
        return self._owner[parameter]

    def _state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        return self._owner[parameter].state.get(parameter, {})

    def load_state_tensors(self, tensors: Mapping[str, Tensor], steps: int) -> None:
        """Take over a state that `state_tensors` gave after `steps` steps.

        Raises:
            KeyError: a tensor is missing.
            ValueError: a tensor's shape does not fit.
        """
        for name, parameter in self._named.items():
            keys = _STATES[self._kinds[name]]
            # A parameter that had no gradient yet has no state.
            if not any(f"optimizer.{key}.{name}" in tensors for key in keys):
                continue
            state = {}
            for key in keys:
                value = tensors[f"optimizer.{key}.{name}"]
                rowwise = key == "sum" and self._kinds[name] == "rowwise-adagrad"
                expected = (len(parameter), 1) if rowwise else tuple(parameter.shape)
                if key != "step" and tuple(value.shape) != expected:
                    raise ValueError(f"optimizer.{key}.{name}: shape {tuple(value.shape)}, expected {expected}")
                state[key] = value.to("cpu" if key == "step" and self._kinds[name] != "adamw" else parameter.device, copy=True)
            self._owner[parameter].state[parameter] = state
        for (key, name), own in self._states_of_tables().items():
            # That of one without a step yet has no state.
            if f"optimizer.{key}.{name}" in tensors:
                value = tensors[f"optimizer.{key}.{name}"]
                if value.shape != own.shape:
                    raise ValueError(f"optimizer.{key}.{name}: shape {tuple(value.shape)}, expected {tuple(own.shape)}")
                own.copy_(value)
            else:
                own.zero_()
        for path, head in self._heads.items():
            head.load_optimizer_state_dict({key: tensors[f"optimizer.{key}.{path}"] for key in head.optimizer_state_dict()})
        self.steps = steps
        self._set_rates()


def number_on(device: torch.device, number: int | Tensor, dtype: torch.dtype) -> Tensor:
    """A new 0-dim tensor with the number; a host's number is written there by a kernel, because a copy would wait for a GPU."""
    if isinstance(number, Tensor):
        return number.to(device, dtype, copy=True)
    return torch.full((), number, dtype=dtype, device=device)


def _rows_of(name: str, table: nn.Parameter, split: Mapping[str, RowSplit]) -> int:
    """Rows of a table, those that other processes hold included."""
    return split[name].num_rows if name in split else len(table)


def _adamw(
    parameters: list[nn.Parameter],
    rate: float,
    weight_decay: float,
    large_decay: float | None = None,
    large: Sequence[nn.Parameter] = (),
) -> torch.optim.AdamW:
    """AdamW with a decay of matrices, and another one of those in `large` unless it is None."""
    apart = {id(p) for p in large} if large_decay is not None else set()
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.dim() > 1 and id(p) not in apart], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() > 1 and id(p) in apart], "weight_decay": large_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=rate, fused=True)


def _norm(parameters: list[nn.Parameter]) -> Tensor:
    return nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None], foreach=True)
