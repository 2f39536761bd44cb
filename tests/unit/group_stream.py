"""A stream of groups in memory, with both of its ends, for tests of what reads it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from pipelinerl.hub.stream import FileStream
from pipelinerl.types import Group


class GroupStream:
    def __init__(self, prepare: Callable[[Group], Any] = lambda group: group) -> None:
        self._stream, self._prepare = FileStream(), prepare

    @property
    def waiting(self) -> int:
        return self._stream.waiting

    def write(self, group: Group) -> None:
        self._stream.append(msgspec.json.encode(group))

    def read(self, limit: int) -> Sequence[tuple[int, Any]]:
        items = self._stream.read(limit)
        return [(offset, self._prepare(msgspec.json.decode(json, type=Group))) for offset, json in items]

    def commit(self, offset: int) -> None:
        self._stream.commit(offset)
