"""Reinforcement learning for language models with in-flight weight updates (the PipelineRL method)."""

__version__ = "0.1.0"
