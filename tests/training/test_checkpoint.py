"""Checkpoints on disk: round trips, every kind of damage, killed writers, full disks, planted pickles."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from jagged import artifacts
from jagged.artifacts.manifest import _serialise
from jagged.training import CheckpointError, TrainingError
from jagged.training import checkpoint as checkpoints
from jagged.training.state import TrainState
from tests.conftest import LONG
from tests.seeds import generators

DAMAGES = 300 if LONG else 30


def tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "model.weight": torch.randn(7, 5),
        "model.half": torch.randn(3).bfloat16(),
        "model.double": torch.randn(2, 2, dtype=torch.float64),
        "model.count": torch.tensor(12345678901),
        "model.empty": torch.zeros(0, 4),
        "model.strided": torch.randn(6, 4).t(),
        "optimizer.step": torch.tensor(3.0),
        "random.cpu.0": torch.get_rng_state(),
        "model.flags": torch.tensor([True, False]),
    }


STATE = {"format_version": 1, "step": 3, "loss": 0.1 + 0.2, "history": [{"epoch": 1}]}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return checkpoints.save_checkpoint(tmp_path / "checkpoints", "step-00000003", tensors(), STATE)


def test_round_trip(saved: Path) -> None:
    loaded, state = checkpoints.load_checkpoint(saved)
    assert state == STATE
    expected = tensors()
    assert loaded.keys() == expected.keys()
    for name, value in expected.items():
        assert loaded[name].dtype == value.dtype
        assert torch.equal(loaded[name], value), name
    assert [path.name for path in saved.parent.iterdir()] == ["step-00000003"]
    assert sorted(path.name for path in saved.iterdir()) == ["manifest.json", "state.json", "tensors-00001.safetensors"]


def test_large_checkpoints_are_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "FILE_BYTES", 100)
    path = checkpoints.save_checkpoint(tmp_path, "step-00000001", tensors(), STATE)
    assert len(list(path.glob("*.safetensors"))) > 3
    loaded, _ = checkpoints.load_checkpoint(path)
    assert loaded.keys() == tensors().keys()
    assert all(torch.equal(loaded[name], value) for name, value in tensors().items())


def test_names_never_collide(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    for expected in ("step-00000007", "step-00000007.1", "step-00000007.2"):
        assert checkpoints.next_name(root, 7) == expected
        checkpoints.save_checkpoint(root, expected, {"a": torch.zeros(1)}, STATE)
    for step in (123456789, 10, 8):
        checkpoints.save_checkpoint(root, checkpoints.next_name(root, step), {"a": torch.zeros(1)}, STATE)
    (root / "step-x").mkdir()
    (root / "step-00000099").touch()
    assert [path.name for path in checkpoints.list_checkpoints(root)] == [
        "step-00000007",
        "step-00000007.1",
        "step-00000007.2",
        "step-00000008",
        "step-00000010",
        "step-123456789",
    ]


def test_what_is_kept(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    for step in range(1, 6):
        checkpoints.save_checkpoint(root, f"step-{step:08d}", {"a": torch.zeros(1)}, {})
    checkpoints.prune(root, 2)
    assert sorted(os.listdir(root)) == ["step-00000004", "step-00000005"]


def test_leavings_of_a_killed_process_are_no_checkpoints(saved: Path) -> None:
    root = saved.parent
    shutil.copytree(saved, root / ".step-00000009.77-0123abcd.tmp")
    shutil.copytree(saved, root / ".step-00000001.77.tmp")
    assert checkpoints.latest_checkpoint(root) == saved
    artifacts.sweep(root)
    assert os.listdir(root) == [saved.name]


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    assert checkpoints.latest_checkpoint(tmp_path / "none") is None
    with pytest.raises(CheckpointError, match=r"manifest\.json: missing"):
        checkpoints.load_checkpoint(tmp_path / "none")


@pytest.mark.parametrize("kind", ["flip", "truncate", "extend", "zero"])
def test_every_damage_is_found_and_the_file_named(saved: Path, kind: str) -> None:
    files = sorted(saved.iterdir())
    originals = {path: path.read_bytes() for path in files}
    for generator in generators(DAMAGES if kind == "flip" else DAMAGES // 3):
        path = generator.choice(files)
        content = bytearray(originals[path])
        place = generator.randrange(len(content))
        if kind == "flip":
            content[place] ^= 1 << generator.randrange(8)
        elif kind == "truncate":
            del content[place:]
        elif kind == "extend":
            content += generator.randbytes(generator.randrange(1, 9))
        else:
            content[place : place + 512] = bytes(len(content[place : place + 512]))
        if bytes(content) == originals[path]:
            continue
        path.write_bytes(content)
        with pytest.raises(CheckpointError) as caught:
            checkpoints.load_checkpoint(saved)
        # A damaged manifest may still parse and then accuse itself or the file whose entry it garbled.
        named = [file.name for file in files if file.name in str(caught.value)]
        assert path.name in named or (path.name == artifacts.MANIFEST and str(saved) in str(caught.value)), str(caught.value)
        path.write_bytes(originals[path])
    checkpoints.load_checkpoint(saved)


def test_missing_and_extra_files(saved: Path) -> None:
    state = saved / "state.json"
    content = state.read_bytes()
    state.unlink()
    with pytest.raises(CheckpointError, match=r"state\.json: missing or unreadable"):
        checkpoints.load_checkpoint(saved)
    state.mkdir()
    with pytest.raises(CheckpointError, match=r"state\.json: found no regular file"):
        checkpoints.load_checkpoint(saved)
    state.rmdir()
    os.mkfifo(state)
    with pytest.raises(CheckpointError, match=r"state\.json: found no regular file"):
        checkpoints.load_checkpoint(saved)
    state.unlink()
    state.write_bytes(content)
    (saved / "more.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"more\.safetensors: not listed"):
        checkpoints.load_checkpoint(saved)


def relist(directory: Path) -> None:
    """What someone does who plants a file and knows the format: list it properly."""
    artifacts.write_manifest(directory, [path.name for path in directory.iterdir() if path.name != artifacts.MANIFEST])


class Planted:
    """Unpickling this creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.path, "w")


@pytest.mark.parametrize("name", [".metadata", "planted.pt", "model.pkl", "planted.safetensors", "__0_0.distcp", "state.json"])
def test_a_planted_pickle_is_not_opened(saved: Path, tmp_path: Path, name: str) -> None:
    victim = tmp_path / "executed"
    (saved / name).write_bytes(pickle.dumps(Planted(victim)))
    with pytest.raises(CheckpointError, match=name):
        checkpoints.load_checkpoint(saved)
    relist(saved)
    with pytest.raises(CheckpointError):
        checkpoints.load_checkpoint(saved)
    assert not victim.exists()


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "..", ".", "", "a/b", "a\\b", "a\0b", "manifest.json"])
def test_names_that_lead_elsewhere_are_refused(saved: Path, name: str) -> None:
    (saved.parent / "outside").write_bytes(b"x")
    files = json.loads((saved / artifacts.MANIFEST).read_text())["files"]
    files[name] = {"size": 1, "sha256": "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"}
    (saved / artifacts.MANIFEST).write_bytes(_serialise(artifacts.Manifest(files, {})))
    with pytest.raises(CheckpointError, match="is no plain file name"):
        checkpoints.load_checkpoint(saved)


NO_MANIFESTS = [
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b"\xff\xfe",
    b"[]",
    b"null",
    b"{}",
    b'{"format_version": 2}',
    b'{"format_version": 1, "files": []}',
    b'{"format_version": 1, "files": {"state.json": 3}}',
    b'{"format_version": 1, "files": {"state.json": {"size": "1"}}}',
]


@pytest.mark.parametrize("content", NO_MANIFESTS, ids=range(len(NO_MANIFESTS)))
def test_a_manifest_or_state_that_is_none(saved: Path, content: bytes) -> None:
    (saved / "manifest.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        checkpoints.load_checkpoint(saved)


def test_json_of_absurd_size_is_not_read(saved: Path) -> None:
    with open(saved / "manifest.json", "wb") as file:
        file.truncate(2**40)
    with pytest.raises(CheckpointError, match="expected at most"):
        checkpoints.load_checkpoint(saved)


def test_every_failing_write_is_named_and_leaves_nothing(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, before = os.fsync, sorted(saved.parent.iterdir())
    flushes: list[int] = []

    def full_after(succeed: int) -> Any:
        def fsync(descriptor: int) -> None:
            flushes.append(descriptor)
            if len(flushes) > succeed:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            original(descriptor)

        return fsync

    def save() -> None:
        checkpoints.save_checkpoint(saved.parent, "step-00000004", tensors(), STATE)

    monkeypatch.setattr(os, "fsync", full_after(1_000))
    save()
    needed = len(flushes)
    assert needed >= 5
    shutil.rmtree(saved.parent / "step-00000004")
    for succeed in range(needed):
        flushes.clear()
        monkeypatch.setattr(os, "fsync", full_after(succeed))
        with pytest.raises(CheckpointError, match="step-00000004: could not be written: No space left on device"):
            save()
        if succeed == needed - 1:
            # The last flush is of the parent directory: by then the checkpoint is whole.
            checkpoints.load_checkpoint(saved.parent / "step-00000004")
            shutil.rmtree(saved.parent / "step-00000004")
        assert sorted(saved.parent.iterdir()) == before
    checkpoints.load_checkpoint(saved)


def test_nothing_may_be_written_there(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="could not be written: Not a directory"):
        checkpoints.save_checkpoint(tmp_path / "file" / "checkpoints", "step-00000001", {"a": torch.zeros(1)}, STATE)


def test_a_run_that_is_not_finite_has_no_state() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        artifacts.dump_json({"loss": float("nan")})


@pytest.mark.parametrize(("was", "now"), [({}, False), (False, True), (True, False)])
def test_a_run_goes_on_with_histories_that_are_encoded_again(was: Any, now: bool) -> None:
    """Also one of before there was the option; what changes the model is refused."""
    model = {"name": "ranking", "num_layers": 1}
    before = {"model": model | ({} if was == {} else {"recompute": was})}
    TrainState(before, "data", 1).check_resumable(TrainState({"model": model | {"recompute": now}}, "data", 1), Path("place"))
    other = TrainState({"model": {**model, "num_layers": 2, "recompute": now}}, "data", 1)
    with pytest.raises(TrainingError) as refused:
        TrainState(before, "data", 1).check_resumable(other, Path("place"))
    assert str(refused.value) == (
        "place: cannot go on with other options: model.num_layers=2 (was 1); give those it had, or choose another output"
    )
