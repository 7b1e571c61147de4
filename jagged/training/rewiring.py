"""New inputs for groups of labels while a run goes."""

from __future__ import annotations

from typing import Literal

from torch import nn

from jagged.modules import GroupSparseHead
from jagged.training.callbacks import Callback, Progress


class Rewiring(Callback):
    """Gives the slots of every `GroupSparseHead` of a task that matter least new inputs, at times, until a step.

    Which inputs are new follows from the heads' seeds and the step, and all that changes is in the heads' state: a run that goes
    on from a checkpoint ends as one that was not stopped.

    Args:
        fraction: of all slots, in [0, 1].
        every: steps from one time to the next, at least 1.
        until: the last step at which slots change; later ones would not be learnt.
        protected: steps for which new slots are left in peace; None: twice `every`.
        in_each_group, new_weights: as for `GroupSparseHead.rewire`.

    Raises:
        ValueError: numbers out of range.

    Source:
        HASTE's dynamic sparse training.
    """

    def __init__(
        self,
        fraction: float,
        *,
        every: int,
        until: int,
        protected: int | None = None,
        in_each_group: bool = False,
        new_weights: Literal["zero", "uniform"] = "zero",
    ) -> None:
        if not 0 <= fraction <= 1:
            raise ValueError(f"fraction: expected a number in [0, 1], got {fraction}")
        if every < 1:
            raise ValueError(f"every: expected at least 1 step, got {every}")
        self.fraction, self.every, self.until = fraction, every, until
        self.protected = 2 * every if protected is None else protected
        self.in_each_group, self.new_weights = in_each_group, new_weights

    def on_step(self, progress: Progress) -> None:
        """After an update of the weights."""
        step = progress.state.step
        if step % self.every or step > self.until:
            return
        assert isinstance(progress.task, nn.Module)
        for module in progress.task.modules():
            if isinstance(module, GroupSparseHead):
                module.rewire(
                    self.fraction,
                    step=step,
                    protected=self.protected,
                    in_each_group=self.in_each_group,
                    new_weights=self.new_weights,
                    optimizer=progress.optimizer_of(module.weight),
                )
