"""Attention as Triton kernels: FlashAttention-2's tiling over a jagged batch, and a backward of two passes without
floating-point atomics.

A program owns a tile of rows of one sample and one head. Key tiles that every row sees whole are visited without a mask; the few
at the edges of what is seen come after them, with one.
"""
