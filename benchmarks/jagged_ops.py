"""Jagged operators beside padding and beside FBGEMM-GPU's kernels: time forward and backward, memory, useful bytes a second.

    python -m benchmarks.jagged_ops                # Table 1 of the Jagged Flash Attention paper, then the sweeps
    python -m benchmarks.jagged_ops --only table

The table's sizes: 1,024 samples, lengths uniform on 0..100, D = 1024, T = 4. `padded` is what people write: copy the rows into
zeros by an index that is made once, compute, take the rows out. `sll` are the Triton kernels of FBGEMM-GPU, `fbgemm` its C++
operators. Every implementation is checked against float64 before it is timed; one that is wrong or fails gets the reason in place
of a time.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import environment, replay_us, save
from jagged import ops

Function = Callable[..., Tensor]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Batch:
    """Jagged rows and the indices by which padding finds them."""

    offsets: Tensor
    lengths: Tensor
    total: int
    pairs: int
    longest: int

    @staticmethod
    def of(lengths: Tensor, longest: int) -> Batch:
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        return Batch(offsets, lengths, int(offsets[-1]), int((lengths**2).sum()), longest)

    @property
    def size(self) -> int:
        return self.lengths.shape[0]

    def rows(self) -> Tensor:
        """Where each row lies in `[B * longest]`."""
        sample = torch.repeat_interleave(torch.arange(self.size, device=self.offsets.device), self.lengths)
        return sample * self.longest + torch.arange(self.total, device=self.offsets.device) - self.offsets[sample]

    def cells(self) -> Tensor:
        """Where each pair lies in `[B * longest * longest]`."""
        exists = torch.arange(self.longest, device=self.offsets.device) < self.lengths[:, None]
        return (exists[:, :, None] & exists[:, None, :]).flatten().nonzero().flatten()


@dataclass
class Case:
    """One operator on one workload: its inputs, what it must move and compute, and who can do it."""

    name: str
    inputs: tuple[Tensor, ...]
    ours: Function
    padded: Function
    forward_bytes: int
    backward_bytes: int
    flops: int
    formula: str
    peers: dict[str, Function] = field(default_factory=dict)


def cases(batch: Batch, d: int, t: int, dtype: torch.dtype, names: tuple[str, ...] = ()) -> Iterator[Case]:
    """Build the operators' cases; with `names` only those."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    size, total, pairs, length, offsets = batch.size, batch.total, batch.pairs, batch.longest, batch.offsets
    item = dtype.itemsize

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", generator=generator).to(dtype).requires_grad_()

    rows = batch.rows()
    quadratic = {"jagged_jagged_bmm_jagged_out", "array_jagged_bmm_jagged_out", "jagged2_softmax", "jagged_pairwise_difference"}
    cells = batch.cells() if not names or quadratic & set(names) else rows
    z_offsets = ops.pair_offsets(offsets)
    z_lengths = z_offsets.diff()

    def pad(x: Tensor, fill: float = 0.0) -> Tensor:
        return x.new_full((size * length, *x.shape[1:]), fill).index_copy(0, rows, x).view(size, length, *x.shape[1:])

    def unpad(x: Tensor) -> Tensor:
        return x.reshape(size * length, *x.shape[2:])[rows]

    def pad_pairs(x: Tensor, fill: float = 0.0) -> Tensor:
        return x.new_full((size * length * length,), fill).index_copy(0, cells, x).view(size, length, length)

    def unpad_pairs(x: Tensor) -> Tensor:
        return x.reshape(-1)[cells]

    def wide(n: int) -> int:
        return n * item

    def jagged_dense_bmm() -> Case:
        moved = total * d + size * d * t + total * t
        return Case(
            "jagged_dense_bmm", (random(total, d), random(size, d, t)),
            lambda x, y: ops.jagged_dense_bmm(x, offsets, y), lambda x, y: unpad(pad(x) @ y),
            wide(moved), wide(moved + total * d + size * d * t), 2 * total * d * t, "S D + B D T + S T",
            {
                "sll": lambda x, y: torch.ops.fbgemm.sll_jagged_dense_bmm(x, y, offsets, length, False, False),
                "fbgemm": lambda x, y: torch.ops.fbgemm.jagged_dense_bmm(x, offsets, y, length)[0],
            },
        )  # fmt: skip

    def jagged_jagged_bmm() -> Case:
        moved = total * d + size * d * t + total * t
        return Case(
            "jagged_jagged_bmm", (random(total, d), random(total, t)),
            lambda a, b: ops.jagged_jagged_bmm(a, b, offsets), lambda a, b: pad(a).transpose(1, 2) @ pad(b),
            wide(moved), wide(moved + total * d + total * t), 2 * total * d * t, "S D + S T + B D T",
            {
                "sll": lambda a, b: torch.ops.fbgemm.sll_jagged_jagged_bmm(a, b, offsets, length, False, False),
                "fbgemm": lambda a, b: torch.ops.fbgemm.jagged_jagged_bmm(a, b, offsets, length),
            },
        )  # fmt: skip

    def jagged_softmax() -> Case:
        return Case(
            "jagged_softmax", (random(total, t),),
            lambda x: ops.jagged_softmax(x, offsets), lambda x: unpad(pad(x, -math.inf).softmax(1)),
            wide(2 * total * t), wide(3 * total * t), 5 * total * t, "2 S T",
            {
                "sll": lambda x: torch.ops.fbgemm.sll_jagged_softmax(x, offsets, length, False),
                "fbgemm": lambda x: torch.ops.fbgemm.jagged_softmax(x, offsets, length)[0],
            },
        )  # fmt: skip

    def jagged_jagged_bmm_jagged_out() -> Case:
        return Case(
            "jagged_jagged_bmm_jagged_out", (random(total, d), random(total, d)),
            lambda a, b: ops.jagged_jagged_bmm_jagged_out(a, b, offsets, total=pairs),
            lambda a, b: unpad_pairs(pad(a) @ pad(b).transpose(1, 2)),
            wide(2 * total * d + pairs), wide(4 * total * d + pairs), 2 * pairs * d, "2 S D + P",
            {
                "sll": lambda a, b: torch.ops.fbgemm.sll_jagged_jagged_bmm_jagged_out(
                    a, b, batch.lengths, offsets, batch.lengths, offsets, z_lengths, z_offsets, length, False
                )
            },
        )  # fmt: skip

    def array_jagged_bmm_jagged_out() -> Case:
        return Case(
            "array_jagged_bmm_jagged_out", (random(pairs), random(total, d)),
            lambda s, b: ops.array_jagged_bmm_jagged_out(s, b, offsets), lambda s, b: unpad(pad_pairs(s) @ pad(b)),
            wide(2 * total * d + pairs), wide(3 * total * d + 2 * pairs), 2 * pairs * d, "2 S D + P",
            {
                "sll": lambda s, b: torch.ops.fbgemm.sll_array_jagged_bmm_jagged_out(
                    s, b, z_lengths, z_offsets, batch.lengths, offsets, batch.lengths, offsets, length, False
                )
            },
        )  # fmt: skip

    def jagged2_softmax() -> Case:
        return Case(
            "jagged2_softmax", (random(pairs),),
            lambda s: ops.jagged2_softmax(s, offsets), lambda s: unpad_pairs(pad_pairs(s, -1e30).softmax(2)),
            wide(2 * pairs), wide(3 * pairs), 5 * pairs, "2 P",
            {"sll": lambda s: torch.ops.fbgemm.sll_jagged2_softmax(s, offsets, z_offsets, length, True)},
        )  # fmt: skip

    def jagged_to_dense() -> Case:
        moved = total * d + size * length * d
        return Case(
            "jagged_to_dense", (random(total, d),),
            lambda x: ops.jagged_to_dense(x, offsets, length), pad, wide(moved), wide(2 * total * d), 0, "S D + B L D",
            {"fbgemm": lambda x: torch.ops.fbgemm.jagged_to_padded_dense(x, [offsets], [length], 0.0)},
        )  # fmt: skip

    def dense_to_jagged() -> Case:
        return Case(
            "dense_to_jagged", (random(size, length, d),),
            lambda x: ops.dense_to_jagged(x, offsets, total), unpad,
            wide(2 * total * d), wide(total * d + size * length * d), 0, "2 S D",
            {"fbgemm": lambda x: torch.ops.fbgemm.dense_to_jagged(x, [offsets], total)[0]},
        )  # fmt: skip

    def jagged_dense_add() -> Case:
        return Case(
            "jagged_dense_add", (random(total, d), random(size, length, d)),
            lambda x, y: ops.jagged_dense_add(x, offsets, y), lambda x, y: unpad(pad(x) + y),
            wide(3 * total * d), wide(total * d + size * length * d), total * d, "3 S D",
            {
                "sll": lambda x, y: torch.ops.fbgemm.sll_jagged_dense_elementwise_add(x, offsets, y, length, False),
                "fbgemm": lambda x, y: torch.ops.fbgemm.jagged_dense_elementwise_add_jagged_output(x, [offsets], y)[0],
            },
        )  # fmt: skip

    def jagged_dense_mul() -> Case:
        return Case(
            "jagged_dense_mul", (random(total, d), random(size, length, d)),
            lambda x, y: ops.jagged_dense_mul(x, offsets, y), lambda x, y: unpad(pad(x) * y),
            wide(3 * total * d), wide(4 * total * d + size * length * d), total * d, "3 S D",
            {"fbgemm": lambda x, y: torch.ops.fbgemm.jagged_dense_elementwise_mul(x, [offsets], y)[0]},
        )  # fmt: skip

    def jagged_pairwise_difference() -> Case:
        return Case(
            "jagged_pairwise_difference", (random(total),),
            lambda x: ops.jagged_pairwise_difference(x, offsets, total=pairs),
            lambda x: unpad_pairs(pad(x)[:, :, None] - pad(x)[:, None, :]),
            wide(total + pairs), wide(total + pairs), pairs, "S + P",
        )  # fmt: skip

    builders = (
        jagged_dense_bmm, jagged_jagged_bmm, jagged_softmax, jagged_jagged_bmm_jagged_out, array_jagged_bmm_jagged_out,
        jagged2_softmax, jagged_to_dense, dense_to_jagged, jagged_dense_add, jagged_dense_mul, jagged_pairwise_difference,
    )  # fmt: skip
    for builder in builders:
        if not names or builder.__name__ in names:
            yield builder()


def measure(case: Case, padded_fits: bool = True, both_caches: bool = True) -> dict[str, Any]:
    """Check and time every implementation of a case."""
    result: dict[str, Any] = {
        "bytes_forward": case.forward_bytes,
        "bytes_backward": case.backward_bytes,
        "formula": f"({case.formula}) x {case.inputs[0].element_size()}",
        "flops_forward": case.flops,
    }
    implementations = {"jagged": case.ours, **({"padded": case.padded} if padded_fits else {}), **case.peers}
    exact, budget = _exact(case) if padded_fits else (None, None)
    for name, function in implementations.items():
        try:
            # Without its graph, whose nodes would belong to this stream and could not be captured on another.
            with torch.no_grad():
                output = function(*case.inputs)
            if exact is not None and budget is not None:
                _check(output, exact, budget)
            result[name] = _times(case, function, output, both_caches)
        except Exception as error:  # A peer may fail in any way; it must not end the run. Ours must not fail.
            if name == "jagged":
                raise
            result[name] = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"}
        torch.cuda.empty_cache()
    return result


def _exact(case: Case) -> tuple[Tensor, float]:
    with torch.no_grad():
        exact = case.padded(*(x.double() for x in case.inputs))
        low = case.padded(*case.inputs).double()
        eps = torch.finfo(case.inputs[0].dtype).eps
        return exact, 3 * float((low - exact).abs().max()) + 2 * eps * float(exact.abs().max()) if exact.numel() else 0.0


def _check(output: Tensor, exact: Tensor, budget: float) -> None:
    if output.shape != exact.shape:
        raise ArithmeticError(f"wrong: shape {list(output.shape)} in place of {list(exact.shape)}")
    error = float((output.detach().double() - exact).abs().max()) if exact.numel() else 0.0
    if not error <= budget:
        raise ArithmeticError(f"wrong: off by {error:.3g}, allowed {budget:.3g}")


def _times(case: Case, function: Function, output: Tensor, both_caches: bool) -> dict[str, Any]:
    leaves = list(case.inputs)
    upstream = torch.ones_like(output)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        result = function(*case.inputs)
    peak = torch.cuda.max_memory_allocated() - before
    figures: dict[str, Any] = {"peak_bytes_forward": peak, "output_bytes": result.numel() * result.element_size()}
    del result

    def forward() -> Tensor:
        with torch.no_grad():
            return function(*case.inputs)

    def backward_of(graph_output: Tensor) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(graph_output, leaves, upstream, retain_graph=True)

    figures["forward"] = replay_us(forward)
    if both_caches:
        figures["forward_cold"] = replay_us(forward, cold=True)
    try:
        figures["backward"] = replay_us(prepare=lambda: backward_of(function(*case.inputs)))
        if both_caches:
            figures["backward_cold"] = replay_us(prepare=lambda: backward_of(function(*case.inputs)), cold=True)
    except RuntimeError as error:
        figures["backward"] = {"failed": str(error).splitlines()[0][:160]}
    median = figures["forward"]["median"]
    figures["gb_per_s"] = case.forward_bytes / median / 1e3
    figures["tflop_per_s"] = case.flops / median / 1e6
    return figures


def host_us(dtype: torch.dtype) -> dict[str, dict[str, float]]:
    """Host time of eager calls on a small batch, where the GPU is never waited for."""
    lengths = torch.randint(0, 9, (16,), device="cuda")
    found = {}
    for case in cases(Batch.of(lengths, 8), 64, 4, dtype):

        def forward(case: Case = case) -> None:
            with torch.no_grad():
                case.ours(*case.inputs)

        def both(case: Case = case) -> None:
            output = case.ours(*case.inputs)
            torch.autograd.grad(output, list(case.inputs), output.detach())

        found[case.name] = {"forward": _host(forward), "forward_backward": _host(both)}
    return found


def _host(call: Callable[[], None], repeats: int = 300) -> float:
    for _ in range(20):
        call()
    best = math.inf
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeats // 5):
            call()
        best = min(best, (time.perf_counter() - start) / (repeats // 5))
    return best * 1e6


def uniform(size: int, longest: int, seed: int = 0) -> Batch:
    """Lengths uniform on 0..longest."""
    generator = torch.Generator().manual_seed(seed)
    return Batch.of(torch.randint(0, longest + 1, (size,), generator=generator).cuda(), longest)


def table(dtypes: list[str]) -> dict[str, Any]:
    """The paper's sizes."""
    batch = uniform(1024, 100)
    found: dict[str, Any] = {"samples": 1024, "rows": batch.total, "pairs": batch.pairs, "longest": 100, "D": 1024, "T": 4}
    for name in dtypes:
        found[name] = {}
        for case in cases(batch, 1024, 4, DTYPES[name]):
            found[name][case.name] = row = measure(case)
            _show(f"{name} {case.name}", row)
    return found


def by_mean_length(dtype: str) -> dict[str, Any]:
    """The same number of rows in samples of mean length 8 to 4,096."""
    rows, found = 65_536, {}
    for mean in (8, 32, 128, 512, 2048, 4096):
        batch = uniform(rows // mean, 2 * mean)
        fits = batch.size * batch.longest * max(256, batch.longest) * 8 < 24e9
        found[mean] = {}
        for case in cases(batch, 256, 4, DTYPES[dtype]) if fits else ():
            found[mean][case.name] = row = measure(case, both_caches=False)
            _show(f"mean {mean} {case.name}", row)
    return {"rows": rows, "D": 256, "T": 4, "dtype": dtype, "by": found}


def by_batch_size(dtype: str) -> dict[str, Any]:
    """Lengths uniform on 0..100 in batches of 16 to 16,384 samples."""
    found: dict[int, Any] = {}
    for size in (16, 128, 1024, 8192):
        found[size] = {}
        for case in cases(uniform(size, 100), 256, 4, DTYPES[dtype]):
            found[size][case.name] = row = measure(case, both_caches=False)
            _show(f"batch {size} {case.name}", row)
    return {"longest": 100, "D": 256, "T": 4, "dtype": dtype, "by": found}


def by_max_length(dtype: str) -> dict[str, Any]:
    """The data fixed, the maximum length that padding and `sll` are told growing: only rows cost here."""
    found: dict[int, Any] = {}
    names = ("jagged_dense_bmm", "jagged_jagged_bmm", "jagged_softmax", "jagged_dense_add")
    for longest in (100, 200, 400, 800, 1600):
        lengths = uniform(1024, 100).lengths
        found[longest] = {}
        for case in cases(Batch.of(lengths, longest), 256, 4, DTYPES[dtype], names):
            found[longest][case.name] = row = measure(case, both_caches=False)
            _show(f"max length {longest} {case.name}", row)
    return {"samples": 1024, "lengths": "uniform on 0..100", "D": 256, "T": 4, "dtype": dtype, "by": found}


def _show(title: str, row: dict[str, Any]) -> None:
    parts = []
    for name in ("jagged", "padded", "sll", "fbgemm"):
        if name in row:
            of = row[name]
            figure = (
                "failed" if "failed" in of else f"{of['forward']['median']:8.1f} /{of['backward'].get('median', math.nan):8.1f}"
            )
            parts.append(f"{name} {figure}")
    print(f"{title:44}" + "   ".join(parts) + f"   us; {row['jagged']['gb_per_s']:.0f} GB/s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {"table": None, "mean_length": by_mean_length, "batch_size": by_batch_size, "max_length": by_max_length}
    parser.add_argument("--only", choices=parts, help="one part; nothing is saved")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU")
    try:
        import fbgemm_gpu.sll  # noqa: F401  Registers the peers' operators.
    except ImportError:
        print("fbgemm_gpu is not installed: no peers but padding")
    result: dict[str, Any] = {"environment": environment()}
    print(result["environment"], flush=True)
    for name, part in parts.items():
        if options.only in (None, name):
            result[name] = table(options.dtypes) if part is None else part(options.dtypes[0])
    result["host_us"] = host_us(torch.bfloat16)
    for name, of in result["host_us"].items():
        print(f"host {name:40} {of['forward']:6.1f} {of['forward_backward']:6.1f} us")
    if options.only is None:
        print(save("jagged_ops", result))


if __name__ == "__main__":
    main()
