"""Sampled cross-entropy as Triton kernels, deterministic and without floating-point atomics."""
