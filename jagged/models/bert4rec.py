"""BERT4Rec: a transformer that sees both sides of hidden items."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from jagged.data.batches import keyed
from jagged.models.item_sequences import FEATURE, ItemSequenceModel
from jagged.models.side_features import ItemFeatures
from jagged.models.validation import validate_features
from jagged.modules import ItemMasking, JaggedTransformerBlock, MaskedItems
from jagged.ops import jagged_concat


class BERT4Rec(ItemSequenceModel):
    """Bidirectional transformers on jagged histories, trained to find hidden items.

    In training items of the whole history, the last target with it, are hidden at random and predicted from both sides. To
    predict the next item a hidden one is put behind the history.

    Args:
        num_items: size of the catalogue.
        embedding_dim: width D of item embeddings and hidden states.
        num_heads: attention heads; divides `embedding_dim`.
        num_layers: transformer blocks.
        max_seq_len: longest history; of longer ones the first items share a position.
        dropout: probability, on the embeddings and inside the blocks.
        mask_probability: that an item is hidden in training.
        seed: of what is hidden in evaluation.
        item_features: as of `SASRec`; what is hidden has none.
        device: where parameters live; `"meta"` allocates nothing.

    Attributes:
        config: the arguments.
        item_features: as given, or made.

    Shape:
        KeyedJaggedTensor of at least one sample with the key `"item_id"` in; JaggedTensor with values `[sum L, D]` out, where
        each row has seen all rows of its sample.

    Raises:
        ValueError: ids outside the catalogue or offsets that do not fit them; a probability outside [0, 1].

    Source:
        Sun et al., BERT4Rec: Sequential Recommendation with Bidirectional Encoder Representations from Transformer, CIKM 2019.
        Here layer norms stand before attention and feed-forward networks, scores are products with the item table alone, and
        the mask is a row behind those of the items.

    Example:
        >>> import torch
        >>> from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
        >>> from jagged.models import BERT4Rec
        >>> history = KeyedJaggedTensor(["item_id"], torch.tensor([3, 1, 2]), lengths=torch.tensor([1, 2]))
        >>> BERT4Rec(10, embedding_dim=8).final_hidden(history).shape
        torch.Size([2, 8])
    """

    def __init__(
        self,
        num_items: int,
        *,
        embedding_dim: int = 64,
        num_heads: int = 2,
        num_layers: int = 2,
        max_seq_len: int = 50,
        dropout: float = 0.2,
        mask_probability: float = 0.2,
        seed: int = 0,
        item_features: ItemFeatures | Mapping[str, Any] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        config = {
            "num_items": num_items,
            "embedding_dim": embedding_dim,
            "num_heads": num_heads,
            "num_layers": num_layers,
            "max_seq_len": max_seq_len,
            "dropout": dropout,
            "mask_probability": mask_probability,
            "seed": seed,
        }
        super().__init__(
            config,
            lambda: JaggedTransformerBlock(
                embedding_dim, num_heads, hidden_dim=4 * embedding_dim, dropout=dropout, causal=False, device=device
            ),
            num_rows=num_items + 1,
            # Behind a history of this length stands the hidden item.
            num_positions=max_seq_len + 1,
            item_features=item_features,
            device=device,
        )
        self.masking = ItemMasking(num_items, mask_probability, seed=seed, device=device)

    @property
    def item_table(self) -> Tensor:
        """The items' rows of the table, `[num_items, D]`: all but the mask's."""
        return super().item_table[: self.config["num_items"]]

    @property
    def item_weight(self) -> Tensor:
        """What hidden states are scored against: `item_table`."""
        return self.item_table

    def learned(self, features: KeyedJaggedTensor, targets: Tensor) -> tuple[JaggedTensor, Tensor]:
        """Hide items of the whole sequences; return the hidden states, and what stood where something is hidden, else -100.

        Rows whose target is negative, as those that fill up a batch for a CUDA graph, and samples that end with such a row, have
        nothing to predict.
        """
        validate_features(features, FEATURE, self.config["num_items"])
        history = features[FEATURE]
        offsets, mask = history.offsets(), self.config["num_items"]
        if not targets.shape[0]:
            last = torch.full_like(offsets[1:], -1)
        else:
            # A sample without a history has no target.
            last = targets[(offsets[1:] - 1).clamp(min=0)].where(offsets[1:] > offsets[:-1], -1)
        whole = self._followed_by(history, last.where(last >= 0, mask))
        known = self._followed_by(JaggedTensor(targets, offsets=offsets), last).values() >= 0
        masked = cast(MaskedItems, self.masking(whole))
        return self._encoded(_keyed(masked.items)), masked.targets.where(known, self.masking.ignore_index)

    def final_hidden(self, features: KeyedJaggedTensor) -> Tensor:
        """Return the hidden state `[B, D]` of a hidden item behind each history; zeros for an empty one."""
        validate_features(features, FEATURE, self.config["num_items"])
        history = features[FEATURE]
        mask = torch.full((features.stride(),), self.config["num_items"], dtype=history.values().dtype, device=features.device())
        hidden = cast(Tensor, self.last(self._encoded(_keyed(self._followed_by(history, mask)))))
        return hidden.masked_fill((history.lengths() == 0)[:, None], 0.0)

    @staticmethod
    def _followed_by(history: JaggedTensor, ids: Tensor) -> JaggedTensor:
        """Each sample's items and one more."""
        values = history.values()
        joined, offsets = jagged_concat([values, ids.to(values.dtype)[:, None]], [history.offsets(), None])
        return JaggedTensor(joined, offsets=offsets)


def _keyed(items: JaggedTensor) -> KeyedJaggedTensor:
    return keyed(items.values(), items.lengths(), items.offsets(), (FEATURE,))
