"""Next-item prediction as a task: a model of hidden states and its head in one forward, ranked over the whole catalogue."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from jagged.data import SequenceBatch
from jagged.evaluation import evaluate_protocols, item_table
from jagged.metrics import DEFAULT_KS, Figures, TrainCounts
from jagged.models.heads import Head
from jagged.models.item_sequences import ItemSequenceModel
from jagged.models.task import TaskOutput, TaskScores
from jagged.modules import CutCrossEntropyHead, GroupSparseHead, SampledCrossEntropyHead, SplitEmbeddingCollection
from jagged.modules.shortening import drawn_rows
from jagged.ops import validate_ids, values_are_trusted


class NextItemTask(nn.Module):
    """Next-item prediction.

    Args:
        model: gives hidden states for features and owns the item table.
        label_smoothing: share of the target's probability that is spread evenly over all items, where no head is given.
        head: gives the loss; None for cross-entropy over the whole catalogue. A model with an output layer has its own.
        train_counts: training users of each item; `evaluate` needs them.
        filter_viewed: take items of the history out of the ranking of the part "valid"; of "test" both figures are given.
        ks: cut-offs of the figures.

    Raises:
        ValueError: both `label_smoothing` and `head`, or one of them and a model with an output layer.

    Shape:
        A `SequenceBatch` in; a `TaskOutput` out, whose task "next_item" has the scores of the targets `[sum L]`, detached, and
        the targets as labels. Of a batch with `kept` they are those of `shortened`.
    """

    def __init__(
        self,
        model: ItemSequenceModel,
        *,
        label_smoothing: float = 0.0,
        head: Head | None = None,
        train_counts: TrainCounts | None = None,
        filter_viewed: bool = False,
        ks: Sequence[int] = DEFAULT_KS,
    ) -> None:
        super().__init__()
        if head is not None and label_smoothing:
            raise ValueError(f"label_smoothing: got {label_smoothing} and a head; build the head with it, or leave the head out")
        # Models that users register have none, or one of that name that is something else.
        has_output = isinstance(getattr(model, "output", None), GroupSparseHead)
        if has_output and (head is not None or label_smoothing):
            what = "label_smoothing" if head is None else "head"
            raise ValueError(f"{what}: got one and a model with an output layer, whose loss is its own; leave it out")
        self.model = model
        self.head: Head | None = None
        if not has_output:
            self.head = CutCrossEntropyHead(label_smoothing=label_smoothing) if head is None else head
        self.train_counts, self.filter_viewed, self.ks = train_counts, filter_viewed, tuple(ks)

    @property
    def kept(self) -> nn.Module:
        """The module whose weights are saved: the model, without its head."""
        return self.model

    def shortened(self, batch: SequenceBatch) -> SequenceBatch:
        """A batch of the rows that are trained on: in training as many of each history as it says, drawn on its device; else all.

        Each draw is of torch's random state. Nothing waits for the device.
        """
        if batch.kept is None or not self.training:
            return batch
        offsets, rows = batch.features.offsets()[: len(batch) + 1], batch.targets.shape[0]
        seed = torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=offsets.device)
        return batch.only(*drawn_rows(offsets, rows, batch.kept, batch.num_kept, seed))

    def forward(self, batch: SequenceBatch) -> TaskOutput:
        """Return the mean loss of the batch's rows, of those that are kept, and the scores of their targets."""
        batch = self.shortened(batch)
        num_items = self.model.config["num_items"]
        with batch.trusted(num_items):
            if not values_are_trusted():
                validate_ids(batch.targets, num_items, name="targets")
            # Models that users register have hidden states of rows alone.
            of_loss = getattr(self.model, "learned", None)
            hidden, targets = (
                of_loss(batch.features, batch.targets) if of_loss is not None else (self.model(batch.features), batch.targets)
            )
        if self.head is None:
            assert self.model.output is not None
            loss, logits = self.model.output.target_loss(hidden.values(), targets)
        else:
            loss, logits = self.head(hidden, self.model.item_weight, targets)
        # Where rows have no target the loss is the mean over those that have one.
        mask = None if targets is batch.targets else targets >= 0
        return TaskOutput(loss, {"next_item": TaskScores(logits, targets, mask)})

    def predict(self, batch: SequenceBatch) -> Mapping[str, Tensor]:
        """Under "hidden" each user's hidden state `[B, D]`, whose inner product with an item's row of the table is its score."""
        return {"hidden": self.model.final_hidden(batch.features)}

    def evaluate(self, batches: Iterable[Any], part: str, *, progress: bool = True, all_processes: bool = True) -> Figures:
        """Rank the whole catalogue: `jagged.evaluation.evaluate_protocols`, for "test" with seen items left in and taken out.

        Raises:
            ValueError: the task was made without `train_counts`.
            EvaluationError: the model's scores are NaN or infinite.
        """
        if self.train_counts is None:
            raise ValueError("train_counts: got None, expected TrainCounts.from_part(split.train); make the task with them")
        return evaluate_protocols(
            self.model,
            batches,
            train_counts=self.train_counts,
            filter_viewed=(False, True) if part == "test" else (self.filter_viewed,),
            ks=self.ks,
            progress=progress,
            all_processes=all_processes,
        )

    def split(self, group: ProcessGroup, host_group: ProcessGroup) -> None:
        """Keep this process's rows of the item table alone; look up, and score, together with the other processes of the group.

        From here on the gradient of the table's rows is that of the sum of all processes' losses, and every process must call
        forward and backward, with a batch of no users too. All processes must have the same table.

        Args:
            group, host_group: as for `jagged.modules.RowSplit`.

        Raises:
            ValueError: a head that does not know tables that are split, or a table with other rows than those of the items.
        """
        rows = sum(table.num_embeddings for table in self.model.item_embeddings.embedding_configs())
        if rows != (num_items := len(item_table(self.model))):
            raise ValueError(
                f"model: expected a table of the {num_items} items alone, got {rows} rows in a {type(self.model).__name__}, "
                "which do not split; train it in one process"
            )
        if self.head is not None and not isinstance(self.head, CutCrossEntropyHead | SampledCrossEntropyHead):
            raise ValueError(
                "head: expected a CutCrossEntropyHead or SampledCrossEntropyHead, the ones for several processes, got "
                f"{type(self.head).__name__}; take one process, or one of those"
            )
        table = SplitEmbeddingCollection(self.model.item_embeddings, group, host_group)
        self.model.item_embeddings = table
        # An output layer is whole in every process.
        if self.head is not None:
            self.head.split = table.split
