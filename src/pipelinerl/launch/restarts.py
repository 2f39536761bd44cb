"""What follows a death: the process is started again on its machine while the others continue, or else the whole session.

    death ─▶ what is left of it is killed ─▶ its work is counted ─▶ a pause ─▶ it is started again ─▶ it is ready

A process that is killed can't write any more, so nothing of it arrives after its replacement has started. What it had begun
is returned before that, by the hub:

generation     The groups that it had in progress are counted as lost and start again under their index, in any generation
               process. The trainer does not wait for the engine until the new process asks for weights; it gets the newest.
preprocessing  The groups that it had read and not passed on are read again.
server         Its clients send its requests to other servers, and the newest weights to the new process. That has the same
               address.

A process that can't be replaced, like the trainer, takes its session with it. Another session follows from the latest
checkpoint (`Losses`).
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import msgspec

from pipelinerl.checkpoint import by_version
from pipelinerl.child import KILL_TIMEOUT_S
from pipelinerl.errors import CrashLoopError, PipelineRLError, RunDirectoryError, StageDiedError
from pipelinerl.files import write_atomically
from pipelinerl.hub.admission import ProcessTotals
from pipelinerl.launch.hosts.host import Host, Worker, named
from pipelinerl.launch.session import Session
from pipelinerl.launch.summary import Outcome
from pipelinerl.metrics.evaluations import EvaluationRecord
from pipelinerl.metrics.reading import read_lines, read_records
from pipelinerl.metrics.records import StepRecord
from pipelinerl.metrics.statistics import ENDED_ACTORS, ENDED_ENGINES, actor_total, engine_total
from pipelinerl.resources.roles import generation_roles, server_roles, stages_of
from pipelinerl.run_directory import ReadyFile
from pipelinerl.status.board import starting
from pipelinerl.status.screen import RunView
from pipelinerl.types import (
    LOST,
    STREAM_DROP,
    TRAINER,
    ActorProgress,
    EngineProgress,
    Progress,
    StageStatus,
    trainer_progress,
)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 60.0
"""Pause before the first restart of a process or a session. It doubles with each further one, up to the longest."""
WORKED_S = 600.0
"""A process that has worked for so long after a restart has recovered: its restarts count from zero again."""
PAUSES_KEPT = 256
"""Pauses for weight updates, of all ended processes, that are published."""
ASK_EVERY_S = 1.0
"""Time between two requests to a server that starts."""
STACKS_S = 0.2
"""Time for a process to write its stacks to its log before it is killed."""


@dataclass
class History:
    """The deaths of the process of one role.

    reports      how it ended each time, since it last worked for long
    restarts     how often it was started again
    away_s       how long it was away each time, from its death until a new process worked
    died_s       when it was first known to be dead, of the deaths since it last worked
    due_s        when it will be started again; None if it was
    ready_s      since when it works; None while it does not
    pid          of the new process
    actor        totals of all that died
    engine       the same
    """

    reports: list[str] = field(default_factory=list)
    restarts: int = 0
    away_s: list[float] = field(default_factory=list)
    died_s: float = 0.0
    due_s: float | None = None
    ready_s: float | None = None
    pid: int = 0
    actor: ActorProgress = field(default_factory=ActorProgress)
    engine: EngineProgress = field(default_factory=EngineProgress)


class Healing:
    """The restarts of a session. The caller removes dead processes from its own list, and adds those that `begin` starts.

    `changed_s`: the time of the latest death or restart.
    """

    def __init__(self, session: Session, host: Host, view: RunView) -> None:
        self._session, self._host, self._view = session, host, view
        self._histories: dict[str, History] = {}
        self._ask_s = 0.0  # when servers are asked again
        self.changed_s = 0.0

    @property
    def pending(self) -> bool:
        """Whether a process waits for its restart."""
        return any(history.due_s is not None for history in self._histories.values())

    @property
    def absent_servers(self) -> list[str]:
        """The engine servers that have died and are not ready yet. The other processes publish what they wait for."""
        roles = server_roles(self._session.config)
        return [role for role, history in self._histories.items() if role in roles and history.ready_s is None]

    def heal(self, dead: Sequence[Worker], now: float) -> None:
        """Count the work of processes that died, and plan their restarts.

        Raises CrashLoopError if they died too often, and what `Host.reap` raises.
        """
        self.changed_s = now
        for worker in dead:
            history = self._histories.setdefault(worker.role, History())
            if history.ready_s is not None or not history.reports:
                history.died_s = now
            if history.ready_s is not None and now - history.ready_s >= WORKED_S:
                history.reports.clear()
            history.reports.append(str(worker.failure()))
            history.ready_s = None
            self._host.reap(worker)
            self._count(worker)
        self._publish()
        most = self._session.config.launch.restarts
        looping = [worker.role for worker in dead if len(self._histories[worker.role].reports) > most]
        if looping:
            reports = [self._histories[role].reports for role in looping]
            heads = [f"the {role} process died {most + 1} times (launch.restarts: {most}):" for role in looping]
            raise CrashLoopError("\n".join(map(_numbered, heads, reports)))
        for worker in dead:
            history = self._histories[worker.role]
            number = len(history.reports)
            pause_s = pause_before(number)
            history.due_s = now + pause_s
            self._view.say(
                f"{_first_line(history.reports[-1])}; it is started again in {pause_s:g} s (restart {number} of {most})"
            )

    def kill(self, silent: Sequence[str], workers: Sequence[Worker], replaceable: Collection[str]) -> bool:
        """Kill those processes of the `silent` stages that can be replaced. Returns whether there were any.

        Others, like a trainer that waits for an engine, may only be silent because of them.
        """
        config = self._session.config
        candidates = [worker for worker in workers if worker.role in replaceable]
        hung = [worker for worker in candidates if not set(silent).isdisjoint(stages_of(config, worker.role))]
        for worker in hung:
            self._view.say(f"{named(worker)} has not reported for {config.launch.watchdog_s:g} s: it is killed")
            worker.dump_stacks()
        if hung:
            time.sleep(STACKS_S)
        for worker in hung:
            worker.kill()
            worker.wait(KILL_TIMEOUT_S)
        return bool(hung)

    def begin(self, now: float) -> Iterator[Worker]:
        """Start the processes that are due, one at a time. Raises StageDiedError if one can't be started."""
        for role, history in self._histories.items():
            if history.due_s is not None and now >= history.due_s:
                try:
                    self._write_plan()
                    worker, self.changed_s = self._host.start(role), now
                except OSError as error:  # a full disk, or no memory for a process
                    raise StageDiedError(f"{history.reports[-1]}\nit can't be started again: {error}") from error
                history.due_s, history.pid, history.restarts = None, worker.pid, history.restarts + 1
                yield worker

    def observe(self, statuses: Mapping[str, StageStatus], now: float) -> None:
        """Note which new processes are ready."""
        for role, history in self._histories.items():
            if history.ready_s is None and history.due_s is None and self._is_ready(role, history.pid, statuses, now):
                history.ready_s = now
                history.away_s.append(now - history.died_s)
                lost = history.actor.rollouts_dropped.get(LOST)
                rollouts = f"; {lost} rollouts were lost in crashes so far" if lost else ""
                self._view.say(f"the {role} process works again after {history.away_s[-1]:.1f} s{rollouts}")
                self._publish()

    def summary(self) -> dict[str, Any]:
        """By role: how often it was started again, the rollouts lost, and the seconds that it was away each time.

        It may have fewer times than restarts: a process may die again before it works.
        """
        return {
            role: {
                "count": history.restarts,
                "rollouts_lost": history.actor.rollouts_dropped.get(LOST, 0),
                "recovery_s": [round(away_s, 3) for away_s in history.away_s],
            }
            for role, history in self._histories.items()
        }

    def _is_ready(self, role: str, pid: int, statuses: Mapping[str, StageStatus], now: float) -> bool:
        if stages := stages_of(self._session.config, role):
            found = [statuses.get(stage) for stage in stages]
            return all(status is not None and status.pid == pid and status.state != "starting" for status in found)
        path = self._session.run.ready_file(role)
        if not path.exists() or (ready := msgspec.json.decode(path.read_bytes(), type=ReadyFile)).pid != pid:
            return False
        if self._session.config.engine.kind == "vllm":  # it writes its ready file before it loads the model
            if now < self._ask_s:
                return False
            self._ask_s = now + ASK_EVERY_S
            from pipelinerl.launch.stages.servers import answers  # noqa: PLC0415 - few runs have such servers

            return answers(ready.url, self._session.plan.servers_key)
        return True

    def _count(self, worker: Worker) -> None:
        """Set the totals of all processes of this role that died: the actors' by the hub, the engines' as they published."""
        config, history = self._session.config, self._histories[worker.role]
        if worker.role in (roles := generation_roles(config)):
            part = self._host.hub.admission.parts.get(roles.index(worker.role), ProcessTotals())
            history.actor = ActorProgress(
                groups_started=part.groups + part.lost // config.actor.group_size,
                rollouts_started=part.attempts + part.lost,
                rollouts_handed_over=part.rollouts - part.replaced,
                rollouts_dropped=+Counter({**part.dropped, LOST: part.lost, STREAM_DROP: part.replaced}),
            )
            status = self._host.board.read(stages_of(config, worker.role)[0])
            if status is not None and status.pid == worker.pid and isinstance(status.progress, EngineProgress):
                both = {"before": _ended(history.engine), "now": _ended(status.progress)}
                totals = engine_total(both) or status.progress
                pauses_s = totals.pauses_s[-PAUSES_KEPT:]
                history.engine = msgspec.structs.replace(
                    totals, slots=0, in_progress=0, queued=0, probes=(), pauses_s=pauses_s
                )
        starting(self._host.board, stages_of(config, worker.role), "has died and is started again")

    def _publish(self) -> None:
        """Publish the totals of ended processes, with the number of restarts."""
        histories = self._histories.values()
        told = [
            f"{role}: restarts {history.restarts}, rollouts lost {history.actor.rollouts_dropped.get(LOST, 0)}, "
            f"seconds away {sum(history.away_s):.1f}"
            for role, history in self._histories.items()
        ]
        actors = actor_total({str(number): _ended(history.actor) for number, history in enumerate(histories)})
        engines = engine_total({str(number): _ended(history.engine) for number, history in enumerate(histories)})
        for stage, detail, progress in ((ENDED_ENGINES, "", engines), (ENDED_ACTORS, "; ".join(told), actors)):
            self._host.board.publish(_ended(progress, stage, detail))

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


def _ended(progress: Progress | None, stage: str = "", detail: str = "") -> StageStatus:
    now = time.monotonic()
    return StageStatus(
        stage=stage, pid=os.getpid(), state="done", detail=detail, since_s=now, written_s=now, progress=progress
    )


# ---- sessions


class Loss(NamedTuple):
    """A session lost a process at `time_s` (by `time.monotonic`). `steps`: those after its latest checkpoint."""

    time_s: float
    steps: int


class Losses:
    """The sessions of a run that lost a process which can't be replaced, and whether another session follows.

    error            why the latest session ended, if another one follows
    records_from_s   of all these sessions: times in records include what a restart takes
    pause_s          how long to wait before the next session
    """

    def __init__(self, first: Session) -> None:
        self.error: PipelineRLError | None = None
        self.records_from_s = first.records_from_s
        self.pause_s = 0.0
        self._allowed = first.config.launch.restarts
        self._losses: list[Loss] = []
        self._reports: list[str] = []  # of the sessions since the latest new checkpoint

    def follow(self, session: Session, outcome: Outcome) -> str | None:
        """The line for the user if another session follows this one, which has ended."""
        self.error = None
        if not outcome.lost:
            return None
        latest = max(by_version(session.run.checkpoints), default=0)
        if latest > session.plan.version:
            self._reports.clear()
        self._reports.append(str(outcome.error))
        number = len(self._reports)
        if number > self._allowed:
            return None
        trainer = trainer_progress(outcome.statuses.get(TRAINER))
        self._losses.append(Loss(time.monotonic(), max(trainer.version - latest, 0) if trainer else 0))
        self.error, self.pause_s = outcome.error, pause_before(number)
        what = "goes on from its latest checkpoint" if latest else "starts again from the beginning"
        restart = f"restart {number} of {self._allowed}"
        return f"{_first_line(self._reports[-1])}; the run {what} in {self.pause_s:g} s ({restart})"

    def counted(self, session: Session, outcome: Outcome) -> Outcome:
        """The outcome of the last session, with the losses. If it was lost too, its error has all reports."""
        if not self._losses:
            return outcome
        error, count = outcome.error, len(self._reports)
        if error is not None and outcome.lost and count > 1:
            lost = f"{count} sessions lost a process without a new checkpoint (launch.restarts: {self._allowed}):"
            error = type(error)(_numbered(lost, self._reports))
        steps: list[StepRecord] = []
        with suppress(FileNotFoundError, RunDirectoryError):  # no step was taken; the summary names damaged records
            steps = read_lines(session.run.metrics, StepRecord)
        times_s = [session.records_from_s + step.time_s for step in steps]
        waits_s = ([at_s - loss.time_s for at_s in times_s if at_s > loss.time_s] for loss in self._losses)
        found = {
            "count": len(self._losses),
            "steps_lost": sum(loss.steps for loss in self._losses),
            "recovery_s": [round(min(after_s), 3) for after_s in waits_s if after_s],
        }
        return replace(outcome, error=error, restarts={**outcome.restarts, "run": found})


# ---- what both say


def pause_before(restart: int) -> float:
    """Seconds to wait before restart number `restart`, from 1 on, of one thing."""
    return float(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(restart - 1, 16)))


def _first_line(report: str) -> str:
    return report.splitlines()[0].removesuffix("; the end of its log:")


def _numbered(head: str, reports: Sequence[str]) -> str:
    return "\n".join([head, *(f"{number}. {report}" for number, report in enumerate(reports, start=1))])
