"""The actor: keeps the engine full of rollouts and writes finished groups to the stream.

    hub ─index─▶ group: K attempts ─▶ requests ─▶ engine ─▶ tokens ─▶ K outcomes ─▶ hub
    (schedule admits)                               ▲  one step an iteration
                                    receiver ─weights┘  (between two steps, if the schedule allows it)

consumes   group indices; weights
produces   groups, in the order in which they finish; the status of its two stages (engine, actor) on the status board
waits for  the trainer (lag bound, round, full stream) or an environment. It never blocks: it publishes the wait and returns.

A run may have several generation processes with one actor each. They are coordinated by `admission` only.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import msgspec

from pipelinerl.actor.evaluation import Evaluations
from pipelinerl.actor.groups import GroupRunner
from pipelinerl.actor.rollouts import IDLE_S
from pipelinerl.errors import RequestError
from pipelinerl.interfaces import ALLOWED, Admission, AsyncEngine, Board, Verdict
from pipelinerl.metrics.records import TimelineWriter
from pipelinerl.status.board import ALONE, GenerationStages, StatusReporter
from pipelinerl.types import (
    TRAINER,
    ActorProgress,
    EngineProgress,
    GenerationRequest,
    ProbeReading,
    SamplingParams,
    StageState,
    trainer_progress,
)

if TYPE_CHECKING:
    from pipelinerl.weights.receiving import Receiver

CANCELLING_PASSES = 2
"""Passes of the event loop until a cancelled attempt has cancelled the task of its environment's code."""
LONGEST_IDLE = 8
"""The sleep of an idle actor grows up to this multiple of `idle_s`, to leave the cores to other processes."""
OPEN_ROLLOUTS_PER_SLOT = 4
"""Default of `actor.max_open_rollouts`, per slot."""
READINGS_KEPT = 16
PROBE_TIMEOUT_S = 60.0
"""Later versions have been probed by then."""


def open_limit(configured: int | None, slots: int, *, in_rounds: bool) -> int | None:
    """Most rollouts of an actor that may be open at once. None in rounds, where the size of the round is the limit.

    A rollout that waits for a tool or a slow reward uses no slot, so more rollouts than slots may be open.
    """
    return None if in_rounds else configured or OPEN_ROLLOUTS_PER_SLOT * slots


class Actor:
    """The actor process of Algorithm 2. Each call of `iterate` runs one iteration in the caller's thread and event loop."""

    def __init__(
        self,
        *,
        groups: GroupRunner,
        evaluations: Evaluations,
        board: Board,
        admission: Admission,
        receiver: Receiver,
        stages: GenerationStages = ALONE,
        timeline: TimelineWriter | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`admission` decides which groups to start and when. `stages` are the names of engine and actor on the `board`."""
        self._groups = groups
        self._evaluations = evaluations
        self._engine = groups.context.engine
        self._awake = groups.context.awake
        self._slots = groups.context.slots
        self._admission = admission
        self._receiver = receiver
        self._probe = WeightProbe(self._engine, board, stages.engine)
        self._max_open = open_limit(groups.config.max_open_rollouts, self._slots, in_rounds=admission.in_rounds)
        self.idle_s = IDLE_S
        self._stopping = False
        self._idle_iterations = 0
        self._actor_name = stages.actor
        self._engine_status = StatusReporter(board, stages.engine, clock)
        self._actor_status = StatusReporter(board, stages.actor, clock)
        self._timeline = timeline
        self._clock = clock
        self._ready_since_s = clock()

    async def iterate(self) -> None:
        """Hand over finished groups, take new weights, start groups, and generate the next token of every sequence.

        Raises TooManyFailuresError when too many rollouts fail, and any error of the engine, stream or weight receiver.
        """
        self._hand_over()
        await self._take_weights()
        if self._evaluations.advance(self._engine.version):
            await self._awake.settle()  # its attempts submit their requests, which leave less room for groups
        verdict = self._start_groups()
        await self._awake.settle()
        stepped = await self._engine.advance()
        await self._awake.settle()
        self._groups.check()
        self._hand_over()
        self._report(verdict, stepped=stepped)
        await self._idle(stepped)

    def _hand_over(self) -> None:
        """Hand over finished groups, oldest first."""
        while self._groups.finished:
            self._admission.hand_over(self._groups.finished[0])
            self._groups.handed_over()
        self._groups.dropped_by_stream += self._admission.take_dropped()

    async def _take_weights(self) -> None:
        """Apply new weights if there are any and the schedule allows it, and probe the engine once per version."""
        version = self._receiver.offered()
        if version is not None and self._admission.may_take(version):
            update = self._receiver.poll()
            if update is not None:
                self._receiver.acknowledge(await self._engine.update_weights(update))
        self._probe.ask()

    def _start_groups(self) -> Verdict:
        """Start groups while the engine has room. Returns why no more were started, or an allowing verdict if it is full.

        `admission` decides over all actors.
        """
        room = self._slots - self._engine.in_progress - self._engine.queued
        while room > 0:
            if self._stopping:
                return Verdict(False, "nothing: it was asked to stop")
            if self._max_open is not None and self._groups.running >= self._max_open:
                return Verdict(False, f"the environment: {self._groups.running} rollouts are open and request no tokens")
            size = self._groups.config.group_size
            index, verdict = self._admission.claim(self._engine.version, size, room=room)
            if index is None:
                return verdict
            room -= size if self._groups.start(index, self._engine.version) else 0
            self._hand_over()  # a skipped problem is recorded before the next one is chosen
        return ALLOWED

    async def _idle(self, stepped: bool) -> None:
        """Sleep if no engine step was made. The sleep grows while no rollouts are running."""
        running = self._groups.running or self._evaluations.running
        self._idle_iterations = 0 if stepped or running else self._idle_iterations + 1
        if not stepped:
            await asyncio.sleep(self.idle_s * min(max(1, self._idle_iterations), LONGEST_IDLE))

    # ---- before the first iteration and after the last one

    async def evaluate(self, when: Literal["before", "after"]) -> None:
        """Run the evaluation before or after training, if the run has one."""

        def on_step() -> None:
            if self._timeline is not None:
                self._timeline.note(self._engine.progress)
            self._publish(self._evaluations.status)

        if await self._evaluations.run(when, on_step):
            self._actor_status.report("done" if self._stopping else "waiting", "", self._actor_progress)

    async def stop(self) -> None:
        """Stop starting groups, cancel running rollouts, which stay counted as in progress."""
        self._stopping = True
        self._groups.cancel()
        self._evaluations.end()
        await self._probe.cancel()
        for _ in range(CANCELLING_PASSES):
            await asyncio.sleep(0)  # their code wakes up
        await self._awake.settle()  # and cancels its requests
        await self._engine.advance()  # the engine ends these requests
        self._hand_over()
        self._admission.settle()
        self._groups.dropped_by_stream += self._admission.take_dropped()
        self.close()

    def close(self) -> None:
        """Publish the final counts."""
        self._engine_status.report("done", "", self._engine_progress, now=True)
        self._actor_status.report("done", "", self._actor_progress, now=True)

    # ---- the status of engine and actor

    def _report(self, verdict: Verdict, *, stepped: bool) -> None:
        """Report an iteration: why no more groups were started, and whether the engine made a step."""
        if not self._admission.opened:  # another process runs the evaluation before training: that time is not idle
            self._ready_since_s = self._clock()
        if self._timeline is not None:
            self._timeline.note(self._engine.progress)
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

    def _publish(self, activity: str, wait: Verdict = ALLOWED) -> None:
        """Publish the status of the actor (`activity`, or what it waits for if `wait` is a denial) and of the engine."""
        state: StageState = "working" if wait.allowed else "waiting"
        self._actor_status.report(state, wait.waiting_for or activity, self._actor_progress, waits_for=wait.waits_for)
        in_progress, actor = self._engine.in_progress, self._actor_name
        detail = f"{in_progress} sequences in progress" if in_progress else f"requests from the {actor}"
        self._engine_status.report(
            self._engine_state, detail, self._engine_progress, waits_for=() if in_progress else (actor,)
        )

    @property
    def _engine_state(self) -> StageState:
        return "working" if self._engine.in_progress else "waiting"

    def _engine_progress(self) -> EngineProgress:
        return msgspec.structs.replace(
            self._engine.progress(),
            ready_s=self._clock() - self._ready_since_s,
            probes=tuple(self._probe.readings),
            slots=self._slots,
            notes=self._groups.context.notes,
        )

    def _actor_progress(self) -> ActorProgress:
        return msgspec.structs.replace(
            self._groups.progress(),
            evaluations=dict(self._evaluations.rewards),
            evaluated=self._evaluations.answered,
            evaluating=self._evaluations.status,
        )


class WeightProbe:
    """After each update, samples a token whose log-prob the trainer compares with its own model's.

    Checksums prove what an engine was sent and what it stores; only its output proves which weights it uses. The probe is an
    ordinary request for one token after the prompt that the trainer publishes on `board`, so it works with any engine.

    `stage` is the engine's name there. `readings` are the latest results, oldest first. `unreported` is true if there are
    new ones; the reader resets it.
    """

    def __init__(self, engine: AsyncEngine, board: Board, stage: str) -> None:
        self.readings: deque[ProbeReading] = deque(maxlen=READINGS_KEPT)
        self.unreported = False
        self._engine = engine
        self._board = board
        self._stage = stage
        self._prompt_ids: tuple[int, ...] = ()
        self._asked = -1
        self._tasks: set[asyncio.Task[None]] = set()

    def ask(self) -> None:
        """Probe every replica of the model, once per version. Does not wait."""
        version = self._engine.version
        if not self._prompt_ids and (trainer := trainer_progress(self._board.read(TRAINER))):
            self._prompt_ids = tuple(trainer.probe_ids)
        if version == self._asked or not self._prompt_ids:
            return
        self._asked = version
        for copy in range(self._engine.copies):
            request = GenerationRequest(
                id=f"probe-v{version}.{copy}",
                prompt_ids=self._prompt_ids,
                sampling=SamplingParams(max_tokens=1),
                copy=copy,
            )
            task = asyncio.create_task(self._read(request, copy))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _read(self, request: GenerationRequest, copy: int) -> None:
        try:
            completion = await asyncio.wait_for(self._engine.generate(request), PROBE_TIMEOUT_S)
        except (RequestError, TimeoutError):
            return
        versions = {span.version for span in (*completion.prompt_versions, *completion.weight_versions)}
        if len(versions) == 1 and completion.token_ids:  # otherwise an update came during the probe
            name = self._stage if self._engine.copies == 1 else f"{self._stage}[{copy}]"
            reading = ProbeReading(
                engine=name, version=versions.pop(), token_id=completion.token_ids[0], logprob=completion.logprobs[0]
            )
            self.readings.append(reading)
            self.unreported = True
