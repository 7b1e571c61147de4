"""Mutants: one small fault at a time in a copy of the sources, which the tests of the file are to find.

`python -m tests.mutants` (`make mutants`) draws faults by a seed, runs the tests of each, and saves what became of it in
`tests/mutants.json` after every one; a run that was stopped goes on from there. Killed is a mutant of which a test fails,
survived one of which none does; one whose tests take longer than the limit is neither. One that computes the same as the
original gets `"equivalent": "why"` in the file, by hand, which later runs keep.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "tests" / "mutants.json"
# Of these a test tells little of a file, for long.
SLOW = ("_aot", "hopper", "test_benchmarks", "test_depth", "test_memory", "test_sanitizer", "test_kill", "test_interpreter")
KINDS = ("operator", "comparison", "constant", "statement", "branches")
OPERATORS: dict[type, Any] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
    ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
COMPARISONS: dict[type, Any] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """A fault: characters `begin` to `end` of a file become `after`."""

    path: str
    line: int
    kind: str
    before: str
    after: str
    begin: int
    end: int

    def text(self, source: str) -> str:
        return source[: self.begin] + self.after + source[self.end :]

    def name(self, source: str) -> str:
        """Return what tells it from all others: its file and what stands there then."""
        return hashlib.sha256(f"{self.path}\n{self.text(source)}".encode()).hexdigest()[:12]


def mutants(path: str, source: str) -> Iterator[Mutant]:
    """Yield every fault that can be put into a file; annotations, decorators, doc strings and messages stay as they are."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def place(line: int, column: int) -> int:
        text = source[starts[line - 1] : starts[line]]
        return starts[line - 1] + len(text.encode()[:column].decode())

    for node in _code(ast.parse(source)):
        for kind, mutated in _faults(node):
            begin, end = place(node.lineno, node.col_offset), place(node.end_lineno, node.end_col_offset)
            after = mutated if isinstance(mutated, str) else f"({ast.unparse(mutated)})"
            yield Mutant(path, node.lineno, kind, source[begin:end], after, begin, end)


def _code(node: ast.AST) -> Iterator[Any]:
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params") or isinstance(node, (ast.Raise, ast.Assert)):
            continue
        for child in value if isinstance(value, list) else [value]:
            # f-strings have no places of their own for what they hold.
            if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr):
                yield child
                yield from _code(child)


def _faults(node: ast.AST) -> Iterator[tuple[str, ast.expr | str]]:
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        yield "operator", ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right)
    elif isinstance(node, ast.BoolOp):
        yield "operator", ast.BoolOp(OPERATORS[type(node.op)](), node.values)
    elif isinstance(node, ast.Compare):
        for at, comparison in enumerate(node.ops):
            others = [*node.ops[:at], COMPARISONS[type(comparison)](), *node.ops[at + 1 :]]
            yield "comparison", ast.Compare(node.left, others, node.comparators)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "constant", repr(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        yield "constant", repr(node.value + 1 if isinstance(node.value, int) else node.value * 2 or 1.0)
    elif isinstance(node, (ast.AugAssign, ast.Raise)) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        yield "statement", "pass"
    elif isinstance(node, ast.IfExp):
        yield "branches", ast.IfExp(node.test, node.orelse, node.body)
    elif isinstance(node, ast.If):
        # Of its test, which comes after it.
        node.test.swaps_branches = True  # type: ignore[attr-defined]
    if getattr(node, "swaps_branches", False):
        yield "branches", ast.UnaryOp(ast.Not(), node)  # type: ignore[arg-type]


def sources(root: Path) -> dict[str, str]:
    """Return the files whose faults are looked for: all but those of which nothing runs without a GPU for Hopper."""
    found = {}
    for folder in ("ops", "modules", "jagged"):
        for path in sorted((root / folder).rglob("*.py")):
            name = path.relative_to(root).as_posix()
            if not name.startswith(("jagged/ops/", "jagged/modules/")) and "hopper" not in name and path.name != "ring.py":
                found[name] = path.read_text(encoding="utf-8")
    return found


def draw(files: dict[str, str], count: int, seed: int) -> list[Mutant]:
    """Return as many faults of each kind, drawn from all of that kind.

    Each has a number by the seed and by what it is, and the least are drawn: a change of the sources leaves most others drawn.
    """
    kinds: dict[str, list[tuple[str, Mutant]]] = {kind: [] for kind in KINDS}
    for path, source in files.items():
        seen = Counter[tuple[str, str]]()
        for mutant in mutants(path, source):
            change = mutant.before, mutant.after
            seen[change] += 1
            number = hashlib.sha256(f"{seed}\n{path}\n{change}\n{seen[change]}".encode()).hexdigest()
            kinds[mutant.kind].append((number, mutant))
    drawn = [pair for at, kind in enumerate(KINDS) for pair in sorted(kinds[kind], key=_number)[: (count + at) // len(KINDS)]]
    return [mutant for _, mutant in sorted(drawn, key=_number)]


def _number(pair: tuple[str, Mutant]) -> str:
    return pair[0]


def nearest_tests(path: str, root: Path) -> list[str]:
    """Return the test files of a source file, the nearest first: by its name, its folder's, and the public names in it.

    Of `jagged` by imports, too: first the tests of the file's own name, then those of its folder's name, those that import it,
    the own tests of the files that do, and of its folder the tests that import these.
    """
    parts = Path(path).with_suffix("").parts
    layer, words = parts[0], [part.removesuffix("_impl") for part in parts[1:] if part not in ("_shared", "triton", "hopper")]
    tree = ast.parse((root / path).read_text(encoding="utf-8"))
    public = {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name[0] != "_"}
    scores = Counter[str]()
    for test in sorted((root / "tests").rglob("test_*.py")):
        name = test.relative_to(root).as_posix()
        folder = name.split("/")[1]
        if (folder if folder in ("ops", "modules") else "jagged") != layer or any(word in name for word in SLOW):
            continue
        text = test.read_text(encoding="utf-8")
        if layer == "jagged":
            # Words are whole: what is in `data` is not tested by `test_dataset`.
            named = sum(f"_{word}_" in f"{test.stem}_" for word in words)
            scores[name] = (150 if folder in (parts[1], test.name) else 30) * named + 10 * (parts[1] == folder)
        else:
            scores[name] = sum(
                100 * (f"_{word}" in test.stem)
                + 30 * (f"_{word.rpartition('_')[0] or word}" in test.stem)
                + 10 * (word == folder)
                for word in words
            )
        # How often they are called, too, where several files know the same names.
        scores[name] += sum(min(9, text.count(f"{word}(")) + (word in text) for word in public)
        scores[name] += parts[1] == "_shared" and test.stem in ("test_operator", "test_softmax", "test_conversion")
    if layer == "jagged":
        # Of tests that are as near the short ones first: there is a limit.
        scores.update(_by_imports(path, list(scores), root))
        scores = Counter({name: scores[name] for name in sorted(scores, key=lambda name: (root / name).stat().st_size)})
    # Of `jagged` what a file does is tested where it is used, too; interpreted tests take too long for more than a few.
    least = 100 if layer != "jagged" and max(scores.values()) >= 100 else 1
    nearest = [name for name, score in scores.most_common(8 if layer == "jagged" else 5) if score >= least]
    return nearest or ["tests/modules/test_every_module.py" if layer == "modules" else "tests/test_imports.py"]


def _by_imports(path: str, tests: list[str], root: Path) -> Counter[str]:
    """How near tests are to a file of `jagged` by the imports of both."""
    files = [name for name in sources(root) if name.startswith("jagged/") and not name.endswith("__init__.py")]
    graph = {name: imported((root / name).read_text(encoding="utf-8"), root) for name in files}
    near = {path}
    # The file's own tests, and those of its folder in one file.
    own = {_own_tests(path): 1000, f"tests/test_{Path(path).parts[1]}.py": 500}
    scores = Counter({test: score for test, score in own.items() if test in tests})
    left = tests
    for of_import, of_own in ((200, 100), (40, 0), (20, 0)):
        beside = [test for test in left if near == {path} or Path(test).parent.name == Path(path).parent.name]
        found = [test for test in beside if near & imported((root / test).read_text(encoding="utf-8"), root)]
        scores.update(dict.fromkeys(found, of_import))
        left = [test for test in left if test not in found]
        near = {name for name, imported in graph.items() if near & imported}
        scores.update(dict.fromkeys(set(map(_own_tests, near)) & set(tests), of_own))
    return scores


def _own_tests(path: str) -> str:
    """The test file that bears a source file's name, in the folder of the same name: there may be none."""
    return re.sub(r"^jagged/(.*/)?(\w+)\.py$", r"tests/\1test_\2.py", path)


@cache
def imported(source: str, root: Path) -> frozenset[str]:
    """The files of `jagged` that a source imports, also inside of functions; of names of a package those behind it."""
    found = set[str]()
    for module, name in _imports(source):
        path = module.replace(".", "/")
        known = next((one for one in (f"{path}/{name}.py", f"{path}.py") if (root / one).is_file()), f"{path}/__init__.py")
        found.add(known)
        if known.endswith("__init__.py") and (root / known).is_file():
            behind = _imports((root / known).read_text(encoding="utf-8"))
            found.update(f"{of.replace('.', '/')}.py" for of, other in behind if other == name)
    return frozenset(found)


@cache
def _imports(source: str) -> frozenset[tuple[str, str]]:
    """The modules of `jagged` that a source names, each with the name that it takes from it."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    return frozenset((str(of.module), name.name) for of in nodes for name in of.names if f"{of.module}.".startswith("jagged."))


def copy(root: Path, target: Path) -> None:
    """Copy what git knows, and what it would add."""
    listed = subprocess.run(["git", "ls-files", "-coz", "--exclude-standard"], cwd=root, capture_output=True, check=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        if (root / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / name, target / name, follow_symlinks=False)


def pytest_in(
    tree: Path, interpreted: bool, arguments: list[str], seconds: float, workers: int, *, drawn_last: bool = False
) -> tuple[int | None, str]:
    """Return the exit code, None past the limit, and the first line that says what failed.

    Where `drawn_last`, tests of drawn examples come behind the others of their file.
    """
    # Of this copy, not of the package that is installed; the same draws each time.
    own = {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "JAGGED_TEST_SEED": "0", "JAGGED_TEST_SHRINK": "0"}
    own |= {"TRITON_INTERPRET": str(int(interpreted)), "JAGGED_TEST_DRAWN_LAST": str(int(drawn_last))}
    chosen = ["-m", "interpret"] if interpreted else []
    chosen += ["-n", str(workers), "--dist", "worksteal"] if workers > 1 else []
    child = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *chosen, *arguments],
        cwd=tree,
        env={**os.environ, **own},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        said, _ = child.communicate(timeout=max(0.0, seconds))
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        return None, ""
    lines = said.splitlines()
    return child.returncode, next((line for line in lines if line.startswith(("FAILED ", "ERROR "))), (lines or [""])[-1])


def outcome(tree: Path, mutant: Mutant, source: str, seconds: float, workers: int = 1) -> tuple[str, str]:
    """Run the tests of a mutant; return `killed`, `survived` or `stopped` by the limit, and the line that says what failed."""
    path, files = tree / mutant.path, nearest_tests(mutant.path, tree)
    # By PyTorch on the CPU, and by the kernels, interpreted: what the file is for comes first.
    runs = [False, True] if mutant.path.startswith("ops/") else [False]
    if "import triton" in source:
        runs.reverse()
    end = time.monotonic() + seconds
    path.write_text(mutant.text(source), encoding="utf-8")
    try:
        for interpreted in runs:
            # Drawn tables compared with the definition take longest there; of operators they find most.
            drawn_last = mutant.path.startswith("jagged/")
            code, line = pytest_in(tree, interpreted, files, end - time.monotonic(), workers, drawn_last=drawn_last)
            if code is None:
                return "stopped", ""
            # 5: no test was chosen.
            if code not in (0, 5):
                break
        else:
            return "survived", ""
    finally:
        path.write_text(source, encoding="utf-8")
    test = line.split(" ", 1)[-1].split(" - ")[0]
    if "::" in test and pytest_in(tree, interpreted, [test], 600, 1)[0] != 0:
        raise SystemExit(f"{test} fails without a mutant, too: mend it first")
    return "killed", line


def run(
    root: Path, results: Path, count: int, seed: int, seconds: float, again: Collection[str] = (), processes: int = 1
) -> list[dict[str, Any]]:
    """Run drawn mutants that have no result yet, or one of those that are named; save after each.

    Tests of a mutant have as many processes of their own as there are cores for each of `processes`.
    """
    files = sources(root)
    known = {row["name"]: row for row in json.loads(results.read_text())["mutants"]} if results.exists() else {}
    drawn = {mutant.name(files[mutant.path]): mutant for mutant in draw(files, count, seed)}
    rows = {name: known[name] for name in drawn if name in known}
    saving = threading.Lock()

    def row_of(name: str, mutant: Mutant, trees: SimpleQueue[Path]) -> None:
        tree, begin = trees.get(), time.monotonic()
        try:
            found, by = outcome(tree, mutant, files[mutant.path], seconds, max(1, (os.cpu_count() or 1) // processes))
        finally:
            trees.put(tree)
        facts = {key: getattr(mutant, key) for key in ("path", "line", "kind", "before", "after")}
        facts |= {"outcome": found, "by": by, "seconds": round(time.monotonic() - begin)}
        with saving:
            rows[name] = {"name": name, **rows.get(name, {}), **facts}
            saved = {"seed": seed, "limit_s": seconds, "mutants": [rows[name] for name in drawn if name in rows]}
            results.write_text(json.dumps(saved, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            change = f"{mutant.path}:{mutant.line}: {mutant.before!r} -> {mutant.after!r}"
            print(f"{len(rows)}/{len(drawn)} {found}: {change}", flush=True)

    # Each process of tests has a copy of the sources of its own.
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(processes) as pool:
        trees = SimpleQueue[Path]()
        for number in range(processes):
            copy(root, Path(folder, str(number)))
            trees.put(Path(folder, str(number)))
        missing = [name for name in drawn if name not in rows or rows[name]["outcome"] in again]
        running = [pool.submit(row_of, name, drawn[name], trees) for name in missing]
        try:
            for each in running:
                each.result()
        finally:
            pool.shutdown(cancel_futures=True)
    return [rows[name] for name in drawn]


def summary(rows: list[dict[str, Any]]) -> str:
    """Return what became of the mutants of each kind, and the share that was killed of those not shown to be equivalent."""
    outcomes = ("killed", "survived", "equivalent", "stopped")
    of: Counter[tuple[str, str]] = Counter()
    for row in rows:
        found = "equivalent" if "equivalent" in row and row["outcome"] != "killed" else row["outcome"]
        of.update([(row["kind"], found), ("all", found)])
    lines = [f"{'':12}" + "".join(f"{name:>12}" for name in outcomes)]
    lines += [f"{kind:12}" + "".join(f"{of[kind, name]:12}" for name in outcomes) for kind in (*KINDS, "all")]
    killed, counted = of["all", "killed"], len(rows) - of["all", "equivalent"]
    return "\n".join([*lines, f"killed of those not shown equivalent: {killed} of {counted}, {killed / counted:.0%}"])


def main() -> None:
    """Draw, run, save, say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=90, help="seconds for the tests of one mutant")
    parser.add_argument("--again", nargs="*", default=(), choices=("killed", "survived", "stopped"), help="run these anew")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="mutants at a time")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    print(summary(run(ROOT, given.results, given.count, given.seed, given.limit, given.again, given.processes)))


if __name__ == "__main__":
    main()
