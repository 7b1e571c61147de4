"""Tensors in one piece of memory: views that are the tensors, moved together, and batches that are still whole when changed."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jagged.data.packed import Packed
from jagged.data.table_batches import Batch
from tests.models.shops import shop

DTYPES = (torch.int64, torch.float32, torch.bool)
tensors = st.dictionaries(
    st.text(max_size=3) | st.sampled_from(["a.lengths", "b.lengths", "b.values"]),
    st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), min_size=1, max_size=2)).map(
        lambda of: torch.randint(0, 2, of[1]).to(of[0])
    ),
    max_size=6,
)


@given(tensors)
def test_views_are_the_tensors(given: dict[str, torch.Tensor]) -> None:
    packed = Packed.of(given)
    found = packed.tensors()
    assert list(found) == list(given)
    for name, tensor in given.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
        is_ones = name.endswith(".lengths") and bool((tensor == 1).all())
        assert (packed.places[name][2] == -1) == is_ones
        if not is_ones:
            assert found[name].storage_offset() * found[name].element_size() % 64 == 0
            assert found[name].untyped_storage().data_ptr() == packed.memory.untyped_storage().data_ptr()
    # As a slot's memory, which may begin anywhere.
    beside = packed.mapped(lambda memory: torch.cat([memory.new_zeros(64), memory])[64:]).tensors()
    assert all(torch.equal(beside[name], tensor) for name, tensor in given.items())
    moved = packed.mapped(torch.clone).tensors()
    assert all(torch.equal(moved[name], tensor) for name, tensor in given.items())


@pytest.mark.parametrize("dtype", DTYPES)
def test_ones_that_are_not_sent_belong_to_their_batch(dtype: torch.dtype) -> None:
    first, second = (Packed.of({"a.lengths": torch.ones(3, 2, dtype=dtype)}).tensors()["a.lengths"] for _ in range(2))
    assert first.dtype == dtype
    first.zero_()
    assert torch.equal(second, torch.ones(3, 2, dtype=dtype))


def test_a_batch_is_moved_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = shop(history="events", event_labels=["click"]).train.gather(range(6))
    copies = []
    plain = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *words, **more: (copies.append(self), plain(self, *words, **more))[1])
    moved = batch.to(torch.device("meta"))
    assert [one.dtype for one in copies] == [torch.uint8]
    assert moved.features.values().device.type == moved.labels.device.type == "meta"
    assert moved.features.keys() == batch.features.keys()
    assert moved.candidate_numbers.shape == batch.candidate_numbers.shape


def test_a_batch_that_was_changed_is_moved_saved_and_sent_as_it_is(tmp_path: Path) -> None:
    batch = shop(history="events").train.gather(range(6))
    # What was asked for on one device must not be found on the other.
    batch.features["item"]
    batch.labels[0, 0] = 7
    again = batch.to(torch.device("cpu")), copy.copy(batch).to(torch.device("cpu"))
    assert all(float(of.labels[0, 0]) == 7 for of in again)
    # Numbers that are all alike are the user's, too.
    alone = shop(history="events").train.gather([0])
    alone.request_index[:], alone.user_index[:] = 1, 1
    one, keys = alone._together
    again_alone = Batch.of(dataclasses.replace(Packed.of(one.tensors()), counts=one.counts), keys, sampled=False)
    again_alone.user_index[:] = 5
    assert again_alone.to(torch.device("cpu")).user_index.tolist() == [5]
    batch.labels = torch.full_like(batch.labels, 3)
    assert torch.equal(batch.to(torch.device("cpu")).labels, torch.full_like(batch.labels, 3))
    meta = batch.to(torch.device("meta"))
    assert meta.features["item"].values().device.type == "meta"
    whole = shop(history="events").train.gather(range(6))
    torch.save(whole, tmp_path / "batch.pt")
    opened = torch.load(tmp_path / "batch.pt", weights_only=False)
    assert torch.equal(opened.features.values(), whole.features.values())
    assert torch.equal(opened.label_mask, whole.label_mask)
    assert torch.equal(copy.deepcopy(whole).candidate_numbers, whole.candidate_numbers)
    sent = pickle.loads(pickle.dumps(batch))
    assert torch.equal(sent.labels, batch.labels)
    assert torch.equal(sent.features.values(), batch.features.values())
    assert torch.equal(sent.to(torch.device("cpu")).features.values(), batch.features.values())
