"""The training loop: steps, validation, early stopping, callbacks, checkpoints."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from jagged import artifacts
from jagged.config import TrainerConfig
from jagged.metrics import (
    WITHHELD,
    WITHHELD_BECAUSE,
    Best,
    Figures,
    RunMetrics,
    in_words,
    is_sampled_group,
    is_slice_group,
    is_undefined,
)
from jagged.models import Task
from jagged.models.pretrained import HISTORY
from jagged.training.batches import Dealt, Positioned, Repeated
from jagged.training.callbacks import Callback, Progress, states_of
from jagged.training.checkpoint import list_checkpoints, next_name, prune, save_checkpoint
from jagged.training.display import Display
from jagged.training.engine import Engine, Trained
from jagged.training.errors import CheckpointError, TrainingError, TrainingInterrupted
from jagged.training.shares import Shares
from jagged.training.state import TrainState
from jagged.training.stop import StopRequested, StopWish
from jagged.training.table_updates import cache_errors
from jagged.training.watch import Watch

CHECKPOINTS = "checkpoints"
# Prefix of the best weights' names in a checkpoint.
BEST = "best."
_KEPT = 2

# Steps between two looks at the losses. Each look waits for the device; a loss that is NaN is found this many steps late.
_INTERVAL = {"cpu": 10, "cuda": 50}
# Several processes agree about signals at each look where looks are less than this many seconds apart, else at each step.
# torchrun kills what has not ended 30 s after SIGTERM, and the checkpoint takes time as well.
_AGREE_SECONDS = 5.0


class Loop:
    """Trains an engine to its end from wherever its state stands.

    Args:
        config: resolved.
        engine: task and optimizer.
        loaders: of training and validation.
        state: where the run stands; changed as it goes.
        wish: whether the run was asked to stop.
        display: progress bar and curves.
        callbacks: the user's, with their states.
        best: the task's weights at the best validation so far, by name, this process's rows where they are split; empty where
            there was none.
        valid_note: what a reader of a validation's figures should know.
    """

    def __init__(
        self,
        config: TrainerConfig,
        engine: Engine,
        loaders: tuple[Positioned, Positioned],
        state: TrainState,
        wish: StopWish,
        display: Display,
        callbacks: Sequence[Callback],
        best: dict[str, Tensor],
        valid_note: str = "",
    ) -> None:
        self.config, self.engine, self.state = config, engine, state
        self._wish, self._display, self._callbacks = wish, display, callbacks
        self._train, self._valid = loaders
        self._processes = engine.processes
        self._directory = Path(config.output)
        self._root = self._directory / CHECKPOINTS
        self._interval = _INTERVAL[self._processes.device.type]
        self._best = best
        self._valid_note = valid_note
        self._progress = Progress(engine.task, state, engine.optimizer)  # type: ignore[arg-type]
        self._watch = Watch(self._processes, config.hang_seconds, self._last_checkpoint)
        self._shares = {part: Shares(self._processes, part) for part in ("train", "valid", "test")}
        for loader in loaders:
            if isinstance(loader, Repeated):
                loader.passed = self._watch.beat
        self._trained: list[Trained] = []
        self._clock = self._saved_at = time.perf_counter()
        self._seen = (0, 0.0)
        # How long the batches between two looks take, and whether that is long in any process; yes, until it is known.
        self._took, self._slow = 0.0, True

    def fit(self) -> None:
        """Train until the last epoch, until validation stops getting better, or until a callback ends it.

        Raises:
            TrainingError: loss, gradient or weights are not finite, or the monitored metric is not there.
            TrainingInterrupted: a signal came; a checkpoint was written.
            CheckpointError: a checkpoint could not be written.
        """
        if self._processes.is_first:
            artifacts.sweep(self._root)
            # A killed run may have left it a row short of its last checkpoint, or some rows ahead.
            self._write_history()
        with self._watch, self._explained():
            self._tell("on_start")
            try:
                while not self._finished:
                    self._train_epoch()
                if self.state.validated_step != self.state.step:
                    self._validate()
                    self._keep()
            except StopRequested:
                self._checkpoint()
                self._tell("on_stop")
                raise self._interrupted(
                    f"after step {self.state.step:,}; a checkpoint is in {self._root}: resume to go on"
                ) from None
            self._tell("on_stop")

    def test(self, test: Positioned | None) -> RunMetrics:
        """Load the best weights and evaluate them on the test part, where there is one."""
        state, figures = self.state, Figures({})
        self.engine.load_own_weights(self._best)
        if test is not None:
            try:
                with self._watch, self._explained():
                    figures = self._evaluate(test, "test")
            except StopRequested:
                raise self._interrupted("before the test; resume to test and finish") from None
        chosen = state.history[state.best_validation - 1]
        valid = Figures(chosen["valid"])
        group = monitored(valid, self.config.monitor)[0]
        best = Best(chosen["epoch"], chosen["step"], chosen["monitored"], group)
        return RunMetrics(self.config.monitor, best, valid, figures)

    @property
    def _finished(self) -> bool:
        state = self.state
        return state.epoch >= self.config.max_epochs or state.worse >= self.config.patience or bool(state.stopped)

    def _train_epoch(self) -> None:
        state, config = self.state, self.config
        if state.to_validate:
            self._validate()
            self._keep()
        # A loader that deals nothing out anew is not asked to.
        seen = (state.seen,) if state.seen else ()
        batches = self._train.num_batches(state.epoch, *seen)
        if state.batch < batches and not self._finished:
            self._train.set_position(state.epoch, state.batch, *seen)
            self._display.begin_epoch(f"epoch {state.epoch + 1}/{config.max_epochs}", batches, state.batch)
            self._clock, self._seen = time.perf_counter(), (self.engine.samples, state.tokens)
            given = self._shares["train"].seen(iter(self._train))
            for trained in self.engine.steps(given, batches - state.batch):
                self._step(trained, batches)
                if self._finished:
                    break
            self._look()
        # A run that ends with an epoch's last step has had the epoch, resumed or not.
        if state.batch >= batches:
            self._end_epoch()

    def _step(self, trained: Trained, batches: int) -> None:
        """Keep the books for a batch, and do what comes after an update."""
        state, alone = self.state, self._processes.world_size == 1
        self._trained.append(trained)
        state.batch += 1
        due = state.batch % self._interval == 0 or state.batch == batches
        self._watch.beat()
        self._shares["train"].step(batches)
        if not trained.updated:
            return
        state.step += 1
        self._tell("on_step")
        if due or len(self._trained) >= self._interval:
            due = True
            self._look()
        every, validation_steps = self.config.checkpoint_every, self.config.validation_steps
        save = every is not None and state.step % every == 0 and state.batch < batches
        if alone or due or save:
            self._ask_callbacks()
        state.to_validate = validation_steps is not None and state.step % validation_steps == 0
        if (alone or due or self._slow) and self._processes.any(self._wish.signal is not None):
            raise StopRequested
        if due and not alone:
            self._slow = self._processes.any(self._took > _AGREE_SECONDS)
        if state.to_validate:
            self._look()
            self._validate()
            if state.batch < batches:
                self._keep()
                self._clock, self._seen = time.perf_counter(), (self.engine.samples, state.tokens)
        if save and not self._finished:
            self._checkpoint()

    def _end_epoch(self) -> None:
        state, config = self.state, self.config
        last = state.epoch + 1 >= config.max_epochs
        if not state.epoch_told:
            self._tell("on_epoch")
            state.epoch_told = True
            self._ask_callbacks()
            by_epochs = config.validation_steps is None and (state.epoch + 1) % config.validation_epochs == 0
            state.to_validate = state.validated_step != state.step and (by_epochs or last or self._finished)
        validated = state.to_validate
        if validated:
            self._validate()
        state.epoch, state.batch, state.seen, state.epoch_told = state.epoch + 1, 0, 0, False
        if validated or self._finished:
            self._keep()

    def _look(self) -> None:
        """Read the losses since the last look, which waits for the device, and show them."""
        state, engine = self.state, self.engine
        if not self._trained:
            return
        norms = engine.optimizer.norms
        read = [of.loss.float() for of in self._trained] + norms
        read += [of.rows for of in self._trained if isinstance(of.rows, Tensor)]
        values = torch.stack([value.double() for value in read]).tolist()
        losses, norm_values = values[: len(self._trained)], values[len(self._trained) : len(self._trained) + len(norms)]
        on_device = iter(values[len(self._trained) + len(norms) :])
        counts = [next(on_device) if isinstance(of.rows, Tensor) else of.rows for of in self._trained]
        first = state.step - sum(of.updated for of in self._trained) + 1
        steps = [first + sum(of.updated for of in self._trained[:i]) for i in range(len(self._trained))]
        bad = [step for step, value in zip(steps, losses, strict=True) if not math.isfinite(value)]
        bad_norms = [first + i for i, value in enumerate(norm_values) if not math.isfinite(value)]
        if self._processes.any(bool(bad or bad_norms)):
            self._not_finite("the loss" if bad else "the gradient", min(bad or bad_norms or [state.step]))
        # One by one: the sum must not depend on when it was looked at.
        for value, count in zip(losses, counts, strict=True):
            state.loss_sum += value * count
            state.tokens += count
        now = time.perf_counter()
        elapsed = max(now - self._clock, 1e-9)
        state.epoch_seconds += elapsed
        self._took = elapsed / len(losses) * self._interval
        samples, tokens = engine.samples - self._seen[0], state.tokens - self._seen[1]
        self._clock, self._seen = now, (engine.samples, state.tokens)
        mean = sum(losses) / len(losses)
        state.gradient_norm = norm_values[-1] if norm_values else state.gradient_norm
        self._display.advance(len(losses), mean, samples / elapsed, tokens / elapsed)
        points = {
            "train/loss": mean,
            "train/learning_rate": engine.optimizer.learning_rate,
            "train/tokens_per_second": tokens / elapsed,
        }
        if norm_values:
            points["train/gradient_norm"] = norm_values[-1]
        self._display.curves(state.step, points)
        self._trained.clear()
        norms.clear()

    def _evaluate(self, loader: Positioned, part: str) -> Figures:
        self._display.end_epoch()
        if not self.engine.is_finite():
            self._not_finite("a weight", self.state.step)
        loader.set_position(0, 0)
        with self.engine.whole_task() as task, cache_errors():
            # One process must not leave the others waiting in a collective.
            wish = self._wish if self._processes.world_size == 1 else None
            figures: Figures = task.evaluate(  # type: ignore[operator]
                _Watched(loader, self._watch, self._shares[part], wish), part, progress=self._display.shown
            )
        self._watch.beat()
        # An evaluate of another make may not add up over processes.
        if isinstance(self.engine.task, Task) and type(self.engine.task).evaluate is Task.evaluate:
            try:
                self._shares[part].compare()
            except TrainingError as error:
                if part == "valid":
                    self._checkpoint()
                raise TrainingError(f"{error}; {self._last_checkpoint()}") from None
        return figures

    def _validate(self) -> None:
        """Evaluate, write the row of the history, keep the best weights."""
        state, config = self.state, self.config
        figures = self._evaluate(self._valid, "valid")
        try:
            group, value = monitored(figures, config.monitor)
        except TrainingError as error:
            self._checkpoint()
            raise TrainingError(f"{error}; {self._last_checkpoint()} with another monitor") from None
        loss_sum, tokens = self._processes.sum([state.loss_sum, float(state.tokens)])
        loss = loss_sum / max(tokens, 1.0)
        begun = state.epoch + (state.batch + state.seen > 0)
        row = {
            "epoch": begun,
            "step": state.step,
            "loss": loss,
            "monitored": value,
            "learning_rate": self.engine.optimizer.learning_rate,
            "gradient_norm": state.gradient_norm,
            "seconds": state.epoch_seconds,
            "tokens_per_second": tokens / max(state.epoch_seconds, 1e-9),
            "valid": figures.to_json(),
        }
        state.history.append(row)
        state.seconds += state.epoch_seconds
        state.loss_sum, state.tokens, state.epoch_seconds = 0.0, 0, 0.0
        state.to_validate, state.validated_step = False, state.step
        better = state.best is None or (value < state.best if config.less_is_better else value > state.best)
        if better:
            state.best, state.best_validation, state.worse = value, len(state.history), 0
            self._best = {key: tensor.clone() for key, tensor in self.engine.own_weights().items()}
        else:
            state.worse += 1
        when = f"epoch {begun}" if config.validation_steps is None else f"step {state.step:,}"
        said = f"{when}: loss {loss:.4f}, validation {config.monitor} {value:.4f} ({in_words(group)}{self._valid_note})"
        if len(state.history) == 1 and any(map(is_sampled_group, figures)):
            self._display.say(WITHHELD_BECAUSE)
        self._display.say(said + (", the best so far" if better else ""))
        points = {
            f"valid/{group}/{key}": number
            for group, of in figures.items()
            for key, number in of.items()
            if not is_undefined(number)
        }
        self._display.curves(state.step, {"train/epoch_loss": loss, **points})
        for callback in self._callbacks:
            callback.on_validation(self._progress, figures)
        self._ask_callbacks()

    def _keep(self) -> None:
        """After a validation: a checkpoint, unless there was one a moment ago, and the history."""
        waited = time.perf_counter() - self._saved_at >= self.config.checkpoint_seconds
        if self._finished or self._processes.any(waited):
            self._checkpoint()
        if self._processes.is_first:
            self._write_history()

    def _write_history(self) -> None:
        with artifacts.writing(self._directory / HISTORY, "make room and resume", CheckpointError):
            # A finished model stays whole while its run goes on; the last history is listed with the next one.
            artifacts.unlist(self._directory, HISTORY)
            artifacts.write_file(self._directory / HISTORY, artifacts.dump_json_lines(self.state.history))

    def _checkpoint(self) -> None:
        self._look()
        if not self.engine.is_finite():
            self._not_finite("a weight", self.state.step)
        state, train = self.state, self._train
        if isinstance(train, Dealt):
            state.samples = train.samples_before(state.epoch, state.batch, state.seen)
        else:
            state.samples = None if state.batch else 0
        state.callbacks = states_of(self._callbacks)
        own = torch.tensor([state.loss_sum, state.tokens], dtype=torch.float64)
        state.sums = [sums.tolist() for sums in self._processes.gather(own)]
        name = next_name(self._root, self.state.step)
        best = self.engine.collect({f"{BEST}{name}": value for name, value in self._best.items()})
        tensors = self.engine.state_tensors() | best
        failure: CheckpointError | None = None
        if self._processes.is_first:
            try:
                with self._watch.patient():
                    save_checkpoint(self._root, name, tensors, self.state.to_json())
            except CheckpointError as error:
                failure = error
        if self._processes.any(failure is not None):
            raise failure or CheckpointError(f"{self._root / name}: the first process could not write it")
        if self._processes.is_first:
            prune(self._root, _KEPT)
        self._clock = self._saved_at = time.perf_counter()

    def _tell(self, method: str) -> None:
        for callback in self._callbacks:
            getattr(callback, method)(self._progress)

    def _ask_callbacks(self) -> None:
        """Whether a callback of any process wants to end the training."""
        if self._callbacks and self._processes.any(self._progress.reason is not None):
            self.state.stopped = next(reason for reason in self._processes.all(self._progress.reason) if reason is not None)

    def _interrupted(self, when: str) -> TrainingInterrupted:
        number = self._wish.signal or signal.SIGTERM
        return TrainingInterrupted(f"stopped by {signal.Signals(number).name} {when}", number)

    def _last_checkpoint(self) -> str:
        checkpoints = list_checkpoints(self._root)
        return f"the last checkpoint, {checkpoints[-1]}, is whole: resume" if checkpoints else "there is none yet: start again"

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Tell a process that is gone from a fault of the program."""
        try:
            yield
        except RuntimeError as error:
            gone = isinstance(error, dist.DistError) or "gloo" in str(error).lower()
            if self._processes.world_size == 1 or isinstance(error, TrainingError) or not gone:
                raise
            reason = str(error).strip().splitlines()[0][:200]
            raise TrainingError(
                f"another process of the run ended or cannot be reached, after step {self.state.step:,}: {reason}; "
                f"{self._last_checkpoint()}"
            ) from error

    def _not_finite(self, what: str, step: int) -> NoReturn:
        checkpoints = list_checkpoints(self._root)
        last = f"the last checkpoint, {checkpoints[-1]}, is whole" if checkpoints else "there is no checkpoint yet"
        raise TrainingError(
            f"{what} is NaN or infinite at step {step:,}, epoch {self.state.epoch + 1}; {last}. Start again with a lower "
            f"learning_rate (now {self.config.learning_rate:g}), gradient_clip_norm or precision=32-true"
        )


class _Watched:
    """A loader whose batches tell the watch that the run goes on, and that stops at the wish to."""

    def __init__(self, loader: Any, watch: Watch, shares: Shares, wish: StopWish | None) -> None:
        self._loader, self._watch, self._shares, self._wish = loader, watch, shares, wish

    def __iter__(self) -> Iterator[Any]:
        batches = self._beating()
        return batches if self._wish is None else self._wish.watched(batches)

    def _beating(self) -> Iterator[Any]:
        for batch in self._shares.seen(self._loader):
            yield batch
            self._watch.beat()

    def __len__(self) -> int:
        return int(self._loader.num_batches(0))


def monitored(figures: Figures, name: str) -> tuple[str, float]:
    """Group and value of a figure by its name, `group/metric`, or `metric` where one group alone has it.

    Figures of slices have to be asked for by group: `click[device=3]/auc`.

    Raises:
        TrainingError: none, or several; or it is NaN, which no other value is better than.
    """
    found = {f"{group}/{key}": (group, value) for group, of in figures.items() for key, value in of.items()}
    short = [key for key, (group, _) in found.items() if not is_slice_group(group)]
    fitting = [name] if name in found else [key for key in short if name == key.partition("/")[2]]
    if len(fitting) == 1:
        group, value = found[fitting[0]]
        if is_undefined(value):
            raise TrainingError(
                f"monitor: {fitting[0]} is not defined for the validation part, as an AUC is not where all labels are alike; "
                "give a part for which it is"
            )
        return group, value
    expected = ", ".join(fitting or short)
    withheld = name.rpartition("/")[2] in WITHHELD and any(map(is_sampled_group, figures))
    why = f"; {WITHHELD_BECAUSE}" if withheld else ""
    raise TrainingError(f"monitor: got {name!r}, expected one of {expected}{why}")
