"""`pipelinerl.train`: one session of a run, from its run directory to its summary."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import msgspec
from rich.console import Console

from pipelinerl.checkpoint import WEIGHTS_FOLDER, best_version, by_version, remove_unfinished, saved_versions
from pipelinerl.config.load import validate
from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import PipelineRLError, RunDirectoryError, RunInterruptedError, StageDiedError
from pipelinerl.files import remedy, write_atomically
from pipelinerl.launch.checks import check_before_the_start, inputs_of, settled
from pipelinerl.launch.hosts.host import FINISHED, Attempts, LocalHost, Outcome
from pipelinerl.launch.hosts.processes import run_processes
from pipelinerl.launch.run_lock import RunLock, errors_explained, keep_settings, last_plan, lock_run_directory
from pipelinerl.launch.session import Session, StartPlan, write_session
from pipelinerl.metrics.evaluations import EvaluationRecord
from pipelinerl.metrics.reading import read_records
from pipelinerl.metrics.records import StepRecord
from pipelinerl.metrics.summary import summarize
from pipelinerl.process.forks import ForkServer
from pipelinerl.resources.memory import bytes_by
from pipelinerl.resources.roles import fork_server
from pipelinerl.run_directory import RunDirectory
from pipelinerl.schedule import make_schedule
from pipelinerl.status.view import RunView, make_view, output_that_never_fails

Began = Callable[[Path], str | None]


def train(config: RunConfig, *, resume: Path | None = None, began: Began = lambda _: None) -> dict[str, Any]:
    """Run `config` to its end and return the contents of `summary.json`.

    With `resume`, a run directory, that run continues from its latest checkpoint, or from the beginning if it has none.
    `config.metrics.view` selects what the terminal shows. `began` is called with the run directory once a session has
    written its files there; it may return a line for the user. A session that loses a process which can't be replaced is
    followed by another one, from the latest checkpoint. If the run did not reach its goal, raises the error that ended it
    (see `errors`), after writing the summary.
    """
    started_s = time.monotonic()
    config, notices = settled(validate(config))
    if resume is not None:
        from pipelinerl.launch.resume import changed_settings  # noqa: PLC0415 - only a resumed run needs it

        notices += changed_settings(config, RunDirectory(resume.absolute()))
    with ExitStack() as stack:
        forks = stack.enter_context(fork_server(config))
        memory = check_before_the_start(config, forks)
        notices += memory.lines
        predicted, losses = bytes_by("role", memory.uses), Losses(config.launch.restarts, started_s)
        stack.enter_context(output_that_never_fails())
        stack.enter_context(errors_explained())
        lock = stack.enter_context(closing(lock_run_directory(config, resume)))
        while True:
            try:
                summary = _train_session(
                    config, lock, forks, predicted, losses, resumes=resume is not None, notices=notices, began=began
                )
            except PipelineRLError as error:
                if losses.error is None:
                    raise
                raise StageDiedError(f"{losses.error}\nthe run can't go on from its checkpoint: {error}") from error
            if summary is not None:
                return summary
            resume, notices = lock.run.root, []
            time.sleep(losses.pause_s)


class Losses(Attempts):
    """The sessions of a run that lost a process which can't be replaced, and whether another session follows.

    A new checkpoint begins the count again.

    error            why the latest session ended, if another one follows
    records_from_s   of all these sessions: times in records include what a restart takes
    """

    def __init__(self, allowed: int, records_from_s: float) -> None:
        super().__init__(allowed)
        self.records_from_s = records_from_s
        self.error: PipelineRLError | None = None

    def follow(self, session: Session, outcome: Outcome) -> str | None:
        """The line for the user if another session follows this one, which has ended."""
        self.error = None
        if not outcome.lost:
            return None
        latest = max(by_version(session.run.checkpoints), default=0)
        goes_on = "the run goes on from its latest checkpoint" if latest else "the run starts again"
        if following := self.after(str(outcome.error), goes_on, worked=latest > session.plan.version):
            self.error, self.restarts = outcome.error, self.restarts + 1
        return following

    def counted(self, outcome: Outcome) -> Outcome:
        """The outcome of the last session, with the losses. If it was lost too, its error has all reports."""
        error = outcome.error
        if error is not None and outcome.lost and len(self.reports) > 1:
            lost = f"{len(self.reports)} sessions lost a process without a new checkpoint"
            error = type(error)(self.all(f"{lost} (launch.restarts: {self.allowed}):"))
        restarts = {**outcome.restarts, "run": self.restarts} if self.restarts else outcome.restarts
        return replace(outcome, error=error, restarts=restarts)


def _train_session(
    config: RunConfig,
    lock: RunLock,
    forks: ForkServer | None,
    predicted: Mapping[str, int],
    losses: Losses,
    *,
    resumes: bool,
    notices: Sequence[str],
    began: Began,
) -> dict[str, Any] | None:
    """One session, to its summary. Returns None if another one shall follow."""
    run = lock.run
    with ExitStack() as stack:
        run_stages = stack.enter_context(_runner(config, lock, forks))
        before, plan, begins_again = last_plan(run), StartPlan(), None
        if resumes:
            from pipelinerl.launch.resume import plan_resume  # noqa: PLC0415 - only a resumed run needs it

            plan, begins_again = plan_resume(config, run)
        if plan.version >= config.trainer.steps:
            from pipelinerl.report.series import read_summary  # noqa: PLC0415 - only at the goal

            reached = None
            with suppress(RunDirectoryError):  # a damaged one is written again
                reached = read_summary(run.root)
            if reached is not None and reached.get("status") == FINISHED:
                print(f"{run.root} has reached its goal of {config.trainer.steps} steps; raise --trainer.steps to continue")
                return reached
        plan = msgspec.structs.replace(
            plan,
            run=before.run if before else plan.run,
            epoch=before.epoch + 1 if before else 1,
            inputs=inputs_of(config),
            predicted_memory_bytes=dict(predicted),
        )
        if not losses.restarts:
            losses.records_from_s -= plan.elapsed_s
        session = Session(config, run, plan, make_schedule(config), losses.records_from_s)
        write_session(session)
        if not run.config.exists():
            keep_settings(config, run)
        run.stop_request.unlink(missing_ok=True)
        remove_unfinished(run.checkpoints, run.root / WEIGHTS_FOLDER)  # which a trainer that was frozen can't install now
        for stale in (run.statuses, *run.control.glob("*.ready.json")):
            stale.unlink(missing_ok=True)
        title = f"pipelinerl · {config.schedule.kind} · {Path(config.environment.kind).name} · {run.root}"
        made = make_view(config.metrics.view, sys.stdout, target=config.trainer.steps, title=title)
        view = stack.enter_context(closing(made))
        view.say(f"run directory: {run.root}")
        for line in (begins_again, *notices, began(run.root)):
            if line:
                view.say(line)
        if plan.checkpoint:
            view.say(f"resuming at version {plan.version} from {plan.checkpoint}")
        if config.metrics.trackers or config.metrics.callback:  # they also get the summary
            from pipelinerl.report.trackers import followed  # noqa: PLC0415 - few runs have trackers

            stack.enter_context(followed(run, config.metrics, view.say))
        outcome = run_stages(session, view)
        if following := losses.follow(session, outcome):
            view.say(following)
            return None
        view.close()
        return _conclude(session, losses.counted(outcome))


@contextmanager
def _runner(config: RunConfig, lock: RunLock, forks: ForkServer | None) -> Iterator[Callable[[Session, RunView], Outcome]]:
    """What runs the stages of a session. With a cluster: once no other launcher of it has the run directory."""
    if config.launch.kind == "embedded":
        from pipelinerl.launch.hosts.embedded import run_embedded  # noqa: PLC0415 - loads torch into this process

        yield run_embedded
    elif config.launch.kind == "processes":
        yield lambda session, view: run_processes(session, view, LocalHost(session, lock.fd, forks))
    else:
        from pipelinerl.launch.hosts.ray import RayHost, connected, wait_until_unused  # noqa: PLC0415 - needs an extra

        with connected(config.launch) as cluster:
            wait_until_unused(lock.run.root)
            yield lambda session, view: run_processes(session, view, RayHost(session, cluster))


def _conclude(session: Session, outcome: Outcome) -> dict[str, Any]:
    """Write and show the summary. Raises the error that ended the run, or an error of the summary."""
    try:
        summary = write_summary(session, outcome)
        if summary["optimizer_steps"]:
            show_result(session, summary, sys.stdout)
    except PipelineRLError as error:
        raise outcome.error or error from error
    if outcome.error is not None:
        raise outcome.error
    return summary


# ---- the summary


def write_summary(session: Session, outcome: Outcome) -> dict[str, Any]:
    """Write `summary.json` and return its contents.

    Raises RunDirectoryError if records can't be read or the summary can't be written.
    """
    run, plan, status = session.run, session.plan, FINISHED
    if outcome.error is not None:
        status = "interrupted" if isinstance(outcome.error, RunInterruptedError) else f"failed: {outcome.error}"
    summary = summarize(
        session.config,
        read_records(run.metrics, StepRecord),
        read_records(run.evaluations, EvaluationRecord),
        outcome.statuses,
        wall_s=outcome.wall_s,
        status=status,
        stream_rollouts=outcome.stream_rollouts,
        earlier_rollouts=plan.settled + sum(kept.left for kept in plan.kept),
        peak_memory_bytes={role: peak.host for role, peak in outcome.peak_memory.items()},
        peak_gpu_memory_bytes={role: peak.gpu for role, peak in outcome.peak_memory.items() if peak.gpu},
        resumed_from=plan.version if plan.checkpoint else None,
    ) | {
        "stopped_by": run.stop_request.read_text(encoding="utf-8") if run.stop_request.exists() else None,
        "best_version": best_version(run.root, saved_versions(run.root)),
        "restarts": outcome.restarts,
        "launcher_cpu_s": outcome.launcher_cpu_s,
        "predicted_memory_bytes": plan.predicted_memory_bytes,
    }
    try:
        write_atomically(run.summary, msgspec.json.format(msgspec.json.encode(summary)))
    except OSError as error:
        raise RunDirectoryError(f"can't write {run.summary}: {error.strerror}; {remedy(error)}") from error
    return summary


def show_result(session: Session, summary: dict[str, Any], stream: TextIO) -> None:
    """Draw the curves and, unless the view is `none`, print the table, a sample of two evaluations, and the results' paths.

    After a failure nothing is printed, so that the error stays visible; the results are in the run directory.
    """
    from pipelinerl.report import only_shown  # noqa: PLC0415 - as below

    run, metrics = session.run, session.config.metrics
    if metrics.plot:
        with only_shown(run.curves.name):
            from pipelinerl.report.curves import draw_curves  # noqa: PLC0415 - matplotlib takes a second

            draw_curves(run.root, run.curves)
    if metrics.view == "none" or summary["status"].startswith("failed"):
        return
    from pipelinerl.report.terminal import final_table, largest_gain, sample_before_after  # noqa: PLC0415

    console = Console(file=stream, markup=False, emoji=False)
    console.print(final_table(summary))
    with only_shown("the sample of the evaluations"):
        if (sample := largest_gain(run.root)) is not None:
            console.print(sample_before_after(*sample))
    for path in (run.curves, run.summary, run.metrics, run.rollouts, run.checkpoints):
        if path.exists():
            console.print(f"  {path.relative_to(run.root)}", style="dim", highlight=False)
    console.print(f"in {run.root}", style="dim", highlight=False, soft_wrap=True)
