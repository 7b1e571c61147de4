"""Between jagged and dense: to dense, to jagged, concat, split, truncate."""

from jagged.ops.conversion.op import dense_to_jagged, jagged_concat, jagged_split, jagged_to_dense, jagged_truncate

__all__ = ["dense_to_jagged", "jagged_concat", "jagged_split", "jagged_to_dense", "jagged_truncate"]
