"""Loaders of any make as loaders with places, and batches of any make on another device."""

from __future__ import annotations

import dataclasses
import random
from collections import UserDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler
from torchrec import JaggedTensor, KeyedJaggedTensor

from jagged.data.moving import Carried, moved
from jagged.training import TrainingError
from jagged.training.batches import Repeated, carried, positioned


class Noisy(Dataset[Tensor]):
    """Rows of random numbers of all three libraries, drawn when they are read."""

    def __len__(self) -> int:
        return 13

    def __getitem__(self, row: int) -> Tensor:
        return torch.tensor([row, float(torch.rand(())), random.random(), np.random.rand()], dtype=torch.float64)


def read(loader: Any, epoch: int, first: int = 0, draws: int = 0) -> list[Tensor]:
    """An epoch's batches, read by a caller who draws so many numbers of its own with each batch."""
    loader.set_position(epoch, first)
    batches = []
    for batch in loader:
        batches.append(batch)
        for _ in range(draws):
            torch.rand(3), random.random(), np.random.rand()
    return batches


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def noisy(workers: int = 0, **options: Any) -> DataLoader[Tensor]:
    return DataLoader(Noisy(), batch_size=3, shuffle=not options, num_workers=workers, **options)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_comes_again(workers: int) -> None:
    epochs = [read(Repeated(noisy(), "train", 7), epoch) for epoch in range(3)] if not workers else []
    loader = Repeated(noisy(workers), "train", 7)
    # Another order of reading, and callers who draw.
    found = {epoch: read(loader, epoch, draws=epoch + 1) for epoch in (2, 0, 1)}
    for epoch in range(3):
        if epochs:
            assert same(epochs[epoch], found[epoch])
        assert sorted(int(row) for row in torch.cat(found[epoch])[:, 0]) == list(range(13))
        for first in range(6):
            assert same(read(loader, epoch, first), found[epoch][first:])
    assert not same(found[0], found[1])
    assert not same(read(Repeated(noisy(workers), "train", 8), 0), found[0])


def test_the_order_does_not_depend_on_workers() -> None:
    rows = [torch.cat(read(Repeated(noisy(workers), "train", 7), 1))[:, 0] for workers in (0, 2)]
    assert torch.equal(*rows)


def test_a_generator_of_its_own_is_part_of_it() -> None:
    def made() -> list[Repeated]:
        one = DataLoader(Noisy(), batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(3))
        sampler = RandomSampler(Noisy(), generator=torch.Generator().manual_seed(3))  # type: ignore[arg-type]
        return [Repeated(one, "train", 7), Repeated(noisy(sampler=sampler), "train", 7)]

    for went_on, resumed in zip(made(), made(), strict=True):
        read(went_on, 0)
        assert same(read(went_on, 1), read(resumed, 1))
        assert not same(read(went_on, 0), read(went_on, 1))


def test_what_the_caller_draws_does_not_depend_on_the_loader() -> None:
    def drawn(loader: Any) -> list[float]:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        found = []
        for _ in loader:
            found += [float(torch.rand(())), random.random(), np.random.rand()]
        return found

    assert drawn(Repeated(noisy(), "train", 7)) == drawn([0] * 5)


def test_places_are_those_of_when_it_was_asked() -> None:
    loader = Repeated([10, 11, 12], "train", 0)
    loader.set_position(0, 1)
    batches = iter(loader)
    loader.set_position(0, 2)
    assert list(batches) == [11, 12]


def test_passing_over_batches_is_told() -> None:
    loader, told = Repeated([10, 11, 12], "train", 0), []
    loader.passed = lambda: told.append(1)
    loader.set_position(0, 2)
    assert next(iter(loader)) == 12
    assert len(told) == 2


class Sampler:
    def __init__(self) -> None:
        self.epoch = 0
        self.told: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.told.append(epoch)

    def __iter__(self) -> Iterator[int]:
        return iter([(row + self.epoch) % 13 for row in range(13)])

    def __len__(self) -> int:
        return 13


class BatchSampler(Sampler):
    def __iter__(self) -> Iterator[list[int]]:  # type: ignore[override]
        return iter([[self.epoch], [self.epoch + 1]])

    def __len__(self) -> int:
        return 2


def test_samplers_are_told_the_epoch() -> None:
    sampler, batches = Sampler(), BatchSampler()
    loader = Repeated(noisy(sampler=sampler), "train", 0)
    assert torch.cat(read(loader, 4))[:2, 0].tolist() == [4, 5]
    assert set(sampler.told) == {4}
    by_batch = Repeated(DataLoader(Noisy(), batch_sampler=batches), "train", 0)  # type: ignore[arg-type]
    assert torch.cat(read(by_batch, 6))[:, 0].tolist() == [6, 7]


class Wrong:
    def __init__(self, length: int, given: int) -> None:
        self.length, self.given = length, given

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.given))


@pytest.mark.parametrize("given", [2, 1_004])
def test_a_wrong_length_is_refused(given: int) -> None:
    with pytest.raises(TrainingError) as error:
        read(Repeated(Wrong(1_003, given), "valid", 0), 1)
    assert str(error.value) == f"valid: got {given:,} batches in epoch 2, expected the loader's length, 1,003"


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize(
    ("loader", "kind"),
    [
        (iter([1]), "list_iterator"),
        ((x for x in [1]), "generator"),
        (3, "int"),
        (None, "NoneType"),
        (DataLoader(Endless()), "DataLoader"),
    ],
)
def test_what_cannot_be_iterated_again_is_refused(loader: Any, kind: str) -> None:
    with pytest.raises(TypeError) as error:
        positioned(loader, "train", 0)
    assert str(error.value) == (
        f"train: got a {kind}, expected batches that can be iterated again and have a length: a DataLoader or a list of batches"
    )


def test_a_loader_with_places_stays_as_it_is() -> None:
    loader = Repeated([1], "train", 0)
    assert positioned(loader, "train", 0) is loader
    assert list(positioned([1, 2], "train", 0)) == [1, 2]


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass(frozen=True)
class Data:
    x: Tensor
    name: str = "kept"


class Parts(list[Any]):
    pass


def jagged_features() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["a"], torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 2]))


def test_every_part_is_moved() -> None:
    marker = object()
    batch = {
        "tensor": torch.ones(2),
        "tuple": (torch.zeros(1), 3, "word", None),
        "pair": Pair(torch.ones(1), [torch.ones(1), marker]),
        "list": Parts([torch.ones(1)]),
        "data": Data(torch.ones(3)),
        "features": jagged_features(),
        "jagged": JaggedTensor(torch.ones(3), lengths=torch.tensor([1, 2])),
        "size": torch.Size([2, 3]),
        "class": Data,
    }
    meta = torch.device("meta")
    found = moved(batch, meta)
    assert list(found) == list(batch)
    assert found["tuple"][1:] == (3, "word", None)
    assert isinstance(found["pair"], Pair)
    assert isinstance(found["list"], Parts)
    assert found["pair"].right[1] is marker
    assert isinstance(found["data"], Data)
    assert found["data"].name == "kept"
    assert found["size"] == torch.Size([2, 3])
    assert found["class"] is Data
    tensors = [
        found["tensor"], found["tuple"][0], found["pair"].left, found["pair"].right[0], found["list"][0], found["data"].x,
        found["features"].values(), found["jagged"].values(), found["jagged"].lengths(),
    ]  # fmt: skip
    assert all(tensor.device == meta for tensor in tensors)
    # The given one is left alone.
    assert batch["tensor"].device.type == batch["data"].x.device.type == "cpu"  # type: ignore[attr-defined]


class Recorded:
    """A part that can be moved, and tells what was done to it."""

    def __init__(self, told: list[Any]) -> None:
        self.told = told

    def to(self, device: Any, non_blocking: bool = False) -> Recorded:
        self.told.append((str(device), non_blocking))
        return self

    def record_stream(self, stream: Any) -> None:
        self.told.append(("stream", stream))

    def pin_memory(self) -> Recorded:
        self.told.append("pinned")
        return self


def test_a_carried_batch_does_to_its_parts_what_pipelines_ask() -> None:
    told: list[Any] = []
    part = Recorded(told)
    assert Carried({"a": [part], "b": 3}).to(torch.device("cpu"), non_blocking=True).batch == {"a": [part], "b": 3}
    Carried([part, "word"]).record_stream("stream 1")  # type: ignore[arg-type]
    assert Carried((part, 2)).pin_memory().batch == (part, 2)
    assert told == [("cpu", True), ("stream", "stream 1"), "pinned"]


def test_what_moves_by_a_to_of_its_own_is_recorded_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Classes whose `to` moves tensors and who record nothing: their memory would go to the next batch while it is read."""

    class Encoding(UserDict[str, Any]):
        def to(self, device: Any, **_: Any) -> Encoding:
            return Encoding({name: value.to(device) for name, value in self.items()})

    class Held:
        def __init__(self, x: Tensor) -> None:
            self.inside, self.again = {"x": [x]}, self

        def to(self, device: Any, **_: Any) -> Held:
            return Held(self.inside["x"][0].to(device))

    @dataclasses.dataclass
    class Worked:
        x: Tensor
        doubled: Tensor = dataclasses.field(init=False)

        def __post_init__(self) -> None:
            self.doubled = 2 * self.x

    recorded: list[int] = []
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, _: recorded.append(id(tensor)))
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(2, 3)])
    x, y, worked = torch.ones(1), torch.ones(2), Worked(torch.ones(3))
    Carried([packed, Encoding(x=x), Held(y), worked]).record_stream("stream 1")  # type: ignore[arg-type]
    assert set(recorded) == {id(of) for of in (packed.data, packed.batch_sizes, x, y, worked.x, worked.doubled)}


def test_only_what_pipelines_do_not_take_is_wrapped() -> None:
    given = [torch.ones(1), jagged_features(), {"x": torch.ones(1)}, (torch.ones(1),)]
    kinds = [type(batch) for batch in carried(given)]
    assert kinds == [Tensor, KeyedJaggedTensor, Carried, Carried]
