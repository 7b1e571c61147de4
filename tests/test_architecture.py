"""One way only: ops <- modules <- jagged. Read from the sources, so that an import inside a function counts too."""

from __future__ import annotations

import ast
import inspect
import symtable
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import jagged.modules
import jagged.ops

ROOT = Path(__file__).parent.parent
#: The parts of `jagged/`, from below to above: each imports itself and those before it, also inside functions.
LAYERS = (
    ("allocator", "artifacts", "versions"),
    ("config", "charts"),
    ("data",),
    ("metrics", "label_metrics", "pointwise"),
    ("scoring",),
    ("evaluation",),
    ("models",),
    ("training",),
    ("runs",),
    ("tuning", "diagnosis"),
    ("demo",),
    ("cli",),
    ("__main__",),
)
ENGINE = ("torchrec", "fbgemm_gpu", "pyarrow", "duckdb", "pydantic", "cyclopts", "numpy")


def imports(source: str, package: str, at: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute name of the module imported) for every import; `package` is the one that the module lies in."""
    for node in ast.walk(ast.parse(source, filename=str(at))):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield node.lineno, name.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                base = ".".join([*parts[: len(parts) - node.level + 1], *filter(None, [node.module])])
            for name in node.names:
                yield node.lineno, f"{base}.{name.name}"


def files(folder: str) -> list[tuple[Path, str]]:
    """The Python files of a top-level folder, each with the package it lies in by its import name."""
    home = {"ops": "jagged.ops", "modules": "jagged.modules", "jagged": "jagged"}[folder]
    result = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        within = path.relative_to(ROOT / folder).parent.parts
        if folder == "jagged" and within[:1] in (("ops",), ("modules",)):
            continue
        result.append((path, ".".join([home, *within])))
    assert result
    return result


def offences(source: str, package: str, at: Path) -> list[str]:
    found = []
    for line, name in imports(source, package, at):
        top, family = name.split(".")[0], package.split(".")[2:3]
        bad = False
        if package.startswith("jagged.ops"):
            inner = name.split(".")[2:3]
            own = not inner or not (ROOT / "ops" / inner[0]).is_dir() or inner == ["_shared"] or inner == family or not family
            bad = top in ENGINE or (top == "jagged" and not (f"{name}.".startswith("jagged.ops.") and own))
        elif package.startswith("jagged.modules"):
            is_public = name.removeprefix("jagged.ops.") in jagged.ops.__all__
            bad = top in ("pydantic", "cyclopts", "pyarrow") or (
                top == "jagged" and not f"{name}.".startswith("jagged.modules.") and not is_public
            )
        if top in ("ops", "modules") or bad:
            found.append(f"{at}:{line}: {package} imports {name}")
    return found


@pytest.mark.parametrize("folder", ["ops", "modules", "jagged"])
def test_nothing_imports_upward(folder: str) -> None:
    found = [offence for path, package in files(folder) for offence in offences(path.read_text(), package, path)]
    assert found == []


def upward(source: str, package: str, at: Path) -> list[str]:
    """Imports of a file of `jagged/` that go up, or to another part of its own layer."""
    places = {name: number for number, names in enumerate(LAYERS) for name in names}
    own = package.split(".")[1] if "." in package else at.stem
    found = []
    for line, name in imports(source, package, at):
        other = ".".join(name.split(".")[1:2]) if name.startswith("jagged.") else ""
        if other in places and other != own and places[other] >= places[own]:
            found.append(f"{at}:{line}: {own} imports {name}")
    return found


def test_the_layers_of_jagged_import_one_way() -> None:
    at = [(path, package) for path, package in files("jagged") if (path.name, package) != ("__init__.py", "jagged")]
    parts = {package.split(".")[1] if "." in package else path.stem for path, package in at}
    assert parts == {name for names in LAYERS for name in names}
    assert [offence for path, package in at for offence in upward(path.read_text(), package, path)] == []


@pytest.mark.parametrize(
    ("package", "at", "source"),
    [
        ("jagged.models", "pretrained.py", "from jagged.training import CheckpointError"),
        ("jagged.models", "pretrained.py", "def f():\n    from jagged.training.trainer import Trainer"),
        ("jagged.artifacts", "files.py", "from jagged.data import DataError"),
        ("jagged.data", "events.py", "from ..models import SASRec"),
        ("jagged", "metrics.py", "import jagged.evaluation"),
        ("jagged.training", "loop.py", "from jagged.runs.training import train"),
    ],
)
def test_an_import_between_layers_would_be_found(package: str, at: str, source: str) -> None:
    assert len(upward(source, package, Path(at))) == 1


@pytest.mark.parametrize(
    ("package", "source"),
    [
        ("jagged.ops.attention", "import torchrec"),
        ("jagged.ops.attention", "def f():\n    from torchrec.sparse import jagged_tensor"),
        ("jagged.ops.attention", "from jagged.ops.conversion import op"),
        ("jagged.ops.attention", "from jagged.ops import conversion"),
        ("jagged.ops.attention", "from ..conversion import op"),
        ("jagged.ops.attention", "from jagged.modules import attention"),
        ("jagged.ops._shared", "from jagged.ops.conversion import op"),
        ("jagged.ops", "from jagged import config"),
        ("jagged.modules", "import jagged.models"),
        ("jagged.modules", "from jagged import data"),
        ("jagged.modules", "from jagged.ops.attention import jagged_attention"),
        ("jagged.modules", "from jagged.ops import _shared"),
        ("jagged.modules", "import jagged.ops"),
        ("jagged.modules", "from ..training import train"),
        ("jagged.models", "from modules import attention"),
        ("jagged", "import ops"),
    ],
)
def test_an_upward_import_would_be_found(package: str, source: str) -> None:
    assert offences(source, package, Path("planted.py")) != []


@pytest.mark.parametrize(
    ("package", "source"),
    [
        ("jagged.ops", "from jagged.ops.conversion import jagged_to_dense"),
        ("jagged.ops.attention", "from jagged.ops._shared import backends"),
        ("jagged.ops.attention", "from jagged.ops.attention import kernels\nimport torch\nimport triton"),
        ("jagged.ops.attention", "from . import kernels"),
        ("jagged.modules", "from jagged.ops import jagged_attention\nfrom torchrec import JaggedTensor"),
        ("jagged.models", "from jagged.modules import JaggedPooling"),
    ],
)
def test_a_downward_import_is_allowed(package: str, source: str) -> None:
    assert offences(source, package, Path("planted.py")) == []


def types_of(call: Any) -> Iterator[tuple[str, Any]]:
    """The names in a signature's annotations that are not those of other libraries, and what they stand for."""
    function = inspect.unwrap(call.__init__ if isinstance(call, type) else call)
    if not inspect.isfunction(function) or function.__module__.partition(".")[0] != "jagged":
        return
    tree = ast.parse(inspect.getsource(inspect.getmodule(function)))
    foreign = {
        (alias.asname or alias.name).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and not str(node.module).startswith("jagged"))
        for alias in node.names
    }
    for annotation in filter(lambda x: isinstance(x, str), function.__annotations__.values()):
        for node in ast.walk(ast.parse(annotation, mode="eval")):
            if isinstance(node, ast.Name) and node.id in function.__globals__ and node.id not in foreign:
                yield node.id, function.__globals__[node.id]


@pytest.mark.parametrize("package", [jagged.ops, jagged.modules], ids=lambda package: package.__name__)
def test_types_of_public_signatures_are_public(package: Any) -> None:
    public = [getattr(of, name) for of in (jagged.ops, jagged.modules) for name in of.__all__]
    private = [
        f"{name}: {type_name}"
        for name in package.__all__
        for type_name, named in types_of(getattr(package, name))
        if not any(named is known or (type(named) is type(known) and named == known) for known in public)
    ]
    assert private == []


def comprehension_clashes(table: symtable.SymbolTable) -> Iterator[tuple[str, int, str]]:
    """(function, line, name) where one comprehension of a function binds a name that another reads from outside of it.

    Python 3.12 and 3.13 keep a comprehension's names among the function's, where the other then finds no value. 3.11 does not,
    so a run there shows nothing.
    """
    inner = [child for child in table.get_children() if child.get_name() in ("listcomp", "setcomp", "dictcomp")]
    bound = {symbol.get_name() for child in inner for symbol in child.get_symbols() if symbol.is_local()}
    read = {symbol.get_name() for child in inner for symbol in child.get_symbols() if symbol.is_free()}
    own = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_local()}
    yield from ((table.get_name(), table.get_lineno(), name) for name in sorted((bound & read) - own))
    for child in table.get_children():
        yield from comprehension_clashes(child)


def test_no_comprehension_hides_a_name_that_another_reads() -> None:
    found = []
    for path, _ in [of for folder in ("ops", "modules", "jagged") for of in files(folder)]:
        found += [(path.name, *clash) for clash in comprehension_clashes(symtable.symtable(path.read_text(), str(path), "exec"))]
    assert found == []


def test_a_hidden_name_is_found() -> None:
    source = """
def outer():
    def value(given): return given
    def wrapper(arguments):
        rest = {key: value for key, value in arguments.items()}
        return {name: value(name) for name in rest}
    def one_after_the_other(arguments):
        return [value(name) for name in arguments], [value(name) for name in arguments]
"""
    assert list(comprehension_clashes(symtable.symtable(source, "", "exec"))) == [("wrapper", 4, "value")]
