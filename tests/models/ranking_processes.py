"""The ranking model sharded over two gloo processes in TorchRec's pipeline, against one process. `test_ranking.py` starts it.

Usage: `python -m tests.models.ranking_processes DIRECTORY`; prints JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan, data_parallel, row_wise, table_wise
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter

from jagged.models import DIN, DLRM, DLRMHSTU, DCNv2, MixtureModel, RankingModel, RequestModel, TaskOutput, WukongModel
from jagged.modules import JaggedModule, ScheduledEmbeddingBagCollectionSharder
from tests.models.shops import COLUMNS, SHARED, shop
from tests.processes import fork

PROCESSES, STEPS, RATE = 2, 8, 0.5
CASES: dict[str, dict[str, Any]] = {
    "dcn": {"table_dims": {"item": 12, "tags": 4}, "conditional": {"buy": "click"}},
    "dot": {"cross": "dot", "recompute": True},
    "dlrm": {"top_sizes": (12,), "conditional": {"buy": "click"}},
    "dcnv2": {"table_dims": {"item": 12, "tags": 4}, "cross_rank": 3, "cross_experts": 2, "layer_sizes": (12,)},
    "wukong": {"num_fm_tokens": 3, "num_linear_tokens": 2, "rank": 2, "hidden_sizes": (6,), "top_sizes": (7,)},
    "mmoe": {"experts": "ple", "num_experts": 2, "expert_sizes": (6,)},
    "dlrm-hstu": {"layer_sizes": (12,), "conditional": {"buy": "click"}, "recompute": True},
    "din": {"layer_sizes": (12,), "attention_sizes": (6, 4)},
    # With lists of the candidates that share tables with the request's.
    "shared lists": {"table_dims": {"item": 12, "tags": 4}, "cross_rank": 3},
}
CLASSES: dict[str, type[RequestModel]] = {
    "dlrm": DLRM, "dcnv2": DCNv2, "wukong": WukongModel, "mmoe": MixtureModel, "dlrm-hstu": DLRMHSTU, "din": DIN,
}  # fmt: skip


class Share(JaggedModule):
    """The loss so weighted that processes average to the mean over all their rows; it talks, so it is a leaf."""

    def forward(self, output: TaskOutput) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        rows = output.rows()
        total = rows.clone()
        dist.all_reduce(total)
        logits = torch.stack([of.logits.detach() for of in output.scores.values()])
        loss = output.loss * rows * PROCESSES / total
        return loss, (loss.detach() / PROCESSES, logits)


class Shared(nn.Module):
    def __init__(self, model: RequestModel) -> None:
        super().__init__()
        self.model, self.share = model, Share()

    def forward(self, batch: Any) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        return self.share(self.model(batch))  # type: ignore[no-any-return]


def model_of(root: Path, name: str) -> RequestModel:
    model = CLASSES.get(name, RankingModel)(**torch.load(root / f"{name}.config", weights_only=False))
    model.load_state_dict(torch.load(root / f"{name}.weights"))
    return model


def prepare(root: Path) -> None:
    """Batches of each process and of both together, and weights to begin with. DuckDB has threads, so in a child."""
    for name, options in CASES.items():
        split = shop(*((*COLUMNS, *SHARED) if name == "shared lists" else ()), beside=True, requests=90)
        batches = []
        for step in range(STEPS):
            # Of other sizes in every process, and some without any history.
            own = [range(8 * step, 8 * step + 3), range(8 * step + 3, 8 * step + 8)]
            batches.append([split.train.gather(places) for places in (*own, range(8 * step, 8 * step + 8))])
        torch.save(batches, root / f"{name}.batches")
        torch.manual_seed(0)
        sizes = {} if name in CLASSES else {"layer_sizes": (12, 6)}
        model = CLASSES.get(name, RankingModel).of(split, embedding_dim=8, **sizes, **options)
        torch.save(model.config, root / f"{name}.config")
        torch.save(model.state_dict(), root / f"{name}.weights")


def alone(root: Path, name: str) -> None:
    model, losses = model_of(root, name), []
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for *_, batch in torch.load(root / f"{name}.batches", weights_only=False):
        optimizer.zero_grad()
        loss, scores = model(batch)
        loss.backward()
        optimizer.step()
        losses.append((loss.detach(), torch.stack([of.logits.detach() for of in scores.values()])))
    torch.save(losses, root / f"{name}.alone")


def together(root: Path, name: str) -> None:
    model = Shared(model_of(root, name))
    sharders = [ScheduledEmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]
    plans = {}
    for number, (path, of) in enumerate([*model.model.bags.items(), *enumerate(model.model.sequences)]):
        is_bags = number < len(model.model.bags)
        # Each way in turn. FBGEMM's dense kernel on the CPU pools what should stay rows, so these tables have fused ones.
        ways = [table_wise(rank=0), row_wise(), table_wise(rank=1), column_wise(ranks=[0, 1]), data_parallel()]
        if not is_bags:
            ways = [table_wise(rank=1, compute_kernel="fused"), row_wise(compute_kernel="fused")]
            apply_optimizer_in_backward(torch.optim.SGD, of.parameters(), {"lr": RATE})
        configs = of.embedding_bag_configs() if is_bags else of.embedding_configs()
        chosen = {config.name: ways[(number + place) % len(ways)] for place, config in enumerate(configs)}
        plans[f"model.{'bags' if is_bags else 'sequences'}.{path}"] = construct_module_sharding_plan(
            of, chosen, sharders[not is_bags], PROCESSES, PROCESSES, "cpu"
        )
    dmp = DistributedModelParallel(model, device=torch.device("cpu"), plan=ShardingPlan(plans), sharders=sharders)
    optimizer = torch.optim.SGD(dict(in_backward_optimizer_filter(dmp.named_parameters())).values(), lr=RATE)
    pipeline = TrainPipelineSparseDist(dmp, optimizer, torch.device("cpu"))
    batches = iter([of[dist.get_rank()] for of in torch.load(root / f"{name}.batches", weights_only=False)])
    found = [pipeline.progress(batches) for _ in range(STEPS)]
    pipelined = sorted(module.forward.name for module in pipeline._pipelined_modules)
    torch.save(found, root / f"{name}.{dist.get_rank()}")
    (root / f"{name}.{dist.get_rank()}.json").write_text(json.dumps([pipelined, sorted(plans)]))


def main() -> None:
    root = Path(sys.argv[1])
    torch.set_num_threads(1)
    fork(lambda: prepare(root))
    result: dict[str, Any] = {}
    for name in CASES:
        # Default arguments: a loop's functions would all see its last round.
        fork(lambda name=name: alone(root, name))  # type: ignore[misc]
        fork(lambda name=name: together(root, name), PROCESSES, root / f"{name}.store")  # type: ignore[misc]
        expected = torch.load(root / f"{name}.alone")
        parts = [torch.load(root / f"{name}.{rank}") for rank in range(PROCESSES)]
        pipelined, planned = json.loads((root / f"{name}.0.json").read_text())
        losses = [sum(float(loss) for loss, _ in of) for of in zip(*parts, strict=True)]
        logits = [torch.cat([found for _, found in of], 1) for of in zip(*parts, strict=True)]
        result[name] = {
            "apart": [float((one - two).abs().max()) for one, (_, two) in zip(logits, expected, strict=True)],
            "losses": [losses, [float(loss) for loss, _ in expected]],
            "pipelined": pipelined,
            "planned": planned,
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
