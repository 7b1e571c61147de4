"""Every module in a model that reads a `KeyedJaggedTensor`, exported and compiled whole, for all sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from tests.modules.test_every_module import CASES, DIM, ITEMS, TARGETS, Case, Inputs, seeded
from tests.places import PLACE

pytestmark = [
    pytest.mark.skipif(PLACE.name == "interpret", reason="modules run on the place's own backend"),
    # Marks what runs on a GPU, too.
    pytest.mark.usefixtures("place"),
]

# A jagged history and one candidate a sample.
KEYS = ["history", "candidate"]
BATCHES = ((2, 1, 3), (1, 1, 5, 2, 1))


class FromKeyed(nn.Module):
    """Lookups in one table, then a module."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.part, self.use = case.build(), case.use
        self.table = nn.Embedding.from_pretrained(torch.linspace(-1, 1, ITEMS * DIM).sin().view(ITEMS, DIM), freeze=False)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        items, candidates = (features.to_dict()[key] for key in KEYS)
        items = JaggedTensor(items.values(), offsets=items.offsets())
        rows = JaggedTensor(self.table(items.values()), offsets=items.offsets())
        targets = self.table(candidates.values())[:, None].expand(-1, TARGETS, -1)
        return self.use(self.part, Inputs(rows, items, targets, self.table.weight))


def features_of(*lengths: int) -> KeyedJaggedTensor:
    both = torch.tensor([*lengths, *[1] * len(lengths)])
    features = KeyedJaggedTensor(keys=KEYS, values=torch.arange(int(both.sum())) % (ITEMS - 1), lengths=both)
    return features.to(PLACE.device)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_is_exported_with_dynamic_sizes(name: str, strict: bool) -> None:
    model = FromKeyed(CASES[name]).to(PLACE.device).eval()
    sizes = [{0: Dim.DYNAMIC}, None, {0: Dim.DYNAMIC}, None, None, None]
    exported = torch.export.export(model, (features_of(*BATCHES[0]),), dynamic_shapes=(sizes,), strict=strict).module()
    for lengths in BATCHES:
        features = features_of(*lengths)
        torch.testing.assert_close(seeded(exported, features), seeded(model, features), rtol=0, atol=0)


def compare(name: str, tolerance: float, **how: Any) -> None:
    """Compare a compiled model with eager calls, sums of gradients with ten times the relative tolerance."""
    model = FromKeyed(CASES[name]).to(PLACE.device).eval()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, **how)
    for lengths in BATCHES:
        features, leaf = features_of(*lengths), model.table.weight
        found, expected = seeded(compiled, features), seeded(model, features)
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
        ours, theirs = (torch.autograd.grad(x.square().sum(), leaf)[0] for x in (found, expected))
        # Digits of a sum are those of its largest parts: eager gradients of the transformer err by 20 units of the largest one.
        digits = min(tolerance, 20 * torch.finfo(torch.float32).eps) * float(theirs.abs().max())
        torch.testing.assert_close(ours, theirs, rtol=10 * tolerance, atol=max(tolerance, digits))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_inductor_computes_what_eager_calls_do(name: str) -> None:
    """The default backend writes kernels of its own for all that stands between ours; here it draws eager calls' numbers."""
    if name == "scalable head" and torch.__version__.startswith("2.11."):
        pytest.skip("Inductor of torch 2.11 stops, and says so, at a size that is the smaller of two sizes")
    compare(name, 1e-5, options={"fallback_random": True})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_is_compiled_whole_with_dynamic_sizes(name: str) -> None:
    compare(name, 1e-6, backend="aot_eager")
