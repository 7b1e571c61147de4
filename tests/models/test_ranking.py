"""The ranking model against its padded twin, on tables of every make; its refusals, and what it learns."""

from __future__ import annotations

import dataclasses
import decimal
import io
import re
import shutil
import subprocess
import sys
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchrec.fx import Tracer
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor

from jagged.config import TrainerConfig
from jagged.data import DataError, Dataset
from jagged.data.table_batches import Batch
from jagged.data.table_splits import Split
from jagged.models import (
    DIN,
    DLRM,
    DLRMHSTU,
    DCNv2,
    MixtureModel,
    RankingInputs,
    RankingModel,
    RequestModel,
    WukongModel,
    build,
    export_scores,
    name_of,
    product_logits,
    scoring_tensors,
    write_package,
)
from jagged.models.features import interval_borders
from jagged.models.pretrained import load_task, save_task
from jagged.ops import decomposed
from jagged.training import Trainer
from tests.models.shops import COLUMNS, PLAIN, shop
from tests.places import PLACE
from tests.processes import told_by
from tests.reference.ranking import Padded

pytestmark = pytest.mark.skipif(PLACE.name == "interpret", reason="modules run on the place's own backend")

LISTS = ("request", "user", "item", "time", "click", "liked", "tags")
BUY = {"conditional": {"buy": "click"}}
PLE = {"experts": "ple", "num_experts": 2, "expert_sizes": (5,), "expert_layers": 2}
WUKONG = {"num_fm_tokens": 3, "num_linear_tokens": 2, "rank": 2, "hidden_sizes": (6,), "top_sizes": (7,)}
#: Columns and how they are read, and options of the model.
VARIANTS: dict[str, tuple[tuple[str, ...], dict[str, Any], dict[str, Any]]] = {
    "everything": ((), {"beside": True}, {"table_dims": {"item": 6, "tags": 4, "topics": 2}, "num_layers": 2, **BUY}),
    "everything by dots": ((), {"beside": True}, {"cross": "dot", **BUY, "implied": True}),
    "plain": (PLAIN, {"history": "events"}, {"cross_rank": 3, "cross_layers": 2, "num_layers": 0}),
    "plain by dots": (PLAIN, {"history": "events"}, {"cross": "dot", "num_time_buckets": None, "max_history": 2}),
    "no history": (("request", *PLAIN, "genres", "tags"), {}, {"cross": None, **BUY}),
    "no history by dots": (("request", *PLAIN, "genres"), {}, {"cross": "dot", "tasks": ["buy"]}),
    "lists": ((*LISTS, "genres"), {"history": "events"}, {"cross": "dot", "histories": []}),
    "lists as histories": (LISTS, {}, {"histories": ["tags", "liked"], "table_dims": {"tags": 4}, "cross": None}),
    "lists and events by dots": (LISTS, {"history": "events"}, {"histories": ["tags", "liked"], "cross": "dot", "num_layers": 2}),
    "encoded again": ((*LISTS, "price"), {"history": "events"}, {"histories": ["liked"], "recompute": True}),
    "a list alone": (("time", "liked", "click"), {}, {"histories": ["liked"], "max_history": 2}),
    "shared lists": (
        (*LISTS, "genres", "similar", "styles"),
        {"history": "events"},
        {"table_dims": {"tags": 4}, "histories": ["liked"]},
    ),
    "shared lists without a history": (("request", "user", "item", "time", "click", "tags", "styles"), {}, {"cross": "dot"}),
    "dlrm of shared lists": ((*LISTS, "similar", "styles"), {"history": "events"}, {"class": DLRM}),
    "din of shared lists": ((*LISTS, "similar", "styles"), {"history": "events"}, {"class": DIN}),
    "weights": (("request", "item", "time", "weight", "interests", "strengths", "words", "counts", "click"), {}, {}),
    "candidates alone": (("item", "time", "price", "click"), {}, {"layer_sizes": [8]}),
    "candidates alone by dots": (("item", "time", "price", "genres", "click"), {}, {"cross": "dot"}),
    "requests alone": (("user", "type", "age", "click"), {}, {"cross": "dot"}),
    "numbers alone": (("time", "age", "sizes", "click"), {}, {}),
    "one id": (("time", "type", "click"), {}, {"cross": None}),
    "experts": (PLAIN, {"history": "events"}, {"class": MixtureModel, "num_experts": 3, "expert_sizes": (5, 4)}),
    "experts of tasks": (
        ("request", *PLAIN, "genres", "tags"),
        {},
        {
            "class": MixtureModel,
            "experts": "ple",
            "num_experts": 2,
            "expert_sizes": (5,),
            "expert_layers": 2,
            "cross": "dcn",
            **BUY,
        },
    ),
    "dlrm": ((), {"beside": True}, {"class": DLRM, "bottom_sizes": (6,), "top_sizes": (7, 5), **BUY}),
    "dlrm of candidates alone": (("item", "time", "price", "genres", "click"), {}, {"class": DLRM, "bottom_sizes": ()}),
    "dlrm of requests alone": (("user", "type", "age", "click"), {}, {"class": DLRM, "top_sizes": (6,)}),
    "dcnv2": ((), {"beside": True}, {"class": DCNv2, "table_dims": {"item": 6, "tags": 4, "topics": 2}, **BUY}),
    "dcnv2 in parallel": (
        PLAIN,
        {"history": "events"},
        {"class": DCNv2, "structure": "parallel", "cross_rank": 3, "cross_experts": 2, "cross_layers": 2},
    ),
    "wukong": ((), {"beside": True}, {"class": WukongModel, "table_dims": {"item": 6, "tags": 4, "topics": 2}, **WUKONG, **BUY}),
    "dlrm-hstu": ((), {"beside": True}, {"class": DLRMHSTU, "table_dims": {"item": 6, "tags": 4, "topics": 2}, **BUY}),
    "dlrm-hstu of lists and events": (
        LISTS,
        {"history": "events"},
        {"class": DLRMHSTU, "histories": ["tags", "liked"], "cross": "dot", "num_layers": 1, "max_history": 2},
    ),
    "dlrm-hstu without times": (
        PLAIN,
        {"history": "events"},
        {"class": DLRMHSTU, "num_time_buckets": None, "experts": "mmoe", "num_experts": 2, "expert_sizes": (5,)},
    ),
    "din": ((), {"beside": True}, {"class": DIN, "table_dims": {"item": 6, "tags": 4, "topics": 2}, **BUY}),
    "din of lists and events": (
        LISTS,
        {"history": "events"},
        {"class": DIN, "histories": ["tags", "liked"], "attention_sizes": (5,), "activation": "gelu"},
    ),
    "wukong of requests alone": (("user", "type", "age", "click"), {}, {"class": WukongModel, **WUKONG}),
}
#: Options that tests have of all models of a class.
COMMON: dict[type[RequestModel], dict[str, Any]] = {
    RankingModel: {"layer_sizes": (12, 6)},
    MixtureModel: {"layer_sizes": (12, 6)},
    DCNv2: {"layer_sizes": (12, 6)},
    DIN: {"layer_sizes": (12, 6), "attention_sizes": (5, 3)},
    DLRM: {},
    DLRMHSTU: {"layer_sizes": (12, 6)},
    WukongModel: {},
}
#: Those that other variants cover in part.
LONG = ("lists and events by dots",)
every_variant = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in LONG else name for name in VARIANTS]
)


@pytest.fixture(scope="module")
def splits() -> dict[str, Split]:
    return {}


def of_variant(splits: dict[str, Split], name: str, **more: Any) -> tuple[Split, RequestModel]:
    names, reading, options = VARIANTS[name]
    if name not in splits:
        splits[name] = shop(*names, **reading)
    torch.manual_seed(0)
    options = {**options, **more}
    kind = options.pop("class", RankingModel)
    model = kind.of(splits[name], **{"embedding_dim": 8, **COMMON[kind], **options})
    with torch.no_grad():
        # Tables and biases as small as new ones would hide what is done with them.
        for parameter in model.parameters():
            # Nor so large that a probability is 1 to the last digit, of which the twin's logarithm is none.
            parameter.copy_(torch.randn_like(parameter) * (0.4 if parameter.dim() == 1 else 0.7 * parameter.shape[-1] ** -0.5))
    return splits[name], model


class Exact(EmbeddingCollection):
    """TorchRec's rounds to float32."""

    def forward(self, features: Any) -> dict[str, JaggedTensor]:
        return {
            key: JaggedTensor(nn.functional.embedding(features[key].values(), table.weight), offsets=features[key].offsets())
            for config, table in zip(self.embedding_configs(), self.embeddings.values(), strict=True)
            for key in config.feature_names
        }


def doubled(model: RequestModel) -> RequestModel:
    for collection in model.sequences:
        collection.__class__ = Exact
    for collection in model.bags.values():
        collection._output_dtype = torch.float64  # type: ignore[assignment]
    return model.double()


def gradients(loss: Tensor, model: nn.Module) -> dict[str, Tensor]:
    named = dict(model.named_parameters())
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {name: torch.zeros_like(of) if grad is None else grad for (name, of), grad in zip(named.items(), found, strict=True)}


@every_variant
@settings(max_examples=6)
@given(data=st.data())
def test_is_the_padded_twin(splits: dict[str, Split], name: str, data: st.DataObject) -> None:
    """Loss and all gradients, in float64, of requests with and without history, of one candidate or many."""
    split, model = of_variant(splits, name)
    model = doubled(model)
    places = data.draw(st.lists(st.integers(0, len(split.train) - 1), min_size=1, max_size=12))
    batch = split.train.gather(places, max_history=data.draw(st.sampled_from([None, 0, 3])))
    out = model(batch)
    loss, logits = Padded(model)(batch, split.encoders.statistics)
    torch.testing.assert_close(out.loss, loss, rtol=1e-10, atol=1e-12)
    for task, of in logits.items():
        torch.testing.assert_close(out.scores[task].logits, of, rtol=1e-8, atol=1e-9)
    if not out.rows():
        assert out.loss.item() == 0
        return
    expected = gradients(loss, model)
    for key, found in gradients(out.loss, model).items():
        torch.testing.assert_close(found, expected[key], rtol=1e-8, atol=1e-10, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("name", [name for name, (columns, *_) in VARIANTS.items() if not columns or "request" in columns])
def test_a_score_does_not_depend_on_the_other_candidates(splits: dict[str, Split], name: str) -> None:
    """Nor on their number: each candidate alone in its request has the logits that it has among all."""
    split, model = of_variant(splits, name)
    model = doubled(model).eval()
    every = split.train.gather(range(len(split.train)))
    assert every.candidate_offsets.diff().max() > 3
    expected = dict(zip(every.rows.tolist(), torch.stack(list(model.logits(every).values()), 1), strict=True))
    offsets, rows = split.train.requests
    for place in range(3):
        chosen = offsets[:-1] + place
        alone = dataclasses.replace(split.train, rows=np.sort(rows[chosen[chosen < offsets[1:]]]))
        batch = alone.gather(range(len(alone)))
        assert len(batch) == len(batch.rows)
        found = torch.stack(list(model.logits(batch).values()), 1)
        torch.testing.assert_close(found, torch.stack([expected[row] for row in batch.rows.tolist()]), rtol=1e-9, atol=1e-10)


@every_variant
def test_everything_that_is_looked_up_is_learnt(splits: dict[str, Split], name: str) -> None:
    """Several processes wait for ever for a gradient that none has, and a column that nobody reads was given for nothing."""
    split, model = of_variant(splits, name)
    loss = model(split.train.gather(range(len(split.train)))).loss
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    named = zip(model.named_parameters(), found, strict=True)
    assert [key for (key, _), grad in named if grad is None or not grad.count_nonzero()] == []


def test_lists_of_candidates_ids_are_histories() -> None:
    """By the word of the table, or where the model is made; others are pooled."""
    table = pa.table({
        "user": ["a", "b", "c", "d"], "film": ["x", "y", "x", "z"], "time": [1, 2, 3, 4], "click": [0, 1, 1, 0],
        "clicked": [["x", "y"], ["y", "x"], [], None], "tags": [["t"], [], ["t", "s"], ["s"]],
    })  # fmt: skip
    words = {"label": "click", "candidate": "film", "user": "user", "time": "time", "progress": False}
    split = Dataset.from_table(table, history="clicked", **words).split(by="user", valid=0.0, test=0.0)
    inputs = RankingInputs.of(split.train)
    assert (inputs.histories, inputs.lists) == ([{"clicked": "film"}], ["tags"])
    assert inputs.features == {"user": "user", "tags": "tags"}
    assert RankingInputs.of(split.train, ["tags"]).histories == [{"tags": "tags"}]
    assert RankingInputs.of(split.train, []).lists == ["clicked", "tags"]
    both = Dataset.from_table(table, history=["events", "clicked"], **words).split(by="user", valid=0.0, test=0.0)
    assert [list(keys) for keys in RankingInputs.of(both.train).histories] == [["history.film"], ["clicked"]]
    # The same items in another order, none, and nobody knows which, are three things.
    torch.manual_seed(0)
    model = RankingModel.of(split).eval()
    batch = split.train.gather(range(4))
    values = batch.features["clicked"].lengths().tolist()
    assert values == [2, 2, 0, 1]
    ids = batch.features
    looked_up = [collection(ids) for collection in model.sequences]
    means = model.scorer.histories[0](looked_up[0]["clicked"], None)[0]
    assert (means[0] - means[1]).abs().max() > 1e-3
    assert not means[2].any()
    assert means[3].any()


def test_products_of_probabilities_are_exact_for_all_logits() -> None:
    """Against 400 digits: in float64, and as good as float32 can be."""
    numbers = [-700.0, -90.0, -30.0, -1.0, 0.0, 1e-3, 2.0, 20.0, 90.0, 700.0]
    grid = [(a, b) for a in numbers for b in numbers]
    with decimal.localcontext(prec=1_000):
        exact = []
        for a, b in grid:
            p, q = (1 / (1 + (-decimal.Decimal(x)).exp()) for x in (a, b))
            exact.append(float((p * q / (1 - p * q)).ln()))
    first, second = torch.tensor(grid, dtype=torch.float64).unbind(1)
    torch.testing.assert_close(product_logits(first, second), torch.tensor(exact, dtype=torch.float64), rtol=1e-14, atol=1e-14)
    first, second = (x.float().requires_grad_() for x in (first, second))
    found = product_logits(first, second)
    torch.testing.assert_close(found, torch.tensor(exact), rtol=1e-6, atol=1e-6)
    for label in (0.0, 1.0):
        losses = nn.functional.binary_cross_entropy_with_logits(found, torch.full_like(found, label), reduction="sum")
        assert all(of.isfinite().all() for of in torch.autograd.grad(losses, (first, second), retain_graph=True))
    small = first.detach().double().clamp(-5, 5).requires_grad_(), second.detach().double().clamp(-5, 5).requires_grad_()
    assert torch.autograd.gradcheck(product_logits, small)


def relabelled(batch: Batch, click: list[float], buy: list[float]) -> Batch:
    """The batch with other labels in its first rows; -1 where one is missing."""
    labels, mask = batch.labels.clone(), batch.label_mask.clone()
    for place, values in enumerate((click, buy)):
        given = torch.tensor(values)
        labels[: len(given), place], mask[: len(given), place] = given.clamp(min=0), given >= 0
    return dataclasses.replace(batch, labels=labels, label_mask=mask)


def test_what_a_conditional_label_counts(splits: dict[str, Split]) -> None:
    """Rows with both labels alone; and where one implies the other, such rows as rows with both."""
    split, model = of_variant(splits, "no history")
    batch = relabelled(split.train.gather(range(4)), [1, 0, -1, 1, -1], [1, 0, 1, -1, 0])
    out = model(batch)
    assert out.scores["click"].mask[:5].tolist() == [True, True, False, True, False]
    assert out.scores["buy"].mask[:5].tolist() == [True, True, False, False, False]
    probabilities = model.predict(batch)
    assert (probabilities["buy"] < probabilities["click"]).all()
    _, model = of_variant(splits, "no history", implied=True)
    batch = relabelled(split.train.gather(range(4)), [1, 0, -1, 1, -1], [1, 1, 1, -1, 0])
    out = model(batch)
    assert out.scores["click"].mask[:5].tolist() == [True, True, True, True, False]
    assert out.scores["click"].labels[:4].tolist() == [1, 1, 1, 1]
    assert out.scores["buy"].mask[:5].tolist() == [True, True, True, False, False]


def test_conditions_of_conditions() -> None:
    """Whatever the order in which they are given."""
    inputs = RankingInputs(candidates={"item": "item"}, labels=["view", "click", "buy"])
    options: dict[str, Any] = {"conditional": {"buy": "click", "click": "view"}, "implied": True, "layer_sizes": [4]}
    model = RankingModel(inputs, {"item": 5}, **options)
    towers = {name: torch.tensor([x, -x]) for name, x in (("view", 1.0), ("click", 0.5), ("buy", -0.25))}
    batch = shop("item", "time", "click").train.gather([0, 1])
    labels = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    batch = dataclasses.replace(batch, labels=labels, label_mask=torch.tensor([[False, True, True], [True, True, True]]))
    logits = model.scorer._of_conditions(towers)
    scores = model.scorer._scored(batch, logits, logits).scores
    p = [of.sigmoid() for of in towers.values()]
    torch.testing.assert_close(scores["buy"].logits.sigmoid(), p[0] * p[1] * p[2])
    torch.testing.assert_close(scores["click"].logits.sigmoid(), p[0] * p[1])
    assert [scores[name].labels.tolist() for name in scores] == [[1, 0]] * 3
    assert all(of.mask.all() for of in scores.values())


def test_rows_without_labels_count_nothing(splits: dict[str, Split]) -> None:
    """Their weight may be anything; and the loss of parts, by what they are the mean over, is that of all."""
    split, model = of_variant(splits, "everything")
    batches = [split.train.gather(places) for places in (range(4), range(4, 30), range(30))]
    losses = [model(batch) for batch in batches]
    rows = [of.rows() for of in losses]
    torch.testing.assert_close(losses[0].loss * rows[0] + losses[1].loss * rows[1], losses[2].loss * rows[2])
    no_label = ~batches[0].label_mask.any(1)
    assert no_label.sum() > 0
    changed = dataclasses.replace(batches[0], weights=batches[0].weights.where(~no_label, torch.nan))
    assert torch.equal(model(changed).loss, losses[0].loss)
    nothing = model(dataclasses.replace(batches[0], label_mask=torch.zeros_like(batches[0].label_mask)))
    assert nothing.rows().item() == nothing.loss.item() == 0
    assert all(of.isfinite().all() for of in gradients(nothing.loss, model).values())


def test_numbers_are_normalised(splits: dict[str, Split]) -> None:
    split, model = of_variant(splits, "everything")
    numbers = model.scorer.numbers["request"]
    every = split.train.gather(range(len(split.train)))
    per_row = every.request_numbers[every.candidate_requests], every.request_numbers_missing[every.candidate_requests]
    found = numbers(*per_row)
    there = found[:, 0][found[:, 2] == 0]
    assert 0 < len(there) < len(found)
    assert abs(float(there.mean())) < 1e-5
    assert abs(float(there.std(correction=0)) - 1) < 1e-5
    assert not found[:, :2][found[:, 2] == 1].any()
    same = dataclasses.replace(split.encoders.statistics["age"], mean=0.1, deviation=1e-17)
    numbers.normalise({"age": same})
    assert numbers(torch.tensor([[1.1]]), torch.tensor([[False]]))[0, 0] == pytest.approx(1.0)


@pytest.mark.parametrize("count", [0, 1, 2, 5, 9, 30])
def test_ranks_run_evenly_between_the_borders(count: int) -> None:
    """From 10 on each border is twice the one before: skewed numbers have ranks of equal steps; what lies beyond has the last."""
    split = shop("user", "age", "click")
    model = RankingModel.of(split)
    borders = tuple(10.0 * 2**i for i in range(count))
    statistics = dataclasses.replace(split.encoders.statistics["age"], borders=borders)
    numbers = model.scorer.numbers["request"]
    numbers.intervals.zero_()
    numbers.normalise({"age": statistics})
    values = torch.tensor([*borders, 0.0, 1e9, 15.0])[:, None]
    ranks = numbers(values, torch.zeros_like(values, dtype=torch.bool))[:, 1] / 12**0.5
    if count < 2:
        assert not ranks.any()
        return
    kept = interval_borders(borders).tolist()
    assert len(kept) == min(count, 9)
    assert (kept[0], kept[-1]) == (borders[0], borders[-1])
    expected = np.interp(values[:, 0].numpy(), kept, np.linspace(-0.5, 0.5, len(kept)))
    np.testing.assert_allclose(ranks.numpy(), expected, atol=1e-6)
    # In few bits borders may be one; 30 doublings are beyond the numbers of float16.
    inside = torch.tensor([*borders, 0.0])[:, None]
    for dtype in [torch.bfloat16] if count == 30 else [torch.bfloat16, torch.float16]:
        few = numbers.to(dtype)(inside.to(dtype), torch.zeros_like(inside, dtype=torch.bool))[:, 1] / 12**0.5
        np.testing.assert_allclose(
            few.float().numpy(), np.interp(inside[:, 0], kept, np.linspace(-0.5, 0.5, len(kept))), atol=0.05
        )


# What is refused.


def refused(*names: str, reading: Any = None, kind: type[RequestModel] = RankingModel, **options: Any) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole line is compared
        kind.of(shop(*names, **(reading or {})), **options)
    return str(caught.value)


def test_a_table_that_two_collections_need_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COLUMNS, "words", dataclasses.replace(COLUMNS["words"], table="item"))
    assert refused("user", "item", "time", "words", "counts", "click", reading={"history": "events"}) == (
        "table 'item': read by features (item, history.item) and weighted_candidates (words), expected one of them, as a table "
        "is in one collection; give a column another in the schema"
    )
    monkeypatch.setitem(COLUMNS, "words", dataclasses.replace(COLUMNS["words"], table="interests"))
    assert refused("user", "item", "time", "interests", "strengths", "words", "counts", "click") == (
        "table 'interests': read by weighted_features (interests) and weighted_candidates (words), expected one of them, as a "
        "table is in one collection; give a column another in the schema"
    )
    monkeypatch.undo()
    assert refused("user", "item", "time", "tags", "click", reading={"history": "events", "event_lists": ["tags"]}) == (
        "table 'tags': read by features (tags) and history_lists (tags), expected one of them, as a table is in one collection; "
        "leave the column out of event_lists"
    )


def test_options_that_do_not_fit_are_refused() -> None:
    names = ("user", "item", "time", "click", "buy")
    assert refused(*names, cross="fm") == "cross: got 'fm', expected 'dcn', 'dot' or None"
    assert refused(*names, cross="dot", table_dims={"item": 8}) == (
        "table_dims: got 8 for the table 'item', expected 16, the width of the others; cross='dot' multiplies vectors of one "
        "width"
    )
    assert refused(*names, table_dims={"shop": 8}) == "table_dims: got the table 'shop', expected some of user, item"
    assert refused(*names, layer_sizes=[]) == "layer_sizes: expected the width of at least one layer, got none"
    assert refused(*names, recompute=True) == (
        "recompute: got True of inputs without a history, expected False; histories are what is encoded again"
    )
    assert refused(*names, tasks=["like"]) == "tasks: got 'like', expected some of click, buy"
    assert refused(*names, tasks=[]) == "tasks: got [], expected some of click, buy"
    assert refused(*names, tasks=["buy", "buy"]) == "tasks: got ['buy', 'buy'], expected some of click, buy"
    assert refused(*names, conditional={"buy": "like"}) == "conditional: got 'like', expected two of the tasks click, buy"
    assert refused(*names, conditional={"buy": "click", "click": "buy"}) == (
        "conditional: got {'buy': 'click', 'click': 'buy'}, expected no label that is a condition of itself"
    )
    with pytest.raises(ValueError, match=r"^sizes: got none of the table 'item', expected those of user, item$"):
        RankingModel(RankingInputs(features={"user": "user"}, candidates={"item": "item"}), {"user": 3})
    with pytest.raises(ValueError, match=r"^inputs: got no column of ids or numbers, expected something to learn from$"):
        RankingModel(RankingInputs(), {})


def test_models_whose_candidates_read_histories_need_both() -> None:
    """By name, and before anything is made."""
    names = ("user", "item", "time", "click")
    for kind, name in ((DLRMHSTU, "dlrm-hstu"), (DIN, "din")):
        assert refused(*names, kind=kind) == (
            f"inputs: got no history, expected one that candidates of {name} read; give the table user, candidate and time with "
            'history="events", or a list of the candidate\'s ids, or take another model'
        )
        assert refused("time", "liked", "click", kind=kind, histories=["liked"]) == (
            f"inputs: got no column of the candidates, expected one by which candidates of {name} read their history; say which "
            "columns are theirs by candidate= or candidate_columns= when the table is read, or take another model"
        )
    for sizes in ("attention_sizes", "layer_sizes"):
        assert refused(*names, reading={"history": "events"}, kind=DIN, **{sizes: []}) == (
            f"{sizes}: expected the width of at least one layer, got none"
        )
    assert refused(*names, reading={"history": "events"}, kind=DIN, activation="dice") == (
        "activation: got 'dice', expected one of 'relu', 'silu', 'gelu'"
    )
    assert refused(*names, reading={"history": "events"}, kind=DLRMHSTU, num_layers=0) == (
        "num_layers: got 0, expected 1 or more; without a block candidates read no history"
    )


def test_histories_that_are_no_lists_of_the_request_are_refused() -> None:
    assert refused(*LISTS, "genres", histories=["liked", "genres"]) == (
        "histories: got 'genres', expected some of the request's lists of ids without weights: liked, tags"
    )
    assert refused("user", "item", "click", histories=["item"]) == (
        "histories: got 'item', expected some of the request's lists of ids without weights: there are none"
    )


def test_labels_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch, splits: dict[str, Split]) -> None:
    line = "label 'buy': got 1 where 'click' is 0, expected 0 there, as conditional says; implied=True counts both as 1"
    split, model = of_variant(splits, "no history")
    batch = split.train.gather(range(4))
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole line is compared
        model(relabelled(batch, [0], [1]))
    assert str(caught.value) == line
    # Where one is missing nothing is known.
    model(relabelled(batch, [-1, 0], [1, -1]))
    split = shop("item", "time", "click", "buy")
    column = split.train.dataset.column
    wrong = {"click": 0.0, "buy": 1.0}
    monkeypatch.setattr(split.train.dataset, "column", lambda name: column(name) * 0 + wrong[name], raising=False)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        RankingModel.of(split, conditional={"buy": "click"})
    assert str(caught.value) == line
    RankingModel.of(split, conditional={"buy": "click"}, implied=True)
    wrong["buy"] = 5.0
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        RankingModel.of(split)
    assert str(caught.value) == (
        "tasks: got the label 'buy' with values from 5 to 5, expected 0 to 1; say from where on it is 1 when the table is read, "
        'label="buy>=5", or name other tasks'
    )
    assert RankingModel.of(split, tasks=["click"]).tasks == ["click"]


# How it is used.


@every_variant
def test_a_saved_model_is_built_again(splits: dict[str, Split], name: str, tmp_path: Any) -> None:
    """By its name and arguments alone, statistics with its weights."""
    split, model = of_variant(splits, name)
    batch = split.test.gather(range(len(split.test)))
    other = build(str(name_of(model)), **model.config)
    other.load_state_dict(model.state_dict())
    expected = model.eval()(batch)
    assert torch.equal(other.eval()(batch).loss, expected.loss)
    save_task(model, tmp_path / "saved")
    opened = load_task(tmp_path / "saved")
    assert type(opened) is type(model)
    assert opened.tasks == model.tasks
    for task, of in expected.scores.items():
        assert torch.equal(opened(batch).scores[task].logits, of.logits)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(batch).loss, expected.loss)


@every_variant
def test_under_autocast(splits: dict[str, Split], name: str) -> None:
    """Logits and gradients are float32, and those of float32 but for rounding."""
    split, model = of_variant(splits, name)
    batch = split.train.gather(range(20))
    expected = model(batch)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(batch)
    assert {of.logits.dtype for of in out.scores.values()} == {out.loss.dtype} == {torch.float32}
    torch.testing.assert_close(out.loss, expected.loss, rtol=0.1, atol=0.02)
    found = gradients(out.loss, model)
    assert {of.dtype for of in found.values()} == {torch.float32}
    assert all(of.isfinite().all() for of in found.values())


# TorchRec's collections break the graph, where Dynamo looks at the `grad` of what is no leaf.
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize(
    "name",
    [
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("everything", "everything by dots", "experts of tasks", "dlrm", "dlrm-hstu", "din", "shared lists")
        ),
        *(
            "requests alone",
            "wukong of requests alone",
            "dcnv2 in parallel",
            "dlrm-hstu without times",
            "din of lists and events",
        ),
    ],
)
def test_is_compiled(splits: dict[str, Split], name: str) -> None:
    split, model = of_variant(splits, name)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager")
    for places in (range(20), range(20, 27), [0]):
        batch = split.train.gather(places)
        out, expected = compiled(batch), model(batch)
        torch.testing.assert_close(out.loss, expected.loss)
        torch.testing.assert_close(out.rows(), expected.rows())
        ours, theirs = gradients(out.loss, model), gradients(expected.loss, model)
        for key, of in ours.items():
            torch.testing.assert_close(of, theirs[key], rtol=1e-4, atol=1e-5)


def given_to(split: Split) -> list[Batch]:
    """Of other sizes; of one request; and none with an event."""
    gather = split.train.gather
    return [gather(range(20)), gather(range(20, 27), max_history=2), gather([0]), gather([3, 0], max_history=0)]


OF_NAMES = (
    "experts",
    "experts of tasks",
    "dlrm",
    "dcnv2",
    "wukong of requests alone",
    "dlrm-hstu",
    "din",
    "din of lists and events",
)
#: Variants that are taken apart in CI.
APART = ("plain by dots", "no history", "shared lists without a history", "experts", "dcnv2", "dlrm-hstu", "din")
SERVED = ("everything", "lists as histories", "requests alone", "shared lists", *OF_NAMES)


@pytest.mark.parametrize("name", [name if name in SERVED else pytest.param(name, marks=pytest.mark.long) for name in VARIANTS])
def test_scores_are_exported_for_all_sizes(splits: dict[str, Split], name: str) -> None:
    """From an example of one request, too; labels, weights and who it is are no inputs."""
    split, model = of_variant(splits, name, dropout=0.5)
    given = given_to(split)
    for example in given[2:3] if name in SERVED else given[::2]:
        program = export_scores(model, example).module()
        assert model.training
        for batch in given:
            found = program(**scoring_tensors(model, batch))
            expected = model.eval().logits(batch)
            assert list(found) == model.tasks
            for task, of in expected.items():
                assert of.shape == batch.rows.shape
                assert torch.equal(found[task], of)
                assert torch.equal(model(batch).scores[task].logits, of)
                if name == "wukong":
                    # PyTorch multiplies tokens in another order where there are no gradients.
                    torch.testing.assert_close(model.predict(batch)[task], of.sigmoid())
                else:
                    assert torch.equal(model.predict(batch)[task], of.sigmoid())
            model.train()
    known = {"rows", "labels", "label_mask", "weights", "request_index", "user_index", "sampled"}
    without_candidates = name in ("one id", "a list alone") or name.endswith("requests alone")
    assert set(scoring_tensors(model, given[0])) & known == ({"rows"} if without_candidates else set())


def test_a_saved_program_scores_requests_without_candidates(tmp_path: Any) -> None:
    split = shop("user", "item", "time", "age", history="events", requests=90)
    torch.manual_seed(0)
    model = RankingModel.of(split, embedding_dim=4, layer_sizes=(4,))
    torch.export.save(export_scores(model, split.train.gather(range(9), negatives=2)), tmp_path / "scores.pt2")
    program = torch.export.load(tmp_path / "scores.pt2").module()
    batch = split.train.gather([40, 41, 42], negatives=2)
    expected = model.eval().logits(batch)["next"]
    tensors = scoring_tensors(model, batch)
    assert torch.equal(program(**tensors)["next"], expected)
    # Of the first request alone, or of none, the candidates are asked for.
    for counts in ([int(batch.candidate_offsets[1]), 0, 0], [0, 0, 0]):
        parts = dict(zip(batch.features.keys(), batch.features.values().split(batch.features.length_per_key()), strict=True))
        lengths = batch.features.lengths().clone().view(len(parts), 3)
        lengths[batch.features.keys().index("item")] = torch.tensor(counts)
        parts["item"] = parts["item"][: sum(counts)]
        tensors["features_values"] = torch.cat([parts[key] for key in model.inputs.keys("features")])
        tensors["features_lengths"] = lengths[[batch.features.keys().index(key) for key in model.inputs.keys("features")]].view(
            -1
        )
        tensors["candidate_offsets"] = torch.tensor([0, *counts]).cumsum(0)
        torch.testing.assert_close(program(**tensors)["next"], expected[: sum(counts)])


def test_nothing_is_exported_or_predicted_of_no_requests(splits: dict[str, Split]) -> None:
    split, model = of_variant(splits, "everything")
    nothing = split.train.gather([])
    with pytest.raises(ValueError, match=r"^batch: got no requests, expected an example of at least one$"):
        export_scores(model, nothing)
    assert {name: of.tolist() for name, of in model.predict(nothing).items()} == {"click": [], "buy": []}


def test_batches_of_other_columns_are_not_scored(splits: dict[str, Split]) -> None:
    split, model = of_variant(splits, "everything")
    batch = split.train.gather([0])
    cure = "expected what the model was made for; take one of a table with the same columns"
    with pytest.raises(ValueError, match=f"^batch: got no history_times, {cure}$"):
        scoring_tensors(model, dataclasses.replace(batch, history_times=None))
    other = split.train.gather([0]).weighted_features
    with pytest.raises(ValueError, match=re.escape(f"batch: got no features['user'], {cure}")):
        scoring_tensors(model, dataclasses.replace(batch, features=other))
    # Of another order.
    keys = batch.features.keys()
    turned = dataclasses.replace(batch, features=batch.features.permute(list(range(len(keys)))[::-1]))
    assert turned.features.keys() == keys[::-1]
    for one, two in zip(scoring_tensors(model, batch).values(), scoring_tensors(model, turned).values(), strict=True):
        assert torch.equal(one, two)


def test_predicts_of_a_table_without_labels(splits: dict[str, Split]) -> None:
    split, model = of_variant(splits, "plain")
    batch = split.test.gather(range(3))
    bare = dataclasses.replace(batch, labels=batch.labels[:, :0], label_mask=batch.label_mask[:, :0])
    for name, of in model.predict(batch).items():
        assert torch.equal(model.predict(bare)[name], of)
    with pytest.raises(DataError):
        model(bare)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(PLACE.name != "cpu", reason="packages are for the CPU")
@pytest.mark.parametrize("name", [name if name in APART else pytest.param(name, marks=pytest.mark.long) for name in VARIANTS])
def test_exported_scores_are_taken_apart(splits: dict[str, Split], name: str) -> None:
    """Without operators of jagged and of FBGEMM, for requests in all numbers."""
    split, model = of_variant(splits, name)
    given = given_to(split)
    program = decomposed(export_scores(model, given[0]))
    targets = {node.target for node in program.graph.nodes if isinstance(node.target, torch._ops.OpOverload)}
    assert {target.namespace for target in targets} <= {"aten", "prims"}
    assert not any(target._schema.is_mutable for target in targets)
    score = program.module()
    for batch in given:
        found, expected = score(**scoring_tensors(model, batch)), model.eval().logits(batch)
        for task, of in expected.items():
            torch.testing.assert_close(found[task], of, rtol=1e-4, atol=1e-5)


SERVE = """
import sys
import torch

score = torch._inductor.aoti_load_package("scores.pt2")
torch.save([score(**of) for of in torch.load("given.pt")], "found.pt")
assert not {"jagged", "torchrec", "fbgemm_gpu"} & set(sys.modules)
"""


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(PLACE.name != "cpu" or shutil.which("g++") is None, reason="Inductor compiles C++ for the CPU")
@pytest.mark.parametrize("name", ["everything", "wukong", "din of lists and events", "dlrm-hstu of lists and events"])
def test_a_package_scores_where_jagged_is_not(splits: dict[str, Split], name: str, tmp_path: Any) -> None:
    split, model = of_variant(splits, name)
    given = given_to(split)
    write_package(export_scores(model, given[0]), tmp_path / "scores.pt2")
    torch.save([scoring_tensors(model, batch) for batch in given], tmp_path / "given.pt")
    subprocess.run([sys.executable, "-W", "ignore", "-c", SERVE], cwd=tmp_path, check=True)
    for found, batch in zip(torch.load(tmp_path / "found.pt"), given, strict=True):
        for task, of in model.eval().logits(batch).items():
            torch.testing.assert_close(found[task], of, rtol=1e-4, atol=1e-5)


def test_checkpointing_computes_the_same_again(splits: dict[str, Split]) -> None:
    """Loss and all gradients, with lists of candidates in shared tables, and dropout."""
    split, model = of_variant(splits, "shared lists", dropout=0.3)
    batch, found = split.train.gather(range(9)), []
    for is_checkpointed in (False, True):
        torch.manual_seed(1)
        loss = checkpoint(lambda of: model(of).loss, batch, use_reentrant=False) if is_checkpointed else model(batch).loss
        found.append({"loss": loss.detach(), **gradients(loss, model)})
    assert len(found[0]) > 10
    for name, of in found[0].items():
        assert torch.equal(of, found[1][name]), name


@pytest.mark.parametrize("name", ["lists and events by dots", "dlrm-hstu of lists and events", "din of lists and events"])
def test_histories_that_are_encoded_again_have_the_same_gradients(splits: dict[str, Split], name: str) -> None:
    """Loss and all gradients with dropout, of less than half of what a step keeps, in evaluation mode, too."""
    found: list[dict[str, Tensor]] = []
    kept = [0, 0]

    def keep(tensor: Tensor) -> Tensor:
        kept[recompute] += tensor.nbytes
        return tensor

    for recompute in (False, True):
        split, model = of_variant(splits, name, dropout=0.3, recompute=recompute)
        batch = split.train.gather(range(9))
        of_modes = {}
        for mode in (True, False):
            torch.manual_seed(1)
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                loss = model.train(mode)(batch).loss
            of_modes |= {f"{name} {mode}": of for name, of in {"loss": loss.detach(), **gradients(loss, model)}.items()}
        found.append(of_modes)
        with torch.no_grad():
            assert torch.equal(model(batch).loss, found[0]["loss False"])
    assert found[0].keys() == found[1].keys()
    assert len(found[0]) > 20
    for name, of in found[0].items():
        assert torch.equal(of, found[1][name]), name
    assert kept[1] < kept[0] / 2


def of_both(splits: dict[str, Split], name: str, change: Any = None, **options: Any) -> list[dict[str, Tensor]]:
    """Loss and gradients of a step that keeps what it needs, and of one that encodes again."""
    found = []
    for recompute in (False, True):
        split, model = of_variant(splits, name, recompute=recompute, **options)
        if change is not None:
            change(model)
        torch.manual_seed(1)
        loss = model(split.train.gather(range(9))).loss
        found.append({"loss": loss.detach(), **gradients(loss, model)})
    return found


def change_dropout(model: RequestModel) -> None:
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.3


def change_attention(model: RequestModel) -> None:
    for part in model.modules():
        if hasattr(part, "attention_dropout"):
            part.attention_dropout = 0.3


def train_blocks_alone(model: RequestModel) -> None:
    change_dropout(model.eval())
    for history in model.scorer.histories:
        history.blocks.train()


@pytest.mark.parametrize("change", [change_dropout, change_attention, train_blocks_alone], ids=lambda of: of.__name__)
def test_what_draws_draws_the_same_again(splits: dict[str, Split], change: Any) -> None:
    """Whatever the options of the model were."""
    kept, again = of_both(splits, "lists and events by dots", change)
    assert all(torch.equal(of, again[name]) for name, of in kept.items())
    still, _ = of_both(splits, "lists and events by dots")
    assert not torch.equal(kept["loss"], still["loss"])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_encoder_is_called_again_with_the_same(splits: dict[str, Split]) -> None:
    """Its second call sees no tensor that the first one did not."""

    def compile_encoders(model: RequestModel) -> None:
        torch.compiler.reset()
        for history in model.scorer.histories:
            history.compile(backend="aot_eager", dynamic=True)

    kept, again = of_both(splits, "a list alone", compile_encoders)
    torch.testing.assert_close(again, kept)


def test_encoding_again_under_autocast(splits: dict[str, Split]) -> None:
    """Backward is outside of it."""
    found = []
    for recompute in (False, True):
        split, model = of_variant(splits, "everything", recompute=recompute)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(split.train.gather(range(9))).loss
        found.append({"loss": loss.detach(), **gradients(loss, model)})
    assert all(torch.equal(of, found[1][name]) for name, of in found[0].items())


@every_variant
def test_a_trace_shows_the_lookups_and_one_call_of_the_rest(splits: dict[str, Split], name: str) -> None:
    split, model = of_variant(splits, name)
    leaves = [f"bags.{key}" for key in model.bags] + [f"sequences.{place}" for place in range(len(model.sequences))]
    graph = Tracer(leaf_modules=["EmbeddingCollection"]).trace(model)
    assert [node.target for node in graph.nodes if node.op == "call_module"] == [*leaves, "scorer"]
    batch = split.train.gather(range(5))
    assert torch.equal(torch.fx.GraphModule(model, graph)(batch).loss, model(batch).loss)


def test_the_meta_device_costs_nothing(splits: dict[str, Split]) -> None:
    _, model = of_variant(splits, "everything")
    empty = RankingModel(**model.config, device="meta")
    assert all(of.is_meta for of in empty.state_dict().values())


def fitted(split: Split, output: Any, epochs: int, drawn: dict[str, Any] | None = None, **options: Any) -> Any:
    torch.manual_seed(0)
    model = RankingModel.of(split, **options)
    parts = [
        getattr(split, part).loader(batch_size=32, shuffle=part == "train", max_history=10, **(drawn or {}))
        for part in ("train", "valid", "test")
    ]
    config = TrainerConfig(
        output=str(output), max_epochs=epochs, learning_rate=0.01, monitor=f"{model.tasks[0]}/auc" if not drawn else "auc",
        device="cpu",
    )  # fmt: skip
    return model, Trainer(model, config).fit(*parts, progress=False)


@pytest.mark.parametrize("cross", ["dcn", *(pytest.param(other, marks=pytest.mark.long) for other in ("dot", None))])
def test_learns_what_users_click_and_buy(tmp_path: Any, cross: Any) -> None:
    split = shop("request", *PLAIN, "genres", "tags", requests=500, history="events")
    model, result = fitted(split, tmp_path / "run", 4, cross=cross, conditional={"buy": "click"})
    assert result.metrics.test.click["auc"] > 0.9
    assert result.metrics.test.buy["auc"] > 0.9
    opened = load_task(tmp_path / "run")
    batch = split.test.gather(range(10))
    assert torch.equal(opened.predict(batch)["buy"], model.eval().predict(batch)["buy"])


def test_learns_from_drawn_negatives(tmp_path: Any) -> None:
    """And says of a batch without them what it lacks."""
    split = shop("user", "item", "time", requests=25, history="events")
    model, result = fitted(split, tmp_path / "run", 1, {"negatives": 3, "seed": 1})
    assert list(result.metrics.test) == ["sampled", "sampled_next"]
    with pytest.raises(DataError) as caught:
        model(split.train.gather([0]))
    assert str(caught.value) == (
        "batch: found a table without labels, and no negatives, expected the label 0; "
        'name one when the table is read (label="click"), or give the loader negatives=n'
    )


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = told_by("tests.models.ranking_processes", tmp_path_factory.mktemp("processes"))
    return found


@pytest.mark.parametrize("case", ["dcn", "dot", "dlrm", "dcnv2", "wukong", "mmoe", "dlrm-hstu", "din", "shared lists"])
def test_two_processes_of_torchrecs_pipeline_train_as_one_does(processes: dict[str, Any], case: str) -> None:
    """Tables in every way of sharding, requests and candidates of other numbers in each process."""
    found = processes[case]
    assert found["pipelined"] == found["planned"]
    together, alone = found["losses"]
    assert together == pytest.approx(alone, rel=1e-5)
    # Of logits, after steps that move them by more than 0.1.
    assert max(found["apart"]) < 1e-5
