"""Models of next items by name on a real events file: figures of the test, each with the same number of trials.

    python -m benchmarks.next_item_models --data beauty.txt --processes 12            # what is measured already is kept
    python -m benchmarks.next_item_models --data beauty.txt --processes 12 --alone    # seconds of a GPU of their own
    python -m benchmarks.next_item_models --data beauty.txt --only hstu --seconds 300
    python -m benchmarks.next_item_models --data small.txt --device cpu --epochs 1    # a try, nothing is saved

The last event of each user is the test, the one before it the validation, and all items are ranked. Of each model six trials,
learning rates and dropouts, are trained with seed 3 and never see the test; the one with the best validation NDCG@10, seen items
left in, is trained with seeds 0 to 2 and tested with the weights of its best validation. Width, layers, heads, longest history,
batch size, loss and early stopping are those of `SETTINGS` for all models, everything else is the product's default; epochs are
as many as the slowest model needs. Defaults were found with SASRec on Amazon Beauty (`docs/internals/beauty.md`), the label
smoothing among them, which favours SASRec there. No model has times of events.

Each training has a process of its own. Its seconds are those of `Trainer.fit`, with its validations, its test and the files that
it writes, after a short training for which kernels are compiled. Beside others on the same GPU they are longer, so their number
is told.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.common import environment, other_parts, save, seconds_of
from jagged.config import TrainConfig, merge, parse_assignments
from jagged.data import BatchLoader, SequenceSplit, read_events, split_leave_one_out
from jagged.metrics import IN_WORDS, TrainCounts
from jagged.models import NextItemTask, build, build_head
from jagged.training import Trainer, TrainResult

MODELS = ("sasrec", "hstu", "bert4rec")
TUNED_ON, SEEDS = 3, (0, 1, 2)
TRIALS = [
    {"training.learning_rate": rate, "model.dropout": dropout}
    for rate, dropout in itertools.product((5e-4, 1e-3, 2e-3), (0.3, 0.5))
]
#: Of all models; what else a `TrainConfig` has is its default.
SETTINGS: dict[str, Any] = {
    "data.max_seq_len": 50,
    "model.embedding_dim": 256,
    "model.num_heads": 2,
    "model.num_layers": 2,
    "head.label_smoothing": 0.2,
    "training.batch_size": 256,
    "training.max_epochs": 200,
    "training.patience": 10,
    "training.monitor": "ndcg@10",
    "training.tensorboard": False,
}
#: As people call them, by the name that figures have: of one target a user the recall is the hit rate.
FIGURES = {"HR@10": "recall@10", "NDCG@10": "ndcg@10", "MRR@10": "mrr@10"}

# By model its "trials", by `label`, and its "seeds".
Rows = dict[str, dict[str, dict[str, Any]]]


class Training(NamedTuple):
    """A training, as its process is told of it.

    Attributes:
        model: its name.
        options: one of the trials.
        seed: of weights, order and dropout.
        part: "valid" for a trial, "test" for a training that is tested as well.
        data: the events file.
        settings: of all trainings.
        device: "cpu" or "cuda".
        threads: of PyTorch on the CPU.
    """

    model: str
    options: dict[str, float]
    seed: int
    part: str
    data: str
    settings: dict[str, Any]
    device: str = "cpu"
    threads: int = 1

    def __str__(self) -> str:
        return f"{self.model}, {label(self.options)}, seed {self.seed}"

    def config(self, output: str = "run") -> TrainConfig:
        """The whole configuration."""
        of_this = {"model.name": self.model, **self.options, "seed": self.seed, "device": self.device, "output": output}
        return TrainConfig(**merge(self.settings, of_this))


def label(options: dict[str, float]) -> str:
    """A trial's options in a line."""
    return ", ".join(f"{name.rpartition('.')[2].replace('_', ' ')} {value:g}" for name, value in options.items())


def fit(training: Training, split: SequenceSplit) -> tuple[TrainResult, int]:
    """Train as `jagged train` does, but without the test part where that is not asked for; returns the parameters, too."""
    with tempfile.TemporaryDirectory() as folder:
        config = training.config(f"{folder}/run")
        torch.manual_seed(config.seed)
        counts, length = TrainCounts.from_part(split.train), config.data.max_seq_len
        options = config.model.model_dump(exclude={"name"})
        model: Any = build(config.model.name, num_items=split.train.num_items, max_seq_len=length, **options)
        task = NextItemTask(model, head=build_head(config, counts.users_per_item), train_counts=counts)
        common: dict[str, Any] = {"max_seq_len": length, "seed": config.seed, "pin_memory": training.device == "cuda"}
        train = BatchLoader(split.train, batch_size=config.training.batch_size, shuffle=True, **common)
        common |= {"batch_size": config.evaluation.eval_batch_size, "shuffle": False}
        test = BatchLoader(split.test, with_viewed=True, **common) if training.part == "test" else None
        result = Trainer(task, config.trainer).fit(train, BatchLoader(split.valid, **common), test, progress=False)
        return result, sum(parameter.numel() for parameter in model.parameters())


def trained(training: Training) -> dict[str, Any]:
    """Figures of a training, of the test only where that is its part."""
    torch.set_num_threads(training.threads)
    split = split_leave_one_out(read_events(training.data, progress=False))
    few = split.valid.sample(2 * training.config().training.batch_size, 0)
    # It compiles what the test needs, too, without the test.
    short = training._replace(settings=merge(training.settings, {"training.max_epochs": 1}))
    fit(short, replace(split, train=split.train.sample(len(few), 0), valid=few, test=few))
    seconds, (result, parameters) = seconds_of(lambda: fit(training, split))
    assert result.metrics.best is not None
    return {
        **training.options,
        "seed": training.seed,
        "valid": result.metrics.valid.to_json(),
        **({"test": result.metrics.test.to_json()} if training.part == "test" else {}),
        "best_epoch": result.metrics.best.epoch,
        "epochs": result.epochs,
        "seconds": round(seconds, 1),
        "parameters": parameters,
    }


def in_own_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns in a new process: with random numbers and a CUDA context that are its alone."""
    # A pool for each: a process that dies takes the others of its pool along.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def finished(trainings: Iterable[Training], processes: int, until: float) -> Iterator[tuple[Training, Future[Any]]]:
    """Train, so many at a time; each as it ends. The result of one that had to begin after `until` is None."""

    def one(training: Training) -> dict[str, Any] | None:
        return None if time.perf_counter() > until else in_own_process(trained, training) | {"processes": processes}

    with ThreadPoolExecutor(processes) as threads:
        futures = {threads.submit(one, training): training for training in trainings}
        for future in as_completed(futures):
            yield futures[future], future


def validation(of: dict[str, Any]) -> float:
    """What trials are compared by."""
    return float(of["valid"]["all_items"]["ndcg@10"])


def chosen(of: dict[str, dict[str, Any]]) -> dict[str, float] | None:
    """The trial with the best validation; None until all are there."""
    if any(label(trial) not in of["trials"] for trial in TRIALS):
        return None
    return max(TRIALS, key=lambda trial: validation(of["trials"][label(trial)]))


def trials_left(of: dict[str, dict[str, Any]]) -> list[tuple[dict[str, float], int, str]]:
    """Options, seed and part of the trials that a model still needs."""
    return [(trial, TUNED_ON, "valid") for trial in TRIALS if label(trial) not in of["trials"]]


def seeds_left(of: dict[str, dict[str, Any]]) -> list[tuple[dict[str, float], int, str]]:
    """The same of the trainings with the chosen options; none before these are known."""
    best = chosen(of)
    return [] if best is None else [(best, seed, "test") for seed in SEEDS if str(seed) not in of["seeds"]]


def put(rows: Rows, training: Training, found: dict[str, Any]) -> None:
    """Keep what was found, in the order of trials and seeds, whichever ended first."""
    what, key = ("seeds", str(training.seed)) if training.part == "test" else ("trials", label(training.options))
    of = rows[training.model]
    order = [str(seed) for seed in SEEDS] if what == "seeds" else [label(trial) for trial in TRIALS]
    of[what] = {name: {**of[what], key: found}[name] for name in order if name == key or name in of[what]}


def described(data: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The data and all that the figures depend on beside the model."""
    dataset = read_events(data, progress=False)
    return {
        "file": Path(data).name,
        "fingerprint": dataset.fingerprint,
        "users": dataset.num_users,
        "items": dataset.num_items,
        "events": dataset.num_events,
        "protocol": "leave-one-out, all items ranked",
        "settings": settings,
        "trials": TRIALS,
        "tuned_on": TUNED_ON,
    }


def former_rows(facts: dict[str, Any], workload: dict[str, Any]) -> Rows:
    """What the result file has of the same machine, data and settings."""
    former = other_parts("next_item_models", facts)
    rows: Rows = former["models"] if former.get("workload") == json.loads(json.dumps(workload)) else {}
    return rows


def told(training: Training, found: dict[str, Any]) -> str:
    """A line of what a training reached: in the validation, and in the test where it was tested."""
    tested = f", test {found['test']['all_items']['ndcg@10']:.4f}" if "test" in found else ""
    return f"{training}: NDCG@10 {validation(found):.4f}{tested}; {found['epochs']} epochs, {found['seconds']} s"


def _ranged(values: list[float], places: int) -> str:
    low, high = min(values), max(values)
    middle = f"{statistics.median(values):,.{places}f}"
    return middle if low == high else f"{middle} ({low:,.{places}f} to {high:,.{places}f})"


def _table(title: str, head: list[str], body: dict[str, list[str]]) -> list[str]:
    rows = [f"| `{name}` | {' | '.join(cells)} |" for name, cells in body.items()]
    return [f"{title}:", "", f"| model | {' | '.join(head)} |", "|---" * (len(head) + 1) + "|", *rows, ""]


def of_training(of: dict[str, dict[str, Any]]) -> list[str]:
    """What was chosen, and how the trainings with it went."""
    runs, best = list(of["seeds"].values()), chosen(of) or {}
    told = [_ranged([validation(run) for run in runs], 4)]
    told += [_ranged([run[name] for run in runs], places) for name, places in (("best_epoch", 0), ("epochs", 0), ("seconds", 1))]
    return [label(best), *told, _ranged([run["processes"] for run in runs], 0), f"{runs[0]['parameters']:,}"]


def tables(rows: Rows, most_epochs: int) -> list[str]:
    """Lines of Markdown: the test under both protocols, the trainings, the trials; medians over the seeds, and ranges."""
    rows = {name: rows[name] for name in MODELS if name in rows}
    done = {name: list(of["seeds"].values()) for name, of in rows.items() if len(of["seeds"]) == len(SEEDS)}
    lines: list[str] = []
    for protocol, words in IN_WORDS.items():
        body = {
            name: [_ranged([run["test"][protocol][figure] for run in runs], 4) for figure in FIGURES.values()]
            for name, runs in done.items()
        }
        lines += _table(f"Test, {words}", list(FIGURES), body)
    head = ["chosen", "validation NDCG@10", "best epoch", "epochs", "seconds", "at most at a time", "parameters"]
    lines += _table("Trainings", head, {name: of_training(rows[name]) for name in done})
    trials = {name: of["trials"] for name, of in rows.items() if chosen(of) is not None}
    body = {name: [f"{validation(of[label(trial)]):.4f}" for trial in TRIALS] for name, of in trials.items()}
    lines += _table(f"Validation NDCG@10 of the trials, seed {TUNED_ON}", [label(trial) for trial in TRIALS], body)
    for name, of in rows.items():
        runs = [*of["trials"].values(), *of["seeds"].values()]
        if full := sum(run["epochs"] >= most_epochs for run in runs):
            lines.append(f"`{name}`: {full} of {len(runs)} trainings had all {most_epochs} epochs and might have got better yet")
    return lines


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="events file")
    parser.add_argument("--only", nargs="+", default=list(MODELS), choices=MODELS, help="models")
    parser.add_argument("--processes", type=int, default=1, help="trainings at a time")
    parser.add_argument("--alone", action="store_true", help="trainings with the chosen options one by one, trials as before")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no training begins after so many")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=1, help="of each training, on the CPU")
    parser.add_argument("--epochs", type=int, help="most epochs of a training")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=f"another of {', '.join(SETTINGS)}")
    options = parser.parse_args()
    options.changes = parse_assignments(options.set)
    # Any other is what models are compared under, or what trials are of.
    if wrong := [name for name in options.changes if name not in SETTINGS]:
        parser.error(f"--set: got {', '.join(wrong)}, expected some of {', '.join(SETTINGS)}")
    if options.epochs is not None:
        options.changes["training.max_epochs"] = options.epochs
    return options


def main() -> None:
    """Train what is not measured yet, and print the tables."""
    begun, options = time.perf_counter(), parsed()
    on_gpu, settings = options.device == "cuda", merge(SETTINGS, options.changes)
    facts, workload = environment(None if on_gpu else "cpu"), described(options.data, settings)
    # A try must not take the place of what was measured.
    saves = on_gpu and settings == merge(SETTINGS, {})
    rows = former_rows(facts, workload) if saves else {}
    failed = []
    for left, processes in ((trials_left, options.processes), (seeds_left, 1 if options.alone else options.processes)):
        trainings = [
            Training(name, *of_this, options.data, settings, options.device, options.threads)
            # The last one has the most epochs: it begins first.
            for name in sorted(options.only, key=MODELS.index, reverse=True)
            for of_this in left(rows.setdefault(name, {"trials": {}, "seeds": {}}))
        ]
        for training, future in finished(trainings, processes, begun + options.seconds):
            if (error := future.exception()) is not None:
                failed.append(f"{training}: {type(error).__name__}: {error}")
                print(f"failed: {failed[-1]}", flush=True)
            elif (found := future.result()) is not None:
                put(rows, training, found)
                print(told(training, found), flush=True)
                if saves:
                    save("next_item_models", {"environment": facts, "workload": workload, "models": rows})
    print("\n".join(tables(rows, settings["training"]["max_epochs"])))
    if failed:
        sys.exit("\n".join(["trainings that failed:", *failed]))


if __name__ == "__main__":
    main()
