"""Another version of jagged beside this one, in one run: a benchmark calls itself in processes that import that version.

`git archive COMMIT jagged ops modules | tar -x -C build/before` makes a tree of another version.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT

HERE = ROOT.parent


def tree_of(text: str) -> Path:
    """The folder of a version, which has no benchmarks of its own: those here are run.

    Raises:
        ValueError: no `jagged` there, or benchmarks too.
    """
    tree = Path(text).resolve()
    if not (tree / "jagged/__init__.py").exists() or (tree / "benchmarks").exists():
        raise ValueError(
            f"{text}: expected a folder with jagged, ops and modules of another version and nothing else; "
            f"git archive COMMIT jagged ops modules | tar -x -C {text}"
        )
    return tree


def measured(module: str, tree: Path | None, arguments: Sequence[str]) -> Any:
    """What `python -m module --json FILE arguments...` writes, with jagged from `tree`; None for this version.

    Raises:
        RuntimeError: the process failed, or imported another jagged.
    """
    # -P: the working directory would come before all of these.
    paths = [*([str(tree)] if tree is not None else []), str(HERE), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "measured.json"
        command = [sys.executable, "-P", "-m", module, "--json", str(file), *arguments]
        process = subprocess.run(command, env=environment, check=False)
        if process.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
        found = json.loads(file.read_text())
    expected = (tree or HERE) / "jagged"
    if Path(found["jagged"]) != expected:
        raise RuntimeError(f"imported {found['jagged']}, expected {expected}")
    return found["rows"]


def hand_over(file: str, rows: Any) -> None:
    """Write what `measured` reads."""
    import jagged

    Path(file).write_text(json.dumps({"jagged": str(Path(jagged.__file__).parent), "rows": rows}))
