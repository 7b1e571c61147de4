"""Tests that need not run again: those of files of which nothing changed since all of their tests passed.

`tests/proven.json` maps files of tests to a fingerprint of what they had when they passed: the files of this repository that they
use, and the versions of what they run on. `pytest --proven=skip` leaves out the files whose fingerprint is still the same,
`--proven=run` runs them too; both write down what passed and strike what failed. Without the option every test runs, and nothing
is written.

Left out can be the tests of operators, modules, the data path and benchmarks, which stand on few files each, and those of models
and training, which stand on all of the product but the operators that it has no use for. The tests that see the product as its
users do, from the command line, runs and pages, run whenever tests run.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests import reach

RECORD = "tests/proven.json"
# By place: the marks that its run asks for, and the files that may be left out.
PLACES = {
    "interpret": ("interpret", ("tests/ops/test_*.py",)),
    "cpu": (
        "",
        (
            *(f"tests/{part}/test_*.py" for part in ("ops", "modules", "data", "pointwise", "models", "training")),
            "tests/test_benchmarks*.py",
            "tests/test_gpu_workers.py",
        ),
    ),
}
# Tests in these folders start programs, by whatever name: they stand on all of the product.
JOINED = ("tests/models", "tests/training")
RUN_ON = ("torch", "triton", "torchrec", "tensordict", "numpy", "pyarrow", "duckdb", "pydantic", "hypothesis")


def fingerprints(root: Path, place: str) -> dict[str, str]:
    """Return by file of tests a hash of all that its tests depend on."""
    settings = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["pytest"]
    common = [json.dumps(settings), str(sys.version_info[:2]), *(f"{name} {metadata.version(name)}" for name in RUN_ON)]
    hashed: dict[Path, str] = {}
    found = {}
    for test in files_of(root, place):
        reached = sorted(reached_by(root, test))
        hashed |= {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in reached if path not in hashed}
        parts = [*common, *(f"{path.relative_to(root)} {hashed[path]}" for path in reached)]
        found[str(test.relative_to(root))] = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    return found


def reached_by(root: Path, test: Path) -> set[Path]:
    """Return the files that the tests of a file can use, or start in another process."""
    if str(test.parent.relative_to(root)) not in JOINED:
        return reach.used(root, test)
    # No link is followed: operators and modules, which are linked, are reached where they are used.
    product = [path for path in (root / "jagged").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return reach.used(root, test, [path for path in product if path.suffix == ".py"]).union(product)


def files_of(root: Path, place: str) -> list[Path]:
    """Return the files of tests that may be left out there."""
    return sorted(path for pattern in PLACES[place][1] for path in root.glob(pattern))


def add_option(parser: pytest.Parser) -> None:
    parser.addoption(
        "--proven", choices=("skip", "run"), help="skip or run what is unchanged since it passed; write down what passes"
    )


def register(config: pytest.Config, place: str) -> None:
    """Keep account where the run is asked to; processes of pytest-xdist are told what to leave out, and keep none."""
    if config.getoption("proven") and place in PLACES:
        told = getattr(config, "workerinput", None)
        config.pluginmanager.register(Account(config, place) if told is None else LeftOut(config.rootpath, told["left_out"]))


class LeftOut:
    def __init__(self, root: Path, files: list[str]) -> None:
        self.root, self.files = root, files

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        return True if collection_path in [self.root / file for file in self.files] else None


class Account(LeftOut):
    """What of a run passed in full, written into the record at its end."""

    def __init__(self, config: pytest.Config, place: str) -> None:
        self.place, self.before = place, fingerprints(config.rootpath, place)
        known = self.known(config.rootpath).get(place, {}) if config.option.proven == "skip" else {}
        super().__init__(config.rootpath, [file for file, of in self.before.items() if known.get(file) == of])
        # A run that chooses among the tests of a file proves nothing of the file.
        option, marks = config.option, PLACES[place][0]
        chooses = option.keyword or option.deselect or getattr(option, "lf", False) or option.markexpr != marks
        self.is_full = not chooses and not any("::" in given for given in config.args)
        self.waiting: dict[str, set[str]] = {}
        self.passed: set[str] = set()
        self.failed: set[str] = set()

    def known(self, root: Path) -> dict[str, dict[str, str]]:
        path = root / RECORD
        return json.loads(path.read_text()) if path.exists() else {}

    def pytest_report_header(self) -> str | None:
        about = f"unchanged since they passed ({RECORD}); make test-all runs them"
        return f"left out: the tests of {len(self.files)} files, {about}" if self.files else None

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["left_out"] = self.files

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.pytest_xdist_node_collection_finished([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        for test in ids:
            self.waiting.setdefault(test.split("::")[0], set()).add(test)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.split("::")[0]
        if report.failed:
            self.failed.add(file)
        elif report.when == "call" and report.passed:
            self.passed.add(file)
        elif report.when == "teardown":
            self.waiting[file].discard(report.nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self.files:
            session.exitstatus = pytest.ExitCode.OK
        known = self.known(self.root)
        after = fingerprints(self.root, self.place)
        # What changed while it ran is not proven.
        in_full = {file for file in self.passed if not self.waiting[file] and after.get(file) == self.before.get(file)}
        kept = {file: of for file, of in known.get(self.place, {}).items() if file in after}
        proven = {file: after[file] for file in in_full & after.keys()} if self.is_full else {}
        now = {file: of for file, of in sorted((kept | proven).items()) if file not in self.failed}
        if now != known.get(self.place, {}):
            (self.root / RECORD).write_text(json.dumps(known | {self.place: now}, indent=2, sort_keys=True) + "\n")
