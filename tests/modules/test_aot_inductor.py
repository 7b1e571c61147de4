"""A model of every family of operators, exported with dynamic sizes, compiled ahead of time and loaded from its package."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import Dim
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from jagged import ops
from jagged.modules import (
    CutCrossEntropyHead,
    HSTUBlock,
    JaggedFeatureInteraction,
    JaggedMLP,
    JaggedPooling,
    JaggedTransformerBlock,
    PositionalEncoding,
    SampledCrossEntropyHead,
    ScheduledEmbeddingBagCollection,
    TargetAttention,
    UniformSampler,
)
from tests.places import PLACE

DIM, ITEMS = 8, 20

pytestmark = [
    pytest.mark.skipif(PLACE.name != "cpu", reason="compiles for the CPU"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler"),
]


class Ranker(nn.Module):
    """A history and one candidate a sample; bags of both beside it."""

    def __init__(self) -> None:
        super().__init__()
        table = EmbeddingBagConfig(name="bags", embedding_dim=DIM, num_embeddings=ITEMS, feature_names=["history"])
        self.bags = ScheduledEmbeddingBagCollection([table])
        self.items = nn.Embedding(ITEMS, DIM)
        self.blocks = nn.ModuleList([PositionalEncoding(9, DIM), JaggedTransformerBlock(DIM, 2), HSTUBlock(DIM, 2)])
        self.pooling, self.towards = JaggedPooling(DIM, "softmax"), TargetAttention(DIM, (4,))
        self.interaction, self.mlp = JaggedFeatureInteraction(), JaggedMLP(DIM, [DIM], context_features=DIM)
        self.heads = nn.ModuleList([CutCrossEntropyHead(), SampledCrossEntropyHead(UniformSampler(ITEMS, 4))])

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, ...]:
        pooled = self.bags(features)["history"]
        history, candidate = (features.to_dict()[key] for key in ("history", "candidate"))
        x = JaggedTensor(self.items(history.values()), offsets=history.offsets())
        for block in self.blocks:
            x = block(x)
        values, offsets, one = x.values(), x.offsets(), self.items(candidate.values())
        total = values.shape[0]
        losses = [head(x, self.items.weight, JaggedTensor(history.values(), offsets=offsets)).loss for head in self.heads]
        joined, joined_offsets = ops.jagged_concat([values, one[:, None]], [offsets, None])
        pairs = ops.jagged_jagged_bmm_jagged_out(values, one, offsets, candidate.offsets(), total)
        weights = ops.jagged2_softmax(pairs, offsets, candidate.offsets())
        return (
            pooled + self.pooling(x) + self.towards(x, one),
            self.interaction(x, one[:, None]),
            self.mlp(x, one).values(),
            ops.array_jagged_bmm_jagged_out(weights, one, offsets, candidate.offsets(), total),
            ops.jagged_to_dense(joined, joined_offsets, 4),
            *ops.catalogue_topk(self.mlp(x, one).values(), self.items.weight, 3),
            *losses,
        )


def features_of(*lengths: int) -> KeyedJaggedTensor:
    both = torch.tensor([*lengths, *[1] * len(lengths)])
    return KeyedJaggedTensor(keys=["history", "candidate"], values=torch.arange(int(both.sum())) % ITEMS, lengths=both)


@pytest.mark.filterwarnings("ignore")
def test_a_model_of_every_family_is_served_from_its_package(tmp_path: Path) -> None:
    model = Ranker().eval()
    sizes = [{0: Dim.DYNAMIC}, None, {0: Dim.DYNAMIC}, None, None, None]
    with torch.no_grad():
        exported = torch.export.export(model, (features_of(2, 1, 3),), dynamic_shapes=(sizes,), strict=False)
        package = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "model.pt2"))
        served = torch._inductor.aoti_load_package(package)
        for lengths in ((2, 1, 3), (1, 1, 5, 2, 1)):
            found, expected = served(features_of(*lengths)), model(features_of(*lengths))
            assert not any(isinstance(of, FakeTensor) for of in expected), "export left fake tensors in the model"
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
