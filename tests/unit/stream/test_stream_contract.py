"""What streams of all kinds do: order, exact counts, whoever is killed. Checked against a plain list."""

from __future__ import annotations

import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelinerl.errors import StreamError
from pipelinerl.interfaces import StreamReader, StreamStats, StreamWriter
from tests.unit.stream.streams import (
    ROOT,
    FilesPlace,
    Item,
    MemoryPlace,
    Model,
    Place,
    RedisPlace,
    WhenFull,
    items,
    redis_for_tests,
    write,
)

NewPlace = Callable[[], Place]


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with redis_for_tests(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


def places(request: pytest.FixtureRequest, folders: pytest.TempPathFactory) -> NewPlace:
    if request.param == "memory":
        return MemoryPlace
    if request.param == "files":
        return lambda: FilesPlace(str(folders.mktemp("stream")))
    url = request.getfixturevalue("redis_url")
    return lambda: RedisPlace(url, f"tests/{secrets.token_hex(4)}")


@pytest.fixture(scope="module", params=["memory", "files", pytest.param("redis", marks=pytest.mark.needs_redis)])
def new_place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> NewPlace:
    return places(request, tmp_path_factory)


@pytest.fixture
def place(new_place: NewPlace) -> Place:
    return new_place()


@pytest.fixture(params=["files", pytest.param("redis", marks=pytest.mark.needs_redis)])
def lasting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A stream that outlives the processes at its ends."""
    return places(request, tmp_path_factory)()


def ends(place: Place, **options: Any) -> tuple[StreamWriter[Item], StreamReader[Item]]:
    return place.writer(**options), place.reader()


def test_items_come_out_in_order_each_once_with_its_offset(place: Place) -> None:
    writer, reader = ends(place)  # without a capacity
    assert reader.read(5) == []
    write(writer, *range(7))
    assert reader.read(0) == []
    assert reader.read(3) == list(zip(range(3), items(0, 1, 2), strict=True))
    write(writer, 7)
    assert reader.read(100) == list(zip(range(3, 8), items(3, 4, 5, 6, 7), strict=True))
    assert reader.read(100) == []
    assert writer.stats() == reader.stats() == StreamStats(written=8, taken=8, dropped=0)


def test_a_full_stream_blocks_its_writer_until_something_is_taken(place: Place) -> None:
    writer, reader = ends(place, capacity=2, when_full="block")
    write(writer, 0, 1)
    assert not writer.try_write(Item(2))
    assert writer.stats() == StreamStats(written=2, taken=0, dropped=0)
    reader.read(1)
    assert writer.try_write(Item(2))
    assert not writer.try_write(Item(3))
    assert [item.n for _, item in reader.read(9)] == [1, 2]


def test_a_full_ring_drops_its_oldest_and_says_which(place: Place) -> None:
    dropped: list[Item] = []
    writer, reader = ends(place, capacity=3, when_full="drop_oldest", on_drop=dropped.append)
    write(writer, *range(8))
    assert dropped == items(0, 1, 2, 3, 4)
    assert reader.stats() == StreamStats(written=8, taken=0, dropped=5)
    assert reader.stats().pending == 3
    assert reader.read(2) == list(zip((5, 6), items(5, 6), strict=True))
    write(writer, 8, 9, 10)
    assert dropped == items(0, 1, 2, 3, 4, 7)
    assert [offset for offset, _ in reader.read(9)] == [8, 9, 10]


def test_only_what_was_taken_or_dropped_can_be_committed(place: Place) -> None:
    writer, reader = ends(place, capacity=2, when_full="drop_oldest")
    write(writer, 0, 1, 2, 3)
    reader.commit(2)
    with pytest.raises(ValueError, match=r"offset 3: items from 2 on were not taken"):
        reader.commit(3)
    reader.read(2)
    reader.commit(4)
    reader.commit(1)
    with pytest.raises(ValueError, match="offset 5"):
        reader.commit(5)


def test_a_stream_without_room_is_refused(place: Place) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        place.writer(capacity=0)


operations = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(1, 5)),
        st.tuples(st.just("read"), st.integers(1, 5)),
        st.tuples(st.just("commit"), st.floats(0, 1)),
        st.tuples(st.just("reopen reader"), st.none()),
        st.tuples(st.just("reopen writer"), st.none()),
    ),
    max_size=40,
)


@given(st.integers(1, 6), st.sampled_from(["block", "drop_oldest"]), operations)
@settings(max_examples=60)
def test_any_history_is_that_of_a_list(
    new_place: NewPlace, capacity: int, when_full: WhenFull, history: list[tuple[str, Any]]
) -> None:
    place, model = new_place(), Model(capacity, when_full)
    dropped: list[int] = []
    options: Any = {"capacity": capacity, "when_full": when_full, "on_drop": lambda item: dropped.append(item.n)}
    writer, reader = ends(place, **options)
    for operation, argument in history:
        if operation == "write":
            for _ in range(argument):
                n = len(model.fates)
                assert writer.try_write(Item(n)) == model.write()
        elif operation == "read":
            assert reader.read(argument) == [(n, Item(n)) for n in model.read(argument)]
        elif operation == "commit":
            model.committed = max(model.committed, int(argument * model.dealt_with()))
            reader.commit(model.committed)
        elif place.address and operation == "reopen reader":
            reader.close()
            reader = place.reader()
            model.reopen_reader()
        elif place.address:
            writer.close()
            writer = place.writer(**options)
        assert writer.stats() == reader.stats() == model.stats()
        # Not in order: what a reader had taken, and a new one has not, may be dropped after what is behind it.
        assert sorted(dropped) == [n for n, fate in enumerate(model.fates) if fate == "dropped"]
    assert [n for n, _ in reader.read(10_000)] == model.pending()
    for end in (reader, writer, reader, writer):
        end.close()


# Streams that outlive a process


def test_a_later_reader_starts_at_the_committed_offset(lasting: Place) -> None:
    writer, reader = ends(lasting, capacity=100)
    write(writer, *range(10))
    reader.read(6)
    reader.commit(4)
    reader.close()
    reader = lasting.reader()
    assert writer.stats() == StreamStats(written=10, taken=4, dropped=0)
    assert [offset for offset, _ in reader.read(99)] == [4, 5, 6, 7, 8, 9]


def test_a_later_reader_may_commit_what_was_dropped_before_it_came(lasting: Place) -> None:
    writer, reader = ends(lasting, capacity=3, when_full="drop_oldest")
    write(writer, *range(8))
    reader.close()
    reader = lasting.reader()
    with pytest.raises(ValueError, match="offset 6: items from 5 on"):
        reader.commit(6)
    reader.commit(5)
    assert reader.stats() == StreamStats(written=8, taken=0, dropped=5)
    assert [offset for offset, _ in reader.read(9)] == [5, 6, 7]


def test_a_later_writer_with_less_room_drops_more(lasting: Place) -> None:
    writer, reader = ends(lasting, capacity=10)
    write(writer, *range(6))
    writer.close()
    dropped: list[Item] = []
    writer = lasting.writer(capacity=2, when_full="drop_oldest", on_drop=dropped.append)
    write(writer, 6)
    assert dropped == items(0, 1, 2, 3, 4)
    assert [offset for offset, _ in reader.read(9)] == [5, 6]


def test_there_is_one_reader(lasting: Place) -> None:
    reader = lasting.reader()
    with pytest.raises(StreamError, match="by another reader"):
        lasting.reader()
    assert reader.read(1) == []


def test_items_of_another_type_are_refused(lasting: Place) -> None:
    class Other(msgspec.Struct):
        n: str

    writer, reader = ends(lasting, capacity=9)
    writer.try_write(Item(0), msgspec.json.encode(Other("one")))
    with pytest.raises(StreamError, match=r"Expected `int`, got `str` - at `\$\.n`"):
        reader.read(1)


def test_what_the_caller_has_encoded_is_what_is_written(place: Place) -> None:
    writer, reader = ends(place, capacity=9)
    writer.try_write(Item(3), msgspec.json.encode(Item(3)))
    assert reader.read(1) == [(0, Item(3))]


WRITER = """
import itertools, sys
from tests.unit.stream.streams import Item, place_of
capacity, when_full, *address = sys.argv[1:]
writer = place_of(*address).writer(capacity=int(capacity), when_full=when_full)
print(writer.stats().written, flush=True)
for n in itertools.count(writer.stats().written):
    while not writer.try_write(Item(n, "x" * (n * 7919 % 5000))):
        pass
"""


@pytest.mark.slow
@pytest.mark.parametrize("when_full", ["block", "drop_oldest"])
def test_a_writer_may_be_killed_at_any_time(lasting: Place, when_full: WhenFull) -> None:
    reader = lasting.reader()
    taken: list[int] = []
    for _ in range(3):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, "50", when_full, *lasting.address], stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        assert writer.stdout is not None
        start = int(writer.stdout.readline())
        assert start >= max(taken, default=-1) + 1
        target = len(taken) + 300
        while len(taken) < target:
            assert writer.poll() is None
            for offset, item in reader.read(7):
                assert item == Item(offset, "x" * (offset * 7919 % 5000))
                taken.append(offset)
            if taken:
                reader.commit(taken[-1] + 1)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
    final = lasting.writer(capacity=50, when_full=when_full)
    taken += [offset for offset, _ in reader.read(10_000)]
    stats = final.stats()
    assert taken == sorted(set(taken))
    assert stats.taken == len(taken)
    assert stats.pending == 0
    assert stats.dropped == stats.written - len(taken)
    if when_full == "block":
        assert taken == list(range(stats.written))


@pytest.mark.parametrize("when_full", ["block", "drop_oldest"])
def test_writers_in_turn_are_one_stream(lasting: Place, when_full: WhenFull) -> None:
    """Capacity that another used, items that another drops."""
    dropped: list[int] = []
    options: Any = {"capacity": 5, "when_full": when_full, "on_drop": lambda item: dropped.append(item.n)}
    reader = lasting.reader()
    writers = [lasting.writer(**options) for _ in range(3)]
    model = Model(5, when_full)
    for turn in range(60):
        n = len(model.fates)
        assert writers[turn * 7 % 3].try_write(Item(n)) == model.write()
        if turn % 4 == 0:
            assert reader.read(3) == [(n, Item(n)) for n in model.read(3)]
            reader.commit(model.cursor)
        assert all(end.stats() == model.stats() for end in (*writers, reader))
    assert dropped == [n for n, fate in enumerate(model.fates) if fate == "dropped"]
    assert bool(dropped) == (when_full == "drop_oldest")
    assert [n for n, _ in reader.read(99)] == model.pending()


MANY = """
import sys
from tests.unit.stream.streams import Item, place_of
name, *address = sys.argv[1:]
writer = place_of(*address).writer(capacity=40)
for n in range(400):
    while not writer.try_write(Item(n, name * (n * 7919 % 500))):
        pass
"""


@pytest.mark.slow
def test_writers_at_once_lose_nothing(lasting: Place) -> None:
    reader = lasting.reader()
    writers = [subprocess.Popen([sys.executable, "-c", MANY, name, *lasting.address], cwd=ROOT) for name in "abc"]
    found: list[tuple[int, Item]] = []
    while len(found) < 1200:
        assert not any(writer.poll() for writer in writers)
        new = reader.read(7)
        found += new
        if new:
            reader.commit(found[-1][0] + 1)
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    assert [offset for offset, _ in found] == list(range(1200))
    for name in "abc":
        assert [item.n for _, item in found if item.text[:1] == name] == [n for n in range(400) if n * 7919 % 500]
