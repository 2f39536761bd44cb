"""The package's processes that tests start are forked from one process that has imported what they import.

Tests start hundreds of processes. `install` replaces `subprocess.Popen` by a class that asks a fork server
(`pipelinerl.process.forks`) for those that run this package, in this process and in forked ones. All others are started as
ever. Tests of what a process imports start it with other variables of Python, so that it is not forked.

    python -m tests.forks FOLDER PID        the server; it ends with the process PID
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import Any

from pipelinerl.process.forked import Request, run, serve
from pipelinerl.process.forks import Fork

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
COMMAND_LINE = "from pipelinerl.cli import main\nsys.exit(main())"


class Forked(subprocess.Popen[Any]):
    """A `Popen` whose process may be a fork of the server's."""

    place: str
    owner: int
    environment: Mapping[str, str]
    _fork: Fork | None = None

    def _execute_child(self, *arguments: Any) -> None:
        names = _SIGNATURE.bind(self, *arguments).arguments
        if (words := self._words(names)) is None:
            super()._execute_child(*arguments)  # type: ignore[misc]
            return
        given = {0: names["p2cread"], 1: names["c2pwrite"], 2: names["errwrite"]}
        files = {number: file if file != -1 else number for number, file in given.items()}
        files |= {fd: fd for fd in names["pass_fds"]}
        environment = dict(os.environ if names["env"] is None else names["env"])
        request = Request.of(words, environment, os.fspath(names["cwd"] or os.getcwd()), [*files])
        with _connection() as connection:
            self._fork = Fork(connection, request, [*files.values()], timeout_s=600)
        self.pid = self._fork.pid
        self._child_created = True
        self._close_pipe_fds(*(names[end] for end in _ENDS))  # type: ignore[attr-defined]

    def _words(self, names: Mapping[str, Any]) -> list[str] | None:
        """The command without the interpreter and `-m`, or None if the server can't run it."""
        words = [os.fspath(word) for word in names["args"]] if isinstance(names["args"], (list, tuple)) else [""]
        environment = os.environ if names["env"] is None else names["env"]
        unlike = {*environment.items()} ^ {*self.environment.items()}
        plain = not names["shell"] and names["close_fds"] and names["preexec_fn"] is None and names["executable"] is None
        alike = all(name in FREE or not name.startswith(READ_AT_IMPORT) for name, _ in unlike)
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])  # a process that is started inherits this
        if words[0] != sys.executable or not plain or not alike or blocked:
            return None
        if words[1:2] == ["-m"] and words[2].startswith(("pipelinerl", "tests.integration.")):
            return words[2:]
        return words[1:] if words[1:2] == ["-c"] and words[2].endswith(COMMAND_LINE) else None

    def _internal_poll(self, *arguments: Any, **options: Any) -> int | None:
        if self._fork is None:
            return super()._internal_poll(*arguments, **options)  # type: ignore[misc,no-any-return]
        with self._waitpid_lock:  # type: ignore[attr-defined]
            self.returncode = self._fork.poll()
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self._fork is None:
            return super()._wait(timeout)  # type: ignore[misc,no-any-return]
        self._fork.wait(timeout)
        return self._internal_poll() or 0


_SIGNATURE = signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]
_ENDS = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


def install(folder: str, owner: int) -> None:
    """From now on, ask the server in `folder`, which starts with the first request and ends with the process `owner`."""
    Forked.place, Forked.owner, Forked.environment = folder, owner, dict(os.environ)
    subprocess.Popen = Forked  # type: ignore[misc]


def _connection() -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    with open(f"{Forked.place}/lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.path.exists(address := f"{Forked.place}/server"):
            variables = {**Forked.environment, "PYTHONUNBUFFERED": "1"}
            command = [sys.executable, "-m", "tests.forks", Forked.place, str(Forked.owner)]
            with open(f"{Forked.place}/log", "ab") as log:
                subprocess.run(command, check=True, cwd=ROOT, env=variables, stdin=-3, stdout=log, stderr=log)
    connection.connect(address)
    return connection


# ------------------------------------------------------------------------------------------------ the server


def main() -> None:
    folder, owner = sys.argv[1:]
    requests = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    requests.bind(f"{folder}/server")
    if os.fork():
        os._exit(0)  # whoever started it need not wait for the imports
    os.setsid()
    if os.fork() == 0:
        select.select([os.pidfd_open(int(owner))], [], [])
        os.kill(os.getppid(), signal.SIGKILL)
        os._exit(0)
    install(folder, int(owner))
    for name in IMPORTED:
        importlib.import_module(name)
    from tests import recordings  # imports torch

    with recordings.shared_recordings():
        recordings.record_demo()
        gc.freeze()
        request = serve(requests)
        tempfile.tempdir = None  # the variables decide again
        time.tzset()
        words = [os.fsdecode(word) for word in request.command]
        sys.orig_argv[:] = [sys.executable, *words]
        if PREPARE in os.environ:
            runpy.run_path(os.environ[PREPARE])
        if words[0] != "-c":
            run(request)
            return
        sys.argv, sys.path[0] = ["-c", *words[2:]], ""
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(words[1], "<string>", "exec"), main.__dict__)  # noqa: S102 - the tests' own code


if __name__ == "__main__":
    main()
