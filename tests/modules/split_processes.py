"""The split head and lookup in three gloo processes against the unsplit ones. A program of its own: `test_split.py` starts it.

Usage: `python -m tests.modules.split_processes DIRECTORY`; prints JSON: by name of a case, the largest differences.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from jagged.modules import (
    CutCrossEntropyHead,
    InBatchSampler,
    LogUniformSampler,
    MixedSampler,
    PopularitySampler,
    RowSplit,
    SampledCrossEntropyHead,
    SplitEmbeddingCollection,
    UniformSampler,
)
from tests.processes import fork

PROCESSES, DIM = 3, 5
# Rows of each process; one has none.
COUNTS = [6, 0, 9]


def jagged(values: Tensor) -> JaggedTensor:
    return JaggedTensor(values=values, offsets=torch.tensor([0, len(values)]))


def own(everyones: Tensor, rank: int) -> Tensor:
    return everyones[sum(COUNTS[:rank]) : sum(COUNTS[: rank + 1])]


def largest(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).abs().max()) if a.numel() else 0.0


def head_differences(items: int, smoothing: float, ignore_index: int) -> dict[str, float]:
    """Of the loss, the scores and the gradients, where the processes' losses count differently."""
    generator = torch.Generator().manual_seed(items)
    weight = torch.randn(items, DIM, dtype=torch.float64, generator=generator)
    hidden = 3 * torch.randn(sum(COUNTS), DIM, dtype=torch.float64, generator=generator)
    targets = torch.randint(items, (sum(COUNTS),), generator=generator)
    targets[::4] = ignore_index
    unsplit = CutCrossEntropyHead(ignore_index=ignore_index, label_smoothing=smoothing)
    whole, states = weight.clone().requires_grad_(), hidden.clone().requires_grad_()
    expected = [unsplit(jagged(own(states, rank)), whole, own(targets, rank)) for rank in range(PROCESSES)]
    sum((rank + 1) * one.loss for rank, one in enumerate(expected)).backward()

    rank = dist.get_rank()
    rows = RowSplit(items, dist.group.WORLD, dist.group.WORLD)
    block, mine = weight[rows.block()].clone().requires_grad_(), own(hidden, rank).clone().requires_grad_()
    split = CutCrossEntropyHead(ignore_index=ignore_index, label_smoothing=smoothing, split=rows)
    found = split(jagged(mine), block, own(targets, rank))
    ((rank + 1) * found.loss).backward()
    return {
        "loss": largest(found.loss, expected[rank].loss),
        "logits": largest(found.logits, expected[rank].logits),
        "hidden": largest(mine.grad, own(states.grad, rank)),
        "weight": largest(block.grad, whole.grad[rows.block()]),
    }


def samplers(items: int) -> dict[str, Any]:
    counts = torch.arange(items) % 5 + 1
    return {
        "uniform": UniformSampler(items, 6, seed=3),
        "uniform, blocks of rows": UniformSampler(items, 6, rows_per_draw=4, seed=3),
        "uniform, without replacement": UniformSampler(items, min(6, items), replacement=False, seed=3),
        "log-uniform, one draw": LogUniformSampler(items, 6, rows_per_draw=None, seed=3),
        "popularity": PopularitySampler(counts, 6, seed=3),
        "in-batch": InBatchSampler(counts),
        "mixed": MixedSampler(InBatchSampler(counts), UniformSampler(items, 6, rows_per_draw=None, seed=3)),
    }


# Of each loss also what it alone has.
SAMPLED: dict[str, dict[str, Any]] = {
    "softmax": {"correction": "both", "temperature": 0.5},
    "refined": {"correction": "negatives"},
    "bce": {"correction": "none", "mask_hits": False},
    "gbce": {"correction": "none"},
}


def sampled_differences(items: int, sampler: str, loss: Any, options: dict[str, Any], ignore_index: int) -> dict[str, float]:
    """Of all processes' rows as one batch; each process's loss counts by its rows."""
    generator = torch.Generator().manual_seed(items)
    weight = torch.randn(items, DIM, dtype=torch.float64, generator=generator)
    hidden = torch.randn(sum(COUNTS), DIM, dtype=torch.float64, generator=generator)
    targets = torch.randint(items, (sum(COUNTS),), generator=generator)
    targets[::4] = ignore_index
    unsplit, split = (
        SampledCrossEntropyHead(samplers(items)[sampler], loss=loss, ignore_index=ignore_index, **options).eval()
        for _ in range(2)
    )
    whole, states = weight.clone().requires_grad_(), hidden.clone().requires_grad_()
    expected = unsplit(jagged(states), whole, targets)
    counted = targets != ignore_index
    (expected.loss * counted.sum()).backward()

    rank = dist.get_rank()
    split.split = rows = RowSplit(items, dist.group.WORLD, dist.group.WORLD)
    block, mine = weight[rows.block()].clone().requires_grad_(), own(hidden, rank).clone().requires_grad_()
    found = split(jagged(mine), block, own(targets, rank))
    part = found.loss * own(counted, rank).sum()
    part.backward()
    total = part.detach().clone()
    dist.all_reduce(total)
    return {
        "loss": largest(total, expected.loss.detach() * counted.sum()),
        "logits": largest(found.logits, own(expected.logits, rank)),
        "hidden": largest(mine.grad, own(states.grad, rank)),
        "weight": largest(block.grad, whole.grad[rows.block()]),
    }


def in_training(dtype: torch.dtype | None) -> dict[str, float]:
    """Under autocast to a dtype, with a checkpoint whose backward pass draws and fetches again, by random seeds of training."""
    generator = torch.Generator().manual_seed(1)
    weight, hidden = torch.randn(40, 16, generator=generator), torch.randn(sum(COUNTS), 16, generator=generator)
    targets = torch.randint(40, (sum(COUNTS),), generator=generator)
    rank, found = dist.get_rank(), []
    rows = RowSplit(40, dist.group.WORLD, dist.group.WORLD)
    for split in (None, rows):
        head = SampledCrossEntropyHead(samplers(40)["mixed"], split=split)
        mine = hidden if split is None else own(hidden, rank)
        states, table = (
            mine.clone().requires_grad_(),
            (weight if split is None else weight[rows.block()]).clone().requires_grad_(),
        )
        of = targets if split is None else own(targets, rank)
        # The first process's random state is that of one process; the others' are theirs.
        torch.manual_seed(0 if split is None else rank)
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = checkpoint(
                lambda *given, head=head, of=of: head(jagged(given[0]), given[1], of).loss, states, table, use_reentrant=False
            )
        (loss * len(of)).backward()
        found.append((states.grad, table.grad))
    (all_states, whole), (states_grad, block) = found
    return {
        "hidden": largest(states_grad, own(all_states, rank)),
        "weight": largest(block, whole[rows.block()]),
        "norm": float(all_states.norm()),
    }


def drawn_alike() -> dict[str, float]:
    """In training, where each process's random numbers are its own, all draw by the first one's seed."""
    torch.manual_seed(dist.get_rank())
    items, drawn = 50, UniformSampler(50, 6, rows_per_draw=None)
    head = SampledCrossEntropyHead(MixedSampler(InBatchSampler(torch.ones(items)), drawn))
    head.split = RowSplit(items, dist.group.WORLD, dist.group.WORLD)
    seeds = [torch.empty(1, dtype=torch.int64) for _ in range(PROCESSES)]
    dist.all_gather(seeds, drawn.next_seed())
    again = drawn.next_seed()
    head.split = None
    alone = [torch.empty(1, dtype=torch.int64) for _ in range(PROCESSES)]
    dist.all_gather(alone, drawn.next_seed())
    return {"seeds": len(set(map(int, seeds))), "alone": len(set(map(int, alone))), "steps": float(again == seeds[0])}


def lookup_differences(items: int) -> dict[str, float]:
    """Of the rows found and of their gradient, integers, so that the order of sums does not matter."""
    generator = torch.Generator().manual_seed(items)
    config = EmbeddingConfig(name="item", embedding_dim=DIM, num_embeddings=items, feature_names=["viewed", "bought"])
    torch.manual_seed(0)
    whole = EmbeddingCollection(tables=[config])
    rank = dist.get_rank()
    split = SplitEmbeddingCollection(whole, dist.group.WORLD, dist.group.WORLD)
    assert split.state_dict().keys() == whole.state_dict().keys()
    assert torch.equal(split.whole().embeddings["item"].weight, whole.embeddings["item"].weight)
    losses, differences = [], {"rows": 0.0}
    ids = torch.randint(items, (2, sum(COUNTS)), generator=generator)
    factors = torch.randint(-9, 9, (sum(COUNTS), DIM), generator=generator).float()
    for other in range(PROCESSES):
        # All samples but the first are empty.
        lengths = torch.tensor(2 * [COUNTS[other], 0, 0])
        features = KeyedJaggedTensor(keys=config.feature_names, values=own(ids.T, other).T.flatten(), lengths=lengths)
        expected = whole(features)
        losses += [(own(factors, other) * one.values()).sum() for one in expected.values()]
        if other == rank:
            found = split(features)
            assert found.keys() == expected.keys()
            for name, one in found.items():
                assert torch.equal(one.offsets(), expected[name].offsets())
                differences["rows"] = max(differences["rows"], largest(one.values(), expected[name].values()))
            sum((own(factors, rank) * one.values()).sum() for one in found.values()).backward()
    sum(losses).backward()
    gradient = whole.embeddings["item"].weight.grad[split.split.block()]
    return {**differences, "gradient": largest(split.embeddings["item"].weight.grad, gradient)}


def target_nowhere() -> dict[str, float]:
    """The loss of the process that has a target outside the catalogue is NaN, as the unsplit head's; the others' are not."""
    rank = dist.get_rank()
    rows = RowSplit(7, dist.group.WORLD, dist.group.WORLD)
    head = CutCrossEntropyHead(split=rows)
    targets = torch.tensor([1, 7 if rank == 1 else 6])
    sampled = SampledCrossEntropyHead(UniformSampler(7, 2), split=rows)
    found = [of(jagged(torch.ones(2, DIM)), torch.ones(7, DIM)[rows.block()], targets) for of in (head, sampled)]
    return {
        "loss": float(any(bool(of.loss.isnan()) != (rank == 1) for of in found)),
        "logits": float(any(of.logits.isnan().tolist() != [False, rank == 1] for of in found)),
    }


def main() -> None:
    root = Path(sys.argv[1])
    torch.set_num_threads(1)

    def work() -> None:
        # Blocks of 6, 6, 5; of 3, 3, 1; of 2, 2, 0; of 1, 0, 0. Item 0 ignored is in a block as well.
        found = {
            f"head of {items} items, smoothing {smoothing}, ignoring {ignored}": head_differences(items, smoothing, ignored)
            for items in (17, 7, 4, 1)
            for smoothing in (0.0, 0.2)
            for ignored in (-100, 0)
        }
        found |= {
            f"{sampler} and {loss} of {items} items, ignoring {ignored}": sampled_differences(
                items, sampler, loss, options, ignored
            )
            for items, ignored in ((40, -100), (4, 0))
            for sampler in samplers(items)
            for loss, options in SAMPLED.items()
            if loss != "gbce" or sampler not in ("in-batch", "mixed")
        }
        found["drawn alike"] = drawn_alike()
        found |= {f"in training, {dtype}": in_training(dtype) for dtype in (None, torch.bfloat16)}
        found |= {f"lookup of {items} items": lookup_differences(items) for items in (17, 7, 4, 1)}
        found["target nowhere"] = target_nowhere()
        (root / str(dist.get_rank())).write_text(json.dumps(found))

    fork(work, PROCESSES, root / "store")
    print(json.dumps([json.loads((root / str(rank)).read_text()) for rank in range(PROCESSES)]))


if __name__ == "__main__":
    main()
