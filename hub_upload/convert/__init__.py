"""Convert checkpoints between formats."""
