"""A forked process is like one that was started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forks

pytestmark = pytest.mark.slow  # the server imports torch
ENDING = "from pipelinerl.cli import main\nsys.exit(main())"


def started(code: str, folder: Path, *, real: bool, **options: object) -> subprocess.Popen[str]:
    environment = {**os.environ, "MINE": "1"} | ({forks.REAL: "1"} if real else {})
    command = [sys.executable, "-c", f"import os, sys\n{code}\n{ENDING}", "--version", "x"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, cwd=folder, env=environment, text=True, **pipes, **options)  # type: ignore[call-overload]
    assert isinstance(process, forks.Forked)
    assert (process._connection is None) == real
    return process


@pytest.mark.parametrize(
    "code",
    [
        "print(sys.argv, os.getcwd(), os.environ['MINE'], sys.stdin.read(), os.getsid(0) == os.getpid(), sys.path[0])",
        "print(__name__, sys.modules['__main__'].sys is sys, sorted(os.listdir('/proc/self/fd')))",
        "import atexit\natexit.register(print, 'at exit')\nsys.exit('no')",
        "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.2), print('after'))).start()\nsys.exit(7)",
        "import signal\nos.kill(os.getpid(), signal.SIGTERM)",
        "os._exit(3)",
    ],
)
def test_it_does_the_same_as_one_that_is_started(code: str, tmp_path: Path) -> None:
    real, fork = (started(code, tmp_path, real=real, start_new_session=True) for real in (True, False))
    assert fork.communicate("given", timeout=240) == real.communicate("given", timeout=240)
    assert fork.returncode == real.returncode


def test_it_is_a_process_that_can_be_asked_for_and_killed(tmp_path: Path) -> None:
    fork = started("print(os.getpid(), flush=True)\nsys.stdin.read()", tmp_path, real=False)
    assert fork.stdout is not None
    assert (int(fork.stdout.readline()), fork.poll()) == (fork.pid, None)
    with pytest.raises(subprocess.TimeoutExpired):
        fork.wait(0.01)
    fork.kill()
    assert fork.wait(60) == fork.poll() == -signal.SIGKILL
    with pytest.raises(FileNotFoundError):
        started("", tmp_path / "missing", real=False)


def test_two_of_them_have_other_random_numbers(tmp_path: Path) -> None:
    code = "import random, numpy\nprint(random.random(), numpy.random.rand())\nsys.exit()"
    first, second = (started(code, tmp_path, real=False).communicate()[0].split() for _ in range(2))
    assert not {*first} & {*second}
