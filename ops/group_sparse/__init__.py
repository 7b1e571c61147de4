"""Linear layers over groups of labels, each of which reads a few columns of its own, and their losses."""

from jagged.ops.group_sparse.api import (
    group_sparse_bce,
    group_sparse_cross_entropy,
    group_sparse_linear,
    group_sparse_topk,
)
from jagged.ops.group_sparse.optimizer import GroupSparseOptimizer

__all__ = ["GroupSparseOptimizer", "group_sparse_bce", "group_sparse_cross_entropy", "group_sparse_linear", "group_sparse_topk"]
