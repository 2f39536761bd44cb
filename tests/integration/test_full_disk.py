"""A disk that fills up, or can't be written any more, ends a run with one line. Later it goes on, and nothing is lost."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.runs import Ended, assert_gone_on, command, flags, start_processes, steps, wait

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]


class Disk:
    """A small file system in memory."""

    def __init__(self, path: Path, megabytes: float) -> None:
        self.path = path
        path.mkdir()
        tool("mount", "-t", "tmpfs", "-o", f"size={int(megabytes * 1024)}k", "tmpfs", str(path))

    def change(self, option: str) -> None:
        tool("mount", "-o", f"remount,{option}", str(self.path))

    def close(self) -> None:
        tool("umount", "--lazy", str(self.path))


@pytest.fixture
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Disk]:
    try:
        disk = Disk(tmp_path / "disk", request.param)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no file system can be mounted here: {error}")
    yield disk
    disk.close()


def assert_one_line(ended: Ended) -> None:
    assert ended.status in (1, 2), ended.error
    assert "Traceback" not in ended.out + ended.error
    assert ended.error.startswith("error: ")
    assert ended.error.count("\n") == 1, ended.error


def assert_goes_on(run_dir: Path) -> None:
    """After the run has ended."""
    if (run_dir / "config.yaml").exists():
        goal = len(steps(run_dir)) + 3
        ended = command("train", "--resume", str(run_dir), f"--trainer.steps={goal}")
    else:
        goal = 3
        ended = command("train", *flags(run_dir, launch__kind="processes", trainer__steps=goal))
    assert (ended.status, ended.error) == (0, "")
    assert_gone_on(run_dir, goal)


@pytest.mark.parametrize("disk", [0.02, 0.3, 1, 3, 5, 7, 9, 12, 16, 24], indirect=True, ids=str)
def test_a_disk_that_fills_up(disk: Disk) -> None:
    """Sizes in MB, at which it is full at the start, while processes load, in the first checkpoint, or later."""
    run_dir = disk.path / "r"
    ended = wait(start_processes(run_dir, trainer__steps=100_000, trainer__checkpoint_every=2))
    assert_one_line(ended)
    disk.change("size=512m")
    assert_goes_on(run_dir)


def tool(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
