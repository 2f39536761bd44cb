"""The run directory while a run uses it, and what the terminal shows at the end, which never decides how the run ends."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest

from pipelinerl.config.load import load_config
from pipelinerl.config.schema import LaunchConfig, RunConfig
from pipelinerl.errors import RunDirectoryError
from pipelinerl.launch import run as run_module
from pipelinerl.launch.hosts.embedded import logging_to
from pipelinerl.launch.hosts.host import Outcome
from pipelinerl.launch.run import show_result, write_summary
from pipelinerl.launch.run_lock import RunLock, errors_explained
from pipelinerl.launch.session import Session, StartPlan
from pipelinerl.resources.memory import MemoryCheck
from pipelinerl.run_directory import RunDirectory
from pipelinerl.schedule import make_schedule
from tests.unit.record_parts import step, write_records


def a_folder_is_there(run: RunDirectory) -> None:
    run.curves.mkdir()


def an_evaluation_is_damaged(run: RunDirectory) -> None:
    (run.rollouts / "evaluation-before.jsonl").write_text("noise\n")


@pytest.mark.parametrize(
    ("spoil", "name", "missing"),
    [
        pytest.param(a_folder_is_there, "run", "warning: curves.png is missing: can't write ", marks=pytest.mark.slow),
        (an_evaluation_is_damaged, "run", "warning: the sample of the evaluations is missing: "),
        (lambda _: None, "[/run] :smile:", ""),
    ],
)
def test_what_cannot_be_shown_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], spoil: Callable[[RunDirectory], None], name: str, missing: str
) -> None:
    run = RunDirectory(tmp_path / name)
    run.make_folders()
    write_records(run.root, step(1, tokens_trained=10, reward_mean=0.5))
    spoil(run)
    config = load_config(None, ["--trainer.steps=1", f"--metrics.plot={str(spoil is a_folder_is_there).lower()}"])
    session = Session(config, run, StartPlan(), make_schedule(config), time.monotonic())
    shown = StringIO()
    show_result(session, write_summary(session, Outcome({}, None, 1.0)), shown)
    printed = capsys.readouterr().out
    assert printed.count("\n") == bool(missing)
    assert printed.startswith(missing)
    assert "seed 0: finished" in shown.getvalue()
    assert f"in {run.root}" in shown.getvalue()


@pytest.mark.parametrize("number", [errno.EISDIR, errno.ENOENT, errno.ELOOP, errno.EACCES])
def test_any_file_that_can_not_be_used_ends_a_session_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def failing(config: object, existing: object) -> object:
        raise OSError(number, os.strerror(number), str(tmp_path / "control"))

    monkeypatch.setattr(run_module, "lock_run_directory", failing)
    monkeypatch.setattr(run_module, "check_before_the_start", lambda *_: MemoryCheck([]))
    with pytest.raises(RunDirectoryError, match=rf"can't use \S+/control: {os.strerror(number)}; (restore it|make it)"):
        run_module.train(RunConfig(launch=LaunchConfig(kind="embedded")))


def test_a_lack_of_memory_is_no_fault_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="Cannot allocate"), errors_explained():
        raise OSError(errno.ENOMEM, "Cannot allocate memory", str(tmp_path))


def test_a_log_on_a_full_disk_says_nothing_on_the_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = RunDirectory(tmp_path)
    run.make_folders()
    run.log("embedded").symlink_to("/dev/full")
    with logging_to(run):
        logging.getLogger("pipelinerl.actor").warning("a rollout is dropped")
    assert capfd.readouterr() == ("", "")


def test_the_last_of_runs_in_several_threads_gives_the_log_back(tmp_path: Path) -> None:
    logger, runs = logging.getLogger("pipelinerl"), [RunDirectory(tmp_path / name) for name in "ab"]
    before = (logger.level, logger.propagate)
    first, second = (logging_to(run) for run in runs)
    for run, log in zip(runs, (first, second), strict=True):
        run.make_folders()
        log.__enter__()
    first.__exit__(None, None, None)
    assert (logger.level, logger.propagate) == (logging.INFO, False)
    second.__exit__(None, None, None)
    assert (logger.level, logger.propagate) == before


@pytest.mark.parametrize(
    ("number", "message"),
    [(errno.EINVAL, "can't be locked: Invalid argument"), (errno.EACCES, "is in use"), (errno.ENOLCK, "")],
)
def test_what_a_file_system_answers_to_a_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, message: str
) -> None:
    def refuse(fd: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", refuse)
    monkeypatch.setattr("pipelinerl.launch.run_lock.DYING_PATIENCE_S", 0.0)
    (tmp_path / ".lock").write_text("1")  # a process that lives
    if message:
        with pytest.raises(RunDirectoryError, match=message):
            RunLock(RunDirectory(tmp_path))
    else:
        RunLock(RunDirectory(tmp_path)).close()
