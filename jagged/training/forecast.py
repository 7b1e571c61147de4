"""What a run will need, before it starts: memory and steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from jagged.config import MultiLabelConfig, RankingConfig, TrainConfig
from jagged.config.options import LoopOptions
from jagged.data import BatchLoader, LabelBatch, MultiLabelRows, SequenceSplit
from jagged.data.moving import moved
from jagged.data.negatives import Drawing
from jagged.evaluation import event_features, item_table, takes_times
from jagged.models import NextItemTask, RequestModel
from jagged.models.features import HistoryEncoder
from jagged.modules import MixedSampler, SampledCrossEntropyHead
from jagged.modules.trained_tables import TrainedTables
from jagged.ops.embedding_bag.slices import SLICES_OF_ROOM
from jagged.ops.sampled_cross_entropy.api import AT_ONCE, MOST_GATHERED
from jagged.ops.sampled_cross_entropy.triton.configurations import SHARED_ROWS
from jagged.ops.sampled_cross_entropy.triton.entries import ENTRY_BYTES, ENTRY_BYTES_AT_MOST
from jagged.scoring import DEFAULT_MAX_BYTES
from jagged.training.display import memory_in_use
from jagged.training.filled import room_for_more
from jagged.training.graphs import graphs_serve
from jagged.training.optimizer import table_names, updated_heads
from jagged.training.processes import Processes
from jagged.training.table_plan import check_plan, plan_tables, splits_of
from jagged.training.table_updates import cache_budgets, draws_for_each_row, state_bytes, updates_rows

if TYPE_CHECKING:
    from jagged.data import Part
    from jagged.data.table_batches import Batch
    from jagged.data.table_loader import RequestLoader

# Sizes of graphs that a run on requests has, or fewer.
_GRAPHS = 4
# A probe of this many samples has every tensor of a step, and costs next to nothing.
_PROBE_SAMPLES = 8
# Of an item that a row scores, where the gradient is in factors: its number and factor, both again among those of lookups, and
# sorted.
_PAIR_BYTES = 64


@dataclass(frozen=True)
class Forecast:
    """Memory in bytes and steps of a run; `str()` of it is what is printed.

    Attributes:
        device: "cpu" or "cuda".
        present: in use before training: on the CPU the process with its libraries and data, on a GPU what is allocated.
        parameters: the weights that this process keeps on the device, fp32; they are part of `present`. The best so far are held
            beside them.
        elsewhere: the rows of tables that other processes keep. They are part of `present` too, and go before training.
        gradients: of the kept weights, and the second one that the item table has for a moment, from lookup and from scoring;
            with `graphs` a third. Where tables are updated row by row: of the rows that a step scores, once more while they are
            put together with those that it reads, and once as each row's sum; where the update makes it, the item table's own
            once, and what it is made of. On requests with `graphs` also of all rows that
            four graphs look up.
        cached: of tables in the host's memory, what rows on the device take, with the optimizer's states; on a GPU it is part of
            `present`.
        host: on a GPU, what such tables take of the host's memory: their weights, the best so far, and the optimizer's states.
        slices: how often a step makes the item table's gradient, slice by slice, from 1 to 2; 0 where it is kept.
        optimizer: AdamW's two moments, and what tables have by `table_optimizer`.
        activations: of a step of the most tokens: 1.6 times what it keeps for its backward, measured on a probe of this model;
            the rest is for what the backward itself needs, and for gaps between freed blocks. On requests with `graphs` twice
            that. With several processes also all processes' hidden states at the head, their gradients, and these once more while
            they are exchanged; and the items that a sampled head fetches.
        checkpoint: on the CPU, what the first process holds for a checkpoint; of several processes whole item tables: weights,
            moments, the best.
        evaluation: the bound on scores while evaluating, and with several processes a whole item table.
        graphs: the steps are replayed as CUDA graphs, which keep the memory of gradients and activations between steps too.
        samples, tokens: of a usual step.
        counted: what samples and tokens are, in words.
        steps_per_epoch, max_steps: of this process; early stopping may end before the latter.
    """

    device: str
    present: int
    parameters: int
    elsewhere: int
    gradients: int
    optimizer: int
    activations: int
    checkpoint: int
    evaluation: int
    graphs: bool
    samples: float
    tokens: float
    steps_per_epoch: int
    max_steps: int
    counted: tuple[str, str] = ("users", "events")
    slices: float = 0
    cached: int = 0
    host: int = 0

    @property
    def peak(self) -> int:
        """The most memory in use at any moment, bytes."""
        steady = self.present - self.elsewhere + self.parameters + self.optimizer
        if self.device != "cuda":
            # Nothing was written there yet.
            steady += self.cached
        step, between = self.gradients + self.activations, self.parameters + max(self.checkpoint, self.evaluation)
        return max(self.present, steady + (step + between if self.graphs else max(step, between)))

    @property
    def _in_slices(self) -> str:
        if not self.slices:
            return ""
        twice = f", {self.slices - 1:.0%} of it twice for its norm" if self.slices > 1 else ""
        return f" (the item table's in slices{twice})"

    @property
    def _of_cache(self) -> str:
        return f"cached rows {_size(self.cached)}, " if self.cached else ""

    def __str__(self) -> str:
        where = "GPU memory" if self.device == "cuda" else "CPU memory (resident)"
        return "\n".join(
            (
                f"forecast  {where}: peak about {_size(self.peak)}",
                f"          in use now {_size(self.present)} (with {_size(self.parameters + self.elsewhere)} of weights), "
                f"best weights {_size(self.parameters)}, "
                f"optimizer {_size(self.optimizer)}, {self._of_cache}gradients {_size(self.gradients)}{self._in_slices}, "
                f"activations {_size(self.activations)}, "
                f"a checkpoint being written {_size(self.checkpoint)}, evaluation up to {_size(self.evaluation)}",
                *([f"          host memory: tables, the best ones and their optimizer {_size(self.host)}"] if self.host else []),
                f"          {self.steps_per_epoch:,} steps an epoch of about {self.samples:,.0f} {self.counted[0]} and "
                f"{self.tokens:,.0f} {self.counted[1]}, at most {self.max_steps:,} steps",
            )
        )


def forecast(
    config: TrainConfig, split: SequenceSplit, loader: BatchLoader, task: NextItemTask, precision: str, processes: Processes
) -> Forecast:
    """Forecast a run from its data, its model, whole yet in every process, and a forward pass of a few samples.

    Memory for activations grows with the number of tokens alone, because nothing is padded; so a few samples tell it. The global
    random state is left as it was.
    """
    device = processes.device
    table, world_size = item_table(task.model), processes.world_size
    others = table[-(-len(table) // world_size) :]
    sizes = [
        (parameter.numel() - others.numel() * (parameter is table)) * parameter.element_size()
        for parameter in task.parameters()
        if parameter.requires_grad
    ]
    whole_table = table.nbytes if world_size > 1 else 0
    rows = loader.rows(0).double()
    steps = loader.num_batches(0)
    tokens = float(rows.sum()) / (steps * world_size)
    samples = len(rows) / (steps * world_size)
    # Four standard deviations above the mean, and never more than can be.
    most = tokens + 4 * float(rows.std(correction=0)) * math.sqrt(samples)
    most = min(most, float(config.training.max_tokens or config.training.batch_size * config.data.max_seq_len))
    writes = device.type == "cpu" and processes.is_first
    exchanged = 3 * 4 * table.shape[1] * world_size if world_size > 1 else 0
    graphs = graphs_serve(config.trainer, task, processes)
    if graphs:
        # A step's gradients are added to what stays, and a step's last rows are filled up.
        most = most * 17 / 16 + 64
    by_rows = updates_rows(task, config.training, world_size) and table.requires_grad
    gradients, states = sum(sizes) + max(sizes) * (2 if graphs else 1), 2 * sum(sizes)
    if by_rows:
        gradients = sum(sizes) - table.nbytes + int(_row_bytes(task, table, most, config.training, device))
    if config.training.table_optimizer != "adamw":
        states += state_bytes(config.training, table) // world_size - 2 * (table.nbytes - others.nbytes)
    scored = min(len(table), _scored_rows(task, most)) if isinstance(task.head, SampledCrossEntropyHead) else 0
    # Items that a split head fetches: those of every process, sent and received, and their gradients.
    fetched = 4 * 4 * table.shape[1] * world_size * scored if world_size > 1 else 0
    catalogue = 4.0 * split.train.num_items * config.evaluation.eval_batch_size
    return Forecast(
        device=device.type,
        present=memory_in_use(device),
        parameters=sum(sizes),
        elsewhere=others.nbytes,
        gradients=gradients,
        optimizer=states,
        activations=int(most * (1.6 * _bytes_per_token(config, split, task, precision, device) + exchanged) + fetched),
        checkpoint=4 * whole_table if writes else 0,
        evaluation=int(min(DEFAULT_MAX_BYTES, 4 * catalogue)) + whole_table,
        graphs=graphs,
        samples=samples,
        tokens=tokens,
        steps_per_epoch=steps,
        max_steps=steps * config.training.max_epochs,
        slices=_times_in_slices(config.training, table) if by_rows and _is_in_slices(task, table, most, config.training) else 0,
    )


def _times_in_slices(options: LoopOptions, table: Tensor) -> float:
    """How often a step makes a gradient that is in slices; 0 where all of them wait for the update."""
    most = options.table_gradient_bytes
    if most is None or most >= table.nbytes:
        return 0
    # One slice is in work, the others that there is room for wait for the update.
    kept = most * (1 - 1 / SLICES_OF_ROOM)
    return 1 if options.gradient_clip_norm is None else 2 - kept / table.nbytes


def forecast_requests(
    config: RankingConfig, part: Part, loader: RequestLoader, task: nn.Module, processes: Processes
) -> Forecast:
    """Forecast a run on a table's requests in the same way; its tokens are events of histories and candidates."""
    device, world_size, of = processes.device, processes.world_size, config.training
    drawing = Drawing.of(part.dataset, part.training, config.data.negatives, config.data.negatives_by, config.seed)
    rows = torch.from_numpy(sum(part.sizes(config.data.max_history, drawing))).double()
    steps = loader.num_batches(0)
    samples, tokens = len(rows) / (steps * world_size), float(rows.sum()) / (steps * world_size)
    # Four standard deviations above the mean, and never more than can be.
    most = tokens + 4 * float(rows.std(correction=0)) * math.sqrt(samples)
    most = min(most, float(of.max_tokens or of.batch_size * float(rows.max())))
    if graphs := graphs_serve(config.trainer, task, processes):
        most *= 1 + room_for_more(samples)
    # Never more than a batch, for whose rows a cache may have just room.
    probe = part.gather(
        range(min(_PROBE_SAMPLES, len(rows), of.batch_size)), max_history=config.data.max_history, **config.data.drawing()
    )
    probed = max(1, int(rows[: len(probe)].sum()))
    kept = _kept_of_requests(cast(RequestModel, task), probe.to(device), config.precision, device) / probed
    weights = _Weights.of(task, of, processes, most)
    # Each graph keeps the gradients of what it looks up, and the first step of one runs beside those that there are.
    held = int(_GRAPHS * most * _lookup_bytes(cast(RequestModel, task), probe) / probed) if graphs else 0
    return Forecast(
        device=device.type,
        present=memory_in_use(device),
        parameters=weights.parameters,
        elsewhere=weights.elsewhere,
        gradients=weights.gradients + held,
        optimizer=weights.optimizer,
        activations=int(1.6 * most * kept) * (2 if graphs else 1) + weights.exchanged,
        checkpoint=weights.checkpoint,
        evaluation=int(kept * tokens / samples * config.evaluation.eval_batch_size) + weights.whole,
        cached=weights.cached,
        host=weights.host,
        graphs=graphs,
        samples=samples,
        tokens=tokens,
        steps_per_epoch=steps,
        max_steps=-(-steps // of.accumulate) * of.max_epochs,
        counted=("requests", "events and candidates"),
    )


def forecast_rows(config: MultiLabelConfig, rows: MultiLabelRows, steps: int, task: nn.Module, processes: Processes) -> Forecast:
    """Forecast a run on this process's rows with sets of labels in the same way; its tokens are the rows' features."""
    device, count = processes.device, len(rows)
    tokens = len(rows.feature_ids) / max(steps, 1)
    weights = _Weights.of(task, config.training, processes, tokens)
    # These have states of their own, which are there already.
    updated = sum(of.numel() * of.element_size() for head in updated_heads(task).values() for of in (head.weight, head.bias))
    batch_size = min(config.training.batch_size, count)
    probe = rows.take(np.arange(min(_PROBE_SAMPLES, count)))
    kept = _kept_bytes(task, moved(LabelBatch.of(probe), device), config.precision, device) / len(probe)
    return Forecast(
        device=device.type,
        present=memory_in_use(device),
        parameters=weights.parameters,
        elsewhere=weights.elsewhere,
        gradients=weights.gradients,
        optimizer=weights.optimizer - 2 * updated,
        activations=int(1.6 * batch_size * kept) + weights.exchanged,
        checkpoint=weights.checkpoint,
        evaluation=int(kept * config.evaluation.eval_batch_size) + weights.whole,
        graphs=graphs_serve(config.trainer, task, processes),
        samples=float(batch_size),
        tokens=tokens,
        steps_per_epoch=steps,
        max_steps=-(-steps // config.training.accumulate) * config.training.max_epochs,
        counted=("rows", "features"),
    )


@dataclass(frozen=True)
class _Weights:
    """Bytes that go by a task's weights and how its tables are updated and shared, as `Forecast` has them.

    Attributes:
        exchanged: rows that are looked up for other processes, sent and received, and their gradients.
        whole: of sharded tables, a copy of all rows.
    """

    parameters: int
    elsewhere: int
    gradients: int
    optimizer: int
    exchanged: int
    checkpoint: int
    whole: int
    cached: int
    host: int

    @classmethod
    def of(cls, task: nn.Module, options: LoopOptions, processes: Processes, most: float) -> _Weights:
        """Of a step that reads `most` rows of each table; those of which rows are cached have been kept on the host already."""
        world_size = processes.world_size
        learned = {name: parameter.detach() for name, parameter in task.named_parameters() if parameter.requires_grad}
        is_sharded = check_plan(task, options, world_size)
        splits = splits_of(plan_tables(task, options, processes), task, processes) if is_sharded else {}
        here = {name: whole if name not in splits else whole[splits[name].block()] for name, whole in learned.items()}
        size = sum(tensor.nbytes for tensor in here.values())
        tables = [here[name] for name in table_names(task) & here.keys()]
        gradients, states = size, 2 * size
        if options.table_optimizer != "adamw":
            states += sum(state_bytes(options, table) - 2 * table.nbytes for table in tables)
            if is_sharded or updates_rows(task, options, world_size):
                # As of those of a step above; sharded, of the rows that all processes read.
                read = most * world_size
                gradients += sum(3 * int(4 * table.shape[1] * min(read, len(table))) - table.nbytes for table in tables)
        budgets = cache_budgets(task, options)
        on_host = [of for path in budgets for of in task.get_submodule(path).parameters()]
        weights, of_rows = sum(table.nbytes for table in on_host), sum(state_bytes(options, table) for table in on_host)
        host = 0
        if budgets and processes.device.type == "cuda":
            host, size, states = 2 * weights + of_rows, size - weights, states - of_rows
        wholes = [learned[name] for name in splits]
        whole = sum(table.nbytes for table in wholes)
        writes = processes.device.type == "cpu" and processes.is_first
        return cls(
            parameters=size,
            elsewhere=sum(tensor.nbytes for tensor in learned.values()) - sum(tensor.nbytes for tensor in here.values()),
            gradients=gradients,
            optimizer=states,
            exchanged=int(sum(4 * 4 * table.shape[1] for table in wholes) * most),
            checkpoint=2 * whole + sum(state_bytes(options, table) for table in wholes) if writes else 0,
            whole=whole,
            cached=sum(budgets.values()),
            host=host,
        )


def _row_bytes(task: NextItemTask, table: Tensor, tokens: float, options: LoopOptions, device: torch.device) -> float:
    """What gradients of the rows that a step looks up and scores take until the rows are updated, or more."""
    row, scored, most = 3 * 4 * table.shape[1], _scored_rows(task, tokens), options.table_gradient_bytes
    if _is_in_slices(task, table, tokens, options):
        if not draws_for_each_row(task.head):
            # Slices, the one in work once more while it is put together with the rows that are read, and those.
            return (1 + 2 / SLICES_OF_ROOM) * cast(int, most) + row * tokens
        # What rows add is sorted before the gradient is made, and stays as long. On a CPU a whole one is copied beside the rows
        # that are read, and summed by row.
        is_kernels = device.type == "cuda"
        whole = most is None or most >= table.nbytes
        slices = table.nbytes * (1 if is_kernels else 3) if whole else (1 + 2 / SLICES_OF_ROOM) * cast(int, most)
        at_once = max(ENTRY_BYTES_AT_MOST, min(most or table.nbytes, table.nbytes)) if is_kernels else float("inf")
        sorted_bytes = min(ENTRY_BYTES * scored, at_once)
        return max(sorted_bytes, slices + (4 if is_kernels else 8) * scored) + row * tokens
    if draws_for_each_row(task.head) and scored <= MOST_GATHERED * len(table):
        # In factors, with the hidden states.
        return row * 2 * tokens + _PAIR_BYTES * scored
    return row * (min(len(table), scored) + tokens)


def _is_in_slices(task: NextItemTask, table: Tensor, tokens: float, options: LoopOptions) -> bool:
    """Whether a step's update makes the gradient of a table in slices."""
    if draws_for_each_row(task.head):
        at_once = min(AT_ONCE, options.table_gradient_bytes or AT_ONCE)
        return _scored_rows(task, tokens) > MOST_GATHERED * len(table) and 4 * table.numel() > at_once
    return options.table_gradient_bytes is not None and options.table_gradient_bytes < table.nbytes


def _scored_rows(task: NextItemTask, tokens: float) -> float:
    """Rows of the item table that a step's gradient from scoring has, or more."""
    if not isinstance(task.head, SampledCrossEntropyHead):
        return float("inf")
    sampler = task.head.sampler
    count, per = getattr(sampler, "count", None), getattr(sampler, "rows_per_draw", None)
    if isinstance(sampler, MixedSampler):
        count = sampler.drawn.count
    drawn = 0 if count is None else count * (1 if per is None else tokens / (per if per >= SHARED_ROWS else 1))
    # Targets, and those of the batch again.
    return drawn + 2 * tokens


def _bytes_per_token(config: TrainConfig, split: SequenceSplit, task: nn.Module, precision: str, device: torch.device) -> float:
    probe = BatchLoader(
        split.train,
        batch_size=min(_PROBE_SAMPLES, len(split.train)),
        max_seq_len=config.data.max_seq_len,
        shuffle=True,
        seed=config.seed,
        with_times=takes_times(task.model),
        with_features=event_features(task.model),
    )
    batch = next(iter(probe)).to(device)
    return _kept_bytes(task, batch, precision, device) / max(1, batch.targets.numel())


def _lookup_bytes(task: RequestModel, batch: Batch) -> int:
    """Gradients of all rows that a batch looks up, with their numbers and places."""
    tables: Any = [*task.bags.values(), *task.sequences]
    configs = [one for of in tables for one in (getattr(of, "embedding_bag_configs", None) or of.embedding_configs)()]
    width_of = {key: config.embedding_dim for config in configs for key in config.feature_names}
    keyed = [value for value in vars(batch).values() if isinstance(value, KeyedJaggedTensor)]
    counts = [pair for of in keyed for pair in zip(of.keys(), of.length_per_key(), strict=True)]
    return sum(count * (4 * width_of[key] + 16) for key, count in counts if key in width_of)


def _kept_bytes(task: nn.Module, batch: Any, precision: str, device: torch.device) -> int:
    """What a forward pass of a batch keeps for its backward."""
    weights = {tensor.untyped_storage().data_ptr() for tensor in (*task.parameters(), *task.buffers())}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        # A low-precision copy of a weight is kept as well; it does not grow with the batch.
        if storage.data_ptr() not in weights and not _is_weight_copy(tensor, task):
            kept[storage.data_ptr()] = storage.nbytes()
        # Not the tensor itself: an output that its own node keeps would hold the node, and neither would ever go.
        return tensor.detach()

    was_training = task.training
    task.train()
    cached = [part for part in task.modules() if isinstance(part, TrainedTables) and part.is_cached]
    for part in cached:
        # Without an optimizer they are only read. Nothing is updated here.
        part.update_in_backward("sgd", {"learning_rate": 0.0})
    devices = [device] if device.type == "cuda" else []
    with (
        torch.random.fork_rng(devices),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16-mixed"),
    ):
        output = task(batch)
    task.train(was_training)
    del output
    for part in cached:
        part.stop_updating()
    return sum(kept.values())


def _kept_of_requests(task: RequestModel, batch: Batch, precision: str, device: torch.device) -> int:
    """The same; where histories are encoded again, with what the largest one needs beside that of which all are encoded."""
    kept = _kept_bytes(task, batch, precision, device)
    more = [0]
    for history in (part for part in task.modules() if isinstance(part, HistoryEncoder) and part.recompute):
        history.recompute = False
        try:
            more.append(_kept_bytes(task, batch, precision, device) - kept)
        finally:
            history.recompute = True
    return kept + max(more)


def _is_weight_copy(tensor: Tensor, task: nn.Module) -> bool:
    return tensor.dtype == torch.bfloat16 and any(
        tensor.untyped_storage().nbytes() == 2 * weight.numel() for weight in task.parameters() if weight.dim() > 1
    )


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
