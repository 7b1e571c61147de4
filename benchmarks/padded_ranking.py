"""The ranking model of TorchRec's modules and padding beside which `ranking_step` measures ours: batches, layers, training.

Its layers, widths and weights are those of `RankingModel` with one candidate a request, histories that are lists, and crosses.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from jagged.data.table_batches import Batch, Part
from jagged.models import RankingInputs, RankingModel
from jagged.models.features import Numbers
from jagged.training.processes import Processes

# Of AdamW and of row-wise Adagrad; the last is the trainer's.
RATE, DECAY, EPS = 1e-3, 0.01, 1e-10


@dataclass
class Prepared(Pipelineable):
    """A batch as the others take it.

    Attributes:
        bags: ids that are pooled.
        rows: ids of candidates and histories, which are not.
        request_numbers, candidate_numbers: normalised.
        labels: `[B, T]`.
        longest: of each history.
    """

    bags: KeyedJaggedTensor
    rows: KeyedJaggedTensor
    request_numbers: Tensor
    candidate_numbers: Tensor
    labels: Tensor
    longest: list[int]

    def __len__(self) -> int:
        return len(self.labels)

    def _mapped(self, change: Any) -> Prepared:
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return Prepared(**{name: of if name == "longest" else change(of) for name, of in values.items()})

    def to(self, device: torch.device, non_blocking: bool = False) -> Prepared:
        """The batch on another device."""
        return self._mapped(lambda of: of.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Prepared:
        """The batch in page-locked memory."""
        return self._mapped(lambda of: of.pin_memory())

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory until work queued on `stream` is done."""
        self._mapped(lambda of: of.record_stream(stream))


class Preparation:
    """Makes of batches of ours, on the host, what the others take: numbers are normalised as `RankingModel` does it.

    Args:
        part: whose batches they are.
        lock: whether what is made is put into page-locked memory.
    """

    def __init__(self, part: Part, *, lock: bool = False) -> None:
        self.inputs, self.lock = RankingInputs.of(part), lock
        self.numbers = {
            side: Numbers(getattr(self.inputs, f"{side}_numbers"), None).requires_grad_(False)
            for side in ("request", "candidate")
        }
        for numbers in self.numbers.values():
            numbers.normalise(part.encoders.statistics)

    def __call__(self, batch: Batch) -> Prepared:
        """The batch as the others take it."""
        inputs = self.inputs
        assert batch.candidates is not None
        pooled = {key: batch.features[key] for key in inputs.features} | {key: batch.candidates[key] for key in inputs.candidates}
        rows = {key: batch.features[key] for key in (*inputs.candidate_ids, *inputs.list_histories)}
        made = Prepared(
            _keyed(pooled),
            _keyed(rows),
            self.numbers["request"](batch.request_numbers, batch.request_numbers_missing),
            self.numbers["candidate"](batch.candidate_numbers, batch.candidate_numbers_missing),
            batch.labels,
            [max(1, int(rows[key].lengths().max())) for key in inputs.list_histories],
        )
        return made.pin_memory() if self.lock else made


def _keyed(parts: Mapping[str, JaggedTensor]) -> KeyedJaggedTensor:
    values, lengths = [of.values() for of in parts.values()], [of.lengths() for of in parts.values()]
    # Without the numbers of values, who asks for a key would wait for the device.
    counts = [len(of) for of in values]
    return KeyedJaggedTensor(
        list(parts), torch.cat(values), lengths=torch.cat(lengths), stride=len(lengths[0]), length_per_key=counts
    )


class PaddedAttention(nn.Module):
    """Causal attention within each history; padding stands behind, so that no event sees it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv_projection, self.output_projection = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, L, D]` in and out."""
        q, k, v = self.qkv_projection(x).view(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output_projection(attended.transpose(1, 2).flatten(2))


class PaddedBlock(nn.Module):
    """A transformer block, with the parameters' names of `JaggedTransformerBlock`."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = PaddedAttention(width, heads)
        self.feed_forward = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Identity(), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        """`[B, L, D]` in and out."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class PaddedTarget(nn.Module):
    """Attention of each candidate to its request's history, with a mask of padding."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_projection, self.kv_projection = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.output_projection = nn.Linear(width, width)

    def forward(self, queries: Tensor, x: Tensor, filled: Tensor) -> Tensor:
        """`[B, D]`, `[B, L, D]` and bool `[B, L]` in, `[B, D]` out."""
        q = self.q_projection(queries).view(len(x), 1, self.heads, -1).transpose(1, 2)
        k, v = self.kv_projection(x).view(*x.shape[:2], 2, self.heads, -1).permute(2, 0, 3, 1, 4)
        has_events = filled[:, :1]
        # Who has no history sees its padding, which is hidden below.
        attended = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=(filled | ~has_events)[:, None, None])
        return self.output_projection(attended.flatten(1) * has_events)


class PaddedHistory(nn.Module):
    """What `History` does, on histories that are padded behind, with its parameters' names."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width, heads = config["embedding_dim"], config["num_heads"]
        self.projection, self.positions = nn.Linear(width, width), nn.Embedding(config["max_history"], width)
        self.blocks = nn.ModuleList(PaddedBlock(width, heads) for _ in range(config["num_layers"]))
        self.norm, self.attention = nn.LayerNorm(width), PaddedTarget(width, heads)

    def forward(self, looked_up: JaggedTensor, queries: Tensor, longest: int) -> tuple[Tensor, Tensor, Tensor]:
        """The mean of the ids, the mean of the events, and what candidates read."""
        ids, lengths = looked_up.to_padded_dense(longest), looked_up.lengths()[:, None]
        place = torch.arange(longest, device=ids.device)
        filled, counts = place < lengths, lengths.clamp(min=1)
        x = self.projection(ids) + self.positions((lengths - 1 - place).clamp(0, self.positions.num_embeddings - 1))
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        read = self.attention(queries, x, filled)
        # The padding of what was looked up is 0.
        return ids.sum(1) / counts, (x * filled[:, :, None]).sum(1) / counts, read


class PaddedScorer(nn.Module):
    """All of `RankingModel` that follows the lookups; a leaf where TorchRec's pipeline traces the model."""

    def __init__(self, model: RankingModel, *, autocast: bool, recompute: bool = False) -> None:
        super().__init__()
        self.inputs, self.autocast, self.recompute = model.inputs, autocast, recompute
        inputs, config = model.inputs, model.config
        histories, width = len(inputs.list_histories), config["embedding_dim"]
        candidate = (len(inputs.candidate_ids) + len(inputs.candidates)) * width + 3 * len(inputs.candidate_numbers)
        request = (len(inputs.features) + 2 * histories) * width + 3 * len(inputs.request_numbers)
        self.histories = nn.ModuleList(PaddedHistory(config) for _ in range(histories))
        self.query = nn.Linear(candidate, width)
        first, *hidden = config["layer_sizes"]
        self.meeting = nn.Linear(request + candidate + histories * width, first)
        self.cross = nn.ModuleList(nn.Linear(first, first) for _ in range(config["cross_layers"]))
        widths = list(itertools.pairwise([first, *hidden, 1]))
        self.towers = nn.ModuleList(
            nn.Sequential(*[of for a, b in widths for of in (nn.Linear(a, b), nn.ReLU())][:-1]) for _ in model.tasks
        )

    def forward(self, pooled: Any, rows: Any, batch: Prepared) -> Tensor:
        """Logits `[B, T]`."""
        with torch.autocast(batch.labels.device.type, torch.bfloat16, enabled=self.autocast):
            return self._logits(pooled.to_dict(), rows, batch).float()

    def _logits(self, bags: Mapping[str, Tensor], rows: Any, batch: Prepared) -> Tensor:
        inputs = self.inputs
        ids = [*(rows[key].values() for key in inputs.candidate_ids), *(bags[key] for key in inputs.candidates)]
        queries = self.query(torch.cat([*ids, batch.candidate_numbers], 1))
        requests, reads = [bags[key] for key in inputs.features], []
        for key, history, longest in zip(inputs.list_histories, self.histories, batch.longest, strict=True):
            if self.recompute:
                # Nothing here draws. TorchRec's rows are bound: as an argument they would be taken apart and made anew.
                read_again = partial(history, rows[key])
                of = checkpoint(read_again, queries, longest, use_reentrant=False, preserve_rng_state=False)
            else:
                of = history(rows[key], queries, longest)
            *means, read = of
            requests += means
            reads.append(read)
        first = self.meeting(torch.cat([*requests, batch.request_numbers, *ids, *reads, batch.candidate_numbers], 1))
        crossed = first
        for layer in self.cross:
            crossed = torch.addcmul(crossed, first, layer(crossed))
        return torch.cat([tower(crossed) for tower in self.towers], 1)

    def load(self, model: RankingModel) -> None:
        """Take over the weights of ours."""
        of = model.scorer.state_dict()
        body, towers = "body.", "body.towers.layers."
        found = {name: value for name, value in of.items() if name.startswith(("histories.", "query."))}
        of_both = [of[f"{body}meeting.context_projection.weight"], of[f"{body}meeting.layers.0.weight"]]
        found |= {"meeting.weight": torch.cat(of_both, 1), "meeting.bias": of[f"{body}meeting.layers.0.bias"]}
        crossed = f"{body}crossed.layers."
        found |= {name.replace(crossed, "cross."): value for name, value in of.items() if name.startswith(crossed)}
        for name, value in of.items():
            if name.startswith(towers):
                layer, kind = name.removeprefix(towers).split(".")
                found |= {f"towers.{task}.{2 * int(layer)}.{kind}": of_task for task, of_task in enumerate(value)}
        self.load_state_dict(found)


class Padded(nn.Module):
    """The same model of TorchRec's collections and padded histories."""

    def __init__(self, bags: nn.Module, rows: nn.Module, scorer: PaddedScorer) -> None:
        super().__init__()
        self.bags, self.rows, self.scorer = bags, rows, scorer

    def forward(self, batch: Prepared) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The loss, and it and the logits without gradients, as TorchRec's pipelines want it."""
        logits = self.scorer(self.bags(batch.bags), self.rows(batch.rows), batch)
        # The sum of the tasks' means.
        loss = batch.labels.shape[1] * nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, (loss.detach(), logits.detach())


def configs_of(model: RankingModel) -> tuple[list[EmbeddingBagConfig], list[EmbeddingConfig]]:
    """The tables of ours, for TorchRec's collections."""
    inputs, sizes, width = model.inputs, model.config["sizes"], model.config["embedding_dim"]

    def options(table: str, keys: Sequence[str]) -> dict[str, Any]:
        return {"name": table, "embedding_dim": width, "num_embeddings": sizes[table], "feature_names": list(keys)}

    pooled = {**inputs.features, **inputs.candidates}
    bags = [EmbeddingBagConfig(**options(table, [key]), pooling=PoolingType.MEAN) for key, table in pooled.items()]
    return bags, [EmbeddingConfig(**options(table, keys)) for table, keys in inputs.sequences.items()]


def weights_of(model: RankingModel) -> dict[str, Tensor]:
    """The tables of ours by their names."""
    return {
        name.split(".")[-2]: parameter.detach()
        for name, parameter in model.named_parameters()
        if name.startswith(("bags.", "sequences."))
    }


@torch.no_grad()
def load_tables(tables: Mapping[str, Tensor], model: RankingModel) -> None:
    """Give tables, by their names, the weights of ours."""
    found = weights_of(model)
    if tables.keys() != found.keys():
        raise ValueError(f"tables: got {sorted(tables)}, expected {sorted(found)}")
    for name, table in tables.items():
        table.copy_(found[name])


class Optimizers:
    """Several optimizers as the one that a pipeline has."""

    def __init__(self, *several: torch.optim.Optimizer) -> None:
        self._several = several

    def zero_grad(self) -> None:
        """Drop the gradients of all."""
        for one in self._several:
            one.zero_grad()

    def step(self) -> None:
        """Step them all."""
        for one in self._several:
            one.step()


def dense_optimizer(scorer: PaddedScorer) -> torch.optim.Optimizer:
    """AdamW as the trainer has it: matrices decay, and with them the biases that its towers keep as a matrix."""
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in scorer.named_parameters():
        groups[parameter.dim() > 1 or name.startswith("towers.")].append(parameter)
    made = [{"params": of, "weight_decay": DECAY if decays else 0.0} for decays, of in groups.items()]
    return torch.optim.AdamW(made, lr=RATE, fused=True)


class Rival:
    """TorchRec's modules and padding under TorchRec's pipelines."""

    def __init__(self, kind: str, model: RankingModel, processes: Processes, *, autocast: bool) -> None:
        device = processes.device
        way, _, recompute = kind.partition("_")
        scorer = PaddedScorer(model, autocast=autocast, recompute=bool(recompute)).to(device)
        scorer.load(model)
        self.kind, self.device = kind, device
        self.model, self.optimizer = {"sharded": _sharded, "fused": _fused, "unfused": _unfused}[way](model, scorer, processes)
        self._pipeline = TrainPipelineSparseDist(self.model, self.optimizer, device) if way == "sharded" else None

    def steps(self, batches: Iterable[Any]) -> Generator[Tensor]:
        """Train on all batches; the loss of each, on the device.

        A pipeline of batches alone is made anew, as the trainer does it. One of sharded tables has exchanged modules and stays.
        """
        self.model.train()
        pipeline = self._pipeline or TrainPipelineBase(self.model, self.optimizer, self.device)
        source = iter(batches)
        while True:
            try:
                loss = pipeline.progress(source)[0]
            except StopIteration:
                return
            yield loss

    def logits(self, batch: Prepared) -> Tensor:
        """`[B, T]`, before any step."""
        with torch.no_grad():
            found: Tensor = self.model(batch)[1][1]
        return found

    def close(self) -> None:
        """Give sharded modules their own forward again."""
        if self._pipeline is not None and getattr(self._pipeline, "_pipelined_modules", None):
            self._pipeline.detach()


def _unfused(model: RankingModel, scorer: PaddedScorer, processes: Processes) -> tuple[nn.Module, Any]:
    bags, rows = configs_of(model)
    made = Padded(
        EmbeddingBagCollection(bags, device=processes.device), EmbeddingCollection(rows, device=processes.device), scorer
    )
    tables = {name.split(".")[-2]: of for name, of in made.named_parameters() if not name.startswith("scorer.")}
    load_tables(tables, model)
    return made, Optimizers(dense_optimizer(scorer), RowWiseAdagrad(tables.values(), lr=RATE, eps=EPS))


def _fused(model: RankingModel, scorer: PaddedScorer, processes: Processes) -> tuple[nn.Module, Any]:
    from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection, FusedEmbeddingCollection

    bags, rows = configs_of(model)
    how = {"optimizer_type": RowWiseAdagrad, "optimizer_kwargs": {"lr": RATE, "eps": EPS}, "device": processes.device}
    of_bags, of_rows = FusedEmbeddingBagCollection(bags, **how), FusedEmbeddingCollection(rows, **how)
    load_tables({name: of.weight for part in (of_bags.embedding_bags, of_rows.embeddings) for name, of in part.items()}, model)
    # Tables are updated by the backward pass.
    return Padded(of_bags, of_rows, scorer), Optimizers(dense_optimizer(scorer))


def _sharded(model: RankingModel, scorer: PaddedScorer, processes: Processes) -> tuple[nn.Module, Any]:
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
    from torchrec.distributed.types import ShardingPlan
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    bags, rows = configs_of(model)
    meta = torch.device("meta")
    made = Padded(EmbeddingBagCollection(bags, device=meta), EmbeddingCollection(rows, device=meta), scorer)
    tables = [*made.bags.parameters(), *made.rows.parameters()]
    apply_optimizer_in_backward(RowWiseAdagrad, tables, {"lr": RATE, "eps": EPS})
    sharders = {"bags": EmbeddingBagCollectionSharder(), "rows": EmbeddingCollectionSharder()}
    plans = {}
    for name, sharder in sharders.items():
        names = [of.name for of in (bags if name == "bags" else rows)]
        plans[name] = construct_module_sharding_plan(
            getattr(made, name), dict.fromkeys(names, table_wise(rank=0, compute_kernel="fused")), sharder=sharder,
            local_size=1, world_size=1, device_type=processes.device.type,
        )  # fmt: skip
    whole = DistributedModelParallel(
        made, device=processes.device, plan=ShardingPlan(plans), sharders=list(sharders.values()), init_data_parallel=False
    )
    shards = {
        name.split(".")[-2]: of.local_shards()[0].tensor
        for part in (whole.module.bags, whole.module.rows)
        for name, of in part.state_dict().items()
    }
    load_tables(shards, model)
    return whole, Optimizers(dense_optimizer(scorer))


def without_kernels(device: torch.device) -> str | None:
    """Why FBGEMM cannot train tables here; None where it can. A step is tried."""
    tables = [EmbeddingBagConfig(name="t", embedding_dim=8, num_embeddings=4, feature_names=["f"])]
    lengths = torch.ones(2, dtype=torch.int64, device=device)
    ids = KeyedJaggedTensor(["f"], torch.tensor([1, 2], device=device), lengths=lengths)
    try:
        from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

        bags = FusedEmbeddingBagCollection(tables, RowWiseAdagrad, {"lr": RATE, "eps": EPS}, device=device)
        before = bags.embedding_bags["t"].weight.detach().clone()
        bags(ids).values().sum().backward()
        changed = (bags.embedding_bags["t"].weight != before).any(1).tolist()
    except Exception as error:  # Libraries that are left out fail in ways of their own.
        return f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return None if changed == [False, True, True, False] else f"of rows 0 to 3, of which 1 and 2 were read, changed {changed}"


def kinds_of(device: torch.device, missing: str | None) -> list[str]:
    """The ways of training it that are measured, by why FBGEMM has no kernels; None where it has them."""
    if missing is not None:
        return ["unfused", "unfused_recompute"]
    # TorchRec's fused collection of sequences refuses a CPU.
    return ["sharded", "fused" if device.type == "cuda" else "unfused", "sharded_recompute"]
