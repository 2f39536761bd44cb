"""What the tests of all kinds of stream share: items, a plain list to compare with, and streams of each kind."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol
from unittest import mock

import msgspec

from pipelinerl.interfaces import StreamReader, StreamStats, StreamWriter
from pipelinerl.stream.files import FileStore, FileStreamWriter
from pipelinerl.stream.memory import MemoryStream

ROOT = Path(__file__).parents[3]
WhenFull = Literal["block", "drop_oldest"]


class Item(msgspec.Struct, frozen=True):
    n: int
    text: str = ""


def items(*numbers: int) -> list[Item]:
    return [Item(n, f"line\n{n} äöü") for n in numbers]


def write(writer: StreamWriter[Item], *numbers: int) -> None:
    for item in items(*numbers):
        assert writer.try_write(item)


class Model:
    """The stream as a list with the fate of each item."""

    def __init__(self, capacity: int, when_full: WhenFull) -> None:
        self.capacity, self.when_full = capacity, when_full
        self.fates: list[str] = []
        self.cursor = self.committed = 0

    def pending(self) -> list[int]:
        return [n for n, fate in enumerate(self.fates) if fate == "pending"]

    def write(self) -> bool:
        while len(self.pending()) >= self.capacity:
            if self.when_full == "block":
                return False
            oldest = self.pending()[0]
            self.fates[oldest] = "dropped"
            self.cursor = oldest + 1
        self.fates.append("pending")
        return True

    def read(self, limit: int) -> list[int]:
        taken = self.pending()[:limit]
        for n in taken:
            self.fates[n] = "taken"
        self.cursor = max([self.cursor, *(n + 1 for n in taken)])
        return taken

    def reopen_reader(self) -> None:
        self.cursor = self.committed
        for n in range(self.committed, len(self.fates)):
            if self.fates[n] == "taken":
                self.fates[n] = "pending"

    def dealt_with(self) -> int:
        """Everything before this was taken or dropped."""
        return next(iter(self.pending()), len(self.fates))

    def stats(self) -> StreamStats:
        return StreamStats(len(self.fates), self.fates.count("taken"), self.fates.count("dropped"))


class Place(Protocol):
    """Where one stream is. `address` is what another process needs to find it (see `place_of`); memory has none."""

    address: tuple[str, ...]

    def writer(self, **options: Any) -> StreamWriter[Item]: ...

    def reader(self) -> StreamReader[Item]: ...


class MemoryPlace:
    """The writer comes first, and neither comes again."""

    address = ()

    def writer(self, **options: Any) -> StreamWriter[Item]:
        self._stream = MemoryStream[Item](**options)
        return self._stream

    def reader(self) -> StreamReader[Item]:
        return self._stream


class FilesPlace:
    def __init__(self, directory: str) -> None:
        self.address = ("files", directory)
        self.directory = Path(directory)

    def writer(self, **options: Any) -> StreamWriter[Item]:
        return FileStreamWriter(self.directory, Item, **options)

    def reader(self) -> StreamReader[Item]:
        return FileStore(self.directory).reader("", Item)


class RedisPlace:
    def __init__(self, url: str, name: str) -> None:
        self.address = ("redis", url, name)

    def writer(self, **options: Any) -> StreamWriter[Item]:
        from pipelinerl.stream.redis import RedisStreamWriter

        _, url, name = self.address
        return RedisStreamWriter(url, name, Item, **options)

    def reader(self) -> StreamReader[Item]:
        from pipelinerl.stream.redis import RedisStreamReader

        _, url, name = self.address
        return RedisStreamReader(url, name, Item)


def place_of(kind: str, *address: str) -> Place:
    return FilesPlace(*address) if kind == "files" else RedisPlace(*address)


@contextmanager
def redis_for_tests(directory: Path, **options: Any) -> Iterator[Any]:
    """A `RedisServer`; the test is skipped where it can't be had."""
    import pytest

    pytest.importorskip("redis", reason="needs the package redis: pip install 'pipelinerl[redis]'")
    if shutil.which("redis-server") is None:
        pytest.skip("needs the program redis-server: apt-get install redis-server, or brew install redis")
    from pipelinerl.stream.redis_server import start_server

    with start_server(directory, **options) as server:
        yield server


@contextmanager
def unreliable(seed: int, share: float = 0.3) -> Iterator[None]:
    """This share of the requests to Redis are lost on their way, or their answers are; waiting takes no time."""
    import redis

    rng = random.Random(seed)

    def sometimes(request: Callable[..., Any]) -> Callable[..., Any]:
        def replacement(client: Any, *arguments: Any, **options: Any) -> Any:
            fate = rng.random()
            if fate < share / 2:
                raise redis.ConnectionError("the request was lost")
            answer = request(client, *arguments, **options)
            if fate < share:
                raise redis.ConnectionError("the answer was lost")
            return answer

        return replacement

    with ExitStack() as stack:
        for owner, name in ((redis.client.Pipeline, "execute"), (redis.Redis, "xreadgroup"), (redis.Redis, "evalsha")):
            stack.enter_context(mock.patch.object(owner, name, sometimes(getattr(owner, name))))
        stack.enter_context(mock.patch("time.sleep"))
        yield
