"""Sums, products and differences of jagged tensors, with dense operands a sample."""
