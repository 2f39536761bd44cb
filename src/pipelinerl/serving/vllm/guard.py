"""Runs a command for as long as standard input stays open, and leaves nothing of it behind.

    python -m pipelinerl.serving.vllm.guard COMMAND ARGUMENT...

vLLM is several processes and knows nothing of the run that started it. This process leads their group; standard input is a
pipe held by whoever started it. When that closes, be it by a kill -9, or at a SIGTERM, the group is told to end, and killed
if it does not within a while: last of all the one that removes the shared memory of the others. The exit status is 0 then.
When the command ends by itself, so does the rest; the status is the command's (128 and the signal, if one ended it).
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

LOOK_EVERY_S = 0.2
PATIENCE_S = 10.0
CLEAN_UP_S = 15.0
SAID = "guard: "
"""How its own lines in the log begin."""


def main(command: Sequence[str]) -> int:
    """Run `command` until it ends or is to end; the exit status."""
    if os.getpgid(0) != os.getpid():
        say("it has to lead a process group")
        return 2
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    signal.signal(signal.SIGINT, lambda *_: None)  # unlike SIG_IGN, the command does not inherit this
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL)  # noqa: S603 - what it is for
    except OSError as error:
        say(f"can't start {command[0]}: {error.strerror}")
        return 127
    while child.poll() is None and not asked and not _closed(LOOK_EVERY_S):
        pass
    code = child.poll()
    if code is not None:
        say(f"{command[0]} ended with status {code}")
    _end_others(child)
    return 0 if code is None else code if code >= 0 else 128 - code


def _end_others(child: subprocess.Popen[bytes]) -> None:
    """Return when no other process of the group is left."""
    begin_s = time.monotonic()
    os.killpg(0, signal.SIGTERM)
    while others := [pid for pid in members(os.getpid()) if pid != os.getpid()]:
        waited_s = time.monotonic() - begin_s
        if waited_s > PATIENCE_S + CLEAN_UP_S:
            os.killpg(0, signal.SIGKILL)  # this process too
        for pid in others:
            if waited_s > PATIENCE_S and not _cleans_up(pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        child.poll()
        time.sleep(0.05)


def _cleans_up(pid: int) -> bool:
    """Whether it is the process of Python that removes shared memory when those who shared it have ended."""
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False  # it has ended


def members(group: int) -> list[int]:
    """Processes of the group that have not ended, by Linux's account."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                state, _, of_group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            except OSError:
                continue  # it has ended meanwhile
            if int(of_group) == group and state not in "ZX":
                found.append(int(entry.name))
    return found


def say(what: str) -> None:
    print(f"{SAID}{what}", file=sys.stderr, flush=True)


def _closed(timeout_s: float) -> bool:
    """Whether standard input ends within the time. Nothing is ever written to it."""
    readable, _, _ = select.select([sys.stdin.fileno()], [], [], timeout_s)
    return bool(readable) and not os.read(sys.stdin.fileno(), 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
