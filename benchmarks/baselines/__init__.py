"""What DSpark is compared with."""
