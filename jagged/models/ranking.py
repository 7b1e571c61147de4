"""The general ranking model of a table's requests: histories that candidates attend to, crossed features, experts, towers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch

from jagged.models.bodies import GeneralBody
from jagged.models.features import History, HistoryEncoder, RankingInputs
from jagged.models.request_model import RequestModel


class RankingModel(RequestModel):
    """Scores of the candidates of requests, for one label or several, trained by binary cross entropy or another loss.

    1. Ids are looked up: `features` that are the request's are pooled by means, those of candidates and histories row by row, and
       `candidates`, lists of events and lists with weights (sums) in tables of their own.
    2. Each history, the one that is gathered and each list of `list_histories`, with weights of its own: what is known of an
       event makes a vector (ids, numbers and labels; of a list the id), to which its place from the end and the time since, if
       events have times, are added; transformer blocks; the mean of the events, by their weights where they have some; and, with
       the candidate's features as the query, attention of each candidate to its request's events. Beside them the means of the
       events' ids as they were looked up: they lie in the space of the candidate's ids of the same tables, whose products with
       them tell from the first step on how much of the history is alike.
    3. The request's features meet each candidate's in one linear layer, for which they are projected once a request.
       `cross="dcn"` crosses what comes out (`CrossNet`); `cross="dot"` adds to what goes in the products of all pairs of vectors
       (`DotInteraction`); None does neither.
    4. With `experts`, experts that the labels share, mixed for each by a gate.
    5. A tower for each label.

    Nothing is padded, and nothing of the request is copied for its candidates before that linear layer. Tables, numbers and
    losses are those of `RequestModel`.

    Args:
        inputs: what batches have; `RankingModel.of` finds it out.
        sizes: rows of each embedding table, as `split.encoders.sizes` has them.
        embedding_dim: width of tables and of histories.
        cross: as above.
        cross_layers, cross_rank: of `CrossNet`.
        num_layers: transformer blocks on each history; 0 for none.
        num_heads: attention heads; divides `embedding_dim`.
        max_history: places from the end that have a vector of their own.
        num_time_buckets: of the time since an event (`TimeEncoding`); None for none.
        layer_sizes: the first is the width of the linear layer where request and candidate meet, the others those of each
            tower's hidden layers.
        dropout: probability, in blocks and towers.
        recompute: activation checkpointing of the histories: they are encoded again in the backward pass, one after the other,
            instead of keeping what it needs of all of them. Less memory for more time, and the same gradients. A compiled step
            keeps what its compiler chooses, and CUDA graphs have no dropout with it.
        experts: what stands between that layer and the towers: `"mmoe"` (`MMoE`), `"ple"` (`PLE`), or None.
        num_experts: of `"mmoe"` all, of `"ple"` those of each task and the shared ones.
        expert_sizes: widths of an expert's layers.
        expert_layers: layers of `"ple"`.
        **common: `table_dims`, `tasks`, `conditional`, `implied`, `loss`, `focal_gamma`, `focal_alpha`,
            `negative_rate` and `label_means` of `RequestModel`.
        device: where parameters live; `"meta"` allocates nothing.

    Shape:
        A `Batch` in; a `TaskOutput` out with `[S]` logits by label. Where negatives are drawn the one task is "next".

    Raises:
        ValueError: as `RequestModel`; `cross="dot"` of several widths, another `cross` or `experts`, or no layer;
            `recompute` without a history.

    Source:
        Target attention in place of a fixed vector: Zhou et al., Deep Interest Network for Click-Through Rate Prediction, KDD
        2018, here by scaled products.

    Example:
        >>> from jagged.models import RankingInputs, RankingModel
        >>> inputs = RankingInputs(features={"user": "user"}, candidates={"item": "item"})
        >>> model = RankingModel(inputs, {"user": 9, "item": 5})
        >>> model.tasks
        ['next']
    """

    #: What encodes a history.
    encoder: ClassVar[type[HistoryEncoder]] = History

    def __init__(
        self,
        inputs: RankingInputs | Mapping[str, Any],
        sizes: Mapping[str, int],
        *,
        embedding_dim: int = 16,
        table_dims: Mapping[str, int] | None = None,
        cross: Literal["dcn", "dot"] | None = "dcn",
        cross_layers: int = 3,
        cross_rank: int | None = None,
        num_layers: int = 1,
        num_heads: int = 2,
        max_history: int = 50,
        num_time_buckets: int | None = 64,
        layer_sizes: Sequence[int] = (128, 64),
        experts: Literal["mmoe", "ple"] | None = None,
        num_experts: int = 4,
        expert_sizes: Sequence[int] = (64,),
        expert_layers: int = 1,
        dropout: float = 0.0,
        recompute: bool = False,
        device: torch.device | str | None = None,
        **common: Any,
    ) -> None:
        if cross not in ("dcn", "dot", None):
            raise ValueError(f"cross: got {cross!r}, expected 'dcn', 'dot' or None")
        if experts not in ("mmoe", "ple", None):
            raise ValueError(f"experts: got {experts!r}, expected 'mmoe', 'ple' or None")
        if cross == "dot":
            check_one_width(table_dims, embedding_dim, "cross='dot'")
        if not layer_sizes:
            raise ValueError("layer_sizes: expected the width of at least one layer, got none")
        own = {
            "cross": cross, "cross_layers": cross_layers, "cross_rank": cross_rank, "num_layers": num_layers,
            "num_heads": num_heads, "max_history": max_history, "num_time_buckets": num_time_buckets,
            "layer_sizes": list(layer_sizes), "experts": experts, "num_experts": num_experts,
            "expert_sizes": list(expert_sizes), "expert_layers": expert_layers, "dropout": dropout,
            "recompute": recompute,
        }  # fmt: skip
        super().__init__(
            inputs,
            sizes,
            own=own,
            make_body=GeneralBody,
            encoder=self.encoder,
            embedding_dim=embedding_dim,
            table_dims=table_dims,
            device=device,
            **common,
        )


def check_one_width(table_dims: Mapping[str, int] | None, embedding_dim: int, what: str) -> None:
    """Refuse tables of other widths where vectors are multiplied.

    Raises:
        ValueError: a table of another width.
    """
    for table, width in (table_dims or {}).items():
        if width != embedding_dim:
            raise ValueError(
                f"table_dims: got {width} for the table {table!r}, expected {embedding_dim}, the width of the others; {what} "
                "multiplies vectors of one width"
            )
