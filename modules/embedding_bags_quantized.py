"""Pooled embeddings of quantised tables, for inference."""

from __future__ import annotations

import os

import torch
from torch import Tensor
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from jagged.modules.bag_collection import BagCollection
from jagged.modules.embedding_bags import check_tables
from jagged.modules.quantized_tables import QuantizedPart, QuantizedTables, of_bytes, output_dtype_of, write_cached_back
from jagged.ops import BagPlan, PlanMismatch


class QuantizedEmbeddingBagCollection(QuantizedTables, BagCollection):
    """A collection of embedding bags whose tables have 8 bits a number, and a scale and a bias for each row; for inference.

    `from_float` makes one of a `ScheduledEmbeddingBagCollection` or of TorchRec's `EmbeddingBagCollection`, and so does PyTorch's
    `quantize_dynamic`, or TorchRec's `quantize_inference_model`, where its mapping names this class. Takes and gives what the
    float collection does, in one launch for tables of all data types. All tables are in two buffers: `weights`, a byte for each
    number, and `scales`, `[rows of all tables, 2]` in float32, which `.half()` and the like leave as they are.

    Args:
        tables: as of `ScheduledEmbeddingBagCollection`; the data type counts for nothing. The rows are zeros, to be loaded.
        is_weighted: every id has a weight.
        device: where tables are; `"meta"` allocates nothing. None: the default device.
        output_dtype: of the pooled embeddings.
        plan: schedules, or their file, as of `ScheduledEmbeddingBagCollection`.
        plan_mismatch: what a plan for tables of other shapes or for another GPU does.

    Raises:
        ValueError: no tables, two of one name, another pooling, weighted means, a plan that does not fit; in forward, keys that
            are missing, batches of several sizes without inverse indices, weights that want a gradient.
        TypeError: another output dtype.

    Shape:
        KeyedJaggedTensor in, KeyedTensor `[B, sum of the features' widths]` out, in the order of the tables and their features.

    Example:
        >>> import torch
        >>> from torchrec.modules.embedding_configs import EmbeddingBagConfig
        >>> from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
        >>> from jagged.modules import QuantizedEmbeddingBagCollection, ScheduledEmbeddingBagCollection
        >>> bags = ScheduledEmbeddingBagCollection([
        ...     EmbeddingBagConfig(name="item", embedding_dim=8, num_embeddings=100, feature_names=["clicked"]),
        ... ])
        >>> small = QuantizedEmbeddingBagCollection.from_float(bags)
        >>> features = KeyedJaggedTensor(keys=["clicked"], values=torch.tensor([5, 99, 7]), lengths=torch.tensor([2, 1]))
        >>> small(features).values().shape, sum(buffer.nbytes for buffer in small.buffers())
        (torch.Size([2, 8]), 1600)
    """

    _parts: list[QuantizedPart]

    def __init__(
        self,
        tables: list[EmbeddingBagConfig],
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        *,
        output_dtype: torch.dtype = torch.float32,
        plan: BagPlan | str | os.PathLike[str] | None = None,
        plan_mismatch: PlanMismatch = "refuse",
    ) -> None:
        super().__init__()
        check_tables(tables, is_weighted, output_dtype, of_any_type=True)
        self._describe(of_bytes(tables), is_weighted, output_dtype)
        tables = self._embedding_bag_configs
        self._make_tables(
            tables, device, means=tuple(table.pooling == PoolingType.MEAN for table in tables for _ in table.feature_names)
        )
        self._places = [(0, place) for place in range(len(self._widths))]
        self._plan_with(plan, plan_mismatch)

    @classmethod
    def from_float(
        cls, module: EmbeddingBagCollectionInterface, use_precomputed_fake_quant: bool = False
    ) -> QuantizedEmbeddingBagCollection:
        """Quantise the tables of a collection, one after the other; it stays as it is.

        Args:
            module: a `ScheduledEmbeddingBagCollection`, whose plan goes on, or an `EmbeddingBagCollection`. Where it has a
                `qconfig`, as `quantize_dynamic` gives it, the dtype of its activation is that of the pooled embeddings.
            use_precomputed_fake_quant: what `quantize_dynamic` hands over; nothing here is quantised before.

        Raises:
            ValueError: a `qconfig` of other weights than 8 bits, for a table or for all.
        """
        write_cached_back(module)
        configs = module.embedding_bag_configs()
        made = cls(configs, module.is_weighted(), module.device, output_dtype=output_dtype_of(module))
        made._plan, made._mismatch = getattr(module, "_plan", None), getattr(module, "_mismatch", made._mismatch)
        made._quantise(module.embedding_bags[table.name].weight for table in configs)
        return made.eval()

    def _pooled(self, number: int, features: KeyedJaggedTensor) -> Tensor:
        ids, offsets, weights, batch_sizes = self._lookups_of(self._parts[number], features)
        return self._lookup(
            number,
            ids,
            offsets,
            self._output_dtype,
            per_sample_weights=weights,
            batch_sizes=batch_sizes,
            schedules=None if self._plan is None else self._schedules_on(self.device)[number],
        )

    def extra_repr(self) -> str:
        """Show the options."""
        return self._shown(f"tables={len(self._embedding_bag_configs)}")
