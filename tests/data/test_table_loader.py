"""The loader of requests: every one once, within the budget, from any place, the same with workers."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from jagged.data import Dataset
from jagged.data.table_batches import Part
from jagged.data.table_loader import RequestLoader
from jagged.training.batches import Positioned, positioned
from tests.models.shops import shop


@pytest.fixture(scope="module")
def part(tmp_path_factory: pytest.TempPathFactory) -> Part:
    """Requests of 1 to 6 candidates, users with up to some hundred events."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 7, size=400)
    request = np.repeat(np.arange(400), sizes)
    rows = pa.table(
        {
            "request_id": request,
            "user_id": (rng.zipf(1.5, size=400) % 40)[request],
            "item_id": rng.integers(50, size=len(request)),
            "timestamp": 1_700_000_000 + request,
            "click": rng.integers(2, size=len(request)),
        }
    )
    directory: Path = tmp_path_factory.mktemp("requests") / "dataset"
    dataset = Dataset.from_table(rows, label="click", history="events", directory=directory, progress=False)
    found: Part = dataset.split(by="time", valid=0.1, test=0.1).train
    return found


def told(loader: Any) -> list[list[int]]:
    return [batch.request_index.tolist() for batch in loader]


OPTIONS = [{"batch_size": 16}, {"max_tokens": 150}]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("options", OPTIONS)
def test_every_request_comes_once_an_epoch_on_one_rank(part: Part, options: dict[str, int], shuffle: bool) -> None:
    for world_size in (1, 3):
        loaders = [
            part.loader(**options, shuffle=shuffle, seed=1, max_history=30, rank=rank, world_size=world_size)
            for rank in range(world_size)
        ]
        assert len({len(loader) for loader in loaders}) == 1
        seen = [told(loader) for loader in loaders]
        assert [len(batches) for batches in seen] == [len(loaders[0])] * world_size
        (everyone,) = told([part.gather(range(len(part)))])
        assert sorted(one for batches in seen for batch in batches for one in batch) == sorted(everyone)
        for loader in loaders:
            loader.set_position(1, 0)
        assert (seen == [told(loader) for loader in loaders]) is not shuffle
    in_order = [one for batch in told(part.loader(**options)) for one in batch] if "batch_size" in options else None
    assert in_order is None or in_order == told([part.gather(range(len(part)))])[0]


def test_a_shuffled_batch_has_the_longest_histories_first(part: Part) -> None:
    """So that attention on a CPU reads rows where they stand; which requests a batch has is as random as before."""
    batches = list(part.loader(batch_size=16, shuffle=True, seed=1, max_history=30))
    sizes = [
        list(zip(batch.features["history.item_id"].lengths().tolist(), batch.candidate_offsets.diff().tolist(), strict=True))
        for batch in batches
    ]
    assert all(of == sorted(of, reverse=True) for of in sizes)
    # Batches among one another are in no order.
    firsts = [of[0] for of in sizes]
    assert firsts != sorted(firsts, reverse=True)


@pytest.mark.parametrize("limit", [2**31, 2**63 - 1, 2**63, 2**200])
def test_limits_may_be_larger_than_the_part(part: Part, limit: int) -> None:
    for options in ({"batch_size": limit}, {"max_tokens": limit}):
        (whole,) = part.loader(**options)
        assert len(whole) == len(part)
        halves = [next(iter(part.loader(**options, rank=rank, world_size=2))) for rank in range(2)]
        assert sum(map(len, halves)) == len(part)


def test_a_budget_is_of_events_and_candidates(part: Part) -> None:
    batches = list(part.loader(max_tokens=150, shuffle=True, seed=2, max_history=30))
    sizes = [len(batch.history_times) + len(batch.rows) for batch in batches if batch.history_times is not None]
    assert len(sizes) == len(batches)
    assert max(sizes) <= 150
    # Packed in order: of two neighbours each but the last pair is over the budget.
    assert all(a + b > 150 for a, b in itertools.pairwise(sizes[:-1]))
    assert sum(of.sum() for of in part.sizes(30)) == sum(sizes)
    assert int(sum(part.sizes(0)).max()) == 6


def test_lists_of_candidates_ids_are_histories_of_which_the_latest_count() -> None:
    table = pa.table({
        "user": ["a", "b", "c", "d"], "film": ["x", "y", "x", "z"], "time": [1, 2, 3, 4], "click": [0, 1, 1, 0],
        "clicked": [["x", "y", "z"], ["y", "x"], [], None], "tags": [["s", "t", "s"], [], ["t"], ["s", "t"]],
    })  # fmt: skip
    words = {"label": "click", "candidate": "film", "user": "user", "time": "time", "history": "clicked"}
    part = Dataset.from_table(table, progress=False, **words).split(by="user", valid=0.0, test=0.0).train
    whole = part.gather(range(4)).features
    assert whole["clicked"].lengths().tolist() == [3, 2, 0, 1]
    everything = [of.tolist() for of in whole["clicked"].values().split([3, 2, 0, 1])]
    for most, sizes in ((None, [4, 3, 1, 2]), (2, [3, 3, 1, 2]), (1, [2, 2, 1, 2]), (0, [1, 1, 1, 1])):
        batch = part.gather(range(4), max_history=most)
        lengths = batch.features["clicked"].lengths().tolist()
        found = [of.tolist() for of in batch.features["clicked"].values().split(lengths)]
        assert found == [of if most is None else of[len(of) - min(most, len(of)) :] for of in everything]
        assert torch.equal(batch.features["tags"].values(), whole["tags"].values())
        assert sum(part.sizes(most)).tolist() == sizes
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole line is compared
        part.loader(max_tokens=3)
    assert str(caught.value) == (
        "max_tokens: got 3, expected at least 4, the events and candidates of the largest request; max_history makes it smaller"
    )


@pytest.mark.parametrize("options", OPTIONS)
def test_from_any_place_and_with_workers_it_is_the_same(part: Part, options: dict[str, int]) -> None:
    alone = part.loader(**options, shuffle=True, seed=3, max_history=30)
    assert isinstance(alone, Positioned)
    assert positioned(alone, "train", 0) is alone
    alone.set_position(2, 0)
    whole = told(alone)
    for batch in (0, 1, len(whole) - 1, len(whole)):
        alone.set_position(2, batch)
        assert told(alone) == whole[batch:]
    assert len(alone) == alone.num_batches(2) == len(whole)
    with_workers: RequestLoader = part.loader(**options, shuffle=True, seed=3, max_history=30, num_workers=2)
    try:
        for batch in (0, 3):
            with_workers.set_position(2, batch)
            assert told(with_workers) == whole[batch:]
    finally:
        with_workers.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "batch_size, max_tokens: got None, None, expected exactly one of them"),
        ({"batch_size": 0}, "batch_size: got 0, expected 1 or more"),
        (
            {"max_tokens": 5, "max_history": 0},
            "max_tokens: got 5, expected at least 6, the events and candidates of the largest request; "
            "max_history makes it smaller",
        ),
        ({"batch_size": 1, "rank": 2, "world_size": 2}, "rank, world_size: got 2, 2, expected 0 <= rank < world_size"),
        ({"batch_size": 1, "num_workers": -1}, "num_workers: got -1, expected 0 or more"),
        ({"batch_size": 1, "seed": -1}, "seed: got -1, expected 0 to 2**64 - 1"),
        ({"batch_size": 1, "max_history": -1}, "max_history: got -1, expected 0 or more"),
    ],
)
def test_options_out_of_range_are_refused(part: Part, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole message is compared
        part.loader(**options)
    assert str(caught.value) == message


def test_a_place_that_is_not_there_is_refused(part: Part) -> None:
    loader = part.loader(batch_size=len(part))
    with pytest.raises(ValueError, match=r"^position: got epoch 0, batch 2, expected a batch from 0 to 1$"):
        loader.set_position(0, 2)


@pytest.mark.gpu
def test_pinned_batches_are_those_of_the_part() -> None:
    part = shop(history="events", requests=200).train
    expected = list(part.loader(batch_size=8, max_history=5))
    for workers in (0, 2):
        loader = part.loader(batch_size=8, max_history=5, num_workers=workers, pin_memory=True)
        for epoch in range(3):
            loader.set_position(epoch, 0)
            found = list(loader)
            assert len(found) == len(expected)
            for one, want in zip(found, expected, strict=True):
                assert one.features.values().is_pinned()
                moved = one.to(torch.device("cuda"), non_blocking=True)
                assert torch.equal(moved.features.values().cpu(), want.features.values())
                assert torch.equal(moved.features.lengths().cpu(), want.features.lengths())
                assert torch.equal(moved.labels.cpu(), want.labels)
                assert torch.equal(one.candidate_numbers, want.candidate_numbers)
        loader.close()
