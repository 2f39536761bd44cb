"""The log of a run in one process."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from pipelinerl.launch.hosts.embedded import logging_to
from pipelinerl.run_directory import RunDirectory


def test_a_log_on_a_full_disk_says_nothing_on_the_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = RunDirectory(tmp_path)
    run.make_folders()
    run.log("embedded").symlink_to("/dev/full")
    with logging_to(run):
        logging.getLogger("pipelinerl.actor").warning("a rollout is dropped")
    assert capfd.readouterr() == ("", "")
