"""What `embedding_bags` refuses: what fits neither the layout nor the lookups, and what its tables cannot do."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from jagged.ops._shared.validation import FLOATS, check_tensor, holds
from jagged.ops.embedding_bag.layout import MOST_COUNTED, BagLayout
from jagged.ops.embedding_bag.optimizers import BagOptimizer
from jagged.ops.embedding_bag.plans import MOST_PROGRAMS, BagSchedules


def check_weights(weights: Tensor, layout: BagLayout) -> None:
    """Check that tables are a storage of the layout."""
    if weights.shape[0] != layout.num_elements:
        raise ValueError(f"weights: expected the {layout.num_elements} elements of the layout, got shape {list(weights.shape)}")
    if not weights.is_contiguous():
        raise ValueError(f"weights: expected adjacent elements, got stride {weights.stride(0)}; pass weights.contiguous()")


def check_tables(tables: tuple[Tensor, ...], layout: BagLayout) -> None:
    """Check that separate tables are those of the layout, of one dtype and device."""
    if len(tables) != len(layout.rows) or not tables:
        raise ValueError(
            f"weights: expected a tensor for each of the layout's {len(layout.rows)} tables, and one at least, got {len(tables)}"
        )
    first = tables[0]
    for number, (table, rows, width) in enumerate(zip(tables, layout.rows, layout.widths, strict=True)):
        check_tensor(f"weights[{number}]", table, "[rows, width]", (*FLOATS, torch.uint8))
        if table.shape != (rows, width):
            raise ValueError(f"weights: expected shape {[rows, width]} for table {number}, got {list(table.shape)}")
        if table.dtype != first.dtype:
            raise TypeError(f"weights: expected tables of one dtype, got {first.dtype} and, for table {number}, {table.dtype}")
        if table.device != first.device:
            raise ValueError(
                f"weights: expected tables on one device, got {first.device} and, for table {number}, {table.device}; move them"
            )


def check_quantised(
    weights: Tensor,
    scales: Tensor | None,
    layout: BagLayout,
    per_sample_weights: Tensor | None,
    optimizer: BagOptimizer | None,
    output_dtype: torch.dtype,
) -> None:
    """Refuse scales without quantised weights, quantised weights without scales, and what such weights cannot do."""
    if weights.dtype != torch.uint8:
        raise ValueError(f"scales: expected None for weights of {weights.dtype}, got a tensor; only uint8 weights have scales")
    if scales is None:
        raise ValueError("scales: expected those of the uint8 weights, got None; quantize_rows gives both")
    check_tensor("scales", scales, "[R, 2]", (torch.float32,))
    if scales.shape != (layout.first_rows[-1], 2) or scales.device != weights.device or not scales.is_contiguous():
        raise ValueError(
            f"scales: expected shape {[layout.first_rows[-1], 2]}, contiguous, on {weights.device}, as the layout has rows, got "
            f"{list(scales.shape)} of stride {list(scales.stride())} on {scales.device}"
        )
    if output_dtype not in FLOATS[:3]:
        raise TypeError(f"output_dtype: expected torch.float32, bfloat16 or float16 for uint8 weights, got {output_dtype}")
    if optimizer is not None:
        raise ValueError("optimizer: expected None for uint8 weights, which are for inference; train the float weights")
    for name, tensor in (("scales", scales), ("per_sample_weights", per_sample_weights)):
        if tensor is not None and tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name}: has no gradient where weights are uint8; pass {name}.detach(), or call under no_grad")


def check_batch_sizes(batch_sizes: Sequence[int] | None, num_bags: int, num_features: int) -> None:
    """Check that features share all bags alike, or by sizes of their own."""
    if batch_sizes is None:
        if num_bags % num_features if num_features else num_bags:
            raise ValueError(
                f"offsets: expected a multiple of the {num_features} features, and one, got {num_bags + 1}; "
                "pass batch_sizes where features have batches of their own"
            )
    elif (
        len(batch_sizes) != num_features
        or not holds(sum(batch_sizes) == num_bags)
        or (not _are_counts(batch_sizes) if torch.compiler.is_compiling() else min((0, *batch_sizes)) < 0)
    ):
        raise ValueError(
            f"batch_sizes: expected {num_features} sizes with the sum {num_bags}, as offsets have bags, got {list(batch_sizes)}"
        )


def _are_counts(sizes: Sequence[int]) -> bool:
    """Tell whether none is below 0, also of those that an exporter does not know yet."""
    return all(holds(size >= 0) for size in sizes)


def check_per_sample_weights(per_sample_weights: Tensor, indices: Tensor, layout: BagLayout) -> None:
    """Check that each lookup has a weight, and that none is of a mean."""
    check_tensor("per_sample_weights", per_sample_weights, "[S]", FLOATS)
    if per_sample_weights.shape != indices.shape or per_sample_weights.device != indices.device:
        raise ValueError(
            f"per_sample_weights: expected shape {list(indices.shape)} on {indices.device}, one for each of indices, "
            f"got {list(per_sample_weights.shape)} on {per_sample_weights.device}"
        )
    if layout.has_means:
        assert layout.means is not None
        feature = layout.means.index(True)
        raise ValueError(f"per_sample_weights: only sums are weighted, but bags of feature {feature} are means")


def check_optimizer(optimizer: BagOptimizer, weights: Tensor, layout: BagLayout) -> None:
    """Check that an optimizer is of this layout and device, and that the tables may learn where gradients are recorded."""
    if optimizer.layout is not layout and (optimizer.layout.rows, optimizer.layout.widths) != (layout.rows, layout.widths):
        raise ValueError("optimizer: expected one of a layout with the same tables, got one of others")
    if optimizer.step.device != weights.device:
        raise ValueError(
            f"optimizer: expected its states on the device of weights, {weights.device}, got {optimizer.step.device}; "
            "make it with device=weights.device"
        )
    if not weights.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "optimizer: weights do not require a gradient, so nothing would be updated; call weights.requires_grad_(), or leave "
            "the optimizer out"
        )


def check_schedules(schedules: BagSchedules, layout: BagLayout, weights: Tensor) -> None:
    """Check that a plan's schedules are of this layout and device, and its numbers in their ranges."""
    if (codes := schedules.codes) is not None:
        check_tensor("schedules", codes, "[F]", (torch.int32,))
        if codes.shape[0] != layout.num_features or codes.device != weights.device:
            raise ValueError(
                f"schedules: expected {layout.num_features} on {weights.device}, got {codes.shape[0]} on {codes.device}; "
                "take those of the plan for this layout and device"
            )
    if not 1 <= schedules.programs <= MOST_PROGRAMS:
        raise ValueError(f"schedules: expected 1 to {MOST_PROGRAMS} programs, got {schedules.programs}")
    if schedules.counted_rows is not None and not 0 <= schedules.counted_rows <= MOST_COUNTED:
        raise ValueError(f"schedules: expected counted_rows from 0 to {MOST_COUNTED:,}, got {schedules.counted_rows}")


def check_ids(layout: BagLayout, indices: Tensor, offsets: Tensor, batch_sizes: Sequence[int] | None) -> None:
    """Refuse an id that its feature's table does not have. Costs synchronisations."""
    num_features = layout.num_features
    sizes = [(offsets.shape[0] - 1) // max(1, num_features)] * num_features if batch_sizes is None else list(batch_sizes)
    assert layout.tables is not None
    ends, bag = offsets.tolist(), 0
    for feature, (size, table) in enumerate(zip(sizes, layout.tables, strict=True)):
        refuse_wrong_ids(indices[ends[bag] : ends[bag + size]], layout.rows[table], feature, ends[bag])
        bag += size


def refuse_wrong_ids(ids: Tensor, rows: int, feature: int, begin: int) -> None:
    """Refuse an id that its feature's table of so many rows does not have; the feature's ids begin at place `begin`.

    Raises:
        ValueError: for the first one.
    """
    wrong = ((ids < 0) | (ids >= rows)).nonzero()
    if wrong.numel():
        place = int(wrong[0])
        raise ValueError(
            f"indices: expected ids from 0 to {rows - 1} for feature {feature}, got {int(ids[place])} at place {begin + place}"
        )
