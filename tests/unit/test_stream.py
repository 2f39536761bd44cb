"""Streams keep order and exact counts, whoever is killed; checked against a plain list."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelinerl.errors import StreamError
from pipelinerl.interfaces import StreamReader, StreamStats, StreamWriter
from pipelinerl.stream import FileStreamReader, FileStreamWriter, memory_stream, rewind

ROOT = Path(__file__).parents[2]
WhenFull = Literal["block", "drop_oldest"]


class Item(msgspec.Struct, frozen=True):
    n: int
    text: str = ""


Ends = tuple[StreamWriter[Item], StreamReader[Item]]
Open = Callable[..., Ends]


@pytest.fixture(params=["memory", "files"])
def open_ends(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    opened: list[Any] = []

    def open_one(**options: Any) -> Ends:
        ends: Ends
        if request.param == "memory":
            ends = memory_stream(**options)
        else:
            ends = (
                FileStreamWriter(tmp_path / "stream", Item, segment_bytes=100, **options),
                FileStreamReader(tmp_path / "stream", Item),
            )
        opened.extend(ends)
        return ends

    yield open_one
    for end in opened:
        end.close()
        end.close()


def items(*numbers: int) -> list[Item]:
    return [Item(n, f"line\n{n} äöü") for n in numbers]


def write(writer: StreamWriter[Item], *numbers: int) -> None:
    for item in items(*numbers):
        assert writer.try_write(item)


def segments(directory: Path) -> list[Path]:
    return sorted(directory.glob("*/*.jsonl"))


# Both kinds


def test_items_come_out_in_order_each_once_with_its_offset(open_ends: Open) -> None:
    writer, reader = open_ends(capacity=100)
    assert reader.read(5) == []
    write(writer, *range(7))
    assert reader.read(0) == []
    assert reader.read(3) == list(zip(range(3), items(0, 1, 2), strict=True))
    write(writer, 7)
    assert reader.read(100) == list(zip(range(3, 8), items(3, 4, 5, 6, 7), strict=True))
    assert reader.read(100) == []
    assert writer.stats() == reader.stats() == StreamStats(written=8, taken=8, dropped=0)


def test_a_full_stream_blocks_its_writer_until_something_is_taken(open_ends: Open) -> None:
    writer, reader = open_ends(capacity=2, when_full="block")
    write(writer, 0, 1)
    assert not writer.try_write(Item(2))
    assert writer.stats() == StreamStats(written=2, taken=0, dropped=0)
    reader.read(1)
    assert writer.try_write(Item(2))
    assert not writer.try_write(Item(3))
    assert [item.n for _, item in reader.read(9)] == [1, 2]


def test_a_full_ring_drops_its_oldest_and_says_which(open_ends: Open) -> None:
    dropped: list[Item] = []
    writer, reader = open_ends(capacity=3, when_full="drop_oldest", on_drop=dropped.append)
    write(writer, *range(8))
    assert dropped == items(0, 1, 2, 3, 4)
    assert reader.stats() == StreamStats(written=8, taken=0, dropped=5)
    assert reader.stats().pending == 3
    assert reader.read(2) == list(zip((5, 6), items(5, 6), strict=True))
    write(writer, 8, 9, 10)
    assert dropped == items(0, 1, 2, 3, 4, 7)
    assert [offset for offset, _ in reader.read(9)] == [8, 9, 10]


def test_only_what_was_taken_or_dropped_can_be_committed(open_ends: Open) -> None:
    writer, reader = open_ends(capacity=2, when_full="drop_oldest")
    write(writer, 0, 1, 2, 3)
    reader.commit(2)
    with pytest.raises(ValueError, match=r"offset 3: items from 2 on were not taken"):
        reader.commit(3)
    reader.read(2)
    reader.commit(4)
    reader.commit(1)
    with pytest.raises(ValueError, match="offset 5"):
        reader.commit(5)


def test_a_stream_without_room_is_refused(open_ends: Open) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        open_ends(capacity=0)


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


@pytest.mark.parametrize("kind", ["memory", "files"])
@given(st.integers(1, 6), st.sampled_from(["block", "drop_oldest"]), operations)
@settings(deadline=None, max_examples=60)
def test_any_history_is_that_of_a_list(
    kind: str, capacity: int, when_full: WhenFull, history: list[tuple[str, Any]]
) -> None:
    model = Model(capacity, when_full)
    with TemporaryDirectory() as directory:
        stream = Path(directory)
        dropped: list[int] = []
        options: Any = {"capacity": capacity, "when_full": when_full, "on_drop": lambda item: dropped.append(item.n)}
        writer: Any
        reader: Any
        if kind == "memory":
            writer, reader = memory_stream(**options)
        else:
            reader = FileStreamReader(stream, Item)
            writer = FileStreamWriter(stream, Item, segment_bytes=60, **options)
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
            elif kind == "files" and operation == "reopen reader":
                reader.close()
                reader = FileStreamReader(stream, Item)
                model.reopen_reader()
            elif kind == "files":
                writer.close()
                writer = FileStreamWriter(stream, Item, segment_bytes=60, **options)
            assert writer.stats() == reader.stats() == model.stats()
            # Not in order: what a reader had taken, and a new one has not, may be dropped after what is behind it.
            assert sorted(dropped) == [n for n, fate in enumerate(model.fates) if fate == "dropped"]
        assert [n for n, _ in reader.read(10_000)] == model.pending()
        reader.close()
        writer.close()


# Files: durability


def test_segments_that_are_dealt_with_are_deleted(tmp_path: Path) -> None:
    writer = FileStreamWriter(tmp_path, Item, capacity=100, segment_bytes=100)
    write(writer, *range(30))
    reader = FileStreamReader(tmp_path, Item)
    assert len(segments(tmp_path)) > 8
    reader.read(30)
    size = sum(path.stat().st_size for path in segments(tmp_path))
    reader.commit(15)
    assert sum(path.stat().st_size for path in segments(tmp_path)) < 0.7 * size
    reader.commit(30)
    assert len(segments(tmp_path)) == 1
    write(writer, 30)
    assert reader.read(2) == [(30, items(30)[0])]


def test_a_later_reader_starts_at_the_committed_offset(tmp_path: Path) -> None:
    writer = FileStreamWriter(tmp_path, Item, capacity=100, segment_bytes=100)
    write(writer, *range(10))
    reader = FileStreamReader(tmp_path, Item)
    reader.read(6)
    reader.commit(4)
    reader.close()
    reader = FileStreamReader(tmp_path, Item)
    assert writer.stats() == StreamStats(written=10, taken=4, dropped=0)
    assert [offset for offset, _ in reader.read(99)] == [4, 5, 6, 7, 8, 9]


def test_there_is_one_reader_and_nobody_while_a_stream_is_rewound(tmp_path: Path) -> None:
    writer = FileStreamWriter(tmp_path, Item, capacity=1)
    reader = FileStreamReader(tmp_path, Item)
    with pytest.raises(StreamError, match="by another reader"):
        FileStreamReader(tmp_path, Item)
    with pytest.raises(StreamError, match="by another writer"):
        rewind(tmp_path, Item, 0, lambda item: True)
    writer.close()
    with pytest.raises(StreamError, match="by another reader"):
        rewind(tmp_path, Item, 0, lambda item: True)
    reader.close()
    assert rewind(tmp_path, Item, 0, lambda item: True) == []


def test_a_record_torn_anywhere_is_all_that_is_lost(tmp_path: Path) -> None:
    writer = FileStreamWriter(tmp_path, Item, capacity=100)
    write(writer, 0, 1)
    (path,) = segments(tmp_path)
    whole = path.stat().st_size
    write(writer, 2)
    writer.close()
    contents = path.read_bytes()
    for end in range(whole, len(contents)):
        path.write_bytes(contents[:end])
        writer = FileStreamWriter(tmp_path, Item, capacity=100)
        assert writer.stats().written == 2
        assert path.read_bytes() == contents[:whole]
        writer.close()
    writer = FileStreamWriter(tmp_path, Item, capacity=100)
    write(writer, 3)
    reader = FileStreamReader(tmp_path, Item)
    assert [item.n for _, item in reader.read(9)] == [0, 1, 3]


def test_a_damaged_last_record_is_cut_off_too(tmp_path: Path) -> None:
    writer = FileStreamWriter(tmp_path, Item, capacity=100)
    write(writer, 0, 1)
    writer.close()
    (path,) = segments(tmp_path)
    path.write_bytes(path.read_bytes()[:-3] + b"\0\0\n")
    writer = FileStreamWriter(tmp_path, Item, capacity=100)
    assert writer.stats().written == 1


def test_damage_elsewhere_names_file_and_line(tmp_path: Path) -> None:
    writer = FileStreamWriter(tmp_path, Item, capacity=100)
    write(writer, *range(4))
    writer.close()
    (path,) = segments(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1].replace(b'"n":1', b'"n":7') + lines[2] + lines[3])
    complaint = rf"{path.name}, line 2: .*checksum"
    with pytest.raises(StreamError, match=complaint):
        FileStreamWriter(tmp_path, Item, capacity=100)
    with pytest.raises(StreamError, match=complaint):
        rewind(tmp_path, Item, 0, lambda item: True)
    reader = FileStreamReader(tmp_path, Item)
    assert reader.read(1) == [(0, items(0)[0])]
    with pytest.raises(StreamError, match=complaint):
        reader.read(1)


def test_items_of_another_type_are_named(tmp_path: Path) -> None:
    class Other(msgspec.Struct):
        n: str

    writer = FileStreamWriter(tmp_path, Other, capacity=9)
    writer.try_write(Other("one"))
    with pytest.raises(StreamError, match=r"\.jsonl, line 1: .*Expected `int`, got `str` - at `\$\.n`"):
        FileStreamReader(tmp_path, Item).read(1)


def test_a_missing_segment_is_named(tmp_path: Path) -> None:
    writer = FileStreamWriter(tmp_path, Item, capacity=100, segment_bytes=1)
    write(writer, 0, 1, 2)
    segments(tmp_path)[1].unlink()
    reader = FileStreamReader(tmp_path, Item)
    reader.read(1)
    with pytest.raises(StreamError, match="item 1 is missing"):
        reader.read(1)
    reader.close()
    writer.close()
    with pytest.raises(StreamError, match="next file starts at item 2"):
        rewind(tmp_path, Item, 0, lambda item: True)


def test_records_lost_with_the_power_do_not_bring_back_old_offsets(tmp_path: Path) -> None:
    writer = FileStreamWriter(tmp_path, Item, capacity=100)
    write(writer, 0, 1, 2)
    reader = FileStreamReader(tmp_path, Item)
    reader.read(3)
    reader.commit(3)
    reader.close()
    writer.close()
    (path,) = segments(tmp_path)
    path.write_bytes(b"")
    writer = FileStreamWriter(tmp_path, Item, capacity=100)
    write(writer, 3)
    assert FileStreamReader(tmp_path, Item).read(9) == [(3, items(3)[0])]


def test_a_full_disk_is_named_and_leaves_no_half_record(tmp_path: Path) -> None:
    code = """
import pathlib, resource, sys
from tests.unit.test_stream import Item
from pipelinerl.errors import StreamError
from pipelinerl.stream import FileStreamWriter
writer = FileStreamWriter(pathlib.Path(sys.argv[1]), Item, capacity=100)
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
for n in range(3):
    try:
        writer.try_write(Item(n, "x" * 4000))
    except StreamError as error:
        print(n, error)
writer.try_write(Item(3, "small"))
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
writer.try_write(Item(4, "x" * 4000))
print(writer.stats())
"""
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False, timeout=60, cwd=ROOT
    )
    complaint, counts = result.stdout.splitlines()
    assert complaint.startswith(f"2 {segments(tmp_path)[0]}: ")
    assert "Make room" in complaint
    assert counts == "StreamStats(written=4, taken=0, dropped=0)"
    assert [item.n for _, item in FileStreamReader(tmp_path, Item).read(9)] == [0, 1, 3, 4]


def test_a_reader_that_saw_the_start_of_a_record_that_was_taken_back_reads_the_one_in_its_place(tmp_path: Path) -> None:
    writer = FileStreamWriter(tmp_path, Item, capacity=100)
    reader = FileStreamReader(tmp_path, Item)
    write(writer, 0, 1)
    (path,) = segments(tmp_path)
    whole = path.stat().st_size
    with open(path, "ab") as file:
        file.write(b"0123")
    assert len(reader.read(1)) == 1  # reads ahead
    os.truncate(path, whole)
    write(writer, 2)
    assert [item for _, item in reader.read(9)] == items(1, 2)


WRITER = """
import itertools, pathlib, sys
from tests.unit.test_stream import Item
from pipelinerl.stream import FileStreamWriter
writer = FileStreamWriter(pathlib.Path(sys.argv[1]), Item, capacity=int(sys.argv[2]), when_full=sys.argv[3],
                          segment_bytes=50_000)
print(writer.stats().written, flush=True)
for n in itertools.count(writer.stats().written):
    while not writer.try_write(Item(n, "x" * (n * 7919 % 5000))):
        pass
"""


@pytest.mark.parametrize("when_full", ["block", "drop_oldest"])
def test_a_writer_may_be_killed_at_any_time(tmp_path: Path, when_full: WhenFull) -> None:
    reader = FileStreamReader(tmp_path, Item)
    taken: list[int] = []
    for _ in range(4):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), "50", when_full], stdout=subprocess.PIPE, text=True, cwd=ROOT
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
    final = FileStreamWriter(tmp_path, Item, capacity=50, when_full=when_full)
    taken += [offset for offset, _ in reader.read(10_000)]
    stats = final.stats()
    assert taken == sorted(set(taken))
    assert stats.taken == len(taken)
    assert stats.pending == 0
    assert stats.dropped == stats.written - len(taken)
    if when_full == "block":
        assert taken == list(range(stats.written))


# Files: several writers


@pytest.mark.parametrize("when_full", ["block", "drop_oldest"])
def test_writers_in_turn_are_one_stream(tmp_path: Path, when_full: WhenFull) -> None:
    """Segments that another began, capacity that another used, items that another drops."""
    dropped: list[int] = []
    options: Any = {
        "capacity": 5,
        "when_full": when_full,
        "segment_bytes": 60,
        "on_drop": lambda item: dropped.append(item.n),
    }
    reader = FileStreamReader(tmp_path, Item)
    writers = [FileStreamWriter(tmp_path, Item, **options) for _ in range(3)]
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


def test_what_a_killed_writer_tore_does_not_harm_the_others(tmp_path: Path) -> None:
    writers = [FileStreamWriter(tmp_path, Item, capacity=100) for _ in range(2)]
    write(writers[0], 0)
    write(writers[1], 1)
    with open(segments(tmp_path)[0], "ab") as file:
        file.write(b"01234567 {" + b"x" * 100)
    write(writers[0], 2)
    assert [item.n for _, item in FileStreamReader(tmp_path, Item).read(9)] == [0, 1, 2]


MANY = """
import pathlib, sys
from tests.unit.test_stream import Item
from pipelinerl.stream import FileStreamWriter
writer = FileStreamWriter(pathlib.Path(sys.argv[1]), Item, capacity=40, segment_bytes=20_000)
for n in range(400):
    while not writer.try_write(Item(n, sys.argv[2] * (n * 7919 % 500))):
        pass
"""


def test_writers_at_once_lose_nothing(tmp_path: Path) -> None:
    reader = FileStreamReader(tmp_path, Item)
    writers = [subprocess.Popen([sys.executable, "-c", MANY, str(tmp_path), name], cwd=ROOT) for name in "abc"]
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


# Files: going back to a checkpoint


def read_all(directory: Path) -> list[tuple[int, int]]:
    reader = FileStreamReader(directory, Item)
    found = [(offset, item.n) for offset, item in reader.read(10_000)]
    reader.close()
    return found


@given(
    st.tuples(st.integers(0, 25), st.integers(0, 25), st.integers(0, 25)),
    st.integers(1, 30),
    st.sets(st.integers(0, 25)),
    st.booleans(),
)
@settings(deadline=None, max_examples=25)
def test_rewinding_keeps_exactly_what_was_asked(
    history: tuple[int, int, int], capacity: int, unwanted: set[int], torn: bool
) -> None:
    written, taken, from_offset = history
    with TemporaryDirectory() as directory:
        stream = Path(directory)
        dropped: list[int] = []
        writer = FileStreamWriter(
            stream,
            Item,
            capacity=capacity,
            when_full="drop_oldest",
            segment_bytes=60,
            on_drop=lambda item: dropped.append(item.n),
        )
        reader = FileStreamReader(stream, Item)
        for n in range(written):
            writer.try_write(Item(n))
        done = [offset for offset, _ in reader.read(taken)]
        committed = min(from_offset, done[-1] + 1 if done else 0)
        reader.commit(committed)
        writer.close()
        reader.close()
        if torn:
            with open(segments(stream)[-1], "ab") as file:
                file.write(b"12345678 {")

        expected = [n for n in range(from_offset, written) if n not in unwanted and n not in dropped]
        kept = rewind(stream, Item, from_offset, lambda item: item.n not in unwanted)
        assert [item.n for item in kept] == expected
        again = rewind(stream, Item, from_offset, lambda item: True)
        assert again == kept

        numbered = [(from_offset + k, n) for k, n in enumerate(expected)]
        assert read_all(stream) == numbered
        writer = FileStreamWriter(stream, Item, capacity=100)
        stats = writer.stats()
        drops_before = len([n for n in dropped if n < from_offset])
        assert stats == StreamStats(from_offset + len(kept), from_offset - drops_before + len(kept), drops_before)
        writer.try_write(Item(99))
        writer.close()
        assert read_all(stream) == [*numbered, (from_offset + len(kept), 99)]


def test_an_interrupted_rewind_changes_nothing(tmp_path: Path) -> None:
    writer = FileStreamWriter(tmp_path, Item, capacity=100, segment_bytes=100)
    write(writer, *range(20))
    writer.close()

    class InterruptionError(Exception):
        pass

    def keep(item: Item) -> bool:
        if item.n == 12:
            raise InterruptionError
        return False

    with pytest.raises(InterruptionError):
        rewind(tmp_path, Item, 0, keep)
    assert [n for _, n in read_all(tmp_path)] == list(range(20))
    # Killed while it wrote the new folder: the folder without its final name does not count.
    (tmp_path / "000001.partial").mkdir()
    (tmp_path / "000001.partial" / "00000000000000000000.jsonl").write_bytes(b"half")
    assert [n for _, n in read_all(tmp_path)] == list(range(20))
    # Killed before it removed the old folder: the new one counts, and the next rewind removes both.
    assert rewind(tmp_path, Item, 5, lambda item: item.n > 16) == items(17, 18, 19)
    (tmp_path / "000000").mkdir()
    assert read_all(tmp_path) == [(5, 17), (6, 18), (7, 19)]
    rewind(tmp_path, Item, 7, lambda item: True)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["000002"]
    assert read_all(tmp_path) == [(7, 19)]


def test_a_file_of_one_thousand_items_is_readable_by_hand(tmp_path: Path) -> None:
    writer = FileStreamWriter(tmp_path, Item, capacity=2000)
    for n in range(1000):
        writer.try_write(Item(n))
    writer.close()
    (path,) = segments(tmp_path)
    lines = path.read_text().splitlines()
    assert [msgspec.json.decode(line[9:])["n"] for line in lines] == list(range(1000))
