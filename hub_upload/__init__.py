"""Packaging of drafters for the Hub."""
