"""The run directory while a run uses it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from pipelinerl.errors import RunDirectoryError
from pipelinerl.launch.run_directory import RunDirectory
from pipelinerl.launch.run_lock import RunLock


def removed_and_made_again(root: Path) -> None:
    shutil.rmtree(root)
    (root / "checkpoints").mkdir(parents=True)


@pytest.mark.parametrize(
    "end",
    [
        lambda root: root.rename(root.with_name("moved")),
        shutil.rmtree,
        removed_and_made_again,
        lambda root: (root / ".lock").unlink(),
    ],
    ids=["renamed", "removed", "made again", "removed in part"],
)
def test_a_run_directory_that_is_no_longer_there_is_noticed(end: Callable[[Path], object], tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "r")
    run.make_folders()
    with closing(RunLock(run)) as lock:
        lock.require_directory()
        end(run.root)
        with pytest.raises(RunDirectoryError, match="was removed or renamed while the run used it"):
            lock.require_directory()
