"""`Trainer`: trains any `RankingTask`, keeps its best weights, and leaves a directory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from jagged import artifacts
from jagged.artifacts import CheckpointError
from jagged.config import RunOptions, TrainerConfig
from jagged.metrics import Figures, RunMetrics
from jagged.models import NextItemTask, RankingTask
from jagged.models.pretrained import save_task
from jagged.training.batches import Dealt, Positioned, positioned
from jagged.training.callbacks import Callback, load_states
from jagged.training.checkpoint import latest_checkpoint, load_checkpoint
from jagged.training.display import Display
from jagged.training.engine import Engine
from jagged.training.errors import TrainingError
from jagged.training.loop import BEST, CHECKPOINTS, Loop
from jagged.training.memory import release_large_blocks
from jagged.training.processes import Processes, process_group, resolve_device
from jagged.training.state import TrainState
from jagged.training.stop import stop_wish
from jagged.training.table_updates import keep_on_host

Config = TypeVar("Config", bound=RunOptions)
# Writes what a finished run leaves: the task with its best weights, its figures and its history.
Writer = Callable[[nn.Module, RunMetrics, list[dict[str, Any]]], None]


@dataclass(frozen=True)
class TrainResult:
    """What a run leaves.

    Attributes:
        directory: the run's directory.
        metrics: what `metrics.json` holds: `metrics.test.all_items["ndcg@10"]`, `metrics.valid.click["auc"]`. Empty after a dry
            run; without test data `metrics.test` is.
        history: a row for each validation: `epoch, step, loss, monitored, learning_rate, gradient_norm, seconds,
            tokens_per_second`, and `valid` with all figures, NaN where one is not defined.
        best_metric: the monitored validation metric of the weights that were kept; NaN after a dry run.
        epochs, steps: trained in all, earlier attempts included.
        seconds: of training and validation, earlier attempts included.
        stopped: why a callback ended the training; empty where none did.
        forecast: what was forecast, where something was.
    """

    directory: Path
    metrics: RunMetrics
    history: list[dict[str, Any]]
    best_metric: float
    epochs: int
    steps: int
    seconds: float
    stopped: str = ""
    forecast: Any = field(default=None, repr=False)


class Trainer:
    """Trains a task: yours or ours, in one process or under torchrun, on the CPU or on GPUs.

    On the CPU the same seed gives the same weights bit for bit, also when the run was killed and resumed, in the middle of an
    epoch too.

    Args:
        task: a `jagged.models.RankingTask`, for example a `jagged.models.Task` of your own. On several processes each one must
            have the same weights: make it after `torch.manual_seed`.
        config: how to train, and where to.
        callbacks: called while the run goes.

    Example:
        >>> from jagged.models import Task, TaskOutput, TaskScores
        >>> class Clicks(Task):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.linear = nn.Linear(3, 1)
        ...     def forward(self, batch):
        ...         logits, labels = self.linear(batch).squeeze(1), (batch[:, 0] > 0).float()
        ...         loss = nn.functional.binary_cross_entropy_with_logits(logits, labels)
        ...         return TaskOutput(loss, {"click": TaskScores(logits, labels)})
        >>> batches = [torch.randn(8, 3) for _ in range(4)]
        >>> trainer = Trainer(Clicks(), TrainerConfig(output="runs/clicks", max_epochs=2, device="cpu"))
        >>> sorted(trainer.fit(batches, batches, progress=False).metrics.valid)
        ['all', 'click']
    """

    def __init__(self, task: RankingTask, config: TrainerConfig, *, callbacks: Sequence[Callback] = ()) -> None:
        if not isinstance(task, nn.Module) or not isinstance(task, RankingTask):
            missing = [name for name in ("kept", "predict", "evaluate") if not hasattr(task, name)]
            raise TypeError(
                f"task: got a {type(task).__name__} {'without ' + ', '.join(missing) if missing else 'that is no nn.Module'}, "
                "expected a RankingTask; derive it from jagged.models.Task, which has all but forward"
            )
        self.task, self.config, self.callbacks = task, config, tuple(callbacks)

    def fit(
        self,
        train: Any,
        valid: Any,
        test: Any = None,
        *,
        resume: bool = False,
        progress: bool = True,
        fingerprint: str = "",
        write: Writer | None = None,
    ) -> TrainResult:
        """Train, keep the best weights by the monitored validation metric, test them, and leave a directory.

        SIGTERM and SIGINT end the run after the present step, with a checkpoint.

        Args:
            train, valid, test: batches: a `DataLoader`, a list, or anything else that can be iterated again and has a length; or
                a loader with places, `jagged.data.BatchLoader`. On several processes each one's own share, as many batches of
                `train` in each; the same ones in two processes are refused. Without `test` there are no test figures.
            resume: go on from the newest checkpoint in `config.output`; without one, start. With another number of processes
                loaders of `jagged.data` deal out anew what an epoch has left; other batches go on between two epochs.
            progress: show a progress bar and messages.
            fingerprint: of the data; a run does not go on with other data.
            write: writes the finished run in place of `jagged.models.save_task`; called in the first process.

        Raises:
            TypeError: batches of another kind.
            TrainingError: the run cannot start or go on: an output that holds another run, a loss that is NaN, options that do
                not fit the checkpoint. `TrainingInterrupted` after a signal.
            CheckpointError: a checkpoint is damaged or cannot be written.
        """
        config = resolved(self.config)
        with process_group(resolve_device(config.device)) as processes, locked(Path(config.output), processes, resume):
            loaders = train, valid, test
            return self.run(processes, config, loaders, resume, progress, fingerprint=fingerprint, write=write)

    def run(
        self,
        processes: Processes,
        config: TrainerConfig,
        loaders: tuple[Any, Any, Any],
        resume: bool,
        progress: bool,
        *,
        fingerprint: str = "",
        write: Writer | None = None,
        valid_note: str = "",
        options: Mapping[str, Any] | None = None,
    ) -> TrainResult:
        """`fit` inside of a process group and of the output's lock, with a resolved configuration.

        `options` are all that a checkpoint must agree in, where there are more than those of `config`.
        """
        directory, device = Path(config.output), processes.device
        if config.release_memory and device.type == "cpu" and not release_large_blocks():
            raise TrainingError("release_memory: got another malloc than glibc's, which alone can be told; leave the option out")
        named = zip(("train", "valid", "test"), loaders, strict=True)
        parts = {name: positioned(loader, name, config.seed) for name, loader in named if loader is not None or name != "test"}
        with ExitStack() as closing:
            wish = closing.enter_context(stop_wish())
            for loader in parts.values():
                if hasattr(loader, "close"):
                    closing.callback(loader.close)
            check_shares(parts["train"], processes)
            total_steps = config.max_epochs * -(-parts["train"].num_batches(0) // config.accumulate)
            fresh = TrainState(dict(options or config.model_dump()), fingerprint, processes.world_size, total_steps)
            path = latest_checkpoint(directory / CHECKPOINTS) if resume else None
            state, tensors = (fresh, {}) if path is None else _kept(path, fresh, config, parts["train"], self.task, processes)
            keep_on_host(self.task, config, processes.world_size)  # type: ignore[arg-type]
            self.task.to(device)  # type: ignore[attr-defined]
            engine = Engine(self.task, config, config.precision, processes, state.total_steps)  # type: ignore[arg-type]
            closing.callback(engine.close)
            # Dropout differs between processes; what they share was drawn before.
            torch.manual_seed(config.seed + processes.rank)
            best = {} if path is None else _load(engine, state, tensors, self.callbacks, path)
            tensors.clear()
            curves = directory / "tensorboard" if config.tensorboard and processes.is_first else None
            with Display(device, curves, state.step, progress and processes.is_first) as display:
                if state.step:
                    display.say(f"resumed after step {state.step:,} from {directory / CHECKPOINTS}")
                pair = parts["train"], parts["valid"]
                loop = Loop(config, engine, pair, state, wish, display, self.callbacks, best, valid_note)
                loop.fit()
                metrics = loop.test(parts.get("test"))
            with engine.whole_task(ends=True) as whole:
                if processes.is_first:
                    if write is None:
                        save_task(whole, directory, config=config, metrics=metrics.to_json(), history=state.history)
                    else:
                        write(whole, metrics, state.history)
            assert metrics.best is not None
            kept = metrics.best.value
            # The state has them as JSON has: null for what is not defined.
            history = [
                {**row, "valid": {group: dict(of) for group, of in Figures(row["valid"]).items()}} for row in state.history
            ]
            return TrainResult(directory, metrics, history, kept, state.epoch, state.step, state.seconds, stopped=state.stopped)


def resolved(config: Config) -> Config:
    """The configuration with the device and the precision that `auto` means here.

    Raises:
        TrainingError: a GPU that is not there.
    """
    device = resolve_device(config.device)
    precision = config.precision
    if precision == "auto":
        precision = "bf16-mixed" if device.type == "cuda" else "32-true"
    return config.model_copy(update={"precision": precision, "device": device.type})


def check_shares(loader: Positioned, processes: Processes) -> None:
    """Refuse an empty loader, and processes with different numbers of batches, which would wait for one another for ever.

    Raises:
        TrainingError: the numbers.
    """
    numbers = [int(number) for number in processes.gather(torch.tensor([loader.num_batches(0)]))]
    if len(set(numbers)) > 1 or not numbers[0]:
        told = ", ".join(f"{number:,}" for number in numbers)
        raise TrainingError(
            f"train: got {told} batches in the {len(numbers)} processes, expected the same number in each, 1 or more"
        )


def _kept(
    path: Path, fresh: TrainState, config: TrainerConfig, train: Positioned, task: Any, processes: Processes
) -> tuple[TrainState, dict[str, torch.Tensor]]:
    """Where the run of a checkpoint stands, for these processes, and the tensors."""
    tensors, content = load_checkpoint(path)
    state = TrainState.from_json(content, path)
    state.check_resumable(fresh, path)
    if state.world_size != processes.world_size:
        _deal_anew(state, fresh, config, train, task, path)
        # Only the sums over processes are looked at.
        total = [sum(column) for column in zip(*state.sums, strict=True)]
        state.sums = [total if rank == 0 else [0.0, 0.0] for rank in range(processes.world_size)]
    state.config, state.world_size = fresh.config, fresh.world_size
    if state.sums:
        state.loss_sum, state.tokens = state.sums[processes.rank]
    return state, tensors


def _deal_anew(state: TrainState, fresh: TrainState, config: TrainerConfig, train: Positioned, task: Any, path: Path) -> None:
    """Let what is left of a run be that of another number of processes: the samples, and the steps for them.

    Raises:
        TrainingError: it stands in the middle of an epoch, and the loader does not know what is left of that, or a process would
            have a batch of nothing.
    """
    if state.samples is None or (state.samples and not isinstance(train, Dealt)):
        raise TrainingError(
            f"{path}: was trained by {state.world_size} processes, now {fresh.world_size}, and stands in epoch "
            f"{state.epoch + 1}; what is left of an epoch is known to loaders of jagged.data, not to a DataLoader or a list; "
            "start as many, or choose another output"
        )
    state.batch, state.seen = 0, state.samples
    seen = (state.seen,) if state.seen else ()
    whole = fresh.total_steps // config.max_epochs
    batches = train.num_batches(state.epoch, *seen)
    # The task whose item table is split takes batches of nothing; embeddings of TorchRec and means of losses do not.
    if isinstance(train, Dealt) and not isinstance(task, NextItemTask):
        samples = train.samples_before(state.epoch, batches, state.seen) - state.seen
        if samples < batches * fresh.world_size:
            raise TrainingError(
                f"{path}: epoch {state.epoch + 1} has {samples} samples left, too few for a batch in each of {fresh.world_size} "
                "processes; start fewer"
            )
    left = -(-batches // config.accumulate) + (config.max_epochs - state.epoch - 1) * whole
    # Steps behind the warm-up count as many as there are now for the same samples: so the rate does not jump, and ends at 0.
    at, warm_up = state.step + state.ahead, config.warmup_steps
    if at > warm_up and (were_left := state.total_steps - at) > 0:
        at = warm_up + round((at - warm_up) * left / were_left)
    state.total_steps, state.ahead = at + left, at - state.step


def _load(
    engine: Engine, state: TrainState, tensors: dict[str, torch.Tensor], callbacks: Sequence[Callback], path: Path
) -> dict[str, torch.Tensor]:
    """Give a checkpoint's tensors to those they are of; returns the best weights."""
    engine.load_state_tensors(tensors, state.step + state.ahead)
    load_states(callbacks, state.callbacks, path)
    best = engine.own_rows({name: value for name, value in tensors.items() if name.startswith(BEST)})
    # Where the weights are: tables of which rows are cached are on the host.
    devices = {name: weight.device for name, weight in engine.own_weights().items()}
    named = ((name.removeprefix(BEST), value) for name, value in best.items())
    return {name: value.to(devices.get(name, engine.processes.device)) for name, value in named}


@contextmanager
def locked(directory: Path, processes: Processes, resume: bool) -> Iterator[None]:
    """Lock a run's directory, and only then look at what is in it.

    A second run is refused while the first one goes, and where it has ended too. The lock ends with the process, however that
    ends; workers do not inherit it.

    Raises:
        TrainingError: another process trains there, or something is there and the run does not go on with it.
        CheckpointError: it cannot be made.
    """
    with ExitStack() as held:
        processes.in_first(lambda: _take(directory, resume, held))
        yield


def _take(directory: Path, resume: bool, held: ExitStack) -> None:
    """Lock a directory until `held` is left, check what is in it, and remove what killed processes left."""
    if directory.exists() and not directory.is_dir():
        raise TrainingError(f"output: {directory} is a file, expected a directory")
    busy = TrainingError(f"output: another process is training in {directory}; wait for it or choose another output")
    with artifacts.writing(directory, "choose another output", CheckpointError):
        held.enter_context(artifacts.lock(directory, busy))
    if not resume and any(entry.name != artifacts.LOCK for entry in directory.iterdir()):
        raise TrainingError(
            f"output: {directory} is not empty; resume to go on with the run in it, choose another output, or delete it"
        )
    artifacts.sweep(directory)
