"""Measurements: one file per op family and one per end-to-end job. Run as `python -m benchmarks.<name>` from the root."""
