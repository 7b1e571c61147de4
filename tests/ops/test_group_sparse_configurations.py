"""Tiles of group-sparse layers of more sizes than are compiled ahead of time."""

from __future__ import annotations

import itertools

import pytest

from jagged.ops.group_sparse import configurations

CHOICES = ("forward", "weight", "feature", "bce_forward", "softmax_forward", "loss_backward")


@pytest.mark.parametrize("name", CHOICES)
def test_tiles_of_any_sizes_can_be_launched(name: str) -> None:
    """What Triton takes: powers of two, labels, slots and samples from 16, a step of the matrix instructions."""
    labels, widths = (1, 5, 16, 20, 32, 64, 128), (4, 16, 20, 32, 64, 96, 129, 512)
    for of_group, width, num_groups, batch_size, itemsize, capability in itertools.product(
        labels, widths, (1, 1000, 2**14, 2**20), (1, 64, 100), (2, 4), (8, 9, 10, 12)
    ):
        sizes = of_group * num_groups, num_groups, batch_size, width, itemsize
        further = (capability,) if name == "loss_backward" else ()
        chosen = getattr(configurations, f"{name}_configuration")(*sizes, *further)
        assert chosen.num_warps in (1, 2, 4, 8), (sizes, chosen)
        assert {chosen.block_l, chosen.block_f, chosen.block_b} <= {16, 32, 64, 128}, (sizes, chosen)
