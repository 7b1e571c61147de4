"""The module that TorchRec's train pipelines train: a model and its head in one forward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from jagged.models.heads import Head
from jagged.modules import CutCrossEntropyHead, SplitEmbeddingCollection
from jagged.ops import validate_ids, values_are_trusted

if TYPE_CHECKING:
    from jagged.data import SequenceBatch
    from jagged.models.sasrec import SASRec


class TrainTask(nn.Module):
    """Next-item prediction.

    Args:
        model: gives hidden states for features and owns the item table.
        label_smoothing: share of the target's probability that is spread evenly over all items, where no head is given.
        head: gives the loss; None for cross-entropy over the whole catalogue.

    Raises:
        ValueError: both `label_smoothing` and `head`.

    Shape:
        A `SequenceBatch` in; `(loss, (loss, logits, labels))` out, as TorchRec's pipelines expect, the inner ones detached:
        `logits` `[sum L]` are the scores of the targets, `labels` `[sum L]` the targets.
    """

    def __init__(
        self,
        model: SASRec,
        *,
        label_smoothing: float = 0.0,
        head: Head | None = None,
    ) -> None:
        super().__init__()
        if head is not None and label_smoothing:
            raise ValueError(f"label_smoothing: got {label_smoothing} and a head; build the head with it, or leave the head out")
        self.model = model
        self.head: Head = CutCrossEntropyHead(label_smoothing=label_smoothing) if head is None else head

    def forward(self, batch: SequenceBatch) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Return the mean loss of the batch's rows and what metrics need."""
        num_items = self.model.config["num_items"]
        with batch.trusted(num_items):
            if not values_are_trusted():
                validate_ids(batch.targets, num_items, name="targets")
            hidden = self.model(batch.features)
        loss, logits = self.head(hidden, self.model.item_weight, batch.targets)
        return loss, (loss.detach(), logits, batch.targets)

    def split(self, group: ProcessGroup, host_group: ProcessGroup) -> None:
        """Keep this process's rows of the item table alone; look up, and score, together with the other processes of the group.

        From here on the gradient of the table's rows is that of the sum of all processes' losses, and every process must call
        forward and backward, with a batch of no users too. All processes must have the same table.

        Args:
            group, host_group: as for `jagged.modules.RowSplit`.

        Raises:
            ValueError: a head of some items only, whose rows any process may hold.
        """
        if not isinstance(self.head, CutCrossEntropyHead):
            raise ValueError(
                f"head: expected a CutCrossEntropyHead, the only one for several processes, got {type(self.head).__name__}; "
                "take one process, or that head"
            )
        table = SplitEmbeddingCollection(self.model.item_embeddings, group, host_group)
        self.model.item_embeddings = table
        self.head.split = table.split
