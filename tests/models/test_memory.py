"""Training for thousands of steps over changing jagged shapes leaves memory as it was."""

from __future__ import annotations

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from jagged.data import SequenceBatch
from jagged.models import NextItemTask, SASRec
from tests.conftest import LONG
from tests.memory import Flat
from tests.places import PLACE, Place

pytestmark = pytest.mark.skipif(PLACE.name == "interpret", reason="models run on the place's own backend")
ITEMS, CYCLE = 500, 20


def batches(place: Place) -> list[SequenceBatch]:
    """Batches of one to many samples, empty ones among them."""
    generator = torch.Generator().manual_seed(0)
    result = []
    for number in range(CYCLE):
        lengths = torch.randint(0, 50, (1 + number * (16 if place.name == "gpu" else 1),), generator=generator)
        lengths[0] += 1
        items = torch.randint(ITEMS, (2, int(lengths.sum())), generator=generator).to(place.device)
        features = KeyedJaggedTensor(keys=["item_id"], values=items[0], lengths=lengths.to(place.device))
        users = torch.arange(len(lengths), device=place.device)
        result.append(SequenceBatch(features=features, targets=items[1], users=users))
    return result


def test_memory_is_flat_while_sasrec_trains(place: Place) -> None:
    # The mode fills what is uninitialised and takes other operations; users train without it.
    torch.use_deterministic_algorithms(False)
    torch.manual_seed(0)
    task = NextItemTask(SASRec(ITEMS, embedding_dim=32, max_seq_len=50)).to(place.device)
    optimizer = torch.optim.AdamW(task.parameters())
    given = batches(place)

    def step(number: int) -> None:
        batch = given[number % CYCLE]
        # A batch of its own each time: what torchrec computes of one it keeps in it.
        features = KeyedJaggedTensor(
            keys=["item_id"],
            values=batch.features.values(),
            lengths=batch.features.lengths(),
            length_per_key=[batch.targets.shape[0]],
        )
        with torch.autocast(place.device.type, torch.bfloat16, enabled=place.name == "gpu"):
            loss, _ = task(SequenceBatch(features=features, targets=batch.targets, users=batch.users))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    Flat(place).check(step, steps=2_000 if LONG or place.name == "gpu" else 200, cycle=CYCLE)
