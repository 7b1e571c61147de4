"""The losses of tasks against loops over rows, requests and pairs; by hand; refusals; and a model that learns by each."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from jagged.config import ConfigError, TrainerConfig
from jagged.config.ranking import RankingOptions
from jagged.data import Dataset
from jagged.models import (
    BinaryLoss,
    FocalLoss,
    ListwiseLoss,
    PairwiseLoss,
    RankingInputs,
    RankingModel,
    TaskLoss,
    TaskScores,
    build,
)
from jagged.models.pretrained import load_task
from jagged.pointwise import PointwiseMetrics
from jagged.training import Trainer
from tests.models.shops import PLAIN, rows, shop
from tests.oracle import check_three_way
from tests.places import PLACE
from tests.reference import tasks as reference

pytestmark = pytest.mark.skipif(PLACE.name == "interpret", reason="modules run on the place's own backend")

#: Each loss, and its twin.
LOSSES: dict[str, tuple[TaskLoss, Callable[..., Any]]] = {
    "binary": (BinaryLoss(), reference.binary),
    "focal": (FocalLoss(), reference.focal),
    "focal with alpha": (FocalLoss(0.5, 0.25), lambda *x: reference.focal(*x, gamma=0.5, alpha=0.25)),
    "listwise": (ListwiseLoss(), reference.listwise),
    "listwise, cold": (ListwiseLoss(0.5), lambda *x: reference.listwise(*x, temperature=0.5)),
    "pairwise": (PairwiseLoss(), reference.pairwise),
}
OVER_REQUESTS = [name for name, (loss, _) in LOSSES.items() if loss.over_requests]
every_loss = pytest.mark.parametrize("name", LOSSES)


@st.composite
def batches(draw: st.DrawFn) -> dict[str, Any]:
    """Requests of no candidate to many, one much longer than the rest; labels, masks and weights, or none of these."""
    lengths = draw(st.lists(st.integers(0, 6), max_size=6))
    if lengths and draw(st.booleans()):
        lengths[draw(st.integers(0, len(lengths) - 1))] = 40
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    size = sum(lengths)
    grades = draw(st.sampled_from([torch.tensor([0.0, 1.0]), torch.tensor([0.0, 0.0, 0.0, 1.0]), torch.tensor([0.0, 0.25, 1.0])]))
    return {
        "lengths": lengths,
        "logits": 3 * torch.randn(size, generator=generator, dtype=torch.float64),
        "labels": grades[torch.randint(len(grades), (size,), generator=generator)],
        "mask": draw(st.sampled_from([None, torch.rand(size, generator=generator) < 0.7])),
        "weights": draw(st.sampled_from([None, torch.randint(4, (size,), generator=generator) / 2])),
    }


def offsets_of(lengths: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


def of_place(*tensors: Tensor | None) -> list[Any]:
    return [None if of is None else of.to(PLACE.device) for of in tensors]


@pytest.mark.usefixtures("place")
# Losses over requests sum in float64 whatever the logits are, as their twins do: there the order of sums alone would be compared.
# `test_the_gradient_is_the_derivative` is of float64.
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, dtype) for name in LOSSES for dtype in (torch.float32, *([] if name in OVER_REQUESTS else [torch.float64]))],
)
@given(batch=batches(), index=st.sampled_from([torch.int32, torch.int64]))
def test_is_the_twin(name: str, dtype: torch.dtype, index: torch.dtype, batch: dict[str, Any]) -> None:
    loss, twin = LOSSES[name]
    lengths, mask, weights = batch["lengths"], batch["mask"], batch["weights"]
    size = sum(lengths)
    counted = torch.ones(size, dtype=torch.bool) if mask is None else mask
    weighted = torch.ones(size) if weights is None else weights
    more = (lengths,) if loss.over_requests else ()
    offsets = offsets_of(lengths, index) if loss.over_requests else None
    device = of_place(batch["labels"], offsets, mask, weights)

    def ours(logits: Tensor) -> Tensor:
        return torch.stack(loss(logits, *device)).cpu()

    def expected(logits: Tensor) -> Tensor:
        return torch.stack(twin(logits.cpu(), batch["labels"], counted, weighted, *more))

    check_three_way(ours, expected, of_place(batch["logits"].to(dtype)))


@pytest.mark.usefixtures("place")
def test_losses_of_rows_that_are_predicted_well_keep_their_digits() -> None:
    """PyTorch's `binary_cross_entropy_with_logits` has five of the seven digits of such a label of 0."""
    logits = torch.tensor([-5.6232, -9.1, -14.5, -0.3], dtype=torch.float64)
    for logit in logits:
        for label, sign in ((0, 1), (1, -1)):
            total, _ = BinaryLoss()(*of_place((sign * logit).float()[None], torch.tensor([label])))
            expected = torch.nn.functional.softplus(logit.float().double())
            torch.testing.assert_close(total.double().cpu(), expected, rtol=2e-7, atol=0)


@every_loss
@given(batch=batches())
def test_rows_that_do_not_count_change_nothing(name: str, batch: dict[str, Any]) -> None:
    """They may be anything, and their gradient is exactly 0; so may requests be cut down to the rows that count."""
    loss, _ = LOSSES[name]
    lengths, logits, labels = batch["lengths"], batch["logits"], batch["labels"].double()
    offsets = offsets_of(lengths)
    mask = torch.ones(len(logits), dtype=torch.bool) if batch["mask"] is None else batch["mask"]
    weights = torch.ones(len(logits)) if batch["weights"] is None else batch["weights"]
    for anything in (math.nan, math.inf, -1e30):
        given = [of.where(mask, anything) for of in (logits, labels, weights)]
        leaf = given[0].clone().requires_grad_()
        total, count = loss(leaf, given[1], offsets, mask, given[2])
        (gradient,) = torch.autograd.grad(total, leaf)
        assert total.isfinite()
        assert (gradient.where(~mask, 0) == 0).all()
        assert gradient.isfinite().all()
        kept = mask & (weights != 0)
        samples = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))
        fewer = offsets_of(torch.bincount(samples[kept], minlength=len(lengths)).tolist())
        cut = logits[kept].clone().requires_grad_()
        alone = loss(cut, labels[kept], fewer, None, weights[kept])
        torch.testing.assert_close((total, count), alone)
        torch.testing.assert_close(gradient[kept], torch.autograd.grad(alone[0], cut)[0])


@every_loss
@given(batch=batches(), share=st.floats(0, 1))
def test_parts_add_up_to_the_whole(name: str, batch: dict[str, Any], share: float) -> None:
    """As batches of processes and of accumulation do."""
    loss, _ = LOSSES[name]
    lengths = batch["lengths"]
    cut = round(share * len(lengths))
    first_rows = sum(lengths[:cut])

    def of(places: slice, own: list[int]) -> tuple[Tensor, Tensor]:
        logits, labels, mask, weights = (None if x is None else x[places] for x in list(batch.values())[1:])
        assert logits is not None
        found: tuple[Tensor, Tensor] = loss(logits, labels, offsets_of(own), mask, weights)
        return found

    first, second = of(slice(None, first_rows), lengths[:cut]), of(slice(first_rows, None), lengths[cut:])
    for parts, whole in zip(zip(first, second, strict=True), of(slice(None), lengths), strict=True):
        torch.testing.assert_close(sum(parts), whole)


def test_by_hand() -> None:
    logits = torch.tensor([0.0, math.log(3.0), 0.0, 5.0], dtype=torch.float64)
    labels, offsets = torch.tensor([1, 0, 1, 0]), torch.tensor([0, 2, 2, 3, 4])
    weights = torch.tensor([1.0, 3.0, 1.0, 1.0])
    # p of the first two rows: 1/2, 3/4.
    total, count = BinaryLoss()(logits[:2], labels[:2], None, None, weights[:2])
    assert (total.item(), count.item()) == pytest.approx((math.log(2) + 3 * math.log(4), 4))
    total, count = FocalLoss(2.0, 0.25)(logits[:2], labels[:2])
    assert (total.item(), count.item()) == pytest.approx((math.log(2) / 16 + 0.75 * 9 / 16 * math.log(4), 2))
    # Two candidates, 1/4 and 3/4, of the weights 1 and 3; one of its own; one without a positive.
    total, count = ListwiseLoss()(logits, labels, offsets, None, weights)
    assert (total.item(), count.item()) == pytest.approx((2 * math.log(4), 3))
    total, count = ListwiseLoss()(logits[:2], torch.tensor([1, 3]), offsets[:2])
    assert total.item() == pytest.approx(math.log(4) / 4 + 3 * math.log(4 / 3) / 4)
    total, count = ListwiseLoss(0.5)(logits[:2], labels[:2], offsets[:2])
    assert total.item() == pytest.approx(math.log(10))
    # One pair; requests of one candidate have none.
    total, count = PairwiseLoss()(logits, labels, offsets, None, weights)
    assert (total.item(), count.item()) == pytest.approx((2 * math.log(4), 2))
    # Of three grades three pairs.
    total, count = PairwiseLoss()(torch.zeros(3), torch.tensor([0.0, 4.0, 2.0]), torch.tensor([0, 3]))
    assert (total.item(), count.item()) == pytest.approx((math.log(2), 1))


def test_focal_without_gamma_is_binary() -> None:
    logits, labels = torch.randn(50, dtype=torch.float64), torch.rand(50, dtype=torch.float64)
    torch.testing.assert_close(FocalLoss(0.0)(logits, labels), BinaryLoss()(logits, labels))


@every_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_logits_of_any_size(name: str, dtype: torch.dtype) -> None:
    """Losses and gradients of the worst predictions are those of a line, of the best ones 0."""
    loss, _ = LOSSES[name]
    labels, offsets = torch.tensor([1, 0]), torch.tensor([0, 2])
    steep = 2.0 if name == "listwise, cold" else 1.0
    for size in (1e4, 1e30):
        for sign in (1.0, -1.0):
            logits = torch.tensor([sign * size, -sign * size], dtype=dtype, requires_grad=True)
            total, _ = loss(logits, labels, offsets)
            (gradient,) = torch.autograd.grad(total, logits)
            if sign > 0:
                assert total.item() == 0
                assert (gradient == 0).all()
            elif loss.over_requests:
                assert total.item() == pytest.approx(2 * size * steep)
                assert gradient.tolist() == [-steep, steep]
            else:
                weights = [0.25, 0.75] if name == "focal with alpha" else [1.0, 1.0]
                assert total.item() == pytest.approx(size * sum(weights))
                assert gradient.tolist() == [-weights[0], weights[1]]


def test_near_scores_far_from_zero_keep_their_difference() -> None:
    """In float32, where their exponentials are infinite."""
    for at in (1e4, -1e4):
        scores = torch.tensor([at, at + 1.0], requires_grad=True)
        for loss in (ListwiseLoss(), PairwiseLoss()):
            total, _ = loss(scores, torch.tensor([1, 0]), torch.tensor([0, 2]))
            assert total.item() == pytest.approx(math.log1p(math.e), rel=1e-6)
            (gradient,) = torch.autograd.grad(total, scores)
            assert gradient[1].item() == pytest.approx(1 / (1 + math.exp(-1)), rel=1e-6)


@every_loss
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_few_bits_are_computed_in_float32(name: str, dtype: torch.dtype) -> None:
    loss, _ = LOSSES[name]
    logits, labels, offsets = torch.randn(9).to(dtype), torch.tensor([1, 0, 0] * 3), torch.tensor([0, 4, 9])
    expected = loss(logits.float(), labels, offsets)
    assert all(torch.equal(a, b) for a, b in zip(loss(logits, labels, offsets), expected, strict=True))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = loss(logits, labels, offsets)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@every_loss
def test_the_gradient_is_the_derivative(name: str) -> None:
    loss, _ = LOSSES[name]
    logits = torch.randn(8, dtype=torch.float64, requires_grad=True)
    labels, offsets = torch.tensor([1.0, 0.0, 0.5, 0.0, 1.0, 0.0, 0.0, 0.25]), torch.tensor([0, 3, 3, 8])
    assert torch.autograd.gradcheck(lambda x: loss(x, labels, offsets)[0], (logits,))


@every_loss
@pytest.mark.filterwarnings("ignore")
def test_compiles_in_one_graph(name: str) -> None:
    loss, _ = LOSSES[name]
    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths in ([3, 0, 4], [1, 5, 2, 0]):
        size = sum(lengths)
        logits, labels, mask = torch.randn(size), (torch.arange(size) % 3 == 0).float(), torch.rand(size) < 0.8
        given = labels, offsets_of(lengths), mask, torch.rand(size)
        more = {"num_pairs": sum(length**2 for length in lengths)} if name == "pairwise" else {}
        results = []
        for function in (compiled, loss):
            leaf = logits.clone().requires_grad_()
            total, count = function(leaf, *given, **more)
            results.append((total, count, *torch.autograd.grad(total, leaf)))
        torch.testing.assert_close(*results)


def test_the_number_of_pairs_is_given_to_what_is_compiled() -> None:
    compiled = torch.compile(PairwiseLoss(), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="num_pairs: expected the number of pairs in a compiled call, got None"):
        compiled(torch.zeros(2), torch.tensor([1, 0]), torch.tensor([0, 2]))


LOGITS, LABELS = torch.zeros(2), torch.tensor([1, 0])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: FocalLoss(-1.0), "gamma: expected a finite number of at least 0, got -1.0; 0 is binary cross entropy"),
        (lambda: FocalLoss(math.nan), "gamma: expected a finite number of at least 0, got nan; 0 is binary cross entropy"),
        (
            lambda: FocalLoss(alpha=1.5),
            "alpha: expected a number from 0 to 1, got 1.5; None counts positives and negatives alike",
        ),
        (lambda: ListwiseLoss(0.0), "temperature: expected a finite number above 0, got 0.0; 1 leaves scores as they are"),
        (
            lambda: BinaryLoss()(LOGITS[None], LABELS),
            "logits: expected shape [S], got [1, 2]; give the logits of one task at a time",
        ),
        (
            lambda: BinaryLoss()(LABELS, LABELS),
            "logits: expected a floating-point dtype, got torch.int64; give scores before any rounding",
        ),
        (lambda: FocalLoss()(LOGITS, LABELS[:1]), "labels: expected shape [2] as logits, got [1]; give one a row"),
        (lambda: FocalLoss()(LOGITS, LABELS, mask=LABELS), "mask: expected torch.bool, got torch.int64; give mask.bool()"),
        (
            lambda: BinaryLoss()(LOGITS, LABELS, weights=torch.ones(2, 1)),
            "weights: expected shape [2] as logits, got [2, 1]; give one a row",
        ),
        *(
            (
                lambda loss=loss: loss(LOGITS, LABELS),
                "offsets: expected [R + 1], the candidates of each request, got None; give batch.candidate_offsets",
            )
            for loss in (ListwiseLoss(), PairwiseLoss())
        ),
    ],
)
def test_wrong_arguments_are_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    assert str(caught.value) == message


# The model.

NAMES = "loss: expected one of binary, focal, listwise, pairwise"


def model_of(**options: Any) -> RankingModel:
    inputs = RankingInputs(candidates={"item": "item"}, labels=["click", "buy"])
    return RankingModel(inputs, {"item": 5}, layer_sizes=[4], **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "hinge"}, f"{NAMES}, got 'hinge' for the task 'click'; choose one of these"),
        ({"loss": {"buy": "hinge"}}, f"{NAMES}, got 'hinge' for the task 'buy'; choose one of these"),
        ({"loss": {"like": "focal"}}, "loss: expected some of the tasks click, buy, got 'like'; leave it out"),
        ({"loss": "focal", "focal_gamma": -1},
         "gamma: expected a finite number of at least 0, got -1; 0 is binary cross entropy"),
        (
            {"loss": {"click": "pairwise"}, "conditional": {"buy": "click"}},
            "loss: expected binary or focal for the task 'click', got 'pairwise'; 'buy' is predicted by a product of "
            "probabilities, as conditional says, and scores of this loss are none; leave 'buy' out of conditional, or choose "
            "another loss",
        ),
        (
            {"loss": {"buy": "listwise"}, "conditional": {"buy": "click"}},
            "loss: expected binary or focal for the task 'buy', got 'listwise'; 'buy' is predicted by a product of "
            "probabilities, as conditional says, and scores of this loss are none; leave 'buy' out of conditional, or choose "
            "another loss",
        ),
    ],
)  # fmt: skip
def test_wrong_losses_of_a_model_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        model_of(**options)
    assert str(caught.value) == message


def test_a_model_is_built_again_with_its_losses() -> None:
    model = model_of(loss={"click": "focal"}, focal_gamma=1.0, focal_alpha=0.25)
    assert model.losses == {"click": "focal", "buy": "binary"}
    again = build("ranking", **model.config)
    assert [repr(loss) for loss in again.scorer.losses] == ["FocalLoss(gamma=1.0, alpha=0.25)", "BinaryLoss()"]
    # Of a directory that is older than losses.
    older = {name: of for name, of in model.config.items() if name not in ("loss", "focal_gamma", "focal_alpha")}
    assert set(build("ranking", **older).losses.values()) == {"binary"}


@pytest.mark.parametrize(
    "loss",
    [
        "focal",
        "listwise",
        "pairwise",
        {"click": "listwise", "buy": "pairwise"},
        {"click": "listwise"},
        {"click": "focal", "buy": "pairwise"},
    ],
)
def test_batches_of_a_model_add_up(loss: Any) -> None:
    """Also where a label is missing in rows; the loss of all over its rows is the sum of what the tasks' losses are."""
    split = shop("request", *PLAIN, "weight", "genres")
    torch.manual_seed(0)
    model = RankingModel.of(split, embedding_dim=4, layer_sizes=(8,), loss=loss)
    parts = [model(split.train.gather(places)) for places in (range(4), range(4, 30))]
    batch = split.train.gather(range(30))
    whole = model(batch)
    sums = [of.loss * of.rows() for of in (*parts, whole)]
    torch.testing.assert_close(sums[0] + sums[1], sums[2])
    torch.testing.assert_close(parts[0].rows() + parts[1].rows(), whole.rows())
    found = []
    for name, module in zip(model.tasks, model.scorer.losses, strict=True):
        one = whole.scores[name]
        assert (one.count is None) == (not module.over_requests)
        found.append(module(one.logits, one.labels, batch.candidate_offsets, one.mask, one.weights))
        if one.count is not None:
            assert one.rows() is one.count
            assert torch.equal(one.count, found[-1][1])
    torch.testing.assert_close(sums[2], found[0][0] + found[1][0])
    counts = torch.stack([count for _, count in found])
    if all(module.over_requests for module in model.scorer.losses):
        torch.testing.assert_close(whole.rows(), counts.mean())
    else:
        torch.testing.assert_close(whole.rows(), batch.weights.where(batch.label_mask.any(1), 0).sum())


def fitted(output: Any, loss: str) -> tuple[Any, RankingModel, Any]:
    split = shop("request", *PLAIN, "genres", requests=300, history="events")
    torch.manual_seed(0)
    model = RankingModel.of(split, loss=loss, layer_sizes=(16,), embedding_dim=8, num_layers=0, tasks=["click"])
    parts = [
        part.loader(batch_size=32, shuffle=part is split.train, max_history=10) for part in (split.train, split.valid, split.test)
    ]
    config = TrainerConfig(output=str(output), max_epochs=5, learning_rate=0.02, monitor="click/gauc", device="cpu")
    return split, model, Trainer(model, config).fit(*parts, progress=False)


@pytest.mark.parametrize("loss", ["binary", "focal", "listwise", "pairwise"])
def test_a_model_learns(tmp_path: Any, loss: str) -> None:
    split, model, result = fitted(tmp_path / "run", loss)
    figures = result.metrics.test.click
    assert figures["gauc"] > 0.9
    has_probabilities = loss in ("binary", "focal")
    of_order = ["auc", "gauc", "gauc_left_out", "ndcg@10", "mrr", "hit_rate@10", "rows"]
    assert [name for name in figures if name in of_order] == of_order
    assert [name for name in figures if name not in of_order] == (
        ["calibration", "logloss", "ne", "ne_of_training"] if has_probabilities else []
    )
    batch = split.test.gather(range(10))
    logits = model.eval().logits(batch)["click"]
    expected = logits.sigmoid() if has_probabilities else logits
    assert torch.equal(model.predict(batch)["click"], expected)
    assert torch.equal(load_task(tmp_path / "run").predict(batch)["click"], expected)


def test_grades_are_for_losses_over_requests() -> None:
    table = {name: of for name, of in rows().items() if name in ("request", "item", "time", "click")}

    def graded(grades: dict[Any, float]) -> Any:
        given = pa.table({**table, "click": [grades.get(label) for label in table["click"]]})
        words = {"label": "click", "candidate": "item", "time": "time", "request": "request", "duplicates": "keep"}
        return Dataset.from_table(given, **words, progress=False).split(by="time", valid=0.1, test=0.1)

    split = graded({0: 0.0, 1: 3.0})
    with pytest.raises(ValueError, match="tasks: got the label 'click' with values from 0 to 3, expected 0 to 1"):
        RankingModel.of(split)
    model = RankingModel.of(split, loss="listwise")
    figures = model.evaluate([split.train.gather(range(20))], "valid", progress=False).click
    assert list(figures) == ["ndcg@10", "mrr", "hit_rate@10", "rows"]
    split = graded({0: -1.0, 1: 2.0})
    with pytest.raises(ValueError, match="tasks: got the label 'click'") as caught:
        RankingModel.of(split, loss="pairwise")
    assert str(caught.value) == (
        "tasks: got the label 'click' with values from -1 on, expected 0 or more for the loss 'pairwise'; add to all of them "
        "what makes the smallest one 0"
    )


def test_scores_without_probabilities_have_no_calibration() -> None:
    metrics = PointwiseMetrics("click", probabilities=False)
    metrics.update(torch.tensor([1.0, 2.0]), torch.tensor([0, 1]))
    assert metrics.compute() == {"auc": 1.0, "rows": 2.0}
    with pytest.raises(ValueError, match="click: got") as caught:
        metrics.calibration_bins()
    assert str(caught.value) == ("click: got probabilities=False, expected True; scores that only order rows have no calibration")
    assert TaskScores(torch.zeros(2), torch.zeros(2), count=torch.tensor(1.5)).rows() == 1.5


def test_options_of_a_configuration() -> None:
    assert RankingOptions().arguments(50)["loss"] == "binary"
    options = RankingOptions(loss="focal", focal_gamma=1.5, focal_alpha=0.25).arguments(50)
    assert (options["loss"], options["focal_gamma"], options["focal_alpha"]) == ("focal", 1.5, 0.25)
    assert "focal_gamma" not in RankingOptions(loss="listwise").arguments(50)
    for wrong, message in (
        ({"loss": "hinge"}, "loss: got 'hinge', expected binary, focal, listwise or pairwise"),
        ({"focal_gamma": 1.0}, "focal_gamma: belongs to loss focal, got binary"),
        ({"loss": "focal", "focal_alpha": 2.0}, "focal_alpha: got 2.0, expected a number, at least 0 and at most 1, or none"),
        (
            {"loss": "listwise", "conditional": "buy=click"},
            "loss: got listwise, expected binary or focal beside conditional, which multiplies probabilities",
        ),
    ):
        with pytest.raises(ConfigError) as caught:
            RankingOptions(**wrong)
        assert str(caught.value) == message
