"""Between torchrec's JaggedTensor and the tensors that ops take."""

from __future__ import annotations

from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor


def with_values(like: JaggedTensor, values: Tensor) -> JaggedTensor:
    """Return a JaggedTensor of new values over the samples of another; lengths and offsets are shared.

    Args:
        like: gives lengths and offsets.
        values: `[sum L, *F]`.
    """
    return JaggedTensor(values=values, lengths=like.lengths_or_none(), offsets=like.offsets_or_none())
