"""Heads against the whole matrix of logits, and targets made from sequences."""

from __future__ import annotations

import functools
import re
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor

from jagged.modules import (
    CutCrossEntropyHead,
    InBatchSampler,
    ItemMasking,
    LogUniformSampler,
    MixedSampler,
    PopularitySampler,
    RowSplit,
    SampledCrossEntropyHead,
    Sampler,
    ScalableCrossEntropyHead,
    UniformSampler,
    next_item_targets,
)
from jagged.ops import Draw, drawn_negatives, linear_cross_entropy
from tests.oracle import check_three_way
from tests.places import PLACE, Place
from tests.reference import cross_entropy, sampled_cross_entropy
from tests.strategies import Jagged, jagged_batches, jagged_of, random_tensor, seeds

DIM, ITEMS = 12, 17

pytestmark = pytest.mark.skipif(PLACE.name == "interpret", reason="modules run on the place's own backend")

OPTIONS: list[dict[str, Any]] = [
    {"softcap": 3.0, "temperature": 0.5},
    {"normalize": True, "temperature": 0.1},
    {"label_smoothing": 0.2, "z_loss": 1e-2},
    {"class_weight": torch.rand(ITEMS, generator=torch.Generator().manual_seed(1))},
    {"strategy": "chunked", "memory_budget": 2**12},
    {"filter_eps": 0.0},
]
LOSSES: list[dict[str, Any]] = [
    {"loss": "softmax", "correction": "none", "temperature": 0.5},
    {"loss": "softmax", "correction": "negatives", "positive": "outside"},
    {"loss": "softmax", "correction": "both", "mask_hits": False},
    {"loss": "refined", "correction": "negatives"},
    {"loss": "bce", "correction": "none"},
]
OF_FIXED_COUNT: list[dict[str, Any]] = [
    {"loss": "gbce", "correction": "none", "gbce_t": 0.3},
    {"loss": "softmax", "correction": "none", "renormalise": True},
]


def jagged(values: Tensor, batch: Jagged) -> JaggedTensor:
    return JaggedTensor(values=values, offsets=batch.offsets)


def targets_for(batch: Jagged, seed: int, ignore: bool, ignored: int = -100) -> Tensor:
    targets = torch.randint(ITEMS, (batch.total,), generator=torch.Generator().manual_seed(seed)).to(PLACE.device)
    if ignore:
        targets[::3] = ignored
    return targets


def counts() -> Tensor:
    return torch.arange(ITEMS, device=PLACE.device) ** 2 + 1


def samplers() -> dict[str, Sampler]:
    return {
        "uniform": UniformSampler(ITEMS, 6),
        "shared": UniformSampler(ITEMS, 6, rows_per_draw=None),
        "distinct": UniformSampler(ITEMS, 6, rows_per_draw=4, replacement=False),
        "log-uniform": LogUniformSampler(ITEMS, 6),
        "popularity": PopularitySampler(counts(), 6, power=0.5),
        "in-batch": InBatchSampler(counts()),
        "mixed": MixedSampler(InBatchSampler(counts()), PopularitySampler(counts(), 6, rows_per_draw=None)),
    }


def written_out(sampler: Sampler, targets: Tensor, ignored: int) -> tuple[Tensor, Tensor, Tensor]:
    """The negatives of every row, `[N, ns]`, their logarithms of probabilities, and those of the targets."""
    negatives, rows = sampler(targets, ignore_index=ignored), len(targets)
    if not isinstance(negatives.negatives, Draw):
        assert negatives.negative_log_q is not None
        assert negatives.target_log_q is not None
        return (
            negatives.negatives.expand(rows, -1),
            negatives.negative_log_q.expand(rows, -1),
            negatives.target_log_q,
        )
    draw = negatives.negatives
    ids = drawn_negatives(draw, max(rows, 1), ITEMS)
    ids = ids.repeat_interleave(rows if draw.rows_per_draw is None else draw.rows_per_draw, 0)[:rows]
    items = torch.arange(ITEMS, device=targets.device, dtype=torch.float64)
    q = torch.full_like(items, 1 / ITEMS)
    if draw.kind == "log_uniform":
        q = ((items + 2) / (items + 1)).log() / torch.tensor(ITEMS + 1.0, dtype=torch.float64).log()
    elif draw.kind == "popularity":
        q = counts().double() ** cast(PopularitySampler, sampler).power
    log_q = (q / q.sum()).log()
    return ids, log_q[ids], log_q[targets.clamp(0, ITEMS - 1)]


@settings(max_examples=20)
@given(jagged_batches(longest=20), seeds(), st.booleans(), st.booleans(), st.sampled_from(OPTIONS))
def test_options_of_the_cut_head(
    place: Place, batch: Jagged, seed: int, ignore: bool, with_bias: bool, options: dict[str, Any]
) -> None:
    head = CutCrossEntropyHead(**options).to(place.device)
    targets = targets_for(batch, seed, ignore)
    inputs = [random_tensor((batch.total, DIM), torch.float32, seed), random_tensor((ITEMS, DIM), torch.float32, seed + 1)]
    inputs += [random_tensor((ITEMS,), torch.float32, seed + 2)] if with_bias else []
    known = {name: value for name, value in options.items() if name not in ("strategy", "memory_budget", "filter_eps")}
    if head.class_weight is not None:
        known["class_weight"] = head.class_weight

    def reference(hidden: Tensor, weight: Tensor, *bias: Tensor) -> Tensor:
        return cross_entropy.linear_cross_entropy(hidden, weight, targets, bias=bias[0] if bias else None, **known)[0]

    check_three_way(lambda h, w, *b: head(jagged(h, batch), w, targets, bias=b[0] if b else None).loss, reference, inputs)


@settings(max_examples=20)
@given(jagged_batches(longest=20), seeds(), st.booleans(), st.sampled_from(OPTIONS))
def test_logits_are_those_of_the_targets(
    place: Place, batch: Jagged, seed: int, with_bias: bool, options: dict[str, Any]
) -> None:
    head = CutCrossEntropyHead(**options).to(place.device)
    targets = targets_for(batch, seed, ignore=True)
    inputs = [random_tensor((batch.total, DIM), torch.float32, seed), random_tensor((ITEMS, DIM), torch.float32, seed + 1)]
    inputs += [random_tensor((ITEMS,), torch.float32, seed + 2)] if with_bias else []

    def reference(hidden: Tensor, weight: Tensor, *bias: Tensor) -> Tensor:
        if options.get("normalize"):
            hidden, weight = (torch.nn.functional.normalize(x, dim=1) for x in (hidden, weight))
        logits = torch.nn.functional.linear(hidden, weight, *bias)
        if "softcap" in options:
            logits = options["softcap"] * torch.tanh(logits / options["softcap"])
        logits = logits / options.get("temperature", 1.0)
        return torch.where(targets == -100, 0, logits.gather(1, targets.clamp(min=0)[:, None])[:, 0])

    hidden, weight, *bias = (x.requires_grad_() for x in inputs)
    found = head(jagged(hidden, batch), weight, targets, bias=bias[0] if with_bias else None).logits
    assert not found.requires_grad
    _, of_operator = linear_cross_entropy(
        hidden, weight, targets, bias=bias[0] if with_bias else None, return_target_logit=True,
        **{name: value for name, value in options.items() if name != "class_weight"},
    )  # fmt: skip
    assert torch.equal(found, of_operator)
    check_three_way(lambda *_: found, reference, [x.detach() for x in inputs], requires_grad=[False] * len(inputs))


def test_logits_are_those_that_the_loss_is_made_of(place: Place) -> None:
    """Under autocast too, where products of the inputs as they were would be others."""
    hidden, weight = random_tensor((9, DIM), torch.float32, 0), random_tensor((ITEMS, DIM), torch.float32, 1)
    batch = jagged_of((5, 0, 4))
    targets = targets_for(batch, 2, ignore=True)
    shaped: list[dict[str, Any]] = [{}, {"normalize": True, "temperature": 0.1}, {"softcap": 2.0}]
    for options in shaped:
        head = CutCrossEntropyHead(**options).to(place.device)
        with torch.autocast(place.device.type, torch.bfloat16):
            found = head(jagged(hidden, batch), weight, targets)
            losses, lse = linear_cross_entropy(hidden, weight, targets, reduction="none", return_lse=True, **options)
        torch.testing.assert_close(found.logits, lse - losses, rtol=0, atol=1e-5)


@settings(max_examples=60)
@given(
    jagged_batches(longest=20),
    seeds(),
    st.sampled_from([None, -100, 0]),
    st.sampled_from(list(samplers())),
    st.sampled_from(LOSSES + OF_FIXED_COUNT),
)
def test_sampled_head(place: Place, batch: Jagged, seed: int, ignored: int | None, name: str, options: dict[str, Any]) -> None:
    sampler = samplers()[name].to(place.device).eval()
    if sampler.count is None and options in OF_FIXED_COUNT:
        return
    targets = targets_for(batch, seed, ignored is not None, ignored or 0)
    mark = -100 if ignored is None else ignored
    head = SampledCrossEntropyHead(sampler, ignore_index=mark, **options)
    inputs = [random_tensor((batch.total, DIM), torch.float32, seed), random_tensor((ITEMS, DIM), torch.float32, seed + 1)]
    ids, log_q, target_log_q = written_out(sampler, targets, mark)
    known = {key: value for key, value in options.items() if key != "temperature"} | {"scale": 1 / head.temperature}

    predictions = 1 + int((ids[0] >= 0).sum()) if options.get("loss") in ("bce", "gbce") and len(ids) else 1

    def reference(hidden: Tensor, weight: Tensor) -> Tensor:
        loss = sampled_cross_entropy.sampled_linear_cross_entropy(
            hidden, weight, targets, ids, log_q=log_q, target_log_q=target_log_q, ignore_index=mark, **known
        )[0]
        return loss / predictions

    check_three_way(lambda h, w: head(jagged(h, batch), w, targets).loss, reference, inputs)
    found = head(jagged(inputs[0], batch), inputs[1], targets).logits
    check_three_way(
        lambda *_: found,
        lambda h, w: torch.where(targets == mark, 0, (h * w[targets.clamp(min=0)]).sum(1) * known["scale"]),
        inputs,
        requires_grad=[False, False],
    )


@pytest.mark.parametrize("name", ["in-batch", "mixed"])
@pytest.mark.parametrize("options", LOSSES, ids=str)
def test_rows_that_fill_up_change_nothing(place: Place, name: str, options: dict[str, Any]) -> None:
    """In-batch negatives of a batch with ignored rows are those of the batch without them."""
    head = SampledCrossEntropyHead(samplers()[name], **options).to(place.device).eval()
    batch, filled = jagged_of((5, 0, 4)), jagged_of((5, 0, 4, 7))
    hidden, weight = random_tensor((16, DIM), torch.float64, 0), random_tensor((ITEMS, DIM), torch.float64, 1)
    targets = targets_for(filled, 2, ignore=False)
    targets[9:] = -100
    few = head(jagged(hidden[:9], batch), weight, targets[:9])
    many = head(jagged(hidden, filled), weight, targets)
    torch.testing.assert_close(many.loss, few.loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(many.logits[:9], few.logits, rtol=0, atol=0)


def test_excluded_items_are_no_negatives(place: Place) -> None:
    head = SampledCrossEntropyHead(UniformSampler(2, 8)).to(place.device)
    batch = jagged_of((1,))
    hidden, weight = random_tensor((1, DIM), torch.float32, 0), random_tensor((2, DIM), torch.float32, 1)
    target = torch.tensor([0], device=place.device)
    exclude = torch.tensor([1], device=place.device), torch.tensor([0, 1], device=place.device)
    assert head(jagged(hidden, batch), weight, target, exclude=exclude).loss.item() == 0
    assert head(jagged(hidden, batch), weight, target).loss.item() > 0


@pytest.mark.parametrize("head", [CutCrossEntropyHead(ignore_index=-1), SampledCrossEntropyHead(UniformSampler(ITEMS, 6)).eval()])
def test_items_of_a_sequence_are_targets_of_the_rows_before(place: Place, head: torch.nn.Module) -> None:
    head, batch = head.to(place.device), jagged_of((3, 0, 1, 4))
    items = jagged(torch.arange(8, device=place.device), batch)
    hidden, weight = random_tensor((8, DIM), torch.float32, 0), random_tensor((ITEMS, DIM), torch.float32, 1)
    mark = head.ignore_index
    targets = torch.tensor([1, 2, mark, mark, 5, 6, 7, mark], device=place.device)
    for found, expected in zip(
        head(jagged(hidden, batch), weight, items), head(jagged(hidden, batch), weight, targets), strict=True
    ):
        assert torch.equal(found, expected)


@settings(max_examples=50)
@given(jagged_batches(longest=20), st.booleans(), st.sampled_from([torch.int32, torch.int64]))
def test_next_items(place: Place, batch: Jagged, with_next: bool, dtype: torch.dtype) -> None:
    items = torch.arange(1, batch.total + 1, dtype=dtype, device=place.device)
    after = torch.arange(-batch.batch_size, 0, device=place.device) - 1000 if with_next else None
    expected: list[int] = []
    for sample, (length, last) in enumerate(zip(batch.lengths, batch.offsets[1:].tolist(), strict=True)):
        if length:
            expected += [*range(last - length + 2, last + 1), -7 if after is None else int(after[sample])]
    found = next_item_targets(jagged(items, batch), after, ignore_index=-7)
    assert found.dtype == dtype
    assert found.tolist() == expected


@settings(max_examples=30)
@given(jagged_batches(longest=40), seeds(), st.sampled_from([0.0, 0.4, 1.0]))
def test_masking_hides_what_it_gives_as_targets(place: Place, batch: Jagged, seed: int, probability: float) -> None:
    masking = ItemMasking(99, probability, ignore_index=-1, seed=seed).to(place.device)
    items = jagged(torch.arange(batch.total, device=place.device), batch)
    torch.manual_seed(seed)
    masked = masking(items)
    hidden = masked.items.values() == 99
    assert torch.equal(masked.targets, torch.where(hidden, items.values(), -1))
    assert torch.equal(masked.items.values()[~hidden], items.values()[~hidden])
    assert masked.items.offsets() is items.offsets()
    if probability in (0.0, 1.0):
        assert hidden.all() if probability else not hidden.any()
    torch.manual_seed(seed)
    assert torch.equal(masking(items).targets, masked.targets)
    masking.eval()
    assert torch.equal(masking(items).targets, masking(items).targets)


def test_masking_hides_the_share_it_says_and_other_rows_in_every_step(place: Place) -> None:
    masking = ItemMasking(99, 0.3).to(place.device)
    items = JaggedTensor(values=torch.zeros(20_000, dtype=torch.int64, device=place.device), offsets=torch.tensor([0, 20_000]))
    first, second = (masking(items).targets == 0 for _ in range(2))
    for hidden in (first, second):
        assert 0.28 < hidden.float().mean().item() < 0.32
    assert 0.07 < (first & second).float().mean().item() < 0.11


@pytest.mark.parametrize("name", list(samplers()))
def test_by_default_items_rank_by_how_probable_they_are(place: Place, name: str) -> None:
    """The best scores of a model that sees nothing are the logarithms of the items' probabilities."""
    probabilities = counts().double() / counts().sum()
    targets = torch.arange(ITEMS).repeat_interleave((1024 * probabilities).round().long().cpu())
    rows = len(targets)
    batch = JaggedTensor(values=torch.ones(rows, 1, device=place.device), offsets=torch.tensor([0, rows], device=place.device))
    head = SampledCrossEntropyHead(samplers()[name], sparse=False).to(place.device)
    weight = torch.zeros(ITEMS, 1, device=place.device, requires_grad=True)
    optimizer = torch.optim.Adam([weight], lr=0.1)
    torch.manual_seed(0)
    for _ in range(150):
        optimizer.zero_grad()
        head(batch, weight, targets.to(place.device)).loss.backward()
        optimizer.step()
    learnt = weight.detach()[:, 0].double()
    # Of every two items of which one is twice as probable as the other, that one ranks first.
    twice = probabilities[:, None] > 2 * probabilities
    assert bool((learnt[:, None] > learnt)[twice].all())


@pytest.mark.parametrize("name", ["uniform", "in-batch"])
@pytest.mark.parametrize("loss", ["softmax", "bce", "gbce"])
def test_losses_of_a_blind_model_say_nothing_but_how_many_could_be_right(place: Place, name: str, loss: Any) -> None:
    """Of equal scores every prediction is one of two, or the row's one of the target and its negatives."""
    head = SampledCrossEntropyHead(samplers()["uniform"], loss=loss, mask_hits=False, gbce_t=0.0).to(place.device)
    if name == "in-batch":
        if loss == "gbce":
            return
        head = SampledCrossEntropyHead(InBatchSampler(), loss=loss, mask_hits=False, correction="none").to(place.device)
    batch = jagged_of((5, 0, 4))
    targets = targets_for(batch, 0, ignore=True)
    count = 6 if name == "uniform" else int((targets >= 0).sum())
    found = head(
        jagged(torch.zeros(9, DIM, device=place.device), batch), torch.zeros(ITEMS, DIM, device=place.device), targets
    ).loss
    torch.testing.assert_close(found.exp(), torch.tensor(1.0 + count if loss == "softmax" else 2.0, device=place.device))


@pytest.mark.usefixtures("place")
def test_what_cannot_rank_items_so_is_refused() -> None:
    """And can be had by saying so."""
    for build, message in [
        (
            lambda **options: SampledCrossEntropyHead(InBatchSampler(), **options),
            "sampler: got InBatchSampler without counts, expected one whose draws can be corrected: popular items would rank "
            "last; build it with counts, or say correction='none' to have it so",
        ),
        *(
            (
                functools.partial(SampledCrossEntropyHead, samplers()[name], loss="bce"),
                f"loss: got 'bce', which has no correction, with {type(samplers()[name]).__name__}, which draws popular items "
                "more often: popular items would rank last; take UniformSampler or loss='softmax', or say correction='none' to "
                "have it so",
            )
            for name in ("log-uniform", "popularity", "in-batch", "mixed")
        ),
    ]:
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            build()
        assert build(correction="none").correction == "none"


@pytest.mark.usefixtures("place")
def test_messages() -> None:
    in_batch = InBatchSampler()
    split, of_six = cast(RowSplit, SimpleNamespace(group=None)), cast(RowSplit, SimpleNamespace(group=None, num_rows=6))
    items = JaggedTensor(values=torch.zeros(3, 2), offsets=torch.tensor([0, 3]))
    ids = JaggedTensor(values=torch.zeros(3, dtype=torch.int64), offsets=torch.tensor([0, 3]))
    hidden = JaggedTensor(values=torch.zeros(3, DIM), offsets=torch.tensor([0, 3]))
    for call, message in [
        (lambda: SampledCrossEntropyHead(in_batch, correction="both"), "correction: got 'both', but the sampler knows no prob"),
        (
            lambda: SampledCrossEntropyHead(in_batch, loss="gbce", correction="none"),
            "loss='gbce': needs a fixed number of negatives",
        ),
        (
            lambda: SampledCrossEntropyHead(in_batch, renormalise=True, correction="none"),
            "renormalise: needs a fixed number of negatives",
        ),
        (lambda: SampledCrossEntropyHead(samplers()["in-batch"], temperature=0), "temperature: expected a number above 0, got 0"),
        (
            lambda: SampledCrossEntropyHead(UniformSampler(5, 2), loss="gbce", gbce_t=1.5),
            "gbce_t: expected a number from 0 to 1, got 1.5",
        ),
        (lambda: SampledCrossEntropyHead(UniformSampler(5, 2))(hidden, torch.zeros(6, DIM), ids), "weight: expected 5 items"),
        (lambda: CutCrossEntropyHead(softcap=3.0, split=split), "softcap: a head whose items are split over processes"),
        (lambda: CutCrossEntropyHead(class_weight=torch.ones(3), split=split), "class_weight: a head whose items are split"),
        (lambda: CutCrossEntropyHead(split=split)(hidden, torch.zeros(6, DIM), ids, bias=torch.zeros(6)), "bias: a head whose"),
        (
            lambda: SampledCrossEntropyHead(UniformSampler(5, 2), sparse=True, split=split),
            "sparse: a head whose items are split over processes does not know it; leave it out, or keep all items",
        ),
        (
            lambda: SampledCrossEntropyHead(UniformSampler(5, 2), memory_budget=8, split=split),
            "memory_budget: a head whose items are split over processes does not know it; leave it out, or keep all items",
        ),
        (
            lambda: SampledCrossEntropyHead(UniformSampler(6, 2), split=of_six)(
                hidden, torch.zeros(6, DIM), ids, exclude=(ids.values(), torch.tensor([0, 1, 2, 3]))
            ),
            "exclude: a head whose items are split over processes knows none; leave it out",
        ),
        (lambda: next_item_targets(items), r"items: expected ids \[sum L\]"),
        (lambda: next_item_targets(ids, torch.zeros(2)), r"next_items: expected shape \[1\], an item per sample, got \[2\]"),
        (lambda: ItemMasking(9)(items), r"items: expected ids \[sum L\]"),
        (lambda: ItemMasking(9, 1.5), r"probability: expected a number in \[0, 1\], got 1.5"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


def test_shown_with_their_options() -> None:
    assert repr(CutCrossEntropyHead(softcap=30.0)) == "CutCrossEntropyHead(ignore_index=-100, label_smoothing=0.0, softcap=30.0)"
    shown = repr(SampledCrossEntropyHead(UniformSampler(9, 4, replacement=False), loss="gbce"))
    assert "loss='gbce', correction='none'" in shown
    assert "UniformSampler(num_items=9, count=4, rows_per_draw=1, replacement=False)" in shown
    assert repr(ItemMasking(9)) == "ItemMasking(mask_id=9, probability=0.2, ignore_index=-100)"


@pytest.mark.parametrize("name", ["cut", "scalable", *samplers()])
def test_compiles_whole_without_recompiling(place: Place, name: str) -> None:
    if name == "distinct" and place.name == "cpu":
        pytest.skip("draws without replacement look at their values in PyTorch")
    heads = {
        "cut": lambda: CutCrossEntropyHead(softcap=3.0, label_smoothing=0.1),
        "scalable": lambda: ScalableCrossEntropyHead(2, 100, ITEMS),
    }
    head = heads.get(name, lambda: SampledCrossEntropyHead(samplers()[name]))().to(place.device)
    weight = random_tensor((ITEMS, DIM), torch.float32, 1)

    def loss(hidden: Tensor, offsets: Tensor, targets: Tensor) -> Tensor:
        return head(JaggedTensor(values=hidden, offsets=offsets), weight, targets).loss

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for lengths in ((3, 4), (5, 0, 6), (9,)):
            batch = jagged_of(lengths)
            hidden, targets = random_tensor((batch.total, DIM), torch.float32, 0), targets_for(batch, 2, ignore=True)
            results = []
            for function in (compiled, loss):
                torch.manual_seed(len(lengths))
                results.append(function(hidden, batch.offsets, targets))
            torch.testing.assert_close(*results, rtol=1e-6, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(samplers()))
def test_captured_steps_draw_anew_and_wait_for_nothing(place: Place, name: str) -> None:
    head, batch = SampledCrossEntropyHead(samplers()[name]).to(place.device), jagged_of((5, 6))
    hidden = random_tensor((11, DIM), torch.float32, 0).requires_grad_()
    weight, targets = random_tensor((ITEMS, DIM), torch.float32, 1), targets_for(batch, 2, ignore=True)
    offsets = batch.offsets

    def step() -> Tensor:
        loss = head(JaggedTensor(values=hidden, offsets=offsets), weight, targets).loss
        loss.backward()
        return cast(Tensor, loss.detach())

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = step()
    torch.cuda.current_stream().wait_stream(stream)
    losses = []
    for _ in range(3):
        state = torch.cuda.get_rng_state()
        graph.replay()
        losses.append(captured.clone())
        torch.cuda.set_rng_state(state)
        assert torch.equal(step(), losses[-1])
    assert (len({loss.item() for loss in losses}) > 1) == (name != "in-batch")
