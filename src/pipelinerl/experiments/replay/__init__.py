"""Repeats a run from its records: training to the bit, generation within a tolerance, and training with other settings."""
