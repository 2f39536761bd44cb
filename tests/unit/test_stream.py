"""Streams in files: what disks and processes do to them. What streams of all kinds do is in `test_stream_contract`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelinerl.errors import StreamError
from pipelinerl.interfaces import StreamStats
from pipelinerl.stream import FileStreamReader, FileStreamWriter, rewind
from tests.unit.streams import ROOT, Item, items, write


def segments(directory: Path) -> list[Path]:
    return sorted(directory.glob("*/*.jsonl"))


# Durability


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
from tests.unit.streams import Item
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


# Several writers


def test_what_a_killed_writer_tore_does_not_harm_the_others(tmp_path: Path) -> None:
    writers = [FileStreamWriter(tmp_path, Item, capacity=100) for _ in range(2)]
    write(writers[0], 0)
    write(writers[1], 1)
    with open(segments(tmp_path)[0], "ab") as file:
        file.write(b"01234567 {" + b"x" * 100)
    write(writers[0], 2)
    assert [item.n for _, item in FileStreamReader(tmp_path, Item).read(9)] == [0, 1, 2]


# Going back to a checkpoint


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
