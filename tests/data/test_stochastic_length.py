"""Loaders that draw which histories are shortened, and batches of the rows that are kept."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jagged.data import BatchLoader, SequenceBatch, SequenceDataset, split_leave_one_out
from jagged.data.batches import features_of
from tests.data import oracle

LONGEST, ALPHA = 30, 1.2
#: What is left of a history that is shortened: 30^0.6.
LEFT = 7
LENGTHS = [3, 9, 20, 33, 60] * 12


def dataset_of(lengths: list[int]) -> SequenceDataset:
    # Leave-one-out takes two events of each user, and the last one of training is a target alone.
    return oracle.dataset([[(user + event) % 31 for event in range(length + 3)] for user, length in enumerate(lengths)])


def loader_of(alpha: float | None = ALPHA, **options: object) -> BatchLoader:
    given_ = {"batch_size": 8, "max_seq_len": LONGEST, "shuffle": True, "seed": 5, **options}
    part = split_leave_one_out(dataset_of(LENGTHS)).train
    return BatchLoader(part, stochastic_length=alpha, **given_)  # type: ignore[arg-type]


def kept_by_user(loader: BatchLoader, epoch: int, first: int = 0) -> dict[int, int]:
    """What each user keeps; checked against the rows that come, which are those of whole histories."""
    loader.set_position(epoch, first)
    found = {}
    for batch in loader:
        lengths = batch.features["item_id"].lengths()
        assert lengths.tolist() == [min(LENGTHS[user], LONGEST) for user in batch.users.tolist()]
        kept = lengths if batch.kept is None else batch.kept
        assert (batch.num_kept, batch.kept is None) == ((None, True) if batch.kept is None else (int(kept.sum()), False))
        found.update(zip(batch.users.tolist(), kept.tolist(), strict=True))
    return found


def test_which_histories_are_shortened() -> None:
    """Those of up to 7 rows never, those of 9 and 20 in part, of 30 with probability 1 - 30^1.2 / 900."""
    loader, shortened = loader_of(), dict.fromkeys((3, 9, 20, 30), 0)
    for epoch in range(40):
        for user, kept in kept_by_user(loader, epoch).items():
            length = min(LENGTHS[user], LONGEST)
            assert kept in (length, LEFT) if length > LEFT else kept == length
            shortened[length] += kept < length
    trials = {3: 480, 9: 480, 20: 480, 30: 960}
    for length, found in shortened.items():
        probability = max(0.0, 1 - LONGEST**ALPHA / length**2) if length > LEFT else 0.0
        assert abs(found / trials[length] - probability) < 0.08, length


def test_draws_are_of_seed_and_epoch_alone() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first, second = (kept_by_user(loader_of(), epoch) for epoch in (0, 1))
    assert first != second
    torch.manual_seed(2)
    assert kept_by_user(loader_of(), 0) == first
    assert kept_by_user(loader_of(seed=6), 0) != first
    # Whoever builds the batches, and in whatever order samples come.
    working = loader_of(num_workers=2)
    assert [kept_by_user(working, epoch) for epoch in (0, 1)] == [first, second]
    working.close()
    assert kept_by_user(loader_of(shuffle=False), 0) == first
    ranks = [kept_by_user(loader_of(rank=rank, world_size=3), 0) for rank in range(3)]
    assert {user: kept for of in ranks for user, kept in of.items()} == first
    # From any place on.
    rest = kept_by_user(loader_of(), 1, first=4)
    assert len(rest) == len(LENGTHS) - 4 * 8
    assert rest.items() <= second.items()
    # And no random state of anybody's is touched.
    torch.manual_seed(1)
    kept_by_user(loader_of(), 0)
    assert torch.equal(torch.get_rng_state(), before)


def test_budgets_and_shares_go_by_what_is_left() -> None:
    whole, loader = loader_of(None, batch_size=None, max_tokens=60), loader_of(batch_size=None, max_tokens=60)
    for epoch in range(2):
        loader.set_position(epoch, 0)
        sizes = [len(batch.targets) if batch.num_kept is None else batch.num_kept for batch in loader]
        assert max(sizes) <= 60
        assert sum(sizes) == int(loader.rows(epoch).sum())
        assert len(sizes) == loader.num_batches(epoch) < 0.7 * whole.num_batches(epoch)
    assert whole.rows(3).tolist() == [min(length, LONGEST) for length in LENGTHS]


def test_ranks_share_the_rows_that_are_left() -> None:
    """In the steps either of two ranks has about as many as the other; by whole histories they would differ by 15 on the mean."""
    loaders = [loader_of(rank=rank, world_size=2) for rank in range(2)]
    differences = []
    for epoch in range(8):
        for loader in loaders:
            loader.set_position(epoch, 0)
        for pair in zip(*loaders, strict=True):
            one, other = (len(batch.targets) if batch.num_kept is None else batch.num_kept for batch in pair)
            differences.append(abs(one - other))
    assert sum(differences) / len(differences) < 4


def test_histories_are_shortened_in_training_alone() -> None:
    split = split_leave_one_out(dataset_of(LENGTHS))
    for part in (split.valid, split.test):
        with pytest.raises(ValueError, match=r"^stochastic_length: got 1\.2 with a part that has targets, expected None; "):
            BatchLoader(part, batch_size=8, max_seq_len=LONGEST, shuffle=False, seed=0, stochastic_length=ALPHA)
    for alpha in (0.0, 2.5):
        with pytest.raises(ValueError, match=f"^alpha: expected above 0 and at most 2, got {re.escape(str(alpha))}$"):
            loader_of(alpha)
    # Of alpha 2 nothing is left out.
    assert all(batch.kept is None for batch in loader_of(2.0))


@given(st.lists(st.lists(st.booleans(), max_size=9), min_size=1, max_size=5))
def test_what_is_kept_is_a_sequence_of_its_own(chosen: list[list[bool]]) -> None:
    """The next item is that of the next row that is kept; the last event, which is a target alone, always stays."""
    sequences = [[100 * sample + event for event in range(len(of) + 1)] for sample, of in enumerate(chosen)]
    lengths = torch.tensor([len(of) for of in chosen])
    ids, targets = (torch.tensor([item for one in sequences for item in part(one)], dtype=torch.int64) for part in (_all, _next))
    batch = SequenceBatch(features_of(ids, lengths, {"timestamp": ids * 7, "action": ids + 1}), targets, lengths, num_items=9)
    flat = torch.tensor([keep for of in chosen for keep in of], dtype=torch.bool)
    counts = torch.tensor([sum(of) for of in chosen])
    found = batch.only(flat.nonzero()[:, 0], torch.nn.functional.pad(counts.cumsum(0), (1, 0)))
    kept = [
        [item for item, keep in zip(one, [*of, True], strict=True) if keep] for one, of in zip(sequences, chosen, strict=True)
    ]
    for key, change in (("item_id", lambda item: item), ("timestamp", lambda item: item * 7), ("action", lambda item: item + 1)):
        parts = found.features[key].to_dense()
        assert [part.tolist() for part in parts] == [[change(item) for item in one[:-1]] for one in kept], key
    assert found.targets.tolist() == [item for one in kept for item in one[1:]]
    assert (found.num_items, found.kept, found.users is lengths) == (9, None, True)


def _all(sequence: list[int]) -> list[int]:
    return sequence[:-1]


def _next(sequence: list[int]) -> list[int]:
    return sequence[1:]


def test_a_batch_keeps_what_it_says_wherever_it_goes() -> None:
    batch = next(one for one in loader_of() if one.kept is not None)
    moved = batch.to(torch.device("cpu"))
    assert moved.kept is not None
    assert moved.kept.tolist() == batch.kept.tolist()  # type: ignore[union-attr]
    assert moved.num_kept == batch.num_kept
