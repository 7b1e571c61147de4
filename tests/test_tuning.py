"""The tuner with a clock of its own making: what it finds, what it does not take for better, and what it writes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from jagged import cli, tuning
from jagged.data import DataError, record_batches
from jagged.modules import ScheduledEmbeddingBagCollection
from jagged.ops import BagPlan, BagSchedule
from jagged.ops.embedding_bag.plans import BY_MAP, PROGRAMS, code_of
from jagged.tuning import CANDIDATES, Trial, TuningError, is_faster, tune, tune_recorded

ONE, FEW, SOME, MANY = range(4)
# Two features of long bags, which are alike, one of short ones, one of another width, and one of another data type.
LENGTHS = {"long": 40, "also_long": 41, "short": 1, "wide": 40, "half": 40}


def tables() -> list[EmbeddingBagConfig]:
    def table(feature: str, width: int, rows: int = 1000, **options: Any) -> EmbeddingBagConfig:
        return EmbeddingBagConfig(
            name=f"table_{feature}", num_embeddings=rows, embedding_dim=width, feature_names=[feature], **options
        )

    return [
        table("long", 8),
        table("half", 8, data_type=DataType.BF16),
        table("short", 8),
        table("also_long", 8, 900),
        table("wide", 64),
    ]


def batch(size: int = 4, *, weighted: bool = False, ragged: bool = False) -> KeyedJaggedTensor:
    sizes = [size + place * ragged for place in range(len(LENGTHS))]
    lengths = torch.cat([torch.full((count,), length) for count, length in zip(sizes, LENGTHS.values(), strict=True)])
    options: dict[str, Any] = {"stride_per_key_per_rank": torch.tensor(sizes)[:, None]} if ragged else {}
    total = int(lengths.sum())
    ids, weights = torch.arange(total) % 900, torch.ones(total) if weighted else None
    return KeyedJaggedTensor(list(LENGTHS), ids, weights=weights, lengths=lengths, **options)


def module(**options: Any) -> ScheduledEmbeddingBagCollection:
    return ScheduledEmbeddingBagCollection(tables(), **options)


# The features' places: those of float32 first, in the tables' order.
PLACES = {"long": 0, "short": 1, "also_long": 2, "wide": 3, "half": 4}


def of_feature(trial: Trial, name: str) -> int | None:
    """The code of a feature that is launched."""
    return trial.codes[trial.features.index(PLACES[name])] if PLACES[name] in trial.features else None


class Clock:
    """Times that a function of the trial makes up, as often as asked, and what was asked for."""

    def __init__(self, cost: Callable[[Trial], float], noise: Sequence[float] = (0.0,)) -> None:
        self.cost, self.noise, self.trials, self.calls = cost, noise, 0, 0

    def __call__(self, trials: Sequence[Trial], repeats: int) -> list[list[float]]:
        self.trials += len(trials)
        times = []
        for trial in trials:
            times.append([self.cost(trial) + self.noise[(self.calls + i) % len(self.noise)] for i in range(repeats)])
            self.calls += 1
        return times


BEST = {"long": (MANY, 8), "also_long": (MANY, 8), "short": (ONE, 32), "wide": (SOME, 2), "half": (FEW, 4)}


def distance(code: int, best: tuple[int, int]) -> float:
    """What another kind or number of steps costs."""
    if code == BY_MAP:
        return 10.0
    return 3.0 * abs((code & 3) - best[0]) + abs((code >> 2).bit_length() - best[1].bit_length())


def separate(trial: Trial) -> float:
    """Features that do not know of one another; most programs are not best."""
    parts = [distance(code, BEST[name]) for name in BEST if (code := of_feature(trial, name)) is not None]
    return 100 + sum(parts) + abs(trial.programs - 20)


def crowded(trial: Trial) -> float:
    """Alone, many is best for both classes of long bags; beside one another they are in each other's way."""
    many = [
        name
        for name in ("long", "also_long", "wide")
        if (code := of_feature(trial, name)) not in (None, BY_MAP) and code & 3 == MANY
    ]
    cost = sum(
        {MANY: 1.0, SOME: 2.0}.get(code & 3, 5.0)
        for name in PLACES
        if (code := of_feature(trial, name)) is not None and code != BY_MAP
    )
    return 50 + cost + 6.0 * trial.codes.count(BY_MAP) + 10.0 * (len(many) > 2)


def test_finds_the_best_of_every_class() -> None:
    clock = Clock(separate)
    tuned = tune(module(), [batch(), batch(7)], timer=clock, progress=False)
    shapes = {"long": (1000, 8), "also_long": (900, 8), "short": (1000, 8), "wide": (1000, 64), "half": (1000, 8)}
    kinds = ("one", "few", "some", "many")
    expected = {name: BagSchedule(*shapes[name], kinds[kind], steps) for name, (kind, steps) in BEST.items()}
    assert tuned.plan == BagPlan("CPU", expected, programs=20)
    assert (tuned.before, tuned.after) == (100 + 50 + 12, 100.0)
    # Those that read most first, and those that are alike as one.
    assert [of.features for of, _ in tuned.choices] == [(3,), (0, 2), (4,), (1,)]
    assert [code for _, code in tuned.choices] == [code_of("some", 2), code_of("many", 8), code_of("few", 4), code_of("one", 32)]
    # The local stage twice, as the number of programs has changed.
    assert clock.trials < 2 * 4 * (len(CANDIDATES) + 2) + 20
    followed = module(plan=tuned.plan)
    assert followed(batch()).values().shape == (4, 96)
    assert "plan=5 of 5 features" in repr(followed)


def test_statistics_of_classes() -> None:
    sparse = KeyedJaggedTensor(
        list(LENGTHS), torch.zeros(8, dtype=torch.int32), lengths=torch.tensor([2, 0, 0, 0, 1, 1, 0, 4, 0, 0])
    )
    tuned = tune(module(), [sparse], timer=Clock(separate), progress=False)
    found = {of.features: (of.width, of.rows, of.mean, of.empty, of.read) for of, _ in tuned.choices}
    assert found == {
        (0,): (8, 1000, 2.0, 0.5, 64),
        (1,): (8, 1000, 1.0, 0.0, 64),
        (2,): (8, 900, 0.0, 1.0, 0),
        (3,): (64, 1000, 4.0, 0.5, 1024),
        (4,): (8, 1000, 0.0, 1.0, 0),
    }


def test_beats_each_class_alone_and_the_map_where_they_are_in_each_others_way() -> None:
    tuned = tune(module(), [batch()], timer=Clock(crowded), progress=False)
    alone = tune(module(), [batch()], timer=Clock(crowded), alone=True, progress=False)
    assert alone.before == tuned.before == 80.0
    assert {of.kind for of in alone.plan.features.values()} == {"many"}
    assert alone.after == 65.0
    # One class after the other finds no way to the very best, 56, on which two would have to change.
    assert tuned.after == 57.0
    assert alone.plan.programs == PROGRAMS


def test_alone_launches_a_class_by_itself() -> None:
    seen: set[tuple[int, ...]] = set()

    def cost(trial: Trial) -> float:
        seen.add(trial.features)
        assert len(trial.codes) == len(trial.features)
        return 1.0

    tune(module(), [batch()], timer=Clock(cost), alone=True, progress=False)
    assert seen == {(0, 2), (1,), (3,), (4,), (0, 1, 2, 3, 4)}


def test_what_is_no_better_is_not_taken() -> None:
    # A candidate that is fast once, and as slow as the others after that.
    clock = Clock(lambda trial: 100.0)
    lucky = iter([True])

    def once(trial: Trial) -> float:
        return 50.0 if code_of("some", 4) in trial.codes and next(lucky, False) else 100.0

    clock.cost = once
    tuned = tune(module(), [batch()], timer=clock, repeats=1, progress=False)
    assert tuned.plan == BagPlan("CPU", {})
    check_none(tuned, 100.0)
    # Savings within the noise.
    noise = Clock(lambda trial: 100.0 - 0.01 * sum(trial.codes), [0, 7, -7, 3, -5, 1, 6, -2, 4, -6, 2])
    assert tune(module(), [batch()], timer=noise, progress=False).plan == BagPlan("CPU", {})
    # Another number of programs by itself is no plan.
    fewer = tune(module(), [batch()], timer=Clock(lambda trial: 80.0 + trial.programs), progress=False)
    assert fewer.plan == BagPlan("CPU", {})
    check_none(fewer, 112.0)


def check_none(tuned: tuning.Tuned, time: float) -> None:
    assert tuned.before == tuned.after == time
    lines = str(tuned).splitlines()
    assert lines[-2:] == [
        f"launches of all batches: {time} us without a plan",
        "no schedule was faster than the batch-driven choice",
    ]
    assert not any("with it" in line or "programs" in line for line in lines)


def test_a_plan_that_is_no_faster_in_the_end_is_left() -> None:
    first = Clock(separate)
    assert tune(module(), [batch()], timer=first, progress=False).plan.features
    second = Clock(lambda trial: separate(trial) if second.calls < first.trials - 2 else 100.0)
    left = tune(module(), [batch()], timer=second, progress=False)
    assert left.plan == BagPlan("CPU", {})
    check_none(left, 100.0)
    # What each class alone has come to is shown as it is.
    alone = tune(module(), [batch()], timer=Clock(worse_together), alone=True, progress=False)
    assert alone.after > alone.before
    assert alone.plan.features


def worse_together(trial: Trial) -> float:
    planned = sum(code != BY_MAP for code in trial.codes)
    return 100.0 + (5 if len(trial.codes) == 5 else -1) * planned


def counted(trial: Trial) -> float:
    """Backward is best where the tables of 900 rows are counted and larger ones are sorted."""
    if not trial.is_backward:
        assert trial.counted_rows is None
        return separate(trial)
    return {None: 300.0, 0: 310.0, 900: 250.0, 1000: 280.0}[trial.counted_rows]


def test_chooses_what_backward_counts() -> None:
    tuned = tune(module(), [batch()], timer=Clock(counted), progress=False)
    assert tuned.plan.counted_rows == 900
    assert tuned.backward == (300.0, 250.0)
    assert tuned.plan.features
    lines = str(tuned).splitlines()
    assert lines[-4:-2] == [
        "tables counted in backward: of up to 900 rows",
        "forward and backward of all batches: 300.0 us by the rule, 250.0 us with the plan's number",
    ]
    # Also where no schedule is better.
    only = tune(module(), [batch()], timer=Clock(lambda trial: counted(trial) if trial.is_backward else 1.0), progress=False)
    assert only.plan == BagPlan("CPU", {}, counted_rows=900)
    check_none(only, 1.0)
    # Who only infers does without.
    clock = Clock(lambda trial: 1 / 0 if trial.is_backward else separate(trial))
    without = tune(module(), [batch()], backward=False, timer=clock, progress=False)
    assert (without.plan, without.backward) == (replace(tuned.plan, counted_rows=None), None)
    assert "backward" not in str(without)


def test_what_backward_counts_stays_with_the_rule() -> None:
    noise = [0, 7, -7, 3, -5, 1, 6, -2, 4, -6, 2]
    little = Clock(lambda trial: 100.0 - 0.001 * (trial.counted_rows or 0), noise)
    tuned = tune(module(), [batch()], timer=little, progress=False)
    assert tuned.plan.counted_rows is None
    assert tuned.backward is not None
    assert tuned.backward[0] == tuned.backward[1]
    assert "tables counted in backward: by the rule" in str(tuned)

    def full(trial: Trial) -> float:
        if trial.is_backward:
            raise torch.OutOfMemoryError
        return separate(trial)

    with pytest.warns(UserWarning, match="backward: found no memory for gradients as large as the tables"):
        tuned = tune(module(), [batch()], timer=Clock(full), progress=False)
    assert (tuned.plan.counted_rows, tuned.backward) == (None, None)
    assert tuned.plan.features


def test_the_numbers_of_rows_that_are_tried() -> None:
    def tried(*rows: int) -> tuple[int, ...]:
        collection = ScheduledEmbeddingBagCollection(
            [EmbeddingBagConfig(name=f"t{i}", num_embeddings=of, embedding_dim=4) for i, of in enumerate(rows)], device="meta"
        )
        return tuning._rows_tried(tuning._launches(collection, []))

    assert tried(70_000) == ()
    assert tried(65_536, 65_537, 3, 3) == (0, 3, 65_536)
    assert tried(*range(1, 12)) == (0, 1, 3, 5, 7, 9, 11)
    # With nothing to choose, nothing is timed.
    large = ScheduledEmbeddingBagCollection(
        [EmbeddingBagConfig(name="t", num_embeddings=65_537, embedding_dim=1, feature_names=["long"])]
    )
    few = KeyedJaggedTensor(["long"], torch.zeros(3, dtype=torch.int64), lengths=torch.tensor([1, 2]))
    tuned = tune(large, [few], timer=Clock(lambda trial: 1 / 0 if trial.is_backward else 1.0), progress=False)
    assert tuned.backward is None


@pytest.mark.parametrize("options", [{}, {"ragged": True}, {"weighted": True}])
def test_gradients_that_are_timed_are_those_of_the_tables(options: dict[str, bool]) -> None:
    collection = module(is_weighted=options.get("weighted", False))
    for launch in tuning._launches(collection, [batch(**options)]):
        codes = torch.full((launch.layout.num_features,), BY_MAP, dtype=torch.int32)
        storage = launch.storage.detach().requires_grad_()
        tuning._look_up(launch._replace(storage=storage), launch.batches[0], tuning.BagSchedules(codes)).sum().backward()
        with torch.no_grad():
            got = tuning._gradient(launch, launch.batches[0], tuning.BagSchedules(codes, counted_rows=900))
        assert torch.equal(got, storage.grad)
        assert launch.storage.grad is None


def test_is_faster() -> None:
    assert is_faster([1.0, 1.0, 1.0], [2.0, 2.0, 2.0])
    assert not is_faster([1.0, 1.0], [1.0, 1.0])
    assert not is_faster([2.0, 2.0], [1.0, 1.0])
    # One that is much faster says nothing.
    assert not is_faster([1.0, 9.0, 11.0, 10.0], [10.0, 10.0, 10.0, 10.0])
    assert is_faster([8.0, 9.0, 8.5, 8.7], [10.0, 10.0, 10.0, 10.0])


@pytest.mark.parametrize("options", [{"ragged": True}, {"weighted": True}])
def test_batches_of_every_kind(options: dict[str, bool]) -> None:
    collection = module(is_weighted=options.get("weighted", False))
    tuned = tune(collection, [batch(**options)], timer=Clock(separate), progress=False)
    assert tuned.plan.programs == 20


@pytest.mark.parametrize("options", [{}, {"ragged": True}, {"weighted": True}])
@pytest.mark.parametrize("places", [(0,), (3, 1), (0, 1, 2, 3)])
def test_some_features_are_looked_up_as_with_all(places: tuple[int, ...], options: dict[str, bool]) -> None:
    collection = module(is_weighted=options.get("weighted", False))
    whole = tuning._launches(collection, [batch(**options)])[0]
    some = whole.some(places)
    schedules = [tuning.BagSchedules(torch.full((of.layout.num_features,), BY_MAP, dtype=torch.int32)) for of in (whole, some)]
    outputs = [tuning._look_up(of, of.batches[0], codes) for of, codes in zip((whole, some), schedules, strict=True)]
    widths = whole.layout.feature_widths
    if options.get("ragged"):
        sizes = whole.batches[0].sizes_of(4)
        parts = list(outputs[0].split([count * width for count, width in zip(sizes, widths, strict=True)]))
        expected = torch.cat([parts[place] for place in places])
    else:
        parts = list(outputs[0].split(widths, 1))
        expected = torch.cat([parts[place] for place in places], 1)
    assert torch.equal(outputs[1], expected)
    launches = tuning._launches(collection, [batch(**options)])
    assert [of.layout.num_features for of in tuning._of_features(launches, places)] == [len(places)]
    assert [of.layout.num_features for of in tuning._of_features(launches, (0, 1, 2, 3, 4))] == [4, 1]


@pytest.mark.parametrize("expected", [torch.float32, torch.bfloat16])
def test_what_is_tuned_gives_the_dtype_that_the_collection_gives(expected: torch.dtype) -> None:
    """Its own where the kernels write it, of tables in that dtype; float32, which is converted then, of others."""
    collection = module(output_dtype=expected)
    launches = tuning._launches(collection, [batch()])
    plain = [tuning.BagSchedules(torch.full((of.layout.num_features,), BY_MAP, dtype=torch.int32)) for of in launches]
    outputs = [tuning._look_up(of, of.batches[0], codes) for of, codes in zip(launches, plain, strict=True)]
    found = {launch.storage.dtype: output.dtype for launch, output in zip(launches, outputs, strict=True)}
    assert found == {torch.float32: torch.float32, torch.bfloat16: expected}


def test_what_is_refused() -> None:
    with pytest.raises(TuningError, match="module: expected tables on an NVIDIA GPU, got cpu"):
        tune(module(), [batch()])
    with pytest.raises(TuningError, match="batches: expected at least one, got none"):
        tune(module(), [], timer=Clock(separate))
    with pytest.raises(ValueError, match="programs: expected 1 to 64 for each multiprocessor, got 65"):
        tune(module(), [batch()], timer=Clock(separate), programs=(8, 65))
    with pytest.raises(ValueError, match="features: expected a key for every feature"):
        tune(module(), [KeyedJaggedTensor(["long"], torch.zeros(1), lengths=torch.tensor([1]))], timer=Clock(separate))


def test_what_is_printed() -> None:
    tuned = tune(module(), [batch()], timer=Clock(separate), progress=False)
    lines = str(tuned).splitlines()
    assert lines[0].startswith("5 features in 4 classes on CPU, ")
    assert lines[2].split() == ["1", "64", "1,000", "40.0", "0%", "some,", "2", "steps"]
    assert lines[-2:] == [
        "programs for each multiprocessor: 20",
        "launches of all batches: 162.0 us without the plan, 100.0 us with it",
    ]
    many = tuned._replace(choices=[(tuned.choices[0][0], BY_MAP)] * 14)
    assert "by the lengths of each batch" in str(many)
    assert "and 2 classes that read less" in str(many)


def test_recorded_batches_make_a_plan(tmp_path: Path) -> None:
    recorded, out = tmp_path / "batches.safetensors", tmp_path / "plans" / "plan.json"
    record_batches(recorded, tables(), [batch(), batch()])
    for _ in range(2):
        tuned = tune_recorded(recorded, out, timer=Clock(separate), progress=False)
        assert BagPlan.load(out) == tuned.plan
        assert tuned.plan.programs == 20
    assert tune_recorded(recorded, out, programs=[24], timer=Clock(separate), progress=False).plan.programs == 24
    # Weights of ids of which some are averaged are left out.
    mixed = tables()
    mixed[0].pooling = PoolingType.MEAN
    record_batches(recorded, mixed, [batch(weighted=True)])
    assert tune_recorded(recorded, out, timer=Clock(separate), progress=False).plan.features


@pytest.mark.parametrize("content", ["", "{}", "user_id,item_id\n", '{"format": "jagged plan of embedding bags", "version": 9}'])
def test_nothing_but_a_plan_is_written_over(tmp_path: Path, content: str) -> None:
    recorded, out = tmp_path / "batches.safetensors", tmp_path / "plan.json"
    record_batches(recorded, tables(), [batch()])
    out.write_text(content)
    clock = Clock(separate)
    with pytest.raises(
        TuningError, match=r"plan\.json: is there, and is no plan of this version; choose another name, or remove it"
    ):
        tune_recorded(recorded, out, timer=clock)
    assert out.read_text() == content
    assert clock.trials == 0
    for out, problem in ((tmp_path, "Is a directory"), (recorded / "plan.json", "File exists")):
        with pytest.raises(TuningError) as refused:
            tune_recorded(recorded, out, timer=clock)
        assert str(refused.value) == f"out: {out}: could not be written: {problem}; choose another name"


def test_files_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "batches.safetensors").write_text("user_id,item_id\n")
    with pytest.raises(DataError, match=r"expected batches that jagged\.data\.record_batches wrote$"):
        tune_recorded(tmp_path / "batches.safetensors", tmp_path / "plan.json", timer=Clock(separate))


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["jagged", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return int(end.value.code or 0)


def test_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded, out = tmp_path / "batches.safetensors", tmp_path / "plan.json"
    record_batches(recorded, tables(), [batch()])
    with_clock = lambda *files, **options: tune_recorded(*files, timer=Clock(separate), **options)  # noqa: E731
    with monkeypatch.context() as patched:
        patched.setattr(tuning, "tune_recorded", with_clock)
        assert run(patched, "tune-bags", "--batches", str(recorded), "--out", str(out)) == 0
        assert "launches of all batches: 162.0 us without the plan, 100.0 us with it" in capsys.readouterr().out
        assert BagPlan.load(out).programs == 20
        assert (
            run(patched, "tune-bags", "--batches", str(recorded), "--out", str(out), "--programs", "24", "--programs", "28") == 0
        )
        assert BagPlan.load(out).programs == 24
        assert "forward and backward of all batches" in capsys.readouterr().out
        assert run(patched, "tune-bags", "--batches", str(recorded), "--out", str(out), "--no-backward") == 0
        assert "forward and backward of all batches" not in capsys.readouterr().out
        capsys.readouterr()
        assert run(patched, "tune-bags", "--batches", str(tmp_path / "none.pt"), "--out", str(out)) == 2
        assert "none.pt: cannot be read: No such file or directory; expected batches" in capsys.readouterr().err
        assert run(patched, "tune-bags", "--batches", str(recorded), "--out", str(recorded)) == 2
        assert "batches.safetensors: is there, and is no plan" in capsys.readouterr().err
    assert run(monkeypatch, "tune-bags", "--batches", str(recorded), "--out", str(out), "--programs", "65") == 2
    assert capsys.readouterr().err == 'jagged: Invalid value "65" for --programs. Must be <= 64. See jagged tune-bags --help.\n'
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run(monkeypatch, "tune-bags", "--batches", str(recorded), "--out", str(out)) == 2
    assert capsys.readouterr().err.endswith("jagged: found no NVIDIA GPU; a plan is measured on the GPU that it is for\n")


@pytest.mark.gpu
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("options", [{}, {"ragged": True}, {"weighted": True}])
def test_on_a_gpu(alone: bool, options: dict[str, bool]) -> None:
    collection = module(is_weighted=options.get("weighted", False), device="cuda")
    tuned = tune(collection, [batch(**options), batch(9, **options)], programs=(16,), repeats=2, alone=alone, progress=False)
    assert tuned.plan.gpu == torch.cuda.get_device_name()
    assert tuned.before > 0
    assert tuned.after > 0
    expected = collection(batch(**{**options, "ragged": False}).to("cuda")).values()
    collection.follow(tuned.plan)
    torch.testing.assert_close(collection(batch(**{**options, "ragged": False}).to("cuda")).values(), expected)
