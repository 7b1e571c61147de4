"""What a user's own code does while a run goes: called by the loop, part of its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jagged.training.errors import TrainingError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from jagged.models import RankingTask
    from jagged.training.optimizer import Optimizer
    from jagged.training.state import TrainState


class Progress:
    """Where a run stands, as callbacks see it.

    Attributes:
        task: what is trained. On several processes a split or sharded table has this process's rows alone.
        state: step, epoch, history and the rest; not to be changed.
    """

    def __init__(self, task: RankingTask, state: TrainState, optimizer: Optimizer) -> None:
        self.task, self.state = task, state
        self.reason: str | None = None
        self._optimizer = optimizer

    def optimizer_of(self, parameter: nn.Parameter) -> torch.optim.Optimizer:
        """Return what updates a parameter, whose `state[parameter]` may be changed in place."""
        return self._optimizer.owner_of(parameter)

    def stop(self, reason: str) -> None:
        """End the training after this step as if it had come to its end: the best weights are tested and written."""
        self.reason = self.reason or reason


class Callback:
    """Base of callbacks; every method may be left out. Every process calls them.

    What `state_dict` gives, plain numbers, words, lists and dicts, is in every checkpoint and is given to `load_state_dict` when
    the run is resumed; a NaN, as a figure that is not defined is, comes back as None. A checkpoint is written after the step's
    callbacks, so that no call is lost or comes twice.
    """

    def on_start(self, progress: Progress) -> None:
        """Before the first step, of a run that goes on, too."""

    def on_step(self, progress: Progress) -> None:
        """After an update of the weights."""

    def on_epoch(self, progress: Progress) -> None:
        """After the last step of an epoch, before a validation."""

    def on_validation(self, progress: Progress, figures: Mapping[str, Mapping[str, float]]) -> None:
        """After a validation; `figures` by group and name."""

    def on_stop(self, progress: Progress) -> None:
        """When no step comes any more: at the end, or at a signal after its checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """What is needed to go on."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""


def states_of(callbacks: Sequence[Callback]) -> list[list[Any]]:
    """The states of callbacks that have one, each behind the name of its class."""
    return [[type(callback).__qualname__, _without_nan(state)] for callback in callbacks if (state := callback.state_dict())]


def _without_nan(state: Any) -> Any:
    """The same with None in place of NaN, which JSON has not."""
    if isinstance(state, Mapping):
        return {name: _without_nan(value) for name, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [_without_nan(value) for value in state]
    return None if isinstance(state, float) and state != state else state


def load_states(callbacks: Sequence[Callback], states: Sequence[Sequence[Any]], where: Any) -> None:
    """Give callbacks what `states_of` found.

    Raises:
        TrainingError: a checkpoint has the state of a callback that is not there.
    """
    left = list(callbacks)
    for name, state in states:
        fitting = next((callback for callback in left if type(callback).__qualname__ == name), None)
        if fitting is None:
            known = ", ".join(type(callback).__qualname__ for callback in callbacks) or "none"
            raise TrainingError(
                f"{where}: holds the state of a callback {name}, found {known}; resume with those it was trained with"
            )
        fitting.load_state_dict(state)
        left.remove(fitting)
