"""The `pipelinerl` command: `main` parses the arguments, and each subcommand has a module."""

from pipelinerl.cli.main import main

__all__ = ["main"]
