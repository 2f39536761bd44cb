"""The wall clock jumps while a run goes on: nothing in a run waits, decides or orders by it.

A small library stands before libc's clock in all processes of the run, and adds what a file says. It leaves the monotonic
clock alone. (libfaketime, of Debian 12, breaks waits by the monotonic clock when its shift changes.)
"""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import assert_gone_on, start_processes, until, version_of, wait

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>

static volatile long *shift_s;

__attribute__((constructor)) static void map(void) {
  int fd = open(getenv("CLOCK_SHIFT"), O_RDONLY | O_CLOEXEC);
  void *found = fd < 0 ? MAP_FAILED : mmap(0, sizeof(long), PROT_READ, MAP_SHARED, fd, 0);
  if (found == MAP_FAILED) abort();
  shift_s = found;
}

int clock_gettime(clockid_t id, struct timespec *now) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
  int result = real(id, now);
  if (!result && shift_s && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) now->tv_sec += *shift_s;
  return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  struct timespec found;
  (void)zone;
  int result = clock_gettime(CLOCK_REALTIME, &found);
  now->tv_sec = found.tv_sec;
  now->tv_usec = found.tv_nsec / 1000;
  return result;
}

time_t time(time_t *into) {
  struct timespec found;
  clock_gettime(CLOCK_REALTIME, &found);
  if (into) *into = found.tv_sec;
  return found.tv_sec;
}
"""
YEAR_S = 365 * 24 * 3600


@pytest.mark.parametrize(
    "settings",
    [
        {"engine__processes": 2, "launch__preprocessor": "process"},
        {"engine__kind": "http", "engine__servers": 2},
        {"trainer__ranks": 2, "weights__kind": "collective"},
    ],
    ids=["processes", "http", "sharded"],
)
def test_a_clock_that_jumps_changes_nothing(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    library, shift, run_dir, goal = tmp_path / "clock.so", tmp_path / "shift", tmp_path / "r", 12
    (tmp_path / "clock.c").write_text(SOURCE)
    command = ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(tmp_path / "clock.c"), "-ldl"]
    subprocess.run(command, check=True)
    shift.write_bytes(struct.pack("l", 0))
    with monkeypatch.context() as patch:
        patch.setenv("LD_PRELOAD", str(library))
        patch.setenv("CLOCK_SHIFT", str(shift))
        process = start_processes(run_dir, trainer__steps=goal, trainer__checkpoint_every=3, **settings)
    for version, jump_s in ((2, 3600), (4, -5 * YEAR_S), (6, 5 * YEAR_S), (8, -1)):
        until(lambda version=version: version_of(run_dir) >= version, process)  # type: ignore[misc]
        with shift.open("r+b") as file:
            file.write(struct.pack("l", jump_s))
    ended = wait(process)
    assert (ended.status, ended.error) == (0, "")
    assert assert_gone_on(run_dir, goal)["restarts"] == {}
