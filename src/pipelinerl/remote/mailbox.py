"""What the servers produced, on its way from the event loop's thread to the one that steps the engine."""

from __future__ import annotations

import threading

from pipelinerl.errors import PipelineRLError
from pipelinerl.interfaces import StepOutput
from pipelinerl.types import Completion, TokenEvent


class Mailbox:
    """Put from one thread, taken from another. After `fail`, `take` raises that error for ever."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._tokens: list[TokenEvent] = []
        self._finished: list[Completion] = []
        self._failed: list[tuple[str, PipelineRLError]] = []
        self._error: BaseException | None = None

    def put_token(self, event: TokenEvent) -> None:
        with self._changed:
            self._tokens.append(event)
            self._changed.notify()

    def put_completion(self, completion: Completion) -> None:
        with self._changed:
            self._finished.append(completion)
            self._changed.notify()

    def put_failure(self, request_id: str, error: PipelineRLError) -> None:
        """Of this request alone."""
        with self._changed:
            self._failed.append((request_id, error))
            self._changed.notify()

    def fail(self, error: BaseException) -> None:
        """The first error counts."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify()

    def check(self) -> None:
        """Raises the error, if there is one."""
        if self._error is not None:
            raise self._error

    def take(self, timeout_s: float) -> StepOutput:
        """All that came since the last call; waits up to `timeout_s` for something to come."""
        with self._changed:
            self._changed.wait_for(lambda: self._tokens or self._finished or self._failed or self._error, timeout_s)
            self.check()
            output = StepOutput(self._tokens, self._finished, self._failed)
            self._tokens, self._finished, self._failed = [], [], []
            return output
