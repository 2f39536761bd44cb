"""What a run starts besides its own processes: a Redis server, if its streams are to lie in one of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from pipelinerl.config.schema import RunConfig
from pipelinerl.launch.run_directory import RunDirectory


class Broker(Protocol):
    """A server of the streams. It ends with the run, however that ends."""

    @property
    def url(self) -> str: ...

    def failure(self) -> str | None:
        """Why it does not run, in a line; None while it does."""
        ...


@contextmanager
def running_broker(config: RunConfig, run: RunDirectory) -> Iterator[Broker | None]:
    """The run's own Redis, while inside; None if it needs none. What is in it is kept for a resume.

    Raises MissingDependencyError if redis-server or the library is not installed, StreamError if it does not start.
    """
    if config.stream.kind != "redis" or config.stream.url is not None:
        yield None
        return
    from pipelinerl.stream.redis import start_server  # noqa: PLC0415 - needs the extra `redis`

    with start_server(run.streams / "redis", durable=True) as server:
        yield server
