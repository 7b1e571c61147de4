"""Every op family as one forward and backward, for tests that ask the same of all. A new family joins with a function here."""

from __future__ import annotations

import importlib
import itertools
import math
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import ModuleType
from unittest.mock import patch

import torch
from torch import Tensor

import jagged.ops
from jagged.ops import (
    BagLayout,
    BagSchedules,
    Draw,
    GroupSparseOptimizer,
    add_rows,
    array_jagged_bmm_jagged_out,
    catalogue_topk,
    claim_rows,
    dense_to_jagged,
    embedding_bags,
    exchange_rows,
    extend_pages,
    group_sparse_bce,
    group_sparse_cross_entropy,
    group_sparse_linear,
    grouped_linear,
    hstu_output,
    hstu_projection,
    jagged2_softmax,
    jagged_attention,
    jagged_concat,
    jagged_cross,
    jagged_dense_add,
    jagged_dense_bmm,
    jagged_dense_mul,
    jagged_hstu_attention,
    jagged_index_select,
    jagged_jagged_bmm,
    jagged_jagged_bmm_jagged_out,
    jagged_linear,
    jagged_pairwise_difference,
    jagged_slice,
    jagged_softmax,
    jagged_split,
    jagged_to_dense,
    jagged_truncate,
    jagged_unique,
    linear_bce,
    linear_cross_entropy,
    mix_groups,
    quantize_rows,
    sampled_linear_cross_entropy,
    seat_rows,
)
from jagged.ops.layer_norm import layer_norm
from jagged.ops.linear import linear
from jagged.ops.sampled_cross_entropy.apart import ItemSlices, with_weights_apart
from jagged.ops.sampled_cross_entropy.spec import SAMPLED_PAIRS, Inputs, Options, PairsInputs
from tests.places import PLACE
from tests.strategies import Jagged, jagged_of, random_tensor

KEPT, LENGTH, ITEMS = 15, 20, 300


@dataclass(frozen=True)
class Step:
    """Inputs that want gradients, and what is computed from them. Offsets are read when it runs, so a graph can be replayed."""

    forward: Callable[..., Sequence[Tensor]]
    leaves: tuple[Tensor, ...]
    is_differentiable: bool = True

    def run(self) -> list[Tensor]:
        """Return outputs, then gradients; what comes into the backward are the outputs themselves."""
        outputs = self.forward(*self.leaves)
        detached = [output.detach() for output in outputs]
        if not self.is_differentiable:
            return detached
        with _always_filtered():
            return [*detached, *torch.autograd.grad(outputs, self.leaves, detached)]


def _always_filtered() -> AbstractContextManager[object]:
    """Let cross-entropy filter gradients of any size, and whether it pays or not."""
    from jagged.ops.cross_entropy.triton import filter

    return patch.multiple(filter, LEAST_WORK=0, MARGIN=math.inf)


def conversion(batch: Jagged, dtype: torch.dtype, width: int) -> Step:
    kept = sum(min(length, KEPT) for length in batch.lengths)
    offsets, total, backend = batch.offsets, batch.total, PLACE.backend

    def forward(values: Tensor) -> list[Tensor]:
        dense = jagged_to_dense(values, offsets, LENGTH, backend=backend)
        back = dense_to_jagged(dense, offsets, total, backend=backend)
        joined, _ = jagged_concat([back, values], [offsets, offsets], backend=backend)
        parts = jagged_split(joined, [offsets, offsets], [total, total], backend=backend)
        last, _ = jagged_truncate(values, offsets, KEPT, "last", kept, backend=backend)
        # The last rows again, so that as many are kept whatever the lengths; and every sample twice, in either order.
        sliced, _ = jagged_slice(values, offsets, (offsets.diff() - KEPT).clamp(min=0), KEPT, kept, backend=backend)
        samples = torch.arange(batch.batch_size, device=PLACE.device)
        chosen, _ = jagged_index_select(values, offsets, torch.cat([samples, samples.flip(0)]), 2 * total, backend=backend)
        ids, _, inverse = jagged_unique(torch.arange(total, device=PLACE.device).flip(0), offsets, total)
        return [dense, *parts, last, sliced, chosen, values * (ids[inverse] % 7)[:, None]]

    return Step(forward, _leaves(dtype, (total, width)))


def attention(batch: Jagged, dtype: torch.dtype, width: int) -> Step:
    offsets, backend = batch.offsets, PLACE.backend

    def forward(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        plain = [jagged_attention(q[:, :2], k, v, offsets, causal=causal, backend=backend) for causal in (False, True)]
        # Across: the lengths in reverse, so that queries and keys are as many in all and differ in each sample.
        q_offsets = offsets[-1] - offsets.flip(0)
        output, lse = jagged_attention(
            q, k, v, q_offsets, offsets, window=9, num_targets=2, num_contextual=3, return_lse=True, backend=backend
        )
        narrower = jagged_hstu_attention(q, k, v[..., : width // 2], offsets, backend=backend)
        # What comes into the backward are the outputs, which are to be finite.
        return [*plain, output, lse.clamp(min=-1e3), narrower]

    return Step(forward, _leaves(dtype, *[(batch.total, heads, width) for heads in (4, 2, 2)]))


def attention_with_biases(batch: Jagged, dtype: torch.dtype, width: int) -> Step:
    offsets, backend = batch.offsets, PLACE.backend
    times = torch.arange(batch.total, device=PLACE.device) ** 2
    # Enough for any lengths of 200 rows.
    pairs = max(sum(length**2 for length in batch.lengths), 200**2)
    seed = torch.tensor(5, device=PLACE.device)

    def forward(q: Tensor, k: Tensor, v: Tensor, relative: Tensor, time: Tensor, pairs: Tensor) -> list[Tensor]:
        scores = {"relative_bias": relative, "time_bias": time, "bias": pairs, "backend": backend}
        output = jagged_attention(
            q, k, v, offsets, **scores, q_times=times, k_times=times, dropout_p=0.2, dropout_seed=seed
        )  # fmt: skip
        return [output, jagged_hstu_attention(q, k, v, offsets, causal=True, **scores, times=times)]

    rows = [(batch.total, 2, width)] * 3
    return Step(forward, _leaves(dtype, *rows, (2, 7), (2, 20), (2, pairs)))


def topk(batch: Jagged, dtype: torch.dtype, width: int) -> Step:
    # Each sample is a row that must not get the items of its jagged list.
    ids = torch.arange(batch.total, device=PLACE.device) * 7 % ITEMS

    def forward(hidden: Tensor, weight: Tensor) -> list[Tensor]:
        outputs = []
        for k in (1, 40):
            for exclude in (None, (ids, batch.offsets)):
                scores, best = catalogue_topk(hidden, weight, k, exclude=exclude, bias=weight[:, 0], backend=PLACE.backend)
                outputs += [scores, best.int()]
        return outputs

    return Step(forward, _leaves(dtype, (batch.batch_size, width), (ITEMS, width)), is_differentiable=False)


def cross_entropy(batch: Jagged, dtype: torch.dtype, width: int) -> Step:
    rows = torch.arange(batch.total, device=PLACE.device)

    def forward(hidden: Tensor, weight: Tensor) -> Sequence[Tensor]:
        # The last sample's rows are ignored, so that the number of valid rows follows the offsets.
        target = (rows % ITEMS).masked_fill(rows >= batch.offsets[-2:-1], -100)
        outputs = [*linear_cross_entropy(hidden, weight, target, return_lse=True, strategy="fused", backend=PLACE.backend)]
        shaped = {"bias": weight[:, 0], "softcap": 5.0, "normalize": True, "label_smoothing": 0.1, "backend": PLACE.backend}
        outputs.append(linear_cross_entropy(hidden, weight, target, strategy="chunked", memory_budget=0, **shaped))
        outputs.append(linear_cross_entropy(hidden, weight, target, filter_eps=1e-3, **shaped))
        return outputs

    return Step(forward, _leaves(dtype, (batch.total, width), (ITEMS, width)))


def sampled_cross_entropy(batch: Jagged, dtype: torch.dtype, width: int) -> Step:
    rows, items = torch.arange(batch.total, device=PLACE.device), 30
    some, seed = max(20, batch.total // 4), torch.tensor([5], device=PLACE.device)
    lists = rows % items, torch.arange(batch.total + 1, device=PLACE.device)

    def forward(hidden: Tensor, weight: Tensor) -> list[Tensor]:
        # The last sample's rows are ignored, so that the number of valid rows follows the offsets.
        target = (rows % items).masked_fill(rows >= batch.offsets[-2:-1], -100)
        # Of some rows each one's own negatives, so many that items are added up in chunks; and some that rows share.
        own, shared = Draw("log_uniform", 60, seed), Draw("uniform", 9, seed, rows_per_draw=20, replacement=False)
        first, lse = sampled_linear_cross_entropy(
            hidden[:some], weight, target[:some], own, correction="both", return_lse=True, backend=PLACE.backend
        )
        second = sampled_linear_cross_entropy(
            hidden, weight, target, shared, loss="bce", exclude=lists, reduction="none", backend=PLACE.backend
        )

        # Forward's: backward may come when another one is given.
        backend = PLACE.backend

        # Of the weights' gradient an update would take factors, or slices, which no compiled graph makes, nor an operator, whose
        # inputs somebody may have brought to another dtype.
        def made_by_update(given: PairsInputs) -> None:
            SAMPLED_PAIRS(given, o, backend)
            if backend is not None and not torch.compiler.is_compiling():
                ItemSlices(given, o, None, backend)(3, 21, width)

        x, o = Inputs(hidden[:some], weight, target[:some], seed=seed), Options("uniform", 9, 1, is_corrected=True)
        third, _ = with_weights_apart(x, o, backend, made_by_update)
        return [first, lse, second, third]

    return Step(forward, _leaves(dtype, (batch.total, width), (items, width)))


def bmm(batch: Jagged, dtype: torch.dtype, width: int) -> Step:
    offsets, backend = batch.offsets, PLACE.backend

    def forward(values: Tensor, other: Tensor, dense: Tensor) -> list[Tensor]:
        rows = jagged_dense_bmm(values, offsets, dense, dense[:, 0], backend=backend)
        sums = jagged_jagged_bmm(values, other, offsets, backend=backend)
        # In pieces of four columns samples are long enough to be added up in chunks.
        pieces = values.reshape(-1, 4)
        return [rows, sums, jagged_jagged_bmm(pieces, pieces, offsets * (width // 4), backend=backend)]

    return Step(forward, _leaves(dtype, (batch.total, width), (batch.total, 4), (batch.batch_size, width, 4)))


def embedding_bag(batch: Jagged, dtype: torch.dtype, width: int) -> Step:
    shape, items = ((30, 7), (width, 3)), torch.arange(batch.total, device=PLACE.device)
    sums, means = BagLayout(*shape), BagLayout(*shape, means=(True, False))
    listed, totals = BagLayout(*shape, sequences=(False, True)), [batch.total]
    indices = torch.cat([items % 30, items % 7])
    # So many lookups of a row that its gradient is summed in groups of parts; slow where kernels are interpreted, so once.
    hot = torch.arange(16_400, device=PLACE.device) // 5000 % 2 if dtype == torch.float32 and batch.batch_size == 4 else None
    pair, whole = BagLayout((2,), (4,)), torch.tensor([0, 16_400], device=PLACE.device)
    # By the map, and lookups brought together by counting, in place of a sort.
    counted, by_count = (
        BagSchedules(torch.full((count,), -1, dtype=torch.int32, device=PLACE.device), counted_rows=65_536) for count in (2, 1)
    )

    def forward(weights: Tensor, samples: Tensor) -> list[Tensor]:
        offsets = torch.cat([batch.offsets, batch.offsets[1:] + batch.offsets[-1:]])
        outputs = [
            embedding_bags(weights, sums, indices, offsets, per_sample_weights=samples, backend=PLACE.backend),
            embedding_bags(weights, means, indices, offsets, schedules=counted, backend=PLACE.backend),
            # Rows of the second table, not pooled.
            embedding_bags(weights, listed, indices, offsets, sequence_totals=totals, backend=PLACE.backend),
            # Of tables one by one, which lie in one storage here.
            embedding_bags(sums.views(weights), sums, indices, offsets, per_sample_weights=samples, backend=PLACE.backend),
        ]
        if hot is not None:
            outputs.append(embedding_bags(weights[:8], pair, hot, whole, backend=PLACE.backend))
            outputs.append(embedding_bags(weights[:8], pair, hot, whole, schedules=by_count, backend=PLACE.backend))
        return outputs

    return Step(forward, _leaves(dtype, (sums.num_elements,), (len(indices),)))


def quantised_bags(batch: Jagged, dtype: torch.dtype, width: int) -> Step:
    layout = BagLayout((30, 7), (width, 3), (0, 1, 0), (False, True, False))
    items = torch.arange(batch.total, device=PLACE.device)
    indices = torch.cat([items % 30, items % 7, items * 7 % 30])
    weights, scales = quantize_rows(random_tensor((layout.num_elements,), torch.float32, 0), layout)

    def forward(scales: Tensor) -> list[Tensor]:
        ends, last = batch.offsets[1:], batch.offsets[-1:]
        offsets = torch.cat([batch.offsets, ends + last, ends + 2 * last])
        return [embedding_bags(weights, layout, indices, offsets, scales=scales, output_dtype=dtype, backend=PLACE.backend)]

    return Step(forward, (scales,), is_differentiable=False)


def elementwise(batch: Jagged, dtype: torch.dtype, width: int) -> Step:
    offsets, backend = batch.offsets, PLACE.backend
    # Enough for any lengths of 200 rows.
    total = max(sum(length**2 for length in batch.lengths), 200**2)

    index = torch.arange(batch.total, device=PLACE.device) % max(batch.batch_size, 1)

    def forward(values: Tensor, rows: Tensor, dense: Tensor, weight: Tensor) -> list[Tensor]:
        added = jagged_dense_add(values, offsets, rows, backend=backend)
        multiplied = jagged_dense_mul(added, offsets, dense, backend=backend)
        # Element by element: samples long enough to be added up in chunks.
        elements = jagged_dense_mul(values.reshape(-1, 1), offsets * width, rows[:, :1], backend=backend)
        hidden = [
            jagged_linear(values, offsets, weight, context=rows, activation=activation, backend=backend)
            for activation in ("relu", "silu", "gelu")
        ]
        half = width // 2
        crossed = jagged_cross(values, offsets, rows[:, :half], values[:, half:], backend=backend)
        crossed = jagged_cross(values, offsets, rows[:, :half], values[:, half:], crossed, backend=backend)
        pairs = jagged_pairwise_difference(values[:, 0], offsets, total, backend=backend)
        # The operator rather than its function, which would take PyTorch where kernels are interpreted.
        starts = torch.ops.jagged.pair_offsets.default(offsets, offsets, backend)
        past_the_last = torch.arange(total, device=PLACE.device) >= starts[-1]
        looked_up = add_rows(values, rows, index, backend=backend)
        return [added, multiplied, elements, *hidden, crossed, looked_up, pairs.masked_fill(past_the_last, 0)]

    shapes = (batch.total, width), (batch.batch_size, width), (batch.batch_size, LENGTH, width), (width, width)
    return Step(forward, _leaves(dtype, *shapes))


def group_sparse(batch: Jagged, dtype: torch.dtype, width: int) -> Step:
    supports, columns = _supports(batch, width)

    def forward(features: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
        with_bias = group_sparse_linear(features, weight, supports, batch.offsets, bias, backend=PLACE.backend)
        without = group_sparse_linear(features, weight, supports.short(), batch.offsets, backend=PLACE.backend)
        # Blocks that are the same, that overlap, and others.
        first = supports[:, 0] % (columns - width + 1)
        adjacent = group_sparse_linear(features, weight, first, batch.offsets, bias, backend=PLACE.backend)
        given = (features, weight, supports, batch.offsets, *_positives(batch, 70), bias)
        return [with_bias, without, adjacent, group_sparse_bce(*given, label_smoothing=0.1, backend=PLACE.backend)]

    return Step(forward, _leaves(dtype, (70, columns), (batch.total, width), (batch.total,)))


def group_sparse_softmax(batch: Jagged, dtype: torch.dtype, width: int) -> Step:
    supports, columns = _supports(batch, width)
    mask = torch.arange(70, device=PLACE.device) % 5 > 0

    def forward(features: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
        given = (features, weight, supports, batch.offsets, *_positives(batch, 70))
        loss, lse, target = group_sparse_cross_entropy(*given, bias, return_parts=True, backend=PLACE.backend)
        without = group_sparse_cross_entropy(*given, row_mask=mask, backend=PLACE.backend)
        # Of no labels it is -inf.
        return [loss, lse.clamp(min=-100), target, without]

    return Step(forward, _leaves(dtype, (70, columns), (batch.total, width), (batch.total,)))


def _supports(batch: Jagged, width: int) -> tuple[Tensor, int]:
    """Columns that groups read, the samples of a batch whose rows are labels; and how many there are."""
    # Steps of two lead to no column twice: their number is odd.
    columns = 2 * width + 1
    supports = torch.arange(batch.batch_size, device=PLACE.device)[:, None] + 2 * torch.arange(width, device=PLACE.device)
    return (supports % columns).int(), columns


def bce_of_linear(batch: Jagged, dtype: torch.dtype, width: int) -> Step:
    def forward(features: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
        positives, offsets = _positives(batch, 30)
        weights = weight.detach().float().abs()[:, 0]
        mask = torch.arange(30, device=PLACE.device) % 5 > 0
        options = {"label_weight": weights, "row_mask": mask, "backend": PLACE.backend}
        return [linear_bce(features, weight, positives, offsets, bias, **options)]

    return Step(forward, _leaves(dtype, (30, width), (batch.total, width), (batch.total,)))


def layers_of_groups(batch: Jagged, dtype: torch.dtype, width: int) -> Step:
    def forward(x: Tensor, first: Tensor, bias: Tensor, second: Tensor, weights: Tensor) -> list[Tensor]:
        hidden = grouped_linear(x, first, bias, activation="relu", backend=PLACE.backend)
        return [mix_groups(grouped_linear(hidden, second, backend=PLACE.backend), weights, backend=PLACE.backend)]

    total = batch.total
    return Step(forward, _leaves(dtype, (total, width), (3, 48, width), (3, 48), (3, 32, 48), (total, 2, 3)))


def normalised_rows(batch: Jagged, dtype: torch.dtype, width: int) -> Step:
    def forward(x: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
        return [layer_norm(x, weight, bias, backend=PLACE.backend)]

    return Step(forward, _leaves(dtype, (batch.total, width), (width,), (width,)))


def block_of_hstu(batch: Jagged, dtype: torch.dtype, width: int) -> Step:
    """Two heads, in two groups; with and without what the product reads beside the gated rows, and dropout."""
    wide = 2 * width

    def forward(x: Tensor, weight: Tensor, bias: Tensor, *of: Tensor) -> list[Tensor]:
        norm, shift, first, second, last = of
        u, v, q, k = hstu_projection(x, weight, bias, 2, backend=PLACE.backend)
        seed = torch.full((1,), 5, device=PLACE.device)
        options = {"num_groups": 2, "dropout_p": 0.1, "dropout_seed": seed, "concat": True, "backend": PLACE.backend}
        rows = hstu_output(v + q, u, x, norm, shift, first, last, **options)
        return [rows, hstu_output(k, v, rows, norm, None, second, last, centred=False, backend=PLACE.backend)]

    shapes = (batch.total, width), (4 * wide, width), (4 * wide,), (wide,), (wide,), (width, 3 * wide), (width, wide), (width,)
    return Step(forward, _leaves(dtype, *shapes))


def linear_rows(batch: Jagged, dtype: torch.dtype, width: int) -> Step:
    def forward(x: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
        return [linear(x, weight, bias, backend=PLACE.backend)]

    return Step(forward, _leaves(dtype, (batch.total, width), (3 * width, width), (3 * width,)))


def _positives(batch: Jagged, rows: int) -> tuple[Tensor, Tensor]:
    """Two labels of each row, the labels being the rows of a batch; none where that has none."""
    count = 2 * rows if batch.total else 0
    labels = torch.arange(count, device=PLACE.device) * 7 % max(batch.total, 1)
    return labels, torch.arange(rows + 1, device=PLACE.device) * (count // rows)


def pair_bmm(batch: Jagged, dtype: torch.dtype, width: int) -> Step:
    # Enough for any lengths of 200 rows. What lies past the last pair is left unwritten, and read by nobody.
    total = max(sum(length**2 for length in batch.lengths), 200**2)

    def forward(a: Tensor, b: Tensor) -> list[Tensor]:
        scores = jagged_jagged_bmm_jagged_out(a, b, batch.offsets, total=total, backend=PLACE.backend)
        return [array_jagged_bmm_jagged_out(scores, b, batch.offsets, backend=PLACE.backend)]

    return Step(forward, _leaves(dtype, *[(batch.total, width)] * 2))


def softmax(batch: Jagged, dtype: torch.dtype, width: int) -> Step:
    offsets, backend = batch.offsets, PLACE.backend
    columns = torch.arange(batch.batch_size + 1, device=PLACE.device, dtype=offsets.dtype) * width

    def forward(values: Tensor) -> list[Tensor]:
        outputs = [jagged_softmax(values, offsets, backend=backend)]
        # Element by element, twice: samples long enough to be split in chunks.
        elements = torch.cat([values, values]).reshape(-1, 1)
        outputs.append(jagged_softmax(elements, offsets * (2 * width), backend=backend))
        for dim in (-1, -2):
            outputs.append(jagged2_softmax(values.flatten(), offsets, columns, dim, backend=backend))
        return outputs

    return Step(forward, _leaves(dtype, (batch.total, width)))


def host_rows(batch: Jagged, dtype: torch.dtype, width: int) -> Step:
    table = random_tensor((2 * batch.total + 1, width), dtype, 5).cpu()
    table = table.pin_memory() if PLACE.device.type == "cuda" else table
    slots = torch.arange(batch.total, device=PLACE.device)

    def forward(values: Tensor) -> list[Tensor]:
        cached = values.detach().clone()
        ids = torch.arange(batch.total, device=PLACE.device) // 2
        slot_of_row = torch.full((batch.total + 1,), -1, dtype=torch.int32, device=PLACE.device)
        used, is_dirty = slot_of_row.clone(), torch.zeros_like(slot_of_row, dtype=torch.bool)
        # Filled on the device: a copy would wait for it.
        of_features = torch.zeros(len(batch.offsets) - 1, 4, dtype=torch.int64, device=PLACE.device)
        of_features[:, 1] = batch.total
        rows = ids.int()
        if batch.batch_size:
            rows, missed, totals = claim_rows(
                ids, batch.offsets[1:], of_features, slot_of_row, slot_of_row[1:].clone(), used, is_dirty,
                number=1, changes=True, backend=PLACE.backend,
            )  # fmt: skip
            if batch.total:
                written = torch.zeros((), dtype=torch.int64, device=PLACE.device)
                seat_rows(
                    slots, missed, totals, of_features[0, :3, None] * 0, slot_of_row, torch.full_like(used, -1), used, is_dirty,
                    written, pool=0, cursor=batch.total // 2, oldest=1, number=2, changes=True, width=width, line=1,
                    backend=PLACE.backend,
                )  # fmt: skip
        # Every third slot keeps its rows, every second row is not written back.
        coming = torch.where(slots % 3 > 0, slots, -1)
        exchange_rows(
            cached, table, slots.flip(0), torch.where(slots % 2 > 0, slots + batch.total, -1), coming, backend=PLACE.backend
        )
        return [cached, rows, slot_of_row]

    return Step(forward, _leaves(dtype, (batch.total, width)), is_differentiable=False)


def pages(batch: Jagged, dtype: torch.dtype, width: int) -> Step:
    page_rows, backend = 8, PLACE.backend
    # Enough for any lengths of 200 rows, of which as many are there before.
    each = 2 * max(200, *batch.lengths, 0) // page_rows + 1
    of_samples = torch.arange(batch.batch_size * each, device=PLACE.device).flip(0).view(batch.batch_size, each)
    pool = random_tensor((batch.batch_size * each * page_rows, 2, width), dtype, 5)

    def forward(values: Tensor) -> list[Tensor]:
        kept, first, offsets = pool.clone(), values.detach(), batch.offsets
        joined = extend_pages(
            kept, of_samples, first, first * 2, offsets, offsets // 2, 2 * offsets, page_rows=page_rows, total=2 * batch.total,
            backend=backend,
        )  # fmt: skip
        return [joined, kept]

    return Step(forward, _leaves(dtype, (batch.total, width)), is_differentiable=False)


FAMILIES: dict[str, Callable[[Jagged, torch.dtype, int], Step]] = {
    "attention": attention,
    "attention_with_biases": attention_with_biases,
    "bmm": bmm,
    "catalogue_topk": topk,
    "conversion": conversion,
    "cross_entropy": cross_entropy,
    "elementwise": elementwise,
    "embedding_bag": embedding_bag,
    "group_sparse": group_sparse,
    "group_sparse_softmax": group_sparse_softmax,
    "grouped_linear": layers_of_groups,
    "layer_norm": normalised_rows,
    "host_rows": host_rows,
    "hstu": block_of_hstu,
    "linear": linear_rows,
    "linear_bce": bce_of_linear,
    "pages": pages,
    "pair_bmm": pair_bmm,
    "quantised_bags": quantised_bags,
    "sampled_cross_entropy": sampled_cross_entropy,
    "softmax": softmax,
}


def _leaves(dtype: torch.dtype, *shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Return random numbers whose products over the last dimension are of order one."""
    scale = math.sqrt(shapes[0][-1])
    return tuple(
        (random_tensor(shape, torch.float32, seed) / math.sqrt(scale)).to(dtype).requires_grad_()
        for seed, shape in enumerate(shapes)
    )


def small_steps(*names: str) -> Iterator[Step]:
    """Yield every family, or those that are named, at small sizes: dtypes, odd widths, short, long and empty samples, none."""
    for dtype, width in ((torch.float32, 20), (torch.bfloat16, 64), (torch.float16, 40)):
        for lengths in ((3, 0, 40, 1), (70, 0, 40), (0, 0), ()):
            for family in (FAMILIES[name] for name in names or FAMILIES):
                yield family(jagged_of(lengths, torch.int32 if width == 20 else torch.int64), dtype, width)


def long_step() -> Step:
    """Return attention as the kernels for Hopper take it, on other GPUs as the others do."""
    return attention(jagged_of((300, 0, 129)), torch.bfloat16, 128)


def update_steps() -> Iterator[Step]:
    """Yield losses over groups that change their weights in the backward pass: features are their only leaf."""
    losses = group_sparse_bce, group_sparse_cross_entropy
    for loss, (dtype, momentum) in itertools.product(losses, ((torch.float32, 0.0), (torch.bfloat16, 0.9))):
        batch, width = jagged_of((3, 0, 40, 1)), 32
        supports, columns = _supports(batch, width)
        weight, bias = (leaf.detach().requires_grad_() for leaf in _leaves(dtype, (batch.total, width), (batch.total,)))
        options = {"momentum": momentum, "weight_decay": 0.1, "stochastic_rounding": momentum > 0}
        optimizer = GroupSparseOptimizer(weight, bias, learning_rate=0.1, **options)
        given = (weight, supports, batch.offsets, *_positives(batch, 70), bias)

        def forward(
            features: Tensor,
            given: tuple[Tensor, ...] = given,
            own: GroupSparseOptimizer = optimizer,
            loss: Callable[..., Tensor] = loss,
        ) -> list[Tensor]:
            return [loss(features, *given, optimizer=own, backend=PLACE.backend)]

        yield Step(forward, _leaves(dtype, (70, columns)))


def kernels(*, for_hopper: bool = False) -> dict[str, ModuleType]:
    """Return the name of every Triton kernel that `jagged.ops` launches, and its module.

    Those for Hopper alone, which are not written in Triton's own language, have tests of their own, `test_*_hopper*.py`, and so
    have those that packages alone launch, `test_packaged.py`.
    """
    modules = [importlib.import_module(name) for _, name, _ in pkgutil.walk_packages(jagged.ops.__path__, "jagged.ops.")]
    return {
        name: module
        for module in modules
        for name, kernel in vars(module).items()
        # A kernel wraps a function of its module, interpreted or not; functions of such a name ask about kernels.
        if name.endswith("_kernel") and not name.startswith("packaged_")
        if hasattr(kernel, "fn") and kernel.fn.__module__ == module.__name__
        if for_hopper or not any(part.startswith("hopper") for part in module.__name__.split("."))
    }
