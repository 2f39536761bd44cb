"""Streams in Redis: lost connections, a lost Redis, and keys that others change. Against a real server.

What streams of all kinds do is in `test_stream_contract`.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelinerl.errors import ConfigError, StreamError
from pipelinerl.interfaces import StreamStats
from pipelinerl.stream.files import FileStore, FileStreamWriter
from tests.unit.stream.streams import ROOT, Item, Model, WhenFull, items, redis_for_tests, unreliable, write

redis = pytest.importorskip("redis", reason="needs the package redis: pip install 'pipelinerl[redis]'")

from pipelinerl.redis_connection import RedisConnection  # noqa: E402 - after the check above
from pipelinerl.stream.redis import (  # noqa: E402
    RedisStore,
    RedisStreamReader,
    RedisStreamWriter,
)
from pipelinerl.stream.redis_server import start_server  # noqa: E402

pytestmark = pytest.mark.needs_redis
NAMES = (f"tests/{n}" for n in itertools.count())
LOST = "it is not in Redis any more as this process left it"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with redis_for_tests(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


@pytest.fixture
def name() -> str:
    return next(NAMES)


def open_ends(url: str, name: str, **options: Any) -> tuple[RedisStreamWriter[Item], RedisStreamReader[Item]]:
    options = {"capacity": 100, **options}
    return RedisStreamWriter(url, name, Item, **options), RedisStreamReader(url, name, Item)


def numbers(found: Any) -> list[int]:
    return [item.n for _, item in found]


# Connections that are lost


def test_what_a_dead_process_has_sent_is_not_executed_any_more(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis ends its connections, and no others: here, those of a process with another id."""
    with ExitStack() as stack:
        first, alive, after = (stack.enter_context(closing(RedisConnection(url, "claims"))) for _ in range(3))
        monkeypatch.setattr("os.getpid", lambda: 1)
        dead = [stack.enter_context(closing(RedisConnection(url, role))) for role in ("claims", "writer")]
        for connection in (first, alive, *dead):
            connection.client.ping()
        after.disconnect(1)
        left = {client["name"] for client in after.client.client_list()}
        assert {first.token, alive.token, after.token} <= left
        assert not left & {connection.token for connection in dead}


operations = st.lists(
    st.tuples(st.sampled_from(["write", "write", "read", "commit", "reopen reader", "reopen writer"]), st.integers(1, 4)),
    min_size=5,
    max_size=40,
)


@given(st.integers(1, 6), st.sampled_from(["block", "drop_oldest"]), operations, st.integers(0, 1_000_000))
@settings(max_examples=40)
def test_lost_requests_and_answers_change_nothing(
    url: str, capacity: int, when_full: WhenFull, history: list[tuple[str, int]], seed: int
) -> None:
    model, stream, dropped = Model(capacity, when_full), next(NAMES), []
    options: Any = {"capacity": capacity, "when_full": when_full, "on_drop": lambda item: dropped.append(item.n)}
    with unreliable(seed):
        writer, reader = open_ends(url, stream, **options)
        for operation, count in history:
            if operation == "write":
                for _ in range(count):
                    n = len(model.fates)
                    assert writer.try_write(Item(n)) == model.write()
            elif operation == "read":
                assert reader.read(count) == [(n, Item(n)) for n in model.read(count)]
            elif operation == "commit":
                model.committed = max(model.committed, model.dealt_with() - count)
                reader.commit(model.committed)
            elif operation == "reopen reader":
                reader.close()
                reader = RedisStreamReader(url, stream, Item)
                model.reopen_reader()
            else:
                writer.close()
                writer = RedisStreamWriter(url, stream, Item, **options)
            assert writer.stats() == reader.stats() == model.stats()
            assert sorted(dropped) == [n for n, fate in enumerate(model.fates) if fate == "dropped"]
        assert numbers(reader.read(10_000)) == model.pending()
    writer.close()
    reader.close()


def test_connections_that_are_cut_again_and_again_lose_nothing(url: str, name: str) -> None:
    writer, reader = open_ends(url, name, capacity=20)
    found: list[tuple[int, Item]] = []
    with redis.Redis.from_url(url) as administrator:
        for n in range(300):
            if n % 7 == 0:
                administrator.client_kill_filter(_type="normal", skipme=True)
            while not writer.try_write(Item(n, "x" * 5000)):
                found += reader.read(7)
                reader.commit(len(found))
    found += reader.read(100)
    assert found == [(n, Item(n, "x" * 5000)) for n in range(300)]
    assert writer.stats() == StreamStats(300, 300, 0)


def test_a_redis_that_keeps_its_data_may_be_killed(tmp_path: Path) -> None:
    servers: list[Any] = []
    with redis_for_tests(tmp_path, durable=True) as server:
        writer, reader = open_ends(server.url, "s", capacity=1000)
        write(writer, *range(20))
        reader.read(5)
        reader.commit(3)
        os.kill(server.pid, signal.SIGKILL)
        while server.failure() is None:
            time.sleep(0.01)
        again = start_server(tmp_path, durable=True)
        starter = threading.Timer(0.1, lambda: servers.append(again.__enter__()))
        starter.start()
        write(writer, *range(20, 40))
        starter.join()
        try:
            assert numbers(reader.read(100)) == list(range(5, 40))
            assert reader.stats() == StreamStats(40, 40, 0)
        finally:
            again.__exit__(None, None, None)


def test_after_a_bound_the_url_and_the_time_are_named(tmp_path: Path) -> None:
    with redis_for_tests(tmp_path) as server:
        writer = RedisStreamWriter(server.url, "s", Item, capacity=9, patience_s=1.0)
        os.kill(server.pid, signal.SIGSTOP)
        try:
            with pytest.raises(StreamError, match=r"unix://.*/redis\.sock: no connection, tried for \d\.\d s") as error:
                writer.try_write(Item(0))
            assert "\n" not in str(error.value)
        finally:
            os.kill(server.pid, signal.SIGCONT)
        write(writer, 0, 1)
        assert RedisStore(server.url).waiting("s", Item) == items(0, 1)


def test_what_a_failed_read_had_taken_comes_with_the_next(url: str, name: str) -> None:
    writer, reader = open_ends(url, name)
    write(writer, *range(9))
    take = redis.Redis.xreadgroup

    def lost(*arguments: Any) -> Any:
        take(*arguments)
        raise redis.ConnectionError("the answer was lost")

    hours = itertools.count(0, 3600)
    with (
        mock.patch("redis.Redis.xreadgroup", lost),
        mock.patch("pipelinerl.redis_connection.time.monotonic", side_effect=hours),
        pytest.raises(StreamError, match=r"tried for \d+\.0 s \(the answer was lost\)"),
    ):
        reader.read(9)
    assert reader.stats().taken == 9
    assert numbers(reader.read(2)) == [0, 1]
    with pytest.raises(ValueError, match="items from 2 on were not taken"):
        reader.commit(3)
    assert numbers(reader.read(90)) == list(range(2, 9))


def test_a_reader_without_connection_makes_way_for_another_and_is_told(url: str, name: str) -> None:
    writer, first = open_ends(url, name)
    write(writer, 0, 1)
    first.read(2)
    first.commit(1)
    with redis.Redis.from_url(url) as administrator:
        administrator.client_kill_filter(_type="normal", skipme=True)
    second = RedisStreamReader(url, name, Item)
    for use in (lambda: first.read(1), lambda: first.commit(2)):
        with pytest.raises(StreamError, match="another process reads it now"):
            use()
    first.close()
    assert numbers(second.read(9)) == [1]


# A Redis that loses what was in it


def uses(writer: RedisStreamWriter[Item], reader: RedisStreamReader[Item]) -> list[Callable[[], Any]]:
    return [lambda: writer.try_write(Item(9)), writer.stats, lambda: reader.read(1), lambda: reader.commit(1), reader.stats]


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ("FLUSHALL", LOST),
        ("DEL {%s}:counts", LOST),
        ("DEL {%s}:items", LOST),
        ("XDEL {%s}:items 0-2", LOST),
        ("XADD {%s}:items * item {}", LOST),
        ("SET {%s}:items 1", "a key holding the wrong kind of value"),
    ],
)
def test_keys_that_are_changed_under_us(url: str, name: str, command: str, complaint: str) -> None:
    writer, reader = open_ends(url, name)
    write(writer, 0, 1, 2)
    with redis.Redis.from_url(url) as other:
        other.execute_command(*command.replace("%s", name).split())
    for use in uses(writer, reader):
        with pytest.raises(StreamError, match=complaint):
            use()
    if command == "FLUSHALL":  # another process creates the stream again: it is not the same one
        RedisStreamWriter(url, name, Item, capacity=9)
        for use in uses(writer, reader):
            with pytest.raises(StreamError, match=LOST):
                use()


def test_a_redis_that_forgot_what_it_confirmed(url: str, name: str) -> None:
    writer, reader = open_ends(url, name)
    other = RedisStreamWriter(url, name, Item, capacity=100)
    write(writer, 0, 1, 2)
    with redis.Redis.from_url(url) as administrator:
        keys = [f"{{{name}}}:{part}" for part in ("items", "counts")]
        saved = {key: administrator.dump(key) for key in keys}

        def restore() -> None:
            for key, value in saved.items():
                administrator.restore(key, 0, value, replace=True)

        reader.read(1)
        restore()
        for use in (lambda: reader.read(1), lambda: reader.commit(1)):
            with pytest.raises(StreamError, match=LOST):
                use()
        write(writer, 3)
        restore()
        write(other, 4, 5)  # has not seen what was forgotten, and moves the counts on
        with pytest.raises(StreamError, match=LOST):
            writer.try_write(Item(6))


def test_a_full_redis_is_named_and_writing_may_be_tried_again(tmp_path: Path) -> None:
    with redis_for_tests(tmp_path) as server, redis.Redis.from_url(server.url) as administrator:
        writer, reader = open_ends(server.url, "s")
        write(writer, 0)
        administrator.config_set("maxmemory", 1)
        with pytest.raises(StreamError, match=r"Redis refuses: .*used memory > 'maxmemory'"):
            writer.try_write(Item(1))
        administrator.config_set("maxmemory", 0)
        write(writer, 2)
        assert numbers(reader.read(9)) == [0, 2]


def test_processes_that_open_a_new_stream_at_once_share_it(url: str, name: str) -> None:
    with ThreadPoolExecutor(8) as threads:
        writers = list(threads.map(lambda _: RedisStreamWriter(url, name, Item, capacity=9), range(8)))
    for writer in writers:
        write(writer, 0)
    assert writers[0].stats() == StreamStats(8, 0, 0)


def test_what_a_killed_writer_was_about_to_drop_comes_to_the_next_reader(url: str, name: str) -> None:
    writer, reader = open_ends(url, name, capacity=2, when_full="drop_oldest")
    write(writer, 0, 1)
    writer.deliver(writer.token, ">", 1)  # the first half of dropping
    writer.close()
    assert numbers(reader.read(9)) == [1]
    reader.commit(2)
    reader.close()
    later = RedisStreamReader(url, name, Item)
    assert later.stats() == StreamStats(2, 1, 0)
    assert numbers(later.read(9)) == [0]


def test_what_is_dealt_with_takes_no_memory(url: str, name: str) -> None:
    writer, reader = open_ends(url, name, capacity=10, when_full="drop_oldest")
    with redis.Redis.from_url(url) as administrator:
        for n in range(30):
            assert writer.try_write(Item(n, "x" * 10_000))
        assert administrator.xlen(f"{{{name}}}:items") == 10
        full = administrator.memory_usage(f"{{{name}}}:items")
        reader.read(8)
        assert administrator.xlen(f"{{{name}}}:items") == 10
        reader.commit(26)
        assert administrator.xlen(f"{{{name}}}:items") == 4
        assert administrator.memory_usage(f"{{{name}}}:items") < 0.5 * full
        assert administrator.xpending(f"{{{name}}}:items", "reader")["pending"] == 2


# Wrong settings, one line each


def test_a_wrong_password(tmp_path: Path) -> None:
    with redis_for_tests(tmp_path) as server:
        with redis.Redis.from_url(server.url) as administrator:
            administrator.config_set("requirepass", "word")
        RedisStreamWriter(f"{server.url}?password=word", "s", Item, capacity=1).close()
        for wrong in (server.url, f"{server.url}?password=other"):
            with pytest.raises(ConfigError, match=r"stream\.url unix://.*: Redis does not let us in"):
                RedisStreamReader(wrong, "s", Item)


def test_a_name_that_is_taken(url: str, name: str) -> None:
    with redis.Redis.from_url(url) as other:
        other.hset(f"{{{name}}}:counts", "colour", "red")
    with pytest.raises(StreamError, match="its keys hold something else"):
        RedisStreamReader(url, name, Item)


def test_an_old_redis_is_refused(url: str) -> None:
    with (
        mock.patch("redis.Redis.info", return_value={"redis_version": "6.2.16"}),
        pytest.raises(StreamError, match=r"this is Redis 6\.2\.16; streams need 7"),
    ):
        RedisStreamReader(url, "s", Item)


def test_users_with_few_rights(url: str, name: str) -> None:
    categories = ["+@connection", "+@transaction", "+@read", "+@write", "-@dangerous"]
    needed = ["on", ">word", "~{tests*", *categories, "+info", "+client|list"]
    with redis.Redis.from_url(url) as administrator:
        administrator.execute_command("ACL", "SETUSER", "enough", *needed)
        administrator.execute_command("ACL", "SETUSER", "fewer", *needed, "-info", "-client|list")
        administrator.execute_command("ACL", "SETUSER", "none", *needed, "-@transaction")
    writer, reader = open_ends(f"{url}?username=enough&password=word", name)
    write(writer, 0)
    assert reader.read(1) == [(0, items(0)[0])]
    with pytest.raises(StreamError, match="by another reader"):
        RedisStreamReader(f"{url}?username=enough&password=word", name, Item)
    later = RedisStreamReader(f"{url}?username=fewer&password=word", name, Item)
    assert later.read(1) == [(0, items(0)[0])]
    with pytest.raises(StreamError, match=r"Redis refuses: .* no permissions"):
        RedisStreamReader(f"{url}?username=none&password=word", name, Item)


# Going back to a checkpoint


@given(
    st.tuples(st.integers(0, 25), st.integers(0, 25), st.integers(0, 25)),
    st.integers(1, 30),
    st.sets(st.integers(0, 25)),
    st.booleans(),
)
@settings(max_examples=20)
def test_rewinding_is_as_it_is_elsewhere(
    url: str, history: tuple[int, int, int], capacity: int, unwanted: set[int], twice: bool
) -> None:
    written, taken, from_offset = history
    stream = next(NAMES)
    options: Any = {"capacity": capacity, "when_full": "drop_oldest"}

    def keep(item: Item) -> bool:
        return item.n not in unwanted

    def fill(writer: Any, reader: Any) -> None:
        for n in range(written):
            writer.try_write(Item(n))
        done = [offset for offset, _ in reader.read(taken)]
        reader.commit(min(from_offset, done[-1] + 1 if done else 0))
        writer.close()
        reader.close()

    def outcome(kept: list[Item], reader: Any) -> Any:
        return kept, reader.stats(), reader.read(100), reader.stats()

    fill(*open_ends(url, stream, **options))
    with unreliable(seed=written + taken):
        for _ in range(1 + twice):
            kept = RedisStore(url).rewind(stream, Item, from_offset, keep)
    reader = RedisStreamReader(url, stream, Item)
    found = outcome(kept, reader)
    writer = RedisStreamWriter(url, stream, Item, **options)
    assert writer.try_write(Item(99))
    assert reader.read(9) == [(from_offset + len(kept), Item(99))]
    with TemporaryDirectory() as directory:
        folder = Path(directory)
        fill(FileStreamWriter(folder, Item, **options), FileStore(folder).reader("", Item))
        assert found == outcome(FileStore(folder).rewind("", Item, from_offset, keep), FileStore(folder).reader("", Item))


def test_nobody_reads_while_a_stream_is_rewound_and_who_writes_is_told(url: str, name: str) -> None:
    writer, reader = open_ends(url, name)
    write(writer, 0, 1, 2)
    with pytest.raises(StreamError, match="by another reader"):
        RedisStore(url).rewind(name, Item, 0, lambda item: True)
    reader.read(2)
    reader.commit(2)
    reader.close()
    assert RedisStore(url).rewind(name, Item, 2, lambda item: True) == items(2)
    with pytest.raises(StreamError, match="a later session of the run has begun"):
        writer.try_write(Item(3))


def test_looking_takes_nothing(url: str, name: str) -> None:
    writer, reader = open_ends(url, name)
    write(writer, *range(100))
    reader.read(3)
    assert RedisStore(url).waiting(name, Item) == items(*range(3, 100))
    assert reader.read(1) == [(3, items(3)[0])]
    assert RedisStore(url).waiting(next(NAMES), Item) == []


# The server of a run


def test_redis_names_what_is_in_the_way_of_its_data(tmp_path: Path) -> None:
    (tmp_path / "appendonlydir").write_text("in the way")
    with (
        pytest.raises(StreamError, match=r"redis-server did not start: .* status 1; its log, .*, ends with: .*append"),
        start_server(tmp_path, durable=True),
    ):
        pass


def test_only_its_user_may_use_a_server_wherever_its_directory_is(tmp_path: Path) -> None:
    directory = tmp_path / 'a "quoted" folder' / ("long" * 30)
    with redis_for_tests(directory) as server:
        write(RedisStreamWriter(server.url, "s", Item, capacity=1), 0)
        socket = Path(server.url.removeprefix("unix://"))
        assert socket.stat().st_mode & 0o077 == 0
        with redis.Redis.from_url(server.url) as administrator:
            assert administrator.config_get("port") == {"port": "0"}, "it can't be reached over the network"
        pid = server.pid
    assert not socket.exists()
    assert not Path(f"/proc/{pid}").exists()


def test_a_durable_server_has_its_data_again(tmp_path: Path) -> None:
    for n in range(3):
        with redis_for_tests(tmp_path, durable=True) as server:
            writer = RedisStreamWriter(server.url, "s", Item, capacity=9)
            assert writer.stats().written == n
            write(writer, n)
            writer.close()


ORPHAN = """
import pathlib, sys, time
from pipelinerl.stream.redis_server import start_server
with start_server(pathlib.Path(sys.argv[1])) as server:
    print(server.pid, flush=True)
    time.sleep(60)
"""


def test_a_server_ends_with_the_process_that_started_it_however_that_ends(url: str, tmp_path: Path) -> None:
    starter = subprocess.Popen(
        [sys.executable, "-c", ORPHAN, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True
    )
    assert starter.stdout is not None
    pid = int(starter.stdout.readline())
    os.kill(pid, 0)
    starter.kill()
    starter.wait()
    starter.stdout.close()
    deadline_s = time.monotonic() + 60
    while Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes():
        assert time.monotonic() < deadline_s, "the server lives on"
        time.sleep(0.01)
