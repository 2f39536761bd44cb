"""The messages between a pool of processes and one of them (`worker.py`), and the limits of a call."""

from __future__ import annotations

import signal
from typing import Any, Literal

import msgspec

from pipelinerl.environments.user.code import Signature

OUT_OF_MEMORY = 77
"""Exit status of a worker in which a call exceeded its memory limit."""
LINE_SIGNAL = signal.SIGUSR1
"""Asks a worker for the line of the user's file that it executes."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a call: `timeout_s`, and `memory_mb` beyond what the process uses after importing the functions' files.

    `start_timeout_s` limits that import. `writes`: the only folders below which a call can write; None: not limited.
    """

    timeout_s: float = 10.0
    memory_mb: int = 1024
    start_timeout_s: float = 60.0
    writes: tuple[str, ...] | None = None


class TaskSource(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker needs to make an instance of a user's class: that of `make_environment`, and where its parts are found.

    `tokenizer` is a folder or id, "" if that is not known. `search` is the module search path of the pool's process.
    """

    kind: str
    args: dict[str, Any]
    seed: int
    tokenizer: str
    chat_template: Any
    remote_code: bool
    search: list[str]


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's only argument: functions (`file.py:function`) by name, the signatures of the rewards among them, and
    limits.

    With `task` there is one function, the task's `reward`, and its name stands for the class.
    """

    functions: dict[str, str]
    rewards: dict[str, Signature] = {}
    limits: Limits
    task: TaskSource | None = None


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A call of the function `name`. The reply repeats `number`."""

    number: int
    name: str
    arguments: tuple[Any, ...]


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a call: `value` if it returned, else `error` (one line).

    Number 0 is the outcome of the imports; its value has, by function, whether it is `async def`, and the trainer
    as which it is called.
    """

    number: int
    outcome: Literal["returned", "raised", "away", "bad_value"] = "returned"
    value: Any = None
    error: str = ""
