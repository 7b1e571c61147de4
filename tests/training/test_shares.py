"""Which batches of several processes are refused as the same, and which are not; `test_task_processes.py` has whole runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor

from jagged.training import TrainingError
from jagged.training.processes import Processes
from jagged.training.shares import Shares, digest
from tests.training.clicks import Rows, loader

CURE = "expected each one's own share of the rows; give the DataLoader a DistributedSampler, or each process the rows of its rank"


class Together:
    """Processes that have said what they have."""

    def __init__(self, everyones: list[Any]) -> None:
        self.everyones, self.world_size = everyones, len(everyones)

    def all(self, thing: Any) -> list[Any]:
        return self.everyones


def found(*loaders: Any) -> str:
    """What is said about the processes' loaders."""
    everyones = []
    for batches in loaders:
        shares = Shares(cast(Processes, Together([None, None])), "train")
        assert len(list(shares.seen(batches))) == len(batches)
        everyones.append(shares._digests)
    shares = Shares(cast(Processes, Together(everyones)), "train")
    try:
        shares.compare()
    except TrainingError as error:
        return str(error)
    return ""


def numbers(*values: int) -> list[Tensor]:
    return [torch.tensor([value, value + 1]) for value in values]


def test_the_same_batches_are_refused() -> None:
    assert found(loader(), loader()) == f"train: got the same first 6 batches in the processes 0 and 1, {CURE}"
    many = [*loader(), *loader(Rows(seed=1))]
    assert found(many, [*many[:8], *loader()]) == f"train: got the same first 8 batches in the processes 0 and 1, {CURE}"
    assert found(numbers(4), numbers(4)) == f"train: got the same batch in the processes 0 and 1, {CURE}"
    four = [numbers(1, 2), numbers(3, 4), numbers(1, 2), numbers(1, 2)]
    assert found(*four) == f"train: got the same first 2 batches in the processes 0, 2 and 3, {CURE}"


@pytest.mark.parametrize(
    "loaders",
    [
        (numbers(1, 2, 3), numbers(1, 2, 4)),
        (numbers(1, 2), numbers(2, 1)),
        (numbers(1, 2), numbers(1, 2, 3)),
        # Alike in all rows, as in a trial of speed: two processes cannot be told from one.
        ([torch.ones(3)] * 4, [torch.ones(3)] * 4),
        # No rows.
        (numbers(1, 2), [torch.zeros(1)] * 2, [torch.zeros(1)] * 2),
        ([], []),
        # What cannot be looked into may differ.
        ([[torch.ones(3), object()]], [[torch.ones(3), object()]]),
        ([torch.ones(3).to_sparse()], [torch.ones(3).to_sparse()]),
        (numbers(1, 2),),
    ],
)
def test_others_are_not(loaders: tuple[Any, ...]) -> None:
    assert found(*loaders) == ""


@dataclass
class Batch:
    x: Tensor
    y: Any


def keyed(values: list[int], lengths: list[int], weights: list[float] | None = None) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=["a", "b"],
        values=torch.tensor(values),
        lengths=torch.tensor(lengths),
        weights=None if weights is None else torch.tensor(weights),
    )


def test_a_digest_is_of_all_parts() -> None:
    batches = [
        torch.ones(2, 3),
        torch.ones(3, 2),
        torch.ones(6),
        torch.ones(2, 3, dtype=torch.float64),
        torch.ones(2, 3, dtype=torch.bool),
        torch.ones(2, 3, dtype=torch.bfloat16),
        torch.tensor(1.0),
        [torch.ones(6)],
        (torch.ones(6),),
        {"x": torch.ones(6)},
        {"y": torch.ones(6)},
        {"y": torch.ones(6), "name": "a"},
        np.ones(6),
        Batch(torch.ones(2), 1),
        Batch(torch.ones(2), 2),
        Batch(torch.ones(2), np.ones(2)),
        keyed([1, 2], [1, 1]),
        keyed([1, 3], [1, 1]),
        keyed([1, 2], [2, 0]),
        keyed([1, 2], [1, 1], [0.5, 1.0]),
        keyed([1, 2], [1, 1])["a"],
    ]
    digests = [digest(batch) for batch in batches]
    assert all(digests)
    assert len(set(digests)) == len(digests)
    assert digest(torch.ones(4, 2).t()[1:]) == digest(torch.ones(1, 4))


def test_a_batch_without_content_has_none() -> None:
    itself: list[Any] = [torch.ones(1)]
    itself.append(itself)
    empty = keyed([], [])
    for batch in ([], {}, torch.zeros(3), empty, {"kjt": empty, "offsets": np.zeros(1), "n": 5}, itself, np.array([object()])):
        assert digest(batch) == ""


def test_one_element_of_any_stride_is_read() -> None:
    one = torch.tensor([5]).expand(1)
    strided = torch.arange(4).as_strided((1,), (0,))
    assert digest(one) == digest(torch.tensor([5]))
    assert digest({"rows": strided + 1, "x": strided}) == digest({"rows": torch.tensor([1]), "x": torch.tensor([0])})
    columns = torch.arange(6).reshape(2, 3).t()
    assert digest(columns) == digest(columns.contiguous())
