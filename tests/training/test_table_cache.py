"""Tables in the host's memory that the trainer updates by cached rows, beside tables that are on the device as a whole."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor, nn

import jagged
from jagged.config import ConfigError, RankingConfig, TrainerConfig
from jagged.data.records import Dataset
from jagged.data.schema import Schema
from jagged.data.table_loader import RequestLoader
from jagged.data.table_splits import Split
from jagged.models import RankingInputs, RankingModel
from jagged.models.pretrained import load_task
from jagged.modules import replace_embeddings
from jagged.modules.cached_tables import CachedTableStorage
from jagged.modules.row_cache import CacheStatistics
from jagged.modules.trained_tables import TrainedTables
from jagged.training import Trainer, TrainingError
from jagged.training.engine import Engine
from jagged.training.forecast import Forecast, _Weights
from jagged.training.processes import Processes, process_group
from jagged.training.table_updates import cache_budgets, keep_on_host, state_bytes
from tests.models.shops import COLUMNS
from tests.training.test_table_updates import task_of

# Of tables that take 17,132 bytes with row-wise Adagrad: rows come and go, and the rows of any batch have room.
BUDGET = 11_000
KINDS = ["adagrad", "rowwise-adagrad", "sgd", "sparse-adamw", "rowwise-adamw", "lamb", "rowwise-lamb"]


def impressions(requests: int = 150, seed: int = 0) -> pa.Table:
    """Requests of two candidates, of many users and items, with lists that are pooled with and without weights."""
    rng = np.random.default_rng(seed)
    users, items = rng.integers(200, size=requests).repeat(2), rng.integers(300, size=2 * requests)
    liked = [[f"i{i}" for i in rng.integers(300, size=rng.integers(4))] for _ in range(requests)]
    words = [[f"w{i}" for i in rng.integers(90, size=rng.integers(4))] for _ in items]
    found = {
        "request": np.arange(requests).repeat(2),
        "user": [f"u{i}" for i in users],
        "item": [f"i{i}" for i in items],
        "time": 1_700_000_000 + 60 * np.arange(requests).repeat(2),
        "type": [f"t{i % 3}" for i in users],
        "liked": [of for of in liked for _ in range(2)],
        "interests": [[f"n{i % 5}", f"n{i % 3}"] for i in users],
        "strengths": [[1.0, 0.5]] * len(users),
        "words": words,
        "counts": [rng.random(len(of)).tolist() for of in words],
        "price": items * 1.5,
        "click": (users % 3 == items % 3).astype(float),
        "buy": (users % 6 == items % 6).astype(float),
    }
    return pa.table({name: pa.array(values) for name, values in found.items()})


TABLE = impressions()
SCHEMA = Schema(tuple(COLUMNS[name] for name in COLUMNS if name in TABLE.column_names))


def split_of(table: pa.Table) -> Split:
    return Dataset.from_table(table, SCHEMA, duplicates="keep", progress=False).split(by="time", valid=0.1, test=0.1)


def messy(seed: int) -> pa.Table:
    """Zipf's items, of which some are missing, as are users, types, prices, labels and whole lists."""
    rng, table = np.random.default_rng(seed), impressions(seed=seed)
    rows = table.num_rows
    found = {name: table[name].to_pylist() for name in table.column_names}
    found["item"] = [f"i{i}" for i in np.minimum(rng.zipf(1.3, rows), 300)]
    for name in ("item", "price", "words", "click", "buy"):
        found[name] = [None if rng.random() < 0.15 else value for value in found[name]]
    found["counts"] = [None if words is None else of for words, of in zip(found["words"], found["counts"], strict=True)]
    for name in ("type", "liked"):
        # Of a request its candidates say the same.
        is_missing = (rng.random(rows // 2) < 0.15).repeat(2)
        found[name] = [None if of else value for of, value in zip(is_missing, found[name], strict=True)]
    return pa.table({name: pa.array(values, table.schema.field(name).type) for name, values in found.items()})


SPLIT = split_of(TABLE)


@pytest.fixture
def processes() -> Iterator[Processes]:
    with process_group(torch.device("cpu")) as found:
        yield found


def model_of() -> RankingModel:
    """Tables that are pooled, with and without weights, and sequences, of several widths."""
    torch.manual_seed(0)
    return RankingModel.of(SPLIT, table_dims={"item": 6, "words": 8}, conditional={"buy": "click"})


def budget(kind: str, share: float, options: dict[str, Any]) -> int:
    """A share of what tables take with an optimizer."""
    of = config(kind, None, **options)
    return int(share * sum(table.nbytes + state_bytes(of, table) for table in tables_of(model_of()).values()))


def parts_of(task: nn.Module) -> list[tuple[str, TrainedTables]]:
    return [(path, part) for path, part in task.named_modules() if isinstance(part, TrainedTables)]


def tables_of(model: RankingModel) -> dict[str, Tensor]:
    return {name: of.detach() for name, of in model.named_parameters() if ".embedding" in name}


def config(kind: str = "rowwise-adagrad", cache: int | None = BUDGET, **options: Any) -> TrainerConfig:
    given = {"table_learning_rate": 0.25, "learning_rate": 0.01, "warmup_steps": 3, **options}
    return TrainerConfig(table_optimizer=kind, table_cache_bytes=cache, **given)


def loader(part: str = "train", batch_size: int = 4) -> RequestLoader:
    return getattr(SPLIT, part).loader(batch_size=batch_size, shuffle=part == "train", max_history=10, seed=0)


def trained(engine: Engine, batches: RequestLoader | None = None) -> list[float]:
    batches = loader() if batches is None else batches
    torch.manual_seed(3)
    return [float(of.loss) for of in engine.steps(iter(batches), len(batches))]


def cached(task: nn.Module) -> list[TrainedTables]:
    return [part for part in task.modules() if isinstance(part, TrainedTables) and part.is_cached]


def statistics(task: nn.Module) -> CacheStatistics:
    found = [part.cache_statistics() for part in cached(task)]
    return CacheStatistics(*map(sum, zip(*found, strict=True)))


def check_equal(first: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert first.keys() == other.keys()
    for name, value in first.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.parametrize(
    ("kind", "options", "share"),
    [
        *((kind, {"gradient_clip_norm": 0.05}, 0.65) for kind in KINDS),
        ("rowwise-adagrad", {"gradient_clip_norm": None}, 0.65),
        ("sparse-adamw", {"gradient_clip_norm": None}, 0.65),
        # The rows of three batches have to stay.
        ("rowwise-adagrad", {"accumulate": 3}, 0.9),
        ("rowwise-adamw", {"accumulate": 3}, 0.9),
        ("rowwise-adagrad", {"schedule": "cosine", "table_max_norm": 0.5, "table_states": "bfloat16"}, 0.65),
        ("sparse-adamw", {"table_states": "bfloat16", "table_beta2": 0.9, "table_decay_missed_steps": True}, 0.65),
    ],
)
def test_weights_and_states_are_those_of_whole_tables(
    processes: Processes, kind: str, options: dict[str, Any], share: float
) -> None:
    engines = [
        Engine(model_of(), config(kind, cache, **options), "32-true", processes, 60)
        for cache in (budget(kind, share, options), None)
    ]
    # Some have so few rows that they are on the device as a whole.
    assert [bool(cached(engine.task)) for engine in engines] == [True, False]
    assert len(cached(engines[0].task)) < len(parts_of(engines[0].task))
    before = {name: of.clone() for name, of in engines[0].state_tensors().items()}
    for _ in range(2):
        losses = [trained(engine) for engine in engines]
        assert losses[0] == losses[1]
    check_equal(*(engine.state_tensors() for engine in engines))
    norms = [torch.stack(engine.optimizer.norms or [torch.zeros(())]) for engine in engines]
    assert torch.equal(*norms)
    assert any(not torch.equal(before[name], of) for name, of in engines[0].state_tensors().items() if ".sequences." in name)
    # Rows came, more than have room at a time, and went, having been changed.
    found = statistics(engines[0].task)
    slots = sum(part.cache_forecast().slots for part in cached(engines[0].task))
    assert found.rows_read > slots
    assert found.rows_written > 0


@pytest.mark.parametrize("seed", [1, 2])
def test_messy_tables_of_frequent_items(processes: Processes, seed: int) -> None:
    """What is missing has a row of its own, which is cached as any other; weights and figures are those of whole tables."""
    split = split_of(messy(seed))
    found, figures = [], []
    for cache in (13_000, None):
        torch.manual_seed(seed)
        model = RankingModel.of(split, table_dims={"item": 6, "words": 8}, conditional={"buy": "click"}, implied=True)
        engine = Engine(model, config(cache=cache), "32-true", processes, 60)
        assert bool(cached(engine.task)) == (cache is not None)
        losses = trained(engine, split.train.loader(batch_size=4, shuffle=True, max_history=10, seed=seed))
        found.append((losses, {name: of.clone() for name, of in engine.state_tensors().items()}))
        assert cache is None or statistics(engine.task).rows_written > 0
        figures.append(model.evaluate(split.valid.loader(batch_size=4), "valid", progress=False))
    assert found[0][0] == found[1][0]
    check_equal(found[0][1], found[1][1])
    assert str(figures[0]) == str(figures[1])


def test_mixed_precision_and_what_becomes_of_a_trained_task(processes: Processes) -> None:
    """Copies, pickles and a compiled one predict as the task does, which predicts as one of whole tables."""
    engines = [Engine(model_of(), config(cache=cache), "bf16-mixed", processes, 60) for cache in (BUDGET, None)]
    assert trained(engines[0]) == trained(engines[1])
    check_equal(*(engine.state_tensors() for engine in engines))
    task, whole = (engine.task for engine in engines)
    for engine in engines:
        engine.close()
    batch = SPLIT.test.gather(range(5))
    expected = whole.predict(batch)
    others = {"itself": task, "copied": copy.deepcopy(task), "pickled": pickle.loads(pickle.dumps(task))}
    for name, other in others.items():
        assert len(cached(other)) == 2, name
        for of, probabilities in other.predict(batch).items():
            assert torch.equal(probabilities, expected[of]), name
    torch.compiler.reset()
    compiled = torch.compile(task, backend="aot_eager")
    with torch.no_grad():
        for of, scores in compiled(batch).scores.items():
            torch.testing.assert_close(scores.logits.sigmoid(), expected[of], rtol=1e-5, atol=1e-6)


def test_the_next_batch_is_there_before_its_forward(processes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    """All batches are brought ahead but those for which the most frequent rows are chosen, and forward takes them."""
    engine = Engine(model_of(), config(cache=16_000), "32-true", processes)
    events: list[str] = []
    of_cache = CachedTableStorage._staged

    def staged(self: CachedTableStorage, *given: Any, **options: Any) -> Any:
        of_ahead = self._ahead.get(given[0])
        is_there = of_ahead is not None and of_ahead.ids is given[1]
        events.append("taken" if is_there else "brought")
        return of_cache(self, *given, **options)

    monkeypatch.setattr(CachedTableStorage, "_staged", staged)
    monkeypatch.setattr(RankingModel, "forward", _told(RankingModel.forward, events))
    batches = loader()
    trained(engine, batches)
    number = len(cached(engine.task))
    # The first batch and each next one are brought by the pipeline, and taken by forward.
    expected = ["brought"] * number
    for step in range(len(batches)):
        expected += ["forward", *["taken"] * number, *["brought"] * (number if step + 1 < len(batches) else 0)]
    assert events == expected


def _told(forward: Any, events: list[str]) -> Any:
    def told(self: RankingModel, batch: Any) -> Any:
        events.append("forward")
        return forward(self, batch)

    return told


@pytest.mark.parametrize(
    ("kind", "caches"),
    [
        ("rowwise-adagrad", (BUDGET, None)),
        ("rowwise-adagrad", (None, BUDGET)),
        ("rowwise-adagrad", (BUDGET, BUDGET + 1_000)),
        ("sparse-adamw", (30_000, 32_000)),
    ],
)
def test_a_run_goes_on_with_and_without_a_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, caches: tuple[int | None, int | None]
) -> None:
    """Bit for bit as one that was never stopped, from the middle of an epoch, and what is left behind is the same."""

    def trainer(directory: str, cache: int | None) -> Trainer:
        options = {"max_epochs": 2, "checkpoint_every": 5, "device": "cpu", "tensorboard": False, "output": directory}
        return Trainer(model_of(), config(kind, cache, **options))

    whole = trainer(str(tmp_path / "whole"), None)
    parts = [loader("train"), loader("valid", 16), loader("test", 16)]
    whole_result = whole.fit(*parts, progress=False)
    stopped = trainer(str(tmp_path / "stopped"), caches[0])
    monkeypatch.setattr("jagged.training.loop.Loop._tell", _stopping_after(7))
    with pytest.raises(KeyboardInterrupt):
        stopped.fit(*parts, progress=False)
    monkeypatch.undo()
    on = trainer(str(tmp_path / "stopped"), caches[1])
    result = on.fit(*parts, progress=False, resume=True)
    assert len(result.history) == len(whole_result.history)
    for found, expected in zip(result.history, whole_result.history, strict=True):
        assert {name: of for name, of in found.items() if name in ("step", "loss", "monitored")} == {
            name: of for name, of in expected.items() if name in ("step", "loss", "monitored")
        }
    assert result.metrics.test == whole_result.metrics.test
    check_equal(load_task(tmp_path / "stopped").state_dict(), load_task(tmp_path / "whole").state_dict())
    check_equal(on.task.state_dict(), whole.task.state_dict())


def _stopping_after(steps: int) -> Any:
    def tell(self: Any, method: str) -> None:
        if method == "on_step" and self.state.step == steps:
            raise KeyboardInterrupt

    return tell


def test_a_task_that_was_trained_predicts_and_is_trained_again(tmp_path: Path) -> None:
    """Its tables stay on the host; another run updates them by its own optimizer, from the weights as they are."""
    task, whole = model_of(), model_of()
    options = {"max_epochs": 1, "device": "cpu", "tensorboard": False}
    parts = [loader("train"), loader("valid", 16)]
    batch = SPLIT.test.gather(range(5))
    for of, cache in ((task, BUDGET), (whole, None)):
        for number, kind in enumerate(("rowwise-adagrad", "sgd")):
            directory = str(tmp_path / f"{cache}-{number}")
            Trainer(of, config(kind, cache, output=directory, **options)).fit(*parts, progress=False)
        assert len(cached(of)) == (0 if cache is None else 2)
    for name, found in task.predict(batch).items():
        assert torch.equal(found, whole.predict(batch)[name])
    check_equal(task.state_dict(), whole.state_dict())
    whole(batch).loss.backward()
    with pytest.raises(RuntimeError, match=r"^cache_bytes: expected an optimizer that updates rows in the backward pass, got a "):
        task(batch)
    with pytest.raises(TrainingError) as caught:
        Trainer(task, config(cache=None, output=str(tmp_path / "other"), **options)).fit(*parts, progress=False)
    assert str(caught.value) == (
        "task: bags.features keeps its tables in the host's memory, expected table_cache_bytes, too; give it, or load the model "
        "anew"
    )


def test_weights_that_are_not_finite_are_seen_behind_the_cache(processes: Processes) -> None:
    engine = Engine(model_of(), config("sgd", gradient_clip_norm=None), "32-true", processes)
    assert engine.is_finite()
    for _ in engine.steps(iter(loader())):
        if not engine.is_finite():
            break
        # Rows on the device are changed by the step that comes, and not written back.
        for of_tables in engine.optimizer._updates.optimizers:  # type: ignore[union-attr]
            of_tables.learning_rate.fill_(torch.nan)
    else:
        raise AssertionError("all weights are said to be finite")


def refused(task: nn.Module, world_size: int = 1, **options: Any) -> str:
    with pytest.raises(TrainingError) as caught:
        keep_on_host(task, config(**options), world_size)
    return str(caught.value)


def test_what_has_no_cached_tables_is_refused() -> None:
    told = "table_cache_bytes: got 11000 with"
    assert refused(model_of(), 2) == f"{told} 2 processes, expected one; share tables by table_plan, or leave it out"
    assert refused(task_of("drawn")) == (
        f"{told} a NextItemTask, expected a RequestModel, whose tables are read by lookups alone; leave it out"
    )
    numbers = RankingModel(RankingInputs(candidate_numbers=["price"]), {})
    assert refused(numbers) == f"{told} a model without tables of ids, expected some; leave it out"
    frozen = model_of()
    frozen.bags["features"].requires_grad_(False)
    name = sorted(f"bags.features.{of}" for of, _ in frozen.bags["features"].named_parameters())[0]
    assert refused(frozen) == f"{told} the frozen table {name}, expected tables that all learn; leave it out"
    # Nothing of the model has changed.
    assert not any(cached(of) for of in (numbers, frozen))


def test_a_budget_without_room_is_refused(tmp_path: Path) -> None:
    task = model_of()
    assert refused(task, cache=700) == (
        "table_cache_bytes: got 700 for all tables, bags.features: expected at least 1,905, of which 800 say where 100 rows are, "
        "got 800; give more"
    )
    trainer = Trainer(model_of(), config(output=str(tmp_path / "run"), device="cpu", max_epochs=1))
    with pytest.raises(TrainingError) as caught:
        trainer.fit(loader(batch_size=40), loader("valid"), progress=False)
    assert str(caught.value).startswith("table_cache_bytes: expected room for ")
    assert str(caught.value).endswith("; give more bytes, or smaller batches")


def test_the_optimizer_has_to_update_by_rows() -> None:
    with pytest.raises(ConfigError) as caught:
        config("adamw")
    assert str(caught.value) == (
        "table_cache_bytes: belongs to table_optimizer sparse-adamw, rowwise-adamw, lamb, rowwise-lamb, adagrad, rowwise-adagrad "
        "or sgd, got adamw"
    )


def test_what_is_cached_and_what_is_whole() -> None:
    """The smallest collections are whole as long as they take half, and all where there is room for all."""
    task = model_of()
    replace_embeddings(task)
    size = {path: sum(of.nbytes + 4 * len(of) for of in part.parameters()) for path, part in parts_of(task)}
    assert sum(size.values()) == 17_132
    whole = [size.pop(f"bags.{name}") for name in ("weighted_features", "weighted_candidates")]
    rows = {path: sum(map(len, part.parameters())) for path, part in parts_of(task) if path in size}
    left = BUDGET - sum(whole) - 8 * sum(rows.values())
    assert cache_budgets(task, config()) == {path: 8 * rows[path] + left * of // sum(size.values()) for path, of in size.items()}
    assert cache_budgets(task, config(cache=17_131)).keys() == size.keys()
    assert cache_budgets(task, config(cache=17_132)) == {}
    # Half of it has no room for both, or for one.
    assert cache_budgets(task, config(cache=2 * sum(whole) - 1)).keys() == {*size, "bags.weighted_candidates"}
    assert cache_budgets(task, config(cache=2 * whole[0] - 1)).keys() == {path for path, _ in parts_of(task)}
    # What was kept on the host stays there.
    keep_on_host(task, config(), 1)
    assert {path for path, part in parts_of(task) if part.is_cached} == size.keys()
    assert cache_budgets(task, config(cache=20_000)).keys() == size.keys()


def test_the_forecast_counts_rows_that_are_cached(processes: Processes) -> None:
    of, task = config(), model_of()
    whole = _Weights.of(task, config(cache=None), processes, 10.0)
    keep_on_host(task, of, 1)
    tables = [table for part in cached(task) for table in part.parameters()]
    size, number = sum(table.nbytes for table in tables), sum(map(len, tables))
    budgets = sum(cache_budgets(task, of).values())
    assert (whole.cached, whole.host) == (0, 0)
    assert _Weights.of(task, of, processes, 10.0) == replace(whole, cached=budgets)
    # Row-wise Adagrad has a number for each row.
    on_gpu = _Weights.of(task, of, replaced_device(processes), 10.0)
    expected = {"parameters": whole.parameters - size, "optimizer": whole.optimizer - 4 * number, "checkpoint": 0}
    assert on_gpu == replace(whole, cached=budgets, host=2 * size + 4 * number, **expected)


def replaced_device(processes: Processes) -> Processes:
    return replace(processes, device=torch.device("cuda"))


def test_a_forecast_tells_of_the_cache(tmp_path: Path) -> None:
    common = {"present": 2**21, "parameters": 2**20, "elsewhere": 0, "gradients": 0, "optimizer": 0, "activations": 0}
    common |= {"checkpoint": 0, "evaluation": 0, "graphs": False, "samples": 8, "tokens": 9, "steps_per_epoch": 1, "max_steps": 2}
    on_gpu = Forecast(device="cuda", cached=2**22, host=2**23, **common)
    assert str(on_gpu).splitlines() == [
        "forecast  GPU memory: peak about 4.0 MiB",
        "          in use now 2.0 MiB (with 1.0 MiB of weights), best weights 1.0 MiB, optimizer 0.0 MiB, cached rows 4.0 MiB, "
        "gradients 0.0 MiB, activations 0.0 MiB, a checkpoint being written 0.0 MiB, evaluation up to 0.0 MiB",
        "          host memory: tables, the best ones and their optimizer 8.0 MiB",
        "          1 steps an epoch of about 8 users and 9 events, at most 2 steps",
    ]
    assert Forecast(device="cpu", cached=2**22, **common).peak == on_gpu.peak + 2**22


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_on_a_gpu_tables_stay_on_the_host(tmp_path: Path, precision: str) -> None:
    """A run is that of whole tables, also one that goes on from its checkpoint."""
    results, tasks = [], []
    for cache in (BUDGET, None):
        task = model_of()
        options = {"device": "cuda", "precision": precision, "tensorboard": False, "output": str(tmp_path / str(cache))}
        # Graphs fill batches up, so that sums are rounded in another order.
        options["cuda_graphs"] = False
        for epochs in (1, 2):
            trainer = Trainer(task, config(cache=cache, max_epochs=epochs, **options))
            result = trainer.fit(loader(), loader("valid", 16), loader("test", 16), progress=False, resume=epochs == 2)
        results.append([row["loss"] for row in result.history])
        tasks.append(task)
    close = 1e-3 if precision == "32-true" else 2e-2
    assert results[0] == pytest.approx(results[1], rel=close)
    assert {of.device.type for part in cached(tasks[0]) for of in part.parameters()} == {"cpu"}
    assert tasks[0].device.type == "cuda"
    batch = SPLIT.test.gather(range(5))
    for name, found in tasks[0].predict(batch).items():
        torch.testing.assert_close(found, tasks[1].predict(batch)[name], atol=close, rtol=close)
    # Of predictions alone: what training left began anew.
    assert statistics(tasks[0]).rows_read > 0
    assert statistics(tasks[0]).rows_written == 0


def run_config(directory: Path, cache: int, **options: Any) -> RankingConfig:
    SCHEMA.save(directory / "schema.toml")
    training = {"table_optimizer": "rowwise-adagrad", "table_cache_bytes": cache, "max_epochs": 1, "tensorboard": False}
    return RankingConfig(
        output=str(directory / "run"),
        data={"schema_file": str(directory / "schema.toml"), "duplicates": "keep"},
        training={**training, **options},
        evaluation={"eval_batch_size": 4},
    )


def test_a_forecast_needs_no_more_rows_than_a_batch(tmp_path: Path) -> None:
    assert "cached rows " in str(jagged.train(run_config(tmp_path, BUDGET, batch_size=4), TABLE, dry_run=True).forecast)
    with pytest.raises(TrainingError) as caught:
        jagged.train(run_config(tmp_path, BUDGET, batch_size=16), TABLE, dry_run=True)
    assert str(caught.value) == (
        "table_cache_bytes: expected room for 21 more rows of width 16, which a batch misses, got 18 of 18 slots: others have "
        "rows that the batch needs, too, or lookups whose backward has not run; give more bytes, or smaller batches"
    )


@pytest.mark.gpu
def test_a_run_is_opened_with_its_tables_on_the_host(tmp_path: Path) -> None:
    jagged.train(run_config(tmp_path, 24_000, batch_size=4), TABLE, progress=False)
    rankers = [jagged.Ranker.from_pretrained(tmp_path / "run", device=device) for device in ("cuda", "cpu")]
    assert [bool(cached(ranker._run.model)) for ranker in rankers] == [True, False]  # type: ignore[union-attr]
    found, expected = (ranker.predict(TABLE, progress=False)["predicted_click"].to_numpy() for ranker in rankers)
    np.testing.assert_allclose(found, expected, atol=1e-3)
