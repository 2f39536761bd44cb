"""The package's processes that tests start are forked from one process that has imported what they import.

The imports of torch and transformers take a process seconds, and tests start hundreds of processes. `install` replaces
`subprocess.Popen` by a class that asks a fork server for those that run this package, in this process and in forked ones.
All others are started as ever. A forked process has its own session, files, folder, environment, arguments, random numbers,
and ends like any other. What differs: its parent is the server, and `ps` shows the server's command line. Tests of what a
process imports start it with other variables of Python, so that it is not forked.

    python -m tests.forks FOLDER PID        the server; it ends with the process PID
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import io
import json
import os
import random
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Mapping
from contextlib import suppress
from inspect import signature
from pathlib import Path
from typing import Any

IMPORTED = (
    "transformers.models.qwen2.modeling_qwen2",
    "pipelinerl.cli.project",
    "pipelinerl.launch.hosts.processes",
    "pipelinerl.launch.hosts.worker",
    "pipelinerl.launch.stages.generation",
    "pipelinerl.launch.stages.preprocessing",
    "pipelinerl.launch.stages.training",
    "pipelinerl.launch.tryout",
)
FREE = ("PYTHONUNBUFFERED", "GLIBC_TUNABLES", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""Variables that may differ from the server's, besides those that nothing reads when it is imported."""
READ_AT_IMPORT = ("PYTHON", "LD_", "GLIBC", "OMP_", "MKL_", "OPENBLAS_", "CUDA", "TRANSFORMERS_", "HF_", "XDG_", "HOME")
ROOT = Path(__file__).parents[1]
PREPARE = "TESTS_PREPARE"
"""The name of a file in this variable: a fork runs it before its program, as an interpreter does a `sitecustomize.py`."""
FIRST_FD = 512
"""Files are moved above this number before each gets its own."""


# ------------------------------------------------------------------------------------------------ the processes that ask


class Forked(subprocess.Popen[Any]):
    """A `Popen` whose process may be a fork of the server's."""

    place: str
    owner: int
    environment: Mapping[str, str]
    _connection: socket.socket | None = None

    def _execute_child(self, *arguments: Any) -> None:
        names = _SIGNATURE.bind(self, *arguments).arguments
        if (words := self._words(names)) is None:
            super()._execute_child(*arguments)  # type: ignore[misc]
            return
        given = {0: names["p2cread"], 1: names["c2pwrite"], 2: names["errwrite"]}
        files = {number: file if file != -1 else number for number, file in given.items()} | {
            fd: fd for fd in names["pass_fds"]
        }
        request = {
            "words": words,
            "environment": dict(os.environ if names["env"] is None else names["env"]),
            "folder": os.fspath(names["cwd"] or os.getcwd()),
            "session": bool(names["start_new_session"]),
            "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
            "files": list(files),
        }
        self._connection = _connect()
        socket.send_fds(self._connection, [json.dumps(request).encode()], list(files.values()))
        answer = self._connection.recv(8)
        assert answer, "the fork server has ended"
        self.pid, error = struct.unpack("ii", answer)
        if error:
            raise OSError(error, os.strerror(error), request["folder"])
        self._child_created = True
        self._close_pipe_fds(*(names[end] for end in _ENDS))  # type: ignore[attr-defined]

    def _words(self, names: Mapping[str, Any]) -> list[str] | None:
        """The command without the interpreter, or None if the server can't run it."""
        words = [os.fspath(word) for word in names["args"]] if isinstance(names["args"], (list, tuple)) else [""]
        environment = os.environ if names["env"] is None else names["env"]
        unlike = {*environment.items()} ^ {*self.environment.items()}
        plain = not names["shell"] and names["close_fds"] and names["preexec_fn"] is None and names["executable"] is None
        ours = words[0] == sys.executable and (
            (words[1:2] == ["-m"] and words[2].startswith(("pipelinerl", "tests.integration.")))
            or (words[1:2] == ["-c"] and words[2].endswith("from pipelinerl.cli import main\nsys.exit(main())"))
        )
        alike = all(name in FREE or not name.startswith(READ_AT_IMPORT) for name, _ in unlike)
        return words[1:] if plain and ours and alike else None

    def _status(self, *, wait: bool) -> int | None:
        """The status of `os.waitpid`, once it has ended."""
        assert self._connection is not None
        with suppress(BlockingIOError):
            answer = self._connection.recv(4, 0 if wait else socket.MSG_DONTWAIT)
            self._connection.close()  # now its number may be used again
            return int(struct.unpack("i", answer)[0]) if answer else int(signal.SIGKILL)
        return None

    def _internal_poll(self, *arguments: Any, **options: Any) -> int | None:
        if self._connection is None:
            return super()._internal_poll(*arguments, **options)  # type: ignore[misc,no-any-return]
        if self.returncode is None and self._waitpid_lock.acquire(blocking=False):  # type: ignore[attr-defined]
            try:
                if self.returncode is None and (status := self._status(wait=False)) is not None:
                    self._handle_exitstatus(status)  # type: ignore[attr-defined]
            finally:
                self._waitpid_lock.release()  # type: ignore[attr-defined]
        return self.returncode

    def _try_wait(self, flags: int) -> tuple[int, int]:
        if self._connection is None:
            return super()._try_wait(flags)  # type: ignore[misc,no-any-return]
        status = self._status(wait=not flags & os.WNOHANG)
        return (0, 0) if status is None else (self.pid, status)


_SIGNATURE = signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]
_ENDS = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


def install(folder: str, owner: int) -> None:
    """From now on, ask the server in `folder`, which starts with the first request and ends with the process `owner`."""
    Forked.place, Forked.owner, Forked.environment = folder, owner, dict(os.environ)
    subprocess.Popen = Forked  # type: ignore[misc]


def _connect() -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with open(f"{Forked.place}/lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.path.exists(address := f"{Forked.place}/server"):
            command = [sys.executable, "-m", "tests.forks", Forked.place, str(Forked.owner)]
            with open(f"{Forked.place}/log", "ab") as log:
                subprocess.run(command, check=True, cwd=ROOT, env=Forked.environment, stdin=-3, stdout=log, stderr=log)
    connection.connect(address)
    return connection


# ------------------------------------------------------------------------------------------------ the server


def serve(listener: socket.socket, owner: int) -> dict[str, Any] | None:
    """Fork until process `owner` has ended. Returns what was asked for in a fork, and None in the server."""
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        selector.register(ending := os.pidfd_open(owner), selectors.EVENT_READ)
        children: dict[int, tuple[int, socket.socket]] = {}
        while True:
            for key, _ in selector.select():
                if key.fileobj is listener:
                    selector.register(listener.accept()[0], selectors.EVENT_READ, "new")
                elif key.fileobj == ending:
                    return None
                elif key.data == "new":
                    connection: Any = key.fileobj
                    selector.unregister(connection)
                    message, fds, _, _ = socket.recv_fds(connection, 1 << 20, 250)
                    if not message:
                        connection.close()
                        continue
                    request = json.loads(message)
                    began, begins = os.pipe()
                    pid = os.fork()
                    if pid == 0:
                        others = [
                            key.fileobj for key in selector.get_map().values() if isinstance(key.fileobj, socket.socket)
                        ]
                        for part in (connection, *others, *(held for _, held in children.values())):
                            part.close()
                        selector.close()
                        _become(request, fds, begins)
                        return dict(request)
                    os.close(begins)
                    error = int.from_bytes(os.read(began, 4), "little")
                    for fd in (began, *fds):
                        os.close(fd)
                    connection.send(struct.pack("ii", pid, error))
                    child = os.pidfd_open(pid)
                    children[child] = (pid, connection)
                    selector.register(child, selectors.EVENT_READ, "child")
                elif key.data == "child":  # it stays a zombie until the process that asked for it knows
                    child = int(key.fd)
                    pid, connection = children[child]
                    selector.unregister(child)
                    os.close(child)
                    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
                    assert ended is not None
                    status = ended.si_status << 8 if ended.si_code == os.CLD_EXITED else ended.si_status
                    with suppress(OSError):
                        connection.send(struct.pack("i", status))
                    del children[child]
                    selector.register(connection, selectors.EVENT_READ, pid)
                else:
                    os.waitpid(key.data, 0)
                    selector.unregister(key.fileobj)
                    connection = key.fileobj
                    connection.close()


def _become(request: dict[str, Any], fds: list[int], begins: int) -> None:
    """Take the files, the session and the folder of a process that was asked for, and report an error."""
    error = 0
    held = [fcntl.fcntl(fd, fcntl.F_DUPFD, FIRST_FD) for fd in fds]
    begins = fcntl.fcntl(begins, fcntl.F_DUPFD, FIRST_FD)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    if request["session"]:
        os.setsid()
    os.closerange(3, FIRST_FD)
    for fd, number in zip(held, request["files"], strict=True):
        os.dup2(fd, number, inheritable=True)
        os.close(fd)
    try:
        os.chdir(request["folder"])
    except OSError as failed:
        error = failed.errno or -1
    os.write(begins, error.to_bytes(4, "little"))
    os.close(begins)
    if error:
        os._exit(127)


def run(request: dict[str, Any]) -> None:
    """Run the program, as the interpreter does."""
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # the variables decide again
    time.tzset()
    random.seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(int.from_bytes(os.urandom(4), "little"))
    unbuffered = "PYTHONUNBUFFERED" in os.environ
    for number, stream in enumerate((sys.stdout, sys.stderr), start=1):
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(line_buffering=unbuffered or number == 2 or os.isatty(number), write_through=unbuffered)
    sys.orig_argv[:] = [sys.executable, *request["words"]]
    flag, what, *arguments = request["words"]
    sys.path[0] = "" if flag == "-c" else request["folder"]
    sys.argv = [flag, *arguments]
    if PREPARE in os.environ:
        runpy.run_path(os.environ[PREPARE])
    if flag == "-m":
        warnings.filterwarnings("ignore", module="runpy")  # the module is imported already
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(what, "<string>", "exec"), main.__dict__)  # noqa: S102 - the tests' own code


def main() -> None:
    folder, owner = sys.argv[1], int(sys.argv[2])
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"{folder}/server")
    listener.listen(128)
    if os.fork():
        os._exit(0)  # whoever started it need not wait for the imports
    os.setsid()
    install(folder, owner)
    for name in IMPORTED:
        importlib.import_module(name)
    from tests import recordings  # imports torch

    with recordings.shared_recordings():
        recordings.record_demo()
        gc.freeze()
        if (request := serve(listener, owner)) is not None:
            run(request)


if __name__ == "__main__":
    main()
