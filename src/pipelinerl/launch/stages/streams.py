"""The streams between the processes of a run: which there are, where they lie, and what is in them.

rollouts    groups, from the actors to the preprocessor
prepared    prepared groups, from the preprocessor to the trainer; only where that is a process of its own
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable
from contextlib import closing
from typing import Literal, Protocol, TypeVar

from pipelinerl.config.checks import groups_needed
from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import RunDirectoryError
from pipelinerl.files import write_atomically
from pipelinerl.interfaces import StreamReader, StreamWriter
from pipelinerl.launch.run_directory import RunDirectory
from pipelinerl.preprocess.preprocessor import Prepared
from pipelinerl.stream import FileStreamReader, FileStreamWriter, rewind
from pipelinerl.stream.waiting import waiting_items
from pipelinerl.types import Group

# ------------------------------------------------------------------------------------------------------------------------
# How many groups may wait in the rollout stream.


def stream_capacity(config: RunConfig) -> int:
    """`stream.capacity`, or twice what the trainer takes at once: a batch being read and the next being made."""
    return config.stream.capacity or 2 * groups_needed(config)


T = TypeVar("T")
WhenFull = Literal["block", "drop_oldest"]

ROLLOUTS = "rollouts"
PREPARED = "prepared"
PREPARED_AHEAD = 4
"""Most prepared groups that wait for the trainer. Few: fresher data can't replace them any more."""
REDIS_PATIENCE_S = 20.0
OWN_REDIS_PATIENCE_S = 10.0
"""How long a lost connection is tried again. The run's own server does not come back: its end is the run's."""


class StreamStore(Protocol):
    """Where streams lie, by name. Ends are opened as `stream.files` says, whatever the kind."""

    def writer(
        self, name: str, item_type: type[T], *, capacity: int, when_full: WhenFull, on_drop: Callable[[T], None] | None
    ) -> StreamWriter[T]: ...

    def reader(self, name: str, item_type: type[T]) -> StreamReader[T]: ...

    def waiting(self, name: str, item_type: type[T]) -> list[T]:
        """What was written and neither taken nor dropped, oldest first."""
        ...

    def rewind(self, name: str, item_type: type[T], from_offset: int, keep: Callable[[T], bool]) -> list[T]:
        """Take the stream back, before either end is opened; see `stream.rewind`."""
        ...


class FileStore:
    """In the run directory."""

    def __init__(self, run: RunDirectory) -> None:
        self._streams = run.streams

    def writer(
        self, name: str, item_type: type[T], *, capacity: int, when_full: WhenFull, on_drop: Callable[[T], None] | None
    ) -> StreamWriter[T]:
        return FileStreamWriter(self._streams / name, item_type, capacity=capacity, when_full=when_full, on_drop=on_drop)

    def reader(self, name: str, item_type: type[T]) -> StreamReader[T]:
        return FileStreamReader(self._streams / name, item_type)

    def waiting(self, name: str, item_type: type[T]) -> list[T]:
        return waiting_items(self._streams / name, item_type)

    def rewind(self, name: str, item_type: type[T], from_offset: int, keep: Callable[[T], bool]) -> list[T]:
        return rewind(self._streams / name, item_type, from_offset, keep)


class RedisStore:
    """In Redis, under a name that no other run has."""

    def __init__(self, url: str, prefix: str, patience_s: float) -> None:
        """`patience_s`: how long a lost connection is tried again."""
        self._url = url
        self._prefix = prefix
        self._patience_s = patience_s

    def writer(
        self, name: str, item_type: type[T], *, capacity: int, when_full: WhenFull, on_drop: Callable[[T], None] | None
    ) -> StreamWriter[T]:
        from pipelinerl.stream.redis import RedisStreamWriter  # noqa: PLC0415 - needs the extra `redis`

        return RedisStreamWriter(
            self._url,
            self._prefix + name,
            item_type,
            capacity=capacity,
            when_full=when_full,
            on_drop=on_drop,
            patience_s=self._patience_s,
        )

    def reader(self, name: str, item_type: type[T]) -> StreamReader[T]:
        from pipelinerl.stream.redis import RedisStreamReader  # noqa: PLC0415 - as above

        return RedisStreamReader(self._url, self._prefix + name, item_type, patience_s=self._patience_s)

    def waiting(self, name: str, item_type: type[T]) -> list[T]:
        from pipelinerl.stream.redis import waiting_in_redis  # noqa: PLC0415 - as above

        return waiting_in_redis(self._url, self._prefix + name, item_type)

    def rewind(self, name: str, item_type: type[T], from_offset: int, keep: Callable[[T], bool]) -> list[T]:
        from pipelinerl.stream.redis import rewind_stream  # noqa: PLC0415 - as above

        return rewind_stream(self._url, self._prefix + name, item_type, from_offset, keep)


def stream_store(config: RunConfig, run: RunDirectory, redis_url: str | None) -> StreamStore:
    """Where the run's streams lie. `redis_url` is that of the server which the run has started, if it has."""
    if config.stream.kind == "redis":
        if config.stream.url is not None:
            return RedisStore(config.stream.url, _prefix(run), REDIS_PATIENCE_S)
        if redis_url is None:
            raise RunDirectoryError(f"{run.root}: the run's Redis server was not started")
        return RedisStore(redis_url, _prefix(run), OWN_REDIS_PATIENCE_S)
    return FileStore(run)


def _prefix(run: RunDirectory) -> str:
    """What the run's streams in Redis are called; made up once, and kept in the run directory."""
    path = run.streams / "name_in_redis"
    if not path.exists():
        write_atomically(path, f"pipelinerl-{secrets.token_hex(8)}-".encode())
    return path.read_text()


def group_writer(store: StreamStore, config: RunConfig, on_drop: Callable[[Group], None]) -> StreamWriter[Group]:
    capacity, when_full = stream_capacity(config), config.stream.when_full
    return store.writer(ROLLOUTS, Group, capacity=capacity, when_full=when_full, on_drop=on_drop)


def group_reader(store: StreamStore) -> StreamReader[Group]:
    return store.reader(ROLLOUTS, Group)


def prepared_writer(store: StreamStore) -> StreamWriter[Prepared]:
    return store.writer(PREPARED, Prepared, capacity=PREPARED_AHEAD, when_full="block", on_drop=None)


def prepared_reader(store: StreamStore) -> StreamReader[Prepared]:
    return store.reader(PREPARED, Prepared)


def first_uncommitted(store: StreamStore) -> int:
    """Where in the rollout stream a reader that is opened now begins."""
    with closing(group_reader(store)) as reader:
        found = reader.read(1)
        return found[0][0] if found else reader.stats().written


def rollouts_in_streams(store: StreamStore, config: RunConfig) -> dict[int, int]:
    """Index -> rollouts of each group that lies in a stream, once all processes have ended.

    A preprocessor may have ended with a group in hand, or between the two streams: what it did not commit counts, unless it
    is in the second stream as well (or was: a group that was dealt with and committed there, after the preprocessor was
    killed between the two, would be counted once too often. A resume knows it by the trainer's ledger).
    """
    if config.launch.preprocessor == "with_trainer":
        return {group.index: len(group.rollouts) for group in store.waiting(ROLLOUTS, Group)}
    waiting = {prepared.index: len(prepared.ids) for prepared in store.waiting(PREPARED, Prepared)}
    with closing(prepared_reader(store)) as second, closing(group_reader(store)) as first:
        passed_on = {prepared.index for _, prepared in second.read(sys.maxsize)}
        left = {group.index: len(group.rollouts) for _, group in first.read(sys.maxsize) if group.index not in passed_on}
    return waiting | left
