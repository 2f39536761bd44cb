"""Growing files are read once, from where the last look ended; curves have a bounded number of points."""

from __future__ import annotations

import math
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipelinerl.experiments.watch import follow
from pipelinerl.experiments.watch.follow import Curves, Seen, Tail


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
    assert seen(tail) == [3, 4]
    assert tail.damaged == 1
    assert seen(tail) == []
    assert not tail.more
    assert not tail.restarted


def test_a_file_that_was_replaced_or_cut_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    tail = Tail(path, Numbered)
    write(path, 1, 2, 3)
    assert seen(tail) == [1, 2, 3]
    path.unlink()
    assert seen(tail) == []
    write(path, 7, 8, 9, 10)
    assert seen(tail) == [7, 8, 9, 10]
    assert tail.restarted
    path.write_bytes(b'{"n":7}\n')
    assert seen(tail) == [7]
    assert tail.restarted


def test_a_large_file_is_read_in_parts_and_of_the_newest_only_the_end(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(follow, "LOOK_BYTES", 40)
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


def follow_page(curves: Curves, page: dict[str, list[Any]], at: Seen) -> Seen:
    """What a page does with a part of the curves."""
    part, at = curves.since(at)
    if part is not None:
        for name, values in part["columns"].items():
            page[name] = [*page.get(name, [])[: part["start"]], *values]
    return at


def test_a_page_that_follows_has_what_a_new_page_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "MOST_POINTS", 8)
    curves, page, at = Curves(), dict[str, list[Any]](), Seen()
    for n in range(100):
        curves.append({"n": n, **({"late": 2.0} if n >= 50 else {}), "bad": math.nan})
        if n in (17, 60):
            curves.cut(n - 4)  # resumed
        if n % 3 == 0:
            at = follow_page(curves, page, at)
    at = follow_page(curves, page, at)
    fresh: dict[str, list[Any]] = {}
    follow_page(curves, fresh, Seen())
    assert page == fresh
    assert 4 < len(page["n"]) <= 8
    assert set(page["bad"]) == {None}
    assert page["n"] == sorted(page["n"])
    assert page["late"][0] is None
    assert page["late"][-1] == 2.0
    assert curves.since(at) == (None, at)
