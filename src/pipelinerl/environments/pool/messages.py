"""Messages between the pool and its worker processes: JSON, one message per line, one call at a time."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

MAX_REPLY_BYTES = 4 << 20
"""Longest reply line of a worker."""
OUT_OF_MEMORY = 77
"""Exit status of a worker in which a call exceeded its memory limit."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a call: `timeout_s`, and `memory_mb` beyond what the process uses after importing the functions' files.

    `start_timeout_s` limits that import.
    """

    timeout_s: float = 10.0
    memory_mb: int = 1024
    start_timeout_s: float = 60.0


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's only argument: functions (`file.py:function`) by name, and limits."""

    functions: dict[str, str]
    limits: Limits


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A call of the function `name`. The reply repeats `number`."""

    number: int
    name: str
    arguments: tuple[Any, ...]


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a call: `value` if it returned, else `error` (one line). Number 0 is the outcome of the imports."""

    number: int
    outcome: Literal["returned", "raised", "bad_value"] = "returned"
    value: Any = None
    error: str = ""
