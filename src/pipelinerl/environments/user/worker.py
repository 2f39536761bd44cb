"""The worker process that runs user functions for a pool (`pool.py`). The messages between them are at the end of
`code.py`: JSON, one per line.

    python -m pipelinerl.environments.user.worker START

START is a `Start` as JSON. Standard input is a socket for calls and replies, one at a time. User code can't use it: for user
code, standard input is empty and standard output goes to standard error.

The process exits with the pool. While it waits for a call, it reads end-of-file from the socket. During a call, the kernel
kills it (see `process.child`), even if the call never returns to Python.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import socket
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast

import msgspec

from pipelinerl.environments.user.code import (
    LINE_SIGNAL,
    OUT_OF_MEMORY,
    FunctionCall,
    Reply,
    Start,
    TaskSource,
    is_unreachable,
    plain,
)
from pipelinerl.errors import EnvironmentSetupError, RolloutError
from pipelinerl.interfaces import Tokenizer
from pipelinerl.process import take_stdin
from pipelinerl.types import Problem, finite
from pipelinerl.user_code import UserFunction, describe, find_function


def main(argument: str) -> int:
    start = msgspec.json.decode(argument.encode(), type=Start)
    connection = socket.socket(fileno=take_stdin())
    os.dup2(2, 1)
    sys.stdout = sys.stderr  # which writes each line at once
    faulthandler.register(LINE_SIGNAL, connection, all_threads=False, chain=True)
    try:
        if start.task is None:
            functions = {name: find_function(spec, allow_async=True) for name, spec in start.functions.items()}
        else:
            functions = dict.fromkeys(start.functions, reward_of(start.task))
        if start.limits.writes is not None:
            write_only_below([Path(folder) for folder in start.limits.writes])
    except EnvironmentSetupError as error:
        connection.sendall(_encode(Reply(number=0, outcome="raised", error=str(error))))
        return 1
    with suppress(OSError, ValueError):  # not every system has these limits
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + (start.limits.memory_mb << 20)  # the imports don't count
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    connection.sendall(_encode(Reply(number=0)))
    decoder, process = msgspec.json.Decoder(FunctionCall), os.getpid()
    for line in connection.makefile("rb"):
        call = decoder.decode(line)
        reply = answer(call, functions[call.name], start.functions[call.name])
        if os.getpid() != process:  # the call has forked, and the child returned from it, too
            os._exit(1)
        connection.sendall(reply)
    return 0


def answer(call: FunctionCall, function: UserFunction, spec: str) -> bytes:
    """The encoded reply to a call. Exits the process on MemoryError: its state is unreliable afterwards."""
    try:
        value = plain(function(*call.arguments, **call.named))
        try:
            if isinstance(value, float):  # JSON has only finite numbers
                finite(value, f"the result of {call.name}")
            return _encode(Reply(number=call.number, value=value))
        except RolloutError as error:
            return _encode(Reply(number=call.number, outcome="bad_value", error=str(error)))
        except (TypeError, ValueError, RecursionError):
            what = f"{call.name} returned a {type(value).__name__}, which is not JSON"
            return _encode(Reply(number=call.number, outcome="bad_value", error=what))
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except BaseException as error:  # noqa: BLE001 - user code may raise anything, SystemExit included; only this call fails
        outcome: Literal["unreachable", "raised"] = "unreachable" if is_unreachable(error) else "raised"
        return _encode(Reply(number=call.number, outcome=outcome, error=f"{call.name}: {describe(error, spec)}"))


# ---- the `reward` of a user's class


def reward_of(source: TaskSource) -> UserFunction:
    """The `reward` of a new instance. Raises EnvironmentSetupError."""
    from pipelinerl.environments.registry import build  # noqa: PLC0415 - functions start without it

    sys.path += [place for place in source.search if place not in sys.path]
    tokenizer = _LazyTokenizer(source)
    task: Any = build(source.kind, source.args, cast("Tokenizer", tokenizer), source.seed)
    if "tokenizer" in getattr(getattr(task.reward, "__code__", None), "co_names", ()):
        _ = tokenizer.loaded  # a call has no time for it

    def reward(problem: object, *answer: Any) -> Any:
        try:
            return task.reward(msgspec.convert(problem, Problem), *answer)
        except (AttributeError, KeyError) as error:
            error.add_note(
                "`reward` has another process and instance than the other methods; if it needs what they have stored, set "
                "`isolate_reward = False` in the class"
            )
            raise

    return reward


class _LazyTokenizer:
    """The model's tokenizer, loaded when it is first used: that takes seconds, and few rewards need it."""

    def __init__(self, source: TaskSource) -> None:
        self._source = source
        self.chat_template = source.chat_template

    @cached_property
    def loaded(self) -> Any:
        if not self._source.tokenizer:
            raise EnvironmentSetupError(
                f"where the tokenizer of {self._source.kind} comes from is not known, so the process of `reward` has none; "
                "set `isolate_reward = False` in the class"
            )
        from transformers import AutoTokenizer  # noqa: PLC0415 - takes seconds

        return AutoTokenizer.from_pretrained(self._source.tokenizer, trust_remote_code=self._source.remote_code)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.loaded(*arguments, **options)

    def __len__(self) -> int:
        return len(self.loaded)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loaded, name)


# ---- where a process, and all that it starts, may write: Landlock, a part of Linux since 5.13 (landlock(7))

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF, _ASK_VERSION, _PATH_BENEATH, _SET_NO_NEW_PRIVILEGES = 444, 445, 446, 1, 1, 38
_WRITE_FILE, _TRUNCATE, _REFER = 1 << 1, 1 << 14, 1 << 13
_CHANGE_FOLDER = sum(1 << bit for bit in range(4, 13))
"""Remove and make folders, files, links, sockets, pipes and devices."""
_ALWAYS = ("/dev/null", "/dev/zero", "/dev/full", "/dev/tty")


def landlock_version() -> int:
    """0 if this system has no Landlock."""
    import ctypes  # noqa: PLC0415 - few runs need it

    return max(0, int(ctypes.CDLL(None).syscall(_CREATE_RULESET, None, 0, _ASK_VERSION)))


def write_only_below(folders: Sequence[Path]) -> None:
    """From now on, this process and its future children can write, make and remove files only below `folders`.

    Files can still be read everywhere, and the network is not restricted. Raises EnvironmentSetupError if a folder does not
    exist or the system can't do that.
    """
    import ctypes  # noqa: PLC0415 - few runs need it

    library = ctypes.CDLL(None, use_errno=True)

    def checked(result: int) -> int:
        if result < 0:
            raise EnvironmentSetupError(f"`writes` can't be enforced here: {os.strerror(ctypes.get_errno())}")
        return result

    if not (version := landlock_version()):
        raise EnvironmentSetupError("`writes` needs Linux 5.13 or newer with Landlock; leave it out, or use a container")
    handled = _WRITE_FILE | _CHANGE_FOLDER | (_REFER if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    ruleset = struct.pack("=Q", handled)
    rules = checked(library.syscall(_CREATE_RULESET, ruleset, len(ruleset), 0))
    allowed = dict.fromkeys(folders, handled)
    allowed |= dict.fromkeys(map(Path, filter(os.path.exists, _ALWAYS)), handled & (_WRITE_FILE | _TRUNCATE))
    for path, rights in allowed.items():
        try:
            opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError as error:
            raise EnvironmentSetupError(f"writes: {path}: {error.strerror}") from error
        checked(library.syscall(_ADD_RULE, rules, _PATH_BENEATH, struct.pack("=Qi", rights, opened), 0))
        os.close(opened)
    checked(library.prctl(_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    checked(library.syscall(_RESTRICT_SELF, rules, 0))
    os.close(rules)


def _encode(reply: Reply) -> bytes:
    return msgspec.json.encode(reply) + b"\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
