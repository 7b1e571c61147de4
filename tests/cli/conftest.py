"""A tiny run, trained once for all tests of the commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from jagged.config import TrainConfig


@pytest.fixture(scope="session")
def run_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from jagged.data import synthetic_sessions
    from jagged.runs.training import train

    dataset, _ = synthetic_sessions(3, num_users=200, num_items=96, mean_length=8, max_length=20)
    config = TrainConfig(
        data={"path": "sample <b>&'\".csv", "max_seq_len": 10},
        output=str(tmp_path_factory.mktemp("runs") / "tiny"),
        model={"embedding_dim": 16, "num_layers": 1},
        training={"max_epochs": 2, "tensorboard": False},
        device="cpu",
    )
    return train(config, dataset, progress=False).directory
