"""The worker process that runs user functions. Its messages to and from the pool are in `messages`: JSON, one per line.

    python -m pipelinerl.environments.user.worker START

START is a `Start` as JSON. Standard input is a socket for calls and replies, one at a time. User code can't use it: for user
code, standard input is empty and standard output goes to standard error.

The process exits with the pool. While it waits for a call, it reads end-of-file from the socket. During a call, the kernel
kills it (see `child`), even if the call never returns to Python. Where no kernel does, the limit on CPU time still applies.
"""

from __future__ import annotations

import io
import math
import os
import resource
import signal
import socket
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Literal, cast

import msgspec

from pipelinerl.environments.user.code import UserFunction, describe, described, find_function, is_away, not_finite, plain
from pipelinerl.environments.user.messages import LINE_SIGNAL, OUT_OF_MEMORY, Call, Limits, Reply, Start, TaskSource
from pipelinerl.errors import EnvironmentSetupError
from pipelinerl.interfaces import Tokenizer
from pipelinerl.process import take_stdin
from pipelinerl.types import Problem

EXTRA_CPU_S = 1
MOST_PRINTED = 16 << 10
MOST_PRINTED_IN_ALL = 16 << 20
"""Bytes that one call, and all calls of a process, may print to the log."""


class Printed(io.FileIO):
    """What user code prints through Python, to standard error: the beginning of each call's text, so that no disk fills up.

    `end_call` says how much was left out.
    """

    def __init__(self) -> None:
        super().__init__(2, "wb", closefd=False)
        self._left, self._left_in_all, self._left_out = MOST_PRINTED, MOST_PRINTED_IN_ALL, 0

    def write(self, data: Any, /) -> int:
        size = memoryview(data).nbytes
        kept = bytes(data[: min(self._left, self._left_in_all)])
        self._left -= len(kept)
        self._left_in_all -= len(kept)
        self._left_out += size - len(kept)
        while kept:
            kept = kept[super().write(kept) :]
        return size

    def end_call(self) -> None:
        left_out, self._left, self._left_out = self._left_out, MOST_PRINTED, 0
        if left_out and self._left_in_all:
            super().write(f"\n({left_out} more bytes that a call printed are left out)\n".encode())


def main(argument: str) -> int:
    start = msgspec.json.decode(argument.encode(), type=Start)
    connection = socket.socket(fileno=take_stdin())
    os.dup2(2, 1)
    printed = Printed()
    sys.stdout = sys.stderr = io.TextIOWrapper(io.BufferedWriter(printed), "utf-8", "backslashreplace", line_buffering=True)
    try:
        if start.task is None:
            functions = {
                name: find_function(spec, allow_async=True, reward=start.rewards.get(name))
                for name, spec in start.functions.items()
            }
        else:
            functions = dict.fromkeys(start.functions, reward_of(start.task))
        if start.limits.writes is not None:
            from pipelinerl.environments.user.sandbox import write_only_below  # noqa: PLC0415 - few runs need it

            write_only_below([Path(folder) for folder in start.limits.writes])
    except EnvironmentSetupError as error:
        connection.sendall(_encode(Reply(number=0, outcome="raised", error=str(error))))
        return 1
    _limit_memory(start.limits)
    connection.sendall(_encode(Reply(number=0, value={name: described(found) for name, found in functions.items()})))
    decoder, process = msgspec.json.Decoder(Call), os.getpid()
    for line in connection.makefile("rb"):
        call = decoder.decode(line)
        spec = start.functions[call.name]
        signal.signal(LINE_SIGNAL, partial(_tell_line, connection, spec))
        _limit_cpu(start.limits)
        reply = answer(call, functions[call.name], spec)
        if os.getpid() != process:  # the call has forked, and the child returned from it, too
            os._exit(1)
        sys.stderr.flush()
        printed.end_call()
        connection.sendall(reply)
    return 0


def _tell_line(connection: socket.socket, spec: str, _: int, frame: FrameType | None) -> None:
    """Reply 0, with the innermost line of the file of `spec` on the stack, if there is one."""
    file = Path(spec.rpartition(":")[0]).name
    while frame is not None and Path(frame.f_code.co_filename).name != file:
        frame = frame.f_back
    connection.sendall(_encode(Reply(number=0, error=f", in line {frame.f_lineno}" if frame else "")))


def answer(call: Call, function: UserFunction, spec: str) -> bytes:
    """The encoded reply to a call. Exits the process on MemoryError: its state is unreliable afterwards."""
    try:
        value = plain(function(*call.arguments))
        if isinstance(value, float) and not math.isfinite(value):  # JSON has no such number
            return _encode(Reply(number=call.number, outcome="bad_value", error=not_finite(call.name, value)))
        try:
            return _encode(Reply(number=call.number, value=value))
        except (TypeError, ValueError, RecursionError):
            what = f"{call.name} returned a {type(value).__name__}, which is not JSON"
            return _encode(Reply(number=call.number, outcome="bad_value", error=what))
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except BaseException as error:  # noqa: BLE001 - user code may raise anything, SystemExit included; only this call fails
        outcome: Literal["raised", "away"] = "away" if is_away(error) else "raised"
        return _encode(Reply(number=call.number, outcome=outcome, error=f"{call.name}: {describe(error, spec)}"))


# ---- the `reward` of a user's class


def reward_of(source: TaskSource) -> UserFunction:
    """The `reward` of a new instance. Raises EnvironmentSetupError."""
    from pipelinerl.environments.registry import build  # noqa: PLC0415 - functions start without it

    sys.path += [place for place in source.search if place not in sys.path]
    tokenizer = _LazyTokenizer(source)
    task: Any = build(source.kind, source.args, cast("Tokenizer", tokenizer), source.seed)
    if "tokenizer" in getattr(getattr(task.reward, "__code__", None), "co_names", ()):
        tokenizer.load()  # a call has no time for it

    def reward(problem: object, *answer: Any) -> Any:
        return task.reward(msgspec.convert(problem, Problem), *answer)

    return reward


class _LazyTokenizer:
    """The model's tokenizer, loaded when it is first used: that takes seconds, and few rewards need it."""

    def __init__(self, source: TaskSource) -> None:
        self._source = source
        self.chat_template = source.chat_template
        self._loaded: Any = None

    def load(self) -> Any:
        """The tokenizer itself."""
        if not self._source.tokenizer:
            raise EnvironmentSetupError(
                f"where the tokenizer of {self._source.kind} comes from is not known, so the process of `reward` has none; "
                "set `isolate_reward = False` in the class"
            )
        if self._loaded is None:
            from transformers import AutoTokenizer  # noqa: PLC0415 - takes seconds

            self._loaded = AutoTokenizer.from_pretrained(self._source.tokenizer, trust_remote_code=self._source.remote_code)
        return self._loaded

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.load()(*arguments, **options)

    def __len__(self) -> int:
        return len(self.load())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.load(), name)


# ---- limits


def _limit_memory(limits: Limits) -> None:
    """Limit memory to `memory_mb` beyond the present use, so that the imports don't count."""
    with suppress(OSError, ValueError):  # not every system has these limits
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + (limits.memory_mb << 20)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _limit_cpu(limits: Limits) -> None:
    """Limit CPU time, for a call that runs on when the pool has died or is too busy to kill it."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    cores = os.cpu_count() or 1
    most = math.ceil(used.ru_utime + used.ru_stime + limits.timeout_s * cores) + EXTRA_CPU_S
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CPU, (most, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def _encode(reply: Reply) -> bytes:
    return msgspec.json.encode(reply) + b"\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
