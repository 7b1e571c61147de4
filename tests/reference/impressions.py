"""A ranker of impressions on padded tensors, in plain torch, and a linear model: twins for `synthetic_impressions`.

`python -m tests.reference.impressions` prints what both reach on the last tenth of the sample beside what can be reached.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from torch import Tensor, nn

from jagged.data import synthetic_impressions

IDS = ("user_id", "age_group", "country", "item_id", "category", "brand", "device", "page", "hour", "position")
LISTED = ("user_id", "item_id", "category", "device", "hour")
NUMBERS = ("price", "discount")
LENGTH = 20
BATCH = 256


def encoded(table, train: int) -> tuple[dict[str, Tensor], dict[str, int]]:
    """A table of impressions as tensors, and how many rows each embedding table needs.

    `ids` int64 `[n, 10]`, `numbers` float32 `[n, 2]`, `history` int64 `[n, 20, 2]`: items and categories of the user's last
    clicks at strictly earlier times, 0 in padding; `labels` float32 `[n, 2]`. Ids and means are those of the first `train` rows:
    0 is an id that these do not have.
    """
    n, codes, sizes = len(table), {}, {}
    for name in IDS:
        values = np.asarray(table[name].to_pylist())
        known = np.unique(values[:train])
        place = np.minimum(np.searchsorted(known, values), len(known) - 1)
        codes[name], sizes[name] = np.where(known[place] == values, place + 1, 0), len(known) + 1
    users, times, click = (table[name].to_numpy() for name in ("user_id", "timestamp", "click"))
    moment = (users << 40) + times
    clicked = np.flatnonzero(click)
    clicked = clicked[np.argsort(moment[clicked], kind="stable")]
    # Of each row: its user's clicks at earlier times are those from `first` to before `stop`.
    first, stop = (np.searchsorted(moment[clicked], of, side="left") for of in (users << 40, moment))
    places = stop[:, None] - 1 - np.arange(LENGTH)
    filled = places >= first[:, None]
    rows = clicked[np.maximum(places, 0)]
    history = np.stack([np.where(filled, codes[name][rows], 0) for name in ("item_id", "category")], 2)
    numbers = np.stack([np.log(table["price"].to_numpy()), table["discount"].to_numpy()], 1)
    numbers = (numbers - numbers[:train].mean(0)) / numbers[:train].std(0)
    labels = np.stack([click, table["buy"].to_numpy()], 1)
    result = {
        "ids": torch.from_numpy(np.stack([codes[name] for name in IDS], 1)),
        "numbers": torch.from_numpy(numbers).float(),
        "history": torch.from_numpy(history),
        "labels": torch.from_numpy(labels).float(),
    }
    assert all(len(x) == n for x in result.values())
    return result, sizes


class PaddedRanker(nn.Module):
    """Embeddings, the mean of the clicked items and categories, their products with the candidate's, an MLP, two logits.

    The second logit is that of a purchase after a click.
    """

    def __init__(
        self, sizes: dict[str, int], embedding_dim: int = 16, layer_sizes: tuple[int, ...] = (64, 32), with_history: bool = True
    ) -> None:
        super().__init__()
        self.with_history = with_history
        self.embeddings = nn.ModuleDict({name: nn.Embedding(size, embedding_dim) for name, size in sizes.items()})
        for table in self.embeddings.values():
            # As TorchRec does: small tables have large rows, whose products tell something from the first step on.
            nn.init.uniform_(table.weight, -(table.num_embeddings**-0.5), table.num_embeddings**-0.5)
        layers, width = [], (len(sizes) + 4) * embedding_dim + len(NUMBERS) + 3
        for size in layer_sizes:
            layers, width = [*layers, nn.Linear(width, size), nn.ReLU()], size
        self.mlp = nn.Sequential(*layers)
        self.heads = nn.Linear(width, 2)

    def forward(self, ids: Tensor, numbers: Tensor, history: Tensor) -> Tensor:
        """`[B, 10]`, `[B, 2]`, `[B, 20, 2]` -> logits `[B, 2]`."""
        looked_up = {name: table(ids[:, place]) for place, (name, table) in enumerate(self.embeddings.items())}
        parts = [*looked_up.values(), numbers]
        history = history * self.with_history
        filled = (history[:, :, 0] > 0).to(numbers.dtype)
        count = filled.sum(1, keepdim=True)
        for place, name in enumerate(("item_id", "category")):
            rows = self.embeddings[name](history[:, :, place]) * filled[:, :, None]
            mean = rows.sum(1) / count.clamp(min=1)
            product = mean * looked_up[name]
            parts += [mean, product, product.sum(1, keepdim=True)]
        return self.heads(self.mlp(torch.cat([*parts, count / LENGTH], 1)))


class Linear(nn.Module):
    """Logistic regression on one-hot columns."""

    def __init__(self, sizes: dict[str, int], columns: tuple[str, ...], num_numbers: int = 0) -> None:
        super().__init__()
        self.columns, self.num_numbers = [IDS.index(name) for name in columns], num_numbers
        self.weights = nn.ModuleList(nn.Embedding(sizes[name], 2) for name in columns)
        for table in self.weights:
            nn.init.zeros_(table.weight)
        self.numbers = nn.Linear(num_numbers, 2) if num_numbers else None
        self.bias = nn.Parameter(torch.zeros(2))

    def forward(self, ids: Tensor, numbers: Tensor, history: Tensor) -> Tensor:
        logits = self.bias + sum(table(ids[:, place]) for place, table in zip(self.columns, self.weights, strict=True))
        return logits if self.numbers is None else logits + self.numbers(numbers)


def fit(
    model: nn.Module,
    data: dict[str, Tensor],
    rows: int,
    *,
    epochs: int = 5,
    seed: int = 0,
    learning_rate: float = 3e-3,
    decay: float = 10.0,
) -> None:
    """Train on the first rows by AdamW, the rate falling to nothing: clicks on all rows, purchases on the clicked ones.

    `decay` is that of tables of over 100 rows, which would else learn by heart what few samples tell of each row.
    """
    large = [p for p in model.parameters() if p.dim() == 2 and p.shape[0] > 100]
    others = [p for p in model.parameters() if all(p is not q for q in large)]
    groups = [{"params": large, "weight_decay": decay}, {"params": others, "weight_decay": 0.01 * decay}]
    generator, batches = torch.Generator().manual_seed(seed), -(-rows // BATCH)
    optimizer = torch.optim.AdamW(groups, lr=learning_rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, total_iters=epochs * batches)
    for _ in range(epochs):
        for chosen in torch.randperm(rows, generator=generator).split(BATCH):
            labels = data["labels"][chosen]
            logits = model(*(data[name][chosen] for name in ("ids", "numbers", "history")))
            each = nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
            loss = (each[:, 0] + each[:, 1] * labels[:, 0]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()


@torch.no_grad()
def predicted(model: nn.Module, data: dict[str, Tensor], rows: slice) -> dict[str, np.ndarray]:
    """Probabilities of a click and of a purchase."""
    click, after = model(*(data[name][rows] for name in ("ids", "numbers", "history"))).double().sigmoid().unbind(1)
    return {"click": click.numpy(), "buy": (click * after).numpy()}


def reached(seed: int) -> dict[str, dict[str, dict[str, float]]]:
    """Figures of the last tenth of the sample by task: of the true probabilities, and of models trained on the first 80 %."""
    table, truth = synthetic_impressions(seed)
    train, last = int(0.8 * len(table)), slice(int(0.9 * len(table)), len(table))
    data, sizes = encoded(table, train)
    result = {"true": {task: truth.figures(task, last) for task in ("click", "buy")}}
    linear = {"learning_rate": 1e-2, "decay": 0.0}
    for name, make, options in (
        ("twin", lambda: PaddedRanker(sizes), {}),
        ("no history", lambda: PaddedRanker(sizes, with_history=False), {}),
        ("linear", lambda: Linear(sizes, IDS, len(NUMBERS)), linear),
        ("linear, few", lambda: Linear(sizes, LISTED), linear),
    ):
        torch.manual_seed(seed)
        began, model = time.perf_counter(), make()
        fit(model, data, train, seed=seed, **options)
        seconds, given = time.perf_counter() - began, predicted(model, data, last)
        result[name] = {task: truth.figures(task, last, probabilities=of) for task, of in given.items()}
        result[name]["click"]["seconds"] = seconds
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    torch.set_num_threads(1)
    for seed in parser.parse_args().seeds:
        for name, tasks in reached(seed).items():
            figures = [f"{task} {key} {value:.4f}" for task, of in tasks.items() for key, value in of.items()]
            print(f"seed {seed}  {name:<11}  {'  '.join(figures)}", flush=True)
