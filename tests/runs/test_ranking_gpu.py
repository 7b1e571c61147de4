"""Runs on tables on a GPU: precision, the way back to the CPU, and contradictions that only the device sees."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

import jagged
from jagged.config import RankingConfig
from jagged.models import REQUEST_MODELS, RankingModel
from jagged.runs.ranking import RankingRun
from tests.models.shops import shop
from tests.runs.test_ranking_runs import TASKS, config, table

pytestmark = pytest.mark.gpu


def on(device: str, precision: str, directory: Path) -> RankingConfig:
    directory.mkdir()
    return RankingConfig(**{**config(directory).model_dump(), "device": device, "precision": precision})


def test_a_run_on_the_gpu_is_one_on_the_cpu(tmp_path: Path) -> None:
    losses, scores = {}, {}
    for name, device, precision in (("cpu", "cpu", "32-true"), ("gpu", "cuda", "32-true"), ("mixed", "cuda", "bf16-mixed")):
        result = jagged.train(on(device, precision, tmp_path / name), table(), progress=False)
        losses[name] = [row["loss"] for row in result.history]
        # Opened on either device, a run says the same.
        found = [
            jagged.Ranker.from_pretrained(tmp_path / name / "run", device=where).predict(table(), progress=False)
            for where in ("cpu", "cuda")
        ]
        for task in TASKS:
            values = [of[f"predicted_{task}"].to_numpy() for of in found]
            np.testing.assert_allclose(values[0], values[1], atol=1e-4)
        scores[name] = found[0]["predicted_click"].to_numpy()
    assert losses["gpu"] == pytest.approx(losses["cpu"], rel=1e-3)
    assert losses["mixed"] == pytest.approx(losses["cpu"], rel=2e-2)
    np.testing.assert_allclose(scores["gpu"], scores["cpu"], atol=1e-2)


def test_a_run_on_the_gpu_repeats(tmp_path: Path) -> None:
    weights = []
    for name in ("a", "b"):
        jagged.train(on("cuda", "32-true", tmp_path / name), table(), progress=False)
        weights.append(RankingRun.open(tmp_path / name / "run", device="cpu").model.state_dict())
    for name, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][name], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("precision", "dropout", "error"), [("32-true", 0.0, 2e-3), ("bf16-mixed", 0.0, 2e-2), ("32-true", 0.2, 0.1)]
)
def test_a_run_by_graphs_is_one_of_single_launches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str, dropout: float, error: float
) -> None:
    """Validated, written down and resumed between replays; with one size alone, so that some batches run without a graph."""
    monkeypatch.setattr("jagged.training.filled._MOST_SIZES", 1)
    replays: list[int] = []
    replay = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: (replays.append(1), replay(graph))[1])
    losses, scores = {}, {}
    for graphs in (False, True):
        directory = tmp_path / str(graphs)
        for epochs in (2, 3):
            directory.mkdir(exist_ok=True)
            given = config(directory).model_dump()
            given["training"] |= {"table_optimizer": "rowwise-adagrad", "cuda_graphs": graphs, "max_epochs": epochs}
            given["model"]["dropout"] = dropout
            made = RankingConfig(**{**given, "device": "cuda", "precision": precision})
            assert (len(replays) > 0) == (graphs and epochs == 3)
            result = jagged.train(made, table(), resume=epochs == 3, progress=False)
        losses[graphs] = [row["loss"] for row in result.history]
        scores[graphs] = jagged.Ranker.from_pretrained(directory / "run").predict(table(), progress=False)["predicted_click"]
    assert len(losses[True]) == 3
    assert losses[True] == pytest.approx(losses[False], rel=error)
    if not dropout:
        np.testing.assert_allclose(scores[True].to_numpy(), scores[False].to_numpy(), atol=10 * error)
    assert 0 < len(replays) < result.steps


#: Models by name, and options that show more of them than their defaults do.
OPTIONS: dict[str, dict[str, Any]] = {
    "ranking": {},
    "din": {"attention_sizes": [8, 4]},
    "dlrm": {},
    "dlrm-hstu": {"cross": "dot"},
    "dcnv2": {"structure": "parallel", "cross_rank": 3, "cross_experts": 2},
    "wukong": {"num_fm_tokens": 8, "num_linear_tokens": 8, "rank": 4},
    "mmoe": {"experts": "ple", "num_experts": 2, "expert_layers": 2, "cross": "dcn"},
}
every_model = pytest.mark.parametrize("name", list(OPTIONS))


def test_all_models_are_tried() -> None:
    assert set(OPTIONS) == set(REQUEST_MODELS)


@every_model
def test_gradients_are_those_of_the_cpu(name: str) -> None:
    split = shop(history="events", event_labels=["click"])
    torch.manual_seed(0)
    options = {"embedding_dim": 8, "conditional": {"buy": "click"}, "implied": True}
    model = REQUEST_MODELS[name].of(split, **options, **OPTIONS[name])
    batch = split.train.gather(range(20))
    model(batch).loss.backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    model.cuda()
    model(batch.to(torch.device("cuda"))).loss.backward()
    for name, parameter in model.named_parameters():
        if name in expected:
            torch.testing.assert_close(parameter.grad.cpu(), expected[name], atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("name", [*OPTIONS, "pairwise", "listwise"])
def test_a_step_on_a_new_batch_does_not_wait_for_the_device(name: str) -> None:
    split = shop(history="events", event_labels=["click"], requests=200)
    options: dict[str, Any] = {"embedding_dim": 8}
    # With a model the losses of rows, with a loss the general model.
    options |= {"conditional": {"buy": "click"}, "implied": True, **OPTIONS[name]} if name in OPTIONS else {"loss": name}
    model = REQUEST_MODELS.get(name, RankingModel).of(split, **options).cuda()
    loader = split.train.loader(batch_size=16, num_workers=1, pin_memory=True)
    batches = [batch.to(torch.device("cuda"), non_blocking=True) for batch in loader]
    # Kernels are compiled, and tables of their sizes made.
    model(batches[0]).loss.backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(batches[1]).loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    loader.close()


CONTRADICTION = """
import torch
from jagged.models import RankingModel
from tests.models.shops import shop
split = shop(history="events")
model = RankingModel.of(split, embedding_dim=4, conditional={"buy": "click"}).cuda()
batch = split.train.gather(range(4)).to(torch.device("cuda"))
batch.labels[:, 0], batch.labels[:, 1], batch.label_mask[:] = 0, 1, True
model(batch)
torch.cuda.synchronize()
print("nobody noticed")
"""


def test_a_contradiction_between_labels_stops_the_device() -> None:
    ended = subprocess.run([sys.executable, "-c", CONTRADICTION], capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode != 0
    assert "nobody noticed" not in ended.stdout
    assert "assert" in ended.stderr.lower()


def test_frames_are_scored_in_mixed_lengths(tmp_path: Path) -> None:
    jagged.train(on("cuda", "auto", tmp_path / "run"), table(), progress=False)
    ranker = jagged.Ranker.from_pretrained(tmp_path / "run" / "run")
    assert ranker._run is not None
    assert ranker._run.model.device.type == "cuda"
    whole = ranker.predict(table(), progress=False)["predicted_click"].to_numpy()
    for rows in ([0], [3, 1, 2], list(range(40))):
        found = ranker.predict(table().take(pa.array(rows)), progress=False)["predicted_click"].to_numpy()
        np.testing.assert_allclose(found, whole[rows], atol=1e-3)
