"""Measuring a plan for embedding bags: which schedule each class of features takes, how many programs run, and what is counted.

Features of one width whose tables, mean lengths and shares of empty bags are alike form a class, which is tuned once. The local
stage goes through the classes, those that read most first: for every schedule of a class the whole launch is timed, with all
other features at the best that is known so far, for what a schedule is worth depends on what runs beside it. The global stage
asks how many programs each multiprocessor should have; if that changes, the local stage is gone through again. A plan is data
to the kernels, so nothing is compiled for a candidate, and one captured graph serves them all. The backward stage asks up to how
many rows tables should have whose lookups are counted, which changes what is launched: a graph for each candidate.
"""

from __future__ import annotations

import math
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torchrec.modules.embedding_configs import PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from tqdm import tqdm

from jagged.artifacts import writing
from jagged.data import read_batches
from jagged.modules import ScheduledEmbeddingBagCollection
from jagged.ops import BagLayout, BagPlan, BagSchedule, BagSchedules, embedding_bags
from jagged.ops.embedding_bag.layout import MOST_COUNTED
from jagged.ops.embedding_bag.plans import BY_MAP, KINDS, MOST_PROGRAMS, PROGRAMS, code_of

STEPS = (1, 2, 4, 8, 16, 32, 64)
CANDIDATES = (BY_MAP, *(code_of(kind, steps) for kind in KINDS for steps in STEPS))
PROGRAMS_TRIED = (8, 12, 16, 20, 24, 28, 32)
# Numbers of rows of tables that are tried, beside none and the rule.
MOST_ROWS_TRIED = 6
# Times of each candidate, and how many times as many of the best one and of what it is to replace.
REPEATS, CONFIRMED = 5, 4
# Classes that are printed.
SHOWN = 12
CURE = "choose another name"

Key = TypeVar("Key")


class TuningError(ValueError):
    """What keeps a plan from being measured or written; the message says what was found and what to do."""


class Trial(NamedTuple):
    """A launch to be timed.

    Args:
        features: those that are launched, by their places in the module's output.
        codes: for each of them a schedule, as `BagSchedules` has it.
        programs: for each multiprocessor.
        is_backward: with the gradient of the tables.
        counted_rows: most rows of tables whose lookups are counted for it; None: by the rule.
    """

    features: tuple[int, ...]
    codes: tuple[int, ...]
    programs: int
    is_backward: bool = False
    counted_rows: int | None = None


# For each trial as many times as asked for, in microseconds, measured in turns.
Timer = Callable[[Sequence[Trial], int], list[list[float]]]


class FeatureClass(NamedTuple):
    """Features that are tuned as one.

    Args:
        features: by their places in the module's output.
        width: of their tables.
        rows: of the first one's table.
        mean: lookups of a bag of the first one that is not empty.
        empty: share of the first one's bags.
        read: bytes of all their lookups.
    """

    features: tuple[int, ...]
    width: int
    rows: int
    mean: float
    empty: float
    read: int


class Tuned(NamedTuple):
    """A plan and what it was chosen by; printed, a short table.

    Args:
        plan: what `ScheduledEmbeddingBagCollection` takes.
        before: microseconds of all batches' launches without a plan, where the lengths of each batch choose.
        after: with it; the same where no schedule was faster.
        choices: the classes, those that read most first, and their schedules, -1 where the map chooses.
        seconds: that tuning took.
        backward: microseconds of all batches' forward and backward passes with the rule of what is counted, and with the plan's
            number; None where they were not timed.
    """

    plan: BagPlan
    before: float
    after: float
    choices: list[tuple[FeatureClass, int]]
    seconds: float
    backward: tuple[float, float] | None = None

    def __str__(self) -> str:
        count = sum(len(of.features) for of, _ in self.choices)
        lines = [
            f"{count:,} features in {len(self.choices):,} classes on {self.plan.gpu}, {self.seconds:.0f} s",
            f"{'features':>8} {'width':>5} {'rows':>11} {'mean length':>11} {'empty':>6}  schedule",
        ]
        for of, code in self.choices[:SHOWN]:
            numbers = f"{len(of.features):>8,} {of.width:>5} {of.rows:>11,} {of.mean:>11.1f} {of.empty:>6.0%}"
            lines.append(f"{numbers}  {_words(code)}")
        if len(self.choices) > SHOWN:
            lines.append(f"and {len(self.choices) - SHOWN:,} classes that read less")
        if self.backward is not None:
            before, after = self.backward
            rows = self.plan.counted_rows
            lines.append(f"tables counted in backward: {'by the rule' if rows is None else f'of up to {rows:,} rows'}")
            lines.append(
                f"forward and backward of all batches: {before:,.1f} us by the rule, {after:,.1f} us with the plan's number"
            )
        if self.plan.features:
            lines.append(f"programs for each multiprocessor: {self.plan.programs}")
            lines.append(f"launches of all batches: {self.before:,.1f} us without the plan, {self.after:,.1f} us with it")
        else:
            lines.append(f"launches of all batches: {self.before:,.1f} us without a plan")
            lines.append("no schedule was faster than the batch-driven choice")
        return "\n".join(lines)


def tune(
    module: ScheduledEmbeddingBagCollection,
    batches: Iterable[KeyedJaggedTensor],
    *,
    programs: Sequence[int] = PROGRAMS_TRIED,
    alone: bool = False,
    backward: bool = True,
    repeats: int = REPEATS,
    timer: Timer | None = None,
    progress: bool = True,
) -> Tuned:
    """Measure a plan for a module's tables on batches of the kind and size that it will see.

    Args:
        module: with its tables on the GPU that the plan is for; nothing is changed.
        batches: a few, with keys for all features.
        programs: for each multiprocessor, that are tried beside the default.
        alone: tune each class with no other features in the launch, and combine what was best; for comparison.
        backward: time backward passes, too, which take as much memory again as the tables, and choose which tables are counted
            there; False for a module that infers.
        repeats: times of each candidate.
        timer: what measures, for tests; None: replays of CUDA graphs.
        progress: show a progress bar.

    Returns:
        A plan that is faster than none by more than the noise, or one without features, which is no plan: no schedule was
        faster than what the lengths of each batch choose.

    Raises:
        TuningError: no batches, or without a timer tables that are not on a GPU.
        ValueError: keys that are missing, or a number of programs out of range.

    Source:
        Pan et al., RecFlex: Enabling Feature Heterogeneity-Aware Optimization for Deep Recommendation Models with Flexible
        Schedules, SC 2024: tuning in two stages.
    """
    begun = time.perf_counter()
    if wrong := [of for of in programs if not 1 <= of <= MOST_PROGRAMS]:
        raise ValueError(f"programs: expected 1 to {MOST_PROGRAMS} for each multiprocessor, got {wrong[0]}")
    on_gpu = module.device.type == "cuda"
    if timer is None and not on_gpu:
        raise TuningError(
            f"module: expected tables on an NVIDIA GPU, got {module.device}; a plan is measured on the GPU it is for"
        )
    features = [batch.to(module.device) for batch in batches]
    if not features:
        raise TuningError("batches: expected at least one, got none")
    launches = _launches(module, features)
    classes = _classes(launches)
    search = _Search(ReplayTimer(launches) if timer is None else timer, classes, repeats)
    rows_tried = _rows_tried(launches) if backward else ()
    times_of_backward = None
    total = len(classes) + 1 + bool(rows_tried)
    with tqdm(total=total, desc="tune", unit="class", leave=False, delay=2, disable=not progress) as bar:
        search.local(bar, alone=alone)
        if not alone and search.occupancy(programs):
            bar.total += len(classes)
            search.local(bar)
        bar.update()
        if rows_tried:
            times_of_backward = search.backward(rows_tried)
            bar.update()
    before, after = search.compared(keep_slower=alone)
    names = [name for of_part in module.feature_names() for name in of_part]
    shapes = [(of.rows[table], of.widths[table]) for of in (launch.layout for launch in launches) for table in of.tables or ()]
    chosen = {
        name: BagSchedule(*shape, KINDS[code & 3], code >> 2)
        for name, shape, code in zip(names, shapes, search.codes, strict=True)
        if code != BY_MAP
    }
    gpu = torch.cuda.get_device_name(module.device) if on_gpu else "CPU"
    choices = [(of, search.codes[of.features[0]]) for of in classes]
    plan = BagPlan(gpu, chosen, search.programs, search.counted_rows)
    return Tuned(plan, before, after, choices, time.perf_counter() - begun, times_of_backward)


def tune_recorded(
    batches: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    programs: Sequence[int] | None = None,
    backward: bool = True,
    timer: Timer | None = None,
    progress: bool = True,
) -> Tuned:
    """Measure a plan on batches that `jagged.data.record_batches` wrote, for tables of random numbers, and write it.

    Args:
        batches: the file.
        out: the plan's file; a plan that is there is replaced, and nothing else.
        programs: as in `tune`; None: its default.
        backward: as in `tune`.
        timer: as in `tune`; on the CPU.
        progress: show a progress bar.

    Raises:
        TuningError: no GPU, or an `out` that cannot be written or is no plan.
        DataError: a file of another kind.
    """
    target = Path(out)
    if timer is None and not torch.cuda.is_available():
        raise TuningError("found no NVIDIA GPU; a plan is measured on the GPU that it is for")
    _check_target(target)
    recorded = read_batches(batches)
    # Only sums are weighted.
    is_weighted = recorded.is_weighted and all(table.pooling == PoolingType.SUM for table in recorded.tables)
    device = "cuda" if timer is None else "cpu"
    module = ScheduledEmbeddingBagCollection(recorded.tables, is_weighted, device)
    tried = PROGRAMS_TRIED if programs is None else programs
    tuned = tune(module, recorded.batches, programs=tried, backward=backward, timer=timer, progress=progress)
    with writing(f"out: {target}", CURE, TuningError):
        tuned.plan.save(target)
    return tuned


def _check_target(path: Path) -> None:
    """Refuse a place where no plan can be written, before it is measured, or where something else would be lost."""
    with writing(f"out: {path}", CURE, TuningError):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            if path.exists():
                BagPlan.load(path)
        except ValueError:
            raise TuningError(f"out: {path}: is there, and is no plan of this version; {CURE}, or remove it") from None


class _Lookups(NamedTuple):
    """A batch of one launch, as the operator takes it."""

    ids: Tensor
    offsets: Tensor
    weights: Tensor | None
    sizes: list[int] | None

    def sizes_of(self, count: int) -> list[int]:
        """Bags of each of `count` features."""
        return self.sizes if self.sizes is not None else [(self.offsets.shape[0] - 1) // max(1, count)] * count


class _Launch(NamedTuple):
    """The features of one data type, and their batches."""

    storage: Tensor
    layout: BagLayout
    batches: list[_Lookups]
    output_dtype: torch.dtype

    def some(self, places: Sequence[int]) -> _Launch:
        """The same tables with some of their features."""
        layout = self.layout
        assert layout.tables is not None
        assert layout.means is not None
        fewer = BagLayout(
            layout.rows, layout.widths, tuple(layout.tables[i] for i in places), tuple(layout.means[i] for i in places)
        )
        return self._replace(layout=fewer, batches=[_chosen(of, layout.num_features, places) for of in self.batches])


def _launches(module: ScheduledEmbeddingBagCollection, batches: Sequence[KeyedJaggedTensor]) -> list[_Launch]:
    launches = []
    with torch.no_grad():
        for part in module._parts:
            storage, dtype = part.tables.whole(), module._output_dtype
            lookups = [_Lookups(*module._lookups_of(part, features)) for features in batches]
            launches.append(
                _Launch(storage, part.tables.layout, lookups, dtype if dtype in (torch.float32, storage.dtype) else torch.float32)
            )
    return launches


def _chosen(lookups: _Lookups, count: int, places: Sequence[int]) -> _Lookups:
    """The lookups of some features."""
    sizes = lookups.sizes_of(count)
    firsts, device = [0, *accumulate(sizes)], lookups.offsets.device
    bags = torch.cat([torch.arange(firsts[place], firsts[place + 1], device=device) for place in places])
    starts, lengths = lookups.offsets[:-1][bags], lookups.offsets.diff()[bags]
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0, dtype=lengths.dtype)])
    found = torch.repeat_interleave(starts - offsets[:-1], lengths)
    found += torch.arange(len(found), device=device)
    weights = None if lookups.weights is None else lookups.weights[found]
    return _Lookups(lookups.ids[found], offsets, weights, None if lookups.sizes is None else [sizes[place] for place in places])


def _classes(launches: Sequence[_Launch]) -> list[FeatureClass]:
    """Features of one launch that are alike, those that read most first."""
    alike: dict[tuple[int, ...], list[tuple[int, int, int, float, float, int]]] = {}
    first = 0
    for number, (_, layout, batches, _) in enumerate(launches):
        counts = sum(_counts(of, layout.num_features) for of in batches)
        assert isinstance(counts, Tensor)
        assert layout.tables is not None
        for feature, (table, (bags, full, lookups)) in enumerate(zip(layout.tables, counts.tolist(), strict=True)):
            rows, width = layout.rows[table], layout.widths[table]
            mean, empty = lookups / max(1, full), 1 - full / max(1, bags)
            # Rows within a factor of four, means within one of the square root of two, empty bags to a quarter.
            key = (number, width, rows.bit_length() // 2, round(2 * math.log2(max(1.0, mean))), round(4 * empty))
            alike.setdefault(key, []).append((first + feature, width, rows, mean, empty, lookups * max(32, 4 * width)))
        first += layout.num_features
    classes = [FeatureClass(tuple(one[0] for one in of), *of[0][1:5], read=sum(one[5] for one in of)) for of in alike.values()]
    return sorted(classes, key=lambda of: -of.read)


def _counts(lookups: _Lookups, count: int) -> Tensor:
    """For each feature its bags, those that are not empty, and its lookups: `[F, 3]`."""
    parts = lookups.offsets.diff().cpu().split(lookups.sizes_of(count))
    return torch.tensor([(len(of), int((of > 0).sum()), int(of.sum())) for of in parts], dtype=torch.int64).reshape(-1, 3)


def _rows_tried(launches: Sequence[_Launch]) -> tuple[int, ...]:
    """Up to how many rows tables may be counted: none, and some of the tables' own numbers; empty where no table is so small."""
    rows = sorted({of for launch in launches for of in launch.layout.rows if of <= MOST_COUNTED})
    if len(rows) > MOST_ROWS_TRIED:
        # The fewest and the most among them.
        rows = [rows[place * (len(rows) - 1) // (MOST_ROWS_TRIED - 1)] for place in range(MOST_ROWS_TRIED)]
    return (0, *rows) if rows else ()


class _Search:
    """The best schedules and number of programs that are known so far."""

    def __init__(self, timer: Timer, classes: Sequence[FeatureClass], repeats: int) -> None:
        self._time, self._classes, self._repeats = timer, classes, repeats
        count = sum(len(of.features) for of in classes)
        self._without_plan = Trial(tuple(range(count)), (BY_MAP,) * count, PROGRAMS)
        self.codes, self.programs = [BY_MAP] * count, PROGRAMS
        self.counted_rows: int | None = None

    def local(self, bar: Any, *, alone: bool = False) -> None:
        """Give every class the schedule that is best for the whole launch, or with `alone` for its own."""
        best = list(self.codes)
        for of in self._classes:
            launched = of.features if alone else tuple(range(len(best)))
            known = dict.fromkeys(of.features, BY_MAP) if alone else dict(enumerate(best))
            trials = {}
            for code in CANDIDATES:
                codes = {**known, **dict.fromkeys(of.features, code)}
                trials[code] = Trial(launched, tuple(codes[feature] for feature in launched), self.programs)
            chosen = self._best(trials, known[of.features[0]])
            for feature in of.features:
                best[feature] = chosen
            bar.update()
        self.codes = best

    def occupancy(self, programs: Sequence[int]) -> bool:
        """Take the number of programs that is best for the whole launch; tell whether it is another one."""
        former = self.programs
        trials = {of: self._whole(of) for of in dict.fromkeys((former, *programs))}
        self.programs = self._best(trials, former)
        return self.programs != former

    def backward(self, rows_tried: Sequence[int]) -> tuple[float, float] | None:
        """Take the number of rows that is best for the backward pass; return median times by the rule and with the number.

        None, and the rule, where the gradient finds no memory.
        """
        trials = {of: self._without_plan._replace(is_backward=True, counted_rows=of) for of in (None, *rows_tried)}
        try:
            chosen = self._best(trials, None)
            before, after = self._confirmed(trials[None], trials[chosen])
        except torch.OutOfMemoryError:
            warnings.warn(
                "backward: found no memory for gradients as large as the tables; the plan leaves what is counted to the rule",
                UserWarning,
                stacklevel=3,
            )
            return None
        if is_faster(after, before):
            self.counted_rows = chosen
        else:
            after = before
        return statistics.median(before), statistics.median(after)

    def compared(self, *, keep_slower: bool) -> tuple[float, float]:
        """Median times without and with what was found, which goes where it is no faster or has no schedule."""
        if all(code == BY_MAP for code in self.codes):
            # Another number of programs by itself is no plan.
            self.programs = PROGRAMS
        before, after = self._confirmed(self._without_plan, self._whole(self.programs))
        if not keep_slower and not is_faster(after, before):
            self.codes, self.programs, after = list(self._without_plan.codes), PROGRAMS, before
        return statistics.median(before), statistics.median(after)

    def _whole(self, programs: int) -> Trial:
        return self._without_plan._replace(codes=tuple(self.codes), programs=programs)

    def _best(self, trials: Mapping[Key, Trial], known: Key) -> Key:
        """The fastest of some trials where it is faster than the known one in a second comparison too."""
        times = self._time(list(trials.values()), self._repeats)
        medians = dict(zip(trials, map(statistics.median, times), strict=True))
        best = min(medians, key=lambda key: medians[key])
        if best == known or medians[best] >= medians[known]:
            return known
        # The fastest of many is one that was lucky, too.
        old, new = self._confirmed(trials[known], trials[best])
        return best if is_faster(new, old) else known

    def _confirmed(self, old: Trial, new: Trial) -> tuple[list[float], list[float]]:
        """Many times of two trials, the same ones where they are one."""
        times = self._time(list(dict.fromkeys((old, new))), CONFIRMED * self._repeats)
        return times[0], times[-1]


def is_faster(new: Sequence[float], old: Sequence[float]) -> bool:
    """Tell whether times that were taken in turns with others are lower by more than twice the error of their difference."""
    saved = [before - after for before, after in zip(old, new, strict=True)]
    middle = statistics.median(saved)
    # Of a median of normal numbers, whose deviation the median of absolute ones gives.
    error = 1.253 * 1.483 * statistics.median(abs(one - middle) for one in saved) / math.sqrt(len(saved))
    return middle > 2 * error


class ReplayTimer:
    """Times by replays of a graph of all batches' launches; the schedules of a trial are written where the graph reads them."""

    def __init__(self, launches: Sequence[_Launch]) -> None:
        self._launches = launches
        # By a trial without codes, and whether nothing is planned, so that small batches do without the map: a graph with what it
        # reads, schedules and launches, whose layouts and ids may be its own.
        self._captured: dict[tuple[Trial, bool], tuple[torch.cuda.CUDAGraph, list[Tensor], list[_Launch]]] = {}
        # Nobody reads what graphs leave, so that all use the same memory: gradients are as large as the tables.
        self._pool: Any = None

    def __call__(self, trials: Sequence[Trial], repeats: int) -> list[list[float]]:
        """Return for each trial its times in microseconds."""
        with torch.no_grad(), torch.cuda.device(self._launches[0].storage.device):
            runs = [self._run(trial) for trial in trials]
            times: list[list[float]] = [[] for _ in trials]
            # The first turn warms up.
            for turn in range(repeats + 1):
                for (graph, held, wanted), of_trial in zip(runs, times, strict=True):
                    for codes, values in zip(held, wanted, strict=True):
                        codes.copy_(values)
                    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                    start.record()
                    graph.replay()
                    end.record()
                    end.synchronize()
                    if turn:
                        of_trial.append(start.elapsed_time(end) * 1e3)
        return times

    def _run(self, trial: Trial) -> tuple[torch.cuda.CUDAGraph, list[Tensor], list[Tensor]]:
        """The graph of a trial, what it reads schedules from, and those of the trial."""
        is_plain = trial.programs == PROGRAMS and all(code == BY_MAP for code in trial.codes)
        key = trial._replace(codes=()), is_plain
        if any((of.features, of.is_backward) != (trial.features, trial.is_backward) for of, _ in self._captured):
            # Of features, or of a pass, that are done with.
            self._captured.clear()
            self._pool = None
        if key not in self._captured:
            self._captured[key] = self._capture(*key)
        graph, held, _ = self._captured[key]
        device = held[0].device
        wanted = torch.tensor(trial.codes, dtype=torch.int32).to(device).split([len(codes) for codes in held])
        return graph, held, list(wanted)

    def _capture(self, key: Trial, is_plain: bool) -> tuple[torch.cuda.CUDAGraph, list[Tensor], list[_Launch]]:
        launches = list(_of_features(self._launches, key.features))
        held = [torch.full((of.layout.num_features,), BY_MAP, dtype=torch.int32, device=of.storage.device) for of in launches]

        def work() -> None:
            for launch, codes in zip(launches, held, strict=True):
                for of in launch.batches:
                    schedules = BagSchedules(None if is_plain else codes, key.programs, key.counted_rows)
                    (_gradient if key.is_backward else _look_up)(launch, of, schedules)

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # Compiles, and puts layouts on the device.
            work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=self._pool):
            work()
        return graph, held, launches


def _of_features(launches: Sequence[_Launch], features: tuple[int, ...]) -> Iterable[_Launch]:
    """The launches that some features take part in, with these alone."""
    first = 0
    for launch in launches:
        count = launch.layout.num_features
        places = [feature - first for feature in features if first <= feature < first + count]
        first += count
        if places:
            yield launch if len(places) == count else launch.some(places)


def _look_up(launch: _Launch, of: _Lookups, schedules: BagSchedules) -> Tensor:
    return embedding_bags(
        launch.storage,
        launch.layout,
        of.ids,
        of.offsets,
        per_sample_weights=of.weights,
        batch_sizes=of.sizes,
        output_dtype=launch.output_dtype,
        schedules=schedules,
    )


def _gradient(launch: _Launch, of: _Lookups, schedules: BagSchedules) -> Tensor:
    """The gradient of all tables, for ones."""
    with torch.enable_grad():
        storage = launch.storage.detach().requires_grad_()
        weights = None if of.weights is None else of.weights.detach()
        output = _look_up(launch._replace(storage=storage), of._replace(weights=weights), schedules)
    (grad,) = torch.autograd.grad(output, storage, torch.ones_like(output))
    return grad


def _words(code: int) -> str:
    if code == BY_MAP:
        return "by the lengths of each batch"
    return f"{KINDS[code & 3]}, {code >> 2} step{'s' * (code >> 2 > 1)}"
