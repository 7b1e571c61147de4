"""The items of a sparse gradient: those that rows drew and their targets, in as many places as shapes allow for."""

from __future__ import annotations

import torch
from torch import Tensor


def is_first_of_item(keys: Tensor, num_items: int) -> Tensor:
    """Tell which of sorted keys are the first of their item; keys from `num_items` on are no item."""
    return (keys.diff(prepend=keys.new_full((1,), -1)) != 0) & (keys < num_items)


def compacted(items: Tensor, is_chosen: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the chosen of ascending items, `[count]` int64, and for each item how many are chosen up to it, less one.

    Places that are left repeat the last of them, or item 0 if there is none.
    """
    place = is_chosen.cumsum(0) - 1
    chosen = items.new_zeros(count + 1, dtype=torch.int64)
    if items.shape[0]:
        chosen += torch.where(is_chosen, items, 0).amax()
    # What is not chosen goes to a place that is cut off.
    return chosen.scatter_(0, torch.where(is_chosen, place, count), items.to(torch.int64))[:count], place
