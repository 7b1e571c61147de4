"""SASRec on a real events file: `jagged` beside a plain padded SASRec, quality and time, in one run.

    python -m benchmarks.train_sasrec --data beauty.txt

The settings are the product's defaults; all three have the same layers, widths, dropout, loss, optimizer, batch size, validation
after each epoch and early stopping, in bfloat16 mixed precision on a GPU and float32 on a CPU. `padded` is what people write:
logits of every position, the padding ignored by the loss. `padded_lean` takes the logits of real rows alone, a jagged loss on a
padded body. Both get what favours
them: all batches padded once and kept on the device, torch's fused attention, no checkpoints, no progress, one metric.

    python -m benchmarks.train_sasrec --data beauty.txt --head ce,cce,cce-uniform:64,cce-uniform:1023,gbce

trains with other heads instead: `ce` is `padded`, `cce` is `jagged`, the others are `jagged` with some of the items, as many
a row as stands after the colon or as the settings say. Heads that the result file has from such a machine, such data and
settings stay.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import environment, other_parts, save, seconds_of, spread
from jagged.config import CrossEntropyHead, TrainConfig, merge, parse_assignments
from jagged.data import BatchLoader, SequenceBatch, SequenceDataset, SequencePart, read_events, split_leave_one_out
from jagged.runs.training import train
from tests.reference.sasrec import PaddedSASRec

HEADS: dict[str, dict[str, Any]] = {
    "ce": {},
    "cce": {},
    "cce-uniform": {"type": "sampled"},
    "cce-popularity": {"type": "sampled", "sampler": "popularity", "correction": "none"},
    "in-batch": {"type": "sampled", "sampler": "in-batch", "correction": "negatives"},
    "mixed": {"type": "sampled", "sampler": "mixed", "correction": "negatives"},
    "refined": {"type": "sampled", "sampler": "in-batch", "loss": "refined"},
    "bce": {"type": "sampled", "loss": "bce"},
    "gbce": {"type": "sampled", "loss": "gbce"},
    "sce": {"type": "scalable"},
}
# Those that draw as many negatives as they are told.
DRAWING = [name for name, of in HEADS.items() if of.get("type") == "sampled" and of.get("sampler") != "in-batch"]


def heads(text: str) -> dict[str, dict[str, Any]]:
    """The options of the heads that `--head` names, by the name with its number of negatives.

    Raises:
        argparse.ArgumentTypeError: an unknown name or none, or a number of negatives that is none or of a head that draws none.
    """
    named: dict[str, dict[str, Any]] = {}
    for name in (name.strip() for name in text.split(",")):
        head, colon, count = name.partition(":")
        if head not in HEADS:
            raise argparse.ArgumentTypeError(f"got {name!r}, expected some of {', '.join(HEADS)}")
        named[name] = dict(HEADS[head])
        if colon:
            if head not in DRAWING or not count.isdecimal() or int(count) < 1:
                raise argparse.ArgumentTypeError(f"got {name!r}, expected a number of negatives, of {', '.join(DRAWING)} alone")
            named[name]["num_negatives"] = int(count)
    return named


def with_former(found: dict[str, Any], what: str, facts: dict[str, Any], workload: dict[str, Any]) -> dict[str, Any]:
    """What was found of each head, and that of others which the result file has of the same environment and workload."""
    former = other_parts("train_sasrec_heads", facts)
    if former.get("workload") != json.loads(json.dumps(workload)):
        return found
    every = {**former[what], **found}
    return {name: every[name] for name in sorted(every, key=lambda name: list(HEADS).index(name.partition(":")[0]))}


def run_jagged(dataset: SequenceDataset, config: TrainConfig) -> dict[str, Any]:
    """Train through the product's own front door, checkpoints and test included in the time."""
    shutil.rmtree(config.output, ignore_errors=True)
    seconds, result = seconds_of(lambda: train(config, dataset, progress=False))
    return {
        "seconds": seconds,
        "epochs": result.epochs,
        "steps": result.steps,
        "seconds_per_epoch": seconds / result.epochs,
        "test_ndcg@10_left_in": result.metrics.test.all_items["ndcg@10"],
        "test_ndcg@10_taken_out": result.metrics.test.unseen_items["ndcg@10"],
    }


def run_padded(dataset: SequenceDataset, config: TrainConfig, *, lean: bool = False) -> dict[str, Any]:
    """Train the padded twin in a plain loop."""
    torch.manual_seed(config.seed)
    seconds, result = seconds_of(lambda: _Padded(dataset, config, lean).train())
    return {"seconds": seconds, "seconds_per_epoch": seconds / result["epochs"], **result}


class _Padded:
    def __init__(self, dataset: SequenceDataset, config: TrainConfig, lean: bool) -> None:
        self.training, self.lean = config.training, lean
        assert isinstance(config.head, CrossEntropyHead)
        self.label_smoothing = config.head.label_smoothing
        length, sizes = config.data.max_seq_len, config.model.model_dump()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.mixed = self.device.type == "cuda"
        split = split_leave_one_out(dataset)
        train, valid, test = (_batch(part, length, self.device) for part in (split.train, split.valid, split.test))
        self.train_inputs = _left_padded(train.features["item_id"].values(), train, length)
        self.train_targets = _left_padded(train.targets, train, length)[0]
        self.parts, self.viewed = {}, {}
        for name, batch in (("valid", valid), ("test", test)):
            assert batch.viewed is not None
            self.parts[name] = *_left_padded(batch.features["item_id"].values(), batch, length), batch.targets
            users = torch.arange(len(batch), device=self.device).repeat_interleave(batch.viewed.lengths())
            self.viewed[name] = users, batch.viewed.values()
        model = PaddedSASRec(
            split.train.num_items, sizes["embedding_dim"], sizes["num_heads"], sizes["num_layers"], length, sizes["dropout"]
        )
        nn.init.normal_(model.item_weight, std=sizes["embedding_dim"] ** -0.5)
        self.model = model.to(self.device)
        matrices = [p for p in model.parameters() if p.dim() > 1]
        vectors = [p for p in model.parameters() if p.dim() == 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": self.training.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=self.training.learning_rate,
            fused=self.mixed,
        )

    def train(self) -> dict[str, Any]:
        best, best_weights, worse, epochs, steps = -1.0, {}, 0, 0, 0
        for _ in range(self.training.max_epochs):
            order = torch.randperm(self.train_targets.shape[0]).to(self.device)
            for rows in order.split(self.training.batch_size):
                self._step(rows)
                steps += 1
            epochs += 1
            value = self._ndcg("valid", taken_out=False)
            worse = 0 if value > best else worse + 1
            if value > best:
                best, best_weights = value, {name: p.detach().clone() for name, p in self.model.state_dict().items()}
            if worse == self.training.patience:
                break
        self.model.load_state_dict(best_weights)
        return {
            "epochs": epochs,
            "steps": steps,
            "test_ndcg@10_left_in": self._ndcg("test", taken_out=False),
            "test_ndcg@10_taken_out": self._ndcg("test", taken_out=True),
        }

    def _step(self, rows: Tensor) -> None:
        items, filled = (x[rows] for x in self.train_inputs)
        targets = self.train_targets[rows]
        targets = targets[filled] if self.lean else targets.masked_fill(~filled, -100).flatten()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.mixed):
            hidden = self.model(items, filled)
            logits = nn.functional.linear(hidden[filled] if self.lean else hidden.flatten(0, 1), self.model.item_weight)
        loss = nn.functional.cross_entropy(logits.float(), targets, label_smoothing=self.label_smoothing)
        self.optimizer.zero_grad()
        loss.backward()
        if self.training.gradient_clip_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.training.gradient_clip_norm)
        self.optimizer.step()

    @torch.inference_mode()
    def _ndcg(self, part: str, *, taken_out: bool) -> float:
        self.model.eval()
        items, filled, targets = self.parts[part]
        users, viewed = self.viewed[part]
        gains = []
        for start in range(0, targets.shape[0], 1024):
            rows = slice(start, start + 1024)
            scores = self.model(items[rows], filled[rows])[:, -1] @ self.model.item_weight.T
            # An item that training has not seen is -1, and a miss.
            score = scores.gather(1, targets[rows, None].clamp(min=0))
            if taken_out:
                here = (users >= start) & (users < start + 1024)
                scores[users[here] - start, viewed[here]] = -math.inf
            rank = (scores > score).sum(1)
            gains.append(torch.where((rank < 10) & (targets[rows] >= 0), 1 / torch.log2(rank + 2.0), 0.0))
        self.model.train()
        return float(torch.cat(gains).mean())


def _batch(part: SequencePart, length: int, device: torch.device) -> SequenceBatch:
    """All of a part, as the product's own loader hands it out."""
    held_out = part.target is not None
    loader = BatchLoader(part, batch_size=len(part), max_seq_len=length, shuffle=False, seed=0, with_viewed=held_out)
    return next(iter(loader)).to(device)


def _left_padded(values: Tensor, batch: SequenceBatch, length: int) -> tuple[Tensor, Tensor]:
    """A value for each row of a batch as `[B, length]`, zeros first, and which of them are filled."""
    offsets = batch.features.offsets()
    rows = torch.arange(-length, 0, device=values.device) + offsets[1:, None]
    filled = rows >= offsets[:-1, None]
    return values[rows.clamp(min=0)].masked_fill(~filled, 0), filled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="events file")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--head", type=heads, metavar="NAMES", help=f"train with these: {', '.join(HEADS)}")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change a setting, e.g. model.embedding_dim=64"
    )
    arguments = parser.parse_args()
    settings = parse_assignments(arguments.set)
    dataset = read_events(arguments.data, progress=False)
    lengths = dataset.offsets.diff()
    workload = {
        "file": Path(arguments.data).name,
        "users": dataset.num_users,
        "items": dataset.num_items,
        "events": dataset.num_events,
        "lengths": {"mean": float(lengths.double().mean()), "median": int(lengths.median()), "max": int(lengths.max())},
        "protocol": "leave-one-out, all items ranked",
        "settings": TrainConfig(**settings).model_dump(exclude={"data", "output", "seed"}),
    }
    models = {"jagged": run_jagged, "padded": run_padded, "padded_lean": partial(run_padded, lean=True)}
    if arguments.head:
        models = {name: run_padded if name == "ce" else run_jagged for name in arguments.head}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in models}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(-1, arguments.seeds):
            # The first round of each compiles kernels and warms caches; it is short and not counted.
            changes: dict[str, Any] = {"training.max_epochs": 1} if seed < 0 else {}
            changes |= {"seed": max(seed, 0), "output": f"{folder}/run", "training.tensorboard": False}
            for name, run in models.items():
                config = TrainConfig(**merge(settings, changes | {"head": (arguments.head or {}).get(name, {})}))
                if torch.cuda.is_available():
                    gc.collect()
                    # cuBLAS keeps some memory for each stream that there was.
                    torch._C._cuda_clearCublasWorkspaces()
                    torch.cuda.empty_cache()
                    torch.cuda.reset_peak_memory_stats()
                result = run(dataset, config)
                if torch.cuda.is_available():
                    # What is allocated says nothing of the memory that graphs keep.
                    result["peak_reserved_mb"] = torch.cuda.max_memory_reserved() / 2**20
                if seed >= 0:
                    runs[name].append(result)
                    print(name, seed, {key: round(value, 4) for key, value in result.items()}, flush=True)
    summary = {
        name: {key: spread([run[key] for run in of]) | {"mean": sum(run[key] for run in of) / len(of)} for key in of[0]}
        for name, of in runs.items()
    }
    facts = environment()
    if arguments.head:
        summary, runs = (with_former(of, what, facts, workload) for of, what in ((summary, "summary"), (runs, "runs")))
    path = save(
        "train_sasrec_heads" if arguments.head else "train_sasrec",
        {"environment": facts, "workload": workload, "summary": summary, "runs": runs},
    )
    for key in next(iter(summary.values())):
        print(f"{key:28} " + "  ".join(f"{name} {of[key]['mean']:.4f}" for name, of in summary.items()))
    print(path)


if __name__ == "__main__":
    main()
