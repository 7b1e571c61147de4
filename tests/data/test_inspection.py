"""What is shown of a table: figures of columns, odd values with their places, counts of what may leak."""

from __future__ import annotations

import datetime
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jagged.data import Column, DataError, Dataset, Kind, Schema, inspect_table
from jagged.data.inspection import OddValues
from jagged.data.schema import SINGLE

ROOT = Path(__file__).parents[2]
ODD = """\
user,item,time,click,price,weight,hist,const,nothing,country
1,a,1700000000,0,1.5,1,a|b,k,,NA
2,b,1700000001,1,many,1,a,k,,DE
,c,1700000002,2,2.5,1,,k,,DE
3, a ,1700000003000,0,NA,-1,b||a,k,,DE
2,b,1700000001,1,many,1,a,k,,DE
2,b,1700000001,0,3.5,1,a,k,,DE
4,a,2023-11-14,-1,4.5,1,a,k,,DE
5,a,soon,0,few,1,a,k,,DE
6,a,1700000009,0,inf,1,a,k,,DE
"""


@pytest.fixture
def odd_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd.csv").write_text(ODD)
    return Path("odd.csv")


def test_what_is_shown_of_a_table_with_odd_values(odd_table: Path) -> None:
    assert str(inspect_table(odd_table, label="click")) == (
        "odd.csv: 9 rows, 10 columns\n"
        "\n"
        "column   kind         type  distinct     missing  mean length  longest  example\n"
        "user     user         text         6   1 (11.1%)                        1\n"
        "item     candidate    text         4           0                        a\n"
        "time     time         text         6           0                        1700000000\n"
        "click    label        text         4           0                        0\n"
        "price    number       text         4   1 (20.0%)                        1.5\n"
        "weight   weight       text         2           0                        1\n"
        "hist     ids of item  text         2   1 (11.1%)          1.4        3  a|b\n"
        "const    id           text         1           0                        always k\n"
        "nothing  id           text         0  9 (100.0%)                        no value\n"
        "country  id           text         2           0                        NA\n"
        "\n"
        "Odd:\n"
        "  user: 1 value is missing: null at odd.csv:4; expected a user in every row\n"
        "  item: 1 value has blanks around: ' a ' at odd.csv:5; expected ids without, as such are others\n"
        "  time: 1 value is no time: 'soon' at odd.csv:9; expected a whole number or an ISO 8601 time\n"
        "  time: 1 value is in milliseconds: '1700000003000' at odd.csv:5; expected one way for all, as the 6 in seconds\n"
        "  time: 1 value is written as a calendar time without a zone: '2023-11-14' at odd.csv:8; expected one way for all, as\n"
        "    the 6 in seconds\n"
        "  click: 2 values are outside of 0 to 1: '2' at odd.csv:4, '-1' at odd.csv:8; expected 0, 1 or a number between\n"
        "  price: 4 values are no numbers: 'many' at odd.csv:3, 'many' at odd.csv:6, 'few' at odd.csv:9 and 1 more; expected a\n"
        "    finite number\n"
        "  weight: 1 value is negative: '-1' at odd.csv:5; expected a weight of 0 or more\n"
        "  hist: 1 value has elements that are missing or no ids: 'b||a' at odd.csv:5\n"
        "  1 row is equal to an earlier one in all columns: odd.csv:6 as odd.csv:3\n"
        "\n"
        "Counts:\n"
        "  rows of equal user, candidate and time with different labels: 3\n"
        "  rows of a user at the time of another row of theirs: 3"
    )


def test_figures_are_attributes(odd_table: Path) -> None:
    inspection = inspect_table(odd_table, label="click")
    assert inspection.rows == 9
    figures = inspection.columns["hist"]
    assert (figures.present, figures.missing, figures.longest, figures.distinct, figures.is_exact) == (8, 1, 3, 2, True)
    assert figures.mean_length == 11 / 8
    assert inspection.schema["hist"] == Column("hist", Kind.IDS, table="item", separator="|")
    first, *_, last = inspection.odd
    assert first == OddValues("user", "are missing", 1, (("odd.csv:4", "null"),), "a user in every row")
    assert last == OddValues(None, "are equal to an earlier one in all columns", 1, (("odd.csv:6", "as odd.csv:3"),))
    assert inspection.leaks == {
        "rows of equal user, candidate and time with different labels": 3,
        "rows of a user at the time of another row of theirs": 3,
    }


def test_a_schema_is_a_file_or_an_object_and_words_win_over_it(odd_table: Path) -> None:
    inferred = inspect_table(odd_table)
    inferred.schema.save("schema.toml")
    assert str(inspect_table(odd_table, "schema.toml")) == str(inspect_table(odd_table, inferred.schema)) == str(inferred)
    Path("schema.toml").write_text('[columns]\nprice = { kind = "id" }\nuser = { kind = "id" }\n')
    schema = inspect_table(odd_table, Path("schema.toml"), user="user", label=["click"]).schema
    assert {column.name: column.kind.value for column in schema.columns} == {
        "user": "user", "item": "unused", "time": "unused", "click": "label", "price": "id", "weight": "unused", "hist": "unused",
        "const": "unused", "nothing": "unused", "country": "unused",
    }  # fmt: skip


def test_a_folder_says_what_it_leaves_out_and_which_file_holds_what_is_odd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for day, user in ((1, ""), (2, "ann")):
        (tmp_path / f"table/day={day}").mkdir(parents=True)
        (tmp_path / f"table/day={day}/part.csv").write_text(f"user,item\n{user},a\n")
    (tmp_path / "table/notes.md").write_text("notes")
    assert str(inspect_table("table")) == (
        "table: 2 rows, 3 columns\n"
        "\n"
        "column  kind       type  distinct    missing  example\n"
        "user    user       text         1  1 (50.0%)  only ann\n"
        "item    candidate  text         1          0  always a\n"
        "day     id         text         2          0  1\n"
        "\n"
        "Odd:\n"
        "  user: 1 value is missing: null at day=1/part.csv:2; expected a user in every row\n"
        "\n"
        "Left out:\n"
        "  notes.md: no suffix of a table (.md)"
    )


def test_a_typed_table_of_every_kind_of_values() -> None:
    day = datetime.datetime(2024, 1, 1)
    table = pa.table(
        {
            "user_id": pa.array([1.0, 2.5, None, 4.0]),
            "ts": pa.array([day, day, day, None], pa.timestamp("ns")),
            "history": pa.array([["a"], [], None, ["b", None]]),
            "vector": pa.array([[1.0, float("nan")]] * 4, pa.list_(pa.float32(), 2)),
            "struct": [{"a": 1}] * 4,
            "map": pa.array([[("a", 1)]] * 4, pa.map_(pa.string(), pa.int64())),
            "bytes": [b"x\xff"] * 4,
            "nested": [[[1]]] * 4,
            "score": [float("inf"), 1.0, float("nan"), None],
            "colour": pa.array(["red", "red", "blue", "red"]).dictionary_encode(),
            'quo"te': [1, 1, 1, 1],
        }
    )
    assert str(inspect_table(table)) == (
        "Table: 4 rows, 11 columns\n"
        "\n"
        "column   kind     type              distinct    missing  mean length  longest  example\n"
        "user_id  number   double                   3  1 (25.0%)                        1.0\n"
        "ts       time     timestamp[ns]            1  1 (25.0%)                        only 2024-01-01 00:00:00\n"
        "history  ids      list of string           2  1 (25.0%)          1.0        2  [a]\n"
        "vector   numbers  list of float            1          0          2.0        2  [1.0, nan]\n"
        "struct   unused   struct<a: int64>         1          0                        always {'a': 1}\n"
        "map      unused   map<str...int64>         1          0                        always {a=1}\n"
        "bytes    unused   binary                   1          0                        always x\\xFF\n"
        "nested   unused   list of... int64         1          0                        always [[1]]\n"
        "score    number   double                   1  2 (66.7%)                        only 1.0\n"
        "colour   id       string                   2          0                        red\n"
        'quo"te   number   int64                    1          0                        always 1\n'
        "\n"
        "Odd:\n"
        "  ts: 1 value is missing: null at Table:row 3; expected a time in every row\n"
        "  history: 1 value has elements that are missing or no ids: [b, NULL] at Table:row 3\n"
        "  vector: 4 values have elements that are missing or no numbers: [1.0, nan] at Table:row 0, [1.0, nan] at Table:row 1,\n"
        "    [1.0, nan] at Table:row 2 and 1 more\n"
        "  score: 1 value is no number: inf at Table:row 0; expected a finite number"
    )


def test_ids_that_are_none() -> None:
    table = pa.table({"user": [1.0, 2.5], "item": [3, 9], "long": ["x" * 1025, "y"], "l": [[1, 2], [3]], "w": [[1.0, 2.0], []]})
    schema = Schema(
        (
            Column("user", Kind.USER),
            Column("item", Kind.CANDIDATE, encoding="range", size=5),
            Column("long", Kind.ID, encoding="hash", size=100),
            Column("l", Kind.IDS, weights="w"),
            Column("w", Kind.NUMBERS),
        )
    )
    assert str(inspect_table(table, schema)).splitlines()[2:] == [
        "column  kind                type            distinct  missing  mean length  longest  example",
        "user    user                double                 1        0                        always 1.0",
        "item    candidate, range 5  int64                  1        0                        always 3",
        f"long    id, hash 100        string                 2        0                        {'x' * 16}...{'x' * 16}",
        "l       ids                 list of int64          3        0          1.5        2  [1, 2]",
        "w       numbers             list of double         2        0          1.0        2  [1.0, 2.0]",
        "",
        "Odd:",
        "  user: 1 value is no id: 2.5 at Table:row 1; expected a whole number or a text",
        "  item: 1 value is outside of the range: 9 at Table:row 1; expected 0 to 4",
        f"  long: 1 value is longer than 1024 bytes: '{'x' * 19}...{'x' * 18}' at Table:row 0; expected shorter",
        "    ids",
        "  l: 1 value is of another length than its weights in w: [3] at Table:row 1; expected a weight for each id",
    ]


def test_no_line_is_wider_than_a_page(tmp_path: Path) -> None:
    table = pa.table(
        {
            "a" * 70: ["x" * 500, "line\nbreak"],
            "user_id": ["", None],
            "history": [list(range(1000))] * 2,
            "movie_id": [[1]] * 2,
            "struct": [{"one": 1, "two": 2, "three": 3}] * 2,
        }
    )
    folder = tmp_path / ("long" * 50)
    folder.mkdir()
    pq.write_table(table, folder / "a.parquet")
    lines = str(inspect_table(folder, ids="history")).splitlines()
    assert max(len(line) for line in lines) <= 120
    assert lines[0].startswith(str(tmp_path)[:20])
    assert [line.split()[0] for line in lines if line[:1] == "a"] == ["aaaaaaaaaaaaa...aaaaaaaaaaaa"]


def test_distinct_values_are_counted_or_estimated() -> None:
    inspection = inspect_table(pa.table({"few": np.arange(40_000), "many": np.arange(40_000) % 7}))
    assert [(figures.distinct, figures.is_exact) for figures in inspection.columns.values()] == [(40_000, True), (7, True)]
    many = inspect_table(pa.table({"many": np.arange(200_000)})).columns["many"]
    assert not many.is_exact
    assert abs(many.distinct - 200_000) < 20_000


def test_equal_rows_are_counted_with_their_first_places() -> None:
    rows = [1, 2, 1, 3, 2, 1, None, None, 4, 4]
    (odd,) = inspect_table(pa.table({"a": rows, "b": [[row] for row in rows], "c": ["x"] * 10})).odd[-1:]
    assert odd.count == 5
    assert odd.first == (
        ("Table:row 5", "as Table:row 0"),
        ("Table:row 4", "as Table:row 1"),
        ("Table:row 7", "as Table:row 6"),
    )
    assert inspect_table(pa.table({"a": [1, 2], "b": [2, 1]})).odd == []


def test_a_million_would_be_read_in_bounded_memory(tmp_path: Path) -> None:
    """A tenth of a million rows of twelve columns, in a process of its own; the memory of a million is 300 MiB."""
    rng, rows = np.random.default_rng(0), 100_000
    columns = {
        "user_id": rng.integers(0, 20_000, rows),
        "item_id": rng.integers(0, 10_000, rows).astype(str),
        "timestamp": 1_700_000_000 + rng.integers(0, 10**7, rows),
        "click": rng.integers(0, 2, rows),
        "is_vip": rng.integers(0, 2, rows) > 0,
        **{f"price_{i}": rng.random(rows) for i in range(4)},
        **{f"type_{i}_id": rng.integers(0, 50, rows) for i in range(3)},
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    code = (
        "import resource, sys\n"
        "import duckdb, numpy, pyarrow.parquet, jagged.data.inspection\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = peak()\n"
        "inspection = jagged.data.inspection.inspect_table(sys.argv[1], progress=False)\n"
        "print(inspection.rows, len(inspection.columns), (peak() - before) >> 10)\n"
    )
    call = [sys.executable, "-c", code, str(tmp_path / "a.parquet")]
    output = subprocess.run(call, capture_output=True, text=True, cwd=ROOT, timeout=120, check=True).stdout
    found, columns_found, mebibytes = map(int, output.split())
    assert (found, columns_found) == (rows, 12)
    assert mebibytes < 400


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"label": "buy"}, "label='buy': found the columns ['a', 'b'], expected a column 'buy'"),
        ({"schema": Schema((Column("c", Kind.ID),))}, "schema: found the column 'c', expected those of Table: ['a', 'b']"),
        ({"schema": "none.toml"}, "none.toml: cannot be read: No such file or directory"),
        (
            {"history": "b"},
            "column 'b': found the type 'int64' for kind ids, expected a list of ids or numbers, or text of such lists; "
            "name another kind",
        ),
    ],
)
def test_what_does_not_fit_the_table_is_refused(
    arguments: dict[str, object], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=f"^{re.escape(expected)}$"):
        inspect_table(pa.table({"a": [1], "b": [2]}), **arguments)  # type: ignore[arg-type]


words = st.sampled_from(
    ["", "NA", "\\N", "-", "nan", "inf", "1e999", "007", "1", "0", "1.5", "-3", "1_0", "0x1", "9" * 25, "2024-01-01",
     "2024-13-45", "1700000000", "2024-01-01T00:00:00+99:99", "[1, 2]", "[", "[]", "[[1]]", "['a'",
     '["a", {"b": 1}]', "{1}", "a|b", "|", "a b", "1 2", "1,2", "true", "'", '"', "\\"]
)  # fmt: skip
texts = st.none() | words | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=6)
names = st.sampled_from(
    ["user_id", "item", "time", "created_at", "click", "history", "genres", "price", "weight", "event", "x'y\"z"]
)


@settings(max_examples=40)
@given(
    st.lists(names, unique=True, min_size=1, max_size=4).flatmap(
        lambda chosen: st.fixed_dictionaries({name: st.lists(texts, min_size=3, max_size=3) for name in chosen})
    ),
    st.data(),
)
def test_any_text_is_shown(columns: dict[str, list[str | None]], data: st.DataObject) -> None:
    """Whatever the values are, and whatever kinds a user makes of them: every value fits, is missing or is odd."""
    table = pa.table({name: pa.array(values, pa.string()) for name, values in columns.items()})
    kinds = {name: data.draw(st.sampled_from(list(Kind))) for name in columns}
    singles = [kind for kind in kinds.values() if kind in SINGLE]
    assume(len(singles) == len(set(singles)))
    separators = {name: data.draw(st.sampled_from([None, "|", " ", "'", "\\", "::"])) for name in columns}
    schema = Schema(
        tuple(
            Column(name, kind, separator=separators[name] if kind in (Kind.IDS, Kind.NUMBERS) else None)
            for name, kind in kinds.items()
        )
    )
    inspections = [inspect_table(table, schema)]
    try:
        inspections.append(inspect_table(table))
    except DataError as error:
        # Of such a column nobody can tell whether it has numbers or lists of two ids. All that stands in it is like that.
        assert "found a decimal comma in the column" in str(error)  # noqa: PT017 - most tables raise nothing
        present = [[value for value in of if value and value not in ("NA", "\\N")] for of in columns.values()]
        assert any(of and all(re.fullmatch(r"\s*[-+]?\d*,\d+\s*", value) for value in of) for of in present)
    for inspection in inspections:
        assert max(map(len, str(inspection).splitlines())) <= 120
        for figures in inspection.columns.values():
            unfit = [odd.count for odd in inspection.odd if odd.column == figures.column.name and odd.what.startswith("are no ")]
            if figures.column.kind is not Kind.UNUSED:
                assert figures.present + figures.missing + sum(unfit) == 3


ISO = "write dates as 2024-12-31"
DATES = [
    (["12/31/2024", "01/02/2024"], f"dates have the month first, as '12/31/2024': {ISO}, in pandas by to_datetime(column, format="
     '"%m/%d/%Y")'),
    (["1/2/24", "31/12/24"], f"dates have the day first, as '31/12/24': {ISO}, in pandas by to_datetime(column, format="
     '"%d/%m/%y")'),
    (["31.12.2024", "1.2.2024"], f"dates have the day first, as '31.12.2024': {ISO}, in pandas by to_datetime(column, format="
     '"%d.%m.%Y")'),
    (["12-31-2024 10:00 PM", ""], f"dates have the month first, as '12-31-2024 10:00 PM': {ISO}"),
    (["01/02/2024", "03/04/2024"], f"no date tells whether its day or its month comes first: find out, and {ISO}"),
    (
        ["31/12/2024", "12/31/2024"],
        f"some dates have the day first, as '31/12/2024', and some the month, as '12/31/2024': {ISO}",
    ),
    (["2024/12/31", "2024/1/2"], ISO),
]  # fmt: skip


@pytest.mark.parametrize(("dates", "hint"), DATES)
@pytest.mark.parametrize("name", ["when", "booked"])
def test_dates_in_another_order_are_times_with_a_hint_and_refused(tmp_path: Path, name: str, dates: list[str], hint: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(f"user_id,item_id,{name}\n" + "".join(f"{i},a,{date}\n" for i, date in enumerate(dates)))
    inspection = inspect_table(path)
    assert inspection.schema[name].kind is Kind.TIME
    odd = next(one for one in inspection.odd if one.what == "are no times")
    assert odd.expected == f"a whole number or an ISO 8601 time; {hint}"
    with pytest.raises(DataError) as caught:
        Dataset.from_table(path, progress=False)
    assert str(caught.value) == (
        f"{path}:2: found {dates[0]!r} in the column {name!r}, expected an ISO 8601 time or a whole number; {hint}"
    )


def test_dates_in_another_order_among_others_and_beside_a_time(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("user_id,item_id,when\n1,a,2024-12-30\n2,b,12/31/2024\n")
    with pytest.raises(DataError) as caught:
        Dataset.from_table(path, progress=False)
    expected = "expected an ISO 8601 time without a zone, as the first"
    assert str(caught.value) == f"{path}:3: found '12/31/2024' in the column 'when', {expected}; {DATES[0][1]}"
    # Where there is a time, other dates are no feature, as dates are that are written well.
    path.write_text("user_id,item_id,when,birthday\n1,a,5,12/31/2024\n2,b,6,12/30/2024\n")
    schema = Dataset.from_table(path, progress=False).schema
    assert {column.name: column.kind for column in schema.columns} == {
        "user_id": Kind.USER, "item_id": Kind.CANDIDATE, "when": Kind.TIME,
    }  # fmt: skip
