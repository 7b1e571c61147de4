"""Small host tensors on a device, read by several streams and by CUDA graphs."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

from jagged.ops import BagLayout, embedding_bags
from jagged.ops._shared.copies import DeviceCopy
from tests.graphs import captured
from tests.places import PLACE, Place

# Some milliseconds.
LATE = 20_000_000
NUMBERS = torch.arange(100)


def taken(stream: torch.cuda.Stream) -> Tensor:
    """Memory that a stream takes for as many numbers as `NUMBERS`, all -1."""
    with torch.cuda.stream(stream):
        return torch.full_like(NUMBERS, -1, device=PLACE.device)


@pytest.mark.gpu
def test_another_stream_waits_for_the_copy(place: Place) -> None:
    writer, reader = torch.cuda.Stream(), torch.cuda.Stream()
    # What stands where the copy comes to stand.
    before = taken(writer)
    del before
    with torch.cuda.stream(writer):
        torch.cuda._sleep(LATE)
        copy = DeviceCopy(NUMBERS, torch.device(PLACE.device))
    with torch.cuda.stream(reader):
        read = copy.read().clone()
    torch.cuda.synchronize()
    assert torch.equal(read.cpu(), NUMBERS)


@pytest.mark.gpu
def test_memory_stays_until_another_stream_has_read_it(place: Place) -> None:
    writer, reader = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(writer):
        copy = DeviceCopy(NUMBERS, torch.device(PLACE.device))
    torch.cuda.synchronize()
    with torch.cuda.stream(reader):
        torch.cuda._sleep(LATE)
        read = copy.read().clone()
    del copy
    others = [taken(writer) for _ in range(100)]
    torch.cuda.synchronize()
    assert torch.equal(read.cpu(), NUMBERS)
    assert len(others) == 100


@pytest.mark.gpu
def test_a_graph_reads_sizes_that_256_others_have_displaced(place: Place) -> None:
    layout = BagLayout(rows=(50, 50), widths=(4, 4))
    weights = torch.arange(layout.num_elements, dtype=torch.float32, device=PLACE.device)
    ids, offsets = torch.arange(50, device=PLACE.device), torch.tensor([0, 10, 20, 30, 40, 50], device=PLACE.device)

    def looked_up() -> Tensor:
        return embedding_bags(weights, layout, ids, offsets, batch_sizes=(2, 3), backend=place.backend)

    expected = looked_up()
    graph, output = captured(looked_up)
    for size in range(300):
        layout.batches((size, size + 1), weights.device)
    gc.collect()
    others = [torch.full((2, 4), -1, dtype=torch.int64, device=PLACE.device) for _ in range(1000)]
    output.zero_()
    graph.replay()
    assert torch.equal(output, expected)
    assert len(others) == 1000
