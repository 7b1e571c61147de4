"""Softmax over samples' rows, and over the rows or columns of samples' blocks."""
