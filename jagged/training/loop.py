"""The training loop: steps, validation, early stopping, checkpoints."""

from __future__ import annotations

import math
import signal
import time
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from jagged import artifacts
from jagged.config import TrainConfig
from jagged.data import BatchLoader, SequenceSplit
from jagged.evaluation import PROTOCOLS, evaluate_protocols
from jagged.metrics import TrainCounts
from jagged.models.pretrained import HISTORY
from jagged.training.checkpoint import clean, list_checkpoints, next_name, prune, save_checkpoint
from jagged.training.display import Display
from jagged.training.engine import Engine
from jagged.training.errors import CheckpointError, TrainingError, TrainingInterrupted
from jagged.training.state import TrainState
from jagged.training.stop import StopRequested, StopWish

CHECKPOINTS = "checkpoints"
# Prefix of the best weights' names in a checkpoint.
BEST = "best."
_KEPT = 2

# Steps between two looks at the losses. Each look waits for the device; a loss that is NaN is found this many steps late.
_INTERVAL = {"cpu": 10, "cuda": 50}


class Loop:
    """Trains an engine to its end from wherever its state stands.

    Args:
        config: resolved.
        split: what is trained, validated and tested on.
        engine: model and optimizer.
        loaders: of training, validation and test.
        state: where the run stands; changed as it goes.
        wish: whether the run was asked to stop.
        display: progress bar and curves.
        train_counts: training users of each item.
        best: the model's weights at the best validation so far, by name, this process's rows where they are split; empty where
            there was none.
    """

    def __init__(
        self,
        config: TrainConfig,
        split: SequenceSplit,
        engine: Engine,
        loaders: tuple[BatchLoader, BatchLoader, BatchLoader],
        state: TrainState,
        wish: StopWish,
        display: Display,
        train_counts: TrainCounts,
        best: dict[str, Tensor],
    ) -> None:
        self.config, self.engine, self.state = config, engine, state
        self._split, self._wish, self._display = split, wish, display
        self._train, self._valid, self._test = loaders
        self._processes = engine.processes
        self._directory = Path(config.output)
        self._root = self._directory / CHECKPOINTS
        self._interval = _INTERVAL[self._processes.device.type]
        self.train_counts = train_counts
        self._best = best
        self._losses: list[tuple[Tensor, int]] = []
        self._clock = self._saved_at = time.perf_counter()
        self._seen = (0, 0)

    def fit(self) -> None:
        """Train until the last epoch or until validation stops getting better.

        Raises:
            TrainingError: loss, gradient or weights are not finite.
            TrainingInterrupted: a signal came; a checkpoint was written.
            CheckpointError: a checkpoint could not be written.
        """
        if self._processes.is_first:
            clean(self._root)
            # A killed run may have left it a row short of its last checkpoint, or some rows ahead.
            self._write_history()
        try:
            while not self._finished:
                self._train_epoch()
                figures = self._validate()
                self._finish_epoch(figures)
        except StopRequested:
            self._interrupted()

    def test(self) -> dict[str, Any]:
        """Load the best weights and rank the test part with seen items left in and taken out.

        Returns:
            The content of `metrics.json`.
        """
        state = self.state
        self.engine.model.load_state_dict(self._best)
        try:
            test = self._evaluate(self._test, (False, True))
        except StopRequested:
            number = self._wish.signal or signal.SIGTERM
            raise TrainingInterrupted(
                f"stopped by {signal.Signals(number).name} before the test; resume to test and finish", number
            ) from None
        monitor = self.config.monitor
        return {
            "monitor": monitor,
            "best": {"epoch": state.best_epoch, "value": state.best, "protocol": self._protocol},
            "valid": {self._protocol: _figures(state.history[state.best_epoch - 1])},
            "test": test,
        }

    @property
    def _finished(self) -> bool:
        return self.state.epoch >= self.config.max_epochs or self.state.worse_epochs >= self.config.patience

    @property
    def _protocol(self) -> str:
        return PROTOCOLS[self.config.filter_viewed]

    def _train_epoch(self) -> None:
        state = self.state
        batches = self._train.num_batches(state.epoch)
        if state.batch >= batches:
            return
        self._train.set_position(state.epoch, state.batch)
        self._display.begin_epoch(f"epoch {state.epoch + 1}/{self.config.max_epochs}", batches, state.batch)
        self._clock, self._seen = time.perf_counter(), (self.engine.samples, state.tokens)
        every, alone = self.config.checkpoint_every, self._processes.world_size == 1
        for loss, count in self.engine.steps(iter(self._train)):
            self._losses.append((loss, count))
            state.step += 1
            state.batch += 1
            due = state.batch % self._interval == 0
            if due:
                self._look()
            if (alone and self._wish.signal is not None) or (
                due and not alone and self._processes.any(self._wish.signal is not None)
            ):
                raise StopRequested
            if every is not None and state.step % every == 0 and state.batch < batches:
                self._checkpoint()
        self._look()

    def _look(self) -> None:
        """Read the losses since the last look, which waits for the device, and show them."""
        state, engine = self.state, self.engine
        if not self._losses:
            return
        norms = engine.optimizer.norms
        values = torch.stack([loss.float() for loss, _ in self._losses] + norms).tolist()
        losses, norm_values = values[: len(self._losses)], values[len(self._losses) :]
        first = state.step - len(losses) + 1
        bad = [first + i for i, value in enumerate(losses) if not math.isfinite(value)]
        bad_norms = [first + i for i, value in enumerate(norm_values) if not math.isfinite(value)]
        if self._processes.any(bool(bad or bad_norms)):
            self._not_finite("the loss" if bad else "the gradient", min(bad or bad_norms or [state.step]))
        # One by one: the sum must not depend on when it was looked at.
        for value, (_, count) in zip(losses, self._losses, strict=True):
            state.loss_sum += value * count
            state.tokens += count
        now = time.perf_counter()
        elapsed = max(now - self._clock, 1e-9)
        state.epoch_seconds += elapsed
        samples, tokens = engine.samples - self._seen[0], state.tokens - self._seen[1]
        self._clock, self._seen = now, (engine.samples, state.tokens)
        mean = sum(losses) / len(losses)
        state.gradient_norm = norm_values[-1] if norm_values else None
        self._display.advance(len(losses), mean, samples / elapsed, tokens / elapsed)
        points = {
            "train/loss": mean,
            "train/learning_rate": engine.optimizer.learning_rate,
            "train/tokens_per_second": tokens / elapsed,
        }
        if norm_values:
            points["train/gradient_norm"] = norm_values[-1]
        self._display.curves(state.step, points)
        self._losses.clear()
        norms.clear()

    def _validate(self) -> dict[str, float]:
        return self._evaluate(self._valid, (self.config.filter_viewed,))[self._protocol]

    def _evaluate(self, loader: BatchLoader, filter_viewed: tuple[bool, ...]) -> dict[str, dict[str, float]]:
        self._display.end_epoch()
        if not self.engine.is_finite():
            self._not_finite("a weight", self.state.step)
        loader.set_position(0, 0)
        with self.engine.whole_model() as model:
            return evaluate_protocols(
                model,
                # One process must not leave the others waiting in a collective.
                _Stoppable(loader, self._wish) if self._processes.world_size == 1 else loader,
                train_counts=self.train_counts,
                filter_viewed=filter_viewed,
                device=self._processes.device,
                progress=self._display.shown,
            )

    def _finish_epoch(self, figures: dict[str, float]) -> None:
        state, config = self.state, self.config
        loss_sum, tokens = self._processes.sum([state.loss_sum, float(state.tokens)])
        value = figures[config.monitor]
        loss = loss_sum / max(tokens, 1.0)
        seconds = max(state.epoch_seconds, 1e-9)
        row = {
            "epoch": state.epoch + 1,
            "step": state.step,
            "loss": loss,
            "learning_rate": self.engine.optimizer.learning_rate,
            "gradient_norm": state.gradient_norm,
            "seconds": state.epoch_seconds,
            "tokens_per_second": tokens / seconds,
            **figures,
        }
        state.history.append(row)
        state.seconds += state.epoch_seconds
        state.epoch, state.batch = state.epoch + 1, 0
        state.loss_sum, state.tokens, state.epoch_seconds = 0.0, 0, 0.0
        better = state.best is None or value > state.best
        if better:
            state.best, state.best_epoch, state.worse_epochs = value, state.epoch, 0
        else:
            state.worse_epochs += 1
        self._display.say(
            f"epoch {state.epoch}: loss {loss:.4f}, validation {config.monitor} {value:.4f} ({self._protocol})"
            + (", the best so far" if better else "")
        )
        self._display.curves(state.step, {"train/epoch_loss": loss, **{f"valid/{name}": figures[name] for name in figures}})
        if better:
            self._best = {name: value.detach().clone() for name, value in self.engine.model.state_dict().items()}
        waited = time.perf_counter() - self._saved_at >= config.checkpoint_seconds
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
        name = next_name(self._root, self.state.step)
        best = self.engine.collect({f"{BEST}{name}": value for name, value in self._best.items()})
        tensors = self.engine.state_tensors() | best
        failure: CheckpointError | None = None
        if self._processes.is_first:
            try:
                save_checkpoint(self._root, name, tensors, self.state.to_json())
            except CheckpointError as error:
                failure = error
        if self._processes.any(failure is not None):
            raise failure or CheckpointError(f"{self._root / name}: the first process could not write it")
        if self._processes.is_first:
            prune(self._root, _KEPT)
        self._clock = self._saved_at = time.perf_counter()

    def _interrupted(self) -> NoReturn:
        number = self._wish.signal or signal.SIGTERM
        self._checkpoint()
        raise TrainingInterrupted(
            f"stopped by {signal.Signals(number).name} after step {self.state.step:,}; a checkpoint is in {self._root}: "
            "resume to go on",
            number,
        )

    def _not_finite(self, what: str, step: int) -> NoReturn:
        checkpoints = list_checkpoints(self._root)
        last = f"the last checkpoint, {checkpoints[-1]}, is whole" if checkpoints else "there is no checkpoint yet"
        raise TrainingError(
            f"{what} is NaN or infinite at step {step:,}, epoch {self.state.epoch + 1}; {last}. Start again with a lower "
            f"learning_rate (now {self.config.learning_rate:g}), gradient_clip_norm or precision=32-true"
        )


class _Stoppable:
    """A loader that stops at the wish to."""

    def __init__(self, loader: BatchLoader, wish: StopWish) -> None:
        self._loader, self._wish = loader, wish

    def __iter__(self) -> Any:
        return self._wish.watched(self._loader)

    def __len__(self) -> int:
        return len(self._loader)


def _figures(row: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in row.items() if "@" in name}
