"""Models of tables of which rows with the label 0 were left out at a known rate."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from jagged.models import DCNv2, RankingInputs, RankingModel
from jagged.models.serving import export_scores, scoring_tensors
from jagged.models.tasks import product_logits
from tests.models.shops import shop
from tests.models.test_ranking import gradients, relabelled

NAMES = ("request", "user", "item", "time", "weight", "price", "click", "buy")
RATE = 0.2


def pair(**options: Any) -> tuple[Any, DCNv2, DCNv2]:
    """A split, a model of it and one with the same weights that knows of the rate."""
    split = shop(*NAMES)
    models = []
    for more in ({}, {"negative_rate": RATE}):
        torch.manual_seed(0)
        models.append(DCNv2.of(split, embedding_dim=4, layer_sizes=[8], **options, **more))
    return split, *models


def cross_entropy(logits: Tensor, labels: Tensor, counted: Tensor, weights: Tensor) -> Tensor:
    each = nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
    return (each * weights).where(counted, 0).sum()


def test_the_loss_is_of_the_rows_that_were_kept_and_figures_of_all() -> None:
    split, plain, model = pair(tasks=["click"])
    batch = split.train.gather(range(20))
    logits, (labels, mask) = plain.logits(batch)["click"], batch.label(0)
    # The same weights predict the same: what the loss is of is another thing.
    assert torch.equal(model.predict(batch)["click"], plain.predict(batch)["click"])
    out = model(batch)
    rows = batch.weights.where(mask, 0).sum()
    expected = cross_entropy(logits - math.log(RATE), labels, mask, batch.weights) / rows
    torch.testing.assert_close(out.loss, expected)
    torch.testing.assert_close(out.rows(), rows)
    ours, theirs = gradients(out.loss, model), gradients(expected, plain)
    for name, of in theirs.items():
        torch.testing.assert_close(ours[name], of)
    scores = out.scores["click"]
    assert torch.equal(scores.logits, logits)
    assert scores.rates.tolist() == [RATE if there and label == 0 else 1 for label, there in zip(labels, mask, strict=True)]
    assert plain(batch).scores["click"].rates is None
    # q = p / (p + (1 - p) / r), of the p that the rows that were kept teach.
    p = (logits - math.log(RATE)).sigmoid()
    torch.testing.assert_close(p / (p + (1 - p) / RATE), model.predict(batch)["click"])
    # What is exported predicts the same.
    found = export_scores(model, batch).module()(**scoring_tensors(model, batch))["click"]
    torch.testing.assert_close(found.sigmoid(), model.predict(batch)["click"])
    # Of a table with all rows nothing stands for others.
    model.negative_rate = 1.0
    torch.testing.assert_close(model(batch).loss, plain(batch).loss)


def test_what_depends_on_the_label_is_not_left_out_where_it_is_1() -> None:
    split, plain, model = pair(conditional={"buy": "click"})
    batch = split.train.gather(range(20))
    pooled = plain._looked_up(batch)
    towers = plain.scorer._towers(batch, *pooled)
    out, click = model(batch), towers["click"] - math.log(RATE)
    learnt = {"click": click, "buy": product_logits(click, towers["buy"])}
    masks = {"click": batch.label_mask[:, 0], "buy": batch.label_mask.all(1)}
    expected = sum(
        cross_entropy(learnt[name], batch.labels[:, place], masks[name], batch.weights) for place, name in enumerate(learnt)
    )
    torch.testing.assert_close(out.loss, expected / batch.weights.where(masks["click"], 0).sum())
    assert torch.equal(out.scores["buy"].logits, product_logits(towers["click"], towers["buy"]))
    # No buy of a click stands for itself; one without a click for others.
    batch = relabelled(batch, [1, 1, 0, 0, -1], [0, 1, 0, -1, 0])
    for scores in model(batch).scores.values():
        assert scores.rates[:5].tolist() == [1, 1, RATE, RATE, 1]


def test_mean_labels_are_those_of_all_rows() -> None:
    split, plain, model = pair(conditional={"buy": "click"})
    dataset, rows = split.train.dataset, split.train.rows
    click, buy, weight = (torch.from_numpy(dataset.column(name)[rows]).double() for name in ("click", "buy", "weight"))
    weight = torch.where(click == 0, weight / RATE, weight)
    for name, labels in (("click", click), ("buy", buy)):
        there = ~labels.isnan()
        expected = (labels * weight)[there].sum() / weight[there].sum()
        assert model.config["label_means"][name] == pytest.approx(float(expected), rel=1e-12)
        assert model.config["label_means"][name] < plain.config["label_means"][name]


def test_under_autocast_the_rate_is_exact() -> None:
    split, plain, model = pair(conditional={"buy": "click"})
    batch = split.train.gather(range(20))
    with torch.autocast("cpu", torch.bfloat16):
        out, towers = model(batch), plain.scorer._towers(batch, *plain._looked_up(batch))
    assert towers["click"].dtype == torch.bfloat16
    click = towers["click"].float() - math.log(RATE)
    logits = {"click": click, "buy": product_logits(click, towers["buy"].float())}
    masks = {"click": batch.label_mask[:, 0], "buy": batch.label_mask.all(1)}
    expected = sum(cross_entropy(logits[name], batch.labels[:, i], masks[name], batch.weights) for i, name in enumerate(logits))
    torch.testing.assert_close(out.loss, expected / batch.weights.where(masks["click"], 0).sum())


def refused(names: tuple[str, ...] = NAMES, **options: Any) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole line is compared
        RankingModel.of(shop(*names), **{"negative_rate": RATE, **options})
    return str(caught.value)


def test_what_a_rate_says_nothing_of_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refused() == (
        "negative_rate: got 0.2 with the tasks click, buy, expected one that all others are conditional on, whose label says "
        "which rows were left out; name one task, or say by conditional what depends on it"
    )
    assert refused(tasks=["click"], loss="listwise") == (
        "negative_rate: got 0.2 with the loss 'listwise' of the task 'click', expected binary or focal; its scores are no "
        "probabilities: leave the rate out"
    )
    assert refused(conditional={"buy": "click"}, implied=True) == (
        "negative_rate: got 0.2 with implied=True, expected False; whether rows whose label becomes 1 were kept at the rate is "
        "not known"
    )
    for rate in (0.0, 1.5, -1.0, math.nan):
        assert refused(tasks=["click"], negative_rate=rate) == (
            f"negative_rate: got {rate}, expected a number above 0 and at most 1; None where all rows were kept"
        )
    assert refused(("user", "item", "time")) == (
        "negative_rate: got 0.2 of a table without labels, expected None; drawn items are no rows of it"
    )
    split = shop(*NAMES)
    column = split.train.dataset.column
    halves = lambda name: column(name) * 0.5 if name == "click" else column(name)  # noqa: E731
    monkeypatch.setattr(split.train.dataset, "column", halves, raising=False)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        RankingModel.of(split, tasks=["click"], negative_rate=RATE)
    assert str(caught.value) == (
        "negative_rate: got 0.2 of a label with the value 0.5, expected 0 and 1 alone; say from where on it is 1 when the table "
        "is read, or leave the rate out"
    )
    # Losses over rows that count the hard ones more are learnt of the rows that were kept, too.
    monkeypatch.undo()
    assert RankingModel.of(shop(*NAMES), tasks=["buy"], loss="focal", negative_rate=RATE).negative_rate == RATE


def test_a_model_that_is_built_again_knows_its_rate() -> None:
    inputs = RankingInputs(features={"user": "user"}, candidate_ids={"item": "item"}, labels=["click"])
    model = DCNv2(inputs, {"user": 3, "item": 4}, negative_rate=RATE, layer_sizes=[4])
    assert DCNv2(**model.config).negative_rate == RATE
    config = {name: of for name, of in model.config.items() if name != "negative_rate"}
    # As one that was saved before there were rates.
    assert DCNv2(**config).negative_rate == 1


# Dynamo's own, where it compiles again what broke its graph.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_the_rate_goes_with_what_users_do() -> None:
    """Copies, compiled and checkpointed steps have the same loss and gradients; under autocast it is that of wide numbers."""
    split, plain, model = pair(conditional={"buy": "click"})
    batch = split.train.gather(range(20))
    clicks: list[float] = [(1, 0, -1, 0, 1, 0)[place % 6] for place in range(len(batch.rows))]
    batch = relabelled(batch, clicks, clicks)
    out = model(batch)
    expected = gradients(out.loss, model)
    assert not torch.allclose(out.loss, plain(batch).loss)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager")
    checkpointed = checkpoint(lambda: model(batch).loss, use_reentrant=False)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    assert [of.negative_rate for of in copies] == [RATE, RATE]
    for of, loss in ((model, compiled(batch).loss), (model, checkpointed), *((of, of(batch).loss) for of in copies)):
        torch.testing.assert_close(loss, out.loss)
        for name, gradient in gradients(loss, of).items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-7)
    with torch.autocast("cpu", torch.bfloat16):
        low, other = model(batch).loss, plain(batch).loss
    assert low.dtype == torch.float32
    assert abs(low - out.loss) < 0.1 * abs(other - low)
    # Of a table with all its rows the same compiled model counts each once.
    model.negative_rate = 1.0
    torch.testing.assert_close(compiled(batch).loss, plain(batch).loss)
