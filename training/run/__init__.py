"""One training run: its options, its beginning, its course."""
