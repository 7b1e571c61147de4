"""What a sequence is to predict: the next item of each row, or items that were hidden from the model."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor

from jagged.modules.jagged_tensor import with_values
from jagged.modules.seeded import SeededModule
from jagged.ops import Draw, drawn_negatives, sample_of_row

# A row is hidden where its number, one of so many, is small.
_NUMBERS = 2**31 - 1
# Numbers of a sampler of the same seed are others.
_SALT = 0x5DEECE66D


def next_item_targets(items: JaggedTensor, next_items: Tensor | None = None, *, ignore_index: int = -100) -> Tensor:
    """Return for each row the item of the next row of its sample.

    Without synchronisation.

    Args:
        items: JaggedTensor of ids `[sum L]`, int32 or int64.
        next_items: `[B]`: what comes after each sample's last row; None gives the last rows no target.
        ignore_index: the mark of a row without a target.

    Returns:
        `[sum L]`, in the dtype of the ids.

    Raises:
        ValueError: ids of another rank, or `next_items` of another shape.

    Example:
        >>> import torch
        >>> from torchrec.sparse.jagged_tensor import JaggedTensor
        >>> from jagged.modules import next_item_targets
        >>> items = JaggedTensor(values=torch.tensor([5, 6, 7, 8]), offsets=torch.tensor([0, 3, 3, 4]))
        >>> next_item_targets(items)
        tensor([   6,    7, -100, -100])
        >>> next_item_targets(items, torch.tensor([1, 2, 3]))
        tensor([6, 7, 1, 3])
    """
    values, offsets = items.values(), items.offsets()
    if values.dim() != 1:
        raise ValueError(f"items: expected ids [sum L], got values of shape {list(values.shape)}; pass the ids, not embeddings")
    if next_items is not None and next_items.shape != (offsets.shape[0] - 1,):
        raise ValueError(f"next_items: expected shape [{offsets.shape[0] - 1}], an item per sample, got {list(next_items.shape)}")
    total = values.shape[0]
    samples = sample_of_row(offsets, total)
    following = torch.arange(1, total + 1, device=values.device)
    is_last = following == offsets[1:][samples]
    after = ignore_index if next_items is None else next_items.to(values.dtype)[samples]
    return torch.where(is_last, after, values[following.clamp(max=total - 1)])


class MaskedItems(NamedTuple):
    """`items`, a JaggedTensor in which some ids are the mask's, and `targets` `[sum L]`: what stood there, elsewhere ignored."""

    items: JaggedTensor
    targets: Tensor


class ItemMasking(SeededModule):
    """Hide items at random, to be predicted from both sides.

    Which rows are hidden depends on a seed and the row's place in the batch alone. In training torch's random state gives the
    seed, so that `torch.manual_seed` repeats it and activation checkpointing hides the same rows again; in evaluation every call
    hides the same.

    Args:
        mask_id: id that stands for a hidden item: a row of the model's table that is no item.
        probability: that a row is hidden, in [0, 1].
        ignore_index: target of rows that are not hidden.
        seed: of every draw in evaluation.
        device: where the seed lives.

    Raises:
        ValueError: `probability` outside [0, 1].

    Shape:
        JaggedTensor of ids `[sum L]`, int32 or int64, in; `MaskedItems` out.

    Source:
        Sun et al., BERT4Rec: Sequential Recommendation with Bidirectional Encoder Representations from Transformer, CIKM 2019.

    Example:
        >>> import torch
        >>> from torchrec.sparse.jagged_tensor import JaggedTensor
        >>> from jagged.modules import ItemMasking
        >>> items = JaggedTensor(values=torch.tensor([5, 6, 7, 8]), offsets=torch.tensor([0, 3, 4]))
        >>> masked = ItemMasking(mask_id=100, probability=1.0)(items)
        >>> masked.items.values(), masked.targets
        (tensor([100, 100, 100, 100]), tensor([5, 6, 7, 8]))
    """

    shown = ("mask_id", "probability", "ignore_index")

    def __init__(
        self,
        mask_id: int,
        probability: float = 0.2,
        *,
        ignore_index: int = -100,
        seed: int = 0,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(seed, device)
        if not 0 <= probability <= 1:
            raise ValueError(f"probability: expected a number in [0, 1], got {probability}")
        self.mask_id, self.probability, self.ignore_index = mask_id, probability, ignore_index

    def forward(self, items: JaggedTensor) -> MaskedItems:
        """Return the items with some hidden, and those as targets."""
        values = items.values()
        if values.dim() != 1:
            raise ValueError(f"items: expected ids [sum L], got values of shape {list(values.shape)}; pass ids, not embeddings")
        numbers = drawn_negatives(Draw("uniform", 1, self.next_seed() ^ _SALT), values.shape[0], _NUMBERS)[:, 0]
        hidden = numbers < round(self.probability * _NUMBERS)
        return MaskedItems(
            with_values(items, torch.where(hidden, self.mask_id, values)), torch.where(hidden, values, self.ignore_index)
        )
