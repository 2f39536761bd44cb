"""The server that forks processes for its parent (see `forks`), and what a fork does to become the process asked for.

    python -m pipelinerl.process.forked SOCKET MODULE...        imports these modules

The server has one thread, because a fork copies no other, and computes nothing. A fork runs a module of Python, as the
interpreter does with `-m`.
"""

from __future__ import annotations

import errno
import fcntl
import gc
import importlib
import os
import runpy
import selectors
import socket
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Self

import msgspec

MOST_FILES = 250


class Request(msgspec.Struct, frozen=True):
    """`command`: a module and its arguments. `files`: the numbers that the fork gives to the files sent with this.

    Texts are in the encoding of the file system, because variables may have any bytes.
    """

    command: list[bytes]
    environment: dict[bytes, bytes]
    folder: bytes
    files: list[int]

    @classmethod
    def of(cls, command: Sequence[str], environment: Mapping[str, str], folder: str, files: list[int]) -> Self:
        variables = {os.fsencode(name): os.fsencode(value) for name, value in environment.items()}
        return cls([os.fsencode(word) for word in command], variables, os.fsencode(folder), files)


def serve(requests: socket.socket) -> Request:
    """Fork for each request that arrives. Returns only in forks, with their request."""
    with selectors.DefaultSelector() as selector:
        selector.register(requests, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.data is not None:  # a fork has ended
                    pid, answers = key.data
                    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    with answers, suppress(OSError):
                        answers.send(b"status %d" % status)
                    continue
                _, fds, _, _ = socket.recv_fds(requests, 64, MOST_FILES)
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
                    return _become(files, answers)
                for fd in files:
                    os.close(fd)
                if pid > 0:
                    selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, answers))


def _become(fds: Sequence[int], answers: socket.socket) -> Request:
    """Take the session, the files, the folder and the variables that the first file asks for, and report the pid.

    Ends the process if it can't.
    """
    os.setsid()
    try:
        with open(fds[0], "rb") as described:
            request = msgspec.msgpack.decode(os.pread(described.fileno(), os.fstat(fds[0]).st_size, 0), type=Request)
        if len(fds) - 1 != len(request.files):
            raise OSError(errno.EMFILE, "the server had too many open files to take all of these")
        report = fcntl.fcntl(answers, fcntl.F_DUPFD, max(request.files) + 1)
        held = [fcntl.fcntl(fd, fcntl.F_DUPFD, report) for fd in fds[1:]]
        os.chdir(request.folder)
    except OSError as error:
        answers.send(b"error %d" % (error.errno or 0))
        os._exit(127)
    answers.close()
    for fd, number in zip(held, request.files, strict=True):
        os.dup2(fd, number)
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd not in (*request.files, report):
            with suppress(OSError):  # the listing itself
                os.close(fd)
    os.write(report, b"pid %d" % os.getpid())
    os.close(report)
    os.environb.clear()
    os.environb.update(request.environment)
    return request


def run(request: Request) -> None:
    """Run the module, as the interpreter does."""
    if numpy := sys.modules.get("numpy"):  # `random` draws a new seed by itself
        numpy.random.seed(int.from_bytes(os.urandom(4), "little"))
    warnings.filterwarnings("ignore", module="runpy")  # the module may be imported already
    module, *sys.argv[1:] = map(os.fsdecode, request.command)
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def main() -> None:
    gc.disable()
    for name in sys.argv[2:]:
        with suppress(Exception):
            importlib.import_module(name)
    gc.enable()
    gc.freeze()
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        requests.send(b"ready")
        request = serve(requests)
    run(request)


if __name__ == "__main__":
    main()
