"""Checkpoints of other projects, read as this project's."""
