"""Linear layers over groups of labels, each of which reads a few columns of its own."""

from jagged.ops.group_sparse.api import group_sparse_linear

__all__ = ["group_sparse_linear"]
