"""The training forward and its losses."""
