"""What goes wrong with an engine server. What is wrong with a request or an update alone is in `pipelinerl.errors`."""

from __future__ import annotations

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
