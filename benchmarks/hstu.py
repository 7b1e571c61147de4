"""Bodies of HSTU and of the jagged transformer, end to end, beside the same layers composed of PyTorch's operations.

    python -m benchmarks.hstu
    python -m benchmarks.hstu --only hstu
    python -m benchmarks.hstu --device cpu    # to try it, a few rows; nothing is saved

`hstu`: five blocks of width 512 with 4 heads of 128 and `concat_ua`, in bfloat16, as generative-recommenders measures its own
(9.30 ms forward on an H100 with 99,000 rows). Lengths are uniform on 1 to 2,048, as many samples as come to 99,000 rows, and the
last 1 to 20 rows of each are targets. Its lengths and targets are not published with that figure; these are its benchmark's
defaults. `transformer`: two blocks of SASRec's body at width 256 with 2 heads, 256 samples of 172 rows, weights and residuals in
float32 under autocast, as they are trained. There is no dropout.

`composed` has LayerNorm, product, SiLU, norm, gate, concatenation, product and sum as operations of PyTorch, and our attention
between them. `recompute` are our blocks with that option. `forward` is without gradients, `both` with backward, in microseconds
of the GPU by replays of a CUDA graph; `eager` both, by calls one after the other with the host's part. `bytes` is the most that
is allocated in a step beyond parameters and input. `error` is the distance of the output from float32, relative to its norm,
and `gradient_error` the largest of those of the gradients of all parameters and of the input.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from benchmarks.common import eager_us, environment, other_parts, replay_us, save
from jagged.modules import HSTUBlock, JaggedTransformerBlock
from jagged.ops import jagged_attention, jagged_hstu_attention, trust_values


class Size(NamedTuple):
    """Rows, longest sample, most targets, width, heads and blocks; whether all samples are that long, and weights float32."""

    rows: int
    longest: int
    targets: int
    width: int
    heads: int
    blocks: int
    is_even: bool = False
    autocast: bool = False


SIZES = {
    "cuda": {"hstu": Size(99_000, 2_048, 20, 512, 4, 5), "transformer": Size(44_032, 172, 0, 256, 2, 2, True, True)},
    "cpu": {"hstu": Size(120, 40, 5, 32, 2, 2), "transformer": Size(120, 40, 0, 32, 2, 2, True, True)},
}
SUSTAINED = 2.0


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
    if name == "hstu":
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
    while sum(lengths) < size.rows:
        least = size.longest if size.is_even else 1
        lengths.append(int(torch.randint(least, size.longest + 1, (1,), generator=generator)))
    lengths[-1] -= sum(lengths) - size.rows
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(device)
    rows = torch.randn(size.rows, size.width, generator=generator).to(device)
    if not size.targets:
        return rows, offsets, None
    targets = torch.randint(1, size.targets + 1, (len(lengths),), generator=generator)
    return rows, offsets, torch.minimum(targets, torch.tensor(lengths)).to(device)


def measured(name: str, size: Size, device: str) -> dict[str, Any]:
    """Times, memory and errors of one body in every way."""
    rows, offsets, targets = batch_of(size, device)
    upstream = torch.randn(rows.shape, generator=torch.Generator().manual_seed(2)).to(device)
    composed = {"hstu": ComposedHSTUBlock, "transformer": ComposedTransformerBlock}[name]
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
    if name == "hstu":
        ways["recompute"] = lambda: blocks_of(name, size, True, device)
    exact_blocks = ways["composed"]()
    exact_rows = rows.clone().requires_grad_()
    exact = run(exact_blocks, exact_rows)
    expected = torch.autograd.grad(exact, [exact_rows, *exact_blocks.parameters()], upstream)
    exact = exact.detach()
    result: dict[str, Any] = {"size": size._asdict(), "samples": offsets.shape[0] - 1}
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
    for way in set(ways) - {"composed"}:
        for error in ("error", "gradient_error"):
            if not result[way][error] <= 1.5 * result["composed"][error] + 1e-3:
                raise ArithmeticError(
                    f"{name}, {way}: {error} {result[way][error]:.1e}, composed {result['composed'][error]:.1e}"
                )
    return result


def _distance(found: Tensor, exact: Tensor) -> float:
    return float((found.detach().float() - exact).norm() / exact.norm())


def main() -> None:
    """Measure all, or one, and save what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", choices=tuple(SIZES["cuda"]))
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
        print(f"saved in {save('hstu', results)}")


if __name__ == "__main__":
    main()
