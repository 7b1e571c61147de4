"""Biases and dropout of jagged attention against padded attention in float64, in every place; and what that cannot show."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from jagged.ops import jagged_attention, pair_offsets
from jagged.ops.attention import torch_impl
from jagged.ops.attention.spec import Inputs, Options
from jagged.ops.attention.triton.bias_gradients import (
    BINS,
    BiasGradients,
    GradientNumbers,
    add_exactly,
    add_relative_gradient,
    no_sums,
    sum_bins_kernel,
)
from jagged.ops.attention.triton.biases import Biases, BiasNumbers
from jagged.ops.attention.triton.masks import Sight
from jagged.ops.attention.triton.samples import Sample
from jagged.ops.attention.triton.scores import Rules
from tests.graphs import captured
from tests.ops.test_attention import BATCHES, MASKS, Case, cases, inputs_of, output_and_lse
from tests.oracle import check_three_way
from tests.places import PLACE, Place
from tests.reference.attention import dropout_mask, padded_attention, time_buckets, visible_keys
from tests.strategies import Jagged, jagged_batches, jagged_of, random_tensor

ON_GPU = pytest.mark.gpu
# A bias has a dtype of its own.
BIAS_DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
# None, one that bends most scores and one that bends few.
SOFTCAPS = st.sampled_from([None, 1.5, 20.0])

# Interpreted kernels with biases are slower still. A tile has 16 rows at least.
SMALL_BATCHES = jagged_batches(2, 20) if PLACE.name == "interpret" else BATCHES


def random_times(total: int, seed: int, octaves: int) -> Tensor:
    """Times of either sign up to `2 ** octaves`, most of them near 0, in no order and with ties."""
    generator = torch.Generator().manual_seed(seed)
    times = 2 ** (torch.rand(total, generator=generator, dtype=torch.float64) * octaves)
    signs = torch.randint(2, (total,), generator=generator) * 2 - 1
    # Over the last rows, those of a sample that every batch has, the buckets differ: a sum over one bucket alone is exactly 0.
    times[max(total - 7, 0) :] = 3.0 ** torch.arange(min(7, total))
    return (times.long() * signs).to(PLACE.device)


def num_pairs(batch: Jagged, keys: Jagged | None) -> int:
    return sum(a * b for a, b in zip(batch.lengths, (batch if keys is None else keys).lengths, strict=True))


def seed_of(number: int) -> Tensor:
    return torch.tensor([number], device=PLACE.device)


def with_more_heads(case: Case) -> Case:
    """Enough heads for the yardstick of a bias's gradient, the largest error of a small table's few numbers."""
    if PLACE.name == "interpret" and case.queries.total > 15:
        return case
    return replace(case, heads=max(case.heads, -(-8 // case.group)))


@st.composite
def terms(draw: st.DrawFn, case: Case, dtype: torch.dtype | None = None) -> tuple[dict[str, Tensor], dict[str, object]]:
    """Return biases, which want gradients, and what goes with them; each kind may be missing."""
    heads, seed = case.heads * case.group, case.seed + 10
    keys = case.queries if case.keys is None else case.keys
    biases, others = {}, {}

    def random(shape: tuple[int, ...]) -> Tensor:
        return random_tensor(shape, dtype or draw(BIAS_DTYPES), seed + len(biases))

    if draw(st.booleans()):
        biases["relative_bias"] = random((heads, 2 * draw(st.sampled_from([2, 5, 16, 64, 200])) + 1))
    if draw(st.booleans()):
        biases["time_bias"] = random((heads, draw(st.sampled_from([16, 31, 64, 100]))))
        octaves = draw(st.integers(3, 46))
        others["q_times"] = random_times(case.queries.total, seed, octaves)
        if case.keys is not None or draw(st.booleans()):
            others["k_times"] = random_times(keys.total, seed + 1, octaves)
    match draw(st.sampled_from([None, "dense", "expanded", "jagged"])):
        case "dense":
            # No less than three, of which the second sees two keys: the gradient of a query that sees one is exactly 0.
            longest = [max(side.lengths) + draw(st.integers(-2, 3)) for side in (case.queries, keys)]
            biases["bias"] = random((keys.batch_size, heads, *longest))
        case "expanded":
            # `expanded` makes it one for each sample and each query.
            biases["bias"] = random((1, heads, 1, max(keys.lengths)))
        case "jagged":
            biases["bias"] = random((heads, num_pairs(case.queries, case.keys)))
    if draw(st.booleans()):
        others["dropout_p"] = draw(st.sampled_from([0.1, 0.3, 0.5]))
        others["dropout_seed"] = seed_of(draw(st.integers(-(2**63), 2**63 - 1)))
    return biases, others


def expanded(biases: dict[str, Tensor], batch: Jagged) -> dict[str, Tensor]:
    bias = biases.get("bias")
    if bias is None or bias.dim() == 2 or bias.shape[2] > 1:
        return biases
    return {**biases, "bias": bias.expand(batch.batch_size, -1, max(batch.lengths), -1)}


def functions(
    place: Place,
    batch: Jagged,
    keys: Jagged | None,
    names: list[str],
    *,
    return_lse: bool = False,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    **options: object,
) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Return ours and the reference, as functions of q, k, v and the biases that are named."""
    sides = batch.offsets, None if keys is None else keys.offsets

    def ours(q: Tensor, k: Tensor, v: Tensor, *biases: Tensor) -> Tensor:
        result = jagged_attention(
            q,
            k,
            v,
            *sides,
            return_lse=return_lse,
            dropout_p=dropout_p,
            dropout_seed=dropout_seed,
            backend=place.backend if q.dtype != torch.float64 else "torch",
            **expanded(dict(zip(names, biases, strict=True)), batch),  # type: ignore[arg-type]
            **options,  # type: ignore[arg-type]
        )
        return output_and_lse(*result) if return_lse else result

    def reference(q: Tensor, k: Tensor, v: Tensor, *biases: Tensor) -> Tensor:
        keep = None
        if dropout_seed is not None:
            lengths = batch.offsets.diff(), (batch if keys is None else keys).offsets.diff()
            keep = dropout_mask(int(dropout_seed), dropout_p, *lengths, q.shape[1])
        named = expanded(dict(zip(names, biases, strict=True)), batch)
        result = padded_attention(q, k, v, *sides, keep=keep, dropout_p=dropout_p, **named, **options)  # type: ignore[arg-type]
        return output_and_lse(*result) if return_lse else result[0]

    return ours, reference


def check(
    place: Place,
    batch: Jagged,
    inputs: list[Tensor],
    biases: dict[str, Tensor],
    keys: Jagged | None = None,
    *,
    wanted: list[bool] | None = None,
    **options: object,
) -> None:
    ours, reference = functions(place, batch, keys, list(biases), **options)  # type: ignore[arg-type]
    check_three_way(ours, reference, [*inputs, *biases.values()], requires_grad=wanted)


# The interpreter is slow: there queries and keys take turns at being the same rows.
@pytest.mark.parametrize("across", [False, True] if PLACE.name != "interpret" else [None])
@pytest.mark.parametrize("dtype", PLACE.dtypes, ids=str)
@settings(max_examples=-(-settings().max_examples // (2 * len(PLACE.dtypes))))
@given(st.data())
def test_three_way(place: Place, dtype: torch.dtype, across: bool | None, data: st.DataObject) -> None:
    head_dims = [7, 16] if place.name == "interpret" else [1, 7, 16, 48, 64, 100, 128]
    case = with_more_heads(data.draw(cases(dtype, across, head_dims, shortest_window=2, batches=SMALL_BATCHES)))
    biases, others = data.draw(terms(case))
    wanted, return_lse = data.draw(st.lists(st.booleans(), min_size=3, max_size=6)), data.draw(st.booleans())
    wanted = (wanted + [True] * 3)[: 3 + len(biases)]
    others |= {"softcap": data.draw(SOFTCAPS), "wanted": wanted, "return_lse": return_lse}
    check(place, case.queries, case.inputs(), biases, case.keys, **case.options, **others)


@pytest.mark.skipif(PLACE.name != "cpu", reason="the PyTorch implementation's own chunks, and dtype")
@given(st.data(), st.integers(1, 3_000))
def test_float64_in_chunks_of_any_size(place: Place, data: st.DataObject, chunk: int) -> None:
    case = data.draw(cases(torch.float64, shortest_window=2))
    biases, others = data.draw(terms(case, torch.float64))
    others |= {"softcap": data.draw(SOFTCAPS)}
    ours, reference = functions(place, case.queries, case.keys, list(biases), **case.options, **others)  # type: ignore[arg-type]
    inputs, results = [*case.inputs(), *biases.values()], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_impl, "_CHUNK_SCORES", chunk)
        for function in (ours, reference):
            leaves = [of.detach().clone().requires_grad_() for of in inputs]
            output = function(*leaves)
            slope = random_tensor(output.shape, torch.float64, 7)
            # Of a batch without rows the reference may be a constant.
            grads = (
                torch.autograd.grad(output, leaves, slope, materialize_grads=True)
                if output.requires_grad
                else map(torch.zeros_like, leaves)
            )
            results.append((output.detach(), *grads))
    # Chunks add up in other orders, by some last digits; what is wrong with them is not small.
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-11)


@pytest.mark.skipif(PLACE.name != "cpu", reason="float64 finite differences are the CPU's work")
@pytest.mark.parametrize("mask", [MASKS[0], MASKS[1], MASKS[-1]], ids=str)
@pytest.mark.parametrize("kind", ["dense", "jagged"])
def test_gradcheck(place: Place, kind: str, mask: dict[str, object]) -> None:
    batch, keys = jagged_of((3, 0, 4)), jagged_of((3, 2, 5))
    rows = Case(batch, keys, 1, 2, 3, torch.float64, 0, {}, 4).inputs()
    pairs = (3, 2, 3, 6) if kind == "dense" else (2, num_pairs(batch, keys))
    biases = [random_tensor(shape, torch.float64, 5) for shape in ((2, 5), (2, 20), pairs)]
    times = {"q_times": random_times(batch.total, 0, 20), "k_times": random_times(keys.total, 1, 20)}
    ours, _ = functions(
        place,
        batch,
        keys,
        ["relative_bias", "time_bias", "bias"],
        return_lse=True,
        dropout_p=0.3,
        dropout_seed=seed_of(5),
        **times,
        **mask,
    )
    assert torch.autograd.gradcheck(ours, [x.requires_grad_() for x in (*rows, *biases)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_tile_boundary(place: Place, dtype: torch.dtype) -> None:
    """All biases and dropout over lengths around the tiles, self-attention and across."""
    many = place.name != "interpret"
    lengths = (31, 0, 32, 33, 1, 65, 1, 2) if dtype == torch.float32 else (63, 64, 65, 129, 1)
    batch = jagged_of(lengths if many else lengths[:3])
    keys = jagged_of(lengths[::-1] if many else lengths[2::-1])
    for mask in (MASKS[1], MASKS[-1]) if many else MASKS[-1:]:
        for other in (None, keys) if many else (None,) if dtype == torch.float32 else (keys,):
            case = Case(batch, other, 1, 2, 16, dtype, 0, {})
            shapes = {"relative_bias": (2, 41), "time_bias": (2, 40), "bias": (2, num_pairs(batch, other))}
            biases = {name: random_tensor(shape, torch.float32, 7) for name, shape in shapes.items()}
            times = {"q_times": random_times(batch.total, 0, 30)}
            if other is not None:
                times["k_times"] = random_times(other.total, 1, 30)
            dropout = {"dropout_p": 0.2, "dropout_seed": seed_of(3)}
            check(place, batch, case.inputs(), biases, other, return_lse=True, **mask, **times, **dropout)


@pytest.mark.parametrize(
    "shape",
    [(3, 2, 4, 6), (3, 2, 60, 50), (3, 2, 0, 0), (3, 2, 21, 1), (1, 2, 1, 21), (1, 1, 21, 21), (3, 1, 1, 1)],
    ids=str,
)
def test_dense_biases_of_any_size_and_expanded(place: Place, shape: tuple[int, ...]) -> None:
    """Smaller than the longest sample, or larger, or of no size; expanded in any dimension."""
    batch = jagged_of((21, 0, 5))
    leaf = random_tensor(shape, torch.float32, 3)
    view = leaf.expand(3, 2, *(max(size, 21) if size == 1 else size for size in shape[2:])) if 1 in shape else leaf
    offsets = batch.offsets

    def ours(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        options = {"causal": True, "bias": bias.expand(view.shape)}
        # A bias that all keys share changes no output, but the log-sum-exp.
        return output_and_lse(*jagged_attention(q, k, v, offsets, return_lse=True, backend=place.backend, **options))  # type: ignore[call-overload]

    def reference(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return output_and_lse(*padded_attention(q, k, v, offsets, causal=True, bias=bias.expand(view.shape)))

    check_three_way(ours, reference, [*inputs_of(batch, 2, 8, torch.float32), leaf])


def test_dense_biases_with_strides(place: Place) -> None:
    """Each dimension last, and gaps: the oracle keeps the strides."""
    batch = jagged_of((9, 0, 12))
    inputs = inputs_of(batch, 2, 8, torch.bfloat16)
    whole = random_tensor((12, 3, 12, 2), torch.float16, 3)
    for bias in (
        whole.permute(1, 3, 0, 2),
        whole.permute(1, 3, 2, 0),
        random_tensor((3, 2, 12, 12), torch.float32, 4, strided=True),
    ):
        assert not bias.is_contiguous()
        check(place, batch, inputs, {"bias": bias})
    jagged = random_tensor((num_pairs(batch, None), 2), torch.float32, 5).t()
    check(place, batch, inputs, {"bias": jagged})


def test_jagged_bias_lies_as_pair_offsets_says(place: Place) -> None:
    batch, keys = jagged_of((3, 0, 4)), jagged_of((2, 5, 6))
    q, k, v = Case(batch, keys, 2, 1, 8, torch.float32, 0, {}).inputs()
    dense = random_tensor((3, 2, 4, 6), torch.float32, 1)
    starts = pair_offsets(batch.offsets, keys.offsets).tolist()
    jagged = dense.new_full((2, starts[-1]), torch.nan)
    for sample, (rows, columns) in enumerate(zip(batch.lengths, keys.lengths, strict=True)):
        jagged[:, starts[sample] : starts[sample + 1]] = dense[sample, :, :rows, :columns].flatten(1)
    by_dense, by_jagged = (
        jagged_attention(q, k, v, batch.offsets, keys.offsets, bias=bias, backend=place.backend) for bias in (dense, jagged)
    )
    assert torch.equal(by_dense, by_jagged)


def test_distances_as_written_out(place: Place) -> None:
    """Three events and two targets: both targets stand behind the history, at no distance from themselves."""
    distances = torch.tensor([[0, -1, -2, -3, -3], [1, 0, -1, -2, -2], [2, 1, 0, -1, -1], [3, 2, 1, 0, 0], [3, 2, 1, 0, 0]])
    batch = jagged_of((5,))
    q, k, v = inputs_of(batch, 2, 8, torch.float32)
    for furthest in (1, 2, 9):
        table = random_tensor((2, 2 * furthest + 1), torch.float32, furthest)
        bias = table[:, furthest + distances.clamp(-furthest, furthest).to(place.device)][None]
        ours, written = (
            jagged_attention(q, k, v, batch.offsets, num_targets=2, backend=place.backend, **term)  # type: ignore[call-overload]
            for term in ({"relative_bias": table}, {"bias": bias})
        )
        torch.testing.assert_close(ours, written)
    # Across, the last query stands at the last key.
    last = jagged_attention(
        q[:1], k, v, batch.offsets[:2].clamp(max=1), batch.offsets, relative_bias=table, backend=place.backend
    )
    bias = table[:, 9 + torch.tensor([4, 3, 2, 1, 0], device=place.device)][None, :, None]
    written = jagged_attention(q[:1], k, v, batch.offsets[:2].clamp(max=1), batch.offsets, bias=bias, backend=place.backend)
    torch.testing.assert_close(last, written)


@triton.jit
def sum_diagonals_kernel(
    tile, unit, bins, ends, first_query, first_key, farthest, key_length, history, num_targets,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Sums of one tile by distance: into the table, and what belongs to its ends into `ends`."""
    row, column = tl.arange(0, ROWS), tl.arange(0, KEYS)
    # A product has the layout of scores.
    scores = tl.dot(
        tl.load(tile + row[:, None] * KEYS + column[None, :]), tl.load(unit + column[:, None] * KEYS + column[None, :])
    )  # fmt: skip
    zero = tl.program_id(0)
    sample = Sample(zero, zero, 0, 0, key_length, key_length, 0, history)
    numbers = BiasNumbers(1.0, farthest, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    sight = Sight(None, None, None, None, num_targets)
    rules = Rules(sight, Biases(bins, None, None, None, None), numbers, None, None)
    grads = BiasGradients(bins, None, None, GradientNumbers(2 * farthest + 1, 0, 0, 0, 0))
    sums, _ = no_sums(ROWS, 1)
    below, above = add_relative_gradient(sums, scores, first_query, first_key, sample, rules, grads)
    tl.store(ends, tl.sum(tl.sum(below, 1), 0))
    tl.store(ends + 1, tl.sum(tl.sum(above, 1), 0))


@pytest.mark.skipif(PLACE.name == "cpu", reason="Triton kernels")
@pytest.mark.parametrize("num_warps", [2, 4, 8] if PLACE.name != "interpret" else [4])
@pytest.mark.parametrize(("rows", "keys"), [(16, 16), (32, 16), (64, 16), (32, 32), (64, 32), (128, 32), (32, 64), (64, 64)])
def test_sums_along_diagonals(place: Place, rows: int, keys: int, num_warps: int) -> None:
    """Of tiles of every shape, whether within a table, across its ends or past them; whole numbers add up exactly."""
    generator = torch.Generator().manual_seed(rows + keys)
    unit = torch.eye(keys, dtype=torch.float16, device=place.device)
    for farthest in (0, 1, 20, 40, 300):
        for first_query, first_key, num_targets in ((64, 64, None), (64, 32, None), (96, 0, None), (0, 128, None), (64, 32, 5)):
            queries, all_keys = first_query + torch.arange(rows)[:, None], first_key + torch.arange(keys)[None, :]
            history = 192 if num_targets is None else first_query + rows // 2
            length = history + (num_targets or 0)
            tile = torch.randint(-99, 100, (rows, keys), generator=generator)
            tile *= (queries < length) & (all_keys < length) & ((all_keys <= history) | (queries == all_keys))
            apart = queries.clamp(max=history) - all_keys.clamp(max=history)
            want = torch.zeros(2 * farthest + 1, dtype=torch.int64)
            want.index_put_((farthest + apart.clamp(-farthest, farthest),), tile, accumulate=True)
            bins = torch.zeros(4, BINS.value, want.shape[0], dtype=torch.int64, device=place.device)
            table, ends = torch.zeros(want.shape, device=place.device), torch.zeros(2, device=place.device)
            sum_diagonals_kernel[(1,)](
                tile.half().to(place.device), unit, bins, ends, first_query, first_key, farthest, length, history, num_targets,
                ROWS=rows, KEYS=keys, num_warps=num_warps,
            )  # fmt: skip
            sum_bins_kernel[(triton.cdiv(want.shape[0], 16),)](bins, table, want.shape[0], COPIES=4, BLOCK=16)
            table[0] += ends[0]
            table[-1] += ends[1]
            assert torch.equal(table.cpu().long(), want), (farthest, first_query, first_key, num_targets)


@triton.jit
def add_exactly_kernel(numbers, bins, count, BLOCK: tl.constexpr):
    """Add numbers to sums in turn."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    add_exactly(bins, 3, index % 3, tl.load(numbers + index, mask=index < count, other=0.0), index < count)


@pytest.mark.skipif(PLACE.name == "cpu", reason="Triton kernels")
@pytest.mark.parametrize("kind", ["all exponents", "cancelling", "infinite", "not a number", "none"])
def test_sums_are_exact(place: Place, kind: str) -> None:
    """Of numbers of any size: what is left where large ones cancel, in whatever order they come."""
    generator = torch.Generator().manual_seed(0)
    mantissas = torch.rand(3000, generator=generator, dtype=torch.float64) + 1
    exponents = torch.randint(-126, 110, (3000,), generator=generator) if kind != "none" else torch.full((3000,), -140)
    numbers = torch.ldexp(mantissas * (torch.randint(0, 2, (3000,), generator=generator) * 2 - 1), exponents).float()
    if kind == "cancelling":
        numbers = torch.cat([numbers, -numbers, torch.tensor([1e-30, -3e20, 5.0])])
    elif kind in ("infinite", "not a number"):
        numbers[4] = torch.inf if kind == "infinite" else torch.nan
    want = [math.fsum(numbers[i::3].tolist()) if kind != "none" else 0.0 for i in range(3)]
    for own in (numbers, torch.stack([numbers[i::3] for i in range(3)], 1).flip(0).flatten()):
        bins = torch.zeros(4, BINS.value, 3, dtype=torch.int64, device=place.device)
        table = torch.zeros(3, device=place.device)
        add_exactly_kernel[(triton.cdiv(own.shape[0], 1024),)](own.to(place.device), bins, own.shape[0], BLOCK=1024)
        sum_bins_kernel[(1,)](bins, table, 3, COPIES=4, BLOCK=16)
        if kind in ("infinite", "not a number"):
            assert table[1].isnan()
            assert not table[[0, 2]].isnan().any()
        else:
            assert table.tolist() == pytest.approx(want, rel=1e-7, abs=0)


@pytest.mark.parametrize(
    "sizes",
    [{"relative_bias": 0, "time_bias": 1}, {"relative_bias": 0}, {"time_bias": 1}, {"relative_bias": 300, "time_bias": 127}],
)
def test_tables_of_one_column_and_of_more_than_are_read(place: Place, sizes: dict[str, int]) -> None:
    """One column adds the same to every score: that changes the log-sum-exp alone, which therefore belongs to the output here."""
    batch = jagged_of((20, 0, 3))
    widths = {"relative_bias": lambda size: 2 * size + 1, "time_bias": lambda size: size}
    biases = {name: random_tensor((2, widths[name](size)), torch.float32, 1) for name, size in sizes.items()}
    times = {"q_times": random_times(batch.total, 0, 40)} if "time_bias" in sizes else {}
    check(place, batch, inputs_of(batch, 2, 8, torch.float32), biases, causal=True, return_lse=True, **times)


@pytest.mark.parametrize("base", [0, 2**46, -(2**46), 2**62, -(2**62)] if PLACE.name != "interpret" else [-(2**46)])
@pytest.mark.parametrize("kind", ["ties", "unsorted", "far apart", "both signs"])
def test_times(place: Place, kind: str, base: int) -> None:
    """Times far from 0 leave their differences exact."""
    batch, keys = jagged_of((6, 0, 12)), jagged_of((5, 1, 8))
    seconds = random_times(batch.total + keys.total, 3, 8)
    match kind:
        case "ties":
            seconds = seconds // 64
        case "unsorted":
            pass
        case "far apart":
            seconds = torch.where(seconds % 2 == 0, seconds, seconds + 2**46)
        case "both signs":
            seconds = torch.where(seconds % 2 == 0, seconds - 2**46, seconds + 2**46 - 1)
    q_times, k_times = (base + seconds).split([batch.total, keys.total])
    inputs = Case(batch, keys, 1, 2, 8, torch.float32, 0, {}).inputs()
    bias = random_tensor((2, 100), torch.float32, 1)
    # With ties a query's keys may all lie in one bucket.
    check(place, batch, inputs, {"time_bias": bias}, keys, q_times=q_times, k_times=k_times, return_lse=True)


def test_times_in_32_bits(place: Place) -> None:
    batch, table = jagged_of((20, 0, 3)), random_tensor((2, 90), torch.float32, 1)
    inputs = inputs_of(batch, 2, 8, torch.float32)
    # Their differences need a bit more.
    times = random_tensor((batch.total,), torch.float64, 2).sign().mul(2**31 - 2).to(torch.int32)
    outputs = [
        jagged_attention(*inputs, batch.offsets, time_bias=table, q_times=each, backend=place.backend)
        for each in (times, times.long())
    ]
    assert torch.equal(*outputs)


@pytest.mark.parametrize("kind", ["ascending", "descending", "in no order"])
def test_times_that_whole_tiles_have_alike(place: Place, kind: str) -> None:
    """Runs of 32 rows of about one time, far from others': some tiles have one bucket, others two, one in each half."""
    batch = jagged_of((100, 0, 70))
    runs = torch.cat([torch.arange(length) // 32 for length in batch.lengths])
    order = {"ascending": [0, 1, 2, 3], "descending": [3, 2, 1, 0], "in no order": [2, 0, 3, 1]}[kind]
    times = (torch.tensor(order)[runs] * 5 * 2**18 + torch.arange(batch.total) % 3).to(place.device)
    bias = random_tensor((1, 50), torch.float32, 1)
    check(place, batch, Case(batch, None, 1, 1, 64, torch.bfloat16, 0, {}).inputs(), {"time_bias": bias}, q_times=times)


def test_time_buckets_at_their_borders(place: Place) -> None:
    """Samples of a query and a key, whose log-sum-exp is the bias; around every border, where floats are fewer than times too."""
    octaves = range(1, 46) if place.name != "interpret" else (1, 2, 23, 24, 25, 45)
    borders = [times * 2**octave // 2 for octave in octaves for times in (2, 3)]
    apart = sorted({border + step for border in (0, *borders) for step in (-2, -1, 0, 1, 2)})
    batch = jagged_of((1,) * len(apart))
    zeros = torch.zeros(len(apart), 1, 8, device=place.device)
    between = torch.tensor(apart, device=place.device)
    for columns in (100, 10):
        table = torch.arange(columns, device=place.device, dtype=torch.float32)[None]
        _, lse = jagged_attention(
            zeros, zeros, zeros, batch.offsets, time_bias=table, q_times=between - 5, k_times=between * 0 - 5, return_lse=True,
            backend=place.backend,
        )  # fmt: skip
        assert torch.equal(lse[0].round().long(), time_buckets(between).clamp(max=columns - 1))
    expected = {0: 0, 1: 1, 2: 3, 3: 4, 4: 5, 5: 5, 6: 6, 8: 7, 12: 8, 2**45: 91, 3 * 2**44: 92, 2**45 - 1: 91, 2**45 - 2**22: 90}
    got = time_buckets(torch.tensor(list(expected)))
    assert got.tolist() == list(expected.values())


@pytest.mark.parametrize("mask", MASKS[1:], ids=str)
@pytest.mark.parametrize("kind", ["dense", "jagged"])
def test_no_gradient_at_hidden_pairs(place: Place, kind: str, mask: dict[str, object]) -> None:
    """Exactly 0, as beyond a sample's end; queries before the first key may see none."""
    batch, keys = jagged_of((20, 0, 9)), jagged_of((12, 3, 17))
    inputs = Case(batch, keys, 1, 2, 8, torch.float32, 0, {}).inputs()
    visible = visible_keys(batch.offsets.diff(), keys.offsets.diff(), **mask)  # type: ignore[arg-type]
    pairs = (3, 2, 22, 19) if kind == "dense" else (2, num_pairs(batch, keys))
    leaves = [x.requires_grad_() for x in (*inputs, random_tensor(pairs, torch.float16, 1))]
    ours, _ = functions(place, batch, keys, ["bias"], **mask)
    output = ours(*leaves)
    *_, grad = torch.autograd.grad(output, leaves, random_tensor(tuple(output.shape), torch.float32, 2))
    sees_more_than_one = visible & (visible.sum(-1, keepdim=True) > 1)
    if kind == "dense":
        assert not grad[:, :, 20:].any()
        assert not grad[..., 17:].any()
        blocks = grad[:, :, :20, :17].unbind(0)
    else:
        lengths = list(zip(batch.lengths, keys.lengths, strict=True))
        blocks = tuple(
            x.unflatten(1, sizes) for x, sizes in zip(grad.split([a * b for a, b in lengths], 1), lengths, strict=True)
        )
    for block, seen, learns in zip(blocks, visible, sees_more_than_one, strict=True):
        rows, columns = block.shape[1:]
        assert not block[:, ~seen[:rows, :columns]].any()
        assert bool(block.any()) == bool(learns.any())


def test_gradients_are_deterministic(place: Place) -> None:
    """Bit for bit, with all there is."""
    batch = jagged_of((70, 0, 130, 3) if place.name != "interpret" else (5, 0, 20))
    shapes = {"relative_bias": (4, 33), "time_bias": (4, 64), "bias": (4, num_pairs(batch, None))}
    biases = [random_tensor(shape, torch.float32, 1) for shape in shapes.values()]
    leaves = [x.requires_grad_() for x in (*Case(batch, None, 2, 2, 16, torch.float32, 0, {}).inputs(), *biases)]
    options = {"num_targets": 3, "q_times": random_times(batch.total, 0, 20), "dropout_p": 0.2, "dropout_seed": seed_of(7)}
    ours, _ = functions(place, batch, None, list(shapes), **options)  # type: ignore[arg-type]
    cotangent = random_tensor((batch.total, 4, 16), torch.float32, 2)
    runs = [torch.autograd.grad(ours(*leaves), leaves, cotangent) for _ in range(2)]
    for first, second in zip(*runs, strict=True):
        assert first.any()
        assert torch.equal(first, second)


@pytest.mark.parametrize("kind", ["of pairs", "by distance"])
@pytest.mark.parametrize("lowest", [torch.finfo(torch.float32).min, -1e38])
def test_biases_that_hide(place: Place, lowest: float, kind: str) -> None:
    """A bias of the least number hides whole tiles of keys, though over the scale it would overflow; gradients stay numbers."""
    length, hidden = 70, 35
    batch = jagged_of((length, 3))
    inputs = [x.requires_grad_() for x in Case(batch, None, 1, 1, 16, torch.float32, 0, {}).inputs()]
    if kind == "of pairs":
        bias = torch.zeros(2, 1, length, length, device=place.device)
        bias[0, :, hidden:, :hidden] = lowest
        biases, window = {"bias": bias.requires_grad_()}, None
    else:
        bias = torch.zeros(1, 2 * hidden + 1, device=place.device)
        bias[:, -1] = lowest
        biases, window = {"relative_bias": bias.requires_grad_()}, hidden
    output = jagged_attention(*inputs, batch.offsets, causal=True, backend=place.backend, **biases)
    upstream = random_tensor(output.shape, torch.float32, 9)
    grads = torch.autograd.grad(output, [*inputs, bias], upstream)
    assert all(grad.isfinite().all() for grad in grads)
    if window is not None:
        expected = jagged_attention(*inputs, batch.offsets, causal=True, window=window, backend=place.backend)
        torch.testing.assert_close(output, expected)
        for grad, of_window in zip(grads, torch.autograd.grad(expected, inputs, upstream), strict=False):
            torch.testing.assert_close(grad, of_window)
    else:
        rest = [x[hidden:length] for x in inputs]
        expected = jagged_attention(*rest, batch.offsets[:2].clamp(max=length - hidden), causal=True, backend=place.backend)
        torch.testing.assert_close(output[hidden:length], expected)


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0, 0)])
@pytest.mark.parametrize("kind", ["dense", "jagged"])
def test_batches_without_rows(place: Place, kind: str, lengths: tuple[int, ...]) -> None:
    batch = jagged_of(lengths)
    shapes = [(2, 5), (2, 8), (len(lengths), 2, 3, 4) if kind == "dense" else (2, 0)]
    biases = [random_tensor(shape, torch.float16, 1) for shape in shapes]
    leaves = [x.requires_grad_() for x in (*inputs_of(batch, 2, 8, torch.float32), *biases)]
    options = {"q_times": random_times(0, 0, 3), "dropout_p": 0.5}
    ours, _ = functions(place, batch, None, ["relative_bias", "time_bias", "bias"], **options)  # type: ignore[arg-type]
    output = ours(*leaves)
    assert output.shape == (0, 2, 8)
    grads = torch.autograd.grad(output, leaves, output)
    for grad, leaf in zip(grads, leaves, strict=True):
        assert (grad.shape, grad.dtype) == (leaf.shape, leaf.dtype)
        assert not grad.any()


@pytest.mark.usefixtures("unchecked")
def test_wrong_offsets_reach_no_foreign_memory(place: Place) -> None:
    """Neither do a jagged bias of another length than the offsets say, nor its gradient."""
    fence = torch.full((3, 140, 1, 16), 1e30, device=place.device)
    rows = [x.fill_(value) for x, value in zip(fence[:, 50:90], (0.5, 0.25, 1.0), strict=True)]
    around = torch.full((3, 6_000), 1e30, device=place.device)
    pairs = around[1:2, 2_000:3_600].fill_(0.5)
    times = torch.full((140,), 2**62, device=place.device)
    times[50:90] = 5
    tables = {"relative_bias": torch.ones(1, 9, device=place.device), "time_bias": torch.ones(1, 9, device=place.device)}
    every = ([0, 30, 5, 90], [0, 40], [0, 2**30, 0, 2**31], [-70, 10, 40], [0, 1000, 2000], [90, 95], [0, -(2**40), 2**40])
    for wrong in every if place.name != "interpret" else every[:3]:
        offsets = torch.tensor(wrong, device=place.device)
        others = torch.arange(len(wrong), device=place.device) * 40 // (len(wrong) - 1)
        for sides in ((offsets, None), (others, offsets), (offsets, others))[place.name == "interpret" :]:
            for bias in (pairs, pairs[:, :700], pairs[:, :1], torch.ones(len(wrong) - 1, 1, 7, 50, device=place.device)):
                leaves = [x.detach().requires_grad_() for x in (*rows, bias, *tables.values())]
                output = jagged_attention(
                    *leaves[:3], *sides, causal=True, num_targets=2, bias=leaves[3],
                    **dict(zip(tables, leaves[4:], strict=True)), q_times=times[50:90],
                    k_times=times[50:90], dropout_p=0.1, backend=place.backend,
                )  # type: ignore[call-overload]  # fmt: skip
                # Rows that no sample covers may be left unwritten, which here means NaN.
                assert not (output.detach() > 100).any()
                for grad, leaf in zip(torch.autograd.grad(output, leaves, torch.ones_like(output)), leaves, strict=True):
                    assert grad.shape == leaf.shape
                    assert not (grad.abs() > 1e6).any()
    assert bool((fence[:, :50] == 1e30).all())
    assert bool((fence[:, 90:] == 1e30).all())
    assert bool((around[::2] == 1e30).all())


def kept_weights(place: Place, batch: Jagged, keys: Jagged, heads: int, seed: Tensor | None, dropout_p: float) -> Tensor:
    """Weights `[Sq, heads, 16]` of keys that all score the same, read through values that are the rows of an identity."""
    assert max(keys.lengths) <= 16
    q, k = (torch.zeros(side.total, heads, 16, device=place.device) for side in (batch, keys))
    v = torch.cat([torch.eye(16)[:length] for length in keys.lengths])[:, None].expand(-1, heads, -1).to(place.device)
    return jagged_attention(q, k, v, batch.offsets, keys.offsets, dropout_p=dropout_p, dropout_seed=seed, backend=place.backend)


@pytest.mark.parametrize("dropout_p", [1e-10, 0.1, 0.5, 0.9, 1 - 1e-12])
@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF])
def test_dropout_drops_exactly_what_its_hash_says(place: Place, seed: int, dropout_p: float) -> None:
    batch, keys = jagged_of((3, 40, 0, 5)), jagged_of((16, 9, 4, 1))
    weights = kept_weights(place, batch, keys, 3, seed_of(seed), dropout_p)
    mask = dropout_mask(seed, dropout_p, batch.offsets.diff(), keys.offsets.diff(), 3)
    expected = torch.zeros_like(weights)
    for sample, (start, rows, columns) in enumerate(zip(batch.offsets.tolist(), batch.lengths, keys.lengths, strict=False)):
        expected[start : start + rows, :, :columns] = mask[sample, :, :rows, :columns].transpose(0, 1) / columns
    assert torch.equal(weights > 0, expected > 0)
    torch.testing.assert_close(weights, expected / (1 - dropout_p))


def test_rate_and_seeds_of_dropout(place: Place) -> None:
    batch, keys = jagged_of((400, 0, 100) if place.name != "interpret" else (60, 0, 20)), jagged_of((16, 16, 16))
    number = batch.total * 2 * 16
    for dropout_p in (0.1, 0.5, 0.9):
        first, again, other = (kept_weights(place, batch, keys, 2, seed_of(seed), dropout_p) > 0 for seed in (11, 11, 11 + 2**32))
        assert torch.equal(first, again)
        deviation = math.sqrt(number * dropout_p * (1 - dropout_p))
        assert abs(int(first.sum()) - number * (1 - dropout_p)) < 5 * deviation
        # Of independent masks this many agree.
        agreeing = dropout_p**2 + (1 - dropout_p) ** 2
        assert abs(int((first == other).sum()) - number * agreeing) < 5 * math.sqrt(number * agreeing * (1 - agreeing))
    for side in ({"dim": 0}, {"dim": 1}, {"dim": 2}):
        neighbours = kept_weights(place, batch, keys, 2, seed_of(11), 0.5) > 0
        same = neighbours.narrow(side["dim"], 1, neighbours.shape[side["dim"]] - 1) == neighbours.narrow(
            side["dim"], 0, neighbours.shape[side["dim"]] - 1
        )
        assert abs(int(same.sum()) - same.numel() / 2) < 5 * math.sqrt(same.numel() / 4)


def test_dropout_without_a_seed_follows_torchs_generator(place: Place) -> None:
    batch = jagged_of((16,))

    def draw() -> Tensor:
        return kept_weights(place, batch, batch, 2, None, 0.5)

    torch.manual_seed(3)
    first, second = draw(), draw()
    torch.manual_seed(3)
    assert torch.equal(first, draw())
    assert torch.equal(second, draw())
    assert not torch.equal(first, second)
    assert torch.equal(kept_weights(place, batch, batch, 2, seed_of(1), 0.0), kept_weights(place, batch, batch, 2, None, 0.0))


def test_log_sum_exp_is_without_dropout(place: Place) -> None:
    batch = jagged_of((20, 0, 3))
    inputs = inputs_of(batch, 2, 8, torch.float32)
    results = [
        jagged_attention(*inputs, batch.offsets, dropout_p=p, return_lse=True, backend=place.backend)[1] for p in (0.0, 0.5)
    ]
    assert torch.equal(*results)


@pytest.mark.parametrize("scale", [0.0, -0.3])
def test_biases_beside_a_scale_that_is_not_positive(place: Place, scale: float) -> None:
    batch = jagged_of((20, 0, 3))
    biases = {"relative_bias": random_tensor((2, 9), torch.float32, 1), "bias": random_tensor((3, 2, 15, 15), torch.float32, 2)}
    inputs = inputs_of(batch, 2, 8, torch.float32)
    check(place, batch, inputs, biases, causal=True, scale=scale, wanted=[scale != 0, scale != 0, True, True, True])


def test_autocast_leaves_biases_alone(place: Place) -> None:
    batch = jagged_of((6, 0, 20))
    # Not a number of bfloat16.
    table = (torch.arange(10.0, device=place.device)[None].repeat(2, 1) / 3).requires_grad_()
    pairs = (random_tensor((3, 2, 20, 20), torch.float32, 1) / 3).requires_grad_()
    inputs = inputs_of(batch, 2, 8, torch.float32)
    options = {"time_bias": table, "q_times": random_times(batch.total, 0, 9), "bias": pairs, "backend": place.backend}
    with torch.autocast(place.device.type, dtype=torch.bfloat16):
        output = jagged_attention(*inputs, batch.offsets, **options)  # type: ignore[call-overload]
    expected = jagged_attention(*(x.bfloat16() for x in inputs), batch.offsets, **options)  # type: ignore[call-overload]
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, expected)
    for grad in torch.autograd.grad(output.sum(), (table, pairs)):
        assert grad.dtype == torch.float32
        assert grad.any()


def test_second_derivatives_are_refused(place: Place) -> None:
    batch = jagged_of((3, 2))
    table = random_tensor((1, 3), torch.float32, 0).requires_grad_()
    output = jagged_attention(*inputs_of(batch, 1, 4, torch.float32), batch.offsets, relative_bias=table, backend=place.backend)
    (grad,) = torch.autograd.grad(output.square().sum(), table, create_graph=True)
    with pytest.raises(RuntimeError, match="jagged_attention has no second derivative"):
        grad.sum().backward()


@pytest.mark.parametrize(
    ("kind", "wanted"), [("dense", [True] * 3), ("dense", [False, True, False]), ("jagged", [True, False, True])]
)
def test_opcheck(place: Place, kind: str, wanted: list[bool]) -> None:
    batch, keys = jagged_of((2, 0, 3)), jagged_of((4, 1, 2))
    q, k, v = Case(batch, keys, 1, 2, 4, torch.bfloat16, 0, {}).inputs()
    bias = random_tensor((3, 2, 3, 3) if kind == "dense" else (2, 14), torch.float16, 1)
    starts = None if kind == "dense" else pair_offsets(batch.offsets, keys.offsets)
    tables = random_tensor((2, 5), torch.float32, 2), random_tensor((2, 8), torch.bfloat16, 3)
    times = random_times(batch.total, 0, 9), random_times(keys.total, 1, 9)
    x = Inputs(q, k, v, batch.offsets, keys.offsets, None, *tables, *times, bias, starts, seed_of(5))
    o = Options(window=2, reach=2, num_contextual=1, scale=0.5, softcap=2.0, dropout_p=0.3)
    forward, backward = torch.ops.jagged.attention.default, torch.ops.jagged.attention_backward.default
    torch.library.opcheck(forward, (*x, *o, place.backend))
    output, lse = forward(*x, *o, place.backend)
    dtypes = [like.dtype if want else None for like, want in zip((q, k, v, *tables, bias), [True] * 3 + wanted, strict=True)]
    saved = (torch.ones_like(output), torch.ones_like(lse), *x, output, lse, *o, *dtypes, place.backend)
    torch.library.opcheck(backward, saved)
    for grad, like, want in zip(backward(*saved)[3:], (*tables, bias), wanted, strict=True):
        assert (grad.shape, grad.dtype) == ((like.shape, like.dtype) if want else ((0,), q.dtype))


def test_meta_tensors_have_shapes(place: Place) -> None:
    offsets = torch.empty(3, dtype=torch.int64, device="meta")
    q, k, v = (torch.empty(5, heads, 8, device="meta", requires_grad=True) for heads in (6, 2, 2))
    times = torch.empty(5, dtype=torch.int64, device="meta")
    shapes = {"relative_bias": (6, 3), "time_bias": (6, 4), "bias": (6, 13)}
    biases = {name: torch.empty(shape, device="meta", requires_grad=True) for name, shape in shapes.items()}
    output = jagged_attention(q, k, v, offsets, q_times=times, dropout_p=0.1, **biases)
    output.sum().backward()
    assert output.shape == (5, 6, 8)
    for name, bias in biases.items():
        assert bias.grad is not None
        assert bias.grad.shape == shapes[name]


@pytest.mark.skipif(PLACE.name == "interpret", reason="interpreted kernels are not compiled")
@pytest.mark.parametrize("kind", ["dense", "jagged"])
def test_one_graph_for_all_jagged_shapes(place: Place, kind: str) -> None:
    graphs = 0

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        nonlocal graphs
        graphs += 1
        return graph.forward

    def function(offsets: Tensor, times: Tensor, seed: Tensor, q: Tensor, k: Tensor, v: Tensor, *biases: Tensor) -> Tensor:
        relative, time, pairs = biases
        output = jagged_attention(
            q, k, v, offsets, relative_bias=relative, time_bias=time, q_times=times, bias=pairs, causal=True
        )
        dropped = jagged_attention(q, k, v, offsets, bias=pairs, dropout_p=0.3, dropout_seed=seed, num_targets=1)
        return output * 2 + dropped

    torch._dynamo.reset()
    one_graph = torch.compile(function, fullgraph=True, dynamic=True, backend=count)
    traced = torch.compile(function, fullgraph=True, dynamic=True, backend="inductor" if place.name == "gpu" else "aot_eager")
    # Sizes that are equal by chance in the first call would be taken to be equal in all.
    for lengths in ((2, 4, 3, 1), (5, 0, 9), (0, 7), (30, 2, 2, 2, 2)):
        batch = jagged_of(lengths)
        rows = Case(batch, None, 3, 2, 12, torch.float32, 0, {}).inputs()
        pairs = (batch.batch_size, 6, max(lengths) + 20, max(lengths) + 10) if kind == "dense" else (6, num_pairs(batch, None))
        biases = [random_tensor(shape, torch.float32, 1) for shape in ((6, 35), (6, 40), pairs)]
        leaves = [x.requires_grad_() for x in (*rows, *biases)]
        fixed = batch.offsets, random_times(batch.total, 0, 20), seed_of(5)
        expected = function(*fixed, *leaves)
        wanted = torch.autograd.grad(expected.square().sum(), leaves)
        for compiled in (one_graph, traced):
            ours = compiled(*fixed, *leaves)
            torch.testing.assert_close(ours, expected, rtol=0, atol=0)
            for got, want in zip(torch.autograd.grad(ours.square().sum(), leaves), wanted, strict=True):
                torch.testing.assert_close(got, want)
    assert graphs == 1


@pytest.mark.skipif(PLACE.name == "interpret", reason="interpreted kernels are not compiled")
def test_compiled_dropout_draws_anew(place: Place) -> None:
    """Without a seed, in one graph, a mask for every call, and in the backward the forward's own."""
    batch = jagged_of((16, 0, 5))
    leaves = [x.requires_grad_() for x in inputs_of(batch, 2, 16, torch.float32)]

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return jagged_attention(q, k, v, batch.offsets, dropout_p=0.5)

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="inductor" if place.name == "gpu" else "aot_eager")
    first, second = compiled(*leaves), compiled(*leaves)
    assert not torch.equal(first, second)
    # The output is linear in the values, weights the same: <output, output> = <values, gradient of the values>.
    for output in (first, second):
        (grad,) = torch.autograd.grad(output, leaves[2], output.detach())
        torch.testing.assert_close((grad * leaves[2]).sum(), output.square().sum())


@pytest.mark.usefixtures("unchecked")
def test_messages_name_argument_and_cure(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.zeros(3, 2, 4, device=place.device)
    offsets = torch.tensor([0, 3], device=place.device)
    times = torch.zeros(3, dtype=torch.int64, device=place.device)

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, device=place.device)

    cases: list[tuple[dict[str, object], type[Exception], str]] = [
        ({"relative_bias": zeros(3)}, ValueError, r"relative_bias: expected shape \[H, 2M \+ 1\], got \[3\]"),
        ({"relative_bias": 1.0}, TypeError, r"relative_bias: expected a tensor \[H, 2M \+ 1\], got float"),
        ({"relative_bias": zeros(1, 3)}, ValueError, r"relative_bias: expected .* with the 2 heads of q, got \[1, 3\]"),
        ({"relative_bias": zeros(2, 4)}, ValueError, r"relative_bias: expected an odd number of columns, .* got 4"),
        ({"relative_bias": zeros(2, 0)}, ValueError, r"relative_bias: expected an odd number of columns, .* got 0"),
        ({"relative_bias": zeros(2, 3).long()}, TypeError, "relative_bias: expected dtype float32, .* got int64"),
        ({"relative_bias": zeros(2, 3).double()}, TypeError, "relative_bias: .* or float64 beside float64 q, got float64"),
        ({"relative_bias": zeros(2, 3).to("meta")}, ValueError, "relative_bias: expected the device of q, .* got meta"),
        ({"time_bias": zeros(2, 0), "q_times": times}, ValueError, r"time_bias: expected \[H, T\] with one bucket or more"),
        ({"time_bias": zeros(1, 3), "q_times": times}, ValueError, r"time_bias: expected .* 2 heads of q, got \[1, 3\]"),
        ({"time_bias": zeros(2, 3)}, ValueError, r"q_times: expected \[3\] beside time_bias, got None; give the time"),
        ({"time_bias": zeros(2, 3), "k_times": times}, ValueError, r"q_times: expected \[3\] beside time_bias, got None"),
        (
            {"time_bias": zeros(2, 3), "q_times": times, "k_offsets": offsets},
            ValueError,
            r"k_times: expected \[3\] beside time_bias, got None",
        ),
        ({"q_times": times}, ValueError, "q_times: got times, but no time_bias that reads them"),
        ({"k_times": times}, ValueError, "k_times: got times, but no time_bias that reads them"),
        ({"time_bias": zeros(2, 3), "q_times": times[:2]}, ValueError, r"q_times: expected \[3\], one for each row, got \[2\]"),
        ({"time_bias": zeros(2, 3), "q_times": times.float()}, TypeError, "q_times: expected dtype int32, int64, got float32"),
        ({"time_bias": zeros(2, 3), "q_times": times.to("meta")}, ValueError, "q_times: expected the device of q, .* meta"),
        (
            {"time_bias": zeros(2, 3), "q_times": times, "k_times": times.to("meta")},
            ValueError,
            "k_times: expected the device of q, .* meta",
        ),
        ({"bias": 1.0}, ValueError, r"bias: expected a dense \[B, H, Lq, Lk\] or a jagged \[H, P\], got float"),
        ({"bias": zeros(2, 3, 3)}, ValueError, r"bias: expected a dense .* or a jagged \[H, P\], got \[2, 3, 3\]"),
        ({"bias": zeros(1, 1, 3, 3)}, ValueError, r"bias: expected \[1, 2, Lq, Lk\], .* got \[1, 1, 3, 3\]; expand what"),
        ({"bias": zeros(2, 2, 3, 3)}, ValueError, r"bias: expected \[1, 2, Lq, Lk\], .* got \[2, 2, 3, 3\]"),
        ({"bias": zeros(1, 9)}, ValueError, r"bias: expected \[2, P\], the heads of q, got \[1, 9\]"),
        ({"bias": zeros(2, 9).int()}, TypeError, "bias: expected dtype float32, .* got int32"),
        ({"bias": zeros(2, 9).to("meta")}, ValueError, "bias: expected the device of q, .* got meta"),
        ({"dropout_p": 1.0}, ValueError, "dropout_p: expected from 0 to below 1, got 1.0"),
        ({"dropout_p": -0.1}, ValueError, "dropout_p: expected from 0 to below 1, got -0.1"),
        ({"dropout_p": 0.1, "dropout_seed": 5}, TypeError, r"dropout_seed: expected a tensor .*, got int"),
        ({"dropout_p": 0.1, "dropout_seed": times}, ValueError, r"dropout_seed: expected one number, got shape \[3\]"),
        ({"dropout_p": 0.1, "dropout_seed": times[:1].int()}, TypeError, "dropout_seed: expected dtype int64, got int32"),
        (
            {"dropout_p": 0.1, "dropout_seed": times[:1].to("meta")},
            ValueError,
            r"dropout_seed: expected the device of q, .* meta",
        ),
    ]
    for options, error, message in cases:
        with pytest.raises(error, match=f"^{message}"):
            jagged_attention(q, q, q, offsets, backend=place.backend, **options)  # type: ignore[call-overload]
    jagged_attention(q, q, q, offsets, bias=zeros(2, 9), backend=place.backend)
    monkeypatch.setenv("JAGGED_VALIDATE", "1")
    jagged_attention(q, q, q, offsets, bias=zeros(2, 9), backend=place.backend)
    with pytest.raises(ValueError, match=r"^bias: expected 9 columns, one for each pair of a query and a key, got 8"):
        jagged_attention(q, q, q, offsets, bias=zeros(2, 8), backend=place.backend)


@ON_GPU
@pytest.mark.parametrize("kind", ["dense", "jagged"])
def test_no_synchronisation_and_graph_capture(place: Place, kind: str) -> None:
    """Captured once; replayed with other lengths, times and seeds. Without a seed every replay draws anew."""
    total = 200
    rows = inputs_of(jagged_of((total,)), 2, 32, torch.bfloat16)
    # Room for the pairs of any lengths.
    pairs = random_tensor((3, 2, 150, 150) if kind == "dense" else (2, total**2), torch.float32, 1)
    leaves = [
        x.requires_grad_()
        for x in (*rows, random_tensor((2, 33), torch.float32, 2), random_tensor((2, 40), torch.float32, 3), pairs)
    ]
    offsets, times, seed = jagged_of((100, 0, 100)).offsets, random_times(total, 0, 30), seed_of(1)

    def step(own_seed: Tensor | None) -> list[Tensor]:
        output = jagged_attention(
            *leaves[:3], offsets, causal=True, relative_bias=leaves[3], time_bias=leaves[4], q_times=times, bias=leaves[5],
            dropout_p=0.2, dropout_seed=own_seed,
        )  # fmt: skip
        return [output.detach(), *torch.autograd.grad(output, leaves, output.detach())]

    graph, results = captured(lambda: step(seed))
    for number, lengths in enumerate(((100, 0, 100), (200, 0, 0), (1, 2, 197), (0, 0, 200), (64, 128, 8))):
        offsets.copy_(jagged_of(lengths).offsets)
        times.copy_(random_times(total, number, 40))
        seed.fill_(number)
        graph.replay()
        for got, want in zip(results, step(seed), strict=True):
            assert torch.equal(got, want)
    graph, results = captured(lambda: step(None))
    graph.replay()
    first = results[0].clone()
    graph.replay()
    assert not torch.equal(first, results[0])


@ON_GPU
def test_memory_follows_the_rows(place: Place) -> None:
    """Twice the rows in samples twice as long takes twice the memory, tables, their gradients and dropout included."""
    peaks = []
    for rows in (8_192, 16_384):
        batch = jagged_of((rows, rows))
        biases = [random_tensor(shape, torch.float32, 1) for shape in ((2, 129), (2, 64))]
        leaves = [x.requires_grad_() for x in (*inputs_of(batch, 2, 64, torch.bfloat16), *biases)]
        times = random_times(batch.total, 0, 40)
        # What tests before have left in cycles is let go now, not in between.
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        output = jagged_attention(
            *leaves[:3], batch.offsets, relative_bias=leaves[3], time_bias=leaves[4], q_times=times, dropout_p=0.1
        )
        torch.autograd.grad(output, leaves, torch.ones_like(output))
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del output, leaves
    assert peaks[1] < 2.1 * peaks[0]
