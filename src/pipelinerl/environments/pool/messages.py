"""What goes between the pool and its processes: JSON, one message a line, a call at a time."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

MAX_REPLY_BYTES = 4 << 20
"""Longest line that a worker may answer with."""
OUT_OF_MEMORY = 77
"""Exit status of a worker in which a call asked for more memory than it may have."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Of a call: `timeout_s` of time, `memory_mb` more than the process has once the functions' files are imported.

    `start_timeout_s` bounds that import.
    """

    timeout_s: float = 10.0
    memory_mb: int = 1024
    start_timeout_s: float = 60.0


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's only argument: functions (`file.py:function`) by name, limits, and a pipe whose other end the pool has."""

    functions: dict[str, str]
    limits: Limits
    lifeline_fd: int


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """Call the function of this name. `number` comes back in the reply."""

    number: int
    name: str
    arguments: tuple[Any, ...]


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """How a call ended: `value` for "returned", `error` (one line) for the others. Number 0: the imports, as a call."""

    number: int
    outcome: Literal["returned", "raised", "bad_value"] = "returned"
    value: Any = None
    error: str = ""
