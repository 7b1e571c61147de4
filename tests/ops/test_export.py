"""Operators in a model exported from a `KeyedJaggedTensor`, whose sizes the exporter does not know."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from jagged import ops

BAGS = ops.BagLayout((50,), (8,))
SUPPORTS = torch.arange(8, dtype=torch.int32)
SEED = torch.tensor([5])


def heads(rows: Tensor) -> Tensor:
    return rows.view(-1, 2, 4)


def ids(rows: Tensor) -> Tensor:
    """An item of the table for every row."""
    return rows[:, 0].abs().mul(10).long().clamp(max=49)


def first_rows(rows: Tensor, offsets: Tensor) -> Tensor:
    """The first row of each sample, zeros of an empty one."""
    return ops.jagged_to_dense(rows, offsets, 1)[:, 0]


# Of rows of two features, those of `b` one a sample.
FUNCTIONS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "add_rows": lambda a, ao, b, bo: ops.add_rows(a, torch.ones(50, 8).cumsum(0), ids(a)),
    "add_rows of one backend": lambda a, ao, b, bo: ops.add_rows(a, torch.ones(50, 8).cumsum(0), ids(a), backend="torch"),
    "catalogue_topk": lambda a, ao, b, bo: ops.catalogue_topk(b, torch.ones(50, 8).cumsum(0), 3, exclude=(ids(a), ao))[0],
    "embedding_bags": lambda a, ao, b, bo: ops.embedding_bags(torch.ones(400), BAGS, ids(a), ao, per_sample_weights=a[:, 1]),
    "group_sparse_bce": lambda a, ao, b, bo: ops.group_sparse_bce(
        first_rows(b, bo), a, SUPPORTS.expand(ao.shape[0] - 1, 8), ao, 0 * ids(b), bo, a[:, 0]
    )[None],
    "group_sparse_cross_entropy": lambda a, ao, b, bo: ops.group_sparse_cross_entropy(
        first_rows(b, bo), a, SUPPORTS.expand(ao.shape[0] - 1, 8), ao, 0 * ids(b), bo, a[:, 0]
    )[None],
    "group_sparse_linear": lambda a, ao, b, bo: ops.group_sparse_linear(b, a, SUPPORTS.expand(b.shape[0], 8), ao, a[:, 0]),
    "grouped_linear": lambda a, ao, b, bo: ops.grouped_linear(a, torch.ones(2, 8, 8), torch.ones(2, 8), "relu")[:, 0],
    "hstu_output": lambda a, ao, b, bo: ops.hstu_output(
        a, a.sin(), a, torch.ones(8), torch.zeros(8), torch.ones(8, 24), torch.ones(8), concat=True
    ),
    "hstu_projection": lambda a, ao, b, bo: torch.cat(ops.hstu_projection(a, torch.ones(32, 8), torch.ones(32), 2), 1).flatten(1),
    "jagged2_softmax": lambda a, ao, b, bo: ops.jagged2_softmax(a[:, 0], ao, bo),
    "jagged_attention": lambda a, ao, b, bo: ops.jagged_attention(
        heads(b), heads(a), heads(a), bo, ao, window=(3, None), num_targets=1, relative_bias=torch.ones(2, 5), softcap=3.0
    ),
    "jagged_hstu_attention": lambda a, ao, b, bo: ops.jagged_hstu_attention(
        heads(a), heads(a), heads(a), ao, time_bias=torch.ones(2, 6), times=ids(a)
    ),
    "jagged_hstu_attention of wider values": lambda a, ao, b, bo: ops.jagged_hstu_attention(
        heads(a), heads(a)[:, :1], a[:, None], ao
    ),
    "jagged_softmax": lambda a, ao, b, bo: ops.jagged_softmax(a, ao),
    "layer_norm": lambda a, ao, b, bo: ops.layer_norm(a, torch.ones(8), torch.zeros(8)),
    "linear": lambda a, ao, b, bo: ops.linear(a, torch.ones(8, 8), torch.ones(8)),
    "linear_bce": lambda a, ao, b, bo: ops.linear_bce(first_rows(b, bo), a, 0 * ids(b), bo, a[:, 0])[None],
    "linear_cross_entropy": lambda a, ao, b, bo: ops.linear_cross_entropy(
        a, torch.ones(50, 8).cumsum(0), ids(a), reduction="none"
    ),
    "mix_groups": lambda a, ao, b, bo: ops.mix_groups(b[:, None], b[:, None, :1])[:, 0],
    "sampled_linear_cross_entropy": lambda a, ao, b, bo: ops.sampled_linear_cross_entropy(
        a, torch.ones(50, 8), ids(a), ops.Draw("uniform", 4, SEED)
    ),
    "array_jagged_bmm_jagged_out": lambda a, ao, b, bo: ops.array_jagged_bmm_jagged_out(a[:, 0], b, ao, bo, a.shape[0]),
    "dense_to_jagged": lambda a, ao, b, bo: ops.dense_to_jagged(b[:, None], ao, a.shape[0]),
    "jagged_concat": lambda a, ao, b, bo: ops.jagged_concat([a, b, b[:, None]], [ao, bo, None])[0],
    "jagged_concat of two parts": lambda a, ao, b, bo: ops.jagged_concat([b[:, None], a], [None, ao])[0],
    "jagged_cross": lambda a, ao, b, bo: ops.jagged_cross(a, ao, b[:, :3], a[:, 3:], a),
    "jagged_dense_add": lambda a, ao, b, bo: ops.jagged_dense_add(a, ao, b),
    "jagged_dense_bmm": lambda a, ao, b, bo: ops.jagged_dense_bmm(a, ao, b[:, :, None], b[:, :1]),
    "jagged_dense_mul": lambda a, ao, b, bo: ops.jagged_dense_mul(a, ao, b[:, None]),
    "jagged_index_select": lambda a, ao, b, bo: ops.jagged_index_select(a, ao, bo[:-1], a.shape[0])[0],
    "jagged_jagged_bmm": lambda a, ao, b, bo: ops.jagged_jagged_bmm(b, 2 * b, bo),
    "jagged_jagged_bmm_jagged_out": lambda a, ao, b, bo: ops.jagged_jagged_bmm_jagged_out(a, b, ao, bo, a.shape[0]),
    "jagged_linear": lambda a, ao, b, bo: ops.jagged_linear(a, ao, torch.ones(8, 8), context=b, activation="silu"),
    "jagged_pairwise_difference": lambda a, ao, b, bo: ops.jagged_pairwise_difference(b[:, 0], bo, b.shape[0]),
    "jagged_slice": lambda a, ao, b, bo: ops.jagged_slice(a, ao, 0 * bo[1:], 1, b.shape[0])[0],
    "jagged_split": lambda a, ao, b, bo: ops.jagged_split(a, [ao - bo, 1], [a.shape[0] - b.shape[0]])[0],
    "jagged_to_dense": lambda a, ao, b, bo: ops.jagged_to_dense(a, ao, 3),
    "jagged_truncate": lambda a, ao, b, bo: ops.jagged_truncate(a, ao, 1, total=b.shape[0])[0],
    "jagged_unique": lambda a, ao, b, bo: ops.jagged_unique(0 * a[:, 0].long(), ao, b.shape[0])[2],
}


class Model(nn.Module):
    """Embeds two features and calls an operator."""

    def __init__(self, function: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.table = function, nn.Embedding(50, 8)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        a, b = (features.to_dict()[key] for key in "ab")
        return self.function(self.table(a.values()), a.offsets(), self.table(b.values()), b.offsets())


def features_of(*lengths: int) -> KeyedJaggedTensor:
    both = torch.tensor([*lengths, *[1] * len(lengths)])
    return KeyedJaggedTensor(keys=["a", "b"], values=torch.arange(int(both.sum())), lengths=both)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_operators_are_exported_with_dynamic_sizes(name: str, strict: bool) -> None:
    model = Model(FUNCTIONS[name]).eval()
    sizes = [{0: Dim.DYNAMIC}, None, {0: Dim.DYNAMIC}, None, None, None]
    exported = torch.export.export(model, (features_of(2, 1, 3),), dynamic_shapes=(sizes,), strict=strict).module()
    for lengths in ((2, 1, 3), (1, 1, 5, 2, 1)):
        features = features_of(*lengths)
        torch.testing.assert_close(exported(features), model(features), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore")
def test_an_exported_graph_checks_sizes_when_it_runs() -> None:
    model = Model(FUNCTIONS["jagged_dense_add"]).eval()
    sizes = [{0: Dim.DYNAMIC}, None, {0: Dim.DYNAMIC}, None, None, None]
    exported = torch.export.export(model, (features_of(2, 1, 3),), dynamic_shapes=(sizes,)).module()
    wrong = KeyedJaggedTensor(keys=["a", "b"], values=torch.arange(8), lengths=torch.tensor([2, 1, 3, 1]))
    with pytest.raises(RuntimeError, match="Runtime assertion failed for expression"):
        exported(wrong)
