"""What an error means for the attempt that raised it, and where it was raised in the user's files."""

from __future__ import annotations

import re
import sysconfig
import traceback
from asyncio import events
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from pipelinerl.errors import CodeDeadlineError, PromptTooLongError, RolloutError

if TYPE_CHECKING:
    from pipelinerl.actor.rollouts import Failure, FailureReason

NOT_USER_CODE = (
    str(Path(__file__).parents[1]),
    *(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    "<",
)
"""Paths of code that is not the user's: this package, the standard library, installed packages."""
FRAME = re.compile(r'^  File "(.+)", line .*(?:\n    .*)*', re.MULTILINE)


def explain(error: BaseException, reason: FailureReason | None = None, message: str = "") -> tuple[FailureReason, str, str]:
    """The reason, message and traceback of an attempt's Failure, with this `reason` and `message` if they are known.

    In an exception group, a deadline error takes precedence, then a too long prompt.
    """
    trace = "".join(traceback.format_exception(error)).rstrip()
    if reason is not None:
        return reason, message, trace
    parts = list(_leaves(error))
    for part in parts:
        if isinstance(part, CodeDeadlineError):
            return "timeout", str(part), trace
    for part in parts:
        if isinstance(part, PromptTooLongError):
            return "prompt_too_long", str(part), ""
    if isinstance(error, RolloutError):
        return "bad_rollout", str(error), ""
    if isinstance(error, TimeoutError) and str(error):  # a user function that exceeded its time limit
        return "timeout", str(error), trace
    return "raised", traceback.format_exception_only(error)[-1].strip(), trace


def line_of(failure: Failure) -> str:
    """The reason, the message, and where the user's code was, in one line."""
    frames = user_frames(failure.traceback)
    return f"{failure.reason}: {failure.message}" + (f" ({frames[-1].splitlines()[0].strip()})" if frames else "")


def user_frames(trace: str) -> list[str]:
    """The frames of the user's files in a traceback, outermost first."""
    return [frame[0] for frame in FRAME.finditer(trace) if not frame[1].startswith(NOT_USER_CODE)]


def place_of(frame: FrameType | None, caller: str) -> str:
    """Where user code is, as `in Task.reward (task.py, line 9)`: its outermost frame, or without one the innermost frame.

    Frames of the file `caller` or of asyncio, and outside them, are not looked at.
    """
    place = frame
    while frame is not None and frame.f_code.co_filename not in (caller, events.__file__):
        if not frame.f_code.co_filename.startswith(NOT_USER_CODE):
            place = frame
        frame = frame.f_back
    if place is None:
        return "in no Python code"
    code = place.f_code
    return f"in {code.co_qualname} ({Path(code.co_filename).name}, line {place.f_lineno})"


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            yield from _leaves(part)
    else:
        yield error
