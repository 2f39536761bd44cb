"""The run file: its schema, loading it with command-line flags on top, checking it, and printing it with its docs.

Imports neither torch nor transformers, so that a mistake in a run file is told at once.
"""

from pipelinerl.config.checks import check
from pipelinerl.config.document import config_to_yaml, render
from pipelinerl.config.load import config_from_yaml, load_config, validate
from pipelinerl.config.schema import (
    ActorConfig,
    CorrectionConfig,
    EngineConfig,
    EnvironmentConfig,
    EvaluationConfig,
    LaunchConfig,
    MetricsConfig,
    ModelConfig,
    PreprocessConfig,
    RunConfig,
    ScheduleConfig,
    StreamConfig,
    TrainerConfig,
    WeightsConfig,
)

__all__ = [
    "ActorConfig",
    "CorrectionConfig",
    "EngineConfig",
    "EnvironmentConfig",
    "EvaluationConfig",
    "LaunchConfig",
    "MetricsConfig",
    "ModelConfig",
    "PreprocessConfig",
    "RunConfig",
    "ScheduleConfig",
    "StreamConfig",
    "TrainerConfig",
    "WeightsConfig",
    "check",
    "config_from_yaml",
    "config_to_yaml",
    "load_config",
    "render",
    "validate",
]
