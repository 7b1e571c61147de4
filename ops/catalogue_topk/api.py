"""Public top-k over a catalogue: the best items of each row by inner product, from hidden states and item weights."""

from __future__ import annotations

import torch
from torch import Tensor

from jagged.ops._shared.validation import FLOATS, check_offsets, check_tensor, holds
from jagged.ops.catalogue_topk.spec import CATALOGUE_TOPK, Inputs, Options

#: Bound on the memory that grows with rows times items.
DEFAULT_MAX_BYTES = 256 * 2**20
_MIN_BYTES = 64 * 2**10
_HALVES = (torch.bfloat16, torch.float16)


def catalogue_topk(
    hidden: Tensor,
    weight: Tensor,
    k: int,
    *,
    exclude: tuple[Tensor, Tensor] | None = None,
    bias: Tensor | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """The k best items of each row by `hidden @ weight.T + bias`, without the logits matrix in memory. Deterministic.

    Higher scores come first, and among equal scores smaller ids; -0.0 equals 0.0, and NaN comes after every number, -inf
    included. No gradient flows: inputs that require one are taken as they are and the outputs require none.

    Args:
        hidden: `[N, D]`, float32, bfloat16, float16 or float64 (computed by PyTorch on every device).
        weight: `[V, D]`, the dtype of hidden; with float32 hidden states also bfloat16 or float16, converted tile by tile.
            `torch.autocast` has no say.
        k: how many items, at least 1; may exceed V.
        exclude: ids `[M]` and offsets `[N + 1]`, int32 or int64: items that a row must not get, such as its history. Ids may
            be in any order and repeat; those that are no items have no effect.
        bias: `[V]`, added to the scores; any of the dtypes above.
        max_bytes: bound on the memory that grows with rows times items, at least 64 KiB; one row's share is always taken.
        backend: `"torch"`, `"triton"`, or None to choose by device.

    Returns:
        Scores `[N, k]`, float32 (float64 for float64), and ids `[N, k]`, int64. Where fewer than k items are left a row ends
        in scores -inf and ids -1.

    Raises:
        ValueError: shapes that do not fit, tensors on different devices, k or max_bytes out of range, an unknown backend; on a
            CPU, elsewhere with `JAGGED_VALIDATE=1`, also wrong offsets.
        TypeError: dtypes other than those above.

    Source:
        The k best items lie in the k tiles of items with the largest maxima, as in Chern et al., TPU-KNN: K Nearest Neighbor
        Search at Peak FLOP/s, NeurIPS 2022, whose one item a tile is here all of them, so that the result is exact.

    Example:
        >>> import torch
        >>> from jagged.ops import catalogue_topk
        >>> hidden = torch.tensor([[1.0], [-1.0]])
        >>> item_weight = torch.tensor([[0.5], [2.0], [1.0], [2.0]])
        >>> history = torch.tensor([1, 0, 2]), torch.tensor([0, 1, 3])
        >>> scores, ids = catalogue_topk(hidden, item_weight, 3, exclude=history)
        >>> ids
        tensor([[ 3,  2,  0],
                [ 1,  3, -1]])
    """
    check_tensor("hidden", hidden, "[N, D]", FLOATS)
    check_tensor("weight", weight, "[V, D]", FLOATS)
    if weight.shape[1] != hidden.shape[1]:
        raise ValueError(
            f"weight: expected shape [V, {hidden.shape[1]}], as wide as hidden {list(hidden.shape)}, got {list(weight.shape)}"
        )
    if not holds(weight.shape[0] < 2**31):
        raise ValueError(f"weight: expected fewer than 2^31 items, got {weight.shape[0]}; split the catalogue and merge the best")
    if weight.dtype != hidden.dtype and not (hidden.dtype == torch.float32 and weight.dtype in _HALVES):
        raise TypeError(
            f"weight: expected the dtype of hidden, {hidden.dtype}, got {weight.dtype}; cast one with .to(...), or give float32 "
            "hidden states with bfloat16 or float16 weights"
        )
    if not isinstance(k, int) or k < 1:
        raise ValueError(f"k: expected a whole number of at least 1, got {k!r}")
    if max_bytes < _MIN_BYTES:
        raise ValueError(f"max_bytes: expected at least {_MIN_BYTES} (64 KiB), got {max_bytes}")
    given = [("weight", weight)]
    if bias is not None:
        check_tensor("bias", bias, "[V]", FLOATS)
        if not holds(bias.shape[0] == weight.shape[0]):
            raise ValueError(f"bias: expected shape [{weight.shape[0]}], one number per item, got {list(bias.shape)}")
        given.append(("bias", bias))
    ids, offsets = None, None
    if exclude is not None:
        if not isinstance(exclude, (tuple, list)) or len(exclude) != 2:
            raise TypeError(f"exclude: expected a pair of ids [M] and offsets [N + 1], got {type(exclude).__name__}")
        ids, offsets = exclude
        check_tensor("exclude ids", ids, "[M]", (torch.int64, torch.int32))
        check_offsets(offsets, hidden, "exclude offsets", ids.shape[0])
        if not holds(offsets.shape[0] == hidden.shape[0] + 1):
            raise ValueError(
                f"exclude offsets: expected shape [{hidden.shape[0] + 1}], one more than hidden has rows, "
                f"got {list(offsets.shape)}"
            )
        given.append(("exclude ids", ids))
    for name, tensor in given:
        if tensor.device != hidden.device:
            raise ValueError(f"{name}: expected the device of hidden, {hidden.device}, got {tensor.device}; move one of them")
    inputs = Inputs(hidden.detach(), weight.detach(), None if bias is None else bias.detach(), ids, offsets)
    best = CATALOGUE_TOPK(inputs, Options(k, max_bytes), backend)
    return best.scores, best.ids
