from __future__ import annotations

import hashlib
import itertools
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import csv

from jagged.cli import main
from jagged.data import Dataset, ImpressionTruth, Kind, Schema, inspect_table, synthetic_impressions
from jagged.data.impressions import AGE_GROUPS, COUNTRIES, DEVICES, DISCOUNTS, PAGES, ImpressionModel
from jagged.pointwise import PointwiseMetrics
from tests.reference import impressions as twin

KINDS = {
    "request_id": Kind.REQUEST, "user_id": Kind.USER, "item_id": Kind.CANDIDATE, "timestamp": Kind.TIME, "age_group": Kind.ID,
    "country": Kind.ID, "device": Kind.ID, "page": Kind.ID, "hour": Kind.ID, "position": Kind.ID, "category": Kind.ID,
    "brand": Kind.ID, "price": Kind.NUMBER, "discount": Kind.NUMBER, "click": Kind.LABEL, "buy": Kind.LABEL,
}  # fmt: skip
FINGERPRINT = "484f1f6dda552f30e6e19b2a7aaf5d95704ce1a9830022be010e40fa5743adcc"


@pytest.fixture(scope="module")
def sample() -> tuple[pa.Table, ImpressionTruth]:
    return synthetic_impressions(1, num_users=100, history_length=30)


@pytest.fixture(scope="module")
def default() -> tuple[pa.Table, ImpressionTruth]:
    return synthetic_impressions()


def columns(table: pa.Table) -> dict[str, np.ndarray]:
    return {name: np.asarray(table[name].to_pylist()) for name in KINDS}


def clicks_before(table: pa.Table) -> list[list[tuple[int, str]]]:
    """Of each row the clicks of its user at earlier times, in the table's order: looked up one by one, by times alone."""
    rows, of_user = table.to_pylist(), {}
    for row in rows:
        of_user.setdefault(row["user_id"], []).append(row)
    return [
        [(of["item_id"], of["category"]) for of in of_user[row["user_id"]] if of["timestamp"] < row["timestamp"] and of["click"]]
        for row in rows
    ]


def test_the_sample_is_a_function_of_its_seed(default: tuple[pa.Table, ImpressionTruth]) -> None:
    (one, truth), (same, again), (other, _) = (synthetic_impressions(seed, num_users=20) for seed in (3, 3, 4))
    assert one.equals(same)
    assert not one.slice(0, 100).equals(other.slice(0, 100))
    assert (truth.click_probability == again.click_probability).all()
    assert (truth.buy_probability == again.buy_probability).all()
    content = repr([default[0][name].to_pylist() for name in KINDS])
    assert hashlib.sha256(content.encode()).hexdigest() == FINGERPRINT


def test_the_lists_change_nothing_else(sample: tuple[pa.Table, ImpressionTruth]) -> None:
    assert sample[0].drop_columns(["clicked_item_id", "clicked_category"]).equals(synthetic_impressions(1, num_users=100)[0])


def test_its_columns(default: tuple[pa.Table, ImpressionTruth]) -> None:
    table, truth = default
    texts = {"age_group", "country", "device", "page", "category", "brand"}
    expected = {
        name: pa.string() if name in texts else pa.float64() if KINDS[name] is Kind.NUMBER else pa.int64() for name in KINDS
    }
    assert dict(zip(table.column_names, table.schema.types, strict=True)) == expected
    assert not any(column.null_count for column in table.columns)
    assert 60_000 < len(table) < 150_000
    c = columns(table)
    assert (np.diff(c["timestamp"]) >= 0).all()
    assert (c["hour"] == c["timestamp"] // 3600 % 24).all()
    assert (np.diff(c["request_id"]) >= 0).all()
    first = np.flatnonzero(np.diff(c["request_id"], prepend=0))
    assert c["request_id"][first].tolist() == list(range(1, len(first) + 1))
    for name in ("user_id", "timestamp", "device", "page", "age_group", "country", "hour"):
        assert (c[name] == np.repeat(c[name][first], np.diff(np.append(first, len(table))))).all(), name
    sizes = np.bincount(c["request_id"])[1:]
    assert (sizes.min(), sizes.max()) == (1, 12)
    assert (c["position"] == np.arange(len(table)) - np.repeat(first, sizes) + 1).all()
    # A request shows no item twice, and a user has one request at a time.
    assert len(set(zip(c["request_id"], c["item_id"], strict=True))) == len(table)
    assert len(set(zip(c["user_id"][first], c["timestamp"][first], strict=True))) == len(first)
    assert (c["buy"] <= c["click"]).all()
    assert 0.2 < c["click"].mean() < 0.4
    assert 0.2 < c["buy"].sum() / c["click"].sum() < 0.5
    # Properties of users and items are theirs in every row.
    for owner, names in (("user_id", ("age_group", "country")), ("item_id", ("category", "brand", "price"))):
        for name in names:
            assert len(set(zip(c[owner], c[name], strict=True))) == len(set(c[owner])), name
    # Some have many times as many rows as others.
    for name, count in (("user_id", 800), ("item_id", 240)):
        rows = np.sort(np.bincount(c[name])[1:])
        assert len(rows) == count
        assert rows[-count // 10 :].mean() > 4 * np.median(rows)
    # After the 80 % quantile of time there is next to nothing that was not there before.
    train = int(0.8 * len(table))
    for name in ("user_id", "item_id"):
        assert np.isin(c[name][train:], c[name][:train]).mean() > 0.999
    assert (truth.users == c["user_id"]).all()
    assert all((truth.labels[task] == c[task]).all() for task in ("click", "buy"))


def test_labels_follow_the_probabilities(default: tuple[pa.Table, ImpressionTruth]) -> None:
    _, truth = default
    click, buy = truth.labels["click"], truth.labels["buy"]
    after = truth.buy_probability[click] / truth.click_probability[click]
    for labels, p in ((click, truth.click_probability), (buy, truth.buy_probability), (buy[click], after)):
        assert ((p > 0) & (p < 1)).all()
        squares = []
        for rows in np.array_split(np.argsort(p, kind="stable"), 50):
            squares.append((labels[rows] - p[rows]).sum() ** 2 / (p[rows] * (1 - p[rows])).sum())
        # Chi-square of 50 degrees of freedom: its mean is 50, its deviation 10.
        assert 15 < sum(squares) < 100
        assert max(squares) < 16


def test_probabilities_depend_on_the_row_and_on_earlier_clicks_alone(sample: tuple[pa.Table, ImpressionTruth]) -> None:
    """All probabilities again, from the table's columns, the model's effects and clicks that are looked up by their times."""
    table, truth = sample
    before = clicks_before(table)
    shares = []
    for row, clicks in zip(table["category"].to_pylist(), before, strict=True):
        last = [category for _, category in clicks[-20:]]
        shares.append(last.count(row) / len(last) if last else 0.0)
    assert truth.affinity == pytest.approx(np.array(shares))
    assert np.mean(truth.affinity > 0) > 0.3
    model, c = ImpressionModel(100, 240, np.random.Generator(np.random.PCG64(1))), columns(table)
    user, item = c["user_id"] - 1, c["item_id"] - 1
    assert (np.array(AGE_GROUPS)[model.user["age_group"]][user] == c["age_group"]).all()
    assert (np.array(COUNTRIES)[model.user["country"]][user] == c["country"]).all()
    codes = {"user": user, "item": item, "position": c["position"] - 1, "hour": c["hour"]}
    for name, values in (("page", PAGES), ("device", DEVICES), ("discount", DISCOUNTS)):
        codes[name] = np.array([values.index(value) for value in c[name].tolist()])
    click, after = (model.probability(task, model.log_odds(task, codes), np.array(shares)) for task in ("click", "buy"))
    assert truth.click_probability == pytest.approx(click)
    assert truth.buy_probability == pytest.approx(click * after)


def test_lists_hold_the_clicks_of_earlier_times(sample: tuple[pa.Table, ImpressionTruth]) -> None:
    table, _ = sample
    before = clicks_before(table)
    assert max(map(len, before)) > 30
    lists = [table[name].to_pylist() for name in ("clicked_item_id", "clicked_category")]
    for clicks, items, categories in zip(before, *lists, strict=True):
        assert list(zip(items, categories, strict=True)) == clicks[-30:]


def test_lists_are_made_in_pieces(sample: tuple[pa.Table, ImpressionTruth], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jagged.data.impressions._ELEMENTS", 30 * 1000 + 7)
    table, _ = synthetic_impressions(1, num_users=100, history_length=30)
    assert table["clicked_item_id"].num_chunks == -(-len(table) // 1000)
    assert table.equals(sample[0])


def test_a_dataset_of_it_has_the_same_histories(sample: tuple[pa.Table, ImpressionTruth]) -> None:
    """Histories of the table's own clicks, as a dataset gathers them, show what the truth knows."""
    table, truth = sample
    clicked = table.filter(pa.compute.equal(table["click"], 1)).select(["user_id", "item_id", "timestamp", "category"])
    dataset = Dataset.from_table(table.select(list(KINDS)), events=clicked, label=("click", "buy"), progress=False)
    of_candidates = {column.name for column in dataset.schema.columns if column.of == "candidate"}
    assert of_candidates == {"position", "category", "brand", "price", "discount"}
    part = dataset.split(by="time", valid=0.1, test=0.1).test
    batch = part.gather(np.arange(len(part)))
    histories = batch.features["history.category"]
    seen = histories.values().split(histories.lengths().tolist())
    of_request, own = batch.candidate_requests.tolist(), batch.candidate_ids("category")
    found = [
        float((seen[request][-20:] == category).float().mean()) if len(seen[request]) else 0.0
        for request, category in zip(of_request, own, strict=True)
    ]
    # The dataset's rows are in the order of users, as they first come, and of times, as those of a user are here.
    _, first, user = np.unique(truth.users, return_index=True, return_inverse=True)
    rows = np.argsort(first[user], kind="stable")[batch.rows.numpy()]
    assert 1500 < len(rows) < 2000
    assert np.array(found) == pytest.approx(truth.affinity[rows], abs=1e-6)
    assert batch.labels[:, 0].tolist() == truth.labels["click"][rows].astype(float).tolist()


def test_the_kinds_of_its_columns_are_found(sample: tuple[pa.Table, ImpressionTruth]) -> None:
    table, _ = sample
    for words in ({}, {"label": ("click", "buy")}):
        inspection = inspect_table(table, **words)
        expected = KINDS | {"clicked_item_id": Kind.IDS, "clicked_category": Kind.IDS}
        assert {column.name: column.kind for column in inspection.schema.columns} == expected
        assert inspection.schema["clicked_item_id"].table_name == "item_id"


def test_jagged_inspect_finds_them_in_a_file(
    sample: tuple[pa.Table, ImpressionTruth], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, saved = tmp_path / "impressions.csv", tmp_path / "impressions.toml"
    csv.write_csv(sample[0].select(list(KINDS)), path)
    words = ["jagged", "inspect", str(path), "--label", "click", "--label", "buy", "--save-schema", str(saved)]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit, match="0"):
        main()
    assert {column.name: column.kind for column in Schema.load(saved).columns} == KINDS
    dataset = Dataset.from_table(path, saved, progress=False)
    assert dataset.counts["kept"] == len(sample[0])
    assert dataset.counts["duplicates"] == 0


def pairs_in_order(scores: Any, labels: Any) -> float:
    ahead = np.asarray(scores)[labels][:, None] - np.asarray(scores)[~labels]
    return float(((ahead > 0) + (ahead == 0) / 2).mean())


def test_figures_equal_their_definitions(sample: tuple[pa.Table, ImpressionTruth]) -> None:
    table, truth = sample
    rng = np.random.default_rng(0)
    given = np.round(rng.random(len(table)), 2)
    last = slice(len(table) - 2000, len(table))
    for task, p in (("click", truth.click_probability), ("buy", truth.buy_probability)):
        for rows in (last, np.arange(len(table))[last][::-1], np.arange(len(table)) >= len(table) - 2000):
            for scores, options in ((p, {}), (given, {"probabilities": given[rows]})):
                labels, users = truth.labels[task][rows], truth.users[rows]
                figures = truth.figures(task, rows, **options)
                assert figures["auc"] == pytest.approx(pairs_in_order(scores[rows], labels))
                groups = [users == user for user in np.unique(users)]
                groups = [of for of in groups if 0 < labels[of].sum() < of.sum()]
                total = sum(of.sum() * pairs_in_order(scores[rows][of], labels[of]) for of in groups)
                assert figures["gauc"] == pytest.approx(total / sum(of.sum() for of in groups))
        metrics = PointwiseMetrics()
        metrics.update(torch.from_numpy(np.log(p / (1 - p))), torch.from_numpy(truth.labels[task]))
        expected = metrics.compute()
        figures = truth.figures(task)
        assert (figures["auc"], figures["logloss"]) == pytest.approx((expected["auc"], expected["logloss"]))


def test_figures_of_labels_that_are_alike(sample: tuple[pa.Table, ImpressionTruth]) -> None:
    _, truth = sample
    rows = np.flatnonzero(~truth.labels["click"])[:50]
    assert set(truth.figures("click", rows)) == {"logloss"}
    one_each = [int(np.flatnonzero(truth.labels["click"] & (truth.users == 1))[0])]
    one_each.append(int(np.flatnonzero(~truth.labels["click"] & (truth.users == 2))[0]))
    assert set(truth.figures("click", one_each)) == {"auc", "logloss"}
    certain = truth.figures("click", rows, probabilities=np.ones(50))
    assert certain["logloss"] == pytest.approx(-np.log(1e-15))


def test_no_prediction_is_better_than_the_truth(default: tuple[pa.Table, ImpressionTruth]) -> None:
    _, truth = default
    rng = np.random.default_rng(0)
    for task, p in (("click", truth.click_probability), ("buy", truth.buy_probability)):
        best = truth.figures(task)
        odds = np.log(p / (1 - p))
        for worse in (odds + 0.3 * rng.standard_normal(len(p)), 1.2 * odds, odds - 2 * truth.affinity):
            figures = truth.figures(task, probabilities=1 / (1 + np.exp(-worse)))
            assert figures["logloss"] > best["logloss"]
            assert figures["auc"] <= best["auc"] + 1e-12


# Of the sample, which changes seldom, not of the library.
@pytest.mark.long
def test_a_model_of_histories_comes_near_and_a_linear_one_does_not() -> None:
    threads = torch.get_num_threads()
    # Small tensors gain nothing from more of them.
    torch.set_num_threads(1)
    try:
        figures = {name: of["click"] for name, of in twin.reached(0).items()}
    finally:
        torch.set_num_threads(threads)
    best = figures["true"]
    assert 0.8 < best["auc"] < 0.9
    assert best["auc"] - figures["twin"]["auc"] < 0.004
    assert best["gauc"] - figures["twin"]["gauc"] < 0.004
    assert figures["twin"]["logloss"] - best["logloss"] < 0.006
    for name, behind in (("no history", 0.01), ("linear", 0.03), ("linear, few", 0.03)):
        assert best["auc"] - figures[name]["auc"] > behind
        assert best["gauc"] - figures[name]["gauc"] > behind


def test_a_hundred_thousand_rows_with_lists_take_seconds() -> None:
    began = time.perf_counter()
    table, truth = synthetic_impressions(num_users=500, num_items=2000, mean_requests=44, history_length=200)
    # About one second of a quiet machine.
    assert time.perf_counter() - began < 10
    assert len(table) > 90_000
    assert len(truth.affinity) == len(table)
    assert np.mean([len(of) for of in table["clicked_item_id"].to_pylist()]) > 40


@pytest.mark.parametrize(
    "sizes",
    [
        {"num_users": 0},
        {"num_items": 23},
        {"mean_requests": 3},
        {"max_candidates": 0},
        {"max_candidates": 21},
        {"history_length": -1},
    ],
)
def test_sizes_out_of_range(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="sizes: got"):
        synthetic_impressions(**sizes)


@pytest.mark.parametrize(
    "sizes", [{"num_users": 1}, {"max_candidates": 1, "num_items": 2}, {"max_candidates": 20, "num_items": 40}]
)
def test_the_least_sizes(sizes: dict[str, int]) -> None:
    table, truth = synthetic_impressions(5, **({"num_users": 5} | sizes))
    requests = [list(of) for _, of in itertools.groupby(table["request_id"].to_pylist())]
    assert max(map(len, requests)) <= sizes.get("max_candidates", 12)
    assert set(truth.figures("click")) == {"auc", "gauc", "logloss"}


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("view",), {}, "task: got 'view', expected one of 'click', 'buy'"),
        (("click", []), {}, "rows: got none"),
        (("click", [0, 1]), {"probabilities": [0.5]}, r"probabilities: got shape \(1,\), expected \(2,\)"),
        (("click", [0, 1]), {"probabilities": [0.5, 1.5]}, "in 0 to 1"),
        (("click", [0, 1]), {"probabilities": [0.5, float("nan")]}, "in 0 to 1"),
    ],
)
def test_figures_refuse(sample: tuple[pa.Table, ImpressionTruth], arguments: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sample[1].figures(*arguments, **options)
