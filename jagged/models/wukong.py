"""Wukong: layers of factorization machines over a token of each feature."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from jagged.models.bodies import WukongBody
from jagged.models.features import RankingInputs
from jagged.models.request_model import RequestModel


class WukongModel(RequestModel):
    """Wukong: a token of each feature, layers of factorization machines and linear combinations of tokens, and a perceptron.

    Each feature, of any width, is projected to a token, and so are the numbers of the request and of the candidate; what is the
    request's is projected once a request. Histories are means of their events. After l layers tokens have products of up to 2^l
    features, so that a larger model is a better one for longer.

    Args:
        inputs: what batches have; `WukongModel.of` finds it out.
        sizes: rows of each embedding table, as `split.encoders.sizes` has them.
        embedding_dim: width of tables and of tokens.
        num_layers: Wukong layers.
        num_fm_tokens, num_linear_tokens, rank, hidden_sizes: of `Wukong`.
        top_sizes: widths of the hidden layers of the perceptron, whose last layer has a number for each label.
        dropout: probability, in the perceptron.
        **common: `table_dims`, `tasks`, `conditional`, `implied`, `loss`, `focal_gamma`, `focal_alpha`,
            `negative_rate` and `label_means` of `RequestModel`.
        device: where parameters live; `"meta"` allocates nothing.

    Shape:
        A `Batch` in; a `TaskOutput` out with `[S]` logits by label.

    Raises:
        ValueError: as `RequestModel`; a size below 1.

    Source:
        Zhang et al., Wukong: Towards a Scaling Law for Large-Scale Recommendation, ICML 2024.

    Example:
        >>> from jagged.models import WukongModel, RankingInputs
        >>> inputs = RankingInputs(features={"user": "user"}, candidates={"item": "item"})
        >>> WukongModel(inputs, {"user": 9, "item": 5}).tasks
        ['next']
    """

    def __init__(
        self,
        inputs: RankingInputs | Mapping[str, Any],
        sizes: Mapping[str, int],
        *,
        embedding_dim: int = 16,
        num_layers: int = 2,
        num_fm_tokens: int = 8,
        num_linear_tokens: int = 8,
        rank: int = 8,
        hidden_sizes: Sequence[int] = (64,),
        top_sizes: Sequence[int] = (128, 64),
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        **common: Any,
    ) -> None:
        own = {
            "num_layers": num_layers,
            "num_fm_tokens": num_fm_tokens,
            "num_linear_tokens": num_linear_tokens,
            "rank": rank,
            "hidden_sizes": list(hidden_sizes),
            "top_sizes": list(top_sizes),
            "dropout": dropout,
        }
        super().__init__(inputs, sizes, own=own, make_body=WukongBody, embedding_dim=embedding_dim, device=device, **common)
