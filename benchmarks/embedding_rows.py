"""Rows of a large table without pooling, beside FBGEMM's and PyTorch's lookups.

    python -m benchmarks.embedding_rows
    python -m benchmarks.embedding_rows --without fbgemm    # what it gave before stays
    python -m benchmarks.embedding_rows --rows 100000       # a smaller table

A table of ten million rows of width 128, float32, and histories of 200 ids in the mean, uniform ids and Zipf's with an exponent
of 1.05. Forward, and the backward pass with the update in it by SGD and by Adagrad with a number a row. All get the same ids of
64 bits; FBGEMM is spared its check of them. Each is checked: outputs to the bit, tables after one update against float64.

Times are the GPU's, by replays of a graph: medians of bursts. `of_copy` is the share of a time that the bytes of the lookups,
each row read and written once, would take at the speed of a copy.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from benchmarks.common import environment, other_parts, replay_us, save
from benchmarks.embedding_cases import zipf_ranks
from jagged.ops import BagLayout, BagOptimizer, JointUpdate

ROWS, WIDTH, MEAN = 10_000_000, 128, 200
SAMPLES = (256, 4096)
RATE, EPS = 0.01, 1e-8
KINDS = ("sgd", "rowwise_adagrad")


def zipf(count: int, rows: int, exponent: float, generator: torch.Generator) -> Tensor:
    """Ids by the inverse of the integral of `x ** -exponent`; rows stand in an order of their own."""
    uniform = torch.rand(count, generator=generator, dtype=torch.float64, device="cuda")
    return cast(Tensor, (zipf_ranks(uniform, rows, exponent) * 7_919_993) % rows)


def batch_of(samples: int, rows: int, distribution: str, seed: int) -> tuple[Tensor, Tensor]:
    """Ids and offsets of histories from 1 to 399 ids long."""
    generator = torch.Generator("cuda").manual_seed(seed)
    lengths = torch.randint(1, 2 * MEAN, (samples,), generator=generator, device="cuda")
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    count = int(offsets[-1])
    if distribution == "uniform":
        return torch.randint(rows, (count,), generator=generator, device="cuda"), offsets
    return zipf(count, rows, 1.05, generator), offsets


class Jagged:
    """Our operator."""

    def __init__(self, table: Tensor, kind: str) -> None:
        self.table = table
        self.layout = BagLayout((table.shape[0],), (table.shape[1],), sequences=(True,))
        optimizer = BagOptimizer(cast(Any, kind), self.layout, learning_rate=RATE, eps=EPS, device="cuda")
        self.tables = JointUpdate(table.view(-1), optimizer)

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        return self.tables.embedding_bags(self.layout, ids, offsets).view(-1, self.table.shape[1])


class Fbgemm:
    """Its table-batched embeddings of pooling mode NONE."""

    def __init__(self, table: Tensor, kind: str) -> None:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation, PoolingMode
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen

        kinds = {"sgd": EmbOptimType.EXACT_SGD, "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD}
        self.tables = SplitTableBatchedEmbeddingBagsCodegen(
            [(*table.shape, EmbeddingLocation.DEVICE, ComputeDevice.CUDA)],
            optimizer=kinds[kind],
            learning_rate=RATE,
            eps=EPS,
            pooling_mode=PoolingMode.NONE,
            device=table.device,
            bounds_check_mode=BoundsCheckMode.NONE,
        )
        (self.table,) = self.tables.split_embedding_weights()
        with torch.no_grad():
            self.table.copy_(table)

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        return cast(Tensor, self.tables(ids, offsets))


class Torch:
    """`torch.nn.functional.embedding`; forward alone, for its gradient is as large as the table."""

    def __init__(self, table: Tensor, kind: str) -> None:
        self.table = table

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        return torch.nn.functional.embedding(ids, self.table)


METHODS: dict[str, Callable[[Tensor, str], Any]] = {"jagged": Jagged, "fbgemm": Fbgemm, "torch": Torch}


def expected_rows(before: Tensor, ids: Tensor, grad: Tensor, kind: str, some: Tensor) -> Tensor:
    """What some rows are after one update, in float64."""
    place = torch.full((before.shape[0],), -1, device="cuda")
    place[some] = torch.arange(len(some), device="cuda")
    own = place[ids]
    sums = torch.zeros(len(some), before.shape[1], dtype=torch.float64, device="cuda")
    sums.index_add_(0, own[own >= 0], grad[own >= 0].double())
    old = before[some].double()
    if kind == "sgd":
        return old - RATE * sums
    return old - RATE * sums / (sums.square().mean(1, keepdim=True).sqrt() + EPS)


def measure(make: Callable[[Tensor, str], Any], table: Tensor, ids: Tensor, offsets: Tensor, copy: float) -> dict[str, Any]:
    """Check and time one method on one batch.

    Raises:
        ArithmeticError: rows or an update that are wrong.
    """
    figures: dict[str, Any] = {}
    grad = torch.randn(len(ids), table.shape[1], device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    for kind in KINDS:
        own = table.clone() if make is Jagged else table
        lookup = make(own, kind)
        output = lookup.forward(ids, offsets)
        if not torch.equal(output.detach(), table[ids]):
            raise ArithmeticError("wrong: rows differ from the table's")
        if kind == KINDS[0]:
            with torch.no_grad():
                figures["forward"] = replay_us(functools.partial(lookup.forward, ids, offsets))
            moved = 2 * len(ids) * table.shape[1] * 4 + ids.nbytes
            figures["forward"]["of_copy"] = moved / copy / 1e3 / figures["forward"]["median"]
        if make is Torch:
            return figures
        some = ids[:: max(1, len(ids) // 2000)]
        some = torch.unique(some)
        right = expected_rows(table, ids, grad, kind, some)
        output.backward(grad)
        error = float((lookup.table[some].double() - right).norm() / (right - table[some].double()).norm())
        if not error < 1e-4:
            raise ArithmeticError(f"wrong: {kind} differs by {error:.3g} of the change")

        def backward(lookup: Any = lookup) -> Callable[[], Any]:
            kept = lookup.forward(ids, offsets)
            return lambda: kept.backward(grad, retain_graph=True)

        figures[kind] = {**replay_us(prepare=backward), "error": error}
        del lookup, own, output
        torch.cuda.empty_cache()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--without", nargs="+", default=[], choices=list(METHODS))
    parser.add_argument("--rows", type=int, default=ROWS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("found no NVIDIA GPU")
    facts = environment()
    print(facts, flush=True)
    rows: dict[str, Any] = other_parts("embedding_rows", facts).get("rows", {})
    table = torch.randn(options.rows, WIDTH, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    failed = []
    for distribution in ("uniform", "zipf"):
        for samples in SAMPLES:
            for seed in (0, 1):
                ids, offsets = batch_of(samples, options.rows, distribution, seed)
                name = f"{samples:,} histories, {distribution}, seed {seed}"
                row = rows.setdefault(name, {}) | {"ids": len(ids), "distinct": len(torch.unique(ids)), "rows": options.rows}
                for method, make in METHODS.items():
                    if method in options.without:
                        continue
                    try:
                        row[method] = measure(make, table, ids, offsets, facts["copy_gb_per_s"])
                    except Exception as error:
                        # A peer may not be there, or fail in any way.
                        row[method] = {"failed": f"{type(error).__name__}: {error}"[:300]}
                        failed += [name] if method == "jagged" else []
                rows[name] = row
                print(name, {m: {w: round(f["median"], 1) for w, f in row[m].items() if isinstance(f, dict)} | {k: v for k, v in row[m].items() if k == "failed"} for m in METHODS if m in row}, flush=True)  # noqa: E501  # fmt: skip
                save("embedding_rows", {"environment": facts, "rows": rows})
    if failed:
        sys.exit(f"jagged failed: {failed}")


if __name__ == "__main__":
    main()
