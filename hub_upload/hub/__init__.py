"""Push a package to the Hub, and verify it there."""
