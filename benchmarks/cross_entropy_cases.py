"""Cross-entropy over a catalogue: workloads, our operators and their peers, and float64 on samples of rows and items."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.trained_sasrec import trained_sasrec
from jagged.ops import Draw, catalogue_topk, linear_cross_entropy, sampled_linear_cross_entropy

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FILTER = 2.0**-12
# Rows and items whose results are computed in float64.
CHECKED = 16
# Elements at a time of the reference and of drawn ids.
ELEMENTS = 2**24
# Logits and targets of a workload, in words.
LOGITS = {
    "normal": ("standard normal", "uniform"),
    "popularity": ("popularity and a raised target", "log-uniform"),
    "clustered": ("peaked, rows and items in clusters", "uniform in the row's cluster"),
    "sasrec": ("of a SASRec that was trained", "the next items of histories"),
}
# Items of a cluster.
CLUSTER = 200
# Bytes of the scores that the chunks of a plain top-k have.
SCORE_BYTES = 2**30


@dataclass(frozen=True)
class Size:
    """Sizes of a workload.

    Args:
        rows: N.
        items: V.
        width: D.
        dtype: of hidden and weight.
        negatives: of a row; 0 where no loss is sampled.
        rows_per_draw: rows that share their negatives, None for all.
        logits: one of `LOGITS`: see `Workload`.
        k: best items of a row; 0 where none are looked for.
    """

    rows: int
    items: int
    width: int
    dtype: str = "bf16"
    negatives: int = 0
    rows_per_draw: int | None = 1
    logits: str = "normal"
    k: int = 0

    @property
    def described(self) -> dict[str, Any]:
        """For a result file."""
        logits, targets = LOGITS[self.logits]
        return {**asdict(self), "logits": logits, "targets": targets}

    @property
    def products(self) -> dict[str, int]:
        """Pairs of a row and an item whose product each family needs, the targets' own left out."""
        return {"all": self.rows * self.items, "sampled": self.rows * self.negatives}


class Workload:
    """Hidden states, item weights and targets.

    * `"normal"`: logits are standard normal and targets uniform.
    * `"popularity"`: the logit of an item falls with the logarithm of its rank, as popularity does, items stand in random order,
      targets are drawn by that popularity, and each row raises its target's logit by up to 1.5 log V.
    * `"clustered"`: each item lies by the centre of a cluster, a row by that of its target, and most of the softmax in it.
    * `"sasrec"`: those of `trained_sasrec`, whose loss on what it has not seen is `loss`.
    """

    loss: float | None = None

    def __init__(self, size: Size, device: str) -> None:
        self.size, self.device = size, torch.device(device)
        self.generator = torch.Generator(device).manual_seed(1)
        hidden, weight = (self._normal(size.items if of_items else size.rows) for of_items in (False, True))
        # Products of standard normal rows are sums of D numbers.
        weight = weight.mul_(size.width**-0.5)
        if size.logits == "popularity":
            hidden, weight = self._popular(hidden, weight)
        elif size.logits == "sasrec":
            del hidden, weight
            hidden, weight, self.target, self.loss = trained_sasrec(
                size.rows, size.items, size.width, DTYPES[size.dtype], self.device
            )
        else:
            self.target = torch.randint(size.items, (size.rows,), generator=self.generator, device=device)
            if size.logits == "clustered":
                hidden, weight = self._clustered(hidden, weight)
        self.hidden, self.weight = hidden.requires_grad_(), weight.requires_grad_()
        # With its index, which the operators compare.
        self.device = hidden.device
        self.seed = torch.tensor([7], device=device)

    def _normal(self, rows: int) -> Tensor:
        shape = (rows, self.size.width)
        return torch.randn(shape, dtype=DTYPES[self.size.dtype], device=self.device, generator=self.generator)

    def _clustered(self, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        size = self.size
        clusters = torch.randint(max(1, size.items // CLUSTER), (size.items,), generator=self.generator, device=self.device)
        shape = (max(1, size.items // CLUSTER), size.width)
        centres = torch.randn(shape, generator=self.generator, device=self.device).to(weight.dtype)
        # Products with items of a row's own cluster are about 3 log V, others' have a standard deviation of 3 log V / sqrt(D).
        raised = 3 * math.log(size.items) / size.width
        hidden = (raised * (centres[clusters[self.target]] + 0.5 * hidden)).to(hidden.dtype)
        return hidden, (centres[clusters] + 0.5 * size.width**0.5 * weight).to(weight.dtype)

    def _popular(self, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        size, log_items = self.size, math.log(self.size.items)
        uniform = functools.partial(torch.rand, size.rows, generator=self.generator, device=self.device)
        rank = (torch.exp(uniform() * log_items) - 1).long().clamp(0, size.items - 1)
        item_of_rank = torch.randperm(size.items, generator=self.generator, device=self.device)
        self.target = item_of_rank[rank]
        raised = uniform()[:, None] * 1.5 * log_items
        hidden = (0.5 * hidden + raised * weight[self.target]).to(hidden.dtype)
        # The last column alone knows the popularity, in a product with a number that is the same in all rows.
        known = size.width**0.5
        hidden[:, -1] = known
        popularity = -torch.arange(1, size.items + 1, device=self.device).log()
        weight[item_of_rank, -1] = (popularity / known).to(weight.dtype)
        return hidden, weight

    @cached_property
    def draw(self) -> Draw:
        """Uniform negatives, drawn inside the operator."""
        return Draw("uniform", count=self.size.negatives, seed=self.seed, rows_per_draw=self.size.rows_per_draw)

    @property
    def rows_per_draw(self) -> int:
        """Rows that share their negatives."""
        return self.size.rows_per_draw or self.size.rows

    @property
    def draws(self) -> int:
        """How many lists of negatives there are."""
        return -(-self.size.rows // self.rows_per_draw)

    def ids_of(self, draws: Tensor) -> Tensor:
        """`[len(draws), ns]`, the ids that the operator draws."""
        # Not public: only this needs it, and times can be taken of a version that has it elsewhere.
        from jagged.ops.sampled_cross_entropy.draws import draw_ids, source_of

        source = source_of(self.draw, self.size.rows, self.size.items, self.device)
        return draw_ids(source, draws, torch.arange(self.size.negatives, device=self.device), self.size.items)

    def id_chunks(self) -> Iterator[Tensor]:
        """All lists of negatives, some at a time."""
        for draws in torch.arange(self.draws, device=self.device).split(max(1, ELEMENTS // self.size.negatives)):
            yield self.ids_of(draws)

    @cached_property
    def checked_rows(self) -> Tensor:
        """Rows from the first to the last."""
        return torch.linspace(0, self.size.rows - 1, min(CHECKED, self.size.rows), device=self.device).long().unique()

    @cached_property
    def checked_items(self) -> Tensor:
        """Targets, and items that some row has among its negatives or that stand anywhere."""
        of_rows = self.target[self.checked_rows][: CHECKED // 2]
        if self.size.negatives:
            others = self.ids_of(torch.arange(1, device=self.device))[0, : CHECKED // 2]
        else:
            others = torch.linspace(0, self.size.items - 1, CHECKED // 2, device=self.device).long()
        return torch.cat([of_rows, others]).unique()


class Checked(NamedTuple):
    """Results of the checked rows and items: losses and the gradients of their sum over all rows."""

    loss: Tensor
    hidden: Tensor
    weight: Tensor


def reference(w: Workload, family: str, lse: Tensor, dtype: torch.dtype) -> Checked:
    """Results in `dtype`, sums in float32 or float64, by products of matrices.

    Args:
        w: the workload.
        family: `"all"` or `"sampled"`.
        lse: `[N]`, of which the gradient of an item's weight needs those of all rows.
        dtype: float64 for exact ones; the tested one for what plain PyTorch reaches.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    with torch.no_grad():
        hidden, target = w.hidden[w.checked_rows].to(dtype), w.target[w.checked_rows]
        rows = _of_all if family == "all" else _of_sampled
        loss, grad_hidden = rows(w, hidden, target, dtype, wide)
        items = w.checked_items
        logits = (w.hidden.to(dtype) @ w.weight[items].to(dtype).t()).to(wide)
        is_target = w.target[:, None] == items
        slope = torch.exp(logits - lse[:, None]) * _times(w, family, items, is_target) - is_target.to(wide)
        return Checked(loss, grad_hidden, (slope.to(dtype).t() @ w.hidden.to(dtype)).to(wide))


def _of_all(w: Workload, hidden: Tensor, target: Tensor, dtype: torch.dtype, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    chunk = max(1, ELEMENTS // max(CHECKED, w.size.width))
    lse = torch.full(target.shape, -torch.inf, dtype=wide, device=w.device)
    for of_items in w.weight.split(chunk):
        lse = torch.logaddexp(lse, (hidden @ of_items.to(dtype).t()).to(wide).logsumexp(1))
    grad = torch.zeros_like(hidden, dtype=wide)
    for of_items in w.weight.split(chunk):
        shares = torch.exp((hidden @ of_items.to(dtype).t()).to(wide) - lse[:, None])
        grad += (shares.to(dtype) @ of_items.to(dtype)).to(wide)
    of_target = w.weight[target].to(dtype)
    return lse - (hidden * of_target).sum(1, dtype=wide), grad - of_target.to(wide)


def _of_sampled(w: Workload, hidden: Tensor, target: Tensor, dtype: torch.dtype, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    ids = torch.cat([target[:, None], w.ids_of(w.checked_rows // w.rows_per_draw)], 1)
    is_hit = ids == target[:, None]
    is_hit[:, 0] = False
    known = w.weight[ids].to(dtype)
    logits = (known @ hidden[:, :, None]).squeeze(2).to(wide).masked_fill(is_hit, -torch.inf)
    slope = logits.softmax(1)
    slope[:, 0] -= 1
    grad = (slope.to(dtype)[:, None] @ known).squeeze(1).to(wide)
    return logits.logsumexp(1) - logits[:, 0], grad


def _times(w: Workload, family: str, items: Tensor, is_target: Tensor) -> Tensor | float:
    """How often each item stands in each row's denominator."""
    if family == "all":
        return 1.0
    counts = torch.cat([torch.stack([(ids == item).sum(1) for item in items], 1) for ids in w.id_chunks()])
    counts = counts.repeat_interleave(w.rows_per_draw, 0)[: w.size.rows]
    return counts.masked_fill(is_target, 1)


Loss = Callable[[Tensor, Tensor], Tensor]


class Method(NamedTuple):
    """An implementation of a loss.

    Args:
        family: `"all"` items or `"sampled"` ones.
        make: the mean loss as a function of hidden and weight, for a workload.
        options: of our operator; None for a peer.
        approximates: its gradients are not those of the loss, and how far off they are is a result, not a fault.
    """

    family: str
    make: Callable[[Workload], Loss]
    options: dict[str, Any] | None = None
    approximates: bool = False


def ours(family: str, **options: Any) -> Method:
    """Our operator of a family."""
    return Method(family, lambda w: functools.partial(our_loss, w, family, **options), options, "filter_eps" in options)


def our_loss(w: Workload, family: str, hidden: Tensor, weight: Tensor, **options: Any) -> Any:
    """The operator's result."""
    if family == "all":
        return linear_cross_entropy(hidden, weight, w.target, **options)
    return sampled_linear_cross_entropy(hidden, weight, w.target, w.draw, **options)


def eager(w: Workload) -> Loss:
    """The whole matrix of logits, the softmax in float32."""
    return lambda hidden, weight: F.cross_entropy(F.linear(hidden, weight).float(), w.target)


def compiled(w: Workload) -> Loss:
    """The same by `torch.compile`, for these sizes alone."""
    torch._dynamo.reset()
    return torch.compile(eager(w), dynamic=False)


def cut(w: Workload, filter_eps: float | None) -> Loss:
    """cut-cross-entropy."""
    apply = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    return lambda hidden, weight: apply(hidden, weight, w.target, filter_eps=filter_eps)


def liger(w: Workload) -> Loss:
    """Liger's loss of chunks of rows, whose forward pass computes the gradients."""
    loss = importlib.import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss()
    return lambda hidden, weight: loss(weight, hidden, w.target)


def gathered(w: Workload) -> Loss:
    """Rows of the negatives gathered, and products of matrices, one for each list of negatives, the softmax in float32.

    It is spared the drawing: the ids are there, the same that our operator draws.
    """
    size = w.size
    if size.rows % w.rows_per_draw:
        raise NotImplementedError("lists of negatives for as many rows each")
    ids = torch.cat(list(w.id_chunks()))
    shape = (w.draws, w.rows_per_draw)
    is_hit = w.target.view(*shape, 1) == ids[:, None]

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        rows = hidden.view(*shape, size.width)
        negative = (rows @ F.embedding(ids, weight).transpose(1, 2)).masked_fill(is_hit, -torch.inf)
        positive = (hidden * F.embedding(w.target, weight)).sum(1).view(*shape, 1)
        logits = torch.cat([positive, negative], 2).flatten(0, 1).float()
        return F.cross_entropy(logits, torch.zeros_like(w.target))

    return loss


METHODS: dict[str, Method] = {
    "jagged": ours("all"),
    "jagged_fused": ours("all", strategy="fused"),
    "jagged_chunked": ours("all", strategy="chunked"),
    "jagged_filtered": ours("all", filter_eps=FILTER),
    "cut": Method("all", functools.partial(cut, filter_eps=None)),
    "cut_filtered": Method("all", functools.partial(cut, filter_eps=FILTER), approximates=True),
    "liger": Method("all", liger),
    "compiled": Method("all", compiled),
    "eager": Method("all", eager),
    "jagged_sampled": ours("sampled"),
    "jagged_sparse": ours("sampled", sparse=True),
    "gathered": Method("sampled", gathered),
}


def our_topk(w: Workload) -> tuple[Tensor, Tensor]:
    """Our operator."""
    return catalogue_topk(w.hidden, w.weight, w.size.k)


def plain_topk(w: Workload) -> tuple[Tensor, Tensor]:
    """Products of matrices and `torch.topk`, some rows at a time."""
    scores, ids = [], []
    with torch.no_grad():
        for rows in w.hidden.split(max(1, SCORE_BYTES // (w.size.items * w.hidden.element_size()))):
            best = (rows @ w.weight.t()).topk(w.size.k)
            scores.append(best.values)
            ids.append(best.indices)
    return torch.cat(scores), torch.cat(ids)


TOPK: dict[str, Callable[[Workload], tuple[Tensor, Tensor]]] = {"jagged": our_topk, "plain": plain_topk}
