"""Tiles of the kernel of layers of groups beside cuBLAS's product alone, on one Hopper GPU.

python -m benchmarks.grouped_linear_tiles                # compile, kernels of both passes, gradients, tiles; 2 minutes
python -m benchmarks.grouped_linear_tiles --wide 256 --rows 65536 --parts tiles
python -m benchmarks.grouped_linear_tiles --dry          # compiles for sm_90 without a GPU and prints what fails
"""

import argparse
import itertools
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from typing import NamedTuple

BEGUN = time.perf_counter()

import torch  # noqa: E402
import triton  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from jagged.ops.grouped_linear.kernels import grouped_linear_kernel  # noqa: E402
from jagged.ops.grouped_linear.spec import MOST_WEIGHTS  # noqa: E402

SHARED = 232448
PARTS = ["profiles", "gradients", "tiles"]


class Tile(NamedTuple):
    m: int
    n: int
    k: int  # in bytes
    warps: int
    stages: int
    programs: tuple  # at once on a multiprocessor


TILES = [
    Tile(256, 128, 128, 8, 3, (1,)),
    Tile(128, 256, 128, 8, 3, (1,)),
    Tile(128, 256, 128, 8, 4, (1,)),
    Tile(128, 128, 128, 8, 3, (2,)),
    Tile(128, 128, 128, 4, 2, (2,)),
    Tile(128, 128, 128, 4, 3, (2,)),
    Tile(128, 64, 128, 4, 3, (2, 3)),
    Tile(64, 128, 128, 4, 3, (2, 3)),
]


class Case(NamedTuple):
    groups: int  # as the kernel has it: 1 where all read the same rows
    out: int
    width: int


def cases_of(options):
    found = []
    for wide, experts in itertools.product(options.wide, options.experts):
        found += [Case(1, experts * wide, wide), Case(experts, wide // 2, wide)]
    return found


def fits(tile, case):
    return case.out % tile.n == 0


def arguments(tile, case, x, weight, bias, output):
    size = x.element_size()
    inner = min(tile.k // size, case.width & -case.width)

    def described(matrix, rows, columns):
        return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns])

    given = [
        described(x, tile.m, inner),
        described(weight, tile.n, inner),
        bias,
        described(output, tile.m, tile.n // 2),
        triton.cdiv(x.shape[0], tile.m),
        case.groups,
    ]
    named = {
        "OUT": case.out, "IN": case.width, "RELU": True, "BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_K": inner,
        "NUM_STAGES": tile.stages, "num_warps": tile.warps,
    }  # fmt: skip
    return given, named


class FakeDriver:
    """A Hopper GPU that compiles and nothing else."""

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0

    def is_active(self):
        return True


def compile_one(job):
    tile, case = job
    from triton.runtime import driver

    driver.set_active(FakeDriver())
    torch.set_num_threads(1)
    dtype = torch.bfloat16
    # Of meta's shapes, small: keys know dtypes, tiles and alignment alone.
    x, weight = torch.empty(tile.m, case.groups * case.width, dtype=dtype), torch.empty(tile.n, case.width, dtype=dtype)
    bias, output = torch.empty(case.groups * case.out, dtype=dtype), torch.empty(tile.m, case.groups * case.out, dtype=dtype)
    given, named = arguments(tile, case, x, weight, bias, output)
    try:
        compiled = grouped_linear_kernel.warmup(*given, grid=(1,), **named)
        compiled = compiled.result() if hasattr(compiled, "result") else compiled
        shared = compiled.metadata.shared
        return job, (None if shared <= SHARED else f"{shared} bytes of shared memory"), shared
    except Exception as error:
        return job, f"{type(error).__name__}: {str(error)[:120]}", 0


def compile_all(jobs, workers, seconds):
    failed, done = {}, 0
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        for future in as_completed([pool.submit(compile_one, job) for job in jobs], timeout=seconds):
            job, error, _ = future.result()
            done += 1
            if error:
                failed[job] = error
                print("left out:", *job, error, flush=True)
    print(f"{done} compiled, {len(failed)} left out, after {time.perf_counter() - BEGUN:.0f} s", flush=True)
    return failed


def product_of(case, x, weight, output):
    if case.groups == 1:
        return lambda: torch.mm(x, weight.T, out=output)
    rows, matrices = x.view(x.shape[0], case.groups, case.width), weight.view(case.groups, case.out, case.width)
    place = output.view(x.shape[0], case.groups, case.out).transpose(0, 1)
    return lambda: torch.bmm(rows.transpose(0, 1), matrices.transpose(1, 2), out=place)


def sweep(options, failed):
    from benchmarks.common import replay_us

    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    results = []
    for case, rows in itertools.product(cases_of(options), options.rows):
        if time.perf_counter() - BEGUN > options.seconds:
            print("out of time before", case, rows)
            break
        dtype, flops = torch.bfloat16, 2 * rows * case.groups * case.out * case.width
        torch.manual_seed(0)
        x = torch.randn(rows, case.groups * case.width, device="cuda", dtype=dtype)
        weight = torch.randn(case.groups * case.out, case.width, device="cuda", dtype=dtype) / case.width**0.5
        bias = torch.randn(case.groups * case.out, device="cuda", dtype=dtype)
        output = torch.empty(rows, case.groups * case.out, device="cuda", dtype=dtype)
        product = product_of(case, x, weight, output)
        found = [("cuBLAS, product alone", None, replay_us(product)["median"])]
        product()
        some = slice(0, min(rows, 2048))
        expected = (output[some].float() + bias.float()).relu_()
        for tile in TILES:
            if not fits(tile, case) or (tile, case) in failed:
                continue
            given, named = arguments(tile, case, x, weight, bias, output)
            tiles = case.groups * given[4] * (case.out // tile.n)
            for programs in tile.programs:
                grid = (min(tiles, programs * multiprocessors),)
                output.fill_(float("nan"))
                try:
                    grouped_linear_kernel[grid](*given, **named)
                    error = float((output[some].float() - expected).abs().max() / expected.max())
                    us = replay_us(lambda: grouped_linear_kernel[grid](*given, **named))["median"]  # noqa: B023
                except Exception as problem:
                    print("failed:", case, tile, f"{type(problem).__name__}: {str(problem)[:200]}", flush=True)
                    continue
                wrong = "" if error < 0.02 else f"  WRONG by {error:.3g}"
                name = f"{tile.m}x{tile.n}x{tile.k // x.element_size()} w{tile.warps} s{tile.stages}"
                name += f" p{programs}{wrong}"
                found.append((name, tile, us))
        bytes_us = (x.numel() + weight.numel() + output.numel()) * x.element_size() / 4.2e6
        print(f"\n{case}, {rows} rows: limits {flops / 787e6:.0f} us of products, {bytes_us:.0f} of bytes")
        for name, _, us in [found[0], *sorted(found[1:], key=lambda of: of[2])]:
            print(f"  {us:9.1f} us {flops / us / 1e6:6.0f} TFLOP/s  {name}", flush=True)
            results.append({**case._asdict(), "rows": rows, "way": name, "us": us, "tflops": flops / us / 1e6})
        del x, weight, output, product
        torch.cuda.empty_cache()
    return results


def every(grad, x):
    """Blocks of a group with itself, of one product of all columns with all columns."""
    (rows, groups, out), width = grad.shape, x.shape[2]
    product = grad.view(rows, -1).T @ x.view(rows, -1)
    return product.view(groups, out, groups, width).diagonal(dim1=0, dim2=2).permute(2, 0, 1).contiguous()


def gradients(options):
    """Gradients of weights by four ways; gradients of rows, by how the weight lies."""
    from benchmarks.common import replay_us

    print("\ngradients of weights [G, out, in]: bmm, one mm a group, 32 parts of the rows and their sum, one mm of all;")
    print("of rows: weight as it lies, then along what is summed")
    results = []
    shapes = [
        (2, 64, 128),
        (2, 64, 512),
        (2, 128, 512),
        (3, 64, 256),
        (16, 32, 32),
        (2, 1, 64),
        (4, 64, 128),
        (8, 128, 256),
        (32, 128, 256),
        (8, 512, 1024),
        (32, 512, 1024),
    ]
    for dtype, rows, (groups, out, width) in itertools.product(options.dtypes, (4_096, 16_384, 65_536), shapes):
        if time.perf_counter() - BEGUN > options.seconds:
            break
        kind = torch.float32 if dtype == "tf32" else torch.bfloat16
        x, grad = (torch.randn(rows, groups, of, device="cuda", dtype=kind) for of in (width, out))
        weight = torch.randn(groups, out, width, device="cuda", dtype=kind)
        turned = weight.transpose(1, 2).contiguous().transpose(1, 2)
        place = torch.empty_like(x).transpose(0, 1)
        ways = {
            "bmm": lambda: torch.bmm(grad.permute(1, 2, 0), x.transpose(0, 1)),  # noqa: B023
            "each": lambda: torch.stack([grad[:, g].T @ x[:, g] for g in range(groups)]),  # noqa: B023
            "parts": lambda: torch.stack(
                [
                    torch.bmm(grad[:, g].view(32, -1, out).transpose(1, 2), x[:, g].view(32, -1, width)).sum(0)  # noqa: B023
                    for g in range(groups)  # noqa: B023
                ]
            ),
            "all": lambda: every(grad, x),  # noqa: B023
            "of_rows": lambda: torch.bmm(grad.transpose(0, 1), weight, out=place),  # noqa: B023
            "of_rows_turned": lambda: torch.bmm(grad.transpose(0, 1), turned, out=place),  # noqa: B023
            "turning": lambda: weight.transpose(1, 2).contiguous(),  # noqa: B023
        }
        row = {"dtype": dtype, "rows": rows, "groups": groups, "out": out, "in": width}
        ways = {name: way for name, way in ways.items() if name != "all" or groups**2 * out * width <= 4 * MOST_WEIGHTS}
        row |= {name: round(replay_us(way)["median"], 1) for name, way in ways.items()}
        print(" ", row, flush=True)
        results.append(row)
        torch.cuda.empty_cache()
    return results


def profiles(options):
    """Kernels of both passes of a mixture, by their time."""
    from torch.profiler import ProfilerActivity, profile

    from benchmarks.experts import Case as Mixture
    from benchmarks.experts import Ours

    for dtype, (experts, widths) in itertools.product(options.dtypes, [(8, "256, 256, 128"), (32, "1,024, 1,024, 512")]):
        if time.perf_counter() - BEGUN > options.seconds:
            break
        model = Ours(Mixture(experts, widths, 65_536, dtype), "cuda")
        x = torch.randn(65_536, model.mixture.experts.layers[0].in_features, device="cuda", requires_grad=True)

        def both():
            with torch.autocast("cuda", torch.bfloat16, enabled=dtype != "tf32"):  # noqa: B023
                output = model(x).float()  # noqa: B023
            return torch.autograd.grad(output, [x, *model.parameters()], torch.ones_like(output))  # noqa: B023

        for _ in range(3):
            both()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            for _ in range(3):
                both()
            torch.cuda.synchronize()
        kernels = sorted((of for of in seen.key_averages()), key=lambda of: -of.self_device_time_total)
        print(f"\nboth passes, {experts} experts of {widths}, 65,536 rows, {dtype}: us a pass, launches a pass")
        for of in kernels[:22]:
            print(f"  {of.self_device_time_total / 3:9.1f} {of.count / 3:5.1f}  {of.key[:110]}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--dtypes", nargs="+", default=["bf16", "tf32"], help="of profiles and gradients")
    parser.add_argument("--wide", nargs="+", type=int, default=[256, 512, 1024])
    parser.add_argument("--experts", nargs="+", type=int, default=[32])
    parser.add_argument("--rows", nargs="+", type=int, default=[4_096, 65_536])
    parser.add_argument("--seconds", type=float, default=112)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args()
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    jobs = [(tile, case) for case in cases_of(options) for tile in TILES if fits(tile, case)]
    failed = compile_all(jobs, options.workers, options.seconds)
    if options.dry:
        return
    from benchmarks.common import environment, other_parts, save

    facts = environment()
    found = {name: of for name, of in other_parts("grouped_linear_tiles", facts).items() if name in PARTS}
    if "profiles" in options.parts:
        profiles(options)
    for name, measure in {"gradients": gradients, "tiles": partial(sweep, failed=failed)}.items():
        if name in options.parts:
            found[name] = measure(options)
    save("grouped_linear_tiles", {"environment": facts, **found})
    print(f"\n{time.perf_counter() - BEGUN:.0f} s")


if __name__ == "__main__":
    main()
