"""From conversations to batches of packed blocks."""
