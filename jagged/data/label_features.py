"""What labels are like, by the features of the rows that have them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from jagged.data.progress import DELAY, disabled
from jagged.data.xmc import MultiLabelRows

# Features and labels of the rows that are looked at together.
_FEATURES, _PAIRS = 1 << 22, 1 << 18


def label_embeddings(
    rows: MultiLabelRows,
    dim: int = 256,
    *,
    seed: int = 0,
    device: torch.device | str | None = None,
    progress: bool = False,
) -> Tensor:
    """Return the sum of the features of the rows that have each label, every row's of length 1, projected to a smaller width.

    `jagged.modules.group_by_embedding` groups labels by them. Where there are more features than `dim`, each one adds plus or
    minus its value to every place of the result, by signs that are drawn once: angles stay about as they are.

    Args:
        rows: of training.
        dim: width of the result where there are more features than that.
        seed: of the projection.
        device: where the work is done, and the result lies.
        progress: show a bar after two seconds.

    Returns:
        `[L, min(dim, D)]`, float32; zero for a label that no row has.

    Source:
        Random signs: Achlioptas, Database-friendly random projections, 2003. Labels by the mean of their rows' features: as in
        trees of labels, Prabhu and others, Parabel, WWW 2018.

    Example:
        >>> from jagged.data import label_embeddings, synthetic_labels
        >>> rows, _, _ = synthetic_labels(num_rows=50, num_test_rows=1, num_labels=20, num_features=100, num_groups=5)
        >>> label_embeddings(rows, dim=16).shape
        torch.Size([20, 16])
    """
    device = torch.device("cpu") if device is None else torch.device(device)
    width = min(dim, rows.num_features)
    found = torch.zeros(rows.num_labels, width, device=device)
    if rows.num_features <= dim:
        table = torch.eye(rows.num_features, device=device)
    else:
        generator = torch.Generator().manual_seed(seed)
        signs = torch.randint(2, (rows.num_features, width), generator=generator, dtype=torch.int8)
        table = signs.to(device).float().mul_(2).sub_(1).mul_(width**-0.5)
    begin = 0
    with tqdm(total=len(rows), desc="Embedding labels", unit="row", disable=disabled(progress), delay=DELAY, leave=False) as bar:
        while begin < len(rows):
            end = begin + 1
            for offsets, most in ((rows.feature_offsets, _FEATURES), (rows.label_offsets, _PAIRS)):
                fits = int(np.searchsorted(offsets, offsets[begin] + most, side="right")) - 1
                end = fits if offsets is rows.feature_offsets else min(end, fits)
            end = min(max(end, begin + 1), len(rows))
            _add(found, table, rows.take(np.arange(begin, end)), device)
            bar.update(end - begin)
            begin = end
    return found


def _add(found: Tensor, table: Tensor, some: MultiLabelRows, device: torch.device) -> None:
    values, offsets = torch.from_numpy(some.feature_values).to(device), torch.from_numpy(some.feature_offsets).to(device)
    lengths = torch.segment_reduce(values.square(), "sum", offsets=offsets, initial=0).sqrt()
    row = torch.repeat_interleave(offsets.diff())
    scaled = values / lengths.clamp(min=torch.finfo(torch.float32).tiny)[row]
    ids = torch.from_numpy(some.feature_ids).to(device)
    hidden = torch.nn.functional.embedding_bag(ids.long(), table, offsets[:-1], mode="sum", per_sample_weights=scaled)
    of = torch.repeat_interleave(torch.from_numpy(np.diff(some.label_offsets)).to(device))
    found.index_add_(0, torch.from_numpy(some.labels).to(device).long(), hidden[of])
