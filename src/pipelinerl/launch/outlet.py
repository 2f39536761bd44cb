"""Where an actor's groups go: into the stream and, for readers, into `rollouts.jsonl`, each encoded once."""

from __future__ import annotations

from pathlib import Path

import msgspec

from pipelinerl.files import JsonLines
from pipelinerl.interfaces import StreamStats, StreamWriter
from pipelinerl.types import Group


class Outlet:
    """Both `writer` and `records` of an `Actor`. Other actors write to the same places, one at a time."""

    def __init__(self, stream: StreamWriter[Group], rollouts: Path) -> None:
        self._stream = stream
        self._rollouts = rollouts
        self._encoder = msgspec.json.Encoder()
        self._group: Group | None = None
        self._json = b""
        self._lines: JsonLines | None = None

    def try_write(self, item: Group, encoded: bytes | None = None) -> bool:
        return self._stream.try_write(item, encoded or self._encoded(item))

    def write(self, record: Group) -> None:
        """Append to `rollouts.jsonl`. If another actor has written to it, it is opened anew: what that one has torn in its
        death is cut off.
        """
        if self._lines is not None and not self._lines.alone():
            self._lines.close()
            self._lines = None
        self._lines = self._lines or JsonLines(self._rollouts)
        self._lines.write(msgspec.Raw(self._encoded(record)))

    def stats(self) -> StreamStats:
        return self._stream.stats()

    def close(self) -> None:
        """Close the record. The stream is its owner's."""
        if self._lines is not None:
            self._lines.close()

    def _encoded(self, group: Group) -> bytes:
        if group is not self._group:
            self._group, self._json = group, self._encoder.encode(group)
        return self._json
