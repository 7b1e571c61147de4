from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from jagged.data import (
    BatchLoader,
    SequenceBatch,
    SequenceDataset,
    SequencePart,
    read_events,
    split_leave_one_out,
    synthetic_sessions,
)
from jagged.data.plan import Plan, PlannedLoader
from tests.data import oracle

LENGTHS = st.lists(st.one_of(st.integers(0, 6), st.just(40)), min_size=1, max_size=25).filter(any)
Sample = tuple[int, list[int], list[int], list[int] | None]


def of_lengths(lengths: list[int]) -> SequenceDataset:
    numbers = itertools.count()
    return oracle.dataset([[next(numbers) * 7 % 31 for _ in range(length)] for length in lengths])


def whole_part(dataset: SequenceDataset, training: bool) -> SequencePart:
    """Every user, also those with one event (no row to train on) or with an empty history."""
    start, end = dataset.offsets[:-1], dataset.offsets[1:]
    user = torch.arange(dataset.num_users)
    return SequencePart(dataset, user, start, end) if training else SequencePart(dataset, user, start, end - 1, end - 1)


def naive(part: SequencePart, max_seq_len: int, with_viewed: bool) -> dict[int, Sample]:
    """`{user: (user, inputs, targets, viewed)}` by a loop over samples."""
    items = part.dataset.item_ids.tolist()
    result: dict[int, Sample] = {}
    for i, user in enumerate(part.user.tolist()):
        events = items[int(part.start[i]) : int(part.end[i])]
        if part.target is None:
            result[user] = (user, events[:-1][-max_seq_len:], events[1:][-max_seq_len:], None)
        else:
            result[user] = (user, events[-max_seq_len:], [items[int(part.target[i])]], events if with_viewed else None)
    return result


def rows_of(jagged: KeyedJaggedTensor) -> list[list[int]]:
    lengths, offsets, values = jagged.lengths(), jagged.offsets(), jagged.values()
    assert jagged.keys() == ["item_id"]
    assert {lengths.dtype, offsets.dtype, values.dtype} == {torch.int64}
    assert jagged.stride() == lengths.numel()
    assert jagged.length_per_key_or_none() == [values.numel()] == [int(lengths.sum())]
    assert offsets.tolist() == [0, *lengths.cumsum(0).tolist()]
    return [values[first:last].tolist() for first, last in itertools.pairwise(offsets.tolist())]


def samples(batch: SequenceBatch, training: bool) -> list[Sample]:
    inputs = rows_of(batch.features)
    assert batch.targets.dtype == batch.users.dtype == torch.int64
    if training:
        targets = [piece.tolist() for piece in batch.targets.split([len(row) for row in inputs])]
    else:
        targets = [[target] for target in batch.targets.tolist()]
    viewed = rows_of(batch.viewed) if batch.viewed is not None else [None] * len(inputs)
    return list(zip(batch.users.tolist(), inputs, targets, viewed, strict=True))


def tensors(batch: SequenceBatch) -> list[torch.Tensor]:
    jagged = [batch.features] if batch.viewed is None else [batch.features, batch.viewed]
    return [batch.targets, batch.users, *(t for j in jagged for t in (j.values(), j.lengths(), j.offsets()))]


def assert_same(got: Iterable[SequenceBatch], wanted: Iterable[SequenceBatch]) -> None:
    for one, other in zip(got, wanted, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(tensors(one), tensors(other), strict=True))


@given(
    LENGTHS,
    st.booleans(),
    st.booleans(),
    st.integers(1, 9),
    st.one_of(
        st.fixed_dictionaries({"batch_size": st.integers(1, 9)}), st.fixed_dictionaries({"max_tokens": st.integers(9, 50)})
    ),
    st.integers(1, 4),
    st.integers(0, 3),
)
def test_every_sample_once_within_the_limits(
    lengths: list[int], training: bool, shuffle: bool, max_seq_len: int, limit: dict[str, int], world_size: int, epoch: int
) -> None:
    part = whole_part(of_lengths(lengths), training)
    hypothesis.assume(len(part) >= world_size)
    seen: list[Sample] = []
    counts = set()
    for rank in range(world_size):
        loader = BatchLoader(
            part,
            **limit,
            max_seq_len=max_seq_len,
            shuffle=shuffle,
            seed=1,
            rank=rank,
            world_size=world_size,
            with_viewed=not training,
        )
        loader.set_position(epoch, 0)
        batches = list(loader)
        counts.add(len(batches))
        assert len(batches) == loader.num_batches(epoch) == len(loader)
        assert_same(batches, loader)
        for batch in batches:
            found = samples(batch, training)
            assert len(found) <= limit.get("batch_size", len(found)) or (shuffle and world_size > 1)
            assert batch.features.values().numel() <= limit.get("max_tokens", 10**9)
            seen += found
        for position in {0, 1, len(batches) // 2, len(batches)} & set(range(len(batches) + 1)):
            loader.set_position(epoch, position)
            assert loader.position == (epoch, position, 0)
            assert_same(loader, batches[position:])
    wanted = naive(part, max_seq_len, not training)
    assert len(counts) == 1
    assert sorted(seen) == sorted(wanted.values())
    if not shuffle and world_size == 1:
        assert [sample[0] for sample in seen] == part.user.tolist()


@given(st.integers(1, 60), st.integers(1, 8), st.integers(1, 6))
def test_batches_of_a_size_are_full_but_for_the_last(count: int, batch_size: int, world_size: int) -> None:
    hypothesis.assume(count >= world_size)
    part = whole_part(of_lengths([2] * count), True)
    sizes = []
    for rank in range(world_size):
        loader = BatchLoader(part, batch_size=batch_size, max_seq_len=1, shuffle=False, seed=0, rank=rank, world_size=world_size)
        sizes.append([batch.users.numel() for batch in loader])
    steps = list(zip(*sizes, strict=True))
    assert len(steps) == -(-count // (batch_size * world_size))
    assert all(step == (batch_size,) * world_size for step in steps[:-2])
    assert all(max(step) - min(step) <= 1 for step in steps)
    if batch_size > 1:
        assert all(min(step) >= 1 for step in steps)


LIMIT = st.one_of(st.tuples(st.integers(1, 9), st.none()), st.tuples(st.none(), st.integers(9, 50)))


@given(
    st.lists(st.integers(0, 9), min_size=4, max_size=30),
    st.lists(st.tuples(st.integers(1, 4), LIMIT, st.integers(0, 3)), max_size=4),
)
def test_what_is_left_of_an_epoch_is_dealt_to_any_number_of_ranks(rows: list[int], dealt: list[Any]) -> None:
    """Ranks, what a batch may hold, and after how many batches other ranks go on; one alone has the rest."""
    found: list[int] = []
    seen = 0
    for world_size, (batch_size, max_tokens), batches in [*dealt, (1, (5, None), 99)]:
        counts, after = set(), set()
        for rank in range(world_size):
            loader = PlannedLoader()
            loader._plan = plan = Plan(np.array(rows), batch_size, max_tokens, 1, rank, world_size)
            loader.set_position(3, 0, seen)
            whole = [samples.tolist() for samples in plan]
            assert len(whole) == len(loader) == loader.num_batches(3, seen)
            assert all(len(samples) <= (batch_size or 99) for samples in whole) or world_size > 1
            assert all(sum(rows[sample] for sample in samples) <= (max_tokens or 999) for samples in whole)
            had = min(batches, len(whole))
            found += [sample for samples in whole[:had] for sample in samples]
            # From a place among them, too.
            loader.set_position(3, had, seen)
            assert loader.position == (3, had, seen)
            assert [samples.tolist() for samples in plan] == whole[had:]
            counts.add(len(whole))
            after.add(loader.samples_before(3, had, seen))
        assert len(counts) == 1
        (seen,) = after
        assert seen == len(found)
    assert sorted(found) == list(range(len(rows)))


@given(st.lists(st.integers(0, 60), min_size=4, max_size=60), st.integers(1, 6), st.integers(2, 4), st.booleans())
def test_a_step_s_samples_go_to_the_rank_with_least_work(rows: list[int], size: int, ranks: int, squares: bool) -> None:
    """From the most work on; a step keeps the samples that it has without."""
    plans = [Plan(np.array(rows), size, None, 1, rank, ranks, "squares" if squares else "lengths") for rank in range(ranks)]
    steps = list(zip(*([samples.tolist() for samples in plan] for plan in plans), strict=True))
    alone = Plan(np.array(rows), size * ranks, None, 1, 0, 1)
    wanted = [samples.tolist() for samples in alone]
    assert [sample for step in wanted for sample in step] == alone.of(0)[0].tolist()
    # Too few for all ranks are shared with the step before.
    assert sorted(itertools.chain(*itertools.chain(*steps))) == list(range(len(rows)))
    for step, whole in zip(steps[:-2], wanted[:-2], strict=False):
        assert sorted(itertools.chain(*step)) == sorted(whole)
    for step in steps:
        work = [[(rows[sample] + 1) ** (1 + squares) for sample in samples] for samples in step]
        loads = sorted(map(sum, work))
        # The last one of the fullest rank went there when it had least.
        assert loads[-1] - min(max(work, key=sum), default=0) <= loads[0]
        assert all(step) or sum(map(len, step)) < ranks
        place = {sample: number for number, sample in enumerate(alone.of(0)[0].tolist())}
        assert all(samples == sorted(samples, key=place.__getitem__) for samples in step)


def test_balanced_steps_of_long_tails() -> None:
    rows = np.sort(np.random.default_rng(0).lognormal(3, 1.5, 4096).astype(np.int64))

    def worst(**options: Any) -> tuple[float, float]:
        """The largest share of lengths and of squares that a rank of 8 has in a step, beside the mean; the mean over steps."""
        plans = [Plan(rows, 32, None, 0, rank, 8, **options) for rank in range(8)]
        lengths = np.array([[rows[samples].sum() for samples in plan] for plan in plans])
        squares = np.array([[(rows[samples] ** 2).sum() for samples in plan] for plan in plans])
        return tuple(float((of.max(0) / of.mean(0)).mean()) for of in (lengths, squares))  # type: ignore[return-value]

    unbalanced = np.array([rows[samples].sum() for samples in Plan(rows, 32, None, 0, 0, 1)]).reshape(-1, 8)
    by_lengths, by_squares = worst(), worst(balance="squares")
    assert float((unbalanced.max(1) / unbalanced.mean(1)).mean()) > 1.5
    assert by_lengths[0] < 1.15
    assert by_squares[1] < by_lengths[1]
    assert by_squares[0] > by_lengths[0]


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    part = whole_part(of_lengths([3] * 200), True)

    def order(seed: int, epoch: int, **limit: int) -> list[int]:
        loader = BatchLoader(part, **limit, max_seq_len=4, shuffle=True, seed=seed)  # type: ignore[arg-type]
        loader.set_position(epoch, 0)
        return [user for batch in loader for user in batch.users.tolist()]

    orders = {(seed, epoch): tuple(order(seed, epoch, batch_size=7)) for seed in range(3) for epoch in range(3)}
    assert len(set(orders.values())) == 9
    assert all(sorted(users) == list(range(200)) for users in orders.values())
    assert tuple(order(1, 2, batch_size=50)) == tuple(order(1, 2, max_tokens=40)) == orders[1, 2]


@pytest.fixture(scope="module")
def sample() -> SequenceDataset:
    return synthetic_sessions(0, num_users=150)[0]


@pytest.mark.parametrize(
    ("context", "limit"), [("fork", {"batch_size": 16}), ("fork", {"max_tokens": 120}), ("spawn", {"batch_size": 16})]
)
def test_workers_build_the_same_bits_and_resume(sample: SequenceDataset, context: str, limit: dict[str, int]) -> None:
    split = split_leave_one_out(sample)
    alone = BatchLoader(split.train, **limit, max_seq_len=20, shuffle=True, seed=5)
    workers = BatchLoader(
        split.train, **limit, max_seq_len=20, shuffle=True, seed=5, num_workers=2, multiprocessing_context=context
    )
    for epoch, position in ((0, 0), (0, 3), (1, 2), (1, len(alone))):
        for loader in (alone, workers):
            loader.set_position(epoch, position)
        assert_same(workers, alone)
    alone.set_position(2, 0)
    workers.set_position(2, 0)
    iterator = iter(workers)
    assert_same(itertools.islice(iterator, 2), itertools.islice(alone, 2))
    # A loader left in the middle of an epoch starts again where it is told to.
    workers.set_position(2, 2)
    alone.set_position(2, 2)
    assert_same(workers, alone)


def test_evaluation_with_workers_hands_out_the_viewed_items(sample: SequenceDataset) -> None:
    test = split_leave_one_out(sample).test
    options = {"batch_size": 32, "max_seq_len": 5, "shuffle": False, "seed": 0, "with_viewed": True}
    assert_same(BatchLoader(test, **options, num_workers=1), BatchLoader(test, **options))  # type: ignore[arg-type]


def test_the_position_is_read_when_iteration_begins(sample: SequenceDataset) -> None:
    part = split_leave_one_out(sample).train
    loader = BatchLoader(part, batch_size=32, max_seq_len=5, shuffle=True, seed=0)
    whole = list(loader)
    iterator = iter(loader)
    loader.set_position(1, 1)
    assert_same(iterator, whole)
    assert loader.position == (1, 1, 0)


def test_the_global_random_state_is_left_alone(sample: SequenceDataset) -> None:
    part = split_leave_one_out(sample).train
    before = torch.random.get_rng_state()
    for workers in (0, 1):
        list(BatchLoader(part, batch_size=32, max_seq_len=5, shuffle=True, seed=0, num_workers=workers))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_pinning_without_a_gpu_is_silent(sample: SequenceDataset) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader = BatchLoader(
            split_leave_one_out(sample).train, batch_size=64, max_seq_len=5, shuffle=True, seed=0, pin_memory=True
        )
        assert len(list(loader)) == len(loader)


def test_moving_a_batch_keeps_it(sample: SequenceDataset) -> None:
    loader = BatchLoader(split_leave_one_out(sample).test, batch_size=64, max_seq_len=5, shuffle=False, seed=0, with_viewed=True)
    batch = next(iter(loader))
    assert_same([batch.to(torch.device("cpu"))], [batch])
    moved = batch.to(torch.device("meta"), non_blocking=True)
    assert all(tensor.is_meta for tensor in tensors(moved))
    assert moved.features.length_per_key_or_none() == batch.features.length_per_key_or_none()


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [0, 2])
def test_pinned_batches_on_a_stream(sample: SequenceDataset, workers: int) -> None:
    options = {"batch_size": 64, "max_seq_len": 5, "shuffle": False, "seed": 0, "with_viewed": True}
    test = split_leave_one_out(sample).test
    device, stream = torch.device("cuda"), torch.cuda.Stream()
    plain = BatchLoader(test, **options)  # type: ignore[arg-type]
    for pinned, wanted in zip(BatchLoader(test, **options, num_workers=workers, pin_memory=True), plain, strict=True):  # type: ignore[arg-type]
        assert all(tensor.is_pinned() for tensor in tensors(pinned))
        with torch.cuda.stream(stream):
            moved = pinned.to(device, non_blocking=True)
        torch.cuda.current_stream().wait_stream(stream)
        moved.record_stream(torch.cuda.current_stream())
        assert_same([moved.to(torch.device("cpu"))], [wanted])
        assert_same([wanted.pin_memory()], [wanted])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": None}, "batch_size, max_tokens: got None, None"),
        ({"max_tokens": 9}, "batch_size, max_tokens: got 2, 9"),
        ({"batch_size": None, "max_tokens": 4}, r"max_tokens: got 4, expected at least max_seq_len \(5\)"),
        ({"batch_size": 0}, "batch_size: got 0"),
        ({"max_seq_len": 0}, "max_seq_len: got 0"),
        ({"rank": 2, "world_size": 2}, "rank, world_size: got 2, 2"),
        ({"world_size": 4}, "got 3 samples, expected at least one for each of 4 ranks"),
        ({"seed": -1}, "seed, num_workers: got -1"),
        ({"with_viewed": True}, "with_viewed: got a training part"),
    ],
)
def test_options_out_of_range(options: dict[str, int], message: str) -> None:
    part = whole_part(of_lengths([3, 3, 3]), True)
    with pytest.raises(ValueError, match=message):
        BatchLoader(part, **{"batch_size": 2, "max_seq_len": 5, "shuffle": True, "seed": 0, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("position", [(-1, 0), (0, -1), (0, 3)])
def test_positions_out_of_range(position: tuple[int, int]) -> None:
    loader = BatchLoader(whole_part(of_lengths([3, 3, 3]), True), batch_size=2, max_seq_len=5, shuffle=True, seed=0)
    with pytest.raises(ValueError, match="expected a batch from 0 to 2"):
        loader.set_position(*position)
    with pytest.raises(ValueError, match=r"^position: got 4 samples before it, expected 0 to 3$"):
        loader.set_position(0, 0, 4)


def test_a_torchrec_pipeline_takes_the_batches(sample: SequenceDataset) -> None:
    class Count(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(()))

        def forward(self, batch: SequenceBatch) -> tuple[torch.Tensor, torch.Tensor]:
            return self.weight * batch.targets.numel(), batch.users

    from torchrec.distributed.train_pipeline import TrainPipelineBase

    model = Count()
    pipeline = TrainPipelineBase(model, torch.optim.SGD(model.parameters(), lr=1.0), torch.device("cpu"))
    loader = BatchLoader(split_leave_one_out(sample).train, batch_size=16, max_seq_len=20, shuffle=True, seed=0, num_workers=1)
    iterator = iter(loader)
    users = [pipeline.progress(iterator) for _ in range(len(loader))]
    with pytest.raises(StopIteration):
        pipeline.progress(iterator)
    assert sorted(user for batch in users for user in batch.tolist()) == split_leave_one_out(sample).train.user.tolist()
    assert model.weight.item() == -sum(batch.targets.numel() for batch in loader)


@pytest.mark.parametrize("bad", [31, -1])
@pytest.mark.parametrize("training", [True, False])
def test_ids_that_the_catalogue_does_not_have_leave_no_loader(training: bool, bad: int) -> None:
    dataset = of_lengths([31, 4])
    assert dataset.num_items == 31
    part = whole_part(dataset, training)
    batch = next(iter(BatchLoader(part, batch_size=2, max_seq_len=40, shuffle=False, seed=0)))
    assert batch.num_items == batch.to(torch.device("cpu")).num_items == 31
    # The file's own pages may not be written to.
    dataset.item_ids = dataset.item_ids.clone()
    dataset.item_ids[7] = bad
    with pytest.raises(ValueError, match=rf"item_id\[\d+\]: expected an id from 0 to 30, got {bad}"):
        next(iter(BatchLoader(part, batch_size=2, max_seq_len=40, shuffle=False, seed=0)))


@given(st.lists(st.integers(1, 6), min_size=1, max_size=10), st.booleans(), st.integers(1, 4))
def test_times_stand_beside_their_rows(lengths: list[int], training: bool, max_seq_len: int) -> None:
    numbers = itertools.count(-5)
    users = [[next(numbers) for _ in range(length)] for length in lengths]
    part = whole_part(oracle.dataset([[time % 7 for time in user] for user in users], users), training)
    options = {"batch_size": 3, "max_seq_len": max_seq_len, "shuffle": True, "seed": 0}
    plain = list(BatchLoader(part, **options))
    for batch, without in zip(BatchLoader(part, with_times=True, **options), plain, strict=True):
        assert batch.features.keys() == ["item_id", "timestamp"]
        items, times = batch.features["item_id"], batch.features["timestamp"]
        assert (batch.features.stride(), times.values().dtype) == (without.features.stride(), torch.int64)
        assert torch.equal(items.values(), without.features.values())
        assert torch.equal(items.offsets(), without.features.offsets())
        assert torch.equal(times.offsets(), items.offsets())
        assert torch.equal(times.lengths(), items.lengths())
        assert batch.features.offset_per_key() == [0, len(items.values()), 2 * len(items.values())]
        for user, first, last in zip(
            batch.users.tolist(), times.offsets()[:-1].tolist(), times.offsets()[1:].tolist(), strict=True
        ):
            end = len(users[user]) - 1
            assert times.values()[first:last].tolist() == users[user][max(0, end - max_seq_len) : end]


@hypothesis.settings(max_examples=25)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=8), st.sets(st.integers(0, 6)), st.booleans(), st.integers(1, 4))
def test_what_the_model_does_not_know_goes_before_a_history_is_cut(
    lengths: list[int], known: set[int], with_viewed: bool, max_seq_len: int
) -> None:
    times = itertools.count(-5)
    users = [[next(times) for _ in range(length)] for length in lengths]
    dataset = oracle.dataset([[time % 7 for time in user] for user in users], users)
    names = dataset.items.ids.to_pylist()
    order = [name for name in reversed(names) if name in known]
    numbers = torch.tensor([order.index(name) if name in known else -1 for name in names])
    part = replace(whole_part(dataset, False), numbers=numbers)
    options = {"batch_size": 3, "max_seq_len": max_seq_len, "shuffle": False, "seed": 0, "with_viewed": with_viewed}
    found = []
    for batch in BatchLoader(part, with_times=True, **options):
        assert batch.num_items == len(order)
        items, of_rows = (batch.features[key].to_dense() for key in ("item_id", "timestamp"))
        viewed = [None] * len(batch) if batch.viewed is None else rows_of(batch.viewed)
        found += zip([i.tolist() for i in items], [t.tolist() for t in of_rows], batch.targets.tolist(), viewed, strict=True)
    wanted = []
    for user in users:
        left = [time for time in user[:-1] if time % 7 in known]
        rows = [order.index(time % 7) for time in left]
        target = order.index(user[-1] % 7) if user[-1] % 7 in known else -1
        wanted.append((rows[-max_seq_len:], left[-max_seq_len:], target, rows if with_viewed else None))
    assert found == wanted


def test_training_knows_all_of_its_items() -> None:
    part = whole_part(oracle.dataset([[5, 6, 7, 5]]), True)
    options = {"batch_size": 1, "max_seq_len": 9, "shuffle": False, "seed": 0}
    (batch,) = BatchLoader(replace(part, numbers=torch.tensor([2, 0, 1])), **options)
    assert (batch.features.values().tolist(), batch.targets.tolist()) == ([2, 0, 1], [0, 1, 2])
    for lacking in (torch.tensor([1, -1, 0]), torch.tensor([-1, 1, 0])):
        with pytest.raises(ValueError, match=r"item_id\[\d+\]: expected an id from 0 to 1, got -1"):
            next(iter(BatchLoader(replace(part, numbers=lacking), **options)))


@pytest.mark.parametrize("zone", [None, "UTC"])
def test_calendar_times_are_seconds_in_a_batch(tmp_path: Path, zone: str | None) -> None:
    times = pa.array([-1, 0, 1_700_000_000_999_999], pa.timestamp("us", zone))
    pq.write_table(pa.table({"user_id": [1, 1, 1], "item_id": [1, 2, 3], "timestamp": times}), tmp_path / "a.parquet")
    part = whole_part(read_events(tmp_path / "a.parquet", progress=False), False)
    (batch,) = BatchLoader(part, batch_size=1, max_seq_len=9, shuffle=False, seed=0, with_times=True)
    assert batch.features["timestamp"].values().tolist() == [-1, 0]


def test_times_that_are_not_there_are_refused() -> None:
    message = "with_times: got a dataset without times, expected one with them; read a table with a time column"
    with pytest.raises(ValueError, match=f"^{message}$"):
        BatchLoader(whole_part(of_lengths([3]), True), batch_size=1, max_seq_len=9, shuffle=False, seed=0, with_times=True)
