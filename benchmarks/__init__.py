"""Measurements and the demo: `python -m benchmarks.demo`."""
