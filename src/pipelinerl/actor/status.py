"""What a generation process publishes about itself: the status of its stages (engine, actor) and the timeline."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from pipelinerl.actor.evaluation import Evaluations
from pipelinerl.actor.groups import GroupRunner
from pipelinerl.actor.probe import WeightProbe
from pipelinerl.interfaces import ALLOWED, Board, Verdict
from pipelinerl.metrics.sinks import TimelineWriter
from pipelinerl.status.board import ALONE, GenerationStages, StatusReporter
from pipelinerl.types import ActorProgress, EngineProgress, StageState


class GenerationStatus:
    """Publishes the status of a generation process.

    `stages` are the names of engine and actor on the status board.
    """

    def __init__(
        self,
        board: Board,
        groups: GroupRunner,
        evaluations: Evaluations,
        probe: WeightProbe,
        *,
        stages: GenerationStages = ALONE,
        timeline: TimelineWriter | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._groups = groups
        self._evaluations = evaluations
        self._probe = probe
        self._slots = groups.context.slots
        self._engine = groups.context.engine
        self._stages = stages
        self._timeline = timeline
        self._clock = clock
        self._ready_since_s = clock()
        self._engine_status = StatusReporter(board, stages.engine, clock)
        self._actor_status = StatusReporter(board, stages.actor, clock)

    def report(self, verdict: Verdict, *, stepped: bool, ready: bool) -> None:
        """Report an iteration: why no more groups were started, and whether the engine made a step.

        `ready` is False while another process runs the evaluation before training. This time does not count as idle.
        """
        if not ready:
            self._ready_since_s = self._clock()
        self._record_timeline()
        if self._probe.unreported:  # publish at once, so that the trainer checks it soon
            self._probe.unreported = False
            self._engine_status.report(self._engine_state, "answered a weight probe", self._engine_progress, now=True)
        if not (self._actor_status.due("working" if stepped else "waiting") or self._engine_status.due(self._engine_state)):
            return
        running = self._groups.running + self._evaluations.running
        if stepped:
            limit = "" if verdict.allowed else f"; starts no more, waiting for {verdict.waiting_for}"
            evaluates = f"; {self._evaluations.status}" if self._evaluations.status else ""
            self._publish(f"{self._groups.running} rollouts running{limit}{evaluates}")
        elif running:
            self._publish("", Verdict(False, f"the environment: {running} rollouts run environment code"))
        else:
            self._publish("", verdict if verdict.waiting_for else Verdict(False, "its next iteration"))

    def evaluating(self) -> None:
        """Report a step of the evaluation before or after training."""
        self._record_timeline()
        self._publish(self._evaluations.status)

    def evaluated(self, *, done: bool) -> None:
        """Report the end of that evaluation. `done`: it was the one after training."""
        self._actor_status.report("done" if done else "waiting", "", self._actor_progress)

    def done(self) -> None:
        """Publish the final counts."""
        self._engine_status.report("done", "", self._engine_progress, now=True)
        self._actor_status.report("done", "", self._actor_progress, now=True)

    def _publish(self, activity: str, wait: Verdict = ALLOWED) -> None:
        """Publish the status of the actor (`activity`, or what it waits for if `wait` is a denial) and of the engine."""
        state: StageState = "working" if wait.allowed else "waiting"
        self._actor_status.report(state, wait.waiting_for or activity, self._actor_progress, waits_for=wait.waits_for)
        in_progress, actor = self._engine.in_progress, self._stages.actor
        detail = f"{in_progress} sequences in progress" if in_progress else f"requests from the {actor}"
        self._engine_status.report(
            self._engine_state, detail, self._engine_progress, waits_for=() if in_progress else (actor,)
        )

    def _record_timeline(self) -> None:
        if self._timeline is not None:
            self._timeline.note(self._engine.progress)

    @property
    def _engine_state(self) -> StageState:
        return "working" if self._engine.in_progress else "waiting"

    def _engine_progress(self) -> EngineProgress:
        ready_s = self._clock() - self._ready_since_s
        readings = tuple(self._probe.readings)
        known = {"slots": self._slots, "notes": self._groups.context.notes}
        return msgspec.structs.replace(self._engine.progress(), ready_s=ready_s, probes=readings, **known)

    def _actor_progress(self) -> ActorProgress:
        known = {"evaluated": self._evaluations.answered, "evaluating": self._evaluations.status}
        return msgspec.structs.replace(self._groups.progress(), evaluations=dict(self._evaluations.rewards), **known)
