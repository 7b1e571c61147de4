"""DLRM: products of pairs of features, and a perceptron over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from jagged.models.bodies import DLRMBody
from jagged.models.features import RankingInputs
from jagged.models.ranking import check_one_width
from jagged.models.request_model import RequestModel


class DLRM(RequestModel):
    """Deep learning recommendation model: products of all pairs of feature vectors, and a perceptron over them.

    Numbers become a vector by a perceptron of their own (the bottom), those of the request and of the candidate each by one. All
    vectors meet in scalar products; products and the vectors of the numbers go through the top perceptron. Histories are means
    of their events. What is the request's is computed once a request: its products, and its part of the top's first layer.

    Args:
        inputs: what batches have; `DLRM.of` finds it out.
        sizes: rows of each embedding table, as `split.encoders.sizes` has them.
        embedding_dim: width of tables and of the vectors of numbers.
        bottom_sizes: widths of the hidden layers of the numbers' perceptrons.
        top_sizes: widths of the hidden layers of the top perceptron, whose last layer has a number for each label.
        dropout: probability, in the top perceptron.
        **common: `table_dims`, `tasks`, `conditional`, `implied`, `loss`, `focal_gamma`, `focal_alpha`,
            `negative_rate` and `label_means` of `RequestModel`.
        device: where parameters live; `"meta"` allocates nothing.

    Shape:
        A `Batch` in; a `TaskOutput` out with `[S]` logits by label.

    Raises:
        ValueError: as `RequestModel`; tables of several widths, or one vector alone.

    Source:
        Naumov et al., Deep Learning Recommendation Model for Personalization and Recommendation Systems, 2019.

    Example:
        >>> from jagged.models import DLRM, RankingInputs
        >>> inputs = RankingInputs(features={"user": "user"}, candidates={"item": "item"})
        >>> DLRM(inputs, {"user": 9, "item": 5}).tasks
        ['next']
    """

    def __init__(
        self,
        inputs: RankingInputs | Mapping[str, Any],
        sizes: Mapping[str, int],
        *,
        embedding_dim: int = 16,
        bottom_sizes: Sequence[int] = (64,),
        top_sizes: Sequence[int] = (128, 64),
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        **common: Any,
    ) -> None:
        check_one_width(common.get("table_dims"), embedding_dim, "DLRM")
        own = {
            "bottom_sizes": list(bottom_sizes),
            "top_sizes": list(top_sizes),
            "dropout": dropout,
        }
        super().__init__(inputs, sizes, own=own, make_body=DLRMBody, embedding_dim=embedding_dim, device=device, **common)
