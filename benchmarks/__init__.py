"""Ratios, never seconds: ``python -m benchmarks``."""
