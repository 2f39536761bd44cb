"""The streams between the processes of a run: their names, where they are stored, and what they contain.

rollouts    groups, from the actors to the preprocessor
prepared    prepared groups, from the preprocessor to the trainer; only if the preprocessor is a separate process
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import RunDirectoryError
from pipelinerl.files import write_atomically
from pipelinerl.interfaces import StreamReader, StreamWriter
from pipelinerl.launch.run_directory import RunDirectory
from pipelinerl.schedule import stream_capacity
from pipelinerl.stream.files import FileStore
from pipelinerl.types import Group, Prepared

if TYPE_CHECKING:
    from pipelinerl.stream.redis import RedisStore
    from pipelinerl.stream.redis_server import RedisServer

ROLLOUTS = "rollouts"
PREPARED = "prepared"
PREPARED_AHEAD = 4
"""Capacity of the prepared stream. Small, because fresher groups can no longer replace prepared ones."""
REDIS_PATIENCE_S = 20.0
OWN_REDIS_PATIENCE_S = 10.0
"""How long a lost connection is retried. The run's own server is never restarted: if it ends, the run ends."""


StreamStore: TypeAlias = "FileStore | RedisStore"
"""Named streams. The rules of `stream.files` for opening writers and readers hold for every kind."""


def stream_store(config: RunConfig, run: RunDirectory, redis_url: str | None) -> StreamStore:
    """The store of the run's streams. `redis_url` is the address of the run's own Redis server, if it started one."""
    if config.stream.kind != "redis":
        return FileStore(run.streams)
    from pipelinerl.stream.redis import RedisStore  # noqa: PLC0415 - needs the extra `redis`

    return RedisStore(*redis_of(config, run, redis_url))


class RedisPlace(NamedTuple):
    """The run's Redis server, the prefix of the run's keys there, and how long a lost connection is retried."""

    url: str
    prefix: str
    patience_s: float


def redis_of(config: RunConfig, run: RunDirectory, redis_url: str | None) -> RedisPlace:
    """Where the run's keys are. Their prefix is random, generated once, and kept in the run directory."""
    url = config.stream.url or redis_url
    if url is None:
        raise RunDirectoryError(f"{run.root}: the run's Redis server was not started")
    path = run.streams / "name_in_redis"
    if not path.exists():
        write_atomically(path, f"pipelinerl-{secrets.token_hex(8)}-".encode())
    patience_s = OWN_REDIS_PATIENCE_S if config.stream.url is None else REDIS_PATIENCE_S
    return RedisPlace(url, path.read_text(), patience_s)


@contextmanager
def running_broker(config: RunConfig, run: RunDirectory, address: str | None = None) -> Iterator[RedisServer | None]:
    """Run the run's own Redis server while inside; None if the run needs none. Its data is kept for a resume.

    `address`: where other machines reach this one, if processes there need the server.

    Raises MissingDependencyError if redis-server or its Python library is not installed, StreamError if it does not start.
    """
    if config.stream.kind != "redis" or config.stream.url is not None:
        yield None
        return
    from pipelinerl.stream.redis_server import start_server  # noqa: PLC0415 - as above

    with start_server(run.streams / "redis", durable=True, address=address) as server:
        yield server


def group_writer(store: StreamStore, config: RunConfig, on_drop: Callable[[Group], None]) -> StreamWriter[Group]:
    capacity, when_full = stream_capacity(config), config.stream.when_full
    return store.writer(ROLLOUTS, Group, capacity=capacity, when_full=when_full, on_drop=on_drop)


def group_reader(store: StreamStore) -> StreamReader[Group]:
    return store.reader(ROLLOUTS, Group)


def prepared_writer(store: StreamStore) -> StreamWriter[Prepared]:
    return store.writer(PREPARED, Prepared, capacity=PREPARED_AHEAD, when_full="block", on_drop=None)


def prepared_reader(store: StreamStore) -> StreamReader[Prepared]:
    return store.reader(PREPARED, Prepared)


def rollouts_in_streams(store: StreamStore, config: RunConfig) -> dict[int, int]:
    """Index -> number of rollouts of each group still in a stream, after all processes have ended.

    A group that the preprocessor did not commit counts as waiting, unless it is also in the prepared stream. Known
    overcount: if the preprocessor was killed after writing a group and before committing it, and the trainer has committed
    that group since, it is still counted here. A resume excludes it by the trainer's ledger.
    """
    if config.launch.preprocessor == "with_trainer":
        return {group.index: len(group.rollouts) for group in store.waiting(ROLLOUTS, Group)}
    waiting = {prepared.index: len(prepared.ids) for prepared in store.waiting(PREPARED, Prepared)}
    with closing(prepared_reader(store)) as second, closing(group_reader(store)) as first:
        passed_on = {prepared.index for _, prepared in second.read(sys.maxsize)}
        left = {group.index: len(group.rollouts) for _, group in first.read(sys.maxsize) if group.index not in passed_on}
    return waiting | left
