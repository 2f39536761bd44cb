"""One root exception. What a user can cause has its own class, and a message that says what to do about it."""

from __future__ import annotations


class PipelineRLError(Exception):
    """Root of every error this package raises on purpose. `exit_status` is what the command line exits with."""

    exit_status = 1


class UserError(PipelineRLError):
    """Something in the user's hands is wrong: the message names it and the fix. Exit status 2, no traceback."""

    exit_status = 2


class ConfigError(UserError):
    """A key, value or combination in the run file or on the command line is wrong."""


class MissingDependencyError(UserError):
    """An optional dependency is not installed; the message names the extra to install."""


class ModelLoadError(UserError):
    """The model folder or id can't be loaded."""


class UnsupportedModelError(UserError):
    """The embedded engine can't run this model correctly, so it does not run it."""


class EnvironmentSetupError(UserError):
    """The environment can't be built: unknown name, bad arguments, missing or malformed data."""


class RunDirectoryError(UserError):
    """The run directory is in use, is not a run, or its contents do not fit together."""


class CheckpointError(PipelineRLError):
    """A checkpoint can't be written or read."""


class RequestError(PipelineRLError):
    """One generation request can't be served; other requests are not affected."""


class PromptTooLongError(RequestError):
    """Prompt and completion do not fit into a slot; the message gives the numbers."""


class RolloutError(PipelineRLError):
    """An environment returned something that is not a rollout of what the engine generated."""


class TooManyFailuresError(PipelineRLError):
    """More rollouts failed than the run allows."""


class WeightUpdateError(PipelineRLError):
    """A weight update was not applied exactly: wrong layout, wrong checksum, or no answer in time."""


class StreamError(PipelineRLError):
    """A stream's files are damaged beyond a torn last record, or its Redis server is gone or has lost what was in it."""


class PolicyMismatchError(PipelineRLError):
    """Engine and trainer disagree on log-probabilities of tokens sampled by the very weights being trained."""


class TrainingDivergedError(PipelineRLError):
    """The loss, a gradient or a weight is not a finite number. Nothing of it was published."""


class LogitsError(TrainingDivergedError):
    """The logits of an engine are not finite numbers, so nothing can be sampled from them: its weights are broken."""


class StalledError(PipelineRLError):
    """Nothing moved for longer than the watchdog allows; the message says who waits on whom."""

    exit_status = 3


class StageDiedError(PipelineRLError):
    """A process of the run ended before the run did."""

    exit_status = 4


class RunInterruptedError(PipelineRLError):
    """The user asked the run to stop; a checkpoint was written."""

    exit_status = 130
