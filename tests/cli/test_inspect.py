"""`jagged inspect`: the same as its function shows, and schemas there and back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jagged import cli
from jagged.data import Schema, inspect_table

ROOT = Path(__file__).parents[2]
TABLE = "user_id,item_id,timestamp,click,seen\nann,tea,1700000000,1,tea|milk\nbob,milk,1700000001,0,\nann,milk,1700000002,1,tea\n"


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["jagged", "inspect", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return int(end.value.code or 0)


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("clicks.csv").write_text(TABLE)
    return "clicks.csv"


def test_a_table_is_shown_as_its_function_does(
    table: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, table) == 0
    output = capsys.readouterr()
    assert output == (
        "clicks.csv: 3 rows, 5 columns\n"
        "\n"
        "column     kind       type  distinct    missing  mean length  longest  example\n"
        "user_id    user       text         2          0                        ann\n"
        "item_id    candidate  text         2          0                        tea\n"
        "timestamp  time       text         3          0                        1700000000\n"
        "click      label      text         2          0                        1\n"
        "seen       ids        text         2  1 (33.3%)          1.5        2  tea|milk\n"
        "\n"
        "Counts:\n"
        "  rows of equal user, candidate and time with different labels: 0\n"
        "  rows of a user at the time of another row of theirs: 0\n",
        "",
    )
    assert output.out == f"{inspect_table(table)}\n"


def test_every_word_arrives(table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--label", "user_id", "--label", "item_id", "--candidate", "click", "--history", "seen", "--time", "timestamp"]
    assert run(monkeypatch, table, *words, "--save-schema", "schema.toml") == 0
    expected = inspect_table(table, label=["user_id", "item_id"], candidate="click", history="seen", time="timestamp").schema
    assert Schema.load("schema.toml") == expected
    more = ["--user", "click", "--request", "item_id", "--weight", "timestamp", "--event", "user_id", "--unused", "seen"]
    assert run(monkeypatch, table, *more, "--save-schema", "schema.toml") == 0
    kinds = [column.kind.value for column in Schema.load("schema.toml").columns]
    assert kinds == ["event", "request", "weight", "user", "unused"]
    assert run(monkeypatch, table, "--ids", "click", "--numbers", "timestamp", "--save-schema", "schema.toml") == 0
    assert [column.kind.value for column in Schema.load("schema.toml").columns] == ["user", "candidate", "number", "id", "ids"]


def test_a_saved_schema_shows_the_same(table: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, table, "--history", "seen", "--numbers", "timestamp", "--save-schema", "schema.toml") == 0
    first = capsys.readouterr()
    assert Path("schema.toml").read_text() == (
        "[columns]\n"
        '"user_id" = { kind = "user" }\n'
        '"item_id" = { kind = "candidate" }\n'
        '"timestamp" = { kind = "number" }\n'
        '"click" = { kind = "label" }\n'
        '"seen" = { kind = "ids", table = "item_id", separator = "|" }\n'
    )
    assert run(monkeypatch, table, "--schema", "schema.toml") == 0
    assert capsys.readouterr() == first


@pytest.mark.parametrize(
    ("delimiter", "option"), [(";", []), ("\t", []), ("|", []), ("^", ["^"]), ("\t", ["\t"]), ("\t", [r"\t"])]
)
def test_other_delimiters(
    delimiter: str, option: list[str], table: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = TABLE.replace("|", "/").replace(",", delimiter)
    assert run(monkeypatch, table, "--unused", "seen") == 0
    expected = capsys.readouterr().out
    Path("clicks.csv").write_text(text)
    assert run(monkeypatch, table, "--unused", "seen", *[word for one in option for word in ("--delimiter", one)]) == 0
    assert capsys.readouterr().out.replace("tea/milk", "tea|milk") == expected


def test_a_file_of_another_name_needs_its_format(
    table: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(table).rename("clicks")
    assert run(monkeypatch, "clicks", "--format", "csv") == 0
    assert capsys.readouterr().out.startswith("clicks: 3 rows, 5 columns\n")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            ["--label", "buy"],
            "--label 'buy': found the columns ['user_id', 'item_id', 'timestamp', 'click', 'seen'], expected a column 'buy'",
        ),
        (
            ["--user", "click", "--time", "click"],
            "--time 'click': found the column named as user too, expected one kind for a column",
        ),
        (["--schema", "none.toml"], "none.toml: cannot be read: No such file or directory"),
        (
            ["--schema", "clicks.csv"],
            "clicks.csv: found no TOML (Expected '=' after a key in a key/value pair (at line 1, column 8)), expected a table "
            "[columns]",
        ),
        (
            ["--schema", "other.toml"],
            "--schema: found the column 'colour', expected those of clicks.csv: "
            "['user_id', 'item_id', 'timestamp', 'click', 'seen']",
        ),
        (
            ["--schema", "wrong.toml"],
            "wrong.toml: schema, column 'click': found kind 'colour', expected id, ids, number, numbers, label, weight, "
            "time, user, request, candidate, event, unused",
        ),
        (
            ["--save-schema", "clicks.csv"],
            "clicks.csv: found a file that holds no schema, expected a schema or no file; name another file",
        ),
        (["--save-schema", "no/s.toml"], "no/s.toml: could not be written: No such file or directory; name another file"),
        (["--delimiter", "ab"], "--delimiter 'ab': found no delimiter, expected one ASCII character, no quote and no line break"),
    ],
)
def test_what_a_user_can_mend_is_one_line(
    options: list[str], expected: str, table: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("other.toml").write_text('[columns]\ncolour = { kind = "id" }\n')
    Path("wrong.toml").write_text('[columns]\nclick = { kind = "colour" }\n')
    assert run(monkeypatch, table, *options) == 2
    assert capsys.readouterr() == ("", f"jagged: {expected}\n")
    assert Path(table).read_text() == TABLE


def test_a_malformed_table_is_told_with_its_line(
    table: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(table).write_text("user_id,item_id\n1\n")
    assert run(monkeypatch, table) == 2
    assert capsys.readouterr() == (
        "",
        f"jagged: {os.getcwd()}/clicks.csv:2: found 1 fields in '1', expected 2 as in the header\n",
    )


def test_torch_is_not_needed(table: str) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from jagged.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules)\n"
    )
    output = subprocess.run(
        [sys.executable, "-c", code, "inspect", table], capture_output=True, text=True, timeout=120, check=True
    )
    assert output.stderr == ""
    assert output.stdout.splitlines()[-1] == "0 False"
