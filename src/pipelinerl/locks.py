"""A lock between processes that its holder's death releases."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK_TIMEOUT_S = 30.0
"""The lock is held for microseconds. It stays held only if its holder is stopped (killed processes lose it)."""
_POLL_S = 0.0002


class FileLock:
    """An exclusive lock on a file, which is created as needed. Each `FileLock` excludes all others, in this process too."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep the others out. Raises TimeoutError if another holds it for too long. It can't be held twice."""
        deadline_s = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise TimeoutError(
                        f"{self._path} has been locked for {LOCK_TIMEOUT_S:.0f} s: the process that holds it is stopped; "
                        "continue or end it"
                    ) from None
                time.sleep(_POLL_S)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Closing twice is fine."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
