"""`pipelinerl.train`: one session of a run, from its folder to its summary."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from pipelinerl.config import config_to_yaml, validate
from pipelinerl.config.schema import RunConfig
from pipelinerl.files import write_atomically
from pipelinerl.launch.outcome import Outcome, write_summary
from pipelinerl.launch.plan import StartPlan, write_plan
from pipelinerl.launch.run_directory import RunDirectory, RunLock, create_run_directory, open_run_directory
from pipelinerl.metrics.view import View, make_view
from pipelinerl.schedule import make_schedule


def train(config: RunConfig, *, resume: Path | None = None) -> dict[str, Any]:
    """Run `config` to its end and return the contents of `summary.json`.

    With `resume`, a run directory, the run there goes on from its latest checkpoint. What the terminal shows is up to
    `config.metrics.view`. Raises what ended the run if that was not its goal (see `errors`); the summary is written in any
    case.
    """
    started_s = time.monotonic()
    config = validate(config)
    run = create_run_directory(config) if resume is None else open_run_directory(resume)
    lock = RunLock(run)
    try:
        return _session(config, run, started_s, resumed=resume is not None)
    finally:
        lock.release()


def _session(config: RunConfig, run: RunDirectory, started_s: float, *, resumed: bool) -> dict[str, Any]:
    plan = _plan(run) if resumed else StartPlan()
    write_atomically(run.config, config_to_yaml(config).encode())
    write_plan(run, plan)
    for stale in run.control.glob("*.board"):
        stale.unlink()
    title = f"pipelinerl · {config.schedule.kind} · {config.environment.kind} · {run.root}"
    view = make_view(config.metrics.view, sys.stdout, target=config.trainer.steps, title=title)
    view.say(f"run directory: {run.root}")
    if plan.checkpoint:
        view.say(f"resuming at version {plan.version} from {plan.checkpoint}")
    try:
        outcome = _launch(config, run, plan, view, started_s)
    finally:
        view.close()
    summary = write_summary(config, run, plan, outcome)
    _show(config, run, summary)
    if outcome.error is not None:
        raise outcome.error
    return summary


def _launch(config: RunConfig, run: RunDirectory, plan: StartPlan, view: View, started_s: float) -> Outcome:
    schedule = make_schedule(config)
    if config.launch.kind == "embedded":
        from pipelinerl.launch.embedded import run_embedded  # noqa: PLC0415 - loads torch into this process

        return run_embedded(config, run, schedule, plan=plan, view=view, started_s=started_s)
    from pipelinerl.launch.processes import run_processes  # noqa: PLC0415 - POSIX only

    return run_processes(config, run, schedule, view=view, started_s=started_s)


def _plan(run: RunDirectory) -> StartPlan:
    from pipelinerl.launch.resume import plan_resume  # noqa: PLC0415 - reads a checkpoint, with torch

    return plan_resume(run)


def _show(config: RunConfig, run: RunDirectory, summary: dict[str, Any]) -> None:
    """Curves as a picture and, unless the view is `none`, the table and a sample before and after."""
    from pipelinerl.launch.closing import draw, show_result  # noqa: PLC0415 - matplotlib takes a second

    if config.metrics.plot and summary["optimizer_steps"]:
        draw(run)
    if config.metrics.view != "none":
        show_result(run, summary, sys.stdout)
