"""From a run to a package for a GPU: what it finds is what the model finds, in processes without jagged and beside the run."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import jagged
from jagged import Recommender, artifacts
from jagged.config import TrainConfig
from jagged.ops.attention import packaged
from jagged.runs import packing
from jagged.runs.ranking import RankingRun
from jagged.runs.ranking import packing as ranking_packing
from tests.runs.test_exporting import scored
from tests.runs.test_exporting import trained as trained_on_a_table
from tests.runs.test_exporting_items import BEST, LENGTH, USERS, events

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


def trained(directory: Path, **model: Any) -> Path:
    data = {"max_seq_len": LENGTH, "duplicates": "keep", "timestamp_column": "timestamp"}
    config = TrainConfig(
        output=str(directory / "run"), model={"embedding_dim": 16, "num_layers": 2, "num_heads": 2, **model}, data=data,
        training={"max_epochs": 1}, device="cpu",
    )  # fmt: skip
    jagged.train(config, events(), progress=False)
    return directory / "run"


@pytest.mark.parametrize("model", [{"name": "sasrec"}, {"name": "hstu", "num_time_buckets": 8}], ids=["softmax", "pointwise"])
def test_items_of_a_run(model: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    launch = packaged.launched
    monkeypatch.setattr(
        packaged, "launched", lambda kernel, *given, **named: launched.append(kernel.__name__) or launch(kernel, *given, **named)
    )
    run = trained(tmp_path, **model)
    package = jagged.export(run, tmp_path / "package", k=BEST, device="cuda")
    assert launched.count("packaged_forward_kernel") == 2
    manifest = artifacts.verify(package).content
    assert manifest["device"] == "cuda"
    assert manifest["compute_capability"] == ".".join(map(str, torch.cuda.get_device_capability()))
    assert [one["users"] for one in manifest["compared"]] == [1, 7, 100, 3]
    assert all(one["difference"] < 1e-4 for one in manifest["compared"])
    # Where jagged is not.
    part = packing.ItemPackage(jagged.runs.run.Run.open(run, device="cpu"), BEST, (1e-4, 1e-3))
    with torch.no_grad():
        expected = part.by_model(part.batch(5))
    found = scored(package)
    torch.testing.assert_close(torch.tensor(found["scores"]), expected["scores"], rtol=0, atol=1e-3)
    # Beside the run, whose tensors are on the CPU.
    users = [f"u{user}" for user in range(USERS)]
    served = Recommender.from_pretrained(run, package=package).recommend(users, BEST)
    wanted = Recommender.from_pretrained(run, device="cpu").recommend(users, BEST)
    assert served["score"].to_pylist() == pytest.approx(wanted["score"].to_pylist(), abs=1e-3)


def test_scores_of_a_run(tmp_path: Path) -> None:
    run = trained_on_a_table(tmp_path)
    package = jagged.export(run, tmp_path / "package", device="cuda")
    opened = RankingRun.open(run, device="cpu")
    part = ranking_packing.RequestPackage(opened, (1e-4, 1e-3))
    found = scored(package)
    for task, logits in part.by_model(part.batch(5)).items():
        torch.testing.assert_close(torch.tensor(found[task]), logits.detach(), rtol=0, atol=1e-3)


def test_the_program_in_cpp_says_how_it_is_compiled(tmp_path: Path) -> None:
    """For a GPU it is linked with what runs there."""
    from jagged.runs.package_programs import programs_for

    source = programs_for("cuda")["score.cpp"]
    (tmp_path / "score.cpp").write_text(source)
    command = "".join(line[4:] for line in source.splitlines()[1:3]).replace("$TORCH", str(Path(torch.__file__).parent))
    subprocess.run([*command.split(), "-O0"], cwd=tmp_path, check=True)
    linked = subprocess.run(["ldd", "score"], cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    assert "libtorch_cuda" in linked
