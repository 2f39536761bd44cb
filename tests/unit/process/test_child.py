"""Child processes: how they end, what is said about it, and that nothing of them is left."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.process import child
from pipelinerl.process.child import ChildProcess
from pipelinerl.serving.vllm.start import members

STUBBORN = "trap '' TERM; sleep 100 & echo ready; while :; do sleep 0.1; done"
"""A shell script that ignores SIGTERM, and has a child."""


def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return condition()


def shell(script: str, log: Path, **options: Any) -> ChildProcess:
    return ChildProcess(["/bin/sh", "-c", script], log=log, **options)


def ready(process: ChildProcess) -> bool:
    return process.wait_until(lambda: "ready" in process.log_lines(), 60.0)


def test_it_may_end_by_itself_and_the_rest_of_its_group_is_killed(tmp_path: Path) -> None:
    with shell("trap 'exit 5' TERM; sleep 100 & echo ready; wait", tmp_path / "log", patience_s=60.0) as process:
        assert ready(process)
        assert len(members(process.pid)) == 2
    assert process.status == 5
    assert process.asked_to_stop
    assert until(lambda: not members(process.pid))
    process.stop()  # twice is fine


def test_it_is_killed_with_its_children_when_its_parent_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom pipelinerl.process.child import ChildProcess\n"
        "process = ChildProcess(['/bin/sh', '-c', sys.argv[1]], log=Path(sys.argv[2]))\n"
        "print(process.pid, flush=True)\ntime.sleep(100)"
    )
    command = [sys.executable, "-c", code, STUBBORN, str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        group = int(parent.stdout.readline())
        assert until(lambda: "ready" in (tmp_path / "log").read_text())
        assert len(members(group)) >= 2
        parent.kill()
    assert until(lambda: not members(group))


def test_one_that_watches_its_parents_ends_with_the_last_of_them(tmp_path: Path) -> None:
    process = shell("echo ready; cat; echo closed; exit 4", tmp_path / "log", watches_parent=True)
    other = os.dup(process._parent_pipe.fileno())
    assert ready(process)
    process._parent_pipe.close()
    assert not process.wait(0.1)
    os.close(other)
    assert process.wait(60.0)
    assert process.status == 4
    assert process.log_lines() == ["ready", "closed"]


def test_readiness_is_not_awaited_from_a_process_that_has_ended(tmp_path: Path) -> None:
    with shell("sleep 100", tmp_path / "log") as process:
        assert not process.wait_until(lambda: False, 0.1)
        assert process.running
    with shell("exit 3", tmp_path / "log") as process:
        assert not process.wait_until(lambda: False, 60.0)
        assert process.how_it_ended() == "ended with status 3"
        assert process.log_excerpt() == f"; its log, {tmp_path / 'log'}, is empty"


def test_an_error_has_the_end_of_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("of an earlier session\n")
    with shell("for i in 1 2 3; do echo line $i; done; echo wrong >&2; kill -9 $$", log) as process:
        assert process.wait(60.0)
    assert process.how_it_ended() == "was killed by SIGKILL"
    assert process.log_excerpt(2) == f"; the end of its log:\nline 3\nwrong\n(log: {log})"
    assert process.log_lines()[0] == "of an earlier session"


def test_standard_input_can_be_taken_from_user_code() -> None:
    code = (
        "import os, sys\nfrom pipelinerl.process import take_stdin\n"
        "fd = take_stdin()\nprint([sys.stdin.read(), os.read(fd, 9)])"
    )
    shown = subprocess.run([sys.executable, "-c", code], input=b"ours", stdout=subprocess.PIPE, check=True)
    assert shown.stdout.decode().strip() == "['', b'ours']"


def test_after_a_stall_what_hangs_is_killed_soon_and_the_others_may_finish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "HUNG_PATIENCE_S", 0.05)
    stuck = shell(STUBBORN, tmp_path / "stuck")
    saves = f"while kill -0 {stuck.pid}; do sleep 0.1; done; exit 0"  # once the other one has ended
    saving = shell(f"trap '{saves}' TERM; sleep 100 & echo ready; wait", tmp_path / "log")
    assert ready(stuck)
    assert ready(saving)
    assert child.stop_all([stuck, saving], 60.0, lambda: False, hung=[stuck]) == [stuck]
    assert saving.status == 0
    assert until(lambda: not members(stuck.pid))
