"""Growing files are read once, from where the last look ended."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipelinerl.metrics import reading
from pipelinerl.metrics.reading import Records, Tail
from tests.unit.record_parts import evaluation, step, write_records


class Numbered(msgspec.Struct):
    n: int


def write(path: Path, *numbers: int, end: bytes = b"") -> None:
    with path.open("ab") as file:
        file.write(b"".join(b'{"n":%d}\n' % n for n in numbers) + end)


def seen(tail: Tail[Numbered]) -> list[int]:
    return [one.n for one in tail.look()]


def test_each_line_is_read_once_and_only_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    tail = Tail(path, Numbered)
    assert seen(tail) == []
    write(path, 1, 2, end=b'{"n":')
    assert seen(tail) == [1, 2]
    write(path, end=b"3}\nnonsense\n")
    write(path, 4)
    assert (seen(tail), tail.damaged) == ([3, 4], 1)
    assert (seen(tail), tail.more, tail.restarted) == ([], False, False)
    path.unlink()  # a file that was replaced or cut is read from its start
    assert seen(tail) == []
    write(path, 7, 8, 9, 10)
    assert (seen(tail), tail.restarted) == ([7, 8, 9, 10], True)
    path.write_bytes(b'{"n":7}\n')
    assert (seen(tail), tail.restarted) == ([7], True)


def test_a_large_file_is_read_in_parts_and_of_the_newest_only_the_end(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(reading, "LOOK_BYTES", 40)
    path = tmp_path / "lines"
    write(path, *range(10, 30))
    tail, newest = Tail(path, Numbered), Tail(path, Numbered, newest=True)
    parts = [seen(tail)]
    while tail.more:
        parts.append(seen(tail))
    assert list(chain.from_iterable(parts)) == list(range(10, 30))
    assert all(len(part) <= 4 for part in parts)
    assert seen(newest) == [26, 27, 28, 29]  # its first line is only a part
    write(path, 30)
    assert seen(newest) == [30]
    write(path, end=b'{"n":1, "long": "%s"}\n' % (b"x" * 200))
    assert seen(tail) == [30]
    assert seen(tail) == [1]


def test_a_line_without_an_end_is_skipped_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or each look would read it again from its beginning, in the loop that serves a page."""
    monkeypatch.setattr(reading, "LOOK_BYTES", 40)
    monkeypatch.setattr(reading, "MAX_LINE_BYTES", 100)
    path = tmp_path / "numbers.jsonl"
    write(path, 1, end=b"x" * 500)
    tail = Tail(path, Numbered)
    assert seen(tail) == [1]
    place = tail.place
    assert seen(tail) == []
    assert place + 100 <= tail.place < place + 200
    write(path, 2, end=b"\n")
    write(path, 3)
    assert [one for _ in range(6) for one in seen(tail)] == [3]
    assert tail.damaged == 2


@pytest.mark.parametrize("look_bytes", [40, 1 << 22])
def test_records_are_read_once_and_in_the_order_of_their_times(
    look_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "LOOK_BYTES", look_bytes)
    first, second, third = step(1, 1.0), evaluation("online", 1, 1.5), step(2, 2.0)
    records = Records(tmp_path)
    assert records.read() == []
    write_records(tmp_path, first, third, second)
    assert records.read() == [first, second, third]
    assert records.read() == []
    before = records.place
    write_records(tmp_path, step(3), step(4))
    assert records.read() == [step(3), step(4)]
    assert Records(tmp_path, before).read() == [step(3), step(4)]
