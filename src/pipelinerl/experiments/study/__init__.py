"""Experiments on what a run saved: how far in-flight weight updates take the data from the policy being trained."""
