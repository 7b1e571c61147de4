"""What is shipped: every subpackage, the links, the pins, and a wheel that works where the checkout is not."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import jagged
from jagged import versions

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
HOMES = {"jagged": "jagged", "jagged.ops": "ops", "jagged.modules": "modules"}
TRIPLE = {"torch": versions.TORCH, "torchrec": versions.TORCHREC, "fbgemm-gpu": versions.FBGEMM}


def sources() -> dict[str, Path]:
    """Every file of the packages by its path in a wheel."""
    found = {}
    for package, home in HOMES.items():
        for path in sorted((ROOT / home).rglob("*")):
            within = path.relative_to(ROOT / home)
            if (
                path.is_file()
                and "__pycache__" not in path.parts
                and not (home == "jagged" and within.parts[0] in ("ops", "modules"))
            ):
                found[str(Path(*package.split("."), within))] = path
    return found


def pins(name: str) -> dict[str, str]:
    lines = [line for line in (ROOT / "requirements" / name).read_text().splitlines() if line and not line.startswith("#")]
    requirements = [Requirement(line) for line in lines]
    for requirement in requirements:
        assert re.fullmatch(r"==[\w.]+", str(requirement.specifier)), f"{name}: {requirement} is not pinned"
    result = {canonicalize_name(r.name): str(r.specifier).removeprefix("==") for r in requirements}
    assert len(result) == len(lines), f"{name}: a package is there twice"
    return result


def in_makefile() -> dict[str, str]:
    text = (ROOT / "Makefile").read_text()
    return {
        name: found[1] for name in TRIPLE if (found := re.search(rf"^{name.split('-')[0].upper()} := (.*)$", text, re.MULTILINE))
    }


def test_every_subpackage_is_listed() -> None:
    folders = {str(Path(name).parent).replace("/", ".") for name in sources() if name.endswith(".py")}
    assert sorted(PYPROJECT["tool"]["setuptools"]["packages"]) == sorted(folders)
    assert PYPROJECT["tool"]["setuptools"]["package-dir"] == HOMES
    assert [folder for folder in folders if f"{folder.replace('.', '/')}/__init__.py" not in sources()] == []


@pytest.mark.parametrize("name", ["ops", "modules"])
def test_links_show_the_same_tree(name: str) -> None:
    link = ROOT / "jagged" / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"
    assert (link / "__init__.py").samefile(ROOT / name / "__init__.py")


def test_versions_agree() -> None:
    assert jagged.__version__ == PYPROJECT["project"]["version"]
    assert in_makefile() == TRIPLE
    required = [Requirement(text) for text in PYPROJECT["project"]["dependencies"]]
    assert {r.name: str(r.specifier) for r in required if r.name in TRIPLE} == {n: f"=={v}" for n, v in TRIPLE.items()}
    # FBGEMM-GPU 1.X is built for torch 2.(X+5), and TorchRec 1.X for both.
    minors = {name: int(version.split(".")[1]) for name, version in TRIPLE.items()}
    assert minors["torch"] - 5 == minors["torchrec"] == minors["fbgemm-gpu"]


def test_pins_satisfy_the_package() -> None:
    runtime, dev = pins("runtime.txt"), pins("dev.txt")
    assert set(runtime) & (set(dev) | set(TRIPLE)) == set()
    extras = [Requirement(text) for texts in PYPROJECT["project"]["optional-dependencies"].values() for text in texts]
    for requirement in [Requirement(text) for text in PYPROJECT["project"]["dependencies"]] + extras:
        version = (runtime | TRIPLE)[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} against the pin {version}"
    for requirement in [Requirement(text) for text in PYPROJECT["build-system"]["requires"]]:
        assert requirement.specifier.contains(runtime[canonicalize_name(requirement.name)]), requirement


def test_every_requirement_of_a_requirement_is_pinned() -> None:
    """Walks what the installed packages ask for; torch's CUDA libraries are pinned by torch's own metadata."""
    runtime, dev = pins("runtime.txt"), pins("dev.txt")
    loose = []
    for known, files in ((runtime, runtime), (runtime | dev, dev)):
        for name in [*files, *(TRIPLE if files is runtime else ())]:
            try:
                distribution = importlib.metadata.distribution(name)
            except importlib.metadata.PackageNotFoundError:
                # The CPU build stands in for FBGEMM-GPU; tests may run where lint and docs tools are not.
                continue
            if TRIPLE.get(name, "").split("+")[0] not in ("", distribution.version.split("+")[0]):
                # Another version that is supported, whose requirements may be others.
                continue
            for text in distribution.requires or []:
                requirement = Requirement(text)
                needed = canonicalize_name(requirement.name)
                if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
                    continue
                if needed not in known and needed not in (*TRIPLE, "triton") and not needed.startswith(("nvidia-", "cuda-")):
                    loose.append(f"{name} needs {requirement}")
    assert loose == []


def test_pre_commit_uses_the_pinned_tools() -> None:
    text = (ROOT / ".pre-commit-config.yaml").read_text()
    entries = re.findall(r"^ *entry: (.*)$", text, re.MULTILINE)
    assert entries
    assert [entry for entry in entries if not re.match(r"\.venv/bin/(ruff|mypy)\b", entry)] == []
    assert text.count("repo:") == text.count("repo: local") == 1
    assert {"ruff", "mypy"} <= set(pins("dev.txt"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel named by JAGGED_WHEEL, or one built from a copy of the checkout."""
    if "JAGGED_WHEEL" in os.environ:
        return Path(os.environ["JAGGED_WHEEL"]).resolve()
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("jagged", "ops", "modules"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    pip("wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(folder), str(source))
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel in it, which sees this one's other packages; returns its bin folder."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=120)
    python = folder / "bin" / "python"
    (site,) = folder.glob("lib/python3*/site-packages")
    # A folder on the path, not a site folder: what is installed editable in this environment stays unseen.
    (site / "outer.pth").write_text("".join(f"{path}\n" for path in sys.path if path.endswith("site-packages")))
    pip("--python", str(python), "install", "--no-deps", "--no-index", str(wheel))
    return python.parent


def pip(*arguments: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode())


def test_the_wheel_holds_the_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        info = f"jagged_rank-{jagged.__version__}.dist-info/"
        names = {name for name in archive.namelist() if not name.startswith(info)}
        assert names == set(sources())
        assert "jagged/py.typed" in names
        for name, path in sources().items():
            assert archive.read(name) == path.read_bytes(), name
        assert archive.read(f"{info}licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
        assert "jagged = jagged.cli:main" in archive.read(f"{info}entry_points.txt").decode()


def test_the_metadata_pins_the_triple(wheel: Path) -> None:
    fields = metadata(wheel)
    assert fields["License-Expression"] == "Apache-2.0"
    assert fields["Version"] == jagged.__version__
    supported = Requirement(f"python{fields['Requires-Python']}").specifier
    assert [minor for minor in range(9, 16) if supported.contains(f"3.{minor}.1")] == [11, 12]
    required = [Requirement(text) for text in fields.get_all("Requires-Dist", [])]
    assert {r.name: str(r.specifier) for r in required if r.name in TRIPLE} == {n: f"=={v}" for n, v in TRIPLE.items()}
    imported = {name.partition(".")[0] for path in sources().values() for name in imports(path)}
    provided = {canonicalize_name(r.name).replace("-", "_") for r in required} | {"triton"}
    assert imported - provided - sys.stdlib_module_names <= {"jagged"}


def imports(path: Path) -> set[str]:
    if path.suffix != ".py":
        return set()
    nodes = list(ast.walk(ast.parse(path.read_text())))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return plain | {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}


def test_the_installed_package_works_away_from_the_checkout(installed: Path, tmp_path: Path) -> None:
    code = (
        "import jagged, jagged.ops, jagged.modules, torch\n"
        "from pathlib import Path\n"
        "for module in (jagged, jagged.ops, jagged.modules): print(Path(module.__file__).parent)\n"
        "offsets = torch.tensor([0, 1, 3])\n"
        "print(jagged.ops.jagged_to_dense(torch.tensor([1., 2., 3.]), offsets, 2).tolist())\n"
    )
    home, ops, modules, dense = run([installed / "python", "-c", code], tmp_path).stdout.strip().splitlines()
    assert Path(home).is_relative_to(installed.parent)
    assert (ops, modules) == (f"{home}/ops", f"{home}/modules")
    assert dense == "[[1.0, 0.0], [2.0, 3.0]]"
    assert "recommend" in run([installed / "jagged", "--help"], tmp_path).stdout
    assert run([installed / "jagged", "--version"], tmp_path).stdout.strip() == jagged.__version__


@pytest.mark.parametrize("name", ["ops", "modules"])
def test_a_folder_is_not_imported_under_another_name(name: str) -> None:
    result = run([sys.executable, "-c", f"import {name}"], ROOT, check=False)
    assert result.returncode == 1
    assert f"this package was imported as '{name}'; import it as 'jagged.{name}'" in result.stderr.splitlines()[-1]


def run(command: list[str | Path], folder: Path, *, check: bool = True) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=120, check=False)
    assert result.returncode == 0 or not check, result.stderr
    return result
