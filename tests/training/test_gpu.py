"""Training on a GPU: mixed precision, no synchronisation in the loop, the forecast, resuming, and the way back to the CPU."""

from __future__ import annotations

import gc
import itertools
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from jagged.config import TrainerConfig
from jagged.data import BatchLoader, split_leave_one_out, synthetic_sessions
from jagged.models import NextItemTask, Task, TaskOutput, TaskScores, build
from jagged.models.pretrained import from_pretrained
from jagged.modules import SampledCrossEntropyHead, UniformSampler
from jagged.runs.training import train
from jagged.training import TrainingInterrupted
from jagged.training.engine import Engine
from jagged.training.processes import process_group
from tests.training.support import at_step, kill_self, run, tiny_config, tiny_dataset

pytestmark = pytest.mark.gpu
CUDA = {"device": "cuda", "embedding_dim": 16}


@pytest.fixture(autouse=True)
def _sync_debugging_off() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


def test_a_run_in_mixed_precision_opens_on_the_cpu(tmp_path: Path) -> None:
    result = run(tmp_path, tiny_dataset(), num_workers=2, **CUDA)
    opened = from_pretrained(tmp_path)
    assert opened.config is not None
    assert (opened.config.device, opened.config.precision) == ("cuda", "bf16-mixed")
    assert {parameter.device.type for parameter in opened.model.parameters()} == {"cpu"}
    assert {parameter.dtype for parameter in opened.model.parameters()} == {torch.float32}
    on_cpu = run(tmp_path / "cpu", tiny_dataset(), embedding_dim=16, dropout=0.0)
    on_gpu = run(tmp_path / "gpu", tiny_dataset(), device="cuda", embedding_dim=16, dropout=0.0, precision="32-true")
    assert [row["loss"] for row in on_gpu.history] == pytest.approx([row["loss"] for row in on_cpu.history], rel=1e-3)
    assert result.steps == on_gpu.steps


@pytest.mark.parametrize(
    ("options", "num_negatives"),
    [
        ({}, None),
        ({"table_optimizer": "rowwise-adagrad", "table_gradient_bytes": 16_384}, None),
        ({"table_optimizer": "rowwise-adagrad"}, 7),
    ],
)
def test_steps_wait_for_nothing(options: dict[str, Any], num_negatives: int | None) -> None:
    dataset = synthetic_sessions(0, num_users=400)[0]
    device = torch.device("cuda", torch.cuda.current_device())
    loader = BatchLoader(split_leave_one_out(dataset).train, batch_size=16, max_seq_len=50, shuffle=True, seed=0, pin_memory=True)
    with process_group(device) as processes:
        model = build("sasrec", num_items=dataset.num_items, embedding_dim=32, dropout=0.2).to(device)
        sampled = None if num_negatives is None else UniformSampler(dataset.num_items, num_negatives, seed=1)
        task = NextItemTask(model, head=None if sampled is None else SampledCrossEntropyHead(sampled)).to(device)
        engine = Engine(task, TrainerConfig(**options), "bf16-mixed", processes)
        # Kernels are compiled and loaded in the first steps.
        for _ in engine.steps(itertools.islice(iter(loader), 4)):
            pass
        loader.set_position(1, 0)
        batches = list(loader)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        losses = [trained.loss for trained in engine.steps(iter(batches))]
        torch.cuda.set_sync_debug_mode("default")
        assert len(losses) == len(batches)
        assert bool(torch.isfinite(torch.stack(losses)).all())


class Likes(Task):
    """A score that an embedding gives, with a weight for each row."""

    def __init__(self, weighted: bool) -> None:
        super().__init__()
        self.table, self.head, self.weighted = nn.Embedding(20, 8), nn.Linear(8, 1), weighted

    def forward(self, batch: dict[str, torch.Tensor]) -> TaskOutput:
        logits = self.head(self.table(batch["item"])).squeeze(1)
        weights = batch["weight"] if self.weighted else None
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch["label"], weights)
        return TaskOutput(loss, {"like": TaskScores(logits, batch["label"], weights=weights)})


@pytest.mark.parametrize("table_optimizer", ["adamw", "rowwise-adagrad", "adagrad", "sgd"])
@pytest.mark.parametrize("weighted", [False, True])
def test_steps_of_accumulated_batches_wait_for_nothing(table_optimizer: str, weighted: bool) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    batches = [
        {"item": torch.randint(20, (4,)).pin_memory(), "label": torch.ones(4).pin_memory(), "weight": torch.rand(4).pin_memory()}
        for _ in range(8)
    ]
    with process_group(device) as processes:
        config = TrainerConfig(accumulate=2, table_optimizer=table_optimizer, table_learning_rate=0.1)
        engine = Engine(Likes(weighted).to(device), config, "bf16-mixed", processes)
        for _ in engine.steps(iter(batches)):
            pass
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        updated = [trained.updated for trained in engine.steps(iter(batches))]
        torch.cuda.set_sync_debug_mode("default")
        assert updated == [False, True] * 4
        assert engine.is_finite()


def test_an_interrupted_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = tiny_dataset()
    undisturbed = run(tmp_path / "undisturbed", dataset, **CUDA)
    with monkeypatch.context() as patch:
        at_step(patch, 8, kill_self(signal.SIGTERM))
        with pytest.raises(TrainingInterrupted):
            run(tmp_path / "run", dataset, **CUDA)
    resumed = run(tmp_path / "run", dataset, resume=True, **CUDA)
    assert resumed.steps == undisturbed.steps
    # The dropout masks are the same; the order of sums in a GPU's kernels may not be.
    assert [row["loss"] for row in resumed.history] == pytest.approx([row["loss"] for row in undisturbed.history], rel=2e-3)


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_memory_is_forecast_within_a_factor(tmp_path: Path, cuda_graphs: bool) -> None:
    dataset = synthetic_sessions(0, num_users=2_000)[0]
    options = {"embedding_dim": 256, "num_layers": 4, "batch_size": 1_024, "max_seq_len": 50, "device": "cuda", "max_epochs": 1}
    options["cuda_graphs"] = cuda_graphs
    # The first run compiles and warms up what is not the model's own.
    train(tiny_config(tmp_path / "first", **options), dataset, progress=False)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    result = train(tiny_config(tmp_path / "second", **options), dataset, progress=False)
    # What is allocated says nothing of the memory that graphs keep.
    added = torch.cuda.max_memory_reserved() - result.forecast.present
    forecast = result.forecast.peak - result.forecast.present
    assert added > 100 * 2**20
    assert 1 / 2 < forecast / added < 2, f"forecast {forecast / 2**20:.0f} MiB, used {added / 2**20:.0f} MiB"
