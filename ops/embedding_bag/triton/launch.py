"""Which kernels pool a batch, and which give its lookups' weights gradients; `sums.py` has those of the rows.

A first kernel decides each feature's schedule from the batch's lengths and counts its units of work, which programs of another
then take one by one. Small batches, for which that would be the longest part, are dealt out by number instead.
"""

from __future__ import annotations

import torch

from jagged.ops._shared.launch import Launcher
from jagged.ops._shared.matrices import gpu
from jagged.ops._shared.sizes import cdiv, next_power_of_2
from jagged.ops.embedding_bag.fields import BATCH
from jagged.ops.embedding_bag.spec import Gradient, Inputs, Options, Outputs, SamplesInputs, SamplesOptions, new_output
from jagged.ops.embedding_bag.triton import schedules
from jagged.ops.embedding_bag.triton.forward import embedding_bags_forward_kernel, embedding_bags_small_kernel
from jagged.ops.embedding_bag.triton.samples import embedding_bags_samples_kernel
from jagged.ops.embedding_bag.triton.schedules import BLOCK_GROUPS, MOST_COLUMNS, embedding_bags_map_kernel, known_of
from jagged.ops.embedding_bag.triton.sums import bags_of_batch, feature_of_bags

# Batches of no more bags, and of no more lookups for each bag in the mean, do without the map. Whatever their lengths, the
# longest bag takes no more steps than there are bags, or twice as many: 32 lookups are one, or 16 of rows that begin anywhere.
SMALL_BAGS, SMALL_MEAN = 330_000, 32
# Of no more samples either: of few features the map's better balance pays sooner.
SMALL_SAMPLES = 400
# Programs of a small batch for each multiprocessor: a few times as many as it holds, so that they end together; and most bags of
# each, for larger batches have more programs.
SMALL_PROGRAMS, SMALL_UNIT = 128, 8
# Registers of a thread of the other kernel, on NVIDIA's: where rows are floats without weights that begin at multiples of 4
# elements, and of others. Left alone the assembler takes up to 255 for all branches together, of which none alone needs more than
# these; with fewer each saves some for its caller, once a unit, and 28 and 16 warps of a multiprocessor run.
PLAIN_REGISTERS, REGISTERS = 72, 128
# Turns of a unit of bags that are taken one after the other: four, and one for each million lookups, from 8 to 24; 12 at least
# where there are many lookups, or features have many bags. Fewer, and programs of small batches end together; more, and those of
# large ones look less often for their next unit.
FEWEST_TURNS, MOST_TURNS = 8, 24
MANY_LOOKUPS, MANY_BAGS, TURNS_OF_MANY = 1 << 21, 8192, 12
# Bags, lookups of each and columns that a program takes at once of the products with lookups' weights.
SAMPLE_BAGS, SAMPLE_LOOKUPS, SAMPLE_COLUMNS = 4, 4, 32

_launch_small = Launcher(embedding_bags_small_kernel)
_launch_map = Launcher(embedding_bags_map_kernel)
_launch_forward = Launcher(embedding_bags_forward_kernel)
_launch_samples = Launcher(embedding_bags_samples_kernel)


def is_small(num_bags: int, num_lookups: int, num_samples: int) -> bool:
    """Return whether a batch does without the map."""
    return num_bags <= SMALL_BAGS and num_lookups <= SMALL_MEAN * num_bags and num_samples <= SMALL_SAMPLES


def turns_of_units(num_bags: int, num_lookups: int, num_features: int) -> int:
    """Return how many turns the units have whose bags are taken one after the other."""
    are_many = num_lookups >= MANY_LOOKUPS or num_bags >= MANY_BAGS * num_features
    fewest = TURNS_OF_MANY if are_many else FEWEST_TURNS
    return min(max(fewest, 4 + (num_lookups >> 20)), MOST_TURNS)


def forward(x: Inputs, o: Options) -> Outputs:
    """Launch `embedding_bags_small_kernel`, or the map and `embedding_bags_forward_kernel`."""
    weights, batches, scales = x.weights, x.batches, x.scales
    output = new_output(x, o)
    if not output.numel():
        return Outputs(output)
    if scales is not None:
        # A row's two numbers as one of 64 bits, which lies at a multiple of 8 bytes.
        scales = (scales.clone() if scales.storage_offset() % 2 else scales).view(torch.int64)
    known, num_bags, num_lookups = known_of(x.host_layout), x.offsets.shape[0] - 1, x.indices.shape[0]
    num_features, multiprocessors = x.host_layout.shape[0], gpu(weights.device).multiprocessors
    parts_begin = x.layout.shape[0] - known.num_parts
    constants = {"ALIGNED": known.is_aligned, "MEANS": known.has_means, "num_warps": 1}
    if x.plan is None and batches is None and is_small(num_bags, num_lookups, o.size):
        unit_bags = min(max(1, known.num_parts * o.size // (SMALL_PROGRAMS * multiprocessors)), SMALL_UNIT)
        units = cdiv(o.size, unit_bags)
        _launch_small(
            (known.num_parts * units,),
            weights, scales, x.indices, x.offsets, x.per_sample_weights, output, x.layout, parts_begin, units, unit_bags,
            num_lookups, o.size, o.width, USED=known.used_by_small, **constants,
        )  # fmt: skip
        return Outputs(output)
    first_bags = None
    if batches is not None:
        first_bags = torch.cat([batches[:, BATCH.first_bag], batches[-1:, BATCH.first_bag] + batches[-1:, BATCH.num_bags]])
    ends = torch.empty(num_features, dtype=torch.int64, device=weights.device)
    order, of_features = torch.empty(2, num_features, dtype=torch.int32, device=weights.device)
    counter = torch.empty(1, dtype=torch.int64, device=weights.device)
    slices = torch.empty(num_features, schedules.SLICE_FIELDS.value, dtype=torch.int64, device=weights.device)
    # As many as there can be, whichever features have them.
    most_slices = num_lookups // schedules.SLICE.value
    sums_of_slices = torch.empty(most_slices * known.widest, dtype=torch.float32, device=weights.device)
    arrivals = torch.empty(most_slices * cdiv(known.widest, MOST_COLUMNS.value), dtype=torch.int32, device=weights.device)
    # No more than there can be units of narrow features: a program too many costs a wait at the counter.
    num_programs = min(o.programs * multiprocessors, num_bags)
    is_plain = known.is_aligned and scales is None and x.per_sample_weights is None
    capped = {} if torch.version.hip else {"maxnreg": PLAIN_REGISTERS if is_plain else REGISTERS}
    _launch_map(
        (1,),
        x.layout, first_bags, x.offsets, order, ends, of_features, slices, arrivals, counter, parts_begin - num_features,
        num_features, o.size, num_programs, turns_of_units(num_bags, num_lookups, num_features), len(sums_of_slices),
        len(arrivals), BLOCK=min(BLOCK_GROUPS, next_power_of_2(num_features)), plan=x.plan, num_warps=16,
    )  # fmt: skip
    _launch_forward(
        (num_programs,),
        weights, scales, x.indices, x.offsets, x.per_sample_weights, output, x.layout, batches, order, ends, of_features, slices,
        sums_of_slices, arrivals, counter, num_features, num_lookups, o.size, o.width, USED=known.used, **constants, **capped,
    )  # fmt: skip
    return Outputs(output)


def samples_backward(x: SamplesInputs, o: SamplesOptions) -> Gradient:
    """Launch `embedding_bags_samples_kernel`."""
    result = torch.zeros(x.indices.shape[0], dtype=o.dtype, device=x.grad.device)
    num_all, num_bags, stride = bags_of_batch(x)
    if num_all and len(result):
        _launch_samples(
            (cdiv(num_all, SAMPLE_BAGS),),
            x.grad, x.weights, x.indices, x.offsets, x.layout, x.batches, feature_of_bags(x), result, len(result), num_all,
            num_bags, stride, BAGS=SAMPLE_BAGS, LOOKUPS=SAMPLE_LOOKUPS, COLUMNS=SAMPLE_COLUMNS, num_warps=2,
        )  # fmt: skip
    return Gradient(result)
