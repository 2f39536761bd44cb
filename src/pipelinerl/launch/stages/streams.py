"""The streams between the processes of a run: their names, where they are stored, and what they contain.

rollouts    groups, from the actors to the preprocessor
prepared    prepared groups, from the preprocessor to the trainer; only if the preprocessor is a separate process
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import RunDirectoryError
from pipelinerl.interfaces import StreamReader, StreamWriter
from pipelinerl.launch.run_directory import RunDirectory
from pipelinerl.schedule import stream_capacity
from pipelinerl.stream.files import FileStore
from pipelinerl.types import Group, Prepared

if TYPE_CHECKING:
    from pipelinerl.stream.redis import RedisStore

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
    """Where the run's keys are. `run_lock.choose_name_in_redis` has chosen their prefix."""
    url = config.stream.url or redis_url
    if url is None:
        raise RunDirectoryError(f"{run.root}: the run's Redis server was not started")
    patience_s = OWN_REDIS_PATIENCE_S if config.stream.url is None else REDIS_PATIENCE_S
    return RedisPlace(url, name_in_redis(run).read_text().partition("\n")[0], patience_s)


def name_in_redis(run: RunDirectory) -> Path:
    """The file with the prefix of the run's keys. Later lines are earlier ones (see `fence.take_over_keys`)."""
    return run.streams / "name_in_redis"


def group_writer(store: StreamStore, config: RunConfig, on_drop: Callable[[Group], None]) -> StreamWriter[Group]:
    capacity, when_full = stream_capacity(config), config.stream.when_full
    return store.writer(ROLLOUTS, Group, capacity=capacity, when_full=when_full, on_drop=on_drop)


def group_reader(store: StreamStore) -> StreamReader[Group]:
    return store.reader(ROLLOUTS, Group)


def prepared_writer(store: StreamStore) -> StreamWriter[Prepared]:
    return store.writer(PREPARED, Prepared, capacity=PREPARED_AHEAD, when_full="block", on_drop=None)


def prepared_reader(store: StreamStore) -> StreamReader[Prepared]:
    return store.reader(PREPARED, Prepared)
