"""What follows a death: the process is started again on its machine while the others continue, or else the whole session.

    death ─▶ what is left of it is killed ─▶ its work is counted ─▶ a pause ─▶ it is started again

A process that is killed can't write any more, so nothing of it arrives after its replacement has started. What it had begun
is returned before that, by the hub:

generation     The groups that it had in progress are counted as lost and start again under their index, in any generation
               process. The trainer does not wait for the engine until the new process asks for weights; it gets the newest.
preprocessing  The groups that it had read and not passed on are read again.

Any other process, like the trainer, takes its session with it. Another session follows from the latest
checkpoint (`Losses`).
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf

import msgspec

from pipelinerl.checkpoint import by_version
from pipelinerl.errors import CrashLoopError, PipelineRLError, StageDiedError
from pipelinerl.files import write_atomically
from pipelinerl.hub.admission import ProcessTotals
from pipelinerl.launch.hosts.host import Host, Outcome, Worker
from pipelinerl.launch.session import Session
from pipelinerl.metrics.evaluations import EvaluationRecord
from pipelinerl.metrics.reading import read_records
from pipelinerl.metrics.statistics import engine_total
from pipelinerl.resources.roles import generation_roles, stages_of
from pipelinerl.status.board import starting
from pipelinerl.status.view import RunView
from pipelinerl.types import (
    LOST,
    STREAM_DROP,
    TRAINER,
    ActorProgress,
    EngineProgress,
    StageStatus,
    trainer_progress,
)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 60.0
"""Pause before the first restart of a process or a session. It doubles with each further one, up to the longest."""
WORKED_S = 600.0
"""A process that has worked for so long after a restart has recovered: its restarts count from zero again."""
PAUSES_KEPT = 256
"""Pauses for weight updates, of all ended processes of a role, that are published."""
ENDED = "ended-"
"""How the names of the stages begin that have the totals of processes that died."""


class Attempts:
    """The ends of one thing, a process or the sessions of a run, which is started again at most `allowed` times in a row.

    reports    why it ended each time since it last worked
    pause_s    how long to wait before it is started again
    due_s      when that is; None: it runs
    restarts   how often it was started again, the last time at `began_s`
    """

    def __init__(self, allowed: int) -> None:
        self.allowed, self.restarts, self.began_s, self.pause_s = allowed, 0, inf, FIRST_PAUSE_S
        self.reports: list[str] = []
        self.due_s: float | None = None

    def after(self, why: str, what: str) -> str | None:
        """It has ended. Returns what happens next, for the user; None if it ended too often."""
        self.reports.append(why)
        self.pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(len(self.reports) - 1, 16))
        last = why.splitlines()[0].removesuffix("; the end of its log:").removesuffix(":")
        line = f"{last}; {what} in {self.pause_s:g} s (restart {len(self.reports)} of {self.allowed})"
        return line if len(self.reports) <= self.allowed else None

    def all(self, head: str) -> str:
        """All reports, numbered."""
        return "\n".join([head, *(f"{number}. {report}" for number, report in enumerate(self.reports, start=1))])


class Healing:
    """The restarts of a session. The caller removes dead processes from its own list, and adds what `begin` starts.

    `attempts` is by role, `changed_s` the time of the latest death or restart.
    """

    def __init__(self, session: Session, host: Host, view: RunView) -> None:
        self._session, self._host, self._view = session, host, view
        self.attempts: dict[str, Attempts] = {}
        self.changed_s = 0.0

    @property
    def pending(self) -> bool:
        """Whether a process waits for its restart."""
        return any(attempts.due_s is not None for attempts in self.attempts.values())

    def heal(self, dead: Sequence[Worker], now: float) -> None:
        """Count the work of processes that died, and plan their restarts. Raises CrashLoopError if they died too often."""
        self.changed_s = now
        looping = []
        for worker in dead:
            attempts = self.attempts.setdefault(worker.role, Attempts(self._session.config.launch.restarts))
            if now - attempts.began_s >= WORKED_S:
                attempts.reports.clear()
            following = attempts.after(str(worker.failure()), "it is started again")
            attempts.due_s = now + attempts.pause_s
            self._host.reap(worker)
            self._count(worker)
            if following is None:
                times = f"{len(attempts.reports)} times (launch.restarts: {attempts.allowed})"
                looping.append(attempts.all(f"the {worker.role} process died {times}:"))
            else:
                self._view.say(following)
        if looping:
            raise CrashLoopError("\n".join(looping))

    def begin(self, now: float) -> Iterator[Worker]:
        """Start the processes that are due, one at a time. Raises StageDiedError if one can't be started."""
        for role, attempts in self.attempts.items():
            if attempts.due_s is not None and now >= attempts.due_s:
                try:
                    self._write_plan()
                    yield self._host.start(role)
                except OSError as error:  # a full disk, or no memory for a process
                    raise StageDiedError(f"{attempts.reports[-1]}\nit can't be started again: {error}") from error
                attempts.due_s, attempts.restarts = None, attempts.restarts + 1
                attempts.began_s = self.changed_s = now

    def _count(self, worker: Worker) -> None:
        """Publish the totals of all processes of this role that died: the actors' by the hub, the engines' as published."""
        config, board = self._session.config, self._host.board
        stages = stages_of(config, worker.role)
        if worker.role in (roles := generation_roles(config)):
            part = self._host.hub.admission.parts.get(roles.index(worker.role), ProcessTotals())
            actor = ActorProgress(
                groups_started=part.groups + part.lost // config.actor.group_size,
                rollouts_started=part.attempts + part.lost,
                rollouts_handed_over=part.rollouts - part.replaced,
                rollouts_dropped=+Counter({**part.dropped, LOST: part.lost, STREAM_DROP: part.replaced}),
            )
            mine = {ENDED + stages[0]: os.getpid(), stages[0]: worker.pid}  # what the new one publishes is not of the dead
            known = {stage: status for stage, pid in mine.items() if (status := board.read(stage)) and status.pid == pid}
            engine = engine_total(known) or EngineProgress()
            now, pauses_s = time.monotonic(), engine.pauses_s[-PAUSES_KEPT:]
            engine = msgspec.structs.replace(engine, slots=0, in_progress=0, queued=0, probes=(), pauses_s=pauses_s)
            status = StageStatus(stage="", pid=os.getpid(), state="done", detail="", since_s=now, written_s=now)
            for stage, progress in zip(stages, (engine, actor), strict=True):
                board.publish(msgspec.structs.replace(status, stage=ENDED + stage, progress=progress))
        starting(board, stages, "has died and is started again")

    def _write_plan(self) -> None:
        """Tell the new process which evaluations have taken place, and which weights the run has come to."""
        session, run = self._session, self._session.run
        trainer = trainer_progress(self._host.board.read(TRAINER))
        evaluated = [record.version for record in read_records(run.evaluations, EvaluationRecord)]
        plan = msgspec.structs.replace(
            session.plan,
            version=max(session.plan.version, trainer.published_version if trainer else 0),
            evaluated=max(evaluated, default=session.plan.evaluated),
        )
        write_atomically(run.plan, msgspec.json.encode(plan), mode=0o600)


class Losses:
    """The sessions of a run that lost a process which can't be replaced, and whether another session follows.

    attempts         those since the latest new checkpoint
    error            why the latest session ended, if another one follows
    records_from_s   of all these sessions: times in records include what a restart takes
    """

    def __init__(self, first: Session) -> None:
        self.attempts, self.records_from_s = Attempts(first.config.launch.restarts), first.records_from_s
        self.error: PipelineRLError | None = None

    def follow(self, session: Session, outcome: Outcome) -> str | None:
        """The line for the user if another session follows this one, which has ended."""
        self.error = None
        if not outcome.lost:
            return None
        attempts, latest = self.attempts, max(by_version(session.run.checkpoints), default=0)
        if latest > session.plan.version:
            attempts.reports.clear()
        goes_on = "the run goes on from its latest checkpoint" if latest else "the run starts again"
        if following := attempts.after(str(outcome.error), goes_on):
            self.error, attempts.restarts = outcome.error, attempts.restarts + 1
        return following

    def counted(self, outcome: Outcome) -> Outcome:
        """The outcome of the last session, with the losses. If it was lost too, its error has all reports."""
        error, attempts = outcome.error, self.attempts
        if error is not None and outcome.lost and len(attempts.reports) > 1:
            lost = f"{len(attempts.reports)} sessions lost a process without a new checkpoint"
            error = type(error)(attempts.all(f"{lost} (launch.restarts: {attempts.allowed}):"))
        restarts = {**outcome.restarts, "run": attempts.restarts} if attempts.restarts else outcome.restarts
        return replace(outcome, error=error, restarts=restarts)
