"""What the client knows of one server: whether it is well, what it holds, and the calls that it has in progress."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from pipelinerl.errors import PipelineRLError
from pipelinerl.remote.adapter import EngineServer
from pipelinerl.remote.bounds import Bounds
from pipelinerl.remote.errors import ServerUnreachableError
from pipelinerl.types import UpdateReceipt
from pipelinerl.wire import ServerInfo

T = TypeVar("T")


class LostError(PipelineRLError):
    """The server that had the request has forgotten it (it was restarted) or is gone. Another one may answer it."""


class Member:
    """One server of several. Everything here happens in one event loop."""

    def __init__(self, server: EngineServer, bounds: Bounds, clock: Callable[[], float]) -> None:
        self.server = server
        self.url = server.url
        self.info: ServerInfo | None = None
        self.gone = False
        self.last_error = "it has not answered yet"
        self.looking: asyncio.Task[None] | None = None
        self._steps_before = 0
        self._bounds = bounds
        self._clock = clock
        self._failing_since_s: float | None = None
        self._refused_since_s: float | None = None
        self._acknowledged: tuple[str, int] | None = None
        self._calls: set[asyncio.Task[Any]] = set()

    @property
    def instance(self) -> str:
        """Of the process that answered last; "" before the first answer."""
        return self.info.instance if self.info else ""

    @property
    def decode_steps(self) -> int:
        """Since it answered first, as of its last answer."""
        return self._steps_before + self.info.decode_steps if self.info else 0

    @property
    def well(self) -> bool:
        """Whether its last answer was good."""
        return self.info is not None and not self.gone and self._failing_since_s is None

    def holds(self, version: int) -> bool:
        """Whether the process that runs there now has acknowledged these weights."""
        return self._acknowledged == (self.instance, version)

    def saw(self, info: ServerInfo) -> None:
        """It answered. If it is another process than before, what the old one had in progress is lost."""
        if self.info is None or info.instance != self.instance:
            self._steps_before += self.info.decode_steps if self.info else -info.decode_steps
            self._lose()
        self.info = info

    def recovered(self) -> None:
        """It is well, and holds the weights that it should."""
        self._failing_since_s = self._refused_since_s = None
        self.gone = False

    def failed(self, error: Exception) -> None:
        """It did not answer, or not as it should."""
        now_s = self._clock()
        self.last_error = str(error)
        self._failing_since_s = now_s if self._failing_since_s is None else self._failing_since_s
        if not (isinstance(error, ServerUnreachableError) and error.refused):
            self._refused_since_s = None
        elif self._refused_since_s is None:
            self._refused_since_s = now_s
        refused_s = 0.0 if self._refused_since_s is None else now_s - self._refused_since_s
        if refused_s >= self._bounds.refused_s or now_s - self._failing_since_s >= self._bounds.silent_s:
            self.gone = True
            self._lose()

    def acknowledged(self, receipt: UpdateReceipt) -> None:
        """It took the weights that the receipt names."""
        self._acknowledged = (self.instance, receipt.version)

    async def call(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. Raises LostError if the server is lost before it is there."""
        task = asyncio.ensure_future(work)
        self._calls.add(task)
        try:
            await asyncio.wait({task})
        finally:
            self._calls.discard(task)
            task.cancel()  # if the caller was cancelled
        if task.cancelled():
            raise LostError(f"engine server {self.url} was lost: {self.last_error}")
        return task.result()

    def _lose(self) -> None:
        for task in self._calls:
            task.cancel()
