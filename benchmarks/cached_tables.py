"""A table in the host's memory with rows cached on the GPU, beside the same table on the GPU and FBGEMM's UVM caching.

    python -m benchmarks.cached_tables
    python -m benchmarks.cached_tables --without fbgemm    # what it gave before stays
    python -m benchmarks.cached_tables --rows 1000000      # a smaller table
    python -m benchmarks.cached_tables --device cpu --rows 20000 --samples 4 --warm 40 --steps 10    # to try it; nothing is saved

A table of ten million rows of width 128, float32, with a budget of a quarter of its bytes, and histories of 200 ids in the mean,
of Zipf's distribution with an exponent of 1.05. A step is forward and the backward pass with the update in it, by SGD and by
Adagrad with a number a row; each has a batch of its own, 400 steps come before the ones that are timed. `prefetched` and
`fbgemm_prefetched` are told of each batch after the lookup of the one before, on a stream of their own.

Times are of the wall clock, the host's part included, for so many steps in a row. Of them:

* `link_us`: what the bytes of the rows that were read and written back, with their states, take at the measured speeds of copies
  between pinned memory and the GPU, one direction after the other. Where both go at once a step may be faster than that.
* `of_link`: the share of the step's time that this is; `of_link_and_whole`: that this and a step on the GPU's own table are.
* `host_us`: what the host takes of it until all has been asked for, in all and by part: the lookup, `prefetch` and backward. Of
  that a part is the wait for what a batch misses. `device_allocations`: how often the allocator asked the driver for memory.
* `hits`: the share of the ids whose rows were on the GPU; `best`: that of as many most frequent rows as there are slots.

`exchange` is `exchange_rows` by itself: rows in the order of their addresses, slots in none, one way and both, in microseconds by
the wall clock; its `link_us` is what the link takes for one way.

It is checked on a smaller table first: weights after ten steps against those of a table that is on the device as a whole.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.common import environment, other_parts, save
from benchmarks.embedding_cases import EXPONENT, zipf_ranks
from jagged.modules import ScheduledEmbeddingCollection
from jagged.ops import BagOptimizerKind, exchange_rows

ROWS, WIDTH, MEAN, SHARE = 10_000_000, 128, 200, 4
SAMPLES = (1024, 4096)
RATE, EPS = 0.01, 1e-8
KINDS: tuple[BagOptimizerKind, ...] = ("sgd", "rowwise_adagrad")
# Rows that are exchanged by themselves, at most.
EXCHANGED = 75_000
METHODS = ("jagged", "prefetched", "whole", "fbgemm", "fbgemm_prefetched")


class Batch(NamedTuple):
    """Ids, offsets of histories from 1 to 399 ids long, and each id's place among the most frequent ones."""

    ids: Tensor
    offsets: Tensor
    ranks: Tensor


def batch_of(samples: int, rows: int, seed: int, device: str) -> Batch:
    """Ids by the inverse of the integral of `x ** -exponent`; rows stand in an order of their own."""
    generator = torch.Generator(device).manual_seed(seed)
    lengths = torch.randint(1, 2 * MEAN, (samples,), generator=generator, device=device)
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    uniform = torch.rand(int(offsets[-1]), generator=generator, dtype=torch.float64, device=device)
    ranks = zipf_ranks(uniform, rows, EXPONENT)
    return Batch((ranks * 7_919_993) % rows, offsets, ranks)


def link_speeds(device: str) -> dict[str, float]:
    """GB/s of copies of 1 GB between pinned memory and a GPU, the best of three; of 100 MB in memory on a CPU."""
    is_cuda = device == "cuda"
    size = 2**30 if is_cuda else 10**8
    host = torch.empty(size, dtype=torch.uint8, pin_memory=is_cuda)
    there = torch.empty(size, dtype=torch.uint8, device=device)
    found = {}
    for name, (to, source) in {"to_device": (there, host), "to_host": (host, there)}.items():
        of_copies = [seconds(lambda to=to, source=source: to.copy_(source, non_blocking=True), device) for _ in range(4)]
        found[name] = size / min(of_copies[1:]) / 1e9
    return found


def exchange_alone(rows: int, device: str) -> dict[str, float]:
    """Microseconds of an exchange of rows by itself, the median of five, each of other rows."""
    is_cuda = device == "cuda"
    host, cached = torch.zeros(rows, WIDTH, pin_memory=is_cuda), torch.zeros(rows // SHARE, WIDTH, device=device)
    count = min(EXCHANGED, rows // SHARE)
    none = torch.full((count,), -1, device=device)
    found: dict[str, list[float]] = {"in": [], "out": [], "both": []}
    for seed in range(6):
        generator = torch.Generator(device).manual_seed(seed)
        slots = torch.randperm(rows // SHARE, generator=generator, device=device)[:count]
        drawn = torch.randperm(rows, generator=generator, device=device)[: 2 * count].view(2, count).sort().values
        for way, times in found.items():
            leaving, coming = drawn[0] if way != "in" else none, drawn[1] if way != "out" else none
            times.append(seconds(functools.partial(exchange_rows, cached, host, slots, leaving, coming), device) * 1e6)
    return {way: statistics.median(times[1:]) for way, times in found.items()} | {"rows": count}


def seconds(work: Callable[[], Any], device: str) -> float:
    """Wall-clock seconds, the device's work included."""
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def collection(rows: int, kind: BagOptimizerKind, device: str, cache_bytes: int | None) -> ScheduledEmbeddingCollection:
    config = EmbeddingConfig(name="item", embedding_dim=WIDTH, num_embeddings=rows, feature_names=["history"])
    options = {"learning_rate": RATE} if kind == "sgd" else {"learning_rate": RATE, "eps": EPS}
    return ScheduledEmbeddingCollection([config], device, optimizer=kind, optimizer_options=options, cache_bytes=cache_bytes)


class Tables(NamedTuple):
    """What a batch is for a lookup, the lookup, and what brings rows before it; None: nothing does."""

    features: Callable[[Batch], Any]
    rows: Callable[[Any], Tensor]
    prefetch: Callable[[Any], Any] | None = None


def tables_of(collection: ScheduledEmbeddingCollection, *, is_prefetched: bool = False) -> Tables:
    return Tables(
        lambda batch: KeyedJaggedTensor(keys=["history"], values=batch.ids, offsets=batch.offsets),
        lambda features: collection(features)["history"].values(),
        collection.prefetch if is_prefetched else None,
    )


def fbgemm(rows: int, kind: BagOptimizerKind, *, is_prefetched: bool) -> Tables:
    """Its table-batched embeddings of pooling mode NONE, with a cache for the same share of the rows."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen

    kinds = {"sgd": EmbOptimType.EXACT_SGD, "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD}
    tables = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, WIDTH, EmbeddingLocation.MANAGED_CACHING, ComputeDevice.CUDA)],
        optimizer=kinds[kind],
        learning_rate=RATE,
        eps=EPS,
        pooling_mode=PoolingMode.NONE,
        cache_load_factor=1 / SHARE,
        device=torch.device("cuda"),
        bounds_check_mode=BoundsCheckMode.NONE,
        prefetch_pipeline=is_prefetched,
    )
    tables.init_embedding_weights_uniform(-0.01, 0.01)
    stream = torch.cuda.current_stream()
    return Tables(
        lambda batch: batch,
        lambda batch: tables(batch.ids, batch.offsets),
        (lambda batch: tables.prefetch(batch.ids, batch.offsets, forward_stream=stream)) if is_prefetched else None,
    )


@functools.cache
def side_stream() -> Any:
    """A stream that has nothing else to do; the batches are there before steps begin."""
    return torch.cuda.Stream()


def steps_of(tables: Tables, batches: list[Batch], grad: Tensor) -> dict[str, float]:
    """Take steps, and return the host's seconds of each part of all."""
    parts = {"lookup": 0.0, "prefetch": 0.0, "backward": 0.0}

    def took(part: str, since: float) -> float:
        now = time.perf_counter()
        parts[part] += now - since
        return now

    following, now = tables.features(batches[0]), time.perf_counter()
    for number, batch in enumerate(batches):
        rows = tables.rows(following)
        now = took("lookup", now)
        if number + 1 < len(batches):
            following = tables.features(batches[number + 1])
            if tables.prefetch is not None:
                with torch.cuda.stream(side_stream() if rows.is_cuda else None):
                    tables.prefetch(following)
        now = took("prefetch", now)
        rows.backward(grad[: batch.ids.shape[0]])
        now = took("backward", now)
    return parts


def check(kind: BagOptimizerKind, device: str) -> None:
    """Compare weights and states after ten steps.

    Raises:
        ArithmeticError: they differ.
    """
    rows = 20_000
    whole = collection(rows, kind, device, None)
    cached = collection(rows, kind, device, rows * WIDTH * 4 // 2)
    cached.load_state_dict(whole.state_dict())
    batches = [batch_of(8, rows, seed, device) for seed in range(10)]
    grad = torch.randn(16 * MEAN, WIDTH, device=device)
    for tables in (whole, cached):
        steps_of(tables_of(tables, is_prefetched=True), batches, grad)
    for of in ("state_dict", "optimizer_state_dict"):
        expected = getattr(whole, of)()
        for name, found in getattr(cached, of)().items():
            if not torch.allclose(found.cpu(), expected[name].cpu(), rtol=1e-4, atol=1e-5):
                raise ArithmeticError(f"wrong: {kind}: {name} differs")
    if not cached.cache_statistics().rows_written:
        raise ArithmeticError("wrong: nothing was written back")


def timed(tables: Tables, options: argparse.Namespace, samples: int, warm: Callable[[], Any]) -> dict[str, Any]:
    """Microseconds of a step, of three rounds, after those that fill the cache."""
    device, rows = options.device, options.rows
    grad = torch.randn(2 * samples * MEAN, WIDTH, device=device)
    for seed in range(options.warm):
        steps_of(tables, [batch_of(samples, rows, seed, device)], grad)
    warm()
    of_rounds, of_host, ids, ranks = [], [], 0, []
    allocations = device_allocations(device)
    for number in range(3):
        first = 10**6 + number * options.steps
        batches = [batch_of(samples, rows, first + seed, device) for seed in range(options.steps)]
        ids += sum(batch.ids.shape[0] for batch in batches)
        ranks += [batch.ranks for batch in batches]

        def steps(batches: list[Batch] = batches) -> None:
            begin = time.perf_counter()
            parts = steps_of(tables, batches, grad) | {"all": time.perf_counter() - begin}
            of_host.append({part: took / options.steps * 1e6 for part, took in parts.items()})

        of_rounds.append(seconds(steps, device) / options.steps * 1e6)
    of_rounds.sort()
    host_us = {part: statistics.median(of[part] for of in of_host) for part in of_host[0]}
    times = {"median": of_rounds[1], "min": of_rounds[0], "max": of_rounds[2], "host_us": host_us}
    return {**times, "device_allocations": device_allocations(device) - allocations, "ids": ids, "ranks": torch.cat(ranks)}


def device_allocations(device: str) -> int:
    """How often PyTorch's allocator has asked the driver for memory."""
    return int(torch.cuda.memory_stats().get("num_device_alloc", 0)) if device == "cuda" else 0


def rounded(figure: Any) -> Any:
    """As it is shown."""
    if isinstance(figure, dict):
        return {key: rounded(value) for key, value in figure.items()}
    return round(figure, 4) if isinstance(figure, float) else figure


def measure(
    method: str, kind: BagOptimizerKind, samples: int, options: argparse.Namespace, link: dict[str, float]
) -> dict[str, Any]:
    rows, device = options.rows, options.device
    is_prefetched = method.endswith("prefetched")
    if method.startswith("fbgemm"):
        figures = timed(fbgemm(rows, kind, is_prefetched=is_prefetched), options, samples, lambda: None)
    elif method == "whole":
        figures = timed(tables_of(collection(rows, kind, device, None)), options, samples, lambda: None)
    else:
        of_row = WIDTH * 4 + (4 if kind == "rowwise_adagrad" else 0)
        tables = collection(rows, kind, device, rows * of_row // SHARE)
        of = tables_of(tables, is_prefetched=is_prefetched)
        figures = timed(of, options, samples, lambda: tables.cache_statistics(reset=True))
        statistics, forecast = tables.cache_statistics(), tables.cache_forecast()
        steps = 3 * options.steps
        read, written = statistics.bytes_read / steps, statistics.bytes_written / steps
        figures |= {
            "slots": forecast.slots,
            "device_bytes": forecast.device_bytes,
            "host_bytes": forecast.host_bytes,
            "hits": statistics.hit_share,
            "best": float((figures["ranks"] < forecast.slots).double().mean()),
            "rows_read": statistics.rows_read / steps,
            "rows_written": statistics.rows_written / steps,
            "link_us": (read / link["to_device"] + written / link["to_host"]) / 1e3,
            "moves": statistics.moves,
        }
        figures["of_link"] = figures["link_us"] / figures["median"]
    del figures["ranks"]
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--without", nargs="+", default=[], choices=METHODS)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--samples", type=int, nargs="+", default=SAMPLES)
    parser.add_argument("--warm", type=int, default=400)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("found no NVIDIA GPU; --device cpu tries it without")
    methods = [method for method in METHODS if method not in options.without]
    if options.device == "cpu":
        methods = [method for method in methods if not method.startswith("fbgemm")]
    facts = environment(options.device)
    link = link_speeds(options.device)
    exchange = exchange_alone(options.rows, options.device)
    exchange["link_us"] = exchange["rows"] * WIDTH * 4 / link["to_device"] / 1e3
    print(facts, {name: round(number, 1) for name, number in (link | exchange).items()}, flush=True)
    parts = {} if options.device == "cpu" else other_parts("cached_tables", facts)
    rows, failed = parts.get("rows", {}), []
    for kind in KINDS:
        check(kind, options.device)
        for samples in options.samples:
            name = f"{samples:,} histories, {kind}, {options.rows:,} rows"
            row = rows.setdefault(name, {})
            for method in methods:
                try:
                    row[method] = measure(method, kind, samples, options, link)
                except Exception as error:
                    # A peer may not be there, or fail in any way.
                    row[method] = {"failed": f"{type(error).__name__}: {error}"[:300]}
                    failed += [] if method.startswith("fbgemm") else [name]
                if options.device == "cuda":
                    torch.cuda.empty_cache()
            whole = row.get("whole", {})
            for ours in (row.get("jagged", {}), row.get("prefetched", {})):
                if "median" in ours and "median" in whole:
                    ours["of_link_and_whole"] = (ours["link_us"] + whole["median"]) / ours["median"]
            for method, figures in row.items():
                shown = {key: rounded(value) for key, value in figures.items()}
                print(name, method, shown, flush=True)
            if options.device == "cuda":
                save("cached_tables", {"environment": facts, "link_gb_per_s": link, "exchange": exchange, "rows": rows})
    if failed:
        sys.exit(f"jagged failed: {failed}")


if __name__ == "__main__":
    main()
