"""Files are whole or not there: replaced, appended to and shared, also when the disk is full or the writer dies."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pytest

from pipelinerl.errors import RunDirectoryError
from pipelinerl.files import JsonLines, reserve, write_atomically
from pipelinerl.metrics.reading import read_lines
from tests.limits import small_files


class Point(msgspec.Struct, frozen=True):
    x: int
    note: str = ""


def test_a_file_is_replaced_whole_or_not(tmp_path: Path) -> None:
    path = tmp_path / "state"
    write_atomically(path, b"older" * 1000)
    write_atomically(path, b"old")
    with small_files(100), pytest.raises(OSError, match="too large"):
        write_atomically(path, b"new" * 1000)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["state"]


@pytest.mark.parametrize("torn", [b'{"x":', b'{"x":3}', b"{" * 200_000])
def test_a_torn_last_line_is_not_read_and_cut_off_on_opening(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"x":1}\n' + torn)
    assert read_lines(path, Point) == [Point(1)]
    with JsonLines(path) as lines:
        lines.write(Point(2))
    assert path.read_bytes() == b'{"x":1}\n{"x":2,"note":""}\n'


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"x":1}\n{"x":"one"}\n{"x":3}\n')
    with pytest.raises(RunDirectoryError, match=r"metrics\.jsonl, line 2: .*\$\.x"):
        read_lines(path, Point)


def test_a_line_that_does_not_fit_on_the_disk_is_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with JsonLines(path) as lines, small_files(1000):
        lines.write("a" * 700)
        with pytest.raises(OSError, match="too large"):
            lines.write("b" * 700)
        lines.write("c" * 200)
    assert [json.loads(line)[0] for line in path.read_text().splitlines()] == ["a", "c"]


def test_reserving_what_is_not_there_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "big"
    path.write_bytes(b"abc")
    fd = os.open(path, os.O_RDWR)
    with small_files(100_000), pytest.raises(OSError, match="too large"):
        reserve(fd, 1 << 20)
    assert path.read_bytes() == b"abc"
    reserve(fd, 5000)
    os.close(fd)
    assert path.read_bytes() == b"abc".ljust(5000, b"\0")
