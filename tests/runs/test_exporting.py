"""From a run to a package that scores without jagged: what is in it, what it scores, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zipfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
import torch
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InductorError

import jagged
from jagged import Ranker, artifacts, cli
from jagged.config import ConfigError, RankingConfig
from jagged.models import scoring_tensors
from jagged.runs import exporting
from jagged.runs.packages import Package, weights_of
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
    manifest = artifacts.verify(package).content
    took = manifest["milliseconds"]
    assert told.err.splitlines()[-3:] == [
        "compiling ranking for the CPU, which takes a minute or more",
        "comparing its scores with the model's",
        f"100 requests take {took['package']['p50']} ms in the package and {took['model']['p50']} ms in the model",
    ]
    opened = RankingRun.open(run, device="cpu")
    part = opened.part("valid")
    batch = part.gather(np.arange(5) % len(part), max_history=opened.config.data.max_history)
    found = scored(package)
    for task, logits in opened.model.logits(batch).items():
        torch.testing.assert_close(torch.tensor(found[task]), logits.detach(), rtol=0, atol=2e-4)
    assert scored_by_cpp(package, tmp_path) == pytest.approx([value for values in found.values() for value in values], abs=1e-4)
    # What lies there says what it is.
    assert "compute_capability" not in manifest
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

    monkeypatch.setattr(exporting, "write_package", lambda program, path: zipfile.ZipFile(path, "w").close())
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
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere compilers have one C++ library")
def test_a_compiler_that_puts_its_library_into_programs_is_refused(tmp_path: Path) -> None:
    """A package of one was loaded, and ended the process in a segmentation fault."""
    (tmp_path / "program.cpp").write_text("#include <iostream>\nvoid say() { std::cout << 1; }\n")
    compiler = get_cpp_compiler()
    message = (
        f"export: {compiler} put the C++ library into the package, which ends the process that loads it; expected a compiler "
        "that links the shared one, libstdc++.so; name one in CXX"
    )
    is_refused = pytest.raises(ConfigError, match=f"^{re.escape(message)}$")
    cases: list[tuple[list[str], AbstractContextManager[Any]]] = [(["-static-libstdc++"], is_refused), ([], nullcontext())]
    for options, refused in cases:
        command = [compiler, "-shared", "-fPIC", *options, "program.cpp", "-o", "program.so"]
        subprocess.run(command, cwd=tmp_path, check=True)
        with zipfile.ZipFile(tmp_path / "scores.pt2", "w") as archive:
            archive.write(tmp_path / "program.so", "data/program.wrapper.so")
        with refused:
            exporting._check_runtime(tmp_path / "scores.pt2")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that nothing runs on."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))


def test_devices_that_are_not_there_are_refused(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device, message in (
        ("cuda", "device: got 'cuda', but torch sees no GPU; run `jagged doctor`, or use device=cpu"),
        ("tpu", "device: got 'tpu', expected 'auto', 'cpu' or 'cuda'"),
    ):
        with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
            jagged.export(run, tmp_path / "scores", device=device)


@COMPILED
@pytest.mark.usefixtures("gpu")
def test_without_what_a_gpu_needs_nothing_is_read(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils import cpp_extension

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(cpp_extension, "include_paths", lambda device: [str(tmp_path)])
    message = (
        "export: found no headers of CUDA (cuda.h), expected its toolkit's for a package on a GPU; install it, and name its "
        "folder in CUDA_HOME, or use device=cpu"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        jagged.export(run, tmp_path / "scores", device="cuda")
    # With headers it is asked for no more.
    (tmp_path / "cuda.h").write_text("")
    exporting._check_compiler(torch.device("cuda"))
    monkeypatch.setattr(exporting.importlib.util, "find_spec", lambda name: None)
    message = "export: found no Triton, expected it for a package on a GPU; install it, or use device=cpu"
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        jagged.export(run, tmp_path / "scores", device="cuda")
    exporting._check_compiler(torch.device("cpu"))


def written(directory: Path, run: Path, **content: Any) -> Path:
    """A package of a run, without a program."""
    directory.mkdir()
    (directory / "scores.pt2").write_bytes(b"")
    content = {"kind": "scores", "weights": weights_of(run), "torch": torch.__version__, **content}
    artifacts.write_manifest(directory, ["scores.pt2"], content)
    return directory


def test_packages_for_other_gpus_are_refused(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    package = written(tmp_path / "package", run, device="cuda", compute_capability="8.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    message = (
        f"package: {package} is for a GPU of compute capability 8.0, but torch sees none; run `jagged doctor`, or make one for "
        "the CPU by `jagged export`"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        Package(package, run, "scores")
    request.getfixturevalue("gpu")
    message = (
        f"package: {package} is for GPUs of compute capability 8.0, got one of 9.0; make it again by `jagged export` on such "
        "a GPU"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        Package(package, run, "scores")


@pytest.mark.usefixtures("gpu")
def test_a_package_reads_tensors_where_it_scores(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And gives what it finds where they were."""
    devices: list[str] = []

    def score(**tensors: torch.Tensor) -> dict[str, torch.Tensor]:
        devices.extend(of.device.type for of in tensors.values())
        return {name: of.new_ones(2) for name, of in tensors.items()}

    monkeypatch.setattr(torch._inductor, "aoti_load_package", lambda path: score)
    package = Package(written(tmp_path / "package", run, device="cuda", compute_capability="9.0"), run, "scores")
    # A device that is here stands for the GPU.
    package.content = {**package.content, "device": "meta"}
    with pytest.raises(NotImplementedError, match=r"^Cannot copy out of meta tensor"):
        package({"ids": torch.ones(3)})
    assert devices == ["meta"]
    package.content = {**package.content, "device": "cpu"}
    assert package({"ids": torch.ones(3)})["ids"].tolist() == [1, 1]


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


@pytest.mark.parametrize(
    ("device", "cure"),
    [
        ("cpu", "install another compiler with OpenMP, and name it in CXX"),
        ("cuda", "make a package for the CPU by device=cpu"),
    ],
)
def test_what_inductor_says_is_told(device: str, cure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a GPU no other C++ compiler is the cure."""

    def refuse(program: Any, path: Any) -> None:
        raise InductorError(RuntimeError("no kernel"), None)

    packed = SimpleNamespace(program=lambda batch: None, batch=lambda count: None)
    monkeypatch.setattr(exporting, "write_package", refuse)
    monkeypatch.setattr(exporting, "moved", lambda batch, device: batch)
    message = f"export: the package could not be compiled: 'RuntimeError: no kernel'; {cure}"
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        exporting._compile("run", packed, tmp_path / "scores.pt2", torch.device(device))  # type: ignore[arg-type]


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
    took = {"requests": 1, "package": {"p50": 1.0}, "model": {"p50": 2.0}}
    monkeypatch.setattr(exporting, "_compared", lambda packed, package, device: {"milliseconds": took})
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
