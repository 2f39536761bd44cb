"""Whether another session follows one that lost a process, and what the summary says of it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import cast

import pytest

from pipelinerl.config.load import load_config
from pipelinerl.errors import BroadcastEndedError, PipelineRLError, StageDiedError, WeightUpdateError
from pipelinerl.files import JsonLines
from pipelinerl.launch.hosts.host import Host
from pipelinerl.launch.hosts.processes import Processes
from pipelinerl.launch.restarts import Losses
from pipelinerl.launch.session import Session, StartPlan
from pipelinerl.launch.summary import Outcome
from pipelinerl.run_directory import RunDirectory
from pipelinerl.schedule import make_schedule
from pipelinerl.types import StageStatus, TrainerProgress


def session(root: Path, version: int) -> Session:
    config = load_config(None, ["--launch.restarts=2"])
    run = RunDirectory(root)
    run.make_folders()
    return Session(config, run, StartPlan(version=version), make_schedule(config), time.monotonic())


def ended(error: str, version: int, *, lost: bool = True) -> Outcome:
    progress = TrainerProgress(version=version)
    status = StageStatus(stage="trainer", pid=1, state="working", detail="", since_s=0, written_s=0, progress=progress)
    return Outcome({"trainer": status}, StageDiedError(error), 1.0, lost=lost)


@pytest.mark.parametrize("records", [None, "", "broken\n"])
def test_sessions_follow_until_too_many_made_no_checkpoint(tmp_path: Path, records: str | None) -> None:
    first = session(tmp_path, 0)
    losses = Losses(first)
    pauses_s = []
    for number in (1, 2):
        message = losses.follow(session(tmp_path, 0), ended(f"death {number}", version=3)) or ""
        assert f"death {number}; the run starts again from the beginning in" in message
        assert f"(restart {number} of 2)" in message
        pauses_s.append(losses.pause_s)
    assert pauses_s[1] == 2 * pauses_s[0]
    last = ended("death 3", version=3)
    assert losses.follow(session(tmp_path, 0), last) is None
    assert losses.error is None
    if records is not None:  # no session came so far that it wrote any
        first.run.metrics.write_text(records)
    error = losses.counted(first, last).error
    assert isinstance(error, StageDiedError)
    assert str(error).splitlines()[1:] == ["1. death 1", "2. death 2", "3. death 3"]


def test_a_new_checkpoint_begins_the_count_again(tmp_path: Path) -> None:
    first = session(tmp_path, 0)
    losses = Losses(first)
    steps_lost = 0
    for number in range(5):
        (first.run.checkpoints / f"step_{10 * number + 4:08d}").mkdir(parents=True)
        message = losses.follow(session(tmp_path, max(0, 10 * number - 6)), ended("death", version=10 * number + 7)) or ""
        steps_lost += 3
        assert "the run goes on from its latest checkpoint" in message
        assert "(restart 1 of 2)" in message
    JsonLines(first.run.metrics).close()
    found = losses.counted(first, ended("", version=50, lost=False)).restarts["run"]
    assert found == {"count": 5, "steps_lost": steps_lost, "recovery_s": []}


@pytest.mark.parametrize("lost", [False, True])
def test_an_error_that_would_happen_again_ends_the_run(tmp_path: Path, lost: bool) -> None:
    first = session(tmp_path, 0)
    losses = Losses(first)
    assert bool(losses.follow(first, ended("a mistake", version=1, lost=lost))) is lost
    assert (losses.error is not None) is lost


@pytest.mark.parametrize(
    ("error", "lost"), [(BroadcastEndedError("engine 1 is gone"), True), (WeightUpdateError("damaged"), False)]
)
def test_a_lost_member_of_a_broadcast_is_a_loss_and_damaged_weights_are_an_error(error: PipelineRLError, lost: bool) -> None:
    assert Processes(cast(Host, None), None).lost(error) is lost
