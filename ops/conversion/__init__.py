"""Between jagged and dense: to dense, to jagged, concat, split; selections: truncate, slice, index select, unique; and pages."""

from jagged.ops.conversion.api import dense_to_jagged, jagged_concat, jagged_split, jagged_to_dense
from jagged.ops.conversion.pages import extend_pages
from jagged.ops.conversion.selection import jagged_index_select, jagged_slice, jagged_truncate, jagged_unique

__all__ = [
    "dense_to_jagged",
    "extend_pages",
    "jagged_concat",
    "jagged_index_select",
    "jagged_slice",
    "jagged_split",
    "jagged_to_dense",
    "jagged_truncate",
    "jagged_unique",
]
