"""Which files of this repository the tests of a file can use.

Read from the sources: imports, also inside of functions, and names of modules in strings, by which operators find their
implementations. `import jagged.ops` loads the declarations of every operator, and kernels of none, so what is only loaded with
a package on the way is told from what is used: of a module that is used also its functions may run, and load more. What is only
loaded changes nothing but whether it loads, which tests that always run see.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

NAMED = re.compile(r"\b((?:jagged|tests|benchmarks)(?:\.\w+)+)(\.(?!\w))?")


@dataclass
class Source:
    """What a file names: modules and names of theirs, and strings, by which modules are imported too."""

    loads: list[str] = field(default_factory=list)  # by importing it
    calls: list[str] = field(default_factory=list)  # while it is imported: what these return stays
    uses: list[str] = field(default_factory=list)  # also inside of functions, and of some modules only these names
    origins: dict[str, str] = field(default_factory=dict)
    strings: list[str] = field(default_factory=list)


@cache
def read(path: Path, package: str) -> Source:
    """Return what a file in `package` names; docstrings and imports for types alone name nothing."""
    source = Source()
    # Of a module that is asked for names alone, as in `ops.jagged_softmax`, these are used, not all that it has.
    asked: dict[str, set[str]] = {}
    whole: set[str] = set()
    called: list[tuple[str, str]] = []

    def visit(node: ast.AST, is_loaded: bool) -> None:
        names: dict[str, str] = {}
        if is_loaded and isinstance(node, ast.Call):
            of, name = (node.func.value, node.func.attr) if isinstance(node.func, ast.Attribute) else (node.func, "")
            if isinstance(of, ast.Name):
                called.append((of.id, name))
        if isinstance(node, ast.Name):
            whole.add(node.id)
            return
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            asked.setdefault(node.value.id, set()).add(node.attr)
            return
        if isinstance(node, ast.Constant):
            source.strings += [node.value] if isinstance(node.value, str) else []
            return
        if isinstance(node, ast.Import):
            names = {f"import {name.name}": name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            around = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*around, *filter(None, [node.module])])
            names = {name.asname or name.name: f"{module}.{name.name}" for name in node.names}
        source.origins.update(names)
        source.uses += names.values()
        source.loads += names.values() if is_loaded else ()
        is_loaded = is_loaded and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        is_for_types = isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for child in node.orelse if is_for_types else ast.iter_child_nodes(node):
            if not (isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)):
                visit(child, is_loaded)

    visit(ast.parse(path.read_bytes()), True)
    source.calls = [f"{source.origins[name]}.{of}".rstrip(".") for name, of in called if name in source.origins]
    for name in source.origins.keys() & asked.keys() - whole:
        origin = source.origins[name]
        source.uses = [use for use in source.uses if use != origin] + [f"{origin}.{of}" for of in sorted(asked[name])]
    return source


def module_of(root: Path, path: Path) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


@cache
def file_of(root: Path, module: str) -> Path | None:
    base = root.joinpath(*module.split("."))
    return next((path for path in (base / "__init__.py", base.with_suffix(".py")) if path.is_file()), None)


@cache
def follow(root: Path, name: str, is_used: bool) -> tuple[tuple[str, bool], ...]:
    """Return what a module, or a name in one, leads to: each whether it is used or only loaded."""
    parts = name.split(".")
    around = [".".join(parts[:n]) for n in range(1, len(parts) + 1)]
    known = [module for module in around if root.joinpath(*module.split(".")).is_dir() or file_of(root, module)]
    # Packages on the way are loaded, and with them what they import, of which nothing is called on this way.
    found = [(package, False) for package in known[:-1]]
    path = file_of(root, known[-1]) if known else None
    if path is None:
        return tuple(found)
    is_package = path.name == "__init__.py"
    source = read(path, known[-1] if is_package else known[-1].rpartition(".")[0])
    if known[-1] != name:
        origin = source.origins.get(parts[len(known)]) if is_package else None
        return (*found, (known[-1], False), (origin, is_used)) if origin else (*found, (known[-1], is_used))
    found += [(load, False) for load in source.loads]
    found += [(call, True) for call in source.calls]
    if is_used:
        found += [(use, True) for use in source.uses]
        for module, dot in (match for text in source.strings for match in NAMED.findall(text)):
            folder = root.joinpath(*module.split("."))
            # A package that is named may be searched, or begin the name of a module; not so those that a file is in itself.
            if not folder.is_dir():
                found.append((module, True))
            elif dot or module not in around:
                found += [(module_of(root, below), True) for below in sorted(folder.rglob("*.py"))]
    return tuple(found)


def loaded(root: Path, test: Path, also: Iterable[Path] = ()) -> set[Path]:
    """Return the files that a test file, and others with it, can load by whatever way."""
    return {path for name, _ in _followed(root, test, also) if (path := file_of(root, name))}


def used(root: Path, test: Path, also: Iterable[Path] = ()) -> set[Path]:
    """Return those of which more may run than what loading them does, and the files of data that tests name."""
    files = {path for name, is_used in _followed(root, test, also) if is_used and (path := file_of(root, name))}
    # What keeps account changes no test, and names no data but what it writes.
    files -= {root / "tests" / name for name in ("proven.py", "reach.py")}
    return files.union(*(data_of(root, path) for path in files if path.is_relative_to(root / "tests")))


def _followed(root: Path, test: Path, also: Iterable[Path]) -> set[tuple[str, bool]]:
    """Return modules and names, each whether it is used or only loaded."""
    conftests = [path for folder in test.parents if (path := folder / "conftest.py").is_file() and folder.is_relative_to(root)]
    todo = [(module_of(root, path), True) for path in (test, *conftests, *also)]
    done: set[tuple[str, bool]] = set()
    while todo:
        step = todo.pop()
        if step not in done:
            done.add(step)
            todo += follow(root, *step)
    return done


@cache
def data_of(root: Path, path: Path) -> list[Path]:
    """Return the files of data that a module of tests names, from the repository's root or from its own folder."""
    texts = [text for text in read(path, module_of(root, path.parent)).strings if re.fullmatch(r"[\w./-]+\.\w+", text)]
    return [found for text in texts for folder in (root, path.parent) if (found := folder / text).is_file()]
