"""The layer normalisation of the models."""

from __future__ import annotations

import pytest
from torch import nn

from jagged.models import DIN, DLRMHSTU, HSTU, MaskNet, RankingModel, SASRec, Wukong
from jagged.modules import LayerNorm
from tests.models.shops import shop


def norms_of(name: str) -> nn.Module:
    split = shop("user", "item", "time", "click", history="events")
    ranking = {"ranking": RankingModel, "din": DIN, "dlrm-hstu": DLRMHSTU}
    if name in ranking:
        return ranking[name].of(split, embedding_dim=8)
    made = {
        "sasrec": lambda: SASRec(5, embedding_dim=8, num_heads=2, num_layers=1),
        "hstu": lambda: HSTU(5, embedding_dim=8, num_heads=2, num_layers=1),
        "wukong": lambda: Wukong(3, 8, 1, num_fm_tokens=2, num_linear_tokens=1, rank=2),
        "masks": lambda: MaskNet(8, 4, 2),
        "masks side by side": lambda: MaskNet(8, 4, 2, parallel=True),
    }
    return made[name]()


@pytest.mark.parametrize(
    ("name", "products", "others"),
    [
        ("ranking", 2, 1),
        ("din", 0, 2),
        ("dlrm-hstu", 4, 1),
        ("sasrec", 2, 1),
        ("hstu", 2, 1),
        ("wukong", 1, 1),
        ("masks", 0, 3),
        ("masks side by side", 0, 1),
    ],
)
def test_which_norms_a_product_reads(name: str, products: int, others: int) -> None:
    """Others are residuals, or what means, heads and users read: they stay in float32 under autocast."""
    norms = [of for of in norms_of(name).modules() if isinstance(of, nn.LayerNorm)]
    assert all(isinstance(of, LayerNorm) for of in norms)
    found = [of.autocast_output for of in norms if isinstance(of, LayerNorm)]
    assert (sum(found), len(found) - sum(found)) == (products, others)
