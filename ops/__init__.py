"""Differentiable functions on jagged tensors: tensors in, tensors out."""

if __name__ != "jagged.ops":
    # A second import under another name would register every operator twice.
    raise ImportError(
        f"this package was imported as {__name__!r}; import it as 'jagged.ops' (the folder `ops/` is that package's home)"
    )

from jagged.ops._shared.losses import Reduction
from jagged.ops._shared.offsets import pair_offsets, row_positions, sample_of_row
from jagged.ops._shared.tracing import recorded
from jagged.ops._shared.validation import trust_values, validate_ids, validate_offsets, values_are_trusted
from jagged.ops.attention import Window, jagged_attention, jagged_hstu_attention
from jagged.ops.bmm import (
    array_jagged_bmm_jagged_out,
    jagged_dense_bmm,
    jagged_jagged_bmm,
    jagged_jagged_bmm_jagged_out,
)
from jagged.ops.catalogue_topk import catalogue_topk
from jagged.ops.conversion import (
    dense_to_jagged,
    extend_pages,
    jagged_concat,
    jagged_index_select,
    jagged_slice,
    jagged_split,
    jagged_to_dense,
    jagged_truncate,
    jagged_unique,
)
from jagged.ops.conversion.nested import from_nested
from jagged.ops.cross_entropy import MEMORY_BUDGET, Strategy, StrategyName, linear_cross_entropy, linear_cross_entropy_strategy
from jagged.ops.decompositions import decomposed
from jagged.ops.elementwise import (
    ACTIVATIONS,
    Activation,
    add_rows,
    jagged_cross,
    jagged_dense_add,
    jagged_dense_mul,
    jagged_linear,
    jagged_mlp,
    jagged_pairwise_difference,
)
from jagged.ops.embedding_bag import (
    BagLayout,
    BagOptimizer,
    BagOptimizerKind,
    BagPlan,
    BagSchedule,
    BagSchedules,
    JointUpdate,
    PlanMismatch,
    embedding_bags,
    quantize_rows,
)
from jagged.ops.group_sparse import (
    GroupSparseOptimizer,
    group_sparse_bce,
    group_sparse_cross_entropy,
    group_sparse_linear,
    group_sparse_topk,
)
from jagged.ops.grouped_linear import grouped_linear, mix_groups
from jagged.ops.host_rows import SeatedRows, claim_rows, exchange_rows, seat_rows
from jagged.ops.hstu import hstu_output, hstu_projection
from jagged.ops.layer_norm import layer_norm, layer_norm_and_residual
from jagged.ops.linear import linear
from jagged.ops.linear_bce import linear_bce
from jagged.ops.sampled_cross_entropy import (
    Correction,
    Draw,
    Loss,
    Positive,
    drawn_negatives,
    sampled_linear_cross_entropy,
)
from jagged.ops.softmax import jagged2_softmax, jagged_softmax

__all__ = [
    "ACTIVATIONS",
    "MEMORY_BUDGET",
    "Activation",
    "BagLayout",
    "BagOptimizer",
    "BagOptimizerKind",
    "BagPlan",
    "BagSchedule",
    "BagSchedules",
    "Correction",
    "Draw",
    "GroupSparseOptimizer",
    "JointUpdate",
    "Loss",
    "PlanMismatch",
    "Positive",
    "Reduction",
    "SeatedRows",
    "Strategy",
    "StrategyName",
    "Window",
    "add_rows",
    "array_jagged_bmm_jagged_out",
    "catalogue_topk",
    "claim_rows",
    "decomposed",
    "dense_to_jagged",
    "drawn_negatives",
    "embedding_bags",
    "exchange_rows",
    "extend_pages",
    "from_nested",
    "group_sparse_bce",
    "group_sparse_cross_entropy",
    "group_sparse_linear",
    "group_sparse_topk",
    "grouped_linear",
    "hstu_output",
    "hstu_projection",
    "jagged2_softmax",
    "jagged_attention",
    "jagged_concat",
    "jagged_cross",
    "jagged_dense_add",
    "jagged_dense_bmm",
    "jagged_dense_mul",
    "jagged_hstu_attention",
    "jagged_index_select",
    "jagged_jagged_bmm",
    "jagged_jagged_bmm_jagged_out",
    "jagged_linear",
    "jagged_mlp",
    "jagged_pairwise_difference",
    "jagged_slice",
    "jagged_softmax",
    "jagged_split",
    "jagged_to_dense",
    "jagged_truncate",
    "jagged_unique",
    "layer_norm",
    "layer_norm_and_residual",
    "linear",
    "linear_bce",
    "linear_cross_entropy",
    "linear_cross_entropy_strategy",
    "mix_groups",
    "pair_offsets",
    "quantize_rows",
    "row_positions",
    "sample_of_row",
    "sampled_linear_cross_entropy",
    "seat_rows",
    "trust_values",
    "validate_ids",
    "validate_offsets",
    "values_are_trusted",
]

# Functions of tensors, which a symbolic trace records as they are called.
for _name in (
    "add_rows",
    "array_jagged_bmm_jagged_out",
    "catalogue_topk",
    "dense_to_jagged",
    "embedding_bags",
    "group_sparse_bce",
    "group_sparse_cross_entropy",
    "group_sparse_linear",
    "group_sparse_topk",
    "grouped_linear",
    "hstu_output",
    "hstu_projection",
    "jagged2_softmax",
    "jagged_attention",
    "jagged_concat",
    "jagged_cross",
    "jagged_dense_add",
    "jagged_dense_bmm",
    "jagged_dense_mul",
    "jagged_hstu_attention",
    "jagged_index_select",
    "jagged_jagged_bmm",
    "jagged_jagged_bmm_jagged_out",
    "jagged_linear",
    "jagged_mlp",
    "jagged_pairwise_difference",
    "jagged_slice",
    "jagged_softmax",
    "jagged_split",
    "jagged_to_dense",
    "jagged_truncate",
    "jagged_unique",
    "layer_norm",
    "layer_norm_and_residual",
    "linear",
    "linear_bce",
    "linear_cross_entropy",
    "mix_groups",
    "pair_offsets",
    "quantize_rows",
    "row_positions",
    "sample_of_row",
    "sampled_linear_cross_entropy",
):
    globals()[_name] = recorded(globals()[_name])
