"""Metric modules for the library `evaluate`: `evaluate.load("training/evaluation/metrics/speculative_acceptance")`."""
