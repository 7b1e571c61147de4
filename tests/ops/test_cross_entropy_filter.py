"""Filtered gradients: the tiles that are kept are those that reach the threshold, and the gradients are sums over them alone."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from jagged.ops import linear_cross_entropy
from jagged.ops._shared.matrices import aligned
from jagged.ops.cross_entropy.triton import backward, filter
from jagged.ops.cross_entropy.triton.arguments import Filter, Items, Kept, Rows
from tests.graphs import captured
from tests.ops.test_cross_entropy import inputs_of, targets_of
from tests.oracle import check_three_way
from tests.places import PLACE, Place
from tests.strategies import random_tensor

pytestmark = pytest.mark.skipif(PLACE.name == "cpu", reason="says something of the kernels alone")
ON_GPU = pytest.mark.gpu
HALVES, FLOAT = (torch.bfloat16, torch.float16), torch.float32


class Filtered(NamedTuple):
    """What a backward pass was given of a filter: whether it paid, and the tiles of hidden's gradient and of weight's."""

    pays: bool
    tiles: tuple[Kept | None, Kept | None]


@pytest.fixture(name="decided")
def _decided(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Filtered]]:
    """The filters of backward passes, of gradients of any size."""
    seen: list[Filtered] = []

    def kept_tiles(rows: Rows, items: Items, filtering: Filter, *, on_hopper: bool) -> tuple[Kept | None, Kept | None]:
        tiles = filter.kept_tiles(rows, items, filtering, on_hopper=on_hopper)
        assert filtering.pays is not None
        seen.append(Filtered(bool(filtering.pays), tiles))
        return tiles

    monkeypatch.setattr(filter, "LEAST_WORK", 0)
    monkeypatch.setattr(backward, "kept_tiles", kept_tiles)
    yield seen
    assert seen


@pytest.fixture(name="kept")
def _kept(decided: list[Filtered], monkeypatch: pytest.MonkeyPatch) -> list[Filtered]:
    """The same, whether they pay or not."""
    monkeypatch.setattr(filter, "MARGIN", math.inf)
    return decided


def peaked(rows: int, items: int, width: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Hidden states, and weights of logits that few items have most weight of, much the same in all rows; and such targets."""
    hidden, weight = inputs_of(rows, items, width, dtype)
    common = inputs_of(1, items, width, dtype, seed=5)[0]
    order = (weight @ common[0]).argsort(descending=True)
    target = targets_of(rows, max(1, items // 20), ignored=0.1 if rows > 1 else 0.0)
    return [hidden / 2 + 4 * common, weight], torch.where(target < 0, target, order[target.clamp(min=0)])


def mask_of(kept: Kept | None, rows: int, items: int, *, owns_items: bool) -> Tensor:
    """Which logits a gradient is made of, `[N, V]`."""
    if kept is None:
        return torch.ones(rows, items, dtype=torch.bool, device=PLACE.device)
    num_own, num_other = (items, rows) if owns_items else (rows, items)
    mask = torch.zeros(num_own, num_other, dtype=torch.bool, device=PLACE.device)
    for block, (count, of_block) in enumerate(zip(kept.counts.tolist(), kept.tiles.tolist(), strict=True)):
        tiles = of_block[:count]
        assert tiles == sorted(set(tiles))
        for tile in tiles:
            mask[block * kept.own : (block + 1) * kept.own, tile * kept.other : (tile + 1) * kept.other] = True
    mask = mask.t() if owns_items else mask
    assert sorted(kept.order.tolist()) == list(range(items))
    return torch.empty_like(mask).index_copy_(1, kept.order.long(), mask)


def logit_gradients(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Of the sum of the losses, in float64 for float64."""
    logits = (hidden @ weight.t()).to(torch.promote_types(hidden.dtype, torch.float32))
    gradients = logits.softmax(1)
    valid = target >= 0
    gradients[torch.arange(len(target), device=target.device), target.clamp(min=0)] -= 1
    return torch.where(valid[:, None], gradients, 0)


@pytest.mark.parametrize("eps", [(2.0**-9, 2.0**-6), (2.0**-6, 2.0**-9), (2.0**-8, None), (None, 2.0**-8)])
@pytest.mark.parametrize(
    ("rows", "items", "width", "dtype"),
    [
        (70, 300, 16, torch.float32), (130, 200, 130, torch.bfloat16),
        *(pytest.param(*size, marks=ON_GPU) for size in [
            (1, 3000, 64, HALVES[0]), (200, 3001, 50, HALVES[0]), (257, 5000, 128, HALVES[1]), (130, 3000, 200, HALVES[0]),
            (300, 9000, 256, HALVES[1]), (500, 4000, 320, HALVES[0]),
        ]),
    ],
)  # fmt: skip
def test_sums_over_the_tiles_that_count(
    place: Place, kept: list[Any], rows: int, items: int, width: int, dtype: torch.dtype, eps: tuple[float | None, float | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    # Several copies of items, the last one short.
    monkeypatch.setattr(filter, "COPY_BYTES", 1)
    inputs, target = peaked(rows, items, width, dtype)

    def ours(hidden: Tensor, weight: Tensor) -> Tensor:
        # Of wide rows chunks would be taken, which have no filter.
        return linear_cross_entropy(
            hidden, weight, target, reduction="sum", filter_eps=eps, strategy="fused", backend=place.backend
        )

    leaves = [x.requires_grad_() for x in inputs]
    ours(*leaves).backward()
    masks = [mask_of(of, rows, items, owns_items=owns) for of, owns in zip(kept[-1].tiles, (False, True), strict=True)]
    exact = logit_gradients(*(x.detach().double() for x in inputs), target)
    for of, mask, share in zip(kept[-1].tiles, masks, eps, strict=True):
        assert (of is None) == (share is None)
        if of is None or share is None:
            continue
        # Of products that are rounded only by their sums.
        assert bool((exact.abs()[~mask] < share * 1.02).all())
        if items > 1000:
            assert float(mask.float().mean()) < 0.4

    def masked(hidden: Tensor, weight: Tensor) -> Tensor:
        h, w = hidden.detach(), weight.detach()
        gradients = logit_gradients(h, w, target)
        of_hidden, of_weight = ((gradients * mask).to(h.dtype) for mask in masks)
        value = (torch.logsumexp((h @ w.t()).to(gradients.dtype), 1) - (h * w[target.clamp(min=0)]).sum(1).to(gradients.dtype))[
            target >= 0
        ].sum()
        surrogate = ((of_hidden @ w) * hidden).to(gradients.dtype).sum() + ((of_weight.t() @ h) * weight).to(
            gradients.dtype
        ).sum()
        return value + surrogate - surrogate.detach()

    check_three_way(ours, masked, [x.detach() for x in inputs])


@pytest.mark.parametrize("width", [64, pytest.param(256, marks=ON_GPU)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_without_weight_are_left_out(place: Place, kept: list[Any], width: int, dtype: torch.dtype) -> None:
    """Scattered items that no row scores highly: the order brings them together, and both sides pass them by."""
    rows, items = 130, 520
    hidden, weight = inputs_of(rows, items, width, dtype)
    hidden[:, 0], weight[:, 0] = 1, 0
    weight[1::2, 0] = -30
    target = targets_of(rows, items // 2) * 2
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    linear_cross_entropy(*leaves, target, reduction="sum", filter_eps=2.0**-10, backend=place.backend).backward()
    for of, owns in zip(kept[-1].tiles, (False, True), strict=True):
        # The tile at the border has items of both kinds.
        assert int(mask_of(of, rows, items, owns_items=owns)[:, 1::2].any(0).sum()) < 128
    assert weight.grad is not None
    assert int(weight.grad[1::2].any(1).sum()) < 128
    assert bool(weight.grad[::2].any(1).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("where", ["hidden", "weight"])
@pytest.mark.usefixtures("kept")
def test_nan_is_kept(place: Place, where: str, dtype: torch.dtype) -> None:
    rows, items, width = 130, 300, 64
    hidden, weight = inputs_of(rows, items, width, dtype)
    (hidden if where == "hidden" else weight)[77, 3] = math.nan
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        leaves = [hidden.requires_grad_(), weight.requires_grad_()]
        loss = linear_cross_entropy(*leaves, targets_of(rows, items), reduction="sum", filter_eps=0.5, backend=place.backend)
        grad_hidden, grad_weight = torch.autograd.grad(loss, leaves)
    assert bool(grad_hidden[77 if where == "hidden" else slice(None)].isnan().any(-1).all())
    assert bool(grad_weight.isnan().any(1).all())


@pytest.mark.usefixtures("kept")
def test_rows_of_weight_0_keep_nothing(place: Place) -> None:
    """Thresholds are shares of the largest row's gradient: other rows have none to keep but their targets'."""
    rows, items = 130, 300
    leaves = [x.requires_grad_() for x in inputs_of(rows, items, 16, torch.bfloat16)]
    sample_weight = torch.zeros(rows, device=place.device)
    sample_weight[3] = 2
    loss = linear_cross_entropy(
        *leaves, targets_of(rows, items), reduction="sum", sample_weight=sample_weight, filter_eps=2.0**-12, backend=place.backend
    )
    grad_hidden, _ = torch.autograd.grad(loss, leaves)
    assert torch.equal(grad_hidden.any(1).nonzero()[:, 0].cpu(), torch.tensor([3]))


def clustered(rows: int, items: int, width: int, dtype: torch.dtype, *, one_in: int) -> tuple[list[Tensor], Tensor]:
    """Hidden states and weights of logits that are large for one item in `one_in`, far below for the others; targets of those."""
    hidden, weight = inputs_of(rows, items, width, dtype)
    hidden[:, 0], weight[:, 0] = 1, -30
    weight[::one_in, 0] = 0
    target = (targets_of(rows, items // one_in, ignored=0.1) * one_in).clamp(min=-100)
    return [hidden.requires_grad_(), weight.requires_grad_()], target


# On a GPU so many items that few tiles have a target.
SIZES = [(300, 900, 16, torch.float32), (300, 900, 64, torch.bfloat16)]
EPS = 2.0**-10
if PLACE.name == "gpu":
    # Probabilities over so many items are this small.
    EPS = 2.0**-18
    KINDS = ((64, HALVES[0]), (130, HALVES[0]), (256, HALVES[1]), (16, FLOAT))
    SIZES = [(600, 1_000_000, width, dtype) for width, dtype in KINDS]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("eps", [EPS, (EPS, None), (None, EPS)])
@pytest.mark.parametrize("one_in", [1, 30])
def test_the_device_decides(
    place: Place, decided: list[Filtered], size: tuple[int, int, int, torch.dtype], eps: Any, one_in: int
) -> None:
    """Where all tiles count the gradients are the exact ones, bit by bit; where few do they are sums over those."""
    leaves, target = clustered(*size, one_in=one_in)

    def gradients(filter_eps: Any) -> tuple[Tensor, ...]:
        loss = linear_cross_entropy(*leaves, target, reduction="sum", filter_eps=filter_eps, backend=place.backend)
        return torch.autograd.grad(loss, leaves)

    found, exact = gradients(eps), gradients(None)
    assert [of.pays for of in decided] == [one_in > 1]
    for ours, plain, share in zip(found, exact, eps if isinstance(eps, tuple) else (eps, eps), strict=True):
        assert torch.equal(ours, plain) == (one_in == 1 or share is None)
    if one_in > 1 and eps != (EPS, None):
        far = torch.arange(size[1], device=place.device) % one_in > 0
        # At the border, and of a tile that only part of the items fill.
        assert int(found[1][far].any(1).sum()) < 512


@pytest.mark.parametrize("one_in", [1, 30])
@pytest.mark.parametrize("way", ["checkpoint", "compiled", "autocast"])
def test_what_users_put_around_a_filtered_loss(place: Place, monkeypatch: pytest.MonkeyPatch, way: str, one_in: int) -> None:
    """Bit by bit what a plain call gives, filtered or exact, and float32 gradients of float32 weights under autocast."""
    monkeypatch.setattr(filter, "LEAST_WORK", 0)
    leaves, target = clustered(300, 900, 16, FLOAT, one_in=one_in)

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, target, reduction="sum", filter_eps=2.0**-10, backend=place.backend)

    expected = torch.autograd.grad(loss(*leaves), leaves)
    if way == "checkpoint":
        found = torch.autograd.grad(checkpoint(loss, *leaves, use_reentrant=False), leaves)
    elif way == "compiled":
        torch.compiler.reset()
        compiled = torch.compile(loss, fullgraph=True, backend="inductor" if place.name == "gpu" else "aot_eager")
        found = torch.autograd.grad(compiled(*leaves), leaves)
    else:
        low = [leaf.detach().bfloat16().requires_grad_() for leaf in leaves]
        expected = torch.autograd.grad(loss(*low), low)
        with torch.autocast(place.device.type, torch.bfloat16):
            found = torch.autograd.grad(loss(*leaves), leaves)
        assert [gradient.dtype for gradient in found] == [FLOAT, FLOAT]
        # All but the last rounding is the same, which the interpreter does in its own way: neighbouring numbers of bfloat16.
        for ours, plain in zip(found, expected, strict=True):
            assert bool((ours.bfloat16().view(torch.int16).int() - plain.view(torch.int16).int()).abs().max() <= 1)
        return
    assert all(torch.equal(ours, plain) for ours, plain in zip(found, expected, strict=True))


def test_what_is_small_is_not_even_sampled(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    leaves, target = clustered(130, 520, 16, torch.float32, one_in=20)
    monkeypatch.setattr(filter, "_order", None)

    def gradients(filter_eps: float | None) -> tuple[Tensor, ...]:
        return torch.autograd.grad(linear_cross_entropy(*leaves, target, filter_eps=filter_eps, backend=place.backend), leaves)

    assert all(torch.equal(ours, plain) for ours, plain in zip(gradients(0.5), gradients(None), strict=True))
    monkeypatch.setattr(filter, "LEAST_WORK", 130 * 520 * 16)
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        gradients(0.5)


def test_a_filter_is_considered_from_the_size_that_the_page_names(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filter, "_order", None)

    def considered(num_rows: int) -> Filter | None:
        hidden, weight = torch.empty(num_rows, 64, device="meta"), torch.empty(2**20, 64, device="meta")
        rows = Rows(hidden, *(hidden[:, 0] for _ in range(4)), None, None)
        return filter.filter_of(rows, Items(weight, None, None, None, 1.0, None), 0.5, None, on_hopper=False)

    assert considered(2**13 - 1) is None
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        considered(2**13)


@pytest.mark.parametrize("width", [16, 130])
@pytest.mark.parametrize("dtype", [FLOAT, *HALVES])
@pytest.mark.parametrize("is_shaped", [False, True])
def test_the_order_is_by_the_mean_rows_logits(place: Place, width: int, dtype: torch.dtype, is_shaped: bool) -> None:
    hidden, weight = (aligned(x) for x in inputs_of(70, 333, width, dtype))
    target = targets_of(70, 333).int()
    bias, scale = (random_tensor((333,), FLOAT, seed) for seed in (2, 3)) if is_shaped else (None, None)
    rows = Rows(hidden, target, *(hidden.new_empty(70, dtype=FLOAT) for _ in range(3)), None, None)
    order = filter._order(rows, Items(weight, bias, scale, None, 1.0, None))
    logits = weight.double() @ hidden.double().mean(0)
    logits = logits if scale is None or bias is None else logits * scale + bias
    assert sorted(order.tolist()) == list(range(333))
    # Like ones may change places.
    assert bool((logits[order.long()].diff() < 1e-5).all())


@pytest.mark.parametrize(
    ("count", "block", "expected"),
    [(5, 8, [0, 1, 2, 3, 4]), (19, 8, [0, 8]), (90, 8, [8, 24, 40, 56, 72]), (200, 8, [*range(8, 200, 24)])],
)
def test_samples_are_evenly_spaced(place: Place, count: int, block: int, expected: list[int]) -> None:
    """Whole blocks, four at least where there are so many."""
    places = filter._evenly(count, block, 3, place.device).tolist()
    assert places == ([*range(count)] if count < block else [first + i for first in expected for i in range(block)])


@ON_GPU
@pytest.mark.parametrize("width", [64, 256])
def test_no_synchronisation_and_graph_capture(place: Place, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filter, "LEAST_WORK", 0)
    inputs, target = peaked(300, 4000, width, torch.bfloat16)
    leaves = [x.requires_grad_() for x in inputs]

    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(linear_cross_entropy(*leaves, target, filter_eps=2.0**-8), leaves)

    graph, results = captured(step)
    for ignored in (0.3, 0.9, 0.0):
        target.copy_(targets_of(300, 4000, 1, ignored))
        graph.replay()
        torch.testing.assert_close(results, step(), rtol=0, atol=0)
