"""A head of many labels under DistributedDataParallel, beside one process that has all rows; run by `test_group_sparse_head`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.sparse.jagged_tensor import JaggedTensor

from jagged.modules import GroupSparseHead
from tests.processes import fork

PROCESSES, ROWS, LABELS = 2, 8, 23


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        counts = torch.randint(0, 100, (LABELS,))
        self.body = nn.Linear(6, 12, dtype=torch.float64)
        self.head = GroupSparseHead(12, counts, 100, fan_in=4, group_size=5, head=3, dtype=torch.float64)

    def forward(self, features: torch.Tensor, positives: JaggedTensor) -> torch.Tensor:
        loss: torch.Tensor = self.head(self.body(features), positives)
        return loss


def trained(model: nn.Module, whole: Model, rows: slice) -> dict[str, torch.Tensor]:
    """The state after 30 steps on some rows of every batch, with new inputs in every tenth."""
    optimizer = torch.optim.Adam(whole.parameters(), 0.01)
    generator = torch.Generator().manual_seed(1)
    for step in range(1, 31):
        features = torch.randn(ROWS, 6, generator=generator, dtype=torch.float64)
        labels = torch.randint(0, LABELS, (ROWS, 2), generator=generator)
        mine = labels[rows]
        positives = JaggedTensor(values=mine.flatten(), offsets=torch.arange(mine.shape[0] + 1) * 2)
        optimizer.zero_grad()
        model(features[rows], positives).backward()
        optimizer.step()
        if step % 10 == 0:
            # Once by the gradients of both halves of the batch.
            kind: dict[str, Any] = {"by": "gradient", "batch": (whole.body(features[rows]), positives)} if step == 20 else {}
            whole.head.rewire(0.3, step=step, protected=10, optimizer=optimizer, new_weights="uniform", **kind)
    return whole.state_dict()


def main() -> None:
    root = Path(sys.argv[1])
    torch.set_num_threads(1)

    alone = Model()
    expected = trained(alone, alone, slice(0, ROWS))

    def work() -> None:
        rank, size = dist.get_rank(), ROWS // PROCESSES
        split = Model()
        found = trained(DistributedDataParallel(split), split, slice(rank * size, (rank + 1) * size))
        differences = {name: float((found[name].double() - value.double()).abs().max()) for name, value in expected.items()}
        changed = int((split.head.supports != Model().head.supports).sum())
        (root / str(rank)).write_text(json.dumps({"differences": differences, "changed": changed}))

    fork(work, PROCESSES, root / "store")
    print(json.dumps([json.loads((root / str(rank)).read_text()) for rank in range(PROCESSES)]))


if __name__ == "__main__":
    main()
