"""The products sample by sample, in plain loops."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def dense_bmm(values: Tensor, lengths: Sequence[int], dense: Tensor, bias: Tensor | None = None) -> Tensor:
    samples = values.split(list(lengths)) if lengths else []
    products = [rows @ matrix for rows, matrix in zip(samples, dense, strict=True)]
    if bias is not None:
        products = [product + added for product, added in zip(products, bias, strict=True)]
    return torch.cat([values.new_zeros(0, dense.shape[2]), *products])


def jagged_bmm(a: Tensor, b: Tensor, lengths: Sequence[int]) -> Tensor:
    sides = zip(a.split(list(lengths)), b.split(list(lengths)), strict=True) if lengths else ()
    products = [left.T @ right for left, right in sides]
    return torch.stack(products) if products else a.new_zeros(0, a.shape[1], b.shape[1])
