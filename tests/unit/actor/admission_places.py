"""What tests of admission need of each place where its record can be: the record, a stream of groups, the trainer's status.

A group is written to the stream as the version that it was started with.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from pipelinerl.actor.admission import Admission, LocalAdmission
from pipelinerl.actor.admission_redis import RedisAdmission, make_redis_record
from pipelinerl.interfaces import Board, Schedule
from pipelinerl.launch.run import make_record
from pipelinerl.redis_connection import RedisConnection
from pipelinerl.status.board import MmapBoard
from pipelinerl.status.mirror import RedisBoard
from pipelinerl.stream.redis import RedisStreamWriter


class Place(Protocol):
    """`address` is what another process needs to find it (see `place_of`)."""

    address: tuple[str, ...]
    board: Board

    def make_record(self) -> None: ...

    def admission(self, schedule: Schedule, **options: Any) -> Admission: ...

    def write(self, admission: Admission, version: int) -> bool:
        """For the `write` of a hand-over by `admission`."""
        ...

    def written(self) -> list[int]: ...

    def fill(self) -> None:
        """From now on the stream is full, until `empty`."""
        ...

    def empty(self) -> None: ...

    def close(self) -> None: ...


class LocalPlace:
    def __init__(self, folder: str) -> None:
        self.address = ("local", folder)
        self._folder, self._full = Path(folder), False
        self.board: Board = MmapBoard(self._folder)

    def make_record(self) -> None:
        make_record(self._folder / "admission")

    def admission(self, schedule: Schedule, **options: Any) -> Admission:
        return LocalAdmission(self._folder / "admission", schedule, self.board, **options)

    def write(self, admission: Admission, version: int) -> bool:
        if self._full:
            return False
        with (self._folder / "stream").open("a") as stream:
            stream.write(f"{version}\n")
        return True

    def written(self) -> list[int]:
        path = self._folder / "stream"
        return [int(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []

    def fill(self) -> None:
        self._full = True

    def empty(self) -> None:
        self._full = False

    def close(self) -> None:
        pass


class RedisPlace:
    """Its admissions repeat no denial without looking, unless told otherwise."""

    def __init__(self, url: str, prefix: str) -> None:
        self.address = ("redis", url, prefix)
        self._url, self._prefix = url, prefix
        self._connection = RedisConnection(url, "tests")
        self.board: Board = RedisBoard(self._connection, prefix)
        self._writers: dict[Admission, RedisStreamWriter[int]] = {}
        self._capacity: int | None = None

    def make_record(self) -> None:
        make_redis_record(self._connection, self._prefix)

    def forget(self) -> None:
        self._connection.client.flushall()

    def admission(self, schedule: Schedule, **options: Any) -> Admission:
        admission = RedisAdmission(self._url, self._prefix, schedule, **{"repeat_s": 0.0, **options})
        self._writers[admission] = RedisStreamWriter(self._url, f"{self._prefix}groups", int, capacity=1_000_000)
        self._writers[admission].companion = lambda pipe, _: admission.commit_with(pipe)
        return admission

    def write(self, admission: Admission, version: int) -> bool:
        return self._writers[admission].try_write(version)

    def written(self) -> list[int]:
        found = self._connection.client.xrange(f"{{{self._prefix}groups}}:items")
        return [int(fields[b"item"]) for _, fields in found]

    def fill(self) -> None:
        for writer in self._writers.values():
            writer._capacity = 0

    def empty(self) -> None:
        for writer in self._writers.values():
            writer._capacity = 1_000_000

    def close(self) -> None:
        for admission, writer in self._writers.items():
            admission.close()
            writer.close()
        self._connection.close()


def place_of(kind: str, *address: str) -> Place:
    return LocalPlace(*address) if kind == "local" else RedisPlace(*address)
