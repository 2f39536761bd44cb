"""The `pipelinerl` command: `main` reads the arguments, a module of this package per subcommand does what they ask."""

from pipelinerl.cli.main import main

__all__ = ["main"]
