"""Updates of tables that wait for an optimizer's step: for clipping by a norm, and for several batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from jagged.modules.embedding_bags_shards import ShardedTables
from jagged.modules.trained_tables import TrainedTables
from jagged.ops import JointUpdate


class HeldUpdates:
    """Hold back what optimizers in the backward pass do to a model's tables until `step`.

    Calls of backward then keep the gradients of what lookups and heads gave them, which are small, and make none of the tables.
    `step` updates each row that they name once, by its sum over all calls since the last step.

    Where the collections are sharded, it is the shards of this process that are held, none perhaps, and `norm` is theirs: who
    clips by it adds the squares up over the processes. Copies of data-parallel tables stand in each of these norms. A process
    skips what is not finite in its own shards: who wants all to skip it asks `is_finite`, and gives all a scale of NaN.

    Args:
        model: with `ScheduledEmbeddingBagCollection` and `ScheduledEmbeddingCollection` modules, in it or itself, that have an
            optimizer, sharded or not.

    Raises:
        ValueError: there are none, and nothing is sharded.

    Example:
        >>> import torch
        >>> from torchrec.modules.embedding_configs import EmbeddingConfig
        >>> from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
        >>> from jagged.modules import HeldUpdates, ScheduledEmbeddingCollection
        >>> config = EmbeddingConfig(name="item", embedding_dim=4, num_embeddings=10, feature_names=["history"])
        >>> tables = ScheduledEmbeddingCollection([config], optimizer="adam", optimizer_options={"learning_rate": 0.1})
        >>> held = HeldUpdates(tables)
        >>> for ids in ([3, 5], [5, 7, 8]):  # two batches, one update
        ...     history = KeyedJaggedTensor(keys=["history"], values=torch.tensor(ids), lengths=torch.tensor([len(ids)]))
        ...     tables(history)["history"].values().sum().backward()
        >>> norm = held.norm()  # row 5 has 2, the others have 1
        >>> round(float(norm) ** 2, 3)
        28.0
        >>> held.step(scale=(1.0 / norm).clamp(max=1.0))
        tensor(True)
    """

    def __init__(self, model: nn.Module) -> None:
        found: list[Any] = [part.tables for of in model.modules() if isinstance(of, TrainedTables) for part in of._parts]
        sharded = [of for of in model.modules() if isinstance(of, ShardedTables)]
        found += [storage for of in sharded for storage in of.storages]
        self._storages = [storage for storage in dict.fromkeys(found) if storage.optimizer is not None]
        if not self._storages and not sharded:
            raise ValueError("model: expected tables with an optimizer, got none; give a collection one by optimizer")
        for storage in self._storages:
            storage.hold(True)

    @property
    def _updates(self) -> list[JointUpdate]:
        # Moved or loaded, tables have others.
        return [storage.updates for storage in self._storages if storage.updates is not None]

    def norm(self) -> Tensor:
        """Return the L2 norm of the tables' gradients that are held, each row's summed: `[]` float32."""
        norms = [of.norm() for of in self._updates]
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())

    @property
    def norm_bytes(self) -> int | None:
        """Bytes that `norm` takes beside the gradients that are held, which a CUDA graph that it is captured in keeps; None where
        a table's gradient is in slices.
        """
        found = [of.norm_bytes for of in self._updates]
        return None if None in found else sum(of for of in found if of is not None)

    def step(self, scale: Tensor | None = None) -> Tensor:
        """Update the tables.

        Args:
            scale: `[]`, what all gradients are multiplied by.

        Returns:
            Tensor: `[]` bool on the device, whether the update was made. Where one of the gradients, the norm that was asked for
            or the scale is not finite, tables and optimizers stay as they are.
        """
        is_finite = self.is_finite()
        if not (updates := self._updates):
            return is_finite
        # What one may not do the others do not.
        scale = torch.ones((), device=is_finite.device) if scale is None else scale
        scale = torch.where(is_finite, scale, torch.nan)
        return torch.stack([of.step(scale) for of in updates]).all()

    def is_finite(self) -> Tensor:
        """Return whether the gradients that are held are finite, and the norm that was asked for: `[]` bool on the device."""
        found = [of.is_finite() for of in self._updates]
        return torch.stack(found).all() if found else torch.ones((), dtype=torch.bool)

    def take(self) -> list[Any]:
        """Take what is held, to give it back: of a CUDA graph, whose replays write the same tensors.

        Where `norm` was captured with them, its replays make it, too.
        """
        return [of.take() for of in self._updates]

    def give(self, taken: list[Any]) -> None:
        """Hold what was taken."""
        for of, one in zip(self._updates, taken, strict=True):
            of.give(one)

    def drop(self) -> None:
        """Forget the gradients that are held."""
        for of in self._updates:
            of.drop()

    def release(self) -> None:
        """Let backward update the tables by itself again; what is held is dropped."""
        for storage in self._storages:
            storage.hold(False)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        for storage in self._storages:
            storage.hold(True)
