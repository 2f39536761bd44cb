"""Segment files: the on-disk format of a file stream's items.

A segment is named after the offset of its first item and holds one item per line: CRC-32 in eight hex digits, a space, the
item as JSON, a newline. So item `o` of segment `s` is on line `o - s + 1`, and `cut -c10-` prints the JSON.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from pipelinerl.errors import StreamError

T = TypeVar("T")

LINE_OVERHEAD_BYTES = 10
"""Bytes of a line besides the item's JSON: checksum, space, newline."""

_SUFFIX = ".jsonl"


def segment_path(directory: Path, first: int) -> Path:
    return directory / f"{first:020d}{_SUFFIX}"


def list_segments(directory: Path) -> list[int]:
    """First offsets of the segments in `directory`, ascending."""
    return sorted(int(path.stem) for path in directory.glob("*" + _SUFFIX))


def encode_line(payload: bytes) -> bytes:
    """The line of one item. msgspec's JSON contains no newline."""
    return b"%08x %b\n" % (zlib.crc32(payload), payload)


def decode_line(line: bytes) -> bytes | None:
    """The JSON of a line, or None if the line is incomplete or damaged."""
    payload = line[9:-1]
    return payload if encode_line(payload) == line else None


def read_segment(path: Path, *, newest: bool) -> Iterator[bytes]:
    """The JSON of each item of a segment, in order.

    Only the newest segment of a stream may end in a partial record, which is skipped. Raises StreamError with file and line
    for any other bad record.
    """
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            payload = decode_line(line)
            if payload is None:
                if newest and not file.read(1):
                    return
                raise damaged(path, number, "its checksum does not match")
            yield payload


def damaged(path: Path, line: int, what: str) -> StreamError:
    return StreamError(
        f"{path}, line {line}: not a record of this stream ({what}). The file was changed or its disk lost data: "
        "restore it, or delete the stream's directory to go on without what was in it"
    )


class SegmentCursor:
    """Reads items by ascending offset, while other processes append items and delete segments that were read."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file: BufferedReader | None = None
        self._first = 0  # first offset of the open segment
        self._next = 0  # offset of the next line
        self._position = 0  # of the next line in the file, bytes

    def payload(self, offset: int) -> bytes:
        """The JSON of item `offset`, which must be completely written. Raises StreamError if it is damaged or missing."""
        if self._file is None or offset < self._next:
            self._open(self._segment_of(offset))
        while True:
            payload = self._line()
            if payload is not None:
                self._next += 1
                if self._next > offset:
                    return payload
                continue
            following = self._segment_of(offset)
            if following == self._first:
                raise damaged(*self._upcoming(), f"item {offset} is missing")
            self._open(following)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def location(self) -> tuple[Path, int]:
        """File and line number of the item returned last, for messages."""
        return segment_path(self._directory, self._first), self._next - self._first

    def _segment_of(self, offset: int) -> int:
        candidates = [first for first in list_segments(self._directory) if first <= offset]
        if not candidates:
            raise StreamError(f"{self._directory}: the segment file with item {offset} is missing; restore it")
        return candidates[-1]

    def _open(self, first: int, position: int = 0) -> None:
        self.close()
        self._file = open(segment_path(self._directory, first), "rb")  # noqa: SIM115 - kept open between calls
        self._file.seek(position)
        if position == 0:
            self._first = self._next = first
        self._position = position

    def _line(self) -> bytes | None:
        """The payload of the next line, or None at the end of the segment."""
        assert self._file is not None  # noqa: S101 - opened by the only caller
        line = self._file.readline()
        payload = decode_line(line)
        if line and payload is None:
            # The buffer may hold part of a record that was truncated (disk full) and rewritten: read the line again.
            self._open(self._first, self._position)
            line = self._file.readline()
            payload = decode_line(line)
            if payload is None:
                raise damaged(*self._upcoming(), "its checksum does not match")
        self._position += len(line)
        return payload

    def _upcoming(self) -> tuple[Path, int]:
        return segment_path(self._directory, self._first), self._next - self._first + 1


class ItemReader(Generic[T]):
    """Reads and decodes items by offset."""

    def __init__(self, item_type: type[T]) -> None:
        self._decoder = msgspec.json.Decoder(item_type)
        self._cursor: SegmentCursor | None = None

    def item(self, directory: Path, offset: int) -> T:
        """Raises StreamError if the item is damaged, missing or of another type."""
        self._cursor = self._cursor or SegmentCursor(directory)
        payload = self._cursor.payload(offset)
        return decode_item(self._decoder, payload, *self._cursor.location())

    def close(self) -> None:
        if self._cursor is not None:
            self._cursor.close()


def decode_item(decoder: msgspec.json.Decoder[T], payload: bytes, path: Path, line: int) -> T:
    """Raises StreamError with file and line if the JSON is not one of the stream's items."""
    try:
        return decoder.decode(payload)
    except msgspec.DecodeError as error:
        raise damaged(path, line, str(error)) from error


def read_records(directory: Path, from_offset: int) -> Iterator[tuple[int, bytes, Path, int]]:
    """Offset, JSON, file and line of every item from `from_offset` on that is still on disk."""
    segments = list_segments(directory)
    for first, following in zip(segments, [*segments[1:], None], strict=True):
        if following is not None and following <= from_offset:
            continue
        path = segment_path(directory, first)
        count = 0
        for count, payload in enumerate(read_segment(path, newest=following is None), start=1):
            if first + count > from_offset:
                yield first + count - 1, payload, path, count
        if following is not None and first + count != following:
            raise damaged(path, count + 1, f"the next file starts at item {following}")
