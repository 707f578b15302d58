"""Metric modules for the library `evaluate`: `evaluate.load("training/metrics/speculative_acceptance")`."""
