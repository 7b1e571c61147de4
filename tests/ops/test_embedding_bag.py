"""Embedding bags against every bag written out in float64, in every place."""

from __future__ import annotations

import contextlib
import copy
import io
import mmap
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from jagged.ops import BagLayout, BagOptimizer, BagSchedules, embedding_bags
from jagged.ops.embedding_bag import torch_impl
from tests.gathering import GATHERINGS, gathering
from tests.graphs import captured
from tests.oracle import check_three_way
from tests.places import ONE_ORDER, PLACE, Place
from tests.reference.embedding_bag import embedding_bags as reference
from tests.strategies import float_dtypes, random_tensor, seeds

ON_GPU = pytest.mark.gpu
ON_CPU = pytest.mark.skipif(PLACE.name != "cpu", reason="says something of the PyTorch implementation alone")
ON_TRITON = pytest.mark.skipif(PLACE.name == "cpu", reason="says something of the Triton kernels alone")
INDEX_DTYPES = (torch.int32, torch.int64)
LONGEST = {"cpu": 150, "interpret": 40, "gpu": 1500}[PLACE.name]
WIDTHS = st.integers(1, 130) if PLACE.name != "interpret" else st.sampled_from([1, 3, 8, 33])
MOST = {"cpu": (5, 6, 5), "interpret": (3, 3, 3), "gpu": (5, 8, 70)}[PLACE.name]


@pytest.fixture(params=["torch"] if PLACE.name == "cpu" else ["small", "map"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """How Triton's passes take batches: small ones by a kernel of their own and sorted, or all by the map and counted."""
    if request.param == "map":
        from jagged.ops.embedding_bag.triton import launch

        monkeypatch.setattr(launch, "SMALL_BAGS", -1)
    with gathering("counted" if request.param == "map" else "sorted"):
        yield str(request.param)


@dataclass(frozen=True)
class Batch:
    """Lookups of a layout's features, and the number of each one's bags."""

    layout: BagLayout
    indices: Tensor
    offsets: Tensor
    sizes: tuple[int, ...]
    has_sizes: bool = False
    has_totals: bool = False

    @property
    def totals(self) -> list[int]:
        """Number of ids of each sequence."""
        ends, firsts = self.offsets.tolist(), [sum(self.sizes[:feature]) for feature in range(len(self.sizes) + 1)]
        totals = [ends[last] - ends[first] for first, last in pairwise(firsts)]
        return [total for total, is_sequence in zip(totals, self.layout.sequences or (), strict=True) if is_sequence]

    @property
    def arguments(self) -> tuple[BagLayout, Tensor, Tensor]:
        return self.layout, self.indices, self.offsets

    @property
    def options(self) -> dict[str, Any]:
        sizes = {"batch_sizes": self.sizes} if self.has_sizes else {}
        return sizes | ({"sequence_totals": self.totals} if self.has_totals else {})


def batch_of(
    layout: BagLayout,
    lengths: Sequence[Sequence[int]],
    seed: int = 0,
    *,
    index_dtype: torch.dtype = torch.int64,
    offset_dtype: torch.dtype = torch.int64,
    has_sizes: bool = False,
) -> Batch:
    """Return a batch whose bags have these lengths, feature by feature; ids come again and again, within bags too."""
    generator = torch.Generator().manual_seed(seed)
    assert layout.tables is not None
    ids = [torch.zeros(0, dtype=torch.int64)]
    for table, bags in zip(layout.tables, lengths, strict=True):
        some = torch.randint(layout.rows[table], (4,), generator=generator)
        any_row = torch.randint(layout.rows[table], (sum(bags),), generator=generator)
        again = some[torch.randint(4, (sum(bags),), generator=generator)]
        ids.append(torch.where(torch.rand(sum(bags), generator=generator) < 0.5, any_row, again))
    ends = torch.tensor([0, *(length for bags in lengths for length in bags)]).cumsum(0)
    indices, offsets = torch.cat(ids).to(index_dtype).to(PLACE.device), ends.to(offset_dtype).to(PLACE.device)
    return Batch(layout, indices, offsets, tuple(map(len, lengths)), has_sizes)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    tables, features, bags = MOST
    widths = draw(st.lists(WIDTHS, min_size=1, max_size=tables))
    rows = [draw(st.integers(1, 40)) for _ in widths]
    reading = draw(st.lists(st.integers(0, len(widths) - 1), min_size=1, max_size=features))
    means = [draw(st.booleans()) for _ in reading] if draw(st.booleans()) else [False] * len(reading)
    sequences = [not is_mean and draw(st.booleans()) for is_mean in means] if draw(st.booleans()) else None
    has_sizes = draw(st.booleans())
    counts = st.integers(0, bags)
    sizes = [draw(counts) for _ in reading] if has_sizes else [draw(counts)] * len(reading)
    generator = torch.Generator().manual_seed(draw(seeds()))
    longest = draw(st.sampled_from([0, 0, LONGEST]))
    lengths = [torch.randint(5, (size,), generator=generator).tolist() for size in sizes]
    if longest and lengths[-1]:
        lengths[-1][-1] = longest
    batch = batch_of(
        BagLayout(rows, widths, reading, means, sequences),  # type: ignore[arg-type]
        lengths,
        draw(seeds()),
        index_dtype=draw(st.sampled_from(INDEX_DTYPES)),
        offset_dtype=draw(st.sampled_from(INDEX_DTYPES)),
        has_sizes=has_sizes,
    )
    return replace(batch, has_totals=batch.layout.has_sequences and draw(st.booleans()))


def written_out(batch: Batch, weights: Tensor, per_sample_weights: Tensor | None = None, num_bad: int = 0) -> Tensor:
    """Return the reference's bags as the function returns them; ids from a table's rows on read zeros.

    Each id of a sequence is a bag of its own.
    """
    layout, ends, sizes, begins = batch.layout, batch.offsets.tolist(), [], []
    assert layout.tables is not None
    assert layout.means is not None
    tables = [torch.cat([x, x.new_zeros(num_bad, x.shape[1])]) for x in layout.views(weights)]
    features = list(zip(layout.tables, layout.means, strict=True))
    assert layout.sequences is not None
    for feature, is_sequence in enumerate(layout.sequences):
        first = sum(batch.sizes[:feature])
        of_bags = ends[first : first + batch.sizes[feature] + 1]
        own = list(range(of_bags[0], of_bags[-1])) if is_sequence else of_bags[:-1]
        begins += own
        sizes.append(len(own))
    offsets = torch.tensor([*begins, ends[-1]])
    outputs = reference(tables, features, batch.indices, offsets, sizes, per_sample_weights)
    pooled = [x for x, is_sequence in zip(outputs, layout.sequences, strict=True) if not is_sequence]
    rows = [x.reshape(-1) for x, is_sequence in zip(outputs, layout.sequences, strict=True) if is_sequence]
    if not rows and not batch.has_sizes:
        return torch.cat(pooled, 1)
    if pooled and not batch.has_sizes:
        pooled = [torch.cat(pooled, 1)]
    return torch.cat([x.reshape(-1) for x in (*pooled, *rows)])


def weights_of(layout: BagLayout, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return random_tensor((layout.num_elements,), dtype, seed)


def check(
    place: Place,
    batch: Batch,
    dtype: torch.dtype,
    *,
    output_dtype: torch.dtype = torch.float32,
    sample_dtype: torch.dtype | None = None,
    wanted: list[bool] | None = None,
    num_bad: int = 0,
) -> None:
    def ours(weights: Tensor, *samples: Tensor) -> Tensor:
        scales = samples[0] if samples else None
        return embedding_bags(
            weights,
            *batch.arguments,
            per_sample_weights=scales,
            output_dtype=output_dtype,
            backend=place.backend,
            **batch.options,
        )

    def by_hand(weights: Tensor, *samples: Tensor) -> Tensor:
        result = written_out(batch, weights, *samples, num_bad=num_bad)
        return result.to(output_dtype) if weights.dtype == dtype else result

    inputs = [weights_of(batch.layout, dtype)]
    if sample_dtype is not None:
        inputs.append(random_tensor(tuple(batch.indices.shape), sample_dtype, 1))
    check_three_way(ours, by_hand, inputs, requires_grad=None if wanted is None else wanted[: len(inputs)])


def run(place: Place, batch: Batch, weights: Tensor, samples: Tensor | None = None, **options: Any) -> list[Tensor]:
    """Return the output and the gradients, of a cotangent that the output gives."""
    leaves = [x.detach().clone().requires_grad_() for x in (weights, samples) if x is not None]
    scales = leaves[1] if samples is not None else None
    output = embedding_bags(
        leaves[0], *batch.arguments, per_sample_weights=scales, backend=place.backend, **batch.options, **options
    )
    return [output.detach(), *torch.autograd.grad(output, leaves, output.detach())]


@given(
    batches(),
    float_dtypes(),
    st.booleans(),
    st.sampled_from([None, *PLACE.dtypes]),
    st.sampled_from([[True, True], [True, False], [False, True], [False, False]]),
    st.sampled_from(GATHERINGS),
)
def test_three_way(
    place: Place,
    batch: Batch,
    dtype: torch.dtype,
    is_wide: bool,
    sample_dtype: torch.dtype | None,
    wanted: list[bool],
    gathered: str,
) -> None:
    if any(batch.layout.means or ()):
        sample_dtype = None
    output_dtype = torch.float32 if is_wide else dtype
    with gathering(gathered):
        check(place, batch, dtype, output_dtype=output_dtype, sample_dtype=sample_dtype, wanted=wanted)


@pytest.mark.skipif(PLACE.name != "cpu", reason="kernels add up in lanes and parts")
def test_a_row_of_many_like_lookups(place: Place) -> None:
    """A mean's gradient comes as often as there are lookups, each time rounded the same way where sums are short of digits."""
    layout, count = BagLayout((1,), (1,), means=(True,)), 1000
    weights = weights_of(layout, torch.float32).requires_grad_()
    pooled = embedding_bags(weights, layout, torch.zeros(count, dtype=torch.int64), torch.tensor([0, count]))
    (grad,) = torch.autograd.grad(pooled, weights, torch.full_like(pooled, 0.1))
    torch.testing.assert_close(grad, torch.full_like(grad, 0.1), rtol=2e-7, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("widths", [(256, 16, 300), (257, 1024, 4)] if PLACE.name != "interpret" else [(260, 4)])
@pytest.mark.parametrize("weighted", [False, True])
def test_wide_tables(place: Place, way: str, widths: tuple[int, ...], dtype: torch.dtype, weighted: bool) -> None:
    layout = BagLayout((9, 70, 5)[: len(widths)], widths)
    lengths = [[3, 0, 1, 2], [1, 1, 1, 1], [0, LONGEST, 0, 7]][: len(widths)]
    check(place, batch_of(layout, lengths), dtype, sample_dtype=dtype if weighted else None)


@pytest.mark.parametrize("length", [1, 2, 7, 33] if PLACE.name == "interpret" else [1, 2, 7, 33, 50, 100, 513])
@pytest.mark.parametrize("is_mean", [False, True])
def test_one_length_for_all_bags(place: Place, way: str, length: int, is_mean: bool) -> None:
    """One-hot features, short and long ones: each may be taken by a schedule of its own."""
    bags = 9 if PLACE.name == "interpret" else 70 if length < 100 else 17
    layout = BagLayout((20, 300), (8, 33), means=(is_mean, is_mean))
    check(place, batch_of(layout, [[length] * bags] * 2), torch.float32)


def test_features_of_every_length_beside_one_another(place: Place, way: str) -> None:
    """One-hot, mostly absent, pooled, one bag that is longer than all the rest: sums and means of tables that are shared."""
    bags = 6 if PLACE.name == "interpret" else 70
    generator = torch.Generator().manual_seed(1)
    absent = (torch.rand(bags, generator=generator) < 0.2).long().tolist()
    pooled = torch.randint(20 if PLACE.name == "interpret" else 60, (bags,), generator=generator).tolist()
    lengths = [[1] * bags, absent, pooled, [0] * (bags - 1) + [2 * LONGEST], [0] * bags, pooled[::-1]]
    layout = BagLayout((50, 7, 1000, 1), (16, 5, 64, 1), (0, 1, 2, 1, 3, 2), (False, True, False, False, True, True))
    # Those with sizes of their own have one way.
    for has_sizes in (False, True)[: 1 if way == "map" else 2]:
        check(place, batch_of(layout, lengths, has_sizes=has_sizes), torch.float32)


@ON_TRITON
def test_small_batches_in_units_of_several_bags(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as divide a feature's bags or not, fewer and more than stand side by side; the same bits for all."""
    from jagged.ops.embedding_bag.triton import launch

    bags = 7 if place.name == "interpret" else 150
    layout = BagLayout((50, 7, 90, 3), (4, 70, 32, 5), (0, 1, 2, 1, 3), (False, True, False, False, True))
    mixed = [(5 * bag) % 17 for bag in range(bags)]
    lengths = [[1] * bags, mixed, [int(bag % 3 > 0) for bag in range(bags)], [0] * (bags - 1) + [LONGEST], mixed[::-1]]
    batch, weights = batch_of(layout, lengths, index_dtype=torch.int32), weights_of(layout, torch.float32)
    check(place, batch, torch.float32, wanted=[False])
    expected = embedding_bags(weights, *batch.arguments, backend=place.backend)
    for programs in (1, 4, 12):
        monkeypatch.setattr(launch, "SMALL_PROGRAMS", programs)
        assert torch.equal(embedding_bags(weights, *batch.arguments, backend=place.backend), expected)


@ON_TRITON
def test_which_batches_do_without_the_map(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few bags of few lookups in the mean and of few samples, as many for all features, and no plan."""
    from jagged.ops.embedding_bag.triton import launch

    class MappedError(Exception): ...

    def refuse(*_: Any, **__: Any) -> None:
        raise MappedError

    monkeypatch.setattr(launch, "_launch_map", refuse)
    monkeypatch.setattr(launch, "SMALL_BAGS", 6)
    layout = BagLayout((9, 5), (4, 3))
    weights = weights_of(layout, torch.float32)
    plan = BagSchedules(torch.tensor([6, 6], dtype=torch.int32, device=place.device))
    for lengths, options, is_mapped in (
        ([[1, 0, 2], [0, 3, 1]], {}, False),
        ([[1, 0, 2], [0, 3, 1]], {"batch_sizes": (3, 3)}, True),
        ([[1, 0, 2], [0, 3, 1]], {"schedules": plan}, True),
        ([[1, 0, 2, 1], [0, 3, 1, 0]], {}, True),
        ([[1, 0], [2 * 64 - 1, 0]], {}, False),
        ([[1, 0], [2 * 64, 0]], {}, True),
        ([[0, 0], [0, 0]], {}, False),
        ([[1, 0, 2], [0, 3, 1]], {"samples": 2}, True),
    ):
        batch = batch_of(layout, lengths)
        monkeypatch.setattr(launch, "SMALL_SAMPLES", options.get("samples", 512))
        options = {name: value for name, value in options.items() if name != "samples"}

        def call(batch: Batch = batch, options: Any = options) -> Tensor:
            return embedding_bags(weights, *batch.arguments, backend=place.backend, **options)

        if is_mapped:
            with pytest.raises(MappedError):
                call()
        else:
            assert call().shape == (len(lengths[0]), 7)


@ON_CPU
def test_reference_is_embedding_bag(place: Place) -> None:
    layout = BagLayout((9, 5), (4, 3), (0, 1, 0), (False, True, False))
    batch = batch_of(layout, [[2, 0, 3], [1, 4, 0], [0, 0, 6]])
    weights = weights_of(layout, torch.float64)
    tables, ends = layout.views(weights), batch.offsets
    expected = []
    for feature, (table, mode) in enumerate(((0, "sum"), (1, "mean"), (0, "sum"))):
        of_feature = ends[3 * feature : 3 * feature + 4]
        ids = batch.indices[of_feature[0] : of_feature[-1]]
        starts = of_feature - of_feature[0]
        expected.append(torch.nn.functional.embedding_bag(ids, tables[table], starts, mode=mode, include_last_offset=True))
    torch.testing.assert_close(written_out(batch, weights), torch.cat(expected, 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weighted", [False, True])
def test_sums_are_accumulated_in_float32(place: Place, dtype: torch.dtype, weighted: bool) -> None:
    """With an output in float32 nothing is rounded to the dtype of the tables: inputs that it has give what float32 gives."""
    layout = BagLayout((30, 2000), (5, 16))
    batch = batch_of(layout, [[30, 3], [20, 40]])
    inputs = [weights_of(layout, dtype).float()]
    if weighted:
        inputs.append(random_tensor(tuple(batch.indices.shape), dtype, 1).float())

    def ours(weights: Tensor, *samples: Tensor) -> Tensor:
        scales = samples[0].to(dtype) if samples else None
        return embedding_bags(weights.to(dtype), *batch.arguments, per_sample_weights=scales, backend=place.backend)

    def by_hand(weights: Tensor, *samples: Tensor) -> Tensor:
        return written_out(batch, weights, *samples)

    check_three_way(ours, by_hand, inputs, requires_grad=[False] * len(inputs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_are_accumulated_in_float32(place: Place, dtype: torch.dtype) -> None:
    """Above 256 bfloat16 has no odd numbers, above 2048 float16: a sum in them stands still there."""
    begin = 256 if dtype == torch.bfloat16 else 2048
    count = 45 if PLACE.name == "interpret" else begin + 45
    layout = BagLayout((1, 2), (3, 16))
    batch = batch_of(layout, [[1] * count, [1] + [0] * (count - 2) + [count - 1]])
    batch.indices[count:] = 1
    weights = torch.ones(layout.num_elements, dtype=dtype, device=place.device, requires_grad=True)
    output = embedding_bags(weights, *batch.arguments, backend=place.backend)
    cotangent = torch.ones_like(output)
    cotangent[0] = begin
    (grad,) = torch.autograd.grad(output, weights, cotangent)
    first, second = layout.views(grad)
    expected = torch.tensor(begin + count - 1).to(dtype).item()
    assert (first == expected).all()
    assert (second[1] == expected).all()
    assert not second[0].any()


@pytest.mark.parametrize("has_sizes", [False, True])
@pytest.mark.parametrize("bags", [0, 3])
def test_batches_of_nothing(place: Place, bags: int, has_sizes: bool) -> None:
    layout = BagLayout((4, 3), (5, 2), (0, 1, 0), (False, True, False))
    batch = batch_of(layout, [[0] * bags] * 3, has_sizes=has_sizes)
    output, grad = run(place, batch, weights_of(layout, torch.float32))
    assert output.shape == ((bags * 12,) if has_sizes else (bags, 12))
    assert not output.any()
    assert not grad.any()
    none = BagLayout((4,), (5,), ())
    output, grad = run(place, batch_of(none, [], has_sizes=has_sizes), weights_of(none, torch.float32))
    assert output.shape == ((0,) if has_sizes else (0, 0))
    assert grad.shape == (20,)
    assert not grad.any()


def test_batch_sizes_of_features(place: Place) -> None:
    """A KeyedJaggedTensor with a batch size for each feature, as TorchRec lays it out: feature after feature."""
    layout = BagLayout((9, 5, 7), (4, 3, 8), means=(False, True, False))
    lengths = [[2, 0, 3], [], [1]]
    batch = batch_of(layout, lengths, has_sizes=True)
    weights = weights_of(layout, torch.float32)
    flat = embedding_bags(weights, *batch.arguments, batch_sizes=batch.sizes, backend=place.backend)
    assert flat.shape == (3 * 4 + 8,)
    alone = BagLayout((7,), (8,))
    ids = batch.indices[5:]
    last = embedding_bags(
        layout.views(weights)[2].flatten(), alone, ids, torch.tensor([0, 1], device=place.device), backend=place.backend
    )
    assert torch.equal(flat[12:], last.flatten())
    # The same for all: the rectangle's columns one after the other.
    batch = batch_of(layout, [[2, 0], [1, 1], [0, 4]])
    rectangle = embedding_bags(weights, *batch.arguments, backend=place.backend)
    for sizes in ([2, 2, 2], (2, 2, 2)):
        flat = embedding_bags(weights, *batch.arguments, batch_sizes=sizes, backend=place.backend)
        assert torch.equal(flat, torch.cat([x.flatten() for x in rectangle.split([4, 3, 8], 1)]))


@ON_TRITON
@pytest.mark.parametrize("index_dtype", INDEX_DTYPES)
@pytest.mark.parametrize("weighted", [False, True])
def test_unknown_ids_are_rows_of_zeros(place: Place, unchecked: None, way: str, index_dtype: torch.dtype, weighted: bool) -> None:
    """Without a gradient; a mean counts them among its bag's."""
    layout = BagLayout((9, 5), (4, 19), means=None if weighted else (False, True))
    batch = batch_of(layout, [[3, 1, 2], [1, 0, 12]], index_dtype=index_dtype)
    indices = batch.indices.clone()
    ours = batch.indices.clone()
    # For the reference the first row past the table's; the second table begins where the first one ends.
    for place_, id_, rows in ((1, -1, 9), (3, 9, 9), (5, 2**31 - 1, 9), (6, 5, 5), (9, -(2**31), 5), (18, 13, 5)):
        indices[place_], ours[place_] = rows, id_
    if index_dtype == torch.int64:
        ours[1], ours[9], ours[18] = -(2**62), 2**40, 2**32
    with_bad = replace(batch, indices=ours)

    def check_bad(weights: Tensor, *samples: Tensor) -> Tensor:
        scales = samples[0] if samples else None
        return embedding_bags(weights, *with_bad.arguments, per_sample_weights=scales, backend=place.backend)

    def by_hand(weights: Tensor, *samples: Tensor) -> Tensor:
        return written_out(replace(batch, indices=indices), weights, *samples, num_bad=1)

    inputs = [weights_of(layout, torch.float32)]
    if weighted:
        inputs.append(random_tensor(tuple(indices.shape), torch.float32, 1))
    check_three_way(check_bad, by_hand, inputs)


@ON_CPU
@pytest.mark.parametrize("dtype", PLACE.dtypes)
@pytest.mark.parametrize("bad", [-1, 9, 2**30])
@pytest.mark.parametrize("length", [3, 30])
def test_unknown_ids_are_errors_on_a_cpu(place: Place, dtype: torch.dtype, bad: int, length: int) -> None:
    """Negative ids too, which count from the end elsewhere in PyTorch; in bags shorter and longer than the table."""
    layout = BagLayout((5, 9), (3, 4))
    batch = batch_of(layout, [[1], [length]])
    batch.indices[2] = bad
    with pytest.raises(ValueError, match=f"expected ids from 0 to 8 for feature 1, got {bad} at place 2"):
        embedding_bags(weights_of(layout, dtype), *batch.arguments)


def test_values_are_checked_on_demand(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAGGED_VALIDATE", "1")
    layout = BagLayout((9, 5), (4, 3), (0, 1, 0))
    weights = weights_of(layout, torch.float32)

    def call(batch: Batch) -> Tensor:
        return embedding_bags(weights, *batch.arguments, backend=place.backend, **batch.options)

    for has_sizes in (False, True):
        batch = batch_of(layout, [[2, 1], [0, 3], [1, 1]], has_sizes=has_sizes)
        call(batch)
        for spot, bad, message in (
            (0, -1, r"indices: expected ids from 0 to 8 for feature 0, got -1 at place 0"),
            (4, 5, r"indices: expected ids from 0 to 4 for feature 1, got 5 at place 4"),
            (7, 9, r"indices: expected ids from 0 to 8 for feature 2, got 9 at place 7"),
        ):
            wrong = batch.indices.clone()
            wrong[spot] = bad
            with pytest.raises(ValueError, match=message):
                call(replace(batch, indices=wrong))
        for offsets, message in (
            ([0, 2, 1, 3, 6, 7, 8], r"offsets\[2\]: expected at least 2"),
            ([1, 2, 3, 3, 6, 7, 8], r"offsets\[0\]: expected 0, got 1"),
            ([0, 2, 3, 3, 6, 7, 7], r"offsets\[6\]: expected 8.*got 7"),
        ):
            with pytest.raises(ValueError, match=message):
                call(replace(batch, offsets=torch.tensor(offsets, device=place.device)))


WRONG = [[5, 1, 3, 3, 7], [0, -4, 2, 4, 6], [0, 2, 1000, 4, 6], [0, 2, 4, 5, 2**31 - 1], [-(2**31), 3, 2, 9, -1], [9, 9, 9, 9, 9]]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("gathered", GATHERINGS)
def test_wrong_offsets_reach_no_foreign_memory(place: Place, wrong: list[int], weighted: bool, gathered: str) -> None:
    """Outside the lookups lie ids of a row, and weights, of 1e30."""
    layout = BagLayout((9, 9), (4, 3))
    fence = torch.zeros(60, dtype=torch.int64, device=place.device)
    indices = fence[20:26].copy_(torch.tensor([1, 2, 8, 8, 5, 1]))
    table = torch.full((100 + layout.num_elements,), 1e30, device=place.device)
    weights = table[48 : 48 + layout.num_elements].fill_(1.0)
    for view in layout.views(weights):
        view[0] = 1e30
    around = torch.full((60,), 1e30, device=place.device)
    samples = around[20:26].fill_(1.0) if weighted else None
    for dtype in INDEX_DTYPES:
        offsets = torch.tensor(wrong, device=place.device, dtype=dtype)
        with gathering(gathered):
            results = run(place, Batch(layout, indices, offsets, (2, 2)), weights, samples)
        for result in results:
            assert not bool((result[result.isfinite()].abs() > 1e6).any())
        # No lookup reads the first rows.
        assert not any(bool(view[0].any()) for view in layout.views(results[1]))


@pytest.mark.skipif(PLACE.name != "interpret", reason="watches interpreted kernels")
@pytest.mark.parametrize("gathered", GATHERINGS)
@pytest.mark.parametrize(("tables", "wrong"), [
    ((0, 1, 2), None), ((2, 0, 2), None), ((0,), None), ((0, 2, 2), [5, 1, 3, 9, 0, -1, 11]),
    ((0, 0, 2), [-(2**31), 9, 0, 9, 1, 2, 2**31 - 1]), ((0, 1), [0, 3, -(2**31), 4, 6]), ((0, 1), [0, 2**31 - 1, -(2**31), 4, 6]),
    ((0, 1), [0, 1, 1]), ((0, 1), [0, -2, 4]), ((0, 1), [0, 50, 100]), ((0, 1), [0, 9, 2]),
])  # fmt: skip
@pytest.mark.usefixtures("unchecked")
def test_kernels_stay_inside_their_tensors(
    place: Place, gathered: str, tables: tuple[int, ...], wrong: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids that no table has, tables that nothing reads, wrong offsets; by the map and without it."""
    from jagged.ops.embedding_bag.triton import launch
    from tests.interpreter import accesses_checked

    layout = BagLayout((1, 5, 3), (4, 5, 130), tables)
    batch = batch_of(layout, [[2, 7], [0, 0], [1, 1]][: len(tables)])
    batch.indices[1] = 7
    if wrong is not None:
        batch = replace(batch, offsets=torch.tensor(wrong, dtype=torch.int32))
    weights, samples = weights_of(layout, torch.float32), random_tensor(tuple(batch.indices.shape), torch.float32, 1)
    optimizer = BagOptimizer("rowwise_adagrad", layout, learning_rate=0.1)
    with gathering(gathered, long=4), accesses_checked():
        for small_bags in (launch.SMALL_BAGS, -1):
            monkeypatch.setattr(launch, "SMALL_BAGS", small_bags)
            run(place, batch, weights, samples)
            output = embedding_bags(weights.requires_grad_(), *batch.arguments, optimizer=optimizer, backend=place.backend)
            output.sum().backward()


def test_nan_stays_in_its_bag(place: Place) -> None:
    layout = BagLayout((9, 5), (4, 3))
    batch = batch_of(layout, [[3, 1, 2], [1, 0, 12]])
    weights = weights_of(layout, torch.float32)
    poisoned = int(batch.indices[3])
    layout.views(weights)[0][poisoned, 2] = float("nan")
    output = embedding_bags(weights, *batch.arguments, backend=place.backend)
    ends = batch.offsets.tolist()
    has = [poisoned in batch.indices[ends[bag] : ends[bag + 1]].tolist() for bag in range(3)]
    assert output[:, 2].isnan().tolist() == has
    assert int(output.isnan().sum()) == sum(has)


def test_gradients_of_any_stride(place: Place) -> None:
    layout = BagLayout((9, 5), (4, 3))
    weights, samples = weights_of(layout, torch.float32), random_tensor((9,), torch.float32, 1)
    batch = batch_of(layout, [[3, 1], [1, 4]])
    dense = random_tensor((2, 7), torch.float32, 2)
    for grad in (torch.ones((), device=place.device).expand(2, 7), dense, dense.t().contiguous().t(), dense[:, :1].expand(2, 7)):
        results = []
        for given_ in (grad, grad.contiguous()):
            leaves = [x.clone().requires_grad_() for x in (weights, samples)]
            output = embedding_bags(leaves[0], *batch.arguments, per_sample_weights=leaves[1], backend=place.backend)
            results.append(torch.autograd.grad(output, leaves, given_))
        for got, expected in zip(*results, strict=True):
            assert torch.equal(got, expected)


def test_strided_lookups(place: Place) -> None:
    layout = BagLayout((9, 5), (4, 3))
    weights, samples = weights_of(layout, torch.float32), random_tensor((9,), torch.float32, 1)
    batch = batch_of(layout, [[3, 1], [1, 4]])
    expected = run(place, batch, weights, samples)
    indices, offsets, scales = (
        torch.stack([x, torch.full_like(x, 77)], 1)[:, 0] for x in (batch.indices, batch.offsets, samples)
    )
    leaves = [weights.clone().requires_grad_(), scales.detach().requires_grad_()]
    output = embedding_bags(leaves[0], layout, indices, offsets, per_sample_weights=leaves[1], backend=place.backend)
    got = [output.detach(), *torch.autograd.grad(output, leaves, output.detach())]
    for ours, same in zip(got, expected, strict=True):
        assert torch.equal(ours, same)
    # A storage that begins anywhere in another, and one that begins where no 16-byte load may.
    for begin in (16, 1):
        other = torch.full((layout.num_elements + 40,), float("nan"), device=place.device)
        inside = other[begin : begin + layout.num_elements].copy_(weights)
        output = embedding_bags(inside, *batch.arguments, per_sample_weights=samples, backend=place.backend)
        assert torch.equal(output, expected[0])


@ON_TRITON
@pytest.mark.parametrize("has_sizes", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_very_long_bags_are_cut(place: Place, weighted: bool, has_sizes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of features that are long in the mean, beside others; wide and odd rows, means, and bags of nothing among them."""
    from jagged.ops.embedding_bag.triton import schedules

    longest = 6000
    if place.name == "interpret":
        # A compiled kernel does not take another number of a global one.
        monkeypatch.setattr(schedules, "SLICE", tl.constexpr(8))
        longest = 40
    layout = BagLayout((3, 40, 5, 9), (6, 140, 8, 4), (0, 1, 2, 3), None if weighted else (True, False, False, True))
    lengths = [[longest, 0, longest - 1], [longest // 2] * 3, [2, 0, 1], [longest // 3, longest, longest + 7]]
    batch = batch_of(layout, lengths, has_sizes=has_sizes)
    check(place, batch, torch.float32, sample_dtype=torch.float32 if weighted else None)


@ON_TRITON
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("size", "group"), [(8, None), (16, None), (64, None), (8, 2), (8, 4)])
@pytest.mark.parametrize("widths", [(6, 140, 8, 4), (8, 300, 36, 4)])
def test_rows_of_many_lookups_are_summed_in_parts(
    place: Place, widths: tuple[int, ...], size: int, group: int | None, weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that end with a block, go across one end or several, or are all of a table, beside others; wide rows too.

    And parts of groups of blocks that are added up first.
    """
    from jagged.ops.embedding_bag.triton import sorting

    monkeypatch.setattr(sorting, "BLOCKS", ((2**62, size),))
    if group is not None:
        monkeypatch.setattr(sorting, "GROUPED_BLOCKS", group)
        monkeypatch.setattr(sorting, "FEWEST_GROUPED", 1)
    layout = BagLayout((3, 1, 50, 2), widths)
    bags = 5 if place.name == "interpret" else 9
    for seed, most in enumerate((5, 33) if place.name == "interpret" else (5, 16, 33)):
        lengths = torch.randint(most, (4, bags), generator=torch.Generator().manual_seed(seed)).tolist()
        batch = batch_of(layout, lengths, seed)
        check(place, batch, torch.float32, sample_dtype=torch.float32 if weighted else None)


@ON_TRITON
def test_a_row_of_very_many_lookups_is_summed_in_groups_of_parts(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins and ends within a group, with one, or a block before it ends; each group's sum is taken in place of its parts."""
    from jagged.ops.embedding_bag.triton import sorting, sums

    monkeypatch.setattr(sorting, "BLOCKS", ((2**62, 8),))
    monkeypatch.setattr(sorting, "GROUPED_BLOCKS", 4)
    layout, group = BagLayout((3,), (8,)), 32
    weights = weights_of(layout, torch.float32)
    for before, count, groups in ((5, 4 * group, 3), (0, 3 * group, 2), (group, 2 * group, 2), (group - 1, 2 * group + 1, 2)):
        ids = torch.tensor([0] * before + [1] * count + [2] * 40, device=place.device)
        offsets = torch.tensor([*range(0, len(ids), 7), len(ids)], device=place.device)
        batch = Batch(layout, ids, offsets, (len(offsets) - 1,))
        results = []
        for fewest, launch in ((2**30, None), (1, None), (1, lambda *_, **__: None)):
            monkeypatch.setattr(sorting, "FEWEST_GROUPED", fewest)
            with pytest.MonkeyPatch.context() as patch, gathering("sorted"):
                if launch is not None:
                    patch.setattr(sums, "_launch_groups", launch)
                results.append(run(place, batch, weights)[1].view(3, 8))
        torch.testing.assert_close(results[1], results[0])
        assert torch.equal(results[1][[0, 2]], results[0][[0, 2]])
        # Without the sums of groups the first block's part would stand for each.
        assert not torch.allclose(results[2][1], results[0][1]), groups


@ON_TRITON
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("has_sizes", [False, True])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_small_batches_are_sorted_in_chunks(place: Place, index_dtype: torch.dtype, has_sizes: bool, weighted: bool) -> None:
    """Chunks of one table and of several, of tables that features read in another order, one chunk, and full ones: as sorted."""
    layout = BagLayout((5, 3000, 40), (8, 33, 64), (2, 0, 1, 0))
    for lengths in (
        [[9, 0, 40], [1, 7, 3], [2, 90, 1], [5, 0, 11]],
        [[3, 1, 0], [2, 0, 0], [1, 1, 0], [0, 0, 1]],
        [[16], [0], [8], [24]],
    ):
        batch = batch_of(layout, lengths, index_dtype=index_dtype, offset_dtype=index_dtype, has_sizes=has_sizes)
        weights = weights_of(layout, torch.float32)
        samples = random_tensor(tuple(batch.indices.shape), torch.float32, 1) if weighted else None
        results = []
        for way in ("sorted", "merged"):
            with gathering(way):
                results.append(run(place, batch, weights, samples))
        assert all(map(torch.equal, *results))
        with gathering("merged"):
            check(place, batch, torch.float32, sample_dtype=torch.float32 if weighted else None)


@ON_TRITON
@pytest.mark.parametrize("gathered", ["merged", "sorted"])
def test_rows_of_tables_are_numbered_in_64_bits(place: Place, gathered: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where tables that are read have 2^31 rows or more together; here a number behind them says so."""
    from jagged.ops.embedding_bag.triton import sums

    layout = BagLayout((5, 300, 40), (8, 36, 64), (2, 0, 1))
    batch = batch_of(layout, [[9, 0, 40], [1, 70, 3], [2, 50, 1]])
    weights, known_of, keys = weights_of(layout, torch.float32), sums.known_of, []
    with gathering(gathered):
        expected = run(place, batch, weights)
        monkeypatch.setattr(sums, "known_of", lambda layout: known_of(layout)._replace(num_rows=2**40))
        sort = sums._Sums._sorted
        monkeypatch.setattr(sums._Sums, "_sorted", lambda own, most: keys.append(sort(own, most)) or keys[-1])
        found = run(place, batch, weights)
    assert [order.keys.dtype for order in keys] == [torch.int64]
    assert all(map(torch.equal, found, expected))


@ON_TRITON
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("gathered", ["merged", "sorted", "counted"])
@pytest.mark.parametrize("has_sizes", [False, True])
def test_lookups_of_no_bag_are_none(place: Place, has_sizes: bool, gathered: str) -> None:
    """Those before the first bag and behind the last one: what no kernel wrote a key for must not be taken for one."""
    layout = BagLayout((9, 40, 7), (4, 5, 8), (0, 1, 2))
    batch = batch_of(layout, [[2, 0, 5], [1, 1, 3], [4, 0, 0]], has_sizes=has_sizes)
    weights, samples = weights_of(layout, torch.float32), random_tensor((16 + 300,), torch.float32, 1)
    front, behind = (torch.zeros(count, dtype=torch.int64, device=place.device) for count in (7, 293))
    wide = replace(batch, indices=torch.cat([front, batch.indices, behind]), offsets=batch.offsets + 7)
    with gathering(gathered):
        output, of_weights, of_samples = run(place, wide, weights, samples)
        expected = run(place, batch, weights, samples[7:23])
    torch.testing.assert_close((output, of_weights, of_samples[7:23]), tuple(expected))
    assert not of_samples[:7].any()
    assert not of_samples[23:].any()


@ON_TRITON
@pytest.mark.parametrize("weighted", [False, True])
def test_rows_of_many_lookups_are_summed_in_slices(place: Place, weighted: bool) -> None:
    """Where lookups are counted: rows of as many as are summed at once, one more, and several times as many; several features."""
    at_once = 8 if place.name == "interpret" else 256
    layout = BagLayout((1, 3, 50), (140, 6, 8), (1, 0, 2, 1, 0))
    with gathering("counted", long=at_once):
        for most in (at_once, at_once + 1, 4 * at_once):
            lengths = [[most, 3, 0], [most - 1, 0, 1], [5, 0, most], [0, 1, 2], [0, 1, 0]]
            batch = batch_of(layout, lengths)
            check(place, batch, torch.float32, sample_dtype=torch.float32 if weighted else None)


@ON_TRITON
@pytest.mark.parametrize("rows", [900, 4000, 20_000])
def test_chunks_of_a_feature(place: Place, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks of a feature and of a table, rows in one of them or in all, more rows than lookups and fewer."""
    from jagged.ops.embedding_bag.triton import counting

    lengths = [[90, 0, 41], [64], [], [33, 1]]
    if place.name == "interpret":
        import triton.language as tl

        # A block is of one chunk.
        for name, number in (("CHUNK_BITS", 5), ("BLOCK_PLACES", 16), ("PLACES_TOGETHER", 8), ("COUNTED_TOGETHER", 16)):
            monkeypatch.setattr(counting, name, tl.constexpr(number))
    else:
        lengths = [[length * 100 for length in bags] for bags in lengths]
    layout = BagLayout((rows, 40), (4, 8), (0, 1, 0, 0))
    batch = batch_of(layout, lengths, has_sizes=True)
    with gathering("counted"):
        check(place, batch, torch.float32)


@ON_TRITON
@pytest.mark.parametrize(("tables", "rows", "most_rows", "lookups", "expected"), [
    # All, from the larger of two numbers of lookups on.
    (1000, 2_000_000, 4096, 1_000_000, 65_536), (1000, 2_000_000, 4096, 999_999, 0),
    (128, 128_000, 1000, 131_072, 65_536), (128, 128_000, 1000, 131_071, 0), (127, 128_000, 1000, 10_000_000, 0),
    # None, where one has too many rows.
    (1000, 3_000_000, 65_536, 2_000_000, 65_536), (1000, 3_000_000, 65_537, 20_000_000, 0),
    (26, 54_000_000, 10_000_000, 27_000_000, 0),
])  # fmt: skip
def test_which_tables_are_counted(place: Place, tables: int, rows: int, most_rows: int, lookups: int, expected: int) -> None:
    from jagged.ops.embedding_bag.triton import sums

    assert sums.most_counted(tables, lookups, rows, most_rows) == expected


@ON_TRITON
@pytest.mark.parametrize(("samples", "lookups", "features", "expected"), [
    (512, 2_097_151, 1200, 8), (512, 2_097_152, 1200, 12), (512, 10_400_000, 1000, 13), (2560, 52_000_000, 1000, 24),
    (8191, 1_750_000, 26, 8), (8192, 1_750_000, 26, 12), (8192, 30_000_000, 26, 24),
])  # fmt: skip
def test_how_long_units_are(place: Place, samples: int, lookups: int, features: int, expected: int) -> None:
    from jagged.ops.embedding_bag.triton import launch

    assert launch.turns_of_units(samples * features, lookups, features) == expected


@ONE_ORDER
@pytest.mark.parametrize("gathered", GATHERINGS)
@pytest.mark.parametrize("dtype", PLACE.dtypes)
def test_repeats_are_bit_for_bit_equal(place: Place, dtype: torch.dtype, gathered: str) -> None:
    torch.use_deterministic_algorithms(False)
    scale = {"cpu": 3, "gpu": 200}[place.name]
    layout = BagLayout((5, 3000, 40), (8, 33, 64), (0, 1, 2, 0))
    lengths = [[7, 0] * scale, [1, 3] * scale, [0, LONGEST] + [2, 1] * (scale - 1), [1, 1] * scale]
    batch = batch_of(layout, lengths)
    weights, samples = weights_of(layout, dtype), random_tensor(tuple(batch.indices.shape), dtype, 1)
    for scales in (None, samples):
        with gathering(gathered):
            expected = run(place, batch, weights, scales)
            for _ in range({"cpu": 10, "gpu": 100}[place.name]):
                for again, first in zip(run(place, batch, weights, scales), expected, strict=True):
                    assert torch.equal(again, first)


def test_second_derivatives_are_refused(place: Place) -> None:
    layout = BagLayout((4,), (3,))
    batch = batch_of(layout, [[2, 1]])
    weights = weights_of(layout, torch.float32).requires_grad_()
    samples = torch.ones(3, device=place.device, requires_grad=True)
    for leaf in (weights, samples):
        output = embedding_bags(weights, *batch.arguments, per_sample_weights=samples, backend=place.backend)
        (grad,) = torch.autograd.grad(output.square().sum(), leaf, create_graph=True)
        with pytest.raises(RuntimeError, match="embedding_bags has no second derivative"):
            grad.square().sum().backward()


@ON_CPU
@pytest.mark.parametrize("has_sizes", [False, True])
def test_gradcheck(place: Place, has_sizes: bool) -> None:
    for weighted in (False, True):
        layout = BagLayout((4, 3), (3, 2), (0, 1, 0), None if weighted else (False, True, True))
        batch = batch_of(layout, [[2, 0, 3], [1, 1, 4], [3, 0, 1]], has_sizes=has_sizes)
        inputs = [weights_of(layout, torch.float64).requires_grad_()]
        if weighted:
            inputs.append(random_tensor(tuple(batch.indices.shape), torch.float64, 1).requires_grad_())

        def function(weights: Tensor, *samples: Tensor, batch: Batch = batch) -> Tensor:
            scales = samples[0] if samples else None
            return embedding_bags(
                weights, *batch.arguments, per_sample_weights=scales, output_dtype=torch.float64, **batch.options
            )

        assert torch.autograd.gradcheck(function, inputs)


def test_meta_device() -> None:
    layout = BagLayout((4, 3), (5, 2))
    for dtype, sizes, shape in ((torch.bfloat16, None, (3, 7)), (torch.float32, (2, 4), (18,))):
        weights = torch.empty(layout.num_elements, device="meta", dtype=dtype, requires_grad=True)
        samples = torch.empty(9, device="meta", requires_grad=True)
        ids, offsets = (torch.empty(length, device="meta", dtype=torch.int64) for length in (9, 7))
        output = embedding_bags(weights, layout, ids, offsets, per_sample_weights=samples, batch_sizes=sizes, output_dtype=dtype)
        output.sum().backward()
        assert (output.shape, output.dtype) == (shape, dtype)
        assert weights.grad is not None
        assert samples.grad is not None
        assert (weights.grad.shape, weights.grad.dtype) == ((layout.num_elements,), dtype)
        assert samples.grad.shape == (9,)
        optimizer = BagOptimizer("adam", layout, learning_rate=0.1, device="meta")
        embedding_bags(weights, layout, ids, offsets, optimizer=optimizer).sum().backward()


@pytest.mark.parametrize("has_sizes", [False, True])
def test_opcheck(place: Place, has_sizes: bool) -> None:
    layout = BagLayout((4, 3), (3, 2), (0, 1, 0))
    batch = batch_of(layout, [[2, 0], [1, 1], [3, 0]], has_sizes=has_sizes)
    calls: list[tuple[Any, tuple[Any, ...]]] = []
    recorded = (
        "embedding_bags",
        "embedding_bags_weights_backward",
        "embedding_bags_samples_backward",
        "embedding_bags_update",
    )
    # What the function itself hands to its operators.
    with Recorder(calls):
        for dtype, weighted in ((torch.float32, True), (torch.bfloat16, False)):
            weights = weights_of(layout, dtype).requires_grad_()
            samples = torch.ones(7, device=place.device, requires_grad=True) if weighted else None
            for kind in (None, "adam" if weighted else "sgd"):
                more: dict[str, Any] = {"max_norm": 0.5, "decay_missed_steps": True} if kind == "adam" else {}
                optimizer = None if kind is None else BagOptimizer(kind, layout, learning_rate=0.1, device=place.device, **more)  # type: ignore[arg-type]
                output = embedding_bags(
                    weights, *batch.arguments, per_sample_weights=samples, optimizer=optimizer, output_dtype=dtype,
                    backend=place.backend, **batch.options,
                )  # fmt: skip
                output.sum().backward()
    assert {operator._schema.name for operator, _ in calls} == {f"jagged::{name}" for name in recorded}
    for operator, arguments in calls:
        plain = tuple(x.detach().clone() if isinstance(x, Tensor) else x for x in arguments)
        torch.library.opcheck(operator, plain)


class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
    """Keeps calls of a family's operators, whose names begin alike."""

    def __init__(self, calls: list[tuple[Any, tuple[Any, ...]]], family: str = "embedding_bags") -> None:
        super().__init__()
        self.calls, self.family = calls, family

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.startswith(f"jagged::{self.family}"):
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


LAYOUT = BagLayout((4, 3), (5, 2))
WEIGHTS, IDS, OFFSETS = torch.zeros(LAYOUT.num_elements), torch.zeros(6, dtype=torch.int64), torch.tensor([0, 2, 2, 4, 6])
OTHER = BagOptimizer("sgd", BagLayout((4, 3), (5, 3)), learning_rate=0.1)


def call(
    weights: Any = WEIGHTS, indices: Any = IDS, offsets: Any = OFFSETS, layout: BagLayout = LAYOUT, **options: Any
) -> Callable[[], object]:
    return lambda: embedding_bags(weights, layout, indices, offsets, **options)


def layout(*arguments: Any, **options: Any) -> Callable[[], object]:
    return lambda: BagLayout(*arguments, **options)


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (call(weights=1.0), TypeError, r"weights: expected a tensor \[E\], got float"),
        (call(weights=[1.0, 2.0]), TypeError, r"weights\[0\]: expected a tensor \[rows, width\], got float"),
        (call(weights=WEIGHTS[:4].view(2, 2)), ValueError, r"weights: expected shape \[E\], got \[2, 2\]"),
        (call(weights=WEIGHTS.int()), TypeError, "weights: expected dtype float32.*got int32"),
        (call(weights=WEIGHTS[1:]), ValueError, r"weights: expected the 38 elements of the layout, got shape \[37\]"),
        (
            call(weights=torch.zeros(76)[::2]),
            ValueError,
            r"weights: expected adjacent elements, got stride 2; pass weights.contiguous\(\)",
        ),
        (call(indices=IDS.float()), TypeError, "indices: expected dtype int64, int32, got float32"),
        (call(indices=IDS[None]), ValueError, r"indices: expected shape \[S\], got \[1, 6\]"),
        (call(indices=IDS.to("meta"), offsets=OFFSETS.to("meta")), ValueError, "indices: expected the device of weights, cpu"),
        (call(offsets=OFFSETS.float()), TypeError, "offsets: expected dtype int32, int64, got float32"),
        (call(offsets=OFFSETS[:0]), ValueError, r"offsets: expected shape \[B \+ 1\], got \[0\]"),
        (call(offsets=OFFSETS.to("meta")), ValueError, "offsets: expected the device of the values"),
        (call(offsets=OFFSETS[:4]), ValueError, "offsets: expected a multiple of the 2 features, and one, got 4; pass batch_s"),
        (call(layout=BagLayout((), ()), weights=WEIGHTS[:0]), ValueError, "offsets: expected a multiple of the 0 features"),
        (call(batch_sizes=[4]), ValueError, r"batch_sizes: expected 2 sizes with the sum 4, as offsets have bags, got \[4\]"),
        (call(batch_sizes=[1, 2]), ValueError, r"batch_sizes: expected 2 sizes with the sum 4.*got \[1, 2\]"),
        (call(batch_sizes=[5, -1]), ValueError, r"batch_sizes: expected 2 sizes.*got \[5, -1\]"),
        (call(per_sample_weights=IDS), TypeError, "per_sample_weights: expected dtype float32"),
        (call(per_sample_weights=torch.ones(5)), ValueError, r"per_sample_weights: expected shape \[6\] on cpu, one for each"),
        (call(per_sample_weights=torch.ones(6, device="meta")), ValueError, "per_sample_weights: expected shape.*on meta"),
        (
            call(layout=BagLayout((4, 3), (5, 2), means=(False, True)), per_sample_weights=torch.ones(6)),
            ValueError,
            "per_sample_weights: only sums are weighted, but bags of feature 1 are means",
        ),
        (call(output_dtype=torch.bfloat16), TypeError, "output_dtype: expected torch.float32 or the dtype of weights.*bfloat16"),
        (call(optimizer=OTHER), ValueError, "optimizer: expected one of a layout with the same tables, got one of others"),
        (
            call(optimizer=BagOptimizer("sgd", LAYOUT, learning_rate=0.1, device="meta")),
            ValueError,
            "optimizer: expected its states on the device of weights, cpu, got meta; make it with device=weights.device",
        ),
        (call(backend="cuda"), ValueError, "backend: got 'cuda'"),
        (call(weights=WEIGHTS.double(), backend="triton"), TypeError, "float64"),
        (layout((4, 3), (5,)), ValueError, "widths: expected one for each of the 2 tables of rows, got 1"),
        (layout((4, 0), (5, 2)), ValueError, "rows: expected at least 1, got 0 for table 1"),
        (layout((4, 3), (-5, 2)), ValueError, "widths: expected at least 1, got -5 for table 0"),
        (
            layout((4, 2**32 + 1), (5, 2)),
            ValueError,
            "rows: expected at most 4,294,967,296, got 4,294,967,297 for table 1; split it by rows",
        ),
        (layout((4, 3), (5, 2), (0, 2)), ValueError, "tables: expected a table from 0 to 1, got 2 for feature 1"),
        (layout((4, 3), (5, 2), means=(True,)), ValueError, "means: expected one for each of the 2 features, got 1"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_messages_name_argument_and_cure(function: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        function()


def test_layout() -> None:
    given_ = BagLayout([10, 5, 2], [4, 3, 1], [0, 1, 0, 2], [False, True, False, False])  # type: ignore[arg-type]
    assert given_ == BagLayout((10, 5, 2), (4, 3, 1), (0, 1, 0, 2), (False, True, False, False))
    assert hash(given_) == hash(replace(given_))
    # Each table begins at a multiple of 16 elements; nothing lies behind the last.
    assert given_.starts == (0, 48, 64, 66)
    assert (given_.num_features, given_.num_elements, given_.width) == (4, 66, 12)
    assert (given_.first_rows, given_.columns) == ((0, 10, 15, 17), (0, 4, 7, 11, 12))
    tables = given_.views(torch.arange(66))
    assert [x.shape for x in tables] == [(10, 4), (5, 3), (2, 1)]
    assert [int(x[0, 0]) for x in tables] == [0, 48, 64]
    tables[1][2, 1] = -1
    assert BagLayout((3,), (2,)).tables == (0,)
    assert given_.tensor(torch.device("cpu")) is given_.tensor(torch.device("cpu"))
    assert pickle.loads(pickle.dumps(given_)) == given_
    assert BagLayout((), ()).num_elements == 0
    # Behind features, tables and the storage's end, features by the class of their rows, and where each class begins and ends.
    wide = BagLayout((3, 3, 3), (4, 65, 33), (2, 0, 1, 0)).tensor(torch.device("cpu"))
    assert wide[4 + 3 + 1 : -7, :4].tolist() == [[2, 65, 0, 1], [0, 33, 1, 2], [1, 4, 2, 4], [3, 4, 2, 4]]
    # Then the features' parts of 32 columns, the widest first.
    assert wide[-7:, :3].tolist() == [[2, 0, 65], [2, 1, 65], [2, 2, 65], [0, 0, 33], [0, 1, 33], [1, 0, 4], [3, 0, 4]]


def test_host_and_kernels_read_the_same_columns() -> None:
    from jagged.ops.embedding_bag.fields import BATCH, FEATURE, PLACE, TABLE, OfFeature
    from jagged.ops.embedding_bag.triton import columns

    assert FEATURE.start == TABLE.start
    assert [FEATURE.rows, FEATURE.width, FEATURE.first_row] == [TABLE.rows, TABLE.width, TABLE.first_row]
    for name, column in (
        ("START", FEATURE.start), ("OUTPUT_COLUMN", FEATURE.output_column), ("IN_ORDER", FEATURE.in_order),
        ("FIRST_READER", TABLE.first_reader), ("CLASS_END", PLACE.class_end), ("OUTPUT_BEGIN", BATCH.output_begin),
        ("FIELDS", len(FEATURE)), ("BATCH_FIELDS", len(BATCH)),
    ):  # fmt: skip
        assert getattr(columns, name).value == column
    second = BagLayout((10, 5), (4, 3), (0, 1), (False, True)).fields[1].tolist()
    assert OfFeature(*second) == OfFeature(
        start=48, rows=5, width=3, output_column=4, is_mean=1, first_row=10, table=1, in_order=1
    )  # fmt: skip


@ON_CPU
def test_low_weights_of_a_wide_or_of_a_short_batch(place: Place) -> None:
    """Whether the table is widened or the rows that are read, each bag's sum is the same to the bit."""
    table = torch.randn(50, 7, dtype=torch.bfloat16)
    ids, ends = torch.randint(50, (40,)), torch.tensor([0, 10, 40])
    few = embedding_bags(table.flatten(), BagLayout((50,), (7,)), ids, ends)
    many = embedding_bags(table.flatten(), BagLayout((50,), (7,)), ids.repeat(2), torch.cat([ends, ends[1:] + 40]))
    assert torch.equal(many, few.repeat(2, 1))


def faults_of(function: Callable[[], object]) -> int:
    """Return how many pages the kernel hands out while a function runs."""
    resource = pytest.importorskip("resource", reason="counts page faults, as Unix does")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    function()
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)


def large_gradient(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return tables of 2 to the 24 elements, of which rows 1 and 3 are read, once and twice, and the pooled output."""
    layout = BagLayout((2**18,), (64,))
    weights = torch.zeros(layout.num_elements, dtype=dtype, requires_grad=True)
    return weights, embedding_bags(weights, layout, torch.tensor([1, 3, 3]), torch.tensor([0, 3]))


@ON_CPU
@pytest.mark.skipif(sys.platform != "linux", reason="huge pages are asked of Linux")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_gradients_lie_in_huge_pages(place: Place, dtype: torch.dtype) -> None:
    """Neither the sums nor the gradient nor what autograd keeps of it asks for small pages one by one."""
    size = 2**26
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        block.madvise(mmap.MADV_HUGEPAGE)
    small = size // mmap.PAGESIZE
    if faults_of(torch.frombuffer(block, dtype=torch.uint8).zero_) > small // 4:
        pytest.skip("the kernel has no huge pages here")
    weights, output = large_gradient(dtype)
    assert faults_of(output.sum().backward) < small // 4
    assert weights.grad is not None
    assert weights.grad.view(-1, 64)[:5, 0].tolist() == [0, 1, 0, 2, 0]


@ON_CPU
@pytest.mark.skipif(sys.platform != "linux", reason="huge pages are asked of Linux")
def test_large_gradients_give_their_memory_back(place: Place) -> None:
    """In a process of its own: what other tests freed and the allocator kept would be used again."""
    program = """
import gc, mmap
from pathlib import Path
from tests.ops.test_embedding_bag import large_gradient

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

weights, output = large_gradient()
before = resident()
output.sum().backward()
assert weights.grad is not None
grown = resident() - before
weights.grad = None
gc.collect()
print(grown, resident() - before)
"""
    root = Path(__file__).parents[2]
    run = subprocess.run([sys.executable, "-c", program], cwd=root, stdout=subprocess.PIPE, text=True, check=True)
    grown, left = map(int, run.stdout.split())
    assert grown > 2**25
    assert left < 2**24


@ON_CPU
def test_large_gradients_are_ordinary_tensors(place: Place) -> None:
    weights, output = large_gradient()
    output.sum().backward()
    grad = weights.grad
    assert grad is not None
    assert grad.untyped_storage().nbytes() == grad.nbytes
    saved = io.BytesIO()
    torch.save(grad, saved)
    saved.seek(0)
    for copied in (copy.deepcopy(grad), pickle.loads(pickle.dumps(grad)), torch.load(saved, weights_only=True)):
        assert torch.equal(copied, grad)
    assert torch.equal(grad.share_memory_(), copied)
    assert grad.is_shared()
    grad.untyped_storage().resize_(0)
    assert not grad.untyped_storage().nbytes()


@ON_CPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gradients_of_any_size_and_platform(place: Place, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """What counts as large, and whether the platform has huge pages, changes no bit; a storage may be empty."""
    batch = batch_of(BagLayout((40, 30), (3, 2), (0, 1, 0)), [[2, 0, 3], [1, 1, 4], [3, 0, 1]])
    nothing = batch_of(BagLayout((), ()), [])

    def gradients() -> list[Tensor]:
        found = []
        for of in (batch, nothing):
            weights = weights_of(of.layout, dtype).requires_grad_()
            embedding_bags(weights, *of.arguments, **of.options).sum().backward()
            assert weights.grad is not None
            found.append(weights.grad)
        return found

    plain = gradients()
    monkeypatch.setattr(torch_impl, "LARGE_BYTES", 0)
    advised = gradients()
    torch_impl._huge_pages.cache_clear()
    with monkeypatch.context() as other:
        other.setattr(sys, "platform", "darwin")
        assert torch_impl._huge_pages() is None
    elsewhere = gradients()
    torch_impl._huge_pages.cache_clear()
    for expected, *others in zip(plain, advised, elsewhere, strict=True):
        assert all(torch.equal(other, expected) for other in others)


@pytest.mark.skipif(PLACE.name == "interpret", reason="interpreted kernels are not compiled")
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", [None, "rowwise_adagrad", "adam"])
@pytest.mark.parametrize("has_sizes", [False, True])
def test_one_graph_for_all_batches(place: Place, weighted: bool, kind: str | None, has_sizes: bool) -> None:
    if kind is not None and torch.__version__ < "2.12":
        pytest.skip("PyTorch 2.11 compiles no backward pass that changes a parameter")
    # Cases are graphs of one function, of which there may be eight.
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor" if place.name == "gpu" else "aot_eager")
    layout = BagLayout((9, 5), (4, 3), (0, 1, 0))
    # The first call makes the layout's tensors, which a graph takes as they are.
    run(place, batch_of(layout, [[1], [1], [1]]), weights_of(layout, torch.float32))
    more: dict[str, Any] = {"max_norm": 1.0, "decay_missed_steps": True, "state_dtype": torch.bfloat16} if kind == "adam" else {}
    optimizers = [
        None if kind is None else BagOptimizer(kind, layout, learning_rate=0.1, device=place.device, **more)  # type: ignore[arg-type]
        for _ in range(2)
    ]

    def function(
        optimizer: BagOptimizer | None, weights: Tensor, ids: Tensor, offsets: Tensor, sizes: list[int] | None, *samples: Tensor
    ) -> Tensor:
        scales = samples[0] if samples else None
        output = embedding_bags(
            weights, layout, ids, offsets, per_sample_weights=scales, batch_sizes=sizes, optimizer=optimizer,
            backend=place.backend,
        )  # fmt: skip
        return output.square().sum()

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    graphs = 0
    weights = [weights_of(layout, torch.float32).requires_grad_() for _ in range(2)]
    for bags in (3, 7, 4):
        lengths = [[2, 1] * bags, [1, 0] * bags, [3, 2] * (bags + 2 if has_sizes else bags)]
        batch = batch_of(layout, lengths, bags, has_sizes=has_sizes)
        results = []
        for each, table, optimizer in zip((compiled, function), weights, optimizers, strict=True):
            samples = [random_tensor(tuple(batch.indices.shape), torch.float32, 1).requires_grad_()] if weighted else []
            table.grad = None
            loss = each(optimizer, table, batch.indices, batch.offsets, list(batch.sizes) if has_sizes else None, *samples)
            loss.backward()
            grads = [x.grad for x in ([table] if kind is None else []) + samples]
            states = [] if optimizer is None else list(optimizer.state().values())
            results.append([loss.detach(), table.detach().clone(), *grads, *(x.clone() for x in states)])
        torch.testing.assert_close(*results)
        graphs = graphs or counter.frame_count
    assert counter.frame_count == graphs


@pytest.mark.skipif(PLACE.name == "interpret", reason="interpreted kernels are not compiled")
def test_a_layout_may_be_new_to_a_graph(place: Place) -> None:
    given_ = BagLayout((9, 5), (4, 3), (0, 1, 0))
    batch = batch_of(given_, [[2, 1], [0, 3], [1, 1]])
    weights = weights_of(given_, torch.float32)

    def function(weights: Tensor, ids: Tensor, offsets: Tensor, layout: BagLayout) -> Tensor:
        return embedding_bags(weights, layout, ids, offsets, backend=place.backend)

    compiled = torch.compile(function, fullgraph=True, backend="inductor" if place.name == "gpu" else "aot_eager")
    expected = function(weights, batch.indices, batch.offsets, given_)
    for _ in range(2):
        new = replace(given_)
        for _ in range(2):
            assert torch.equal(compiled(weights, batch.indices, batch.offsets, new), expected)


def test_default_device_moves_nothing(place: Place) -> None:
    """A layout's own tensors lie where they are read, whatever device new tensors get."""
    layout = BagLayout((9, 5), (4, 3))
    batch = batch_of(layout, [[2, 1], [0, 3]], has_sizes=True)
    weights = weights_of(layout, torch.float32)
    with torch.device("meta"):
        output = embedding_bags(weights, *batch.arguments, backend=place.backend, **batch.options)
    assert output.device == weights.device
    assert torch.equal(output, embedding_bags(weights, *batch.arguments, backend=place.backend, **batch.options))


@ON_GPU
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("has_sizes", [False, True])
@pytest.mark.parametrize("gathered", ["merged", "sorted", "counted"])
def test_no_synchronisation_and_graph_capture(place: Place, weighted: bool, has_sizes: bool, gathered: str) -> None:
    layout = BagLayout((50, 3000, 40), (8, 33, 64), (0, 1, 2, 0))
    generator = torch.Generator().manual_seed(3)
    bags = 300

    def lengths(most: int) -> list[list[int]]:
        """As many lookups in every batch, for a graph's tensors keep their sizes."""
        drawn = [torch.randint(most, (bags,), generator=generator).tolist() for _ in range(4)]
        drawn[-1][-1] += 9000 - sum(map(sum, drawn))
        return drawn

    batch = batch_of(layout, lengths(9), has_sizes=has_sizes)
    weights = weights_of(layout, torch.bfloat16).requires_grad_()
    leaves = [weights]
    if weighted:
        leaves.append(random_tensor((9000,), torch.float32, 1).requires_grad_())

    def step() -> list[Tensor]:
        scales = leaves[1] if weighted else None
        output = embedding_bags(weights, *batch.arguments, per_sample_weights=scales, **batch.options)
        return [output.detach(), *torch.autograd.grad(output, leaves, output.detach())]

    with gathering(gathered):
        graph, results = captured(step)
        for seed, most in ((1, 3), (2, 14), (3, 1), (4, 9)):
            other = batch_of(layout, lengths(most), seed)
            batch.indices.copy_(other.indices)
            batch.offsets.copy_(other.offsets)
            graph.replay()
            torch.testing.assert_close(results, step(), rtol=0, atol=0)


@ON_GPU
def test_tables_past_2_to_the_31(place: Place) -> None:
    """The last rows of a table of more than 2^31 numbers, and a table behind it."""
    width, short = 64, 70
    rows = 2**25 + short
    layout = BagLayout((rows, 50), (width, 24))
    weights = torch.zeros(layout.num_elements, dtype=torch.bfloat16, device=place.device)
    large, small = layout.views(weights)
    large[-short:], small[:] = random_tensor((short, width), torch.bfloat16, 1), random_tensor((50, 24), torch.bfloat16, 2)
    ends = BagLayout((short, 50), (width, 24))
    low = torch.zeros(ends.num_elements, dtype=torch.bfloat16, device=place.device)
    for view, part in zip(ends.views(low), (large[-short:], small), strict=True):
        view.copy_(part)
    near = batch_of(ends, [[3, 0, 40], [1, 70, 2]])
    far = replace(near, layout=layout, indices=near.indices + (torch.arange(116, device=place.device) < 43) * (rows - short))
    samples = random_tensor((116,), torch.float32, 3)
    results = [run(place, batch, table, samples) for batch, table in ((far, weights), (near, low))]
    (output, of_weights, of_samples), expected = results
    assert torch.equal(output, expected[0])
    assert torch.equal(of_samples, expected[2])
    for view, part in zip(ends.views(expected[1]), layout.views(of_weights), strict=True):
        assert torch.equal(part[-len(view) :], view)
    assert not of_weights[: (rows - short) * width].any()
    optimizers = [BagOptimizer("sgd", x, learning_rate=0.1, device=place.device) for x in (layout, ends)]
    for batch, table, optimizer in zip((far, near), (weights, low), optimizers, strict=True):
        table.requires_grad_()
        embedding_bags(table, *batch.arguments, optimizer=optimizer).square().sum().backward()
    for view, part in zip(ends.views(low.detach()), layout.views(weights.detach()), strict=True):
        assert torch.equal(part[-len(view) :], view)


@ON_GPU
@pytest.mark.parametrize("has_sizes", [False, True])
def test_outputs_past_2_to_the_31(place: Place, has_sizes: bool) -> None:
    """The last bags of many, of which the others are empty."""
    short = 70
    bags = 2**23 + short
    layout = BagLayout((9, 7), (128, 129))
    weights = weights_of(layout, torch.bfloat16)
    near = batch_of(layout, [[2] * short, [0, 3] * (short // 2)], has_sizes=has_sizes)
    empty = torch.zeros(bags - short, dtype=torch.int64, device=place.device)
    first = near.offsets[: short + 1]
    offsets = torch.cat([empty, first, first[-1] + empty, near.offsets[short + 1 :]])
    far = replace(near, offsets=offsets, sizes=(bags, bags))
    results = []
    for batch in (far, near):
        table = weights.clone().requires_grad_()
        output = embedding_bags(table, *batch.arguments, output_dtype=torch.bfloat16, **batch.options)
        if has_sizes:
            count = batch.sizes[0]
            parts = [output[: count * 128].view(count, 128), output[count * 128 :].view(count, 129)]
        else:
            parts = list(output.split((128, 129), 1))
        last = torch.cat([part[-short:] for part in parts], 1)
        (grad,) = torch.autograd.grad(last, table, last.detach())
        results.append([last.detach(), grad])
    for got, expected in zip(*results, strict=True):
        assert torch.equal(got, expected)


@ON_GPU
def test_other_devices_than_the_current_one(place: Place) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    layout = BagLayout((9, 5), (4, 3))
    batch = batch_of(layout, [[3, 1], [1, 4]])
    weights, samples = weights_of(layout, torch.float32), random_tensor((9,), torch.float32, 1)
    there = replace(batch, indices=batch.indices.to("cuda:1"), offsets=batch.offsets.to("cuda:1"))
    for got, expected in zip(
        run(place, there, weights.to("cuda:1"), samples.to("cuda:1")), run(place, batch, weights, samples), strict=True
    ):
        assert got.device == torch.device("cuda:1")
        assert torch.equal(got.cpu(), expected.cpu())
    with pytest.raises(ValueError, match="indices: expected the device of weights"):
        run(place, there, weights)


@pytest.mark.skipif(PLACE.name != "cpu", reason="the same everywhere")
def test_layouts_pickle_their_tuples_alone() -> None:
    layout = BagLayout((9, 5), (4, 3), (0, 1, 0), (False, True, False))
    kept = io.BytesIO()
    torch.save(layout, kept)
    kept.seek(0)
    mapped = torch.load(kept, map_location="meta", weights_only=False)
    for other in (mapped, copy.deepcopy(layout), pickle.loads(pickle.dumps(layout))):
        assert other == layout
        assert torch.equal(other.fields, layout.fields)
        assert torch.equal(other.tensor(torch.device("cpu")), layout.tensor(torch.device("cpu")))
    assert b"torch" not in pickle.dumps(layout)


def in_fake_mode(function: Callable[[Tensor], Tensor]) -> None:
    with FakeTensorMode():
        function(torch.ones(2))


def in_an_export(function: Callable[[Tensor], Tensor]) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x)

    torch.export.export(Model(), (torch.ones(2),), strict=False)


@pytest.mark.parametrize("call", [lambda function: torch.func.grad(function)(torch.ones(2)), in_fake_mode, in_an_export])
def test_what_a_layout_keeps_belongs_to_no_transform_and_no_mode(call: Callable[[Callable[[Tensor], Tensor]], None]) -> None:
    """What it makes for a device, or for batches of some sizes, is read again outside."""
    layout, device = BagLayout((5, 3), (4, 4)), torch.device("meta")

    def function(x: Tensor) -> Tensor:
        kept.append(layout.tensor(device))
        # A graph for all sizes keeps nothing by them.
        kept.extend([] if torch.compiler.is_compiling() else layout.batches((2, 1), device)[:2])
        return x.sum()

    kept: list[Tensor] = []
    call(function)
    again = (layout.tensor(device), *layout.batches((2, 1), device)[:2])
    assert all(one is other for one, other in zip(kept, again, strict=False))
    assert len(kept) == (1 if call is in_an_export else 3)
    assert all(type(tensor) is Tensor for tensor in kept)
    assert not any(torch._C._functorch.is_functorch_wrapped_tensor(tensor) for tensor in kept)


@ON_CPU
def test_huge_pages_are_for_large_gradients_on_a_cpu(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    from jagged.ops.embedding_bag import torch_impl

    monkeypatch.setattr(torch_impl, "_huge_pages", None)
    count = torch_impl.LARGE_BYTES // 4
    assert torch_impl.new_in_huge_pages(torch.empty(0), count - 1, torch.float32).shape == (count - 1,)
    assert torch_impl.new_in_huge_pages(torch.empty(0, device="meta"), count, torch.float32).shape == (count,)
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        torch_impl.new_in_huge_pages(torch.empty(0), count, torch.float32)


@ON_TRITON
@pytest.mark.parametrize("longest", [1, 2, 40])
def test_lookups_of_many_single_bags(place: Place, monkeypatch: pytest.MonkeyPatch, longest: int) -> None:
    """Where bags are single, each has a lane; one that is longer sends its block the other way, and says the same."""
    from jagged.ops.embedding_bag.triton import sorting

    lengths = [[1] * 70 + [0] * 30, [1] * 99 + [longest], [1] * 100]
    layout = BagLayout((9, 40, 7), (4, 5, 8), (0, 1, 2), sequences=(False, False, True))
    weights, batch = weights_of(layout, torch.float32), batch_of(layout, lengths)
    with gathering("sorted"):
        expected = run(place, batch, weights)
        monkeypatch.setattr(sorting, "MANY_SINGLES", 1)
        assert all(map(torch.equal, run(place, batch, weights), expected))
        check(place, batch, torch.float32)
