"""The rollouts of a run, to be looked at."""
