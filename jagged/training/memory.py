"""What malloc does with large tensors that are gone."""

from __future__ import annotations

import ctypes

# Of glibc's malloc.h: blocks from this size on are mapped by themselves.
_M_MMAP_THRESHOLD = -3
#: Blocks that go back to the system at once, in bytes.
LARGE_BYTES = 4 * 2**20


def release_large_blocks() -> bool:
    """Have memory of 4 MiB and more go back to the system as soon as its tensor is gone, in this process from now on.

    Batches have a new size each, and glibc's malloc keeps blocks of up to 32 MB in the heap, where the next ones find holes that
    do not fit them. Blocks that are mapped by themselves leave no holes; their pages are made anew, which takes time.

    Returns:
        Whether malloc is glibc's; another one is left as it is.

    Example:
        >>> from jagged.training.memory import release_large_blocks
        >>> done = release_large_blocks()
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES))
