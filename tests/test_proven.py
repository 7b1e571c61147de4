"""Which tests are left out as proven: those alone of which nothing changed, and only where that is asked for."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from tests import proven, reach

ROOT = Path(__file__).parents[1]

TREE = {
    "pyproject.toml": """
        [tool.pytest.ini_options]
        addopts = "--import-mode=importlib"
        pythonpath = ["."]
        markers = ["interpret"]
    """,
    "jagged/__init__.py": """
        from typing import TYPE_CHECKING
        if TYPE_CHECKING:
            from jagged import runs
    """,
    "jagged/runs.py": "",
    "jagged/ops/__init__.py": """
        from jagged.ops import shared
        from jagged.ops.a import a
        from jagged.ops.b import b
    """,
    "jagged/ops/shared.py": "",
    "jagged/ops/a/__init__.py": "from jagged.ops.a.spec import a",
    "jagged/ops/a/spec.py": """
        import importlib
        a = lambda: importlib.import_module("jagged.ops.a.kernels")
    """,
    "jagged/ops/a/kernels.py": "from .tiles import TILES",
    "jagged/ops/a/tiles.py": "TILES = 4",
    "jagged/ops/b/__init__.py": "from jagged.ops.b.spec import b",
    "jagged/ops/b/spec.py": """
        def b():
            import jagged.ops.b.kernels
    """,
    "jagged/ops/b/kernels.py": "",
    "tests/conftest.py": """
        import os, pytest
        from tests import helper, proven

        PLACE = os.environ.get("TREE_PLACE", "interpret")

        def pytest_addoption(parser):
            proven.add_option(parser)

        def pytest_configure(config):
            proven.register(config, PLACE)

        def pytest_collection_modifyitems(items):
            for item in items:
                if PLACE == "interpret" and "marked" in item.name:
                    item.add_marker("interpret")
    """,
    "tests/helper.py": "",
    "tests/answers.txt": "1",
    "tests/ops/test_a.py": """
        from jagged import ops
        def test_marked():
            ops.a()
        def test_marked_too():
            assert not __import__("os").environ.get("FAILS")
        def test_other():
            raise AssertionError
    """,
    "tests/ops/test_b.py": """
        from jagged.ops import b
        def test_marked():
            b(), open("tests/answers.txt").close()
    """,
    "tests/ops/test_all.py": """
        import pkgutil, jagged.ops
        def test_marked():
            list(pkgutil.walk_packages(jagged.ops.__path__, "jagged.ops."))
    """,
    "tests/ops/test_a_aot.py": """
        def test_compiles():
            from jagged.ops.a import kernels
    """,
    "tests/runs/test_runs.py": """
        def test_it():
            from jagged import runs
    """,
}
INTERPRETED = ["tests/ops/test_a.py", "tests/ops/test_all.py", "tests/ops/test_b.py"]
EVERY = sorted([*INTERPRETED, "tests/ops/test_a_aot.py"])


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        lines = text.strip("\n").splitlines()
        indent = len(lines[0]) - len(lines[0].lstrip()) if lines else 0
        (tmp_path / name).write_text("".join(f"{line[indent:]}\n" for line in lines))
    for module in (proven, reach):
        shutil.copy(str(module.__file__), tmp_path / "tests")
    return tmp_path


def fingerprints(tree: Path, place: str = "interpret") -> dict[str, str]:
    for remembered in (reach.read, reach.follow, reach.file_of, reach.data_of):
        remembered.cache_clear()
    return proven.fingerprints(tree, place)


@pytest.mark.parametrize(
    ("changed", "reaching"),
    [
        ("jagged/ops/a/kernels.py", ["test_a", "test_a_aot", "test_all"]),
        ("jagged/ops/a/tiles.py", ["test_a", "test_a_aot", "test_all"]),
        ("jagged/ops/b/kernels.py", ["test_all", "test_b"]),
        # Every import of the package loads it, but only these use it.
        ("jagged/ops/b/spec.py", ["test_all", "test_b"]),
        ("jagged/ops/shared.py", ["test_all"]),
        ("jagged/ops/__init__.py", ["test_all"]),
        ("tests/reach.py", []),
        ("tests/helper.py", ["test_a", "test_a_aot", "test_all", "test_b"]),
        ("tests/answers.txt", ["test_b"]),
        ("tests/ops/test_b.py", ["test_b"]),
        ("jagged/runs.py", []),
        ("tests/proven.json", []),
    ],
)
def test_one_byte_changes_the_files_that_reach_it(tree: Path, changed: str, reaching: list[str]) -> None:
    before = fingerprints(tree)
    assert list(before) == EVERY
    with open(tree / changed, "a") as file:
        file.write("\n")
    after = fingerprints(tree)
    assert [Path(name).stem for name in before if after[name] != before[name]] == reaching


@pytest.mark.parametrize(
    ("changed", "reaching"),
    [
        ("jagged/runs.py", ["test_joined"]),
        ("jagged/sample.csv", ["test_joined"]),
        ("jagged/ops/b/spec.py", ["test_joined", "test_on_its_own"]),
        ("jagged/ops/shared.py", []),
        ("jagged/ops/b/kernels.py", ["test_joined", "test_on_its_own"]),
        # Nothing of the product uses it.
        ("jagged/ops/a/kernels.py", []),
        ("tests/cli/test_commands.py", []),
    ],
)
def test_tests_of_training_stand_on_all_of_the_product(tree: Path, changed: str, reaching: list[str]) -> None:
    added = {
        "jagged/runs.py": "from jagged.ops import b\nb()\n",
        "jagged/sample.csv": "1",
        "tests/cli/test_commands.py": "def test_it(): pass",
        "tests/pointwise/test_on_its_own.py": "from jagged.ops import b\nb()\n",
        "tests/training/test_joined.py": "def test_it(): __import__('subprocess').run(['python', '-m', 'jagged'])",
    }
    (tree / "jagged/ops").rename(tree / "ops")
    (tree / "jagged/ops").symlink_to("../ops")
    for name, text in added.items():
        (tree / name).parent.mkdir(exist_ok=True)
        (tree / name).write_text(text)
    before = fingerprints(tree, "cpu")
    with open(tree / changed, "a") as file:
        file.write("\n")
    after = fingerprints(tree, "cpu")
    assert sorted(Path(name).stem for name in added.keys() & before if after[name] != before[name]) == reaching
    assert not [name for name in before if name.startswith(("tests/cli", "tests/runs"))]


@pytest.mark.parametrize("package", proven.RUN_ON)
def test_another_version_changes_all(tree: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    before, version = fingerprints(tree), metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "9.9" if name == package else version(name))
    assert not before.items() & fingerprints(tree).items()


def test_other_settings_of_pytest_change_all_and_another_line_none(tree: Path) -> None:
    before, text = fingerprints(tree), (tree / "pyproject.toml").read_text()
    (tree / "pyproject.toml").write_text(f"[project]\nname = 'tree'\n{text}")
    assert fingerprints(tree) == before
    (tree / "pyproject.toml").write_text(f"{text}timeout = 3\n")
    assert not before.items() & fingerprints(tree).items()


Run = Callable[..., str]


@pytest.fixture
def run(tree: Path) -> Run:
    def run(*options: str, place: str = "interpret", fails: bool = False) -> str:
        environment = {**os.environ, "TREE_PLACE": place, "FAILS": "1" if fails else "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "xdist", "-rA", *options]
        marks = ["-m", "interpret"] if place == "interpret" else []
        done = subprocess.run([*command, *marks], cwd=tree, env=environment, capture_output=True, text=True)
        assert done.returncode == (1 if fails else 0), done.stdout + done.stderr
        return done.stdout

    return run


def record(tree: Path, place: str = "interpret") -> list[str]:
    path = tree / "tests" / "proven.json"
    return list(json.loads(path.read_text()).get(place, {})) if path.exists() else []


def ran(output: str) -> list[str]:
    return sorted({line.split()[1].split("::")[0] for line in output.splitlines() if line.startswith(("PASSED ", "FAILED "))})


@pytest.mark.parametrize("processes", [[], ["-n", "2"]])
def test_what_passed_is_left_out_until_it_changes_or_fails(tree: Path, run: Run, processes: list[str]) -> None:
    assert ran(run("tests/ops", "--proven=skip", *processes, fails=True)) == INTERPRETED
    assert record(tree) == INTERPRETED[1:]
    assert ran(run("tests/ops", "--proven=skip", *processes)) == INTERPRETED[:1]
    assert record(tree) == INTERPRETED
    output = run("tests/ops", "--proven=skip", *processes)
    assert ran(output) == []
    assert "left out: the tests of 3 files, unchanged since they passed" in output
    with open(tree / "jagged/ops/b/kernels.py", "a") as file:
        file.write("\n")
    output = run("tests/ops", "--proven=skip", *processes)
    assert ran(output) == INTERPRETED[1:]
    assert "left out: the tests of 1 files" in output
    # It fails though nothing changed.
    run("tests/ops", "--proven=run", *processes, fails=True)
    assert record(tree) == INTERPRETED[1:]


def test_only_where_asked_for(tree: Path, run: Run) -> None:
    run("tests/ops")
    assert not record(tree)
    run("tests/ops", "--proven=run")
    assert record(tree) == INTERPRETED
    for options in (["tests/ops"], ["tests/ops", "--proven=run"]):
        output = run(*options)
        assert ran(output) == INTERPRETED
        assert "left out" not in output


@pytest.mark.parametrize(
    "chosen",
    [
        ["tests/ops", "-k", "marked"],
        ["tests/ops/test_b.py::test_marked"],
        ["tests/ops", "--deselect", "tests/ops/test_a.py::test_marked"],
        ["tests/ops", "-m", "interpret or not interpret", "--collect-only"],
    ],
)
def test_a_choice_of_tests_proves_nothing(tree: Path, run: Run, chosen: list[str]) -> None:
    run(*chosen, "--proven=run")
    assert not record(tree)


def test_a_run_that_stops_proves_what_it_ran_in_full(tree: Path, run: Run) -> None:
    run("tests/ops/test_b.py", "tests/ops/test_a.py", "tests/ops/test_all.py", "-x", "--proven=run", fails=True)
    assert record(tree) == ["tests/ops/test_b.py"]


def test_places_have_proofs_of_their_own(tree: Path, run: Run) -> None:
    run("tests/ops", "--proven=run")
    (tree / "tests/ops/test_a.py").unlink()
    # What joins the parts is never left out.
    joined = ["tests/runs/test_runs.py"]
    assert ran(run("tests", "--proven=skip", place="cpu")) == EVERY[1:] + joined
    assert (record(tree), record(tree, "cpu")) == (INTERPRETED, EVERY[1:])
    assert ran(run("tests", "--proven=skip", place="cpu")) == joined
    assert ran(run("tests", "--proven=skip", place="gpu")) == EVERY[1:] + joined
    # What is named is run.
    assert ran(run(EVERY[1], "--proven=skip", place="cpu")) == EVERY[1:2]


def test_what_changes_while_it_runs_is_not_proven(tree: Path, run: Run) -> None:
    with open(tree / "tests/ops/test_b.py", "a") as file:
        file.write("    open('jagged/ops/b/kernels.py', 'a').write('#')\n")
    run("tests/ops", "--proven=run", "-p", "no:unraisableexception")
    assert record(tree) == ["tests/ops/test_a.py"]


def loaded_by(tests: list[str], modules: list[str]) -> dict[str, list[str]]:
    """Import each file in a process of its own, forked from one that has loaded these modules; return the files loaded there."""
    program = """
import importlib, json, os, sys
from pathlib import Path
import duckdb, hypothesis, numpy, pyarrow.parquet, pytest, torch._dynamo, torch._inductor, torchrec, triton
root, (tests, modules) = Path.cwd(), json.loads(sys.argv[1])
for module in modules:
    importlib.import_module(module)
for test in tests:
    if os.fork() == 0:
        importlib.import_module(test.removesuffix(".py").replace("/", "."))
        files = [file for module in list(sys.modules.values()) if (file := getattr(module, "__file__", None))]
        ours = [file for file in files if file.startswith(f"{root}/") and "site-packages" not in file]
        print(json.dumps([test, [str(Path(file).resolve()) for file in ours]]), flush=True)
        os._exit(0)
    os.wait()
"""
    command = [sys.executable, "-c", program, json.dumps([tests, modules])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = dict(json.loads(line) for line in done.stdout.splitlines())
    assert list(loaded) == tests, done.stderr
    return loaded


def test_the_files_that_a_test_reaches_hold_all_that_it_loads() -> None:
    paths = {path for place in proven.PLACES for path in proven.files_of(ROOT, place)}
    joined = sorted(str(path.relative_to(ROOT)) for path in paths if str(path.parent.relative_to(ROOT)) in proven.JOINED)
    others = sorted({str(path.relative_to(ROOT)) for path in paths}.difference(joined))
    product_files = [path for path in (ROOT / "jagged").rglob("*.py") if path.name != "__main__.py"]
    product = sorted(reach.module_of(ROOT, path) for path in product_files)
    # What joins parts stands on all of the product, which may be there before.
    loaded = loaded_by(others, ["jagged.ops", "tests.conftest"]) | loaded_by(joined, [*product, "tests.conftest"])
    for test, files in loaded.items():
        of_product = product_files if test in joined else []
        followed = {str(path.resolve()) for path in reach.loaded(ROOT, ROOT / test, of_product)}
        assert str(ROOT.resolve() / test) in files
        assert not set(files) - followed, test


RUNNING = """
import inspect, json, os, sys
import pytest

ran = set()


class Watched:
    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        def see(frame, event, _):
            if event == "call" and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
                ran.add(frame.f_code.co_filename)

        sys.setprofile(see)
        try:
            return (yield)
        finally:
            sys.setprofile(None)


code = pytest.main(["-q", "-p", "no:cacheprovider", "--tb=short", *sys.argv[1:]], [Watched()])
root = os.getcwd() + "/"
ours = {os.path.realpath(path) for path in ran if path.startswith(root) and "site-packages" not in path}
print("\\n" + json.dumps([int(code), sorted(ours)]))
"""


@pytest.mark.parametrize(
    ("test", "of"),
    [
        ("tests/ops/test_softmax.py", "test_strided_offsets or test_messages or test_opcheck"),
        ("tests/ops/test_sampled_pairs.py", "test_two_heads or test_low_precision or test_under_checkpointing"),
        ("tests/modules/test_heads.py", "test_messages or test_excluded or test_shown"),
    ],
)
def test_what_runs_in_a_test_is_used(test: str, of: str) -> None:
    """In functions: what stands in the others, of files that are only loaded, is left out of fingerprints."""
    command = [sys.executable, "-c", RUNNING, test, "-k", of]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    code, ran = json.loads(done.stdout.splitlines()[-1])
    assert code == 0, done.stdout
    used = {os.path.realpath(path) for path in proven.reached_by(ROOT, ROOT / test)}
    left_out = {os.path.realpath(ROOT / "tests" / name) for name in ("proven.py", "reach.py")}
    assert len(ran) > 5
    assert not set(ran) - used - left_out


def test_kernels_of_one_family_leave_the_tests_of_another_alone() -> None:
    def names(test: str) -> set[str]:
        return {str(path.relative_to(ROOT)) for path in reach.used(ROOT, ROOT / "tests" / "ops" / test)}

    softmax, attention = "jagged/ops/softmax/kernels.py", "jagged/ops/attention/triton/forward.py"
    assert softmax in names("test_softmax.py") & names("test_softmax_aot.py") & names("test_depth.py")
    assert attention in names("test_attention.py") & names("test_hstu_attention.py") & names("test_interpreter.py")
    assert softmax not in names("test_attention.py") | names("test_attention_aot.py")
    assert attention not in names("test_softmax.py") | names("test_softmax_aot.py")
