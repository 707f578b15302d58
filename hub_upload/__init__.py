"""Drafters for the Hub: convert, card, package, push, verify."""
