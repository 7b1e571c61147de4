"""Training a ranking model of 100 features and three histories on a GPU, beside the same model of TorchRec's modules and padding.

    python -m benchmarks.ranking_step                       # some quarter of an hour
    python -m benchmarks.ranking_step --only "zipf ids skewed" --seconds 400
    python -m benchmarks.ranking_step --device cpu          # to try it, tiny sizes; nothing is saved

With `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True` in the environment memory is, on all sides, as `jagged train` has it; each
row says what was there.

A made-up table of requests with one candidate each: 50 ids and 10 numbers of the request, 30 ids and 10 numbers of the
candidate, two labels, and three histories of 200 ids on the mean. Ids are uniform or Zipf's. Lengths are skewed (log-normal, cut
at 1,000) or even (100 to 300), of which padding makes little. Tables have 5.84 million rows of width 64; three of them are read
by a history and by an id of the candidate.

`jagged` is `RankingModel` under the trainer's engine, in bfloat16 under autocast, by CUDA graphs, as the trainer does it where
nothing else is said; batches are filled up for them. Tables have fused row-wise Adagrad, all else AdamW. `jagged_clipped` also
clips the global norm, tables and all, which is the trainer's default and which updates in a backward pass cannot do.
`jagged_launches` launches kernel by kernel. `jagged_recompute` encodes histories again in the backward pass (activation
checkpointing), by graphs, and `jagged_recompute_launches` kernel by kernel.

The others (`padded_ranking`) look ids up by TorchRec's collections and pad what comes out to the batch's longest history. Blocks
attend causally without a mask, as padding stands behind; candidates attend with a mask of padding. Weights, layers, optimizers,
rates, batches and autocast are the same. They get their batches ready: ids as two KeyedJaggedTensors, numbers normalised, the
longest lengths known to the host. Their pipelines copy the next batch from page-locked memory, as ours does.

- `sharded`: `DistributedModelParallel` of one process, `apply_optimizer_in_backward` and `TrainPipelineSparseDist`.
- `fused`: `FusedEmbeddingBagCollection` and `FusedEmbeddingCollection` under `TrainPipelineBase`, without the exchange between
  processes; not on a CPU.
- `sharded_recompute`, or `unfused_recompute`: the same with `torch.utils.checkpoint` around each padded history.
- `unfused`: `EmbeddingBagCollection` and `EmbeddingCollection` with dense gradients and TorchRec's `RowWiseAdagrad`. It runs
  where FBGEMM has no kernels that train tables, which is tried first, and on a CPU. `without_kernels` says what was found.

Logits of the same weights are compared first, in float32; where they differ nothing is measured. Samples a second are of steps
one after the other, on batches that wait in page-locked memory; medians over rounds of one epoch. Memory is the most that is
allocated in a step, with weights, states, and all that graphs keep; `held_bytes` are there before the first one.

`loader` has the same steps of ours on what the product's loader gathers meanwhile, within one epoch: for it each row of the table
comes several times. The share of time that is lost to it is the part by which such a step is longer. `alone` are its samples a
second where nobody trains.

`losses` has the losses of ours and of the first of the others, from the same weights, on the same batches, by seed. A seed draws
weights and batches. Their distance, the mean over steps and seeds, is beside the deviation of ours over seeds.

Ratios are to the fastest of the others, and to the least memory of the others: of `jagged` to those that keep what they need, of
`jagged_recompute` to those that compute histories again.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from benchmarks.common import ROOT, environment, other_parts, peak_bytes, save, seconds_of, spread
from benchmarks.embedding_cases import zipf_ranks
from benchmarks.padded_ranking import DECAY, RATE, Preparation, Prepared, Rival, kinds_of, without_kernels
from jagged.allocator import NAMES
from jagged.config import TrainerConfig
from jagged.data import Column, Dataset, Kind, Schema
from jagged.data.table_batches import Batch, Part
from jagged.models import REQUEST_MODELS, RankingModel
from jagged.training.engine import Engine
from jagged.training.processes import Processes, process_group, resolve_device

# Rows of the tables of ids: of the request, of the candidate, and of those that histories share with the candidate.
REQUEST = [1_000_000] * 2 + [100_000] * 8 + [10_000] * 20 + [1_000] * 20
CANDIDATE = [1_000_000] + [100_000] * 6 + [10_000] * 10 + [1_000] * 10
HISTORIES = [1_000_000, 100_000, 10_000]
NUMBERS, TASKS = 10, ("click", "buy")
IDS, LENGTHS = ("zipf", "uniform"), ("skewed", "even")
HEADS = 2
# Our sides, with options of the trainer.
OURS: dict[str, dict[str, Any]] = {
    "jagged": {"gradient_clip_norm": None},
    "jagged_clipped": {"gradient_clip_norm": 1.0},
    "jagged_launches": {"gradient_clip_norm": None, "cuda_graphs": False},
    "jagged_recompute": {"gradient_clip_norm": None},
    "jagged_recompute_launches": {"gradient_clip_norm": None, "cuda_graphs": False},
}
# Of logits of both sides in float32, relative to the norm.
AGREEMENT = 1e-3
BARS = {"speed": 2.0, "memory": 0.5, "loader": 0.05}
# A prime, by which Zipf's frequent ids lie apart.
STRIDE = 7_919_993

IntArray = npt.NDArray[np.int64]


class Size(NamedTuple):
    """How large a run is.

    Attributes:
        rows: requests of a table.
        batches: requests of a step.
        mean, longest: of histories.
        divisor: of the tables' rows, of which there are ten at least.
        width: of tables and histories.
        layers: widths where request and candidate meet, and of towers.
        ready: batches that wait; more than a round's are taken again.
        warm, steps, rounds: steps before the first round at least, of a round, and rounds.
        loaded: samples that are trained on from the loader.
        workers: of the loader.
        seeds, curve: of the losses, and their steps.
        checked: requests whose logits are compared.
    """

    rows: int = 98_304
    batches: tuple[int, ...] = (1_024, 4_096)
    mean: int = 200
    longest: int = 1_000
    divisor: int = 1
    width: int = 64
    layers: tuple[int, ...] = (512, 256, 128)
    ready: int = 10
    warm: int = 5
    steps: int = 10
    rounds: int = 5
    loaded: int = 524_288
    workers: int = 8
    seeds: int = 3
    curve: int = 50
    checked: int = 256


FULL, TINY = Size(), Size(256, (32, 64), 8, 20, 10_000, 8, (16, 8), 2, 1, 2, 2, 256, 0, 2, 4, 32)


def lengths_of(kind: str, count: int, size: Size, rng: np.random.Generator) -> IntArray:
    """Lengths of histories, with the mean that is asked for."""
    if kind == "even":
        return rng.integers(size.mean // 2, size.mean * 3 // 2, count, endpoint=True)
    shape, low, high = np.exp(rng.normal(0, 1, count)), 0.0, float(size.longest)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if np.minimum(middle * shape, size.longest).mean() < size.mean else (low, middle)
    # Rounded at random, so that the mean stays.
    return np.floor(np.minimum(low * shape, size.longest) + rng.random(count)).clip(0, size.longest).astype(np.int64)


def ids_of(kind: str, count: int, rows: int, rng: np.random.Generator) -> IntArray:
    """Ids below `rows`."""
    if kind == "uniform":
        return rng.integers(rows, size=count)
    found: IntArray = zipf_ranks(torch.from_numpy(rng.random(count)), rows).numpy() * STRIDE % rows
    return found


def planted(ids: str, lengths: str, size: Size, directory: Path, seed: int = 0) -> Part:
    """A made-up table, whose labels depend on a number of the request and on two ids of the candidate."""
    rng, count = np.random.default_rng(seed), size.rows
    columns: dict[str, Any] = {}
    schema: list[Column] = []

    def table(rows: int) -> int:
        return max(10, rows // size.divisor)

    def add(name: str, kind: Kind, values: Any, **options: Any) -> None:
        columns[name] = values
        schema.append(Column(name, kind, **options))

    def add_id(name: str, rows: int, of: str) -> None:
        values = ids_of(ids, count, table(rows), rng)
        add(name, Kind.ID, values, of=of, table=name, encoding="range", size=table(rows))

    for name, tables in {"request": REQUEST, "item": HISTORIES, "candidate": CANDIDATE}.items():
        for place, rows in enumerate(tables):
            add_id(f"{name}{place}", rows, "request" if name == "request" else "candidate")
    for of in ("request", "candidate"):
        for place in range(NUMBERS):
            add(f"{of}_number{place}", Kind.NUMBER, rng.normal(size=count), of=of)
    for place, rows in enumerate(HISTORIES):
        ends = np.append(0, np.cumsum(lengths_of(lengths, count, size, rng)))
        values = ids_of(ids, int(ends[-1]), table(rows), rng)
        lists = pa.LargeListArray.from_arrays(pa.array(ends), pa.array(values))
        named = {"table": f"item{place}", "encoding": "range", "size": table(rows)}
        add(f"history{place}", Kind.IDS, lists, of="request", **named)
    known = columns["request_number0"] + (columns["item1"] % 7 - 3) / 2 + (columns["candidate5"] % 5 - 2) / 2
    for task, bias in zip(TASKS, (-0.5, -1.5), strict=True):
        add(task, Kind.LABEL, (rng.random(count) < 1 / (1 + np.exp(-known - bias))).astype(np.int64))
    dataset = Dataset.from_table(pa.table(columns), Schema(tuple(schema)), duplicates="keep", directory=directory, progress=False)
    train: Part = dataset.split(by="order", valid=0.01, test=0.01, progress=False).train
    return train


def ready(part: Part, batch: int, count: int, size: Size, epoch: int = 0, *, lock: bool = False) -> list[Batch]:
    """Batches that wait, in page-locked memory where that is asked for."""
    loader = part.loader(batch_size=batch, shuffle=True, max_history=size.longest, pin_memory=lock, progress=False)
    loader.set_position(epoch, 0)
    found = [of for of in itertools.islice(loader, count) if len(of) == batch]
    if not found:
        raise ValueError(f"rows: got a table of {size.rows:,}, expected one with a batch of {batch:,}")
    return found


class Ours:
    """`RankingModel` under the trainer's engine."""

    def __init__(self, model: RankingModel, processes: Processes, *, autocast: bool, kind: str = "jagged") -> None:
        config = TrainerConfig(
            device=processes.device.type, table_optimizer="rowwise-adagrad", learning_rate=RATE, weight_decay=DECAY, **OURS[kind]
        )
        self.engine = Engine(model, config, "bf16-mixed" if autocast else "32-true", processes)

    def steps(self, batches: Iterable[Any]) -> Generator[Tensor]:
        """As the trainer's loop, the loss of each."""
        return (trained.loss for trained in self.engine.steps(iter(batches)))

    def close(self) -> None:
        """End the updates of tables."""
        self.engine.close()


def model_of(part: Part, size: Size, seed: int, device: torch.device, *, recompute: bool = False) -> RankingModel:
    """Ours, with weights of a seed."""
    torch.manual_seed(seed)
    kind = REQUEST_MODELS["ranking"]
    model = kind.of(
        part,
        embedding_dim=size.width,
        num_heads=HEADS,
        max_history=size.longest,
        layer_sizes=size.layers,
        recompute=recompute,
        device=device,
    )
    assert isinstance(model, RankingModel)
    return model


def apart(ours: RankingModel, rival: Rival, batch: Batch, prepared: Prepared) -> float:
    """How far the logits of the other are from ours, by the norm; refuse it where it is too far."""
    with torch.no_grad():
        wanted = torch.stack(list(ours.logits(batch.to(rival.device)).values()), 1)
    found = rival.logits(prepared.to(rival.device))
    distance = float((found - wanted).norm() / wanted.norm())
    if not distance <= AGREEMENT:
        raise ArithmeticError(f"{rival.kind}: logits differ by {distance:.3g} of the norm, expected {AGREEMENT} at most")
    return distance


def checked(kinds: Sequence[str], part: Part, size: Size, processes: Processes) -> dict[str, Any]:
    """How far each of the others is from ours, in float32, or why it does not run here."""
    ours = model_of(part, size, 0, processes.device)
    (batch,) = ready(part, size.checked, 1, size)
    found: dict[str, Any] = {}
    for kind in kinds:
        try:
            rival = Rival(kind, ours, processes, autocast=False)
            found[kind] = apart(ours, rival, batch, Preparation(part)(batch))
            rival.close()
            del rival
        except ArithmeticError:
            raise
        except Exception as error:  # Libraries that are left out fail in ways of their own.
            found[kind] = failed(error)
        clean()
    return found


def failed(error: Exception) -> dict[str, str]:
    """What a result says of what did not run."""
    return {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:200]}


def clean() -> None:
    """Give memory back."""
    gc.collect()
    if torch.cuda.is_available():
        # cuBLAS keeps some 34 MB for each stream, graphs' too, which the next side would be charged with.
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def trainee_of(kind: str, part: Part, size: Size, seed: int, processes: Processes) -> Ours | Rival:
    """A side, with the weights of a seed."""
    model = model_of(part, size, seed, processes.device, recompute="recompute" in kind)
    autocast = processes.device.type == "cuda"
    if kind in OURS:
        return Ours(model, processes, autocast=autocast, kind=kind)
    return Rival(kind, model, processes, autocast=autocast)


def passed(steps: Iterable[Any]) -> Any:
    """Let all of them be done; the last one."""
    one = None
    for one in steps:  # noqa: B007 - it is returned
        pass
    return one


def timed(trainee: Ours | Rival, batches: Sequence[Any], size: Size, device: torch.device) -> dict[str, Any]:
    """Samples a second and memory of steps on batches that wait, of an epoch that has begun: a new one makes a new pipeline."""
    # What making it took is no memory of its steps.
    clean()
    is_cuda = device.type == "cuda"
    held = torch.cuda.memory_allocated() if is_cuda else 0
    progress = trainee.steps(itertools.cycle(batches))
    # Each batch once, and with it every size for which memory is found.
    passed(itertools.islice(progress, max(size.warm, len(batches))))
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    rounds = [seconds_of(partial(passed, itertools.islice(progress, size.steps))) for _ in range(size.rounds)]
    progress.close()
    if not bool(rounds[-1][1].isfinite()):
        raise ArithmeticError("a loss that is not finite")
    # All are of one size.
    found: dict[str, Any] = {"samples_per_second": spread([size.steps * len(batches[0]) / seconds for seconds, _ in rounds])}
    if is_cuda:
        found |= {"peak_bytes": peak_bytes(), "held_bytes": held}
    return found


def loaded(trainee: Ours | Rival, part: Part, batch: int, size: Size, *, lock: bool) -> dict[str, Any]:
    """Samples a second of steps on what the loader gathers meanwhile, and of the loader alone."""
    steps = -(-size.loaded // batch)
    # An epoch that has them all, and what pipelines take ahead.
    times = 1 + 2 * (size.warm + steps + 1) * batch // len(part)
    loader = replace(part, rows=np.repeat(part.rows, times)).loader(
        batch_size=batch, shuffle=True, max_history=size.longest, num_workers=size.workers, pin_memory=lock, progress=False
    )
    source = iter(loader)
    found: dict[str, Any] = {"workers": size.workers}
    for name, progress in {"samples_per_second": trainee.steps(source), "alone": source}.items():
        passed(itertools.islice(progress, size.warm))
        found[name] = steps * batch / seconds_of(partial(passed, itertools.islice(progress, steps)))[0]
    loader.close()
    return found


def filled(batches: Sequence[Batch], names: Iterable[str]) -> float:
    """The share of places that padding to the batch's longest history fills with events."""
    lengths = [batch.features[name].lengths() for batch in batches for name in names]
    return sum(int(of.sum()) for of in lengths) / sum(len(of) * int(of.max()) for of in lengths)


def measured(batch: int, kinds: Sequence[str], part: Part, size: Size, processes: Processes) -> dict[str, Any]:
    """All sides with one size of batches, one after the other."""
    lock = processes.device.type == "cuda"
    batches, prepared = ready(part, batch, size.ready, size, lock=lock), Preparation(part, lock=lock)
    row: dict[str, Any] = {"requests": batch, "filled": filled(batches, prepared.inputs.list_histories)}
    row["allocator"] = " ".join(os.environ[name] for name in NAMES if name in os.environ)
    given: Sequence[Any] = batches
    for kind in (*OURS, *kinds):
        if kind not in OURS and given is batches:
            given = [prepared(of) for of in batches]
        trainee = None
        try:
            trainee = trainee_of(kind, part, size, 0, processes)
            row[kind] = timed(trainee, given, size, processes.device)
            if kind == "jagged":
                row["loader"] = loaded(trainee, part, batch, size, lock=lock)
            trainee.close()
        except Exception as error:
            # Ours may lack memory, and nothing else; the others may lack libraries, too.
            if kind in OURS and not isinstance(error, torch.OutOfMemoryError):
                raise
            row[kind] = failed(error)
        trainee = None
        clean()
    return row | {"ratios": ratios(row, kinds)}


def ratios(row: Mapping[str, Any], kinds: Sequence[str]) -> dict[str, float]:
    """Ours to the best of the others, and the share of time that is lost to the loader; without what did not run."""

    def speed(kind: str) -> float:
        return float(row[kind]["samples_per_second"]["median"])

    found: dict[str, float] = {}
    if "failed" not in row["jagged"]:
        found["loader"] = max(0.0, 1 - row["loader"]["samples_per_second"] / speed("jagged"))
    for side, behind in (("jagged", ""), ("jagged_recompute", "_recompute")):
        ran = [kind for kind in kinds if "failed" not in row[kind] and kind.endswith("_recompute") == bool(behind)]
        peaks = [row[kind]["peak_bytes"] for kind in ran if "peak_bytes" in row[kind]]
        if ran and "failed" not in row[side]:
            found[f"speed{behind}"] = speed(side) / max(map(speed, ran))
            if peaks:
                found[f"memory{behind}"] = row[side]["peak_bytes"] / min(peaks)
    return found


def curves(kind: str, part: Part, size: Size, processes: Processes) -> dict[str, Any]:
    """Losses of ours and of the other, by seed, and how far they are from each other."""
    lock = processes.device.type == "cuda"
    found: dict[str, dict[str, Any]] = {}
    for seed in range(size.seeds):
        batches = ready(part, size.batches[0], size.curve, size, epoch=seed, lock=lock)
        of_seed = found[str(seed)] = {}
        for side in ("jagged", kind):
            prepared = Preparation(part, lock=lock)
            trainee = trainee_of(side, part, size, seed, processes)
            losses = trainee.steps(batches if side == "jagged" else map(prepared, batches))
            of_seed[side] = torch.stack(list(losses)).tolist()
            trainee.close()
            del trainee
            clean()
    return {"beside": kind, "seeds": found, **distances(found, kind)}


def distances(seeds: Mapping[str, Mapping[str, Sequence[float]]], kind: str) -> dict[str, Any]:
    """How far two curves are apart, the mean over steps and seeds, and the deviation of ours over seeds, the mean over steps."""
    ours, others = (np.array([of[side] for of in seeds.values()]) for side in ("jagged", kind))
    distance, noise = float(np.abs(ours - others).mean()), float(ours.std(0, ddof=1).mean())
    ends = {side: float(of[:, -10:].mean()) for side, of in (("jagged", ours), (kind, others))}
    return {"distance": distance, "noise": noise, "first": float(ours[:, 0].mean()), "last_ten": ends, "met": distance <= noise}


def line_of(name: str, row: Mapping[str, Any], kinds: Sequence[str]) -> str:
    """What a row says, beside what is asked."""
    parts = []
    for kind in (*OURS, *kinds):
        of = row[kind]
        if "failed" in of:
            parts.append(f"{kind} failed: {of['failed']}")
            continue
        memory = f", {of['peak_bytes'] / 1e9:.2f} GB" if "peak_bytes" in of else ""
        parts.append(f"{kind} {of['samples_per_second']['median']:,.0f} samples/s{memory}")
    if "loader" in row:
        own = row["loader"]
        parts.append(f"from the loader {own['samples_per_second']:,.0f}, it alone {own['alone']:,.0f}")
    asked = {"speed": f"at least {BARS['speed']}", "memory": f"at most {BARS['memory']}", "loader": f"at most {BARS['loader']}"}
    parts += [f"{of} {value:.3f} ({asked[of.split('_')[0]]})" for of, value in row["ratios"].items()]
    return f"{name}, {row['filled']:.0%} filled: {'; '.join(parts)}"


def line_of_curves(name: str, of: Mapping[str, Any]) -> str:
    """What the losses say."""
    ends = ", ".join(f"{side} {value:.4f}" for side, value in of["last_ten"].items())
    return (
        f"{name}: from {of['first']:.4f}, at the end {ends}; {of['distance']:.2g} apart, "
        f"{of['noise']:.2g} over seeds (at least as much): {'met' if of['met'] else 'missed'}"
    )


def cases(size: Size, words: Sequence[str]) -> dict[tuple[str, str], dict[str, int | None]]:
    """By the ids and lengths of a table the cases that have one of these words, each with the requests of a step or None."""
    found: dict[tuple[str, str], dict[str, int | None]] = {}
    for ids, lengths in itertools.product(IDS, LENGTHS):
        table = f"{ids} ids, {lengths} lengths"
        of: dict[str, int | None] = {f"{table}, {batch:,} requests": batch for batch in size.batches}
        of[f"{table}, losses"] = None
        chosen = {
            name: batch for name, batch in of.items() if any(word.replace(",", "") in name.replace(",", "") for word in words)
        }
        if chosen:
            found[ids, lengths] = chosen
    return found


def run(
    chosen: Mapping[tuple[str, str], Mapping[str, int | None]],
    size: Size,
    device: torch.device,
    results: dict[str, Any],
    *,
    seconds: float = float("inf"),
    keep: Callable[[], Any] = lambda: None,
) -> None:
    """Measure cases into the results, and call `keep` after each; none begins after so many seconds."""
    begun = time.perf_counter()
    results["without_kernels"] = missing = without_kernels(device)
    kinds = kinds_of(device, missing)
    print(f"beside {', '.join(kinds)}" + (f": FBGEMM trains no tables, {missing}" if missing else ""), flush=True)
    with process_group(device) as processes, tempfile.TemporaryDirectory() as folder:
        for (ids, lengths), of_table in chosen.items():
            if time.perf_counter() - begun > seconds:
                break
            table = f"{ids} ids, {lengths} lengths"
            part = planted(ids, lengths, size, Path(folder) / f"{ids}-{lengths}")
            agreement = checked(kinds, part, size, processes)
            if not any(isinstance(of, float) for of in agreement.values()):
                # Kernels are there, and something else is not.
                agreement |= checked(["unfused"], part, size, processes)
            results["agreement"][table] = agreement
            print(f"{table}: {len(part):,} requests after {time.perf_counter() - begun:.0f} s, logits {agreement}", flush=True)
            runs = [kind for kind, of in agreement.items() if isinstance(of, float)]
            for name, batch in of_table.items():
                if time.perf_counter() - begun > seconds:
                    break
                if batch is not None:
                    results["steps"][name] = found = measured(batch, runs, part, size, processes)
                    print(line_of(name, found, runs), flush=True)
                elif runs:
                    results["losses"][name] = found = curves(runs[0], part, size, processes)
                    print(line_of_curves(name, found), flush=True)
                keep()


def main() -> None:
    """Measure all cases, or some, and save what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", default=[""], help="parts of cases' names")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no case begins after so many")
    parser.add_argument("--workers", type=int, help="of the loader")
    options = parser.parse_args()
    is_cuda = options.device == "cuda"
    size = FULL if is_cuda else TINY
    size = size if options.workers is None else size._replace(workers=options.workers)
    facts = environment(options.device)
    former = other_parts("ranking_step", facts) if is_cuda else {}
    results: dict[str, Any] = {"environment": facts, "workload": size._asdict(), "bars": BARS}
    results |= {part: former.get(part, {}) for part in ("agreement", "steps", "losses")}

    def keep() -> None:
        if is_cuda:
            print(f"saved in {save('ranking_step', results).relative_to(ROOT)}", flush=True)

    run(cases(size, options.only), size, resolve_device(options.device), results, seconds=options.seconds, keep=keep)


if __name__ == "__main__":
    main()
