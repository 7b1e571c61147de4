"""TorchRec's engine around a task: DistributedModelParallel and its pipelines, mixed precision, exact averages."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper, DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist
from torchrec.distributed.types import ShardingPlan

from jagged.config import TrainerConfig
from jagged.data.moving import Carried
from jagged.data.table_batches import Batch
from jagged.models import NextItemTask, RequestModel
from jagged.models.pretrained import apart
from jagged.models.task import explained
from jagged.modules import HeldUpdates, RowSplit, SplitEmbeddingCollection
from jagged.training.batches import carried
from jagged.training.errors import CheckpointError
from jagged.training.filled import RequestSizes, SequenceSizes
from jagged.training.graphs import GraphedSteps, graphs_serve
from jagged.training.optimizer import Optimizer, check_updates, number_on, table_names, updated_heads
from jagged.training.processes import Processes
from jagged.training.table_plan import ShardedUpdates, check_plan, sharders
from jagged.training.table_updates import RowUpdates, cache_errors, update_tables_in_backward

_TASK = "task."
_RANDOM = "random."


class Trained(NamedTuple):
    """A batch that was trained on.

    Attributes:
        loss: 0-dim, on the device.
        rows: those that it is the mean over, on the host or as a 0-dim tensor.
        updated: whether the weights were updated, and not only gradients accumulated.
    """

    loss: Tensor
    rows: int | Tensor
    updated: bool


class Engine:
    """A task under TorchRec's engine, with an optimizer, and all of their state as named tensors.

    An item table that is looked up and scored against has a gradient of two sources. Under AdamW, and where processes split it,
    it is an ordinary parameter with a dense gradient; other optimizers update the rows that a step names (`table_updates.py`).
    On several processes a `NextItemTask` keeps a part of its table in each one, with its rows' gradient and optimizer
    state; DistributedModelParallel replicates everything else, or shards collections by `table_plan`, whose rows are updated
    where they are. Named tensors are of the whole table, so that they fit any number of processes and any plan.

    Args:
        task: a `RankingTask`, on any device but meta; the same weights in every process. On several processes one that is split
            also takes a batch of no users.
        config: optimizers, schedule, clipping, accumulation.
        precision: "32-true" or "bf16-mixed"; the weights are fp32 either way.
        processes: the run's processes and this one's device.
        total_steps: of the whole run, for schedules.
    """

    def __init__(
        self, task: nn.Module, config: TrainerConfig, precision: str, processes: Processes, total_steps: int = 0
    ) -> None:
        caches = config.table_cache_bytes is not None
        check_updates(task, config.accumulate, processes.world_size, caches=caches)
        is_sharded = check_plan(task, config, processes.world_size)
        self.task = task
        self.processes = processes
        self._accumulate = config.accumulate
        # Before anything of the task is exchanged, as it may refuse.
        by_graphs = graphs_serve(config, task, processes)
        device = processes.device
        if processes.world_size > 1 and isinstance(task, NextItemTask):
            task.split(processes.group, processes.host_group)
        self._sharded = ShardedUpdates(task, config, processes) if is_sharded else None
        self._rows: RowUpdates | ShardedUpdates | None = self._sharded
        held, self._caches = None, caches
        if self._sharded is None and (rows := update_tables_in_backward(task, config, processes.world_size)) is not None:
            self._rows, held = rows, rows.held
        # The optimizer comes with what it updates, and what is updated may be replicated by the wrapper.
        self._step = _Step(task, precision, processes, by_graphs, held, clips=config.gradient_clip_norm is not None).to(device)
        self._tables = {path: module for path, module in task.named_modules() if isinstance(module, SplitEmbeddingCollection)}
        self._splits = {
            f"{path}.{name}": table.split for path, table in self._tables.items() for name, _ in table.named_parameters()
        }
        split = {task.get_parameter(name) for name in self._splits}
        ignored = [name for name, parameter in self._step.named_parameters() if parameter in split]
        self._parallel = DistributedModelParallel(
            self._step,
            device=device,
            sharders=[] if self._sharded is None else sharders(),
            plan=ShardingPlan(
                {} if self._sharded is None else {f"{_TASK}{path}": of for path, of in self._sharded.plan.plan.items()}
            ),
            data_parallel_wrapper=_Replicated(params_to_ignore=ignored),
        )
        if self._sharded is not None:
            self._sharded.begin()
            self._splits |= self._sharded.splits
        with self._without_shards():
            parameters = dict(task.named_parameters())
        self.optimizer = Optimizer(
            parameters,
            config,
            total_steps=total_steps,
            tables=table_names(task),
            split=self._splits,
            heads=updated_heads(task),
            rows=self._rows,
            world_size=processes.world_size,
        )
        if self._accumulate > 1:
            self._step.weighted.optimizer = self.optimizer

    def close(self) -> None:
        """Give the task back: its tables, if they were updated row by row, get gradients again. Nothing is trained any more."""
        if self._rows is not None:
            self._rows.end()
        # Their memory would stay until Python looks for cycles.
        self._step.drop_graphs()

    @property
    def samples(self) -> int:
        """Samples this process has trained on; 0 where batches do not tell."""
        return self._step.weighted.samples

    def steps(self, batches: Iterable[Any], left: int | None = None) -> Iterator[Trained]:
        """Train on every batch, and yield after each one. Nothing here waits for a GPU.

        TorchRec's pipeline copies the next batch to the device while a step computes; of a ranking model whose tables are sharded
        it also sends the next batch's ids.

        Args:
            batches: of an epoch, from its beginning or from behind an update on.
            left: how many; the last one ends its step. None where every batch is a step.
        """
        self._parallel.train()
        pipeline: Any
        if self._sharded is not None and isinstance(self.task, RequestModel):
            # Of the models with collections this is the one that is known to be traced; its batches are no others than its own.
            pipeline = TrainPipelineSparseDist(self._parallel, self.optimizer, self.processes.device)
            batches = iter(batches)
        else:
            made = (self._parallel, self.optimizer, self.processes.device)
            pipeline, batches = TrainPipelineBase(*made), carried(batches)
            if self._caches and isinstance(self.task, RequestModel):
                pipeline = _Prefetching(*made, self.task.prefetch)
        try:
            yield from self._progress(pipeline, batches, left)
        finally:
            if isinstance(pipeline, TrainPipelineSparseDist):
                # Sharded modules look up by themselves again.
                pipeline.detach()

    def _progress(self, pipeline: Any, batches: Iterator[Any], left: int | None) -> Iterator[Trained]:
        done = 0
        while True:
            done += 1
            updated = done % self._accumulate == 0 or done == left
            self._step.weighted.last = updated
            try:
                with cache_errors():
                    loss, rows = pipeline.progress(batches)
            except StopIteration:
                return
            yield Trained(loss, rows, updated)

    def is_finite(self) -> bool:
        """Whether all weights of all processes are finite; waits for the device. Every process must call."""
        with self._without_shards():
            weights = [parameter.detach() for parameter in self.task.parameters()]
        weights += [] if self._sharded is None else self._sharded.weights().values()
        # Tables of which rows are cached are on the host, and have what has changed there from now on.
        if isinstance(self._rows, RowUpdates):
            self._rows.write_back()
        by_device: dict[torch.device, list[Tensor]] = {}
        for weight in weights:
            if weight.numel():
                by_device.setdefault(weight.device, []).append(weight)
        norms = [torch.stack(torch._foreach_norm(of, float("inf"))) for of in by_device.values()]
        return not self.processes.any(not all(bool(torch.isfinite(of).all()) for of in norms))

    @contextmanager
    def whole_task(self, *, ends: bool = False) -> Iterator[nn.Module]:
        """The task with all rows of its tables, to be evaluated or written; every process must enter.

        On several processes that is a copy on each one's device, which lives as long as the context.

        Args:
            ends: nothing is trained any more, and the task keeps tables that were sharded.
        """
        for path, table in self._tables.items():
            self.task.set_submodule(path, table.whole())
        try:
            with nullcontext() if self._sharded is None else self._sharded.unsharded(stays=ends):
                yield self.task
        finally:
            for path, table in self._tables.items():
                self.task.set_submodule(path, table)

    def own_weights(self) -> dict[str, Tensor]:
        """Weights and buffers by the names of the whole task, of split tables this process's rows; views."""
        with self._without_shards():
            weights = {name: value.detach() for name, value in self.task.state_dict().items()}
        return weights if self._sharded is None else weights | self._sharded.weights()

    def load_own_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Take over what `own_weights` gave.

        Raises:
            RuntimeError: other names or shapes.
        """
        own = {} if self._sharded is None else self._sharded.weights()
        if missing := own.keys() - weights.keys():
            raise RuntimeError(f"Missing key(s): {', '.join(sorted(missing))}")
        with self._without_shards():
            self.task.load_state_dict({name: value for name, value in weights.items() if name not in own})
        for name, value in own.items():
            value.copy_(weights[name])

    def _without_shards(self) -> AbstractContextManager[None]:
        return nullcontext() if self._sharded is None else self._sharded.removed()

    def state_tensors(self) -> dict[str, Tensor]:
        """Weights, buffers, optimizer state and every process's random state, by name; every process must call.

        Where each process holds rows of its own, the first one gets all, on the CPU, and the others nothing.
        """
        tensors = {f"{_TASK}{name}": value.detach() for name, value in apart(self.own_weights()).items()}
        # The tables of a collection count their steps together, and a file has no tensor twice.
        states = self.optimizer.state_tensors()
        tensors.update({name: value if value.dim() else value.clone() for name, value in states.items()})
        tensors = self.collect(tensors)
        random_states = {"cpu": torch.get_rng_state()}
        if self.processes.device.type == "cuda":
            random_states["cuda"] = torch.cuda.get_rng_state(self.processes.device)
        for kind, state in random_states.items():
            for rank, one in enumerate(self.processes.gather(state)):
                tensors[f"{_RANDOM}{kind}.{rank}"] = one
        return tensors

    def collect(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Put together, on the first process's CPU, the tensors of which each process holds rows; the others get none of those.

        Every process must call, with the same names.
        """
        collected = {}
        for name, value in tensors.items():
            split = self._split_of(name, value)
            whole = value if split is None else split.collect(value)
            if whole is not None:
                collected[name] = whole
        return collected

    def own_rows(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of what `collect` put together, the rows that this process holds.

        Raises:
            CheckpointError: another number of rows.
        """
        own = {}
        for name, value in tensors.items():
            split = self._split_of(name, value)
            if split is not None and len(value) != split.num_rows:
                raise _misfit(name, len(value), split.num_rows)
            own[name] = value if split is None else value[split.block()]
        return own

    def _split_of(self, name: str, value: Tensor) -> RowSplit | None:
        # AdamW's number of steps has no rows.
        return next((split for own, split in self._splits.items() if value.dim() and f".{name}".endswith(f".{own}")), None)

    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over the weights and buffers alone.

        Raises:
            CheckpointError: names or shapes do not fit the task.
        """
        weights = {name.removeprefix(_TASK): value for name, value in self.own_rows(tensors).items() if name.startswith(_TASK)}
        for name, value in self.own_weights().items():
            if name in weights and value.shape[1:] == weights[name].shape[1:] and value.shape != weights[name].shape:
                raise _misfit(name, len(weights[name]), len(value))
        try:
            self.load_own_weights(weights)
        except RuntimeError as error:
            raise CheckpointError(f"the checkpoint's weights do not fit the task: {' '.join(str(error).split())}") from None

    def load_state_tensors(self, tensors: Mapping[str, Tensor], steps: int) -> None:
        """Take over everything that `state_tensors` gave after `steps` steps.

        The random state of a kind of device, or of a process, that the checkpoint did not have stays as it is.

        Raises:
            CheckpointError: names or shapes do not fit.
        """
        self.load_weights(tensors)
        try:
            self.optimizer.load_state_tensors(self.own_rows(tensors), steps)
        except (KeyError, ValueError) as error:
            raise CheckpointError(f"the checkpoint's optimizer state does not fit the model: {error.args[0]}") from None
        suffix = f".{self.processes.rank}"
        if self.processes.rank and f"{_RANDOM}cpu{suffix}" not in tensors:
            return
        found = {
            name.removeprefix(_RANDOM).removesuffix(suffix): value
            for name, value in tensors.items()
            if name.startswith(_RANDOM) and name.endswith(suffix)
        }
        try:
            torch.set_rng_state(found["cpu"])
            if self.processes.device.type == "cuda" and "cuda" in found:
                torch.cuda.set_rng_state(found["cuda"], self.processes.device)
        except (KeyError, RuntimeError, TypeError) as error:
            raise CheckpointError(f"the checkpoint's random state does not fit: {type(error).__name__}: {error}") from None


def _misfit(name: str, found: int, expected: int) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint does not fit the model: {name}: {found} rows, expected {expected}; train anew into another output"
    )


class _Prefetching(TrainPipelineBase):  # type: ignore[misc,type-arg]
    """A pipeline that also brings the rows of the next batch, on the stream that has copied it, while the backward pass runs."""

    def __init__(self, model: nn.Module, optimizer: Any, device: torch.device, prefetch: Callable[[Any], None]) -> None:
        super().__init__(model, optimizer, device)
        self._prefetch = prefetch

    def _copy_batch_to_gpu(self, cur_batch: Any) -> None:
        super()._copy_batch_to_gpu(cur_batch)
        with self._stream_context(self._memcpy_stream):
            batch = self._cur_batch
            self._prefetch(batch.batch if isinstance(batch, Carried) else batch)


class _Step(nn.Module):
    """What the pipeline runs: the task under autocast, its loss weighted so that processes average to the joint batch's mean."""

    def __init__(
        self,
        task: nn.Module,
        precision: str,
        processes: Processes,
        graphs: bool,
        held: HeldUpdates | None = None,
        *,
        clips: bool = False,
    ) -> None:
        super().__init__()
        self.task = task
        self.weighted = _Weighted(processes)
        self._autocast = precision == "bf16-mixed"
        self._processes = processes
        self._graphs: GraphedSteps | None = None
        if graphs and isinstance(task, NextItemTask):
            sizes = SequenceSizes(task.model.config["num_items"])
            self._graphs = GraphedSteps(
                lambda batch: (self._task(batch).loss, None), sizes, task, processes.device, held, clips=clips
            )
        elif graphs and isinstance(task, RequestModel):
            of_requests = RequestSizes(frozenset(task.inputs.list_histories))
            self._graphs = GraphedSteps(self._loss_and_rows, of_requests, task, processes.device, held, clips=clips)

    def drop_graphs(self) -> None:
        """Let go of captured steps, and of the memory that they keep."""
        self._graphs = None

    def forward(self, batch: Any) -> tuple[Tensor, tuple[Tensor, int | Tensor]]:
        # TorchRec's pipeline of sharded tables traces this.
        batch = batch.batch if isinstance(batch, Carried) else batch
        if self._graphs is not None and isinstance(self.task, NextItemTask):
            # Graphs are of sizes, and so of what is trained on.
            batch = self.task.shortened(batch)
        if self._graphs is not None and (replayed := self._graphs(batch)) is not None:
            self.weighted.count(batch)
            loss, rows = replayed
            # The gradients are there already; the pipeline's own backward ends at the loss.
            return loss.requires_grad_(), (loss.detach(), batch.targets.numel() if rows is None else rows)
        weighted: tuple[Tensor, tuple[Tensor, int | Tensor]] = self.weighted(batch, self._task(batch))
        return weighted

    def __repr__(self) -> str:
        # TorchRec's pipelines write the model down in each epoch, whoever listens, with what tables have in them.
        return f"{type(self).__name__}({type(self.task).__name__})"

    def _loss_and_rows(self, batch: Batch) -> tuple[Tensor, Tensor]:
        output = self._task(batch)
        return output.loss, output.rows()

    def _task(self, batch: Any) -> Any:
        if not self._autocast:
            return explained(self.task, batch)
        with torch.autocast(self._processes.device.type, torch.bfloat16):
            return explained(self.task, batch)


class _Weighted(nn.Module):
    """The loss as the optimizer wants it; a leaf where the step is traced."""

    def __init__(self, processes: Processes) -> None:
        super().__init__()
        self.samples = 0
        # Set where gradients are accumulated, and whether the batch that comes ends its step.
        self.optimizer: Optimizer | None = None
        self.last = True
        self._processes = processes

    def count(self, batch: Any) -> None:
        """Add up the samples of batches that tell how many they have."""
        self.samples += len(batch) if hasattr(batch, "__len__") and not isinstance(batch, (dict, tuple, list)) else 0

    def forward(self, batch: Any, output: Any) -> tuple[Tensor, tuple[Tensor, int | Tensor]]:
        self.count(batch)
        loss, rows = output.loss, output.rows()
        told = loss.detach()
        if self.optimizer is not None:
            self.optimizer.hold(rows, self.last)
            loss = loss * rows
        elif self._processes.world_size > 1:
            loss = self._share(loss, rows)
        return loss, (told, rows)

    def _share(self, loss: Tensor, rows: int | Tensor) -> Tensor:
        # The gradient is averaged over processes, but each one's loss is a mean over its own number of rows.
        total = number_on(loss.device, rows, torch.float32)
        count = total.clone()
        dist.all_reduce(total)
        return loss * (count * self._processes.world_size / total.clamp(min=1e-30))


class _Replicated(DefaultDataParallelWrapper):  # type: ignore[misc]
    """DistributedDataParallel for several processes; for one, nothing, because its hooks cost time in every step."""

    def wrap(self, dmp: Any, env: Any, device: torch.device) -> None:
        """Wrap the unsharded part of `dmp`."""
        if env.world_size > 1:
            with warnings.catch_warnings():
                # torchrec passes an argument that torch 2.13 renames; a buffer's synchronisation is not wanted under either name.
                warnings.filterwarnings("ignore", message=".*broadcast_buffers.*", category=FutureWarning)
                super().wrap(dmp, env, device)
