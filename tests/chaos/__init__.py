"""Real runs with faults from a seed, and the invariants that their records must keep (docs/reliability.md)."""
