"""Layer normalisation of many narrow rows beside PyTorch's: forward, and forward and backward.

    python -m benchmarks.layer_norm
    python -m benchmarks.layer_norm --tiles                # elements of a tile, warps and programs, too; nothing is saved
    python -m benchmarks.layer_norm --device cpu           # to try it, few rows; nothing is saved

Rows in float32, as residuals are in mixed precision, or in bfloat16; an output in bfloat16 is what a product reads: PyTorch's is
float32 and cast behind. Microseconds of the GPU by replays of a CUDA graph; `copy_us` is the time of as many bytes at the speed
of a copy, each read or written once: the rows and the output forward; both gradients and the rows backward.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import ROOT, environment, replay_us, save, seconds_of, spread
from jagged.ops.layer_norm import layer_norm

ROWS, WIDTHS = (65_536, 1_048_576), (32, 64, 128, 256, 512)
DTYPES = ((torch.float32, torch.bfloat16), (torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16))
TILES = ((1024, 2048, 4096, 8192), (2, 4, 8), (2, 4, 8))


def theirs(x: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
    """PyTorch's, as autocast calls it."""
    return torch.nn.functional.layer_norm(x.float(), x.shape[1:], weight, bias).to(dtype)


def measured(rows: int, width: int, dtypes: tuple[torch.dtype, torch.dtype], device: str, copy: float) -> dict[str, Any]:
    """Both ways, after they were compared."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(rows, width, device=device, generator=generator).to(dtypes[0]).requires_grad_()
    weight, bias = (torch.randn(width, device=device, generator=generator).requires_grad_() for _ in range(2))
    slope = torch.randn(rows, width, device=device, generator=generator).to(dtypes[1])
    ways: dict[str, Callable[[], Tensor]] = {
        "jagged": lambda: layer_norm(x, weight, bias, dtype=dtypes[1]),
        "torch": lambda: theirs(x, weight, bias, dtypes[1]),
    }
    both = {name: (way(), torch.autograd.grad(way(), (x, weight, bias), slope)) for name, way in ways.items()}
    torch.testing.assert_close(both["jagged"][0], both["torch"][0])
    for ours, other in zip(both["jagged"][1], both["torch"][1], strict=True):
        torch.testing.assert_close(ours, other, atol=1e-4 * rows**0.5, rtol=2e-2)
    moved = x.numel() * (x.itemsize + slope.itemsize), x.numel() * (2 * x.itemsize + slope.itemsize)
    row: dict[str, Any] = {"copy_us": {"forward": moved[0] / copy / 1e3, "both": sum(moved) / copy / 1e3}}
    for name, way in ways.items():
        passes = {
            "forward": way,
            "both": lambda way=way: torch.autograd.grad(way(), (x, weight, bias), slope),
        }  # type: ignore[dict-item]
        row[name] = {of: time_of(work, device) for of, work in passes.items()}
    row["times"] = {of: row["torch"][of]["median"] / row["jagged"][of]["median"] for of in ("forward", "both")}
    return row


def time_of(work: Callable[[], Any], device: str) -> dict[str, Any]:
    """Microseconds, by replays on a GPU."""
    return replay_us(work) if device == "cuda" else spread([1e6 * seconds_of(work)[0] for _ in range(3)])


def sweep(rows: int, width: int) -> None:
    """Print the times of other tiles."""
    kernels: Any = importlib.import_module("jagged.ops.layer_norm.kernels")
    x, slope = torch.randn(rows, width, device="cuda"), torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
    weight, bias = torch.randn(2, width, device="cuda")
    leaves = [of.requires_grad_() for of in (x, weight, bias)]
    for elements, warps, programs in itertools.product(*TILES):
        kernels.ELEMENTS = kernels.ELEMENTS_BACKWARD = elements
        kernels.NUM_WARPS = kernels.NUM_WARPS_BACKWARD = warps
        kernels.PROGRAMS = programs

        def backward() -> Callable[[], Any]:
            output = layer_norm(*leaves, dtype=torch.bfloat16)
            return lambda: torch.autograd.grad(output, leaves, slope, retain_graph=True)

        forward = replay_us(lambda: layer_norm(*leaves, dtype=torch.bfloat16))["median"]
        behind = replay_us(prepare=backward)["median"]
        print(
            f"{rows:,} x {width}, {elements} elements, {warps} warps, {programs} programs: {forward:.1f}, {behind:.1f} us",
            flush=True,
        )


def main() -> None:
    """Measure all cases, and save what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiles", action="store_true")
    options = parser.parse_args()
    if options.tiles:
        for width in WIDTHS:
            sweep(ROWS[1], width)
        return
    is_cuda = options.device == "cuda"
    facts, cases = environment(options.device), {}
    copy = facts.get("copy_gb_per_s", 10.0)
    # No backward pass can be captured before another one was.
    measured(1_000, WIDTHS[0], DTYPES[0], options.device, copy)
    for rows, width, dtypes in itertools.product(ROWS if is_cuda else (1_000,), WIDTHS, DTYPES):
        name = f"{rows:,} x {width}, {' to '.join(str(of).removeprefix('torch.') for of in dtypes)}"
        cases[name] = row = measured(rows, width, dtypes, options.device, copy)
        told = ", ".join(f"{of} {row['jagged'][of]['median']:.1f} us, {row['times'][of]:.2f} times" for of in row["times"])
        print(f"{name}: {told}", flush=True)
    if is_cuda:
        print(f"saved in {save('layer_norm', {'environment': facts, 'cases': cases}).relative_to(ROOT)}")


if __name__ == "__main__":
    main()
