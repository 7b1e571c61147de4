"""Conversions against loops over samples. They move bits, so results are equal, not close."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jagged import ops
from tests.graphs import captured
from tests.oracle import check_three_way
from tests.places import PLACE, Place
from tests.reference import conversion as reference
from tests.strategies import Jagged, float_dtypes, jagged_batches, jagged_of, random_tensor, seeds

FEATURES = st.sampled_from([(), (1,), (3,), (64,), (5, 7), (130,)])
ON_GPU = pytest.mark.gpu


def values_of(batch: Jagged, features: tuple[int, ...], dtype: torch.dtype, seed: int, strided: bool) -> torch.Tensor:
    return random_tensor((batch.total, *features), dtype, seed, strided=strided).requires_grad_()


def same(ours: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(ours, expected, rtol=0, atol=0)


def same_gradients(ours: torch.Tensor, expected: torch.Tensor, *leaves: torch.Tensor) -> None:
    cotangent = random_tensor(tuple(expected.shape), expected.dtype, 3)
    if not expected.requires_grad:
        return
    wanted = torch.autograd.grad(expected, leaves, cotangent, materialize_grads=True)
    for got, want in zip(torch.autograd.grad(ours, leaves, cotangent), wanted, strict=True):
        same(got, want)


def flat(parts: list[torch.Tensor], features: tuple[int, ...]) -> list[torch.Tensor]:
    """Rows of parts, of which some are dense."""
    return [part if part.dim() == len(features) + 1 else part.flatten(0, 1) for part in parts]


@given(jagged_batches(), FEATURES, float_dtypes(), seeds(), st.booleans(), st.integers(0, 12), st.sampled_from([0.0, -1.5]))
def test_jagged_to_dense(
    place: Place, batch: Jagged, features: tuple[int, ...], dtype: torch.dtype, seed: int, strided: bool, length: int, pad: float
) -> None:
    values = values_of(batch, features, dtype, seed, strided)
    ours = ops.jagged_to_dense(values, batch.offsets, length, pad, backend=place.backend)
    expected = reference.to_dense(values, batch.lengths, length, pad)
    same(ours, expected)
    same_gradients(ours, expected, values)


@given(jagged_batches(), FEATURES, float_dtypes(), seeds(), st.booleans(), st.integers(0, 12), st.booleans())
def test_dense_to_jagged(
    place: Place, batch: Jagged, features: tuple[int, ...], dtype: torch.dtype, seed: int, strided: bool, length: int, sync: bool
) -> None:
    dense = random_tensor((batch.batch_size, length, *features), dtype, seed, strided=strided).requires_grad_()
    total = None if sync else batch.total
    ours = ops.dense_to_jagged(dense, batch.offsets, total, backend=place.backend)
    expected = reference.to_jagged(dense, batch.lengths)
    same(ours, expected)
    same_gradients(ours, expected, dense)


@given(st.data(), st.sampled_from(["ds", "sd", "ss", "dsds", "s", "dds"]), FEATURES, float_dtypes(), seeds(), st.booleans())
def test_concat_and_split(
    place: Place, data: st.DataObject, kinds: str, features: tuple[int, ...], dtype: torch.dtype, seed: int, strided: bool
) -> None:
    # A letter is a part, dense or of samples. Two parts have operators of their own.
    first = data.draw(jagged_batches())
    parts, lengths, offsets, layout = [], [], [], []
    for k, kind in enumerate(kinds):
        if kind == "d":
            n = data.draw(st.integers(0, 3))
            size = (first.batch_size, n, *features)
            parts.append(random_tensor(size, dtype, seed + k, strided=strided).requires_grad_())
            lengths.append([n] * first.batch_size)
            offsets.append(None)
            layout.append(n)
        else:
            part = jagged_of(tuple(data.draw(st.permutations(first.lengths))), first.offsets.dtype)
            parts.append(values_of(part, features, dtype, seed + k, strided))
            lengths.append(part.lengths)
            # Offsets may be a view whose numbers do not lie side by side.
            offsets.append(torch.stack([part.offsets] * 2, 1)[:, 0] if strided else part.offsets)
            layout.append(offsets[-1])
    ours, joined_offsets = ops.jagged_concat(parts, offsets, backend=place.backend)
    expected = reference.concat(flat(parts, features), lengths)
    same(ours, expected)
    ops.validate_offsets(joined_offsets, total=expected.shape[0])
    assert joined_offsets.diff().tolist() == [sum(rows) for rows in zip(*lengths, strict=True)]
    assert joined_offsets.dtype == first.offsets.dtype
    assert not joined_offsets.requires_grad
    same_gradients(ours, expected, *parts)

    for totals in (None, [first.total] * kinds.count("s")):
        back = ops.jagged_split(ours, layout, totals, backend=place.backend)
        for part, origin in zip(back, parts, strict=True):
            same(part, origin)
    whole = ours.detach().clone().requires_grad_()
    pieces = ops.jagged_split(whole, layout, backend=place.backend)
    cotangents = [random_tensor(tuple(piece.shape), dtype, seed + 5 + k) for k, piece in enumerate(pieces)]
    # A part that nothing is made of has a gradient of zero.
    unused = data.draw(st.sampled_from([None, 0, 1]))
    used = [k for k in range(len(kinds)) if k != unused] or [0]
    (grad,) = torch.autograd.grad([pieces[k] for k in used], whole, [cotangents[k] for k in used])
    for k in range(len(kinds)):
        if k not in used:
            cotangents[k].zero_()
    same(grad, reference.concat(flat(cotangents, features), lengths))


@given(jagged_batches(), FEATURES, float_dtypes(), seeds(), st.booleans(), st.integers(0, 60), st.sampled_from(["first", "last"]))
def test_jagged_truncate(
    place: Place, batch: Jagged, features: tuple[int, ...], dtype: torch.dtype, seed: int, strided: bool, length: int, keep: str
) -> None:
    values = values_of(batch, features, dtype, seed, strided)
    kept = sum(min(n, length) for n in batch.lengths)
    expected = reference.truncate(values, batch.lengths, length, keep)
    for total in (None, kept):
        ours, offsets = ops.jagged_truncate(values, batch.offsets, length, keep, total, backend=place.backend)
        same(ours, expected)
        assert offsets.diff().tolist() == [min(n, length) for n in batch.lengths]
    same_gradients(ours, expected, values)


@given(
    jagged_batches(), FEATURES, float_dtypes(), seeds(), st.booleans(), st.integers(0, 60), st.data(),
    st.sampled_from([torch.int32, torch.int64, None]),
)  # fmt: skip
def test_jagged_slice(
    place: Place, batch: Jagged, features: tuple[int, ...], dtype: torch.dtype, seed: int, strided: bool, length: int,
    data: st.DataObject, kind: torch.dtype | None,
) -> None:  # fmt: skip
    values = values_of(batch, features, dtype, seed, strided)
    places = st.integers(0, 50)
    size = batch.batch_size
    starts = data.draw(st.lists(places, min_size=size, max_size=size)) if kind else [data.draw(places)] * size
    start = torch.tensor(starts, dtype=kind, device=place.device) if kind else starts[0] if starts else 0
    expected = reference.slice_rows(values, batch.lengths, starts, length)
    for total in (None, expected.shape[0]):
        ours, offsets = ops.jagged_slice(values, batch.offsets, start, length, total, backend=place.backend)
        same(ours, expected)
        assert offsets.dtype == batch.offsets.dtype
        assert offsets.diff().tolist() == [len(range(n)[s : s + length]) for n, s in zip(batch.lengths, starts, strict=True)]
    same_gradients(ours, expected, values)


@given(jagged_batches(), FEATURES, float_dtypes(), seeds(), st.booleans(), st.data(), st.sampled_from([torch.int32, torch.int64]))
def test_jagged_index_select(
    place: Place, batch: Jagged, features: tuple[int, ...], dtype: torch.dtype, seed: int, strided: bool, data: st.DataObject,
    kind: torch.dtype,
) -> None:  # fmt: skip
    numbers = st.integers(0, max(batch.batch_size - 1, 0))
    indices = data.draw(st.lists(numbers, max_size=9 if batch.batch_size else 0))
    chosen = torch.tensor([*indices, 0][: len(indices)], dtype=kind, device=place.device)
    values = random_tensor((batch.total, *features), dtype, seed, strided=strided)
    for total in (None, sum(batch.lengths[index] for index in indices)):
        ours, offsets = ops.jagged_index_select(values, batch.offsets, chosen, total, backend=place.backend)
        same(ours, reference.index_select(values, batch.lengths, indices))
        assert offsets.dtype == batch.offsets.dtype
        assert offsets.tolist() == [sum(batch.lengths[index] for index in indices[:k]) for k in range(len(indices) + 1)]
    check_three_way(
        lambda v: ops.jagged_index_select(v, batch.offsets, chosen, total, backend=place.backend)[0],
        lambda v: reference.index_select(v, batch.lengths, indices),
        [values],
    )


@given(jagged_batches(), seeds(), st.sampled_from([torch.int32, torch.int64]), st.sampled_from([1, 9, 2**31 - 1]))
def test_jagged_unique(place: Place, batch: Jagged, seed: int, dtype: torch.dtype, largest: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-largest, largest, (batch.total,), generator=generator, dtype=dtype).to(place.device)
    expected, counts, inverse = reference.unique(values, batch.lengths)
    for total in (None, len(expected)):
        ours, offsets, places = ops.jagged_unique(values, batch.offsets, total)
        same(ours, expected)
        same(places, inverse)
        same(ours[places], values)
        assert offsets.dtype == batch.offsets.dtype
        assert offsets.diff().tolist() == counts


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_no_limit_is_a_large_number(place: Place, dtype: torch.dtype) -> None:
    values, offsets = torch.arange(5, device=place.device), jagged_of((3, 2), dtype).offsets
    same(ops.jagged_truncate(values, offsets, 2**40, backend=place.backend)[0], values)
    same(ops.jagged_slice(values, offsets, 1, 2**40, backend=place.backend)[0], values[[1, 2, 4]])
    same(ops.jagged_slice(values, offsets, 2**40, 1, backend=place.backend)[0], values[:0])
    far = torch.tensor([1, 2**40], device=place.device)
    same(ops.jagged_slice(values, offsets, far, 1, backend=place.backend)[0], values[1:2])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_move_too(place: Place, dtype: torch.dtype) -> None:
    batch = jagged_of((2, 0, 3))
    ids = torch.tensor([2**31 - 1, -5, 3, 4, 5], dtype=dtype, device=place.device)
    dense = ops.jagged_to_dense(ids, batch.offsets, 3, -1, backend=place.backend)
    assert dense.tolist() == [[2**31 - 1, -5, -1], [-1, -1, -1], [3, 4, 5]]
    assert ops.dense_to_jagged(dense, batch.offsets, 5, backend=place.backend).tolist() == ids.tolist()


@pytest.mark.parametrize(
    ("dtype", "padding"),
    [
        (torch.int64, 20_000_001),
        (torch.int64, 2**62 + 1),
        (torch.int64, -(2**63)),
        (torch.int32, 2**31 - 1),
        (torch.int8, -7),
        (torch.bool, True),
        (torch.float64, 0.1),
        (torch.float64, -1e300),
        (torch.float64, 16),
        (torch.float32, 0.1),
        (torch.float16, float("-inf")),
    ],
)
def test_padding_is_exact(place: Place, dtype: torch.dtype, padding: float) -> None:
    batch = jagged_of((2, 0, 1))
    values = torch.arange(3, device=place.device).to(dtype)
    dense = ops.jagged_to_dense(values, batch.offsets, 2, padding, backend=place.backend)
    same(dense, reference.to_dense(values, batch.lengths, 2, padding))
    assert dense[1].tolist() == torch.tensor([padding, padding], dtype=dtype).tolist()


def test_strided_offsets(place: Place) -> None:
    offsets = jagged_of((2, 0, 3)).offsets
    strided = torch.stack([offsets, offsets + 100], 1)[:, 0]
    values, dense = random_tensor((5, 4), torch.float32, 0), random_tensor((3, 2, 4), torch.float32, 1)
    for function in (
        lambda o: ops.jagged_to_dense(values, o, 2, backend=place.backend),
        lambda o: ops.dense_to_jagged(dense, o, 5, backend=place.backend),
        lambda o: ops.jagged_concat([values, dense], [o, None], backend=place.backend)[0],
        lambda o: ops.jagged_truncate(values, o, 1, "last", 2, backend=place.backend)[0],
        lambda o: ops.jagged_slice(values, o, o[:-1] - o[:-1], 1, 2, backend=place.backend)[0],
        lambda o: ops.jagged_index_select(values, o, (o - o)[1:], 6, backend=place.backend)[0],
        lambda o: ops.jagged_unique(torch.arange(5, device=place.device), o, 5)[0],
        lambda o: ops.pair_offsets(o),
    ):
        same(function(strided), function(offsets))


@pytest.mark.usefixtures("unchecked")
def test_wrong_offsets_reach_no_foreign_memory(place: Place) -> None:
    """Offsets that decrease, begin before 0 or run past the end give some rows, never a neighbour's."""
    fence = torch.full((40, 4), 777.0, device=place.device)
    values = fence[10:20]
    values.fill_(1.0)
    for wrong in ([0, 9, 5, 30], [-7, 4, 10], [0, 100, 200], [50, 60, 70]):
        offsets = torch.tensor(wrong, device=place.device)
        dense = ops.jagged_to_dense(values, offsets, 40, backend=place.backend)
        assert set(dense.flatten().tolist()) <= {0.0, 1.0}
        two_rows = values[: 2 * (len(wrong) - 1)].reshape(len(wrong) - 1, 2, -1)
        back = ops.dense_to_jagged(two_rows, offsets, 10, backend=place.backend)
        assert set(back.flatten().tolist()) <= {0.0, 1.0}
        # Rows that no sample covers may be left unwritten, which here means NaN.
        leaf = values.detach().requires_grad_()
        results = [ops.jagged_index_select(leaf, offsets, offsets, 30, backend=place.backend)[0]]
        if place.backend == "triton":
            # PyTorch's own functions refuse such rows.
            results.append(ops.jagged_slice(leaf, offsets, 1, 3, 10, backend=place.backend)[0])
        for rows in results:
            assert set(rows.detach().nan_to_num(nan=0.0).flatten().tolist()) <= {0.0, 1.0}
            (grad,) = torch.autograd.grad(rows, leaf, torch.ones_like(rows))
            assert not (grad.abs() > 100).any()
        assert ops.jagged_unique(torch.arange(10, device=place.device), offsets, 10)[0].shape == (10,)
    assert bool((fence[:10] == 777).all())
    assert bool((fence[20:] == 777).all())


@pytest.mark.usefixtures("unchecked")
def test_messages_name_argument_and_cure(place: Place) -> None:
    values, offsets = torch.zeros(3, 2, device=place.device), torch.tensor([0, 3], device=place.device)
    cases = [
        (
            lambda: ops.jagged_to_dense(values, offsets.float(), 2),
            TypeError,
            r"offsets: expected dtype int32, int64, got float32",
        ),
        (lambda: ops.jagged_to_dense(values, offsets[:0], 2), ValueError, r"offsets: expected shape \[B \+ 1\], got \[0\]"),
        (lambda: ops.jagged_to_dense(values, offsets[None], 2), ValueError, r"offsets: expected shape \[B \+ 1\], got \[1, 2\]"),
        (lambda: ops.jagged_to_dense(values, offsets, -1), ValueError, r"length: expected at least 0, got -1"),
        (lambda: ops.jagged_to_dense(values, offsets, 2, backend="cuda"), ValueError, r"backend: got 'cuda'"),
        (
            lambda: ops.dense_to_jagged(values[None, None][0], torch.tensor([0, 1, 2], device=place.device)),
            ValueError,
            "2 samples",
        ),
        (lambda: ops.jagged_truncate(values, offsets, 1, "middle"), ValueError, r"keep: expected 'first' or 'last'"),
        (
            lambda: ops.jagged_concat([values[None], values[None]], [None, None]),
            ValueError,
            "^offsets: expected at least one jagged part; dense parts alone are torch.cat's work$",
        ),
        (lambda: ops.jagged_slice(values, offsets, 0, -1), ValueError, "^length: expected at least 0, got -1$"),
        (lambda: ops.jagged_slice(values, offsets, -1, 1), ValueError, "^start: expected at least 0, got -1$"),
        (
            lambda: ops.jagged_slice(values, offsets, offsets, 1),
            ValueError,
            r"^start: expected \[1\], a place for each sample, got \[2\]$",
        ),
        (
            lambda: ops.jagged_slice(values, offsets, offsets[1:].float(), 1),
            TypeError,
            r"^start: expected dtype int32, int64, got float32; convert it with .to\(...\)$",
        ),
        (
            lambda: ops.jagged_index_select(values, offsets, values[0]),
            TypeError,
            r"^indices: expected dtype int32, int64, got float32; convert it with .to\(...\)$",
        ),
        (
            lambda: ops.jagged_index_select(values[:0], offsets[:1], offsets),
            ValueError,
            "^indices: expected none where there are no samples, got 2$",
        ),
        (
            lambda: ops.jagged_unique(values[:, 0], offsets),
            TypeError,
            r"^values: expected dtype int32, int64, got float32; convert it with .to\(...\)$",
        ),
        (lambda: ops.jagged_concat([values, values.double()], [offsets, offsets]), TypeError, r"values\[1\]: expected the dtype"),
        (
            lambda: ops.jagged_concat([values, values[:, :1]], [offsets, offsets]),
            ValueError,
            r"values\[1\]: expected features \[2\]",
        ),
        (lambda: ops.jagged_split(values, [offsets, offsets], [1, 1]), ValueError, r"expected as many rows as the parts have"),
        (
            lambda: ops.jagged_to_dense(values.int(), offsets, 2, 2**31),
            ValueError,
            r"^padding_value: expected a whole number from -2147483648 to 2147483647 for values of torch.int32, got 2147483648$",
        ),
        (
            lambda: ops.jagged_to_dense(values.to(torch.int8), offsets, 2, 0.5),
            ValueError,
            r"^padding_value: expected a whole number from -128 to 127 for values of torch.int8, got 0.5$",
        ),
        (lambda: ops.jagged_to_dense("x", offsets, 2), TypeError, "expected a tensor"),  # type: ignore[arg-type]
    ]
    for call, error, message in cases:
        with pytest.raises(error, match=message):
            call()


def test_sizes_are_no_less_than_nothing_and_no_more_than_there_is(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAGGED_VALIDATE", "0")
    values, offsets = torch.zeros(3, 2, device=place.device), torch.tensor([0, 1, 3], device=place.device)
    dense, negative = torch.zeros(2, 2, 2, device=place.device), torch.tensor([0, 1, -1], device=place.device)
    for call, message in (
        (lambda: ops.dense_to_jagged(dense, offsets, -1), "total: expected a number of rows, at least 0, got -1"),
        (lambda: ops.jagged_truncate(values, offsets, 1, total=-1), "total: expected a number of rows, at least 0, got -1"),
        (lambda: ops.jagged_truncate(values, offsets, 1, total=4), "total: expected at most 3, the rows of values, got 4"),
        (
            lambda: ops.dense_to_jagged(dense, negative),
            "total: expected the last of the offsets, at least 0, got -1; offsets count rows from the start of the values",
        ),
        (
            lambda: ops.jagged_split(values, [negative, offsets]),
            "totals: expected the last of the offsets, at least 0, got -1; offsets count rows from the start of the values",
        ),
        (lambda: ops.jagged_split(values, [offsets, offsets], [3]), "totals: expected one for each of the 2 jagged parts, got 1"),
        (lambda: ops.jagged_split(values, [offsets, 0], [3, 0]), "totals: expected one for each of the 1 jagged parts, got 2"),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            call()


def test_values_that_make_no_sense_are_named(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    values, offsets = torch.zeros(5, 2, device=place.device), torch.tensor([0, 2, 3], device=place.device)
    overrun = torch.tensor([0, 2, 9], device=place.device)
    monkeypatch.setenv("JAGGED_VALIDATE", "1")
    for call, message in (
        (
            lambda: ops.jagged_split(values, [overrun, 1]),
            "offsets[0][2]: expected 3, the number of rows, got 9; the last offset is the total length",
        ),
        (
            lambda: ops.jagged_split(values, [overrun, 1], [3]),
            "offsets[0][2]: expected 3, the number of rows, got 9; the last offset is the total length",
        ),
        (
            lambda: ops.dense_to_jagged(values[:2, None], offsets, -1),
            "total: expected a number of rows, at least 0, got -1",
        ),
        (
            lambda: ops.jagged_split(values, [overrun, offsets]),
            "values: expected as many rows as the parts have together, [9, -4]; got 5",
        ),
        (
            lambda: ops.jagged_truncate(values[:3], offsets, 1, total=3),
            "total: expected 2, the number of rows that are kept, got 3",
        ),
        (
            lambda: ops.jagged_slice(values[:3], offsets, 1, 1, total=3),
            "total: expected 1, the number of rows that are kept, got 3",
        ),
        (
            lambda: ops.jagged_slice(values[:3], offsets, offsets[:-1] - 1, 1),
            "start: expected places from 0 on, got -1",
        ),
        (
            lambda: ops.jagged_index_select(values[:3], offsets, offsets[1:] - 1),
            "indices[1]: expected an id from 0 to 1, got 2; map ids to dense ones first",
        ),
        (
            lambda: ops.jagged_index_select(values[:3], offsets, offsets[:1], 3),
            "total: expected 2, the number of rows that are taken, got 3",
        ),
        (
            lambda: ops.jagged_unique(values[:3, 0].long(), offsets, 3),
            "total: expected 2, the number of distinct ids, got 3",
        ),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            call()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([1, 3], r"offsets\[0\]: expected 0, got 1"),
        ([0, 2, 1, 3], r"offsets\[2\]: expected at least 2, the offset before it, got 1"),
        ([0, 2], r"offsets\[1\]: expected 3, the number of rows, got 2"),
        ([0, -1, 3], r"offsets\[1\]: expected at least 0, the offset before it, got -1"),
        ([0, 9], r"offsets\[1\]: expected 3, the number of rows, got 9"),
    ],
)
def test_values_of_offsets_are_checked_on_demand(
    place: Place, monkeypatch: pytest.MonkeyPatch, wrong: list[int], message: str
) -> None:
    offsets = torch.tensor(wrong, device=place.device)
    values = torch.zeros(3, 2, device=place.device)
    with ops.trust_values():
        ops.jagged_to_dense(values, offsets, 2, backend=place.backend)
    monkeypatch.setenv("JAGGED_VALIDATE", "1")
    with pytest.raises(ValueError, match=message):
        ops.jagged_to_dense(values, offsets, 2, backend=place.backend)


def test_forced_backend_is_taken_or_refused(place: Place) -> None:
    values, offsets = torch.zeros(3, 2), torch.tensor([0, 3])
    if place.name == "cpu":
        with pytest.raises(ValueError, match="backend='triton': needs CUDA tensors"):
            ops.jagged_to_dense(values, offsets, 2, backend="triton")
    values, offsets = values.to(place.device), offsets.to(place.device)
    same(ops.jagged_to_dense(values, offsets, 2, backend="torch"), ops.jagged_to_dense(values, offsets, 2, backend=place.backend))


def test_opcheck(place: Place) -> None:
    batch = jagged_of((2, 0, 3))
    values = random_tensor((5, 4), torch.float32, 0)
    dense = random_tensor((3, 2, 4), torch.float32, 0)
    new = jagged_of((1, 0, 2)).offsets
    parts = torch.stack([batch.offsets - new, new])
    chosen, selected = torch.tensor([2, 0, 2], device=place.device), jagged_of((3, 2, 3)).offsets
    for name, arguments in (
        ("to_dense", (values, batch.offsets, 2, 0.0)),
        ("to_jagged", (dense, batch.offsets, 5)),
        ("concat", ([values[:2], values[:3]], parts)),
        ("split", (values, parts, [2, 3])),
        ("concat_two", (values[:2], values[:3], parts[0], parts[1])),
        ("concat_two", (dense, values[:3], None, parts[1])),
        ("split_two", (values, parts[0], parts[1], [2, 3])),
        ("split_two", (random_tensor((6, 4), torch.float32, 0), None, parts[1], [3, 3])),
        ("take_part", (values, parts, 1, 3)),
        ("put_part", (values[:3], parts, 1, 5)),
        ("jagged_index_select", (values, batch.offsets, chosen, selected, 8)),
        ("jagged_index_select_backward", (random_tensor((8, 4), torch.float32, 0), batch.offsets, chosen, selected, 5)),
    ):
        torch.library.opcheck(getattr(torch.ops.jagged, name).default, (*arguments, place.backend))


@pytest.mark.skipif(PLACE.name != "cpu", reason="float64 finite differences are the CPU's work")
def test_gradcheck_to_second_order(place: Place) -> None:
    batch = jagged_of((2, 0, 3))
    values = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    dense = torch.randn(3, 2, 2, dtype=torch.float64, requires_grad=True)
    for function, leaves in (
        (lambda v: ops.jagged_to_dense(v, batch.offsets, 2), (values,)),
        (lambda d: ops.dense_to_jagged(d, batch.offsets, 5), (dense,)),
        (lambda v, d: ops.jagged_concat([v, d], [batch.offsets, None])[0], (values, dense)),
        (lambda v: ops.jagged_split(v, [jagged_of((1, 0, 2)).offsets, jagged_of((1, 0, 1)).offsets]), (values,)),
        (lambda v: ops.jagged_split(v, [jagged_of((1, 0, 2)).offsets, jagged_of((1, 0, 1)).offsets])[1], (values,)),
        (lambda v: ops.jagged_truncate(v, batch.offsets, 2, "last")[0], (values,)),
        (lambda v: ops.jagged_slice(v, batch.offsets, 1, 1)[0], (values,)),
        (lambda v: ops.jagged_index_select(v, batch.offsets, torch.tensor([2, 0, 2, 1]))[0], (values,)),
    ):
        assert torch.autograd.gradcheck(function, leaves)
        assert torch.autograd.gradgradcheck(function, leaves)


@pytest.mark.skipif(PLACE.name == "interpret", reason="interpreted kernels are not compiled")
def test_one_graph_for_all_jagged_shapes(place: Place) -> None:
    graphs = 0

    def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        nonlocal graphs
        graphs += 1
        return graph.forward

    def function(values: torch.Tensor, offsets: torch.Tensor, total: int, distinct: int) -> tuple[torch.Tensor, ...]:
        kept, new_offsets = ops.jagged_truncate(values, offsets, 3, "last", total)
        joined, joined_offsets = ops.jagged_concat([kept, values], [new_offsets, offsets])
        dense = ops.jagged_to_dense(joined, joined_offsets, 5)
        rows = ops.dense_to_jagged(dense, offsets, values.shape[0])
        order = torch.arange(offsets.shape[0] - 1, device=offsets.device).flip(0)
        rows, offsets = ops.jagged_index_select(rows, offsets, order, values.shape[0])
        rows, offsets = ops.jagged_slice(rows, offsets, torch.zeros_like(order), 3, total)
        ids, offsets, inverse = ops.jagged_unique((rows[:, 0] > 0).long(), offsets, distinct)
        return rows.square().sum() + ops.jagged_split(joined, [joined_offsets, 0])[0].sum(), ids[inverse], offsets

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=count)
    for lengths in ((2, 4, 3), (5, 0, 1, 9), (0, 7), (30, 2, 2, 2, 2)):
        batch = jagged_of(lengths)
        values = random_tensor((batch.total, 13), torch.float32, 0).requires_grad_()
        kept = sum(min(n, 3) for n in lengths)
        with ops.trust_values():
            # As many distinct ids as the last of the offsets says.
            distinct = int(function(values, batch.offsets, kept, kept)[-1][-1])
        results = [call(values, batch.offsets, kept, distinct) for call in (compiled, function)]
        grads = [torch.autograd.grad(result[0], values)[0] for result in results]
        torch.testing.assert_close([*results[0], grads[0]], [*results[1], grads[1]])
    assert graphs == 1
    with pytest.raises(Exception, match="total: must be given in a compiled or captured call"):
        torch.compile(lambda v, o: ops.jagged_truncate(v, o, 3), fullgraph=True, backend="eager")(values, batch.offsets)


@ON_GPU
def test_no_synchronisation_and_graph_capture(place: Place) -> None:
    values = random_tensor((60, 8), torch.float32, 0).requires_grad_()
    offsets = jagged_of((10, 0, 50)).offsets

    def step() -> torch.Tensor:
        dense = ops.jagged_to_dense(values, offsets, 20)
        kept, new = ops.jagged_truncate(ops.dense_to_jagged(dense, offsets, 60), offsets, 15, total=25)
        joined, _ = ops.jagged_concat([kept, values], [new, offsets])
        (grad,) = torch.autograd.grad(joined.square().sum(), values)
        return grad

    graph, results = captured(step)
    for lengths in ((10, 0, 50), (5, 50, 5), (0, 0, 60)):
        offsets.copy_(jagged_of(lengths).offsets)
        graph.replay()
        if sum(min(n, 15) for n in lengths) == 25:
            same(results, step())


@ON_GPU
def test_other_device_than_the_current_one(place: Place) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    values, offsets = random_tensor((5, 4), torch.float32, 0), jagged_of((2, 0, 3)).offsets
    there = ops.jagged_to_dense(values.to("cuda:1"), offsets.to("cuda:1"), 2)
    assert torch.cuda.current_device() == 0
    same(there.to(place.device), ops.jagged_to_dense(values, offsets, 2))


@ON_GPU
def test_long_sample_among_thousands_of_short_ones(place: Place) -> None:
    lengths = (*(k % 5 for k in range(3_000)), 100_000, 0, *(k % 7 for k in range(3_000)))
    batch = jagged_of(lengths)
    values = random_tensor((batch.total, 24), torch.float32, 0)
    length = torch.tensor(lengths, device=place.device)
    start = batch.offsets[:-1]
    # Its first rows and those of the short ones; then all rows of a part in which it alone is long.
    dense = ops.jagged_to_dense(values, batch.offsets, 50)
    row = torch.arange(50, device=place.device)
    expected = values[(start[:, None] + row).clamp(max=batch.total - 1)] * (row < length[:, None])[..., None]
    same(dense, expected)
    sample = torch.repeat_interleave(torch.arange(len(lengths), device=place.device), length)
    position = torch.arange(batch.total, device=place.device) - start[sample]
    same(ops.dense_to_jagged(dense, batch.offsets, batch.total), values * (position < 50)[:, None])
    last = position >= length[sample] - 60_000
    same(ops.jagged_truncate(values, batch.offsets, 60_000, "last")[0], values[last])
    joined, joined_offsets = ops.jagged_concat([values, dense[:, :1]], [batch.offsets, None])
    at_the_end = torch.ones(batch.total + len(lengths), dtype=torch.bool, device=place.device)
    at_the_end[torch.arange(batch.total, device=place.device) + sample] = False
    assert bool(at_the_end[joined_offsets[1:] - 1].all())
    same(joined[~at_the_end], values)
    same(joined[at_the_end], dense[:, 0])
    same(ops.jagged_split(joined, [batch.offsets, 1])[0], values)


@ON_GPU
def test_addresses_past_2_to_the_31(place: Place) -> None:
    rows, features = 2**21 + 3, 1024
    values = torch.empty(rows, features, dtype=torch.bfloat16, device=place.device)
    values.copy_(torch.arange(rows, device=place.device)[:, None] % 251)
    offsets = torch.tensor([0, 5, rows - 4, rows], device=place.device)
    dense = ops.jagged_to_dense(values, offsets, 6)
    same(dense[2, :4], values[-4:])
    last, _ = ops.jagged_truncate(values, offsets, 6, "last", total=15)
    same(last[-4:], values[-4:])
    same(ops.dense_to_jagged(values[None], torch.tensor([0, rows], device=place.device), rows)[-4:], values[-4:])


def test_more_selected_rows_than_int32_counts_are_refused() -> None:
    values, offsets = torch.zeros(1).expand(2**30), torch.tensor([0, 2**30], dtype=torch.int32)
    expected = "offsets: expected int64 for the 3221225472 rows that are taken, got int32; convert them with .long()"
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        ops.jagged_index_select(values, offsets, torch.zeros(3, dtype=torch.int64))


def test_places_of_rows_in_their_samples(place: Place) -> None:
    offsets = torch.tensor([0, 3, 3, 5], device=place.device)
    assert ops.row_positions(offsets, 5).tolist() == [0, 1, 2, 0, 1]
    assert ops.row_positions(offsets, 5, from_end=True).tolist() == [2, 1, 0, 1, 0]
