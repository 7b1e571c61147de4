"""Embedding bags: tables, batches of lookups, our operator and its peers, and float64 on samples of bags and rows.

Shapes are the five synthetic models of RecFlex (Pan et al., SC 2024), `"D x 10"` with ten times the features of model D,
`"mlperf"` (the tables and bags of MLPerf's DLRM-DCNv2, with width 64 and at most ten million rows), `"mixed"` (66 tables of
widths 4 to 128) and `"production"` (200 tables of widths 8 to 256, 44 GB in all).

`workloads/recflex_models.json` has, for each line of a model, how the bags of its features are distributed, the rows of their
tables and their widths. Features of a line share the lengths of each sample. Lengths are normal numbers, drawn again until they
lie between 1 and the maximum; a bag is there with the probability `coverage`. Ids are uniform, or of Zipf's distribution.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.common import ROOT
from jagged.ops import BagLayout, BagOptimizer, embedding_bags

if TYPE_CHECKING:
    from jagged.ops.embedding_bag.optimizers import Kind

MODELS: dict[str, list[dict[str, Any]]] = json.loads((ROOT / "workloads" / "recflex_models.json").read_text())
MOST_ROWS = 10_000_000
# Rows and ids of a bag of MLPerf's DLRM-DCNv2.
MLPERF = (
    (40_000_000, 3), (39_060, 2), (17_295, 1), (7_424, 2), (20_265, 6), (3, 1), (7_122, 1), (1_543, 1), (63, 1),
    (40_000_000, 7), (3_067_956, 3), (405_282, 8), (10, 1), (2_209, 6), (11_938, 9), (155, 5), (4, 1), (976, 1), (14, 1),
    (40_000_000, 12), (40_000_000, 100), (40_000_000, 27), (590_152, 10), (12_973, 3), (108, 1), (36, 1),
)  # fmt: skip
MIXED_WIDTHS = (4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
PRODUCTION_WIDTHS = (8, 16, 32, 64, 96, 160, 256)
# Of Zipf's distribution.
EXPONENT = 1.05
# Of rows and bags that are drawn, features whose results are computed in float64, and of each the bags and rows.
CHECKED_FEATURES, CHECKED_BAGS, CHECKED_ROWS = 20, 16, 8
# Errors may be as large relative to the sums of absolute values: float32 sums of a thousand numbers err by a tenth of it.
PRECISION = 1e-5
RATE, EPS, BETAS = 0.01, 1e-8, (0.9, 0.999)


def _mlperf() -> list[dict[str, Any]]:
    return [
        {"kind": "multi-hot-static", "pooling": pooling, "rows": min(rows, MOST_ROWS), "dims": [64], "coverage": 1.0}
        for rows, pooling in MLPERF
    ]


def _mixed() -> list[dict[str, Any]]:
    """As many tables and widths as in the mixed shape that Meta published; a rule stands in for its rows and bags.

    Rows lie between a hundred and three million, their logarithms evenly; every third feature is one-hot, the others have means
    of 2 to 100 ids.
    """
    lines: list[dict[str, Any]] = []
    for place in range(66):
        bags: dict[str, Any] = {"kind": "one-hot"}
        if place % 3:
            mean = 2 + 3 * (place * 5 % 33)
            bags = {"kind": "multi-hot", "mean": mean, "sd": mean / 5, "max": 2 * mean}
        rows = round(100 * 10 ** (4.5 * (place * 7 % 66) / 65))
        lines.append({**bags, "rows": rows, "dims": [MIXED_WIDTHS[place % len(MIXED_WIDTHS)]], "coverage": 1.0})
    return lines


def _production() -> list[dict[str, Any]]:
    """Two hundred tables whose rows lie between a thousand and five million, their logarithms evenly.

    Three bags in ten are empty; the lengths of the others are of Zipf's distribution up to 300.
    """
    bags = {"kind": "zipf", "max": 300, "coverage": 0.7}
    return [
        {**bags, "rows": round(1000 * 5000 ** (place * 77 % 200 / 199)), "dims": [PRODUCTION_WIDTHS[place % 7]]}
        for place in range(200)
    ]


SHAPES = {**MODELS, "D x 10": MODELS["D"] * 10, "mlperf": _mlperf(), "mixed": _mixed(), "production": _production()}


class Batch(NamedTuple):
    """Ids `[S]` and offsets `[F * B + 1]`, int32."""

    indices: Tensor
    offsets: Tensor


def layout_of(shape: str, repeat: int = 1) -> BagLayout:
    """The tables of a shape, one for each feature, `repeat` times."""
    lines = SHAPES[shape] * repeat
    return BagLayout(
        rows=tuple(line["rows"] for line in lines for _ in line["dims"]),
        widths=tuple(width for line in lines for width in line["dims"]),
    )


def zipf_ranks(uniform: Tensor, count: Tensor | int, exponent: float = EXPONENT) -> Tensor:
    """Ranks from 0, int64, below `count`, by the inverse of the integral of `x ** -exponent` at `uniform`, float64."""
    power, most = 1 - exponent, count.double() if isinstance(count, Tensor) else count
    ranks = ((most + 1) ** power * uniform + (1 - uniform)) ** (1 / power) - 1
    return ranks.long().clamp(min=0).clamp(max=count - 1)


def batch_of(shape: str, size: int, seed: int = 0, repeat: int = 1, device: str = "cpu", zipf: bool = False) -> Batch:
    """A batch of `size` samples with uniform ids, or with Zipf's, whose frequent rows stand in an order of their own."""
    generator = torch.Generator(device).manual_seed(seed)
    lengths, rows = [], []
    for line in SHAPES[shape] * repeat:
        features = len(line["dims"])
        lengths.append(_lengths(line, size, generator).repeat(features))
        rows.append(
            torch.full((features,), line["rows"], device=device).repeat_interleave(lengths[-1].view(features, size).sum(1))
        )
    every = torch.cat(lengths)
    offsets = torch.cat([every.new_zeros(1), every.cumsum(0)])
    shares = torch.rand(int(offsets[-1]), generator=generator, device=device, dtype=torch.float64)
    of_tables = torch.cat(rows)
    ids = zipf_ranks(shares, of_tables) * 7_919_993 % of_tables if zipf else shares * of_tables
    return Batch(ids.to(torch.int32), offsets.to(torch.int32))


def _lengths(line: dict[str, Any], size: int, generator: torch.Generator) -> Tensor:
    device = generator.device
    if line["kind"] in ("one-hot", "multi-hot-static"):
        lengths = torch.full((size,), line.get("pooling", 1), device=device)
    elif line["kind"] == "zipf":
        lengths = 1 + zipf_ranks(torch.rand(size, generator=generator, device=device, dtype=torch.float64), line["max"])
    else:
        lengths, most = torch.zeros(size, dtype=torch.int64, device=device), line.get("max", 2**31)
        while bool((missing := (lengths < 1) | (lengths > most)).any()):
            drawn = (line["mean"] + line["sd"] * torch.randn(size, generator=generator, device=device)).round().long()
            lengths = torch.where(missing, drawn, lengths)
    return lengths * (torch.rand(size, generator=generator, device=device) < line["coverage"])


def query_sizes(count: int = 128) -> list[int]:
    """Sizes of batches as in the paper's queries: 38 % are 512, a quarter lie evenly from 0 to 8, the others up to 511."""
    generator = torch.Generator().manual_seed(2)
    full, small = round(0.38 * count), count // 4
    others = torch.randint(9, 512, (count - full - small,), generator=generator)
    sizes = torch.cat([torch.full((full,), 512), torch.arange(small) % 9, others])
    return cast("list[int]", sizes[torch.randperm(count, generator=generator)].tolist())


class Workload:
    """The tables of a shape as they are at first, standard normal, and batches.

    Args:
        shape: a key of `SHAPES`.
        sizes: of the batches.
        device: where all of it is.
        shared: whether implementations update these tables; otherwise each has a copy.
    """

    def __init__(self, shape: str, sizes: list[int], device: str, shared: bool = False) -> None:
        self.layout, self.shared = layout_of(shape), shared
        generator = torch.Generator(device).manual_seed(1)
        self.weights = torch.randn(self.layout.num_elements, generator=generator, device=device)
        # With its index, which the operators compare.
        self.device = self.weights.device
        self.batches = [batch_of(shape, size, seed=place, device=device) for place, size in enumerate(sizes)]
        self.sizes = sizes
        self._generator = generator

    def draw(self) -> None:
        """Make the tables standard normal again, by other numbers."""
        self.weights.normal_(generator=self._generator)

    def gradient(self, size: int) -> Tensor:
        """Of the output of a batch."""
        return torch.randn(size, self.layout.width, generator=self._generator, device=self.device)

    @property
    def checked(self) -> list[int]:
        """Features from the first to the last."""
        count = self.layout.num_features
        return sorted({round(place) for place in torch.linspace(0, count - 1, min(CHECKED_FEATURES, count)).tolist()})

    def lookups(self, feature: int, place: int = 0) -> tuple[Tensor, Tensor]:
        """Ids of a feature in a batch, and for each the sample it belongs to."""
        indices, offsets = self.batches[place]
        size = self.sizes[place]
        ends = offsets[feature * size : (feature + 1) * size + 1].long()
        begin, end = int(ends[0]), int(ends[-1])
        samples = torch.arange(size, device=self.device).repeat_interleave(ends.diff(), output_size=end - begin)
        return indices[begin:end].long(), samples

    def table(self, weights: Tensor, feature: int) -> Tensor:
        """What a feature reads of a storage: `[rows, width]`."""
        assert self.layout.tables is not None
        table = self.layout.tables[feature]
        start, rows, width = (of[table] for of in (self.layout.starts, self.layout.rows, self.layout.widths))
        return weights[start : start + rows * width].view(rows, width)

    def columns(self, feature: int) -> slice:
        """Of the output."""
        return slice(self.layout.columns[feature], self.layout.columns[feature + 1])


def _summed(rows: Tensor, places: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Sums of rows, and of their absolute values, by place; float64."""
    rows = rows.double()
    sums = rows.new_zeros(2, count, rows.shape[1])
    return sums[0].index_add_(0, places, rows), sums[1].index_add_(0, places, rows.abs())


def _largest(found: Tensor, right: Tensor, scale: Tensor, what: str, feature: int) -> float:
    """The largest error relative to `scale`.

    Raises:
        ArithmeticError: above `PRECISION`, or not a number.
    """
    if not found.numel():
        return 0.0
    error = float(((found.double() - right).abs() / scale.clamp(min=1e-30)).max())
    if not error <= PRECISION:
        raise ArithmeticError(f"wrong: {what} of feature {feature} off by {error:.3g} of what is summed, allowed {PRECISION:.3g}")
    return error


def check_output(w: Workload, output: Tensor, place: int = 0) -> float:
    """The largest error of some bags of some features, relative to the sum of absolute values.

    Raises:
        ArithmeticError: another shape, or an error above `PRECISION`.
    """
    size = w.sizes[place]
    if output.shape != (size, w.layout.width):
        raise ArithmeticError(f"wrong: shape {list(output.shape)} in place of {[size, w.layout.width]}")
    if not size:
        return 0.0
    bags = torch.linspace(0, size - 1, min(size, CHECKED_BAGS), device=w.device).round().long().unique()
    errors = []
    for feature in w.checked:
        ids, samples = w.lookups(feature, place)
        chosen = torch.isin(samples, bags)
        rows = w.table(w.weights, feature)[ids[chosen]]
        right, scale = _summed(rows, torch.searchsorted(bags, samples[chosen]), len(bags))
        errors.append(_largest(output[bags][:, w.columns(feature)], right, scale, "output", feature))
    return max(errors)


def checked_rows(w: Workload, feature: int) -> Tensor:
    """Places of rows of a feature's table: some that the first batch reads, the first and the last."""
    ids, _ = w.lookups(feature)
    return torch.cat([ids[:CHECKED_ROWS], ids.new_tensor([0, len(w.table(w.weights, feature)) - 1])]).unique()


def rows_before(w: Workload) -> dict[int, Tensor]:
    """The rows of each checked feature as they are now."""
    return {feature: w.table(w.weights, feature)[checked_rows(w, feature)] for feature in w.checked}


def check_rows(
    w: Workload, grad: Tensor, kind: Kind | None, table_of: Callable[[int], Tensor], before: dict[int, Tensor] | None = None
) -> float:
    """The largest error of some rows after an update that is the first, or of their gradients where there is no optimizer.

    Args:
        w: the workload.
        grad: of the output of its first batch.
        kind: of the optimizer.
        table_of: gives for a feature its table after the update, or the gradient of that: `[rows, width]`.
        before: what `rows_before` gave before the update; None where the workload's own tables are as they were.

    Raises:
        ArithmeticError: an error above `PRECISION` of the sums of absolute values.
    """
    errors = []
    before = rows_before(w) if before is None else before
    for feature in w.checked:
        ids, samples = w.lookups(feature)
        rows = checked_rows(w, feature)
        chosen = torch.isin(ids, rows)
        of_bags = grad[:, w.columns(feature)][samples[chosen]]
        sums, scale = _summed(of_bags, torch.searchsorted(rows, ids[chosen]), len(rows))
        found, old = table_of(feature)[rows], before[feature].double()
        if kind is None:
            right = sums
        else:
            divisor = _divisor(sums, kind)
            # Adam's first step is a sign; of the others the error of the sums is the error of the step.
            right, scale = old - RATE * sums / divisor, old.abs() + RATE * (sums.abs() if kind == "adam" else scale) / divisor
        errors.append(_largest(found, right, scale, "gradient" if kind is None else "rows", feature))
    return max(errors)


def _divisor(sums: Tensor, kind: Kind) -> Tensor | float:
    """What the first update divides the sums of gradients by."""
    if kind == "sgd":
        return 1.0
    if kind == "rowwise_adagrad":
        return sums.square().mean(1, keepdim=True).sqrt() + EPS
    assert kind == "adam"
    return sums.abs() + EPS


class Lookup(Protocol):
    """An implementation that has tables of its own."""

    def forward(self, batch: Batch) -> Tensor:
        """Return the pooled output."""

    def backward(self, output: Tensor, grad: Tensor) -> Any:
        """Update the tables, or return their gradients, and keep the graph."""

    def table(self, feature: int) -> Tensor:
        """The table of a feature, or without an optimizer its gradient: `[rows, width]`."""


class Ours:
    """Our operator."""

    def __init__(self, w: Workload, kind: Kind | None) -> None:
        self.w = w
        self.weights = (w.weights.detach() if w.shared else w.weights.clone()).requires_grad_()
        self.optimizer = None
        if kind is not None:
            self.optimizer = BagOptimizer(kind, w.layout, learning_rate=RATE, eps=EPS, betas=BETAS, device=w.device)
        self.gradient: Tensor | None = None

    def forward(self, batch: Batch) -> Tensor:
        return embedding_bags(self.weights, self.w.layout, *batch, optimizer=self.optimizer)

    def backward(self, output: Tensor, grad: Tensor) -> Any:
        (self.gradient,) = torch.autograd.grad(output, (self.weights,), grad, retain_graph=True, allow_unused=True)

    def table(self, feature: int) -> Tensor:
        storage = self.weights.detach() if self.optimizer is not None else self.gradient
        assert storage is not None
        return self.w.table(storage, feature)

    def reset(self) -> None:
        """Make Adagrad's sums what they are before the first update."""
        assert self.optimizer is not None
        self.optimizer.state()["first"].zero_()


class Fbgemm:
    """FBGEMM's table-batched embeddings.

    Args:
        w: the workload.
        kind: of the optimizer.
        experimental: the second version of the forward kernel.
        checked: whether ids are checked first, by a kernel of its own, as they are by default and in TorchRec; our kernels
            check the ids that they read.
    """

    def __init__(self, w: Workload, kind: Kind | None, *, experimental: bool = False, checked: bool = False) -> None:
        # Its import takes seconds, and it may not be there.
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation, PoolingMode
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen

        kinds = {
            "sgd": EmbOptimType.EXACT_SGD,
            "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            "adam": EmbOptimType.ADAM,
        }
        on_gpu = w.device.type == "cuda"
        where = (EmbeddingLocation.DEVICE, ComputeDevice.CUDA) if on_gpu else (EmbeddingLocation.HOST, ComputeDevice.CPU)
        self.tables = SplitTableBatchedEmbeddingBagsCodegen(
            [(rows, width, *where) for rows, width in zip(w.layout.rows, w.layout.widths, strict=True)],
            optimizer=kinds[cast("str", kind)],
            learning_rate=RATE,
            eps=EPS,
            beta1=BETAS[0],
            beta2=BETAS[1],
            pooling_mode=PoolingMode.SUM,
            device=w.device,
            bounds_check_mode=BoundsCheckMode.WARNING if checked else BoundsCheckMode.NONE,
            use_experimental_tbe=experimental,
        )
        if w.shared:
            # Its tables follow each other without the gaps that ours have.
            self.tables.weights_offsets.copy_(torch.tensor(w.layout.starts[:-1]))
            self.tables.weights_physical_offsets = list(w.layout.starts[:-1])
            setattr(self.tables, "weights_dev" if on_gpu else "weights_host", nn.Parameter(w.weights))
        self.views: list[Tensor] = self.tables.split_embedding_weights()
        if not w.shared:
            with torch.no_grad():
                for view, weights in zip(self.views, w.layout.views(w.weights), strict=True):
                    view.copy_(weights)

    def forward(self, batch: Batch) -> Tensor:
        return cast("Tensor", self.tables(batch.indices, batch.offsets))

    def backward(self, output: Tensor, grad: Tensor) -> Any:
        output.backward(grad, retain_graph=True)

    def table(self, feature: int) -> Tensor:
        return self.views[feature].detach()

    def reset(self) -> None:
        """Make Adagrad's sums what they are before the first update."""
        for states in self.tables.split_optimizer_states():
            for state in states:
                state.zero_()


class PerTable:
    """PyTorch's embedding bag for each table, and their outputs side by side; it is spared the splitting of the batch."""

    def __init__(self, w: Workload, kind: Kind | None) -> None:
        if kind is not None:
            raise NotImplementedError("an update inside the backward pass")
        self.tables = [view.clone().requires_grad_() for view in w.layout.views(w.weights)]
        self.gradients: tuple[Tensor, ...] = ()
        self._parts: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def _split(self, batch: Batch) -> list[tuple[Tensor, Tensor]]:
        if id(batch) not in self._parts:
            ends = batch.offsets.view(-1)
            size = (len(ends) - 1) // len(self.tables)
            of_features = [ends[place * size : (place + 1) * size + 1] for place in range(len(self.tables))]
            self._parts[id(batch)] = [(batch.indices[int(of[0]) : int(of[-1])], of - of[0]) for of in of_features]
        return self._parts[id(batch)]

    def forward(self, batch: Batch) -> Tensor:
        pairs = zip(self.tables, self._split(batch), strict=True)
        return torch.cat([F.embedding_bag(ids, table, of, mode="sum", include_last_offset=True) for table, (ids, of) in pairs], 1)

    def backward(self, output: Tensor, grad: Tensor) -> Any:
        self.gradients = torch.autograd.grad(output, self.tables, grad, retain_graph=True)

    def table(self, feature: int) -> Tensor:
        return self.gradients[feature]


class Method(NamedTuple):
    """An implementation.

    Args:
        make: with tables of its own, for a workload and an optimizer.
        ways: what is timed of it.
        empty: whether it is given batches without samples.
    """

    make: Callable[[Workload, Kind | None], Lookup]
    ways: tuple[str, ...] = ("forward", "backward", "both")
    empty: bool = True


METHODS: dict[str, Method] = {
    "jagged": Method(Ours),
    "fbgemm": Method(Fbgemm, empty=False),
    # Their backward passes are that one's.
    "fbgemm_v2": Method(functools.partial(Fbgemm, experimental=True), ("forward",), empty=False),
    "fbgemm_checked": Method(functools.partial(Fbgemm, checked=True), ("forward",), empty=False),
    "per_table": Method(PerTable),
}


def traffic(w: Workload, kind: Kind | None) -> dict[str, dict[str, int]]:
    """Bytes of each way for all batches: at least, where a batch reads and writes everything once, and rows at every lookup.

    `once` of a forward pass counts the rows that are read, ids, offsets and the output; of a backward pass the output's gradient,
    ids, offsets, and the rows and states of the optimizer read and written.
    """
    layout = w.layout
    assert layout.tables is not None
    of_features = torch.tensor([(layout.first_rows[table], layout.widths[table]) for table in layout.tables], device=w.device)
    ends, widths = (torch.tensor(of, device=w.device) for of in (layout.first_rows, layout.widths))
    once, gathered = {"forward": 0, "backward": 0}, 0
    for size, (indices, offsets) in zip(w.sizes, w.batches, strict=True):
        if not size:
            continue
        lengths = offsets[::size].long().diff()
        first = of_features[:, 0].repeat_interleave(lengths, output_size=len(indices))
        is_read = torch.zeros(layout.first_rows[-1] + 1, dtype=torch.int32, device=w.device)
        is_read[first + indices + 1] = 1
        counts = is_read.cumsum(0)[ends].diff()
        rows = int((counts * widths).sum()) * 4
        # A number of each row, or two of each element.
        states = {"rowwise_adagrad": int(counts.sum()) * 4, "adam": 2 * rows}.get(cast("str", kind), 0)
        others = size * layout.width * 4 + indices.nbytes + offsets.nbytes
        once["forward"] += rows + others
        once["backward"] += others + 2 * (rows + states)
        gathered += int((lengths * of_features[:, 1]).sum()) * 4
    return {way: {"once": number, "gathered": gathered} for way, number in once.items()}
