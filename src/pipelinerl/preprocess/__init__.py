"""Turns finished groups into training samples: advantages, joined turns, filters with counts."""
