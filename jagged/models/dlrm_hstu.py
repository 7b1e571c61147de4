"""DLRM-HSTU: the candidates of a request stand as targets behind its history, in gated attention without softmax."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from jagged.models.features import HistoryEncoder, RankingInputs, check_histories
from jagged.models.ranking import RankingModel
from jagged.modules import HSTUBlock, LayerNorm, PositionalEncoding
from jagged.modules.linear import apply_layer
from jagged.ops import jagged_concat, jagged_split, sample_of_row


class HSTUHistory(HistoryEncoder):
    """Events and behind them the candidates in one jagged sequence, through `HSTUBlock`; what comes out at the candidates.

    Each candidate sees the events and itself. What it becomes does not depend on the other candidates, and the events, which see
    no candidate, are encoded once for all of them.
    """

    has_mean: ClassVar[bool] = False

    def _build(self, config: Mapping[str, Any], has_candidates: bool, device: torch.device | str | None) -> None:
        width, most = config["embedding_dim"], config["max_history"]
        # What events of a list have no time for.
        buckets = config["num_time_buckets"] if self.is_gathered else None
        self.has_times = buckets is not None
        # The first position is that of candidates.
        self.positions = PositionalEncoding(most + 1, width, device=device)
        self.blocks = nn.ModuleList(
            HSTUBlock(
                width,
                config["num_heads"],
                max_distance=most,
                num_time_buckets=buckets,
                dropout=config["dropout"],
                # Each sample's own number of rows would say how many candidates there are.
                normalizer=most,
                device=device,
            )
            for _ in range(config["num_layers"])
        )
        self.norm = LayerNorm(width, device=device)

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
        events, candidates, offsets = apply_layer(self.projection, x.values()), queries.values(), x.offsets()
        targets = queries.offsets().to(offsets.dtype)
        joined, ends = jagged_concat([events, candidates], [offsets, targets])
        counts, when = targets.diff(), None
        if self.has_times:
            assert times is not None
            of_events, of_requests = times
            of_candidates = of_requests[sample_of_row(targets, candidates.shape[0])]
            when, _ = jagged_concat([of_events, of_candidates], [offsets, targets])
        sequence = self.positions(JaggedTensor(joined, offsets=ends), counts)
        for block in self.blocks:
            sequence = block(sequence, counts, when)
        _, read = jagged_split(sequence.values(), [offsets, targets], [events.shape[0], candidates.shape[0]])
        return None, cast(Tensor, self.norm(read))


class DLRMHSTU(RankingModel):
    """The ranking form of HSTU: candidates are targets behind the history of their request.

    1. Ids are looked up, and numbers normalised, as of `RequestModel`.
    2. What is known of an event makes a vector of width `embedding_dim`: ids, lists, numbers, and the labels that say what the
       user did. A candidate's features make one of the same width.
    3. For each history, the one that is gathered and each list of `list_histories`, one jagged sequence: a request's events, then
       its candidates. Blocks of `HSTUBlock` run over it, with learned vectors of places from the end and scores that know the
       distance between rows and, where events have times, the time between them; a candidate's is its request's. Each candidate
       sees the history and itself alone. Sums over rows are divided by `max_history`, so that the scores of a candidate do not
       depend on the others of its request, and a history is encoded once however many they are.
    4. What comes out at a candidate, normalised, is one of its features. It meets the request's other features, and the means of
       the events' ids as they were looked up, in the body of `RankingModel`.

    Nothing is padded. A request without events leaves its candidates to themselves.

    Args:
        inputs: what batches have; `DLRMHSTU.of` finds it out.
        sizes: rows of each embedding table, as `split.encoders.sizes` has them.
        cross: as of `RankingModel`.
        num_layers: blocks, at least one.
        num_heads: attention heads; divides `embedding_dim`.
        max_history: places from the end that have a vector of their own, distances with a bias, and what sums are divided by.
        num_time_buckets: of the time between rows, two buckets an octave (`HSTUBlock`); None for none.
        **options: of `RankingModel`.
        device: where parameters live; `"meta"` allocates nothing.

    Shape:
        A `Batch` in; a `TaskOutput` out with `[S]` logits by label. Where negatives are drawn the one task is "next".

    Raises:
        ValueError: as `RankingModel` and `HSTUBlock`; no history, no column of the candidates, or no block.

    Source:
        Zhai et al., Actions Speak Louder than Words: Trillion-Parameter Sequential Transducers for Generative Recommendations,
        ICML 2024, equations 1 to 3, and targets that do not see one another as in its M-FALCON, section 3.4. There items and
        actions take turns in the sequence; here an event is one row that shows both, and the model of features beside it is
        `RankingModel`'s.

    Example:
        >>> from jagged.models import DLRMHSTU, RankingInputs
        >>> inputs = RankingInputs(candidate_ids={"item": "item"}, history={"history.item": "item"}, labels=["click", "buy"])
        >>> DLRMHSTU(inputs, {"item": 5}).tasks
        ['click', 'buy']
    """

    encoder: ClassVar[type[HistoryEncoder]] = HSTUHistory

    def __init__(
        self,
        inputs: RankingInputs | Mapping[str, Any],
        sizes: Mapping[str, int],
        *,
        cross: Literal["dcn", "dot"] | None = None,
        num_layers: int = 2,
        num_heads: int = 2,
        max_history: int = 50,
        num_time_buckets: int | None = 64,
        layer_sizes: Sequence[int] = (128, 64),
        device: torch.device | str | None = None,
        **options: Any,
    ) -> None:
        inputs = inputs if isinstance(inputs, RankingInputs) else RankingInputs(**inputs)
        check_histories(inputs, "dlrm-hstu")
        if num_layers < 1:
            raise ValueError(f"num_layers: got {num_layers}, expected 1 or more; without a block candidates read no history")
        super().__init__(
            inputs,
            sizes,
            cross=cross,
            num_layers=num_layers,
            num_heads=num_heads,
            max_history=max_history,
            num_time_buckets=num_time_buckets,
            layer_sizes=layer_sizes,
            device=device,
            **options,
        )
