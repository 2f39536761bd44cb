"""Streams in files: full disks, damage, rewinding. `test_stream_contract` has the behaviour of streams of all kinds."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelinerl.errors import StreamError
from pipelinerl.interfaces import StreamStats
from pipelinerl.stream.files import FileStore, FileStreamWriter
from tests.limits import small_files
from tests.unit.stream.streams import ROOT, Item, items, write


def test_the_space_of_processed_items_is_reused(tmp_path: Path) -> None:
    writer = FileStreamWriter(tmp_path, Item, capacity=100)
    reader = FileStore(tmp_path).reader("", Item)
    sizes = []
    for first in range(0, 500, 50):
        for n in range(first, first + 50):
            writer.try_write(Item(n, "x" * 5000))
        assert [item.n for _, item in reader.read(50)] == list(range(first, first + 50))
        reader.commit(first + 50)
        sizes.append(sum(path.stat().st_size for path in tmp_path.iterdir()))
    assert sizes[-1] == sizes[2], "neither the database nor its journal grows"


def test_there_is_one_reader_and_none_while_a_stream_is_rewound(tmp_path: Path) -> None:
    writer = FileStreamWriter(tmp_path, Item, capacity=1)
    reader = FileStore(tmp_path).reader("", Item)
    with pytest.raises(StreamError, match="by another reader"):
        FileStore(tmp_path).reader("", Item)
    with pytest.raises(StreamError, match="by another writer"):
        FileStore(tmp_path).rewind("", Item, 0, lambda item: True)
    writer.close()
    with pytest.raises(StreamError, match="by another reader"):
        FileStore(tmp_path).rewind("", Item, 0, lambda item: True)
    reader.close()
    assert FileStore(tmp_path).rewind("", Item, 0, lambda item: True) == []


def test_waiting_items_can_be_inspected_while_the_stream_is_used(tmp_path: Path) -> None:
    assert FileStore(tmp_path).waiting("none", Item) == []
    writer = FileStreamWriter(tmp_path, Item, capacity=3, when_full="drop_oldest")
    reader = FileStore(tmp_path).reader("", Item)
    write(writer, *range(5))
    assert FileStore(tmp_path).waiting("", Item) == items(2, 3, 4)
    reader.read(1)
    assert FileStore(tmp_path).waiting("", Item) == items(3, 4)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    writer = FileStreamWriter(tmp_path, Item, capacity=100)
    write(writer, *range(100))
    writer.close()
    file = tmp_path / "stream.sqlite"
    contents = file.read_bytes()
    file.write_bytes(b"\0" * 100 + contents[100:])
    with pytest.raises(StreamError, match=r"stream\.sqlite: file is not a database\. Restore it, or delete"):
        FileStore(tmp_path).reader("", Item)
    file.write_bytes(contents[:4096] + b"\xff" * (len(contents) - 4096))
    with pytest.raises(StreamError, match=r"stream\.sqlite: .*malformed\. Restore it, or delete"):
        FileStore(tmp_path).reader("", Item).read(100)


def test_items_of_another_type_are_named(tmp_path: Path) -> None:
    writer = FileStreamWriter(tmp_path, Item, capacity=9)
    writer.try_write(Item(0))
    writer.try_write(Item(1), b'{"n":"one"}')
    with pytest.raises(StreamError, match=r"item 1: .*Expected `int`, got `str` - at `\$\.n`"):
        FileStore(tmp_path).reader("", Item).read(2)


def test_a_full_disk_is_named_and_leaves_no_half_record(tmp_path: Path) -> None:
    writer = FileStreamWriter(tmp_path, Item, capacity=100, when_full="drop_oldest")
    large = [Item(n, "x" * 120_000) for n in (0, 1, 2, 4)]
    with small_files(300_000):
        for item in large[:2]:
            writer.try_write(item)
        with pytest.raises(StreamError, match=f"^{tmp_path / 'stream.sqlite'}: .*make room"):
            writer.try_write(large[2])
        assert writer.stats() == StreamStats(written=2, taken=0, dropped=0)
    writer.try_write(large[3])
    assert writer.stats() == StreamStats(written=3, taken=0, dropped=0)
    assert [item.n for _, item in FileStore(tmp_path).reader("", Item).read(9)] == [0, 1, 4]


def test_items_that_were_not_written_drop_nothing(tmp_path: Path) -> None:
    dropped: list[Item] = []
    writer = FileStreamWriter(tmp_path, Item, capacity=1, when_full="drop_oldest", on_drop=dropped.append)
    write(writer, 0)
    with sqlite3.connect(tmp_path / "stream.sqlite") as other:
        other.execute("CREATE TRIGGER refuse BEFORE INSERT ON items BEGIN SELECT RAISE(ABORT, 'refused'); END")
    with pytest.raises(StreamError, match="refused"):
        writer.try_write(Item(1))
    assert not dropped
    assert writer.stats() == StreamStats(written=1, taken=0, dropped=0)


# ---- rewinding to a checkpoint


def read_all(directory: Path) -> list[tuple[int, int]]:
    reader = FileStore(directory).reader("", Item)
    found = [(offset, item.n) for offset, item in reader.read(10_000)]
    reader.close()
    return found


@given(
    st.tuples(st.integers(0, 25), st.integers(0, 25), st.integers(0, 25)),
    st.integers(1, 30),
    st.sets(st.integers(0, 25)),
)
@settings(max_examples=25)
def test_rewinding_keeps_exactly_what_was_asked(history: tuple[int, int, int], capacity: int, unwanted: set[int]) -> None:
    written, taken, from_offset = history
    with TemporaryDirectory() as directory:
        stream = Path(directory)
        dropped: list[int] = []
        writer = FileStreamWriter(
            stream, Item, capacity=capacity, when_full="drop_oldest", on_drop=lambda item: dropped.append(item.n)
        )
        reader = FileStore(stream).reader("", Item)
        for n in range(written):
            writer.try_write(Item(n))
        done = [offset for offset, _ in reader.read(taken)]
        committed = min(from_offset, done[-1] + 1 if done else 0)
        reader.commit(committed)
        writer.close()
        reader.close()

        expected = [n for n in range(from_offset, written) if n not in unwanted and n not in dropped]
        kept = FileStore(stream).rewind("", Item, from_offset, lambda item: item.n not in unwanted)
        assert [item.n for item in kept] == expected
        again = FileStore(stream).rewind("", Item, from_offset, lambda item: True)
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
    writer = FileStreamWriter(tmp_path, Item, capacity=100)
    write(writer, *range(20))
    writer.close()

    class InterruptionError(Exception):
        pass

    def keep(item: Item) -> bool:
        if item.n == 12:
            raise InterruptionError
        return False

    with pytest.raises(InterruptionError):
        FileStore(tmp_path).rewind("", Item, 0, keep)
    assert [n for _, n in read_all(tmp_path)] == list(range(20))
    assert FileStore(tmp_path).rewind("", Item, 5, lambda item: item.n > 16) == items(17, 18, 19)
    assert read_all(tmp_path) == [(5, 17), (6, 18), (7, 19)]


KILLED = """
import os, pathlib, signal, sys
from tests.unit.stream.streams import Item
from pipelinerl.stream.files import FileStore
seen = []
def keep(item):
    seen.append(item)
    if len(seen) == 20:
        os.kill(os.getpid(), signal.SIGKILL)
    return False
FileStore(pathlib.Path(sys.argv[1])).rewind("", Item, 0, keep)
"""


def test_a_killed_rewind_changes_nothing(tmp_path: Path) -> None:
    writer = FileStreamWriter(tmp_path, Item, capacity=100)
    write(writer, *range(20))
    writer.close()
    assert subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False, cwd=ROOT).returncode < 0
    assert [n for _, n in read_all(tmp_path)] == list(range(20))
