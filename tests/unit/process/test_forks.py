"""Forked processes are like those that an interpreter starts, whatever happens to their server."""

from __future__ import annotations

import ast
import os
import random
import resource
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.unit.process.test_child import until

from pipelinerl.errors import StageDiedError
from pipelinerl.process import forks
from pipelinerl.process.child import UNKNOWN_STATUS, ChildProcess
from pipelinerl.process.forks import ForkServer
from pipelinerl.resources.roles import IMPORTED, process_environment

pytestmark = pytest.mark.slow
SHOW = """
import json, os, random, sys
import numpy
print(json.dumps({"argv": sys.argv[1:], "name": __name__, "folder": os.getcwd(), "variable": os.environ["VARIABLE"],
    "bytes": list(os.environb[b"BYTES"]), "long": len(os.environ["LONG"]), "of_server": "PYTHON_OF_SERVER" in os.environ,
    "imported": "fractions" in sys.modules, "random": [random.random(), numpy.random.random()],
    "group": os.getpgrp() == os.getpid(),
    "read": sys.stdin.read(), "given": os.read(int(sys.argv[1]), 9).decode(),
    "files": len(os.listdir("/proc/self/fd")) - 1}))
print("an error", file=sys.stderr)
os._exit(3)  # nothing is left in a buffer
"""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkServer]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    (tmp_path / "show.py").write_text(textwrap.dedent(SHOW))
    (tmp_path / "wait.py").write_text("import time\nprint('ready')\ntime.sleep(100)\n")
    with ForkServer(
        ["numpy", "fractions", "no_such_module"], {"PYTHON_OF_SERVER": "1"}, timeout_s=60.0
    ) as server:  # whose name has it start by its command
        yield server


def forked(server: ForkServer, module: str, *arguments: str, fds: tuple[int, ...] = ()) -> ChildProcess:
    command = [sys.executable, "-m", module, *arguments]
    environment = {"VARIABLE": "set", "BYTES": os.fsdecode(b"\xff\xfe"), "LONG": "x" * 120_000, "LONGER": "x" * 120_000}
    return ChildProcess(command, log=Path("log"), environment=environment, fds=fds, forks=server)


def waiting(server: ForkServer) -> ChildProcess:
    process = forked(server, "wait")
    assert process.wait_until(lambda: "ready" in process.log_lines(), 60.0)
    return process


def pid_of(server: ForkServer) -> int:
    return server._process.pid


def test_a_fork_has_what_is_its_own_and_nothing_of_others(server: ForkServer, tmp_path: Path) -> None:
    seen, others = [], [waiting(server), waiting(server)]
    Path("log").unlink()
    for _ in range(2):
        given, end = os.pipe()
        os.write(end, b"content")
        process = forked(server, "show", str(given), fds=(given,))
        for fd in (given, end):
            os.close(fd)
        assert process.wait(60.0)
        assert (process.status, process.how_it_ended()) == (3, "ended with status 3")
        *_, shown, error = process.log_lines()
        assert error == "an error"
        seen.append(msgspec.json.decode(shown))
    assert len({*seen[0].pop("random"), *seen[1].pop("random"), random.random()}) == 5
    expected = {"name": "__main__", "folder": str(tmp_path), "variable": "set", "imported": True, "group": True, "read": ""}
    expected |= {"bytes": [255, 254], "long": 120_000, "of_server": False}
    expected |= {"given": "content", "files": 5}  # with the pipe by which the kernel ends it with its parent
    assert [{key: value for key, value in one.items() if key != "argv"} for one in seen] == [expected] * 2
    assert all(other.running for other in others)
    for other in others:
        other.stop()
        assert other.how_it_ended() == "was killed by SIGTERM"


def test_a_fork_outlives_its_server_and_the_next_one_has_another(server: ForkServer) -> None:
    process, first = waiting(server), pid_of(server)
    os.kill(first, signal.SIGKILL)
    assert until(lambda: not server._process.running)
    assert process.running
    with waiting(server) as other:
        assert other.running
        assert pid_of(server) != first
    process.kill()
    assert process.wait(60.0)
    assert (process.status, process.how_it_ended()) == (UNKNOWN_STATUS, "ended (nobody knows how)")


def test_a_server_that_does_not_answer_is_replaced(server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "ANSWER_S", 0.2)
    assert until(server.ready)
    process, first = waiting(server), pid_of(server)
    os.kill(first, signal.SIGSTOP)
    process.kill()
    assert process.wait(60.0)
    assert process.status == UNKNOWN_STATUS
    with waiting(server) as other:
        assert other.running
    assert until(lambda: not Path(f"/proc/{first}").exists())


def test_what_can_not_be_started_is_an_error_of_the_system(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(os, "getcwd", lambda: str(tmp_path / "missing"))
        with pytest.raises(FileNotFoundError):
            forked(server, "show")
    with waiting(server), (tmp_path / "wait.py").open() as file:
        most = len(os.listdir(f"/proc/{pid_of(server)}/fd")) + 20
        resource.prlimit(pid_of(server), resource.RLIMIT_NOFILE, (most, most))
        many = tuple(os.dup(file.fileno()) for _ in range(40))
        with pytest.raises(OSError, match="Too many open files"):
            forked(server, "show", fds=many)


def test_a_server_that_can_not_import_is_an_error_with_its_last_words(server: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "dies.py").write_text("import os\nprint('no such instruction')\nos.kill(os.getpid(), 9)\n")
    with (
        ForkServer(["dies"], {}, timeout_s=60.0) as dying,
        pytest.raises(StageDiedError, match=r"(?s)was killed by SIGKILL; .*no such instruction"),
    ):
        forked(dying, "show")


def test_a_server_and_its_forks_end_with_their_parent(tmp_path: Path) -> None:
    (tmp_path / "wait.py").write_text("import time\nprint('ready')\ntime.sleep(100)\n")
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom pipelinerl.process.child import ChildProcess\n"
        "from pipelinerl.process.forks import ForkServer\nserver = ForkServer([], {}, 60.0)\n"
        "process = ChildProcess([sys.executable, '-m', 'wait'], log=Path('log'), forks=server)\n"
        "print(process.pid, server._process.pid, flush=True)\ntime.sleep(100)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=tmp_path) as parent:
        assert parent.stdout is not None
        pids = parent.stdout.readline().split()
        parent.kill()
    assert until(lambda: not any(Path(f"/proc/{int(pid)}").exists() for pid in pids))


def test_what_a_run_imports_ahead_exists_and_starts_no_thread() -> None:
    code = f"import {', '.join(IMPORTED)}\nimport os\nprint(os.listdir('/proc/self/task'))"
    environment = {**os.environ, **process_environment(1)}
    shown = subprocess.run([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, check=True, text=True)
    assert len(ast.literal_eval(shown.stdout)) == 1
