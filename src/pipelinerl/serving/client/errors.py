"""What goes wrong with an engine server. What is wrong with a request or an update alone is in `pipelinerl.errors`."""

from __future__ import annotations

from typing import NamedTuple

from pipelinerl.errors import PipelineRLError


class ServerError(PipelineRLError):
    """A server can't be used as it is: wrong key, wrong address, or an answer that is not what was agreed.

    Asking again would not help. `url` names the server; the message names it too.
    """

    def __init__(self, url: str, problem: str) -> None:
        super().__init__(f"engine server {url} {problem}")
        self.url = url
        self.problem = problem


class ServerUnreachableError(ServerError):
    """No connection, a broken one, or no answer in time. The server may have the request: ask the same one again.

    `refused`: nothing listens there, so the process that may have had the request is gone, or going.
    """

    def __init__(self, url: str, problem: str, *, refused: bool = False) -> None:
        super().__init__(url, problem)
        self.refused = refused


class ServerBusyError(ServerError):
    """The server did not take the request (429, 503 or another 5xx). `retry_after_s`: when it asks to be asked again."""

    def __init__(self, url: str, problem: str, retry_after_s: float | None = None) -> None:
        super().__init__(url, problem)
        self.retry_after_s = retry_after_s


class EngineUnavailableError(PipelineRLError):
    """No engine server is left that could serve requests; the message names each and its last error."""


# ------------------------------------------------------------------------------------------------------------------------
# How long the client waits, and for what.


class Bounds(NamedTuple):
    """In seconds, but for `tries`.

    A server is gone when it has failed for `silent_s`, or when nothing has listened at its address for `refused_s`.
    """

    startup_s: float = 180.0
    """For all servers to answer at first."""
    health_every_s: float = 2.0
    refused_s: float = 3.0
    silent_s: float = 30.0
    join_s: float = 120.0
    """For all servers and the trainer to become a group, if weights are broadcast."""
    update_s: float = 120.0
    """For a server to take new weights."""
    overload_s: float = 600.0
    """For servers that are well to take a request which they refuse for now; then the engine fails."""
    cancel_s: float = 5.0
    """For a server to let go of a cancelled request; then the connection is closed."""
    tries: int = 40
    """How often one request may be without an answer at servers that are well; then the engine fails."""


def back_off_s(failures: int) -> float:
    """How long to wait after so many failures in a row (1, 2, ...): 0.05 s, doubled each time, up to 2 s."""
    return min(2.0, 0.05 * 2.0 ** (min(failures, 10) - 1))
