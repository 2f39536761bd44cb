"""Errors of engine servers, and the client's timeouts. Errors of one request or update are in `pipelinerl.errors`."""

from __future__ import annotations

from typing import NamedTuple

from pipelinerl.errors import PipelineRLError


class ServerError(PipelineRLError):
    """A server can't be used as it is: wrong key, wrong address, or an answer that violates the protocol.

    A retry would not help. The message begins with `url`, the server's address.
    """

    def __init__(self, url: str, problem: str) -> None:
        super().__init__(f"engine server {url} {problem}")
        self.url = url
        self.problem = problem


class ServerUnreachableError(ServerError):
    """No connection, a broken one, or no answer in time. The server may have the request: retry at the same server.

    `refused`: nothing listens at the address, so the process that may have had the request has exited or is exiting.
    """

    def __init__(self, url: str, problem: str, *, refused: bool = False) -> None:
        super().__init__(url, problem)
        self.refused = refused


class ServerBusyError(ServerError):
    """The server did not accept the request (429, 503 or another 5xx). `retry_after_s`: its Retry-After, if it gave one."""

    def __init__(self, url: str, problem: str, retry_after_s: float | None = None) -> None:
        super().__init__(url, problem)
        self.retry_after_s = retry_after_s


class EngineUnavailableError(PipelineRLError):
    """No engine server can serve requests; the message names each server and its last error."""


# ---- timeouts and limits of the client


class Bounds(NamedTuple):
    """Timeouts in seconds, and `tries`.

    A server is gone when it has failed for `silent_s`, or when nothing has listened at its address for `refused_s`.
    """

    startup_s: float = 180.0
    """For all servers to answer for the first time."""
    health_every_s: float = 2.0
    refused_s: float = 3.0
    silent_s: float = 30.0
    alone_s: float = 0.0
    """How long all servers may be gone; then the engine fails. Above 0, they are expected to be started again."""
    join_s: float = 120.0
    """For all servers and the trainer to form a group, if weights are broadcast."""
    update_s: float = 120.0
    """For a server to apply new weights."""
    overload_s: float = 600.0
    """How long healthy servers may answer one request with "busy"; then the engine fails."""
    cancel_s: float = 5.0
    """For a server to end a cancelled request; then the connection is closed."""
    tries: int = 40
    """How often one request may go unanswered; then the engine fails."""


def back_off_s(failures: int) -> float:
    """Pause after this many consecutive failures (1, 2, ...): 0.05 s, doubled each time, up to 2 s."""
    return min(2.0, 0.05 * 2.0 ** (min(failures, 10) - 1))
