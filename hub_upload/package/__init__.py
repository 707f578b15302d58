"""A folder that loads with one line."""
