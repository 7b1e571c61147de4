"""Metrics of label rankings against their definitions, written out sample by sample."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jagged.data import DataError
from jagged.label_metrics import LabelFilter, LabelMetrics, propensities
from jagged.metrics import Figures
from tests.processes import told_by

KS = (1, 3, 4)
WITH_WEIGHTS, WITHOUT = ("p", "psp", "ndcg", "psndcg", "recall"), ("p", "ndcg", "recall")


def jagged(lists: list[list[int]], dtype: torch.dtype = torch.int64) -> tuple[torch.Tensor, torch.Tensor]:
    offsets = [0, *itertools.accumulate(map(len, lists))]
    return torch.tensor([label for one in lists for label in one], dtype=torch.int64), torch.tensor(offsets, dtype=dtype)


def padded(lists: list[list[int]], width: int) -> torch.Tensor:
    return torch.tensor([([*one, *[-1] * width])[:width] for one in lists], dtype=torch.int64).view(len(lists), width)


@st.composite
def worlds(draw: Any) -> Any:
    """Labels with weights, and samples with a ranking, which may be short, and positives, of which there may be none."""
    num_labels = draw(st.integers(1, 9))
    weights = draw(st.lists(st.floats(0.01, 100), min_size=num_labels, max_size=num_labels))
    order = st.permutations(range(num_labels))
    cut = st.integers(0, num_labels)
    samples = draw(st.lists(st.tuples(order, cut, order, cut), max_size=8))
    return num_labels, weights, [top[:kept] for top, kept, _, _ in samples], [own[:kept] for _, _, own, kept in samples]


def reference(weights: list[float], top: list[list[int]], positives: list[list[int]], ks: tuple[int, ...]) -> dict[str, float]:
    kept = [(ranked, set(own)) for ranked, own in zip(top, positives, strict=True) if own]
    discounts = [1 / math.log2(place + 2) for place in range(max(ks))]

    def mean(values: list[float]) -> float:
        return sum(values) / len(values) if values else math.nan

    def gain(ranked: list[int], own: set[int], k: int, *, weighted: bool, discounted: bool) -> float:
        total = 0.0
        for place, label in enumerate(ranked[:k]):
            if label in own:
                total += (weights[label] if weighted else 1) * (discounts[place] if discounted else 1)
        return total / (sum(discounts[: min(k, len(own))]) if discounted else k)

    result = {}
    for discounted, plain, scored in ((False, "p", "psp"), (True, "ndcg", "psndcg")):
        for k in ks:
            result[f"{plain}@{k}"] = mean([gain(*one, k, weighted=False, discounted=discounted) for one in kept])
            got = mean([gain(*one, k, weighted=True, discounted=discounted) for one in kept])
            best = [(sorted(own, key=lambda label: -weights[label]), own) for _, own in kept]
            result[f"{scored}@{k}"] = got / mean([gain(*one, k, weighted=True, discounted=discounted) for one in best])
    for k in ks:
        result[f"recall@{k}"] = mean([len(own & set(ranked[:k])) / len(own) for ranked, own in kept])
    return result | {"samples": len(kept), "samples_without_positives": len(top) - len(kept)}


@given(worlds(), st.lists(st.integers(0, 8), max_size=4), st.sampled_from([torch.int32, torch.int64]))
def test_matches_the_definition_whatever_the_batches_and_processes(world: Any, cuts: list[int], dtype: torch.dtype) -> None:
    num_labels, weights, top, positives = world
    expected = reference(weights, top, positives, KS)
    whole = LabelMetrics(num_labels, torch.tensor(weights, dtype=torch.float64), KS)
    whole.update(padded(top, 6), *jagged(positives, dtype))
    got = whole.compute()
    assert list(got) == [*(f"{name}@{k}" for name in WITH_WEIGHTS for k in KS), "samples", "samples_without_positives"]
    assert got == pytest.approx(expected, rel=1e-12, abs=1e-12, nan_ok=True)
    assert (whole.num_samples, whole.num_without_positives) == (expected["samples"], expected["samples_without_positives"])

    plain = LabelMetrics(num_labels, ks=KS)
    plain.update(padded(top, 4), *jagged(positives, dtype))
    names = [*(f"{name}@{k}" for name in WITHOUT for k in KS), "samples", "samples_without_positives"]
    assert repr(plain.compute()) == repr({name: got[name] for name in names})

    borders = sorted({0, len(top), *(min(cut, len(top)) for cut in cuts)})
    parts = [LabelMetrics(num_labels, torch.tensor(weights, dtype=torch.float64), KS) for _ in range(2)]
    for index, (first, last) in enumerate(itertools.pairwise([*borders, borders[-1]])):
        parts[index % 2].update(padded(top[first:last], 5), *jagged(positives[first:last]))
    parts[0].merge(parts[1])
    assert repr(parts[0].compute()) == repr(got)  # to the last bit, NaN as NaN


@given(worlds())
def test_the_best_order_reaches_1(world: Any) -> None:
    num_labels, weights, _, positives = world
    metrics = LabelMetrics(num_labels, torch.tensor(weights), KS)
    stored = torch.tensor(weights).tolist()
    metrics.update(padded([sorted(own, key=lambda label: -stored[label]) for own in positives], 4), *jagged(positives))
    got = metrics.compute()
    sizes = [len(own) for own in positives if own]
    if not sizes:
        assert all(math.isnan(value) for name, value in got.items() if "@" in name)
        return
    assert {got[f"{name}@{k}"] for name in ("psp", "psndcg") for k in KS} == {1.0}
    assert [got[f"ndcg@{k}"] for k in KS] == pytest.approx([1] * len(KS))
    # A sample has all of its positives in its first k where these are at most k, and k positives there where it has so many.
    assert [got[f"p@{k}"] for k in KS if min(sizes) >= k] == [1.0] * sum(min(sizes) >= k for k in KS)
    assert [got[f"recall@{k}"] for k in KS if max(sizes) <= k] == [1.0] * sum(max(sizes) <= k for k in KS)


def test_a_perfect_ranking_has_1_everywhere() -> None:
    metrics = LabelMetrics(5, torch.tensor([1.0, 3.0, 2.0, 1.5, 4.0]), (1, 2))
    metrics.update(torch.tensor([[4, 0], [1, 2]]), torch.tensor([0, 4, 2, 1]), torch.tensor([0, 2, 4]))
    figures = {f"{name}@{k}": 1.0 for name in WITH_WEIGHTS for k in (1, 2)}
    assert metrics.compute() == pytest.approx(
        figures | {"recall@1": 0.5, "samples": 2, "samples_without_positives": 0}, rel=1e-15
    )


def test_known_values() -> None:
    metrics = LabelMetrics(5, torch.tensor([1.0, 2.0, 4.0, 1.0, 8.0]), (1, 3))
    # Hits at places 0 and 2 of three positives; at place 1 of one positive; a sample without positives.
    metrics.update(torch.tensor([[0, 3, 2], [3, 1, -1], [0, 1, 2]]), torch.tensor([4, 2, 0, 1]), torch.tensor([0, 3, 4, 4]))
    second, third = 1 / math.log2(3), 1 / 2
    whole = 1 + second + third
    assert metrics.compute() == pytest.approx(
        {
            "p@1": 1 / 2,
            "p@3": (2 / 3 + 1 / 3) / 2,
            "psp@1": (1 + 0) / (8 + 2),
            "psp@3": (1 + 4 + 2) / (8 + 4 + 1 + 2),
            "ndcg@1": 1 / 2,
            "ndcg@3": ((1 + third) / whole + second) / 2,
            "psndcg@1": 1 / 10,
            "psndcg@3": ((1 + 4 * third) / whole + 2 * second) / ((8 + 4 * second + third) / whole + 2),
            "recall@1": (1 / 3 + 0) / 2,
            "recall@3": (2 / 3 + 1) / 2,
            "samples": 2,
            "samples_without_positives": 1,
        }
    )


def test_thousands_of_positives_count_beyond_the_depth_as_one_kind() -> None:
    positives = [list(range(3_000)), [7], list(range(0, 3_000, 3))]
    top = [[0, 5_000, 2, 7, 6], [1, 7, 2, 3, 4], [1, 2, 3, 6, 9]]
    weights = (1 + torch.rand(6_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)).tolist()
    metrics = LabelMetrics(6_000, torch.tensor(weights, dtype=torch.float64), (5, 1, 2))
    metrics.update(torch.tensor(top), *jagged(positives))
    expected = reference(weights, top, positives, (1, 2, 5))
    assert metrics.ks == (1, 2, 5)
    assert metrics.compute() == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize("scale", [1e-300, 1e300])
def test_figures_do_not_depend_on_the_unit_of_weights(scale: float) -> None:
    def figures(weights: torch.Tensor) -> dict[str, float]:
        metrics = LabelMetrics(3, weights, (1, 2))
        metrics.update(torch.tensor([[0, 1]]), torch.tensor([1, 2]), torch.tensor([0, 2]))
        return metrics.compute()

    weights = torch.tensor([1.0, 2.5, 3.25], dtype=torch.float64)
    assert figures(weights * scale) == pytest.approx(figures(weights), rel=1e-14)


def test_figures_that_no_sample_defines_are_nan() -> None:
    metrics = LabelMetrics(12, torch.ones(12))
    for samples in (0, 2):
        offsets = torch.zeros(samples + 1, dtype=torch.int64)
        metrics.update(torch.zeros(samples, 10, dtype=torch.int64).sub(1), torch.zeros(0, dtype=torch.int64), offsets)
    got = metrics.compute()
    assert all(math.isnan(got[f"{name}@{k}"]) for name in WITH_WEIGHTS for k in (1, 3, 5, 10))
    assert (got["samples"], got["samples_without_positives"]) == (0, 2)
    assert set(Figures({"tags": got}).to_json()["tags"].values()) == {None, 0.0, 2.0}


def test_processes_add_up_to_the_last_bit(tmp_path: Path) -> None:
    found = told_by("tests.label_metrics_processes", tmp_path)
    assert found["parts"] == [found["whole"]] * 2
    assert found["whole"]["samples"] > 20
    assert found["whole"]["samples_without_positives"] > 0


@pytest.mark.gpu
def test_a_gpu_gives_the_same_bits_and_is_not_waited_for() -> None:
    chance = torch.Generator().manual_seed(5)
    owned = torch.rand(300, 90, generator=chance) < torch.rand(300, 1, generator=chance) - 0.1
    filtered = torch.rand(300, 90, generator=chance) < 0.3
    candidates = torch.rand(300, 90, generator=chance).argsort(1)[:, :30]
    weights = propensities(torch.arange(90), 1_000)
    results = []
    for device, dtype in (("cpu", torch.int64), ("cuda", torch.int32)):
        positives, offsets = (of.to(device) for of in jagged([of.nonzero().flatten().tolist() for of in owned], dtype))
        pairs = LabelFilter(*jagged([of.nonzero().flatten().tolist() for of in filtered], dtype)).to(device)
        metrics, given_to = LabelMetrics(90, weights, device=device), candidates.to(device)
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            top = pairs.top(given_to, 10)
            metrics.update(top, positives, offsets)
        finally:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
        results.append((top.tolist(), metrics.compute()))
    assert results[0] == results[1]


def test_propensities_are_those_of_the_formula() -> None:
    counts = torch.tensor([0, 1, 3, 20])
    c = (math.log(20) - 1) * 2**0.5
    assert propensities(counts, 20, a=0.5, b=1.0).tolist() == pytest.approx(
        [1 + c, math.log(20), 1 + c / 2, 1 + c / 21**0.5], rel=1e-15
    )
    usual = [1 + (math.log(50) - 1) * 2.5**0.55 * (n + 1.5) ** -0.55 for n in counts.tolist()]
    assert propensities(counts.int(), 50).tolist() == pytest.approx(usual, rel=1e-14)
    assert propensities(counts, 50).dtype == torch.float64
    assert propensities(counts[:0], 50).shape == (0,)


@pytest.mark.parametrize(
    ("counts", "options", "expected"),
    [
        (
            torch.ones(2),
            {"num_rows": 9},
            "label_counts: got shape (2,) of torch.float32, expected [L] of torch.int64 or torch.int32",
        ),
        (
            torch.ones(2, 1, dtype=torch.int64),
            {"num_rows": 9},
            "label_counts: got shape (2, 1) of torch.int64, expected [L] of torch.int64 or torch.int32",
        ),
        (torch.tensor([1]), {"num_rows": 2}, "num_rows: got 2, expected 3 or more training samples"),
        (
            torch.tensor([1]),
            {"num_rows": 9, "b": 0.0},
            "a, b: got 0.55 and 0.0, expected numbers above 0, for example 0.55 and 1.5",
        ),
        (
            torch.tensor([1]),
            {"num_rows": 9, "a": math.nan},
            "a, b: got nan and 1.5, expected numbers above 0, for example 0.55 and 1.5",
        ),
        (
            torch.tensor([1]),
            {"num_rows": 9, "b": math.inf},
            "a, b: got 0.55 and inf, expected numbers above 0, for example 0.55 and 1.5",
        ),
        (
            torch.tensor([1]),
            {"num_rows": 9, "a": math.inf},
            "a, b: got inf and 1.5, expected numbers above 0, for example 0.55 and 1.5",
        ),
        (
            torch.tensor([1]),
            {"num_rows": 9, "a": 0.0},
            "a, b: got 0.0 and 1.5, expected numbers above 0, for example 0.55 and 1.5",
        ),
        (torch.tensor([1, 10]), {"num_rows": 9}, "label_counts: got 1 to 10, expected 0 to num_rows, 9"),
        (torch.tensor([-1, 9]), {"num_rows": 9}, "label_counts: got -1 to 9, expected 0 to num_rows, 9"),
    ],
)
def test_bad_counts_are_refused(counts: torch.Tensor, options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        propensities(counts, **options)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((0,), "num_labels: got 0, expected 1 or more"),
        ((3, None, ()), "ks: got (), expected distinct cut-offs of at least 1, for example (1, 3, 5, 10)"),
        ((3, None, (0, 5)), "ks: got (0, 5), expected distinct cut-offs of at least 1, for example (1, 3, 5, 10)"),
        ((3, None, (5, 5)), "ks: got (5, 5), expected distinct cut-offs of at least 1, for example (1, 3, 5, 10)"),
        ((3, torch.ones(2)), "weights: got shape (2,) of torch.float32, expected (3,) of a floating-point dtype"),
        (
            (3, torch.ones(3, dtype=torch.int64)),
            "weights: got shape (3,) of torch.int64, expected (3,) of a floating-point dtype",
        ),
        ((2, torch.tensor([1.0, 0.0])), "weights: got 0.0 for label 1, expected finite numbers above 0"),
        ((2, torch.tensor([math.nan, 1.0])), "weights: got nan for label 0, expected finite numbers above 0"),
        ((2, torch.tensor([1.0, math.inf])), "weights: got inf for label 1, expected finite numbers above 0"),
    ],
)
def test_bad_options_are_refused(arguments: Any, expected: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        LabelMetrics(*arguments)


TOP, POSITIVES, OFFSETS = torch.tensor([[0, 1], [2, -1]]), torch.tensor([1, 0, 2]), torch.tensor([0, 2, 3])
TOP_EXPECTED = "expected [B, 2] (the largest cut-off) or wider of torch.int64 with B = 2, as the offsets say"
OFFSETS_EXPECTED = "expected numbers from 0 up to 3, the length of positives, none smaller than the one before"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            (TOP[0], POSITIVES, OFFSETS),
            f"top_labels: got shape (2,) of torch.int64, {TOP_EXPECTED}",
        ),
        (
            (TOP[:1], POSITIVES, OFFSETS),
            f"top_labels: got shape (1, 2) of torch.int64, {TOP_EXPECTED}",
        ),
        (
            (TOP.int(), POSITIVES, OFFSETS),
            f"top_labels: got shape (2, 2) of torch.int32, {TOP_EXPECTED}",
        ),
        (
            (TOP[:, :1], POSITIVES, OFFSETS),
            "top_labels: got shape (2, 1), expected [B, 2] (the largest cut-off) or wider; put -1 where there are fewer labels",
        ),
        (
            (TOP, POSITIVES.int(), OFFSETS),
            "positives: got shape (3,) of torch.int32, expected one dimension of torch.int64",
        ),
        (
            (TOP, POSITIVES, OFFSETS.float()),
            "positive_offsets: got shape (3,) of torch.float32, expected [B + 1] of torch.int64 or torch.int32",
        ),
        (
            (TOP, POSITIVES, torch.tensor(3)),
            "positive_offsets: got shape () of torch.int64, expected [B + 1] of torch.int64 or torch.int32",
        ),
        (
            (TOP, POSITIVES, OFFSETS[:0]),
            "positive_offsets: got shape (0,) of torch.int64, expected [B + 1] of torch.int64 or torch.int32",
        ),
        ((TOP, POSITIVES, torch.tensor([0, 2, 2])), f"positive_offsets: got [0, 2, 2], {OFFSETS_EXPECTED}"),
        ((TOP, POSITIVES, torch.tensor([1, 2, 3])), f"positive_offsets: got [1, 2, 3], {OFFSETS_EXPECTED}"),
        ((TOP, POSITIVES, torch.tensor([0, 4, 3])), f"positive_offsets: got [0, 4, 3], {OFFSETS_EXPECTED}"),
        ((TOP + 2, POSITIVES, OFFSETS), "top_labels: got labels 1 to 4, expected 0 to 3, or -1 for none"),
        ((TOP - 1, POSITIVES, OFFSETS), "top_labels: got labels -2 to 1, expected 0 to 3, or -1 for none"),
        ((TOP, POSITIVES + 2, OFFSETS), "positives: got labels 2 to 4, expected 0 to 3"),
        ((TOP, POSITIVES - 1, OFFSETS), "positives: got labels -1 to 1, expected 0 to 3"),
        (
            (torch.tensor([[-1, -1], [3, 3]]), POSITIVES, OFFSETS),
            "top_labels: got label 3 twice in sample 1, expected each label once",
        ),
        (
            (torch.tensor([[0, 0], [2, 1]]), POSITIVES, OFFSETS),
            "top_labels: got label 0 twice in sample 0, expected each label once",
        ),
        (
            (TOP, torch.tensor([1, 1, 2]), OFFSETS),
            "positives: got label 1 twice in sample 0, expected each label once",
        ),
        (
            (TOP, torch.tensor([2, 3, 3]), torch.tensor([0, 1, 3])),
            "positives: got label 3 twice in sample 1, expected each label once",
        ),
    ],
)
def test_bad_samples_are_refused_and_change_nothing(arguments: Any, expected: str) -> None:
    metrics = LabelMetrics(4, torch.ones(4), (1, 2))
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        metrics.update(*arguments)
    assert (metrics.num_samples, metrics.num_without_positives) == (0, 0)


def test_tensors_of_two_devices_are_refused() -> None:
    metrics = LabelMetrics(4, ks=(2,))
    with pytest.raises(ValueError, match=r"^top_labels: got a tensor on meta, expected cpu, the device of the metrics$"):
        metrics.update(TOP.to("meta"), POSITIVES, OFFSETS)
    with pytest.raises(ValueError, match=r"^positive_offsets: got a tensor on meta, expected cpu, the device of positives$"):
        metrics.update(TOP, POSITIVES, OFFSETS.to("meta"))
    with pytest.raises(ValueError, match=r"^candidates: got a tensor on meta, expected cpu, the device of the filter$"):
        LabelFilter(POSITIVES, OFFSETS).top(TOP.to("meta"), 1)


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (LabelMetrics(5, ks=(2,)), "other: got 5 labels and cut-offs (2,), expected 4 and (2,)"),
        (LabelMetrics(4, ks=(3,)), "other: got 4 labels and cut-offs (3,), expected 4 and (2,)"),
        (LabelMetrics(4, ks=(2,)), "other: got other weights of the labels, expected the same"),
        (LabelMetrics(4, torch.tensor([1.0, 2, 1, 1]), (2,)), "other: got other weights of the labels, expected the same"),
    ],
)
def test_others_are_not_merged(other: LabelMetrics, expected: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        LabelMetrics(4, torch.ones(4), (2,)).merge(other)


@given(
    st.lists(
        st.tuples(st.permutations(range(7)), st.integers(0, 7), st.lists(st.integers(0, 9), max_size=8)),
        max_size=6,
    ),
    st.integers(1, 9),
    st.sampled_from([torch.int32, torch.int64]),
)
def test_the_filter_leaves_out_what_it_names(samples: Any, k: int, dtype: torch.dtype) -> None:
    candidates = [order[:kept] for order, kept, _ in samples]
    filtered = [left_out for _, _, left_out in samples]
    expected = [[label for label in of if label not in out] for of, out in zip(candidates, filtered, strict=True)]
    whole = LabelFilter(*jagged(filtered, dtype))
    assert whole.top(padded(candidates, 8), k).tolist() == padded(expected, k).tolist()
    middle = len(samples) // 2
    parts = [whole.part(first, last) for first, last in ((0, middle), (middle, len(samples)))]
    pieces = [padded(candidates[:middle], 8), padded(candidates[middle:], 8)]
    found = [part.top(piece, k).tolist() for part, piece in zip(parts, pieces, strict=True)]
    assert found[0] + found[1] == padded(expected, k).tolist()


def test_candidates_of_no_label_at_all() -> None:
    assert LabelFilter(POSITIVES, OFFSETS).top(torch.zeros(2, 0, dtype=torch.int64), 2).tolist() == [[-1, -1], [-1, -1]]
    assert LabelFilter(POSITIVES, OFFSETS).top(torch.full((2, 3), -1), 2).tolist() == [[-1, -1], [-1, -1]]


def test_a_filter_is_read(tmp_path: Path) -> None:
    path = tmp_path / "filter_labels_test.txt"
    path.write_bytes(b"2 0\n0 4\r\n2\t3\n 0 1 \n2 3\n")
    read = LabelFilter.read(path, 4, 5)
    assert (read.labels.tolist(), read.offsets.tolist()) == ([1, 4, 0, 3], [0, 2, 2, 4, 4])
    moved = read.to("cpu")
    assert (moved.labels.tolist(), moved.offsets.dtype) == ([1, 4, 0, 3], torch.int64)
    path.write_bytes(b"")
    for num_labels in (5, 0):
        read = LabelFilter.read(path, 2, num_labels)
        assert (read.labels.tolist(), read.offsets.tolist()) == ([], [0, 0, 0])
    with pytest.raises(FileNotFoundError):
        LabelFilter.read(tmp_path / "none.txt", 2, 5)


PAIR_EXPECTED = "expected two whole numbers, a sample and a label, for example '12 345'"
OF_THESE_DATA = "is the file of this part of these data?"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"0 1\n1 x\n", f"2: found '1 x', {PAIR_EXPECTED}"),
        (b"0 1\n\n1 2\n", f"2: found '', {PAIR_EXPECTED}"),
        (b"0\n", f"1: found '0', {PAIR_EXPECTED}"),
        (b"0 1 1\n", f"1: found '0 1 1', {PAIR_EXPECTED}"),
        (b"0 -1\n", f"1: found '0 -1', {PAIR_EXPECTED}"),
        (b"0 1.0\n", f"1: found '0 1.0', {PAIR_EXPECTED}"),
        (b"0,1\n", f"1: found '0,1', {PAIR_EXPECTED}"),
        (b"0 \xff", f"1: found '0 \ufffd', {PAIR_EXPECTED}"),
        (b"0 1234567890123456789", f"1: found '0 1234567890123456789', {PAIR_EXPECTED}"),
        (b"0 1\n4 1\n", f"2: found sample 4, expected a sample from 0 to 3; {OF_THESE_DATA}"),
        (b"3 5\n", f"1: found label 5, expected a label from 0 to 4; {OF_THESE_DATA}"),
    ],
)
def test_a_malformed_filter_is_refused_with_its_line(content: bytes, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "filter_labels_test.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"^{re.escape(f'{path}:{expected}')}$"):
        LabelFilter.read(path, 4, 5)


def test_a_filter_of_no_samples_has_no_lines(tmp_path: Path) -> None:
    path = tmp_path / "filter_labels_test.txt"
    path.write_text("0 0\n")
    for sizes, what in (((0, 5), "sample"), ((5, 0), "label")):
        expected = f"{path}:1: found {what} 0, expected no line, for there is no {what}; {OF_THESE_DATA}"
        with pytest.raises(DataError, match=f"^{re.escape(expected)}$"):
            LabelFilter.read(path, *sizes)


def test_bad_filters_are_refused() -> None:
    expected = "offsets: got [0, 2], expected numbers from 0 up to 3, the length of labels, none smaller than the one before"
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        LabelFilter(POSITIVES, torch.tensor([0, 2]))
    with pytest.raises(ValueError, match=r"^labels: got shape \(3,\) of torch.float32, expected one dimension of torch.int64$"):
        LabelFilter(POSITIVES.float(), OFFSETS)
    one = LabelFilter(POSITIVES, OFFSETS)
    for first, last in ((-1, 1), (2, 1), (0, 3)):
        expected = f"first, last: got {first} and {last}, expected 0 <= first <= last <= 2"
        with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
            one.part(first, last)
    with pytest.raises(ValueError, match=r"^k: got 0, expected 1 or more$"):
        one.top(TOP, 0)
    expected = "candidates: got shape (1, 2) of torch.int64, expected [B, C] of torch.int64 with B = 2, as the offsets say"
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        one.top(TOP[:1], 1)
