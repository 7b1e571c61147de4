"""Updates of embedding rows inside the backward pass against their formulas in float64, and against torch's own optimizers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from jagged.ops import BagLayout, BagOptimizer, embedding_bags
from jagged.ops.embedding_bag.optimizers import KINDS, STATES
from tests.gathering import GATHERINGS, gathering
from tests.graphs import captured
from tests.oracle import check_three_way
from tests.places import ONE_ORDER, PLACE, Place
from tests.reference.embedding_bag import gradients_of_rows, updated_row
from tests.strategies import random_tensor

ON_GPU = pytest.mark.gpu
ROUNDS = pytest.mark.skipif(PLACE.name == "interpret", reason="the interpreter cuts float32 off to make bfloat16 of it")
ON_TRITON = pytest.mark.skipif(PLACE.name == "cpu", reason="says something of the Triton kernels alone")
IS_SMALL = PLACE.name == "interpret"
# Two features share a table, one table is read by nobody, rows come again and again; one bag is long and some are empty.
SHARED = BagLayout((9, 3, 40), (4, 5, 33), (0, 2, 0))
LENGTHS = [[3, 0, 2], [1, 40 if not IS_SMALL else 9, 0], [2, 1, 6]]
# Powers of two, so that only the states round.
RATES = (0.125, 0.125, 0.03125)


def lookups_of(layout: BagLayout, lengths: Sequence[Sequence[int]], seed: int, highest: float = 0.7) -> tuple[Tensor, Tensor]:
    """Return ids and offsets; rows from `highest` of a table's on are never read."""
    assert layout.tables is not None
    generator = torch.Generator().manual_seed(seed)
    ids = [
        torch.randint(math.ceil(highest * layout.rows[table]), (sum(bags),), generator=generator)
        for table, bags in zip(layout.tables, lengths, strict=True)
    ]
    offsets = torch.tensor([0, *(length for bags in lengths for length in bags)]).cumsum(0)
    return torch.cat(ids).to(PLACE.device), offsets.to(PLACE.device)


def optimizer_of(kind: Any, layout: BagLayout, learning_rate: float = RATES[0], **options: Any) -> BagOptimizer:
    return BagOptimizer(kind, layout, learning_rate=learning_rate, device=PLACE.device, **options)


def trained(
    place: Place, weights: Tensor, optimizer: BagOptimizer, batches: Sequence[tuple[Tensor, Tensor]], grads: Sequence[Tensor],
    rates: Sequence[float] = (), **options: Any,
) -> Tensor:  # fmt: skip
    """Return weights after a step for each batch."""
    table = weights.detach().clone().requires_grad_()
    for step, ((ids, offsets), grad) in enumerate(zip(batches, grads, strict=True)):
        if rates:
            optimizer.learning_rate.fill_(rates[step])
        output = embedding_bags(table, optimizer.layout, ids, offsets, optimizer=optimizer, backend=place.backend, **options)
        output.backward(grad.to(output.dtype))
        assert table.grad is None
    return table.detach()


def by_hand(
    kind: str, layout: BagLayout, weights: Tensor, batches: Sequence[tuple[Tensor, Tensor]], grads: Sequence[Tensor],
    rates: Sequence[float], scales: Tensor | None = None, *, eps: float = 1e-8, betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 0.0, decoupled_weight_decay: bool = False, max_norm: float | None = None,
    decay_missed_steps: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return weights and states as the optimizer holds them, after a step for each batch."""
    steps_of_rows: dict[tuple[int, int], int] = {}
    wide = torch.promote_types(weights.dtype, torch.float32)
    assert layout.tables is not None
    assert layout.means is not None
    features = list(zip(layout.tables, layout.means, strict=True))
    weights = weights.detach().clone()
    lengths = {"": 0, "element": layout.num_elements, "row": layout.first_rows[-1]}
    states = [torch.zeros(lengths[of], dtype=wide, device=weights.device) for of in STATES[kind]]

    def parts(state: Tensor, of: str) -> list[Tensor]:
        if of == "element":
            return layout.views(state)
        return list(state.split(layout.rows)) if of == "row" else [weights.new_zeros(rows) for rows in layout.rows]

    tables, (firsts, seconds) = layout.views(weights), map(parts, states, STATES[kind])
    for step, ((ids, offsets), grad) in enumerate(zip(batches, grads, strict=True)):
        of_features = grad.to(wide).split(layout.feature_widths, 1)
        for number, (of_table, table, first, second) in enumerate(zip(
            gradients_of_rows(len(tables), features, ids, offsets, of_features, scales), tables, firsts, seconds, strict=True
        )):  # fmt: skip
            for row, of_row in of_table.items():
                missed = step - steps_of_rows.get((number, row), 0) if decay_missed_steps else 0
                steps_of_rows[number, row] = step + 1
                table[row], first[row], second[row] = updated_row(
                    kind, table[row].to(wide), first[row], second[row], of_row, step + 1, learning_rate=rates[step], eps=eps,
                    betas=betas, weight_decay=weight_decay, is_decoupled=decoupled_weight_decay, max_norm=max_norm,
                    missed=missed,
                )  # fmt: skip
    return weights, *states


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight_decay", [0.0, 0.25])
def test_three_way(place: Place, kind: str, dtype: torch.dtype, weight_decay: float) -> None:
    """Three steps at rates that change: the weights and each state."""
    if IS_SMALL and dtype == torch.float16:
        pytest.skip("covered by the other places")
    batches = [lookups_of(SHARED, LENGTHS, seed) for seed in range(3)]
    grads = [random_tensor((3, SHARED.width), torch.float32, 10 + step) for step in range(3)]
    weights = random_tensor((SHARED.num_elements,), dtype, 0)
    kept: dict[str, tuple[Tensor, ...]] = {}
    for part in range(1 + sum(bool(of) for of in STATES[kind])):

        def ours(weights: Tensor, *grads: Tensor, part: int = part) -> Tensor:
            if "ours" not in kept:
                optimizer = optimizer_of(kind, SHARED, weight_decay=weight_decay)
                result = trained(place, weights, optimizer, batches, grads, RATES)
                assert int(optimizer.step) == 3
                kept["ours"] = result, optimizer.first, optimizer.second
            return kept["ours"][part]

        def written_out(weights: Tensor, *grads: Tensor, part: int = part) -> Tensor:
            return by_hand(kind, SHARED, weights, batches, grads, RATES, weight_decay=weight_decay)[part]

        # Of Adam the second state, of row-wise Adagrad the first, of SGD none.
        check_three_way(ours, written_out, [weights, *grads], requires_grad=[False] * 4)


@pytest.mark.parametrize("kind", ["sgd", "rowwise_adagrad", "adam"])
@pytest.mark.parametrize("options", ["weighted", "means", "sizes", "low"])
@pytest.mark.parametrize("gathered", GATHERINGS)
def test_three_way_of_other_bags(place: Place, kind: str, options: str, gathered: str) -> None:
    """Weights of lookups, means, features with batches of their own, and gradients in the dtype of the tables."""
    layout = BagLayout((9, 300), (4, 18), (0, 1, 0), (False, True, True) if options == "means" else None)
    lengths = [[3, 0, 2], [1, 12, 0], [2, 1, 3]] if options != "sizes" else [[3], [1, 12, 0], []]
    ids, offsets = lookups_of(layout, lengths, 1)
    samples = random_tensor(tuple(ids.shape), torch.float32, 2) if options == "weighted" else None
    dtype = torch.bfloat16 if options == "low" else torch.float32
    weights, grad = random_tensor((layout.num_elements,), dtype, 0), random_tensor((3, layout.width), dtype, 5)
    sizes = [len(bags) for bags in lengths]

    def ours(weights: Tensor, grad: Tensor, *samples: Tensor) -> Tensor:
        if options == "sizes":
            grad = torch.cat([x[:size].flatten() for x, size in zip(grad.split((4, 18, 4), 1), sizes, strict=True)])
        return trained(
            place, weights, optimizer_of(kind, layout), [(ids, offsets)], [grad], output_dtype=dtype,
            batch_sizes=sizes if options == "sizes" else None, per_sample_weights=samples[0] if samples else None,
        )  # fmt: skip

    def written_out(weights: Tensor, grad: Tensor, *samples: Tensor) -> Tensor:
        ends = offsets
        if options == "sizes":
            # The same bags with empty ones behind them.
            full = [[*bags, 0, 0, 0][:3] for bags in lengths]
            ends = torch.tensor([0, *(length for bags in full for length in bags)]).cumsum(0)
        return by_hand(kind, layout, weights, [(ids, ends)], [grad], RATES, *samples)[0]

    inputs = [weights, grad, *([] if samples is None else [samples])]
    with gathering(gathered):
        check_three_way(ours, written_out, inputs, requires_grad=[False] * len(inputs))


@pytest.mark.skipif(PLACE.name != "cpu", reason="float64 is PyTorch's")
def test_tables_in_float64_keep_their_precision(place: Place) -> None:
    batches, grads = [lookups_of(SHARED, LENGTHS, 0)], [random_tensor((3, SHARED.width), torch.float64, 1)]
    weights = random_tensor((SHARED.num_elements,), torch.float64, 0)
    for output_dtype in (torch.float32, torch.float64):
        ours = trained(place, weights, optimizer_of("sgd", SHARED), batches, grads, output_dtype=output_dtype)
        expected, *_ = by_hand("sgd", SHARED, weights, batches, [grads[0].to(output_dtype).double()], RATES)
        torch.testing.assert_close(ours, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_are_not_read_stay(place: Place, kind: str, dtype: torch.dtype) -> None:
    """With their states, and whatever they hold; and all of them where a batch is empty."""
    weights = random_tensor((SHARED.num_elements,), dtype, 0)
    ids, offsets = lookups_of(SHARED, LENGTHS, 1)
    is_read = torch.zeros(SHARED.num_elements, dtype=torch.bool, device=place.device)
    assert SHARED.tables is not None
    rows_read = torch.zeros(SHARED.first_rows[-1], dtype=torch.bool, device=place.device)
    for feature, table in enumerate(SHARED.tables):
        of_feature = ids[offsets[3 * feature] : offsets[3 * feature + 3]]
        SHARED.views(is_read)[table][of_feature] = True
        rows_read[SHARED.first_rows[table] + of_feature] = True
    weights[~is_read] = float("nan")
    optimizer = optimizer_of(kind, SHARED, weight_decay=0.5, stochastic_rounding=True)
    before = [state.fill_(0.5).clone() for state in (optimizer.first, optimizer.second)]
    after = trained(place, weights, optimizer, [(ids, offsets)], [random_tensor((3, SHARED.width), torch.float32, 2)])
    assert after[~is_read].isnan().all()
    assert after[is_read].isfinite().all()
    assert (after[is_read] != weights[is_read]).float().mean() > 0.9
    for state, old, of in zip((optimizer.first, optimizer.second), before, STATES[kind], strict=True):
        if of:
            was_read = is_read if of == "element" else rows_read
            assert torch.equal(state[~was_read], old[~was_read])
            assert (state[was_read] != old[was_read]).all()
    for bags in (0, 3):
        # Nothing is looked up.
        nothing = ids[:0], torch.zeros(3 * bags + 1, dtype=torch.int64, device=place.device)
        states = [state.clone() for state in (optimizer.first, optimizer.second)]
        same = trained(place, weights, optimizer, [nothing], [torch.ones(bags, SHARED.width, device=place.device)])
        torch.testing.assert_close(same, weights, rtol=0, atol=0, equal_nan=True)
        assert all(map(torch.equal, states, (optimizer.first, optimizer.second)))
    assert int(optimizer.step) == 3


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("sgd", lambda leaf, decay: torch.optim.SGD([leaf], lr=0.125, weight_decay=decay)),
        ("adagrad", lambda leaf, decay: torch.optim.Adagrad([leaf], lr=0.125, weight_decay=decay, eps=1e-8)),
        ("adam", lambda leaf, decay: torch.optim.AdamW([leaf], lr=0.125, weight_decay=decay)),
    ],
)
@pytest.mark.parametrize("weight_decay", [0.0, 0.25])
def test_torch_optimizers(place: Place, kind: str, make: Callable[..., torch.optim.Optimizer], weight_decay: float) -> None:
    """Where every row is read at every step, it is what torch's own optimizer does with the gradient of the tables."""
    layout = BagLayout((7, 4), (4, 8), (0, 1, 0))
    every = torch.cat([torch.arange(7), torch.arange(4), torch.tensor([1, 1, 2])]).to(place.device)
    offsets = torch.tensor([0, 3, 7, 9, 11, 12, 14], device=place.device)
    weights = random_tensor((layout.num_elements,), torch.float32, 0)
    leaf = weights.clone().requires_grad_()
    theirs, grads = make(leaf, weight_decay), []
    for step in range(4):
        grads.append(random_tensor((2, layout.width), torch.float32, step))
        theirs.zero_grad()
        embedding_bags(leaf, layout, every, offsets, backend=place.backend).backward(grads[-1])
        theirs.step()
    ours = trained(place, weights, optimizer_of(kind, layout, weight_decay=weight_decay), [(every, offsets)] * 4, grads)
    for table, expected in zip(layout.views(ours), layout.views(leaf.detach()), strict=True):
        torch.testing.assert_close(table, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_two_forwards_before_the_first_backward(place: Place, kind: str) -> None:
    """As with gradients that are added up: each backward is a step."""
    batches = [lookups_of(SHARED, LENGTHS, seed) for seed in range(2)]
    grads = [random_tensor((3, SHARED.width), torch.float32, seed) for seed in range(2)]
    weights = random_tensor((SHARED.num_elements,), torch.float32, 0)
    optimizers = [optimizer_of(kind, SHARED) for _ in range(2)]
    expected = trained(place, weights, optimizers[0], batches, grads)
    table = weights.clone().requires_grad_()
    outputs = [embedding_bags(table, SHARED, *batch, optimizer=optimizers[1], backend=place.backend) for batch in batches]
    for output, grad in zip(outputs, grads, strict=True):
        output.backward(grad)
    assert torch.equal(table, expected)
    for name, state in optimizers[0].state().items():
        assert torch.equal(state, optimizers[1].state()[name])


def test_gradients_beside_an_update(place: Place) -> None:
    """Those of the lookups' weights are of the tables as forward read them; without a gradient of the tables nothing changes."""
    ids, offsets = lookups_of(SHARED, LENGTHS, 0)
    weights, samples = (random_tensor(shape, torch.float32, 0) for shape in ((SHARED.num_elements,), tuple(ids.shape)))
    grads = []
    for optimizer in (None, optimizer_of("sgd", SHARED)):
        leaf, table = samples.clone().requires_grad_(), weights.clone().requires_grad_()
        output = embedding_bags(table, SHARED, ids, offsets, per_sample_weights=leaf, optimizer=optimizer, backend=place.backend)
        output.square().sum().backward()
        grads.append(leaf.grad)
        assert torch.equal(table, weights) == (optimizer is None)
    assert torch.equal(*grads)


@pytest.mark.parametrize("weighted", [False, True])
def test_an_optimizer_of_frozen_tables_is_refused_where_gradients_are_recorded(place: Place, weighted: bool) -> None:
    """It would train nothing; where none are recorded, as in inference, nothing is due."""
    ids, offsets = lookups_of(SHARED, LENGTHS, 0)
    weights = random_tensor((SHARED.num_elements,), torch.float32, 0)
    before, optimizer = weights.clone(), optimizer_of("sgd", SHARED)
    leaf = torch.ones(ids.shape[0], device=place.device, requires_grad=True) if weighted else None

    def call() -> Tensor:
        return embedding_bags(
            weights, SHARED, ids, offsets, per_sample_weights=leaf, optimizer=optimizer, backend=place.backend
        )  # fmt: skip

    message = (
        "optimizer: weights do not require a gradient, so nothing would be updated; call weights.requires_grad_(), or leave the "
        "optimizer out"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        call()
    for recording in (torch.no_grad, torch.inference_mode):
        with recording():
            plain = call()
            weights.requires_grad_()
            assert torch.equal(call(), plain)
            weights.requires_grad_(False)
    assert torch.equal(weights, before)
    assert int(optimizer.step) == 0


@ON_TRITON
@pytest.mark.parametrize("kind", KINDS)
def test_unknown_ids_update_nothing(place: Place, unchecked: None, kind: str) -> None:
    layout = BagLayout((9, 5), (4, 19))
    good, offsets = lookups_of(layout, [[3, 1], [1, 4]], 0, 1.0)
    bad = torch.tensor([-1, 9, 2**40, -(2**62)], device=place.device)
    ids = torch.cat([good[:4], bad, good[4:], bad.clamp(max=5)])
    longer = offsets + torch.tensor([0, 0, 4, 4, 8], device=place.device)
    weights, grads = random_tensor((layout.num_elements,), torch.float32, 0), [random_tensor((2, 23), torch.float32, 1)]
    results = []
    for batch in ((ids, longer), (good, offsets)):
        optimizer = optimizer_of(kind, layout)
        results.append([trained(place, weights, optimizer, [batch], grads), optimizer.first, optimizer.second])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(
    ("kind", "options", "needed", "cure"),
    [
        ("rowwise_adagrad", {}, "rowwise_adagrad", "take adagrad"),
        ("rowwise_adam", {}, "rowwise_adam", "take adam"),
        ("lamb", {}, "lamb", "take adam"),
        ("rowwise_lamb", {"max_norm": 1.0}, "rowwise_lamb", "take adam"),
        ("sgd", {"max_norm": 1.0}, "max_norm", "leave it out"),
        ("adam", {"decay_missed_steps": True}, "decay_missed_steps", "leave it out"),
    ],
)
def test_rows_of_more_columns_than_a_program_holds(
    place: Place, kind: str, options: dict[str, Any], needed: str, cure: str
) -> None:
    layout = BagLayout((2,), (8193,))
    weights = random_tensor((layout.num_elements,), torch.float32, 0).requires_grad_()
    ids, offsets = (torch.tensor(numbers, device=place.device) for numbers in ([1], [0, 1]))
    optimizer = optimizer_of(kind, layout, **options)
    output = embedding_bags(weights, layout, ids, offsets, optimizer=optimizer, backend=place.backend)
    if place.name == "cpu":
        output.sum().backward()
        return
    expected = f"layout: expected at most 8,192 columns for {needed} on a GPU, got 8,193; {cure}"
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        output.sum().backward()


@pytest.mark.skipif(PLACE.name == "cpu", reason="says something of the Triton kernels alone")
@pytest.mark.parametrize(
    ("kind", "options"),
    [*((kind, {}) for kind in KINDS), ("sgd", {"max_norm": 9.0}), ("adam", {"max_norm": 9.0, "decay_missed_steps": True})],
)
def test_rows_of_many_lookups_are_updated_once(
    place: Place, kind: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their gradients are summed in parts, of eight lookups here, before anything is done with them; sorted or counted."""
    from jagged.ops.embedding_bag.triton import sorting

    layout = BagLayout((2, 40), (140, 8))
    lengths = [[7, 20, 3, 0], [13, 1, 0, 5]] if IS_SMALL else [[7, 20, 3, 9], [30, 1, 25, 5]]
    steps = range(2 if IS_SMALL else 3)
    batches = [lookups_of(layout, lengths, seed) for seed in steps]
    grads = [random_tensor((4, layout.width), torch.float32, seed) for seed in steps]
    weights = random_tensor((layout.num_elements,), torch.float32, 0)
    results = []
    monkeypatch.setattr(sorting, "GROUPED_BLOCKS", 2)
    for way, size, grouped in (
        ("sorted", 128, 2**30),
        ("sorted", 8, 2**30),
        ("sorted", 8, 1),
        ("counted", None, 1),
        ("counted", 8, 1),
    ):
        if way == "sorted":
            monkeypatch.setattr(sorting, "BLOCKS", ((2**62, size),))
            monkeypatch.setattr(sorting, "FEWEST_GROUPED", grouped)
        optimizer = optimizer_of(kind, layout, weight_decay=0.125, **options)
        with gathering(way, long=size):
            results.append([trained(place, weights, optimizer, batches, grads), optimizer.first, optimizer.second])
    for result in results[1:]:
        for in_parts, whole in zip(result, results[0], strict=True):
            torch.testing.assert_close(in_parts, whole)


@ONE_ORDER
@pytest.mark.parametrize("kind", KINDS)
def test_repeats_are_bit_for_bit_equal(place: Place, kind: str) -> None:
    torch.use_deterministic_algorithms(False)
    scale = {"cpu": 10, "gpu": 300}[place.name]
    lengths = [bags * scale for bags in LENGTHS]
    batches = [lookups_of(SHARED, lengths, seed) for seed in range(2)]
    grads = [random_tensor((3 * scale, SHARED.width), torch.float32, seed) for seed in range(2)]
    weights = random_tensor((SHARED.num_elements,), torch.bfloat16, 0)
    results = []
    for _ in range({"cpu": 5, "gpu": 50}[place.name]):
        optimizer = optimizer_of(kind, SHARED, stochastic_rounding=True)
        results.append([trained(place, weights, optimizer, batches, grads), optimizer.first, optimizer.second])
    for result in results[1:]:
        for got, expected in zip(result, results[0], strict=True):
            assert torch.equal(got, expected)


def one_step_below_one(
    place: Place, fraction: float, *, step: int = 0, dtype: torch.dtype = torch.bfloat16, **options: Any
) -> Tensor:
    """Return a table of ones after a step down by a fraction of the 2^-8 to the next number of bfloat16, `[rows, 16]`."""
    rows = 64 if IS_SMALL else 4096
    layout = BagLayout((rows,), (16,))
    optimizer = optimizer_of("sgd", layout, 1.0, **options)
    optimizer.step.fill_(step)
    ids = torch.arange(rows, device=place.device), torch.arange(rows + 1, device=place.device)
    grads = [torch.full((rows, 16), fraction * 2.0**-8, device=place.device)]
    return trained(place, torch.ones(rows * 16, dtype=dtype, device=place.device), optimizer, [ids], grads).view(rows, 16)


@pytest.mark.parametrize("fraction", [0.25, 0.5, 0.9])
def test_stochastic_rounding_is_unbiased(place: Place, fraction: float) -> None:
    """Down as often as the fraction says: six deviations at most, of all elements, of each column and of many rows."""
    is_down = one_step_below_one(place, fraction, stochastic_rounding=True).float()
    assert set(is_down.unique().tolist()) == {1.0, 1 - 2.0**-8}
    is_down = is_down < 1
    deviation = math.sqrt(fraction * (1 - fraction))
    for part in (is_down.flatten()[None], is_down.t(), is_down.view(16, -1)):
        error = (part.double().mean(1) - fraction).abs().max()
        assert error < 6 * deviation / math.sqrt(part.shape[1])
    # Neighbours in a row, in a column, and at the next step do not follow one another.
    other = one_step_below_one(place, fraction, stochastic_rounding=True, step=1) < 1
    both = [(is_down[:, :-1], is_down[:, 1:]), (is_down[:-1], is_down[1:]), (is_down, other)]
    for a, b in both:
        together = (a & b).double().mean() - fraction**2
        assert together.abs() < 6 / math.sqrt(a.numel())


def test_stochastic_rounding_can_be_repeated(place: Place) -> None:
    first, again, later = (
        one_step_below_one(place, 0.5, stochastic_rounding=True, step=step) for step in (2**20, 2**20, 2**20 + 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, later)
    # Tables beside one another do not follow one another either.
    layout = BagLayout((50, 50), (16, 16))
    batch = torch.arange(100, device=place.device) % 50, torch.arange(101, device=place.device)
    grads = [torch.full((50, 32), 2.0**-9, device=place.device)]
    ones = torch.ones(layout.num_elements, dtype=torch.bfloat16, device=place.device)
    optimizer = optimizer_of("sgd", layout, 1.0, stochastic_rounding=True)
    assert not torch.equal(*layout.views(trained(place, ones, optimizer, [batch], grads)))


@ROUNDS
def test_small_updates_are_lost_without_stochastic_rounding(place: Place) -> None:
    assert (one_step_below_one(place, 0.25) == 1).all()
    # Other dtypes round to nearest, asked or not.
    for dtype in (torch.float16, torch.float32):
        rounded, plain = (one_step_below_one(place, 0.3, dtype=dtype, stochastic_rounding=on) for on in (True, False))
        assert torch.equal(rounded, plain)


def test_stochastic_rounding_keeps_what_bfloat16_has(place: Place) -> None:
    """Numbers that need no rounding, infinities and NaN; rounding down of negative numbers is away from 0."""
    assert (one_step_below_one(place, 2.0, stochastic_rounding=True) == 1 - 2.0**-7).all()
    layout = BagLayout((2,), (4,))
    optimizer = optimizer_of("sgd", layout, 1.0, stochastic_rounding=True)
    numbers = torch.tensor([[math.inf, -math.inf, math.nan, 3.5], [-2.0, 0.0, 2.0**-120, 2.0**127]], device=place.device)
    # GPUs' own NaN has every bit: one more would make a zero of it.
    numbers[0, 2] = torch.tensor(2**31 - 1, dtype=torch.int32, device=place.device).view(torch.float32)
    ids = torch.tensor([0, 1], device=place.device), torch.tensor([0, 1, 2], device=place.device)
    after = trained(place, torch.zeros(8, dtype=torch.bfloat16, device=place.device), optimizer, [ids], [numbers])
    torch.testing.assert_close(after.view(2, 4).float(), -numbers, rtol=0, atol=0, equal_nan=True)


@ON_TRITON
def test_kernels_round_as_pytorch_does(place: Place) -> None:
    """By the same noise of the same step and element."""
    layout = BagLayout((40, 30), (5, 16))
    # Rows come twice.
    ids, offsets = torch.arange(70, device=place.device) % 30, torch.tensor([0, 40, 70], device=place.device)
    weights = torch.ones(layout.num_elements, dtype=torch.bfloat16, device=place.device)
    results = []
    for backend in ("torch", "triton"):
        optimizer = optimizer_of("sgd", layout, 1.0, stochastic_rounding=True)
        table = weights.clone().requires_grad_()
        for step in range(2):
            output = embedding_bags(table, layout, ids, offsets, optimizer=optimizer, backend=backend)
            output.backward(torch.full_like(output, (step + 1) * 2.0**-10))
        results.append(table.detach())
    assert torch.equal(*results)


@ROUNDS
def test_bfloat16_follows_float32_with_stochastic_rounding(place: Place) -> None:
    """Over many small steps: its mean does, where rounding to nearest stands still."""
    steps = 8 if IS_SMALL else 40
    layout = BagLayout((32,), (16,))
    batch = torch.arange(32, device=place.device), torch.arange(33, device=place.device)
    grads = [torch.full((32, 16), 2.0**-11, device=place.device)] * steps
    means = []
    for stochastic, dtype in ((True, torch.bfloat16), (False, torch.bfloat16), (False, torch.float32)):
        optimizer = optimizer_of("sgd", layout, 1.0, stochastic_rounding=stochastic)
        weights = torch.ones(layout.num_elements, dtype=dtype, device=place.device)
        means.append(float(trained(place, weights, optimizer, [batch] * steps, grads).double().mean()))
    assert means[1] == 1.0
    # One step errs by at most the 2^-8 between numbers, half of it in deviation.
    assert abs(means[0] - means[2]) < 6 * 2.0**-9 * math.sqrt(steps / 512)


def test_states() -> None:
    layout = BagLayout((10, 5), (4, 3))
    lengths = {kind: (len(x.first), len(x.second)) for kind in KINDS for x in [BagOptimizer(kind, layout, learning_rate=0.1)]}
    expected = {"sgd": (0, 0), "adagrad": (63, 0), "rowwise_adagrad": (15, 0), "adam": (63, 63), "rowwise_adam": (63, 15)}
    expected |= {"lamb": (63, 63), "rowwise_lamb": (63, 15)}
    assert lengths == expected
    optimizer = BagOptimizer("adam", layout, learning_rate=0.5, device="meta")
    assert {name: (x.dtype, x.device.type) for name, x in optimizer.state().items()} == {
        "learning_rate": (torch.float32, "meta"),
        "step": (torch.int64, "meta"),
        "first": (torch.float32, "meta"),
        "second": (torch.float32, "meta"),
    }


def test_training_goes_on_from_its_states(place: Place) -> None:
    """What `state` returns is all that a checkpoint needs."""
    batches = [lookups_of(SHARED, LENGTHS, seed) for seed in range(2)]
    grads = [random_tensor((3, SHARED.width), torch.float32, seed) for seed in range(2)]
    weights = random_tensor((SHARED.num_elements,), torch.bfloat16, 0)
    options = {"stochastic_rounding": True, "weight_decay": 0.25}
    expected = trained(place, weights, optimizer_of("rowwise_adam", SHARED, **options), batches, grads)
    first = optimizer_of("rowwise_adam", SHARED, **options)
    half = trained(place, weights, first, batches[:1], grads[:1])
    second = optimizer_of("rowwise_adam", SHARED, 7.0, **options)
    for name, state in first.state().items():
        second.state()[name].copy_(state)
    assert torch.equal(trained(place, half, second, batches[1:], grads[1:]), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"kind": "lars"},
            "kind: got 'lars', expected one of sgd, adagrad, rowwise_adagrad, adam, rowwise_adam, lamb, rowwise_lamb",
        ),
        ({"learning_rate": -0.1}, "learning_rate: expected a number of at least 0, got -0.1"),
        ({"learning_rate": math.nan}, "learning_rate: expected a number of at least 0, got nan"),
        ({"eps": 0.0}, "eps: expected a number above 0, got 0.0"),
        ({"betas": (0.9, 1.0)}, r"betas: expected two numbers in \[0, 1\), got \(0.9, 1.0\)"),
        ({"betas": (0.9,)}, r"betas: expected two numbers in \[0, 1\), got \(0.9,\)"),
        ({"weight_decay": -1.0}, "weight_decay: expected a number of at least 0, got -1.0"),
    ],
)
def test_messages_name_argument_and_cure(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BagOptimizer(**{"kind": "adam", "layout": SHARED, "learning_rate": 0.1} | options)


@ON_GPU
@pytest.mark.parametrize("kind", KINDS)
def test_no_synchronisation_and_graph_capture(place: Place, kind: str) -> None:
    """A captured step goes on with new lookups, at a rate that changes."""
    lengths = [bags * 50 for bags in LENGTHS]
    # As many lookups in every batch, in bags of other lengths.
    batches = [lookups_of(SHARED, [bags[shift:] + bags[:shift] for bags in lengths], shift) for shift in range(4)]
    weights = random_tensor((SHARED.num_elements,), torch.bfloat16, 0)
    grad = random_tensor((150, SHARED.width), torch.float32, 1)
    tables = [weights.clone().requires_grad_() for _ in range(2)]
    optimizers = [optimizer_of(kind, SHARED, stochastic_rounding=True, weight_decay=0.25) for _ in range(2)]
    ids, offsets = (x.clone() for x in batches[0])

    def step(index: int) -> None:
        output = embedding_bags(tables[index], SHARED, ids, offsets, optimizer=optimizers[index])
        output.backward(grad)

    graph, _ = captured(lambda: step(0))
    with torch.no_grad():
        tables[1].copy_(tables[0])
        for mine, other in zip(optimizers[1].state().values(), optimizers[0].state().values(), strict=True):
            mine.copy_(other)
    for rate, batch in zip((0.125, 0.5, 0.0, 0.25), batches, strict=True):
        for buffer, new in zip((ids, offsets), batch, strict=True):
            buffer.copy_(new)
        for optimizer in optimizers:
            optimizer.learning_rate.fill_(rate)
        graph.replay()
        step(1)
        assert torch.equal(*tables)
        for mine, other in zip(optimizers[1].state().values(), optimizers[0].state().values(), strict=True):
            assert torch.equal(mine, other)


def test_a_layout_without_features(place: Place) -> None:
    """Nothing is read, and nothing is updated."""
    layout = BagLayout((3,), (4,), ())
    optimizer = BagOptimizer("adam", layout, learning_rate=0.1, device=place.device)
    weights = torch.ones(layout.num_elements, device=place.device, requires_grad=True)
    nothing = torch.zeros(0, dtype=torch.int64, device=place.device)
    output = embedding_bags(weights, layout, nothing, nothing.new_zeros(1), optimizer=optimizer, backend=place.backend)
    output.sum().backward()
    assert bool((weights == 1).all())


@pytest.mark.skipif(PLACE.name != "cpu", reason="the same everywhere")
@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_states_are_float32_under_any_default_dtype(default: torch.dtype) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        optimizer = BagOptimizer("rowwise_adam", SHARED, learning_rate=0.1)
    finally:
        torch.set_default_dtype(before)
    assert {name: state.dtype for name, state in optimizer.state().items()} == {
        "learning_rate": torch.float32, "step": torch.int64, "first": torch.float32, "second": torch.float32,
    }  # fmt: skip


def test_gradients_of_weights_behind_another_update_are_refused(place: Place) -> None:
    """Two lookups in one backward: the second one's update comes before the first one's gradient of its ids' weights."""
    ids, offsets = lookups_of(SHARED, LENGTHS, 0)
    optimizer = optimizer_of("sgd", SHARED)
    table = random_tensor((SHARED.num_elements,), torch.float32, 0).requires_grad_()
    samples = [random_tensor(tuple(ids.shape), torch.float32, seed).requires_grad_() for seed in range(2)]
    outputs = [
        embedding_bags(
            table, SHARED, ids, offsets, per_sample_weights=weights, optimizer=optimizer, backend=place.backend
        ).sum()
        for weights in samples
    ]  # fmt: skip
    message = (
        "per_sample_weights: their gradient needs the tables as forward read them, but an update has changed them since; "
        "look all ids up in one call of embedding_bags, or call backward of one lookup before the next is made"
    )
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"):
        sum(outputs, torch.zeros((), device=place.device)).backward()


@pytest.mark.skipif(PLACE.name != "cpu", reason="on a GPU the assertion ends the process's use of it")
@pytest.mark.skipif(torch.__version__ < "2.12", reason="PyTorch 2.11 compiles no backward pass that changes a parameter")
def test_gradients_of_weights_behind_another_update_are_refused_in_one_graph(place: Place) -> None:
    ids, offsets = lookups_of(SHARED, LENGTHS, 0)
    optimizer = optimizer_of("sgd", SHARED)
    table = random_tensor((SHARED.num_elements,), torch.float32, 0).requires_grad_()
    samples = [random_tensor(tuple(ids.shape), torch.float32, seed).requires_grad_() for seed in range(2)]

    def pooled(table: Tensor, *samples: Tensor) -> Tensor:
        outputs = [embedding_bags(table, SHARED, ids, offsets, per_sample_weights=of, optimizer=optimizer) for of in samples]
        return torch.cat(outputs).sum()

    compiled = torch.compile(pooled, fullgraph=True, backend="aot_eager")
    compiled(table, samples[0]).backward()
    assert int(optimizer.step) == 1
    with pytest.raises(RuntimeError, match=r"^per_sample_weights: their gradient needs the tables as forward read them"):
        compiled(table, *samples).backward()
