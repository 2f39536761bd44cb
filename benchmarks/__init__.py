"""Measurements of this machine, as ratios between systems measured alternately in one process. See docs/benchmarks.md."""
