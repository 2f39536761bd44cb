"""Runs environments' rollouts, keeps the engine full, and writes finished groups to the stream."""
