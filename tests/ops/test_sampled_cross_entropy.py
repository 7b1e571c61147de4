"""Sampled cross-entropy against every negative's logit written out in float64, in every place; and what draws promise."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from jagged.ops import Draw, drawn_negatives, sampled_linear_cross_entropy
from jagged.ops.sampled_cross_entropy import draws, torch_impl
from jagged.ops.sampled_cross_entropy.spec import SAMPLED_LINEAR_CROSS_ENTROPY, Inputs, Options
from tests.graphs import captured
from tests.oracle import check_three_way
from tests.places import PLACE, Place
from tests.reference.sampled_cross_entropy import kept_negatives
from tests.reference.sampled_cross_entropy import sampled_linear_cross_entropy as reference
from tests.strategies import float_dtypes, random_tensor, seeds

ON_GPU = pytest.mark.gpu
ON_CPU = pytest.mark.skipif(PLACE.name != "cpu", reason="says something of the PyTorch implementation alone")
ON_TRITON = pytest.mark.skipif(PLACE.name == "cpu", reason="says something of the Triton kernels alone")
MOST = {"cpu": 60, "interpret": 22, "gpu": 300}[PLACE.name]
ROWS = st.one_of(st.integers(0, 5), st.integers(16, MOST))
ITEMS = st.integers(8, 30) if PLACE.name == "interpret" else st.one_of(st.integers(8, 30), st.integers(100, 400))
COUNTS = st.integers(1, 7) if PLACE.name == "interpret" else st.one_of(st.integers(1, 8), st.integers(30, 70))
WIDTHS = st.sampled_from([1, 3, 16, 50, 64, 65, 128, 130, 256, 300] if PLACE.name != "interpret" else [1, 16, 50])
KINDS = ("given", "uniform", "permuted", "log_uniform", "popularity")
OPTIONS: list[dict[str, Any]] = [
    {},
    {"correction": "negatives", "scale": 2.5},
    {"correction": "both", "renormalise": True},
    {"correction": "both", "positive": "outside"},
    {"positive": "outside", "renormalise": True, "mask_hits": False},
    {"loss": "refined", "correction": "negatives", "renormalise": True, "scale": 0.5},
    {"loss": "bce", "scale": 1.5},
    {"loss": "gbce", "gbce_t": 0.5, "mask_hits": False},
]


@dataclass
class Negatives:
    """Negatives as the function takes them, and written out for the reference."""

    given: Tensor | Draw
    ids: Tensor
    log_q: Tensor
    target_log_q: Tensor
    arguments: dict[str, Any]


def seed_of(number: int) -> Tensor:
    return torch.tensor([number], device=PLACE.device)


def draw_of(kind: str, count: int, items: int, seed: int, rows_per_draw: int | None) -> Draw:
    if kind != "popularity":
        name = "uniform" if kind == "permuted" else kind
        return Draw(name, count, seed_of(seed), rows_per_draw, replacement=kind != "permuted")  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(seed)
    kept, alias = torch.rand(items, generator=generator), torch.randint(items, (items,), generator=generator)
    q = kept.double().scatter_add(0, alias, 1 - kept.double()) / items
    tables = [x.to(PLACE.device) for x in (kept, alias.int(), q.log().float())]
    return Draw("popularity", count, seed_of(seed), rows_per_draw, True, *tables)


def negatives_of(kind: str, target: Tensor, count: int, items: int, seed: int, rows_per_draw: int | None) -> Negatives:
    rows, per_draw = target.shape[0], rows_per_draw or max(1, target.shape[0])
    targets = target.clamp(0, items - 1).long()
    if kind == "given":
        generator = torch.Generator().manual_seed(seed)
        draws = 1 if rows_per_draw is None else -(-rows // per_draw)
        # Some are no items at all.
        ids = torch.randint(-1, items + 1, (draws, count), generator=generator).to(PLACE.device)
        log_q, target_log_q = (
            (torch.rand(shape, generator=generator) - math.log(items)).to(PLACE.device) for shape in (ids.shape, (rows,))
        )
        shared = (ids[0], log_q[0]) if rows_per_draw is None else (ids, log_q)
        arguments = {"negative_log_q": shared[1], "target_log_q": target_log_q}
        # As many blocks as there are lists, of equal length but for the last.
        per_draw = -(-rows // max(1, draws))
        expanded = (x.repeat_interleave(per_draw, 0)[:rows] for x in (ids, log_q))
        return Negatives(shared[0], *expanded, target_log_q, arguments)
    draw = draw_of(kind, count, items, seed, rows_per_draw)
    ids = drawn_negatives(draw, rows, items).repeat_interleave(per_draw, 0)[:rows]

    def log_q_of(ids: Tensor) -> Tensor:
        if kind == "popularity":
            assert draw.log_q is not None
            return draw.log_q[ids]
        if kind == "log_uniform":
            # log((k + 2) / (k + 1)), without the quotient's rounding.
            return ((1 / (ids.double() + 1)).log1p() / math.log(items + 1)).log()
        return torch.full(ids.shape, -math.log(items), dtype=torch.float64, device=ids.device)

    return Negatives(draw, ids, log_q_of(ids), log_q_of(targets), {})


def inputs_of(rows: int, items: int, width: int, dtype: torch.dtype, seed: int = 0, *, strided: bool = False) -> list[Tensor]:
    """Hidden states and weights whose logits are of order one at every width."""
    hidden = random_tensor((rows, width), dtype, seed, strided=strided)
    weight = random_tensor((items, width), torch.float32, seed + 1, strided=strided) / math.sqrt(width)
    return [hidden, weight.to(dtype)]


def targets_of(rows: int, items: int, seed: int = 0, ignored: float = 0.0, ignore_index: int = -100) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(items, (rows,), generator=generator)
    return target.masked_fill(torch.rand(rows, generator=generator) < ignored, ignore_index).to(PLACE.device)


def lists_of(rows: int, items: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(5, (rows,), generator=generator).tolist()
    return [torch.randint(items, (length,), generator=generator).tolist() for length in lengths]


def jagged(lists: list[list[int]]) -> tuple[Tensor, Tensor]:
    ids = torch.tensor([item for items in lists for item in items], dtype=torch.int64, device=PLACE.device)
    offsets = torch.tensor([0, *map(len, lists)], device=PLACE.device).cumsum(0)
    return ids, offsets


def run(place: Place, inputs: list[Tensor], target: Tensor, negatives: Tensor | Draw, **options: Any) -> list[Tensor]:
    """Return loss and gradients."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    loss = sampled_linear_cross_entropy(*leaves, target, negatives, backend=place.backend, **options)
    return [loss.detach(), *torch.autograd.grad(loss, leaves, torch.ones_like(loss))]


def check(
    place: Place,
    inputs: list[Tensor],
    target: Tensor,
    negatives: Negatives,
    *,
    wanted: list[bool] | None = None,
    lists: list[list[int]] | None = None,
    **options: Any,
) -> None:
    has_softmax = options.get("loss", "softmax") in ("softmax", "refined")
    arguments = {
        name: x
        for name, x in negatives.arguments.items()
        if options.get("correction") == "both" or (name == "negative_log_q" and options.get("correction") == "negatives")
    }
    exclude = None if lists is None else jagged(lists)

    def outputs(loss: Tensor, lse: Tensor) -> Tensor:
        # The loss is a difference, so one rounding of its parts is its own.
        return torch.cat([loss.reshape(-1), lse, lse - loss]) if has_softmax else loss.reshape(-1)

    def ours(hidden: Tensor, weight: Tensor) -> Tensor:
        got = sampled_linear_cross_entropy(
            hidden, weight, target, negatives.given, exclude=exclude, return_lse=has_softmax, backend=place.backend, **arguments,
            **options,
        )  # fmt: skip
        return outputs(*(got if has_softmax else (got, got)))

    def written_out(hidden: Tensor, weight: Tensor) -> Tensor:
        loss, lse, _ = reference(
            hidden, weight, target, negatives.ids, log_q=negatives.log_q, target_log_q=negatives.target_log_q, exclude=lists,
            **options,
        )  # fmt: skip
        return outputs(loss, lse)

    check_three_way(ours, written_out, inputs, requires_grad=wanted)


@given(
    ROWS,
    ITEMS,
    COUNTS,
    WIDTHS,
    float_dtypes(),
    seeds(),
    st.booleans(),
    st.sampled_from([torch.int32, torch.int64]),
    st.sampled_from([(0.0, -100), (0.3, -100), (1.0, -1)]),
    st.sampled_from(KINDS),
    st.sampled_from([1, 3, 16, None]),
    st.sampled_from(OPTIONS),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["mean", "sum", "none"]),
    st.sampled_from([[True, True], [True, False], [False, True], [False, False]]),
)
def test_three_way(
    place: Place,
    unchecked: None,
    rows: int,
    items: int,
    count: int,
    width: int,
    dtype: torch.dtype,
    seed: int,
    strided: bool,
    index_dtype: torch.dtype,
    ignoring: tuple[float, int],
    kind: str,
    rows_per_draw: int | None,
    options: dict[str, Any],
    weighted: bool,
    excludes: bool,
    reduction: str,
    wanted: list[bool],
) -> None:
    inputs = inputs_of(rows, items, width, dtype, seed, strided=strided)
    target = targets_of(rows, items, seed, *ignoring).to(index_dtype)
    negatives = negatives_of(kind, target, min(count, items), items, seed, rows_per_draw)
    if isinstance(negatives.given, Tensor):
        negatives.given = negatives.given.to(index_dtype)
    sample_weight = random_tensor((rows,), torch.float32, seed + 2).abs() if weighted else None
    check(
        place, inputs, target, negatives, wanted=wanted, lists=lists_of(rows, items, seed) if excludes else None,
        ignore_index=ignoring[1], sample_weight=sample_weight, reduction=reduction, **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("rows_per_draw", "width"),
    [(rows, width) for rows in (1, 17) for width in ((16, 257) if PLACE.name == "interpret" else (16, 129, 257, 600))]
    + [(150, width) for width in (64, 129, 257, 384, 600) if PLACE.name != "interpret"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_around_the_tiles(place: Place, rows_per_draw: int, dtype: torch.dtype, width: int) -> None:
    rows, count = {1: (2, 66), 17: (18, 35), 150: (290, 140)}[rows_per_draw]
    target = targets_of(rows, 30)
    negatives = negatives_of("uniform", target, count, 30, 3, rows_per_draw)
    check(place, inputs_of(rows, 30, width, dtype), target, negatives, correction="negatives")


@ON_TRITON
@pytest.mark.parametrize("options", [{"correction": "negatives"}, {"loss": "bce"}, {"renormalise": True}])
def test_copied_rows_are_the_rows(
    place: Place, unchecked: None, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where many rows share a draw the draw's items are copied side by side; ids that are no items are zeros there."""
    from jagged.ops.sampled_cross_entropy.triton import launch, shared_draws

    inputs, target = inputs_of(40, 30, 16, torch.bfloat16), targets_of(40, 30, ignored=0.1)
    negatives = negatives_of("given", target, 21, 30, 3, 20)
    results, are_copied, draw_lists = [], [], launch.draw_lists

    def record(call: Any) -> Any:
        lists = draw_lists(call)
        are_copied.append(lists.is_gathered)
        return lists

    monkeypatch.setattr(launch, "draw_lists", record)
    # Two draws of 21 rows of 16 numbers of 2 bytes.
    for rows, most_bytes, expects_copies in ((1, 1344, True), (1, 1343, False), (2**31, 1344, False)):
        monkeypatch.setattr(shared_draws, "GATHERED_ROWS", rows)
        monkeypatch.setattr(shared_draws, "GATHERED_BYTES_AT_MOST", most_bytes)
        del are_copied[:]
        results.append(run(place, inputs, target, negatives.given, **options))
        assert set(are_copied) == {expects_copies}
    for copied, without_room, expected in zip(*results, strict=True):
        torch.testing.assert_close(copied, expected, rtol=0, atol=0)
        torch.testing.assert_close(without_room, expected, rtol=0, atol=0)


@ON_TRITON
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows_per_draw", [1, 20])
@pytest.mark.parametrize("options", [{}, {"loss": "bce"}])
def test_direction_of_forward_or_of_backward(
    place: Place, options: dict[str, Any], rows_per_draw: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiled graph keeps what eager backward computes of rows that share a draw: the same to the bit there."""
    from jagged.ops.sampled_cross_entropy import api

    rows = 40 if rows_per_draw == 20 else 5
    inputs, target = inputs_of(rows, 30, 16, dtype), targets_of(rows, 30, ignored=0.1)
    negatives = negatives_of("uniform", target, 9, 30, 3, rows_per_draw)
    results = []
    for limit in (16, 2**31) if rows_per_draw == 20 else (2**31, 1):
        monkeypatch.setattr(api, "SHARED_ROWS", limit)
        results.append(run(place, inputs, target, negatives.given, **options))
    for other, expected in zip(*results, strict=True):
        tolerance = {"rtol": 0, "atol": 0} if rows_per_draw == 20 else {"rtol": 0.01, "atol": 1e-5}
        torch.testing.assert_close(other, expected, **tolerance)


@ON_TRITON
@pytest.mark.parametrize(("items", "count"), [(1, 1), (5, 100), (1000, 50), (300, 1025), (50, 1024), (7, 33)])
def test_offsets_of_sorted_keys(place: Place, items: int, count: int) -> None:
    from jagged.ops.sampled_cross_entropy.triton import backward

    bounds = torch.arange(items + 1, dtype=torch.int32, device=place.device)
    # Some items have no entry, and `items` stands for entries that do not count.
    for highest in (items + 1, max(1, items // 3), 1):
        keys = torch.randint(highest, (count,), generator=torch.Generator().manual_seed(items)).int().to(place.device)
        keys = keys.sort().values
        offsets = torch.full_like(bounds, -1)
        backward.sampled_offsets_kernel[(items // 64 + 1,)](keys, offsets, items, count, BLOCK=64)
        assert torch.equal(offsets, torch.searchsorted(keys, bounds, out_int32=True))


@ON_TRITON
def test_division_by_multiplication() -> None:
    from jagged.ops.sampled_cross_entropy.triton.backward import division_by

    for divisor in (1, 2, 3, 5, 7, 511, 1023, 1024, 25_600, 2**30 + 1, 2**31 - 1):
        factor, shift = division_by(divisor)
        assert 0 <= factor < 2**31
        for number in {0, 1, divisor - 1, divisor, 2 * divisor - 1, (2**31 - 1) // divisor * divisor - 1, 2**31 - 1}:
            if 0 <= number < 2**31:
                assert (2 * number * (factor + 2**31) >> 32) >> shift == number // divisor


def test_logits_far_from_zero(place: Place) -> None:
    """Every logit of a row near the same far value: sums neither overflow nor vanish, and nothing masked leaks in."""
    for level, rows, rows_per_draw in ((-3e4, 4, 1), (3e4, 4, 1), (3e4, 17, None)):
        hidden, weight = inputs_of(rows, 20, 3, torch.float32)
        hidden = torch.cat([hidden, torch.full((rows, 1), level, device=place.device)], 1)
        weight = torch.cat([weight, torch.ones(20, 1, device=place.device)], 1)
        target = targets_of(rows, 20)
        check(place, [hidden, weight], target, negatives_of("uniform", target, 5, 20, 1, rows_per_draw), reduction="sum")


def test_memory_is_walked_in_pieces(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of any size give the same result; items with many entries are added up in chunks, in ranges of rows too."""
    sizes: list[dict[str, int]] = [{"CHUNK_BYTES": 1}, {"CHUNK_BYTES": 500}]
    module: Any = torch_impl
    if place.name != "cpu":
        from jagged.ops.sampled_cross_entropy.triton import entries as module

        sizes = [{"CHUNK": 16}, {"CHUNK": 32, "ENTRY_BYTES_AT_MOST": 1}]
    for size in sizes:
        for name, value in size.items():
            monkeypatch.setattr(module, name, value)
        # A draw of 160 rows is walked in parts on any GPU.
        for rows, rows_per_draw, kind in ((9, 1, "log_uniform"), (20, 18, "popularity"), (180, 160, "uniform")):
            target = targets_of(rows, 8, ignored=0.2)
            negatives = negatives_of(kind, target, 9, 8, 3, rows_per_draw)
            inputs = inputs_of(rows, 8, 5, torch.float32)
            check(place, inputs, target, negatives, correction="negatives", reduction="sum")


@pytest.mark.parametrize("rows_per_draw", [1, None])
@pytest.mark.parametrize("options", [{}, {"positive": "outside"}, {"loss": "refined", "correction": "negatives"}])
def test_rows_without_a_negative(place: Place, rows_per_draw: int | None, options: dict[str, Any]) -> None:
    """The positive alone: no loss and no gradient, with renormalising too."""
    rows = 16 if rows_per_draw is None else 3
    inputs = inputs_of(rows, 9, 4, torch.float32)
    target = torch.full((rows,), 3, device=place.device)
    ids = torch.full((5,) if rows_per_draw is None else (rows, 5), 3, device=place.device)
    for renormalise in (False, True):
        for part in run(place, inputs, target, ids, renormalise=renormalise, **options):
            assert not part.any()
            assert part.isfinite().all()
    loss, _, _ = run(place, inputs, target, ids, loss="bce", reduction="none")
    expected = torch.nn.functional.softplus(-(inputs[0] * inputs[1][3]).sum(1))
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("rows_per_draw", [1, None])
def test_ignored_rows_may_hold_anything(place: Place, rows_per_draw: int | None) -> None:
    rows = 20 if rows_per_draw is None else 7
    (hidden, weight), target = inputs_of(rows, 9, 4, torch.float32), targets_of(rows, 9)
    target[2:5] = -100
    ignored = target == -100
    sample_weight = torch.ones(rows, device=place.device)
    negatives = negatives_of("uniform", target, 5, 9, 2, rows_per_draw).given
    for loss in ("softmax", "bce"):
        results = []
        for poison in (0.0, math.nan):
            poisoned = hidden.masked_fill(ignored[:, None], poison)
            weights = sample_weight.masked_fill(ignored, poison)
            results.append(run(place, [poisoned, weight], target, negatives, loss=loss, sample_weight=weights, reduction="none"))
        for got, expected in zip(*results, strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=0)
        assert not results[0][0][ignored].any()
        assert not results[0][1][ignored].any()


@pytest.mark.parametrize("rows", [0, 3])
def test_no_valid_row_is_no_step(place: Place, rows: int) -> None:
    target = torch.full((rows,), -100, device=place.device)
    draw = Draw("uniform", 4, seed_of(1), rows_per_draw=None)
    for part in run(place, inputs_of(rows, 9, 4, torch.float32), target, draw):
        assert not part.any()
        assert part.isfinite().all()
    weights = torch.zeros(rows, device=place.device)
    for part in run(place, inputs_of(rows, 9, 4, torch.float32), target.clamp(min=0), draw, sample_weight=weights):
        assert not part.any()
        assert part.isfinite().all()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("rows_per_draw", [1, 16])
def test_unknown_items_reach_no_foreign_memory(place: Place, rows_per_draw: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = inputs_of(6, 9, 4, torch.float32)
    target = torch.tensor([0, 9, -1, 2**40, -(2**62), 8], device=place.device)
    ids = torch.tensor([[1, 9, -1, 2**40, -(2**62), 2]] * 6, device=place.device)
    ids = ids if rows_per_draw == 1 else ids[0]
    loss, hidden_grad, weight_grad = run(place, inputs, target, ids, reduction="none")
    assert loss.isnan().tolist() == [False, True, True, True, True, False]
    assert not hidden_grad[1:5].any()
    assert weight_grad.isfinite().all()
    known, two = target[[0, 5]], [inputs[0][[0, 5]], inputs[1]]
    both = torch.tensor([1, 2], device=place.device)
    for got, expected in zip(
        run(place, two, known, ids[:2] if rows_per_draw == 1 else ids), run(place, two, known, both), strict=True
    ):
        torch.testing.assert_close(got, expected)
    # Lists and tables that lead outside are no more than lists and tables of nothing.
    lists = torch.tensor([1, 2**40, -5], device=place.device), torch.tensor([0, -7, 2**40], device=place.device)
    assert run(place, two, known, ids[:2] if rows_per_draw == 1 else ids, exclude=lists)[0].isfinite()
    table = draw_of("popularity", 5, 9, 1, 1)
    assert table.alias is not None
    table.alias.fill_(2**30)
    assert all(part.isfinite().all() for part in run(place, two, known, table))
    monkeypatch.setenv("JAGGED_VALIDATE", "1")
    with pytest.raises(ValueError, match=r"target\[1\]: expected an id from 0 to 8.*got 9"):
        run(place, inputs, target, ids)
    with pytest.raises(ValueError, match=r"negatives\[1\]: expected an id from 0 to 8.*got 9"):
        run(place, inputs, target.clamp(0, 8), ids)
    with pytest.raises(ValueError, match=r"exclude\[1\]"):
        run(place, two, known, both, exclude=lists)
    # The place of a negative that is none, as a batch's ignored rows have it.
    run(place, inputs, target.clamp(0, 8), torch.where(ids == 9, -1, ids).clamp(-1, 8))


@pytest.mark.parametrize("rows_per_draw", [1, 16])
@pytest.mark.parametrize("options", [{}, {"loss": "refined", "correction": "negatives"}, {"loss": "bce"}])
def test_nan_shows_in_the_loss(place: Place, rows_per_draw: int, options: dict[str, Any]) -> None:
    (hidden, weight), target = inputs_of(20, 30, 8, torch.float32), torch.zeros(20, dtype=torch.int64, device=place.device)
    ids = torch.arange(1, 7, device=place.device).expand(-(-20 // rows_per_draw), 6).contiguous()
    for poisoned in ("hidden", "weight"):
        inputs = {"hidden": hidden.clone(), "weight": weight.clone()}
        inputs[poisoned][3] = math.nan
        with warnings.catch_warnings():
            # The interpreter's, of a maximum of NaN alone.
            warnings.simplefilter("ignore")
            loss = sampled_linear_cross_entropy(
                *inputs.values(), target, ids, reduction="none", backend=place.backend, **options
            )  # fmt: skip
        assert bool(loss[3].isnan())
        assert bool(loss.isnan().all()) == (poisoned == "weight")


def test_blocks_longer_than_the_batch(place: Place) -> None:
    """They cost what the batch costs, and are the batch's."""
    inputs, target = inputs_of(5, 30, 8, torch.float32), targets_of(5, 30)
    losses = [
        run(place, inputs, target, Draw("uniform", 7, seed_of(3), rows_per_draw), reduction="none")[0]
        for rows_per_draw in (5, 2**26, None)
    ]
    for loss in losses[1:]:
        torch.testing.assert_close(loss, losses[0], rtol=0, atol=0)


@pytest.mark.parametrize("rows_per_draw", [1, None])
@pytest.mark.parametrize("options", [{}, {"loss": "refined", "correction": "negatives"}])
def test_filter(place: Place, rows_per_draw: int | None, options: dict[str, Any]) -> None:
    """Nothing is left out at 0, everything above 1; between them the gradient stays within its bound."""
    rows, items, count, scale = 17 if rows_per_draw is None else 6, 20, 12, 4.0
    inputs, target = inputs_of(rows, items, 8, torch.float32), targets_of(rows, items)
    negatives = negatives_of("uniform", target, count, items, 5, rows_per_draw).given
    weights = torch.linspace(0.1, 2, rows, device=place.device)

    def gradients(filter_eps: float | None) -> list[Tensor]:
        return run(
            place, inputs, target, negatives, scale=scale, sample_weight=weights, reduction="none", filter_eps=filter_eps,
            **options,
        )[1:]  # fmt: skip

    whole = gradients(None)
    torch.testing.assert_close(gradients(0.0), whole, rtol=1e-5, atol=1e-6)
    eps = 0.05
    some = gradients(eps)
    assert any(not torch.equal(a, b) for a, b in zip(whole, some, strict=True))
    longest = inputs[1].norm(dim=1).max()
    assert ((some[0] - whole[0]).norm(dim=1) <= scale * count * eps * longest).all()
    # What is left is the target's own part.
    hidden, weight = gradients(100.0)
    cosine = torch.nn.functional.cosine_similarity(hidden, inputs[1][target])
    torch.testing.assert_close(cosine.abs(), torch.ones_like(cosine), rtol=1e-4, atol=1e-4)
    others = torch.ones(items, dtype=torch.bool, device=place.device)
    others[target] = False
    assert not weight[others].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows_per_draw", [1, None])
def test_master_weights_under_autocast(place: Place, rows_per_draw: int | None, dtype: torch.dtype) -> None:
    """Products in the low dtype, gradients in float32 without its rounding, small ones of float16 included."""
    rows, items = 40 if rows_per_draw is None else 9, 20
    hidden, weight = inputs_of(rows, items, 16, torch.float32)
    target = targets_of(rows, items)
    negatives = negatives_of("uniform", target, 9, items, 3, rows_per_draw)
    leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    with torch.autocast(place.device.type, dtype=dtype):
        loss = sampled_linear_cross_entropy(*leaves, target, negatives.given, backend=place.backend)
    (loss / 4096).backward()
    low = [x.to(dtype).double().requires_grad_() for x in (hidden, weight)]
    expected, _, _ = reference(*low, target, negatives.ids)
    (expected / 4096).backward()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=0)
    for ours, exact in zip(leaves, low, strict=True):
        assert ours.grad is not None
        assert exact.grad is not None
        assert ours.grad.dtype == torch.float32
        assert not torch.equal(ours.grad, ours.grad.to(dtype).float())
        error = (ours.grad - exact.grad).norm() / exact.grad.norm()
        assert error < torch.finfo(dtype).eps, f"error {error:.2e}"


# PyTorch 2.11 warns of it even where the caller has said so.
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("rows_per_draw", [1, 20, None])
@pytest.mark.parametrize("kind", ["given", "uniform"] if PLACE.name != "interpret" else ["uniform"])
@pytest.mark.parametrize(("rows", "items", "ignored"), [(22, 150, 0.2), (22, 15, 0.2), (20, 15, 1.0), (0, 15, 0.0)])
def test_sparse_gradient_is_the_dense_one(
    place: Place,
    unchecked: None,
    rows_per_draw: int | None,
    kind: str,
    rows: int,
    items: int,
    ignored: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = targets_of(rows, items, 1, ignored)
    hidden, weight = (x.requires_grad_() for x in inputs_of(rows, items, 16, torch.float32))
    negatives = negatives_of(kind, target, 5, items, 2, rows_per_draw)
    for is_small in (False, True):
        if is_small and place.backend == "triton":
            from jagged.ops.sampled_cross_entropy.triton import entries

            # Rows are taken in ranges.
            monkeypatch.setattr(entries, "ENTRY_BYTES_AT_MOST", 1)
            monkeypatch.setattr(entries, "TABLE_BYTES", 0)
        grads = []
        for sparse in (False, True):
            loss = sampled_linear_cross_entropy(hidden, weight, target, negatives.given, sparse=sparse, backend=place.backend)
            grads.append(torch.autograd.grad(loss, [hidden, weight]))
        (of_hidden, dense), (of_hidden_again, got) = grads
        assert got.is_sparse
        assert got._nnz() == min(items, negatives.ids[:: rows_per_draw or max(1, rows)].numel() + rows)
        torch.testing.assert_close(of_hidden_again, of_hidden, rtol=0, atol=0)
        torch.testing.assert_close(got.to_dense(), dense, rtol=0, atol=0)
        assert set(got._indices()[0].tolist()) <= {0, *negatives.ids.flatten().tolist(), *target.tolist()}


@ON_TRITON
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("items", [7, 500])
def test_sparse_gradient_needs_no_table(place: Place, items: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges of rows share a gradient of all items, so there are none while the list of entries is smaller than that."""
    from jagged.ops.sampled_cross_entropy.triton import entries

    ranges, keys_of = [], entries.entry_keys
    monkeypatch.setattr(entries, "entry_keys", lambda *arguments: (ranges.append(1), keys_of(*arguments))[1])
    monkeypatch.setattr(entries, "ENTRY_BYTES_AT_MOST", 1)
    target = targets_of(9, items)
    hidden, weight = (x.requires_grad_() for x in inputs_of(9, items, 16, torch.float32))
    draw = draw_of("uniform", 5, items, 2, 1)
    grads = []
    for sparse, count in ((False, 9), (True, 5 if items == 7 else 1)):
        del ranges[:]
        loss = sampled_linear_cross_entropy(hidden, weight, target, draw, sparse=sparse, backend=place.backend)
        grads.append(torch.autograd.grad(loss, weight)[0])
        assert len(ranges) == count
    torch.testing.assert_close(grads[1].to_dense(), grads[0])


# PyTorch 2.11 warns of it even where the caller has said so.
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adagrad])
def test_sparse_gradient_trains(place: Place, optimizer: type[torch.optim.Optimizer]) -> None:
    rows, items = 18, 60
    (hidden, weight), target = inputs_of(rows, items, 16, torch.float32), targets_of(rows, items)
    tables = []
    for sparse in (False, True):
        table = weight.clone().requires_grad_()
        optimizing = optimizer([table], lr=0.1)
        draw = draw_of("uniform", 8, items, 3, 1)
        for _ in range(2):
            optimizing.zero_grad()
            sampled_linear_cross_entropy(hidden, table, target, draw, sparse=sparse, backend=place.backend).backward()
            optimizing.step()
        tables.append(table.detach())
    assert not torch.equal(tables[0], weight)
    torch.testing.assert_close(tables[1], tables[0])


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_gradient_of_master_weights(place: Place) -> None:
    """The table is not converted as a whole: rows are, as they are gathered."""
    rows, items = 18, 60
    (hidden, weight), target = inputs_of(rows, items, 16, torch.float32), targets_of(rows, items)
    weight.requires_grad_()
    for rows_per_draw in (1, None):
        draw = draw_of("uniform", 8, items, 3, rows_per_draw)
        loss = sampled_linear_cross_entropy(hidden.bfloat16().double(), weight.double(), target, draw)
        exact = torch.autograd.grad(loss, weight)[0]
        grads = []
        for sparse in (False, True):
            with torch.autocast(place.device.type, dtype=torch.bfloat16):
                loss = sampled_linear_cross_entropy(hidden, weight, target, draw, sparse=sparse, backend=place.backend)
            grads.append(torch.autograd.grad(loss, weight)[0].to_dense())
        assert grads[1].dtype == torch.float32
        # No further from the rows themselves than the table that is rounded as a whole.
        dense, sparse_error = ((grad - exact).abs().max() for grad in grads)
        assert sparse_error <= 1.1 * dense, f"{rows_per_draw}: {sparse_error} for {dense}"


def test_second_derivatives_are_refused(place: Place) -> None:
    hidden, weight = (x.requires_grad_() for x in inputs_of(3, 5, 4, torch.float32))
    draw = Draw("uniform", 2, seed_of(1))
    loss = sampled_linear_cross_entropy(hidden, weight, targets_of(3, 5), draw, backend=place.backend)
    (grad,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="sampled_linear_cross_entropy has no second derivative"):
        (grad.square().sum() + loss).backward()


@pytest.mark.parametrize("rows_per_draw", [1, None])
def test_gradients_of_any_stride(place: Place, rows_per_draw: int | None) -> None:
    leaves = [x.requires_grad_() for x in inputs_of(20, 50, 8, torch.float32)]
    outputs = sampled_linear_cross_entropy(
        *leaves, targets_of(20, 50), draw_of("uniform", 6, 50, 1, rows_per_draw), reduction="none", return_lse=True,
        backend=place.backend,
    )  # fmt: skip
    columns = random_tensor((20, 2), torch.float32, 3)
    for vector in (columns[:, 0], torch.full((1,), 0.5, device=place.device).expand(20)):
        got, wanted = (
            torch.autograd.grad(outputs, leaves, [upstream] * 2, retain_graph=True) for upstream in (vector, vector.contiguous())
        )
        for ours, other in zip(got, wanted, strict=True):
            torch.testing.assert_close(ours, other, rtol=0, atol=0)


@pytest.mark.parametrize("rows_per_draw", [1, None])
def test_gradient_of_the_log_sum_exp_alone(place: Place, rows_per_draw: int | None) -> None:
    leaves = [x.requires_grad_() for x in inputs_of(17, 30, 8, torch.float32)]
    draw = Draw("uniform", 4, seed_of(1), rows_per_draw)
    loss, lse = sampled_linear_cross_entropy(*leaves, targets_of(17, 30), draw, return_lse=True, backend=place.backend)
    alone = torch.autograd.grad(lse.sum(), leaves, retain_graph=True)
    for got, expected in zip(alone, torch.autograd.grad(lse.sum() + 0 * loss, leaves), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.skipif(PLACE.name == "interpret", reason="says nothing of kernels")
@pytest.mark.parametrize("rows_per_draw", [1, None])
@pytest.mark.parametrize("options", [{"correction": "both"}, {"loss": "gbce"}, {"filter_eps": 0.01}])
def test_functional_transforms(place: Place, rows_per_draw: int | None, options: dict[str, Any]) -> None:
    """First derivatives are those of backward; others are refused, and never silently zero."""
    inputs, target = inputs_of(20, 30, 8, torch.float32), targets_of(20, 30)
    draw = Draw("uniform", 4, seed_of(1), rows_per_draw)

    def function(hidden: Tensor, weight: Tensor = inputs[1]) -> Tensor:
        return sampled_linear_cross_entropy(hidden, weight, target, draw, backend=place.backend, **options)

    loss, *expected = run(place, inputs, target, draw, **options)
    results, pull_back = torch.func.vjp(function, *inputs)
    assert torch.equal(results, loss)
    for got in (torch.func.grad(function, argnums=(0, 1))(*inputs), pull_back(torch.ones_like(loss))):
        for ours, of_backward in zip(got, expected, strict=True):
            torch.testing.assert_close(ours, of_backward)
    with pytest.raises(RuntimeError, match=r"^sampled_linear_cross_entropy has no forward-mode derivative"):
        torch.func.jvp(function, (inputs[0],), (inputs[0],))
    with pytest.raises(RuntimeError, match=r"^sampled_linear_cross_entropy has no second derivative"):
        torch.func.grad(lambda hidden: torch.func.grad(function)(hidden).sum())(inputs[0])


@pytest.mark.skipif(PLACE.name == "interpret", reason="says nothing of kernels")
def test_one_tensor_given_twice(place: Place) -> None:
    """As hidden states and weights, and as targets, negatives and lists: the same compiled, and as of copies."""
    rows = inputs_of(20, 30, 8, torch.float32)[0]
    target, offsets = targets_of(20, 20), torch.arange(21, device=place.device)

    def function(hidden: Tensor, weight: Tensor, negatives: Tensor, listed: Tensor) -> Tensor:
        return sampled_linear_cross_entropy(
            hidden, weight, target, negatives, exclude=(listed, offsets), mask_hits=False, backend=place.backend
        )

    def twice(given: Tensor) -> Tensor:
        return function(given, given, target, target)

    copies = [rows.clone().requires_grad_() for _ in range(2)]
    of_hidden, of_weight = torch.autograd.grad(function(*copies, target.clone(), target.clone()), copies)
    for each in (twice, torch.compile(twice, fullgraph=True, backend="aot_eager")):
        leaf = rows.clone().requires_grad_()
        torch.testing.assert_close(torch.autograd.grad(each(leaf), leaf)[0], of_hidden + of_weight)


@pytest.mark.skipif(PLACE.name == "interpret", reason="says nothing of kernels")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
def test_checkpointing_computes_the_same_again(place: Place, sparse: bool, use_reentrant: bool) -> None:
    """Reentrant, forward runs once without gradients and then with them: the direction is kept the second time alone."""
    inputs, target = inputs_of(20, 30, 8, torch.float32), targets_of(20, 30)
    for rows_per_draw in (1, None):
        draw = Draw("uniform", 4, seed_of(1), rows_per_draw)

        def function(*leaves: Tensor) -> Tensor:
            return sampled_linear_cross_entropy(*leaves, target, draw, sparse=sparse, backend=place.backend)  # noqa: B023

        grads = []
        for each in (function, lambda *leaves: checkpoint(function, *leaves, use_reentrant=use_reentrant)):
            leaves = [x.clone().requires_grad_() for x in inputs]
            each(*leaves).backward()
            grads.append([leaf.grad.to_dense() for leaf in leaves])
        for got, expected in zip(*grads, strict=True):
            assert torch.equal(got, expected)


@ON_CPU
@pytest.mark.parametrize("options", [x for x in OPTIONS if x.get("loss") != "refined"])
def test_gradcheck(place: Place, options: dict[str, Any]) -> None:
    """Refined is not the gradient of its loss, and is left to its reference."""
    inputs = [x.requires_grad_() for x in inputs_of(7, 6, 3, torch.float64)]
    target = targets_of(7, 6, ignored=0.3)
    draw = Draw("log_uniform", 4, seed_of(1), rows_per_draw=2)
    has_lse = options.get("loss") not in ("bce", "gbce")

    def function(hidden: Tensor, weight: Tensor) -> Any:
        return sampled_linear_cross_entropy(hidden, weight, target, draw, return_lse=has_lse, **options)

    assert torch.autograd.gradcheck(function, inputs)


def test_philox_has_its_known_answer() -> None:
    """Of the counter and the key that are zero; and other counters and seeds give other numbers."""
    zero = torch.zeros(1, dtype=torch.int64)
    numbers = [int(x) for x in draws.philox(zero, zero, zero, 0)]
    assert numbers == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    places = torch.arange(1000)
    first = draws.philox(torch.tensor([2**40]), places, torch.tensor([[0], [1]]), 0)[0]
    assert first.unique().numel() == 2000


@pytest.mark.parametrize("kind", KINDS[1:])
def test_draws_have_their_distribution(place: Place, kind: str) -> None:
    """Chi-squared of 60,000 numbers at most six deviations above its mean; draws differ from one another."""
    items, count = 40, 30
    draw = draw_of(kind, count, items, 11, 1)
    ids = drawn_negatives(draw, 2000, items)
    assert ids.shape == (2000, count)
    if kind == "popularity":
        assert draw.log_q is not None
        expected = draw.log_q.double().exp()
    else:
        item = torch.arange(items, dtype=torch.float64, device=ids.device)
        log_uniform = ((item + 2) / (item + 1)).log() / math.log(items + 1)
        expected = log_uniform if kind == "log_uniform" else torch.full_like(item, 1 / items)
    # Of permutations each place apart, too: the sum of all has less spread than independent numbers.
    for part in (ids, ids[:, :1], ids[:, -1:]):
        expected_counts = expected * part.numel()
        statistic = ((part.flatten().bincount(minlength=items) - expected_counts) ** 2 / expected_counts).sum()
        assert statistic < items + 6 * math.sqrt(2 * items)
    assert ids.unique(dim=0).shape[0] > 1990


@pytest.mark.parametrize(("count", "items"), [(1, 1), (2, 2), (5, 5), (64, 64), (65, 65), (50, 1000)])
def test_without_replacement_no_item_comes_twice(place: Place, count: int, items: int) -> None:
    draw = Draw("uniform", count, seed_of(3), replacement=False)
    ids = drawn_negatives(draw, 50, items).sort(1).values
    assert (ids.diff(dim=1) > 0).all()
    assert int(ids.min()) >= 0
    assert int(ids.max()) < items


@pytest.mark.parametrize("items", [1, 2**20 + 7, 2**31 - 1])
@pytest.mark.parametrize("kind", ["uniform", "log_uniform", "permuted"])
def test_draws_reach_the_whole_catalogue(place: Place, kind: str, items: int) -> None:
    draw = draw_of(kind, 1 if items == 1 else 2000, items, 5, None)
    ids = drawn_negatives(draw, 7, items)
    assert ids.shape == (1, draw.count)
    assert int(ids.min()) >= 0
    assert items / 3 < int(ids.max()) + 1 <= items


@ON_TRITON
@pytest.mark.parametrize("items", [7, 2**20 + 7, 2**31 - 1])
@pytest.mark.parametrize("kind", KINDS[1:])
def test_kernels_draw_what_pytorch_draws(place: Place, kind: str, items: int) -> None:
    from jagged.ops.sampled_cross_entropy.triton import call, entries, shared_draws

    if kind == "popularity" and items > 2**21:
        pytest.skip("tables of 2^31 entries")
    rows, count, per_draw = 3, 7 if items == 7 else 300, 2
    draw = draw_of(kind, count, items, 2**35 + 1, per_draw)
    source = draws.source_of(draw, rows, items, draw.seed.device)
    target = torch.zeros(rows, dtype=torch.int64, device=place.device)
    hidden = torch.zeros(rows, 16, device=place.device)
    # Items that only their number makes known: draws read none.
    inputs = Inputs(hidden, hidden[:1].expand(items, 16), target, *source[:4])
    c = call.call_of(inputs, Options(*source[4:], mask_hits=False))
    drawn = drawn_negatives(draw, rows, items)
    lists = shared_draws.draw_lists(c)
    assert torch.equal(lists.items.long(), drawn)
    # What is sorted: the lists of shared draws, and for rows that draw for themselves what they draw again.
    for shared, expected in ((lists, drawn), (None, drawn.repeat_interleave(per_draw, 0)[:rows])):
        units = len(expected)
        span = entries.Range(0, units, 1 if shared is None else per_draw, 0, rows)
        keys = entries.entry_keys(c, shared, hidden[:, 0].contiguous(), span)
        assert torch.equal(keys[: units * count].view(units, count).long(), expected)
        assert not keys[units * count :].any()


def test_same_ids_given_or_drawn(place: Place) -> None:
    """A seed changed in place draws others, and the same seed the same to the bit."""
    inputs, target = inputs_of(6, 30, 8, torch.float32), targets_of(6, 30)
    draw = Draw("uniform", 8, seed_of(1))
    ids = drawn_negatives(draw, 6, 30)
    drawn = run(place, inputs, target, draw)
    for got, expected in zip(drawn, run(place, inputs, target, ids), strict=True):
        torch.testing.assert_close(got, expected)
    draw.seed.fill_(2)
    assert not torch.equal(run(place, inputs, target, draw)[0], drawn[0])
    draw.seed.fill_(1)
    for again, expected in zip(run(place, inputs, target, draw), drawn, strict=True):
        assert torch.equal(again, expected)


@ON_CPU
def test_reference_masks_what_it_says() -> None:
    ids = torch.tensor([[0, 1, 2, 3], [-1, 5, 1, 1]])
    kept = kept_negatives(ids, torch.tensor([1, 1]), 5, mask_hits=True, exclude=[[3], []])
    assert kept.tolist() == [[True, False, True, False], [False, False, False, False]]


def test_meta_device() -> None:
    hidden, weight = (torch.empty(shape, device="meta", dtype=torch.bfloat16, requires_grad=True) for shape in ((3, 4), (5, 4)))
    draw = Draw("uniform", 2, torch.empty(1, dtype=torch.int64, device="meta"))
    target = torch.empty(3, device="meta", dtype=torch.int64)
    loss, lse = sampled_linear_cross_entropy(hidden, weight, target, draw, return_lse=True)
    (loss + lse.sum()).backward()
    assert (loss.shape, lse.shape, loss.dtype) == ((), (3,), torch.float32)
    assert hidden.grad is not None
    assert weight.grad is not None
    assert (hidden.grad.shape, weight.grad.dtype) == ((3, 4), torch.bfloat16)


def test_opcheck(place: Place) -> None:
    dtype = torch.bfloat16
    hidden, weight = inputs_of(4, 9, 4, dtype)
    target, rows = targets_of(4, 9, ignored=0.3), random_tensor((4,), torch.float32, 5)
    ids = torch.randint(9, (4, 3), generator=torch.Generator().manual_seed(1)).to(place.device)
    backward = torch.ops.jagged.sampled_linear_cross_entropy_backward.default
    for source, kind in (((ids, None, None, None), "given"), ((None, None, None, seed_of(1)), "uniform")):
        x, options = Inputs(hidden, weight, target, *source), Options(kind, 3, 1)
        for with_direction in (True, False):
            o = options._replace(with_direction=with_direction)
            torch.library.opcheck(SAMPLED_LINEAR_CROSS_ENTROPY.dispatched, (*x, *o, place.backend))
        out = None, None, rows, rows, rows, hidden.float()
        cases = [(None, dtype, dtype, False), (None, dtype, dtype, True)]
        cases += [(rows, None, torch.float32, False), (rows, dtype, None, False)]
        for grad_lse, *wanted, is_sparse in cases:
            o, grads = options._replace(is_sparse=is_sparse), (rows, grad_lse, None, None, None, None)
            torch.library.opcheck(backward, (*grads, *x, *out, *o, *wanted, place.backend))


HIDDEN, WEIGHT, TARGET = torch.zeros(3, 4), torch.zeros(5, 4), torch.zeros(3, dtype=torch.int64)
SEED, NEGATIVES = torch.zeros(1, dtype=torch.int64), torch.zeros(3, 2, dtype=torch.int64)
ROW, OFFSETS = torch.zeros(3), torch.zeros(4, dtype=torch.int64)


def call(negatives: Any = NEGATIVES, hidden: Tensor = HIDDEN, weight: Tensor = WEIGHT, **options: Any) -> Callable[[], object]:
    return lambda: sampled_linear_cross_entropy(hidden, weight, options.pop("target", TARGET), negatives, **options)


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (call(hidden=HIDDEN[0]), ValueError, r"hidden: expected shape \[N, D\], got \[4\]"),
        (call(weight=WEIGHT[:, :3]), ValueError, r"weight: expected shape \[V, 4\].*got \[5, 3\]"),
        (call(weight=WEIGHT[:0]), ValueError, "weight: expected at least one item"),
        (call(weight=WEIGHT.bfloat16()), TypeError, "weight: expected the dtype of hidden.*autocast"),
        (call(target=TARGET[:2]), ValueError, r"target: expected shape \[3\].*got \[2\]"),
        (call([1, 2]), TypeError, "negatives: expected a Draw or a tensor of ids, got list"),
        (call(NEGATIVES[None]), ValueError, r"negatives: expected shape \[N, ns\], \[G, ns\] or \[ns\]"),
        (call(NEGATIVES[:, :0]), ValueError, "negatives: expected at least one negative"),
        (call(NEGATIVES.repeat(2, 1)), ValueError, "negatives: expected from 1 to 3 blocks of rows"),
        (call(NEGATIVES.float()), TypeError, "negatives: expected dtype int64, int32"),
        (call(NEGATIVES.to("meta")), ValueError, "negatives: expected the device of hidden"),
        (call(negative_log_q=ROW), ValueError, r"negative_log_q: expected the shape of negatives, \[3, 2\], got \[3\]"),
        (call(negative_log_q=NEGATIVES.float()), ValueError, "negative_log_q: is not used with correction='none'"),
        (call(weight=WEIGHT[:1].expand(2**31, 4)), ValueError, "weight: expected fewer than 2\\^31 items"),
        (call(target_log_q=ROW), ValueError, "target_log_q: is used with correction='both' alone"),
        (call(target_log_q=ROW[:2], correction="both"), ValueError, r"target_log_q: expected shape \[3\]"),
        (call(sample_weight=ROW[:2]), ValueError, r"sample_weight: expected shape \[3\]"),
        (call(sample_weight=torch.ones(3, requires_grad=True)), ValueError, r"sample_weight: has no gradient.*detach"),
        (call(exclude=TARGET), TypeError, r"exclude: expected a pair \(ids \[M\], offsets \[N \+ 1\]\), got Tensor"),
        (call(exclude=(TARGET, OFFSETS[:3])), ValueError, r"exclude\[1\]: expected shape \[4\]"),
        (call(loss="hinge"), ValueError, "loss: got 'hinge', expected 'softmax', 'refined', 'bce' or 'gbce'"),
        (call(correction="all"), ValueError, "correction: got 'all'"),
        (call(positive="none"), ValueError, "positive: got 'none'"),
        (call(reduction="max"), ValueError, "reduction: got 'max', expected 'mean', 'sum' or 'none'"),
        (call(loss="refined"), ValueError, "correction: loss='refined' corrects the negatives alone"),
        (call(loss="bce", correction="both"), ValueError, "correction: loss='bce' has no softmax"),
        (call(loss="gbce", positive="outside"), ValueError, "positive: loss='gbce' has no softmax"),
        (call(loss="bce", renormalise=True), ValueError, "renormalise: loss='bce' has no softmax"),
        (call(loss="bce", filter_eps=0.1), ValueError, "filter_eps: loss='bce' has no softmax"),
        (call(loss="bce", return_lse=True), ValueError, "return_lse: loss='bce' has no softmax"),
        (call(loss="gbce", gbce_t=2.0), ValueError, "gbce_t: expected a number from 0 to 1, got 2.0"),
        (call(loss="gbce", weight=WEIGHT[:1]), ValueError, "weight: gbce expects at least two items"),
        (call(filter_eps=-1.0), ValueError, "filter_eps: expected a number of at least 0"),
        (call(Draw("uniform", 2, SEED), negative_log_q=ROW), ValueError, "negative_log_q: a Draw knows its probabilities"),
        (call(Draw("zipf", 2, SEED)), ValueError, "Draw.kind: got 'zipf'"),  # type: ignore[arg-type]
        (call(Draw("uniform", 0, SEED)), ValueError, "Draw.count: expected at least one negative, got 0"),
        (call(Draw("uniform", 2, SEED, rows_per_draw=0)), ValueError, "Draw.rows_per_draw: expected at least 1"),
        (call(Draw("uniform", 2, ROW)), TypeError, "Draw.seed: expected dtype int64"),
        (call(Draw("uniform", 6, SEED, replacement=False)), ValueError, "Draw.count: expected at most 5.*got 6"),
        (call(Draw("log_uniform", 2, SEED, replacement=False)), ValueError, "Draw.replacement: only 'uniform' draws without"),
        (call(Draw("popularity", 2, SEED)), ValueError, r"Draw.alias_probability: expected a tensor \[V\]"),
        (call(Draw("uniform", 2, SEED, log_q=ROW)), ValueError, "Draw.log_q: expected None for kind 'uniform'"),
        (
            call(Draw("popularity", 2, SEED, 1, True, ROW, TARGET.int(), ROW)),
            ValueError,
            r"Draw.alias_probability: expected shape \[5\]",
        ),
        (call(Draw("uniform", 2, SEED.to("meta"))), ValueError, "Draw.seed: expected the device of hidden"),
        (call(backend="cuda"), ValueError, "backend: got 'cuda'"),
        (call(hidden=HIDDEN.double(), weight=WEIGHT.double(), backend="triton"), TypeError, "float64"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_messages_name_argument_and_cure(function: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        function()


@pytest.mark.skipif(PLACE.name == "interpret", reason="interpreted kernels are not compiled")
@pytest.mark.parametrize("rows_per_draw", [1, None, "in-batch"])
def test_one_graph_for_all_numbers_of_rows(place: Place, unchecked: None, rows_per_draw: int | str | None) -> None:
    counter = CompileCounterWithBackend("inductor" if place.name == "gpu" else "aot_eager")

    def function(hidden: Tensor, weight: Tensor, target: Tensor, seed: Tensor) -> Tensor:
        # Of the batch's own targets there are as many negatives as rows.
        draw = target if isinstance(rows_per_draw, str) else Draw("log_uniform", 7, seed, rows_per_draw)
        loss, lse = sampled_linear_cross_entropy(
            hidden, weight, target, draw, correction="both", return_lse=True, backend=place.backend
        )
        return loss + lse.mean()

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    graphs = 0
    for rows in (5, 30, 11):
        inputs, target = inputs_of(rows, 40, 8, torch.float32), targets_of(rows, 40, ignored=0.3)
        results = []
        for each in (compiled, function):
            leaves = [x.clone().requires_grad_() for x in inputs]
            loss = each(*leaves, target, seed_of(rows))
            loss.backward()
            results.append([loss.detach(), *(leaf.grad for leaf in leaves)])
        torch.testing.assert_close(*results)
        graphs = graphs or counter.frame_count
    # The first call may trace twice: a number among the arguments is first tried as a symbol.
    assert counter.frame_count == graphs


@ON_GPU
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("rows_per_draw", [1, 64, None])
def test_no_synchronisation_and_graph_capture(place: Place, rows_per_draw: int | None, sparse: bool) -> None:
    hidden, weight = (x.requires_grad_() for x in inputs_of(300, 1000, 64, torch.bfloat16))
    target = targets_of(300, 1000, ignored=0.3)
    draw = draw_of("permuted", 100, 1000, 3, rows_per_draw)

    def step() -> list[Tensor]:
        loss, lse = sampled_linear_cross_entropy(hidden, weight, target, draw, correction="both", return_lse=True, sparse=sparse)
        of_hidden, of_weight = torch.autograd.grad(loss + lse.sum(), [hidden, weight])
        return [loss.detach(), of_hidden, *((of_weight._indices(), of_weight._values()) if sparse else (of_weight,))]

    graph, results = captured(step)
    for seed, ignored in ((3, 0.3), (4, 0.9), (5, 0.0)):
        target.copy_(targets_of(300, 1000, 1, ignored))
        draw.seed.fill_(seed)
        graph.replay()
        torch.testing.assert_close(results, step(), rtol=0, atol=0)


@ON_GPU
def test_memory_has_a_bound(place: Place) -> None:
    from jagged.ops.sampled_cross_entropy.triton import entries

    rows, items, width, count = 25_600, 100_000, 64, 1023
    hidden, weight = (x.requires_grad_() for x in inputs_of(rows, items, width, torch.bfloat16))
    target, draw = targets_of(rows, items), Draw("uniform", count, seed_of(1))
    sampled_linear_cross_entropy(hidden, weight, target, draw).backward()
    hidden.grad = weight.grad = None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    sampled_linear_cross_entropy(hidden, weight, target, draw).backward()
    # The gathered rows would take 3.4 GB, the ids of the negatives 210 MB beside the sort's.
    rest = (rows + items) * width * 12 + 64 * 2**20
    assert torch.cuda.max_memory_allocated() - before < entries.ENTRY_BYTES_AT_MOST + rest


@ON_GPU
def test_addresses_past_2_to_the_31(place: Place) -> None:
    """The last items of a table of more than 2^31 numbers, every other one zero."""
    width, items, short = 64, 2**25 + 5, 70
    hidden = random_tensor((short, width), torch.bfloat16, 0)
    weight = torch.zeros(items, width, dtype=torch.bfloat16, device=place.device)
    weight[-short:] = random_tensor((short, width), torch.bfloat16, 1)
    first = items - short
    for per_row in (True, False):
        ids = torch.arange(items - 20, items, device=place.device).expand(short, 20)
        target = targets_of(short, short) + first
        leaves = [hidden.clone().requires_grad_(), weight.requires_grad_()]
        loss = sampled_linear_cross_entropy(*leaves, target, ids if per_row else ids[0], reduction="sum")
        grads = torch.autograd.grad(loss, leaves)
        ends = [hidden.double().requires_grad_(), weight.detach()[first:].double().requires_grad_()]
        expected, _, _ = reference(*ends, target - first, ids - first, reduction="sum")
        expected.backward()
        torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=0)
        for got, end in zip((grads[0], grads[1][first:]), ends, strict=True):
            torch.testing.assert_close(got.double(), end.grad, rtol=0.02, atol=0.02)


@ON_GPU
@pytest.mark.parametrize("is_given", [True, False])
def test_more_than_2_to_the_31_negatives(place: Place, is_given: bool) -> None:
    """The last rows of many, of which every other one is ignored."""
    width, items, count, short = 16, 500, 1024, 70
    rows = 2**31 // count + short
    hidden, weight = inputs_of(short, items, width, torch.bfloat16)
    every_row = torch.zeros(rows, width, dtype=torch.bfloat16, device=place.device)
    every_row[-short:] = hidden
    target = torch.full((rows,), -100, device=place.device)
    target[-short:] = targets_of(short, items)
    draw = draw_of("uniform", count, items, 3, 1)
    source = draws.source_of(draw, rows, items, draw.seed.device)
    last = torch.arange(rows - short, rows, device=place.device)
    ids = draws.draw_ids(source, last, torch.arange(count, device=place.device), items)
    negatives: Tensor | Draw = draw
    if is_given:
        negatives = torch.zeros(rows, count, dtype=torch.int32, device=place.device)
        negatives[-short:] = ids
    leaves = [every_row.requires_grad_(), weight.requires_grad_()]
    loss = sampled_linear_cross_entropy(*leaves, target, negatives, reduction="sum")
    loss.backward()
    ends = [hidden.double().requires_grad_(), weight.detach().double().requires_grad_()]
    expected, _, _ = reference(*ends, target[-short:], ids, reduction="sum")
    expected.backward()
    torch.testing.assert_close(loss.detach().double(), expected.detach(), rtol=1e-5, atol=0)
    for got, end in zip((leaves[0].grad[-short:], leaves[1].grad), ends, strict=True):
        torch.testing.assert_close(got.double(), end.grad, rtol=0.02, atol=0.02)
