"""Weights for engine servers: files in a private directory that they can read, written by the trainer."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelinerl.hub import wire
from pipelinerl.interfaces import Messages
from pipelinerl.weights.sending import SharedWeightSender

COPIES = 2
"""The previous update stays until the new one is acknowledged, for a server that is started again meanwhile."""
_PREFIX = "pipelinerl-weights-"
_LOCK = "lock"


class FileWeightSender(SharedWeightSender):
    """Writes to files for engine servers, in a private directory in one of `parents`, which is removed at the end."""

    def __init__(self, parents: Sequence[Path], hub: Messages, engines: int, **options: Any) -> None:
        super().__init__(-1, hub, engines, **options)
        self._folder = WeightFolder(*parents)

    def close(self) -> None:
        super().close()
        self._folder.close()

    def _files(self, size: int) -> Mapping[str, int]:
        return self._folder.open(size)

    def _publish(self, offer: wire.Offer) -> None:
        os.close(os.open(offer.path, os.O_RDWR))  # has a network file system write it, before other machines read it
        super()._publish(offer)


class WeightFolder:
    """A private directory with the files of one sender, removed at the end, or after a crash by the next one beside it.

    `parents`: candidate locations, preferred first; the first with room for all files is used. The directory is locked while
    this process lives.
    """

    def __init__(self, *parents: Path) -> None:
        self._parents = parents
        self._directory: Path | None = None
        self._fds: list[int] = []

    def open(self, size: int) -> dict[str, int]:
        """Make `COPIES` empty files, each of which will have about `size` bytes: descriptors by path. Raises OSError."""
        self._directory = directory = self._make_directory(self._choose(COPIES * size))
        files = {str(path): _opened(path) for path in (directory / f"{number}.safetensors" for number in range(COPIES))}
        self._fds += files.values()
        return files

    def close(self) -> None:
        """Remove the directory and its files."""
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        while self._fds:
            os.close(self._fds.pop())

    def _choose(self, size: int) -> Path:
        for parent in self._parents:
            if os.access(parent, os.W_OK | os.X_OK) and shutil.disk_usage(parent).free > size:
                return parent
        where = ", ".join(map(str, self._parents))
        raise OSError(errno.ENOSPC, f"no room for {COPIES} copies in any of: {where}")

    def _make_directory(self, parent: Path) -> Path:
        for left in parent.glob(f"{_PREFIX}*"):
            _remove_if_abandoned(left)
        name = f"{_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        unlocked = parent / f".{name}"  # until it is locked: a name that the glob of other processes does not match
        unlocked.mkdir(mode=0o700)
        self._fds.append(_opened(unlocked / _LOCK))
        fcntl.flock(self._fds[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        return unlocked.rename(parent / name)


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _remove_if_abandoned(directory: Path) -> None:
    """Remove a directory whose owner has exited, which frees its lock. A directory that can't be opened is left alone."""
    try:
        fd = os.open(directory / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(directory, ignore_errors=True)
    except BlockingIOError:
        pass
    finally:
        os.close(fd)
