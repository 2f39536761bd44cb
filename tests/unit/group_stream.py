"""A stream of groups in memory, with both of its ends, for tests of what reads it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pipelinerl.stream.memory import MemoryStream
from pipelinerl.types import Group


class GroupStream:
    def __init__(self) -> None:
        self._stream = MemoryStream()

    @property
    def waiting(self) -> int:
        return self._stream.waiting

    def write(self, group: Group) -> None:
        self._stream.append(msgspec.json.encode(group))

    def read(self, limit: int) -> Sequence[tuple[int, Group]]:
        return [(offset, msgspec.json.decode(json, type=Group)) for offset, json in self._stream.read(limit)]

    def commit(self, offset: int) -> None:
        self._stream.commit(offset)
