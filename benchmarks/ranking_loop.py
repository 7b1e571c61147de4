"""Training a ranking model on a table of impressions with histories, beside a loop of pyarrow, TorchRec and padded attention.

    python -m benchmarks.ranking_loop                      # a million rows; some ten minutes, 1 GB in a temporary directory
    python -m benchmarks.ranking_loop --rows 50000 --steps 20 --lengths even

A row has 12 features (10 ids, 2 numbers), a label, and two histories, the items and the categories of its user's last events.
Their lengths are skewed, as users' are (log-normal, cut at 200, 50 on the mean), or even (cut at 100, 58 on the mean), of which
padding makes little. `ours` gathers them from the table of events (`Dataset`, `RequestLoader`, `RankingModel`). `rival` is what
one writes without: `pyarrow` reads record batches of a file that has them as list columns, a KeyedJaggedTensor is made of each,
`EmbeddingBagCollection` and `EmbeddingCollection` look ids up, histories are padded to the batch's longest and attended to by
torch's fused attention. Layers, widths, optimizer (fused AdamW), batch size and threads are the same. Rows come in a random order
in ours, in the file's order in the rival, which is cheaper.

`released` is ours with the trainer's `release_memory`: memory of large tensors goes back to the system at once.

Each of them runs in processes of its own, in turns. Memory is the peak of the process's resident memory above what it holds after
its imports. Pages of mapped files are in it, which the system takes back where memory is short; they are told by themselves, too.
The loader's share is the time until the next batch is there, of the whole.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from benchmarks.common import environment, save
from jagged.training.memory import release_large_blocks
from tests.memory import peak_resident_bytes

BATCH, DIM, HEADS, LAYERS, ITEMS, CATEGORIES = 1_024, 32, 2, 1, 50_000, 500
# Where histories are cut, by how their lengths are spread.
MOST = {"skewed": 200, "even": 100}
# Of the request and of the candidate, with their numbers of values. Users are as many as a 25th of the rows.
REQUEST = {"age_group": 8, "city": 1_000, "device": 6, "page": 12, "hour": 24}
CANDIDATE = {"brand": 2_000, "position": 50}
FEATURES = ("user_id", *REQUEST, "item_id", "category", *CANDIDATE, "load", "price")
SIDES = ("ours", "released", "rival")
BARS = {"speed": 1.5, "memory": 0.5, "loader": 0.15}
WARM_UP = 5

IntArray = npt.NDArray[np.int64]


def write(folder: Path, rows: int, spread: str) -> dict[str, Any]:
    """Make both sides' files: a dataset of ours, a parquet file of the rival's, and what both models need to know of them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from jagged.data import Dataset

    rng = np.random.default_rng(0)
    users = max(20, rows // 25)
    # On average a row knows 60 % of its user's events.
    counts = np.exp(rng.normal(3.75, 1.2, users)) if spread == "skewed" else 60 / (0.25 + rng.random(users))
    counts = np.floor(counts).astype(np.int64) + 10
    event_user = np.repeat(np.arange(users), counts)
    event_time = rng.integers(0, 10_000_000, len(event_user))
    event_time = event_time[np.lexsort((event_time, event_user))]
    event_item = rng.zipf(1.2, len(event_user)) % ITEMS
    category = rng.integers(0, CATEGORIES, ITEMS)
    user, now = rng.integers(0, users, rows), np.sort(rng.integers(2_000_000, 10_000_000, rows))
    item = rng.zipf(1.2, rows) % ITEMS
    columns: dict[str, Any] = {"user_id": user, "timestamp": now}
    columns |= {name: rng.integers(0, size, rows) for name, size in (REQUEST | CANDIDATE).items()}
    columns |= {"item_id": item, "category": category[item], "load": rng.random(rows), "price": rng.gamma(2.0, 10.0, rows)}
    columns["click"] = (rng.random(rows) < 0.3).astype(np.int64)
    table = pa.table(columns)
    events = pa.table({"user_id": event_user, "timestamp": event_time, "item_id": event_item, "category": category[event_item]})
    words = {"user": "user_id", "candidate": "item_id", "time": "timestamp"}
    ids = [*REQUEST, "category", *CANDIDATE]
    dataset = Dataset.from_table(
        table, events=events, label="click", **words, ids=ids, numbers=["load", "price"],
        candidate_columns=["category", "brand", "position", "price"], request_columns=[*REQUEST, "load"],
        duplicates="keep", event_words=words | {"ids": ["category"]}, directory=folder / "dataset", progress=False,
    )  # fmt: skip
    key = (event_user << 32) + event_time
    stop = np.searchsorted(key, (user << 32) + now, side="left")
    lengths = np.minimum(stop - np.searchsorted(event_user, user, side="left"), MOST[spread])
    with pq.ParquetWriter(folder / "rows.parquet", table.schema.append(pa.field("items", pa.list_(pa.int64()))).append(
        pa.field("categories", pa.list_(pa.int64()))
    )) as writer:  # fmt: skip
        for begin in range(0, rows, 50_000):
            chosen = slice(begin, begin + 50_000)
            offsets = np.append(0, np.cumsum(lengths[chosen]))
            places = np.repeat(stop[chosen] - offsets[1:], lengths[chosen]) + np.arange(offsets[-1])
            block = table.slice(begin, 50_000)
            for name, values in (("items", event_item), ("categories", category[event_item])):
                lists = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values[places]))
                block = block.append_column(name, lists)
            writer.write_table(block)
    facts = {"rows": len(dataset), "users": users, "events": len(event_user), "lengths": spread}
    facts |= {"mean_history": float(lengths.mean()), "max_history": MOST[spread]}
    (folder / "facts.json").write_text(json.dumps(facts))
    return facts


class Ours:
    """Our loader and model."""

    def __init__(self, folder: Path, facts: dict[str, Any]) -> None:
        from jagged.data import Dataset
        from jagged.models import RankingModel

        split = Dataset.load(folder / "dataset").split(by="time", valid=0.01, test=0.01)
        self.loader = split.train.loader(batch_size=BATCH, shuffle=True, max_history=facts["max_history"])
        self.model = RankingModel.of(
            split,
            embedding_dim=DIM,
            num_heads=HEADS,
            num_layers=LAYERS,
            max_history=facts["max_history"],
            num_time_buckets=None,
        )

    def batches(self) -> Iterator[Any]:
        """Of an epoch."""
        return iter(self.loader)

    def loss(self, batch: Any) -> Tensor:
        """The mean over the batch."""
        loss: Tensor = self.model(batch).loss
        return loss


class Rival:
    """The loop that one writes with TorchRec and pyarrow."""

    def __init__(self, folder: Path, facts: dict[str, Any]) -> None:
        self.file = folder / "rows.parquet"
        self.model = PaddedModel(facts["users"], facts["max_history"])

    def batches(self) -> Iterator[Any]:
        """Of the file."""
        import pyarrow.parquet as pq
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        bags, rows = ["user_id", *REQUEST, *CANDIDATE], ["item_id", "category", "items", "categories"]
        for batch in pq.ParquetFile(self.file).iter_batches(BATCH):
            count = len(batch)
            ones = torch.ones(count, dtype=torch.int64)

            def column(name: str, batch: Any = batch) -> Tensor:
                return torch.from_numpy(batch[name].to_numpy(zero_copy_only=False).copy())

            lengths = torch.from_numpy(np.diff(batch["items"].offsets.to_numpy()).astype(np.int64))
            histories = [torch.from_numpy(batch[name].flatten().to_numpy().copy()) for name in ("items", "categories")]
            yield (
                KeyedJaggedTensor(bags, torch.cat([column(name) for name in bags]), lengths=ones.repeat(len(bags))),
                KeyedJaggedTensor(
                    rows, torch.cat([column("item_id"), column("category"), *histories]),
                    lengths=torch.cat([ones, ones, lengths, lengths]),
                ),
                torch.stack([column("load"), column("price")], 1).float(),
                column("click").float(),
            )  # fmt: skip

    def loss(self, batch: Any) -> Tensor:
        """The mean over the batch."""
        *inputs, labels = batch
        return nn.functional.binary_cross_entropy_with_logits(self.model(*inputs), labels)


class PaddedModel(nn.Module):
    """The layers of `RankingModel`, on histories that are padded to the batch's longest."""

    def __init__(self, users: int, max_history: int) -> None:
        from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
        from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

        super().__init__()
        sizes = {"user_id": users, **REQUEST, **CANDIDATE}
        self.bags = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(name=key, embedding_dim=DIM, num_embeddings=n + 2, feature_names=[key])
                for key, n in sizes.items()
            ]
        )
        keys = {"item": (ITEMS, ["item_id", "items"]), "category": (CATEGORIES, ["category", "categories"])}
        self.rows = EmbeddingCollection(
            [
                EmbeddingConfig(name=key, embedding_dim=DIM, num_embeddings=n + 2, feature_names=of)
                for key, (n, of) in keys.items()
            ]
        )
        self.events, self.positions = nn.Linear(2 * DIM, DIM), nn.Embedding(max_history, DIM)
        self.blocks = nn.ModuleList(PaddedBlock() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(DIM)
        candidate = (2 + len(CANDIDATE)) * DIM + 1
        self.query, self.q, self.kv, self.out = (
            nn.Linear(candidate, DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, 2 * DIM), nn.Linear(DIM, DIM),
        )  # fmt: skip
        self.meeting = nn.Linear((3 + len(REQUEST) + 1) * DIM + 1 + candidate + DIM, 128)
        self.cross = nn.ModuleList(nn.Linear(128, 128) for _ in range(3))
        self.tower = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, bags: Any, rows: Any, numbers: Tensor) -> Tensor:
        """Logits `[B]`."""
        pooled, looked_up = self.bags(bags), self.rows(rows)
        lengths = rows["items"].lengths()
        longest = max(int(lengths.max()), 1)
        items, categories = (looked_up[key].to_padded_dense(longest) for key in ("items", "categories"))
        place = torch.arange(longest)
        filled = place < lengths[:, None]
        x = self.events(torch.cat([items, categories], 2))
        x = x + self.positions((lengths[:, None] - 1 - place).clamp(min=0))
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        counts = lengths.clamp(min=1)[:, None]
        # The padding of what was looked up is 0.
        means = [items.sum(1) / counts, categories.sum(1) / counts, (x * filled[:, :, None]).sum(1) / counts]
        candidate = torch.cat(
            [looked_up["item_id"].values(), looked_up["category"].values(), *(pooled[key] for key in CANDIDATE), numbers[:, 1:]],
            1,
        )
        q = self.q(self.query(candidate)).view(-1, 1, HEADS, DIM // HEADS).transpose(1, 2)
        k, v = self.kv(x).view(len(x), longest, 2, HEADS, DIM // HEADS).permute(2, 0, 3, 1, 4)
        # Who has no history sees its padding, which counts nothing below.
        visible = (filled | (lengths == 0)[:, None])[:, None, None]
        attended = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        attended = self.out(attended.flatten(1) * (lengths > 0)[:, None])
        requests = [pooled["user_id"], *(pooled[key] for key in REQUEST), numbers[:, :1], *means]
        first = self.meeting(torch.cat([*requests, candidate, attended], 1))
        crossed = first
        for layer in self.cross:
            crossed = first * layer(crossed) + crossed
        logits: Tensor = self.tower(crossed).squeeze(1)
        return logits


class PaddedBlock(nn.Module):
    """A causal transformer block; padding stands behind, so that no event sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.feed_forward = nn.Sequential(nn.Linear(DIM, DIM), nn.GELU(), nn.Linear(DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        """`[B, L, D]` in and out."""
        q, k, v = self.qkv(self.first(x)).view(*x.shape[:2], 3, HEADS, DIM // HEADS).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.feed_forward(self.second(x))


def run(side: str, folder: Path, steps: int, threads: int) -> dict[str, Any]:
    """Train in this process: samples a second, GB above the imports, and the loader's share."""
    import pyarrow.parquet  # noqa: F401 - memory is counted from after the imports
    import torchrec  # noqa: F401

    import jagged.data.table_loader
    import jagged.models  # noqa: F401

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    gc.collect()
    # From here on the peak counts anew.
    Path("/proc/self/clear_refs").write_text("5")
    before, of_files = peak_resident_bytes(), _resident_files()
    if side == "released":
        release_large_blocks()
    kind = Rival if side == "rival" else Ours
    one: Ours | Rival = kind(folder, json.loads((folder / "facts.json").read_text()))
    ready = peak_resident_bytes()
    optimizer = torch.optim.AdamW(one.model.parameters(), lr=1e-3, fused=True)
    batches, waited, begun = one.batches(), 0.0, 0.0
    losses = []
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            waited, begun = 0.0, time.perf_counter()
        asked = time.perf_counter()
        batch = next(batches)
        waited += time.perf_counter() - asked
        optimizer.zero_grad()
        loss = one.loss(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    seconds = time.perf_counter() - begun
    return {
        "samples_per_second": steps * BATCH / seconds,
        "gigabytes": (peak_resident_bytes() - before) / 1e9,
        "gigabytes_before_training": (ready - before) / 1e9,
        "gigabytes_of_files": (_resident_files() - of_files) / 1e9,
        "loader_share": waited / seconds,
        "parameters": sum(p.numel() for p in one.model.parameters()),
        "loss": statistics.mean(losses[-steps:]),
    }


def _resident_files() -> int:
    """Bytes of mapped files that are in memory now; they stay there until the system wants them back."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssFile:"))
    return int(line.split()[1]) * 1024


def compared(folder: Path, steps: int, rounds: int, threads: int) -> dict[str, Any]:
    """Both sides in turns: medians, every run, and the ratios."""
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for _ in range(rounds):
        for side, runs in found.items():
            command = [sys.executable, "-W", "ignore", "-m", "benchmarks.ranking_loop", "--side", side]
            command += ["--folder", str(folder), "--steps", str(steps), "--threads", str(threads)]
            runs.append(json.loads(subprocess.run(command, check=True, capture_output=True).stdout.splitlines()[-1]))
            print(side, {name: round(value, 4) for name, value in runs[-1].items()}, flush=True)
    median = {side: {name: statistics.median(run[name] for run in runs) for name in runs[0]} for side, runs in found.items()}
    result: dict[str, Any] = {"median": median, "runs": found}
    for side in ("ours", "released"):
        of = result[side] = {
            "speed": median[side]["samples_per_second"] / median["rival"]["samples_per_second"],
            "memory": median[side]["gigabytes"] / median["rival"]["gigabytes"],
            "loader": median[side]["loader_share"],
        }
        print(
            f"{side}: speed {of['speed']:.2f} (at least {BARS['speed']}), memory {of['memory']:.2f} (at most {BARS['memory']}), "
            f"loader {of['loader']:.1%} (at most {BARS['loader']:.0%})",
            flush=True,
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--lengths", nargs="+", choices=MOST, default=list(MOST), help="of histories, how they are spread")
    parser.add_argument("--steps", type=int, default=100, help="that are measured")
    parser.add_argument("--rounds", type=int, default=3, help="processes a side")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="keep the files there, and take them from there")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print(json.dumps(run(options.side, options.folder, options.steps, options.threads)))
        return
    result: dict[str, Any] = {"environment": environment("cpu"), "bars": BARS}
    with tempfile.TemporaryDirectory() as temporary:
        for spread in options.lengths:
            folder = (options.folder or Path(temporary)) / f"{spread}-{options.rows}"
            folder.mkdir(parents=True, exist_ok=True)
            facts = (
                json.loads(path.read_text()) if (path := folder / "facts.json").exists() else write(folder, options.rows, spread)
            )
            print(facts, flush=True)
            workload = {**facts, "batch": BATCH, "features": list(FEATURES), "steps": options.steps}
            result[spread] = {"workload": workload, **compared(folder, options.steps, options.rounds, options.threads)}
    if options.rows == parser.get_default("rows") and options.lengths == list(MOST):
        print(save("ranking_loop", result))


if __name__ == "__main__":
    main()
