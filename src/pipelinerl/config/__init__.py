"""The run file: its schema, loading it with command-line flags on top, checking it, and printing it with its docs.

Imports neither torch nor transformers, so that a mistake in a run file is told at once.
"""

from pipelinerl.config.keys import config_to_yaml, json_schema, render
from pipelinerl.config.load import config_from_yaml, load_config, validate, with_flags
from pipelinerl.config.schema import RunConfig

__all__ = [
    "RunConfig",
    "config_from_yaml",
    "config_to_yaml",
    "json_schema",
    "load_config",
    "render",
    "validate",
    "with_flags",
]
