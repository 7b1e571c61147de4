"""The artifact layer: files that appear whole, manifests, locks, typed readers, and a run directory damaged in every way."""

from __future__ import annotations

import json
import os
import random
import shutil
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from jagged import artifacts
from jagged.artifacts import ArtifactError, CheckpointError, Expected
from jagged.data import DataError, SequenceDataset, Vocabulary, read_batches, record_batches
from jagged.metrics import TrainCounts
from jagged.models import SASRec
from jagged.models.pretrained import from_pretrained, save_pretrained
from jagged.training.checkpoint import load_checkpoint, save_checkpoint
from tests.conftest import LONG
from tests.seeds import generators
from tests.training.support import tiny_config, tiny_dataset

ROOT = Path(__file__).parent.parent
SECONDS = 10.0


def small_run(directory: Path) -> Path:
    """What a finished run leaves, of small files, written by what training writes it with."""
    dataset = tiny_dataset()
    torch.manual_seed(0)
    model = SASRec(dataset.num_items, embedding_dim=4, num_heads=1, num_layers=1, max_seq_len=6)
    save_pretrained(
        model,
        directory,
        items=dataset.items,
        config=tiny_config(directory),
        split={"name": "leave-one-out", "fingerprint": dataset.fingerprint},
        metrics={"test": {}},
        train_counts=TrainCounts(torch.ones(dataset.num_items, dtype=torch.int64), 3),
        history=[{"epoch": 1, "loss": 0.5}],
    )
    dataset.save(directory / "dataset")
    save_checkpoint(directory / "checkpoints", "step-00000003", {"model.a": torch.randn(3, 2)}, {"step": 3})
    table = EmbeddingBagConfig(name="item", embedding_dim=8, num_embeddings=100, feature_names=["clicked"])
    batch = KeyedJaggedTensor(keys=["clicked"], values=torch.tensor([5, 99]), lengths=torch.tensor([2, 0]))
    (directory / "recorded").mkdir()
    record_batches(directory / "recorded" / "batches.safetensors", [table], [batch])
    return directory


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_run(tmp_path_factory.mktemp("finished") / "run")


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def reseal(directory: Path) -> None:
    """List what is there, as someone does who knows the format; batches that were recorded have no list."""
    if not (directory / artifacts.MANIFEST).exists():
        return
    old = json.loads((directory / artifacts.MANIFEST).read_text())
    kept = {name: value for name, value in old.items() if name not in ("format_version", "files", "sha256")}
    artifacts.write_manifest(directory, [name for name in old["files"] if (directory / name).is_file()], kept)


def modes(directory: Path) -> set[int]:
    return {stat.S_IMODE(path.stat().st_mode) for path in directory.rglob("*") if path.is_file()}


def test_importing_the_layer_is_light() -> None:
    code = "import sys, jagged.artifacts; print({'torch', 'pyarrow', 'numpy', 'tqdm'} & set(sys.modules) or 'none')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "none"


@pytest.mark.parametrize("mask", [0o022, 0o027])
def test_files_have_the_mode_that_files_get_there(mask: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        small_run(tmp_path / "run")
        Vocabulary(["a"]).save(tmp_path / "run" / "more.arrow")
        TrainCounts(torch.ones(1, dtype=torch.int64), 1).save(tmp_path / "run")
    finally:
        os.umask(before)
    assert modes(tmp_path) == {0o666 & ~mask}


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "file"
    artifacts.write_file(path, b"old")

    def interrupted() -> None:
        with artifacts.replacing(path) as aside:
            aside.write_bytes(b"ne")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (path.read_bytes(), os.listdir(tmp_path)) == (b"old", ["file"])


def test_a_pipe_or_a_device_is_not_replaced(tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "null"
    os.mkfifo(pipe)
    link.symlink_to("/dev/null")
    for path in (pipe, link):
        with pytest.raises(FileExistsError) as error:
            artifacts.write_file(path, b"new")
        assert str(error.value) == f"[Errno 17] it is a pipe or a device: '{path}'"
    assert (pipe.is_fifo(), os.readlink(link), sorted(os.listdir(tmp_path))) == (True, "/dev/null", ["null", "pipe"])


def test_leftovers_of_killed_processes_are_swept_and_nothing_else(tmp_path: Path) -> None:
    for name in (".history.jsonl.123.tmp", ".model.json.77-0123abcd.tmp", ".lock", "a.tmp", ".b.tmp", "history.jsonl"):
        (tmp_path / name).touch()
    (tmp_path / ".dataset.9-ffffffff.tmp").mkdir()
    (tmp_path / ".dataset.9-ffffffff.tmp" / "events.arrow").touch()
    (tmp_path / ".link.9-ffffffff.tmp").symlink_to(tmp_path)
    artifacts.sweep(tmp_path, older_than=60.0)
    assert len(os.listdir(tmp_path)) == 8
    artifacts.sweep(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".b.tmp", ".lock", "a.tmp", "history.jsonl"]
    artifacts.sweep(tmp_path / "none")


def test_a_manifest_keeps_what_is_put_beside_its_list(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1")
    artifacts.write_manifest(tmp_path, ["a"], {"kind": "test"})
    assert artifacts.verify(tmp_path).content == {"kind": "test"}
    content = json.loads((tmp_path / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_bytes(artifacts.dump_json({**content, "kind": "other"}))
    with pytest.raises(ArtifactError) as caught:
        artifacts.verify(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path / 'manifest.json'}: damaged: found content that does not fit its own SHA-256, "
        "expected the manifest as it was written; copy it again"
    )


def test_a_history_belongs_to_the_manifest(run: Path) -> None:
    assert from_pretrained(run).history == [{"epoch": 1, "loss": 0.5}]
    (run / "history.jsonl").write_text('{"epoch": 2, "loss": 0.5}\n')
    with pytest.raises(CheckpointError, match=r"history\.jsonl: damaged: found SHA-256"):
        from_pretrained(run)
    # A run that goes on writes its history before there is a next model.
    artifacts.unlist(run, "history.jsonl")
    assert from_pretrained(run).history == []
    manifest = (run / "manifest.json").read_bytes()
    artifacts.unlist(run, "history.jsonl")
    assert (run / "manifest.json").read_bytes() == manifest
    artifacts.unlist(run / "none", "history.jsonl")


def test_a_lock_refuses_another_process_and_ends_with_its_holder(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from jagged import artifacts\n"
        "with artifacts.lock(Path(sys.argv[1]), ValueError('busy')): print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match="busy"), artifacts.lock(tmp_path, ValueError("busy")):
            pass
        holder.kill()
    with artifacts.lock(tmp_path, ValueError("busy")):
        assert os.listdir(tmp_path) == [".lock"]


def test_a_directory_made_for_a_lock_goes_where_nothing_was_put_there(tmp_path: Path) -> None:
    with artifacts.lock(tmp_path / "new", ValueError("busy")):
        assert os.listdir(tmp_path / "new") == [".lock"]
    assert os.listdir(tmp_path) == []
    with artifacts.lock(tmp_path / "new", ValueError("busy")):
        (tmp_path / "new" / "file").touch()
    assert sorted(os.listdir(tmp_path / "new")) == [".lock", "file"]


COUNTS = {"users_per_item": Expected(("I64",), (None,)), "num_users": Expected(("I64",), (1,))}


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ({"users_per_item": torch.ones(3)}, "num_users: found none, expected I64 [1]; copy it again"),
        (
            {"users_per_item": torch.ones(3, 1, dtype=torch.int64), "num_users": torch.tensor([3])},
            "users_per_item: found I64 [3, 1], expected I64 [any]; copy it again",
        ),
        (
            {"users_per_item": torch.ones(3), "num_users": torch.tensor([3])},
            "users_per_item: found F32 [3], expected I64 [any]; copy it again",
        ),
    ],
)
def test_tensors_are_those_expected(tensors: dict[str, Any], problem: str, tmp_path: Path) -> None:
    path = tmp_path / "train_counts.safetensors"
    artifacts.save_tensors(path, tensors)
    with pytest.raises(ArtifactError) as caught:
        artifacts.read_tensors(path, COUNTS)
    assert str(caught.value) == f"{path}: {problem}"
    with pytest.raises(CheckpointError) as named:
        TrainCounts.load(tmp_path)
    assert str(named.value) == f"{path}: {problem}"


def test_counts_of_another_catalogue_or_out_of_range(tmp_path: Path) -> None:
    path = tmp_path / "train_counts.safetensors"
    TrainCounts(torch.tensor([1, 4]), 3).save(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        TrainCounts.load(tmp_path)
    assert str(caught.value) == f"{path}: found counts out of range, expected 0 to 3; copy it again"
    TrainCounts(torch.tensor([1, 2]), 3).save(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        TrainCounts.load(tmp_path, 5)
    assert str(caught.value) == f"{path}: users_per_item: found I64 [2], expected I64 [5]; copy it again"


def header(content: bytes, size: int = 0) -> bytes:
    return struct.pack("<Q", len(content)) + content + bytes(size)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1234567",
        b"\xff" * 8,
        header(b"{}", 1),
        header(b"[]"),
        header(b"[" * 50_000),
        header(b'{"a": 1}'),
        header(b'{"a": {"dtype": "F32", "shape": [1000000000000], "data_offsets": [0, 4]}}', 4),
        header(b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}', 4),
        header(b'{"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}', 4),
        header(b'{"a": {"dtype": "F32", "shape": [true], "data_offsets": [0, 4]}}', 4),
        header(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [5, 9]}}', 4),
    ],
    ids=range(12),
)
def test_what_is_no_file_of_tensors(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "train_counts.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"train_counts\.safetensors"):
        TrainCounts.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("num_layers", 1_000_000_000, "model.json: num_layers: found 1000000000, expected at most 1048576"),
        ("num_layers", 1_000_000, "found a model of more than"),
        ("max_seq_len", 10**30, "model.json: max_seq_len: found 1" + "0" * 30),
        ("num_heads", [[1_000_000_000]], "model.json: num_heads: found 1000000000"),
        ("num_layers", -(10**9), "model.json: num_layers: found -1000000000"),
    ],
)
def test_a_described_model_is_bounded_by_its_weights(run: Path, name: str, value: Any, problem: str) -> None:
    described = json.loads((run / "model.json").read_text())
    described["arguments"][name] = value
    (run / "model.json").write_text(json.dumps(described))
    reseal(run)
    begin = time.monotonic()
    with pytest.raises(CheckpointError) as caught:
        from_pretrained(run)
    assert problem in str(caught.value)
    assert time.monotonic() - begin < SECONDS


def look(dataset: SequenceDataset) -> None:
    """Touch all that a dataset hands out."""
    assert dataset.notes.keys() >= set()
    assert (len(dataset.users), len(dataset.items)) == (dataset.num_users, dataset.num_items)
    assert len(dataset.time_kind + dataset.fingerprint) > 64
    assert int(dataset.lengths.sum()) == len(dataset.item_ids) == dataset.num_events
    assert dataset.timestamps is None or int(dataset.timestamps.sum()) is not None


def huge(content: bytes, rng: random.Random) -> bytes:
    """Make a number of a JSON text huge, or another value where one stands."""
    digits = [place for place in range(len(content)) if content[place : place + 1].isdigit()]
    place = rng.choice(digits) if digits else 0
    number = rng.choice([b"9" * 12, b"9" * 40, b"9" * 5000, b"1e400", b"-1", b"null", b'"x"', b"[]", b"0.5"])
    return content[:place] + number + content[place + 1 :]


def damage(path: Path, rng: random.Random) -> str:
    content = path.read_bytes()
    kind = rng.choice(["flip", "flip", "truncate", "empty", "delete", "directory", "number", "zero", "pipe"])
    place = rng.randrange(len(content))
    if kind in ("delete", "directory", "pipe"):
        path.unlink()
        if kind == "directory":
            path.mkdir()
        elif kind == "pipe":
            os.mkfifo(path)
        return kind
    if kind == "number" and path.suffix == ".safetensors":
        head = struct.unpack("<Q", content[:8])[0]
        changed = huge(content[8 : 8 + head], rng)
        content = header(changed) + content[8 + head :]
    elif kind == "number" and path.suffix != ".arrow":
        content = huge(content, rng)
    elif kind in ("truncate", "empty"):
        content = content[: place if kind == "truncate" else 0]
    elif kind == "zero":
        content = content[:place] + bytes(len(content[place : place + 64])) + content[place + 64 :]
    else:
        content = content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :]
    path.write_bytes(content)
    return kind


#: Every reader of a run directory, and the error that it may raise.
Readers = dict[Callable[[Path], object], type[Exception] | tuple[type[Exception], ...]]


def check_damages(finished: Path, tmp_path: Path, readers: Readers, count: int) -> None:
    """Damage a copy of a run, as often as that, at random: readers raise their errors, in one line that names the place."""
    files = sorted(path.relative_to(finished) for path in finished.rglob("*") if path.is_file() and path.name != ".lock")
    for number, rng in enumerate(generators(count)):
        run = Path(shutil.copytree(finished, tmp_path / "run"))
        path = run / rng.choice(files)
        kind = damage(path, rng)
        resealed = rng.random() < 0.7 and path.name != artifacts.MANIFEST
        if resealed:
            reseal(path.parent)
        for read, error in readers.items():
            begin = time.monotonic()
            trial = f"trial {number}: {kind} of {path.name}, resealed {resealed}"
            said = str(run)
            try:
                read(run)
            except error as problem:
                said = str(problem)
            except BaseException as problem:
                raise AssertionError(trial) from problem
            assert len(said.splitlines()) == 1, trial
            assert str(run) in said, f"{trial}: {said}"
            assert time.monotonic() - begin < SECONDS, trial
        shutil.rmtree(run)


def test_no_damage_is_more_than_a_named_error(finished: Path, tmp_path: Path) -> None:
    readers: Readers = {
        from_pretrained: CheckpointError,
        lambda run: look(SequenceDataset.load(run / "dataset")): DataError,
        TrainCounts.load: CheckpointError,
        lambda run: load_checkpoint(run / "checkpoints" / "step-00000003"): CheckpointError,
        lambda run: read_batches(run / "recorded" / "batches.safetensors"): DataError,
    }
    check_damages(finished, tmp_path, readers, 2_000 if LONG else 80)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_users", "3"), ("num_events", -1), ("num_items", None), ("num_users", True), ("notes", []), ("notes", {"a": "b"}),
        ("fingerprint", 3), ("time_kind", ["naive"]), ("num_items", 10**30),
    ],
)  # fmt: skip
def test_a_dataset_described_wrongly(run: Path, name: str, value: Any) -> None:
    directory = run / "dataset"
    old = json.loads((directory / "manifest.json").read_text())
    kept = {key: entry for key, entry in old.items() if key not in ("format_version", "files", "sha256")}
    artifacts.write_manifest(directory, old["files"], {**kept, name: value})
    with pytest.raises(DataError, match=str(directory)) as caught:
        SequenceDataset.load(directory)
    assert "\n" not in str(caught.value)


def test_a_dataset_of_before_is_read(run: Path) -> None:
    path = run / "dataset" / "manifest.json"
    content = json.loads(path.read_text())
    del content["format_version"], content["sha256"]
    from jagged.artifacts.manifest import _seal

    body = {"version": 1, **content}
    path.write_bytes(artifacts.dump_json({**body, "sha256": _seal(body)}))
    look(SequenceDataset.load(run / "dataset"))


TRAIN = """
import sys
sys.argv = ["jagged", "train", "--output", sys.argv[1], "--training.max-epochs", "1", "--model.embedding-dim", "8",
            "--model.num-layers", "1", "--device", "cpu", "--data", sys.argv[2], "--data.max-seq-len", "8"]
from jagged.cli import main
main()
"""


def test_of_two_runs_into_one_output_one_trains(tmp_path: Path) -> None:
    events = tmp_path / "events.txt"
    events.write_text("".join(f"u{u} {' '.join(f'i{(u * 7 + k) % 50}' for k in range(8))}\n" for u in range(100)))
    output = tmp_path / "run"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}

    def start() -> subprocess.Popen[str]:
        command = [sys.executable, "-W", "ignore", "-c", TRAIN, str(output), str(events)]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    both = [start(), start()]
    ended = [(*process.communicate(timeout=300), process.returncode) for process in both]
    assert sorted(code for *_, code in ended) == [0, 2], ended
    refusal = next(err for _, err, code in ended if code == 2).strip().splitlines()[-1]
    busy = f"jagged: --output: another process is training in {output}; wait for it or choose another output"
    full = f"jagged: --output: {output} is not empty; resume to go on with the run in it, choose another output, or delete it"
    assert refusal in (busy, full)
    before = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    again = start()
    assert again.communicate(timeout=300)[1].strip().splitlines()[-1] == full
    assert again.returncode == 2
    assert {path: path.read_bytes() for path in output.rglob("*") if path.is_file()} == before
