"""A table whose rows are split over processes: who holds which, the exchange between them, and the lookup."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from jagged.modules.jagged_module import JaggedModule
from jagged.modules.jagged_tensor import with_values


class RowSplit:
    """Which process of a group holds which rows of a table, and how they exchange rows.

    Each holds a block of rows. All methods but `block` are collective: every process of the group must call them, in the same
    order, with however few rows.

    Args:
        num_rows: of the whole table.
        group: exchanges tensors on the device that they are on.
        host_group: exchanges tensors on the CPU, so that no count waits for a GPU; on the CPU the same group.
        blocks: the rows of each process, by rank, which are all rows together; None: blocks of ceil(num_rows / processes) rows
            in the order of their ranks, of which the last ones hold fewer, or none.

    Attributes:
        rank, world_size: of this process in the group.
    """

    def __init__(
        self,
        num_rows: int,
        group: dist.ProcessGroup,
        host_group: dist.ProcessGroup,
        blocks: Sequence[slice] | None = None,
    ) -> None:
        self.num_rows = num_rows
        self.group, self.host_group = group, host_group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        longest = -(-num_rows // self.world_size)
        bounds = [min(rank * longest, num_rows) for rank in range(self.world_size + 1)]
        self._blocks = [slice(*pair) for pair in pairwise(bounds)] if blocks is None else list(blocks)

    def block(self, rank: int | None = None) -> slice:
        """The rows of a process, by default of this one."""
        return self._blocks[self.rank if rank is None else rank]

    def counts(self, count: int) -> list[int]:
        """The counts that the processes gave, by rank."""
        everyones = [torch.empty(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(everyones, torch.tensor([count]), group=self.host_group)
        return [int(one) for one in everyones]

    def gather(self, values: Tensor, counts: list[int]) -> Tensor:
        """The rows `[n, *F]` of all processes, one after the other; differentiable.

        Args:
            values: this process's.
            counts: of rows, from `counts`.

        Returns:
            `[sum(counts), *F]`.
        """
        copies = values.expand(self.world_size, *values.shape).flatten(0, 1)
        return _Exchange.apply(copies, [len(values)] * self.world_size, counts, self.group)  # type: ignore[no-untyped-call]

    def scatter(self, values: Tensor, counts: list[int]) -> Tensor:
        """What each process has for the rows of this one, when each has a row for every row that `gather` gave; differentiable.

        Args:
            values: `[sum(counts), *F]`.
            counts: as for `gather`.

        Returns:
            `[processes, n, *F]`, in a fixed order: sums over it are deterministic.
        """
        count = counts[self.rank]
        parts = _Exchange.apply(values, counts, [count] * self.world_size, self.group)  # type: ignore[no-untyped-call]
        return parts.view(self.world_size, count, *values.shape[1:])

    def look_up(self, block: Tensor, ids: Tensor) -> Tensor:
        """The table's rows `[n, D]` of ids `[n]`, from whoever holds them; differentiable.

        The gradient of a block is that of the sum of all processes' losses, summed in a fixed order. Ids outside the table give
        zeros.

        Args:
            block: `[rows of this process, D]`.
            ids: this process's.
        """
        counts = self.counts(len(ids))
        local = self.gather(ids, counts) - self.block().start
        if len(block):
            outside = (local < 0) | (local >= len(block))
            # Ids of other processes are spread over the rows: on one row alone, the backward would add all their zeros up.
            rows = nn.functional.embedding(local % len(block), block).masked_fill_(outside[:, None], 0)
        else:
            # The gradient still has to be an empty one, and not None.
            rows = block.sum(0).expand(len(local), -1)
        return self.scatter(rows, counts).sum(0)

    def whole(self, block: Tensor) -> Tensor:
        """The table `[num_rows, *F]`, on every process's device, from all blocks."""
        table = block.new_empty(self.num_rows, *block.shape[1:])
        table[self.block()] = block
        for rank in range(self.world_size):
            rows = table[self.block(rank)]
            if len(rows):
                dist.broadcast(rows, group=self.group, group_src=rank)
        return table

    def collect(self, block: Tensor) -> Tensor | None:
        """The table `[num_rows, *F]` on the CPU of the first process, from all blocks; None in the others."""
        block = block.detach().cpu().contiguous()
        if self.rank:
            if len(block):
                dist.send(block, group=self.host_group, group_dst=0)
            return None
        table = block.new_empty(self.num_rows, *block.shape[1:])
        table[self.block()] = block
        for rank in range(1, self.world_size):
            rows = table[self.block(rank)]
            if len(rows):
                dist.recv(rows, group=self.host_group, group_src=rank)
        return table

    def __repr__(self) -> str:
        rows = self.block()
        return f"rows {rows.start}..{rows.stop} of {self.num_rows}, process {self.rank} of {self.world_size}"


class _Exchange(torch.autograd.Function):
    """Rows to and from every process, grouped by rank; backward sends the gradients the way back."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchange(values, sent, received, group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _exchange(grad, ctx.received, ctx.sent, ctx.group), None, None, None


def _exchange(values: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    output = values.new_empty(sum(received), *values.shape[1:])
    dist.all_to_all_single(output, values.contiguous(), received, sent, group=group)
    return output


class SplitEmbeddingCollection(JaggedModule):
    """An `EmbeddingCollection` of one table of which each process of a group holds a block of rows; looked up together.

    Each process gathers the ids of all, finds those whose rows it holds, and sends the rows to the process that asked. Backward
    sends the gradients back and sums them, deterministically, into the rows, whose gradient is that of the sum of all
    processes' losses. Every process must call, and call backward, with however few ids.

    Parameter names are those of the whole collection.

    Args:
        whole: of one table, the same in every process; the block is a copy.
        group, host_group: as for `RowSplit`.

    Attributes:
        split: of the table's rows.

    Raises:
        ValueError: `whole` has several tables.

    Shape:
        KeyedJaggedTensor in, of no samples too; a JaggedTensor for each feature out, with values `[sum L, D]` in float32, as
        torchrec's. Ids outside the table give zeros.
    """

    def __init__(self, whole: EmbeddingCollection, group: dist.ProcessGroup, host_group: dist.ProcessGroup) -> None:
        super().__init__()
        if len(whole.embedding_configs()) != 1:
            raise ValueError(f"whole: expected a collection of one table, got {len(whole.embedding_configs())}")
        self._config = whole.embedding_configs()[0]
        weight = whole.embeddings[self._config.name].weight.detach()
        self.split = RowSplit(len(weight), group, host_group)
        block = weight[self.split.block()].clone()
        self.embeddings = nn.ModuleDict({self._config.name: nn.Embedding(len(block), block.shape[1], _weight=block)})

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Return the embeddings of every feature's ids."""
        found = {}
        for name in self._config.feature_names:
            feature = features[name]
            found[name] = with_values(feature, self.split.look_up(self._weight, feature.values()).float())
        return found

    def whole(self) -> EmbeddingCollection:
        """The collection with all rows, on every process's device, without gradients; every process must call."""
        whole = EmbeddingCollection(tables=[self._config], device=torch.device("meta"))
        table = self.split.whole(self._weight.detach())
        whole.embeddings[self._config.name].weight = nn.Parameter(table, requires_grad=False)
        return whole

    def extra_repr(self) -> str:
        """Show the split."""
        return repr(self.split)

    @property
    def _weight(self) -> Tensor:
        return self.embeddings[self._config.name].weight  # type: ignore[return-value]
