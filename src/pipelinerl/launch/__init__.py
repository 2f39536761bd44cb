"""From a configuration to a finished run: the only place that names concrete classes of every stage."""

from pipelinerl.launch.run import train

__all__ = ["train"]
