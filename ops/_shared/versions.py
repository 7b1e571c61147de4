"""Tensors that are read again after a backward pass, which nobody may have written to meanwhile."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


def apart_from(rows: Tensor, table: Tensor) -> Tensor:
    """Return rows that an update of the table, or of others in its storage, leaves as they are."""
    is_apart = rows.untyped_storage().data_ptr() != table.untyped_storage().data_ptr()
    return rows if is_apart else rows.clone()


class Unchanged:
    """Tensors as they are now.

    Args:
        tensors: by the names that errors have.
    """

    def __init__(self, tensors: Mapping[str, Tensor | None]) -> None:
        self._tensors = {name: (tensor, tensor._version) for name, tensor in tensors.items() if tensor is not None}

    def check(self) -> None:
        """Refuse what has been written to in place.

        Raises:
            RuntimeError: with its name.
        """
        for name, (tensor, version) in self._tensors.items():
            if tensor._version != version:
                raise RuntimeError(
                    f"{name}: a table's gradient that its update makes needs it as the loss read it, but it has been written to "
                    "in place since backward; update the table before, or give the loss a tensor of its own"
                )
