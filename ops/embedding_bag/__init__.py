"""Pooled embeddings of many features, from tables of many shapes, in one launch."""

from jagged.ops.embedding_bag.api import embedding_bags
from jagged.ops.embedding_bag.joint import JointUpdate
from jagged.ops.embedding_bag.layout import BagLayout
from jagged.ops.embedding_bag.optimizers import BagOptimizer
from jagged.ops.embedding_bag.optimizers import Kind as BagOptimizerKind
from jagged.ops.embedding_bag.plans import BagPlan, BagSchedule, BagSchedules
from jagged.ops.embedding_bag.plans import Mismatch as PlanMismatch
from jagged.ops.embedding_bag.quantized import quantize_rows

__all__ = [
    "BagLayout",
    "BagOptimizer",
    "BagOptimizerKind",
    "BagPlan",
    "BagSchedule",
    "BagSchedules",
    "JointUpdate",
    "PlanMismatch",
    "embedding_bags",
    "quantize_rows",
]
