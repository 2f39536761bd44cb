"""The status board: every stage publishes what it does and waits for. Any process can read it, also after a stage died."""

from __future__ import annotations

import mmap
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from pipelinerl.files import SharedRecord, map_file
from pipelinerl.interfaces import Board
from pipelinerl.types import StageStatus

STATUS_BYTES = 64 * 1024
"""Room for one status in a status file, as JSON with a few bytes of header. The file has room for two statuses."""

SUFFIX = ".board"
_STAGE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


class MemoryBoard:
    """A status board within one process."""

    def __init__(self) -> None:
        self._statuses: dict[str, StageStatus] = {}

    def publish(self, status: StageStatus) -> None:
        self._statuses[status.stage] = status

    def read(self, stage: str) -> StageStatus | None:
        return self._statuses.get(stage)

    def stages(self) -> Sequence[str]:
        return sorted(self._statuses)


def last_statuses(board: Board) -> dict[str, StageStatus]:
    """The last status of every stage on the board."""
    found = {stage: board.read(stage) for stage in board.stages()}
    return {stage: status for stage, status in found.items() if status is not None}


class _LastRead(NamedTuple):
    record: SharedRecord
    sequence: int
    status: StageStatus | None


class MmapBoard:
    """A status board in a directory: one memory-mapped file per stage, which one process writes and any process reads.

    Publishing and reading copy memory (microseconds, no lock, no system call). The last status of a killed stage stays
    readable. Statuses stay until the files are deleted, so a new run must start with an empty directory.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._maps: dict[str, mmap.mmap] = {}
        self._records: dict[str, SharedRecord] = {}
        self._last_read: dict[str, _LastRead] = {}
        self._encoder = msgspec.json.Encoder()
        self._decoder = msgspec.json.Decoder(StageStatus)

    def publish(self, status: StageStatus) -> None:
        """Replace the stage's status. Only one process may publish a stage. Raises ValueError if too long, OSError."""
        payload = self._encoder.encode(status)
        record = self._record(status.stage, create=True)
        assert record is not None  # noqa: S101 - it was created
        if len(payload) > record.capacity:
            raise ValueError(
                f"the status of stage {status.stage!r} takes {len(payload)} bytes and the status board has room for "
                f"{record.capacity}: publish a bounded number of values (pauses_s, latest, detail)"
            )
        record.write(payload)

    def read(self, stage: str) -> StageStatus | None:
        """The stage's last status, or None if there is none. A status that was read before is not decoded again."""
        last = self._last_read.get(stage)
        if last is None:
            record = self._record(stage, create=False)
            if record is None:
                return None
            last = _LastRead(record, 0, None)
        if last.record.sequence() == last.sequence:
            return last.status
        newest = last.record.read()
        if newest is None:  # written faster than it can be read: return the previous status, which is a moment old
            return last.status
        sequence, payload = newest
        status = self._decoder.decode(payload)
        self._last_read[stage] = _LastRead(last.record, sequence, status)
        return status

    def stages(self) -> Sequence[str]:
        """Names of the stages that have a file, in alphabetical order."""
        return sorted(path.name.removesuffix(SUFFIX) for path in self._directory.glob("*" + SUFFIX))

    def close(self) -> None:
        """Unmap the files. They keep the last statuses."""
        for memory in self._maps.values():
            memory.close()
        self._maps.clear()
        self._records.clear()
        self._last_read.clear()

    def _record(self, stage: str, *, create: bool) -> SharedRecord | None:
        record = self._records.get(stage)
        if record is not None:
            return record
        if not _STAGE_NAME.fullmatch(stage):
            raise ValueError(f"not a stage name (letters, digits, '_', '-', '.'): {stage!r}")
        path = self._directory / (stage + SUFFIX)
        if not create and not _has_room(path):  # the stage has not created it yet, or could not
            return None
        self._maps[stage] = map_file(path, 2 * STATUS_BYTES)
        self._records[stage] = SharedRecord(self._maps[stage], 0, 2 * STATUS_BYTES)
        return self._records[stage]


def _has_room(path: Path) -> bool:
    try:
        return path.stat().st_size >= 2 * STATUS_BYTES
    except FileNotFoundError:
        return False
