"""Embeddings of quantised tables, not pooled, for inference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollectionInterface

from jagged.modules.embedding_sequences import check_tables
from jagged.modules.quantized_tables import QuantizedPart, QuantizedTables, of_bytes, output_dtype_of, write_cached_back
from jagged.modules.sequence_collection import SequenceCollection


class QuantizedEmbeddingCollection(QuantizedTables, SequenceCollection):
    """A collection of embeddings whose tables have 8 bits a number, and a scale and a bias for each row; for inference.

    `from_float` makes one of a `ScheduledEmbeddingCollection` or of TorchRec's `EmbeddingCollection`, and so does PyTorch's
    `quantize_dynamic`, or TorchRec's `quantize_inference_model`, where its mapping names this class. Takes and gives what the
    float collection does, in one launch for tables of all data types. All tables are in two buffers: `weights`, a byte for each
    number, and `scales`, `[rows of all tables, 2]` in float32, which `.half()` and the like leave as they are.

    Where the KeyedJaggedTensor has one key, forward never waits for the device. With several it has to know how many ids each has
    (`features.sync()` ahead of time).

    Args:
        tables: as of `ScheduledEmbeddingCollection`; the data type counts for nothing. The rows are zeros, to be loaded.
        device: where tables are; `"meta"` allocates nothing. None: the default device.
        need_indices: the JaggedTensors' weights are the ids.
        output_dtype: of the rows.

    Raises:
        ValueError: no tables, two of one name, several widths; in forward, keys that are missing, ids out of range and offsets
            that are wrong where they are on the CPU.
        TypeError: another output dtype.

    Shape:
        KeyedJaggedTensor of int32 or int64 ids in, also with a batch size for each key and of no samples; keys that no table
        reads are ignored. For each feature a JaggedTensor of rows `[its ids, embedding_dim]` out, in the order of the tables and
        of their features; a feature of several tables is named `feature@table`.

    Example:
        >>> import torch
        >>> from torchrec.modules.embedding_configs import EmbeddingConfig
        >>> from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
        >>> from jagged.modules import QuantizedEmbeddingCollection, ScheduledEmbeddingCollection
        >>> rows = ScheduledEmbeddingCollection([
        ...     EmbeddingConfig(name="item", embedding_dim=8, num_embeddings=100, feature_names=["clicked"]),
        ... ])
        >>> small = QuantizedEmbeddingCollection.from_float(rows)
        >>> features = KeyedJaggedTensor(keys=["clicked"], values=torch.tensor([5, 99, 7]), lengths=torch.tensor([2, 1]))
        >>> small(features)["clicked"].values().shape, sum(buffer.nbytes for buffer in small.buffers())
        (torch.Size([3, 8]), 1600)
    """

    _parts: list[QuantizedPart]

    def __init__(
        self,
        tables: list[EmbeddingConfig],
        device: torch.device | str | None = None,
        need_indices: bool = False,
        *,
        output_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        check_tables(tables, output_dtype, of_any_type=True)
        self._describe(of_bytes(tables), need_indices, output_dtype)
        self._names = [[name for names in self._names_by_table for name in names]]
        self._make_tables(self._embedding_configs, device, sequences=(True,) * len(self._names[0]))

    @classmethod
    def from_float(
        cls, module: EmbeddingCollectionInterface, use_precomputed_fake_quant: bool = False
    ) -> QuantizedEmbeddingCollection:
        """Quantise the tables of a collection, one after the other; it stays as it is.

        Args:
            module: a `ScheduledEmbeddingCollection` or an `EmbeddingCollection`. Where it has a `qconfig`, as `quantize_dynamic`
                gives it, the dtype of its activation is that of the rows.
            use_precomputed_fake_quant: what `quantize_dynamic` hands over; nothing here is quantised before.

        Raises:
            ValueError: a `qconfig` of other weights than 8 bits, for a table or for all.
        """
        write_cached_back(module)
        configs = module.embedding_configs()
        made = cls(configs, module.device, module.need_indices(), output_dtype=output_dtype_of(module))
        made._quantise(module.embeddings[table.name].weight for table in configs)
        return made.eval()

    def _looked_up(self, number: int, ids: Tensor, offsets: Tensor, **options: Any) -> Tensor:
        return self._lookup(number, ids, offsets, self._output_dtype, **options)

    def extra_repr(self) -> str:
        """Show the options."""
        return self._shown(f"tables={len(self._embedding_configs)}")
