"""Workloads of embedding bags: the five synthetic models of RecFlex (Pan et al., SC 2024), as batches of lookups.

`workloads/recflex_models.json` has, for each line of a model, how the bags of its features are distributed, the rows of their
tables and their widths. Features of a line share the lengths of each sample. Lengths are normal numbers, drawn again until they
lie between 1 and the maximum; a bag is there with the probability `coverage`, and ids are uniform.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.common import ROOT
from jagged.ops import BagLayout

MODELS: dict[str, list[dict[str, Any]]] = json.loads((ROOT / "workloads" / "recflex_models.json").read_text())


class Batch(NamedTuple):
    """Ids `[S]` and offsets `[F * B + 1]`, int32."""

    indices: Tensor
    offsets: Tensor


def layout_of(model: str, repeat: int = 1) -> BagLayout:
    """The tables of a model, one for each feature, `repeat` times."""
    lines = MODELS[model] * repeat
    return BagLayout(
        rows=tuple(line["rows"] for line in lines for _ in line["dims"]),
        widths=tuple(width for line in lines for width in line["dims"]),
    )


def batch_of(model: str, size: int, seed: int = 0, repeat: int = 1, device: str = "cpu") -> Batch:
    """A batch of `size` samples."""
    generator = torch.Generator(device).manual_seed(seed)
    lengths, rows = [], []
    for line in MODELS[model] * repeat:
        features = len(line["dims"])
        lengths.append(_lengths(line, size, generator).repeat(features))
        rows.append(
            torch.full((features,), line["rows"], device=device).repeat_interleave(lengths[-1].view(features, size).sum(1))
        )
    every = torch.cat(lengths)
    offsets = torch.cat([every.new_zeros(1), every.cumsum(0)])
    shares = torch.rand(int(offsets[-1]), generator=generator, device=device, dtype=torch.float64)
    return Batch((shares * torch.cat(rows)).to(torch.int32), offsets.to(torch.int32))


def _lengths(line: dict[str, Any], size: int, generator: torch.Generator) -> Tensor:
    device = generator.device
    if line["kind"] in ("one-hot", "multi-hot-static"):
        lengths = torch.full((size,), line.get("pooling", 1), device=device)
    else:
        lengths, most = torch.zeros(size, dtype=torch.int64, device=device), line.get("max", 2**31)
        while bool((missing := (lengths < 1) | (lengths > most)).any()):
            drawn = (line["mean"] + line["sd"] * torch.randn(size, generator=generator, device=device)).round().long()
            lengths = torch.where(missing, drawn, lengths)
    return lengths * (torch.rand(size, generator=generator, device=device) < line["coverage"])
