"""New events and candidates behind cached histories, beside the same blocks over whole histories.

    python -m benchmarks.history_cache
    python -m benchmarks.history_cache --device cpu    # to try it, short histories; nothing is saved

A block is `HSTUBlock` of width 512 with 4 heads of 128, in bfloat16 under autocast. `block`: 3,968 of 4,096 events of each user
are cached, and 256 candidates stand behind them; `cached` runs the block over 128 events and the candidates, `whole` over all
of them; `keys` is what puts cached keys and values and new ones together, `keys_bytes` what it reads and writes. Microseconds of
the GPU by replays of a CUDA graph, and `eager_us`, calls one after the other with the host's part.
What comes out is compared first: `error` and `whole_error` are the largest distances from float32, beside its largest number.

`scoring`: four such blocks, 64 users with histories of up to 2,048 events, one event more in each request, 256 candidates. A
request is all of it, from ids on the host to what the candidates become: comparison of histories, lookup, blocks. Milliseconds
by the wall clock, the median and the 99th of a hundred, of the same requests with and without the cache.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from benchmarks.common import eager_us, environment, replay_us, save
from jagged.modules import HistoryCache, HSTUBlock
from jagged.ops import jagged_concat, jagged_split

ASKED = {"graph": 5.0, "eager": 3.0}


class Size(NamedTuple):
    """Users of a batch, events of each and how many are cached, candidates, widths, layers of `scoring`, and its requests."""

    users: tuple[int, ...] = (8, 64)
    events: int = 4_096
    cached: int = 3_968
    candidates: int = 256
    width: int = 512
    heads: int = 4
    layers: int = 4
    history: int = 2_048
    requests: int = 100
    items: int = 100_000


SIZES = {"cuda": Size(), "cpu": Size((2,), 64, 56, 4, 32, 2, 2, 32, 5, 100)}


def blocks_of(size: Size, layers: int, device: str) -> nn.ModuleList:
    """New blocks, in evaluation."""
    torch.manual_seed(0)
    return nn.ModuleList(
        HSTUBlock(size.width, size.heads, normalizer=size.events, device=device) for _ in range(layers)
    ).eval()  # fmt: skip


def cache_of(blocks: nn.ModuleList, users: int, events: int, dtype: torch.dtype) -> HistoryCache:
    """With room for so many users' events."""
    shapes: list[Any] = [block.cached_shape() for block in blocks]  # type: ignore[operator]
    of_row = sum(2 * shape.heads * shape.width for shape in shapes) * dtype.itemsize + 8
    return HistoryCache(blocks, model=None, max_bytes=users * (events + 64) * of_row, dtype=dtype)


def same(users: int, events: int, device: str) -> Tensor:
    """Offsets of as many events for each user."""
    return torch.arange(users + 1, device=device) * events


def measured_block(size: Size, users: int, device: str) -> dict[str, Any]:
    """One block over the end of cached histories, and over all of them."""
    (block,) = blocks = blocks_of(size, 1, device)
    generator = torch.Generator(device).manual_seed(1)
    rows = torch.randn(users, size.events, size.width, device=device, generator=generator)
    candidates = torch.randn(users, size.candidates, size.width, device=device, generator=generator)
    ids = torch.arange(users * size.events).view(users, -1)
    cache = cache_of(blocks, users, size.events, torch.bfloat16)
    given: list[tuple[Any, ...]] = []
    hook = block.register_forward_pre_hook(lambda _, arguments: given.append(arguments))
    for last in (size.cached, size.events):
        events = JaggedTensor(values=ids[:, :last].flatten(), offsets=same(users, last, "cpu"))
        batch = cache.match(range(users), events)
        new = rows[:, int(batch.known[0]) : last].flatten(0, 1)
        _, ranked = cache.encode(batch, new, candidates if last == size.events else None)
    hook.remove()
    values, offsets = jagged_concat([rows.flatten(0, 1), candidates], [same(users, size.events, device), None])
    whole = JaggedTensor(values=values, offsets=offsets)
    ways: dict[str, Callable[[], Any]] = {
        "cached": lambda: block(*given[-1]),
        "whole": lambda: block(whole, size.candidates),
    }
    parts = [same(users, size.events, device), size.candidates]
    _, found = jagged_split(ways["whole"]().values(), parts, [users * size.events])
    with torch.autocast(device, enabled=False):
        _, exact = jagged_split(ways["whole"]().values(), parts, [users * size.events])
    largest = exact.abs().max()
    assert isinstance(ranked, Tensor)
    errors = [float((of.float() - exact).abs().max() / largest) for of in (ranked, found)]
    if not errors[0] <= 2 * errors[1] + 1e-6:
        raise RuntimeError(f"{users} users: cached {errors[0]:.1e} from float32, whole histories {errors[1]:.1e}")
    del exact, found, ranked
    # Last, as it writes other keys into the pages.
    keys = given[-1][3]
    k, v = torch.randn(2, given[-1][0].values().shape[0], *keys.pool.shape[2:], device=device).to(keys.pool.dtype)
    ways["keys"] = lambda: keys.extended(k, v)
    row: dict[str, Any] = {"error": errors[0], "whole_error": errors[1], "cache_bytes": cache.bytes}
    row["keys_bytes"] = 2 * keys.total * keys.pool[0].nbytes
    for name, way in ways.items():
        if device == "cuda":
            row[name] = {**replay_us(way), "eager_us": eager_us(way, 20)}
        else:
            row[name] = {"eager_us": eager_us(way, 3)}
    of = {name: {"graph": row[name].get("median"), "eager": row[name]["eager_us"]["mean"]} for name in ways}
    return row | {"times": {kind: of["whole"][kind] / of["cached"][kind] for kind in ASKED if of["whole"][kind]}}


def measured_scoring(size: Size, device: str) -> dict[str, Any]:
    """Requests one after the other, each with an event more."""
    blocks, users = blocks_of(size, size.layers, device), size.users[-1]
    table = nn.Embedding(size.items, size.width, device=device)
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(size.items, (users, size.history), generator=generator)
    candidates = torch.randint(size.items, (users, size.candidates), generator=generator).to(device)
    cache = cache_of(blocks, users, size.history, torch.bfloat16)

    def cached(length: int) -> Tensor:
        events = JaggedTensor(values=ids[:, :length].flatten(), offsets=same(users, length, "cpu"))
        batch = cache.match(range(users), events)
        _, ranked = cache.encode(batch, table(events.values()[batch.rows].to(device)), table(candidates))
        assert isinstance(ranked, Tensor)
        return ranked

    def whole(length: int) -> Tensor:
        events = table(ids[:, :length].flatten().to(device))
        offsets = same(users, length, device)
        values, ends = jagged_concat([events, table(candidates)], [offsets, None])
        x = JaggedTensor(values=values, offsets=ends)
        for block in blocks:
            x = block(x, size.candidates)
        return jagged_split(x.values(), [offsets, size.candidates], [users * length])[1]

    row: dict[str, Any] = {"users": users, "cache_bytes": cache.bytes}
    first = size.history - size.requests + 1
    for name, way in (("cached", cached), ("whole", whole)):
        way(first - 1), way(first)
        times = []
        for length in range(first, size.history + 1):
            begin = time.perf_counter()
            way(length).sum().item()
            times.append((time.perf_counter() - begin) * 1e3)
        row[name] = {"p50_ms": statistics.median(times), "p99_ms": sorted(times)[max(0, round(0.99 * len(times)) - 1)]}
    return row


def main() -> None:
    """Measure all, and save what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    device = parser.parse_args().device
    size, facts = SIZES[device], environment(device)
    results: dict[str, Any] = {"environment": facts, "asked": ASKED, "block": {}}
    with torch.no_grad(), torch.autocast(device, torch.bfloat16):
        for users in size.users:
            row = results["block"][f"{users} users"] = measured_block(size, users, device)
            print(f"{users} users: {row}", flush=True)
        results["scoring"] = measured_scoring(size, device)
        print(f"scoring: {results['scoring']}", flush=True)
    if device == "cuda":
        print(f"saved in {save('history_cache', results)}")


if __name__ == "__main__":
    main()
