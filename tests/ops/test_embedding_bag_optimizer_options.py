"""Options of updates of embedding rows, and LAMB: decoupled decay, a largest norm, states in 16 bits, steps that rows missed."""

from __future__ import annotations

import copy
import math
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from jagged.ops import BagLayout, BagOptimizer, embedding_bags
from jagged.ops.embedding_bag.optimizers import KINDS, STATES
from tests.gathering import GATHERINGS, gathering
from tests.ops.test_embedding_bag_optimizers import IS_SMALL, LENGTHS, SHARED, by_hand, lookups_of, optimizer_of, trained
from tests.oracle import check_three_way
from tests.places import PLACE, Place
from tests.strategies import random_tensor

LAYOUT = BagLayout((7, 4), (4, 8))
# Powers of two, which are themselves in float32.
RATES = (0.125, 0.25, 0.125, 0.03125, 0.125)
NOTHING = [[0, 0, 0]] * 3
MISSED: dict[str, Any] = {"decay_missed_steps": True}
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("adagrad", {"decoupled_weight_decay": True}),
    ("rowwise_adagrad", {"decoupled_weight_decay": True}),
    *((kind, {"max_norm": 2.0}) for kind in KINDS),
    ("rowwise_adagrad", {"decoupled_weight_decay": True, "max_norm": 1.5}),
    ("adam", MISSED),
    ("rowwise_adam", MISSED),
    ("adam", {**MISSED, "max_norm": 2.0, "betas": (0.0, 0.9)}),
    ("rowwise_adam", {**MISSED, "max_norm": 2.0}),
]


def rows_of(layout: BagLayout, *rows: list[int]) -> tuple[Tensor, Tensor]:
    """Return ids and offsets of a batch that reads these rows of each table, each once, in one bag."""
    offsets = torch.tensor([0, *(len(of) for of in rows)]).cumsum(0)
    return torch.tensor([row for of in rows for row in of], dtype=torch.int64).to(PLACE.device), offsets.to(PLACE.device)


def every_row(layout: BagLayout) -> tuple[Tensor, Tensor]:
    return rows_of(layout, *(list(range(rows)) for rows in layout.rows))


def gradient_of_bags(layout: BagLayout, seed: int) -> Tensor:
    return random_tensor((1, layout.width), torch.float32, seed)


@pytest.mark.parametrize(("kind", "options"), OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gathered", GATHERINGS)
def test_three_way(place: Place, kind: str, options: dict[str, Any], dtype: torch.dtype, gathered: str) -> None:
    """Five steps, of which rows miss some and one reads nothing: the weights and each state."""
    if IS_SMALL and (dtype == torch.float16 or (dtype == torch.bfloat16 and gathered == "counted")):
        pytest.skip("covered by the other places")
    lengths = [LENGTHS, [[1, 0, 0], [0, 1, 0], [0, 0, 2]], NOTHING, LENGTHS, [[2, 0, 0], [0, 0, 0], [1, 0, 0]]]
    batches = [lookups_of(SHARED, of_step, seed) for seed, of_step in enumerate(lengths)]
    grads = [random_tensor((3, SHARED.width), torch.float32, 10 + step) for step in range(len(batches))]
    weights = random_tensor((SHARED.num_elements,), dtype, 0)
    kept: dict[str, tuple[Tensor, ...]] = {}
    for part in range(1 + sum(bool(of) for of in STATES[kind])):

        def ours(weights: Tensor, *grads: Tensor, part: int = part) -> Tensor:
            if "ours" not in kept:
                optimizer = optimizer_of(kind, SHARED, weight_decay=0.25, **options)
                with gathering(gathered):
                    result = trained(place, weights, optimizer, batches, grads, RATES)
                kept["ours"] = result, optimizer.first, optimizer.second
            return kept["ours"][part]

        def written_out(weights: Tensor, *grads: Tensor, part: int = part) -> Tensor:
            return by_hand(kind, SHARED, weights, batches, grads, RATES, weight_decay=0.25, **options)[part]

        check_three_way(ours, written_out, [weights, *grads], requires_grad=[False] * 6)


@pytest.mark.parametrize("gathered", GATHERINGS)
@pytest.mark.parametrize(
    ("kind", "options"), [("lamb", {}), ("rowwise_lamb", {"max_norm": 3.0}), ("sgd", {"max_norm": 3.0}), ("adam", MISSED)]
)
@pytest.mark.parametrize("width", [3, 130, 260])
def test_rows_are_whole_whatever_their_width(place: Place, kind: str, options: dict[str, Any], gathered: str, width: int) -> None:
    """More columns than a program of other updates takes, and rows that begin at no multiple of 16 bytes."""
    layout = BagLayout((5, 3), (width, 2))
    # Row 2 misses the second update.
    batches = [rows_of(layout, *rows) for rows in (([0, 2, 2, 4], [1]), ([0], [1, 0]), ([2], [1]))]
    grads = [gradient_of_bags(layout, step) for step in range(3)]
    weights = random_tensor((layout.num_elements,), torch.float32, 5)

    def ours(weights: Tensor, *grads: Tensor) -> Tensor:
        with gathering(gathered):
            return trained(place, weights, optimizer_of(kind, layout, weight_decay=0.5, **options), batches, grads, RATES[:3])

    def written_out(weights: Tensor, *grads: Tensor) -> Tensor:
        return by_hand(kind, layout, weights, batches, grads, RATES[:3], weight_decay=0.5, **options)[0]

    check_three_way(ours, written_out, [weights, *grads], requires_grad=[False] * 4)


@pytest.mark.skipif(PLACE.name != "cpu", reason="float64 is PyTorch's")
@pytest.mark.parametrize(("kind", "options"), OPTIONS)
def test_tables_in_float64_keep_their_precision(place: Place, kind: str, options: dict[str, Any]) -> None:
    """But for the states, which are float32: so of one step, from states of 0."""
    batch, grad = rows_of(LAYOUT, [1, 5], [3]), random_tensor((1, LAYOUT.width), torch.float64, 1)
    weights = random_tensor((LAYOUT.num_elements,), torch.float64, 0)
    optimizer = optimizer_of(kind, LAYOUT, weight_decay=0.25, **options)
    ours = trained(place, weights, optimizer, [batch], [grad], output_dtype=torch.float64)
    expected, *_ = by_hand(kind, LAYOUT, weights, [batch], [grad], RATES, weight_decay=0.25, **options)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rowwise", [False, True])
def test_decoupled_adagrad_is_that_of_torch_beside_a_decay(place: Place, rowwise: bool) -> None:
    """torch.optim.Adagrad without decay, of weights that were multiplied by `1 - lr * weight_decay` before each of its steps."""
    layout = BagLayout((7, 4), (4, 8), (0, 1, 0))
    batch = rows_of(layout, [0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3], [1, 1, 2])
    weights = random_tensor((layout.num_elements,), torch.float32, 0)
    leaf = weights.clone().requires_grad_()
    theirs = torch.optim.Adagrad([leaf], lr=0.125, eps=1e-8)
    grads = [random_tensor((1, layout.width), torch.float32, step) for step in range(4)]
    sums = [torch.zeros(rows, 1, device=place.device) for rows in layout.rows]
    for grad in grads:
        theirs.zero_grad()
        embedding_bags(leaf, layout, *batch, backend=place.backend).backward(grad)
        assert leaf.grad is not None
        with torch.no_grad():
            leaf.mul_(1 - 0.125 * 0.25)
            if rowwise:
                for table, of, total in zip(layout.views(leaf), layout.views(leaf.grad), sums, strict=True):
                    total += of.square().mean(1, keepdim=True)
                    table -= 0.125 * of / (total.sqrt() + 1e-8)
            else:
                theirs.step()
    kind = "rowwise_adagrad" if rowwise else "adagrad"
    optimizer = optimizer_of(kind, layout, weight_decay=0.25, decoupled_weight_decay=True)
    ours = trained(place, weights, optimizer, [batch] * 4, grads)
    for table, expected in zip(layout.views(ours), layout.views(leaf.detach()), strict=True):
        torch.testing.assert_close(table, expected)
    # What was decayed is nothing that the sums have seen.
    plain = optimizer_of(kind, layout)
    trained(place, weights, plain, [batch] * 4, grads)
    torch.testing.assert_close(optimizer.first, plain.first, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["lamb", "rowwise_lamb"])
def test_a_step_of_lamb_is_as_long_as_the_row_times_the_rate(place: Place, kind: str) -> None:
    """Whatever the gradients are; rows of zeros take adam's step, and without gradient or decay a row stays."""
    layout = BagLayout((6, 3), (4, 9))
    weights = random_tensor((layout.num_elements,), torch.float32, 0)
    layout.views(weights)[0][4] = 0
    grad = gradient_of_bags(layout, 1)
    scale = torch.tensor([1.0, 100.0, 0.01, 1.0, 1.0], device=place.device)
    results = {}
    for of_kind in (kind, kind.replace("lamb", "adam")):
        table = weights.clone().requires_grad_()
        output = embedding_bags(
            table, layout, *rows_of(layout, [0, 1, 5, 4], [2]), per_sample_weights=scale,
            optimizer=optimizer_of(of_kind, layout), backend=place.backend,
        )  # fmt: skip
        output.backward(grad)
        results[of_kind] = table.detach()
    moved = results[kind] - weights
    for number, rows in ((0, [0, 1, 5]), (1, [2])):
        change, old = (layout.views(x)[number][rows].double().norm(dim=1) for x in (moved, weights))
        torch.testing.assert_close(change, 0.125 * old, rtol=1e-5, atol=0)
    adams = results[kind.replace("lamb", "adam")]
    assert torch.equal(layout.views(results[kind])[0][4], layout.views(adams)[0][4])
    assert bool((layout.views(results[kind])[0][4] != 0).all())
    still = trained(place, weights, optimizer_of(kind, layout), [every_row(layout)], [torch.zeros_like(grad)])
    assert torch.equal(still, weights)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gathered", GATHERINGS)
def test_max_norm_is_of_rows_that_were_read(place: Place, kind: str, gathered: str) -> None:
    """Others stay as they are, above it, too; of those that were read, one that stays below it is as without it."""
    layout = BagLayout((6, 3), (4, 9))
    weights = torch.zeros(layout.num_elements, device=place.device)
    tables = layout.views(weights)
    tables[0][:] = torch.tensor([3.0, 0.01, 3.0, 0.02, 0.5, 2.0], device=place.device)[:, None]
    tables[1][:] = 1.0
    batch, grad = rows_of(layout, [0, 1, 1, 4], [0]), torch.zeros(1, layout.width, device=place.device)
    grad[0, 0] = 2.0**-12
    results = []
    for norm in (1.0, None):
        with gathering(gathered):
            optimizer = optimizer_of(kind, layout, 2.0**-8, max_norm=norm)
            results.append(layout.views(trained(place, weights, optimizer, [batch], [grad])))
    (wide, other), (free, _) = results
    for row in (2, 3, 5):
        assert torch.equal(wide[row], tables[0][row])
    assert torch.equal(other[1:], tables[1][1:])
    # A gradient of 0 is an update, too.
    for row in (wide[0], other[0]):
        torch.testing.assert_close(row.double().norm(), torch.ones((), dtype=torch.float64, device=place.device))
    assert torch.equal(wide[1], free[1])
    # Exactly as long as it may be: nothing is cut off, unless the step made it longer.
    torch.testing.assert_close(wide[4], free[4] / max(1.0, float(free[4].norm())))
    torch.testing.assert_close(wide[0] * float(free[0].norm()), free[0])


@pytest.mark.parametrize("gathered", GATHERINGS)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "sgd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_of_16_bits_are_those_of_32_rounded_after_each_update(
    place: Place, kind: str, gathered: str, dtype: torch.dtype
) -> None:
    """To nearest, also where new weights are rounded at random; what an update reckons with is not rounded before."""
    if IS_SMALL and (dtype == torch.bfloat16) != (gathered == "counted"):
        pytest.skip("covered by the other places")
    steps = range(2 if IS_SMALL else 3)
    batches = [lookups_of(SHARED, LENGTHS, seed) for seed in steps]
    grads = [random_tensor((3, SHARED.width), torch.float32, seed) for seed in steps]
    weights = random_tensor((SHARED.num_elements,), dtype, 0)
    of_16, of_32 = (
        optimizer_of(kind, SHARED, weight_decay=0.25, stochastic_rounding=True, state_dtype=of)
        for of in (torch.bfloat16, torch.float32)
    )
    ours = theirs = weights
    with gathering(gathered):
        for batch, grad in zip(batches, grads, strict=True):
            ours, theirs = (trained(place, of, by, [batch], [grad]) for of, by in ((ours, of_16), (theirs, of_32)))
            assert torch.equal(ours, theirs)
            for small, large in ((of_16.first, of_32.first), (of_16.second, of_32.second)):
                assert small.dtype == torch.bfloat16
                assert large.dtype == torch.float32
                # The interpreter cuts off.
                is_cut = PLACE.name == "interpret"
                expected = (large.view(torch.int32) & -0x10000).view(torch.float32) if is_cut else large.bfloat16().float()
                assert torch.equal(small.float(), expected)
                large.copy_(small)


def test_bytes_of_states() -> None:
    sizes = {
        dtype: sum(x.nbytes for x in (made.first, made.second))
        for dtype in (torch.float32, torch.bfloat16)
        for made in [BagOptimizer("rowwise_adam", LAYOUT, learning_rate=0.1, state_dtype=dtype)]
    }
    assert sizes == {torch.float32: 4 * (LAYOUT.num_elements + 11), torch.bfloat16: 2 * (LAYOUT.num_elements + 11)}


def dense_adam(
    place: Place, layout: BagLayout, weights: Tensor, batches: list[tuple[Tensor, Tensor]], grads: list[Tensor],
    make: Callable[[Tensor], torch.optim.Optimizer],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return weights and both states of torch's AdamW, whose gradients are 0 where nothing was read."""
    leaf = weights.clone().requires_grad_()
    optimizer = make(leaf)
    for batch, grad in zip(batches, grads, strict=True):
        optimizer.zero_grad()
        embedding_bags(leaf, layout, *batch, backend=place.backend).backward(grad)
        optimizer.step()
    state = optimizer.state[leaf]
    return leaf.detach(), state["exp_avg"], state["exp_avg_sq"]


@pytest.mark.parametrize("gathered", GATHERINGS)
@pytest.mark.parametrize("beta1", [0.0, 0.75])
def test_missed_steps_are_those_of_dense_adam_but_for_its_moves(place: Place, gathered: str, beta1: float) -> None:
    """States are dense Adam's once a row is read; with a beta1 of 0, by which it does not move a row in between, weights, too."""
    seen = [([0, 1, 2], [0]), ([1], [3]), ([], []), ([0, 1], [0, 0, 0]), ([6], [1]), ([], [3]), ([0, 6, 5], [])]
    batches = [rows_of(LAYOUT, *rows) for rows in seen] + [every_row(LAYOUT)]
    grads = [gradient_of_bags(LAYOUT, step) for step in range(len(batches))]
    weights = random_tensor((LAYOUT.num_elements,), torch.float32, 0)
    betas = (beta1, 0.875)
    expected = dense_adam(
        place, LAYOUT, weights, batches, grads,
        lambda leaf: torch.optim.AdamW([leaf], lr=0.125, betas=betas, weight_decay=0.5),
    )  # fmt: skip
    optimizer = optimizer_of("adam", LAYOUT, weight_decay=0.5, betas=betas, **MISSED)
    with gathering(gathered):
        ours = trained(place, weights, optimizer, batches, grads)
    for number in range(2):
        tables = [LAYOUT.views(x)[number] for x in (ours, optimizer.first, optimizer.second, *expected)]
        torch.testing.assert_close(tables[1], tables[4])
        torch.testing.assert_close(tables[2], tables[5])
        if beta1:
            # It is not dense Adam.
            assert bool(((tables[0] - tables[3]).abs() > 1e-3).any())
        else:
            torch.testing.assert_close(tables[0], tables[3])
    assert optimizer.last is not None
    assert optimizer.last.tolist() == [len(batches)] * 11


@pytest.mark.parametrize("kind", ["adam", "rowwise_adam"])
def test_the_last_step_of_each_row(place: Place, kind: str) -> None:
    """Rows that were not read keep it, and a checkpoint has it: training goes on as if it had not stopped."""
    batches = [
        rows_of(LAYOUT, [0, 3, 3], [2]),
        rows_of(LAYOUT, [], []),
        rows_of(LAYOUT, [3], []),
        rows_of(LAYOUT, [0, 3], [2, 1]),
    ]
    grads = [gradient_of_bags(LAYOUT, step) for step in range(4)]
    weights = random_tensor((LAYOUT.num_elements,), torch.float32, 0)
    options = {"weight_decay": 0.5, **MISSED}
    first = optimizer_of(kind, LAYOUT, **options)
    half = trained(place, weights, first, batches[:3], grads[:3])
    assert first.last is not None
    assert first.last.dtype == torch.int64
    assert first.last.tolist() == [1, 0, 0, 3, 0, 0, 0, 0, 0, 1, 0]
    assert first.states_of["last"] == "row"
    assert first.state()["last"] is first.last
    second = optimizer_of(kind, LAYOUT, **options)
    for name, state in first.state().items():
        second.state()[name].copy_(state)
    others = [second, copy.deepcopy(first), pickle.loads(pickle.dumps(first))]
    whole = optimizer_of(kind, LAYOUT, **options)
    expected = trained(place, weights, whole, batches, grads)
    for other in others:
        assert torch.equal(trained(place, half, other, batches[3:], grads[3:]), expected)
        assert other.last is not None
        assert other.last.tolist() == [4, 0, 0, 4, 0, 0, 0, 0, 4, 4, 0]
    # Without the option a checkpoint is what it was.
    assert set(optimizer_of(kind, LAYOUT).state()) == {"learning_rate", "step", "first", "second"}


def test_decay_of_missed_steps_ends_at_zero(place: Place) -> None:
    """A rate by which one step takes a weight below 0 takes it to 0 in those that were missed, whatever their number."""
    weights = torch.ones(LAYOUT.num_elements, device=place.device)
    batches = [rows_of(LAYOUT, [0], []), rows_of(LAYOUT, [0], []), rows_of(LAYOUT, [1, 2], [])]
    grads = [torch.zeros(1, LAYOUT.width, device=place.device)] * 3
    optimizer = optimizer_of("adam", LAYOUT, weight_decay=1.5, **MISSED)
    ours = LAYOUT.views(trained(place, weights, optimizer, batches, grads, (0.0, 0.0, 1.0)))[0]
    assert bool((ours[0] == 1).all())
    assert bool((ours[1:3] == 0).all())
    assert bool((ours[3:] == 1).all())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_norm": 0.0}, ValueError, "max_norm: expected a number above 0, or None, got 0.0"),
        ({"max_norm": math.nan}, ValueError, "max_norm: expected a number above 0, or None, got nan"),
        ({"state_dtype": torch.float16}, TypeError, "state_dtype: expected torch.float32 or torch.bfloat16, got torch.float16"),
        (
            {"decoupled_weight_decay": True},
            ValueError,
            "decoupled_weight_decay: expected False for 'adam', got True; it is an option of adagrad and rowwise_adagrad, leave "
            "it out",
        ),
        (
            {"kind": "lamb", "decay_missed_steps": True},
            ValueError,
            "decay_missed_steps: expected False for 'lamb', got True; it is an option of adam and rowwise_adam, leave it out",
        ),
    ],
)
def test_messages_name_argument_and_cure(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        BagOptimizer(**{"kind": "adam", "layout": SHARED, "learning_rate": 0.1} | options)
