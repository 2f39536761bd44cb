"""What follows a death: the process is started again on its machine while the others continue, or else the whole session.

    death ─▶ what is left of it is killed ─▶ its work is counted ─▶ a pause ─▶ it is started again

A process that is killed can't write any more, so nothing of it arrives after its replacement has started. What it had begun
is returned before that, by the hub:

generation     The groups that it had in progress are counted as lost and start again under their index, in any generation
               process. The trainer does not wait for the engine until the new process asks for weights; it gets the newest.
preprocessing  The groups that it had read and not passed on are read again.

Any other process, like the trainer, takes its session with it. Another session follows from the latest
checkpoint (`run.Losses`).
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from pipelinerl.errors import CrashLoopError, StageDiedError
from pipelinerl.files import write_atomically
from pipelinerl.hub.admission import ProcessTotals
from pipelinerl.launch.hosts.host import Attempts, Host, Worker
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
    TrainerProgress,
    trainer_progress,
)

WORKED_S = 600.0
"""A process that has worked for so long after a restart has recovered: its restarts count from zero again."""
PAUSES_KEPT = 256
"""Pauses for weight updates, of all ended processes of a role, that are published."""
ENDED = "ended-"
"""How the names of the stages begin that have the totals of processes that died."""


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
            worked = now - attempts.began_s >= WORKED_S
            following = attempts.after(str(worker.failure()), "it is started again", worked=worked)
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
        """Start the processes that are due, one at a time. Raises StageDiedError if one can't be started.

        A new process learns which evaluations have taken place, and which weights the run has come to.
        """
        run, plan = self._session.run, self._session.plan
        for role, attempts in self.attempts.items():
            if attempts.due_s is not None and now >= attempts.due_s:
                trainer = trainer_progress(self._host.board.read(TRAINER)) or TrainerProgress()
                evaluated = [record.version for record in read_records(run.evaluations, EvaluationRecord)]
                version, latest = max(plan.version, trainer.published_version), max(evaluated, default=plan.evaluated)
                known = msgspec.structs.replace(plan, version=version, evaluated=latest)
                try:
                    write_atomically(run.plan, msgspec.json.encode(known), mode=0o600)
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
