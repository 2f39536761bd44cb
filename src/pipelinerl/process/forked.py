"""The server that forks processes for its parent (see `forks`), and what a fork does to become the process asked for.

    python -m pipelinerl.process.forked SOCKET MODULE...        imports these modules

The server has one thread, because a fork copies no other, and computes nothing. A fork runs a module of Python, as the
interpreter does with `-m`.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import io
import os
import random
import runpy
import selectors
import socket
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress

import msgspec

MOST_BYTES, MOST_FILES = 1 << 20, 250


class Request(msgspec.Struct, frozen=True):
    """`command`: a module and its arguments. `files`: the numbers that the fork gives to the files sent with this."""

    command: list[str]
    environment: dict[str, str]
    folder: str
    files: list[int]


def serve(requests: socket.socket, parent: int) -> Request:
    """Fork for each request that arrives. Returns in forks, with their request. Exits when the file `parent` can be read."""
    with selectors.DefaultSelector() as selector:
        selector.register(requests, selectors.EVENT_READ)
        selector.register(parent, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd == parent:
                    sys.exit()
                if key.data is not None:  # a fork has ended
                    pid, answers = key.data
                    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    with answers, suppress(OSError):
                        answers.send(b"status %d" % status)
                    continue
                message, fds, _, _ = socket.recv_fds(requests, MOST_BYTES, MOST_FILES)
                answers, *files = socket.socket(fileno=fds[0]), *fds[1:]
                try:
                    pid = os.fork()
                except OSError as error:
                    with answers:
                        answers.send(b"error %d" % (error.errno or 0))
                    pid = -1
                if pid == 0:
                    others = [other.data[1] for other in selector.get_map().values() if other.data]
                    for part in (selector, requests, *others):
                        part.close()  # before the fork has files of the same numbers
                    return _become(msgspec.json.decode(message, type=Request), files, answers)
                for fd in files:
                    os.close(fd)
                if pid > 0:
                    selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, answers))


def _become(request: Request, files: Sequence[int], answers: socket.socket) -> Request:
    """Take the session, the files, the folder and the variables of a process that was asked for, and report its pid."""
    os.setsid()
    report = fcntl.fcntl(answers, fcntl.F_DUPFD, max(request.files) + 1)
    held = [fcntl.fcntl(fd, fcntl.F_DUPFD, report) for fd in files]
    answers.close()
    for fd, number in zip(held, request.files, strict=True):
        os.dup2(fd, number)
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd not in (*request.files, report):
            with suppress(OSError):  # the listing itself
                os.close(fd)
    try:
        os.chdir(request.folder)
    except OSError as error:
        os.write(report, b"error %d" % (error.errno or 0))
        os._exit(127)
    os.write(report, b"pid %d" % os.getpid())
    os.close(report)
    os.environ.clear()
    os.environ.update(request.environment)
    return request


def run(request: Request) -> None:
    """Run the module, as the interpreter does."""
    random.seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(int.from_bytes(os.urandom(4), "little"))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(write_through=True)
    warnings.filterwarnings("ignore", module="runpy")  # the module may be imported already
    module, *sys.argv[1:] = request.command
    if not sys.flags.safe_path:
        sys.path[0] = request.folder
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def main() -> None:
    gc.disable()
    for name in sys.argv[2:]:
        with suppress(Exception):
            importlib.import_module(name)
    gc.enable()
    gc.freeze()
    sys.stdout.flush()
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        requests.send(b"ready")
        request = serve(requests, 0)
    run(request)


if __name__ == "__main__":
    main()
