"""Values of offsets, targets and ids: checked on a CPU by default, elsewhere on demand, never where they are trusted."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from jagged import ops

# Lengths, given as offsets.
WRONG = torch.tensor([3, 0, 2])
ROWS, OTHER = torch.ones(5, 4), torch.ones(2, 4, 3)
Q = torch.ones(5, 2, 8)
SUPPORTS = torch.arange(4, dtype=torch.int32).expand(2, 4)
POSITIVES = torch.tensor([3, 0, 1, 2, 4])
LAYOUT = ops.BagLayout((9,), (4,))

CALLS: dict[str, Callable[[Tensor], object]] = {
    "array_jagged_bmm_jagged_out": lambda o: ops.array_jagged_bmm_jagged_out(torch.ones(13), ROWS, o),
    "catalogue_topk": lambda o: ops.catalogue_topk(ROWS[:2], ROWS, 1, exclude=(torch.arange(5), o)),
    "dense_to_jagged": lambda o: ops.dense_to_jagged(torch.ones(2, 3, 4), o, 5),
    "embedding_bags": lambda o: ops.embedding_bags(torch.ones(36), LAYOUT, torch.arange(5), o),
    "group_sparse_bce": lambda o: ops.group_sparse_bce(
        torch.ones(3, 4), ROWS, SUPPORTS, o, POSITIVES, torch.tensor([0, 1, 1, 5])
    ),
    "group_sparse_bce of rows": lambda o: ops.group_sparse_bce(ROWS[:2], ROWS, SUPPORTS, torch.tensor([0, 2, 5]), POSITIVES, o),
    "group_sparse_cross_entropy": lambda o: ops.group_sparse_cross_entropy(
        torch.ones(3, 4), ROWS, SUPPORTS, o, POSITIVES, torch.tensor([0, 1, 1, 5])
    ),
    "group_sparse_cross_entropy of rows": lambda o: ops.group_sparse_cross_entropy(
        ROWS[:2], ROWS, SUPPORTS, torch.tensor([0, 2, 5]), POSITIVES, o
    ),
    "group_sparse_linear": lambda o: ops.group_sparse_linear(torch.ones(3, 4), ROWS, SUPPORTS, o),
    "jagged2_softmax": lambda o: ops.jagged2_softmax(torch.ones(13), o),
    "jagged_attention": lambda o: ops.jagged_attention(Q, Q, Q, o),
    "jagged_attention to others": lambda o: ops.jagged_attention(Q, Q, Q, torch.tensor([0, 2, 5]), o),
    "jagged_concat": lambda o: ops.jagged_concat([ROWS, ROWS], [o, o]),
    "jagged_dense_add": lambda o: ops.jagged_dense_add(ROWS, o, torch.ones(2, 4)),
    "jagged_dense_bmm": lambda o: ops.jagged_dense_bmm(ROWS, o, OTHER),
    "jagged_dense_mul": lambda o: ops.jagged_dense_mul(ROWS, o, torch.ones(2, 4)),
    "jagged_hstu_attention": lambda o: ops.jagged_hstu_attention(Q, Q, Q, o),
    "jagged_index_select": lambda o: ops.jagged_index_select(ROWS, o, torch.tensor([1, 0])),
    "jagged_jagged_bmm": lambda o: ops.jagged_jagged_bmm(ROWS, ROWS, o),
    "jagged_jagged_bmm_jagged_out": lambda o: ops.jagged_jagged_bmm_jagged_out(ROWS, ROWS, o, total=13),
    "jagged_linear": lambda o: ops.jagged_linear(ROWS, o, torch.ones(4, 4), context=torch.ones(2, 4)),
    "jagged_pairwise_difference": lambda o: ops.jagged_pairwise_difference(ROWS[:, 0], o, 13),
    "jagged_slice": lambda o: ops.jagged_slice(ROWS, o, 1, 2),
    "jagged_softmax": lambda o: ops.jagged_softmax(ROWS, o),
    "jagged_split": lambda o: ops.jagged_split(ROWS, [o, 0], [5]),
    "jagged_to_dense": lambda o: ops.jagged_to_dense(ROWS, o, 3),
    "jagged_truncate": lambda o: ops.jagged_truncate(ROWS, o, 2, total=4),
    "jagged_unique": lambda o: ops.jagged_unique(torch.arange(5), o),
    "linear_bce": lambda o: ops.linear_bce(ROWS[:2], ROWS, POSITIVES, o),
    "pair_offsets": lambda o: ops.pair_offsets(o),
    "row_positions": lambda o: ops.row_positions(o, 5),
}


@pytest.mark.parametrize("name", sorted(CALLS))
def test_wrong_offsets_are_refused_on_a_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = r"(\w+ )?\w*offsets(\[\d\])?\[0\]: expected 0, got 3; offsets count rows from the start of the values"
    expected = expected.replace(r"(\w+ )?\w*offsets", r"(exclude )?\w*offsets")
    with pytest.raises(ValueError, match=f"^{expected}$"):
        CALLS[name](WRONG)
    # Trusted values are checked on demand alone.
    monkeypatch.setenv("JAGGED_VALIDATE", "1")
    with ops.trust_values(), pytest.raises(ValueError, match=f"^{expected}$"):
        CALLS[name](WRONG)
    CALLS[name](torch.tensor([0, 3, 5]))


@pytest.mark.parametrize("way", ["trusted", "switched off"])
def test_values_are_left_unchecked(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "trusted":
        with ops.trust_values():
            ops.jagged_softmax(ROWS, WRONG)
    else:
        monkeypatch.setenv("JAGGED_VALIDATE", "0")
        ops.jagged_softmax(ROWS, WRONG)


def test_targets_are_refused_on_a_cpu() -> None:
    hidden, weight = torch.ones(3, 4), torch.ones(7, 4)
    target = torch.tensor([0, 7, -100])
    expected = "target[1]: expected an id from 0 to 6, or ignore_index (-100), got 7; map ids to dense ones first"
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        ops.linear_cross_entropy(hidden, weight, target)
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        ops.sampled_linear_cross_entropy(hidden, weight, target, torch.tensor([1, 2]))


def test_what_has_no_values_to_read_is_not_checked() -> None:
    with torch._subclasses.FakeTensorMode() as mode:
        fake = mode.from_tensor(WRONG)
        assert ops.jagged_softmax(mode.from_tensor(ROWS), fake).shape == (5, 4)
    assert ops.jagged_softmax(ROWS.to("meta"), WRONG.to("meta")).is_meta
    compiled = torch.compile(ops.jagged_softmax, fullgraph=True, backend="eager")
    assert compiled(ROWS, WRONG).shape == (5, 4)
