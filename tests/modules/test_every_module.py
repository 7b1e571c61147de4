"""What every module has to stand: to be traced, under TorchRec's pipeline too, and computed again by activation checkpointing."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingPlan
from torchrec.fx import Tracer
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

import jagged.modules
from jagged.models import SASRec
from jagged.modules import (
    CutCrossEntropyHead,
    GroupSparseHead,
    HSTUBlock,
    InBatchSampler,
    ItemMasking,
    JaggedCrossAttention,
    JaggedFeatureInteraction,
    JaggedMLP,
    JaggedModule,
    JaggedPooling,
    JaggedSelfAttention,
    JaggedTransformerBlock,
    LayerNorm,
    LogUniformSampler,
    MixedSampler,
    PopularitySampler,
    PositionalEncoding,
    SampledCrossEntropyHead,
    Sampler,
    ScalableCrossEntropyHead,
    StochasticLength,
    TargetAttention,
    TimeEncoding,
    UniformSampler,
)
from jagged.ops import jagged_jagged_bmm, jagged_softmax
from jagged.training.processes import process_group
from tests.places import PLACE

DIM, ITEMS, TARGETS = 8, 11, 2

pytestmark = [
    pytest.mark.skipif(PLACE.name == "interpret", reason="modules run on the place's own backend"),
    # Marks what runs on a GPU, too.
    pytest.mark.usefixtures("place"),
]


@dataclass(frozen=True)
class Inputs:
    """Embedded rows, the rows' items, target items of every sample, and the item table."""

    rows: JaggedTensor
    items: JaggedTensor
    targets: Tensor
    weight: Tensor


@dataclass(frozen=True)
class Case:
    """How a module is built, and one number of each of its outputs."""

    build: Callable[[], nn.Module]
    use: Callable[[Any, Inputs], Tensor]


def on_rows(build: Callable[[], nn.Module]) -> Case:
    return Case(build, lambda module, x: module(x.rows).values())


def of_head(build: Callable[[], nn.Module]) -> Case:
    return Case(build, lambda module, x: module(x.rows, x.weight, x.items).loss)


def of_sampler(build: Callable[[], Sampler], **options: Any) -> Case:
    return of_head(lambda: SampledCrossEntropyHead(build(), **options))


def counts() -> Tensor:
    return torch.arange(ITEMS) + 1


def masked(module: ItemMasking, x: Inputs) -> Tensor:
    hidden: Tensor = module(x.items).targets >= 0
    return torch.where(hidden[:, None], x.rows.values(), 0)


def shortened(module: StochasticLength, x: Inputs) -> Tensor:
    """A row of each sample, so that their number is known; those that have none are told by a row behind the last."""
    lengths = torch.ones_like(x.items.offsets()[1:])
    rows = torch.cat([x.rows.values(), x.rows.values().new_zeros(1, DIM)])
    return rows[module(x.items, lengths, x.targets.shape[0]).rows]


CASES = {
    "self-attention": Case(
        lambda: JaggedSelfAttention(
            DIM, 2, num_key_heads=1, rotary=True, max_distance=3, num_time_buckets=5, attention_dropout=0.3
        ),
        lambda module, x: module(x.rows, 1, x.items.values()).values(),
    ),
    "cross-attention": Case(
        lambda: JaggedCrossAttention(DIM, 2, attention_dropout=0.3), lambda module, x: module(x.targets, x.rows)
    ),
    "cross-attention of rows": Case(
        lambda: JaggedCrossAttention(DIM, 2), lambda module, x: module(x.rows, memory=x.rows).values()
    ),
    "window with two sides": on_rows(lambda: JaggedSelfAttention(DIM, 2, causal=False, window=(2, 1), num_contextual=1)),
    "transformer": on_rows(lambda: JaggedTransformerBlock(DIM, 2, dropout=0.2, attention_dropout=0.1)),
    "transformer that computes again": on_rows(lambda: JaggedTransformerBlock(DIM, 2, recompute=True)),
    "hstu": Case(
        lambda: HSTUBlock(DIM, 2, max_distance=3, num_time_buckets=5, dropout=0.2, normalizer=7),
        lambda module, x: module(x.rows, 1, times=x.items.values()).values(),
    ),
    "hstu that computes again": on_rows(lambda: HSTUBlock(DIM, 2, concat_ua=True, norm="group", dropout=0.2, recompute=True)),
    "hstu of root mean squares": on_rows(lambda: HSTUBlock(DIM, 2, norm="rms", window=2, global_prefix=1)),
    "layer norm": Case(lambda: LayerNorm(DIM, autocast_output=True), lambda module, x: module(x.rows.values())),
    "positions": Case(lambda: PositionalEncoding(4, DIM), lambda module, x: module(x.rows, num_targets=1).values()),
    "positions from the front": Case(
        lambda: PositionalEncoding(4, DIM, from_end=False), lambda module, x: module(x.rows, num_targets=1).values()
    ),
    "mlp": Case(
        lambda: JaggedMLP(DIM, [6, 3], context_features=DIM, dropout=0.2),
        lambda module, x: module(x.rows, x.targets[:, 0]).values(),
    ),
    "times": Case(
        lambda: TimeEncoding(4, DIM), lambda module, x: module(x.rows, x.items.values(), x.items.offsets()[1:] % 7).values()
    ),
    "interaction": Case(JaggedFeatureInteraction, lambda module, x: module(x.rows, x.targets)),
    "target attention": Case(lambda: TargetAttention(DIM, (6, 4)), lambda module, x: module(x.rows, x.targets)),
    "target attention of jagged targets": Case(
        lambda: TargetAttention(DIM, (6, 4), activation="silu"), lambda module, x: module(x.rows, x.rows).values()
    ),
    **{
        f"{kind} pooling": Case(functools.partial(JaggedPooling, DIM, kind), lambda module, x: module(x.rows))
        for kind in ("sum", "mean", "max", "last", "softmax")
    },
    "stochastic length": Case(lambda: StochasticLength(4, 1.0), shortened),
    "masking": Case(lambda: ItemMasking(ITEMS - 1, 0.5), masked),
    "cut head": of_head(lambda: CutCrossEntropyHead(label_smoothing=0.1, softcap=5.0)),
    # Three samples, whose labels are their items.
    "head of many labels": Case(
        lambda: GroupSparseHead(DIM, counts(), 20, fan_in=3, group_size=4, head=2, head_dim=5, tail_dim=6),
        lambda module, x: module(x.targets[:, 0], x.items),
    ),
    "softmax over many labels": Case(
        lambda: GroupSparseHead(DIM, counts(), 20, fan_in=3, group_size=4, head=2, head_dim=5, tail_dim=6, loss="softmax"),
        lambda module, x: module(x.targets[:, 0], x.items),
    ),
    "scalable head": of_head(lambda: ScalableCrossEntropyHead(2, 4, 5)),
    "uniform": of_sampler(lambda: UniformSampler(ITEMS, 4)),
    "log-uniform": of_sampler(lambda: LogUniformSampler(ITEMS, 4), correction="both"),
    "popularity": of_sampler(lambda: PopularitySampler(counts(), 4)),
    "in-batch": of_sampler(lambda: InBatchSampler(counts())),
    "mixed": of_sampler(lambda: MixedSampler(InBatchSampler(counts()), UniformSampler(ITEMS, 4, rows_per_draw=None))),
}

every_module = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


class Model(nn.Module):
    """A module in a list, as stacked blocks are."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.parts = nn.ModuleList([case.build()])
        self.use = case.use
        self.weight = nn.Parameter(torch.linspace(-1, 1, ITEMS * DIM).sin().view(ITEMS, DIM))

    def forward(self, rows: JaggedTensor, items: JaggedTensor, targets: Tensor) -> Tensor:
        for part in self.parts:
            result = self.use(part, Inputs(rows, items, targets, self.weight))
        return result


def inputs(
    lengths: tuple[int, ...] = (3, 0, 5, 1), dtype: torch.dtype = torch.float32
) -> tuple[JaggedTensor, JaggedTensor, Tensor]:
    offsets = torch.tensor((0, *lengths)).cumsum(0)
    generator = torch.Generator().manual_seed(len(lengths))
    rows = torch.randn(sum(lengths), DIM, generator=generator).to(dtype)
    items = torch.randint(ITEMS - 1, (sum(lengths),), generator=generator)
    targets = torch.randn(len(lengths), TARGETS, DIM, generator=generator).to(dtype)
    here = PLACE.device
    return (
        JaggedTensor(rows.to(here), offsets=offsets.to(here)),
        JaggedTensor(items.to(here), offsets=offsets.to(here)),
        targets.to(here),
    )


def seeded(call: Callable[..., Any], *arguments: Any) -> Any:
    torch.manual_seed(0)
    return call(*arguments)


def test_no_module_is_left_out() -> None:
    built = [module for case in CASES.values() for module in case.build().modules()]
    every = {value for value in vars(jagged.modules).values() if isinstance(value, type) and issubclass(value, JaggedModule)}
    # Tables are tested on their own.
    collections = {jagged.modules.SplitEmbeddingCollection}
    assert every - {JaggedModule, Sampler} - collections == {type(module) for module in built if isinstance(module, JaggedModule)}


@every_module
@pytest.mark.parametrize("trace", [torch.fx.symbolic_trace, lambda model: torch.fx.GraphModule(model, Tracer().trace(model))])
def test_is_a_leaf_of_every_trace(case: Case, trace: Callable[[nn.Module], torch.fx.GraphModule]) -> None:
    model = Model(case).to(PLACE.device).eval()
    traced = trace(model)
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["parts.0"]
    assert torch.equal(seeded(traced, *inputs()), seeded(model, *inputs()))


def gradients(loss: Tensor, leaves: list[Tensor]) -> list[Tensor | None]:
    return list(torch.autograd.grad(loss, leaves, allow_unused=True))


@every_module
def test_checkpointing_computes_the_same_again(case: Case) -> None:
    """Two forwards before the first one's backward, as in gradient accumulation: each draws again what it drew."""
    model = Model(case).to(PLACE.device)
    arguments = inputs(), inputs((1, 6, 2))
    leaves = [*model.parameters(), *(rows.values().requires_grad_() for rows, _, _ in arguments)]
    results = []
    # PyTorch keeps the random state of the devices of its arguments. 2.11 looks for these by building each JaggedTensor anew,
    # which TorchRec refuses: so the rows alone are one.
    for run in (model, lambda *given: checkpoint(lambda _: model(*given), given[0].values(), use_reentrant=False)):
        torch.manual_seed(0)
        losses = [run(*given).square().sum() for given in arguments]
        results.append([losses, *(gradients(loss, leaves) for loss in reversed(losses))])
    for expected, found in zip(*results, strict=True):
        for one, other in zip(expected, found, strict=True):
            assert (one is None) == (other is None)
            assert one is None or torch.equal(one, other)


def computed(model: nn.Module, *given: Any) -> list[Tensor | None]:
    """The result of a model, and its gradients."""
    leaves = [*model.parameters(), given[0].values().detach().requires_grad_()]
    found = seeded(model, JaggedTensor(leaves[-1], offsets=given[0].offsets()), *given[1:])
    return [found, *gradients(found.square().sum(), leaves)]


def assert_same(found: list[Tensor | None], expected: list[Tensor | None]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or (one.dtype == other.dtype and torch.equal(one, other))


class Behind(nn.Module):
    """A model that gets its rows, or its targets, from a linear layer, which autocast computes in 16 bits."""

    def __init__(self, model: Model, layered: str | None) -> None:
        super().__init__()
        self.model, self.layered, self.layer = model, layered, nn.Linear(DIM, DIM)

    def forward(self, rows: JaggedTensor, items: JaggedTensor, targets: Tensor) -> Tensor:
        if self.layered == "rows":
            rows = JaggedTensor(self.layer(rows.values()), offsets=rows.offsets())
        if self.layered == "targets":
            targets = self.layer(targets)
        return self.model(rows, items, targets)  # type: ignore[no-any-return]


@every_module
@pytest.mark.parametrize("layered", [None, "rows", "targets"])
def test_autocast_keeps_the_dtypes_of_gradients(case: Case, layered: str | None) -> None:
    """Float32 weights and rows learn in float32, whatever products are computed in; of a batch without rows, too."""
    model = Behind(Model(case), layered).to(PLACE.device)
    for given in (inputs(), inputs((0, 0))):
        leaves = [*model.parameters(), given[0].values().requires_grad_()]
        # Training loops call backward outside of autocast.
        for is_inside in (True, False):
            with torch.autocast(PLACE.device.type, torch.bfloat16):
                loss = seeded(model, *given).square().sum()
            with torch.autocast(PLACE.device.type, torch.bfloat16, enabled=is_inside):
                grads = gradients(loss, leaves)
            assert all(x is None or x.isfinite().all() for x in (loss, *grads))
            assert {x.dtype for x in grads if x is not None} == {torch.float32}


@every_module
def test_another_default_dtype_changes_nothing(case: Case) -> None:
    model, given = Model(case).to(PLACE.device), inputs()
    expected = computed(model, *given)
    torch.set_default_dtype(torch.float64)
    try:
        found = computed(model, *given)
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same(found, expected)


@every_module
def test_a_saved_module_computes_the_same(case: Case) -> None:
    """As a whole, and as a state that goes into one that was mapped to the meta device."""
    model, given = Model(case).to(PLACE.device), inputs()
    use, model.use = model.use, None  # type: ignore[assignment]
    files = io.BytesIO(), io.BytesIO()
    torch.save(model, files[0])
    torch.save(model.state_dict(), files[1])
    model.use = use
    expected = computed(model, *given)
    for device in (PLACE.device, "meta"):
        files[0].seek(0), files[1].seek(0)
        loaded = torch.load(files[0], map_location=device, weights_only=False)
        loaded.use = use
        if device == "meta":
            loaded.to_empty(device=PLACE.device).load_state_dict(torch.load(files[1], map_location="cpu"))
        assert_same(computed(loaded, *given), expected)


@every_module
def test_every_precision_of_products_is_taken(case: Case) -> None:
    """By PyTorch's new switch; after it was set, reading the old ones raises."""
    model, given = Model(case).to(PLACE.device), inputs()
    before = torch.backends.cuda.matmul.fp32_precision  # type: ignore[attr-defined]
    try:
        for precision in ("tf32", "ieee"):
            torch.backends.cuda.matmul.fp32_precision = precision  # type: ignore[attr-defined]
            assert all(x is None or x.isfinite().all() for x in computed(model, *given))
    finally:
        torch.backends.cuda.matmul.fp32_precision = before  # type: ignore[attr-defined]


class Recommender(nn.Module):
    """Lookups, then modules in a list and functions, as a train pipeline wants them."""

    def __init__(self) -> None:
        super().__init__()
        table = EmbeddingConfig(name="item_id", embedding_dim=DIM, num_embeddings=ITEMS, feature_names=["item_id"])
        self.embeddings = EmbeddingCollection(tables=[table], device=PLACE.device)
        self.parts = nn.ModuleList([PositionalEncoding(4, DIM), JaggedTransformerBlock(DIM, 2), HSTUBlock(DIM, 2)])
        self.pooling = JaggedPooling(DIM, "softmax")

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        x = self.embeddings(features)["item_id"]
        for part in self.parts:
            x = part(x)
        pooled = self.pooling(x) * jagged_jagged_bmm(x.values(), jagged_softmax(x.values(), x.offsets()), x.offsets()).mean(2)
        return pooled.square().mean(), pooled.detach()


class OfSASRec(nn.Module):
    """A model that holds its lookups itself."""

    def __init__(self) -> None:
        super().__init__()
        self.model = SASRec(ITEMS, embedding_dim=DIM, dropout=0.0)

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        hidden = self.model(features).values()
        return hidden.square().mean(), hidden.detach()


class Holder(JaggedModule):
    """One of ours that holds lookups, and is therefore traced through."""

    def __init__(self) -> None:
        super().__init__()
        self.held = Recommender()

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        return self.held(features)  # type: ignore[no-any-return]


# FBGEMM's own, on a GPU.
@pytest.mark.filterwarnings("ignore:TBE B200 optimization:UserWarning")
@pytest.mark.parametrize(
    ("build", "path"),
    [(Recommender, "embeddings"), (OfSASRec, "model.item_embeddings"), (lambda: nn.Sequential(Holder()), "0.held.embeddings")],
    ids=["list", "sasrec", "holder"],
)
def test_trains_in_torchrecs_pipeline_as_without(build: Callable[[], nn.Module], path: str) -> None:
    """The pipeline traces the model to find the lookups that it starts ahead of time."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for lengths in ((2, 0, 3), (1, 4, 4), (5, 1, 1), (0, 2, 2)):
        ids = torch.randint(ITEMS, (sum(lengths),), generator=generator)
        batches.append(KeyedJaggedTensor(["item_id"], ids, lengths=torch.tensor(lengths)).to(PLACE.device))
    results = []
    with process_group(PLACE.device):
        for is_piped in (False, True):
            model, sharder = seeded(lambda: build().to(PLACE.device)), EmbeddingCollectionSharder()
            plan = construct_module_sharding_plan(
                model.get_submodule(path), {"item_id": table_wise(0, compute_kernel="fused")}, sharder, 1, 1, PLACE.device.type
            )
            parallel = DistributedModelParallel(
                model, device=PLACE.device, plan=ShardingPlan({path: plan}), sharders=[sharder], init_parameters=False
            )
            optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
            if is_piped:
                pipeline, feed = TrainPipelineSparseDist(parallel, optimizer, PLACE.device), iter(batches)
                results.append([pipeline.progress(feed) for _ in batches])
                assert [module.forward.name for module in pipeline._pipelined_modules] == [path]
                continue
            results.append([])
            for features in batches:
                optimizer.zero_grad()
                loss, found = parallel(features)
                loss.backward()
                optimizer.step()
                results[0].append(found)
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
