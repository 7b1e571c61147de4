"""Arithmetic of launches in plain integers: Triton's own functions, which kernels may call too, take the host microseconds."""


def cdiv(size: int, block: int) -> int:
    """Return how many blocks cover a size."""
    return -(-size // block)


def next_power_of_2(size: int) -> int:
    """Return the smallest power of two that is at least `size`, and at least 1."""
    return 1 << max(size - 1, 0).bit_length()
