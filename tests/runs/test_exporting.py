"""From a run to a package that scores without jagged: what is in it, what it scores, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
import torch

import jagged
from jagged import Ranker, artifacts, cli
from jagged.config import ConfigError, RankingConfig
from jagged.models import scoring_tensors
from jagged.runs import exporting
from jagged.runs.ranking import RankingRun, packing
from jagged.training import CheckpointError
from tests.places import PLACE
from tests.runs.test_ranking_runs import SMALL, config, table

pytestmark = [
    pytest.mark.skipif(PLACE.name == "interpret", reason="modules run on the place's own backend"),
    pytest.mark.filterwarnings("ignore"),
]
COMPILED = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles C++ for the CPU")
# Runs the program that lies beside a package, and looks at what it has imported.
RUN = "import runpy, sys; runpy.run_path('score.py'); assert not {'jagged', 'torchrec', 'fbgemm_gpu'} & set(sys.modules)"


def trained(directory: Path, **model: Any) -> Path:
    """A small run on a table with every kind of column."""
    chosen = config(directory)
    chosen = type(chosen)(**{**chosen.model_dump(exclude_unset=True), "model": {**SMALL["model"], **model}})
    jagged.train(chosen, table(), progress=False)
    return directory / "run"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("shop"))


def scored(package: Path) -> dict[str, list[float]]:
    """What the program beside a package prints, in a process without jagged."""
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RUN], cwd=package, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    return {line.partition(" ")[0]: json.loads(line.partition(" ")[2]) for line in found}


def scored_by_cpp(package: Path, folder: Path) -> list[float]:
    """What the program in C++ prints of all tasks, compiled as it says itself."""
    source = (package / "score.cpp").read_text()
    command = "".join(line[4:] for line in source.splitlines()[1:3]).replace("$TORCH", str(Path(torch.__file__).parent))
    words = [str(package / word) if word == "score.cpp" else word for word in command.split()]
    subprocess.run([*words, "-O0"], cwd=folder, check=True)
    found = subprocess.run([folder / "score", package], check=True, capture_output=True, text=True).stdout
    return [float(line) for line in found.splitlines() if re.fullmatch(r"\s*-?\d+\.\d+(e-?\d+)?", line)]


@COMPILED
def test_a_run_is_exported(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "scores"
    monkeypatch.setattr(sys, "argv", ["jagged", "export", str(run), str(package)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert not end.value.code
    told = capsys.readouterr()
    assert told.out == f"{package}\n"
    assert told.err.splitlines()[-2:] == [
        "compiling ranking for the CPU, which takes a minute or more",
        "comparing its scores with the model's",
    ]
    opened = RankingRun.open(run, device="cpu")
    part = opened.part("valid")
    batch = part.gather(np.arange(5) % len(part), max_history=opened.config.data.max_history)
    found = scored(package)
    for task, logits in opened.model.logits(batch).items():
        torch.testing.assert_close(torch.tensor(found[task]), logits.detach(), rtol=0, atol=2e-4)
    assert scored_by_cpp(package, tmp_path) == pytest.approx([value for values in found.values() for value in values], abs=1e-4)
    # What lies there is whole, and says what it is.
    manifest = artifacts.verify(package).content
    assert {name: manifest[name] for name in ("kind", "model", "device", "tasks")} == {
        "kind": "scores", "model": "ranking", "device": "cpu", "tasks": {"click": "logit", "buy": "logit"}
    }  # fmt: skip
    tensors = scoring_tensors(opened.model, batch)
    assert {name: told["dtype"] for name, told in manifest["inputs"].items()} == {
        name: str(of.dtype).removeprefix("torch.") for name, of in tensors.items()
    }
    assert all(told["sizes"] == [None, *tensors[name].shape[1:]] for name, told in manifest["inputs"].items())
    inputs = opened.model.inputs
    assert {name: list(keys) for name, keys in manifest["keys"].items()} == {name: inputs.keys(name) for name in manifest["keys"]}
    assert {name.removesuffix("_lengths") for name in tensors if name.endswith("_lengths")} == manifest["keys"].keys()
    assert manifest["keys"]["features"] | {"item": "item", "history.item": "item"} == manifest["keys"]["features"]
    assert manifest["keys"]["candidate_number_lists"] == {"sizes": None}
    assert manifest["columns"] == {
        "request_numbers": ["age"],
        "candidate_numbers": ["price"],
        "history_numbers": ["age", "price"],
        "history_labels": ["click"],
    }
    assert manifest["means"]["age"] == opened.encoders.statistics["age"].mean
    assert (manifest["max_history"], manifest["times"]) == (opened.config.data.max_history, opened.opened.split["time_kind"])
    assert [one["requests"] for one in manifest["compared"]] == [1, 7, 100, 3]
    assert all(one["difference"] < 1e-4 for one in manifest["compared"])
    took = manifest["milliseconds"]
    assert took["requests"] == 100
    assert all(0 < took[what]["p50"] <= took[what]["p99"] and took[what]["calls"] > 1 for what in ("package", "model"))
    # Ids become rows by files that pyarrow reads.
    assert {table for of in manifest["keys"].values() for table in of.values()} - {None} <= manifest["tables"].keys()
    items = manifest["tables"]["item"]
    with pa.memory_map(str(package / items["ids"])) as file:
        ids = pa.ipc.open_file(file).read_all().column(0).to_pylist()
    assert ids == opened.encoders["item"].ids.ids.to_pylist()
    assert (items["encoding"], items["rows"]) == ("vocabulary", len(ids) + 2)
    known = opened.encoders["item"].encode(pa.array(ids[:3]))
    assert known.tolist() == [2, 3, 4]
    # Rows are scored by it as by the model, some requests at a time, and on the command line.
    monkeypatch.setattr("jagged.runs.ranking.run.most_samples", lambda wanted, longest: 7)
    rows, output = tmp_path / "rows.parquet", tmp_path / "predicted.parquet"
    pq.write_table(table(), rows)
    expected = Ranker.from_pretrained(run, device="cpu").predict(rows, progress=False)
    ranker, called = Ranker.from_pretrained(run, package=package), []
    by_package = ranker._run.package
    score = by_package._score
    by_package._score = lambda **tensors: called.append(len(tensors["candidate_offsets"]) - 1) or score(**tensors)
    served = ranker.predict(rows, progress=False)
    assert (max(called), sum(called)) == (7, len(set(table()["request"].to_pylist())))
    for name in expected.column_names:
        columns = served[name].to_pylist(), expected[name].to_pylist()
        assert columns[0] == (pytest.approx(columns[1], abs=1e-4) if name.startswith("predicted_") else columns[1])
    monkeypatch.setattr(
        sys, "argv", ["jagged", "predict", str(run), str(rows), "--output", str(output), "--package", str(package)]
    )
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert not end.value.code
    assert pq.read_table(output).equals(served)


@COMPILED
@pytest.mark.long
@pytest.mark.parametrize("name", ["dlrm", "dcnv2", "din", "wukong", "mmoe", "dlrm-hstu"])
def test_runs_of_all_models_are_exported(name: str, tmp_path: Path) -> None:
    own = {"name": name, "embedding_dim": 4}
    chosen = config(tmp_path)
    chosen = type(chosen)(**{**chosen.model_dump(exclude_unset=True), "model": own})
    jagged.train(chosen, table(), progress=False)
    jagged.export(tmp_path / "run", tmp_path / "scores", progress=False)
    assert scored(tmp_path / "scores").keys() == {"click", "buy"}


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is compiled scores half too much."""

    def of_everything(**tensors: torch.Tensor) -> dict[str, torch.Tensor]:
        return {task: torch.full((len(tensors["candidate_numbers"]),), 0.5) for task in ("click", "buy")}

    monkeypatch.setattr(exporting, "write_package", lambda program, path: path.write_bytes(b""))
    monkeypatch.setattr(packing, "export_scores", lambda model, batch: None)
    monkeypatch.setattr(torch._inductor, "aoti_load_package", lambda path: of_everything)


def test_drawn_candidates_are_compared_too(tmp_path: Path) -> None:
    """Rows without labels have one candidate each; the package has to score several of a request."""
    rows = table().select(["user", "item", "time"])
    data = {"user": "user", "candidate": "item", "time": "time", "negatives": 3, "duplicates": "keep"}
    jagged.train(RankingConfig(**{**SMALL, "output": str(tmp_path / "run"), "data": data}), rows, progress=False)
    opened = RankingRun.open(tmp_path / "run", device="cpu")
    made = packing.RequestPackage(opened, (1e-4, 1e-3))
    batch = made.batch(50)
    counts = batch.candidate_offsets.diff()
    assert len(counts) == 50
    assert int(counts.max()) == 4
    assert made.difference({task: of.detach() for task, of in made.by_model(batch).items()}, batch) == 0


@pytest.mark.usefixtures("uncompiled")
def test_a_package_that_scores_otherwise_is_not_written(run: Path, tmp_path: Path) -> None:
    with pytest.raises(artifacts.ArtifactError) as refused:
        jagged.export(run, tmp_path / "scores", progress=False)
    assert re.fullmatch(
        r"click: logits of the package are \d\S* from the model's, expected 0\.0001 and 0\.001 of them; nothing was written\. "
        r"Report it with the output of `jagged doctor`",
        str(refused.value),
    )
    assert not list(tmp_path.iterdir())


def test_what_is_there_is_not_written_over(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        jagged.export(run, tmp_path)
    assert str(refused.value) == f"output: {tmp_path} is there, expected a new directory; give another name, or remove it"


def test_without_a_compiler_nothing_is_read(run: Path, tmp_path: Path) -> None:
    expected = "export: found no C++ compiler, expected g++ or clang++; install one, or name it in CXX"
    with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}), pytest.raises(ConfigError) as refused:
        jagged.export(run, tmp_path / "scores")
    assert str(refused.value) == expected


@COMPILED
def test_what_the_compiler_says_is_told(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(
        # What asks who it is has few words.
        '#!/bin/sh\n[ $# -lt 4 ] && exec g++ "$@"\necho "x.h:1: fatal error: omp.h: none" >&2\nexit 1\n'
    )
    compiler.chmod(0o755)
    # Nothing that was compiled before.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    patched = torch._inductor.config.patch({"cpp.cxx": (str(compiler),), "force_disable_caches": True})
    with patched, pytest.raises(ConfigError) as refused:
        jagged.export(run, tmp_path / "scores", progress=False)
    assert str(refused.value) == (
        "export: the package could not be compiled: 'x.h:1: fatal error: omp.h: none'; install another compiler with OpenMP, and "
        "name it in CXX"
    )
    assert not (tmp_path / "scores").exists()


def test_what_cannot_be_taken_apart_is_told(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(program: Any, path: Any) -> None:
        raise ValueError("program: got jagged::other, expected none")

    monkeypatch.setattr(exporting, "write_package", refuse)
    monkeypatch.setattr(packing, "export_scores", lambda model, batch: None)
    with pytest.raises(ConfigError) as refused:
        jagged.export(run, tmp_path / "scores", progress=False)
    told = "the model could not be exported: ValueError: 'program: got jagged::other, expected none'"
    assert str(refused.value) == f"{run}: {told}"


def test_a_name_that_cannot_be_is_refused(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uncompiled: None) -> None:
    monkeypatch.setattr(exporting, "_compared", lambda packed, package: {})
    output = tmp_path / ("a" * 300)
    with pytest.raises(artifacts.ArtifactError) as refused:
        jagged.export(run, output, progress=False)
    assert str(refused.value) == f"{output}: could not be written: File name too long; give another output"


def test_other_runs_are_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        jagged.export(tmp_path, tmp_path / "scores")
    labels = tmp_path / "labels"
    labels.mkdir()
    (labels / "model.json").write_text(json.dumps({"model": "multilabel"}))
    with pytest.raises(ConfigError) as refused:
        jagged.export(labels, tmp_path / "scores")
    assert str(refused.value) == (
        f"{labels}: a run on sets of labels, expected one on events or on a table; only these are exported"
    )
    with pytest.raises(ConfigError) as refused:
        jagged.export(run, tmp_path / "scores", k=3)
    assert str(refused.value) == f"k: {run} is a run on a table, whose packages score all candidates; leave it out"
    shutil.copytree(run, tmp_path / "bare")
    shutil.rmtree(tmp_path / "bare" / "dataset")
    with pytest.raises(ConfigError) as refused:
        jagged.export(tmp_path / "bare", tmp_path / "scores")
    told = (
        "holds no data (dataset/), on which a package is compared with the model; export the directory that `jagged train` wrote"
    )
    assert str(refused.value) == f"{tmp_path / 'bare'}: {told}"
