"""What ranking models make of looked-up features: logits of each candidate and task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from jagged.models.experts import PLE, GroupedMLP, MMoE
from jagged.models.interactions import CrossNet, DotInteraction, FeatureTokens, Wukong
from jagged.modules import JaggedMLP, JaggedModule
from jagged.modules.linear import Layers

Device = torch.device | str | None


class Widths(NamedTuple):
    """Of what a body reads: of each vector of the request and the candidate, and of the numbers of each, 0 for none."""

    requests: list[int]
    request_numbers: int
    candidates: list[int]
    candidate_numbers: int

    @property
    def of_request(self) -> int:
        """All that is the request's, side by side."""
        return sum(self.requests) + self.request_numbers

    @property
    def of_candidate(self) -> int:
        """All that is the candidate's, side by side."""
        return sum(self.candidates) + self.candidate_numbers


class Vectors(NamedTuple):
    """What a body reads of R requests with S candidates.

    Attributes:
        requests, request_numbers: each `[R, width]`.
        candidates, candidate_numbers: each `[S, width]`.
        offsets: `[R + 1]`, the candidates of each request.
        request_of_candidate: makes the request of each candidate, int64 `[S]`.
    """

    requests: list[Tensor]
    request_numbers: list[Tensor]
    candidates: list[Tensor]
    candidate_numbers: list[Tensor]
    offsets: Tensor
    request_of_candidate: Callable[[], Tensor]

    @property
    def of_request(self) -> list[Tensor]:
        """All that is the request's."""
        return [*self.requests, *self.request_numbers]

    @property
    def of_candidate(self) -> list[Tensor]:
        """All that is the candidate's."""
        return [*self.candidates, *self.candidate_numbers]


class GeneralBody(JaggedModule):
    """The body of `RankingModel`: one linear layer where request and candidate meet, crosses or dots, experts, towers."""

    def __init__(self, widths: Widths, num_tasks: int, config: Mapping[str, Any], device: Device) -> None:
        super().__init__()
        self.cross = config["cross"]
        self.dots = Dots(widths, config["embedding_dim"], [], device) if self.cross == "dot" else None
        requests, candidates = widths.of_request, widths.of_candidate
        if self.dots is not None:
            requests, candidates = requests + self.dots.of_request, candidates + self.dots.of_candidate
        first, *hidden = config["layer_sizes"]
        # Where no column is the candidate's, all rows of a request are alike.
        self.meeting: nn.Module = (
            JaggedMLP(candidates, [first], context_features=requests or None, device=device)
            if candidates
            else nn.Linear(requests, first, device=device)
        )
        self.crossed: nn.Module = (
            CrossNet(first, config["cross_layers"], rank=config["cross_rank"], device=device)
            if self.cross == "dcn"
            else nn.ReLU()
        )
        self.experts = _experts(config["experts"], first, num_tasks, config, device)
        width = first if self.experts is None else config["expert_sizes"][-1]
        self.towers = GroupedMLP(width, [*hidden, 1], num_tasks, dropout=config["dropout"], device=device)

    def forward(self, x: Vectors) -> Tensor:
        """Return logits `[S, T]`."""
        request, candidate = x.of_request, x.of_candidate
        if self.dots is not None:
            dots = self.dots(x)
            request, candidate = [*request, *dots.among], [*candidate, *dots.between]
        context = torch.cat(request, 1) if request else None
        if candidate:
            met = self.meeting(JaggedTensor(torch.cat(candidate, 1), offsets=x.offsets), context).values()
        else:
            met = self.meeting(context)[x.request_of_candidate()]
        crossed = self.crossed(met)
        return cast(Tensor, self.towers(crossed if self.experts is None else self.experts(crossed))).squeeze(2)


def _experts(
    kind: Literal["mmoe", "ple"] | None, in_features: int, num_tasks: int, config: Mapping[str, Any], device: Device
) -> nn.Module | None:
    common = {"dropout": config["dropout"], "device": device}
    if kind == "mmoe":
        return MMoE(in_features, config["expert_sizes"], config["num_experts"], num_tasks, **common)
    if kind == "ple":
        layers = {"num_layers": config["expert_layers"], "num_specific": config["num_experts"]}
        return PLE(in_features, config["expert_sizes"], num_tasks, num_shared=config["num_experts"], **layers, **common)
    return None


class Products(NamedTuple):
    """What `Dots` makes; each a list of one tensor, or of none.

    Attributes:
        among: products among the request's vectors, `[R, pairs]`.
        between: products among a candidate's vectors, and with its request's, `[S, pairs]`.
        request_numbers, candidate_numbers: the vectors of the numbers, `[R, dim]` and `[S, dim]`.
    """

    among: list[Tensor]
    between: list[Tensor]
    request_numbers: list[Tensor]
    candidate_numbers: list[Tensor]


class Dots(JaggedModule):
    """Products of all pairs of a candidate's and its request's vectors; those among the request's are made once.

    The numbers of each side become a vector by a perceptron.
    """

    def __init__(self, widths: Widths, dim: int, hidden_sizes: Sequence[int], device: Device) -> None:
        super().__init__()
        self.numbers = nn.ModuleDict()
        counts = {"request": len(widths.requests), "candidate": len(widths.candidates)}
        for side, width in (("request", widths.request_numbers), ("candidate", widths.candidate_numbers)):
            if width:
                self.numbers[side] = perceptron(width, [*hidden_sizes, dim], 0.0, device)
                counts[side] += 1
        of_request, of_candidate = counts.values()
        self.of_request = of_request * (of_request - 1) // 2
        self.of_candidate = of_candidate * (of_candidate - 1) // 2 + of_candidate * of_request
        self.products = DotInteraction()

    def forward(self, x: Vectors) -> Products:
        """Return the products."""
        numbers = {"request": x.request_numbers, "candidate": x.candidate_numbers}
        own = {side: [cast(Tensor, of(torch.cat(numbers[side], 1)))] for side, of in self.numbers.items()}
        requests, candidates = [*x.requests, *own.get("request", [])], [*x.candidates, *own.get("candidate", [])]
        of_request = torch.stack(requests, 1) if requests else None
        among = [] if of_request is None else [cast(Tensor, self.products(of_request))]
        between = []
        if candidates:
            between.append(self.products(JaggedTensor(torch.stack(candidates, 1), offsets=x.offsets), of_request).values())
        return Products(among, between, own.get("request", []), own.get("candidate", []))


class DLRMBody(JaggedModule):
    """The body of `DLRM`: dots of all vectors, and a perceptron over them and the vectors of the numbers."""

    def __init__(self, widths: Widths, num_tasks: int, config: Mapping[str, Any], device: Device) -> None:
        super().__init__()
        dim, sizes = config["embedding_dim"], [*config["top_sizes"], num_tasks]
        self.dots = Dots(widths, dim, config["bottom_sizes"], device)
        requests = self.dots.of_request + (dim if widths.request_numbers else 0)
        candidates = self.dots.of_candidate + (dim if widths.candidate_numbers else 0)
        if not requests + candidates:
            raise ValueError("inputs: got one vector alone, expected two or numbers, for products of pairs")
        self.has_requests, self.has_candidates = requests > 0, candidates > 0
        # Where no column is the candidate's, all rows of a request are alike.
        self.top: nn.Module = (
            JaggedMLP(candidates, sizes, context_features=requests or None, dropout=config["dropout"], device=device)
            if candidates
            else perceptron(requests, sizes, config["dropout"], device)
        )

    def forward(self, x: Vectors) -> Tensor:
        """Return logits `[S, T]`."""
        dots = self.dots(x)
        context = torch.cat([*dots.request_numbers, *dots.among], 1) if self.has_requests else None
        if not self.has_candidates:
            return cast(Tensor, self.top(context))[x.request_of_candidate()]
        own = torch.cat([*dots.candidate_numbers, *dots.between], 1)
        return cast(JaggedTensor, self.top(JaggedTensor(own, offsets=x.offsets), context)).values()


class DCNBody(JaggedModule):
    """The body of `DCNv2`: crosses of all that is known of a candidate and its request, and a perceptron behind or beside."""

    def __init__(self, widths: Widths, num_tasks: int, config: Mapping[str, Any], device: Device) -> None:
        super().__init__()
        requests, candidates = widths.of_request, widths.of_candidate
        width, sizes, dropout = requests + candidates, config["layer_sizes"], config["dropout"]
        self.is_stacked = config["structure"] == "stacked"
        self.cross = CrossNet(
            width, config["cross_layers"], rank=config["cross_rank"], num_experts=config["cross_experts"], device=device
        )
        is_jagged = not self.is_stacked and requests > 0 and candidates > 0
        self.deep: nn.Module = (
            JaggedMLP(candidates, sizes, context_features=requests, dropout=dropout, device=device)
            if is_jagged
            else perceptron(width, sizes, dropout, device, last=True)
        )
        self.dropout = nn.Dropout(dropout)
        self.logits = nn.Linear(sizes[-1] if self.is_stacked else sizes[-1] + width, num_tasks, device=device)

    def forward(self, x: Vectors) -> Tensor:
        """Return logits `[S, T]`."""
        request, candidate = x.of_request, x.of_candidate
        if not (request and candidate):
            rows = torch.cat(request or candidate, 1)
            logits = self._scored(self.cross(rows), lambda: self.deep(rows))
            # Where no column is the candidate's, all rows of a request are alike.
            return logits if candidate else logits[x.request_of_candidate()]
        own, context = JaggedTensor(torch.cat(candidate, 1), offsets=x.offsets), torch.cat(request, 1)

        def beside() -> Tensor:
            return cast(Tensor, self.dropout(self.deep(own, context).values().relu()))

        return self._scored(self.cross(own, context), beside)

    def _scored(self, crossed: Tensor, beside: Callable[[], Tensor]) -> Tensor:
        """The logits of crosses and a perceptron, behind them or beside."""
        read = self.deep(crossed) if self.is_stacked else torch.cat([crossed, beside()], 1)
        return cast(Tensor, self.logits(read))


class WukongBody(JaggedModule):
    """The body of `WukongModel`: a token of each feature, layers of factorization machines, and a perceptron."""

    def __init__(self, widths: Widths, num_tasks: int, config: Mapping[str, Any], device: Device) -> None:
        super().__init__()
        dim = config["embedding_dim"]
        of_request = [*widths.requests, *([widths.request_numbers] if widths.request_numbers else [])]
        of_candidate = [*widths.candidates, *([widths.candidate_numbers] if widths.candidate_numbers else [])]
        self.request_tokens = FeatureTokens(of_request, dim, device=device) if of_request else None
        self.candidate_tokens = FeatureTokens(of_candidate, dim, device=device) if of_candidate else None
        self.layers = Wukong(
            len(of_request) + len(of_candidate),
            dim,
            config["num_layers"],
            num_fm_tokens=config["num_fm_tokens"],
            num_linear_tokens=config["num_linear_tokens"],
            rank=config["rank"],
            hidden_sizes=config["hidden_sizes"],
            device=device,
        )
        out = config["num_fm_tokens"] + config["num_linear_tokens"]
        self.top = perceptron(out * dim, [*config["top_sizes"], num_tasks], config["dropout"], device)

    def forward(self, x: Vectors) -> Tensor:
        """Return logits `[S, T]`."""
        requests = None if self.request_tokens is None else self.request_tokens(torch.cat(x.of_request, 1))
        candidates = None if self.candidate_tokens is None else self.candidate_tokens(torch.cat(x.of_candidate, 1))
        if requests is not None and candidates is not None:
            tokens = self.layers(JaggedTensor(candidates, offsets=x.offsets), requests)
        else:
            tokens = self.layers(candidates if requests is None else requests)
        logits = cast(Tensor, self.top(tokens.flatten(1)))
        # Where no column is the candidate's, all rows of a request are alike.
        return logits if candidates is not None else logits[x.request_of_candidate()]


def perceptron(
    in_features: int, layer_sizes: Sequence[int], dropout: float, device: Device, *, last: bool = False
) -> nn.Sequential:
    """Linear layers with a ReLU and dropout between them, and with `last` behind the last one."""
    layers: list[nn.Module] = []
    for wide, narrow in zip([in_features, *layer_sizes], layer_sizes, strict=False):
        layers += [nn.Linear(wide, narrow, device=device), nn.ReLU(), nn.Dropout(dropout)]
    return Layers(*(layers if last else layers[:-2]))
