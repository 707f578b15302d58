"""Answers of the target to prompts, in process or by a server."""
