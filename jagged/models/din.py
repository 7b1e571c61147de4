"""DIN: each candidate sums its request's history, every event by a weight that a small network makes of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor

from jagged.models.bodies import GeneralBody, Widths
from jagged.models.features import HistoryEncoder, RankingInputs, check_histories
from jagged.models.request_model import RequestModel
from jagged.modules import LayerNorm, TargetAttention, with_values
from jagged.modules.linear import apply_layer
from jagged.ops import Activation


class TargetHistory(HistoryEncoder):
    """Events in any order: each candidate has the sum of their vectors, weighted by `TargetAttention`."""

    has_mean: ClassVar[bool] = False

    def _build(self, config: Mapping[str, Any], has_candidates: bool, device: torch.device | str | None) -> None:
        width = config["embedding_dim"]
        # Tables begin small, and products of small vectors teach little.
        self.event_norm, self.candidate_norm = (LayerNorm(width, device=device) for _ in range(2))
        self.attention = TargetAttention(width, config["attention_sizes"], activation=config["activation"], device=device)

    def forward(
        self,
        x: JaggedTensor,
        queries: JaggedTensor | None,
        times: tuple[Tensor, Tensor] | None = None,
        weights: Tensor | None = None,
        num_pairs: int | None = None,
    ) -> tuple[None, Tensor]:
        """Return what candidates read, `[S, embedding_dim]`; there is no mean."""
        # `check_histories` has seen to it.
        assert queries is not None
        events = with_values(x, self.event_norm(apply_layer(self.projection, x.values())))
        candidates = with_values(queries, self.candidate_norm(queries.values()))
        return None, cast(JaggedTensor, self.attention(events, candidates, num_pairs)).values()


class DIN(RequestModel):
    """Deep interest network: a candidate's interest is the sum of the events, each by how much it speaks for the candidate.

    1. Ids are looked up, and numbers normalised, as of `RequestModel`.
    2. What is known of an event makes a vector k of width D = `embedding_dim`: ids, lists, numbers, labels. A candidate's
       features make a vector q of the same width. Both are normalised (layer norm).
    3. For each history, the one that is gathered and each list of `list_histories`, a candidate has
       `sum_k MLP([k, q, k - q, k * q]) k` over the events of its request (`TargetAttention`). The weights are not normalised, so
       that the sum tells how much of the history speaks for the candidate. Order and times of the events change nothing.
    4. That sum is one of the candidate's features. It meets the request's features, and the means of the events' ids as they were
       looked up, in the body of `RankingModel`, without crosses and experts.

    Candidates and events are jagged, and nothing is padded or copied for pairs. The network's first layer is linear in the event
    once the candidate is fixed: with P pairs of a candidate and an event of its request, S candidates and H the first of
    `attention_sizes`, it is made as `[P, H]` of the events as they stand and `[S H, D + 1]` numbers of the candidates. In float32
    and with the default sizes a training step keeps 640 bytes a pair, and `64 (D + 1) 4` bytes a candidate. On a GPU the number
    of pairs is read of `Batch.pairs`; of a batch without it each history waits for the device once.

    Args:
        inputs: what batches have; `DIN.of` finds it out.
        sizes: rows of each embedding table, as `split.encoders.sizes` has them.
        embedding_dim: width of tables, events and candidates.
        attention_sizes: widths of the hidden layers of the network that weighs an event.
        activation: behind each of them: `"silu"`, `"relu"` or `"gelu"`. The paper's Dice is not there, for it needs means over
            the batch, and a score would depend on who else is in it; SiLU is Dice without them and with a slope of 0.
        layer_sizes: the first is the width of the linear layer where request and candidate meet, the others those of each
            tower's hidden layers.
        dropout: probability, in towers.
        recompute: as of `RankingModel`.
        **common: `table_dims`, `tasks`, `conditional`, `implied`, `loss`, `focal_gamma`, `focal_alpha`, `negative_rate` and
            `label_means` of `RequestModel`.
        device: where parameters live; `"meta"` allocates nothing.

    Shape:
        A `Batch` in; a `TaskOutput` out with `[S]` logits by label. Where negatives are drawn the one task is "next".

    Raises:
        ValueError: as `RequestModel`; no history, no column of the candidates, no layer, or another activation.

    Source:
        Zhou et al., Deep Interest Network for Click-Through Rate Prediction, KDD 2018, section 4.3, equation 3. The difference
        and the product stand for the outer product there, as in the authors' code. Events and candidates are projected and
        normalised here, for they show different columns, and tables begin small.

    Example:
        >>> from jagged.models import DIN, RankingInputs
        >>> inputs = RankingInputs(candidate_ids={"item": "item"}, history={"history.item": "item"}, labels=["click", "buy"])
        >>> DIN(inputs, {"item": 5}).tasks
        ['click', 'buy']
    """

    def __init__(
        self,
        inputs: RankingInputs | Mapping[str, Any],
        sizes: Mapping[str, int],
        *,
        embedding_dim: int = 16,
        attention_sizes: Sequence[int] = (64, 16),
        activation: Activation = "silu",
        layer_sizes: Sequence[int] = (128, 64),
        dropout: float = 0.0,
        recompute: bool = False,
        device: torch.device | str | None = None,
        **common: Any,
    ) -> None:
        inputs = inputs if isinstance(inputs, RankingInputs) else RankingInputs(**inputs)
        check_histories(inputs, "din")
        for name, widths in (("attention_sizes", attention_sizes), ("layer_sizes", layer_sizes)):
            if not widths:
                raise ValueError(f"{name}: expected the width of at least one layer, got none")
        own = {
            "attention_sizes": list(attention_sizes),
            "activation": activation,
            "layer_sizes": list(layer_sizes),
            "dropout": dropout,
            "recompute": recompute,
        }
        super().__init__(
            inputs,
            sizes,
            own=own,
            make_body=_body,
            encoder=TargetHistory,
            embedding_dim=embedding_dim,
            device=device,
            **common,
        )


def _body(widths: Widths, num_tasks: int, config: Mapping[str, Any], device: torch.device | str | None) -> GeneralBody:
    """`RankingModel`'s without crosses and experts."""
    return GeneralBody(widths, num_tasks, {**config, "cross": None, "experts": None}, device)
