"""An incremental index of the lines of a large file that may still be growing. Line contents are read on demand."""

from __future__ import annotations

import os
from array import array
from pathlib import Path

from pipelinerl.errors import RunDirectoryError

CHUNK_BYTES = 1 << 20
LOOK_BYTES = 1 << 25
"""Bytes that one `look` scans, up to the end of a line: about ten milliseconds, so that the screen stays responsive."""
MAX_LINE_BYTES = 1 << 28


class Lines:
    """The complete lines of `path`, found by `look`.

    A last line without a newline is ignored: it is still being written, or partial. The file need not exist yet. Methods
    raise RunDirectoryError if it can't be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ends = array("Q")
        self._size = 0
        self._complete = 0  # file size when `look` last reached the end

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def share(self) -> float:
        """The fraction of the file that was scanned, 0 to 1."""
        return self._end / self._size if self._size else 1.0

    def look(self, budget: int = LOOK_BYTES) -> bool:
        """Find further lines in the next `budget` bytes. Returns whether there is more of the file."""
        try:
            with open(self.path, "rb", buffering=0) as file:
                return self._look(file.fileno(), budget)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise RunDirectoryError(f"can't read {self.path}: {error.strerror}") from error

    def read(self, i: int, most: int = MAX_LINE_BYTES) -> bytes:
        """The first `most` bytes of line `i` (from 0), including its newline."""
        start = self._ends[i - 1] if i else 0
        try:
            with open(self.path, "rb", buffering=0) as file:
                return os.pread(file.fileno(), min(most, self._ends[i] - start), start)
        except OSError as error:
            raise RunDirectoryError(f"can't read {self.path}: {error.strerror}") from error

    @property
    def _end(self) -> int:
        return self._ends[-1] if self._ends else 0

    def _look(self, fd: int, budget: int) -> bool:
        self._size = size = os.fstat(fd).st_size
        if size < self._end:
            raise RunDirectoryError(f"{self.path} was replaced while it was being read; start again")
        if size == self._complete:
            return False
        # Start at the last newline: a resumed run truncates a partial line and writes another one in its place.
        start = position = self._end
        while position < size:
            chunk = os.pread(fd, min(CHUNK_BYTES, size - position), position)
            if not chunk:  # truncated in the meantime
                break
            newline = chunk.find(b"\n")
            while newline >= 0:
                self._ends.append(position + newline + 1)
                newline = chunk.find(b"\n", newline + 1)
            position += len(chunk)
            if position - start >= budget and self._end > start:
                return position < size
        self._complete = size
        return False
