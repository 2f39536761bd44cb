"""What a server answers instead of what it was asked for."""

from __future__ import annotations

from pipelinerl.errors import PipelineRLError
from pipelinerl.wire import ErrorCode


class RefusedError(PipelineRLError):
    """One request is turned down, with one of the wire's codes; `retry_after_s` says when to ask again, if ever."""

    def __init__(self, code: ErrorCode, message: str, *, retry_after_s: int | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after_s = retry_after_s
        self.param = param


def unavailable(reason: str) -> RefusedError:
    """Not now: the server starts, stops or has failed."""
    return RefusedError("unavailable", reason, retry_after_s=5)
