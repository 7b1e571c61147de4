"""Rows of embedding tables as bytes, each row with a scale and a bias of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from jagged.ops._shared.validation import FLOATS, check_tensor
from jagged.ops.embedding_bag.layout import BagLayout

# The largest of 8 bits.
LAST = 255
# Elements that are quantised at once, so that what is computed beside the result stays small.
AT_ONCE = 2**23


def quantize_rows(weights: Tensor, layout: BagLayout) -> tuple[Tensor, Tensor]:
    """Quantise every row of the tables to 8 bits, for `embedding_bags` in inference: a quarter of float32 and 8 bytes a row.

    The smallest number of a row becomes 0 and the largest 255, so a number is off by at most half its row's scale. A row of one
    number is exact. A row with NaN or infinities is NaN as a whole.

    Args:
        weights: `[layout.num_elements]`, float32, bfloat16, float16 or float64: the tables; no gradient comes back.
        layout: of the tables.

    Returns:
        The tables in uint8, `[layout.num_elements]`, and float32 scales `[layout.first_rows[-1], 2]`: row `id` of a table has
        the numbers `q * scale + bias`, of which scale and bias stand in row `layout.first_rows[table] + id`.

    Raises:
        ValueError: weights that are not of the layout's length.
        TypeError: weights of another dtype.

    Source:
        Guan et al., Post-Training 4-bit Quantization on Embedding Tables, 2019: uniform quantisation of each row by its range.

    Example:
        >>> import torch
        >>> from jagged.ops import BagLayout, embedding_bags, quantize_rows
        >>> layout = BagLayout(rows=(10, 5), widths=(4, 3))
        >>> weights, scales = quantize_rows(torch.randn(layout.num_elements), layout)
        >>> weights.dtype, scales.shape
        (torch.uint8, torch.Size([15, 2]))
        >>> ids, offsets = torch.tensor([9, 0, 3, 4]), torch.tensor([0, 2, 2, 3, 4])
        >>> embedding_bags(weights, layout, ids, offsets, scales=scales).shape
        torch.Size([2, 7])
    """
    check_tensor("weights", weights, "[E]", FLOATS)
    if weights.shape[0] != layout.num_elements:
        raise ValueError(f"weights: expected the {layout.num_elements} elements of the layout, got shape {list(weights.shape)}")
    weights = weights.detach().contiguous()
    # Nothing is left unwritten between the tables either, so that equal tables make equal files.
    quantised = torch.zeros_like(weights, dtype=torch.uint8)
    scales = torch.empty(layout.first_rows[-1], 2, dtype=torch.float32, device=weights.device)
    tables = zip(layout.views(weights), layout.views(quantised), scales.split(layout.rows), strict=True)
    for table, of_table, of_rows in tables:
        rows_at_once = max(1, AT_ONCE // table.shape[1])
        for begin in range(0, table.shape[0], rows_at_once):
            some = slice(begin, begin + rows_at_once)
            _quantise(table[some], of_table[some], of_rows[some])
    return quantised, scales


def _quantise(rows: Tensor, quantised: Tensor, scales: Tensor) -> None:
    # In float64, for the range of a row may be more than float32 has.
    rows = rows.double()
    low, high = rows.aminmax(dim=1, keepdim=True)
    scales.copy_(torch.cat([(high - low) / LAST, low], 1))
    scales.masked_fill_(~scales.isfinite().all(1, keepdim=True), float("nan"))
    # By what is kept of them. A row of one number is not divided by its scale of 0.
    scale, bias = scales.double().split(1, 1)
    steps = (rows - bias).div_(torch.where(scale > 0, scale, 1.0))
    quantised.copy_(steps.round_().clamp_(0, LAST).nan_to_num_(0.0))
