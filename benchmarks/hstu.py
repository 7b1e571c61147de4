"""Bodies of HSTU and of the jagged transformer, end to end, beside the same layers composed of PyTorch's operations.

    python -m benchmarks.hstu
    python -m benchmarks.hstu --only hstu
    python -m benchmarks.hstu --device cpu    # to try it, a few rows; nothing is saved

`hstu`: five blocks of width 512 with 4 heads of 128 and `concat_ua`, in bfloat16, 99,000 rows. Lengths are uniform on 1 to
2,048, and the last 1 to 20 rows of each sample are targets. `transformer`: two blocks of SASRec's body at width 256 with 2
heads, 256 samples of 172 rows, weights and residuals in float32 under autocast, as they are trained. There is no dropout
anywhere.

`dlrm_v4_hstu`: the blocks of MLPerf Training's benchmark of that name (mlcommons/training, `recommendation_v4`: its README,
`dlrm_v4/configs.py` and `train/gin/yambda_5b.gin`): three of width 512 with 4 heads, the widths of queries and keys
(`hstu_attn_qk_dim`) and of values and gates (`hstu_attn_linear_dim`) both 128, bfloat16. A sample is 8 contextual rows, a
history of up to 4,086 events and one candidate, at most 4,095 rows. Published is the mean, 2,663 (2.727 million rows in a batch
of 1,024 on a GPU, pull request 903), and not how lengths are spread: they lie evenly from 1,231 to 4,095 here. The batch is an
eighth of theirs, 340,864 rows in 128 samples, so that the ways without kernels of their own fit into memory.

`dlrm_v3`: the blocks of MLPerf Inference's DLRMv3 (mlcommons/inference, `recommendation/dlrm_v3/configs.py`), the same but
five, on the batch with which issue 530 of meta-recsys/generative-recommenders measured theirs, 9.30 ms forward on an H100: 32
samples of 1,024 events on the mean and 2,048 candidates, about 4,020 rows at most and 99,000 together. Lengths lie evenly from
2,168 to 4,020 here. `requests`: these blocks on one request after another, as that benchmark's generator of data makes them
(`streaming_synthetic_data.py`): a contextual row, a history of 90 steps of which each has events with probability 0.7, 100 with
standard deviation 25, and 2,048 candidates. `p50` and `p99` are of the wall clock of a call; the look-up of embeddings and what
makes scores of rows are left out. `user.conf` there has a target latency of 100 ms.

Both have `contextual_seq_len=0` in their blocks, so contextual rows are rows of the history as any other; no window, no biases
of scores, no group norm. In the published blocks SiLU is applied to the gates alone, in ours to queries, keys and values too,
as the paper has it. Since pull request 903 the last of their blocks computes the candidates' rows alone; all rows are computed
here. Their dropout of 0.1 is left out.

`composed` has LayerNorm, product, SiLU, norm, gate, concatenation, product and sum as operations of PyTorch, and our attention
between them. `padded` has these on rows that are padded to the longest sample, with attention by dense products of some samples
at a time, which are computed again in backward: all of them would not fit. `recompute` are our blocks with that option.
`forward` is without gradients, `both` with backward, in microseconds of the GPU by replays of a CUDA graph; `eager` both, by
calls one after the other with the host's part. `bytes` is the most that is allocated in a step beyond parameters and input.
`error` is the distance of the output from float32, relative to its norm, and `gradient_error` the largest of those of the
gradients of all parameters and of the input.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchrec.sparse.jagged_tensor import JaggedTensor

from benchmarks.attention_masks import Variant, seen_pairs
from benchmarks.common import eager_us, environment, other_parts, replay_us, save, seconds_of
from jagged.modules import HSTUBlock, JaggedTransformerBlock
from jagged.ops import jagged_attention, jagged_hstu_attention, trust_values


class Size(NamedTuple):
    """Rows, longest sample, most targets, width, heads and blocks; whether all samples are that long, and weights float32.

    With a number of `samples` their lengths lie evenly from `least` to `longest`, in random order; without, they are drawn one by
    one until there are so many rows. `fewest` are the fewest targets.
    """

    rows: int
    longest: int
    targets: int
    width: int
    heads: int
    blocks: int
    is_even: bool = False
    autocast: bool = False
    least: int = 1
    fewest: int = 1
    samples: int = 0


class Requests(NamedTuple):
    """How many requests, steps of a history, events of a step on the mean, candidates, and the blocks' sizes."""

    count: int
    steps: int
    events: int
    candidates: int
    width: int
    heads: int
    blocks: int
    normalizer: int


SIZES = {
    "cuda": {
        "hstu": Size(99_000, 2_048, 20, 512, 4, 5),
        "dlrm_v4_hstu": Size(340_864, 4_095, 1, 512, 4, 3, least=1_231, samples=128),
        "dlrm_v3": Size(99_008, 4_020, 2_048, 512, 4, 5, least=2_168, fewest=2_048, samples=32),
        "transformer": Size(44_032, 172, 0, 256, 2, 2, True, True),
    },
    "cpu": {
        "hstu": Size(120, 40, 5, 32, 2, 2),
        "dlrm_v4_hstu": Size(130, 40, 1, 32, 2, 3, least=12, samples=5),
        "dlrm_v3": Size(112, 38, 16, 32, 2, 2, least=18, fewest=16, samples=4),
        "transformer": Size(120, 40, 0, 32, 2, 2, True, True),
    },
}
REQUESTS = {"cuda": Requests(200, 90, 100, 2_048, 512, 4, 5, 16_384), "cpu": Requests(3, 4, 10, 8, 32, 2, 2, 100)}
# How often a step of a history has events; their standard deviation as a share of the mean; the fewest.
VISITS, SPREAD, FEWEST_EVENTS = 0.7, 0.25, 33
SUSTAINED = 2.0
# So many times as far from float32 as `composed` a way may be: `padded` rounds scores and weights, too.
ALLOWED = {"ours": 1.5, "recompute": 1.5, "padded": 4.0}
# Scores that `padded` has at a time.
MOST_SCORES = 2**29


class ComposedHSTUBlock(nn.Module):
    """The same layers, of PyTorch's operations."""

    def __init__(self, block: HSTUBlock) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: JaggedTensor, num_targets: Tensor | None) -> JaggedTensor:
        """Compute as `HSTUBlock` does."""
        block, values = self.block, x.values()
        width, norm = block.output_projection.in_features // 3, block.attention_norm
        normal = nn.functional.layer_norm(values, (values.shape[1],), *block.input_norm.parameters(), 1e-6)
        projected = nn.functional.silu(nn.functional.linear(normal, *block.uvqk_projection.parameters()))
        u, v, q, k = projected.unflatten(1, (4, block.num_heads, -1)).unbind(1)
        attended = jagged_hstu_attention(
            q, k, v, x.offsets(), num_targets=num_targets, normalizer=block.normalizer
        ).flatten(1)  # fmt: skip
        u = u.flatten(1)
        gated = torch.cat([u, attended, nn.functional.layer_norm(attended, (width,), *norm.parameters(), 1e-6) * u], 1)
        output = values + nn.functional.linear(gated, *block.output_projection.parameters())
        return JaggedTensor(output, offsets=x.offsets())


class PaddedHSTU(nn.Module):
    """All of these blocks on padded rows `[B, longest, D]`, of PyTorch's operations; rows are jagged before and behind them."""

    def __init__(self, blocks: nn.ModuleList, offsets: Tensor, num_targets: Tensor, longest: int) -> None:
        super().__init__()
        self.blocks = blocks
        self.shape = offsets.shape[0] - 1, longest
        lengths = offsets.diff()
        sample = torch.repeat_interleave(torch.arange(self.shape[0], device=offsets.device), lengths)
        # Where each row lies in `[B * longest]`, and how many rows of a sample are no targets, found before anything is timed.
        self.places = sample * longest + torch.arange(len(sample), device=offsets.device) - offsets[:-1][sample]
        self.histories = lengths - num_targets

    def forward(self, x: JaggedTensor, num_targets: Tensor | None) -> JaggedTensor:
        """Compute as the blocks do."""
        values = x.values()
        rows = values.new_zeros(self.shape[0] * self.shape[1], values.shape[1]).index_copy(0, self.places, values)
        for block in self.blocks:
            rows = self._computed(block, rows)  # type: ignore[arg-type]
        return JaggedTensor(rows.index_select(0, self.places), offsets=x.offsets())

    def _computed(self, block: HSTUBlock, rows: Tensor) -> Tensor:
        (batch, longest), norm = self.shape, block.attention_norm
        width = block.output_projection.in_features // 3
        normal = nn.functional.layer_norm(rows, (rows.shape[1],), *block.input_norm.parameters(), 1e-6)
        projected = nn.functional.silu(nn.functional.linear(normal, *block.uvqk_projection.parameters()))
        u, v, q, k = projected.chunk(4, 1)
        some = max(1, MOST_SCORES // (block.num_heads * longest**2))
        by_sample = [x.view(batch, longest, block.num_heads, -1).split(some) for x in (q, k, v)]
        attended = torch.cat(
            [
                # Nothing is random, and reading the generator's state would be a synchronisation.
                checkpoint(_dense, *parts, block.normalizer, use_reentrant=False, preserve_rng_state=False)
                for parts in zip(*by_sample, self.histories.split(some), strict=True)
            ]
        ).view(-1, width)
        gated = torch.cat([u, attended, nn.functional.layer_norm(attended, (width,), *norm.parameters(), 1e-6) * u], 1)
        return rows + nn.functional.linear(gated, *block.output_projection.parameters())


def _dense(q: Tensor, k: Tensor, v: Tensor, histories: Tensor, normalizer: float) -> Tensor:
    """Attend in some padded samples `[b, longest, H, d]`, with a score of every pair."""
    position = torch.arange(q.shape[1], device=q.device)
    history = histories[:, None, None]
    seen = (position <= position[:, None].minimum(history)) & (position < history) | (position == position[:, None])
    weights = nn.functional.silu(torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[3] ** -0.5) / normalizer
    return torch.einsum("bhqk,bkhd->bqhd", weights.masked_fill(~seen[:, None], 0), v)


class ComposedTransformerBlock(nn.Module):
    """The same layers, of PyTorch's operations."""

    def __init__(self, block: JaggedTransformerBlock) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: JaggedTensor, num_targets: Tensor | None) -> JaggedTensor:
        """Compute as `JaggedTransformerBlock` does."""
        block, values = self.block, x.values()
        attention = block.attention

        def normal(rows: Tensor, norm: nn.Module) -> Tensor:
            return nn.functional.layer_norm(rows, (rows.shape[1],), *norm.parameters(), norm.eps)  # type: ignore[arg-type]

        qkv = nn.functional.linear(normal(values, block.attention_norm), *attention.qkv_projection.parameters())
        q, k, v = qkv.unflatten(1, (3, attention.num_heads, -1)).unbind(1)
        attended = jagged_attention(q, k, v, x.offsets(), causal=True)
        values = values + nn.functional.linear(attended.flatten(1), *attention.output_projection.parameters())
        first, activation, _, second = block.feed_forward
        hidden = activation(nn.functional.linear(normal(values, block.feed_forward_norm), *first.parameters()))
        return JaggedTensor(values + nn.functional.linear(hidden, *second.parameters()), offsets=x.offsets())


def blocks_of(name: str, size: Size, recompute: bool, device: str) -> nn.ModuleList:
    """New blocks with the same weights each time."""
    torch.manual_seed(0)
    if name != "transformer":
        made: list[nn.Module] = [
            HSTUBlock(size.width, size.heads, normalizer=size.longest, concat_ua=True, recompute=recompute, device=device)
            for _ in range(size.blocks)
        ]
    else:
        made = [JaggedTransformerBlock(size.width, size.heads, device=device) for _ in range(size.blocks)]
    return nn.ModuleList(made)


def batch_of(size: Size, device: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """Rows, offsets and numbers of targets."""
    generator = torch.Generator().manual_seed(1)
    lengths: list[int] = []
    if size.samples:
        spread = torch.linspace(size.least, size.longest, size.samples).round().int()
        lengths = spread[torch.randperm(size.samples, generator=generator)].tolist()
    while sum(lengths) < size.rows:
        least = size.longest if size.is_even else size.least
        lengths.append(int(torch.randint(least, size.longest + 1, (1,), generator=generator)))
    lengths[-1] -= sum(lengths) - size.rows
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(device)
    rows = torch.randn(size.rows, size.width, generator=generator).to(device)
    if not size.targets:
        return rows, offsets, None
    targets = torch.randint(size.fewest, size.targets + 1, (len(lengths),), generator=generator)
    return rows, offsets, torch.minimum(targets, torch.tensor(lengths)).to(device)


def described(lengths: Tensor) -> dict[str, float]:
    """How long samples are."""
    lengths = lengths.cpu().double()
    return {
        "least": int(lengths.min()),
        "median": float(lengths.median()),
        "mean": round(float(lengths.mean()), 1),
        "most": int(lengths.max()),
    }


def _said(of: dict[str, float]) -> str:
    return f"{of['least']:,} to {of['most']:,} rows, median {of['median']:,.0f}, mean {of['mean']:,.1f}"


def measured(name: str, size: Size, device: str) -> dict[str, Any]:
    """Times, memory and errors of one body in every way."""
    rows, offsets, targets = batch_of(size, device)
    upstream = torch.randn(rows.shape, generator=torch.Generator().manual_seed(2)).to(device)
    composed = ComposedTransformerBlock if name == "transformer" else ComposedHSTUBlock
    dtype = torch.float32 if size.autocast else torch.bfloat16

    def run(blocks: nn.ModuleList, values: Tensor) -> Tensor:
        x = JaggedTensor(values, offsets=offsets)
        for block in blocks:
            x = block(x, targets)
        return x.values()

    ways: dict[str, Callable[[], nn.ModuleList]] = {
        "ours": lambda: blocks_of(name, size, False, device),
        "composed": lambda: nn.ModuleList(composed(block) for block in blocks_of(name, size, False, device)),  # type: ignore[arg-type]
    }
    if name != "transformer":
        ways["recompute"] = lambda: blocks_of(name, size, True, device)
    if targets is not None and name in ("dlrm_v4_hstu", "dlrm_v3"):
        ways["padded"] = lambda: nn.ModuleList([PaddedHSTU(blocks_of(name, size, False, device), offsets, targets, size.longest)])
    exact_blocks = ways["composed"]()
    exact_rows = rows.clone().requires_grad_()
    exact = run(exact_blocks, exact_rows)
    expected = torch.autograd.grad(exact, [exact_rows, *exact_blocks.parameters()], upstream)
    exact = exact.detach()
    lengths = offsets.diff().cpu()
    counted = torch.zeros_like(lengths) if targets is None else targets.cpu()
    result: dict[str, Any] = {"size": size._asdict(), "samples": len(lengths), "lengths": described(lengths)}
    result["pairs"] = seen_pairs(lengths, counted, Variant())
    print(
        f"{name} has {size.rows:,} rows in {len(lengths)} samples: {_said(result['lengths'])}; {int(counted.sum()):,} of them "
        f"targets; {result['pairs']:,} pairs of rows that see one another",
        flush=True,
    )
    for way, make in ways.items():
        blocks = make().to(dtype)
        values, given = rows.to(dtype).requires_grad_(), upstream.to(dtype)
        leaves = [values, *blocks.parameters()]

        def both() -> tuple[Tensor, ...]:
            with torch.autocast(device, torch.bfloat16, enabled=size.autocast):
                output = run(blocks, values)  # noqa: B023
            return torch.autograd.grad(output, leaves, given)  # noqa: B023

        def forward() -> Tensor:
            with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=size.autocast):
                return run(blocks, values)  # noqa: B023

        found = forward()
        errors = [_distance(of, right) for of, right in zip(both(), expected, strict=True)]
        row: dict[str, Any] = {"error": _distance(found, exact), "gradient_error": max(errors)}
        if device == "cuda":
            del found
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            both()
            row["bytes"] = torch.cuda.max_memory_allocated() - before
            row["forward"] = replay_us(forward, sustained=SUSTAINED)
            row["both"] = replay_us(both, sustained=SUSTAINED)
        row["eager"] = eager_us(both, 20 if device == "cuda" else 2)
        result[way] = row
        print(f"{name}, {way}: {row}", flush=True)
    for way in ways.keys() & ALLOWED:
        for error in ("error", "gradient_error"):
            if not result[way][error] <= ALLOWED[way] * result["composed"][error] + 1e-3:
                raise ArithmeticError(
                    f"{name}, {way}: {error} {result[way][error]:.1e}, composed {result['composed'][error]:.1e}"
                )
    return result


def request_lengths(of: Requests) -> Tensor:
    """Rows of each request: one that is contextual, the events of a first step and of the others that have some, candidates."""
    generator = torch.Generator().manual_seed(3)
    events = (torch.randn(of.count, of.steps + 1, generator=generator) * SPREAD * of.events + of.events).round()
    visited = torch.rand(of.count, of.steps + 1, generator=generator) < VISITS
    visited[:, 0] = True
    fewest = min(FEWEST_EVENTS, of.events)
    return 1 + of.candidates + (events.clamp(min=fewest) * visited).sum(1).long()


def scored(of: Requests, device: str) -> dict[str, Any]:
    """Percentiles of the microseconds of one request after another, each of which was computed once before it is timed."""
    lengths = request_lengths(of)
    result: dict[str, Any] = {"requests": of.count, "candidates": of.candidates, "lengths": described(lengths)}
    print(f"requests, {of.count} with {of.candidates:,} candidates: {_said(result['lengths'])}", flush=True)
    rows = torch.randn(int(lengths.max()), of.width, generator=torch.Generator().manual_seed(4)).to(device, torch.bfloat16)
    targets = torch.tensor([of.candidates], device=device)
    batches = [JaggedTensor(rows[:length], offsets=torch.tensor([0, length], device=device)) for length in lengths.tolist()]
    size = Size(int(lengths.max()), of.normalizer, of.candidates, of.width, of.heads, of.blocks)
    last: dict[str, Tensor] = {}
    for way in ("ours", "composed"):
        blocks = blocks_of("dlrm_v3", size, False, device).to(torch.bfloat16).eval()
        if way == "composed":
            blocks = nn.ModuleList(ComposedHSTUBlock(block) for block in blocks)  # type: ignore[arg-type]

        def score(x: JaggedTensor) -> Tensor:
            with torch.no_grad():
                for block in blocks:  # noqa: B023
                    x = block(x, targets)
            return x.values()

        for x in batches:
            last[way] = score(x)
        times = torch.tensor([seconds_of(lambda x=x: score(x))[0] for x in batches]) * 1e6  # type: ignore[misc]
        result[way] = {"p50": float(times.quantile(0.5)), "p99": float(times.quantile(0.99)), "mean": float(times.mean())}
        print(f"requests, {way}: {result[way]}", flush=True)
    if not (apart := _distance(last["ours"], last["composed"].float())) <= 0.02:
        raise ArithmeticError(f"requests: ours differs from composed by {apart:.1e} of its norm")
    return result


def _distance(found: Tensor, exact: Tensor) -> float:
    return float((found.detach().float() - exact).norm() / exact.norm())


def main() -> None:
    """Measure all, or one, and save what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", choices=(*SIZES["cuda"], "requests"))
    arguments = parser.parse_args()
    facts = environment(arguments.device)
    results: dict[str, Any] = {"environment": facts}
    if arguments.only and arguments.device == "cuda":
        results |= other_parts("hstu", facts)
    with trust_values():
        for name, size in SIZES[arguments.device].items():
            if arguments.only in (None, name):
                results[name] = measured(name, size, arguments.device)
                if arguments.device == "cuda":
                    # What was measured stays where a later part does not end.
                    save("hstu", results)
                    torch.cuda.empty_cache()
        if arguments.only in (None, "requests"):
            results["requests"] = scored(REQUESTS[arguments.device], arguments.device)
    if arguments.device == "cuda":
        print(f"saved in {save('hstu', results)}")


if __name__ == "__main__":
    main()
