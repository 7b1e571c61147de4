"""HSTU and BERT4Rec a sample at a time, in plain torch: each takes the parameters of ours by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from tests.reference.hstu import PaddedHSTUBlock

Parameters = Mapping[str, Tensor]
TABLE = "item_embeddings.embeddings.item_id.weight"


def within(of: Parameters, prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in of.items() if name.startswith(prefix)}


def with_places(ids: Tensor, of: Parameters) -> Tensor:
    """Embedded ids of one sample `[L, D]`, and the vector of each place from the end."""
    places = torch.arange(len(ids) - 1, -1, -1, device=ids.device).clamp(max=len(of["positions.weight"]) - 1)
    return of[TABLE][ids] + of["positions.weight"][places]


def normed(x: Tensor, of: Parameters, prefix: str) -> Tensor:
    return nn.functional.layer_norm(x, x.shape[-1:], of[f"{prefix}weight"], of[f"{prefix}bias"])


class PaddedHSTU:
    """Hidden states `[sum L, D]`."""

    def __init__(self, length: int, num_heads: int, num_layers: int) -> None:
        self.length, self.num_heads, self.num_layers = length, num_heads, num_layers

    def __call__(self, values: Tensor, lengths: Sequence[int], times: Tensor, of: Parameters) -> Tensor:
        width, found = of[TABLE].shape[1], []
        for ids, when in zip(values.split(list(lengths)), times.split(list(lengths)), strict=True):
            count = len(ids)
            x, places = with_places(ids, of)[None], torch.arange(count, device=ids.device)[None]
            visible = torch.ones(1, count, count, dtype=torch.bool, device=ids.device).tril()
            for layer in range(self.num_layers):
                own = within(of, f"blocks.{layer}.")
                buckets = len(own["time_bias"][0]) if "time_bias" in own else None
                block = PaddedHSTUBlock(width, self.num_heads, width // self.num_heads, self.length, buckets, self.length)
                rows = torch.tensor([count], device=ids.device)
                x = functional_call(block.to(x.device, x.dtype), own, (x, visible, places, when[None], rows))
            found.append(normed(x[0], of, "norm."))
        return torch.cat(found)


class PaddedBERT4Rec:
    """The hidden state `[B, D]` of a hidden item behind each history; zeros for an empty one."""

    def __init__(self, mask: int, length: int, num_heads: int, num_layers: int) -> None:
        self.mask, self.length, self.num_heads, self.num_layers = mask, length, num_heads, num_layers

    def final(self, values: Tensor, lengths: Sequence[int], of: Parameters) -> Tensor:
        found = []
        for ids in values.split(list(lengths)):
            whole = torch.cat([ids, ids.new_tensor([self.mask])])
            hidden = self.encoded(whole, of)[-1]
            found.append(hidden if len(ids) else hidden * 0)
        return torch.stack(found)

    def encoded(self, ids: Tensor, of: Parameters) -> Tensor:
        """All rows of one sample, each of which sees all."""
        x = with_places(ids, of)
        for layer in range(self.num_layers):
            own = within(of, f"blocks.{layer}.")
            projected = nn.functional.linear(
                normed(x, own, "attention_norm."), own["attention.qkv_projection.weight"], own["attention.qkv_projection.bias"]
            )
            q, k, v = projected.unflatten(1, (3, self.num_heads, -1)).permute(1, 2, 0, 3)
            scores = q @ k.transpose(1, 2) * q.shape[-1] ** -0.5
            attended = (scores.softmax(2) @ v).transpose(0, 1).flatten(1)
            x = x + nn.functional.linear(
                attended, own["attention.output_projection.weight"], own["attention.output_projection.bias"]
            )
            hidden = nn.functional.linear(
                normed(x, own, "feed_forward_norm."), own["feed_forward.0.weight"], own["feed_forward.0.bias"]
            )
            x = x + nn.functional.linear(nn.functional.gelu(hidden), own["feed_forward.3.weight"], own["feed_forward.3.bias"])
        return normed(x, of, "norm.")
