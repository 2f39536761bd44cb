"""`pipelinerl.train`: one session of a run, from its run directory to its summary."""

from __future__ import annotations

import errno
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import msgspec

from pipelinerl.actor.admission import make_record
from pipelinerl.config import config_to_yaml, validate
from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import PipelineRLError, RunDirectoryError
from pipelinerl.files import write_atomically
from pipelinerl.launch.dry_run import check_before_the_start
from pipelinerl.launch.outcome import FINISHED, Outcome, write_summary
from pipelinerl.launch.run_directory import RunDirectory, RunLock, create_run_directory, open_run_directory
from pipelinerl.launch.session import Session, StartPlan, write_plan
from pipelinerl.launch.stages.streams import stream_store
from pipelinerl.schedule import make_schedule
from pipelinerl.status.view import View, make_view


class Broker(Protocol):
    """The run's own Redis server, which holds its streams. It ends when the run ends or crashes."""

    @property
    def url(self) -> str: ...

    def failure(self) -> str | None:
        """Why the server has ended, in one line; None while it runs."""
        ...


@contextmanager
def running_broker(config: RunConfig, run: RunDirectory) -> Iterator[Broker | None]:
    """Run the run's own Redis server while inside; None if the run needs none. Its data is kept for a resume.

    Raises MissingDependencyError if redis-server or its Python library is not installed, StreamError if it does not start.
    """
    if config.stream.kind != "redis" or config.stream.url is not None:
        yield None
        return
    from pipelinerl.stream.redis_server import start_server  # noqa: PLC0415 - needs the extra `redis`

    with start_server(run.streams / "redis", durable=True) as server:
        yield server


def train(config: RunConfig, *, resume: Path | None = None) -> dict[str, Any]:
    """Run `config` to its end and return the contents of `summary.json`.

    With `resume`, a run directory, that run continues from its latest checkpoint, or from the beginning if it has none.
    `config.metrics.view` selects what the terminal shows. If the run did not reach its goal, raises the error that ended it
    (see `errors`), after writing the summary.
    """
    started_s = time.monotonic()
    config = validate(config)
    memory = check_before_the_start(config)
    lock = create_run_directory(config) if resume is None else open_run_directory(resume)
    try:
        restart_notice = None if resume is None else _start_again(lock.run)
        if restart_notice is not None:
            resume = None
        if resume is not None:
            _refuse_changes(config, lock.run)
        with running_broker(config, lock.run) as broker:
            url = broker.url if broker is not None else None
            plan = StartPlan(redis_url=url) if resume is None else _plan(config, lock.run, url)
            finished = _finished_summary(lock.run) if plan.version >= config.trainer.steps else None
            if finished is not None:
                print(
                    f"{lock.run.root} has reached its goal of {config.trainer.steps} steps; "
                    "raise --trainer.steps to continue"
                )
                return finished
            plan = msgspec.structs.replace(plan, predicted_memory_bytes=memory.predicted_bytes)
            records_from_s = started_s - plan.elapsed_s
            session = Session(config, lock.run, plan, make_schedule(config), records_from_s)
            notices = [*([restart_notice] if restart_notice else []), *memory.lines]
            return _session(session, lock, broker, notices)
    finally:
        lock.release()


def _session(session: Session, lock: RunLock, broker: Broker | None, notices: Sequence[str]) -> dict[str, Any]:
    """Run the session. `notices` are shown to the user before anything starts."""
    config, run, plan = session.config, session.run, session.plan
    _write_start(session)
    title = f"pipelinerl · {config.schedule.kind} · {config.environment.kind} · {run.root}"
    view = make_view(config.metrics.view, sys.stdout, target=config.trainer.steps, title=title)
    view.say(f"run directory: {run.root}")
    for line in notices:
        view.say(line)
    if plan.checkpoint:
        view.say(f"resuming at version {plan.version} from {plan.checkpoint}")
    try:
        outcome = _launch(session, lock, broker, view)
    finally:
        view.close()
    try:
        summary = write_summary(session, outcome)
        if summary["optimizer_steps"]:
            _show(session, summary, failed=summary["status"].startswith("failed"))
    except PipelineRLError as error:
        raise outcome.error or error from error
    if outcome.error is not None:
        raise outcome.error
    return summary


def _write_start(session: Session) -> None:
    """Write the files that the session's processes, and a later resume, read. Raises RunDirectoryError."""
    run = session.run
    try:
        write_plan(run, session.plan)
        write_atomically(run.config, config_to_yaml(session.config).encode())
        for stale in (*run.control.glob("*.board"), *run.control.glob("*.ready.json")):
            stale.unlink()
        make_record(run.admission, sum(kept.left for kept in session.plan.kept), session.plan.settled)
    except OSError as error:
        advice = "; make room on that disk" if error.errno == errno.ENOSPC else ""
        raise RunDirectoryError(f"can't write to {run.root}: {error.strerror}{advice}") from error


def _launch(session: Session, lock: RunLock, broker: Broker | None, view: View) -> Outcome:
    if session.config.launch.kind == "embedded":
        from pipelinerl.launch.hosts.embedded import run_embedded  # noqa: PLC0415 - loads torch into this process

        return run_embedded(session, view)
    from pipelinerl.launch.hosts.processes import run_processes  # noqa: PLC0415 - POSIX only

    return run_processes(session, view, lock, broker)


def _start_again(run: RunDirectory) -> str | None:
    from pipelinerl.launch.resume import start_again  # noqa: PLC0415 - as below

    return start_again(run)


def _refuse_changes(config: RunConfig, run: RunDirectory) -> None:
    from pipelinerl.launch.resume import refuse_changes  # noqa: PLC0415 - as below

    refuse_changes(config, run)


def _plan(config: RunConfig, run: RunDirectory, redis_url: str | None) -> StartPlan:
    from pipelinerl.launch.resume import plan_resume  # noqa: PLC0415 - reads a checkpoint, with torch

    plan = plan_resume(config, run, stream_store(config, run, redis_url))
    return msgspec.structs.replace(plan, redis_url=redis_url)


def _finished_summary(run: RunDirectory) -> dict[str, Any] | None:
    """The summary of the run's last session, if it reached its goal."""
    try:
        summary = msgspec.json.decode(run.summary.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError):
        return None
    return summary if summary.get("status") == FINISHED else None


def _show(session: Session, summary: dict[str, Any], *, failed: bool) -> None:
    """Draw the curves and, unless the view is `none`, print the table and a sample answer before and after training.

    After a failure nothing is printed, so that the error stays visible; the results are in the run directory.
    """
    from pipelinerl.launch.closing import draw, show_result  # noqa: PLC0415 - matplotlib takes a second

    if session.config.metrics.plot:
        draw(session.run)
    if session.config.metrics.view != "none" and not failed:
        show_result(session.run, summary, sys.stdout)
