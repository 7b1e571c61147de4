"""Workers' shared memory: used again, but never while somebody reads what is in it."""

from __future__ import annotations

import copy
import dataclasses
import gc
import io
import itertools
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from jagged.data import slots
from jagged.data.slots import Lease
from jagged.data.table_batches import Batch, Part
from jagged.data.table_loader import RequestLoader
from tests.models.shops import shop

SIZE = 8


@pytest.fixture(scope="module")
def part() -> Part:
    return shop(history="events", requests=200).train


@pytest.fixture
def loader(part: Part) -> Iterator[RequestLoader]:
    loader = part.loader(batch_size=SIZE, num_workers=2)
    yield loader
    loader.close()


def assert_same(found: Batch, expected: Batch) -> None:
    for one, other in zip((found.features, found.candidates), (expected.features, expected.candidates), strict=True):
        assert torch.equal(one.values(), other.values())
        assert torch.equal(one.lengths(), other.lengths())
    assert torch.equal(found.labels, expected.labels)
    assert torch.equal(found.candidate_numbers, expected.candidate_numbers)


def lease_of(batch: Batch) -> Lease:
    assert batch._together is not None
    lease = batch._together[0].slot
    assert isinstance(lease, Lease)
    return lease


def taken(loader: RequestLoader) -> Any:
    return loader._loader.dataset.slots.taken.numpy()


def reader_of(loader: RequestLoader) -> slots.Reader:
    return slots._READERS[loader._loader.dataset.slots.loader]


def test_slots_are_used_again_and_batches_are_those_of_the_part(part: Part, loader: RequestLoader) -> None:
    for epoch in range(2):
        loader.set_position(epoch, 0)
        places = []
        for found, expected in zip(loader, part.loader(batch_size=SIZE), strict=True):
            assert_same(found, expected)
            places.append(lease_of(found).place)
        # One that is looked at, and those that are made ahead.
        assert len(places) > 12
        assert {worker for worker, _ in places} == {0, 1}
        assert {number for _, number in places} <= {0, 1, 2, 3}


def test_who_keeps_batches_keeps_what_is_in_them(part: Part, loader: RequestLoader) -> None:
    kept = list(loader)
    # More than there are slots: the others have memory of their own.
    assert sum(isinstance(one._together[0].slot, Lease) for one in kept) == taken(loader).size < len(kept)
    assert taken(loader).all()
    for found, expected in zip(kept, part.loader(batch_size=SIZE), strict=True):
        assert_same(found, expected)


def test_a_slot_is_taken_as_long_as_one_tensor_of_its_batch_is_there(loader: RequestLoader) -> None:
    batches = iter(loader)
    batch = next(batches)
    place, labels = lease_of(batch).place, batch.labels[:2]
    expected = labels.clone()
    del batch
    for _ in range(10):
        next(batches)
    assert taken(loader)[place]
    assert torch.equal(labels, expected)
    del labels
    gc.collect()
    reader_of(loader).free()
    assert not taken(loader)[place]


class Stream:
    """A stream that comes to nothing before it is told to."""

    is_done = False

    def record_event(self) -> Stream:
        return self

    def query(self) -> bool:
        return self.is_done


@pytest.mark.parametrize("changed", [False, True])
def test_a_slot_is_taken_until_a_gpu_has_copied_it(loader: RequestLoader, monkeypatch: pytest.MonkeyPatch, changed: bool) -> None:
    copying, own = Stream(), Stream()
    own.is_done = True
    monkeypatch.setattr(slots, "_STREAMS", set())
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: copying if device else own)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *words, **more: self)
    batches = iter(loader)
    batch = next(batches)
    place = lease_of(batch).place
    # Also of a batch that was made of its tensors.
    batch = dataclasses.replace(batch, weights=batch.weights * 2) if changed else batch
    batch.features._jt_dict = None
    copied = batch.to(torch.device("cuda"), non_blocking=True)
    assert {copying} == slots._STREAMS
    del batch, copied
    for _ in range(10):
        assert lease_of(next(batches)).place != place
    assert taken(loader)[place]
    copying.is_done = True
    list(map(len, batches))
    reader_of(loader).free()
    assert not taken(loader).any()


def test_nothing_is_left_of_a_loader_that_is_gone(part: Part) -> None:
    loader = part.loader(batch_size=SIZE, num_workers=1)
    number = loader._loader.dataset.slots.loader
    batch, expected = next(iter(loader)), next(iter(part.loader(batch_size=SIZE)))
    loader.close()
    del loader
    gc.collect()
    assert number not in slots._READERS
    assert_same(batch, expected)


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_batches_of_workers_are_saved_and_sent_and_iterations_given_up(part: Part, context: str) -> None:
    expected = list(part.loader(batch_size=SIZE))
    loader = part.loader(batch_size=SIZE, num_workers=2, multiprocessing_context=context)
    for count in (1, 3, 2):
        loader.set_position(0, 0)
        for found, want in zip(itertools.islice(loader, count), expected, strict=False):
            assert_same(found, want)
    loader.set_position(0, 0)
    for found, want in zip(loader, expected, strict=True):
        lease_of(found)
        file = io.BytesIO()
        torch.save(found, file)
        file.seek(0)
        for again in (pickle.loads(pickle.dumps(found)), copy.deepcopy(found), torch.load(file, weights_only=False)):
            assert_same(again, want)
    del found
    gc.collect()
    reader_of(loader).free()
    assert not taken(loader).any()
    loader.close()


@pytest.mark.gpu
def test_a_copy_that_waits_on_a_stream_of_its_own_finds_the_batch(part: Part) -> None:
    loader = part.loader(batch_size=SIZE, num_workers=2, pin_memory=True)
    expected = list(part.loader(batch_size=SIZE))
    stream, device = torch.cuda.Stream(), torch.device("cuda")
    for copies_all in (True, False):
        loader.set_position(0, 0)
        found: list[Any] = []
        for batch in loader:
            with torch.cuda.stream(stream if copies_all else torch.cuda.current_stream()):
                # Some milliseconds, in which workers would write the slot again.
                torch.cuda._sleep(20_000_000)
                if copies_all:
                    found.append(batch.to(device, non_blocking=True))
                    assert batch.labels.is_pinned()
                else:
                    found.append(batch.features.values().to(device, non_blocking=True))
            del batch
        torch.cuda.synchronize()
        for one, other in zip(found, expected, strict=True):
            values = one.features.values() if isinstance(one, Batch) else one
            assert torch.equal(values.cpu(), other.features.values())
    loader.close()


@pytest.mark.gpu
def test_pages_are_unlocked_when_nothing_reads_them(part: Part) -> None:
    loader = part.loader(batch_size=SIZE, num_workers=1, pin_memory=True)
    batches = iter(loader)
    batch = next(batches)
    mapped = lease_of(batch).mapped
    tensor = torch.from_numpy(mapped.array)
    assert tensor.is_pinned()
    del batch, batches, mapped
    loader.close()
    del loader
    gc.collect()
    assert not tensor.is_pinned()
