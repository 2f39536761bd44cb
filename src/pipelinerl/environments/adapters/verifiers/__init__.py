"""Environments of the package `verifiers`, unmodified: their prompts, turns, tools and rubrics, with exact token ids.

All modules except `environment` import verifiers, which takes seconds, so they are imported when an environment is built.
"""
