"""What kernels and PyTorch's loops read of a layout and of a batch: rows of integers, whose columns have names."""

from __future__ import annotations

from typing import NamedTuple


class OfFeature(NamedTuple):
    """What is known of a feature: its table, and the column of the output that it begins at.

    `in_order` is not its own: there stand all features in the order of their tables.
    """

    start: int
    rows: int
    width: int
    output_column: int
    is_mean: int
    first_row: int
    table: int
    in_order: int


class OfTable(NamedTuple):
    """What is known of a table, and in places that are not its own of the tables in the order of their widths, the widest first.

    These stand in `by_width`, and in `unit_end` after how many units of backward's work each one of them ends. `first_reader` is
    its first feature's place among the features in the order of their tables. Behind the tables a row has the storage's length
    and how many rows there are.
    """

    start: int
    rows: int
    width: int
    by_width: int
    unit_end: int
    first_row: int
    nothing: int
    first_reader: int


class OfPlace(NamedTuple):
    """A feature in the order of the classes of their rows (`class_of`), and the places where its class begins and ends."""

    feature: int
    width: int
    class_begin: int
    class_end: int


class OfPart(NamedTuple):
    """Up to `PART_COLUMNS` columns of a feature, whose width this is, and the part's number in it; the widest feature first."""

    feature: int
    part: int
    width: int


class OfBatch(NamedTuple):
    """The bags of a feature where features have batches of their own, and where the output has them: its first one's element and
    how many lie from one to the next.
    """

    first_bag: int
    num_bags: int
    output_begin: int
    output_stride: int


# In which column each stands: `FEATURE.width` is that of a feature's width. What has one name has one column, of features and of
# tables.
FEATURE, TABLE, PLACE = OfFeature(*range(8)), OfTable(*range(8)), OfPlace(*range(4))
PART, BATCH = OfPart(*range(3)), OfBatch(*range(4))
