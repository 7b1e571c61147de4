"""Linear cross-entropy as Triton kernels: logits live in registers, tile by tile, and each pass computes them again.

A program owns a block of rows or of items and walks the other side. There are no atomics, and parts of a walk are joined in a
fixed order.
"""
