"""Exceptions of the package. Errors that a user can cause have their own class and a message that names the fix."""

from __future__ import annotations

import msgspec

INVALID_DATA = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec's decoders raise: for the wrong form or type, for text that is not UTF-8, and for too deep nesting."""


class PipelineRLError(Exception):
    """Base class of the errors that this package raises. `exit_status` is the exit status of the command line."""

    exit_status = 1


class UserError(PipelineRLError):
    """An error the user can fix: the message names the cause and the fix. Exit status 2, no traceback."""

    exit_status = 2


class ConfigError(UserError):
    """A key, value or combination in the run file or on the command line is wrong."""


class MissingDependencyError(UserError):
    """An optional dependency is not installed; the message names the extra to install."""


class ModelLoadError(UserError):
    """The model folder or id can't be loaded."""


class UnsupportedModelError(UserError):
    """The embedded engine refuses this model because it can't run it correctly."""


class EnvironmentSetupError(UserError):
    """The environment can't be built: unknown name, bad arguments, missing or malformed data."""


class RunDirectoryError(UserError):
    """The run directory is in use, is not a run, or its contents are inconsistent."""


class ReplacedError(RunDirectoryError):
    """This process was stopped or cut off, and a later session of its run has begun: it must not write any more."""


class CheckpointError(PipelineRLError):
    """A checkpoint can't be written or read."""


class RequestError(PipelineRLError):
    """One generation request can't be served; other requests are not affected."""


class PromptTooLongError(RequestError):
    """Prompt and completion do not fit into a slot; the message gives the numbers."""


class RolloutError(PipelineRLError):
    """An environment returned an invalid rollout, or a rollout that differs from the generated tokens."""


class TooManyFailuresError(PipelineRLError):
    """More rollouts failed than the run allows."""


class WeightUpdateError(PipelineRLError):
    """A weight update was not applied exactly: wrong layout, wrong checksum, or no receipt in time."""


class StaleEpochError(WeightUpdateError):
    """The weights are of a session that a later one has replaced."""


class BroadcastEndedError(WeightUpdateError):
    """A member of a weight broadcast is lost, or the sender has ended it because of an error. The message has the cause."""


class StreamError(PipelineRLError):
    """A stream's files are damaged (beyond a partial last record), or its Redis server is unreachable or has lost data."""


class PolicyMismatchError(PipelineRLError):
    """Engine and trainer disagree on the log-probs of tokens sampled with the same weights that are being trained."""


class TrainingDivergedError(PipelineRLError):
    """The loss, a gradient or a weight is not finite. Such weights were not published."""

    exit_status = 5


class LogitsError(TrainingDivergedError):
    """An engine's logits are not finite, so no token can be sampled: its weights are broken."""


class ReplayDifferenceError(PipelineRLError):
    """A replay did not repeat what the run recorded; the message names the first step and parameter, rollout or token."""


class StalledError(PipelineRLError):
    """No progress for longer than the watchdog allows; the message says which stage waits for which."""

    exit_status = 3


class StageDiedError(PipelineRLError):
    """A process of the run exited before the run ended."""

    exit_status = 4


class CrashLoopError(StageDiedError):
    """A process of the run died more often than `launch.restarts` allows; the message has all its exit reports."""


class RankLostError(StageDiedError):
    """A process of a sharded trainer noticed that another one has ended, or is silent. The message names its rank."""


class RunInterruptedError(PipelineRLError):
    """The user asked the run to stop; a checkpoint was written."""

    exit_status = 130


class StopRun(Exception):  # noqa: N818 - a request, not an error
    """A callback raises it to end the run after its current step: `raise StopRun("no gain in 5 evaluations")`."""


def first_line(error: Exception) -> str:
    """The message without what follows its first line, such as PyTorch's C++ stack trace; the type if there is none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
