"""New inputs for groups of labels while a run goes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torchrec.sparse.jagged_tensor import JaggedTensor

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
        by: "random", or "gradient": as for `GroupSparseHead.rewire`, of the batch that the step was last called with.
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
        by: Literal["random", "gradient"] = "random",
        in_each_group: bool = False,
        new_weights: Literal["zero", "uniform"] = "zero",
    ) -> None:
        if not 0 <= fraction <= 1:
            raise ValueError(f"fraction: expected a number in [0, 1], got {fraction}")
        if every < 1:
            raise ValueError(f"every: expected at least 1 step, got {every}")
        if by not in ("random", "gradient"):
            raise ValueError(f"by: got {by!r}, expected 'random' or 'gradient'")
        self.fraction, self.every, self.until = fraction, every, until
        self.protected = 2 * every if protected is None else protected
        self.by, self.in_each_group, self.new_weights = by, in_each_group, new_weights
        self._hooks: list[RemovableHandle] = []
        self._batches: dict[GroupSparseHead, tuple[Tensor, JaggedTensor]] = {}

    def on_start(self, progress: Progress) -> None:
        """Before the first step: keep what heads are called with, where that is asked for."""
        self.on_stop(progress)
        if self.by == "gradient":
            self._hooks = [head.register_forward_pre_hook(self._keep, with_kwargs=True) for head in _heads(progress)]

    def on_step(self, progress: Progress) -> None:
        """After an update of the weights."""
        step = progress.state.step
        if step % self.every or step > self.until:
            return
        for head in _heads(progress):
            head.rewire(
                self.fraction,
                step=step,
                protected=self.protected,
                by=self.by,
                batch=self._batches.get(head),
                in_each_group=self.in_each_group,
                new_weights=self.new_weights,
                optimizer=None if head.optimizer is not None else progress.optimizer_of(head.weight),
            )

    def on_stop(self, progress: Progress) -> None:
        """When no step comes any more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._batches = [], {}

    def _keep(self, head: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        assert isinstance(head, GroupSparseHead)
        if not (head.training and torch.is_grad_enabled()):
            return
        given = dict(zip(("features", "positives", "row_mask"), args, strict=False)) | dict(kwargs)
        if given.get("row_mask") is not None:
            raise ValueError("by: got 'gradient' and a head that is called with row_mask; take 'random', or leave the rows out")
        self._batches[head] = given["features"].detach().to(head.weight.dtype), given["positives"]


def _heads(progress: Progress) -> Iterator[GroupSparseHead]:
    assert isinstance(progress.task, nn.Module)
    return (module for module in progress.task.modules() if isinstance(module, GroupSparseHead))
