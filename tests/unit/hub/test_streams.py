"""Streams of all kinds: order, offsets, what is read again, and what a resume keeps. Checked against a plain list."""

from __future__ import annotations

import itertools
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelinerl.errors import ConfigError, StreamError
from pipelinerl.files import JsonLines
from pipelinerl.hub import stream as module
from pipelinerl.hub.stream import FileStream, GroupStream
from tests.limits import small_files
from tests.redis_server import redis_for_tests

ROOT = Path(__file__).parents[3]
NAMES = itertools.count()
Open = Callable[[], GroupStream]


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with redis_for_tests(tmp_path_factory.mktemp("redis")) as url:
        yield url


@pytest.fixture(scope="module", params=["memory", "files", pytest.param("redis", marks=pytest.mark.needs_redis)])
def make(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Open]:
    """Makes a new place for a stream. What is returned opens it, again and again unless it is memory."""

    def new() -> Open:
        if request.param == "memory":
            return FileStream
        if request.param == "files":
            folder = tmp_path_factory.mktemp("stream")
            return lambda: FileStream(folder / "s")
        from pipelinerl.hub.redis import RedisStream

        url, key = request.getfixturevalue("redis_url"), f"s-{next(NAMES)}"
        return lambda: RedisStream(url, key)

    new.lasting = request.param != "memory"  # type: ignore[attr-defined]
    return new


class Model:
    """The stream as a dictionary of items that were neither dropped nor committed."""

    def __init__(self) -> None:
        self.items: dict[int, bytes] = {}
        self.written = self.cursor = 0

    def waiting(self) -> list[int]:
        return [offset for offset in self.items if offset >= self.cursor]

    def append(self, item: bytes) -> int:
        self.items[self.written] = item
        self.written += 1
        return self.written - 1

    def read(self, limit: int) -> list[tuple[int, bytes]]:
        found = [(offset, self.items[offset]) for offset in self.waiting()[:limit]]
        self.cursor = found[-1][0] + 1 if found else self.cursor
        return found


STEPS = st.tuples(
    st.sampled_from(["append", "append", "read", "drop", "commit", "return", "open", "keep"]), st.integers(0, 5)
)


@settings(max_examples=60)
@given(st.lists(STEPS, max_size=30))
def test_any_history_is_that_of_a_list(make: Any, history: list[tuple[str, int]]) -> None:
    opened, model, numbers = make(), Model(), itertools.count()
    stream = opened()
    for what, number in history:
        if what == "append":
            item = f"item {(count := next(numbers))}".encode()
            assert stream.append(item, count) == model.append(item)
        elif what == "read":
            assert list(stream.read(number)) == model.read(number)
        elif what == "drop" and model.waiting():
            assert stream.drop() == int(model.items.pop(model.waiting()[0]).split()[1])
        elif what == "commit" and number <= model.cursor:
            stream.commit(number)
            model.items = {offset: item for offset, item in model.items.items() if offset >= number}
        elif what == "return" and number <= model.cursor:
            stream.return_to(number)
            model.cursor = number
        elif what == "open" and make.lasting:
            stream.close()
            stream, model.cursor = opened(), 0
            stream.count([int(item.split()[1]) for item in model.items.values()])
        elif what == "keep":
            kept = stream.keep(number, lambda item: item[-1] % 2 == 0)
            model.items = {n: item for n, item in model.items.items() if n >= number and item[-1] % 2 == 0}
            model.cursor = 0
            assert list(kept) == list(model.items.values())
            stream.count([int(item.split()[1]) for item in kept])
        assert list(stream.offsets()) == model.waiting()
        assert stream.waiting == len(model.waiting())
        assert stream.rollouts == sum(int(model.items[offset].split()[1]) for offset in model.waiting())
    stream.close()


# ------------------------------------------------------------------------------------------------------ in a file


def test_a_file_is_open_once_and_needs_no_memory_shared_through_the_file_system(tmp_path: Path) -> None:
    with closing(FileStream(tmp_path)) as stream:
        with pytest.raises(StreamError, match="open already: end the process"):
            FileStream(tmp_path)
        stream.append(b"x")
        assert not list(tmp_path.glob("*-shm")), "the file system may be one of a network"
        assert sqlite3.threadsafety  # the hub's thread uses what the launcher's opened
    (tmp_path / FileStream.NAME).write_bytes(b"this is no database, and it is long enough to be read as one" * 40)
    with pytest.raises(StreamError, match=r"stream\.sqlite: file is not a database\. Restore it, or delete"):
        FileStream(tmp_path)


def test_a_full_disk_is_named_and_leaves_no_half_record(tmp_path: Path) -> None:
    with closing(FileStream(tmp_path)) as stream:
        stream.append(b"first")
        full = r"stream\.sqlite: .*make room on that disk, then resume"
        with small_files(64 * 1024), pytest.raises(StreamError, match=full):  # noqa: PT012 - one of them fails
            for _ in range(20):
                stream.append(b"x" * 8192)
        written = stream.waiting
        assert stream.append(b"last") == written
    with closing(FileStream(tmp_path)) as stream:
        items = [item for _, item in stream.read(100)]
    assert items == [b"first", *[b"x" * 8192] * (written - 1), b"last"]


KILLED = """
import os, pathlib, signal, sys
from pipelinerl.hub.stream import FileStream

def wanted(item):
    if item == b"7":
        os.kill(os.getpid(), signal.SIGKILL)
    return item in (b"2", b"3")

stream = FileStream(pathlib.Path(sys.argv[1]))
stream.append(b"10")
stream.keep(0, wanted)
"""


def test_a_process_that_is_killed_leaves_what_it_had_written_and_a_killed_resume_changes_nothing(tmp_path: Path) -> None:
    with closing(FileStream(tmp_path)) as stream:
        for number in range(10):
            stream.append(b"%d" % number)
    process = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], cwd=ROOT, check=False)
    assert process.returncode == -signal.SIGKILL
    with closing(FileStream(tmp_path)) as stream:
        assert [item for _, item in stream.read(99)] == [b"%d" % number for number in range(11)]


@pytest.mark.parametrize("cached", [True, False])
def test_items_of_a_file_of_records_are_not_written_again(
    cached: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CACHED_BYTES", 1 << 20 if cached else 0)
    path = tmp_path / "records.jsonl"
    with closing(JsonLines(path)) as records, closing(FileStream(tmp_path / "s", path)) as stream:
        for number in range(4):
            place = records.size
            records.write({"n": number, "text": "x" * 100_000})
            stream.append(path.read_bytes()[place:-1], place=place)
        assert [msgspec.json.decode(item)["n"] for _, item in stream.read(2)] == [0, 1]
        stream.return_to(1)
        assert [msgspec.json.decode(item)["n"] for _, item in stream.read(9)] == [1, 2, 3]
    assert sum(file.stat().st_size for file in (tmp_path / "s").iterdir()) < 100_000
    with path.open("r+b") as lost:  # a file system gave up
        lost.truncate(records.size - 10)
    with closing(FileStream(tmp_path / "s", path)) as stream:
        assert [msgspec.json.decode(item)["n"] for item in stream.keep(1, lambda item: True)] == [1, 2]


# -------------------------------------------------------------------------------------------------------- in Redis

redis_only = pytest.mark.needs_redis


@redis_only
@pytest.mark.parametrize("seed", range(3))
def test_lost_requests_and_answers_change_nothing(redis_url: str, seed: int) -> None:
    import redis

    from pipelinerl.hub.redis import RedisStream

    random, execute = Random(seed), redis.Redis.execute_command

    def unreliable(client: Any, *arguments: Any, **options: Any) -> Any:
        fate = random.random()
        if fate < 0.15:
            raise redis.ConnectionError("the request was lost")
        answer = execute(client, *arguments, **options)
        if fate < 0.3:
            raise redis.ConnectionError("the answer was lost")
        return answer

    with (
        mock.patch.object(redis.Redis, "execute_command", unreliable),
        mock.patch("time.sleep"),
        closing(RedisStream(redis_url, f"s-{next(NAMES)}")) as stream,
    ):
        for number in range(60):
            assert stream.append(b"%d" % number, 5) == number
        assert stream.drop() == 5
        assert [item for _, item in stream.read(100)] == [b"%d" % number for number in range(1, 60)]
        stream.commit(30)
        stream.return_to(0)
        assert list(stream.offsets()) == list(range(30, 60))


@redis_only
def test_a_redis_that_keeps_its_data_may_be_killed_or_full_and_is_named_after_a_bound(tmp_path: Path) -> None:
    import redis

    from pipelinerl.hub.redis import RedisStream

    with redis_for_tests(tmp_path) as url:
        stream, impatient = RedisStream(url, "s"), RedisStream(url, "t", patience_s=0.2)
        stream.append(b"0")
    with pytest.raises(StreamError, match=r"unix://.*: no connection, tried for 0\.\d s .*start Redis"):
        impatient.append(b"0")
    with redis_for_tests(tmp_path), redis.Redis.from_url(url) as administrator:
        administrator.config_set("maxmemory", 1)
        with pytest.raises(StreamError, match=r"Redis refuses: .*maxmemory"):
            stream.append(b"1")
        administrator.config_set("maxmemory", 0)
        assert stream.append(b"1") == 1
        assert [item for _, item in stream.read(9)] == [b"0", b"1"]
        stream.close()


@redis_only
@pytest.mark.parametrize("wrong", ["redis://h:70000", "http://h", "redis://:secret@h:1/x?nonsense=1", ""])
def test_wrong_urls_and_passwords(wrong: str, tmp_path: Path) -> None:
    from pipelinerl.hub.redis import RedisStream

    expected = r"stream\.url|no connection" if wrong else "does not let us in"
    with redis_for_tests(tmp_path, "--requirepass", "right") as url, suppress(OverflowError):
        with pytest.raises((ConfigError, StreamError), match=expected) as raised:
            RedisStream(wrong or url.replace("unix://", "unix://:secret@"), "s", patience_s=0.1)
        assert "secret" not in str(raised.value)
