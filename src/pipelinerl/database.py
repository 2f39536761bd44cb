"""SQLite databases that several processes of one machine write to.

The journal is a write-ahead log (WAL): a transaction is one append without a sync, and readers never wait for writers. A
process that is killed at any time leaves the last complete transaction. Errors are `OSError` and `DamagedDatabaseError`:
only the caller can say what the database means to the user.
"""

from __future__ import annotations

import errno
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BUSY_TIMEOUT_S = 30.0
"""Transactions take less than a millisecond. One lasts this long only if its process is stopped (a killed one ends it)."""
_POLL_S = 0.0002

NETWORK_FILE_SYSTEMS = frozenset({"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "fuse.sshfs"})
"""The write-ahead log needs memory that processes share through the file system, which these do not offer reliably."""

_ERRNO = {
    sqlite3.SQLITE_FULL: errno.ENOSPC,
    sqlite3.SQLITE_IOERR: errno.EIO,
    sqlite3.SQLITE_READONLY: errno.EROFS,
    sqlite3.SQLITE_CANTOPEN: errno.ENOENT,
    sqlite3.SQLITE_PERM: errno.EACCES,
}


class DamagedDatabaseError(ValueError):
    """The file is not a database, or its contents are inconsistent."""


class Database:
    """One connection to a database. Several may be open, in one or several processes."""

    def __init__(self, path: Path, schema: str, *, temporary: bool = False) -> None:
        """`schema` is executed at each opening, so it must allow for tables that exist.

        A `temporary` database need not survive a failure of the machine: nothing waits for the disk, and SQLite copies the
        log into the database once it has 1,000 pages. Otherwise `durable` does both.

        Raises OSError if the file can't be opened or is on a network file system, DamagedDatabaseError.
        """
        self._path = path
        refuse_network_file_system(path.parent)
        with self._errors_as_os_errors():
            self._connection = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
            try:
                kept = ("synchronous=OFF",) if temporary else ("synchronous=NORMAL", "wal_autocheckpoint=0")
                for setting in ("journal_mode=WAL", *kept):
                    self._execute(f"PRAGMA {setting}")
                with self.transaction():
                    for statement in schema.split(";"):
                        self._connection.execute(statement)
            except BaseException:
                self._connection.close()
                raise

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Change the database wholly or, on any exception, not at all. Excludes all other transactions meanwhile.

        Raises TimeoutError if another process keeps it locked too long.
        """
        with self._errors_as_os_errors(), self._connection as connection:
            self._execute("BEGIN IMMEDIATE")
            yield connection

    @contextmanager
    def durable(self) -> Iterator[None]:
        """Transactions that end within this block are on the disk afterwards, with all earlier ones.

        Also copies the log into the database, so that the log does not grow.
        """
        with self._errors_as_os_errors():
            self._connection.execute("PRAGMA synchronous=FULL")
            try:
                yield
            finally:
                self._connection.execute("PRAGMA synchronous=NORMAL")
            self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    def rows(self, query: str, *values: int | bytes) -> list[Any]:
        """The rows that a query finds, each a tuple. Outside of a transaction it sees the last complete one."""
        with self._errors_as_os_errors():
            return self._execute(query, values).fetchall()

    def changes(self) -> tuple[int, int]:
        """Differs from an earlier value if any process has changed the database since. Takes a microsecond or two."""
        with self._errors_as_os_errors():
            (others,) = self._connection.execute("PRAGMA data_version").fetchone()
            return int(others), self._connection.total_changes

    def close(self) -> None:
        """Idempotent."""
        self._connection.close()

    def _execute(self, statement: str, values: Sequence[int | bytes] = ()) -> sqlite3.Cursor:
        """Repeat the statement while another process has the lock. SQLite's own waiting sleeps for up to 0.1 s at a time."""
        deadline_s = time.monotonic() + BUSY_TIMEOUT_S
        while True:
            try:
                return self._connection.execute(statement, values)
            except sqlite3.OperationalError as error:
                if _code(error) != sqlite3.SQLITE_BUSY or time.monotonic() > deadline_s:
                    raise
                time.sleep(_POLL_S)

    @contextmanager
    def _errors_as_os_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            code = _code(error)
            if code == sqlite3.SQLITE_BUSY:
                raise TimeoutError(
                    f"{self._path} has been locked for {BUSY_TIMEOUT_S:.0f} s: the process that holds it is stopped; "
                    "continue or end it"
                ) from error
            if code in _ERRNO:
                raise OSError(_ERRNO[code], str(error), str(self._path)) from error
            raise
        except sqlite3.DatabaseError as error:
            raise DamagedDatabaseError(f"{self._path}: {error}") from error


def _code(error: sqlite3.Error) -> int:
    """The primary result code."""
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF


def refuse_network_file_system(directory: Path, mounts: Path = Path("/proc/self/mounts")) -> None:
    """Raises OSError if `directory` is on a network file system (if `mounts` lists them; else nothing is checked)."""
    if not mounts.is_file():
        return
    where = directory.resolve()
    best, kind = "", ""
    for line in mounts.read_text().splitlines():
        _, point, found, *_ = line.split(" ")
        point = point.encode().decode("unicode_escape")  # a space is written as \040
        if where.is_relative_to(point) and len(point) >= len(best):
            best, kind = point, found
    if kind in NETWORK_FILE_SYSTEMS:
        raise OSError(
            errno.EOPNOTSUPP,
            f"it is on a network file system ({kind}), where processes can't share a database: choose a local disk",
            str(directory),
        )
