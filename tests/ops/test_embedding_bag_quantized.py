"""Embedding bags of tables in 8 bits against every bag of the numbers that they stand for, written out in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from jagged.ops import BagLayout, BagOptimizer, BagPlan, BagSchedule, embedding_bags, quantize_rows
from jagged.ops.embedding_bag import quantized
from tests.graphs import captured
from tests.ops.test_embedding_bag import (
    INDEX_DTYPES,
    LONGEST,
    ON_CPU,
    ON_GPU,
    ON_TRITON,
    Batch,
    Recorder,
    batch_of,
    batches,
    weights_of,
    written_out,
)
from tests.oracle import check_three_way
from tests.places import ONE_ORDER, PLACE, Place
from tests.reference.embedding_bag import dequantised
from tests.strategies import float_dtypes, random_tensor

OUTPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def storage_of(layout: BagLayout, tables: list[Tensor]) -> Tensor:
    """Return tables of a layout in one storage."""
    storage = tables[0].new_zeros(layout.num_elements)
    for view, table in zip(layout.views(storage), tables, strict=True):
        view.copy_(table)
    return storage


def numbers_of(layout: BagLayout, weights: Tensor, scales: Tensor) -> list[Tensor]:
    """Return each table as the numbers that its bytes stand for, in the dtype of the scales."""
    return dequantised(layout.views(weights), list(scales.split(layout.rows)))


def quantised_of(layout: BagLayout, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return tables of random numbers, quantised; every third row is one number."""
    weights = weights_of(layout, torch.float32, seed)
    for table in layout.views(weights):
        table[::3] = table[::3, :1]
    return quantize_rows(weights, layout)


def check(
    place: Place,
    batch: Batch,
    *,
    output_dtype: torch.dtype = torch.float32,
    sample_dtype: torch.dtype | None = None,
    ids: Tensor | None = None,
    num_bad: int = 0,
) -> None:
    """Check against the written-out bags of `batch`; `ids` are what the function gets in place of the batch's."""
    layout = batch.layout
    weights, scales = quantised_of(layout)

    def ours(scales: Tensor, *samples: Tensor) -> Tensor:
        return embedding_bags(
            weights,
            layout,
            batch.indices if ids is None else ids,
            batch.offsets,
            scales=scales,
            per_sample_weights=samples[0] if samples else None,
            output_dtype=output_dtype,
            backend=place.backend,
            **batch.options,
        )

    def by_hand(scales: Tensor, *samples: Tensor) -> Tensor:
        result = written_out(batch, storage_of(layout, numbers_of(layout, weights, scales)), *samples, num_bad=num_bad)
        return result.to(output_dtype) if scales.dtype == torch.float32 else result

    inputs = [scales]
    if sample_dtype is not None:
        inputs.append(random_tensor(tuple(batch.indices.shape), sample_dtype, 1))
    check_three_way(ours, by_hand, inputs, requires_grad=[False] * len(inputs))


@given(batches(), st.sampled_from(OUTPUT_DTYPES), st.sampled_from([None, *PLACE.dtypes]))
def test_three_way(place: Place, batch: Batch, output_dtype: torch.dtype, sample_dtype: torch.dtype | None) -> None:
    if any(batch.layout.means or ()):
        sample_dtype = None
    check(place, batch, output_dtype=output_dtype, sample_dtype=sample_dtype)


@pytest.mark.parametrize("widths", [(256, 16, 300), (257, 1024, 4)] if PLACE.name != "interpret" else [(260, 4)])
@pytest.mark.parametrize("weighted", [False, True])
def test_wide_tables(place: Place, widths: tuple[int, ...], weighted: bool) -> None:
    layout = BagLayout((9, 70, 5)[: len(widths)], widths)
    lengths = [[3, 0, 1, 2], [1, 1, 1, 1], [0, LONGEST, 0, 7]][: len(widths)]
    check(place, batch_of(layout, lengths), sample_dtype=torch.float32 if weighted else None)


@pytest.mark.parametrize("length", [1, 7, 33] if PLACE.name == "interpret" else [1, 2, 7, 33, 100, 513])
def test_one_length_for_all_bags(place: Place, length: int) -> None:
    """One-hot features, short and long ones: each may be taken by a schedule of its own. The second table's rows begin later."""
    bags = 9 if PLACE.name == "interpret" else 70 if length < 100 else 17
    layout = BagLayout((20, 300), (8, 33), (1, 0, 1), (False, True, True))
    check(place, batch_of(layout, [[length] * bags] * 3))


@ON_TRITON
@pytest.mark.parametrize("weighted", [False, True])
def test_very_long_bags_are_cut(place: Place, weighted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from jagged.ops.embedding_bag.triton import schedules

    longest = 6000
    if place.name == "interpret":
        monkeypatch.setattr(schedules, "SLICE", tl.constexpr(8))
        longest = 70
    layout = BagLayout((40, 9), (140, 6), means=(False, not weighted))
    batch = batch_of(layout, [[longest, 0, longest - 1], [longest // 2] * 3])
    check(place, batch, sample_dtype=torch.float32 if weighted else None)


@ON_TRITON
@pytest.mark.parametrize("index_dtype", INDEX_DTYPES)
@pytest.mark.parametrize("weighted", [False, True])
def test_unknown_ids_are_rows_of_zeros(place: Place, unchecked: None, index_dtype: torch.dtype, weighted: bool) -> None:
    """Of their bias, too."""
    layout = BagLayout((9, 5), (4, 19), means=None if weighted else (False, True))
    batch = batch_of(layout, [[3, 1, 2], [1, 0, 12]], index_dtype=index_dtype)
    indices, ids = batch.indices.clone(), batch.indices.clone()
    for spot, bad, rows in ((1, -1, 9), (3, 9, 9), (5, 2**31 - 1, 9), (6, 5, 5), (9, -(2**31), 5), (18, 13, 5)):
        indices[spot], ids[spot] = rows, bad
    if index_dtype == torch.int64:
        ids[1], ids[9], ids[18] = -(2**62), 2**40, 2**32
    sample_dtype = torch.float32 if weighted else None
    check(place, replace(batch, indices=indices), ids=ids, sample_dtype=sample_dtype, num_bad=1)


@ON_CPU
@pytest.mark.parametrize("length", [3, 30])
def test_unknown_ids_are_errors_on_a_cpu(place: Place, length: int) -> None:
    layout = BagLayout((9, 5), (4, 3))
    weights, scales = quantised_of(layout)
    batch = batch_of(layout, [[length], [1]])
    batch.indices[1] = 9
    with pytest.raises(ValueError, match="expected ids from 0 to 8 for feature 0, got 9 at place 1"):
        embedding_bags(weights, *batch.arguments, scales=scales)


@pytest.mark.parametrize("wrong", [[5, 1, 3, 3, 7], [0, -4, 2, 4, 6], [0, 2, 1000, 4, 6]])
def test_wrong_offsets_and_neighbours_change_nothing(place: Place, unchecked: None, wrong: list[int]) -> None:
    """Outside the scales and in the first rows, which no lookup reads, lies 1e30."""
    layout = BagLayout((9, 9), (4, 3))
    weights = torch.ones(layout.num_elements, dtype=torch.uint8, device=place.device)
    fence = torch.full((30, 2), 1e30, device=place.device)
    scales = fence[5:23].fill_(1.0)
    scales[0], scales[9] = 1e30, 1e30
    indices = torch.tensor([1, 2, 8, 8, 5, 1], device=place.device)
    for dtype in INDEX_DTYPES:
        offsets = torch.tensor(wrong, device=place.device, dtype=dtype)
        output = embedding_bags(weights, layout, indices, offsets, scales=scales, backend=place.backend)
        assert not bool((output[output.isfinite()].abs() > 1e6).any())


def test_scales_may_begin_anywhere(place: Place) -> None:
    """At an odd number of floats, too, where no load of 64 bits may; and a schedule of a plan is followed."""
    layout = BagLayout((9, 5), (4, 3))
    batch = batch_of(layout, [[3, 1], [1, 4]])
    weights, scales = quantised_of(layout)
    expected = embedding_bags(weights, *batch.arguments, scales=scales, backend=place.backend)
    for begin in (0, 1, 2):
        inside = torch.full((40,), float("nan"), device=place.device)[begin : begin + 28].view(14, 2).copy_(scales)
        assert torch.equal(embedding_bags(weights, *batch.arguments, scales=inside, backend=place.backend), expected)
    gpu = torch.cuda.get_device_name(weights.device) if weights.is_cuda else ""
    plan = BagPlan(gpu, {"0": BagSchedule(9, 4, "many", 2)}).schedules(layout, weights.device)
    planned = embedding_bags(weights, *batch.arguments, scales=scales, schedules=plan, backend=place.backend)
    torch.testing.assert_close(planned, expected)


@ONE_ORDER
def test_repeats_are_bit_for_bit_equal(place: Place) -> None:
    torch.use_deterministic_algorithms(False)
    scale = {"cpu": 3, "gpu": 200}[place.name]
    layout = BagLayout((5, 3000, 40), (8, 33, 64), (0, 1, 2, 0))
    batch = batch_of(layout, [[7, 0] * scale, [1, 3] * scale, [0, LONGEST] + [2, 1] * (scale - 1), [1, 1] * scale])
    weights, scales = quantised_of(layout)
    samples = random_tensor(tuple(batch.indices.shape), torch.float32, 1)
    for of_lookups in (None, samples):
        options: dict[str, Any] = {"scales": scales, "per_sample_weights": of_lookups, "backend": place.backend}
        first = embedding_bags(weights, *batch.arguments, **options)
        for _ in range({"cpu": 10, "gpu": 100}[place.name]):
            assert torch.equal(embedding_bags(weights, *batch.arguments, **options), first)


@given(float_dtypes(), st.lists(st.integers(1, 40), min_size=1, max_size=3), st.sampled_from([1e-30, 1.0, 1e30]))
def test_error_is_half_a_scale(place: Place, dtype: torch.dtype, widths: list[int], size: float) -> None:
    """And what rounding the scale, the bias and a product adds: parts of the largest number of the row."""
    size = 1.0 if dtype == torch.float16 else size
    layout = BagLayout((7,) * len(widths), tuple(widths))
    weights = (weights_of(layout, torch.float32) * size).to(dtype)
    quantised, scales = quantize_rows(weights, layout)
    assert (quantised.dtype, quantised.shape, quantised.device) == (torch.uint8, weights.shape, weights.device)
    assert (scales.dtype, scales.shape) == (torch.float32, (layout.first_rows[-1], 2))
    tables, numbers = layout.views(weights.double()), numbers_of(layout, quantised, scales.double())
    for table, got, of_rows in zip(tables, numbers, scales.double().split(layout.rows), strict=True):
        largest = table.abs().amax(1, keepdim=True)
        assert bool(((got - table).abs() <= of_rows[:, :1] / 2 + 2e-7 * largest).all())
        # The ends of a row's range are exact but for rounding.
        assert bool(((got.amax(1) - table.amax(1)).abs() <= 2e-7 * largest[:, 0]).all())


def test_rows_of_one_number_and_rows_that_are_not_finite(place: Place) -> None:
    layout = BagLayout((7,), (3,))
    inf, nan, tiny = float("inf"), float("nan"), 1e-45
    rows = torch.tensor(
        [[0.1] * 3, [0.0] * 3, [-7e30] * 3, [1.0, nan, 2.0], [1.0, inf, 2.0], [0.0, tiny, tiny], [-3e38, 0.0, 3e38]],
        device=place.device,
    )
    quantised, scales = quantize_rows(rows.flatten(), layout)
    (got,) = numbers_of(layout, quantised, scales.double())
    assert torch.equal(got[:3].float(), rows[:3])
    assert got.isnan().all(1).tolist() == [False] * 3 + [True] * 2 + [False] * 2
    assert float(got[5].abs().max()) <= 2 * tiny
    torch.testing.assert_close(got[6].float(), rows[6], rtol=0, atol=float(scales[6, 0]))
    # Bags of such rows; one that is not finite stays in its own.
    ids, ends = torch.arange(6, device=place.device), torch.arange(7, device=place.device)
    pooled = embedding_bags(quantised, layout, ids, ends, scales=scales, backend=place.backend)
    assert torch.equal(pooled[:3], rows[:3])
    assert pooled.isnan().any(1).tolist() == [False] * 3 + [True] * 2 + [False]


def test_large_tables_are_quantised_in_parts(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = BagLayout((10, 5), (4, 30))
    weights = weights_of(layout, torch.float64)
    before = weights.clone()
    whole = quantize_rows(weights, layout)
    assert torch.equal(weights, before)
    monkeypatch.setattr(quantized, "AT_ONCE", 17)
    for got, expected in zip(quantize_rows(weights.requires_grad_(), layout), whole, strict=True):
        assert torch.equal(got, expected)
        assert not got.requires_grad
    strided = torch.stack([weights, weights], 1)[:, 0]
    assert torch.equal(quantize_rows(strided, layout)[0], whole[0])
    nothing = BagLayout((), ())
    quantised, scales = quantize_rows(weights[:0], nothing)
    assert (quantised.shape, scales.shape) == ((0,), (0, 2))


def test_meta_device() -> None:
    layout = BagLayout((4, 3), (5, 2))
    weights, scales = quantize_rows(torch.empty(layout.num_elements, device="meta"), layout)
    ids, offsets = (torch.empty(length, device="meta", dtype=torch.int64) for length in (9, 7))
    output = embedding_bags(weights, layout, ids, offsets, scales=scales, output_dtype=torch.bfloat16)
    assert (output.shape, output.dtype, output.device.type) == ((3, 7), torch.bfloat16, "meta")


@pytest.mark.parametrize("has_sizes", [False, True])
def test_opcheck(place: Place, has_sizes: bool) -> None:
    layout = BagLayout((4, 3), (3, 2), (0, 1, 0))
    batch = batch_of(layout, [[2, 0], [1, 1], [3, 0]], has_sizes=has_sizes)
    weights, scales = quantised_of(layout)
    calls: list[tuple[Any, tuple[Any, ...]]] = []
    with Recorder(calls):
        embedding_bags(
            weights, *batch.arguments, scales=scales, output_dtype=torch.float16, backend=place.backend, **batch.options
        )
    ((operator, arguments),) = calls
    torch.library.opcheck(operator, arguments)


@pytest.mark.skipif(PLACE.name == "interpret", reason="interpreted kernels are not compiled")
def test_one_graph_for_all_batches(place: Place) -> None:
    counter = CompileCounterWithBackend("inductor" if place.name == "gpu" else "aot_eager")
    layout = BagLayout((9, 5), (4, 3), (0, 1, 0))
    weights, scales = quantised_of(layout)

    def function(ids: Tensor, offsets: Tensor) -> Tensor:
        return embedding_bags(weights, layout, ids, offsets, scales=scales, backend=place.backend) * 2

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    function(*batch_of(layout, [[1], [1], [1]]).arguments[1:])
    for bags in (3, 7, 4):
        batch = batch_of(layout, [[2, 1] * bags, [1, 0] * bags, [3, 2] * bags], bags)
        assert torch.equal(compiled(*batch.arguments[1:]), function(*batch.arguments[1:]))
    assert counter.frame_count == 1


@ON_GPU
def test_no_synchronisation_and_graph_capture(place: Place) -> None:
    layout = BagLayout((50, 3000, 40), (8, 33, 64), (0, 1, 2, 0))
    bags, generator = 300, torch.Generator().manual_seed(3)

    def lengths(most: int) -> list[list[int]]:
        """As many lookups in every batch, for a graph's tensors keep their sizes."""
        drawn = [torch.randint(most, (bags,), generator=generator).tolist() for _ in range(4)]
        drawn[-1][-1] += 9000 - sum(map(sum, drawn))
        return drawn

    batch = batch_of(layout, lengths(9))
    weights, scales = quantised_of(layout)

    def step() -> Tensor:
        return embedding_bags(weights, *batch.arguments, scales=scales)

    graph, results = captured(step)
    for seed, most in ((1, 3), (2, 14), (3, 1)):
        other = batch_of(layout, lengths(most), seed)
        batch.indices.copy_(other.indices)
        batch.offsets.copy_(other.offsets)
        graph.replay()
        assert torch.equal(results, step())


@ON_GPU
def test_tables_past_2_to_the_31(place: Place) -> None:
    """The last rows of a table of more than 2^31 bytes, and a table behind it."""
    width, short = 64, 70
    rows = 2**25 + short
    layout, ends = BagLayout((rows, 50), (width, 24)), BagLayout((short, 50), (width, 24))
    low, low_scales = quantised_of(ends)
    weights = torch.zeros(layout.num_elements, dtype=torch.uint8, device=place.device)
    for table, last in zip(layout.views(weights), ends.views(low), strict=True):
        table[-len(last) :] = last
    scales = torch.zeros(rows + 50, 2, device=place.device)
    scales[rows - short :] = low_scales
    near = batch_of(ends, [[3, 0, 40], [1, 70, 2]])
    far = near.indices + (torch.arange(116, device=place.device) < 43) * (rows - short)
    got = embedding_bags(weights, layout, far, near.offsets, scales=scales)
    assert torch.equal(got, embedding_bags(low, *near.arguments, scales=low_scales))


LAYOUT = BagLayout((4, 3), (5, 2))
WEIGHTS, SCALES = quantize_rows(torch.zeros(LAYOUT.num_elements), LAYOUT)
IDS, OFFSETS = torch.zeros(6, dtype=torch.int64), torch.tensor([0, 2, 2, 4, 6])


def call(weights: Any = WEIGHTS, scales: Any = SCALES, **options: Any) -> Callable[[], object]:
    return lambda: embedding_bags(weights, LAYOUT, IDS, OFFSETS, scales=scales, **options)


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (call(scales=None), ValueError, "scales: expected those of the uint8 weights, got None; quantize_rows gives both"),
        (call(WEIGHTS.float()), ValueError, "scales: expected None for weights of torch.float32, got a tensor; only uint8"),
        (call(WEIGHTS.view(torch.int8)), TypeError, "weights: expected dtype float32.*uint8, got int8"),
        (call(scales=[1.0]), TypeError, r"scales: expected a tensor \[R, 2\], got list"),
        (call(scales=SCALES.half()), TypeError, "scales: expected dtype float32, got float16"),
        (call(scales=SCALES[1:]), ValueError, r"scales: expected shape \[7, 2\], contiguous, on cpu.*got \[6, 2\]"),
        (call(scales=SCALES.to("meta")), ValueError, r"scales: expected shape \[7, 2\].*on meta"),
        (call(scales=torch.zeros(2, 7).t()), ValueError, r"scales: expected shape \[7, 2\], contiguous.*of stride \[1, 7\]"),
        (call(output_dtype=torch.float64), TypeError, "output_dtype: expected torch.float32, bfloat16 or float16 for uint8"),
        (
            call(optimizer=BagOptimizer("sgd", LAYOUT, learning_rate=0.1)),
            ValueError,
            "optimizer: expected None for uint8 weights, which are for inference",
        ),
        (call(scales=SCALES.clone().requires_grad_()), ValueError, r"scales: has no gradient.*pass scales.detach\(\)"),
        (
            call(per_sample_weights=torch.ones(6, requires_grad=True)),
            ValueError,
            r"per_sample_weights: has no gradient where weights are uint8; pass per_sample_weights.detach\(\), or call under",
        ),
        (lambda: quantize_rows(WEIGHTS, LAYOUT), TypeError, "weights: expected dtype float32.*got uint8"),
        (
            lambda: quantize_rows(torch.zeros(5), LAYOUT),
            ValueError,
            r"weights: expected the 30 elements of the layout, got shape \[5\]",
        ),
    ],
)
def test_messages_name_argument_and_cure(function: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message.replace("30", str(LAYOUT.num_elements))):
        function()


def test_weights_that_want_a_gradient_may_weigh_under_no_grad(place: Place) -> None:
    layout = BagLayout((4, 3), (5, 2))
    batch = batch_of(layout, [[2, 1], [0, 3]])
    weights, scales = quantised_of(layout)
    samples = torch.full((6,), 2.0, device=place.device, requires_grad=True)
    with torch.no_grad():
        doubled = embedding_bags(weights, *batch.arguments, scales=scales, per_sample_weights=samples, backend=place.backend)
    plain = embedding_bags(weights, *batch.arguments, scales=scales, backend=place.backend)
    torch.testing.assert_close(doubled, 2 * plain)
