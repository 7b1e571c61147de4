"""A model of rows with sets of labels: sparse features in, ranked labels out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from jagged.data.label_batches import FEATURES, LabelBatch
from jagged.data.label_features import label_embeddings
from jagged.data.moving import moved
from jagged.data.xmc import MultiLabelRows
from jagged.evaluation import bar, evaluating, several
from jagged.label_metrics import DEFAULT_KS, LabelFilter, LabelMetrics, propensities
from jagged.metrics import Figures
from jagged.models.task import Task, TaskOutput, TaskScores
from jagged.modules import GroupSparseHead, LabelGroups
from jagged.ops import sample_of_row


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
        device = torch.get_default_device() if device is None else torch.device(device)
        self.table = EmbeddingBagCollection(tables=[config], is_weighted=True, device=device)
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

    Figures of a part are under "labels", those of `jagged.label_metrics.LabelMetrics`, and the loss under "all". Labels that are
    filtered, as a batch says, are neither ranked nor looked for; the loss has them.

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

    @property
    def weights_of_labels(self) -> Tensor | None:
        """What figures weigh labels by; None for figures without weights."""
        return self.label_weights

    def forward(self, batch: LabelBatch) -> TaskOutput:
        """Return the loss, and for each row how many labels it has."""
        loss = self.head(self.encoder(batch.features), batch.labels)
        # The trainer weighs batches by their rows.
        counts = batch.labels.offsets().diff()
        return TaskOutput(loss, {"labels": TaskScores(loss.detach().expand(counts.shape[0]), counts)})

    def predict(self, batch: LabelBatch, *, k: int | None = None) -> dict[str, Tensor]:
        """Return the k best labels of each row, `"labels"` `[B, k]`, and their `"probabilities"`; k is `max(ks)` by default.

        Where there are fewer than k labels a row ends in -1 and probabilities of 0.
        """
        with evaluating(self), torch.no_grad():
            given = moved(batch, self.device)
            hidden = self.encoder(given.features)
            scores, labels = self._best(hidden, k or max(self.ks), given.filtered)
            return {"labels": labels, "probabilities": self.head.probabilities(hidden, scores).float()}

    def _best(self, hidden: Tensor, k: int, filtered: JaggedTensor | None) -> tuple[Tensor, Tensor]:
        """The k best labels of each row that are not filtered, and their scores; -1 and -inf where there are fewer."""
        if filtered is None:
            return self.head.topk(hidden, k)
        # Filtered labels may be the best ones.
        most = int(filtered.offsets().diff().max()) if filtered.offsets().shape[0] > 1 else 0
        scores, labels = self.head.topk(hidden, min(k + most, self.head.num_labels))
        kept = LabelFilter(filtered.values(), filtered.offsets()).top(labels, k)
        # Labels of a row are different, so each has one place among those before.
        place = (labels[:, None, :] == kept[:, :, None]).to(torch.uint8).argmax(2)
        return torch.where(kept < 0, -torch.inf, scores.gather(1, place)), kept

    def evaluate(
        self,
        batches: Iterable[LabelBatch],
        part: str,
        *,
        ks: Sequence[int] | None = None,
        progress: bool = True,
        all_processes: bool = True,
    ) -> Figures:
        """Return the figures of a part under "labels", at `ks` or the task's cut-offs, and its loss under "all".

        Raises:
            ValueError: no rows.
        """
        metrics = LabelMetrics(self.head.num_labels, self.weights_of_labels, ks or self.ks, device=self.device)
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        with evaluating(self), torch.no_grad():
            for given in bar(batches, progress):
                batch = moved(given, self.device)
                hidden, labels = self.encoder(batch.features), batch.labels
                rows = labels.offsets().shape[0] - 1
                sums += torch.stack([self.head(hidden, labels).double() * rows, sums.new_full((), rows)])
                best = self._best(hidden, metrics.depth, batch.filtered)[1]
                metrics.update(best, *_without(labels, batch.filtered))
        if all_processes and several():
            torch.distributed.all_reduce(sums)
            metrics.all_reduce()
        total, rows = sums.tolist()
        if not rows:
            raise ValueError(f"the {part} part has no rows to evaluate; give more data")
        return Figures({"all": {"loss": total / rows}, "labels": metrics.compute()})


def _without(labels: JaggedTensor, filtered: JaggedTensor | None) -> tuple[Tensor, Tensor]:
    """Rows' labels and their offsets, without those that are filtered."""
    values, offsets = labels.values(), labels.offsets()
    if filtered is None:
        return values, offsets
    most = 1 + max(int(of.values().max()) if of.values().numel() else 0 for of in (labels, filtered))
    rows, others = (sample_of_row(of.offsets(), of.values().shape[0]) * most + of.values() for of in (labels, filtered))
    kept = ~torch.isin(rows, others)
    counts = torch.cat([offsets.new_zeros(1), kept.cumsum(0)])
    return values[kept], counts[offsets]


class MultiLabelModel(MultiLabelTask):
    """`SparseEncoder` and `GroupSparseHead` by plain numbers, as a directory of a run keeps them; `of` makes it from rows.

    Args:
        num_features, num_labels, num_rows: of the training rows.
        embedding_dim, dropout: of the encoder.
        fan_in, num_head_labels, num_groups, bottleneck_dim, adjacent, loss, label_smoothing: of the head.
        ks: cut-offs of the figures.
        propensity_a, propensity_b: of `jagged.label_metrics.propensities`, which figures weigh labels by.
        seed: of the head.
        head: made already; None: one whose groups, weights and inputs are to be loaded.
        device: of the parameters.
    """

    label_counts: Tensor

    def __init__(
        self,
        num_features: int,
        num_labels: int,
        num_rows: int,
        *,
        embedding_dim: int = 256,
        dropout: float = 0.0,
        fan_in: int = 1,
        num_head_labels: int = 0,
        num_groups: int = 0,
        bottleneck_dim: int | None = None,
        adjacent: bool = False,
        loss: Literal["bce", "softmax"] = "bce",
        label_smoothing: float = 0.0,
        ks: Sequence[int] = DEFAULT_KS,
        propensity_a: float = 0.55,
        propensity_b: float = 1.5,
        seed: int = 0,
        head: GroupSparseHead | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        counts = torch.zeros(num_labels, dtype=torch.int64, device="cpu")
        if head is None:
            head = GroupSparseHead.shaped(
                embedding_dim,
                num_labels,
                num_rows,
                num_head_labels=num_head_labels,
                num_groups=num_groups,
                fan_in=fan_in,
                head_dim=bottleneck_dim,
                adjacent=adjacent,
                loss=loss,
                label_smoothing=label_smoothing,
                seed=seed,
                device=device,
            )
        super().__init__(SparseEncoder(num_features, embedding_dim, dropout=dropout, device=device), head, ks=ks)
        self.num_rows, self.propensity = num_rows, (propensity_a, propensity_b)
        # Of training, which figures by propensity need.
        self.register_buffer("label_counts", counts.to(device))
        self.config: dict[str, Any] = {
            "num_features": num_features,
            "num_labels": num_labels,
            "num_rows": num_rows,
            "embedding_dim": embedding_dim,
            "dropout": dropout,
            "fan_in": head.fan_in,
            "num_head_labels": head.num_head_labels,
            "num_groups": head.num_groups,
            "bottleneck_dim": bottleneck_dim,
            "adjacent": head.adjacent,
            "loss": head.loss,
            "label_smoothing": label_smoothing,
            "ks": list(self.ks),
            "propensity_a": propensity_a,
            "propensity_b": propensity_b,
            "seed": seed,
        }

    @classmethod
    def of(
        cls,
        rows: MultiLabelRows,
        *,
        embedding_dim: int = 256,
        dropout: float = 0.0,
        fan_in: int = 64,
        group_size: int = 16,
        grouping: Literal["features", "frequency", "random"] | LabelGroups = "features",
        dense_share: float = 0.02,
        bottleneck_dim: int | None = None,
        adjacent: bool = False,
        loss: Literal["bce", "softmax"] = "bce",
        label_smoothing: float = 0.0,
        optimizer: Literal["sgd"] | None = None,
        optimizer_options: dict[str, Any] | None = None,
        ks: Sequence[int] = DEFAULT_KS,
        propensity_a: float = 0.55,
        propensity_b: float = 1.5,
        seed: int = 0,
        device: torch.device | str | None = None,
        progress: bool = False,
    ) -> MultiLabelModel:
        """Make the model for training rows.

        Args:
            rows: their labels are counted, and their features group the labels.
            embedding_dim: width of embeddings and of what the head reads.
            dropout: of the encoder.
            fan_in: inputs of a label that has no dense layer.
            group_size: labels that share their inputs.
            grouping: of labels: by the mean features of their rows, by how frequent they are, at random, or as they are given.
            dense_share: of the labels, the most frequent, that read all inputs; 1.0: all of them.
            bottleneck_dim: width of a layer that these read in place of the inputs.
            adjacent, loss, label_smoothing, optimizer, optimizer_options: as of `GroupSparseHead`.
            ks, propensity_a, propensity_b: of the figures.
            seed: of groups and inputs.
            device: of the parameters; labels are grouped there. Sums on a GPU, or by another number of threads, come in another
                order, so groups by features may differ between calls.
            progress: show a bar after two seconds.

        Raises:
            ValueError: numbers out of range.
        """
        counts = torch.bincount(torch.from_numpy(rows.labels).long(), minlength=rows.num_labels)
        by: Any = grouping
        if isinstance(grouping, str) and grouping == "features":
            by = "random" if dense_share == 1 else label_embeddings(rows, seed=seed, device=device, progress=progress)
        head = GroupSparseHead(
            embedding_dim,
            counts,
            len(rows),
            fan_in=fan_in,
            group_size=group_size,
            grouping=by,
            head=float(dense_share),
            head_dim=bottleneck_dim,
            adjacent=adjacent,
            loss=loss,
            label_smoothing=label_smoothing,
            optimizer=optimizer,
            optimizer_options=optimizer_options,
            seed=seed,
            device=device,
        )
        made = cls(
            rows.num_features,
            rows.num_labels,
            len(rows),
            embedding_dim=embedding_dim,
            dropout=dropout,
            bottleneck_dim=bottleneck_dim,
            label_smoothing=label_smoothing,
            ks=ks,
            propensity_a=propensity_a,
            propensity_b=propensity_b,
            seed=seed,
            head=head,
            device=device,
        )
        made.label_counts.copy_(counts)
        return made

    @property
    def weights_of_labels(self) -> Tensor | None:
        """What figures weigh labels by; None where there are too few rows for it."""
        if self.num_rows < 3:
            return None
        return propensities(self.label_counts.cpu(), self.num_rows, *self.propensity)
