"""Runs a command while standard input stays open, and ends all of its processes afterwards.

    python -m pipelinerl.serving.vllm.guard COMMAND ARGUMENT...

vLLM consists of several processes, and does not notice when the run that started it ends. This process leads their process
group; its standard input is a pipe held by the parent. When the pipe closes (also if the parent is killed), or at a SIGTERM,
the group gets a SIGTERM, and processes that remain after `TERM_TIMEOUT_S` are killed. Python's resource tracker, which
removes the shared memory of the others, is killed last. The exit status is then 0.

If the command ends by itself, its other processes are ended too; the exit status is the command's (128 + the signal's number
if a signal ended it).
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pipelinerl.child import exit_words

POLL_EVERY_S = 0.2
TERM_TIMEOUT_S = 10.0
CLEAN_UP_S = 15.0


def main(command: Sequence[str]) -> int:
    """Run `command` until it ends or must stop; returns the exit status."""
    if os.getpgid(0) != os.getpid():
        log("it must lead a process group")
        return 2
    stop_signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stop_signals.append(number))
    signal.signal(signal.SIGINT, lambda *_: None)  # unlike SIG_IGN, this is not inherited by the command
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL)  # noqa: S603 - running a command is its purpose
    except OSError as error:
        log(f"can't start {command[0]}: {error.strerror}")
        return 127
    while child.poll() is None and not stop_signals and not _stdin_closed(POLL_EVERY_S):
        pass
    code = child.poll()
    if code is not None:
        log(f"{command[0]} {exit_words(code)}")
    _end_others(child)
    return 0 if code is None else code if code >= 0 else 128 - code


def _end_others(child: subprocess.Popen[bytes]) -> None:
    """Terminate the other processes of the group; returns when none is left."""
    begin_s = time.monotonic()
    os.killpg(0, signal.SIGTERM)
    while others := [pid for pid in members(os.getpid()) if pid != os.getpid()]:
        waited_s = time.monotonic() - begin_s
        if waited_s > TERM_TIMEOUT_S + CLEAN_UP_S:
            os.killpg(0, signal.SIGKILL)  # this process too
        for pid in others:
            if waited_s > TERM_TIMEOUT_S and not _is_resource_tracker(pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        child.poll()
        time.sleep(0.05)


def _is_resource_tracker(pid: int) -> bool:
    """Whether it is Python's resource tracker, which removes shared memory when its users have ended."""
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False  # the process has ended


def members(group: int) -> list[int]:
    """Ids of the group's processes that have not ended, from Linux's /proc."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                state, _, of_group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            except OSError:
                continue  # the process has ended meanwhile
            if int(of_group) == group and state not in "ZX":
                found.append(int(entry.name))
    return found


def log(what: str) -> None:
    print(f"guard: {what}", file=sys.stderr, flush=True)


def _stdin_closed(timeout_s: float) -> bool:
    """Whether standard input closes within the timeout. Nothing is ever written to it."""
    readable, _, _ = select.select([sys.stdin.fileno()], [], [], timeout_s)
    return bool(readable) and not os.read(sys.stdin.fileno(), 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
