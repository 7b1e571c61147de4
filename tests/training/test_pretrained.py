"""The directory that stands alone: round trip, damage, and what someone may have planted."""

from __future__ import annotations

import json
import os
import pickle
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from jagged import artifacts
from jagged.data import Vocabulary
from jagged.metrics import TrainCounts
from jagged.models import SASRec
from jagged.models.pretrained import from_pretrained, load_task, save_pretrained
from jagged.training import CheckpointError
from tests.conftest import LONG
from tests.seeds import generators
from tests.training.support import tiny_config
from tests.training.test_checkpoint import Planted

ROOT = Path(__file__).parents[2]


@pytest.fixture
def model() -> SASRec:
    torch.manual_seed(0)
    return SASRec(5, embedding_dim=4, num_heads=1, num_layers=1, max_seq_len=6)


@pytest.fixture
def items() -> Vocabulary:
    return Vocabulary(["a", "b", "c", "d", "e"])


@pytest.fixture
def saved(model: SASRec, items: Vocabulary, tmp_path: Path) -> Path:
    save_pretrained(
        model,
        tmp_path / "saved",
        items=items,
        config=tiny_config(tmp_path),
        split={"name": "leave-one-out"},
        metrics={"test": {}},
        train_counts=TrainCounts(torch.ones(5, dtype=torch.int64), 3),
    )
    return tmp_path / "saved"


def test_round_trip(model: SASRec, saved: Path, tmp_path: Path) -> None:
    state = torch.get_rng_state()
    opened = from_pretrained(saved)
    assert torch.equal(torch.get_rng_state(), state)
    assert not opened.model.training
    assert opened.model.config == model.config
    assert opened.items.ids.to_pylist() == ["a", "b", "c", "d", "e"]
    assert opened.config == tiny_config(tmp_path)
    assert (opened.split, opened.metrics) == ({"name": "leave-one-out"}, {"test": {}})
    features = KeyedJaggedTensor(keys=["item_id"], values=torch.tensor([0, 4, 2]), lengths=torch.tensor([2, 1]))
    assert torch.equal(opened.model.final_hidden(features), model.eval().final_hidden(features))
    documents = ["model.json", "config.json", "split.json", "metrics.json", "manifest.json"]
    assert sorted(os.listdir(saved)) == sorted([*documents, "model.safetensors", "items.arrow", "train_counts.safetensors"])


def test_saving_again_replaces_and_leaves_other_files_alone(items: Vocabulary, saved: Path) -> None:
    (saved / "notes.txt").write_text("mine")
    other = SASRec(5, embedding_dim=8, num_heads=2, num_layers=2, max_seq_len=6)
    save_pretrained(other, saved, items=items)
    opened = from_pretrained(saved)
    assert opened.model.config == other.config
    assert (opened.config, opened.split, opened.metrics) == (None, {}, {})
    assert (saved / "notes.txt").read_text() == "mine"


def test_a_vocabulary_that_does_not_fit(model: SASRec, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="items: got 2 ids, expected 5"):
        save_pretrained(model, tmp_path, items=Vocabulary(["a", "b"]))


class _Unregistered(SASRec):
    pass


def test_a_model_of_no_name_is_refused(items: Vocabulary, tmp_path: Path) -> None:
    other = _Unregistered(5, embedding_dim=4, num_heads=1, num_layers=1, max_seq_len=6)
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the whole message is compared
        save_pretrained(other, tmp_path / "saved", items=items)
    assert str(error.value) == (
        "model: got a _Unregistered, expected one whose class has a name; give it one by jagged.models.register, or say name="
    )
    assert not (tmp_path / "saved").exists()


def test_no_directory_and_an_empty_one(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such directory"):
        from_pretrained(tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"manifest\.json: missing"):
        from_pretrained(tmp_path)


@pytest.mark.parametrize("read", [from_pretrained, load_task])
def test_a_run_that_has_not_ended(tmp_path: Path, read: Callable[[Path], Any]) -> None:
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(CheckpointError) as error:
        read(tmp_path)
    assert (
        str(error.value)
        == f"{tmp_path}: a run that has not ended; go on with it by `jagged train --resume`, or by resume=True of `fit`"
    )


def test_every_flipped_bit_is_found_and_the_file_named(saved: Path) -> None:
    files = sorted(saved.iterdir())
    for generator in generators(300 if LONG else 30):
        path = generator.choice(files)
        original = path.read_bytes()
        content = bytearray(original)
        content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
        path.write_bytes(content)
        with pytest.raises(CheckpointError) as caught:
            from_pretrained(saved)
        assert path.name in str(caught.value) or path.name == "manifest.json"
        path.write_bytes(original)
    from_pretrained(saved)


def test_a_crash_between_two_files_is_not_taken_for_whole(
    items: Vocabulary, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = SASRec(5, embedding_dim=8, num_heads=2, num_layers=2, max_seq_len=6)
    original = os.replace
    for allowed in range(1, 4):
        moved: list[Any] = []

        def replace(source: Any, target: Any, allowed: int = allowed, moved: list[Any] = moved) -> None:
            if Path(source).parent.name.endswith(".tmp"):
                moved.append(target)
                if len(moved) > allowed:
                    raise KeyboardInterrupt
            original(source, target)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", replace)
            with pytest.raises(KeyboardInterrupt):
                save_pretrained(other, saved, items=items)
        try:
            opened = from_pretrained(saved)
        except CheckpointError:
            continue
        # Only files that are the same in both have been moved so far.
        assert opened.model.config["embedding_dim"] == 4
    save_pretrained(other, saved, items=items)
    assert from_pretrained(saved).model.config == other.config


@pytest.mark.parametrize("limit", [0, 100, 1_000])
def test_a_full_disk_is_named_and_the_old_directory_whole(model: SASRec, items: Vocabulary, saved: Path, limit: int) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        with pytest.raises(CheckpointError, match=r"saved: could not be written: .*File too large"):
            save_pretrained(model, saved, items=items)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert from_pretrained(saved).split == {"name": "leave-one-out"}
    assert not [name for name in os.listdir(saved) if name.endswith(".tmp")]


def plant(saved: Path, name: str, content: bytes) -> None:
    """Put a file in place and list it properly, as someone does who knows the format."""
    (saved / name).write_bytes(content)
    listed = set(json.loads((saved / "manifest.json").read_text())["files"]) | {name}
    artifacts.write_manifest(saved, listed)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "items.arrow", "config.json", "model.json", "split.json", "model.pt", ".metadata"]
)
def test_a_planted_pickle_is_not_opened(saved: Path, tmp_path: Path, name: str) -> None:
    victim = tmp_path / "executed"
    plant(saved, name, pickle.dumps(Planted(victim)))
    if name in ("model.pt", ".metadata"):
        from_pretrained(saved)
    else:
        with pytest.raises(CheckpointError, match=name.split(".")[0]):
            from_pretrained(saved)
    assert not victim.exists()


@pytest.mark.parametrize(
    "described",
    [
        {"model": "sasrec", "arguments": {"num_items": 5}},
        {"model": "os.system", "arguments": {"command": "true"}},
        {"model": "sasrec", "arguments": {"num_items": 5, "device": "cuda"}},
        {"model": "sasrec", "arguments": {"num_items": 10**15, "embedding_dim": 4, "num_heads": 1}},
        {"model": "sasrec", "arguments": {"num_items": "5; true"}},
        {"model": ["sasrec"], "arguments": {}},
        {"model": "sasrec", "arguments": [5]},
        {},
    ],
)
def test_a_model_described_wrongly(saved: Path, described: dict[str, Any]) -> None:
    plant(saved, "model.json", json.dumps({"format_version": 1, **described}).encode())
    with pytest.raises(CheckpointError, match="model"):
        from_pretrained(saved)


@pytest.mark.parametrize(
    "content", [b'{"a":' * 50_000, b"a = 1", b'{"a": &x [*x, *x]}', b'{"embedding_dim": 1e400}', b'{"no_such_field": 1}']
)
def test_a_configuration_that_is_a_bomb_or_none(saved: Path, content: bytes) -> None:
    plant(saved, "config.json", content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        from_pretrained(saved)


def test_opens_without_the_training_engine(saved: Path) -> None:
    """Neither DistributedModelParallel nor a checkpoint reader is needed to use a model, nor a GPU."""
    code = (
        "import sys, warnings; warnings.simplefilter('ignore')\n"
        "from jagged.models.pretrained import from_pretrained\n"
        f"print(from_pretrained({str(saved)!r}).items.ids.to_pylist())\n"
        "assert not {'jagged.training.engine', 'jagged.runs.training', 'jagged.training.checkpoint'} & set(sys.modules)\n"
    )
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['a', 'b', 'c', 'd', 'e']"
