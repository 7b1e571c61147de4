"""A model of rows with sets of labels: sparse features in, ranked labels out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from jagged.data.label_batches import FEATURES, LabelBatch
from jagged.data.moving import moved
from jagged.evaluation import bar, evaluating, several
from jagged.label_metrics import DEFAULT_KS, LabelMetrics
from jagged.metrics import Figures
from jagged.models.task import Task, TaskOutput, TaskScores
from jagged.modules import GroupSparseHead


class SparseEncoder(nn.Module):
    """The sum of the embeddings of a row's features times their values, and a layer on top.

    Args:
        num_features: rows of the table.
        dim: width of embeddings and of the result.
        dropout: share of numbers that are dropped in front of the layer and behind it.
        device: of the parameters.

    Shape:
        features: KeyedJaggedTensor of the key "features" with weights. Returns `[B, dim]`.

    Example:
        >>> from jagged.data import LabelBatch, synthetic_labels
        >>> from jagged.models import SparseEncoder
        >>> rows, _, _ = synthetic_labels(num_rows=10, num_test_rows=1, num_labels=20, num_features=100, num_groups=5)
        >>> SparseEncoder(100, 8)(LabelBatch.of(rows).features).shape
        torch.Size([10, 8])
    """

    def __init__(self, num_features: int, dim: int, *, dropout: float = 0.0, device: torch.device | str | None = None) -> None:
        super().__init__()
        config = EmbeddingBagConfig(name=FEATURES, embedding_dim=dim, num_embeddings=num_features, feature_names=[FEATURES])
        self.table = EmbeddingBagCollection(tables=[config], is_weighted=True, device=torch.device(device or "cpu"))
        # TorchRec's begin within 1 / sqrt(rows), where a million features would be next to nothing.
        with torch.no_grad():
            for weight in self.table.parameters():
                weight.normal_(std=0.1)
        layer = nn.Linear(dim, dim, device=device)
        self.mlp = nn.Sequential(nn.ReLU(), nn.Dropout(dropout), layer, nn.ReLU(), nn.Dropout(dropout))

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """Return `[B, dim]`."""
        hidden: Tensor = self.mlp(self.table(features).values())
        return hidden


class MultiLabelTask(Task):
    """A model that gives rows sets of labels, as `jagged.training.Trainer` trains it.

    Figures of a part are under "labels", those of `jagged.label_metrics.LabelMetrics`, and the loss under "all".

    Args:
        encoder: from a batch's features to `[B, H]`: `SparseEncoder`, or one of your own.
        head: the labels' weights, which read `[B, H]`.
        ks: cut-offs of the figures.
        label_weights: `[num_labels]`, above 0, for figures by propensity (`jagged.label_metrics.propensities`).

    Shape:
        batch: `jagged.data.LabelBatch`, or anything with `features` for the encoder and `labels`, a JaggedTensor of ids.

    Example:
        >>> import torch
        >>> from jagged.data import label_loader, synthetic_labels
        >>> from jagged.models import MultiLabelTask, SparseEncoder
        >>> from jagged.modules import GroupSparseHead
        >>> rows, test, _ = synthetic_labels(num_rows=50, num_test_rows=20, num_labels=20, num_features=100, num_groups=5)
        >>> counts = torch.bincount(torch.from_numpy(rows.labels).long(), minlength=20)
        >>> task = MultiLabelTask(SparseEncoder(100, 8), GroupSparseHead(8, counts, len(rows), fan_in=4, group_size=4))
        >>> figures = task.evaluate(label_loader(test, 8), "test", progress=False)
        >>> 0 <= figures["labels"]["p@1"] <= 1
        True
    """

    def __init__(
        self, encoder: nn.Module, head: GroupSparseHead, *, ks: Sequence[int] = DEFAULT_KS, label_weights: Tensor | None = None
    ) -> None:
        super().__init__()
        self.encoder, self.head = encoder, head
        self.ks = tuple(ks)
        self.register_buffer("label_weights", label_weights, persistent=False)

    label_weights: Tensor | None

    def forward(self, batch: LabelBatch) -> TaskOutput:
        """Return the loss, and for each row how many labels it has."""
        loss = self.head(self.encoder(batch.features), batch.labels)
        # The trainer weighs batches by their rows.
        counts = batch.labels.offsets().diff()
        return TaskOutput(loss, {"labels": TaskScores(loss.detach().expand(counts.shape[0]), counts)})

    def predict(self, batch: LabelBatch) -> dict[str, Tensor]:
        """Return the best labels of each row, `"labels"` `[B, max(ks)]`, and their probabilities, `"probabilities"`."""
        with evaluating(self), torch.no_grad():
            scores, labels = self.head.topk(self.encoder(moved(batch, self.device).features), max(self.ks))
        return {"labels": labels, "probabilities": scores.float().sigmoid()}

    def evaluate(self, batches: Iterable[LabelBatch], part: str, *, progress: bool = True, all_processes: bool = True) -> Figures:
        """Return the figures of a part under "labels", and its loss under "all".

        Raises:
            ValueError: no rows.
        """
        metrics = LabelMetrics(self.head.num_labels, self.label_weights, self.ks, device=self.device)
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        with evaluating(self), torch.no_grad():
            for given in bar(batches, progress):
                batch = moved(given, self.device)
                hidden, labels = self.encoder(batch.features), batch.labels
                rows = labels.offsets().shape[0] - 1
                sums += torch.stack([self.head(hidden, labels).double() * rows, sums.new_full((), rows)])
                metrics.update(self.head.topk(hidden, metrics.depth)[1], labels.values(), labels.offsets())
        if all_processes and several():
            torch.distributed.all_reduce(sums)
            metrics.all_reduce()
        total, rows = sums.tolist()
        if not rows:
            raise ValueError(f"the {part} part has no rows to evaluate; give more data")
        return Figures({"all": {"loss": total / rows}, "labels": metrics.compute()})
