"""Another version of jagged beside this one, in one run: a benchmark calls itself in processes that import that version.

`git archive COMMIT jagged ops modules | tar -x -C build/before` makes a tree of another version.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
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
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "measured.json"
        command = [*_command(module), "--json", str(file), *arguments]
        process = subprocess.run(command, env=_environment(tree), check=False)
        if process.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
        found = json.loads(file.read_text())
    _check(found["jagged"], tree)
    return found["rows"]


def hand_over(file: str, rows: Any) -> None:
    """Write what `measured` reads."""
    Path(file).write_text(json.dumps({"jagged": _imported(), "rows": rows}))


class Version:
    """A process that imports one version of jagged, and answers.

    Args:
        module: what is run, `python -m module --serve arguments...`, and calls `serve`.
        tree: of another version; None for this one.
        arguments: words behind `--serve`.

    Raises:
        RuntimeError: the process ended, or imported another jagged.
    """

    def __init__(self, module: str, tree: Path | None, arguments: Sequence[str] = ()) -> None:
        command = [*_command(module), "--serve", *arguments]
        self._process = subprocess.Popen(
            command, env=_environment(tree), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        try:
            _check(self._answer()["jagged"], tree)
        except RuntimeError:
            self.close()
            raise

    def ask(self, request: Any) -> Any:
        """The answer to a request; both are what JSON holds."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{' '.join(self._process.args)} ended with {self._process.wait()}")  # type: ignore[arg-type]
        return json.loads(line)

    def __enter__(self) -> Version:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process, which ends with its input."""
        # Leaving closes the pipes, and waits.
        with self._process:
            pass


def serve(answer: Callable[[Any], Any]) -> None:
    """Answer what `Version.ask` asks, up to the end of the input. What else is printed goes to the standard error."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    print(json.dumps({"jagged": _imported()}), file=replies, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=replies, flush=True)


def _command(module: str) -> list[str]:
    # -P: the working directory would come before all of PYTHONPATH.
    return [sys.executable, "-P", "-m", module]


def _environment(tree: Path | None) -> dict[str, str]:
    paths = [*([str(tree)] if tree is not None else []), str(HERE), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _imported() -> str:
    import jagged

    return str(Path(jagged.__file__).parent)


def _check(imported: str, tree: Path | None) -> None:
    expected = (tree or HERE) / "jagged"
    if Path(imported) != expected:
        raise RuntimeError(f"imported {imported}, expected {expected}")
