"""Rows with sets of labels from parquet, tables in memory and ARFF."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jagged.data import DataError, MultiLabelRows, label_names_of_table, read_arff, read_label_table

Row = tuple[list[int], dict[int, float]]
ROWS: list[Row] = [([3, 0], {1: 0.5, 7: -2.0}), ([], {0: 1.0}), ([2], {})]
numbers = st.floats(-(2.0**90), 2.0**90, width=32, allow_subnormal=False).filter(bool)
drawn_rows = st.lists(
    st.tuples(st.lists(st.integers(0, 9), unique=True, max_size=4), st.dictionaries(st.integers(0, 12), numbers, max_size=5)),
    max_size=8,
)


def table_of(rows: list[Row], kind: Any = None, values: Any = None) -> pa.Table:
    ids = pa.list_(kind or pa.int64())
    return pa.table(
        {
            "labels": pa.array([labels for labels, _ in rows], ids),
            "features": pa.array([list(features) for _, features in rows], ids),
            "values": pa.array([list(features.values()) for _, features in rows], pa.list_(values or pa.float32())),
        }
    )


def said(rows: MultiLabelRows) -> list[Row]:
    found: list[Row] = []
    for row in range(len(rows)):
        begin, end = rows.feature_offsets[row : row + 2]
        features = dict(zip(rows.feature_ids[begin:end].tolist(), rows.feature_values[begin:end].tolist(), strict=True))
        found.append((rows.labels[rows.label_offsets[row] : rows.label_offsets[row + 1]].tolist(), features))
    return found


@settings(max_examples=40, deadline=None)
@given(rows=drawn_rows, pieces=st.integers(1, 3))
def test_tables_in_memory(rows: list[Row], pieces: int) -> None:
    whole = table_of(rows)
    cuts = np.linspace(0, len(rows), pieces + 1).astype(int)
    found = read_label_table(pa.concat_tables([whole.slice(a, b - a) for a, b in pairwise(cuts)]))
    assert said(found) == rows
    assert found.num_labels == max((label for labels, _ in rows for label in labels), default=-1) + 1
    assert found.num_features == max((feature for _, features in rows for feature in features), default=-1) + 1


@pytest.mark.parametrize("kind", [pa.int32(), pa.uint8(), pa.int64()], ids=str)
def test_parquet_of_several_groups(tmp_path: Path, kind: Any) -> None:
    rows: list[Row] = [([i % 5], {i % 7: float(i + 1)}) for i in range(1000)]
    pq.write_table(table_of(rows, kind, pa.float64()), tmp_path / "rows.parquet", row_group_size=64)
    assert said(read_label_table(tmp_path / "rows.parquet", progress=False)) == rows


def test_lists_that_are_missing_and_tables_without_values() -> None:
    table = pa.table({"tags": pa.array([[1], None], pa.large_list(pa.int64())), "words": [None, [2, 4]]})
    found = read_label_table(table, labels="tags", features="words")
    assert said(found) == [([1], {}), ([], {2: 1.0, 4: 1.0})]
    assert read_label_table(table_of(ROWS), values=None).feature_values.tolist() == [1.0, 1.0, 1.0]
    bare = read_label_table(table_of(ROWS).select(["values", "features"]), labels=None)
    assert said(bare) == [([], features) for _, features in ROWS]
    # What gives its columns as Arrow's stream, as frames of pandas and polars do.
    stream = table_of(ROWS).to_reader()
    assert said(read_label_table(stream)) == ROWS


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 4).flatmap(lambda width: st.lists(st.lists(st.one_of(numbers, st.just(0.0)), min_size=width, max_size=width))),
    st.sampled_from([pa.float32(), pa.float64()]),
    st.integers(1, 3),
    st.booleans(),
)
def test_embeddings(embeddings: list[list[float]], kind: Any, pieces: int, fixed: bool) -> None:
    """Each row has all features, also those of the value 0; lists of fixed size are lists."""
    width = len(embeddings[0]) if embeddings else 0
    lists = pa.array(embeddings, pa.list_(kind, width) if fixed and width else pa.list_(kind))
    whole = pa.table({"labels": pa.array([[i % 3] for i in range(len(lists))], pa.list_(pa.int64())), "text": lists})
    cuts = np.linspace(0, len(lists), pieces + 1).astype(int)
    found = read_label_table(pa.concat_tables([whole.slice(a, b - a) for a, b in pairwise(cuts)]), embeddings="text")
    assert said(found) == [([i % 3], dict(enumerate(row))) for i, row in enumerate(embeddings)]
    assert found.num_features == width


def test_embeddings_that_are_refused() -> None:
    for text, message in (
        (
            [[1.0, 2.0], [1.0]],
            "table:row 2: found 1 numbers, expected 2, as the first row has; give all rows embeddings of one width",
        ),
        ([[1.0], None], "table:row 2: found 0 numbers, expected 1, as the first row has; give all rows embeddings of one width"),
        ([[1.0], [float("inf")]], "table:row 2: found the value inf, expected a finite number of float32; leave the row out"),
        ([["a"]], "table: text: found list<item: string>, expected lists of numbers; write numbers"),
    ):
        with pytest.raises(DataError) as found:
            read_label_table(pa.table({"labels": [[1]] * len(text), "text": text}), embeddings="text")
        assert str(found.value) == message


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"labels": [[1]]}, "table: found the columns ['labels'], expected a column 'features'; name the right one"),
        (
            {"labels": [["a"]], "features": [[1]]},
            "table: labels: found list<item: string>, expected lists of whole numbers; give names, as label_names_of_table finds "
            "them, or number the ids from 0 on",
        ),
        (
            {"labels": [[1]], "features": [["a"]]},
            "table: features: found list<item: string>, expected lists of whole numbers; number the ids from 0 on",
        ),
        (
            {"labels": [1], "features": [[1]]},
            "table: labels: found int64, expected lists of whole numbers, or of text; write a list in each row",
        ),
        (
            {"labels": [[1], [0, -2]], "features": [[1], []]},
            "table:row 2: found the label -2, expected a whole number from 0 to 2147483646; number them from 0 on",
        ),
        (
            {"labels": [[], []], "features": [[1, 2], [3, 1, 3]]},
            "table:row 2: found the feature 3 twice, expected each once; leave one of them out",
        ),
        (
            {"labels": [[], []], "features": [[1], [3, 1]], "values": [[1.0], [1.0]]},
            "table:row 2: found 1 values, expected 2, one for each feature",
        ),
        (
            {"labels": [[], []], "features": [[1], [3, 1]], "values": [[1.0], [1.0, float("nan")]]},
            "table:row 2: found the value nan, expected a finite number of float32; leave the feature out",
        ),
        (
            {"labels": [[], [1, None]], "features": [[1], [3]]},
            "table:row 2: found nothing in the list 'labels', expected numbers alone; leave it out",
        ),
    ],
)
def test_tables_that_are_refused(table: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as found:
        read_label_table(pa.table(table))
    assert str(found.value) == message


TEXTS = ["red", "ä b", " red", "0", "RED", "x" * 300, "a,b", "z", "y", "w"]


@settings(max_examples=40, deadline=None)
@given(
    rows=drawn_rows,
    kind=st.sampled_from([pa.string(), pa.large_string(), pa.string_view(), "encoded"]),
    pieces=st.integers(1, 3),
    embedded=st.booleans(),
)
def test_labels_that_are_text(rows: list[Row], kind: Any, pieces: int, embedded: bool) -> None:
    """Numbered by where they come first they are the rows of a table of these numbers."""
    order = list(dict.fromkeys(label for labels, _ in rows for label in labels))
    is_encoded = kind == "encoded"
    texts = pa.array([[TEXTS[label] for label in labels] for labels, _ in rows], pa.list_(pa.string() if is_encoded else kind))
    if is_encoded:
        texts = pa.ListArray.from_arrays(texts.offsets, texts.values.dictionary_encode())
    numbered = [([order.index(label) for label in labels], features) for labels, features in rows]
    table, ids = (table_of(one) for one in (rows, numbered))
    table = table.set_column(0, "labels", texts)
    options: dict[str, Any] = {}
    if embedded:
        numbers_ = pa.array([[0.5, float(row)] for row in range(len(rows))], pa.list_(pa.float64()))
        table, ids = (one.append_column("of", numbers_) for one in (table, ids))
        options = {"embeddings": "of"}
    step = -(-len(rows) // pieces) or 1
    table = pa.concat_tables([table.slice(0, 0), *(table.slice(begin, step) for begin in range(0, len(rows), step))])
    names = label_names_of_table(table)
    assert names is not None
    assert names.type == pa.large_string()
    assert names.to_pylist() == [TEXTS[label] for label in order]
    found, expected = read_label_table(table, names=names, **options), read_label_table(ids, **options)
    assert said(found) == said(expected)
    assert (found.num_labels, found.num_features) == (len(names), expected.num_features)
    assert label_names_of_table(ids) is None
    # Names may be more, and in another order.
    more = pa.array(["none has it", *reversed(names.to_pylist())], pa.large_string())
    again = read_label_table(table, names=more, **options)
    assert again.num_labels == len(names) + 1
    assert again.labels.tolist() == [len(names) - label for label in found.labels.tolist()]


def test_many_labels_of_a_file_are_text(tmp_path: Path) -> None:
    table = pa.table(
        {"tags": [[f"t{row % 97}", f"u{row % 89}"] for row in range(3000)], "features": [[row % 5] for row in range(3000)]}
    )
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=500)
    names = label_names_of_table(tmp_path / "rows.parquet", labels="tags")
    assert names is not None
    assert names.to_pylist() == list(dict.fromkeys(text for row in table["tags"].to_pylist() for text in row))
    rows = read_label_table(tmp_path / "rows.parquet", labels="tags", names=names)
    texts = np.array(names.to_pylist())[rows.labels].reshape(-1, 2).tolist()
    assert texts == table["tags"].to_pylist()


@pytest.mark.parametrize(
    ("labels", "names", "message"),
    [
        ([["a"], ["b", "c"]], ["a", "b"], "table:row 2: found the label 'c', expected one of the 2 of names; leave it out"),
        (
            [["a"], ["b", "a", "b"]],
            ["a", "b"],
            "table:row 2: found the label 'b' twice, expected each once; leave one of them out",
        ),
        ([["a"], ["b", None]], ["a", "b"], "table:row 2: found nothing in the list 'labels', expected text alone; leave it out"),
        ([["a"]], ["a", "b", "a"], "names: found 'a' twice, expected each label once; leave one of them out"),
        ([[1]], ["a"], "table: labels: found list<item: int64>, expected lists of text, as names are for; leave names out"),
    ],
)
def test_text_that_is_refused(labels: list[Any], names: list[str], message: str) -> None:
    with pytest.raises(DataError) as found:
        read_label_table(pa.table({"labels": labels, "features": [[0]] * len(labels)}), names=pa.array(names, pa.large_string()))
    assert str(found.value) == message


def test_labels_that_cannot_be_names() -> None:
    for text, message in (
        (" ", "table: labels: found the label ' ', expected a name; write another one"),
        ("a\nb", "table: labels: found the label 'a\\nb', expected a name without control characters; write another one"),
    ):
        with pytest.raises(DataError) as found:
            label_names_of_table(pa.table({"labels": [["a"], [text]]}))
        assert str(found.value) == message
    with pytest.raises(DataError) as found:
        label_names_of_table(pa.table({"tags": [["a"]]}))
    assert str(found.value) == "table: found the columns ['tags'], expected a column 'labels'; name the right one"
    # No list has anything: there are no numbers either.
    assert label_names_of_table(pa.table({"labels": [[], []]})) is None
    assert (
        read_label_table(
            pa.table({"labels": [[], []], "features": [[0], [1]]}), names=pa.array(["a"], pa.large_string())
        ).num_labels
        == 1
    )


def test_other_sources(tmp_path: Path) -> None:
    for source, message in (
        (tmp_path / "rows.csv", f"{tmp_path}/rows.csv: found the suffix '.csv', expected a .parquet file, or a table in memory"),
        ([1], "table: found a list, expected a .parquet file, or a table in memory"),
    ):
        with pytest.raises(DataError) as found:
            read_label_table(source)
        assert str(found.value) == message


HEADER = """% a comment
@relation 'emotions: -C 2'

@attribute happy {0,1}
@ATTRIBUTE 'sad one' {0, 1}
@attribute tempo numeric
@attribute "is loud" {0,1}
@attribute pitch REAL
@data
"""


def test_arff_of_sparse_and_dense_rows(tmp_path: Path) -> None:
    (tmp_path / "a.arff").write_text(HEADER + "{0 1, 2 2.5}\n% none\n{3 1}\n1,1,-1,'1',3\n{}\n")
    found = read_arff(tmp_path / "a.arff")
    assert (found.num_labels, found.num_features) == (2, 3)
    assert said(found) == [([0], {0: 2.5}), ([], {1: 1.0}), ([0, 1], {0: -1.0, 1: 1.0, 2: 3.0}), ([], {})]


@settings(max_examples=30, deadline=None)
@given(rows=drawn_rows, last=st.booleans(), dense=st.booleans())
def test_drawn_arff(tmp_path_factory: pytest.TempPathFactory, rows: list[Row], last: bool, dense: bool) -> None:
    path = tmp_path_factory.mktemp("arff") / "a.arff"
    features = [f"@attribute f{i} numeric" for i in range(13)]
    labels = [f"@attribute l{i} {{0,1}}" for i in range(10)]
    lines = ["@relation r", *(features + labels if last else labels + features), "@data"]
    for of_labels, of_features in rows:
        cells = {(13 if last else 0) + label: "1" for label in of_labels}
        cells |= {(0 if last else 10) + feature: repr(value) for feature, value in of_features.items()}
        if dense:
            lines.append(",".join(cells.get(place, "0") for place in range(23)))
        else:
            lines.append("{" + ", ".join(f"{place} {cells[place]}" for place in sorted(cells)) + "}")
    path.write_text("\n".join(lines) + "\n")
    found = read_arff(path, -10 if last else 10)
    assert said(found) == [(sorted(of_labels), dict(sorted(of_features.items()))) for of_labels, of_features in rows]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "ROOT: found no line @data, expected rows behind it; is it an ARFF file?"),
        ("1,2\n", "ROOT:1: found '1,2', expected @relation, @attribute or @data; is it an ARFF file?"),
        (
            "@relation r\n@attribute a {0,1}\n@attribute b numeric\n@data\n",
            "ROOT: found no count of labels, expected -C and 1 to 1, or below 0 of the last ones, in the name of the relation; "
            "give num_labels",
        ),
        (
            "@relation 'r -C 2'\n@attribute a {0,1}\n@attribute b numeric\n@data\n",
            "ROOT: found 2 labels of 2 attributes, expected -C and 1 to 1, or below 0 of the last ones, in the name of the "
            "relation; give num_labels",
        ),
        (
            "@relation 'r -C 1'\n@attribute a numeric\n@attribute b numeric\n@data\n",
            "ROOT: found the label 'a' as a number, expected the values {0, 1}; is it a label?",
        ),
        *(
            (
                f"@relation r\n@attribute a {values}\n",
                f"ROOT:2: found 'a' of type '{values}', expected numeric, or {{0, 1}}; write an attribute 0 or 1 for each value",
            )
            # Sparse rows leave out the first value, which is 1 in the second.
            for values in ("{x,y}", "{1,0}")
        ),
        (HEADER + "{0 2}\n", "ROOT:10: found '2' of 'happy', expected 0 or 1"),
        (HEADER + "{2 1e99}\n", "ROOT:10: found '1e99' of 'tempo', expected a finite number of float32"),
        (HEADER + "{2 ?}\n", "ROOT:10: found '?' of 'tempo', expected a finite number of float32"),
        (HEADER + "{2 1, 2 1}\n", "ROOT:10: found '2 1', expected an attribute's number from 3 to 4, and a value"),
        (HEADER + "{5 1}\n", "ROOT:10: found '5 1', expected an attribute's number from 0 to 4, and a value"),
        (HEADER + "{2 1\n", "ROOT:10: found '{2 1', expected a row between { and }"),
        (HEADER + "1,0,3\n", "ROOT:10: found 3 fields, expected 5, one for each attribute"),
    ],
)
def test_arff_that_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.arff").write_text(text)
    with pytest.raises(DataError) as found:
        read_arff(tmp_path / "a.arff")
    assert str(found.value).replace(str(tmp_path / "a.arff"), "ROOT") == message


def test_arff_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.arff").write_bytes(HEADER.encode() + b"{2 \xff}\n")
    with pytest.raises(DataError, match=r"found the byte 0xff, which is not UTF-8, expected UTF-8 text; convert the file$"):
        read_arff(tmp_path / "a.arff")
    with pytest.raises(DataError, match="a readable file"):
        read_arff(tmp_path / "none.arff")
