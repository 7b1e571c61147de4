"""The documentation runs: examples in docstrings and pages are executed, shell lines and configurations are parsed."""

from __future__ import annotations

import doctest
import importlib
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

from jagged import cli, models
from jagged.config import SECTIONS, load_config

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
# Here the shell lines are run, not only parsed.
RUN_SHELL = ("README.md", "docs/quickstart.md", "docs/guides/table-runs.md", "docs/guides/labels.md")
PACKAGES = {"jagged": "jagged", "ops": "jagged.ops", "modules": "jagged.modules"}
FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    language: str
    line: int
    text: str


def blocks(page: Path, *languages: str) -> list[Block]:
    text = page.read_text()
    found = [Block(m[1], text.count("\n", 0, m.start(2)) + 1, m[2]) for m in FENCE.finditer(text)]
    return [block for block in found if block.language in languages]


def commands(block: Block) -> Iterator[list[str]]:
    """The simple commands of a shell block, as words."""
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line.removeprefix("$ "), comments=True)
        while words:
            end = next((i for i, word in enumerate(words) if word in ("|", "&&", "||", ";", ">", ">>", "<")), len(words))
            yield words[:end]
            words = words[end + 1 :]


def jagged_arguments(words: list[str]) -> list[str] | None:
    """What the command line gets of `jagged ...`, `.venv/bin/jagged ...` or `... -m jagged ...`; None for other commands."""
    if words and Path(words[0]).name == "jagged":
        return words[1:]
    for place in range(len(words) - 1):
        if words[place : place + 2] == ["-m", "jagged"]:
            return words[place + 2 :]
    return None


def pages_with(*languages: str) -> list[Any]:
    return [pytest.param(page, id=str(page.relative_to(ROOT))) for page in PAGES if blocks(page, *languages)]


def write_events(folder: Path) -> None:
    """The files that pages speak of: events of forty users who walk along a ring of twelve items, and impressions of these."""
    items = ["tea", "milk", "shirt", "tie", *(f"item{i}" for i in range(8))]
    users = ["ann", "bob", *(f"u{i}" for i in range(38))]
    rows = ["user_id,item_id,timestamp"]
    for number, user in enumerate(users):
        for step in range(4 + number % 5):
            rows.append(f"{user},{items[(number + step) % len(items)]},{1_700_000_000 + 1000 * number + step}")
    for name in ("events.csv", "histories.csv"):
        (folder / name).write_text("\n".join(rows) + "\n")
    rows = ["request_id,user_id,item_id,timestamp,price,click"]
    for request in range(240):
        for item in range(request % 3 + 1):
            number = (7 * request + item) % 12
            rows.append(f"{request},{users[request % 40]},{items[number]},{1_700_000_000 + 60 * request},{number},{number % 2}")
    (folder / "impressions.csv").write_text("\n".join(rows) + "\n")


def modules_with_examples() -> list[str]:
    found = []
    for folder, package in PACKAGES.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            within = path.relative_to(ROOT / folder).with_suffix("").parts
            if (folder == "jagged" and within[0] in ("ops", "modules")) or ">>> " not in path.read_text():
                continue
            found.append(".".join([package, *within]).removesuffix(".__init__"))
    return found


@pytest.mark.parametrize("name", modules_with_examples())
def test_examples_in_docstrings(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert result.attempted > 0
    assert result.failed == 0


def test_every_public_op_has_an_example() -> None:
    import jagged.ops

    public = {name: getattr(jagged.ops, name) for name in jagged.ops.__all__}
    # Types of options and results are shown by the examples of those who take and return them.
    made = {name: of for name, of in public.items() if isinstance(of, (FunctionType, type)) and not hasattr(of, "_fields")}
    without = [name for name, of in made.items() if ">>> " not in (of.__doc__ or "")]
    assert without == []


# What internals show as Python are signatures.
@pytest.mark.parametrize("page", [page for page in pages_with("python", "pycon") if "internals" not in page.id])
def test_examples_in_pages(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page's blocks share their names and a folder with files, as a reader's would."""
    monkeypatch.chdir(tmp_path)
    write_events(tmp_path)
    # A page may register a model of its own.
    monkeypatch.setitem(SECTIONS, "model", [*SECTIONS["model"]])
    monkeypatch.setattr(models, "_MODELS", dict(models._MODELS))
    names: dict[str, Any] = {"__name__": "__page__"}
    shell = ("bash",) if str(page.relative_to(ROOT)) in RUN_SHELL else ()
    for block in blocks(page, "python", "pycon", *shell):
        at = f"{page.relative_to(ROOT)}:{block.line}"
        if block.language == "python":
            exec(compile("\n" * (block.line - 1) + block.text, page, "exec", dont_inherit=True), names)
        elif block.language == "pycon":
            test = doctest.DocTestParser().get_doctest(block.text, names, at, str(page), block.line - 1)
            assert doctest.DocTestRunner().run(test, clear_globs=False).failed == 0, at
        else:
            for words in commands(block):
                if (arguments := jagged_arguments(words)) is not None:
                    assert not cli.app(arguments, exit_on_error=False, print_error=False), f"{at}: {words}"


@pytest.mark.parametrize("page", pages_with("bash", "sh", "console"))
def test_shell_lines_name_what_exists(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for block in blocks(page, "bash", "sh", "console"):
        for words in commands(block):
            at = f"{page.relative_to(ROOT)}:{block.line}: {shlex.join(words)}"
            if (arguments := jagged_arguments(words)) is not None and arguments[:1] not in ([], ["--help"], ["--version"]):
                assert arguments[0] in cli._COMMANDS, at
                if "--help" not in arguments:
                    # Parses every option, and runs nothing.
                    cli.app.parse_args(arguments, exit_on_error=False, print_error=False)
            elif words[0] == "make":
                assert {word for word in words[1:] if "=" not in word} <= targets, at


@pytest.mark.parametrize("page", pages_with("toml"))
def test_configurations_are_valid(page: Path, tmp_path: Path) -> None:
    for number, block in enumerate(blocks(page, "toml")):
        path = tmp_path / f"{number}.toml"
        path.write_text(block.text)
        load_config(path)


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=lambda page: page.name
)
def test_links_lead_somewhere(page: Path) -> None:
    """Links of the pages outside the site; Sphinx checks its own."""
    targets = re.findall(r"\]\(([^)#]+)", page.read_text())
    assert targets
    assert [target for target in targets if "://" not in target and not (ROOT / target).exists()] == []
