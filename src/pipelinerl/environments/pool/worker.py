"""The process in which functions of a user run.

    python -m pipelinerl.environments.pool.worker START

START is a `Start` as JSON. Standard input is a socket: calls come in, replies go out, one at a time. The user's code has
neither: its standard input is empty, and what it prints goes to standard error.

The process ends when the pool does. Waiting, it reads the end of its socket. In the midst of a call, the kernel sends
SIGIO, as nobody holds the other end of the lifeline any more; that ends it even if the call never returns to Python.
Where a system does not send it, the limit on CPU time is left.
"""

from __future__ import annotations

import fcntl
import math
import os
import resource
import select
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

import msgspec

from pipelinerl.environments.pool.messages import OUT_OF_MEMORY, Call, Limits, Reply, Start
from pipelinerl.environments.user.code import UserFunction, describe, find_function, not_finite, plain
from pipelinerl.errors import EnvironmentSetupError

EXTRA_CPU_S = 1


def main(argument: str) -> int:
    start = msgspec.json.decode(argument.encode(), type=Start)
    connection = _take_connection()
    if not _end_with_pool(start.lifeline_fd):
        return 0
    try:
        functions = {name: find_function(spec) for name, spec in start.functions.items()}
    except EnvironmentSetupError as error:
        _send(connection, Reply(number=0, outcome="raised", error=str(error)))
        return 1
    _limit_memory(start.limits)
    _send(connection, Reply(number=0))
    decoder = msgspec.json.Decoder(Call)
    for line in connection.makefile("rb"):
        call = decoder.decode(line)
        _limit_cpu(start.limits)
        _send(connection, answer(call, functions[call.name], start.functions[call.name]))
    return 0


def answer(call: Call, function: UserFunction, spec: str) -> bytes:
    """The reply to a call, encoded. Ends the process if it needs more memory than there is: nothing is sure after that."""
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
    except BaseException as error:  # noqa: BLE001 - code that isn't ours, SystemExit included: it costs this call
        return _encode(Reply(number=call.number, outcome="raised", error=f"{call.name}: {describe(error, spec)}"))


def _take_connection() -> socket.socket:
    connection = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return connection


def _end_with_pool(lifeline_fd: int) -> bool:
    """Have the kernel end this process, and those it started, when the lifeline closes. False if it has already."""
    os.set_inheritable(lifeline_fd, False)
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(lifeline_fd, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline_fd, fcntl.F_SETFL, fcntl.fcntl(lifeline_fd, fcntl.F_GETFL) | os.O_ASYNC)
    return not select.select([lifeline_fd], [], [], 0)[0]


def _limit_memory(limits: Limits) -> None:
    """On top of what the process has by now: what its imports have mapped is not the calls' doing."""
    with suppress(OSError, ValueError):  # not every system has these limits
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + (limits.memory_mb << 20)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _limit_cpu(limits: Limits) -> None:
    """For a call that computes on when the pool is not there, or too busy, to end it."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    cores = os.cpu_count() or 1
    most = math.ceil(used.ru_utime + used.ru_stime + limits.timeout_s * cores) + EXTRA_CPU_S
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CPU, (most, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def _encode(reply: Reply) -> bytes:
    return msgspec.json.encode(reply) + b"\n"


def _send(connection: socket.socket, reply: Reply | bytes) -> None:
    connection.sendall(reply if isinstance(reply, bytes) else _encode(reply))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
