"""Environments of the package `verifiers`, unmodified: their prompts, turns, tools and rubrics, over exact token ids.

All modules but `environment` import verifiers, which takes seconds: it does so when an environment is made.
"""
