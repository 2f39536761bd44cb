"""A disk that fills up, or can't be written any more, ends a run with one line. Later it goes on, and nothing is lost."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.runs import assert_gone_on, command, flags, start_processes, steps, wait

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]


def tool(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A small file system in memory, of so many MB."""
    path = tmp_path / "disk"
    path.mkdir()
    try:
        tool("mount", "-t", "tmpfs", "-o", f"size={int(request.param * 1024)}k", "tmpfs", str(path))
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no file system can be mounted here: {error}")
    yield path
    tool("umount", "--lazy", str(path))


@pytest.mark.parametrize("disk", [0.02, 0.3, 1, 3, 5, 7, 9, 12, 16, 24], indirect=True, ids=str)
def test_a_disk_that_fills_up(disk: Path) -> None:
    """Sizes in MB, at which it is full at the start, while processes load, in the first checkpoint, or later."""
    run_dir = disk / "r"
    ended = wait(start_processes(run_dir, trainer__steps=100_000, trainer__checkpoint_every=2))
    assert ended.status in (1, 2), ended.error
    assert "Traceback" not in ended.out + ended.error
    assert ended.error.startswith("error: ")
    assert ended.error.count("\n") == 1, ended.error
    tool("mount", "-o", "remount,size=512m", str(disk))
    if (run_dir / "config.yaml").exists():
        goal = len(steps(run_dir)) + 3
        ended = command("train", "--resume", str(run_dir), f"--trainer.steps={goal}")
    else:
        goal = 3
        ended = command("train", *flags(run_dir, launch__kind="processes", trainer__steps=goal))
    assert (ended.status, ended.error) == (0, "")
    assert_gone_on(run_dir, goal)
