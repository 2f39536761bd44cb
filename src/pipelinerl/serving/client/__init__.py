"""Engines behind HTTP, as one engine."""
