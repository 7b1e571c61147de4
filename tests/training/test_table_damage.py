"""What a run on a table left, damaged in every way and rewritten by other hands: refused in one line, or what it was."""

from __future__ import annotations

import json
import random
import resource
import shutil
import time
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from jagged import artifacts
from jagged.data import DataError
from jagged.runs.ranking.predicting import Ranker
from jagged.training import CheckpointError
from jagged.training.checkpoint import load_checkpoint
from tests.conftest import LONG
from tests.seeds import generators
from tests.test_artifacts import SECONDS, check_damages, reseal
from tests.training.table_runs import shop_file, train_table

Predictions = dict[str, list[npt.NDArray[np.float32]]]
REFUSED = (CheckpointError, DataError)
DOCUMENTS = ("encoders.json", "model.json", "split.json", "config.json", "metrics.json", "schema.toml", "dataset/manifest.json")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("finished")
    return train_table(root / "run", shop_file(root / "shop.csv"), training={"max_epochs": 1}).directory


@pytest.fixture(scope="module")
def expected(finished: Path) -> Predictions:
    return predicted(finished)


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    # Tables that are scored lie beside it.
    shutil.copy(finished.parent / "shop.csv", tmp_path)
    return Path(shutil.copytree(finished, tmp_path / "run"))


def predicted(run: Path) -> Predictions:
    """All that a directory is opened for: predictions of a part's rows, and of rows that are read, with the run's histories."""
    ranker = Ranker.from_pretrained(run, device="cpu")
    opened = ranker._opened()
    found: Predictions = {}
    for _, predictions in opened.scores(opened.part("test"), progress=False):
        for name, values in predictions.items():
            found.setdefault(name, []).append(values.numpy())
    scored = ranker.predict(run.parent / "shop.csv", progress=False)
    return {name: [*of, scored[f"predicted_{name}"].to_numpy()] for name, of in found.items()}


def refusal(run: Path) -> tuple[str, Predictions | None]:
    """Why a directory is refused, or what is predicted."""
    try:
        return "", predicted(run)
    except REFUSED as problem:
        return str(problem), None


def same(found: Predictions, expected: Predictions) -> bool:
    return found.keys() == expected.keys() and all(
        np.array_equal(*pair) for name, of in expected.items() for pair in zip(found[name], of, strict=True)
    )


@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("kind", ["flip", "truncate", "delete"])
def test_every_damage_is_found_and_the_file_named(run: Path, expected: Predictions, kind: str) -> None:
    files = sorted(path for path in run.rglob("*") if path.is_file() and path.name != artifacts.LOCK)
    for rng in generators((300 if LONG else 15) if kind == "flip" else 150 if LONG else 5):
        path = rng.choice(files)
        original = content = path.read_bytes()
        place = rng.randrange(len(content))
        if kind == "flip":
            content = content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :]
        path.write_bytes(content[:place] if kind == "truncate" else content)
        if kind == "delete":
            path.unlink()
        said, found = refusal(run)
        if found is None:
            # A damaged list may still parse and then accuse the file whose entry it garbled.
            assert str(run if path.name == artifacts.MANIFEST else path) in said
        else:
            assert "checkpoints" in path.parts, f"{kind} of {path} at {place} was not found"
            assert same(found, expected)
        path.write_bytes(original)
    assert same(predicted(run), expected)


@pytest.mark.timeout(1_800)
def test_no_damage_is_more_than_a_named_error(finished: Path, tmp_path: Path) -> None:
    shutil.copy(finished.parent / "shop.csv", tmp_path)
    newest = max((finished / "checkpoints").iterdir()).name
    readers = {predicted: REFUSED, lambda run: load_checkpoint(run / "checkpoints" / newest): CheckpointError}
    check_damages(finished, tmp_path, readers, 2_000 if LONG else 15)


BOMBS = (
    b"[" * 100_000, b'{"a":' * 100_000, b"a = " + b"[" * 100_000, b"a = " + b"9" * 5_000, b".".join([b"a"] * 50_000) + b" = 1",
    b"\xff\xfe", b"[]", b"null", b"{}", b"",
)  # fmt: skip


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_that_is_a_bomb_or_none(run: Path, name: str) -> None:
    path = run / name
    lists = path.parent / artifacts.MANIFEST
    before = lists.read_bytes()
    for content in BOMBS:
        lists.write_bytes(before)
        path.write_bytes(content)
        if path != lists:
            reseal(path.parent)
        begin = time.monotonic()
        said, _ = refusal(run)
        # Options that are not told have defaults.
        assert str(path) in said or (content == b"{}" and name in ("config.json", "metrics.json"))
        assert len(said.splitlines()) < 2
        assert time.monotonic() - begin < SECONDS


#: What stands where something else is expected.
HOSTILE: list[Any] = [
    None, True, False, 0, -1, 7, 10**12, 10**40, 2**63, 0.5, 1e308, -1e308, "", "x", "../../x", "/etc/passwd", "a\0b", "a\nb",
    "\ud800", "9" * 5_000, [], {}, [0], ["x"], [[]], [None], {"x": 1}, {"": ""}, {"kind": "id"}, ["click"] * 2, ["item", "user"],
]  # fmt: skip
NAMES = ("../x", "", "x" * 3_000, "item", "click", "a\nb")


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values in a document but itself."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [one for key, each in inside for one in [(*path, key), *places(each, (*path, key))]]


def rewritten(document: Any, rng: random.Random) -> str:
    """Change a document at a random place; says how."""
    path = rng.choice(places(document))
    of, key = document, path[-1]
    for step in path[:-1]:
        of = of[step]
    kind = rng.choice(["replace", "replace", "replace", "delete", "rename", "add", "swap"])
    if kind == "replace":
        of[key] = rng.choice([*HOSTILE, deep(200)])
    elif kind == "delete":
        del of[key]
    elif kind == "swap":
        other = rng.choice(list(of) if isinstance(of, dict) else range(len(of)))
        of[key], of[other] = of[other], of[key]
    elif isinstance(of, list):
        of.insert(key, rng.choice(HOSTILE))
    else:
        of[rng.choice(NAMES)] = of.pop(key) if kind == "rename" else rng.choice(HOSTILE)
    return f"{kind} at {path}"


def deep(levels: int) -> Any:
    value: Any = 1
    for level in range(levels):
        value = [value] if level % 2 else {"x": value}
    return value


def toml(value: Any) -> str:
    """A value on one line of TOML, which knows no null."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{json.dumps(key)} = {toml(each)}' for key, each in value.items())}}}"
    return f"[{', '.join(map(toml, value))}]" if isinstance(value, list) else json.dumps("none" if value is None else value)


def rewrite(path: Path, rng: random.Random) -> str:
    """Change a document at a random place, and list it properly, as someone does who knows the format; says how."""
    directory, content = path.parent, path.read_bytes()
    document = tomllib.loads(content.decode()) if path.suffix == ".toml" else json.loads(content)
    files = document.pop("files") if path.name == artifacts.MANIFEST else {}
    if files:
        document = {name: value for name, value in document.items() if name not in ("format_version", "sha256")}
    how = rewritten(document, rng)
    if files:
        artifacts.write_manifest(directory, files, document)
        return how
    if path.suffix == ".toml":
        content = "".join(f"{json.dumps(key)} = {toml(value)}\n" for key, value in document.items()).encode()
    path.write_bytes(content if path.suffix == ".toml" else json.dumps(document).encode())
    reseal(directory)
    return how


@pytest.mark.timeout(3_600)
def test_documents_of_other_hands_are_used_or_refused(run: Path) -> None:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number, rng in enumerate(generators(2_000 if LONG else 12)):
        path = run / rng.choice(DOCUMENTS)
        lists = path.parent / artifacts.MANIFEST
        before = path.read_bytes(), lists.read_bytes()
        trial = f"trial {number}: {path.name}, {rewrite(path, rng)}"
        begin = time.monotonic()
        try:
            said, _ = refusal(run)
        except BaseException as problem:
            raise AssertionError(trial) from problem
        # Of a configuration each wrong option has its line.
        assert len(said.splitlines()) < 2 or path.name == "config.json", trial
        assert all(str(run.parent) in line for line in said.splitlines()), f"{trial}: {said}"
        assert time.monotonic() - begin < SECONDS, trial
        path.write_bytes(before[0])
        lists.write_bytes(before[1])
    # In KiB.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 2**20


def test_files_that_do_not_fit_one_another_are_named(run: Path, tmp_path: Path) -> None:
    def refused(name: str, change: dict[str, Any]) -> str:
        before = (run / name).read_bytes()
        (run / name).write_text(json.dumps({**json.loads(before), **change}))
        reseal(run)
        said, _ = refusal(run)
        (run / name).write_bytes(before)
        reseal(run)
        return said.replace(str(run), "RUN")

    split = json.loads((run / "split.json").read_text())
    assert refused("split.json", {"history": {"ties": "out"}}) == (
        "RUN/split.json: found 'history.delay': Field required, expected what training writes; copy the directory again"
    )
    assert refused("split.json", {"event_labels": ["click", "price"]}) == (
        "RUN/split.json: found event_labels ['click', 'price'], expected some of ['click', 'buy'], as schema.toml has them; "
        "copy the directory again"
    )
    assert refused("split.json", {"fingerprint": split["fingerprint"][::-1]}) == (
        "RUN/dataset: found another table, expected the one that split.json and schema.toml tell of; copy the directory again"
    )
    model = json.loads((run / "model.json").read_text())["arguments"]
    inputs = {**model["inputs"], "history": {"history.item": "type", "history.type": "item"}}
    assert refused("model.json", {"arguments": {**model, "inputs": inputs}}) == (
        "RUN/model.json: found a model that reads history {'history.item': 'type', 'history.type': 'item'}, expected "
        "{'history.item': 'item', 'history.type': 'type'}, as rows and events have them; give tables with the columns of "
        "training, or copy the directory again"
    )
    # Encoders of another run, whole in themselves.
    options = {"training": {"max_epochs": 1}, "data": {"min_count": 15}}
    other = train_table(tmp_path / "other", tmp_path / "shop.csv", **options).directory
    for path in other.glob("encoders*"):
        shutil.copy(path, run)
    reseal(run)
    found = json.loads((run / "encoders.json").read_text())["tables"]
    table = next(name for name, size in model["sizes"].items() if found[name]["size"] != size)
    assert refusal(run)[0] == (
        f"{run}/encoders.json: found {found[table]['size']} numbers in the table '{table}', expected {model['sizes'][table]}, as "
        "model.json has them; copy the directory again"
    )
