"""Weight files for engine servers: safetensors files in a private directory, removed even after a crash."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
from pathlib import Path

from pipelinerl.errors import WeightUpdateError
from pipelinerl.files import remedy
from pipelinerl.interfaces import WeightUpdate
from pipelinerl.models.tensor_file import write_safetensors
from pipelinerl.serving.wire import WeightUpdateRequest

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - shared with the servers on this machine
_PREFIX = "pipelinerl-weights-"
_LOCK = "lock"
_COPIES = 2
"""The previous update stays until the new one is acknowledged. Its file is then overwritten: half the cost of a new file."""


class WeightFiles:
    """Writes updates into a private directory, created at the first update.

    `parents`: candidate locations, preferred first; the first with room for two copies of the weights is used. The directory
    is locked while this process lives. Directories of killed processes in the same location are removed.
    """

    def __init__(self, *parents: Path) -> None:
        self._parents = parents
        self._directory: Path | None = None
        self._lock_fd = -1
        self._spare: Path | None = None

    def write(self, update: WeightUpdate) -> WeightUpdateRequest:
        """Write all tensors of the update to a file; returns the request to apply it. Raises WeightUpdateError."""
        size = sum(tensor.numel() * tensor.element_size() for tensor in update.tensors.values())
        try:
            if self._directory is None:
                self._directory = self._make_directory(self._choose(size))
            path = self._directory / f"v{update.version}-{secrets.token_hex(4)}.safetensors"
            if self._spare is not None:
                self._spare.rename(path)
                self._spare = None
            try:
                write_safetensors(update.tensors, path)
            except BaseException:
                path.unlink(missing_ok=True)
                raise
        except OSError as error:
            where = self._directory or ", ".join(map(str, self._parents))
            raise WeightUpdateError(
                f"can't write {size / 1e6:.0f} MB of weights for the engine servers to {where}: "
                f"{error.strerror or error}; {remedy(error)}, or name another directory"
            ) from error
        except ValueError as error:
            raise WeightUpdateError(f"weights can't be sent to engine servers: {error}") from None
        return WeightUpdateRequest(version=update.version, checksum=update.checksum, path=str(path))

    def remove(self, path: str) -> None:
        """Release a file: the next update may overwrite it."""
        if self._spare is not None:
            self._spare.unlink(missing_ok=True)
        self._spare = Path(path)

    def close(self) -> None:
        """Remove the directory and its files."""
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            os.close(self._lock_fd)
            self._directory = None

    def _choose(self, size: int) -> Path:
        for parent in self._parents:
            if os.access(parent, os.W_OK | os.X_OK) and shutil.disk_usage(parent).free > _COPIES * size:
                return parent
        raise OSError(errno.ENOSPC, f"no room for two copies in any of: {', '.join(map(str, self._parents))}")

    def _make_directory(self, parent: Path) -> Path:
        for left in parent.glob(f"{_PREFIX}*"):
            _remove_if_abandoned(left)
        name = f"{_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        unlocked = parent / f".{name}"  # until it is locked: a name that the glob of other processes does not match
        unlocked.mkdir(mode=0o700)
        self._lock_fd = os.open(unlocked / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return unlocked.rename(parent / name)


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
