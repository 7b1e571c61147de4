"""Pooled embeddings of quantised tables, for inference."""

from __future__ import annotations

import copy
import os
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from jagged.modules.bag_collection import BagCollection, KeyOrder
from jagged.modules.embedding_bags import OUTPUT_DTYPES, check_tables
from jagged.ops import BagLayout, BagPlan, PlanMismatch, embedding_bags, quantize_rows

# What a qconfig may name; all mean 8 bits for each number.
BYTES = (torch.int8, torch.uint8, torch.qint8, torch.quint8)


class _Part(NamedTuple):
    layout: BagLayout
    features: list[str]
    order: KeyOrder


class QuantizedEmbeddingBagCollection(BagCollection):
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

    weights: Tensor
    scales: Tensor

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
        # The caller's are those of float tables.
        tables = copy.deepcopy(tables)
        for table in tables:
            table.data_type = DataType.INT8
        self._describe(tables, is_weighted, output_dtype)
        layout = BagLayout(
            rows=tuple(table.num_embeddings for table in tables),
            widths=tuple(table.embedding_dim for table in tables),
            tables=tuple(i for i, table in enumerate(tables) for _ in table.feature_names),
            means=tuple(table.pooling == PoolingType.MEAN for table in tables for _ in table.feature_names),
        )
        features = [name for table in tables for name in table.feature_names]
        self._parts = [_Part(layout, features, KeyOrder(features))]
        self._places = [(0, place) for place in range(len(features))]
        self.register_buffer("weights", torch.zeros(layout.num_elements, dtype=torch.uint8, device=device))
        self.register_buffer("scales", torch.zeros(layout.first_rows[-1], 2, dtype=torch.float32, device=device))
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
        qconfig = getattr(module, "qconfig", None)
        output_dtype = getattr(module, "_output_dtype", torch.float32)
        if qconfig is not None:
            output_dtype = _output_dtype_of(qconfig)
        configs = module.embedding_bag_configs()
        made = cls(configs, module.is_weighted(), module.device, output_dtype=output_dtype)
        made._plan, made._mismatch = getattr(module, "_plan", None), getattr(module, "_mismatch", made._mismatch)
        layout = made._parts[0].layout
        parts = zip(configs, layout.views(made.weights), made.scales.split(layout.rows), strict=True)
        for table, weights, scales in parts:
            weight = module.embedding_bags[table.name].weight.detach()
            of_table = BagLayout((table.num_embeddings,), (table.embedding_dim,))
            for own, new in zip((weights, scales), quantize_rows(weight.reshape(-1), of_table), strict=True):
                own.copy_(new.view(own.shape))
        return made.eval()

    def _pooled(self, number: int, features: KeyedJaggedTensor) -> Tensor:
        part, dtype = self._parts[number], self._output_dtype
        ids, offsets, weights, batch_sizes = self._lookups(part, features)
        pooled = embedding_bags(
            self.weights,
            part.layout,
            ids,
            offsets,
            scales=self.scales,
            per_sample_weights=weights,
            batch_sizes=batch_sizes,
            output_dtype=torch.float32 if dtype == torch.float64 else dtype,
            schedules=None if self._plan is None else self._schedules_on(self.weights.device)[number],
        )
        return pooled if pooled.dtype == dtype else pooled.to(dtype)

    @property
    def device(self) -> torch.device:
        """Where the tables are."""
        return self.weights.device

    def _apply(self, fn: Any, recurse: bool = True) -> QuantizedEmbeddingBagCollection:
        # A model's `.half()` moves nothing, and scales in less than float32 would add an error of their own.
        super()._apply(lambda tensor: _as_before(tensor, fn(tensor)), recurse)
        return self

    def extra_repr(self) -> str:
        """Show the options."""
        return self._shown(f"tables={len(self._embedding_bag_configs)}")


def _as_before(tensor: Tensor, changed: Tensor) -> Tensor:
    """What a function made of a tensor, in the tensor's dtype and without what another one has lost."""
    return changed if changed.dtype == tensor.dtype else tensor.to(changed.device)


def _output_dtype_of(qconfig: Any) -> torch.dtype:
    """The dtype of the pooled embeddings; refuse another one of the weights than bytes."""
    of_tables = {"all tables": qconfig.weight().dtype, **(getattr(qconfig, "per_table_weight_dtype", None) or {})}
    for name, of_weights in of_tables.items():
        if of_weights not in BYTES:
            raise ValueError(f"qconfig: expected weights of torch.int8, got {of_weights} for {name}")
    dtype: torch.dtype = qconfig.activation().dtype
    return dtype if dtype in OUTPUT_DTYPES else torch.float32
