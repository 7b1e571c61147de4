"""DCN V2: crosses of all features of a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from jagged.models.bodies import DCNBody
from jagged.models.features import RankingInputs
from jagged.models.request_model import RequestModel


class DCNv2(RequestModel):
    """Deep and cross network, second version: layers of crosses of all that is known of a row, and a perceptron.

    Histories are means of their events. All of a candidate and its request stands in one row, of width D, for each candidate.

    Args:
        inputs: what batches have; `DCNv2.of` finds it out.
        sizes: rows of each embedding table, as `split.encoders.sizes` has them.
        embedding_dim: width of tables.
        cross_layers, cross_rank, cross_experts: of `CrossNet`; `cross_experts` needs `cross_rank`.
        structure: `"stacked"`, the perceptron behind the crosses, or `"parallel"`, both side by side.
        layer_sizes: widths of the perceptron's layers, at least one; a linear layer with a number for each label follows.
        dropout: probability, in the perceptron.
        **common: `table_dims`, `tasks`, `conditional`, `implied`, `loss`, `focal_gamma`, `focal_alpha`,
            `negative_rate` and `label_means` of `RequestModel`.
        device: where parameters live; `"meta"` allocates nothing.

    Shape:
        A `Batch` in; a `TaskOutput` out with `[S]` logits by label.

    Raises:
        ValueError: as `RequestModel`; no layer, another structure, or what `CrossNet` refuses.

    Source:
        Wang et al., DCN V2: Improved Deep & Cross Network and Practical Lessons for Web-scale Learning to Rank Systems, WWW
        2021.

    Example:
        >>> from jagged.models import DCNv2, RankingInputs
        >>> inputs = RankingInputs(features={"user": "user"}, candidates={"item": "item"})
        >>> DCNv2(inputs, {"user": 9, "item": 5}).tasks
        ['next']
    """

    def __init__(
        self,
        inputs: RankingInputs | Mapping[str, Any],
        sizes: Mapping[str, int],
        *,
        embedding_dim: int = 16,
        cross_layers: int = 3,
        cross_rank: int | None = None,
        cross_experts: int | None = None,
        structure: Literal["stacked", "parallel"] = "stacked",
        layer_sizes: Sequence[int] = (128, 64),
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        **common: Any,
    ) -> None:
        if structure not in ("stacked", "parallel"):
            raise ValueError(f"structure: got {structure!r}, expected 'stacked' or 'parallel'")
        if not layer_sizes:
            raise ValueError("layer_sizes: expected the width of at least one layer, got none")
        own = {
            "cross_layers": cross_layers,
            "cross_rank": cross_rank,
            "cross_experts": cross_experts,
            "structure": structure,
            "layer_sizes": list(layer_sizes),
            "dropout": dropout,
        }
        super().__init__(inputs, sizes, own=own, make_body=DCNBody, embedding_dim=embedding_dim, device=device, **common)
