"""Measurements of this machine, as ratios between systems that take turns in one process. See docs/benchmarks.md."""
