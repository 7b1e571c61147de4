"""Tables from files, folders and memory: the same rows whatever holds them, every row's place, and what is refused."""

from __future__ import annotations

import bz2
import datetime
import gzip
import os
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jagged.data import DataError
from jagged.data.sources import Table, identifier, open_table
from jagged.data.tabular import csv_layout


class Frame:
    """What frames of pandas, polars and DuckDB have in common."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self.table.__arrow_c_stream__(requested_schema)


def rows(source: Any, **options: Any) -> list[tuple[Any, ...]]:
    with open_table(source, **options) as table:
        return table.sql("SELECT * FROM rows ORDER BY rowid")


def places(source: Any, **options: Any) -> list[str]:
    with open_table(source, **options) as table:
        return [table.place(row) for row in range(table.num_rows)]


def refusal(source: Any, root: Path, **options: Any) -> str:
    with pytest.raises(DataError) as error, open_table(source, **options):
        pass
    return str(error.value).replace(f"{root}{os.sep}", "")


def write(path: Path, text: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


TABLE = pa.table(
    {
        "user": [1, 2, 2, None],
        "item": pa.array(["a", None, "", "d"]).dictionary_encode(),
        "seen": pa.array([["x"], [], None, ["y", None]], pa.list_(pa.string())),
        "price": [1.5, float("nan"), None, -0.0],
        "time": pa.array([1, 2, 3, None], pa.timestamp("ms", "UTC")),
        "none": pa.nulls(4),
    }
)


def test_the_same_rows_whatever_holds_them(tmp_path: Path) -> None:
    for groups, name in ((4, "one.parquet"), (1, "many.parquet")):
        pq.write_table(TABLE, tmp_path / name, row_group_size=groups)
    expected = repr(rows(TABLE))
    assert len(rows(TABLE)) == 4
    batches = TABLE.to_batches(max_chunksize=2)
    for source in (
        tmp_path / "one.parquet",
        str(tmp_path / "many.parquet"),
        Frame(TABLE),
        pa.RecordBatchReader.from_batches(TABLE.schema, batches),
        TABLE.combine_chunks().to_batches()[0],
    ):
        assert repr(rows(source)) == expected


def test_a_relation_of_duckdb_is_a_source() -> None:
    connection = duckdb.connect()
    relation = connection.sql("SELECT range AS user, range % 3 AS item FROM range(5)")
    assert rows(relation) == [(i, i % 3) for i in range(5)]


def test_a_frame_is_left_unchanged() -> None:
    before = pa.table(TABLE.to_pydict(), schema=TABLE.schema)
    rows(Frame(TABLE))
    assert repr(TABLE.to_pydict()) == repr(before.to_pydict())


@pytest.mark.parametrize("delimiter", [",", "\t", ";", "|"])
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_csv_is_cut_as_its_first_lines_say(tmp_path: Path, delimiter: str, ending: str) -> None:
    lines = [["user", "title", "x"], ["1", '"a,b;c|d\te"', "2"], ["", '""', "NA"], ["3", '"say ""so"""', " 4 "]]
    path = write(tmp_path / "a.csv", ending.join(delimiter.join(line) for line in lines) + ending)
    assert csv_layout(path).delimiter == delimiter
    assert rows(path) == [("1", "a,b;c|d\te", "2"), (None, "", "NA"), ("3", 'say "so"', " 4 ")]
    assert rows(path, delimiter=delimiter) == rows(path)


def test_a_quoted_field_may_hold_line_breaks_and_every_row_has_its_line(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", '\ufeffuser,title\n\n1,"a\n\nb"\n\n2,c\n3,"d\n"')
    assert rows(path) == [("1", "a\n\nb"), ("2", "c"), ("3", "d\n")]
    assert places(path) == [f"{path}:{line}" for line in (3, 7, 8)]


@given(
    st.lists(
        st.tuples(
            *[st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs"), include_characters='\n",'), max_size=5)] * 2
        ),
        max_size=8,
    )
)
def test_what_pyarrow_writes_is_read_back(tmp_path_factory: pytest.TempPathFactory, values: list[tuple[str, str]]) -> None:
    path = tmp_path_factory.mktemp("csv") / "a.csv"
    table = pa.table(
        {"a": [a for a, _ in values], "b": [b for _, b in values]}, pa.schema([("a", pa.string()), ("b", pa.string())])
    )
    pa_csv.write_csv(table, path, pa_csv.WriteOptions(quoting_style="all_valid"))
    assert rows(path) == values


@pytest.mark.parametrize("blocks", [1, 7, 64])
def test_blocks_do_not_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocks: int) -> None:
    text = "user,title\n" + "".join(f'{i},"{"x" * (i % 9)}\n{i}"\n' for i in range(40))
    path = write(tmp_path / "a.csv", text)
    whole, where = rows(path), places(path)
    monkeypatch.setattr("jagged.data.files.BLOCK_BYTES", blocks)
    assert (rows(path), places(path)) == (whole, where)
    assert where[:3] == [f"{path}:{line}" for line in (2, 4, 6)]


def test_compressed_csv(tmp_path: Path) -> None:
    text = b"user,item\n1,2\n"
    for suffix, packed in (
        (".gz", gzip.compress(text)),
        (".bz2", bz2.compress(text)),
        (".zst", pa.compress(text, "zstd", asbytes=True)),
    ):
        assert rows(write(tmp_path / f"a.csv{suffix}", packed)) == [("1", "2")]


def test_a_folder_with_partitions_and_what_it_leaves_out(tmp_path: Path) -> None:
    root = tmp_path / "table"
    for day, hour, values in (("2024-01-02", "1", [3]), ("2024-01-01", "__HIVE_DEFAULT_PARTITION__", [1, 2]), ("a%20b", "2", [])):
        folder = root / f"day={day}" / f"hour={hour}"
        folder.mkdir(parents=True)
        pq.write_table(pa.table({"user": pa.array(values, pa.int64())}), folder / "part-0.parquet")
    write(root / "_SUCCESS", "")
    write(root / "README", "hello")
    write(root / "a.parquet.crc", "hello")
    write(root / "_temporary/b.parquet", "hello")
    (root / "gone.parquet").symlink_to(root / "nowhere")
    os.mkfifo(root / "pipe.parquet")
    with open_table(root) as table:
        assert table.sql("SELECT * FROM rows ORDER BY rowid") == [
            (1, "2024-01-01", None),
            (2, "2024-01-01", None),
            (3, "2024-01-02", "1"),
        ]
        assert table.place(2) == f"{root}/day=2024-01-02/hour=1/part-0.parquet:row 1"
        assert table.left_out == {
            "README": "no suffix of a table (none)",
            "_SUCCESS": "hidden",
            "_temporary": "hidden",
            "a.parquet.crc": "no suffix of a table (.crc)",
            "gone.parquet": "a broken link",
            "pipe.parquet": "no file",
        }


def test_numbers_of_files_take_the_wider_type(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": pa.array([1], pa.int32())}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"a": pa.array([2**40], pa.int64())}), tmp_path / "2.parquet")
    with open_table(tmp_path) as table:
        assert (table.types, table.sql("FROM rows")) == ({"a": pa.int64()}, [(1,), (2**40,)])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a.csv: found an empty file, expected a header and rows"),
        ("a,b\n1,2\n3\n", "a.csv:3: found 1 fields in '3', expected 2 as in the header"),
        ('a,b\n1,2\n"x\ny",2,3\n', "a.csv:3: found 3 fields in 'x\\ny,2,3', expected 2 as in the header"),
        (
            'a,b\n1,x"y"\n',
            'a.csv:2: found a stray quote in \'1,x"y"\', expected fields as abc or "abc"; '
            'write a quote inside a quoted field as ""',
        ),
        ('a,b\n1,"x\n2,y\n', 'a.csv:2: found a quote that is not closed, expected fields as abc or "abc"'),
        ("a,a\n1,2\n", "a.csv:1: found the column 'a' 2 times, expected it once"),
        ("a,b\n1,\x00\n", "a.csv:2: found the control character 0x00, expected text without control characters"),
        (
            b"a,b\n1,2\n1,\xff\n",
            "a.csv:3: found the byte 0xff, which is not UTF-8, expected UTF-8 text; convert the file (iconv -t utf-8)",
        ),
        ("rowid,b\n1,2\n", "a.csv: found a column 'rowid', expected another name, which numbers the rows here; rename it"),
    ],
)
def test_what_a_csv_file_is_refused_for(tmp_path: Path, text: str | bytes, message: str) -> None:
    assert refusal(write(tmp_path / "a.csv", text), tmp_path) == message


def test_what_else_is_refused(tmp_path: Path) -> None:
    tables = "a name ending in .csv, .tsv (each also .gz, .bz2, .zst, .lz4) or .parquet"
    write(tmp_path / "empty/.hidden", "")
    (tmp_path / "two").mkdir()
    pq.write_table(pa.table({"a": [1]}), tmp_path / "two/1.parquet")
    pq.write_table(pa.table({"b": [1]}), tmp_path / "two/2.parquet")
    (tmp_path / "types").mkdir()
    pq.write_table(pa.table({"a": [1]}), tmp_path / "types/1.parquet")
    pq.write_table(pa.table({"a": ["x"]}), tmp_path / "types/2.parquet")
    write(tmp_path / "mixed/1.csv", "a\n1\n")
    pq.write_table(pa.table({"a": [1]}), tmp_path / "mixed/2.parquet")
    assert refusal("", tmp_path) == "the path '': found nothing, expected a file or a folder"
    assert refusal(tmp_path / "no.csv", tmp_path) == "no.csv: found no file or folder of that name, expected a table"
    assert (
        refusal(write(tmp_path / "a.dat", ""), tmp_path)
        == f"a.dat: found the unknown suffix '.dat', expected {tables}; name the format (format=...)"
    )
    assert (
        refusal(tmp_path / "empty", tmp_path)
        == f"empty: found a folder without tables (left out: .hidden: hidden), expected files with {tables}"
    )
    assert (
        refusal(tmp_path / "mixed", tmp_path)
        == "mixed: found files of several formats (csv, parquet), expected one format; name it (format=...)"
    )
    assert refusal(tmp_path / "two", tmp_path) == "two/2.parquet: found the columns ['b'], expected those of two/1.parquet: ['a']"
    assert (
        refusal(tmp_path / "types", tmp_path)
        == "types/2.parquet: found the column 'a' of type string, expected int64 as in types/1.parquet; cast the column"
    )
    assert refusal(write(tmp_path / "b.parquet", b"PAR1"), tmp_path).startswith("b.parquet: found ArrowInvalid: ")
    assert (
        refusal([1, 2], tmp_path)
        == "list: found an object of type builtins.list, expected a path, an Arrow table, or a frame of pandas 2.2 or later, "
        "polars or DuckDB (anything with __arrow_c_stream__)"
    )
    assert refusal(pa.table([[1], [2]], names=["a", "a"]), tmp_path) == "Table: found the column 'a' 2 times, expected it once"


def test_a_damaged_file_is_a_named_error_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "work"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "work").mkdir()
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"a": list(range(10_000))}), path, write_page_checksum=True, compression="none", use_dictionary=False)
    damaged = bytearray(path.read_bytes())
    damaged[2_000] ^= 1
    path.write_bytes(damaged)
    assert refusal(path, tmp_path).startswith("a.parquet: found OSError: ")
    assert list((tmp_path / "work").iterdir()) == []


def test_nothing_beside_the_table_can_be_asked_for(tmp_path: Path) -> None:
    secret = write(tmp_path / "secret.csv", "a\n1\n")
    with open_table(TABLE) as table:
        for query in (f"SELECT * FROM '{secret}'", f"COPY rows TO '{tmp_path / 'out.csv'}'", "INSTALL httpfs"):
            with pytest.raises(duckdb.Error):
                table.sql(query)
    assert not (tmp_path / "out.csv").exists()


def test_names_are_quoted() -> None:
    name = 'a"b; DROP TABLE rows'
    with open_table(pa.table({name: [1]})) as table:
        assert table.sql(f"SELECT {identifier(name)} FROM rows") == [(1,)]
        assert isinstance(table, Table)


def test_dates_and_times_keep_their_values() -> None:
    day = datetime.date(2024, 1, 2)
    table = pa.table({"day": [day], "ns": pa.array([1_700_000_000_000_000_001], pa.timestamp("ns"))})
    with open_table(table) as opened:
        assert opened.sql("SELECT day, epoch_ns(ns) FROM rows") == [(day, 1_700_000_000_000_000_001)]


def test_views_and_dictionaries_become_plain_values() -> None:
    texts = pa.array(["x", "y", None], pa.string_view())
    coded = pa.DictionaryArray.from_arrays(pa.array([0, 1, 0]), texts)
    lists = pa.ListArray.from_arrays(pa.array([0, 1, 1, 3]), coded, mask=pa.array([False, True, False]))
    halves = pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int64(), 2))
    table = pa.table({"text": texts, "coded": coded, "lists": lists, "pairs": halves})
    assert rows(table.slice(1)) == [("y", "y", None, None), (None, "x", ["y", "x"], [3, 4])]


def test_an_index_without_a_name_is_no_column() -> None:
    table = pa.table({"a": [1, 2], "__index_level_0__": [5, 9]})
    with open_table(Frame(table)) as opened:
        assert (list(opened.types), opened.sql("FROM rows")) == (["a"], [(1,), (2,)])


def test_a_frame_with_a_column_of_several_types_is_refused_by_name(tmp_path: Path) -> None:
    class Mixed:
        def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
            raise pa.ArrowTypeError("Expected bytes, got a 'int' object", "Conversion failed for column mixed with type object")

    assert (
        refusal(Mixed(), tmp_path)
        == "Mixed: found 'Conversion failed for column mixed with type object', expected columns of one type each; "
        "cast them, or drop what is no feature"
    )
