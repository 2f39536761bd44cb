"""What the terminal shows at the end of a run. It only shows results, so it never decides how the run ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import msgspec
import pytest

from pipelinerl.config.load import load_config
from pipelinerl.launch.hosts.host import Outcome
from pipelinerl.launch.run import show_result, write_summary
from pipelinerl.launch.session import Session, StartPlan
from pipelinerl.metrics.records import StepRecord
from pipelinerl.run_directory import RunDirectory
from pipelinerl.schedule import make_schedule
from tests.unit.record_parts import write_records


def a_folder_is_there(run: RunDirectory) -> None:
    run.curves.mkdir()


def an_evaluation_is_damaged(run: RunDirectory) -> None:
    (run.rollouts / "evaluation-before.jsonl").write_text("noise\n")


STEP = {"version": 1, "time_s": 1.0, "samples": 8, "tokens_trained": 10, "reward_mean": 0.5}


@pytest.mark.parametrize(
    ("spoil", "name", "missing"),
    [
        (a_folder_is_there, "run", "warning: curves.png is missing: can't write "),
        (an_evaluation_is_damaged, "run", "warning: the sample of the evaluations is missing: "),
        (lambda _: None, "[/run] :smile:", ""),
    ],
)
def test_what_cannot_be_shown_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], spoil: Callable[[RunDirectory], None], name: str, missing: str
) -> None:
    run = RunDirectory(tmp_path / name)
    run.make_folders()
    write_records(run.root, msgspec.convert(STEP, StepRecord))
    spoil(run)
    config = load_config(None, ["--trainer.steps=1", "--metrics.plot=true"])
    session = Session(config, run, StartPlan(), make_schedule(config), time.monotonic())
    shown = StringIO()
    show_result(session, write_summary(session, Outcome({}, None, 1.0)), shown)
    printed = capsys.readouterr().out
    assert printed.count("\n") == bool(missing)
    assert printed.startswith(missing)
    assert "seed 0: finished" in shown.getvalue()
    assert f"in {run.root}" in shown.getvalue()
