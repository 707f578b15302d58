"""Recorded rounds, and what calibrates a confidence head on them."""
