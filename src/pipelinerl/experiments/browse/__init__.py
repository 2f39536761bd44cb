"""Browse, search and export the rollouts of a run."""
