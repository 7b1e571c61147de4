"""Mutants: which faults are put where, and what is made of tests that find them, do not, or do not end."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.mutants import KINDS, ROOT, Mutant, draw, imported, mutants, nearest_tests, outcome, run, sources, summary

SOURCE = '''\
"""What 1 + 1 is."""

@cached(size=3)
def f(x: Literal[4], y=0.5):
    "Not 2 < 3."
    if x < 1 and y is not None:
        raise ValueError(f"ü {x + 1}")
    log("ü" * 2)
    x += 1
    return True if x else -x
'''


def test_every_fault_is_one_change_of_code_that_is_run() -> None:
    found = [(mutant.line, mutant.kind, mutant.before, mutant.after) for mutant in mutants("f.py", SOURCE)]
    assert sorted(found) == [
        (4, "constant", "0.5", "1.0"),
        (6, "branches", "x < 1 and y is not None", "(not (x < 1 and y is not None))"),
        (6, "comparison", "x < 1", "(x <= 1)"),
        (6, "comparison", "y is not None", "(y is None)"),
        (6, "constant", "1", "2"),
        (6, "operator", "x < 1 and y is not None", "(x < 1 or y is not None)"),
        (7, "statement", 'raise ValueError(f"ü {x + 1}")', "pass"),
        (8, "constant", "2", "3"),
        (8, "operator", '"ü" * 2', "('ü' + 2)"),
        (8, "statement", 'log("ü" * 2)', "pass"),
        (9, "constant", "1", "2"),
        (9, "statement", "x += 1", "pass"),
        (10, "branches", "True if x else -x", "(-x if x else True)"),
        (10, "constant", "True", "False"),
    ]
    product = next(mutant for mutant in mutants("f.py", SOURCE) if mutant.before == '"ü" * 2')
    assert product.text(SOURCE) == SOURCE.replace('"ü" * 2', "('ü' + 2)")


def test_drawn_by_seed_as_many_of_each_kind() -> None:
    files = sources(ROOT)
    few = dict(list(files.items())[:5])
    assert draw(few, 10, 0) == draw(few, 10, 0) != draw(few, 10, 1)
    # A change of one file leaves those of the others drawn, but for as many as it adds.
    first = next(iter(few))
    changed = draw({**few, first: "x = 1 + 2\n" + few[first]}, 10, 0)
    assert (
        len(
            {(m.path, m.kind, m.before, m.after) for m in draw(few, 10, 0)}
            - {(m.path, m.kind, m.before, m.after) for m in changed}
        )
        <= 3
    )
    drawn = draw(files, 100, 0)
    assert Counter(mutant.kind for mutant in drawn) == dict.fromkeys(KINDS, 20)
    assert {mutant.path.split("/")[0] for mutant in drawn} == {"ops", "modules", "jagged"}
    for mutant in drawn:
        assert ast.dump(ast.parse(mutant.text(files[mutant.path]))) != ast.dump(ast.parse(files[mutant.path])), mutant


@pytest.mark.parametrize("path", sorted(sources(ROOT)))
def test_every_file_has_tests(path: str) -> None:
    found = nearest_tests(path, ROOT)
    assert found
    assert all((ROOT / name).exists() for name in found)


def test_the_nearest_tests() -> None:
    assert nearest_tests("ops/cross_entropy/triton/filter.py", ROOT)[0] == "tests/ops/test_cross_entropy_filter.py"
    assert nearest_tests("ops/softmax/kernels.py", ROOT) == [
        "tests/ops/test_softmax.py",
        "tests/ops/test_group_sparse_softmax.py",
    ]
    assert nearest_tests("modules/heads.py", ROOT)[0] == "tests/modules/test_heads.py"
    assert nearest_tests("jagged/metrics.py", ROOT)[0] == "tests/test_metrics.py"
    assert "tests/data/test_malformed.py" in nearest_tests("jagged/data/events.py", ROOT)


@pytest.mark.parametrize(
    ("path", "first"),
    [
        # By name: not those of another folder, nor of a name that only begins alike.
        ("jagged/data/negatives.py", ["data/test_negatives"]),
        ("jagged/data/batches.py", ["data/test_batches"]),
        ("jagged/training/batches.py", ["training/test_batches"]),
        ("jagged/data/table_leaks.py", ["data/test_table_leaks", "data/test_table_splits"]),
        ("jagged/artifacts/files.py", ["test_artifacts"]),
        # By the imports of tests, and by what imports the file.
        ("jagged/data/files.py", ["data/test_csv_rows", "data/test_sources", "data/test_label_tables"]),
        ("jagged/data/staging.py", ["data/test_records"]),
        ("jagged/data/logs.py", ["data/test_rows", "data/test_table_batches", "data/test_table_splits", "data/test_records"]),
        ("jagged/data/values.py", ["data/test_inference", "data/test_inspection"]),
    ],
)
def test_own_tests_come_first_then_those_by_imports(path: str, first: list[str]) -> None:
    assert nearest_tests(path, ROOT)[: len(first)] == [f"tests/{name}.py" for name in first]


def test_tables_are_tested_as_tables_and_events_as_events() -> None:
    found = nearest_tests("jagged/data/staging.py", ROOT)
    assert {"tests/data/test_records.py", "tests/data/test_progress.py"} <= set(found)
    assert "tests/data/test_read_events.py" not in found
    assert "tests/data/test_read_events.py" in nearest_tests("jagged/data/intake.py", ROOT)
    assert "tests/data/test_event_tables.py" not in nearest_tests("jagged/data/intake.py", ROOT)


@pytest.mark.parametrize(
    ("source", "files"),
    [
        ("from jagged.data.staging import Builder", ["data/staging.py"]),
        ("def f():\n    from jagged.data import times", ["data/times.py"]),
        # What a package hands on is imported from where it stands.
        ("from jagged.data import Dataset", ["data/__init__.py", "data/records.py"]),
        ("from jagged.metrics import Figures\nimport numpy", ["metrics.py"]),
        ("from jaggedness import Dataset\nfrom torch import nn", []),
    ],
)
def test_imports_lead_to_files(source: str, files: list[str]) -> None:
    assert imported(source, ROOT) == {f"jagged/{name}" for name in files}


def test_drawn_examples_come_last_in_their_file() -> None:
    files = ["tests/data/test_table_splits.py", "tests/data/test_histories.py"]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *files]

    def collected(**own: str) -> list[str]:
        said = subprocess.run(command, cwd=ROOT, env={**os.environ, **own}, capture_output=True, text=True, check=True).stdout
        return [line.partition("[")[0] for line in said.splitlines() if "::" in line]

    found, plain = collected(JAGGED_TEST_DRAWN_LAST="1"), collected()
    assert sorted(found) == sorted(plain)
    for file in files:
        text = (ROOT / file).read_text()
        drawn = set(re.findall(r"\n@given\((?:.|\n)*?\ndef (\w+)", text))
        is_drawn = [name.partition("::")[2] in drawn for name in found if name.startswith(file)]
        assert drawn
        assert is_drawn == sorted(is_drawn)
    assert [name.partition("::")[0] for name in found] == [name.partition("::")[0] for name in plain]
    assert found != plain


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """One function and its test, which sees two of its three faults, and for ever waits for another."""
    texts = {
        "jagged/half.py": "def half(x):\n    while x < 0:\n        x += 2\n    return x // 2\n",
        "tests/test_half.py": "from jagged.half import half\n\ndef test_half():\n    assert (half(-1), half(4)) == (0, 2)\n",
        "ops/__init__.py": "",
        "modules/__init__.py": "",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    return tmp_path


def test_killed_survived_and_stopped(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = (project / "jagged/half.py").read_text()
    chosen = [
        next(mutant for mutant in mutants("jagged/half.py", source) if (mutant.before, mutant.after) == change)
        for change in (("x // 2", "(x * 2)"), ("x < 0", "(x <= 0)"), ("x += 2", "pass"))
    ]
    monkeypatch.setattr("tests.mutants.draw", lambda *given: chosen)
    results = project / "results.json"
    rows = run(project, results, 3, 0, 5.0, processes=2)
    assert [row["outcome"] for row in rows] == ["killed", "survived", "stopped"]
    assert rows[0]["by"].startswith("FAILED tests/test_half.py::test_half")
    assert (project / "jagged/half.py").read_text() == source
    assert summary(rows).endswith("killed of those not shown equivalent: 1 of 3, 33%")

    # What was found is not looked for again, and what was written by hand stays.
    saved = json.loads(results.read_text())
    saved["mutants"][1]["equivalent"] = "0 is even"
    saved["mutants"][0]["seconds"] = 1234
    results.write_text(json.dumps(saved))
    (project / "tests/test_half.py").write_text("def test_half():\n    pass\n")
    rows = run(project, results, 3, 0, 30.0, ("stopped",))
    assert [row["outcome"] for row in rows] == ["killed", "survived", "survived"]
    assert rows[0]["seconds"] == 1234
    assert summary(rows).splitlines()[-2:] == [
        "all                    1           1           1           0",
        "killed of those not shown equivalent: 1 of 2, 50%",
    ]


@pytest.mark.parametrize(("folder", "is_last"), [("jagged", "1"), ("modules", "0")])
def test_of_operators_drawn_examples_stay_where_they_are(project: Path, folder: str, is_last: str) -> None:
    source = (project / "jagged/half.py").read_text()
    mutant = next(one for one in mutants(f"{folder}/half.py", source) if one.before == "x < 0")
    (project / f"{folder}/half.py").write_text(source)
    (project / "tests/modules").mkdir()
    looking = f"import os\n\ndef test_half():\n    assert os.environ['JAGGED_TEST_DRAWN_LAST'] == '{is_last}'\n"
    for name in ("tests/test_half.py", "tests/modules/test_half.py"):
        (project / name).write_text(looking)
    assert outcome(project, mutant, source, 60.0) == ("survived", "")


def test_tests_that_fail_anyhow_kill_nothing(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = (project / "jagged/half.py").read_text()
    chosen: list[Mutant] = list(mutants("jagged/half.py", source))[:1]
    monkeypatch.setattr("tests.mutants.draw", lambda *given: chosen)
    (project / "tests/test_half.py").write_text("from jagged.half import half\n\ndef test_half():\n    raise ValueError\n")
    with pytest.raises(SystemExit, match=r"^tests/test_half.py::test_half fails without a mutant, too: mend it first$"):
        run(project, project / "results.json", 1, 0, 30.0)
